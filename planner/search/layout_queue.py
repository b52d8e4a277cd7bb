"""Best-first search: best bound first, a dearer bound only where a cheaper one does not decide.

Layouts wait in groups (families of a chain's layouts, bundles of others), ordered by the highest
lower bound that is known of each.  The first of the queue gets its next bound and goes back to its
place; a group whose bounds are all known makes place for its parts or its layouts, and a layout
that is first again with all of its bounds has its partition problem solved.  When the first is not
below the best objective found, no layout that is left is either, and the search ends with a proof.
So no problem is solved whose bounds exceed the optimum, and no dear bound is worked out where a
cheap one exceeds it.

Spaces are gone through in turn; what one found is what the next has to beat, and one account counts
all of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from planner.costs.layout_costs import LayoutCosts
from planner.documents.plan import Layout
from planner.documents.tolerances import EQUAL
from planner.search.answer import Progress
from planner.search.certificate import (
    CHOSEN,
    DOMINATED,
    NO_FASTER,
    OUT_OF_MEMORY,
    REFUSED,
    RUNNERS_UP,
    SLOWER,
    UNFINISHED,
    Account,
)
from planner.search.ranked import Ranked
from planner.search.space import complexity, kind
from planner.solver.instance import Fathomed, Infeasible, Unfinished

ALIKE = 2
"""Finalists of one schedule with so many stages a rank."""


class Proven(Protocol):
    """A split of a layout's stages."""

    @property
    def optimal(self) -> bool:
        """Whether no other split of its layout takes less."""


S = TypeVar("S", bound=Proven)


@dataclass(frozen=True, slots=True)
class Found(Generic[S]):
    """A layout's best split; `lower_bound_s` is below its objective if that is not proven."""

    objective_s: float
    lower_bound_s: float
    layout: Layout
    split: S

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


class Group(Protocol):
    """Layouts that wait as one."""

    @property
    def first(self) -> Layout:
        """The simplest."""

    @property
    def complexity(self) -> tuple[int, ...]:
        """That of the simplest."""

    @property
    def size(self) -> int:
        """How many there are."""

    def layouts(self) -> Iterable[Layout]:
        """Yield all of them."""

    def corners(self) -> Iterable[Layout]:
        """Yield those among which is the one that holds least on a stage."""


Item = Layout | Any
"""A layout, or a `Group`."""
Bound = Callable[[Layout], float | Lost]
"""Least seconds of a layout, inf if it does not fit; or why it need not be looked at."""
Opened = Iterable[tuple[float, int, Item]]
"""What takes the place of a group, each with a bound and the index of the last that is known."""
Ahead = Callable[[int, int], list[Any]]
"""Take groups that come next of those whose bound of some index was the last: at most so many."""


class Space(Protocol[S]):
    """Layouts, and their best splits."""

    @property
    def keeps_ties(self) -> bool:
        """Whether layouts that tie, or are the best of their kind, are wanted as finalists too."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, the cheapest first, and what falls to each."""

    def costs_of(self, layout: Layout) -> Sequence[LayoutCosts]:
        """Return the costs of a layout on each kind of device."""

    def bundles(self, refused: Counter[str]) -> Iterable[tuple[float, Any]]:
        """Yield every layout that keeps what the user fixed, in groups with their first bounds.

        Why layouts cannot run is counted.  Some of a group may be refused still.
        """

    def opened(self, group: Any, known: int, ahead: Ahead) -> Opened:
        """Return what takes the place of a group."""

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""

    def repeats(self, layout: Layout) -> bool:
        """Whether another layout of the space does the same."""

    def solve(self, layout: Layout, cutoff_s: float, /) -> Found[S] | Lost:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""

    def fits(self, layout: Layout) -> bool:
        """Whether a layout has a split that fits."""

    def ranked(self, found: Found[S], /) -> Ranked:
        """Return the plan of a split and its prediction."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Layouts that wait as one, and the simplest of them."""

    first: Layout
    size: int
    layouts: Callable[[], Iterable[Layout]]
    better_s: Callable[[], float] | None = None
    """A dearer bound on them all, worked out before they are told apart; inf if none fits."""

    @property
    def complexity(self) -> tuple[int, ...]:
        """That of the simplest."""
        return complexity(self.first)

    def corners(self) -> Iterable[Layout]:
        """Yield the layouts that divide states among the most ranks, for each ZeRO level."""
        widest: dict[int, Layout] = {}
        for layout in self.layouts():
            if layout.data_shard > widest.setdefault(layout.zero, layout).data_shard:
                widest[layout.zero] = layout
        return widest.values()


