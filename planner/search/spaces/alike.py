"""What spaces of layouts on devices that are alike have in common."""

from __future__ import annotations

from planner.costs.crossings import in_order
from planner.costs.layout_costs import CostTables, LayoutCosts
from planner.model import ModelGraph
from planner.plan import Layout
from planner.search.candidates import Candidates
from planner.search.layout_queue import Bundles
from planner.solver.frontier import FrontierStore


class AlikeSpace(Bundles):
    """Layouts of a model on one group of devices, its layers one by one in an order that runs."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self._tables: CostTables = candidates.tables
        original = candidates.model
        self._model: ModelGraph = in_order(original) if original.edges else original
        self._frontiers = FrontierStore()

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts, ...]:
        """Return the costs of a layout."""
        return (self._tables.of(layout),)

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        return self.candidates.refusal(layout)
