"""A loss that is a mean over what counts, as a sum and a count: the count is found by trial.

    loss = lambda out, batch: F.cross_entropy(out, batch["labels"])     # of those that are not -100

Such a mean, `out.loss` of transformers among them, cannot be added up over parts of a batch.  Where
it is the mean over elements of one tensor of the batch that differ from a number, or over a mask,
weights or lengths, its count follows from the batch.  Whether it is so, trials tell (loss_check).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from meshwright.runtime.engine.module_graph import Loss


@dataclass(frozen=True, slots=True)
class BatchCount:
    """The count that a mean over a batch divides by, read from one of the batch's tensors."""

    at: int
    """Index of that tensor among the leaves of the batch."""
    ignored: int | None
    """The number of elements that do not count; None: elements are weights, and add up."""
    shifted: bool = False
    """The first position of each sample is no target."""

    def __call__(self, batch: Any) -> Tensor:
        """Return the count of a batch."""
        leaf = tree_leaves(batch)[self.at]
        leaf = leaf[:, 1:] if self.shifted else leaf
        return leaf.sum() if self.ignored is None else (leaf != self.ignored).sum()


def counts_of(batch: Any, numbers: Collection[int]) -> Iterator[BatchCount]:
    """Yield what a mean may be over: elements unlike one of some numbers, or weights."""
    for at, (_, leaf) in enumerate(tree_flatten_with_path(batch)[0]):
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            continue
        shifts = (False, True) if leaf.ndim > 1 and leaf.shape[1] > 1 else (False,)
        for shifted in shifts:
            if not leaf.is_floating_point() and leaf.dtype != torch.bool:
                yield from (BatchCount(at, number, shifted) for number in sorted(numbers))
            yield BatchCount(at, None, shifted)


@dataclass(frozen=True, slots=True)
class CountedMean:
    """A loss that returns a mean, as one that returns a sum and a count."""

    loss: Loss
    count: BatchCount

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return what the mean is of, and over how much."""
        mean, count = self.loss(outputs, batch), self.count(batch)
        if not bool(count):  # a mean of nothing, and its gradient, are no numbers
            floats = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            return sum((0.0 * x.sum() for x in floats), torch.zeros_like(mean)), count
        return mean * count, count
