"""Graphs of layers, and devices that differ, as an integer program (`planner.solver.ilp`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from planner.solver.graphs.graph_instance import GraphInstance, GraphSolution, straight_s
from planner.solver.ilp import Optimum, Placement, Taken, optimum
from planner.solver.instance import Infeasible, Instance, Solution, Unfinished, priced
from planner.solver.sides import Tie, Together
from planner.solver.unequal.unequal_graph import UnequalGraph
from planner.solver.unequal.unequal_instance import DeviceType, UnequalInstance, UnequalSolution


def solve(
    problem: UnequalGraph | UnequalInstance,
    *,
    ties: Sequence[Tie] = (),
    time_limit_s: float | None = None,
) -> UnequalSolution | Infeasible | Unfinished:
    """Minimise the time of `problem`; Unfinished where bytes are more than sums and none fits.

    All `ties` are kept.
    """
    chain = problem.chain if isinstance(problem, UnequalGraph) else problem
    if len(chain.in_flight) > len(chain.layers):
        return Infeasible(f"{len(chain.in_flight)} stages need as many layers")
    found = optimum(_placement(problem, chain, ties), time_limit_s=time_limit_s)
    if found is None:
        return Infeasible("the integer program has no solution")
    if not isinstance(found, Optimum):
        return found
    return UnequalSolution(
        names=tuple(one.name for one in chain.types),
        order=tuple(found.taken.types),
        split=found.split,
        layers=tuple(found.taken.runs),
    )


def solve_by_program(
    problem: GraphInstance, *, ties: Sequence[Tie] = (), time_limit_s: float | None = None
) -> GraphSolution | Infeasible | Unfinished:
    """Minimise the time of a graph on devices that are all alike."""
    alike = DeviceType(
        name="all",
        stages=len(problem.stages),
        kinds=problem.kinds,
        rooms=problem.stages,
        credits_s=problem.credits_s,
        used_bytes=problem.used_bytes,
    )
    chain = UnequalInstance(
        layers=problem.layers,
        types=(alike,),
        in_flight=tuple(stage.in_flight for stage in problem.stages),
        steady=problem.steady,
        forward_apart=problem.forward_apart,
        fill=problem.fill,
    )
    graph = UnequalGraph(
        names=problem.names,
        edges=problem.edges,
        chain=chain,
        output_s=((problem.output_s,),),
        colocated=problem.colocated,
        relayed=problem.relayed,
        unpaid=problem.unpaid,
    )
    found = solve(graph, ties=ties, time_limit_s=time_limit_s)
    if not isinstance(found, UnequalSolution):
        return found
    # Options are told apart by type there, of which there is one.
    return GraphSolution(
        names=problem.names, order=found.layers, split=found.split, method="program"
    )


def _placement(
    problem: UnequalGraph | UnequalInstance, chain: UnequalInstance, ties: Sequence[Tie]
) -> Placement:
    """Return a problem whose layers are runs of one."""
    graph = problem if isinstance(problem, UnequalGraph) else None
    # The cut behind a layer is what its output costs where layers have one order.
    output_s = tuple(tuple(cuts[1:] for cuts in row) for row in chain.cut_s)
    if graph is not None:
        output_s = graph.output_s
        groups = (Tie(Together(first=min(g), last=max(g)), g) for g in graph.colocated)
        ties = (*ties, *groups)
    instances = [chain.all_of(g) for g in range(len(chain.types))]

    def evaluate(taken: Taken) -> tuple[Instance, Solution]:
        laid = chain if graph is None else graph.along(taken.runs)
        instance = laid.in_order(taken.types, taken.cuts)
        if graph is not None and not graph.relayed:
            held = [taken.runs[a:b] for a, b in pairwise(taken.cuts)]
            sends_s = straight_s(graph.readers(), graph.output_s[0][0], held, graph.unpaid)
            sending = tuple(
                replace(stage, exposed_s=stage.exposed_s + seconds)
                for stage, seconds in zip(instance.stages, sends_s, strict=True)
            )
            instance = replace(instance, stages=sending, cut_s=())
        return instance, priced(instance, taken.cuts, taken.options)

    return Placement(
        runs=[(kind, 1) for kind in chain.layers],
        edges=tuple(pairwise(range(len(chain.layers)))) if graph is None else graph.edges,
        types=[one.kinds for one in chain.types],
        rooms=[one.stages for one in instances],
        numbers=[one.stages for one in chain.types],
        steady=chain.steady,
        fill=chain.fill,
        forward_apart=chain.forward_apart,
        evaluate=evaluate,
        credits_s=[chain.credits_of(g) for g in range(len(chain.types))],
        output_s=output_s,
        relayed=graph is None or graph.relayed,
        unpaid=() if graph is None else graph.unpaid,
        hosts=[(host, g) for g, instance in enumerate(instances) for host in instance.hosts],
        ties=tuple(ties),
        more_than_sums=any(one.used_bytes is not None for one in chain.types),
    )
