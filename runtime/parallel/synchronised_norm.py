"""BatchNorm over the micro-batches of all data ranks at once, on any device.

torch's own SyncBatchNorm takes CUDA tensors alone.  With x^ = (x - mean) / sqrt(var + eps) over the
n values of a feature on all ranks, and g the gradient of x^:

    forward    two all-reduces: the sum, then the sum of squares about the mean
    backward   one: dx = (g - sum(g) / n - x^ sum(g x^) / n) / sqrt(var + eps), sums over all ranks

Gradients of weight and bias are this rank's own part, as those of any parameter.
Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def synchronised_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    groups: Sequence[dist.ProcessGroup],
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x [sample, feature, ...] over all dims but features, and over all ranks.

    `groups` are axes of the mesh over which data are divided; ranks of all of them together call
    this in the same order.  Returns the result, and mean and unbiased variance [feature], which are
    equal on all ranks and have no gradient.
    """
    dims = [dim for dim in range(x.ndim) if dim != 1]
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        count = torch.tensor([float(x.numel() // max(x.shape[1], 1))], device=x.device, dtype=wide)
        first = _summed(torch.cat((x.to(wide).sum(dims), count)), groups)
        number = first[-1]
        mean = first[:-1] / number
        centred = x.to(wide) - _along(mean, x)
        variance = _summed(centred.square().sum(dims), groups) / number
    made = _Normalised.apply(x, mean, variance, number, eps, tuple(groups))
    if weight is not None:
        made = made * _along(weight, x)
    if bias is not None:
        made = made + _along(bias, x)
    return made.to(x.dtype), mean, variance * number / (number - 1.0)


class _Normalised(torch.autograd.Function):
    """x^, whose mean and variance depend on x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        number: Tensor,
        eps: float,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> Tensor:
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, mean, scale, number)
        ctx.groups = groups
        return (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, number = ctx.saved_tensors
        dims = [dim for dim in range(x.ndim) if dim != 1]
        normal = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        own = torch.stack((grad.sum(dims), (grad * normal).sum(dims)))
        plain, weighed = _summed(own, ctx.groups) / number
        result = grad - _along(plain, x) - normal * _along(weighed, x)
        return (result * _along(scale, x)).to(x.dtype), None, None, None, None, None


def _along(feature: Tensor, x: Tensor) -> Tensor:
    """Return a tensor [feature] so that it broadcasts against x [sample, feature, ...]."""
    return feature.view(1, -1, *[1] * (x.ndim - 2))


def _summed(own: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(own, group=group)
    return own
