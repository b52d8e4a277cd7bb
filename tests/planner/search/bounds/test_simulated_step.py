"""Bounds of many layouts in arrays are never above the simulated step of any of their plans."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.pins import Pins, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.search.bounds import group_memory_bounds, whole_layer_paths
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.simulated_step import SimulatedCandidates
from meshwright.planner.search.bounds.whole_layer_paths import RankPaths
from meshwright.planner.search.plan_candidate import candidate_of
from meshwright.planner.search.space import LayoutFamily
from meshwright.planner.solver.chain import solve_chain
from meshwright.planner.solver.partition_problem import Solution, evaluate_split

REQUESTS = {
    "even blocks": ("gpt2-xl", "8xa100-sxm-80gb", 1024, Pins(recompute="none")),
    "a heavy head": ("llama-3.2-1b", "8xa100-sxm-80gb", 2048, Pins(recompute="none")),
    "two kinds of blocks": ("gemma-2-9b", "16xa100-sxm-80gb", 2048, Pins(recompute="none")),
    "little memory": ("gemma-2-2b", "8xrtx-3090", 2048, Pins()),
}


def bounds_of(bounded: Candidates, family: LayoutFamily) -> Iterator[tuple[Layout, list[float]]]:
    """The bounds that arrays give a family's layouts, from the first to the last."""
    if len(family.savings) > 1:
        for part in family.by_saving():
            yield from bounds_of(bounded, part)
        return
    computing_s = min(bounded.timetables_s(family))
    [levels] = bounded.rooms_s([family])
    for part, room_s in bounded.parts(family, levels):
        if room_s == math.inf:
            continue
        for one in part.by_loss():
            [shared_s] = bounded.shared_s([one])
            [rooms_s] = bounded.shared_rooms_s([one])
            for layout, both_s, sharing_s in zip(one.layouts(), rooms_s, shared_s, strict=True):
                yield layout, [computing_s, room_s, sharing_s, both_s]


def bounds_below(
    limit_s: float, bounded: Candidates, family: LayoutFamily, layout: Layout
) -> list[float]:
    """The bounds of a layout where paths below a limit count too."""
    bounded._forget()
    bounded.limit_s = limit_s
    bounds_s = dict(bounds_of(bounded, part_with(family, layout)))[layout]
    bounded.limit_s = math.inf
    bounded._forget()
    return bounds_s


def part_with(family: LayoutFamily, layout: Layout) -> LayoutFamily:
    """Return the layouts of a family that share timetable, saving and loss with one of them."""
    parts = (
        timed
        for saved in family.by_saving()
        for part in saved.by_loss()
        for timed in part.by_timetable()
    )
    return next(part for part in parts if layout in part.layouts())


def steps_s(bounded: SimulatedCandidates, layout: Layout) -> Iterator[float]:
    """What the best splits of a layout simulate, by several objectives."""
    candidates = bounded._closed_form
    stated = candidates.problem_of(layout)
    problems = [bounded.instances(layout, stated)[-1], bounded.likely(layout)]
    for problem, _ in problems:
        solution = solve_chain(problem)
        if isinstance(solution, Solution):
            own = evaluate_split(candidates.instance(layout), solution.cuts, solution.options)
            plan = candidate_of(candidates, layout, own)
            if plan.prediction.fits:
                yield plan.prediction.step_time_s


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("tries", [3, pytest.param(400, marks=pytest.mark.matrix)])
def test_no_array_bound_is_above_the_simulated_step_of_a_plan(name: str, tries: int) -> None:
    model, cluster, seq_len, pins = REQUESTS[name]
    pins, job = replace(pins, tensor=1, context=1), Job(seq_len=seq_len, global_batch=96)
    request = Request(resolve_model(model), resolve_cluster(cluster), job, pins=pins)
    bounded = SimulatedCandidates.from_candidates(Candidates(request))
    rng, tight, tried = random.Random(name), 0.0, 0
    by_paths = 0
    piped = [one for one in bounded.families if one.degrees.pipeline in (2, 4)]

    while tried < tries:
        family = rng.choice(piped)
        rows = [row for row in bounds_of(bounded, family) if row[1][-1] < math.inf]
        for layout, bounds_s in rng.sample(rows, min(len(rows), 3)):
            if bounded.refusal(layout) is not None:
                continue
            tried += 1
            for step_s in steps_s(bounded, layout):
                # No bound of paths is above its limit: only one that lies higher shows a mistake.
                paths_s = bounds_below(1.3 * step_s, bounded, family, layout)
                assert max(bounds_s) <= step_s * (1 + 1e-9), layout.text()
                assert max(paths_s) <= step_s * (1 + 1e-9), layout.text()
                tight = max(tight, max(bounds_s) / step_s)
                by_paths += max(paths_s) > max(bounds_s) * 1.01

    assert tight > 0.8
    assert by_paths > 0 or tries < 20 or name != "even blocks"


