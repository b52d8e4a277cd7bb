"""Ranks as child processes: started together, watched, and ended together.

The first rank that ends badly ends all.  A rank never outlives the launcher: it asks the kernel to
be killed with its parent, and the launcher kills what still runs whenever it leaves.

`supervise` is the whole of it, for one node of several: what launches a plan and what measures a
machine both go through it.  What rank 0 prints goes to the launcher's own console too.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from meshwright.planner.system.safe_files import open_below
from meshwright.runtime.launch.fork_client import ForkedRank, Zygote
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.addresses import listening_socket
from meshwright.runtime.run.authenticated_channel import without_secret
from meshwright.runtime.run.environment import place_of
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import Failure, log_text

POLL_S = 0.05
SETTLE_S = 0.5
"""After a bad end, wait this long for others: the first to be seen need not be the first to end.
Not where it was killed from outside, which no other rank has caused."""
GRACE_S = 5.0
"""From SIGTERM to SIGKILL."""

_OF_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
_PEER_IS_SILENT = (
    "Timed out waiting",
    "Application timeout caused pair closure",  # of operations under way with one that timed out
    "Operation timed out",
    "collective operation timeout",
    "wait timeout",
)
_PEER_IS_GONE = ("closed by peer", "Connection reset", "Broken pipe", "Connection refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End of a rank: an exit code, or minus the signal that killed it."""

    rank: int
    code: int

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed the rank.

        >>> Exit(rank=0, code=-9).signal
        'SIGKILL'
        """
        return signal.Signals(-self.code).name if self.code < 0 else None

    @property
    def is_cause(self) -> bool:
        """True if no other rank's end can have caused it: libraries abort, and do not kill.

        >>> Exit(rank=0, code=-9).is_cause, Exit(rank=0, code=-6).is_cause
        (True, False)
        """
        return self.code == -signal.SIGKILL


class RunningRanks:
    """The running ranks of one launch; leaving the `with` block ends whatever still runs."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        logs: Sequence[Path],
        rank_0_inherits: Sequence[int] = (),
        rank_0_shown: bool = False,
        grace_s: float = GRACE_S,
        zygote: Zygote | None = None,
    ) -> None:
        """Start them; with `rank_0_shown` what the first one prints is shown here too.

        Whoever still runs at the end has `grace_s` from SIGTERM to SIGKILL.
        A `zygote` forks them: the command is then Python's of runtime.launch.rank_main, and none is
        shown.
        """
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        self._exits: dict[int, Exit] = {}
        self._console: Console | None = None
        self._ends = select.poll()
        """Descriptors that become readable when a rank ends."""
        self._descriptors: list[int] = []
        try:
            for rank, (environment, log) in enumerate(zip(environments, logs, strict=True)):
                shown = rank == 0 and rank_0_shown
                inherits = rank_0_inherits if rank == 0 else ()
                if zygote is not None:
                    arguments = command[command.index("meshwright.runtime.launch.rank_main") + 1 :]
                    self._processes.append(
                        zygote.start(arguments, environment, log=log, inherits=inherits)
                    )
                    continue
                with open_below(log, within=log.parents[1]) as out:
                    process = subprocess.Popen(
                        command,
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if shown else out,
                        stderr=subprocess.PIPE if shown else subprocess.STDOUT,
                        pass_fds=inherits,
                        # Ctrl-C in the terminal reaches the launcher alone, which ends us.
                        start_new_session=True,
                    )
                self._processes.append(process)
                self._watch(process)
                if shown:
                    assert process.stdout is not None and process.stderr is not None
                    self._console = Console(process.stdout, process.stderr, log)
            if zygote is not None:
                self._ends.register(zygote, select.POLLIN)
        except BaseException:
            self.end(grace_s=0.0)
            raise

    def __enter__(self) -> RunningRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(grace_s=self._grace_s)

    def wait(self, *, meanwhile: Callable[[], None]) -> list[Exit]:
        """Wait until all ranks ended well, or return those that ended badly, as they were seen."""
        while self._look() and not self._bad():
            meanwhile()
            self._await_end()
        if self._bad():
            deadline = time.monotonic() + SETTLE_S
            while self._look() and time.monotonic() < deadline and not self._has_cause:
                meanwhile()  # another node may say why before all of ours have ended
                self._await_end()
        meanwhile()
        return self._bad()

    def left_well(self) -> list[Exit]:
        """Return the ranks that have ended with code 0, as they were seen."""
        return [seen for seen in self._exits.values() if seen.code == 0]

    def end(self, *, grace_s: float) -> None:
        """End what still runs: ask first, kill after the grace."""
        try:
            self._send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self._look() and time.monotonic() < deadline:
                self._await_end()
        finally:
            # Reached also when a second Ctrl-C cuts the grace short.
            self._send_signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors, self._ends = [], select.poll()
            if self._console is not None:
                self._console.finish()

    def _look(self) -> bool:
        """Note who ended; say whether somebody still runs."""
        for rank, process in enumerate(self._processes):
            if rank not in self._exits and (code := process.poll()) is not None:
                self._exits[rank] = Exit(rank=rank, code=code)
        return len(self._exits) < len(self._processes)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Let the end of a process be noticed when it comes, where the system tells."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(process.pid)
                self._descriptors.append(descriptor)
                self._ends.register(descriptor, select.POLLIN)

    def _await_end(self) -> None:
        """Wait until a rank ends, and POLL_S at most."""
        for descriptor, _ in self._ends.poll(1e3 * POLL_S):
            if descriptor in self._descriptors:
                self._ends.unregister(descriptor)

    @property
    def _has_cause(self) -> bool:
        return any(seen.is_cause for seen in self._exits.values())

    def _bad(self) -> list[Exit]:
        return [seen for seen in self._exits.values() if seen.code != 0]

    def _send_signal(self, number: signal.Signals) -> None:
        """Send a signal to each rank that runs, and to the processes that it started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    if isinstance(process, ForkedRank):
                        process.send_signal(number)
                    else:
                        os.killpg(process.pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEnd:
    """Why the ranks of this node ended: who was seen, who caused it, what that rank said."""

    seen: tuple[Exit, ...]
    cause: Exit
    failure: Failure | None


def supervise(
    command: Sequence[str],
    ranks: Sequence[int],
    environment: Callable[[int, str], Mapping[str, str]],
    *,
    folder: Path,
    world: int,
    rendezvous: Rendezvous,
    leads: bool,
    shared: Mapping[str, str] | None = None,
    rank_0_shown: bool = False,
    grace_s: float = GRACE_S,
    zygote: Zygote | None = None,
    refresh: Callable[[], None],
) -> BadEnd | None:
    """Run this node's ranks to their end; None if all ended well, and no rank is left either way.

    `ranks` are their numbers among the `world` of all nodes, and `environment` has what one of
    them gets beside `shared`, given the port where they meet; the node that `leads` has rank 0.
    `refresh` is called while they run; with `rank_0_shown` the console has what rank 0 prints.
    Where one ends badly the others have `grace_s` from SIGTERM to SIGKILL.
    Where a rank only lost a peer, the reason that another node gives within some seconds is raised.
    """
    with contextlib.ExitStack() as held:
        listening = None
        if leads:
            listening, _ = free_socket(rendezvous.address)
            held.callback(os.close, listening)
        joined = {**rendezvous.environment(ranks=world, listening=listening), **(shared or {})}
        environments = [
            {**without_secret(os.environ), **environment(rank, joined["MASTER_PORT"]), **joined}
            for rank in ranks
        ]

        def meanwhile() -> None:
            refresh()
            rendezvous.check()

        started = held.enter_context(
            RunningRanks(
                command,
                environments,
                logs=[run.log_file(folder, rank) for rank in ranks],
                rank_0_inherits=[] if listening is None else [listening],
                rank_0_shown=rank_0_shown and leads,
                grace_s=grace_s,
                zygote=zygote,
            )
        )
        bad = started.wait(meanwhile=meanwhile)
        left = started.left_well()
    if not bad:
        return None
    early = [
        replace(ended, rank=rank)
        for ended in left
        if not place_of(run.record_file(folder, rank := ranks[ended.rank])).exists()
        and not place_of(run.handed_over(folder, rank)).exists()
    ]
    bad = [replace(ended, rank=ranks[ended.rank]) for ended in bad]
    cause, failure = first_cause(bad, run.read_failures(folder, world), early=early)
    if failure is not None and blames_a_peer(failure):
        # Another node knows more: it is about to say so.
        rendezvous.await_reason()
    return BadEnd(seen=tuple(bad), cause=cause, failure=failure)


def first_cause(
    exits: Sequence[Exit], failures: Sequence[Failure], *, early: Sequence[Exit] = ()
) -> tuple[Exit, Failure | None]:
    """Return the end that caused the others, with what that rank said of it.

    A rank that was killed says nothing, and its peers complain of lost connections.  So a signal
    that no library sends itself comes first, then words of the rank's own, then ends without words,
    as they were seen, and complaints about peers last.  Ranks that left `early`, with code 0 and
    nothing done, count only where all others complain.
    """
    failure_of = {failure.rank: failure for failure in failures}

    def evidence(place: int) -> tuple[int, float]:
        ended = exits[place]
        failure = failure_of.get(ended.rank)
        if failure is None:
            return (0 if ended.code < 0 and ended.code != -signal.SIGABRT else 2), place
        echoes = blames_a_peer(failure) or is_timeout(failure)
        return (3 if echoes else 1), failure.at_unix_s

    first = min(range(len(exits)), key=evidence)
    if early and evidence(first)[0] == 3:
        return early[0], None
    return exits[first], failure_of.get(exits[first].rank)


def blames_a_peer(failure: Failure) -> bool:
    """Say whether a failure is the echo of another rank's end."""
    return failure.kind in _OF_PEERS or any(sign in failure.message for sign in _PEER_IS_GONE)


