"""Products in 8 bits against the same with operands rounded by hand, and against 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from planner.errors import LaunchError
from runtime import eight_bits
from runtime.eight_bits import BACKWARD, FORWARD, EightBits
from runtime.engine import TokenEngine
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

ROUNDING = {FORWARD: 2**-4, BACKWARD: 2**-3}
"""Half a unit of 3 and of 2 bits of mantissa."""


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    """Return x [2, 16, 64], W [48, 64] and the gradient of x W^T."""
    torch.manual_seed(0)
    return torch.randn(2, 16, 64), torch.randn(48, 64), torch.randn(2, 16, 48)


def by_hand(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return x as 8 bits hold it."""
    scale = x.abs().max() / torch.finfo(kind).max
    return (x / scale).to(kind).float() * scale


def test_products_are_those_of_rounded_operands() -> None:
    x, weight, grad = matrices()
    x8, w8, g8 = by_hand(x, FORWARD), by_hand(weight, FORWARD), by_hand(grad, BACKWARD)

    output = EightBits.output(x, weight, None)
    of_input = EightBits.of_input(grad, weight)
    of_weight = EightBits.of_weight(x, grad)

    torch.testing.assert_close(output, x8 @ w8.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_input, g8 @ w8, rtol=1e-5, atol=1e-5)
    expected = g8.flatten(0, 1).t() @ x8.flatten(0, 1)
    torch.testing.assert_close(of_weight, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_rounding_stays_within_half_a_unit(kind: torch.dtype) -> None:
    x = matrices()[0].flatten()
    eight, scale = eight_bits.rounded(x, kind)
    large = x.abs() > x.abs().max() / 1000  # smaller ones are subnormal in e4m3

    assert ((eight.float() * scale - x)[large].abs() <= ROUNDING[kind] * x[large].abs()).all()


def test_sizes_that_kernels_do_not_take_stay_as_they_are() -> None:
    x, weight, _ = matrices()

    found = EightBits.output(x[..., :60], weight[:, :60], None)

    assert torch.equal(found, x[..., :60] @ weight[:, :60].t())


def losses(precision: str) -> list[float]:
    model = cases.transformer("llama")
    engine = TokenEngine(cases.plan(model, precision=precision), model, device=torch.device("cpu"))
    return [engine.step(cases.global_tokens(0)).loss for _ in range(12)]


@pytest.mark.ranks
def test_training_in_eight_bits_stays_beside_sixteen() -> None:
    """One batch, learnt by heart: the losses are close all the way down, and not the same."""
    (eight,), (sixteen,) = on_ranks(1, losses, "fp8"), on_ranks(1, losses, "bf16")

    assert eight[-1] < eight[0] - 0.15
    assert eight == pytest.approx(sixteen, abs=0.05)
    assert eight != sixteen


@dataclass
class OldCard:
    """A device before Ada."""

    type = "cuda"


def test_a_device_without_these_formats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")

    with pytest.raises(LaunchError, match=r"A100 has compute capability 8\.0; .* Use bf16"):
        eight_bits.require(OldCard())
