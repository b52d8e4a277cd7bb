"""Least seconds of many families within memory, under every timetable each may have.

Of a family and one of its sharings, *lean* because it divides states the most, the layers of the
commonest kind are counted as planner.joint.hosting does, beside what surely lies on the ranks of
the model's ends: its first and its last layer, each with the least of every figure.  The other
layers take their fewest seconds anywhere, and no room.  Of a stage's own buffers those of what it
sends and of what is on the way are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.activations import treated
from planner.calibration import taken
from planner.costs import CostTables, counted_by_rank, holding_of
from planner.joint.hosting import Options, Stages, hosted
from planner.layer_figures import KindFigures
from planner.memory import States
from planner.operator_table import RECOMPUTES, either
from planner.pipeline_model import held
from planner.plan import Layout
from planner.profile import Recompute
from planner.ranks import longest_run, shares_of
from planner.schedule import rank_of_stage, splits_backward
from planner.space import Family, Sharing, Timetable
from planner.strategy import Holding, StrategyParts, strategy_cost

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Unit(NamedTuple):
    """Layouts that are looked at together: a family's, of which none holds less than under one
    sharing."""

    family: Family
    leanest: Sharing


class Paces(NamedTuple):
    """[problem] How a timetable turns the seconds of ranks into those of a step.

    `actions` of all ranks and of any at least, which no layer counts; a credit counts `credited`.
    """

    steady: Floats
    fill: Floats
    credited: Floats
    actions: Floats
    least_actions: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers of a model by kind, and the settings that their seconds were worked out in."""

    counts: dict[str, int]
    commonest: str
    figures: KindFigures
    """Arrays [setting]."""
    fastest_s: Floats
    """[kind, setting]"""
    credits_s: Floats
    """[setting] Of all layers."""


class _Shape(NamedTuple):
    """Ranks of a pipeline under each of some timetables: arrays [timetable and rank]."""

    in_flight: Floats
    waiting: Floats
    buffers: Floats
    more_waiting: Floats
    """What may wait beyond its share, times what one like layer keeps."""
    first: Floats
    """1 where the rank has the model's first layer."""
    last: Floats
    holdings: tuple[Holding, ...]
    """[timetable]"""


