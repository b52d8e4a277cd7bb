"""Operators that several parts of a transformer share: norms, products, collectives around them."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.operators.kernels import MODULES, KernelSettings
from meshwright.planner.operators.operator_table import FP32, Operator, Setting, larger, smaller

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Architecture
    from meshwright.planner.operators.expert_routing import Routing

NARROW_MULTIPLE = 16
"""Rows and columns of a matrix in 8 bits are multiples of it: cuBLAS (16 bytes), torchao's filter,
Transformer Engine's assert_dim_for_fp8_exec."""
INDEXED_TOGETHER = 2.0**22
"""Weights whose indices are there at once (runtime/techniques/packed_weights.py)."""
SCALED_TOGETHER = 64
"""Weights in 4 bits that have a scale together (bitsandbytes, quantize_4bit's blocksize)."""
GEMMA = ("gemma", "gemma2", "gemma3_text")
"""Families whose norms multiply with one plus their weight, in fp32."""
WEIGHED_IN_FP32 = ("gpt_oss", "olmo2", "olmo3")
"""Others whose norms multiply with their weight before they are brought to 16 bits."""


def norm(
    a: Architecture,
    setting: Setting,
    source: str,
    name: str,
    *,
    width: float,
    rows: float | None = None,
) -> Operator:
    """A norm of `rows` rows of `width` features: by default all tokens of the residual stream.

    A fused norm and LayerNorm are one kernel that keeps its input and figures of each row.  Else
    RMSNorm is written out in fp32: upcast, square,
    mean, root, scale, downcast, weight; it keeps the fp32 copy, the roots and the scaled rows.
    torch's own RMSNorm, which the reference family has, keeps the scaled rows in fp32, as do those
    that multiply with the weight before the downcast (Gemma, OLMo, GPT-OSS).
    """
    rows = setting.stream_tokens if rows is None else rows
    count = rows * width
    size = count * setting.element_bytes
    kernels = setting.kernels
    if a.family == "cohere" and not kernels.fused_norm:
        return _written_out(name, source, rows=rows, width=width, e=setting.element_bytes)
    if a.norm == "layer" or kernels.fused_norm:
        figures = 2 if a.norm == "layer" else 1
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={f"{name}_moments": figures * rows * FP32, name: size},
            saved=(source, f"{name}_moments"),
            fp32=(f"{name}_moments",),
            moved_bytes=2 * size,
            backward_moved_bytes=kernels.back(2 * size, 3 * size),
        )
    root, scaled = f"{name}_root", f"{name}_scaled"
    # Gemma's factor 1 + weight is a tensor of its own.
    factor = {f"{name}_factor": width * FP32} if a.family in GEMMA else {}
    # Scaled rows are kept for the weight's gradient alone.
    kept = (root, *factor) if kernels.frozen else (root, scaled, *factor)
    if setting.element_bytes == FP32:
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={root: rows * FP32, scaled: size, **factor, name: size},
            saved=(source, *kept),
            moved_bytes=7 * size,
            backward_moved_bytes=14 * size,
            kernels=6,
        )
    wide = f"{name}_fp32"
    keeps_wide = a.family in ("reference", *GEMMA, *WEIGHED_IN_FP32)
    scaled_bytes = count * FP32 if keeps_wide else size
    return Operator(
        name=name,
        kind="memory",
        inputs=(source,),
        outputs={wide: count * FP32, root: rows * FP32, scaled: scaled_bytes, **factor, name: size},
        saved=(wide, *kept),
        fp32=(wide, root, scaled, *factor) if keeps_wide else (wide, root),
        moved_bytes=count * 38,
        backward_moved_bytes=count * 60,
        kernels=8,
        workspace_bytes=count * FP32 if a.family in GEMMA else 0.0,
    )


def _written_out(name: str, source: str, *, rows: float, width: float, e: int) -> Operator:
    """Command-R's layer norm in fp32: the centred rows twice, once squared, and the scaled rows."""
    count = rows * width
    squared, centred, scaled, root = (
        f"{name}_{part}" for part in ("squared", "centred", "scaled", "root")
    )
    outputs = dict.fromkeys((squared, centred, scaled), count * FP32)
    outputs |= {root: rows * FP32, f"{name}_weight": width * FP32}
    if e == FP32:
        outputs.pop(f"{name}_weight")
    return Operator(
        name=name,
        kind="memory",
        inputs=(source,),
        outputs={**outputs, name: count * e},
        saved=tuple(outputs),
        fp32=tuple(outputs),
        moved_bytes=count * 54,
        backward_moved_bytes=count * 84,
        kernels=11,
    )


