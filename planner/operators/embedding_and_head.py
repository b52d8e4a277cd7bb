"""Operators at the two ends of a model: embedding, head with its loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.operators.kernels import MODULES
from meshwright.planner.operators.operator_table import (
    FP32,
    Operator,
    OperatorTable,
    Pass,
    Setting,
    larger,
    smaller,
)
from meshwright.planner.operators.operators import gather_sequence, matmul, norm, reduce_activation

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Architecture
    from meshwright.planner.documents.profile import ChunkedLoss

INDEX = 8
"""Bytes of a token id."""
GRID_BYTES = 16
"""Rows of logits that do not begin at multiples of it are made in two parts, which are copied
together, and apart again for backward (runtime/techniques/aligned_linear.py)."""


def embedding(a: Architecture, setting: Setting) -> OperatorTable:
    """Token lookup, positions; patches for images.

    Row-wise division of the table: every rank looks up its own rows, the sums are scattered.
    """
    e, t = setting.element_bytes, setting.tensor
    full = setting.tokens * a.hidden_size * e
    ids = setting.tokens * INDEX
    if a.patches is not None:
        pixels = a.patches.channels * a.patches.patch_size**2
        image = setting.tokens * pixels * e
        flops = 2 * setting.tokens * pixels * a.hidden_size
        lookup = matmul(
            "patches", ("x",), {"embedding": full}, flops=flops, moved_bytes=image + full
        )
        return OperatorTable(
            kind="embedding", operators=(lookup,), input_bytes=image, output="embedding"
        )
    width = embedding_width(a)
    looked_up = setting.tokens * width * e
    rows = a.vocab_size * width * e / t
    # OPT looks positions up like tokens; of GPT-2's table the first rows are taken.
    places = {"places": 1.0 * setting.seq_len / t * INDEX} if a.family == "opt" else {}
    # With a divided table a rank keeps the ids that it has rows for, and a mask of the others.
    kept = {"own_ids": ids + setting.tokens} if setting.divides_tensors else {}
    saved = (*(kept or ("x",)), *places)
    kernels = setting.kernels
    parts = t if setting.sequence_parallel else 1
    operators = [
        Operator(
            name="lookup",
            kind="memory",
            inputs=("x",),
            outputs={"looked_up": looked_up, **kept, **places},
            saved=saved,
            moved_bytes=2 * looked_up,
            backward_moved_bytes=2 * rows + 2 * looked_up,
            workspace_bytes=looked_up if setting.divides_tensors else 0.0,
        )
    ]
    tensor = "looked_up"
    if setting.divides_tensors:
        whole = reduce_activation(setting, tensor, "embedded", looked_up)
        only: Pass | None = None if setting.sequence_parallel else "forward"
        operators.append(replace(whole, only=only, copied_bytes=0.0, workspace_bytes=0.0))
        tensor = "embedded"
    if width != a.hidden_size:
        operators.append(
            matmul(
                "project_in",
                (tensor,),
                {"projected": full / parts},
                flops=2 * setting.stream_tokens * width * a.hidden_size,
                moved_bytes=(looked_up + full) / parts + width * a.hidden_size * e,
            )
        )
        tensor = "projected"
    if a.positions == "learned" or a.token_types:
        operators.append(
            Operator(
                name="positions",
                kind="memory",
                inputs=(tensor,),
                outputs={"positioned": full / parts},
                moved_bytes=3 * full / parts,
                backward_moved_bytes=kernels.back(3 * full / parts, 3 * full / parts),
                kernels=2,
            )
        )
        tensor = "positioned"
    if kernels.dropout and not a.gated_mlp:
        mask = setting.stream_tokens * a.hidden_size
        moved = 2 * full / parts + mask
        operators.append(
            Operator(
                name="embedding_dropout",
                kind="memory",
                inputs=(tensor,),
                outputs={"drawn": full / parts, "embedding_mask": mask},
                saved=("embedding_mask",),
                moved_bytes=moved,
                backward_moved_bytes=kernels.back(moved, moved),
            )
        )
        tensor = "drawn"
    if a.token_types or a.embedding_norm:
        operators.append(norm(a, setting, tensor, "embedding_norm", width=a.hidden_size))
        tensor = "embedding_norm"
    return OperatorTable(
        kind="embedding",
        operators=tuple(operators),
        input_bytes=ids,
        output=tensor,
    )


def head(a: Architecture, setting: Setting) -> OperatorTable:
    """Final norm, output projection and loss in fp32, vocabulary divided by the tensor degree."""
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    operators: list[Operator] = []
    tensor = "x"
    if a.pre_norm:
        operators.append(norm(a, setting, tensor, "final_norm", width=a.hidden_size))
        tensor = "final_norm"
    outputs = float(a.classes or a.vocab_size)
    width = a.hidden_size if a.classes else embedding_width(a)
    stream = setting.stream_tokens
    share = stream * a.hidden_size * e
    if a.head_transform:
        operators += [
            matmul(
                "transform",
                (tensor,),
                {"transform": share},
                flops=2 * stream * a.hidden_size**2,
                moved_bytes=2 * share,
            ),
            Operator(
                name="transform_activation",
                kind="memory",
                inputs=("transform",),
                outputs={"transformed": share},
                saved=("transform",),
                moved_bytes=2 * share,
                backward_moved_bytes=3 * share,
            ),
            norm(a, setting, "transformed", "transform_norm", width=a.hidden_size),
        ]
        tensor = "transform_norm"
    if width != a.hidden_size:
        operators.append(
            matmul(
                "project_out",
                (tensor,),
                {"project_out": stream * width * e},
                flops=2 * stream * a.hidden_size * width,
                moved_bytes=share,
            )
        )
        tensor = "project_out"
    rows, source = tokens, tensor
    if a.classes:
        rows, t = 1.0 * setting.micro_batch, 1
    else:
        gather, tensor = gather_sequence(setting, source, "head_gather", tokens * width * e)
        operators += gather
        if setting.divides_tensors and not setting.sequence_parallel:
            operators.append(_summed_gradient(tensor, tokens * width * e))
    logits = rows * outputs / t
    product = matmul(
        "logits",
        (tensor,),
        {"logits": logits * e},
        flops=2 * rows * width * outputs / t,
        moved_bytes=(rows * width + width * outputs / t + logits) * e,
        weights=width * outputs / t,
    )
    if setting.loss is not None and not a.classes:
        operators += _loss_in_chunks(a, setting, product, logits=logits, rows=rows, width=width)
        return OperatorTable("head", tuple(operators), input_bytes=share, output="loss")
    kernels = setting.kernels
    if kernels is MODULES:
        operators.append(_in_parts(product, outputs / t * e))
    else:
        operators.append(_as_trained(setting, product, source))
    if kernels.peak_logit_bytes:
        operators.append(_one_loss(setting, logits * e, rows * outputs))
        return OperatorTable(
            kind="head",
            operators=tuple(operators),
            input_bytes=share,
            output="loss",
            outside=1,
        )
    changed = _logits_operators(a, logits * e)
    operators += changed
    tensor = held = next(iter(changed[-1].outputs)) if changed else "logits"
    if e != FP32:
        operators.append(
            Operator(
                name="upcast",
                kind="memory",
                inputs=(tensor,),
                outputs={"logits_fp32": logits * FP32},
                fp32=("logits_fp32",),
                moved_bytes=logits * (e + FP32),
                backward_moved_bytes=logits * (e + FP32),
            )
        )
        tensor = "logits_fp32"
    divided = setting.divides_tensors and not a.classes
    loss = _loss(tensor, logits * FP32, held=held, rows=rows, divided=divided)
    if e != FP32:
        loss.insert(0, operators.pop())
    return OperatorTable(
        kind="head",
        operators=(*operators, *loss),
        input_bytes=share,
        output="loss",
        outside=len(loss),
    )


GATHERED_LOGIT_BYTES = 4
"""Bytes per logit of gathering all shares: the parts in 16 bits and their concatenation."""
LOSS_BYTES, LOSS_BACKWARD_BYTES = 16, 12
"""Traffic per logit of a loss that is one operator."""


def _logits_operators(a: Architecture, size: float) -> list[Operator]:
    """Return a family's operators on `size` bytes of logits before the loss."""
    if a.family == "gemma2":  # divided by the cap, tanh, times the cap
        return [
            Operator(
                name="cap",
                kind="memory",
                inputs=("logits",),
                outputs={"capped": size},
                saved=("capped",),
                moved_bytes=6 * size,
                backward_moved_bytes=9 * size,
                kernels=3,
            )
        ]
    if a.family == "cohere":  # times a constant
        return [
            Operator(
                name="scaled_logits",
                kind="memory",
                inputs=("logits",),
                outputs={"scaled_logits": size},
                moved_bytes=2 * size,
                backward_moved_bytes=2 * size,
            )
        ]
    return []


