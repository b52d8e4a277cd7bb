"""Pareto sets of (bytes, seconds) over the options of groups of layers.

A run of n identical layers has one Pareto set, built from that of n - 1 layers by adding one more
layer and pruning.  That is exact: taking one layer off a Pareto-optimal choice for n layers leaves
a Pareto-optimal choice for n - 1.  A set depends on the options alone, not on capacity, micro-
batches or pipeline depth, so a `FrontierStore` shares them between instances.

`fastest_s` and `fastest_choice` then answer: the fewest seconds in which groups of layers fit in a
number of bytes.  The first is vectorised over budgets, the second is a multiple-choice knapsack
with Lagrangian bounds and tells the options too.  Both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SAME_CHOICE, SLACK

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_SAME = 1.0 - SAME_CHOICE


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Choices that nothing beats in both bytes and seconds.

    `load_bytes` rises and `time_s` falls along the arrays.  Point p took `last[p]` as its last
    step and continues point `parent[p]` of the set it was built from.
    """

    load_bytes: Floats
    time_s: Floats
    last: Indices
    parent: Indices


def unbeaten(load_bytes: Floats, time_s: Floats) -> Indices:
    """Indices of the points that no other beats, by rising load; the first of equals stays."""
    order = np.argsort(load_bytes, kind="stable")
    time_s = time_s[order]
    keep = np.empty(len(order), dtype=bool)
    keep[0] = True
    np.less(time_s[1:], np.minimum.accumulate(time_s)[:-1] * _SAME, out=keep[1:])
    order = order[keep]
    load_bytes = load_bytes[order]
    last_of_its_load = np.empty(len(order), dtype=bool)
    last_of_its_load[-1] = True
    np.not_equal(load_bytes[1:], load_bytes[:-1], out=last_of_its_load[:-1])
    return order[last_of_its_load]


class Runs:
    """The Pareto sets of n = 1, 2, ... identical layers, each built when it is first asked for."""

    def __init__(self, load_bytes: Floats, time_s: Floats) -> None:
        keep = unbeaten(load_bytes, time_s)
        single = Frontier(load_bytes[keep], time_s[keep], keep, np.zeros(len(keep), dtype=np.intp))
        self._single = single
        self._sets = [single]
        self._steps: tuple[Floats, Floats] | None = None

    def frontier(self, count: int) -> Frontier:
        """Pareto set of `count` layers."""
        single = self._single
        while len(self._sets) < count:
            before = self._sets[-1]
            size = len(before.load_bytes)
            load = np.add.outer(single.load_bytes, before.load_bytes).ravel()
            time = np.add.outer(single.time_s, before.time_s).ravel()
            keep = unbeaten(load, time)
            added, parent = np.divmod(keep, size)
            self._sets.append(Frontier(load[keep], time[keep], single.last[added], parent))
        return self._sets[count - 1]

    def options(self, count: int, point: int) -> list[int]:
        """Options, rising, that `count` layers take at `point` of their Pareto set."""
        taken = []
        for n in range(count, 0, -1):
            at = self._sets[n - 1]
            taken.append(int(at.last[point]))
            point = int(at.parent[point])
        return sorted(taken)

    def hull_steps(self) -> tuple[Floats, Floats]:
        """Bytes added and seconds saved along the convex hull of one layer, best ratio first."""
        if self._steps is None:
            self._steps = hull_steps(self._single.load_bytes, self._single.time_s)
        return self._steps


def hull_steps(load_bytes: Floats, time_s: Floats) -> tuple[Floats, Floats]:
    """Bytes added and seconds saved from corner to corner of the lower convex hull.

    It starts at the leanest point and ends at the fastest, so the best ratio comes first.
    """
    hull: list[tuple[float, float]] = []
    for x, t in sorted(zip(load_bytes.tolist(), time_s.tolist(), strict=True)):
        if hull and t >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (x, t)):
            hull.pop()
        hull.append((x, t))
    corners = np.array(hull)
    return np.diff(corners[:, 0]), -np.diff(corners[:, 1])


def _is_above(
    first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]
) -> bool:
    """Return whether `middle` lies on or above the line from `first` to `last`."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (
        middle[0] - first[0]
    )


class FrontierStore:
    """Runs by their options' numbers, so that instances with equal options share the work."""

    def __init__(self) -> None:
        self._runs: dict[tuple[tuple[float, ...], tuple[float, ...]], Runs] = {}

    def runs(self, load_bytes: Floats, time_s: Floats) -> Runs:
        """Return the Pareto sets of layers whose options have these bytes and seconds."""
        key = tuple(load_bytes.tolist()), tuple(time_s.tolist())
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = Runs(load_bytes, time_s)
        return runs


Group = tuple[Runs, int]


def fastest_s(groups: Sequence[Group], budgets_bytes: Floats) -> Floats:
    """Fewest seconds of all `groups` together within each budget; inf where they do not fit.

    The largest set is searched by bisection for every point of the sum of the others, so all
    groups but one should be small.
    """
    sets = sorted((runs.frontier(n) for runs, n in groups), key=lambda f: len(f.load_bytes))
    largest = sets.pop()
    if not sets:
        at = np.searchsorted(largest.load_bytes, budgets_bytes, side="right") - 1
        return np.where(at >= 0, largest.time_s[at], np.inf)
    load, time = sets[0].load_bytes, sets[0].time_s
    for other in sets[1:]:
        load = np.add.outer(load, other.load_bytes).ravel()
        time = np.add.outer(time, other.time_s).ravel()
        keep = unbeaten(load, time)
        load, time = load[keep], time[keep]
    room = np.subtract.outer(budgets_bytes, load)
    at = np.searchsorted(largest.load_bytes, room, side="right") - 1
    total = np.where(at >= 0, largest.time_s[at], np.inf) + time
    best: Floats = total.min(axis=1)
    return best


