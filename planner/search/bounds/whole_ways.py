"""Ways of whole columns through the ranks of a layout, by labels.

A *way* has a column on each rank (`planner.search.bounds.simulated_optimum`), each behind the place
where the one before ends, and gives every device type its ranks.  Each mean j of paths bounds its
step from below, whatever the way:

    T >= Σ_r w_j(column of r)

So the ways that may be within a limit are the paths through a network that keep a resource for each
mean.  A label is the beginning of a way with its sums S_j.  With b_j the least that lies behind a
place, where some ranks of every type are left, it is kept where

    S_j + b_j <= limit      for all j

The labels behind the last rank are all ways within the limit by these means: where there is none,
no plan is within it.  Label setting for shortest paths with resources: Desrochers and Soumis, INFOR
26 (1988) 191-212.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from meshwright.planner.search.bounds.simulated_cuts import Placed

MOST_PAIRS = 200_000
"""Labels and columns that are put together to list the ways of a layout: a tenth of a second."""

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class WayLabels:
    """The columns of a layout with the seconds that means of paths give them."""

    def __init__(self, placed: Placed, ranks: int, each_s: Floats) -> None:
        """`each_s` [mean, column]."""
        self._placed, self._ranks, self._each_s = placed, ranks, each_s
        numbers = placed.numbers
        used: list[list[tuple[int, ...]]] = [[] for _ in range(ranks + 1)]
        for key in itertools.product(*(range(number + 1) for number in numbers)):
            if sum(key) <= ranks:
                used[sum(key)].append(key)
        self._following = [
            np.array(
                [
                    [
                        behind.index(more)
                        if (more := (*key[:at], key[at] + 1, *key[at + 1 :])) in behind
                        else -1
                        for at in range(len(numbers))
                    ]
                    for key in before
                ],
                dtype=np.intp,
            )
            for before, behind in itertools.pairwise(used)
        ]
        """[rank][ranks used before][type] Ranks used behind it; -1 where the type has no more."""
        self._columns = []
        """[rank] Its columns by the place where they begin."""
        for rank in range(ranks):
            columns = np.flatnonzero(placed.rank == rank)
            order = np.argsort(placed.first[columns], kind="stable")
            self._columns.append(columns[order])
        self._behind_s = self._least_behind()

    def _least_behind(self) -> list[Floats]:
        """[rank][mean, ranks used before it, place] Least seconds from there on."""
        placed, places = self._placed, int(self._placed.end.max(initial=0)) + 1
        last = np.full((len(self._each_s), 1, places), np.inf)
        last[:, :, -1] = 0.0
        result = [last]
        for rank in range(self._ranks - 1, -1, -1):
            following, behind_s = self._following[rank], result[-1]
            least_s = np.full((len(self._each_s), len(following), places), np.inf)
            for number in range(len(placed.numbers)):
                columns = self._columns[rank]
                columns = columns[placed.number[columns] == number]
                if not len(columns):
                    continue
                firsts, starts = np.unique(placed.first[columns], return_index=True)
                for before in np.flatnonzero(following[:, number] >= 0).tolist():
                    every_s = behind_s[:, following[before, number]][:, placed.end[columns]]
                    every_s = np.minimum.reduceat(
                        every_s + self._each_s[:, columns], starts, axis=1
                    )
                    least_s[:, before, firsts] = np.minimum(least_s[:, before, firsts], every_s)
            result.append(least_s)
        return result[::-1]

    def least_s(self) -> Floats:
        """[mean] Least seconds of all ways; inf where there is none."""
        least_s: Floats = self._behind_s[0][:, 0, 0]
        return least_s

    def within(self, limits_s: Floats, most: int = MOST_PAIRS) -> tuple[Indices, Floats] | None:
        """[way, rank] Columns of the ways within a limit for each mean, [mean, way] their seconds.

        None where that takes more than the `most` pairs of labels and columns.
        """
        placed = self._placed
        ways = np.zeros((1, 0), dtype=np.intp)
        used = place = np.zeros(1, dtype=np.intp)
        sums_s = np.zeros((len(self._each_s), 1))
        for rank, (columns, following) in enumerate(
            zip(self._columns, self._following, strict=True)
        ):
            firsts = placed.first[columns]
            starts = np.searchsorted(firsts, place)
            counts = np.searchsorted(firsts, place, side="right") - starts
            most -= int(counts.sum())
            if most < 0:
                return None
            labels = np.repeat(np.arange(len(place)), counts)
            offsets = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
            added = columns[starts[labels] + offsets]
            after = following[used[labels], placed.number[added]]
            kept = after >= 0
            for each_s, before_s, behind_s, limit_s in zip(
                self._each_s, sums_s, self._behind_s[rank + 1], limits_s, strict=True
            ):
                labels, added, after = labels[kept], added[kept], after[kept]
                least_s = before_s[labels] + each_s[added] + behind_s[after, placed.end[added]]
                kept = least_s <= limit_s
            labels, added, used = labels[kept], added[kept], after[kept]
            sums_s = sums_s[:, labels] + self._each_s[:, added]
            place, ways = placed.end[added], np.hstack([ways[labels], added[:, None]])
        return ways, sums_s
