"""Operators that several parts of a transformer share: norms, products, collectives around them."""

from __future__ import annotations

from planner.layers.operator_table import FP32, Operator, Setting
from planner.model import Architecture

GEMMA = ("gemma", "gemma2", "gemma3_text")
"""Families whose norms multiply with one plus their weight, in fp32."""


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

    LayerNorm is one kernel that keeps its input.  RMSNorm is written out in fp32: upcast, square,
    mean, root, scale, downcast, weight; it keeps the fp32 copy, the roots and the scaled rows.
    torch's own RMSNorm, which the reference family has, keeps the scaled rows in fp32, as does
    Gemma's, which multiplies with the weight before the downcast.
    """
    rows = setting.stream_tokens if rows is None else rows
    count = rows * width
    size = count * setting.element_bytes
    if a.family == "cohere":
        return _written_out(name, source, rows=rows, width=width, e=setting.element_bytes)
    if a.norm == "layer":
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={f"{name}_moments": 2 * rows * FP32, name: size},
            saved=(source, f"{name}_moments"),
            fp32=(f"{name}_moments",),
            moved_bytes=2 * size,
            backward_moved_bytes=3 * size,
        )
    root, scaled = f"{name}_root", f"{name}_scaled"
    # Gemma's factor 1 + weight is a tensor of its own.
    factor = {f"{name}_factor": width * FP32} if a.family in GEMMA else {}
    if setting.element_bytes == FP32:
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={root: rows * FP32, scaled: size, **factor, name: size},
            saved=(source, root, scaled, *factor),
            moved_bytes=7 * size,
            backward_moved_bytes=14 * size,
            kernels=6,
        )
    wide = f"{name}_fp32"
    keeps_wide = a.family in ("reference", *GEMMA)
    scaled_bytes = count * FP32 if keeps_wide else size
    return Operator(
        name=name,
        kind="memory",
        inputs=(source,),
        outputs={wide: count * FP32, root: rows * FP32, scaled: scaled_bytes, **factor, name: size},
        saved=(wide, root, scaled, *factor),
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
    name: str,
    inputs: tuple[str, ...],
    size: float,
    *,
    saved: tuple[str, ...] = (),
    output: str | None = None,
) -> Operator:
    """One kernel over tensors of equal size.

    Its backward reads the gradient and what was kept, and writes a gradient for each input.
    """
    return Operator(
        name=name,
        kind="memory",
        inputs=inputs,
        outputs={output or name: size},
        saved=saved,
        moved_bytes=(len(inputs) + 1) * size,
        backward_moved_bytes=(1 + len(saved) + len(inputs)) * size,
    )


def matmul(
    name: str,
    inputs: tuple[str, ...],
    outputs: dict[str, float],
    *,
    flops: float,
    moved_bytes: float,
    kernels: int = 1,
) -> Operator:
    """A matrix product, which keeps its inputs and whose backward is two products of its size."""
    return Operator(
        name=name,
        kind="matmul",
        inputs=inputs,
        outputs=outputs,
        saved=inputs,
        flops=flops,
        moved_bytes=moved_bytes,
        backward_moved_bytes=2 * moved_bytes,
        kernels=kernels,
    )


def gathered(setting: Setting, source: str, name: str, size: float) -> tuple[list[Operator], str]:
    """Gather the sequence before a tensor-parallel region; nothing to do on one rank."""
    if not setting.divides_tensors:
        return [], source
    gather = Operator(
        name=name,
        kind="all_gather",
        inputs=(source,),
        outputs={name: size},
        moved_bytes=size,
        copied_bytes=2 * _reordered(setting, size),
        workspace_bytes=_reordered(setting, size),
    )
    return [gather], name


def projections(
    a: Architecture, setting: Setting, source: str, outputs: dict[str, float], *, width: float
) -> Operator:
    """Multiply tokens by matrices of `width` columns together, one product for each output."""
    tokens, e, count = setting.tokens, setting.element_bytes, len(outputs)
    return matmul(
        "qkv",
        (source,),
        outputs,
        flops=2 * tokens * a.hidden_size * width,
        moved_bytes=count * tokens * a.hidden_size * e + (tokens + a.hidden_size) * width * e,
        kernels=count,
    )


def row_wise(
    a: Architecture, setting: Setting, source: str, name: str, *, width: float
) -> list[Operator]:
    """Multiply by a matrix of `width` rows on each rank, and scatter sums over the sequence."""
    tokens, e = setting.tokens, setting.element_bytes
    out_bytes = tokens * a.hidden_size * e
    partial = name if not setting.divides_tensors else f"{name}_partial"
    result = [
        matmul(
            partial,
            (source,),
            {partial: out_bytes},
            flops=2 * tokens * width * a.hidden_size,
            moved_bytes=tokens * width * e + width * a.hidden_size * e + out_bytes,
        )
    ]
    if setting.divides_tensors:
        result.append(
            Operator(
                name=f"{name}_scatter",
                kind="reduce_scatter",
                inputs=(partial,),
                outputs={name: out_bytes / setting.tensor},
                moved_bytes=out_bytes,
                copied_bytes=2 * _reordered(setting, out_bytes),
                workspace_bytes=_reordered(setting, out_bytes),
            )
        )
    return result


def exchange(source: str, name: str, size: float) -> Operator:
    """All-to-all between the ranks that hold different experts."""
    return Operator(
        name=name,
        kind="all_to_all",
        inputs=(source,),
        outputs={name: size},
        moved_bytes=size,
        axis="expert",
    )


def _reordered(setting: Setting, size: float) -> float:
    """Bytes of the copies that bring positions to the front and back; one sample needs none."""
    return size * (1 + 1 / setting.tensor) if setting.batched else 0.0
