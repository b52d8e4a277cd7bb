"""torchtitan's configuration: TOML, a Python module of its configurations, or a command's flags.

Of Python the assignments to `config.SECTION.KEY` are read, and the keywords of the classes of
sections (`ParallelismConfig(...)`), where they are plain values.
"""

from __future__ import annotations

import ast
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    unread_keys,
)
from meshwright.planner.schedules import SCHEDULES

_CLASSES = {
    "ParallelismConfig": "parallelism",
    "TrainingConfig": "training",
    "CompileConfig": "compile",
    "FullAC": "activation_checkpoint",
    "SelectiveAC": "activation_checkpoint",
    "LRSchedulersContainer": "lr_scheduler",
    "default_adamw": "optimizer",
    "Parallelism": "parallelism",
    "Training": "training",
}
_MODES = {"FullAC": "full", "SelectiveAC": "selective"}


def read(text: str) -> ParsedConfig:
    """Return what a TOML or a Python configuration says."""
    sections = limits.toml_or_module(text, "torchtitan")
    return of_sections(of_python(sections) if isinstance(sections, ast.Module) else sections)


def of_python(tree: ast.Module) -> dict[str, Any]:  # noqa: PLR0912 - a case for each form
    """Return sections of settings that a module assigns or passes."""
    sections: dict[str, Any] = {}
    names: dict[str, ast.expr] = {}

    def assign(section: str, key: str, node: ast.expr) -> None:
        try:
            value = limits.literal(node)
        except ValueError:
            value = _infinite(node)
            if value is None:
                sections.setdefault("computed", {})[f"{section}.{key}"] = limits.source(node)
                return
        sections.setdefault(section, {})[key] = value

    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Attribute(attr=section), attr=key)], value=value
            ):
                assign(section, key, value)
            case ast.Assign(targets=[ast.Attribute(attr="activation_checkpoint")], value=value):
                if isinstance(value, ast.Constant) and value.value is None:
                    sections["activation_checkpoint"] = {"mode": "none"}
            case ast.Call(func=function, keywords=keywords):
                chain = limits.dotted_names(function)
                classes = [part for part in chain if part in _CLASSES]
                if classes:
                    for keyword in keywords:
                        if keyword.arg:
                            assign(_CLASSES[classes[-1]], keyword.arg, keyword.value)
                    if classes[-1] in _MODES:
                        section = sections.setdefault("activation_checkpoint", {})
                        section["mode"] = _MODES[classes[-1]]
                elif chain[-1:] == ["ParamGroupConfig"]:
                    _group(keywords, names, sections)
                elif any(part in _CONVERTERS for part in chain):
                    _converter(next(p for p in chain if p in _CONVERTERS), keywords, sections)
                elif chain[:1] == ["config_registry"] and len(chain) == 2:
                    sections.setdefault("model", {})["registered"] = chain[1]
            case ast.FunctionDef(name=name) if name not in ("planned", "configured"):
                sections.setdefault("model", {}).setdefault("registered", name)
    return sections


_CONVERTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Float8LinearConverter": ("quantize.linear.float8", {"recipe_name": "rowwise"}),
    "Float8GroupedExpertsConverter": ("quantize.grouped_mm.float8", {}),
    "MXFP8LinearConverter": ("quantize.linear.mx", {"fqns": []}),
    "MXFP8GroupedExpertsConverter": ("quantize.grouped_mm.mx", {}),
}
"""Converters by their names since 0.3: those before, and what they are by default."""


def _converter(name: str, keywords: list[ast.keyword], sections: dict[str, Any]) -> None:
    """Put a converter and its settings where a configuration of before 0.3 has them."""
    section_name, usual = _CONVERTERS[name]
    sections.setdefault("model", {}).setdefault("converters", []).append(section_name)
    settings = dict(usual)
    for keyword in keywords:
        if keyword.arg not in (None, "model_compile_enabled"):
            try:
                settings[str(keyword.arg)] = limits.literal(keyword.value)
            except ValueError:
                settings[str(keyword.arg)] = limits.source(keyword.value)
    _, first, second = section_name.split(".")
    sections.setdefault("quantize", {}).setdefault(first, {})[second] = settings


def _infinite(node: ast.expr) -> float | None:
    """Return infinity where it is what `float("inf")` or `math.inf` say."""
    return float("inf") if limits.source(node) in ("float('inf')", "math.inf") else None


def _group(
    keywords: list[ast.keyword], names: dict[str, ast.expr], sections: dict[str, Any]
) -> None:
    """Put the settings of a group of parameters; those of all others count."""
    arguments = {keyword.arg: keyword.value for keyword in keywords}
    pattern = arguments.get("pattern")
    section = sections.setdefault("optimizer", {})
    if isinstance(pattern, ast.Constant) and pattern.value != ".*":
        return
    given = arguments.get("optimizer_kwargs")
    if isinstance(given, ast.Dict):
        for key, value in zip(given.keys, given.values, strict=True):
            inner = names.get(value.id) if key is None and isinstance(value, ast.Name) else None
            try:
                if isinstance(inner, ast.Dict):
                    section |= {str(name): value for name, value in limits.literal(inner).items()}
                elif isinstance(key, ast.Constant):
                    section[str(key.value)] = limits.literal(value)
            except ValueError:
                continue


