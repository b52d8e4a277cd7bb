"""AdamW as a plan's training settings say, over what this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.plan import Offload
from planner.training import Training
from runtime.adamw import AdamW
from runtime.adapter import Adapter, Chain
from runtime.gradient_wire import Mean
from runtime.gradients import Gradients, Slot, copies_of, whole_part
from runtime.learning_rate import learning_rate
from runtime.loss_scale import LossScale
from runtime.mesh import Place


class Optimizer(Gradients):
    """AdamW of one rank.  Weight decay acts on matrices, not on norms and biases."""

    def __init__(
        self,
        chains: Sequence[Chain],
        adapter: Adapter,
        training: Training,
        place: Place,
        *,
        device: torch.device,
        summed: frozenset[str],
        factors: Mapping[str, float],
        offload: Offload = "none",
        scale: LossScale | None = None,
        mean: Mean | None = None,
        divisor: float = 1.0,
    ) -> None:
        """`summed` and `factors` are by parameter: see ParallelStage."""
        slots = tuple(_slots(chains, adapter, place, summed, factors))
        super().__init__(slots, place, device=device, divisor=divisor, scale=scale, mean=mean)
        self.training = training
        # Its state is made now rather than at the first step, so that a checkpoint can load.
        self._adamw = AdamW(
            [slot.local for slot in self.slots],
            [slot.parameter.ndim > 1 for slot in self.slots],
            training,
            names=[slot.name for slot in self.slots],
            device=device,
            offload=offload,
        )

    @torch.no_grad()
    def step(self, totals: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Apply the gradients; return what ranks report, on the device: see Measured.

        See `measured`.  A norm that is not finite means, in fp16, that the step changed nothing but
        the scale; so does, always, a count of 0.
        """
        grads = self.whole()
        measured = self.measured(grads, totals, earlier)
        self.scaled(grads, measured, self.training.clip_norm)
        spoilt = self.scale.spoilt(measured.norm)
        empty = (measured.factor == 0).float()
        self._adamw.step(
            [grads.get(slot) for slot in self.slots],
            rate=learning_rate(self.training, int(self.steps)),
            spoilt=empty if spoilt is None else spoilt.maximum(empty),
        )
        self.scale.update(spoilt)
        self.steps += 1
        self.dropped()
        return measured.report

    def follow(self) -> None:
        """Update the parameters where their values are now."""
        # `data` has a version counter of its own: in-flight backwards do not need these values.
        self.use(replace(slot, local=slot.parameter.data) for slot in self.slots)
        self._adamw.parameters = [slot.local for slot in self.slots]

    def state(self) -> dict[str, Tensor]:
        """Return parameters and optimizer state by published name, sharing the live memory.

        Parts of a divided parameter are DTensors, so any other plan can load them.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what comes back to the host must have arrived
        result: dict[str, Tensor] = {"train.step": self.steps, **self.scale.state()}
        for slot, moments in zip(self.slots, self._adamw.moments, strict=True):
            result[f"model.{slot.name}"] = whole_part(slot, slot.local)
            for key, value in moments.named().items():
                result[f"optim.{slot.name}.{key}"] = (
                    value if key == "step" else whole_part(slot, value)
                )
        return result


def _slots(
    chains: Sequence[Chain],
    adapter: Adapter,
    place: Place,
    summed: frozenset[str],
    factors: Mapping[str, float],
) -> Iterator[Slot]:
    world = 1 if place.mesh is None else place.degrees.devices // place.degrees.pipeline
    ends = place.ends() if place.degrees.pipeline > 1 else None
    for name, parameter in (pair for chain in chains for pair in chain.named_parameters()):
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        tied = place.degrees.pipeline > 1 and name in adapter.tied_names
        copies = copies_of(parameter, world)
        yield Slot(
            name=adapter.published_name(name),
            parameter=parameter,
            local=local.detach(),
            copies=2 * copies if tied else copies,
            partial=name in summed,
            pieces=adapter.pieces(name),
            tied=ends if tied else None,
            factor=factors.get(name, 1.0),
        )
