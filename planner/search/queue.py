"""Best-first search: what waits is ordered by lower bounds, and the lowest gets its next bound.

Layouts wait in groups (families of a chain's layouts, bundles of others).  A level says which bound
of an entry was worked out last; each is dearer than the one before and at least as high.  The
lowest entry of all gets its next bound and goes back to its place; a group whose bounds are all
known makes place for its parts or its layouts.  Entries of one level may be bounded together.

A goal says which entries are of interest, and what becomes of a layout whose bounds are all known
(`planner.search.goals`).  When the lowest entry is of no interest, none that is left is.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from planner.costs.layout_costs import LayoutCosts
from planner.documents.plan import Layout
from planner.search.answer import Progress
from planner.search.certificate import DOMINATED, OUT_OF_MEMORY, REFUSED, Account
from planner.search.ranked import Ranked
from planner.search.space import complexity


@dataclass(frozen=True, slots=True)
class Lost:
    """A layout that needs no further bound: why, and a bound if one is known."""

    outcome: str
    bound_s: float | None = None
    reason: str = ""


class Group(Protocol):
    """Layouts that wait as one."""

    @property
    def first(self) -> Layout:
        """The simplest."""

    @property
    def size(self) -> int:
        """How many there are."""

    def layouts(self) -> Iterable[Layout]:
        """Yield all of them."""

    def corners(self) -> Iterable[Layout]:
        """Yield those among which is the one that holds least on a stage."""


Item = Any
"""A layout, or a `Group`."""
Bound = Callable[[Layout], float | Lost]
"""Least seconds of a layout, inf if it does not fit; or why it need not be looked at."""
Next = tuple[float, int, Item]
"""What takes the place of an entry: a bound, the level that is reached, a group or a layout."""


class QueueEntry(NamedTuple):
    """What waits; a group comes before layouts of the same bound, then the simplest."""

    bound_s: float
    complexity: tuple[int, ...]
    """Of a layout; a group has none."""
    number: int
    """Tells equals apart."""
    level: int
    item: Item
    space: SearchSpace

    @property
    def layout(self) -> Layout:
        """The layout, or the simplest of the group."""
        item = self.item
        first: Layout = item if isinstance(item, Layout) else item.first
        return first

    @property
    def size(self) -> int:
        """How many layouts there are."""
        return 1 if isinstance(self.item, Layout) else int(self.item.size)


class SearchSpace(Protocol):
    """Layouts and their bounds."""

    @property
    def levels(self) -> Sequence[str]:
        """What excludes entries at each level."""

    def batch(self, level: int) -> int:
        """Return how many entries of a level are bounded together."""

    def may(self, level: int) -> bool:
        """Whether an entry of a level may get another bound."""

    def bundles(self, refused: Counter[str]) -> Iterable[tuple[float, Any]]:
        """Yield every layout that keeps what the user fixed, in groups with their first bounds.

        Why layouts cannot run is counted.  Some of a group may be refused still.
        """

    def advance(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next | Lost | None]:
        """Yield what takes the place of entries; None for a layout whose bounds are all known.

        No bound is below that of its entry.  None and what is lost are of a single entry.
        """

    def unwanted(self, level: int, layout: Layout) -> Lost | None:
        """Return why a layout is not looked at, which is asked when its turn comes."""


class SolvedLayout(SearchSpace, Protocol):
    """Layouts whose partition problems are solved in the closed form."""

    @property
    def keeps_ties(self) -> bool:
        """Whether layouts that tie, or are the best of their kind, are wanted as finalists too."""

    def costs_of(self, layout: Layout) -> Sequence[LayoutCosts]:
        """Return the costs of a layout on each kind of device."""

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""

    def solve(self, layout: Layout, cutoff_s: float, /) -> Any:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""

    def fits(self, layout: Layout) -> bool:
        """Whether a layout has a split that fits."""

    def ranked(self, found: Any, /) -> Ranked:
        """Return the plan of a split and its prediction."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Layouts that wait as one, and the simplest of them."""

    first: Layout
    size: int
    layouts: Callable[[], Iterable[Layout]]
    better_s: Callable[[], float] | None = None
    """A dearer bound on them all, worked out before they are told apart; inf if none fits."""

    def corners(self) -> Iterable[Layout]:
        """Yield the layouts that divide states among the most ranks, for each ZeRO level."""
        widest: dict[int, Layout] = {}
        for layout in self.layouts():
            if layout.data_shard > widest.setdefault(layout.zero, layout).data_shard:
                widest[layout.zero] = layout
        return widest.values()


