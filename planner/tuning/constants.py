"""Constants of a cluster that trials show, as a profile for `plan` and `whatif`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshwright.planner.calibration.fitting.fitted_constants import (
    ACTION,
    BANDWIDTH,
    LATENCY,
    MATMUL,
    MEMORY,
    STEP,
    Constants,
    calibration_of,
    constants_of,
)
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import Host
from meshwright.planner.documents.profile import Calibration
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.tuning.posterior import ConstantBelief, Posterior
from meshwright.planner.tuning.trial_options import CONSTANTS


def calibration(
    cluster: ClusterSpec,
    posterior: Posterior,
    host: Host,
    *,
    pace: float,
    runs: int,
    source: str,
    seen: ClusterSpec | None = None,
) -> Calibration:
    """Return the constants of a cluster as a belief has them, within what each can be at all.

    Everything takes `kernels` times as long: that is the pace.  Links are slower by their own
    constant beside, of which the innermost tier has those inside a node, and so is what is fixed of
    steps and actions.  The rest of the belief is about choices, not the machine, and stays with the
    trials.  Links that the cluster on which trials ran, if it is another (`seen`), does not have
    follow nothing.  `cluster` is without the pace that was known before.
    """
    constants = {constant.name: constant for constant in posterior.constants}
    fixed = math.exp(constants["host"].mean)
    curve = cluster.groups[0].accelerator.curve
    values = {
        MATMUL: curve.matmul,
        MEMORY: curve.memory,
        STEP: fixed * host.step_s,
        ACTION: fixed * host.action_s,
    }
    tiers = {tier.name for tier in (seen or cluster).tiers}
    for place, tier in enumerate(cluster.tiers):
        if tier.name not in tiers:
            continue
        inside = constants["inner links" if place == 0 else "outer links"]
        link = max((inside, constants["data links"]), key=_learnt)
        values[f"{tier.name}.{BANDWIDTH}"] = tier.bytes_per_s * math.exp(-link.mean)
        values[f"{tier.name}.{LATENCY}"] = tier.latency_s * math.exp(link.mean)
    calibration = calibration_of(
        _clip_to_limits(cluster, values),
        accelerator=cluster.groups[0].accelerator.name,
        spread=posterior.usual_width(),
        runs=runs,
        source=source,
    )
    paced = {"pace": pace * math.exp(constants["kernels"].mean)}
    return Calibration.model_validate(calibration.model_dump() | paced)


TURNS = 4
"""Predictions in which a pace is found: all but what is never slower grows with it."""


def as_measured(
    calibration: Calibration,
    measured_s: Sequence[float],
    predicted_s: Callable[[Calibration, int], float],
) -> Calibration:
    """Return constants with the pace at which the first of some runs is predicted as measured.

    Their spread is at least one within which all those runs are.  `predicted_s` returns the seconds
    of each with some constants; that spread contains what a machine's plans have in common beside
    the constants.
    """
    for _ in range(TURNS):
        slower = measured_s[0] / predicted_s(calibration, 0)
        if abs(slower - 1) < EQUAL:
            break
        calibration = calibration.model_copy(update={"pace": (calibration.pace or 1.0) * slower})
    misses = [
        abs(math.log(step_s / predicted_s(calibration, run)))
        for run, step_s in enumerate(measured_s)
    ]
    return calibration.model_copy(update={"spread": max(calibration.spread, *misses)})


def _learnt(constant: ConstantBelief) -> float:
    """Return by how much trials made a constant surer."""
    return 1 - constant.spread / CONSTANTS[constant.name].spread


def _clip_to_limits(cluster: ClusterSpec, values: Constants) -> Constants:
    bounds = {
        constant.name: (constant.least, constant.most)
        for constant in constants_of(cluster, step_s=0.0, action_s=0.0, slack=1.0)
    }
    return {
        name: min(bounds[name][1], max(bounds[name][0], value)) for name, value in values.items()
    }
