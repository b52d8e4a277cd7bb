"""Configurations of fine-tuning frameworks whose trainer is Hugging Face's.

LLaMA-Factory and axolotl (YAML), ms-swift (arguments).  Their settings are translated into
arguments of the trainer (`transformers.of_settings`); those that are their own are read here.
Defaults are those of LLaMA-Factory 0.9.5, axolotl 0.19 and ms-swift 4.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.fine_tuners import PROMPT_LEN
from meshwright.planner.framework_configs.readers import deepspeed, megatron, transformers
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.adapter_targets import is_pattern, modules_of
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    named_file,
)

Data = Mapping[str, Any]
ANSWER_LEN = 512
"""Tokens of an answer that ms-swift's GRPO has by itself (max_completion_length)."""


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
    other = next((key for key in _OTHER_TASKS if data.get(key)), None)
    if other is not None and str(data.get("do_train", False)).lower() != "true":
        raise DocumentError(other, "is set and do_train is not: it trains nothing; set do_train")
    if _PARALLEL & set(data):
        return _of_llama_factory_megatron(data)
    if {"dist_config", "peft_config"} & set(data) or "train_dataset" in data:
        return _of_llama_factory_v1(data, surroundings)
    ours = {*_OF_LLAMA_FACTORY, *(key for key in data if _OTHER_WAYS.match(key))}
    settings = Settings({key: value for key, value in data.items() if key in ours})
    rest = {key: value for key, value in data.items() if key not in ours}
    _other_ways(settings)
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
    attention = {"auto": "sdpa", "sdpa": "sdpa", "disabled": "eager", "false": "sdpa"}
    attention |= dict.fromkeys(("fa2", "true"), "flash_attention_2")  # a switch before 0.7
    rest["attn_implementation"] = settings.choice("flash_attn", attention, "sdpa")
    rest["use_liger_kernel"] = bool(settings.flag("enable_liger_kernel"))
    config = transformers.of_settings(rest, surroundings)
    config.gather(also)
    if settings.flag("use_reentrant_gc") is not False and config.recompute == "full":
        config.options.append("reentrant-recompute")
    stages = {"sft": "sft", "pt": "sft", "dpo": "dpo", "rm": "reward"}
    transformers.learns(config, settings.choice("stage", stages, "sft"))
    settings.expect("pref_loss", "sigmoid", "hinge", "ipo")
    settings.expect("freeze_language_model", False)
    weights = _frozen_weights(
        settings, "quantization_bit", "quantization_method", "quantization_type"
    )
    if _adapters_of_llama_factory(settings, config, weights):
        settings.idle("pure_bf16")
    else:
        if weights != "full":
            settings.name("quantization_bit")
        # Trained weights are brought to fp32 (model/adapter.py, init_adapter).
        if not settings.flag("pure_bf16") and config.framework != "deepspeed":
            config.options.append("wide-states")
    return _in_own_words(config, settings, data)


def _adapters_of_llama_factory(settings: Settings, config: ParsedConfig, weights: str) -> bool:
    """Read the adapters, and return whether they alone are trained, as by default."""
    kind = settings.choice("finetuning_type", _KINDS, "lora")
    rank = settings.count("lora_rank") or 8
    alpha = settings.amount("lora_alpha") or 2.0 * rank
    targets = [word.strip() for word in settings.words("lora_target")]
    if kind == "lora":
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
        transformers.read_dropout(settings, config)
        return True
    settings.idle("lora_rank", "lora_alpha", "lora_target", "lora_dropout")
    return False


_OTHER_WAYS = re.compile(r"(use_)?(galore|apollo|badam)(_|$)")
"""Settings of ways of training that a switch `use_...` turns on."""


def _other_ways(settings: Settings) -> None:
    """Read which other ways of training are on; settings of one that is not decide nothing."""
    for key in filter(_OTHER_WAYS.match, settings.unread):
        way = key.removeprefix("use_").partition("_")[0]
        if settings.flag(f"use_{way}"):
            settings.name(key)
        else:
            settings.idle(key)


