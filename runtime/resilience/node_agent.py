"""An agent: what a launcher is to the launchers of other nodes for as long as a run lives.

It tells them twice a second how it stands, hears them, and reads and writes epochs
(`runtime.resilience.membership` says what follows from all that).  Messages are datagrams with a
code by the job's secret, of which only newer ones of the same run count; epochs are files in the
folder of checkpoints, each number taken once.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.planner.documents.document import json_line, read_text
from meshwright.planner.documents.events import Drift
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import folder_within, replace_file
from meshwright.runtime.checkpoint import object_store
from meshwright.runtime.resilience.faulty_nodes import (
    MOST_FAULTS,
    FaultRegister,
    identity_of,
    sound_first,
)
from meshwright.runtime.resilience.membership import (
    Agent,
    Epoch,
    Held,
    Look,
    Over,
    Proposal,
    Quit,
    Roster,
    Standing,
    State,
)
from meshwright.runtime.resilience.replication import KeptCopies
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.resilience.straggler_detector import StagePace
from meshwright.runtime.run.addresses import listening_socket
from meshwright.runtime.run.authenticated_channel import job_secret
from meshwright.runtime.run.node_rank import NodeRank
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.rendezvous import NodeLeft, Rendezvous

TELL_S = 0.5
LOOK_S = 0.1
RETURN_S = 60.0
"""Seconds that agents whose ranks have ended wait for the others."""
ROOM_S = 30.0
"""Seconds in which an epoch is written again and again to a disk that is full."""
ANSWERS_S = 1.5
"""Seconds that an agent joining a run that may be alive waits for one of its members."""
FAREWELLS = 3
MOST_BYTES = 60_000
CODE_BYTES = 32
_FILE = re.compile(r"epoch-(\d{8})\.json")


class EpochOver(NodeLeft):
    """The epoch cannot train any more: members are lost, or have ended."""

    def __init__(self, why: Quit) -> None:
        super().__init__(why.why)
        self.lost = why.lost


class RunOver(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """The run is over on all other nodes."""


class Register:
    """Epochs in a folder, or an object store, that all nodes share."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the checkpoints, or their spool where a store is named."""
        self._folder = folder
        self._store = object_store.store_of(folder)

    def newest(self) -> Epoch | None:
        """Return the epoch with the highest number."""
        if self._store is not None:
            names = list(self._store.sizes("epochs"))
        else:
            names = [file.name for file in self._files().glob("epoch-*.json")]
        numbers = [int(match[1]) for name in names if (match := _FILE.fullmatch(name))]
        return self._read(max(numbers)) if numbers else None

    def write_if_free(self, epoch: Epoch) -> bool:
        """Write an epoch if its number is free; say whether it was."""
        if self._store is not None:
            object_store.send_book(self._folder)  # that others find its plan
            return self._store.create(json_line(epoch), f"epochs/{self._file(epoch.number).name}")
        new = self._files() / f".new-{secrets.token_hex(8)}"
        replace_file(json_line(epoch), new)
        try:
            os.link(new, self._file(epoch.number))
        except FileExistsError:
            return False
        finally:
            new.unlink()
        return True

    def _files(self) -> Path:
        return folder_within(self._folder, "epochs")

    def _file(self, number: int) -> Path:
        return self._files() / f"epoch-{number:08}.json"

    def _read(self, number: int) -> Epoch:
        file = self._file(number)
        try:
            if self._store is None:
                return Epoch.model_validate_json(read_text(file))
            epoch = Epoch.model_validate_json(self._store.text(f"epochs/{file.name}"))
            if epoch.plan is not None and not Path(epoch.plan).exists():
                object_store.fetch_book(self._folder)
            return epoch
        except ValueError as error:
            raise LaunchError(f"{file}: is no epoch of a run; remove it: {error}") from None


