"""Megatron-LM's arguments, of a shell script or one after the other."""

from __future__ import annotations

import re

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.megatron import RECIPES
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import shell
from meshwright.planner.framework_configs.readers.parsed_config import Settings, Told, scheduled
from meshwright.planner.schedules import PLAIN

_MOST_LAYOUT = 100_000
"""Characters of a layout whose groups are written out."""
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(text: str) -> Told:
    """Return what the arguments say."""
    words = shell.words(limits.sized(text, "megatron"))
    flags = shell.flags(words)
    for name, value in list(flags.items()):  # a script behind `torchrun --nproc_per_node 8 x.py`
        if isinstance(value, list) and any(word.endswith(".py") for word in value):
            flags[name] = value[0]
    return of_flags(flags, text)


def of_flags(flags: dict[str, str | bool | list[str]], text: str = "") -> Told:
    """Return what flags say."""
    told = Told(framework="megatron")
    told.assumed += [
        f"--{name} is left out: its value is not in the script" for name in _open(flags)
    ]
    known = Settings({name: value for name, value in flags.items() if name not in _open(flags)})
    _degrees(known, told)
    _batches(known, told)
    _recompute(known, told)
    _kernels(known, told)
    _optimizer(known, told)
    _figures(known, told)
    told.devices = _devices(known, shell.directives(text))
    told.unknown = [f"--{key}" for key in known.left]
    return told


def _open(flags: dict[str, str | bool | list[str]]) -> list[str]:
    """Return flags whose value is only known where the script runs, and that can be left out."""
    return [
        name
        for name, value in flags.items()
        if "$" in str(value) and not name.endswith(("-size", "-length", "-layers"))
    ]


def _degrees(known: Settings, told: Told) -> None:
    told.tensor = known.degree("tensor-model-parallel-size")
    told.pipeline = known.degree("pipeline-model-parallel-size")
    told.context = known.degree("context-parallel-size")
    told.expert = known.degree("expert-model-parallel-size")
    told.sequence_parallel = bool(known.flag("sequence-parallel")) or told.tensor == 1
    each = known.number("expert-tensor-parallel-size")
    if told.expert > 1:
        # By default tensor ranks divide each expert.
        told.expert_tensor = told.tensor if each is None else each
    told.ends = (
        known.number("decoder-first-pipeline-num-layers"),
        known.number("decoder-last-pipeline-num-layers"),
    )
    told.lighter = (
        int(bool(known.flag("account-for-embedding-in-pipeline-split"))),
        int(bool(known.flag("account-for-loss-in-pipeline-split"))),
    )
    layers = known.number("num-layers")
    per_stage = known.count("num-layers-per-virtual-pipeline-stage")
    virtual = known.count(
        "num-virtual-stages-per-pipeline-rank", "virtual-pipeline-model-parallel-size"
    )
    if per_stage:
        told.model["blocks_of_virtual_stage"] = per_stage
        told.virtual_stages = 2
    elif virtual:
        told.virtual_stages = virtual
    if layers is not None:
        told.model["layers"] = layers
    told.schedule = _schedule(told.virtual_stages)
    layout = known.take("pipeline-model-parallel-layout")
    if isinstance(layout, str):
        told.blocks, told.virtual_stages = _of_layout(layout, told.pipeline)
        told.schedule = _schedule(told.virtual_stages)
    for also in ("overlap-grad-reduce", "overlap-param-gather", "ckpt-format"):
        known.take(also)
    known.take("no-gradient-accumulation-fusion")
    strategy = known.word("data-parallel-sharding-strategy")
    if known.flag("use-distributed-optimizer"):
        told.zero = 1
    if known.flag("use-megatron-fsdp", "use-custom-fsdp"):
        if strategy not in (None, *_STRATEGIES):
            raise DocumentError(
                "--data-parallel-sharding-strategy",
                f"is '{strategy:.40}'; it is one of {', '.join(_STRATEGIES)}",
            )
        told.zero = _STRATEGIES[strategy or "no_shard"]
    if known.flag("use-torch-fsdp2"):
        told.zero = 3


