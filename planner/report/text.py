"""Plans, predictions and certificates as text for a terminal (rich renderables).

Plans that no prediction distinguishes: those closer to the best than its error bar.

Rates of kernels err for all layouts of one model on one machine alike, so the bar of such plans is
the uncertainty of links and of all constants without a fit (`planner.costs.uncertainty`).  A tie
does not claim that two are equal, but that only a measurement decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table

from meshwright.planner.costs.uncertainty import LAYOUT_ERROR, own_miss, words_notes
from meshwright.planner.documents.plan import Job, PlacedLayer, Plan, Stage
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.units import GIB, bytes_text, percent_text, seconds_text
from meshwright.planner.frameworks.native_limits import CAVEAT_SOURCE
from meshwright.planner.report.facts import Fact, Summary, plain_table
from meshwright.planner.search.answer import Alternative
from meshwright.planner.search.proof_account import (
    LEFT_OUT,
    LEFT_OUT_OF_PARTS,
    LEFT_OUT_OF_SOME,
)


def ties(prediction: Prediction, certificate: Certificate) -> list[str]:
    """Return the simulated layouts within the error bar of the plan."""
    bar = 1 + own_miss(prediction.step_parts)
    ties = [
        finalist.layout
        for finalist in certificate.finalists
        if finalist.step_time_s <= bar * prediction.step_time_s
    ]
    shown = (prediction.layout, prediction.layout_text)
    return [layout for layout in dict.fromkeys(ties) if layout not in shown]


def parts(layout: str) -> int:
    """Return how much a layout's text requests: axes of several ranks, sharding, schedules.

    >>> parts("tp=1 pp=1 dp=8 zero=3 micro_batch=1x4"), parts("tp=2 pp=4 dp=1 zero=0 1f1b v=2")
    (2, 3)
    """
    degrees = re.findall(r"\b(?:tp|pp|dp|cp|ep|vpp|v)=(\d+)", layout)
    sharded = re.search(r"\bzero=[1-3]", layout) is not None
    return sum(int(n) > 1 for n in degrees) + sharded + layout.count("stages=")


def tie_text(best: str, others: Sequence[str], low_s: float, high_s: float) -> str:
    """Return that layouts tie, and which of them is simplest; nothing if there are none."""
    if not others:
        return ""
    simplest = min(others, key=parts)
    simpler = f"; the simplest: {simplest}" if parts(simplest) < parts(best) else ""
    return (
        f"{len(others)} other plan{'s' * (len(others) > 1)} within the error of prediction "
        f"({seconds_text(low_s)} to {seconds_text(high_s)}){simpler}"
    )


MOST_STAGES = 16
"""Rows of a table of stages; of more, neighbours share one."""
MOST_SIZES = 16
"""Stages that are listed one by one in a line."""
ROUNDED = 5e-4
"""A gap that is shown as none."""
AMORTISED_STEPS = 1000
"""Number of steps over which the seconds of compilation are shown."""
SURE = 0.95
"""A plan that fits with a lower probability is extra to."""
NOTED = (CAVEAT_SOURCE,)
"""Sources of assumptions that no answer leaves out: it cannot be launched."""


def answer_text(
    plan: Plan,
    prediction: Prediction,
    certificate: Certificate | None = None,
    *,
    choices: Sequence[Alternative] = (),
    extra: Iterable[Fact] = (),
    explain: bool = True,
) -> RenderableType:
    """Return a plan, its time with range, memory, why it is chosen and `extra`, in ten lines.

    With `explain` all of it follows whole: each stage, the plans beside it, what was assumed, the
    proof, and how the others fell.
    """
    facts = [
        Fact(label="plan", text=prediction.layout_text),
        *([Fact(label="pipelines", text=pipelines_text(plan))] if plan.other_pipelines else []),
        Fact(label="stages", text="; ".join(map(stages_text, plan.kinds)), detail=True),
        *prediction_facts(prediction, whole=explain),
    ]
    if choices:
        facts.append(Fact(label="why", text=why_text(choices)))
    if certificate is not None:
        facts += proof_facts(certificate, whole=explain)
    facts = [
        replace(fact, text=limited_text(prediction, fact.text))
        if fact.label in ("why", "proof")
        else fact
        for fact in facts
    ]
    facts += extra
    shown: RenderableType = Summary(_title(plan), facts, whole=explain)
    if not explain:
        return shown
    rows = [shown, "", plan_table(plan, prediction)]
    rows += ["", choices_table(choices)] if choices else []
    if certificate is not None:
        step_s, miss = prediction.step_time_s, own_miss(prediction.step_parts)
        low_s, high_s = step_s * (1 - miss), step_s * (1 + miss)
        tied = tie_text(prediction.layout, ties(prediction, certificate), low_s, high_s)
        facts = [Fact(label="ties", text=tied)] if tied else []
        rows += ["", Summary("proof", [*certificate_facts(certificate), *facts], whole=True)]
    return Group(*rows, "", assumptions_text(prediction))


def limited_text(prediction: Prediction, text: str) -> str:
    """Return a reason or a proof; where inputs were not understood, it does not speak of them."""
    return f"of what was understood: {text}" if words_notes(prediction) else text


def _title(plan: Plan) -> str:
    return f"{plan.model.name} on {plan.cluster}: {job_text(plan.job)}"


def job_text(job: Job) -> str:
    """Return the training work of a step.

    >>> job_text(Job(seq_len=8192, global_batch=128))
    '128 samples of 8,192 tokens a step, bf16'
    >>> job_text(Job(seq_len=1, global_batch=64))  # images, for example
    '64 samples a step, bf16'
    """
    samples = "1 sample" if job.global_batch == 1 else f"{job.global_batch:,} samples"
    packed = f", documents of {job.document_len:,}" if job.document_len else ""
    adapters = ", adapters alone" if job.lora else ""
    if job.lora is not None and job.lora.packs_weights:
        adapters = f", adapters alone beside {job.lora.weights} weights"
    updates = "" if job.optimizer == "adamw" else f", {job.optimizer}"
    updates += ", no fp32 masters" if job.master_weights == "none" else ""
    if job.objective in ("dpo", "reward"):
        samples = samples.replace("sample", "pair")
    updates += "" if job.objective == "sft" else f", {job.objective}"
    tokens = f" of {job.seq_len:,} tokens" if job.seq_len > 1 else ""
    return f"{samples}{tokens} a step{packed}, {job.precision}{adapters}{updates}"


def why_text(choices: Sequence[Alternative]) -> str:
    """Return why the first of some plans was chosen, with the step times of the usual ones."""
    chosen, *others = choices
    error, ties = f"predicted ratios err by {100 * LAYOUT_ERROR:.0f} %", ""
    if 0 < chosen.more < ROUNDED:
        parts = ["the simplest of equally fast plans"]
    elif chosen.more > 0:
        parts = [f"the simplest plan within {_percent(chosen.more)} of the fastest, a tie: {error}"]
    else:
        parts = ["the fastest plan found"]
    for other in others:
        if other.prediction is None:
            parts.append(f"{other.what}: {other.why}")
        elif other.plan != chosen.plan and other.more > chosen.more:
            slower = other.more - chosen.more
            is_tie = slower <= LAYOUT_ERROR and chosen.more < ROUNDED
            tie = f" (a tie{ties or f': {error}'})" if is_tie else ""
            parts.append(f"{other.what} +{_percent(slower)}{tie}")
            ties = " too" if is_tie else ties
    return "; ".join(parts)


def why_shown(mine: Alternative) -> str:
    """Return the comparison of a shown plan with the fastest one of a new search for its job."""
    if mine.more < -ROUNDED:
        return "faster than the best plan of the search: it uses a choice that is not searched"
    if mine.more < ROUNDED:
        return "as fast as the best plan of the search"
    return f"{_percent(mine.more)} slower than the best plan of the search; it {mine.why}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def choices_table(choices: Sequence[Alternative]) -> Table:
    """Return plans beside the fastest: time, what they cost against it, memory, and why.

    A plan that is several of them has one row with all its names.
    """
    table = plain_table("", "step", cost_word(choices), "memory", "plan and why", right=(1, 2, 3))
    for names, choice in _named_choices(choices):
        if choice.prediction is None:
            table.add_row(names, "", "", "", choice.why)
            continue
        table.add_row(
            names,
            seconds_text(choice.prediction.step_time_s),
            f"{100 * choice.more:+.1f} %",
            bytes_text(choice.peak_bytes),
            f"{choice.prediction.layout_text}\n{choice.why}",
        )
    return table


def cost_word(choices: Sequence[Alternative]) -> str:
    """Return the word for more time: more cost too, if all plans have the same devices.

    >>> cost_word(())
    'cost'
    """
    devices = {
        (choice.plan.cluster, choice.plan.ranks + choice.prediction.idle_devices)
        for choice in choices
        if choice.plan is not None and choice.prediction is not None
    }
    return "cost" if len(devices) <= 1 else "time"


def _named_choices(choices: Sequence[Alternative]) -> Iterator[tuple[str, Alternative]]:
    rest = list(choices)
    while rest:
        first, *rest = rest
        same = [other for other in rest if first.plan is not None and other.plan == first.plan]
        rest = [other for other in rest if other not in same]
        yield ", ".join([first.what, *(other.what for other in same)]), first


def prediction_facts(prediction: Prediction, *, whole: bool = False) -> Iterator[Fact]:
    """Yield step time with its range and causes, memory by cause, and what must be noted."""
    yield Fact(label="time", text=time_text(prediction))
    causes = _shares(prediction.step_parts, seconds_text)
    yield Fact(label="causes", text=causes, detail=True, lines=1)
    if prediction.compile_s and prediction.step_time_s:
        yield Fact(label="compile", text=_compile_text(prediction), detail=True)
    if whole and prediction.mfu:
        yield Fact(label="MFU", text=mfu_text(prediction))
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    on = f" on stage {prediction.stages.index(fullest)}" if len(prediction.stages) > 1 else ""
    peak, capacity = fullest.peak_memory_bytes, fullest.memory_capacity_bytes
    figures = _in_gib if peak >= 10 * GIB and not whole else bytes_text
    odds = prediction.fit_probability
    suffix = (
        "" if odds is None or (odds >= SURE and not whole) else f", fits with {100 * odds:.0f} %"
    )
    if whole and prediction.peak_memory_range_bytes is not None:
        suffix = f" ({' to '.join(map(bytes_text, prediction.peak_memory_range_bytes))}){suffix}"
    text = f"{figures(peak)} of {bytes_text(capacity)}{on}{suffix}: "
    yield Fact(label="memory", text=text + _shares(fullest.memory_parts, figures), lines=1)
    if prediction.links is not None and (
        whole or "," in prediction.links or prediction.links.startswith("pcie")
    ):
        yield Fact(label="links", text=f"{prediction.links} (not measured)")
    if prediction.host is not None:
        yield Fact(label="host", text=str(prediction.host))
    if not prediction.fits:
        counted = "the overhead of the allocator included"
        on_device = prediction.overflows != ("host memory",)
        text = f"it {prediction.misfit}"
        text += f", {counted}" if on_device else ""
        yield Fact(label="warning", text=text, style="bold red")
    for note in prediction.notes:
        yield Fact(label="note", text=note)
    for item in prediction.assumptions:
        if item.source in NOTED:
            text = f"{item.what} ({item.provenance}) [{item.source}]" if whole else item.what
            yield Fact(label="note", text=text)


def mfu_text(prediction: Prediction) -> str:
    """Return what the utilisation counts, and its value by the convention of publications."""
    return (
        f"{100 * prediction.mfu:.1f} % of the devices' peak. It counts the model's arithmetic "
        "without recomputation, and attention only between tokens that see each other. With "
        f"masked pairs, as PaLM and torchtitan count, {100 * prediction.unmasked_mfu:.1f} %"
    )


def _in_gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"


def time_text(prediction: Prediction) -> str:
    """Return the seconds of a step with their range, throughput and use of the devices."""
    mfu = f", MFU {100 * prediction.mfu:.1f} %" if prediction.mfu else ""
    span = (
        f"{seconds_text(prediction.step_time_low_s)} to {seconds_text(prediction.step_time_high_s)}"
    )
    step = seconds_text(prediction.step_time_s)
    return f"{step} a step ({span}), {prediction.throughput_text}{mfu}"


def proof_facts(certificate: Certificate, *, whole: bool = False) -> Iterator[Fact]:
    """Yield the facts of the plan's proof; if `whole`, with the choices left out of the search."""
    proof = certificate.plan
    if proof is None:
        yield Fact(label="proof", text=certificate.statement)
    elif whole:
        yield Fact(label="proof", text=proof.statement)
        unsearched = LEFT_OUT if certificate.parts is None else LEFT_OUT_OF_PARTS
        if certificate.unproven_parts is not None:
            unsearched = LEFT_OUT_OF_SOME
        yield Fact(label="excluded", text=unsearched)
    else:
        if certificate.least is not None:
            parts, least = certificate.parts or 1, certificate.least
            limits, under = certificate.power_limits, ""
            if limits is not None:
                under = f" under {limits} power limits"
            text = f"no plan on {parts:,} parts of the cluster{under} takes less {least} a step"
            if proof.gap >= ROUNDED:
                more = _percent(proof.gap / (1 - proof.gap))
                text = (
                    f"{least} of a step is at most {more} above the least of {parts:,} parts{under}"
                )
        elif proof.gap < ROUNDED:
            text = f"no faster plan among {certificate.configurations:,} configurations"
        else:
            text = (
                f"none of {certificate.configurations:,} configurations takes less than "
                f"{seconds_text(proof.lower_bound_s)} (gap {_percent(proof.gap)})"
            )
        yield Fact(label="proof", text=text)


