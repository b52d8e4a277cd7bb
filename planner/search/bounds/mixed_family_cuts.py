"""Lower bound of all layouts of one timetable on devices that differ, whatever they choose beside.

Layouts with the same degrees, micro-batches and schedule differ in how states are shared and saved,
in how the loss is computed and in what is compiled.  One chain stands for all of them: each of its
layers has the options of every layout, and memory the most room of any.  On group g a rank with n
like layers takes at least, by sums of bytes,

    f(n) = min Σ_o n_o t_o      Σ_o n_o = n,   Σ_o n_o b_ro <= room_r - (the least of its others)

for integers n_o, or for fractions where there are many ways; what it has beside like layers takes
its least seconds and its least bytes.  These ranks' paths bound every cut, in any order of groups
(`planner.search.bounds.simulated_cuts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layer_strategy import choices_of
from meshwright.planner.costs.memory.rank_memory import room_bytes
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.frameworks.native_limits import layer_obstacle
from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.search.bounds.memory_bounds import BytesBounds, RankBytes
from meshwright.planner.search.bounds.simulated_cuts import (
    RankWays,
    cuts_bound_s,
    drained_backwards,
)
from meshwright.planner.search.bounds.simulated_mixed_devices import LayerPasses, WholeLayers
from meshwright.planner.search.bounds.simulated_optimum import minimal_rows, option_counts
from meshwright.planner.search.partition.stage_counts import longest_run, shares_of
from meshwright.planner.solver.partition_problem import Option

if TYPE_CHECKING:
    from meshwright.planner.costs.layer_strategy import StrategyParts
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
    from meshwright.planner.search.partition.stage_counts import Shares
    from meshwright.planner.search.space import LayoutFamily

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MOST_WAYS = 1_000
"""Ways in which the like layers of a rank may choose options, that are gone through."""


class OptionsOfAll(NamedTuple):
    """Options of the layouts of one timetable on a group, and the room that the roomiest has."""

    parts: dict[str, tuple[StrategyParts, ...]]
    """By kind, those that no other is as good as."""
    input_s: dict[str, float]
    """By kind, least seconds of a forward and of the part of its backward that others wait for."""
    weight_s: dict[str, float]
    """By kind, most seconds of the gradients of weights."""
    sync_s: dict[str, float]
    """By kind, the least of any option, as the next."""
    update_s: dict[str, float]
    room_bytes: float
    costs: LayoutCosts


@dataclass(frozen=True, slots=True, eq=False)
class RankSpans:
    """[span] What a rank may hold, between two places of the chain in the order of ranks."""

    first: Indices
    end: Indices
    like: Indices
    """Like layers in it."""
    has_end: NDArray[np.bool_]
    """[entry, span] Whether it has an entry that is none of the like ones."""
    sizes: Floats
    """[span, stage of the rank] Like layers on each of its stages."""
    stages: list[int]
    ends_joined: int
    """Ends of its stages that meet another rank, as the next."""
    ends_of_first: int
    """Those of its first stage."""

    def spans_up_to(self, most_like: float) -> RankSpans:
        """Return those with no more like layers than some number."""
        if most_like >= self.like.max(initial=0):
            return self
        some = np.flatnonzero(self.like <= most_like)
        return replace(
            self,
            first=self.first[some],
            end=self.end[some],
            like=self.like[some],
            has_end=self.has_end[:, some],
            sizes=self.sizes[some],
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChainShape:
    """What layouts have in common that share a chain among ranks and stages alike."""

    chain: tuple[str, ...]
    like: int
    """Position of one of the like layers."""
    shares: Shares | None
    ends: tuple[tuple[int, ...], ...]
    """Positions of the layers of each entry that is none of the like ones."""
    ranks: tuple[RankSpans, ...]

    @classmethod
    def from_layout(cls, chain: tuple[str, ...], layout: Layout) -> ChainShape | None:
        """Read that of a layout; None if too little of the chain is alike."""
        run, virtual = longest_run(chain), layout.virtual_stages
        shares = shares_of(chain, layout.schedule, layout.pipeline, virtual)
        if run is None or (virtual > 1 and shares is None):
            return None
        shares = shares if virtual > 1 else None
        home = rank_of_stage(layout.schedule, stages=layout.stages, virtual_stages=virtual)
        entries = [(at,) for at in range(len(chain))] if shares is None else shares.entries
        before = len(entries) - run.alike if shares is not None and shares.folded else run.before
        like = range(before, before + run.alike)
        ends = np.array([at for at in range(len(entries)) if at not in like], dtype=np.intp)
        ranks = []
        for rank in range(layout.pipeline):
            first, end = _spans(len(entries), rank, layout.pipeline, shares)
            number = np.maximum(0, np.minimum(end, like.stop) - np.maximum(first, like.start))
            stages = [stage for stage, other in enumerate(home) if other == rank]
            joined = [
                sum(other != rank for other in (*home[:stage][-1:], *home[stage + 1 :][:1]))
                for stage in stages
            ]
            ranks.append(
                RankSpans(
                    first=first,
                    end=end,
                    like=number,
                    has_end=(first <= ends[:, None]) & (ends[:, None] < end),
                    sizes=_sizes(shares, rank, number),
                    stages=stages,
                    ends_joined=sum(joined),
                    ends_of_first=joined[0],
                )
            )
        return cls(chain, run.before, shares, tuple(entries[at] for at in ends), tuple(ranks))


class FamilyCuts:
    """Bounds of the layouts of one timetable on some groups, each used whole."""

    def __init__(self, candidates: GroupCandidates) -> None:
        self._candidates = candidates
        self._kin: dict[tuple[object, ...], list[LayoutFamily]] = {}
        """Families by degrees, micro-batch and timetable."""
        self._known_s: dict[tuple[object, ...], float] = {}
        self._parts_s: dict[tuple[object, ...], float] = {}
        """Bounds of parts of one sharing, of any loss."""
        self._options: dict[tuple[object, ...], OptionsOfAll] = {}
        self._shapes: dict[tuple[str, int, int], ChainShape | None] = {}
        self._sent_s: dict[tuple[object, ...], float] = {}

    def group_kin(self, families: Iterable[LayoutFamily]) -> None:
        """Let these be all families of one timetable each."""
        self._kin = {}
        for family in families:
            self._kin.setdefault(kin_of(family), []).append(family)

    @property
    def kin(self) -> Sequence[Sequence[LayoutFamily]]:
        """Families of every timetable."""
        return list(self._kin.values())

    def has_bound(self, family: LayoutFamily) -> bool:
        """Return whether the layouts with a family's timetable are bounded."""
        return kin_of(family) in self._known_s

    def kin_bound_s(self, family: LayoutFamily, limit_s: float) -> float:
        """Return seconds that no layout with a family's timetable simulates below.

        That is what was found at first, by a limit that may have been another.
        """
        key = kin_of(family)
        if key not in self._known_s:
            self._known_s[key] = self.bound_s(self._kin[key], limit_s)
        return self._known_s[key]

    def part_bound_s(self, part: LayoutFamily, limit_s: float) -> float:
        """Return seconds that no layout of a family's part simulates below, whatever its loss."""
        key = kin_of(part), *_choices(part.part(losses=()))
        if key not in self._parts_s:
            alike = _choices(part.part(losses=(), sharings=(), savings=()))
            self._parts_s[key] = self.bound_s(
                [
                    family.part(sharings=part.sharings, savings=part.savings)
                    for family in self._kin[kin_of(part)]
                    if _choices(family.part(losses=(), sharings=(), savings=())) == alike
                ],
                limit_s,
            )
        return self._parts_s[key]

    def bound_s(self, families: Sequence[LayoutFamily], limit_s: float) -> float:
        """Return seconds that no layout of some families simulates below, or the limit.

        The families have one timetable, degrees and micro-batches.  0 where nothing is known.
        """
        families = _join_losses(families)
        layout = families[0].first
        shape = self._shape(layout)
        if shape is None:
            return 0.0
        costs = self._candidates.group_costs
        numbers = costs.stages_of(layout)
        step_s = min(table.step_s for table in costs.tables.values())
        if not self._fastest_ranks(families, shape, tuple(numbers.values())).are_enough(
            limit_s - step_s
        ):
            return limit_s
        sent_s = min(map(self._shortest_s, families))
        of_groups = [self._options_of(name, families) for name in numbers]
        columns: list[RankWays] = []
        for number, of_all in enumerate(of_groups):
            columns += _columns(shape, layout, number, of_all, limit_s - step_s, sent_s)
        together = _join_ranks(columns, layout.pipeline, tuple(numbers.values()))
        if together is None:
            return limit_s
        hidden_s = (1 - of_all.costs.waits) * sent_s
        return min(limit_s, cuts_bound_s(layout, together, hidden_s, limit_s - step_s) + step_s)

    def _fastest_ranks(
        self, families: Sequence[LayoutFamily], shape: ChainShape, numbers: tuple[int, ...]
    ) -> WholeLayers:
        """Return the ranks of each group with their fastest options, nothing shared, in any memory.

        A first forward that no backward follows counts nothing.
        """
        layout, kinds = families[0].first, list(dict.fromkeys(shape.chain))
        every = [
            self._candidates.passes_s(replace(family.first, loss=loss))[0]
            for family in families
            for loss in family.losses
        ]
        like, last = kinds.index(shape.chain[shape.like]), kinds.index(shape.chain[-1])
        time_s = np.min(every, axis=0)
        first_s = 0.0 * time_s if layout.executed_schedule.splits_backward else time_s
        seconds = LayerPasses.from_seconds(layout.micro_batches * time_s, first_s, like, last)
        return WholeLayers(
            numbers=numbers,
            room=[math.inf] * len(numbers),
            passes=(seconds, seconds),
            virtual_stages=layout.virtual_stages,
            folded=layout.executed_schedule.placement == "v",
            layers=shape.chain.count(shape.chain[shape.like]),
        )

    def _shape(self, layout: Layout) -> ChainShape | None:
        """Return what the ranks of a layout have in common; None where no bound is known."""
        model = self._candidates.model
        if layout.pipeline == 1 or model.edges or self._candidates.pins.require:
            return None
        key = layout.schedule, layout.pipeline, layout.virtual_stages
        if key not in self._shapes:
            self._shapes[key] = ChainShape.from_layout(tuple(model.chain_kinds), layout)
        return self._shapes[key]

    def _shortest_s(self, family: LayoutFamily) -> float:
        """Return the least seconds of a transfer between two ranks."""
        key = family.degrees, family.micro_batch, family.sequence_parallel
        if key not in self._sent_s:
            costs, layout = self._candidates.group_costs, family.first
            self._sent_s[key] = min(
                costs.crossing_s(layout, a, b) for a in costs.tables for b in costs.tables
            )
        return self._sent_s[key]

    def _options_of(self, name: str, families: Sequence[LayoutFamily]) -> OptionsOfAll:
        """Return the options of all layouts of some families on a group."""
        tables = self._candidates.group_costs.tables[name]
        first = families[0].first
        schedule = first.executed_schedule
        key = (
            name,
            tables.action_share(first.virtual_stages),
            families[0].degrees,
            families[0].micro_batch,
            families[0].micro_batches,
            schedule.forwards_first,
            schedule.splits_backward,
            first.virtual_stages > 1,
            *(_choices(family) for family in families),
        )
        if key not in self._options:
            self._options[key] = self._merge_options(name, families)
        return self._options[key]

    def _merge_options(self, name: str, families: Sequence[LayoutFamily]) -> OptionsOfAll:
        candidates = self._candidates
        tables = candidates.group_costs.tables[name]
        [group] = [group for group in candidates.cluster.groups if group.name == name]
        every: dict[str, dict[int, StrategyParts]] = {}
        most_bytes, roomiest = -math.inf, tables.costs_of(families[0].first)
        crossing_bytes = roomiest.boundary_bytes
        head = candidates.model.chain_kinds[-1]
        for family in families:
            for layout in family.part(losses=family.losses[:1]).layouts():
                costs = tables.costs_of(layout)
                room = room_bytes(group.accelerator.memory_bytes, costs)
                if room > most_bytes:
                    most_bytes, roomiest = room, costs
                crossing_bytes = min(crossing_bytes, costs.boundary_bytes)
                choices = list(costs.parts.items())
                # Ways to compute the loss differ in the last layer alone.
                for loss in family.losses[1:]:
                    parts = tables.parts(head, replace(layout, loss=loss), linked=True)
                    choices.append((head, parts))
                for kind, parts in choices:
                    recomputes = choices_of(candidates.recompute, kind)
                    every.setdefault(kind, {}).update(
                        (id(part), part)
                        for part in parts
                        if part.recompute in recomputes
                        and not layer_obstacle(layout, part.recompute, part.activations)
                    )
        options = {kind: tuple(of_kind.values()) for kind, of_kind in every.items()}
        splits = families[0].first.executed_schedule.splits_backward
        return OptionsOfAll(
            parts={kind: _minimal_options(of_kind) for kind, of_kind in options.items()},
            input_s=_least_of_kinds(
                options,
                lambda part: (
                    part.forward_s + part.backward_s - (part.figures.weight_s if splits else 0.0)
                ),
            ),
            weight_s={
                kind: max(part.figures.weight_s for part in of_kind)
                for kind, of_kind in options.items()
            },
            sync_s=_least_of_kinds(options, lambda part: part.sync_s),
            update_s=_least_of_kinds(options, lambda part: part.optimizer_s + part.stream_s),
            room_bytes=most_bytes,
            costs=replace(roomiest, boundary_bytes=crossing_bytes),
        )


