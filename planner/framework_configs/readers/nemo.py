"""NeMo's configuration of its trainer and model (YAML), by the names of Megatron-LM's arguments."""

from __future__ import annotations

from typing import Any

from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import megatron
from meshwright.planner.framework_configs.readers.interpolation import resolve
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings

_OTHER_NAMES = {
    "encoder_seq_length": "seq-length",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "num_moe_experts": "num-experts",
    "num_query_groups": "num-query-groups",
    "use_flash_attention": "use-flash-attn",
    "expert_tensor_parallel_size": "expert-tensor-parallel-size",
    "ub_tp_comm_overlap": "tp-comm-overlap",
}
_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}
_SWITCHES = {"fp8_e4m3": "e4m3", "fp8_hybrid": "hybrid"}
_OPTIMIZERS = {"distributed_fused_adam": 1, "mcore_distributed_optim": 1, "fused_adam": 0}


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the configuration."""
    settings = Settings(resolve(limits.settings(text, "nemo"), surroundings))
    trainer, model = settings.part("trainer"), settings.part("model")
    flags: dict[str, Any] = {}
    names: dict[str, str] = {}
    optimizer = model.part("optim")
    eight = model.flag("fp8")
    for key, kind in _SWITCHES.items():
        if model.flag(key) and eight:
            flags["fp8-format"] = kind
    if eight:
        if "fp8-format" not in flags:
            model.name("fp8")
            flags["fp8-format"] = "hybrid"
        flags["fp8-param-gather"] = bool(model.flag("fp8_params"))
    else:
        model.idle("fp8_params")
    for key in model.unread:
        value = model.ignore(key)
        if value is None or isinstance(value, dict):
            if value is not None:
                names[str(key)] = f"model.{key}"
                flags[str(key)] = "section"
            continue
        name = _OTHER_NAMES.get(key, str(key).replace("_", "-"))
        flags[name] = value
        names[name] = f"model.{key}"
    if flags.get("num-query-groups"):
        flags["group-query-attention"] = True
    kind = trainer.choice("precision", _PRECISIONS, "fp32")
    if kind != "fp32":
        flags[kind] = True
    kind = optimizer.word("name") or ""
    if kind and kind not in _OPTIMIZERS:
        optimizer.name("name")
    if _OPTIMIZERS.get(kind, 0):
        flags["use-distributed-optimizer"] = True
    flags["overlap-grad-reduce"] = True
    config = megatron.of_flags(flags)
    devices, nodes = trainer.count("devices"), trainer.count("num_nodes") or 1
    config.devices = devices * nodes if devices else None
    config.trains_by_adamw(optimizer)
    config.trains(clip_norm=trainer.amount("gradient_clip_val"))
    config.unknown = [_in_place(word, names) for word in config.unknown]
    config.without_effect = [_in_place(word, names) for word in config.without_effect]
    config.gather(optimizer, "model.optim")
    config.gather(trainer, "trainer")
    config.gather(Settings({}), "model")
    config.unknown += [f"model.{word}" for word in model.unusual]
    config.without_effect += [f"model.{word}" for word in model.without_effect]
    config.unknown += list(settings.unread)
    config.understood += trainer.understood + optimizer.understood - 1
    return config


def _in_place(word: str, names: dict[str, str]) -> str:
    """Return a word of arguments as the configuration has it."""
    key, sign, value = word.removeprefix("--").partition("=")
    return names.get(key, key) + sign + value
