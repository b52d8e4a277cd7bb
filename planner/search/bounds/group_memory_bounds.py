"""Least seconds of many families within memory, under every timetable each may have.

Of a family and one of its sharings, *lean* because it divides states the most, the layers of the
commonest kind are counted as planner.search.bounds.stage_capacity does, beside what surely lies on
the ranks of the model's ends: its first and its last layer, each with the least of every figure.
The other layers take their fewest seconds anywhere, and no room.  Of a stage's own buffers those of
what it sends and of what is on the way are counted.  Bytes are bounds from below, as in
meshwright.planner.search.bounds.memory_bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.activations import activation_cost
from meshwright.planner.costs.calibration import figures_at
from meshwright.planner.costs.layer_strategy import (
    Recomputes,
    StrategyParts,
    choices_of,
    least_resident,
)
from meshwright.planner.costs.layout_costs import CostTables, counted_by_rank
from meshwright.planner.costs.memory.host_memory import host_room_bytes
from meshwright.planner.costs.memory.state_bytes import States
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.operators.operator_table import RECOMPUTES, either
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.search.bounds import multi_stage_memory as spread
from meshwright.planner.search.bounds.memory_bounds import MemoryMoment, binding, loads_of
from meshwright.planner.search.bounds.multi_stage_memory import StageMemorySpread
from meshwright.planner.search.bounds.simulated_cuts import drained_backwards
from meshwright.planner.search.bounds.stage_capacity import (
    Options,
    Room,
    Stages,
    capacity_bounds_s,
)
from meshwright.planner.search.bounds.whole_layer_paths import RankPaths, paths_s
from meshwright.planner.search.partition.stage_counts import longest_run, shares_of
from meshwright.planner.search.space import LayoutFamily, ShardingChoice, Timetable

if TYPE_CHECKING:
    from meshwright.planner.costs.cost_cache import KindFigures
    from meshwright.planner.documents.profile import ChunkedLoss

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class GroupUnderSharding(NamedTuple):
    """Layouts that are looked at together: a family's, of which none has less than under one
    sharing."""

    family: LayoutFamily
    leanest: ShardingChoice


class ObjectiveCoefficients(NamedTuple):
    """[pace, problem] How a timetable turns the seconds of ranks into a bound of those of a step.

    `actions` of all ranks and of any at least, which no layer counts; a credit counts `credited`.
    A step takes no less than at any of the paces.
    """

    steady: Floats
    fill: Floats
    credited: Floats
    actions: Floats
    least_actions: Floats

    @classmethod
    def together(cls, some: Sequence[ObjectiveCoefficients]) -> ObjectiveCoefficients:
        """Return those of several problems in a row."""
        return cls(*(np.concatenate(rows, axis=1) for rows in zip(*some, strict=True)))

    def of_problems(self, problems: Indices) -> ObjectiveCoefficients:
        """Return those of some problems."""
        return ObjectiveCoefficients(*(column[:, problems] for column in self))

    def one_by_one(self, number: int) -> list[ObjectiveCoefficients]:
        """Return the first paces one by one."""
        return [
            ObjectiveCoefficients(*(column[at : at + 1] for column in self)) for at in range(number)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFigures:
    """The layers of a model by kind, and the settings that their seconds were worked out in."""

    counts: dict[str, int]
    commonest: str
    figures: KindFigures
    """Arrays [setting]."""
    members: Indices
    """[division, loss] Settings that differ in how the last layer computes the loss; layouts of a
    division may have any of them."""
    fastest_s: Floats
    """[kind, division]"""
    credits_s: Floats
    """[division] Credits of all layers, at most."""


class Drain(NamedTuple):
    """[rank] Weight gradients behind the last way back of its first stage; see `drained`."""

    summed: Floats
    """Of all its stages."""
    most: Floats
    """Of any of its stages."""
    whole: NDArray[np.bool_]
    """True where the way back through its first stage has the weight gradients in it."""
    ends: tuple[int, int]
    """Rank of the model's first, last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """[problem] Problems whose paths are asked for, with what is known of them."""

    low_s: Floats
    setting: Indices
    timetables: list[tuple[str, int, int]]
    paces: ObjectiveCoefficients
    added_s: Floats
    synced_s: Floats
    weights_s: Floats
    """Seconds of the weight gradients of one of the commonest layers, at most."""
    ends: list[Floats | None]
    """[end][figure, problem] Least seconds of the passes of the model's first and last layer, and
    most of their weight gradients."""

    def of_problems(self, at: Indices) -> _Asked:
        """Return some of them."""
        return _Asked(
            low_s=self.low_s[at],
            setting=self.setting[at],
            timetables=[self.timetables[n] for n in at.tolist()],
            paces=self.paces.of_problems(at),
            added_s=self.added_s[at],
            synced_s=self.synced_s[at],
            weights_s=self.weights_s[at],
            ends=[None if end is None else end[:, at] for end in self.ends],
        )


