"""What is measured of this machine is the same for all commands and ranks until it is stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.catalog import machine_figures
from meshwright.planner.catalog.local import of_cores
from meshwright.planner.errors import LaunchError

CPUS = """
import sys
from meshwright.planner.catalog.expressions import resolve_cluster
print(resolve_cluster("local:2").dump())
"""
QUICK = """
import json, os, time
time.sleep(0.1)
print(json.dumps({"flops": 1e11 + os.getpid(), "bytes_per_s": 2e10, "link_latency_s": 2e-5,
                  "link_bytes_per_s": 3e9, "call_s": 3e-7, "launch_s": 2e-7}))
"""
"""A measurement that differs from process to process."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache, into which a quick measurement goes."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_figures, "MEASURE", QUICK)
    yield tmp_path
    machine_figures.machine_figures.cache_clear()


def another_process() -> machine_figures.MachineFigures:
    """Return the figures as a process finds them that has asked for none yet."""
    machine_figures.machine_figures.cache_clear()
    return machine_figures.machine_figures()


def rewrite(change: Callable[[dict[str, Any]], Any]) -> None:
    file = machine_figures.figures_file()
    known = json.loads(file.read_text())
    change(known)
    file.write_text(json.dumps(known))


@pytest.mark.usefixtures("cache")
def test_ranks_that_start_together_plan_for_the_same_cluster() -> None:
    command = [sys.executable, "-c", CPUS]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    clusters = [rank.communicate()[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "measured 20" in clusters[0]
    assert len(set(clusters)) == 1


def test_figures_are_measured_once(cache: Path) -> None:
    first = another_process()

    assert another_process() == first
    assert [path.suffix for path in sorted((cache / "machine").iterdir())] == [".json", ".lock"]
    assert datetime.now(UTC) - datetime.fromisoformat(first.measured) < timedelta(minutes=10)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "change",
    [
        lambda known: known.update(measured="2020-01-01T00:00:00+00:00"),
        lambda known: known.update(measured="2999-01-01T00:00:00+00:00"),
        lambda known: known.update(measured="2026-01-01T00:00:00"),
        lambda known: known.update(measured="yesterday"),
        lambda known: known.update(flops=-1.0),
        lambda known: known.pop("flops"),
    ],
)
def test_figures_that_do_not_count_are_measured_again(
    change: Callable[[dict[str, Any]], Any],
) -> None:
    first = another_process()
    rewrite(change)

    again = another_process()

    assert again.flops > 1e11
    assert again.memory_bytes > first.memory_bytes / 2
    assert another_process() == again


@pytest.mark.usefixtures("cache")
def test_memory_that_others_take_changes_no_seconds() -> None:
    first = another_process()
    rewrite(lambda known: known.update(memory_bytes=2**20))

    again = another_process()

    assert again == first.model_copy(update={"memory_bytes": again.memory_bytes})
    assert again.memory_bytes > first.memory_bytes / 2
    assert another_process() == again


@pytest.mark.usefixtures("cache")
def test_a_machine_that_was_busy_when_it_was_measured_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (18.2, 0.0, 0.0))
    busy = another_process()
    machine_figures.figures_file().unlink()
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 0.0, 0.0))
    idle = another_process()

    told = " at load 18 on 2 cores: this figure means little"
    assert busy.date.endswith(told)
    assert told in of_cores(busy, cores=2, ranks=2).groups[0].accelerator.sources["peak_flops"]
    assert "load" not in idle.date


@pytest.mark.usefixtures("cache")
def test_half_a_file_is_measured_again() -> None:
    another_process()
    file = machine_figures.figures_file()
    file.write_text(file.read_text()[:40])

    again = another_process()

    assert another_process() == again


@pytest.mark.usefixtures("cache")
def test_another_machine_has_figures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = another_process()
    file = machine_figures.figures_file()
    monkeypatch.setattr("platform.node", lambda: "elsewhere")

    there = another_process()

    assert machine_figures.figures_file() != file
    assert file.exists()
    assert there is not here


def test_without_a_cache_the_machine_is_measured_all_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("no folder")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(cache / "file"))

    assert of_cores(another_process(), cores=2, ranks=2).devices == 2
    assert (cache / "file").read_text() == "no folder"


@pytest.mark.usefixtures("cache")
def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    lock = machine_figures.figures_file().with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    lock.symlink_to(tmp_path / "elsewhere")

    another_process()

    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("cache")
def test_a_machine_that_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_figures, "MEASURE", "raise SystemExit(3)")

    with pytest.raises(LaunchError, match="could not be measured"):
        another_process()
    assert not machine_figures.figures_file().exists()


def test_what_is_measured_is_in_the_range_of_processors() -> None:
    core = another_process()

    assert 1e9 < core.flops < 1e13
    assert 1e8 < core.bytes_per_s < 1e12
    assert 2e-8 < core.launch_s < 1e-5
    assert 2e-8 < core.call_s < 1e-5
    assert 1e-7 < core.link_latency_s < 1e-2
    assert 1e7 < core.link_bytes_per_s < 1e12


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert 0 < machine_figures.available_bytes() <= total


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")

    assert machine_figures.cache_folder() == Path("/somewhere/meshwright")
