"""nanotron's configuration (YAML)."""

from __future__ import annotations

from meshwright.planner.architectures.architecture import architecture_of
from meshwright.planner.documents.model import Architecture
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    OWN_FAMILY,
    ParsedConfig,
    Settings,
)
from meshwright.planner.schedules import PLAIN, schedule_of
from meshwright.planner.schedules.pipeline_schedules import GPIPE

_PLAIN = schedule_of(PLAIN).names["nanotron"]
_ENGINES = {_PLAIN: PLAIN, "afab": GPIPE.name}


def read(text: str) -> ParsedConfig:
    """Return the settings of the configuration."""
    settings = Settings(limits.settings(text, "nanotron"))
    config = ParsedConfig(framework="nanotron")
    axes, tokens, model = (settings.part(name) for name in ("parallelism", "tokens", "model"))
    optimizer = settings.part("optimizer")
    data_ranks = axes.count("dp")
    config.tensor, config.pipeline = axes.degree("tp"), axes.degree("pp")
    config.context = axes.degree("context_parallel_size")
    config.expert = axes.degree("expert_parallel_size")
    modes = {"ALL_REDUCE": "", "REDUCE_SCATTER": "divided"}
    config.sequence_parallel = bool(axes.choice("tp_mode", modes, "")) or config.tensor == 1
    engine = axes.word("pp_engine") or _PLAIN
    if engine not in _ENGINES:
        raise DocumentError("parallelism.pp_engine", f"is '{engine:.40}'; it is 1f1b or afab")
    config.schedule = _ENGINES[engine]
    if axes.flag("recompute_layer"):
        config.recompute = "full"
    if config.tensor == 1:
        axes.idle("tp_linear_async_communication")
    else:
        axes.expect("tp_linear_async_communication", False)
    config.micro_batch = tokens.count("micro_batch_size")
    config.micro_batches = tokens.count("batch_accumulation_per_replica")
    config.seq_len = tokens.number("sequence_length")
    steps = tokens.number("train_steps")
    dtypes = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    config.precision = model.choice("dtype", dtypes, "bf16")
    figures = model.part("model_config")
    names = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_size": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    for name, key in names.items():
        value = figures.number(key)
        if value is not None:
            config.model[name] = value
    config.model |= _own_architecture(figures)
    config.zero = optimizer.number("zero_stage") or 0
    factory = optimizer.part("optimizer_factory")
    optimizer.expect("accumulate_grad_in_fp32", True)
    factory.expect("torch_adam_is_fused", True)
    factory.expect("name", "adamW")
    bound = optimizer.amount("clip_grad")
    config.trains(
        beta1=factory.amount("adam_beta1"),
        beta2=factory.amount("adam_beta2"),
        epsilon=factory.amount("adam_eps"),
        weight_decay=optimizer.amount("weight_decay"),
        clip_norm=bound or 0.0,
    )
    rates = optimizer.part("learning_rate_scheduler")
    _rates(rates, config, steps)
    if data_ranks:
        config.devices = (
            data_ranks * config.tensor * config.pipeline * config.context * config.expert
        )
    config.gather(settings)
    for name, section in (
        ("parallelism", axes),
        ("tokens", tokens),
        ("model", model),
        ("model.model_config", figures),
        ("optimizer", optimizer),
        ("optimizer.optimizer_factory", factory),
        ("optimizer.learning_rate_scheduler", rates),
    ):
        config.gather(section, name)
    config.understood = settings.understood
    return config


def _own_architecture(figures: Settings) -> dict[str, Architecture]:
    """Return the decoder that a configuration describes as Hugging Face's would be."""
    flags = {"is_llama_config": "llama", "is_qwen2_config": "qwen2"}
    kind = next((name for flag, name in flags.items() if figures.ignore(flag)), None)
    figures.name("moe_config")
    if kind is None or "moe_config" in figures:
        return {}
    keys = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
        *("rms_norm_eps", "rope_theta", "hidden_act", "attention_bias"),
    )
    values = {key: figures.ignore(key) for key in keys}
    config = {key: value for key, value in values.items() if value is not None}
    try:
        architecture = architecture_of({"model_type": kind, **config}, name="model_config")
    except DocumentError:
        return {}
    return {"architecture": architecture.model_copy(update={"family": OWN_FAMILY})}


def _rates(rates: Settings, config: ParsedConfig, steps: int | None) -> None:
    rate, least = rates.amount("learning_rate"), rates.amount("min_decay_lr")
    warmup = rates.number("lr_warmup_steps") or 0
    begin, fall = rates.number("lr_decay_starting_step"), rates.number("lr_decay_steps")
    style = rates.word("lr_decay_style")
    config.trains(learning_rate=rate, warmup_steps=warmup)
    if least is not None and least == rate:
        return
    begin = warmup if begin is None else begin
    fall = steps - begin if fall is None and steps else fall
    if not fall:
        return
    if begin > warmup:
        config.trains(rate_schedule="wsd", decay_steps=fall)
        if style not in (None, "linear"):
            config.assumed.append(f"lr_decay_style {style!r:.40}: it falls linearly")
    else:
        config.trains(rate_schedule="cosine" if style == "cosine" else "linear")
    config.trains(rate_steps=begin + fall)
    if rate and least:
        config.trains(floor=least / rate)
