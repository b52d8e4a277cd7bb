"""Schedules executed with stages that sleep, against their simulation.

    PYTHONPATH=$PWD python benchmarks/schedule_truth.py [-o benchmarks/results]

Every schedule runs on 2, 4 and 8 ranks through the runtime's pipeline (engine/pipeline.py, sends
over gloo), with stages whose forward and backward sleep for known seconds: equal stages, and stages
that differ.  Sleeping needs no processor, so eight ranks run truly side by side on two cores.  The
simulator (planner/schedules/simulate.py) times the same orders.  One constant, the seconds that the
runtime takes for each action, is fitted on one row, 1F1B on 2 ranks with equal stages.
Writes schedule_truth.json and docs/results/schedules-executed.md.  A loaded machine wakes sleepers
late:
run it with `chrt -f 10` there.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.documents.document import write_text
from meshwright.planner.schedules import SCHEDULES, schedule
from meshwright.planner.schedules.simulate import timeline
from meshwright.profiler.start_ranks import result_of
from meshwright.runtime.engine.pipeline import Pipeline, StagePart
from meshwright.runtime.techniques.split_backward import WeightGradients

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "schedules-executed.md"
RANKS = (2, 4, 8)
DRAINED = tuple((name, one.stages_per_rank[0]) for name, one in SCHEDULES.items() if not one.stale)
"""With stages on each rank; a pipeline that never drains has no step of its own."""
WARM_UP, TIMED = 2, 5
FORWARD_S = 0.016
"""Of an equal stage, where a rank has one; its backward takes twice as long, half of it W."""
WIDTH = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on so many ranks; `unequal` stages take 0.6 to 1.4 of an equal one's seconds."""

    name: str
    virtual_stages: int
    ranks: int
    unequal: bool

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def micro_batches(self) -> int:
        """Enough for a steady state, and for each schedule's own rules."""
        return 2 * self.ranks

    @property
    def forward_s(self) -> list[float]:
        """Seconds of each stage's forward."""
        equal = FORWARD_S / self.virtual_stages
        shares = (1.4, 0.6, 1.0, 1.2, 0.8)
        return [
            equal * (shares[stage % len(shares)] if self.unequal else 1.0)
            for stage in range(self.stages)
        ]

    def orders(self) -> tuple[schedule.Order, ...]:
        return schedule.orders(
            self.name,
            stages=self.stages,
            micro_batches=self.micro_batches,
            virtual_stages=self.virtual_stages,
        )

    def predicted_s(self, action_s: float) -> float:
        """The simulated step, each action taking `action_s` beside its stage's seconds."""
        splits = schedule.splits_backward(self.name)
        forward = self.forward_s
        return timeline(
            self.orders(),
            forward_s=[f + action_s for f in forward],
            backward_s=[2 * f + (1 + splits) * action_s for f in forward],
            weight_s=[f + action_s for f in forward] if splits else None,
        ).makespan_s


def rows(ranks: int) -> list[Row]:
    return [
        Row(name, virtual, ranks, unequal)
        for unequal, (name, virtual) in itertools.product((False, True), DRAINED)
    ]


