"""The roster under loss, delay and repetition of messages, crashes and wrong suspicions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshwright.planner.documents.events import Drift
from meshwright.runtime.resilience.membership import (
    LOST_S,
    SUSPECT_S,
    Agent,
    Epoch,
    Held,
    Holdings,
    Look,
    Over,
    Proposal,
    Quit,
    Roster,
    Standing,
    State,
)
from meshwright.runtime.resilience.straggler_detector import StagePace
from meshwright.runtime.run.recovery_policy import RankEnd

NODES = 4
PLANNED = 3
RUN = "a run"
CRASH = RankEnd(cause="crash", rank=1, after_step=7)


def agent_of(node: int, start: str = "first") -> Agent:
    return Agent(
        node=node,
        start=f"{node} {start}",
        host="127.0.0.1",
        port=1 + node,
        meet_port=11 + node,
        copies_port=21 + node,
    )


def first_epoch(members: int = PLANNED) -> Epoch:
    return Epoch(
        number=1,
        run=RUN,
        members=tuple(map(agent_of, range(members))),
        output="out",
        state=State(step=0),
    )


def roster_of(node: int, *, epoch: Epoch | None = None, now_s: float = 0.0) -> Roster:
    roster = Roster(RUN, agent_of(node))
    roster.adopt(epoch or first_epoch(), now_s)
    return roster


@dataclass
class Node:
    """One node: its agent, its ranks, and what it was about to write."""

    roster: Roster
    ranks_of: int | None = None
    copied: int = 0
    proposed: Epoch | None = None
    lives: bool = True


@dataclass
class Run:
    """What all share, and what is true whoever knows it."""

    register: dict[int, Epoch] = field(default_factory=dict)
    stored: int = 0
    trained: int = 0
    acknowledged: tuple[int, int] = (1, 0)
    """Epoch and step of the newest state of which all members and all partners have had parts."""
    gone: set[str] = field(default_factory=set)


class Rosters(RuleBasedStateMachine):
    """Agents, messages in any order and number, and a register."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.run = Run({1: first_epoch()})
        self.nodes = [Node(roster_of(node, now_s=self.now_s)) for node in range(NODES)]
        self.sent: list[Standing] = []
        self.starts = 0
        self.go_on(set())

    some = st.integers(0, NODES - 1)

    @rule(
        node=some,
        other=some,
        fault=st.sampled_from(["crash", "start_again", "ranks_end", "suspect"]),
    )
    def fault(self, node: int, other: int, fault: str) -> None:
        if fault == "suspect":
            self.suspect(node, other)
        else:
            getattr(self, fault)(node)

    @rule(
        node=some,
        what=st.sampled_from(["tell", "act", "write", "ranks_start", "copy", "send", "train"]),
    )
    def one_thing(self, node: int, what: str) -> None:
        """In any order with all else."""
        if what == "train":
            self.train()
        else:
            getattr(self, what)(node)

    def tell(self, node: int) -> None:
        if self.nodes[node].lives:
            self.sent.append(self.nodes[node].roster.status())

    @rule(node=some, which=st.integers(0, 10**6))
    def hear_an_old_one_again(self, node: int, which: int) -> None:
        if self.sent and self.nodes[node].lives:
            self.nodes[node].roster.hear(self.sent[which % len(self.sent)], self.now_s)

    @rule(cut_off=st.sets(some, max_size=2), seconds=st.sampled_from([0.1, LOST_S / 2 + 0.1]))
    def time_goes_on(self, cut_off: set[int], seconds: float) -> None:
        for _ in range(3):
            self.now_s += seconds
            self.go_on(cut_off)

    def go_on(self, cut_off: set[int]) -> None:
        """All whose messages come do what they have to do."""
        there = [node for node in range(NODES) if node not in cut_off]
        for _ in range(2):
            for node in there:
                for other in there:
                    if self.nodes[node].lives and self.nodes[other].lives:
                        told = self.nodes[other].roster.status()
                        self.nodes[node].roster.hear(told, self.now_s)
            for node in there:
                self.act(node)
                self.write(node)
                self.ranks_start(node)

    @rule(
        steps=st.integers(1, 3),
        saves=st.integers(0, 5).map(lambda one: one == 0),
        late=st.sets(some, max_size=2),
        unsent=st.sets(some, max_size=2),
        crashes=st.none() | some,
    )
    def train_on(
        self, steps: int, saves: bool, late: set[int], unsent: set[int], crashes: int | None
    ) -> None:
        """Train some steps, of the last of which some have no copy yet.

        Where copies do not come to partners, no more than one is trained.
        """
        self.meet()
        for left in range(steps, 0, -1):
            self.train()
            for node in range(NODES):
                if left > 1 or node not in late:
                    self.copy(node)
            for node in range(NODES):
                if node not in unsent:
                    self.send(node)
        if saves:
            self.save()
        if crashes is not None:
            self.crash(crashes)

    def meet(self) -> None:
        """Let those that live come to an epoch that trains, if they can."""
        for _ in range(6):
            if self._training() is not None:
                return
            self.now_s += LOST_S / 2 + 0.1
            self.go_on(set())

    @rule(seconds=st.sampled_from([0.1, SUSPECT_S + 0.1, LOST_S + 0.1]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def crash(self, node: int) -> None:
        found = self.nodes[node]
        members = self.run.register[max(self.run.register)].members
        living = [one for one in self._nodes(*members) if one.lives]
        # With the last member the run ends, and there is nothing more to see.
        if found.lives and living != [found]:
            found.lives, found.ranks_of, found.proposed = False, None, None
            self.run.gone.add(found.roster.agent.start)

    def start_again(self, node: int) -> None:
        if not self.nodes[node].lives:
            self.starts += 1
            roster = Roster(RUN, agent_of(node, f"start {self.starts}"))
            roster.adopt(self.run.register[max(self.run.register)], self.now_s)
            self.nodes[node] = Node(roster)

    def suspect(self, node: int, other: int) -> None:
        self.nodes[node].roster.suspect(self.nodes[other].roster.agent)

    def ranks_start(self, node: int) -> None:
        found = self.nodes[node]
        roster = found.roster
        if found.lives and roster.phase == "ready" and roster.is_member:
            roster.began()
            found.ranks_of, found.copied = roster.number, self.run.trained

    def ranks_end(self, node: int) -> None:
        found = self.nodes[node]
        if found.ranks_of is not None:
            found.ranks_of = None
            found.roster.ranks_ended(CRASH)

    def act(self, node: int) -> None:
        found = self.nodes[node]
        if not found.lives:
            return
        roster = found.roster
        wanted = roster.next_action(self.now_s)
        if isinstance(wanted, Quit):
            found.ranks_of = None
            roster.ranks_ended(None)
        elif isinstance(wanted, Look):
            self._adopt_newest(found)
        elif isinstance(wanted, Proposal):
            found.proposed = self._decided(wanted)

    def write(self, node: int) -> None:
        """Some time after a decision it is written, if its number is free."""
        found = self.nodes[node]
        if not found.lives or found.proposed is None:
            return
        epoch, found.proposed = found.proposed, None
        if epoch.number not in self.run.register:
            self._check_state(epoch)
            self.run.register[epoch.number] = epoch
            self.run.trained = epoch.state.step
            if epoch.state.step < self.run.acknowledged[1]:
                self.run.acknowledged = (epoch.state.epoch or epoch.number, epoch.state.step)
        if found.roster.number < max(self.run.register):
            self._adopt_newest(found)

    def _adopt_newest(self, found: Node) -> None:
        found.roster.adopt(self.run.register[max(self.run.register)], self.now_s)

    def _decided(self, proposal: Proposal) -> Epoch:
        self.counted = {one.start for one in (*proposal.alive, *proposal.spares)}
        return Epoch(
            number=proposal.epoch.number + 1,
            run=RUN,
            members=proposal.members(PLANNED),
            output="out",
            state=proposal.state(self.run.stored),
            why=" ".join(sorted(self.counted)),
        )

    def _check_state(self, epoch: Epoch) -> None:
        """Nothing older than acknowledged, unless two neighbours in memory are gone at once."""
        number, step = self.run.acknowledged
        members = [one.start for one in self.run.register[number].members]
        there = [epoch.why is not None and start in epoch.why for start in members]
        pairs = zip(there, [*there[1:], there[0]], strict=True)
        if len(members) > 1 and all(one or other for one, other in pairs):
            assert epoch.state.step >= step

    def train(self) -> None:
        """Train a step; its state is copied, so that the one before must be acknowledged."""
        number = self._training()
        if number is None:
            return
        epoch, trained = self.run.register[number], self.run.trained
        if self.run.acknowledged == (number, trained) or trained == epoch.state.step:
            self.run.trained += 1

    def copy(self, node: int) -> None:
        """A member copies its part of the newest step."""
        found = self.nodes[node]
        number = self._training()
        if number is None or found.ranks_of != number or found.copied == self.run.trained:
            return
        found.copied = self.run.trained
        self._hold(found, found.roster.agent, number)

    def send(self, node: int) -> None:
        """The part that a member has copied comes to its partner, while both are in one epoch."""
        found = self.nodes[node]
        number = found.roster.number
        members = self.run.register[number].members
        copied = number == max(self.run.register) and found.copied == self.run.trained
        if not found.lives or not found.roster.is_member or not copied:
            return
        if found.copied == self.run.register[number].state.step:
            return
        place = [one.start for one in members].index(found.roster.agent.start)
        start = members[(place + 1) % len(members)].start
        partner = next((one for one in self.nodes if one.roster.agent.start == start), None)
        if partner is not None and partner.lives and partner.roster.number == number:
            self._hold(partner, found.roster.agent, number)

    def _hold(self, holder: Node, of: Agent, number: int) -> None:
        """Keep an agent's part of the newest step; where all are kept twice, it is acknowledged."""
        members, step = self.run.register[number].members, self.run.trained
        place = [one.start for one in members].index(of.start)
        part = Held(epoch=number, step=step, of=len(members), parts=(place,))
        holder.roster.holdings.add(part)
        for at, one in enumerate(members):
            both = self._nodes(one, members[(at + 1) % len(members)])
            if len(both) < 2 or not all(self._holds(found, number, step, at) for found in both):
                return
        self.run.acknowledged = (number, step)

    @staticmethod
    def _holds(node: Node, number: int, step: int, part: int) -> bool:
        held = node.roster.holdings.states
        return any((one.epoch, one.step) == (number, step) and part in one.parts for one in held)

    def save(self) -> None:
        if self._training() is not None:
            self.run.stored = self.run.trained

    def _nodes(self, *agents: Agent) -> list[Node]:
        """Return those that are these agents still."""
        starts = [agent.start for agent in agents]
        found = {one.roster.agent.start: one for one in self.nodes}
        return [found[start] for start in starts if start in found]

    def _training(self) -> int | None:
        """Return the epoch of which all members have ranks."""
        ranks = {
            one.roster.agent.start: one.ranks_of
            for one in self.nodes
            if one.lives and one.ranks_of is not None
        }
        found = [
            number
            for number, epoch in self.run.register.items()
            if all(ranks.get(one.start) == number for one in epoch.members)
        ]
        assert len(found) <= 1, "two epochs train at once"
        return found[0] if found else None

    @invariant()
    def at_most_one_epoch_trains(self) -> None:
        number = self._training()
        if number is not None:
            assert number == max(self.run.register), "an epoch trains that has a successor"


class TestRosters(Rosters.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.matrix
class TestMoreRosters(Rosters.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=500,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def told_to(roster: Roster, others: list[Roster], now_s: float) -> None:
    for other in others:
        roster.hear(other.status(), now_s)


def training(*, planned: int = 3, nodes: int = 3) -> list[Roster]:
    """Return agents of which the first `planned` have ranks that run."""
    rosters = [roster_of(node, epoch=first_epoch(planned)) for node in range(nodes)]
    for roster in rosters[:planned]:
        roster.began()
    for roster in rosters:
        told_to(roster, [one for one in rosters if one is not roster], 1.0)
    return rosters


def nodes_of(agents: tuple[Agent, ...]) -> list[int]:
    return [agent.node for agent in agents]


def test_a_silent_node_ends_the_epoch_and_the_first_of_the_others_decides() -> None:
    """Also where it was the lead that is lost; a spare takes its place and so its ranks."""
    first, second, third, spare = training(nodes=4)
    late_s = 1.0 + LOST_S + 0.1
    told_to(second, [third, spare], late_s)

    wanted = second.next_action(late_s)
    assert isinstance(wanted, Quit)
    assert nodes_of(wanted.lost) == [first.agent.node]
    second.ranks_ended(None)
    assert (
        second.next_action(late_s) is None
    )  # the third has ranks that may still know how it ended
    third.ranks_ended(CRASH)
    told_to(second, [third], late_s)
    decided = second.next_action(late_s)

    assert isinstance(decided, Proposal)
    assert decided.ends == (CRASH,)
    assert nodes_of(decided.members(3)) == [3, 1, 2]
    assert nodes_of(decided.members(2)) == [3, 1]
    assert nodes_of(decided.members(3, without=third.agent)) == [3, 1]


def test_without_a_spare_the_others_move_up() -> None:
    _, second, third = training()
    late_s = 1.0 + LOST_S + 0.1
    third.ranks_ended(None)
    told_to(second, [third], late_s)
    second.ranks_ended(None)

    decided = second.next_action(late_s)

    assert isinstance(decided, Proposal)
    assert nodes_of(decided.members(3)) == [1, 2]


def test_who_is_taken_for_lost_by_mistake_ends_its_ranks_and_becomes_a_spare() -> None:
    first, second, _ = training()
    first.ranks_ended(None)
    second_epoch = Epoch(
        number=2,
        run=RUN,
        members=(first.agent,),
        output="out",
        state=State(step=5),
    )
    first.adopt(second_epoch, 2.0)
    told_to(second, [first], 2.0)

    assert isinstance(second.next_action(2.0), Quit)
    with pytest.raises(ValueError, match="ranks of epoch 1 still run"):
        second.adopt(second_epoch, 2.0)
    second.ranks_ended(None)
    assert isinstance(second.next_action(2.0), Look)
    second.adopt(second_epoch, 2.0)
    assert (second.is_member, second.next_action(2.0)) == (False, None)
    with pytest.raises(ValueError, match="no ranks may start"):
        second.began()
    assert isinstance(second.next_action(2.1 + LOST_S), Over)


def test_a_message_that_comes_twice_keeps_nobody_alive() -> None:
    first, second, _ = training()
    old = second.status()
    first.hear(old, 1.0)

    first.hear(old, 4.9)

    assert first.is_lost(second.agent, 1.1 + LOST_S)


def test_closed_connections_make_silence_shorter() -> None:
    first, second, _ = training()
    first.suspect(second.agent)

    assert not first.is_lost(second.agent, 1.0 + SUSPECT_S)
    assert first.is_lost(second.agent, 1.1 + SUSPECT_S)
    told_to(first, [second], 2.5)
    assert not first.is_lost(second.agent, 2.5 + LOST_S)


def test_ranks_do_not_wait_for_members_that_are_lost_before_they_come() -> None:
    first, second, _ = (roster_of(node) for node in range(3))
    told_to(first, [second], 1.0 + LOST_S)

    wanted = first.next_action(1.1 + LOST_S)

    assert isinstance(wanted, Quit)
    assert wanted.why == "node 2 does not answer"


def test_a_run_that_is_over_on_one_node_is_over() -> None:
    first, second, _ = training()
    second.run_left()
    told_to(first, [second], 1.0)
    first.ranks_ended(None)

    assert isinstance(first.next_action(1.0), Over)
    assert second.next_action(9.0) is None


SLOW = Drift(
    at_unix_s=1.0,
    cause="straggler: work",
    rank=1,
    after_step=300,
    measured_s=0.5,
    predicted_s=0.1,
    text="rank 1 works 500 ms a step",
)


def test_paces_and_slow_ranks_of_other_nodes_are_those_of_this_epoch() -> None:
    first, second, third = training()
    second.paces = (StagePace(stage=0, ranks=1, data_s=0.1, work_s=0.5),)
    told_to(first, [second, third], 1.0)
    assert first.paces_elsewhere() == second.paces

    second.add_drift(SLOW)
    told_to(first, [second], 1.2)
    told_to(first, [second], 1.3)
    assert (first.new_drifts(), first.new_drifts()) == ([SLOW], [])
    second.ranks_ended(None)
    told_to(first, [second], 1.5)
    assert first.paces_elsewhere() == ()
    second.adopt(first_epoch().model_copy(update={"number": 2}), 2.0)
    assert second.paces == ()


def test_what_was_never_whole_takes_no_place() -> None:
    """Two agents had the fifth step and one had not: all went on from the fourth."""
    holdings = Holdings()
    for epoch, step in ((1, 4), (1, 5)):
        holdings.add(Held(epoch=epoch, step=step, of=2, parts=(0,)))

    dropped = holdings.go_on_from(State(step=4, epoch=1))
    holdings.add(Held(epoch=2, step=5, of=2, parts=(0,)))

    assert [one.step for one in dropped] == [5]
    assert [(one.epoch, one.step) for one in holdings.states] == [(1, 4), (2, 5)]


def test_a_state_in_memory_counts_only_where_it_is_whole_and_newer_than_storage() -> None:
    def decided(*parts: int) -> State:
        held = (Held(epoch=1, step=9, of=2, parts=parts),)
        epoch = first_epoch(2)
        proposal = Proposal(
            epoch=epoch, alive=epoch.members, lost=(), spares=(), ends=(), held=held
        )
        return proposal.state(6)

    assert decided(0) == State(step=6)
    assert decided(0, 1) == State(step=9, epoch=1)
