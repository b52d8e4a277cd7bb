"""The fastest options of a stage whose bytes are no sum over its layers.

Sums bound them from below (planner.solver.partition_problem, `used_bytes`), so the fastest options
by the sums take no longer than the fastest that fit.  If those fit too they are the fastest.  If
not, and if any may fit, all that take longer are gone through, the fastest first.  That ends after
many, or much work: then a knapsack with fewer bytes finds some that fit, and what is not known the
answer says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SLACK
from meshwright.planner.solver.knapsack import Choice, Fastest, Knapsacks
from meshwright.planner.solver.split import content_of, laid_out

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]
Used = Callable[[Sequence[int]], float]
"""Bytes of a stage with some options of its layers, in their order."""
UsedByMany = Callable[[Indices], Floats]
"""[choice] The same of many choices, up to rounding; options are [choice, layer].

With ANY_OPTION a layer has no more bytes than with any of its options.
"""
ANY_OPTION = -1

_TOGETHER = 16, 2048
"""Choices whose bytes are counted together, at first and at most."""
_LARGEST_SUM = 2**62
"""Whole numbers up to this are added exactly."""
_STEPS = 24
"""Knapsacks with fewer bytes that are tried."""
_TRIED = 3000
"""Choices of one stage that are looked at."""
_VISITED = 60_000
"""Parts of choices of one stage that are looked at: where layers of many kinds have options, most
parts lead nowhere."""
_VISITED_IN_ALL = 120_000
"""The same of all stages of one problem."""


def fastest_checked(
    knapsacks: Knapsacks,
    stage: int,
    kinds: Sequence[int],
    used: Used,
    *,
    used_by_many: UsedByMany | None = None,
    fewest_bytes: Callable[[], float] | None = None,
    sync_limit_s: float = math.inf,
    limit_s: float = math.inf,
) -> Fastest | None:
    """Return the fastest options with which `stage` has layers of these kinds, in their order.

    None if none fit that take no longer than `limit_s`, unscaled.  Choices that hold too much by
    `used_by_many` are not asked of `used`.  `fewest_bytes` tells how many bytes any options take at
    least.
    """
    search = _CheckedStage(knapsacks, stage, kinds, used, used_by_many, sync_limit_s)
    lowest = search.by_sums(0.0)
    if lowest is None:
        return None
    fastest = search.laid(lowest)
    if search.fits(fastest):
        return fastest
    if fewest_bytes is not None and fewest_bytes() > search.most_bytes:
        return None
    at_least_s = lowest.time_s
    try:
        for tried, (time_s, choice) in enumerate(search.between(at_least_s, limit_s)):
            if choice is not None and search.fits(choice):
                return choice
            at_least_s = time_s
            if tried == _TRIED:
                break
        else:
            return None
    except _TooManyError as stopped:
        at_least_s = max(at_least_s, stopped.least_s)
    best = search.some_that_fit(lowest) or replace(search.laid(lowest), time_s=math.inf)
    return replace(best, at_least_s=at_least_s * (1 - ROUNDING))


class _TooManyError(Exception):
    """The search has reached its limit; nothing that takes less than `least_s` fits."""

    def __init__(self, least_s: float = 0.0) -> None:
        super().__init__()
        self.least_s = least_s


class _EnoughError(Exception):
    """No more is to be looked at."""


class _CheckedStage:
    """One stage with some layers."""

    def __init__(
        self,
        knapsacks: Knapsacks,
        stage: int,
        kinds: Sequence[int],
        used: Used,
        used_by_many: UsedByMany | None,
        sync_limit_s: float,
    ) -> None:
        self._knapsacks, self._instance = knapsacks, knapsacks.instance
        self._stage, self._kinds = stage, kinds
        self._used, self._used_by_many = used, used_by_many
        self._sync_limit_s = sync_limit_s
        self._content = content_of(kinds)
        count_of = dict(self._content)
        self._alone = np.array([count_of[kind] == 1 for kind in kinds])
        """[layer] True of the only layer of its kind (embeddings, norms, heads)."""
        self._digits = self._digits_of(kinds, count_of)
        """[layer, option] Numbers whose sums tell choices of the other layers apart, if they are
        small enough; options of a kind's layers are in one order."""
        self._visited = 0

    def _digits_of(self, kinds: Sequence[int], count_of: dict[int, int]) -> Indices | None:
        """[layer, option] Return digits of how many layers of a kind have an option.

        They are in base count + 1, those of each kind above those before it; 0 of single layers.
        """
        tables = self._instance.kinds
        most = max(len(tables[kind]) for kind in count_of)
        digits: dict[int, list[int]] = {}
        radix = 1
        for kind, count in count_of.items():
            base, number = count + 1, len(tables[kind])
            counts = count > 1
            digits[kind] = [counts * radix * base ** min(at, number) for at in range(most)]
            radix *= base**number if counts else 1
        if radix >= _LARGEST_SUM:
            return None
        return np.array([digits[kind] for kind in kinds])

    def by_sums(self, spare_bytes: float) -> Choice | None:
        """Return the fastest options by sums, with `spare_bytes` to spare."""
        return self._knapsacks.fastest_choice(
            self._content, self._stage, sync_limit_s=self._sync_limit_s, spare_bytes=spare_bytes
        )

    def laid(self, choice: Choice) -> Fastest:
        """Lay options out over the layers."""
        options = laid_out(self._kinds, self._content, choice.options)
        return Fastest(choice.time_s, choice.sync_s, tuple(options), choice.time_s)

    def fits(self, fastest: Fastest) -> bool:
        """Return whether the stage has enough bytes for these options."""
        capacity_bytes = self._instance.stages[self._stage].capacity_bytes
        return self._used(fastest.options) <= capacity_bytes + ROUNDING * abs(capacity_bytes)

    @property
    def most_bytes(self) -> float:
        """Bytes above which nothing fits, even where they are counted only up to rounding."""
        capacity_bytes = self._instance.stages[self._stage].capacity_bytes
        return capacity_bytes + SLACK * abs(capacity_bytes)

    def _may_fit(self, options: Indices) -> Iterator[bool]:
        """Yield for each choice, its options laid out, whether it may fit."""
        if self._used_by_many is None:
            yield from itertools.repeat(True, len(options))
            return
        may_fit = self._not_excluded(self._used_by_many, options)
        counted, (count, most) = 0, _TOGETHER
        for at in range(len(options)):
            if at >= counted and may_fit[at]:
                some = at + np.flatnonzero(may_fit[at:])[:count]
                may_fit[some] = self._used_by_many(options[some]) <= self.most_bytes
                counted, count = int(some[-1]) + 1, min(most, 8 * count)
            yield bool(may_fit[at])

    def _not_excluded(self, used_by_many: UsedByMany, options: Indices) -> Booleans:
        """[choice] Return False of those that fit with no options of layers alone of their kind.

        They are many, and as a rule none of them fits: that is told at once, by the fewest bytes of
        these layers.
        """
        if self._digits is None or len(options) == 1:
            return np.ones(len(options), dtype=bool)
        sums = self._digits[np.arange(options.shape[1]), options].sum(axis=1)
        _, first, way_of = np.unique(sums, return_index=True, return_inverse=True)
        ways = np.where(self._alone, ANY_OPTION, options[first])
        fit: Booleans = used_by_many(ways) <= self.most_bytes
        return fit[way_of]

    def some_that_fit(self, lowest: Choice) -> Fastest | None:
        """Return options that fit, near to the fastest that do; None if none were met."""
        capacity_bytes = self._instance.stages[self._stage].capacity_bytes
        spare_bytes, choice = 0.0, lowest
        for _ in range(_STEPS):
            stage = self.laid(choice)
            if self.fits(stage):
                return stage
            spare_bytes += self._used(stage.options) - capacity_bytes
            better = self.by_sums(spare_bytes)
            if better is None:
                return None
            if better.options == choice.options:
                spare_bytes *= 1.5
            choice = better
        return None

    def between(self, least_s: float, most_s: float) -> Iterator[tuple[float, Fastest | None]]:
        """Yield the seconds of all choices from `least_s` to `most_s`, and those that may fit.

        What does not fit by sums is left out.  The fastest come first.  What is looked for is often
        near the least, so windows of seconds grow from there.
        """
        slowest_s = sum(
            count * max(option.time_s for option in self._instance.kinds[kind])
            for kind, count in self._content
        )
        end_s = min(most_s, slowest_s) * (1 + ROUNDING)
        low_s, width_s = least_s * (1 - ROUNDING), 1e-3 * slowest_s
        while low_s < end_s:
            high_s = min(low_s + width_s, end_s)
            try:
                every = self._choices(low_s, high_s)
            except _TooManyError:
                raise _TooManyError(low_s) from None
            if len(every) > _TRIED and width_s > ROUNDING * slowest_s:
                width_s /= 8
                continue
            yield from self._in_turn(every)
            low_s, width_s = high_s, 2 * width_s

    def _in_turn(self, every: list[list[int]]) -> Iterator[tuple[float, Fastest | None]]:
        """Yield the seconds of each choice, the fastest first, and the choice if it may fit."""
        if not every:
            return
        # They come in falling order; of those equally fast the least comes first.
        options, kinds = (
            np.array(every[::-1]),
            [kind for kind, n in self._content for _ in range(n)],
        )
        table = self._knapsacks.options
        time_s, sync_s = (
            np.cumsum(figures[kinds, options], axis=1)[:, -1]
            for figures in (table.time_s, table.sync_s)
        )
        order = np.argsort(time_s, kind="stable")
        order = order[sync_s[order] <= self._sync_limit_s]
        left = {
            kind: [at for at, other in enumerate(kinds) if other == kind] for kind in set(kinds)
        }
        laid = options[order][:, [left[kind].pop() for kind in self._kinds]]
        entries = zip(time_s[order].tolist(), sync_s[order].tolist(), laid, strict=True)
        for (seconds, sync, other), may_fit in zip(entries, self._may_fit(laid), strict=True):
            fastest = Fastest(seconds, sync, tuple(other.tolist()), seconds) if may_fit else None
            yield seconds, fastest

    def _choices(self, low_s: float, high_s: float) -> list[list[int]]:
        """Return the choices that may fit and take `low_s` or longer, below `high_s`.

        _TooManyError if too much was looked at.
        """
        stage = self._instance.stages[self._stage]
        tables = [self._instance.kinds[kind] for kind, _ in self._content]
        floor = max(min(o.transient_bytes for o in table) for table in tables)
        room_bytes = stage.room_bytes - floor
        options = [
            _Kind(count, [(o.time_s, stage.summed_bytes(o)) for o in table])
            for (_, count), table in zip(self._content, tables, strict=True)
        ]
        most = min(_VISITED - self._visited, _VISITED_IN_ALL - self._knapsacks.visited)
        entries, visits = _all_taken(options, low_s, high_s, room_bytes, most)
        self._visited += visits
        self._knapsacks.visited += visits
        if visits > most:
            raise _TooManyError
        return entries


