"""Metrics: what rank 0 writes after each step, an event, and its readers: lines and loggers.

ScriptRecords are the steps that `meshwright run` follows while a script's Engine trains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.planner.documents.events import Event, StepDone, StepRecord
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.environment import OUTPUT_VARIABLE
from meshwright.runtime.run.loggers import Logger
from meshwright.runtime.run.run_clock import unix_now_s

SCALARS = ("loss", "eval_loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu")


class Metrics:
    """The events of one run, as its rank 0 knows them."""

    def __init__(
        self,
        output: Path,
        loggers: Sequence[Logger] = (),
        *,
        predicted_s: float | None = None,
        before: Sequence[StepRecord] = (),
    ) -> None:
        """`predicted_s` is what a step was predicted to take.

        Steps `before` the first are events already, and become lines with it.
        """
        self._events, self._lines = run.events_file(output), run.metrics_file(output)
        self._loggers = tuple(loggers)
        self._predicted_s = predicted_s
        self._before = tuple(before)

    def write(self, record: StepRecord) -> None:
        """Add a step."""
        self.log_event(
            StepDone(at_unix_s=unix_now_s(), record=record, predicted_s=self._predicted_s)
        )
        for step_record in (*self._before, record):
            run.append_record(step_record, self._lines)
        self._before = ()
        figures = {name: getattr(record, name) for name in SCALARS}
        values = {name: value for name, value in figures.items() if value is not None}
        for logger in self._loggers:
            with run.never_fatal(type(logger).__name__, Exception):
                logger.log(record.step, values)

    def log_event(self, event: Event) -> None:
        """Add what is no step."""
        run.append_record(event, self._events)

    def close(self) -> None:
        """Write what is left."""
        for logger in self._loggers:
            with run.never_fatal(type(logger).__name__, Exception):
                logger.close()


class ScriptRecords:
    """Steps written down for `meshwright run`, which started this process."""

    _taken = False

    def __init__(self, output: Path) -> None:
        self._file = run.metrics_file(output)
        self._metrics = Metrics(output)
        self._begun = False

    @classmethod
    def of_this_process(cls) -> ScriptRecords | None:
        """Return where the first engine of a process writes; others write nothing."""
        output = os.environ.get(OUTPUT_VARIABLE)
        if output is None or cls._taken:
            return None
        cls._taken = True
        return cls(Path(output))

    def write(
        self,
        plan: Plan,
        step: int,
        loss: float,
        norm: float,
        step_s: float,
        *,
        device: torch.device,
    ) -> None:
        """Add a step; those that it does again, behind a restart, are forgotten first."""
        on_cuda = device.type == "cuda"
        if not self._begun:
            with run.never_fatal(self._file):
                run.forget_steps_after(step - 1, self._file)
            self._begun = True
        self._metrics.write(
            StepRecord(
                step=step,
                loss=loss,
                grad_norm=norm,
                step_s=step_s,
                samples_per_s=plan.global_batch / step_s,
                epoch=0,
                peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
            )
        )
