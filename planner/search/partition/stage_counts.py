"""Contents of a pipeline rank with several stages: shares of a chain, as counts.

Where ranks have V stages each, the layers of a rank are not consecutive, so a rank is described by
how many layers of the chain's longest run of like layers it has.  The space of splits:

    the layers before that run lie on the first stage, those behind it on the last;
    of the n like layers on a rank, its stage c, in the order of the model, has ⌊(n + c) / V⌋;
    a rank with the last stage and not the first has ⌊(a + c) / V⌋ in each of its stages but the
    last, which has the rest; a is what each other rank has, ⌈(N - n) / (P - 1)⌉ of all N, the
    layers before the run for one more, or ⌊(n + c) / (V - 1)⌋ where that is less; no stage is
    empty.

The first stage may hold the layers before the run alone, the last one those behind it: 126 like
layers between an embedding and a head fill 128 stages (Llama 3, arXiv:2407.21783, section 3.3.2).
With a block less at either end of 6 equal stages, two ranks have 6, 7, 7, 7, 7, 6 of 40 blocks
(Megatron-LM, account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split).
So the stages of a rank are equal up to one layer, and of every rank the same stages are the longer
ones; the rank that also has the head of the model is relieved where the head is.  On a rank the
layers that store less come first, since early stages have the most micro-batches in flight.

A split is thus a number for each rank, and those are found as the cuts of a chain in the order of
ranks (`Shares.entries`): the run, with the layers that have their place at the end where it is.
Where the first and the last stage lie on one rank, their layers are one entry of that chain, whose
options are all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.planner.schedules.schedule import rank_of_stage

if TYPE_CHECKING:
    from meshwright.planner.documents.model import ModelGraph

MOST_AT_AN_END = 4
"""Layers before or behind the run of like layers; with more the chain is not one of like layers."""
MOST_COMBINED = 2
"""Layers that may be combined into one entry."""


@dataclass(frozen=True, slots=True)
class LongestRun:
    """The longest run of like layers of a chain: how many, with what on either side."""

    before: int
    alike: int
    behind: int

    @property
    def most_stages(self) -> int:
        """Most stages that its layers fill: the first and the last may hold what lies there alone.

        >>> LongestRun(1, 126, 1).most_stages
        128
        """
        return self.alike + (self.before > 0) + (self.behind > 0)


@lru_cache(maxsize=64)
def longest_run(kinds: tuple[str, ...]) -> LongestRun | None:
    """Return the longest run of like layers; None if too much lies beside it.

    >>> longest_run(("embedding", "block", "block", "block", "head"))
    LongestRun(before=1, alike=3, behind=1)
    """
    best = LongestRun(0, 0, len(kinds))
    first = 0
    for _, same in itertools.groupby(kinds):
        count = len(list(same))
        if count > best.alike:
            best = LongestRun(first, count, len(kinds) - first - count)
        first += count
    return best if max(best.before, best.behind) <= MOST_AT_AN_END else None


def run_of(model: ModelGraph) -> LongestRun | None:
    """Return the longest run of like layers of a model's chain."""
    return longest_run(model.chain_kinds)


