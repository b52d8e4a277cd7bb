"""A solved partition problem as text for a terminal, and as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from meshwright.planner.documents.units import bytes_text, percent_text, seconds_text
from meshwright.planner.report.facts import plain_table
from meshwright.planner.solver.graph_instance import GraphSolution
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Unfinished,
    host_bytes,
)

if TYPE_CHECKING:
    from meshwright.planner.solver.problem_document import Problem

FEW = 8
"""Number of stages that are shown by default."""


def solution_text(
    problem: Problem, result: GraphSolution, *, explain: bool = False
) -> RenderableType:
    """Return the step, and a row for each stage: layers, their options, seconds, memory.

    Among many stages the slowest are shown; with `explain` all are.
    """
    instance, solution = problem.instance(), result.split
    proof = "optimal" if solution.optimal else f"within {percent_text(solution.gap)}"
    lines: list[RenderableType] = [
        f"a step takes {seconds_text(solution.objective_s)}, {proof}; no split takes less than "
        f"{seconds_text(solution.lower_bound_s)}"
    ]
    columns = ("stage", "layers", "options", "seconds", "once a step", "memory", "of")
    table = plain_table(*columns, right=(3, 4, 5, 6))
    slowest_s = max(solution.stage_s)
    rows = stages_of(problem, result)
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
            _spans(_layers_of_stages(result)[row["stage"]]),
            options_text(problem, result, row["stage"]),
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


def _layers_of_stages(solution: GraphSolution) -> list[list[int]]:
    """[stage] Numbers of its layers, rising."""
    cuts = itertools.pairwise(solution.split.cuts)
    return [sorted(solution.order[first:end]) for first, end in cuts]


def stages_of(problem: Problem, result: GraphSolution) -> list[dict[str, Any]]:
    """Return every stage as plain data.

    `layers` are its first and its last, and of a graph all of them.
    """
    instance, solution, whole = problem.instance(), result.split, not problem.edges
    return [
        {
            "stage": s,
            "layers": [held[0], held[-1]] if whole else held,
            "options": _names(instance, result, held),
            "seconds": solution.stage_s[s],
            "sync_s": solution.stage_sync_s[s],
            "bytes": solution.stage_bytes[s],
            "capacity_bytes": instance.stages[s].capacity_bytes,
        }
        for s, held in enumerate(_layers_of_stages(result))
    ]


def options_text(problem: Problem, solution: GraphSolution, stage: int) -> str:
    """Return the options of a stage's layers, alike ones in a row together.

    `embedding: keep; 3 x block: recompute; 2 x block: keep`
    """
    instance, kinds, held = (
        problem.instance(),
        list(problem.kinds),
        _layers_of_stages(solution)[stage],
    )
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


def _options(solution: GraphSolution) -> list[int]:
    """[layer] Index of the option that it takes."""
    return [
        option for _, option in sorted(zip(solution.order, solution.split.options, strict=True))
    ]


def _names(instance: Instance, solution: GraphSolution, held: Sequence[int]) -> list[str]:
    options = _options(solution)
    return [instance.options_of(layer)[options[layer]].name for layer in held]


def _spans(layers: Sequence[int]) -> str:
    """Return numbers that rise, those in a row as the first and the last."""
    runs = itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    return ", ".join(_span([layer for _, layer in run]) for _, run in runs)


def _span(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def solution_json(
    problem: Problem, result: GraphSolution | Infeasible | CutOff | Unfinished
) -> dict[str, Any]:
    """Return the output of `solve --json`."""
    if isinstance(result, GraphSolution):
        split = result.split
        document: dict[str, Any] = {
            "feasible": True,
            "objective_s": split.objective_s,
            "lower_bound_s": split.lower_bound_s,
            "optimal": split.optimal,
            "cuts": list(split.cuts),
            "options": _options(result),
            "stage_s": list(split.stage_s),
            "stage_bytes": list(split.stage_bytes),
            "stages": stages_of(problem, result),
        }
        if problem.edges:
            document["order"] = list(result.order)
        return document
    if isinstance(result, Infeasible):
        return {"feasible": False, "reason": result.reason}
    if isinstance(result, Unfinished):
        bound = {"lower_bound_s": result.lower_bound_s}
        return {"feasible": None, "reason": result.reason, **bound}
    return {"feasible": None, "lower_bound_s": result.lower_bound_s}
