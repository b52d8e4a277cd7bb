"""Metrics: what rank 0 writes after each step, as JSON lines and to loggers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime import run
from runtime.loggers import Logger
from runtime.run import StepRecord

SCALARS = ("loss", "eval_loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu")


class Metrics:
    """The records of one run."""

    def __init__(self, output: Path, loggers: Sequence[Logger] = ()) -> None:
        self._lines = run.metrics_file(output)
        self._loggers = tuple(loggers)

    def write(self, record: StepRecord) -> None:
        """Add a step."""
        run.append_record(record, self._lines)
        figures = {name: getattr(record, name) for name in SCALARS}
        known = {name: value for name, value in figures.items() if value is not None}
        for logger in self._loggers:
            logger.log(record.step, known)

    def close(self) -> None:
        """Write what is left."""
        for logger in self._loggers:
            logger.close()
