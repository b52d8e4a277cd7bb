"""Bounds in simulated time of graphs of layers, against every downset split there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import placement_prediction
from meshwright.planner.costs.stage_placement import branching
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.proof_budget import FULL, USUAL
from meshwright.planner.search.search import search
from meshwright.planner.search.spaces.mixed import GraphSpace
from meshwright.planner.solver.graph_instance import GraphInstance
from meshwright.planner.solver.requirements import Requirement, read_requirements
from tests.planner.search.spaces.every_layout import layouts_of
from tests.planner.search.spaces.test_graph import random_model
from tests.planner.solver.small_graphs import splits

SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def pins(seed: int, ranks: int) -> Pins:
    """One schedule and micro-batch, and half of the time one way to recompute."""
    rng = random.Random(seed)
    return Pins(
        tensor=1,
        data=1,
        pipeline=ranks,
        schedule=SCHEDULES[seed % 3],
        micro_batch=rng.choice((1, 2, 3, 4, 6)),
        recompute=rng.choice((None, "none")) if seed % 2 else "none",
        loss="full",
    )


Placements = tuple[list[list[str]], list[tuple[tuple[str, Any, Any], ...]]]
"""[stage] Names of its layers; their kinds and choices."""


def placed(
    request: Request, problem: GraphInstance, choices: dict[str, Any]
) -> Iterator[Placements]:
    """Yield every split into the stages of a problem, with every choice of a layer's options.

    Only those that keep what is required.
    """
    model = request.model
    kinds = {name: layer.kind for name, layer in model.chain}
    for stage_of in splits(problem):
        held = [
            [name for name, at in zip(problem.names, stage_of, strict=True) if at == stage]
            for stage in range(len(problem.chain.stages))
        ]
        flat = [name for own in held for name in own]
        for options in itertools.product(*(choices[kinds[name]] for name in flat)):
            of = dict(zip(flat, options, strict=True))
            if not all(keeps(one, model, held, of) for one in request.pins.require):
                continue
            yield (
                held,
                [
                    tuple((kinds[one], of[one].recompute, of[one].activations) for one in own)
                    for own in held
                ],
            )


def keeps(asked: Requirement, model: ModelGraph, held: list[list[str]], of: dict[str, Any]) -> bool:
    """Whether stages with these layers and choices keep what is required."""
    first, last = asked.layers or (0, -1)
    names = {name for name, _ in model.chain[first : last + 1]}
    stages = [stage for stage, own in enumerate(held) if names & set(own)]
    if asked.options:
        return all(of[name].recompute in asked.options for name in names)
    if asked.at_most is not None:
        every = range(len(held)) if asked.stages is None else asked.stages
        return all(len(held[stage]) <= asked.at_most for stage in every if stage < len(held))
    return len(stages) == 1 if asked.together else set(stages) <= set(asked.stages or ())


def least_alike_s(request: Request) -> float:
    """The least simulated step of all that fits, one by one."""
    every = Candidates(request)
    space, best_s = GraphSpace(every), math.inf
    for layout in layouts_of(space):
        kinds = every.costs(layout).kinds
        choices = {
            kind: allowed_options(kinds[kind], layout, request.pins.recompute) for kind in kinds
        }
        for held, placements in placed(request, space.instance(layout), choices):
            seats = branching(every.tables, layout, held)
            found = placement_prediction(every.tables, layout, placements, seats)
            best_s = min(best_s, found.step_time_s if found.fits else math.inf)
    return best_s


def least_mixed_s(request: Request) -> float:
    """The same of every order of device types."""
    space, best_s = GraphSpace(GroupCandidates(request)), math.inf
    for layout in layouts_of(space):
        stages = space.costs.stages_of(layout)
        kinds = space.costs.tables[next(iter(stages))].costs_of(layout).kinds
        choices = {
            kind: allowed_options(kinds[kind], layout, request.pins.recompute) for kind in kinds
        }
        problem = space.instance(layout)
        types = [name for name, count in stages.items() for _ in range(count)]
        for groups in sorted(set(itertools.permutations(types))):
            for held, placements in placed(request, problem, choices):
                seats = space.costs.seats(layout, list(groups), held)
                tables = space.costs.tables[groups[0]]
                found = placement_prediction(tables, layout, placements, seats)
                best_s = min(best_s, found.step_time_s if found.fits else math.inf)
    return best_s


def proven(answer: Answer, least_s: float) -> float:
    """Return the gap, once neither bound nor plan contradicts the least step."""
    said = answer.certificate
    assert said.lower_bound_s <= least_s * (1 + 1e-9)
    assert said.objective_s >= least_s * (1 - 1e-9)
    return said.gap


def required(seed: int, model: ModelGraph, ranks: int) -> tuple[Requirement, ...]:
    """Something that most plans do not keep."""
    rng, names = random.Random(seed), [name for name, _ in model.chain]
    one, other = sorted(rng.sample(range(len(names)), 2))
    words = (
        f"at most {len(names) // ranks} layers on stage {rng.randrange(ranks)}",
        f"layers {one}-{other} together",
        f"layer {names[one]} on stage {rng.randrange(ranks)}",
        f"layer {names[other]} recompute full",
    )
    return read_requirements(rng.sample(words, rng.choice((1, 2))), names)


def requests(seeds: Iterable[int], *, mixed: bool, tied: bool = False) -> Iterator[Request]:
    """Yield requests for random graphs on two or three devices, alike or of two types."""
    for seed in seeds:
        model, ranks = random_model(seed), random.Random(seed).choice((2, 3))
        if len(model.chain) > 5 and ranks == 3:
            continue  # too many to list
        names = f"1xa100-sxm-40gb+{ranks - 1}xv100-sxm-32gb" if mixed else f"{ranks}xa100-sxm-40gb"
        job = Job(seq_len=64, global_batch=12, precision="fp32")
        asked = pins(seed, ranks)
        if tied:
            asked = replace(asked, require=required(seed, model, ranks))
        yield Request(model, resolve_cluster(names), job, pins=asked)


SEEDS = [range(0, 400, 50), pytest.param(range(400), marks=pytest.mark.matrix)]


@pytest.mark.long("seeds0-two types")
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "two types"])
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.matrix
def test_nothing_of_a_graph_simulates_below_the_bound(seeds: range, mixed: bool) -> None:
    """Every layout, downset split, order of types and choice of options, simulated one by one."""
    gaps = []
    for asked in requests(seeds, mixed=mixed):
        least_s = least_mixed_s(asked) if mixed else least_alike_s(asked)
        if least_s == math.inf:
            continue

        usual, full = (search(asked, effort=effort) for effort in (USUAL, FULL))

        proven(usual, least_s)
        gaps.append(proven(full, least_s))
        assert full.prediction.step_time_s == pytest.approx(least_s, rel=1e-5)
    assert len(gaps) > 0.6 * len(seeds)
    assert max(gaps) < 1e-5


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "two types"])
@pytest.mark.parametrize(
    "seeds", [(6, 8, 13, 26), pytest.param(range(1_000, 1_060), marks=pytest.mark.matrix)]
)
@pytest.mark.long("seeds0-two types")
def test_the_fastest_that_keeps_what_is_required_is_found_and_proven(
    seeds: Iterable[int], mixed: bool
) -> None:
    gaps = []
    for asked in requests(seeds, mixed=mixed, tied=True):
        least_s = least_mixed_s(asked) if mixed else least_alike_s(asked)
        if least_s == math.inf:
            continue

        full = search(asked, effort=FULL)

        gaps.append(proven(full, least_s))
        assert full.prediction.step_time_s == pytest.approx(least_s, rel=1e-5)
    assert gaps
    assert max(gaps) < 1e-5
