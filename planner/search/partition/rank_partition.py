"""The partition problem of the ranks of a pipeline, each with the layers of all its stages.

Bytes are counted as a split has them (planner.costs.memory.rank_memory), with sums over layers that
are no more (meshwright.planner.search.bounds.memory_bounds).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.cut_tensors import readers_of
from meshwright.planner.costs.layer_strategy import (
    LayerBytes,
    Recomputes,
    StrategyCost,
    StrategyParts,
)
from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank
from meshwright.planner.costs.memory.rank_memory import (
    StageBytes,
    StageTraffic,
    dynamic_parts,
    in_flight_at_most,
    parts_of_several,
    stage_bytes,
)
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.closed_form import (
    InFlightCounts,
    in_flight_counts,
    most_on_first_stage,
)
from meshwright.planner.schedules.schedule import splits_backward
from meshwright.planner.search.bounds.memory_bounds import BytesBounds
from meshwright.planner.search.partition.layer_options import allowed_places, option_of
from meshwright.planner.search.partition.stage_counts import Shares, shares_of
from meshwright.planner.solver.nonadditive_stage import ANY_OPTION
from meshwright.planner.solver.partition_problem import (
    Instance,
    Option,
    Solution,
    StageLimits,
    UsedBytes,
)

if TYPE_CHECKING:
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Pair = tuple[StrategyCost, StrategyParts]
_MOVING = LayerBytes._fields.index("moving")
_OF_ONE = np.array(
    [
        name in ("forward", "backward", "input", "moving", "bucket", "offloaded", "receives")
        for name in LayerBytes._fields
    ]
)[:, None]
"""[field of `LayerBytes`, 1] True where several layers have as much as one, not the sum."""
Placed = tuple[int, int]
"""Position in the chain, choice."""


class RankProblem:
    """One layout's problem, and how to read its solution."""

    def __init__(
        self,
        model: ModelGraph,
        layout: Layout,
        costs: LayoutCosts,
        recompute: Recomputes,
        *,
        every: bool = False,
    ) -> None:
        """Leave out choices that are no better than others, unless `every` one is to be offered."""
        self.model = model
        self.layout = layout
        self.costs = costs
        self._recompute, self._every = recompute, every
        self._chain = model.chain_kinds
        self._pairs: dict[str, list[Pair]] = {}
        self._shares: Shares | None = None
        self._bytes: dict[str, list[LayerBytes]] = {}
        self._fields: dict[str, Floats] = {}
        """[kind][field, choice] The same as arrays."""
        self._used: dict[tuple[int, int, tuple[int, ...]], float] = {}
        self._bytes_by_stage: dict[tuple[bool, bool, tuple[tuple[int, int], ...]], StageBytes] = {}
        """By whether it is the first, the last, and its layers."""
        self._products: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self._crossing = Crossing(model, costs.output_bytes) if model.edges else None
        if layout.virtual_stages > 1:
            self._shares = shares_of(
                self._chain, layout.schedule, layout.pipeline, layout.virtual_stages
            )
            if self._shares is None:
                raise DocumentError(
                    "virtual_stages",
                    f"is {layout.virtual_stages}; {model.name} has no run of like layers that "
                    f"{layout.stages} stages could share evenly: use 1",
                )

    def instance(
        self,
        capacity_bytes: float,
        *,
        steady: float,
        fill: float,
        exposed_s: list[float],
        forward_apart: bool = False,
    ) -> Instance:
        """Return the problem with the bytes of splits, and sums that are no more."""
        layers, groups = self._entries()
        choices = {kind: [part for _, part in self._pairs_of(kind)] for kind in set(self._chain)}
        bounds = BytesBounds(
            self._chain,
            self._shares,
            self.costs,
            self.layout,
            choices,
            capacity_bytes,
            None if self._crossing is None else self.costs.narrowest_bytes,
        )
        credits_s = [sum(self._credit_s(self._chain[at]) for at in group) for group in groups]
        return Instance(
            layers=tuple(layers),
            kinds=tuple(self._table(group, bounds.option) for group in groups),
            stages=tuple(
                StageLimits(
                    capacity_bytes=capacity_bytes,
                    in_flight=of_rank.in_flight,
                    waiting=of_rank.waiting,
                    exposed_s=exposed_s[rank],
                    fixed_bytes=of_rank.fixed_bytes,
                    least_layers=self._shares.fewest_entries[rank] if self._shares else 1,
                    most_in_flight=self._on_host(rank),
                )
                for rank, of_rank in enumerate(bounds.ranks)
            ),
            steady=steady,
            fill=fill,
            forward_apart=forward_apart,
            credits_s=tuple(fill * credit for credit in credits_s) if self._splits else (),
            used_bytes=UsedBytes(
                self.used_bytes,
                by_place=self._crossing is not None,
                of_many=self.used_by_many,
                fewest=self.fewest_bytes,
                grows=self._crossing is None,
            ),
        )

    def used_bytes(
        self, rank: int, before: Sequence[int], stage_layers: Sequence[int], options: Sequence[int]
    ) -> float:
        """Return what a rank has with these options of some entries, behind those `before`."""
        if self._crossing is not None:
            layers = [
                self._bytes_of(at)[option] for at, option in zip(stage_layers, options, strict=True)
            ]
            passing = self._crossing.passing(before, stage_layers)
            parts = dynamic_parts(
                self.costs, self.layout, {rank: layers}, rank=rank, passing=passing
            )
            return sum(parts.values())
        first = stage_layers[0]
        key = rank, first, tuple(options)
        used_bytes = self._used.get(key)
        if used_bytes is None:
            used_bytes = self._used[key] = sum(self._parts_of(rank, first, options).values())
        return used_bytes

    def used_by_many(
        self, rank: int, before: Sequence[int], layers: Sequence[int], options: Indices
    ) -> Floats:
        """[way] The same of many ways at once, up to rounding; `options` are [way, entry].

        An entry with ANY_OPTION has the least of every figure of its options.
        """
        passing = None if self._crossing is None else self._crossing.passing(before, layers)
        if self._shares is None:
            stages = {rank: self._bytes_of_many(layers, options)}
        else:
            entries = range(layers[0], layers[0] + len(layers))
            stages = self._many_on(self._shares, rank, entries, options)
        parts = dynamic_parts(self.costs, self.layout, stages, rank=rank, passing=passing)
        return np.broadcast_to(sum(parts.values()), len(options))

    def fewest_bytes(self, rank: int, before: Sequence[int], layers: Sequence[int]) -> float:
        """Return bytes that a rank has at least with some entries, whatever their options.

        A peak is no less than with one layer under its own choice and all others at the least of
        every figure.  Whichever layer that is, it has one of its choices.
        """
        passing = None if self._crossing is None else self._crossing.passing(before, layers)
        placed = {rank: list(layers)}
        if self._shares is not None:
            entries = range(layers[0], layers[0] + len(layers))
            seats = self._shares.seats(rank, entries)
            placed = {stage: [at for at, _ in seated] for stage, seated in seats.items()}
        places = [at for stage in sorted(placed) for at in placed[stage]]
        numbers = [self._fields_of(self._chain[at]).shape[1] for at in places]
        ends = np.cumsum(numbers)
        stages: dict[int, list[LayerBytes]] = {}
        turn = iter(zip(ends.tolist(), numbers, strict=True))
        for stage in sorted(placed):
            stages[stage] = []
            for at in placed[stage]:
                fields, (end, number) = self._fields_of(self._chain[at]), next(turn)
                every = np.repeat(fields.min(axis=1, keepdims=True), ends[-1], axis=1)
                every[:, end - number : end] = fields
                stages[stage].append(LayerBytes(*every))
        parts = dynamic_parts(self.costs, self.layout, stages, rank=rank, passing=passing)
        used = np.broadcast_to(sum(parts.values()), ends[-1])
        return float(np.minimum.reduceat(used, ends - numbers).max())

    def _many_on(
        self, shares: Shares, rank: int, entries: range, options: Indices
    ) -> dict[int, list[LayerBytes]]:
        """Return what the layers of a rank's stages hold, each figure an array [way]."""
        is_like = [shares.like(entry) for entry in entries]
        order = np.array(self._order)
        # An entry of a like layer has its choices as options.
        like = options[:, is_like]
        if like.shape[1] > 1:
            like = order[np.sort(np.argsort(order)[like], axis=1)]
        ends = [
            np.array([*self._choices_of(entry), self._any_choice(entry)])[options[:, at]]
            for at, entry in enumerate(entries)
            if not is_like[at]
        ]
        chosen = np.concatenate([like, *ends], axis=1)
        return {
            stage: self._bytes_of_many(
                [at for at, _ in seated], chosen[:, [place for _, place in seated]]
            )
            for stage, seated in shares.seats(rank, entries).items()
        }

    def _bytes_of_many(self, positions: Sequence[int], choices: Indices) -> list[LayerBytes]:
        """[layer] What layers hold, by their positions in the chain, each figure an array [way].

        Like layers behind one another with the same choice are two entries: the first of them, and
        the rest as one.  Bytes rise or fall evenly along them, so they are most at either end.
        """
        bytes_of_layers: list[LayerBytes] = []
        begin = 0
        for kind, same in itertools.groupby(self._chain[at] for at in positions):
            taken = choices[:, begin : begin + len(list(same))]
            begin += taken.shape[1]
            fields = self._fields_of(kind)
            fields = np.append(fields, fields.min(axis=1, keepdims=True), axis=1)  # ANY_OPTION
            # The first has what it receives; what moves beside a layer is of the one before it.
            counts = None if fields[_MOVING].any() else self._counts(taken[:, 1:])
            every = taken.T if counts is None else taken.T[:1]
            bytes_of_layers += [LayerBytes(*fields[:, choice]) for choice in every]
            for choice, number in counts or ():
                for part in (np.minimum(number, 1), np.maximum(number - 1, 0)):
                    factors = np.where(_OF_ONE, np.minimum(part, 1), part)
                    bytes_of_layers.append(LayerBytes(*(fields[:, choice, None] * factors)))
        return bytes_of_layers

    def _counts(self, choices: Indices) -> list[tuple[int, Indices]] | None:
        """Return (choice, [way] number of layers) in their order, which are [way, layer].

        None where layers are few, or ways have them in no order that is known.  Whole buckets of
        gradients do not rise evenly.
        """
        if not choices.size or choices.min() == ANY_OPTION or self.costs.has_gradient_buckets:
            return None
        present = np.flatnonzero(np.bincount(choices.ravel()))
        if choices.shape[1] <= 3 * len(present):
            return None
        for order in (present, present[::-1], [] if self._shares is None else self._order):
            if not set(present.tolist()).issubset(order):
                continue
            ranks = np.zeros(max(order) + 1, dtype=int)
            ranks[list(order)] = np.arange(len(order))
            if (np.diff(ranks[choices], axis=1) >= 0).all():
                return [(int(at), (choices == at).sum(axis=1)) for at in order if at in present]
        return None

    def _fields_of(self, kind: str) -> Floats:
        """[field of `LayerBytes`, choice] What a layer of this kind has."""
        if kind not in self._fields:
            by_choice = [part.layer_bytes for _, part in self._pairs_of(kind)]
            self._fields[kind] = np.array(by_choice, dtype=float).T
        return self._fields[kind]

    def _parts_of(self, rank: int, first: int, options: Sequence[int]) -> dict[str, float]:
        """Return bytes of a rank by cause; those of stages that are alike are counted once."""
        if self._shares is None:
            layers = [self._bytes_of(at)[option] for at, option in enumerate(options, first)]
            return dynamic_parts(self.costs, self.layout, {rank: layers}, rank=rank)
        placed = self.contents(rank, first, options)
        parts = [self._stage_bytes(stage, tuple(placed[stage])) for stage in sorted(placed)]
        boundary_bytes = self.costs.boundary_bytes
        return parts_of_several(self.layout, parts, rank, boundary_bytes=boundary_bytes)

    def _stage_bytes(self, stage: int, layers: tuple[tuple[int, int], ...]) -> StageBytes:
        """Return what a stage has with (position, choice) of its layers in order."""
        first, last = stage == 0, stage == self.layout.stages - 1
        key = first, last, layers
        if key not in self._bytes_by_stage:
            self._bytes_by_stage[key] = stage_bytes(
                [self._bytes_of(at)[choice] for at, choice in layers],
                self.costs.boundary_bytes,
                first=first,
                last=last,
                keeps_sent=self.costs.keeps_sent,
            )
        return self._bytes_by_stage[key]

    def _bytes_of(self, at: int) -> list[LayerBytes]:
        """[choice] What a layer of the chain has."""
        kind = self._chain[at]
        if kind not in self._bytes:
            self._bytes[kind] = [part.layer_bytes for _, part in self._pairs_of(kind)]
        return self._bytes[kind]

    def layer_choices(self, solution: Solution) -> list[list[tuple[int, int]]]:
        """Return the position and the choice of every stage's layers."""
        assert self._shares is not None, "with one stage a rank the cuts say it"
        chosen = [self._choices_of(at)[option] for at, option in enumerate(solution.options)]
        return self._shares.layer_choices(solution.cuts, chosen, self._order)

    def contents(self, rank: int, first: int, options: Sequence[int]) -> dict[int, list[Placed]]:
        """Return (position, choice) of the layers of a rank's stages, by its entries from `first`.

        Options of like entries are those of as many of them, whichever has which.
        """
        if self._shares is None:
            return {rank: list(enumerate(options, first))}
        entries = range(first, first + len(options))
        some = self._every_choice[first : entries.stop]
        chosen = [choices[option] for choices, option in zip(some, options, strict=True)]
        return self._shares.of_rank(rank, entries, chosen, self._order)

    def part(self, position: int, choice: int) -> StrategyParts:
        """Return what a layer of the chain takes and has under one of its choices."""
        return self._pairs_of(self._chain[position])[choice][1]

    def layer_bytes(self, entry: int, option: int) -> list[float]:
        """Return what each layer that an entry stands for holds under an option, one by one."""
        placed = [(entry, option)]
        if self._shares is not None:
            positions = self._shares.entries[entry]
            placed = list(zip(positions, self._choices_of(entry)[option], strict=True))
        return [float(field) for at, choice in placed for field in self._bytes_of(at)[choice]]

    def _choices_of(self, entry: int) -> list[tuple[int, ...]]:
        """[option] The choice of each layer that an entry stands for."""
        assert self._shares is not None
        kinds = tuple(self._chain[at] for at in self._shares.entries[entry])
        if kinds not in self._products:
            numbers = (range(len(self._pairs_of(kind))) for kind in kinds)
            self._products[kinds] = list(itertools.product(*numbers))
        return self._products[kinds]

    def _any_choice(self, entry: int) -> tuple[int, ...]:
        """Return ANY_OPTION of each layer that an entry stands for."""
        assert self._shares is not None
        return (ANY_OPTION,) * len(self._shares.entries[entry])

    @cached_property
    def _every_choice(self) -> list[list[tuple[int, ...]]]:
        """[entry][option] The choice of each layer that an entry stands for."""
        assert self._shares is not None
        return [self._choices_of(entry) for entry in range(len(self._shares.entries))]

    @cached_property
    def _order(self) -> list[int]:
        """Choices of like layers, the one that stores least first."""
        assert self._shares is not None
        like = self._pairs_of(self._chain[self._shares.run.before])
        return sorted(range(len(like)), key=lambda choice: (like[choice][1].stored_bytes, -choice))

    @property
    def shares(self) -> Shares | None:
        """Shares of ranks in the chain; None with one stage a rank."""
        return self._shares

    def choices(self, kind: str) -> list[StrategyCost]:
        """[choice] What a layer of a kind may take."""
        return [cost for cost, _ in self._pairs_of(kind)]

    def chosen(self, entry: int, option: int) -> list[tuple[str, int]]:
        """Return (kind, choice) of each layer that an entry stands for, under an option."""
        assert self._shares is not None, "with one stage a rank an entry is a layer"
        kinds = [self._chain[at] for at in self._shares.entries[entry]]
        return list(zip(kinds, self._choices_of(entry)[option], strict=True))

    @property
    def _splits(self) -> bool:
        return splits_backward(self.layout.schedule)

    def _on_host(self, rank: int) -> float:
        """Return how many micro-batches any layer may have on the host."""
        if self._shares is not None:
            return float(self._most_on_first_stage)
        if counted_by_rank(self.layout):
            return float(self._in_flight(rank).alive)
        return float(in_flight_at_most(self.layout, rank))

    @cached_property
    def _most_on_first_stage(self) -> int:
        return most_on_first_stage(
            self.layout.schedule,
            ranks=self.layout.pipeline,
            micro_batches=self.layout.micro_batches,
            virtual_stages=self.layout.virtual_stages,
        )

    def _in_flight(self, rank: int) -> InFlightCounts:
        layout = self.layout
        return in_flight_counts(
            layout.schedule,
            rank,
            ranks=layout.pipeline,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )

    def _pairs_of(self, kind: str) -> list[Pair]:
        """Return what a layer of a kind may take, in the order of `allowed_options`."""
        if kind not in self._pairs:
            table, parts = self.costs.kinds[kind], self.costs.parts[kind]
            some = allowed_places(table, self.layout, self._recompute, kind, every=self._every)
            self._pairs[kind] = [(table[at], parts[at]) for at in some]
        return self._pairs[kind]

    def _credit_s(self, kind: str) -> float:
        return min(part.figures.credit_s for part in self.costs.parts[kind])

    def _entries(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the kind of every entry, and of every kind the positions of one entry."""
        every = (
            [(at,) for at in range(len(self._chain))]
            if self._shares is None
            else self._shares.entries
        )
        numbers: dict[object, int] = {}
        layers: list[int] = []
        groups: list[tuple[int, ...]] = []
        for entry in every:
            key = entry if self._place(entry[0]) != "like" else self._chain[entry[0]]
            if key not in numbers:
                numbers[key] = len(groups)
                groups.append(entry)
            layers.append(numbers[key])
        return layers, groups

    def _place(self, at: int) -> Literal["first stage", "like", "last stage"]:
        """Say where a layer of the chain lies; with one stage a rank, wherever a cut puts it."""
        if self._shares is None or 0 <= at - self._shares.run.before < self._shares.run.alike:
            return "like"
        return "first stage" if at < self._shares.run.before else "last stage"

    def _table(
        self, group: tuple[int, ...], option: Callable[[int, Option, StrategyParts], Option]
    ) -> tuple[Option, ...]:
        """Return the options of an entry: one of every layer's, together."""
        rows = [
            [option(at, option_of(cost), part) for cost, part in self._pairs_of(self._chain[at])]
            for at in group
        ]
        return tuple(_together(chosen) for chosen in itertools.product(*rows))


class Crossing:
    """Traffic across the ends of a stage that has some layers of a graph."""

    def __init__(self, model: ModelGraph, output_bytes: Mapping[str, float]) -> None:
        self._size_bytes = [output_bytes[kind] for kind in model.chain_kinds]
        self._readers = readers_of(model)

    def passing(self, before: Sequence[int], layers: Sequence[int]) -> StageTraffic:
        """Return what crosses; `before` are the layers of the stages before."""
        inside = {*before}
        received = self._crosses(inside, before)
        inside |= {*layers}
        crosses = self._crosses(inside, layers)
        return StageTraffic(
            received_bytes=received,
            made_bytes=crosses,
            sent_bytes=crosses + self._crosses(inside, before),
        )

    def _crosses(self, inside: set[int], layers: Sequence[int]) -> float:
        """Bytes of what these layers hand on to any that is not inside."""
        return sum(
            self._size_bytes[at] for at in layers if not inside.issuperset(self._readers[at])
        )


def _together(options: tuple[Option, ...]) -> Option:
    """Return the option of layers that lie on one rank."""
    if len(options) == 1:
        return options[0]
    return Option(
        name=" + ".join(option.name for option in options),
        forward_s=sum(option.forward_s for option in options),
        backward_s=sum(option.backward_s for option in options),
        stored_bytes=sum(option.stored_bytes for option in options),
        kept_bytes=sum(option.kept_bytes for option in options),
        transient_bytes=max(option.transient_bytes for option in options),
        resident_bytes=sum(option.resident_bytes for option in options),
        sync_s=sum(option.sync_s for option in options),
        host_bytes=sum(option.host_bytes for option in options),
        host_resident_bytes=sum(option.host_resident_bytes for option in options),
    )
