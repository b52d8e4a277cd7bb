"""Lower bounds of families of configurations, many at once, each dearer than the one before.

For a whole family:

    computation     layers and actions at their fastest, nothing communicated, under the best of
                    its schedules

for the part of it that has one ZeRO level and one schedule:

    rooms           with what ranks can hold if states are shared as far as they go
                    (meshwright.planner.search.bounds.group_memory_bounds, of many families at once)
    shared          with the sharding of the commonest layers, memory ignored
                    (meshwright.planner.search.bounds.layout_groups)

and for its layouts:

    shared rooms    both

A law checks them: none is above the exact seconds of any of the layouts that it is a bound of.

What sharing states takes of the commonest layers of a model, of many sharings at once.

That is the same whichever timetable a family has, and however a step is measured, so the bounds of
the closed form and of the simulated step have it in common.

The configurations of one request: what the framework runs, and why it does not run others.

Nothing is bounded here; planner.search.bounds.layout_groups and planner.search.bounds.layout_bounds
do that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layer_strategy import Recomputes, choices_of
from meshwright.planner.costs.layout_costs import (
    CostTables,
    LayoutCosts,
    fastest_s,
    least_credits_s,
)
from meshwright.planner.costs.memory.rank_memory import room_bytes
from meshwright.planner.costs.memory.state_bytes import state_types
from meshwright.planner.documents.axes import computed_by
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.tolerances import ROUNDING, SLACK
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.frameworks.stage_rules import Rows, rows
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import too_long
from meshwright.planner.search.bounds.group_memory_bounds import (
    ChainFigures,
    GroupUnderSharding,
    MemoryBounds,
    ObjectiveCoefficients,
)
from meshwright.planner.search.offload_choices import Saving, activations, offload_s, savings_of
from meshwright.planner.search.partition.layout_partition import instance_of, layout_pace, unkept
from meshwright.planner.search.space import (
    Degrees,
    LayoutFamily,
    ShardingChoice,
    Sharings,
    every_degrees,
    families,
    losses,
    micro_batches,
    plainest,
    sharings,
    tensor_overlaps,
    timetables,
)
from meshwright.planner.search.spaces.forwards_ahead import ahead_choices
from meshwright.planner.solver.bounds import path_bounds as bounds
from meshwright.planner.solver.frontier import FrontierStore

if TYPE_CHECKING:
    from meshwright.planner.costs.cost_cache import KindFigures
    from meshwright.planner.costs.layer_cost_breakdown import Moved
    from meshwright.planner.frameworks.native_limits import Rules
    from meshwright.planner.requests.pins import Pins
    from meshwright.planner.requests.request import Request
    from meshwright.planner.solver.bounds.path_bounds import Floats
    from meshwright.planner.solver.partition_problem import Instance

Refusal = Callable[[Layout], str | None]
"""Why a layout does not run, or None if it does."""


class StatedProblem(NamedTuple):
    """A layout's partition problem, and what it costs; or of several layouts as of one."""

    costs: LayoutCosts
    instance: Instance


def executable_families(
    request: Request,
    refusal: Refusal,
    saving: Refusal,
    refused: Counter[str],
    some: Iterable[Degrees] | None = None,
) -> Iterator[LayoutFamily]:
    """Yield the families that run.  Of refused degrees no axis orders are distinguished.

    `refusal` says it of degrees, by their plainest layout, `saving` of what a layout saves.  `some`
    are the degrees that are of interest, by default all.
    """
    pins, space = request.pins, request.space
    for degrees in every_degrees(request) if some is None else some:
        plain = plainest(request, degrees)
        reason = refusal(plain)
        if reason is None:
            saved = savings_of(plain, request, saving)
            overlaps = tensor_overlaps(plain, request, saving)
            yield from families(request, degrees, saved, overlaps)
            continue
        sizes = micro_batches(request, degrees)
        shape = {"stages": degrees.pipeline, "micro_batches": plain.micro_batches}
        ahead = ahead_choices(request, degrees)
        by_wires = sum(len(timetables(request, degrees, number, ahead)) for _, number in sizes)
        if not sizes and too_long(**shape):
            by_wires = 1
        count = len(sharings(degrees, pins, space=space)) * by_wires
        if count:
            refused[reason] += count


