"""Unfinished: checkpoints whose ranks died when their files were whole, but before they counted.

Ranks record what they have on the disk (runtime.checkpoint.shard_manifest).  Whoever comes next,
the launcher when its ranks have ended or the run that goes on, completes a checkpoint of which the
parts of all ranks are there, reads every byte, and lets it count only if all are as they were
written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.checkpoint import checkpoint, tensor_index
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint.checkpoint import Progress
from meshwright.runtime.checkpoint.tensor_index import INDEX
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.locks_and_signals import alone_in

_HIDDEN = re.compile(rf"\.(step-(\d+))\.[0-9A-Za-z_-]+{re.escape(parts.SUFFIX)}")


def prepare_folder(run: LaunchRun, *, say: Callable[[str], object]) -> None:
    """Let whoever goes on find the newest checkpoint that is whole."""
    assert run.checkpoint is not None
    if run.resume and run.or_start:  # nobody may be there who moves a damaged one
        checkpoint.set_damaged_aside(run.checkpoint, say=say)
    commit(run.checkpoint, say=say)


def commit(folder: Path, *, say: Callable[[str], object]) -> Path | None:
    """Let the newest unfinished checkpoint of a folder count, if its files are whole; return it.

    `say` is called before every byte of one is read, which may take minutes.
    Only one of a later step than all that have their names.  One of a run that lives is left to
    it.  What cannot be completed stays as it is, hidden: the next save deletes it.
    """
    steps = checkpoint.all_steps(folder)
    last = _step(steps[-1].name) if steps else 0
    found = []
    for records in folder.glob(f".step-*{parts.SUFFIX}"):
        match = _HIDDEN.fullmatch(records.name)
        if match and int(match[2]) > last:
            found.append((int(match[2]), records, folder / match[1]))
    for _, records, target in sorted(found, reverse=True):
        try:
            if complete(records, target, say):
                return target
        except (OSError, ValueError, MeshwrightError):
            continue  # lost, as every save that did not come to its end
    return None


def complete(records: Path, target: Path, say: Callable[[str], object]) -> bool:
    """Complete one; say whether it counts now."""
    temporary = records.with_name(records.name.removesuffix(parts.SUFFIX))
    if records.is_symlink() or temporary.is_symlink() or not temporary.is_dir():
        return False
    # Rank 0 records its part while it holds the lock, so a save that begins is never in our way.
    if not parts.record_of(records, 0).exists():
        return False
    with alone_in(records):
        written = parts.read(records)
        if written is None:
            return False
        done: Progress = checkpoint.progress(records)
        if done.step != _step(target.name):
            return False
        size = sum(sum(part.files.values()) for part in written)
        say(
            f"{target}: its ranks died before it counted; all of it ({bytes_text(size)}) is read "
            "to see whether it is whole"
        )
        tensor_index.write(parts.index_of(written), temporary / INDEX)
        checkpoint.finish(temporary, done, written)
        if checkpoint.verify(temporary) is not None:
            return False
        whole = checkpoint.progress(temporary)
        # Boxes must lie inside the files, too.
        tensor_index.read(temporary, sizes=whole.files, checksum=whole.checksums[INDEX])
        checkpoint.let_count(temporary, target)
        shutil.rmtree(records, ignore_errors=True)
    return True


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
