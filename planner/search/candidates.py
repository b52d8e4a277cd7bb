"""The configurations that one search looks at, and what each can be held against.

Bounds come in steps, each dearer than the one before.  For a whole family:

    computation     layers and actions at their fastest, nothing communicated, under the best of
                    its schedules

for the part of it that has one ZeRO level and one schedule:

    rooms           with what ranks can hold if states are shared as far as they go
                    (planner.search.joint.rooms, of many families at once)
    shared          with the sharding of the commonest layers, memory ignored

and for a single layout:

    shared rooms    both
    communication   with its sharding and pipeline transfers, memory ignored
    memory          with all of them and what each stage can hold (planner.solver.bounds.counted_s)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.costs.figure_store import FigureStore, KindFigures
from planner.costs.layer_parts import Moved
from planner.costs.layout_costs import CostTables, LayoutCosts, fastest_s, least_credits_s
from planner.costs.memory import state_types
from planner.costs.rank_memory import room_bytes
from planner.costs.recomputes import Recomputes, choices_of
from planner.documents.plan import Layout
from planner.documents.tolerances import ROUNDING, SLACK
from planner.requests.request import Request
from planner.schedules import schedule_of
from planner.schedules.schedule import too_long
from planner.search.dominance import dominates, twins
from planner.search.formulation import (
    boundaries_s,
    instance_of,
    layout_pace,
    unkept,
)
from planner.search.joint.rooms import ChainFigures, Paces, Rooms, Unit
from planner.search.savings import Saving, activations, least_s, savings_of
from planner.search.space import (
    Degrees,
    LayoutFamily,
    ShardingChoice,
    canonical,
    every_degrees,
    families,
    micro_batches,
    plainest,
    sharings,
    tensor_overlaps,
    timetables,
)
from planner.search.stage_rows import both, not_required, required_rows
from planner.solver import bounds
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Instance
from planner.stacks.executable import rules_of
from planner.stacks.native import Rules
from planner.stacks.stage_rules import Rows, rows

Sharings = tuple[ShardingChoice, ...]
Levels = list[tuple[Sharings, bounds.Floats]]
"""Sharings of one ZeRO level, with a bound for each timetable."""
Bounded = list[tuple[Layout, float]]
"""Layouts and the least seconds of each."""
DEGREES = ("tensor", "context", "expert", "pipeline")
"""Pins that leave whole families out."""


class Candidates:
    """All families of a space that the backend runs, and the refusals by reason."""

    _most_paces: ClassVar[int] = 1
    """In which the seconds of ranks bound a step, at most."""

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
        self.model = model = request.model
        self.cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.stack = request.stack
        self.recompute = request.pins.recompute if recompute is None else recompute
        treated = activations(request.cluster, request.pins, space=request.space)
        self.tables = tables or CostTables(request, treated)
        self._of_degrees = rules or rules_of(self.stack, of_degrees=True)
        self._executes = rules or rules_of(self.stack)
        self._known_rows: dict[tuple[int, int, str], Rows | None] = {}
        self.rules = rules
        self.refused: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        for layer in model.layers:
            self._counts[layer.kind] = self._counts.get(layer.kind, 0) + layer.repeat
        self._commonest = max(self._counts.items(), key=lambda item: item[1])
        self._known_paces: dict[tuple[object, ...], Paces] = {}
        self._rates = self.tables.rates
        self._types = state_types(
            self._rates.stack, request.job.precision, moments=model.optimizer_bytes
        )
        self._parameters = float(sum(layer.parameters * layer.repeat for layer in model.layers))
        self.families = list(self._families())
        self._known_levels: dict[tuple[int, bool], tuple[object, list[Sharings]]] = {}
        """By the id of sharings, which are kept so that it stays theirs."""
        self._divided: dict[tuple[object, ...], int] = {}
        """The place of each `Family.divided` among divisions."""
        self._by_degrees: dict[Degrees, list[LayoutFamily]] = {}
        for family in self.families:
            self._by_degrees.setdefault(family.degrees, []).append(family)
        self.frontiers = FrontierStore() if frontiers is None else frontiers
        self._forget()

    def part(self, request: Request) -> Candidates | None:
        """Return those that a request of the same under other pins has, with what is known of them.

        None unless the pins differ only in degrees and recomputation, pinned where they were not.
        """
        new, old = request.pins, self.pins
        asked = {name: getattr(new, name) for name in (*DEGREES, "recompute")}
        kept = all(getattr(old, name) in (None, value) for name, value in asked.items())
        alike = replace(old, **asked, divided=new.divided) == new and old.divided <= new.divided
        if not (kept and alike and replace(request, pins=old) == self.request):
            return None
        if not self._divided:
            self.computation_s()
        found = copy(self)
        found.request, found.pins, found.refused = request, new, {}
        found.families = [
            family
            for degrees, own in self._by_degrees.items()
            if all(getattr(new, name) in (None, getattr(degrees, name)) for name in DEGREES)
            and all(getattr(degrees, axis) > 1 for axis in new.divided)
            for family in own
        ]
        if new.recompute != old.recompute and found.families:
            if self.recompute != old.recompute:
                return None
            found._recompute(new.recompute)
        return found

    def recomputing(self, recompute: Recomputes) -> Candidates:
        """Return the same layouts, whose layers may recompute something else."""
        if not self._divided:
            self.computation_s()
        found = copy(self)
        found.refused = dict(self.refused)
        found._recompute(recompute)
        return found

    def _recompute(self, recompute: Recomputes) -> None:
        """Let layers recompute something else, of figures that are known."""
        self.recompute = recompute
        self._forget()
        if self.families:
            self._bound_by_figures(self._chain.figures, self._chain.members)

    def _forget(self) -> None:
        """Begin without what depends on recomputation."""
        self._known_shared: dict[int, _PartBounds] = {}
        """By the id of their part."""
        self._known_moved: dict[tuple[object, ...], _ShardingCosts] = {}
        """By the id of the sharings, which are those of one place and level, and more."""
        self._known_traffic: dict[tuple[object, ...], tuple[object, Moved]] = {}
        """The same of all micro-batches, with the sharings that have the id."""
        self.looked_at: dict[int, tuple[LayoutFamily, Levels]] = {}
        """Families whose bounds within memory are known, by their id."""
        self.opened: dict[int, tuple[LayoutFamily, Bounded]] = {}
        """Parts whose layouts are bounded, by their id."""
        self._known_computation_s: dict[int, float] = {}
        """By the id of a family."""
        self._known_parts: dict[int, tuple[LayoutFamily, list[tuple[LayoutFamily, float]]]] = {}
        """By the id of the family that they are of."""
        self._known_communication_s: dict[Layout, float] = {}
        self._known_memory_s: dict[Layout, float] = {}
        self._known_instances: dict[Layout, Instance] = {}

    def _families(self) -> Iterator[LayoutFamily]:
        """Yield what the backend runs.  Of refused degrees no axis orders are told apart."""
        model, pins, space = self.model, self.pins, self.request.space
        for degrees in every_degrees(self.request):
            plain = plainest(self.request, degrees)
            reason = self._refusal_of(plain)
            if reason is None:
                saved = savings_of(plain, self.request, self._refusal_of)
                overlaps = tensor_overlaps(plain, self.request, self._refusal_of)
                yield from families(self.request, degrees, saved, overlaps)
                continue
            sizes = micro_batches(self.job, degrees, self.pins)
            shape = {"stages": degrees.pipeline, "micro_batches": plain.micro_batches}
            each = sum(
                len(timetables(model, degrees.pipeline, number, pins, space=space))
                for _, number in sizes
            )
            if not sizes and too_long(**shape):
                each = 1
            count = len(sharings(degrees, pins, space=space)) * each
            if count:
                self.refused[reason] = self.refused.get(reason, 0) + count

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
            found = rows(
                self.stack.pipeline.stages, self.model, ranks=key[0], virtual_stages=key[1]
            )
            if self.pins.require and key[1] > 1:
                found = both(found, required_rows(self.model, layout, self.pins.require))
            self._known_rows[key] = found
        return self._known_rows[key]

    def _lacking(self, layout: Layout) -> str | None:
        """Return what a layout lacks of what is required."""
        lacking = unkept(self.model, layout, self.pins.require) if self.pins.require else None
        if lacking is not None:
            return f"it lacks stages that are asked for: {list(lacking.stages or ())}"
        if self.pins.require and layout.virtual_stages > 1:
            return not_required(self.model, layout, self.pins.require)
        return None

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that the backend runs."""
        for family in self.families:
            for layout in family.layouts():
                if self.refusal(layout) is None:
                    yield layout

    def computation_s(self) -> bounds.Floats:
        """[family] Least seconds of a step by layers and pipeline actions, nothing communicated.

        A family of several timetables has the least of theirs.
        """
        if not self._known_computation_s and self.families:
            least_s = self._computation_s().tolist()
            ids = map(id, self.families)
            self._known_computation_s.update(zip(ids, least_s, strict=True))
        return np.array([self._known_computation_s[id(family)] for family in self.families])

    def _computation_s(self) -> bounds.Floats:
        if not self._divided:
            some = {family.divided: family for family in self.families}
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
                    each = [numbers[(*divided[:-1], (loss,))] for loss in family.losses]
                    members.append(each + each[-1:] * (most - len(each)))
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
        some = self.tables.unlinked(self.families[0].first)
        free_bytes = room_bytes(whole_bytes, some)
        self._rooms = Rooms(
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
        added_s = least_s(saving, self._parameters, self.cluster.devices, self._rates, self._types)
        return (1 - SLACK) * added_s

    def _timetables_s(self, families: Sequence[LayoutFamily]) -> bounds.Floats:
        """[timetable of the families in turn] Least seconds by computation alone."""
        number, stages, paces = [], [], []
        for family in families:
            paces.append(self._paces_of(family))
            number += [self._divided[family.divided]] * len(family.timetables)
            stages += [float(family.degrees.pipeline)] * len(family.timetables)
        steady, fill, credited, actions, least = Paces.together(paces)
        each_s = bounds.balanced_each_s(
            list(self._counts.values()),
            self._chain.fastest_s[:, number],
            stages=np.array(stages),
            steady=steady,
            fill=fill,
            exposed_s=actions * self.tables.action_s,
            each_exposed_s=least * self.tables.action_s,
            credits_s=credited * self._chain.credits_s[number],
        )
        longest_s: bounds.Floats = self.tables.step_s + each_s.max(axis=0)
        return longest_s

    def _paces_of(self, family: LayoutFamily) -> Paces:
        """Return the paces of a family's timetables: arrays [pace, timetable].

        Actions are counted by the seconds of one with one stage a rank.  Those at the ends of the
        model are left out (planner.search.formulation.boundaries_s).
        """
        pipeline, count, found = family.degrees.pipeline, family.micro_batches, family.timetables
        key = (pipeline, count, found)
        if key not in self._known_paces:
            columns = []
            for name, virtual in found:
                layout = Layout(
                    pipeline=pipeline, micro_batches=count, schedule=name, virtual_stages=virtual
                )
                rows = [self._counted(layout, *pace) for pace in self.paces(layout)]
                columns.append((rows * self._most_paces)[: self._most_paces])
            # [timetable, pace, figure] -> [figure, pace, timetable]
            self._known_paces[key] = Paces(*np.array(columns).T)
        return self._known_paces[key]

    def _counted(self, layout: Layout, steady: float, fill: float) -> tuple[float, ...]:
        """Return the figures of `Paces` for one pace of a layout's timetable."""
        schedule = layout.executed
        actions = self._actions(layout, fill) if layout.pipeline > 1 else 0
        share = self.tables.action_share(layout.virtual_stages)
        return (
            steady,
            fill,
            fill if schedule.splits_backward else 0.0,
            share * max(0, layout.pipeline * actions - 2),
            share * max(0, actions - (2 if schedule.placement == "v" else 1)),
        )

    def _actions(self, layout: Layout, fill: float) -> int:
        """Return the actions of a rank for one micro-batch that a pace with `fill` counts."""
        return (3 if layout.executed.splits_backward else 2) * layout.virtual_stages

    def parts(self, family: LayoutFamily, levels: Levels) -> list[tuple[LayoutFamily, float]]:
        """Return a family's part of each ZeRO level and timetable, with its bound of `levels`.

        Timetables under which no layout of a level fits are one part.
        """
        if id(family) not in self._known_parts:
            found = []
            for sharings, rooms_s in levels:
                without = []
                for room_s, timetable in zip(rooms_s.tolist(), family.timetables, strict=True):
                    if room_s < math.inf:
                        part = family.part(sharings=sharings, timetables=(timetable,))
                        found.append((part, room_s))
                    else:
                        without.append(timetable)
                if without:
                    part = family.part(sharings=sharings, timetables=tuple(without))
                    found.append((part, math.inf))
            self._known_parts[id(family)] = family, found
        return self._known_parts[id(family)][1]

    def rooms_s(self, families: Sequence[LayoutFamily]) -> list[Levels]:
        """Least seconds within memory, of each family under every ZeRO level and timetable.

        Families have one saving each.  All layouts of a level are at least what the one that
        divides states among the most ranks is (states only grow with fewer, see
        planner.costs.memory).
        """
        levels = [self._levels(family) for family in families]
        units = [
            Unit(family, level[0])
            for family, own in zip(families, levels, strict=True)
            for level in own
        ]
        paces = [self._paces_of(family) for family, _ in units]
        each_s = iter(self._within_memory_s(units, paces, np.zeros(len(units))))
        return [[(level, next(each_s)) for level in own] for own in levels]

    def _levels(self, family: LayoutFamily) -> list[Sharings]:
        """Return a family's sharings by what ZeRO level states are divided by, the widest first.

        Under a pipeline, and where a step has one micro-batch, ZeRO-2 is ZeRO-1
        (planner.costs.memory).
        """
        key = id(family.sharings), _alike(family)
        if key not in self._known_levels:
            levels: dict[int, list[ShardingChoice]] = {}
            for sharing in family.sharings:
                level = 1 if key[1] and sharing.zero == 2 else sharing.zero
                levels.setdefault(level, []).append(sharing)
            found = [tuple(level) for level in levels.values()]
            self._known_levels[key] = family.sharings, found
        return self._known_levels[key][1]

    def _within_memory_s(
        self,
        units: Sequence[Unit],
        paces: Sequence[Paces],
        once_s: bounds.Floats,
        seen_s: bounds.Floats | None = None,
    ) -> list[bounds.Floats]:
        """[unit][timetable] Least seconds within memory, at the greatest of some `paces` [unit].

        What sharing adds to a step `once_s` [unit], and to a micro-batch of one of the commonest
        layers `seen_s` [unit, choice].
        """
        if seen_s is None:  # what sharing adds once has what offloaded states add
            once_s = once_s + [self._added_s(family.savings[0]) for family, _ in units]
        found = self._rooms.least_s(
            units,
            np.array([self._divided[family.divided] for family, _ in units]),
            Paces.together(paces),
            once_s,
            seen_s,
        )
        return np.split(found, np.cumsum([len(family.timetables) for family, _ in units])[:-1])

    def shared_s(self, part: LayoutFamily) -> bounds.Floats:
        """[sharing] Least seconds with what sharding the commonest layers adds, memory ignored.

        `part` has one ZeRO level, timetable and loss.  The other layers take their fewest seconds
        anywhere, and what crosses a boundary of the pipeline takes no time.
        """
        return self._shared(part).least_s

    def _shared(self, part: LayoutFamily) -> _PartBounds:
        """Return what sharing takes of the commonest layers."""
        if id(part) in self._known_shared:
            return self._known_shared[id(part)]
        number, moved = self._divided[part.divided], self._moved(part)
        commonest, layers = self._commonest
        rows = [
            (self._counts[kind], float(self._chain.fastest_s[at, number]), 0.0)
            for at, kind in enumerate(self._counts)
            if kind != commonest
        ]
        each_s = []
        for pace in self._paces_of(part).each(len(self.paces(part.first))):
            ((steady, fill, credited, actions, least),) = np.array(pace)[:, 0].T.tolist()
            # Both are arrays [sharing].
            passes_s, once_s = self._with_once(part, fill, moved.passes_s, moved.once_s)
            each_s.append(
                bounds.balanced_s(
                    [*rows, (layers, cast(float, passes_s), cast(float, once_s))],
                    stages=part.degrees.pipeline,
                    exposed_s=actions * self.tables.action_s,
                    each_exposed_s=least * self.tables.action_s,
                    steady=steady,
                    fill=fill,
                    credits_s=credited * float(self._chain.credits_s[number]),
                )
            )
        balanced_s = np.max(each_s, axis=0)
        least_s = np.asarray(balanced_s * (1 - ROUNDING) + self.tables.step_s)
        found = self._known_shared[id(part)] = _PartBounds(part, least_s, moved)
        return found

    def _moved(self, part: LayoutFamily) -> _ShardingCosts:
        """Return what sharing takes of one of the commonest layers: no matter of timetables.

        But for one: a pipeline that never drains holds parameters more than once.
        """
        kind, sharings = self._commonest[0], part.sharings
        loss = part.losses[0] if kind == self.model.chain_kinds[-1] else None
        versions = schedule_of(part.timetables[0].schedule).weight_versions
        once = part.micro_batches == 1
        alike = id(sharings), versions, once, part.savings[0], loss, part.weight_wire
        key = (*alike, part.micro_batch, part.compile, part.dispatch, part.relay)
        found = self._known_moved.get(key)
        if found is None:
            known = self._known_traffic.get(alike)
            if known is None:
                known = sharings, self.tables.moved_together(kind, list(part.layouts()))
                self._known_traffic[alike] = known
            commonest = choices_of(self.recompute, kind)
            together = self.tables.parts_together(kind, part.first, known[1])
            parts = [one for one in together if one.recompute in commonest]
            each_s = [_all(one.forward_s + one.backward_s, sharings) for one in parts]
            found = self._known_moved[key] = _ShardingCosts(
                sharings,
                np.min(each_s, axis=0),
                np.min([_all(one.once_s, sharings) for one in parts], axis=0),
                np.stack([_all(one.sharing_s, sharings) for one in parts], axis=1),
            )
        return found

    def shared_rooms_s(self, parts: Sequence[LayoutFamily]) -> list[Bounded]:
        """[part][layout] Least seconds with the sharding of the commonest layers, within memory.

        Parts are as in `shared_s`.  Of sharings that divide states among as many ranks, wherever
        they lie, the least of every figure stands for all.
        """
        result, units, paces, once_s, seen_s = [], [], [], [], []
        members: list[tuple[bounds.Floats, list[int]]] = []
        for part in parts:
            shared = self._shared(part)
            least_s, moved = shared.least_s.copy(), shared.moved
            many = max(1.0, self._commonest[1] / part.degrees.pipeline)
            groups: dict[tuple[int, int], list[int]] = {}
            for index, sharing in enumerate(part.sharings):
                level = 1 if _alike(part) and sharing.zero == 2 else sharing.zero
                groups.setdefault((level, sharing.shard), []).append(index)
            known = self._paces_of(part).each(len(self.paces(part.first)))
            for own, pace in itertools.product(groups.values(), known):
                members.append((least_s, own))
                units.append(Unit(part, part.sharings[own[0]]))
                paces.append(pace)
                seen, once = self._with_once(
                    part,
                    float(pace.fill[0, 0]),
                    moved.seen_s[own].min(axis=0),
                    moved.once_s[own].min(),
                )
                once_s.append(many * once)
                seen_s.append(seen)
            result.append((part, least_s))
        rooms_s = self._within_memory_s(units, paces, np.array(once_s), np.array(seen_s))
        for (least_s, own), (room_s,) in zip(members, rooms_s, strict=True):
            least_s[own] = np.maximum(least_s[own], room_s)
        return [
            list(zip(part.layouts(), least_s.tolist(), strict=True)) for part, least_s in result
        ]

    def paces(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Return `steady` and `fill` of each bound of a layout's step, up to `_most_paces`.

        What else measures steps has others.
        """
        return (layout_pace(self.model, layout),)

    def _with_once(
        self, part: LayoutFamily, fill: float, passes_s: bounds.Floats, once_s: bounds.Floats
    ) -> tuple[bounds.Floats, bounds.Floats]:
        """Return a layer's seconds of each micro-batch and those once per step, as they count."""
        return passes_s, once_s

    def communication_s(self, layout: Layout) -> float:
        """Least seconds with what sharding and the pipeline add, memory ignored."""
        if layout not in self._known_communication_s:
            self._known_communication_s[layout] = self._communication_s(layout)
        return self._known_communication_s[layout]

    def _communication_s(self, layout: Layout) -> float:
        costs = self.tables.of(layout)
        rows = []
        for kind, table in costs.kinds.items():
            among = choices_of(self.recompute, kind)
            choices = [cost for cost in table if cost.recompute in among]
            fastest_s = min(cost.forward_s + cost.backward_s for cost in choices)
            rows.append((self._counts[kind], fastest_s, min(cost.sync_s for cost in choices)))
        steady, fill = layout_pace(self.model, layout)
        credits_s = 0.0
        if layout.executed.splits_backward:
            credits_s = fill * sum(
                self._counts[kind] * min(part.figures.credit_s for part in parts)
                for kind, parts in costs.parts.items()
            )
        exposed_s = boundaries_s(costs, layout)
        bound_s = bounds.balanced_s(
            rows,
            stages=layout.pipeline,
            exposed_s=sum(exposed_s),
            each_exposed_s=min(exposed_s),
            steady=steady,
            fill=fill,
            credits_s=credits_s,
        )
        return bound_s + costs.step_s

    def memory_s(self, layout: Layout) -> float:
        """Least seconds with what each stage can hold; inf if the layout does not fit."""
        if layout not in self._known_memory_s:
            seconds = bounds.counted_s(self.instance(layout)) + self.tables.of(layout).step_s
            self._known_memory_s[layout] = seconds
        return self._known_memory_s[layout]

    def costs(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout."""
        return self.tables.of(layout)

    def instance(self, layout: Layout) -> Instance:
        """Return the partition problem of a layout."""
        if layout not in self._known_instances:
            self._known_instances[layout] = self._instance(layout)
        return self._known_instances[layout]

    def _instance(self, layout: Layout) -> Instance:
        costs = self.tables.of(layout)
        pins = self.pins
        found = instance_of(self.model, self.cluster, layout, costs, self.recompute, pins.require)
        asked = self.rows(layout)
        return replace(found, sizes=asked) if asked else found

    def repeats(self, layout: Layout) -> bool:
        """Whether a layout is ZeRO-2 where that does what ZeRO-1 does, which can be chosen too.

        Under a pipeline, and where a step has one micro-batch, both reduce gradients once and hold
        the same (planner.costs.memory, planner.costs.sharding).
        """
        if layout.zero != 2 or (layout.pipeline == 1 and layout.micro_batches > 1):
            return False
        simpler = replace(layout, zero=1)
        return self.pins.allow(simpler) and self.refusal(simpler) is None

    def dominator(self, layout: Layout) -> Layout | None:
        """Return a candidate that can do all that this layout can, if one is known."""
        costs = self.tables.of(layout)
        for changed in twins(layout):
            twin = canonical(self.cluster, changed)
            if twin == layout or not self.pins.allow(twin) or self.refusal(twin) is not None:
                continue
            if dominates(twin, self.tables.of(twin), layout, costs):
                return twin
        return None


def candidates_of(
    request: Request,
    rules: Rules | None,
    recompute: Recomputes,
    known: Sequence[Candidates],
    store: FigureStore | None = None,
) -> Candidates:
    """Return the candidates of a request; `known` are of the same under other pins.

    `store` has figures of layers on other clusters.
    """
    for one in known:
        if one.rules is not rules:
            continue
        if one.request is request:
            return one.recomputing(recompute)
        part = one.part(request)
        if part is not None and part.recompute == recompute:
            return part
    treated = activations(request.cluster, request.pins, space=request.space)
    shared = next((one for one in known if one.tables.activations == treated), None)
    if shared is None:
        return Candidates(request, rules, recompute, CostTables(request, treated, store=store))
    return Candidates(request, rules, recompute, shared.tables, shared.frontiers)


class _ShardingCosts(NamedTuple):
    """What sharing takes of one of the commonest layers; arrays [sharing]."""

    sharings: tuple[ShardingChoice, ...]
    passes_s: bounds.Floats
    """Fewest seconds of both passes."""
    once_s: bounds.Floats
    seen_s: bounds.Floats
    """[sharing, choice] Of both passes."""


class _PartBounds(NamedTuple):
    """The least seconds of a part's layouts, and what they come from."""

    part: LayoutFamily
    least_s: bounds.Floats
    """[sharing]"""
    moved: _ShardingCosts


def _all(seconds: float, sharings: Sequence[ShardingChoice]) -> bounds.Floats:
    """[sharing] Seconds that may be one number for all."""
    return np.broadcast_to(np.asarray(seconds, dtype=float), (len(sharings),)).copy()


def _alike(family: LayoutFamily) -> bool:
    """Whether ZeRO-2 does what ZeRO-1 does."""
    return family.degrees.pipeline > 1 or family.micro_batches == 1
