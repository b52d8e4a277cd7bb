"""The book of plans: what is solved ahead is what would be solved then, and is looked up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.launch import fallback_plans as books
from meshwright.launch.attempt import run_attempt
from meshwright.launch.fallback_plans import (
    NICE,
    FallbackPlans,
    FallbackSolver,
    fallback,
    sizes,
    solve_fallbacks,
)
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.planner.documents.document import write
from meshwright.planner.documents.plan import PlannedModel
from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run.launch_options import LaunchRun
from tests.limits import PATIENCE_S
from tests.runtime.rooms import MODEL, ROOT, plan_of


def planned(folder: Path, *, cluster: str = "4xa10g", data: int = 4) -> LaunchablePlan:
    write(MODEL, folder / "model.yaml")
    source = str(folder / "model.yaml")
    model = PlannedModel(name="tiny", source=source, digest=MODEL.digest)
    plan = plan_of(data=data).model_copy(update={"model": model, "cluster": cluster})
    write(plan, folder / "plan.yaml")
    return LaunchablePlan.read(str(folder / "plan.yaml"), None)


def test_what_is_lost_is_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, run = planned(tmp_path), LaunchRun(checkpoint=tmp_path)
    assert sizes(fit) == [(3, None), (2, None)]
    (entry,) = solve_fallbacks(fit, tmp_path, [(1, None)])
    assert (entry.devices, entry.left) == (1, 1)
    assert entry.step_s > 0
    assert entry.memory_bytes > MODEL.parameters * 4

    known, solved = (fallback(fit, left, run, quiet=True) for left in (1, 2))

    assert (known.source, known.plan.digest, known.path) == ("book", entry.plan, entry.path)
    assert solved.source == "solved"
    assert solved.plan.mesh.devices <= 2  # of so small a model one device may be faster
    assert fallback(fit, 2, run, quiet=False).source == "book"
    assert "found in" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["another plan", "another left", "a changed plan", "half"])
@pytest.mark.long("half", "another left")
def test_what_is_of_something_else_is_solved_again(tmp_path: Path, change: str) -> None:
    fit = planned(tmp_path)
    (entry,) = solve_fallbacks(fit, tmp_path, [(1, None)])
    wanted, left, file = fit.plan, 1, tmp_path / "book" / "with-1.json"
    if change == "another plan":
        wanted = wanted.model_copy(update={"global_batch": 16})
    elif change == "another left":
        left = 2
        file.rename(file.with_name("with-2.json"))
    elif change == "a changed plan":
        plan = Path(entry.path)
        plan.write_text(plan.read_text().replace("timeout_s: ", "timeout_s: 1"))
    else:
        file.write_text(file.read_text()[:40])

    assert FallbackPlans(tmp_path).entry(wanted, left) is None


def test_nodes_are_lost_whole_and_devices_one_by_one(tmp_path: Path) -> None:
    many = planned(tmp_path, cluster="12x1xa10g", data=4)
    assert sizes(many) == [(11, None), (10, None), (8, None), (4, None)]


@pytest.mark.matrix
def test_a_device_less_on_each_node_is_in_the_book(tmp_path: Path) -> None:
    fit = planned(tmp_path, cluster="2x2xa10g", data=4)
    assert sizes(fit) == [(1, None), (2, 1)]

    node, device = solve_fallbacks(fit, tmp_path, sizes(fit))

    assert FallbackPlans(tmp_path).entry(fit.plan, 2, 1) == device
    assert FallbackPlans(tmp_path).entry(fit.plan, 2) is None
    smaller = fallback(fit, 2, LaunchRun(checkpoint=tmp_path), each=1, quiet=True)
    assert (smaller.source, smaller.plan.digest) == ("book", device.plan)
    assert (smaller.nodes, [tier.devices for tier in smaller.machine.tiers]) == (2, [2])
    assert node.path != device.path


def test_a_process_of_low_priority_fills_it_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits no more is passed over; a book that is full starts no process."""
    fit = planned(tmp_path)
    run = LaunchRun(checkpoint=tmp_path, output=tmp_path / "out")
    (tmp_path / "out").mkdir()
    started: list[list[str]] = []
    monkeypatch.setattr(books, "FEWER", (3,))
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        started.append(command)
        return real([sys.executable, "-c", "import time; time.sleep(1e9)"], **options)

    monkeypatch.setattr(books.subprocess, "Popen", popen)
    with FallbackSolver(fit, run) as keeper:
        keeper.begin()
        keeper.begin()
        process = keeper._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None
    (command,) = started
    assert command[1:] == ["-m", "meshwright.launch.fallback_plans", fit.path, str(tmp_path), "1"]

    solve_fallbacks(fit, tmp_path, [(1, None)])
    with FallbackSolver(fit, run) as keeper:
        keeper.begin()
    assert len(started) == 1


@pytest.mark.matrix
def test_the_process_fills_the_book(tmp_path: Path) -> None:
    fit = planned(tmp_path)
    program = (
        "import os, sys\n"
        "from meshwright import book\n"
        f"sys.argv = ['book', {fit.path!r}, {str(tmp_path)!r}, '3,2']\n"
        "code = book.main()\n"
        "print(os.nice(0))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == str(NICE)
    assert all(FallbackPlans(tmp_path).entry(fit.plan, *one) is not None for one in sizes(fit))


def test_a_plan_that_changes_under_a_run_is_refused_at_the_restart(tmp_path: Path) -> None:
    fit = planned(tmp_path)
    path = Path(fit.path)
    again = Launch(fit.path, LaunchRun(checkpoint=tmp_path), again=True)
    training = fit.plan.training.model_copy(update={"learning_rate": 0.5})
    write(fit.plan.model_copy(update={"training": training}), path)

    with pytest.raises(LaunchError, match=r"plan.yaml: has changed since the run began"):
        run_attempt(fit, again)
