"""Operators of the feed-forward part of a block: plain or gated MLP, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace

from planner.layers.operator_table import FP32, Operator, Setting
from planner.layers.operators import elementwise, exchange, gathered, matmul, row_wise
from planner.model import Architecture

ROUTING_SKEW = 1.1
"""Busiest expert rank over the mean, for experts on several ranks.  Measured MoE kernels on H100
take 0.9-1.7 times the balanced seconds at 8 ranks under skewed routing (aiconfigurator data)."""


def mlp(
    a: Architecture, setting: Setting, source: str, name: str, *, ffn_size: float
) -> list[Operator]:
    """Up projection (with a gate), activation, down projection."""
    tokens, width = setting.tokens, ffn_size / setting.tensor
    full = tokens * a.hidden_size * setting.element_bytes
    operators, whole = gathered(setting, source, f"{name}_gather", full)
    operators += _feed_forward(a, setting, whole, name, tokens=tokens, width=width)
    return [*operators, *row_wise(a, setting, f"{name}_product", f"{name}_out", width=width)]


def experts(a: Architecture, setting: Setting, source: str) -> list[Operator]:
    """Router, dispatch, routed experts, combination, and experts that all tokens share.

    With experts on several ranks, each rank sends its own tokens; otherwise experts are divided
    like a dense MLP.
    """
    experts = a.experts
    assert experts is not None
    e = setting.element_bytes
    spread = setting.spreads_experts
    divided = 1 if spread else setting.tensor
    partial = setting.divides_tensors and not spread
    tokens = setting.stream_tokens if spread else setting.tokens
    full = tokens * a.hidden_size * e
    operators: list[Operator] = []
    whole = source
    if not spread:
        operators, whole = gathered(setting, source, "mlp_gather", full)
    scores = tokens * experts.count * FP32
    sent = experts.per_token * full
    routed_by, router_bytes = whole, e
    if a.family in ("deepseek_v2", "deepseek_v3") and e != FP32:
        # Tokens and matrix are multiplied in fp32, and the product keeps both copies.
        routed_by, router_bytes = "router_fp32", FP32
        matrix = 1.0 * a.hidden_size * experts.count * FP32
        wide = tokens * a.hidden_size * FP32
        operators.append(
            Operator(
                name="router_upcast",
                kind="memory",
                inputs=(whole,),
                outputs={"router_fp32": wide, "router_matrix_fp32": matrix},
                fp32=("router_fp32", "router_matrix_fp32"),
                saved=("router_matrix_fp32",),
                moved_bytes=full + wide + 1.5 * matrix,
                backward_moved_bytes=full + wide + 1.5 * matrix,
                kernels=2,
            )
        )
    operators += [
        matmul(
            "router",
            (routed_by,),
            {"router": tokens * experts.count * router_bytes},
            flops=2 * tokens * a.hidden_size * experts.count,
            moved_bytes=full + a.hidden_size * experts.count * e,
        ),
        Operator(
            name="routing",
            kind="memory",
            inputs=("router",),
            outputs={"scores": scores, "weights": tokens * experts.per_token * FP32},
            saved=("scores", "weights"),
            fp32=("scores", "weights"),
            moved_bytes=4 * scores,
            backward_moved_bytes=4 * scores,
            kernels=6,
        ),
        Operator(
            name="dispatch",
            kind="memory",
            inputs=(whole,),
            outputs={"dispatched": sent},
            moved_bytes=2 * sent,
            backward_moved_bytes=2 * sent,
            kernels=4,
        ),
    ]
    arrived, skew = "dispatched", 1.0
    if spread:
        skew = ROUTING_SKEW
        operators.append(exchange("dispatched", "arrived", sent * skew))
        arrived = "arrived"
    count = tokens * experts.per_token * skew
    width = experts.ffn_size / divided
    local_experts = experts.count / setting.expert
    operators += _feed_forward(
        a, setting, arrived, "expert", tokens=count, width=width, weights=local_experts
    )
    operators.append(
        matmul(
            "expert_down",
            ("expert_product",),
            {"expert_down": sent * skew},
            flops=2 * count * width * a.hidden_size,
            moved_bytes=(count * (width + a.hidden_size) + local_experts * width * a.hidden_size)
            * e,
        )
    )
    returned = "expert_down"
    if spread:
        operators.append(exchange("expert_down", "returned", sent * skew))
        returned = "returned"
    routed = "mlp_out_partial" if partial else "mlp_out"
    shared = experts.shared_ffn_size or experts.shared * experts.ffn_size
    combined = "routed_out" if shared else routed
    operators.append(
        Operator(
            name="combine",
            kind="memory",
            inputs=(returned, "weights"),
            outputs={combined: full},
            saved=(returned, "weights"),
            moved_bytes=2 * sent + full,
            backward_moved_bytes=3 * sent + full,
            kernels=3,
        )
    )
    if shared:
        operators += _feed_forward(
            a, setting, whole, "shared", tokens=tokens, width=shared / divided
        )
        operators.append(
            matmul(
                "shared_out",
                ("shared_product",),
                {"shared_out": full},
                flops=2 * tokens * a.hidden_size * shared / divided,
                moved_bytes=(
                    tokens * (a.hidden_size + shared / divided) + a.hidden_size * shared / divided
                )
                * e,
            )
        )
        added = "shared_out"
        if experts.shared_gate:
            added, weighed = "shared_weighed", ("shared_weight", "shared_out")
            operators += [
                matmul(
                    "shared_weight",
                    (whole,),
                    {"shared_weight": tokens * e},
                    flops=2 * tokens * a.hidden_size,
                    moved_bytes=full + tokens * e,
                ),
                elementwise(added, weighed, full, saved=weighed),
            ]
        operators.append(
            Operator(
                name="shared_sum",
                kind="memory",
                inputs=("routed_out", added),
                outputs={routed: full},
                moved_bytes=3 * full,
                backward_moved_bytes=3 * full,
            )
        )
    if partial:
        operators.append(
            Operator(
                name="mlp_out_scatter",
                kind="reduce_scatter",
                inputs=("mlp_out_partial",),
                outputs={"mlp_out": full / divided},
                moved_bytes=full,
            )
        )
    return operators


def _feed_forward(
    a: Architecture,
    setting: Setting,
    source: str,
    name: str,
    *,
    tokens: float,
    width: float,
    weights: float = 1.0,
) -> list[Operator]:
    """Up projection and activation; `weights` matrices are read where experts share a rank."""
    e = setting.element_bytes
    size = tokens * width * e
    up = matmul(
        f"{name}_up",
        (source,),
        {f"{name}_up": size},
        flops=2 * tokens * a.hidden_size * width,
        moved_bytes=(tokens * (a.hidden_size + width) + weights * a.hidden_size * width) * e,
    )
    if not a.gated_mlp:
        return [up, *_activation(a, name, size)]
    gate, gated = f"{name}_gate", f"{name}_gated"
    return [
        replace(up, name=gate, outputs={gate: size}),
        elementwise(gated, (gate,), size, saved=(gate,)),
        up,
        replace(
            elementwise(f"{name}_product", (gated, up.name), size, saved=(gated, up.name)),
            holds=(source,),
        ),
    ]


def _activation(a: Architecture, name: str, size: float) -> list[Operator]:
    """The activation of an ungated MLP, one kernel that keeps its input.

    GPT-2's and GPT-J's tanh approximation 0.5 u (1 + tanh(c (u + 0.044715 u³))) is written out in
    `transformers`: eight kernels, which keep u, its half, the tanh and one plus that.
    """
    up, product = f"{name}_up", f"{name}_product"
    if a.family == "opt":  # ReLU keeps its result, which the next product keeps anyway
        return [elementwise(product, (up,), size, saved=(product,))]
    if a.written_gelu:
        return _fast_gelu(name, size)
    if a.family not in ("gpt2", "gptj"):
        return [elementwise(product, (up,), size, saved=(up,))]
    half, cube, scaled, inner, argument, tanh, weight = (
        f"{name}_{part}"
        for part in ("half", "cube", "scaled", "inner", "argument", "tanh", "weight")
    )
    return [
        elementwise(half, (up,), size),
        elementwise(cube, (up,), size, saved=(up,)),
        elementwise(scaled, (cube,), size),
        elementwise(inner, (up, scaled), size),
        elementwise(argument, (inner,), size),
        elementwise(tanh, (argument,), size, saved=(tanh,)),
        elementwise(weight, (tanh,), size),
        elementwise(product, (half, weight), size, saved=(half, weight)),
    ]


def _fast_gelu(name: str, size: float) -> list[Operator]:
    """0.5 u (1 + tanh(c u (1 + 0.044715 u u))), written out: nine kernels, which keep both factors
    of each product and the tanh."""
    up = f"{name}_up"
    half, scaled, small, square, more, argument, tanh, weight = (
        f"{name}_{part}"
        for part in ("half", "scaled", "small", "square", "more", "argument", "tanh", "weight")
    )
    return [
        elementwise(half, (up,), size),
        elementwise(scaled, (up,), size),
        elementwise(small, (up,), size),
        elementwise(square, (small, up), size, saved=(small, up)),
        elementwise(more, (square,), size),
        elementwise(argument, (scaled, more), size, saved=(scaled, more)),
        elementwise(tanh, (argument,), size, saved=(tanh,)),
        elementwise(weight, (tanh,), size),
        elementwise(f"{name}_product", (half, weight), size, saved=(half, weight)),
    ]