def _chunk_rows(setting: Setting, rows: float, widening: float) -> float:
    """Return the rows whose logits exist at once; logits are `widening` times as wide as inputs.

    Liger cuts them into as many chunks as let a chunk's logits have no more elements than all
    inputs, of a power of two of rows (Liger-Kernel, ops/fused_linear_cross_entropy.py, inc_factor).
    """
    assert setting.loss is not None
    if not setting.kernels.chunks_by_width:
        return smaller(float(setting.loss.rows), rows)
    fewest = np.ceil(rows / math.ceil(widening))
    return smaller(2.0 ** np.ceil(np.log2(fewest)), rows)


def chunked_product(product: Operator, chunks: float, *, weight_bytes: float) -> Operator:
    """Return the output projection with the traffic of its weights in each further chunk of rows.

    Each chunk reads the weights for its logits and for its inputs' gradient, and reads and writes
    the gradient of the weights to add its own.
    """
    again = (chunks - 1) * weight_bytes
    return replace(
        product,
        moved_bytes=product.moved_bytes + again,
        backward_moved_bytes=product.backward_moved_bytes + (1 if product.frozen else 3) * again,
    )


def _summed_gradient(source: str, size: float) -> Operator:
    """Each rank's columns give a part of the gradient of what all of them multiplied."""
    return Operator(
        name="head_sum",
        kind="all_reduce",
        inputs=(source,),
        outputs={},
        moved_bytes=size,
        only="backward",
    )


