"""AdamW as a plan's training settings say, over this rank's part of a language model."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.plan import Offload
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.optim.gradients import Slot, copies_of
from meshwright.runtime.optim.offloaded_state import host_like
from meshwright.runtime.optim.sharded_optimizer import ParameterGroup


def slots_of(
    module: nn.Module,
    adapter: Adapter,
    place: Place,
    *,
    ends: dist.ProcessGroup | None = None,
    summed: Collection[str] = frozenset(),
    factors: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Slot]:
    """Yield what is trained of a stage, by published name.

    `ends` are the first and last stage, which hold a copy each of a tied weight; `summed` and
    `factors` are by parameter: see meshwright.runtime.engine.apply_plan.Staged.
    """
    world = 1 if place.mesh is None else place.degrees.devices // place.degrees.pipeline
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        tied = ends if name in adapter.tied_names else None
        copies = copies_of(parameter, world)
        slot = Slot(
            name=adapter.published_name(name),
            parameter=parameter,
            local=local.detach(),
            copies=copies if tied is None else 2 * copies,
            partial=name in summed,
            pieces=adapter.pieces(name),
            tied=tied,
            factor=factors.get(name, 1.0),
        )
        _refuse_gaps(slot)
        yield slot


def adamw(
    slots: Sequence[Slot], training: Training, *, device: torch.device, offload: Offload = "none"
) -> list[ParameterGroup]:
    """Return groups under torch's fused AdamW: weight decay acts on matrices alone."""
    factory = functools.partial(_adamw, training, device, offload)
    return [
        ParameterGroup(
            factory,
            {"weight_decay": training.weight_decay if matrices else 0.0},
            tuple(slot.name for slot in slots if (slot.parameter.ndim > 1) == matrices),
            elementwise=True,
        )
        for matrices in (True, False)
    ]


def _adamw(
    training: Training, device: torch.device, offload: Offload, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups, betas=(training.beta1, training.beta2), eps=training.epsilon, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Made now rather than at the first step, so that a checkpoint can load.
            optimizer.state[parameter] = _first_state(parameter, device, offload)
    return optimizer


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
