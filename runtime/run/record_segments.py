"""Segments: records of a run in files of bounded size, and an index of what the old ones said.

    OUTPUT/
    ├── events.jsonl  metrics.jsonl        the newest lines, SEGMENT_BYTES or little more
    └── records/
        ├── events-000001.jsonl.gz ...     older ones, compressed
        ├── metrics-000001.jsonl.gz ...
        └── index.json  index-before.json  what events until a segment amount to

The launcher moves a file aside once it is full; whoever writes opens it for each line, so that the
next one begins a new file.  A little later, when nobody writes to it any more, what its events say
is added to the index, and it is compressed.  Steps are in both files until a checkpoint has them
and two segments are newer; from then on they are in the index and among the metrics alone.  So a
run reads as much when it goes on after a million steps as after ten thousand.  Nothing here imports
torch.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from meshwright.planner.documents.document import Document, json_line, read
from meshwright.planner.documents.events import LONGEST_EVENT_BYTES, events_of
from meshwright.planner.documents.units import Count
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.system.safe_files import folder_within, open_below, replace_file
from meshwright.planner.whatif.run_status import Viewer, ViewState
from meshwright.runtime.core import checksums

SEGMENT_BYTES = 2 << 20
MOST_SEGMENT_BYTES = 64 << 20
"""Most bytes of a segment that is read, unpacked: more was not written by us."""
SETTLE_S = 2.0
"""From the moment when a file is moved until nobody writes to it any more."""
LOOK_S = 5.0
FOLDER, INDEX, BEFORE = "records", "index.json", "index-before.json"
WHOLE = 2
"""Segments of events, the newest, that have all their lines: the index before may need them."""
_STEP = b'"event": "step"'
_NAME = re.compile(r"(events|metrics)-(\d{6,9})\.jsonl(\.gz)?")


class RecordIndex(Document):
    """Summary of the events of a run's old segments."""

    kind_of_document: ClassVar[str] = "index of a run's records"

    until: Count
    """The last segment of events that is in it."""
    thinned: Count = 0
    """The last one that has no steps any more."""
    view: ViewState


def segments(path: Path) -> list[tuple[int, Path]]:
    """Return the segments of a file of records by their numbers, the oldest first."""
    by_number: dict[int, Path] = {}
    for file in sorted((path.parent / FOLDER).glob(f"{path.stem}-*"), reverse=True):
        # While one is compressed the plain file is the whole one, and comes last here.
        if match := _NAME.fullmatch(file.name):
            by_number[int(match[2])] = file
    return sorted(by_number.items())


def lines_of(segment: Path) -> Iterator[bytes]:
    """Yield the lines of a segment."""
    left = MOST_SEGMENT_BYTES
    with checksums.open_regular(segment) as raw, contextlib.ExitStack() as held:
        file = held.enter_context(gzip.GzipFile(fileobj=raw)) if segment.suffix == ".gz" else raw
        with contextlib.suppress(EOFError, gzip.BadGzipFile):  # cut off
            while left > 0 and (line := file.readline(LONGEST_EVENT_BYTES + 1)):
                left -= len(line)
                yield line


def index_of(events_file: Path) -> RecordIndex | None:
    """Return the index beside a file of events, or the one before where it cannot be read."""
    last = max((number for number, _ in segments(events_file)), default=0)
    for name in (INDEX, BEFORE):
        path = events_file.parent / FOLDER / name
        with contextlib.suppress(MeshwrightError):
            if path.exists() and (index := read(RecordIndex, path)).until <= last:
                return index
    return None


def viewer_of(events_file: Path, *, until: int | None = None) -> Viewer:
    """Return what events in segments amount to, all or `until` one; only the newest are read."""
    index = index_of(events_file)
    viewer = Viewer() if index is None else Viewer.of_state(index.view)
    after = 0 if index is None else index.until
    newer = [
        segment
        for number, segment in segments(events_file)
        if after < number and (until is None or number <= until)
    ]
    for segment in newer:
        for event in events_of(lines_of(segment)):
            viewer.add(event)
    return viewer


class Rotation:
    """Moves the records of a run into segments, while its launcher looks."""

    def __init__(self, events_file: Path, metrics_file: Path) -> None:
        self._files = (events_file, metrics_file)
        self._next_s = 0.0
        self._moved: dict[Path, float] = {}
        """Segments that are plain files yet, and since when."""
        for path in self._files:
            for _, segment in segments(path):
                if segment.suffix != ".gz":
                    self._moved[segment] = 0.0

    def look(self, *, now_s: float | None = None) -> None:
        """Move what is full, and compress what was moved; little is done most of the time."""
        now_s = time.monotonic() if now_s is None else now_s
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        for segment, since_s in sorted(self._moved.items()):
            if now_s - since_s >= SETTLE_S:
                self._settle(segment)
                del self._moved[segment]
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size >= SEGMENT_BYTES:
                    self._moved[self._move(path)] = now_s

    def _move(self, path: Path) -> Path:
        folder = folder_within(path.parent, FOLDER)
        last = max((number for number, _ in segments(path)), default=0)
        segment = folder / f"{path.stem}-{last + 1:06}.jsonl"
        path.rename(segment)
        open_below(path, within=path.parent, append=True).close()
        return segment

    def _settle(self, segment: Path) -> None:
        """Add a segment to the index, if it has events, and compress it."""
        if not segment.exists():
            return
        match = _NAME.fullmatch(segment.name)
        assert match is not None
        if match[1] == "events":
            self._summarise(int(match[2]))
        compress(segment.read_bytes(), segment)

    def _summarise(self, number: int) -> None:
        events_file = self._files[0]
        folder = events_file.parent / FOLDER
        before = index_of(events_file)
        view = viewer_of(events_file, until=number).state()
        thinned = 0 if before is None else before.thinned
        saved = 0 if view.saved is None else view.saved.step
        named = dict(segments(events_file))
        while thinned + WHOLE < number and self._is_thinned(named.get(thinned + 1), saved):
            thinned += 1
        if before is not None:
            replace_file(json_line(before), folder / BEFORE)
        index = RecordIndex(until=number, view=view, thinned=thinned)
        replace_file(json_line(index), folder / INDEX)

    def _is_thinned(self, segment: Path | None, saved: int) -> bool:
        """Take the steps out of a segment, if all of them are saved; say whether they are out."""
        if segment is None:
            return True
        lines = list(lines_of(segment))
        last = 0
        for event in events_of(line for line in lines if _STEP in line):
            last = max(last, event.record.step if event.event == "step" else 0)
        if last > saved:
            return False
        compress(b"".join(line for line in lines if _STEP not in line), segment)
        return True


def compress(data: bytes, segment: Path) -> None:
    """Have the lines of a segment in a compressed file, whole or not at all."""
    path = segment.with_name(f"{segment.name.removesuffix('.gz')}.gz")
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(gzip.compress(data, mtime=0))
    hidden.rename(path)
    if segment != path:
        segment.unlink()
