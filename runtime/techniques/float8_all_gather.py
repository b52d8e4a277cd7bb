"""Weights that ranks divide under ZeRO-3, gathered in 8 bits: `weight_gather_dtype: fp8`.

Each rank rounds its shard of a Linear's weight with the scale of the whole, and FSDP gathers the
result, through the two methods that it asks a parameter for (`fsdp_pre_all_gather` and
`fsdp_post_all_gather`; so does torchao).  What is gathered while a layer works takes one
byte an element in place of two, and products do not round it again.  Values are to the last bit
those of weights that were gathered in bf16 and rounded behind it: the shard is brought to bf16
first, and the largest value is that of all shards.

Scales are made once for a step, of all weights with one reduction of their largest values.
Gradients come in bf16 for weights in 8 bits (`Tensor.grad_dtype`), and are reduced as others are.
Only a leaf may have such a gradient, so between it and the product a stand-in in bf16 takes the
weight's place in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.torch_internals import extend_gather, fsdp_parameters
from meshwright.runtime.techniques.float8 import FORWARD, Tensorwise, fits, rounded_with, scale_of
from meshwright.runtime.techniques.split_backward import DeferredLinear, divided_like

_WIDE = torch.bfloat16


class NarrowWeights:
    """The weights of one stage that are gathered in 8 bits, and their scales."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """The group divides them."""
        if not hasattr(Tensor, "grad_dtype"):
            raise LaunchError(
                f"weight_gather_dtype: is fp8, and torch {torch.__version__} has no gradients of another "
                "type than their parameter's (Tensor.grad_dtype); use full"
            )
        self._group = group
        self._records: list[Any] = []
        self._scales: list[Tensor] = []

    def take(self, layer: nn.Module) -> None:
        """Gather the weights of a layer's Linears in 8 bits, where their shape allows it."""
        assert isinstance(layer, FSDPModule)
        taken = []
        for record in fsdp_parameters(layer):
            module, shard = record._module_info.module, record._sharded_local_tensor
            size = record._orig_size
            if (
                isinstance(module, DeferredLinear)
                and isinstance(module.products, Tensorwise)
                and record._module_info.param_name == "weight"
                and record.fsdp_placement.dim == 0
                and size[0] % self._group.size() == 0
                and fits(size)
            ):
                module.scale = torch.ones((), device=shard.device)
                extend_gather(record, _narrowed(shard, module.scale), _gathered)
                self._scales.append(module.scale)
                taken.append(record)

        def stand_in(*_: object) -> None:
            """Put one in each weight's place, which FSDP has gathered."""
            for record in taken:
                weight = record._unsharded_param
                weight.grad_dtype = _WIDE
                record._module_info.module.stand_in = _StandIn.apply(weight)

        self._records += taken
        layer.register_forward_pre_hook(stand_in)

    @torch.no_grad()
    def rescale(self) -> None:
        """Make the scales of the weights as they are now; all ranks that divide them together."""
        if not self._records:
            return
        shards = [record._sharded_local_tensor for record in self._records]
        most = torch.stack(torch._foreach_norm(shards, float("inf"))).to(_WIDE).float()
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        torch._foreach_copy_(self._scales, list(scale_of(most, FORWARD).unbind()))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.like = weight
        shape = weight.to_local().shape if isinstance(weight, DTensor) else weight.shape
        return torch.empty((), dtype=_WIDE, device=weight.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        like = ctx.like
        return divided_like(grad, like) if isinstance(like, DTensor) else grad


def _narrowed(shard: Tensor, scale: Tensor) -> Callable[..., tuple[tuple[Tensor, ...], None]]:
    def before(
        mesh: object, size: object, stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends, as bytes: collective libraries know no 8-bit floats."""
        return (rounded_with(shard.to(_WIDE), scale, FORWARD).view(torch.uint8),), None

    return before


def _gathered(
    outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the whole weight, and what FSDP frees with it; later gathers fill the same memory."""
    return None if out is not None else (outputs[0].view(FORWARD), outputs)
