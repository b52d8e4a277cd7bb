"""Launches on several nodes: one launcher each, here on one machine or on hosts of the rig."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rig
from meshwright.planner.documents.document import write
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.preflight import ranks_of_node
from meshwright.runtime.run.node_rank import NodeRank
from meshwright.runtime.run.run_report import RunReport
from tests.limits import PATIENCE_S
from tests.runtime.forked_zygote import ForkedZygote
from tests.runtime.ports import free_port
from tests.runtime.rooms import MODEL, ROOT, Room, plan_of

pytestmark = pytest.mark.ranks


def on_nodes(
    room: Room,
    plan: Plan,
    *,
    devices: tuple[int, ...] = (1, 1),
    **options: Any,
) -> list[RunReport | MeshwrightError | None]:
    """Launch on as many nodes as there are device counts; return how each of them ended."""
    port = free_port()
    ends: list[RunReport | MeshwrightError | None] = [None] * len(devices)
    path = room.plan(plan)

    def node(number: int, ranks: Zygote) -> None:
        node_rank = NodeRank(node=number, nodes=len(devices), host="127.0.0.1", port=port)
        settings: dict[str, Any] = {"model": MODEL, "quiet": True}
        for name, value in options.items():
            settings[name] = value(number) if callable(value) else value
        asked = room.asked(settings)
        try:
            ends[number] = launch(
                Launch(path, asked, node_rank=node_rank, nodes=devices, zygote=ranks, **settings)
            )
        except MeshwrightError as error:
            ends[number] = error

    with contextlib.ExitStack() as stack:
        # Forked here: where another thread forks, torch's caches of this one are destroyed in the
        # child, and with them process groups, which wait there for ever.
        zygotes = [stack.enter_context(ForkedZygote()) for _ in devices]
        threads = [threading.Thread(target=node, args=each) for each in enumerate(zygotes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    return ends


def test_ranks_sit_on_the_node_that_has_their_device() -> None:
    plan = plan_of(data=4, tensor=2)

    assert ranks_of_node(plan, 0, [8]) == {rank: rank for rank in range(8)}
    assert ranks_of_node(plan, 1, [3, 3, 2]) == {3: 0, 4: 1, 5: 2}
    assert ranks_of_node(plan, 2, [3, 3, 2]) == {6: 0, 7: 1}


def test_two_nodes_train_as_one_does(room: Room) -> None:
    alone = room.run(plan_of(), steps=2, output=room.folder / "alone")

    first, second = on_nodes(room, plan_of(data=2), steps=2)

    assert second is None
    assert isinstance(first, RunReport), first
    assert (first.ranks, len(first.stages)) == (2, 1)
    assert list(first.losses) == pytest.approx(list(alone.losses), rel=1e-5)
    assert (room.folder / "out" / "node-00001" / "ranks" / "rank-00001.json").exists()


@pytest.mark.matrix
def test_two_nodes_go_on_from_a_shared_checkpoint(room: Room) -> None:
    alone = room.run(plan_of(), steps=4, output=room.folder / "alone")
    plan, saved = plan_of(data=2), room.folder / "saved"

    first, second = on_nodes(room, plan, steps=2, checkpoint=saved)
    resumed, _ = on_nodes(
        room, plan, steps=4, checkpoint=saved, resume=True, output=room.folder / "out2"
    )

    assert second is None
    assert isinstance(first, RunReport), first
    assert isinstance(resumed, RunReport), resumed
    assert [*first.losses, *resumed.losses] == pytest.approx(list(alone.losses), rel=1e-5)
    assert checkpoint.progress(checkpoint.newest(saved) or saved).step == 4
    assert not list(saved.glob(".seen-*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": lambda node: 2 + node}, "node 1 has another steps (3) than node 0 (2)"),
        (
            {"steps": 2, "checkpoint": "saved of each"},
            "another folder of checkpoints",
        ),
    ],
)
def test_nodes_that_would_do_different_things_are_refused(
    room: Room, options: dict[str, Any], said: str
) -> None:
    if "checkpoint" in options:
        options = {**options, "checkpoint": lambda node: room.folder / f"saved-{node}"}

    ends = on_nodes(room, plan_of(data=2), **options)

    assert all(said in str(end) for end in ends), ends


def test_what_one_node_lacks_ends_the_others_too(room: Room) -> None:
    there: Callable[[int], Path] = lambda node: room.text if node == 0 else room.folder / "none"  # noqa: E731

    ends = on_nodes(room, plan_of(data=2), steps=2, data=there)

    assert "none: does not exist" in str(ends[1])
    assert "node 1:" in str(ends[0])
    assert "none: does not exist" in str(ends[0])


@pytest.mark.matrix
def test_a_rank_killed_on_another_node_is_named_on_both(room: Room) -> None:
    def kill_rank_1() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            metrics = room.folder / "out" / "metrics.jsonl"
            if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
                ranks = room.ranks()
                if 1 in ranks:
                    os.kill(ranks[1], signal.SIGKILL)
                    return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_rank_1)
    killer.start()
    ends = on_nodes(room, plan_of(data=2), steps=5000)
    killer.join()

    assert all(isinstance(end, LaunchError) for end in ends), ends
    assert "rank 1 was killed by SIGKILL" in str(ends[1])
    assert "node 1: rank 1 was killed by SIGKILL" in str(ends[0])
    assert room.ranks() == {}


HOST = """
import json, os, sys
from meshwright.planner.documents.document import read
from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run.node_rank import node_rank_of
from meshwright.runtime.run.launch_options import LaunchRun
folder = sys.argv[1]
report = launch(Launch(folder + "/plan.yaml", LaunchRun(
    data=folder + "/text.txt", output=folder + "/out", steps=3),
    model=read(ModelGraph, folder + "/model.yaml"), quiet=True,
    node_rank=node_rank_of(os.environ), nodes=(2, 2)))
print(json.dumps(report.losses if report else None))
"""


@pytest.mark.matrix
@pytest.mark.skipif(rig.refusal() is not None, reason=str(rig.refusal()))
def test_hosts_with_networks_of_their_own_train_as_one_process(room: Room) -> None:
    alone = room.run(plan_of(), steps=3, output=room.folder / "alone")
    write(plan_of(data=2, pipeline=2), room.folder / "plan.yaml")
    write(MODEL, room.folder / "model.yaml")

    with rig.rig(2, "1gbit") as hosts:
        said = hosts.run(
            [sys.executable, "-c", HOST, str(room.folder)],
            environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            timeout_s=PATIENCE_S,
            quiet=True,
        )

    assert json.loads(said[1]) is None
    assert json.loads(said[0]) == pytest.approx(list(alone.losses), rel=1e-5)
