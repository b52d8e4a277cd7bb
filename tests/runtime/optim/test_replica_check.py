"""What ranks hold alike stays alike in a launch's engine; a flipped bit is named with its rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.replica_digests import digest_cost
from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch.training_loop import token_engine
from tests.parts import some_and_others
from tests.runtime.ranks import on_ranks
from tests.runtime.rooms import MODEL, plan_of

PLANS = {
    "data": plan_of(data=4),
    "data x tensor": plan_of(data=2, tensor=2),
    "pipeline x tensor": plan_of(pipeline=2, tensor=2),
    "zero 1": plan_of(data=4, zero=1),
    "zero 3 x tensor": plan_of(data=2, tensor=2, zero=3),
}
WEIGHT, NORM = "block.0.mlp.down.weight", "block.0.mlp_norm.weight"
HELD = {
    ("data", WEIGHT): "rank 2 has another value than ranks 0, 1 and 3",
    ("data x tensor", NORM): "rank 2 has another value than ranks 0, 1 and 3",
    ("data x tensor", WEIGHT): "ranks 0 and 2 have different values",
    ("pipeline x tensor", WEIGHT): None,
    ("zero 1", NORM): None,
    ("zero 3 x tensor", WEIGHT): None,
}
"""What is said of a bit that flips on rank 2; None where it alone has that part."""


Held = tuple[str, str]
SOME: list[Held] = [("data x tensor", WEIGHT), ("zero 3 x tensor", WEIGHT)]


def damaged(keys: list[Held]) -> dict[Held, str | None]:
    """Train a step, flip a bit on rank 2, and train on until replicas are compared."""
    found: dict[Held, str | None] = {}
    for key in keys:
        plan = PLANS[key[0]]
        engine = token_engine(plan, MODEL, device=torch.device("cpu"))
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (plan.global_batch, 17), generator=draw)
        samples = plan.samples_of(engine.slice_rank)
        own = tokens[samples.start : samples.stop]
        engine.step(own)
        held = engine.state().get(f"model.{key[1]}")
        if dist.get_rank() == 2 and held is not None:
            local = held.to_local() if isinstance(held, DTensor) else held
            local.view(torch.int32)[0] ^= 1
        try:
            engine.step(own)
            engine.refuse_drifted()
            found[key] = None
        except LaunchError as error:
            found[key] = str(error)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("keys", some_and_others(HELD, SOME))
def test_a_flipped_bit_is_named_with_its_parameter_and_its_rank(keys: list[Held]) -> None:
    for found in on_ranks(4, damaged, keys):
        for plan, name in keys:
            who = HELD[plan, name]
            said = found[plan, name]
            if who is None:
                assert said is None, plan
            else:
                assert said is not None, plan
                assert said.startswith(f"{name}: {who} of this parameter"), plan


def test_comparing_replicas_takes_less_than_a_five_hundredth_of_a_step() -> None:
    assert digest_cost(hidden=512, tokens=512).share < 0.002
