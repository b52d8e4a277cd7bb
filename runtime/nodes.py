"""The nodes of one job: which of them this is, and a table where all of them talk.

`meshwright profile` and `meshwright launch` are started once on every node, by hand (`--nodes`,
`--node`, `--rendezvous`) or by what starts jobs there, whose environment says the same:

    torchrun, Kubeflow      PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    inside torchrun         GROUP_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; one process each
    Slurm                   SLURM_NNODES, SLURM_NODEID, SLURM_JOB_NODELIST; srun with one task each
    Kubernetes              JOB_COMPLETION_INDEX, NNODES, MASTER_ADDR (an Indexed Job)

Node 0 listens; the others keep a connection to it for as long as they work.  What they say is
JSON with its length before it.  A node that leaves early says why, and all others leave with it.
Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from planner.errors import LaunchError

PORT = 29400
MEET_S = 300.0
"""How long the first node waits for the last."""
LENGTH = struct.Struct("!Q")
MOST_BYTES = 2**30
OTHERS_S = 10.0
"""How long a node that only lost a peer waits for the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which node of how many this is, and where node 0 listens."""

    node: int
    nodes: int
    host: str
    port: int = PORT
    source: str = "the command line"


ALONE = Seat(node=0, nodes=1, host="127.0.0.1", source="nothing says that there are other nodes")


def seat_of(
    environment: Mapping[str, str],
    *,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
) -> Seat:
    """Return this node's seat: as asked for, or as whatever started us says.

    >>> seat_of({}, nodes=2, node=1, rendezvous="10.0.0.1:29500").port
    29500
    >>> kubeflow = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job-0"}
    >>> seat_of(kubeflow).node, seat_of({}).nodes
    (3, 1)
    """
    if nodes is not None or node is not None or rendezvous is not None:
        if nodes == 1 and not node:
            return ALONE
        if nodes is None or node is None or rendezvous is None:
            raise LaunchError(
                "nodes: several nodes need all of --nodes (how many), --node (which, from 0) and "
                "--rendezvous (HOST:PORT of node 0)"
            )
        host, colon, port = rendezvous.rpartition(":")
        if not colon:
            host, port = rendezvous, str(PORT)
        return _checked(node, nodes, host, port, "the command line")
    for found in (_torchrun, _inside_torchrun, _slurm, _kubernetes):
        seat = found(environment)
        if seat is not None:
            return seat
    return ALONE


def _checked(node: int | str, nodes: int | str, host: str, port: int | str, source: str) -> Seat:
    try:
        seat = Seat(node=int(node), nodes=int(nodes), host=host, port=int(port), source=source)
    except ValueError:
        raise LaunchError(
            f"{source}: says node {node} of {nodes} at port {port}; these are whole numbers"
        ) from None
    if not 0 <= seat.node < seat.nodes:
        raise LaunchError(f"{source}: says node {node} of {nodes}; nodes count from 0")
    return seat if seat.nodes > 1 else ALONE


def _torchrun(environment: Mapping[str, str]) -> Seat | None:
    nodes = environment.get("PET_NNODES", "1")
    if nodes == "1" or "PET_MASTER_ADDR" not in environment:
        return None
    return _checked(
        environment.get("PET_NODE_RANK", "0"),
        nodes,
        environment["PET_MASTER_ADDR"],
        environment.get("PET_MASTER_PORT", PORT),
        "PET_NNODES and others",
    )


def _inside_torchrun(environment: Mapping[str, str]) -> Seat | None:
    if environment.get("GROUP_WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in environment:
        return None
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise LaunchError(
            "torchrun: has started several processes on this node; start one, with "
            "--nproc-per-node 1: the ranks of a node are started from there"
        )
    # torchrun itself listens on MASTER_PORT.
    return _checked(
        environment["GROUP_RANK"],
        environment["GROUP_WORLD_SIZE"],
        environment["MASTER_ADDR"],
        int(environment.get("MASTER_PORT", PORT)) + 1,
        "torchrun's GROUP_WORLD_SIZE and others",
    )


def _slurm(environment: Mapping[str, str]) -> Seat | None:
    if environment.get("SLURM_NNODES", "1") == "1" or "SLURM_PROCID" not in environment:
        return None
    if environment.get("SLURM_NTASKS", environment["SLURM_NNODES"]) != environment["SLURM_NNODES"]:
        raise LaunchError(
            f"srun: has started {environment['SLURM_NTASKS']} tasks on "
            f"{environment['SLURM_NNODES']} nodes; start one on each, with --ntasks-per-node=1"
        )
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return _checked(
        environment.get("SLURM_NODEID", environment["SLURM_PROCID"]),
        environment["SLURM_NNODES"],
        _slurm_address(first_host(listed)),
        PORT + int(job) % 1000,
        "Slurm's SLURM_NNODES and others",
    )


def first_host(listed: str) -> str:
    """Return the first host of a Slurm list.

    >>> first_host("n[03-05,9],m1"), first_host("gpu1,gpu2"), first_host("rack[1-2]-n[0-3]")
    ('n03', 'gpu1', 'rack1-n0')
    """
    depth, end = 0, len(listed)
    for place, letter in enumerate(listed):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", listed[:end])


def _slurm_address(host: str) -> str:
    """Return the address that Slurm itself uses for a node, where its name may not resolve."""
    command = shutil.which("scontrol")
    if command is None:
        return host
    try:
        asked = [command, "show", "node", host]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return host
    match = re.search(r"NodeAddr=(\S+)", said)
    return match[1] if match else host


def _kubernetes(environment: Mapping[str, str]) -> Seat | None:
    if "JOB_COMPLETION_INDEX" not in environment or environment.get("NNODES", "1") == "1":
        return None
    if "MASTER_ADDR" not in environment:
        raise LaunchError(
            "JOB_COMPLETION_INDEX: is set and MASTER_ADDR is not; give the pods MASTER_ADDR, the "
            "name of pod 0 behind a headless service (JOB-0.SERVICE)"
        )
    return _checked(
        environment["JOB_COMPLETION_INDEX"],
        environment["NNODES"],
        environment["MASTER_ADDR"],
        environment.get("MASTER_PORT", PORT),
        "the Indexed Job's JOB_COMPLETION_INDEX and NNODES",
    )


class Meeting:
    """All nodes at one table, for the length of a `with` block."""

    def __init__(self, seat: Seat, *, meet_s: float = MEET_S) -> None:
        self.seat = seat
        self._others: dict[int, socket.socket] = {}
        self._early: dict[int, list[Any]] = {}
        self.address = "127.0.0.1"
        """Where other nodes reach this one."""
        self.interface: str | None = None
        """The network interface that has this address; None for one node alone."""
        if seat.nodes == 1:
            return
        try:
            if seat.node == 0:
                self._receive_all(time.monotonic() + meet_s)
            else:
                self._others[0] = _connected(seat, time.monotonic() + meet_s)
                self._send(0, {"node": seat.node, "nodes": seat.nodes})
            first = next(iter(self._others.values()))
            self.address = first.getsockname()[0]
            self.interface = interface_of(self.address)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            said = str(error) or (kind.__name__ if kind else "stopped")
            for other in list(self._others):
                try:
                    self._send(other, {"left": said})
                except (OSError, LaunchError):
                    continue
        self.close()

    def close(self) -> None:
        """Leave the table."""
        for connection in self._others.values():
            connection.close()
        self._others = {}

    def everyones(self, own: Any) -> list[Any]:
        """Tell all nodes something; return what each of them told, by node.  All call it."""
        if self.seat.nodes == 1:
            return [json.loads(json.dumps(own))]
        if self.seat.node == 0:
            said = [own, *(self._hear(other) for other in range(1, self.seat.nodes))]
            for other in self._others:
                self._send(other, said)
            return said
        self._send(0, own)
        return list(self._hear(0))

    def check(self) -> None:
        """Raise the reason if another node has left."""
        waiting, _, _ = select.select(list(self._others.values()), [], [], 0)
        for other, connection in self._others.items():
            if connection in waiting:
                self._early.setdefault(other, []).append(self._read(other))

    def await_reason(self, seconds: float = OTHERS_S) -> None:
        """Raise the reason that another node gives within some seconds, if one does."""
        deadline = time.monotonic() + seconds
        while self.seat.nodes > 1 and time.monotonic() < deadline:
            self.check()
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
        said = self.everyones({"address": self.address, "port": port})
        store = next(told for told in said if told["port"])
        result = {
            "MASTER_PORT": str(store["port"]),
            "WORLD_SIZE": str(ranks),
            "MESHWRIGHT_LAUNCHER": str(os.getpid()),
            "MESHWRIGHT_STORE_FD": str(-1 if listening is None else listening),
        }
        if self.seat.nodes > 1:
            result["MASTER_ADDR"] = str(store["address"])
            if self.interface is not None:
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    result[name] = os.environ.get(name, self.interface)
        return result

    def _receive_all(self, deadline: float) -> None:
        with socket.create_server(("", self.seat.port), backlog=self.seat.nodes) as server:
            while len(self._others) < self.seat.nodes - 1:
                left_s = deadline - time.monotonic()
                ready, _, _ = select.select([server], [], [], max(0.0, left_s))
                if not ready:
                    missing = sorted(set(range(1, self.seat.nodes)) - set(self._others))
                    raise LaunchError(
                        f"nodes: {', '.join(f'node {m}' for m in missing)} of {self.seat.nodes} "
                        f"did not come to port {self.seat.port}; start the same command there"
                    )
                connection, _ = server.accept()
                connection.settimeout(10.0)
                try:
                    hello = _read_from(connection)
                    node, nodes = hello["node"], hello["nodes"]
                except (OSError, ValueError, KeyError, TypeError):
                    connection.close()  # a stranger
                    continue
                connection.settimeout(None)
                if nodes != self.seat.nodes or node in self._others:
                    connection.close()
                    raise LaunchError(
                        f"nodes: two processes say they are node {node} of {nodes}, or disagree "
                        f"that there are {self.seat.nodes}; number them 0, 1, ..."
                    )
                _no_delay(connection)
                self._others[node] = connection

    def _send(self, other: int, data: Any) -> None:
        text = json.dumps(data).encode()
        try:
            self._others[other].sendall(LENGTH.pack(len(text)) + text)
        except OSError as error:
            raise LaunchError(f"node {other} is gone: {error}") from None

    def _hear(self, other: int) -> Any:
        early = self._early.get(other)
        return early.pop(0) if early else self._read(other)

    def _read(self, other: int) -> Any:
        try:
            said = _read_from(self._others[other])
        except (OSError, ValueError):
            raise LaunchError(
                f"node {other} is gone without a word; its own output may say why"
            ) from None
        if isinstance(said, dict) and "left" in said:
            reason = str(said["left"])
            named = reason if reason.startswith("node ") else f"node {other}: {reason}"
            raise LaunchError(named)
        return said


def _connected(seat: Seat, deadline: float) -> socket.socket:
    """Return a connection to node 0, which may not be there yet."""
    while True:
        try:
            connection = socket.create_connection((seat.host, seat.port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node 0 does not answer at {seat.host}:{seat.port} ({error}), as "
                    f"{seat.source} names it; start it, or give --rendezvous HOST:PORT"
                ) from None
            time.sleep(0.1)
            continue
        if connection.getsockname() == connection.getpeername():
            connection.close()  # a port of our own that answered itself
            continue
        connection.settimeout(None)
        _no_delay(connection)
        return connection


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _read_from(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise OSError("closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def interface_of(address: str) -> str | None:
    """Return the network interface with an IPv4 address, or None.

    >>> interface_of("127.0.0.1") in ("lo", "lo0")
    True
    """
    request = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, request, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
