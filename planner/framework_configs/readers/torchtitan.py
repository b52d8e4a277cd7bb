"""torchtitan's configuration: TOML, a Python module of its configurations, or a command's flags.

Of Python the assignments to `config.SECTION.KEY` are read, and the keywords of the classes of
sections (`ParallelismConfig(...)`), where they are plain values.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from meshwright.planner.documents.document import nearest
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import one_line
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    named_file,
)
from meshwright.planner.framework_configs.torchtitan import MODULES
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


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of a TOML or a Python configuration."""
    sections = limits.toml_or_module(text, "torchtitan")
    if isinstance(sections, ast.Module):
        chosen = None if surroundings is None else surroundings.values.get("config")
        sections = of_python(sections, chosen)
    return of_sections(sections)


def of_python(tree: ast.Module, chosen: str | None = None) -> dict[str, Any]:
    """Return sections of settings that a module assigns or passes, in their order.

    DocumentError where several functions make a configuration and none is `chosen`.
    """
    module = _Module()
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    plain = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    for statement in plain:
        module.read(statement)
    called = {name: _callees(node, functions) for name, node in functions.items()}
    roots = [name for name in functions if not any(name in names for names in called.values())]
    if chosen is not None and chosen not in functions:
        raise DocumentError("set", f"config={chosen:.40}: {nearest(chosen, list(functions))}")
    if chosen is None and len(roots) > 1:
        raise DocumentError(
            "torchtitan",
            f"has {len(roots)} configurations ({', '.join(roots[:3])[:80]} ...); add --set "
            "config=NAME",
        )
    for name in [chosen] if chosen is not None else roots:
        _follow(name, functions, called, module, set())
        if name not in ("planned", "configured"):
            module.sections.setdefault("model", {}).setdefault("registered", name)
    return module.sections


