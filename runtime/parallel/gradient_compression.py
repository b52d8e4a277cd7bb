"""Compression of gradients on their way between data-parallel ranks.

    bf16, fp16  the sum over ranks is made in 16 bits: half the bytes.  Each rank divides by the
                number of ranks first, in fp32, so that sums do not overflow.  Everything before
                and after (micro-batches of a step, clipping, AdamW) stays in fp32.
    powersgd    a matrix n x m travels as two of rank RANK: 4 RANK (n + m) bytes in place of 4 n m,
                once per step and after the last backward.  What it leaves out is stored (4 n m
                bytes of each matrix, on each rank) and added to the next step's gradient.
                Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

All three lose something; tests/runtime/parallel/test_gradient_compression.py states how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.planner.documents.plan import GradientCompression
from meshwright.runtime.core.seeds import seed_of
from meshwright.runtime.core.torch_internals import ReduceScatter, reduce_scatter

RANK = 4
"""Rank of the matrices that PowerSGD sends."""
LEAST_SAVING = 2
"""A matrix that would not shrink by as much travels whole, as do vectors."""

WIRE_TYPES: Mapping[GradientCompression, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Types in which gradients travel as they are."""


def narrow(module: FSDPModule, wire: GradientCompression, replicas: dist.ProcessGroup) -> None:
    """Let FSDP reduce a module's gradients in 16 bits: over its shards, then over `replicas`.

    The module is sharded along one axis, since FSDP's own sum over replicas cannot be changed.
    """
    dtype = WIRE_TYPES[wire]
    module.set_custom_reduce_scatter(_NarrowReduceScatter(dtype))
    if replicas.size() > 1:
        module.set_all_reduce_hook(lambda gradients: _all_reduce_mean(gradients, dtype, replicas))


def _all_reduce_mean(gradients: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    sent = (gradients / group.size()).to(dtype)
    dist.all_reduce(sent, group=group)
    gradients.copy_(sent)
    if gradients.is_cuda:
        # Made on another stream, where FSDP may take their memory anew before this one is done:
        # only of its own sum over replicas does it keep them until then.
        gradients.record_stream(torch.cuda.current_stream())


class _NarrowReduceScatter(ReduceScatter):
    """Reduce-scatter to the mean, in 16 bits between ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.AVG, op
        sent = (input_tensor / group.size()).to(self._dtype)
        received = output_tensor.new_empty(output_tensor.shape, dtype=self._dtype)
        reduce_scatter(received, sent, group=group)
        output_tensor.copy_(received)


@dataclass(slots=True)
class _Matrix:
    """The state that PowerSGD keeps for one matrix [n, m]."""

    factor: Tensor
    """The right factor of the last step, [m, RANK]: the next power iteration starts from it."""
    left_out: Tensor | None = None
    """Part of the matrix that this rank has not sent yet; it is added to the next gradient."""


class Mean:
    """The mean of whole gradients over a group, as they are, in one message."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def reduce(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """Put the mean over the group into `grads`."""
        self._reduce(grads)

    def _reduce(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        flat /= self._group.size()
        dist.all_reduce(flat, group=self._group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


class PowerSGD(Mean):
    """The mean of gradients over a group, sent by low rank.

    Its memory belongs to this rank's own gradients and is not saved: a run that is resumed starts
    with none left out.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._matrices: dict[str, _Matrix] = {}

    def reduce(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """Put the mean over the group into `grads`, as every rank can make it; equal on all."""
        matrices, rest = {}, []
        for name, grad in zip(names, grads, strict=True):
            if grad.ndim > 1 and _shrinks(*grad.flatten(1).shape):
                matrices[name] = grad
            else:
                rest.append(grad)
        memories = [self._memory_of(name, grad.flatten(1)) for name, grad in matrices.items()]
        wanted = [
            grad.flatten(1) if memory.left_out is None else grad.flatten(1) + memory.left_out
            for grad, memory in zip(matrices.values(), memories, strict=True)
        ]
        left = [matrix @ memory.factor for matrix, memory in zip(wanted, memories, strict=True)]
        self._reduce([*left, *rest])
        left = [torch.linalg.qr(factor).Q for factor in left]
        right = [matrix.t() @ factor for matrix, factor in zip(wanted, left, strict=True)]
        self._reduce(right)
        for grad, memory, matrix, p, q in zip(
            matrices.values(), memories, wanted, left, right, strict=True
        ):
            sent = p @ q.t()
            memory.left_out = matrix - sent
            memory.factor = q
            grad.copy_(sent.view_as(grad))

    def _memory_of(self, name: str, matrix: Tensor) -> _Matrix:
        if name not in self._matrices:
            generator = torch.Generator().manual_seed(seed_of(0, name))
            factor = torch.randn(matrix.shape[1], RANK, generator=generator)
            self._matrices[name] = _Matrix(factor.to(matrix))
        return self._matrices[name]


def _shrinks(n: int, m: int) -> bool:
    return LEAST_SAVING * RANK * (n + m) <= n * m
