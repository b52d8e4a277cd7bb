"""Growing back: when a run that lost nodes goes on on more of them again.

A node that is back, or a spare, is taken in at the next save where what it gains in the time that
is left is more than twice what the start of new ranks costs, and not soon after another change.
"""

from __future__ import annotations

import functools
import sys
import time

from meshwright.launch.fallback_plans import Book
from meshwright.launch.launch import LaunchablePlan
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors.shown import lines
from meshwright.runtime.resilience.node_agent import NodeAgent
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.run_folder import account_of, metrics_file, newest_record

LOOK_S = 1.0


class Growth:
    """Whether an epoch of a run ends so that more nodes come in, as its lead sees it."""

    def __init__(
        self, planned: LaunchablePlan, fit: LaunchablePlan, run: LaunchRun, agent: NodeAgent
    ) -> None:
        """`fit` is what the epoch trains by, and `planned` what the run was started with."""
        self._planned, self._fit, self._run, self._agent = planned, fit, run, agent
        self._next_s, self._begin_s = 0.0, time.monotonic()
        self.asked = False
        """Whether ranks were asked to end after their next save."""
        self.nodes = len(agent.epoch.members)
        """That the run is to have."""
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
        if len(epoch.members) >= self._planned.nodes or since_s < self._run.grow_after:
            return
        there = min(self._planned.nodes, len(epoch.members) + len(self._agent.spares()))
        larger = self._largest(len(epoch.members), there)
        assert self._run.output is not None
        newest = newest_record(metrics_file(self._run.output))
        start_s = account_of(self._run.output).start_s
        if larger is None or newest is None or start_s is None:
            return
        nodes, larger_s = larger
        left_s = (self._run.steps - newest.step) * newest.step_s
        if not growth.pays(
            left_s=left_s, step_s=self._step_s, larger_step_s=larger_s, cost_s=start_s
        ):
            return
        self.asked, self.nodes = True, nodes
        self.why = (
            f"{nodes - len(epoch.members)} more nodes are there, and save "
            f"{seconds_text(left_s * (1 - larger_s / self._step_s))} of {seconds_text(left_s)}"
        )
        growth.request_end(self._run.output)
        said = f"ranks end after the next save, because {self.why}"
        print(f"meshwright: {lines(said)}", file=sys.stderr)

    def _largest(self, nodes: int, there: int) -> tuple[int, float] | None:
        """Return the most nodes beyond those of now for which a plan is known, and its step."""
        if there == self._planned.nodes:
            return there, self._planned_step_s
        assert self._run.checkpoint is not None
        book = Book(self._run.checkpoint)
        for more in range(there, nodes, -1):
            entry = book.entry(self._planned.plan, more)
            if entry is not None:
                return more, entry.step_s
        return None

    @functools.cached_property
    def _step_s(self) -> float:
        """Predicted, by the plan of now."""
        return _predicted_s(self._fit)

    @functools.cached_property
    def _planned_step_s(self) -> float:
        return _predicted_s(self._planned)


def _predicted_s(fit: LaunchablePlan) -> float:
    return predict(fit.plan, fit.graph, fit.machine, fit.measured).step_time_s
