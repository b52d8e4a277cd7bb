"""Pairs of faults without processes: agents, verdicts, decisions and register are the real ones.

Time, messages and ranks are played: a rank is a state that each step makes another, by its plan and
its samples, and that copies keep as launchers do.  A run on three nodes and a spare must end with
each step done once, by what follows from the plans alone.  `test_faults` does it to processes.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.recovery import NODES, planned
from meshwright.launch.fallback_plans import FallbackPlans
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.multi_node import Epochs, NodeResources
from meshwright.planner.documents.events import Cause
from meshwright.runtime.launch.launch import RankFailed
from meshwright.runtime.resilience.membership import (
    Agent,
    Epoch,
    Held,
    Look,
    Over,
    Proposal,
    Quit,
    Roster,
    State,
)
from meshwright.runtime.resilience.node_agent import Register
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.rendezvous import NodeLeft
from meshwright.runtime.run.run_folder import events
from tests.runtime.rooms import Room

STEPS, STEP_S, TICK_S = 60, 0.2, 0.1
TELL_S, START_S, ECHO_S, HANG_S = 0.5, 1.0, 0.3, 13.0
BEGIN = 12
LIMIT_S = 120.0


ENDS: dict[str, tuple[Cause, bool]] = {
    "slow": ("straggler", True),
    "bad launch": ("transient", True),
    "bad disk": ("transient", False),
}
"""Ranks that their launchers end, or that say why they do."""


@dataclass
class Trained:
    """A state: what it follows from, and which steps it has had."""

    digest: str = "begin"
    steps: tuple[int, ...] = ()

    def after(self, plan: str, step: int) -> Trained:
        """Return it after one step more."""
        made = hashlib.sha256(f"{self.digest} {plan} {step}".encode()).hexdigest()
        return Trained(made, (*self.steps, step))


class PlayedNode:
    """A node: its agent, and a rank while one is there."""

    def __init__(self, course: PlayedRun, node: int, start: int) -> None:
        self.course = course
        self.agent = Agent(
            node=node, start=f"{node}-{start}", host="h", port=1, meet_port=2, copies_port=3
        )
        self.roster = Roster("run", self.agent)
        of_agent = SimpleNamespace(roster=self.roster)
        unused: Any = None
        means = NodeResources(
            agent=cast(Any, of_agent), copies=unused, zygote=unused, slots=unused, keeper=unused
        )
        self.epochs = Epochs(course.fit, course.run, means, [], quiet=True)
        self.epochs._scale_up = cast(Any, SimpleNamespace(asked=False))
        self.lives, self.stands_still, self.over = True, False, False
        self.rank: str | None = None
        self.rank_since_s = 0.0
        self.failed: RankFailed | NodeLeft = NodeLeft("nothing yet")

    @property
    def acts(self) -> bool:
        """Whether its agent does anything."""
        return self.lives and not self.stands_still and not self.over

    def has_no_rank_of(self, epoch: int) -> bool:
        """Whether its rank of an epoch has ended, or will never start."""
        ended = self.roster.number == epoch and self.roster.phase in ("ended", "left")
        return self.rank == "dead" or (self.rank is None and (ended or not self.lives))

    def end(self, end: RankEnd | None) -> None:
        """Take notice that the ranks of the epoch have ended."""
        self.rank = None
        text = "lost peers" if end is None else f"{end.cause} of rank {end.rank}"
        if end is None:
            self.failed = NodeLeft(text)
        else:
            self.failed = RankFailed(text, output=self.course.folder, end=end)
        self.roster.ranks_ended(end)


class PlayedRun:
    """All nodes of a run, by a clock of its own."""

    def __init__(self, folder: Path, plan: Path, book: Path) -> None:
        self.folder = folder
        (folder / "out").mkdir()
        shutil.copytree(book, folder / "book")
        self.fit = LaunchablePlan.read(str(plan), None)
        self.run = LaunchRun(checkpoint=folder, output=folder / "out", steps=STEPS)
        self.register = Register(folder)
        self.now_s, self.starts = 0.0, itertools.count()
        self.nodes = [PlayedNode(self, node, next(self.starts)) for node in range(NODES + 1)]
        members = tuple(one.agent for one in self.nodes[:NODES])
        first = Epoch(
            number=1, run="run", members=members, output=str(folder / "out"), state=State(step=0)
        )
        assert self.register.write_if_free(first)
        self.states: dict[tuple[int | None, int], Trained] = {(None, 0): Trained()}
        self.trained, self.moved_s = 0, 0.0
        self.plans: list[str] = []
        for one in self.nodes:
            self.adopt(one)
            for other in self.nodes:
                if other is not one:
                    one.roster.meet(other.agent, self.now_s)

    @property
    def epoch(self) -> Epoch:
        """The newest one."""
        found = self.register.newest()
        assert found is not None
        return found

    def adopt(self, node: PlayedNode) -> None:
        """Let a node take the newest epoch, and start its rank if it has one."""
        epoch = self.epoch
        node.roster.adopt(epoch, self.now_s)
        node.epochs.adopt(epoch)
        if node.roster.is_member:
            node.roster.began()
            node.rank, node.rank_since_s = "runs", self.now_s

    def tick(self) -> None:
        """Let a moment pass."""
        self.now_s += TICK_S
        if round(self.now_s / TICK_S) % round(TELL_S / TICK_S) == 0:
            self.tell()
        for node in self.nodes:
            if node.acts:
                self.act(node)
        if round(self.now_s / TICK_S) % round(STEP_S / TICK_S) == 0:
            self.step()

    def tell(self) -> None:
        """Let all agents that act tell the others how they stand."""
        for node in self.nodes:
            if node.acts or node.over:
                told = node.roster.status()
                for other in self.nodes:
                    if other is not node and other.acts:
                        other.roster.hear(told, self.now_s)

    def act(self, node: PlayedNode) -> None:
        """Let a node's launcher do what it has to do."""
        roster = node.roster
        if roster.phase == "running":
            self.look_at_ranks(node)
        wanted = roster.next_action(self.now_s)
        if isinstance(wanted, Quit):
            node.end(None)
        elif isinstance(wanted, Look):
            self.adopt(node)
        elif isinstance(wanted, Over):
            node.over, node.rank = True, None
        elif isinstance(wanted, Proposal):
            self.register.write_if_free(node.epochs.next(wanted, node.failed, self.now_s))
            self.adopt(node)

    def look_at_ranks(self, node: PlayedNode) -> None:
        """Find what a launcher sees of its rank, and its rank of others."""
        members = self.members(node.roster.number)
        place = [one.agent.start for one in members].index(node.agent.start)
        done = self.trained
        if node.rank in ENDS:
            cause, named = ENDS[node.rank]
            node.end(RankEnd(cause=cause, rank=place, after_step=done, named=named))
            return
        if node.rank == "dead":
            node.end(RankEnd(cause="crash", rank=place, after_step=done))
            return
        gone = [one for one in members if one.has_no_rank_of(node.roster.number)]
        if gone and max(one.rank_since_s for one in gone) + ECHO_S < self.now_s:
            for one in gone:
                if not one.lives:
                    node.roster.suspect(one.agent)
            node.end(None)
            return
        still = [at for at, one in enumerate(members) if one.rank == "stands still"]
        since_s = max(self.moved_s, *(one.rank_since_s for one in members))
        if still and since_s + HANG_S < self.now_s:
            waits = node.rank != "stands still"
            node.end(RankEnd(cause="hang", rank=place, after_step=done, waits=waits))

    def members(self, number: int) -> list[PlayedNode]:
        """Return the nodes of an epoch, by their places."""
        assert number == self.epoch.number
        starts = [one.start for one in self.epoch.members]
        nodes = {one.agent.start: one for one in [*self.nodes, *self.left]}
        return [nodes[start] for start in starts]

    left: tuple[PlayedNode, ...] = ()
    """Those in whose places others were started."""

    def step(self) -> None:
        """Train a step if all ranks of the newest epoch are there, and copy the state."""
        epoch = self.epoch
        members = self.members(epoch.number)
        if self.trained == STEPS or any(
            one.rank != "runs"
            or one.roster.number != epoch.number
            or one.rank_since_s + START_S > self.now_s
            for one in members
        ):
            return
        number = epoch.number
        known = (number, self.trained)
        if known not in self.states:  # the first step of an epoch
            known = (epoch.state.epoch, epoch.state.step)
            assert self.is_there(epoch.state)
            self.plans = self.plans[: epoch.state.step]
        before = self.states[known]
        plan = members[0].epochs._fit.plan.digest
        self.trained = known[1] + 1
        self.states[number, self.trained] = before.after(plan, self.trained)
        self.plans = [*self.plans, plan]
        self.moved_s = self.now_s
        for place, one in enumerate(members):
            partner = members[(place + 1) % len(members)]
            for holder in (one, partner):
                part = Held(epoch=number, step=self.trained, of=len(members), parts=(place,))
                holder.roster.holdings.add(part)
        if self.trained == STEPS:
            for one in members:
                one.roster.run_left()
                one.over = True

    def is_there(self, state: State) -> bool:
        """Whether nodes that live have all parts of a state, or storage has it."""
        held = [
            one
            for node in self.nodes
            if node.acts
            for one in node.roster.holdings.states
            if (one.epoch, one.step) == (state.epoch, state.step)
        ]
        parts = {part for one in held for part in one.parts}
        return state.epoch is None or parts == set(range(held[0].of))

    def until(self, holds: Callable[[], object]) -> None:
        """Let time pass until something is so."""
        end_s = self.now_s + LIMIT_S
        while not holds():
            assert self.now_s < end_s, [(one.agent.start, vars(one.roster)) for one in self.nodes]
            self.tick()


