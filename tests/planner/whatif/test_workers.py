"""Processes of a study end with it at once, whatever they are at, and however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import PATIENCE_S

ROOT = Path(__file__).parents[3]
TASKS = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from meshwright.planner.whatif.run_study import Workers

def work(task, store):
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep({PATIENCE_S})

if __name__ == "__main__":
    # Ignored where a shell starts this in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Workers(2) as workers:
        list(workers.results_of(work, range(5)))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has no workers")
@pytest.mark.long("SIGKILL", "SIGINT")
@pytest.mark.parametrize("ended", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_processes_end_with_the_one_that_started_them(ended: str, tmp_path: Path) -> None:
    script, begun = tmp_path / "tasks.py", tmp_path / "begun"
    script.write_text(TASKS)
    begun.mkdir()
    study = subprocess.Popen([sys.executable, script, begun], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE_S / 2
    while len(list(begun.iterdir())) < 2:
        assert time.monotonic() < until and study.poll() is None
        time.sleep(0.05)

    study.send_signal(getattr(signal, ended))

    _, said = study.communicate(timeout=PATIENCE_S / 2)  # until none of them holds it
    assert study.returncode != 0
    # Python's tracker of semaphores, the last of them, says which were left.
    assert ended == "SIGKILL" or "leaked" not in said
    workers = [int(path.name) for path in begun.iterdir()]
    while any(map(is_alive, workers)):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Tell whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