class _Kind:
    """Layers of one kind, and the (seconds, bytes) of each option."""

    def __init__(self, count: int, options: list[tuple[float, float]]) -> None:
        self.count = count
        self.options = options
        # Of the options from the k-th on.
        self.least_s = _backwards(min, [seconds for seconds, _ in options])
        self.most_s = _backwards(max, [seconds for seconds, _ in options])
        self.least_bytes = _backwards(min, [size for _, size in options])
        # [option] The same of those behind it.
        self.behind = list(zip(self.least_s, self.most_s, self.least_bytes, strict=True))[1:]


def _backwards(pick: Callable[[float, float], float], values: list[float]) -> list[float]:
    return list(itertools.accumulate(reversed(values), pick))[::-1]


def _all_taken(
    kinds: list[_Kind], low_s: float, high_s: float, room_bytes: float, most_visits: int
) -> tuple[list[list[int]], int]:
    """Return the rising options of each kind's layers, in all ways within seconds and bytes.

    Lists of options come in falling order, no more than one above `_TRIED`; beside them how many
    parts were looked at, one more than `most_visits` if those were not enough.
    """
    beyond = [(0.0, 0.0, 0.0)]
    for kind in reversed(kinds):
        least_s, most_s, least_bytes = beyond[-1]
        count = kind.count
        beyond.append(
            (
                least_s + count * kind.least_s[0],
                most_s + count * kind.most_s[0],
                least_bytes + count * kind.least_bytes[0],
            )
        )
    beyond.reverse()
    steps = [
        [
            (option, behind, rest)
            for option, behind in zip(kind.options, [*kind.behind, None], strict=True)
        ]
        for kind, rest in zip(kinds, beyond[1:], strict=True)
    ]
    counts, end = [*(kind.count for kind in kinds), 0], len(kinds)
    groups: list[list[int]] = []
    visits = 0

    def walk(
        at: int, option: int, left: int, seconds: float, used: float, taken: list[int]
    ) -> None:
        nonlocal visits
        visits += 1
        if visits > most_visits:
            raise _EnoughError
        if at == end:
            if low_s <= seconds < high_s:
                groups.append(taken)
                if len(groups) > _TRIED:
                    raise _EnoughError
            return
        (each_s, each_bytes), behind, (least_s, most_s, least_bytes) = steps[at][option]
        for number in range(left if behind is None else 0, left + 1):
            rest, after_s = left - number, seconds + number * each_s
            after_bytes = used + number * each_bytes
            lower_s, upper_s, lean = after_s + least_s, after_s + most_s, after_bytes + least_bytes
            if rest and behind is not None:
                lower_s += rest * behind[0]
                upper_s += rest * behind[1]
                lean += rest * behind[2]
            if lower_s >= high_s or upper_s < low_s or lean > room_bytes:
                continue
            chosen = taken + [option] * number
            if rest:
                walk(at, option + 1, rest, after_s, after_bytes, chosen)
            else:
                walk(at + 1, 0, counts[at + 1], after_s, after_bytes, chosen)

    with suppress(_EnoughError):
        walk(0, 0, kinds[0].count, 0.0, 0.0, [])
    return groups, visits