class Rooms:
    """Bounds on the families of one search."""

    def __init__(
        self,
        tables: CostTables,
        chain: Chain,
        *,
        capacity_bytes: float,
        recompute: Recompute | None,
    ) -> None:
        """`capacity_bytes` are for layers and the pipeline's buffers, on every rank."""
        self._tables = tables
        self._chain = chain
        self._capacity_bytes = capacity_bytes
        self._kinds = tables.model.chain_kinds
        run = longest_run(self._kinds)
        self._like = run is not None and self._kinds[run.before] == chain.commonest
        self._recompute = recompute
        self._shapes: dict[tuple[object, ...], _Shape] = {}

    def least_s(
        self,
        units: Sequence[Unit],
        settings: Indices,
        paces: Paces,
        added_s: Floats,
        seen_s: Floats | None = None,
    ) -> Floats:
        """[timetable of the units in turn] Least seconds of a step; inf where none fits.

        `settings` [unit] are places in the chain's arrays; `added_s` [unit] comes on top of a step,
        `seen_s` [unit, choice] of the passes of one of the commonest layers.
        """
        chain, action_s = self._chain, self._tables.action_s
        shapes = [self._shape(unit.family) for unit in units]
        of_unit = np.repeat(np.arange(len(units)), [len(shape.holdings) for shape in shapes])
        every = [holding for shape in shapes for holding in shape.holdings]
        ranks = np.array([unit.family.degrees.pipeline for unit in units])[of_unit]
        setting = settings[of_unit]

        options, stages = self._problems(units, settings, shapes, of_unit, every, ranks)
        if seen_s is not None:
            options = replace(options, time_s=options.time_s + seen_s[of_unit].T)
        kinds = list(chain.counts)
        counts = np.array(list(chain.counts.values()), dtype=float)
        fastest_s = chain.fastest_s[:, setting]
        even_s = np.ceil(counts[:, None] / ranks) * fastest_s
        at = kinds.index(chain.commonest)
        layers = chain.counts[chain.commonest]
        slowest_s, counted_s = hosted(options, stages, layers, even_s[at])
        total_s = counted_s + np.delete(counts, at) @ np.delete(fastest_s, at, axis=0)
        total_s += paces.actions * action_s
        slowest_s = np.maximum(slowest_s, even_s.max(axis=0)) + paces.least_actions * action_s
        slowest_s = np.maximum(slowest_s, total_s / ranks)
        fits = np.isfinite(counted_s)
        bound_s = np.full(len(of_unit), np.inf)
        once_s = added_s[of_unit] + self._tables.step_s - paces.credited * chain.credits_s[setting]
        steady_s = (paces.steady * np.where(fits, slowest_s, 0.0)) + paces.fill * np.where(
            fits, total_s, 0.0
        )
        bound_s[fits] = (steady_s * _BELOW + once_s)[fits]
        return bound_s

    def _problems(
        self,
        units: Sequence[Unit],
        settings: Indices,
        shapes: Sequence[_Shape],
        of_unit: Indices,
        every: Sequence[Holding],
        ranks: Indices,
    ) -> tuple[Options, Stages]:
        """Return the options of a layer [timetable, choice], and the stages of all timetables."""
        layouts = [_layout(unit) for unit in units]
        names = list(dict.fromkeys(every))
        kinds = dict.fromkeys((self._chain.commonest, *self._tables.end_kinds))
        costs = _Costs(self._tables, self._chain.figures, layouts, settings, self._recompute)
        # [figure, choice, timetable]
        which = np.array([names.index(one) for one in every])
        of_kind = {
            kind: np.stack([costs.of(kind, name) for name in names])[
                which, :, :, of_unit
            ].transpose(1, 2, 0)
            for kind in kinds
            if kind
        }
        figures = of_kind[self._chain.commonest]
        options = Options(**dict(zip(_FIGURES, figures, strict=True)))
        in_flight, waiting, buffers, more, *ends = (
            np.concatenate([shape[column] for shape in shapes]) for column in range(6)
        )
        boundary_bytes = np.array([self._tables.boundary_bytes(layout) for layout in layouts])
        problem = np.repeat(np.arange(len(of_unit)), ranks)
        free_bytes = self._capacity_bytes - buffers * boundary_bytes[of_unit][problem]
        if self._like:
            free_bytes -= more * options.kept_bytes.min(axis=0)[problem]
        beside_s, beside_bytes = np.zeros(len(problem)), np.zeros(len(problem))
        for kind, here in zip(self._tables.end_kinds, ends, strict=True):
            if kind is None or kind == self._chain.commonest:
                continue
            time_s, stored, resident, transient, kept = of_kind[kind].min(axis=1)[:, problem]
            beside_s += here * time_s
            free_bytes -= here * (resident + in_flight * stored + waiting * kept)
            np.maximum(beside_bytes, here * transient, out=beside_bytes)
        return options, Stages(
            counts=ranks,
            in_flight=in_flight,
            waiting=waiting,
            free_bytes=free_bytes,
            beside_s=beside_s,
            beside_transient_bytes=beside_bytes,
        )

    def _shape(self, family: Family) -> _Shape:
        key = (family.degrees.pipeline, family.micro_batches, family.timetables)
        found = self._shapes.get(key)
        if found is None:
            each = [
                _ranks(self._kinds, family.degrees.pipeline, family.micro_batches, timetable)
                for timetable in family.timetables
            ]
            in_flight, waiting, buffers, more, first, last = (
                np.concatenate(column) for column in zip(*each, strict=True)
            )
            holdings = tuple(
                holding_of(family.layout(family.sharings[0], timetable))
                for timetable in family.timetables
            )
            found = self._shapes[key] = _Shape(
                in_flight, waiting, buffers, more, first, last, holdings
            )
        return found


