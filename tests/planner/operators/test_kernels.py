"""Tables under each framework's kernels: counts by hand, laws of all, native by its data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.catalog import framework as framework_of
from meshwright.planner.catalog import frameworks, models, native
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.framework import CHEAP_MODULES, Framework, with_figures
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.operators.kernels import MODULES, KernelSettings, kernels_of
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import ManySettings, OperatorTable, Setting
from tests.planner.calibration.tables.test_predictions import GPT

S, B = 2048, 2
TOKENS = S * B
LANGUAGE = [name for name in sorted(models()) if not name.startswith("vit")]


def of(name: str, kind: str, kernels: KernelSettings, **changes: object) -> OperatorTable:
    model = resolve_model(name)
    layer = next(layer for layer in model.layers if layer.kind == kind)
    setting = {"micro_batch": B, "seq_len": S, "precision": "bf16"}
    return table(model, layer, Setting(**{**setting, "kernels": kernels, **changes}))


def fused(**changes: object) -> KernelSettings:
    figures = {
        "fused_norm": True,
        "fused_gate": True,
        "fused_rotary": True,
        "fused_projections": True,
        "scores": "fused",
        "core_traffic": False,
        "keeps_gathered": False,
    }
    return KernelSettings(**{**figures, **changes})  # type: ignore[arg-type]


def test_native_is_the_modules_that_the_runtime_trains_by_its_data_alone() -> None:
    assert kernels_of(native(), "bf16") is MODULES
    other = with_figures(native(), {"kernels.norm": "fused"})
    assert kernels_of(other, "bf16").fused_norm


def test_a_fused_llama_block_by_hand() -> None:
    # Llama-3.1-8B, bf16, per token: inputs of both norms 2 h and a root of 4 each, their outputs
    # 2 h each, one tensor of q, k and v (turned in place) 2 (h + h / 2), core 2 h and 4 a of sums,
    # gate, up and their product 2 f each.
    h, f, a = 4096, 14336, 32

    stored = of("llama-3.1-8b", "block", fused()).stored_bytes("none") / TOKENS

    norms = 2 * (2 * h + 4 + 2 * h)
    attention = 2 * (h + h / 2) + 2 * h + 4 * a
    assert stored == norms + attention + 3 * 2 * f


def test_what_is_cut_from_one_projection_keeps_it_whole() -> None:
    # Turned queries and keys are new tensors, and the values lie in the one that they came from.
    turned = of("llama-3.1-8b", "block", fused(fused_rotary=False))
    in_place = of("llama-3.1-8b", "block", fused())

    more = turned.stored_bytes("none") - in_place.stored_bytes("none")

    assert more == 2 * TOKENS * (4096 + 1024)


def test_a_shard_is_kept_where_what_was_gathered_is_not() -> None:
    t, h = 8, 4096
    gathered = of("llama-3.1-8b", "block", fused(keeps_gathered=True), tensor=t)
    local = of("llama-3.1-8b", "block", fused(), tensor=t)

    more = gathered.stored_bytes("none") - local.stored_bytes("none")

    assert more == pytest.approx(2 * 2 * h * TOKENS * (1 - 1 / t))


def test_products_in_8_bits_keep_a_byte_of_what_they_multiply() -> None:
    # Per token: inputs of qkv and MLP h, of the output projection q = h, of the down projection f,
    # and gate and up as narrow: half of 16 bits but for the core's output, kept twice over.
    h, f = 4096, 14336
    wide = of("llama-3.1-8b", "block", fused()).stored_bytes("none")
    narrow = of("llama-3.1-8b", "block", fused(narrow=True)).stored_bytes("none")

    assert wide - narrow == TOKENS * (2 * h + f + 2 * f - h)


def test_weights_in_4_bits_are_restored_before_each_product() -> None:
    layer = of("llama-3.1-8b", "block", fused(frozen="all", restored_bytes=5.0))

    moved = sum(op.moved_bytes for op in layer.operators if op.name.endswith("_restored"))

    matrices = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert moved == 5 * matrices


def test_a_restored_weight_is_there_while_it_is_multiplied() -> None:
    """By hand: 2 bytes of an element, and a scale of 4 for 64 of them, beside all else, both ways.

    Where queries, keys and values are products of their own so are their weights; in backward no
    gradient of a weight stands beside them.
    """
    restored = of("llama-3.1-8b", "block", fused(frozen="all", restored_bytes=5.0))
    plain = of("llama-3.1-8b", "block", fused(frozen="all"))
    both = {op.name: op.workspace_bytes for op in restored.operators if op.kind == "matmul"}
    up = 4096 * 14336

    assert both["mlp_up"] == (2 + 4 / 64) * 2 * up  # gate and up as one product
    assert both["mlp_out"] == (2 + 4 / 64) * up
    for passes in ("forward_transient_bytes", "backward_transient_bytes"):
        more = getattr(restored, passes)("full") - getattr(plain, passes)("full")
        assert 0 < more <= both["mlp_up"]
    apart = of(
        "llama-3.1-8b",
        "block",
        replace(fused(frozen="all", restored_bytes=5.0), fused_projections=False),
    )
    single = {op.name: op.workspace_bytes for op in apart.operators if op.kind == "matmul"}
    assert single["mlp_up"] == (2 + 4 / 64) * up
    assert single["qkv"] == (2 + 4 / 64) * 4096**2


def test_adapters_that_drop_their_inputs_keep_a_copy_and_a_mask_each() -> None:
    """Of each of a block's seven products peft drops the input by itself: 2 bytes, a mask of 1."""
    kernels = replace(fused(frozen="all"), fused_projections=False)
    kept = of("llama-3.1-8b", "block", kernels)
    dropped = of("llama-3.1-8b", "block", replace(kernels, adapters_drop=True))

    more = sum(
        size for name, size in dropped.stored_tensors("none").items() if name.endswith("_dropped")
    )

    assert more == 3 * TOKENS * (3 * 4096 + 4096 + 2 * 4096 + 14336)
    assert dropped.stored_bytes("none") > kept.stored_bytes("none")


