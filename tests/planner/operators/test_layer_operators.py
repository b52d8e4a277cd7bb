"""Operators of layers against hand calculations and published formulas."""

from dataclasses import replace

import pytest

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.framework import NATURAL_SPREAD
from meshwright.planner.documents.model import Architecture, Layer, LayerTrace, ModelGraph
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.operators.expert_routing import Routing
from meshwright.planner.operators.kernels import MODULES, KernelSettings
from meshwright.planner.operators.layer_operators import (
    local_parameters,
    step_flops,
    table,
    unmasked_step_flops,
)
from meshwright.planner.operators.operator_table import (
    RECOMPUTES,
    Operator,
    OperatorTable,
    Setting,
)

S, B, H, A = 2048, 4, 1024, 16


def gpt(**changes: object) -> ModelGraph:
    """A GPT block as in Korthikanti et al.: LayerNorm, one-kernel GELU, f = 4 h."""
    figures = {
        "family": "gpt",
        "hidden_size": H,
        "layers": 24,
        "heads": A,
        "kv_heads": A,
        "head_dim": H // A,
        "ffn_size": 4 * H,
        "vocab_size": 50304,
        "gated_mlp": False,
        "norm": "layer",
        "positions": "learned",
        "max_positions": S,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
    return graph_of(Architecture(**{**figures, **changes}), name="gpt")


def of(model: ModelGraph, kind: str, **changes: object) -> OperatorTable:
    layer = next(layer for layer in model.layers if layer.kind == kind)
    setting = {"micro_batch": B, "seq_len": S, "precision": "bf16"}
    return table(model, layer, Setting(**{**setting, **changes}))


def test_a_gpt_block_stores_what_korthikanti_counts_without_dropout() -> None:
    # Korthikanti et al., 2022, section 4.1, bytes in units of s b h: attention 11 (input 2, q and k
    # 4, v 2, output projection's input 2, dropout mask 1), MLP 19 (2, 8, 8, dropout mask 1), layer
    # norms 4.  Without the two masks: 32, of which the attention core's 5 a s / h is gone with a
    # fused kernel.  That kernel keeps its output, which is the projection's input, and one number
    # per row and head; a norm keeps mean and deviation.
    stored = of(gpt(), "block").stored_bytes("none")

    sums = 4 * A * S * B
    moments = 2 * 8 * S * B
    assert stored == (34 - 2) * S * B * H + sums + moments


def test_ranks_beyond_the_heads_of_keys_gather_the_projection_and_keep_their_own() -> None:
    # 16 heads of 64, 2 heads of keys, 8 ranks: the projection makes (16 + 2 x 2) x 64 features, 160
    # on a rank; a rank keeps 2 heads of queries, one of keys and one of values, 256 features.
    t, tokens = 8, S * B

    layer = of(gpt(kv_heads=2), "block", tensor=t, gathers_heads=True)

    operators = {each.name: each for each in layer.operators}
    gather = operators["heads_gather"]
    assert sum(operators["qkv"].outputs.values()) == tokens * 160 * 2
    assert (gather.moved_bytes, gather.waits) == (tokens * 1280 * 2, True)
    assert operators["own_heads"].outputs == {"qkv_own": tokens * 256 * 2}
    kept = layer.stored_tensors("none")
    assert kept["qkv_own"] == tokens * 256 * 2
    assert not {"qkv", "qkv_gathered"} & kept.keys()
    # The same work otherwise: weights are divided all the same.
    divided = of(gpt(kv_heads=2), "block", tensor=t)
    assert layer.forward_flops == divided.forward_flops


def test_a_chunk_of_logits_by_width_has_the_rows_that_liger_says() -> None:
    # Liger-Kernel's own example, beside inc_factor of ops/fused_linear_cross_entropy.py: 4 x 4,096
    # tokens, 32,000 words, width 4,096 give 8 chunks of 2,048 rows.  A row of a chunk has logits in
    # 16 and in 32 bits, 6 bytes a word.
    model = gpt(hidden_size=4096, vocab_size=32000)
    loss = ChunkedLoss(gradients="precomputed")
    by_width, once = (
        of(model, "head", seq_len=4096, loss=each, kernels=kernels)
        for each, kernels in (
            (loss, KernelSettings(chunks_by_width=True)),
            (ChunkedLoss(rows=16384, gradients="precomputed"), MODULES),
        )
    )

    working = max(operator.workspace_bytes for operator in by_width.operators)
    assert working == 6 * 2048 * 32000
    # Seven more chunks read 262 MB of weights for logits; backward once more, and their sum is read
    # and written.
    logits = [each.operators[-3] for each in (by_width, once)]
    weights = 2 * 32000 * 4096
    assert logits[0].moved_bytes - logits[1].moved_bytes == 7 * weights
    assert logits[0].backward_moved_bytes - logits[1].backward_moved_bytes == 7 * 3 * weights


def test_sinks_leave_attention_of_16_bits_one_kernel_that_skips_what_windows_hide() -> None:
    # gpt-oss-20b: 64 heads of 64, every other layer sees the last 128 keys.  Whole layers see half
    # of 2,048 keys, others 128 but for the first 128 queries, which see half as many.
    model = resolve_model("gpt-oss-20b")
    kinds = sorted({layer.kind for layer in model.layers if layer.kind.endswith("block")})

    def cores(**changes: object) -> list[Operator]:
        tables = [of(model, kind, **changes) for kind in kinds]
        return [op for each in tables for op in each.operators if op.name == "core"]

    fused = cores()
    keys = [op.flops / (4 * S * B * 64 * 64) for op in fused]
    assert sorted(keys) == [128 - 128 * 128 / (2 * S), S / 2]
    # Nothing of queries times keys moves, where blocks write their scores: in 32 bits, in a part of
    # a sequence, and of several documents.
    tensors = 2 * S * B * 64 * (64 + 8 + 8 + 64)
    assert all(op.moved_bytes < 3 * tensors for op in fused)
    others = {"precision": "fp32"}, {"context": 2}, {"document_len": 512.0}
    for changes in others:
        assert all(op.moved_bytes > 10 * tensors for op in cores(**changes))


def test_full_recompute_stores_two_bytes_of_input() -> None:
    assert of(gpt(), "block").stored_bytes("full") == 2 * S * B * H
    assert of(gpt(), "block", tensor=8).stored_bytes("full") == 2 * S * B * H / 8


def test_a_llama_block_by_hand() -> None:
    # Llama-3.1-8B, bf16, per token: two norms of 4 h + 2 h + 4 (fp32 copy, scaled, root) and 2 h of
    # output each, q 2 h, k and v 2 h / 4 each, core 2 h and 4 a of sums, four tensors of 2 f.
    model = resolve_model("llama-3.1-8b")
    h, f, a = 4096, 14336, 32

    stored = of(model, "block").stored_bytes("none") / (B * S)

    norms = 2 * (8 * h + 4)
    attention = 2 * h + 2 * (2 * h / 4) + 2 * h + 4 * a
    assert stored == norms + attention + 4 * 2 * f


def test_selective_recompute_keeps_products_and_attention() -> None:
    # x, q, k, v, core and its sums, attention output, gate, up and down.
    model = resolve_model("llama-3.1-8b")
    h, f, a = 4096, 14336, 32

    stored = of(model, "block").stored_bytes("selective") / (B * S)

    assert stored == 2 * h + (2 * h + 2 * (2 * h / 4)) + (2 * h + 4 * a) + 2 * h + 2 * 2 * f + 2 * h


def test_recomputation_runs_norms_and_activations_or_everything_but_the_last_product() -> None:
    block = of(resolve_model("llama-3.1-8b"), "block")

    def again(recompute: str) -> set[str]:
        return {operator.name for operator in block.recomputed_operators(recompute)}

    assert again("none") == set()
    assert again("selective") == {
        "attention_norm",
        "rotary",
        "attention_residual",
        "mlp_norm",
        "mlp_gated",
        "mlp_product",
    }
    assert again("full") == {operator.name for operator in block.operators} - {
        "mlp_out",
        "mlp_residual",
    }


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "qwen3-8b", "llama-3.1-70b"])
def test_forward_flops_are_twice_the_parameters_and_the_attention(name: str) -> None:
    model = resolve_model(name)
    a = model.architecture
    assert a is not None

    flops = sum(
        layer.repeat * of(model, layer.kind, micro_batch=1).forward_flops for layer in model.layers
    )

    head = a.vocab_size * a.hidden_size
    products = sum(
        layer.repeat * layer.parameters for layer in model.layers if "block" in layer.kind
    )
    causal = a.layers * 4 * S * (S / 2) * a.heads * a.head_dim
    assert flops == pytest.approx(2 * (products + head) * S + causal, rel=0.002)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_a_step_is_six_n_d_and_attention(name: str) -> None:
    model = resolve_model(name)
    a = model.architecture
    assert a is not None
    embedding = a.vocab_size * a.hidden_size

    flops = step_flops(model, seq_len=4096, global_batch=8)

    tokens = 4096 * 8
    attention = 12 * a.layers * a.heads * a.head_dim * 4096 * tokens
    linear = 6 * (model.parameters - embedding) * tokens
    # Query i attends to i keys, half of all pairs; PaLM's convention counts all.
    assert flops == pytest.approx(linear + attention / 2, rel=1e-6)
    unmasked = unmasked_step_flops(model, seq_len=4096, global_batch=8)
    assert unmasked == pytest.approx(linear + attention, rel=1e-6)
    packed = step_flops(model, seq_len=4096, global_batch=8, document_len=1024)
    assert packed == pytest.approx(linear + attention / 8, rel=1e-6)


