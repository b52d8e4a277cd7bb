"""A zygote: a process of a node that has imported torch once, and becomes ranks by forking.

The import is most of what a restart of ranks takes; a fork takes milliseconds.  A zygote uses no
device, runs no operator and so has no threads that a fork would lose.  It ends with its launcher,
and ranks end with it.

    launcher  -> zygote     a request: what a rank runs, with its files, as open descriptors
    zygote    -> launcher   {"number", "process"} when it runs, {"number", "code"} when it has ended
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from meshwright.runtime.launch.fork_client import LAUNCHER, MOST_BYTES
from meshwright.runtime.run.rank_exit import die_with_launcher, leave

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the launcher gets, and then ends this process."""


def main() -> int:
    """Import what ranks need, then fork one for each request, and tell how each ends."""
    die_with_launcher()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    number_of_ours, *imports = sys.argv[1:]
    connection = socket.socket(fileno=int(number_of_ours))
    _import(imports)
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    watched: list[socket.socket | int] = [connection, ended]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if ended in readable:
            os.read(ended, MOST_BYTES)
            for rank, code in _ended_ranks(running):
                connection.send(json.dumps({"number": rank, "code": code}).encode())
        if connection in readable:
            message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 16)
            if not message:
                return 0
            order, out, *inherits = descriptors
            with os.fdopen(order, "rb") as file:
                file.seek(0)
                asked = json.load(file)
            zygote, process = os.getpid(), os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (connection.detach(), ended, wakes):
                    os.close(descriptor)
                _become(asked, out, inherits, zygote=zygote)
            with contextlib.suppress(OSError):  # it may have done so, or have ended
                os.setpgid(process, process)
            running[process] = asked["number"]
            for descriptor in (out, *inherits):
                os.close(descriptor)
            told_back = {"number": asked["number"], "process": process}
            connection.send(json.dumps(told_back).encode())


def _import(modules: Sequence[str]) -> None:
    """Import what every rank does, and leave it where forks share it."""
    for module in modules:
        importlib.import_module(module)
    if threading.active_count() > 1:
        raise RuntimeError(f"imports have started threads: {threading.enumerate()}")
    gc.collect()
    gc.freeze()


def _ended_ranks(running: dict[int, int]) -> list[tuple[int, int]]:
    """Return the ranks that have ended, by number, with what Popen calls their return codes."""
    ranks = []
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            break
        ranks.append((running.pop(process), os.waitstatus_to_exitcode(status)))
    return ranks


def _become(
    asked: Mapping[str, Any], out: int, inherits: Sequence[int], *, zygote: int
) -> NoReturn:
    """Be the rank that was asked for, in this forked process, and end as it does."""
    from meshwright.runtime.launch import rank_main as rank  # noqa: PLC0415 - imported before

    code = 1
    try:
        os.setpgid(0, 0)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        # Descriptors have the numbers that the environment names; what is moved was ours alone.
        for source, target in zip(inherits, asked["inherits"], strict=True):
            os.dup2(source, target)
        environment = {**asked["environment"], LAUNCHER: str(zygote)}
        os.environ.clear()
        os.environ.update(environment)
        _set_threads(environment)
        code = rank.main(asked["arguments"])
    except BaseException:
        traceback.print_exc()
    leave(code)


def _set_threads(environment: Mapping[str, str]) -> None:
    """Give operators as many threads as a rank's environment says, which libraries read before."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    sys.exit(main())
