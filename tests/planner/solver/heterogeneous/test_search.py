"""solve.solve of chains on several types of devices, against all orders, cuts and options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.graph_instance import (
    DeviceType,
    GraphInstance,
    GraphSolution,
    in_a_row,
)
from meshwright.planner.solver.partition_problem import (
    Infeasible,
    Instance,
    Option,
    Solution,
    StageLimits,
)
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import orders


def decoder(*, memory: float = 1.0, pace: float = 1.0, send_s: float = 2e-4) -> GraphInstance:
    """30 blocks and a heavy head on 3 fast devices with much memory and 3 slow ones with little."""

    def option(name: str, time_s: float, stored: float) -> Option:
        return Option(
            name=name,
            forward_s=time_s / 3,
            backward_s=2 * time_s / 3,
            stored_bytes=stored,
            resident_bytes=0.5e9,
            sync_s=0.01,
        )

    block = (option("none", 0.01, 0.5e9), option("full", 0.0133, 0.05e9))
    head = (option("none", 0.02, 0.1e9),)
    return on_types(
        {
            "large": (3, StageLimits(capacity_bytes=memory * 16e9)),
            "small": (3, StageLimits(capacity_bytes=memory * 10e9, time_scale=2.2 * pace)),
        },
        Instance(
            layers=(*[0] * 30, 1),
            kinds=(block, head),
            stages=tuple(StageLimits(capacity_bytes=0.0, in_flight=6 - s) for s in range(6)),
            steady=15,
        ),
        (((0.5 * send_s,) * 31, (send_s,) * 31), ((send_s,) * 31, (0.8 * send_s,) * 31)),
    )


def on_types(
    types: dict[str, tuple[int, StageLimits]],
    chain: Instance,
    output_s: tuple[tuple[tuple[float, ...], ...], ...] = (),
) -> GraphInstance:
    """A chain on types with so many stages, alike but for what is in flight."""
    return GraphInstance(
        types=tuple(
            DeviceType(
                name=name,
                stages=count,
                chain=replace(
                    chain,
                    stages=tuple(replace(stage, in_flight=s.in_flight) for s in chain.stages),
                ),
            )
            for name, (count, stage) in types.items()
        ),
        edges=in_a_row(len(chain.layers)),
        output_s=output_s,
    )


def in_order_s(problem: GraphInstance, order: tuple[int, ...]) -> float:
    """Seconds of the best cuts for one order, by the chain solver; cuts free of charge."""
    laid = [problem.types[g].chain.stages[s] for s, g in enumerate(order)]
    answer = inner.solve(replace(problem.chain, stages=tuple(laid)))
    return answer.objective_s if isinstance(answer, Solution) else math.inf


def test_it_finds_the_best_of_all_orders_solved_as_chains() -> None:
    problem = replace(decoder(), output_s=())

    answer = solve(problem)

    assert isinstance(answer, GraphSolution)
    times_s = {order: in_order_s(problem, order) for order in orders(problem)}
    assert answer.split.objective_s == pytest.approx(min(times_s.values()), rel=1e-9)
    assert times_s[answer.types] == pytest.approx(answer.split.objective_s, rel=1e-9)
    assert max(times_s.values()) > 1.02 * min(times_s.values())


@pytest.mark.parametrize(
    ("memory", "words"),
    [(0.03, "layer '0' alone fits on no stage"), (0.2, "no order of 3 x large and 3 x small")],
)
def test_what_does_not_fit_says_what_binds(memory: float, words: str) -> None:
    answer = solve(decoder(memory=memory))

    assert isinstance(answer, Infeasible)
    assert words in answer.reason


def test_too_many_stages_for_the_layers_are_told() -> None:
    problem = decoder()

    short = (replace(one, chain=replace(one.chain, layers=(0, 0, 1))) for one in problem.types)
    answer = solve(replace(problem, types=tuple(short), edges=in_a_row(3), output_s=()))

    assert isinstance(answer, Infeasible)
    assert "6 stages need as many layers; there are 3" in answer.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"types": decoder().types[:1]}, "the chains have 6 stages; the types have 3"),
        ({"types": ()}, "at least one device type"),
        ({"output_s": (((1.0,),),)}, "2 x 2 rows of 31 layers"),
        ({"output_s": (((-1.0,) * 31,) * 2,) * 2}, "output_s must not be negative"),
        ({"relayed": False}, "outputs are relayed where stages are of several types"),
    ],
)
def test_an_inconsistent_problem_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(decoder(), **change)
