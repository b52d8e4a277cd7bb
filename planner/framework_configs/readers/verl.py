"""verl's actor, as its configuration (YAML) or as the words of its command (`key=value`).

The plan is that of the actor's update: rollouts, the reference model and the critic are other
programs on the same devices, and are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshwright.planner.documents import document
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import megatron
from meshwright.planner.framework_configs.readers.hydra import compose
from meshwright.planner.framework_configs.readers.interpolation import resolve
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the configuration."""
    data = compose(limits.settings(text, "verl"), surroundings, "verl")
    return of_settings(resolve(data, surroundings))


def of_words(words: Sequence[str]) -> ParsedConfig:
    """Return the settings in `key=value` words of a command."""
    data: dict[str, Any] = {}
    others: list[str] = []
    for before, word in pairwise(("", *words)):
        name = word.partition("=")[0]
        if name == "--config-name" or before == "--config-name":
            data["config_name"] = word.partition("=")[2] or word
            continue
        if name == "--config-path" and word.partition("=")[2] in ("config", "./config"):
            continue  # the folder of verl's own sets
        path, sign, value = word.lstrip("+~").partition("=")
        if not sign or not path.replace(".", "").replace("_", "").isalnum():
            named = word.startswith(("-", "~")) or (sign and not word.isupper())
            others += [word] if named and word not in ("-m", "-u") else []
            continue
        inside = data
        *sections, key = path.split(".")
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise DocumentError(path, "is a setting and a section; give one of them")
        inside[key] = _value(value)
    config = of_settings(resolve(data))
    config.unknown += others
    return config


def _value(text: str) -> Any:
    try:
        value = document.plain(text)
    except DocumentError:
        return text
    return text if isinstance(value, dict) else value


def of_settings(data: Mapping[str, Any]) -> ParsedConfig:
    """Return the settings of the actor, of its model and of the trainer."""
    settings = Settings(data)
    if "actor_rollout_ref" not in settings:
        raise DocumentError(
            "verl",
            "has no section actor_rollout_ref, and the update of PPO's and GRPO's actor alone is "
            "read; give the configuration of main_ppo",
        )
    both = settings.part("actor_rollout_ref")
    model, actor = both.part("model"), both.part("actor")
    trainer, samples = settings.part("trainer"), settings.part("data")
    usual = _usual_strategy(settings, actor)
    strategy = actor.choice("strategy", _STRATEGIES, usual)
    config = ParsedConfig(framework=strategy, precision="bf16")
    if strategy == "fsdp" and actor.ignore("strategy") != "fsdp2":
        config.options.append("wide-states")
    each = trainer.devices("n_gpus_per_node") if "n_gpus_per_node" in trainer else 8
    nodes = trainer.devices("nnodes") if "nnodes" in trainer else 1
    config.devices = each * nodes if each and nodes else None
    wanted = model.model_name("path")
    if wanted:
        config.model["registered"] = wanted
    _batches(actor, both, samples, config)
    if model.flag("enable_gradient_checkpointing") is not False:
        config.recompute = "full"
    for part, switches in ((model, _SWITCHES_OF_MODEL), (actor, _SWITCHES_OF_ACTOR)):
        for key, on in switches.items():
            part.expect(key, on)
    _adapters(model, config)
    sharding = actor.part("fsdp_config")
    degrees = actor.part("megatron")
    if strategy == "fsdp":
        _sharding(sharding, config)
        config.context = actor.degree("ulysses_sequence_parallel_size")
        if config.context > 1:
            config.options.append("ulysses")
        if degrees.unread:
            actor.idle("megatron")
    else:
        _megatron(degrees, config)
        actor.idle("fsdp_config", "ulysses_sequence_parallel_size")
        config.gather(degrees, f"{_ACTOR}.megatron")
    rates = actor.part("optim")
    config.trains(
        learning_rate=rates.amount("lr"),
        weight_decay=rates.amount("weight_decay"),
        clip_norm=actor.amount("grad_clip"),
    )
    config.assumed.append(
        "the actor's update alone: rollouts, reference and critic are not counted"
    )
    for part, section in (
        (rates, f"{_ACTOR}.optim"),
        (sharding if strategy == "fsdp" else Settings({}), f"{_ACTOR}.fsdp_config"),
        (model, "actor_rollout_ref.model"),
        (actor, _ACTOR),
        (both, "actor_rollout_ref"),
        (samples, "data"),
        (trainer, "trainer"),
        (settings, ""),
    ):
        config.gather(part, section)
    config.understood = settings.understood
    return config


def _usual_strategy(settings: Settings, actor: Settings) -> str:
    """Return the strategy where none is named: by the set of settings, or by those that there are.

    `--config-name ppo_megatron_trainer` and `model_engine=megatron` choose a set.
    """
    words = [str(settings.ignore(key) or "") for key in ("config_name", "model_engine")]
    if any("megatron" in word for word in words):
        return "megatron"
    has_degrees, has_sharding = "megatron" in actor, "fsdp_config" in actor
    return "megatron" if has_degrees and not has_sharding else "fsdp"


_SWITCHES_OF_MODEL = {
    "enable_activation_offload": False,
    "use_remove_padding": True,
    "use_fused_kernels": False,
    "use_liger": False,
}
_SWITCHES_OF_ACTOR = {
    "use_torch_compile": True,
    "use_fused_kernels": False,
    "use_prefix_grouper": False,
    "entropy_checkpointing": False,
}
"""Switches of which plans have the usual state alone."""
_STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
_ACTOR = "actor_rollout_ref.actor"


