"""A node that faulted twice is a spare of the next job, and trains where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.planner.documents.events import Cause
from meshwright.runtime.resilience.faulty_nodes import FaultRegister
from meshwright.runtime.resilience.membership import Agent
from meshwright.runtime.resilience.node_agent import NodeAgent
from meshwright.runtime.run.recovery_policy import RankEnd
from tests.runtime.resilience.test_node_agent import joined, secret

__all__ = ["joined", "secret"]


def node(number: int) -> Agent:
    ports = {"port": 1, "meet_port": 1, "copies_port": 1}
    return Agent(node=number, start="a", host="127.0.0.1", **ports)


def end(cause: Cause, *, waits: bool = False, named: bool = True) -> RankEnd:
    return RankEnd(cause=cause, rank=0, after_step=3, waits=waits, named=named)


@pytest.mark.parametrize(
    ("nodes", "faults", "members", "words"),
    [
        (3, 2, [1, 2], "node 0 (127.0.0.1) faulted 2 times in runs of {} and is a spare"),
        (3, 1, [0, 1], ""),
        (2, 2, [1, 0], "node 0 (127.0.0.1) faulted 2 times in runs of {} and trains"),
    ],
)
def test_a_node_that_faulted_too_often_is_a_spare_of_the_next_job(
    joined: Callable[..., list[NodeAgent]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nodes: int,
    faults: int,
    members: list[int],
    words: str,
) -> None:
    for _ in range(faults):
        FaultRegister(tmp_path).add(node(0), end("crash"))

    found = joined(nodes, members=2)

    assert {tuple(member.node for member in agent.epoch.members) for agent in found} == {
        tuple(members)
    }
    assert (words.format(tmp_path) in capsys.readouterr().out) or not words


def test_what_is_not_a_nodes_fault_is_not_counted(tmp_path: Path) -> None:
    register = FaultRegister(tmp_path)
    for other in (
        *(end("program"), end("out_of_memory"), end("transient")),
        *(end("hang", waits=True), end("corruption", named=False)),
    ):
        register.add(node(0), other)
    assert register.counts() == {}

    register.add(node(1), end("node"))
    register.add(node(1), end("device"))
    for name, text in (("0-a.json", "{"), ("0-b.json", '{"node": 3}'), ("0-c.json", "[" * 9999)):
        (tmp_path / "faults" / name).write_text(text)
    assert register.counts() == {"127.0.0.1 as node 1": 2}