def fastest_choice(
    groups: Sequence[Group], budget_bytes: float, upper_s: float = np.inf
) -> tuple[float, list[int]] | None:
    """Fewest seconds of `groups` within the budget, and the point each group takes in its set.

    None if they do not fit, or not in less than `upper_s`.  A multiple-choice knapsack: the linear
    relaxation (hull steps by ratio) gives the multiplier λ and a bound; rounding it down gives an
    incumbent; a partial choice whose reduced cost Σ (t + λ x) - min exceeds the difference of the
    two cannot be completed to an optimum, the rest are enumerated group by group.
    """
    if len(groups) == 1:
        (runs, count) = groups[0]
        return _fastest_point(runs.frontier(count), budget_bytes, upper_s)
    relaxed = _relaxation(groups, budget_bytes)
    if relaxed is None or relaxed[0] >= upper_s:
        return None
    bound_s, multiplier, incumbent_s = relaxed
    sets = [runs.frontier(n) for runs, n in groups]
    whole_s = sum(float(points.time_s[0]) for points in sets)
    slack = max(min(incumbent_s, upper_s) - bound_s, 0.0) + SLACK * incumbent_s
    slack += SAME_CHOICE * whole_s  # the bound is a difference of sums as large as these
    kept: list[tuple[Floats, Floats, Floats, Indices]] = []
    for points in sets:
        reduced = points.time_s + multiplier * points.load_bytes
        reduced = reduced - reduced.min()
        near = np.flatnonzero(reduced <= slack)
        kept.append((points.load_bytes[near], points.time_s[near], reduced[near], near))
    order = sorted(range(len(kept)), key=lambda g: len(kept[g][0]))
    still_needed = sum(float(kept[g][0][0]) for g in order)

    load, time, reduced = np.zeros(1), np.zeros(1), np.zeros(1)
    trail: list[tuple[Indices, Indices]] = []
    for g in order:
        more_load, more_time, more_reduced, _ = kept[g]
        still_needed -= float(more_load[0])
        wide = np.add.outer(load, more_load).ravel()
        excess = np.add.outer(reduced, more_reduced).ravel()
        alive = np.flatnonzero((wide <= budget_bytes - still_needed) & (excess <= slack))
        if not len(alive):
            return None
        before, added = np.divmod(alive, len(more_load))
        load, reduced = wide[alive], excess[alive]
        time = time[before] + more_time[added]
        keep = unbeaten(load, time)
        load, time, reduced = load[keep], time[keep], reduced[keep]
        trail.append((before[keep], added[keep]))
    point = len(time) - 1
    best_s = float(time[point])
    if best_s >= upper_s:
        return None
    picks = [0] * len(sets)
    for g, (before, added) in zip(reversed(order), reversed(trail), strict=True):
        picks[g] = int(kept[g][3][added[point]])
        point = int(before[point])
    return best_s, picks


def _fastest_point(
    points: Frontier, budget_bytes: float, upper_s: float
) -> tuple[float, list[int]] | None:
    """Last point of one set within the budget."""
    at = int(np.searchsorted(points.load_bytes, budget_bytes, side="right")) - 1
    if at < 0 or points.time_s[at] >= upper_s:
        return None
    return float(points.time_s[at]), [at]


def _relaxation(groups: Sequence[Group], budget_bytes: float) -> tuple[float, float, float] | None:
    """Linear bound in seconds, its multiplier in s/byte, and the seconds of its rounding down."""
    room = budget_bytes
    base_s = 0.0
    bytes_added: list[Floats] = []
    seconds_saved: list[Floats] = []
    copies: list[Floats] = []
    for runs, n in groups:
        single = runs.frontier(1)
        room -= n * float(single.load_bytes[0])
        base_s += n * float(single.time_s[0])
        x, t = runs.hull_steps()
        bytes_added.append(x)
        seconds_saved.append(t)
        copies.append(np.full(len(x), float(n)))
    if room < -ROUNDING * abs(budget_bytes):
        return None
    step_bytes, step_s = np.concatenate(bytes_added), np.concatenate(seconds_saved)
    times = np.concatenate(copies)
    order = np.argsort(-step_s / step_bytes, kind="stable")
    step_bytes, step_s, times = step_bytes[order], step_s[order], times[order]
    used = np.cumsum(step_bytes * times)
    saved = np.cumsum(step_s * times)
    if not len(used) or used[-1] <= room:
        fastest = base_s - (float(saved[-1]) if len(saved) else 0.0)
        return fastest, 0.0, fastest
    at = int(np.searchsorted(used, room, side="right"))
    left = max(room - (float(used[at - 1]) if at else 0.0), 0.0)
    done_s = base_s - (float(saved[at - 1]) if at else 0.0)
    multiplier = float(step_s[at] / step_bytes[at])
    whole = left // float(step_bytes[at])
    return done_s - multiplier * left, multiplier, done_s - whole * float(step_s[at])
