"""Nodes meet at the address that was named, believe nobody without the secret, leave together.

Strangers are raw sockets.  What a node with the secret sends is written here a second time, from
the description at the top of runtime/run/authenticated_channel.py.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import hashlib
import hmac
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch import preflight
from meshwright.runtime.launch import rank_processes as supervise
from meshwright.runtime.run import addresses, rendezvous
from meshwright.runtime.run import authenticated_channel as channel
from meshwright.runtime.run import node_rank as nodes
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.authenticated_channel import job_secret
from meshwright.runtime.run.node_rank import ALONE, NodeRank, node_rank_of
from meshwright.runtime.run.rendezvous import Rendezvous
from tests.limits import PATIENCE_S
from tests.runtime.ports import free_port

SECRET = b"only nodes of the test know this"
MAGIC = b"meshwright-1\n"


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once; return what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run_one(index: int) -> None:
        try:
            results[index] = calls[index]()
        except (LaunchError, KeyboardInterrupt) as error:
            results[index] = error

    threads = [threading.Thread(target=run_one, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


def of_nodes(count: int, work: Callable[[Rendezvous], Any], **settings: Any) -> list[Any]:
    """Let `count` threads be the nodes of a job; return what each returned or raised."""
    port = free_port()

    def node(number: int) -> Any:
        node_rank = NodeRank(node=number, nodes=count, host="127.0.0.1", port=port)
        with Rendezvous(node_rank, meet_s=PATIENCE_S, **settings) as met:
            return work(met)

    return in_threads(*(functools.partial(node, number) for number in reversed(range(count))))[::-1]


def test_all_hear_what_all_say_in_the_order_of_the_nodes() -> None:
    def work(met: Rendezvous) -> Any:
        first = met.all_gather({"node": met.node_rank.node})
        return first, met.all_gather(len(first)), met.interface

    assert of_nodes(3, work) == [([{"node": 0}, {"node": 1}, {"node": 2}], [3, 3, 3], "lo")] * 3


@pytest.mark.parametrize("leaving", [0, 2])
@pytest.mark.parametrize(
    ("error", "why"),
    [(LaunchError("the disk is full"), "the disk is full"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_node_that_fails_tells_all_others_why(
    leaving: int, error: BaseException, why: str
) -> None:
    def work(met: Rendezvous) -> None:
        met.all_gather("here")
        if met.node_rank.node == leaving:
            raise error
        met.all_gather("done")

    results = of_nodes(3, work)

    assert results.pop(leaving) is error
    assert [str(result) for result in results] == [f"node {leaving}: {why}"] * 2


def test_while_ranks_work_a_node_looks_whether_others_left() -> None:
    early = threading.Event()

    def work(met: Rendezvous) -> str:
        if met.node_rank.node == 1:
            early.set()
            return str(met.all_gather("done early"))
        early.wait(PATIENCE_S)
        while not met._early:
            met.check()  # what comes too early is saved
        return str(met.all_gather("done"))

    assert of_nodes(2, work) == ["['done', 'done early']"] * 2


class Job:
    """A job whose node 0 waits in a thread; the test is everybody else."""

    def __init__(self, *, count: int = 2, meet_s: float = PATIENCE_S, greet_s: float = 1.5) -> None:
        self.port = free_port()
        self.warned: list[str] = []
        self.result: list[Any] = []
        self._settings = {"secret": SECRET, "meet_s": meet_s, "greet_s": greet_s}
        self._count = count
        self._thread = threading.Thread(target=self._first)
        self._thread.start()

    def _first(self) -> None:
        try:
            met = Rendezvous(self.rank(0), warn=self.warned.append, **self._settings)
            with met:
                self.result = met.all_gather("node 0")
        except LaunchError as error:
            self.result = [error]

    def rank(self, node: int) -> NodeRank:
        return NodeRank(node=node, nodes=self._count, host="127.0.0.1", port=self.port)

    def dial(self, address: str = "127.0.0.1") -> socket.socket:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return socket.create_connection((address, self.port), timeout=PATIENCE_S)
            except ConnectionRefusedError:
                if time.monotonic() > end or not self._thread.is_alive():
                    raise
                time.sleep(0.01)

    def join(self, node: int = 1, **settings: Any) -> Any:
        """Come as a node; return what all said."""
        with Rendezvous(self.rank(node), **{**self._settings, **settings}) as met:
            return met.all_gather(f"node {node}")

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not any(words in text for text in self.warned):
            assert time.monotonic() < end, (words, self.warned)
            time.sleep(0.01)

    def end(self) -> Any:
        self._thread.join(PATIENCE_S)
        return self.result


def read(connection: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count and (part := connection.recv(count - len(text))):
        text += part
    return text


def sealed(secret: bytes, greetings: bytes, data: bytes, *, number: int = 0) -> bytes:
    """Return a message of a node to node 0 as it is described."""
    key = hmac.new(secret, b"0" + greetings, hashlib.sha256).digest()
    head = struct.pack("!QQ", number, len(data))
    code = hmac.new(key, head + data, hashlib.sha256).digest()
    return struct.pack("!Q", len(data)) + data + code


def says(data: bytes, *, secret: bytes = SECRET) -> Callable[[Job], None]:
    """Introduce itself with the secret, by these words."""

    def peer(job: Job) -> None:
        with job.dial() as connection:
            theirs, ours = read(connection, 45), MAGIC + os.urandom(32)
            connection.sendall(ours + sealed(secret, theirs + ours, data))
            connection.recv(1000)

    return peer


def sends(data: bytes) -> Callable[[Job], None]:
    """Send bytes, and wait until node 0 closes the connection."""

    def peer(job: Job) -> None:
        with job.dial() as connection, contextlib.suppress(ConnectionResetError):
            connection.sendall(data)
            while connection.recv(1000):
                pass

    return peer


def hangs_up(job: Job) -> None:
    with job.dial() as connection:
        read(connection, 45)


GREETING = MAGIC + bytes(32)


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (sends(b"GET / HTTP/1.1\r\n\r\n"), "does not speak as a node"),
        (sends(bytes(range(256)) * 400), "does not speak as a node"),
        (sends(b""), "silent for 1.5 s"),
        (sends(GREETING), "silent for 1.5 s"),
        (sends(GREETING + struct.pack("!Q", 100) + b"{"), "silent for 1.5 s"),
        (hangs_up, "closed the connection"),
        (sends(GREETING + b"\xff" * 8), "a message of 18446744073709551615 bytes"),
        (sends(GREETING + struct.pack("!Q", 4097)), "a message of 4097 bytes; 4096 are allowed"),
        (sends(GREETING + struct.pack("!Q", 10) + bytes(42)), "does not know this job's secret"),
        (says(b'{"node": 1, "nodes": 2}', secret=b"another one of 32 characters...."), "secret"),
        (says(b"[" * 4000), "not JSON"),
        (says(b"\x80\x04."), "not JSON"),
        (says(b"{}"), "does not say which node"),
        (says(b'{"node": true, "nodes": 2}'), "does not say which node"),
        (says(b'{"node": 1, "nodes": 3}'), "says that there are 3 nodes"),
        (says(b'{"node": 0, "nodes": 2}'), "says that it is node 0 of 2"),
        (says(b'{"node": -1, "nodes": 2}'), "says that it is node -1 of 2"),
    ],
)
def test_who_is_no_node_of_the_job_is_dropped_and_named_and_the_job_goes_on(
    peer: Callable[[Job], None], why: str
) -> None:
    job = Job()

    peer(job)
    job.wait_for(why)
    heard = job.join()

    assert heard == job.end() == ["node 0", "node 1"]
    assert [text.partition(": ")[2][:19] for text in job.warned] == ["dropped 127.0.0.1: "]


def test_what_is_written_here_from_the_description_is_a_node() -> None:
    job = Job()

    with job.dial() as connection:
        theirs, ours = read(connection, 45), MAGIC + os.urandom(32)
        connection.sendall(ours + sealed(SECRET, theirs + ours, b'{"node": 1, "nodes": 2}'))
        (length,) = struct.unpack("!Q", read(connection, 8))
        welcome = json.loads(read(connection, length + 32)[:length])
        connection.sendall(sealed(SECRET, theirs + ours, b'"by hand"', number=1))
        heard = job.end()

    assert welcome == {"welcome": 1}
    assert heard == ["node 0", "by hand"]


def test_a_crowd_of_silent_connections_does_not_keep_a_node_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_NEWCOMERS", 8)
    job = Job(greet_s=30.0)

    crowd = [job.dial() for _ in range(30)]
    heard = job.join()

    assert heard == job.end()
    assert job.warned == ["rendezvous: dropped 127.0.0.1: too many connections at once"]
    for connection in crowd:
        connection.close()


def test_the_second_that_says_it_is_one_node_is_told_so_and_the_first_stays() -> None:
    job = Job(count=3)
    first = Rendezvous(job.rank(1), secret=SECRET)

    (second,) = in_threads(job.join)
    heard = in_threads(lambda: job.join(2), lambda: first.all_gather("the first"))

    assert "two processes say that they are node 1" in str(second)
    assert heard == [job.end()] * 2 == [["node 0", "the first", "node 2"]] * 2
    job.wait_for("dropped 127.0.0.1: two processes say that they are node 1")
    first.__exit__(None, None, None)


def test_a_node_that_is_started_again_before_all_are_there_takes_its_place() -> None:
    job = Job(count=3)
    before = Rendezvous(job.rank(1), secret=SECRET)
    before._send(0, "said before it died")
    before.__exit__(None, None, None)

    def again() -> Any:
        time.sleep(0.5)  # behind node 2, with which the dead one would make all
        return job.join(1)

    heard = in_threads(again, lambda: job.join(2))

    assert heard == [job.end()] * 2 == [["node 0", "node 1", "node 2"]] * 2


def test_a_node_that_says_why_it_leaves_before_all_are_there_ends_the_job() -> None:
    job = Job(count=3)
    before = Rendezvous(job.rank(1), secret=SECRET)
    before.__exit__(LaunchError, LaunchError("the text does not exist"), None)
    time.sleep(0.2)

    (second,) = in_threads(lambda: job.join(2))

    (error,) = job.end()
    assert str(error) == str(second) == "node 1: the text does not exist"


def test_nodes_that_miss_are_named_with_who_was_dropped() -> None:
    job = Job(count=3, meet_s=2.0)
    hangs_up(job)

    present = Rendezvous(job.rank(2), secret=SECRET)
    (said,) = in_threads(lambda: present.all_gather("here"))

    (error,) = job.end()
    assert f"node 1 of 3 did not come to 127.0.0.1:{job.port}" in str(error)
    assert "Only this machine reaches 127.0.0.1" in str(error)
    assert "Dropped: 127.0.0.1: it closed the connection" in str(error)
    assert "node 0: nodes: node 1 of 3 did not come" in str(said)
    present.__exit__(None, None, None)


def test_nodes_that_wait_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.1)
    job = Job(count=2, meet_s=1.0)

    job.end()
    with pytest.raises(LaunchError, match="does not answer"):
        Rendezvous(job.rank(1), secret=SECRET, meet_s=1.0)

    ours, theirs = capsys.readouterr().err.splitlines()
    assert ours == "meshwright: node 0 of 2 waits for node 1, 1 s at most"
    assert (
        theirs == f"meshwright: node 1 of 2 waits for node 0 at 127.0.0.1:{job.port}, 1 s at most"
    )


class Tapped:
    """Passes a connection on to node 0, keeps what goes there, and may change it."""

    def __init__(self, job: Job, change: Callable[[bytes], bytes] = lambda part: part) -> None:
        self.taken: list[bytes] = []
        self._job, self._change = job, change

    def join(self) -> Any:
        """Come as node 1 over the tap; return what all said."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            tap = threading.Thread(target=self._pass, args=(server,))
            tap.start()
            port = server.getsockname()[1]
            node_rank = NodeRank(node=1, nodes=2, host="127.0.0.1", port=port)
            try:
                with Rendezvous(node_rank, secret=SECRET) as met:
                    return met.all_gather({"pay": 1000})
            finally:
                tap.join()

    def _pass(self, server: socket.socket) -> None:
        theirs, _ = server.accept()
        with theirs, self._job.dial() as ours:
            back = threading.Thread(target=self._copy, args=(ours, theirs, False))
            back.start()
            self._copy(theirs, ours, True)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                self.taken += [part] if forth else []
                target.sendall(self._change(part) if forth else part)
            target.shutdown(socket.SHUT_WR)


