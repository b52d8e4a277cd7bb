"""Exact split of a graph into stages that each take their own number of devices.

A stage holds the layers between two ideals, on d replicas of t devices (d data-parallel, t
tensor-parallel), and its layers choose among options of so much time, so many bytes per micro-batch
in flight and so many in any case.  What is in flight depends on the replicas from this stage to the
end: y = ⌈D / d⌉, D = Σ d over this stage and all behind it.  The largest load of a stage is least
if at most k devices are used:

    load = time / d + sent / d + shared (d - 1) / d        seconds per micro-batch
    y · Σ stored + Σ resident <= capacity                  on each device

Under a ceiling on the load each (stage, t, d) allows a largest y, so a largest D, and

    devices[I][D] = min over stages from I to J, t, d of  devices[J][D - d] + d · t

counts the least devices of all layers outside the ideal I.  Later stages see D and nothing else of
it, so this is exact.  The ceiling is one of finitely many loads, and is bisected among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.graphs.ideals import Ideals, mask

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Time, bytes per micro-batch in flight and bytes in any case, by option.
Options = tuple[tuple[float, float, float], ...]

# The same load summed in two orders differs in the last bits.
_SAME = 1e-12
_FAR = np.int64(1 << 40)
# Sets of choices smaller than this are not worth looking for dominated ones in.
_FEW = 128
# Loads between the bounds are listed once the bounds are this close.
_CLOSE = 1.02


@dataclass(frozen=True, slots=True)
class Pick:
    """A choice of options for some layers; `rest` is the choice for all but the last of them."""

    time_s: float
    stored_bytes: float
    resident_bytes: float
    option: int = -1
    rest: Pick | None = None

    def options(self) -> list[int]:
        """Return the option of each layer, the first added first."""
        taken: list[int] = []
        at: Pick | None = self
        while at is not None and at.rest is not None:
            taken.append(at.option)
            at = at.rest
        return taken[::-1]


NOTHING = Pick(0.0, 0.0, 0.0)


def with_layer(picks: Sequence[Pick], options: Options, most: int) -> tuple[list[Pick], bool]:
    """Return the choices for one more layer; of equal bytes the fastest, of many the unbeaten.

    Of more than `most` some are left out, spread over their times; whether that happened, too.
    """
    found: dict[tuple[float, float], Pick] = {}
    for pick, (number, (time_s, stored, resident)) in product(picks, enumerate(options)):
        bytes_of = (pick.stored_bytes + stored, pick.resident_bytes + resident)
        before = found.get(bytes_of)
        if before is None or pick.time_s + time_s < before.time_s:
            found[bytes_of] = Pick(pick.time_s + time_s, *bytes_of, number, pick)
    kept = sorted(found.values(), key=lambda pick: pick.time_s)
    if len(kept) <= min(_FEW, most):
        return kept, False
    bytes_by_time = np.array([(pick.stored_bytes, pick.resident_bytes) for pick in kept])
    beaten = np.zeros(len(kept), dtype=bool)
    for at in range(1, len(kept)):
        beaten[at] = bool((bytes_by_time[:at] <= bytes_by_time[at]).all(axis=1).any())
    kept = [pick for pick, gone in zip(kept, beaten, strict=True) if not gone]
    if len(kept) <= most:
        return kept, False
    spread = np.unique(np.linspace(0, len(kept) - 1, most).round().astype(int))
    return [kept[at] for at in spread], True


@dataclass(frozen=True, slots=True, kw_only=True)
class WideProblem:
    """Layers in a topological order; index `i` of `tensors` and `replicas` names a way to be wide.

    `options[i][layer]`, `sent_s[i]` [ideal, ideal] seconds that the stage between two ideals spends
    on transfers for each replica's share, `shared_s[i]` [layer] seconds of gradients in the limit
    of many replicas.
    """

    every: Ideals
    tensors: tuple[int, ...]
    replicas: tuple[int, ...]
    options: tuple[tuple[Options, ...], ...]
    sent_s: tuple[Floats, ...]
    shared_s: tuple[Floats, ...]
    capacity_bytes: float
    devices: int
    most_picks: int = 128
    """Choices of options of one stage that are kept; with fewer than all nothing is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideStage:
    """One stage of an answer, layers rising, with the option of each."""

    layers: tuple[int, ...]
    options: tuple[int, ...]
    replicas: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSplit:
    """The answer: its largest load, and the next lower load that was shown to be too little."""

    stages: tuple[WideStage, ...]
    load_s: float
    refuted_s: float
    probes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A stage between two ideals; `behind` is the most replicas that all later ones may have."""

    stage: int
    tensor: int
    replica: int
    behind: int


class WideSearch:
    """All stages of a problem with their loads, and what fits under a ceiling on them.

    `least_s` is what all devices take that share the layers' least seconds evenly, and `thinned`
    says that there were more choices of options than were kept.
    """

    def __init__(self, problem: WideProblem) -> None:
        self._problem = problem
        words = problem.every.words
        inside = ((words[:, None, :] & words[None, :, :]) == words[:, None, :]).all(axis=2)
        np.fill_diagonal(inside, False)
        self._first, self._end = (index.astype(int) for index in np.nonzero(inside))
        self._grown = self._growth()
        self._added = self._added_layers()
        self.thinned = False
        self._picks = [self._picks_of(options) for options in problem.options]
        self._load_s, self._in_flight = self._loads()
        device_s = sum(
            min(
                t * min(option[0] for option in options[layer])
                for t, options in zip(problem.tensors, problem.options, strict=True)
            )
            for layer in range(problem.every.layers)
        )
        self.least_s = device_s / problem.devices * (1 - _SAME)

    def _growth(self) -> list[tuple[tuple[int, ...], int]]:
        """[stage] Layers to leave out, and the stage that is left (-1: none), small ones first.

        Each ideal but the last can be given one more layer and is again an ideal.  Where only some
        ideals are looked at it may not be one of them: then all layers of the stage are left out.
        """
        every = self._problem.every
        number = {ideal.tobytes(): at for at, ideal in enumerate(every.words)}
        larger: list[list[tuple[int, int]]] = [[] for _ in every.words]
        for at, ideal in enumerate(every.words):
            for layer in range(every.layers):
                more = ideal | mask([layer], every.layers)
                then = number.get(more.tobytes(), at)
                if then != at:
                    larger[at].append((layer, then))
        at_stage = {ends: stage for stage, ends in enumerate(self._ends())}

        def left(first: int, end: int) -> tuple[tuple[int, ...], int]:
            for layer, then in larger[first]:
                if then == end or (then, end) in at_stage:
                    return (layer,), at_stage.get((then, end), -1)
            return tuple(every.difference(first, end)), -1

        return [left(first, end) for first, end in self._ends()]

    def _ends(self) -> list[tuple[int, int]]:
        return list(zip(self._first.tolist(), self._end.tolist(), strict=True))

    def _picks_of(self, options: Sequence[Options]) -> list[list[Pick]]:
        """[stage] Choices for its layers, rising in time, from those of a stage one layer less."""
        picks: list[list[Pick]] = [[] for _ in self._grown]
        for stage in reversed(range(len(picks))):  # a later first ideal has fewer layers behind it
            layers, rest = self._grown[stage]
            picks[stage] = picks[rest] if rest >= 0 else [NOTHING]
            for layer in layers:
                picks[stage], fewer = with_layer(
                    picks[stage], options[layer], self._problem.most_picks
                )
                self.thinned |= fewer
        return picks

    def _added_layers(self) -> list[list[int]]:
        """[stage] Its layers in the order in which `_picks_of` adds them."""
        added: list[list[int]] = [[] for _ in self._grown]
        for stage in reversed(range(len(added))):
            layers, rest = self._grown[stage]
            added[stage] = [*(added[rest] if rest >= 0 else []), *layers]
        return added

    def _loads(self) -> tuple[Floats, Integers]:
        """Loads [stage, tensor, replica, choice], rising, and in flight [stage, tensor, choice]."""
        problem = self._problem
        widest = max(len(picks) for of_tensor in self._picks for picks in of_tensor)
        shape = (len(self._first), len(problem.tensors), widest)
        time_s, in_flight = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        for t, of_tensor in enumerate(self._picks):
            numbers = np.full((len(of_tensor), widest, 3), np.inf)
            for row, picks in zip(numbers, of_tensor, strict=True):
                row[: len(picks)] = [(p.time_s, p.stored_bytes, p.resident_bytes) for p in picks]
            time_s[:, t] = numbers[:, :, 0]
            in_flight[:, t] = _most_in_flight(
                numbers[:, :, 1], numbers[:, :, 2], problem.capacity_bytes, problem.devices
            )
        in_flight = np.maximum.accumulate(in_flight, axis=2)  # a faster choice may also be leaner
        sent_s = np.stack([sent[self._first, self._end] for sent in problem.sent_s], axis=1)
        shared = [problem.every.totals(s[:, None])[:, 0] for s in problem.shared_s]
        shared_s = np.stack([s[self._end] - s[self._first] for s in shared], axis=1)
        d = np.array(problem.replicas, dtype=float)
        fixed_s = sent_s[:, :, None] / d + shared_s[:, :, None] * (d - 1) / d
        load_s = time_s[:, :, None, :] / d[:, None] + fixed_s[..., None]
        used = np.multiply.outer(np.array(problem.tensors), np.array(problem.replicas))
        load_s[:, used > problem.devices] = np.inf
        return load_s, in_flight

    def loads_between(self, above_s: float, below_s: float) -> Floats:
        """Return all loads that a stage can have in between, rising, equals once."""
        loads = np.unique(self._load_s[(self._load_s > above_s) & (self._load_s < below_s)])
        apart = np.diff(loads, append=np.inf) > _SAME * loads
        return loads[apart]

    def steps(self, ceiling_s: float) -> list[Step]:
        """Stages with a load within the ceiling that no other width of the same layers replaces.

        Fewer replicas of fewer devices that allow as many replicas behind them are never worse.
        """
        problem = self._problem
        d = np.array(problem.replicas)
        within = (self._load_s <= ceiling_s * (1 + _SAME)).sum(axis=3)
        in_flight = np.take_along_axis(self._in_flight, np.maximum(within - 1, 0), axis=2)
        most = np.minimum(in_flight * d, problem.devices)
        behind = np.where((within > 0) & (in_flight >= 1), most - d, -1)
        best = np.maximum.accumulate(np.maximum.accumulate(behind, axis=1), axis=2)
        other = np.full_like(best, -1)
        other[:, 1:] = best[:, :-1]
        other[:, :, 1:] = np.maximum(other[:, :, 1:], best[:, :, :-1])
        return [
            Step(int(stage), int(t), int(r), int(behind[stage, t, r]))
            for stage, t, r in zip(*np.nonzero(behind > other), strict=True)
        ]

    def under(self, ceiling_s: float) -> WideSplit | None:
        """Return a split with no load above the ceiling, or None if none has enough devices."""
        problem, last = self._problem, len(self._problem.every) - 1
        needed = np.full((last + 1, problem.devices + 1), _FAR)
        needed[last, 0] = 0
        leading: list[list[Step]] = [[] for _ in range(last + 1)]
        steps = sorted(self.steps(ceiling_s), key=lambda step: -int(self._end[step.stage]))
        for step in steps:
            first, end = self._first[step.stage], self._end[step.stage]
            d = problem.replicas[step.replica]
            after = needed[end, : step.behind + 1] + d * problem.tensors[step.tensor]
            here = needed[first, d : d + step.behind + 1]
            np.minimum(here, after, out=here)
            leading[first].append(step)
        replicas = int(needed[0].argmin())
        if needed[0, replicas] > problem.devices:
            return None
        stages: list[WideStage] = []
        ideal, load_s = 0, 0.0
        while ideal != last:
            for step in leading[ideal]:
                d, end = problem.replicas[step.replica], int(self._end[step.stage])
                behind = replicas - d
                if 0 <= behind <= step.behind and (
                    needed[end, behind] + d * problem.tensors[step.tensor]
                    == needed[ideal, replicas]
                ):
                    break
            else:
                raise AssertionError("the least devices of an ideal come from one of its stages")
            stage, stage_s = self._stage(step, replicas)
            stages.append(stage)
            load_s = max(load_s, stage_s)
            ideal, replicas = end, behind
        return WideSplit(stages=tuple(stages), load_s=load_s, refuted_s=0.0, probes=1)

    def _stage(self, step: Step, replicas: int) -> tuple[WideStage, float]:
        """Return the stage in its fastest choice with `replicas` from it to the end; its load."""
        problem = self._problem
        d = problem.replicas[step.replica]
        in_flight = -(-replicas // d)
        enough = self._in_flight[step.stage, step.tensor] >= in_flight
        choice = int(enough.argmax())
        pick = self._picks[step.tensor][step.stage][choice]
        taken = sorted(zip(self._added[step.stage], pick.options(), strict=True))
        stage = WideStage(
            layers=tuple(layer for layer, _ in taken),
            options=tuple(option for _, option in taken),
            replicas=d,
            tensor=problem.tensors[step.tensor],
        )
        return stage, float(self._load_s[step.stage, step.tensor, step.replica, choice])


def _most_in_flight(stored: Floats, resident: Floats, capacity_bytes: float, most: int) -> Integers:
    """Micro-batches that fit, at most `most`; 0 if the resident bytes alone do not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.floor((capacity_bytes - resident) / stored)
    count = np.where(stored == 0, np.where(resident <= capacity_bytes, most, 0), count)
    count = np.clip(np.nan_to_num(count, nan=0.0), 0, most)
    # A quotient may be rounded up to the next integer.
    over = np.multiply(count, stored, where=count > 0, out=np.zeros_like(stored)) + resident
    count -= (count > 0) & (over > capacity_bytes)
    found: Integers = count.astype(np.int64)
    return found


def least_load(search: WideSearch) -> WideSplit | None:
    """Return a split whose largest load no other split undercuts, or None if none fits."""
    best = search.under(math.inf)
    if best is None:
        return None
    probes, refuted_s = 1, search.least_s

    def probed(ceiling_s: float) -> WideSplit | None:
        nonlocal probes
        probes += 1
        return search.under(ceiling_s)

    while best.load_s > refuted_s * _CLOSE:
        ceiling_s = math.sqrt(refuted_s * best.load_s)
        found = probed(ceiling_s)
        best, refuted_s = (best, ceiling_s) if found is None else (found, refuted_s)
    loads = search.loads_between(refuted_s, best.load_s * (1 - _SAME))
    refuted, known = -1, len(loads)
    while known - refuted > 1:
        middle = (refuted + known) // 2
        found = probed(float(loads[middle]))
        if found is None:
            refuted = middle
        else:
            best = found
            known = min(middle, int(np.searchsorted(loads, found.load_s * (1 - _SAME))))
    if refuted >= 0:
        refuted_s = float(loads[refuted])
    return replace(best, refuted_s=refuted_s, probes=probes)
