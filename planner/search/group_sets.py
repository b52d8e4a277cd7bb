"""Sets of a cluster's groups: what they are as clusters of their own, and their least seconds.

On a set G of groups with D_g devices each, a device of g takes w_gk for a sample of a layer of kind
k, and so at least ρ_g times u_k, the fewest seconds of any group, with ρ_g = min_k w_gk / u_k:

    step >= batch · Σ_k n_k u_k / Σ_{g in G} D_g / ρ_g

Memory, links and how work is divided are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.planner.catalog.expressions import groups_part
from meshwright.planner.documents.cluster import DeviceGroup
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.device_counts import LeastSteps

MOST_GROUPS = 6
"""Of more groups only single ones and all but one are looked at."""


def proper_sets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of several groups that leave some out, by their indices.

    >>> list(proper_sets(3))
    [(0, 1), (0, 2), (1, 2)]
    """
    sizes = range(2, count) if count <= MOST_GROUPS else (count - 1,)
    for size in sizes:
        yield from itertools.combinations(range(count), size)


def on_group_set(request: Request, kept: Sequence[int]) -> Request:
    """Return the request on some groups of its cluster, as a cluster of their own."""
    name, cluster = groups_part(request.cluster_name, request.cluster, kept)
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
    each_s = np.array([bounds.device_s for bounds in least])
    fewest_s = each_s.min(axis=0)
    slower = np.divide(each_s, fewest_s, out=np.full(each_s.shape, np.inf), where=fewest_s > 0).min(
        axis=1
    )
    rate = sum(group.devices / by for group, by in zip(groups, slower.tolist(), strict=True))
    samples_s = request.job.global_batch * float(least[0].layers @ fewest_s)
    return float(samples_s * (1 - SLACK) / rate)
