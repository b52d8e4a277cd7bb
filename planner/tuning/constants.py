"""What trials show of a cluster, as the constants that `plan` and `whatif` take in a profile."""

from __future__ import annotations

import math

from planner.accuracy.calibrate.constants import (
    BANDWIDTH,
    MATMUL,
    MEMORY,
    Constants,
    calibration_of,
    constants_of,
)
from planner.documents.cluster import ClusterSpec
from planner.documents.profile import Calibration
from planner.tuning.belief import ConstantBelief, Posterior
from planner.tuning.options import CONSTANTS


def calibration(
    cluster: ClusterSpec,
    found: Posterior,
    *,
    runs: int,
    source: str,
    seen: ClusterSpec | None = None,
) -> Calibration:
    """Return the constants of a cluster as a belief has them, within what each can be at all.

    Rates fall by what seconds grow: those of kernels by `kernels`, those of links by it and by the
    links' own constant, of which the innermost tier has those inside a node.  The rest of the
    belief, which speaks of choices and not of the machine, stays with the trials.  Links that the
    cluster on which trials ran, if it is another (`seen`), does not have follow nothing.
    """
    told = {one.name: one for one in found.constants}
    kernels = math.exp(-told["kernels"].mean)
    curve = cluster.groups[0].accelerator.curve
    values = {MATMUL: curve.matmul * kernels, MEMORY: curve.memory * kernels}
    known = {tier.name for tier in (seen or cluster).tiers}
    for place, tier in enumerate(cluster.tiers):
        if tier.name not in known:
            continue
        inside = told["inner links" if place == 0 else "outer links"]
        link = max((inside, told["data links"]), key=_learnt)
        values[f"{tier.name}.{BANDWIDTH}"] = tier.bytes_per_s * kernels * math.exp(-link.mean)
    made = calibration_of(
        _within(cluster, values),
        accelerator=cluster.groups[0].accelerator.name,
        spread=1.28 * told["kernels"].spread,
        runs=runs,
        source=source,
    )
    return Calibration.model_validate(made.model_dump())


def _learnt(told: ConstantBelief) -> float:
    """Return by how much trials made a constant surer."""
    return 1 - told.spread / CONSTANTS[told.name].spread


def _within(cluster: ClusterSpec, values: Constants) -> Constants:
    bounds = {
        one.name: (one.least, one.most)
        for one in constants_of(cluster, step_s=0.0, action_s=0.0, slack=1.0)
    }
    return {
        name: min(bounds[name][1], max(bounds[name][0], value)) for name, value in values.items()
    }
