"""How tensor parallelism treats modules of `transformers` layers that the runtime does not train.

Styles are those of `meshwright.runtime.parallel.tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.planner.documents.model import Architecture
from meshwright.runtime.core.layer_names import TensorStyle


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
    return _attention_styles("self_attn", "o_proj") | _gated_styles("mlp")


def _attention_styles(path: str, out: str) -> dict[str, TensorStyle]:
    """Of queries, keys and values each from a product of its own."""
    result: dict[str, TensorStyle] = {path: "gather", f"{path}.{out}": "rows"}
    return result | {f"{path}.{name}_proj": "columns" for name in "qkv"}


def _plain_styles(path: str, inner: str, outer: str) -> dict[str, TensorStyle]:
    """Of two products, the first divided by columns."""
    return {path: "gather", f"{path}.{inner}": "columns", f"{path}.{outer}": "rows"}


def _gated_styles(path: str) -> dict[str, TensorStyle]:
    return _plain_styles(path, "up_proj", "down_proj") | {f"{path}.gate_proj": "columns"}


def _mixture_styles(shared: str) -> dict[str, TensorStyle]:
    """Of experts beside others that all tokens go to."""
    return {
        "mlp": "mixture",
        "mlp.experts": "experts",
        f"{shared}.gate_proj": "columns",
        f"{shared}.up_proj": "columns",
        f"{shared}.down_proj": "part",
    }


def _starcoder_styles(kind: str) -> dict[str, TensorStyle]:
    return _attention_styles("self_attn", "o_proj") | _plain_styles("mlp", "c_fc", "c_proj")


def _qwen_styles(kind: str) -> dict[str, TensorStyle]:
    if kind == "dense_block":
        return _llama_styles(kind)
    return _attention_styles("self_attn", "o_proj") | _mixture_styles("mlp.shared_expert")


def _deepseek_styles(kind: str) -> dict[str, TensorStyle]:
    result = _plain_styles("self_attn", "q_b_proj", "o_proj")
    result["self_attn.kv_b_proj"] = "columns"
    if kind == "dense_block":
        return result | _gated_styles("mlp")
    return result | _mixture_styles("mlp.shared_experts")


def _glm_styles(kind: str) -> dict[str, TensorStyle]:
    if kind == "dense_block":
        return _llama_styles(kind)
    return _attention_styles("self_attn", "o_proj") | _mixture_styles("mlp.shared_experts")


def _nemotron_styles(kind: str) -> dict[str, TensorStyle]:
    return _attention_styles("self_attn", "o_proj") | _plain_styles("mlp", "up_proj", "down_proj")


def _phi_styles(kind: str) -> dict[str, TensorStyle]:
    return _attention_styles("self_attn", "dense") | _plain_styles("mlp", "fc1", "fc2")


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
    return _attention_styles("self_attn", "out_proj") | {
        "fc1.inner": "gather",
        "fc1.inner.0": "columns",
        "fc2.inner.0": "rows",
    }


def _fused_styles(path: str) -> dict[str, TensorStyle]:
    return _plain_styles(path, "query_key_value", "dense") | _plain_styles(
        "mlp", "dense_h_to_4h", "dense_4h_to_h"
    )


def _neox_styles(kind: str) -> dict[str, TensorStyle]:
    return _fused_styles("attention")


def _falcon_styles(kind: str) -> dict[str, TensorStyle]:
    return _fused_styles("self_attention")


def _gptj_styles(kind: str) -> dict[str, TensorStyle]:
    return _attention_styles("attn", "out_proj") | _plain_styles("mlp", "fc_in", "fc_out")


def _gpt2_styles(kind: str) -> dict[str, TensorStyle]:
    return _plain_styles("attn", "c_attn", "c_proj") | _plain_styles("mlp", "c_fc", "c_proj")


def _vit_styles(kind: str) -> dict[str, TensorStyle]:
    return _attention_styles("attention", "o_proj") | _plain_styles("mlp", "fc1", "fc2")


def _mpt_styles(kind: str) -> dict[str, TensorStyle]:
    return _plain_styles("attn", "Wqkv", "out_proj") | _plain_styles("ffn", "up_proj", "down_proj")


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
    "glm4_moe": _glm_styles,
    "granite": _llama_styles,
    "nemotron": _nemotron_styles,
    "opt": _opt_styles,
    "phi": _phi_styles,
    "qwen2_moe": _qwen_styles,
    "seed_oss": _llama_styles,
    "smollm3": _llama_styles,
    "starcoder2": _starcoder_styles,
    "vit": _vit_styles,
}