class Layouts:
    """How a space advances groups and layouts, if it has nothing of its own."""

    keeps_ties = True
    groups = 1
    """Levels of groups; the next is that of layouts with the bound of their group."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, the cheapest first, and what falls to each.

        The first is that of its group.
        """
        raise NotImplementedError

    @property
    def levels(self) -> Sequence[str]:
        """What excludes entries at each level."""
        names = [name for name, _ in self.bounds]
        return (*names[:1] * self.groups, *names)

    def batch(self, _: int) -> int:
        """Return how many entries of a level are bounded together."""
        return 1

    def may(self, _: int) -> bool:
        """Whether an entry of a level may get another bound."""
        return True

    def advance(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next | Lost | None]:
        """Yield what takes the place of entries; None for a layout whose bounds are all known."""
        if level < self.groups:
            yield from self.opened(level, some)
            return
        [entry] = some
        if level - self.groups + 1 == len(self.bounds):
            yield None
            return
        better_s = self.bounds[level - self.groups + 1][1](entry.item)
        if isinstance(better_s, Lost):
            yield better_s
        else:
            yield max(entry.bound_s, better_s), level + 1, entry.item

    def opened(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Yield bundles with their dearer bounds, or else their layouts."""
        for entry in some:
            bundle = entry.item
            if isinstance(bundle, Bundle) and bundle.better_s is not None:
                better_s = max(entry.bound_s, bundle.better_s())
                yield better_s, level, replace(bundle, better_s=None)
                continue
            for layout in bundle.layouts():
                yield entry.bound_s, self.groups, layout

    def unwanted(self, level: int, layout: Layout) -> Lost | None:
        """Return why a layout is not looked at, which is asked when its turn comes."""
        if level != self.groups:
            return None
        reason = self.refusal(layout)
        if reason is not None:
            return Lost(REFUSED, reason=reason)
        return Lost(DOMINATED) if self.repeats(layout) else None

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        raise NotImplementedError

    def repeats(self, layout: Layout) -> bool:
        """Whether another layout of the space does the same."""
        return False

    def solve(self, layout: Layout, cutoff_s: float, /) -> Any:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""
        raise NotImplementedError

    def fits(self, layout: Layout) -> bool:
        """Whether a layout has a split that fits."""
        return not isinstance(self.solve(layout, math.inf), Lost)


class SearchGoal(Protocol):
    """What a search looks for."""

    def over(self, bound_s: float) -> bool:
        """Whether nothing with at least this bound is of interest."""

    def drops(self, bound_s: float, space: SearchSpace) -> bool:
        """Whether what has a bound need not be kept."""

    def wants(self, entry: QueueEntry) -> bool:
        """Whether an entry is of interest."""

    def complete(self, entry: QueueEntry) -> Lost | None:
        """Take a layout whose bounds are all known; return why it is lost, if it is."""

    def lowest(self, entry: QueueEntry) -> None:
        """Hear which entry has the lowest bound that is left."""


class Queue:
    """What waits of some spaces, and what became of the rest."""

    def __init__(
        self, goal: SearchGoal, *, account: Account | None = None, progress: Progress | None = None
    ) -> None:
        self.goal = goal
        self.account = account or Account()
        self.refused: Counter[str] = Counter()
        """Reasons why the backend runs no plan of a layout, and of how many layouts."""
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
            self.account.refused(reason, count)

    def _push(self, bound_s: float, level: int, item: Item, space: SearchSpace) -> None:
        """Put an item in its place, or count it if it is of no interest."""
        alone = isinstance(item, Layout)
        if self.goal.drops(bound_s, space):
            outcome = OUT_OF_MEMORY if bound_s == math.inf else space.levels[level]
            self.account.settled(outcome, 1 if alone else item.size)
            return
        while len(self._heaps) <= level:
            self._heaps.append([])
        simple = complexity(item) if alone else ()
        entry = QueueEntry(bound_s, simple, next(self._numbers), level, item, space)
        heapq.heappush(self._heaps[level], entry)

    def _next_level(self) -> int | None:
        """Return the level of the lowest entry that may get another bound; None if none may."""
        lowest = self.lowest()
        if lowest is None or self.goal.over(lowest.bound_s):
            return None
        self.goal.lowest(lowest)
        for entry in sorted(heap[0] for heap in self._heaps if heap):
            if entry.space.may(entry.level):
                return None if self.goal.over(entry.bound_s) else entry.level
        return None

    def lowest(self) -> QueueEntry | None:
        """Return the entry with the lowest bound; layouts that are unwanted are left out."""
        while True:
            entry = min((heap[0] for heap in self._heaps if heap), default=None)
            lost = None if entry is None else self._unwanted(entry)
            if entry is None or lost is None:
                return entry
            self._lose(lost, heapq.heappop(self._heaps[entry.level]))

    def _unwanted(self, entry: QueueEntry) -> Lost | None:
        """Return why an entry is not looked at; nobody asks a second time."""
        if entry.number in self._wanted or not isinstance(entry.item, Layout):
            return None
        lost = entry.space.unwanted(entry.level, entry.item)
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
            if not self.goal.wants(entry):
                self.account.settled(space.levels[level], entry.size)
            elif (lost := self._unwanted(entry)) is not None:
                self._lose(lost, entry)
            else:
                some.append(entry)
        if not some:
            return
        for one in space.advance(level, some):
            if one is None:
                lost = self.goal.complete(some[0])
                if lost is not None:
                    self._lose(lost, some[0])
            elif isinstance(one, Lost):
                self._lose(one, some[0])
            else:
                self._push(one[0], one[1], one[2], space)

    def _lose(self, lost: Lost, entry: QueueEntry) -> None:
        if lost.outcome == REFUSED:
            self._count_refused(Counter([lost.reason]))
            return
        self.account.settled(lost.outcome, entry.size)
        if lost.reason:
            self.misses.append(lost.reason)

    def rest(self) -> Iterator[QueueEntry]:
        """Yield what is left, the lowest first."""
        return heapq.merge(*map(sorted, self._heaps))
