"""Ports for the meetings of tests: of those that the system never gives to who asks for any."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of this machine that nobody listens at.

    The system gives ports from 32768 on, to every connection of every process; a port from there
    that was free a moment ago may be taken.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
