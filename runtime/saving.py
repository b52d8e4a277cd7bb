"""Saver: writes checkpoints while training goes on.

The state is copied to host memory, which training waits for, and a thread writes the copy together
with the threads of all other ranks.  They talk over a gloo group of their own, so that nothing of
theirs meets training's collectives.  One checkpoint is under way at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from planner.errors import LaunchError, MeshwrightError
from planner.model import ModelGraph
from planner.plan import Plan
from runtime import checkpoint, parts
from runtime.checkpoint import KEEP, Progress
from runtime.exchange import broadcast_json
from runtime.held import alone_in
from runtime.parts import WrittenPart
from runtime.tensor_files import TensorWriter


class Saver:
    """One rank's part in writing a run's checkpoints.  All ranks make it, and use it, together.

    `run` is the same on all ranks and new in each run, so that what a killed run left behind is
    never written to.  Only the last `keep` checkpoints stay.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plan: Plan,
        model: ModelGraph,
        run: str,
        config: str | None = None,
        keep: int = KEEP,
        companions: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`companions` are files that are copied into every checkpoint, by their names there."""
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        self._folder, self._run, self._keep = folder, run, keep
        self._plan, self._model, self._config = plan, model, config
        self._companions = dict(companions)
        self._group = dist.new_group(backend="gloo")
        # On GPUs the copy goes to pinned memory, which is taken once and kept.
        on_cuda = torch.cuda.is_available()
        self._stager = BlockingAsyncStager(cache_staged_state_dict=on_cuda)
        self._device = torch.cuda.current_device() if on_cuda else None
        self._thread: threading.Thread | None = None
        self._error: LaunchError | None = None

    def begin(self, state: Mapping[str, Tensor], done: Progress) -> None:
        """Copy the state and let it be written; wait for the checkpoint before this one first."""
        self.finish()
        _check_finite(state, done.step)
        copied = self._stager.stage(dict(state))
        # A daemon, since a rank that fails must not wait for a disk.
        self._thread = threading.Thread(
            target=self._write, args=(copied, done), name="saving", daemon=True
        )
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait until what was begun is complete; return the last complete checkpoint."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return self.saved

    def check(self) -> None:
        """Tell now if a checkpoint could not be written."""
        if self._error is not None:
            raise self._error

    def _write(self, copied: dict[str, Tensor], done: Progress) -> None:
        if self._device is not None:
            # A thread begins on device 0, and would open a context there.
            torch.cuda.set_device(self._device)
        target = self._folder / f"step-{done.step:06}"
        temporary = self._folder / f".{target.name}.{self._run}"
        rank, ranks = dist.get_rank(), dist.get_world_size()

        held = contextlib.ExitStack()

        def beside() -> list[str]:
            if rank != 0:
                return []
            # Held until it counts, so that nobody takes the save of a run that lives.
            held.enter_context(alone_in(parts.folder_of(temporary)))
            return checkpoint.begin(
                temporary,
                done,
                plan=self._plan,
                model=self._model,
                config=self._config,
                companions=self._companions,
            )

        writer = TensorWriter(temporary, rank=rank, ranks=ranks, beside=beside)
        try:
            with held:
                dcp.save(copied, storage_writer=writer, process_group=self._group)
                # Here every rank has written its part.
                own = (
                    self._committed(temporary, target, done, writer.written) if rank == 0 else None
                )
                problem = broadcast_json(own, source=0, group=self._group)
            if problem is not None:
                raise LaunchError(str(problem))
            self.saved = target
        except LaunchError as error:
            self._error = error
        except BaseException as error:
            self._error = LaunchError(
                f"{target}: the checkpoint cannot be written: {checkpoint.short(error)}"
            )

    def _committed(
        self, temporary: Path, target: Path, done: Progress, written: Sequence[WrittenPart]
    ) -> str | None:
        """Commit a checkpoint; return what was wrong, if anything was."""
        try:
            checkpoint.finish(temporary, done, written)
            checkpoint.let_count(temporary, target)
            checkpoint.prune(target.parent, self._keep)
        except (OSError, MeshwrightError) as error:
            return f"{target}: the checkpoint cannot be written: {checkpoint.short(error)}"
        return None


def _check_finite(state: Mapping[str, Tensor], step: int) -> None:
    """Refuse to save weights that no training can go on from."""
    spoilt = 0.0
    device = torch.device("cpu")
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        device = local.device
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            spoilt = 1.0
    flag = torch.tensor(spoilt, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if float(flag):
        raise LaunchError(
            f"step {step} left weights or optimizer state that are not finite; they are not saved. "
            "Lower the learning rate"
        )
