"""The partition problem as numbers: layers with options, stages with room, and what a split costs.

A chain of layers is cut into as many contiguous stages as there are devices in the pipeline, and
each layer takes one of its options (keep activations, recompute some, offload, ...).  With
t_s the seconds stage s spends on one micro-batch,

    t_s   = time_scale_s · Σ_{l in s} (forward + backward) + exposed_s + cut_s at both ends
    mem_s = fixed_s + Σ_{l in s} (resident + in_flight_s · stored + waiting_s · kept_bytes)
          + max_{l in s} transient, or what `used_bytes` says, which is no less
    T     = steady · max_s t_s + Σ_s (fill · t_s - credit_s) + max_s Σ_{l in s} sync

T is minimised subject to mem_s <= capacity_s.  1F1B on m micro-batches has steady = m - 1,
fill = 1 and in_flight_s = min(m, P - s).  GPipe has in_flight_s = m, and all forwards end before
the first backward: with `forward_apart` the first term is steady · (max_s f_s + max_s (t_s - f_s)),
f_s the forward share of t_s (with half of what is exposed and of the cuts).  Without it the term
above is a lower bound of GPipe's, and equal if one stage is the slowest both ways.

Beside the devices, hosts and sides (meshwright.planner.solver.side_constraints): of every host

    Σ_s ranks_s · Σ_{l in s} (host_resident + in_flight_s · host) <= capacity

and every side is kept.  Only `planner.solver.solve` and `planner.solver.ilp` look at these.

Nothing here searches: `planner.solver.chain` and `planner.solver.ilp` return a `Solution` of an
`Instance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import EQUAL, ROUNDING
from meshwright.planner.solver.side_constraints import HostMemory, SideConstraint, unkept

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise ValueError(what)


@dataclass(frozen=True, slots=True)
class UsedBytes:
    """Bytes that stages hold where these are not a sum over their layers.

    `of` is asked with a stage's number, the layers before it, its own in order, and their options.
    """

    of: Callable[[int, Sequence[int], Sequence[int], Sequence[int]], float]
    by_place: bool = False
    """Layers of the same kinds hold other bytes elsewhere (what crosses a graph's cuts)."""
    of_many: Callable[[int, Sequence[int], Sequence[int], Indices], Floats] | None = None
    """[way] The same as `of` with options [way, layer], up to rounding."""
    fewest: Callable[[int, Sequence[int], Sequence[int]], float] | None = None
    """No more than the same with any options, up to rounding."""
    grows: bool = False
    """True if a stage holds no less with more layers before its first or behind its last."""

    def along(self, order: Sequence[int]) -> UsedBytes:
        """Return the same for layers given by their places in an order."""

        def bytes_of_stage(
            stage: int, before: Sequence[int], layers: Sequence[int], options: Sequence[int]
        ) -> float:
            return self.of(
                stage, [order[at] for at in before], [order[at] for at in layers], options
            )

        def of_many(
            stage: int, before: Sequence[int], layers: Sequence[int], options: Indices
        ) -> Floats:
            assert self.of_many is not None, "asked for where it is"
            placed = [order[at] for at in before], [order[at] for at in layers]
            return self.of_many(stage, *placed, options)

        def fewest(stage: int, before: Sequence[int], layers: Sequence[int]) -> float:
            assert self.fewest is not None, "asked for where it is"
            return self.fewest(stage, [order[at] for at in before], [order[at] for at in layers])

        return UsedBytes(
            bytes_of_stage,
            self.by_place,
            self.of_many and of_many,
            fewest if self.fewest is not None else None,
            self.grows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run one layer; `backward_s` includes recomputation and stalls.

    `stored_bytes` is held once per micro-batch in flight, `kept_bytes` once per micro-batch that
    waits for the gradients of its weights, `transient_bytes` only while the layer runs (a stage
    pays the largest of its layers), `resident_bytes` always.  `sync_s` is charged once per step.
    `host_bytes` and `host_resident_bytes` are stored and resident on the host.
    """

    name: str
    forward_s: float
    backward_s: float
    stored_bytes: float = 0.0
    transient_bytes: float = 0.0
    resident_bytes: float = 0.0
    sync_s: float = 0.0
    host_bytes: float = 0.0
    host_resident_bytes: float = 0.0
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        for value in (
            self.host_bytes,
            self.host_resident_bytes,
            self.forward_s,
            self.backward_s,
            self.stored_bytes,
            self.kept_bytes,
            self.transient_bytes,
            self.resident_bytes,
            self.sync_s,
        ):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"option {self.name!r} has {value}; use a finite number >= 0")

    @property
    def time_s(self) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """The room and the pace of one pipeline stage.

    `in_flight` counts the micro-batches whose stored bytes are alive at once; interleaved
    schedules have fractions.  `waiting` counts those whose backward is split and that still owe the
    gradients of weights.  `time_scale` multiplies seconds: 2.0 is a device half as fast.
    """

    capacity_bytes: float
    in_flight: float = 1.0
    waiting: float = 0.0
    time_scale: float = 1.0
    exposed_s: float = 0.0
    fixed_bytes: float = 0.0
    """Below 0 where sums over layers are but a bound (`Instance.used_bytes`)."""
    least_layers: int = 1
    most_layers: int | None = None
    most_in_flight: float | None = None
    """Micro-batches that any layer may have on the host, where they are more than `in_flight`."""

    def __post_init__(self) -> None:
        _refuse(not self.waiting >= 0, f"waiting is {self.waiting}; it must not be < 0")
        _refuse(self.least_layers < 1, f"least_layers is {self.least_layers}; a stage needs one")
        _refuse(not self.in_flight > 0, f"in_flight is {self.in_flight}; it must exceed 0")
        _refuse(not self.time_scale > 0, f"time_scale is {self.time_scale}; it must exceed 0")
        _refuse(not self.exposed_s >= 0, f"exposed_s is {self.exposed_s}; it must not be < 0")

    @property
    def free_bytes(self) -> float:
        """Bytes left for layers."""
        return self.capacity_bytes - self.fixed_bytes

    @property
    def room_bytes(self) -> float:
        """The same up to rounding: sums of bytes may be so much more and still fit."""
        return self.free_bytes + ROUNDING * abs(self.capacity_bytes)

    def may_hold(self, layers: int) -> bool:
        """Return whether the stage may have this number of layers."""
        most = layers if self.most_layers is None else self.most_layers
        return self.least_layers <= layers <= most

    def summed_bytes(self, option: Option) -> float:
        """Bytes of a layer that add up: all but its transient ones."""
        stored = self.in_flight * option.stored_bytes + self.waiting * option.kept_bytes
        return option.resident_bytes + stored

    def on_host_bytes(self, option: Option) -> float:
        """Bytes that a layer has on the host."""
        in_flight = self.in_flight if self.most_in_flight is None else self.most_in_flight
        return option.host_resident_bytes + in_flight * option.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A partition problem.  `layers[l]` is the index in `kinds` of the l-th layer of the chain.

    `forward_apart` needs options of one kind to agree in `forward_s`.
    `credits_s[kind]` are seconds per layer that a zero-bubble schedule takes back from the fill
    (scaled like the layer's own time); `cut_s[j]` is charged to both stages that meet before
    layer j (the entries of the two ends of the chain are not read).  Empty means none.
    """

    layers: tuple[int, ...]
    kinds: tuple[tuple[Option, ...], ...]
    stages: tuple[StageLimits, ...]
    steady: float
    forward_apart: bool = False
    fill: float = 1.0
    credits_s: tuple[float, ...] = ()
    cut_s: tuple[float, ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    sides: tuple[SideConstraint, ...] = ()
    sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Rows of the fewest and the most layers [stage], of which a split keeps one; empty: any."""
    used_bytes: UsedBytes | None = field(default=None, repr=False, compare=False)
    """Bytes that a stage holds, where the sums above are only lower bounds of them."""

    def __post_init__(self) -> None:
        _refuse(not self.layers, "an instance needs at least one layer")
        _refuse(not self.stages, "an instance needs at least one stage")
        _refuse(not all(self.kinds), "each kind of layer needs at least one option")
        _refuse(
            not 0 <= min(self.layers) <= max(self.layers) < len(self.kinds),
            f"layers name kinds {min(self.layers)}..{max(self.layers)} of {len(self.kinds)}",
        )
        _refuse(not self.steady >= 0 or not self.fill >= 0, "steady and fill must not be < 0")
        _refuse(
            len(self.credits_s) not in (0, len(self.kinds)), "one credit per kind, or none at all"
        )
        _refuse(
            len(self.cut_s) not in (0, len(self.layers) + 1),
            f"{len(self.layers)} layers have {len(self.layers) + 1} cut positions",
        )
        _refuse(
            any(len(row) != len(self.stages) for row in self.sizes),
            "sizes say for every stage how many layers it has",
        )
        _refuse(any(cut < 0 for cut in self.cut_s), "cut_s must not be negative")
        _refuse(
            any(len(host.ranks) != len(self.stages) for host in self.hosts),
            "a host says for every stage how many of its devices it has",
        )
        _refuse(
            self.forward_apart and any(len({o.forward_s for o in kind}) > 1 for kind in self.kinds),
            "forward_apart needs one forward_s for all options of a kind",
        )

    def options_of(self, layer: int) -> tuple[Option, ...]:
        """Return the options of the `layer`-th layer of the chain."""
        return self.kinds[self.layers[layer]]

    def credit_s(self, layer: int) -> float:
        """Seconds that the `layer`-th layer takes back from the fill."""
        return self.credits_s[self.layers[layer]] if self.credits_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A split of an instance: stage s has layers `cuts[s]` .. `cuts[s + 1] - 1`.

    `options[l]` indexes the options of layer l.  No split of the instance takes less than
    `lower_bound_s`; `optimal` says that this one takes no more.
    """

    cuts: tuple[int, ...]
    options: tuple[int, ...]
    stage_s: tuple[float, ...]
    stage_bytes: tuple[float, ...]
    stage_sync_s: tuple[float, ...]
    objective_s: float
    lower_bound_s: float
    tolerance: float = field(default=EQUAL, repr=False)

    @property
    def gap(self) -> float:
        """Share of the objective that is not yet proven necessary."""
        if self.objective_s == 0:
            return 0.0
        return max(0.0, (self.objective_s - self.lower_bound_s) / abs(self.objective_s))

    @property
    def optimal(self) -> bool:
        """True if the bound meets the objective, up to rounding."""
        return self.gap <= self.tolerance

    def sizes(self) -> tuple[int, ...]:
        """Count of layers per stage."""
        return tuple(b - a for a, b in pairwise(self.cuts))


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No split fits; `reason` says in words what binds."""

    reason: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """Every split takes at least `lower_bound_s`, which is no better than the cutoff asked for."""

    lower_bound_s: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A solver stopped before it had a split; every split takes at least `lower_bound_s`."""

    lower_bound_s: float
    reason: str = ""


def stage_bytes(instance: Instance, s: int, layers: range, options: Sequence[int]) -> float:
    """Bytes of stage `s` holding `layers`; `options[layer]` for the whole chain."""
    taken = [options[layer] for layer in layers]
    if instance.used_bytes is not None:
        return instance.used_bytes.of(s, range(layers.start), layers, taken)
    chosen = [
        instance.options_of(layer)[option] for layer, option in zip(layers, taken, strict=True)
    ]
    stage = instance.stages[s]
    return (
        stage.fixed_bytes
        + sum(stage.summed_bytes(o) for o in chosen)
        + max((o.transient_bytes for o in chosen), default=0.0)
    )


def stage_fits(instance: Instance, s: int, layers: range, options: Sequence[int]) -> bool:
    """Return whether stage `s` has enough bytes for `layers`."""
    capacity_bytes = instance.stages[s].capacity_bytes
    allowance = ROUNDING * abs(capacity_bytes)
    return stage_bytes(instance, s, layers, options) <= capacity_bytes + allowance


def evaluate_split(instance: Instance, cuts: Sequence[int], options: Sequence[int]) -> Solution:
    """Evaluate one split from the raw numbers of the instance, by the formulas of this module.

    Nothing is proven of others: the bound is 0.
    """
    count = len(instance.layers)
    seconds: list[float] = []
    forward: list[float] = []
    used: list[float] = []
    sync: list[float] = []
    fill_s = 0.0
    for s, stage in enumerate(instance.stages):
        layers = range(cuts[s], cuts[s + 1])
        chosen = [instance.options_of(layer)[options[layer]] for layer in layers]
        stage_s = stage.time_scale * sum(o.time_s for o in chosen) + stage.exposed_s
        if instance.cut_s:
            stage_s += sum(instance.cut_s[j] for j in (cuts[s], cuts[s + 1]) if 0 < j < count)
        seconds.append(stage_s)
        layers_s = stage.time_scale * sum(o.time_s for o in chosen)
        forward_s = stage.time_scale * sum(o.forward_s for o in chosen)
        forward.append(forward_s + (stage_s - layers_s) / 2)
        used.append(stage_bytes(instance, s, layers, options))
        sync.append(sum(o.sync_s for o in chosen))
        credit_s = stage.time_scale * sum(instance.credit_s(layer) for layer in layers)
        fill_s += instance.fill * stage_s - credit_s
    slowest_s = max(seconds)
    if instance.forward_apart:
        backward = [t - f for t, f in zip(seconds, forward, strict=True)]
        slowest_s = max(forward) + max(backward)
    return Solution(
        cuts=tuple(cuts),
        options=tuple(options),
        stage_s=tuple(seconds),
        stage_bytes=tuple(used),
        stage_sync_s=tuple(sync),
        objective_s=instance.steady * slowest_s + fill_s + max(sync),
        lower_bound_s=0.0,
    )


def fits(instance: Instance, solution: Solution) -> bool:
    """Return whether each stage has an allowed number of layers and stays within its capacity."""
    sizes = zip(solution.sizes(), instance.stages, strict=True)
    return all(stage.may_hold(size) for size, stage in sizes) and all(
        used <= stage.capacity_bytes + ROUNDING * abs(stage.capacity_bytes)
        for used, stage in zip(solution.stage_bytes, instance.stages, strict=True)
    )


def host_bytes(instance: Instance, host: HostMemory, solution: Solution) -> float:
    """Bytes that the devices of one host hold in its memory."""
    total = 0.0
    for s, (stage, ranks) in enumerate(zip(instance.stages, host.ranks, strict=True)):
        for layer in range(solution.cuts[s], solution.cuts[s + 1]) if ranks else ():
            option = instance.options_of(layer)[solution.options[layer]]
            total += ranks * stage.on_host_bytes(option)
    return total


def broken(instance: Instance, solution: Solution) -> HostMemory | SideConstraint | None:
    """Return a host that is too full or a side that is not kept, None if all is well."""
    for host in instance.hosts:
        if host_bytes(instance, host, solution) > host.capacity_bytes * (1 + ROUNDING):
            return host
    if not instance.sides:
        return None
    names = [
        instance.options_of(layer)[option].name for layer, option in enumerate(solution.options)
    ]
    return unkept(instance.sides, solution.cuts, names)


def leanest_bytes(instance: Instance, stage: StageLimits, layers: range) -> float:
    """Fewest bytes in which `stage` can hold `layers`, whatever the seconds.

    For every level that the largest transient may have, the minimum-memory option below that level.
    """
    tables = [instance.options_of(layer) for layer in layers]
    levels = sorted({o.transient_bytes for table in tables for o in table})
    floor = max(min(o.transient_bytes for o in table) for table in tables)
    return min(
        level
        + sum(
            min(stage.summed_bytes(o) for o in table if o.transient_bytes <= level)
            for table in tables
        )
        for level in levels
        if level >= floor
    )