def test_a_recorded_exchange_is_worthless_when_it_is_sent_again() -> None:
    first = Job()
    recorded = Tapped(first)
    assert recorded.join()[1] == {"pay": 1000}
    assert first.end()[1] == {"pay": 1000}
    job = Job()

    sends(b"".join(recorded.taken))(job)
    job.wait_for("does not know this job's secret")
    job.join()

    assert job.end() == ["node 0", "node 1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.replace(b"1000", b"9000"),
        lambda part: part[:-1] + bytes([part[-1] ^ 1]),
        lambda part: part.replace(struct.pack("!Q", 13), struct.pack("!Q", 12)) + b"x",
    ],
)
def test_a_message_that_was_changed_on_the_way_is_not_believed(
    change: Callable[[bytes], bytes],
) -> None:
    job = Job()
    tapped = Tapped(job, lambda part: change(part) if b"pay" in part else part)

    in_threads(tapped.join)

    (error,) = job.end()
    assert "node 1: it does not know this job's secret" in str(error)
    assert "writes into its connection" in str(error)


def test_a_message_that_comes_twice_is_not_believed() -> None:
    def work(met: Rendezvous) -> None:
        met.all_gather("once")
        if met.node_rank.node == 1:
            again = met._others[0]
            again._sent -= 1  # the same number under the same key, as who recorded it would send
            again.send("once")
        met.all_gather("more")

    results = of_nodes(2, work)

    assert "node 1: it does not know this job's secret" in str(results[0])


