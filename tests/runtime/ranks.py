"""Several processes that talk over gloo, forked from this one: a job in a fraction of a second."""

from __future__ import annotations

import datetime
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.limits import PATIENCE_S

LOADED = (
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)
"""Loaded once before the first fork: each rank of a family of transformers would load 500 modules,
in ten times the seconds of its steps."""

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""What every rank calls, and with what."""


class Crew:
    """Ranks of one process group that do job after job.

    The first rank that raises ends all, and its traceback is the error here; the next job starts
    them anew.  The first job reaches the ranks through the fork, so it can be anything; later ones
    go through pipes.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def do(self, work: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
        """Run `work(*args)` on all ranks; return results by rank."""
        deadline = time.monotonic() + timeout_s
        try:
            if self._processes:
                for pipe in self._pipes:
                    pipe.send((work, args))
            else:
                self._start((work, args))
            return _results(self._pipes, deadline)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the ranks, whatever they do."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, first: Job) -> None:
        for name in LOADED:
            importlib.import_module(name)
        # What is garbage here must not be collected there: a process group would wait for its
        # threads, which a fork does not have.
        gc.collect()
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("fork")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, self.world, store, theirs, [ours, *self._pipes], first)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def on_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Run `work(*args)` in `world` forked ranks of one process group; return results by rank.

    The first rank that raises ends all others, and its traceback is the error here.
    """
    with Crew(world) as crew:
        return crew.do(work, *args, timeout_s=timeout_s)


def _results(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(pipes))) - set(results))} hang")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                fine, value = pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not fine:
                raise RuntimeError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world: int, store: Path, pipe: Connection, others: list[Connection], first: Job
) -> None:
    for other in others:  # the parent's ends: a rank reads the end of its jobs when it closes them
        other.close()
    gc.freeze()  # what was there before the fork need not be looked through again and again
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=PATIENCE_S),
        )
        for work, args in itertools.chain([first], iter(pipe.recv, None)):
            pipe.send((True, work(*args)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # a forked child must not run the parent's exit handlers
