"""Mixed precision on one rank, against autograd's own casts of fp32 parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from meshwright import Engine
from meshwright.planner.errors import LaunchError

# A power of two counts: gradients in 16 bits are divided without rounding.
BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Has what FSDP's casts meet: a scalar, a GRU, a unit nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.rows = nn.GRU(8, 8, batch_first=True)
        self.last = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.rows(x.unsqueeze(1))[0].squeeze(1)
        return self.last(x) * self.scale


def built() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def loss_of(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    squares = outputs.float().square()
    return squares.sum(), torch.tensor(float(squares.numel()))


def engine_of(build: Callable[[], nn.Module], **layout: Any) -> Engine:
    return Engine(
        build,
        {"precision": "bf16", **layout},
        loss=loss_of,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        batch=BATCH,
        inputs=lambda batch: (batch,),
    )


def plain_losses(micro_batches: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights where each forward casts the parameters by autograd."""
    module = built()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        total = 0.0
        for part in BATCH.chunk(micro_batches):
            narrow = {
                name: parameter.bfloat16() if parameter.ndim else parameter
                for name, parameter in module.named_parameters()
            }
            loss = loss_of(functional_call(module, narrow, (part.bfloat16(),)), part)[0]
            (loss / BATCH.numel()).backward()
            total += loss.item() / BATCH.numel()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, module.state_dict()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_rank_in_16_bits_trains_as_autograd_casts_and_is_not_wrapped(
    micro_batches: int,
) -> None:
    engine = engine_of(built, micro_batches=micro_batches)

    losses = [float(engine.step(BATCH).loss) for _ in range(4)]

    wanted, weights = plain_losses(micro_batches, steps=4)
    assert losses == pytest.approx(wanted, rel=1e-5)
    state = engine.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    modules = [module for part in engine._parts for module in part.module.modules()]
    assert not any(isinstance(module, FSDPModule) for module in modules)
    assert not dist.is_initialized()


def test_between_steps_parameters_are_whole_and_copies_have_no_memory() -> None:
    engine = engine_of(built, micro_batches=2)
    engine.forward_backward(BATCH)
    engine.forward_backward(BATCH)
    engine.optimizer_step()

    (part,) = engine._parts
    assert part.copies is not None
    assert {parameter.dtype for parameter in part.module.parameters()} == {torch.float32}
    assert all(copy.narrow.untyped_storage().nbytes() == 0 for copy in part.copies._copies)
    assert engine.evaluate(BATCH).loss < plain_losses(2, steps=1)[0][0]


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x.abs().long().clamp(max=8))
        return out


def test_a_forward_that_changes_a_copy_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"table\.weight: the forward changes"):
        engine_of(Renormed)


class MaskedInPlace(nn.Linear):
    """Sets its weight through `data`, whose changes no version counts."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.weight.data > 0
        return super().forward(x)


def test_a_forward_that_changes_a_copy_through_its_data_is_refused() -> None:
    with pytest.raises(LaunchError, match="weight: the forward changes"):
        engine_of(lambda: MaskedInPlace(8, 8))
