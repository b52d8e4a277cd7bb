"""Power limits of devices, where a plan is preferred for its energy.

Under a limit to the share x of its design power a device multiplies at x**p of its rate, and all
else takes as long as before (`planner.costs.compute.limited_rate`).  A plan then takes T(x) seconds
and W(x) T(x) of energy, W being the watts of its devices at the meter.

A step is a longest path of actions.  From a limit y to a limit x none takes less time if x < y, nor
more than (y / x)**p times as long.  With g(x) = W(x) / x**p, for every plan on every part

    E(x) >= g(x) / g(y) E(y)    where x > y         E(x) >= W(x) / W(y) E(y)    where x < y

The ratios are the least of any device group.  So the proof of a search under y bounds the energy of
all plans under x.  Where g(x) >= g(y), no plan takes less under x than under the lower y.  The
lowest limit is searched first.  Full power is searched beside it unless that excludes it; a limit
between both is searched where a plan of theirs takes less under it than both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.planner.catalog import source_text
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.compute import (
    POWER_BASIS,
    POWER_CURVES,
    POWER_EXPONENT,
    POWER_EXPONENT_RANGE,
    limited_rate,
)
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.search.proof_account import of_limits

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.cluster_parts import PartAnswer, Rate

LIMITS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the design power that are compared; below, no source knows the rate."""
HOUR_S = 3600.0
Searched = tuple["PartAnswer", "Request"]


@dataclass(frozen=True, slots=True)
class LimitBound:
    """Bound of what a step of any plan takes under a limit."""

    share: float
    energy: float
    """No plan takes less, in the unit of the rate times seconds."""
    is_excluded: bool = False
    """True if each plan takes no more under a limit that was searched."""


def may_be_limited(request: Request) -> str | None:
    """Return why no limits are compared for a request, or None if they are."""
    if request.profile is not None:
        return "the profile's seconds were measured under one limit"
    devices = [group.accelerator for group in request.cluster.groups]
    if any(device.power_limit is not None for device in devices):
        return "the cluster names one"
    unknown = sorted({device.name for device in devices if device.kind not in POWER_CURVES})
    if unknown:
        return f"how the rate of {' and '.join(unknown)} falls with it is not known"
    return None


def limited(request: Request, share: float) -> Request:
    """Return a request on the same devices under a power limit; full power changes nothing."""
    if share == 1:
        return request
    cluster = with_limit(request.cluster, share)
    name = request.cluster_name
    words = f",power_limit={share:g}"
    called = "+".join(f"{term}{words}" for term in name.split("+"))
    try:
        is_named = resolve_cluster(called).groups == cluster.groups
    except DocumentError:
        is_named = False
    return replace(request, cluster=cluster, called=called if is_named else name)


def with_limit(cluster: ClusterSpec, share: float | None) -> ClusterSpec:
    """Return a cluster whose devices have a power limit, or none."""
    return cluster.with_power_limits(lambda _: share)


def least_energy(
    request: Request, rate: Rate, search_under: Callable[[Request], Searched]
) -> Searched:
    """Return the answer with the least energy of all plans and limits, and its request.

    `rate` are the watts of a part under its limit.  The proof says what is known of every limit.
    """
    answers: dict[float, Searched] = {}

    def bounds() -> list[LimitBound]:
        return [
            _bound(request.cluster, share, rate, answers)
            for share in LIMITS
            if share not in answers
        ]

    def best() -> float:
        return min(answers, key=lambda share: _energy(answers[share], rate))

    for share in (min(LIMITS), max(LIMITS)):
        bound = _bound(request.cluster, share, rate, answers)
        if answers and (bound.is_excluded or bound.energy >= _energy(answers[best()], rate)):
            continue
        answers[share] = search_under(limited(request, share))
    between = {
        bound.share: _least_of_plans(answers.values(), bound.share, rate)
        for bound in bounds()
        if not bound.is_excluded
    }
    likely = min(between, key=between.__getitem__, default=None)
    if likely is not None and between[likely] < _energy(answers[best()], rate) * (1 - EQUAL):
        answers[likely] = search_under(limited(request, likely))
    share = best()
    found, of_limit = answers[share]
    each = rate(found.part.request.cluster)
    lows = [
        other.answer.certificate.lower_bound_s * rate(other.part.request.cluster)
        for other, _ in answers.values()
    ]
    left = bounds()
    certificate = of_limits(
        found.answer.certificate,
        [energy / each for energy in (*lows, *(b.energy for b in left if not b.is_excluded))],
        searched=sorted(answers, reverse=True),
        excluded=[bound.share for bound in left if bound.is_excluded],
        bounded=[bound.share for bound in left if not bound.is_excluded],
    )
    return replace(found, answer=replace(found.answer, certificate=certificate)), of_limit


