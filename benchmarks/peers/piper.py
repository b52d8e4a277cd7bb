"""Piper's problem: stages with their own data- and tensor-parallel degrees, in the steady state.

Piper minimises the seconds per micro-batch of the slowest stage, with neither fill nor drain.  Of
all micro-batches of a step (N) a stage on d replicas of t devices runs N / d on each.  Its load is

    Σ time / d  +  Σ over cut edges 2 (bytes + sync) / (d · bandwidth)
                +  Σ parameter bytes 4 (d - 1) / (d · N · bandwidth)

An edge counts on the stage it leaves and on the stage it enters, with the sync bytes of that end
and its t; it does not count on stages that it passes.  Each layer is kept or recomputed, and needs
y · stored + resident bytes, y the replicas from its stage to the end by d, rounded up.

No chain or graph instance of the planner can say this (a stage's replicas decide what stages before
it hold, and the two ends of a cut pay differently), nor would its runtime run it.  So the search is
`benchmarks.peers.wide_stages`, over the planner's ideals, and as exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from benchmarks.peers.wide_stages import (
    Floats,
    Options,
    WideProblem,
    WideSplit,
    least_load,
)
from planner.solver.graphs.ideals import Ideals, ideals

_MOST_IDEALS = 2000

KEPT, RECOMPUTED = "vanilla", "activation recomp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a plan may use; Piper's ablations leave something out."""

    data: bool = True
    tensor: bool = True
    recompute: bool = True


SPACES = {
    "Piper, no data par.": Space(data=False),
    "Piper, no tensor par.": Space(tensor=False),
    "Piper, no recompute": Space(recompute=False),
}


