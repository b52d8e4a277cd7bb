"""How tensor parallelism treats modules of `transformers` layers that the runtime does not train.

Styles are those of `runtime.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.model import Architecture
from runtime.adapter import TensorStyle


def styles_of(a: Architecture, kind: str) -> dict[str, TensorStyle]:
    """Return how tensor parallelism treats the modules of a layer."""
    if kind == "embedding":
        return {"" if _alone(a) else "parts.tokens": "vocabulary"}
    if kind == "head":
        return {} if a.classes else {"parts.output": "logits"}
    styles = _BLOCK_STYLES[a.family](kind)
    if a.latent is not None and not a.latent.q_rank:
        styles["self_attn.q_proj"] = styles.pop("self_attn.q_b_proj")
    return {f"module.{path}": style for path, style in styles.items()}


def _alone(a: Architecture) -> bool:
    """Whether the embedding is a look-up of tokens and nothing else."""
    return not (a.positions == "learned" or a.token_types or a.embedding_norm)


def _llama_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {"self_attn": "gather", "self_attn.o_proj": "rows"}
    result |= {f"self_attn.{name}_proj": "columns" for name in "qkv"}
    return result | _gated_styles("mlp")


def _gated_styles(path: str) -> dict[str, TensorStyle]:
    return {
        path: "gather",
        f"{path}.gate_proj": "columns",
        f"{path}.up_proj": "columns",
        f"{path}.down_proj": "rows",
    }


def _starcoder_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {"self_attn": "gather", "self_attn.o_proj": "rows"}
    result |= {f"self_attn.{name}_proj": "columns" for name in "qkv"}
    return result | {"mlp": "gather", "mlp.c_fc": "columns", "mlp.c_proj": "rows"}


def _qwen_styles(kind: str) -> dict[str, TensorStyle]:
    if kind == "dense_block":
        return _llama_styles(kind)
    attention = {name: style for name, style in _llama_styles(kind).items() if "self" in name}
    return attention | {
        "mlp": "mixture",
        "mlp.experts": "experts",
        "mlp.shared_expert.gate_proj": "columns",
        "mlp.shared_expert.up_proj": "columns",
        "mlp.shared_expert.down_proj": "part",
    }


def _deepseek_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {
        "self_attn": "gather",
        "self_attn.q_b_proj": "columns",
        "self_attn.kv_b_proj": "columns",
        "self_attn.o_proj": "rows",
    }
    if kind == "dense_block":
        return result | _gated_styles("mlp")
    return result | {
        "mlp": "mixture",
        "mlp.experts": "experts",
        "mlp.shared_experts.gate_proj": "columns",
        "mlp.shared_experts.up_proj": "columns",
        "mlp.shared_experts.down_proj": "part",
    }


def _bert_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "attention.self": "gather",
        "attention.self.query": "columns",
        "attention.self.key": "columns",
        "attention.self.value": "columns",
        "attention.output.dense": "rows",
        "intermediate": "gather",
        "intermediate.dense": "columns",
        "output.dense": "rows",
    }


def _opt_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "self_attn": "gather",
        "self_attn.q_proj": "columns",
        "self_attn.k_proj": "columns",
        "self_attn.v_proj": "columns",
        "self_attn.out_proj": "rows",
        "fc1.inner": "gather",
        "fc1.inner.0": "columns",
        "fc2.inner.0": "rows",
    }


def _neox_styles(kind: str) -> dict[str, TensorStyle]:
    return _fused_styles("attention", "query_key_value", "dense")


def _fused_styles(path: str, inner: str, outer: str) -> dict[str, TensorStyle]:
    return {
        path: "gather",
        f"{path}.{inner}": "columns",
        f"{path}.{outer}": "rows",
        "mlp": "gather",
        "mlp.dense_h_to_4h": "columns",
        "mlp.dense_4h_to_h": "rows",
    }


def _falcon_styles(kind: str) -> dict[str, TensorStyle]:
    return _fused_styles("self_attention", "query_key_value", "dense")


def _gptj_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {"attn": "gather", "attn.out_proj": "rows"}
    result |= {f"attn.{name}_proj": "columns" for name in "qkv"}
    return result | {"mlp": "gather", "mlp.fc_in": "columns", "mlp.fc_out": "rows"}


def _gpt2_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "attn": "gather",
        "attn.c_attn": "columns",
        "attn.c_proj": "rows",
        "mlp": "gather",
        "mlp.c_fc": "columns",
        "mlp.c_proj": "rows",
    }


def _vit_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "attention": "gather",
        "attention.q_proj": "columns",
        "attention.k_proj": "columns",
        "attention.v_proj": "columns",
        "attention.o_proj": "rows",
        "mlp": "gather",
        "mlp.fc1": "columns",
        "mlp.fc2": "rows",
    }


def _mpt_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "attn": "gather",
        "attn.Wqkv": "columns",
        "attn.out_proj": "rows",
        "ffn": "gather",
        "ffn.up_proj": "columns",
        "ffn.down_proj": "rows",
    }


_BLOCK_STYLES: dict[str, Callable[[str], dict[str, TensorStyle]]] = {
    "bert": _bert_styles,
    "bloom": _falcon_styles,
    "cohere": _llama_styles,
    "falcon": _falcon_styles,
    "gpt_neox": _neox_styles,
    "gpt2": _gpt2_styles,
    "gptj": _gptj_styles,
    "mpt": _mpt_styles,
    "deepseek_v2": _deepseek_styles,
    "deepseek_v3": _deepseek_styles,
    "gemma": _llama_styles,
    "gemma2": _llama_styles,
    "gemma3_text": _llama_styles,
    "granite": _llama_styles,
    "opt": _opt_styles,
    "qwen2_moe": _qwen_styles,
    "smollm3": _llama_styles,
    "starcoder2": _starcoder_styles,
    "vit": _vit_styles,
}