def test_written_scores_are_recomputed_apart() -> None:
    kernels = KernelSettings(scores="written", fused_softmax=True, selective="attention")
    layer = of("llama-3.1-8b", "block", kernels)

    dropped = layer.stored_bytes("none") - layer.stored_bytes("selective")

    assert dropped == 2 * 32 * S * TOKENS
    assert {op.name for op in layer.recomputed_operators("selective")} == {
        "scores",
        "softmax",
        "core",
    }


def test_every_second_product_is_recomputed() -> None:
    layer = of("llama-3.1-8b", "block", KernelSettings(scores="fused", selective="operators"))

    again = layer.recomputed_operators("selective")

    products = [op.name for op in again if op.kind == "matmul"]
    # Of qkv, out, gate, up, down.
    assert products == ["attention_out", "mlp_up"]
    assert not any(op.kind == "attention" for op in again)


@pytest.mark.spread(1)
@pytest.mark.long(
    "nemo-automodel",
    "nanotron",
    "ms-swift",
    "megatron-kwai",
    "megatron-deepspeed",
    "llama3",
    "litgpt",
    "internevo",
    "fsdp_qlora",
    "fms-fsdp",
    "transformers",
)
@pytest.mark.parametrize("framework", frameworks().values(), ids=list(frameworks()))
def test_tables_of_every_model_are_whole_under_every_framework(framework: Framework) -> None:
    kernels = [
        kernels_of(framework, "bf16"),
        kernels_of(framework, "fp8", flash_attention=False),
        kernels_of(framework, "bf16", frozen=True, weights="nf4"),
    ]
    for name in LANGUAGE:
        model = resolve_model(name)
        for layer in model.layers:
            for one in kernels:
                for tensor, context, expert in ((1, 1, 1), (2, 2, 2)):
                    setting = Setting(
                        micro_batch=1,
                        seq_len=1024,
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        sequence_parallel=framework.tensor.sequence_parallel,
                        kernels=one,
                    )
                    check_whole(table(model, layer, setting))


def check_whole(found: OperatorTable) -> None:
    made = {"x"}
    for operator in found.operators:
        assert made.issuperset(operator.inputs), (operator.name, operator.inputs)
        made |= operator.outputs.keys()
    assert made.issuperset(name for op in found.operators for name in op.saved)
    assert found.output in made
    if found.kind not in ("embedding", "head"):
        least, kept = found.stored_bytes("full"), found.stored_bytes("none")
        assert 0 < least == found.input_bytes < kept


