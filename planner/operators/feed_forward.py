"""Operators of the feed-forward part of a block: plain or gated MLP, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from meshwright.planner.operators.expert_routing import LAYERS_A_RANK, routing_of
from meshwright.planner.operators.operator_table import FP32, GroupAxis, Operator, Setting, smaller
from meshwright.planner.operators.operators import (
    elementwise,
    exchange,
    gather_sequence,
    linear,
    matmul,
    narrow_copy,
    of_whole,
    reduce_activation,
    row_wise,
    undivided_side,
)

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Architecture, Experts
    from meshwright.planner.operators.kernels import KernelSettings

INDEX_BYTES = 8
"""Bytes of the index of an expert that a token chose."""


def mlp(
    a: Architecture, setting: Setting, source: str, name: str, *, ffn_size: float
) -> list[Operator]:
    """Up projection (with a gate), activation, down projection."""
    tokens, width = setting.tokens, ffn_size / setting.tensor
    full = tokens * a.hidden_size * setting.element_bytes
    operators, whole = gather_sequence(setting, source, f"{name}_gather", full, adapted=False)
    operators += _feed_forward(a, setting, source, whole, name, tokens=tokens, width=width)
    return [
        *operators,
        *row_wise(a, setting, f"{name}_product", f"{name}_out", width=width, adapted=False),
    ]


def experts(a: Architecture, setting: Setting, source: str) -> list[Operator]:
    """Router, dispatch, routed experts, combination, and experts that all tokens share.

    With experts on several ranks, each rank sends its own tokens; otherwise experts are divided
    like a dense MLP.
    """
    experts = a.experts
    assert experts is not None
    e, kernels = setting.element_bytes, setting.kernels
    spread = setting.spreads_experts
    divided = setting.expert_tensor if spread else setting.tensor
    partial = setting.divides_tensors and not spread
    tokens = setting.tokens
    if spread:
        tokens = setting.tokens / setting.tensor * setting.expert_tensor
    full = tokens * a.hidden_size * e
    operators: list[Operator] = []
    whole = source
    if not spread:
        operators, whole = gather_sequence(setting, source, "mlp_gather", full, adapted=False)
    operators += _router(a, setting, source, whole, tokens=tokens)
    operators.append(_routing(experts, kernels, tokens))
    width = experts.ffn_size / divided
    local_experts = experts.count / setting.expert
    routed = "mlp_out_partial" if partial else "mlp_out"
    shared = experts.shared_ffn_size or experts.shared * experts.ffn_size
    combined = "routed_out" if shared else routed
    if spread and setting.dispatch == "allgather":
        beside = _shared_experts(
            a, setting, source, whole, routed, tokens=tokens, width=shared / divided
        )
        gathered_experts = _of_gathered_tokens(a, setting, whole, combined, tokens=tokens)
        return [*operators, *gathered_experts, *(beside if shared else ())]
    skew = routing_of(experts, kernels.expert_spread).busiest_load(setting.expert if spread else 1)
    sent = experts.per_token * full
    if spread and setting.relays:
        there, arrived, back = _hierarchical_dispatch(a, setting, whole, combined, full)
    else:
        there, arrived, back = _dispatch_and_combine(a, setting, whole, combined, full)
    routed_to: list[Operator] = []
    count = tokens * experts.per_token * skew
    # Tiles are half empty at the end of each expert's tokens, on average.
    rate = kernels.expert_share * count / (count + local_experts * kernels.expert_tile / 2)
    routed_to += _feed_forward(
        a,
        setting,
        arrived,
        arrived,
        "expert",
        tokens=count,
        width=width,
        matrices=local_experts,
        share=rate,
    )
    matrix = local_experts * width * a.hidden_size
    down = matmul(
        "expert_down",
        ("expert_product",),
        {"expert_down": sent * skew},
        flops=2 * count * width * a.hidden_size,
        moved_bytes=(count * (width + a.hidden_size) + matrix) * e,
        weights=matrix,
        share=rate,
    )
    routed_to += linear(setting, down, size=count * width * e, adapted=False)
    if a.mlp_bias:
        routed_to += _output_biases(kernels, sent * skew)
    if spread:
        there, routed_to, back = (_as_kept(a, setting, each) for each in (there, routed_to, back))
    operators += [*there, *routed_to, *back]
    if shared:
        operators += _shared_experts(
            a, setting, source, whole, routed, tokens=tokens, width=shared / divided
        )
    if partial:
        whole_sum = reduce_activation(setting, "mlp_out_partial", "mlp_out", full)
        operators.append(replace(whole_sum, copied_bytes=0.0, workspace_bytes=0.0))
    return operators


def _as_kept(a: Architecture, setting: Setting, operators: list[Operator]) -> list[Operator]:
    """Return operators of the busiest rank's tokens with the bytes that a rank keeps of its layers.

    Seconds are those of a layer's busiest rank; memory adds layers up.
    """
    experts = a.experts
    assert experts is not None
    routing = routing_of(experts, setting.kernels.expert_spread)
    kept = routing.busiest_load(setting.expert, LAYERS_A_RANK)
    kept = kept / routing.busiest_load(setting.expert)
    return [
        replace(
            operator,
            outputs={name: size * kept for name, size in operator.outputs.items()},
            workspace_bytes=operator.workspace_bytes * kept,
        )
        if operator.name not in ("dispatch", "combine")
        else operator
        for operator in operators
    ]


def _routing(experts: Experts, kernels: KernelSettings, tokens: float) -> Operator:
    """Choose the experts of each token by its scores."""
    scores = tokens * experts.count * FP32
    return Operator(
        name="routing",
        kind="memory",
        inputs=("router",),
        outputs={"scores": scores, "weights": tokens * experts.per_token * FP32},
        saved=("scores", "weights"),
        fp32=("scores", "weights"),
        moved_bytes=4 * scores,
        backward_moved_bytes=kernels.back(4 * scores, 4 * scores),
        kernels=6,
    )


def _of_gathered_tokens(
    a: Architecture, setting: Setting, whole: str, combined: str, *, tokens: float
) -> list[Operator]:
    """Routed experts of tokens that all ranks gather (runtime/parallel/expert_parallel.py).

    Buffers have rows for the most tokens that a rank may get, those of all n ranks min(choices, own
    experts) times.  Only filled rows are multiplied: as many as each rank sends, n / c of the
    traffic of an exchange, c being the choices of a token.
    """
    experts = a.experts
    assert experts is not None
    e, kernels = setting.element_bytes, setting.kernels
    experts_here = experts.count / setting.expert
    every = setting.expert * tokens
    rows = every * smaller(float(experts.per_token), experts_here)
    load = routing_of(experts, kernels.expert_spread).busiest_load(setting.expert)
    filled = tokens * experts.per_token * load
    full, held = every * a.hidden_size * e, rows * a.hidden_size * e
    beside = a.family != "qwen2_moe" and experts.shared + experts.shared_ffn_size > 0
    rate = kernels.expert_share * filled / (filled + experts_here * kernels.expert_tile / 2)
    matrix = experts_here * experts.ffn_size * a.hidden_size
    fed = _feed_forward(
        a,
        setting,
        "arrived",
        "arrived",
        "expert",
        tokens=rows,
        width=experts.ffn_size,
        matrices=experts_here,
        share=rate,
    )
    down = matmul(
        "expert_down",
        ("expert_product",),
        {"expert_down": held},
        flops=2 * rows * experts.ffn_size * a.hidden_size,
        moved_bytes=held + (rows * experts.ffn_size + matrix) * e,
        weights=matrix,
        share=rate,
    )
    fed += linear(setting, down, size=rows * experts.ffn_size * e, adapted=False)
    return [
        Operator(
            name="expert_gather",
            kind="all_gather",
            inputs=(whole,),
            outputs={"all_tokens": full},
            moved_bytes=full,
            axis="expert",
            beside_shared=beside,
        ),
        Operator(
            name="dispatch",
            kind="memory",
            inputs=("all_tokens",),
            outputs={"arrived": held},
            moved_bytes=4 * held,
            backward_moved_bytes=kernels.back(4 * held, 4 * held + full),
            kernels=10,
            workspace_bytes=held,
        ),
        *(replace(op, flops=op.flops * filled / rows) for op in fed),
        Operator(
            name="combine",
            kind="memory",
            inputs=("expert_down", "weights"),
            outputs={"all_routed": full},
            saved=("expert_down", "weights"),
            moved_bytes=6 * held + full,
            backward_moved_bytes=kernels.back(6 * held + full, 6 * held + full),
            kernels=5,
            workspace_bytes=3 * held,
        ),
        Operator(
            name="expert_scatter",
            kind="reduce_scatter",
            inputs=("all_routed",),
            outputs={combined: full / setting.expert},
            moved_bytes=full,
            axis="expert",
        ),
    ]


def _goes_beside_shared(a: Architecture) -> bool:
    """Return True if tokens can be in transit while the shared experts compute.

    Qwen2's shared expert comes before the routed ones.
    """
    experts = a.experts
    assert experts is not None
    return a.family != "qwen2_moe" and experts.shared + experts.shared_ffn_size > 0


def _dispatch_and_combine(
    a: Architecture, setting: Setting, whole: str, combined: str, full: float
) -> tuple[list[Operator], str, list[Operator]]:
    """Exchange of each token with each of its experts, there and back.

    `full` are bytes of a rank's tokens.
    """
    experts, kernels = a.experts, setting.kernels
    assert experts is not None
    sent = experts.per_token * full
    sorted_bytes = kernels.expert_moves / 2 * sent if kernels.expert_moves else 2 * sent
    combined_bytes = sorted_bytes if kernels.expert_moves else 2 * sent + full
    there = [
        Operator(
            name="dispatch",
            kind="memory",
            inputs=(whole,),
            outputs={"dispatched": sent},
            moved_bytes=sorted_bytes,
            backward_moved_bytes=kernels.back(sorted_bytes, 2 * sent),
            kernels=4,
        )
    ]
    back: list[Operator] = []
    arrived, returned, spread = "dispatched", "expert_down", setting.spreads_experts
    if spread:
        there += _sent_to_experts(a, setting, sent, back=False)
        back = _sent_to_experts(a, setting, sent, back=True)
        arrived, returned = "arrived", "returned"
    combine = Operator(
        name="combine",
        kind="memory",
        inputs=(returned, "weights"),
        outputs={combined: full},
        # Sent once, tokens are weighed by their experts, and what comes back is only added.
        saved=("weights",) if kernels.expert_once and spread else (returned, "weights"),
        moved_bytes=combined_bytes,
        backward_moved_bytes=kernels.back(combined_bytes, 3 * sent + full),
        kernels=3,
    )
    return there, arrived, [*back, combine]


def _hierarchical_dispatch(
    a: Architecture, setting: Setting, whole: str, combined: str, full: float
) -> tuple[list[Operator], str, list[Operator]]:
    """The same for tokens sent once to nodes and passed on there (expert_parallel.py).

    On the way back a rank adds its experts' outputs for a token, and the rank that passed it on
    adds those sums.  `full` are bytes of a rank's tokens; with each copy go its choices and their
    weights, of which gradients come back.
    """
    experts, kernels = a.experts, setting.kernels
    assert experts is not None
    skew = routing_of(experts, kernels.expert_spread).busiest_load(setting.expert)
    nodes, ranks = routing_of(experts).hops(setting.expert, setting.hierarchical_all_to_all)
    choices = full / (a.hidden_size * setting.element_bytes) * experts.per_token
    across, inside, each = nodes * full * skew, ranks * full * skew, experts.per_token * full * skew

    def copy_of(name: str, source: str, tensor: str, size: float, kinds: int) -> Operator:
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={tensor: size},
            moved_bytes=2 * size,
            backward_moved_bytes=kernels.back(2 * size, 2 * size),
            kernels=kinds,
        )

    def all_to_all(
        source: str, tensor: str, size: float, axis: GroupAxis, copies: float | None = None
    ) -> Operator:
        received = 0.0 if copies is None else copies * choices
        return Operator(
            name=tensor,
            kind="all_to_all",
            inputs=(source,),
            outputs={tensor: size},
            moved_bytes=size + received * (INDEX_BYTES + FP32),
            backward_moved_bytes=size + received * FP32,
            axis=axis,
            beside_shared=source == "leaving" and _goes_beside_shared(a),
        )

    def sum_of(name: str, source: str, tensor: str, of: float, size: float) -> Operator:
        return Operator(
            name=name,
            kind="memory",
            inputs=(source,),
            outputs={tensor: size},
            moved_bytes=of + size,
            backward_moved_bytes=kernels.back(of + size, of + size),
            kernels=2,
        )

    there = [
        copy_of("dispatch", whole, "leaving", across, 18),
        all_to_all("leaving", "at_nodes", across, "experts_across", nodes),
        copy_of("hierarchical_all_to_all", "at_nodes", "handed_on", inside, 18),
        all_to_all("handed_on", "at_ranks", inside, "experts_inside", ranks),
        copy_of("by_expert", "at_ranks", "arrived", each, 8),
    ]
    weighed = Operator(
        name="weigh",
        kind="memory",
        inputs=("expert_down", "weights"),
        outputs={"of_ranks": inside},
        saved=("expert_down", "weights"),
        moved_bytes=3 * each + inside,
        backward_moved_bytes=kernels.back(3 * each + inside, 4 * each + inside),
        workspace_bytes=each,
        kernels=4,
    )
    back = [
        weighed,
        all_to_all("of_ranks", "ranks_back", inside, "experts_inside"),
        sum_of("relay_sum", "ranks_back", "of_nodes", inside, across),
        all_to_all("of_nodes", "nodes_back", across, "experts_across"),
        sum_of("combine", "nodes_back", combined, across, full),
    ]
    return there, "arrived", back


def _sent_to_experts(
    a: Architecture, setting: Setting, size: float, *, back: bool
) -> list[Operator]:
    """Tokens on their way to experts, or back, and between the ranks that divide each expert.

    These ranks gather the tokens that each of them received, and scatter their sums.  Source:
    Megatron-LM, MoEAlltoAllTokenDispatcher.
    """
    experts = a.experts
    assert experts is not None
    beside = _goes_beside_shared(a)
    names = ("expert_down", "returned") if back else ("dispatched", "arrived")
    routing = routing_of(experts, setting.kernels.expert_spread)
    moved = exchange(setting, *names, size, routing, back=back, beside_shared=beside and not back)
    if not setting.divides_experts:
        return [moved]
    part = Operator(
        name="expert_scatter" if back else "expert_gather",
        kind="reduce_scatter" if back else "all_gather",
        inputs=(names[0] if back else names[1],),
        outputs={},
        moved_bytes=size * routing.busiest_load(setting.expert),
        axis="expert_tensor",
    )
    return [part, moved] if back else [moved, part]


def _router(
    a: Architecture, setting: Setting, source: str, whole: str, *, tokens: float
) -> list[Operator]:
    """Scores of every expert for every token, in DeepSeek's models in fp32."""
    experts, e = a.experts, setting.element_bytes
    assert experts is not None
    full = tokens * a.hidden_size * e
    operators: list[Operator] = []
    routed_by, router_bytes = whole, e
    if a.family in ("deepseek_v2", "deepseek_v3", "glm4_moe") and e != FP32:
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
    router = matmul(
        "router",
        (routed_by,),
        {"router": tokens * experts.count * router_bytes},
        flops=2 * tokens * a.hidden_size * experts.count,
        moved_bytes=full + a.hidden_size * experts.count * e,
        weights=1.0 * a.hidden_size * experts.count,
    )
    before = source if routed_by == whole else None
    return [*operators, *linear(setting, router, source=before, size=full)]


