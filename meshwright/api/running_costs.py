"""Energy and rent of a step, where a plan is preferred for that.

    energy = step n (k P + w) PUE        rent = step n price

n devices of design power P, k of nodes over that, w of the network, PUE of the site
(`planner.whatif.pricing.economics`).  What a device draws while it waits is not known, so all count
as busy for the whole step, and on the same devices the fastest plan takes least.  Devices that stay
idle are taken to be switched off, or not rented.

A power limit of share x lowers the rate of products to x**p of it (the exponent of studies, with
its source and range).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.planner.catalog import rents
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import DocumentError

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.cluster_parts import Rate
    from meshwright.planner.search.plan_preference import Prefer
    from meshwright.planner.whatif.uncertain_value import UncertainValue

POWER_LIMITS = (0.9, 0.8, 0.7, 0.6)
"""Shares of the design power that are looked at; below, no source knows the rate."""
HOUR_S = 3600.0


def running_rate(prefer: Prefer, cluster: ClusterSpec) -> Rate | None:
    """Return what a second of each part of a cluster takes, in watts or dollars.

    None where the seconds alone count; DocumentError where a figure of the cluster is not known.
    """
    if prefer not in ("energy", "cost"):
        return None
    if _each_second(prefer, cluster) is None:
        devices = " and ".join(sorted({group.accelerator.name for group in cluster.groups}))
        lacking = (
            "the design power (tdp_w)" if prefer == "energy" else "an on-demand price of nodes"
        )
        instead = (
            "give it in the cluster's document"
            if prefer == "energy"
            else "write a study with a price of your own for 'meshwright whatif'"
        )
        raise DocumentError(
            "prefer",
            f"is '{prefer}', and the catalogue lacks {lacking} of {devices}; {instead}, or use "
            "--prefer fastest",
        )
    most = max((offer.most_devices or 0 for offer in rents()), default=0)
    known: dict[object, float] = {}
    """A device's share, by all that prices depend on: larger offers have no limit."""

    def rate(part: ClusterSpec) -> float:
        key = tuple(
            (
                group.accelerator.name,
                group.devices_per_node,
                group.nodes > 1,
                min(group.devices, most + 1),
                group.devices / part.devices,
            )
            for group in part.groups
        )
        if key not in known:
            each = _each_second(prefer, part)
            known[key] = math.inf if each is None else each.value / part.devices
        return known[key] * part.devices

    return rate


def _each_second(prefer: Prefer, cluster: ClusterSpec) -> UncertainValue | None:
    """Return watts at the meter, or dollars of a second; None where one is not known."""
    from meshwright.planner.whatif.candidates import watts_of  # noqa: PLC0415 - few prefer it
    from meshwright.planner.whatif.pricing.offers import rent_of  # noqa: PLC0415 - few prefer it
    from meshwright.planner.whatif.study import Assumptions, Rental  # noqa: PLC0415 - few prefer it

    if prefer == "energy":
        return watts_of(cluster, Assumptions())
    each_hour = rent_of(Rental(), cluster, rents()).usd_per_device_hour
    return None if each_hour is None else each_hour.times(cluster.devices / HOUR_S)


def running_costs(
    prefer: Prefer, request: Request, plan: Plan, prediction: Prediction
) -> Iterator[str]:
    """Yield what a step of a plan takes on its devices, and what a power limit would change."""
    if prefer not in ("energy", "cost"):
        return
    each = _each_second(prefer, request.cluster)
    assert each is not None, "a part whose figure is not known is not searched"
    if prefer == "cost":
        low, value, high = _of_step(each, prediction)
        yield (
            f"a step costs ${value:.3g} of rent on demand (${low:.3g} to ${high:.3g}); devices "
            "that stay idle are not rented"
        )
        return
    low, value, high = (watt_seconds / HOUR_S for watt_seconds in _of_step(each, prediction))
    yield (
        f"a step takes {value:.3g} Wh at the meter ({low:.3g} to {high:.3g}), network and cooling "
        "included; devices that stay idle are switched off"
    )
    if request.profile is None:  # what was measured does not say how it falls with the power
        yield from _power_limit(request, plan, value)


def _of_step(each: UncertainValue, prediction: Prediction) -> tuple[float, float, float]:
    """Return the low end, the value and the high end of what a step takes."""
    return (
        each.low * prediction.step_time_low_s,
        each.value * prediction.step_time_s,
        each.high * prediction.step_time_high_s,
    )


def _power_limit(request: Request, plan: Plan, full_wh: float) -> Iterator[str]:
    """Yield the power limit with which the same plan takes least energy, if one takes less."""
    from meshwright.planner.whatif.candidates import watts_of  # noqa: PLC0415 - few prefer it
    from meshwright.planner.whatif.study import Assumptions  # noqa: PLC0415 - few prefer it
    from meshwright.planner.whatif.what_if_changes import changed_cluster  # noqa: PLC0415 - few prefer it

    assumed = Assumptions()
    exponent = assumed.power_limit_exponent

    def limited(share: float, power: float) -> tuple[float, float]:
        """Return the energy and the seconds of a step."""
        cluster = changed_cluster(request.cluster, "compute", share**power)
        watts = watts_of(request.cluster, assumed, share)
        assert cluster is not None
        assert watts is not None, "the full power is known"
        step_s = predict(plan, request.model, cluster, request.profile).step_time_s
        return watts.value * step_s / HOUR_S, step_s

    (least_wh, step_s), share = min(
        (limited(share, exponent.value), share) for share in POWER_LIMITS
    )
    if least_wh >= full_wh:
        return
    best, worst = (
        limited(share, power)[0] / full_wh - 1 for power in (exponent.low, exponent.high)
    )
    each = ", ".join(
        f"{share * (group.accelerator.tdp_w or 0.0):.0f} W of {group.accelerator.name}"
        for group in request.cluster.groups
    )
    yield (
        f"at a power limit of {each} the same plan takes {seconds_text(step_s)} a step and "
        f"{least_wh:.3g} Wh, {100 * (least_wh / full_wh - 1):+.0f} % ({100 * best:+.0f} to "
        f"{100 * worst:+.0f} %): rates of products fall with the limit to the power of "
        f"{exponent.value:g} ({exponent.low:g} to {exponent.high:g}; {exponent.source})"
    )
