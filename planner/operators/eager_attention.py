"""Operators of attention that writes its scores to memory: GPT-J, and Bloom's and MPT's with ALiBi.

`transformers` has no fused kernel for these families' scores: every query meets every key, the
softmax is in fp32, and both its output and its copy in the working type are saved.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.documents.model import Architecture
from meshwright.planner.operators.operator_table import FP32, Operator, Setting
from meshwright.planner.operators.operators import gather_sequence, matmul, projections, row_wise

FAMILIES = ("bloom", "gptj", "mpt")


def writes_scores(a: Architecture) -> bool:
    """Whether a family's attention has no fused kernel.

    torch's fused kernels want as many heads of keys as of queries, or to know that they are
    shared: Falcon's single head is neither, and what stands in for them works in fp32.
    """
    return a.family in FAMILIES or (a.family == "falcon" and a.kv_heads == 1 < a.heads)


def attention(a: Architecture, setting: Setting, source: str) -> list[Operator]:
    """Projections, copies by head, scores, bias and mask, softmax, values, output projection."""
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    full = tokens * a.hidden_size * e
    width, key_width = a.heads * a.head_dim / t, a.kv_heads * a.head_dim / t
    query, key = tokens * width * e, tokens * key_width * e
    apart = a.family == "gptj"
    columns = width + 2 * key_width
    operators, whole = gather_sequence(setting, source, "attention_gather", full)
    projected = {"q_linear": query, "k_linear": key, "v_linear": key}
    outputs = projected if apart else {"qkv": query + 2 * key}
    operators += projections(a, setting, source, whole, outputs, width=columns)
    by_head = _by_head(a, query / e, e, tuple(projected) if apart else ("qkv",))
    operators.append(by_head)
    names, sizes = ("q", "k", "v"), by_head.outputs
    if setting.divides_sequence:
        names = ("q", "k_all", "v_all")
        sizes = {"q": sizes["q"]} | {
            f"{name}_all": sizes[name] * setting.context for name in ("k", "v")
        }
        operators.append(
            Operator(
                name="kv_gather",
                kind="all_gather",
                inputs=("k", "v"),
                outputs={name: sizes[name] for name in names[1:]},
                moved_bytes=sizes["k_all"] + sizes["v_all"],
                axis="context",
            )
        )
    operators += _scores(a, setting, names, sizes)
    return [*operators, *row_wise(a, setting, "core", "attention_out", width=width)]


def _scores(
    a: Architecture, setting: Setting, names: tuple[str, str, str], sizes: Mapping[str, float]
) -> list[Operator]:
    """Two products with the softmax between them."""
    q, k, v = names
    e, keys = setting.element_bytes, setting.seq_len
    scores = setting.tokens * keys * a.heads / setting.tensor
    wide = e if a.family in ("bloom", "mpt") else FP32
    flops = 2 * scores * a.head_dim
    # MPT keeps the mask of a sequence, a byte for each pair.
    mask = {"mask": 1.0 * keys * keys} if a.family == "mpt" else {}
    operators = [
        matmul(
            "scores",
            (q, k),
            {"scores": scores * wide},
            flops=flops,
            moved_bytes=sizes[q] + sizes[k] + scores * wide,
        ),
        Operator(
            name="biased",
            kind="memory",
            inputs=("scores",),
            outputs={"biased": scores * wide} | mask,
            saved=tuple(mask),
            moved_bytes=4 * scores * wide,
            backward_moved_bytes=2 * scores * wide,
            kernels=2,
        ),
        Operator(
            name="softmax",
            kind="memory",
            inputs=("biased",),
            outputs={"chances": scores * FP32},
            saved=("chances",),
            fp32=("chances",),
            moved_bytes=scores * (wide + FP32),
            backward_moved_bytes=scores * (2 * FP32 + wide),
        ),
    ]
    chances, held = "chances", FP32
    if e != FP32 and a.family != "falcon":
        chances, held = "narrow_chances", e
        operators.append(
            Operator(
                name=chances,
                kind="memory",
                inputs=("chances",),
                outputs={chances: scores * e},
                moved_bytes=scores * (FP32 + e),
                backward_moved_bytes=scores * (FP32 + e),
            )
        )
    out = sizes["q"] / wide * e
    values = out / e * held
    return [
        *operators,
        matmul(
            "values",
            (chances, v),
            {"values": values},
            flops=flops,
            moved_bytes=scores * held + sizes[v] + values,
        ),
        Operator(
            name="core",
            kind="memory",
            inputs=("values",),
            outputs={"core": out},
            moved_bytes=values + out,
            backward_moved_bytes=values + out,
        ),
    ]


def _by_head(a: Architecture, elements: float, e: int, inputs: tuple[str, ...]) -> Operator:
    """Copies of queries, keys and values that lie head by head, of as many heads each.

    GPT-J's queries and keys are turned, and in fp32; Falcon's are all so.
    """
    wide = FP32 if a.family in ("gptj", "falcon") else e
    values = FP32 if a.family == "falcon" else e
    outputs = {"q": elements * wide, "k": elements * wide, "v": elements * values}
    turned = 20 * elements * e if a.positions == "rotary" else 0.0
    return Operator(
        name="by_head",
        kind="memory",
        inputs=inputs,
        outputs=outputs,
        fp32=("q", "k", "v")[: 3 if a.family == "falcon" else 2] if wide != e else (),
        moved_bytes=2 * sum(outputs.values()) + turned,
        backward_moved_bytes=2 * sum(outputs.values()) + turned,
        kernels=15 if a.positions == "rotary" else 3,
    )
