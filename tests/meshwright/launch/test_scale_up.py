"""Runs that lost nodes grow again: only where it pays, and not soon after a change."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.launch import multi_node
from meshwright.launch.fallback_plans import FallbackPlan, FallbackPlans
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.multi_node import ScaleUp, StragglerReplacement
from meshwright.planner.documents.document import write
from meshwright.planner.documents.events import Drift, Paced, PhaseDone, RankPart, StepRecord
from meshwright.runtime.launch.failure_report import RankSlow
from meshwright.runtime.resilience.membership import Agent, Epoch, State
from meshwright.runtime.resilience.node_agent import NodeAgent
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import verdict
from meshwright.runtime.run.run_folder import append_record, events_file, metrics_file
from tests.meshwright.launch.test_fallback_plans import planned

STEPS, STEP_S, START_S = 1000, 2.0, 5.0


def agent(node: int) -> Agent:
    return Agent(node=node, start=str(node), host="127.0.0.1", port=1, meet_port=2, copies_port=3)


class Case:
    """A run planned for four nodes that trains on some, half as fast on half as many."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.planned = planned(folder, cluster="4x1xa10g")
        self.members, self.spares, self.step, self.since_s = 2, 1, 100, 3600.0
        monkeypatch.setattr(multi_node, "_predicted_step_s", lambda fit: 4.0 / fit.nodes)

    def growth(self) -> ScaleUp:
        run = LaunchRun(checkpoint=self.folder, output=self.folder, steps=STEPS)
        record = StepRecord(step=self.step, loss=1.0, grad_norm=1.0, step_s=STEP_S, epoch=0)
        append_record(record, metrics_file(self.folder))
        started = PhaseDone(at_unix_s=1.0, phase="start", measured_s=START_S)
        append_record(started, events_file(self.folder))
        growth.environment(self.folder)
        fit = cast(LaunchablePlan, SimpleNamespace(nodes=self.members))
        epoch = Epoch(
            number=2,
            run="a run",
            members=tuple(map(agent, range(self.members))),
            output=str(self.folder),
            state=State(step=0),
            changed_unix_s=time.time() - self.since_s,
        )
        spares = tuple(agent(10 + number) for number in range(self.spares))
        node: Any = SimpleNamespace(epoch=epoch, spares=lambda: spares)
        return ScaleUp(self.planned, fit, run, cast(NodeAgent, node))


def drift(after_step: int = 300, *, slow_s: float = 1.5) -> Drift:
    """Rank 3 works 1.5 s a step and others 1.0 s."""
    return Drift(
        at_unix_s=1.0,
        after_step=after_step,
        cause="straggler: work",
        rank=3,
        measured_s=slow_s,
        predicted_s=1.0,
        text="rank 3 works 1.5 s a step, and others with equal work 1 s: all wait for it",
    )


def paced(after_step: int, work_s: float) -> Paced:
    part = RankPart(rank=3, stage=0, data_s=0.0, work_s=work_s, step_s=2.0)
    return Paced(at_unix_s=1.0, after_step=after_step, ranks=(part,))


def replacement(case: Case, *, steps: float = STEPS) -> StragglerReplacement:
    return StragglerReplacement(case.growth()._run, case.growth()._agent, steps=steps)


def test_a_spare_takes_the_place_of_a_slow_rank_where_it_pays(case: Case) -> None:
    with pytest.raises(RankSlow, match=r"should cost 5 s .*, and save 350.0 s") as slow:
        replacement(case).look(drift())

    assert slow.value.end is not None
    assert (slow.value.end.cause, slow.value.end.rank) == ("straggler", 3)
    assert verdict([slow.value.end], devices=2).reaction == "shrink"  # type: ignore[union-attr]
    replacement(case).look(drift(STEPS - 20))  # which saves 10 s, twice the cost
    with pytest.raises(RankSlow, match="and save 500 ms of each step"):
        replacement(case, steps=math.inf).look(drift())


def test_a_slow_rank_is_replaced_once_a_spare_is_there_unless_it_is_well_again(
    case: Case,
) -> None:
    case.spares = 0
    watch, well = replacement(case), replacement(case)
    watch.look(drift())
    well.look(drift())
    watch.look(paced(400, 1.5))
    well.look(paced(400, 1.02))
    case.spares = 1
    watch._agent = well._agent = case.growth()._agent

    with pytest.raises(RankSlow):
        watch.look(paced(500, 1.5))
    well.look(paced(500, 1.5))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, monkeypatch)


def asked(case: Case) -> bool:
    found = case.growth()
    found.look()
    assert (case.folder / "grow").exists() == found.asked
    return found.asked


def test_a_run_grows_to_what_was_planned_once_all_nodes_are_there(case: Case) -> None:
    case.spares = 2
    found = case.growth()
    found.look()

    assert (found.asked, found.nodes) == (True, 4)
    # 900 steps of 2 s are left, which take half as long on twice the nodes.
    assert found.why == "2 more nodes are available and save 900.0 s of 1800.0 s"


@pytest.mark.parametrize(
    "without",
    ["a node", "time", "a change long ago", "a plan"],
)
def test_a_run_stays_as_it_is(case: Case, without: str) -> None:
    case.spares = 2
    match without:
        case "a node":
            case.spares = 0
        case "time":
            # 5 steps of 2 s are left, and half of them is less than twice the start.
            case.step = STEPS - 10
        case "a change long ago":
            case.since_s = LaunchRun().scale_up_after - 60
        case "a plan":
            case.spares = 1

    assert not asked(case)


def test_fewer_nodes_than_planned_take_a_plan_of_the_book(case: Case) -> None:
    """It has one for three nodes, which is a third faster than two."""
    write(case.planned.plan, case.folder / "three.yaml")
    entry = FallbackPlan(
        wanted=case.planned.plan.digest,
        left=3,
        path=str(case.folder / "three.yaml"),
        plan=case.planned.plan.digest,
        devices=3,
        step_s=4.0 / 3,
        memory_bytes=1.0,
    )
    file = FallbackPlans(case.folder)._file(3)
    file.write_text(entry.model_dump_json())

    found = case.growth()
    found.look()

    assert (found.asked, found.nodes) == (True, 3)


def test_the_longer_it_is_run_the_more_pays() -> None:
    case_s = {"step_s": 2.0, "larger_step_s": 1.5, "cost_s": 10.0}

    assert not growth.pays(left_s=79.0, **case_s)
    assert growth.pays(left_s=81.0, **case_s)
    assert not growth.pays(left_s=1e9, step_s=1.0, larger_step_s=1.0, cost_s=1.0)


def test_a_clock_that_was_set_back_does_not_keep_a_run_from_growing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.spares, case.since_s = 2, -86400.0
    made = case.growth()
    monkeypatch.setattr(made, "_begin_s", time.monotonic() - 3600.0)

    made.look()

    assert made.asked