def test_a_node_without_the_secret_says_which_setting_to_look_at() -> None:
    job = Job(meet_s=2.0)
    warned: list[str] = []
    other = {"secret": b"another one of 32 characters....", "meet_s": 1.0, "warn": warned.append}

    (said,) = in_threads(lambda: job.join(**other))

    assert "what answers is not node 0 of this job with its secret" in str(said)
    assert "MESHWRIGHT_SECRET" in warned[0]
    assert len(warned) == 1
    assert "does not know this job's secret" in str(job.end()[0])


@contextlib.contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Something that is no node 0 and answers once; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(answer)
                with contextlib.suppress(OSError):
                    connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listening.getsockname()[1])
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"", GREETING + b"\xff" * 100, GREETING * 2],
)
def test_what_is_not_node_0_is_not_believed(answer: bytes) -> None:
    warned: list[str] = []

    with (
        server(answer) as port,
        pytest.raises(LaunchError, match="what answers is not node 0 of this job"),
    ):
        node_rank = NodeRank(node=1, nodes=2, host="127.0.0.1", port=port)
        Rendezvous(node_rank, secret=SECRET, meet_s=0.0, greet_s=0.3, warn=warned.append)

    assert len(warned) == 1


@pytest.mark.parametrize(
    ("environment", "asked", "way"),
    [
        ({}, {"nodes": 2, "node": 0, "rendezvous": "127.0.0.1:PORT"}, "--rendezvous HOST:PORT"),
        (
            {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "PORT"},
            {},
            "PET_MASTER_PORT",
        ),
        (
            {
                "JOB_COMPLETION_INDEX": "0",
                "NNODES": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "PORT",
            },
            {},
            "MASTER_PORT in the pods' environment",
        ),
    ],
)
def test_a_port_that_is_taken_is_said_with_the_way_out(
    environment: dict[str, str], asked: dict[str, Any], way: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = {name: value.replace("PORT", port) for name, value in environment.items()}
        if asked:
            asked = {**asked, "rendezvous": asked["rendezvous"].replace("PORT", port)}

        with pytest.raises(LaunchError) as error:
            Rendezvous(node_rank_of(told, **asked), secret=SECRET)

    assert f"port {port} of 127.0.0.1 is taken" in str(error.value)
    assert way in str(error.value)


def test_node_0_listens_at_the_address_that_was_named_and_nowhere_else() -> None:
    job = Job()
    job.dial().close()

    for elsewhere in {"127.0.0.2", *addresses.interfaces()} - {"127.0.0.1"}:
        if not elsewhere.startswith("fe80"):
            with pytest.raises(OSError):
                socket.create_connection((elsewhere, job.port), timeout=1).close()
    job.join()
    job.end()


@pytest.mark.skipif("::1" not in addresses.interfaces(), reason="this machine has no IPv6")
def test_nodes_meet_at_an_address_of_ipv6() -> None:
    port = free_port()

    def node(number: int) -> Any:
        node_rank = node_rank_of({}, nodes=2, node=number, rendezvous=f"[::1]:{port}")
        with Rendezvous(node_rank, secret=SECRET, meet_s=PATIENCE_S) as met:
            listening, _ = supervise.free_socket(met.address)
            os.close(listening)
            return met.all_gather(number), met.address, met.interface

    results = in_threads(lambda: node(0), lambda: node(1))

    assert results == [([0, 1], "::1", "lo")] * 2


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What names are resolved to, one answer after another; the last one stays."""
    known: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def resolved(host: str, *rest: Any, **settings: Any) -> Any:
        if host not in known:
            return real(host, *rest, **settings)
        answers = known[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [one for address in found for one in real(address, *rest, **settings)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return known


def listening(host: str, *, wait_s: float = 5.0) -> tuple[list[str], list[str]]:
    """Return the addresses at which a node 0 of this name listens, and what it warned of."""
    warned: list[str] = []
    node_rank = NodeRank(node=0, nodes=2, host=host, port=free_port())
    servers = addresses.listening(node_rank, time.monotonic() + wait_s, warned.append)
    found = [each.getsockname()[0] for each in servers]
    for each in servers:
        each.close()
    return found, warned


def test_a_name_that_only_this_machine_knows_as_its_own_is_said(
    names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["debian"] = [["127.0.1.1"]]

    found, warned = listening("debian")

    assert found == ["127.0.1.1"]
    assert "debian is 127.0.1.1 here, which only this machine reaches" in warned[0]
    assert "MESHWRIGHT_LISTEN" in warned[0]
    monkeypatch.setenv("MESHWRIGHT_LISTEN", "127.0.0.1")
    assert listening("debian") == (["127.0.0.1"], [])
    assert listening("127.0.0.1") == (["127.0.0.1"], [])


def test_of_several_addresses_of_a_name_those_of_this_machine_are_listened_at(
    names: dict[str, list[list[str]]],
) -> None:
    names["several"] = [["198.51.100.7", "127.0.0.1", "127.0.0.2"]]

    assert listening("several")[0] == ["127.0.0.1", "127.0.0.2"]


def test_a_name_that_is_known_a_moment_later_is_waited_for(
    names: dict[str, list[list[str]]],
) -> None:
    names["job-0.job"] = [[], ["198.51.100.7"], ["127.0.0.1"]]

    found, warned = listening("job-0.job")

    assert found == ["127.0.0.1"]
    assert "job-0.job, as the command line names node 0, cannot be resolved" in warned[0]


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("198.51.100.7", "is 198.51.100.7, where this machine cannot listen"),
        ("elsewhere", "is 198.51.100.7, where this machine cannot listen"),
        ("unknown", "cannot be resolved"),
    ],
)
def test_an_address_of_another_machine_is_refused_with_the_way_out(
    host: str, why: str, names: dict[str, list[list[str]]]
) -> None:
    names["elsewhere"], names["unknown"] = [["198.51.100.7"]], [[]]

    with pytest.raises(LaunchError, match="MESHWRIGHT_LISTEN") as error:
        listening(host, wait_s=0.0)

    assert why in str(error.value)
    for own in addresses.interfaces():
        if "." in own and own != "127.0.0.1":
            assert own in str(error.value)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment in which only the user's own folder may have a secret."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_nodes_with_one_home_folder_make_one_secret(home: dict[str, str]) -> None:
    found = in_threads(*[lambda: job_secret(home)] * 8)

    file = Path(home["XDG_CONFIG_HOME"], "meshwright", "secret")
    assert set(found) == {job_secret(home)} == {file.read_bytes().strip()}
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(found[0]) >= 43  # 32 bytes in base 64
    assert [each.name for each in file.parent.iterdir()] == ["secret"]


def test_a_secret_comes_from_the_environment_or_a_file_that_only_its_owner_reads(
    home: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "job.secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)

    assert job_secret({**home, "MESHWRIGHT_SECRET_FILE": str(file)}) == b"0123456789abcdef"
    assert job_secret({**home, "MESHWRIGHT_SECRET": "0123456789abcdef\n"}) == b"0123456789abcdef"
    assert not Path(home["XDG_CONFIG_HOME"]).exists()
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(LaunchError, match="others may read this secret"):
            job_secret({"MESHWRIGHT_SECRET_FILE": str(file)})


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"MESHWRIGHT_SECRET": "short"}, "MESHWRIGHT_SECRET: has a secret of 5 bytes"),
        ({"MESHWRIGHT_SECRET": "x" * 5000}, "has a secret of 5000 bytes"),
        ({"MESHWRIGHT_SECRET_FILE": "/none/secret"}, "/none/secret: the secret cannot be read"),
        ({"MESHWRIGHT_SECRET_FILE": "/dev/zero"}, "has a secret of 4097 bytes"),
        ({"XDG_CONFIG_HOME": "/dev/null"}, "set MESHWRIGHT_SECRET or MESHWRIGHT_SECRET_FILE"),
    ],
)
def test_a_secret_that_cannot_be_one_is_refused(told: dict[str, str], why: str) -> None:
    with pytest.raises(LaunchError) as error:
        job_secret(told)

    assert why in str(error.value)


def test_a_secret_is_neither_told_to_ranks_nor_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHWRIGHT_SECRET", SECRET.decode())
    (tmp_path / "logs").mkdir()
    (tmp_path / "ranks").mkdir()

    bad = supervise.supervise(
        ["env"],
        [0],
        lambda rank, port: {"RANK": str(rank), "MASTER_PORT": port},
        folder=tmp_path,
        world=1,
        rendezvous=Rendezvous(ALONE),
        leads=True,
        refresh=lambda: None,
    )
    job = Job(meet_s=0.5)
    (said,) = job.end()

    assert bad is None
    environment = run.log_file(tmp_path, 0).read_text()
    assert "RANK=0" in environment
    for text in (environment, str(said), *job.warned, *capfd.readouterr()):
        assert SECRET.decode() not in text


def test_ranks_of_one_node_are_told_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    told = preflight.rank_environment(0, ranks=2, port=1)

    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    with Rendezvous(ALONE) as met:
        listening, _ = supervise.free_socket(met.address)
        with socket.socket(fileno=listening) as store:
            assert store.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("module", [addresses, channel, nodes, rendezvous])
def test_examples_in_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.fixture(autouse=True)
def no_listener_stays() -> Iterator[None]:
    """Every thread of a job has ended with its test."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    assert left == []


def test_nothing_of_the_rendezvous_imports_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import meshwright.runtime.run.rendezvous"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_who_waits_for_a_reason_looks_whether_it_can_come() -> None:
    """The node that has it may stand still, which agents find by its silence."""
    waits: list[int] = []
    looked = threading.Event()

    def meanwhile() -> None:
        if threading.get_ident() in waits:
            waits.clear()
            raise rendezvous.NodeLeft("node 1 does not answer")

    def work(joined: Rendezvous) -> None:
        if joined.node_rank.node == 0:
            waits.append(threading.get_ident())
            with pytest.raises(rendezvous.NodeLeft, match="node 1 does not answer"):
                joined.await_reason(PATIENCE_S)
            looked.set()
        else:  # one that left before node 0 has all nodes would be waited for
            assert looked.wait(PATIENCE_S)

    of_nodes(2, work, meanwhile=meanwhile)
