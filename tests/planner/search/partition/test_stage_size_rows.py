"""What is required of stages where ranks have several, against every split there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.partition.stage_counts import Shares, shares_of
from meshwright.planner.search.partition.stage_size_rows import rows_of
from meshwright.planner.search.search import search
from meshwright.planner.search.spaces.chain import ChainSpace
from meshwright.planner.search.spaces.mixed import MixedSpace
from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.partition_problem import Solution
from meshwright.planner.solver.requirements import read_requirements
from meshwright.planner.solver.side_constraints import SideConstraint
from tests.planner.search.spaces.every_layout import layouts_of


def vectors(shares: Shares) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of entries of all ranks."""
    count, ranks = len(shares.entries), shares.ranks
    for cuts in itertools.combinations(range(1, count), ranks - 1):
        numbers = tuple(b - a for a, b in itertools.pairwise((0, *cuts, count)))
        if all(n >= least for n, least in zip(numbers, shares.fewest_entries, strict=True)):
            yield numbers


def stages_of(shares: Shares, numbers: tuple[int, ...]) -> list[int]:
    """[layer] The stage that it lies on."""
    choices = [[0] * len(entry) for entry in shares.entries]
    placed = shares.layer_choices([0, *itertools.accumulate(numbers)], choices, [0])
    stage_of = {at: stage for stage, own in enumerate(placed) for at, _ in own}
    return [stage_of[layer] for layer in range(len(stage_of))]


def drawn(rng: random.Random, layers: int, stages: int) -> SideConstraint:
    first = rng.randrange(layers)
    some = tuple(range(first, min(layers, first + rng.randint(1, 3))))
    match rng.randrange(3):
        case 0:
            return SideConstraint(layers=some, together=True)
        case 1:
            return SideConstraint(
                layers=some, stages=tuple(sorted(rng.sample(range(stages + 1), 2)))
            )
        case _:
            named = tuple(rng.sample(range(stages), rng.randint(0, 2)))
            return SideConstraint(at_most=rng.randint(1, 5), stages=named)


@pytest.mark.parametrize("seed", range(60))
def test_rows_hold_what_keeps_all_that_is_required_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(["interleaved", "interleaved", "zbv", "dualpipe-v"])
    ranks, virtual = rng.choice([2, 3]), 2 if name != "interleaved" else rng.choice([2, 3])
    ends = rng.choice([("e",), ()]), rng.choice([("h",), ()])
    shares = shares_of((*ends[0], *"b" * rng.randint(8, 13), *ends[1]), name, ranks, virtual)
    assert shares is not None
    every = list(vectors(shares))
    layers = len(stages_of(shares, every[0]))
    ties = [drawn(rng, layers, ranks * virtual) for _ in range(rng.randint(1, 2))]

    rows = rows_of(shares, ties)

    def kept(numbers: tuple[int, ...]) -> bool:
        stage_of = stages_of(shares, numbers)
        assert set(stage_of) == set(range(ranks * virtual))
        return all(tie.is_kept(stage_of, [""] * layers) for tie in ties)

    held = [
        numbers
        for numbers in every
        for row in rows or ()
        if all(low <= n <= high for n, (low, high) in zip(numbers, row, strict=True))
    ]
    assert sorted(held) == sorted(filter(kept, every))


A = resolve_model("llama-3.1-8b").architecture
assert A is not None
MODEL = graph_of(A.model_copy(update={"layers": 9, "vocab_size": 2048}), name="nine")
NAMES = [name for name, _ in MODEL.chain]


