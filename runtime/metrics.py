"""Metrics: what rank 0 writes after each step, as JSON lines and for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from runtime import run
from runtime.run import StepRecord

SCALARS = ("loss", "eval_loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu")


class Metrics:
    """The records of one run, from step `first` on."""

    def __init__(self, output: Path, *, first: int, tensorboard: bool) -> None:
        self._lines = run.metrics_file(output)
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only where wanted

            # Events of steps that are done again count no more.
            self._events = SummaryWriter(run.tensorboard_folder(output), purge_step=first)

    def write(self, record: StepRecord) -> None:
        """Add a step."""
        run.append_record(record, self._lines)
        if self._events is not None:
            for name in SCALARS:
                value = getattr(record, name)
                if value is not None:
                    self._events.add_scalar(name, value, record.step)
            self._events.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._events is not None:
            self._events.close()
