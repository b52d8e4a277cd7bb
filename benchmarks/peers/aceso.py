"""Aceso's problem: GPT over the stages of a 1F1B pipeline, by its own profile and cost model.

The inputs are Aceso's own files: a folder of profiles (`MODEL_mbsB_tpT_algoA.csv` with milli- and
microseconds and MB of every operator, `prim_MODEL_COLLECTIVE_Ngpus.csv`, `p2p_*_node.csv`), and the
configuration that its search wrote, with what it was asked beside it (`asked.json`).  An iteration
takes

    max_i t_i · (n - 1) + Σ_i t_i

for n micro-batches; t_i of stage i are forward, backward, what is recomputed, its input and output
sent, and resharding between operators whose shares differ.  With k stages behind it a stage holds,
in MB,

    8 · weights + (inputs + activations - saved) · (k + 1) + largest recomputed part
        + max(largest forward reserve + largest backward reserve, weights)

Each operator has its tensor- and data-parallel degree, is recomputed or not, and is divided in one
of two ways.  An operator's activations are saved if the next is recomputed too.

Ours is the best configuration whose stages have one pair of degrees each, cut between any
operators; within whole layers any operators may be recomputed.  It is found by a dynamic program
from the last stage to the first (operators, devices and stages so far) under falling ceilings on
stages, with `meshwright.planner.solver.frontier` for what the layers of a stage recompute.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from meshwright.planner.solver.frontier import Runs

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# Parameters and gradients in two bytes, main parameters and the optimizer's two states in four.
_STATES = 1 + 1 + 2 + 4
_MISSING = 100_000.0  # milliseconds of a collective that was not profiled
_LAYER = slice(1, 14)
"""Where the operators of one transformer layer are among those that are profiled."""
_NEVER = ("encoder-embedding", "gpt-post-process")
_FIRST, _DROPOUT, _SOFTMAX = "enc-1st-layernorm", "enc-attention-dropout", "enc-attention-softmax"
_SAME = 1e-12


class Operator(NamedTuple):
    """One row of a profile: microseconds and MB."""

    forward_us: float
    backward_us: float
    input_mb: float
    output_mb: float
    weights_mb: float
    activations_mb: float
    reserved_forward_mb: float
    reserved_backward_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A stage: its operators, each with degrees, way of division and whether it is recomputed."""

    operators: tuple[str, ...]
    tensor: tuple[int, ...]
    data: tuple[int, ...]
    ways: tuple[int, ...]
    recomputed: tuple[bool, ...]

    @property
    def devices(self) -> int:
        """Devices taken."""
        return self.tensor[0] * self.data[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """All stages; `micro_batch` is what all replicas take together."""

    micro_batch: int
    stages: tuple[Placed, ...]


class Shares(NamedTuple):
    """How a tensor lies on a stage: copies, and parts of its three dimensions."""

    copies: int
    parts: tuple[int, int, int]


def _shares(operator: str, tensor: int, data: int, way: int, *, reads: bool) -> Shares | None:
    """How an operator's input or output is divided; None where it is no operator's."""
    whole, columns = Shares(tensor, (1, data, 1)), Shares(1, (1, data, tensor))
    heads, samples = Shares(1, (data, tensor, 1)), Shares(tensor, (data, 1, 1))
    both = {
        _SOFTMAX: (heads, heads),
        _DROPOUT: (heads, heads),
        "enc-attention-score": (columns, heads),
        "enc-attention-context": (heads, columns),
        "enc-MLP-gelu": (columns, columns),
        "encoder-embedding": (None, whole),
        "final-layernorm": (whole, samples),
        "gpt-post-process": (samples, None),
    }
    if operator in ("enc-attention-qkv", "enc-MLP-GEMM-1"):
        both[operator] = (columns, whole) if way else (whole, columns)
    if operator in ("enc-attention-dense", "enc-MLP-GEMM-2"):
        both[operator] = (whole, columns) if way else (columns, whole)
    return both.get(operator, (whole, whole))[0 if reads else 1]


def _resharding(has: Shares | None, needs: Shares | None) -> tuple[str, str, int] | None:
    """Return the collectives forward and backward between two operators, and of how many ranks."""
    if has is None or needs is None or has == needs:
        return None
    if has.copies > needs.copies:
        at = next(d for d in range(3) if has.parts[d] < needs.parts[d])
        return "split", "all_gather", has.copies // needs.copies
    at = next(d for d in range(3) if has.parts[d] > needs.parts[d])
    ranks = has.parts[at] // needs.parts[at]
    if has.copies < needs.copies:
        return "all_gather", "split", ranks
    return "all_to_all", "all_to_all", ranks


class Profile:
    """What Aceso measured of one model."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._tables: dict[tuple[int, int, int], dict[str, Operator]] = {}
        self._collectives: dict[tuple[str, int], dict[str, float]] = {}
        intra, inter = (folder / f"p2p_{kind}_node.csv" for kind in ("intra", "inter"))
        self._rates = [self._row(intra), self._row(inter if inter.is_file() else intra)]

    @staticmethod
    def _row(path: Path) -> list[float]:
        return [float(one) for one in _rows(path)[1]]

    def names(self) -> list[str]:
        """Operators in the order in which a model of one layer has them."""
        return list(self._table(1, 1, 0))

    def of(self, operator: str, micro_batch: int, tensor: int, way: int) -> Operator:
        """Return the figures of an operator on a device's share of a micro-batch."""
        return self._table(micro_batch, tensor, way)[operator]

    def _table(self, micro_batch: int, tensor: int, way: int) -> dict[str, Operator]:
        key = micro_batch, tensor, way
        if key not in self._tables:
            path = self._folder / f"{self._model}_mbs{micro_batch}_tp{tensor}_algo{way}.csv"
            self._tables[key] = {
                row[0]: Operator(*(float(one) for one in row[1:9])) for row in _rows(path)[1:]
            }
        return self._tables[key]

    def has_member(self, micro_batch: int, tensor: int) -> bool:
        """Whether there is a profile for it."""
        name = f"{self._model}_mbs{micro_batch}_tp{tensor}_algo0.csv"
        return (self._folder / name).is_file()

    def collective_ms(self, kind: str, ranks: int, size_mb: float) -> float:
        """Milliseconds of a collective, profiled by whole MB."""
        if kind == "split":
            return 0.0
        key = kind, ranks
        if key not in self._collectives:
            path = self._folder / f"prim_{self._model}_{kind}_{ranks}gpus.csv"
            self._collectives[key] = {row[0]: float(row[1]) for row in _rows(path)[1:]}
        known = self._collectives[key]
        for near in (size_mb, size_mb - 1):
            if f"{near:.0f}" in known:
                return known[f"{near:.0f}"]
        return _MISSING

    def sent_us(self, size_mb: float, *, between_nodes: bool) -> float:
        """Microseconds of a transfer; rates in GB/s are by the power of two of its MB."""
        if size_mb <= 0:
            return 0.0
        rates, at = self._rates[between_nodes], int(math.log2(size_mb))
        # One below for 2 MB and more; below half a MB it counts from the end, as the peer's does.
        return size_mb / (rates[min(at - (at >= 1), len(rates) - 1)] * 1e-3)


def _rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [[cell.strip() for cell in row] for row in csv.reader(file)]


class Model:
    """Aceso's formulas for one profile, model and machine."""

    def __init__(self, profile: Profile, asked: dict[str, Any]) -> None:
        self.profile = profile
        self.layers: int = asked["num_layers"]
        self.devices: int = asked["num_gpus"]
        self.per_node: int = asked["num_gpus_per_node"]
        self.batch: int = asked["global_batch_size"]
        self.limit_mb: float = asked["memory_limit"]
        self.micro_batches: list[int] = asked["micro_batch_size"]
        names = profile.names()
        self.head, self.layer, self.tail = names[:1], names[_LAYER], names[_LAYER.stop :]

    def iteration_ms(self, configuration: Configuration) -> float:
        """Milliseconds of an iteration."""
        before, seconds = 0, []
        for stage in configuration.stages:
            seconds.append(self.stage_ms(stage, configuration.micro_batch, before))
            before += stage.devices
        steps = self.batch // configuration.micro_batch - 1
        return max(seconds) * steps + sum(seconds)

    def peak_mb(self, configuration: Configuration) -> float:
        """MB of the fullest device."""
        last = len(configuration.stages) - 1
        return max(
            self.stage_mb(stage, configuration.micro_batch, last - number)
            for number, stage in enumerate(configuration.stages)
        )

    def _figures(self, stage: Placed, micro_batch: int) -> list[Operator]:
        return [
            self.profile.of(name, micro_batch // data, tensor, way)
            for name, tensor, data, way in zip(
                stage.operators, stage.tensor, stage.data, stage.ways, strict=True
            )
        ]

    def stage_ms(self, stage: Placed, micro_batch: int, devices_before: int) -> float:
        """Milliseconds of a micro-batch on a stage behind so many devices."""
        figures = self._figures(stage, micro_batch)
        found = sum(
            one.forward_us * (1 + again) + one.backward_us
            for one, again in zip(figures, stage.recomputed, strict=True)
        )
        after = devices_before + stage.devices
        enters = devices_before % self.per_node == 0 and devices_before > 0
        found += self.profile.sent_us(figures[0].input_mb, between_nodes=enters)
        # The peer takes the output's size from the width of the first operator.
        out = self.profile.of(
            stage.operators[-1], micro_batch // stage.data[-1], stage.tensor[0], stage.ways[-1]
        ).output_mb
        found += self.profile.sent_us(out, between_nodes=after % self.per_node == 0)
        found += 1000 * sum(
            self.profile.collective_ms(kind, ranks, size)
            for forward, backward, ranks, size in self._resharded(stage, figures)
            for kind in (forward, backward)
        )
        return found / 1000

    def _resharded(
        self, stage: Placed, figures: Sequence[Operator]
    ) -> list[tuple[str, str, int, float]]:
        found = []
        sides = list(zip(stage.operators, stage.tensor, stage.data, stage.ways, strict=True))
        for at in range(1, len(sides)):
            has = _shares(*sides[at - 1], reads=False)
            between = _resharding(has, _shares(*sides[at], reads=True))
            if between is not None:
                found.append((*between, figures[at].input_mb))
        return found

    def stage_mb(self, stage: Placed, micro_batch: int, behind: int) -> float:
        """MB of a stage with so many stages behind it."""
        figures = self._figures(stage, micro_batch)
        held = [_held_mb(*one) for one in zip(stage.operators, figures, strict=True)]
        both = [a and b for a, b in zip(stage.recomputed, stage.recomputed[1:], strict=False)]
        ends = [name == _FIRST for name in stage.operators[1:]]
        saved = sum(
            mb for mb, is_both, end in zip(held, both, ends, strict=False) if is_both and not end
        )
        largest, part = 0.0, 0.0
        for at, is_both in enumerate(both):
            if is_both:
                part += held[at]
            largest = max(largest, part)
            closes = ends[at] or at + 1 == len(held) - 1
            if not is_both or (closes and stage.operators[at] != _DROPOUT):
                part = 0.0
        weights = sum(one.weights_mb for one in figures)
        alive = figures[0].input_mb + sum(held) - saved
        return _STATES * weights + alive * (behind + 1) + largest + self._reserved(stage, figures)

    def _reserved(self, stage: Placed, figures: Sequence[Operator]) -> float:
        """MB that an allocator keeps, and those of the largest collective."""
        inner = figures[:-1]
        forward = max((one.reserved_forward_mb for one in inner), default=0.0)
        backward = max((one.reserved_backward_mb for one in inner), default=0.0)
        collective = 0.0
        for before, after, ranks, size in self._resharded(stage, figures):
            for kind in (before, after):
                grows = kind in ("all_gather", "all_to_all")
                collective = max(collective, size * ranks if grows else size)
        return max(forward + backward, sum(one.weights_mb for one in figures)) + collective


def _held_mb(name: str, figures: Operator) -> float:
    """MB of an operator's activations; the dropout's buffer is shared with the softmax."""
    if name == _DROPOUT:
        return 1.5 * figures.activations_mb
    return 0.0 if name == _SOFTMAX else figures.activations_mb


def read_configuration(raw: dict[str, Any], model: Model) -> Configuration:
    """Return a configuration that Aceso wrote."""
    every = [*model.head, *model.layer * model.layers, *model.tail]
    stages, first = [], 0
    for number, count in enumerate(raw["num_ops_in_each_stage"]):
        stages.append(
            Placed(
                operators=tuple(every[first : first + count]),
                tensor=tuple(raw["model_parallel_size_of_each_op"][number]),
                data=tuple(raw["data_parallel_size_of_each_op"][number]),
                ways=tuple(raw["algo_of_each_op"][number]),
                recomputed=tuple(bool(one) for one in raw["recompute_ops"][number]),
            )
        )
        first += count
    if first != len(every):
        raise ValueError(f"the configuration has {first} operators, the model {len(every)}")
    return Configuration(micro_batch=raw["micro_batch_size"], stages=tuple(stages))


class _Recompute:
    """What one layer can recompute on some degrees: patterns by their largest part."""

    def __init__(self, model: Model, micro_batch: int, tensor: int) -> None:
        figures = [model.profile.of(name, micro_batch, tensor, 0) for name in model.layer]
        count = len(figures)
        self.patterns = (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(bool)
        held = np.array([_held_mb(*one) for one in zip(model.layer, figures, strict=True)])
        both = self.patterns[:, :-1] & self.patterns[:, 1:]
        self.again_us: Floats = self.patterns @ np.array([one.forward_us for one in figures])
        saved = both @ held[:-1]
        part, largest = np.zeros(len(both)), np.zeros(len(both))
        for at in range(count - 1):
            part = np.where(both[:, at], part + held[at], 0.0)
            largest = np.maximum(largest, part)
        # If the next layer begins with one that is recomputed, the last operator counts too.
        largest = np.maximum(largest, np.where(self.patterns[:, -1], part + held[-1], 0.0))
        self.kept_mb: Floats = held.sum() - saved
        self._largest = largest
        self._runs: list[tuple[float, NDArray[np.intp], Runs]] = []
        least = np.inf
        for level in np.unique(largest):
            within = np.flatnonzero(largest <= level)
            leanest = float(self.kept_mb[within].min())
            if leanest < least or not self._runs:
                least = leanest
                runs = Runs(self.kept_mb[within], self.again_us[within])
                self._runs.append((float(level), within, runs))

    def fastest(self, layers: int, room_mb: Floats, in_flight: int) -> tuple[Floats, Indices]:
        """[room] Least microseconds of recomputing within memory, inf if none; and which runs."""
        best = np.full(len(room_mb), np.inf)
        which = np.zeros(len(room_mb), dtype=np.intp)
        for number, (level, _, runs) in enumerate(self._runs):
            points = runs.frontier(layers)
            budget = (room_mb - level) / in_flight
            at = np.searchsorted(points.load_bytes, budget, side="right") - 1
            found = np.where(at >= 0, points.time_s[at], np.inf)
            which[found < best] = number
            best = np.minimum(best, found)
        return best, which

    def taken(self, layers: int, room_mb: float, in_flight: int) -> list[int]:
        """Return each layer's pattern in the fastest way."""
        _, [number] = self.fastest(layers, np.array([room_mb]), in_flight)
        level, within, runs = self._runs[number]
        points = runs.frontier(layers)
        budget = (room_mb - level) / in_flight
        at = int(np.searchsorted(points.load_bytes, budget, side="right")) - 1
        return [int(within[one]) for one in runs.options(layers, at)]


class Degrees(NamedTuple):
    """How a stage is made; `micro_batch` is what one replica takes."""

    tensor: int
    data: int
    micro_batch: int


class Ranges:
    """[first, end] All runs of operators as stages of some degrees."""

    def __init__(self, model: Model, degrees: Degrees) -> None:
        every = [*model.head, *model.layer * model.layers, *model.tail]
        profile, self._size = model.profile, len(every)
        self._model, self.degrees, self.operators = model, degrees, every
        self.recompute = _Recompute(model, degrees.micro_batch, degrees.tensor)
        figures = [profile.of(name, degrees.micro_batch, degrees.tensor, 0) for name in every]
        self._own_us = self._between([one.forward_us + one.backward_us for one in figures])
        self._weights = self._between([one.weights_mb for one in figures])
        self._alive = self._between([_held_mb(*one) for one in zip(every, figures, strict=True)])
        self._alive[:-1] += np.array([one.input_mb for one in figures])[:, None]
        self._reserved = self._largest([one.reserved_forward_mb for one in figures])
        self._reserved += self._largest([one.reserved_backward_mb for one in figures])
        self._enters, self._leaves = (
            [
                np.array([profile.sent_us(size, between_nodes=between) for size in sizes])
                for between in (False, True)
            ]
            for sizes in (
                [one.input_mb for one in figures],
                [one.output_mb for one in figures],
            )
        )
        # Whole layers of a run: from the first that begins in it to the last that ends in it.
        at = np.arange(self._size + 1)
        begins = np.maximum(-(-(at - 1) // len(model.layer)), 0)
        ends = np.minimum((at - 1) // len(model.layer), model.layers)
        self.first_layer = begins
        self.layers = np.maximum(ends[None, :] - begins[:, None], 0)

    def _between(self, values: Sequence[float]) -> Floats:
        """[first, end] Sums."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        found: Floats = sums[None, :] - sums[:, None]
        return found

    def _largest(self, values: Sequence[float]) -> Floats:
        """[first, end] Largest of all but the last operator."""
        found = np.zeros((self._size + 1, self._size + 1))
        for first in range(self._size - 1):
            found[first, first + 2 :] = np.maximum.accumulate(values[first:-1])
        return found

    def room_mb(self, behind: int) -> Floats:
        """[first, end] What is left for whole layers and the largest part that is recomputed."""
        needed = _STATES * self._weights + self._alive * (behind + 1)
        needed += np.maximum(self._reserved, self._weights)
        kept = self.layers * float(self.recompute.kept_mb[0]) * (behind + 1)
        found: Floats = self._model.limit_mb * (1 - _SAME) - needed + kept
        return found

    def stage_ms(self, behind: int, *, enters: bool, leaves: bool) -> Floats:
        """[first, end] Milliseconds of a micro-batch; inf where memory is too little."""
        room_mb, again_us = self.room_mb(behind), np.full(self._alive.shape, np.inf)
        few = self.layers == 0
        again_us[few & (room_mb >= 0)] = 0.0
        for layers in range(1, self._model.layers + 1):
            at = self.layers == layers
            again_us[at] = self.recompute.fastest(layers, room_mb[at], behind + 1)[0]
        found = np.full(again_us.shape, np.inf)
        sent_us = self._enters[enters][:, None] + self._leaves[leaves][None, :]
        found[:-1, 1:] = (self._own_us[:-1, 1:] + again_us[:-1, 1:] + sent_us) / 1000
        found[np.tril_indices(self._size + 1)] = np.inf
        return found

    def placed(self, first: int, end: int, behind: int) -> Placed:
        """Return a run as a stage."""
        operators, layers = self.operators[first:end], int(self.layers[first, end])
        recomputed = [False] * len(operators)
        if layers:
            room_mb = float(self.room_mb(behind)[first, end])
            patterns = self.recompute.taken(layers, room_mb, behind + 1)
            start = 1 + int(self.first_layer[first]) * len(self._model.layer) - first
            again = [bool(one) for at in patterns for one in self.recompute.patterns[at]]
            recomputed[start : start + len(again)] = again
        count = len(operators)
        return Placed(
            operators=tuple(operators),
            tensor=(self.degrees.tensor,) * count,
            data=(self.degrees.data,) * count,
            ways=(0,) * count,
            recomputed=tuple(recomputed),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One stage of a way: its run, its milliseconds, and of what degrees it is."""

    ranges: Ranges
    first: int
    end: int
    behind: int
    stage_ms: float

    def placed(self) -> Placed:
        """Return it as a stage."""
        return self.ranges.placed(self.first, self.end, self.behind)


class Search:
    """The best configuration whose stages have one pair of degrees each."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ranges: dict[Degrees, Ranges] = {}
        self._tables: dict[tuple[Degrees, int, bool, bool], Floats] = {}

    def best(self) -> Configuration | None:
        """Return the fastest that fits, or None."""
        best: tuple[float, Configuration] | None = None
        for micro_batch in self._micro_batches():
            best = self._of(micro_batch, math.inf if best is None else best[0]) or best
        return None if best is None else best[1]

    def _micro_batches(self) -> list[int]:
        """Micro-batches of all replicas."""
        model = self._model
        most = max(model.micro_batches) * model.devices
        return [size for size in range(1, most + 1) if model.batch % size == 0]

    def _degrees(self, micro_batch: int, devices: int) -> list[Degrees]:
        """Return the degrees on so many devices that were profiled."""
        found = []
        for tensor in (one for one in (1, 2, 4, 8) if devices % one == 0):
            data = devices // tensor
            share = micro_batch // data
            known = share in self._model.micro_batches and self._model.profile.has_member(
                share, tensor
            )
            if micro_batch % data == 0 and known:
                found.append(Degrees(tensor, data, share))
        return found

    def _of(self, micro_batch: int, below_ms: float) -> tuple[float, Configuration] | None:
        """Return the fastest at one micro-batch, if it is faster."""
        steps = self._model.batch // micro_batch - 1
        way = least = self._way(micro_batch, math.inf)
        best: list[Part] | None = None
        while way is not None and least is not None:
            ceiling_ms = max(part.stage_ms for part in way[1])
            if steps * ceiling_ms + way[0] < below_ms:
                below_ms, best = steps * ceiling_ms + way[0], way[1]
            # No sum is below the least: a faster way has a lower slowest stage.
            enough_ms = (below_ms - least[0]) / steps if steps else 0.0
            way = self._way(micro_batch, min(ceiling_ms, enough_ms) * (1 - _SAME))
        if best is None:
            return None
        stages = tuple(part.placed() for part in best)
        return below_ms, Configuration(micro_batch=micro_batch, stages=stages)

    def _way(self, micro_batch: int, ceiling_ms: float) -> tuple[float, list[Part]] | None:
        """Return the stages with the least sum, none of which is above the ceiling.

        From the last stage to the first, [operators before it] for the devices used so far.
        """
        model = self._model
        size = len(model.head) + len(model.layer) * model.layers + len(model.tail)
        start = np.full(size + 1, np.inf)
        start[size] = 0.0
        rows: list[dict[int, tuple[Floats, list[tuple[Floats, Indices, Degrees, int]]]]] = [
            {0: (start, [])}
        ]
        ends: list[tuple[float, int]] = []
        for behind in range(model.devices):
            more: dict[int, tuple[Floats, list[tuple[Floats, Indices, Degrees, int]]]] = {}
            for used, (sums, _) in rows[-1].items():
                for devices in range(1, model.devices - used + 1):
                    for degrees in self._degrees(micro_batch, devices):
                        table = self._table(degrees, behind, used)
                        reached = np.where(table <= ceiling_ms, table, np.inf) + sums[None, :]
                        end = reached.argmin(axis=1)
                        found = reached[np.arange(size + 1), end]
                        known, ways = more.setdefault(
                            used + devices, (np.full(size + 1, np.inf), [])
                        )
                        np.minimum(known, found, out=known)
                        ways.append((found, end, degrees, used))
            rows.append(more)
            if model.devices in more:
                ends.append((float(more[model.devices][0][0]), behind + 1))
        if not ends or min(ends)[0] == math.inf:
            return None
        sum_ms, stages = min(ends)
        parts, first, used = [], 0, model.devices
        for number in range(stages, 0, -1):
            sums, ways = rows[number][used]
            found, end, degrees, used = next(w for w in ways if w[0][first] == sums[first])
            behind = number - 1
            stage_ms = float(self._table(degrees, behind, used)[first, end[first]])
            ranges = self._ranges[degrees]
            parts.append(Part(ranges, first, int(end[first]), behind, stage_ms))
            first = int(end[first])
        return sum_ms, parts

    def _table(self, degrees: Degrees, behind: int, used: int) -> Floats:
        """[first, end] Milliseconds of stages in front of so many devices."""
        before = self._model.devices - used - degrees.tensor * degrees.data
        enters = before % self._model.per_node == 0 and before > 0
        leaves = (self._model.devices - used) % self._model.per_node == 0
        key = degrees, behind, enters, leaves
        if key not in self._tables:
            if degrees not in self._ranges:
                self._ranges[degrees] = Ranges(self._model, degrees)
            self._tables[key] = self._ranges[degrees].stage_ms(behind, enters=enters, leaves=leaves)
        return self._tables[key]


def compare(path: Path) -> list[Comparison]:
    """Return our configuration beside Aceso's; `path` is what its search was asked.

    It names the folder of profiles, the model, and its search's answers with their milliseconds, or
    `published_ms`, what Aceso published of an answer that it did not publish.
    """
    asked = read_case(path)
    folder = path.parent / asked["profiled_time_path"]
    model = Model(Profile(folder, f"{asked['model_name']}_{asked['model_size']}"), asked)
    theirs_ms = asked.get("published_ms", math.inf)
    for answer in asked["answers"]:
        theirs = read_configuration(read_case(path.parent / answer["file"]), model)
        require_score(answer["file"], answer["time_ms"], model.iteration_ms(theirs), tolerance=1e-6)
        require_score(answer["file"], answer["memory_mb"], model.peak_mb(theirs), tolerance=1e-6)
        theirs_ms = min(theirs_ms, answer["time_ms"])
    found, cpu_s = timed(partial(Search(model).best))
    if found is not None and model.peak_mb(found) > model.limit_mb * (1 + 1e-9):
        raise ValueError("our configuration does not fit by the peer's formulas")
    return [
        Comparison(
            case=f"{asked['model_name']} {asked['model_size']}, {model.devices} GPUs",
            peer="Aceso",
            unit="s per iteration",
            peer_value=theirs_ms / 1000,
            value=None if found is None else model.iteration_ms(found) / 1000,
            proven="",
            cpu_s=cpu_s,
            peer_cpu_s=asked.get("cpu_s"),
            peer_wall_s=asked.get("wall_s"),
        )
    ]
