"""Losses over the whole global batch, such as a contrastive loss whose negatives are all samples.

    engine = Engine(build, plan, loss=whole_batch(contrastive), ...)

A loss of that kind cannot be summed over micro-batches.  A step therefore runs twice: forward of
all micro-batches without gradients, whose outputs are gathered from all data ranks; the loss once,
and its gradient by each output; then the plan's schedule, whose loss is the sum of outputs times
their gradients.  That has the gradient of the whole, by the chain rule, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.planner.documents.plan import Axis
from meshwright.runtime.core.batches import part_of
from meshwright.runtime.core.loss import Counted, loss_sum_of
from meshwright.runtime.core.mesh import Place

AXES: tuple[Axis, ...] = ("data_shard", "data_replicate")
"""Mesh axes of data ranks, innermost first."""


@dataclass(frozen=True, slots=True)
class whole_batch:  # noqa: N801 - it reads as the function that a script sees
    """Call a loss with the outputs and the batch of all ranks at once."""

    loss: Callable[[Any, Any], Any]

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """Return what the loss returns of these outputs."""
        return self.loss(outputs, batch)


def of_all_slices(tree: Any, place: Place, counts: Sequence[int] | None = None) -> Any:
    """Return the samples of all data ranks, in the order of their slices.

    `counts` are the samples of each slice, where they differ.
    """
    if place.mesh is None:
        return tree
    if counts is None or len(set(counts)) == 1:
        return _gather_tree(tree, place)
    most = max(counts)

    def pad(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return torch.cat((leaf, leaf.new_zeros((most - len(leaf), *leaf.shape[1:]))))

    positions = [torch.arange(at * most, at * most + count) for at, count in enumerate(counts)]
    rows = torch.cat(positions)
    return tree_map(
        lambda leaf: leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.ndim else leaf,
        _gather_tree(tree_map(pad, tree), place),
    )


def _gather_tree(tree: Any, place: Place) -> Any:
    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        for axis in AXES:
            group = place.axis(axis).get_group()
            if group.size() > 1:
                parts = [torch.empty_like(leaf).contiguous() for _ in range(group.size())]
                dist.all_gather(parts, leaf.contiguous(), group=group)
                leaf = torch.cat(parts)
        return leaf

    return tree_map(gather_leaf, tree)


def gradients_by_output(
    loss: whole_batch, outputs: Any, batch: Any, *, samples: range, size: int, parts: int
) -> tuple[Counted, list[list[Tensor | None]]]:
    """Return what the loss says of the whole batch, and its gradient by the outputs of `samples`.

    Those are by micro-batch of `size` samples, and by leaf.  An output without samples (a learnt
    temperature) is made in each of `parts` micro-batches of all ranks, and has a part in each.
    """
    leaves, spec = tree_flatten(outputs)
    used = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floating = [x for x in used if isinstance(x, Tensor) and x.is_floating_point()]
    with torch.enable_grad():
        for leaf in floating:
            leaf.requires_grad_()
        loss_sum = loss_sum_of(loss(tree_unflatten(used, spec), batch), _samples(used))
        gradients = torch.autograd.grad(loss_sum.total, floating, allow_unused=True)
    by = {id(leaf): grad for leaf, grad in zip(floating, gradients, strict=True)}
    result = []
    for first in range(samples.start, samples.stop, size):
        grads: list[Tensor | None] = []
        for leaf in used:
            grad = by.get(id(leaf))
            if grad is not None:
                grad = part_of(grad, range(first, first + size)) if grad.ndim else grad / parts
            grads.append(grad)
        result.append(grads)
    return Counted(loss_sum.total.detach(), loss_sum.count, loss_sum.metrics), result


def surrogate(outputs: Any, grads: list[Tensor | None]) -> Tensor:
    """Return a number whose gradient by the outputs is `grads`."""
    pairs = zip(tree_leaves(outputs), grads, strict=True)
    products = [(output * grad).sum() for output, grad in pairs if grad is not None]
    return torch.stack([product.float() for product in products]).sum()


def _samples(leaves: list[Any]) -> int:
    return max((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), default=1)
