"""What `tune` answers: ten lines, a table of trials, and one JSON object."""

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
from meshwright.tune.tune import CLUSTER_FILE, CONSTANTS_FILE, RenewedProof, Tuned

MOVED = 0.02
"""Logarithm by which a constant has to move to be reported."""
SURELY = 1.28
"""Spreads that it has to lie from the predicted one: nine of ten such moves are real."""


def tuned_parts(found: Tuned, said: Sequence[Fact], *, explain: bool) -> Iterator[RenderableType]:
    """Yield the answer in ten lines; with `explain` all trials too."""
    facts = _intended(found) if found.queue else _measured(found)
    yield Summary(_title(found), [*facts, *said])
    if explain and found.trials:
        yield trials_table(found.trials)


def write_page(found: Tuned, path: str) -> None:
    """Write the page of trials."""
    from meshwright.planner.report.trials import page  # noqa: PLC0415 - loads jinja2

    names = [one.prediction.layout for one in found.candidates]
    if found.small is not None:
        names += [
            f"{one.candidate.prediction.layout}, {one.request.model.name} on {found.trial_cluster}"
            for one in found.small.stand_ins
        ]
    text = page(_title(found), list(_measured(found)), names, found.tuner, found.trials)
    document.write_text(text, path)


def _title(found: Tuned) -> str:
    return f"{found.chosen.plan.model.name} on {found.chosen.plan.cluster}"


def _intended(found: Tuned) -> Iterator[Fact]:
    yield Fact(label="plan", text=found.chosen.prediction.layout, lines=2)
    total_s = 0.0
    for place, option in enumerate(found.queue, start=1):
        one, seconds = found.tried[option], found.tuner.trial_s(option)
        total_s += seconds
        yield Fact(
            label=f"trial {place}",
            text=f"{one.prediction.layout}: {seconds_text(one.prediction.step_time_s)} a step, "
            f"{found.devices * seconds / 60:.2g} device-minutes",
            lines=1,
            detail=place > 3,
        )
    yield Fact(
        label="cost",
        text=f"{len(found.queue)} trials, {found.devices * total_s / 60:.2g} device-minutes, if "
        "steps take what is predicted; what trials tell may change the later ones",
    )


def _measured(found: Tuned) -> Iterator[Fact]:
    chosen = found.chosen
    believed_s, low_s, high_s = found.tuner.posterior.seconds(found.tuner.answer)
    told = "believed" if found.step_s is None else "measured"
    yield Fact(label="plan", text=chosen.prediction.layout)
    yield Fact(
        label="time",
        text=f"{seconds_text(found.step_s or believed_s)} a step, {told} ({seconds_text(low_s)} to "
        f"{seconds_text(high_s)}); predicted {seconds_text(chosen.prediction.step_time_s)}",
    )
    if found.small is not None:
        yield Fact(label="unseen", text=_unseen_text(found))
    yield Fact(label="gain", text=_gain_text(found))
    ended = [one.ended for one in found.trials]
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
        text=f"{_distinct(found)} of {len(found.tried) - _answered(found)} plans"
        + (f" in {len(ended)} trials" if len(ended) > _distinct(found) else "")
        + (f" in small on {found.trial_cluster}" if found.trial_cluster else "")
        + (f" ({counts})" if counts else "")
        + f"; {found.stopped}",
    )
    yield Fact(
        label="sure",
        text=f"{100 * found.tuner.sure:.0f} % that no other plan is more than 2 % faster",
    )
    if found.proof is not None:
        yield Fact(label="proof", text=_proof_text(found.proof), detail=True)
    moved = [
        f"{CONSTANTS[one.name].what} x {math.exp(one.mean):.2g}"
        for one in sorted(found.tuner.posterior.constants, key=lambda one: -abs(one.mean))
        if abs(one.mean) > max(MOVED, SURELY * one.spread)
    ]
    if moved:
        yield Fact(label="learnt", text=", ".join(moved[:3]), detail=True)
    yield Fact(
        label="cost",
        text=f"{found.device_seconds / 60:.2g} device-minutes of trials, "
        f"{found.planned_s:.2g} CPU s of planning",
    )
    yield Fact(
        label="written",
        text=f"{found.plan_file}, {found.folder}/{CONSTANTS_FILE}, {found.folder}/{CLUSTER_FILE}",
        copied=True,
        detail=True,
    )