def kill_rank(place: int) -> Callable[[PlayedRun], None]:
    def kill(run: PlayedRun) -> None:
        members = run.members(run.epoch.number)
        if place < len(members) and members[place].rank is not None:
            members[place].rank, members[place].rank_since_s = "dead", run.now_s

    return kill


def stop_rank(run: PlayedRun) -> None:
    members = run.members(run.epoch.number)
    if len(members) > 1 and members[1].rank == "runs":
        members[1].rank = "stands still"


def end_rank(how: str) -> Callable[[PlayedRun], None]:
    def end(run: PlayedRun) -> None:
        members = run.members(run.epoch.number)
        has_spare = len([node for node in run.nodes if node.acts]) > len(members)
        if len(members) > 1 and members[1].rank == "runs" and (has_spare or how != "slow"):
            members[1].rank = how

    return end


def kill_node(node: int) -> Callable[[PlayedRun], None]:
    def kill(run: PlayedRun) -> None:
        found = run.nodes[node]
        found.lives = False
        found.rank, found.rank_since_s = None, run.now_s

    return kill


def stop_node(run: PlayedRun) -> None:
    run.nodes[1].stands_still = True
    if run.nodes[1].rank == "runs":
        run.nodes[1].rank = "stands still"


def start_again(run: PlayedRun) -> None:
    kill_node(2)(run)
    run.left = (*run.left, run.nodes[2])
    run.nodes[2] = PlayedNode(run, 2, next(run.starts))
    run.nodes[2].roster.adopt(run.epoch, run.now_s)


