"""Experts on ranks of their own whose tokens are gathered: `dispatch: allgather`.

Every rank gets all tokens of the ranks that divide the experts, computes those that chose its own
experts, and the sums are reduced and scattered.  Where a token goes is decided on the device, so
that the host waits for nothing; the price are buffers of the most tokens that a rank may get: those
of all ranks, each min(choices, own experts) times.  Rows that nobody fills are not multiplied
(grouped products end at the last offset), and hold nothing.

Megatron-LM has the same choice (`--moe-token-dispatcher-type allgather`).  Exchanges that send each
token to its experts alone (runtime/parallel/expert_parallel.py) move c / n of the bytes, c being
the choices of a token and n the ranks, and must know on the host how many come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.parallel.expert_parallel import count_of, outputs
from meshwright.runtime.parallel.tensor_parallel import gather


def mixed(
    module: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, [token, hidden].

    The module has this rank's part of the experts, in the order of ranks, and `meanwhile` is
    called while tokens are on the way.
    """
    each, own = index.shape[1], count_of(module)
    coming = _GatheredRows.apply(hidden, group)
    meanwhile()
    tokens, every = _Awaited.apply(coming), _at_once(weights, group)
    expert = _at_once(index, group).flatten() - group.rank() * own
    expert = torch.where((expert >= 0) & (expert < own), expert, own)
    slots = len(tokens) * min(each, own)
    order = expert.argsort(stable=True)[:slots]
    rows = expert.new_zeros(own + 1).scatter_add_(0, expert, torch.ones_like(expert))[:own]
    filled = (torch.arange(slots, device=rows.device) < rows.sum()).unsqueeze(1)
    chosen = tokens[order // each].where(filled, 0)
    # Grouped products leave what is behind the last offset as it was in memory.
    made = outputs(module, chosen, rows).where(filled, 0)
    weighted = made * every.flatten()[order].unsqueeze(1)
    whole = weighted.new_zeros(tokens.shape).index_add(0, order // each, weighted)
    # No view of another tensor: data parallelism hangs hooks on what a unit returns.
    return _SummedRows.apply(whole, group).to(hidden.dtype)


def _at_once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of x [token, ...], as those of one sample, and wait for them."""
    return gather(x.unsqueeze(0), group).squeeze(0)


class _GatheredRows(torch.autograd.Function):
    """Begin to gather the rows of all ranks; gradients are summed over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _begun(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SummedRows(torch.autograd.Function):
    """Sum the rows of all ranks and keep those of this one's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ended(_begun(grad, ctx.group)), None


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor) -> Tensor:
        return _ended(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _begun(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ops = torch.ops._c10d_functional
    return _ended(ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name))


def _ended(coming: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(coming)