def _shared_experts(
    a: Architecture,
    setting: Setting,
    source: str,
    whole: str,
    routed: str,
    *,
    tokens: float,
    width: float,
) -> list[Operator]:
    """Experts that all tokens share, of `width` features on a rank, added to the routed ones.

    Beside experts on ranks of their own they are whole on every rank, or divided like a dense MLP.
    """
    experts, e, kernels = a.experts, setting.element_bytes, setting.kernels
    assert experts is not None
    full = tokens * a.hidden_size * e
    operators: list[Operator] = []
    if setting.spreads_experts and kernels.shared_divided:
        size = experts.shared_ffn_size or experts.shared * experts.ffn_size
        operators += mlp(a, setting, source, "shared", ffn_size=size)
    else:
        operators += _feed_forward(a, setting, source, whole, "shared", tokens=tokens, width=width)
        out = matmul(
            "shared_out",
            ("shared_product",),
            {"shared_out": full},
            flops=2 * tokens * a.hidden_size * width,
            moved_bytes=(tokens * (a.hidden_size + width) + a.hidden_size * width) * e,
            weights=a.hidden_size * width,
        )
        operators += linear(setting, out, size=tokens * width * e, adapted=False)
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
            elementwise(kernels, added, weighed, full, saved=weighed),
        ]
    return [
        *operators,
        Operator(
            name="shared_sum",
            kind="memory",
            inputs=("routed_out", added),
            outputs={routed: full},
            moved_bytes=3 * full,
            backward_moved_bytes=kernels.back(3 * full, 3 * full),
        ),
    ]


