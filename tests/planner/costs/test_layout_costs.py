"""Costs of layouts: laws that any plan obeys, and what the search needs of them."""

import time

import pytest

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.calibration.tables.predictions import framework_prediction
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts, StrategyCost
from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request, pinned_layout

JOB = Job(seq_len=4096, global_batch=64)


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    return resolve_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


@pytest.fixture(scope="module")
def tables(llama: ModelGraph, node: ClusterSpec) -> CostTables:
    return CostTables(Request(llama, node, JOB))


def test_buffers_of_collectives_wait_where_nothing_holds_the_host_back(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    tables = CostTables(Request(llama, node, JOB, framework=frameworks()["nanotron"]))

    def waiting(**degrees: int) -> float:
        layout = Layout(micro_batch=2, zero=0, **degrees)  # type: ignore[arg-type]
        return tables.costs_of(layout).recorded_bytes

    # One of each of 32 blocks' activations, of 2 samples of 4,096 tokens with 4,096 features.
    assert waiting(tensor=8) == waiting(tensor=2) == 32 * 2 * 4096 * 4096 * 2
    assert waiting(tensor=4, pipeline=2) == waiting(data_replicate=8) == 0.0


def test_libraries_work_in_more_memory_on_hopper_than_before(llama: ModelGraph) -> None:
    layout = Layout(data_replicate=8, micro_batches=8)

    def work(devices: str, framework: str) -> float:
        request = Request(llama, resolve_cluster(devices), JOB, framework=frameworks()[framework])
        return CostTables(request).costs_of(layout).workspace_bytes / 2**20

    # cuBLAS through torch and Transformer Engine: 32 + 32 MiB, and 8.1 + 4 MiB before.
    assert work("8xh100-sxm-80gb", "megatron") == pytest.approx(64, rel=0.01)
    assert work("8xa100-sxm-80gb", "megatron") == pytest.approx(12.1, rel=0.01)
    assert work("8xh100-sxm-80gb", "native") == 0.0


def block(costs: LayoutCosts, recompute: str = "none") -> StrategyCost:
    return next(cost for cost in costs.kinds["block"] if cost.recompute == recompute)


def test_every_kind_has_its_three_choices_in_order(tables: CostTables) -> None:
    costs = tables.costs_of(Layout(data_shard=8, zero=3, micro_batches=8))

    assert list(costs.kinds) == ["embedding", "block", "head"]
    for choices in costs.kinds.values():
        assert [choice.recompute for choice in choices] == ["none", "selective", "full"]


def test_recomputing_a_block_trades_seconds_for_bytes(tables: CostTables) -> None:
    none, selective, full = tables.costs_of(Layout(data_shard=8, zero=3)).kinds["block"]

    assert none.layer_bytes.stored > selective.layer_bytes.stored > full.layer_bytes.stored
    assert none.backward_s < selective.backward_s < full.backward_s
    assert none.forward_s == selective.forward_s == full.forward_s
    assert none.sync_s == selective.sync_s == full.sync_s


def test_tensor_parallelism_divides_matrices_and_keeps_norms(
    tables: CostTables, llama: ModelGraph
) -> None:
    whole = block(tables.costs_of(Layout(data_replicate=8, micro_batches=8))).layer_bytes.states
    layout = Layout(tensor=2, data_replicate=4, micro_batches=16)
    halved = block(tables.costs_of(layout)).layer_bytes.states

    norms = 2 * 4096
    parameters = next(layer.parameters for layer in llama.layers if layer.kind == "block")
    assert halved / whole == pytest.approx(((parameters - norms) / 2 + norms) / parameters)


def test_a_pipeline_of_a_tied_model_holds_the_embedding_at_both_ends(node: ClusterSpec) -> None:
    gpt2 = resolve_model("gpt2")
    tables = CostTables(Request(gpt2, node, Job(seq_len=1024, global_batch=64)))

    alone = tables.costs_of(Layout(data_replicate=8, micro_batches=8))
    piped = tables.costs_of(Layout(data_replicate=4, pipeline=2, micro_batches=16))

    more = piped.kinds["head"][0].layer_bytes.states - alone.kinds["head"][0].layer_bytes.states
    assert more == pytest.approx(18 * 50257 * 768)


def test_a_tied_sum_waits_for_both_ends_of_a_pipeline() -> None:
    tied = resolve_model("gpt2")
    assert tied.architecture is not None
    untied = graph_of(tied.architecture.model_copy(update={"tied_embeddings": False}), name="gpt2")
    slow = resolve_cluster("4x1xv100-sxm-32gb,network=20GB/s")
    # The first stage ends last.
    pins = read_pins(["pp=4,schedule=1f1b,micro_batch=1,loss=full,compile=none,recompute=none"])

    def step_s(model: ModelGraph) -> float:
        request = Request(model, slow, Job(seq_len=1024, global_batch=8), pins=pins)
        return framework_prediction(request, pinned_layout(request)).step_time_s

    # Each of two ranks sends half of the sums twice: 4 bytes of 50,257 x 768 weights in all.
    assert step_s(tied) - step_s(untied) == pytest.approx(4 * 50257 * 768 / 20e9, rel=0.3)


def test_sharding_levels_move_communication_between_step_and_micro_batch(
    tables: CostTables,
) -> None:
    def of(zero: int) -> StrategyCost:
        return block(tables.costs_of(Layout(data_shard=8, zero=zero, micro_batches=8)))

    rates, [layer] = tables.rates, {layer for layer in tables.model.layers if layer.kind == "block"}
    # 16-bit gradients are read, their sum in fp32 is read and written.
    summed_s = rates.memory_s((2 + 4 + 4) * layer.parameters)

    assert of(1).forward_s == of(2).forward_s < of(3).forward_s
    assert of(1).backward_s - summed_s < of(2).backward_s < of(3).backward_s
    assert of(1).sync_s > of(2).sync_s > of(3).sync_s


def test_the_schedule_changes_bytes_and_no_seconds(tables: CostTables) -> None:
    one = tables.costs_of(
        Layout(pipeline=4, data_shard=2, zero=1, micro_batches=8, schedule="1f1b")
    )
    other = tables.costs_of(
        Layout(pipeline=4, data_shard=2, zero=1, micro_batches=8, schedule="gpipe")
    )

    for kind in one.kinds:
        for before, after in zip(one.kinds[kind], other.kinds[kind], strict=True):
            assert after.forward_s == before.forward_s
            assert after.backward_s == before.backward_s
            assert after.sync_s == before.sync_s
    assert one.boundary_s == other.boundary_s > 0
    assert one.fixed_bytes == other.fixed_bytes == one.context_bytes


def test_there_is_no_boundary_without_a_pipeline(tables: CostTables) -> None:
    costs = tables.costs_of(Layout(data_shard=8, zero=3))

    assert costs.boundary_s == 0
    assert costs.fixed_bytes == costs.context_bytes > 0


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data_shard=8, zero=3),
        Layout(data_replicate=8),
        Layout(tensor=8, micro_batch=8),
        Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=16),
    ],
    ids=Layout.text,
)
def test_faster_links_are_never_slower(
    llama: ModelGraph, node: ClusterSpec, layout: Layout
) -> None:
    faster = node.model_copy(
        update={
            "tiers": tuple(
                tier.model_copy(update={"bytes_per_s": 2 * tier.bytes_per_s}) for tier in node.tiers
            )
        }
    )

    slow = CostTables(Request(llama, node, JOB)).costs_of(layout)
    fast = CostTables(Request(llama, faster, JOB)).costs_of(layout)

    assert fast.boundary_s <= slow.boundary_s
    for kind, choices in slow.kinds.items():
        for before, after in zip(choices, fast.kinds[kind], strict=True):
            assert after.forward_s <= before.forward_s
            assert after.backward_s <= before.backward_s
            assert after.sync_s <= before.sync_s
            assert after.layer_bytes == before.layer_bytes