def elementwise(
    kernels: KernelSettings,
    name: str,
    inputs: tuple[str, ...],
    size: float,
    *,
    saved: tuple[str, ...] = (),
) -> Operator:
    """One kernel over tensors of equal size.

    Its backward reads the gradient and what was saved, and writes a gradient for each input.
    """
    moved = (len(inputs) + 1) * size
    return Operator(
        name=name,
        kind="memory",
        inputs=inputs,
        outputs={name: size},
        saved=saved,
        moved_bytes=moved,
        backward_moved_bytes=kernels.back(moved, (1 + len(saved) + len(inputs)) * size),
    )


def matmul(
    name: str,
    inputs: tuple[str, ...],
    outputs: dict[str, float],
    *,
    flops: float,
    moved_bytes: float,
    weights: float = 0.0,
    kernels: float = 1,
    share: float = 1.0,
    sides: tuple[float, ...] = (),
) -> Operator:
    """A matrix product, which keeps its inputs and whose backward is two products of its size.

    `sides` are rows and columns of its matrix; they decide whether it may be in 8 bits.
    """
    return Operator(
        name=name,
        kind="matmul",
        inputs=inputs,
        outputs=outputs,
        saved=inputs,
        flops=flops,
        moved_bytes=moved_bytes,
        backward_moved_bytes=2 * moved_bytes,
        weights=weights,
        kernels=kernels,
        share=share,
        aligned=_is_aligned(sides),
    )


def _is_aligned(sides: tuple[float, ...]) -> bool:
    """Return True if 8-bit kernels take a matrix of these sides; an array for arrays."""
    return reduce(and_, (side % NARROW_MULTIPLE == 0 for side in sides), True)


def of_whole(setting: Setting, product: Operator, rows: float, columns: float) -> Operator:
    """Return a product by a matrix of these sides, which tensor parallelism may have divided.

    A framework may leave small matrices in 16 bits: for tensors with one scale those of up to 4,096
    rows and 1,024 columns, with a scale for each row those of up to 2,048 columns, 1,024 rows, or
    4,096 columns and 2,048 rows.  Source: torchao, float8/float8_linear_utils.py
    (_auto_filter_for_tensorwise, _auto_filter_for_rowwise), which looks at whole matrices.
    """
    if not setting.kernels.large_only:
        return product
    rowwise = setting.precision == "fp8" and setting.scales not in ("tensorwise", "delayed")
    small = rows <= 4096 and columns <= 1024
    if rowwise:
        small = columns <= 2048 or rows <= 1024 or (columns <= 4096 and rows <= 2048)
    return replace(product, aligned=False) if small else product


def undivided_side(setting: Setting, side: float) -> float:
    """Return the side of a matrix of which each tensor rank has a part."""
    return float(np.max(np.round(side * setting.tensor)))


def linear(
    setting: Setting,
    product: Operator,
    *,
    source: str | None = None,
    size: float = 0.0,
    adapted: bool = True,
) -> list[Operator]:
    """A product by weights with what a framework has around it.

    Its input of `size` bytes was gathered from `source`, if that is given.  A framework may keep
    only the shard that was gathered, keep the input in 8 bits as the operator before wrote it,
    bring weights back from 4 bits, or train none of them; then only an `adapted` product keeps its
    input.
    """
    kernels = setting.kernels
    if kernels is MODULES:
        return [product]
    operators: list[Operator] = []
    [kept], whole_bytes = product.inputs, size
    if source is not None and source != kept and not kernels.keeps_gathered:
        kept, size = source, size / setting.tensor
    if kernels.narrow:
        kept, wide = f"{kept}_narrow", kept
        operators.append(narrow_copy(kept, (wide,), size / setting.element_bytes))
    saved: tuple[str, ...] = (kept,)
    after: list[Operator] = []
    if kernels.frozen is not None:
        if not kernels.adapts(adapted=adapted):
            saved = ()
        else:
            after.append(_adapter(product, whole_bytes))
            if kernels.adapters_drop:
                operators.append(_dropout_of_input(setting, product, kept, whole_bytes))
                saved = tuple(operators[-1].outputs)
        product = replace(product, frozen=True, backward_moved_bytes=product.moved_bytes)
    if kernels.restored_bytes:
        moved = kernels.restored_bytes * product.weights
        operators.append(
            Operator(
                name=f"{product.name}_restored",
                kind="memory",
                inputs=(),
                outputs={},
                moved_bytes=moved,
                backward_moved_bytes=moved,
            )
        )
        product = replace(product, workspace_bytes=_restored_bytes(setting, product))
    return [*operators, replace(product, saved=saved), *after]


