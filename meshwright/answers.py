"""What commands answer, as JSON and as tables for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from planner.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from meshwright.commands import Improved
    from meshwright.jobs import Submission
    from meshwright.launches import Run
    from planner.formats.imported import Imported
    from planner.prediction import Prediction
    from planner.profile import CollectiveCurve, LayerMeasurement, Profile, StageMeasurement
    from planner.search.answer import Alternative, Answer
    from profiler.agenda import Wish
    from profiler.profile import Intended
    from runtime.export import Exported
    from runtime.report import Comparison


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return what `plan --json` prints."""
    prediction = answer.prediction
    return {
        "plan": answer.plan.model_dump(mode="json", exclude_none=True),
        "layout": prediction.layout,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "idle_devices": prediction.idle_devices,
        "notes": list(prediction.notes),
        "peak_memory_bytes": [
            {"total": stage.peak_memory_bytes, "parts": stage.memory_parts}
            for stage in prediction.stages
        ],
        "certificate": answer.certificate.model_dump(mode="json", exclude_none=True),
        "top": [
            {
                "layout": ranked.prediction.layout,
                "objective_s": ranked.objective_s,
                "step_time_s": ranked.prediction.step_time_s,
                "plan": ranked.plan.model_dump(mode="json", exclude_none=True),
            }
            for ranked in answer.top
        ],
        "choices": choices_json(answer.choices),
        "search_s": answer.search_s,
    }


def run_json(run: Run) -> dict[str, Any]:
    """Return what `launch --json` prints."""
    return {
        "report": run.report.model_dump(mode="json", exclude_none=True),
        "prediction": run.prediction.model_dump(mode="json", exclude_none=True),
        "comparison": [
            {
                "quantity": row.quantity,
                "unit": row.unit,
                "predicted": row.predicted,
                "measured": row.measured,
                "error": row.error,
            }
            for row in run.rows
        ],
    }


def job_json(written: Submission) -> dict[str, Any]:
    """Return what `launch --on slurm --json` prints."""
    file = None if written.file is None else str(written.file)
    return {"job": written.text, "file": file, "said": written.said}


def export_json(written: Exported) -> dict[str, Any]:
    """Return what `export --json` prints."""
    return {
        "checkpoint": str(written.checkpoint),
        "step": written.step,
        "folder": str(written.folder),
        "files": list(written.files),
        "parameters": written.parameters,
        "bytes": written.size_bytes,
        "warnings": list(written.warnings),
    }


def as_json(data: object) -> str:
    """Return one JSON object as text."""
    return json.dumps(data, indent=2)


def agenda_json(found: Intended) -> dict[str, Any]:
    """Return what `profile --dry-run --json` prints."""
    return {
        "cluster": found.machine.name,
        "ranks_of_nodes": list(found.counts),
        "budget_s": {
            "each_group": found.budget.group_s,
            "pairs_of_nodes": found.budget.pairs_s,
            "layers": found.budget.layers_s,
        },
        "groups": [
            {"tier": g.tier, "ranks": g.ranks, "stride": g.stride, "inner": g.inner}
            for g in found.groups
        ],
        "layers": [
            {
                "tensor": w.tensor,
                "micro_batch": w.micro_batch,
                "recompute": w.recompute,
                "value": w.value,
            }
            for w in found.wishes
        ],
    }


def choices_json(choices: Sequence[Alternative]) -> list[dict[str, Any]]:
    """Return plans beside the fastest as plain data; `more` is time beyond its, relatively."""
    return [
        {
            "what": choice.what,
            "layout": choice.prediction.layout if choice.prediction else None,
            "step_time_s": choice.prediction.step_time_s if choice.prediction else None,
            "more": choice.more,
            "peak_memory_bytes": choice.peak_bytes,
            "why": choice.why,
        }
        for choice in choices
    ]


def choices_table(choices: Sequence[Alternative]) -> Table:
    """Return plans beside the fastest: time, what they cost against it, memory, and why."""
    table = Table("", "plan", "step", "cost", "memory", "why")
    for choice in choices:
        if choice.prediction is None:
            table.add_row(choice.what, "", "", "", "", choice.why)
            continue
        table.add_row(
            choice.what,
            choice.prediction.layout,
            seconds_text(choice.prediction.step_time_s),
            f"{100 * choice.more:+.1f} %",
            bytes_text(choice.peak_bytes),
            choice.why,
        )
    return table