class Bundles:
    """How a space opens bundles, and what it says of layouts if it has nothing of its own."""

    keeps_ties = True

    def opened(self, bundle: Any, known: int, _: Ahead) -> Opened:
        """Yield a bundle with its dearer bound, or else a group's layouts."""
        if isinstance(bundle, Bundle) and bundle.better_s is not None:
            yield bundle.better_s(), known, replace(bundle, better_s=None)
            return
        for layout in bundle.layouts():
            yield 0.0, known, layout

    def repeats(self, _: Layout) -> bool:
        """Whether another layout of the space does the same."""
        return False

    def solve(self, layout: Layout, cutoff_s: float, /) -> Found[Any] | Lost:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""
        raise NotImplementedError

    def fits(self, layout: Layout) -> bool:
        """Whether a layout has a split that fits."""
        return isinstance(self.solve(layout, math.inf), Found)


class _Entry(NamedTuple):
    """What waits; complexity tells those of one bound apart."""

    bound_s: float
    complexity: tuple[int, ...]
    known: int
    """Index of its last bound that is worked out."""
    item: Item
    asked: bool = False
    """Whether a layout is known to be one that can run, and that no other stands for."""

    @property
    def layout(self) -> Layout:
        """The layout, or the simplest one."""
        return _first(self.item)

    @property
    def size(self) -> int:
        return 1 if isinstance(self.item, Layout) else self.item.size


def _first(item: Item) -> Layout:
    return item if isinstance(item, Layout) else item.first


def _complexity(item: Item) -> tuple[int, ...]:
    return complexity(item) if isinstance(item, Layout) else item.complexity


