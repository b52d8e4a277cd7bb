"""Roster: which nodes train, and from which state they go on; a state machine without I/O.

A run goes through epochs.  An epoch names its members, and training takes all of them.  Epochs
stand in a register, a folder that all nodes share: for each number it takes one, the first.  On
each node an agent tells the others again and again how it stands; a message may be lost, come late
or come twice, since each says all of it, and an older one of the same agent is passed over.

An agent proposes epoch n+1 only if it is a member of epoch n and its own ranks of n have ended, and
begins n+1 only once it stands in the register.  So an epoch cannot train any more when its
successor is written, and never do two train at once, whatever messages say; at least one member
has to live on.  Who is taken for lost by mistake finds the newer epoch, ends its ranks and becomes
a spare.  Nothing here imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.events import GIVEN_UP_S, Drift, Reaction
from meshwright.planner.documents.units import Amount, Count, Positive, Text
from meshwright.runtime.resilience.straggler_detector import StagePace
from meshwright.runtime.run.recovery_policy import RankEnd

LOST_S = GIVEN_UP_S - 1.0
"""An agent that is silent for so long is lost."""
SUSPECT_S = 1.0
"""Seconds of silence after which an agent whose connections were closed is lost."""
MOST_DRIFTS = 8
"""Of an agent's slow ranks, that others are told."""
Phase = Literal["ready", "running", "ended", "left"]
"""Without ranks, with ranks of its epoch, after those; and gone for good, as it said."""


class Agent(Part):
    """The launcher of a node, while it lives; one that is started again is another."""

    node: Count
    start: Text
    """Standing apart by this."""
    host: Text
    port: Positive
    """Port on which the agent receives messages of others."""
    meet_port: Positive
    """Port at which the ranks of an epoch that the agent leads are joined."""
    copies_port: Positive
    """Port on which the agent receives copies of the state of another agent's ranks."""


class Held(Part):
    """Parts of one state that an agent has in memory."""

    epoch: Positive
    step: Count
    of: Positive
    """Parts of the whole state."""
    parts: tuple[Count, ...]


class LostDevice(Part):
    """A device that an agent's node no longer trains on."""

    start: Text
    """The agent's."""
    device: Count
    """Among those that its ranks had when it was lost."""


class State(Part):
    """A state to go on from."""

    step: Count
    epoch: Positive | None = None
    """Epoch whose memory holds the state; None where storage does."""


class Epoch(Part):
    """The entry of the register under one number."""

    number: Positive
    run: Text
    members: tuple[Agent, ...]
    """Members in the order of their ranks; the first has rank 0."""
    plan: Text | None = None
    """Path of the epoch's plan; None for the plan that the run was started with."""
    output: Text
    """The run's folder."""
    state: State
    reaction: Reaction | None = None
    why: Text | None = None
    ends: tuple[RankEnd, ...] = ()
    """Ends of ranks in all epochs of the run so far."""
    excluded: tuple[Text, ...] = ()
    """Starts of agents that are not wanted any more."""
    lost_devices: tuple[LostDevice, ...] = ()
    """In the order in which they were lost."""
    changed_unix_s: Amount = 0.0
    """When the run got these members."""

    def most_lost(self, members: Iterable[Agent]) -> int:
        """Return how many devices that of some agents has lost which lost the most."""
        starts = [device.start for device in self.lost_devices]
        return max((starts.count(member.start) for member in members), default=0)

    def has_member(self, agent: Agent) -> bool:
        """Return whether an agent is a member."""
        return any(member.start == agent.start for member in self.members)


class Standing(Part):
    """All that an agent tells the others."""

    run: Text
    agent: Agent
    number: Count
    """Messages of this agent, counted."""
    epoch: Count
    phase: Phase
    end: RankEnd | None = None
    """End of the agent's ranks in the epoch, if one of them ended the epoch."""
    held: tuple[Held, ...] = ()
    paces: tuple[StagePace, ...] = ()
    """What the agent's ranks took in the epoch."""
    drifts: tuple[Drift, ...] = ()
    """What was said of the agent's slow ranks in the epoch, the newest."""