def _energy(searched: Searched, rate: Rate) -> float:
    found, _ = searched
    return found.answer.prediction.step_time_s * rate(found.part.request.cluster)


def _bound(
    cluster: ClusterSpec, share: float, rate: Rate, answers: dict[float, Searched]
) -> LimitBound:
    """Return what is known of the energy of all plans under a limit, by those that were searched.

    The ratios are those of each device group, whose parts have as many watts a device.
    """
    energy, is_excluded = 0.0, False
    for other, (found, _) in answers.items():
        power = min(
            rate(with_limit(part, share)) / rate(with_limit(part, other))
            for part in ((cluster.part((group,))) for group in cluster.groups)
        )
        ratio = power * (limited_rate(other) / limited_rate(share)) if share > other else power
        low = found.answer.certificate.lower_bound_s * rate(found.part.request.cluster)
        energy = max(energy, ratio * low)
        is_excluded |= share > other and ratio >= 1
    return LimitBound(share, energy, is_excluded)


def _least_of_plans(answers: Iterable[Searched], share: float, rate: Rate) -> float:
    """Return the least energy of the plans of some answers under a limit."""
    energies = []
    for found, request in answers:
        cluster = with_limit(found.part.request.cluster, share)
        step_s = predict(found.answer.plan, request.model, cluster).step_time_s
        energies.append(step_s * rate(cluster))
    return min(energies)


def steps_of_exponents(
    request: Request, plan: Plan, prediction: Prediction
) -> tuple[Prediction, Prediction]:
    """Return the predictions of a plan if products fall least, and most, with its limit."""
    shares = {group.accelerator.power_limit or 1.0 for group in request.cluster.groups}
    if shares == {1.0}:
        return prediction, prediction
    low, high = (
        predict(plan, request.model, _with_exponent(request.cluster, power), request.profile)
        for power in POWER_EXPONENT_RANGE
    )
    return low, high


def _with_exponent(cluster: ClusterSpec, power: float) -> ClusterSpec:
    """Return a cluster whose products fall with another power of its limits."""
    exponent = power / POWER_EXPONENT
    return cluster.with_power_limits(lambda device: (device.power_limit or 1.0) ** exponent)


def power_limit_notes(request: Request, plan: Plan, energy_wh: float) -> Iterator[str]:
    """Yield the limit under which a plan takes this energy, or why there is none."""
    from meshwright.planner.whatif.candidates import watts_of  # noqa: PLC0415 - few prefer it
    from meshwright.planner.whatif.study import Assumptions  # noqa: PLC0415 - few prefer it

    cluster = request.cluster
    shares = {group.accelerator.power_limit or 1.0 for group in cluster.groups}
    if shares == {1.0}:
        why = may_be_limited(request)
        if why is not None:
            yield f"no power limits of the devices are compared: {why}"
        return
    full = with_limit(cluster, None)
    step_s = predict(plan, request.model, full, request.profile).step_time_s
    watts = watts_of(full, Assumptions())
    assert watts is not None, "the power under a limit is known"
    full_wh = watts.value * step_s / HOUR_S
    each = ", ".join(
        f"{(group.accelerator.power_limit or 1.0) * (group.accelerator.tdp_w or 0.0):.0f} of "
        f"{group.accelerator.tdp_w or 0.0:.0f} W of {group.accelerator.name}"
        for group in cluster.groups
    )
    low, high = POWER_EXPONENT_RANGE
    yield (
        f"these seconds are under a power limit of {each}: without it the same plan takes "
        f"{seconds_text(step_s)} a step and {full_wh:.3g} Wh "
        f"({100 * (energy_wh / full_wh - 1):+.0f} % with it). Rates of products fall with the "
        f"limit to the power of {POWER_EXPONENT:g} ({low:g} to {high:g}; quoted: "
        f"{source_text(POWER_BASIS)})"
    )
