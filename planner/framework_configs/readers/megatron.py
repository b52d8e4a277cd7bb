"""Megatron-LM's arguments, of a shell script or one after the other.

Megatron-Bridge's overrides of a recipe (YAML), by the names of Megatron-LM's arguments.
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.megatron import RECIPES
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import megatron, shell
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    schedule_name,
)
from meshwright.planner.schedules import PLAIN

_MOST_LAYOUT = 100_000
"""Characters of a layout whose groups are written out."""
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return what the arguments say."""
    return shell.parsed(text, "megatron", lambda words: _of_words(words, text), surroundings)


def _of_words(words: list[str], text: str) -> ParsedConfig:
    flags = shell.flags(words)
    for name, value in list(flags.items()):  # a script behind `torchrun --nproc_per_node 8 x.py`
        if isinstance(value, list) and any(word.endswith(".py") for word in value):
            flags[name] = value[0]
    return of_flags(flags, text)


def of_flags(flags: dict[str, str | bool | list[str]], text: str = "") -> ParsedConfig:
    """Return what flags say."""
    config = ParsedConfig(framework="megatron")
    left_out = [
        name for name, value in flags.items() if "$" in str(value) and name in _MAY_BE_UNKNOWN
    ]
    config.assumed += [f"--{name} is left out: its value is not in the script" for name in left_out]
    settings = Settings({name: value for name, value in flags.items() if name not in left_out})
    _degrees(settings, config)
    _batches(settings, config)
    _recompute(settings, config)
    _kernels(settings, config)
    _optimizer(settings, config)
    _figures(settings, config)
    config.devices = _devices(settings, shell.directives(text))
    config.unknown = [f"--{key}" for key in settings.unread] + settings.loose
    config.understood = settings.understood
    return config


_RATES = """
    lr min-lr seed train-iters train-samples weight-decay clip-grad adam-beta1 adam-beta2 adam-eps
    lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples
    lr-warmup-fraction lr-wsd-decay-iters lr-wsd-decay-style vocab-size
"""
_MAY_BE_UNKNOWN = frozenset(_RATES.split())
"""Flags that change neither seconds nor bytes, and that can be left out."""


def _degrees(settings: Settings, config: ParsedConfig) -> None:
    config.tensor = settings.degree("tensor-model-parallel-size")
    config.pipeline = settings.degree("pipeline-model-parallel-size")
    config.context = settings.degree("context-parallel-size")
    config.expert = settings.degree("expert-model-parallel-size")
    config.sequence_parallel = bool(settings.flag("sequence-parallel")) or config.tensor == 1
    each = settings.number("expert-tensor-parallel-size")
    if config.expert > 1:
        # By default tensor ranks divide each expert.
        config.expert_tensor = config.tensor if each is None else each
    config.ends = (
        settings.number("decoder-first-pipeline-num-layers"),
        settings.number("decoder-last-pipeline-num-layers"),
    )
    config.lighter = (
        int(bool(settings.flag("account-for-embedding-in-pipeline-split"))),
        int(bool(settings.flag("account-for-loss-in-pipeline-split"))),
    )
    layers = settings.number("num-layers")
    per_stage = settings.count("num-layers-per-virtual-pipeline-stage")
    virtual = settings.count(
        "num-virtual-stages-per-pipeline-rank", "virtual-pipeline-model-parallel-size"
    )
    if per_stage:
        config.model["blocks_of_virtual_stage"] = per_stage
        config.virtual_stages = 2
    elif virtual:
        config.virtual_stages = virtual
    if layers is not None:
        config.model["layers"] = layers
    config.schedule = _schedule(config.virtual_stages)
    layout = settings.pop("pipeline-model-parallel-layout")
    if isinstance(layout, str):
        config.blocks, config.virtual_stages = _of_layout(layout, config.pipeline)
        config.schedule = _schedule(config.virtual_stages)
    for also in ("overlap-grad-reduce", "overlap-param-gather", "ckpt-format"):
        settings.ignore(also)
    settings.ignore("no-gradient-accumulation-fusion")
    strategy = settings.word("data-parallel-sharding-strategy")
    if settings.flag("use-distributed-optimizer"):
        config.zero = 1
    if settings.flag("use-megatron-fsdp", "use-custom-fsdp"):
        if strategy not in (None, *_STRATEGIES):
            raise DocumentError(
                "--data-parallel-sharding-strategy",
                f"is '{strategy:.40}'; it is one of {', '.join(_STRATEGIES)}",
            )
        config.zero = _STRATEGIES[strategy or "no_shard"]
    if settings.flag("use-torch-fsdp2"):
        config.zero = 3


