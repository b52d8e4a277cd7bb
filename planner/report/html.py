"""One self-contained HTML page about a plan: time, memory, pipeline timeline, proof.

The page opens without a network: plotly's script is inside.  Colours follow the reader's light or
dark setting, and every figure of a picture stands in a table too.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from planner.on_use import OnUse
from planner.plan import Plan
from planner.prediction import Certificate, Prediction
from planner.report.text import layers_text, recompute_text
from planner.shown import label
from planner.simulate import Timeline
from planner.units import GIB, bytes_text, seconds_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = OnUse("plotly.graph_objects", "an HTML report")

FORWARD, BACKWARD, WEIGHTS = "#4c78a8", "#f58518", "#54a24b"
MOST_SPANS = 4000
"""Actions drawn; of a longer timeline each stage shows its first ones."""


def page(
    plan: Plan,
    prediction: Prediction,
    *,
    timeline: Timeline | None = None,
    certificate: Certificate | None = None,
    measured: list[tuple[str, str, str, str]] | None = None,
) -> str:
    """Return the report; `measured` rows are (what, predicted, measured, error)."""
    figures = [("Memory by stage", figure_html(memory_figure(prediction), first=True))]
    figures.append(("Step time by cause", figure_html(time_figure(prediction))))
    if timeline is not None:
        figures.append(("Pipeline timeline", figure_html(timeline_figure(timeline))))
    template = resources.files("planner.report").joinpath("plan.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        plan=plan,
        prediction=prediction,
        certificate=certificate,
        measured=measured,
        figures=figures,
        layers_text=layers_text,
        recompute_text=recompute_text,
        seconds=seconds_text,
        size=bytes_text,
    )


def memory_figure(prediction: Prediction) -> go.Figure:
    """Stacked bars: GiB by cause on each stage, with the device's capacity as a line."""
    stages = [f"stage {index}" for index in range(len(prediction.stages))]
    names = dict.fromkeys(name for stage in prediction.stages for name in stage.memory_parts)
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                x=stages,
                y=[stage.memory_parts.get(name, 0.0) / GIB for stage in prediction.stages],
            )
            for name in names
        ]
    )
    capacity = max(stage.memory_capacity_bytes for stage in prediction.stages) / GIB
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


def timeline_figure(timeline: Timeline) -> go.Figure:
    """Gantt chart of every forward and backward on every pipeline rank."""
    figure = go.Figure()
    most = MOST_SPANS // len(timeline.orders)
    for kind, name, colour in (
        ("F", "forward", FORWARD),
        ("B", "backward", BACKWARD),
        ("I", "gradients of inputs", BACKWARD),
        ("W", "gradients of weights", WEIGHTS),
    ):
        spans = [
            (rank, start_s, end_s, action.micro_batch)
            for rank in range(len(timeline.orders))
            for start_s, end_s, action in timeline.actions(rank)[:most]
            if action.kind == kind
        ]
        if not spans:
            continue
        figure.add_bar(
            name=name,
            orientation="h",
            y=[f"stage {rank}" for rank, *_ in spans],
            base=[1e3 * start_s for _, start_s, _, _ in spans],
            x=[1e3 * (end_s - start_s) for _, start_s, end_s, _ in spans],
            text=[str(micro_batch) for *_, micro_batch in spans],
            marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
        )
    figure.update_layout(barmode="overlay", xaxis_title="ms")
    figure.update_yaxes(autorange="reversed")
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
        for place in ("name", "text", "x", "y"):
            if place in trace and trace[place] is not None:
                trace[place] = _labels(trace[place])
    figure.update_layout(
        height=360,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888"},
        legend={"orientation": "h", "y": -0.25},
    )
    html: Any = figure.to_html(
        full_html=False,
        include_plotlyjs=first,
        config={"responsive": True, "displaylogo": False},
    )
    return str(html)
