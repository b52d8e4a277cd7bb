"""Bounds of steps are compared with the exact knapsack of every step of random graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphInstance, alike, in_a_row
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits
from meshwright.planner.solver.stage_table import StepTable
from tests.planner.solver.small_graphs import changed, random_graph


def every_step(problem: GraphInstance) -> tuple[Knapsacks, StepTable]:
    """A table of all pairs of ideals, one in the other, for every stage; cuts are free."""
    every = ideals(problem.readers(), most=1000)
    assert every is not None
    pairs = [
        (a, b)
        for a in range(len(every))
        for b in range(len(every))
        if a != b and not np.any(every.words[a] & ~every.words[b])
    ]
    hop = np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])
    knapsacks = Knapsacks(problem.chain, FrontierStore())
    bounds = StepBounds(knapsacks, every, np.arange(len(every)), np.zeros(len(every)))
    stages = range(len(problem.chain.stages))
    least_s = np.concatenate([bounds.stage_s(stage, *hop) for stage in stages])
    assert bounds.stages_s(*hop).reshape(-1) == pytest.approx(least_s)
    table = StepTable(bounds, [hop] * len(stages), {}, least_s)
    return knapsacks, table


def with_transients(problem: GraphInstance, seed: int) -> GraphInstance:
    """Give every option transient bytes of its own: more levels than are tried one by one."""
    rng = random.Random(seed)
    kinds = tuple(
        tuple(replace(option, transient_bytes=rng.uniform(0, 8)) for option in table)
        for table in problem.chain.kinds
    )
    return changed(problem, kinds=kinds * 2, credits_s=problem.chain.credits_s * 2)


def exact_s(problem: GraphInstance, knapsacks: Knapsacks, table: StepTable, step: int) -> float:
    stage = table.ways.level(step)
    kinds = [problem.chain.layers[layer] for layer in table.layers(step)]
    content = [(kind, kinds.count(kind)) for kind in sorted(set(kinds))]
    choice = knapsacks.fastest_choice(content, stage)
    if choice is None:
        return float("inf")
    one = problem.chain.stages[stage]
    return one.time_scale * choice.time_s + one.exposed_s


@pytest.mark.parametrize("seed", range(24))
def test_bounds_are_below_and_settled_steps_equal_to_the_exact_seconds(seed: int) -> None:
    problem = random_graph(seed, sync_by_option=True)
    if seed % 2:
        problem = with_transients(problem, seed)
    knapsacks, table = every_step(problem)
    rng = random.Random(seed)
    steps = rng.sample(range(len(table.ways)), min(60, len(table.ways)))
    exact = {step: exact_s(problem, knapsacks, table, step) for step in steps}

    for step, seconds in exact.items():
        assert table.stage_s[step] <= seconds * (1 + 1e-9) + 1e-9

    table.settle(steps)

    for step, seconds in exact.items():
        assert table.stage_s[step] == pytest.approx(seconds, rel=1e-9, abs=1e-9)
    assert not table.settle(steps)


def test_a_step_is_charged_the_transient_of_its_own_layers() -> None:
    kinds = tuple(
        (Option(name="none", forward_s=1, backward_s=2, stored_bytes=1, transient_bytes=u),)
        for u in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9)
    )
    chain = Instance(
        layers=tuple(range(10)), kinds=kinds, stages=(StageLimits(capacity_bytes=2.15),), steady=0
    )
    problem = alike(chain, edges=in_a_row(10))

    _, table = every_step(problem)

    single = [s for s in range(len(table.ways)) if len(table.layers(s)) == 1]
    possible = {table.layers(s)[0] for s in single if np.isfinite(table.stage_s[s])}
    assert possible == {0, 1}


def test_bounds_are_close_where_layers_are_many_and_bytes_are_few() -> None:
    gaps = []
    for seed in range(40):
        problem = random_graph(seed, sync_by_option=True)
        _, table = every_step(problem)
        bounds = table.stage_s.copy()
        table.settle(range(len(bounds)))
        fits = np.isfinite(table.stage_s) & (table.stage_s > 0)
        gaps += (1 - bounds[fits] / table.stage_s[fits]).tolist()

    assert np.mean(gaps) < 0.05
