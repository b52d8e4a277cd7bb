"""Hosts of the rig have names, addresses and cables of the rate that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import rig
from tests.limits import PATIENCE_S

hosts_only = pytest.mark.skipif(rig.refusal() is not None, reason=str(rig.refusal()))

SEND = """
import json, os, socket, time
host, node = os.environ["PET_MASTER_ADDR"], os.environ["PET_NODE_RANK"]
size = 2 * 2**20
if node == "0":
    with socket.create_server((host, 5001)) as server:
        there, _ = server.accept()
        for count in (size, 3 * size) * 4:
            got = 0
            while got < count:
                got += len(there.recv(2**20))
            there.sendall(b"x")
else:
    while True:
        try:
            there = socket.create_connection((host, 5001))
            break
        except OSError:
            time.sleep(0.02)
    seconds = []
    for count in (size, 3 * size) * 4:
        begin = time.perf_counter()
        there.sendall(bytes(count))
        there.recv(1)
        seconds.append(time.perf_counter() - begin)
    # Others on the machine only ever add time.
    print(json.dumps(16 * size / (min(seconds[1::2]) - min(seconds[::2]))))
"""


@hosts_only
def test_a_plain_socket_sees_the_rate_of_its_cable() -> None:
    expected = pytest.approx(100e6, rel=0.15)
    # Others on the machine disturb a try, not a cable: one try at the rate shows that it is there.
    with rig.rig(2, "100mbit") as hosts:
        for _ in range(5):
            _, said = hosts.run([sys.executable, "-c", SEND], timeout_s=PATIENCE_S, quiet=True)
            rate = json.loads(said)
            if rate == expected:
                break

    assert rate == expected


@hosts_only
def test_hosts_know_their_names_and_each_other_and_are_gone_afterwards() -> None:
    with rig.rig(2) as hosts:
        first, second = hosts.run(["sh", "-c", "hostname; getent hosts node0"], quiet=True)

    assert first.splitlines()[0] == "rig0"
    assert second.splitlines()[0] == "rig1"
    assert second.splitlines()[1].split()[0] == rig.address(0)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert hosts.namespace(0) not in listed.stdout


@hosts_only
def test_the_first_host_that_fails_ends_the_others() -> None:
    with rig.rig(2) as hosts, pytest.raises(RuntimeError, match="host 1: exit 3"):
        hosts.run(["sh", "-c", "[ $PET_NODE_RANK = 0 ] && sleep 60; exit 3"], quiet=True)