def _batches(actor: Settings, both: Settings, samples: Settings, config: ParsedConfig) -> None:
    """Read samples of an update: answers to prompts, of which a rank takes some at once."""
    prompt, answer = samples.count("max_prompt_length"), samples.count("max_response_length")
    config.seq_len = (prompt or 512) + (answer or 512)
    answers = both.part("rollout")
    each = answers.count("n") or 1
    batch = actor.count("ppo_mini_batch_size")
    if batch is None:
        batch = samples.count("train_batch_size")
    else:
        samples.idle("train_batch_size")
    config.global_batch = batch * each if batch else None
    config.micro_batch = actor.count(
        "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_device"
    )
    if actor.flag("use_dynamic_bsz"):
        tokens = actor.count("ppo_max_token_len_per_gpu") or 16384
        config.micro_batch = max(1, tokens // config.seq_len)
        config.assumed.append(f"a micro-batch has as many whole samples as {tokens} tokens hold")
    else:
        actor.idle("ppo_max_token_len_per_gpu")
    config.assumed.append("answers have all their tokens")
    if answers.flag("free_cache_engine") is False:
        config.unknown.append("actor_rollout_ref.rollout.free_cache_engine")
    elif answers.unread:
        config.assumed.append("the engine of rollouts gives its memory back before an update")


def _adapters(model: Settings, config: ParsedConfig) -> None:
    rank = model.count("lora_rank")
    alpha = model.amount("lora_alpha") or 16.0
    targets = [word for text in model.words("target_modules") for word in text.split()]
    if not rank:
        model.idle("lora_alpha", "target_modules")
        return
    chosen = tuple(targets) if targets and targets != ["all-linear"] else ("all-linear",)
    config.trains(lora={"rank": rank, "alpha": alpha, "targets": chosen})


def _sharding(sharding: Settings, config: ParsedConfig) -> None:
    again = sharding.flag("reshard_after_forward")
    config.zero = 2 if again is False else 3
    size = sharding.number("fsdp_size")
    if size is not None and size < 1 and size != -1:
        raise DocumentError("fsdp_size", f"is {size}; it is a number of ranks, or -1 for all")
    if size is not None and size > 0:
        config.data_shard = size
    if sharding.flag("offload_policy"):
        config.offload = "parameters"
    # They are moved to the host between updates, and back before one.
    for key in ("param_offload", "optimizer_offload", "grad_offload"):
        if sharding.flag(key):
            config.assumed.append(f"{key}: states are on the device while the actor is updated")
    dtypes = {"bfloat16": "", "bf16": "", "float32": "", "fp32": ""}
    sharding.choice("model_dtype", dtypes, "")
    if str(sharding.ignore("model_dtype")) in ("bfloat16", "bf16"):
        config.options = [option for option in config.options if option != "wide-states"]
        config.options.append("narrow-states")


def _megatron(degrees: Settings, config: ParsedConfig) -> None:
    config.tensor = degrees.degree("tensor_model_parallel_size")
    config.pipeline = degrees.degree("pipeline_model_parallel_size")
    config.context = degrees.degree("context_parallel_size")
    config.expert = degrees.degree("expert_model_parallel_size")
    each = degrees.count("expert_tensor_parallel_size")
    if config.expert > 1:
        config.expert_tensor = config.tensor if each is None else each
    virtual = degrees.count("virtual_pipeline_model_parallel_size")
    if virtual and config.pipeline > 1:
        config.virtual_stages = virtual
        config.schedule = megatron.schedule_with(virtual)
    config.sequence_parallel = degrees.flag("sequence_parallel") is not False
    config.zero = 0 if degrees.flag("use_distributed_optimizer") is False else 1
    _overrides(degrees, config)
    for key in ("param_offload", "optimizer_offload", "grad_offload"):
        if degrees.flag(key):
            config.assumed.append(f"{key}: states are on the device while the actor is updated")


def _overrides(degrees: Settings, config: ParsedConfig) -> None:
    """Read settings of Megatron Core's TransformerConfig, as arguments of Megatron."""
    inside = degrees.part("override_transformer_config")
    for key in _FUSED:
        inside.expect(key, True)
    theirs = {key: inside.pop(key) for key in inside.unread}
    if not theirs:
        config.gather(inside, _OVERRIDES)
        return
    degree = {
        "tensor-model-parallel-size": config.tensor,
        "pipeline-model-parallel-size": config.pipeline,
        "expert-model-parallel-size": config.expert,
        "overlap-param-gather": True,
    }
    names = {key: _NAMES.get(key, key.replace("_", "-")) for key in theirs}
    read = megatron.of_flags(degree | {names[key]: value for key, value in theirs.items()})
    config.options += read.options
    if "recompute_granularity" in theirs:
        config.recompute, config.recomputed = read.recompute, read.recomputed
    config.ends, config.lighter = read.ends, read.lighter
    for key, name in names.items():
        for words, found in (
            (config.unknown, read.unknown),
            (config.without_effect, read.without_effect),
        ):
            words += [
                f"{_OVERRIDES}.{key}{word.removeprefix(f'--{name}')}"
                for word in found
                if word.partition("=")[0] == f"--{name}"
            ]
    config.gather(inside, _OVERRIDES)


_OVERRIDES = f"{_ACTOR}.megatron.override_transformer_config"
_NAMES = {
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
"""Names of arguments whose settings have others."""
_FUSED = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "deallocate_pipeline_outputs",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "persist_layer_norm",
)
"""Switches that plans have on."""
