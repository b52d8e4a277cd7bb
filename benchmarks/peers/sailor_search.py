"""The fastest equal-pipeline layout of Sailor's problem, each layout's cuts by the exact solver.

A layout is a micro-batch, a tensor-parallel degree, replicas per stage, pipelines and stages.  All
are enumerated; each is a chain `Instance` whose optimum bounds the layout from below:

    transfers    every cut charges both its stages; the first and the last stage, which Sailor
                 charges twice, carry the other half as `exposed_s`
    all-reduce   longer than proportional to the weights of the largest stage: `sync_s` is the least
                 ratio of seconds to bytes over all runs of layers that can be the largest

A cut whose two sides send different sizes (behind it stands a layer with a larger output) is
charged at the larger size.  A split that uses it is bounded apart: some stage sends that size
with every micro-batch.  The split found is scored by Sailor's formulas.  What no layout's bound
undercuts is optimal among these layouts; stages of unequal tensor-parallel degree are not searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from benchmarks.peers.sailor import Case, all_reduce_s, score, send_s
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, StageLimits


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """Equal pipelines; the simplest sorts first."""

    stages: int
    pipelines: int
    replicas: int
    tensor: int
    micro_batch: int

    @property
    def devices(self) -> int:
        """Devices taken."""
        return self.stages * self.pipelines * self.replicas * self.tensor


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, its seconds, and seconds below which no plan of any layout stays."""

    plan: dict[str, Any]
    iteration_s: float
    lower_bound_s: float
    layouts: int
    solved: int


