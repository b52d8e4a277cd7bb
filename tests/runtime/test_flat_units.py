"""FSDP1 itself, on CPU with collectives that do nothing: what its units hold, by torch's profiler.

Its host runs no further than its device there, so that a forward gathers one unit at a time unless
it is told to ask ahead, and a reduction ends before the next unit's backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile

from benchmarks.torch_internals import fake_store
from meshwright.planner.catalog import frameworks
from meshwright.planner.costs.memory import resident_states as flat_units
from meshwright.planner.costs.memory.state_bytes import StateSharding, state_types

WIDTH, RANKS, BLOCKS = 256, 8, 3
BLOCK = 8 * WIDTH**2
"""Parameters of a block; the root has three eighths as many."""
MIXED = StateSharding(
    types=state_types(frameworks()["llm-foundry-fsdp"], "bf16"),
    zero=3,
    shard=RANKS,
    data=RANKS,
    pipelined=False,
    accumulated=False,
)


class Block(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A residual feed-forward."""
        return x + self.down(self.up(x).relu())


def peaks(prefetch: BackwardPrefetch, *, ahead: bool) -> tuple[float, float]:
    """Bytes of a forward's and of a backward's peak above where the step began."""
    layers = [
        nn.Linear(WIDTH, WIDTH, bias=False),
        *(Block() for _ in range(BLOCKS)),
        nn.Linear(WIDTH, 2 * WIDTH, bias=False),
    ]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        backward_prefetch=prefetch,
        forward_prefetch=ahead,
    )
    x = torch.ones(1, WIDTH)
    model(x).sum().backward()  # the order of units is known from the second step on
    model.zero_grad()
    found = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(x).sum()
        torch.ones(7)  # 28 bytes: where the backward begins
        loss.backward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = most = 0
    for _, size in sorted(sizes, key=lambda each: each[0]):
        if size == 28:
            found.append(float(most))
            most = 0
        held += size
        most = max(most, held)
    return found[0], float(most)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Eight ranks, of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake_store())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_units_hold_what_fsdp1_holds(group: None) -> None:
    root, head, shard = 2 * BLOCK * 3 / 8, 2 * BLOCK * 2 / 8, 4 * BLOCK / RANKS
    copy = flat = 2 * BLOCK
    orders: list[Literal["before", "behind"]] = ["before", "behind"]
    for order in orders:
        prefetch = {
            "before": BackwardPrefetch.BACKWARD_PRE,
            "behind": BackwardPrefetch.BACKWARD_POST,
        }[order]
        sharing = replace(MIXED, gathers_before=order == "before")

        held = flat_units.fsdp1_states(BLOCK, sharing)

        forward, backward = peaks(prefetch, ahead=False)
        assert forward == pytest.approx(root + held.forward_transient_bytes - copy, rel=0.02)
        # Before, in the middle block, which asks for the first; behind, in the first, with one more
        # shard of gradients.  No reduction is under way.
        reduced = shard if order == "before" else 2 * shard
        expected = root + head + reduced + held.after_backward_bytes - flat
        assert backward == pytest.approx(expected, rel=0.03)
    ahead, _ = peaks(prefetch, ahead=True)
    assert ahead == pytest.approx(root + held.forward_transient_bytes, rel=0.02)