def improved_json(told: Improved) -> dict[str, Any]:
    """Return what `compare --best --json` prints; seconds, bytes."""
    sides = {"mine": (told.mine, told.prediction), "best": (told.best.plan, told.best.prediction)}
    return {
        **{
            name: {
                "layout": plan.layout.text(),
                "step_time_s": prediction.step_time_s,
                "step_time_low_s": prediction.step_time_low_s,
                "step_time_high_s": prediction.step_time_high_s,
                "step_parts": prediction.step_parts,
                "peak_memory_bytes": _peak(prediction),
                "fits": prediction.fits,
            }
            for name, (plan, prediction) in sides.items()
        },
        "changes": [
            {
                "what": change.what,
                "saved_s": change.saved_s,
                "step_time_s": change.prediction.step_time_s,
                "peak_memory_bytes": _peak(change.prediction),
                "fits": change.prediction.fits,
            }
            for change in told.changes
        ],
        "warnings": list(told.warnings),
    }


def improved_parts(told: Improved) -> Iterator[RenderableType]:
    """Yield a plan beside the best: both, the causes of their time, each change and its worth."""
    mine, best = told.prediction, told.best.prediction
    gain = mine.step_time_s / best.step_time_s - 1
    yield f"yours  {told.mine.layout.text()}"
    yield f"best   {told.best.plan.layout.text()}"
    if not told.changes:
        yield "yours is the best plan that was found"
    else:
        yield f"the best is {100 * gain:.1f} % faster by {len(told.changes)} changes"
    table = Table("", "yours", "best")
    table.add_row("step", seconds_text(mine.step_time_s), seconds_text(best.step_time_s))
    causes = sorted(
        {*mine.step_parts, *best.step_parts},
        key=lambda name: -max(one.step_parts.get(name, 0.0) for one in (mine, best)),
    )
    for name in causes:
        seconds = [one.step_parts.get(name, 0.0) for one in (mine, best)]
        if max(seconds) > 0.002 * best.step_time_s:
            table.add_row(f"  {name}", *map(seconds_text, seconds))
    table.add_row("memory", *(bytes_text(_peak(one)) for one in (mine, best)))
    yield table
    if told.changes:
        steps = Table("change, one after the other", "step", "worth", "memory")
        for change in told.changes:
            worth = 100 * change.saved_s / mine.step_time_s
            memory = bytes_text(_peak(change.prediction))
            steps.add_row(
                change.what,
                seconds_text(change.prediction.step_time_s),
                f"{worth:+.1f} %",
                memory if change.prediction.fits else f"{memory}, does not fit",
            )
        yield steps
    for warning in told.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def _peak(prediction: Prediction) -> float:
    """Return memory of the fullest device."""
    return max(stage.peak_memory_bytes for stage in prediction.stages)


def imported_json(found: Imported) -> dict[str, Any]:
    """Return what `import --json` prints."""
    return {
        "plan": found.plan.model_dump(mode="json", exclude_none=True),
        "layout": found.plan.layout.text(),
        "assumed": list(found.assumed),
        "unknown": list(found.unknown),
    }


def top_table(answer: Answer) -> Table:
    """Return the best plan of each mesh, fastest first."""
    table = Table("", "plan", "closed form", "simulated", "throughput", "peak memory")
    for place, ranked in enumerate(answer.top, start=1):
        prediction = ranked.prediction
        table.add_row(
            str(place),
            prediction.layout,
            seconds_text(ranked.objective_s),
            seconds_text(prediction.step_time_s),
            prediction.throughput_text,
            bytes_text(max(stage.peak_memory_bytes for stage in prediction.stages)),
        )
    return table


