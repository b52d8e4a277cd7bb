"""Placement of a pipeline's stages on devices, and the bytes that cross between neighbours.

The layers of a chain on equal devices hand one activation on, always over the same links, and every
stage has the same costs (`alike`).  Where device groups differ, each stage has the costs and the
memory of its own; where layers form a graph, each boundary has the tensors that cross it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.costs.cut_tensors import crossings
from meshwright.planner.costs.memory.rank_memory import StageTraffic

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts
    from meshwright.planner.documents.cluster import Accelerator, DeviceGroup
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.documents.prediction import Assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """One stage's costs and devices; `passing` is None for one activation of the stream."""

    costs: LayoutCosts
    accelerator: Accelerator
    passing: StageTraffic | None = None
    group: DeviceGroup | None = None
    """Group whose hosts alone it fills; None where all hosts are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacements:
    """All stages in order, and the seconds from each but the last to the next."""

    stages: tuple[StagePlacement, ...]
    transfer_s: tuple[float, ...]

    def assumptions(self, on_host: Sequence[bool]) -> tuple[Assumption, ...]:
        """Return what was not measured of any stage's costs, each once.

        `on_host` [stage] says whether anything of it lies on the host.
        """
        every: dict[Assumption, None] = {}
        for seat, there in zip(self.stages, on_host, strict=True):
            every |= dict.fromkeys(seat.costs.assumptions)
            every |= dict.fromkeys(seat.costs.host_assumptions if there else ())
        return tuple(every)


def alike(tables: CostTables, layout: Layout) -> StagePlacements:
    """Return the seats of a chain's stages on devices that are alike."""
    costs = tables.costs_of(layout)
    seat = StagePlacement(costs=costs, accelerator=tables.cluster.groups[0].accelerator)
    return StagePlacements(
        stages=(seat,) * layout.stages, transfer_s=(costs.transfer_s,) * (layout.stages - 1)
    )


def branching(
    tables: CostTables, layout: Layout, stages: Sequence[Sequence[str]]
) -> StagePlacements:
    """Return the seats of stages that hold these layers of a graph, on devices that are alike."""
    costs = tables.costs_of(layout)
    size_bytes = tables.output_sizes(layout)
    accelerator = tables.cluster.groups[0].accelerator
    return StagePlacements(
        stages=tuple(
            StagePlacement(costs=costs, accelerator=accelerator, passing=passing)
            for passing in passed_on(tables.model, size_bytes, stages)
        ),
        transfer_s=tuple(
            tables.crossing_s(layout, [size_bytes[name] for name in names])
            for names in crossings(tables.model, stages)
        ),
    )


def passed_on(
    model: ModelGraph, size_bytes: Mapping[str, float], stages: Sequence[Sequence[str]]
) -> list[StageTraffic]:
    """[stage] What crosses its ends; `size_bytes` are of each layer's output."""
    crossing = crossings(model, stages)
    placements = []
    for s, held in enumerate(stages):
        received = crossing[s - 1] if s else ()
        sent = crossing[s] if s < len(crossing) else ()
        placements.append(
            StageTraffic(
                received_bytes=sum(size_bytes[name] for name in received),
                made_bytes=sum(size_bytes[name] for name in sent if name in held),
                sent_bytes=sum(size_bytes[name] for name in sent),
            )
        )
    return placements
