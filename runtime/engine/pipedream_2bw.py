"""PipeDream-2BW: a pipeline that never drains, on weights of two ages.

Step k's micro-batches go forward and backward on the weights that k - 1 steps have made, so the
pipeline is filled with step k + 1 while step k's gradients are still on their way:

    W(k+1) = W(k) + AdamW's move by the gradient of step k at W(max(0, k-1))

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1.  A rank
has two versions of its weights and, since clipping needs the norm over all ranks, the gradients
of two steps.  Step k's update is made when call k + 1 ends; `drain` makes it earlier, and changes
no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.schedules import schedule
from meshwright.planner.schedules.schedule_record import Action, Kind
from meshwright.runtime.engine.pipeline import StagePipeline
from meshwright.runtime.optim.sharded_optimizer import TorchOptimizers
from meshwright.runtime.tracing.stage import MicroBatch, ModelStage


class WeightVersions:
    """The weights of one stage at two ages; the newest are what the optimizer updates."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._of: dict[int, list[Tensor]] = {0: [p.data for p in self._parameters]}

    @property
    def newest(self) -> int:
        """Number of updates that the newest weights have had."""
        return max(self._of)

    def use(self, number: int) -> None:
        """Let the parameters have the values that `number` updates have made."""
        for parameter, value in zip(self._parameters, self._of[number], strict=True):
            if parameter.data_ptr() != value.data_ptr():
                parameter.data = value

    def next(self) -> None:
        """Begin a new version as a copy of the newest, in place of the oldest, and use it."""
        newest = self.newest
        values = self._of[newest]
        if len(self._of) == 2:
            weights = self._of.pop(min(self._of))
        else:
            weights = [torch.empty_like(value) for value in values]
        torch._foreach_copy_(weights, values)
        self._of[newest + 1] = weights
        self.use(newest + 1)


class StalePipeline(StagePipeline):
    """This rank's one stage, and the part of the endless schedule that each call executes."""

    def __init__(
        self,
        own: Mapping[int, ModelStage],
        *,
        name: str,
        stages: int,
        example: Any,
        micro_batches: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Any, MicroBatch], Tensor],
    ) -> None:
        """`stages` has the one stage of this rank, by its number.

        `groups` are of the same ranks: one for activations, one for gradients.

        Messages of two directions in one group could each wait for the other to be received.
        """
        shape = {"stages": stages, "micro_batches": micro_batches}
        super().__init__(
            own,
            schedule.orders(name, stages=stages, micro_batches=micro_batches),
            example=example,
            micro_batches=micro_batches,
            groups=groups,
            device=device,
            loss=loss,
        )
        (self._stage,) = own
        both = schedule.orders(name, **shape, steps=2)[self._stage]
        second = both.index(Action(self._stage, "F", micro_batches))
        behind = stages - 1 - self._stage  # micro-batches that are in flight when a step ends
        self._fill, self._go_on = both[:second], both[second : len(both) - behind]
        self._rest = both[len(both) - behind :]
        self._parameters = [p for p in own[self._stage].parameters() if p.requires_grad]
        self.versions = WeightVersions(self._parameters)
        self._steps = 0
        self._filled = False
        self._due: list[int] = []
        self._grads: dict[int, list[Tensor | None]] = {}

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Begin a step and go on with the one before; return the losses on the last stage."""
        first = self._steps - 1 if self._filled else self._steps
        self._losses = []
        for _, kind, number in self._go_on if self._filled else self._fill:
            self._act(kind, first * self._micro_batches + number)
        self._due.append(self._steps)
        self._steps += 1
        self._filled = True
        self.versions.use(self.versions.newest)
        return self._losses

    def drain(self) -> None:
        """Do all backwards that are left."""
        if self._filled:
            first = (self._steps - 1) * self._micro_batches
            for _, kind, number in self._rest:
                self._act(kind, first + number % self._micro_batches)
            self._finish_sends()
            self._filled = False
            self.versions.use(self.versions.newest)

    def due(self) -> bool:
        """Tell whether a step whose gradients all ranks have made waits for its update."""
        return len(self._due) > self._filled

    def begin_update(self) -> None:
        """Let the parameters be a new version, with the gradients of the oldest step due."""
        self.versions.next()
        self._exchange(self._grads.pop(self._due.pop(0)))

    def _act(self, kind: Kind, number: int) -> None:
        """Run a micro-batch on the weights of its step, backward into its step's gradients.

        Micro-batches are numbered from the first step on.
        """
        stage, step = self._stage, number // self._micro_batches
        self.versions.use(max(0, step - 1))
        if kind == "F":
            if stage:
                self._receive("F", stage, number)
            self._forward(stage, number, ())
            return
        if stage < self._last:
            self._receive("B", stage, number)
        self._exchange(self._grads.get(step) or [None] * len(self._parameters))
        self._backward(stage, number, whole=True)
        self._grads[step] = self._exchange([None] * len(self._parameters))

    def _exchange(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Give the parameters other gradients; return those that they had."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        return before


class LateUpdates:
    """Updates of a pipeline that never drains: each by the gradients of the step before."""

    def __init__(
        self,
        pipeline: StalePipeline,
        optimizers: TorchOptimizers,
        clip_norm: float,
        updated: Callable[[], None],
    ) -> None:
        """`updated` is called after each update."""
        self._pipeline, self._optimizers, self._clip_norm = pipeline, optimizers, clip_norm
        self._updated = updated
        self._counts: deque[Tensor] = deque()
        """Counts of the steps whose update waits, oldest first."""
        self._norm = 0.0

    def update(self, totals: Tensor) -> tuple[float, float, float]:
        """Update by a step that is due, if any; return the loss of all ranks, the last norm and
        who asks to end (`Gradients.ending`).

        `totals` are the sum and count of this rank's losses of the step that has begun.
        """
        if not self._pipeline.due():
            figures = torch.cat((totals, totals.new_tensor([self._optimizers.ending()])))
            dist.all_reduce(figures)
            self._counts.append(figures[1])
            return float(figures[0] / figures[1]), self._norm, float(figures[2])
        self._pipeline.begin_update()
        optimizers = self._optimizers
        optimizers.follow()
        measured = optimizers.step(totals, self._clip_norm, self._counts.popleft())
        self._updated()
        self._counts.append(measured.count)
        loss, self._norm, _, drift, ending = measured.report.tolist()
        if drift and optimizers.agreement is not None:
            optimizers.agreement.refuse_drift()
        return loss, self._norm, ending

    def drain(self, none: Tensor) -> None:
        """Do all backwards and updates that are left; `none` are totals of no losses."""
        self._pipeline.drain()
        if self._pipeline.due():
            self.update(none)
            self._counts.pop()  # no step has begun
