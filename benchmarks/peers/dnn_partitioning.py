"""Layer graphs with backward nodes on accelerators and a CPU, as dnn-partitioning poses them.

A forward node and its backward node share a device, so they are one layer here.  The load of an
accelerator is the milliseconds of its nodes and, for each node of its own that another device
reads, or of another that it reads, that node's transfer, once.  A CPU pays for its nodes only.  The
largest load is the objective (milliseconds), and nothing is pipelined: `steady` is 1, `fill` 0.

The graph solver relays an output through every stage that it passes, and charges the CPU for
transfers too.  So its objective is never below the peer's for the same split, and its answers are
priced again by the peer's rule.  Where along the graph the CPU stands is tried one by one, and so
are fewer accelerators, until Σ of all layers over the devices' paces meets the best load known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import networkx
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution, graph_instance
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.partition_problem import Option, StageLimits
from meshwright.planner.solver.solve import solve

Devices = list[list[int]]
Floats = NDArray[np.float64]

# A CPU has room for anything in these problems.
_UNLIMITED = 1e15
_MOST_IDEALS = 2000


def max_load_ms(case: dict[str, Any], accelerators: Devices, cpus: Devices) -> float:
    """Largest load of any device; `accelerators` and `cpus` list the nodes of each."""
    held = [*accelerators, *cpus]
    device = {node: number for number, nodes in enumerate(held) for node in nodes}
    loads = [0.0] * len(held)
    for node in case["nodes"]:
        on = device[node["id"]]
        loads[on] += node["acc_ms"] if on < len(accelerators) else node["cpu_ms"]
    touched: dict[int, set[int]] = {}
    transfer_ms: dict[int, float] = {}
    for edge in case["edges"]:
        before, after = device[edge["src"]], device[edge["dst"]]
        if before != after:
            touched.setdefault(edge["src"], set()).update((before, after))
            transfer_ms[edge["src"]] = edge["transfer_ms"]
    for node_id, devices in touched.items():
        for on in devices:
            if on < len(accelerators):
                loads[on] += transfer_ms[node_id]
    return max(loads)


class Folded:
    """The graph with every forward node and its backward node as one layer."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case = case
        self._layer = {node["id"]: str(node["colocate"]) for node in case["nodes"]}
        self._nodes: dict[str, list[dict[str, Any]]] = {}
        for node in case["nodes"]:
            self._nodes.setdefault(str(node["colocate"]), []).append(node)
        self._graph = networkx.DiGraph()
        self._graph.add_nodes_from(self._nodes)
        self._output_s = dict.fromkeys(self._nodes, 0.0)
        sent: dict[int, float] = {}
        edges: dict[int, set[tuple[str, str]]] = {0: set(), 1: set()}
        backward = {node["id"]: node["backward"] for node in case["nodes"]}
        for edge in case["edges"]:
            if backward[edge["src"]] != backward[edge["dst"]]:
                raise ValueError("an edge joins forward and backward nodes; they are split apart")
            ends = (self._layer[edge["src"]], self._layer[edge["dst"]])
            edges[backward[edge["src"]]].add(ends)
            sent[edge["src"]] = edge["transfer_ms"]
        if edges[1] and edges[0] != edges[1]:
            raise ValueError(
                "backward edges are not those of the forward nodes; they need not be "
                "contiguous together"
            )
        self._graph.add_edges_from(sorted(edges[0]))
        for node_id, transfer_ms in sent.items():
            self._output_s[self._layer[node_id]] += 1e-3 * transfer_ms
        self.seconds = {
            name: 1e-3 * sum(n["acc_ms"] for n in nodes) for name, nodes in self._nodes.items()
        }

    @property
    def cpu_scale(self) -> float:
        """How many times slower a CPU is; the same for all nodes, or there is no answer."""
        slower = {
            round(node["cpu_ms"] / node["acc_ms"], 9)
            for node in self._case["nodes"]
            if node["acc_ms"] > 0
        }
        if len(slower) > 1:
            raise ValueError(f"a CPU is {min(slower)} to {max(slower)} times slower; give it one")
        return slower.pop() if slower else 1.0

    def instance(self, stages: Sequence[StageLimits]) -> GraphInstance:
        """Return the problem of cutting the graph into `stages`, the largest load to be least."""
        return graph_instance(
            self._graph,
            options={
                name: (
                    Option(
                        name="run",
                        forward_s=self.seconds[name],
                        backward_s=0.0,
                        resident_bytes=sum(node["bytes"] for node in nodes),
                    ),
                )
                for name, nodes in self._nodes.items()
            },
            output_s=self._output_s,
            stages=stages,
            steady=1.0,
            fill=0.0,
        )

    def nodes(self, names: Sequence[str]) -> list[int]:
        """Return the nodes of layers, forward and backward."""
        return [node["id"] for name in names for node in self._nodes[name]]


def rows_of_stages(
    case: dict[str, Any], cpu_scale: float
) -> Iterator[tuple[list[StageLimits], int]]:
    """Yield stages and where the CPU is among them (-1: nowhere), many accelerators first."""
    accelerator = StageLimits(capacity_bytes=case["devices"]["accelerator_mem_bytes"])
    cpu = StageLimits(capacity_bytes=_UNLIMITED, time_scale=cpu_scale)
    for count in range(case["devices"]["accelerators"], 0, -1):
        yield [accelerator] * count, -1
        for at in range(count + 1) if case["devices"]["cpus"] else ():
            yield [accelerator] * at + [cpu] + [accelerator] * (count - at), at


