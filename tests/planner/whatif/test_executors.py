"""A study is carried out by any executor, and a worker that dies loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.planner.whatif.executors import RayExecutor
from meshwright.planner.whatif.run_study import Workers, run
from tests.planner.whatif.test_study import PRICE, study

ASKED = [{"cluster": f"{n}xa10g", "rent": PRICE} for n in (1, 2, 4, 8)]


def test_an_executor_gives_what_processes_of_this_machine_give() -> None:
    asked = study(offers=ASKED)
    alone = run(asked, processes=1)
    with ThreadPoolExecutor(2) as threads:
        elsewhere = run(asked, executor=threads)

    assert elsewhere.outcomes == alone.outcomes


def end_once(task: tuple[str, int], _: FigureStore) -> int:
    """End this process at the first try of task 2, as a kernel short of memory does."""
    folder, number = task
    mark = Path(folder) / "ended"
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def end_always(task: int, _: FigureStore) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


@pytest.mark.matrix
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    tasks = [(str(tmp_path), number) for number in range(6)]
    with Workers(2) as workers:
        found = dict(workers.results_of(end_once, tasks))
    assert found == {number: number * number for number in range(6)}
    with Workers(2) as workers, pytest.raises(MeshwrightError, match="memory is short"):
        list(workers.results_of(end_always, list(range(6))))


@pytest.fixture
def dask_cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.mark.matrix
def test_a_dask_cluster_of_two_workers_loses_nothing_with_one(
    dask_cluster: Any, tmp_path: Path
) -> None:
    asked = study(offers=ASKED)
    engine = f"dask:{dask_cluster.scheduler_address}"
    assert run(asked, executor=engine).outcomes == run(asked, processes=1).outcomes

    distributed = pytest.importorskip("distributed")
    with distributed.Client(dask_cluster.scheduler_address) as client:
        tasks = [(str(tmp_path), number) for number in range(6)]
        with Workers(2, client.get_executor(pure=False, retries=3)) as workers:
            found = dict(workers.results_of(end_once, tasks))
    assert found == {number: number * number for number in range(6)}


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_cluster")
def test_a_ray_cluster_of_two_workers_loses_nothing_with_one(tmp_path: Path) -> None:
    asked = study(offers=ASKED)
    assert run(asked, executor="ray").outcomes == run(asked, processes=1).outcomes

    tasks = [(str(tmp_path), number) for number in range(6)]
    with RayExecutor() as engine, Workers(2, engine) as workers:
        found = dict(workers.results_of(end_once, tasks))
    assert found == {number: number * number for number in range(6)}


@pytest.mark.parametrize("name", ["dask", "dask:", "slurm", "processes:4"])
def test_an_engine_that_is_unknown_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(DocumentError, match="or ray") as raised:
        run(study(offers=ASKED), executor=name)
    assert raised.value.path == "executor"