class _Line(Generic[S]):
    """What waits of one space, and what was found in it."""

    def __init__(self, space: Space[S], refused: Counter[str]) -> None:
        self.space = space
        self.bounds = space.bounds
        self.every = list(space.bundles(refused))
        bounds_s = enumerate(bound_s for bound_s, _ in self.every)
        self._waiting = sorted(((bound_s, index) for index, bound_s in bounds_s), reverse=True)
        """Groups of which only the first bound is known, with their index; the lowest is last."""
        self._entries: list[_Entry] = []
        self._coming: dict[int, list[tuple[float, int, Any]]] = {}
        """Of the queue, groups by their last known bound; the id tells equals apart."""
        self.found: list[Found[S]] = []

    @property
    def passed(self) -> int:
        """How many groups have left the first bound behind."""
        return len(self.every) - len(self._waiting)

    def push(self, bound_s: float, known: int, item: Item, asked: bool = False) -> None:
        """Put an item in its place."""
        heapq.heappush(self._entries, _Entry(bound_s, _complexity(item), known, item, asked))
        if not isinstance(item, Layout):
            heapq.heappush(self._coming.setdefault(known, []), (bound_s, id(item), item))

    def back(self, entry: _Entry) -> None:
        """Put back what was taken."""
        heapq.heappush(self._entries, entry)

    def next(self) -> _Entry | None:
        """Take the entry with the lowest bound, the simplest of equals."""
        while self._waiting:
            bound_s, index = self._waiting[-1]
            if self._entries and self._entries[0].bound_s < bound_s:
                break
            self._waiting.pop()
            self.push(bound_s, 0, self.every[index][1])
        return heapq.heappop(self._entries) if self._entries else None

    def ahead(self, known: int, most: int) -> list[Any]:
        """Take groups that come next, of those whose bound `known` was the last."""
        coming = self._coming.get(known, [])
        some = [heapq.heappop(coming)[-1] for _ in range(min(most, len(coming)))]
        waiting = self._waiting[: -most - 1 : -1] if not known else []
        return some + [self.every[index][1] for _, index in waiting]

    def unwanted(self, entry: _Entry) -> Lost | None:
        """Return why a layout is not looked at, which is asked when its turn comes."""
        if entry.asked or not isinstance(entry.item, Layout):
            return None
        reason = self.space.refusal(entry.item)
        if reason is not None:
            return Lost(REFUSED, reason=reason)
        return Lost(DOMINATED) if self.space.repeats(entry.item) else None

    def deeper(self, entry: _Entry) -> Iterable[tuple[float, int, Item, bool] | Lost] | None:
        """Return what takes the place of an entry; None if all of its bounds are known.

        A bound of inf says that it does not fit.
        """
        if not isinstance(entry.item, Layout):
            return self._opened(entry)
        lost = self.unwanted(entry)
        if lost is not None:
            return (lost,)
        if entry.known + 1 == len(self.bounds):
            return None
        better_s = self.bounds[entry.known + 1][1](entry.item)
        if isinstance(better_s, Lost):
            return (better_s,)
        return ((max(entry.bound_s, better_s), entry.known + 1, entry.item, True),)

    def _opened(self, entry: _Entry) -> Iterable[tuple[float, int, Item, bool]]:
        for better_s, known, item in self.space.opened(entry.item, entry.known, self.ahead):
            yield max(entry.bound_s, better_s), known, item, False

    def rest(self) -> tuple[list[_Entry], list[_Entry], int]:
        """Return what is left: the first few, the others of the queue, layouts that never came.

        All of it stays.
        """
        first: list[_Entry] = []
        unwanted: list[_Entry] = []
        while len(first) < RUNNERS_UP and (entry := self.next()) is not None:
            (unwanted if self.unwanted(entry) else first).append(entry)
        others = [*unwanted, *self._entries]
        for entry in (*first, *unwanted):
            self.back(entry)
        return first, others, sum(self.every[index][1].size for _, index in self._waiting)

    def near(self, limit_s: float, most: int) -> list[Found[S]]:
        """Take splits within the limit: those found, and of up to `most` layouts that are left.

        Of a schedule with so many stages a rank there are `ALIKE`, those with the least bounds:
        where the closed form is too low for some layouts of it, it is so for the others.  The
        account has nothing of it.
        """
        found = [one for one in self.found if one.objective_s <= limit_s]
        known = Counter(_timetable(one.layout) for one in found)
        while most > 0 and (entry := self.next()) is not None and entry.bound_s <= limit_s:
            deeper = self.deeper(entry)
            if deeper is not None:
                for one in deeper:
                    if not isinstance(one, Lost):
                        self.push(*one)
                continue
            if known[_timetable(entry.layout)] >= ALIKE:
                continue
            known[_timetable(entry.layout)] += 1
            most -= 1
            answer = self.space.solve(entry.layout, limit_s)
            if isinstance(answer, Found) and answer.objective_s <= limit_s:
                found.append(answer)
        return found


