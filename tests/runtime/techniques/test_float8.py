"""Products in 8 bits against the same with operands rounded by hand, and against 16 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques import float8 as eight_bits
from meshwright.runtime.techniques.float8 import BACKWARD, FORWARD, Blocks, Rowwise, Tensorwise
from meshwright.runtime.techniques.split_backward import DeferredLinear, Products
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


def rows_by_hand(x: Tensor, kind: torch.dtype = FORWARD) -> Tensor:
    """Return x as 8 bits hold it whose rows have the least power of two that suffices."""
    made = torch.empty_like(x)
    for at, row in enumerate(x):
        scale = 2.0 ** math.ceil(math.log2(row.abs().max().item() / torch.finfo(kind).max))
        made[at] = (row / scale).to(kind).float() * scale
    return made


E4M3 = sorted(
    (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # not a number
)
"""OCP 8-bit floating point, 1.0, table 1."""


def block_by_hand(block: list[float]) -> list[float]:
    """OCP Microscaling Formats 1.0, section 6.3, on numbers."""
    shared = 2.0 ** (math.floor(math.log2(max(map(abs, block)))) - 8)

    def nearest(value: float) -> float:
        place = min(abs(value) / shared, 448.0)
        found = min(range(127), key=lambda at: (abs(E4M3[at] - place), at % 2))
        return math.copysign(E4M3[found] * shared, value)

    return [nearest(value) for value in block]


def blocks_by_hand(x: Tensor) -> Tensor:
    rows = [[block_by_hand(b) for b in row.unflatten(0, (-1, 32)).tolist()] for row in x]
    return torch.tensor(rows).flatten(1)


def test_products_are_those_of_rounded_operands() -> None:
    x, weight, grad = matrices()
    x8, w8, g8 = by_hand(x, FORWARD), by_hand(weight, FORWARD), by_hand(grad, BACKWARD)

    output = Tensorwise.output(x, weight, None, None)
    of_input = Tensorwise.of_input(grad, weight, None)
    of_weight = Tensorwise.of_weight(x, grad)

    torch.testing.assert_close(output, x8 @ w8.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_input, g8 @ w8, rtol=1e-5, atol=1e-5)
    expected = g8.flatten(0, 1).t() @ x8.flatten(0, 1)
    torch.testing.assert_close(of_weight, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("products", "held"), [(Rowwise(), rows_by_hand), (Blocks(), blocks_by_hand)]
)
def test_rows_and_blocks_are_those_that_each_product_sums(
    products: Products, held: Callable[[Tensor], Tensor]
) -> None:
    x, weight, grad = (m * 10.0 ** torch.randint(-4, 4, (*m.shape[:-1], 1)) for m in matrices())
    x, grad = x[..., :64], torch.cat((grad, grad[..., :16]), dim=-1)  # 64 of each
    weight = torch.cat((weight, weight[:16]))
    tokens, upstream = x.flatten(0, 1), grad.flatten(0, 1)

    output = products.output(x, weight, None, torch.ones(64))
    of_input = products.of_input(grad, weight, None)
    of_weight = products.of_weight(x, grad)

    expected = held(tokens) @ held(weight).t() + 1
    torch.testing.assert_close(output.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)
    expected = held(upstream) @ held(weight.t().contiguous()).t()
    torch.testing.assert_close(of_input.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)
    expected = held(upstream.t().contiguous()) @ held(tokens.t().contiguous()).t()
    torch.testing.assert_close(of_weight, expected, rtol=1e-4, atol=1e-5)


def test_blocks_saturate_and_hold_nothing_as_nothing() -> None:
    x = torch.zeros(3, 32)
    x[0, 3], x[0, 4] = 1.99, -1.0  # 1.99 x 2^8 is above 448
    x[1, 0] = 2.0**-130

    eight, exponents = eight_bits.blocks_rounded(x)

    assert exponents[:, 0].tolist()[:2] == [-8, -127]
    assert eight.float()[0, 3:5].tolist() == [448.0, -256.0]
    assert not eight[2].float().any()


def test_scales_of_blocks_lie_as_devices_read_them() -> None:
    """cuBLAS, 1D block scaling factors layout: row r, block c of a tile at 16 (r % 32) + 4 (r / 32)
    + c.
    """
    scales = torch.arange(130 * 6).remainder(251).reshape(130, 6).to(torch.uint8)

    found = eight_bits.swizzle(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)

    expected = torch.zeros(4 * 512, dtype=torch.uint8)  # 2 x 2 tiles of 128 rows and 4 blocks
    for row, column in itertools.product(range(130), range(6)):
        tile = row // 128 * 2 + column // 4
        inside = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        expected[512 * tile + inside] = scales[row, column]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_rounding_stays_within_half_a_unit(kind: torch.dtype) -> None:
    x = matrices()[0].flatten()
    eight, scale = eight_bits.round_to_8_bits(x, kind)
    large = x.abs() > x.abs().max() / 1000  # smaller ones are subnormal in e4m3

    assert ((eight.float() * scale - x)[large].abs() <= ROUNDING[kind] * x[large].abs()).all()


def test_sizes_that_kernels_do_not_take_stay_as_they_are() -> None:
    x, weight, _ = matrices()

    for products in (Tensorwise, Rowwise, Blocks):
        found = products.output(x[..., :60], weight[:, :60], None, None)
        assert torch.equal(found, x[..., :60] @ weight[:, :60].t())


def losses(**choices: str) -> list[float]:
    model = cases.transformer("llama")
    plan = cases.plan(model, **choices)
    engine = token_engine(plan, model, device=torch.device("cpu"))
    return [engine.step(cases.global_tokens(0)).loss for _ in range(12)]


def all_losses() -> list[list[float]]:
    rowwise = losses(precision="fp8", scales="rowwise")
    return [losses(precision=name) for name in ("bf16", "fp8", "mxfp8")] + [rowwise]


@pytest.mark.ranks
@pytest.mark.matrix
def test_training_in_eight_bits_stays_beside_sixteen() -> None:
    """One batch, learnt by heart: the losses are close all the way down, and not the same."""
    sixteen, *narrow = on_ranks(1, all_losses)[0]

    for eight in narrow:
        assert eight[-1] < eight[0] - 0.15
        assert eight == pytest.approx(sixteen, abs=0.05)
    assert len({tuple(one) for one in (sixteen, *narrow)}) == 4


GATHERED: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"recompute": ("none", "full", "selective")},),
    4: (
        {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2, "activations": "offload"},
        {"tensor": 2},
        {"data_replicate": 2, "activations": "compress"},
    ),
}
"""Beside two ranks that divide the weights, by all ranks; compiled: test_compile.py.
"""


def gathered(layout: dict[str, Any], wire: str) -> tuple[list[float], float, int]:
    """Return losses and norms of three steps, a loss of evaluation, and how many gathers differ."""
    model = cases.transformer("llama", heads=4)
    plan = cases.plan(
        model, precision="fp8", zero=3, data_shard=2, weight_gather_dtype=wire, **layout
    )
    engine = token_engine(plan, model, device=torch.device("cpu"))
    own = plan.samples_of(engine.slice_rank)
    steps = [engine.step(cases.global_tokens(n)[own.start : own.stop]) for n in range(3)]
    said = [figure for step in steps for figure in (step.loss, step.grad_norm)]
    held = engine.evaluate(cases.global_tokens(9)[own.start : own.stop]).loss
    narrow = sum(
        isinstance(module, DeferredLinear) and module.scale is not None
        for part in engine._parts
        for module in part.module.modules()
    )
    return said, held, narrow


def both_gathered(ranks: int) -> list[tuple[tuple[list[float], float, int], ...]]:
    return [tuple(gathered(row, wire) for wire in ("full", "fp8")) for row in GATHERED[ranks]]


@pytest.mark.long("2")
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_weights_gathered_in_eight_bits_change_no_value(ranks: int) -> None:
    """Against gathers in 16 bits, behind which each product rounds the same weights."""
    for wide, narrow in on_ranks(ranks, both_gathered, ranks)[0]:
        assert wide[:2] == narrow[:2]
        assert wide[2] == 0 < narrow[2]


@dataclass
class OldCard:
    """A device before Ada."""

    type = "cuda"


def test_a_device_without_these_formats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")

    with pytest.raises(LaunchError, match=r"A100 has compute capability 8\.0; .* 8\.9 .* Use bf16"):
        eight_bits.require(OldCard(), "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(LaunchError, match=r"is mxfp8, .* capability 9\.0; .* 10\.0 or more"):
        eight_bits.require(OldCard(), "mxfp8")
    eight_bits.require(OldCard(), "fp8")
