"""HiGHS, run on a linear program of PuLP: what it found, what it proved.

PuLP calls a run that met a limit "Optimal": here HiGHS's own status and dual bound count.
HiGHS is constructed here alone, so that its banner appears nowhere.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.planner.documents.tolerances import HIGHS_FEASIBILITY, HIGHS_GAP
from meshwright.planner.system.lazy_imports import OnUse
from meshwright.planner.system.stdout_guard import silence

if TYPE_CHECKING:
    import highspy
    import pulp
else:
    highspy = OnUse("highspy", "solving an integer program")
    pulp = OnUse("pulp", "solving an integer program")

NODE_ITERATIONS = 1_000
"""Simplex iterations for each node of a limited tree; its root has as many more."""

__all__ = ["SolverOutcome", "highspy", "power_of_ten", "pulp", "run", "silent_highs"]


@dataclass(frozen=True, slots=True)
class SolverOutcome:
    """Outcome of a solver run: whether it has a solution and a proof, and its bound in seconds."""

    has_solution: bool
    proven: bool
    bound_s: float
    impossible: bool = False


def silent_highs() -> Any:
    """Return a HiGHS model that prints nothing, not even the banner of a process's first one."""
    with silence():
        model = highspy.Highs()  # type: ignore[no-untyped-call]  # as its binding has it
    model.setOptionValue("output_flag", False)
    return model


def run(program: Any, unit_s: float, most_nodes: int | None) -> SolverOutcome:
    """Run HiGHS on a program whose objective is in `unit_s`, and see how it ended.

    It is limited by work, never by seconds: a machine that is busy finds the same.
    """
    limits = {}
    if most_nodes is not None:
        iterations = (1 + most_nodes) * NODE_ITERATIONS
        limits = {"mip_max_nodes": most_nodes, "simplex_iteration_limit": iterations}
    feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        gapRel=HIGHS_GAP,
        gapAbs=0.0,
        mip_feasibility_tolerance=HIGHS_FEASIBILITY,
        primal_feasibility_tolerance=HIGHS_FEASIBILITY,
        **limits,
    )
    configured = solver.createAndConfigureSolver

    def configure(program: Any) -> None:
        with silence():  # PuLP constructs HiGHS there
            configured(program)

    solver.createAndConfigureSolver = configure
    # PuLP reads the values of a run that ended without any, and has no name for a limit on nodes.
    with contextlib.suppress(IndexError, KeyError):
        program.solve(solver)
    # Of HiGHS itself: releases of PuLP name its outcomes differently.
    status, info = program.solverModel.getModelStatus(), program.solverModel.getInfo()
    has_solution = info.primal_solution_status == feasible
    proven = has_solution and status == highspy.HighsModelStatus.kOptimal
    bound = float(info.mip_dual_bound)
    if proven:
        # An exhausted tree leaves the last bound of its root in `mip_dual_bound`.
        objective = info.objective_function_value
        bound = max(bound, objective - HIGHS_GAP * abs(objective))
    impossible = not has_solution and status == highspy.HighsModelStatus.kInfeasible
    return SolverOutcome(has_solution, proven, bound * unit_s, impossible)


def power_of_ten(value: float) -> float:
    """Return the power of ten at or below a value; 1 for nothing."""
    return 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
