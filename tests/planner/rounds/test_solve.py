"""rounds.solve is checked against every split and choice there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.rounds.problem import (
    Moment,
    RoundsProblem,
    RoundsSolution,
    Spans,
    largest_stage_s,
    moments,
    objective_s,
    rank_s,
)
from planner.rounds.solve import solve_rounds
from planner.schedule import orders, rank_of_stage
from planner.solver.instance import Fathomed, Infeasible, Option
from tests.planner.small_graphs import first_take_later


def random_problem(seed: int) -> RoundsProblem:
    """At most 8 layers of 3 kinds on 2 or 3 ranks; half of them in whole numbers."""
    rng = random.Random(seed)
    schedule = rng.choice(["interleaved", "interleaved-zb", "zbv", "dualpipe-v"])
    ranks = 2 if schedule == "dualpipe-v" or rng.random() < 0.6 else 3
    count = rng.randint(2 * ranks, 8 if ranks == 2 else 7)
    micro_batches = 2 * ranks * rng.randint(1, 3)
    whole = rng.random() < 0.5

    def number(low: int, high: int) -> float:
        return float(rng.randint(low, high)) if whole else rng.uniform(low, high)

    def table() -> tuple[Option, ...]:
        resident, kept, sync = number(0, 4), number(0, 2), number(0, 6)
        return tuple(
            Option(
                name=f"option {k}",
                forward_s=number(1, 4),
                backward_s=number(1, 8),
                stored_bytes=number(0, 5),
                transient_bytes=number(0, 4) if rng.random() < 0.6 else 0.0,
                resident_bytes=resident,
                kept_bytes=kept,
                sync_s=sync,
            )
            for k in range(rng.randint(1, 3))
        )

    kinds = tuple(table() for _ in range(rng.randint(1, 3)))
    return RoundsProblem(
        layers=tuple(rng.randrange(len(kinds)) for _ in range(count)),
        kinds=kinds,
        home=rank_of_stage(schedule, stages=2 * ranks, virtual_stages=2),
        moments=moments(schedule, ranks, micro_batches),
        capacity_bytes=number(20, 120),
        fixed_bytes=tuple(number(0, 3) for _ in range(ranks)),
        exposed_s=tuple(number(0, 2) for _ in range(ranks)),
        micro_batches=micro_batches,
        credits_s=tuple(number(0, 1) for _ in kinds) if rng.random() < 0.5 else (),
        cut_s=tuple(number(0, 2) for _ in range(count + 1)) if rng.random() < 0.6 else (),
    )


def least_objective_s(problem: RoundsProblem) -> float:
    """Seconds of the best split and options; what one rank chooses changes nothing for others."""
    layers, stages = len(problem.layers), len(problem.home)
    best = math.inf
    for inner in itertools.combinations(range(1, layers), stages - 1):
        cuts = (0, *inner, layers)
        slowest_s = 0.0
        for rank in range(problem.ranks):
            own = [at for s in problem.stages_of(rank) for at in range(cuts[s], cuts[s + 1])]
            each = [range(len(problem.kinds[problem.layers[at]])) for at in own]
            least_s = math.inf
            for chosen in itertools.product(*each):
                options = [0] * layers
                for at, option in zip(own, chosen, strict=True):
                    options[at] = option
                least_s = min(least_s, rank_s(problem, rank, cuts, options))
            slowest_s = max(slowest_s, least_s)
        bubble_s = (problem.ranks - 1) * largest_stage_s(problem, cuts)
        best = min(best, slowest_s + bubble_s)
    return best


def with_more_bytes(problem: RoundsProblem, seed: int) -> RoundsProblem:
    """Return the problem with ranks that hold more than sums say, by layers and options."""

    def used_bytes(rank: int, spans: Spans, options: Sequence[int]) -> float:
        rng = random.Random(f"{seed} {rank} {spans} {list(options)}")
        width = spans[0][1] - spans[0][0]
        for span, own in zip(spans, (options[:width], options[width:]), strict=True):
            if not first_take_later([problem.layers[at] for at in range(*span)], own):
                return math.inf
        more = rng.choice((0.0, 0.0, 1.0, 5.0, rng.uniform(0, 25)))
        return problem.sum_bytes(rank, spans, options) + more

    return replace(problem, used_bytes=used_bytes)


@pytest.mark.parametrize("exact", [True, False], ids=["sums", "no sums"])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_split_and_options_beat_the_solution(first: int, exact: bool) -> None:
    feasible = 0
    for seed in range(first, first + 10):
        problem = random_problem(seed)
        if not exact:
            if len(problem.layers) > 6:
                continue
            problem = with_more_bytes(problem, seed)
        best_s = least_objective_s(problem)

        answer = solve_rounds(problem)

        if best_s == math.inf:
            assert isinstance(answer, Infeasible), seed
            continue
        feasible += 1
        assert isinstance(answer, RoundsSolution), seed
        assert answer.optimal
        assert answer.objective_s == pytest.approx(best_s, rel=1e-9), seed
        assert objective_s(problem, answer.cuts, answer.options) == answer.objective_s
        assert isinstance(solve_rounds(problem, cutoff_s=best_s * (1 - 1e-6)), Fathomed)
        below = solve_rounds(problem, cutoff_s=best_s * (1 + 1e-6))
        assert isinstance(below, RoundsSolution)
        assert below.objective_s == pytest.approx(best_s, rel=1e-9)
    assert feasible


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "zbv", "dualpipe-v"])
def test_no_moment_of_a_schedule_holds_more_than_the_fullest(schedule: str) -> None:
    ranks, count = 4, 8
    home = rank_of_stage(schedule, stages=8, virtual_stages=2)
    every = orders(schedule, stages=8, micro_batches=count, virtual_stages=2)
    for rank, order in enumerate(every):
        own = [s for s, r in enumerate(home) if r == rank]
        alive, waiting = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        for stage, kind, _ in order:
            if kind == "W":
                waiting[stage] -= 1
                continue
            alive[stage] += kind == "F"
            now: Moment = (alive[own[0]], alive[own[1]], waiting[own[0]], waiting[own[1]])
            assert any(
                all(a >= b for a, b in zip(one, now, strict=True))
                for one in moments(schedule, ranks, count)[rank]
            )
            alive[stage] -= kind in ("B", "I")
            waiting[stage] += kind == "I"


def test_stages_follow_each_other_in_the_order_of_the_model() -> None:
    problem = random_problem(3)
    answer = solve_rounds(problem)
    if isinstance(answer, RoundsSolution):
        assert answer.cuts[0] == 0
        assert answer.cuts[-1] == len(problem.layers)
        assert all(a < b for a, b in pairwise(answer.cuts))