def _feed_forward(
    a: Architecture,
    setting: Setting,
    source: str,
    whole: str,
    name: str,
    *,
    tokens: float,
    width: float,
    matrices: float = 1.0,
    share: float = 1.0,
) -> list[Operator]:
    """Up projection and activation; `matrices` are read where experts share a rank.

    `share` is the rate of the product over that of a single one as large.
    """
    e, kernels = setting.element_bytes, setting.kernels
    size = tokens * width * e
    weights = matrices * a.hidden_size * width
    up = matmul(
        f"{name}_up",
        (whole,),
        {f"{name}_up": size},
        flops=2 * tokens * a.hidden_size * width,
        moved_bytes=(tokens * (a.hidden_size + width) + weights) * e,
        weights=weights,
        share=share,
        sides=(a.hidden_size, width),
    )
    up = of_whole(setting, up, a.hidden_size, undivided_side(setting, width))
    gate, gated, product = f"{name}_gate", f"{name}_gated", f"{name}_product"

    def on_tokens(operator: Operator) -> list[Operator]:
        full = tokens * a.hidden_size * e
        return linear(setting, operator, source=source, size=full, adapted=False)

    if not a.gated_mlp:
        return [*on_tokens(up), *_activation(a, kernels, name, size)]
    cut = a.family == "gpt_oss" and not kernels.fused_experts
    clamped = cut and not kernels.fused_gate
    biased = name == "expert" and a.mlp_bias
    if kernels.fused_projections or clamped:
        both = tokens * (a.hidden_size + 2 * width) + 2 * weights
        outputs = {up.name: 2 * size} if clamped else {gate: size, up.name: size}
        together = matmul(
            up.name,
            (whole,),
            outputs,
            flops=2 * up.flops,
            moved_bytes=both * e,
            weights=2 * weights,
            share=up.share,
        )
        operators = on_tokens(
            of_whole(setting, together, a.hidden_size, 2 * undivided_side(setting, width))
        )
    else:
        operators = on_tokens(replace(up, name=gate, outputs={gate: size}))
    if biased and kernels.expert_biases == "rows":
        operators.append(_rows_of_bias("biased_products", up.name, 2 * size))
    if clamped:
        return [*operators, *_clamped_gate(kernels, name, size)]
    if cut and biased and kernels.expert_biases == "weighed":
        operators.append(_joined_halves(name, gate, up.name, size))
    kept_gate, kept_up = gate, up.name
    if kernels.narrow:
        kept_gate = kept_up = f"{name}_narrow_gates"
    if kernels.fused_gate:
        gated = gate
    else:
        operators.append(elementwise(kernels, gated, (gate,), size, saved=(kept_gate,)))
    if not kernels.fused_projections:
        operators += on_tokens(up)
    if kernels.narrow:
        operators.append(narrow_copy(kept_up, (gate, up.name), 2 * tokens * width))
    kept = tuple(dict.fromkeys((kept_gate if gated == gate else gated, kept_up)))
    last = elementwise(kernels, product, (gated, up.name), size)
    back = kernels.back(last.moved_bytes, 5 * size)
    last = replace(last, saved=kept, backward_moved_bytes=back)
    if kernels.fused_experts and name == "expert":
        last = replace(last, moved_bytes=size, backward_moved_bytes=2 * size, kernels=0)
    return [*operators, replace(last, holds=(whole,))]


