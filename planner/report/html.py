"""One self-contained HTML page about a plan: time, memory, pipeline timeline, proof.

The page opens without a network: plotly's script is inside.  Colours follow the reader's light or
dark setting, and every figure of a picture stands in a table too.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from planner.documents.cluster import ClusterSpec
from planner.documents.plan import Plan
from planner.documents.prediction import Certificate, Prediction, StagePrediction
from planner.documents.units import GIB, bytes_text, seconds_text
from planner.errors.shown import label
from planner.process.on_use import OnUse
from planner.report.mesh_picture import COLOURS, axes_of, mesh_picture
from planner.report.text import layers_text, recompute_text, why_text
from planner.schedules.schedule import rank_of_stage
from planner.schedules.simulate import Timeline
from planner.search.answer import Alternative

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = OnUse("plotly.graph_objects", "an HTML report")

SHADES = {
    "F": ("forward", 1.0),
    "B": ("backward", 0.55),
    "I": ("gradients of inputs", 0.55),
    "W": ("gradients of weights", 0.3),
}
"""Names of kinds of actions, and how opaque they are."""
GRID = "rgba(128, 128, 128, 0.25)"
MOST_SPANS = 24_000
"""Actions drawn; of a longer timeline each stage shows its first ones."""


def page(
    plan: Plan,
    prediction: Prediction,
    *,
    cluster: ClusterSpec | None = None,
    timeline: Timeline | None = None,
    certificate: Certificate | None = None,
    choices: Sequence[Alternative] = (),
    measured: list[tuple[str, str, str, str]] | None = None,
) -> str:
    """Return the report; `measured` rows are (what, predicted, measured, error).

    The mesh is drawn on `cluster`.  `choices` are the plan and the usual ones beside it, which say
    why it was chosen.
    """
    ranks = memory_of_ranks(plan, prediction)
    figures = [("Memory by pipeline rank", figure_html(memory_figure(ranks), first=True))]
    figures.append(("Step time by cause", figure_html(time_figure(prediction))))
    if timeline is not None:
        figures.append(("Pipeline timeline", figure_html(timeline_figure(timeline))))
        memory = figure_html(resident_figure(timeline, ranks))
        figures.append(("Memory over a step", memory))
    template = resources.files("planner.report").joinpath("plan.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        plan=plan,
        prediction=prediction,
        certificate=certificate,
        measured=measured,
        choices=choices,
        why=why_text(choices) if choices else "",
        axes=axes_of(plan.layout, cluster),
        mesh=mesh_picture(plan.layout, cluster) if cluster and plan.groups is None else "",
        ranks=ranks,
        figures=figures,
        layers_text=layers_text,
        recompute_text=recompute_text,
        seconds=seconds_text,
        size=bytes_text,
    )


def memory_of_ranks(plan: Plan, prediction: Prediction) -> list[tuple[str, StagePrediction]]:
    """Return each pipeline rank, with the stages that it holds, and its memory.

    Stages of one rank share its memory, which the prediction of each of them says in full.
    """
    each = plan.virtual_stages
    homes = rank_of_stage(plan.schedule, stages=len(plan.stages), virtual_stages=each)
    rows = []
    for rank in range(plan.mesh.pipeline):
        own = [stage for stage, home in enumerate(homes) if home == rank]
        named = f"stage {own[0]}" if each == 1 else f"stages {', '.join(map(str, own))}"
        rows.append((f"rank {rank}: {named}", prediction.stages[own[0]]))
    return rows


def memory_figure(rows: Sequence[tuple[str, StagePrediction]]) -> go.Figure:
    """Stacked bars: GiB by cause on each pipeline rank, with the device's capacity as a line."""
    names = dict.fromkeys(name for _, stage in rows for name in stage.memory_parts)
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                x=[rank for rank, _ in rows],
                y=[stage.memory_parts.get(name, 0.0) / GIB for _, stage in rows],
            )
            for name in names
        ]
    )
    capacity = max(stage.memory_capacity_bytes for _, stage in rows) / GIB
    figure.add_hline(y=capacity, line_dash="dash", annotation_text="capacity")
    figure.update_layout(barmode="stack", yaxis_title="GiB")
    return figure


def time_figure(prediction: Prediction) -> go.Figure:
    """Waterfall: milliseconds of a step by cause, on the critical stage."""
    parts = {name: size for name, size in prediction.step_parts.items() if size > 0}
    figure = go.Figure(
        go.Waterfall(
            x=[*parts, "step"],
            y=[*(1e3 * size for size in parts.values()), 0.0],
            measure=[*("relative" for _ in parts), "total"],
        )
    )
    figure.update_layout(yaxis_title="ms")
    return figure


def phases(timeline: Timeline) -> tuple[float, float]:
    """Return until when the pipeline fills, and from when it drains.

    It is full once every rank has begun, and drains once the first rank has done its last action.
    """
    working = [rank for rank in range(len(timeline.orders)) if timeline.orders[rank]]
    filled_s = max(timeline.starts_s[rank][0] for rank in working)
    drained_s = min(timeline.finish_s(rank) for rank in working)
    return min(filled_s, drained_s), max(filled_s, drained_s)