def _schedule(virtual_stages: int) -> str:
    """Return what Megatron runs: Megatron Core, pipeline_parallel/schedules.py."""
    looped = scheduled("megatron", "forward_backward_pipelining_with_interleaving")
    return looped if virtual_stages > 1 and looped is not None else PLAIN


def _of_layout(text: str, pipeline: int) -> tuple[list[int], int]:
    """Return blocks of each stage of `Et*3|t*4|t*3L`, and stages of a rank."""
    budget = limits.ReadingLimit("--pipeline-model-parallel-layout", _MOST_LAYOUT)

    def repeated(group: re.Match[str]) -> str:
        budget.spend(len(group[1]) * int(group[2]))
        return group[1] * int(group[2])

    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", repeated, text)
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


def _batches(known: Settings, told: Told) -> None:
    told.micro_batch = known.count("micro-batch-size")
    told.global_batch = known.count("global-batch-size")
    told.seq_len = known.number("seq-length")
    told.precision = "fp32"
    for name in ("fp16", "bf16"):
        if known.flag(name):
            told.precision = name
    if known.take("fp8-format", "fp8"):
        told.precision = "fp8"
        told.scales = known.word("fp8-recipe") or "delayed"
        if told.scales == "mxfp8":
            told.precision, told.scales = "mxfp8", "tensorwise"
            known.take("reuse-grad-buf-for-mxfp8-param-ag")
        elif told.scales not in RECIPES:
            raise DocumentError("--fp8-recipe", f"is '{told.scales:.40}'; {' or '.join(RECIPES)}")
        if known.flag("fp8-dot-product-attention"):
            told.options.append("fp8-attention")
        if not known.flag("fp8-param-gather"):
            told.options.append("16-bit-gathers")


