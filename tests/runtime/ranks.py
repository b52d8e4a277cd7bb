"""Several processes that talk over gloo, forked from this one: a job in a fraction of a second."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WAIT_S = 60.0


def on_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Run `work(*args)` in `world` forked ranks of one process group; return results by rank.

    The first rank that raises ends all others, and its traceback is the error here.
    """
    # What is garbage here must not be collected there: a process group would wait for its threads,
    # which a fork does not have.
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world, Path(folder) / "store", theirs, work, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()


def _results(pipes: list[multiprocessing.connection.Connection], deadline: float) -> list[Any]:
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
    rank: int,
    world: int,
    store: Path,
    pipe: multiprocessing.connection.Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=WAIT_S),
        )
        pipe.send((True, work(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # a forked child must not run the parent's exit handlers
