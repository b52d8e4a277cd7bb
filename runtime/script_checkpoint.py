"""Checkpoints of a script's Engine: the files of runtime.checkpoint, and the user's own state.

What of a script is not the model's (a scheduler, a loader's position, an epoch) is whatever has
`state_dict` and `load_state_dict`.  Each slice of the batch writes its own, since loaders differ;
numbers, strings, containers of them and tensors are read back, and nothing that would run code.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from planner.errors import LaunchError
from planner.guarded_files import opened
from planner.plan import Plan
from runtime import checkpoint, checksums, parts, tensor_index, unfinished
from runtime.checkpoint import Progress
from runtime.exchange import broadcast_json
from runtime.held import alone_in
from runtime.tensor_files import TensorWriter
from runtime.tensor_index import INDEX


class Stateful(Protocol):
    """What the state of a script consists of."""

    def state_dict(self) -> Any:
        """Return what makes another object like this one."""

    def load_state_dict(self, state: Any) -> Any:
        """Become like the object whose state this is."""


def save(
    folder: Path,
    state: Mapping[str, Tensor],
    own: Mapping[str, Any] | None,
    *,
    plan: Plan,
    slice_rank: int,
    step: int,
    keep: int,
) -> Path:
    """Write a checkpoint with all ranks; return where it is.

    `own` is what this slice of the batch keeps beside, on one of its ranks.  Raises LaunchError
    before the first step.
    """
    if step < 1:
        raise LaunchError("nothing to save before the first step; build() makes the same weights")
    joined = dist.is_initialized()
    rank = dist.get_rank() if joined else 0
    run: Any = secrets.token_hex(4)
    if joined:
        run = broadcast_json(run, source=0, group=dist.group.WORLD)
    target = folder / f"step-{step:06}"
    temporary = folder / f".{target.name}.{run}"
    done = _progress(plan, step)

    held = contextlib.ExitStack()

    def beside() -> list[str]:
        names = []
        if rank == 0:
            # Held until it counts, so that nobody takes the save of a run that lives.
            held.enter_context(alone_in(parts.folder_of(temporary)))
            names += checkpoint.begin(temporary, done, plan=plan, model=None, config=None)
        if own is not None:
            names.append(_own_file(slice_rank))
        return names

    ranks = dist.get_world_size() if joined else 1
    writer = TensorWriter(temporary, rank=rank, ranks=ranks, beside=beside)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        if own is not None:
            with opened(temporary / _own_file(slice_rank), within=temporary) as file:
                torch.save(own, file)
        with warnings.catch_warnings(), held:
            # A process without a group writes alone, as it should.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(state), storage_writer=writer)  # here every rank has written its part
            if rank == 0:
                checkpoint.finish(temporary, done, writer.written)
                checkpoint.let_count(temporary, target)
                checkpoint.prune(folder, keep)
    except (OSError, pickle.PicklingError, AttributeError) as error:
        raise LaunchError(f"{target}: cannot be written: {checkpoint.short(error)}") from error
    if joined:
        dist.barrier()
    return target


def found(folder: Path) -> Path | None:
    """Return a checkpoint, or the newest complete one in a folder of them, if there is one.

    All ranks ask together; a checkpoint whose ranks died when its files were whole counts.
    """
    if (folder / checkpoint.META).exists():
        return folder
    joined = dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        unfinished.commit(folder)
    if joined:
        dist.barrier()
    return checkpoint.newest(folder)


def stored_names(place: Path) -> list[str]:
    """Return the tensors that a checkpoint has."""
    done = checkpoint.progress(place)
    index = tensor_index.read(place, sizes=done.files or None, checksum=done.checksums.get(INDEX))
    return list(index.tensors)


def own_state(place: Path, slice_rank: int) -> dict[str, Any]:
    """Return what this slice kept; where there were fewer slices, what the first one did."""
    path = place / _own_file(slice_rank)
    if not path.exists():
        path = place / _own_file(0)
    try:
        with checksums.opened(path) as file:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle ends in any error
        raise LaunchError(
            f"{path}: cannot be read as plain data: {checkpoint.short(error)}; let state_dict() "
            "return numbers, strings, lists, dicts and tensors"
        ) from error
    return state


def _own_file(slice_rank: int) -> str:
    return f"user-{slice_rank:05}.pt"


def _progress(plan: Plan, step: int) -> Progress:
    return Progress(
        step=step,
        sample=step * plan.global_batch,
        epoch=0,
        seq_len=plan.seq_len or 1,
        seed=plan.training.seed,
        model=plan.model.name,
        model_digest=plan.model.digest,
        plan_digest=plan.digest,
        corpus="script",
        corpus_digest="script",
        loss=0.0,
    )
