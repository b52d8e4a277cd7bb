"""BatchNorm under a plan: each micro-batch is normalised by itself, and running statistics agree.

A forward puts the mean and variance of its micro-batch aside.  Behind the last backward those of
all data ranks are applied in the order of samples, as one process that runs all micro-batches one
after another does.  Buffers are then equal on all ranks, and to that process; a recomputation,
which runs the layer once more, changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import LaunchError
from planner.plan import Axis
from runtime.mesh import Place
from runtime.torch_internals import in_backward

AXES: tuple[Axis, ...] = ("data_shard", "data_replicate")
"""Of data ranks, innermost first."""
_BatchNorm = nn.modules.batchnorm._BatchNorm


class RunningStatistics:
    """What the BatchNorms of this rank's stages have seen since `apply`."""

    def __init__(self, modules: Iterable[nn.Module], place: Place) -> None:
        """Take over every BatchNorm in these modules that keeps running statistics."""
        self._place = place
        self._norms: list[_BatchNorm] = []
        self._seen: dict[_BatchNorm, list[Tensor]] = {}
        for module in modules:
            for name, part in module.named_modules():
                if isinstance(part, nn.SyncBatchNorm):
                    raise LaunchError(
                        f"{name}: is a SyncBatchNorm, which knows nothing of a plan's ranks; "
                        "use BatchNorm, which normalises each micro-batch by itself"
                    )
                if isinstance(part, _BatchNorm) and part.running_mean is not None:
                    self._norms.append(part)
                    self._seen[part] = []
                    part.forward = functools.partial(self._forward, part)  # type: ignore[method-assign]

    def _forward(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        if not norm.training:
            return type(norm).forward(norm, x)
        norm._check_input_dim(x)
        assert norm.running_mean is not None and norm.running_var is not None
        mean, variance = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
        made = functional.batch_norm(
            x, mean, variance, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps
        )
        if not in_backward():  # a recomputation sees nothing new
            self._seen[norm].append(torch.stack((mean, variance)))
        return made

    @torch.no_grad()
    def apply(self) -> None:
        """Move running statistics by what all data ranks have seen, in the order of samples."""
        for rows in sorted({len(seen) for seen in self._seen.values() if seen}):
            # A norm that runs twice in a micro-batch has twice the rows.
            self._apply([norm for norm in self._norms if len(self._seen[norm]) == rows])

    def _apply(self, used: list[_BatchNorm]) -> None:
        sizes = [norm.num_features for norm in used]
        # [micro-batch, mean and variance, feature of all norms]
        own = torch.cat([torch.stack(self._seen[norm]) for norm in used], dim=-1)
        for parts, norm in zip(self._gathered(own).split(sizes, dim=-1), used, strict=True):
            assert norm.running_mean is not None and norm.running_var is not None
            for mean, variance in parts:
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

    def _gathered(self, own: Tensor) -> Tensor:
        """Return the rows of all data ranks, in the order of their slices."""
        if self._place.mesh is None:
            return own
        for axis in AXES:
            group = self._place.axis(axis).get_group()
            if group.size() > 1:
                parts = [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(parts, own.contiguous(), group=group)
                own = torch.cat(parts)
        return own
