"""torchtitan 0.3, as a Python module of its configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.framework import base_of
from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    mixed_recompute,
    of_fsdp,
    other_schedule,
    recompute_of,
    whole_experts,
)
from meshwright.planner.schedules import schedule_of

REGISTERED = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
"""Modules and functions of torchtitan.models that configure models of the catalogue."""
MODULES = frozenset({"llama3", "llama4", "deepseek_v3", "qwen3", "qwen3_vl", "gpt_oss", "flux"})
"""Modules of torchtitan.models, as its --module names them."""


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that it does not support."""
    plan = wanted.plan
    yield from whole_experts(wanted)
    yield from sharded_by_context(wanted)
    yield from other_schedule(wanted, "torchtitan")
    yield from of_fsdp(wanted)
    yield from other_narrow(wanted)
    narrow = plan.precision in EIGHT_BITS and own_operators(wanted)
    if narrow and plan.model.name not in REGISTERED:
        yield (
            f"{plan.precision} of a model that it does not configure: its converters are part of "
            "the model"
        )
    if narrow and plan.precision == "fp8" and plan.scales == "tensorwise":
        yield (
            "fp8 with one scale for each operand, which it has no longer: plan with --fix "
            "scales=rowwise, or write torchtitan@0.2"
        )
    if narrow and "auto-filter" in options_of(wanted):
        yield (
            "auto_filter_small_kn, which converts nothing there: it asks configurations whether "
            "they are modules; write torchtitan@0.2"
        )
    yield from other_selective(wanted)
    yield from mixed_recompute(wanted)


