"""Metrics: what rank 0 writes after each step, an event, and its readers: lines and loggers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.planner.documents.events import Event, StepDone, StepRecord
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.loggers import Logger

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
        self.happened(StepDone(at_unix_s=time.time(), record=record, predicted_s=self._predicted_s))
        for one in (*self._before, record):
            run.append_record(one, self._lines)
        self._before = ()
        figures = {name: getattr(record, name) for name in SCALARS}
        known = {name: value for name, value in figures.items() if value is not None}
        for logger in self._loggers:
            with run.never_fatal(type(logger).__name__, Exception):
                logger.log(record.step, known)

    def happened(self, event: Event) -> None:
        """Add what is no step."""
        run.append_record(event, self._events)

    def close(self) -> None:
        """Write what is left."""
        for logger in self._loggers:
            with run.never_fatal(type(logger).__name__, Exception):
                logger.close()