def test_paths_through_late_ranks_are_never_above_the_simulated_step_of_a_plan() -> None:
    """With few micro-batches the last ranks begin late, and paths say more than other bounds."""
    pins = Pins(recompute="none", tensor=1, context=1, pipeline=4)
    job = Job(seq_len=1024, global_batch=8)
    request = Request(resolve_model("gpt2"), resolve_cluster("4xa100-sxm-80gb"), job, pins=pins)
    bounded = SimulatedCandidates.from_candidates(Candidates(request))
    rng, by_paths = random.Random(1), 0

    for family in bounded.families:
        rows = [row for row in bounds_of(bounded, family) if row[1][-1] < math.inf]
        for layout, bounds_s in rng.sample(rows, min(len(rows), 2)):
            if bounded.refusal(layout) is not None:
                continue
            for step_s in steps_s(bounded, layout):
                paths_s = max(bounds_below(1.3 * step_s, bounded, family, layout))
                assert paths_s <= step_s * (1 + 1e-9), layout.text()
                by_paths += paths_s > max(bounds_s) * 1.01

    assert by_paths > 5


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zbv"])
def test_paths_leave_out_what_stands_behind_the_last_way_back(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two more layers end a path earlier by their weight gradients there and by what they sync.

    Seconds are those of the layout's own costs; weight gradients are counted in its lists.
    """
    ranks, count, virtual = 4, 12, 1 if schedule == "zb-h1" else 2
    names = {"recompute": "none", "compile": "none", "loss": "full", "schedule": schedule}
    sizes = {"tensor": 1, "context": 1, "pipeline": ranks, "virtual_stages": virtual}
    pins = Pins(**names, **sizes, zero=1, micro_batch=1)  # type: ignore[arg-type]
    job = Job(seq_len=2048, global_batch=2 * count)
    request = Request(
        resolve_model("llama-3.2-1b"), resolve_cluster("8xa100-sxm-80gb"), job, pins=pins
    )
    bounded = SimulatedCandidates.from_candidates(Candidates(request))
    bounded.limit_s = 1e3
    every: list[RankPaths] = []

    def paths_s(paths: RankPaths, layers: int, low_s: Any, limit_s: Any) -> Any:
        every.append(paths)
        return whole_layer_paths.paths_s(paths, layers, low_s, limit_s)

    monkeypatch.setattr(group_memory_bounds, "paths_s", paths_s)
    [family] = bounded.families
    (layout, _), *_ = bounds_of(bounded, family)
    paths = every[-1]
    costs = bounded.tables.costs_of(layout)
    [kind] = set(costs.kinds) - set(bounded.tables.end_kinds)
    part, row = costs.parts[kind][0], costs.kinds[kind][0]  # that recomputes nothing
    shape = {"stages": ranks * virtual, "virtual_stages": virtual}
    lists = orders(schedule, micro_batches=count, **shape)

    assert row.sync_s > 0 < part.figures.weight_s
    less_s = (paths.alone_s - paths.behind_s)[2] - (paths.alone_s - paths.behind_s)[0]
    for rank in range(ranks):
        if rank == rank_of_stage(schedule, **shape)[-1]:
            continue
        kinds = [action.kind for action in lists[rank]]
        drained = len(kinds) - 1 - max(at for at, one in enumerate(kinds) if one == "I")
        expected_s = 2 * row.sync_s + 2 / virtual * drained * part.figures.weight_s
        assert less_s[rank] == pytest.approx(expected_s, rel=1e-6), (rank, drained)


EXACT = {
    **REQUESTS,
    "experts": ("qwen1.5-moe-a2.7b", "8xa100-sxm-80gb", 1024, Pins()),
    "offload": ("gpt2-xl", "8xrtx-3090", 1024, read_pins([], ["offload"])),
    "overlapped": ("llama-3.2-1b", "8xh100-sxm-80gb", 1024, read_pins([], ["async-tensor"])),
}


@pytest.mark.long(*(f"6-{name}" for name in EXACT if name != "overlapped"))
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("tries", [6, pytest.param(60, marks=pytest.mark.matrix)])
def test_no_array_bound_is_above_the_exact_seconds_of_a_layout(name: str, tries: int) -> None:
    model, cluster, seq_len, pins = EXACT[name]
    job = Job(seq_len=seq_len, global_batch=96)
    request = Request(resolve_model(model), resolve_cluster(cluster), job, pins=pins)
    bounded = Candidates(request)
    bounded.computation_s()
    rng, tight, tried = random.Random(name), 0.0, 0

    while tried < tries:
        some = rng.choice(bounded.families)
        alike = [
            one
            for one in bounded.families
            if (one.degrees, one.micro_batch) == (some.degrees, some.micro_batch)
        ]
        rows = [row for one in alike for row in bounds_of(bounded, one)]
        for layout, bounds_s in rng.sample(rows, min(len(rows), 3)):
            if bounded.refusal(layout) is not None:
                continue
            tried += 1
            solution = solve_chain(bounded.instance(layout))
            if isinstance(solution, Solution):
                exact_s = solution.objective_s + bounded.costs(layout).step_s
                assert max(bounds_s) <= exact_s * (1 + 1e-9), layout.text()
                tight = max(tight, max(bounds_s) / exact_s)

    assert tight > 0.5
