"""Rescue: the newest state in copies becomes a checkpoint, whatever ended the run.

Copies lie in slots of launchers (`runtime.resilience.shared_memory`).  A launcher that leaves, and
one that finds what a killed one left, writes those that are newer than all checkpoints to the
folder of checkpoints, as ranks would.  Of several nodes each writes what it has, its own and its
ward's, and whoever comes last completes the checkpoint (`runtime.checkpoint.commit_recovery`).
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import open_below
from meshwright.runtime.checkpoint import checkpoint, commit_recovery, object_store
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint.checkpoint import Progress
from meshwright.runtime.checkpoint.shard_manifest import WrittenChunk, WrittenPart
from meshwright.runtime.core import checksums
from meshwright.runtime.resilience.shared_memory import (
    CopyContext,
    LeftCopies,
    NodeSlots,
    Slots,
    StateSlot,
    left_copies,
)

Say = Callable[[str], object]
Key = tuple[int, str, str, int]
"""Step, run, plan and number of ranks of a state."""
PIECE_BYTES = 2**24
ROOM_S = 30.0
"""Seconds within which a disk may have room again for copies that a launcher left."""
COMMIT_S = 10.0
"""Seconds of waiting for another node that works on the same checkpoint."""
_MASKS = {"bfloat16": (np.uint16, 0x7F80)}
"""Types that numpy has not, whose numbers are not finite where all these bits are set."""


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """One rank's part of a state."""

    label: Mapping[str, Any]
    content: memoryview


def rescue(slots: Slots, folder: Path, *, say: Say) -> Path | None:
    """Write the newest state of a node's slots, if no checkpoint is as new; return where it is.

    Where that cannot be done named slots stay for the next launcher.
    """
    try:
        if _is_newer(slots.node, folder):
            say("the newest state is in copies in memory; they are written to a checkpoint")
        saved, problem = save_newest(slots.node, slots.contexts, folder, say=say)
        object_store.send_saved(folder, say=say)
    except (OSError, ValueError, KeyError, MeshwrightError) as error:
        saved, problem = None, str(error)
    if problem is not None:
        slots.stays = True
        say(f"warning: the copies in {slots.place} cannot be written: {problem}")
    if saved is not None:
        say(f"{object_store.shown(saved)} is complete; its state was in memory")
    return saved


def adopt(folder: Path, *, say: Say) -> Path | None:
    """Make a checkpoint of what killed launchers left on this node; return it.

    Of several nodes each writes its parts; the last one has the checkpoint.
    """
    saved = None
    with left_copies(folder, _is_newer) as leftovers:
        for left in leftovers:
            if _is_newer(left.node, folder):
                say(f"a launcher that was killed left copies in {left.folder}; they are written")
            newer, problem = _save_patiently(left, folder, say=say)
            saved = newer or saved
            if problem is not None:
                say(f"warning: {left.folder}: cannot be written to {folder}: {problem}")
                continue
            slots = [slot for pair in (*left.node.own, *left.node.wards) for slot in pair]
            unread = [slot.problem for slot in slots if slot.problem is not None]
            if unread:
                say(
                    f"warning: a launcher that was killed left copies that cannot be read "
                    f"({unread[0]}); make them readable and start again, or delete {left.folder}"
                )
                continue
            shutil.rmtree(left.folder, ignore_errors=True)
    if saved is not None:
        say(f"{object_store.shown(saved)} is complete; its state was in memory")
    return saved


def _save_patiently(left: LeftCopies, folder: Path, *, say: Say) -> tuple[Path | None, str | None]:
    """Write left copies as `save_newest` does; a disk that is full now may have room soon.

    An older state is written only where the newest still cannot be written in the end.
    """
    until_s = time.monotonic() + ROOM_S
    while True:
        is_last = time.monotonic() > until_s
        try:
            saved, problem = save_newest(
                left.node, left.contexts, folder, say=say, also_older=is_last
            )
            object_store.send_saved(folder, say=say)
        except (OSError, ValueError, KeyError, MeshwrightError) as error:
            saved, problem = None, str(error)
        is_known = any(key[2] in left.contexts for key in _keys(left.node, 0))
        if problem is None or is_last or not is_known:
            return saved, problem
        time.sleep(1.0)


