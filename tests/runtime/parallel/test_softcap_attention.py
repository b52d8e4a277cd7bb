"""Capped attention in blocks against the same in one piece, whole and divided over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.runtime.core.mesh import WHOLE, Context
from meshwright.runtime.parallel import sink_attention
from meshwright.runtime.parallel import softcap_attention as capped
from tests.runtime.ranks import on_ranks

SCALE, CAP, LENGTH = 0.7, 2.0, 16


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    cap: float = CAP,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the formula as it stands."""
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    scores = SCALE * query @ key.transpose(-2, -1)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (distance < 0) | ((distance >= window) if window else torch.tensor(False))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        beside = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, beside), -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [0, 1, 5, LENGTH])
@pytest.mark.parametrize("block", [3, 512])
def test_blocks_make_what_the_formula_says(
    window: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "BLOCK", block)
    ours, plain = ([t.float().requires_grad_() for t in inputs()] for _ in range(2))
    weights = torch.randn(2, 4, LENGTH, 8)

    found = capped.attention(*ours, WHOLE, scale=SCALE, cap=CAP, window=window)
    expected = written_out(*plain, window)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cap", "window", "fused"), [(0.0, 0, True), (0.0, 0, False), (0.0, 5, False), (CAP, 5, False)]
)
def test_a_sink_takes_its_share_and_has_a_gradient(
    cap: float, window: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "BLOCK", 3)
    monkeypatch.setattr(sink_attention, "applies", lambda *_: fused)
    torch.manual_seed(1)
    sinks = torch.randn(4)
    ours, plain = ([t.float().requires_grad_() for t in (*inputs(), sinks)] for _ in range(2))
    weights = torch.randn(2, 4, LENGTH, 8)

    found = capped.attention(*ours[:3], WHOLE, scale=SCALE, cap=cap, window=window, sinks=ours[3])
    expected = written_out(*plain[:3], window, cap, plain[3])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_kernels_of_sinks_have_the_shapes_that_compilers_are_told() -> None:
    query, key, value = (t.bfloat16() for t in inputs())
    sinks = torch.randn(4, dtype=torch.bfloat16)
    assert sink_attention.applies(query, value, 0)

    found = capped.attention(query, key, value, WHOLE, scale=SCALE, sinks=sinks)
    out, log_sum = sink_attention._with_sinks(query, key, value, sinks, SCALE, 0)

    assert torch.equal(found, out)
    assert log_sum.dtype == torch.float32
    # Eager and fake results alike; what inductor makes of them is the library's.
    checks = ("test_schema", "test_faketensor")
    arguments = (query, key, value, sinks, SCALE, 0)
    torch.library.opcheck(sink_attention._with_sinks, arguments, test_utils=checks)
    arguments = (out, query, key, value, out, log_sum, SCALE, 0)
    torch.library.opcheck(sink_attention._grads_with_sinks, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("dtype", "window", "fused"),
    [
        (torch.bfloat16, 0, True),
        (torch.bfloat16, LENGTH, True),
        (torch.bfloat16, LENGTH - 1, False),
        (torch.float32, 0, False),
    ],
)
def test_on_a_cpu_kernels_have_sinks_in_16_bits_without_windows(
    dtype: torch.dtype, window: int, fused: bool
) -> None:
    query, _, value = (t.to(dtype) for t in inputs())

    assert sink_attention.applies(query, value, window) is fused


@pytest.mark.parametrize("window", [0, 128])
def test_flash_attention_takes_sinks_of_fewer_heads_of_keys(window: int) -> None:
    # A query and the keys before it: 127 to the left of it, none to the right.
    limits = {"window_size_left": 127, "window_size_right": 0} if window else {}
    assert sink_attention._window(window) == limits
    with FakeTensorMode():
        query, key = (
            torch.empty(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (64, 8)
        )
        sinks = torch.empty(64, device="cuda", dtype=torch.bfloat16)
        assert sink_attention.applies(query, key, window)

        out, log_sum = sink_attention._with_sinks._init_fn(query, key, key, sinks, SCALE, window)
        tensors = (out, query, key, key, out, log_sum)
        grads = sink_attention._grads_with_sinks._init_fn(*tensors, SCALE, window)

        shapes = [(each.shape, each.stride(), each.dtype) for each in (out, *grads)]
        assert shapes == [(t.shape, t.stride(), t.dtype) for t in (query, query, key, key)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 5])
def test_flash_attention_of_a_device_makes_what_blocks_make(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    sinks = torch.randn(4)
    ours, blocks = (
        [t.to("cuda", torch.bfloat16).requires_grad_() for t in (*inputs(), sinks)]
        for _ in range(2)
    )
    assert sink_attention.applies(ours[0], ours[2], window)

    found = capped.attention(*ours[:3], WHOLE, scale=SCALE, window=window, sinks=ours[3])
    monkeypatch.setattr(sink_attention, "applies", lambda *_: False)
    expected = capped.attention(*blocks[:3], WHOLE, scale=SCALE, window=window, sinks=blocks[3])
    found.square().sum().backward()
    expected.square().sum().backward()

    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for one, other in zip(ours, blocks, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.05)


def on_a_part(window: int) -> list[Tensor]:
    """Return this rank's outputs and gradients for a loss that sums the outputs of both."""
    context = Context(rank=dist.get_rank(), degree=2, group=dist.group.WORLD)
    own = context.positions(LENGTH)
    parts = [t[:, :, own].float().requires_grad_() for t in inputs()]
    out = capped.attention(*parts, context, scale=SCALE, cap=CAP, window=window)
    out.square().sum().backward()
    return [own, out.detach(), *(part.grad for part in parts)]


@pytest.mark.ranks
@pytest.mark.parametrize("window", [0, 5])
def test_parts_of_a_sequence_make_the_whole(window: int) -> None:
    whole = [t.float().requires_grad_() for t in inputs()]
    expected = written_out(*whole, window)
    expected.square().sum().backward()

    for own, *found in on_ranks(2, on_a_part, window):
        wanted = [expected.detach(), *(t.grad for t in whole)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other[:, :, own], rtol=1e-4, atol=1e-5)