def sharded_by_context(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield states that context ranks would divide, where the plan divides none."""
    if wanted.plan.zero == 0 and wanted.plan.mesh.context > 1:
        yield "ZeRO-0 with context parallelism: its context ranks shard"


def other_narrow(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield products in 8 bits that neither release makes, or other frameworks do."""
    plan = wanted.plan
    uses_own_operators = own_operators(wanted) and plan.precision in ("fp8", "mxfp8")
    if plan.precision not in ("bf16", "fp32") and not uses_own_operators:
        yield f"precision {plan.precision}"
    elif uses_own_operators and plan.scales not in ("tensorwise", *RECIPES):
        yield f"{plan.scales} scales"
    elif (
        uses_own_operators
        and plan.scales == "rowwise_with_gw_hp"
        and "auto-filter" in options_of(wanted)
    ):
        yield "auto_filter_small_kn with rowwise_with_gw_hp: torchao has no limits of it"


def options_of(wanted: FrameworkPlan) -> list[str]:
    """Return the options of a plan's framework."""
    return wanted.plan.framework.split("+")[1:]


def own_operators(wanted: FrameworkPlan) -> bool:
    """Return True if a plan means torchtitan's own float8 and selective recompute."""
    return base_of(wanted.plan.framework) == "torchtitan"


def other_selective(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield selective recompute of another framework."""
    if "selective" in wanted.recomputes and not own_operators(wanted):
        yield "selective recompute, which are other operators there"


SAYS = frozenset({"tensor_overlap", "scales", "weight_gather_dtype"})
RECIPES = ("rowwise", "rowwise_with_gw_hp")
"""Scales that both releases name a recipe after, as torchao does."""
_POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def text(wanted: FrameworkPlan) -> str:
    """Return the module: what it changes of a model's configuration, and that of the model."""
    plan = wanted.plan
    module, name = REGISTERED.get(plan.model.name, (None, None))
    policy = recompute_of(wanted)
    imports = []
    if wanted.recipe:
        kinds = "OptimizersContainer, ParamGroupConfig"
        imports.append(f"from torchtitan.components.optimizer import {kinds}")
    converters = _converters(wanted)
    if converters:
        names = ", ".join(sorted(name for name, _ in converters))
        imports.append(f"from torchtitan.components.quantization import {names}")
    if policy != "none":
        kind = _POLICIES[policy].partition(".")[0]
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {kind}")
    if module is not None:
        registry = "config_registry, model_registry" if converters else _REGISTRY
        imports.append(f"from torchtitan.models.{module} import {registry}")
    lines = [
        f'"""How {plan.model.name} is trained by {plan.mesh.devices} ranks with torchtitan 0.3."""',
        "",
        *imports,
        "",
        "",
        "def planned(config):",
        '    """Return the configuration of a model as planned."""',
        *(f"    config.{line}" for line in _settings(wanted)),
        *(_groups(wanted) if wanted.recipe else ()),
        "    return config",
    ]
    if module is not None:
        lines += ["", "", f"def {name}():", f"    return planned(config_registry.{name}())"]
    return "\n".join(lines) + "\n"


_REGISTRY = "config_registry"


def _settings(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the assignments to fields of a Trainer.Config."""
    plan, mesh = wanted.plan, wanted.plan.mesh
    # The samples that a data-parallel rank takes at once: a forward's samples, or those of a whole
    # pipeline schedule, which cuts them into micro-batches.  The rest of a step is accumulated.
    pipelined = mesh.pipeline > 1
    forwards = plan.micro_batches if pipelined else 1
    yield f"training.local_batch_size = {plan.micro_batch * forwards}"
    yield f"training.global_batch_size = {plan.global_batch}"
    yield f"training.seq_len = {plan.seq_len}"
    working = "float32" if plan.precision == "fp32" else "bfloat16"
    yield f'training.mixed_precision_param = "{working}"'
    yield f"training.enable_cpu_offload = {plan.offload == 'parameters'}"
    # The plan's host time and memory are those of eager launches.
    yield "training.disable_cuda_graphs = True"
    yield f"parallelism.data_parallel_replicate_degree = {mesh.data_replicate}"
    yield f"parallelism.data_parallel_shard_degree = {mesh.data_shard}"
    yield f"parallelism.tensor_parallel_degree = {mesh.tensor}"
    yield f"parallelism.enable_sequence_parallel = {mesh.sequence_parallel}"
    yield f"parallelism.context_parallel_degree = {mesh.context}"
    yield f"parallelism.pipeline_parallel_degree = {mesh.pipeline}"
    yield f"parallelism.expert_parallel_degree = {mesh.expert}"
    again = "always" if plan.zero == 3 else "never"
    yield f'parallelism.fsdp_reshard_after_forward = "{again}"'
    if pipelined:
        name = schedule_of(plan.schedule).names["torchtitan"]
        yield f'parallelism.pipeline_parallel_schedule = "{name}"'
        yield f"parallelism.pipeline_parallel_microbatch_size = {plan.micro_batch}"
        yield f"parallelism.module_fqns_per_model_part = {parts_of(wanted, 'lm_head')!r}"
    components = compiled_parts(wanted)
    yield f"compile.enable = {bool(components)}"
    yield f"compile.components = {components or ['model']!r}"
    if plan.overlaps_tensors:
        yield "compile.enable_async_tensor_parallel = True"
    yield f"activation_checkpoint = {_POLICIES[recompute_of(wanted)]}"
    if plan.loss is None:  # from all logits, not in chunks of them
        yield 'loss = getattr(config.loss, "loss_fn", config.loss)'
    converters = _converters(wanted)
    if converters:
        calls = ", ".join(f"{name}.Config({settings})" for name, settings in converters)
        yield f"model_spec = model_registry(config.model_spec.flavor, converters=[{calls}])"
    if wanted.recipe:
        yield from _rates(wanted)


def compiled_parts(wanted: FrameworkPlan) -> list[str]:
    """Return the compiled parts, by torchtitan's words."""
    parts = ["model"] if wanted.plan.compile == "block" else []
    return [*parts, *(["loss"] if "compiled-loss" in options_of(wanted) else [])]


def _rates(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield clipping and learning rates."""
    t = wanted.plan.training
    # A bound of 0 would make every gradient 0.
    yield f"training.max_norm = {t.clip_norm or 'float(' + repr(str(math.inf)) + ')'}"
    if wanted.falls:
        yield f"training.steps = {t.rate_steps}"  # behind it the rate would go on falling
    yield f"lr_scheduler.warmup_steps = {t.warmup_steps}"
    yield f"lr_scheduler.total_steps = {t.rate_steps if wanted.falls else None}"
    ratio = t.decay_steps / t.rate_steps if t.rate_schedule == "wsd" else None
    yield f"lr_scheduler.decay_ratio = {ratio if wanted.falls else 0.0}"
    kind = "cosine" if t.rate_schedule == "cosine" else "linear"
    yield f'lr_scheduler.decay_type = "{kind}"'
    yield f"lr_scheduler.min_lr_factor = {t.floor!r}"


def _converters(wanted: FrameworkPlan) -> list[tuple[str, str]]:
    """Return the converters of products to 8 bits: in blocks, not in the head or the router.

    Linears of float8 are named by those that stay; of MXFP8 by those that are converted.
    """
    plan, a = wanted.plan, wanted.model.architecture
    if plan.precision not in EIGHT_BITS:
        return []
    compiled = f"model_compile_enabled={plan.compile == 'block'}"
    experts = a is not None and a.experts is not None
    if plan.precision == "fp8":
        left = ["lm_head", "router.gate"] if experts else ["lm_head"]
        converters = [
            (
                "Float8LinearConverter",
                f"recipe_name={plan.scales!r}, filter_fqns={left!r}, {compiled}",
            )
        ]
    else:
        taken = ["attention", "feed_forward", *(["shared_experts"] if experts else [])]
        converters = [("MXFP8LinearConverter", f"fqns={taken!r}, {compiled}")]
    if experts and "narrow-experts" in options_of(wanted):
        kind = "Float8" if plan.precision == "fp8" else "MXFP8"
        converters.append((f"{kind}GroupedExpertsConverter", compiled))
    return [(name, settings) for name, settings in converters]


def _groups(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the optimizer, which leaves norms and biases without weight decay."""
    t = wanted.plan.training
    same = f'"lr": {t.learning_rate!r}, "betas": ({t.beta1!r}, {t.beta2!r}), "eps": {t.epsilon!r}'
    yield f"    adam = {{{same}}}"
    yield "    config.optimizer = OptimizersContainer.Config("
    yield "        param_groups=["
    for pattern, decay in ((r"norm\w*\.weight$|bias$", 0.0), (".*", t.weight_decay)):
        yield "            ParamGroupConfig("
        yield f'                pattern=r"{pattern}",'
        yield '                optimizer_name="AdamW",'
        yield f'                optimizer_kwargs={{**adam, "weight_decay": {decay!r}}},'
        yield "            ),"
    yield "        ]"
    yield "    )"


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan = wanted.plan
    _, name = REGISTERED.get(plan.model.name, (None, None))
    if name is None:
        yield "planned(config) takes the configuration of your model, as those of torchtitan.models"
    elif not wanted.has_job:
        yield f"save it as plan.py and start torchtitan.train --module plan --config {name}"
    if wanted.falls and wanted.recipe:
        yield f"training ends at step {plan.training.rate_steps}, where its learning rate does"


def parts_of(wanted: FrameworkPlan, head: str) -> list[list[str]]:
    """Return the modules of each stage by the names of torchtitan's decoders."""
    kinds = {name: layer.kind for name, layer in wanted.model.chain}
    parts, block = [], 0
    for stage in wanted.plan.stages:
        names: list[str] = []
        for item in stage.layers:
            if kinds[item.layer] == "embedding":
                names.append("tok_embeddings")
            elif kinds[item.layer] == "head":
                names += ["norm", head]
            else:
                names.append(f"layers.{block}")
                block += 1
        parts.append(names)
    return parts