def _restored_bytes(setting: Setting, product: Operator) -> float:
    """Bytes of a weight brought back from 4 bits, there while it is multiplied in either pass.

    With it come its blocks' scales, rounded ones brought back to fp32 (bitsandbytes, functional.py,
    dequantize_4bit).  For matrices that are multiplied one by one it is the largest.
    """
    widest = reduce(larger, product.outputs.values()) / sum(product.outputs.values())
    share = widest if product.kernels > 1 else 1.0
    indices = setting.kernels.restored_indices * smaller(INDEXED_TOGETHER, share * product.weights)
    return indices + (setting.element_bytes + FP32 / SCALED_TOGETHER) * share * product.weights


def _dropout_of_input(
    setting: Setting, product: Operator, source: str, whole_bytes: float
) -> Operator:
    """Return the copy and the mask that each adapter keeps of an input with dropout.

    Its traffic counts as the adapter's.  Source: peft, tuners/lora/layer.py (Linear.forward).
    """
    mask = whole_bytes / setting.element_bytes
    name = f"{product.name}_dropped"
    return Operator(
        name=name,
        kind="memory",
        inputs=(source,),
        outputs={name: product.kernels * (whole_bytes + mask)},
        kernels=0,
    )


def adapter_name(product: str) -> str:
    """Return the name of what stands beside a product that has an adapter."""
    return f"{product}_adapter"


def _adapter(product: Operator, input_bytes: float) -> Operator:
    """Dropout of an adapter's input and the sum of its output with the product's, beside it."""
    moved = 3 * (input_bytes + sum(product.outputs.values()))
    return Operator(
        name=adapter_name(product.name),
        kind="memory",
        inputs=product.inputs,
        outputs={},
        moved_bytes=moved,
        backward_moved_bytes=2 * moved,
    )


def narrow_copy(name: str, beside: tuple[str, ...], size: float) -> Operator:
    """Tensors in 8 bits that the operator which makes them writes beside those in 16."""
    return Operator(name=name, kind="memory", inputs=beside, outputs={name: size}, kernels=0)


def gather_sequence(
    setting: Setting, source: str, name: str, size: float, *, adapted: bool = True
) -> tuple[list[Operator], str]:
    """Gather the sequence before a tensor-parallel region; nothing to do on one rank.

    Adapters beside the products of the region read it in 16 bits (Transformer Engine,
    LayerNormLinear's return_layernorm_output_gathered).
    """
    if not setting.divides_tensors or not setting.sequence_parallel:
        return [], source
    gather = Operator(
        name=name,
        kind="all_gather",
        inputs=(source,),
        outputs={name: size},
        moved_bytes=size,
        copied_bytes=2 * _reorder_bytes(setting, size),
        workspace_bytes=_reorder_bytes(setting, size),
        wide=setting.kernels.adapts(adapted=adapted),
    )
    return [gather], name