def of_flags(flags: dict[str, str | bool | list[str]]) -> ParsedConfig:
    """Return what flags such as `--parallelism.tensor_parallel_degree 8` say."""
    sections: dict[str, Any] = {}
    others: list[str] = []
    for name, value in flags.items():
        section, dot, key = name.partition(".")
        if dot:
            sections.setdefault(section.replace("-", "_"), {})[key.replace("-", "_")] = value
        elif name in ("module", "config"):
            sections.setdefault("model", {})[{"config": "registered"}.get(name, name)] = value
        else:
            others.append(f"--{name}")
    config = of_sections(sections)
    config.unknown += others
    return config


def of_sections(sections: dict[str, Any]) -> ParsedConfig:
    """Return what sections of settings say."""
    settings = Settings(sections)
    config = ParsedConfig(framework="torchtitan")
    parts = {
        name: settings.part(name)
        for name in (
            "parallelism",
            "training",
            "optimizer",
            "lr_scheduler",
            "activation_checkpoint",
            "compile",
            "model",
            "memory_estimation",
            "quantize",
        )
    }
    _degrees(parts["parallelism"], config)
    _training(parts["training"], config)
    _rates(parts["optimizer"], parts["lr_scheduler"], config)
    mode = parts["activation_checkpoint"].word("mode")
    config.recompute = {"full": "full", "none": "none"}.get(str(mode), "selective")
    parts["activation_checkpoint"].pop("selective_ac_option")
    if parts["compile"].flag("enable", "model"):
        config.compile = "block"
    parts["compile"].pop("components")
    # Of its section `compile` since 0.3, and of `parallelism` before.
    async_ = [
        parts[name].flag("enable_async_tensor_parallel") for name in ("compile", "parallelism")
    ]
    if any(async_) and config.tensor > 1 and config.compile == "block":
        config.axes["tensor_overlap"] = "async"
    _model(parts["model"], config)
    _quantize(parts["model"], parts["quantize"], config)
    config.unknown = [
        *settings.unread,
        *(key for name, section in parts.items() for key in unread_keys(name, section)),
        *settings.loose,
    ]
    config.understood = settings.understood
    return config


