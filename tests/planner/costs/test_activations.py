"""What becomes of stored tensors: hand calculations, and what the solver makes of the choice."""

import itertools
from dataclasses import replace

import pytest

from meshwright.planner.catalog import native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.activations import ActivationCost, activation_cost
from meshwright.planner.costs.calibration import Figures
from meshwright.planner.costs.hardware_rates import Rates, rates
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import placement_prediction, placements_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import with_figures
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Activations, Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.partition.layout_partition import instance_of, plan_of
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Solution

JOB = Job(seq_len=4096, global_batch=16)
EVERY: tuple[Activations, ...] = ("keep", "offload", "compress")
FIGURES = Figures(
    forward_s=0.010,
    forward_tensor_s=0.002,
    backward_s=0.020,
    recompute_s=0.003,
    backward_tensor_s=0.002,
    forward_ahead_s=0.0,
    backward_ahead_s=0.0,
    stored_bytes=1.0e9,
    forward_transient_bytes=1e8,
    backward_transient_bytes=2e8,
    returned_bytes=0.0,
    returned_anew_bytes=0.0,
    stores_input=True,
    provenance="quoted",
    spread=0.1,
    packable_share=0.9,
    elements_per_stored_byte=0.4,
)


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    return resolve_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


@pytest.fixture
def h100(node: ClusterSpec) -> Rates:
    return replace(rates(node, JOB, None), host_link_bytes_per_s=50e9)


def test_a_copy_that_takes_longer_than_the_pass_beside_it_is_seen(h100: Rates) -> None:
    # 1 GB over 50 GB/s are 20 ms; forward takes 12 ms and backward 25.
    found = activation_cost("offload", FIGURES, h100, passed=0.0)

    assert found.forward_host_s == pytest.approx(0.008)
    assert found.backward_host_s == 0
    assert found.stored_bytes == 0
    assert found.host_bytes == found.moving_bytes == 1e9


