"""Products in two parts are the products of the whole, and none is off the grid."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.planner.documents.profile import LossGradients
from meshwright.runtime.techniques import aligned_linear as parted_products
from meshwright.runtime.techniques import chunked_cross_entropy as chunked_loss
from meshwright.runtime.techniques.aligned_linear import (
    GRID_BYTES,
    PARTED,
    on_grid,
    parts,
    products_for,
    reads_on_grid,
)
from meshwright.runtime.techniques.split_backward import PLAIN, Products, defer
from tests.runtime.ranks import on_ranks


class Seen(TorchDispatchMode):
    """The shapes of all matrix products' operands."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            for one in args:
                if isinstance(one, Tensor) and min(one.shape) > GRID_BYTES:
                    self.sides |= set(one.shape)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part products on the device at hand too."""

    def everywhere(like: Tensor, outputs: int, inputs: int) -> list[slice]:
        return on_grid(outputs, like.element_size())

    monkeypatch.setattr(parted_products, "parts", everywhere)
    monkeypatch.setattr(chunked_loss, "parts", everywhere)


@pytest.mark.parametrize("outputs", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("any_device")
def test_parts_together_are_the_products_of_a_linear(outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, outputs, bias=bias, dtype=torch.float64)
    parted = nn.Linear(5, outputs, bias=bias, dtype=torch.float64)
    parted.load_state_dict(plain.state_dict())
    defer(parted, None, PARTED)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    made, expected = parted(x), plain(other)
    grad = torch.randn_like(made)
    made.backward(grad)
    expected.backward(grad)

    assert made.is_contiguous()
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(x.grad, other.grad)
    for one, another in zip(parted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)


@pytest.mark.parametrize("gradients", ["precomputed", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_is_the_same_in_parts(
    gradients: LossGradients, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    def found() -> list[Tensor]:
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(n, dtype=dtype) for n in ((11, 6), (13, 6), (13,)))
        leaves = [one.requires_grad_() for one in (x, weight, bias)]
        targets = torch.randint(13, (11,))
        total, _ = chunked_loss.chunked_loss(
            x, weight, targets, rows=4, gradients=gradients, bias=bias
        )
        total.backward()  # type: ignore[no-untyped-call]
        return [total.detach(), *(one.grad for one in leaves if one.grad is not None)]

    whole = found()
    request.getfixturevalue("any_device")
    close = 8 * torch.finfo(dtype).eps  # sums of 16 bits are rounded between parts
    for one, another in zip(found(), whole, strict=True):
        torch.testing.assert_close(one, another, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.usefixtures("any_device")
def test_no_product_in_parts_is_off_the_grid(dtype: torch.dtype) -> None:
    def odd(sides: set[int]) -> set[int]:
        return {side for side in sides if side * dtype.itemsize % GRID_BYTES}

    with FakeTensorMode():
        x, weight, grad = (
            torch.empty(*sides, dtype=dtype) for sides in ((64, 768), (50257, 768), (64, 50257))
        )
        targets = torch.empty(64, dtype=torch.int64)
        with Seen() as plain:
            PLAIN.output(x, weight, None, None)
        with Seen() as seen, torch.no_grad():
            assert PARTED.output(x, weight, None, None).shape == grad.shape
            assert PARTED.of_input(grad, weight, None).shape == x.shape
            assert PARTED.of_weight(x, grad).shape == weight.shape
        x.requires_grad_()
        weight.requires_grad_()
        with Seen() as chunks:
            chunked_loss.chunked_loss(x, weight, targets, rows=32, gradients="precomputed")

    assert odd(plain.sides) == {50257}
    assert 50256 in seen.sides & chunks.sides
    assert not odd(seen.sides) | odd(chunks.sides)


def placements_of_products() -> list[tuple[Any, Any]]:
    mesh = init_device_mesh("cpu", (1,))
    x, weight, grad = (
        distribute_tensor(torch.randn(*sides), mesh, [where])
        for sides, where in (((3, 5), Replicate()), ((7, 5), Shard(0)), ((3, 7), Shard(1)))
    )

    def found(products: Products) -> list[Any]:
        made = (
            products.output(x, weight, None, None),
            products.of_input(grad, weight, None),
            products.of_weight(x, grad),
        )
        return [cast(DTensor, one).placements for one in made]

    return list(zip(found(PARTED), found(PLAIN), strict=True))


@pytest.mark.ranks
def test_divided_matrices_stay_divided() -> None:
    [found] = on_ranks(1, placements_of_products)
    for parted, plain in found:
        assert parted == plain


def test_small_matrices_those_on_the_grid_and_other_devices_are_whole() -> None:
    head = nn.Linear(768, 50257, device="meta")
    assert reads_on_grid(torch.device("cuda"))
    assert not reads_on_grid(torch.device("cpu"))
    assert products_for(head, 1) is PARTED
    assert products_for(nn.Linear(768, 10), 1) is PLAIN
    padded = nn.Linear(768, 50304, device="meta")
    assert products_for(padded, 1) is PLAIN
    assert products_for(nn.Linear(768, 50264, device="meta"), 2) is PARTED
    assert parts(torch.empty(()), 50257, 768) == [slice(0, 50257)]
