"""When a run is saved: at the interval that was asked for, or where the least is lost.

The second is computed before the run from predicted figures, and anew from what its steps and saves
take.  Rank 0 measures and tells the others, so that all save after the same steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.planner.documents.events import Decision, Saved
from meshwright.runtime.checkpoint.writer import Saver, SaveSeconds
from meshwright.runtime.run.metrics import Metrics
from meshwright.runtime.run.run_folder import RankOrders

MEASURED_AFTER = 10
"""Steps after which the interval is computed from steps as they are, though nothing was saved."""
RECENT = 50
"""Steps whose median is what a step takes."""


class SaveSchedule:
    """The steps behind which a run is saved, the same on every rank."""

    def __init__(self, orders: RankOrders, saver: Saver, *, after_step: int) -> None:
        self._every = orders.checkpoint_every
        self._predicted = self._figures = orders.saves
        self._saver = saver
        self._first, self._last = after_step + 1, after_step
        self._told: SaveSeconds | None = None

    def due(self, step: int) -> bool:
        """Say whether this step is saved."""
        if self._every is None:
            return False
        if self._figures is None:
            return step % self._every == 0
        return step - self._last >= self._every

    def stepped(self, step: int, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Compute the interval after the first steps; all ranks call it after each."""
        if step == self._first + MEASURED_AFTER:
            self._measure(step_s, metrics)

    def saves(self, step: int, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Compute the interval when a step is about to be saved; all ranks call it."""
        self._last = step
        self.tell(metrics)
        self._measure(step_s, metrics)

    def tell(self, metrics: Metrics | None) -> None:
        """Write down what the last complete save took, once."""
        took = self._saver.took
        if metrics is None or took is None or took is self._told:
            return
        self._told = took
        metrics.happened(
            Saved(
                at_unix_s=time.time(),
                step=took.step,
                blocked_s=took.blocked_s,
                written_s=took.written_s,
                predicted_blocked_s=self._predicted and self._predicted.blocked_s,
                predicted_written_s=self._predicted and self._predicted.written_s,
            )
        )

    def _measure(self, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Take rank 0's figures as everybody's."""
        if self._figures is None:
            return
        took = self._saver.took
        if took is not None:
            measured = {"blocked_s": took.blocked_s, "written_s": took.written_s}
            self._figures = self._figures.model_copy(update=measured)
        usual_s = statistics.median(step_s[-RECENT:])
        every = torch.tensor([self._figures.every_steps(usual_s)])
        if dist.is_initialized():
            dist.broadcast(every, src=0)
        before, self._every = self._every, int(every)
        if metrics is not None and self._every != before:
            figures = self._figures
            metrics.happened(
                Decision(
                    at_unix_s=time.time(),
                    reaction="interval",
                    why=f"a step takes {usual_s:.3g} s, a save blocks {figures.blocked_s:.3g} s "
                    f"and is written in {figures.written_s:.3g} s, and "
                    f"{figures.failures_per_hour:.3g} failures an hour are expected",
                    every_steps=self._every,
                )
            )
