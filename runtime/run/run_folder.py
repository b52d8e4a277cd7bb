"""A run: what its ranks get, and what they write.

What a run is asked for is one record from the command line, or a caller in Python, to every rank
(runtime/run/launch_options.py): `RankOrders` is the same with what was found before the ranks
start.  On disk:

    OUTPUT/
    ├── orders.yaml  plan.yaml  model.yaml   written before the ranks start
    ├── events.jsonl                         what happens, by rank 0 and its launcher
    ├── metrics.jsonl                        of these the steps that count, one line each
    ├── records/                             older lines of both, see record_segments.py
    ├── tensorboard/                         the same as events, if asked for
    ├── wandb/  wandb-id                     and for Weights & Biases
    ├── mlflow-id                            id of the run on MLflow
    ├── prediction.yaml                      what was predicted of the plan
    ├── incidents/attempt-001/               what ranks left behind when an attempt ended
    ├── logs/rank-00000.log                  all that a rank prints
    ├── ranks/rank-00000.json                what a rank measured, written when it is done
    ├── ranks/rank-00000.failure.json        why a rank stopped before that
    └── report.json                          the whole run, by the launcher

Nothing here imports torch: the launcher reads and writes the same files as the ranks.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from meshwright.planner.documents.document import (
    Document,
    Part,
    append_line,
    json_line,
    read_text,
    unreadable,
    write_text,
)
from meshwright.planner.documents.events import (
    LONGEST_EVENT_BYTES,
    Event,
    Expected,
    StepRecord,
    events_of,
)
from meshwright.planner.documents.units import Amount, Count, Positive, Rate, Text
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import lines
from meshwright.planner.whatif.pricing.survival import RunSeconds, SaveFigures
from meshwright.planner.whatif.run_status import Viewer
from meshwright.runtime.core import checksums
from meshwright.runtime.run import record_segments
from meshwright.runtime.run.environment import place_of, room_beside
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.record_segments import segments

Device = Literal["cuda", "cpu"]
Stopped = Literal["steps", "max_seconds", "notice", "grow"]
"""Reason for which a run ended: all its steps, its seconds, a notice that the machine is taken
away, or that it goes on on more nodes."""


class RankOrders(LaunchRun, Document):
    """Orders of every rank of a run beside its rank: the run, with what was found for it.

    Paths are absolute; `evaluate` is the folder of the prepared corpus that is held out.
    """

    kind_of_document: ClassVar[str] = "run's orders"

    token: Text
    """Stands in the environment of each rank, so that nobody's processes are mistaken for ours."""
    output: Path
    corpus: Path
    """The folder of a prepared corpus."""
    device: Device
    started_unix_s: Amount
    """`max_seconds` counts from here."""
    resumed: Path | None = None
    """The one checkpoint to go on from."""
    peak_step_s: Rate | None = None
    """Seconds of a step with every device at its peak; divided by a step's time it is the MFU."""
    predicted_step_s: Rate | None = None
    saves: SaveFigures | None = None
    """From these the steps between checkpoints are computed, and again as saves are measured; None
    where they were asked for."""
    copies: bool = True
    """True if copies in memory are gone on from; not where they may have been damaged."""


class RankRecord(Document):
    """Measurements of one rank."""

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
    """Seconds of forwards that compiled a layer; those steps are among the warm-up."""
    not_compiled: dict[Text, Text] = Field(default_factory=dict)
    """Why layers ran eager that the plan compiles, by name."""
    captured: Count = 0
    """Micro-batches that ran as a captured graph."""
    not_captured: Text | None = None
    """Why micro-batches ran as they are that the plan captures."""
    stopped: Stopped = "steps"
    checkpoint: Text | None = None
    """The last one that this run completed."""


class Failure(Part):
    """Why a rank stopped; `kind` is the name of the exception's class."""

    rank: Count
    kind: Text
    message: str
    at_unix_s: Amount
    held: dict[Text, Count] = Field(default_factory=dict)
    """Bytes by kind that a rank held which ran out of memory."""
    needed_bytes: Count | None = None
    """Bytes that it took or asked for in all, where that is counted."""
    suspect: Count | None = None
    """The rank whose memory differs from that of most others."""


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


def events_file(output: Path) -> Path:
    """Return where what happens in a run is written down."""
    return output / "events.jsonl"


def prediction_file(output: Path) -> Path:
    """Return where a run's prediction stands."""
    return output / "prediction.yaml"


def evidence_folder(output: Path, attempt: int) -> Path:
    """Return where evidence is stored that ranks left behind when an attempt ended."""
    return output / "incidents" / f"attempt-{attempt:03}"


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
    write_text(json_line(part), path)


def write_message(part: Part, path: Path) -> None:
    """Write what a rank tells its launcher, beside the run's folder where that cannot be written.

    What cannot be written at all raises as `write_json` does.
    """
    try:
        write_json(part, path)
    except DocumentError:
        beside = room_beside(path)
        if beside is None:
            raise
        write_json(part, beside)


