"""Constants that measured runs can determine, their bounds, and a cluster with others.

A constant is a property of the machine or of the software on it, never of a model.  Those of the
device and of the links replace the catalogue's; the rest replaces what
`planner.costs.hardware_rates` and `planner.costs.layout_costs`, or the rules of a framework, take
for granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.costs.collectives import DEFAULT_FRACTION
from meshwright.planner.documents.cluster import ClusterSpec, DeviceCurve, DeviceGroup, LinkTier
from meshwright.planner.documents.profile import Calibration, TierCalibration

Constants = Mapping[str, float]

MATMUL, MEMORY, STEP, ACTION, SLACK = "matmul", "memory", "step_s", "action_s", "slack"
BANDWIDTH, LATENCY = "bytes_per_s", "latency_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant: what it is taken to be without measurements, and what it can be at all."""

    name: str
    what: str
    usual: float
    least: float
    most: float
    added: bool = False
    """Seconds that are added, which may be none: not a rate or a ratio."""
    of_memory: bool = False
    """Determined by memory, not by seconds."""


def constants_of(
    cluster: ClusterSpec, *, step_s: float, action_s: float, slack: float
) -> list[Constant]:
    """Return the constants of a cluster; the last three are what its predictions have now.

    No product is faster than the peak, no copy faster than the memory, no collective faster than
    its link, nothing takes less than no time, and a program reserves at least what it allocates.
    """
    curve = cluster.groups[0].accelerator.curve
    result = [
        Constant(
            name=MATMUL, what="share of peak in products", usual=curve.matmul, least=0.02, most=1.0
        ),
        Constant(
            name=MEMORY, what="share of memory bandwidth", usual=curve.memory, least=0.02, most=1.0
        ),
        Constant(
            name=STEP,
            what="fixed seconds of a step",
            usual=step_s,
            least=0.0,
            most=60.0,
            added=True,
        ),
        Constant(
            name=ACTION,
            what="seconds of the host for each micro-batch on a stage",
            usual=action_s,
            least=0.0,
            most=1.0,
            added=True,
        ),
        Constant(
            name=SLACK,
            what="reserved over allocated memory",
            usual=slack,
            least=1.0,
            most=2.0,
            of_memory=True,
        ),
    ]
    for tier in cluster.tiers:
        result += [
            Constant(
                name=f"{tier.name}.{BANDWIDTH}",
                what=f"bytes per second of {tier.name}",
                usual=tier.bytes_per_s,
                least=tier.bytes_per_s / 100,
                most=_most_bytes_per_s(tier),
            ),
            Constant(
                name=f"{tier.name}.{LATENCY}",
                what=f"seconds of a round over {tier.name}",
                usual=tier.latency_s,
                least=0.0,
                most=0.1,
                added=True,
            ),
        ]
    return result


def _most_bytes_per_s(tier: LinkTier) -> float:
    """Return the rate at which the fastest collective would move bytes at the quoted one.

    Sums in the switch already exceed 1 where a tier has such fractions, and must not grow again.
    """
    fractions = [tier.fractions.get(name, usual) for name, usual in DEFAULT_FRACTION.items()]
    return tier.bytes_per_s * max(1.0, 1.0 / max(fractions))


def with_fitted_constants(cluster: ClusterSpec, calibration: Calibration | None) -> ClusterSpec:
    """Return a cluster with the constants that were fitted, where it has what they are of.

    A cluster that has just these already stays as it is: a pace counts once.
    """
    if calibration is None or any(
        group.accelerator.curve.source == calibration.source for group in cluster.groups
    ):
        return cluster
    groups = tuple(
        _group(group, calibration) if group.accelerator.name == calibration.accelerator else group
        for group in cluster.groups
    )
    return cluster.model_copy(
        update={
            "groups": groups,
            "tiers": tuple(_tier(tier, calibration) for tier in cluster.tiers),
        }
    )


def _group(group: DeviceGroup, calibration: Calibration) -> DeviceGroup:
    """Return devices with their constants, and their hosts at their pace."""
    pace = calibration.pace or 1.0
    curve = _curve(group.accelerator.curve, calibration)
    changes: dict[str, object] = {
        "accelerator": group.accelerator.model_copy(update={"curve": curve})
    }
    for name in ("host_link_bytes_per_s", "host_memory_bytes_per_s"):
        rate = getattr(group, name)
        if rate is not None:
            changes[name] = rate / pace
    return group.model_copy(update=changes)


def _curve(curve: DeviceCurve, calibration: Calibration) -> DeviceCurve:
    """Attention keeps its share of the rate of products, and no rate passes its peak."""
    changes: dict[str, float | str] = {}
    if calibration.matmul is not None:
        ratio = calibration.matmul / curve.matmul
        changes |= {
            "matmul": calibration.matmul,
            "attention_forward": min(1.0, curve.attention_forward * ratio),
            "attention_backward": min(1.0, curve.attention_backward * ratio),
        }
    if calibration.memory is not None:
        changes["memory"] = calibration.memory
    if calibration.pace is not None:
        now = curve.model_copy(update=changes)
        rates = ("matmul", "attention_forward", "attention_backward", "memory")
        changes |= {name: min(1.0, getattr(now, name) / calibration.pace) for name in rates}
        changes["launch_s"] = curve.launch_s * calibration.pace
    if not changes:
        return curve
    origin = {"provenance": "fitted", "spread": calibration.spread, "source": calibration.source}
    return curve.model_copy(update={**changes, **origin})


def _tier(tier: LinkTier, calibration: Calibration) -> LinkTier:
    measured_tier, pace = calibration.tiers.get(tier.name), calibration.pace or 1.0
    if measured_tier is None and pace == 1:
        return tier
    rate, latency_s = (
        (measured_tier.bytes_per_s, measured_tier.latency_s) if measured_tier else (None, None)
    )
    rate = (tier.bytes_per_s if rate is None else rate) / pace
    latency_s = (tier.latency_s if latency_s is None else latency_s) * pace
    peer = tier.peer_bytes_per_s
    return tier.model_copy(
        update={
            "provenance": "fitted",
            "source": calibration.source,
            "bytes_per_s": rate,
            "peer_bytes_per_s": None if peer is None else peer * rate / tier.bytes_per_s,
            "latency_s": latency_s,
            "start_s": tier.start_s * pace,
            "least_round_s": tier.least_round_s * pace,
        }
    )


def calibration_of(
    values: Constants, *, accelerator: str, spread: float, runs: int, source: str
) -> Calibration:
    """Return constants as the part of a profile that has them.

    In the middle of a fit they may be out of their bounds: they are not checked here.
    """
    tiers: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        tier, _, what = name.rpartition(".")
        if tier:
            tiers.setdefault(tier, {})[what] = value
    return Calibration.model_construct(
        accelerator=accelerator,
        matmul=values.get(MATMUL),
        memory=values.get(MEMORY),
        step_s=values.get(STEP),
        action_s=values.get(ACTION),
        slack=values.get(SLACK),
        tiers={name: TierCalibration.model_construct(None, **each) for name, each in tiers.items()},
        runs=runs,
        spread=spread,
        source=source,
    )
