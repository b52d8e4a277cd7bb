"""Megatron-LM's arguments, of a shell script or one after the other.

Megatron-Bridge's overrides of a recipe (YAML), by the names of Megatron-LM's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.megatron import RECIPES
from meshwright.planner.framework_configs.readers import deepspeed, megatron, shell
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.interpolation import resolve
from meshwright.planner.framework_configs.readers.megatron_model import (
    OTHER_MODELS,
    own_architecture,
)
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    named_file,
    schedule_name,
)
from meshwright.planner.schedules import PLAIN

_MOST_LAYOUT = 100_000
"""Characters of a layout whose groups are written out."""
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


_ARGUMENTS_KEY = re.compile(r"^MODEL_ARGS:", re.MULTILINE)


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of arguments: of a script, one a line, or under MODEL_ARGS of a YAML."""
    if _ARGUMENTS_KEY.search(text):
        return _of_model_args(text)
    if shell.is_yaml(text):
        return _of_yaml(text)
    return shell.parsed(
        text, "megatron", lambda words: of_words(words, text, surroundings), surroundings
    )


def _of_yaml(text: str) -> ParsedConfig:
    """Return the settings of arguments in a YAML: of a checkpoint, or in sections (--yaml-cfg)."""
    data = limits.settings(text, "megatron")
    flags: dict[str, Any] = {}
    others: list[str] = []
    for section, values in data.items():
        for name, value in values.items() if isinstance(values, dict) else [(section, values)]:
            if isinstance(value, dict | list):
                others.append(f"{section}.{name}" if isinstance(values, dict) else str(name))
            elif value is not None:
                flags[str(name).replace("_", "-")] = value
    if not flags.keys() & _PARALLEL:
        raise DocumentError("megatron", shell.NO_SCRIPT)
    config = of_flags(flags)
    config.unknown += others
    return config


_PARALLEL = {"tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size"}


def _of_model_args(text: str) -> ParsedConfig:
    """Return the settings in the arguments of a test case or of a model zoo."""
    data = limits.settings(text, "megatron")
    arguments = data["MODEL_ARGS"]
    if not isinstance(arguments, dict):
        raise DocumentError("MODEL_ARGS", f"is {arguments!r:.40}; it is a section of arguments")
    flags = {
        str(name).removeprefix("--").replace("_", "-"): value
        for name, value in arguments.items()
        if value is not None
    }
    config = of_flags(flags)
    config.unknown += [str(key) for key in data if key != "MODEL_ARGS"]
    return config