def delete_older_copies(folder: Path) -> None:
    """Delete copies that other launches of a folder left on this node, if none is newer than it."""
    with left_copies(folder, _is_newer) as leftovers:
        for left in leftovers:
            if not _is_newer(left.node, folder):
                shutil.rmtree(left.folder, ignore_errors=True)


def newest_copy_step(slots: Slots | None) -> int:
    """Return the step of the newest state of which this node has copies, 0 where it has none."""
    keys = _keys(slots.node, 0) if slots is not None else []
    return keys[0][0] if keys else 0


def _is_newer(node: NodeSlots, folder: Path) -> bool:
    return bool(_keys(node, saved_step(folder)))


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that counts, 0 where none does."""
    saved = checkpoint.newest(folder) if folder.is_dir() else None
    step = 0 if saved is None else checkpoint.progress(saved).step
    return max(step, object_store.newest_step(folder))


def _keys(node: NodeSlots, after: int) -> list[Key]:
    """Return the states behind a step of which something is there, the newest first."""
    labels = (slot.label() for pair in (*node.own, *node.wards) for slot in pair)
    keys = {
        (label["step"], label["run"], label["plan"], label["world"])
        for label in labels
        if label is not None and label.get("identity") is not None and label["step"] > after
    }
    return sorted(keys, reverse=True)


def save_newest(
    node: NodeSlots,
    contexts: Mapping[str, CopyContext],
    folder: Path,
    *,
    say: Say,
    also_older: bool = True,
) -> tuple[Path | None, str | None]:
    """Write the newest state that becomes a checkpoint; return it, and why no newer one did."""
    problem = None
    for key in _keys(node, saved_step(folder)):
        context = contexts.get(key[2])
        if context is None:
            problem = problem or f"nothing is known of the plan of step {key[0]}"
            continue
        groups = [_parts_of(pairs, key) for pairs in (node.own, node.wards)]
        wrong = next((wrong for group in groups for wrong in _not_finite(group)), None)
        if wrong is not None:
            say(f"warning: the copy of step {key[0]} is not saved: {wrong} is not finite")
            continue
        try:
            saved = _write_all(key, groups, context, folder)
        except (OSError, ValueError, KeyError, MeshwrightError) as error:
            problem = problem or str(error)
            if also_older:
                continue
            break
        if saved is not None:
            return saved, problem
    return None, problem


def _parts_of(pairs: Sequence[Sequence[StateSlot]], key: Key) -> list[CopiedPart]:
    """Return what is whole of a state, by rank."""
    by_rank: dict[int, CopiedPart] = {}
    for slot in (slot for pair in pairs for slot in pair):
        label = slot.label()
        if label is None or (label["step"], label["run"], label["plan"], label["world"]) != key:
            continue
        copy = slot.read()
        if copy is not None:
            by_rank[copy[0]["rank"]] = CopiedPart(*copy)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _not_finite(copies: Sequence[CopiedPart]) -> Iterator[str]:
    """Yield names of tensors that no training can go on from."""
    for copy in copies:
        for name, kind, _, _, _, at, size in copy.label["parts"]:
            dtype, mask = _MASKS.get(kind, (None, 0))
            content = copy.content[at : at + size]
            if dtype is not None:
                bits = np.frombuffer(content, dtype=dtype)
                finite = bool(((bits & mask) != mask).all())
            elif kind in ("float64", "float32", "float16"):
                finite = bool(np.isfinite(np.frombuffer(content, dtype=kind)).all())
            else:
                continue
            if not finite:
                yield name


def _write_all(
    key: Key,
    groups: Sequence[Sequence[CopiedPart]],
    context: CopyContext,
    folder: Path,
) -> Path | None:
    """Write what this node has of a state; return the checkpoint if it is complete."""
    step, run, _, world = key
    target = folder / f"step-{step:06}"
    temporary = folder / f".{target.name}.{run}-copies"
    records = parts.folder_of(temporary)
    for place in (temporary, records):
        place.mkdir(parents=True, exist_ok=True)
    for group in groups:
        boxes: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
        for copy in group:
            _write_part(copy, boxes, temporary, context)
    until_s = time.monotonic() + COMMIT_S
    while all(parts.record_of(records, rank).exists() for rank in range(world)):
        with contextlib.suppress(LaunchError):  # another node has it locked
            commit_recovery.complete(records, target, lambda text: None)
        if target.exists() and checkpoint.problem(target) is None:
            return target
        if time.monotonic() > until_s:
            raise LaunchError(
                f"{temporary}: is not what was written; look at the disk, and start again with "
                "--resume"
            )
        time.sleep(0.2)
    return None


def _write_part(
    copy: CopiedPart,
    boxes: set[tuple[str, tuple[int, ...], tuple[int, ...]]],
    temporary: Path,
    context: CopyContext,
) -> None:
    """Write one rank's part, without what is in those before it, and record it."""
    label, records = copy.label, parts.folder_of(temporary)
    rank = label["rank"]
    chunks: list[WrittenChunk] = []
    pieces: list[memoryview] = []
    start = 0
    for name, kind, shape, offset, local, at, size in label["parts"]:
        box = name, tuple(offset), tuple(local)
        if box in boxes:
            continue
        boxes.add(box)
        chunks.append((name, kind, tuple(shape), start, tuple(offset), tuple(local)))
        pieces.append(copy.content[at : at + size])
        start += size
    if _is_written(records, rank, temporary):
        return
    names: list[str] = []
    if rank == 0:
        names = checkpoint.begin(
            temporary,
            _progress(label),
            plan=context.plan,
            model=context.model,
            config=label.get("config"),
            companions={
                name: Path(file) for name, file in context.companions.items() if Path(file).exists()
            },
        )
    for name, data in label.get("files", {}).items():
        _write_file([memoryview(b64decode(data))], temporary / name)
        names.append(name)
    sizes, sums = {}, {}
    for name in names:
        parts.to_disk(temporary / name)
        sizes[name] = (temporary / name).stat().st_size
        sums[name] = checksums.of_file(temporary / name)
    if pieces:
        name = parts.file_of(rank)
        sizes[name], sums[name] = start, _write_file(pieces, temporary / name)
    parts.to_disk(temporary)
    part = WrittenPart(
        rank=rank, ranks=label["world"], files=sizes, checksums=sums, chunks=tuple(chunks)
    )
    parts.write(part, records)


