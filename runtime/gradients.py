"""Gradients of what this rank holds: made whole, measured over all ranks, scaled and clipped.

Optimizers work on the plain local parts of DTensors, so they neither dispatch per DTensor nor mind
that parameters lie on different meshes; `whole` puts the parts together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from runtime.divided import part_of, whole_of
from runtime.gradient_wire import Mean
from runtime.loss_scale import LossScale
from runtime.mesh import Place
from runtime.torch_internals import DTensorSpec, TensorMeta

_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    tied: dist.ProcessGroup | None
    """Stages that hold a copy each, whose gradients must be summed."""
    factor: float
    """What the gradient must be multiplied with to be the mean over the global batch."""
    sections: tuple[int, ...] = ()
    """Sizes of the matrices that lie one behind the other in dim 0, of each of which this rank has
    its part along the tensor axis; DTensor has no placement for that."""
    copies_here: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    """Those of a tied parameter on other stages of this rank, divided alike: parameter and local
    part.  Their gradients are added to this one's, and they take its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What all ranks together say of a step, on the device."""

    total: Tensor
    """Sum of the loss over all that counts."""
    count: Tensor
    norm: Tensor
    """Of the gradient of the mean loss, before clipping; not finite where fp16 overflowed."""
    factor: Tensor
    """What gradients must be multiplied with to be those of the mean loss; 0 if nothing counts."""

    @property
    def report(self) -> Tensor:
        """[mean loss, gradient norm, count]."""
        return torch.stack((self.total / self.count, self.norm.double(), self.count))


class Gradients:
    """The gradients of one rank's parameters, behind the last backward of a step."""

    def __init__(
        self,
        slots: Sequence[Slot],
        place: Place,
        *,
        device: torch.device,
        divisor: float,
        scale: LossScale | None = None,
        mean: Mean | None = None,
    ) -> None:
        """`divisor` is what sums of losses are divided by before backward (runtime/loss.py).

        `scale` is fp16's.  `mean` makes that over replicas, where backward does not.
        """
        self.slots = tuple(slots)
        self.place = place
        self.device = device
        self.divisor = divisor
        self.scale = scale or LossScale(device, active=False)
        self._mean = mean

    @torch.no_grad()
    def whole(self) -> dict[Slot, Tensor]:
        """Sum what lies on other ranks into the local gradients that there are; return those."""
        for slot in self.slots:
            _add_copies(slot)
        slots = [slot for slot in self.slots if slot.parameter.grad is not None]
        grads = [_local_grad(slot.parameter) for slot in slots]
        for slot, grad in zip(slots, grads, strict=True):
            if slot.factor != 1.0:
                grad.mul_(slot.factor)
        self._sum_partial(slots, grads)
        if self._mean is not None:
            self._mean.reduce([slot.name for slot in slots], grads)
        self._sum_tied(slots, grads)
        return dict(zip(slots, grads, strict=True))

    @torch.no_grad()
    def measured(
        self, grads: dict[Slot, Tensor], totals: Tensor, earlier: Tensor | None = None
    ) -> Measured:
        """Measure whole gradients, which are of sums divided by `divisor` and have fp16's scale.

        `totals` are this rank's sum and count of the loss.  Where the gradients are those of an
        earlier step, `earlier` is what counted there on all ranks.  All share one all-reduce, the
        only collective of a step without tensor axis or ties.
        """
        report = torch.cat((totals, _squared_norm(grads, like=totals).reshape(1)))
        if self.place.mesh is not None:
            dist.all_reduce(report)
        count = report[1] if earlier is None else earlier
        factor = (self.place.replicas * self.divisor / count).where(count != 0, 0.0).float()
        norm = self.scale.taken_off(report[2].sqrt().float() * factor)
        return Measured(
            total=report[0], count=report[1], norm=norm, factor=self.scale.taken_off(factor)
        )

    @torch.no_grad()
    def scaled(self, grads: dict[Slot, Tensor], measured: Measured, clip_norm: float) -> None:
        """Make them the gradients of the mean loss, no longer together than `clip_norm` if any."""
        factor = measured.factor
        if clip_norm > 0:
            factor = factor * _clipping(measured, clip_norm)
        _multiply(grads, factor)

    @torch.no_grad()
    def clipped(self, grads: dict[Slot, Tensor], measured: Measured, clip_norm: float) -> None:
        """Clip gradients that are of the mean loss already."""
        if clip_norm > 0:
            _multiply(grads, _clipping(measured, clip_norm))

    def dropped(self) -> None:
        """Forget the gradients."""
        for slot in self.slots:
            slot.parameter.grad = None
            for parameter, _ in slot.copies_here:
                parameter.grad = None

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
            if slot.tied is not None and grad.numel():
                whole = grad.to(self.device)
                dist.all_reduce(whole, group=slot.tied)
                if whole is not grad:
                    grad.copy_(whole)


