"""The split that a search settled on, laid out over the layers and evaluated from raw numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution, Method
from meshwright.planner.solver.knapsack import Content, Knapsacks
from meshwright.planner.solver.partition_problem import (
    Instance,
    Solution,
    evaluate_split,
    fits,
    stage_fits,
)


def content_of(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Kinds, rising, and their number among these layers."""
    return [(kind, kinds.count(kind)) for kind in sorted(set(kinds))]


def laid_out(kinds: Sequence[int], content: Content, taken: Sequence[Sequence[int]]) -> list[int]:
    """Return the options of layers in order; of alike ones the first take the later options."""
    left = {kind: list(options) for (kind, _), options in zip(content, taken, strict=True)}
    return [left[kind].pop() for kind in kinds]


def fastest_options(
    knapsacks: Knapsacks,
    kinds: Sequence[int],
    stage: int,
    *,
    sync_limit_s: float = math.inf,
    enough_s: float = 0.0,
) -> list[int]:
    """Options with which `stage` is fastest by sums, for layers of these kinds in their order.

    Any that take no longer than `enough_s` will do.
    """
    content = content_of(kinds)
    choice = knapsacks.fastest_choice(content, stage, enough_s=enough_s, sync_limit_s=sync_limit_s)
    assert choice is not None, "only stages that fit are assembled"
    return laid_out(kinds, content, choice.options)


def assemble_split(instance: Instance, cuts: Sequence[int], options: Sequence[int]) -> Solution:
    """Evaluate a split whose stages are fastest, layers at their earliest option that is no worse.

    A knapsack saves bytes nobody needs: of two options equally fast it takes the leaner, which may
    be a recomputation that takes no time.
    """
    options = list(options)
    tied = [len({o.time_s for o in table}) < len(table) for table in instance.kinds]
    for s, (first, end) in enumerate(pairwise(cuts)):
        for layer in (layer for layer in range(first, end) if tied[instance.layers[layer]]):
            taken = options[layer]
            table = instance.options_of(layer)
            for earlier in range(taken):
                if table[earlier].time_s != table[taken].time_s:
                    continue
                if table[earlier].sync_s > table[taken].sync_s:
                    continue
                if table[earlier].host_bytes > table[taken].host_bytes:
                    continue
                options[layer] = earlier
                if stage_fits(instance, s, range(first, end), options):
                    break
                options[layer] = taken
    solution = evaluate_split(instance, cuts, options)
    assert fits(instance, solution), "the knapsacks and the formulas of the instance disagree"
    return replace(solution, lower_bound_s=solution.objective_s)


def graph_solution(
    problem: GraphInstance,
    order: Sequence[int],
    cuts: Sequence[int],
    options: Sequence[int],
    types: Sequence[int] = (),
    method: Method = "lattice",
) -> GraphSolution:
    """Evaluate a split of a graph as that of a chain; without `types` all stages are of the first.

    Layers, and the options of each, are as the stages have them.
    """
    types = types or (0,) * (len(cuts) - 1)
    split = assemble_split(problem.laid(order, cuts, types), cuts, options)
    return GraphSolution(
        problem=problem, order=tuple(order), types=tuple(types), split=split, method=method
    )