def _columns(
    shape: ChainShape,
    layout: Layout,
    number: int,
    of_all: OptionsOfAll,
    room_s: float,
    sent_s: float,
) -> list[RankWays]:
    """Return what each rank may hold on a group, within the seconds that a step leaves."""
    bounds = BytesBounds(
        shape.chain, shape.shares, of_all.costs, layout, of_all.parts, of_all.room_bytes
    )
    like_kind = shape.chain[shape.like]
    like = [_option(bounds, shape.like, part) for part in of_all.parts[like_kind]]
    like_s = np.array([option.time_s for option in like])
    # Of each entry at an end, what each of its layers may be.
    ends = [
        [[_option(bounds, at, part) for part in of_all.parts[shape.chain[at]]] for at in entry]
        for entry in shape.ends
    ]
    end_s = np.array([sum(min(o.time_s for o in row) for row in rows) for rows in ends])
    drain = drained_backwards(
        layout.executed_schedule.name, layout.stages, layout.virtual_stages, layout.micro_batches
    )
    splits, count = layout.executed_schedule.splits_backward, layout.micro_batches
    action_s, waits_s = of_all.costs.action_s, of_all.costs.waits * sent_s
    capacity = of_all.room_bytes * (1 + ROUNDING)
    # Working memory of one of a rank's like layers, the least of any option.
    working = min(option.transient_bytes for option in like)
    result = []
    most_like = room_s / (count * like_s.min()) * (1 + ROUNDING) if like_s.min() else math.inf
    for rank, (every, memory) in enumerate(zip(shape.ranks, bounds.ranks, strict=True)):
        spans = every.spans_up_to(most_like)
        summed = partial(_summed_bytes, memory)
        each_bytes = np.array([summed(option) for option in like])
        end_bytes = np.array([sum(min(map(summed, row)) for row in rows) for rows in ends])
        free = capacity - memory.fixed_bytes - end_bytes @ spans.has_end
        passes_s = _fastest_s(
            spans.like, free - (spans.like > 0) * working, like_s, each_bytes, room_s / count
        )
        passes_s += end_s @ spans.has_end
        passes_s += layout.virtual_stages * (2 + splits) * action_s + waits_s * spans.ends_joined

        total = partial(_sum_of_layers, shape, spans)
        sync_s, update_s = total(of_all.sync_s), total(of_all.update_s)
        own_s, straight_s = count * passes_s, np.zeros(len(passes_s))
        if drain is not None:
            behind = drain[0][spans.stages]
            straight_s = of_all.input_s[like_kind] * spans.sizes[:, 0]
            straight_s += 2 * action_s + waits_s * spans.ends_of_first
            if splits:
                of_ends = total(of_all.weight_s) - of_all.weight_s[like_kind] * spans.like
                weights_s = of_all.weight_s[like_kind] * spans.sizes @ behind
                weights_s += action_s * behind.sum() + of_ends * behind.max()
                own_s = own_s - weights_s
            if layout.virtual_stages == 1:
                back_s = total(of_all.weight_s) + action_s if splits else 0.0
                straight_s = np.maximum(straight_s, passes_s - back_s)
        kept = count * passes_s + sync_s <= room_s * (1 + ROUNDING)
        columns = int(kept.sum())
        result.append(
            RankWays(
                rank=np.full(columns, rank),
                first=spans.first[kept],
                end=spans.end[kept],
                number=np.full(columns, number),
                passes_s=passes_s[kept],
                own_s=own_s[kept],
                straight_s=straight_s[kept],
                sync_s=sync_s[kept],
                update_s=update_s[kept],
                hop_s=np.zeros(columns),
                numbers=(),
                passes_on=drain is not None,
            )
        )
    return result


