"""What is said of this machine before ranks start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.planner.documents.document import read
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch import preflight

PLAN = read(Plan, str(Path(__file__).parents[3] / "plans" / "demo-4m-on-local" / "plan.yaml"))


def warnings(monkeypatch: pytest.MonkeyPatch, *, cores: int, load: float) -> list[str]:
    monkeypatch.setattr(preflight, "cores", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    return preflight.check_devices(PLAN, "cpu", {0: 0, 1: 1})


def test_a_machine_with_other_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings(monkeypatch, cores=2, load=1.9) == []
    (said,) = warnings(monkeypatch, cores=2, load=17.6)
    assert "(load 18 on 2 cores)" in said


def test_ranks_that_share_cores_are_named_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (said,) = warnings(monkeypatch, cores=1, load=0.0)
    assert said.startswith("2 ranks share 1 cores")
    monkeypatch.setattr(preflight, "RANKS_PER_CORE", 1)
    with pytest.raises(LaunchError, match="this machine has no accelerator and 1 cores"):
        warnings(monkeypatch, cores=1, load=0.0)
