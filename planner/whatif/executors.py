"""Engines that plan a study's candidates elsewhere: a Dask cluster, Ray, any executor of Python's.

Each is a `concurrent.futures.Executor`.  The package of an engine is imported where it is named,
and its workers need Meshwright installed.  Both engines start a task again whose worker has died.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from meshwright.planner.errors import DocumentError, MeshwrightError

PROCESSES = "processes"
"""The engine of this machine: processes that start with the study and end with it."""
WAYS = f"{PROCESSES}, dask:ADDRESS (as in dask:tcp://127.0.0.1:8786) or ray"


def executor_called(name: str) -> Executor | None:
    """Return the engine that a name stands for; None for processes of this machine."""
    engine, _, address = name.partition(":")
    if name == PROCESSES:
        return None
    if engine == "dask" and address:
        return DaskExecutor(address)
    if name == "ray":
        return RayExecutor()
    raise DocumentError("executor", f"is '{name:.60}'; it is {WAYS}")


def load_package(module: str, engine: str) -> Any:
    """Return the package of an engine; MeshwrightError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MeshwrightError(
            f"--executor {engine} needs the package {module}; install it, or use processes"
        ) from error


class DaskExecutor(Executor):
    """Tasks of the Dask cluster whose scheduler listens at an address."""

    def __init__(self, address: str) -> None:
        """Join the cluster."""
        distributed = load_package("distributed", "dask")
        try:
            self._client = distributed.Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise MeshwrightError(
                f"no Dask scheduler answers at {address:.60}; start one with `dask scheduler`"
            ) from error
        self._tasks = self._client.get_executor(pure=False, retries=3)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task, again where its worker dies."""
        future: Future[Any] = self._tasks.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster as it is."""
        self._tasks.shutdown(wait=wait)
        self._client.close()


class RayExecutor(Executor):
    """Tasks of the Ray cluster that `ray.init` finds, or of one on this machine."""

    def __init__(self) -> None:
        """Join the cluster that RAY_ADDRESS names, if any."""
        self._ray = load_package("ray", "ray")
        if not self._ray.is_initialized():
            self._ray.init(ignore_reinit_error=True, log_to_driver=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task, again where its worker dies."""
        future: Future[Any] = self._ray.remote(fn).options(max_retries=3).remote(*args).future()
        return future
