"""Ranks are stood in for by small shell commands; who caused an end is decided on values alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from meshwright.runtime.launch import rank_processes as supervise
from meshwright.runtime.launch.rank_processes import (
    Exit,
    RunningRanks,
    first_cause,
    free_socket,
    is_timeout,
    last_lines,
)
from meshwright.runtime.run.run_folder import Failure
from tests.limits import PATIENCE_S


def failure(rank: int, kind: str, message: str = "", at: float = 0.0) -> Failure:
    return Failure(rank=rank, kind=kind, message=message, at_unix_s=at)


PEER = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("exits", "failures", "cause"),
    [
        pytest.param({2: -9}, [], 2, id="the only one"),
        pytest.param(
            {0: 1, 2: -9, 1: 1},
            [failure(0, "RuntimeError", PEER, 1.0), failure(1, "RuntimeError", PEER, 2.0)],
            2,
            id="a killed rank before those that miss it",
        ),
        pytest.param(
            {0: 1, 1: 1},
            [failure(0, "RuntimeError", PEER, 1.0), failure(1, "OutOfMemoryError", "tried", 2.0)],
            1,
            id="own trouble before trouble with peers, even if written later",
        ),
        pytest.param(
            {0: 1, 1: 1},
            [failure(1, "LaunchError", "nan", 1.0), failure(0, "LaunchError", "nan", 2.0)],
            1,
            id="the earliest of equals",
        ),
        pytest.param(
            {1: -6, 0: 1},
            [failure(1, "DistBackendError", "timeout", 3.0), failure(0, "ValueError", "x", 4.0)],
            0,
            id="an abort after a complaint about peers is still an echo",
        ),
        pytest.param({3: 7, 1: 1}, [], 3, id="in silence, the first that was seen"),
        pytest.param(
            {1: 1, 0: 1},
            [failure(1, "RuntimeError", PEER, 1.0)],
            0,
            id="an exit without a word before one that blames its peer",
        ),
        pytest.param(
            {1: 1, 0: 1},
            [failure(1, "DistBackendError", "wait timeout", 1.0)],
            0,
            id="the same, where the other waited in vain",
        ),
        pytest.param(
            {1: -6, 0: 1},
            [failure(0, "ValueError", "x", 4.0)],
            0,
            id="an abort without a word may be a library's, which lost a peer",
        ),
        pytest.param(
            {1: -6, 0: 1}, [failure(0, "RuntimeError", PEER, 4.0)], 1, id="an abort before an echo"
        ),
        pytest.param(
            {1: 1, 0: -11}, [failure(1, "ValueError", "x", 4.0)], 0, id="a crash of its own"
        ),
    ],
)
def test_the_cause_comes_before_its_echoes(
    exits: dict[int, int], failures: list[Failure], cause: int
) -> None:
    seen = [Exit(rank=rank, code=code) for rank, code in exits.items()]

    ended, _ = first_cause(seen, failures)

    assert ended.rank == cause


def test_a_rank_that_leaves_early_is_the_cause_where_all_others_complain() -> None:
    early = [Exit(rank=0, code=0)]
    bad = [Exit(rank=1, code=1)]

    assert first_cause(bad, [failure(1, "RuntimeError", PEER)], early=early)[0].rank == 0
    assert first_cause(bad, [failure(1, "ValueError", "x")], early=early)[0].rank == 1


def start(tmp_path: Path, scripts: list[str]) -> RunningRanks:
    """Start one shell per script, as ranks."""
    environments = [{**os.environ, "SCRIPT": script} for script in scripts]
    logs = [tmp_path / f"{rank}.log" for rank in range(len(scripts))]
    return RunningRanks(["/bin/sh", "-c", 'eval "$SCRIPT"'], environments, logs=logs)


def nothing() -> None:
    pass


def test_ranks_that_end_well_leave_their_words_in_their_logs(tmp_path: Path) -> None:
    with start(tmp_path, ["echo one", "echo two >&2"]) as ranks:
        bad = ranks.wait(meanwhile=nothing)

    assert bad == []
    assert [(tmp_path / f"{rank}.log").read_text() for rank in range(2)] == ["one\n", "two\n"]


def test_the_first_bad_end_is_seen_while_others_run(tmp_path: Path) -> None:
    with start(tmp_path, ["sleep 280", "exit 3", "sleep 280"]) as ranks:
        bad = ranks.wait(meanwhile=nothing)

    assert bad == [Exit(rank=1, code=3)]  # the others had not ended


def test_a_killed_rank_is_seen_as_such(tmp_path: Path) -> None:
    with start(tmp_path, ["kill -9 $$", "sleep 60"]) as ranks:
        bad = ranks.wait(meanwhile=nothing)

    assert [(ended.rank, ended.signal) for ended in bad] == [(0, "SIGKILL")]


def test_a_killed_rank_is_the_cause_and_nobody_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "SETTLE_S", PATIENCE_S)

    with start(tmp_path, ["sleep 3000", "kill -9 $$"]) as ranks:
        bad = ranks.wait(meanwhile=nothing)

    assert [(ended.rank, ended.signal) for ended in bad] == [(1, "SIGKILL")]


def test_an_end_is_noticed_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "POLL_S", PATIENCE_S)

    with start(tmp_path, [f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"]) as ranks:
        bad = ranks.wait(meanwhile=(tmp_path / "go").touch)

    assert bad == [Exit(rank=0, code=3)]


def test_leaving_ends_ranks_and_what_they_started(tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"

    with start(tmp_path, [script]):
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            time.sleep(0.02)

    assert gone(int((tmp_path / "child").read_text()))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ranks = start(tmp_path, [f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"])
    while not (tmp_path / "up").exists():
        time.sleep(0.02)

    ranks.end(grace_s=0.2)

    assert ranks.wait(meanwhile=nothing) == [Exit(rank=0, code=-signal.SIGKILL)]


def gone(pid: int) -> bool:
    """Wait until a process is dead, and say whether it is; a zombie is dead."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_the_socket_listens_and_is_inherited_by_nobody_unasked() -> None:
    descriptor, port = free_socket()
    try:
        assert port > 0
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_the_end_of_a_log_is_quoted_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n\n" % i for i in range(5000)) + b"caf\xe9")

    assert last_lines(log, 2) == "\n    line 4999\n    caf\ufffd"
    assert last_lines(tmp_path / "none") == ""


@pytest.mark.parametrize(
    "message",
    [
        "Timed out waiting 5000ms for recv operation to complete",
        "[gloo/transport/tcp/pair.cc:598] Application timeout caused pair closure",
    ],
)
def test_operations_under_way_with_one_that_timed_out_are_timeouts_too(message: str) -> None:
    assert is_timeout(Failure(rank=0, kind="RuntimeError", message=message, at_unix_s=0.0))
