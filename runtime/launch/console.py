"""What rank 0 prints, on the launcher's own console as well as in its log."""

from __future__ import annotations

import codecs
import contextlib
import sys
import threading
from pathlib import Path
from typing import IO

from meshwright.planner.system.safe_files import open_below

CHUNK_BYTES = 1 << 16
LAST_WORDS_S = 5.0
"""How long to wait for what a process that has ended left in its pipe."""


class Console:
    """Copies a child's output and errors to its log and to this process's own, as they come."""

    def __init__(self, output: IO[bytes], errors: IO[bytes], log: Path) -> None:
        self._log = log
        self._threads = [
            threading.Thread(target=self._copy, args=(pipe, name), daemon=True)
            for pipe, name in ((output, "stdout"), (errors, "stderr"))
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all that was written is shown; what its own children still write is not."""
        for thread in self._threads:
            thread.join(timeout=LAST_WORDS_S)

    def _copy(self, pipe: IO[bytes], name: str) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with pipe, open_below(self._log, within=self._log.parents[1], append=True) as log:
            while part := pipe.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
                # A full disk costs nobody the console, and a console that is gone not the log.
                with contextlib.suppress(OSError):
                    log.write(part)
                with contextlib.suppress(OSError, ValueError):
                    stream = getattr(sys, name)
                    stream.write(decoder.decode(part))
                    stream.flush()
