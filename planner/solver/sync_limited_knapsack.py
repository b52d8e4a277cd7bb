"""Fewest seconds within bytes and within a limit on the synchronisation, by counts per option.

Needed only where options of one kind differ in `sync_s` (or in bytes on the host) and the fastest
choice breaks the limit: then a choice is better or worse in three ways, bytes x, seconds t and
sync g.  Layers of a kind are alike, so a choice says how many of them, n, take each option.

The search is exact.  With multipliers λ, μ >= 0, D their Lagrangian bound and the reduced costs

    r_k = t_k + λ x_k + μ g_k - min_j (t_j + λ x_j + μ g_j)

every choice within both limits takes D + Σ n r + λ · (bytes unused) + μ · (sync unused) seconds.
All of these are >= 0: a choice of at most D + slack seconds has Σ n r <= slack.  Bytes and sync
limit counts in the same way, as excesses over what the minimum-memory options take, and so does any
mixture of the two, which tells early that both cannot be kept.  Counts within all of these rooms
are listed; the fastest is the optimum if it takes at most D + slack, and else the slack grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SAME_CHOICE, SAME_TERMS, SLACK, TINY

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_CHUNK = 256
# Beyond this number of partial choices, to compare them takes longer than to carry them on.
_COMPARED = 2048
_SLACK_GROWS = 2.0
# Of the search for the best multiplier: points of a grid, how often it narrows, where it ends.
_POINTS = 16
_ZOOMS = 10
_STEEPEST = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class KindOptions:
    """The options [option] that `count` layers of one kind may take."""

    load_bytes: Floats
    time_s: Floats
    sync_s: Floats
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class _UsefulOptions:
    """The options of group `at` that can be of use; `options` indexes all of them.

    `excess` [room, option] is what a layer takes of each room, the least that it must taken off.
    """

    at: int
    options: Indices
    time_s: Floats
    excess: Floats
    count: int


def unbeaten_in_three(load_bytes: Floats, time_s: Floats, sync_s: Floats) -> Indices:
    """Indices of points that no other beats or equals in all three; of equals one stays."""
    order = np.lexsort((sync_s, time_s, load_bytes))
    points = np.stack([load_bytes[order], time_s[order], sync_s[order]], axis=1)
    kept: list[Indices] = []
    survivors = np.empty((0, 3))
    for start in range(0, len(points), _CHUNK):
        chunk = points[start : start + _CHUNK]
        limit = chunk * (1 + SAME_TERMS)
        free = ~np.any((survivors[None] <= limit[:, None]).all(axis=2), axis=1)
        # Inside the chunk only earlier points can beat later ones.
        beaten = (chunk[None] <= limit[:, None]).all(axis=2)
        free &= ~np.any(np.tril(beaten, -1), axis=1)
        survivors = np.concatenate([survivors, chunk[free]])
        kept.append(start + np.flatnonzero(free))
    return order[np.concatenate(kept)]


def fastest_synced(
    groups: Sequence[KindOptions], budget_bytes: float, limit_s: float, upper_s: float = np.inf
) -> tuple[float, list[list[int]]] | None:
    """Fewest seconds of all layers within both limits, and the rising options of each group.

    None if nothing fits, or nothing in less than `upper_s`.
    """
    shared = _in_shares(groups, budget_bytes, limit_s)
    if shared is None:
        return None
    kinds, rooms = shared
    kinds, bound_s = _with_reduced(kinds)
    longest_s = sum(kind.count * float(kind.excess[-1].max()) for kind in kinds)
    slack_s = max(float(np.ptp(kind.time_s)) for kind in kinds) / 64
    best: list[Indices] | None = None
    while upper_s > bound_s:
        slack_s = min(slack_s, longest_s, upper_s - bound_s)
        hair_s = SLACK * (abs(bound_s) + slack_s)
        choice = _fastest_within(kinds, np.append(rooms, slack_s + hair_s))
        if choice is not None and choice[0] < upper_s:
            upper_s, best = choice
        if slack_s >= min(longest_s, upper_s - bound_s):
            break
        slack_s *= _SLACK_GROWS
    if best is None:
        return None
    options: list[list[int]] = [[] for _ in groups]
    for kind, counts in zip(kinds, best, strict=True):
        options[kind.at] = sorted(np.repeat(kind.options, counts).tolist())
    return upper_s, options


def _in_shares(
    groups: Sequence[KindOptions], budget_bytes: float, limit_s: float
) -> tuple[list[_UsefulOptions], Floats] | None:
    """Options as shares of the room for bytes, for sync and for a mixture of them; the rooms.

    None if nothing can fit.  Kinds with fewest choices come first.
    """
    load_room = budget_bytes - sum(float(g.load_bytes.min()) * g.count for g in groups)
    sync_room = limit_s - sum(float(g.sync_s.min()) * g.count for g in groups)
    load_hair, sync_hair = SAME_CHOICE * abs(budget_bytes), SAME_CHOICE * abs(limit_s)
    if load_room < -load_hair or sync_room < -sync_hair:
        return None
    load_room, sync_room = load_room + load_hair, sync_room + sync_hair
    kinds = []
    for at, group in enumerate(groups):
        load = _shares(group.load_bytes, load_room)
        sync = _shares(group.sync_s, sync_room)
        possible = np.flatnonzero((load <= 1) & (sync <= 1))
        if not len(possible):
            return None
        unbeaten = unbeaten_in_three(load[possible], group.time_s[possible], sync[possible])
        kept = possible[unbeaten]
        excess = np.stack([load[kept], sync[kept]])
        kinds.append(_UsefulOptions(at, kept, group.time_s[kept], excess, group.count))
    kinds.sort(key=lambda kind: kind.count * (len(kind.options) - 1))
    weight, lowest_s = _tightest_mixture(kinds)
    if lowest_s > 1 + ROUNDING:
        return None
    mixed = []
    for kind in kinds:
        mixture = weight @ kind.excess
        excess = np.vstack([kind.excess, mixture - mixture.min()])
        mixed.append(replace(kind, excess=excess))
    return mixed, np.array([1.0, 1.0, 1.0 - lowest_s + ROUNDING])


def _shares(resource: Floats, room: float) -> Floats:
    """[option] Shares of a room beyond the minimum-memory option; inf if there is no room."""
    excess = resource - resource.min()
    return excess / room if room > 0 else np.where(excess > 0, np.inf, 0.0)


def _tightest_mixture(kinds: Sequence[_UsefulOptions]) -> tuple[Floats, float]:
    """Weights of bytes and sync, one in sum, whose least mixture is the largest; that least.

    A least mixture above 1 says that both limits cannot be kept.  It is concave in the weight and
    bends where two options of a kind are equal.
    """
    bends = {0.0, 1.0}
    for kind in kinds:
        load, sync = kind.excess
        for k in range(len(load)):
            more, fewer = load - load[k], sync[k] - sync
            crossing = (more > 0) & (fewer > 0)
            bends.update((fewer[crossing] / (more + fewer)[crossing]).tolist())
    share = np.array(sorted(bends))
    weights = np.stack([share, 1 - share], axis=1)
    lowest_s = sum(kind.count * (weights @ kind.excess).min(axis=1) for kind in kinds)
    tightest = int(np.argmax(lowest_s))
    return weights[tightest], float(np.asarray(lowest_s)[tightest])


def _with_reduced(kinds: list[_UsefulOptions]) -> tuple[list[_UsefulOptions], float]:
    """Kinds with their reduced costs as the last room, at nearly the best multipliers; the bound.

    The best bound for a given μ is concave in μ: the largest on a grid has the optimum beside it.
    """
    lower, upper = 0.0, 1e-3 * max(float(np.ptp(kind.time_s)) for kind in kinds) + TINY
    while True:  # both limits can be kept in fractions, so the bound ends to rise
        per_sync = np.linspace(lower, upper, _POINTS)
        bounds_s, _ = _bounds_s(kinds, per_sync)
        best = int(bounds_s.argmax())
        if best < _POINTS - 1 or upper > _STEEPEST:
            break
        lower, upper = float(per_sync[-2]), upper * _POINTS
    for _ in range(_ZOOMS):
        lower, upper = (
            float(per_sync[max(best - 1, 0)]),
            float(per_sync[min(best + 1, _POINTS - 1)]),
        )
        per_sync = np.linspace(lower, upper, _POINTS)
        bounds_s, per_load = _bounds_s(kinds, per_sync)
        best = int(bounds_s.argmax())
    multipliers = np.array([per_load[best], per_sync[best]])
    reduced = []
    for kind in kinds:
        charged = kind.time_s + multipliers @ kind.excess[:2]
        reduced.append(replace(kind, excess=np.vstack([kind.excess, charged - charged.min()])))
    return reduced, float(bounds_s[best])


def _bounds_s(kinds: Sequence[_UsefulOptions], per_sync: Floats) -> tuple[Floats, Floats]:
    """[multiplier of sync] The best bound with it, and the multiplier of bytes that gives it."""
    charged = [kind.time_s + per_sync[:, None] * kind.excess[1] for kind in kinds]
    slopes = [np.zeros((len(per_sync), 1))]
    for kind, time_s in zip(kinds, charged, strict=True):
        load = kind.excess[0]
        for k in range(len(load)):
            more = load - load[k]
            some = more > 0
            slopes.append(np.maximum((time_s[:, k, None] - time_s[:, some]) / more[some], 0.0))
    per_load = np.concatenate(slopes, axis=1)
    bounds = -per_load - per_sync[:, None]
    for kind, time_s in zip(kinds, charged, strict=True):
        all_s = time_s[:, None] + per_load[:, :, None] * kind.excess[0]
        bounds += kind.count * all_s.min(axis=2)
    best = bounds.argmax(axis=1)
    rows = np.arange(len(per_sync))
    return bounds[rows, best], per_load[rows, best]


def _fastest_within(
    kinds: Sequence[_UsefulOptions], rooms: Floats
) -> tuple[float, list[Indices]] | None:
    """Fewest seconds within all rooms, and the counts of each kind's options; None if none is."""
    used, time_s = np.zeros((len(rooms), 1)), np.zeros(1)
    trail: list[tuple[Indices, Indices]] = []
    for kind in kinds:
        parent, counts = _ways(used, kind, rooms, last=kind is kinds[-1])
        if not len(parent):
            return None
        used = used[:, parent] + kind.excess @ counts
        time_s = time_s[parent] + kind.time_s @ counts
        if kind is not kinds[-1] and len(parent) <= _COMPARED:
            kept = unbeaten_in_three(used[0], time_s, used[1])
            used, time_s, parent, counts = (
                used[:, kept],
                time_s[kept],
                parent[kept],
                counts[:, kept],
            )
        trail.append((parent, counts))
    way = int(time_s.argmin())
    best_s = float(time_s[way])
    taken: list[Indices] = []
    for parent, counts in reversed(trail):
        taken.append(counts[:, way])
        way = int(parent[way])
    return best_s, taken[::-1]


