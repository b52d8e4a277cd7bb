"""Bounds and splits in simulated time where devices differ, against every split there is."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.bounds.mixed_family_cuts import FamilyCuts
from meshwright.planner.search.bounds.simulated_cuts import Placed
from meshwright.planner.search.bounds.simulated_mixed_devices import SimulatedGroupCandidates
from meshwright.planner.search.goals import SimulatedStepGoal, SplitSolution
from meshwright.planner.search.plan_candidate import Ranked
from meshwright.planner.search.proof_account import BOUNDS, CUTS, PROVEN
from meshwright.planner.search.proof_budget import FULL, USUAL
from meshwright.planner.search.search import search
from meshwright.planner.search.space import losses
from meshwright.planner.search.spaces.mixed import MixedSpace
from meshwright.planner.search.spaces.shares import ShareSpace
from meshwright.planner.search.spaces.simulated import Tried
from meshwright.planner.search.spaces.simulated_mixed import SimulatedMixed
from meshwright.planner.solver.graph_instance import GraphSolution
from tests.planner.search.spaces.test_mixed import llama

JOB = Job(seq_len=2048, global_batch=12, precision="fp32")
TWO, THREE = "2xa100-sxm-40gb+2xv100-sxm-32gb", "2xa100-sxm-40gb+4xv100-sxm-32gb"


def simulated(own: MixedSpace, best: Ranked) -> SimulatedMixed:
    """The layouts of a space, of which those are wanted that are faster than a plan."""
    return SimulatedMixed(own, Tried(SimulatedStepGoal(best, FULL)), 0.0)


def every_plan(own: MixedSpace, layout: Layout) -> list[Ranked]:
    """Every plan of a layout that fits."""
    plans = (
        own.candidate_of(SplitSolution(1.0, 1.0, layout, split))
        for split in every_split(own, layout)
    )
    return [one for one in plans if one.prediction.fits]


def every_split(own: MixedSpace, layout: Layout) -> Iterator[GraphSolution]:
    """Yield every order of types, cuts and options of a chain."""
    problem = own.instance(layout)
    layers, ranks = problem.chain.layers, layout.pipeline
    types = [number for number, one in enumerate(problem.types) for _ in range(one.stages)]
    tables = problem.chain.kinds
    for order in sorted(set(itertools.permutations(types))):
        for inner in itertools.combinations(range(1, len(layers)), ranks - 1):
            cuts = (0, *inner, len(layers))
            least = [stage.least_layers for stage in problem.chain.stages]
            if any(b - a < n for (a, b), n in zip(itertools.pairwise(cuts), least, strict=True)):
                continue
            for options in itertools.product(*(range(len(tables[kind])) for kind in layers)):
                yield own.evaluated_split(layout, order, cuts, options)


LAYOUTS = [
    (TWO, 2, Layout(pipeline=2, data_shard=2, zero=1, micro_batch=1, micro_batches=6)),
    (
        TWO,
        2,
        Layout(
            pipeline=4, data_shard=1, schedule="zb-h1", micro_batch=2, micro_batches=6, tensor=1
        ),
    ),
    (
        TWO,
        4,
        Layout(pipeline=2, data_shard=2, zero=1, schedule="zbv", virtual_stages=2, micro_batches=6),
    ),
    (
        THREE,
        4,
        Layout(pipeline=3, data_shard=2, zero=1, schedule="gpipe", micro_batch=3, micro_batches=2),
    ),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("cluster", "layers", "layout"), LAYOUTS, ids=lambda one: str(one)[:40])
def test_no_split_of_a_layout_simulates_faster(cluster: str, layers: int, layout: Layout) -> None:
    recompute = None if layers < 4 else "full"
    own = MixedSpace(
        GroupCandidates(
            Request(llama(layers), resolve_cluster(cluster), JOB, Pins(recompute=recompute))
        )
    )
    plans = sorted(every_plan(own, layout), key=lambda one: one.prediction.step_time_s)
    least_s = plans[0].prediction.step_time_s
    space = simulated(own, plans[-1])
    assert space.refusal(layout) is None

    every = SimulatedGroupCandidates.from_candidates(GroupCandidates(own.request))
    bounds_s = [every.computation_s(layout), *(bound(layout) for _, bound in space.bounds[1:])]
    bounds_s.append(space.estimate_s(layout, 2 * least_s))

    assert all(isinstance(one, float) and 0 < one <= least_s * (1 + 1e-9) for one in bounds_s)
    assert bounds_s[-2] == pytest.approx(least_s, rel=1e-5)
    assert space.tried.goal.step_s == pytest.approx(least_s, rel=1e-9)
    unbeaten = simulated(own, plans[0])
    assert unbeaten.solved_s(layout) >= least_s * (1 - PROVEN)
    assert unbeaten.tried.goal.best is plans[0]


SHORT = "2xa100-sxm-40gb+2xv100-sxm-16gb"
SHARED = [
    *LAYOUTS,
    *(
        (
            TWO,
            4,
            Layout(
                pipeline=2,
                data_shard=2,
                zero=1,
                schedule=schedule,
                virtual_stages=2,
                micro_batches=6,
            ),
        )
        for schedule in ("interleaved", "interleaved-zb", "dualpipe-v")
    ),
    (SHORT, 2, Layout(pipeline=2, data_shard=2, zero=1, micro_batch=3, micro_batches=2)),
    (SHORT, 3, Layout(pipeline=4, schedule="1f1b", micro_batch=1, micro_batches=12)),
    (SHORT, 3, Layout(pipeline=4, schedule="zb-h1", micro_batch=2, micro_batches=6)),
]


def alike(layout: Layout) -> tuple[object, ...]:
    """Return what the layouts of a timetable have in common."""
    degrees = layout.tensor, layout.context, layout.pipeline, layout.data
    return *degrees, layout.micro_batch, layout.schedule, layout.virtual_stages


@pytest.mark.spread(4)
@pytest.mark.parametrize(("cluster", "layers", "layout"), SHARED, ids=lambda one: str(one)[:40])
def test_no_layout_of_a_timetable_simulates_faster_than_all_together(
    cluster: str, layers: int, layout: Layout
) -> None:
    recompute = "full" if layers == 4 else None
    request = Request(llama(layers), resolve_cluster(cluster), JOB, Pins(recompute=recompute))
    own = MixedSpace(GroupCandidates(request))
    together = FamilyCuts(GroupCandidates(request))
    together.group_kin(family for _, family in own.bundles(Counter()))
    [kin] = [one for one in together.kin if alike(one[0].first) == alike(layout)]
    every = [each for family in kin for each in family.layouts() if own.refusal(each) is None]
    steps_s = []
    for each in random.Random(1).sample(every, min(3, len(every))):
        solution = own.solve(each, math.inf)
        if isinstance(solution, SplitSolution):
            space = simulated(own, own.candidate_of(solution))
            space.solved_s(each)
            steps_s.append(space.tried.goal.step_s)

    bound_s = together.bound_s(kin, 2 * min(steps_s))

    assert 0.5 * min(steps_s) < bound_s <= min(steps_s) * (1 + 1e-9)
    assert together.bound_s(kin, 0.9 * bound_s) == pytest.approx(0.9 * bound_s)


@pytest.mark.parametrize(("cluster", "layers", "layout"), SHARED, ids=lambda one: str(one)[:40])
def test_the_fastest_that_a_rank_may_hold_is_the_least_of_all_that_it_may_hold(
    cluster: str, layers: int, layout: Layout
) -> None:
    """Between the same places: in all that it does, and none above it in any mean of paths."""
    own = MixedSpace(GroupCandidates(Request(llama(layers), resolve_cluster(cluster), JOB, Pins())))
    solution = own.solve(layout, math.inf)
    assert isinstance(solution, SplitSolution)
    space = simulated(own, own.candidate_of(solution))
    limit_s = 2 * space.tried.goal.step_s
    columns = space.columns(layout, limit_s)
    assert columns is not None
    by_sums = space.choices(layout, columns, limit_s, fastest_only=True)
    listed = space.choices(layout, columns, limit_s, fastest_only=False)
    assert by_sums is not None and listed is not None
    spans = by_sums.feasible_spans(limit_s)
    by_bytes = space.choices(layout, columns, limit_s, fastest_only=True, within=spans)
    assert by_bytes is not None
    numbers = np.random.default_rng(1)
    whole = np.repeat([[1.0], [1.0], [0.0], [0.0]], layout.stages, axis=1)

    for visits in (whole, *numbers.integers(0, 9, (12, 4, layout.stages)).astype(float)):
        if not layout.executed_schedule.splits_backward:
            visits[2:] = 0.0
        least_s, by_bytes_s, by_sums_s = (
            least_of_spans(choices.placed, visits) for choices in (listed, by_bytes, by_sums)
        )
        assert set(least_s) <= set(by_bytes_s) <= set(by_sums_s)
        for span, seconds in least_s.items():
            assert by_sums_s[span] * (1 - 1e-9) <= by_bytes_s[span] <= seconds * (1 + 1e-9)
            if visits is whole:  # but for transfers, which take the least of all links
                assert by_bytes_s[span] == pytest.approx(seconds, rel=1e-2)


def least_of_spans(placed: Placed, visits: NDArray[np.float64]) -> dict[tuple[int, ...], float]:
    """By rank, places and type, the least seconds of what may be between them."""
    least_s: dict[tuple[int, ...], float] = {}
    firsts, ends = placed.first // placed.joints, placed.end // placed.joints
    spans = np.stack([placed.rank, firsts, ends, placed.number], axis=1)
    for row, seconds in zip(spans.tolist(), placed.visited_s(visits).tolist(), strict=True):
        span = tuple(row)
        least_s[span] = min(seconds, least_s.get(span, math.inf))
    return least_s


@pytest.mark.parametrize("first", [None, ChunkedLoss(rows=1024, gradients="precomputed")])
def test_a_bound_of_layouts_of_any_loss_is_none_above_that_of_each(
    first: ChunkedLoss | None,
) -> None:
    """Whichever loss is bounded first, and where memory is short of all logits."""
    request = Request(llama(3), resolve_cluster(TWO), JOB, Pins())
    own = MixedSpace(GroupCandidates(request))
    layout = Layout(pipeline=2, data_shard=2, zero=1, micro_batch=3, micro_batches=2, loss=first)
    plan = own.candidate_of(SplitSolution(1.0, 1.0, layout, next(every_split(own, layout))))
    space = simulated(own, replace(plan, prediction=slower(plan.prediction)))
    (memory_s,) = (bound for name, bound in space.bounds if name == BOUNDS[CUTS])

    together_s = memory_s(layout)
    assert isinstance(together_s, float)

    for loss in losses(request, layout.schedule):
        one = replace(layout, loss=loss)
        some = random.Random(1).sample(list(every_split(own, one)), 40)
        plans = (own.candidate_of(SplitSolution(1.0, 1.0, one, split)) for split in some)
        least_s = min(plan.prediction.step_time_s for plan in plans if plan.prediction.fits)
        assert memory_s(one) == together_s <= least_s * (1 + 1e-9)
    assert space.tried.looked_at["layouts within memory"] == 1


def slower(prediction: Prediction) -> Prediction:
    return prediction.model_copy(update={"step_time_s": 100 * prediction.step_time_s})


@pytest.mark.matrix
def test_what_is_proven_of_all_layouts_no_layout_simulates_below() -> None:
    pins = Pins(tensor=1, micro_batch=1, recompute="full")
    request = Request(llama(3), resolve_cluster("1xa100-sxm-40gb+2xv100-sxm-32gb"), JOB, pins)

    usual, full = (search(request, effort=effort) for effort in (USUAL, FULL))

    said = full.certificate
    # Shares of ranks without a pipeline are bounded up to what groups do once.
    assert said.gap < 2e-2
    assert said.lower_bound_s <= full.prediction.step_time_s
    assert usual.certificate.lower_bound_s <= full.prediction.step_time_s
    least_s = float("inf")
    for groups in (request.cluster.groups, *((one,) for one in request.cluster.groups)):
        own = MixedSpace(GroupCandidates(request.on_groups(groups), request.cluster))
        for _, bundle in own.bundles(Counter()):
            for layout in bundle.layouts():
                if own.refusal(layout) is None and layout.virtual_stages == 1:
                    for split in every_split(own, layout):
                        one = own.candidate_of(SplitSolution(1.0, 1.0, layout, split)).prediction
                        if one.fits:
                            least_s = min(least_s, one.step_time_s)
    assert full.prediction.step_time_s <= least_s * (1 + 1e-9)
    assert said.lower_bound_s <= least_s


def test_computation_of_shares_is_no_more_than_their_bounds() -> None:
    request = Request(llama(4), resolve_cluster(THREE), JOB, Pins())
    shares = ShareSpace(GroupCandidates(request))
    every = list(shares.bundles(Counter()))

    for computed_s, batch in every:
        [layout] = batch.layouts()
        assert 0 < computed_s <= shares.bound_s(layout)
    assert len(every) > 20
