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
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from meshwright.planner.system.safe_files import open_below

OWN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip
"""What each rank gets anew; all else of its environment was there when torch was imported."""
MESHWRIGHT = "MESHWRIGHT_"
LAUNCHER = "MESHWRIGHT_LAUNCHER"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""That the launcher gets, and ends us."""
IMPORTS = (
    "torch.distributed",
    "meshwright.runtime.launch.training_loop",
    "meshwright.runtime.resilience.in_memory_checkpoint",
    "meshwright.runtime.resilience.step_replay",
)
MOST_BYTES = 65536


class ForkedRank:
    """A rank that a zygote forks: what subprocess.Popen says of a process."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self.process = 0
        self.code: int | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 before it runs."""
        return self.process

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to it and the processes that it started."""
        if self.process:
            os.killpg(self.process, number)
        elif number == signal.SIGKILL:
            self._zygote.end()  # it may be about to begin

    def poll(self) -> int | None:
        """Return how it ended, as subprocess.Popen.poll does."""
        self._zygote.look()
        return self.code

    def wait(self) -> int:
        """Wait until it has ended."""
        while (code := self.poll()) is None:
            self._zygote.await_news()
        return code


class Zygote:
    """A launcher's side, while a `with` block lasts; the process starts with the first rank."""

    def __init__(self, imports: Sequence[str] = IMPORTS) -> None:
        """`imports` are modules that all ranks need."""
        self._imports = tuple(imports)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._ranks: list[ForkedRank] = []

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        inherits: Sequence[int] = (),
    ) -> ForkedRank:
        """Let a rank run rank_main with arguments; what it prints goes to its log."""
        self.warm(environment, log=log)
        assert self._socket is not None
        rank = ForkedRank(self)
        order = {
            "number": len(self._ranks),
            "arguments": list(arguments),
            "environment": dict(environment),
            "inherits": list(inherits),
        }
        self._ranks.append(rank)
        told = os.memfd_create("meshwright-rank")
        try:
            os.write(told, json.dumps(order).encode())
            with open_below(log, within=log.parents[1]) as out:
                descriptors = [told, out.fileno(), *inherits]
                with contextlib.suppress(BrokenPipeError):  # it is gone, which `look` finds
                    socket.send_fds(self._socket, [b"rank"], descriptors)
        finally:
            os.close(told)
        return rank

    def warm(self, environment: Mapping[str, str], *, log: Path) -> None:
        """Let the process be there, with an environment like that of ranks to come."""
        common = {
            name: value
            for name, value in environment.items()
            if name not in OWN and not name.startswith(MESHWRIGHT)
        }
        if self._socket is None or common != self._environment:
            self.end()
            self._begin(common, log)

    def look(self) -> None:
        """Take what the zygote tells; where it is gone, so are its ranks."""
        while self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            try:
                told = self._socket.recv(MOST_BYTES)
            except ConnectionResetError:
                told = b""
            if not told:
                self.end()
                return
            news = json.loads(told)
            rank = self._ranks[news["number"]]
            rank.process = news.get("process", rank.process)
            rank.code = news.get("code")

    def fileno(self) -> int:
        """Return what becomes readable when a rank starts or ends, once the first was started."""
        assert self._socket is not None
        return self._socket.fileno()

    def await_news(self) -> None:
        """Wait until the zygote tells something."""
        if self._socket is not None:
            select.select([self._socket], [], [], 1.0)

    def end(self) -> None:
        """End the zygote, and with it what still runs of its ranks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        for rank in self._ranks:
            rank.code = -signal.SIGKILL if rank.code is None else rank.code
        self._process, self._socket, self._ranks = None, None, []

    def _begin(self, environment: Mapping[str, str], log: Path) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, open_below(log.with_name("zygote.log"), within=log.parents[1]) as out:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "meshwright.runtime.launch.fork_server",
                    str(its.fileno()),
                    *self._imports,
                ],
                env={**environment, LAUNCHER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._socket, self._environment = ours, dict(environment)


def main() -> int:
    """Import what ranks need, then fork one for each request, and tell how each ends."""
    from meshwright.runtime.launch.rank_main import die_with_launcher  # noqa: PLC0415 - before torch is imported

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
            for rank, code in _ended(running):
                connection.send(json.dumps({"number": rank, "code": code}).encode())
        if connection in readable:
            told, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 16)
            if not told:
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


def _ended(running: dict[int, int]) -> list[tuple[int, int]]:
    """Return the ranks that have ended, by number, with what Popen calls their return codes."""
    found = []
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            break
        found.append((running.pop(process), os.waitstatus_to_exitcode(status)))
    return found


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
    rank.leave(code)


def _set_threads(environment: Mapping[str, str]) -> None:
    """Give operators as many threads as a rank's environment says, which libraries read before."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    sys.exit(main())