def _ways(
    used: Floats, kind: _UsefulOptions, rooms: Floats, *, last: bool
) -> tuple[Indices, Indices]:
    """Ways within the rooms for the layers of a kind: what each continues, [option, way] counts.

    Options of which fewest fit are counted first; the last one takes what is left.  Of the last
    kind the two last options share what is left so that it takes the fewest seconds.
    """
    most = _most_layers(kind.excess, rooms[:, None] + 0 * kind.excess, kind.count)
    order = np.argsort(most, kind="stable")
    open_options = 2 if last and len(order) > 1 else 1
    parent = np.arange(used.shape[1])
    left = np.full(len(parent), kind.count)
    counts = np.zeros((len(order), len(parent)), dtype=np.intp)
    for k in order[:-open_options]:
        excess = kind.excess[:, k, None]
        repeats = _most_layers(excess, rooms[:, None] - used, left) + 1
        way = np.repeat(np.arange(len(parent)), repeats)
        number = np.arange(len(way)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        used = used[:, way] + number * excess
        parent, left, counts = parent[way], left[way] - number, counts[:, way]
        counts[k] = number
    if open_options == 1:
        counts[order[-1]] = left
        used = used + left * kind.excess[:, order[-1], None]
        alive = (used <= rooms[:, None]).all(axis=0)
    else:
        a, b = order[-2:]
        counts[a], alive = _shared_out(rooms[:, None] - used, left, kind, a, b)
        counts[b] = left - counts[a]
    return parent[alive], counts[:, alive]


def _most_layers(excess: Floats, free: Floats, count: Indices | int) -> Indices:
    """Return how many layers fit, at most `count`; `excess` and `free` are [room, ...]."""
    fitting = np.full(np.broadcast_shapes(excess.shape, free.shape), np.inf)
    np.divide(free, excess, out=fitting, where=excess > 0)
    most: Indices = np.clip(np.floor(fitting.min(axis=0)), 0, count).astype(np.intp)
    return most


def _shared_out(
    free: Floats, left: Indices, kind: _UsefulOptions, a: int, b: int
) -> tuple[Indices, NDArray[np.bool_]]:
    """Return how many of the layers left take option a, the others b, and whether that fits."""
    more = (kind.excess[:, a] - kind.excess[:, b])[:, None]
    spare = free - left * kind.excess[:, b, None]
    limit = np.zeros(spare.shape)
    np.divide(spare, more, out=limit, where=more != 0)
    highest = np.minimum(np.floor(np.where(more > 0, limit, np.inf)).min(axis=0), left)
    lowest = np.maximum(np.ceil(np.where(more < 0, limit, -np.inf)).max(axis=0), 0)
    alive = (lowest <= highest) & ((more != 0) | (spare >= 0)).all(axis=0)
    number = np.where(kind.time_s[a] < kind.time_s[b], highest, lowest)
    return np.where(alive, number, 0).astype(np.intp), alive