def _rows_of_bias(name: str, source: str, size: float) -> Operator:
    """A row of a bias for each row of a product: written, read with the product's, their sum.

    Backward reads the gradients of all rows and adds them up by expert.
    """
    return Operator(
        name=name,
        kind="memory",
        inputs=(source,),
        outputs={},
        moved_bytes=4 * size,
        backward_moved_bytes=2 * size,
        kernels=2,
        workspace_bytes=size,
    )


def _output_biases(kernels: KernelSettings, size: float) -> list[Operator]:
    """Biases of the rows that leave experts, where products do not add them; `size` in 16 bits.

    Weighed in fp32: b p (written: 2), t + b p (read 1 + 2, written 2), joined (2 + 2), in 16 bits
    (2 + 1), in sizes.  Backward: to fp32 (1 + 2), to 16 bits for t (2 + 1), joined (1 + 1), and
    for b and for p a product (2 + 2) and its sum (2).
    """
    match kernels.expert_biases:
        case "products":
            return []
        case "rows":
            return [_rows_of_bias("biased_rows", "expert_down", size)]
        case "weighed":
            return [
                Operator(
                    name="biased_rows",
                    kind="memory",
                    inputs=("expert_down",),
                    outputs={},
                    moved_bytes=14 * size,
                    backward_moved_bytes=20 * size,
                    kernels=4,
                    workspace_bytes=4 * size,
                )
            ]
        case _:
            assert_never(kernels.expert_biases)


