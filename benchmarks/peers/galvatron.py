"""Galvatron's inner problem: one strategy for each of many layers alike, in the memory of a device.

It minimises the seconds of the layers and of changes of strategy between neighbours,

    Σ_l time[k_l] + Σ_l change[k_{l-1}][k_l] + other time
    Σ_l bytes[k_l] + other bytes <= capacity                    in whole megabytes

Without the changes this is one stage of a chain, and their optimum is a lower
bound.  Strategies that can follow each other at no cost, one way or the other, form families.

    least = min over families F of chain(F),   and   chain(all) + (least change between families)

bounds all assignments: those within one family, and those that leave it.  A chain's optimum says
how many layers take each strategy; the layers are alike, so they stand in the order with the
cheapest changes.  If that costs no more than the bound, it is an optimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import networkx

from benchmarks.peers.comparison import Comparison, read_case, require_score, timed
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, StageLimits

# More strategies in one answer than this are put in order by number.
_MOST_ORDERED = 7
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Assignment:
    """The strategy of each layer, its seconds, and seconds below which no assignment stays."""

    strategies: tuple[int, ...]
    cost_s: float
    lower_bound_s: float

    @property
    def optimal(self) -> bool:
        """Whether the bound meets the cost, up to rounding."""
        return self.cost_s - self.lower_bound_s <= 1e-12 * abs(self.cost_s)


def cost_s(case: dict[str, Any], strategies: Sequence[int]) -> float:
    """Seconds of the layers, of the changes between them and of all else."""
    change_s = case["transition_time_s_first"]
    layers_s = sum(times[k] for times, k in zip(case["layer_time_s"], strategies, strict=True))
    changes_s = sum(change_s[before][after] for before, after in pairwise(strategies))
    return float(layers_s + changes_s + case["other_time_s"][case["embed_option"]])


def needed_mb(case: dict[str, Any], strategies: Sequence[int]) -> float:
    """Megabytes of the layers and of all else."""
    layers = sum(sizes[k] for sizes, k in zip(case["layer_mem_mb"], strategies, strict=True))
    return float(layers + case["other_mem_mb"][case["embed_option"]])


def families(change_s: Sequence[Sequence[float]]) -> list[list[int]]:
    """Strategies joined by changes that cost nothing in one direction or the other."""
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(change_s)))
    graph.add_edges_from(
        (before, after)
        for before, row in enumerate(change_s)
        for after, seconds in enumerate(row)
        if seconds == 0
    )
    return sorted(sorted(family) for family in networkx.connected_components(graph))


def _least_change_between(
    families: Sequence[Sequence[int]], change_s: Sequence[Sequence[float]]
) -> float:
    family_of = {k: number for number, family in enumerate(families) for k in family}
    return min(
        (
            seconds
            for before, row in enumerate(change_s)
            for after, seconds in enumerate(row)
            if family_of[before] != family_of[after]
        ),
        default=float("inf"),
    )


def _chain(
    case: dict[str, Any], strategies: Sequence[int], store: FrontierStore
) -> Solution | None:
    """Optimum with these strategies if changes cost nothing, or None if none fits."""
    times, sizes = case["layer_time_s"][0], case["layer_mem_mb"][0]
    embed = case["embed_option"]
    instance = Instance(
        layers=(0,) * case["layers"],
        kinds=(
            tuple(
                Option(
                    name=str(k),
                    forward_s=times[k],
                    backward_s=0.0,
                    resident_bytes=sizes[k] * _MEGABYTE,
                )
                for k in strategies
            ),
        ),
        stages=(
            StageLimits(
                capacity_bytes=case["mem_cap_mb"] * _MEGABYTE,
                fixed_bytes=case["other_mem_mb"][embed] * _MEGABYTE,
                exposed_s=case["other_time_s"][embed],
            ),
        ),
        steady=0.0,
    )
    answer = solve(instance, frontiers=store)
    return answer if isinstance(answer, Solution) else None


def _in_cheapest_order(counts: Counter[int], change_s: Sequence[Sequence[float]]) -> list[int]:
    """Layers of one strategy side by side, the strategies in the order with the least changes."""
    orders = [tuple(sorted(counts))]
    if len(counts) <= _MOST_ORDERED:
        orders = list(permutations(sorted(counts)))
    cheapest = min(orders, key=lambda order: sum(change_s[a][b] for a, b in pairwise(order)))
    return [k for k in cheapest for _ in range(counts[k])]


def best_assignment(case: dict[str, Any]) -> Assignment | None:
    """Return the cheapest assignment found, with its bound, or None if none fits."""
    for table in ("layer_time_s", "layer_mem_mb"):
        if any(row != case[table][0] for row in case[table]):
            raise ValueError(f"{table}: layers differ; their order is not free")
    change_s, store = case["transition_time_s_first"], FrontierStore()
    kin = families(change_s)
    anywhere = _chain(case, range(len(change_s)), store)
    if anywhere is None:
        return None
    bound_s = anywhere.objective_s + _least_change_between(kin, change_s)
    found: list[tuple[float, list[int]]] = []
    for family in kin:
        answer = _chain(case, family, store)
        if answer is not None:
            bound_s = min(bound_s, answer.objective_s)
            taken = Counter(family[option] for option in answer.options)
            strategies = _in_cheapest_order(taken, change_s)
            found.append((cost_s(case, strategies), strategies))
    taken = Counter(anywhere.options)
    strategies = _in_cheapest_order(taken, change_s)
    found.append((cost_s(case, strategies), strategies))
    cost, strategies = min(found)
    return Assignment(tuple(strategies), cost, min(bound_s, cost))


def compare(path: Path) -> list[Comparison]:
    """Return our assignment beside Galvatron's for each captured problem."""
    rows = []
    for case in read_case(path)["dp_core_subproblems"]:
        name = f"Llama-2-7B, inner problem {case['call']}"
        peer = case["galvatron"]
        require_score(name, peer["cost_s"], cost_s(case, peer["choice"]))
        require_score(f"{name}, megabytes", peer["mem_mb"], needed_mb(case, peer["choice"]))
        answer, cpu_s = timed(partial(best_assignment, case))
        if answer is not None and needed_mb(case, answer.strategies) > case["mem_cap_mb"]:
            raise AssertionError("the chain's optimum exceeds the memory of the case")
        rows.append(
            Comparison(
                case=name,
                peer="Galvatron 2.4.1, dp_core",
                unit="s",
                peer_value=peer["cost_s"],
                value=None if answer is None else answer.cost_s,
                proven="all assignments" if answer is None or answer.optimal else "",
                cpu_s=cpu_s,
                peer_wall_s=peer["dp_core_wall_s_under_load"],
            )
        )
    return rows