def comparison_cells(row: Comparison) -> tuple[str, str, str, str]:
    """Return what, predicted, measured and error as people read them."""
    shown: dict[str, Callable[[float], str]] = {
        "s": seconds_text,
        "bytes": bytes_text,
        "tokens/s": lambda rate: f"{rate:,.0f} tokens/s",
        "samples/s": lambda rate: f"{rate:,.0f} samples/s",
    }
    text = shown[row.unit]
    return row.quantity, text(row.predicted), text(row.measured), f"{100 * row.error:+.1f} %"


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Return predicted beside measured."""
    table = Table("", "predicted", "measured", "error")
    for row in rows:
        table.add_row(*comparison_cells(row))
    return table


def agenda_lines(found: Intended) -> Iterator[str]:
    """Yield what a profile would measure, in its order."""
    ranks = " + ".join(map(str, found.counts))
    yield f"{found.machine.name}: {ranks} ranks, {found.job.precision}, {found.job.seq_len} tokens"
    for group in found.groups:
        apart = f", {group.stride} apart" if group.stride > 1 else ""
        yield (
            f"links    {group.tier}, groups of {group.ranks} ranks{apart}: all collectives, "
            f"1 KiB to 64 MiB, {seconds_text(found.budget.group_s)}"
        )
    if len(found.counts) > 1:
        yield f"pairs    all pairs of nodes, both ways, {seconds_text(found.budget.pairs_s)}"
    yield f"layers   {seconds_text(found.budget.layers_s)}, as far down this list as it goes:"
    for wish in found.wishes:
        why = f"plans use it, value {wish.value:.2f}" if wish.value else "to interpolate between"
        yield f"         {_setting_text(wish)}: {why}"
    if found.stages:
        yield f"stages   {seconds_text(found.budget.stages_s)}, as wholes:"
    for stage in found.stages:
        ends = f"{stage.layers[0]} to {stage.layers[-1]}"
        yield f"         {len(stage.layers)} layers, {ends}: {_setting_text(stage.wish)}"
    yield "runtime  optimizer, sharding, pipeline actions, a step's fixed seconds"


def _setting_text(of: Wish | StageMeasurement) -> str:
    """Return a setting of layers as people write it.

    >>> from profiler.agenda import Wish
    >>> _setting_text(Wish(tensor=2, context=2, micro_batch=4, recompute="full", value=1.0))
    'tp 2 cp 2, micro-batch 4, recompute full'
    """
    compiled = ", compiled" * getattr(of, "compiled", False)
    division = _division_text(of)
    return f"{division}, micro-batch {of.micro_batch}, recompute {of.recompute}{compiled}"


def _division_text(of: Wish | StageMeasurement | LayerMeasurement) -> str:
    parts = [("tp", of.tensor), ("cp", of.context), ("ep", of.expert)]
    return " ".join(f"{name} {degree}" for name, degree in parts if degree > 1 or name == "tp")


def link_table(curves: Sequence[CollectiveCurve]) -> Table:
    """Return latency and bandwidth of collectives, one row for each range of sizes."""
    table = Table("tier", "collective", "ranks", "sizes", "latency", "bandwidth", "worst residual")
    for curve in curves:
        for index, line in enumerate(curve.fit.pieces if curve.fit else ()):
            first = index == 0 and curve.fit is not None
            apart = f" = {curve.ranks // curve.inner} x {curve.inner}" if curve.inner > 1 else ""
            table.add_row(
                curve.tier if first else "",
                curve.operation if first else "",
                f"{curve.ranks}{apart}" if first else "",
                f"{bytes_text(line.from_bytes)} to {bytes_text(line.to_bytes)}",
                seconds_text(line.latency_s),
                f"{bytes_text(line.bytes_per_s)}/s" if line.bytes_per_s else "any",
                f"{100 * curve.fit.residual:.0f} %" if first and curve.fit else "",
            )
    return table


def profile_parts(measured: Profile) -> Iterator[RenderableType]:
    """Yield what a profile says: layers, links between nodes, findings."""
    yield f"{measured.model} on {measured.birth.device}, {measured.birth.ranks} ranks"
    table = Table("kind", "ranks", "micro-batch", "recompute", "forward", "backward", "stored")
    for row in measured.layers:
        table.add_row(
            row.kind,
            _division_text(row),
            str(row.micro_batch),
            row.recompute,
            seconds_text(row.forward_s),
            seconds_text(row.backward_s),
            bytes_text(row.stored_bytes),
        )
    yield table
    for stage in measured.stages:
        yield (
            f"{len(stage.layers)} layers as one stage ({_setting_text(stage)}): "
            f"forward {seconds_text(stage.forward_s)}, backward {seconds_text(stage.backward_s)}, "
            f"stored {bytes_text(stage.stored_bytes)}, resident {bytes_text(stage.resident_bytes)}"
        )
    if any(curve.fit for curve in measured.collectives):
        yield link_table(measured.collectives)
    for pair in measured.pairs:
        names = [measured.nodes[at].name for at in (pair.source, pair.target)]
        yield (
            f"{names[0]} -> {names[1]}: {8 * pair.bytes_per_s / 1e6:,.0f} Mbit/s, "
            f"{seconds_text(pair.latency_s)}"
        )
    for finding in measured.findings:
        yield Text(finding.text, style="yellow")
