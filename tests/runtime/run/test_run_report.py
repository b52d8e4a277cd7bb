"""A report's figures are worked out by hand for a run of two stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.documents.events import Expected, StepRecord
from meshwright.planner.documents.plan import (
    Mesh,
    OtherPipelines,
    PlacedLayer,
    Plan,
    PlannedModel,
    Stage,
)
from meshwright.planner.documents.prediction import Prediction, StagePrediction
from meshwright.planner.whatif.pricing.survival import RunSeconds
from meshwright.render.text import goodput_parts
from meshwright.runtime.run.run_folder import RankOrders, RankRecord
from meshwright.runtime.run.run_report import RunReport, comparison, expected_text, summarise

PLAN = Plan(
    model=PlannedModel(name="toy", source="toy", digest="sha256:0"),
    cluster="local",
    seq_len=10,
    global_batch=4,
    precision="fp32",
    mesh=Mesh(pipeline=2),
    zero=0,
    schedule="1f1b",
    micro_batch=2,
    micro_batches=2,
    stages=(Stage(layers=(PlacedLayer(layer="a"),)), Stage(layers=(PlacedLayer(layer="b"),))),
)
ORDERS = RankOrders(
    token="r", output=Path("out"), corpus=Path("corpus"), device="cpu", steps=16, started_unix_s=0.0
)


def rank(number: int, step_s: list[float], peak: int, untimed: tuple[int, ...] = ()) -> RankRecord:
    return RankRecord(
        rank=number,
        stage=number,
        first_step=11,
        step_s=tuple(step_s),
        untimed_steps=untimed,
        peak_memory_bytes=peak,
        memory_source="live tensors of one step",
    )


def report(*ranks: RankRecord) -> RunReport:
    steps = [
        StepRecord(step=step, loss=float(step), grad_norm=1.0, step_s=1.0, tokens_per_s=1, epoch=0)
        for step in range(9, 17)
    ]
    cost = RunSeconds(wall_s=20.0, trained_s=8.0, steps_lost=3)
    files = ("metrics", "logs")
    return summarise(PLAN, ORDERS, ranks=ranks, steps=steps, wall_s=20.0, files=files, cost=cost)


def test_a_step_takes_as_long_as_its_slowest_rank_once_warm() -> None:
    run = report(
        rank(0, [9.0, 9.0, 1.0, 5.0, 2.0, 3.0], 700),
        rank(1, [9.0, 9.0, 2.0, 5.0, 1.0, 4.0], 900, untimed=(14,)),
    )

    assert run.step_s == (9.0, 9.0, 2.0, 5.0, 2.0, 4.0)
    assert (run.timed_steps, run.step_time_s) == (3, 2.0)
    assert run.step_time_spread == pytest.approx((3.0 - 2.0) / 2.0)
    assert run.tokens_per_s == pytest.approx(4 * 10 / 2.0)
    assert [stage.peak_memory_bytes for stage in run.stages] == [700, 900]


def test_stages_of_all_kinds_of_pipelines_are_reported_in_order() -> None:
    stages = (Stage(layers=tuple(PlacedLayer(layer=name) for name in "ab")),)
    others = (OtherPipelines(data=2, micro_batches=1, stages=stages),)
    plan = Plan(**{**dict(PLAN), "global_batch": 8, "other_pipelines": others})
    ranks = [
        rank(number, [1.0], peak).model_copy(update={"stage": plan.pipeline_rank(number)})
        for number, peak in enumerate((700, 900, 1500, 1600))
    ]
    cost, files = RunSeconds(wall_s=2.0, trained_s=1.0, steps_lost=0), ("metrics", "logs")

    run = summarise(plan, ORDERS, ranks=ranks, steps=[], wall_s=2.0, files=files, cost=cost)

    assert [stage.peak_memory_bytes for stage in run.stages] == [700, 900, 1600]


def test_a_report_says_what_share_of_the_clock_trained_what_counts() -> None:
    run = report(rank(0, [1.0] * 6, 1), rank(1, [1.0] * 6, 1))

    assert (run.goodput, run.steps_lost) == (0.4, 3)


def test_where_seconds_went_stands_beside_where_they_should_have_gone() -> None:
    cost = RunSeconds(wall_s=20.0, trained_s=8.0, blocked_s=2.0)
    told = Expected(
        at_unix_s=1.0,
        seconds={"steps": 9.0, "saves": 1.0},
        failures=0.5,
        goodput=0.9,
        goodput_low=0.8,
        goodput_high=0.95,
    )
    ranks = [rank(0, [1.0] * 6, 1), rank(1, [1.0] * 6, 1)]
    run = summarise(
        PLAN, ORDERS, ranks=ranks, steps=[], wall_s=20.0, files=("m", "l"), cost=cost, before=told
    )

    assert sum(run.seconds.values()) == 20.0
    assert run.expected == told
    assert RunReport.parse(run.dump()) == run
    assert expected_text(told) == ("90.0 % (80.0 to 95.0) of 10.0 s, with 0.5 failures: saves 10 %")
    assert run.goodput is not None
    said = [str(part) for part in goodput_parts(run.goodput, run.seconds, told)]
    assert said[0] == "goodput 40.0 %, predicted 90.0 % (80.0 to 95.0)"


def test_only_this_runs_losses_are_reported() -> None:
    run = report(rank(0, [1.0] * 6, 1), rank(1, [1.0] * 6, 1))

    assert run.losses == (11.0, 12.0, 13.0, 14.0, 15.0, 16.0)


def test_a_run_too_short_to_be_timed_says_nothing_of_time() -> None:
    run = report(rank(0, [1.0, 1.0], 700), rank(1, [1.0, 1.0], 900))

    assert (run.timed_steps, run.step_time_s, run.tokens_per_s) == (0, None, None)
    assert [row.quantity for row in comparison(run, prediction())] == [
        "stage 0 peak memory",
        "stage 1 peak memory",
    ]


def test_errors_are_relative_to_what_was_measured() -> None:
    run = report(rank(0, [1.0, 1.0, 2.0], 1000), rank(1, [1.0, 1.0, 1.0], 500))

    rows = {row.quantity: row for row in comparison(run, prediction())}

    assert rows["step time"].error == pytest.approx(0.5)
    assert rows["throughput"].error == pytest.approx(-1 / 3)
    assert rows["stage 0 peak memory"].error == pytest.approx(0.1)
    assert rows["stage 1 peak memory"].error == pytest.approx(-0.2)


def test_a_report_survives_its_file() -> None:
    run = report(rank(0, [1.0, 1.0, 2.0, 3.0], 1000), rank(1, [1.0, 1.0, 1.0, 1.0], 500))

    assert RunReport.parse(run.dump()) == run


def prediction() -> Prediction:
    stages = [
        StagePrediction(
            forward_s=1.0,
            backward_s=1.0,
            peak_memory_bytes=peak,
            memory_capacity_bytes=1e9,
            memory_parts={"all": peak},
        )
        for peak in (1100.0, 400.0)
    ]
    return Prediction(
        layout="x",
        step_time_s=3.0,
        step_time_low_s=3.0,
        step_time_high_s=3.0,
        step_parts={"all": 3.0},
        tokens_per_s=4 * 10 / 3.0,
        mfu=0.1,
        fits=True,
        stages=tuple(stages),
    )
