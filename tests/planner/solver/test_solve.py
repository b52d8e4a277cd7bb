"""Problems with hosts and sides, against every split of instances small enough to list."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver import ilp
from meshwright.planner.solver.chain import solve_chain
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Solution,
    broken,
    fits,
)
from meshwright.planner.solver.side_constraints import HostMemory, SideConstraint
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import (
    changed,
    random_graph,
    random_unequal,
    random_unequal_graph,
)
from tests.planner.solver.small_instances import objective_s, random_instance


def tied(seed: int) -> Instance:
    """A small instance with bytes on hosts, and one or two ties."""
    instance = random_instance(seed)
    rng = random.Random(seed)
    kinds = tuple(
        tuple(
            replace(o, host_bytes=float(rng.randint(0, 4)), host_resident_bytes=rng.uniform(0, 2))
            for o in table
        )
        for table in instance.kinds
    )
    stages, layers = len(instance.stages), len(instance.layers)
    hosts: tuple[HostMemory, ...] = ()
    if rng.random() < 0.6:
        hosts = tuple(
            HostMemory(
                capacity_bytes=rng.uniform(2, 40),
                ranks=tuple(rng.randint(0, 2) for _ in range(stages)),
            )
            for _ in range(rng.randint(1, 2))
        )
    first, last = sorted(rng.randrange(layers) for _ in range(2))
    some = tuple(s for s in range(stages) if rng.random() < 0.6) or (0,)
    held = tuple(range(first, last + 1))
    every = [
        SideConstraint(layers=held, together=True),
        SideConstraint(layers=held, stages=some),
        SideConstraint(at_most=rng.randint(1, layers), stages=some),
        SideConstraint(layers=held, options=("option 0", "option 1")),
    ]
    sides = tuple(rng.sample(every, rng.randint(0, 2)))
    return replace(instance, kinds=kinds, hosts=hosts, sides=sides)


def kept(instance: Instance, cuts: tuple[int, ...], options: tuple[int, ...]) -> bool:
    """Whether a split keeps hosts and sides, from their words alone."""
    stage_of = [s for s, (a, b) in enumerate(itertools.pairwise(cuts)) for _ in range(a, b)]
    chosen = [instance.options_of(layer)[k] for layer, k in enumerate(options)]
    for host in instance.hosts:
        used = sum(
            host.ranks[s] * (o.host_resident_bytes + instance.stages[s].in_flight * o.host_bytes)
            for s, o in zip(stage_of, chosen, strict=True)
        )
        if used > host.capacity_bytes * (1 + 1e-12):
            return False
    for side in instance.sides:
        if side.at_most is not None:
            if any(stage_of.count(s) > side.at_most for s in side.stages):
                return False
            continue
        inside = side.layers
        if side.together and len({stage_of[layer] for layer in inside}) > 1:
            return False
        if side.stages and any(stage_of[i] not in side.stages for i in inside):
            return False
        if side.options and any(chosen[i].name not in side.options for i in inside):
            return False
    return True


def least_s(instance: Instance) -> float:
    """Seconds of the best split of all that keep everything; inf if there is none."""
    count, stages = len(instance.layers), len(instance.stages)
    choices = [range(len(instance.kinds[kind])) for kind in instance.layers]
    return min(
        (
            objective_s(instance, cuts, options)
            for inner_cuts in itertools.combinations(range(1, count), stages - 1)
            for cuts in [(0, *inner_cuts, count)]
            for options in itertools.product(*choices)
            if kept(instance, cuts, options)
        ),
        default=math.inf,
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize("start", range(0, 120, 30))
@pytest.mark.parametrize("solver", [solve_chain, ilp.solve], ids=["exact", "program"])
def test_ties_are_kept_and_nothing_that_keeps_them_is_faster(start: int, solver) -> None:
    found = 0
    for seed in range(start, start + 30):
        instance = tied(seed)
        best_s = least_s(instance)

        answer = solver(instance)

        if best_s == math.inf:
            assert isinstance(answer, Infeasible), seed
            continue
        found += 1
        assert isinstance(answer, Solution), seed
        assert answer.objective_s == pytest.approx(best_s, rel=2e-6, abs=1e-9), seed
        assert answer.lower_bound_s <= best_s + 1e-9 * abs(best_s) + 1e-9
        assert answer.optimal
        assert kept(instance, answer.cuts, answer.options)
        assert broken(instance, answer) is None
        assert fits(instance, answer)
    assert found > 10


@pytest.mark.parametrize("start", range(200, 260, 20))
def test_without_ties_the_program_is_the_exact_solver(start: int) -> None:
    for seed in range(start, start + 20):
        instance = replace(tied(seed), hosts=(), sides=())

        exact, both = inner.solve(instance), solve_chain(instance)

        assert exact == both
        program = ilp.solve(instance)
        assert isinstance(program, type(exact))
        if isinstance(exact, Solution):
            assert isinstance(program, Solution)
            assert program.objective_s == pytest.approx(exact.objective_s, rel=2e-6, abs=1e-9)


@pytest.mark.parametrize("start", range(300, 420, 40))
@pytest.mark.long("380", "300")
def test_hosts_with_devices_of_one_stage_need_no_program(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ilp, "solve", None)
    bound = 0
    for seed in range(start, start + 40):
        rng, instance = random.Random(seed), replace(tied(seed), sides=())
        stages = len(instance.stages)
        hosts = tuple(
            HostMemory(
                capacity_bytes=rng.uniform(2, 25),
                ranks=tuple(2 if s == own else 0 for s in range(stages)),
            )
            for own in range(stages)
        )
        instance = replace(instance, hosts=hosts)
        best_s, free = least_s(instance), inner.solve(replace(instance, hosts=()))

        answer = solve_chain(instance)

        if best_s == math.inf:
            assert isinstance(answer, Infeasible), seed
            assert answer.reason
            continue
        assert isinstance(answer, Solution), seed
        assert isinstance(free, Solution), seed
        assert answer.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9), seed
        assert kept(instance, answer.cuts, answer.options)
        bound += answer.objective_s > free.objective_s * (1 + 1e-9)
    assert bound >= 2


def test_most_ties_bind() -> None:
    bound = sum(
        broken(instance, answer) is not None
        for instance in map(tied, range(120))
        if isinstance(answer := inner.solve(replace(instance, hosts=(), sides=())), Solution)
    )

    assert bound > 20


@pytest.mark.parametrize("seed", range(40))
def test_nothing_below_the_cutoff_is_said_and_not_sought(seed: int) -> None:
    instance = tied(seed)
    best = solve_chain(instance)
    if not isinstance(best, Solution):
        return

    hair_s = 1e-4 * abs(best.objective_s) + 1e-6
    below = solve_chain(instance, cutoff_s=best.objective_s - hair_s)
    above = solve_chain(instance, cutoff_s=best.objective_s + hair_s)

    assert isinstance(below, CutOff)
    assert isinstance(above, Solution)
    assert above.objective_s == pytest.approx(best.objective_s, rel=2e-6, abs=1e-9)


def test_what_cannot_be_kept_is_named() -> None:
    instance = random_instance(11)
    roomy = tuple(replace(stage, capacity_bytes=1e6) for stage in instance.stages)
    layers = len(instance.layers)
    assert layers >= 2 and len(roomy) >= 2
    instance = replace(
        instance,
        stages=roomy,
        sides=(
            SideConstraint(layers=tuple(range(layers)), together=True),
            SideConstraint(at_most=1, stages=(0,)),
        ),
    )

    answer = solve_chain(instance)

    assert isinstance(answer, Infeasible)
    assert f"layers 0-{layers - 1} together" in answer.reason
    assert "at most 1 layers on stage 0" in answer.reason


def tied_on_types(seed: int) -> GraphInstance:
    """A chain or a graph on one type or several, with a tie, and at times a host of all stages."""
    rng = random.Random(seed)
    problem = rng.choice([random_unequal, random_unequal_graph, random_graph])(seed)
    layers, stages = len(problem.chain.layers), len(problem.chain.stages)
    some = tuple(sorted(rng.sample(range(layers), rng.randint(1, min(3, layers)))))
    tie = rng.choice(
        [
            SideConstraint(layers=some, together=True),
            SideConstraint(layers=some, stages=tuple(sorted(rng.sample(range(stages + 1), 1)))),
            SideConstraint(at_most=rng.randint(1, layers), stages=rng.choice([(), (0,)])),
            SideConstraint(layers=some, options=("option 0",)),
        ]
    )
    ranks = tuple(rng.randint(0, 2) for _ in range(stages))
    host = HostMemory(capacity_bytes=rng.uniform(2, 30), ranks=ranks)
    hosts = (host,) if rng.random() < 0.5 else ()
    types = []
    for one in problem.types:
        kinds = tuple(
            tuple(replace(option, host_bytes=float(rng.randint(0, 3))) for option in table)
            for table in one.chain.kinds
        )
        types.append(replace(one, chain=replace(one.chain, kinds=kinds, sides=(tie,), hosts=hosts)))
    return replace(problem, types=tuple(types))


@pytest.mark.matrix
def test_ties_and_hosts_are_kept_on_chains_and_graphs_of_any_types() -> None:
    fitting = bound = 0
    for seed in range(40):
        problem = tied_on_types(seed)

        answer, program = solve(problem), ilp.solve_graph(problem)

        assert isinstance(answer, GraphSolution) == isinstance(program, GraphSolution), seed
        if not isinstance(answer, GraphSolution) or not isinstance(program, GraphSolution):
            continue
        assert answer.objective_s == pytest.approx(program.objective_s, rel=2e-6, abs=1e-6), seed
        laid = problem.laid(answer.order, answer.split.cuts, answer.types)
        assert broken(laid, answer.split) is None
        assert fits(laid, answer.split)
        free = solve(changed(problem, sides=(), hosts=()))
        fitting += 1
        bound += answer.objective_s > getattr(free, "objective_s", math.inf) * (1 + 1e-9)
    assert fitting > 10
    assert bound > 4
