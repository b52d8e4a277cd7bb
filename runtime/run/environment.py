"""Environment variables by which `meshwright run` tells the Engine of a script what to do.

Messages between a launcher and its ranks lie in the folder of the run, or beside it where that
cannot be written any more.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

PLAN_VARIABLE = "MESHWRIGHT_PLAN"
"""Names the plan's file for a script's Engine."""
OUTPUT_VARIABLE = "MESHWRIGHT_OUTPUT"
"""Names the folder where a script's Engine writes its metrics."""
CHECKPOINT_VARIABLE = "MESHWRIGHT_CHECKPOINT"
"""Names the folder where a script's Engine saves by itself what it goes on from."""
EVERY_VARIABLE = "MESHWRIGHT_CHECKPOINT_EVERY"
"""After how many steps; without it where the least is lost."""
TOKEN_VARIABLE = "MESHWRIGHT_RUN"
"""The same on all ranks of an attempt, and new in each."""
STORE_VARIABLE = "MESHWRIGHT_STORE"
"""The address of the object store that checkpoints are sent to."""
MESSAGES_VARIABLE = "MESHWRIGHT_MESSAGES"
"""Names the folder of messages whose place in the run's folder cannot be written."""


@contextlib.contextmanager
def messages_beside() -> Iterator[None]:
    """Have a private folder for messages beside the run's, for this process and its ranks.

    Without room for it there is none.
    """
    with contextlib.ExitStack() as held:
        before = os.environ.get(MESSAGES_VARIABLE)
        with contextlib.suppress(OSError):
            prefix = "meshwright-messages-"
            os.environ[MESSAGES_VARIABLE] = held.enter_context(
                tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            )
        try:
            yield
        finally:
            os.environ.pop(MESSAGES_VARIABLE, None)
            if before is not None:
                os.environ[MESSAGES_VARIABLE] = before


def place_beside(message: Path) -> Path | None:
    """Return where a message lies whose own place cannot be written; None where that is nowhere."""
    folder = os.environ.get(MESSAGES_VARIABLE)
    return None if folder is None else Path(folder) / message.name


def place_of(message: Path) -> Path:
    """Return where a message lies, whether it is there or not."""
    beside = place_beside(message)
    return message if beside is None or message.exists() or not beside.exists() else beside
