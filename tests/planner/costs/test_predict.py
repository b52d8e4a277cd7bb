"""Predictions: parts that add up, the closed form beside the simulation, limits known by hand."""

import itertools
import math
import random

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import balanced_cuts, layout_prediction
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.simulate import closed_form_s
from meshwright.planner.search.search import search

JOB = Job(seq_len=4096, global_batch=64)
LAYOUTS = [
    Layout(data_shard=8, zero=3, micro_batches=8),
    Layout(data_replicate=8, micro_batches=8),
    Layout(tensor=8, micro_batch=4, micro_batches=16),
    Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=32),
    Layout(pipeline=4, data_replicate=2, micro_batches=32, schedule="gpipe"),
]


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    return resolve_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.text)
def test_the_closed_form_agrees_with_the_simulation(
    llama: ModelGraph, node: ClusterSpec, layout: Layout
) -> None:
    tables = CostTables(Request(llama, node, JOB))
    costs = tables.costs_of(layout)
    seconds = [sum((c.forward_s, c.backward_s)) for c in (costs.kinds[k][0] for k in costs.kinds)]
    by_kind = dict(zip(costs.kinds, seconds, strict=True))
    sync = {kind: choices[0].sync_s for kind, choices in costs.kinds.items()}
    chain = [layer.kind for _, layer in llama.chain]
    cuts = balanced_cuts([by_kind[kind] for kind in chain], layout.pipeline)
    stages = [chain[a:b] for a, b in itertools.pairwise(cuts)]
    ends = layout.pipeline - 1
    stage_s = [
        sum(by_kind[kind] for kind in stage) + costs.boundary_s * ((s > 0) + (s < ends))
        for s, stage in enumerate(stages)
    ]
    sync_s = max(sum(sync[kind] for kind in stage) for stage in stages)

    closed_s = closed_form_s(stage_s, layout.micro_batches) + sync_s + costs.step_s
    found = layout_prediction(Request(llama, node, JOB), layout, tables=tables)

    assert closed_s == pytest.approx(found.step_time_s, rel=0.05)
    if layout.pipeline == 1:
        assert closed_s == pytest.approx(found.step_time_s)


@pytest.mark.parametrize(("share", "fits"), [(1.041, True), (1.038, False), (0.99, False)])
@pytest.mark.long("0.99-False")
def test_a_plan_fits_where_the_search_would_take_it(
    llama: ModelGraph, node: ClusterSpec, share: float, fits: bool
) -> None:
    layout = Layout(data_shard=8, zero=3, micro_batches=8)
    job = Job(seq_len=2048, global_batch=64)
    (stage,) = layout_prediction(Request(llama, node, job), layout).stages
    group = node.groups[0]
    size = {"memory_bytes": round(share * stage.peak_memory_bytes)}
    device = group.accelerator.model_copy(update=size)
    small = node.model_copy(update={"groups": (group.model_copy(update={"accelerator": device}),)})

    found = layout_prediction(Request(llama, small, job), layout)
    pins = Pins(
        tensor=1,
        pipeline=1,
        zero=3,
        data_shard=8,
        micro_batch=1,
        recompute="none",
        compile="none",
        loss="full",
        prefetch=0,
    )

    assert found.fits == fits
    if fits:
        assert search(Request(llama, small, job, pins=pins)).plan.layout == layout
    else:
        with pytest.raises(NoPlanFits):
            search(Request(llama, small, job, pins=pins))


def test_more_micro_batches_shrink_the_bubble(llama: ModelGraph, node: ClusterSpec) -> None:
    shares = []
    for micro_batches in (8, 32, 128):
        job = Job(seq_len=4096, global_batch=micro_batches)
        layout = Layout(pipeline=8, micro_batches=micro_batches)
        found = layout_prediction(Request(llama, node, job), layout)
        shares.append(found.step_parts["pipeline"] / found.step_time_s)

    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(7 / 15, abs=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_no_split_is_better_balanced(seed: int) -> None:
    rng = random.Random(seed)
    seconds = [rng.uniform(0.1, 2.0) for _ in range(rng.randint(3, 8))]
    stages = rng.randint(1, 3)

    cuts = balanced_cuts(seconds, stages)

    def slowest(at: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(at))

    every = (
        (0, *inner, len(seconds))
        for inner in itertools.combinations(range(1, len(seconds)), stages - 1)
    )
    assert slowest(cuts) == pytest.approx(min(map(slowest, every)))
    assert all(b > a for a, b in itertools.pairwise(cuts))


def test_nothing_is_infinite_on_the_largest_cluster() -> None:
    llama = resolve_model("llama-3.1-405b")
    layout = Layout(tensor=8, pipeline=16, data_shard=128, zero=1, micro_batches=16)

    found = layout_prediction(
        Request(
            llama, resolve_cluster("2048x8xh100-sxm-80gb"), Job(seq_len=8192, global_batch=2048)
        ),
        layout,
    )

    assert math.isfinite(found.step_time_s)
    assert 0.2 < found.mfu < 0.6