class Configurations:
    """All families of a space that the framework runs, and the refusals by reason."""

    def __init__(
        self,
        request: Request,
        rules: Rules | None = None,
        recompute: Recomputes = None,
        tables: CostTables | None = None,
        frontiers: FrontierStore | None = None,
        degrees: Iterable[Degrees] | None = None,
    ) -> None:
        """`rules` are those of the framework if no others are asked for, `tables` those of the
        request, under any pins that leave layers the same activations to choose among.

        `recompute` is what layers may recompute, by default what is pinned or anything; `degrees`
        are those that are of interest, by default all.
        """
        self.request = request
        self.model = request.model
        self.cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.framework = request.framework
        self.recompute = request.pins.recompute if recompute is None else recompute
        treated = activations(request.cluster, request.pins, space=request.space)
        self.tables = tables or CostTables(request, treated)
        self.rules = rules
        self._of_degrees = rules or rules_of(self.framework, of_degrees=True)
        self._executes = rules or rules_of(self.framework)
        self._known_rows: dict[tuple[int, int, str], Rows | None] = {}
        self._known_instances: dict[Layout, Instance] = {}
        self._known_of_any_loss: dict[Layout, StatedProblem] = {}
        self._known_refusals: dict[Layout, str | None] = {}
        self.refused: Counter[str] = Counter()
        self.families = list(
            executable_families(request, self._refusal_of, self._refusal_of, self.refused, degrees)
        )
        self.frontiers = FrontierStore() if frontiers is None else frontiers

    def _refusal_of(self, plain: Layout) -> str | None:
        """Return why nothing runs with the degrees and savings of a plain layout."""
        return self._of_degrees(self.model, self.cluster, self.job, plain)

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        if layout not in self._known_refusals:
            self._known_refusals[layout] = self._refusal(layout)
        return self._known_refusals[layout]

    def _refusal(self, layout: Layout) -> str | None:
        lacking = self._lacking(layout)
        if lacking is None and self.rows(layout) is None:
            lacking = (
                f"{self.framework.name}: its blocks cannot be divided among the stages as it does "
                f"({self.framework.pipeline.stages})"
            )
        return lacking or self._executes(self.model, self.cluster, self.job, layout)

    def rows(self, layout: Layout) -> Rows | None:
        """Return how many layers ranks may hold by the rule of the framework; None if none can."""
        key = layout.pipeline, layout.virtual_stages, layout.schedule
        if key not in self._known_rows:
            size_rows = rows(
                self.framework.pipeline.stages, self.model, ranks=key[0], virtual_stages=key[1]
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
        """Yield every layout that the framework runs."""
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

    def has_losses(self, layout: Layout) -> bool:
        """Return whether there are several ways to compute the loss."""
        return len(losses(self.request, layout.schedule)) > 1

    def stated_of_any_loss(self, layout: Layout) -> StatedProblem:
        """Return one for all layouts that differ in how they compute the loss alone.

        Each plan of theirs is a split of it: what bounds it bounds all of them.
        """
        key = replace(layout, loss=None)
        if key not in self._known_of_any_loss:
            costs = self.tables.of_any_loss(layout, losses(self.request, layout.schedule))
            self._known_of_any_loss[key] = StatedProblem(costs, self._instance(layout, costs))
        return self._known_of_any_loss[key]

    def _instance(self, layout: Layout, costs: LayoutCosts) -> Instance:
        pins = self.pins
        instance = instance_of(
            self.model, self.cluster, layout, costs, self.recompute, pins.require
        )
        asked = self.rows(layout)
        return replace(instance, sizes=asked) if asked else instance

    def repeats(self, layout: Layout) -> bool:
        """Return whether a layout is ZeRO-2 where ZeRO-1 does the same and can be chosen too."""
        return repeats_zero_1(layout, self.pins, self.refusal)


def repeats_zero_1(layout: Layout, pins: Pins, refusal: Refusal) -> bool:
    """Return whether a layout is ZeRO-2 where ZeRO-1 does the same and can be chosen too.

    Under a pipeline, and where a step has one micro-batch, both reduce gradients once and hold the
    same (meshwright.planner.costs.memory.state_bytes, meshwright.planner.costs.sharding).
    """
    if layout.zero != 2 or (layout.pipeline == 1 and layout.micro_batches > 1):
        return False
    simpler = replace(layout, zero=1)
    return pins.allow(simpler) and refusal(simpler) is None


class ShardingCosts(NamedTuple):
    """Seconds of sharing for one of the commonest layers; arrays [sharing]."""

    passes_s: Floats
    """Fewest seconds of both passes."""
    once_s: Floats
    seen_s: Floats
    """[sharing, choice] Seconds of both passes."""


class ShardingTable:
    """The costs of sharing one kind of layer, worked out for all sharings of a family at once."""

    def __init__(self, tables: CostTables, kind: str, recompute: Recomputes) -> None:
        self._tables, self._kind = tables, kind
        self._choices = choices_of(recompute, kind)
        self._known: dict[tuple[object, ...], ShardingCosts] = {}
        self._traffic: dict[tuple[object, ...], Moved] = {}
        """Traffic of all micro-batches."""

    def costs_of(self, part: LayoutFamily) -> ShardingCosts:
        """Return what sharing takes in the layouts of a part, no matter of which timetable.

        But for one: a pipeline that never drains has parameters more than once.
        """
        kind, sharings = self._kind, part.sharings
        loss = part.losses[0] if kind == self._tables.model.chain_kinds[-1] else None
        versions = schedule_of(part.timetables[0].schedule).weight_versions
        once = part.micro_batches == 1
        degrees = part.degrees, part.place, sharings
        alike = *degrees, versions, once, part.savings[0], loss, part.weight_gather_dtype
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


Levels = list[tuple[Sharings, bounds.Floats]]
"""Sharings of one ZeRO level, with a bound for each timetable."""
Bounded = list[float]
"""[sharing] The least seconds of the layouts of a part."""


class FamilyBounds(Configurations):
    """The families of a request with their bounds, in the seconds of the closed form."""

    _most_paces: ClassVar[int] = 1
    """Most paces in which the seconds of ranks bound a step."""
    limit_s: float = math.inf
    """Seconds of the simulated step up to which paths bound it; inf where they do not."""

    def __init__(
        self,
        request: Request,
        rules: Rules | None = None,
        recompute: Recomputes = None,
        tables: CostTables | None = None,
        frontiers: FrontierStore | None = None,
        degrees: Iterable[Degrees] | None = None,
    ) -> None:
        """See `Configurations`."""
        super().__init__(request, rules, recompute, tables, frontiers, degrees)
        self._counts: dict[str, int] = {}
        for layer in self.model.layers:
            self._counts[layer.kind] = self._counts.get(layer.kind, 0) + layer.repeat
        self._commonest = max(self._counts.items(), key=lambda item: item[1])
        self._known_paces: dict[tuple[object, ...], ObjectiveCoefficients] = {}
        self._known_numbers: dict[tuple[int, int, str, int], int] = {}
        """How many paces a timetable has that differ."""
        self._rates = self.tables.rates
        self._types = state_types(
            self._rates.framework, request.job.precision, moments=self.model.optimizer_bytes
        )
        self._parameters = float(
            sum(layer.parameters * layer.repeat for layer in self.model.layers)
        )
        self._known_levels: dict[tuple[object, ...], list[Sharings]] = {}
        self._divided: dict[tuple[object, ...], int] = {}
        """The place of each `Family.divided` among divisions."""
        self._sharding = self._sharding_table()
        self._forget()

    def _sharding_table(self) -> ShardingTable:
        return ShardingTable(self.tables, self._commonest[0], self.recompute)

    def _forget(self) -> None:
        """Begin without the bounds of anything."""
        self._known_shared: dict[LayoutFamily, _PartBounds] = {}
        self.looked_at: dict[LayoutFamily, Levels] = {}
        """Families whose bounds within memory are known."""
        self.opened: dict[LayoutFamily, Bounded] = {}
        """Parts whose layouts are bounded."""
        self._known_computation_s: dict[LayoutFamily, float] = {}
        self._known_parts: dict[LayoutFamily, list[tuple[LayoutFamily, float]]] = {}

    def computation_s(self) -> bounds.Floats:
        """[family] Least seconds of a step by layers and pipeline actions, nothing communicated.

        A family of several timetables has the least of theirs.
        """
        if not self._known_computation_s and self.families:
            least_s = self._computation_s().tolist()
            self._known_computation_s.update(zip(self.families, least_s, strict=True))
        return np.array([self._known_computation_s[family] for family in self.families])

    def _computation_s(self) -> bounds.Floats:
        if not self._divided:
            some = {family.computation_key: family for family in self.families}
            firsts: dict[tuple[object, ...], Layout] = {}
            for (*alike, _), family in some.items():
                for place, loss in enumerate(family.losses):
                    first = family.sharings[0], family.timetables[0], family.savings[0]
                    firsts.setdefault((*alike, (loss,)), family.layout(*first, place=place))
            numbers = {divided: number for number, divided in enumerate(firsts)}
            most = max(len(family.losses) for family in some.values())
            members = [[number] * most for number in numbers.values()]
            for divided, family in some.items():
                if divided not in numbers:
                    numbers[divided] = len(numbers)
                    of_losses = [numbers[(*divided[:-1], (loss,))] for loss in family.losses]
                    members.append(of_losses + of_losses[-1:] * (most - len(of_losses)))
            self._divided = numbers
            self._bound_by_figures(
                self.tables.figures_together(list(firsts.values())), np.array(members)
            )
        every_s = self._timetables_s(self.families)
        firsts_at = np.cumsum([0, *(len(family.timetables) for family in self.families[:-1])])
        least_s: bounds.Floats = np.minimum.reduceat(every_s, firsts_at)
        return least_s

    def _bound_by_figures(self, figures: KindFigures, members: NDArray[np.intp]) -> None:
        """Prepare the bounds of families from what layers take in each setting.

        `members` [division, loss] are the settings of each division.
        """
        counts = np.array(list(self._counts.values()))
        self._chain = ChainFigures(
            counts=self._counts,
            commonest=self._commonest[0],
            figures=figures,
            members=members,
            fastest_s=fastest_s(figures, self.recompute)[:, members].min(axis=-1),
            credits_s=(counts @ least_credits_s(figures))[members].max(axis=-1),
        )
        whole_bytes = self.cluster.groups[0].accelerator.memory_bytes
        some = self.tables.costs_without_links(self.families[0].first)
        free_bytes = room_bytes(whole_bytes, some)
        self._rooms = MemoryBounds(
            self.tables,
            self._chain,
            capacity_bytes=free_bytes * (1 + ROUNDING),
            recompute=self.recompute,
        )

    def timetables_s(self, family: LayoutFamily) -> list[float]:
        """[timetable] `computation_s` of each timetable of a family."""
        return [float(seconds) for seconds in self._timetables_s([family])]

    def savings_s(self, family: LayoutFamily) -> list[float]:
        """[saving] Least seconds by computation alone and what offloaded states add."""
        computing_s = min(self.timetables_s(family))
        return [computing_s + self._added_s(saving) for saving in family.savings]

    def _added_s(self, saving: Saving) -> float:
        mean = self._parameters / self.cluster.devices
        return (1 - SLACK) * offload_s(saving, mean, self._rates, self._types)

    def _timetables_s(self, families: Sequence[LayoutFamily]) -> bounds.Floats:
        """[timetable of the families in turn] Least seconds by computation alone."""
        number, stages, paces = [], [], []
        for family in families:
            paces.append(self._paces_of(family))
            number += [self._divided[family.computation_key]] * len(family.timetables)
            stages += [float(family.degrees.pipeline)] * len(family.timetables)
        steady, fill, credited, actions, fewest_s = ObjectiveCoefficients.together(paces)
        each_s = bounds.balanced_s(
            _without_sync(self._counts.values(), self._chain.fastest_s[:, number]),
            stages=cast(float, np.array(stages)),
            steady=cast(float, steady),
            fill=cast(float, fill),
            exposed_s=cast(float, actions * self.tables.action_s),
            each_exposed_s=cast(float, fewest_s * self.tables.action_s),
            credits_s=cast(float, credited * self._chain.credits_s[number]),
        )
        longest_s: bounds.Floats = self.tables.step_s + np.max(each_s, axis=0)
        return longest_s

    def _paces_of(self, family: LayoutFamily) -> ObjectiveCoefficients:
        """Return the paces of a family's timetables: arrays [pace, timetable].

        Actions are counted by the seconds of one with one stage a rank.  Those at the ends of the
        model are left out (meshwright.planner.search.partition.layout_partition.boundaries_s).
        """
        pipeline, count, timetables = (
            family.degrees.pipeline,
            family.micro_batches,
            family.timetables,
        )
        key = (pipeline, count, timetables)
        if key not in self._known_paces:
            columns = []
            for name, virtual in timetables:
                layout = Layout(
                    pipeline=pipeline, micro_batches=count, schedule=name, virtual_stages=virtual
                )
                rows = [self._pace_figures(layout, *pace) for pace in self.paces(layout)]
                columns.append((rows * self._most_paces)[: self._most_paces])
                self._known_numbers[pipeline, count, name, virtual] = len(rows)
            # [timetable, pace, figure] -> [figure, pace, timetable]
            self._known_paces[key] = ObjectiveCoefficients(*np.array(columns).T)
        return self._known_paces[key]

    def _each_pace_of(self, part: LayoutFamily) -> list[ObjectiveCoefficients]:
        """Return the paces of a part with one timetable."""
        coefficients, [timetable] = self._paces_of(part), part.timetables
        key = part.degrees.pipeline, part.micro_batches, *timetable
        return coefficients.one_by_one(self._known_numbers[key])

    def _pace_figures(self, layout: Layout, steady: float, fill: float) -> tuple[float, ...]:
        """Return the figures of `ObjectiveCoefficients` for one pace of a layout's timetable."""
        schedule = layout.executed_schedule
        actions = self._actions(layout, fill) if layout.pipeline > 1 else 0
        share = self.tables.action_share(layout.virtual_stages)
        return (
            steady,
            fill,
            fill if self._leaves_w_out(layout) else 0.0,
            share * max(0, layout.pipeline * actions - 2),
            share * max(0, actions - (2 if schedule.placement == "v" else 1)),
        )

    def _leaves_w_out(self, layout: Layout) -> bool:
        """Return whether `fill` counts what W takes back as credits."""
        return layout.executed_schedule.splits_backward

    def _actions(self, layout: Layout, fill: float) -> int:
        """Return the actions of a rank for one micro-batch that a pace with `fill` counts."""
        return (3 if layout.executed_schedule.splits_backward else 2) * layout.virtual_stages

    def parts(self, family: LayoutFamily, levels: Levels) -> list[tuple[LayoutFamily, float]]:
        """Return a family's part of each ZeRO level and timetable, with its bound of `levels`.

        Timetables under which no layout of a level fits are one part.
        """
        if family not in self._known_parts:
            parts = []
            for sharings, rooms_s in levels:
                without = []
                for room_s, timetable in zip(rooms_s.tolist(), family.timetables, strict=True):
                    divided = family.sharings_of(timetable, sharings)
                    if room_s < math.inf and divided:
                        part = family.part(sharings=divided, timetables=(timetable,), ahead=None)
                        parts.append((part, room_s))
                    elif divided:
                        without.append(timetable)
                if without:
                    part = family.part(sharings=sharings, timetables=tuple(without))
                    parts.append((part, math.inf))
            self._known_parts[family] = parts
        return self._known_parts[family]

    def rooms_s(self, families: Sequence[LayoutFamily]) -> list[Levels]:
        """Least seconds within memory, of each family under every ZeRO level and timetable.

        Families have one saving each.  All layouts of a level are at least what the one that
        divides states among the most ranks is (states only grow with fewer, see
        meshwright.planner.costs.memory.state_bytes).
        """
        levels = [self._levels(family) for family in families]
        units = [
            GroupUnderSharding(family, level[0])
            for family, levels_s in zip(families, levels, strict=True)
            for level in levels_s
        ]
        paces = [self._paces_of(family) for family, _ in units]
        each_s = iter(self._within_memory_s(units, paces, np.zeros(len(units))))
        return [[(level, next(each_s)) for level in levels_s] for levels_s in levels]

    def _levels(self, family: LayoutFamily) -> list[Sharings]:
        """Return a family's sharings by what ZeRO level states are divided by, the widest first.

        Under a pipeline, and where a step has one micro-batch, ZeRO-2 is ZeRO-1
        (meshwright.planner.costs.memory.state_bytes).
        """
        alike = _alike(family)
        key = family.degrees, family.place, family.sharings, alike
        if key not in self._known_levels:
            levels: dict[int, list[ShardingChoice]] = {}
            for sharing in family.sharings:
                level = 1 if alike and sharing.zero == 2 else sharing.zero
                levels.setdefault(level, []).append(sharing)
            self._known_levels[key] = [Sharings(level) for level in levels.values()]
        return self._known_levels[key]

    def _within_memory_s(
        self,
        units: Sequence[GroupUnderSharding],
        paces: Sequence[ObjectiveCoefficients],
        once_s: bounds.Floats,
        seen_s: bounds.Floats | None = None,
        synced_s: bounds.Floats | None = None,
    ) -> list[bounds.Floats]:
        """[unit][timetable] Least seconds within memory, at the greatest of some `paces` [unit].

        What sharing adds to a step `once_s` [unit], and to a micro-batch of one of the commonest
        layers `seen_s` [unit, choice], `synced_s` of it once (see `MemoryBounds.bounds_s`).
        """
        if seen_s is None:  # what sharing adds once has what offloaded states add
            once_s = once_s + [self._added_s(family.savings[0]) for family, _ in units]
        bounds_s = self._rooms.bounds_s(
            units,
            np.array([self._divided[family.computation_key] for family, _ in units]),
            ObjectiveCoefficients.together(paces),
            once_s,
            seen_s,
            synced_s,
            self.limit_s,
        )
        return np.split(bounds_s, np.cumsum([len(family.timetables) for family, _ in units])[:-1])

    def shared_s(self, parts: Sequence[LayoutFamily]) -> list[bounds.Floats]:
        """[part][sharing] Least seconds with what sharding the commonest layers adds.

        Memory is ignored; parts have one ZeRO level, timetable and loss.  The other layers take
        their fewest seconds anywhere, and what crosses a boundary of the pipeline takes no time.
        """
        self._bound_sharing(parts)
        return [self._known_shared[part].least_s for part in parts]

    def _bound_sharing(self, parts: Sequence[LayoutFamily]) -> None:
        """Work out what sharing takes of many parts, whose paces and sharings lie in a row."""
        commonest, layers = self._commonest
        kinds, fastest_s = list(self._counts), self._chain.fastest_s
        new = {
            part: self._sharding.costs_of(part) for part in parts if part not in self._known_shared
        }
        rows: list[tuple[Any, ...]] = []
        for part, moved in new.items():
            number = self._divided[part.computation_key]
            alone_s = float(fastest_s[kinds.index(commonest), number])
            for pace in self._each_pace_of(part):
                [figures] = np.array(pace)[:, 0].T.tolist()
                seconds = moved.passes_s, moved.once_s
                seconds = self._with_once(part, figures[1], *seconds, alone_s=alone_s)
                rows.append((len(moved.once_s), number, part.degrees.pipeline, *figures, *seconds))
        if not rows:
            return
        sizes, at, *columns, passes_s, once_s = zip(*rows, strict=True)
        places = np.repeat(at, sizes)
        stages, steady, fill, credited, actions, fewest_s = np.repeat(columns, sizes, axis=1)
        others = np.delete(fastest_s, kinds.index(commonest), axis=0)[:, places]
        counts = [self._counts[kind] for kind in kinds if kind != commonest]
        last = (layers, np.concatenate(passes_s), np.concatenate(once_s))
        balanced_s: Any = bounds.balanced_s(
            [*_without_sync(counts, others), cast(tuple[int, float, float], last)],
            stages=cast(float, stages),
            exposed_s=cast(float, actions * self.tables.action_s),
            each_exposed_s=cast(float, fewest_s * self.tables.action_s),
            steady=cast(float, steady),
            fill=cast(float, fill),
            credits_s=cast(float, credited * self._chain.credits_s[places]),
        )
        each_s = iter(np.split(balanced_s, np.cumsum(sizes)[:-1]))
        for part, moved in new.items():
            paces = [next(each_s) for _ in self._each_pace_of(part)]
            least_s = np.max(paces, axis=0) * (1 - ROUNDING) + self.tables.step_s
            self._known_shared[part] = _PartBounds(least_s, moved)

    def shared_rooms_s(self, parts: Sequence[LayoutFamily]) -> list[Bounded]:
        """[part][sharing] Least seconds with the sharding of the commonest layers, within memory.

        Parts are as in `shared_s`.  Of sharings that divide states among as many ranks, wherever
        they lie, the least of every figure stands for all.
        """
        result, units, paces, once_s, seen_s = [], [], [], [], []
        synced_s: list[float] = []
        members: list[tuple[bounds.Floats, list[int]]] = []
        for part, shared_s in zip(parts, self.shared_s(parts), strict=True):
            least_s, moved = shared_s.copy(), self._known_shared[part].moved
            many = max(1.0, self._commonest[1] / part.degrees.pipeline)
            groups: dict[tuple[int, int], list[int]] = {}
            for index, sharing in enumerate(part.sharings):
                level = 1 if _alike(part) and sharing.zero == 2 else sharing.zero
                groups.setdefault((level, sharing.shard), []).append(index)
            for group, pace in itertools.product(groups.values(), self._each_pace_of(part)):
                members.append((least_s, group))
                units.append(GroupUnderSharding(part, part.sharings[group[0]]))
                paces.append(pace)
                seen, once = self._with_once(
                    part,
                    float(pace.fill[0, 0]),
                    moved.seen_s[group].min(axis=0),
                    moved.once_s[group].min(),
                )
                once_s.append(many * once)
                seen_s.append(seen)
                steadily = float(pace.fill[0, 0]) == 0.0
                synced_s.append(float(moved.once_s[group].min()) if steadily else math.nan)
            result.append(least_s)
        rooms_s = self._within_memory_s(
            units, paces, np.array(once_s), np.array(seen_s), np.array(synced_s)
        )
        for (least_s, group), (room_s,) in zip(members, rooms_s, strict=True):
            least_s[group] = np.maximum(least_s[group], room_s)
        return [least_s.tolist() for least_s in result]

    def paces(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Return `steady` and `fill` of each bound of a layout's step, up to `_most_paces`.

        What else measures steps has others.
        """
        return (layout_pace(self.model, layout),)

    def _with_once(
        self,
        part: LayoutFamily,
        fill: float,
        passes_s: bounds.Floats,
        once_s: bounds.Floats,
        *,
        alone_s: float = 0.0,
    ) -> tuple[bounds.Floats, bounds.Floats]:
        """Return a layer's seconds of each micro-batch and those once per step, as they count.

        Of `passes_s` `alone_s` is what it takes with nothing shared.
        """
        return passes_s, once_s


class _PartBounds(NamedTuple):
    """The least seconds of a part's layouts, and what they come from."""

    least_s: bounds.Floats
    """[sharing]"""
    moved: ShardingCosts


def _without_sync(
    counts: Iterable[int], fastest_s: bounds.Floats
) -> list[tuple[int, float, float]]:
    """[kind] How many layers there are, their fewest seconds [kind, problem], nothing to sync."""
    return [
        (count, cast(float, seconds), 0.0) for count, seconds in zip(counts, fastest_s, strict=True)
    ]


def _alike(family: LayoutFamily) -> bool:
    """Return whether ZeRO-2 does what ZeRO-1 does."""
    return family.degrees.pipeline > 1 or family.micro_batches == 1
