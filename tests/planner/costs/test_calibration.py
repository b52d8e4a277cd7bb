"""Measured layers replace arithmetic where they apply, and scale it where they are near."""

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.calibration import calibrated_figures, stage_factors
from meshwright.planner.costs.hardware_rates import rates
from meshwright.planner.costs.layer_costs import LayerFigures
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import INSIDE_OUT, Job, Layout
from meshwright.planner.documents.profile import (
    Birth,
    ChunkedLoss,
    CollectiveCurve,
    LayerMeasurement,
    Overheads,
    Profile,
    StageMeasurement,
)
from meshwright.planner.operators.operator_table import Setting
from meshwright.planner.requests.request import Request

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
    return tables.costs_of(layout).parts["block"][recompute].figures


def test_an_exact_measurement_replaces_seconds_and_bytes(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(measurement())))

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
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(measurement(), twice)))

    found = figures(tables, Layout(micro_batch=4, micro_batches=16))

    assert found.provenance == "interpolated"
    assert found.whole_forward_s == pytest.approx(0.020)
    assert found.stored_bytes == 2000


def test_elsewhere_arithmetic_is_scaled_by_the_nearest_measurement(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    plain = CostTables(Request(gpt2, node, JOB))
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(measurement())))
    ratio = 0.010 / figures(plain, Layout(micro_batch=2, micro_batches=32)).whole_forward_s

    found = figures(tables, Layout(micro_batch=8, micro_batches=8))

    assert found.provenance == "fitted"
    expected = ratio * figures(plain, Layout(micro_batch=8, micro_batches=8)).whole_forward_s
    assert found.whole_forward_s == pytest.approx(expected)


def test_what_was_measured_on_one_rank_scales_no_communication(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    plain = CostTables(Request(gpt2, node, JOB))
    slow = CostTables(Request(gpt2, node, JOB, profile=profile(measurement())))
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
    plain = CostTables(Request(gpt2, node, JOB))
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(measurement())))
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
    plain, tables = (
        CostTables(Request(gpt2, node, JOB)),
        CostTables(Request(gpt2, node, JOB, profile=profile(*layers))),
    )
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
    plain = CostTables(Request(gpt2, node, JOB))
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(measurement(**other))))
    layout = Layout(micro_batch=2, micro_batches=32)

    assert figures(tables, layout) == figures(plain, layout)


def test_measured_seconds_of_several_ranks_include_their_communication(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    shared = measurement(tensor=2, sequence_parallel=True)
    tables = CostTables(Request(gpt2, node, JOB, profile=profile(shared)))

    found = figures(tables, Layout(tensor=2, micro_batch=2, micro_batches=32))

    assert found.forward_tensor_s > 0
    assert found.forward_s + found.forward_tensor_s == pytest.approx(0.010)


def test_the_arithmetic_is_asked_for_the_measured_setting() -> None:
    asked = []

    def computed(setting: Setting, recompute: str):  # type: ignore[no-untyped-def]
        asked.append((setting.micro_batch, setting.seq_len, recompute))
        raise StopIteration

    with pytest.raises(StopIteration):
        calibrated_figures([], "block", Setting(micro_batch=3, seq_len=7), "full", computed)
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


def test_what_neighbours_measured_takes_longer_where_their_group_crosses_nodes(
    gpt2: ModelGraph,
) -> None:
    cluster = resolve_cluster("2x2xh100-sxm-80gb")
    own = measurement(tensor=2, sequence_parallel=True)
    known = LayerFigures(gpt2, cluster, profile(own), rates(cluster, JOB, None))
    plain = LayerFigures(gpt2, cluster, None, rates(cluster, JOB, None))
    setting = Setting(micro_batch=2, seq_len=512, tensor=2)

    def of(which: LayerFigures, order: tuple[str, ...]):  # type: ignore[no-untyped-def]
        layout = Layout(tensor=2, data_replicate=2, micro_batch=2, order=order)
        return which.figures_of(setting, layout)["block"][0]

    inside, across = (of(known, order) for order in (INSIDE_OUT, ACROSS))

    assert inside.whole_forward_s == pytest.approx(0.010)
    assert inside.provenance == "measured"
    longer_s = of(plain, ACROSS).forward_tensor_s - of(plain, INSIDE_OUT).forward_tensor_s
    assert longer_s > 0
    assert across.forward_tensor_s == pytest.approx(inside.forward_tensor_s + longer_s)
    assert across.forward_s == inside.forward_s
    assert across.provenance == "fitted"


SWAPPED = {"tensor": "data_replicate", "data_replicate": "tensor"}
ACROSS = tuple(SWAPPED.get(axis, axis) for axis in INSIDE_OUT)


def figures_by_arithmetic(model: ModelGraph, at: Setting):  # type: ignore[no-untyped-def]
    cluster = resolve_cluster("8xh100-sxm-80gb")
    job = Job(seq_len=at.seq_len, global_batch=64)
    layout = Layout(context=at.context, micro_batch=at.micro_batch)
    known = LayerFigures(model, cluster, None, rates(cluster, job, None))
    return known.figures_of(at, layout)["block"][0]


def test_what_is_computed_again_is_taken_from_its_own_measurement(gpt2: ModelGraph) -> None:
    measured = measurement(recompute="full", backward_s=0.030, recompute_s=0.009)

    found = calibrated_figures(
        [measured],
        "block",
        Setting(micro_batch=2, seq_len=512),
        "full",
        lambda at, recompute: figures_by_arithmetic(gpt2, at),
    )

    assert found.recompute_s == pytest.approx(0.009)
    assert found.backward_s == pytest.approx(0.021)


def stage(**changes: object) -> StageMeasurement:
    figures = {
        "layers": ("block.0", "block.1", "block.2"),
        "micro_batch": 2,
        "seq_len": 512,
        "precision": "bf16",
        "recompute": "none",
        "forward_s": 0.033,
        "backward_s": 0.054,
        "resident_bytes": 0,
        "stored_bytes": 0,
        "forward_transient_bytes": 0,
        "backward_transient_bytes": 0,
        "spread": 0.05,
        "samples": 10,
    }
    return StageMeasurement(**{**figures, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1.1, 0.9)),
        ({"spread": 0.5}, (1.0, 1.0)),  # says nothing
        ({"tensor": 2}, (1.0, 1.0)),  # layers divided otherwise
        ({"layers": ("embedding", "block.0")}, (1.0, 1.0)),  # the embedding alone is not known
        ({"micro_batch": 4}, (1.0, 1.0)),  # nor blocks of four samples
    ],
)
def test_a_whole_stage_corrects_the_sum_of_its_layers(
    changes: dict[str, object], expected: tuple[float, float]
) -> None:
    measured = profile(measurement()).model_copy(update={"stages": (stage(**changes),)})
    kinds = {"embedding": "embedding"} | {f"block.{i}": "block" for i in range(12)}

    found = stage_factors(measured, kinds, Setting(micro_batch=2, seq_len=512), "none")

    assert found == pytest.approx(expected)


