"""What is proven of simulated time, against every plan of small spaces."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from functools import cache

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.bounds.dominance import covers
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.simulated_step import SimulatedCandidates
from meshwright.planner.search.plan_candidate import candidate_of
from meshwright.planner.search.proof_budget import FULL, USUAL
from meshwright.planner.search.search import search
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Solution, evaluate_split

JOB = Job(seq_len=1024, global_batch=32)


def request(pins: Pins, *, memory_bytes: float | None = None, job: Job = JOB) -> Request:
    """GPT-2's 12 blocks on four V100; in a V, which takes no tied embedding, Llama 2 on A100."""
    if pins.schedule in ("zbv", "dualpipe-v"):
        cluster = resolve_cluster("4xa100-sxm-80gb")
        return Request(resolve_model("llama-2-7b"), cluster, job, pins=pins)
    cluster = resolve_cluster("4xv100-sxm-32gb")
    if memory_bytes is not None:
        [group] = cluster.groups
        small = group.accelerator.model_copy(update={"memory_bytes": int(memory_bytes)})
        group = group.model_copy(update={"accelerator": small})
        cluster = cluster.model_copy(update={"groups": (group,)})
    return Request(resolve_model("gpt2"), cluster, job, pins=pins)


def every_solution(candidates: Candidates, layout: Layout) -> Iterator[Solution]:
    """Every split of a layout, with as many layers of a rank recomputed as one likes."""
    instance = candidates.instance(layout)
    ranks, count = layout.pipeline, len(instance.layers)
    for inner in itertools.combinations(range(1, count), ranks - 1):
        cuts = (0, *inner, count)
        each = []
        for first, end in itertools.pairwise(cuts):
            kinds = instance.layers[first:end]
            ways = set()
            for chosen in itertools.product(*(range(len(instance.kinds[kind])) for kind in kinds)):
                # Of like layers those that recompute more come first.
                picked: dict[int, list[int]] = {}
                for kind, option in zip(kinds, chosen, strict=True):
                    picked.setdefault(kind, []).append(option)
                left = {kind: sorted(own) for kind, own in picked.items()}
                ways.add(tuple(left[kind].pop() for kind in kinds))
            each.append(sorted(ways))
        for ways_of in itertools.product(*each):
            yield evaluate_split(instance, cuts, [option for own in ways_of for option in own])


def least_s(candidates: Candidates, layout: Layout) -> float:
    """The least simulated step of any plan of a layout, one by one."""
    best_s = math.inf
    stages = candidates.instance(layout).stages
    for solution in every_solution(candidates, layout):
        sizes = zip(solution.sizes(), stages, strict=True)
        if all(size >= stage.least_layers for size, stage in sizes):
            plan = candidate_of(candidates, layout, solution)
            if plan.prediction.fits:
                best_s = min(best_s, plan.prediction.step_time_s)
    return best_s


SPLITS = [
    ("1f1b", 1, 8),
    ("1f1b", 1, 2),
    ("gpipe", 1, 4),
    ("zb-h1", 1, 8),
    ("interleaved", 2, 8),
    ("interleaved-zb", 2, 4),
    ("zbv", 2, 8),
    ("dualpipe-v", 2, 8),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("schedule", "virtual", "count"), SPLITS)
def test_nothing_simulates_below_the_bound_and_the_answer_is_the_least(
    schedule: str, virtual: int, count: int
) -> None:
    ranks = 2 if virtual > 1 or count == 2 else 4
    pins = Pins(
        tensor=1,
        context=1,
        pipeline=ranks,
        schedule=schedule,
        virtual_stages=virtual,
        zero=1 if ranks < 4 else 0,
        micro_batch=32 * ranks // 4 // count,
        recompute="none",
    )
    asked = request(pins)

    found = search(asked, effort=FULL)

    [candidates] = found.candidates
    truth_s = min(least_s(candidates, layout) for layout in candidates.layouts())
    finals = found.certificate
    assert finals.lower_bound_s <= truth_s * (1 + 1e-9)
    assert finals.objective_s == pytest.approx(truth_s, rel=1e-6)
    assert finals.gap < 1e-5


