"""Ranges are those of a framework's own runs among them, and of sources left out elsewhere."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from meshwright.planner.calibration.tables.predictions import framework_prediction, predict_run
from meshwright.planner.calibration.tables.rows import setup_of
from meshwright.planner.catalog import accelerators, frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.costs.slowdown import slower_framework
from meshwright.planner.costs.uncertainty import (
    ABOVE,
    BELOW,
    EIGHT_BITS_GAIN,
    MEMORY_ABOVE,
    NATURAL_ABOVE,
    NATURAL_BELOW,
    fit_probability,
    memory_range,
    outside_of,
    room_share,
    step_range,
    waiting_share,
)
from meshwright.planner.documents.framework import Framework
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup
from meshwright.planner.search.search import search

ROW = {
    "id": "x",
    "source": "made_up",
    "layers": "32",
    "hidden_size": "4096",
    "ffn_size": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "vocab_size": "128256",
    "seq_len": "4096",
    "accelerator": "h100-sxm-80gb",
    "n_devices": "64",
    "tp": "2",
    "micro_batch_size": "1",
    "global_batch_size": "256",
    "recompute": "none",
    "precision": "bf16",
    "framework": "nanotron",
}


def setup(**cells: str) -> Setup:
    found = setup_of(ROW | cells)
    assert isinstance(found, Setup)
    return found


def widths(found: Prediction) -> tuple[float, float]:
    step_s = found.step_time_s
    return (
        math.log(step_s / found.step_time_low_s),
        math.log(found.step_time_high_s / step_s),
    )


def outside(run: Setup) -> tuple[str, ...]:
    return outside_of(run.request, run.layout)


def known(found: Prediction, doubts: int = 0) -> tuple[float, float]:
    """Return the widths of a run of a dense model, of which some things are new or not known."""
    waiting = ABOVE.waiting * waiting_share(found.step_parts)
    return BELOW.least + doubts * BELOW.doubt, ABOVE.least + doubts * ABOVE.doubt + waiting


def test_runs_of_a_framework_make_no_range_narrower_and_what_none_had_a_wider_one() -> None:
    run, new = setup(), setup(accelerator="b200")
    found, wider, other = (predict_run(each) for each in (run, new, setup(framework="mystery")))

    assert outside(run) == () and outside(new) == ("b200",)
    assert widths(found) == pytest.approx(known(found))
    assert widths(wider) == pytest.approx(known(wider, doubts=1))
    assert widths(other) == pytest.approx(known(other, doubts=3))  # it is noted as assumed too
    what = "range of the step: that of left-out runs of its class, dense"
    assert found.assumptions[0].what == what


def test_tensor_groups_over_nodes_are_known_least() -> None:
    one, spanning = (predict_run(setup(tp=tensor)) for tensor in ("8", "16"))

    assert widths(one) == pytest.approx(known(one))
    assert widths(spanning)[1] == pytest.approx(known(spanning)[1] + ABOVE.spanning)


def test_what_is_left_open_widens_a_range_by_its_share() -> None:
    told, open_one = (predict_run(setup(global_batch_size=said)) for said in ("32", ""))

    assert open_one.step_time_s == told.step_time_s
    assert widths(open_one) == pytest.approx(known(told, doubts=1))


@pytest.mark.parametrize(
    ("accelerator", "gain"), [("h100-sxm-80gb", EIGHT_BITS_GAIN), ("a100-sxm-80gb", 0.0)]
)
def test_a_run_that_may_have_been_in_eight_bits_may_be_faster_by_what_they_save(
    accelerator: str, gain: float
) -> None:
    told, open_one = (
        predict_run(setup(precision=said, accelerator=accelerator, inter_gb_per_s_per_device="25"))
        for said in ("bf16", "")
    )

    assert open_one.step_time_s == told.step_time_s
    below, above = widths(told)
    assert widths(open_one) == pytest.approx((below + gain + BELOW.doubt, above + ABOVE.doubt))


@pytest.mark.parametrize(
    ("cells", "least"),
    [
        ({}, (0.0, 0.0)),
        ({"ep": "8", "options": "balanced-routing"}, (0.0, 0.0)),
        ({"ep": "8", "options": "te"}, (NATURAL_BELOW, NATURAL_ABOVE)),
        ({"zero_stage": "3", "tp": "1"}, (NATURAL_BELOW, NATURAL_ABOVE)),
    ],
)
def test_experts_are_as_uneven_as_the_data_makes_them(
    cells: dict[str, str], least: tuple[float, float]
) -> None:
    mixture = {"framework": "megatron", "n_experts": "8", "experts_per_token": "2"}
    found = predict_run(setup(**mixture, **cells))

    below, above = known(found)
    assert widths(found) == pytest.approx(
        (max(least[0], below + BELOW.experts), max(least[1], above + ABOVE.experts))
    )


def test_a_measured_machine_misses_by_its_causes_alone() -> None:
    run = setup(framework="mystery", n_experts="8", experts_per_token="2")
    parts = {"forward": 6.0, "data communication": 4.0}

    low_s, high_s, basis = step_range(run.request, run.layout, parts, 0.2, measured=True)

    assert (low_s, high_s) == pytest.approx((10 - 1.2 - 0.6, 10 + 1.2 + 0.6))
    assert basis is None


def test_a_layout_of_another_framework_has_the_range_of_the_same_row() -> None:
    run = setup(tp="2", pp="2")

    assert widths(framework_prediction(run.request, run.layout)) == pytest.approx(
        widths(predict_run(run))
    )


def test_what_was_measured_names_frameworks_and_accelerators_that_exist() -> None:
    seen = [
        framework.accuracy.seen for framework in frameworks().values() if framework.accuracy.seen
    ]

    assert set().union(*(one.accelerators for one in seen)) <= accelerators().keys()


@pytest.mark.parametrize("needed_bytes", [50e9, 70e9, 79e9, 80e9, 95e9])
def test_the_probability_of_fitting_is_the_share_of_draws_that_fit(needed_bytes: float) -> None:
    rng = random.Random(0)
    draws = [needed_bytes * math.exp(rng.gauss(0.0, 0.15)) for _ in range(20_000)]

    stated = fit_probability(needed_bytes, 80e9, 0.15)

    assert stated == pytest.approx(sum(size <= 80e9 for size in draws) / len(draws), abs=0.015)


def test_a_measured_machine_is_surer_of_what_fits_and_of_what_does_not() -> None:
    for needed_bytes, surer in ((75e9, 1), (80e9, 0), (85e9, -1)):
        known, other = (fit_probability(needed_bytes, 80e9, spread) for spread in (0.03, 0.15))
        assert (known > other) - (known < other) == surer


def test_nothing_fits_no_room_and_nothing_needs_any() -> None:
    assert fit_probability(1.0, 0.0, 0.15) == 0.0
    assert fit_probability(0.0, 80e9, 0.15) == 1.0


@pytest.mark.parametrize("spread", [0.03, 0.08, 0.15])
@pytest.mark.parametrize("probability", [0.05, 0.5, 0.8, 0.95, 0.999])
def test_needs_that_fill_the_share_of_the_room_fit_with_that_probability(
    spread: float, probability: float
) -> None:
    needed_bytes = 80e9 * room_share(probability, spread)

    assert fit_probability(needed_bytes, 80e9, spread) == pytest.approx(probability)


@pytest.mark.matrix
def test_surer_plans_are_no_faster() -> None:
    steps_s = [
        search(
            Request.create(
                resolve_model("llama-3.1-8b"),
                resolve_cluster("8xh100-sxm-80gb"),
                pins=Pins(tensor=1),
                framework="megatron",
                fit_probability=probability,
            )
        ).closed_form.objective_s
        for probability in (0.5, 0.95, 0.999)
    ]

    assert steps_s == sorted(steps_s)
    assert steps_s[0] < steps_s[-1]


@pytest.mark.parametrize("probability", [-1.0, 0.0, 1.0, 1.5, math.nan])
def test_a_probability_is_asked_for_between_never_and_always(probability: float) -> None:
    with pytest.raises(DocumentError, match=r"fit-probability: is .*between 0 and 1"):
        Request.create(
            resolve_model("gpt2-small"),
            resolve_cluster("8xh100-sxm-80gb"),
            fit_probability=probability,
        )


def test_small_peaks_are_less_sure_and_large_ones_no_less_than_their_framework_says() -> None:
    wide = [memory_range(peak, 0.08)[1] / peak for peak in (1e9, 4e9, 16e9, 64e9)]

    assert wide == sorted(wide, reverse=True)
    assert wide[0] > 1.5 and wide[-1] == pytest.approx(math.exp(MEMORY_ABOVE * 0.08), rel=1e-3)
    assert memory_range(0.0, 0.08) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "seq_len", "layout", "waits"),
    [
        ("gpt2", 256, Layout(micro_batch=1, micro_batches=4), True),
        ("llama-3.2-1b", 1024, Layout(micro_batch=1, micro_batches=1), True),
        (
            "llama-3.2-1b",
            512,
            Layout(pipeline=2, schedule="1f1b", data_shard=2, zero=1, micro_batches=4),
            True,
        ),
        ("llama-3.2-3b", 8192, Layout(micro_batch=4, micro_batches=1), False),
    ],
)
def test_a_range_reaches_to_the_step_of_the_slowest_host(
    model: str, seq_len: int, layout: Layout, waits: bool
) -> None:
    request = Request.create(
        resolve_model(model),
        resolve_cluster(f"{layout.devices}xh200-sxm"),
        seq_len=seq_len,
        global_batch=layout.data * layout.micro_batch * layout.micro_batches,
    )
    sure = with_host(request.framework, slowest=1.0)
    slow = slower_framework(sure, request.framework.host.slowest)
    # What an action of a pipeline takes is in the share of a range that waits.
    slow = with_host(slow, action_s=sure.host.action_s)

    found, alone, slowed = (
        layout_prediction(replace(request, framework=framework), layout)
        for framework in (request.framework, sure, slow)
    )

    assert found.step_time_s == alone.step_time_s
    assert found.step_time_high_s >= slowed.step_time_s
    assert (slowed.step_time_s > 1.2 * found.step_time_s) == waits
    assert (found.step_time_high_s > 1.2 * alone.step_time_high_s) == waits


def with_host(framework: Framework, **changes: float) -> Framework:
    return framework.model_copy(update={"host": framework.host.model_copy(update=changes)})