class Queue:
    """What was found in some spaces, and what became of all that they hold."""

    def __init__(
        self,
        account: Account,
        *,
        top: int = 1,
        below_s: float = math.inf,
        progress: Progress | None = None,
    ) -> None:
        """The best of `top` kinds of layouts are looked for, all below `below_s`."""
        self.account = account
        self.solved = 0
        self.refused: Counter[str] = Counter()
        """Reasons why the backend runs no plan of a layout, and of how many layouts."""
        self.misses: list[str] = []
        """Why layouts were seen not to fit, where somebody said."""
        self._top = top
        self._below_s = below_s
        self._progress = progress
        self._lines: list[_Line[Any]] = []
        self._best: dict[tuple[int, ...], Found[Any]] = {}
        self._homes: dict[int, Space[Any]] = {}
        """By the id of what was found, where."""

    @property
    def spaces(self) -> list[Space[Any]]:
        """Those that were gone through."""
        return [line.space for line in self._lines]

    def home(self, found: Found[Any]) -> Space[Any]:
        """Return the space that a layout was found in."""
        return self._homes[id(found)]

    def run(self, space: Space[Any]) -> None:
        """Look at all layouts of a space, as far as needed."""
        refused: Counter[str] = Counter()
        line = _Line(space, refused)
        self._lines.append(line)
        self._count_refused(refused)
        while (entry := line.next()) is not None:
            if self._settled(entry.bound_s):
                line.back(entry)
                break
            self._advance(line, entry)
            if self._progress is not None:
                self._progress(line.passed, len(line.every))
        first, others, never = line.rest()
        for entry in first:
            self._outbounded(line, entry)
        for entry in others:
            self.account.settled(line.bounds[entry.known][0], entry.size)
        if never:
            self.account.settled(line.bounds[0][0], never)

    def _count_refused(self, refused: Counter[str]) -> None:
        self.refused += refused
        for reason, count in refused.items():
            self.account.refused(reason, count)

    def _settled(self, bound_s: float) -> bool:
        """Whether no layout with at least this bound can be among the best."""
        last = self._last()
        return bound_s >= self._below_s or (
            last is not None and bound_s > last.objective_s * (1 + EQUAL)
        )

    def _advance(self, line: _Line[Any], entry: _Entry) -> None:
        """Bring one entry a step further: a better bound, its parts, or its solution."""
        rival = self._rival(line.space, entry.layout)
        if rival is not None and not may_beat(entry.bound_s, entry.complexity, rival):
            self._outbounded(line, entry)
        elif (deeper := line.deeper(entry)) is None:
            self._try(line, entry, rival)
        else:
            for one in deeper:
                if isinstance(one, Lost):
                    self._lose(one, entry)
                elif math.isinf(one[0]):
                    size = 1 if isinstance(one[2], Layout) else one[2].size
                    self.account.counts[OUT_OF_MEMORY] += size
                else:
                    line.push(*one)

    def _try(self, line: _Line[Any], entry: _Entry, rival: Found[Any] | None) -> None:
        """Solve the problem of a layout whose bounds do not decide; it has to beat its rival."""
        cutoff_s = self._below_s
        if rival is not None:
            ties = line.space.keeps_ties or entry.complexity < complexity(rival.layout)
            hair = EQUAL if ties else -EQUAL
            cutoff_s = min(cutoff_s, rival.objective_s * (1 + hair))
        self.solved += 1
        answer = line.space.solve(entry.layout, cutoff_s)
        if isinstance(answer, Lost):
            self._lose(answer, entry)
            return
        if not answer.split.optimal:
            # What its layout may still hide bounds the whole search.
            self.account.unfinished_s.append(max(answer.lower_bound_s, entry.bound_s))
        line.found.append(answer)
        self._homes[id(answer)] = line.space
        self._enter(answer)

    def _lose(self, lost: Lost, entry: _Entry) -> None:
        if lost.outcome == REFUSED:
            self._count_refused(Counter([lost.reason]))
            return
        bound_s = None if lost.bound_s is None else max(lost.bound_s, entry.bound_s)
        self.account.lost(lost.outcome, entry.layout, bound_s=bound_s)
        if lost.reason:
            self.misses.append(lost.reason)

    def _enter(self, new: Found[Any]) -> None:
        """Let a split stand for its kind of layout if it is the best of it."""
        old = self._best.get(kind(new.layout))
        if new.objective_s < self._below_s and (old is None or wins(new, old)):
            self._best[kind(new.layout)] = new
            loser = old
        else:
            loser = new
        if loser is not None:
            self.account.lost(SLOWER, loser.layout, objective_s=loser.objective_s)

    def _outbounded(self, line: _Line[Any], entry: _Entry) -> None:
        outcome = line.bounds[entry.known][0]
        self.account.lost(
            outcome,
            entry.layout,
            bound_s=entry.bound_s,
            because=f"not solved, {outcome}",
            count=entry.size,
        )

    def _rival(self, space: Space[Any], layout: Layout) -> Found[Any] | None:
        """Return the best that a layout has to beat to be among the `top`, if any."""
        own, last = self._best.get(kind(layout)), self._last()
        if own is None or last is None or space.keeps_ties:
            return own or last
        return own if wins(own, last) else last

    def _last(self) -> Found[Any] | None:
        """Return the last of the `top` best, if there are so many."""
        ranking = sorted(self._best.values(), key=lambda found: found.rank)
        return ranking[self._top - 1] if len(ranking) >= self._top else None

    def ranking(self) -> list[Found[Any]]:
        """Return the best of each kind, fastest first; of equally fast ones the simplest leads.

        There are `top`; the others go to the account.
        """
        order = sorted(self._best.values(), key=lambda found: found.rank)
        if order:
            order.remove(first := fastest(order))
            order.insert(0, first)
            self.account.counts[CHOSEN] = 1
        for loser in order[1:]:
            self.account.lost(SLOWER, loser.layout, objective_s=loser.objective_s)
        return order[: self._top]

    def near(self, limit_s: float, most: int) -> list[tuple[Space[Any], Found[Any]]]:
        """Take splits within the limit, fastest first; see `_Line.near`."""
        found = [(line.space, one) for line in self._lines for one in line.near(limit_s, most)]
        return sorted(found, key=lambda one: one[1].rank)


