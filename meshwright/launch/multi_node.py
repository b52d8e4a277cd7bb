"""`launch --elastic` on several nodes: attempts one after another, each an epoch of the run.

A node that is back, or a spare, is taken in at the next save where what it gains in the time that
is left is more than twice what the start of new ranks costs, and not soon after another change.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.launch.attempt import (
    copies_rescued,
    copy_bytes,
    log_decision,
    run_attempt,
    stop_if_preempted,
)
from meshwright.launch.fallback_plans import FallbackPlans, FallbackSolver, fallback
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.replan import leave_out
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.events import (
    Attempt,
    AttemptEnded,
    Decision,
    Drift,
    Incident,
    Paced,
    Reaction,
)
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import HandedOver, LaunchError, MeshwrightError
from meshwright.planner.errors.shown import lines
from meshwright.planner.system.safe_files import folder_within
from meshwright.runtime.checkpoint import object_store
from meshwright.runtime.launch.failure_report import MOST_EVIDENCE, RankFailed, RankSlow
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.preflight import (
    LocalRanks,
    cuda_devices,
    default_output,
    ranks_of_node,
)
from meshwright.runtime.resilience.faulty_nodes import FaultRegister
from meshwright.runtime.resilience.membership import Agent, Epoch, LostDevice, Proposal
from meshwright.runtime.resilience.node_agent import NodeAgent, RunOver, agent_of
from meshwright.runtime.resilience.replication import KeptCopies, Pairing, partner_places
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.resilience.state_rescue import saved_step
from meshwright.runtime.resilience.straggler_detector import SHARE
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.authenticated_channel import without_secret
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.locks_and_signals import signals_kept
from meshwright.runtime.run.node_rank import NodeRank
from meshwright.runtime.run.recovery_policy import RankEnd, Verdict, verdict
from meshwright.runtime.run.rendezvous import NodeLeft
from meshwright.runtime.run.run_clock import process_start_unix_s, unix_now_s
from meshwright.runtime.run.run_folder import (
    Device,
    account_of,
    append_record,
    events,
    events_file,
    metrics_file,
    never_fatal,
    newest_record,
)

START_S = 60.0
"""Seconds until ranks train, where this run has not measured it on this node."""
LOOK_S = 1.0
"""Seconds between two looks for nodes that came back."""
ALONE_S = 10.0
"""Seconds that a node waits for the others before it looks whether their run is over."""
RECENT_S = 60.0
"""A run that ended at most so long before a node came was not meant to begin anew."""
MOST_SAID = 500
"""Largest number of characters of a launcher's report on an end, which all agents get twice a
second."""


_ENDS = Attempt, AttemptEnded
AttemptOnNodes = Callable[[LaunchablePlan, Launch, Sequence[RankEnd]], Any]
"""Trains by a plan in one epoch; `Launch` is what this node has for it."""


def on_nodes(
    fit: LaunchablePlan,
    run: LaunchRun,
    node_rank: NodeRank,
    shrunk: Decision | None,
    *,
    attempt: AttemptOnNodes = run_attempt,
    is_script: bool = False,
    quiet: bool,
) -> Any:
    """Train on the nodes that are there, one epoch after another; what the lead has is returned.

    Nodes beyond those of the plan are spares.  `shrunk` is why its plan is not the given one.
    Each epoch is an `attempt`; a script's steps are not known before.
    """
    assert run.checkpoint is not None
    folder = run.checkpoint.absolute()
    output = (run.output or default_output(fit.plan)).absolute()
    members = min(fit.nodes, node_rank.nodes)
    run = run.model_copy(update={"checkpoint": folder})
    say = _teller(quiet=quiet)
    with contextlib.ExitStack() as held:
        signals = held.enter_context(signals_kept())
        zygote = held.enter_context(Zygote())
        slots = held.enter_context(Slots(folder, expected_bytes=copy_bytes(fit)))
        held.enter_context(copies_rescued(slots, folder, quiet=quiet))
        late = LateNode(run, signals, is_script=is_script)
        try:
            agent = held.enter_context(
                agent_of(
                    node_rank,
                    folder,
                    members=members,
                    output=str(output),
                    say=say,
                    meanwhile=late.look,
                )
            )
        except RunOver as over:
            say(str(over))
            return None
        copies = held.enter_context(agent.copies(slots))
        run = run.model_copy(update={"output": Path(agent.epoch.output)})
        keeper = held.enter_context(FallbackSolver(fit, run))
        means = NodeResources(agent=agent, copies=copies, zygote=zygote, slots=slots, keeper=keeper)
        epochs = Epochs(fit, run, means, signals, attempt=attempt, is_script=is_script, quiet=quiet)
        return epochs.run(shrunk)


class LateNode:
    """A node that waits for others, which may have finished the run before it came."""

    def __init__(self, run: LaunchRun, signals: Sequence[int], *, is_script: bool) -> None:
        self._run, self._signals, self._is_script = run, signals, is_script
        self._next_s = time.monotonic() + ALONE_S
        self._came_unix_s = process_start_unix_s()

    def look(self, newest: Epoch | None) -> None:
        """Raise HandedOver by a notice, and RunOver where the run of an epoch is over.

        LaunchError says how others stopped it while this node came.
        """
        if self._signals:
            raise HandedOver("a notice came before the nodes had met")
        if newest is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        output, folder = Path(newest.output), self._run.checkpoint
        assert folder is not None
        try:
            is_recent = events_file(output).stat().st_mtime > self._came_unix_s - RECENT_S
        except OSError:
            is_recent = False
        stop = stop_since(output, self._came_unix_s) if is_recent else None
        if stop is not None:
            raise LaunchError(
                f"the run in {object_store.shown(folder)} stopped on its other nodes while this "
                f"one came, {stop}; start the same command again on every node"
            )
        # A script may be started to go further, and only one that has just ended is known not to.
        goes_on = self._run.resume and not self._is_script
        if (is_recent or goes_on) and has_ended(self._run, output, is_script=self._is_script):
            raise RunOver(
                f"the run in {object_store.shown(folder)} is over: step {saved_step(folder)} is "
                "saved; name another folder to train anew"
            )


def stop_since(output: Path, since_unix_s: float) -> str | None:
    """Return why a run was stopped, if that is the last of it and was not before a time.

    An incident is the last of a run whose end could not be saved: nothing was decided on it.
    """
    ends: list[Attempt | AttemptEnded | Incident | Decision] = [
        event for event in events(output) if isinstance(event, (*_ENDS, Incident, Decision))
    ]
    last = ends[-1] if ends else None
    if last is None or last.at_unix_s < since_unix_s:
        return None
    causes = [event.evidence for event in ends if isinstance(event, Incident)]
    if isinstance(last, Decision) and last.reaction == "stop":
        return ": ".join([last.why, *causes[-1:]])
    is_left = isinstance(last, Incident) and last.at_unix_s < time.time() - RECENT_S
    return causes[-1] if is_left else None


def has_ended(run: LaunchRun, output: Path, *, is_script: bool) -> bool:
    """Return whether a run has come to its end, by its checkpoints and its records."""
    assert run.checkpoint is not None
    if not is_script and saved_step(run.checkpoint) >= run.steps:
        return True
    *_, last = (None, *(event for event in events(output) if isinstance(event, _ENDS)))
    wanted: tuple[str, ...] = ("max_seconds", *(["steps"] if is_script else []))
    return isinstance(last, AttemptEnded) and last.stopped in wanted


def _teller(*, quiet: bool) -> Callable[[str], None]:
    """Return what prints a line on stderr, if anything is printed."""

    def print_notice(text: str) -> None:
        if not quiet:
            print(f"meshwright: {lines(text)}", file=sys.stderr)

    return print_notice


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """Resources of a node for the lifetime of a run."""

    agent: NodeAgent
    copies: KeptCopies
    zygote: Zygote
    slots: Slots
    keeper: FallbackSolver


class Epochs:
    """The epochs of a run, as one of its nodes lives through them."""

    def __init__(
        self,
        fit: LaunchablePlan,
        run: LaunchRun,
        means: NodeResources,
        signals: list[int],
        *,
        attempt: AttemptOnNodes = run_attempt,
        is_script: bool = False,
        quiet: bool,
    ) -> None:
        self._attempt, self._is_script = attempt, is_script
        self._planned = self._fit = fit
        self._run, self._means, self._agent = run, means, means.agent
        self._signals, self._quiet = signals, quiet
        self._hidden = 0
        """Devices of this node that ranks do not see any more."""
        self._again = False
        """Ranks of this command ran before."""

    def run(self, shrunk: Decision | None) -> Any:
        """Train until the run is over; the first epoch has `shrunk` before it."""
        while True:
            try:
                self._wait_as_spare()
            except RunOver as over:
                self._end_as_spare(over)
                return None
            epoch = self._agent.epoch
            self.adopt(epoch)
            self._pair(epoch)
            steps = math.inf if self._is_script else self._run.steps
            self._scale_up = ScaleUp(self._planned, self._fit, self._run, self._agent, steps=steps)
            self._agent.begin()
            try:
                asked = Launch(
                    self._fit.path,
                    self._run,
                    quiet=self._quiet,
                    node_rank=self._agent.node_rank(),
                    elastic=True,
                    agent=self._agent,
                    zygote=self._means.zygote,
                    slots=self._means.slots,
                    begun=self._means.keeper.begin,
                    meanwhile=self._scale_up.look,
                    paced=self._replacement(steps),
                    before=shrunk,
                    again=self._again,
                )
                return self._attempt(self._fit, asked, epoch.ends)
            except (RankFailed, NodeLeft) as failed:
                print(f"meshwright: {lines(str(failed))}", file=sys.stderr)
                failed.is_printed = True
                self._regroup(failed)
            shrunk, self._again = None, True
            goes_on = {"resume": True, "or_start": True}
            self._run = self._run.model_copy(update=goes_on)

    def _replacement(self, steps: float) -> Callable[[Drift | Paced], None] | None:
        """Return what looks whether a spare takes this node's place, where that is asked for."""
        if not self._run.replace_stragglers:
            return None
        return StragglerReplacement(self._run, self._agent, steps=steps).look

    def adopt(self, epoch: Epoch) -> None:
        """Go by an epoch's plan, on the devices that are left."""
        self._fit = self._planned if epoch.plan is None else self._planned.with_plan(epoch.plan)
        if self._fit.machine.devices == self._planned.machine.devices:
            self._planned = self._fit  # with less memory, from here on
        if epoch.ends and epoch.ends[-1].spoils_copies:
            self._means.slots.forget()
        self._hide_lost(epoch)

    def _hide_lost(self, epoch: Epoch) -> None:
        """Let ranks that start from now on not see the devices that this node has lost."""
        start = self._agent.roster.agent.start
        lost = [device for device in epoch.lost_devices if device.start == start]
        group = self._planned.machine.groups[0]
        for device in lost[self._hidden :]:
            if group.accelerator.kind != "cpu":
                leave_out(device.device, group.devices_per_node - self._hidden)
            self._hidden += 1

    def _pair(self, epoch: Epoch) -> None:
        """Find the partner that keeps this node's copies, and the ward whose copies it keeps."""
        members, agent = epoch.members, self._agent.roster.agent
        nodes = domain_nodes(self._planned.machine)
        partners = partner_places([member.node // nodes for member in members])
        place = [member.start for member in members].index(agent.start)
        ward = partners.index(place)
        alone = len(members) == 1
        pairing = Pairing(
            run=epoch.run,
            epoch=epoch.number,
            own=agent,
            partner=None if alone else members[partners[place]],
            ward=None if alone else members[ward],
        )
        wards = 0 if alone else len(self._ranks(ward))
        self._means.slots.begin(epoch=epoch.number, wards=wards, has_partner=not alone)
        self._means.copies.begin(pairing)

    def _wait_as_spare(self) -> None:
        """Wait for an epoch that has this node."""
        agent = self._agent
        if agent.roster.is_member:
            return
        is_left_out = agent.roster.agent.start in agent.epoch.excluded
        waits = (
            "is excluded and waits for the end of the run" if is_left_out else "waits as a spare"
        )
        self._print_notice(f"node {agent.roster.agent.node} {waits}")
        if not self._is_script and not is_left_out:  # a script's ranks are started afresh
            self._warm()
        agent.wait_as_spare(self._end_spare)
        self._run = self._run.model_copy(update={"resume": True, "or_start": True})

    def _warm(self) -> None:
        """Have torch imported before this node is wanted."""
        assert self._run.output is not None
        folder = folder_within(self._run.output, f"spare-{self._agent.roster.agent.start}")
        logs = folder_within(folder, "logs")
        device: Device = "cuda" if cuda_devices() else "cpu"
        ranks = {rank: place for place, rank in enumerate(self._ranks(0))}
        local = LocalRanks(self._fit.plan.ranks, device, ranks)
        environment = {**without_secret(os.environ), **local.environment(min(ranks))}
        self._means.zygote.warm(environment, log=logs / "rank-00000.log")

    def _end_spare(self) -> None:
        if self._signals:
            raise HandedOver("this node got a notice to stop while it was a spare")

    def _end_as_spare(self, over: RunOver) -> None:
        """Say that the run is over; raise LaunchError where it has not come to its end."""
        assert self._run.checkpoint is not None and self._run.output is not None
        is_left_out = self._agent.roster.agent.start in self._agent.epoch.excluded
        notice = f"this node was {'excluded' if is_left_out else 'a spare'}: {over}"
        if not has_ended(self._run, self._run.output, is_script=self._is_script):
            done = saved_step(self._run.checkpoint)
            saved = f"step {done}" if done else "none"
            of = "" if self._is_script else f" of {self._run.steps} steps"
            again = "" if self._is_script else " with --resume --or-start"
            raise LaunchError(
                f"{notice}; the last saved state is {saved}{of}; start the run again{again}"
            )
        self._print_notice(notice)

    def _regroup(self, failed: RankFailed | NodeLeft) -> None:
        """Take part in the next epoch, or raise how this one ended."""
        end = failed.end if isinstance(failed, RankFailed) else None
        if end is not None:
            end = end.model_copy(update={"said": lines(str(failed))[:MOST_SAID]})
        begin_s = unix_now_s()
        self._agent.regroup(
            end,
            failed,
            lambda proposal: self.next(proposal, failed, begin_s),
            lambda: stop_if_preempted(self._signals, failed),
        )

    def next(self, proposal: Proposal, failed: LaunchError, at_unix_s: float) -> Epoch:
        """Decide the next epoch by the table, and write down what and why."""
        last = proposal.epoch
        assert self._run.checkpoint is not None and self._run.output is not None
        stored = saved_step(self._run.checkpoint)
        if self._scale_up.asked and not proposal.lost and not proposal.ends:
            return self._grown(proposal, stored)
        end = self._end_of(proposal, stored)
        register = FaultRegister(self._run.checkpoint)
        for node in proposal.lost or [self._node_of(end.rank, last)]:
            with never_fatal(self._run.checkpoint / "faults", MeshwrightError):
                register.add(node, end)
        ends = (*last.ends, end)
        judged = verdict(ends, devices=self._fit.plan.ranks)
        if judged is None or judged.reaction == "stop":
            if judged is not None:
                log_decision(self._run.output, judged, self._fit, quiet=self._quiet)
            raise failed
        without = None
        if judged.reaction == "shrink" and end.cause != "node":
            without = self._node_of(end.rank, last)
            proposal, without = self._without_device(proposal, without, end)
        members = proposal.members(self._planned.nodes, without=without)
        if end.cause == "straggler" and len(members) < len(last.members):
            without = None  # the spare is gone, and slow is better than fewer
            members = proposal.members(self._planned.nodes)
        if not members:
            raise failed
        self._write_incident(end, proposal, failed, at_unix_s)
        excluded = (*last.excluded, *([] if without is None else [without.start]))
        epoch = self._next_epoch(proposal, members, judged, stored, end)
        return epoch.model_copy(update={"ends": ends, "excluded": excluded})

    def _without_device(
        self, proposal: Proposal, node: Agent, end: RankEnd
    ) -> tuple[Proposal, Agent | None]:
        """Return the proposal after the loss of a device, and the node that it leaves out.

        All nodes train on one device fewer then, where that is faster than on one node fewer.
        """
        epoch = proposal.epoch
        place = [member.start for member in epoch.members].index(node.start)
        device = LostDevice(start=node.start, device=self._local_ranks(place)[end.rank])
        fewer = epoch.model_copy(update={"lost_devices": (*epoch.lost_devices, device)})
        with_all = proposal.members(self._planned.nodes)
        instead = proposal.members(self._planned.nodes, without=node)
        if self._predicted_s(fewer, with_all) >= self._predicted_s(epoch, instead):
            return proposal, node
        return replace(proposal, epoch=fewer), None

    def _size(self, epoch: Epoch, members: Sequence[Agent]) -> tuple[int, int | None]:
        """Return nodes, and devices of each if these are fewer than there were."""
        lost = epoch.most_lost(members)
        each = self._planned.machine.groups[0].devices_per_node - lost
        return len(members), each if lost else None

    def _predicted_s(self, epoch: Epoch, members: Sequence[Agent]) -> float:
        """Return the predicted seconds of a step on some nodes; infinite where no plan fits."""
        nodes, each = self._size(epoch, members)
        if not nodes or each == 0:
            return math.inf
        if nodes == self._planned.nodes and each is None:
            return 0.0  # with a spare, nothing is lost
        try:
            plans = FallbackPlans(self._run.checkpoint or Path())
            return plans.entry_or_solution(self._planned, nodes, each)[0].step_s
        except LaunchError:
            return math.inf

    def _grown(self, proposal: Proposal, stored: int) -> Epoch:
        """Return the next epoch where nothing went wrong: of the nodes that are there now."""
        members = proposal.members(self._scale_up.nodes)
        grows = Verdict(causes=frozenset(), reaction="grow", why=self._scale_up.why)
        return self._next_epoch(proposal, members, grows, stored)

    def _next_epoch(
        self,
        proposal: Proposal,
        members: tuple[Agent, ...],
        judged: Verdict,
        stored: int,
        end: RankEnd | None = None,
    ) -> Epoch:
        """Return the next epoch with its plan, once what is done is written down."""
        last, before = proposal.epoch, self._fit.machine.devices
        if judged.reaction == "replan" and end is not None:
            self._fit = self._fit.with_less_memory(end, self._run, quiet=self._quiet)
            plan: str | None = self._fit.path
        elif (size := self._size(last, members)) != (self._planned.nodes, None):
            nodes, each = size
            self._fit = fallback(self._planned, nodes, self._run, each=each, quiet=self._quiet)
            plan = self._fit.path
        else:
            self._fit = self._planned
            plan = last.plan if last.plan == self._planned.path else None
        fewer = self._fit.machine.devices < before
        done = _membership_verdict(judged, last.members, members, fewer=fewer)
        assert self._run.output is not None
        log_decision(self._run.output, done, self._fit, quiet=self._quiet)
        stays = [member.start for member in members] == [member.start for member in last.members]
        return last.model_copy(
            update={
                "number": last.number + 1,
                "members": members,
                "plan": plan,
                "state": proposal.state(stored),
                "reaction": done.reaction,
                "why": done.why,
                "changed_unix_s": last.changed_unix_s if stays else time.time(),
            }
        )

    def _write_incident(
        self, end: RankEnd, proposal: Proposal, failed: LaunchError, at_unix_s: float
    ) -> None:
        """Write down what ended the epoch, unless the launch here has."""
        led = proposal.epoch.members[0].start == self._agent.roster.agent.start
        if led and isinstance(failed, RankFailed) and failed.end is not None:
            return
        lost = proposal.lost[0].node if proposal.lost else None
        evidence = end.said or str(failed)
        if len(proposal.lost) > 1:
            named = ", ".join(str(node.node) for node in proposal.lost)
            evidence = f"nodes {named} were lost; {evidence}"
        incident = Incident(
            at_unix_s=at_unix_s,
            cause=end.cause,
            rank=None if end.cause == "node" else end.rank,
            node=lost,
            after_step=end.after_step,
            evidence=evidence[:MOST_EVIDENCE],
        )
        assert self._run.output is not None
        append_record(incident, events_file(self._run.output))

    def _end_of(self, proposal: Proposal, stored: int) -> RankEnd:
        """Return the end of the epoch: a node that is lost, before ranks that may follow it."""
        if proposal.lost or not proposal.ends:
            places = [member.start for member in proposal.epoch.members]
            lost = proposal.lost[0].start if proposal.lost else places[0]
            rank = min(self._ranks(places.index(lost)))
            return RankEnd(cause="node", rank=rank, after_step=proposal.state(stored).step)
        return proposal.ends[0]

    def _node_of(self, rank: int, epoch: Epoch) -> Agent:
        return next(member for i, member in enumerate(epoch.members) if rank in self._ranks(i))

    def _ranks(self, place: int) -> list[int]:
        return list(self._local_ranks(place))

    def _local_ranks(self, place: int) -> dict[int, int]:
        """Return the ranks of a member, each with its device there."""
        groups = self._fit.machine.groups
        devices = [group.devices_per_node for group in groups for _ in range(group.nodes)]
        return ranks_of_node(self._fit.plan, place, devices)

    def _print_notice(self, text: str) -> None:
        _teller(quiet=self._quiet)(text)


class ScaleUp:
    """Decision of an epoch's lead to end the epoch so that more nodes can join."""

    def __init__(
        self,
        planned: LaunchablePlan,
        fit: LaunchablePlan,
        run: LaunchRun,
        agent: NodeAgent,
        *,
        steps: float | None = None,
    ) -> None:
        """The epoch trains by the plan `fit`; the run was started with `planned`.

        `steps` are infinitely many where a script does not tell them.
        """
        self._steps = run.steps if steps is None else steps
        self._planned, self._fit, self._run, self._agent = planned, fit, run, agent
        self._next_s, self._begin_s = 0.0, time.monotonic()
        self.asked = False
        """True if ranks were asked to end after their next save."""
        self.nodes = len(agent.epoch.members)
        """Number of nodes that the run is to have."""
        self.why = ""

    def look(self) -> None:
        """Ask ranks to end after their next save if more nodes are there, and pay."""
        now_s = time.monotonic()
        if self.asked or now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        epoch = self._agent.epoch
        # The clock may have been set back since then; this epoch is no older than the change.
        since_s = max(time.time() - epoch.changed_unix_s, now_s - self._begin_s)
        if len(epoch.members) >= self._planned.nodes or since_s < self._run.scale_up_after:
            return
        there = min(self._planned.nodes, len(epoch.members) + len(self._agent.spares()))
        larger = self._largest(len(epoch.members), there)
        assert self._run.output is not None
        newest = newest_record(metrics_file(self._run.output))
        start_s = account_of(self._run.output).start_s
        if larger is None or newest is None or start_s is None:
            return
        nodes, larger_s = larger
        left_s = (self._steps - newest.step) * newest.step_s
        if not growth.pays(
            left_s=left_s, step_s=self._step_s, larger_step_s=larger_s, cost_s=start_s
        ):
            return
        self.asked, self.nodes = True, nodes
        saved = 1 - larger_s / self._step_s
        gain = (
            f"{100 * saved:.0f} % of a step"
            if math.isinf(left_s)
            else f"{seconds_text(left_s * saved)} of {seconds_text(left_s)}"
        )
        self.why = f"{nodes - len(epoch.members)} more nodes are available and save {gain}"
        growth.request_end(self._run.output)
        notice = f"ranks will restart after the next save: {self.why}"
        print(f"meshwright: {lines(notice)}", file=sys.stderr)

    def _largest(self, nodes: int, there: int) -> tuple[int, float] | None:
        """Return the largest known number of nodes above the current one, and its step."""
        if there == self._planned.nodes:
            return there, self._planned_step_s
        assert self._run.checkpoint is not None
        plans = FallbackPlans(self._run.checkpoint)
        for more in range(there, nodes, -1):
            entry = plans.entry(self._planned.plan, more)
            if entry is not None:
                return more, entry.step_s
        return None

    @functools.cached_property
    def _step_s(self) -> float:
        """Predicted seconds of a step by the current plan."""
        return _predicted_step_s(self._fit)

    @functools.cached_property
    def _planned_step_s(self) -> float:
        return _predicted_step_s(self._planned)


class StragglerReplacement:
    """Decision of a node with a slow rank that a spare takes its place.

    gained = steps left (seconds of the slow rank - seconds of the others) > TIMES cost
    """

    def __init__(self, run: LaunchRun, agent: NodeAgent, *, steps: float) -> None:
        """`steps` are infinitely many where a script does not tell them."""
        self._run, self._agent, self._steps = run, agent, steps
        self._slow: dict[int, Drift] = {}
        """Ranks that are slow, as was said of them."""

    def look(self, event: Drift | Paced) -> None:
        """Take notice of the pace of ranks; raise RankSlow where another node should have one."""
        if isinstance(event, Drift):
            if event.rank is not None and event.cause.startswith("straggler"):
                self._slow[event.rank] = event
                self._replace_if_it_pays(event, event.after_step)
            return
        for part in event.ranks:
            slow = self._slow.get(part.rank)
            if slow is None:
                continue
            now_s = part.data_s if slow.cause == "straggler: data" else part.work_s
            if now_s is None or now_s - slow.predicted_s <= SHARE * part.step_s:
                del self._slow[part.rank]  # it is well again
            else:
                self._replace_if_it_pays(slow, event.after_step)

    def _replace_if_it_pays(self, slow: Drift, step: int) -> None:
        assert self._run.output is not None
        if not self._agent.spares():
            return
        cost_s = account_of(self._run.output).start_s or START_S
        left = self._steps - step
        gain_s = left * (slow.measured_s - slow.predicted_s)
        if gain_s <= growth.TIMES * cost_s:
            return
        each = seconds_text(slow.measured_s - slow.predicted_s)
        gain = f"{each} of each step" if math.isinf(left) else seconds_text(gain_s)
        raise RankSlow(
            f"{slow.text}; a spare takes its node's place: this should cost {seconds_text(cost_s)} "
            f"and the steps since the last copy, and save {gain}",
            output=self._run.output,
            end=RankEnd(cause="straggler", rank=slow.rank or 0, after_step=step),
        )


def _predicted_step_s(fit: LaunchablePlan) -> float:
    return predict(fit.plan, fit.graph, fit.machine, fit.measured).step_time_s


def domain_nodes(machine: ClusterSpec) -> int:
    """Return the number of neighbouring nodes that may fail together: those of a rack, if any.

    >>> from meshwright.api.inputs import machine_of
    >>> domain_nodes(machine_of("16xh100-sxm-80gb", None))
    1
    """
    a_node = machine.groups[0].devices_per_node
    racks = [tier.devices for tier in machine.tiers if a_node < tier.devices < machine.devices]
    return racks[-1] // a_node if racks else 1


def _membership_verdict(
    verdict: Verdict, before: tuple[Agent, ...], members: tuple[Agent, ...], *, fewer: bool
) -> Verdict:
    """Return a verdict by what becomes of the members, which may have `fewer` devices each."""
    reaction: Reaction = "restart" if members == before else "spare"
    if members == before and fewer:
        reaction = "shrink"
    if members == before and verdict.reaction == "replan":
        reaction = "replan"
    if len(members) != len(before):
        reaction = "shrink" if len(members) < len(before) else "grow"
    return Verdict(causes=verdict.causes, reaction=reaction, why=verdict.why)
