"""Megatron-Bridge's overrides of a recipe (YAML), by the names of Megatron-LM's arguments."""

from __future__ import annotations

from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import megatron
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig

_OTHER_NAMES = {
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "num_moe_experts": "num-experts",
}
_SECTIONS = ("model", "train", "dataset", "ddp", "optimizer", "scheduler")
_RECIPES = (("mxfp8", "mxfp8"), ("current", "tensorwise"), ("subchannel", "blockwise"))
"""What names of mixed precision say of scales; others are delayed."""


def read(text: str) -> ParsedConfig:
    """Return what the overrides say."""
    data = limits.settings(text, "megatron-bridge")
    flags: dict[str, Any] = {}
    places: dict[str, str] = {}
    for section in _SECTIONS:
        values = data.get(section) or {}
        if not isinstance(values, dict):
            raise DocumentError(section, f"is {values!r:.40}; it is a section of settings")
        for key, value in values.items():
            if value is None or value is False:
                continue
            name = _OTHER_NAMES.get(key, key.replace("_", "-"))
            flags[name] = value
            places[f"--{name}"] = f"{section}.{key}"
    if flags.get("num-query-groups"):
        flags["group-query-attention"] = True
    mixed = data.get("mixed_precision")
    if isinstance(mixed, str):
        plain = mixed.replace("-", "_")
        flags["fp16" if plain.startswith("fp16") else "bf16"] = True
        if "fp8" in plain:
            flags["fp8"] = "hybrid"
            flags["fp8-param-gather"] = "subchannel" not in plain
            recipes = [recipe for word, recipe in _RECIPES if word in plain]
            flags["fp8-recipe"] = recipes[0] if recipes else "delayed"
    config = megatron.of_flags(flags)
    config.framework = "megatron-bridge"
    config.unknown = [
        *(key for key in data if key not in (*_SECTIONS, "mixed_precision")),
        *(places.get(key, key) for key in config.unknown),
    ]
    return config
