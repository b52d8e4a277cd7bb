"""Forwards ahead of slow links: the numbers that a search looks at beside none.

A pipeline waits for a transfer that takes long beside a stage's passes, unless the ranks before it
run more forwards ahead (`meshwright.planner.schedules.pipeline_schedules.with_ahead`), which takes
activations of one micro-batch more on each of them.  With c seconds of a transfer and t seconds of
both passes on a rank, a_l = 2 c / t forwards hide it.  One, as many as that is by the rate of the
link and `ACHIEVED` of the devices' peak, and twice as many are looked at for

alike devices   all links of a pipeline that leaves a node, or the fastest tier: all are priced as
                the slowest (`meshwright.planner.costs.stage_placement.alike`)
device groups   the links where groups meet, for every order of groups that are in one piece each,
                and those inside of a group of several nodes

None are looked at where that could gain less than `LEAST_GAIN` of a step, where there are no more
micro-batches than ranks, and of models whose layers form a graph.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from meshwright.planner.costs.collectives import group_levels
from meshwright.planner.costs.compute import peak_flops
from meshwright.planner.operators.layer_operators import step_flops

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.space import Degrees

MOST_GROUPS = 3
"""Largest number of device groups whose orders are gone through."""
MOST_FORWARDS = 8
"""Largest number of forwards ahead of one link."""
FILLING = 3
"""Forwards ahead of each link by which the first ranks fill most of their wait for a backward; in a
deep pipeline twice as many fill the rest, where they have room."""
ACHIEVED = 0.6
"""Share of their peak that devices reach in a stage's passes, at most about."""
LEAST_GAIN = 0.005
"""Share of a step that forwards ahead may gain, from which on they are looked at."""
Links = tuple[int, ...]
"""[link] Forwards ahead of it; empty: none."""


def ahead_choices(request: Request, degrees: Degrees | Layout) -> tuple[Links, ...]:
    """Return forwards ahead of the links of a pipeline; none, or pinned ones, come first.

    No more micro-batches than ranks have the first alone.
    """
    ranks, pinned = degrees.pipeline, request.pins.ahead
    if pinned is not None:
        fits = len(pinned) == ranks - 1 or not pinned
        return (pinned,) if fits else ()
    if ranks == 1 or request.model.edges or not request.space.forwards_ahead:
        return ((),)
    every = slow_links(request.cluster, degrees)
    numbers = numbers_ahead(request, degrees) if every else []
    choices = {
        tuple(number * slow for slow in links): None for links in every for number in numbers
    }
    return (), *(links for links in choices if any(links))


def numbers_ahead(request: Request, degrees: Degrees | Layout) -> list[int]:
    """Return how many forwards ahead of a slow link are looked at: one, enough to hide it, and
    twice as many.

    A sample takes t = FLOPs / (P-th part of the devices' peaks, `ACHIEVED` of them), and its
    activation of one stream c.  A step gains 2 c / t (P - 1) / P of itself at most.
    """
    a, job, cluster = request.model.architecture, request.job, request.cluster
    if a is None:
        return [1]
    each = degrees.tensor * degrees.context
    flops = step_flops(
        request.model,
        seq_len=job.seq_len,
        global_batch=1,
        document_len=job.document_len,
        frozen=job.lora is not None,
    )
    peaks = [peak_flops(group.accelerator, job.precision) for group in cluster.groups]
    devices = sum(group.devices for group in cluster.groups)
    mean = sum(peak * group.devices for peak, group in zip(peaks, cluster.groups, strict=True)) / (
        devices
    )
    passes_s = flops / (ACHIEVED * mean * each * degrees.pipeline)
    sent_bytes = 2.0 * job.seq_len * a.hidden_size / each
    waits = 2 * sent_bytes / min(tier.bytes_per_s for tier in cluster.tiers) / passes_s
    if waits * (degrees.pipeline - 1) / degrees.pipeline < LEAST_GAIN:
        return []
    hiding = max(FILLING, math.ceil(waits))
    return sorted({1, *(min(MOST_FORWARDS, number) for number in (hiding, 2 * hiding))})


def slow_links(cluster: ClusterSpec, degrees: Degrees | Layout) -> list[Links]:
    """[choice][link] Return 1 for each slow link of a pipeline, by the orders of groups."""
    slower = _slower_tiers(cluster)
    if not cluster.is_mixed:
        return [(1,) * (degrees.pipeline - 1)] if slower else []
    each = degrees.tensor * degrees.context * degrees.data
    stages = [group.devices // each for group in cluster.groups]
    if sum(stages) != degrees.pipeline or len(stages) > MOST_GROUPS:
        return []
    meeting = int(cluster.tiers[-1] in slower)
    inside = [
        int(count * each > group.devices_per_node and (group.tiers or cluster.tiers)[-1] in slower)
        for count, group in zip(stages, cluster.groups, strict=True)
    ]
    choices: dict[Links, None] = {}
    for order in itertools.permutations([at for at, count in enumerate(stages) if count]):
        links = [number for at in order for number in (*[inside[at]] * (stages[at] - 1), meeting)]
        choices[tuple(links[:-1])] = None
    return list(choices)


def may_run_ahead(request: Request, layout: Layout) -> bool:
    """Return whether the links of a layout's pipeline are slow.

    Pinned forwards ahead need no slow link.
    """
    cluster = request.cluster
    if cluster.is_mixed or request.pins.ahead is not None:
        return True
    levels = group_levels(cluster.tiers, layout, ("pipeline",))
    return bool(levels) and levels[-1].tier in _slower_tiers(cluster)


def _slower_tiers(cluster: ClusterSpec) -> list[LinkTier]:
    """Return the tiers that join nodes, and those that are slower than the fastest."""
    inside = [tier for group in cluster.groups for tier in group.tiers or ()]
    every = [*inside, *cluster.tiers]
    fastest = max(tier.bytes_per_s for tier in every)
    node = max(group.devices_per_node for group in cluster.groups)
    return [tier for tier in every if tier.bytes_per_s < fastest or tier.devices > node]