_OTHER_TASKS = ("export_dir", "infer_backend", "do_predict", "predict_with_generate")
"""Settings of other tasks than training."""
_PARALLEL = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
}
"""Settings with which LLaMA-Factory trains on Megatron, by mcore_adapter or Megatron-Bridge."""


def _of_llama_factory_megatron(data: Data) -> ParsedConfig:
    """Return the settings of a run on Megatron; defaults are those of mcore_adapter."""
    settings = Settings({key: value for key, value in data.items() if key in _BESIDE_MEGATRON})
    flags: dict[str, Any] = {
        _NAMES_BESIDE_MEGATRON.get(key, key.replace("_", "-")): value
        for key, value in data.items()
        if key not in _BESIDE_MEGATRON and value is not None
    }
    inserted = {"micro-batch-size": 8, "seq-length": 2048, "weight-decay": 0.0}
    inserted = {key: value for key, value in inserted.items() if key not in flags}
    config = megatron.of_flags(inserted | flags)
    config.micro_batches = settings.count("gradient_accumulation_steps") or 1
    config.model["registered"] = settings.model_name("model_name_or_path") or ""
    stages = {"sft": "sft", "pt": "sft", "dpo": "dpo"}
    transformers.learns(config, settings.choice("stage", stages, "sft"))
    _adapters_of_llama_factory(settings, config, "full")
    settings.expect("lr_scheduler_type", "constant", "cosine", "linear", "constant_with_warmup")
    names = {flag: key for key, flag in _NAMES_BESIDE_MEGATRON.items()}
    for words in (config.unknown, config.without_effect):
        for at, word in enumerate(words):
            key, sign, value = word.removeprefix("--").partition("=")
            words[at] = names.get(key, key.replace("-", "_")) + sign + value
    config.understood += settings.understood - len(inserted)
    config.gather(settings)
    return config


_NAMES_BESIDE_MEGATRON = {
    "per_device_train_batch_size": "micro-batch-size",
    "cutoff_len": "seq-length",
    "learning_rate": "lr",
    "max_grad_norm": "clip-grad",
    "adam_epsilon": "adam-eps",
    "max_steps": "train-iters",
    "warmup_steps": "lr-warmup-iters",
}
_BESIDE_MEGATRON = frozenset(
    [
        "gradient_accumulation_steps",
        "model_name_or_path",
        "stage",
        "finetuning_type",
        "lora_rank",
        "lora_alpha",
        "lora_target",
        "lora_dropout",
        "lr_scheduler_type",
    ]
)


def _of_llama_factory_v1(data: Data, surroundings: ScriptEnvironment | None) -> ParsedConfig:
    """Return the settings of the trainer of LLaMA-Factory's `v1`, which is not Hugging Face's."""
    settings = Settings({key: value for key, value in data.items() if value is not None})
    config = ParsedConfig(framework="transformers")
    how = settings.part("dist_config")
    kind = how.choice("name", {"fsdp2": "fsdp2", "deepspeed": "deepspeed"}, "")
    if kind == "deepspeed":
        name, text = named_file("config_file", how.pop("config_file"), surroundings)
        config = deepspeed.of_settings(limits.json_settings(text, name))
    elif kind == "fsdp2":
        config.zero = 3
        replicate = settings.count("mp_replicate_size")
        config.data_replicate, config.data_shard = replicate or 1, settings.count("mp_shard_size")
        if how.flag("offload_params"):
            config.offload = "parameters"
        if how.flag("reshard_after_forward") is False:
            config.zero = 2
    config.precision = "fp32" if settings.flag("bf16") is False else "bf16"
    config.micro_batch = settings.count("micro_batch_size") or 1
    config.global_batch = settings.count("global_batch_size")
    config.micro_batches = None if config.global_batch else 1
    config.seq_len = settings.count("cutoff_len") or 2048
    config.context = settings.degree("cp_size")
    if config.context > 1:
        config.options += ["ulysses"] * (settings.choice("cp_mode", {"ulysses": "u"}, "u") == "u")
    else:
        settings.idle("cp_mode")
    if settings.flag("enable_activation_checkpointing") is not False:
        config.recompute = "full"
    attention = {"sdpa": "", "flash_attention_2": "fa2", "eager": "eager-attention"}
    config.options += [settings.choice("flash_attn", attention, "")]
    config.options = [option for option in config.options if option]
    config.model["registered"] = settings.model_name("model") or ""
    adapters = settings.part("peft_config")
    if adapters.choice("name", {"lora": "lora"}, "") == "lora":
        rank, alpha = adapters.count("r") or 8, adapters.amount("lora_alpha") or 16.0
        targets = [word.strip() for word in adapters.words("target_modules")]
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights="full")
        transformers.read_dropout(adapters, config, usual=0.05)
    config.trains(
        learning_rate=settings.amount("learning_rate"), clip_norm=settings.amount("max_grad_norm")
    )
    config.assumed.append("samples have all their tokens: without packing they are shorter")
    config.understood += settings.understood
    for section, part in (("", settings), ("dist_config", how), ("peft_config", adapters)):
        config.gather(part, section)
    return config