ATTENTION = frozenset({"core_attn"})
CHEAP = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Values of --recompute-modules that its plans have, each set as a whole."""


def _recompute(known: Settings, told: Told) -> None:
    kind = known.word("recompute-granularity")
    method, count = known.word("recompute-method"), known.number("recompute-num-layers")
    if known.flag("recompute-activations"):
        kind = "selective"
    if kind == "full":
        told.recompute = "full"
        if method == "block":
            told.recomputed = count
        elif method == "uniform" and (count or 1) > 1:
            told.assumed.append(
                f"--recompute-num-layers {count} with uniform: each block is recomputed alone"
            )
    elif kind == "selective":
        told.recompute = "selective"
        modules = set(known.words("recompute-modules")) or ATTENTION
        made = CHEAP if modules & CHEAP else ATTENTION
        if made is CHEAP:
            told.options.append("cheap-recompute")
        if modules != made:
            told.assumed.append(
                f"--recompute-modules {' '.join(sorted(modules)):.80}: what is recomputed is "
                f"{' '.join(sorted(made))}"
            )


def _kernels(known: Settings, told: Told) -> None:
    kind = known.word("moe-token-dispatcher-type")
    if kind == "flex" and known.take("moe-flex-dispatcher-backend") in (None, "deepep", True):
        told.options.append("deepep")
    if known.flag("moe-enable-deepep") and "deepep" not in told.options:
        told.options.append("deepep")
    for flag, option in (
        ("overlap-moe-expert-parallel-comm", "expert-overlap"),
        ("moe-shared-expert-overlap", "shared-expert-overlap"),
        ("tp-comm-overlap", "tp-overlap"),
    ):
        if known.flag(flag):
            told.options.append(option)
    exchanged = {"a2a": "ulysses", "all_gather": "gathered-context"}
    kind = known.word("cp-comm-type")
    if kind in exchanged:
        told.options.append(exchanged[kind])
    if known.flag("cpu-offloading", "optimizer-cpu-offload"):
        told.assumed.append("offload to the host, which its plans do not have, is left out")


def _optimizer(known: Settings, told: Told) -> None:
    optimizer = known.word("optimizer")
    if optimizer not in (None, "adam"):
        told.assumed.append(f"--optimizer {optimizer:.40}: AdamW instead")
    rate = known.amount("lr")
    told.trains(
        learning_rate=rate,
        beta1=known.amount("adam-beta1"),
        beta2=known.amount("adam-beta2"),
        epsilon=known.amount("adam-eps"),
        weight_decay=known.amount("weight-decay"),
        clip_norm=known.amount("clip-grad"),
        seed=known.number("seed"),
    )
    known.take("lr-warmup-init")
    steps, warmup = known.number("train-iters"), known.number("lr-warmup-iters")
    batch = told.global_batch
    samples, of_warmup = known.number("train-samples"), known.number("lr-warmup-samples")
    of_decay = known.number("lr-decay-samples")
    fraction = known.share("lr-warmup-fraction")
    end = known.number("lr-decay-iters")
    if batch:
        steps = steps or (samples // batch if samples else None)
        warmup = warmup if warmup is not None else of_warmup // batch if of_warmup else None
        end = end or (of_decay // batch if of_decay else None)
    end = end or steps
    if fraction is not None and end:
        warmup = round(fraction * end)
    told.trains(warmup_steps=warmup)
    style = known.word("lr-decay-style")
    fall, least = known.number("lr-wsd-decay-iters"), known.amount("min-lr")
    kind_of_fall = known.word("lr-wsd-decay-style")
    kind = {"cosine": "cosine", "linear": "linear", "WSD": "wsd"}.get(str(style))
    if kind is None:
        if style not in (None, "constant"):
            told.assumed.append(f"--lr-decay-style {style:.40}: the rate stays constant")
        return
    if end is None:
        told.assumed.append(f"--lr-decay-style {style}: no last step is said; it stays constant")
        return
    told.trains(rate_schedule=kind, rate_steps=end)
    if rate and least:
        told.trains(floor=least / rate)
    if kind == "wsd":
        told.trains(decay_steps=fall)
        if kind_of_fall not in (None, "linear"):
            told.assumed.append(f"--lr-wsd-decay-style {kind_of_fall:.40}: it falls linearly")


def _figures(known: Settings, told: Told) -> None:
    figures = {
        "hidden_size": known.number("hidden-size"),
        "heads": known.number("num-attention-heads"),
        "kv_heads": known.number("num-query-groups"),
        "ffn_size": known.number("ffn-hidden-size"),
        "vocab_size": known.number("vocab-size"),
        "experts": known.number("num-experts"),
        "per_token": known.number("moe-router-topk"),
        "expert_ffn_size": known.number("moe-ffn-hidden-size"),
    }
    if not known.flag("group-query-attention"):
        figures["kv_heads"] = None
    if figures["hidden_size"]:
        figures["experts"] = figures["experts"] or 0
    told.model |= {name: value for name, value in figures.items() if value is not None}


def _devices(known: Settings, asked: dict[str, str]) -> int | None:
    """Return how many ranks are started, as torchrun's or Slurm's arguments say."""
    each = known.number("nproc-per-node") if _plain(known, "nproc-per-node") else None
    nodes = known.number("nnodes") if _plain(known, "nnodes") else None
    for also in ("node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-backend"):
        known.take(also)
    return ranks_of(asked, nodes, each)


def ranks_of(asked: dict[str, str], nodes: int | None, each: int | None) -> int | None:
    """Return ranks of a number of nodes, of which a Slurm script may say the rest."""
    nodes = nodes or shell.counted(asked.get("nodes"))
    each = each or shell.counted(asked.get("gpus-per-node")) or shell.counted(asked.get("gres"))
    tasks = shell.counted(asked.get("ntasks-per-node"))
    if each is None and tasks and tasks > 1:
        each = tasks
    if each is not None:
        return each * (nodes or 1)
    return shell.counted(asked.get("gpus"))


def _plain(known: Settings, key: str) -> bool:
    return str(known.take(key) or "").isdecimal()