def _schedule(virtual_stages: int) -> str:
    """Return what Megatron runs: Megatron Core, pipeline_parallel/schedules.py."""
    looped = schedule_name("megatron", "forward_backward_pipelining_with_interleaving")
    return looped if virtual_stages > 1 and looped is not None else PLAIN


def _of_layout(text: str, pipeline: int) -> tuple[list[int], int]:
    """Return blocks of each stage of `Et*3|t*4|t*3L`, and stages of a rank."""
    budget = limits.ReadingLimit("--pipeline-model-parallel-layout", _MOST_LAYOUT)

    def repeat_group(group: re.Match[str]) -> str:
        budget.spend(len(group[1]) * int(group[2]))
        return group[1] * int(group[2])

    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", repeat_group, text)
    stages = [
        sum(int(count or 1) for count in re.findall(r"t(?:\*(\d{1,4}))?", stage))
        for stage in plain.split("|")
    ]
    if pipeline < 1 or len(stages) % pipeline:
        raise DocumentError(
            "--pipeline-model-parallel-layout",
            f"has {len(stages)} stages, which {pipeline} pipeline ranks do not divide; "
            "change either",
        )
    return stages, len(stages) // pipeline


def _batches(settings: Settings, config: ParsedConfig) -> None:
    config.micro_batch = settings.count("micro-batch-size")
    config.global_batch = settings.count("global-batch-size")
    config.seq_len = settings.number("seq-length")
    config.precision = "fp32"
    for name in ("fp16", "bf16"):
        if settings.flag(name):
            config.precision = name
    if settings.pop("fp8-format", "fp8"):
        config.precision = "fp8"
        config.scales = settings.word("fp8-recipe") or "delayed"
        if config.scales == "mxfp8":
            config.precision, config.scales = "mxfp8", "tensorwise"
            settings.pop("reuse-grad-buf-for-mxfp8-param-ag")
        elif config.scales not in RECIPES:
            raise DocumentError("--fp8-recipe", f"is '{config.scales:.40}'; {' or '.join(RECIPES)}")
        if settings.flag("fp8-dot-product-attention"):
            config.options.append("fp8-attention")
        if not settings.flag("fp8-param-gather"):
            config.options.append("16-bit-gathers")