def read_failures(output: Path, ranks: int) -> list[Failure]:
    """Return why ranks stopped, the earliest first."""
    records = []
    for rank in range(ranks):
        try:
            text = read_text(place_of(failure_file(output, rank)))
            records.append(Failure.model_validate_json(text))
        except (DocumentError, ValueError):
            continue
    return sorted(records, key=lambda failure: failure.at_unix_s)


def append_record(record: StepRecord | Event, path: Path) -> None:
    """Add a step's or an event's line, in one write so that a reader never sees half of it.

    Where that is not possible it waits for the next one: no record ends the run that it is about.
    """
    waiting = _waiting.setdefault(path, collections.deque(maxlen=MOST_WAITING))
    waiting.append(record)
    with never_fatal(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        while waiting:
            append_line(waiting[0], path)
            waiting.popleft()


MOST_WAITING = 100_000
"""Lines of one file that wait for room, the newest."""
_waiting: dict[Path, collections.deque[StepRecord | Event]] = {}
_warned: set[object] = set()


@contextlib.contextmanager
def never_fatal(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Go on where records or logs of a run cannot be written, and say so once.

    That is a full or lost disk, and other `kinds` of errors; a link in the place of a file is
    refused as ever.
    """
    tolerated: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except Exception as error:
        cause = (error.__cause__ if isinstance(error, DocumentError) else None) or error
        is_link = isinstance(cause, OSError) and cause.errno in (errno.ELOOP, errno.ENOTDIR)
        if is_link or not isinstance(cause, tolerated):
            raise
        if what not in _warned:
            _warned.add(what)
            why = cause.strerror if isinstance(cause, OSError) else None
            with contextlib.suppress(OSError):
                print(
                    f"warning: {what}: {why or lines(str(cause)) or type(cause).__name__}; "
                    "the run goes on without it",
                    file=sys.stderr,
                    flush=True,
                )


class AddedLines:
    """Reads the whole lines that are added to a file from now on.

    A file that is removed meanwhile, or written anew, ends nothing: a new one is read from its
    beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._file: tuple[int, int] | None = None
        if not path.exists():
            return  # who writes it has not begun
        with never_fatal(path):
            status = path.stat()
            self._offset, self._file = status.st_size, (status.st_dev, status.st_ino)

    def read(self) -> list[bytes]:
        """Return the lines that were ended since the last time."""
        news = b""
        before, self._file = self._file, None
        if before is None and not self._path.exists():
            return []
        with never_fatal(self._path), checksums.open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if identity != before or status.st_size < self._offset:
                self._offset = 0
            self._file = identity
            file.seek(self._offset)
            news = file.read()
        whole = news[: news.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


_LONGEST_RECORD_BYTES = 1 << 16


def account_of(output: Path) -> RunSeconds:
    """Return where the seconds of all attempts of a run went, as its events say."""
    return _viewer_of_events(output).seconds


def expected_of(output: Path) -> Expected | None:
    """Return what was predicted of a run before its first attempt."""
    return _viewer_of_events(output).expectation


def viewer(output: Path) -> Viewer:
    """Return what the events of a run amount to; of an old one only the newest are read."""
    path = events_file(output)
    viewing = record_segments.viewer_of(path)
    for event in _newest_events(path):
        viewing.add(event)
    return viewing


class _EventFollower:
    """Reads the events of a run; each look reads only those that are new.

    All are read again where the file is another one: a segment, or removed and begun anew.
    """

    def __init__(self) -> None:
        self._viewing = Viewer()
        self._place: tuple[int, ...] | None = None
        """Number of the last segment, and which file the newest events are in."""
        self._offset, self._end = 0, b""
        """Place of the next event, and the bytes before it."""

    def look(self, path: Path) -> Viewer:
        """Read what is new in a file of events."""
        if not path.exists():
            self._place = None
            return record_segments.viewer_of(path)
        last = max((number for number, _ in segments(path)), default=0)
        with _records(path) as file:
            status = os.fstat(file.fileno())
            place = (last, status.st_dev, status.st_ino)
            if place != self._place or not self._goes_on(file):
                self._place, self._offset, self._end = None, 0, b""
                self._viewing = record_segments.viewer_of(path)
                file.seek(0)
            for event in events_of(self._new_lines(file)):
                self._viewing.add(event)
            self._place = place
        return self._viewing

    def _goes_on(self, file: BufferedReader) -> bool:
        """Return whether a file has what was read of it, and seek what comes next."""
        file.seek(self._offset - len(self._end))
        return file.read(len(self._end)) == self._end

    def _new_lines(self, file: BufferedReader) -> Iterator[bytes]:
        while line := file.readline(LONGEST_EVENT_BYTES + 1):
            if not line.endswith(b"\n") and len(line) <= LONGEST_EVENT_BYTES:
                return  # it is being written
            self._offset, self._end = self._offset + len(line), line[-_COMPARED_BYTES:]
            yield line


_COMPARED_BYTES = 256
_followers: collections.defaultdict[Path, _EventFollower] = collections.defaultdict(_EventFollower)


_STEP_LINE = re.compile(rb'\{"at_unix_s": [^,]*, "event": "step", "record": \{"step": (\d{1,18}),')
"""First words of a step's event, as it is written: its number is known without all of it."""


def _viewer_of_events(output: Path) -> Viewer:
    path = events_file(output).absolute()
    return _followers[path].look(path)


def steps_of_events(output: Path, *, after: int, until: float = math.inf) -> list[StepRecord]:
    """Return the steps behind one and until another, each as it was done last.

    They are looked for in the newest segments, until one has none of them.
    """
    path = events_file(output)
    records: dict[int, StepRecord] = {}
    older = (record_segments.lines_of(file) for _, file in reversed(segments(path)))
    for part in itertools.chain([_newest_lines(path)], older):
        least = math.inf
        later = []
        for line in part:
            match = _STEP_LINE.match(line)
            step = int(match[1]) if match else after + 1  # it is read, to be looked at
            least = min(least, step)
            if after < step:
                later.append(line)
        steps = {
            event.record.step: event.record for event in events_of(later) if event.event == "step"
        }
        records = {step: record for step, record in steps.items() if after < step} | records
        if least <= after:
            break
    return [records[step] for step in sorted(records) if step <= until]


def events(output: Path) -> Iterator[Event]:
    """Yield what has happened in a run so far; nothing before its first attempt."""
    path = events_file(output)
    for _, segment in segments(path):
        yield from events_of(record_segments.lines_of(segment))
    yield from _newest_events(path)


def _newest_events(path: Path) -> Iterator[Event]:
    yield from events_of(_newest_lines(path))


def _newest_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with _records(path) as file:
            yield from iter(lambda: file.readline(LONGEST_EVENT_BYTES + 1), b"")


def _records(path: Path) -> BufferedReader:
    """Open a metrics file; DocumentError if a link or a pipe stands there."""
    try:
        return checksums.open_regular(path)
    except OSError as error:
        raise unreadable(error, path) from error


def read_records(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a metrics file and its segments; a line that was cut off ends it."""
    for _, segment in segments(path):
        yield from _whole_records(record_segments.lines_of(segment))
    if path.exists():
        with _records(path) as file:
            yield from _whole_records(iter(lambda: file.readline(_LONGEST_RECORD_BYTES), b""))


def _whole_records(lines_read: Iterator[bytes]) -> Iterator[StepRecord]:
    for line in lines_read:
        try:
            yield StepRecord.model_validate_json(line)
        except ValueError:
            return


def newest_record(path: Path) -> StepRecord | None:
    """Return the last whole line of a metrics file, of which only the end is read."""
    if path.exists():
        with _records(path) as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_RECORD_BYTES))
            *whole, _ = file.read().split(b"\n")
        with contextlib.suppress(ValueError):
            if whole:
                return StepRecord.model_validate_json(whole[-1])
    for _, segment in segments(path)[-1:]:  # its file was just begun anew
        *_, newest = (None, *_whole_records(record_segments.lines_of(segment)))
        return newest
    return None


def forget_steps_after(step: int, path: Path) -> None:
    """Drop the lines of steps that a resumed run will do again."""
    for _, segment in reversed(segments(path)):
        whole, kept = _lines_until(step, record_segments.lines_of(segment))
        if kept and len(kept) == whole:
            break
        segment.unlink()
        if kept:
            plain = segment.with_name(segment.name.removesuffix(".gz"))
            write_text(b"".join(kept).decode(), plain)
            break
    newest: list[bytes] = []
    if path.exists():
        with _records(path) as file:
            lines_read = iter(lambda: file.readline(_LONGEST_RECORD_BYTES), b"")
            _, newest = _lines_until(step, lines_read)
    write_text(b"".join(newest).decode(), path)


def _lines_until(step: int, lines_read: Iterator[bytes]) -> tuple[int, list[bytes]]:
    """Return how many lines are whole, and those of them that are of no later step."""
    whole, again = itertools.tee(lines_read)
    records = list(_whole_records(whole))
    kept = [line for record, line in zip(records, again, strict=False) if record.step <= step]
    return len(records), [line.removesuffix(b"\n") + b"\n" for line in kept]


def log_text(log: Path) -> str:
    """Return the last 64 KiB of a log; nothing if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def handed_over(output: Path, rank: int) -> Path:
    """Return the file by which a rank says that its script has saved and ended for a notice."""
    return output / "ranks" / f"rank-{rank:05}.handed-over"