def _proof_text(proof: RenewedProof) -> str:
    """Return what a search proves with the constants of its trials."""
    said = (
        "with the constants of its trials no plan takes less than "
        f"{seconds_text(proof.lower_bound_s)}; this one {seconds_text(proof.chosen_s)} "
        f"(gap {100 * proof.gap:.1f} %)"
    )
    if not proof.known and proof.step_s < (1 - NEAR) * proof.chosen_s:
        said += f"; not tried: {proof.layout} with {seconds_text(proof.step_s)}"
    return said


def _distinct(found: Tuned) -> int:
    """Return how many plans were tried; noisy trials are repeated."""
    return len({one.plan_digest for one in found.trials})


def _answered(found: Tuned) -> int:
    """Return how many plans may be the answer and are not tried themselves."""
    return 0 if found.small is None else len(found.candidates)


def _unseen_text(found: Tuned) -> str:
    """Return what trials in small cannot tell, which keeps its range."""
    assert found.small is not None
    doublings = found.chosen.option.doublings
    wide = math.exp(SURELY * CONSTANTS["scale"].spread * doublings) - 1
    many = found.chosen.plan.mesh.devices
    links = "".join(f"; links of {name}" for name in found.small.unseen)
    return f"how steps grow from {found.devices} to {many} devices (+-{100 * wide:.0f} %){links}"


def _gain_text(found: Tuned) -> str:
    """Return what was gained over the plan that was predicted fastest."""
    first_s, step_s = found.first_s, found.step_s
    if found.small is not None:
        if found.tuner.answer == 0:
            return "none: the plan predicted fastest is probably the fastest"
        of, mean = found.tuner.answer, found.tuner.posterior.mean
        gained = math.expm1(float(mean[0] - mean[of]))
        return f"estimated: {100 * gained:.1f} % faster than the plan predicted fastest"
    if found.tuner.answer == 0:
        return "none: the plan predicted fastest is the fastest measured"
    if first_s is None or step_s is None:
        return f"the plan predicted fastest did not run: {found.candidates[0].prediction.layout}"
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
    for one in trials:
        shown.add_row(
            str(one.trial),
            one.layout,
            one.ended,
            seconds_text(one.predicted_s),
            seconds_text(one.believed_s),
            "" if one.step_s is None else seconds_text(one.step_s),
            seconds_text(one.seconds),
        )
    return shown


def tuned_json(found: Tuned) -> dict[str, Any]:
    """Return what `tune --json` prints; seconds, fractions."""
    chosen, posterior = found.chosen, found.tuner.posterior
    return {
        "plan": chosen.plan.model_dump(mode="json", exclude_none=True),
        "layout": chosen.prediction.layout,
        "step_time_s": found.step_s,
        "predicted_s": chosen.prediction.step_time_s,
        "believed_s": list(posterior.seconds(found.tuner.answer)),
        "trial_cluster": found.trial_cluster,
        "proof": None if found.proof is None else asdict(found.proof),
        "unseen": list(found.small.unseen) if found.small else [],
        "first_step_time_s": found.first_s,
        "sure": found.tuner.sure if found.tuner.ran else None,
        "stopped": found.stopped,
        "trials": [one.model_dump(mode="json", exclude_none=True) for one in found.trials],
        "intended": [
            {
                "layout": found.tried[option].prediction.layout,
                "predicted_s": found.tried[option].prediction.step_time_s,
                "device_s": found.devices * found.tuner.trial_s(option),
            }
            for option in found.queue
        ],
        "candidates": [
            {
                "layout": one.prediction.layout,
                "predicted_s": one.prediction.step_time_s,
                "believed_s": list(posterior.seconds(at)),
                "fits": float(found.tuner.fits[at]),
            }
            for at, one in enumerate(found.candidates)
        ],
        "constants": {
            one.name: {"mean": one.mean, "spread": one.spread} for one in posterior.constants
        },
        "device_s": found.device_seconds,
    }
