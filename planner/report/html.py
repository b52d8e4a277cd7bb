"""One self-contained HTML page about a plan: time, memory, pipeline timeline, proof.

The page opens without a network, and its pictures without a script.  Colours follow the reader's
light or dark setting, and every figure of a picture is in a table too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from meshwright.planner.catalog import rents
from meshwright.planner.documents.units import GIB, bytes_text, count_text, seconds_text
from meshwright.planner.report import svg
from meshwright.planner.report.mesh_picture import axes_of, mesh_picture
from meshwright.planner.report.text import (
    all_stages,
    layers_text,
    limited_text,
    pipelines_text,
    recompute_text,
    why_text,
)
from meshwright.planner.report.timeline_picture import left_out, timeline_key, timeline_picture
from meshwright.planner.whatif.formatting import short_usd_text
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_DAY
from meshwright.planner.whatif.pricing.offers import rent_of
from meshwright.planner.whatif.study import Rental
from meshwright.planner.whatif.uncertain_value import exact

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Certificate, Prediction, StagePrediction
    from meshwright.planner.schedules.simulate import Timeline
    from meshwright.planner.search.answer import Alternative

MOST_MOMENTS = 8_000
"""Changes of memory drawn; of a longer step each rank shows its first ones."""


def page(
    plan: Plan,
    prediction: Prediction,
    *,
    cluster: ClusterSpec | None = None,
    timelines: Sequence[Timeline] = (),
    certificate: Certificate | None = None,
    choices: Sequence[Alternative] = (),
    why: str = "",
    measured: list[tuple[str, str, str, str]] | None = None,
) -> str:
    """Return the report; `measured` rows are (what, predicted, measured, error).

    The mesh is drawn on `cluster`, and a timeline for each kind of pipelines.  `choices` are the
    plan and the usual ones beside it; they state why it was chosen, unless `why` does.
    """
    ranks = memory_of_ranks(plan, prediction)
    figures = [
        ("Memory by pipeline rank", memory_chart(ranks)),
        ("Step time by cause", time_chart(prediction)),
    ]
    drawn = _drawn(plan, timelines)
    for of_kind, timeline, first in drawn:
        figures.append((f"Pipeline timeline{of_kind}", timeline_picture(timeline)))
        of_kind_ranks = ranks[first : first + len(timeline.orders)]
        figures.append((f"Memory over a step{of_kind}", resident_chart(timeline, of_kind_ranks)))
    template = resources.files("meshwright.planner.report").joinpath("plan.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        css=svg.page_css(),
        plan=plan,
        prediction=prediction,
        fullest=max(prediction.stages, key=lambda s: s.peak_memory_bytes / s.memory_capacity_bytes),
        daily=count_text(prediction.tokens_per_s * SECONDS_PER_DAY),
        day_usd=_day_usd(cluster),
        assumptions=list(
            {(a.what, a.provenance, a.source): a for a in prediction.assumptions}.values()
        ),
        certificate=certificate,
        measured=measured,
        choices=distinct_choices(choices),
        why=why or (limited_text(prediction, why_text(choices)) if choices else ""),
        axes=axes_of(plan.layout, cluster),
        mesh=mesh_picture(plan.layout, cluster) if cluster and plan.groups is None else "",
        ranks=ranks,
        figures=figures,
        timelines={
            f"Pipeline timeline{of_kind}": (timeline_key(timeline), left_out(timeline))
            for of_kind, timeline, _ in drawn
        },
        stages=all_stages(plan),
        pipelines=pipelines_text(plan) if plan.other_pipelines else "",
        layers_text=layers_text,
        recompute_text=recompute_text,
        seconds=seconds_text,
        size=bytes_text,
    )


def _drawn(plan: Plan, timelines: Sequence[Timeline]) -> list[tuple[str, Timeline, int]]:
    """Return timelines of several ranks, each with whose it is and its first rank of all kinds."""
    drawn, first = [], 0
    for number, timeline in enumerate(timelines):
        if len(timeline.orders) > 1:
            of_kind = f", pipelines {number}" if plan.other_pipelines else ""
            drawn.append((of_kind, timeline, first))
        first += len(timeline.orders)
    return drawn


def distinct_choices(choices: Sequence[Alternative]) -> list[Alternative]:
    """Return choices that are different plans: one plan is one row, with all that it is."""
    rows: dict[object, Alternative] = {}
    for choice in choices:
        key = choice.what if choice.prediction is None else choice.prediction.layout_text
        first = rows.get(key)
        rows[key] = choice if first is None else replace(first, what=f"{first.what}, {choice.what}")
    return list(rows.values())


def _day_usd(cluster: ClusterSpec | None) -> tuple[str, str] | None:
    """Return the cost of a day of a cluster's rent, and its price; None if it is unknown."""
    if cluster is None:
        return None
    rent = rent_of(Rental(), cluster, rents())
    if rent.usd_per_device_hour is None:
        return None
    usd = rent.usd_per_device_hour.times(24.0 * cluster.devices)
    return short_usd_text(exact(usd.value)), f"{short_usd_text(usd)}; {rent.how.split('; ')[0]}"


