"""The processes that a study is worked out in, and what each keeps from task to task.

They end with the process that started them, however it ends: each waits for the end of a pipe that
only that one writes to.  SIGTERM ends that one as Ctrl-C does, so that it gives back the semaphores
through which it talks to them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import NoReturn, Self, TypeVar

from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.errors import MeshwrightError

A = TypeVar("A")
B = TypeVar("B")
FEW = 3
"""This number of tasks is not worth starting processes for."""

_kept = FigureStore()
"""Of a process that was started for tasks."""


class Workers:
    """Processes that start with the first tasks that are many, and end with the study."""

    def __init__(self, processes: int | None = None) -> None:
        """As many as there are cores if it is not said, and never more."""
        cores = os.cpu_count() or 1
        self._count = min(processes or cores, cores)
        self._pool: ProcessPoolExecutor | None = None
        self._ended_by: Connection | None = None
        """Once it is closed, the processes end at whatever they are."""
        self._store = FigureStore()

    def __enter__(self) -> Self:
        """Start nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes, and wait for that if nothing went wrong."""
        if self._pool is not None and error is None:
            self._pool.shutdown()
        self.stop()

    def results_of(
        self, what: Callable[[A, FigureStore], B], tasks: Sequence[A]
    ) -> Iterator[tuple[int, B]]:
        """Yield results with the index of their task, as they come.

        `what` also gets what its process knows of layers.  Interrupted, no other task begins.
        """
        if len(tasks) <= FEW or self._count == 1:
            for index, task in enumerate(tasks):
                yield index, what(task, self._store)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            read, self._ended_by = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self._count, context, _end_with, (read,))
            _on_termination(signal.SIG_DFL, _terminate)
        waiting = {self._pool.submit(_in_process, what, task): at for at, task in enumerate(tasks)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool as error:
            self.stop()
            raise MeshwrightError(
                "a process of the study was ended from outside, as where memory is short; "
                f"{self._count} worked at a time: ask for fewer with --processes"
            ) from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes in the middle of what they are at."""
        _on_termination(_terminate, signal.SIG_DFL)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        if self._ended_by is not None:
            self._ended_by.close()
            self._ended_by = None


def _on_termination(was: object, becomes: Callable[[int, FrameType | None], object] | int) -> None:
    """Handle SIGTERM otherwise if it `was` handled so; who uses us may have a way of its own."""
    of_main = threading.current_thread() is threading.main_thread()
    if of_main and signal.getsignal(signal.SIGTERM) == was:
        signal.signal(signal.SIGTERM, becomes)


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    """End this process in order, as a shell knows it from a process that a signal has ended."""
    raise SystemExit(128 + number)


def _end_with(other: Connection) -> None:
    """End this process when the other end of a pipe is closed; called where it starts."""

    def end() -> None:
        wait([other])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _in_process(what: Callable[[A, FigureStore], B], task: A) -> B:
    return what(task, _kept)