def _summed_bytes(memory: RankBytes, option: Option) -> float:
    """Return the bytes of a layer on a rank that add up."""
    stored = memory.in_flight * option.stored_bytes + memory.waiting * option.kept_bytes
    return option.resident_bytes + stored


def _sum_of_layers(shape: ChainShape, spans: RankSpans, figure: dict[str, float]) -> Floats:
    """[span] Sum of a figure [kind] over all layers."""
    ends = np.array([sum(figure[shape.chain[at]] for at in entry) for entry in shape.ends])
    total: Floats = figure[shape.chain[shape.like]] * spans.like + ends @ spans.has_end
    return total


def _join_losses(families: Sequence[LayoutFamily]) -> list[LayoutFamily]:
    """Return families with those as one that differ in how they compute the loss alone."""
    joined: dict[tuple[object, ...], LayoutFamily] = {}
    for family in families:
        key = _choices(family.part(losses=()))
        before = joined[key].losses if key in joined else ()
        joined[key] = family.part(losses=(*before, *family.losses))
    return list(joined.values())


def kin_of(family: LayoutFamily) -> tuple[object, ...]:
    """Return what families have in common that are bounded together."""
    return family.degrees, family.micro_batch, family.timetables


def _choices(family: LayoutFamily) -> tuple[object, ...]:
    """Return what a family's options depend on, beside degrees and micro-batches."""
    return (
        family.sharings,
        family.savings,
        family.losses,
        family.place,
        family.sequence_parallel,
        family.compile,
        family.tensor_overlap,
        family.graphs,
        family.weight_gather_dtype,
    )


