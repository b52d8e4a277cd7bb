"""Measured layers replace arithmetic where they apply, and scale it where they are near."""

import pytest

from planner.cluster import ClusterSpec
from planner.costs.calibration import calibrated
from planner.costs.layout_costs import CostTables
from planner.expressions import resolve_cluster, resolve_model
from planner.layers.operator_table import Setting
from planner.model import ModelGraph
from planner.plan import Job, Layout
from planner.profile import (
    Birth,
    CollectiveCurve,
    LayerMeasurement,
    LinkPoint,
    Overheads,
    Profile,
)

JOB = Job(seq_len=512, global_batch=64)


def measurement(**changes: object) -> LayerMeasurement:
    figures = {
        "kind": "block",
        "tensor": 1,
        "sequence_parallel": False,
        "micro_batch": 2,
        "seq_len": 512,
        "precision": "bf16",
        "recompute": "none",
        "forward_s": 0.010,
        "backward_s": 0.020,
        "stored_bytes": 1000,
        "forward_transient_bytes": 100,
        "backward_transient_bytes": 200,
        "spread": 0.02,
        "samples": 10,
    }
    return LayerMeasurement(**{**figures, **changes})


def profile(
    *layers: LayerMeasurement,
    collectives: tuple[CollectiveCurve, ...] = (),
    overheads: Overheads | None = None,
) -> Profile:
    return Profile(
        model="gpt2",
        model_digest="sha256:0",
        birth=Birth(
            command="profile",
            date="2026-11-21",
            host="here",
            device="cpu",
            ranks=2,
            threads_per_rank=1,
            software={"torch": "2.13.0"},
        ),
        layers=layers,
        collectives=collectives,
        overheads=overheads,
    )


@pytest.fixture(scope="module")
def gpt2() -> ModelGraph:
    return resolve_model("gpt2")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


def figures(tables: CostTables, layout: Layout, recompute: int = 0):  # type: ignore[no-untyped-def]
    return tables.of(layout).parts["block"][recompute].figures


