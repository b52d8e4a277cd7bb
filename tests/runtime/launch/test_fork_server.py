"""A process that forks ranks: they start, are killed and end as others do, and leave nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.runtime.launch.fork_client import ForkedRank, Zygote
from meshwright.runtime.launch.rank_processes import RunningRanks
from tests.limits import PATIENCE_S
from tests.runtime.rooms import ROOT

STANDS_IN = """
import os, signal, sys
from meshwright.runtime.launch import rank_main as rank
from meshwright.runtime.run.rank_exit import die_with_launcher

def main(arguments):
    die_with_launcher()
    print("rank", os.environ["RANK"], "of launcher", os.environ["MESHWRIGHT_LAUNCHER"])
    print("said in vain", file=sys.stderr, flush=True)
    if arguments[0] == "write":
        os.write(int(arguments[1]), b"from a rank")
    elif arguments[0] == "raise":
        raise ValueError("why it ends")
    elif arguments[0] == "wait":
        signal.pause()
    return int(arguments[-1])

rank.main = main
"""


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    """A zygote whose ranks stand in for those that train."""
    (tmp_path / "stands_in.py").write_text(STANDS_IN)
    (tmp_path / "logs").mkdir()
    with Zygote(imports=("stands_in",)) as one:
        yield one


def environment(folder: Path, rank: int = 0, **more: str) -> dict[str, str]:
    own = {"RANK": str(rank), "PYTHONPATH": f"{ROOT}:{folder}", "PYTHONSAFEPATH": "1"}
    return {**os.environ, **own, **more}


def log_of(folder: Path, rank: int = 0) -> Path:
    return folder / "logs" / f"rank-{rank:05}.log"


def started(zygote: Zygote, folder: Path, *arguments: str, **more: str) -> ForkedRank:
    rank = zygote.start(list(arguments), environment(folder, **more), log=log_of(folder))
    until(lambda: rank.poll() is not None or rank.pid)
    return rank


def until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_a_rank_has_its_own_environment_log_and_status(zygote: Zygote, tmp_path: Path) -> None:
    first = started(zygote, tmp_path, "end", "7", rank="0")
    assert first.wait() == 7
    assert log_of(tmp_path).read_text().startswith("rank 0 of launcher")
    parent = log_of(tmp_path).read_text().split()[4]

    second = zygote.start(["raise"], environment(tmp_path, 1), log=log_of(tmp_path, 1))

    assert second.wait() == 1
    said = log_of(tmp_path, 1).read_text()
    assert said.startswith(f"rank 1 of launcher {parent}")  # of the same one, forked again
    assert "ValueError: why it ends" in said


def test_a_rank_inherits_what_it_is_told_to(zygote: Zygote, tmp_path: Path) -> None:
    heard, told = os.pipe()
    rank = zygote.start(
        ["write", str(told), "0"], environment(tmp_path), log=log_of(tmp_path), inherits=[told]
    )

    assert rank.wait() == 0
    os.close(told)
    assert os.read(heard, 100) == b"from a rank"
    assert os.read(heard, 100) == b""  # nobody else has the other end
    os.close(heard)


def test_a_rank_that_is_killed_says_so_and_the_next_one_starts(
    zygote: Zygote, tmp_path: Path
) -> None:
    rank = started(zygote, tmp_path, "wait", "0")
    assert os.getpgid(rank.pid) == rank.pid

    rank.send_signal(signal.SIGKILL)

    assert rank.wait() == -signal.SIGKILL
    assert started(zygote, tmp_path, "end", "0").wait() == 0


def test_where_the_zygote_dies_its_ranks_do_and_another_takes_its_place(
    zygote: Zygote, tmp_path: Path
) -> None:
    rank = started(zygote, tmp_path, "wait", "0")
    until(lambda: "launcher" in log_of(tmp_path).read_text())
    parent = int(log_of(tmp_path).read_text().split()[4])

    os.kill(parent, signal.SIGKILL)

    assert rank.wait() == -signal.SIGKILL
    until(lambda: is_gone(rank.pid))
    assert started(zygote, tmp_path, "end", "0").wait() == 0


def test_an_environment_that_torch_would_read_needs_another_zygote(
    zygote: Zygote, tmp_path: Path
) -> None:
    parents = set()
    for threads in ("1", "1", "2"):
        assert started(zygote, tmp_path, "end", "0", OMP_NUM_THREADS=threads).wait() == 0
        parents.add(log_of(tmp_path).read_text().split()[4])

    assert len(parents) == 2


def test_nobody_is_left_at_the_end(zygote: Zygote, tmp_path: Path) -> None:
    command = ["python", "-m", "meshwright.runtime.launch.rank_main", "wait", "0"]
    logs = [log_of(tmp_path, rank) for rank in range(2)]
    environments = [environment(tmp_path, rank) for rank in range(2)]
    with RunningRanks(command, environments, logs=logs, zygote=zygote) as running:
        until(lambda: all(rank.poll() is None and rank.pid for rank in running._processes))
        processes = [rank.pid for rank in running._processes]
        os.kill(processes[1], signal.SIGKILL)
        bad = running.wait(meanwhile=lambda: None)

    assert [(one.rank, one.signal) for one in bad] == [(1, "SIGKILL")]
    until(lambda: all(map(is_gone, processes)))


def test_ranks_that_never_began_end_too(zygote: Zygote, tmp_path: Path) -> None:
    """The zygote still imports when the launcher leaves."""
    (tmp_path / "stands_in.py").write_text("import time; time.sleep(600)")
    command = ["python", "-m", "meshwright.runtime.launch.rank_main", "wait", "0"]
    running = RunningRanks(
        command, [environment(tmp_path)], logs=[log_of(tmp_path)], zygote=zygote, grace_s=0.0
    )

    running.end(grace_s=0.0)

    assert [rank.poll() for rank in running._processes] == [-signal.SIGKILL]
