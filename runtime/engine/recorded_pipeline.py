"""Stages of a recorded module under a schedule: what crosses is theirs, the batch is everywhere.

Every rank gives all micro-batches of its slice to `run_all`, and a stage takes the one whose number
the schedule says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.schedules.schedule import Order
from meshwright.runtime.engine.pipeline import Pipeline, StagePart
from meshwright.runtime.techniques.split_backward import WeightGradients
from meshwright.runtime.tracing.replayed_stage import MicroBatch, RecordedStage
from meshwright.runtime.tracing.trace import Recording


class RecordedPipeline(Pipeline):
    """This rank's stages of a recorded module, and the schedule that drives them."""

    def __init__(
        self,
        stages: Mapping[int, RecordedStage],
        orders: tuple[Order, ...],
        *,
        recording: Recording,
        micro_batches: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Any, MicroBatch], Tensor],
        stores: Mapping[int, WeightGradients] | None = None,
    ) -> None:
        """`recording` has the shapes that cross, of micro-batches of one shape.

        `loss` of the module's outputs, as one number; gradients are those of its sum.

        `stores` are by stage, where the schedule makes weight gradients apart.
        """
        self._recorded = tuple(stages.values())
        number = torch.empty(1, dtype=torch.int64, device="meta")
        for stage in self._recorded:
            stage.loss = loss
        parts = [
            StagePart(
                stage=at,
                module=stage,
                inputs=stage.received(recording) or (number,),
                outputs=stage.sent(recording) or torch.empty((), device="meta", requires_grad=True),
                store=stores[at] if stores else None,
                select=stage.select,
            )
            for at, stage in stages.items()
        ]
        super().__init__(
            parts,
            orders,
            micro_batches=micro_batches,
            groups=groups,
            device=device,
            loss=lambda made, _: made,
        )
        # What torch cuts and hands on; on the device, where it would be copied to.
        self._numbers = torch.arange(micro_batches, device=device)

    def run_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run one step on all micro-batches; return their losses on the last stage."""
        with self._given(micro_batches) as numbers:
            return self.run(numbers, numbers)

    def evaluate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run all micro-batches forward only; return their losses on the last stage."""
        with self._given(micro_batches) as numbers:
            return self.evaluate(numbers, numbers)

    @contextlib.contextmanager
    def _given(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        for stage in self._recorded:
            stage.micro_batches = tuple(micro_batches)
        yield self._numbers[: len(micro_batches)]
        for stage in self._recorded:
            stage.micro_batches = ()