def projections(
    a: Architecture,
    setting: Setting,
    source: str,
    whole: str,
    outputs: dict[str, float],
    *,
    width: float,
) -> list[Operator]:
    """Multiply tokens by matrices of `width` columns together, one product for each output."""
    tokens, e = setting.tokens, setting.element_bytes

    def product(outputs: dict[str, float], width: float) -> Operator:
        count = len(outputs)
        return matmul(
            "qkv",
            (whole,),
            outputs,
            flops=2 * tokens * a.hidden_size * width,
            moved_bytes=count * tokens * a.hidden_size * e + (tokens + a.hidden_size) * width * e,
            weights=a.hidden_size * width,
            kernels=count,
            sides=(a.hidden_size, width),
        )

    products = [product(outputs, width)]
    if setting.kernels.large_only:
        apart: dict[bool, list[str]] = {}
        for name, made_bytes in outputs.items():
            shape = product({name: made_bytes}, made_bytes / (tokens * e))
            columns = undivided_side(setting, made_bytes / (tokens * e))
            small = of_whole(setting, shape, a.hidden_size, columns) is not shape
            apart.setdefault(small, []).append(name)
        products = []
        for small, names in apart.items():
            some = {name: outputs[name] for name in names}
            shape = product(some, sum(some.values()) / (tokens * e))
            products.append(replace(shape, name="qkv_small", aligned=False) if small else shape)
    size = tokens * a.hidden_size * e
    linears = (linear(setting, shape, source=source, size=size) for shape in products)
    return [operator for operators in linears for operator in operators]


def row_wise(
    a: Architecture,
    setting: Setting,
    source: str,
    name: str,
    *,
    width: float,
    adapted: bool = True,
) -> list[Operator]:
    """Multiply by a matrix of `width` rows on each rank, and scatter sums over the sequence."""
    tokens, e = setting.tokens, setting.element_bytes
    out_bytes = tokens * a.hidden_size * e
    partial = name if not setting.divides_tensors else f"{name}_partial"
    product = matmul(
        partial,
        (source,),
        {partial: out_bytes},
        flops=2 * tokens * width * a.hidden_size,
        moved_bytes=tokens * width * e + width * a.hidden_size * e + out_bytes,
        weights=width * a.hidden_size,
        sides=(width, a.hidden_size),
    )
    product = of_whole(setting, product, undivided_side(setting, width), a.hidden_size)
    result = linear(setting, product, size=tokens * width * e, adapted=adapted)
    if setting.divides_tensors:
        result.append(reduce_activation(setting, partial, name, out_bytes))
    return result


def reduce_activation(setting: Setting, partial: str, name: str, size: float) -> Operator:
    """Add what tensor-parallel ranks have of an activation: each gets its part, or all of it."""
    if not setting.sequence_parallel:
        return Operator(
            name=f"{name}_sum",
            kind="all_reduce",
            inputs=(partial,),
            outputs={name: size},
            moved_bytes=size,
        )
    return Operator(
        name=f"{name}_scatter",
        kind="reduce_scatter",
        inputs=(partial,),
        outputs={name: size / setting.tensor},
        moved_bytes=size,
        copied_bytes=2 * _reorder_bytes(setting, size),
        workspace_bytes=_reorder_bytes(setting, size),
    )


def exchange(
    setting: Setting,
    source: str,
    name: str,
    size: float,
    routing: Routing,
    *,
    back: bool,
    beside_shared: bool = False,
) -> Operator:
    """All-to-all between the ranks that hold different experts; each sends its own tokens.

    `back`: it brings them back, and its backward sends gradients to experts.  `size` bytes reach
    the mean rank; the exchange waits for the busiest.  Sent once, what moves is a copy of each
    token, and links wait for the busiest of what they lead to (`collectives.dispatch_s`); sent in
    8 bits, it moves half as much on its way to experts, and all of it to be combined (DeepSeek-V3,
    section 3.2.2, arXiv:2412.19437).
    """
    kernels = setting.kernels
    load = routing.busiest_load(setting.expert)
    moved = size / setting.expert_tensor
    moved = moved / routing.per_token if kernels.expert_once else moved * load
    narrow = 0.5 if kernels.expert_narrow else 1.0
    return Operator(
        name=name,
        kind="all_to_all",
        inputs=(source,),
        outputs={name: size * load},
        moved_bytes=moved * (1.0 if back else narrow),
        backward_moved_bytes=moved * (narrow if back else 1.0),
        axis="expert",
        routing=routing if kernels.expert_once else None,
        beside_shared=beside_shared,
    )


def _reorder_bytes(setting: Setting, size: float) -> float:
    """Bytes of the copies that bring positions to the front and back; one sample needs none."""
    copied = setting.is_batched and setting.kernels.reorders
    return size * (1 + 1 / setting.tensor) if copied else 0.0
