"""Configurations of fine-tuning frameworks whose trainer is Hugging Face's.

LLaMA-Factory and axolotl (YAML), ms-swift (arguments).  Their settings are translated into
arguments of the trainer (`transformers.of_settings`); those that are their own are read here.
Defaults are those of LLaMA-Factory 0.9.5, axolotl 0.19 and ms-swift 4.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import transformers
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings

Data = Mapping[str, Any]


def read_llama_factory(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of a YAML of LLaMA-Factory."""
    return of_llama_factory(limits.settings(text, "llama-factory"), surroundings)


def read_axolotl(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of a YAML of axolotl."""
    return of_axolotl(limits.settings(text, "axolotl"), surroundings)


def read_ms_swift(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of a YAML or JSON of ms-swift's arguments."""
    return of_ms_swift(limits.settings(text, "ms-swift"), surroundings)


def of_llama_factory(data: Data, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the parsed settings of LLaMA-Factory."""
    settings = Settings({key: value for key, value in data.items() if key in _OF_LLAMA_FACTORY})
    rest = {key: value for key, value in data.items() if key not in _OF_LLAMA_FACTORY}
    # Its own switch is on by default, whatever the trainer's is.
    also = Settings({"gradient_checkpointing": rest.get("gradient_checkpointing")})
    by_itself = not settings.flag("disable_gradient_checkpointing")
    rest["gradient_checkpointing"] = by_itself or bool(also.flag("gradient_checkpointing"))
    if by_itself:
        also.idle("gradient_checkpointing")
    rest.setdefault("cutoff_len", 2048)
    is_on = {key for key in ("bf16", "fp16", "pure_bf16") if str(data.get(key)).lower() == "true"}
    if is_on == {"pure_bf16"}:
        rest["torch_dtype"] = "bfloat16"
    attention = {"auto": "sdpa", "sdpa": "sdpa", "fa2": "flash_attention_2", "disabled": "eager"}
    rest["attn_implementation"] = settings.choice("flash_attn", attention, "sdpa")
    rest["use_liger_kernel"] = bool(settings.flag("enable_liger_kernel"))
    config = transformers.of_settings(rest, surroundings)
    config.gather(also)
    if settings.flag("use_reentrant_gc") is not False and config.recompute == "full":
        config.options.append("reentrant-recompute")
    stages = {"sft": "sft", "pt": "sft", "dpo": "dpo", "rm": "reward"}
    transformers.learns(config, settings.choice("stage", stages, "sft"))
    settings.expect("pref_loss", "sigmoid", "hinge", "ipo")
    kind = settings.choice("finetuning_type", {"lora": "lora", "full": "full"}, "lora")
    weights = _frozen_weights(
        settings, "quantization_bit", "quantization_method", "quantization_type"
    )
    rank = settings.count("lora_rank") or 8
    alpha = settings.amount("lora_alpha") or 2.0 * rank
    targets = [word.strip() for word in settings.words("lora_target")]
    if kind == "lora":
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
        transformers.read_dropout(settings, config)
        settings.idle("pure_bf16")
    else:
        settings.idle("lora_rank", "lora_alpha", "lora_target", "lora_dropout")
        if weights != "full":
            settings.name("quantization_bit")
        # Trained weights are brought to fp32 (model/adapter.py, init_adapter).
        if not settings.flag("pure_bf16") and config.framework != "deepspeed":
            config.options.append("wide-states")
    return _in_own_words(config, settings, data)


_OF_LLAMA_FACTORY = frozenset(
    [
        "disable_gradient_checkpointing",
        "flash_attn",
        "enable_liger_kernel",
        "use_reentrant_gc",
        "stage",
        "pref_loss",
        "finetuning_type",
        "quantization_bit",
        "quantization_method",
        "quantization_type",
        "lora_rank",
        "lora_alpha",
        "lora_target",
        "lora_dropout",
        "pure_bf16",
    ]
)


def of_axolotl(data: Data, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the parsed settings of axolotl."""
    settings = Settings({key: value for key, value in data.items() if key in _OF_AXOLOTL})
    rest = {key: value for key, value in data.items() if key not in _OF_AXOLOTL}
    for name, theirs in _NAMES_OF_AXOLOTL.items():
        if theirs in rest:
            rest[name] = rest.pop(theirs)
    if str(rest.get("bf16")).lower() == "auto":
        rest["bf16"] = True
    if str(rest.get("bf16")).lower() == "full":  # no mixed precision
        rest |= {"bf16": False, "torch_dtype": "bfloat16"}
    # A section alone is enough.
    rest = ({"fsdp": "full_shard"} if rest.get("fsdp_config") else {}) | rest
    rest.setdefault("per_device_train_batch_size", 1)
    attention = {
        "flash_attention": "flash_attention_2",
        "sdp_attention": "sdpa",
        "eager_attention": "eager",
    }
    for key, kernel in attention.items():
        if settings.flag(key):
            rest.setdefault("attn_implementation", kernel)
    kind = str(rest.get("gradient_checkpointing")).lower()
    is_offloaded = kind not in ("none", "true", "false")
    config = transformers.of_settings(
        {**rest, "gradient_checkpointing": True} if is_offloaded else rest, surroundings
    )
    config.unknown += [f"gradient_checkpointing={kind:.30}"] * is_offloaded
    _fused_of_axolotl(settings, config)
    objective = settings.choice("rl", {"dpo": "dpo", "ipo": "dpo", "grpo": "grpo"}, "sft")
    transformers.learns(config, "reward" if settings.flag("reward_model") else objective)
    adapter = settings.choice("adapter", {"lora": "lora", "qlora": "qlora"}, "")
    weights = transformers.packed_weights(settings)
    if adapter:
        targets = _targets_of_axolotl(settings)
        rank = settings.count("lora_r") or 8
        alpha = settings.amount("lora_alpha") or 16.0
        weights = "nf4" if adapter == "qlora" else weights
        if adapter == "qlora" and settings.flag("load_in_4bit") is False:
            settings.name("load_in_4bit")
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
        transformers.read_dropout(settings, config)
    else:
        settings.idle("lora_r", "lora_alpha", "lora_target_modules", "lora_target_linear")
        settings.idle("lora_dropout")
        if weights != "full":
            settings.name("load_in_4bit", "load_in_8bit")
    settings.idle("fsdp_version")  # what is priced is the framework's own
    _axes_of_axolotl(settings, config)
    return _in_own_words(config, settings, data, _NAMES_OF_AXOLOTL)


def _targets_of_axolotl(settings: Settings) -> list[str]:
    """Return the modules that get an adapter."""
    targets = settings.words("lora_target_modules")
    if settings.flag("lora_target_linear"):
        return ["all-linear", *targets]
    if not targets:
        raise DocumentError(
            "lora_target_modules", "names no module; name some, or set lora_target_linear"
        )
    return targets


def _fused_of_axolotl(settings: Settings, config: ParsedConfig) -> None:
    """Read which kernels its plugins put in the place of a model's settings."""
    understood = ("axolotl.integrations.liger.LigerPlugin", _CUT)
    plugins = settings.words("plugins")
    if set(plugins) - set(understood):
        settings.name("plugins")
    for key, option in (
        ("liger_rope", "fused-norms"),
        ("liger_rms_norm", "fused-norms"),
        ("liger_glu_activation", "fused-gates"),
        ("liger_swiglu", "fused-gates"),
    ):
        if settings.flag(key):
            config.options.append(option)
    if settings.flag("liger_fused_linear_cross_entropy") or settings.flag("cut_cross_entropy"):
        config.axes["loss"] = ChunkedLoss()
    elif settings.flag("liger_cross_entropy") or settings.flag("flash_attn_cross_entropy"):
        config.options.append("fused-cross-entropy")


def _axes_of_axolotl(settings: Settings, config: ParsedConfig) -> None:
    """Read degrees of parallelism."""
    replicate, shard = settings.count("dp_replicate_size"), settings.count("dp_shard_size")
    config.data_replicate = replicate or config.data_replicate
    config.data_shard = shard or config.data_shard
    config.tensor = settings.count("tensor_parallel_size") or config.tensor
    config.context = settings.count("context_parallel_size", "sequence_parallel_degree") or 1
    config.sequence_parallel = config.tensor == 1


_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_NAMES_OF_AXOLOTL = {
    "per_device_train_batch_size": "micro_batch_size",
    "max_length": "sequence_len",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
_OF_AXOLOTL = frozenset(
    [
        "flash_attention",
        "sdp_attention",
        "eager_attention",
        "rl",
        "reward_model",
        "adapter",
        "load_in_8bit",
        "load_in_4bit",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_linear",
        "plugins",
        "liger_rope",
        "liger_rms_norm",
        "liger_glu_activation",
        "liger_swiglu",
        "liger_fused_linear_cross_entropy",
        "liger_cross_entropy",
        "flash_attn_cross_entropy",
        "cut_cross_entropy",
        "dp_replicate_size",
        "fsdp_version",
        "dp_shard_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "sequence_parallel_degree",
    ]
)


def of_ms_swift(data: Data, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the parsed arguments of ms-swift."""
    settings = Settings({key: value for key, value in data.items() if key in _OF_MS_SWIFT})
    rest = {key: value for key, value in data.items() if key not in _OF_MS_SWIFT}
    rest.setdefault("gradient_checkpointing", True)
    rest.setdefault("per_device_train_batch_size", 1)
    stage = settings.word("deepspeed")
    if stage in _STAGES:
        zero: dict[str, Any] = {"stage": int(stage[4])}
        if stage.endswith("_offload"):
            places = ("optimizer", "param") if zero["stage"] == 3 else ("optimizer",)
            zero |= {f"offload_{name}": {"device": "cpu", "pin_memory": True} for name in places}
        rest["deepspeed"] = {"zero_optimization": zero}
    elif stage is not None:
        rest["deepspeed"] = stage
    attention = {
        "sdpa": "sdpa",
        "flash_attn": "flash_attention_2",
        "flash_attention_2": "flash_attention_2",
        "flash_attention_3": "flash_attention_3",
        "eager": "eager",
    }
    rest["attn_implementation"] = settings.choice("attn_impl", attention, "sdpa")
    if not {"bf16", "fp16"} & set(data):
        kind = settings.choice(
            "torch_dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, "bf16"
        )
        rest[kind] = True
        if kind == "fp32":
            rest.pop(kind)
            rest["torch_dtype"] = "float32"
    else:
        rest["torch_dtype"] = settings.word("torch_dtype")
    config = transformers.of_settings(rest, surroundings)
    if "gradient_accumulation_steps" not in data:
        config.micro_batches = None
    types = {"dpo": "dpo", "rm": "reward", "grpo": "grpo"}
    transformers.learns(config, settings.choice("rlhf_type", types, "sft"))
    degree = settings.count("sequence_parallel_size") or 1
    if degree > 1:
        config.context = degree
        config.options.append("ulysses")
    kind = settings.choice(_TUNER[0], _KINDS, "") or settings.choice(_TUNER[1], _KINDS, "")
    kind = kind or settings.choice(_TUNER[2], _KINDS, "lora")
    weights = _frozen_weights(settings, "quant_bits", "quant_method", "bnb_4bit_quant_type")
    if kind == "lora":
        rank, alpha = settings.count("lora_rank") or 8, settings.amount("lora_alpha") or 32.0
        targets = [word for text in settings.words("target_modules") for word in text.split()]
        if "target_modules" in settings and not targets:
            settings.name("target_modules")
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
        transformers.read_dropout(settings, config)
    else:
        settings.idle("lora_rank", "lora_alpha", "target_modules", "lora_dropout")
        if weights != "full":
            settings.name("quant_bits")
    return _in_own_words(config, settings, data)


_STAGES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_TUNER = ("tuner_type", "train_type", "sft_type")
"""Names of one argument: since 4.0, before, and before 3.0."""
_KINDS = {"lora": "lora", "full": "full"}
_OF_MS_SWIFT = frozenset(
    [
        "deepspeed",
        "rlhf_type",
        "attn_impl",
        "torch_dtype",
        "sequence_parallel_size",
        "tuner_type",
        "train_type",
        "sft_type",
        "quant_bits",
        "quant_method",
        "bnb_4bit_quant_type",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
    ]
)


def _frozen_weights(settings: Settings, bits: str, method: str, kind: str) -> str:
    """Return the storage type of frozen weights; other numbers and methods are not understood."""
    count = settings.number(bits)
    if count is None:
        settings.idle(method, kind)
        return "full"
    settings.expect(bits, 4, 8)
    settings.expect(method, "bnb")
    settings.expect(kind, "nf4", "fp4")
    return {4: "nf4", 8: "int8"}.get(count, "full")


def _in_own_words(
    config: ParsedConfig, settings: Settings, data: Data, names: Mapping[str, str] | None = None
) -> ParsedConfig:
    """Return a trainer's settings with its framework's settings among them, by `names`."""
    config.gather(settings)
    theirs = names or {}
    for words in (config.unknown, config.without_effect):
        for at, word in enumerate(words):
            key, sign, value = word.partition("=")
            words[at] = theirs.get(key, key) + sign + value
    unread = {word.partition("=")[0] for word in config.unknown}
    config.understood = sum(key not in unread for key in data)
    # An inserted default is no setting of the file.
    config.without_effect = [word for word in config.without_effect if word in data]
    return config
