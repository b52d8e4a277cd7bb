"""The line of progress on stderr, from what rank 0 writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from meshwright.planner.documents.events import StepRecord
from meshwright.planner.documents.units import bytes_text, count_text, seconds_text
from meshwright.planner.report.terminal import Terminal
from meshwright.runtime.run.run_folder import AddedLines


class ProgressLine:
    """The line of progress on stderr, read from what rank 0 writes.

    On a terminal it is renewed in place; elsewhere a line appears every tenth of the steps.
    """

    def __init__(self, *, steps: int, say: Terminal) -> None:
        self.step = 0
        self._steps = steps
        self.say = say
        self._bar: Bar | None = None
        if say.is_terminal:
            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=say, transient=True)
            self._task = self._bar.add_task("starting ranks", total=steps)
        self._next_line = 0
        self._metrics: AddedLines | None = None
        self._before: dict[int, StepRecord] = {}
        self._again: StepRecord | None = None
        """The last step that was written anew and not done again."""

    def follow(self, metrics: Path, before: Iterable[StepRecord] = ()) -> None:
        """Show what is added to a metrics file from now on.

        Steps `before` are of an earlier attempt: a rank that goes on from a copy in memory writes
        those anew that it does not do again.
        """
        self._metrics = AddedLines(metrics)
        self._before = {record.step: record for record in before}
        if self._bar:
            self._bar.start()

    def refresh(self) -> list[StepRecord]:
        """Show the newest step; return those that were done since the last time."""
        assert self._metrics is not None
        news = []
        for text in self._metrics.read():
            with contextlib.suppress(ValueError):  # somebody else has written it
                news.append(StepRecord.model_validate_json(text))
        rewritten = [record for record in news if self._before.get(record.step) == record]
        if rewritten:
            self._again = rewritten[-1]
            self.step = self._again.step
            news = [record for record in news if record not in rewritten]
        if news and self._again is not None:
            self.say.print(f"going on from the copy in memory of step {self._again.step}")
            self._again = None
        for record in news:
            self.step = record.step
            line = self._line(record)
            if self._bar:
                self._bar.update(self._task, description=line, completed=record.step)
            elif (
                record.step >= self._next_line
                or record.step == self._steps
                or record.eval_loss is not None
            ):
                self.say.print(line)
                self._next_line = record.step + max(1, self._steps // 10)
        return news

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()

    def _line(self, record: StepRecord) -> str:
        parts = [
            f"step {record.step}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"gradient norm {record.grad_norm:.3g}",
            f"{seconds_text(record.step_s)} per step",
            f"{count_text(record.tokens_per_s or 0.0)} tokens/s",
        ]
        if record.mfu is not None:
            parts.append(f"MFU {100 * record.mfu:.1f} %")
        if record.eval_loss is not None:
            parts.append(f"held-out loss {record.eval_loss:.4f}")
        if record.peak_memory_bytes:
            parts.append(f"peak {bytes_text(record.peak_memory_bytes)}")
        if record.expert_load:
            parts.append(f"busiest expert {record.expert_load:.2f} x mean")
        return "  ".join(parts)
