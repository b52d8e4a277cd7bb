"""AdamW as a plan's training settings say, over what this rank holds of a language model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.documents.plan import Offload
from planner.documents.training import Training
from planner.errors import LaunchError
from runtime.adapter import Adapter
from runtime.gradient_wire import Mean
from runtime.gradients import Slot, copies_of
from runtime.learning_rate import learning_rate
from runtime.loss_scale import LossScale
from runtime.mesh import Place
from runtime.streamed_state import host_like
from runtime.torch_optimizers import Group, TorchOptimizers


class Optimizer(TorchOptimizers):
    """torch's fused AdamW on one rank.  Weight decay acts on matrices, not on norms and biases."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
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
        """`summed` and `factors` are by parameter: see runtime.transforms.Staged."""
        slots = tuple(_slots(stages, adapter, place, summed, factors))
        for slot in slots:
            _refuse_gaps(slot)
        factory = functools.partial(
            torch.optim.AdamW,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )
        groups = [
            Group(
                factory,
                {"weight_decay": training.weight_decay if matrices else 0.0},
                tuple(slot.name for slot in slots if (slot.parameter.ndim > 1) == matrices),
                elementwise=True,
            )
            for matrices in (True, False)
        ]
        super().__init__(
            slots,
            groups,
            place,
            device=device,
            divisor=divisor,
            scale=scale,
            mean=mean,
            streamed=offload == "optimizer",
        )
        self.training = training
        for parameter, optimizer in self._users.items():
            # Made now rather than at the first step, so that a checkpoint can load.
            optimizer.state[parameter] = _first_state(parameter, device, offload)

    @torch.no_grad()
    def step(self, totals: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Apply the gradients; return what ranks report, on the device: see Measured.

        See `measured`.  A norm that is not finite means, in fp16, that the step changed nothing but
        the scale; so does, always, a count of 0.
        """
        grads = self.whole()
        measured = self.measured(grads, totals, earlier)
        self.scaled(grads, measured, self.training.clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.training, int(self.steps))
        self.update_on_device(grads, measured)
        return measured.report

    def follow(self) -> None:
        """Update the parameters where their values are now."""
        for part in self._parts.values():
            # `data` has a version counter of its own: in-flight backwards do not need these values.
            part.slot.local.data = part.plain.data = part.slot.parameter.data


def _refuse_gaps(slot: Slot) -> None:
    """Refuse a parameter that is not alone in its memory: fused updates run through that."""
    alone = torch.empty_like(slot.local, device="meta")
    if _strides(slot.local) != _strides(alone):
        raise LaunchError(
            f"{slot.name}: has strides {slot.local.stride()} in memory, between which others lie, "
            "and AdamW's fused update runs through memory. Let the module keep the parameter "
            "contiguous"
        )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that elements have; of a dim of one there may be any."""
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _first_state(parameter: Tensor, device: torch.device, offload: Offload) -> dict[str, Tensor]:
    """Return what torch's AdamW keeps of a parameter before its first step."""

    def zeros() -> Tensor:
        if offload == "none" or parameter.device != device:
            return torch.zeros_like(parameter, requires_grad=False)
        return host_like(parameter).zero_()

    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": zeros(),
        "exp_avg_sq": zeros(),
    }


def _slots(
    stages: Sequence[nn.Module],
    adapter: Adapter,
    place: Place,
    summed: frozenset[str],
    factors: Mapping[str, float],
) -> Iterator[Slot]:
    world = 1 if place.mesh is None else place.degrees.devices // place.degrees.pipeline
    ends = place.ends() if place.degrees.pipeline > 1 else None
    for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
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