def _least_of_kinds(
    parts: dict[str, tuple[StrategyParts, ...]], figure: Callable[[StrategyParts], float]
) -> dict[str, float]:
    return {kind: min(map(figure, of_kind)) for kind, of_kind in parts.items()}


def _minimal_options(parts: Iterable[StrategyParts]) -> tuple[StrategyParts, ...]:
    """Return the options than which no other is as fast with as few bytes of every sort."""
    figures = {}
    for part in parts:
        states = part.states
        figures[
            part.forward_s + part.backward_s,
            part.stored_bytes,
            part.figures.kept_bytes,
            states.parameters_bytes,
            states.gathered_bytes,
            states.gradients_bytes,
            states.gradient_buffers_bytes,
            states.optimizer_bytes,
            part.backward_transient_bytes,
            not part.stores_input,
        ] = part
    distinct = list(figures.values())
    return tuple(distinct[at] for at in minimal_rows(list(figures)))


def _option(bounds: BytesBounds, at: int, part: StrategyParts) -> Option:
    """Return an option of a layer of the chain with the bytes that it has at least."""
    plain = Option(name="", forward_s=part.forward_s, backward_s=part.backward_s)
    return bounds.option(at, plain, part)


def _spans(entries: int, rank: int, ranks: int, shares: Shares | None) -> tuple[Indices, Indices]:
    """Return where a rank's entries may begin and end."""
    fewest = [1] * ranks if shares is None else shares.fewest_entries
    firsts = np.arange(sum(fewest[:rank]), (0 if rank == 0 else entries) + 1)
    lasts = np.arange(entries if rank == ranks - 1 else 0, entries - sum(fewest[rank + 1 :]) + 1)
    first, end = (axis.ravel() for axis in np.meshgrid(firsts, lasts, indexing="ij"))
    enough = end - first >= fewest[rank]
    return first[enough], end[enough]


