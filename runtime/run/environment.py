"""Environment variables by which `meshwright run` tells the Engine of a script what to do.

Messages between a launcher and its ranks lie in the folder of the run, or beside it where that
cannot be written any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
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
    """Name a folder for messages beside the run's, for this process and its ranks.

    It is made where it is needed, so that a launcher that is killed leaves nothing.
    """
    before = os.environ.get(MESSAGES_VARIABLE)
    folder = Path(tempfile.gettempdir()) / f"meshwright-messages-{secrets.token_hex(16)}"
    os.environ[MESSAGES_VARIABLE] = str(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(MESSAGES_VARIABLE, None)  # another launch of this process may have ended
        if before is not None:
            os.environ[MESSAGES_VARIABLE] = before


def room_beside(message: Path) -> Path | None:
    """Return where a message can be written whose own place cannot; None where that is nowhere."""
    folder = os.environ.get(MESSAGES_VARIABLE)
    if folder is None:
        return None
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    return Path(folder) / message.name


def place_of(message: Path) -> Path:
    """Return where a message lies, whether it is there or not."""
    folder = os.environ.get(MESSAGES_VARIABLE)
    if folder is None or message.exists():
        return message
    beside = Path(folder) / message.name
    return beside if beside.exists() else message
