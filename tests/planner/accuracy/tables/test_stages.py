"""Rows become plans: what is predicted of a row is what `predict` has of its plan."""

from __future__ import annotations

import math

import pytest

from planner.accuracy.tables.predictions import plan_of, predicted
from planner.accuracy.tables.rows import setup_of
from planner.accuracy.tables.stages import linked, placements
from planner.catalog import stacks
from planner.costs.predict import predict
from planner.costs.uncertainty import ASSUMED_SPREAD, EIGHT_BITS_GAIN
from planner.documents.plan import Plan
from planner.documents.prediction import Prediction
from planner.errors import DocumentError
from planner.requests.setup import Setup
from tests.planner.accuracy.tables.test_laws import row

ROW = {
    "id": "made-up",
    "source": "made_up",
    "layers": "32",
    "hidden_size": "4096",
    "ffn_size": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "head_dim": "128",
    "vocab_size": "128256",
    "gated_mlp": "1",
    "seq_len": "4096",
    "accelerator": "h100-sxm-80gb",
    "devices_per_node": "8",
    "n_devices": "32",
    "micro_batch_size": "1",
    "global_batch_size": "128",
    "recompute": "none",
    "precision": "bf16",
}
LAYOUTS = (
    {},
    {"tp": "4", "pp": "2", "recompute": "full"},
    {"tp": "2", "micro_batch_size": "2", "recompute": "selective"},
    {"pp": "4", "recompute": "partial", "sequence_parallel": "0", "tp": "2"},
    {"cp": "2", "zero_stage": "3"},
    {"tp": "4", "pp": "4", "vpp": "2", "sequence_parallel": "1"},
)
FRAMEWORKS = [name for name in stacks() if name != "native"]


def setup(**cells: str) -> Setup:
    found = setup_of(ROW | cells)
    assert isinstance(found, Setup), found
    return found


def check_range(of_row: Prediction, of_plan: Prediction, run: Setup) -> None:
    """A row that leaves something open is as much less sure; its plan leaves nothing open."""
    more = less = ASSUMED_SPREAD if run.assumed or run.recompute is None else 0.0
    eight_bits = "fp8" in run.request.cluster.groups[0].accelerator.peak_flops
    if eight_bits and "precision bf16" in run.assumed:
        less += EIGHT_BITS_GAIN
    high_s, low_s = math.exp(more) * of_plan.step_time_high_s, of_plan.step_time_low_s
    assert high_s == pytest.approx(of_row.step_time_high_s, rel=1e-9)
    assert math.exp(-less) * low_s == pytest.approx(of_row.step_time_low_s, rel=1e-9)


@pytest.mark.spread(20)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("cells", LAYOUTS, ids=str)
def test_a_row_is_predicted_as_its_plan_is(framework: str, cells: dict[str, str]) -> None:
    run = setup(framework=framework, **cells)

    plan = Plan.parse(plan_of(run).dump())

    found = predicted(run)
    again = predict(plan, run.request.model, run.request.cluster)
    assert plan.backend == run.request.stack.name
    assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
    assert again.step_parts == pytest.approx(found.step_parts, rel=1e-9)
    check_range(found, again, run)
    for one, other in zip(again.stages, found.stages, strict=True):
        assert one.memory_parts == pytest.approx(other.memory_parts, rel=1e-9)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 300), marks=pytest.mark.matrix)]
)
@pytest.mark.matrix
def test_random_rows_are_predicted_as_their_plans_are(seeds: range) -> None:
    said = named = 0
    for seed in seeds:
        run = setup_of(row(seed))
        assert isinstance(run, Setup)
        try:
            plan = plan_of(run)
        except ValueError:  # stages without layers, batches that do not divide
            continue
        named += "+" in plan.backend
        said += 1
        found = predicted(run)
        again = predict(plan, run.request.model, linked(run).request.cluster)
        assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
        assert [stage.peak_memory_bytes for stage in again.stages] == pytest.approx(
            [stage.peak_memory_bytes for stage in found.stages], rel=1e-9
        )
        check_range(found, again, run)
    assert said > 15
    assert named > 5


def recomputed(run: Setup) -> list[list[str]]:
    return [[choice for _, choice, _ in stage] for stage in placements(run, run.layout)]


def test_blocks_recompute_and_ends_do_not() -> None:
    first, last = recomputed(setup(framework="megatron", pp="2", vpp="1", recompute="full"))

    assert first == ["none", *["full"] * 16]
    assert last == [*["full"] * 16, "none"]


def test_half_of_a_model_is_every_second_block() -> None:
    [half] = recomputed(setup(framework="megatron", recompute="partial", layers="4"))

    assert half == ["none", "full", "none", "full", "none", "none"]


def test_attention_that_stores_no_scores_recomputes_nothing() -> None:
    fused = recomputed(setup(framework="megatron", recompute="selective", layers="2"))
    written = recomputed(
        setup(framework="megatron", recompute="selective", layers="2", flash_attention="0")
    )

    assert fused == [["none"] * 4]
    assert written == [["none", "selective", "selective", "none"]]


def test_blocks_that_do_not_divide_go_to_the_first_stages() -> None:
    sizes = [len(stage) for stage in recomputed(setup(framework="megatron", layers="6", pp="4"))]

    assert sizes == [3, 2, 1, 2]  # embedding and head on the first and the last


def test_interleaved_stages_refuse_micro_batches_that_are_no_whole_rounds() -> None:
    run = setup(framework="megatron", pp="4", vpp="2", global_batch_size="40")
    unsaid = setup(framework="megatron", pp="4", global_batch_size="40")

    with pytest.raises(DocumentError, match="is 5; interleaved needs a multiple of its 4 ranks"):
        predicted(run)
    assert unsaid.layout.virtual_stages == 1
    assert setup(framework="megatron", pp="4", global_batch_size="64").layout.virtual_stages > 1


def test_stages_of_one_rank_share_the_hosts_seconds_of_a_micro_batch() -> None:
    cells = {"pp": "4", "tp": "1", "dp": "2", "n_devices": "8", "global_batch_size": "16"}
    run = setup(framework="megatron", vpp="4", **cells)
    host = stacks()["megatron"].host

    fixed_s = predicted(run).step_parts["fixed"]

    assert host.action_of == "rank"
    assert fixed_s == pytest.approx(host.step_s + 8 * 2 * host.action_s)
