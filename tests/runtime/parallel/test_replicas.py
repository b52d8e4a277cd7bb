"""Gradients of replicas are the mean over ranks, whichever of them a rank makes, and when."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.costs.memory import gradient_buckets
from meshwright.runtime.parallel import replicas
from meshwright.runtime.parallel.replicas import Replicas
from tests.runtime.ranks import on_ranks


class Branching(nn.Module):
    """A tied matrix at both ends; of the three in between a sample takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ends = nn.Parameter(torch.randn(4, 4))
        self.ways = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return (x @ self.ends @ self.ways[way] @ self.ends.t()).square().sum()


def sample(rank: int, micro_batch: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


WAYS = ((0, 0), (0, 1))
"""[rank, micro-batch]: the third way is taken by nobody."""


def of_two_ranks(bucket_bytes: int, backwards: int | None) -> list[list[Tensor | None]]:
    """Return the gradients of two steps."""
    gradient_buckets.BUCKET_BYTES = bucket_bytes
    model, rank = Branching(), dist.get_rank()
    mean = Replicas(((p, dist.group.WORLD) for p in model.parameters()), backwards=backwards)
    steps = []
    for _ in range(2):
        for micro_batch, way in enumerate(WAYS[rank]):
            model(sample(rank, micro_batch), way).backward()
        mean.finish()
        steps.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return steps


@pytest.mark.spread(2)
@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("backwards", [2, None])
def test_gradients_are_the_mean_over_ranks(bucket_bytes: int, backwards: int | None) -> None:
    model = Branching()
    losses = [
        model(sample(rank, micro_batch), way)
        for rank, ways in enumerate(WAYS)
        for micro_batch, way in enumerate(ways)
    ]
    (sum(losses) / len(WAYS)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert [grad is None for grad in expected] == [False, False, False, True]

    for steps in on_ranks(2, of_two_ranks, bucket_bytes, backwards):
        for found in steps:
            for grad, wanted in zip(found, expected, strict=True):
                assert (grad is None) == (wanted is None)
                if grad is not None:
                    torch.testing.assert_close(grad, wanted)


def sent_before_the_end() -> list[int]:
    """Return how many buckets were under way after each backward."""
    gradient_buckets.BUCKET_BYTES = 1
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mean = Replicas(((p, dist.group.WORLD) for p in model.parameters()), backwards=2)
    sent = []
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        sent.append(mean._sent)
    return sent


@pytest.mark.ranks
def test_all_is_under_way_when_the_last_backward_ends() -> None:
    assert on_ranks(2, sent_before_the_end) == [[0, 6], [0, 6]]


def of_two_stages() -> float:
    """Return the gradient of a number that two stages of a rank read, each in its own backward."""
    weight = nn.Parameter(torch.ones(()))
    pair = (weight, dist.group.WORLD)
    mean = Replicas([pair, pair], backwards=1)
    (weight * 1.0).backward()
    assert mean._sent == 0
    (weight * (10.0 + dist.get_rank())).backward()
    mean.finish()
    assert weight.grad is not None
    return float(weight.grad)


@pytest.mark.ranks
def test_what_two_stages_of_a_rank_read_is_sent_behind_both_backwards() -> None:
    assert on_ranks(2, of_two_stages) == [11.5, 11.5]


def of_divided_losses() -> list[float]:
    """Return a gradient of losses that were divided by the number of ranks, behind two passes."""
    weight = nn.Parameter(torch.ones(()))
    mean = Replicas([(weight, dist.group.WORLD)], backwards=1, divided=True)
    found = []
    for _ in range(2):
        mean.begin()
        (weight * (10.0 + dist.get_rank()) / dist.get_world_size()).backward()
        mean.finish()
        assert weight.grad is not None
        found.append(float(weight.grad))
    return found


@pytest.mark.ranks
def test_gradients_that_come_divided_are_summed() -> None:
    assert on_ranks(2, of_divided_losses) == [[10.5, 21.0], [10.5, 21.0]]


def test_a_gradient_lies_in_memory_as_its_weight_does() -> None:
    """torch's fused AdamW updates other weights where it does not, and says nothing."""
    torch.manual_seed(0)
    first = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    grads = [torch.randn(5), torch.randn(4, 3, 2, 2)]
    results = []
    for fused in (True, False):
        weights = [nn.Parameter(torch.zeros(5)), nn.Parameter(first.clone())]
        bucket = replicas._Bucket(weights, group=None, dtype=torch.float32)  # type: ignore[arg-type]
        for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            weight.grad = grad.clone()
            bucket.adopt_gradient(index)
        assert weights[1].grad is not None
        assert weights[1].grad.stride() == weights[1].stride()
        torch.testing.assert_close(weights[1].grad, grads[1])
        torch.optim.AdamW(weights, lr=0.1, fused=fused).step()
        results.append(weights[1].detach())

    torch.testing.assert_close(*results)