class _Costs:
    """What layers hold in many layouts, and their seconds without those of sharing."""

    def __init__(
        self,
        tables: CostTables,
        figures: KindFigures,
        layouts: Sequence[Layout],
        settings: Indices,
        recompute: Recompute | None,
    ) -> None:
        self._tables = tables
        self._figures = figures
        self._settings = settings
        self._recompute = recompute
        self._kinds = list(figures)
        self._states = [tables.states(layout) for layout in layouts]
        self._once = cast(bool, np.array([layout.micro_batches == 1 for layout in layouts]))
        self._pipelined = cast(bool, np.array([layout.pipeline > 1 for layout in layouts]))
        self._parts: dict[str, list[StrategyParts]] = {}

    def of(self, kind: str, holding: Holding) -> Floats:
        """[figure, choice, layout] One kind's `_FIGURES`."""
        if kind not in self._parts:
            self._parts[kind] = list(self._of(kind))
        parts = self._parts[kind]
        result = np.empty((len(_FIGURES), len(parts), len(self._states)))
        for choice, part in enumerate(parts):
            cost = strategy_cost(
                part,
                neighbour_bytes=0.0,
                action_s=0.0,
                holding=holding,
                last=kind == self._tables.end_kinds[1],
                once=self._once,
            )
            result[0, choice] = cost.forward_s + cost.backward_s
            result[1, choice] = cost.stored_bytes
            result[2, choice] = cost.resident_bytes
            result[3, choice] = cost.transient_bytes
            result[4, choice] = part.figures.kept_bytes
        return result

    def _of(self, kind: str) -> Iterable[StrategyParts]:
        at = self._kinds.index(kind)
        states = _stacked([states[at] for states in self._states])
        last = kind == self._tables.end_kinds[1]
        for recompute, many in zip(RECOMPUTES, self._figures[kind], strict=True):
            if self._recompute not in (None, recompute):
                continue
            figures = taken(many, self._settings)
            passed = either(self._pipelined, figures.returned_bytes, 0.0) if last else 0.0
            for activations in self._tables.activations:
                yield StrategyParts(
                    recompute=recompute,
                    activations=activations,
                    figures=figures,
                    states=states,
                    treated=treated(activations, figures, self._tables.rates, passed=passed),
                    gather_s=0.0,
                    backward_shard_s=0.0,
                    sync_s=0.0,
                    optimizer_s=0.0,
                )


def costs_together(
    tables: CostTables,
    figures: KindFigures,
    layouts: Sequence[Layout],
    kind: str,
    recompute: Recompute | None = None,
) -> Floats:
    """[figure, choice, layout] Seconds, stored, resident, transient and kept bytes of one kind.

    Each layout holds things as its own timetable does; `figures` are arrays [layout].
    """
    every = np.arange(len(layouts))
    costs = _Costs(tables, figures, layouts, every, recompute)
    holdings = [holding_of(layout) for layout in layouts]
    of_each = {name: costs.of(kind, name) for name in dict.fromkeys(holdings)}
    return np.stack([of_each[name][:, :, at] for at, name in enumerate(holdings)], axis=-1)


_FIGURES = ("time_s", "stored_bytes", "resident_bytes", "transient_bytes", "kept_bytes")

_BELOW = 1.0 - 1e-9
"""Sums in another order differ in the last bits, and a bound may not be above what it bounds."""


def _stacked(states: Sequence[States]) -> States:
    """Return states that are arrays."""
    numbers: dict[int, int] = {}
    place = np.array([numbers.setdefault(id(one), len(numbers)) for one in states])
    some = {id(one): one for one in states}
    each = [some[key] for key in numbers]
    columns = ([getattr(one, name) for one in each] for name in _STATES)
    arrays = (np.array(column)[place] for column in columns)
    return States(**dict(zip(_STATES, arrays, strict=True)))


_STATES = tuple(field.name for field in fields(States))


def _layout(unit: Unit) -> Layout:
    """Return a layout of the unit; what it holds is the same under every timetable."""
    return unit.family.layout(unit.leanest, Timetable())


def _ranks(
    kinds: tuple[str, ...], ranks: int, micro_batches: int, timetable: Timetable
) -> tuple[Floats, ...]:
    """[rank] The columns of `_Shape`, as planner.formulation and planner.rank_problem have them."""
    name, virtual = timetable
    none = np.zeros(ranks)
    if ranks == 1:
        return none + 1.0, none, none, none, none + 1.0, none + 1.0
    each = [
        held(name, rank, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
        for rank in range(ranks)
    ]
    alive = np.array([float(one.alive) for one in each])
    at = np.arange(ranks)
    home = rank_of_stage(name, stages=ranks * virtual, virtual_stages=virtual)
    first, last = (at == home[0]).astype(float), (at == home[-1]).astype(float)
    if not counted_by_rank(Layout(pipeline=ranks, schedule=name, virtual_stages=virtual)):
        return alive, none, np.where(at < ranks - 1, alive, 0.0) + 2.0, none, first, last
    waiting = np.array([float(one.waiting) for one in each])
    if not splits_backward(name):
        waiting = none
    shares = shares_of(kinds, name, ranks, virtual) if virtual > 1 else None
    full = np.array([float(shares.full_stages(rank)) if shares else 1.0 for rank in range(ranks)])
    more = waiting * (full - 1) / full
    return alive / full, waiting / full, alive + 2.0 * virtual, more, first, last
