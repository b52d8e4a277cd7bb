"""Launchers that keep each other's copies: all of one, of the right node, or nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.resilience.membership import Agent, Held
from meshwright.runtime.resilience.replication import KeptCopies, Pairing, partner_places
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.run.addresses import listening_socket
from meshwright.runtime.run.authenticated_channel import GREETING_BYTES, Channel, exactly
from tests.limits import PATIENCE_S

SECRET = b"a secret of sixteen letters or more"
CONTENT = memoryview(bytes(range(256)) * 5000)
"""More than one piece of a channel's content."""


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_partners_are_of_other_domains_as_far_as_there_are(domains: list[int]) -> None:
    partners = partner_places(domains)

    assert sorted(partners) == list(range(len(domains)))
    assert all(one != place for place, one in enumerate(partners)) or len(domains) == 1
    largest = max(map(domains.count, domains))
    apart = sum(domains[one] != domains[place] for place, one in enumerate(partners))
    others = len(domains) - largest
    assert apart >= min(len(domains), 2 * others) - (largest == len(domains)) * len(domains)
    if 2 * largest <= len(domains):
        assert apart == len(domains)


class Node:
    """A launcher with slots, and what it knows to be whole."""

    def __init__(self, number: int, slots: Slots) -> None:
        self.slots, self.held = slots, list[Held]()
        self.listening = listening_socket(socket.AF_INET, ("127.0.0.1", 0))
        self.agent = Agent(
            node=number,
            start=f"start {number}",
            host="127.0.0.1",
            port=1,
            meet_port=1,
            copies_port=self.listening.getsockname()[1],
        )
        self.copies = KeptCopies(slots, self.listening, SECRET, self.held.append)

    def begin(self, other: Node | None, *, epoch: int = 1, ranks: int = 1) -> None:
        self.slots.begin(epoch=epoch, wards=ranks, has_partner=other is not None)
        self.slots.environment(ranks)
        agent = None if other is None else other.agent
        self.copies.begin(
            Pairing(run="a run", epoch=epoch, own=self.agent, partner=agent, ward=agent)
        )

    def write(self, step: int, *, rank: int = 0, slot: int = 0, epoch: int = 1) -> None:
        label = {
            "step": step,
            "run": "ab",
            "epoch": epoch,
            "rank": self.agent.node + 2 * rank,
            "world": 4,
            "behind": None if step == 1 else [step - 1, "ab"],
        }
        self.slots.node.own[rank][slot].write(label, [CONTENT])

    def kept(self, step: int) -> bool:
        kept = self.slots.node.kept
        return kept is not None and kept.has_copy("ab", step)

    def ward_steps(self, rank: int = 0) -> list[int]:
        read = [slot.read() for slot in self.slots.node.wards[rank]]
        return sorted(found[0]["step"] for found in read if found is not None)


@pytest.fixture
def two() -> Iterator[tuple[Node, Node]]:
    with contextlib.ExitStack() as held:
        nodes = [Node(number, held.enter_context(Slots())) for number in (0, 1)]
        for node in nodes:
            held.callback(node.listening.close)
            held.enter_context(node.copies)
        yield nodes[0], nodes[1]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_ranks_write_is_kept_by_the_partner(two: tuple[Node, Node]) -> None:
    first, second = two
    for node in two:
        node.begin(second if node is first else first, ranks=2)
    first.write(1, rank=0)
    time.sleep(0.2)
    assert not first.kept(1), "one of its two ranks has written nothing"
    first.write(1, rank=1)
    until(lambda: first.kept(1))

    (own, *_), (ward, *_) = first.held, second.held
    assert (own.epoch, own.step, own.of) == (ward.epoch, ward.step, ward.of) == (1, 1, 4)
    assert {part for one in second.held for part in one.parts} == {0, 2}
    read = next(found for slot in second.slots.node.wards[1] if (found := slot.read()))
    assert (read[0]["rank"], bytes(read[1])) == (2, bytes(CONTENT))
    assert second.slots.node.kept is not None
    assert not second.kept(1)

    for step, slot in ((2, 1), (3, 0)):
        for rank in (0, 1):
            first.write(step, rank=rank, slot=slot)
        until(lambda step=step: first.kept(step))  # type: ignore[misc]
    assert second.ward_steps() == [2, 3]
    assert first.slots.node.kept is not None
    assert 0 < first.slots.node.kept.processor_s < 1


def test_a_copy_that_does_not_come_whole_leaves_the_one_before(two: tuple[Node, Node]) -> None:
    """Its memory is damaged before it is sent: what comes is not what was written."""
    first, second = two
    first.begin(second)
    second.begin(first)
    first.write(1)
    until(lambda: first.kept(1))
    label = {"step": 2, "run": "ab", "epoch": 1, "rank": 0, "world": 4, "behind": [1, "ab"]}
    with first.slots.node.own[0][1].fill(json.dumps(label), len(CONTENT)) as filling:
        filling[0 : len(CONTENT)] = CONTENT
        filling.commit(12345)
    time.sleep(0.5)

    assert not first.kept(2)
    assert second.ward_steps() == [1]
    first.write(3, slot=1)
    until(lambda: first.kept(3))


def test_in_a_new_epoch_only_what_is_written_in_it_is_sent(two: tuple[Node, Node]) -> None:
    """Not what was there before, which may be all that is left of somebody's state."""
    first, second = two
    first.begin(second)
    second.begin(first)
    first.write(1)
    until(lambda: first.kept(1))
    for node, other in ((first, second), (second, first)):
        node.begin(other, epoch=2)
    time.sleep(0.3)
    assert {one.epoch for one in second.held} == {1}

    first.write(2, slot=1, epoch=2)
    until(lambda: first.kept(2))
    assert second.held[-1].epoch == 2


def test_a_node_that_is_alone_waits_for_nobody(two: tuple[Node, Node]) -> None:
    first, _ = two
    first.begin(None)
    first.write(1)
    until(lambda: bool(first.held))

    assert first.slots.node.kept is None


def test_strangers_and_nodes_that_are_no_wards_leave_nothing(two: tuple[Node, Node]) -> None:
    first, second = two
    first.begin(None)
    second.begin(first)
    for secret, start in ((b"another secret of many letters", "start 0"), (SECRET, "start 7")):
        with socket.create_connection(("127.0.0.1", second.agent.copies_port)) as connection:
            channel = Channel(connection, secret, serves=False)
            channel.meet(exactly(connection, GREETING_BYTES, until=time.monotonic() + PATIENCE_S))
            connection.sendall(channel.greeting)
            channel.send({"run": "a run", "epoch": 1, "from": start})
            if secret == SECRET:
                assert "refused" in channel.receive(until=time.monotonic() + PATIENCE_S)
            assert connection.recv(1) == b""
    for noise in (b"", b"GET / HTTP/1.1\r\n" * 50, bytes(10_000)):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", second.agent.copies_port)) as connection,
        ):
            connection.sendall(noise)

    first.begin(second)
    first.write(1)
    until(lambda: first.kept(1))
    assert second.ward_steps() == [1]
