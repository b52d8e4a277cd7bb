"""Biases of experts: bytes that torch moves when they are added row by row, and a table's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.operators.kernels import KernelSettings
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import Operator, Setting

EXPERTS, ROWS, WIDTH = 4, 2048, 512
SIZE = 2 * ROWS * WIDTH


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors that operators read and write; operators that make views move nothing."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        read, written = (
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)]
            for each in ((args, kwargs), result)
        )
        places = {leaf.untyped_storage().data_ptr() for leaf in read}
        if any(leaf.untyped_storage().data_ptr() not in places for leaf in written):
            self.moved += sum(leaf.nbytes for leaf in (*read, *written))
        return result


def traffic(forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> tuple[float, float]:
    """Bytes of a function's forward and backward, in sizes of its rows."""
    inputs = [each.requires_grad_() for each in tensors]
    with Traffic() as there:  # type: ignore[no-untyped-call]
        result = forward(*inputs)
    gradient = torch.ones_like(result)
    with Traffic() as back:  # type: ignore[no-untyped-call]
        torch.autograd.grad(result, inputs, gradient)
    return there.moved / SIZE, back.moved / SIZE


def weighed_in_fp32(rows: torch.Tensor, bias: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    counts = [ROWS // EXPERTS] * EXPERTS
    parts = zip(torch.split(rows, counts), bias, torch.split(weights, counts), strict=True)
    return torch.cat([part + b * p for part, b, p in parts]).to(rows.dtype)


def clamped_and_joined(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return torch.cat((gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)), -1)


def operators_of(biases: str) -> dict[str, Operator]:
    """The operators of GPT-OSS's block beside those whose products add biases."""
    kernels = KernelSettings(fused_gate=True, fused_projections=True, expert_moves=6.0)
    model = resolve_model("gpt-oss-20b")
    block = next(layer for layer in model.layers if layer.kind == "moe_block")

    def named(some: KernelSettings) -> dict[str, Operator]:
        setting = Setting(micro_batch=1, seq_len=4096, kernels=some)
        return {op.name: op for op in table(model, block, setting).operators}

    plain = named(kernels)
    found = named(replace(kernels, expert_biases=biases))  # type: ignore[arg-type]
    return {name: op for name, op in found.items() if name not in plain}


def test_weighed_biases_move_what_torch_moves_for_them() -> None:
    rows, bias = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16), torch.ones(EXPERTS, WIDTH)
    there, back = traffic(weighed_in_fp32, rows, bias.bfloat16(), torch.ones(ROWS, 1))
    half = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    joined, joined_back = traffic(clamped_and_joined, half)

    found = operators_of("weighed")

    size = 4096 * 4 * 2880 * 2  # each token chooses four experts
    added, cut = found["biased_rows"], found["expert_joined"]
    assert added.moved_bytes / size == pytest.approx(there, rel=0.01)
    assert added.backward_moved_bytes / size == pytest.approx(back, rel=0.01)
    assert cut.moved_bytes / (2 * size) == pytest.approx(joined, rel=0.01)
    assert cut.backward_moved_bytes / (2 * size) == pytest.approx(joined_back, rel=0.01)


def test_rows_of_a_bias_move_what_torch_moves_for_them() -> None:
    chosen = torch.arange(ROWS) // (ROWS // EXPERTS)
    rows, bias = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16), torch.ones(EXPERTS, WIDTH)
    there, back = traffic(lambda rows, bias: rows + bias[chosen], rows, bias.bfloat16())

    found = operators_of("rows")

    size = 4096 * 4 * 2880 * 2
    assert found["biased_rows"].moved_bytes / size == pytest.approx(there, rel=0.01)
    assert found["biased_rows"].backward_moved_bytes / size == pytest.approx(back, rel=0.01)
    assert found["biased_products"].moved_bytes / (2 * size) == pytest.approx(there, rel=0.01)
    assert operators_of("products") == {}
