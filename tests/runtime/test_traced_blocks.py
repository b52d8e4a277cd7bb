"""What counts as memory of graphs that run operator by operator as if kernels were generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks import traced_blocks
from meshwright.runtime.core.memory_tracker import LiveMemory

SIZE_BYTES = 64 * 64 * 4


@pytest.fixture(autouse=True)
def _no_graphs_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def peak_in_sizes(function: Callable[[Tensor], Tensor]) -> float:
    """Return the most that was alive in a compiled call, its input included, in its size."""
    made = torch.compile(function, backend=traced_blocks.backend, fullgraph=True, dynamic=False)
    x = torch.ones(64, 64)
    with torch.no_grad():
        made(x)
        with LiveMemory([x]) as live:
            result = made(x)
    assert live.current_bytes == x.nbytes + result.nbytes  # nothing of the call is left
    return live.peak_bytes / SIZE_BYTES


def test_of_a_chain_of_elementwise_operators_only_its_end_is_stored() -> None:
    def chain(x: Tensor) -> Tensor:
        one = x.exp()
        two = one + 1
        three = one * two
        return (one + two + three) @ x  # the input, the sum, the product

    assert peak_in_sizes(chain) == 3


def test_what_a_chain_reads_stays_until_its_end_is_made() -> None:
    def chain(x: Tensor) -> Tensor:
        begun = (x @ x).exp()
        return begun + x @ x.t()  # the input, both products, the sum

    assert peak_in_sizes(chain) == 4


def test_what_several_views_of_a_chain_bring_to_a_product_is_stored_once() -> None:
    def chain(x: Tensor) -> Tensor:
        one = (x + 1) * 2
        return one.t() @ one

    assert peak_in_sizes(chain) == 3


def test_a_reduction_reads_a_chain_that_is_not_stored() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x.exp() * 2).sum(dim=1, keepdim=True)

    assert peak_in_sizes(chain) == 1 + 1 / 64
