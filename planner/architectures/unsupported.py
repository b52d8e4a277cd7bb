"""Model types that are known and not planned, each with the reason in a sentence."""

from __future__ import annotations

from typing import Any

_STATEFUL = (
    "has layers that carry a state along the sequence (a state-space model or linear attention), "
    "which the planner has no figures of"
)
_TWO_SEQUENCES = "attends to an encoder's sequence, which the planner has no figures of"
_SPARSE = "attends to keys that an indexer chooses, which the planner has no figures of"
_OF_KIND = {
    _STATEFUL: (
        "bamba",
        "bailing_hybrid",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ),
    _TWO_SEQUENCES: (
        "bart",
        "blenderbot",
        "encoder_decoder",
        "led",
        "m2m_100",
        "marian",
        "mbart",
        "moonshine",
        "mt5",
        "nllb_moe",
        "pegasus",
        "prophetnet",
        "speech_to_text",
        "switch_transformers",
        "t5",
        "t5gemma",
        "umt5",
        "whisper",
    ),
    _SPARSE: ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
}
REASONS = {kind: reason for reason, kinds in _OF_KIND.items() for kind in kinds}


def reason(kind: str, config: Any) -> str | None:
    """Return why a known model type has no figures, or None if it is not known either.

    Whatever joins towers for images or sound with a language model says so by `text_config`.

    >>> reason("gemma3", {"text_config": {"model_type": "gemma3_text"}})
    "joins other inputs with a language model; that alone can be planned: a config.json with what \
stands in its text_config, whose model_type is 'gemma3_text'"
    """
    if kind in REASONS:
        return REASONS[kind]
    text = config.get("text_config")
    if isinstance(text, dict):
        model_type = text.get("model_type")
        inner = model_type if isinstance(model_type, str) else "llama"
        if inner in REASONS:
            return f"joins other inputs with '{inner}', which {REASONS[inner]}"
        return (
            "joins other inputs with a language model; that alone can be planned: a config.json "
            f"with what stands in its text_config, whose model_type is '{inner:.60}'"
        )
    return None
