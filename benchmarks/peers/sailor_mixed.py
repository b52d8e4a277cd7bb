"""The fastest pipeline of Sailor's problem on two GPU types, whose replicas may differ.

A plan is a micro-batch, replicas of each stage (as many for all), and for each stage its layers and
its make: replicas of one GPU type and tensor-parallel degree, or some of one type and some of the
other.  Sailor counts micro-batches by the replicas of the first stage, which means something only
where all stages have as many.  Of a stage of two types the slower counts, and both must fit.

Micro-batches, replicas and stages are taken by a bound, and of each the makes, as a multiset.  One
multiset is a chain on device types for the exact solver (`planner.solver.solve`), a type for each
make, never slower than Sailor's score:

    compute      of a make of two types, that of the one whose commonest layer is slower
    memory       of a make of two types, that of one of them; the score checks the other
    transfers    each cut charges both its stages the least that a replica of either side sends or
                 receives; what the first and the last stage pay twice is the least of any cut
    all-reduce   the least ratio of seconds to bytes over sizes that a stage can have

The split found is scored by Sailor's formulas.  What no bound undercuts is optimal among these.
A case may name `most_multisets`; after so many the search ends with the bounds of what is left.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from benchmarks.peers.sailor import Case, all_reduce_s, score, send_s
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import (
    DeviceType,
    GraphInstance,
    GraphSolution,
    in_a_row,
)
from meshwright.planner.solver.partition_problem import Infeasible, Instance, Option, StageLimits
from meshwright.planner.solver.solve import solve

Member = tuple[str, int]
"""A GPU type and a tensor-parallel degree."""
Make = tuple[Member, ...]
"""What the replicas of a stage are: of one kind, or of two on different GPU types."""
Used = dict[tuple[int, ...], tuple[int, ...]]
"""Devices of each type that some stages use, and the replicas of their makes' first members."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What is common to the stages of a plan."""

    stages: int
    replicas: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, its seconds, seconds below which none stays, and the problems that were solved."""

    plan: dict[str, Any]
    iteration_s: float
    lower_bound_s: float
    solved: int


class MixedSearch:
    """Two GPU types, or one, and so many of each."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._case = Case(raw)
        self._gpus: dict[str, int] = raw["gpus"]
        self._count = len(self._case.weight_bytes)
        self._most_rows: int = raw.get("most_multisets", sys.maxsize - 1)
        self._store = FrontierStore()
        self._known_s = math.inf
        self._plan: dict[str, Any] | None = None
        self._layers_s: dict[tuple[int, Member], list[float]] = {}
        self._typical: dict[tuple[int, Make], float] = {}
        self._cuts: dict[tuple[int, Make, Make], tuple[float, ...]] = {}
        self._ratios: dict[tuple[Shape, Make], float] = {}

    def best(self) -> Found | None:
        """Return the fastest plan found, with the bound on all, or None if none was found."""
        waiting = [(self._shape_s(shape), shape) for shape in self._shapes()]
        heapq.heapify(waiting)
        open_s, solved, rows_left = [], 0, self._most_rows
        while waiting:
            least_s, shape = heapq.heappop(waiting)
            if least_s >= self._known_s:
                break
            rows = list(itertools.islice(self._rows(shape), rows_left + 1))
            rows_left -= len(rows)
            if rows_left < 0:
                open_s.append(least_s)
                break
            ranked = sorted((self._makes_s(shape, makes), makes) for makes in rows)
            for bound_s, makes in ranked:
                if bound_s >= self._known_s:
                    break
                solved += 1
                open_s.append(max(bound_s, self._solved_s(shape, makes)))
        if self._plan is None:
            return None
        return Found(self._plan, self._known_s, min([self._known_s, *open_s]), solved)

    def _shapes(self) -> Iterator[Shape]:
        """Yield shapes that have a device for each replica."""
        devices = sum(self._gpus.values())
        for micro_batch in sorted({b for gpu in self._gpus for b, _ in self._case.profiled(gpu)}):
            for stages in range(1, min(self._count, devices) + 1):
                for replicas in range(1, devices // stages + 1):
                    shape = Shape(stages=stages, replicas=replicas, micro_batch=micro_batch)
                    if self._makes(shape):
                        yield shape

    def _makes(self, shape: Shape) -> list[Make]:
        """Return the makes of a stage for which there are devices."""
        members = [
            (gpu, tensor)
            for gpu in self._gpus
            for b, tensor in self._case.profiled(gpu)
            if b == shape.micro_batch and tensor <= self._case.per_node[gpu]
        ]
        alone = [(one,) for one in members if one[1] * shape.replicas <= self._gpus[one[0]]]
        return alone + [
            pair
            for pair in combinations(members, 2)
            if pair[0][0] != pair[1][0]
            and shape.replicas > 1
            and self._with(self._none_used(), shape, pair)
        ]

    def _rows(self, shape: Shape) -> Iterator[tuple[Make, ...]]:
        """Yield the multisets of makes that the devices allow and that may beat the best known."""
        makes = sorted(self._makes(shape), key=lambda make: self._typical_s(shape, make))
        speed = [1 / self._typical_s(shape, make) for make in makes]
        steps = self._micro_batches(shape) - 1
        room_s = self._known_s - self._blocks / speed[0]
        needed = self._blocks * steps / room_s if room_s < math.inf else 0.0

        def walk(
            first: int, taken: tuple[Make, ...], rate: float, used: Used
        ) -> Iterator[tuple[Make, ...]]:
            left = shape.stages - len(taken)
            if not left:
                yield taken
                return
            for at in range(first, len(makes)):
                if rate + left * speed[at] < needed:
                    return
                more = self._with(used, shape, makes[at])
                if more:
                    yield from walk(at, (*taken, makes[at]), rate + speed[at], more)

        yield from walk(0, (), 0.0, self._none_used())

    def _none_used(self) -> Used:
        return {(0,) * len(self._gpus): ()}

    def _with(self, used: Used, shape: Shape, make: Make) -> Used:
        """Return the devices used with another stage, and replicas of each make's first member.

        What is above the limits is left out, and what uses no fewer of any type than another.
        """
        index = {gpu: at for at, gpu in enumerate(self._gpus)}
        limits = list(self._gpus.values())
        found: Used = {}
        for so_far, picks in used.items():
            for count in range(1, shape.replicas) if len(make) > 1 else (shape.replicas,):
                total = list(so_far)
                for (gpu, tensor), n in zip(make, (count, shape.replicas - count), strict=False):
                    total[index[gpu]] += tensor * n
                if all(a <= b for a, b in zip(total, limits, strict=True)):
                    found.setdefault(tuple(total), (*picks, count))
        kept: Used = {}
        for total_used in sorted(found):
            if not any(all(a <= b for a, b in zip(one, total_used, strict=True)) for one in kept):
                kept[total_used] = found[total_used]
        return kept

    def _micro_batches(self, shape: Shape) -> int:
        return math.ceil(self._case.batch / (shape.micro_batch * shape.replicas))

    def _layer_s(self, shape: Shape, member: Member) -> list[float]:
        """Seconds of each layer, forward and backward."""
        key = shape.micro_batch, member
        if key not in self._layers_s:
            self._layers_s[key] = self._summed_s(*key)
        return self._layers_s[key]

    def _summed_s(self, micro_batch: int, member: Member) -> list[float]:
        parts = [
            self._case.layer_s(member[0], micro_batch, member[1], what)
            for what in ("fwd_s", "bwd_s")
        ]
        assert parts[0] is not None and parts[1] is not None, "makes are of what was profiled"
        return [a + b for a, b in zip(*parts, strict=True)]

    def _slower(self, shape: Shape, make: Make) -> Member:
        """Return the member whose commonest layer takes longer."""
        return max(make, key=lambda member: min(self._inner(self._layer_s(shape, member))))

    def _inner(self, values: Sequence[float]) -> Sequence[float]:
        """Leave out the first and the last layer, which differ, where others are left."""
        return values[1:-1] if len(values) > 2 else values

    @property
    def _blocks(self) -> int:
        return len(self._inner([0.0] * self._count))

    def _typical_s(self, shape: Shape, make: Make) -> float:
        """Least seconds of an inner layer."""
        key = shape.micro_batch, make
        if key not in self._typical:
            inner_s = self._inner(self._layer_s(shape, self._slower(shape, make)))
            self._typical[key] = min(inner_s)
        return self._typical[key]

    def _shape_s(self, shape: Shape) -> float:
        """Seconds that a shape takes at least.

        A replica of t devices gets through one inner layer in c seconds, so N devices of a type,
        D of them or more for a layer, through N / (D c t) a second, and a stage through 1 / c.
        """
        makes = self._makes(shape)
        rates = dict.fromkeys(self._gpus, 0.0)
        for gpu, tensor in {member for make in makes for member in make}:
            seconds = self._typical_s(shape, ((gpu, tensor),))
            rates[gpu] = max(rates[gpu], self._gpus[gpu] / (shape.replicas * seconds * tensor))
        fastest_s = min(self._typical_s(shape, make) for make in makes)
        slowest_s = self._blocks * max(fastest_s / shape.stages, 1 / sum(rates.values()))
        return (self._micro_batches(shape) - 1) * slowest_s + self._blocks * fastest_s

    def _makes_s(self, shape: Shape, makes: Sequence[Make]) -> float:
        """Seconds that a multiset takes at least.

        With c_i of an inner layer and e of transfers on every stage, and weights y_i of stages,

            T >= Σ_l min_i ((m - 1) y_i + 1) c_i + (m - 1 + S) e + all-reduce

        in which all stages weigh the same for K = (m - 1 + S) / Σ 1 / c_i where all y_i >= 0.
        """
        steps = self._micro_batches(shape) - 1
        typical = [self._typical_s(shape, make) for make in makes]
        rate = sum(1 / one for one in typical)
        weighed_s = (steps + shape.stages) / rate
        if weighed_s < max(typical):
            weighed_s = steps / rate + min(typical)
        kinds = list(dict.fromkeys(makes))
        sent_s = 0.0
        if shape.stages > 1:
            cuts_s = (self._cuts_s(shape, a, b)[1:-1] for a in kinds for b in kinds)
            # The last stage pays twice, and the first of four or more.
            sent_s = min(map(min, cuts_s)) * (1 if shape.stages <= 3 else 2)
        shared_s = min(self._ratio(shape, make) for make in kinds)
        shared_s *= sum(self._case.weight_bytes) / shape.stages
        return self._blocks * weighed_s + (steps + shape.stages) * sent_s + shared_s

    def _solved_s(self, shape: Shape, makes: tuple[Make, ...]) -> float:
        """Bound on a multiset, after its best split was scored."""
        update_s = min(
            min(self._case.layer_s(gpu, shape.micro_batch, tensor, "update_s") or [0.0])
            for make in makes
            for gpu, tensor in make
        )
        least_s = 0.0
        for which in range(max(map(len, makes))):
            held = [make[min(which, len(make) - 1)] for make in dict.fromkeys(makes)]
            problem = self._instance(shape, makes, held)
            answer = solve(problem, cutoff_s=self._known_s - update_s, frontiers=self._store)
            if isinstance(answer, Infeasible):
                return math.inf
            if not isinstance(answer, GraphSolution):
                return self._known_s
            least_s = max(least_s, answer.split.lower_bound_s + update_s)
            self._score(shape, makes, answer)
        return least_s

    def _score(self, shape: Shape, makes: tuple[Make, ...], answer: GraphSolution) -> None:
        """Take the split if Sailor's formulas say that it fits and is faster."""
        kinds = list(dict.fromkeys(makes))
        placed = [kinds[number] for number in answer.types]
        used = self._none_used()
        for make in placed:
            used = self._with(used, shape, make)
        counts = next(iter(used.values()))
        contents = [list(range(a, b)) for a, b in pairwise(answer.split.cuts)]
        for backwards in (False, True):
            stages = []
            for make, count in zip(placed, counts, strict=True):
                numbers = (count, shape.replicas - count)
                row = [
                    {"gpu": gpu, "tp": tensor}
                    for (gpu, tensor), n in zip(make, numbers, strict=False)
                    for _ in range(n)
                ]
                stages.append(row[::-1] if backwards else row)
            plan = {
                "mbs": shape.micro_batch,
                "pipelines": [{"layers_per_stage": contents, "stages": stages}],
            }
            scored = score(self._case, plan)
            if scored.fits and scored.iteration_s < self._known_s:
                self._known_s, self._plan = scored.iteration_s, plan

    def _instance(
        self, shape: Shape, makes: tuple[Make, ...], held: Sequence[Member]
    ) -> GraphInstance:
        """State a multiset, with the bytes of one member of each make."""
        kinds = list(dict.fromkeys(makes))
        figures = [self._figures(shape, make, held[at]) for at, make in enumerate(kinds)]
        of_layer = list(zip(*figures, strict=True))
        numbers = {row: at for at, row in enumerate(dict.fromkeys(of_layer))}
        cut_s = tuple(
            tuple(self._cuts_s(shape, before, after) for after in kinds) for before in kinds
        )
        again_s = min(min(row[1:-1], default=0.0) for rows in cut_s for row in rows)
        case, last = self._case, shape.stages - 1
        types = []
        for at, make in enumerate(kinds):
            gpu, tensor = held[at]
            rooms = tuple(
                StageLimits(
                    capacity_bytes=case.memory["capacity_bytes"][gpu],
                    in_flight=shape.stages - s,
                    fixed_bytes=case.needed_bytes((), tensor, shape.micro_batch, 0),
                    exposed_s=again_s * ((0 < s == last) + (s == 0 and last >= 3)),
                )
                for s in range(shape.stages)
            )
            types.append(
                DeviceType(
                    name=str(make),
                    stages=makes.count(make),
                    chain=Instance(
                        layers=tuple(numbers[row] for row in of_layer),
                        kinds=tuple((row[at],) for row in numbers),
                        stages=rooms,
                        steady=self._micro_batches(shape) - 1,
                    ),
                )
            )
        return GraphInstance(
            types=tuple(types),
            edges=in_a_row(len(of_layer)),
            output_s=tuple(tuple(cuts[1:] for cuts in row) for row in cut_s),
        )

    def _figures(self, shape: Shape, make: Make, held: Member) -> list[Option]:
        """[layer] What it takes on a make, with the bytes of one member."""
        case, micro_batch = self._case, shape.micro_batch
        seconds = self._layer_s(shape, self._slower(shape, make))
        ratio = self._ratio(shape, make)
        fixed = case.needed_bytes((), held[1], micro_batch, 0)
        found = []
        for at in range(self._count):
            resident = case.needed_bytes((at,), held[1], micro_batch, 0)
            found.append(
                Option(
                    name="run",
                    forward_s=seconds[at],
                    backward_s=0.0,
                    stored_bytes=case.needed_bytes((at,), held[1], micro_batch, 1) - resident,
                    resident_bytes=resident - fixed,
                    sync_s=ratio * case.weight_bytes[at],
                )
            )
        return found

    def _ratio(self, shape: Shape, make: Make) -> float:
        """Least seconds of all-reduce per byte, for runs of layers that a stage can hold."""
        key = shape, make
        if key not in self._ratios:
            self._ratios[key] = self._least_ratio(shape, make)
        return self._ratios[key]

    def _least_ratio(self, shape: Shape, make: Make) -> float:
        gpus = [gpu for gpu, _ in make]
        links = [self._case.ring_link(a, b) for a, b in product(gpus, gpus)]
        if len(gpus) > 1:  # neighbours of two types there are, of the same perhaps not
            links = [self._case.ring_link(a, b) for a, b in product(gpus, gpus) if a != b]
        shards = min(4, *(tensor for _, tensor in make))
        least = min(
            (
                all_reduce_s(size / shards, shape.replicas, link) / size
                for link in links
                for size in self._sizes(self._count - shape.stages + 1)
            ),
            default=0.0,
        )
        return max(0.0, least)  # a polynomial is below 0 for small sizes

    def _sizes(self, longest: int) -> frozenset[float]:
        return _run_sizes(tuple(self._case.weight_bytes), longest)

    def _cuts_s(self, shape: Shape, before: Make, after: Make) -> tuple[float, ...]:
        """[cut] Least seconds that either side spends on sending or receiving."""
        key = shape.micro_batch, before, after
        if key not in self._cuts:
            self._cuts[key] = self._across_s(*key)
        return self._cuts[key]

    def _across_s(self, micro_batch: int, before: Make, after: Make) -> tuple[float, ...]:
        def across_s(makes: Make, others: Make, size: float) -> float:
            return max(
                min(
                    send_s(
                        size,
                        self._case.link({"gpu": g, "tp": t}, {"gpu": other, "tp": u}),
                    )
                    for other, u in others
                )
                for g, t in makes
            )

        sizes = [one * micro_batch for one in self._case.output_bytes]
        inner = [
            max(0.0, min(across_s(before, after, a), across_s(after, before, b)))
            for a, b in pairwise(sizes)
        ]
        return (0.0, *inner, 0.0)


@cache
def _run_sizes(weights: tuple[float, ...], longest: int) -> frozenset[float]:
    """Bytes of the weights of all runs of so many layers at most."""
    return frozenset(
        sum(weights[first : first + n])
        for n in range(1, longest + 1)
        for first in range(len(weights) - n + 1)
    )


def compare(path: Path) -> list[Comparison]:
    """Return our plan beside Sailor's, whose stored score is reproduced first."""
    raw = read_case(path)
    for result in raw["results"]:
        scored = score(Case(raw), result["plan"])
        require_score(result["planner"], result["sailor_simulator_iter_s"], scored.iteration_s)
    found, cpu_s = timed(lambda: MixedSearch(raw).best())
    devices = " + ".join(f"{count} {gpu}" for gpu, count in raw["gpus"].items())
    proven = ""
    if found is not None:
        proven = "pipelines of equally many replicas"
        if found.lower_bound_s < found.iteration_s * (1 - 1e-9):
            proven = f"> {found.lower_bound_s:.6g}"
    return [
        Comparison(
            case=f"{raw['model']['name']}, {devices}",
            peer=result["planner"],
            unit="s per iteration",
            peer_value=result["sailor_simulator_iter_s"],
            value=None if found is None else found.iteration_s,
            proven=proven,
            cpu_s=cpu_s,
            peer_cpu_s=result.get("process_user_s"),
            peer_wall_s=result.get("search_time_s"),
        )
        for result in raw["results"]
    ]
