"""Parameters are counted as `transformers` builds them, layer by layer, and as authors publish."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.architectures import architecture, decoders
from meshwright.planner.architectures.architecture import (
    SUPPORTED,
    architecture_of,
    model_of_config,
)
from meshwright.planner.architectures.parameters import block_kinds, graph_of
from meshwright.planner.catalog import model_config, models
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.model import Architecture
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers is not installed (extra `torch`)",
)
DEPTH_KEY = {
    "bloom": "n_layer",
    "gpt2": "n_layer",
    "gpt_bigcode": "n_layer",
    "gptj": "n_layer",
    "mpt": "n_layers",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
}
UNLISTED: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "hidden_size": 4096,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "vocab_size": 151552,
        "use_qk_norm": True,
    },
    "gpt_bigcode": {
        "n_embd": 6144,
        "n_layer": 2,
        "n_head": 48,
        "n_positions": 8192,
        "vocab_size": 49152,
    },
    "nemotron": {
        "hidden_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "intermediate_size": 24576,
        "vocab_size": 256000,
    },
    "phi": {
        "hidden_size": 2560,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "vocab_size": 51200,
    },
    "seed_oss": {
        "hidden_size": 5120,
        "num_hidden_layers": 2,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 27648,
        "vocab_size": 155136,
        "pad_token_id": 1,
    },
    "llama4_text": {
        "hidden_size": 5120,
        "num_hidden_layers": 4,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "vocab_size": 202048,
    },
    "minimax_m2": {
        "hidden_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 16,
        "num_experts_per_tok": 8,
        "vocab_size": 200064,
        "rotary_dim": 64,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
    },
    "olmo2": {
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "pad_token_id": 1,
    },
    "olmo3": {
        "hidden_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "pad_token_id": 1,
        "sliding_window": 4096,
    },
}
"""Configurations of families of which the catalogue has no model."""


def config_of(kind: str) -> dict[str, Any]:
    """Return a configuration of a family."""
    listed = (dict(e.config) for e in models().values() if e.config["model_type"] == kind)
    return next(listed, {"model_type": kind, **UNLISTED.get(kind, {})})


VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama with a wide head": LLAMA | {"head_dim": 32, "tie_word_embeddings": True},
    "llama, keys like queries": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "qwen3 with biases": LLAMA | {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "mistral, no window": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "gpt2, own width": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 100,
        "n_positions": 128,
        "vocab_size": 320,
    },
    "opt, untied": {
        "model_type": "opt",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 128,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "gemma": LLAMA | {"model_type": "gemma", "head_dim": 32},
    "gemma-3": LLAMA | {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8},
    "granite": LLAMA | {"model_type": "granite", "tie_word_embeddings": True},
    "phi-3": LLAMA | {"model_type": "phi3", "pad_token_id": 0},
    "smollm3": LLAMA | {"model_type": "smollm3", "pad_token_id": 0},
    "starcoder2": LLAMA | {"model_type": "starcoder2"},
    "starcoder2, no biases": LLAMA | {"model_type": "starcoder2", "use_bias": False},
    "qwen2-moe": LLAMA
    | {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [0],
    },
    "deepseek-v2": LLAMA
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "gpt-neox, one after the other": {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 320,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "falcon with biases, one norm": {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 320,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },
    "vit without biases": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 1,
        "qkv_bias": False,
        "num_labels": 7,
    },
    "qwen3_moe, first block dense": LLAMA
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "deepseek_v3, direct queries": LLAMA
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}


def counts_by_layer(config: dict[str, Any]) -> dict[str, int]:
    """Count the parameters of the `transformers` model: each block by its index, and the rest."""
    import torch
    import transformers

    kind = config["model_type"]
    made = transformers.AutoConfig.for_model(**config)
    classes = {
        "bert": transformers.AutoModelForMaskedLM,
        "vit": transformers.AutoModelForImageClassification,
    }
    with torch.device("meta"):
        model = classes.get(kind, transformers.AutoModelForCausalLM).from_config(made)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", name)
        place = f"block.{block[1]}" if block else "rest"
        counts[place] = counts.get(place, 0) + parameter.numel()
    return counts


def our_counts(config: dict[str, Any]) -> dict[str, int]:
    graph = graph_of(architecture_of(config, name="model"), name="model")
    counts = {name: layer.parameters for name, layer in graph.chain}
    return {name: count for name, count in counts.items() if name.startswith("block.")} | {
        "rest": counts["embedding"] + counts["head"]
    }


@pytest.mark.spread(2)
@needs_transformers
@pytest.mark.parametrize("name", sorted(models()))
def test_each_layer_of_a_catalogue_model_counts_as_transformers_builds_it(name: str) -> None:
    config = model_config(name)
    config[DEPTH_KEY.get(config["model_type"], "num_hidden_layers")] = 2
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1

    assert our_counts(config) == counts_by_layer(config)


@needs_transformers
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_each_layer_of_a_variant_counts_as_transformers_builds_it(variant: str) -> None:
    config = VARIANTS[variant]

    assert our_counts(config) == counts_by_layer(dict(config))


@needs_transformers
@pytest.mark.parametrize("kind", SUPPORTED)
def test_each_layer_of_a_family_counts_as_transformers_builds_it(kind: str) -> None:
    config = config_of(kind) | {DEPTH_KEY.get(kind, "num_hidden_layers"): 2}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1

    assert our_counts(config) == counts_by_layer(dict(config))


@needs_transformers
@pytest.mark.parametrize("kind", SUPPORTED)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    """A configuration that leaves out all that may be left out means what transformers takes."""
    import transformers

    required = config_of(kind)
    for key in (
        "tie_word_embeddings",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings" if kind not in ("bert", "opt") else "",
        "sliding_window" if kind not in ("mixtral",) else "",
        "use_sliding_window",
        "decoder_sparse_step",
        "mlp_only_layers",
        "type_vocab_size",
        "qkv_bias",
        "q_lora_rank",
        "moe_layer_freq",
        "num_labels",
        "num_channels",
        "do_layer_norm_before",
    ):
        required.pop(key, None)
    if kind == "opt":
        required["word_embed_proj_dim"] = 2048
    if "num_attention_heads" in required and kind != "vit":
        required |= {"num_attention_heads": 32, "hidden_size": 2048}
    taken = transformers.AutoConfig.for_model(**required).to_dict()
    if kind == "vit":
        taken["num_labels"] = 2  # a bare config of transformers has two labels, a file's are listed
        required["num_labels"] = 2

    ours = architecture_of(required, name=kind).model_dump()
    theirs = architecture_of(taken, name=kind).model_dump()

    ours.pop("max_positions")
    theirs.pop("max_positions")
    assert ours == theirs
    assert model_of_config(taken, name=kind, source=kind).not_understood is None


def test_a_setting_that_no_reader_knows_is_named_and_switches_that_are_off_are_not() -> None:
    """A wrong name is a setting that a user relies on, and that changes nothing."""
    off: dict[str, Any] = {
        "use_engrams": False,
        "mtp_modules": 0,
        "indexer": None,
        "moe_layers_list": [],
    }
    off["quantization_config"] = {"quant_method": "fp8"}
    engrams = {"engram_size": 4, "num_kv_heads_": 2, "cross_layers": [1, 3]}

    for kind in SUPPORTED:
        config = config_of(kind)
        plain = model_of_config(config | off, name=kind, source=kind)
        odd = model_of_config(config | engrams, name=kind, source=kind)

        assert plain.not_understood is None, kind
        assert odd.not_understood == ("engram_size=4", "num_kv_heads_=2", "cross_layers=[1, 3]")
        assert odd.digest == plain.digest  # which profiles and plans know the model by
    packed = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (named,) = model_of_config(LLAMA | packed, name="x", source="x").not_understood or ()
    assert named.startswith("quantization_config=")


def test_a_model_whose_settings_were_not_understood_is_answered_without_certainty(
    tmp_path: Path,
) -> None:
    def folder(name: str, **more: Any) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | more))
        return str(tmp_path / name)

    job = Job(seq_len=64, global_batch=8)
    plain, odd = (
        search(Request(resolve_model(path), resolve_cluster("2xh100"), job)).prediction
        for path in (folder("plain"), folder("odd", engram_size=4))
    )

    assert odd.step_time_s == plain.step_time_s
    assert odd.step_time_low_s < plain.step_time_low_s
    assert odd.step_time_high_s > plain.step_time_high_s
    assert (plain.fit_probability, odd.fit_probability) == (1.0, 0.85)
    assert any("engram_size=4" in note for note in odd.notes)


@pytest.mark.parametrize("name", sorted(n for n, m in models().items() if m.parameters))
def test_the_total_is_what_the_authors_publish(name: str) -> None:
    published = models()[name].parameters

    assert resolve_model(name).parameters == pytest.approx(published, rel=0.004)


def test_totals_that_everybody_knows_are_exact() -> None:
    exact = {
        "gpt2": 124_439_808,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.1-405b": 405_853_388_800,
        "mixtral-8x7b": 46_702_792_704,
        "deepseek-v3": 671_026_404_352,
        "qwen3-235b-a22b": 235_093_634_560,
        "bert-base": 109_514_298,
        "vit-h-14": 632_045_800,
    }

    assert {name: resolve_model(name).parameters for name in exact} == exact


def test_our_own_models_are_of_the_size_that_they_are_for() -> None:
    assert 2e6 < resolve_model("demo-4m").parameters < 5e6
    assert resolve_model("local-25m").parameters >= 20e6


def test_blocks_alternate_where_the_model_does() -> None:
    gemma = resolve_model("gemma-2-9b")
    kinds = [layer.kind for _, layer in gemma.chain]

    assert kinds[:4] == ["embedding", "local_block", "block", "local_block"]
    assert [name for name, _ in gemma.chain][-2:] == ["block.41", "head"]


def test_leading_blocks_of_a_mixture_may_be_dense() -> None:
    deepseek = resolve_model("deepseek-v3")

    assert [(layer.kind, layer.repeat) for layer in deepseek.layers] == [
        ("embedding", 1),
        ("dense_block", 3),
        ("moe_block", 58),
        ("head", 1),
    ]


def test_every_block_of_mistral_is_local_and_none_of_llama() -> None:
    mistral = architecture_of(model_config("mistral-7b"), name="mistral-7b")
    llama = architecture_of(model_config("llama-2-7b"), name="llama-2-7b")

    assert set(block_kinds(mistral)) == {"local_block"}
    assert set(block_kinds(llama)) == {"block"}


def test_a_model_of_one_block_still_numbers_it() -> None:
    graph = graph_of(architecture_of(LLAMA | {"num_hidden_layers": 1}, name="x"), name="x")

    assert [name for name, _ in graph.chain] == ["embedding", "block.0", "head"]


def test_tied_weights_count_in_the_embedding() -> None:
    tied = our_counts(LLAMA | {"tie_word_embeddings": True})
    untied = our_counts(LLAMA | {"tie_word_embeddings": False})

    assert untied["rest"] - tied["rest"] == 320 * 64


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"hidden_size": -64}, "hidden_size", "is -64"),
        ({"hidden_size": 0}, "hidden_size", "is 0"),
        ({"hidden_size": 64.5}, "hidden_size", "is 64.5"),
        ({"hidden_size": float("inf")}, "hidden_size", "is inf"),
        ({"hidden_size": True}, "hidden_size", "is True"),
        ({"hidden_size": "64"}, "hidden_size", "is '64'"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers", "whole number"),
        ({"num_hidden_layers": 10**9}, "layers", "100000"),
        ({"num_attention_heads": 5}, "num_key_value_heads", "does not divide"),
        ({"num_attention_heads": 6}, "num_attention_heads", "does not divide"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"model_type": "mamba"}, "model_type", "carry a state"),
        ({"model_type": "qwen3_next"}, "model_type", "carry a state"),
        ({"model_type": "t5"}, "model_type", "encoder"),
        ({"model_type": "whisper"}, "model_type", "encoder"),
        ({"model_type": "deepseek_v32"}, "model_type", "indexer"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "model_type",
            "'gemma3_text'",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
            "model_type",
            "carry a state",
        ),
        ({"model_type": "lama"}, "model_type", "llama"),
        ({"model_type": "gemma3_text", "layer_types": ["all"]}, "layer_types", "each of 2"),
        ({"model_type": 3}, "model_type", "is missing"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "num_experts_per_tok", "is missing"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers", "leading"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step", "is 2"),
    ],
)
def test_a_wrong_figure_is_named_by_its_own_key(
    change: dict[str, Any], path: str, says: str
) -> None:
    with pytest.raises(DocumentError, match=says) as caught:
        architecture_of(LLAMA | change, name="x")

    assert caught.value.path == path


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(SUPPORTED),
    change=st.dictionaries(
        st.sampled_from(
            sorted({key for entry in models().values() for key in entry.config} - {"model_type"})
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.integers(-2, 3), max_size=3)
        | st.sampled_from([1, 2, 64, 128]),
        max_size=6,
    ),
)
def test_no_configuration_ends_in_a_traceback(kind: str, change: dict[str, Any]) -> None:
    config = config_of(kind)
    try:
        architecture = architecture_of(config | change, name="x")
    except DocumentError:
        return
    assert isinstance(architecture, Architecture)


def test_a_family_is_added_by_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = {"newllama": lambda config: decoders.llama(config, "newllama")}
    monkeypatch.setattr(architecture, "_READERS", {**architecture._READERS, **reader})
    config = {**model_config("llama-3.2-1b"), "num_hidden_layers": 4}
    cluster, job = resolve_cluster("8xh100"), Job(seq_len=2048, global_batch=64)
    seconds = {}

    for kind in ("llama", "newllama"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        model = resolve_model(str(tmp_path))
        assert model.architecture is not None
        assert model.architecture.family == kind
        seconds[kind] = search(Request(model, cluster, job)).prediction.step_time_s

    assert seconds["newllama"] == pytest.approx(seconds["llama"])


def test_any_pattern_of_windows_is_read() -> None:
    """Blocks that see all tokens may stand anywhere; expected kinds are written out by hand."""

    def kinds(**figures: Any) -> list[str]:
        config = LLAMA | {"num_hidden_layers": 5, "sliding_window": 8} | figures
        return list(block_kinds(architecture_of(config, name="x")))

    def of(spans: str) -> list[str]:
        return ["full_attention" if span == "f" else "sliding_attention" for span in spans]

    gemma, oss = {"model_type": "gemma3_text"}, {"model_type": "gpt_oss"}
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}

    assert kinds(**gemma, layer_types=of("sffsf")) == [
        "local_block", "block", "block", "local_block", "block",
    ]  # fmt: skip
    assert kinds(**gemma, layer_types=of("sfsfs")) == ["local_block", "block"] * 2 + ["local_block"]
    assert kinds(**gemma, layer_types=of("fffff")) == ["block"] * 5
    assert kinds(**gemma, layer_types=of("sssss")) == ["local_block"] * 5
    assert kinds(**gemma, sliding_window_pattern=3)[2] == "block"
    assert kinds(**qwen) == ["block"] * 2 + ["local_block"] * 3
    alternating = ["local_moe_block", "moe_block"] * 2 + ["local_moe_block"]
    assert kinds(**oss, **routed) == alternating
    assert kinds(model_type="mixtral", **routed) == ["local_moe_block"] * 5


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Kimi-K2-Base": (
        {
            "model_type": "kimi_k2",
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 163840,
            "tie_word_embeddings": False,
        },
        1.04e12,
        0.02,
    ),
    "gemma-3-4b-it": (  # 4.3e9 with its tower of 0.42e9
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        3.88e9,
        0.01,
    ),
    "gemma-3-27b-it": (  # 27.4e9 with its tower of 0.42e9
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "sliding_window": 1024,
            },
        },
        27.0e9,
        0.01,
    ),
    "GLM-4.5": (  # without its layer for further tokens
        {
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "vocab_size": 151552,
            "tie_word_embeddings": False,
        },
        355e9,
        0.01,
    ),
    "Llama-4-Scout-17B-16E": (  # 109e9 with its tower
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "no_rope_layers": [],
                "attention_chunk_size": 8192,
                "vocab_size": 202048,
            },
        },
        108e9,
        0.01,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rotary_dim": 64,
            "vocab_size": 200064,
            "tie_word_embeddings": False,
        },
        229e9,
        0.01,
    ),
}
"""Configurations after those of the hub: figures, published parameters, and their rounding."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_count_what_their_authors_say(name: str, tmp_path: Path) -> None:
    config, parameters, rounding = PUBLISHED[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))

    model = resolve_model(str(folder))

    assert model.parameters == pytest.approx(parameters, rel=rounding)
    assert model.name == name + ("-language-model-alone" if "text_config" in config else "")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_next"}, "carry a state"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "qwen3_5_text"),
        ({"model_type": "minimax"}, "carry a state"),
        ({**LLAMA, "model_type": "llama4_text", "interleave_moe_layer_step": 2}, "take turns"),
    ],
)
def test_what_has_no_figures_is_refused_with_its_reason(config: dict[str, Any], says: str) -> None:
    kind = config["model_type"]
    with pytest.raises(DocumentError, match=says):
        architecture_of({**config, "model_type": kind}, name="x")
