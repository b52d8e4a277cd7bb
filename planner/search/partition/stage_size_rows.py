"""Required stage sizes, as numbers of layers of ranks that have several stages each.

With P ranks of V stages a split is a number of like layers for each rank
(planner.search.partition.stage_counts), which says where every stage begins.  A requirement is met
by some of these vectors: a box of them (the fewest and the most layers of each rank) keeps it,
breaks it, or is halved.  Stage s begins within

    [max(Σ least sizes before s, L - Σ most sizes from s on), the same with least and most swapped]

of L layers, so a box is decided by the stages that each layer may lie on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.planner.search.partition.stage_counts import Shares, shares_of

if TYPE_CHECKING:
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.frameworks.stage_rules import Rows
    from meshwright.planner.solver.requirements import Requirement
    from meshwright.planner.solver.side_constraints import SideConstraint

MOST_ROWS = 200
"""Boxes of one layout; each is a partition problem of its own."""

Box = tuple[tuple[int, int], ...]
"""[rank] The fewest and the most like layers."""


def required_rows(model: ModelGraph, layout: Layout, require: Sequence[Requirement]) -> Rows | None:
    """Return how many entries ranks of several stages may hold by what is required of stages.

    None if no split keeps it, or they are more than MOST_ROWS.
    """
    shares = shares_of(model.chain_kinds, layout.schedule, layout.pipeline, layout.virtual_stages)
    numbers = range(len(model.chain))
    ties = [asked.tie(numbers, layout.stages) for asked in require]
    return None if shares is None else rows_of(shares, [tie for tie in ties if tie is not None])


def not_required(
    model: ModelGraph, layout: Layout, require: Sequence[Requirement], *, most: int = MOST_ROWS
) -> str | None:
    """Return why no plan of a layout with several stages a rank keeps what is required."""
    if any(asked.options for asked in require):
        return (
            "what layers take can be required with one stage on each rank; of several, the layers "
            "that store less come first"
        )
    rows = required_rows(model, layout, require)
    if rows is None or len(rows) > most:
        return "no numbers of layers on its ranks keep what is required, or too many do"
    return None


def is_within(sizes: Sequence[int], row: Sequence[tuple[int, int]]) -> bool:
    """Return whether each rank's number of layers lies within the row's limits."""
    return all(fewest <= size <= most for size, (fewest, most) in zip(sizes, row, strict=True))


def rows_of(shares: Shares, ties: Sequence[SideConstraint]) -> Rows | None:
    """Return the rows of entries [rank] that keep all ties, none of which speaks of options.

    None if no split does, or they are more than MOST_ROWS.
    """
    stages = _LayersOfStages(shares)
    rows = list(itertools.islice(stages.boxes_that_keep(stages.whole, ties), MOST_ROWS + 1))
    if not 0 < len(rows) <= MOST_ROWS:
        return None
    return tuple(
        tuple(
            (fewest + more, most + more)
            for (fewest, most), more in zip(box, stages.ends, strict=True)
        )
        for box in rows
    )


def intersect_rows(first: Rows | None, other: Rows | None) -> Rows | None:
    """Return the rows that two rules allow; None if there is none, empty if any will do."""
    if not (first and other):
        return None if first is None or other is None else first or other
    rows = (
        tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, theirs, strict=True))
        for mine, theirs in itertools.product(first, other)
    )
    return tuple(row for row in rows if all(fewest <= most for fewest, most in row)) or None


class _LayersOfStages:
    """Numbers of layers on stages, by the numbers of like layers on ranks."""

    def __init__(self, shares: Shares) -> None:
        run, self._home = shares.run, shares.home
        self._like = run.alike
        self._layers = run.before + run.alike + run.behind
        every = [shares.like(entry) for entry in range(len(shares.entries))]
        before, behind = every.index(True), every[::-1].index(True)
        first, last = self._home[0], self._home[-1]
        self.ends = [before * (r == first) + behind * (r == last) for r in range(shares.ranks)]
        """[rank] Entries that are no like layers."""
        fewest = [max(0, n - e) for n, e in zip(shares.fewest_entries, self.ends, strict=True)]
        most = run.alike - sum(fewest)
        self.whole: Box = tuple((lower_end, lower_end + most) for lower_end in fewest)
        beside = {0: run.before, len(self._home) - 1: run.behind}
        self._sizes: list[list[int]] = [[] for _ in self._home]
        """[stage][number of its rank beyond the least] Layers of all kinds."""
        for rank, (lower, upper) in enumerate(self.whole):
            lower_end = [stage for stage, home in enumerate(self._home) if home == rank]
            for number in range(lower, upper + 1):
                for stage, size in zip(lower_end, shares.sizes(rank, number), strict=True):
                    self._sizes[stage].append(size + beside.get(stage, 0))

    def boxes_that_keep(self, box: Box, ties: Sequence[SideConstraint]) -> Iterator[Box]:
        """Yield boxes of vectors that keep all ties, every such vector of a box in one of them."""
        lower, upper = (sum(sizes[at] for sizes in box) for at in (0, 1))
        if lower > self._like or upper < self._like:
            return
        box = tuple(
            (max(a, self._like - upper + b), min(b, self._like - lower + a)) for a, b in box
        )
        spans = [self._span(box, stage) for stage in range(len(self._home))]
        places = self._places(spans)
        answers = [_all_keep(tie, spans, places) for tie in ties]
        if False in answers:
            return
        open_ = [tie for tie, answer in zip(ties, answers, strict=True) if answer is None]
        if not open_:
            yield box
            return
        rank = self._decisive(open_[0], box, spans)
        (a, b), middle = box[rank], sum(box[rank]) // 2
        for part in ((a, middle), (middle + 1, b)):
            yield from self.boxes_that_keep((*box[:rank], part, *box[rank + 1 :]), open_)

    def _span(self, box: Box, stage: int) -> tuple[int, int]:
        """Return the fewest and the most layers of a stage."""
        lower = self.whole[self._home[stage]][0]
        a, b = box[self._home[stage]]
        sizes = self._sizes[stage][a - lower : b - lower + 1]
        return min(sizes), max(sizes)

    def _places(self, spans: Sequence[tuple[int, int]]) -> list[range]:
        """[layer] Stages on which it may lie."""
        fewest = [0, *itertools.accumulate(lower for lower, _ in spans)]
        most = [0, *itertools.accumulate(upper for _, upper in spans)]
        stages = range(len(spans))
        begin = [
            (
                max(lower, self._layers - most[-1] + upper),
                min(upper, self._layers - fewest[-1] + lower),
            )
            for lower, upper in zip(fewest, most, strict=True)
        ]
        rows = []
        for layer in range(self._layers):
            first = next(s for s in stages if begin[s + 1][1] > layer)
            last = next(s for s in reversed(stages) if begin[s][0] <= layer)
            rows.append(range(first, last + 1))
        return rows

    def _decisive(self, tie: SideConstraint, box: Box, spans: Sequence[tuple[int, int]]) -> int:
        """Return the rank to halve: of the stages that tell most of the tie, the least sure one."""
        count = len(spans)
        named = [stage for stage in tie.stages or range(count) if stage < count]
        some = named
        if tie.at_most is None:
            front, back = range(max(named) + 1), range(min(named), count)
            some = list(back if len(back) < len(front) else front)
        wide = [s for s in some if box[self._home[s]][0] < box[self._home[s]][1]]
        wide = wide or [s for s in range(count) if box[self._home[s]][0] < box[self._home[s]][1]]
        return self._home[max(wide, key=lambda s: spans[s][1] - spans[s][0])]


def _all_keep(
    tie: SideConstraint, spans: Sequence[tuple[int, int]], places: Sequence[range]
) -> bool | None:
    """Return True if all splits keep a tie, False if none does, None if some may."""
    if tie.at_most is not None:
        tied = [span for s, span in enumerate(spans) if not tie.stages or s in tie.stages]
        if any(lower > tie.at_most for lower, _ in tied):
            return False
        return True if all(upper <= tie.at_most for _, upper in tied) else None
    there = [places[layer] for layer in tie.layers]
    if tie.together:
        common = range(max(stages.start for stages in there), min(stages.stop for stages in there))
        return False if not common else True if {*map(len, there)} == {1} else None
    if any(not set(stages) & set(tie.stages) for stages in there):
        return False
    return True if all(set(stages) <= set(tie.stages) for stages in there) else None
