"""A pipeline's ranks act in exactly the order that planner.schedule wrote, and hold no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.schedule import in_flight, orders
from runtime.pipeline import Pipeline
from tests.runtime.ranks import on_ranks

MICRO_BATCHES, WIDTH = 6, 8


class Recorder(nn.Module):
    """A linear stage that writes down what it is asked to do, and what its buffers hold."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stage = stage
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        micro_batch = sum("F" in action for action in self.seen)
        self.seen.append(f"{self.stage}F{micro_batch}")
        y = self.linear(x)
        y.register_hook(lambda grad: self.seen.append(f"{self.stage}B{micro_batch}"))
        return y


def run(name: str, wrong_shape: bool = False) -> tuple[str, int, int]:
    stage, stages = dist.get_rank(), dist.get_world_size()
    module = Recorder(stage)
    hidden = torch.empty(2, WIDTH, device="meta", requires_grad=True)
    declared = hidden[:1].detach().requires_grad_() if wrong_shape else hidden
    pipeline = Pipeline(
        module,
        orders(name, stages=stages, micro_batches=MICRO_BATCHES),
        stage=stage,
        micro_batches=MICRO_BATCHES,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        inputs=declared,
        outputs=declared,
        loss=lambda output, target: (output - target).square().mean() / MICRO_BATCHES,
    )
    most = 0
    held = pipeline.received_buffers

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, held())

    module.register_forward_hook(count)
    x = torch.ones(2 * MICRO_BATCHES, WIDTH)
    for _ in range(2):
        module.seen.clear()
        pipeline.run(x, x)
    return " ".join(module.seen), most, held()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_ranks_act_as_written(name: str) -> None:
    written = orders(name, stages=3, micro_batches=MICRO_BATCHES)

    for stage, (seen, most, left) in enumerate(on_ranks(3, run, name)):
        assert seen == " ".join(map(str, written[stage]))
        # Activations from the stage before, and at most two gradients on the way from the next.
        assert most <= (in_flight(written[stage]) + 1) * (stage > 0) + 2 * (stage < 2)
        assert left == 0


@pytest.mark.ranks
def test_a_stage_that_makes_another_shape_than_declared_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 made .*\[2, 8\].* and declared .*\[1, 8\]"):
        on_ranks(2, run, "1f1b", True)
