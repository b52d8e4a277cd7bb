"""A zygote that is forked from a process that has imported torch, so that no rank imports it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.runtime.launch import fork_server as zygote
from meshwright.runtime.launch.fork_client import IMPORTS, LAUNCHER, Zygote
from meshwright.runtime.run.rank_exit import leave


class _Forked:
    """A process that waits to be a zygote, forked while its launcher has one thread."""

    def __init__(self, imports: Sequence[str]) -> None:
        self.connection, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            self._become(its, imports, launcher)
        its.close()

    def _become(self, its: socket.socket, imports: Sequence[str], launcher: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            warnings.resetwarnings()  # to a test they are errors
            # Of a test these are files of its own, and logs of ranks are descriptors 1 and 2.
            sys.stdout, sys.stderr = (
                os.fdopen(at, "w", buffering=1, closefd=False) for at in (1, 2)
            )
            os.environ[LAUNCHER] = str(launcher)
            sys.argv = ["zygote", str(its.detach()), *imports]
            code = zygote.main()
        except BaseException:
            traceback.print_exc()
        leave(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedZygote(Zygote):
    """The zygote of a launch in this process; a second one, for another environment, is started."""

    def __init__(self, imports: Sequence[str] = IMPORTS) -> None:
        super().__init__(imports)
        self._ready: _Forked | None = _Forked(imports)

    def _begin(self, environment: dict[str, str], log: Path) -> None:
        if self._ready is None:
            super()._begin(environment, log)
            return
        self._process = self._ready  # type: ignore[assignment]
        self._socket, self._environment = self._ready.connection, dict(environment)
        self._ready = None

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        if self._ready is not None:  # nobody wanted it
            self._ready.connection.close()
            self._ready.kill()
            self._ready.wait()