class Search:
    """One GPU type and so many of them."""

    def __init__(self, raw: dict[str, Any]) -> None:
        [(self._gpu, self._devices)] = raw["gpus"].items()
        self._case = Case(raw)
        self._store = FrontierStore()
        self._count = len(self._case.weight_bytes)
        self._ratios: dict[tuple[int, int, int, int], float] = {}

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that takes no more than the devices there are."""
        for micro_batch, tensor in self._case.profiled(self._gpu):
            for stages in range(1, min(self._count, self._devices // tensor) + 1):
                for ranks in range(1, self._devices // (tensor * stages) + 1):
                    for pipelines in (n for n in range(1, ranks + 1) if ranks % n == 0):
                        yield Layout(
                            stages=stages,
                            pipelines=pipelines,
                            replicas=ranks // pipelines,
                            tensor=tensor,
                            micro_batch=micro_batch,
                        )

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches of a step, as Sailor counts them."""
        samples = layout.micro_batch * layout.replicas * layout.pipelines
        return math.ceil(self._case.batch / samples)

    def _all_reduce_s(self, size_bytes: float, layout: Layout) -> float:
        link = self._case.ring_link(self._gpu, self._gpu)
        within_s = all_reduce_s(size_bytes / min(4, layout.tensor), layout.replicas, link)
        return within_s + all_reduce_s(size_bytes, layout.pipelines, link)

    def _ratio(self, layout: Layout) -> float:
        """Least seconds of all-reduce per byte, for runs of layers that can be the largest."""
        key = (layout.stages, layout.pipelines, layout.replicas, layout.tensor)
        if key not in self._ratios:
            weights = self._case.weight_bytes
            sums = [0.0]
            for weight in weights:
                sums.append(sums[-1] + weight)
            longest = self._count - layout.stages + 1
            sizes = {
                sums[end] - sums[first]
                for first in range(self._count)
                for end in range(first + 1, min(first + longest, self._count) + 1)
            }
            large = [size for size in sizes if size >= sums[-1] / layout.stages * (1 - 1e-12)]
            least = min(self._all_reduce_s(size, layout) / size for size in large)
            self._ratios[key] = max(0.0, least)
        return self._ratios[key]

    def quick_bound_s(self, layout: Layout) -> float:
        """Seconds that a layout takes at least: stages balanced, no transfers."""
        forward, backward = (self._layer_s(layout, what) for what in ("fwd_s", "bwd_s"))
        chain_s = sum(forward) + sum(backward)
        fewest = sum(self._case.weight_bytes) / layout.stages
        m = self.micro_batches(layout)
        return (m - 1) * chain_s / layout.stages + chain_s + fewest * self._ratio(layout)

    def _layer_s(self, layout: Layout, what: str) -> list[float]:
        found = self._case.layer_s(self._gpu, layout.micro_batch, layout.tensor, what)
        if found is None:
            raise ValueError(f"{layout} was not profiled")
        return found

    def _sent_s(self, layout: Layout, layer: int) -> float:
        """Seconds in which the output of a layer reaches the next stage."""
        replica = {"gpu": self._gpu, "tp": layout.tensor}
        size = self._case.output_bytes[layer] * layout.micro_batch
        return send_s(size, self._case.link(replica, replica))

    def uneven_cut_s(self, layout: Layout) -> float:
        """Least seconds with a cut whose sides send different sizes; inf if there is none."""
        if layout.stages == 1:
            return math.inf
        sizes = self._case.output_bytes
        sent = [
            max(self._sent_s(layout, at), self._sent_s(layout, at + 1))
            for at, (before, after) in enumerate(pairwise(sizes))
            if before != after
        ]
        return self.micro_batches(layout) * min(sent, default=math.inf)

    def instance(self, layout: Layout) -> Instance:
        """Return the chain that bounds the layout from below but for its update and uneven cuts."""
        case, last = self._case, layout.stages - 1
        forward, backward = (self._layer_s(layout, what) for what in ("fwd_s", "bwd_s"))
        ratio = self._ratio(layout)
        fixed_bytes = case.needed_bytes((), layout.tensor, layout.micro_batch, 0)
        kinds: dict[Option, int] = {}
        layers = []
        for at in range(self._count):
            resident = case.needed_bytes((at,), layout.tensor, layout.micro_batch, 0)
            alive = case.needed_bytes((at,), layout.tensor, layout.micro_batch, 1)
            option = Option(
                name="run",
                forward_s=forward[at],
                backward_s=backward[at],
                stored_bytes=alive - resident,
                resident_bytes=resident - fixed_bytes,
                sync_s=ratio * case.weight_bytes[at],
            )
            layers.append(kinds.setdefault(option, len(kinds)))
        sent = [self._sent_s(layout, at) for at in range(self._count)]
        cut_s = [max(a, b) for a, b in pairwise(sent)]
        again_s = min(cut_s, default=0.0)
        exposed_s = [0.0] * layout.stages
        if last > 0:
            exposed_s[last] += again_s
            exposed_s[0] += again_s if last >= 3 else 0.0
        return Instance(
            layers=tuple(layers),
            kinds=tuple((option,) for option in kinds),
            stages=tuple(
                StageLimits(
                    capacity_bytes=case.memory["capacity_bytes"][self._gpu],
                    in_flight=layout.stages - number,
                    exposed_s=exposed_s[number],
                    fixed_bytes=fixed_bytes,
                )
                for number in range(layout.stages)
            ),
            steady=self.micro_batches(layout) - 1,
            cut_s=(0.0, *cut_s, 0.0),
        )

    def least_update_s(self, layout: Layout) -> float:
        """Least seconds of the optimizer, which no cut changes here."""
        return min(self._layer_s(layout, "update_s"))

    def plan(self, layout: Layout, split: Solution) -> dict[str, Any]:
        """Return a split of a layout as a plan of Sailor's."""
        replicas = [{"gpu": self._gpu, "tp": layout.tensor}] * layout.replicas
        pipeline = {
            "layers_per_stage": [list(range(a, b)) for a, b in pairwise(split.cuts)],
            "stages": [replicas] * layout.stages,
        }
        return {"mbs": layout.micro_batch, "pipelines": [pipeline] * layout.pipelines}

    def best(self) -> Found | None:
        """Return the fastest plan found, with the bound on all layouts, or None if none fits."""
        bounds = {layout: self.quick_bound_s(layout) for layout in self.layouts()}
        best: tuple[float, dict[str, Any]] | None = None
        open_s: list[float] = []
        solved = 0
        for layout in sorted(bounds, key=lambda one: (bounds[one], one)):
            known_s = math.inf if best is None else best[0]
            if bounds[layout] >= known_s:
                break
            solved += 1
            update_s = self.least_update_s(layout)
            answer = solve(
                self.instance(layout), cutoff_s=known_s - update_s, frontiers=self._store
            )
            open_s.append(max(bounds[layout], self.uneven_cut_s(layout)))
            if not isinstance(answer, Solution):
                continue
            open_s.append(max(bounds[layout], answer.lower_bound_s + update_s))
            plan = self.plan(layout, answer)
            scored = score(self._case, plan)
            if scored.fits and scored.iteration_s < known_s:
                best = scored.iteration_s, plan
        if best is None:
            return None
        return Found(best[1], best[0], min([best[0], *open_s]), len(bounds), solved)


def compare(path: Path) -> list[Comparison]:
    """Return our plan beside those of Sailor and its rivals, stored scores reproduced first."""
    raw = read_case(path)
    plans = [result for result in raw["results"] if result["sailor_simulator_iter_s"] is not None]
    for result in plans:
        if result.get("plan"):
            scored = score(Case(raw), result["plan"])
            require_score(result["planner"], result["sailor_simulator_iter_s"], scored.iteration_s)
    found, cpu_s = timed(lambda: Search(raw).best())
    proven = found is not None and found.lower_bound_s >= found.iteration_s * (1 - 1e-9)
    return [
        Comparison(
            case=f"OPT-350M, {sum(raw['gpus'].values())} GPUs",
            peer=result["planner"],
            unit="s per iteration",
            peer_value=result["sailor_simulator_iter_s"],
            value=None if found is None else found.iteration_s,
            proven="equal pipelines" if proven else "",
            cpu_s=cpu_s,
            peer_cpu_s=result.get("process_user_s"),
            peer_wall_s=result["search_time_s"],
        )
        for result in plans
    ]