def memory_of_ranks(plan: Plan, prediction: Prediction) -> list[tuple[str, StagePrediction]]:
    """Return each pipeline rank, with its stages and its memory.

    Stages of one rank share its memory, which the prediction of each contains in full.
    """
    rows = []
    before = 0
    for number, kind in enumerate(plan.kinds):
        homes = [kind.rank_of_stage(stage) for stage in range(len(kind.stages))]
        of_kind = f"pipelines {number}, " if plan.other_pipelines else ""
        for rank in range(kind.mesh.pipeline):
            stages_here = [stage for stage, home in enumerate(homes) if home == rank]
            named = (
                f"stage {before + stages_here[0]}"
                if kind.virtual_stages == 1
                else f"stages {', '.join(map(str, stages_here))}"
            )
            stage = prediction.stages[before + stages_here[0]]
            rows.append((f"{of_kind}rank {rank}: {named}", stage))
        before += len(homes)
    return rows


def memory_chart(rows: Sequence[tuple[str, StagePrediction]]) -> str:
    """Return stacked bars: GiB by cause on each pipeline rank, with the device's capacity."""
    capacity = max(stage.memory_capacity_bytes for _, stage in rows) / GIB
    parts = [
        (rank, {name: size / GIB for name, size in stage.memory_parts.items()})
        for rank, stage in rows
    ]
    return svg.stacked_bars("Memory by pipeline rank", parts, "GiB", limit=("capacity", capacity))


def time_chart(prediction: Prediction) -> str:
    """Return the seconds of a step by cause, on the critical stage."""
    longest_s = sum(prediction.step_parts.values())
    scale, unit = (1.0, "s") if longest_s >= 1 else (1e3, "ms")
    parts = {name: scale * size for name, size in prediction.step_parts.items() if size > 0}
    return svg.stacked_bars("Step time by cause", [("step", parts)], unit)


def resident_gib(
    timeline: Timeline, ranks: Sequence[tuple[str, StagePrediction]]
) -> dict[int, list[tuple[float, float]]]:
    """Return of each rank when its memory changes, in ms, and its bytes then, in GiB.

    Activations are in flight from a forward to its backward (or the gradients of its weights);
    their predicted peak is divided evenly over the most that are in flight at once.
    """
    marks = {}
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
        marks[rank] = [(1e3 * at, (kept + each * count) / GIB) for at, count in moments]
    return marks


def resident_chart(timeline: Timeline, ranks: Sequence[tuple[str, StagePrediction]]) -> str:
    """Return lines: GiB of each pipeline rank while a step runs."""
    most = MOST_MOMENTS // len(ranks)
    return svg.steps(
        "Memory over a step",
        [
            svg.StepCurve(name=ranks[rank][0], points=tuple(moments[:most]))
            for rank, moments in resident_gib(timeline, ranks).items()
        ],
        "ms",
        "GiB",
    )