_OF_LLAMA_FACTORY = frozenset(
    [
        "disable_gradient_checkpointing",
        "flash_attn",
        "enable_liger_kernel",
        "use_reentrant_gc",
        "stage",
        "pref_loss",
        "freeze_language_model",
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
    pattern = settings.pop("lora_target_modules")
    if isinstance(pattern, str) and is_pattern(pattern):
        modules = modules_of(pattern)
        if modules is None:
            settings.name("lora_target_modules")
        return modules or ["all-linear"]
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
    ours = [key for key in data if key in _OF_MS_SWIFT or _OF_ROLLOUTS.fullmatch(key)]
    settings = Settings({key: data[key] for key in ours})
    rest = {key: value for key, value in data.items() if key not in ours}
    rest = _DEFAULTS_OF_SWIFT | rest
    rest |= _deepspeed_of_swift(settings.word("deepspeed"))
    rest |= _fsdp_of_swift(rest, surroundings)
    attention = {
        "sdpa": "sdpa",
        "flash_attn": "flash_attention_2",
        "flash_attention_2": "flash_attention_2",
        "flash_attention_3": "flash_attention_3",
        "eager": "eager",
    }
    rest["attn_implementation"] = settings.choice("attn_impl", attention, "sdpa")
    if not {"bf16", "fp16"} & set(data):
        kind = settings.choice("torch_dtype", _TYPES, "bf16")
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
    objective = settings.choice("rlhf_type", types, "sft")
    transformers.learns(config, objective)
    _rollouts_of_swift(settings, config, objective)
    settings.expect("freeze_llm", False)
    settings.expect("task_type", "causal_lm")
    if settings.flag("padding_free"):
        config.assumed.append("attention is over whole samples, at most what packed ones take")
    degree = settings.count("sequence_parallel_size") or 1
    if degree > 1:
        config.context = degree
        config.options.append("ulysses")
    kind = settings.choice(_TUNER[0], _KINDS, "") or settings.choice(_TUNER[1], _KINDS, "")
    kind = kind or settings.choice(_TUNER[2], _KINDS, "lora")
    weights = _frozen_weights(settings, "quant_bits", "quant_method", "bnb_4bit_quant_type")
    if kind == "lora":
        rank, alpha = settings.count("lora_rank") or 8, settings.amount("lora_alpha") or 32.0
        targets = _targets_of_swift(settings)
        transformers.adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
        transformers.read_dropout(settings, config, usual=_DROPOUT_OF_SWIFT)
    else:
        settings.idle("lora_rank", "lora_alpha", "target_modules", "lora_dropout", "target_regex")
        if weights != "full":
            settings.name("quant_bits")
    return _in_own_words(config, settings, data)


_OF_ROLLOUTS = re.compile(
    r"use_vllm|vllm_.*|sleep_level|offload_(model|optimizer)|max_completion_length|num_iterations"
    r"|steps_per_generation|generation_batch_size|loss_type|epsilon(_high|_low)?|delta"
    r"|dynamic_sample|overlong_.*|max_resample_times|top_entropy_quantile|log_completions"
    r"|importance_sampling_level|async_generate|move_model_batches|multi_turn_scheduler|max_turns"
)
"""Arguments of ms-swift about the answers of GRPO, and the losses of all objectives."""


def _rollouts_of_swift(settings: Settings, config: ParsedConfig, objective: str) -> None:
    """Read what of the generation of answers a step meets: their length, its engine's memory."""
    if objective == "grpo":
        _answers_of_swift(settings, config)
    else:
        settings.expect("loss_type", "sigmoid", "hinge", "ipo", "cross_entropy")
    settings.idle(*filter(_OF_ROLLOUTS.fullmatch, settings.unread))


def _answers_of_swift(settings: Settings, config: ParsedConfig) -> None:
    """Read how long answers are, and whether their engine is on the devices of a step."""
    if config.seq_len is None:
        config.assumed.append(f"prompts have {PROMPT_LEN} tokens (--max_length)")
    config.seq_len = (config.seq_len or PROMPT_LEN) + (
        settings.count("max_completion_length") or ANSWER_LEN
    )
    config.assumed.append("answers have all their tokens")
    is_here = bool(settings.flag("use_vllm")) and settings.word("vllm_mode") == "colocate"
    if is_here and not (settings.number("sleep_level") or 0):
        settings.name("vllm_gpu_memory_utilization")
        config.unknown.append("vllm_mode=colocate")
    elif is_here:
        config.assumed.append("the engine of rollouts gives its memory back before an update")


def _targets_of_swift(settings: Settings) -> list[str]:
    """Return the modules that get an adapter, by their names or by one pattern."""
    targets = [word for text in settings.words("target_modules") for word in text.split()]
    if "target_modules" in settings and not targets:
        settings.name("target_modules")
    pattern = settings.word("target_regex")
    if pattern is None:
        return targets
    modules = modules_of(pattern)
    if modules is None:
        settings.name("target_regex")
    return modules or []


def _deepspeed_of_swift(stage: str | None) -> dict[str, Any]:
    """Return the trainer's settings for `deepspeed`: a set of ms-swift by its name, or a file."""
    if stage not in _STAGES:
        return {} if stage is None else {"deepspeed": stage}
    zero: dict[str, Any] = {"stage": int(stage[4])}
    if stage.endswith("_offload"):
        places = ("optimizer", "param") if zero["stage"] == 3 else ("optimizer",)
        zero |= {f"offload_{name}": {"device": "cpu", "pin_memory": True} for name in places}
    return {"deepspeed": {"zero_optimization": zero}}


def _fsdp_of_swift(rest: dict[str, Any], surroundings: ScriptEnvironment | None) -> dict[str, Any]:
    """Return the trainer's settings for `fsdp`: a set of ms-swift by its name, or a file."""
    name = rest.get("fsdp")
    if not name:
        return {}
    if name is True or name == "fsdp2":
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": _FSDP2}
    if name.startswith("{"):
        inside = limits.json_settings(name, "fsdp")
    elif name.endswith(".json"):
        inside = limits.json_settings(named_file("fsdp", name, surroundings)[1], name)
    else:
        return {}
    nested = inside.get("fsdp_config", {})
    return {
        "fsdp": inside.get("fsdp", "full_shard auto_wrap"),
        "fsdp_config": {key: value for key, value in nested.items() if key[:1] != "_"},
    }


_FSDP2 = {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
"""What ms-swift means by `--fsdp fsdp2` (swift/config/fsdp2.json)."""
_DROPOUT_OF_SWIFT = 0.05


def of_ms_swift_megatron(arguments: Data, text: str = "") -> ParsedConfig:
    """Return the parsed arguments of ms-swift's trainer on Megatron (`megatron sft`)."""
    flags = {_NAMES_OF_MEGATRON.get(key, key): value for key, value in arguments.items()}
    rollouts = {
        key: value for key, value in flags.items() if _OF_ROLLOUTS.fullmatch(key.replace("-", "_"))
    }
    settings = Settings({key: value for key, value in flags.items() if key in _OF_SWIFT_MEGATRON})
    rest: dict[str, Any] = {
        key: value for key, value in flags.items() if key not in (*_OF_SWIFT_MEGATRON, *rollouts)
    }
    if not {"bf16", "fp16"} & set(rest):
        kind = settings.choice("torch-dtype", _TYPES, "bf16")
        rest |= {kind: True} if kind != "fp32" else {}
    else:
        settings.idle("torch-dtype")
    if str(rest.get("recompute-granularity")) == "none":
        del rest["recompute-granularity"]
    elif "recompute-granularity" not in rest:
        rest["recompute-granularity"] = "selective"
    inserted = {key: value for key, value in _DEFAULTS_OF_MEGATRON.items() if key not in rest}
    config = megatron.of_flags(inserted | rest, text)
    config.without_effect = [
        word for word in config.without_effect if word.removeprefix("--") in flags
    ]
    wanted = settings.model_name("model", "load", "mcore-model")
    if wanted:
        config.model["registered"] = wanted
    types = {"dpo": "dpo", "rm": "reward", "grpo": "grpo"}
    objective = settings.choice("rlhf-type", types, "sft")
    transformers.learns(config, objective)
    answers = Settings({key.replace("-", "_"): value for key, value in rollouts.items()})
    _rollouts_of_swift(answers, config, objective)
    config.gather(answers)
    packed = "true" if str(settings.ignore("packing")).lower() == "true" else None
    if packed or str(settings.ignore("padding-free")).lower() != "false":
        config.assumed.append("attention is over whole samples, at most what packed ones take")
    if settings.choice("tuner-type", _KINDS, "full") == "lora":
        rank, alpha = settings.count("lora-rank") or 8, settings.amount("lora-alpha") or 32.0
        words = settings.pop("target-modules")
        named = words if isinstance(words, list) else str(words or "").split()
        listed = [name for word in named for name in _PARTS_OF_MEGATRON.get(word, (word,))]
        transformers.adapters(config, rank=rank, alpha=alpha, targets=listed, weights="full")
        transformers.read_dropout(settings, config, "lora-dropout", usual=_DROPOUT_OF_SWIFT)
    else:
        settings.idle("lora-rank", "lora-alpha", "target-modules", "lora-dropout")
    for key, usual in _USUAL_IN_MEGATRON.items():
        settings.expect(key, usual)
    config.unknown += [f"--{word}" for word in (*settings.unread, *settings.unusual)]
    config.without_effect += [f"--{key}" for key in settings.without_effect]
    config.understood += settings.understood - len(inserted)
    return config


_USUAL_IN_MEGATRON = {
    "freeze-llm": False,
    "task-type": "causal_lm",
    "gradient-accumulation-fusion": True,
    "masked-softmax-fusion": True,
}
"""Arguments of which plans have the values that ms-swift has by itself."""
_PARTS_OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Products of Megatron Core's layers, by the names of Hugging Face's."""
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NAMES_OF_MEGATRON = {"max-length": "seq-length", "train-type": "tuner-type"}
_OF_SWIFT_MEGATRON = frozenset(
    [
        "model",
        "load",
        "mcore-model",
        "torch-dtype",
        "rlhf-type",
        "packing",
        "padding-free",
        "tuner-type",
        "lora-rank",
        "lora-alpha",
        "lora-dropout",
        "target-modules",
        *_USUAL_IN_MEGATRON,
    ]
)
_DEFAULTS_OF_MEGATRON: dict[str, Any] = {
    "micro-batch-size": 1,
    "global-batch-size": 16,
    "expert-tensor-parallel-size": 1,
    "attention-backend": "flash",
    "use-distributed-optimizer": True,
    "cross-entropy-loss-fusion": True,
    "moe-token-dispatcher-type": "alltoall",
    "moe-grouped-gemm": True,
    "adam-beta2": 0.95,
    "weight-decay": 0.1,
}
"""Defaults of ms-swift 4.6 that are not Megatron's (swift/megatron/arguments/megatron_args.py)."""
_DEFAULTS_OF_SWIFT = {
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
}
"""Defaults of ms-swift 4.6 that are not the trainer's (swift/trainers/arguments.py)."""
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
        "target_regex",
        "freeze_llm",
        "task_type",
        "padding_free",
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
