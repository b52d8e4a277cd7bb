"""`launch --survive` on several nodes: attempts one after another, each an epoch of the run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from meshwright.launches import LaunchablePlan, Launched, decided, hand_over, launched
from planner.documents.events import Incident, Reaction
from planner.errors import HandedOver, LaunchError
from planner.errors.shown import lines
from planner.process.guarded_files import folder_within
from runtime import checkpoint
from runtime.agent import NodeAgent, RunOver, agent_of
from runtime.channel import without_secret
from runtime.held import signals_kept
from runtime.launch import MOST_EVIDENCE, RankFailed
from runtime.nodes import NodeRank
from runtime.preflight import LocalRanks, cuda_devices, default_output, ranks_of_node
from runtime.rendezvous import NodeLeft
from runtime.roster import Agent, Epoch, Proposal
from runtime.run import Device, LaunchRun, append_record, events_file
from runtime.slots import Slots
from runtime.verdict import RankEnd, Verdict, verdict
from runtime.zygote import Zygote


def on_nodes(
    fit: LaunchablePlan, run: LaunchRun, node_rank: NodeRank, *, quiet: bool
) -> Launched | None:
    """Train on the nodes that are there, one epoch after another; what the lead has is returned.

    Nodes beyond those of the plan are spares.
    """
    assert run.checkpoint is not None
    folder = run.checkpoint.absolute()
    output = (run.output or default_output(fit.plan)).absolute()
    members = min(fit.nodes, node_rank.nodes)
    with (
        signals_kept() as signals,
        Zygote() as zygote,
        Slots() as slots,
        agent_of(node_rank, folder, members=members, output=str(output)) as agent,
    ):
        run = run.model_copy(
            update={"checkpoint": folder, "output": Path(agent.epoch.output)},
        )
        return _Epochs(fit, run, agent, zygote, slots, signals, quiet=quiet).run()


class _Epochs:
    """The epochs of a run, as one of its nodes lives through them."""

    def __init__(
        self,
        fit: LaunchablePlan,
        run: LaunchRun,
        agent: NodeAgent,
        zygote: Zygote,
        slots: Slots,
        signals: list[int],
        *,
        quiet: bool,
    ) -> None:
        self._planned = self._fit = fit
        self._run, self._agent, self._zygote = run, agent, zygote
        self._slots = slots
        self._signals, self._quiet = signals, quiet

    def run(self) -> Launched | None:
        """Train until the run is over."""
        while True:
            try:
                self._wait_as_spare()
            except RunOver as over:
                self._say(f"this node was a spare: {over}")
                return None
            epoch = self._agent.epoch
            self._fit = self._planned if epoch.plan is None else self._planned.at(epoch.plan)
            if self._fit.nodes == self._planned.nodes:
                self._planned = self._fit  # with less memory, from here on
            self._agent.begin()
            try:
                return launched(
                    self._fit,
                    self._run,
                    self._agent.node_rank(),
                    survive=True,
                    agent=self._agent,
                    zygote=self._zygote,
                    slots=self._slots,
                    ends=epoch.ends,
                    quiet=self._quiet,
                )
            except (RankFailed, NodeLeft) as failed:
                print(f"meshwright: {lines(str(failed))}", file=sys.stderr)
                self._regroup(failed)
            goes_on = {"resume": True, "or_start": True}
            self._run = self._run.model_copy(update=goes_on)

    def _wait_as_spare(self) -> None:
        """Wait for an epoch that has this node."""
        agent = self._agent
        if agent.roster.is_member:
            return
        self._say(f"node {agent.roster.agent.node} waits as a spare")
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
        local = LocalRanks(self._fit.plan.mesh.devices, device, ranks)
        environment = {**without_secret(os.environ), **local.environment(min(ranks))}
        self._zygote.warm(environment, log=logs / "rank-00000.log")

    def _end_spare(self) -> None:
        if self._signals:
            raise HandedOver("a notice came while this node was a spare")

    def _regroup(self, failed: RankFailed | NodeLeft) -> None:
        """Take part in the next epoch, or raise how this one ended."""
        end = failed.end if isinstance(failed, RankFailed) else None
        begin_s = time.time()
        self._agent.regroup(
            end,
            failed,
            lambda proposal: self._next(proposal, failed, begin_s),
            lambda: hand_over(self._signals, failed),
        )

    def _next(self, proposal: Proposal, failed: LaunchError, at_unix_s: float) -> Epoch:
        """Decide the next epoch by the table, and write down what and why."""
        last = proposal.epoch
        assert self._run.checkpoint is not None and self._run.output is not None
        saved = checkpoint.newest(self._run.checkpoint)
        stored = checkpoint.progress(saved).step if saved is not None else 0
        end = self._end_of(proposal, stored)
        ends = (*last.ends, end)
        found = verdict(ends, devices=self._fit.plan.mesh.devices)
        if found is None or found.reaction == "stop":
            raise failed
        without = None
        if found.reaction == "shrink" and end.cause != "node":
            without = self._node_of(end.rank, last)
        members = proposal.members(self._planned.nodes, without=without)
        if not members:
            raise failed
        plan = None
        if found.reaction == "replan":
            again = self._fit.with_less_memory(end, self._run, quiet=self._quiet)
            self._fit, plan = again, again.path
        elif len(members) < self._planned.nodes:
            again = self._planned.again(len(members), self._run, quiet=self._quiet)
            self._fit, plan = again, again.path
        else:
            self._fit = self._planned
            plan = last.plan if last.plan == self._planned.path else None
        done = _named(found, last.members, members)
        self._write_incident(end, proposal, failed, at_unix_s)
        decided(self._run.output, done, self._fit.plan, quiet=self._quiet)
        return Epoch(
            number=last.number + 1,
            run=last.run,
            members=members,
            plan=plan,
            output=last.output,
            state=proposal.state(stored),
            reaction=done.reaction,
            why=done.why,
            ends=ends,
            excluded=(*last.excluded, *([] if without is None else [without.start])),
        )

    def _write_incident(
        self, end: RankEnd, proposal: Proposal, failed: LaunchError, at_unix_s: float
    ) -> None:
        """Write down what ended the epoch, unless the launch here has."""
        led = proposal.epoch.members[0].start == self._agent.roster.agent.start
        if led and isinstance(failed, RankFailed) and failed.end is not None:
            return
        lost = proposal.lost[0].node if proposal.lost else None
        incident = Incident(
            at_unix_s=at_unix_s,
            cause=end.cause,
            rank=None if end.cause == "node" else end.rank,
            node=lost,
            after_step=end.after_step,
            evidence=str(failed)[:MOST_EVIDENCE],
        )
        assert self._run.output is not None
        append_record(incident, events_file(self._run.output))

    def _end_of(self, proposal: Proposal, stored: int) -> RankEnd:
        """Return what ended the epoch: a node that is lost, before ranks that may follow it."""
        if proposal.lost or not proposal.ends:
            places = [one.start for one in proposal.epoch.members]
            lost = proposal.lost[0].start if proposal.lost else places[0]
            rank = min(self._ranks(places.index(lost)))
            return RankEnd(cause="node", rank=rank, after_step=stored)
        return proposal.ends[0]

    def _node_of(self, rank: int, epoch: Epoch) -> Agent:
        return next(one for i, one in enumerate(epoch.members) if rank in self._ranks(i))

    def _ranks(self, place: int) -> list[int]:
        groups = self._fit.machine.groups
        devices = [group.devices_per_node for group in groups for _ in range(group.nodes)]
        return list(ranks_of_node(self._fit.plan, place, devices))

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"meshwright: {lines(text)}", file=sys.stderr)


def _named(found: Verdict, before: tuple[Agent, ...], members: tuple[Agent, ...]) -> Verdict:
    """Return a verdict by what becomes of the members."""
    reaction: Reaction = "restart" if members == before else "spare"
    if members == before and found.reaction == "replan":
        reaction = "replan"
    if len(members) != len(before):
        reaction = "shrink" if len(members) < len(before) else "grow"
    return Verdict(causes=found.causes, reaction=reaction, why=found.why)