@dataclass(frozen=True, slots=True)
class Quit:
    """The agent's ranks have to end."""

    why: str
    lost: tuple[Agent, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """The register has a newer epoch."""


@dataclass(frozen=True, slots=True)
class Over:
    """Nobody is left who may decide."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The facts for deciding the next epoch, which this agent decides."""

    epoch: Epoch
    alive: tuple[Agent, ...]
    """Members, by their places."""
    lost: tuple[Agent, ...]
    spares: tuple[Agent, ...]
    ends: tuple[RankEnd, ...]
    """Ends of the alive members' ranks, the one that knows the most first."""
    held: tuple[Held, ...]

    def members(self, count: int, *, without: Agent | None = None) -> tuple[Agent, ...]:
        """Return `count` members, or as many as there are: each in its place, spares for others."""
        spares = list(self.spares)
        kept = [agent for agent in self.alive if without is None or agent.start != without.start]
        chosen: list[Agent] = []
        for old in self.epoch.members:
            if old in kept:
                chosen.append(old)
            elif spares:
                chosen.append(spares.pop(0))
        return tuple([*chosen, *spares][:count])

    def state(self, stored_step: int) -> State:
        """Return the newest state that is whole, in memory or in storage."""
        newest = newest_whole(self.held)
        if newest is None or newest.step < stored_step:
            return State(step=stored_step)
        return newest


def newest_whole(held: Iterable[Held]) -> State | None:
    """Return the newest state of which all parts are there.

    >>> one = Held(epoch=2, step=7, of=2, parts=(0,))
    >>> other = Held(epoch=2, step=6, of=2, parts=(0, 1))
    >>> newest_whole([one, other]).step
    6
    """
    parts: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    for copy in held:
        parts[copy.step, copy.epoch, copy.of].update(copy.parts)
    whole = [key for key, ranks in parts.items() if len(ranks) == key[2]]
    if not whole:
        return None
    step, epoch, _ = max(whole)
    return State(step=step, epoch=epoch)


class Holdings:
    """The newest two states that an agent has parts of.

    Ranks copy a state only when all agents have had theirs of the one before, also the parts that
    they keep for others.  So whoever has parts of a third state knows that the second is whole, and
    the first is never needed.
    """

    def __init__(self) -> None:
        self._held: list[Held] = []

    @property
    def states(self) -> tuple[Held, ...]:
        """The oldest first."""
        return tuple(self._held)

    def add(self, held: Held) -> None:
        """Take what was copied, in place of the oldest of two others."""
        for at, state in enumerate(self._held):
            if (state.epoch, state.step) == (held.epoch, held.step):
                parts = tuple(sorted({*state.parts, *held.parts}))
                self._held[at] = held.model_copy(update={"parts": parts})
                return
        self._held = [*self._held, held][-2:]

    def go_on_from(self, state: State) -> list[Held]:
        """Drop what is newer than the state that an epoch goes on from; return it.

        It was never whole, and would take the place of what is.
        """
        dropped = [snapshot for snapshot in self._held if snapshot.step > state.step]
        self._held = [snapshot for snapshot in self._held if snapshot.step <= state.step]
        return dropped


class Roster:
    """An agent's view of the others, and the actions it has to take."""

    def __init__(self, run: str, agent: Agent) -> None:
        self.run, self.agent = run, agent
        self.epoch: Epoch | None = None
        self.phase: Phase = "ready"
        self.holdings = Holdings()
        self.paces: tuple[StagePace, ...] = ()
        """What this agent's ranks took in the epoch."""
        self._drifts: tuple[Drift, ...] = ()
        self._drifts_known: set[tuple[str, int | None, str, int]] = set()
        self._end: RankEnd | None = None
        self._told: dict[str, Standing] = {}
        self._met: dict[str, Agent] = {}
        self._heard_s: dict[str, float] = {}
        self._suspected: set[str] = set()
        self._number = 0

    @property
    def number(self) -> int:
        """Number of the newest epoch that is known; 0 if none is known."""
        return 0 if self.epoch is None else self.epoch.number

    def status(self) -> Standing:
        """Return what the others get to know now."""
        self._number += 1
        return Standing(
            run=self.run,
            agent=self.agent,
            number=self._number,
            epoch=self.number,
            phase=self.phase,
            end=self._end,
            held=self.holdings.states,
            paces=self.paces,
            drifts=self._drifts,
        )

    def paces_elsewhere(self) -> tuple[StagePace, ...]:
        """Return what the ranks of other agents took in the epoch."""
        return tuple(pace for standing in self._in_epoch() for pace in standing.paces)

    def add_drift(self, drift: Drift) -> None:
        """Tell others, from now on, of a rank of this agent that fell behind."""
        self._drifts = (*self._drifts, drift)[-MOST_DRIFTS:]

    def new_drifts(self) -> list[Drift]:
        """Return what other agents say of their ranks, each once."""
        found = []
        for standing in self._in_epoch():
            for drift in standing.drifts:
                key = standing.agent.start, drift.rank, drift.cause, drift.after_step
                if key not in self._drifts_known:
                    self._drifts_known.add(key)
                    found.append(drift)
        return found

    def _in_epoch(self) -> Iterator[Standing]:
        """Yield the others whose ranks train in the epoch."""
        for standing in self._told.values():
            if standing.epoch == self.number and standing.phase == "running":
                yield standing

    def meet(self, agent: Agent, now_s: float) -> None:
        """Take notice of an agent that has not been heard yet."""
        self._met[agent.start] = agent
        self._heard_s[agent.start] = now_s

    def hear(self, standing: Standing, now_s: float) -> None:
        """Take what another agent tells."""
        start = standing.agent.start
        before = self._told.get(start)
        if standing.run != self.run or start == self.agent.start:
            return
        if before is not None and standing.number <= before.number:
            return
        self._told[start] = standing
        self._heard_s[start] = now_s
        self._suspected.discard(start)

    @property
    def has_heard(self) -> bool:
        """True if any other agent has been heard."""
        return bool(self._told)

    def suspect(self, agent: Agent) -> None:
        """Take notice that an agent's connections were closed."""
        self._suspected.add(agent.start)

    def recipients(self) -> list[Agent]:
        """Return who gets messages: members, and who is known otherwise and has not left."""
        agents = dict(self._met)
        agents |= (
            {} if self.epoch is None else {member.start: member for member in self.epoch.members}
        )
        agents |= {standing.agent.start: standing.agent for standing in self._told.values()}
        agents.pop(self.agent.start, None)
        return [agent for agent in agents.values() if not self._has_left(agent)]

    def adopt(self, epoch: Epoch, now_s: float) -> None:
        """Take a newer epoch from the register; ranks of an older one must have ended."""
        if self.phase == "running":
            raise ValueError(f"ranks of epoch {self.number} still run")
        if epoch.number <= self.number:
            raise ValueError(f"epoch {epoch.number} is not newer than {self.number}")
        self.epoch, self.phase, self._end = epoch, "ready", None
        self.paces, self._drifts = (), ()
        self.holdings.go_on_from(epoch.state)
        for member in epoch.members:
            self._heard_s.setdefault(member.start, now_s)

    @property
    def is_member(self) -> bool:
        """True if this agent trains in the newest epoch that is known."""
        return self.epoch is not None and self.epoch.has_member(self.agent)

    def began(self) -> None:
        """Take notice that ranks of the epoch start now."""
        if not self.is_member or self.phase != "ready":
            raise ValueError(f"no ranks may start in epoch {self.number}")
        self.phase = "running"

    def ranks_ended(self, end: RankEnd | None) -> None:
        """Take notice that no rank of the epoch runs here any more, and that none will start."""
        self.phase, self._end = "ended", end

    def run_left(self) -> None:
        """Take notice that the run is over here."""
        self.phase = "left"

    def next_action(self, now_s: float) -> Quit | Look | Over | Proposal | None:
        """Return what this agent has to do now."""
        if self.epoch is None or self.phase == "left":
            return None
        newer = any(standing.epoch > self.number for standing in self._told.values())
        if self.phase == "running":
            return Quit("the others have a newer epoch") if newer else self._broken(now_s)
        return Look() if newer else self._without_ranks(self.epoch, now_s)

    def _without_ranks(self, epoch: Epoch, now_s: float) -> Quit | Over | Proposal | None:
        """Return what an agent has to do that waits: for others to begin, or for their ends."""
        members = epoch.members
        lost = [member for member in members if self.is_lost(member, now_s)]
        if any(self._has_left(member) for member in members):
            return Over("the run is over on another node")
        if not self.is_member:
            return Over("no member of the run is left") if len(lost) == len(members) else None
        if self.phase == "ready":
            return self._broken(now_s)
        alive = [member for member in members if member not in lost]
        if alive[0].start != self.agent.start or not all(map(self._has_ended, alive)):
            return None
        return Proposal(
            epoch=epoch,
            alive=tuple(alive),
            lost=tuple(lost),
            spares=self.spares(now_s),
            ends=self._ends(alive),
            held=self._all_held(alive, now_s),
        )

    def is_lost(self, agent: Agent, now_s: float) -> bool:
        """Return whether an agent has been silent for too long."""
        if agent.start == self.agent.start:
            return False
        silent_s = now_s - self._heard_s.get(agent.start, now_s)
        return silent_s > (SUSPECT_S if agent.start in self._suspected else LOST_S)

    def _broken(self, now_s: float) -> Quit | None:
        """Return why the epoch cannot train any more."""
        assert self.epoch is not None
        members = self.epoch.members
        lost = tuple(member for member in members if self.is_lost(member, now_s))
        if lost:
            named = ", ".join(f"node {member.node}" for member in lost)
            return Quit(f"{named} does not answer" if len(lost) == 1 else f"{named} are gone", lost)
        for one in members:
            if one.start != self.agent.start and self._has_ended(one):
                return Quit(f"ranks of node {one.node} have ended")
        return None

    def _has_ended(self, agent: Agent) -> bool:
        if agent.start == self.agent.start:
            return self.phase == "ended"
        standing = self._told.get(agent.start)
        return standing is not None and standing.epoch == self.number and standing.phase == "ended"

    def _has_left(self, agent: Agent) -> bool:
        standing = self._told.get(agent.start)
        return standing is not None and standing.phase == "left"

    def spares(self, now_s: float) -> tuple[Agent, ...]:
        """Return who waits without being a member, by node."""
        assert self.epoch is not None
        proposals = [
            standing.agent
            for standing in self._told.values()
            if standing.phase == "ready"
            and standing.epoch == self.number
            and not self.epoch.has_member(standing.agent)
            and standing.agent.start not in self.epoch.excluded
            and not self.is_lost(standing.agent, now_s)
        ]
        return tuple(sorted(proposals, key=lambda proposal: (proposal.node, proposal.start)))

    def _ends(self, alive: Sequence[Agent]) -> tuple[RankEnd, ...]:
        standings: Mapping[str, Standing] = self._told
        ends = [
            self._end,
            *(standings[agent.start].end for agent in alive if agent.start in standings),
        ]
        return tuple(sorted((end for end in ends if end), key=lambda end: end.waits))

    def _all_held(self, alive: Sequence[Agent], now_s: float) -> tuple[Held, ...]:
        """Return what those hold who may go on: members, and spares that were members once."""
        named = {agent.start for agent in (*alive, *self.spares(now_s))}
        standings = [standing for start, standing in self._told.items() if start in named]
        return (*self.holdings.states, *(held for standing in standings for held in standing.held))