def test_an_exact_measurement_replaces_seconds_and_bytes(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    tables = CostTables(gpt2, node, JOB, profile(measurement()))

    found = figures(tables, Layout(micro_batch=2, micro_batches=32))

    assert found.provenance == "measured"
    assert found.whole_forward_s == pytest.approx(0.010)
    assert found.whole_backward_s == pytest.approx(0.020)
    assert (found.stored_bytes, found.forward_transient_bytes) == (1000, 100)
    assert found.backward_transient_bytes == 200


def test_between_two_measured_micro_batches_figures_are_straight(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    twice = measurement(micro_batch=6, forward_s=0.030, stored_bytes=3000)
    tables = CostTables(gpt2, node, JOB, profile(measurement(), twice))

    found = figures(tables, Layout(micro_batch=4, micro_batches=16))

    assert found.provenance == "interpolated"
    assert found.whole_forward_s == pytest.approx(0.020)
    assert found.stored_bytes == 2000


def test_elsewhere_arithmetic_is_scaled_by_the_nearest_measurement(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    plain = CostTables(gpt2, node, JOB)
    tables = CostTables(gpt2, node, JOB, profile(measurement()))
    ratio = 0.010 / figures(plain, Layout(micro_batch=2, micro_batches=32)).whole_forward_s

    found = figures(tables, Layout(micro_batch=8, micro_batches=8))

    assert found.provenance == "fitted"
    expected = ratio * figures(plain, Layout(micro_batch=8, micro_batches=8)).whole_forward_s
    assert found.whole_forward_s == pytest.approx(expected)


def test_what_was_measured_on_one_rank_scales_no_communication(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    plain = CostTables(gpt2, node, JOB)
    slow = CostTables(gpt2, node, JOB, profile(measurement()))
    ratio = 0.010 / figures(plain, Layout(micro_batch=2, micro_batches=32)).whole_forward_s
    layout = Layout(tensor=2, micro_batch=2, micro_batches=32)

    own, found = figures(plain, layout), figures(slow, layout)

    assert found.forward_s == pytest.approx(ratio * own.forward_s)
    assert found.forward_tensor_s == own.forward_tensor_s > 0
    assert found.backward_tensor_s == own.backward_tensor_s > 0


@pytest.mark.parametrize("context", [2, 4])
def test_over_context_ranks_arithmetic_is_scaled_and_communication_is_not(
    gpt2: ModelGraph, node: ClusterSpec, context: int
) -> None:
    plain = CostTables(gpt2, node, JOB)
    tables = CostTables(gpt2, node, JOB, profile(measurement()))
    ratio = 0.010 / figures(plain, Layout(micro_batch=2, micro_batches=32)).whole_forward_s
    layout = Layout(context=context, micro_batch=8, micro_batches=8)

    found = figures(tables, layout)

    assert found.provenance == "fitted"
    assert found.forward_s == pytest.approx(ratio * figures(plain, layout).forward_s)
    assert found.forward_tensor_s == figures(plain, layout).forward_tensor_s > 0


def test_a_measurement_of_the_same_recompute_choice_is_nearer_than_any_other(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    layers = (measurement(), measurement(recompute="full", micro_batch=16, stored_bytes=7))
    plain, tables = CostTables(gpt2, node, JOB), CostTables(gpt2, node, JOB, profile(*layers))
    layout = Layout(micro_batch=2, micro_batches=32)

    found = figures(tables, layout, 2)

    sixteen = figures(plain, Layout(micro_batch=16, micro_batches=4), 2).stored_bytes
    expected = 7 / sixteen * figures(plain, layout, 2).stored_bytes
    assert found.stored_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    "other", [{"kind": "head"}, {"precision": "fp32"}], ids=["other kind", "other precision"]
)
def test_measurements_of_something_else_change_nothing(
    gpt2: ModelGraph, node: ClusterSpec, other: dict[str, str]
) -> None:
    plain = CostTables(gpt2, node, JOB)
    tables = CostTables(gpt2, node, JOB, profile(measurement(**other)))
    layout = Layout(micro_batch=2, micro_batches=32)

    assert figures(tables, layout) == figures(plain, layout)


def test_measured_seconds_of_several_ranks_include_their_communication(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    shared = measurement(tensor=2, sequence_parallel=True)
    tables = CostTables(gpt2, node, JOB, profile(shared))

    found = figures(tables, Layout(tensor=2, micro_batch=2, micro_batches=32))

    assert found.forward_tensor_s > 0
    assert found.forward_s + found.forward_tensor_s == pytest.approx(0.010)


def test_the_arithmetic_is_asked_for_the_measured_setting() -> None:
    asked = []

    def computed(setting: Setting, recompute: str):  # type: ignore[no-untyped-def]
        asked.append((setting.micro_batch, setting.seq_len, recompute))
        raise StopIteration

    with pytest.raises(StopIteration):
        calibrated([], "block", Setting(micro_batch=3, seq_len=7), "full", computed)
    assert asked == [(3, 7, "full")]


def overheads(**changes: float) -> Overheads:
    figures = {
        "step_s": 0.0,
        "optimizer_s_per_parameter": 0.0,
        "pipeline_action_s": 0.0,
        "shard_unit_s": 0.0,
        "overlap": 1.0,
    }
    return Overheads(**{**figures, **changes})


def test_measured_overheads_stand_where_they_belong(gpt2: ModelGraph, node: ClusterSpec) -> None:
    with_them = overheads(step_s=0.5, optimizer_s_per_parameter=1e-6, pipeline_action_s=0.25)
    tables = CostTables(gpt2, node, JOB, profile(overheads=with_them))
    layout = Layout(pipeline=4, micro_batches=64)

    costs = tables.of(layout)

    block = costs.kinds["block"][0]
    parameters = next(layer.parameters for layer in gpt2.layers if layer.kind == "block")
    assert costs.step_s == 0.5
    assert costs.boundary_s == pytest.approx(0.25 + costs.transfer_s)
    assert costs.parts["block"][0].optimizer_s == pytest.approx(1e-6 * parameters)
    assert block.backward_s < 0.25 < costs.kinds["head"][0].backward_s


def test_what_cannot_overlap_is_waited_for(gpt2: ModelGraph, node: ClusterSpec) -> None:
    curves = tuple(
        CollectiveCurve(
            tier="nvlink",
            operation=operation,
            ranks=8,
            points=(LinkPoint(size_bytes=1, seconds=0.003, spread=0.0),),
        )
        for operation in ("all_gather", "reduce_scatter")
    )
    layout = Layout(data_shard=8, zero=3, micro_batches=8)

    def block(overlap: float):  # type: ignore[no-untyped-def]
        measured = profile(collectives=curves, overheads=overheads(overlap=overlap))
        return CostTables(gpt2, node, JOB, measured).of(layout).parts["block"][0]

    hidden, waiting = block(1.0), block(0.0)

    # The gather takes far longer than a block's forward, which hides as much as itself.
    assert waiting.gather_s - hidden.gather_s == pytest.approx(hidden.figures.forward_s)