def virtual_stages(run: LongestRun | None, ranks: int, *, most: int) -> list[int]:
    """Return the numbers of stages a rank that differ in the largest stage, from 2 to `most`.

    Of n like layers on an average rank the largest stage has ⌈n / V⌉; a V for which a smaller one
    does as well is left out.

    >>> virtual_stages(LongestRun(1, 32, 1), 4, most=8)
    [2, 3, 4, 8]
    >>> virtual_stages(LongestRun(1, 126, 1), 16, most=8)
    [2, 3, 4, 8]
    """
    result, smallest = [], 0
    for count in range(2, most + 1):
        if run is None or ranks < 2 or run.most_stages < ranks * count:
            break
        largest = -(-run.alike // (ranks * count))
        if not smallest or largest < smallest:
            result.append(count)
            smallest = largest
    return result


def largest_stage(run: LongestRun, ranks: int, virtual: int) -> float:
    """Return the share of an average rank's like layers that lie in its largest stage.

    >>> largest_stage(LongestRun(1, 32, 1), 4, 3)
    0.375
    """
    return min(1.0, -(-run.alike // (ranks * virtual)) * ranks / run.alike)


@lru_cache(maxsize=1 << 12)
def shares_of(
    kinds: tuple[str, ...], schedule: str, ranks: int, virtual_stages: int
) -> Shares | None:
    """Return how ranks share a chain, None if its layers are not alike enough."""
    run = longest_run(kinds)
    if run is None or run.most_stages < ranks * virtual_stages:
        return None
    home = rank_of_stage(schedule, stages=ranks * virtual_stages, virtual_stages=virtual_stages)
    if home[0] == home[-1] and run.before + run.behind > MOST_COMBINED:
        return None
    return Shares(run, virtual_stages, home)


class Shares:
    """A chain in the order of ranks, and what each of its entries stands for.

    `home` [stage] is the rank that has it; `entries` are positions in the model's chain, of like
    layers any; with fewer entries than `fewest_entries` [rank] a rank has an empty stage.
    """

    def __init__(self, run: LongestRun, virtual_stages: int, home: tuple[int, ...]) -> None:
        self.run = run
        self.virtual_stages = virtual_stages
        self.home = home
        self.ranks = len(home) // virtual_stages
        self.folded = home[0] == home[-1]
        ends = [(at,) for at in range(run.before)]
        last = [(run.before + run.alike + at,) for at in range(run.behind)]
        like = [(run.before + at,) for at in range(run.alike)]
        self.entries: list[tuple[int, ...]] = [*ends, *like, *last]
        if self.folded:
            combined = tuple(at for entry in ends + last for at in entry)
            self.entries = [combined, *like] if combined else [*like]
        self.fewest_entries = [self._fewest_entries(rank) for rank in range(self.ranks)]
        self._are_like = [0 <= entry[0] - run.before < run.alike for entry in self.entries]
        self._known_seats: dict[tuple[int, range], dict[int, list[tuple[int, int]]]] = {}

    def is_relieved(self, rank: int) -> bool:
        """Return whether the last stage of a rank takes what its others leave."""
        return not self.folded and self.run.behind > 0 and rank == self.home[-1]

    def _fewest_entries(self, rank: int) -> int:
        first, last = self.home[0] == rank, self.home[-1] == rank
        if self.is_relieved(rank):
            return self.virtual_stages - 1 + self.run.behind + self.run.before * first
        begins = first and self.run.before > 0
        ends = last and self.run.behind > 0
        bare = range(begins, self.virtual_stages - ends)
        like = max((self.virtual_stages - at for at in bare), default=0)
        if self.folded:
            return max(1, like + (begins or ends))
        return max(1, like + self.run.before * first + self.run.behind * last)

    def of_rank(
        self, rank: int, entries: range, choices: Sequence[Sequence[int]], order: Sequence[int]
    ) -> dict[int, list[tuple[int, int]]]:
        """Return (position, choice) of every layer of a rank, by stage.

        `choices` are one for each layer that each of its `entries` stands for, and `order` lists
        the choices of like layers from the one that stores least.  Of like layers any position
        stands for all.
        """
        like: list[int] = []
        ends: list[int] = []
        for entry, chosen in zip(entries, choices, strict=True):
            (like if self._are_like[entry] else ends).extend(chosen)
        entries_of_rank = [*sorted(like, key=order.index), *ends]
        return {
            stage: [(position, entries_of_rank[at]) for position, at in seated]
            for stage, seated in self.seats(rank, entries).items()
        }

    def like(self, entry: int) -> bool:
        """Return whether an entry is one of the run of like layers."""
        return self._are_like[entry]

    def seats(self, rank: int, entries: range) -> dict[int, list[tuple[int, int]]]:
        """Return by stage where the layers of a rank's entries lie: (position, which of them).

        Like layers come first, in the order of their choices, then those of the others.
        """
        key = rank, entries
        if key not in self._known_seats:
            self._known_seats[key] = self._seats(rank, entries)
        return self._known_seats[key]

    def _seats(self, rank: int, entries: range) -> dict[int, list[tuple[int, int]]]:
        run = self.run
        count = sum(self.like(entry) for entry in entries)
        stages = [stage for stage, home in enumerate(self.home) if home == rank]
        result, taken = dict[int, list[tuple[int, int]]](), 0
        for stage, size in zip(stages, self.sizes(rank, count), strict=True):
            result[stage] = [(run.before, at) for at in range(taken, taken + size)]
            taken += size
        others = (self.entries[entry] for entry in entries if not self.like(entry))
        for at, position in enumerate(itertools.chain.from_iterable(others), count):
            first = position < run.before
            layers = result[0 if first else len(self.home) - 1]
            layers.insert(position if first else len(layers), (position, at))
        return result

    def layer_choices(
        self, cuts: Sequence[int], choices: Sequence[Sequence[int]], order: Sequence[int]
    ) -> list[list[tuple[int, int]]]:
        """Return (position in the model's chain, choice) of every stage's layers.

        `cuts` are those of the entries; `choices` and `order` are as in `of_rank`.
        """
        stages: dict[int, list[tuple[int, int]]] = {}
        for rank, (first, end) in enumerate(itertools.pairwise(cuts)):
            stages |= self.of_rank(rank, range(first, end), choices[first:end], order)
        chosen = [[choice for _, choice in stages[stage]] for stage in range(len(self.home))]
        ends = [0, *itertools.accumulate(len(options) for options in chosen)]
        return [
            list(zip(range(*span), options, strict=True))
            for span, options in zip(itertools.pairwise(ends), chosen, strict=True)
        ]

    def sizes(self, rank: int, number: int) -> list[int]:
        """Return how many of `number` like layers on a rank each of its stages has."""
        virtual = self.virtual_stages
        if not self.is_relieved(rank):
            return [(number + at) // virtual for at in range(virtual)]
        others = -(-(self.run.alike - number + (self.run.before > 0)) // (self.ranks - 1))
        sizes = [max(1, (others + at) // virtual) for at in range(virtual - 1)]
        if sum(sizes) > number:
            sizes = [(number + at) // (virtual - 1) for at in range(virtual - 1)]
        return [*sizes, number - sum(sizes)]
