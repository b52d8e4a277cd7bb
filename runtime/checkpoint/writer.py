"""Saver: writes checkpoints, of `launch` and of scripts, behind training or while it waits.

Behind training the state is copied to host memory, which training waits for, and a thread writes
the copy together with the threads of all other ranks.  They talk over a gloo group of their own, so
that nothing of theirs meets training's collectives.  One checkpoint is under way at a time.  Before
ranks write together they agree that each has what it is to write.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from meshwright.planner.documents.events import Decision, Saved
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import open_below
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint.checkpoint import KEEP, Progress
from meshwright.runtime.checkpoint.shard_manifest import WrittenPart
from meshwright.runtime.checkpoint.storage import TensorWriter
from meshwright.runtime.checkpoint.tensor_index import INDEX
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.object_collectives import broadcast_json, host_group, raise_on_all
from meshwright.runtime.run.locks_and_signals import alone_in
from meshwright.runtime.run.metrics import Metrics
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import RankOrders


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSeconds:
    """Seconds of an asynchronous save, by this rank's clock."""

    step: int
    blocked_s: float
    """Seconds that training waited, for its copy and for the ranks to agree on it."""
    written_s: float = 0.0
    """Seconds from the start of the save until it is complete; 0 before that."""


class Saver:
    """One rank's part in writing a run's checkpoints.  All ranks make it, and use it, together."""

    def __init__(
        self,
        folder: Path,
        *,
        plan: Plan,
        model: ModelGraph | None = None,
        run: str | None = None,
        config: str | None = None,
        keep: int = KEEP,
        companions: Mapping[str, Path] = MappingProxyType({}),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Only the last `keep` checkpoints stay.

        `run` is the same on all ranks and new in each run, so that what a killed run left behind is
        never written to; without it rank 0 draws one.  `companions` are files that are copied into
        every checkpoint, by their names there.  `group` is one of gloo over all ranks, that nobody
        else uses; without it one is made, where ranks are joined.
        """
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        self.took: SaveSeconds | None = None
        """Seconds of the last asynchronous save that is complete."""
        self._joined = dist.is_initialized()
        self._group = dist.new_group(backend="gloo") if self._joined and group is None else group
        self._run = run or self._of_rank_0(secrets.token_hex(4))
        self._folder, self._keep = folder, keep
        self._plan, self._model, self._config = plan, model, config
        self._companions = dict(companions)
        # On GPUs the copy goes to pinned memory, which is taken once and kept.
        on_cuda = torch.cuda.is_available()
        self._stager = BlockingAsyncStager(cache_staged_state_dict=on_cuda)
        self._device = torch.cuda.current_device() if on_cuda else None
        self._thread: threading.Thread | None = None
        self._error: LaunchError | None = None
        self._begun_step = 0
        self._failed: Path | None = None
        """Files left by a failed save, kept until the next save."""

    def begin(self, state: Mapping[str, Tensor], done: Progress) -> None:
        """Copy the state and let it be written; wait for the checkpoint before this one first.

        Raises LaunchError, on all ranks, where weights or optimizer state are not finite.
        """
        self.finish()
        self._clear_failed()
        self._begun_step = done.step
        begin = time.perf_counter()
        with raise_on_all(self._group):
            _check_finite(state, done.step)
            copied = self._stager.stage(dict(state))
        blocked = SaveSeconds(step=done.step, blocked_s=time.perf_counter() - begin)
        # A daemon, since a rank that fails must not wait for a disk.
        self._thread = threading.Thread(
            target=self._write_in_background,
            args=(copied, done, blocked),
            name="saving",
            daemon=True,
        )
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait until what was begun is complete; return the last complete checkpoint."""
        self._join()
        self.check()
        return self.saved

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Tell now if a checkpoint could not be written."""
        if self._error is not None:
            raise self._error

    def take_failure(self, *, waits: bool) -> tuple[int, str] | None:
        """Return the step of a save behind training that failed, and why, once.

        If it does not wait, only of one that has ended.
        """
        if waits:
            self._join()
        error, self._error = self._error, None
        return None if error is None else (self._begun_step, str(error))

    def _clear_failed(self) -> None:
        """Delete what a save has left that failed: it may be what fills the disk."""
        if self._failed is not None and self._is_first:
            for left in self._failed.parent.glob(f"{self._failed.name}*"):
                shutil.rmtree(left, ignore_errors=True)
        self._failed = None

    def save(
        self,
        state: Mapping[str, Tensor],
        done: Progress,
        beside: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Write a checkpoint while training waits, without a copy; return where it is.

        `beside` are files of this rank by name.  Raises LaunchError, on all ranks, where it cannot
        be written.
        """
        self.finish()
        self.saved = self._write(state, done, beside)
        return self.saved

    def _write_in_background(
        self, copied: Mapping[str, Tensor], done: Progress, blocked: SaveSeconds
    ) -> None:
        if self._device is not None:
            # A thread begins on device 0, and would open a context there.
            torch.cuda.set_device(self._device)
        try:
            begin = time.perf_counter()
            self.saved = self._write(copied, done, {})
            written_s = blocked.blocked_s + time.perf_counter() - begin
            self.took = replace(blocked, written_s=written_s)
        except LaunchError as error:
            self._error = error
        except BaseException as error:
            self._error = LaunchError(f"saving ended: {checkpoint.short(error)}")

    def _write(
        self, state: Mapping[str, Tensor], done: Progress, files: Mapping[str, bytes]
    ) -> Path:
        target = self._folder / f"step-{done.step:06}"
        temporary = self._folder / f".{target.name}.{self._run}"
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self._joined else (0, 1)
        held = contextlib.ExitStack()

        def other_folders() -> list[str]:
            for name, content in files.items():
                with open_below(temporary / name, within=temporary) as file:
                    file.write(content)
            if rank != 0:
                return list(files)
            # Held until it counts, so that nobody takes the save of a run that lives.
            held.enter_context(alone_in(parts.folder_of(temporary)))
            names = checkpoint.begin(
                temporary,
                done,
                plan=self._plan,
                model=self._model,
                config=self._config,
                companions=self._companions,
            )
            return [*names, *files]

        writer = TensorWriter(temporary, rank=rank, ranks=ranks, beside=other_folders)
        try:
            with held, contextlib.nullcontext() if self._joined else _without_group():
                dcp.save(dict(state), storage_writer=writer, process_group=self._group)
                # Here every rank has written its part.
                self._send(temporary, target.name, writer.own)
                own = self._commit(temporary, target, done, writer.written) if rank == 0 else None
                problem = self._of_rank_0(own)
        except (Exception, CheckpointException) as error:
            self._failed = temporary
            problem = f"{target}: the checkpoint cannot be written: {checkpoint.short(error)}"
            raise LaunchError(problem) from error
        if problem is not None:
            self._failed = temporary
            raise LaunchError(problem)
        if rank != 0:  # a spool of another node than rank 0's; elsewhere it has another name now
            for left in (temporary, parts.folder_of(temporary)):
                shutil.rmtree(left, ignore_errors=True)
        return target

    def _send(self, temporary: Path, name: str, files: Sequence[str]) -> None:
        """Store this rank's files where a store is named; what counts is stored by rank 0 later."""
        store = object_store.store_of(self._folder)
        if store is None:
            return
        with raise_on_all(self._group) if self._joined else contextlib.nullcontext():
            if self._is_first:
                store.begin(name)
        with raise_on_all(self._group) if self._joined else contextlib.nullcontext():
            store.send(temporary, name, files)

    @property
    def _is_first(self) -> bool:
        return not self._joined or dist.get_rank() == 0

    def _of_rank_0(self, problem: str | None) -> str | None:
        """Return what rank 0 has."""
        if not self._joined:
            return problem
        agreed_problem: str | None = broadcast_json(problem, source=0, group=self._group)
        return agreed_problem

    def _commit(
        self, temporary: Path, target: Path, done: Progress, written: Sequence[WrittenPart]
    ) -> str | None:
        """Commit a checkpoint; return what was wrong, if anything was."""
        try:
            checkpoint.finish(temporary, done, written)
            store = object_store.store_of(self._folder)
            if store is not None:
                store.send(temporary, target.name, (INDEX, checkpoint.META))
            checkpoint.let_count(temporary, target)
            checkpoint.prune(target.parent, self._keep)
            if store is not None:
                store.prune(self._keep)
                for old in checkpoint.all_steps(target.parent)[: -self._keep]:
                    shutil.rmtree(old, ignore_errors=True)  # others have parts of it
        except (OSError, MeshwrightError) as error:
            return f"{target}: the checkpoint cannot be written: {checkpoint.short(error)}"
        return None


@contextlib.contextmanager
def _without_group() -> Iterator[None]:
    """Let a process without a group write alone, as it should."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check_finite(state: Mapping[str, Tensor], step: int) -> None:
    """Refuse to save weights that no training can go on from."""
    for value in state.values():
        local = to_local(value)
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            raise LaunchError(
                f"step {step} left weights or optimizer state that are not finite; they are not "
                "saved. Lower the learning rate"
            )


MEASURED_AFTER = 10


"""Steps after which the interval is computed from steps as they are, though nothing was saved."""


RECENT = 50


"""Steps whose median is what a step takes."""


class SaveSchedule:
    """The steps behind which a run is saved, the same on every rank."""

    def __init__(self, orders: RankOrders, saver: Saver, *, after_step: int) -> None:
        self._every = orders.checkpoint_every
        self._predicted = self._figures = orders.saves
        self._saver = saver
        self._first, self._last = after_step + 1, after_step
        self._told: SaveSeconds | None = None

    def due(self, step: int) -> bool:
        """Say whether this step is saved."""
        if self._every is None:
            return False
        if self._figures is None:
            return step % self._every == 0
        return step - self._last >= self._every

    def after_step(self, step: int, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Compute the interval after the first steps; all ranks call it after each."""
        if step == self._first + MEASURED_AFTER:
            self._measure(step_s, metrics)

    def saves(self, step: int, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Compute the interval when a step is about to be saved; all ranks call it."""
        self._last = step
        self.report_last_save(metrics)
        self._measure(step_s, metrics)

    def report_last_save(self, metrics: Metrics | None) -> None:
        """Write down what the last complete save took, once."""
        took = self._saver.took
        if metrics is None or took is None or took is self._told:
            return
        self._told = took
        metrics.log_event(
            Saved(
                at_unix_s=unix_now_s(),
                step=took.step,
                blocked_s=took.blocked_s,
                written_s=took.written_s,
                predicted_blocked_s=self._predicted and self._predicted.blocked_s,
                predicted_written_s=self._predicted and self._predicted.written_s,
            )
        )

    def _measure(self, step_s: Sequence[float], metrics: Metrics | None) -> None:
        """Take rank 0's figures as everybody's."""
        if self._figures is None:
            return
        took = self._saver.took
        if took is not None:
            measured = {"blocked_s": took.blocked_s, "written_s": took.written_s}
            self._figures = self._figures.model_copy(update=measured)
        usual_s = statistics.median(step_s[-RECENT:])
        every = torch.tensor([self._figures.every_steps(usual_s)])
        if dist.is_initialized():
            dist.broadcast(every, src=0, group=host_group())
        before, self._every = self._every, int(every)
        if metrics is not None and self._every != before:
            figures = self._figures
            metrics.log_event(
                Decision(
                    at_unix_s=unix_now_s(),
                    reaction="interval",
                    why=f"a step takes {usual_s:.3g} s, a save blocks {figures.blocked_s:.3g} s "
                    f"and is written in {figures.written_s:.3g} s, and "
                    f"{figures.failures_per_hour:.3g} failures an hour are expected",
                    every_steps=self._every,
                )
            )
