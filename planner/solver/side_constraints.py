"""Constraints that tie stages to each other, or layers to stages, beside the memory of each.

Layers and stages are counted from 0.  `planner.solver.solve` solves problems with such ties;
nothing here searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.planner.documents.units import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of one host; `ranks[s]` devices of stage s are on it."""

    capacity_bytes: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        """Say what it asks for."""
        return f"a host has {bytes_text(self.capacity_bytes)} for all of its devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideConstraint:
    """Exactly one of four: `layers` on one stage (`together`), on some of `stages`, with `options`.

    Or, without layers, `at_most` of them on each of `stages`, or of all if none is named.
    """

    layers: tuple[int, ...] = ()
    """Rising; those of a graph need not be numbered in a row."""
    together: bool = False
    stages: tuple[int, ...] = ()
    at_most: int | None = None
    options: tuple[str, ...] = ()
    """Names of the options that the layers may have."""

    def __str__(self) -> str:
        """Say what it asks for.

        >>> str(SideConstraint(layers=(0, 1, 2), stages=(1, 2))), str(SideConstraint(at_most=4))
        ('layers 0-2 on stages 1, 2', 'at most 4 layers on each stage')
        """
        where = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        if self.at_most is not None:
            return f"at most {self.at_most} layers on {where if self.stages else 'each stage'}"
        asked = "together" if self.together else " or ".join(self.options) or f"on {where}"
        return f"layers {self.layers[0]}-{self.layers[-1]} {asked}"

    def is_kept(self, stage_of: Sequence[int], names: Sequence[str]) -> bool:
        """Return whether a split keeps it, given each layer's stage and the name of its option."""
        if self.options:
            return all(names[at] in self.options for at in self.layers)
        contents: dict[int, set[int]] = {}
        for at, stage in enumerate(stage_of):
            contents.setdefault(stage, set()).add(at)
        return all(self.allows(stage, layers) for stage, layers in contents.items())

    def allows(self, stage: int, layers: set[int]) -> bool:
        """Return whether a stage may have exactly these layers, whatever their options.

        >>> SideConstraint(layers=(0, 1), together=True).allows(0, {0, 2})
        False
        >>> SideConstraint(at_most=1).allows(0, {0})
        True
        """
        if self.at_most is not None:
            return len(layers) <= self.at_most or (bool(self.stages) and stage not in self.stages)
        tied = layers.intersection(self.layers)
        if self.together:
            return len(tied) in (0, len(self.layers))
        return not self.stages or not tied or stage in self.stages


def unkept(
    ties: Iterable[SideConstraint], cuts: Sequence[int], names: Sequence[str]
) -> SideConstraint | None:
    """Return a tie that a split does not keep, None if it keeps all; `names` [layer] of options."""
    stage_of = [s for s, (first, end) in enumerate(pairwise(cuts)) for _ in range(first, end)]
    return next((tie for tie in ties if not tie.is_kept(stage_of, names)), None)
