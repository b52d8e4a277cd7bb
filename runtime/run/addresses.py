"""Addresses: where node 0 listens, and which of them this machine has.

Node 0 listens where it is named and nowhere else.  What makes that fail (a name for another
machine, a name that only this machine knows as its own, a port that is taken) is said with the way
out.  Nothing here imports torch.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.planner.errors import LaunchError
from meshwright.runtime.run.node_rank import NodeRank

LISTEN = "MESHWRIGHT_LISTEN"
"""The address to listen at where others reach node 0 by one that this machine does not have."""
MAX_NAMED = 8
"""Addresses that a message names."""
BACKLOG = 4096
"""Connections that wait to be accepted: of all nodes, and of strangers beside them."""
INTERFACE = struct.Struct("16s4x4s16x")
"""Layout of Linux' struct ifreq: label, IPv4 address."""
REACHABLE = (
    f"if others know it by another address, set {LISTEN} on node 0 to that, or mend /etc/hosts "
    "where the name stands at 127.0.1.1"
)


def listening(
    node_rank: NodeRank, deadline: float, warn: Callable[[str], None]
) -> list[socket.socket]:
    """Return sockets that listen where node 0 is named: at each such address of this machine.

    A name that is not yet known, or not yet as one of this machine, is asked for again: the names
    of pods follow their start.
    """
    host = os.environ.get(LISTEN) or node_rank.host
    warned = False
    while True:
        servers, problem = _servers(host, node_rank)
        if servers:
            break
        explanation = (
            f"rendezvous: {host}, as {node_rank.source} names node 0, {problem}; this machine has "
            f"{_own_addresses()}. Start node 0 where {host} is, or name it by an address that it "
            f"has; where others reach it through another address, set {LISTEN} on it to its own"
        )
        if _is_address(host) or time.monotonic() > deadline:
            raise LaunchError(explanation)
        if not warned:
            warn(explanation)
            warned = True
        time.sleep(0.5)
    here = servers[0].getsockname()[0]
    if host != "localhost" and not _is_address(host) and all(map(is_local, servers)):
        warn(f"rendezvous: {host} is {here} here, which only this machine reaches; {REACHABLE}")
    return servers


def _servers(host: str, node_rank: NodeRank) -> tuple[list[socket.socket], str]:
    """Return a listening socket for each address of a host that this machine has, or a problem."""
    servers: list[socket.socket] = []
    problem = "cannot be resolved"
    for family, address in _addresses(host, node_rank.port):
        try:
            servers.append(listening_socket(family, address))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for server in servers:
                    server.close()
                raise LaunchError(
                    f"port {node_rank.port} of {address[0]} is taken by another process; end it, "
                    f"or name another port on every node, with {node_rank.port_setting}"
                ) from None
            problem = f"is {address[0]}, where this machine cannot listen ({error.strerror})"
    return servers, problem


def listening_socket(family: int, address: Any) -> socket.socket:
    """Return a socket that listens at an address of this machine, and at no other."""
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    return server


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in addresses))


def place_text(host: str, port: int) -> str:
    """Write a host with its port.

    >>> place_text("node0", 29400), place_text("fd00::1", 29400)
    ('node0:29400', '[fd00::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(server: socket.socket) -> bool:
    """Say whether only this machine reaches a server."""
    return ipaddress.ip_address(server.getsockname()[0]).is_loopback


def _own_addresses() -> str:
    addresses = [
        address for address in interfaces() if not ipaddress.ip_address(address).is_loopback
    ]
    return ", ".join(addresses[:MAX_NAMED]) or "no address beside its loopback"


def interfaces() -> dict[str, str]:
    """Return the network interface of each address of this machine.

    >>> interfaces()["127.0.0.1"] in ("lo", "lo0")
    True
    """
    address_of: dict[str, str] = {}
    answer = array.array("B", bytes(512 * INTERFACE.size))
    where, room = answer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        request = 0x8912  # SIOCGIFCONF
        reply = fcntl.ioctl(asking, request, struct.pack("iL", room, where))
        (filled,) = struct.unpack_from("i", reply)
        for label, address in INTERFACE.iter_unpack(answer[:filled]):
            # A second address of eth0 may be labelled eth0:1.
            name = label.partition(b"\0")[0].decode().partition(":")[0]
            address_of[socket.inet_ntoa(address)] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            digits, *_, name = line.split()
            address_of[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return address_of
