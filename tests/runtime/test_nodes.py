"""Nodes find their seats in what starts jobs, meet at one table, and leave together."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable
from typing import Any

import pytest

from planner.errors import LaunchError
from runtime import nodes
from runtime.nodes import Meeting, Seat, seat_of
from tests.runtime.ports import free_port


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, "127.0.0.1")),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "7",
            },
            (1, 2, "a", 7),
        ),
        (
            {
                "GROUP_WORLD_SIZE": "3",
                "GROUP_RANK": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "b",
                "MASTER_PORT": "100",
            },
            (2, 3, "b", 101),
        ),
        (
            {
                "SLURM_NNODES": "4",
                "SLURM_NTASKS": "4",
                "SLURM_NODEID": "3",
                "SLURM_PROCID": "3",
                "SLURM_JOB_NODELIST": "gpu[07-09],x1",
                "SLURM_JOB_ID": "1042",
            },
            (3, 4, "gpu07", 29442),
        ),
        ({"SLURM_NNODES": "4"}, (0, 1, "127.0.0.1")),  # a batch script, not a step
        (
            {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "job-0.train"},
            (1, 2, "job-0.train"),
        ),
    ],
)
def test_seats_are_read_from_what_starts_jobs(
    environment: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.nodes.shutil.which", lambda _: None)

    seat = seat_of(environment)

    assert (seat.node, seat.nodes, seat.host, seat.port)[: len(expected)] == expected


def test_what_is_asked_for_comes_before_the_environment() -> None:
    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}

    assert seat_of(kubeflow, nodes=3, node=0, rendezvous="b:1").host == "b"
    assert seat_of(kubeflow, nodes=1).nodes == 1


@pytest.mark.parametrize(
    ("environment", "asked", "said"),
    [
        ({}, {"nodes": 2}, "--rendezvous"),
        ({}, {"nodes": 2, "node": 2, "rendezvous": "a"}, "nodes count from 0"),
        ({"PET_NNODES": "2:4", "PET_MASTER_ADDR": "a"}, {}, "whole numbers"),
        (
            {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a"},
            {},
            "--nproc-per-node 1",
        ),
        (
            {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
            {},
            "--ntasks-per-node=1",
        ),
        ({"JOB_COMPLETION_INDEX": "0", "NNODES": "2"}, {}, "headless service"),
    ],
)
def test_what_cannot_be_understood_says_what_to_write(
    environment: dict[str, str], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        seat_of(environment, **asked)


def at_table(count: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """Let `count` threads be nodes; return what each returned or raised."""
    port = free_port()
    results: list[Any] = [None] * count

    def sit(node: int) -> None:
        seat = Seat(node=node, nodes=count, host="127.0.0.1", port=port)
        try:
            with Meeting(seat, meet_s=20) as meeting:
                results[node] = work(meeting)
        except LaunchError as error:
            results[node] = error

    threads = [threading.Thread(target=sit, args=(node,)) for node in reversed(range(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_hear_what_all_say_in_the_order_of_the_nodes() -> None:
    def work(meeting: Meeting) -> Any:
        first = meeting.everyones({"node": meeting.seat.node})
        return first, meeting.everyones(len(first)), meeting.interface

    assert at_table(3, work) == [([{"node": 0}, {"node": 1}, {"node": 2}], [3, 3, 3], "lo")] * 3


@pytest.mark.parametrize("leaving", [0, 2])
def test_a_node_that_fails_tells_all_others_why(leaving: int) -> None:
    def work(meeting: Meeting) -> None:
        meeting.everyones("here")
        if meeting.seat.node == leaving:
            raise LaunchError("the disk is full")
        meeting.everyones("done")

    results = at_table(3, work)

    assert str(results.pop(leaving)) == "the disk is full"
    assert [str(result) for result in results] == [f"node {leaving}: the disk is full"] * 2


def test_while_ranks_work_a_node_looks_whether_others_left() -> None:
    early = threading.Event()

    def work(meeting: Meeting) -> str:
        if meeting.seat.node == 1:
            early.set()
            return str(meeting.everyones("done early"))
        early.wait(10)
        while not meeting._early:
            meeting.check()  # what comes too early is kept
        return str(meeting.everyones("done"))

    assert at_table(2, work) == ["['done', 'done early']"] * 2


def test_two_that_say_they_are_one_node_are_refused() -> None:
    port = free_port()
    seats = [Seat(node=node, nodes=3, host="127.0.0.1", port=port) for node in (0, 1, 1)]
    said: list[str] = []

    def sit(seat: Seat) -> None:
        try:
            with Meeting(seat, meet_s=20) as meeting:
                meeting.everyones("here")
        except LaunchError as error:
            said.append(str(error))

    threads = [threading.Thread(target=sit, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert any("two processes say they are node 1" in text for text in said)


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(nodes).failed == 0
