"""Energy and rent of a step, where a plan is preferred for that.

    energy = step n (k P + w) PUE        rent = step n price

n devices of design power P, k of nodes over that, w of the network, PUE of the site
(`planner.whatif.pricing.economics`).  What a device draws while it waits is not known, so all count
as busy for the whole step, and on the same devices the fastest plan takes least.  Devices that stay
idle are taken to be switched off, or not rented.

Under a power limit (`meshwright.api.power_limits`) P is the limit's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.api.power_limits import power_limit_notes, steps_of_exponents
from meshwright.planner.catalog import rents
from meshwright.planner.errors import DocumentError

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.cluster_parts import Rate
    from meshwright.planner.search.plan_preference import Prefer
    from meshwright.planner.whatif.uncertain_value import UncertainValue

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
                group.accelerator.power_limit,
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
        low, value, high = _of_step(each, prediction, request, plan)
        yield (
            f"a step costs ${value:.3g} of rent on demand (${low:.3g} to ${high:.3g}); devices "
            "that stay idle are not rented"
        )
        return
    low, value, high = (
        watt_seconds / HOUR_S for watt_seconds in _of_step(each, prediction, request, plan)
    )
    yield (
        f"a step takes {value:.3g} Wh at the meter ({low:.3g} to {high:.3g}), network and cooling "
        "included; devices that stay idle are switched off"
    )
    yield from power_limit_notes(request, plan, value)


def _of_step(
    each: UncertainValue, prediction: Prediction, request: Request, plan: Plan
) -> tuple[float, float, float]:
    """Return the low end, the value and the high end of what a step takes."""
    fastest, slowest = steps_of_exponents(request, plan, prediction)
    return (
        each.low * fastest.step_time_low_s,
        each.value * prediction.step_time_s,
        each.high * slowest.step_time_high_s,
    )
