"""Seconds taken by collectives on one or several link tiers, by the alpha-beta model.

A group of ranks is described by its levels: how many of its members reach each other over each
tier, fastest first.  Sizes follow nccl-tests: all_reduce and send_recv the buffer, all_gather the
gathered output, reduce_scatter the input, all_to_all one rank's whole buffer.  Where a level has
measured points, its seconds are interpolated from them; no operation is derived from another one.

Symbols: n ranks, S bytes, α = latency_s, W = bytes_per_s x fraction reached by the operation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.alpha_beta_fit import fitted_s
from meshwright.planner.documents.cluster import Collective, LinkTier
from meshwright.planner.documents.plan import Axis, Layout
from meshwright.planner.documents.profile import CollectiveCurve
from meshwright.planner.documents.tolerances import NOTHING
from meshwright.planner.operators.expert_routing import Routing

DEFAULT_FRACTION: dict[Collective, float] = {
    "all_reduce": 0.75,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.7,
    "send_recv": 0.85,
    "broadcast": 0.75,
}
"""Bus bandwidth over the quoted rate where a tier does not say: the middle of what nccl-tests reach
over NVLink (0.66-0.79 without in-switch sums) and over InfiniBand or EFA (0.65-0.87)."""


@dataclass(frozen=True, slots=True)
class Level:
    """`members` of a group that reach each other over a tier, one from each faster subgroup."""

    tier: LinkTier
    members: int


Levels = tuple[Level, ...]
Amount = TypeVar("Amount", float, NDArray[np.float64])
Curves = Mapping[tuple[str, Collective], tuple[CollectiveCurve, ...]]


def curves_by_name(curves: Sequence[CollectiveCurve]) -> Curves:
    """Return measured curves by tier and operation, fewest ranks first."""
    result: dict[tuple[str, Collective], tuple[CollectiveCurve, ...]] = {}
    for curve in sorted(curves, key=lambda c: c.ranks):
        key = (curve.tier, curve.operation)
        result[key] = (*result.get(key, ()), curve)
    return result


def group_levels(tiers: Sequence[LinkTier], layout: Layout, axes: Sequence[Axis]) -> Levels:
    """Return the levels of the groups along some axes of a layout's mesh.

    Ranks are numbered with `layout.order` innermost first.  A tier that reaches D devices has
    whole groups if D is a multiple of the ranks they span; else it has as many members as fit
    without straddling its border, and the next tier joins the parts.
    """
    return levels(tiers, group_steps(layout, axes), devices=layout.devices)


def group_steps(layout: Layout, axes: Sequence[Axis]) -> tuple[tuple[int, int], ...]:
    """Return (ranks, stride) of every axis of a group that has several ranks, innermost first."""
    degrees: dict[Axis, int] = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data_shard": layout.data_shard,
        "data_replicate": layout.data_replicate,
        "pipeline": layout.pipeline,
    }
    steps = []
    stride = 1
    for axis in layout.order:
        if axis in axes and degrees[axis] > 1:
            steps.append((degrees[axis], stride))
        stride *= degrees[axis]
    return tuple(steps)


def same_experts_steps(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return (ranks, stride) of the ranks within a replica that hold the same experts.

    Experts, and the tensor ranks that divide each, take neighbours of the tensor, context and
    data_shard axes together.  Axes that lie side
    by side count as one; of others a rank's experts take what divides each, innermost first.

    >>> same_experts_steps(Layout(tensor=2, data_shard=8, zero=1, expert=4))
    ((4, 4),)
    """
    joined: list[tuple[int, int]] = []
    for ranks, stride in group_steps(layout, ("tensor", "context", "data_shard")):
        if joined and stride == math.prod(joined[-1]):
            joined[-1] = (joined[-1][0] * ranks, joined[-1][1])
        else:
            joined.append((ranks, stride))
    steps, left = [], layout.expert * layout.expert_tensor
    for ranks, stride in joined:
        taken = math.gcd(ranks, left)
        left //= taken
        if ranks > taken:
            steps.append((ranks // taken, stride * taken))
    return tuple(steps)


def levels(tiers: Sequence[LinkTier], steps: Sequence[tuple[int, int]], *, devices: int) -> Levels:
    """Return the levels of groups given as (ranks, stride) of each axis, innermost first.

    `devices` is how many the whole job has.

    >>> nvlink = LinkTier(name="nvlink", devices=8, latency_s=0.0, bytes_per_s=450e9)
    >>> fabric = LinkTier(name="fabric", devices=64, latency_s=0.0, bytes_per_s=50e9)
    >>> [level.members for level in levels((nvlink, fabric), [(16, 2)], devices=64)]
    [4, 4]
    """
    total = math.prod(ranks for ranks, _ in steps)
    result, joined = [], 1
    for tier in tiers:
        inside = total
        if tier.devices < devices:
            inside = math.prod(inside_unit(tier.devices, ranks, stride) for ranks, stride in steps)
        if inside > joined:
            result.append(Level(tier, inside // joined))
            joined = inside
        if joined >= total:
            break
    if joined < total and tiers:
        result.append(Level(tiers[-1], -(-total // joined)))
    return tuple(result)


def inside_unit(devices: int, ranks: int, stride: int) -> int:
    """Return how many of `ranks`, `stride` apart, every group has within `devices` neighbours."""
    if devices % (ranks * stride) == 0:
        return ranks
    fitting = range(1, min(devices // stride, ranks) + 1)
    return max((d for d in fitting if ranks % d == 0 and devices % (d * stride) == 0), default=1)


def ranks_of(group: Levels) -> int:
    """Return how many ranks a group has."""
    return math.prod(level.members for level in group)


def collective_s(
    operation: Collective, size_bytes: Amount, group: Levels, curves: Curves | None = None
) -> Amount:
    """Seconds of a collective over all levels of a group, for one size or an array of sizes.

    Between subgroups only one part in (ranks inside) of the buffer moves through each device, and
    chunks flow through all levels at once: every level's latency, and the slowest one's bandwidth.
    Gathers and scatters go round one ring of all ranks, whose rounds pass every link: n - 1 of
    them, of each level those that cross its subgroups and no wider ones.  Source: NCCL 2.20,
    src/graph/tuning.cc (nsteps, nInterSteps and netOverhead).

    >>> nvlink = LinkTier(name="nvlink", devices=8, latency_s=0.0, bytes_per_s=450e9,
    ...     fractions={"all_reduce": 1.0})
    >>> f"{1e3 * collective_s('all_reduce', 1e9, (Level(nvlink, 8),)):.2f} ms"
    '3.89 ms'
    """
    if not group:
        return _where_sent(size_bytes, 0.0 * size_bytes)
    total = ranks_of(group)
    whole = _of_all_levels(operation, group, curves or {})
    if whole is not None:
        return _where_sent(size_bytes, interpolated_s(whole, size_bytes))
    moving, latencies, inner = [], 0.0, 1
    for level in group:
        latency_s, whole_s = _level_s(
            operation,
            size_bytes,
            level,
            inner=inner,
            total=total,
            widest=group[-1].tier,
            curves=curves or {},
        )
        moving.append(whole_s - latency_s)
        latencies += latency_s
        inner *= level.members
    return _where_sent(size_bytes, latencies + _largest(moving))


def fastest_relay(
    tiers: Sequence[LinkTier],
    routing: Routing,
    *,
    ranks: int,
    copy_bytes: float,
    devices: int,
) -> int | None:
    """Return how many neighbours of an expert group best hand on tokens sent to them once.

    They are those within a tier of links; None: it is no slower to send each token to each of its
    experts.  `copy_bytes` are those of one copy of all tokens of a rank.

    >>> nvlink = LinkTier(name="nvlink", devices=8, latency_s=2e-6, bytes_per_s=450e9)
    >>> fabric = LinkTier(name="fabric", devices=64, latency_s=8e-6, bytes_per_s=50e9)
    >>> sizes = {"copy_bytes": 58e6, "devices": 64}
    >>> fastest_relay((nvlink, fabric), Routing(256, 8, 8, 4), ranks=64, **sizes)
    8
    >>> fastest_relay((nvlink, fabric), Routing(256, 8, 8, 4), ranks=8, **sizes) is None
    True
    """

    def sent_s(copies: float, members: int, stride: int) -> float:
        group = levels(tiers, [(members, stride)], devices=devices)
        return collective_s("all_to_all", copies * copy_bytes, group)

    best, least_s = None, sent_s(routing.per_token, ranks, 1)
    for near in sorted({inside_unit(tier.devices, ranks, 1) for tier in tiers} - {1, ranks}):
        across, inside = routing.hops(ranks, near)
        relayed_s = sent_s(across, ranks // near, near) + sent_s(inside, near, 1)
        if relayed_s < least_s:
            best, least_s = near, relayed_s
    return best


def dispatch_s(copy_bytes: Amount, group: Levels, routing: Routing) -> Amount:
    """Seconds until each token is with every rank of a group that has some of its experts.

    Over each level a rank sends one copy of a token to each subgroup that has experts of it, and
    what arrived there is forwarded over the faster links inside:

        c D(m) L(m) (n_i - 1) / n_i / W_i      of level i of n_i members, fastest first

    c are `copy_bytes`, m = n_i ... n_last the subgroups, D how many of them a token goes to
    (Routing.distinct), L what the busiest of them gets over their mean (Routing.busiest_load).
    Levels flow into each other, so that the slowest counts.  Source: DeepEP,
    csrc/kernels/internode.cu, and DeepSeek-V3, section 3.2.2.
    """
    total = ranks_of(group)
    moving, latencies, inner = [], 0.0, 1
    for level in group:
        copies = routing.distinct(total // inner) * routing.busiest_load(total // inner)
        latency_s, whole_s = _level_s(
            "all_to_all",
            copies * copy_bytes * total / (inner * level.members),
            level,
            inner=inner,
            total=total,
            widest=group[-1].tier,
            curves={},
        )
        moving.append(whole_s - latency_s)
        latencies += latency_s
        inner *= level.members
    if not moving:
        return _where_sent(copy_bytes, 0.0 * copy_bytes)
    return _where_sent(copy_bytes, latencies + _largest(moving))


def _where_sent(size_bytes: Amount, seconds: Amount) -> Amount:
    """Return the seconds, 0 where nothing is sent."""
    if isinstance(size_bytes, np.ndarray):
        return np.where(size_bytes > 0, seconds, 0.0)
    return seconds if size_bytes > 0 else 0.0


def _largest(values: Sequence[Amount]) -> Amount:
    """Return the largest, element by element of arrays."""
    if isinstance(values[0], np.ndarray):
        return np.max(values, axis=0)  # type: ignore[no-any-return]
    return max(values)


def _of_all_levels(operation: Collective, group: Levels, curves: Curves) -> CollectiveCurve | None:
    """Return what was measured of just such a group, its levels together."""
    if len(group) < 2:
        return None
    ranks = ranks_of(group)
    inner = ranks // group[-1].members
    measured = curves.get((group[-1].tier.name, operation), ())
    return next((c for c in measured if (c.ranks, c.inner) == (ranks, inner)), None)


def _level_s(
    operation: Collective,
    size_bytes: Amount,
    level: Level,
    *,
    inner: int,
    total: int,
    widest: LinkTier,
    curves: Curves,
) -> tuple[float, Amount]:
    """Return latency alone and whole seconds of one level; `inner` ranks are joined already.

    `widest` is the tier of the last level.
    """
    tier, n = level.tier, level.members
    share = size_bytes / inner
    if operation == "all_to_all":
        # Of its buffer a rank sends the part for ranks beyond its subgroup but within this level.
        share = size_bytes * inner * n / total
    elif operation in ("send_recv", "broadcast"):
        share = size_bytes
    measured = [c for c in curves.get((tier.name, operation), ()) if c.inner == 1]
    if measured:
        curve = nearest_ranks(measured, n)
        scale = _ring_factor(operation, n) / _ring_factor(operation, curve.ranks)
        latency_s = curve.fit.pieces[0].latency_s if curve.fit else curve.points[0].seconds
        return latency_s, interpolated_s(curve, share * max(scale, NOTHING))
    rate = _reached_bytes_per_s(operation, tier, n)
    rate *= reached_fraction(operation, tier, n) / tier.oversubscription
    subgroups, latency_s = total // (inner * n), tier.latency_s
    if subgroups > 1 and operation in ("all_gather", "reduce_scatter"):
        latency_s = subgroups * max(latency_s, widest.least_round_s)
    return _model_s(operation, share, n, start_s=tier.start_s, latency_s=latency_s, rate=rate)


def reached_fraction(operation: Collective, tier: LinkTier, members: int) -> float:
    """Return the share of a tier's rate that a collective reaches among its members."""
    for group in tier.narrow:
        if members <= group.members and operation in group.fractions:
            return group.fractions[operation]
    return tier.fractions.get(operation, DEFAULT_FRACTION[operation])


def _reached_bytes_per_s(operation: Collective, tier: LinkTier, members: int) -> float:
    """Return the rate of the links that members of a group share.

    On a mesh without a switch a device has one link to each peer: n members use n - 1 of them, a
    transfer to one peer uses one.  Measured on MI300X: 48 GB/s among 2, 313 among 8 of 448.
    """
    if tier.peer_bytes_per_s is None:
        return tier.bytes_per_s
    links = 1 if operation == "send_recv" else max(1, members - 1)
    return min(tier.bytes_per_s, links * tier.peer_bytes_per_s)


def _model_s(
    operation: Collective,
    size_bytes: Amount,
    n: int,
    *,
    start_s: float,
    latency_s: float,
    rate: float,
) -> tuple[float, Amount]:
    """Return latency alone and whole seconds by the alpha-beta model, the start before it.

        all_reduce        min(2 (n-1) α, 4 ⌈log2 n⌉ α) + 2 (n-1)/n S / W      ring, or two trees
        all_gather        (n-1) α + (n-1)/n S / W                             ring
        reduce_scatter    (n-1) α + (n-1)/n S / W                             ring
        all_to_all        α + (n-1)/n S / W                                   all pairs at once
        send_recv         α + S / W
        broadcast         ⌈log2 n⌉ α + S / W                                  tree

    Sources: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124; Sanders, Speck,
    Träff, Parallel Comput. 35 (2009) 581-594 for the two trees; nccl-tests, doc/PERFORMANCE.md for
    the bus bandwidth that W is.
    """
    doublings = max(1, math.ceil(math.log2(n))) if n > 1 else 0
    rounds = {
        "all_reduce": min(2 * (n - 1), 4 * doublings),
        "all_gather": n - 1,
        "reduce_scatter": n - 1,
        "all_to_all": 1,
        "send_recv": 1,
        "broadcast": doublings,
    }[operation]
    waited = start_s + rounds * latency_s
    return waited, waited + _ring_factor(operation, n) * size_bytes / rate


def _ring_factor(operation: Collective, n: int) -> float:
    """Bytes through the busiest link over the size: nccl-tests' factor between the bandwidths."""
    if operation in ("send_recv", "broadcast"):
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (n - 1) / n


def nearest_ranks(curves: Sequence[CollectiveCurve], ranks: int) -> CollectiveCurve:
    """Return the curve measured with the number of ranks nearest in ratio."""
    return min(curves, key=lambda c: (abs(math.log(c.ranks / max(ranks, 1))), c.ranks))


def interpolated_s(curve: CollectiveCurve, size_bytes: Amount) -> Amount:
    """Seconds at a size, or at each of an array of sizes, by the lines fitted to a curve.

    Without a fit they go straight between measured points in the logarithms of both; below the
    smallest size the smallest's seconds hold (latency), above the largest its bandwidth.
    """
    if isinstance(size_bytes, np.ndarray):
        sizes, place = np.unique(size_bytes, return_inverse=True)
        return np.array([interpolated_s(curve, size) for size in sizes.tolist()])[place]
    if curve.fit is not None:
        return fitted_s(curve.fit, size_bytes)
    points = curve.points
    if size_bytes <= points[0].size_bytes:
        return points[0].seconds
    last = points[-1]
    if size_bytes >= last.size_bytes:
        return last.seconds * size_bytes / last.size_bytes
    right = bisect_left([point.size_bytes for point in points], size_bytes)
    low, high = points[right - 1], points[right]
    if min(low.seconds, high.seconds) <= 0:
        return max(low.seconds, high.seconds)
    share = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
    return float(low.seconds * (high.seconds / low.seconds) ** share)
