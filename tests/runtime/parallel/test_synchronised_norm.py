"""A synchronised norm is torch's own BatchNorm of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from meshwright.runtime.parallel.batch_norm import synchronised_batch_norm
from tests.runtime.ranks import on_ranks

SHAPES = [(8, 3), (8, 3, 5), (8, 3, 4, 4)]


def worst_difference(parts: list[int]) -> float:
    """Compare this rank's part of result, gradients and statistics with the whole batch's."""
    rank, worst = dist.get_rank(), 0.0
    groups = [dist.group.WORLD] if dist.get_world_size() > 1 else []
    for shape in SHAPES:
        torch.manual_seed(0)
        whole = (torch.randn(shape) * 3 + 1).requires_grad_()
        weight, bias = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        seen = torch.randn(shape)
        mean, variance = torch.zeros(3), torch.zeros(3)
        expected = functional.batch_norm(
            whole, mean, variance, weight, bias, training=True, momentum=1.0
        )
        wanted = torch.autograd.grad((expected * seen).sum(), (whole, weight, bias))
        x = whole.detach().split(parts)[rank].requires_grad_()

        made, own_mean, own_variance = synchronised_batch_norm(
            x, weight, bias, eps=1e-5, groups=groups
        )
        found = list(torch.autograd.grad((made * seen.split(parts)[rank]).sum(), (x, weight, bias)))
        for grad in found[1:]:
            dist.all_reduce(grad)

        pairs = [
            (made, expected.split(parts)[rank]),
            (own_mean, mean),
            (own_variance, variance),
            (found[0], wanted[0].split(parts)[rank]),
            (found[1], wanted[1]),
            (found[2], wanted[2]),
        ]
        worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs)])
    return worst


@pytest.mark.ranks
def test_equal_and_unequal_parts_give_what_the_whole_batch_does() -> None:
    for parts in ([4, 4], [3, 5]):
        assert max(on_ranks(2, worst_difference, parts)) < 1e-5
