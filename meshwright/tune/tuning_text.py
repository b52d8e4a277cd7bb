"""Answers of `tune`: ten lines, a table of trials, and one JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from meshwright.planner.documents import document
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.report.facts import Fact, Summary, plain_table
from meshwright.planner.tuning.next_trial import NEAR
from meshwright.planner.tuning.record import Trial
from meshwright.planner.tuning.trial_options import CONSTANTS
from meshwright.tune.tune import CLUSTER_FILE, CONSTANTS_FILE, RenewedProof, TuningResult

MOVED = 0.02
"""Logarithm by which a constant has to move to be reported."""
SURELY = 1.28
"""Distance from the predicted one, in spreads: nine of ten such moves are real."""


def tuned_parts(
    tuned: TuningResult, more_facts: Sequence[Fact], *, explain: bool
) -> Iterator[RenderableType]:
    """Yield the answer in ten lines; with `explain` all trials too."""
    facts = _agenda_facts(tuned) if tuned.queue else _result_facts(tuned)
    yield Summary(_title(tuned), [*facts, *more_facts])
    if explain and tuned.trials:
        yield trials_table(tuned.trials)


def write_page(tuned: TuningResult, path: str) -> None:
    """Write the page of trials."""
    from meshwright.planner.report.trials import page  # noqa: PLC0415 - loads jinja2

    names = [candidate.prediction.layout_text for candidate in tuned.candidates]
    if tuned.small is not None:
        names += [
            f"{stand_in.candidate.prediction.layout_text}, {stand_in.request.model.name} "
            f"on {tuned.trial_cluster}"
            for stand_in in tuned.small.stand_ins
        ]
    text = page(_title(tuned), list(_result_facts(tuned)), names, tuned.tuner, tuned.trials)
    document.write_text(text, path)


def _title(tuned: TuningResult) -> str:
    return f"{tuned.chosen.plan.model.name} on {tuned.chosen.plan.cluster}"


def _agenda_facts(tuned: TuningResult) -> Iterator[Fact]:
    yield Fact(label="plan", text=tuned.chosen.prediction.layout_text, lines=2)
    total_s = 0.0
    for place, option in enumerate(tuned.queue, start=1):
        candidate, seconds = tuned.options[option], tuned.tuner.trial_s(option)
        total_s += seconds
        yield Fact(
            label=f"trial {place}",
            text=f"{candidate.prediction.layout_text}: "
            f"{seconds_text(candidate.prediction.step_time_s)} a step, "
            f"{_minutes_text(tuned.devices * seconds)}",
            lines=1,
            detail=place > 3,
        )
    yield Fact(
        label="cost",
        text=f"{len(tuned.queue)} trials, {_minutes_text(tuned.devices * total_s)} by predicted "
        "step times; results of early trials may change later ones",
    )


def _result_facts(tuned: TuningResult) -> Iterator[Fact]:
    chosen = tuned.chosen
    believed_s, low_s, high_s = tuned.tuner.posterior.seconds(tuned.tuner.answer)
    source = "estimated" if tuned.step_s is None else "measured"
    yield Fact(label="plan", text=chosen.prediction.layout_text)
    yield Fact(
        label="time",
        text=f"{seconds_text(tuned.step_s or believed_s)} a step, {source} "
        f"({seconds_text(low_s)} to {seconds_text(high_s)}); predicted "
        f"{seconds_text(chosen.prediction.step_time_s)}",
    )
    if tuned.small is not None:
        yield Fact(label="unseen", text=_unseen_text(tuned))
    yield Fact(label="gain", text=_gain_text(tuned))
    ended = [trial.ended for trial in tuned.trials]
    counts = ", ".join(
        f"{ended.count(kind)} {name}"
        for kind, name in (
            ("slower", "stopped early as slower"),
            ("out of memory", "out of memory"),
            ("failed", "failed"),
        )
        if kind in ended
    )
    yield Fact(
        label="tried",
        text=f"{_distinct(tuned)} of {len(tuned.options) - _untried_count(tuned)} plans"
        + (f" in {len(ended)} trials" if len(ended) > _distinct(tuned) else "")
        + (f" in small on {tuned.trial_cluster}" if tuned.trial_cluster else "")
        + (f" ({counts})" if counts else "")
        + f"; {tuned.stopped}",
    )
    yield Fact(
        label="sure",
        text=f"{100 * tuned.tuner.sure:.0f} % that no other plan is more than 2 % faster",
    )
    if tuned.proof is not None:
        yield Fact(label="proof", text=_proof_text(tuned.proof), detail=True)
    moved = [
        f"{CONSTANTS[constant.name].what} x {math.exp(constant.mean):.2g}"
        for constant in sorted(
            tuned.tuner.posterior.constants, key=lambda constant: -abs(constant.mean)
        )
        if abs(constant.mean) > max(MOVED, SURELY * constant.spread)
    ]
    if moved:
        yield Fact(label="learnt", text=", ".join(moved[:3]), detail=True)
    yield Fact(
        label="cost",
        text=f"{_minutes_text(tuned.device_seconds)} of trials, "
        f"{tuned.planned_s:.2g} CPU s of planning",
    )
    yield Fact(
        label="written",
        text=f"{tuned.plan_file}, {tuned.folder}/{CONSTANTS_FILE}, {tuned.folder}/{CLUSTER_FILE}",
        copied=True,
        detail=True,
    )


def _minutes_text(device_s: float) -> str:
    """Return device-seconds as minutes with two digits.

    >>> _minutes_text(44_400), _minutes_text(9)
    ('740 device-minutes', '0.15 device-minutes')
    """
    minutes = device_s / 60
    return f"{minutes:,.0f} device-minutes" if minutes >= 10 else f"{minutes:.2g} device-minutes"


def _proof_text(proof: RenewedProof) -> str:
    """Return the proof of a search with the constants of its trials."""
    text = (
        "with the constants that the trials fitted, no plan takes less than "
        f"{seconds_text(proof.lower_bound_s)}, and this one takes {seconds_text(proof.chosen_s)} "
        f"(gap {100 * proof.gap:.1f} %)"
    )
    if not proof.known and proof.step_s < (1 - NEAR) * proof.chosen_s:
        text += f"; not tried: {proof.layout} with {seconds_text(proof.step_s)}"
    return text


def _distinct(tuned: TuningResult) -> int:
    """Return the number of tried plans; noisy trials are repeated."""
    return len({trial.plan_digest for trial in tuned.trials})


def _untried_count(tuned: TuningResult) -> int:
    """Return the number of plans that may be the answer and are not tried themselves."""
    return 0 if tuned.small is None else len(tuned.candidates)


def _unseen_text(tuned: TuningResult) -> str:
    """Return what trials in small cannot show, which keeps its range."""
    assert tuned.small is not None
    doublings = tuned.chosen.option.doublings
    wide = math.exp(SURELY * CONSTANTS["scale"].spread * doublings) - 1
    many = tuned.chosen.plan.ranks
    links = "".join(f"; links of {name}" for name in tuned.small.unseen)
    return f"how steps grow from {tuned.devices} to {many} devices (+-{100 * wide:.0f} %){links}"


def _gain_text(tuned: TuningResult) -> str:
    """Return the gain over the plan that was predicted fastest."""
    first_s, step_s = tuned.first_s, tuned.step_s
    if tuned.small is not None:
        if tuned.tuner.answer == 0:
            return "none: the plan predicted fastest is probably the fastest"
        of, mean = tuned.tuner.answer, tuned.tuner.posterior.mean
        gained = math.expm1(float(mean[0] - mean[of]))
        return f"estimated: {100 * gained:.1f} % faster than the plan predicted fastest"
    if tuned.tuner.answer == 0:
        return "none: the plan predicted fastest is the fastest measured"
    if first_s is None or step_s is None:
        return (
            f"the plan predicted fastest did not run: {tuned.candidates[0].prediction.layout_text}"
        )
    return (
        f"{100 * (first_s / step_s - 1):.1f} % faster than the plan predicted fastest, which took "
        f"{seconds_text(first_s)}"
    )


def trials_table(trials: Sequence[Trial]) -> RenderableType:
    """Return all trials, predicted beside measured."""
    shown = plain_table(
        "trial",
        "layout",
        "ended",
        "predicted",
        "believed",
        "measured",
        "took",
        right=(0, 3, 4, 5, 6),
    )
    for trial in trials:
        shown.add_row(
            str(trial.trial),
            trial.layout,
            trial.ended,
            seconds_text(trial.predicted_s),
            seconds_text(trial.believed_s),
            "" if trial.step_s is None else seconds_text(trial.step_s),
            seconds_text(trial.seconds),
        )
    return shown


def tuned_json(tuned: TuningResult) -> dict[str, Any]:
    """Return the output of `tune --json`; seconds, fractions."""
    chosen, posterior = tuned.chosen, tuned.tuner.posterior
    return {
        "plan": chosen.plan.model_dump(mode="json", exclude_none=True),
        "layout": chosen.prediction.layout_text,
        "step_time_s": tuned.step_s,
        "predicted_s": chosen.prediction.step_time_s,
        "believed_s": list(posterior.seconds(tuned.tuner.answer)),
        "trial_cluster": tuned.trial_cluster,
        "proof": None if tuned.proof is None else asdict(tuned.proof),
        "unseen": list(tuned.small.unseen) if tuned.small else [],
        "first_step_time_s": tuned.first_s,
        "sure": tuned.tuner.sure if tuned.tuner.ran else None,
        "stopped": tuned.stopped,
        "trials": [trial.model_dump(mode="json", exclude_none=True) for trial in tuned.trials],
        "intended": [
            {
                "layout": tuned.options[option].prediction.layout_text,
                "predicted_s": tuned.options[option].prediction.step_time_s,
                "device_s": tuned.devices * tuned.tuner.trial_s(option),
            }
            for option in tuned.queue
        ],
        "candidates": [
            {
                "layout": candidate.prediction.layout_text,
                "predicted_s": candidate.prediction.step_time_s,
                "believed_s": list(posterior.seconds(at)),
                "fits": float(tuned.tuner.fits[at]),
            }
            for at, candidate in enumerate(tuned.candidates)
        ],
        "constants": {
            constant.name: {"mean": constant.mean, "spread": constant.spread}
            for constant in posterior.constants
        },
        "device_s": tuned.device_seconds,
    }
