"""AdamW over what this rank holds: gradients made whole, measured, clipped and applied.

The optimizer works on the plain local parts of DTensors, so it neither dispatches per DTensor nor
minds that parameters lie on different meshes; `state` puts the parts together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from planner.plan import Offload
from planner.training import Training
from runtime.adamw import AdamW
from runtime.adapter import Adapter, Chain
from runtime.gradient_wire import Mean
from runtime.learning_rate import learning_rate
from runtime.loss_scale import LossScale
from runtime.mesh import Place
from runtime.recompute import PREFIX
from runtime.torch_internals import DTensorSpec, TensorMeta

_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter of this rank.  `local` is its local part, sharing the parameter's memory."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    copies: int
    """How many ranks hold these same values."""
    partial: bool
    """The gradient must be summed over the tensor axis."""
    pieces: int
    """Matrices that lie one above the other in dim 1."""
    tied: bool
    """The other end of the pipeline holds a copy, and the two gradients must be summed."""
    factor: float
    """What the gradient must be multiplied with to be the mean over the global batch."""


class Optimizer:
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
        """`summed` and `factors` are by parameter: see ParallelStage.

        `scale` is fp16's.  `mean` makes that over replicas, where backward does not.  `divisor` is
        what sums of losses are divided by before backward (runtime/loss.py).
        """
        self.divisor = divisor
        self.training = training
        self.device = device
        self.place = place
        self.slots = _slots(chains, adapter, place, summed, factors)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.scale = scale or LossScale(device, active=False)
        self._mean = mean
        self._ends = place.ends() if place.degrees.pipeline > 1 else None
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
        """Apply the gradients; return [mean loss, gradient norm, count] on the device.

        `totals` are this rank's sum and count of the loss.  Where the gradients are those of an
        earlier step, `earlier` is what counted there on all ranks.  The gradients are of sums
        divided by `divisor`, and have fp16's scale.  A norm that is not finite means,
        in fp16, that the step changed nothing but the scale; so does, always, a count of 0.

        All share one all-reduce, the only collective here of a job without tensor axis or ties.
        """
        slots = [slot for slot in self.slots if slot.parameter.grad is not None]
        grads = [_local_grad(slot.parameter) for slot in slots]
        for slot, grad in zip(slots, grads, strict=True):
            if slot.factor != 1.0:
                grad.mul_(slot.factor)
        self._sum_partial(slots, grads)
        if self._mean is not None:
            self._mean.reduce([slot.name for slot in slots], grads)
        self._sum_tied(slots, grads)
        report = torch.cat((totals, _squared_norm(slots, grads, like=totals).reshape(1)))
        if self.place.mesh is not None:
            dist.all_reduce(report)
        count = report[1] if earlier is None else earlier
        empty = count == 0
        factor = (self.place.replicas * self.divisor / count).where(~empty, 0.0).float()
        norm = self.scale.taken_off(report[2].sqrt().float() * factor)
        shrink = self.scale.taken_off(factor)
        if self.training.clip_norm > 0:
            shrink = shrink * (self.training.clip_norm / (norm + _NORM_EPSILON)).clamp(max=1.0)
        if grads:
            torch._foreach_mul_(grads, shrink.to(grads[0].device))
        spoilt = self.scale.spoilt(norm)
        skipped = empty.float() if spoilt is None else spoilt.maximum(empty.float())
        made = {id(slot): grad for slot, grad in zip(slots, grads, strict=True)}
        self._adamw.step(
            [made.get(id(slot)) for slot in self.slots],
            rate=learning_rate(self.training, int(self.steps)),
            spoilt=skipped,
        )
        self.scale.update(spoilt)
        self.steps += 1
        for slot in slots:
            slot.parameter.grad = None
        return torch.stack((report[0] / report[1], norm, report[1]))

    def follow(self) -> None:
        """Update the parameters where their values are now."""
        # `data` has a version counter of its own: in-flight backwards do not need these values.
        self.slots = tuple(replace(slot, local=slot.parameter.data) for slot in self.slots)
        self._adamw.parameters = [slot.local for slot in self.slots]

    def state(self) -> dict[str, Tensor]:
        """Return parameters and optimizer state by published name, sharing the live memory.

        Parts of a divided parameter are DTensors, so any other plan can load them.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what comes back to the host must have arrived
        result: dict[str, Tensor] = {"train.step": self.steps, **self.scale.state()}
        for slot, moments in zip(self.slots, self._adamw.moments, strict=True):
            result[f"model.{slot.name}"] = _whole(slot, slot.local)
            for key, value in moments.named().items():
                result[f"optim.{slot.name}.{key}"] = value if key == "step" else _whole(slot, value)
        return result

    def _sum_partial(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        partial = [grad for slot, grad in zip(slots, grads, strict=True) if slot.partial]
        if partial:
            flat = torch.cat([grad.flatten() for grad in partial]).to(self.device)
            dist.all_reduce(flat, group=self.place.axis("tensor").get_group())
            parts = flat.split([grad.numel() for grad in partial])
            for grad, part in zip(partial, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def _sum_tied(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        for slot, grad in zip(slots, grads, strict=True):
            if slot.tied and grad.numel():
                whole = grad.to(self.device)
                dist.all_reduce(whole, group=self._ends)
                if whole is not grad:
                    grad.copy_(whole)


def _slots(
    chains: Sequence[Chain],
    adapter: Adapter,
    place: Place,
    summed: frozenset[str],
    factors: Mapping[str, float],
) -> tuple[Slot, ...]:
    world = 1 if place.mesh is None else place.degrees.devices // place.degrees.pipeline
    slots = []
    for raw_name, parameter in (pair for chain in chains for pair in chain.named_parameters()):
        name = raw_name.replace(PREFIX, "")
        if not parameter.requires_grad:
            continue
        local = parameter.detach()
        copies = world
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach()
            for dim, placement in enumerate(parameter.placements):
                if not isinstance(placement, Replicate):
                    copies //= parameter.device_mesh.size(dim)
        tied = place.degrees.pipeline > 1 and name in adapter.tied_names
        slots.append(
            Slot(
                name=adapter.published_name(name),
                parameter=parameter,
                local=local,
                copies=2 * copies if tied else copies,
                partial=name in summed,
                pieces=adapter.pieces(name),
                tied=tied,
                factor=factors.get(name, 1.0),
            )
        )
    return tuple(slots)


def _local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor)
        assert grad.placements == parameter.placements, (grad.placements, parameter.placements)
        return grad.to_local()
    return grad


def _squared_norm(slots: Sequence[Slot], grads: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return this rank's share of the squared norm: shares of all ranks add up to the whole."""
    by_copies: dict[int, list[Tensor]] = {}
    for slot, grad in zip(slots, grads, strict=True):
        by_copies.setdefault(slot.copies, []).append(grad)
    total = torch.zeros((), dtype=torch.float32, device=like.device)
    for copies, group in by_copies.items():
        norms = torch.stack(torch._foreach_norm(group))
        total += (norms.square().sum() / copies).to(like.device)
    return total


def _whole(slot: Slot, local: Tensor) -> Tensor:
    """Return a local part as the same kind of tensor as its parameter, pieces in their own dim."""
    parameter = slot.parameter
    placements: tuple[Placement, ...] = ()
    shape = torch.empty(parameter.shape, device="meta")
    if isinstance(parameter, DTensor):
        placements = parameter.placements
    if slot.pieces > 1:
        local, shape = (t.unflatten(1, (slot.pieces, -1)) for t in (local, shape))
        # A divided dim from there on moves behind the pieces.
        placements = tuple(
            Shard(p.dim + 1) if isinstance(p, Shard) and p.dim >= 1 else p for p in placements
        )
    if not isinstance(parameter, DTensor):
        return local
    # Made by hand, since `from_local` would move what lies on the host to the device.
    meta = TensorMeta(shape.shape, shape.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)
