"""Operators at the two ends of a model: embedding, head with its loss."""

from __future__ import annotations

from planner.layers.operator_table import FP32, Operator, Setting, Table
from planner.layers.operators import gathered, matmul, norm
from planner.model import Architecture

INDEX = 8
"""Bytes of a token id."""


def embedding(a: Architecture, setting: Setting) -> Table:
    """Token lookup, positions; patches for images.

    Row-wise division of the table: every rank looks up what it holds, the sums are scattered.
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
        return Table(kind="embedding", operators=(lookup,), input_bytes=image, output="embedding")
    width = embedding_width(a)
    looked_up = setting.tokens * width * e
    rows = a.vocab_size * width * e / t
    # OPT looks positions up like tokens; of GPT-2's table the first rows are taken.
    places = {"places": 1.0 * setting.seq_len / t * INDEX} if a.family == "opt" else {}
    # Of a divided table a rank keeps the ids that it has rows for, and a mask of the others.
    kept = {"own_ids": ids + setting.tokens} if setting.divides_tensors else {}
    saved = (*(kept or ("x",)), *places)
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
        operators.append(
            Operator(
                name="embedding_scatter",
                kind="reduce_scatter",
                inputs=(tensor,),
                outputs={"embedded": looked_up / t},
                moved_bytes=looked_up,
            )
        )
        tensor = "embedded"
    if width != a.hidden_size:
        operators.append(
            matmul(
                "project_in",
                (tensor,),
                {"projected": full / t},
                flops=2 * setting.stream_tokens * width * a.hidden_size,
                moved_bytes=(looked_up + full) / t + width * a.hidden_size * e,
            )
        )
        tensor = "projected"
    if a.positions == "learned" or a.token_types:
        operators.append(
            Operator(
                name="positions",
                kind="memory",
                inputs=(tensor,),
                outputs={"positioned": full / t},
                moved_bytes=3 * full / t,
                backward_moved_bytes=3 * full / t,
                kernels=2,
            )
        )
        tensor = "positioned"
    if a.token_types or a.embedding_norm:
        operators.append(norm(a, setting, tensor, "embedding_norm", width=a.hidden_size))
        tensor = "embedding_norm"
    return Table(
        kind="embedding",
        operators=tuple(operators),
        input_bytes=ids,
        output=tensor,
    )


def head(a: Architecture, setting: Setting) -> Table:
    """Final norm, output projection and loss in fp32, vocabulary divided by the tensor degree."""
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    full = tokens * a.hidden_size * e
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
    rows = tokens
    if a.classes:
        rows, t = 1.0 * setting.micro_batch, 1
    else:
        gather, tensor = gathered(setting, tensor, "head_gather", tokens * width * e)
        operators += gather
    logits = rows * outputs / t
    operators.append(
        matmul(
            "logits",
            (tensor,),
            {"logits": logits * e},
            flops=2 * rows * width * outputs / t,
            moved_bytes=(rows * width + width * outputs / t + logits) * e,
        )
    )
    tensor = held = "logits"
    if a.family == "gemma2":  # divided by the cap, tanh, times the cap
        operators.append(
            Operator(
                name="cap",
                kind="memory",
                inputs=("logits",),
                outputs={"capped": logits * e},
                saved=("capped",),
                moved_bytes=6 * logits * e,
                backward_moved_bytes=9 * logits * e,
                kernels=3,
            )
        )
        tensor = held = "capped"
    if a.family == "cohere":  # times a constant
        operators.append(
            Operator(
                name="scaled_logits",
                kind="memory",
                inputs=("logits",),
                outputs={"scaled_logits": logits * e},
                moved_bytes=2 * logits * e,
                backward_moved_bytes=2 * logits * e,
            )
        )
        tensor = held = "scaled_logits"
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
    return Table(
        kind="head",
        operators=(*operators, *loss),
        input_bytes=full / setting.tensor,
        output="loss",
        outside=len(loss),
    )


def _loss(tensor: str, size: float, *, held: str, rows: float, divided: bool) -> list[Operator]:
    """Cross entropy: log-softmax keeps its fp32 output, its input's gradient is as large.

    Who asked for the loss holds the logits.
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
