"""Piper's problem: stages with their own data- and tensor-parallel degrees, in the steady state.

Piper minimises the seconds per micro-batch of the slowest stage, with neither fill nor drain.  Of
all micro-batches of a step (N) a stage on d replicas of t devices runs N / d on each.  Its load is

    Σ time / d  +  Σ over cut edges 2 (bytes + sync) / (d · bandwidth)
                +  Σ parameter bytes 4 (d - 1) / (d · N · bandwidth)

An edge counts on the stage it leaves and on the stage it enters, with the sync bytes of that end
and its t; it does not count on stages that it passes.  Each layer is kept or recomputed, and needs
y · stored + resident bytes, y the replicas from its stage to the end by d, rounded up.

A file is a restated problem with results, or Piper's own input (`inputs/NAME.json` of its
repository) with its program's plans beside it (`NAME_plans.json`: the limits, `TPS` and `stages` as
the program has them, `cpu_s`).

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
    WideSearch,
    WideSplit,
    least_load,
)
from meshwright.planner.solver.graph_instance import graph_instance
from meshwright.planner.solver.graphs.ideals import Ideals, ideals
from meshwright.planner.solver.graphs.nearby import along_orders, of_bits
from meshwright.planner.solver.partition_problem import Option, StageLimits

MOST_IDEALS = 2000
"""Of a graph with more, only the ideals along a few orders of its branches are looked at."""

_MANY = 64
"""Nodes up to which stages keep so many choices of options, and beyond which so few."""
_MANY_PICKS, _FEW_PICKS = 128, 32

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


def restated(raw: dict[str, Any]) -> dict[str, Any]:
    """Return Piper's own input in the form of a case."""
    variants = {
        node["id"]: [
            {
                "tp": int(tensor),
                "kind": one["id"],
                "time_s": one["timePerSample"],
                "param_bytes": one["parameterSize"],
                "mem_a": one["memoryUsageA"],
                "mem_b": one["memoryUsageB"],
                "sync_fw_bytes": one["syncTimeFw"],
                "sync_bw_bytes": one["syncTimeBw"],
            }
            for tensor, ways in node["TMPCs"].items()
            for one in ways
        ]
        for node in raw["nodes"]
    }
    return {
        "layers": [{"id": node, "variants": ways} for node, ways in variants.items()],
        "edges": [
            {"src": e["sourceId"], "dst": e["destId"], "bytes": e["communicationCost"]}
            for e in raw["edges"]
        ],
    }


def restated_result(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what Piper's program prints of one problem in the form of a case's result."""
    stages = raw.get("stages") or []
    return {
        "planner": raw["planner"],
        "devices_k": raw["maxDevices"],
        "mem_cap_bytes": raw["maxMemoryPerDevice"],
        "bandwidth": raw["bandwidth"],
        "microbatches": raw["mbsInBatch"],
        "tps_s": raw.get("TPS"),
        "cpu_s": raw.get("cpu_s"),
        "wall_s": None,
        "plan": [
            {
                "nodes": stage["nodes"],
                "dp": stage["dataParallelDegree"],
                "tp": stage["tensorParallelDegree"],
                "variants": stage["TMPCids"],
            }
            for stage in stages
        ],
    }


class Graph:
    """The layers of a case in a topological order, with their ideals, or with some of them."""

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
        every = ideals([sorted(outside) for outside in readers], most=MOST_IDEALS)
        self.complete = every is not None
        self.every: Ideals = self._along_orders(graph) if every is None else every
        self._tensors = sorted({v["tp"] for v in self._layers[0]["variants"]})

    def _along_orders(self, graph: networkx.DiGraph) -> Ideals:
        """Return what the orders worth trying have first; numbers are those of `order`."""
        number = {node: str(at) for at, node in enumerate(self.order)}
        stated = graph_instance(
            networkx.relabel_nodes(graph, number),
            options=dict.fromkeys(number.values(), (Option(name="", forward_s=0, backward_s=0),)),
            output_s={str(before): edge["bytes"] for before, _, edge in self._edges},
            stages=(StageLimits(capacity_bytes=0.0),),
            steady=0.0,
        )
        own = [1 << int(name) for name in stated.names]
        return of_bits(
            {
                sum(bit for at, bit in enumerate(own) if held >> at & 1)
                for held in along_orders(stated)
            },
            len(own),
        )

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
            first, then = every.contains(before), every.contains(after)
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
            most_picks=_MANY_PICKS if len(self.order) <= _MANY else _FEW_PICKS,
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
    """Return a plan with the least load there is, or None if none fits.

    Of a graph with more than `MOST_IDEALS` ideals, the best along a few orders of its branches.
    """
    return best_split(case, limits, space)[0]


def best_split(
    case: dict[str, Any], limits: dict[str, Any], space: Space = Space()
) -> tuple[list[dict[str, Any]] | None, float]:
    """Return the plan, and a load that no plan of the space is below.

    That load is the plan's own where all ideals and choices of options were looked at (inf if there
    is no plan), and else what all devices take that share the layers' least seconds evenly.
    """
    graph = Graph(case)
    problem, kinds = graph.problem(limits, space)
    search = WideSearch(problem)
    split = least_load(search)
    proven = graph.complete and not search.thinned
    if split is None:
        return None, math.inf if proven else search.least_s
    return graph.plan(split, kinds), split.load_s if proven else search.least_s


def compare(path: Path) -> list[Comparison]:
    """Return our plan beside each of Piper's, after its stored scores were reproduced."""
    case = read_case(path)
    model = "BERT-32"
    if "nodes" in case:
        own = read_case(path.with_name(f"{path.stem}_plans.json"))
        model = path.stem.removeprefix("piper_")
        case = restated(case) | {"results": [restated_result(one) for one in own]}
    for result in case["results"]:
        if result["plan"]:
            name = _name(model, result)
            require_score(name, result["tps_s"], load_s(case, result["plan"], result))
    rows: list[Comparison] = []
    solved: dict[tuple[Any, ...], tuple[float | None, float, str]] = {}
    for result in case["results"]:
        space = SPACES.get(result["planner"], Space())
        key = (result["devices_k"], result["mem_cap_bytes"], space)
        if key not in solved:
            (plan, least_s), cpu_s = timed(partial(best_split, case, result, space))
            load = None if plan is None else load_s(case, plan, result)
            proven = least_s >= (math.inf if load is None else load * (1 - 1e-9))
            solved[key] = load, cpu_s, "Piper's space" if proven else f"> {least_s:.6g}"
        value, cpu_s, proven_of = solved[key]
        rows.append(
            Comparison(
                case=_name(model, result),
                peer=result["planner"],
                unit="s per micro-batch",
                peer_value=result["tps_s"],
                value=value,
                proven=proven_of,
                cpu_s=cpu_s,
                peer_cpu_s=result["cpu_s"],
                peer_wall_s=result["wall_s"],
            )
        )
    return rows


def _name(model: str, result: dict[str, Any]) -> str:
    return f"{model}, {result['devices_k']} x {result['mem_cap_bytes'] / 2**30:g} GiB"