def _add_copies(slot: Slot) -> None:
    """Add the gradients of a tied parameter's copies to its own."""
    for parameter, _ in slot.copies_here:
        if parameter.grad is None:
            continue
        if slot.parameter.grad is None:
            slot.parameter.grad = parameter.grad
        else:
            _local_grad(slot.parameter).add_(_local_grad(parameter))
        parameter.grad = None


@torch.no_grad()
def share_values(slots: Iterable[Slot]) -> None:
    """Give copies of tied parameters the values that the first ones have now."""
    for slot in slots:
        for _, local in slot.copies_here:
            local.copy_(slot.local)


def copies_of(parameter: Tensor, world: int) -> int:
    """Return how many of `world` ranks of a stage hold the same part of a parameter."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                world //= parameter.device_mesh.size(dim)
    return world


def _local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor)
        assert grad.placements == parameter.placements, (grad.placements, parameter.placements)
        return grad.to_local()
    return grad


def _clipping(measured: Measured, clip_norm: float) -> Tensor:
    return (clip_norm / (measured.norm + _NORM_EPSILON)).clamp(max=1.0)


def _multiply(grads: dict[Slot, Tensor], factor: Tensor) -> None:
    if grads:
        every = list(grads.values())
        torch._foreach_mul_(every, factor.to(every[0].device))


def _squared_norm(grads: dict[Slot, Tensor], *, like: Tensor) -> Tensor:
    """Return this rank's share of the squared norm: shares of all ranks add up to the whole."""
    by_copies: dict[int, list[Tensor]] = {}
    for slot, grad in grads.items():
        by_copies.setdefault(slot.copies, []).append(grad)
    total = torch.zeros((), dtype=torch.float32, device=like.device)
    for copies, group in by_copies.items():
        norms = torch.stack(torch._foreach_norm(group))
        total += (norms.square().sum() / copies).to(like.device)
    return total


def whole_part(slot: Slot, local: Tensor) -> Tensor:
    """Return a local part as the same kind of tensor as its parameter, pieces in their own dim.

    Of `sections` it is a plain copy of the whole, which all ranks make together.
    """
    if slot.sections:
        return _whole_of_sections(slot, local)
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


def _whole_of_sections(slot: Slot, local: Tensor) -> Tensor:
    made = whole_part(replace(slot, sections=()), local)
    assert isinstance(made, DTensor)
    whole = made.full_tensor()
    parts = whole.chunk(_tensor_degree(slot), 0)
    return whole_of(parts, 0, slot.sections)


def take_sections(slot: Slot, local: Tensor, whole: Tensor) -> None:
    """Give a local part its numbers of the whole: the inverse of `whole_part` for `sections`."""
    degree = _tensor_degree(slot)
    parts = [part_of(whole, 0, slot.sections, rank, degree) for rank in range(degree)]
    parameter = slot.parameter
    assert isinstance(parameter, DTensor)
    own = distribute_tensor(
        torch.cat(parts).to(local.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    local.copy_(own.to_local())


def _tensor_degree(slot: Slot) -> int:
    assert isinstance(slot.parameter, DTensor)
    mesh = slot.parameter.device_mesh
    return mesh.size((mesh.mesh_dim_names or ()).index("tensor"))
