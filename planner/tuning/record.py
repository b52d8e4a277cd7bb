"""Trials as they are written down: `trials.jsonl`, a line each, and what they are trials of.

A line is added in one write after its trial has ended, so that no end of the program loses one that
is finished; a line that was cut off is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from meshwright.planner.documents.document import (
    Document,
    Part,
    append_line,
    is_file,
    read_text,
    write_text,
)
from meshwright.planner.documents.units import Amount, Count, Line, Positive, Text
from meshwright.planner.errors import DocumentError

FILE, SUBJECT = "trials.jsonl", "subject.json"
Ended = Literal["ran", "slower", "out of memory", "failed"]
"""End of a trial: its step was measured; it was stopped early since it was surely slower; it ran
out of memory; or it failed for another reason, which shows nothing about the plan."""


class Trial(Part):
    """One trial."""

    trial: Positive
    plan_digest: Line
    layout: Text
    ended: Ended
    predicted_s: Amount
    """Predicted seconds of a step, before any trial."""
    believed_s: Amount
    """Predicted seconds of a step just before this trial."""
    step_s: Amount | None = None
    """Median seconds of its timed steps."""
    noise: Amount | None = None
    """Relative standard error of the median."""
    steps: Count = 0
    """Number of timed steps, without warm-up."""
    memory_ratio: Amount | None = None
    """Measured over predicted peak memory of rank 0."""
    seconds: Amount
    """Seconds from start to end of the trial."""
    answer: Text
    """Layout of the answer after the trial."""
    sure: Amount
    """Probability, after the trial, that no other plan is more than 2 % faster."""
    why: Text | None = None
    """Last words of the log of a failed trial."""


class Subject(Document):
    """Subject of trials; trials of another subject do not count."""

    kind_of_document: ClassVar[str] = "subject of trials"

    model_digest: Line
    cluster: Line
    framework: Line
    seq_len: Positive
    global_batch: Positive
    precision: Line
    trial_cluster: Line | None = None
    """The smaller cluster on which trials run; None: the cluster itself."""
    run: Text | None = None
    """The template of the command that runs a trial; None: `meshwright launch`."""


def read_trials(folder: Path) -> list[Trial]:
    """Return the trials of a folder, up to the first line that is not whole."""
    path = folder / FILE
    if not is_file(path):
        return []
    trials: list[Trial] = []
    for line in read_text(path).splitlines(keepends=True):
        try:
            if not line.endswith("\n"):
                break
            trials.append(Trial.model_validate_json(line))
        except ValueError as error:
            raise DocumentError(
                f"line {len(trials) + 1}",
                "is no trial; delete the line, or name another folder",
                file=str(path),
            ) from error
    return trials


def append(trial: Trial, folder: Path) -> None:
    """Add a trial's line, in one write; what a cut-off write left behind is dropped first."""
    path = folder / FILE
    if is_file(path):
        text = read_text(path)
        if text and not text.endswith("\n"):
            write_text(text[: text.rfind("\n") + 1], path)
    append_line(trial, path)


def differences(mine: Subject, theirs: Subject) -> Sequence[str]:
    """Return in what two subjects differ."""
    mine_fields, other = mine.model_dump(), theirs.model_dump()
    return [name for name in mine_fields if mine_fields[name] != other[name]]