def _degrees(axes: Settings, config: ParsedConfig) -> None:
    config.data_replicate = axes.degree("data_parallel_replicate_degree")
    shard = axes.number("data_parallel_shard_degree")
    config.data_shard = -1 if shard is None else shard
    config.tensor = axes.degree("tensor_parallel_degree")
    config.context = axes.degree("context_parallel_degree")
    config.pipeline = axes.degree("pipeline_parallel_degree")
    config.expert = axes.degree("expert_parallel_degree")
    divided = axes.flag("enable_sequence_parallel")
    config.sequence_parallel = divided is not False or config.tensor == 1
    each = axes.number("expert_tensor_parallel_degree")
    if config.expert > 1 and each:
        config.expert_tensor = each
    again = axes.word("fsdp_reshard_after_forward") or "default"
    default = "never" if config.pipeline > 1 else "always"
    config.zero = 3 if (default if again == "default" else again) == "always" else 2
    if config.pipeline == 1:
        for key in ("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"):
            axes.pop(key)
        return
    name = axes.word("pipeline_parallel_schedule") or "1F1B"
    names = [
        schedule.name
        for schedule in SCHEDULES.values()
        if schedule.names.get("torchtitan", "").lower() == name.lower()
    ]
    if not names:
        raise DocumentError(
            "parallelism.pipeline_parallel_schedule",
            f"'{name:.40}' is no schedule that is known; see `meshwright plan --help`",
        )
    config.schedule = names[0]
    config.micro_batch = axes.count("pipeline_parallel_microbatch_size") or 1
    axes.pop("pipeline_parallel_expert_parallel_overlap")
    parts = axes.pop("module_fqns_per_model_part")
    if isinstance(parts, list | tuple):
        if not parts or not all(isinstance(part, list | tuple) for part in parts):
            raise DocumentError(
                "parallelism.module_fqns_per_model_part",
                "is no list of the modules of each part; write a list of lists of names",
            )
        config.blocks = [sum(str(m).startswith("layers.") for m in part) for part in parts]
        config.virtual_stages = max(1, len(parts) // config.pipeline)
        return
    first = axes.number("pipeline_parallel_first_stage_less_layers")
    last = axes.number("pipeline_parallel_last_stage_less_layers")
    config.lighter = (1 if first is None else first, 1 if last is None else last)
    config.virtual_stages = SCHEDULES[config.schedule].stages_per_rank[0]
    each_stage = axes.count("pipeline_parallel_layers_per_stage")
    if each_stage:
        config.model["blocks_of_stage"] = each_stage


def _training(training: Settings, config: ParsedConfig) -> None:
    local = training.count("local_batch_size", "batch_size") or 8
    config.global_batch = training.number("global_batch_size")
    if config.global_batch is not None and config.global_batch < 0:
        config.global_batch = None
    if config.pipeline == 1:
        config.micro_batch = local
    config.micro_batches = None
    if config.global_batch is None:
        config.micro_batches = local // config.micro_batch if config.micro_batch else None
    config.seq_len = training.number("seq_len") or 2048
    working = training.word("mixed_precision_param") or "bfloat16"
    config.precision = {"bfloat16": "bf16", "float32": "fp32"}.get(str(working), "bf16")
    if training.flag("enable_cpu_offload"):
        config.offload = "parameters"
    training.pop("disable_cuda_graphs")
    bound = training.bound("max_norm")
    if bound is not None:
        config.trains(clip_norm=0.0 if bound == float("inf") else bound)
    steps = training.number("steps")
    if steps:
        config.model["steps"] = steps


def _rates(optimizer: Settings, rates: Settings, config: ParsedConfig) -> None:
    first, second = optimizer.pair("betas")
    name = optimizer.word("name")
    if name not in (None, "AdamW"):
        config.assumed.append(f"optimizer.name {name!r:.40}: AdamW instead")
    rate = optimizer.amount("lr")
    config.trains(
        learning_rate=rate,
        beta1=optimizer.amount("beta1") if first is None else first,
        beta2=optimizer.amount("beta2") if second is None else second,
        epsilon=optimizer.amount("eps"),
        weight_decay=optimizer.amount("weight_decay"),
        warmup_steps=rates.number("warmup_steps"),
    )
    total = rates.number("total_steps") or config.model.pop("steps", None)
    ratio, kind = rates.share("decay_ratio"), rates.word("decay_type") or "linear"
    least = rates.amount("min_lr_factor")
    if ratio == 0.0 or total is None:
        return
    if ratio is None:
        config.trains(rate_schedule="cosine" if kind == "cosine" else "linear", rate_steps=total)
    else:
        config.trains(rate_schedule="wsd", rate_steps=total, decay_steps=round(ratio * total))
        if kind != "linear":
            config.assumed.append(f"lr_scheduler.decay_type {kind!r:.40}: it falls linearly")
    if least:
        config.trains(floor=least)


def _model(model: Settings, config: ParsedConfig) -> None:
    registered = model.word("registered")
    name, flavor = model.word("name", "module"), model.word("flavor")
    if registered:
        config.model["registered"] = registered
    elif name and flavor:
        config.model["registered"] = f"{name}_{flavor}".lower()


_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _quantize(model: Settings, quantize: Settings, config: ParsedConfig) -> None:
    """Read converters and their settings: scales, how weights travel, what stays in 16 bits."""
    names = set(model.words("converters"))
    float8 = bool(names & {"quantize.linear.float8", "float8"})
    mx = "quantize.linear.mx" in names
    linear, grouped = quantize.part("linear"), quantize.part("grouped_mm")
    settings = {name: linear.part(name) for name in ("float8", "mx")}
    for name in ("float8", "mx"):
        experts = grouped.part(name)
        for key in ("fqns", "recipe_name", "pad_multiple"):
            experts.pop(key)
    if float8 or mx:
        config.precision = "fp8" if float8 else "mxfp8"
        if f"quantize.grouped_mm.{'float8' if float8 else 'mx'}" in names:
            config.options.append("narrow-experts")
    section = settings["float8" if float8 else "mx"]
    recipe = section.word("recipe_name")
    if float8:
        config.scales = "tensorwise" if recipe is None else recipe
        if config.scales not in _RECIPES:
            raise DocumentError(
                "quantize.linear.float8.recipe_name",
                f"is {recipe!r:.40}; {' or '.join(_RECIPES)}",
            )
        if section.flag("enable_fsdp_float8_all_gather") and config.zero == 3:
            config.axes["weight_gather_dtype"] = "fp8"
        section.pop("precompute_float8_dynamic_scale_for_fsdp")
        section.pop("force_recompute_fp8_weight_in_bwd")
    section.pop("mxfp8_dim1_cast_kernel_choice")
    left, taken = set(section.words("filter_fqns")) - {""}, section.pop("fqns")
    if "auto_filter_small_kn" in left:
        config.options.append("auto-filter")
    others = sorted(left - {"lm_head", "output", "router.gate", "auto_filter_small_kn"})
    if others:
        config.assumed.append(f"filter_fqns: {', '.join(others[:4])[:80]} are in 8 bits too")
    if taken == [] or (float8 and not left & {"lm_head", "output"}):
        config.assumed.append("the output layer, which is converted too, stays in 16 bits")
