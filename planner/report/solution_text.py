"""A solved partition problem as text for a terminal, and as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from planner.report.facts import plain_table
from planner.solver.instance import Fathomed, Infeasible, Instance, Solution, host_bytes
from planner.solver.problem import Problem
from planner.units import bytes_text, seconds_text

FEW = 8
"""Stages that are shown unless all of them are asked for."""


def solution_text(problem: Problem, solution: Solution, *, explain: bool = False) -> RenderableType:
    """Return the step, and a row for each stage: layers, their options, seconds, memory.

    Of many stages the slowest are shown; with `explain` all are.
    """
    instance = problem.instance()
    proof = "optimal" if solution.optimal else f"within {100 * solution.gap:.2g} %"
    lines: list[RenderableType] = [
        f"a step takes {seconds_text(solution.objective_s)}, {proof}; none takes less than "
        f"{seconds_text(solution.lower_bound_s)}"
    ]
    columns = ("stage", "layers", "options", "seconds", "once a step", "memory", "of")
    table = plain_table(*columns, right=(3, 4, 5, 6))
    slowest_s = max(solution.stage_s)
    rows = stages_of(problem, solution)
    if len(rows) > FEW and not explain:
        slowest = sorted(rows, key=lambda row: -float(row["seconds"]))[: FEW - 1]
        rows = [row for row in rows if row in slowest]
        lines.append(
            f"the slowest {len(rows)} of {len(solution.stage_s)} stages; --explain has all"
        )
    for row in rows:
        marked = "*" if row["seconds"] == slowest_s else ""
        table.add_row(
            str(row["stage"]),
            _span(*row["layers"]),
            options_text(problem, solution, row["layers"]),
            marked + seconds_text(row["seconds"]),
            seconds_text(row["sync_s"]),
            bytes_text(row["bytes"]),
            bytes_text(row["capacity_bytes"]),
        )
    lines.append(table)
    lines.append("seconds are of one micro-batch, forward and backward; * is the slowest stage")
    for number, host in enumerate(instance.hosts):
        used = host_bytes(instance, host, solution)
        lines.append(
            f"host {number}: {bytes_text(used)} of {bytes_text(host.capacity_bytes)} in memory"
        )
    return Group(*lines)


def stages_of(problem: Problem, solution: Solution) -> list[dict[str, Any]]:
    """Return every stage as plain data; `layers` are its first and its last."""
    instance = problem.instance()
    return [
        {
            "stage": s,
            "layers": [first, end - 1],
            "options": _names(instance, solution, range(first, end)),
            "seconds": solution.stage_s[s],
            "sync_s": solution.stage_sync_s[s],
            "bytes": solution.stage_bytes[s],
            "capacity_bytes": instance.stages[s].capacity_bytes,
        }
        for s, (first, end) in enumerate(itertools.pairwise(solution.cuts))
    ]


def options_text(problem: Problem, solution: Solution, layers: Sequence[int]) -> str:
    """Return the options of the layers from the first to the last, alike ones in a row together.

    `embedding: keep; 3 x block: recompute; 2 x block: keep`
    """
    instance, kinds = problem.instance(), list(problem.kinds)
    held = range(layers[0], layers[1] + 1)
    chosen = zip(
        (kinds[instance.layers[layer]] for layer in held),
        _names(instance, solution, held),
        strict=True,
    )
    return "; ".join(_runs(chosen))


def _runs(chosen: Iterator[tuple[str, str]]) -> Iterator[str]:
    for (kind, option), same in itertools.groupby(chosen):
        count = len(list(same))
        yield f"{kind}: {option}" if count == 1 else f"{count} x {kind}: {option}"


def _names(instance: Instance, solution: Solution, held: range) -> list[str]:
    return [instance.options_of(layer)[solution.options[layer]].name for layer in held]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def solution_json(problem: Problem, result: Solution | Infeasible | Fathomed) -> dict[str, Any]:
    """Return what `solve --json` prints."""
    if isinstance(result, Solution):
        return {
            "feasible": True,
            "objective_s": result.objective_s,
            "lower_bound_s": result.lower_bound_s,
            "optimal": result.optimal,
            "cuts": list(result.cuts),
            "options": list(result.options),
            "stage_s": list(result.stage_s),
            "stage_bytes": list(result.stage_bytes),
            "stages": stages_of(problem, result),
        }
    if isinstance(result, Infeasible):
        return {"feasible": False, "reason": result.reason}
    return {"feasible": None, "lower_bound_s": result.lower_bound_s}