def _joined_halves(name: str, gate: str, up: str, size: float) -> Operator:
    """Both halves of a gated product clamped, and joined for the kernel of their gate.

    Forward reads and writes both twice.  Backward compares what was clamped, masks both gradients
    by it and joins them, 6.75 times both as torch's operators do.
    """
    return Operator(
        name=f"{name}_joined",
        kind="memory",
        inputs=(gate, up),
        outputs={f"{name}_joined": 2 * size},
        saved=(f"{name}_joined",),
        moved_bytes=4 * 2 * size,
        backward_moved_bytes=6.75 * 2 * size,
        kernels=3,
    )


def _clamped_gate(kernels: KernelSettings, name: str, size: float) -> list[Operator]:
    """GPT-OSS's (u + 1) g sigmoid(α g) of clamped halves g and u, each operator a kernel.

    Clamps keep the whole product that they were cut from.
    """
    both = f"{name}_up"
    gate, up, more, scaled, chance, gated = (
        f"{name}_{part}" for part in ("gate", "clamped", "more", "scaled", "chance", "gated")
    )
    return [
        elementwise(kernels, gate, (both,), size, saved=(both,)),
        elementwise(kernels, up, (both,), size, saved=(both,)),
        elementwise(kernels, scaled, (gate,), size),
        elementwise(kernels, chance, (scaled,), size, saved=(chance,)),
        elementwise(kernels, gated, (gate, chance), size, saved=(gate, chance)),
        elementwise(kernels, more, (up,), size),
        elementwise(kernels, f"{name}_product", (more, gated), size, saved=(more, gated)),
    ]