def _in_parts(product: Operator, row_bytes: float) -> Operator:
    """The output projection with the copies of logits whose rows, in bytes, are off the grid."""
    copied = 2 * product.outputs["logits"] * (row_bytes % GRID_BYTES != 0)
    return replace(
        product,
        moved_bytes=product.moved_bytes + copied,
        backward_moved_bytes=product.backward_moved_bytes + copied,
    )


def _as_trained(setting: Setting, product: Operator, source: str) -> Operator:
    """The output projection, which keeps the gathered sequence or its shard, and is never in 8
    bits."""
    kernels = setting.kernels
    saved = product.inputs if kernels.keeps_gathered else (source,)
    moved = product.moved_bytes * (1 if kernels.frozen else 2)
    return replace(
        product, saved=saved, frozen=kernels.frozen is not None, backward_moved_bytes=moved
    )


def _loss_in_chunks(
    a: Architecture,
    setting: Setting,
    product: Operator,
    *,
    logits: float,
    rows: float,
    width: float,
) -> list[Operator]:
    """The output projection of `rows` of this width, and its loss, a chunk of rows at a time."""
    assert setting.loss is not None
    e = setting.element_bytes
    chunk_rows = _chunk_rows(setting, rows, a.vocab_size / width)
    # In fp32; what they were made from or become, where that is in 16 bits; a cap's slope.
    each = FP32 + (e if e != FP32 else 0) + FP32 * (a.family == "gemma2")
    product = replace(product, frozen=setting.kernels.frozen is not None)
    product = chunked_product(product, np.ceil(rows / chunk_rows), weight_bytes=product.weights * e)
    working, gradients = each * chunk_rows * (logits / rows), (rows * width + product.weights) * e
    return chunked_loss(product, setting.loss, logits, working, gradients)