def _sizes(shares: Shares | None, rank: int, like: Indices) -> Floats:
    """[span, stage of the rank] Like layers on each of its stages."""
    if shares is None:
        return like[:, None].astype(float)
    every = [shares.sizes(rank, number) for number in range(int(like.max(initial=0)) + 1)]
    return np.array(every, dtype=float)[like]


def _fastest_s(
    like: Indices, free: Floats, like_s: Floats, each_bytes: Floats, most_s: float
) -> Floats:
    """[span] Least seconds of its like layers within its free bytes; inf if none fits."""
    kept = _falling_bytes(like_s, each_bytes)
    seconds, sizes = like_s[kept], each_bytes[kept]
    result = np.where(like * sizes[0] <= free, like * seconds[0], np.inf)
    rest = np.isinf(result) & (like * sizes[-1] <= free) & (like * seconds[0] <= most_s)
    for number in np.unique(like[rest]).tolist():
        some = rest & (like == number)
        if math.comb(number + len(kept) - 1, number) <= MOST_WAYS:
            ways = option_counts(number, len(kept))
            uses = ways @ sizes
            order = np.argsort(uses, kind="stable")
            fastest_s = np.minimum.accumulate((ways @ seconds)[order])
            result[some] = fastest_s[np.searchsorted(uses[order], free[some], "right") - 1]
        else:
            hull = _hull(seconds, sizes)
            each_s = np.interp(free[some] / number, sizes[hull], seconds[hull])
            result[some] = number * each_s
    return result