ATTENTION = frozenset({"core_attn"})
CHEAP = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Values of --recompute-modules that its plans have, each set as a whole."""


def _recompute(settings: Settings, config: ParsedConfig) -> None:
    kind = settings.word("recompute-granularity")
    method, count = settings.word("recompute-method"), settings.number("recompute-num-layers")
    if settings.flag("recompute-activations"):
        kind = "selective"
    if kind == "full":
        config.recompute = "full"
        if method == "block":
            config.recomputed = count
        elif method == "uniform" and (count or 1) > 1:
            config.assumed.append(
                f"--recompute-num-layers {count} with uniform: each block is recomputed alone"
            )
    elif kind == "selective":
        config.recompute = "selective"
        modules = set(settings.words("recompute-modules")) or ATTENTION
        operators = CHEAP if modules & CHEAP else ATTENTION
        if operators is CHEAP:
            config.options.append("cheap-recompute")
        if modules != operators:
            config.assumed.append(
                f"--recompute-modules {' '.join(sorted(modules)):.80}: what is recomputed is "
                f"{' '.join(sorted(operators))}"
            )


def _kernels(settings: Settings, config: ParsedConfig) -> None:
    kind = settings.word("moe-token-dispatcher-type")
    if kind == "flex" and settings.pop("moe-flex-dispatcher-backend") in (None, "deepep", True):
        config.options.append("deepep")
    if settings.flag("moe-enable-deepep") and "deepep" not in config.options:
        config.options.append("deepep")
    if settings.number("num-experts") and settings.flag("moe-grouped-gemm") is not True:
        config.assumed.append("products of experts are grouped, without --moe-grouped-gemm")
    settings.ignore("moe-grouped-gemm")
    for flag, option in (
        ("overlap-moe-expert-parallel-comm", "expert-overlap"),
        ("moe-shared-expert-overlap", "shared-expert-overlap"),
        ("tp-comm-overlap", "tp-overlap"),
    ):
        if settings.flag(flag):
            config.options.append(option)
    exchanged = {"a2a": "ulysses", "all_gather": "gathered-context"}
    kind = settings.word("cp-comm-type")
    if kind in exchanged:
        config.options.append(exchanged[kind])
    if settings.flag("cpu-offloading", "optimizer-cpu-offload"):
        config.assumed.append("offload to the host, which its plans do not have, is left out")


def _optimizer(settings: Settings, config: ParsedConfig) -> None:
    optimizer = settings.word("optimizer")
    if optimizer not in (None, "adam"):
        config.assumed.append(f"--optimizer {optimizer:.40}: AdamW instead")
    rate = settings.amount("lr")
    config.trains(
        learning_rate=rate,
        beta1=settings.amount("adam-beta1"),
        beta2=settings.amount("adam-beta2"),
        epsilon=settings.amount("adam-eps"),
        weight_decay=settings.amount("weight-decay"),
        clip_norm=settings.amount("clip-grad"),
        seed=settings.number("seed"),
    )
    settings.ignore("lr-warmup-init")
    steps, warmup = settings.number("train-iters"), settings.number("lr-warmup-iters")
    batch = config.global_batch
    samples, of_warmup = settings.number("train-samples"), settings.number("lr-warmup-samples")
    of_decay = settings.number("lr-decay-samples")
    fraction = settings.share("lr-warmup-fraction")
    end = settings.number("lr-decay-iters")
    if batch:
        steps = steps or (samples // batch if samples else None)
        warmup = warmup if warmup is not None else of_warmup // batch if of_warmup else None
        end = end or (of_decay // batch if of_decay else None)
    end = end or steps
    if fraction is not None and end:
        warmup = round(fraction * end)
    config.trains(warmup_steps=warmup)
    style = settings.word("lr-decay-style")
    fall, least = settings.number("lr-wsd-decay-iters"), settings.amount("min-lr")
    kind_of_fall = settings.word("lr-wsd-decay-style")
    kind = {"cosine": "cosine", "linear": "linear", "WSD": "wsd"}.get(str(style))
    if kind is None:
        if style not in (None, "constant"):
            config.assumed.append(f"--lr-decay-style {style:.40}: the rate stays constant")
        return
    if end is None:
        config.assumed.append(f"--lr-decay-style {style}: no last step is said; it stays constant")
        return
    config.trains(rate_schedule=kind, rate_steps=end)
    if rate and least:
        config.trains(floor=least / rate)
    if kind == "wsd":
        config.trains(decay_steps=fall)
        if kind_of_fall not in (None, "linear"):
            config.assumed.append(f"--lr-wsd-decay-style {kind_of_fall:.40}: it falls linearly")


def _figures(settings: Settings, config: ParsedConfig) -> None:
    figures = {
        "hidden_size": settings.number("hidden-size"),
        "heads": settings.number("num-attention-heads"),
        "kv_heads": settings.number("num-query-groups"),
        "ffn_size": settings.number("ffn-hidden-size"),
        "vocab_size": settings.number("vocab-size"),
        "experts": settings.number("num-experts"),
        "per_token": settings.number("moe-router-topk"),
        "expert_ffn_size": settings.number("moe-ffn-hidden-size"),
    }
    if not settings.flag("group-query-attention"):
        figures["kv_heads"] = None
    if figures["hidden_size"]:
        figures["experts"] = figures["experts"] or 0
    config.model |= {name: value for name, value in figures.items() if value is not None}


def _devices(settings: Settings, asked: dict[str, str]) -> int | None:
    """Return how many ranks are started, as torchrun's or Slurm's arguments say."""
    each = settings.number("nproc-per-node") if _plain(settings, "nproc-per-node") else None
    nodes = settings.number("nnodes") if _plain(settings, "nnodes") else None
    for also in ("node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-backend"):
        settings.ignore(also)
    return ranks_of(asked, nodes, each)


def ranks_of(asked: dict[str, str], nodes: int | None, each: int | None) -> int | None:
    """Return ranks of a number of nodes, of which a Slurm script may say the rest."""
    nodes = nodes or shell.device_count(asked.get("nodes"))
    each = (
        each
        or shell.device_count(asked.get("gpus-per-node"))
        or shell.device_count(asked.get("gres"))
    )
    tasks = shell.device_count(asked.get("ntasks-per-node"))
    if each is None and tasks and tasks > 1:
        each = tasks
    if each is not None:
        return each * (nodes or 1)
    return shell.device_count(asked.get("gpus"))


def _plain(settings: Settings, key: str) -> bool:
    return str(settings.ignore(key) or "").isdecimal()


_OTHER_NAMES = {
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "num_moe_experts": "num-experts",
}
_SECTIONS = ("model", "train", "dataset", "ddp", "optimizer", "scheduler")
_RECIPES = (("mxfp8", "mxfp8"), ("current", "tensorwise"), ("subchannel", "blockwise"))
"""What names of mixed precision say of scales; others are delayed."""


def read_bridge(text: str) -> ParsedConfig:
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