def _callees(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> list[str]:
    """Return the functions of a module that one of them calls."""
    names = [
        call.func.id
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    ]
    return [name for name in dict.fromkeys(names) if name in functions and name != node.name]


def _follow(
    name: str,
    functions: Mapping[str, ast.FunctionDef],
    called: Mapping[str, list[str]],
    module: _Module,
    seen: set[str],
) -> None:
    """Read a function behind those that it calls."""
    if name in seen:
        return
    seen.add(name)
    for inner in called[name]:
        _follow(inner, functions, called, module, seen)
    for statement in functions[name].body:
        module.read(statement)


class _Module:
    """Settings that the statements of a module make, one statement after the other."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self._names: dict[str, ast.expr] = {}

    def read(self, statement: ast.stmt) -> None:
        """Read a statement; what it makes of settings that are not known is kept by its name."""
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert):
            return
        if isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.With):
            self._unread(limits.source(statement).partition("\n")[0])
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.Delete):
            self._unread(limits.source(statement))
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
        if len(targets) > 1:
            self._unread(limits.source(statement))

    def _unread(self, text: str) -> None:
        self.sections.setdefault("computed", {})[one_line(text)[:60]] = True

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = value
            case ast.Attribute(value=ast.Name(), attr=section):
                self._assign_section(section, value)
            case ast.Attribute(value=ast.Attribute(value=ast.Name(), attr=section), attr=key):
                self._record(section, key, value)
            case _:
                self._unread(limits.source(target))

    def _assign_section(self, section: str, value: ast.expr) -> None:
        """Read a section that is assigned as a whole: its class is read where it is called."""
        if section == "activation_checkpoint":
            is_none = isinstance(value, ast.Constant) and value.value is None
            policy = "none" if is_none else _policy(value)
            self.sections.setdefault(section, {})["mode"] = policy
        elif section == "loss":
            self._loss(value)
        elif section in _SECTIONS and isinstance(value, ast.Call):
            chain = limits.dotted_names(value.func)
            if not any(part in _CLASSES or part in _GROUPS for part in chain):
                self.sections.setdefault(section, {})[limits.source(value.func)] = True
        elif section == "model_spec":
            return  # its converters and its flavor are read where they are called
        elif section not in _NOT_SETTINGS:
            self.sections[section] = limits.source(value)

    def _loss(self, value: ast.expr) -> None:
        text = limits.source(value)
        if "Chunked" in text and isinstance(value, ast.Call):
            return
        plain = "loss_fn" in text or text.startswith("CrossEntropyLoss")
        self.sections["loss"] = {"kind": "full" if plain else text}

    def _record(self, section: str, key: str, node: ast.expr) -> None:
        """Put a setting into its section, or among those that are computed."""
        try:
            value = limits.literal(node)
        except ValueError:
            value = _infinite(node)
            if value is None:
                self.sections.setdefault("computed", {})[f"{section}.{key}"] = limits.source(node)
                return
        inside = self.sections.setdefault(section, {})
        if isinstance(inside, dict):
            inside[key] = value

    def _chunked_loss(self, node: ast.Call) -> None:
        chunks = [word.value for word in node.keywords if word.arg == "num_chunks"]
        self.sections["loss"] = {"kind": "chunked", "num_chunks": _plain(chunks, 8)}
        for name in {word.arg for word in node.keywords} - {"num_chunks"}:
            self._unread(f"loss.{name}")

    def _call(self, node: ast.Call) -> None:
        chain = limits.dotted_names(node.func)
        classes = [part for part in chain if part in _CLASSES]
        if classes:
            self._section(classes[-1], node)
        elif "OptimizersContainer" in chain:
            for keyword in node.keywords:
                if keyword.arg != "param_groups":
                    self._unread(f"OptimizersContainer.{keyword.arg}")
        elif chain[-1:] == ["ParamGroupConfig"]:
            _group(node.keywords, self._names, self.sections)
        elif any(part in _CONVERTERS for part in chain):
            name = next(part for part in chain if part in _CONVERTERS)
            _converter(name, node.keywords, self.sections)
        elif any(part.startswith("Chunked") for part in chain):
            self._chunked_loss(node)
        elif chain[:1] == ["config_registry"] and len(chain) == 2:
            self.sections.setdefault("model", {})["registered"] = chain[1]
        elif chain[-1:] == ["model_registry"]:
            self._model(node)
        elif chain[-2:] == ["Trainer", "Config"]:
            for keyword in node.keywords:
                if keyword.arg:
                    self._assign_section(keyword.arg, keyword.value)

    def _section(self, name: str, node: ast.Call) -> None:
        """Read the arguments of a section's class."""
        for keyword in node.keywords:
            if keyword.arg:
                self._record(_CLASSES[name], keyword.arg, keyword.value)
            else:
                self._unread(limits.source(node))
        if name in _MODES:
            self.sections.setdefault("activation_checkpoint", {})["mode"] = _MODES[name]

    def _model(self, node: ast.Call) -> None:
        """Read the arguments of a model's registry: converters are calls of their own."""
        for keyword in node.keywords:
            if keyword.arg == "converters":
                for item in ast.walk(keyword.value):
                    if isinstance(item, ast.Call):
                        chain = limits.dotted_names(item.func)
                        if not any(part in _CONVERTERS for part in chain):
                            self._unread(limits.source(item.func))
            elif keyword.arg:
                self._record("model", keyword.arg, keyword.value)


def _policy(value: ast.expr) -> str:
    """Return the kind of a policy of recomputation, or its text."""
    chain = limits.dotted_names(value.func) if isinstance(value, ast.Call) else []
    return next((_MODES[part] for part in chain if part in _MODES), limits.source(value))


def _plain(nodes: list[ast.expr], usual: int) -> Any:
    """Return the value of a keyword, if it is there."""
    try:
        return limits.literal(nodes[0]) if nodes else usual
    except ValueError:
        return limits.source(nodes[0])


_SECTIONS = frozenset(_CLASSES.values())
_GROUPS = ("OptimizersContainer", "Config")
_NOT_SETTINGS = ("hf_assets_path", "dump_folder")


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
    """Return infinity for `float("inf")` or `math.inf`."""
    return float("inf") if limits.source(node) in ("float('inf')", "math.inf") else None


def _group(
    keywords: list[ast.keyword], names: dict[str, ast.expr], sections: dict[str, Any]
) -> None:
    """Put the settings of a group of parameters; those of all others count."""
    arguments = {keyword.arg: keyword.value for keyword in keywords}
    unread = sections.setdefault("computed", {})
    for name in set(arguments) - {"pattern", "optimizer_name", "optimizer_kwargs"}:
        unread[f"ParamGroupConfig.{name}"] = True
    kind = arguments.get("optimizer_name")
    if isinstance(kind, ast.Constant) and kind.value != "AdamW":
        unread[f"optimizer_name={kind.value!r:.40}"] = True
    pattern = arguments.get("pattern")
    if pattern is None:
        unread["ParamGroupConfig without pattern"] = True
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


def of_flags(
    flags: dict[str, str | bool | list[str]], surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return the settings of flags such as `--model.flavor 8B`, which override a file's."""
    sections: dict[str, Any] = {}
    others: list[str] = []
    file = flags.pop("job.config-file", flags.pop("job.config_file", None))
    if file is not None:
        name, text = named_file("--job.config_file", file, surroundings)
        parsed = limits.toml_or_module(text, name)
        sections = of_python(parsed) if isinstance(parsed, ast.Module) else parsed
    module = flags.get("module")
    own = None if module is None else _own_module(str(module), surroundings)
    if own is not None:
        del flags["module"]
        chosen = flags.pop("config", None)
        sections = of_python(own, None if chosen is None else str(chosen))
    elif module is not None and module not in MODULES:
        others.append(f"--module {module:.40}")
    for name, value in flags.items():
        section, dot, key = name.replace("-", "_").partition(".")
        if dot:
            inside = sections.setdefault(section, {})
            for part in key.split(".")[:-1]:
                inside = inside.setdefault(part, {})
            inside[key.rpartition(".")[2]] = value
        elif name in ("module", "config"):
            sections.setdefault("model", {})[{"config": "registered"}.get(name, name)] = value
        else:
            others.append(f"--{name}")
    config = of_sections(sections)
    config.unknown += others
    return config


def _own_module(name: str, surroundings: ScriptEnvironment | None) -> ast.Module | None:
    """Return a module of configurations beside the script; None if it is torchtitan's own."""
    place = name.replace(".", "/")
    for file in (f"{place}/config_registry.py", f"{place}.py"):
        text = None if surroundings is None else surroundings.text_of(file)
        if text is not None:
            parsed = limits.toml_or_module(text, file)
            return parsed if isinstance(parsed, ast.Module) else None
    return None


def of_sections(sections: dict[str, Any]) -> ParsedConfig:
    """Return the settings of sections."""
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
            "computed",
            "loss",
        )
    }
    _degrees(parts["parallelism"], config)
    _training(parts["training"], config)
    _rates(parts["optimizer"], parts["lr_scheduler"], config)
    _recompute(parts["activation_checkpoint"], config)
    _compile(parts["compile"], config)
    # In its section `compile` since 0.3, and in `parallelism` before.
    async_ = [
        parts[name].flag("enable_async_tensor_parallel") for name in ("compile", "parallelism")
    ]
    if any(async_) and config.tensor > 1 and config.compile == "block":
        config.axes["tensor_overlap"] = "async"
    _loss(parts["loss"], config)
    _model(parts["model"], config)
    _quantize(parts["model"], parts["quantize"], config)
    config.gather(settings)
    for name, section in parts.items():
        config.gather(section, "" if name == "computed" else name)
    config.understood = settings.understood
    return config