def is_timeout(failure: Failure) -> bool:
    """Say whether a rank gave up waiting for another."""
    return any(sign in failure.message for sign in _PEER_IS_SILENT)


def free_socket(address: str = "127.0.0.1") -> tuple[int, int]:
    """Return a listening socket at an address of this machine as its descriptor, and its port.

    Rank 0 inherits the socket itself, so that nobody can take the port before it listens.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = listening_socket(family, (address, 0))
    port = listening.getsockname()[1]
    return listening.detach(), port


def log_end(log: Path) -> str:
    """Return a sentence that has the end of a log, behind another one; nothing for an empty log.

    >>> log_end(Path("/nowhere/rank-00000.log"))
    ''
    """
    text = last_lines(log)
    return f". The end of {log}:{text}" if text else ""


def last_lines(log: Path, count: int = 12) -> str:
    """Return the end of a log, each line indented."""
    lines = [line for line in log_text(log).splitlines() if line.strip()][-count:]
    return "".join(f"\n    {line[:300]}" for line in lines)


CHUNK_BYTES = 1 << 16


LAST_WORDS_S = 5.0


"""Seconds to wait for what a process that has ended left in its pipe."""


class Console:
    """Copies a child's output and errors to its log and to this process's own, as they come."""

    def __init__(self, output: IO[bytes], errors: IO[bytes], log: Path) -> None:
        self._log = log
        self._threads = [
            threading.Thread(target=self._copy, args=(pipe, name), daemon=True)
            for pipe, name in ((output, "stdout"), (errors, "stderr"))
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all that was written is shown; what its own children still write is not."""
        for thread in self._threads:
            thread.join(timeout=LAST_WORDS_S)

    def _copy(self, pipe: IO[bytes], name: str) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with pipe, open_below(self._log, within=self._log.parents[1], append=True) as log:
            while part := pipe.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
                # A full disk costs nobody the console, and a console that is gone not the log.
                with contextlib.suppress(OSError):
                    log.write(part)
                with contextlib.suppress(OSError, ValueError):
                    stream = getattr(sys, name)
                    stream.write(decoder.decode(part))
                    stream.flush()