def pipelines_text(plan: Plan) -> str:
    """Return the numbers, depths, devices and micro-batches of the kinds of pipelines."""
    texts = []
    for kind in plan.kinds:
        depth = len(kind.stages)
        groups = dict.fromkeys(filter(None, (stage.group for stage in kind.stages)))
        on = f" on {' and '.join(groups)}" if groups else ""
        stages = f"{depth} stages" if depth > 1 else "1 stage"
        texts.append(f"{kind.data_degree} of {stages}{on}: {kind.micro_batches} micro-batches each")
    return "; ".join(texts)


def all_stages(plan: Plan) -> list[Stage]:
    """Return the stages of all kinds of pipelines in order, as predictions number them."""
    return [stage for kind in plan.kinds for stage in kind.stages]


def stages_text(plan: Plan) -> str:
    """Return the stages' layers, devices and recomputation, in one line."""
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
    """Return one row per stage: devices where they differ, layers, recompute, seconds, memory.

    Where there are many stages, neighbours that differ in memory alone share a row.
    """
    columns = ["stage", *(("devices",) if plan.groups else ()), "layers", "recompute"]
    figures = ["forward", "backward", "peak memory", "of"] if prediction is not None else []
    right = range(len(columns), len(columns) + len(figures))
    table = plain_table(*columns, *figures, right=right)
    stages = all_stages(plan)
    rows = [_stage_cells(plan, prediction, at, stage) for at, stage in enumerate(stages)]
    many = len(stages) > MOST_STAGES
    sizes = [len(stage.layers) for stage in stages]
    keys = [(row, sizes[index]) if many else index for index, row in enumerate(rows)]
    for _, group in groupby(range(len(rows)), key=keys.__getitem__):
        run = list(group)
        layers = layers_text([item for at in run for item in stages[at].layers])
        named, count = f"{run[0]}", len(run)
        if count > 1:
            named = f"{run[0]}-{run[-1]}"
            layers += f"; {sizes[run[0]]} each"
        *front, recompute = rows[run[0]][0]
        cells = [named, *front, layers, recompute, *rows[run[0]][1]]
        if prediction is not None:
            costs = [prediction.stages[at] for at in run]
            cells += [
                _span([cost.peak_memory_bytes for cost in costs]),
                _span([cost.memory_capacity_bytes for cost in costs]),
            ]
        table.add_row(*cells)
    return table


