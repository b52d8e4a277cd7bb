"""Stages on unequal devices: the order of the device types along the pipeline, and the cuts.

Some stages run on devices of one type, some on another (4 A100 and 8 V100, one stage each).  Which
type stands where is as free as where to cut: memory for micro-batches in flight draws the large
devices to the front, a heavy head draws the fast ones to the end, and no rule of thumb holds.

A stage of type g at position s is a stage of `planner.solver.instance` with the pace, the bytes
and the options of its type and the micro-batches in flight of its position.  Where types g and h
meet before layer j, both stages are charged cut_s[g][h][j].  The objective is the same:

    T = steady · max_s t_s + Σ_s (fill · t_s - credit_s) + max_s Σ_{l in s} sync
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from planner.solver.instance import Instance, Option, Solution, Stage, UsedBytes
from planner.solver.sides import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """Devices of one type, on which `stages` stages of the pipeline run.

    `kinds[kind]` are the options of each kind of layer on this type; `time_scale` multiplies
    their seconds.  `rooms[s]` is a stage of this type at position s, where positions differ in more
    than what is in flight; without it `capacity_bytes` and the rest say the same of all.
    """

    name: str
    stages: int
    kinds: tuple[tuple[Option, ...], ...]
    capacity_bytes: float = 0.0
    fixed_bytes: float = 0.0
    time_scale: float = 1.0
    exposed_s: float = 0.0
    rooms: tuple[Stage, ...] = ()
    credits_s: tuple[float, ...] = ()
    """By kind, instead of the instance's."""
    host_bytes: float | None = None
    """What a stage may put on the host."""
    used_bytes: UsedBytes | None = field(default=None, repr=False, compare=False)
    """What a stage of this type holds at a position, where sums are no more than that."""

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"{self.name!r} has {self.stages} stages; leave out unused types")

    def at(self, in_flight: float, buffer_bytes: float = 0.0, position: int = 0) -> Stage:
        """Return a stage of this type at a position, where so much is in flight."""
        if self.rooms:
            return self.rooms[position]
        return Stage(
            capacity_bytes=self.capacity_bytes,
            in_flight=in_flight,
            time_scale=self.time_scale,
            exposed_s=self.exposed_s,
            fixed_bytes=self.fixed_bytes + buffer_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalInstance:
    """A partition problem on several device types; every stage of every type is used.

    `layers[l]` is the kind of layer l; `in_flight[s]` counts micro-batches by position,
    `buffer_bytes[s]` are bytes that any device holds there (empty means none).
    `cut_s[g][h][j]` is charged to both stages that meet before layer j, the first of type g, the
    second of type h; empty means none.
    """

    layers: tuple[int, ...]
    types: tuple[DeviceType, ...]
    in_flight: tuple[float, ...]
    buffer_bytes: tuple[float, ...] = ()
    steady: float
    forward_apart: bool = False
    fill: float = 1.0
    credits_s: tuple[float, ...] = ()
    cut_s: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.types:
            raise ValueError("an instance needs at least one device type")
        if sum(one.stages for one in self.types) != len(self.in_flight):
            raise ValueError(
                f"in_flight has {len(self.in_flight)} positions; the types have "
                f"{sum(one.stages for one in self.types)} stages"
            )
        if any(len(one.rooms) not in (0, len(self.in_flight)) for one in self.types):
            raise ValueError(f"rooms are one for each of the {len(self.in_flight)} positions")
        if len({len(one.kinds) for one in self.types}) > 1:
            raise ValueError("every type needs the options of every kind")
        count = len(self.types)
        if self.cut_s and (
            [len(row) for row in self.cut_s] != [count] * count
            or any(len(cuts) != len(self.layers) + 1 for row in self.cut_s for cuts in row)
        ):
            raise ValueError(
                f"cut_s needs {count} x {count} rows of {len(self.layers) + 1} positions"
            )
        if any(not cut >= 0 for row in self.cut_s for cuts in row for cut in cuts):
            raise ValueError("cut_s must not be negative")
        for number in range(count):
            self.all_of(number)  # checks the rest

    @property
    def _positions(self) -> list[tuple[float, float, int]]:
        buffers = self.buffer_bytes or (0.0,) * len(self.in_flight)
        return list(zip(self.in_flight, buffers, range(len(buffers)), strict=True))

    def credits_of(self, number: int) -> tuple[float, ...]:
        """Return the credits of a type, by kind."""
        return self.types[number].credits_s or self.credits_s

    def _hosts(self, order: Sequence[int]) -> tuple[Host, ...]:
        """Return the part of a host that each stage has, for types in this order."""
        limits = [self.types[number].host_bytes for number in order]
        return tuple(
            Host(capacity_bytes=limit, ranks=tuple(int(s == own) for s in range(len(order))))
            for own, limit in enumerate(limits)
            if limit is not None
        )

    def all_of(self, number: int) -> Instance:
        """Return the chain with every stage on devices of one type, cuts free of charge."""
        one = self.types[number]
        return Instance(
            layers=self.layers,
            kinds=one.kinds,
            stages=tuple(one.at(*position) for position in self._positions),
            steady=self.steady,
            forward_apart=self.forward_apart,
            fill=self.fill,
            credits_s=self.credits_of(number),
            hosts=self._hosts([number] * len(self.in_flight)),
            used_bytes=one.used_bytes,
        )

    def in_order(self, order: Sequence[int], cuts: Sequence[int]) -> Instance:
        """Return the chain of one split, each layer with the options of its stage's type.

        Only that split means anything in it: elsewhere layers would move to other types.
        """
        kinds = len(self.types[0].kinds)
        layers: list[int] = []
        for number, (first, end) in zip(order, pairwise(cuts), strict=True):
            layers += [number * kinds + kind for kind in self.layers[first:end]]
        cut_s = [0.0] * (len(self.layers) + 1)
        if self.cut_s:
            for (before, after), cut in zip(pairwise(order), cuts[1:-1], strict=True):
                cut_s[cut] = self.cut_s[before][after][cut]
        return Instance(
            layers=tuple(layers),
            kinds=tuple(table for one in self.types for table in one.kinds),
            stages=tuple(
                self.types[number].at(*position)
                for number, position in zip(order, self._positions, strict=True)
            ),
            steady=self.steady,
            forward_apart=self.forward_apart,
            fill=self.fill,
            credits_s=tuple(
                credit for g in range(len(self.types)) for credit in self.credits_of(g)
            ),
            cut_s=tuple(cut_s),
            hosts=self._hosts(order),
            used_bytes=self._used_bytes([self.types[number] for number in order]),
        )

    def _used_bytes(self, order: Sequence[DeviceType]) -> UsedBytes | None:
        """Return what stages hold whose types are in this order."""
        if any(one.used_bytes is None for one in order):
            return None

        def used(
            stage: int, before: Sequence[int], held: Sequence[int], options: Sequence[int]
        ) -> float:
            of_type = order[stage].used_bytes
            assert of_type is not None, "all types have it or none"
            return of_type.of(stage, before, held, options)

        return UsedBytes(used, any(one.used_bytes.by_place for one in order if one.used_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalSolution:
    """The type of each stage, and the split of the chain between them."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    split: Solution
    layers: tuple[int, ...]
    """In the order in which the stages have them; of a chain 0, 1, 2, ..."""

    @property
    def stage_types(self) -> tuple[str, ...]:
        """Name of the device type of each stage."""
        return tuple(self.names[number] for number in self.order)

    @property
    def optimal(self) -> bool:
        """Whether no other order, cuts and options take less."""
        return self.split.optimal
