"""Inference graphs of layers and operators with colour classes, as dnn-partitioning poses them.

Nodes of one colour class share a device; nodes without one share nothing.  Classes that wait for
each other are one (the peer fuses them too).  The load of an accelerator is the milliseconds of its
nodes, and for each output that enters or leaves it the output's transfer, once, wherever the other
end is: nothing is relayed.  A CPU pays for its nodes only.  The largest load is the objective.

Where along the graph the CPU stands is tried one by one, and so are fewer accelerators, unless all
layers spread evenly over these devices take longer than the best known.  Of graphs with many
downsets not all of these problems are solved; of what is left that even spread is the bound.  If
nothing is left the best is proven over all contiguous splits.  The files are the peer's own, each
with the output of its program beside it (`NAME.json`, `NAME_split.json`).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import networkx

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution, graph_instance
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.partition_problem import Option, StageLimits
from meshwright.planner.solver.solve import solve

Devices = list[list[int]]

_UNLIMITED = 1e15  # A CPU has room for anything in these problems.
_WORK, _LEAST = 20_000, 4
"""Downsets of all problems that are solved together; problems that are solved in any case."""


def max_load_ms(case: dict[str, Any], accelerators: Devices, cpus: Devices) -> float:
    """Largest load of any device; `accelerators` and `cpus` list the nodes of each."""
    device = {node: at for at, nodes in enumerate([*accelerators, *cpus]) for node in nodes}
    loads = [0.0] * (len(accelerators) + len(cpus))
    for node in case["nodes"]:
        on = device[node["id"]]
        loads[on] += node["fpgaLatency" if on < len(accelerators) else "cpuLatency"]
    ends: dict[int, set[int]] = {}
    cost_ms: dict[int, float] = {}
    for edge in case["edges"]:
        source, cost_ms[edge["sourceId"]] = edge["sourceId"], edge["cost"]
        ends.setdefault(source, {device[source]}).add(device[edge["destId"]])
    for source, touched in ends.items():
        for on in touched if len(touched) > 1 else ():
            if on < len(accelerators):
                loads[on] += cost_ms[source]
    return max(loads)


def groups(case: dict[str, Any]) -> list[list[str]]:
    """Return nodes that share a device, classes that wait for each other joined."""
    home = {
        node["id"]: ("class", node["colorClass"])
        if node.get("colorClass") is not None
        else ("node", node["id"])
        for node in case["nodes"]
    }
    joined = networkx.DiGraph()
    joined.add_nodes_from(home.values())
    joined.add_edges_from((home[edge["sourceId"]], home[edge["destId"]]) for edge in case["edges"])
    number = {
        one: at
        for at, component in enumerate(networkx.strongly_connected_components(joined))
        for one in component
    }
    found: dict[int, list[str]] = {}
    for node in case["nodes"]:
        found.setdefault(number[home[node["id"]]], []).append(str(node["id"]))
    return [nodes for nodes in found.values() if len(nodes) > 1]


def cpu_scale(case: dict[str, Any]) -> float:
    """How many times slower a CPU is; the same for all nodes, or there is no answer."""
    slower = {
        round(node["cpuLatency"] / node["fpgaLatency"], 6)
        for node in case["nodes"]
        if node["fpgaLatency"] > 0
    }
    if len(slower) > 1 or not all(node["supportedOnFpga"] for node in case["nodes"]):
        raise ValueError("nodes: are slower on a CPU by the same factor, and run on accelerators")
    return slower.pop() if slower else 1.0


def instance(case: dict[str, Any], accelerators: int, cpu_at: int | None = None) -> GraphInstance:
    """Return the problem over so many accelerators, and a CPU before one of them or behind.

    Seconds stand for the peer's milliseconds.
    """
    stages = [StageLimits(capacity_bytes=case["maxSizePerFPGA"])] * accelerators
    if cpu_at is not None:
        stages.insert(cpu_at, StageLimits(capacity_bytes=_UNLIMITED, time_scale=cpu_scale(case)))
    graph = networkx.DiGraph()
    graph.add_nodes_from(str(node["id"]) for node in case["nodes"])
    graph.add_edges_from((str(edge["sourceId"]), str(edge["destId"])) for edge in case["edges"])
    return graph_instance(
        graph,
        options={
            str(node["id"]): (
                Option(
                    name="run",
                    forward_s=node["fpgaLatency"],
                    backward_s=0.0,
                    resident_bytes=node["size"],
                ),
            )
            for node in case["nodes"]
        },
        output_s={str(edge["sourceId"]): edge["cost"] for edge in case["edges"]},
        stages=stages,
        steady=1.0,
        fill=0.0,
        colocated=groups(case),
        relayed=False,
        unpaid=() if cpu_at is None else (cpu_at,),
    )


def best_split(case: dict[str, Any]) -> tuple[float, float, Devices, Devices]:
    """Return the least largest load, a bound of all splits, and nodes of accelerators and CPU."""
    store, bound_ms = FrontierStore(), math.inf
    best: tuple[float, Devices, Devices] = (math.inf, [], [])
    most = case["maxFPGAs"]
    rows = [(count, None) for count in range(most, 0, -1)]  # type: list[tuple[int, int | None]]
    if case["maxCPUs"]:
        rows += [(count, at) for count in range(most, -1, -1) for at in range(count + 1)]
    all_ms = sum(node["fpgaLatency"] for node in case["nodes"])
    plain = instance(case, most)
    downsets = ideals(plain.readers(), most=_WORK, colocated=plain.colocated)
    left = max(_LEAST, _WORK // (_WORK if downsets is None else len(downsets)))
    for count, cpu_at in rows:
        even_ms = all_ms / (count + (cpu_at is not None) / cpu_scale(case))
        if even_ms >= best[0]:
            continue
        if not left:
            bound_ms = min(bound_ms, even_ms)
            continue
        left -= 1
        answer = solve(
            instance(case, count, cpu_at),
            cutoff_s=best[0],
            frontiers=store,
        )
        if isinstance(answer, GraphSolution):
            held = [[int(name) for name in names] for names in answer.stages]
            cpus = [] if cpu_at is None else [held.pop(cpu_at)]
            bound_ms = min(bound_ms, answer.lower_bound_s)
            load_ms = max_load_ms(case, held, cpus)
            if not math.isclose(load_ms, answer.objective_s, rel_tol=1e-9):
                raise ValueError(f"a split of {answer.objective_s} ms has a load of {load_ms} ms")
            if load_ms < best[0]:
                best = load_ms, held, cpus
        else:
            bound_ms = min(bound_ms, getattr(answer, "lower_bound_s", math.inf))
    if best[0] == math.inf:
        raise ValueError("no split of the graph fits in memory")
    return best[0], min(bound_ms, best[0]), *best[1:]


def compare(path: Path) -> list[Comparison]:
    """Return our split beside the peer's, after its stored load was reproduced."""
    case = read_case(path)
    theirs = read_case(path.with_name(f"{path.stem}_split.json"))
    held = [[one["nodes"] for one in theirs[kind]] for kind in ("fpgas", "cpus")]
    require_score(path.stem, theirs["maxLoad"], max_load_ms(case, *held), tolerance=1e-9)
    (load_ms, bound_ms, *_), cpu_s = timed(partial(best_split, case))
    return [
        Comparison(
            case=path.stem,
            peer="dnn-partitioning",
            unit="ms, largest load",
            peer_value=theirs["maxLoad"],
            value=load_ms,
            proven="contiguous splits" if bound_ms >= load_ms * (1 - 1e-9) else f"> {bound_ms:.6g}",
            cpu_s=cpu_s,
            peer_cpu_s=theirs.get("cpu_s"),
        )
    ]
