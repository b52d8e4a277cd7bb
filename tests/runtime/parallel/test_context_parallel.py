"""Attention over a divided sequence against torch's own over the whole, and the bytes it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import RECOMPUTES, Setting
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.core.mesh import WHOLE, Context
from meshwright.runtime.models.huggingface import HuggingFace
from meshwright.runtime.models.reference_decoder import Reference
from meshwright.runtime.parallel import context_parallel as context_module
from meshwright.runtime.parallel.context_parallel import attention
from meshwright.runtime.techniques.activation_checkpointing import wrapped
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

SAMPLES, SEQ_LEN = 2, 32
TRIES = 3
DEVICES = ["cpu", "cuda"]


def tensors(dtype: torch.dtype, *, device: str = "cpu", head_dim: int = 8) -> list[Tensor]:
    """Queries, keys, values and a gradient; two query heads share a key head."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(SAMPLES, heads, SEQ_LEN, head_dim, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 4)
    ]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_ranks_hold_each_position_once_and_have_equal_work(degree: int) -> None:
    held = [Context(rank=r, degree=degree).positions(24) for r in range(degree)]

    assert torch.cat(held).sort().values.tolist() == list(range(24))
    assert len({int((positions + 1).sum()) for positions in held}) == 1  # keys seen


def test_what_ranks_hold_is_put_in_order_and_back() -> None:
    held = torch.cat([Context(rank=r, degree=4).positions(16) for r in range(4)])

    in_order = context_module._in_order(held, 4)

    assert in_order.tolist() == list(range(16))
    assert torch.equal(context_module._by_rank(in_order, 4), held)


def check_my_part(windowed: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Hold this rank's output and gradients against its part of those of the whole."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    context = Context(rank=rank, degree=degree, group=dist.group.WORLD)
    mine = context.positions(SEQ_LEN)
    mask = None
    if windowed:
        distance = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)
        mask = (distance >= 0) & (distance < 5)
    *whole, grad = tensors(dtype)
    parts = [t[:, :, mine].requires_grad_() for t in whole]
    whole = [t.requires_grad_() for t in whole]

    found = attention(*parts, context, mask=None if mask is None else mask[mine])
    found.backward(grad[:, :, mine])
    expected = whole_attention(*whole, mask)
    expected.backward(grad)

    torch.testing.assert_close(
        [found, *(t.grad for t in parts)],
        [expected[:, :, mine], *(t.grad[:, :, mine] for t in whole)],
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.ranks
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.long("4-True", "4-False")
def test_a_divided_sequence_attends_like_a_whole_one(degree: int, windowed: bool) -> None:
    on_ranks(degree, check_my_part, windowed, torch.float32, 5e-6)


@pytest.mark.ranks
def test_bf16_is_as_exact_as_its_type() -> None:
    on_ranks(2, check_my_part, False, torch.bfloat16, 3e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", range(3))
def test_each_kernel_merges_its_blocks(rank: int, dtype: torch.dtype, device: str) -> None:
    """The same without a group: keys and values are whole already."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    context = Context(rank=rank, degree=3)
    *whole, grad = (t[:, :, :30] for t in tensors(dtype, device=device, head_dim=16))
    mine = context.positions(30).to(device)
    q, k, v = (t.detach().requires_grad_() for t in whole)
    expected = whole_attention(q, k, v, None)[:, :, mine]
    expected.backward(grad[:, :, mine])
    gradients = [q.grad[:, :, mine], k.grad, v.grad]

    q, k, v = whole[0][:, :, mine].requires_grad_(), *(t.detach().requires_grad_() for t in (k, v))
    found = context_module._ChunkAttention.apply(q, k, v, context, None)
    found.backward(grad[:, :, mine])

    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    torch.testing.assert_close([found, q.grad, k.grad, v.grad], [expected, *gradients], **tolerance)


# --- memory ----------------------------------------------------------------------------------

KEPT = (
    ("reference", {}, "fp32"),
    ("llama", {}, "bf16"),
    ("mistral", {"sliding_window": 5}, "fp32"),
    ("gpt2", {}, "fp32"),
)
"""Families whose attention differs in what it keeps."""


def kept_by_blocks() -> list[int]:
    """Return the bytes that a block keeps beyond its input, for all of KEPT and each recompute."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    context = Context(rank=rank, degree=degree, group=dist.group.WORLD)
    result = []
    for family, changes, precision in KEPT:
        graph = cases.transformer(family, **changes)
        for recompute in RECOMPUTES:
            result.append(_kept(graph, precision, recompute, context))
    return result


def _kept(graph: ModelGraph, precision: str, recompute: str, context: Context) -> int:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    where: dict[str, Any] = {
        "seq_len": cases.SEQ_LEN,
        "dtype": dtype,
        "device": torch.device("cpu"),
        "context": context,
    }
    assert graph.architecture is not None
    own = graph.architecture.family == "reference"
    adapter = Reference(graph, **where) if own else HuggingFace(graph, folder=None, **where)
    layer = adapter.layer("block.0").to_empty(device="cpu").to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer = wrapped(layer, recompute)
    x = torch.randn(SAMPLES, cases.SEQ_LEN // context.degree, 32, dtype=dtype).requires_grad_()
    layer(x).sum().backward()
    found = []
    for _ in range(TRIES):
        with LiveMemory([*layer.parameters(), *layer.buffers(), x]) as live:
            before = live.current_bytes
            output = layer(x)
            dist.barrier()
            found.append(live.current_bytes - before - output.untyped_storage().nbytes())
        output.sum().backward()
    # gloo's thread lets go of a gather's tensors some time after the wait for it: never earlier.
    return min(found)


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_block_keeps_what_the_planner_counts() -> None:
    expected = []
    for family, changes, precision in KEPT:
        graph = cases.transformer(family, **changes)
        layer = next(layer for layer in graph.layers if "block" in layer.kind)
        setting = Setting(
            micro_batch=SAMPLES, seq_len=cases.SEQ_LEN, precision=precision, context=2
        )
        for recompute in RECOMPUTES:
            stored = table(graph, layer, setting).stored_tensors(recompute)
            expected.append(sum(size for name, size in stored.items() if name != "x"))

    more = 0 if hasattr(dist, "reduce_scatter_single") else 1  # a byte of its own, before 2.13
    for kept in on_ranks(2, kept_by_blocks):
        assert kept == [size + more for size in expected]


def test_one_rank_holds_everything() -> None:
    assert WHOLE.positions(5).tolist() == [0, 1, 2, 3, 4]
