"""The configurations of one request: what the backend runs, and why it does not run others.

Nothing is bounded here; planner.search.bounds.layout_groups and planner.search.bounds.layout_bounds
do that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.planner.costs.layer_strategy import Recomputes
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts
from meshwright.planner.documents.plan import Layout
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.frameworks.native_limits import Rules
from meshwright.planner.frameworks.stage_rules import Rows, rows
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.schedule import too_long
from meshwright.planner.search.offload_choices import activations, savings_of
from meshwright.planner.search.partition.layout_partition import instance_of, unkept
from meshwright.planner.search.space import (
    LayoutFamily,
    every_degrees,
    families,
    losses,
    micro_batches,
    plainest,
    sharings,
    tensor_overlaps,
    timetables,
)
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Instance

Refusal = Callable[[Layout], str | None]
"""Why a layout does not run, or None if it does."""


class StatedProblem(NamedTuple):
    """A layout's partition problem, and what it costs; or of several layouts as of one."""

    costs: LayoutCosts
    instance: Instance


def executable_families(
    request: Request, refusal: Refusal, saving: Refusal, refused: Counter[str]
) -> Iterator[LayoutFamily]:
    """Yield the families that run.  Of refused degrees no axis orders are distinguished.

    `refusal` says it of degrees, by their plainest layout, `saving` of what a layout saves.
    """
    model, pins, space = request.model, request.pins, request.space
    for degrees in every_degrees(request):
        plain = plainest(request, degrees)
        reason = refusal(plain)
        if reason is None:
            saved = savings_of(plain, request, saving)
            overlaps = tensor_overlaps(plain, request, saving)
            yield from families(request, degrees, saved, overlaps)
            continue
        sizes = micro_batches(request.job, degrees, pins)
        shape = {"stages": degrees.pipeline, "micro_batches": plain.micro_batches}
        by_wires = sum(
            len(timetables(model, degrees.pipeline, number, pins, space=space))
            for _, number in sizes
        )
        if not sizes and too_long(**shape):
            by_wires = 1
        count = len(sharings(degrees, pins, space=space)) * by_wires
        if count:
            refused[reason] += count


class Configurations:
    """All families of a space that the backend runs, and the refusals by reason."""

    def __init__(
        self,
        request: Request,
        rules: Rules | None = None,
        recompute: Recomputes = None,
        tables: CostTables | None = None,
        frontiers: FrontierStore | None = None,
    ) -> None:
        """`rules` are those of the stack if no others are asked for, `tables` those of the request,
        under any pins that leave layers the same activations to choose among.

        `recompute` is what layers may recompute, by default what is pinned or anything.
        """
        self.request = request
        self.model = request.model
        self.cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.stack = request.stack
        self.recompute = request.pins.recompute if recompute is None else recompute
        treated = activations(request.cluster, request.pins, space=request.space)
        self.tables = tables or CostTables(request, treated)
        self.rules = rules
        self._of_degrees = rules or rules_of(self.stack, of_degrees=True)
        self._executes = rules or rules_of(self.stack)
        self._known_rows: dict[tuple[int, int, str], Rows | None] = {}
        self._known_instances: dict[Layout, Instance] = {}
        self.refused: Counter[str] = Counter()
        self.families = list(
            executable_families(request, self._refusal_of, self._refusal_of, self.refused)
        )
        self.frontiers = FrontierStore() if frontiers is None else frontiers

    def _refusal_of(self, plain: Layout) -> str | None:
        """Return why nothing runs with the degrees and savings of a plain layout."""
        return self._of_degrees(self.model, self.cluster, self.job, plain)

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        lacking = self._lacking(layout)
        if lacking is None and self.rows(layout) is None:
            lacking = (
                f"{self.stack.name}: its blocks cannot be divided among the stages as it does "
                f"({self.stack.pipeline.stages})"
            )
        return lacking or self._executes(self.model, self.cluster, self.job, layout)

    def rows(self, layout: Layout) -> Rows | None:
        """Return how many layers ranks may hold by the rule of the stack; None if none can."""
        key = layout.pipeline, layout.virtual_stages, layout.schedule
        if key not in self._known_rows:
            size_rows = rows(
                self.stack.pipeline.stages, self.model, ranks=key[0], virtual_stages=key[1]
            )
            if self.pins.require and key[1] > 1:
                from meshwright.planner.search.partition.stage_size_rows import (  # noqa: PLC0415 - few ask
                    intersect_rows,
                    required_rows,
                )

                size_rows = intersect_rows(
                    size_rows, required_rows(self.model, layout, self.pins.require)
                )
            self._known_rows[key] = size_rows
        return self._known_rows[key]

    def _lacking(self, layout: Layout) -> str | None:
        """Return what a layout lacks of what is required."""
        lacking = unkept(self.model, layout, self.pins.require) if self.pins.require else None
        if lacking is not None:
            return f"it lacks stages that are asked for: {list(lacking.stages or ())}"
        if self.pins.require and layout.virtual_stages > 1:
            from meshwright.planner.search.partition.stage_size_rows import not_required  # noqa: PLC0415 - few ask

            return not_required(self.model, layout, self.pins.require)
        return None

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that the backend runs."""
        for family in self.families:
            for layout in family.layouts():
                if self.refusal(layout) is None:
                    yield layout

    def costs(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout."""
        return self.tables.costs_of(layout)

    def instance(self, layout: Layout) -> Instance:
        """Return the partition problem of a layout."""
        if layout not in self._known_instances:
            self._known_instances[layout] = self._instance(layout, self.tables.costs_of(layout))
        return self._known_instances[layout]

    def problem_of(self, layout: Layout) -> StatedProblem:
        """Return the partition problem of a layout with its costs."""
        return StatedProblem(self.tables.costs_of(layout), self.instance(layout))

    def stated_of_any_loss(self, layout: Layout) -> StatedProblem:
        """Return one for all layouts that differ in how they compute the loss alone.

        Each plan of theirs is a split of it: what bounds it bounds all of them.
        """
        costs = self.tables.of_any_loss(layout, losses(self.request, layout.schedule))
        return StatedProblem(costs, self._instance(layout, costs))

    def _instance(self, layout: Layout, costs: LayoutCosts) -> Instance:
        pins = self.pins
        instance = instance_of(
            self.model, self.cluster, layout, costs, self.recompute, pins.require
        )
        asked = self.rows(layout)
        return replace(instance, sizes=asked) if asked else instance

    def repeats(self, layout: Layout) -> bool:
        """Whether a layout is ZeRO-2 where that does what ZeRO-1 does, which can be chosen too.

        Under a pipeline, and where a step has one micro-batch, both reduce gradients once and hold
        the same (meshwright.planner.costs.memory.state_bytes, meshwright.planner.costs.sharding).
        """
        if layout.zero != 2 or (layout.pipeline == 1 and layout.micro_batches > 1):
            return False
        simpler = replace(layout, zero=1)
        return self.pins.allow(simpler) and self.refusal(simpler) is None