def test_tensor_parallelism_across_nodes_is_slower_than_inside_one(llama: ModelGraph) -> None:
    tables = CostTables(Request(llama, resolve_cluster("2x8xh100-sxm-80gb"), JOB))
    outside = ("pipeline", "data_shard", "data_replicate", "context", "tensor")

    near = block(tables.costs_of(Layout(tensor=2, data_shard=8, zero=1)))
    far = block(tables.costs_of(Layout(tensor=2, data_shard=8, zero=1, order=outside)))

    assert far.forward_s > near.forward_s


def test_a_layout_seen_before_costs_microseconds(tables: CostTables) -> None:
    layouts = [
        Layout(pipeline=pipeline, data_shard=8 // pipeline, zero=zero, micro_batches=pipeline * 8)
        for pipeline in (1, 2, 4)
        for zero in (1, 2, 3)
    ]
    for layout in layouts:
        tables.costs_of(layout)

    started = time.process_time()
    for _ in range(100):
        for layout in layouts:
            tables.costs_of(layout)
    each_s = (time.process_time() - started) / (100 * len(layouts))

    assert each_s < 50e-6


def test_experts_are_gathered_and_reduced_by_the_ranks_that_hold_the_same_ones() -> None:
    """8 experts on 4 of a replica's 8 ranks: dense parts divide over 8, experts over 2."""
    mixtral, nodes = resolve_model("mixtral-8x7b"), resolve_cluster("2x8xh100-sxm-80gb")
    nodes = nodes.model_copy(update={"tiers": tuple(_ideal(tier) for tier in nodes.tiers)})
    tables = CostTables(Request(mixtral, nodes, JOB))
    layout = Layout(pipeline=2, data_shard=8, expert=4, zero=1, micro_batches=8)
    block = tables.costs_of(layout).parts["moe_block"][0]

    routed = 8 * 3 * 4096 * 14336 / 4
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    dense = attention + 2 * 4096 + 4096 * 8
    reduced_s = (7 / 8 * 4 * dense + 1 / 2 * 4 * routed) / 100e9
    gathered_s = (7 / 8 * 2 * dense + 1 / 2 * 2 * routed) / 100e9
    # Beside collectives: gathered parameters are read and written (2 + 2), fresh gradients read and
    # the reduction's input written (2 + 4).
    rates = tables._rates
    copied_s = (
        (4 + 6) * (dense + routed) / (rates.device.curve.memory * rates.device.memory_bytes_per_s)
    )
    passed_s = block.figures.forward_s
    seen_s = max(gathered_s - passed_s, 16 / 132 * gathered_s)
    assert block.sync_s == pytest.approx(copied_s + reduced_s + seen_s)


def _ideal(tier: LinkTier) -> LinkTier:
    whole = dict.fromkeys(("all_gather", "reduce_scatter"), 1.0)
    update = {"latency_s": 0.0, "start_s": 0.0, "bytes_per_s": 100e9, "fractions": whole}
    update |= {"narrow": ()}
    return tier.model_copy(update=update)