@pytest.mark.parametrize(
    "name",
    ["megatron", "megatron+cheap-recompute", "torchtitan", "megatron-deepspeed", "transformers"],
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt2"])
def test_many_settings_at_once_are_each_alone(name: str, model: str) -> None:
    framework = framework_of(name)
    kernels = kernels_of(framework, "fp8")
    kept: Recompute = "selective" if framework.recompute.modules else "none"
    each = [
        Setting(
            micro_batch=b,
            seq_len=1024,
            tensor=t,
            context=2,
            expert=4,
            sequence_parallel=framework.tensor.sequence_parallel,
            kernels=kernels,
        )
        for b in (2, 4)
        for t in (2, 8)
    ]
    graph = resolve_model(model)
    for layer in graph.layers:
        together = table(graph, layer, ManySettings.framework(each)).stored_bytes(kept)
        for index, setting in enumerate(each):
            alone = table(graph, layer, setting).stored_bytes(kept)
            mine = together[index] if hasattr(together, "shape") else together
            assert mine == pytest.approx(alone, rel=1e-12)


def test_a_fused_llama_block_streams_each_tensor_once_for_each_kernel() -> None:
    # Two norms read and write h, two sums read two and write one; queries and keys are turned in
    # place; the gate reads two of f and writes one.  Backward moves 1.8 times as much.
    h, k, f = 4096, 1024, 14336
    layer = of("llama-3.1-8b", "block", fused(backward_traffic=1.8))

    memory = [op for op in layer.operators if op.kind == "memory"]

    moved = 2 * TOKENS * (2 * 2 * h + 2 * 3 * h + 2 * (h + k) + 3 * f)
    assert sum(op.moved_bytes for op in memory) == moved
    assert sum(op.backward_moved_bytes for op in memory) == pytest.approx(1.8 * moved)


def test_dropout_keeps_a_byte_for_each_element_of_the_stream() -> None:
    plain, dropped = (
        of("gpt2", "block", fused(dropout=dropout)).stored_bytes("none")
        for dropout in (False, True)
    )

    assert dropped - plain == 2 * 768 * TOKENS


def test_experts_move_as_often_as_a_framework_says() -> None:
    layer = of("mixtral-8x7b", "moe_block", fused(expert_moves=6.0, expert_share=0.8))

    sorting = sum(op.moved_bytes for op in layer.operators if op.name in ("dispatch", "combine"))

    assert sorting == 6 * (2 * 2 * 4096 * TOKENS)
    shares = {op.name: op.share for op in layer.operators if op.kind == "matmul"}
    assert shares["expert_up"] == shares["expert_down"] == 0.8
    assert shares["router"] == shares["qkv"] == 1.0


def gpt_block(**changes: object) -> OperatorTable:
    """A block of Megatron-LM with written-out attention."""
    graph = graph_of(GPT, name="model")
    [layer] = [layer for layer in graph.layers if layer.kind == "block"]
    kernels = kernels_of(frameworks()["megatron"], "bf16", flash_attention=False)
    figures = {"micro_batch": B, "seq_len": S, "kernels": kernels}
    return table(graph, layer, Setting(**{**figures, **changes}))


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_a_gpt_block_keeps_what_korthikanti_counts(tensor: int) -> None:
    # 34 s b h + 5 a s^2 b with unfused attention and dropout, all of it divided by t; and mean and
    # deviation of each row of both norms in fp32, which they leave out.
    whole = (34 * GPT.hidden_size + 16) * TOKENS + 5 * GPT.heads * TOKENS * S

    stored = gpt_block(tensor=tensor).stored_bytes("none")

    assert stored == pytest.approx(whole / tensor)


def test_without_sequence_parallelism_the_stream_is_kept_whole() -> None:
    # Korthikanti et al., equation 2: s b h (10 + 24 / t) + 5 a s^2 b / t.
    whole = TOKENS * (GPT.hidden_size * (10 + 24 / 4) + 16)
    scores = 5 * GPT.heads * TOKENS * S / 4

    stored = gpt_block(tensor=4, sequence_parallel=False).stored_bytes("none")

    assert stored == pytest.approx(whole + scores)


def test_selective_recompute_drops_the_scores_that_korthikanti_drop() -> None:
    found = gpt_block()

    dropped = found.stored_bytes("none") - found.stored_bytes("selective")

    assert dropped == 5 * GPT.heads * TOKENS * S


def test_what_is_cheap_to_make_again_is_dropped_and_nothing_else() -> None:
    # Llama-3.1-8B fused, bf16, per token: inputs of both norms 2 h each, queries, keys and values
    # 2 (h + 2 x 1,024), attention's output 2 h and a sum of 4 for each of 32 heads, gate and up 2 f
    # each.  Norms' outputs and roots, and the gated product, are made again.
    found = of("llama-3.1-8b", "block", fused(selective="modules", modules=CHEAP_MODULES))
    h, f = 4096, 14336

    kept = 2 * h + 2 * h + 2 * (h + 2 * 1024) + 2 * h + 4 * 32 + 2 * 2 * f
    assert found.stored_bytes("selective") == TOKENS * kept
    again = [op.name for op in found.recomputed_operators("selective")]
    assert again == ["attention_norm", "mlp_norm", "mlp_product"]


def test_tokens_go_to_experts_in_8_bits_and_come_back_in_16() -> None:
    # DeepSeek-V3, sections 3.2.2 and 3.3.3: one copy of each token, 7,168 wide, to experts in a
    # byte each, combined in two; gradients go the same way round.
    once = of("deepseek-v3", "moe_block", fused(expert_once=True, expert_narrow=True), expert=64)
    each = of("deepseek-v3", "moe_block", fused(expert_spread=0.0), expert=64)
    sizes = {o.name: (o.moved_bytes, o.backward_moved_bytes) for o in once.operators}

    copy = TOKENS * 7168  # links wait for what is busiest of that which they lead to
    assert sizes["arrived"] == pytest.approx((copy, 2 * copy))
    assert sizes["returned"] == pytest.approx((2 * copy, copy))
    arrived = next(op for op in each.operators if op.name == "arrived")
    assert arrived.moved_bytes == arrived.backward_moved_bytes == 2 * 8 * TOKENS * 7168
    assert arrived.routing is None
    # What comes back weighed is only added, and not kept.
    assert "returned" in each.stored_tensors("none") and "returned" not in once.stored_tensors(
        "none"
    )


def test_ulysses_sends_four_activations_and_their_gradients() -> None:
    # DeepSpeed-Ulysses, section 3.2: queries, keys and values N h / P each, then what attention
    # gives, N h / P; with fewer heads of keys than ranks, each rank needs a whole one.
    mha = of("llama-2-7b", "block", fused(context="heads"), context=4)
    sizes = {o.name: o.moved_bytes for o in mha.operators if o.kind == "all_to_all"}
    part = TOKENS / 4 * 4096 * 2
    assert sizes == {"qkv_exchange": 3 * part, "out_exchange": part}
    both = {o.backward_moved_bytes for o in mha.operators if o.kind == "all_to_all"}
    assert both == set(sizes.values())

    gqa = of("llama-3.1-8b", "block", fused(context="heads"), context=4, tensor=4)
    sizes = {o.name: o.moved_bytes for o in gqa.operators if o.kind == "all_to_all"}
    keys = 2 * TOKENS / 4 * 1024 / 4 * 2
    assert sizes["qkv_exchange"] == part / 4 + keys * (4 * 4 / 8)

    # As much attention as a ring does, of a share of the heads over the whole sequence.
    ring = of("llama-2-7b", "block", fused(context="ring"), context=4)
    [one, other] = (next(o for o in t.operators if o.name == "core") for t in (mha, ring))
    assert one.flops == other.flops


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ranks_that_are_not_balanced_wait_for_the_last(context: int) -> None:
    """Against masks: chunks in order, or one from the front and one from the back."""
    s = 64
    pairs = np.tril(np.ones((s, s)))
    rows = [pairs[rank * s // context : (rank + 1) * s // context].sum() for rank in range(context)]
    half = s // context // 2
    both = [
        pairs[rank * half : (rank + 1) * half].sum()
        + pairs[s - (rank + 1) * half : s - rank * half].sum()
        for rank in range(context)
    ]
    cores = [
        next(o for o in t.operators if o.name == "core")
        for t in (
            of("llama-2-7b", "block", fused(context="ring", balanced=balanced), context=context)
            for balanced in (True, False)
        )
    ]

    assert max(both) == min(both)
    # The diagonal counts half in the formula, which is of long sequences.
    longer = (max(rows) - s / context / 2) / (max(both) - s / context / 2)
    assert cores[1].flops / cores[0].flops == pytest.approx(longer, rel=0.02)


def test_fused_attention_skips_what_is_outside_of_its_window() -> None:
    # Mistral's 4,096 tokens: each query of the second half attends to half of what it could.
    found = [
        next(
            o
            for o in of("mistral-7b", "local_block", fused(), seq_len=n).operators
            if o.name == "core"
        )
        for n in (4096, 16384)
    ]
    counted = sum(min(i + 1, 4096) for i in range(16384))

    assert found[0].flops == 4 * B * 4096 * 4096 / 2 * 4096
    assert found[1].flops == pytest.approx(4 * B * counted * 4096, rel=1e-3)


def test_the_last_tile_of_each_expert_is_half_empty() -> None:
    """Against tokens dealt out to experts: rows that tiles have over rows that tokens fill."""
    rng = np.random.default_rng(5)
    for experts, tokens in ((8, 65536), (32, 16384), (64, 4096)):
        rows = rng.multinomial(tokens, np.full(experts, 1 / experts), size=400)
        filled = tokens / (np.ceil(rows / 128) * 128).sum(axis=1).mean()
        share = tokens / (tokens + experts * 128 / 2)
        assert share == pytest.approx(filled, rel=0.02)

    # DeepSeek-V3 among 64 ranks: as many tokens as a rank has, 8 times, on 4 experts.
    found = of("deepseek-v3", "moe_block", fused(expert_tile=128, expert_spread=0.0), expert=64)
    rate = 8 * TOKENS / (8 * TOKENS + 4 * 64)
    shares = {o.name: o.share for o in found.operators if o.kind == "matmul"}
    assert shares["expert_up"] == shares["expert_down"] == pytest.approx(rate)
    assert shares["shared_up"] == shares["router"] == 1.0


def test_a_rank_attends_to_a_whole_head_of_keys_however_few_there_are() -> None:
    """Llama-3.1-8B has 8 heads of keys of 128 features, and 32 of queries."""
    kernels = fused(keeps_gathered=False)
    eight, sixteen = (of("llama-3.1-8b", "block", kernels, tensor=t) for t in (8, 16))
    head = B * S * 128 * 2.0

    # Queries, keys and values of the one projection: 4 + 2 heads of 8 ranks, 2 + 2 of 16.
    assert eight.sizes["qkv"] == 6 * head
    assert sixteen.sizes["qkv"] == 4 * head
    products = [
        sum(op.flops for op in layer.operators if op.kind == "matmul") for layer in (eight, sixteen)
    ]
    assert products[0] == pytest.approx(2 * products[1])


def test_ranks_that_divide_experts_gather_tokens_and_scatter_sums() -> None:
    # Mixtral, 4 ranks of experts x 2 that divide each: a rank has half of its tokens, sends them
    # twice each, and has those of both behind the gather.
    found = of("mixtral-8x7b", "moe_block", fused(expert_spread=0.0), tensor=2, expert=4)
    both = of(
        "mixtral-8x7b", "moe_block", fused(expert_spread=0.0), tensor=2, expert=4, expert_tensor=2
    )
    sizes = {o.name: (o.kind, o.axis, o.moved_bytes) for o in both.operators}
    own = 2 * TOKENS / 2 * 4096 * 2

    assert sizes["arrived"][2] == own == sizes["returned"][2]
    assert sizes["expert_gather"] == ("all_gather", "expert_tensor", 2 * own)
    assert sizes["expert_scatter"] == ("reduce_scatter", "expert_tensor", 2 * own)
    plain = {o.name: o.moved_bytes for o in found.operators}
    assert plain["arrived"] == own and "expert_gather" not in plain
    names = [o.name for o in both.operators]
    assert names.index("arrived") < names.index("expert_gather") < names.index("expert_up")
    assert names.index("expert_down") < names.index("expert_scatter") < names.index("returned")