def of_words(
    words: list[str], text: str, surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return the settings in the words of a command."""
    flags = shell.flags(words)
    for name, value in list(flags.items()):  # a script behind `torchrun --nproc_per_node 8 x.py`
        if isinstance(value, list) and any(word.endswith(".py") for word in value):
            flags[name] = value[0]
    programs = [PurePosixPath(word).name for word in words if word.endswith(".py")]
    config = of_flags(flags, text, program=programs[-1] if programs else "")
    if "deepspeed" in flags or "deepspeed-config" in flags:
        _stage_of_deepspeed(flags, config, surroundings)
    return config


def _stage_of_deepspeed(
    flags: Mapping[str, Any], config: ParsedConfig, surroundings: ScriptEnvironment | None
) -> None:
    """Read which states DeepSpeed divides, of a Megatron that it drives (Megatron-DeepSpeed)."""
    stage = Settings(flags).number("zero-stage")
    if stage is None:
        name, inside = named_file("--deepspeed-config", flags.get("deepspeed-config"), surroundings)
        stage = deepspeed.of_settings(limits.json_settings(inside, name)).zero
    config.zero = stage
    config.unknown = [word for word in config.unknown if not word.startswith("--zero-stage")]
    config.assumed.append(f"DeepSpeed's ZeRO-{stage} is priced as Megatron's would be")


def of_flags(flags: Mapping[str, Any], text: str = "", *, program: str = "") -> ParsedConfig:
    """Return the settings of flags of a program that trains."""
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
    other = [word for word in (program, *settings.unread) if OTHER_MODELS.search(word)]
    if not other:
        config.model |= own_architecture(settings, config.model)
    config.devices = _devices(settings, shell.directives(text))
    config.unknown = [f"--{word}" for word in (*settings.unread, *settings.unusual)]
    config.unknown += settings.loose
    config.without_effect = [f"--{key}" for key in settings.without_effect]
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
    if config.tensor == 1:
        settings.idle("sequence-parallel", "tp-comm-overlap")
    if config.pipeline == 1:
        settings.idle(*_OF_PIPELINES)
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
    config.schedule = schedule_with(config.virtual_stages)
    layout = settings.pop("pipeline-model-parallel-layout")
    if isinstance(layout, str):
        config.blocks, config.virtual_stages = _of_layout(layout, config.pipeline)
        config.schedule = schedule_with(config.virtual_stages)
    config.overlaps_reduction = bool(settings.flag("overlap-grad-reduce"))
    config.words_of_replicas += ["overlap_grad_reduce"] * ("overlap-grad-reduce" in settings)
    _sharding(settings, config)


def _sharding(settings: Settings, config: ParsedConfig) -> None:
    """Read the sharding of data-parallel ranks, and the overlap of its communication."""
    strategy = settings.ignore("data-parallel-sharding-strategy")
    if settings.flag("use-distributed-optimizer"):
        config.zero = 1
    if settings.flag("use-megatron-fsdp", "use-custom-fsdp"):
        if strategy not in (None, *_STRATEGIES):
            raise DocumentError(
                "--data-parallel-sharding-strategy",
                f"is '{strategy:.40}'; it is one of {', '.join(_STRATEGIES)}",
            )
        settings.word("data-parallel-sharding-strategy")
        config.zero = _STRATEGIES[strategy or "no_shard"]
        settings.idle("use-distributed-optimizer")
    else:
        settings.idle("data-parallel-sharding-strategy")
    if settings.flag("use-torch-fsdp2"):
        config.zero = 3
    if config.zero:
        settings.expect("overlap-param-gather", True)
    else:
        settings.idle("overlap-param-gather")
    if config.zero > 1:
        settings.idle("no-gradient-accumulation-fusion")


_OF_PIPELINES = (
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "virtual-pipeline-model-parallel-size",
    "pipeline-model-parallel-layout",
)
"""Arguments without effect where there is no pipeline."""


def schedule_with(virtual_stages: int) -> str:
    """Return the schedule that Megatron runs: Megatron Core, pipeline_parallel/schedules.py."""
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
    kinds = [name for name in ("fp16", "bf16") if settings.flag(name)]
    if len(kinds) > 1:
        raise DocumentError("--bf16", "and --fp16 are both there; leave one out")
    config.precision = kinds[0] if kinds else "fp32"
    if settings.pop("fp8-format", "fp8"):
        if config.precision != "bf16":
            config.assumed.append(f"what is not in 8 bits is in bf16, not in {config.precision}")
        config.precision = "fp8"
        settings.expect("fp8-format" if "fp8-format" in settings else "fp8", *_FORMATS)
        config.scales = settings.word("fp8-recipe") or "delayed"
        if config.scales == "mxfp8":
            config.precision, config.scales = "mxfp8", "tensorwise"
            settings.expect("reuse-grad-buf-for-mxfp8-param-ag", True)
        elif config.scales not in RECIPES:
            raise DocumentError("--fp8-recipe", f"is '{config.scales:.40}'; {' or '.join(RECIPES)}")
        if settings.flag("fp8-dot-product-attention"):
            config.options.append("fp8-attention")
        if not settings.flag("fp8-param-gather"):
            config.options.append("16-bit-gathers")
    else:
        settings.idle("fp8-recipe", "fp8-param-gather", "fp8-dot-product-attention")
    if settings.flag("grad-reduce-in-bf16"):
        config.options.append("narrow-gradients")


_FORMATS = ("hybrid", "e4m3")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Values of --recompute-modules that plans have, each an option of the framework."""


def _recompute(settings: Settings, config: ParsedConfig) -> None:
    kind = settings.word("recompute-granularity")
    if settings.flag("recompute-activations"):
        kind = "selective"
    by_layers = settings.flag("checkpoint-activations")  # of before 2022, and of forks
    if by_layers:
        kind = "full"
        settings.expect("checkpoint-num-layers", 1)
        settings.idle("deepspeed-activation-checkpointing")
    if kind == "full":
        config.recompute = "full"
        method = settings.choice("recompute-method", {"uniform": "uniform", "block": "block"}, "")
        count = settings.number("recompute-num-layers")
        if method == "block":
            config.recomputed = count
        else:
            settings.expect("recompute-num-layers", 1)
        if not method and not by_layers:
            settings.name("recompute-granularity")
        settings.idle("recompute-modules")
    elif kind == "selective":
        config.recompute = "selective"
        settings.idle("recompute-method", "recompute-num-layers")
        modules = settings.words("recompute-modules") or ["core_attn"]
        modules = [word for text in modules for word in text.split()]
        if set(modules) - set(MODULES):
            settings.name("recompute-modules")
        if set(modules) != {"core_attn"}:  # which is what selective recompute is by itself
            config.options += [
                f"recompute-{name.replace('_', '-')}" for name in MODULES if name in modules
            ]
    else:
        settings.idle("recompute-method", "recompute-num-layers", "recompute-modules")
        if kind is not None:
            settings.name("recompute-granularity")


def _kernels(settings: Settings, config: ParsedConfig) -> None:
    _experts(settings, config)
    for flag, option in (
        ("overlap-moe-expert-parallel-comm", "expert-overlap"),
        ("moe-shared-expert-overlap", "shared-expert-overlap"),
        ("tp-comm-overlap", "tp-overlap"),
        ("cross-entropy-loss-fusion", "fused-cross-entropy"),
    ):
        if settings.flag(flag):
            config.options.append(option)
    settings.expect("cross-entropy-fusion-impl", "native", "te")
    exchanged = {"p2p": "", "a2a": "ulysses", "all_gather": "gathered-context"}
    backends = {"auto": "", "fused": "", "flash": "fa2", "unfused": "eager-attention"}
    graphs = {"none": "", "transformer_engine": "graphed-layers", "local": "graphed-layers"}
    for key, words in (
        ("cp-comm-type", exchanged),
        ("attention-backend", backends),
        ("cuda-graph-impl", graphs),
    ):
        option = settings.choice(key, words, "")
        if option:
            config.options.append(option)
    if settings.flag("use-flash-attn") and "fa2" not in config.options:
        config.options.append("fa2")
    if settings.flag("enable-cuda-graph", "external-cuda-graph"):
        config.options.append("graphed-layers")
    _graphs(settings, config)
    settings.expect("transformer-impl", "transformer_engine")


def _graphs(settings: Settings, config: ParsedConfig) -> None:
    """Read which part of a layer is replayed as a graph; plans have whole layers and steps."""
    words = settings.words("cuda-graph-scope")
    if not words:
        return
    if words == ["full_iteration"]:
        config.options = [option for option in config.options if option != "graphed-layers"]
        config.options.append("graphed-steps")
    elif words != ["full"] or "graphed-layers" not in config.options:
        config.options = [option for option in config.options if option != "graphed-layers"]
        settings.name("cuda-graph-scope")


def _experts(settings: Settings, config: ParsedConfig) -> None:
    """Read how tokens come to experts and how those compute."""
    kinds = {"alltoall": "alltoall", "flex": "flex"}
    kind = settings.choice("moe-token-dispatcher-type", kinds, "")
    settings.expect("moe-flex-dispatcher-backend", "deepep")
    if kind == "flex":
        settings.idle("moe-enable-deepep")
    if kind == "flex" or settings.flag("moe-enable-deepep"):
        config.options.append("deepep")
    if settings.number("num-experts"):
        if settings.flag("moe-grouped-gemm") is not True:
            config.assumed.append("products of experts are grouped, without --moe-grouped-gemm")
        if not kind and config.expert > 1 and "moe-token-dispatcher-type" not in settings:
            config.assumed.append("tokens go to experts by --moe-token-dispatcher-type alltoall")
    else:
        settings.expect("moe-grouped-gemm", True)
    settings.expect("moe-permute-fusion", True)  # as in the runs of which its figures are


def _optimizer(settings: Settings, config: ParsedConfig) -> None:
    kinds = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
    config.trains(optimizer=settings.choice("optimizer", kinds, "adamw"))
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
    """Read figures of the model, which must be those of the model that is planned."""
    latent = bool(settings.flag("multi-latent-attention"))
    names = {
        "hidden_size": "hidden-size",
        "heads": "num-attention-heads",
        "kv_heads": "num-query-groups",
        "ffn_size": "ffn-hidden-size",
        "vocab_size": "vocab-size",
        "experts": "num-experts",
        "per_token": "moe-router-topk",
        "expert_ffn_size": "moe-ffn-hidden-size",
        "shared_ffn_size": "moe-shared-expert-intermediate-size",
        "head_dim": "kv-channels",
        "q_rank": "q-lora-rank",
        "kv_rank": "kv-lora-rank",
        "rope_head_dim": "qk-pos-emb-head-dim",
        "nope_head_dim": "qk-head-dim",
        "value_head_dim": "v-head-dim",
    }
    figures: dict[str, Any] = {name: settings.number(key) for name, key in names.items()}
    if settings.flag("group-query-attention"):
        figures["kv_heads"] = figures["kv_heads"] or 1
    else:
        figures["kv_heads"] = None
    if latent:
        figures |= {"head_dim": None, "kv_heads": None}
    if figures["hidden_size"]:
        figures["experts"] = figures["experts"] or 0
    if not figures["experts"]:
        settings.idle("moe-router-topk", "moe-ffn-hidden-size")
        figures |= {"per_token": None, "expert_ffn_size": None}
    flags: tuple[tuple[str, str, bool], ...] = (
        ("swiglu", "gated_mlp", True),
        ("squared-relu", "gated_mlp", False),
        ("untie-embeddings-and-output-weights", "tied_embeddings", False),
        ("add-qkv-bias", "qkv_bias", True),
        ("disable-bias-linear", "mlp_bias", False),
        ("qk-layernorm", "qk_norm", True),
        ("multi-latent-attention", "is_latent", True),
    )
    for flag, name, value in flags:
        if settings.flag(flag):
            figures[name] = value
    norms = {"RMSNorm": "rms", "LayerNorm": "layer"}
    figures["norm"] = settings.choice("normalization", norms, "") or None
    positions = {"rope": "rotary", "yarn": "rotary", "learned_absolute": "learned", "none": "none"}
    figures["positions"] = settings.choice("position-embedding-type", positions, "") or None
    frequency = settings.word("moe-layer-freq")
    leading = re.fullmatch(
        r"\(?\[0\]\s*\*\s*(\d{1,4})\s*\+\s*\[1\]\s*\*\s*\d{1,4}\)?", frequency or ""
    )
    if leading:
        figures["dense_layers"] = int(leading[1])
    elif frequency is not None:
        settings.expect("moe-layer-freq", 1)
        figures["dense_layers"] = 0
    config.model |= {name: value for name, value in figures.items() if value is not None}


def _devices(settings: Settings, asked: dict[str, str]) -> int | None:
    """Return the number of started ranks, by torchrun's or Slurm's arguments."""
    each = settings.number("nproc-per-node") if _plain(settings, "nproc-per-node") else None
    nodes = settings.number("nnodes") if _plain(settings, "nnodes") else None
    return ranks_of(asked, nodes, each)


def ranks_of(asked: dict[str, str], nodes: int | None, each: int | None) -> int | None:
    """Return ranks of a number of nodes; a Slurm script may contain the rest."""
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
_MIXED = re.compile(
    r"(bf16|fp16)(_mixed|_with_(mx)?fp8(_(delayed|current|subchannel)_scaling)?_mixed)(_aggressive)?"
)
_RECIPES = (("mxfp8", "mxfp8"), ("current", "tensorwise"), ("subchannel", "blockwise"))
"""Scales by parts of the names of mixed precisions; other names mean delayed scales."""


def read_bridge(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the overrides."""
    data = resolve(limits.settings(text, "megatron-bridge"), surroundings)
    flags: dict[str, Any] = {}
    places: dict[str, str] = {}
    for section in _SECTIONS:
        values = data.get(section) or {}
        if not isinstance(values, dict):
            raise DocumentError(section, f"is {values!r:.40}; it is a section of settings")
        for key, value in values.items():
            if value is None:
                continue
            name = _OTHER_NAMES.get(key, key.replace("_", "-"))
            if flags.setdefault(name, value) != value:
                other = places[f"--{name}"]
                raise DocumentError(
                    f"{section}.{key}",
                    f"is {value!r:.40}, and {other} {flags[name]!r:.40}; give one",
                )
            places[f"--{name}"] = f"{section}.{key}"
    if flags.get("num-query-groups"):
        flags["group-query-attention"] = True
    mixed = data.get("mixed_precision")
    if mixed is not None and not isinstance(mixed, str):
        raise DocumentError("mixed_precision", f"is {mixed!r:.40}; it is the name of a recipe")
    if isinstance(mixed, str):
        plain = mixed.replace("-", "_")
        if not _MIXED.fullmatch(plain):
            raise DocumentError("mixed_precision", f"is {mixed:.40}; write bf16_mixed or another")
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
        *(_in_place(key, places) for key in config.unknown),
    ]
    config.without_effect = [_in_place(key, places) for key in config.without_effect]
    return config


def _in_place(word: str, places: Mapping[str, str]) -> str:
    """Return a word of arguments as the recipe has it."""
    key, sign, value = word.partition("=")
    return places.get(key, key) + sign + value
