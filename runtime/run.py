"""A run on disk: what its ranks are told, and what they write while they work.

    OUTPUT/
    ├── orders.yaml  plan.yaml  model.yaml   written before the ranks start
    ├── metrics.jsonl                        one line per step, by rank 0
    ├── tensorboard/                         the same as events, if asked for
    ├── wandb/  wandb-id                     and for Weights & Biases
    ├── logs/rank-00000.log                  all that a rank prints
    ├── ranks/rank-00000.json                what a rank measured, written when it is done
    ├── ranks/rank-00000.failure.json        why a rank stopped before that
    └── report.json                          the whole run, by the launcher

Nothing here imports torch: the launcher reads and writes the same files as the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from planner.document import Document, Part, read_text, unreadable, write_text
from planner.errors import DocumentError
from planner.guarded_files import opened
from planner.units import Amount, Count, Flag, Positive, Rate, Text
from runtime import checksums

Device = Literal["cuda", "cpu"]


class Orders(Document):
    """What every rank of a run is told beside its rank."""

    kind_of_document: ClassVar[str] = "run's orders"

    run: Text
    """Stands in the environment of each rank, so that nobody's processes are mistaken for ours."""
    output: Text
    corpus: Text
    """The folder of a prepared corpus."""
    device: Device
    steps: Positive
    """The step to end after, counted from the start of training, not of this run."""
    started_unix_s: Amount
    max_seconds: Rate | None = None
    """Seconds after `started_unix_s` at which no further step begins."""
    checkpoint: Text | None = None
    checkpoint_every: Positive | None = None
    """Steps; without it only the last step is saved."""
    keep_checkpoints: Positive = 2
    resume: Text | None = None
    """The one checkpoint to go on from."""
    weights: Text | None = None
    tokenizer: Text | None = None
    """The folder of the tokenizer that made the corpus; None where bytes are the tokens."""
    evaluate: Text | None = None
    """The folder of the prepared corpus that is held out."""
    evaluate_every: Positive | None = None
    """Steps; without it only the last step is evaluated."""
    evaluate_batches: Positive = 8
    """Global batches that one evaluation takes."""
    tensorboard: Flag = False
    wandb: Text | None = None
    """The project on Weights & Biases that is told too."""
    peak_step_s: Rate | None = None
    """What a step would take with every device at its peak; divided by a step's time it is the
    MFU."""


class StepRecord(Part):
    """One line of metrics.jsonl."""

    step: Positive
    loss: float
    grad_norm: float
    step_s: Amount
    tokens_per_s: Amount | None = None
    samples_per_s: Amount | None = None
    """Of a script, whose samples need not have tokens."""
    epoch: Count
    learning_rate: Amount | None = None
    mfu: Amount | None = None
    """Of this step: the model's FLOPs per second over the devices' peak."""
    eval_loss: float | None = None
    """On the held-out corpus, after the step."""
    peak_memory_bytes: Count | None = None
    """Of rank 0 so far, where the device counts it."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, averaged over layers."""


class RankRecord(Document):
    """What one rank measured."""

    kind_of_document: ClassVar[str] = "rank's record"

    rank: Count
    stage: Count
    first_step: Positive
    step_s: tuple[Amount, ...]
    """By this rank's own clock, from reading the batch to the end of the update  [step]."""
    untimed_steps: tuple[int, ...] = ()
    """Steps that something other than training slowed down."""
    peak_memory_bytes: Count | None = None
    memory_source: Text = "not measured"
    reserved_memory_bytes: Count | None = None
    """The most that the device's allocator had taken."""
    device_memory_bytes: Count | None = None
    """In use on the device at the end, by everybody."""
    compile_s: Amount = 0.0
    """Of forwards that compiled a layer; those steps are among the warm-up."""
    not_compiled: dict[Text, Text] = Field(default_factory=dict)
    """Why layers ran eager that the plan compiles, by name."""
    stopped: Literal["steps", "max_seconds"] = "steps"
    checkpoint: Text | None = None
    """The last one that this run completed."""


class Failure(Part):
    """Why a rank stopped; `kind` is the name of the exception's class."""

    rank: Count
    kind: Text
    message: str
    at_unix_s: Amount


def orders_file(output: Path) -> Path:
    """Return where a run's orders stand."""
    return output / "orders.yaml"


def plan_file(output: Path) -> Path:
    """Return where a run's copy of its plan stands."""
    return output / "plan.yaml"


def model_file(output: Path) -> Path:
    """Return where the graph of the run's model stands."""
    return output / "model.yaml"


def metrics_file(output: Path) -> Path:
    """Return where rank 0 writes a line for each step."""
    return output / "metrics.jsonl"


def tensorboard_folder(output: Path) -> Path:
    """Return where rank 0 writes events for TensorBoard."""
    return output / "tensorboard"


def log_file(output: Path, rank: int) -> Path:
    """Return where a rank's standard output and error go."""
    return output / "logs" / f"rank-{rank:05}.log"


def record_file(output: Path, rank: int) -> Path:
    """Return where a rank writes what it measured."""
    return output / "ranks" / f"rank-{rank:05}.json"


def failure_file(output: Path, rank: int) -> Path:
    """Return where a rank writes why it stopped."""
    return output / "ranks" / f"rank-{rank:05}.failure.json"


def write_json(part: Part, path: Path) -> None:
    """Write a part as JSON, whole or not at all."""
    write_text(json.dumps(part.model_dump(mode="json", exclude_none=True)) + "\n", path)


def read_failures(output: Path, ranks: int) -> list[Failure]:
    """Return why ranks stopped, the earliest first."""
    found = []
    for rank in range(ranks):
        try:
            found.append(Failure.model_validate_json(read_text(failure_file(output, rank))))
        except (DocumentError, ValueError):
            continue
    return sorted(found, key=lambda failure: failure.at_unix_s)


def append_record(record: StepRecord, path: Path) -> None:
    """Add a step's line, in one write so that a reader never sees half of it."""
    line = json.dumps(record.model_dump(mode="json", exclude_none=True)) + "\n"
    with opened(path, within=path.parent, append=True) as file:
        file.write(line.encode())


_LONGEST_RECORD_BYTES = 1 << 16


def _records(path: Path) -> BufferedReader:
    """Open a metrics file; DocumentError if a link or a pipe stands there."""
    try:
        return checksums.opened(path)
    except OSError as error:
        raise unreadable(error, path) from error


def read_records(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a metrics file; a line that was cut off ends it."""
    if not path.exists():
        return
    with _records(path) as lines:
        while line := lines.readline(_LONGEST_RECORD_BYTES):
            try:
                yield StepRecord.model_validate_json(line)
            except ValueError:
                return


def newest_record(path: Path) -> StepRecord | None:
    """Return the last whole line of a metrics file, of which only the end is read."""
    if not path.exists():
        return None
    with _records(path) as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_RECORD_BYTES))
        *whole, _ = file.read().split(b"\n")
    try:
        return StepRecord.model_validate_json(whole[-1]) if whole else None
    except ValueError:
        return None


def forget_steps_after(step: int, path: Path) -> None:
    """Drop the lines of steps that a resumed run will do again."""
    kept = [record for record in read_records(path) if record.step <= step]
    write_text(
        "".join(
            json.dumps(record.model_dump(mode="json", exclude_none=True)) + "\n" for record in kept
        ),
        path,
    )
