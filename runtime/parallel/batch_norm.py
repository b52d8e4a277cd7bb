"""BatchNorm under a plan: what is normalised together, and running statistics that agree.

Each micro-batch is normalised by itself, as under DDP, with its positions on all ranks; or,
synchronised, with those of the other data ranks that run at the same time, so that results follow
micro-batch x slices.

A forward puts the mean and variance of its micro-batch aside.  Behind the last backward those of
all data ranks are applied in the order of samples, as one process that runs all micro-batches one
after another does.  Buffers are then equal on all ranks, and to that process; a recomputation,
which runs the layer once more, changes nothing.

torch's own SyncBatchNorm takes CUDA tensors alone; the synchronised one here runs on any device.
With x^ = (x - mean) / sqrt(var + eps) over the n values of a feature on all ranks, and g the
gradient of x^:

    forward    two all-reduces: the sum, then the sum of squares about the mean
    backward   one: dx = (g - sum(g) / n - x^ sum(g x^) / n) / sqrt(var + eps), sums over all ranks

Gradients of weight and bias are this rank's own part, as those of any parameter.
Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.plan import Axis
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.torch_internals import in_backward, refuse_graph

_BatchNorm = nn.modules.batchnorm._BatchNorm
Kind = Literal["per_micro_batch", "synchronised"]
"""The samples normalised together: those of one data rank's micro-batch, or of all data ranks."""


class RunningStatistics:
    """The statistics that the BatchNorms of this rank's stages have collected since `apply`."""

    def __init__(
        self, modules: Iterable[nn.Module], place: Place, *, kind: Kind = "per_micro_batch"
    ) -> None:
        """Take over every BatchNorm in these modules that keeps running statistics.

        Where ranks normalise together it takes the others too.  `synchronised` needs ranks with as
        many micro-batches each.
        """
        slices = _groups(place, "data_shard", "data_replicate")
        synchronised = kind == "synchronised"
        self._together = (*_groups(place, "context"), *(slices if synchronised else ()))
        """Groups over which a micro-batch is normalised."""
        self._slices = () if synchronised else slices
        """Groups over which statistics are applied one after the other."""
        self._norms: list[_BatchNorm] = []
        self._seen: dict[_BatchNorm, list[Tensor]] = {}
        for module in modules:
            for name, part in module.named_modules():
                if isinstance(part, nn.SyncBatchNorm):
                    raise LaunchError(
                        f"{name}: is a SyncBatchNorm, which knows nothing of a plan's ranks; "
                        'use BatchNorm, and batch_norm="synchronised" of the engine'
                    )
                if isinstance(part, _BatchNorm) and (
                    part.running_mean is not None or self._together
                ):
                    self._norms.append(part)
                    self._seen[part] = []
                    part.forward = functools.partial(self._forward, part)  # type: ignore[method-assign]

    def _forward(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        if not norm.training:
            return type(norm).forward(norm, x)
        refuse_graph()
        norm._check_input_dim(x)
        output, mean, variance = (
            synchronised_batch_norm(x, norm.weight, norm.bias, eps=norm.eps, groups=self._together)
            if self._together
            else _batch_norm(norm, x)
        )
        if norm.running_mean is not None and not in_backward():  # a recomputation sees nothing new
            self._seen[norm].append(torch.stack((mean, variance)))
        return output

    @torch.no_grad()
    def apply(self) -> None:
        """Move running statistics by what all data ranks have seen, in the order of samples."""
        used = [norm for norm in self._norms if self._seen[norm]]
        if not used:
            return
        # A norm that runs twice in a micro-batch has two rows of it.
        statistics = [
            torch.stack(self._seen[norm]) for norm in used
        ]  # [norm][row, mean/variance, feature]
        flat = torch.cat([rows.flatten() for rows in statistics])
        sizes = [rows.numel() for rows in statistics]
        every = [part.split(sizes) for part in self._of_all_slices(flat)]
        for at, norm in enumerate(used):
            assert norm.running_mean is not None and norm.running_var is not None
            for mean, variance in torch.cat([parts[at].view_as(statistics[at]) for parts in every]):
                weight = norm.momentum
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked += 1
                    if weight is None:
                        weight = 1.0 / float(norm.num_batches_tracked)
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight or 0.0)
                norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight or 0.0)
            self._seen[norm].clear()

    def forget(self) -> None:
        """Drop what was seen."""
        for seen in self._seen.values():
            seen.clear()

    def _of_all_slices(self, statistics: Tensor) -> tuple[Tensor, ...]:
        """Return what the data ranks have, in the order of their slices."""
        rows = statistics[None]
        for group in self._slices:
            parts = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(parts, rows.contiguous(), group=group)
            rows = torch.cat(parts)
        return tuple(rows)


def _groups(place: Place, *axes: Axis) -> tuple[dist.ProcessGroup, ...]:
    """Return this rank's groups of several ranks along axes."""
    if place.mesh is None:
        return ()
    groups = (place.axis(axis).get_group() for axis in axes)
    return tuple(group for group in groups if group.size() > 1)


def _batch_norm(norm: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a norm makes of one micro-batch, and its mean and variance [feature]."""
    mean = torch.zeros(norm.num_features, device=x.device, dtype=torch.float32)
    variance = torch.zeros_like(mean)
    output = functional.batch_norm(
        x, mean, variance, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps
    )
    return output, mean, variance


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
        first = _all_reduce_sum(torch.cat((x.to(wide).sum(dims), count)), groups)
        number = first[-1]
        mean = first[:-1] / number
        centred = x.to(wide) - _along(mean, x)
        variance = _all_reduce_sum(centred.square().sum(dims), groups) / number
    output = _Normalised.apply(x, mean, variance, number, eps, tuple(groups))
    if weight is not None:
        output = output * _along(weight, x)
    if bias is not None:
        output = output + _along(bias, x)
    return output.to(x.dtype), mean, variance * number / (number - 1.0)


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
        sums = torch.stack((grad.sum(dims), (grad * normal).sum(dims)))
        plain, weighed = _all_reduce_sum(sums, ctx.groups) / number
        result = grad - _along(plain, x) - normal * _along(weighed, x)
        return (result * _along(scale, x)).to(x.dtype), None, None, None, None, None


def _along(feature: Tensor, x: Tensor) -> Tensor:
    """Return a tensor [feature] so that it broadcasts against x [sample, feature, ...]."""
    return feature.view(1, -1, *[1] * (x.ndim - 2))


def _all_reduce_sum(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(values, group=group)
    return values
