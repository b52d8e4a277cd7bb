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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    def kept(self, cuts: Sequence[int], _: Sequence[str]) -> bool:
        """Whether a split does."""
        return not any(self.first < cut <= self.last for cut in cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Layers `first` .. `last` each lie in one of `stages`."""

    first: int
    last: int
    stages: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"layers {self.first}-{self.last} on stage {_numbers(self.stages)}"

    def kept(self, cuts: Sequence[int], _: Sequence[str]) -> bool:
        """Whether a split does."""
        return all(
            stage in self.stages or max(first, self.first) >= min(end, self.last + 1)
            for stage, (first, end) in enumerate(pairwise(cuts))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """Each of `stages` holds at most so many layers."""

    layers: int
    stages: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"at most {self.layers} layers on stage {_numbers(self.stages)}"

    def kept(self, cuts: Sequence[int], _: Sequence[str]) -> bool:
        """Whether a split does."""
        return all(cuts[s + 1] - cuts[s] <= self.layers for s in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Layers `first` .. `last` each take an option with one of these names."""

    first: int
    last: int
    options: tuple[str, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"layers {self.first}-{self.last} take {' or '.join(self.options)}"

    def kept(self, _: Sequence[int], names: Sequence[str]) -> bool:
        """Whether a split does."""
        return all(name in self.options for name in names[self.first : self.last + 1])


Side = Together | Placed | AtMost | Chosen


def _numbers(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