def test_causal_utilisation_at_131_072_tokens_is_three_fifths_of_the_convention() -> None:
    """Of 6 N + 12 L a d s per token, 6 N + 6 L a d s: 73.6 % by the convention are 43.5 %."""
    model = resolve_model("llama-3.1-8b")
    size = {"seq_len": 131072, "global_batch": 1}

    share = step_flops(model, **size) / unmasked_step_flops(model, **size)

    linear, attention = 6 * (8.03e9 - 0.525e9), 12 * 32 * 4096 * 131072
    assert share == pytest.approx((linear + attention / 2) / (linear + attention), rel=1e-3)
    assert 100 * 0.736 * share == pytest.approx(43.5, abs=0.3)


def test_a_windows_first_queries_have_fewer_keys() -> None:
    model = resolve_model("mistral-7b")
    a = model.architecture
    assert a is not None
    keys = sum(min(query + 1, 4096) for query in range(8192)) / 8192

    flops = step_flops(model, seq_len=8192, global_batch=1)

    linear = 6 * (model.parameters - a.vocab_size * a.hidden_size) * 8192
    attention = 12 * a.layers * a.heads * a.head_dim * keys * 8192
    assert flops == pytest.approx(linear + attention, rel=1e-3)


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    model = resolve_model("gpt2")
    whole = unmasked_step_flops(model, seq_len=1024, global_batch=2)
    frozen = unmasked_step_flops(model, seq_len=1024, global_batch=2, frozen=True)
    attention = 12 * 12 * 768 * 1024 * 2048.0

    # Of 6 N, 2 N are gradients of weights; attention has none.
    assert frozen - attention == pytest.approx((whole - attention) * 4 / 6)


