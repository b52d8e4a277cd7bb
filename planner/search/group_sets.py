"""Sets of a cluster's groups: what they are as clusters of their own, and their least seconds.

On a set G of groups of which D_g devices are used each, a device of g takes w_gk for a sample of a
layer of kind k, and so at least ρ_g times u_k, the fewest seconds of any group, with
ρ_g = min_k w_gk / u_k:

    step >= batch · Σ_k n_k u_k / Σ_{g in G} D_g / ρ_g

A rank of a pipeline has whole layers, and as many devices d of one group as every other rank, so
that d divides each D_g.  Of N layers of the commonest kind c, the longest other layer being on one
of the ranks, a rank takes no more than τ d / batch only where

    Σ_g D_g / d · ⌊τ / w_gc⌋ >= N            step >= batch τ / d

Without a pipeline a replica of d devices has whole samples, Σ_g D_g / d · ⌊τ / Σ_k n_k w_gk⌋ >=
batch, and step >= τ / d.  Memory and links are left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.catalog.expressions import Shape, groups_part
from meshwright.planner.documents.cluster import DeviceGroup
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.device_counts import LeastSteps, Seconds, replicas_of
from meshwright.planner.search.space import divisors

Counts = NDArray[np.intp]

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
    request: Request, devices: Sequence[int], least: Sequence[LeastSteps]
) -> float:
    """Return what no plan takes less than that uses some devices of each of some groups.

    `least` is of each group alone.
    """
    samples_s, rates = _rates(request, least)
    even_s = samples_s / float(np.array(devices) @ rates)
    each_s, layers = np.array([bounds.device_s for bounds in least]), least[0].layers
    batch, common = request.job.global_batch, math.gcd(*devices)
    stages_s = (
        batch / width * whole_layers_s(each_s, layers, np.array(devices) // width)
        for width in replicas_of(request)
        if common % width == 0
    )
    replicas_s = (
        whole_samples_s(batch, each_s @ layers, np.array(devices) // width) / width
        for width in divisors(common)
    )
    whole_s = min(itertools.chain(stages_s, replicas_s)) * (1 - SLACK)
    return max(even_s, whole_s) * _quicker(least, sum(devices))


def whole_layers_s(each_s: Seconds, layers: Counts, ranks: Counts) -> float:
    """Least seconds of a sample on the slowest of some `ranks` [group] with whole layers each.

    `each_s` [group, kind] are those of a layer, of which there are `layers` [kind].
    """
    commonest = int(np.argmax(layers))
    layer_s, others_s = each_s[:, commonest], np.delete(each_s, commonest, axis=1)
    if not layer_s.all():
        return 0.0
    beside_s = np.zeros(len(each_s))
    if others_s.size:
        beside_s = others_s[:, int(np.argmax(others_s.min(axis=0)))]
    whole_s = np.arange(layers[commonest] + 1)[:, None] * layer_s
    ceilings_s = np.unique(np.concatenate([whole_s, whole_s + beside_s]))[:, None]
    free = np.floor(ceilings_s / layer_s * (1 + SLACK))
    beside = np.floor((ceilings_s - beside_s) / layer_s * (1 + SLACK))
    fewer = np.where(beside < 0, np.inf, free - beside).min(axis=1)
    enough = free @ ranks - fewer >= layers[commonest]
    return float(ceilings_s[int(np.argmax(enough)), 0])


def whole_samples_s(batch: int, model_s: Seconds, replicas: Counts) -> float:
    """Least seconds of the slowest of some `replicas` [group], each of which has whole samples.

    `model_s` [group] are those of a sample.
    """
    if replicas.sum() > batch:
        return math.inf
    if not model_s.all():
        return 0.0
    ceilings_s = np.unique(np.arange(1, batch + 1)[:, None] * model_s)
    samples = np.floor(ceilings_s[:, None] / model_s * (1 + SLACK))
    enough = (samples @ replicas >= batch) & (samples >= 1).all(axis=1)
    return float(ceilings_s[int(np.argmax(enough))])


def _quicker(least: Sequence[LeastSteps], devices: int) -> float:
    """Return by how much the slowest of fewer devices takes less than that of all, at most."""
    return min(1.0, *(of_group.quicker(devices) for of_group in least))


def _rates(request: Request, least: Sequence[LeastSteps]) -> tuple[float, Seconds]:
    """Return the seconds of all samples on a device of the fastest group; [group] 1 / ρ."""
    each_s = np.array([bounds.device_s for bounds in least])
    fewest_s = each_s.min(axis=0)
    slower = np.divide(each_s, fewest_s, out=np.full(each_s.shape, np.inf), where=fewest_s > 0)
    samples_s = request.job.global_batch * float(least[0].layers @ fewest_s)
    return samples_s * (1 - SLACK), 1.0 / slower.min(axis=1)


def fewer_devices(
    request: Request, least: Sequence[LeastSteps], limit_s: Callable[[], float]
) -> Iterator[GroupShapes]:
    """Yield the sets of which some devices may take less than a limit, the least bound first.

    `least` is of each group alone; the limit may fall.
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
        quicker = np.array([_quicker(some, max(1, n)) for n in range(devices.max() + 1)])
        bounds_s = samples_s * quicker[devices] / rate
        for place in np.argwhere((bounds_s < limit_s()) & (devices < devices.max())).tolist():
            chosen = tuple(of_group[at] for of_group, at in zip(shapes, place, strict=True))
            below.append((GroupShapes(float(bounds_s[tuple(place)]), kept, chosen), False))
    heapq.heapify(below)
    while below and below[0][0].bound_s < limit_s():
        part, is_whole = heapq.heappop(below)
        if is_whole:
            yield part
            continue
        numbers = [nodes * each for nodes, each in part.shapes]
        bound_s = least_together_s(request, numbers, [least[at] for at in part.kept])
        heapq.heappush(below, (part._replace(bound_s=bound_s), True))


def _shapes(group: DeviceGroup) -> list[Shape]:
    """Return nodes and devices of each that may be used of a group, all of them last."""
    whole = group.nodes, group.devices_per_node
    if group.accelerator.kind == "cpu":
        return [whole]
    return list(itertools.product(range(1, whole[0] + 1), range(1, whole[1] + 1)))
