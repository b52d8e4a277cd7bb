"""What ties the stages of a split to each other, or layers to stages, beside the memory of each.

    Host        devices of several stages share the memory of one host
    Together    layers lie in one stage
    Placed      layers lie in one of some stages
    AtMost      a stage holds no more than so many layers
    Chosen      layers take one of the options that are named

Layers and stages are counted from 0, and ranges include both ends.  `planner.solver.sided` solves
problems with such sides; nothing here searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

from planner.units import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The memory of one host; `ranks[s]` devices of stage s are on it."""

    capacity_bytes: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"a host has {bytes_text(self.capacity_bytes)} for all of its devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Layers `first` .. `last` lie in one stage."""

    first: int
    last: int

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"layers {self.first}-{self.last} together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Layers `first` .. `last` each lie in one of `stages`."""

    first: int
    last: int
    stages: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"layers {self.first}-{self.last} on stage {_numbers(self.stages)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """Each of `stages` holds at most so many layers."""

    layers: int
    stages: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"at most {self.layers} layers on stage {_numbers(self.stages)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Layers `first` .. `last` each take an option with one of these names."""

    first: int
    last: int
    options: tuple[str, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"layers {self.first}-{self.last} take {' or '.join(self.options)}"


Side = Together | Placed | AtMost | Chosen


@dataclass(frozen=True, slots=True)
class Tie:
    """A side of layers that need not be numbered in a row, as those of a graph."""

    side: Side
    layers: tuple[int, ...] = ()
    """None where it speaks of stages alone."""

    def __str__(self) -> str:
        """Say what it asks for."""
        return str(self.side)

    def kept(self, stage_of: Sequence[int], names: Sequence[str]) -> bool:
        """Whether a split does, with the stage of each layer and the name of its option."""
        match self.side:
            case Together():
                return len({stage_of[at] for at in self.layers}) == 1
            case Placed(stages=stages):
                return all(stage_of[at] in stages for at in self.layers)
            case AtMost(layers=most, stages=stages):
                return all(list(stage_of).count(stage) <= most for stage in stages)
            case Chosen(options=options):
                return all(names[at] in options for at in self.layers)
            case _:
                assert_never(self.side)


def of_chain(side: Side) -> Tie:
    """Return the tie of layers that are numbered in a row."""
    return Tie(side, () if isinstance(side, AtMost) else tuple(range(side.first, side.last + 1)))


def unkept(
    ties: Iterable[Tie], layers: Sequence[int], cuts: Sequence[int], names: Sequence[str]
) -> Tie | None:
    """Return a tie that a split does not keep, None if it keeps all.

    `layers` and the `names` of their options are in its order.
    """
    stage_of, name_of = [0] * len(layers), [""] * len(layers)
    for stage, (first, end) in enumerate(pairwise(cuts)):
        for at in range(first, end):
            stage_of[layers[at]], name_of[layers[at]] = stage, names[at]
    return next((tie for tie in ties if not tie.kept(stage_of, name_of)), None)


def _numbers(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