def test_a_token_counts_only_the_experts_that_it_visits() -> None:
    # Mixtral-8x7B: 12.9 of 46.7 billion parameters are active (mistral.ai/news/mixtral-of-experts).
    model = resolve_model("mixtral-8x7b")
    tokens = 1024

    flops = unmasked_step_flops(model, seq_len=1024, global_batch=1)

    a = model.architecture
    assert a is not None
    attention = 12 * a.layers * a.heads * a.head_dim * 1024 * tokens
    active = (flops - attention) / (6 * tokens) + a.vocab_size * a.hidden_size
    assert active == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_twice_the_micro_batch_stores_twice_the_bytes(kind: str, recompute: str) -> None:
    model = resolve_model("llama-3.1-8b")

    one = of(model, kind, micro_batch=2).stored_bytes(recompute)
    two = of(model, kind, micro_batch=4).stored_bytes(recompute)

    assert two == pytest.approx(2 * one, rel=1e-6)


@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
def test_tensor_parallel_ranks_share_the_flops_evenly(name: str, t: int) -> None:
    model = resolve_model(name)
    kind = "moe_block" if "mixtral" in name else "block"

    whole = of(model, kind).forward_flops
    shared = of(model, kind, tensor=t).forward_flops

    assert shared == pytest.approx(whole / t, rel=0.01)


