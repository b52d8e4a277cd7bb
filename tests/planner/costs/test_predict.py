"""Predictions: parts that add up, the closed form beside the simulation, limits known by hand."""

import itertools
import math
import random

import pytest

from planner.catalog.expressions import resolve_cluster, resolve_model
from planner.costs.layout_costs import CostTables
from planner.costs.predict import balanced_cuts, layout_prediction, predict
from planner.documents.cluster import ClusterSpec
from planner.documents.model import ModelGraph
from planner.documents.plan import Job, Layout, Mesh, PlacedLayer, Plan, PlannedModel, Stage
from planner.errors import NoPlanFits
from planner.requests.pins import Pins
from planner.requests.request import Request
from planner.schedules.simulate import closed_form_s
from planner.search.search import search

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
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_add_up_to_the_whole(
    llama: ModelGraph, node: ClusterSpec, layout: Layout, recompute: str
) -> None:
    found = layout_prediction(Request(llama, node, JOB, pins=Pins(recompute=recompute)), layout)

    assert sum(found.step_parts.values()) == pytest.approx(found.step_time_s)
    assert found.step_time_low_s <= found.step_time_s <= found.step_time_high_s
    assert found.tokens_per_s == pytest.approx(64 * 4096 / found.step_time_s)
    assert 0 < found.mfu < 1
    assert len(found.stages) == layout.pipeline
    for stage in found.stages:
        assert sum(stage.memory_parts.values()) == pytest.approx(stage.peak_memory_bytes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.text)
def test_the_closed_form_agrees_with_the_simulation(
    llama: ModelGraph, node: ClusterSpec, layout: Layout
) -> None:
    tables = CostTables(Request(llama, node, JOB))
    costs = tables.of(layout)
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


def test_a_plan_is_predicted_like_its_layout(llama: ModelGraph, node: ClusterSpec) -> None:
    layout = Layout(data_shard=8, zero=3, micro_batches=8)
    plan = Plan(
        model=PlannedModel(name=llama.name, source=llama.name, digest=llama.digest),
        cluster="8xh100-sxm-80gb",
        seq_len=JOB.seq_len,
        global_batch=JOB.global_batch,
        precision="bf16",
        mesh=Mesh(data_shard=8),
        zero=3,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=8,
        stages=(
            Stage(layers=tuple(PlacedLayer(layer=n, recompute="full") for n, _ in llama.chain)),
        ),
    )

    found = predict(plan, llama, node)
    expected = layout_prediction(Request(llama, node, JOB, pins=Pins(recompute="full")), layout)

    assert found.plan_digest == plan.digest
    assert found.step_time_s == expected.step_time_s
    assert found.stages == expected.stages


def test_an_8b_model_in_bf16_does_not_fit_one_80_gb_device(llama: ModelGraph) -> None:
    # 18 bytes per parameter are 134.6 GiB before the first activation.
    found = layout_prediction(
        Request(llama, resolve_cluster("1xh100-sxm-80gb"), Job(seq_len=2048, global_batch=2)),
        Layout(micro_batches=2),
    )

    parts = found.stages[0].memory_parts
    states = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert not found.fits
    assert states == pytest.approx(18 * llama.parameters)


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
        loss="plain",
        prefetch=0,
    )

    assert found.fits == fits
    if fits:
        assert search(Request(llama, small, job, pins=pins)).plan.layout == layout
    else:
        with pytest.raises(NoPlanFits):
            search(Request(llama, small, job, pins=pins))


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    layout = Layout(pipeline=4, data_replicate=2, micro_batches=32)

    stages = layout_prediction(Request(llama, node, JOB), layout).stages

    costs = CostTables(Request(llama, node, JOB)).of(layout)
    per_block = costs.kinds["block"][0].layer_bytes.stored
    blocks = round(stages[0].memory_parts["activations"] / per_block / 4)
    assert stages[0].memory_parts["activations"] == pytest.approx(4 * blocks * per_block, rel=0.01)


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