def _timetable(layout: Layout) -> tuple[str, int, bool]:
    return layout.schedule, layout.virtual_stages, layout.pipeline > 1


def judged(
    answer: Any, layout: Layout, cutoff_s: float, step_s: float, known_s: float = 0.0
) -> Found[Any] | Lost:
    """Return what a solver's answer to a layout's problem below a cutoff says of the layout.

    `step_s` of its seconds are not in the problem; `known_s` is a bound that is known before.
    """
    if isinstance(answer, Infeasible):
        return Lost(OUT_OF_MEMORY, reason=answer.reason)
    if isinstance(answer, Fathomed | Unfinished):
        beaten = answer.lower_bound_s >= cutoff_s - step_s or known_s >= cutoff_s
        beaten = beaten and isinstance(answer, Fathomed)
        bound_s = max(known_s, answer.lower_bound_s + step_s)
        return Lost(NO_FASTER if beaten else UNFINISHED, bound_s=bound_s)
    split = getattr(answer, "split", answer)
    return Found(split.objective_s + step_s, split.lower_bound_s + step_s, layout, answer)


def fastest(found: Sequence[Found[Any]]) -> Found[Any]:
    """Return the simplest of those that are as fast as the fastest."""
    least_s = min(one.objective_s for one in found) * (1 + EQUAL)
    ties = [one for one in found if one.objective_s <= least_s]
    return min(ties, key=lambda one: complexity(one.layout))


def runnable(space: Space[Any]) -> Iterator[Layout]:
    """Yield every layout of a space that can run."""
    for _, group in space.bundles(Counter()):
        yield from (layout for layout in group.layouts() if space.refusal(layout) is None)


def may_beat(bound_s: float, simple: tuple[int, ...], rival: Found[Any]) -> bool:
    """Whether a layout with this bound and complexity can beat its rival, or tie and be simpler."""
    if bound_s < rival.objective_s * (1 - EQUAL):
        return True
    return bound_s <= rival.objective_s * (1 + EQUAL) and simple < complexity(rival.layout)


def wins(new: Found[Any], old: Found[Any]) -> bool:
    """Faster wins; of equally fast ones the simpler, whatever the order they came in."""
    if abs(new.objective_s - old.objective_s) <= EQUAL * old.objective_s:
        return complexity(new.layout) < complexity(old.layout)
    return new.objective_s < old.objective_s
