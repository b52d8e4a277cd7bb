"""Sets of a cluster's groups: what they are as clusters of their own, and their least seconds.

On a set G of groups of which D_g devices are used each, a device of g takes w_gk for a sample of a
layer of kind k, and so at least ρ_g times u_k, the fewest seconds of any group, with
ρ_g = min_k w_gk / u_k:

    step >= batch · Σ_k n_k u_k / Σ_{g in G} D_g / ρ_g

Memory, links and how work is divided are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from meshwright.planner.catalog.expressions import Shape, groups_part
from meshwright.planner.documents.cluster import DeviceGroup
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.device_counts import LeastSteps, Seconds

MOST_GROUPS = 6
"""Most groups of which all sets are looked at; of more, only single groups and all but one."""
MOST_SHAPES = 100_000
"""Most choices of devices of each group of a set; of more, only whole nodes are looked at."""


class GroupShapes(NamedTuple):
    """Some groups of a cluster, the nodes that are used of each, and the devices of each node."""

    bound_s: float
    """No plan takes less."""
    kept: tuple[int, ...]
    shapes: tuple[Shape, ...]


def proper_sets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of several groups that leave some out, by their indices.

    >>> list(proper_sets(3))
    [(0, 1), (0, 2), (1, 2)]
    """
    sizes = range(2, count) if count <= MOST_GROUPS else (count - 1,)
    for size in sizes:
        yield from itertools.combinations(range(count), size)


def on_group_set(
    request: Request, kept: Sequence[int], shapes: Sequence[Shape] | None = None
) -> Request:
    """Return the request on some groups of its cluster, or some nodes and devices of each."""
    name, cluster = groups_part(request.cluster_name, request.cluster, kept, shapes)
    measured = request.profile
    if request.cluster.is_mixed:
        names = [request.cluster.groups[at].name for at in kept]
        profiles = request.profiles
        measured = {
            group.name: profiles[whole_name]
            for whole_name, group in zip(names, cluster.groups, strict=True)
            if whole_name in profiles
        }
    return replace(request, cluster=cluster, called=name, profile=measured or None)


def least_together_s(
    request: Request, groups: Sequence[DeviceGroup], least: Sequence[LeastSteps]
) -> float:
    """Return what no plan of some groups takes less than; `least` is of each group alone."""
    samples_s, rates = _rates(request, least)
    return samples_s / float(np.array([group.devices for group in groups]) @ rates)


def _rates(request: Request, least: Sequence[LeastSteps]) -> tuple[float, Seconds]:
    """Return the seconds of all samples on a device of the fastest group; [group] 1 / ρ."""
    each_s = np.array([bounds.device_s for bounds in least])
    fewest_s = each_s.min(axis=0)
    slower = np.divide(each_s, fewest_s, out=np.full(each_s.shape, np.inf), where=fewest_s > 0)
    samples_s = request.job.global_batch * float(least[0].layers @ fewest_s)
    return samples_s * (1 - SLACK), 1.0 / slower.min(axis=1)


def fewer_devices(
    request: Request, least: Sequence[LeastSteps], limit_s: float
) -> list[GroupShapes]:
    """Return the sets of which some devices may take less than some seconds, least bound first.

    `least` is of each group alone.  A rank of a pipeline has as many devices on every group, so
    that numbers with a common divisor allow more: before all others comes the first of each
    divisor that all devices together do not have.
    """
    groups, below = request.cluster.groups, []
    for kept in (*proper_sets(len(groups)), tuple(range(len(groups)))):
        shapes = [_shapes(groups[at]) for at in kept]
        if math.prod(map(len, shapes)) > MOST_SHAPES:
            shapes = [[(n, e) for n, e in of_group if e == of_group[-1][1]] for of_group in shapes]
        if math.prod(map(len, shapes)) > MOST_SHAPES:
            continue
        some = [least[at] for at in kept]
        samples_s, rates = _rates(request, some)
        counts = [np.array([nodes * each for nodes, each in of_group]) for of_group in shapes]
        devices = reduce(np.add.outer, counts)
        rate = reduce(np.add.outer, [count * by for count, by in zip(counts, rates, strict=True)])
        # Of fewer devices the slowest one is quicker.
        most = devices.max() + 1
        quicker = np.array(
            [min(1.0, *(of_group.quicker(max(1, n)) for of_group in some)) for n in range(most)]
        )
        bounds_s = samples_s * quicker[devices] / rate
        for place in np.argwhere((bounds_s < limit_s) & (devices < devices.max())).tolist():
            chosen = tuple(of_group[at] for of_group, at in zip(shapes, place, strict=True))
            below.append(GroupShapes(float(bounds_s[tuple(place)]), kept, chosen))
    below.sort()
    known = {math.gcd(*(group.devices for group in groups))}
    firsts, others = list[GroupShapes](), list[GroupShapes]()
    for part in below:
        divisor = math.gcd(*(nodes * each for nodes, each in part.shapes))
        is_new = all(other % divisor for other in known)
        known.add(divisor)
        (firsts if is_new else others).append(part)
    return firsts + others


def _shapes(group: DeviceGroup) -> list[Shape]:
    """Return nodes and devices of each that may be used of a group, all of them last."""
    whole = group.nodes, group.devices_per_node
    if group.accelerator.kind == "cpu":
        return [whole]
    return list(itertools.product(range(1, whole[0] + 1), range(1, whole[1] + 1)))
