"""Best-first search over single layouts, where their partition problems are not chains of equals.

`planner.search.best_first` bounds whole families of layouts of a chain on equal devices.  Graphs
of layers and devices that differ leave far fewer layouts; these wait here one by one, ordered by
the highest lower bound that is known of each.  The first one gets its next bound and goes back to
its place; if all are known its problem is solved.  When the first is not below the best objective
found, no layout that is left is either.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from planner.plan import Layout
from planner.search.certificate import OUT_OF_MEMORY, RUNNERS_UP, SLOWER, Account
from planner.search.space import complexity, kind
from planner.tolerances import EQUAL

ALIKE = 2
"""Finalists of one schedule with so many stages a rank."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A layout's best split; `lower_bound_s` is below its objective if that is not proven."""

    objective_s: float
    lower_bound_s: float
    layout: Layout
    split: T

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Faster first; of equally fast ones the simpler."""
        return self.objective_s, complexity(self.layout)


@dataclass(frozen=True, slots=True)
class Lost:
    """A layout without a split worth having: why, and a bound if one is known."""

    outcome: str
    bound_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Layouts that wait as one, since none takes less than `bound_s`; `first` is the simplest."""

    first: Layout
    bound_s: float
    size: int
    layouts: Callable[[], Iterable[Layout]]
    """Those of them that can run."""
    better_s: Callable[[], float] | None = None
    """A dearer bound on them all, worked out before they are told apart; inf if none fits."""


