"""The exact split of a chain into two stages a rank, and the options of its layers.

Ranks are taken in turn, and a state is (p, q): where the first stages have come to, from the
front, and where the second ones have, from the middle (looped) or from the back (folded).  Rank r
takes d layers behind p and e layers beside q.  The least max_r (m t_r + sync) is a dynamic program
over the ranks; a limit on the largest stage, which falls from one solution to the next, brings in
the bubble as `planner.solver.descent` does with its ceilings.  In a looped schedule the middle is
tried at each position.

What a rank takes is bounded first, layers at their fastest, and becomes exact when the best path
wants it; all costs being bounds, a path whose ranks are exact is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.rounds.problem import RoundsProblem, RoundsSolution, Spans, objective_s
from planner.rounds.rank import RankChoice, RankOptions
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Fathomed, Infeasible
from planner.tolerances import ROUNDING, SLACK

Floats = NDArray[np.float64]


def solve_rounds(
    problem: RoundsProblem,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> RoundsSolution | Infeasible | Fathomed:
    """Minimise the time of `problem`; only objectives below `cutoff_s` are of interest."""
    layers, stages = len(problem.layers), len(problem.home)
    if stages > layers:
        return Infeasible(f"{stages} stages need as many layers; the chain has {layers}")
    search = _Search(problem, frontiers if frontiers is not None else FrontierStore())
    bound_s = search.bound_s()
    if bound_s >= cutoff_s * (1 - ROUNDING):
        return Fathomed(bound_s)
    best: RoundsSolution | None = None
    even = layers / stages
    for widths in (range(max(1, int(even) - 1), int(even) + 3), range(1, layers)):
        for middle in search.middles(cutoff_s):
            found = search.under(middle, widths, cutoff_s)
            if found is not None:
                best, cutoff_s = found, found.objective_s
    if best is None:
        return (
            Infeasible(f"no split into {stages} stages, two on each of {problem.ranks} ranks, fits")
            if cutoff_s == math.inf
            else Fathomed(min(cutoff_s, search.loose_s()))
        )
    return replace(best, lower_bound_s=min(best.objective_s, search.loose_s()))


def least_s(problem: RoundsProblem) -> float:
    """Return seconds below which no split stays, memory ignored."""
    return _Search(problem, FrontierStore()).bound_s()


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """[position] A stage of one size on one rank: seconds at their fastest, and as stages count.

    A position is where the stage begins, or ends if it is counted from the back; inf where it would
    leave the chain.  `least_s` and `most_s` are of all positions on the chain.
    """

    seconds: Floats
    stage_s: Floats
    least_s: float
    most_s: float


class _Search:
    """One problem: costs of every rank, bounded or exact, and the dynamic programs over them."""

    def __init__(self, problem: RoundsProblem, store: FrontierStore) -> None:
        self._problem = problem
        self._layers = len(problem.layers)
        kinds = np.array(problem.layers)
        credits_s = np.array(problem.credits_s or (0.0,) * len(problem.kinds))
        least_s = np.array([min(o.time_s for o in table) for table in problem.kinds])
        sync_s = np.array([table[0].sync_s for table in problem.kinds])
        self._least_s = _sums(least_s[kinds])
        self._stage_s = _sums((least_s - credits_s)[kinds])
        self._sync_s = _sums(sync_s[kinds])
        self._ranks = [RankOptions(problem, rank, store) for rank in range(problem.ranks)]
        self._known: dict[tuple[int, int, int], Floats] = {}
        self._known_sides: dict[tuple[int, int, int], _Side] = {}
        self._exact: dict[tuple[int, int, int, int, int], RankChoice | None] = {}
        self._loose_s = math.inf
        """Least m t of what ranks take that is not known exactly."""

    def bound_s(self) -> float:
        """Seconds below which no split stays: mean ranks, mean stages."""
        problem, ranks = self._problem, self._problem.ranks
        exposed_s = sum(problem.exposed_s)
        steady_s = problem.micro_batches * (float(self._least_s[-1]) + exposed_s)
        stage_s = (float(self._stage_s[-1]) + exposed_s) / len(problem.home)
        mean_s = (steady_s + float(self._sync_s[-1])) / ranks
        return (1 - ROUNDING) * (mean_s + (ranks - 1) * stage_s)

    def loose_s(self) -> float:
        """Seconds of splits with ranks that are not known exactly, at least; inf if all are."""
        return max(self.bound_s(), self._loose_s)

    def middles(self, cutoff_s: float) -> Iterator[int]:
        """Where the second stages may begin, the most even place first; folded, behind the last."""
        problem = self._problem
        if problem.folded:
            yield self._layers
            return
        ranks = problem.ranks
        places = range(ranks, self._layers - ranks + 1)
        yield from sorted(places, key=lambda at: abs(2 * self._least_s[at] - self._least_s[-1]))

    def under(self, middle: int, widths: range, cutoff_s: float) -> RoundsSolution | None:
        """Best split below the cutoff with the middle there."""
        bubble, best = self._problem.ranks - 1, None
        largest_s = math.inf
        least_largest_s = self._least_largest_s(middle)
        while least_largest_s < largest_s:
            limit_s = cutoff_s - bubble * least_largest_s
            path = self._path(middle, widths, largest_s, limit_s)
            if path is None:
                return best
            fresh = [at for at in path if at not in self._exact]
            for at in fresh:
                self._settle(*at)
            if fresh:
                continue
            found = self._assembled(path)
            if found.objective_s < cutoff_s:
                best, cutoff_s = found, found.objective_s
            largest_s = math.nextafter(max(self._path_stages_s(path)), -math.inf)
        return best

    def _least_largest_s(self, middle: int) -> float:
        """Least that the largest stage takes."""
        ranks, until = self._problem.ranks, self._stage_s
        if self._problem.folded:
            return float(until[-1]) / (2 * ranks)
        return max(float(until[middle]), float(until[-1] - until[middle])) / ranks

    def _spans(self, at: tuple[int, int, int, int, int]) -> Spans:
        """Return the layers of both stages of a rank."""
        _, p, q, d, e = at
        return (p, p + d), ((q - e, q) if self._problem.folded else (q, q + e))

    def _stage_beside_s(self, rank: int, place: int, first: int, end: int) -> float:
        """Seconds of the cuts of a rank's first or second stage."""
        problem = self._problem
        stage = problem.stages_of(rank)[place]
        return problem.cut_between(stage - 1, first) + problem.cut_between(stage, end)

    def _path_stages_s(self, path: Sequence[tuple[int, int, int, int, int]]) -> Iterator[float]:
        """Yield what stages count for, from the tables that the limit is held against."""
        for rank, p, q, d, e in path:
            yield float(self._side(rank, 0, d).stage_s[p])
            yield float(self._side(rank, 1, e).stage_s[q])

    def _side(self, rank: int, place: int, width: int) -> _Side:
        """Return a rank's first or second stage of so many layers."""
        key = (rank, place, width)
        found = self._known_sides.get(key)
        if found is None:
            found = self._known_sides[key] = self._new_side(rank, place, width)
        return found

    def _new_side(self, rank: int, place: int, width: int) -> _Side:
        size = self._layers + 1
        back = self._problem.folded and place == 1
        seconds, stage_s = np.full(size, np.inf), np.full(size, np.inf)
        for at in range(size):
            first, end = (at - width, at) if back else (at, at + width)
            if first < 0 or end >= size:
                continue
            beside_s = self._stage_beside_s(rank, place, first, end)
            seconds[at] = self._least_s[end] - self._least_s[first] + beside_s
            stage_s[at] = self._stage_s[end] - self._stage_s[first] + beside_s
        return _Side(
            seconds=seconds,
            stage_s=stage_s + self._problem.exposed_s[rank] / 2,
            least_s=float(seconds.min()),
            most_s=float(seconds.max(where=np.isfinite(seconds), initial=0.0)),
        )

    def _sync(self, place: int, width: int) -> Floats:
        size = self._layers + 1
        back = self._problem.folded and place == 1
        found = np.zeros(size)
        for at in range(size):
            first, end = (at - width, at) if back else (at, at + width)
            if first >= 0 and end < size:
                found[at] = self._sync_s[end] - self._sync_s[first]
        return found

    def _cost(self, rank: int, d: int, e: int) -> Floats:
        """[p, q] What a rank takes, m t + sync: exactly where it is known, else at least."""
        key = (rank, d, e)
        if key not in self._known:
            problem = self._problem
            front = self._side(rank, 0, d).seconds
            behind = self._side(rank, 1, e).seconds
            seconds = front[:, None] + behind[None, :] + problem.exposed_s[rank]
            sync_s = self._sync(0, d)[:, None] + self._sync(1, e)[None, :]
            self._known[key] = problem.micro_batches * seconds + sync_s
        return self._known[key]

    def _path(
        self, middle: int, widths: range, largest_s: float, limit_s: float
    ) -> list[tuple[int, int, int, int, int]] | None:
        """[rank] (rank, p, q, d, e) with the least largest cost, below the limit; None if none."""
        problem, size = self._problem, self._layers + 1
        folded, ranks = problem.folded, problem.ranks
        value = np.full((size, size), np.inf)
        if folded:
            np.fill_diagonal(value, 0.0)
        else:
            value[middle, self._layers] = 0.0
        moves: list[NDArray[np.intp]] = []
        for rank in reversed(range(ranks)):
            better = np.full((size, size), np.inf)
            chosen = np.full((size, size), -1, dtype=np.intp)
            least_s = self._least_held_s(limit_s)
            for d in widths:
                front = self._side(rank, 0, d)
                allowed_d = front.stage_s <= largest_s
                if not allowed_d.any():
                    continue
                for e in widths:
                    behind = self._side(rank, 1, e)
                    lowest_s, highest_s = self._range_s(rank, front, behind)
                    if lowest_s >= limit_s or highest_s < least_s:
                        continue
                    allowed_e = behind.stage_s <= largest_s
                    after = np.full((size, size), np.inf)
                    if folded:
                        after[: size - d, e:] = value[d:, : size - e]
                    else:
                        after[: size - d, : size - e] = value[d:, e:]
                    if not np.isfinite(after).any():
                        continue
                    total = np.maximum(self._cost(rank, d, e), after)
                    total[~allowed_d, :] = np.inf
                    total[:, ~allowed_e] = np.inf
                    found = (total < better) & (total < limit_s)
                    better[found] = total[found]
                    chosen[found] = d * size + e
            value = better
            moves.append(chosen)
        p, q = 0, middle
        if not value[p, q] < limit_s:
            return None
        path = []
        for rank, chosen in enumerate(reversed(moves)):
            d, e = divmod(int(chosen[p, q]), size)
            path.append((rank, p, q, d, e))
            p, q = p + d, (q - e if folded else q + e)
        return path

    def _least_held_s(self, limit_s: float) -> float:
        """Least m t + sync of a rank's layers at their fastest if no rank reaches the limit."""
        problem = self._problem
        whole_s = problem.micro_batches * float(self._least_s[-1]) + float(self._sync_s[-1])
        return (1 - SLACK) * (whole_s - (problem.ranks - 1) * limit_s)

    def _range_s(self, rank: int, front: _Side, behind: _Side) -> tuple[float, float]:
        """Lowest m t, and the highest m t + sync, of any two stages of two sizes on a rank."""
        steady, exposed_s = self._problem.micro_batches, self._problem.exposed_s[rank]
        lowest_s = steady * (front.least_s + behind.least_s + exposed_s)
        highest_s = steady * (front.most_s + behind.most_s + exposed_s)
        return lowest_s, highest_s + float(self._sync_s[-1])

    def _settle(self, rank: int, p: int, q: int, d: int, e: int) -> None:
        """Make exact what a rank takes for these layers."""
        at = (rank, p, q, d, e)
        front, behind = self._spans(at)
        choice = self._ranks[rank].fastest(front, behind)
        self._exact[at] = choice
        cost = self._cost(rank, d, e)
        if choice is None:
            cost[p, q] = np.inf
            return
        if choice.at_least_s is not None:
            self._loose_s = min(self._loose_s, self._problem.micro_batches * choice.at_least_s)
        least_s = sum(float(self._least_s[b] - self._least_s[a]) for a, b in (front, behind))
        cost[p, q] += self._problem.micro_batches * max(0.0, choice.time_s - least_s)

    def _assembled(self, path: Sequence[tuple[int, int, int, int, int]]) -> RoundsSolution:
        options = [0] * self._layers
        ends = {0}
        for at in path:
            choice = self._exact[at]
            assert choice is not None, "a path takes what fits"
            for (first, end), taken in zip(self._spans(at), choice.options, strict=True):
                options[first:end] = taken
                ends |= {first, end}
        cuts = tuple(sorted(ends))
        value_s = objective_s(self._problem, cuts, options)
        assert value_s < math.inf, "what was settled fits"
        return RoundsSolution(
            cuts=cuts,
            options=tuple(options),
            objective_s=value_s,
            lower_bound_s=min(value_s, self.bound_s()),
        )


def _sums(per_layer: Floats) -> Floats:
    return np.append(0.0, np.cumsum(per_layer))
