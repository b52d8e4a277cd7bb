"""Agents that talk over loopback: who is gone is missed, and who knows no secret is not heard."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.resilience import node_agent as agents
from meshwright.runtime.resilience.membership import LOST_S, Epoch, Proposal
from meshwright.runtime.resilience.node_agent import (
    EpochOver,
    NodeAgent,
    Register,
    RunOver,
    agent_of,
)
from meshwright.runtime.run.node_rank import NodeRank
from meshwright.runtime.run.rendezvous import NodeLeft
from tests.limits import PATIENCE_S
from tests.runtime.ports import free_port

SECRET = "a secret of sixteen letters or more"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_SECRET", SECRET)


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Callable[..., list[NodeAgent]]]:
    """Agents that have met; those that are left over leave at the end."""
    ends: list[threading.Event] = []
    threads: list[threading.Thread] = []

    def join(nodes: int, *, members: int, again: int | None = None) -> list[NodeAgent]:
        port = free_port()
        found: dict[int, NodeAgent] = {}
        there = threading.Barrier(nodes + 1 if again is None else 2)

        def live(node: int) -> None:
            rank = NodeRank(node=node, nodes=nodes, host="127.0.0.1", port=port)
            with agent_of(rank, tmp_path, members=members, output="out") as one:
                found[node] = one
                there.wait()
                end.wait()

        end = threading.Event()
        ends.append(end)
        own = [
            threading.Thread(target=live, args=(node,))
            for node in (range(nodes) if again is None else [again])
        ]
        threads.extend(own)
        for thread in own:
            thread.start()
        there.wait(PATIENCE_S)
        return [found[node] for node in sorted(found)]

    yield join
    for end in ends:
        end.set()
    for thread in threads:
        thread.join(PATIENCE_S)


def falls_silent(one: NodeAgent) -> None:
    """End an agent without a word, as a machine that is cut off."""
    one._ended.set()
    one._thread.join()


def next_epoch(proposal: Proposal) -> Epoch:
    last = proposal.epoch
    members = proposal.members(2)
    return last.model_copy(update={"number": last.number + 1, "members": members})


def over_within(one: NodeAgent, seconds: float) -> EpochOver:
    end_s = time.monotonic() + seconds
    while True:
        assert time.monotonic() < end_s
        try:
            one.check()
        except EpochOver as over:
            return over
        time.sleep(0.05)


def nothing() -> None:
    """Nothing happens meanwhile."""


def test_a_silent_lead_is_replaced_by_a_spare_and_comes_back_as_one(
    joined: Callable[..., list[NodeAgent]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the register is full when the next epoch is written, and has room soon."""
    lead, other, spare = joined(3, members=2)
    assert (lead.node_rank().node, other.node_rank().node) == (0, 1)
    assert not spare.roster.is_member
    lead.begin()
    other.begin()
    falls_silent(lead)

    over = over_within(other, LOST_S + PATIENCE_S / 10)
    assert [one.node for one in over.lost] == [0]
    waiting = threading.Thread(target=spare.wait_as_spare, args=(nothing,))
    waiting.start()
    errors = [OSError(errno.ENOSPC, "full"), DocumentError("", "No space left on device")]
    write = other.register.write_if_free

    def write_if_there_is_room(epoch: Epoch) -> bool:
        if errors:
            raise errors.pop()
        return write(epoch)

    monkeypatch.setattr(other.register, "write_if_free", write_if_there_is_room)
    other.regroup(None, over, next_epoch, nothing)
    waiting.join(PATIENCE_S)

    assert [one.node for one in other.epoch.members] == [2, 1]
    assert spare.node_rank().node == 0
    assert other.node_rank().port == spare.roster.agent.meet_port
    assert Register(tmp_path).newest() == other.epoch
    (again,) = joined(3, members=2, again=0)
    assert again.epoch == other.epoch
    assert not again.roster.is_member


def test_a_number_is_taken_once(joined: Callable[..., list[NodeAgent]], tmp_path: Path) -> None:
    lead, _ = joined(2, members=2)
    second = lead.epoch.model_copy(update={"number": 2, "output": "mine"})

    assert lead.register.write_if_free(second)
    assert not lead.register.write_if_free(second.model_copy(update={"output": "another's"}))

    assert Register(tmp_path).newest() == second
    assert [file.name for file in (tmp_path / "epochs").iterdir() if "new" in file.name] == []


def test_a_spare_ends_with_the_run(joined: Callable[..., list[NodeAgent]]) -> None:
    lead, spare = joined(2, members=1)
    lead.begin()
    lead.__exit__(None, None, None)

    with pytest.raises(RunOver, match="over on another node"):
        spare.wait_as_spare(nothing)


def test_a_run_that_is_over_elsewhere_has_no_next_epoch(
    joined: Callable[..., list[NodeAgent]],
) -> None:
    lead, other = joined(2, members=2)
    lead.begin()
    other.begin()
    other.__exit__(None, None, None)

    with pytest.raises(NodeLeft, match="node 1: why"):
        lead.regroup(None, NodeLeft("node 1: why"), next_epoch, nothing)


@pytest.mark.parametrize("code", ["none", "another secret's", "of another message"])
def test_who_does_not_know_the_secret_is_not_heard(
    joined: Callable[..., list[NodeAgent]], code: str
) -> None:
    lead, other = joined(2, members=2)
    said = {**json.loads(other.roster.status().model_dump_json()), "number": 10**6, "phase": "left"}
    text = json.dumps(said).encode()
    key = {"another secret's": b"x" * 32}.get(code, lead._key)
    signed = b"" if code == "of another message" else text
    sealed = b"" if code == "none" else hmac.digest(key, signed, hashlib.sha256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(20):
            stranger.sendto(sealed + text, (lead.roster.agent.host, lead.roster.agent.port))
            stranger.sendto(b"", (lead.roster.agent.host, lead.roster.agent.port))
    time.sleep(2 * agents.LOOK_S)

    assert not lead.roster._has_left(other.roster.agent)
    lead.begin()
    lead.check()


def test_a_broken_file_of_the_register_is_named(tmp_path: Path) -> None:
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "epoch-00000007.json").write_text('{"number": 7}')

    with pytest.raises(LaunchError, match="is no epoch of a run"):
        Register(tmp_path).newest()