Bound = Callable[[Layout], float]
Solve = Callable[[Layout, float], Found[T] | Lost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(Generic[T]):
    """The best of each kind of layout, fastest first, not yet in the account; none if none fits."""

    best: tuple[Found[T], ...]
    solved: int
    misses: tuple[tuple[Layout, str], ...]
    """Layouts that were seen not to fit, and why."""
    near: Callable[[float, int], list[Found[T]]]
    """Return the splits that take no more than so long, of which so many may still be solved."""


def best_first(
    layouts: Iterable[Layout | Bundle],
    *,
    bounds: Sequence[tuple[str, Bound]],
    solve: Solve[T],
    account: Account,
    top: int = 1,
    below_s: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> Searched[T]:
    """Find the best layouts; `bounds` are named by what a layout falls to, cheapest first.

    What is known of a bundle is the first of these bounds.  A bound of inf says that the layout
    does not fit.  Layouts at or above `below_s` are not worth having.
    """
    queue = _Queue(bounds, solve, account, top, below_s)
    queue.entries = [_entry(item) for item in layouts]
    heapq.heapify(queue.entries)
    count = len(queue.entries)
    while queue.entries and not queue.settled():
        queue.advance(heapq.heappop(queue.entries))
        if progress is not None:
            progress(max(0, count - len(queue.entries)), count)
    left = list(queue.entries)
    queue.leave_the_rest()
    return Searched(
        best=queue.ranking(),
        solved=queue.solved,
        misses=tuple(queue.misses),
        near=partial(queue.near, left),
    )


class _Entry(NamedTuple):
    """What waits; `known` is the index of its last bound that is worked out."""

    bound_s: float
    complexity: tuple[int, ...]
    known: int
    item: Layout | Bundle

    @property
    def layout(self) -> Layout:
        """The layout, or the simplest one."""
        return self.item.first if isinstance(self.item, Bundle) else self.item

    @property
    def size(self) -> int:
        return self.item.size if isinstance(self.item, Bundle) else 1


def _entry(item: Layout | Bundle) -> _Entry:
    if isinstance(item, Bundle):
        return _Entry(item.bound_s, complexity(item.first), 0, item)
    return _Entry(0.0, complexity(item), -1, item)


class _Queue(Generic[T]):
    """What waits, what was found, and what became of the others."""

    def __init__(
        self,
        bounds: Sequence[tuple[str, Bound]],
        solve: Solve[T],
        account: Account,
        top: int,
        below_s: float,
    ) -> None:
        self.entries: list[_Entry] = []
        self.misses: list[tuple[Layout, str]] = []
        self.solved = 0
        self._bounds = bounds
        self._solve = solve
        self._account = account
        self._top = top
        self._below_s = below_s
        self._best: dict[tuple[int, ...], Found[T]] = {}
        self._found: list[Found[T]] = []

    def settled(self) -> bool:
        """Whether no layout that waits can be among the best."""
        bound_s, last = self.entries[0].bound_s, self._last()
        return bound_s >= self._below_s or (
            last is not None and bound_s > last.objective_s * (1 + EQUAL)
        )

    def advance(self, entry: _Entry) -> None:
        """Bring one layout a step further: a better bound, or its solution."""
        layout, rival = entry.layout, self._best.get(kind(entry.layout)) or self._last()
        if rival is not None and not may_beat(entry.bound_s, entry.complexity, rival):
            outcome = self._bounds[max(entry.known, 0)][0]
            self._account.lost(outcome, layout, bound_s=entry.bound_s, count=entry.size)
        elif (deeper := self._deeper(entry)) is None:
            self._try(entry, rival)
        else:
            for one in deeper:
                if math.isinf(one.bound_s):
                    self._miss(layout, "", count=one.size)
                else:
                    heapq.heappush(self.entries, one)

    def _deeper(self, entry: _Entry) -> list[_Entry] | None:
        """Return what takes the place of an entry; None if all of its bounds are known.

        A bound of inf says that it does not fit.
        """
        item = entry.item
        if isinstance(item, Bundle) and item.better_s is not None:
            bound_s = max(entry.bound_s, item.better_s())
            known = replace(item, bound_s=bound_s, better_s=None)
            return [entry._replace(bound_s=bound_s, item=known)]
        if isinstance(item, Bundle):
            return [_Entry(entry.bound_s, complexity(one), 0, one) for one in item.layouts()]
        if entry.known + 1 < len(self._bounds):
            bound_s = max(entry.bound_s, self._bounds[entry.known + 1][1](item))
            return [entry._replace(bound_s=bound_s, known=entry.known + 1)]
        return None

    def near(self, left: list[_Entry], limit_s: float, most: int) -> list[Found[T]]:
        """Return splits within the limit: those found, and of up to `most` layouts that are left.

        Of a schedule with so many stages a rank there are `ALIKE`, those with the least bounds:
        where the closed form is too low for some layouts of it, it is so for the others.  The
        account has nothing of it.
        """
        found = [one for one in self._found if one.objective_s <= limit_s]
        known = Counter(_timetable(one.layout) for one in found)
        left = list(left)
        heapq.heapify(left)
        while left and left[0].bound_s <= limit_s and most > 0:
            entry = heapq.heappop(left)
            deeper = self._deeper(entry)
            if deeper is not None:
                for one in deeper:
                    heapq.heappush(left, one)
                continue
            if known[_timetable(entry.layout)] >= ALIKE:
                continue
            known[_timetable(entry.layout)] += 1
            most -= 1
            answer = self._solve(entry.layout, limit_s)
            if isinstance(answer, Found) and answer.objective_s <= limit_s:
                found.append(answer)
        return found

    def _try(self, entry: _Entry, rival: Found[T] | None) -> None:
        """Solve the problem of a layout whose bounds do not decide."""
        cutoff_s = math.inf if rival is None else rival.objective_s * (1 + EQUAL)
        self.solved += 1
        answer = self._solve(entry.layout, min(cutoff_s, self._below_s))
        if isinstance(answer, Lost) and answer.outcome == OUT_OF_MEMORY:
            self._miss(entry.layout, answer.reason)
        elif isinstance(answer, Lost):
            self._account.lost(answer.outcome, entry.layout, bound_s=answer.bound_s)
        else:
            if answer.lower_bound_s < answer.objective_s * (1 - EQUAL):
                # What its layout may still hide bounds the whole search.
                proven_s = max(answer.lower_bound_s, entry.bound_s)
                self._account.unfinished_s.append(proven_s)
            self._found.append(answer)
            self._enter(answer)

    def _enter(self, new: Found[T]) -> None:
        """Let a split stand for its kind of layout if it is the best of it."""
        old = self._best.get(kind(new.layout))
        if new.objective_s < self._below_s and (old is None or wins(new, old)):
            self._best[kind(new.layout)] = new
            loser = old
        else:
            loser = new
        if loser is not None:
            self._account.lost(SLOWER, loser.layout, objective_s=loser.objective_s)

    def _miss(self, layout: Layout, reason: str, count: int = 1) -> None:
        self._account.lost(OUT_OF_MEMORY, layout, count=count)
        self.misses.append((layout, reason))

    def leave_the_rest(self) -> None:
        """Account for what was not looked at any further."""
        for place, entry in enumerate(sorted(self.entries)):
            outcome = self._bounds[max(entry.known, 0)][0]
            self._account.lost(
                outcome,
                entry.layout,
                bound_s=entry.bound_s if place < RUNNERS_UP else None,
                because=f"not solved, {outcome}",
                count=entry.size,
            )

    def ranking(self) -> tuple[Found[T], ...]:
        """Return the best of each kind, fastest first."""
        best = list(self._best.values())
        return tuple(best[at] for at in ranking(best))

    def _last(self) -> Found[T] | None:
        """Return the last of the `top` best, if there are so many."""
        ranking = sorted(self._best.values(), key=lambda found: found.rank)
        return ranking[self._top - 1] if len(ranking) >= self._top else None


def _timetable(layout: Layout) -> tuple[str, int, bool]:
    return layout.schedule, layout.virtual_stages, layout.pipeline > 1


def ranking(best: Sequence[Found[T]]) -> list[int]:
    """Return places, fastest first; of equally fast ones the simplest leads."""
    order = sorted(range(len(best)), key=lambda at: best[at].rank)
    if order:
        fastest_s = best[order[0]].objective_s * (1 + EQUAL)
        ties = [at for at in order if best[at].objective_s <= fastest_s]
        first = min(ties, key=lambda at: complexity(best[at].layout))
        order.insert(0, order.pop(order.index(first)))
    return order


def may_beat(bound_s: float, simple: tuple[int, ...], rival: Found[T]) -> bool:
    """Whether a layout with this bound and complexity can beat its rival, or tie and be simpler."""
    if bound_s < rival.objective_s * (1 - EQUAL):
        return True
    return bound_s <= rival.objective_s * (1 + EQUAL) and simple < complexity(rival.layout)


def wins(new: Found[T], old: Found[T]) -> bool:
    """Faster wins; of equally fast ones the simpler, whatever the order they came in."""
    if abs(new.objective_s - old.objective_s) <= EQUAL * old.objective_s:
        return complexity(new.layout) < complexity(old.layout)
    return new.objective_s < old.objective_s