def _recompute(section: Settings, config: ParsedConfig) -> None:
    """Read which blocks are recomputed: all, none, every n-th, or a part of each operator's."""
    modes = {"full": "full", "none": "none", "selective": "selective"}
    config.recompute = section.choice("mode", modes, "selective")
    if config.recompute != "selective":
        section.idle("selective_ac_option")
        return
    option = section.word("selective_ac_option") or "op"
    if option.isdecimal() and 0 < int(option) < 10**4:
        config.recompute, config.recompute_every = "full", int(option)
    elif option != "op":
        section.name("selective_ac_option")


def _compile(section: Settings, config: ParsedConfig) -> None:
    """Read what is compiled: blocks, the loss, or both."""
    if not section.flag("enable", "model"):
        section.idle("components")
        return
    components = section.words("components") if "components" in section else ["model", "loss"]
    if "model" in components:
        config.compile = "block"
    if "loss" in components:
        config.options.append("compiled-loss")
    if set(components) - {"model", "loss"}:
        section.name("components")
    section.expect("backend", "inductor")


def _degrees(axes: Settings, config: ParsedConfig) -> None:
    config.data_replicate = axes.degree("data_parallel_replicate_degree")
    shard = axes.number("data_parallel_shard_degree")
    if shard is not None and shard != -1 and shard < 1:
        raise DocumentError(
            "data_parallel_shard_degree", f"is {shard:g}; it is -1 or a number of ranks"
        )
    config.data_shard = -1 if shard is None else shard
    config.tensor = axes.degree("tensor_parallel_degree")
    config.context = axes.degree("context_parallel_degree")
    config.pipeline = axes.degree("pipeline_parallel_degree")
    config.expert = axes.degree("expert_parallel_degree")
    divided = axes.flag("enable_sequence_parallel")
    if config.tensor == 1:
        axes.idle("enable_sequence_parallel")
    config.sequence_parallel = divided is not False or config.tensor == 1
    each = axes.number("expert_tensor_parallel_degree")
    if config.expert > 1 and each:
        config.expert_tensor = each
    words = {word: word for word in ("default", "always", "never")}
    again = axes.choice("fsdp_reshard_after_forward", words, "default")
    default = "never" if config.pipeline > 1 else "always"
    config.zero = 3 if (default if again == "default" else again) == "always" else 2
    if config.pipeline == 1:
        axes.idle(*_OF_PIPELINES)
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
    axes.expect("pipeline_parallel_expert_parallel_overlap", config.expert > 1)
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