class _Ranks(NamedTuple):
    """The ranks of pipelines of one degree under each timetable; arrays begin with [timetable]."""

    early: MemoryMoment
    late: MemoryMoment
    """Counts of all ranks of all timetables in a row, at the moments that may count."""
    depths: Indices
    """Number of stages of each rank."""
    ends: Indices
    """[timetable, end] Rank of the model's first, last stage."""
    relieved: NDArray[np.bool_]
    """True for timetables whose rank of the last stage does not share evenly."""
    holding: Indices
    """Place in `_HELD`."""
    lowest: Floats
    """[timetable, 2] Least in flight, and least buffers."""


class MemoryBounds:
    """Bounds on the families of one search."""

    def __init__(
        self,
        tables: CostTables,
        chain: ChainFigures,
        *,
        capacity_bytes: float,
        recompute: Recomputes,
    ) -> None:
        """`capacity_bytes` are for layers and the pipeline's buffers, on every rank."""
        self._tables = tables
        self._chain = chain
        self._capacity_bytes = capacity_bytes
        self._kinds = tables.model.chain_kinds
        run = longest_run(self._kinds)
        self._like = (
            run is not None
            and self._kinds[run.before] == chain.commonest
            and run.alike == chain.counts[chain.commonest]
        )
        self._recompute = recompute
        self._host_bytes: float | None = None
        """Bytes that a rank may put on its host; None without offload, or where none are stated."""
        if "offload" in tables.activations:
            self._host_bytes = host_room_bytes(
                tables.cluster.groups[0], tables.request.framework.offload.host_share
            )

    def with_credits(self, chain: ChainFigures) -> MemoryBounds:
        """Return the same with other credits."""
        bounds = copy(self)
        bounds._chain = chain
        return bounds

    def bounds_s(
        self,
        units: Sequence[GroupUnderSharding],
        settings: Indices,
        paces: ObjectiveCoefficients,
        added_s: Floats,
        seen_s: Floats | None = None,
        synced_s: Floats | None = None,
        limit_s: float = np.inf,
    ) -> Floats:
        """[timetable of the units in turn] Least seconds of a step; inf where none fits.

        `settings` [unit] are divisions; `added_s` [unit] comes on top of a step, `seen_s`
        [unit, choice] of the passes of one of the commonest layers.  Below a limit in seconds of
        the simulated step, paths count too: `synced_s` [unit] are what one of the commonest layers
        takes once, which is in `seen_s` as a part of every micro-batch; NaN leaves a unit out.
        """
        keeps_sent = self._tables.rates.framework.pipeline.keeps_sent
        units_s = [
            _ranks_of(
                self._kinds,
                family.degrees.pipeline,
                family.micro_batches,
                family.timetables,
                keeps_sent=keeps_sent,
            )
            for family, _ in units
        ]
        of_unit = np.repeat(np.arange(len(units)), [len(of_unit_s.depths) for of_unit_s in units_s])
        degree = np.array([unit.family.degrees.pipeline for unit in units])[of_unit]
        members = self._chain.members[settings]
        several = bool((members != members[:, :1]).any())
        losses = range(members.shape[1] if several else 1)
        layouts = [unit.family.layout(unit.leanest, Timetable()) for unit in units]
        of_losses = [[_loss(unit.family, place) for unit in units] for place in losses]
        figures, recompute = self._chain.figures, self._recompute
        costs = LayersTogether(self._tables, figures, layouts, of_losses, members, recompute)
        holdings = np.concatenate([of_unit_s.holding for of_unit_s in units_s])
        options = Options(
            **dict(
                zip(
                    _FIGURES,
                    costs.figures_of(self._chain.commonest, holdings, of_unit),
                    strict=True,
                )
            )
        )
        options = replace(options, transient_bytes=self._working(options, costs, of_unit))
        if seen_s is not None:
            options = replace(options, time_s=options.time_s + seen_s[of_unit].T)
        boundary_bytes = self._boundary_bytes(layouts, settings)[of_unit]
        lowest = np.concatenate([of_unit_s.lowest for of_unit_s in units_s]).T
        kept = np.flatnonzero(self._may_fit(options, boundary_bytes, lowest, degree))
        bound_s = np.full(len(of_unit), np.inf)
        if len(kept):
            ranks = _some(units_s, degree, of_unit, kept)
            options, degree, of_unit = options.for_pipelines(kept), degree[kept], of_unit[kept]
            stages = self._stages(ranks, options, degree, boundary_bytes[kept], costs, of_unit)
            rest = settings[of_unit], paces.of_problems(kept), added_s[of_unit]
            bound_s[kept] = self._bound_s(options, stages, *rest)
            if limit_s < np.inf:
                timetables = [table for family, _ in units for table in _timetables_of(family)]
                asked = _Asked(
                    low_s=bound_s[kept],
                    setting=rest[0],
                    timetables=[timetables[at] for at in kept.tolist()],
                    paces=rest[1],
                    added_s=rest[2] + self._tables.step_s,
                    synced_s=(np.zeros(len(units)) if synced_s is None else synced_s)[of_unit],
                    weights_s=costs.weights_s(self._chain.commonest)[of_unit],
                    ends=[
                        None if kind is None else costs.passes_s(kind)[:, of_unit]
                        for kind in self._tables.end_kinds
                    ],
                )
                bound_s[kept] = self._by_paths(options, stages, ranks, asked, limit_s)
            alone = np.flatnonzero(degree == 1)
            if self._host_bytes is not None and len(alone):
                on_host = costs.on_host(self._chain.commonest, of_unit)
                pooled_s = self._pooled_s(options, stages, on_host, *rest)
                at = kept[alone]
                bound_s[at] = np.maximum(bound_s[at], pooled_s)
        return bound_s

    def _boundary_bytes(self, layouts: Sequence[Layout], settings: Indices) -> Floats:
        """[layout] Bytes that cross a boundary; layouts of a division compute alike."""
        keys = [(at, one.pipeline > 1) for at, one in zip(settings.tolist(), layouts, strict=True)]
        some = dict(zip(keys, layouts, strict=True))
        known = {key: self._tables.boundary_bytes(layout) for key, layout in some.items()}
        return np.array([known[key] for key in keys])

    def _pooled_s(
        self,
        options: Options,
        stages: Stages,
        on_host: Floats,
        setting: Indices,
        paces: ObjectiveCoefficients,
        added_s: Floats,
    ) -> Floats:
        """[timetable without a pipeline] Least seconds by the memory of device and host together.

        What fits both fits their sum; a rank that has all layers has an even share of its host.
        """
        at = np.flatnonzero(stages.counts == 1)
        room_bytes = self._host_bytes or 0.0
        among = options.for_pipelines(at)
        among = replace(
            among,
            stored_bytes=among.stored_bytes + on_host[0][:, at],
            resident_bytes=among.resident_bytes + on_host[1][:, at],
        )
        part = stages.for_pipelines(stages.counts == 1)
        return self._bound_s(
            among,
            replace(part, free_bytes=part.free_bytes + room_bytes),
            setting[at],
            paces.of_problems(at),
            added_s[at],
        )

    def _may_fit(
        self, options: Options, boundary_bytes: Floats, lowest: Floats, degree: Indices
    ) -> NDArray[np.bool_]:
        """[timetable] Whether all ranks hold the layers if each were like the roomiest of them."""
        in_flight, buffers = lowest
        lean = (options.resident_bytes + in_flight * options.stored_bytes).min(axis=0)
        free = self._capacity_bytes - buffers * boundary_bytes
        free -= options.transient_bytes.min(axis=0)
        layers = -(-self._chain.counts[self._chain.commonest] // degree)
        may: NDArray[np.bool_] = layers * lean <= free * (1 + SLACK)
        return may

    def _working(self, options: Options, costs: LayersTogether, of_unit: Indices) -> Floats:
        """[choice, timetable] Least working memory of a stage's last layer but the model's."""
        fewest_bytes = options.transient_bytes.min(axis=0)
        first = self._kinds.index(self._chain.commonest)
        for kind in set(self._kinds[first:-1]) - {self._chain.commonest}:
            fewest_bytes = np.minimum(fewest_bytes, costs.working(kind)[of_unit])
        return np.broadcast_to(fewest_bytes, options.transient_bytes.shape)

    def _stages(
        self,
        ranks: _Ranks,
        options: Options,
        degree: Indices,
        boundary_bytes: Floats,
        costs: LayersTogether,
        of_unit: Indices,
    ) -> Stages:
        """Return the ranks of all timetables, with what is left beside what surely lies there."""
        problem = np.repeat(np.arange(len(degree)), degree)
        working = options.transient_bytes[0][problem]
        sent_bytes = boundary_bytes * self._tables.rates.framework.pipeline.keeps_sent
        room_bytes = self._capacity_bytes - working
        load = self._load(ranks, options, problem, room_bytes, sent_bytes, degree)
        own_bytes = 2.0 * ranks.depths * (degree > 1) * boundary_bytes
        free_bytes = self._capacity_bytes - load.sent * sent_bytes[problem] - own_bytes[problem]
        beside_s, beside_bytes = np.zeros(len(problem)), np.zeros(len(problem))
        starts = np.cumsum(degree) - degree
        for last, kind in enumerate(self._tables.end_kinds):
            if kind is None or kind == self._chain.commonest:
                continue
            at = starts + ranks.ends[:, last]
            figures = costs.figures_of(kind, ranks.holding, of_unit).min(axis=1)
            time_s, stored, resident, transient, kept = figures
            beside_s[at] += time_s
            place = ranks.depths - 1 if last else 0
            # The model's last layer has a micro-batch less while a layer before it acts.
            number = load.alive[place, at] - (load.last_acts[at] if last else 0.0)
            free_bytes[at] -= resident + number * stored + load.waiting[place, at] * kept
            if last:
                beside_bytes[at] = (transient + stored) * load.last_acts[at]
        spread_ = self._spread(
            ranks, options, problem, load, free_bytes - beside_bytes - working, degree
        )
        return Stages(
            counts=degree,
            in_flight=spread_.in_flight,
            waiting=np.zeros(len(problem)),
            each_bytes=spread_.each_bytes,
            free_bytes=free_bytes - spread_.fixed_bytes + load.bare * working,
            beside_s=beside_s,
            beside_transient_bytes=beside_bytes,
        )

    def _load(
        self,
        ranks: _Ranks,
        options: Options,
        problem: Indices,
        room_bytes: Floats,
        sent_bytes: Floats,
        degree: Indices,
    ) -> MemoryMoment:
        """Return the moments that count of all ranks in a row."""
        if ranks.late is ranks.early:
            return ranks.early
        stored = options.stored_bytes
        number = self._chain.counts[self._chain.commonest] / degree
        return binding(
            ranks.early,
            ranks.late,
            room_bytes=room_bytes / number[problem],
            sent_bytes=(sent_bytes / number)[problem],
            resident=options.resident_bytes.min(axis=0)[problem],
            kept=options.kept_bytes.min(axis=0)[problem],
            least_stored=stored.min(axis=0)[problem],
            most_stored=stored.max(axis=0)[problem],
            depths=ranks.depths[problem],
        )

    def _spread(
        self,
        ranks: _Ranks,
        options: Options,
        problem: Indices,
        load: MemoryMoment,
        free_bytes: Floats,
        degree: Indices,
    ) -> StageMemorySpread:
        """[rank] Counts of a rank for its like layers."""
        result = StageMemorySpread(*(np.zeros(len(problem)) for _ in range(3)))
        number = self._chain.counts[self._chain.commonest]
        relieved = (np.cumsum(degree) - degree + ranks.ends[:, 1])[ranks.relieved]
        for virtual in sorted(set(ranks.depths.tolist())):
            at = np.flatnonzero(ranks.depths[problem] == virtual)
            numbers = problem[at]
            stored = options.stored_bytes[:, numbers]
            room = spread.RankMemory(
                alive=load.alive[:virtual, at],
                kept_bytes=options.kept_bytes.min(axis=0)[numbers] * load.waiting[:virtual, at],
                free_bytes=free_bytes[at],
                number=number / degree[numbers],
                least_stored=stored.min(axis=0),
                most_stored=stored.max(axis=0),
                resident=options.resident_bytes.min(axis=0)[numbers],
            )
            even = spread.alike(room)
            if self._like and virtual > 1:
                even = spread.evenly_but(room, np.isin(at, relieved))
            for column, values in zip(result, even, strict=True):
                column[at] = values
        return result

    def _bound_s(
        self,
        options: Options,
        stages: Stages,
        setting: Indices,
        paces: ObjectiveCoefficients,
        added_s: Floats,
    ) -> Floats:
        """[timetable] Least seconds, by the slowest stage and by all of them, at every pace."""
        chain, action_s, ranks = self._chain, self._tables.action_s, stages.counts
        counts = np.array(list(chain.counts.values()), dtype=float)
        fastest_s = chain.fastest_s[:, setting]
        even_s = np.ceil(counts[:, None] / ranks) * fastest_s
        at = list(chain.counts).index(chain.commonest)
        slowest_s, counted_s = capacity_bounds_s(
            options, stages, chain.counts[chain.commonest], even_s[at]
        )
        fits = np.isfinite(counted_s)
        layers_s = np.where(fits, counted_s, 0.0)
        layers_s += np.delete(counts, at) @ np.delete(fastest_s, at, axis=0)
        total_s = layers_s + paces.actions * action_s
        slowest_s = np.maximum(np.where(fits, slowest_s, 0.0), even_s.max(axis=0))
        slowest_s = np.maximum(slowest_s + paces.least_actions * action_s, total_s / ranks)
        once_s = added_s + self._tables.step_s - paces.credited * chain.credits_s[setting]
        bound_s = (paces.steady * slowest_s + paces.fill * total_s) * _BELOW + once_s
        return np.where(fits, bound_s.max(axis=0), np.inf)

    def _by_paths(
        self, options: Options, stages: Stages, ranks: _Ranks, asked: _Asked, limit_s: float
    ) -> Floats:
        """[timetable] Bounds by paths through ranks with whole layers, where they may say more."""
        low_s, count = asked.low_s.copy(), self._chain.counts[self._chain.commonest]
        may = (stages.counts > 1) & (low_s < limit_s) & ~np.isnan(asked.synced_s)
        for degree in sorted(set(stages.counts[may].tolist())):
            at = np.flatnonzero(may & (stages.counts == degree))
            drains = [drained(degree, *asked.timetables[n]) for n in at.tolist()]
            at = at[[drain is not None for drain in drains]]
            if not len(at):
                continue
            chosen = np.zeros(len(stages.counts), dtype=bool)
            chosen[at] = True
            room = Room(options.for_pipelines(at), stages.for_pipelines(chosen), count)
            paths = self._paths(
                room,
                options.time_s[:, at].min(axis=0),
                ranks.depths[at],
                [drain for drain in drains if drain is not None],
                asked.of_problems(at),
                limit_s,
            )
            added_s = asked.added_s[at]
            least_s = paths_s(
                paths, count, (low_s[at] - added_s) * _BELOW, (limit_s - added_s) * _BELOW
            )
            low_s[at] = np.maximum(low_s[at], least_s + added_s)
        return low_s

    def _paths(
        self,
        room: Room,
        fastest_s: Floats,
        depths: Indices,
        drains: Sequence[Drain],
        asked: _Asked,
        limit_s: float,
    ) -> RankPaths:
        """Return what ranks do with n of the commonest layers, for pipelines of one degree."""
        count, degree = self._chain.counts[self._chain.commonest], len(drains[0].summed)
        problem = np.repeat(np.arange(len(drains)), degree)
        first_rank = np.arange(len(drains)) * degree
        summed = np.concatenate([drain.summed for drain in drains])
        most = np.concatenate([drain.most for drain in drains])
        whole = np.concatenate([drain.whole for drain in drains])
        share = np.array([self._tables.action_share(depth) for depth in depths.tolist()])
        actions_s = (share * self._tables.action_s)[problem]
        beside_s = (asked.paces.least_actions[0] * self._tables.action_s)[problem]
        steady, weight_s, depth = asked.paces.steady[0], asked.weights_s[problem], depths[problem]
        synced_s = asked.synced_s[problem]
        each_s = (fastest_s - asked.synced_s / steady)[problem]
        way_layer_s = np.maximum(0.0, each_s - np.where(whole, 0.0, weight_s))
        way_s = 2.0 * actions_s
        way_s[first_rank] -= actions_s[first_rank]
        drained_s = summed * actions_s
        for end, of_end in enumerate(asked.ends):
            if of_end is None:
                continue
            passes_s, end_weight_s = of_end
            at = first_rank + np.array([drain.ends[end] for drain in drains])
            drained_s[at] += most[at] * end_weight_s
            if not end:
                way_s[at] += np.maximum(0.0, passes_s - np.where(whole[at], 0.0, end_weight_s))
        relieved = np.zeros(len(beside_s), dtype=bool)
        relieved[first_rank + np.array([drain.ends[1] for drain in drains])] = True
        least_s = (steady * np.maximum(fastest_s, SLACK)).min()
        alone, behind, way = [], [], []
        for n in range(min(count, int(limit_s / least_s) + 1) + 1):
            seconds = steady[problem] * (room.seconds_of(n) + beside_s)
            evenly = np.minimum(n * most, -(-n // depth) * summed)
            weights = np.where(relieved, n * most, evenly)
            alone.append(seconds)
            behind.append(seconds - n * synced_s - weights * weight_s - drained_s)
            way.append((n // depth) * way_layer_s + way_s)
            way[-1][first_rank] += n * synced_s[first_rank]
        return RankPaths(
            np.full(len(drains), degree), np.array(alone), np.array(behind), np.array(way)
        )


class LayersTogether:
    """Bytes of layers in many layouts, and their seconds without those of sharing."""

    def __init__(
        self,
        tables: CostTables,
        figures: KindFigures,
        layouts: Sequence[Layout],
        losses: Sequence[Sequence[ChunkedLoss | None]],
        settings: Indices,
        recompute: Recomputes,
    ) -> None:
        """`losses` [loss][layout], and `settings` [layout, loss] in the arrays `figures`."""
        self._tables = tables
        self._figures = figures
        self._settings = settings
        self._recompute = recompute
        self._kinds = list(figures)
        self._losses = range(len(losses))
        self._states = tables.states_together(layouts, losses)
        self._once = cast(bool, np.array([layout.micro_batches == 1 for layout in layouts]))
        self._pipelined = cast(bool, np.array([layout.pipeline > 1 for layout in layouts]))
        self._parts: dict[str, list[StrategyParts]] = {}

    def figures_of(self, kind: str, holdings: Indices, layouts: Indices) -> Floats:
        """[figure, choice, place] One kind's `_FIGURES`, for layouts that hold things somehow."""
        if kind not in self._parts:
            self._parts[kind] = list(self._choices_of(kind))
        parts = self._parts[kind]
        result = np.empty((len(_FIGURES), len(parts), len(layouts)))
        some = [(n, np.flatnonzero(holdings == n)) for n in sorted(set(holdings.tolist()))]
        for choice, part in enumerate(parts):
            passes_s = part.forward_s + part.backward_s
            stored = part.stored_bytes
            for number, at in some:
                whole, first = _HELD[number]
                resident = least_resident(
                    part.states, whole=whole, forwards_first=first, once=self._once
                )
                working, kept = part.backward_transient_bytes, part.figures.kept_bytes
                of = layouts[at]
                for row, figure in enumerate((passes_s, stored, resident, working, kept)):
                    result[row, choice, at] = (
                        figure[of] if isinstance(figure, np.ndarray) else figure
                    )
        return result

    def working(self, kind: str) -> Floats:
        """[layout] The least working memory of one kind in its backward."""
        if kind not in self._parts:
            self._parts[kind] = list(self._choices_of(kind))
        of_kinds = [
            np.broadcast_to(part.backward_transient_bytes, (len(self._settings),))
            for part in self._parts[kind]
        ]
        smallest_bytes: Floats = np.min(of_kinds, axis=0)
        return smallest_bytes

    def weights_s(self, kind: str) -> Floats:
        """[layout] The most seconds of the weight gradients of a kind's layer."""
        weights_s: Floats = self.passes_s(kind)[1]
        return weights_s

    def passes_s(self, kind: str) -> Floats:
        """[figure, layout] Least seconds of both passes of a kind's layer, most of its weights."""
        if kind not in self._parts:
            self._parts[kind] = list(self._choices_of(kind))
        shape = (len(self._settings),)
        rows = [
            [
                np.broadcast_to(part.forward_s + part.backward_s, shape)
                for part in self._parts[kind]
            ],
            [np.broadcast_to(part.figures.weight_s, shape) for part in self._parts[kind]],
        ]
        return np.stack([np.min(rows[0], axis=0), np.max(rows[1], axis=0)])

    def on_host(self, kind: str, layouts: Indices) -> Floats:
        """[stored or resident, choice, place] Bytes of one layer of a kind on the host."""
        parts = self._parts[kind]
        result = np.empty((2, len(parts), len(layouts)))
        for choice, part in enumerate(parts):
            for row, figure in enumerate((part.treated.host_bytes, part.states.host_bytes)):
                result[row, choice] = figure[layouts] if isinstance(figure, np.ndarray) else figure
        return result

    def _choices_of(self, kind: str) -> Iterable[StrategyParts]:
        """Yield the choices of a kind; the last layer's under each loss."""
        for place in self._losses if kind == self._tables.model.chain_kinds[-1] else (0,):
            yield from self._of_loss(kind, place)

    def _of_loss(self, kind: str, place: int) -> Iterable[StrategyParts]:
        at = self._kinds.index(kind)
        states = _framework_states([states[at] for states in self._states[place]])
        last = kind == self._tables.end_kinds[1]
        last = last and self._tables.rates.framework.pipeline.keeps_results
        for recompute, many in zip(RECOMPUTES, self._figures[kind], strict=True):
            if recompute not in choices_of(self._recompute, kind):
                continue
            figures = figures_at(many, self._settings[:, place])
            for activations in self._tables.activations:
                passed = figures.passed_bytes(activations) if last else 0.0
                passed = either(self._pipelined, passed, 0.0)
                yield StrategyParts(
                    recompute=recompute,
                    activations=activations,
                    figures=figures,
                    states=states,
                    treated=activation_cost(
                        activations, figures, self._tables.rates, passed=passed
                    ),
                    gather_s=0.0,
                    backward_shard_s=0.0,
                    sync_s=0.0,
                    optimizer_s=0.0,
                )


_HELD = ((False, False), (False, True), (True, False))
"""Ways in which ranks hold states: counted by rank, all forwards first (`least_resident`)."""


def holding_of(layout: Layout) -> int:
    """Return the place in `_HELD` of a layout."""
    whole = counted_by_rank(layout)
    return _HELD.index((whole, layout.executed_schedule.forwards_first and not whole))


_FIGURES = ("time_s", "stored_bytes", "resident_bytes", "transient_bytes", "kept_bytes")

_BELOW = 1.0 - SLACK
"""A bound may not be above what it bounds."""


def _framework_states(states: Sequence[States]) -> States:
    """Return states that are arrays."""
    numbers: dict[tuple[float, ...], int] = {}
    place = np.array([numbers.setdefault(_row(state), len(numbers)) for state in states])
    rows = np.array(list(numbers))
    return States(**dict(zip(_STATES, rows.T[:, place], strict=True)))


_STATES = tuple(field.name for field in fields(States))
_row = attrgetter(*_STATES)


def _loss(family: LayoutFamily, place: int) -> ChunkedLoss | None:
    """Return one of the ways to compute the loss, the last one where there are fewer."""
    return family.losses[min(place, len(family.losses) - 1)]


@lru_cache(maxsize=1 << 12)
def _ranks_of(
    kinds: tuple[str, ...],
    ranks: int,
    micro_batches: int,
    timetables: tuple[Timetable, ...],
    *,
    keeps_sent: bool,
) -> _Ranks:
    """Return how ranks are laden, as in meshwright.planner.search.bounds.memory_bounds."""
    loads = [loads_of(kinds, name, ranks, micro_batches, virtual) for name, virtual in timetables]
    early = MemoryMoment.together([moments[0] for moments in loads])
    late = early
    if any(len(moments) > 1 for moments in loads):
        late = MemoryMoment.together([moments[-1] for moments in loads])
    homes, relieved, holding = [], [], []
    for name, virtual in timetables:
        layout = Layout(pipeline=ranks, schedule=name, virtual_stages=virtual)
        homes.append(rank_of_stage(name, stages=layout.stages, virtual_stages=virtual))
        shares = shares_of(kinds, name, ranks, virtual) if virtual > 1 else None
        relieved.append(shares is not None and shares.is_relieved(homes[-1][-1]))
        holding.append(holding_of(layout))
    depths = np.array([timetable.virtual_stages for timetable in timetables])
    sent = np.array([moments[0].sent.min() for moments in loads]) * keeps_sent
    lowest = (
        np.array([moments[0].alive.min() for moments in loads]),
        sent + 2.0 * depths * (ranks > 1),
    )
    return _Ranks(
        early,
        late,
        depths,
        np.array([(home[0], home[-1]) for home in homes]),
        np.array(relieved),
        np.array(holding),
        np.stack(lowest, axis=1),
    )


def _some(ranks: Sequence[_Ranks], degree: Indices, of_unit: Indices, kept: Indices) -> _Ranks:
    """Return the ranks of the timetables that stay; `of_unit` tells whose each one is."""
    chosen = sorted(set(of_unit[kept].tolist()))  # np.unique would import numpy.ma
    some = [ranks[unit] for unit in chosen]
    here = np.flatnonzero(np.isin(of_unit, chosen))
    stays = np.isin(here, kept)
    at = np.flatnonzero(np.repeat(stays, degree[here]))
    early = MemoryMoment.together([memory.early for memory in some]).of_ranks(at)
    late = early
    if any(memory.late is not memory.early for memory in some):
        late = MemoryMoment.together([memory.late for memory in some]).of_ranks(at)
    return _Ranks(
        early,
        late,
        np.concatenate([memory.depths for memory in some])[stays],
        np.concatenate([memory.ends for memory in some])[stays],
        np.concatenate([memory.relieved for memory in some])[stays],
        np.concatenate([memory.holding for memory in some])[stays],
        np.concatenate([memory.lowest for memory in some])[stays],
    )


def _timetables_of(family: LayoutFamily) -> list[tuple[str, int, int]]:
    """Return the schedules of a family, each with its stages a rank and micro-batches."""
    return [(name, virtual, family.micro_batches) for name, virtual in family.timetables]


@lru_cache(maxsize=1 << 12)
def drained(ranks: int, schedule: str, virtual_stages: int, micro_batches: int) -> Drain | None:
    """Return what stands behind the last ways back; None where ranks begin or end otherwise."""
    if schedule_of(schedule).weight_versions > 1:
        return None
    behind = drained_backwards(schedule, ranks * virtual_stages, virtual_stages, micro_batches)
    if behind is None:
        return None
    number, whole = behind
    home = rank_of_stage(schedule, stages=ranks * virtual_stages, virtual_stages=virtual_stages)
    summed, most = np.zeros(ranks), np.zeros(ranks)
    np.add.at(summed, list(home), number)
    np.maximum.at(most, list(home), number)
    return Drain(summed, most, whole[:ranks], (home[0], home[-1]))