def _activation(a: Architecture, kernels: KernelSettings, name: str, size: float) -> list[Operator]:
    """The activation of an ungated MLP, one kernel that keeps its input.

    GPT-2's, GPT-J's and Phi's tanh approximation 0.5 u (1 + tanh(c (u + 0.044715 u³))) is written
    out in `transformers`: eight kernels, which keep u, its half, the tanh and one plus that.
    """
    up, product = f"{name}_up", f"{name}_product"
    if a.family == "nemotron" and not kernels.fused_gate:  # the square keeps what ReLU made
        rectified = f"{name}_rectified"
        return [
            elementwise(kernels, rectified, (up,), size, saved=(rectified,)),
            elementwise(kernels, product, (rectified,), size, saved=(rectified,)),
        ]
    if a.family == "opt":  # ReLU keeps its result, which the next product keeps anyway
        return [elementwise(kernels, product, (up,), size, saved=(product,))]
    if kernels.fused_gate:
        return [elementwise(kernels, product, (up,), size, saved=(up,))]
    if a.written_gelu:
        return _fast_gelu(kernels, name, size)
    if a.family not in ("gpt2", "gptj", "phi"):
        return [elementwise(kernels, product, (up,), size, saved=(up,))]
    half, cube, scaled, inner, argument, tanh, weight = (
        f"{name}_{part}"
        for part in ("half", "cube", "scaled", "inner", "argument", "tanh", "weight")
    )
    return [
        elementwise(kernels, half, (up,), size),
        elementwise(kernels, cube, (up,), size, saved=(up,)),
        elementwise(kernels, scaled, (cube,), size),
        elementwise(kernels, inner, (up, scaled), size),
        elementwise(kernels, argument, (inner,), size),
        elementwise(kernels, tanh, (argument,), size, saved=(tanh,)),
        elementwise(kernels, weight, (tanh,), size),
        elementwise(kernels, product, (half, weight), size, saved=(half, weight)),
    ]


def _fast_gelu(kernels: KernelSettings, name: str, size: float) -> list[Operator]:
    """0.5 u (1 + tanh(c u (1 + 0.044715 u u))), written out: nine kernels, which keep both factors
    of each product and the tanh."""
    up = f"{name}_up"
    half, scaled, small, square, more, argument, tanh, weight = (
        f"{name}_{part}"
        for part in ("half", "scaled", "small", "square", "more", "argument", "tanh", "weight")
    )
    return [
        elementwise(kernels, half, (up,), size),
        elementwise(kernels, scaled, (up,), size),
        elementwise(kernels, small, (up,), size),
        elementwise(kernels, square, (small, up), size, saved=(small, up)),
        elementwise(kernels, more, (square,), size),
        elementwise(kernels, argument, (scaled, more), size, saved=(scaled, more)),
        elementwise(kernels, tanh, (argument,), size, saved=(tanh,)),
        elementwise(kernels, weight, (tanh,), size),
        elementwise(kernels, f"{name}_product", (half, weight), size, saved=(half, weight)),
    ]
