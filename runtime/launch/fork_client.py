"""The launcher's side of a zygote: the requests to fork ranks, and ranks as processes.

`Zygote` starts `python -m meshwright.runtime.launch.fork_server`, which says what goes over the
socket between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from meshwright.planner.system.safe_files import open_below

OWN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip
"""Variables that each rank gets anew; all others were there when torch was imported."""


MESHWRIGHT = "MESHWRIGHT_"


LAUNCHER = "MESHWRIGHT_LAUNCHER"


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

    def send_signal(self, number: signal.Signals) -> None:
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
        request = os.memfd_create("meshwright-rank")
        try:
            os.write(request, json.dumps(order).encode())
            with open_below(log, within=log.parents[1]) as out:
                descriptors = [request, out.fileno(), *inherits]
                with contextlib.suppress(BrokenPipeError):  # it is gone, which `look` finds
                    socket.send_fds(self._socket, [b"rank"], descriptors)
        finally:
            os.close(request)
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
                message = self._socket.recv(MOST_BYTES)
            except ConnectionResetError:
                message = b""
            if not message:
                self.end()
                return
            news = json.loads(message)
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