def test_what_the_last_stage_returns_stays_for_frameworks_that_keep_it(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    layout = Layout(pipeline=8, micro_batches=8)
    forgets = with_figures(native(), {"pipeline.keeps_results": False})

    (kept, again, _), (gone, once, _) = (
        CostTables(Request(llama, node, JOB, framework=framework)).costs_of(layout).parts["head"]
        for framework in (native(), forgets)
    )

    assert kept.stored_bytes - gone.stored_bytes == kept.figures.returned_bytes > 0
    # Logits are what selective recomputation keeps of the head anyway.
    assert again.stored_bytes == once.stored_bytes
    assert again.stored_bytes > gone.stored_bytes


def test_packed_tensors_take_a_byte_per_element_and_a_scale_per_128(h100: Rates) -> None:
    # 0.4e9 elements take 0.9e9 bytes, 2.25 each; 0.1e9 bytes are no floating tensors.
    found = activation_cost("compress", FIGURES, h100, passed=5.0)

    assert found.stored_bytes == pytest.approx(0.1e9 + 0.4e9 * (1 + 4 / 128) + 5.0)
    assert found.moving_bytes == pytest.approx(0.9e9)
    memory = h100.device.curve.memory * h100.device.memory_bytes_per_s
    assert found.packing_s == pytest.approx(0.4e9 * (37 + 2.25) / memory)
    assert found.unpacking_s == pytest.approx(0.4e9 * (9 + 2.25) / memory)
    assert found.host_bytes == 0


def test_to_keep_costs_nothing(h100: Rates) -> None:
    assert activation_cost("keep", FIGURES, h100, passed=5.0) == ActivationCost(
        stored_bytes=1e9 + 5.0
    )


def test_devices_behind_one_link_share_it(node: ClusterSpec) -> None:
    group = node.groups[0].model_copy(update={"host_link_devices": 4})
    shared = node.model_copy(update={"groups": (group,)})

    alone_s, together_s = (rates(c, JOB, None).host_copy_s(1e9) for c in (node, shared))

    assert together_s == pytest.approx(4 * alone_s)


def test_the_host_holds_what_the_device_would(llama: ModelGraph, node: ClusterSpec) -> None:
    layout = Layout(pipeline=4, data_replicate=2, micro_batches=8)
    costs = CostTables(Request(llama, node, JOB)).costs_of(layout)
    blocks = 8
    placements = [
        (("embedding", "none", "keep"), *[("block", "none", "offload")] * blocks),
        *[tuple([("block", "none", "offload")] * blocks)] * 2,
        (*[("block", "none", "offload")] * blocks, ("head", "none", "keep")),
    ]

    found = placement_prediction(
        CostTables(Request(llama, node, JOB), activations=EVERY), layout, placements
    )

    stored = costs.kinds["block"][0].layer_bytes.stored
    on_host = [stage.host_bytes for stage in found.stages]
    assert on_host == pytest.approx([q * blocks * stored for q in (4, 3, 2, 1)])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=8, micro_batch=16, micro_batches=1),
        Layout(tensor=2, pipeline=4, micro_batch=4, micro_batches=4),
        Layout(pipeline=8, micro_batch=2, micro_batches=8),
        Layout(pipeline=8, micro_batch=2, micro_batches=8, schedule="gpipe"),
    ],
    ids=Layout.text,
)
@pytest.mark.parametrize("memory", [24e9, 40e9])
def test_more_ways_are_never_slower_and_the_bytes_are_those_of_the_prediction(
    llama: ModelGraph, node: ClusterSpec, layout: Layout, memory: float
) -> None:
    accelerator = node.groups[0].accelerator.model_copy(update={"memory_bytes": int(memory)})
    group = node.groups[0].model_copy(update={"accelerator": accelerator})
    small = node.model_copy(update={"groups": (group,)})
    tables = CostTables(Request(llama, small, JOB), activations=EVERY)
    instance = instance_of(llama, small, layout, tables.costs_of(layout))
    kept = instance_of(
        llama, small, layout, CostTables(Request(llama, small, JOB)).costs_of(layout)
    )

    free, held = solve(instance), solve(kept)

    if isinstance(held, Solution):
        assert isinstance(free, Solution)
        assert free.objective_s <= held.objective_s * (1 + 1e-9)
    if isinstance(free, Solution):
        costs = tables.costs_of(layout)
        plan = plan_of(tables.request, layout, costs, free)
        found = placement_prediction(tables, layout, placements_of(plan, llama))
        for counted, stage in zip(free.stage_bytes, found.stages, strict=True):
            whole = costs.fixed_bytes + costs.slack * counted
            assert stage.peak_memory_bytes <= whole * (1 + 1e-9)
            assert whole <= stage.peak_memory_bytes * 1.35


def test_what_can_never_win_is_no_choice(llama: ModelGraph, node: ClusterSpec) -> None:
    """Full recompute leaves less to move and to pack than the other two."""
    layout = Layout(pipeline=4, data_replicate=2, micro_batches=8)

    costs = CostTables(Request(llama, node, JOB), activations=EVERY).costs_of(layout)

    for table in costs.kinds.values():
        names = {cost.name for cost in allowed_options(table, layout, None)}
        assert {"none", "selective", "full"} <= names
        assert not {"none, compress", "selective, offload", "selective, compress"} & names


def test_the_choices_of_old_are_untouched(llama: ModelGraph, node: ClusterSpec) -> None:
    layout = Layout(pipeline=4, data_replicate=2, micro_batches=8)
    plain = CostTables(Request(llama, node, JOB)).costs_of(layout).kinds
    every = CostTables(Request(llama, node, JOB), activations=EVERY).costs_of(layout).kinds

    for kind, table in plain.items():
        kept = tuple(cost for cost in every[kind] if cost.activations == "keep")
        assert kept == table
    assert all(len(table) == 9 for table in every.values())
    assert not any(a == b for a, b in itertools.pairwise(every["block"]))
