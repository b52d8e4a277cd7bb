"""Families of causal language models: what they are called in transformers, and configured by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.architectures.parameters import block_kinds, slides
from meshwright.planner.documents.document import refuse_irregular
from meshwright.planner.documents.model import Architecture, Experts
from meshwright.planner.errors import LaunchError
from meshwright.runtime.models.config_fields import DRAWS, unexecuted_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFamily:
    """The transformers names of one model family, and its differences from Llama there."""

    classes: str
    """Prefix of its classes."""
    module: str = ""
    """Module of transformers.models, where it is not the family's name."""
    prefix: str = "model"
    """Attribute of the base model in the causal language model; parameter names begin with it."""
    embedding: str = "embed_tokens"
    layers: str = "layers"
    block: str = "DecoderLayer"
    """Suffix of the family's layer classes."""
    norm: str = "norm"
    norm_class: str = ""
    """Class of layer norms, where they are not torch's."""
    norm_epsilon: str = "rms_norm_eps"
    """The configuration's name for what norms add to the variance."""
    scaled_embedding: bool = False
    """Token vectors are multiplied by the root of the hidden size, rounded to their type."""
    norms_add_one: bool = False
    """A norm multiplies by 1 + weight."""
    rotary_of_type: bool = False
    """Sliding layers rotate by other angles than those that attend to all tokens."""
    hands_on: bool = True
    """Its layers hand on to attention what they do not know themselves."""
    own_attention: bool = False
    """Scores are capped or share their softmax with a sink: attention is softcap_attention's."""


_OF_GPT2: dict[str, Any] = {
    "prefix": "transformer",
    "embedding": "wte",
    "layers": "h",
    "block": "Block",
    "norm": "ln_f",
    "norm_epsilon": "layer_norm_epsilon",
}
FAMILIES = {
    "deepseek_v2": LibraryFamily(classes="DeepseekV2"),
    "deepseek_v3": LibraryFamily(classes="DeepseekV3"),
    "gemma": LibraryFamily(classes="Gemma", scaled_embedding=True, norms_add_one=True),
    "gemma2": LibraryFamily(
        classes="Gemma2", scaled_embedding=True, norms_add_one=True, own_attention=True
    ),
    "gemma3_text": LibraryFamily(
        classes="Gemma3",
        module="gemma3",
        scaled_embedding=True,
        norms_add_one=True,
        rotary_of_type=True,
    ),
    "glm4_moe": LibraryFamily(classes="Glm4Moe"),
    "gpt2": LibraryFamily(classes="GPT2", **_OF_GPT2),
    "gpt_bigcode": LibraryFamily(classes="GPTBigCode", **_OF_GPT2),
    "gpt_oss": LibraryFamily(classes="GptOss", own_attention=True),
    "granite": LibraryFamily(classes="Granite"),
    "llama": LibraryFamily(classes="Llama"),
    "mistral": LibraryFamily(classes="Mistral"),
    "mixtral": LibraryFamily(classes="Mixtral"),
    "nemotron": LibraryFamily(
        classes="Nemotron",
        norm_class="NemotronLayerNorm1P",
        norm_epsilon="norm_eps",
        hands_on=False,
    ),
    "olmo2": LibraryFamily(classes="Olmo2"),
    "olmo3": LibraryFamily(classes="Olmo3", rotary_of_type=True),
    "phi": LibraryFamily(classes="Phi", norm="final_layernorm", norm_epsilon="layer_norm_eps"),
    "phi3": LibraryFamily(classes="Phi3"),
    "qwen2": LibraryFamily(classes="Qwen2"),
    "qwen2_moe": LibraryFamily(classes="Qwen2Moe"),
    "qwen3": LibraryFamily(classes="Qwen3"),
    "qwen3_moe": LibraryFamily(classes="Qwen3Moe"),
    "seed_oss": LibraryFamily(classes="SeedOss"),
    "smollm3": LibraryFamily(classes="SmolLM3"),
    "starcoder2": LibraryFamily(classes="Starcoder2", norm_epsilon="norm_epsilon"),
}


def has_config(folder: Path) -> bool:
    """Tell whether this is a config.json or a folder that has one."""
    return (folder.suffix == ".json" and folder.is_file()) or (folder / "config.json").is_file()


