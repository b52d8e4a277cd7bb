"""Plans, predictions and certificates as text for a terminal (rich renderables)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.costs.uncertainty import own_miss
from planner.native import CAVEAT_SOURCE
from planner.plan import PlacedLayer, Plan
from planner.predict import FULL_TIME
from planner.prediction import Certificate, Prediction
from planner.report.ties import tie_lines, ties
from planner.units import bytes_text, seconds_text

MOST_SIZES = 16
"""Stages that are told one by one in a line."""
AMORTISED_STEPS = 1000
"""Over which the seconds of compilation are shown."""
NOTED = (CAVEAT_SOURCE, FULL_TIME.source)
"""Sources of assumptions that no answer leaves out: it cannot be launched, or its time is a bound.
"""


def answer_text(
    plan: Plan,
    prediction: Prediction,
    certificate: Certificate | None = None,
    *,
    explain: bool = True,
) -> RenderableType:
    """Return layout, stages, time, memory and proof of a plan, in at most ten lines.

    With `explain` follow each stage, what was assumed, and how the others fell.
    """
    rows: list[RenderableType] = [
        Text(f"{plan.model.name} on {plan.cluster}: {plan.layout.text()}", style="bold"),
        f"stages: {stages_text(plan)}",
        *prediction_lines(prediction),
    ]
    if certificate is not None:
        rows += proof_lines(certificate)
        step_s, miss = prediction.step_time_s, own_miss(prediction.step_parts)
        low_s, high_s = step_s * (1 - miss), step_s * (1 + miss)
        rows += tie_lines(plan.layout.text(), ties(prediction, certificate), low_s, high_s)
    if explain:
        rows += ["", plan_table(plan, prediction), *assumption_lines(prediction)]
        rows += ["", *certificate_lines(certificate)] if certificate is not None else []
    return Group(*rows)


def stages_text(plan: Plan) -> str:
    """Return how many layers stages have, on what, and what is recomputed, in one line."""
    sizes = [len(stage.layers) for stage in plan.stages]
    if len(sizes) > MOST_SIZES:
        each = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        layers = f"{len(sizes)} of {each} layers"
    else:
        layers = (
            f"{'/'.join(map(str, sizes))} layers" if len(sizes) > 1 else f"1 of {sizes[0]} layers"
        )
    every = [layer for stage in plan.stages for layer in stage.layers]
    parts = [layers, f"recompute {recompute_text(every)}"]
    moved = [layer.activations for layer in every if layer.activations != "keep"]
    parts += [f"{name} activations of {moved.count(name)}" for name in dict.fromkeys(moved)]
    if plan.shares:
        parts.append(f"micro-batches {shares_text(plan)}")
    elif plan.groups:
        on = [name for name, _ in groupby(stage.group or "" for stage in plan.stages)]
        parts.append(f"on {', '.join(on)}" if len(on) <= MOST_SIZES else "on several groups")
    return ", ".join(parts)


def plan_table(plan: Plan, prediction: Prediction | None = None) -> Table:
    """Return one row per stage: devices where they differ, layers, recompute, seconds, memory."""
    table = Table()
    for name in ("stage", *(("devices",) if plan.groups else ()), "layers", "recompute"):
        table.add_column(name)
    if prediction is not None:
        for name in ("forward", "backward", "peak memory", "of"):
            table.add_column(name, justify="right")
    for index, stage in enumerate(plan.stages):
        row = [str(index), *((stage.group or shares_text(plan),) if plan.groups else ())]
        row += [layers_text(stage.layers), recompute_text(stage.layers)]
        if prediction is not None:
            cost = prediction.stages[index]
            row += [
                seconds_text(cost.forward_s),
                seconds_text(cost.backward_s),
                bytes_text(cost.peak_memory_bytes),
                bytes_text(cost.memory_capacity_bytes),
            ]
        table.add_row(*row)
    return table


def prediction_lines(prediction: Prediction) -> list[RenderableType]:
    """Return step time with its range and causes, memory by cause, and what must be noted."""
    mfu = f", MFU {100 * prediction.mfu:.1f} %" if prediction.mfu else ""
    lines: list[RenderableType] = [
        f"step {seconds_text(prediction.step_time_s)} "
        f"({seconds_text(prediction.step_time_low_s)} to "
        f"{seconds_text(prediction.step_time_high_s)}), "
        f"{prediction.throughput_text}{mfu}{_compile_text(prediction)}",
        "time:   " + _shares(prediction.step_parts, seconds_text),
    ]
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    where = f"memory: stage {prediction.stages.index(fullest)}: "
    lines.append(where + _shares(fullest.memory_parts, bytes_text))
    if not prediction.fits:
        kept = "counted with what its allocator adds where memory is short"
        lines.append(Text(f"does not fit in memory ({kept})", style="bold red"))
    if prediction.notes:
        lines.append(Text(f"note:   {'; '.join(prediction.notes)}"))
    return lines + list(_assumed(prediction, noted=True))


def _compile_text(prediction: Prediction) -> str:
    """Return what compilation takes once, and what that is of a run."""
    if not prediction.compile_s or not prediction.step_time_s:
        return ""
    share = prediction.compile_s / (AMORTISED_STEPS * prediction.step_time_s)
    return (
        f", {seconds_text(prediction.compile_s)} to compile first "
        f"({100 * share:.2g} % of {AMORTISED_STEPS:,} steps)"
    )


def assumption_lines(prediction: Prediction) -> list[RenderableType]:
    """Return what was assumed, but for what is noted anyway."""
    return list(_assumed(prediction, noted=False))


def _assumed(prediction: Prediction, *, noted: bool) -> Iterator[Text]:
    for item in prediction.assumptions:
        if (item.source in NOTED) == noted:
            text = f"({item.provenance}): {item.what} [{item.source}]"
            yield Text(f"note {text}" if noted else f"assumed {text}", style="" if noted else "dim")


def proof_lines(certificate: Certificate) -> list[RenderableType]:
    """Return what is proven of the plan, by each measure of a step."""
    proof = certificate.plan
    if proof is None:
        return [Text(certificate.statement)]
    return [Text(f"proof:  {proof.closed_form}"), Text(f"        {proof.simulated}")]


def certificate_lines(certificate: Certificate) -> list[RenderableType]:
    """Return the counts behind a proof, the closest losers, and the plans that were simulated."""
    counts = ", ".join(f"{name} {count}" for name, count in certificate.counts.items() if count)
    lines: list[RenderableType] = [
        f"proof:  {counts}",
        f"        in the closed form {certificate.model}",
    ]
    for loser in certificate.runners_up:
        if loser.objective_s is not None:
            figure = seconds_text(loser.objective_s)
        else:
            figure = f">= {seconds_text(loser.lower_bound_s or 0.0)}"
        lines.append(f"        {loser.layout}: {figure} ({loser.reason})")
    if certificate.simulated is not None:
        lines.append(f"simulated: {certificate.simulated.statement}")
        lines.append(f"        lower bound: {certificate.simulated.bound}")
        lines += [
            f"        {one.layout}: {one.step_time_s:.6g} s, closed form {one.objective_s:.6g} s"
            for one in certificate.simulated.finalists
        ]
    return lines


def shares_text(plan: Plan) -> str:
    """Return which data-parallel ranks take how many micro-batches of a step."""
    counts: dict[tuple[str, int], int] = {}
    for share in plan.shares or ():
        key = (share.group, share.micro_batches)
        counts[key] = counts.get(key, 0) + plan.mesh.devices // len(plan.shares or ())
    return ", ".join(
        f"{devices} x {group}: {micro_batches}"
        for (group, micro_batches), devices in counts.items()
    )


def layers_text(layers: Sequence[PlacedLayer]) -> str:
    """Return layer names with runs shortened.

    >>> names = ["embedding", "block.0", "block.1", "block.2"]
    >>> layers_text([PlacedLayer(layer=name) for name in names])
    'embedding, block.0-2'
    """
    return ", ".join(_runs(item.layer for item in layers))


def recompute_text(layers: Sequence[PlacedLayer]) -> str:
    """Return how many layers take which recompute choice.

    >>> recompute_text([PlacedLayer(layer="a"), PlacedLayer(layer="b", recompute="full")])
    'none 1, full 1'
    """
    choices = [item.recompute for item in layers]
    if len(set(choices)) == 1:
        return choices[0]
    names = ("none", "selective", "full")
    return ", ".join(f"{name} {choices.count(name)}" for name in names if name in choices)


def _runs(names: Iterable[str]) -> list[str]:
    runs: list[tuple[str, int | None, int | None]] = []
    for name in names:
        stem, dot, number = name.rpartition(".")
        index = int(number) if dot and number.isdecimal() else None
        if index is not None and runs and runs[-1][0] == stem and runs[-1][2] == index - 1:
            runs[-1] = (stem, runs[-1][1], index)
        else:
            runs.append((stem, index, index) if index is not None else (name, None, None))
    return [
        stem if first is None else f"{stem}.{first}" if first == last else f"{stem}.{first}-{last}"
        for stem, first, last in runs
    ]


def _shares(parts: dict[str, float], shown: object) -> str:
    """Return the parts of a sum, largest first, those under 1 % left out."""
    assert callable(shown)
    total = sum(parts.values()) or 1.0
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {shown(size)}" for name, size in ranked if size >= 0.01 * total)
