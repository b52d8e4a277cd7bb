"""A problem of a graph of layers, as a document states it: solved, with what it requires."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import DocumentError
from planner.solver.graph_instance import GraphInstance, GraphSolution, alike
from planner.solver.instance import Fathomed, Infeasible, Unfinished
from planner.solver.problem import Problem
from planner.solver.sides import of_chain, unkept
from planner.solver.solve import solve

GraphResult = GraphSolution | Infeasible | Fathomed | Unfinished


def graph_of(problem: Problem) -> GraphInstance:
    """Return the graph that a problem states, its requirements left out.

    Raises DocumentError where groups that stay together wait for each other.
    """
    chain = problem.instance()
    try:
        return alike(
            replace(chain, sides=()),
            edges=sorted(set(problem.edges)),
            output_s=problem.output_s,
            colocated=[sorted(group) for group in problem.colocated],
            relayed=problem.relayed,
        )
    except ValueError as error:
        raise DocumentError("colocated", str(error).removeprefix("colocated: ")) from error


def solve_stated(problem: Problem, *, by_program: bool = False) -> GraphResult:
    """Return the best split of a graph that keeps what is required.

    Where the best of all splits does not, or if asked for, the integer program finds it.
    """
    graph = graph_of(problem)
    ties = [of_chain(side) for side in problem.instance().sides]
    if not by_program:
        found = solve(graph)
        if not isinstance(found, GraphSolution):
            return found
        laid = graph.along(found.order)
        names = [laid.options_of(at)[own].name for at, own in enumerate(found.split.options)]
        if unkept(ties, found.order, found.split.cuts, names) is None:
            return found
    from planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

    return ilp.solve_graph(graph, ties=ties)
