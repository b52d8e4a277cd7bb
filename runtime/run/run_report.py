"""RunReport: what a run did and measured, and how that compares with its prediction."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.events import Expected, StepRecord
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import (
    Amount,
    Count,
    Positive,
    Proportion,
    Text,
    seconds_text,
)
from meshwright.planner.whatif.pricing.survival import RunSeconds
from meshwright.runtime.run.run_folder import Device, RankOrders, RankRecord, Stopped

LEAST_SHARE = 5e-4
"""Least share of a run's time that is mentioned."""
FEW_FAILURES = 0.01
"""Fewer are not counted out."""
WARM_UP_STEPS = 2
"""Allocations, connections and first kernels make the first step slow and disturb the second."""


class StagePeak(Part):
    """One pipeline stage: the largest peak of its ranks."""

    peak_memory_bytes: Count | None = None
    memory_source: Text
    reserved_memory_bytes: Count | None = None
    device_memory_bytes: Count | None = None
    """Beside the peak of tensors: what ends a run for lack of memory is all of it."""


class Evaluation(Part):
    """The loss on held-out text after a step."""

    step: Positive
    loss: float


class RunReport(Document):
    """Results and measurements of a run; times are per step, the slowest rank's clock."""

    kind_of_document: ClassVar[str] = "run's report"

    model: Text
    plan_digest: Text
    layout: Text
    device: Device
    ranks: Positive
    first_step: Positive
    steps: Count
    """Done in this run."""
    stopped: Stopped
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    evaluations: tuple[Evaluation, ...] = ()
    step_s: tuple[Amount, ...]
    """Every step of the run  [step]."""
    timed_steps: Count
    """Steps that the median is of: without warm-up and steps slowed by a measurement."""
    step_time_s: Amount | None = None
    """The median; none where the run was too short to have one."""
    step_time_spread: Amount | None = None
    """Interquartile range over median."""
    tokens_per_s: Amount | None = None
    mfu: Amount | None = None
    compile_s: Amount = 0.0
    """Seconds of the rank that compiled longest."""
    not_compiled: dict[Text, Text] = Field(default_factory=dict)
    """Why layers ran eager that the plan compiles, by name."""
    captured: Count = 0
    """Micro-batches of a rank that ran as a captured graph, the fewest."""
    not_captured: Text | None = None
    """Why micro-batches ran as they are that the plan captures."""
    stages: tuple[StagePeak, ...]
    wall_s: Amount
    """From the launch to the end of the last rank."""
    output: Text
    metrics: Text
    logs: Text
    checkpoint: Text | None = None
    goodput: Proportion | None = None
    """Seconds of steps that count over those of the wall clock, over all attempts of this run."""
    steps_lost: Count = 0
    """Steps lost in all its attempts."""
    seconds: dict[Text, Amount] = Field(default_factory=dict)
    """Seconds of the wall clock of all attempts, by what was done in them."""
    expected: Expected | None = None
    """The same and the goodput, as predicted before the first attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity, predicted and measured, in the SI unit that `unit` names."""

    quantity: str
    unit: Literal["s", "tokens/s", "samples/s", "bytes"]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return (predicted - measured) / measured: negative where the prediction was too low."""
        return (self.predicted - self.measured) / self.measured


def comparison(report: RunReport, prediction: Prediction) -> list[Comparison]:
    """Return what was both predicted and measured: step time, tokens per second, stage peaks."""
    rows = []
    if report.step_time_s and report.tokens_per_s:
        rows.append(
            Comparison(
                quantity="step time",
                unit="s",
                predicted=prediction.step_time_s,
                measured=report.step_time_s,
            )
        )
        rows.append(
            Comparison(
                quantity="throughput",
                unit="tokens/s" if prediction.samples_per_s is None else "samples/s",
                predicted=prediction.throughput[0],
                measured=report.tokens_per_s,
            )
        )
    for index, (predicted, measured) in enumerate(
        zip(prediction.stages, report.stages, strict=True)
    ):
        if measured.peak_memory_bytes:
            rows.append(
                Comparison(
                    quantity=f"stage {index} peak memory",
                    unit="bytes",
                    predicted=predicted.peak_memory_bytes,
                    measured=measured.peak_memory_bytes,
                )
            )
    return rows


def failures_text(count: float) -> str:
    """Return in words how many failures are expected.

    >>> failures_text(2.5), failures_text(4e-7)
    ('2.5 failures', 'hardly any failure')
    """
    return f"{count:.2g} failures" if count >= FEW_FAILURES else "hardly any failure"


def expected_text(expected: Expected) -> str:
    """Return in words what was predicted of a run before it."""
    wall_s = sum(expected.seconds.values())
    if not wall_s:
        return f"0 %: with {expected.failures:.2g} failures it loses more than it trains"
    shares = ", ".join(
        f"{name} {100 * seconds / wall_s:.2g} %"
        for name, seconds in expected.seconds.items()
        if name != "steps" and seconds >= LEAST_SHARE * wall_s
    )
    between = f"{100 * expected.goodput_low:.1f} to {100 * expected.goodput_high:.1f}"
    return (
        f"{100 * expected.goodput:.1f} % ({between}) of {seconds_text(wall_s)}, with "
        f"{failures_text(expected.failures)}{': ' if shares else ''}{shares}"
    )


def summarise(
    plan: Plan,
    orders: RankOrders,
    *,
    ranks: Sequence[RankRecord],
    steps: Sequence[StepRecord],
    wall_s: float,
    files: tuple[str, str],
    cost: RunSeconds,
    before: Expected | None = None,
) -> RunReport:
    """Put the ranks' records together; `files` are where metrics and logs lie.

    `cost` is where the seconds of all attempts of the run went, and `before` what was predicted.
    """
    first = ranks[0].first_step
    slowest_s = [max(times) for times in zip(*(rank.step_s for rank in ranks), strict=True)]
    untimed = {step for rank in ranks for step in rank.untimed_steps}
    timed_s = [
        seconds
        for step, seconds in enumerate(slowest_s, start=first)
        if step >= first + WARM_UP_STEPS and step not in untimed
    ]
    median = statistics.median(timed_s) if timed_s else None
    done = [record for record in steps if record.step >= first]
    return RunReport(
        model=plan.model.name,
        plan_digest=plan.digest,
        layout=plan.layout_text,
        device=orders.device,
        ranks=len(ranks),
        first_step=first,
        steps=len(slowest_s),
        stopped=ranks[0].stopped,
        losses=tuple(record.loss for record in done),
        grad_norms=tuple(record.grad_norm for record in done),
        evaluations=tuple(
            Evaluation(step=record.step, loss=record.eval_loss)
            for record in done
            if record.eval_loss is not None
        ),
        step_s=tuple(slowest_s),
        timed_steps=len(timed_s),
        step_time_s=median,
        step_time_spread=spread(timed_s),
        tokens_per_s=plan.global_batch * plan.seq_len / median if median else None,
        mfu=orders.peak_step_s / median if median and orders.peak_step_s else None,
        compile_s=max(rank.compile_s for rank in ranks),
        not_compiled={name: why for rank in ranks for name, why in rank.not_compiled.items()},
        captured=min(rank.captured for rank in ranks),
        not_captured=next(filter(None, (rank.not_captured for rank in ranks)), None),
        stages=tuple(_stage(pipeline_rank, ranks) for pipeline_rank in plan.pipeline_ranks),
        wall_s=wall_s,
        output=str(orders.output),
        metrics=files[0],
        logs=files[1],
        checkpoint=ranks[0].checkpoint,
        goodput=cost.goodput if cost.trained_s else None,
        steps_lost=cost.steps_lost,
        seconds=cost.parts_s if cost.trained_s else {},
        expected=before,
    )


def spread(values: Sequence[float]) -> float | None:
    """Return the interquartile range over the median; None for fewer than two values.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.6666666666666666
    """
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def _stage(pipeline_rank: int, ranks: Sequence[RankRecord]) -> StagePeak:
    stage_ranks = [rank for rank in ranks if rank.stage == pipeline_rank]

    def largest(of_rank: Callable[[RankRecord], int | None]) -> int | None:
        return max(
            (value for rank in stage_ranks if (value := of_rank(rank)) is not None), default=None
        )

    return StagePeak(
        peak_memory_bytes=largest(lambda rank: rank.peak_memory_bytes),
        memory_source=stage_ranks[0].memory_source if stage_ranks else "no rank",
        reserved_memory_bytes=largest(lambda rank: rank.reserved_memory_bytes),
        device_memory_bytes=largest(lambda rank: rank.device_memory_bytes),
    )
