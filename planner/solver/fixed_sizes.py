"""Splits whose stages hold given numbers of layers: the best over all rows of sizes in question.

A row says for every stage the fewest and the most layers.  Each is a problem of its own, and what
one of them found is the cutoff of the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Solution,
    Unfinished,
)

O = TypeVar("O", bound=Solution | Infeasible | CutOff | Unfinished)  # noqa: E741 - an outcome

NO_ROW = "the layers cannot be divided among the stages in the numbers that are asked for"


def best_row(instance: Instance, cutoff_s: float, solve: Callable[[Instance, float], O]) -> O:
    """Return the best split of any of `instance.sizes`, each solved below a cutoff.

    Of equally fast ones that of the first row is returned.  Without sizes any split will do.
    """
    if not instance.sizes:
        return solve(instance, cutoff_s)
    best: O | None = None
    left: O | None = None
    bound_s = math.inf
    for row in instance.sizes:
        stages = tuple(
            replace(stage, least_layers=fewest, most_layers=most)
            for stage, (fewest, most) in zip(instance.stages, row, strict=True)
        )
        solution = solve(replace(instance, stages=stages, sizes=()), cutoff_s)
        if isinstance(solution, Infeasible):
            left = left or solution
            continue
        bound_s = min(bound_s, solution.lower_bound_s)
        if isinstance(solution, Solution) and solution.objective_s < cutoff_s:
            best, cutoff_s = solution, solution.objective_s
        elif not isinstance(left, Unfinished):
            left = solution
    if isinstance(best, Solution):
        return replace(best, lower_bound_s=min(best.lower_bound_s, bound_s))
    assert left is not None, "an instance with sizes has a row"
    return left if isinstance(left, Infeasible) else replace(left, lower_bound_s=bound_s)
