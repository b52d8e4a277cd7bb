"""A pipeline's ranks act in exactly the order that planner.schedule wrote, and hold no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.schedule import in_flight, orders
from runtime.pipeline import GRADIENTS_ON_THE_WAY, Pipeline
from tests.runtime.ranks import on_ranks

MICRO_BATCHES, WIDTH = 8, 8


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
    received, sent = [0], [0]

    def count(*_: object) -> None:
        received.append(pipeline.received())
        sent.append(pipeline.sent())

    module.register_forward_hook(count)
    x = torch.ones(2 * MICRO_BATCHES, WIDTH)
    for _ in range(2):
        module.seen.clear()
        pipeline.run(x, x)
    assert (pipeline.received(), pipeline.sent()) == (0, 0)
    return " ".join(module.seen), max(received), max(sent)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_ranks_act_as_written(name: str) -> None:
    written = orders(name, stages=3, micro_batches=MICRO_BATCHES)

    for stage, (seen, received, sent) in enumerate(on_ranks(3, run, name)):
        alive, first, last = in_flight(written[stage]), stage == 0, stage == 2
        assert seen == " ".join(map(str, written[stage]))
        # Activations in flight and one ahead, a gradient in use and one ahead; two on the way.
        assert received <= (0 if first else alive + 1) + (0 if last else 2)
        assert sent <= (0 if last else alive) + (0 if first else GRADIENTS_ON_THE_WAY)


@pytest.mark.ranks
def test_a_stage_that_makes_another_shape_than_declared_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 made .*\[2, 8\].* and declared .*\[1, 8\]"):
        on_ranks(2, run, "1f1b", True)