def best_split(case: dict[str, Any], *, enough_ms: float = 0.0) -> tuple[float, Devices, Devices]:
    """Return the least largest load in milliseconds and the nodes of accelerators and CPUs.

    A load of `enough_ms` ends the search.
    """
    if case["devices"]["cpus"] > 1:
        raise ValueError("devices.cpus: only one CPU can be placed")
    folded, store = Folded(case), FrontierStore()
    total_ms = 1e3 * sum(folded.seconds.values())
    best: tuple[float, Devices, Devices] | None = None
    for stages, cpu_at in rows_of_stages(case, folded.cpu_scale):
        if len(stages) > len(folded.seconds):
            continue
        paces = sum(1 / stage.time_scale for stage in stages)
        if best is not None and total_ms / paces >= best[0]:
            continue
        answer = solve(folded.instance(stages), frontiers=store)
        if not isinstance(answer, GraphSolution):
            continue
        held = [folded.nodes(names) for names in answer.stages]
        cpus = [held.pop(cpu_at)] if cpu_at >= 0 else []
        load_ms = max_load_ms(case, held, cpus)
        if best is None or load_ms < best[0]:
            best = load_ms, held, cpus
        if best[0] <= enough_ms * (1 + 1e-9):
            break
    if best is None:
        raise ValueError("no split of the graph fits in memory")
    return best


def least_load_ms(case: dict[str, Any]) -> float:
    """Least largest load of any contiguous split over some of the devices, in any order.

        best[a, c][J] = min over I in J of max(best[before][I], load of J - I)

    a accelerators and c CPUs hold the ideal J; the last of them is either.  A load depends on the
    two ideals alone: inside it is known who reads an output and who does not.
    """
    folded = Folded(case)
    stated = folded.instance([StageLimits(capacity_bytes=_UNLIMITED)])
    every = ideals(stated.readers(), most=_MOST_IDEALS)
    if every is None:
        raise ValueError(f"the graph has more than {_MOST_IDEALS} ideals")
    nodes = [folded.nodes([name]) for name in stated.names]
    by_id = {node["id"]: node for node in case["nodes"]}
    columns = np.array(
        [
            [sum(by_id[n][what] for n in held) for what in ("acc_ms", "cpu_ms", "bytes")]
            for held in nodes
        ]
    )
    totals = every.totals(columns)
    accelerator_ms, cpu_ms, size = (
        totals[None, :, column] - totals[:, None, column] for column in range(3)
    )
    holds = np.stack([every.contains(layer) for layer in range(every.layers)])
    for layer, readers in enumerate(stated.readers()):
        sent_ms, has = 1e3 * stated.sent_s()[layer], holds[layer]
        if not readers or sent_ms == 0:
            continue
        left = has & ~every.holds_all(readers)
        accelerator_ms += sent_ms * np.outer(~has, left)
        read = np.zeros(accelerator_ms.shape, dtype=bool)
        for reader in readers:
            read |= np.outer(~holds[reader], holds[reader])
        accelerator_ms += sent_ms * (read & has[:, None])
    words = every.words
    inside = ((words[:, None] & words[None]) == words[:, None]).all(axis=2)
    room = case["devices"]["accelerator_mem_bytes"] * (1 + ROUNDING)
    accelerator_ms[~inside | (size > room)] = np.inf
    cpu_ms[~inside] = np.inf
    best: dict[tuple[int, int], Floats] = {}
    for a, c in product(
        range(case["devices"]["accelerators"] + 1), range(case["devices"]["cpus"] + 1)
    ):
        reached = np.full(len(every), np.inf)
        reached[0] = 0.0
        for before, load_ms in (((a - 1, c), accelerator_ms), ((a, c - 1), cpu_ms)):
            if before in best:
                largest = np.maximum(best[before][:, None], load_ms)
                reached = np.minimum(reached, largest.min(axis=0))
        best[a, c] = reached
    return float(min(reached[-1] for reached in best.values()))


def proven_split(case: dict[str, Any]) -> tuple[float, bool]:
    """Return the largest load of our split, and whether no contiguous split has a lower one."""
    least_ms = least_load_ms(case)
    load_ms, _, _ = best_split(case, enough_ms=least_ms)
    return load_ms, load_ms <= least_ms * (1 + 1e-9)


def compare(path: Path) -> list[Comparison]:
    """Return our split beside each of the peer's, after its stored loads were reproduced."""
    case = read_case(path)
    plans = [result for result in case["results"] if "fpgas" in result]
    for plan in plans:
        ours = max_load_ms(case, plan["fpgas"], plan["cpus"])
        require_score(plan["planner"], plan["max_load"], ours)
    (load_ms, proven), cpu_s = timed(partial(proven_split, case))
    return [
        Comparison(
            case=case["name"].removeprefix("dnnpart_"),
            peer=plan["planner"],
            unit="ms, largest load",
            peer_value=plan["max_load"],
            value=load_ms,
            proven="contiguous splits" if proven else "",
            cpu_s=cpu_s,
            peer_wall_s=plan["wall_s_under_load"],
        )
        for plan in plans
    ]
