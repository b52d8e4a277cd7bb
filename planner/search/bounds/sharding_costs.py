"""What sharing states takes of the commonest layers of a model, of many sharings at once.

That is the same whichever timetable a family has, and however a step is measured, so the bounds of
the closed form and of the simulated step have it in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.costs.layer_cost_breakdown import Moved
from meshwright.planner.costs.layer_strategy import Recomputes, choices_of
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.axes import computed_by
from meshwright.planner.schedules import schedule_of
from meshwright.planner.search.space import LayoutFamily, ShardingChoice
from meshwright.planner.solver.bounds.path_bounds import Floats


class ShardingCosts(NamedTuple):
    """What sharing takes of one of the commonest layers; arrays [sharing]."""

    passes_s: Floats
    """Fewest seconds of both passes."""
    once_s: Floats
    seen_s: Floats
    """[sharing, choice] Of both passes."""


class ShardingTable:
    """The costs of sharing one kind of layer, worked out for all sharings of a family at once."""

    def __init__(self, tables: CostTables, kind: str, recompute: Recomputes) -> None:
        self._tables, self._kind = tables, kind
        self._choices = choices_of(recompute, kind)
        self._known: dict[tuple[object, ...], ShardingCosts] = {}
        self._traffic: dict[tuple[object, ...], Moved] = {}
        """Of all micro-batches."""

    def costs_of(self, part: LayoutFamily) -> ShardingCosts:
        """Return what sharing takes in the layouts of a part, no matter of which timetable.

        But for one: a pipeline that never drains has parameters more than once.
        """
        kind, sharings = self._kind, part.sharings
        loss = part.losses[0] if kind == self._tables.model.chain_kinds[-1] else None
        versions = schedule_of(part.timetables[0].schedule).weight_versions
        once = part.micro_batches == 1
        degrees = part.degrees, part.place, sharings
        alike = *degrees, versions, once, part.savings[0], loss, part.weight_wire
        key = *alike, part.micro_batch, *computed_by(part)
        costs = self._known.get(key)
        if costs is None:
            traffic = self._traffic.get(alike)
            if traffic is None:
                traffic = self._tables.moved_together(kind, list(part.layouts()))
                self._traffic[alike] = traffic
            together = self._tables.parts_together(kind, part.first, traffic)
            parts = [part for part in together if part.recompute in self._choices]
            each_s = [_per_sharing(part.forward_s + part.backward_s, sharings) for part in parts]
            costs = self._known[key] = ShardingCosts(
                np.min(each_s, axis=0),
                np.min([_per_sharing(part.once_s, sharings) for part in parts], axis=0),
                np.stack([_per_sharing(part.sharing_s, sharings) for part in parts], axis=1),
            )
        return costs


def _per_sharing(seconds: float, sharings: Sequence[ShardingChoice]) -> Floats:
    """[sharing] Seconds that may be one number for all."""
    return np.broadcast_to(np.asarray(seconds, dtype=float), (len(sharings),)).copy()