def some_solution(candidates: Candidates, layout: Layout, rng: random.Random) -> Solution:
    """A split near the even one, with some layers of each rank recomputed."""
    instance = candidates.instance(layout)
    ranks, count = layout.pipeline, len(instance.layers)
    cuts = [count * rank // ranks + rng.randint(-1, 3) for rank in range(1, ranks)]
    options: list[int] = []
    for first, end in itertools.pairwise([0, *cuts, count]):
        own = [rng.randrange(len(instance.options_of(at))) for at in range(first, end)]
        kept = rng.random()
        own = [0 if rng.random() < kept else option for option in own]
        # Of like layers those that recompute more come first.
        for _, same in itertools.groupby(range(first, end), key=lambda at: instance.layers[at]):
            options += sorted((own[at - first] for at in same), reverse=True)
    return evaluate_split(instance, (0, *cuts, count), options)


@pytest.mark.parametrize(
    ("schedule", "virtual", "count", "memory_bytes"),
    [(*SPLITS[0], 4.4e9), (*SPLITS[4], 4.5e9)],
)
@pytest.mark.parametrize("tries", [150, pytest.param(3000, marks=pytest.mark.matrix)])
@pytest.mark.long("150-1f1b-1-8-4400000000.0")
def test_no_recomputation_is_faster_than_the_one_chosen(
    schedule: str, virtual: int, count: int, memory_bytes: float, tries: int
) -> None:
    """So little memory that layers recompute: none of many choices that fit beats the bound."""
    pins = Pins(
        tensor=1,
        context=1,
        pipeline=2,
        schedule=schedule,
        virtual_stages=virtual,
        zero=1,
        loss="full",
        micro_batch=16 // count,
    )
    found = search(request(pins, memory_bytes=memory_bytes), effort=FULL)
    [candidates] = found.candidates
    rng = random.Random(schedule)

    layout = found.plan.layout
    plans = [
        candidate_of(candidates, layout, some_solution(candidates, layout, rng))
        for _ in range(tries)
    ]

    finals = found.certificate
    assert finals.gap < 1e-5
    assert {layer.recompute for stage in found.plan.stages for layer in stage.layers} > {"none"}
    fitting = [one.prediction.step_time_s for one in plans if one.prediction.fits]
    assert fitting
    assert finals.lower_bound_s <= min(fitting) * (1 + 1e-9)


@cache
def open_answer(prove: bool) -> Answer:
    return search(request(Pins()), effort=FULL if prove else USUAL)


@pytest.mark.spread(1)
@pytest.mark.parametrize("prove", [False, True])
def test_no_layout_is_solved_below_the_bound(prove: bool) -> None:
    """The closed form's optimum of every layout, simulated."""
    found = open_answer(prove)
    finals = found.certificate
    [candidates] = found.candidates
    layouts = [layout for layout in candidates.layouts() if layout.pipeline > 1][::36]

    bounded = SimulatedCandidates.from_candidates(candidates)
    for layout in layouts:
        if math.isinf(candidates.memory_s(layout)):
            continue

        solution = solve(candidates.instance(layout))
        if isinstance(solution, Solution):
            step_s = candidate_of(candidates, layout, solution).prediction.step_time_s
            assert finals.lower_bound_s <= step_s * (1 + 1e-9)
            assert bounded.communication_s(layout) <= step_s * (1 + 1e-9)
            assert bounded.memory_s(layout) <= step_s * (1 + 1e-9)


def test_more_effort_gives_no_lower_bound_and_no_slower_plan() -> None:
    usual, full = (open_answer(prove).certificate for prove in (False, True))

    assert usual.lower_bound_s <= full.lower_bound_s * (1 + 1e-9)
    assert full.objective_s <= usual.objective_s * (1 + 1e-9)
    assert full.gap < 1e-5


@pytest.mark.matrix
def test_the_usual_answer_has_the_pipeline_that_simulates_faster_than_the_closed_form() -> None:
    """Its closed form is above that of fewer stages; its simulated step is 11 % below."""
    job = Job(seq_len=1024, global_batch=64)
    asked = Request(resolve_model("gpt2-xl"), resolve_cluster("8xrtx-4090"), job)

    found = search(asked)

    closed = found.closed_form
    assert closed.plan.layout.pipeline < found.plan.layout.pipeline
    assert found.prediction.step_time_s < 0.95 * closed.prediction.step_time_s


@pytest.mark.matrix
def test_the_estimate_of_a_layout_is_near_what_its_plan_simulates() -> None:
    """Also where stages are uneven, which it does not know: 12 blocks on up to 24 stages."""
    [candidates] = open_answer(False).candidates
    bounded = SimulatedCandidates.from_candidates(candidates)
    ratios = []
    for layout in [one for one in candidates.layouts() if one.pipeline > 1][::6]:
        instance, more_s = bounded.likely(layout)
        solution = solve(instance)
        if isinstance(solution, Solution):
            own = evaluate_split(candidates.instance(layout), solution.cuts, solution.options)
            step_s = candidate_of(candidates, layout, own).prediction.step_time_s
            ratios.append(step_s / (solution.objective_s + more_s))

    assert len(ratios) > 30
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert all(0.85 < ratio < 1.35 for ratio in ratios)


def test_the_usual_answer_is_within_one_percent_of_the_proven_one() -> None:
    usual, full = (open_answer(prove).prediction.step_time_s for prove in (False, True))

    assert full <= usual <= 1.01 * full


def test_a_split_is_no_slower_under_a_layout_that_covers_its_own() -> None:
    """So a layout need not be looked at where one that covers it does not beat the best."""
    [candidates] = open_answer(False).candidates
    rng, pairs = random.Random(3), 0
    two = (one for one in candidates.layouts() if one.pipeline == 2 and one.micro_batch < 4)
    layouts = [one for one in two if one.virtual_stages < 3]

    def shape(one: Layout) -> tuple[object, ...]:
        degrees = one.tensor, one.context, one.data
        return one.schedule, one.virtual_stages, one.micro_batch, *degrees

    for _, own in itertools.groupby(sorted(layouts, key=shape), key=shape):
        alike = list(own)
        for one, other in itertools.permutations(rng.sample(alike, min(5, len(alike))), 2):
            if not covers(candidates.costs(one), candidates.costs(other)):
                continue
            pairs += 1
            split = some_solution(candidates, other, rng)
            mine, theirs = (
                candidate_of(candidates, layout, split).prediction for layout in (one, other)
            )

            assert mine.step_time_s <= theirs.step_time_s * (1 + 1e-12)
            assert mine.fits or not theirs.fits
    assert pairs > 10
