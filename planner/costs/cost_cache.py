"""Figures of layers that several searches have in common: on clusters that differ in size alone.

Figures depend on a model, on the rates of devices and links under a framework, and on a setting
whose groups lie on some tiers; how many nodes there are is not among it.  A store belongs to
whoever searches many clusters; it says of no two requests that they are alike unless all of that is
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.costs.calibration import Figures, figures_at, join_figures

if TYPE_CHECKING:
    from meshwright.planner.costs.hardware_rates import Rates
    from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.profile import Recompute

KindFigures = dict[str, tuple[Figures, ...]]
"""By Layer.kind, in the order none, selective, full."""
MOST = 16
"""Bases that a store remembers, those used last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureBasis:
    """Inputs of figures beside a setting and where its groups lie."""

    model: ModelGraph
    rates: Rates
    recomputes: tuple[Recompute, ...]
    tiers: tuple[LinkTier, ...]
    devices_per_node: int

    @classmethod
    def of_cluster(
        cls,
        model: ModelGraph,
        cluster: ClusterSpec,
        rates: Rates,
        recomputes: tuple[Recompute, ...],
    ) -> FigureBasis:
        """Return that of a cluster, however many devices its tiers reach."""
        return cls(
            model=model,
            rates=rates,
            recomputes=recomputes,
            tiers=tuple(tier.model_copy(update={"devices": 1}) for tier in cluster.tiers),
            devices_per_node=cluster.groups[0].devices_per_node,
        )


@dataclass(slots=True)
class Rows:
    """Figures of places that take the same branches, as arrays [row]."""

    places: dict[Hashable, int] = field(default_factory=dict)
    """The row of each."""
    figures: KindFigures = field(default_factory=dict)

    def figures_of(
        self, keys: Sequence[Hashable], computed: Callable[[list[int]], KindFigures]
    ) -> KindFigures:
        """Return arrays [key]; `computed` are those of keys, by their index, that are not known."""
        places = list(map(self.places.get, keys))
        if None in places:
            new = {key: at for at, key in enumerate(keys) if places[at] is None}
            self._add(list(new), computed(list(new.values())))
            places = list(map(self.places.get, keys))
        rows = np.array(places, dtype=np.intp)
        return {
            kind: tuple(figures_at(choice, rows) for choice in choices)
            for kind, choices in self.figures.items()
        }

    def _add(self, keys: Sequence[Hashable], figures: KindFigures) -> None:
        size = len(self.places)
        before, added = list(range(size)), list(range(size, size + len(keys)))
        self.places.update(zip(keys, added, strict=True))
        if not size:
            self.figures = {
                kind: tuple(join_figures([(added, choice)], len(keys)) for choice in choices)
                for kind, choices in figures.items()
            }
            return
        self.figures = {
            kind: tuple(
                join_figures([(before, old), (added, new)], size + len(keys))
                for old, new in zip(self.figures[kind], choices, strict=True)
            )
            for kind, choices in figures.items()
        }


class FigureStore:
    """Rows of figures by what they depend on."""

    def __init__(self) -> None:
        self._known: list[tuple[FigureBasis, dict[Hashable, Rows]]] = []

    def rows(self, basis: FigureBasis) -> dict[Hashable, Rows]:
        """Return the rows of a basis, by the branches that their settings take."""
        for at, (settings, rows) in enumerate(self._known):
            if settings == basis:
                self._known.insert(0, self._known.pop(at))
                return rows
        rows = {}
        self._known = [(basis, rows), *self._known[: MOST - 1]]
        return rows
