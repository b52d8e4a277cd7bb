"""Measured runs as a fit sees them: what was seen, and what would be predicted with constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.planner.calibration.fitting.fitted_constants import (
    ACTION,
    SLACK,
    STEP,
    Constant,
    Constants,
    calibration_of,
    constants_of,
    with_fitted_constants,
)
from meshwright.planner.calibration.tables.predictions import predict_run
from meshwright.planner.calibration.tables.rows import measured_setups, read_rows
from meshwright.planner.catalog import native
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import with_figures
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import Birth, Calibration, Profile
from meshwright.planner.documents.units import GIB
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.setup import Setup

USUAL_SLACK = 1.05
NOBODY = Birth(
    command="none",
    date="none",
    host="none",
    device="none",
    ranks=1,
    threads_per_rank=1,
    software={},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One measured run."""

    name: str
    cluster: ClusterSpec
    step_s: float | None
    memory_bytes: float | None
    """Measured bytes, where the measurement is of reserved memory or of the whole device."""
    seconds: Callable[[Constants], float]
    bytes: Callable[[Constants], float]
    usual: tuple[float, float, float]
    """Fixed seconds, seconds of an action, slack, as predicted without a fit."""


def of_table(path: Path) -> list[Observed]:
    """Return the complete runs of a table that have a step time or a peak of reserved memory."""
    result = []
    for seen, setup in measured_setups(read_rows(path)):
        if not isinstance(setup, Setup) or not seen.complete:
            continue
        kept = seen.memory_kind in ("reserved", "device") and seen.judge_memory
        memory = seen.peak_memory_gib if kept else None
        step_s = seen.step_time_s if seen.judge_time else None
        if step_s is None and memory is None:
            continue
        framework = setup.request.framework
        result.append(
            Observed(
                name=seen.id,
                cluster=setup.request.cluster,
                step_s=step_s,
                memory_bytes=None if memory is None else memory * GIB,
                seconds=_table_seconds(setup),
                bytes=_table_bytes(setup, seen.memory_kind, seen.memory_rank),
                usual=(framework.host.step_s, framework.host.action_s, framework.memory.reserved),
            )
        )
    return result


def _table_seconds(setup: Setup) -> Callable[[Constants], float]:
    return lambda values: _predict_run(setup, values).step_time_s


def _table_bytes(setup: Setup, kind: str, rank: str) -> Callable[[Constants], float]:
    return lambda values: _predict_run(setup, values).memory_bytes(kind, rank)


def _predict_run(setup: Setup, values: Constants) -> Prediction:
    request = setup.request
    framework = request.framework
    changed = with_figures(
        framework,
        {
            "host.step_s": values.get(STEP, framework.host.step_s),
            "host.action_s": values.get(ACTION, framework.host.action_s),
            "memory.reserved": values.get(SLACK, framework.memory.reserved),
        },
    )
    cluster = with_fitted_constants(request.cluster, as_calibration(values, request.cluster))
    return predict_run(replace(setup, request=replace(request, cluster=cluster, framework=changed)))


def of_launch(
    name: str, plan: Plan, model: ModelGraph, cluster: ClusterSpec, step_s: float
) -> Observed:
    """Return a run of our own runtime; its memory is the allocated one, which shows no slack."""

    def seconds(values: Constants) -> float:
        calibration = as_calibration(values, cluster)
        profile = Profile(
            model=model.name,
            model_digest=model.digest,
            birth=NOBODY,
            layers=(),
            calibration=calibration,
        )
        return predict(
            plan, model, with_fitted_constants(cluster, calibration), profile
        ).step_time_s

    return Observed(
        name=name,
        cluster=cluster,
        step_s=step_s,
        memory_bytes=None,
        seconds=seconds,
        bytes=lambda values: 0.0,
        usual=(0.0, native().host.action_s, USUAL_SLACK),
    )


def as_calibration(values: Constants, cluster: ClusterSpec) -> Calibration:
    """Return constants in the middle of a fit."""
    accelerator = cluster.groups[0].accelerator.name
    return calibration_of(values, accelerator=accelerator, spread=0.0, runs=1, source="a fit")


def common_constants(observed: Sequence[Observed]) -> list[Constant]:
    """Return the constants of the runs' cluster: one accelerator, all its tiers."""
    names = sorted({run.cluster.groups[0].accelerator.name for run in observed})
    if len(names) > 1:
        raise DocumentError(
            "accelerator",
            f"is {', '.join(names)} in these runs; constants describe one machine; give the runs "
            "of one accelerator, or choose it with --accelerator",
        )
    widest = max(observed, key=lambda run: (len(run.cluster.tiers), run.cluster.devices))
    step_s, action_s, slack = widest.usual
    return constants_of(widest.cluster, step_s=step_s, action_s=action_s, slack=slack)


def runs_on(observed: Iterable[Observed], accelerator: str | None) -> list[Observed]:
    """Return the runs on an accelerator; all of them if none is named."""
    return [
        run for run in observed if accelerator in (None, run.cluster.groups[0].accelerator.name)
    ]
