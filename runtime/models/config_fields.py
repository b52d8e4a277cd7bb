"""Fields of a model's configuration beside its sizes: executed, without effect, off, or refused.

A launch runs the library's own layers, norms and rotary tables, so what these read is executed; the
embedding, the head and the loss are ours.  Each field of a configuration's class stands in one of
the sets below, and any other that is not at its default is refused by its name: a version of the
library may have fields that are not known here.  Keys of a config.json that are no fields of its
class are not read by the library either.

Nothing here imports the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DRAWS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "resid_pdrop",
    "residual_dropout",
    "router_jitter_noise",
)
"""Off in a launch: what they draw would depend on the plan."""
SIZES = frozenset(
    {
        "decoder_sparse_step",
        "first_k_dense_replace",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "max_position_embeddings",
        "mlp_only_layers",
        "moe_intermediate_size",
        "multi_query",
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "shared_expert_intermediate_size",
        "tie_word_embeddings",
        "v_head_dim",
        "vocab_size",
    }
)
"""Read as figures (planner.architectures.architecture), which must be those of the plan."""
EXECUTED = frozenset(
    {
        "activation_function",
        "attention_bias",
        "attention_multiplier",
        "attention_out_bias",
        "attention_softmax_in_fp32",
        "attn_logit_softcapping",
        "embedding_multiplier",
        "final_logit_softcapping",
        "hidden_act",
        "hidden_activation",
        "initializer_range",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layer_types",
        "logits_scaling",
        "max_window_layers",
        "mlp_bias",
        "n_group",
        "no_rope_layer_interval",
        "no_rope_layers",
        "norm_eps",
        "norm_epsilon",
        "norm_topk_prob",
        "original_max_position_embeddings",
        "pad_token_id",
        "qk_layernorm",
        "qkv_bias",
        "query_pre_attn_scalar",
        "reorder_and_upcast_attn",
        "residual_multiplier",
        "rms_norm_eps",
        "rope_interleave",
        "rope_parameters",
        "routed_scaling_factor",
        "scale_attention_softmax_in_fp32",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
        "topk_group",
        "topk_method",
        "use_bias",
        "use_qk_norm",
        "use_sliding_window",
    }
)
"""Read by the library's layers, norms and tables, or by the embedding and head here."""
WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "num_mtp_layers",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "transformers_version",
        "use_cache",
    }
)
"""On a step of a causal language model: of generation, of other heads, or read by nothing.  The
coefficient of the routers' loss counts with `output_router_logits` alone."""


def drawn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json asks for that is off in a launch."""
    return {name: config[name] for name in DRAWS if config.get(name)}


def unexecuted_fields(config: Any, layer_types: Sequence[str]) -> Iterator[str]:
    """Yield what a configuration asks for that is not executed: the field, its value, the way out.

    `layer_types` has the kind of attention of each layer as it was planned.
    """
    if getattr(config, "is_heterogeneous", False):
        yield "per_layer_config has settings of single layers, which are not executed here"
        return  # what layers differ in is no field then
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name == "output_router_logits":
            yield from _router_loss(config)
        elif name == "layer_types":
            if value is not None and list(value) != list(layer_types):
                yield (
                    f"layer_types is {_text(value)}, and the plan's model has {_text(layer_types)}"
                )
        elif name == "pad_token_id":
            if value is not None and not 0 <= value < config.vocab_size:
                yield f"pad_token_id is {value}, and there are {config.vocab_size} tokens"
        elif name in SIZES or name in EXECUTED or name in WITHOUT_EFFECT or name in DRAWS:
            continue
        elif value != (default := _default(field)) and (value or default):
            yield (
                f"{name} is {_text(value)}, which is not executed here; set it to {_text(default)}"
            )


def _router_loss(config: Any) -> Iterator[str]:
    """Yield the loss of the routers, which couples all tokens and layers of the batch."""
    factor = getattr(config, "router_aux_loss_coef", 0.0)
    if config.output_router_logits and factor:
        yield (
            f"output_router_logits is true, which adds {factor:g} times a loss of all routers over "
            "the whole batch; only cross entropy is trained here. Set it to false to train on that"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _text(value: Any) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 90 else f"{text[:87]}..."
