"""Best-first search: what waits is ordered by lower bounds, and the lowest gets its next bound.

Layouts wait in groups (families of a chain's layouts, bundles of others).  A level says which bound
of an entry was worked out last; each is dearer than the one before and at least as high.  The
lowest entry of all gets its next bound and goes back to its place; a group whose bounds are all
known makes place for its parts or its layouts.  Entries of one level may be bounded together.

A goal says which entries are of interest, and what becomes of a layout whose bounds are all known
(`meshwright.planner.search.goals`).  The search stops when the lowest bound cannot beat the
incumbent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.proof_account import (
    DOMINATED,
    OUT_OF_MEMORY,
    REFUSED,
    PruningStatistics,
)
from meshwright.planner.search.space import LayoutFamily, complexity

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.search.answer import Progress
    from meshwright.planner.search.plan_candidate import Ranked


@dataclass(frozen=True, slots=True)
class Pruned:
    """A layout that needs no further bound: why, and a bound if one is known."""

    outcome: str
    bound_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LayoutBatch:
    """Layouts that wait as one, the simplest first."""

    all: tuple[Layout, ...]

    @property
    def first(self) -> Layout:
        """The simplest."""
        return self.all[0]

    @property
    def size(self) -> int:
        """Number of layouts."""
        return len(self.all)

    def layouts(self) -> Iterable[Layout]:
        """Return all of them."""
        return self.all

    corners = layouts
    """Layouts that can have the smallest per-stage memory."""


Group = LayoutFamily | LayoutBatch
Item = Any
"""A layout or a group."""
Bound = Callable[[Layout], float | Pruned]
"""Least seconds of a layout, inf if it does not fit; or why it need not be looked at."""
Next = tuple[float, int, Item]
"""Replacement of an entry: its bound, the level that it has reached, a group or a layout, or a
family of one layout, which is made only if it is kept."""


class QueueEntry(NamedTuple):
    """Waiting entry; a group comes before layouts of the same bound, then the simplest."""

    bound_s: float
    complexity: tuple[int, ...]
    """Complexity of a layout; empty for a group."""
    number: int
    """Tells equals apart."""
    level: int
    item: Item
    space: SearchSpace

    @property
    def layout(self) -> Layout:
        """The layout, or the simplest of the group."""
        first: Layout = self.item if isinstance(self.item, Layout) else self.item.first
        return first

    @property
    def size(self) -> int:
        """Number of layouts."""
        return 1 if isinstance(self.item, Layout) else int(self.item.size)


class SearchSpace(ABC):
    """A space of layouts with their bounds, and their partition problems in the closed form.

    Groups of layouts are opened, and a layout gets one of `bounds` after the other, if a space has
    no other ways.  Only spaces of the closed form have costs, are solved and ranked.
    """

    keeps_ties = True
    """True if layouts that tie, or are the best of their kind, are wanted as finalists too."""
    passed_over_s = math.inf
    """Lower bound in seconds of layouts that others like them stand for."""
    only_simulated = False
    """True if layouts are looked at by the simulated step alone, where others have a plan."""
    groups = 1
    """Levels of groups; the next is that of layouts with the bound of their group."""

    @property
    @abstractmethod
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, the cheapest first, and what falls to each.

        The first is that of its group.
        """

    @abstractmethod
    def bundles(self, refused: Counter[str]) -> Iterable[tuple[float, Group]]:
        """Yield every layout that keeps what the user fixed, in groups with their first bounds.

        Why layouts cannot run is counted.  Some of a group may be refused still.
        """

    @abstractmethod
    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""

    def costs_of(self, layout: Layout) -> Sequence[LayoutCosts]:
        """Return the costs of a layout on each kind of device."""
        raise NotImplementedError

    def solve(self, layout: Layout, cutoff_s: float, /) -> Any:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""
        raise NotImplementedError

    def candidate_of(self, split: Any, /) -> Ranked:
        """Return the plan of a split and its prediction."""
        raise NotImplementedError

    @property
    def levels(self) -> Sequence[str]:
        """Names of the bounds that exclude entries at each level."""
        names = [name for name, _ in self.bounds]
        return (*names[:1] * self.groups, *names)

    def batch(self, _: int) -> int:
        """Return how many entries of a level are bounded together."""
        return 1

    def may_refine(self, _: int) -> bool:
        """Return whether an entry of a level may get another bound."""
        return True

    def advance(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next | Pruned | None]:
        """Yield what takes the place of entries; None for a layout whose bounds are all known.

        No bound is below that of its entry.  None and what is lost are of a single entry.
        """
        if level < self.groups:
            yield from self.expand(level, some)
            return
        [entry] = some
        if level - self.groups + 1 == len(self.bounds):
            yield None
            return
        better_s = self.bounds[level - self.groups + 1][1](entry.layout)
        if isinstance(better_s, Pruned):
            yield better_s
        else:
            yield max(entry.bound_s, better_s), level + 1, entry.item

    def expand(self, _: int, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Yield the layouts of groups."""
        for entry in some:
            for layout in entry.item.layouts():
                yield entry.bound_s, self.groups, layout

    def reject_reason(self, level: int, layout: Layout) -> Pruned | None:
        """Return why a layout is not looked at, which is asked when its turn comes."""
        if level != self.groups:
            return None
        reason = self.refusal(layout)
        if reason is not None:
            return Pruned(REFUSED, reason=reason)
        return Pruned(DOMINATED) if self.repeats(layout) else None

    def repeats(self, _: Layout) -> bool:
        """Return whether another layout of the space does the same."""
        return False

    def fits(self, layout: Layout) -> bool:
        """Return whether a layout has a split that fits."""
        return not isinstance(self.solve(layout, math.inf), Pruned)


class SearchGoal(ABC):
    """Goal of a search: it tells which bounds and entries are of interest."""

    @abstractmethod
    def exceeds(self, bound_s: float) -> bool:
        """Return whether nothing with at least this bound is of interest."""

    @abstractmethod
    def accepts(self, entry: QueueEntry) -> bool:
        """Return whether an entry is of interest."""

    def drops(self, bound_s: float, _: SearchSpace) -> bool:
        """Return whether entries of a space with this bound need not be kept."""
        return self.exceeds(bound_s)

    def complete(self, _: QueueEntry) -> Pruned | None:
        """Take a layout whose bounds are all known; return why it is lost, if it is."""
        return None

    def lowest(self, _: QueueEntry) -> None:  # noqa: B027 - most goals take no notice
        """Hear which entry has the lowest bound that is left."""


class Queue:
    """Waiting entries of some spaces, and an account of the rest."""

    def __init__(
        self,
        goal: SearchGoal,
        *,
        account: PruningStatistics | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.goal = goal
        self.account = account or PruningStatistics()
        self.refused: Counter[str] = Counter()
        """Reasons why the framework runs no plan of a layout, and of how many layouts."""
        self.misses: list[str] = []
        """Why layouts were seen not to fit, where somebody said."""
        self._progress = progress
        self._numbers = itertools.count()
        self._heaps: list[list[QueueEntry]] = []
        """[level] What waits."""
        self._wanted: set[int] = set()
        """Numbers of layouts that are known to be looked at."""

    def run(self, *spaces: SearchSpace) -> None:
        """Look at all layouts of some spaces, as far as needed."""
        count = 0
        for space in spaces:
            refused: Counter[str] = Counter()
            for bound_s, group in space.bundles(refused):
                self._push(bound_s, 0, group, space)
                count += 1
            self._count_refused(refused)
        while (level := self._next_level()) is not None:
            self._advance(level)
            if self._progress is not None:
                self._progress(count - len(self._heaps[0]), count)

    def _count_refused(self, refused: Counter[str]) -> None:
        self.refused += refused
        for reason, count in refused.items():
            self.account.count_refused(reason, count)

    def _push(self, bound_s: float, level: int, item: Item, space: SearchSpace) -> None:
        """Put an item in its place, or count it if it is of no interest."""
        if self.goal.drops(bound_s, space):
            outcome = OUT_OF_MEMORY if bound_s == math.inf else space.levels[level]
            self.account.count_settled(outcome, 1 if isinstance(item, Layout) else item.size)
            return
        while len(self._heaps) <= level:
            self._heaps.append([])
        item = item.first if level == space.groups and isinstance(item, LayoutFamily) else item
        simple = complexity(item) if isinstance(item, Layout) else ()
        entry = QueueEntry(bound_s, simple, next(self._numbers), level, item, space)
        heapq.heappush(self._heaps[level], entry)

    def _next_level(self) -> int | None:
        """Return the level of the lowest entry that may get another bound; None if none may."""
        lowest = self.lowest()
        if lowest is None or self.goal.exceeds(lowest.bound_s):
            return None
        self.goal.lowest(lowest)
        for entry in sorted(heap[0] for heap in self._heaps if heap):
            if entry.space.may_refine(entry.level):
                return None if self.goal.exceeds(entry.bound_s) else entry.level
        return None

    def lowest(self) -> QueueEntry | None:
        """Return the entry with the lowest bound; layouts that are unwanted are left out."""
        while True:
            entry = min((heap[0] for heap in self._heaps if heap), default=None)
            lost = None if entry is None else self._reject_reason(entry)
            if entry is None or lost is None:
                return entry
            self._lose(lost, heapq.heappop(self._heaps[entry.level]))

    def _reject_reason(self, entry: QueueEntry) -> Pruned | None:
        """Return why an entry is not looked at; nobody asks a second time."""
        if entry.number in self._wanted or not isinstance(entry.item, Layout):
            return None
        lost = entry.space.reject_reason(entry.level, entry.item)
        if lost is None:
            self._wanted.add(entry.number)
        return lost

    def _advance(self, level: int) -> None:
        """Bring the lowest entries of a level a step further."""
        heap = self._heaps[level]
        space = heap[0].space
        some: list[QueueEntry] = []
        for _ in range(space.batch(level)):
            if not heap or heap[0].space is not space:
                break
            entry = heapq.heappop(heap)
            if not self.goal.accepts(entry):
                self.account.count_settled(space.levels[level], entry.size)
            elif (lost := self._reject_reason(entry)) is not None:
                self._lose(lost, entry)
            else:
                some.append(entry)
        if not some:
            return
        for node in space.advance(level, some):
            if node is None:
                lost = self.goal.complete(some[0])
                if lost is not None:
                    self._lose(lost, some[0])
            elif isinstance(node, Pruned):
                self._lose(node, some[0])
            else:
                self._push(node[0], node[1], node[2], space)

    def _lose(self, lost: Pruned, entry: QueueEntry) -> None:
        if lost.outcome == REFUSED:
            self._count_refused(Counter([lost.reason]))
            return
        self.account.count_settled(lost.outcome, entry.size)
        if lost.reason:
            self.misses.append(lost.reason)

    def rest(self) -> Iterator[QueueEntry]:
        """Yield what is left, the lowest first."""
        return heapq.merge(*map(sorted, self._heaps))
