"""Replay: whether steps give the same values again from the state before them.

A loss that is no number, and a gradient norm far above the usual, come from the data and the model,
or from a device that computed wrongly or whose memory changed.  So all ranks put the newest copy of
their state back and do the steps since then again, with the same samples and random numbers.  What
comes again is the run's own; what does not was the device's.

    replays.took(step, result, own)      # after each step
    if replays.doubts(step, result):     # the same on all ranks
        ...                              # the state of a copy is put back, and steps are done again
        replays.compare(step, again, own_again)

Values are compared to the bit on CPUs.  Kernels of accelerators may sum in any order, so there they
count as equal within a thousandth.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from meshwright.planner.documents.plan import Plan
from meshwright.planner.schedules import schedule_of
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.optim.replica_check import RankSuspected
from meshwright.runtime.run.run_folder import Device

SPIKE = 10.0
"""Times the median of the last gradient norms: more is doubted."""
RECENT = 64
LEAST_NORMS = 20
"""Norms that a median is of, at least."""
QUIET_STEPS = 100
"""Behind a spike that came again, in which others are not doubted; twice as many each time."""
NEARLY = 1e-3


class StepDiffered(RankSuspected):
    """A step gave other values when it was done again from the same state.

    Suspected is the only rank whose own loss, or own gradient before it was summed, differs.
    """


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of a step."""

    loss: float
    norm: float
    own: Tensor
    """Values of the step on this rank alone: Engine.own_values."""


def can_replay(plan: Plan) -> bool:
    """Return whether a step depends on nothing but the state before it."""
    return not schedule_of(plan.schedule).stale


class Replays:
    """A rank's record of the steps since the newest copy of its state."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self._tolerance = 0.0 if device == "cpu" else NEARLY
        self._names = not plan.is_cut and plan.mesh.tensor == plan.mesh.context == 1
        """True if a rank's own loss and gradient come from its own work alone."""
        self._steps: dict[int, StepValues] = {}
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._quiet_until, self._quiet = 0, QUIET_STEPS

    def took(self, step: int, *, loss: float, norm: float, gradient: Tensor) -> None:
        """Take what a step gave, on all ranks and on this one."""
        self._steps[step] = StepValues(loss, norm, gradient)

    def forget_before(self, step: int) -> None:
        """Forget what lies behind a copy of the state after a step."""
        self._steps = {number: values for number, values in self._steps.items() if number > step}

    def doubts(self, step: int) -> bool:
        """Return whether a completed step is to be repeated; the same on all ranks."""
        loss, norm = self._steps[step].loss, self._steps[step].norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return True
        usual = statistics.median(self._norms) if len(self._norms) >= LEAST_NORMS else math.inf
        self._norms.append(norm)
        return norm > SPIKE * usual and step > self._quiet_until

    def compare(self, step: int, *, loss: float, norm: float, gradient: Tensor) -> None:
        """Compare a step that was done again; all ranks call it.

        Raises StepDiffered, on all, where it gave something else.
        """
        before = self._steps.get(step)
        if before is None:
            return
        same = self._equal(before.loss, loss) and self._equal(before.norm, norm)
        if same:
            return
        pairs = zip(before.own.tolist(), gradient.tolist(), strict=True)
        differs = all_gather_json(not all(self._equal(*pair) for pair in pairs))
        ranks = [rank for rank, differing in enumerate(differs) if differing]
        suspect = ranks[0] if self._names and len(ranks) == 1 else None
        who = "some rank's" if suspect is None else f"rank {suspect}'s"
        raise StepDiffered(
            f"step {step} gave loss {before.loss:.6g} and gradient norm {before.norm:.6g}, and "
            f"{loss:.6g} and {norm:.6g} when it was done again from the same state: {who} memory "
            "or arithmetic is damaged",
            suspect,
        )

    def came_again(self, step: int) -> None:
        """Take notice that a step gave the same again, and so is the run's own."""
        self._quiet_until, self._quiet = step + self._quiet, 2 * self._quiet

    def _equal(self, first: float, other: float) -> bool:
        if not (math.isfinite(first) and math.isfinite(other)):
            return repr(first) == repr(other)
        return abs(first - other) <= self._tolerance * max(abs(first), abs(other))
