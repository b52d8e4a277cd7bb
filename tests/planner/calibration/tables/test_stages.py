"""Rows become plans: what is predicted of a row is what `predict` has of its plan."""

from __future__ import annotations

import math

import pytest

from meshwright.planner.calibration.tables.predictions import (
    placements,
    plan_of,
    predict_run,
    with_links,
)
from meshwright.planner.calibration.tables.rows import setup_of
from meshwright.planner.costs.predict import predict
from meshwright.planner.costs.uncertainty import ABOVE, BELOW, EIGHT_BITS_GAIN
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.requests.setup import Setup
from tests.planner.calibration.tables.test_laws import row

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


def setup(**cells: str) -> Setup:
    found = setup_of(ROW | cells)
    assert isinstance(found, Setup), found
    return found


def check_range(of_row: Prediction, of_plan: Prediction, run: Setup) -> None:
    """A row that leaves something open is as much less sure; its plan leaves nothing open."""
    is_open = bool(run.assumed) or run.recompute is None
    more, less = is_open * ABOVE.doubt, is_open * BELOW.doubt
    eight_bits = "fp8" in run.request.cluster.groups[0].accelerator.peak_flops
    if eight_bits and "precision bf16" in run.assumed:
        less += EIGHT_BITS_GAIN
    high_s, low_s = math.exp(more) * of_plan.step_time_high_s, of_plan.step_time_low_s
    assert high_s == pytest.approx(of_row.step_time_high_s, rel=1e-9)
    assert math.exp(-less) * low_s == pytest.approx(of_row.step_time_low_s, rel=1e-9)


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
        named += "+" in plan.framework
        said += 1
        found = predict_run(run)
        again = predict(plan, run.request.model, with_links(run).request.cluster)
        assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
        assert [stage.peak_memory_bytes for stage in again.stages] == pytest.approx(
            [stage.peak_memory_bytes for stage in found.stages], rel=1e-9
        )
        check_range(found, again, run)
    assert said > 15
    assert named > 5


def recomputed(run: Setup) -> list[list[str]]:
    return [[choice for _, choice, _ in stage] for stage in placements(run, run.layout)]


def test_half_of_a_model_is_every_second_block() -> None:
    [half] = recomputed(setup(framework="megatron", recompute="partial", layers="4"))

    assert half == ["none", "full", "none", "full", "none", "none"]


def test_blocks_that_do_not_divide_go_to_the_first_stages() -> None:
    sizes = [len(stage) for stage in recomputed(setup(framework="megatron", layers="6", pp="4"))]

    assert sizes == [3, 2, 1, 2]  # embedding and head on the first and the last
