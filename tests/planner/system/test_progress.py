"""Calls from Python say what takes long on stderr, unless somebody listens already."""

from __future__ import annotations

import time

import pytest

from meshwright.planner.system.progress import progress_lines, progress_on_stderr, running


def work() -> None:
    with progress_on_stderr(silent_s=0.01), running("prices layers"):
        time.sleep(0.1)


def test_work_is_written_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    work()

    assert capsys.readouterr().err == "meshwright: prices layers\n"


def test_a_listener_hears_it_in_place_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    with progress_lines(heard.append, silent_s=0.01):
        work()

    assert heard == ["prices layers"] and capsys.readouterr().err == ""