def _stage_cells(
    plan: Plan, prediction: Prediction | None, index: int, stage: Stage
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a stage's devices where they differ and its recompute, and its seconds."""
    on = (stage.group or shares_text(plan),) if plan.groups else ()
    choices = (*on, recompute_text(stage.layers))
    if prediction is None:
        return choices, ()
    cost = prediction.stages[index]
    return choices, (seconds_text(cost.forward_s), seconds_text(cost.backward_s))


def _span(sizes: Sequence[float]) -> str:
    """Return bytes, or from which to which."""
    low, high = bytes_text(min(sizes)), bytes_text(max(sizes))
    return high if low == high else f"{low} to {high}"


def _compile_text(prediction: Prediction) -> str:
    """Return the seconds of compilation, and their share of a run."""
    share = prediction.compile_s / (AMORTISED_STEPS * prediction.step_time_s)
    return (
        f"{seconds_text(prediction.compile_s)} before the first step "
        f"({percent_text(share)} of {AMORTISED_STEPS:,} steps)"
    )


def assumptions_text(prediction: Prediction) -> Summary:
    """Return the assumptions with their sources, without those that are noted anyway."""
    facts = [
        Fact(label=item.provenance.split()[0], text=f"{item.what} [{item.source}]")
        for item in prediction.assumptions
        if item.source not in NOTED
    ]
    return Summary("assumptions", facts, whole=True)


def certificate_facts(certificate: Certificate) -> Iterator[Fact]:
    """Yield the counts behind a proof, the closest losers, and the plans that were simulated."""
    counts = ", ".join(f"{name} {count:,}" for name, count in certificate.counts.items() if count)
    yield Fact(label="counts", text=counts)
    yield Fact(label="scope", text=certificate.model)
    for loser in certificate.runners_up:
        figure = f"at least {seconds_text(loser.lower_bound_s)}"
        yield Fact(label="loser", text=f"{loser.layout}: {figure} ({loser.reason})")
    looked_at = ", ".join(
        f"{name} {count:,}" for name, count in (certificate.looked_at or {}).items()
    )
    if looked_at:
        yield Fact(label="bounds", text=looked_at)
    for finalist in certificate.finalists:
        steps = (
            f"{seconds_text(finalist.step_time_s)}, "
            f"closed form {seconds_text(finalist.closed_form_s)}"
        )
        yield Fact(label="simulated", text=f"{finalist.layout}: {steps}")


def shares_text(plan: Plan) -> str:
    """Return the numbers of micro-batches of the data-parallel ranks in a step."""
    counts: dict[tuple[str, int], int] = {}
    for share in plan.shares or ():
        key = (share.group, share.micro_batches)
        counts[key] = counts.get(key, 0) + plan.ranks // len(plan.shares or ())
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
    """Return the number of layers of each recomputation.

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


def _shares(parts: dict[str, float], shown: Callable[[float], str]) -> str:
    """Return the parts of a sum, largest first, those under 1 % left out."""
    total = sum(parts.values()) or 1.0
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {shown(size)}" for name, size in ranked if size >= 0.01 * total)