def _is_written(records: Path, rank: int, temporary: Path) -> bool:
    """Return whether a rank's part is present as it was recorded.

    A disk that was full when another wrote the same part may have left files cut off.
    """
    if not parts.record_of(records, rank).exists():
        return False
    try:
        written = parts.read_one(records, rank).checksums
        if rank == 0:
            checkpoint.progress(records)
        return checksums.differing(temporary, written, list(written)) is None
    except (OSError, MeshwrightError):
        return False


def _write_file(pieces: Sequence[memoryview], path: Path) -> str:
    """Write a file, whole or not at all, and return its checksum."""
    digest = hashlib.sha256()
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_below(hidden, within=path.parent) as file:
            for piece in pieces:
                for at in range(0, piece.nbytes, PIECE_BYTES):
                    data = piece[at : at + PIECE_BYTES]
                    digest.update(data)
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(path)
    except OSError:
        hidden.unlink(missing_ok=True)  # its room is needed
        raise
    return f"sha256:{digest.hexdigest()}"


def _progress(label: Mapping[str, Any]) -> Progress:
    return Progress.model_validate(
        {
            **label["identity"],
            "step": label["step"],
            "sample": label["sample"],
            "epoch": label["epoch_of_data"],
            "plan_digest": label["plan"],
            "loss": label["loss"],
            "used": label["used"],
        }
    )