class Sockets:
    """An agent's sockets for messages and copies; a port reserved for ranks that it will lead."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.heard = socket.socket(family, socket.SOCK_DGRAM)
        self._kept = socket.socket(family, socket.SOCK_STREAM)
        self.copies = listening_socket(family, (address, 0))
        # Whoever listens here later says the same, and nobody else gets the port.
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.heard.bind((address, 0))
        self._kept.bind((address, 0))
        self.heard.setblocking(False)

    def agent(self, node: int) -> Agent:
        """Return what others know of the agent."""
        host, port, *_ = self.heard.getsockname()
        return Agent(
            node=node,
            start=secrets.token_hex(8),
            host=host,
            port=port,
            meet_port=self._kept.getsockname()[1],
            copies_port=self.copies.getsockname()[1],
        )

    def close(self) -> None:
        """Give all ports back."""
        self.heard.close()
        self.copies.close()
        self._kept.close()


@contextlib.contextmanager
def agent_of(
    node_rank: NodeRank,
    folder: Path,
    *,
    members: int,
    output: str,
    say: Callable[[str], object] = print,
    meanwhile: Callable[[Epoch | None], None] = lambda newest: None,
) -> Iterator[NodeAgent]:
    """Join a run as one of its agents: with the others that start, or as a spare of one that lives.

    The first `members` nodes are those of its first epoch.  `folder` is that of the checkpoints,
    and `output` is the run's where node 0 says so.  While it waits for the others, `meanwhile`
    raises what else ends this, given the newest epoch of a run whose agents do not answer.
    """
    secret = job_secret(os.environ)
    register = Register(folder)
    newest = register.newest()
    with contextlib.ExitStack() as held:
        if newest is not None:
            sockets = Sockets(_address_towards(newest.members[0]))
            agent = NodeAgent(
                Roster(newest.run, sockets.agent(node_rank.node)), sockets, register, secret
            )
            agent.roster.adopt(newest, time.monotonic())
            with agent:
                if agent.is_answered():
                    yield agent
                    return
        with Rendezvous(
            node_rank, secret=secret, meanwhile=lambda: meanwhile(newest)
        ) as rendezvous:
            sockets = Sockets(rendezvous.address)
            own = sockets.agent(node_rank.node)
            introduction = {"agent": own.model_dump(), "output": output, "members": members}
            introductions = rendezvous.all_gather(introduction)
            agents = [Agent.model_validate(each["agent"]) for each in introductions]
            faults = rendezvous.all_gather(dict(FaultRegister(folder).counts()))[0]
            chosen = sound_first(agents, [identity_of(agent) for agent in agents], faults)
            if node_rank.node == 0:
                _tell_faulty(agents, chosen[:members], faults, folder, say)
            first = Epoch(
                number=1 if newest is None else newest.number + 1,
                run=str(rendezvous.all_gather(secrets.token_hex(8))[0]),
                members=tuple(chosen[:members]),
                output=str(introductions[0]["output"]),
                state=State(step=0),
                changed_unix_s=time.time(),
            )
            roster = Roster(first.run, own)
            roster.adopt(first, time.monotonic())
            for other in agents:
                if other != agents[node_rank.node]:
                    roster.meet(other, time.monotonic())
            agent = held.enter_context(NodeAgent(roster, sockets, register, secret))
            wrote = node_rank.node != 0 or register.write_if_free(first)
            if not all(rendezvous.all_gather(wrote)):
                raise LaunchError(f"{folder}: another launch is using it; name another")
        yield agent


def _tell_faulty(
    agents: Sequence[Agent],
    members: Sequence[Agent],
    faults: Mapping[str, int],
    folder: Path,
    say: Callable[[str], object],
) -> None:
    """Say which nodes faulted too often, and what becomes of them."""
    for agent in agents:
        count = faults.get(identity_of(agent), 0)
        if count >= MOST_FAULTS:
            is_spare = agent not in members
            use = "is a spare" if is_spare else "trains, as no other node is there in its place"
            say(
                f"warning: node {agent.node} ({agent.host}) faulted {count} times in runs of "
                f"{object_store.shown(folder)} and {use}; delete {object_store.shown(folder)}"
                "/faults once it is repaired"
            )


def _address_towards(agent: Agent) -> str:
    """Return the address of this machine from which another is reached."""
    family = socket.AF_INET6 if ":" in agent.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((agent.host, agent.port))
        except OSError:
            return "127.0.0.1"  # it is not reached at all, which silence will tell
        return str(asking.getsockname()[0])


class NodeAgent:
    """One node's agent, while a `with` block lasts."""

    def __init__(
        self,
        roster: Roster,
        sockets: Sockets,
        register: Register,
        secret: bytes,
        *,
        return_s: float = RETURN_S,
    ) -> None:
        self.roster, self.register = roster, register
        self._sockets, self._return_s, self._secret = sockets, return_s, secret
        self._key = hmac.digest(secret, b"meshwright-agents-1", hashlib.sha256)
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="agent", daemon=True)

    @property
    def epoch(self) -> Epoch:
        """The newest that is known."""
        assert self.roster.epoch is not None
        return self.roster.epoch

    def spares(self) -> tuple[Agent, ...]:
        """Return who waits to be a member."""
        with self._lock:
            return self.roster.spares(time.monotonic())

    def exchange_paces(self, own: tuple[StagePace, ...]) -> tuple[StagePace, ...]:
        """Tell the others what this node's ranks took; return what theirs did."""
        with self._lock:
            self.roster.paces = own
            return self.roster.paces_elsewhere()

    def add_drift(self, drift: Drift) -> None:
        """Tell the others of a rank of this node that fell behind."""
        with self._lock:
            self.roster.add_drift(drift)

    def new_drifts(self) -> list[Drift]:
        """Return what other nodes say of their ranks, each once."""
        with self._lock:
            return self.roster.new_drifts()

    def node_rank(self) -> NodeRank:
        """Return this node's place among the members of its epoch, and where they meet."""
        members = self.epoch.members
        starts = [agent.start for agent in members]
        return NodeRank(
            node=starts.index(self.roster.agent.start),
            nodes=len(members),
            host=members[0].host,
            port=members[0].meet_port,
            source=f"epoch {self.epoch.number}",
        )

    def __enter__(self) -> NodeAgent:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.roster.run_left()
        self._ended.set()
        self._thread.join()
        for _number in range(FAREWELLS):
            self._send_status()
        self._sockets.close()

    def copies(self, slots: Slots) -> KeptCopies:
        """Return this node's side of partners that keep each other's copies."""
        return KeptCopies(slots, self._sockets.copies, self._secret, self._hold_copies)

    def _hold_copies(self, held: Held) -> None:
        with self._lock:
            if held.epoch == self.roster.number:
                self.roster.holdings.add(held)

    def begin(self) -> None:
        """Take notice that ranks of the epoch are about to start."""
        with self._lock:
            self.roster.began()
        self._send_status()

    def check(self) -> None:
        """Raise EpochOver where the epoch cannot train any more."""
        with self._lock:
            wanted = self.roster.next_action(time.monotonic())
        if isinstance(wanted, Quit):
            raise EpochOver(wanted)

    def regroup(
        self,
        end: RankEnd | None,
        error: LaunchError,
        decide: Callable[[Proposal], Epoch],
        noticed: Callable[[], object],
    ) -> None:
        """Take the next epoch, once ranks have ended here: its own decision, or another's.

        `error` is how they ended; it is raised, with the reason, where there will be no epoch.
        """
        left = error if isinstance(error, NodeLeft) else getattr(error, "left", None)
        gone = left.node if left is not None else None
        with self._lock:
            if gone is not None:
                self.roster.suspect(self.epoch.members[gone])
            self.roster.ranks_ended(end)
        self._send_status()
        before, deadline_s = self.epoch.number, time.monotonic() + self._return_s
        while self.epoch.number == before:
            noticed()
            with self._lock:
                wanted = self.roster.next_action(time.monotonic())
            if isinstance(wanted, Over):
                raise error
            if isinstance(wanted, Look):
                self._adopt()
            elif isinstance(wanted, Proposal):
                self._write(decide(wanted), noticed)
                self._adopt()
            elif time.monotonic() > deadline_s:
                raise LaunchError(f"{error}; the nodes have not met again") from error
            else:
                time.sleep(LOOK_S)

    def _write(self, epoch: Epoch, noticed: Callable[[], object]) -> None:
        """Write an epoch to the register; a disk that is full may have room again soon."""
        until_s = time.monotonic() + ROOM_S
        while True:
            try:
                self.register.write_if_free(epoch)
                return
            except (OSError, MeshwrightError):
                if time.monotonic() > until_s:
                    raise
            noticed()
            time.sleep(LOOK_S)

    def wait_as_spare(self, noticed: Callable[[], object]) -> None:
        """Wait until an epoch has this node; RunOver where the run ends before.

        `noticed` raises what else ends this.
        """
        while not self.roster.is_member:
            noticed()
            with self._lock:
                wanted = self.roster.next_action(time.monotonic())
            if isinstance(wanted, Look):
                self._adopt()
            elif isinstance(wanted, Over):
                raise RunOver(wanted.why)
            else:
                time.sleep(LOOK_S)

    def is_answered(self) -> bool:
        """Return whether members of the newest epoch are alive."""
        until_s = time.monotonic() + ANSWERS_S
        while time.monotonic() < until_s and not self.roster.has_heard:
            time.sleep(LOOK_S)
        return self.roster.has_heard

    def _adopt(self) -> None:
        newest = self.register.newest()
        if newest is not None and newest.number > self.roster.number:
            with self._lock:
                self.roster.adopt(newest, time.monotonic())
            self._send_status()

    def _talk(self) -> None:
        next_s = 0.0
        while not self._ended.is_set():
            now_s = time.monotonic()
            if now_s >= next_s:
                self._send_status()
                next_s = now_s + TELL_S
            select.select([self._sockets.heard], [], [], LOOK_S)
            for standing in self._heard():
                with self._lock:
                    self.roster.hear(standing, time.monotonic())

    def _send_status(self) -> None:
        with self._lock:
            text = json_line(self.roster.status()).encode()
            others = self.roster.recipients()
        sealed = hmac.digest(self._key, text, hashlib.sha256) + text
        for other in others:
            # Who is gone, or cannot be reached now, is found by its silence.
            with contextlib.suppress(OSError):
                self._sockets.heard.sendto(sealed, (other.host, other.port))

    def _heard(self) -> Iterator[Standing]:
        """Yield what came from agents that know the job's secret."""
        while True:
            try:
                sealed, _ = self._sockets.heard.recvfrom(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier message found nobody
            code, text = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
            if hmac.compare_digest(code, hmac.digest(self._key, text, hashlib.sha256)):
                with contextlib.suppress(ValueError):
                    yield Standing.model_validate_json(text)
