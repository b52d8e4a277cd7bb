"""Kernels that torch may choose among for one operator: attention's, and products in 8 bits by row.

Each is asked for by name; where there is none, its row says in torch's words why.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.suite_cases import Row, Rows, Setting
from meshwright.runtime.techniques.float8 import products_of
from meshwright.runtime.techniques.split_backward import defer

SHAPES = ((2048, 64, 16, 16), (8192, 128, 16, 16), (8192, 128, 16, 4))
"""[shape] Positions, width of a head, heads, and heads of keys."""


def backends(at: Setting) -> Rows:
    """Yield both passes of attention by backend, and of a product in 8 bits by who makes it."""
    ways: dict[str, tuple[list[SDPBackend], str | None]] = {
        name.lower(): ([backend], None) for name, backend in SDPBackend.__members__.items()
        if backend not in (SDPBackend.ERROR, SDPBackend.OVERRIDEABLE)
    }  # fmt: skip
    for version in torch.nn.attention.list_flash_attention_impls():
        ways[version] = [SDPBackend.FLASH_ATTENTION], version
    for length, width, heads, kv_heads in SHAPES[: 1 if at.tiny else None]:
        for name, (kinds, version) in ways.items():

            def attention(
                shape: tuple[int, int, int, int] = (length, width, heads, kv_heads),
                kinds: list[SDPBackend] = kinds,
                version: str | None = version,
            ) -> Row:
                return _attention(at, shape, kinds, version)

            yield f"{name}, {length} x {width}, {heads} heads of {kv_heads}", attention
    for name, makes in (("ours", _own_linear), ("torchao", _torchao_linear), ("bf16", _linear)):
        yield f"rowwise product, {name}", lambda makes=makes: _product(at, makes)


def _attention(
    at: Setting, shape: tuple[int, int, int, int], kinds: list[SDPBackend], version: str | None
) -> Row:
    length, width, heads, kv_heads = shape
    length = 64 if at.tiny else length
    samples = 1 if at.tiny else 16384 // length
    dtype = torch.float32 if at.kind == "cpu" else torch.bfloat16
    query, key, value = (
        torch.randn(samples, n, length, width, device=at.device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )

    def both() -> None:
        made = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads != kv_heads
        )
        made.backward(made.detach())

    try:
        with sdpa_kernel(kinds), _version(version):
            taken = at.seconds(both, calls=3)
    except (RuntimeError, ImportError) as error:
        return {"lacks": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"flops": 7.0 * samples * heads * length**2 * width, "seconds": taken}


@contextlib.contextmanager
def _version(name: str | None) -> Iterator[None]:
    """Let torch's flash attention be another implementation of it."""
    if name is None:
        yield
        return
    torch.nn.attention.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def _linear(width: int) -> nn.Module:
    return nn.Linear(width, width, bias=False)


def _own_linear(width: int) -> nn.Module:
    layer = nn.Sequential(_linear(width))
    defer(layer, None, products_of("fp8", "rowwise"))
    return layer


def _torchao_linear(width: int) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

    config = Float8LinearConfig.from_recipe_name("rowwise")
    return convert_to_float8_training(nn.Sequential(_linear(width)), config=config)


def _product(at: Setting, makes: Callable[[int], nn.Module]) -> Row:
    if makes is _torchao_linear and importlib.util.find_spec("torchao") is None:
        return {"lacks": "torchao is not installed"}
    width, rows = (64, 64) if at.tiny else (4096, 16384)
    layer = makes(width).to(at.device, torch.bfloat16)
    call = layer if at.tiny else torch.compile(layer)
    x = torch.randn(rows, width, device=at.device, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        made = call(x)
        made.backward(torch.ones_like(made))

    return {"flops": 6.0 * rows * width**2, "seconds": at.seconds(both, calls=3)}
