"""Recorded modules under every schedule, on two ranks, have the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.runtime.engine.pipeline import StagePipeline
from meshwright.runtime.techniques.split_backward import PLAIN, WeightGradients, defer
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Recorder, arguments
from tests.parts import some_and_others
from tests.runtime.own_modules import MODULES, WIDTH, WORDS
from tests.runtime.ranks import on_ranks

MICRO_BATCHES = 4


class Handing(nn.Module):
    """Hands on what has no gradient: numbers, a mask, what a frozen part made; and one thing twice.

    Numbers of tokens come out of a unit, so that they cannot be made again from the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.parts[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        frozen = self.parts[0](x.detach())
        best, kept = x.argmax(-1), x > 0
        half = x.half()
        same = x
        for part in self.parts[1:]:
            x = part(x) * kept + frozen
        return self.head(x + same + half), best


def loss_of(outputs: Any, micro: MicroBatch) -> Tensor:
    made = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum((x.square().mean() for x in made), torch.zeros(()))


def against_one_process(kind: str, schedule: str, virtual_stages: int) -> float:
    """Return the largest difference of losses and gradients, relative to each tensor's largest."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    build, example, inputs = MODULES.get(kind, (Handing, MODULES["lstm"][1], lambda b: b))
    module = build()
    plain = copy.deepcopy(module)
    batches = [example() for _ in range(MICRO_BATCHES)]
    recorder = Recorder(module, example(), inputs)
    count, stages = len(recorder.first.layers), ranks * virtual_stages
    cuts = [round(count * at / stages) for at in range(stages + 1)]
    home = rank_of_stage(schedule, stages=stages, virtual_stages=virtual_stages)
    own = {
        at: RecordedStage(module, recorder, cuts[at], cuts[at + 1])
        for at in range(stages)
        if home[at] == rank
    }
    stores = None
    if schedule_of(schedule).splits_backward:
        stores = {at: WeightGradients() for at in own}
        for at, stage in own.items():
            defer(stage, stores[at], PLAIN)
    pipeline = StagePipeline(
        own,
        orders(schedule, stages=stages, micro_batches=MICRO_BATCHES, virtual_stages=virtual_stages),
        example=recorder.example,
        micro_batches=MICRO_BATCHES,
        groups=(dist.group.WORLD, dist.new_group()),
        device=torch.device("cpu"),
        loss=loss_of,
        stores=stores,
    )

    losses = pipeline.run_all([MicroBatch(batch) for batch in batches])

    wanted = []
    for batch in batches:
        args, kwargs = arguments(inputs(batch))
        wanted.append(loss_of(plain(*args, **kwargs), MicroBatch(batch)))
        wanted[-1].backward()
    worst = max(
        (float((a - b).detach().abs()) for a, b in zip(losses, wanted, strict=False)), default=0.0
    )
    assert len(losses) == (MICRO_BATCHES if stages - 1 in own else 0)
    found = dict(module.named_parameters())
    for name, parameter in plain.named_parameters():
        grad = found[name].grad
        whole = torch.zeros_like(parameter) if grad is None else grad.clone()
        dist.all_reduce(whole)  # of a tied weight each holder has a part
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        worst = max(worst, float((whole - expected).abs().max() / (expected.abs().max() + 1e-6)))
    with torch.no_grad():
        again = pipeline.evaluate_all([MicroBatch(batch) for batch in batches])
    for one, other in zip(again, wanted, strict=False):
        worst = max(worst, float((one - other).detach().abs()))
    return worst


def every_row(rows: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], float]:
    return {row: against_one_process(*row) for row in rows}


KINDS = ("handing", "gpt_tied", "t5", "unet")
ROWS = [
    *((kind, "1f1b", 1) for kind in ("vit", "lstm", "diffusion", "dicts", "changing")),
    *(
        (kind, schedule, virtual)
        for kind in KINDS
        for schedule, virtual in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("zb-h1", 1),
            ("interleaved", 2),
            ("interleaved-zb", 2),
            ("zbv", 2),
            ("dualpipe-v", 2),
        )
    ),
]
SOME = [
    *((kind, "1f1b", 1) for kind in ("lstm", "diffusion", "changing")),
    ("handing", "interleaved", 2),
    ("gpt_tied", "zbv", 2),
    ("t5", "zb-h1", 1),
    ("unet", "gpipe", 1),
    ("handing", "dualpipe-v", 2),
    ("gpt_tied", "interleaved-zb", 2),
]


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
@pytest.mark.matrix
def test_two_ranks_have_the_gradients_of_one_process(rows: list[tuple[str, str, int]]) -> None:
    for worst in on_ranks(2, every_row, rows):
        assert worst.keys() == set(rows)
        assert {row: value for row, value in worst.items() if not value < 2e-5} == {}
