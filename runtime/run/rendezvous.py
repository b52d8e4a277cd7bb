"""Rendezvous: the nodes of a job meet, talk while they work, and leave together.

Node 0 listens at the address that names it, and nowhere else; the others keep a connection to it
for as long as they work.  Every message is authenticated by the job's secret
(runtime.run.authenticated_channel). Who does not know it, says nothing, or says what no node says
is dropped and named, and the nodes go on waiting for those that miss.  A node that leaves early
says why, and all others leave with it. Nothing here imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.runtime.run.addresses import REACHABLE, interfaces, is_local, listening, place_text
from meshwright.runtime.run.authenticated_channel import (
    CODE_BYTES,
    GREETING_BYTES,
    LENGTH,
    MAGIC,
    MAX_INTRODUCTION_BYTES,
    SECRET,
    SECRET_FILE,
    Channel,
    Unauthentic,
    checked_length,
    job_secret,
)
from meshwright.runtime.run.node_rank import NodeRank

MEET_S = 300.0
"""Seconds that the first node waits for the last."""
SILENT_S = 10.0
"""Seconds after which a node says which others it waits for."""
GREET_S = 10.0
"""Seconds that a connection may take to show that it knows the secret."""
OTHERS_S = 10.0
"""Seconds that a node that only lost a peer waits for the reason."""
POLL_S = 0.2
"""Between two looks at what else happens while a node waits."""
MAX_NEWCOMERS = 256
"""Connections at once that have not shown it; the oldest gives way."""
MAX_NAMED = 8
"""Dropped peers that an error names."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A machine that is gone is noticed after 90 seconds."""


def to_stderr(text: str) -> None:
    """Tell the user."""
    print(f"meshwright: warning: {lines(text)}", file=sys.stderr)