def asked(*texts: str, **fixed: object) -> Request:
    pins = Pins(**{"pipeline": 2, "tensor": 1, "loss": "full", **fixed})  # type: ignore[arg-type]
    return Request(
        MODEL,
        resolve_cluster("2xa100-sxm-40gb"),
        Job(seq_len=2048, global_batch=8),
        replace(pins, require=read_requirements(texts, NAMES)),
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("interleaved", "at most 3 layers on stage 3"),
        ("interleaved", "layers block.2..block.4 together"),
        ("zbv", "layer block.3 on stage 1"),
        ("dualpipe-v", "layers block.0..block.2 on stage 0"),
        ("interleaved", "layer block.7 on stage 3"),
    ],
)
def test_the_fastest_split_that_keeps_it_is_found(schedule: str, text: str) -> None:
    request = asked(text, schedule=schedule, virtual_stages=2, micro_batch=1)
    free = replace(request, pins=replace(request.pins, require=()))
    space = ChainSpace(Candidates(free))
    tie = request.pins.require[0].tie(range(len(NAMES)), 4)
    assert tie is not None
    shares = shares_of(MODEL.chain_kinds, schedule, 2, 2)
    assert shares is not None
    best_s = float("inf")
    for layout in layouts_of(space):
        problem, step_s = space.candidates.instance(layout), space.candidates.costs(layout).step_s
        for numbers in vectors(shares):
            if tie.is_kept(stages_of(shares, numbers), [""] * len(NAMES)):
                row = tuple((n, n) for n in numbers)
                found = inner.solve(replace(problem, sizes=(row,)))
                if isinstance(found, Solution):
                    best_s = min(best_s, found.objective_s + step_s)

    answer, other = search(request), search(free)

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert answer.closed_form.objective_s >= other.closed_form.objective_s * (1 - 1e-12)
    for one in (answer.plan, *(finalist.plan for finalist in answer.finalists)):
        home = [s for s, stage in enumerate(one.stages) for _ in stage.layers]
        assert tie.is_kept(home, [""] * len(home))
    assert answer.prediction.fits


@pytest.mark.matrix
def test_with_one_stage_and_several_the_faster_is_chosen() -> None:
    text = "at most 3 layers on stage 0"

    answer = search(asked(text))

    each = [search(asked(text, virtual_stages=v)).closed_form.objective_s for v in (1, 2, 3, 5)]
    assert answer.closed_form.objective_s == pytest.approx(min(each), rel=1e-9)
    assert min(each) < each[0]
    assert len(answer.plan.stages[0].layers) <= 3


def test_what_no_numbers_of_layers_keep_is_told() -> None:
    with pytest.raises(NoPlanFits, match="no numbers of layers on its ranks keep what is required"):
        search(asked("layer block.8 on stage 0", schedule="interleaved", virtual_stages=2))
    with pytest.raises(NoPlanFits, match="can be required with one stage on each rank"):
        search(asked("layer block.8 recompute full", schedule="interleaved", virtual_stages=2))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("interleaved", "at most 3 layers on stage 2"),
        ("zbv", "layers block.0..block.1 on stage 0"),
        ("interleaved", "layers block.7..block.8 on stage 3"),
    ],
)
@pytest.mark.matrix
def test_it_is_kept_on_devices_that_differ(schedule: str, text: str) -> None:
    one = asked(text, schedule=schedule, virtual_stages=2, micro_batch=1, recompute="none")
    request = replace(one, cluster=resolve_cluster("1xa100-sxm-40gb+1xv100-sxm-32gb"))
    free = replace(request, pins=replace(request.pins, require=()))
    tie = request.pins.require[0].tie(range(len(NAMES)), 4)
    shares = shares_of(MODEL.chain_kinds, schedule, 2, 2)
    assert tie is not None and shares is not None
    space, best_s = MixedSpace(GroupCandidates(free)), float("inf")
    for layout in layouts_of(space):
        step_s = max(costs.step_s for costs in space.costs_of(layout))
        for numbers in vectors(shares):
            if tie.is_kept(stages_of(shares, numbers), [""] * len(NAMES)):
                cuts = [0, *itertools.accumulate(numbers)]
                for types in ((0, 1), (1, 0)):
                    laid = space.instance(layout).laid(range(cuts[-1]), cuts, types)
                    found = inner.solve(replace(laid, sizes=(tuple((n, n) for n in numbers),)))
                    if isinstance(found, Solution):
                        best_s = min(best_s, found.objective_s + step_s)

    answer = search(request)

    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-6)
    assert best_s > search(free).closed_form.objective_s * (1 + 1e-6)
    home = [s for s, stage in enumerate(answer.plan.stages) for _ in stage.layers]
    assert tie.is_kept(home, [""] * len(home))