def chunked_loss(
    product: Operator, loss: ChunkedLoss, logits: float, working: float, gradients: float
) -> list[Operator]:
    """The output projection and its loss, with `working` bytes for the chunk of logits at hand.

    `gradients` are the bytes of those for the rows and for the weights.  Precomputed ones wait for
    backward in place of the projection's input.  Their products are booked on backward all the
    same: the sum of both passes is what a step takes.  Recomputed ones need the logits, and so the
    projection, a second time.
    """
    early = loss.gradients == "precomputed"
    saved = () if early else product.inputs
    product = replace(product, outputs={"logits": 0.0}, saved=saved, remade=not early)
    last = Operator(
        name="loss",
        kind="memory",
        inputs=("logits",),
        outputs={"loss": FP32},
        saved=("gradients",) if early else (),
        moved_bytes=LOSS_BYTES * logits,
        backward_moved_bytes=2 * gradients
        if early
        else (LOSS_BYTES + LOSS_BACKWARD_BYTES) * logits,
        workspace_bytes=0.0 if early else working,
    )
    if not early:
        return [product, last]
    # No gradient of this one is needed: its memory is of forward alone.
    operator = Operator(
        name="chunks",
        kind="memory",
        inputs=("logits",),
        outputs={"gradients": gradients},
        moved_bytes=LOSS_BACKWARD_BYTES * logits,
        workspace_bytes=working,
    )
    return [product, operator, last]


def _one_loss(setting: Setting, size: float, whole: float) -> Operator:
    """A loss that needs a framework's bytes for each logit at its peak, those of `size` included.

    Where tensor parallelism does not divide it, it works on the `whole` vocabulary's logits.
    """
    kernels = setting.kernels
    logits = size / setting.element_bytes
    held, each = logits, kernels.peak_logit_bytes
    if setting.divides_tensors and not kernels.divided_loss:
        held = whole * (1 + GATHERED_LOGIT_BYTES / each)
    elif setting.divides_tensors:
        each = kernels.divided_logit_bytes or each
    return Operator(
        name="loss",
        kind="memory",
        inputs=("logits",),
        outputs={"loss": FP32},
        moved_bytes=LOSS_BYTES * logits,
        backward_moved_bytes=LOSS_BACKWARD_BYTES * logits,
        workspace_bytes=larger(0.0, each * held - size),
    )


def _loss(tensor: str, size: float, *, held: str, rows: float, divided: bool) -> list[Operator]:
    """Cross entropy: log-softmax keeps its fp32 output, its input's gradient is as large.

    The caller of the loss owns the logits.
    """
    operators = [
        Operator(
            name="log_softmax",
            kind="memory",
            inputs=(tensor,),
            holds=(held,),
            outputs={"log_probabilities": size},
            fp32=("log_probabilities",),
            saved=("log_probabilities",),
            moved_bytes=3 * size,
            backward_moved_bytes=3 * size,
            workspace_bytes=size if divided else 0.0,
        )
    ]
    if divided:
        # Largest logit, sum of exponentials, chosen logit: one number per token each.
        operators.append(
            Operator(
                name="loss_reduce",
                kind="all_reduce",
                inputs=("log_probabilities",),
                outputs={},
                moved_bytes=3 * rows * FP32,
            )
        )
    operators.append(
        Operator(
            name="loss",
            kind="memory",
            inputs=("log_probabilities",),
            outputs={"loss": FP32},
            saved=(),
            moved_bytes=rows * FP32,
            backward_moved_bytes=size,
        )
    )
    return operators


def embedding_width(a: Architecture) -> int:
    """Width of the token embedding and of the output projection."""
    return a.embedding_size or a.hidden_size