def timeline_figure(timeline: Timeline) -> go.Figure:
    """Gantt chart of every action on every pipeline rank: a colour for each of a rank's stages.

    Forwards are full, backwards lighter, gradients of weights lighter still; what fills and drains
    the pipeline is shaded.  Dragging zooms, a double click shows all.
    """
    figure = go.Figure()
    ranks = len(timeline.orders)
    most = MOST_SPANS // ranks
    turns = [_turns(timeline, rank) for rank in range(ranks)]
    for turn in range(max(map(len, turns))):
        for kind, (name, opacity) in SHADES.items():
            spans = [
                (rank, start_s, end_s, action)
                for rank in range(ranks)
                for start_s, end_s, action in timeline.actions(rank)[:most]
                if action.kind == kind and turns[rank].get(action.stage) == turn
            ]
            if not spans:
                continue
            which = f", stage {turn + 1} of the rank" if max(map(len, turns)) > 1 else ""
            figure.add_bar(
                name=f"{name}{which}",
                orientation="h",
                y=[f"rank {rank}" for rank, *_ in spans],
                base=[1e3 * start_s for _, start_s, _, _ in spans],
                x=[1e3 * (end_s - start_s) for _, start_s, end_s, _ in spans],
                text=[str(action.micro_batch) for *_, action in spans],
                hovertext=[
                    f"{name}, stage {action.stage}, micro-batch {action.micro_batch}: "
                    f"{seconds_text(end_s - start_s)}"
                    for _, start_s, end_s, action in spans
                ],
                hoverinfo="text",
                textposition="inside",
                marker={
                    "color": _faded(COLOURS[turn % len(COLOURS)], opacity),
                    "line": {"width": 0.5, "color": "#888"},
                },
            )
    if ranks > 1:
        filled_s, drained_s = phases(timeline)
        for name, start_s, end_s, place in (
            ("fills", 0.0, filled_s, "top left"),
            ("steady", filled_s, drained_s, "top"),
            ("drains", drained_s, timeline.makespan_s, "top right"),
        ):
            figure.add_vrect(
                x0=1e3 * start_s,
                x1=1e3 * end_s,
                fillcolor="#888",
                opacity=0.0 if name == "steady" else 0.15,
                line_width=0,
                layer="below",
                annotation_text=name,
                annotation_position=place,
                annotation_yshift=18,
            )
    figure.update_layout(barmode="overlay", xaxis_title="ms", dragmode="zoom")
    figure.update_layout(height=max(360, 120 + 26 * ranks), margin={"t": 40})
    figure.update_yaxes(autorange="reversed", dtick=1)
    return figure


def _faded(colour: str, opacity: float) -> str:
    """Return `#rrggbb` with an opacity, which a legend shows too.

    >>> _faded("#4c78a8", 0.5)
    'rgba(76, 120, 168, 0.5)'
    """
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return f"rgba({red}, {green}, {blue}, {opacity})"


def _turns(timeline: Timeline, rank: int) -> dict[int, int]:
    """Return which of a rank's stages, from the model's first on, each of its stages is."""
    stages = sorted({action.stage for action in timeline.orders[rank]})
    return {stage: turn for turn, stage in enumerate(stages)}


def resident_gib(
    timeline: Timeline, ranks: Sequence[tuple[str, StagePrediction]]
) -> dict[int, list[tuple[float, float]]]:
    """Return of each rank when its memory changes, in ms, and what it then holds, in GiB.

    Activations are in flight from a forward to its backward (or the gradients of its weights);
    their predicted peak is divided evenly over the most that are in flight at once.
    """
    found = {}
    for rank, order in enumerate(timeline.orders):
        split = any(action.kind == "W" for action in order)
        ends = "W" if split else "B"
        held, moments = 0, [(0.0, 0)]
        for start_s, end_s, action in timeline.actions(rank):
            if action.kind == "F":
                held += 1
                moments.append((start_s, held))
            elif action.kind == ends or (action.kind == "B" and split):
                held -= 1
                moments.append((end_s, held))
        memory = ranks[rank][1]
        activations = memory.memory_parts.get("activations", 0.0)
        kept = memory.peak_memory_bytes - activations
        each = activations / max(1, *(count for _, count in moments))
        found[rank] = [(1e3 * at, (kept + each * count) / GIB) for at, count in moments]
    return found


def resident_figure(timeline: Timeline, ranks: Sequence[tuple[str, StagePrediction]]) -> go.Figure:
    """Lines: GiB that each pipeline rank holds while a step runs."""
    figure = go.Figure()
    for rank, moments in resident_gib(timeline, ranks).items():
        figure.add_scatter(
            name=ranks[rank][0],
            x=[at for at, _ in moments],
            y=[size for _, size in moments],
            line={"shape": "hv", "width": 1.5},
            mode="lines",
        )
    figure.update_layout(xaxis_title="ms", yaxis_title="GiB")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _labels(shown: Any) -> Any:
    """Return text, or each text in lists, as plotly shows it without taking it for HTML."""
    if isinstance(shown, str):
        return label(shown)
    if isinstance(shown, list | tuple):
        return [_labels(one) for one in shown]
    return shown


def figure_html(figure: go.Figure, *, first: bool = False) -> str:
    """Return a figure as an HTML fragment; the first carries plotly's script."""
    for trace in figure.data:
        for place in ("name", "text", "hovertext", "x", "y"):
            if place in trace and trace[place] is not None:
                trace[place] = _labels(trace[place])
    if figure.layout.height is None:
        figure.update_layout(height=360, margin={"l": 60, "r": 20, "t": 20, "b": 50})
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888"},
        legend={"orientation": "h", "y": -0.25},
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    html: Any = figure.to_html(
        full_html=False,
        include_plotlyjs=first,
        config={"responsive": True, "displaylogo": False, "displayModeBar": False},
    )
    return str(html)
