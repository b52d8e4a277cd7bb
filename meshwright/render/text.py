"""Answers of commands for people: facts in ten lines first, tables on request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.costs.uncertainty import words_notes
from meshwright.planner.documents.units import bytes_text, seconds_text
from meshwright.planner.report.facts import MOST_LINES, Fact, Summary, plain_table
from meshwright.planner.report.text import (
    SURE,
    answer_text,
    choices_table,
    cost_word,
    job_text,
    prediction_facts,
)
from meshwright.planner.system.safe_files import path_from_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from meshwright.api.commands import ImportedPlan, PlanImprovement
    from meshwright.launch.attempt import LaunchResult
    from meshwright.launch.run_script import ScriptResult
    from meshwright.planner.documents.events import Expected
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.documents.profile import (
        CollectiveCurve,
        LayerMeasurement,
        Profile,
        StageMeasurement,
    )
    from meshwright.planner.search.answer import Alternative, Answer
    from meshwright.profiler.measurement_plan import LayerRequest
    from meshwright.profiler.profile import ProfileAgenda
    from meshwright.runtime.run.run_report import Comparison, RunReport

WIDE = ("network between nodes", "months", "provenance", "also called")
"""Columns of the catalogue that --json alone has."""
LEAST_S = 1e-3
"""Seconds of a run that have a row."""
FEW = 3
"""Changes, assumptions or curves that are listed one by one in a first answer."""


def next_fact(then: str, *, explain: bool) -> Fact:
    """Return the next commands after an answer, and the one that shows all of it."""
    more = "" if explain else "--explain shows all"
    return Fact(
        label="next", text="; ".join(part for part in (then, more) if part), lines=8, copied=True
    )


def defaults_facts(defaults: Sequence[str]) -> list[Fact]:
    """Return the options that a command took by default."""
    return [Fact(label="defaults", text=", ".join(defaults))] if defaults else []


def plan_text(
    answer: Answer, *, more_facts: Sequence[Fact] = (), explain: bool = False
) -> RenderableType:
    """Return the answer of a search: the plan first, the proof behind it."""
    return answer_text(
        answer.plan,
        answer.prediction,
        answer.certificate,
        choices=answer.choices,
        extra=more_facts,
        explain=explain,
    )


def _training_words(plan: Plan) -> str:
    """Return what a plan trains, and how."""
    job = plan.job
    adapters = "all weights"
    if job.lora is not None:
        adapters = f"adapters of rank {job.lora.rank} beside {job.lora.weights} weights"
    documents = "" if job.document_len is None else f", documents of {job.document_len:,}"
    masters = "" if job.master_weights == "fp32" else ", no fp32 masters"
    return f"{plan.model.name}, {adapters}, {job.optimizer}{masters}, {job.objective}{documents}"


def compared_parts(choices: Sequence[Alternative], *, explain: bool) -> Iterator[RenderableType]:
    """Yield plans beside the fastest of them, in ten lines unless all are requested."""
    then = next_fact(f"meshwright compare {choices[0].what} --best", explain=explain)
    if explain:
        yield choices_table(choices)
    else:
        shown = plain_table("plan", "step", cost_word(choices), "memory", right=(1, 2, 3))
        for choice in choices[: MOST_LINES - 3]:
            assert choice.prediction is not None
            shown.add_row(
                choice.what,
                seconds_text(choice.prediction.step_time_s),
                f"{100 * choice.more:+.1f} %",
                bytes_text(choice.peak_bytes),
            )
        yield shown
    left_out = len(choices) - (MOST_LINES - 3)
    facts = [then]
    if left_out > 0 and not explain:
        facts.insert(0, Fact(label="more", text=f"{left_out} further plans"))
    elif not explain and len(choices) <= FEW:
        facts = [
            *(
                Fact(label="why", text=f"{choice.what}: {choice.why}", detail=True)
                for choice in choices
            ),
            then,
        ]
    facts[:0] = [
        Fact(label="warning", text=f"{choice.what.rpartition('/')[2]} {note}", style="yellow")
        for choice in choices
        for note in notes_of(choice.prediction)
    ]
    work = {
        (choice.plan.job.seq_len, choice.plan.job.global_batch) for choice in choices if choice.plan
    }
    if len(work) > 1:
        text = "the plans train different numbers of samples or tokens per step; % is of as many"
        facts.insert(0, Fact(label="warning", text=text, style="yellow"))
    kinds = [_training_words(choice.plan) for choice in choices if choice.plan]
    if len(set(kinds)) > 1:
        text = f"the plans do not train alike: {' | '.join(dict.fromkeys(kinds))}"
        facts.insert(0, Fact(label="warning", text=text, style="yellow"))
    if cost_word(choices) != "cost":
        text = "the plans have different devices: less time may cost more; whatif has prices"
        facts.insert(0, Fact(label="warning", text=text, style="yellow"))
    if len({choice.plan.model.name for choice in choices if choice.plan}) > 1:
        text = "the plans train different models"
        facts.insert(0, Fact(label="warning", text=text, style="yellow"))
    yield Summary("", facts, whole=explain, most=MOST_LINES - 1 - len(choices))


def notes_of(prediction: Prediction | None) -> tuple[str, ...]:
    """Return the notes beside the figures of a plan that is one of several."""
    if prediction is None:
        return ()
    misfit = () if prediction.fits else (prediction.misfit,)
    return (*misfit, *prediction.notes)


def _tenths(saved_s: Sequence[float], of_s: float) -> list[int]:
    """Return shares of a step in tenths of a percent, which add up to their rounded sum.

    >>> _tenths([2.164, 0.324], 8.877), _tenths([2.488], 8.877)
    ([244, 36], [280])
    """
    exact = [1000.0 * saved / of_s for saved in saved_s]
    whole = [math.floor(tenths) for tenths in exact]
    missing = round(sum(exact)) - sum(whole)
    for at in sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])[:missing]:
        whole[at] += 1
    return whole


def _worth(saved_s: float, tenths: int) -> str:
    """Return the savings of a change, in seconds and as a share of the step.

    >>> _worth(3.0, 250), _worth(-0.6, -50), _worth(1e-5, 0)
    ('saves 3 s (25.0 %)', 'costs 600 ms (5.0 %)', 'saves nothing')
    """
    if not tenths:
        return "saves nothing"
    does = "saves" if tenths > 0 else "costs"
    return f"{does} {seconds_text(abs(saved_s))} ({abs(tenths) / 10:.1f} %)"


def improved_parts(
    improved: PlanImprovement, *, then: str, explain: bool
) -> Iterator[RenderableType]:
    """Yield a plan beside the best: both, the causes of their time, each change and its worth."""
    mine, best = improved.prediction, improved.best.prediction
    of_s = mine.step_time_s
    both = " -> ".join(seconds_text(prediction.step_time_s) for prediction in (mine, best))
    memory = " -> ".join(map(_memory_text, (mine, best)))
    is_whole = not words_notes(mine)
    facts = [
        Fact(label="yours", text=mine.layout_text),
        Fact(label="best" if is_whole else "other", text=best.layout_text),
    ]
    if improved.changes:
        saved_s = of_s - best.step_time_s
        saved = _worth(saved_s, *_tenths([saved_s], of_s))
        text = f"{both} a step, {saved}; memory {memory}"
    elif is_whole:
        text = f"yours is the best plan that was found: {seconds_text(mine.step_time_s)} a step"
    else:
        text = f"none was found for what was understood: {seconds_text(mine.step_time_s)} a step"
    facts.append(Fact(label="gain", text=text))
    if not explain:
        shown = max(1, FEW - len(improved.warnings))
        ordered = sorted(improved.changes, key=lambda change: -abs(change.saved_s))
        worth = [(change.what, change.saved_s) for change in ordered[:shown]]
        if rest := ordered[shown:]:  # so that what is shown adds up
            which = "1 more change" if len(rest) == 1 else f"{len(rest)} more changes"
            worth.append((f"{which}, together", sum(change.saved_s for change in rest)))
        shares = _tenths([saved_s for _, saved_s in worth], of_s)
        facts += [
            Fact(label="" if at else "change", text=f"{what} {_worth(s, share)}", detail=at > 0)
            for at, ((what, s), share) in enumerate(zip(worth, shares, strict=True))
        ]
    facts += [Fact(label="warning", text=warning, style="yellow") for warning in improved.warnings]
    title = f"{improved.mine.model.name} on {improved.mine.cluster}: {job_text(improved.mine.job)}"
    yield Summary(title, [*facts, next_fact(then, explain=explain)], whole=explain)
    if explain:
        yield _causes_table(mine, best)
        if improved.changes:
            yield _changes_table(improved)


def _causes_table(mine: Prediction, best: Prediction) -> Table:
    table = plain_table("", "yours", "best", right=(1, 2))
    table.add_row("step", seconds_text(mine.step_time_s), seconds_text(best.step_time_s))
    causes = sorted(
        {*mine.step_parts, *best.step_parts},
        key=lambda name: -max(prediction.step_parts.get(name, 0.0) for prediction in (mine, best)),
    )
    for name in causes:
        seconds = [prediction.step_parts.get(name, 0.0) for prediction in (mine, best)]
        if max(seconds) > 0.002 * best.step_time_s:
            table.add_row(f"  {name}", *map(seconds_text, seconds))
    table.add_row("memory", *(bytes_text(_peak(prediction)) for prediction in (mine, best)))
    return table


def _changes_table(improved: PlanImprovement) -> Table:
    columns = ("change, one after the other", "step", "saves", "memory")
    table = plain_table(*columns, right=(1, 2, 3))
    for change in improved.changes:
        memory = bytes_text(_peak(change.prediction))
        table.add_row(
            change.what,
            seconds_text(change.prediction.step_time_s),
            f"{'-' if change.saved_s < 0 else ''}{seconds_text(abs(change.saved_s))}",
            memory if change.prediction.fits else f"{memory}, {change.prediction.misfit}",
        )
    return table


def _memory_text(prediction: Prediction) -> str:
    """Return memory of the fullest device, with the probability that it fits where that is low."""
    odds = prediction.fit_probability
    odds_text = "" if odds is None or odds >= SURE else f" (fits with {100 * odds:.0f} %)"
    return f"{bytes_text(_peak(prediction))}{odds_text}"


def _peak(prediction: Prediction) -> float:
    """Return memory of the fullest device."""
    return max(stage.peak_memory_bytes for stage in prediction.stages)


def imported_facts(
    imported: ImportedPlan, defaults: Sequence[str], output: str | None, *, explain: bool
) -> Summary:
    """Return the plan of a configuration, what it takes, and what was not understood."""
    facts = [Fact(label="plan", text=imported.prediction.layout_text)]
    facts += prediction_facts(imported.prediction, whole=explain)
    if explain:
        facts += [Fact(label="assumed", text=what) for what in imported.assumed]
    elif imported.assumed:
        facts.append(Fact(label="assumed", text="; ".join(imported.assumed)))
    harmless = [word for word in imported.unknown if word not in imported.not_understood]
    if explain and imported.without_effect:
        idle = ", ".join(imported.without_effect)
        facts.append(Fact(label="no effect", text=f"{idle} (beside the other settings)"))
    if explain and imported.not_understood:
        facts.append(Fact(label="not read", text=", ".join(imported.not_understood)))
    if explain and harmless:
        facts.append(Fact(label="harmless", text=", ".join(harmless)))
    facts += defaults_facts(defaults)
    then = "add -o mine.yaml to keep the plan"
    if output:
        then = f"meshwright compare {output} --best"
        if imported.not_understood:
            then += ", for what was understood"
    title = f"{imported.plan.model.name} on {imported.plan.cluster}: {job_text(imported.plan.job)}"
    return Summary(title, [*facts, next_fact(then, explain=explain)], whole=explain)


def top_table(answer: Answer) -> Table:
    """Return the best plan of each mesh, fastest first."""
    table = plain_table("", "plan", "closed form", "simulated", "memory", right=(2, 3, 4))
    for place, ranked in enumerate(answer.top, start=1):
        prediction = ranked.prediction
        table.add_row(
            str(place),
            prediction.layout_text,
            seconds_text(ranked.objective_s),
            seconds_text(prediction.step_time_s),
            bytes_text(_peak(prediction)),
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
    table = plain_table("", "predicted", "measured", "error", right=(1, 2, 3))
    for row in rows:
        table.add_row(*comparison_cells(row))
    return table


def run_parts(run: LaunchResult) -> Iterator[RenderableType]:
    """Yield the results of a launch, predicted beside measured, and its files."""
    report = run.report
    if report.losses:
        yield f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f} in {_steps(report.losses)}"
    for evaluation in report.evaluations[-1:]:
        yield f"held-out loss {evaluation.loss:.4f} after step {evaluation.step}"
    yield from compiled_texts(report)
    yield comparison_table(run.rows)
    if report.goodput is not None and report.expected is not None:
        yield from goodput_parts(report.goodput, report.seconds, report.expected)
    yield _paths(metrics=report.metrics, logs=report.logs, saved=report.checkpoint)


def goodput_parts(
    goodput: float, seconds: Mapping[str, float], expected: Expected
) -> Iterator[RenderableType]:
    """Yield the seconds of a run by part, beside the predicted ones."""
    low, high = 100 * expected.goodput_low, 100 * expected.goodput_high
    predicted = f", predicted {100 * expected.goodput:.1f} % ({low:.1f} to {high:.1f})"
    yield f"goodput {100 * goodput:.1f} %{predicted if expected.is_of_training else ''}"
    table = plain_table("seconds", "predicted", "measured", right=(1, 2))
    for name, measured in seconds.items():
        before = expected.seconds.get(name, 0.0)
        if max(before, measured) >= LEAST_S:
            table.add_row(name, seconds_text(before), seconds_text(measured))
    yield table


def _paths(**paths: str | None) -> Summary:
    """Return paths one below the other, each whole however long, since readers copy them."""
    shown = {label: path for label, path in paths.items() if path}
    texts = {k: str(path_from_here(p)) if Path(p).is_absolute() else p for k, p in shown.items()}
    facts = [Fact(label=label, text=text, copied=True) for label, text in texts.items()]
    return Summary("", facts, whole=True)


def compiled_texts(report: RunReport) -> Iterator[str]:
    """Yield the compiled and captured parts, if any were requested, and why others were not."""
    if report.compile_s:
        yield f"compiled blocks, for {seconds_text(report.compile_s)} of the first step"
    layers: dict[str, list[str]] = {}
    for name, why in report.not_compiled.items():
        layers.setdefault(why, []).append(name)
    for why, names in layers.items():
        which = names[0] if len(names) == 1 else f"{len(names)} layers, the first {names[0]}"
        yield f"eager {which}: {why}"
    if report.captured:
        yield f"{report.captured} micro-batches ran as captured graphs"
    if report.not_captured:
        yield f"micro-batches ran as they are: {report.not_captured}"


def script_parts(done: ScriptResult) -> Iterator[RenderableType]:
    """Yield the results of a script, predicted beside measured, and the place of its logs."""
    losses = [step.loss for step in done.run.steps]
    if losses:
        yield f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {_steps(losses)}"
    if done.run.restarts:
        times = "once" if done.run.restarts == 1 else f"{done.run.restarts} times"
        yield f"started again {times}"
    if done.rows:
        yield comparison_table(done.rows)
    yield _paths(output=str(done.run.output))


def _steps(losses: Sequence[float]) -> str:
    return "1 step" if len(losses) == 1 else f"{len(losses)} steps"


def agenda_lines(agenda: ProfileAgenda) -> Iterator[str]:
    """Yield the agenda of a profile, in its order."""
    ranks = " + ".join(map(str, agenda.counts))
    job = agenda.job
    yield f"{agenda.machine.name}: {ranks} ranks, {job.precision}, {job.seq_len} tokens"
    for group in agenda.groups:
        apart = f", {group.stride} apart" if group.stride > 1 else ""
        yield (
            f"links    {group.tier}, groups of {group.ranks} ranks{apart}: all collectives, "
            f"1 KiB to 64 MiB, {seconds_text(agenda.budget.group_s)}"
        )
    if len(agenda.counts) > 1:
        yield f"pairs    all pairs of nodes, both ways, {seconds_text(agenda.budget.pairs_s)}"
    budget = seconds_text(agenda.budget.layers_s)
    yield f"layers   {budget}, in this order until the time is used up:"
    for wish in agenda.wishes:
        why = f"used by plans, weight {wish.value:.2f}" if wish.value else "for interpolation"
        yield f"         {_setting_text(wish)}: {why}"
    if agenda.stages:
        yield f"stages   {seconds_text(agenda.budget.stages_s)}, whole stages:"
    for stage in agenda.stages:
        ends = f"{stage.layers[0]} to {stage.layers[-1]}"
        yield f"         {len(stage.layers)} layers, {ends}: {_setting_text(stage.wish)}"
    yield "runtime  optimizer, sharding, pipeline actions, a step's fixed seconds"


def _setting_text(of: LayerRequest | StageMeasurement) -> str:
    """Return the text of a setting of layers.

    >>> from meshwright.profiler.measurement_plan import LayerRequest
    >>> setting = {"tensor": 2, "context": 2, "micro_batch": 4, "recompute": "full"}
    >>> _setting_text(LayerRequest(**setting, value=1.0))
    'tp 2 cp 2, micro-batch 4, recompute full'
    """
    compiled = ", compiled" * getattr(of, "compiled", False)
    division = _division_text(of)
    return f"{division}, micro-batch {of.micro_batch}, recompute {of.recompute}{compiled}"


def _division_text(of: LayerRequest | StageMeasurement | LayerMeasurement) -> str:
    parts = [("tp", of.tensor), ("cp", of.context), ("ep", of.expert)]
    return " ".join(f"{name} {degree}" for name, degree in parts if degree > 1 or name == "tp")


def link_table(curves: Sequence[CollectiveCurve]) -> Table:
    """Return latency and bandwidth of collectives, one row for each range of sizes."""
    table = plain_table(
        "tier", "collective", "ranks", "sizes", "latency", "bandwidth", "residual", right=(4, 5, 6)
    )
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


def profile_parts(
    measured: Profile,
    model: str,
    defaults: Sequence[str],
    written: Sequence[str],
    *,
    explain: bool,
) -> Iterator[RenderableType]:
    """Yield the facts of a profile: how much was measured, findings; with `explain` every figure.

    `model` is how it was named.
    """
    curves = [curve for curve in measured.collectives if curve.fit]
    facts = [
        Fact(
            label="layers",
            text=f"{len(measured.layers)} settings of {', '.join(_kinds(measured))}",
        )
    ]
    if measured.stages:
        facts.append(Fact(label="stages", text=f"{len(measured.stages)} measured as a whole"))
    if curves:
        tiers = ", ".join(dict.fromkeys(curve.tier for curve in curves))
        facts.append(Fact(label="links", text=f"{len(curves)} curves of collectives on {tiers}"))
    facts += [
        Fact(label="finding", text=finding.text, style="yellow") for finding in measured.findings
    ]
    facts += defaults_facts(defaults)
    facts.append(Fact(label="written", text=f"{', '.join(written)} (on node 0)"))
    then = f"meshwright plan {model} --profile {written[0]} ..."
    title = f"{measured.model} on {measured.birth.device}, {measured.birth.ranks} ranks"
    yield Summary(title, [*facts, next_fact(then, explain=explain)], whole=explain)
    if explain:
        yield from _measured_parts(measured)


def _kinds(measured: Profile) -> Iterator[str]:
    yield from dict.fromkeys(row.kind for row in measured.layers)


def _measured_parts(measured: Profile) -> Iterator[RenderableType]:
    """Yield every figure of a profile."""
    table = plain_table(
        "kind",
        "ranks",
        "micro-batch",
        "recompute",
        "forward",
        "backward",
        "stored",
        right=(4, 5, 6),
    )
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


def catalog_table(rows: Sequence[Mapping[str, str | float | None]]) -> Table:
    """Return a list of the catalogue; figures on the right."""
    names = [name for name in (rows[0] if rows else ()) if name not in WIDE]
    figures = [
        at for at, name in enumerate(names) if any(isinstance(row[name], float) for row in rows)
    ]
    table = plain_table(*names, right=figures)
    table.padding = (0, 1, 0, 0)
    for column in table.columns[:1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*("" if row[name] is None else _cell(row[name]) for name in names))
    return table


def _cell(value: str | float | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