def configuration(architecture: Architecture, folder: Path | None) -> Any:
    """Return transformers' configuration: a folder's own, or one made of our figures."""
    a = architecture
    figures = {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_positions,
        "tie_word_embeddings": a.tied_embeddings,
    }
    experts_only = a.experts if a.family in ("gpt_oss", "mixtral") else None
    if a.family == "gpt2":
        figures["n_inner"] = a.ffn_size
    elif a.family == "gpt_bigcode":
        figures |= {"n_inner": a.ffn_size, "multi_query": a.kv_heads == 1}
    else:
        figures |= {
            "intermediate_size": experts_only.ffn_size if experts_only else a.ffn_size,
            "num_key_value_heads": a.kv_heads,
        }
        if a.latent is None:
            figures["head_dim"] = a.head_dim
    if folder is not None:
        config = _read(folder, a)
        for name, figure in figures.items():
            value = getattr(config, name, figure)
            if value is not None and value != figure:
                raise LaunchError(f"{folder}: {name} is {value}, and the plan's model has {figure}")
    else:
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

        figures |= _figures_left_open(a)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = AutoConfig.for_model(a.family, **{**ends, **figures})
    if a.family == "gemma2" and (
        not config.attn_logit_softcapping or config.use_bidirectional_attention
    ):
        raise LaunchError(
            f"{folder}: Gemma-2 has causal attention and soft-capped scores here, as "
            "published; plan FOLDER:recorded, the model as its own class runs"
        )
    for name in DRAWS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # Fused kernels do not cap scores; the library's own attention does.
    config._attn_implementation = "eager" if FAMILIES[a.family].own_attention else "sdpa"
    if a.experts is not None:
        config._experts_implementation = "grouped_mm"
    return config


def _read(folder: Path, a: Architecture) -> Any:
    """Return a folder's configuration; refuse one that asks for what a launch would leave out."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

    refuse_irregular(folder)
    try:
        # Without a word transformers asks on the terminal whether to run a folder's code.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks of fields raise several kinds
        raise LaunchError(f"{folder}: transformers refuses the config.json: {error}") from error
    refused = next(unexecuted_fields(config, _types(a)), None)
    if refused:
        raise LaunchError(f"{folder}: {refused}")
    return config


def _figures_left_open(a: Architecture) -> dict[str, Any]:
    """Return what a family's configuration says beside the sizes that all have."""
    result: dict[str, Any] = {}
    if a.family in ("llama", "granite", "nemotron", "seed_oss", "smollm3"):
        result |= {"attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    if a.family == "seed_oss":
        result["attention_out_bias"] = a.output_bias
    if a.family == "glm4_moe":
        result["use_qk_norm"] = a.qk_norm
    if a.rotary_dim:
        result["partial_rotary_factor"] = a.rotary_dim / a.head_dim
    if a.family in (
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
    ):
        result["attention_bias"] = a.qkv_bias
    if a.family == "qwen2_moe":
        result["qkv_bias"] = a.qkv_bias
    if a.family == "starcoder2":
        result["use_bias"] = a.mlp_bias
    if a.family in ("gemma2", "gemma3_text", "gpt_oss", "olmo3"):
        # No window is one that is never left.
        result |= {"sliding_window": a.sliding_window or a.max_positions, "layer_types": _types(a)}
    if a.family in ("gemma2", "gemma3_text"):
        result |= {"query_pre_attn_scalar": a.head_dim}
    if a.family in ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "starcoder2"):
        result["sliding_window"] = a.sliding_window or None
    if a.family in ("qwen2", "qwen3"):
        result |= {"use_sliding_window": a.sliding_window > 0, "layer_types": _types(a)}
    if a.latent is not None:
        result |= {
            "q_lora_rank": a.latent.q_rank or None,
            "kv_lora_rank": a.latent.kv_rank,
            "qk_rope_head_dim": a.latent.rope_head_dim,
            "qk_nope_head_dim": a.latent.nope_head_dim,
            "v_head_dim": a.latent.value_head_dim,
        }
    return result | (_experts_left_open(a, a.experts) if a.experts is not None else {})


_GROUPS: dict[tuple[str, int], dict[str, Any]] = {
    ("deepseek_v2", 160): {
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    ("deepseek_v3", 256): {"n_group": 8, "topk_group": 4},
}
"""Groups of experts among which a router chooses first, of the published models that have them."""


def _experts_left_open(a: Architecture, routed: Experts) -> dict[str, Any]:
    """Return the same of routed."""
    result: dict[str, Any] = {"num_experts_per_tok": routed.per_token}
    if a.family == "mixtral":
        return result | {"num_local_experts": routed.count}
    result["moe_intermediate_size"] = routed.ffn_size
    if a.latent is not None or a.family == "glm4_moe":
        return result | {
            "n_routed_experts": routed.count,
            "n_shared_experts": routed.shared,
            "first_k_dense_replace": routed.dense_layers,
            **_GROUPS.get((a.family, routed.count), {"n_group": 1, "topk_group": 1}),
        }
    result |= {
        "num_experts": routed.count,
        "mlp_only_layers": list(range(routed.dense_layers)),
        "norm_topk_prob": True,
    }
    if a.family == "qwen2_moe":
        result["shared_expert_intermediate_size"] = routed.shared_ffn_size
    return result


def _types(architecture: Architecture) -> list[str]:
    """Return each layer's kind of attention."""
    kinds = block_kinds(architecture)
    return ["sliding_attention" if slides(kind) else "full_attention" for kind in kinds]