def test_experts_on_several_ranks_exchange_tokens_both_ways() -> None:
    block = of(resolve_model("mixtral-8x7b"), "moe_block", expert=8)

    exchanges = [operator for operator in block.operators if operator.kind == "all_to_all"]

    per_token = 2
    assert len(exchanges) == 2
    busiest = Routing(8, per_token, spread=NATURAL_SPREAD).busiest_load(8)
    assert busiest > 1.1
    assert exchanges[0].moved_bytes == pytest.approx(busiest * per_token * B * S * 4096 * 2)


@pytest.mark.parametrize(("module", "kind"), [("moe", "moe_block"), ("mlp", "dense_block")])
def test_a_feed_forward_that_is_recomputed_as_a_whole_keeps_its_input(
    module: str, kind: str
) -> None:
    kernels = replace(MODULES, selective="modules", modules=(module,))
    table = of(resolve_model("deepseek-v3"), kind, expert=8, kernels=kernels)

    again = table.recomputed_operators("selective")
    kept = table.stored_tensors("selective").keys()

    names = [operator.name for operator in table.operators]
    behind = names[names.index("mlp_norm") + 1 : names.index("mlp_residual")]
    assert [operator.name for operator in again] == behind
    made = {name for operator in again for name in operator.outputs}
    assert "mlp_norm" in kept and made.isdisjoint(kept)
    before = table.stored_tensors("none").keys() - made - {"mlp_norm"}
    assert before == kept - {"mlp_norm"}


def test_local_parameters_add_up_over_tensor_and_expert_ranks() -> None:
    model = resolve_model("mixtral-8x7b")
    layer = next(layer for layer in model.layers if layer.kind == "moe_block")

    dense, routed = local_parameters(model, layer)
    halved, routed_halved = local_parameters(model, layer, tensor=2)
    _, spread = local_parameters(model, layer, tensor=2, expert=8)

    whole = 2 * 4096 + 8 * 4096
    assert dense + routed == layer.parameters
    assert routed == 3 * 8 * 4096 * 14336
    assert halved == (dense - whole) / 2 + whole
    assert (routed_halved, spread) == (routed / 2, routed / 8)


def test_a_traced_layer_costs_its_samples_in_the_jobs_type() -> None:
    trace = LayerTrace(forward_flops=1e6, stored_bytes=4000, transient_bytes=400, output_bytes=800)
    layer = Layer(name="conv", kind="conv", parameters=10, trace=trace)
    model = ModelGraph(name="net", layers=(layer,))

    found = table(model, layer, Setting(micro_batch=3, seq_len=1, precision="bf16"))

    assert found.forward_flops == 3e6
    assert found.stored_bytes("none") == 6000
    assert found.output_bytes == 1200
    assert step_flops(model, seq_len=1, global_batch=5) == 15e6


def test_shared_experts_are_whole_where_routed_ones_are_on_ranks_of_their_own() -> None:
    model = resolve_model("deepseek-v3")
    block = next(layer for layer in model.layers if layer.kind == "moe_block")
    a = model.architecture
    assert a is not None
    assert a.experts is not None
    one = 3 * a.hidden_size * a.experts.ffn_size

    inside, routed = local_parameters(model, block, tensor=2)
    beside, spread = local_parameters(model, block, tensor=2, expert=8)

    assert beside - inside == a.experts.shared * one / 2
    assert (routed, spread) == (a.experts.count * one / 2, a.experts.count * one / 8)
    divided, narrow = local_parameters(
        model, block, tensor=2, expert=8, expert_tensor=2, shared_whole=False
    )
    assert (divided, narrow) == (inside, a.experts.count * one / 16)