FAULTS: dict[str, Callable[[PlayedRun], None]] = {
    "rank 0 killed": kill_rank(0),
    "rank 1 killed": kill_rank(1),
    "rank 1 stands still": stop_rank,
    "lead killed": kill_node(0),
    "node 1 killed": kill_node(1),
    "node 1 stands still": stop_node,
    "node 2 comes back": start_again,
    "spare killed": kill_node(NODES),
}
AFTER_S = (0.0, 0.3, 1.0, 2.0, 4.0)
PAIRS = list(itertools.product(FAULTS, FAULTS, AFTER_S))
LATER: dict[str, Callable[[PlayedRun], None]] = {
    "rank 1 is slow": end_rank("slow"),
    "rank 1 fails to launch": end_rank("bad launch"),
    "rank 1 cannot read": end_rank("bad disk"),
}
EVERY = FAULTS | LATER
LATER_PAIRS = [
    pair for pair in itertools.product(EVERY, EVERY, AFTER_S) if {*pair[:2]} & LATER.keys()
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of three nodes, beside a book with those for fewer."""
    room = Room(tmp_path_factory.mktemp("plan"))
    path = planned(room, ranks=1)
    fit = LaunchablePlan.read(str(path), None)
    for left in range(NODES - 1, 0, -1):
        FallbackPlans(room.folder).solve(fit, left)
    return path


@pytest.mark.spread(6)
@pytest.mark.parametrize(("first", "second", "after_s"), PAIRS)
def test_two_faults(tmp_path: Path, plan: Path, first: str, second: str, after_s: float) -> None:
    check_pair(tmp_path, plan, first, second, after_s)


@pytest.mark.spread(8)
@pytest.mark.parametrize(("first", "second", "after_s"), LATER_PAIRS)
def test_two_faults_of_which_one_says_why(
    tmp_path: Path, plan: Path, first: str, second: str, after_s: float
) -> None:
    check_pair(tmp_path, plan, first, second, after_s)


def test_a_spare_takes_the_place_of_a_slow_rank_and_a_restart_that_of_a_bad_moment(
    tmp_path: Path, plan: Path
) -> None:
    run = PlayedRun(tmp_path, plan, plan.parent / "book")
    run.until(lambda: run.trained == BEGIN)
    LATER["rank 1 cannot read"](run)
    run.until(lambda: run.trained == BEGIN + 5)
    LATER["rank 1 is slow"](run)

    run.until(lambda: run.trained == STEPS)

    decisions = [one for one in events(run.folder / "out") if one.event == "decision"]
    assert [one.reaction for one in decisions] == ["restart", "spare"]
    assert {member.node for member in run.epoch.members} == {0, 2, NODES}


def check_pair(tmp_path: Path, plan: Path, first: str, second: str, after_s: float) -> None:
    """Let two faults come, and look at what the run has done."""
    run = PlayedRun(tmp_path, plan, plan.parent / "book")
    run.until(lambda: run.trained == BEGIN)
    EVERY[first](run)
    begin_s = run.now_s
    run.until(lambda: run.now_s >= begin_s + after_s)
    EVERY[second](run)

    run.until(lambda: run.trained == STEPS)

    epoch = run.epoch
    ended = run.states[epoch.number, STEPS]
    assert ended.steps == tuple(range(1, STEPS + 1))
    wanted = Trained()
    for step, by in enumerate(run.plans, start=1):
        wanted = wanted.after(by, step)
    assert ended.digest == wanted.digest
    run.until(lambda: not any(one.acts for one in run.nodes))


def test_nodes_that_are_lost_at_once_are_all_named(tmp_path: Path, plan: Path) -> None:
    run = PlayedRun(tmp_path, plan, plan.parent / "book")
    run.until(lambda: run.trained == BEGIN)
    kill_node(1)(run)
    kill_node(2)(run)

    run.until(lambda: run.trained == STEPS)

    (incident,) = [one for one in events(run.folder / "out") if one.event == "incident"]
    assert incident.evidence.startswith("nodes 1, 2 were lost; ")
