"""Fewest seconds within bytes and within a limit on the synchronisation, layer by layer.

Needed only where options of one kind differ in `sync_s` and the fastest choice breaks the limit:
then a choice is better or worse in three ways, bytes x, seconds t and sync g, and Pareto sets of
runs are not worth keeping.  The search is exact.  It keeps the partial choices that are unbeaten
in all three, and drops those that no completion can bring below the incumbent:

    Σ_l (t + λ x + μ g) - λ · budget - μ · limit        bounds every completion, for any λ, μ >= 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solver.frontier import Runs, fastest_choice

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# The same choice summed in two orders differs in the last bits.
_SAME = 1e-14
_CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The options [option] that `count` layers of one kind may take."""

    load_bytes: Floats
    time_s: Floats
    sync_s: Floats
    count: int


def unbeaten_in_three(load_bytes: Floats, time_s: Floats, sync_s: Floats) -> Indices:
    """Indices of points that no other beats or equals in all three; of equals one stays."""
    order = np.lexsort((sync_s, time_s, load_bytes))
    points = np.stack([load_bytes[order], time_s[order], sync_s[order]], axis=1)
    kept: list[Indices] = []
    survivors = np.empty((0, 3))
    for start in range(0, len(points), _CHUNK):
        chunk = points[start : start + _CHUNK]
        limit = chunk * (1 + _SAME)
        free = ~np.any((survivors[None] <= limit[:, None]).all(axis=2), axis=1)
        # Inside the chunk only earlier points can beat later ones.
        beaten = (chunk[None] <= limit[:, None]).all(axis=2)
        free &= ~np.any(np.tril(beaten, -1), axis=1)
        survivors = np.concatenate([survivors, chunk[free]])
        kept.append(start + np.flatnonzero(free))
    return order[np.concatenate(kept)]


def fastest_synced(
    groups: Sequence[Choices], budget_bytes: float, limit_s: float, upper_s: float = np.inf
) -> tuple[float, list[list[int]]] | None:
    """Fewest seconds of all layers within both limits, and the rising options of each group.

    None if nothing fits, or nothing in less than `upper_s`.
    """
    dual = _dual(groups, budget_bytes, limit_s)
    if dual is None or dual.bound_s >= upper_s:
        return None
    slack = min(dual.incumbent_s, upper_s) - dual.bound_s
    slack += 1e-9 * (abs(dual.bound_s) + slack) if np.isfinite(slack) else 0.0
    layers = [g for g, group in enumerate(groups) for _ in range(group.count)]
    load_left = sum(float(g.load_bytes.min()) * g.count for g in groups)
    sync_left = sum(float(g.sync_s.min()) * g.count for g in groups)

    load, time, sync, reduced = (np.zeros(1) for _ in range(4))
    trail: list[tuple[Indices, Indices]] = []
    for g in layers:
        group = groups[g]
        load_left -= float(group.load_bytes.min())
        sync_left -= float(group.sync_s.min())
        more = group.time_s + dual.per_byte * group.load_bytes + dual.per_sync * group.sync_s
        more = more - more.min()
        wide = np.add.outer(load, group.load_bytes).ravel()
        once = np.add.outer(sync, group.sync_s).ravel()
        excess = np.add.outer(reduced, more).ravel()
        alive = np.flatnonzero(
            (wide <= (budget_bytes - load_left) * (1 + _SAME))
            & (once <= (limit_s - sync_left) * (1 + _SAME))
            & (excess <= slack)
        )
        if not len(alive):
            return None
        before, added = np.divmod(alive, len(more))
        load, sync, reduced = wide[alive], once[alive], excess[alive]
        time = time[before] + group.time_s[added]
        keep = unbeaten_in_three(load, time, sync)
        load, time, sync, reduced = load[keep], time[keep], sync[keep], reduced[keep]
        trail.append((before[keep], added[keep]))
    point = int(time.argmin())
    best_s = float(time[point])
    if best_s >= upper_s:
        return None
    options: list[list[int]] = [[] for _ in groups]
    for g, (before, added) in zip(reversed(layers), reversed(trail), strict=True):
        options[g].append(int(added[point]))
        point = int(before[point])
    return best_s, [sorted(taken) for taken in options]


@dataclass(frozen=True, slots=True)
class _Dual:
    """A Lagrangian bound with its multipliers, and the seconds of a choice known to fit."""

    bound_s: float
    per_byte: float
    per_sync: float
    incumbent_s: float


def _dual(groups: Sequence[Choices], budget_bytes: float, limit_s: float) -> _Dual | None:
    """Best bound over a grid of multipliers, and an incumbent; None if nothing can fit.

    The incumbent is the fastest choice within the bytes alone once sync is priced high enough for
    it to keep the limit.
    """
    least_load = sum(float(g.load_bytes.min()) * g.count for g in groups)
    least_sync = sum(float(g.sync_s.min()) * g.count for g in groups)
    if least_load > budget_bytes * (1 + _SAME) or least_sync > limit_s * (1 + _SAME):
        return None
    per_byte = _slopes([(g.load_bytes, g.time_s) for g in groups])
    per_sync = _slopes([(g.sync_s, g.time_s) for g in groups])
    total = np.zeros((len(per_byte), len(per_sync)))
    for group in groups:
        charged = (
            group.time_s
            + per_byte[:, None, None] * group.load_bytes
            + per_sync[None, :, None] * group.sync_s
        )
        total += group.count * charged.min(axis=2)
    bound = total - per_byte[:, None] * budget_bytes - per_sync * limit_s
    i, j = np.unravel_index(int(bound.argmax()), bound.shape)
    best = _Dual(float(bound[i, j]), float(per_byte[i]), float(per_sync[j]), np.inf)
    for price in per_sync[j:].tolist():
        incumbent_s = _fastest_at_price(groups, price, budget_bytes, limit_s)
        if incumbent_s < np.inf:
            return replace(best, incumbent_s=incumbent_s)
    return best


def _fastest_at_price(
    groups: Sequence[Choices], price: float, budget_bytes: float, limit_s: float
) -> float:
    """Seconds of the choice least in t + price · g within the bytes; inf if it breaks the limit."""
    runs = [(Runs(g.load_bytes, g.time_s + price * g.sync_s), g.count) for g in groups]
    found = fastest_choice(runs, budget_bytes)
    if found is None:
        return np.inf
    time_s = sync_s = 0.0
    for group, (run, count), point in zip(groups, runs, found[1], strict=True):
        taken = run.options(count, point)
        time_s += float(group.time_s[taken].sum())
        sync_s += float(group.sync_s[taken].sum())
    return time_s if sync_s <= limit_s else np.inf


def _slopes(tables: list[tuple[Floats, Floats]]) -> Floats:
    """Ratios of seconds saved to resource added between options: 0, the distinct ones, a large."""
    ratios = {0.0}
    for resource, time_s in tables:
        added = resource[:, None] - resource[None]
        saved = time_s[None] - time_s[:, None]
        useful = (added > 0) & (saved > 0)
        ratios.update((saved[useful] / added[useful]).tolist())
    distinct = np.array(sorted(ratios))
    if len(distinct) > 24:
        distinct = distinct[np.linspace(0, len(distinct) - 1, 24).round().astype(int)]
    return np.append(distinct, 2 * distinct[-1] + 1e-30)
