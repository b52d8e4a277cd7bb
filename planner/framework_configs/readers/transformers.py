"""Hugging Face TrainingArguments: YAML or JSON, or the flags of a training script.

TRL's scripts have more arguments and other defaults; frameworks that hand their own settings to the
same trainer translate them first (`finetuning`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.fine_tuners import PROMPT_LEN
from meshwright.planner.framework_configs.readers import deepspeed
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    named_file,
)

_RATES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "linear_with_min_lr": "linear",
    "warmup_stable_decay": "wsd",
}


_PAGED = ("paged_adamw", "paged_adamw_32bit")
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", *_PAGED), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw-8bit"),
    **dict.fromkeys(("paged_adamw_8bit", "paged_adamw_bnb_8bit"), "adamw-8bit-paged"),
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
"""Optimizers of plans by their names there (training_args.py, OptimizerNames; axolotl's muon)."""


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the arguments."""
    return of_settings(limits.settings(text, "transformers"), surroundings)


def read_trl(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings in the arguments of a script of TRL."""
    return of_trl(limits.settings(text, "trl"), surroundings)


def of_trl(data: Mapping[str, Any], surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of TRL's arguments, which have defaults of their own."""
    usual: dict[str, Any] = {"gradient_checkpointing": True, "max_length": 1024}
    lengths = {"max_length", "max_seq_length"} & set(data)
    if lengths:
        del usual["max_length"]
    elif "max_completion_length" in data:  # of GRPO: a prompt and an answer
        parts = Settings({"max_prompt_length": PROMPT_LEN} | dict(data))
        pair = [parts.count(f"max_{part}_length") or 0 for part in ("prompt", "completion")]
        usual["max_length"] = sum(pair)
    if "fp16" not in data:
        usual["bf16"] = True
    losses = Settings({"loss_type": data.get("loss_type")})
    kinds = {word.strip("[]' \"") for word in losses.words("loss_type")}
    objective = next(
        (
            name
            for name, keys in _TELLING.items()
            if keys & set(data) or kinds & _LOSSES.get(name, set())
        ),
        "sft",
    )
    rest = {key: value for key, value in data.items() if key not in (*_PARTS, "loss_type")}
    config = of_settings({**usual, **rest}, surroundings)
    learns(config, objective)
    if not kinds <= _LOSSES.get(objective, _PLAIN_LOSSES):
        losses.name("loss_type")
    config.gather(losses)
    if objective != "sft":
        config.assumed.append(f"{objective}, as its settings say")
    config.understood -= len(set(usual) - set(data))
    return config


_TELLING: dict[str, set[str]] = {
    "grpo": {"max_completion_length", "num_generations", "reward_funcs"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"beta", "precompute_ref_log_probs", "ref_adapter_name"},
}
"""Settings that one objective of TRL's alone has, in this order: GRPO has a `beta` too."""
_LOSSES: dict[str, set[str]] = {
    "dpo": {"sigmoid", "hinge", "ipo", "robust", "exo_pair", "apo_zero", "apo_down"},
    "grpo": {"grpo", "dapo", "dr_grpo", "bnpo"},
}
"""Losses of an objective that take what its plain one does."""
_PLAIN_LOSSES = {"nll", "dft"}
_PARTS = ("max_prompt_length", "max_completion_length")


def of_flags(
    flags: Mapping[str, str | bool | list[str]],
    surroundings: ScriptEnvironment | None = None,
    *,
    trl: bool = False,
) -> ParsedConfig:
    """Return the settings of a script's flags."""
    data: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags.items()}
    nested = data.get("fsdp_config")
    if isinstance(nested, str) and nested.startswith("{"):
        data["fsdp_config"] = limits.json_settings(nested, "--fsdp_config")
    return of_trl(data, surroundings) if trl else of_settings(data, surroundings)


def of_settings(
    data: Mapping[str, Any], surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return the parsed arguments; other files that they name are read too."""
    settings = Settings(data)
    config = ParsedConfig(framework="transformers")
    nested = settings.pop("deepspeed")
    if nested is not None and not isinstance(nested, dict):
        name, text = named_file("deepspeed", nested, surroundings)
        nested = limits.json_settings(text, name)
    if nested is not None:
        config = deepspeed.of_settings(nested)
    config.micro_batch = settings.count("per_device_train_batch_size") or 8
    config.micro_batches = settings.count("gradient_accumulation_steps") or 1
    kinds = [name for name in ("fp16", "bf16") if settings.flag(name)]
    if len(kinds) > 1:
        raise DocumentError("bf16", "and fp16 are both on; switch one off")
    config.precision = kinds[0] if kinds else "fp32"
    _weights(settings, config)
    if nested is None:
        _of_fsdp(settings, config, surroundings)
    else:
        settings.idle("fsdp", "fsdp_config")
    if settings.flag("gradient_checkpointing"):
        config.recompute = "full"
    _checkpointing(settings, config)
    if settings.flag("torch_compile"):
        config.compile = "block"
    for key, usual in (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default")):
        settings.expect(key, usual)
    config.seq_len = settings.number(
        "max_length", "max_seq_length", "model_max_length", "block_size", "cutoff_len"
    )
    wanted = settings.model_name("model_name_or_path", "model", "base_model")
    if wanted:
        config.model["registered"] = wanted
    config.trains(optimizer=settings.choice("optim", OPTIMIZERS, "adamw"))
    if str(settings.ignore("optim")) in _PAGED:
        config.assumed.append("optim: its pages of states are on the device")
    if config.precision == "fp32":
        settings.expect("tf32", False)
    else:
        settings.idle("tf32")
    _kernels(settings, config)
    _adapters(settings, config)
    _samples(settings, config)
    _rates(settings, config)
    config.gather(settings)
    config.understood += settings.understood
    return config


def _checkpointing(settings: Settings, config: ParsedConfig) -> None:
    """Read how blocks are recomputed, where they are."""
    values = settings.pop("gradient_checkpointing_kwargs")
    if isinstance(values, str):
        values = limits.json_settings(values, "gradient_checkpointing_kwargs")
    kwargs = Settings({"gradient_checkpointing_kwargs": values}).part(
        "gradient_checkpointing_kwargs"
    )
    if config.recompute != "full":
        kwargs.idle("use_reentrant")
    elif kwargs.flag("use_reentrant"):
        config.options.append("reentrant-recompute")
    config.gather(kwargs, "gradient_checkpointing_kwargs")


def _weights(settings: Settings, config: ParsedConfig) -> None:
    """Read the type in which weights are loaded: with one of 32 bits states have it too."""
    types = {"bfloat16": "bf16", "float16": "fp16", "auto": "", "float32": "fp32"}
    for key in ("torch_dtype", "dtype"):
        loaded = settings.choice(key, types, "")
        if config.framework == "deepspeed":  # which has masters of its own
            settings.idle(key)
        elif loaded == "fp32":
            config.options.append("wide-states")
        elif loaded and config.precision == "fp32":  # nothing is computed in another type
            config.precision = loaded
            if loaded == "bf16":
                config.trains(master_weights="none")


def _kernels(settings: Settings, config: ParsedConfig) -> None:
    """Read which kernels replace a model's own."""
    attention = {
        "sdpa": "",
        "flash_attention_2": "fa2",
        "flash_attention_3": "fa3",
        "eager": "eager-attention",
    }
    option = settings.choice("attn_implementation", attention, "")
    config.options += [option] if option else []
    if settings.flag("use_liger_kernel", "use_liger"):
        config.options += ["fused-norms", "fused-gates"]
        config.axes["loss"] = ChunkedLoss()
    parts = settings.pop("liger_kernel_config")
    if parts is not None:
        settings.name("liger_kernel_config")


def _adapters(settings: Settings, config: ParsedConfig) -> None:
    """Read adapters, and the bits of the frozen weights beside them."""
    weights = packed_weights(settings)
    if not settings.flag("use_peft"):
        settings.idle("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
        if weights != "full":
            settings.name("load_in_4bit", "load_in_8bit")
        return
    targets = [word for text in settings.words("lora_target_modules") for word in text.split()]
    rank, alpha = settings.count("lora_r") or 16, settings.amount("lora_alpha") or 32.0
    adapters(config, rank=rank, alpha=alpha, targets=targets, weights=weights)
    read_dropout(settings, config)


def packed_weights(settings: Settings) -> str:
    """Return the storage type of frozen weights."""
    four, eight = settings.flag("load_in_4bit"), settings.flag("load_in_8bit")
    if four and eight:
        raise DocumentError("load_in_4bit", "and load_in_8bit are both on; switch one off")
    settings.expect("bnb_4bit_quant_type", "nf4", "fp4")
    return "nf4" if four else "int8" if eight else "full"


def read_dropout(
    settings: Settings, config: ParsedConfig, key: str = "lora_dropout", *, usual: float = 0.0
) -> None:
    """Read whether inputs of adapters have dropout, which makes a tensor of its own."""
    share = settings.share(key)
    if usual if share is None else share:
        config.options.append("adapter-dropout")


def adapters(
    config: ParsedConfig, *, rank: int, alpha: float, targets: list[str], weights: str
) -> None:
    """Note that adapters alone are trained."""
    usual = not targets or targets in (["all"], ["all-linear"])
    chosen = ("all-linear",) if usual else tuple(dict.fromkeys(targets))
    config.trains(lora={"rank": rank, "alpha": alpha, "targets": chosen, "weights": weights})


def learns(config: ParsedConfig, objective: str) -> None:
    """Note what is learned, and what of it is no part of a step."""
    if objective == "sft":
        return
    config.trains(objective=objective)
    if objective == "grpo":
        config.assumed.append("generation of answers is no part of the step that is planned")


def _samples(settings: Settings, config: ParsedConfig) -> None:
    """Read how samples are filled; a plan's have all their tokens."""
    if settings.flag("packing") is False or settings.flag("sample_packing") is False:
        config.assumed.append("samples have all their tokens: without packing they are shorter")
    elif settings.flag("packing") or settings.flag("sample_packing"):
        config.assumed.append("attention is over whole samples, at most what packed ones take")


def _of_fsdp(
    settings: Settings, config: ParsedConfig, surroundings: ScriptEnvironment | None
) -> None:
    value, nested = settings.pop("fsdp"), settings.pop("fsdp_config")
    if isinstance(nested, str):
        name, text = named_file("fsdp_config", nested, surroundings)
        nested = limits.json_settings(text, name)
    inside = nested if isinstance(nested, dict) else {}
    fsdp = Settings({key.removeprefix("fsdp_"): value for key, value in inside.items()})
    listed = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    words = [str(word) for word in listed]
    if words in (["True"], ["true"]):  # newer words: all else is in fsdp_config
        words = ["full_shard", "auto_wrap"]
    if not value or words in (["no_shard"], ["false"]):
        settings.idle("fsdp_transformer_layer_cls_to_wrap")
        if nested:
            settings.idle("fsdp_config")
        return
    if set(words) - set(_FSDP_WORDS):
        settings.name("fsdp")
    if "auto_wrap_policy" in fsdp:
        config.without_effect += ["fsdp=auto_wrap"] * ("auto_wrap" in words)
    elif "auto_wrap" not in words:
        config.assumed.append("each block is a unit of FSDP, though its words have no auto_wrap")
    again = fsdp.flag("reshard_after_forward")
    config.zero = 2 if "shard_grad_op" in words or again is False else 3
    if any(word.startswith("hybrid_shard") for word in words):
        config.assumed.append("hybrid_shard: shards within a node")
        config.data_shard = 0
    if "offload" in words or fsdp.flag("cpu_offload", "offload_params"):
        config.offload = "parameters"
    if fsdp.flag("activation_checkpointing"):
        config.recompute = "full"
    fsdp.idle("version")  # what is priced is the framework's own
    fsdp.expect_each(USUAL_IN_FSDP)
    hybrid = ("HYBRID_SHARD", 4) if config.data_shard == 0 else ()
    fsdp.expect(
        "sharding_strategy",
        *({2: ("SHARD_GRAD_OP", 2), 3: ("FULL_SHARD", 1)}[config.zero]),
        *hybrid,
    )
    theirs = {key.removeprefix("fsdp_"): key for key in inside}
    config.gather(fsdp, "fsdp_config", theirs)


USUAL_IN_FSDP: dict[str, tuple[object, ...]] = {
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "backward_prefetch": ("BACKWARD_PRE", 1),
    "backward_prefetch_policy": ("BACKWARD_PRE", 1),
    "forward_prefetch": (False,),
    "limit_all_gathers": (True,),
}
"""Settings of FSDP of which plans have these values alone."""
_FSDP_WORDS = (
    "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "auto_wrap", "offload"
)  # fmt: skip


def _rates(settings: Settings, config: ParsedConfig) -> None:
    config.trains(
        learning_rate=settings.amount("learning_rate"),
        beta1=settings.amount("adam_beta1"),
        beta2=settings.amount("adam_beta2"),
        epsilon=settings.amount("adam_epsilon"),
        weight_decay=settings.amount("weight_decay") or 0.0,
        clip_norm=settings.amount("max_grad_norm"),
        seed=settings.number("seed"),
    )
    steps = settings.number("max_steps")
    steps = steps if steps and steps > 0 else None
    warmup, ratio = settings.amount("warmup_steps"), settings.share("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, ratio = None, warmup
    if warmup is None and ratio and steps:
        warmup = round(ratio * steps)
    elif ratio and warmup is None:
        config.assumed.append(
            f"warmup: a share ({ratio:g}) of the steps, whose number is not said; no warm-up"
        )
    config.trains(warmup_steps=None if warmup is None else int(warmup))
    kind, values = (
        settings.word("lr_scheduler_type") or "linear",
        settings.pop("lr_scheduler_kwargs"),
    )
    if isinstance(values, str):
        values = limits.json_settings(values, "lr_scheduler_kwargs")
    if values is not None and not isinstance(values, dict):
        raise DocumentError("lr_scheduler_kwargs", f"is {values!r:.40}; it is a section")
    kwargs = Settings(values or {})
    rate = _RATES.get(kind)
    if rate is None or steps is None:
        if not kind.startswith("constant"):
            config.assumed.append(f"lr_scheduler_type {kind!r:.40}: the rate stays constant")
    else:
        config.trains(rate_schedule=rate, rate_steps=steps)
        config.trains(floor=kwargs.amount("min_lr_rate", "min_lr_ratio"))
        if rate == "wsd":
            config.trains(decay_steps=kwargs.number("num_decay_steps"))
            if kwargs.word("decay_type") not in (None, "linear"):
                config.assumed.append("lr_scheduler_kwargs.decay_type: it falls linearly")
    config.gather(kwargs, "lr_scheduler_kwargs")