def _falling_bytes(seconds: Floats, sizes: Floats) -> list[int]:
    """Return the options with fewer bytes than all that are as fast, the fastest first.

    >>> _falling_bytes(np.array([2.0, 1.0, 3.0, 4.0]), np.array([5.0, 9.0, 6.0, 1.0]))
    [1, 0, 3]
    """
    kept: list[int] = []
    for at in np.lexsort((sizes, seconds)).tolist():
        if not kept or sizes[at] < sizes[kept[-1]]:
            kept.append(at)
    return kept


def _hull(seconds: Floats, sizes: Floats) -> list[int]:
    """Return the options that no mixture of others is faster than, those with least bytes first.

    Seconds rise and bytes fall.

    >>> _hull(np.array([1.0, 2.9, 3.0]), np.array([9.0, 5.0, 1.0]))
    [2, 0]
    """
    hull: list[int] = []
    for at in reversed(range(len(seconds))):
        while len(hull) > 1:
            a, b = hull[-2:]
            past = (seconds[b] - seconds[a]) * (sizes[at] - sizes[a])
            if past < (seconds[at] - seconds[a]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(at)
    return hull


def _join_ranks(
    columns: Sequence[RankWays], ranks: int, numbers: tuple[int, ...]
) -> RankWays | None:
    """Return the columns of all ranks on all types; None where a rank has none."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in columns]) for name in _OF_COLUMNS
    }
    if len(np.unique(arrays["rank"])) < ranks:
        return None
    return replace(columns[0], **arrays, numbers=numbers)


_OF_COLUMNS = tuple(
    field.name for field in fields(RankWays) if field.name not in ("numbers", "passes_on")
)
