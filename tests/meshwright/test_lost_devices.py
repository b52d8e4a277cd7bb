"""A device that is lost on one of several nodes: its node goes, or one device of each does."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.launch import multi_node
from meshwright.launch.fallback_plans import FallbackPlan, FallbackPlans
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.multi_node import Epochs, LateNode, NodeResources
from meshwright.launch.replan import VISIBLE
from meshwright.planner.documents.document import write
from meshwright.planner.documents.events import Attempt, AttemptEnded, Decision, Incident, events_of
from meshwright.planner.errors import HandedOver, LaunchError
from meshwright.planner.whatif.what_if_changes import changed_cluster
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.launch.launch import RankFailed
from meshwright.runtime.resilience.membership import Agent, Epoch, Proposal, State
from meshwright.runtime.resilience.node_agent import RunOver
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.run_folder import Stopped, append_record, events_file
from tests.meshwright.launch.test_fallback_plans import planned
from tests.meshwright.launch.test_scale_up import agent


class Case:
    """Two nodes of two devices, of which the run knows what it would be on less."""

    def __init__(self, folder: Path, *, node_s: float, device_s: float, spares: int = 0) -> None:
        self.folder = folder
        (folder / "out").mkdir()
        self.fit = planned(folder, cluster="2x2xa10g", data=4)
        self.smaller: dict[tuple[int, int | None], LaunchablePlan] = {}
        for left, each, step_s in ((1, None, node_s), (2, 1, device_s)):
            self._enter(left, each, step_s)
        self.spares = tuple(agent(10 + number) for number in range(spares))
        self.agents = (agent(0), agent(1))
        self.epoch = Epoch(
            number=3,
            run="a run",
            members=self.agents,
            output=str(folder / "out"),
            state=State(step=0),
        )
        self.run = LaunchRun(checkpoint=folder, output=folder / "out")
        self.own = self.epochs(self.agents[0])

    def _enter(self, left: int, each: int | None, step_s: float) -> None:
        machine = self.fit.machine
        cluster = (
            machine.smaller(nodes=machine.groups[0].nodes, devices_per_node=1)
            if each
            else changed_cluster(machine, "devices", 0.5)
        )
        assert cluster is not None
        file = self.folder / f"cluster-{left}.yaml"
        write(cluster, file)
        mesh = self.fit.plan.mesh.model_copy(update={"data_replicate": 2})
        half = {"cluster": str(file), "mesh": mesh, "micro_batches": 2}
        plan = self.fit.plan.model_copy(update=half)
        path = self.folder / f"plan-{left}.yaml"
        write(plan, path)
        entry = FallbackPlan(
            wanted=self.fit.plan.digest,
            left=left,
            each=each,
            path=str(path),
            plan=plan.digest,
            devices=2,
            step_s=step_s,
            memory_bytes=1.0,
        )
        file = FallbackPlans(self.folder)._file(left, each)
        file.write_text(entry.model_dump_json(exclude_none=True))

    def epochs(self, own: Agent) -> Epochs:
        node = SimpleNamespace(epoch=self.epoch, roster=SimpleNamespace(agent=own))
        unused: Any = None
        means = NodeResources(
            agent=cast(Any, node), copies=unused, zygote=unused, slots=unused, keeper=unused
        )
        made = Epochs(self.fit, self.run, means, [], quiet=True)
        made._scale_up = cast(Any, SimpleNamespace(asked=False))
        return made

    def decide(self, end: RankEnd) -> Epoch:
        """Return the epoch behind this end."""
        proposal = Proposal(
            epoch=self.epoch,
            alive=self.epoch.members,
            lost=(),
            spares=self.spares,
            ends=(end,),
            held=(),
        )
        failed = RankFailed("it failed", output=self.folder / "out", end=end)
        self.epoch = self.own.next(proposal, failed, 1.0)
        return self.epoch


LOST = RankEnd(cause="device", rank=3, after_step=7)
"""The second device of the second node."""


def reactions(folder: Path) -> list[str]:
    with events_file(folder / "out").open("rb") as lines:
        return [one.reaction for one in events_of(lines) if isinstance(one, Decision)]


def test_each_node_does_without_one_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, node_s=2.0, device_s=1.5)

    epoch = case.decide(LOST)

    assert epoch.members == case.agents
    assert epoch.excluded == ()
    assert [(one.start, one.device) for one in epoch.lost_devices] == [("1", 1)]
    assert epoch.plan == str(tmp_path / "plan-2.yaml")
    assert reactions(tmp_path) == ["shrink"]

    # The node whose device it is hides it from ranks; the other has one more than it needs.
    monkeypatch.setenv(VISIBLE, "4,5")
    case.epochs(case.agents[0])._hide_lost(epoch)
    assert os.environ[VISIBLE] == "4,5"
    lost = case.epochs(case.agents[1])
    lost._hide_lost(epoch)
    lost._hide_lost(epoch)
    assert os.environ[VISIBLE] == "4"

    # What is lost stays lost: ranks that crash later are restarted on what is left.
    again = case.decide(RankEnd(cause="crash", rank=0, after_step=9))
    assert (again.plan, again.lost_devices) == (epoch.plan, epoch.lost_devices)
    assert reactions(tmp_path) == ["shrink", "restart"]


def test_the_node_goes_where_that_is_faster(tmp_path: Path) -> None:
    case = Case(tmp_path, node_s=1.5, device_s=2.0)

    epoch = case.decide(LOST)

    assert epoch.members == case.agents[:1]
    assert (epoch.excluded, epoch.lost_devices) == (("1",), ())
    assert epoch.plan == str(tmp_path / "plan-1.yaml")


def test_a_spare_takes_its_place_first(tmp_path: Path) -> None:
    case = Case(tmp_path, node_s=9.0, device_s=1.5, spares=1)

    epoch = case.decide(LOST)

    assert [one.node for one in epoch.members] == [0, 10]
    assert (epoch.plan, epoch.lost_devices) == (None, ())
    assert reactions(tmp_path) == ["spare"]


@pytest.mark.parametrize(
    ("saved", "stopped", "excluded", "ends_well"),
    [
        (0, None, False, False),
        (14, None, False, False),
        (14, "grow", False, False),
        (14, "max_seconds", False, True),
        (14, None, True, False),
        (40, None, True, True),
        (40, None, False, True),
    ],
)
def test_a_spare_ends_well_only_where_the_run_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: int,
    stopped: Stopped | None,
    excluded: bool,
    ends_well: bool,
) -> None:
    case = Case(tmp_path, node_s=1.5, device_s=2.0)
    spare = agent(5)
    case.run = case.run.model_copy(update={"steps": 40})
    if excluded:
        case.epoch = case.epoch.model_copy(update={"excluded": (spare.start,)})
    folder = tmp_path / f"step-{saved:06}" if saved else None
    monkeypatch.setattr(checkpoint, "newest", lambda _: folder)
    monkeypatch.setattr(checkpoint, "progress", lambda _: SimpleNamespace(step=saved))
    if stopped is not None:
        end = AttemptEnded(at_unix_s=1.0, stopped=stopped, after_step=saved)
        append_record(end, events_file(tmp_path / "out"))

    over = RunOver("no member of the run is left")
    if ends_well:
        case.epochs(spare)._end_as_spare(over)
        return
    with pytest.raises(
        LaunchError, match=r"the last saved state is .* of 40 steps; start the run again"
    ):
        case.epochs(spare)._end_as_spare(over)


@pytest.mark.parametrize(("stopped_after_s", "is_last", "ends"), [
    (1.0, True, True), (-1000.0, True, False), (1.0, False, False),
])  # fmt: skip
def test_a_node_that_came_while_the_run_was_stopped_ends_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_after_s: float,
    is_last: bool,
    ends: bool,
) -> None:
    case = Case(tmp_path, node_s=1.5, device_s=2.0)
    monkeypatch.setattr(multi_node, "ALONE_S", -1.0)
    monkeypatch.setattr(multi_node, "saved_step", lambda _: 0)
    at_unix_s, file = time.time() + stopped_after_s, events_file(tmp_path / "out")
    why = "step 22 gave gradient norm nan"
    append_record(Incident(at_unix_s=at_unix_s, cause="not_a_number", evidence=why), file)
    append_record(Decision(at_unix_s=at_unix_s, reaction="stop", why="it would again"), file)
    if not is_last:
        append_record(Attempt(at_unix_s=at_unix_s, plan="sha256:0", devices=1), file)
    late = LateNode(case.run, [], is_script=False)

    with pytest.raises(LaunchError, match=why) if ends else contextlib.nullcontext():
        late.look(case.epoch)


@pytest.mark.parametrize(
    ("saved", "stopped", "resumes", "is_script", "is_old", "is_over"),
    [
        (0, None, False, False, False, False),
        (14, None, True, False, False, False),
        (40, None, False, False, False, True),
        (40, None, False, False, True, False),
        (40, None, True, False, True, True),
        (14, "max_seconds", False, False, False, True),
        (14, "steps", True, True, False, True),
        (14, "steps", True, True, True, False),
        (40, None, True, True, False, False),
    ],
)
def test_a_node_that_comes_when_the_run_is_over_does_not_wait_for_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: int,
    stopped: Stopped | None,
    resumes: bool,
    is_script: bool,
    is_old: bool,
    is_over: bool,
) -> None:
    case = Case(tmp_path, node_s=1.5, device_s=2.0)
    run = case.run.model_copy(update={"steps": 40, "resume": resumes})
    monkeypatch.setattr(multi_node, "saved_step", lambda _: saved)
    file = events_file(tmp_path / "out")
    file.touch()
    if stopped is not None:
        append_record(AttemptEnded(at_unix_s=1.0, stopped=stopped, after_step=saved), file)
    if is_old:
        os.utime(file, (1e9, 1e9))
    signals: list[int] = []
    late = LateNode(run, signals, is_script=is_script)
    late.look(case.epoch)  # others may come in a moment
    monkeypatch.setattr(multi_node, "ALONE_S", -1.0)
    late = LateNode(run, signals, is_script=is_script)
    late.look(None)

    with pytest.raises(RunOver, match="is over") if is_over else contextlib.nullcontext():
        late.look(case.epoch)
    signals.append(15)
    with pytest.raises(HandedOver):
        late.look(None)