def test_layers_of_a_measured_stage_take_what_the_stage_takes(
    gpt2: ModelGraph, node: ClusterSpec
) -> None:
    alone = profile(measurement())
    whole = alone.model_copy(update={"stages": (stage(),)})
    layout = Layout(pipeline=1, data_replicate=8, micro_batch=2, micro_batches=4)

    before = figures(CostTables(Request(gpt2, node, JOB, profile=alone)), layout)
    after = figures(CostTables(Request(gpt2, node, JOB, profile=whole)), layout)

    assert after.forward_s == pytest.approx(1.1 * before.forward_s)
    assert after.backward_s == pytest.approx(0.9 * before.backward_s)


# --- what is compiled, and losses in chunks -----------------------------------------------------


def of_blocks(*layers: LayerMeasurement, **setting: object) -> tuple[float, float]:
    model = resolve_model("gpt2")
    request = Request(model, resolve_cluster("8xh100-sxm-80gb"), JOB, profile=profile(*layers))
    layout = Layout(micro_batch=2, micro_batches=32, **setting)  # type: ignore[arg-type]
    block = CostTables(request, recomputes=("none",)).parts("block", layout, linked=True)[0]
    return block.figures.forward_s, block.figures.stored_bytes


def test_a_compiled_block_is_what_was_measured_of_one() -> None:
    eager = measurement(forward_s=0.010, stored_bytes=1000)
    compiled = measurement(forward_s=0.007, stored_bytes=800, compiled=True)

    assert of_blocks(eager, compiled) == (0.010, 1000.0)
    assert of_blocks(eager, compiled, compile="block") == (0.007, 800.0)
    assert of_blocks(compiled)[0] != 0.007


def test_a_loss_in_chunks_does_not_hold_the_logits_that_were_measured() -> None:
    model = resolve_model("gpt2")

    def held(loss: ChunkedLoss | None, *layers: LayerMeasurement) -> float:
        cluster = resolve_cluster("8xh100-sxm-80gb")
        request = Request(model, cluster, JOB, profile=profile(*layers) if layers else None)
        layout = Layout(micro_batch=8, micro_batches=8, loss=loss)
        [head] = CostTables(request, recomputes=("none",)).parts("head", layout, linked=True)
        return head.figures.forward_transient_bytes

    chunks = ChunkedLoss(rows=64)
    all_logits = measurement(
        kind="head", micro_batch=8, forward_transient_bytes=int(2 * held(None))
    )

    assert held(None, all_logits) == pytest.approx(2 * held(None))
    assert held(chunks, all_logits) == pytest.approx(2 * held(chunks), rel=1e-6)
    # A head that was measured in chunks is taken as it is, and scales others in chunks.
    apart = measurement(
        kind="head", micro_batch=8, forward_transient_bytes=4321, loss=chunks, recompute="none"
    )
    assert held(chunks, all_logits, apart) == 4321
    assert held(None, all_logits, apart) == pytest.approx(2 * held(None))
    other = ChunkedLoss(rows=128)
    assert held(other, apart) == pytest.approx(4321 * held(other) / held(chunks), rel=1e-6)
