"""A plan with its model and machine, checked and ready to launch; also for less memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.inputs import machine_of, own_code, plan_model, profile_for
from meshwright.launch.replan import planned_again
from meshwright.planner.costs.predict import predict as predict_plan
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.events import PlanSource
from meshwright.planner.documents.model import ModelGraph, is_factory
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Profiles
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.whatif.what_if_changes import changed_cluster
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd

if TYPE_CHECKING:
    from meshwright.runtime.run.node_rank import NodeRank

MEMORY_MARGIN = 0.03
"""Share by which a plan has less memory than one that ran out, where its need is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchablePlan:
    """A plan, its model, and the machine that it is for."""

    path: str
    plan: Plan
    graph: ModelGraph
    machine: ClusterSpec
    measured: Profiles
    profile: str | None = None
    """The file that has what was measured, where one was named."""
    source: PlanSource = "given"

    @classmethod
    def read(cls, path: str, profile: str | None) -> LaunchablePlan:
        """Read a plan with what it names."""
        plan = document.read(Plan, path)
        graph = plan_model(plan, path)
        refuse_foreign(plan, path)
        measured = profile_for(graph, profile)
        machine = machine_of(plan.cluster, measured)
        return cls(
            path=path, plan=plan, graph=graph, machine=machine, measured=measured, profile=profile
        )

    def with_code(self, *, trusted: bool) -> LaunchablePlan:
        """Run the user's file if the model is one; it must still make what was planned."""
        if not is_factory(self.plan.model.source):
            return self
        try:
            graph = own_code(self.graph, self.path, seq_len=self.plan.seq_len, trusted=trusted)
            self.plan.check_model(graph)
        except DocumentError as error:
            raise (error if error.file else error.in_file(self.path)) from error
        return replace(self, graph=graph)

    def remaining(self, node_rank: NodeRank) -> int | None:
        """Return the number of nodes, or of devices of one node; None if as many as planned."""
        from meshwright.runtime.launch.preflight import cuda_devices  # noqa: PLC0415 - the runtime

        planned = self.nodes
        if node_rank.nodes != planned:
            return node_rank.nodes if node_rank.nodes < planned else None
        on_cpu = self.machine.groups[0].accelerator.kind == "cpu"
        if planned > 1 or on_cpu:
            return None
        here: int = cuda_devices()
        return here if 0 < here < self.plan.ranks else None

    @property
    def nodes(self) -> int:
        """Nodes that the plan is for."""
        return sum(group.nodes for group in self.machine.groups)

    def with_plan(self, path: str) -> LaunchablePlan:
        """Return the same training under another plan of its own."""
        plan = document.read(Plan, path)
        machine = machine_of(plan.cluster, self.measured)
        return replace(self, path=path, plan=plan, machine=machine, source="given")

    def with_less_memory(self, end: RankEnd, run: LaunchRun, *, quiet: bool) -> LaunchablePlan:
        """Return the same training planned for devices that count as smaller, since it ran out.

        They have less by what the rank needed over what was predicted, and so little at least that
        the plan that ran out does not fit.  LaunchError where no plan does.
        """
        prediction = predict_plan(self.plan, self.graph, self.machine, self.measured)
        if end.on_host:
            smaller = changed_cluster(self.machine, "host_memory", 1 - MEMORY_MARGIN)
        else:
            has = min(group.accelerator.memory_bytes for group in self.machine.groups)
            peak = max(stage.peak_memory_bytes for stage in prediction.stages)
            room = min(has / (end.needed or 1.0), peak) * (1 - MEMORY_MARGIN)
            smaller = changed_cluster(self.machine, "memory", room / has)
        if smaller is None:
            raise LaunchError(
                f"{self.machine.name}: the memory of its hosts is not known; plan again without "
                "offload"
            )
        path = planned_again(
            self.movable(), self.graph, [smaller], self.measured, folder=run.checkpoint or Path()
        )
        return self.replanned_at(path, source="solved", quiet=quiet)

    def movable(self) -> Plan:
        """Return the plan with its model's file named from anywhere: a new plan is elsewhere."""
        from meshwright.runtime.launch.preflight import found_here  # noqa: PLC0415 - the runtime

        model = found_here(self.plan.model, self.graph, self.path)
        return self.plan.model_copy(update={"model": model})

    def replanned_at(self, path: Path, *, source: PlanSource, quiet: bool) -> LaunchablePlan:
        """Return and report the same training under a plan for fewer devices or less memory."""
        fit = replace(self.with_plan(str(path)), source=source)
        if not quiet:
            print(
                f"meshwright: planned again for {fit.machine.devices} of {self.machine.devices} "
                f"devices: {fit.plan.layout_text}, "
                f"{'found' if source == 'book' else 'written'} in {path}",
                file=sys.stderr,
            )
        return fit


def refuse_foreign(wanted: Plan, path: str) -> None:
    """Refuse a plan for another framework before any other check."""
    from meshwright.runtime.engine.unsupported import foreign  # noqa: PLC0415 - the runtime

    other = foreign(wanted)
    if other:
        raise LaunchError(f"{path}: {other}")