class NodeLeft(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """Another node has left, and this one leaves with it; the message is its reason."""

    def __init__(self, message: str, *, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        """Number of the other node, where it is gone without a word."""


def _nothing() -> None:
    """Do nothing while a node waits."""


class Rendezvous:
    """All nodes of a job, connected for the length of a `with` block."""

    def __init__(
        self,
        node_rank: NodeRank,
        *,
        secret: bytes | None = None,
        meet_s: float = MEET_S,
        greet_s: float = GREET_S,
        warn: Callable[[str], None] = to_stderr,
        meanwhile: Callable[[], None] = _nothing,
    ) -> None:
        """`meanwhile` is called again and again while this node waits for others."""
        self.node_rank = node_rank
        self._meanwhile = meanwhile
        self._others: dict[int, Channel] = {}
        self._early: dict[int, list[Any]] = {}
        self.address = "127.0.0.1"
        """Address at which other nodes reach this one."""
        self.interface: str | None = None
        """The network interface that has this address; None for one node alone."""
        if node_rank.nodes == 1:
            return
        secret = job_secret(os.environ) if secret is None else secret
        deadline = time.monotonic() + meet_s
        notices = [time.monotonic() + SILENT_S]

        def look() -> None:
            meanwhile()
            if notices and time.monotonic() > notices[0]:
                notices.clear()
                self._print_absent(meet_s)

        try:
            if node_rank.node == 0:
                reception = _Reception(node_rank, secret, self._others, greet_s, warn)
                reception.receive_all(deadline, look)
            else:
                self._others[0] = _connect(node_rank, secret, deadline, greet_s, warn, look)
            first = next(iter(self._others.values()))
            self.address = first.connection.getsockname()[0]
            self.interface = interfaces().get(self.address)
        except BaseException as error:
            self._leave(error)
            raise

    def _print_absent(self, meet_s: float) -> None:
        """Print which nodes have not come yet, and how long this one waits for them."""
        rank = self.node_rank
        others = _node_names([node for node in range(1, rank.nodes) if node not in self._others])
        if rank.node:
            others = f"node 0 at {place_text(rank.host, rank.port)}"
        text = (
            f"node {rank.node} of {rank.nodes} waits for {others}, {seconds_text(meet_s)} at most"
        )
        print(f"meshwright: {lines(text)}", file=sys.stderr)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Tell the others why this node leaves, if something went wrong, and close."""
        if error is not None:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            reason = "interrupted" if is_interrupt else str(error) or type(error).__name__
            for channel in self._others.values():
                with contextlib.suppress(OSError, LaunchError):
                    channel.send({"left": reason})
        for channel in self._others.values():
            channel.close()
        self._others.clear()

    def all_gather(self, data: Any) -> list[Any]:
        """Tell all nodes something; return what each of them sent, by node.  All call it."""
        if self.node_rank.nodes == 1:
            return [json.loads(json.dumps(data))]
        if self.node_rank.node == 0:
            messages = [data, *(self._hear(other) for other in range(1, self.node_rank.nodes))]
            for other in self._others:
                self._send(other, messages)
            return messages
        self._send(0, data)
        return list(self._hear(0))

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse nodes that would do different things; each says what it does.  All call it."""
        lead, *others = self.all_gather(dict(facts))
        for node, other in enumerate(others, start=1):
            for what, value in other.items():
                if value != lead[what]:
                    raise LaunchError(
                        f"nodes: node {node} has another {what} ({value}) than node 0 "
                        f"({lead[what]}); start the same command with the same files on every node"
                    )

    def check(self) -> None:
        """Raise the reason if another node has left."""
        nodes = {channel.connection.fileno(): node for node, channel in self._others.items()}
        polled = select.poll()
        for descriptor in nodes:
            polled.register(descriptor, select.POLLIN)
        for descriptor, _ in polled.poll(0):
            node = nodes[descriptor]
            self._early.setdefault(node, []).append(self._read(node))

    def await_reason(self, seconds: float = OTHERS_S) -> None:
        """Raise the reason that another node gives within some seconds, if one does."""
        deadline = time.monotonic() + seconds
        while self.node_rank.nodes > 1 and time.monotonic() < deadline:
            self.check()
            self._meanwhile()  # who would give it may stand still
            time.sleep(0.05)

    def environment(self, *, ranks: int, listening: int | None) -> dict[str, str]:
        """Return what joins the ranks of all nodes, beside what is said of each; all call it.

        `ranks` is their number.  The node with rank 0 gives the descriptor on which it listens for
        them; the descriptor is rank 0's alone, and that it is set tells all how to join.
        """
        port = 0
        if listening is not None:
            with socket.socket(fileno=os.dup(listening)) as seen:
                port = seen.getsockname()[1]
        answers = self.all_gather({"address": self.address, "port": port})
        store = next(answer for answer in answers if answer["port"])
        result = {
            "MASTER_PORT": str(store["port"]),
            "WORLD_SIZE": str(ranks),
            "MESHWRIGHT_LAUNCHER": str(os.getpid()),
            "MESHWRIGHT_STORE_FD": str(-1 if listening is None else listening),
        }
        if self.node_rank.nodes > 1:
            result["MASTER_ADDR"] = str(store["address"])
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                # Empty lets both look for an interface, as they do where nothing is said.
                result[name] = os.environ.get(name, self.interface or "")
        return result

    def _send(self, other: int, data: Any) -> None:
        try:
            self._others[other].send(data)
        except OSError as error:
            raise NodeLeft(f"node {other} is gone: {error}", node=other) from None

    def _hear(self, other: int) -> Any:
        early = self._early.get(other)
        return early.pop(0) if early else self._read(other)

    def _read(self, other: int) -> Any:
        channel = self._others[other]
        try:
            while not select.select([channel.connection], [], [], POLL_S)[0]:
                self._meanwhile()
            message = channel.receive()
        except Unauthentic as error:
            raise LaunchError(
                f"node {other}: {error}; somebody else writes into its connection"
            ) from None
        except OSError:
            raise NodeLeft(
                f"node {other} left without a message; see the output of that node", node=other
            ) from None
        reason = _parting(other, message)
        if reason is not None:
            raise NodeLeft(reason)
        return message


class _Newcomer:
    """A connection that has not yet shown that it knows the secret.

    It is read as its bytes come, and never beyond its first message.
    """

    def __init__(self, connection: socket.socket, address: str, secret: bytes, until: float):
        self.channel = Channel(connection, secret, serves=True)
        self.address = address
        self.until = until
        self._received = bytearray()
        self._length: int | None = None

    def read(self) -> Any:
        """Take what has come; return the introduction when it is whole, else None."""
        wanted = self._missing_bytes()
        part = self.channel.connection.recv(wanted - len(self._received))
        if not part:
            raise Unauthentic("it closed the connection before it showed the job's secret")
        self._received += part
        if not self._received.startswith(MAGIC[: len(self._received)]):
            raise Unauthentic("it does not speak as a node of a job does")
        if len(self._received) < wanted:
            return None
        if wanted == GREETING_BYTES:
            self.channel.meet(bytes(self._received))
            return None
        head = GREETING_BYTES + LENGTH.size
        if self._length is None:
            self._length = checked_length(self._received[GREETING_BYTES:], MAX_INTRODUCTION_BYTES)
            return None
        return self.channel.open_message(self._received[head:])

    def _missing_bytes(self) -> int:
        """Bytes until the next that must be looked at."""
        if len(self._received) < GREETING_BYTES:
            return GREETING_BYTES
        head = GREETING_BYTES + LENGTH.size
        return head if self._length is None else head + self._length + CODE_BYTES


class _Reception:
    """Node 0 while it waits for the others."""

    def __init__(
        self,
        node_rank: NodeRank,
        secret: bytes,
        others: dict[int, Channel],
        greet_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._node_rank, self._secret, self._others = node_rank, secret, others
        self._greet_s, self._warn = greet_s, warn
        self._newcomers: dict[socket.socket, _Newcomer] = {}
        self._dropped: collections.Counter[str] = collections.Counter()
        self._selector = selectors.DefaultSelector()

    def receive_all(self, deadline: float, meanwhile: Callable[[], None]) -> None:
        """Wait until all nodes are connected."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._selector)
            held.callback(self._close_newcomers)
            servers = listening(self._node_rank, deadline, self._warn)
            for server in servers:
                held.enter_context(server)
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ)
            while not self._complete():
                now = time.monotonic()
                if now >= deadline:
                    raise LaunchError(self._missing(servers))
                meanwhile()
                first = min([deadline, now + POLL_S, *(n.until for n in self._newcomers.values())])
                for key, _ in self._selector.select(max(0.0, first - now)):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection in self._newcomers:
                        self._read(self._newcomers[connection])
                    elif connection in servers:
                        self._accept(connection)
                for newcomer in list(self._newcomers.values()):
                    if newcomer.until <= time.monotonic():
                        self._drop(newcomer, f"it was silent for {self._greet_s:g} s")

    def _complete(self) -> bool:
        """Return whether all nodes are connected; one that died before that is not.

        One that said why it leaves ends the job: LaunchError is its reason.
        """
        if len(self._others) < self._node_rank.nodes - 1:
            return False
        for node, channel in list(self._others.items()):
            if _has_left(channel):
                self._end_with(node, channel)
                channel.close()
                del self._others[node]
        return len(self._others) == self._node_rank.nodes - 1

    def _end_with(self, node: int, channel: Channel) -> None:
        """Raise the reason that a node gave before it closed its connection, if it gave one."""
        reason = None
        with contextlib.suppress(OSError, Unauthentic):
            while reason is None:  # until the connection's end, which is there already
                reason = _parting(node, channel.receive(until=time.monotonic() + self._greet_s))
        if reason is not None:
            raise LaunchError(reason)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except OSError:
            return  # it left again
        until = time.monotonic() + self._greet_s
        newcomer = _Newcomer(connection, str(address[0]), self._secret, until)
        connection.setblocking(False)
        self._newcomers[connection] = newcomer
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(newcomer.channel.greeting)  # a new connection has room for it
        except OSError as error:
            self._drop(newcomer, f"it is gone: {error.strerror}")
        if len(self._newcomers) > MAX_NEWCOMERS:
            self._drop(next(iter(self._newcomers.values())), "too many connections at once")

    def _read(self, newcomer: _Newcomer) -> None:
        try:
            introduction = newcomer.read()
            if introduction is not None:
                self._admit(newcomer, introduction)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(newcomer, f"it is gone: {error.strerror or error}")
        except Unauthentic as error:
            self._drop(newcomer, str(error))

    def _admit(self, newcomer: _Newcomer, introduction: Any) -> None:
        """Take a peer that knows the secret as the node that it says it is, or tell it why not."""
        refusal = self._refusal(introduction)
        channel = newcomer.channel
        channel.connection.settimeout(self._greet_s)
        if refusal is not None:
            channel.send({"refused": refusal})
            self._drop(newcomer, refusal)
            return
        node = introduction["node"]
        channel.send({"welcome": node})
        _for_long(channel.connection)
        self._forget(newcomer)
        if node in self._others:
            self._others[node].close()
        self._others[node] = channel

    def _refusal(self, introduction: Any) -> str | None:
        fields = introduction if isinstance(introduction, dict) else {}
        node, nodes = fields.get("node"), fields.get("nodes")
        if type(node) is not int or type(nodes) is not int:
            return "it does not say which node it is; install the same version on every node"
        if nodes != self._node_rank.nodes:
            return f"it says that there are {nodes} nodes, and node 0 {self._node_rank.nodes}"
        if not 0 < node < nodes:
            return f"it says that it is node {node} of {nodes}; they are 1 to {nodes - 1} beside 0"
        if node in self._others and not _has_left(self._others[node]):
            return f"two processes say that they are node {node}; number the nodes 0, 1, ..."
        return None

    def _drop(self, newcomer: _Newcomer, why: str) -> None:
        self._forget(newcomer)
        newcomer.channel.close()
        text = f"{newcomer.address}: {why}"
        if text not in self._dropped and len(self._dropped) >= 10 * MAX_NAMED:
            return  # so many that naming more would fill memory and screen
        self._dropped[text] += 1
        if self._dropped[text] == 1:
            self._warn(f"rendezvous: dropped {text}")

    def _forget(self, newcomer: _Newcomer) -> None:
        del self._newcomers[newcomer.channel.connection]
        self._selector.unregister(newcomer.channel.connection)

    def _close_newcomers(self) -> None:
        for newcomer in self._newcomers.values():
            newcomer.channel.close()

    def _missing(self, servers: list[socket.socket]) -> str:
        nodes = self._node_rank.nodes
        missing = [node for node in range(1, nodes) if node not in self._others]
        places = [server.getsockname() for server in servers]
        at = " and ".join(place_text(place[0], place[1]) for place in places)
        text = f"nodes: {_node_names(missing)} of {nodes} did not come to {at}"
        text += "; start the same command there"
        if all(map(is_local, servers)):
            text += f". Only this machine reaches {at}; {REACHABLE}"
        if self._dropped:
            dropped = "; ".join(
                f"{who} ({count} times)" if count > 1 else who
                for who, count in self._dropped.most_common(MAX_NAMED)
            )
            text += f". Dropped: {dropped}"
        return text


def _node_names(nodes: Sequence[int]) -> str:
    """Return the names of nodes, of which the first are enough."""
    more = f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else ""
    return ", ".join(f"node {node}" for node in nodes[:MAX_NAMED]) + more


def _connect(
    node_rank: NodeRank,
    secret: bytes,
    deadline: float,
    greet_s: float,
    warn: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> Channel:
    """Return a channel to node 0, which may not be there yet."""
    place = place_text(node_rank.host, node_rank.port)
    warned: set[str] = set()
    while True:
        meanwhile()
        connection, pause_s = None, 0.1
        try:
            connection = _dial(node_rank.host, node_rank.port)
            return _introduce(connection, node_rank, secret, greet_s)
        except (OSError, Unauthentic) as error:
            problem = str(error)
            if connection is not None:
                connection.close()
                pause_s = 1.0
                problem = f"what answers is not node 0 of this job with its secret: {error}"
                if problem not in warned:
                    warned.add(problem)
                    warn(f"rendezvous: {place}: {problem}; {_SAME_SECRET}")
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 does not answer at {place} ({problem}), as {node_rank.source} names it; "
                "start it, or give --rendezvous HOST:PORT"
            )
        time.sleep(pause_s)


_SAME_SECRET = f"give all nodes the same {SECRET} or {SECRET_FILE}"


def _dial(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=5.0)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("nobody listens")  # a port of our own that answered itself
    return connection


def _introduce(
    connection: socket.socket, node_rank: NodeRank, secret: bytes, greet_s: float
) -> Channel:
    """Say which node this is, and hear that node 0 takes it as that."""
    channel = Channel(connection, secret, serves=False)
    greeting = {"node": node_rank.node, "nodes": node_rank.nodes}
    answer = channel.introduce(greeting, until=time.monotonic() + greet_s)
    if not isinstance(answer, dict) or answer.get("welcome") != node_rank.node:
        channel.close()
        raise LaunchError(f"nodes: node 0 does not take this node: {_reason(answer)}")
    _for_long(connection)
    return channel


def _reason(answer: Any) -> str:
    reason = answer.get("refused", answer.get("left")) if isinstance(answer, dict) else None
    return str(reason) if reason else "it gives no reason; install the same version on every node"


def _parting(node: int, message: Any) -> str | None:
    """Return why a node leaves, with its name, if that is what it says."""
    if not isinstance(message, dict) or "left" not in message:
        return None
    reason = str(message["left"])
    return reason if reason.startswith("node ") else f"node {node}: {reason}"


def _for_long(connection: socket.socket) -> None:
    """Let a connection wait as long as its nodes work, and end when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _has_left(channel: Channel) -> bool:
    """Say whether the other side has closed a connection, even if it said something before."""
    hung_up = getattr(select, "POLLRDHUP", select.POLLHUP)
    polled = select.poll()
    polled.register(channel.connection, hung_up)
    return bool(polled.poll(0))