_OF_PIPELINES = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_expert_parallel_overlap",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
    "module_fqns_per_model_part",
)
"""Keys without effect where there is no pipeline."""


def _training(training: Settings, config: ParsedConfig) -> None:
    tokens = training.count("num_tokens_per_microbatch_per_dp_rank")
    length = training.count("max_context_length")
    local = training.count("local_batch_size", "batch_size") or 8
    if tokens and length:
        local = max(1, tokens // length)
    elif tokens:
        training.name("num_tokens_per_microbatch_per_dp_rank")
    config.global_batch = training.number("global_batch_size")
    if config.global_batch is not None and config.global_batch < 0:
        config.global_batch = None
    if config.pipeline == 1:
        config.micro_batch = local
    else:
        config.samples_of_schedule = local
    config.micro_batches = None
    if config.global_batch is None:
        config.micro_batches = local // config.micro_batch if config.micro_batch else None
    config.seq_len = training.number("seq_len", "max_context_length") or 2048
    dtypes = {"bfloat16": "bf16", "float32": "fp32"}
    config.precision = training.choice("mixed_precision_param", dtypes, "bf16")
    training.expect("mixed_precision_reduce", "float32")
    training.expect("dtype", "float32")
    training.expect("disable_cuda_graphs", True)
    if training.flag("enable_cpu_offload"):
        config.offload = "parameters"
    bound = training.bound("max_norm")
    if bound is not None:
        config.trains(clip_norm=0.0 if bound == float("inf") else bound)
    steps = training.number("steps")
    if steps:
        config.model["steps"] = steps


def _loss(loss: Settings, config: ParsedConfig) -> None:
    """Read how the loss is computed: from all logits, or from a part of a sample's at a time."""
    kind = loss.choice("kind", {"full": "full", "chunked": "chunked"}, "full")
    if kind == "chunked":
        config.loss_chunks = loss.count("num_chunks")


def _rates(optimizer: Settings, rates: Settings, config: ParsedConfig) -> None:
    first, second = optimizer.pair("betas")
    optimizer.expect("name", "AdamW")
    optimizer.expect("implementation", "fused")
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


_CONVERTER_NAMES = tuple(name for name, _ in _CONVERTERS.values())
_MX_RECIPES = ("mxfp8", "mxfp8_cublas", "mxfp8_emulated")
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
        if f"quantize.grouped_mm.{name}" not in names:
            experts.idle("fqns", "recipe_name", "pad_multiple")
        config.gather(experts, f"quantize.grouped_mm.{name}")
    read = {"float8", *_CONVERTER_NAMES}
    config.unknown += [f"model.converters={name}" for name in sorted(names - read)]
    chosen = "float8" if float8 else "mx" if mx else None
    for name, section in settings.items():
        if name != chosen:
            if not names - read:  # else it may be a converter's that is not known
                section.idle(*section.unread)
            config.gather(section, f"quantize.linear.{name}")
    if chosen is not None:
        config.precision = "fp8" if float8 else "mxfp8"
        if f"quantize.grouped_mm.{chosen}" in names:
            config.options.append("narrow-experts")
        _converted(chosen, settings[chosen], config)


def _converted(chosen: str, section: Settings, config: ParsedConfig) -> None:
    """Read the settings of the converter of products that runs."""
    recipe = section.word("recipe_name")
    if chosen == "float8":
        config.scales = "tensorwise" if recipe is None else recipe
        if config.scales not in _RECIPES:
            raise DocumentError(
                "quantize.linear.float8.recipe_name",
                f"is {recipe!r:.40}; {' or '.join(_RECIPES)}",
            )
        if section.flag("enable_fsdp_float8_all_gather") and config.zero == 3:
            config.axes["weight_gather_dtype"] = "fp8"
        section.expect("precompute_float8_dynamic_scale_for_fsdp", True, False)
        section.expect("force_recompute_fp8_weight_in_bwd", False)
    else:
        section.expect("recipe_name", *_MX_RECIPES)
    left, taken = set(section.words("filter_fqns")) - {""}, section.pop("fqns")
    if "auto_filter_small_kn" in left:
        config.options.append("auto-filter")
    if left - {"lm_head", "output", "router.gate", "auto_filter_small_kn"}:
        section.name("filter_fqns")
    if taken and taken != ["layers"]:
        section.name("fqns")
    config.gather(section, f"quantize.linear.{chosen}")
    if taken == [] or (chosen == "float8" and not left & {"lm_head", "output"}):
        config.assumed.append("the output layer, which is converted too, stays in 16 bits")