def load_s(case: dict[str, Any], plan: list[dict[str, Any]], limits: dict[str, Any]) -> float:
    """Seconds per micro-batch of the slowest stage of a plan; inf if it does not fit.

    Raises ValueError if the plan is none: layers left out, stages out of order, too many devices.
    """
    micro_batches, bandwidth = limits["microbatches"], limits["bandwidth"]
    stage_of = {node: number for number, stage in enumerate(plan) for node in stage["nodes"]}
    if sorted(stage_of) != sorted(layer["id"] for layer in case["layers"]):
        raise ValueError("the plan does not hold each layer once")
    if any(stage_of[edge["src"]] > stage_of[edge["dst"]] for edge in case["edges"]):
        raise ValueError("the stages of the plan are not in the order of the graph")
    if any(micro_batches % stage["dp"] for stage in plan):
        raise ValueError("a stage's replicas do not divide the micro-batches")
    if sum(stage["dp"] * stage["tp"] for stage in plan) > limits["devices_k"]:
        raise ValueError("the plan takes more devices than there are")
    variants = {
        layer["id"]: {(v["tp"], v["kind"]): v for v in layer["variants"]}
        for layer in case["layers"]
    }
    worst_s, behind = 0.0, sum(stage["dp"] for stage in plan)
    for number, stage in enumerate(plan):
        d, kinds = stage["dp"], dict(stage["variants"])
        held = {node: variants[node][stage["tp"], kinds[node]] for node in stage["nodes"]}
        in_flight = -(-behind // d)
        behind -= d
        needed = sum(v["mem_a"] * in_flight + v["mem_b"] for v in held.values())
        if needed > limits["mem_cap_bytes"]:
            return math.inf
        sent = 0.0
        for edge in case["edges"]:
            before, after = edge["src"], edge["dst"]
            if stage_of[before] == stage_of[after]:
                continue
            if stage_of[after] == number:
                sent += 2 * (edge["bytes"] + held[after]["sync_fw_bytes"][str(before)])
            if stage_of[before] == number:
                sent += 2 * (edge["bytes"] + held[before]["sync_bw_bytes"][str(after)])
        shared = sum(4 * (d - 1) * v["param_bytes"] / d / micro_batches for v in held.values())
        time_s = sum(v["time_s"] for v in held.values())
        worst_s = max(worst_s, time_s / d + (sent / d + shared) / bandwidth)
    return worst_s


class Graph:
    """The layers of a case in a topological order, with their ideals."""

    def __init__(self, case: dict[str, Any]) -> None:
        graph = networkx.DiGraph()
        graph.add_nodes_from(layer["id"] for layer in case["layers"])
        graph.add_edges_from((edge["src"], edge["dst"]) for edge in case["edges"])
        self.order: list[int] = list(networkx.topological_sort(graph))
        number = {node: at for at, node in enumerate(self.order)}
        by_id = {layer["id"]: layer for layer in case["layers"]}
        self._layers = [by_id[node] for node in self.order]
        self._edges = [(number[e["src"]], number[e["dst"]], e) for e in case["edges"]]
        readers: list[set[int]] = [set() for _ in self.order]
        for before, after, _ in self._edges:
            readers[before].add(after)
        every = ideals([sorted(outside) for outside in readers], most=_MOST_IDEALS)
        if every is None:
            raise ValueError(f"the graph has more than {_MOST_IDEALS} ideals")
        self.every: Ideals = every
        self._tensors = sorted({v["tp"] for v in self._layers[0]["variants"]})

    def _variants(self, at: int, tensor: int, kinds: Collection[str]) -> list[dict[str, Any]]:
        chosen = [
            v for v in self._layers[at]["variants"] if v["tp"] == tensor and v["kind"] in kinds
        ]
        for key in ("param_bytes", "sync_fw_bytes", "sync_bw_bytes"):
            if any(v[key] != chosen[0][key] for v in chosen):
                raise ValueError(f"layer {self.order[at]}: {key} depends on what is recomputed")
        return chosen

    def _sent_bytes(self, tensor: int, kinds: Collection[str]) -> Floats:
        """[ideal, ideal] Bytes of the edges that enter or leave the stage between the two."""
        every = self.every
        sent = np.zeros((len(every), len(every)))
        for before, after, edge in self._edges:
            enters = self._variants(after, tensor, kinds)[0]["sync_fw_bytes"]
            leaves = self._variants(before, tensor, kinds)[0]["sync_bw_bytes"]
            first, then = every.holds(before), every.holds(after)
            # Between ideals I and J: enters if J has the reader and I only the layer read, leaves
            # if J has the layer read and not the reader, and I neither.
            sent += np.outer(first & ~then, then) * (2 * (edge["bytes"] + enters[str(edge["src"])]))
            sent += np.outer(~first, first & ~then) * (
                2 * (edge["bytes"] + leaves[str(edge["dst"])])
            )
        return sent

    def problem(self, limits: dict[str, Any], space: Space) -> tuple[WideProblem, tuple[str, ...]]:
        """Return the problem under the limits, and the kinds that its options stand for."""
        n, bandwidth, devices = limits["microbatches"], limits["bandwidth"], limits["devices_k"]
        kinds = (KEPT, RECOMPUTED) if space.recompute else (KEPT,)
        tensors = [t for t in self._tensors if t <= devices] if space.tensor else [1]
        most = devices if space.data else 1
        layers = range(len(self.order))

        def options(at: int, tensor: int) -> Options:
            return tuple(
                (v["time_s"], v["mem_a"], v["mem_b"]) for v in self._variants(at, tensor, kinds)
            )

        return WideProblem(
            every=self.every,
            tensors=tuple(tensors),
            replicas=tuple(d for d in range(1, most + 1) if n % d == 0),
            options=tuple(tuple(options(at, t) for at in layers) for t in tensors),
            sent_s=tuple(self._sent_bytes(t, kinds) / bandwidth for t in tensors),
            shared_s=tuple(
                np.array([self._variants(at, t, kinds)[0]["param_bytes"] for at in layers])
                * (4 / n / bandwidth)
                for t in tensors
            ),
            capacity_bytes=limits["mem_cap_bytes"],
            devices=devices,
        ), kinds

    def plan(self, split: WideSplit, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return an answer as a plan of Piper's."""
        return [
            {
                "nodes": [self.order[at] for at in stage.layers],
                "dp": stage.replicas,
                "tp": stage.tensor,
                "variants": [
                    (self.order[at], kinds[option])
                    for at, option in zip(stage.layers, stage.options, strict=True)
                ],
            }
            for stage in split.stages
        ]


def best_plan(
    case: dict[str, Any], limits: dict[str, Any], space: Space = Space()
) -> list[dict[str, Any]] | None:
    """Return a plan with the least load there is, or None if none fits."""
    graph = Graph(case)
    problem, kinds = graph.problem(limits, space)
    split = least_load(problem)
    return None if split is None else graph.plan(split, kinds)


def compare(path: Path) -> list[Comparison]:
    """Return our plan beside each of Piper's, after its stored scores were reproduced."""
    case = read_case(path)
    for result in case["results"]:
        if result["plan"]:
            require_score(_name(result), result["tps_s"], load_s(case, result["plan"], result))
    rows: list[Comparison] = []
    solved: dict[tuple[Any, ...], tuple[float | None, float]] = {}
    for result in case["results"]:
        space = SPACES.get(result["planner"], Space())
        key = (result["devices_k"], result["mem_cap_bytes"], space)
        if key not in solved:
            plan, cpu_s = timed(partial(best_plan, case, result, space))
            solved[key] = (None if plan is None else load_s(case, plan, result), cpu_s)
        value, cpu_s = solved[key]
        rows.append(
            Comparison(
                case=_name(result),
                peer=result["planner"],
                unit="s per micro-batch",
                peer_value=result["tps_s"],
                value=value,
                proven="Piper's space",
                cpu_s=cpu_s,
                peer_cpu_s=result["cpu_s"],
                peer_wall_s=result["wall_s"],
            )
        )
    return rows


def _name(result: dict[str, Any]) -> str:
    return f"BERT-32, {result['devices_k']} x {result['mem_cap_bytes'] / 2**30:g} GiB"
