"""accelerate's configuration of its launcher (YAML)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import deepspeed
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    WORDS_OF_TRUTH,
    ParsedConfig,
    Settings,
    named_file,
)
from meshwright.planner.framework_configs.readers.transformers import USUAL_IN_FSDP

_STRATEGIES = {
    "1": 3, "FULL_SHARD": 3, "2": 2, "SHARD_GRAD_OP": 2, "3": 0, "NO_SHARD": 0,
    "4": 3, "HYBRID_SHARD": 3, "5": 2, "HYBRID_SHARD_ZERO2": 2,
}  # fmt: skip


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the configuration."""
    return of_settings(limits.settings(text, "accelerate"), surroundings)


def of_settings(
    data: dict[str, Any], surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return the parsed settings; a file of DeepSpeed that they name is read too."""
    settings = Settings(data)
    kind = settings.word("distributed_type") or "MULTI_GPU"
    nested = settings.part("deepspeed_config")
    config = ParsedConfig(framework="accelerate")
    if kind == "DEEPSPEED":
        config = _of_deepspeed(nested, surroundings)
    config.devices = settings.count("num_processes")
    precision = settings.word("mixed_precision") or ("auto" if kind == "DEEPSPEED" else "no")
    if precision != "auto":
        known_precisions = {"no": "fp32", "False": "fp32", "bf16": "bf16", "fp16": "fp16"}
        config.precision = settings.choice("mixed_precision", known_precisions, "fp32")
    if kind == "FSDP":
        _of_fsdp(settings, config)
    elif kind == "MEGATRON_LM":
        _of_megatron(settings.part("megatron_lm_config"), config)
    elif kind not in ("MULTI_GPU", "DEEPSPEED", "NO"):
        raise DocumentError(
            "distributed_type", f"is '{kind:.40}', which is not read; give FSDP or another GPU kind"
        )
    compiled = settings.part("dynamo_config")
    backends = {"no": "none", "eager": "none", "inductor": "block"}
    config.compile = compiled.choice("dynamo_backend", backends, "none")
    if config.compile != "none":
        config.assumed.append("dynamo_config: each block is compiled")
    config.gather(compiled, "dynamo_config")
    for name in ("fsdp_config", "deepspeed_config", "parallelism_config", "megatron_lm_config"):
        if name in settings.unread or (name == "deepspeed_config" and kind != "DEEPSPEED"):
            settings.idle(name)
    config.gather(settings)
    config.understood += settings.understood
    return config


def with_flags(data: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, and above them those of the launcher's command line.

    A flag has the name of a file's key; the file has most of them in sections.

    >>> with_flags({}, {"use-fsdp": True, "fsdp-version": "2", "num-machines": "2"})
    {'num_machines': '2', 'distributed_type': 'FSDP', 'fsdp_config': {'fsdp_version': '2'}}
    """
    given = {name.replace("-", "_"): value for name, value in flags.items()}
    # These are switches: a value behind one is no word of the launcher's, and stays unread.
    kinds = {key: kind for key, kind in _KINDS.items() if given.get(key) is True}
    given = {key: value for key, value in given.items() if key not in kinds}
    settings: dict[str, Any] = dict(data)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        section = _section(key)
        if section is None:
            settings[key] = value
        else:
            sections.setdefault(section, {})[key] = value
    if "deepspeed_config" in sections and "distributed_type" not in settings:
        kinds.setdefault("deepspeed_config", "DEEPSPEED")
    if kinds:
        settings["distributed_type"] = next(reversed(kinds.values()))
    for section, inner in sections.items():
        before = settings.get(section)
        settings[section] = (before if isinstance(before, dict) else {}) | inner
    return settings


_KINDS = {
    "multi_gpu": "MULTI_GPU",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}
_OF_DEEPSPEED = (
    "deepspeed_", "zero_stage", "zero3_", "offload_", "gradient_accumulation_steps",
    "gradient_clipping",
)  # fmt: skip


def _section(key: str) -> str | None:
    """Return the section of a file that has a flag's key, None if it is of none."""
    if key.startswith(_OF_DEEPSPEED):
        return "deepspeed_config"
    prefixes = {
        "fsdp_": "fsdp_config",
        "dynamo_": "dynamo_config",
        "parallelism_config_": "parallelism_config",
        "megatron_lm_": "megatron_lm_config",
    }
    return next((name for prefix, name in prefixes.items() if key.startswith(prefix)), None)


def _of_deepspeed(nested: Settings, surroundings: ScriptEnvironment | None) -> ParsedConfig:
    """Return the settings of DeepSpeed there, or in the file that they name."""
    file = nested.pop("deepspeed_config_file")
    if file is not None:
        key = "deepspeed_config.deepspeed_config_file"
        name, text = named_file(key, file, surroundings)
        config = deepspeed.of_settings(limits.json_settings(text, name))
        config.gather(nested, "deepspeed_config")
        return config
    config = deepspeed.of_settings({})
    config.framework = "deepspeed"
    config.zero = nested.number("zero_stage") or 0
    config.micro_batches = nested.count("gradient_accumulation_steps")
    config.trains(clip_norm=nested.amount("gradient_clipping"))
    for key, offload in (
        ("offload_optimizer_device", "optimizer"),
        ("offload_param_device", "parameters"),
    ):
        if nested.choice(key, {"cpu": "host", "nvme": "host", "none": "none"}, "none") == "host":
            config.offload = offload
        if str(nested.ignore(key)).lower() == "nvme":
            nested.name(key)
    config.precision = None
    config.gather(nested, "deepspeed_config")
    return config


def _of_fsdp(settings: Settings, config: ParsedConfig) -> None:
    fsdp, axes = settings.part("fsdp_config"), settings.part("parallelism_config")
    again = fsdp.word("fsdp_reshard_after_forward")
    strategy = fsdp.word("fsdp_sharding_strategy")
    if again is not None and str(again).upper() in _STRATEGIES:
        strategy, again = again, None
    elif again is not None and str(again).lower() not in WORDS_OF_TRUTH:
        fsdp.name("fsdp_reshard_after_forward")
    if strategy is not None:
        if str(strategy).upper() not in _STRATEGIES:
            fsdp.name("fsdp_sharding_strategy")
        config.zero = _STRATEGIES.get(str(strategy).upper(), 3)
        if str(strategy).upper() in ("4", "HYBRID_SHARD", "5", "HYBRID_SHARD_ZERO2"):
            config.assumed.append("HYBRID_SHARD: shards within a node")
            config.data_shard = 0
    else:
        config.zero = 2 if WORDS_OF_TRUTH.get(str(again).lower()) is False else 3
    fsdp.expect("fsdp_version", 2)
    if "fsdp_version" not in fsdp:
        config.assumed.append("FSDP2, though fsdp_version is 1 unless it is said")
    if fsdp.flag("fsdp_offload_params"):
        config.offload = "parameters"
    if fsdp.flag("fsdp_activation_checkpointing"):
        config.recompute = "full"
    fsdp.expect_each({f"fsdp_{key}": values for key, values in USUAL_IN_FSDP.items()})
    prefix = "parallelism_config_"
    config.data_replicate = axes.count(f"{prefix}dp_replicate_size")
    shard = axes.number(f"{prefix}dp_shard_size")
    config.data_shard = shard if shard is not None else config.data_shard
    config.tensor = axes.degree(f"{prefix}tp_size")
    config.context = axes.degree(f"{prefix}cp_size")
    config.sequence_parallel = config.tensor == 1
    config.gather(fsdp, "fsdp_config")
    config.gather(axes, "parallelism_config")


def _of_megatron(nested: Settings, config: ParsedConfig) -> None:
    config.framework = "megatron"
    prefix = "megatron_lm_"
    config.tensor = nested.degree(f"{prefix}tp_degree")
    config.pipeline = nested.degree(f"{prefix}pp_degree")
    config.micro_batches = nested.count(f"{prefix}num_micro_batches")
    config.sequence_parallel = (
        bool(nested.flag(f"{prefix}sequence_parallelism")) or config.tensor == 1
    )
    config.zero = int(bool(nested.flag(f"{prefix}use_distributed_optimizer")))
    if nested.flag(f"{prefix}recompute_activations"):
        config.recompute = "selective"
    config.trains(clip_norm=nested.amount(f"{prefix}gradient_clipping"))
    config.gather(nested, "megatron_lm_config")