class SleepingStore(WeightGradients):
    """Weight gradients that take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def take_deferred(self) -> Callable[[], None]:
        make = super().taken()
        if not self.deferring:
            return make

        def slowly() -> None:
            time.sleep(self.seconds)
            make()

        return slowly


class Sleeping(nn.Module):
    """A stage that takes known seconds and hands on what it got."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_s = forward_s
        self.store = SleepingStore(forward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Sleeping) -> Tensor:
        ctx.stage = stage
        time.sleep(stage.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        stage = ctx.stage
        time.sleep(stage.forward_s if stage.store.deferring else 2 * stage.forward_s)
        return grad, None


def work(arguments: dict[str, Any], tell: Callable[[str, float], None]) -> list[list[float]]:
    """Return seconds [row, step] of all schedules on this many ranks; every rank calls it."""
    todo = rows(dist.get_world_size())
    results = []
    for index, row in enumerate(todo):
        tell(f"{row.name} on {row.ranks} ranks", index / len(todo))
        results.append(measured(row))
    return results


def measured(row: Row) -> list[float]:
    """Return the seconds of each timed step, from a barrier to the last rank's end."""
    home = schedule.rank_of_stage(row.name, stages=row.stages, virtual_stages=row.virtual_stages)
    mine = [stage for stage in range(row.stages) if home[stage] == dist.get_rank()]
    modules = [Sleeping(row.forward_s[stage]) for stage in mine]
    splits = schedule.splits_backward(row.name)
    hidden = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    pipeline = Pipeline(
        [
            StagePart(
                stage=stage,
                module=module,
                inputs=hidden,
                outputs=hidden,
                store=module.store if splits else None,
            )
            for stage, module in zip(mine, modules, strict=True)
        ],
        row.orders(),
        groups=(dist.group.WORLD, dist.new_group()),
        device=torch.device("cpu"),
        loss=lambda output, _: (output - 1).sum(),
    )
    inputs = torch.ones(row.micro_batches, WIDTH).chunk(row.micro_batches)
    result = []
    for step in range(WARM_UP + TIMED):
        dist.barrier()
        begin = time.perf_counter()
        pipeline.run(inputs)
        own = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        if step >= WARM_UP:
            result.append(own.item())
    return result


def fitted_action_s(measured_s: float, row: Row) -> float:
    """Return the seconds per action with which a row's simulation takes the measured step."""
    low, high = 0.0, measured_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if row.predicted_s(middle) < measured_s else (low, middle)
    return low


def markdown(result: dict[str, Any]) -> str:
    """Return docs/results/schedules-executed.md."""
    others = [abs(row["error"]) for row in result["rows"] if not row["fitted"]]
    lines = [
        "# Schedules: simulated and executed",
        "",
        "The runtime's own pipeline executes stages that sleep for known times, on 2, 4 and 8 "
        "ranks of one machine; the simulator times the same schedules. Equal stages take "
        f"{1e3 * FORWARD_S:g} ms forward and twice that backward (half as much with two stages per "
        "rank); unequal ones take 0.6 to 1.4 times that. The time that the runtime itself takes "
        f"per action is fitted on the one marked row: {1e3 * result['action_s']:.2f} ms.",
        "",
        f"`PYTHONPATH=$PWD {result['command']}`, {result['date']}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores, load average {result['load'][0]:.0f} before and "
        f"{result['load'][1]:.0f} after: {len(others)} rows, median |error| "
        f"{100 * statistics.median(others):.1f} %, worst {100 * max(others):.1f} %.",
        "",
        "| ranks | schedule | stages/rank | micro-batches | stages | executed | simulated "
        "| error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']} | {row['schedule']} | {row['virtual_stages']} | {row['micro_batches']} "
        f"| {'unequal' if row['unequal'] else 'equal'} | {1e3 * row['measured_s']:.1f} ms "
        f"| {1e3 * row['predicted_s']:.1f} ms | "
        f"{'fitted' if row['fitted'] else format(100 * row['error'], '+.1f') + ' %'} |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, ""])


def described(
    row: Row, seconds: Sequence[float], action_s: float, *, fitted: bool
) -> dict[str, Any]:
    measured_s = statistics.median(seconds)
    predicted_s = row.predicted_s(action_s)
    return {
        "schedule": row.name,
        "virtual_stages": row.virtual_stages,
        "ranks": row.ranks,
        "micro_batches": row.micro_batches,
        "unequal": row.unequal,
        "steps_s": list(seconds),
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
        "fitted": fitted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", default="benchmarks/results")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    seconds: dict[Row, list[float]] = {}
    for ranks in RANKS:
        found = result_of(
            "benchmarks.schedule_truth:work", {}, ranks=ranks, device="cpu", title="schedules"
        )
        seconds.update(zip(rows(ranks), found, strict=True))
    base = Row("1f1b", 1, 2, unequal=False)
    action_s = fitted_action_s(statistics.median(seconds[base]), base)
    priority = os.sched_getscheduler(0) == os.SCHED_FIFO
    result = {
        "date": datetime.date.today().isoformat(),
        "command": f"{'chrt -f 10 ' if priority else ''}python benchmarks/schedule_truth.py",
        "load": [before, os.getloadavg()[0]],
        "action_s": action_s,
        "rows": [
            described(row, steps, action_s, fitted=row == base) for row, steps in seconds.items()
        ],
    }
    write_text(json.dumps(result, indent=1) + "\n", Path(options.output) / "schedule_truth.json")
    write_text(markdown(result), DOCUMENT)


if __name__ == "__main__":
    main()
