"""A plan of ours as the configuration of another framework, or why that cannot run it.

What is written asks for the plan's parallel degrees, batches, schedule, recomputation, sharding,
precision, optimizer and learning rates; model, data and number of steps are the other's own.  A
plan that uses what a framework has no words for is refused, and what a framework sets in its
training script is named: nothing is left out silently.  Written for Megatron-LM of 2026, torchtitan
0.2, DeepSpeed 0.19 and accelerate 1.15.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.cluster import ClusterSpec
from planner.document import nearest
from planner.errors import DocumentError
from planner.model import ModelGraph
from planner.plan import INSIDE_OUT, Plan
from planner.schedules import schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A plan beside its model, in the words that frameworks share."""

    plan: Plan
    model: ModelGraph
    cluster: ClusterSpec | None

    @property
    def recomputes(self) -> Counter[str]:
        """How many blocks have each recompute choice; the ends count as nothing."""
        kinds = {name: layer.kind for name, layer in self.model.chain}
        return Counter(
            item.recompute
            for stage in self.plan.stages
            for item in stage.layers
            if kinds[item.layer] not in ("embedding", "head")
        )

    @property
    def blocks(self) -> list[int]:
        """How many blocks each stage has."""
        kinds = {name: layer.kind for name, layer in self.model.chain}
        return [
            sum(kinds[item.layer] not in ("embedding", "head") for item in stage.layers)
            for stage in self.plan.stages
        ]

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.plan.mesh.data_replicate * self.plan.mesh.data_shard

    @property
    def ranks_of_nodes(self) -> list[int]:
        """How many ranks each node has that has any; ranks fill node after node."""
        assert self.cluster is not None, "frameworks of NEED_NODES are given a cluster"
        left, counts = self.plan.mesh.devices, []
        for group in self.cluster.groups:
            for _ in range(group.nodes):
                counts.append(min(left, group.devices_per_node))
                left -= counts[-1]
        return [count for count in counts if count]

    @property
    def changes_rate(self) -> bool:
        """The learning rate is not one number."""
        return bool(self.plan.training.warmup_steps) or self.falls

    @property
    def falls(self) -> bool:
        """The learning rate falls behind its warm-up."""
        return self.plan.training.rate_schedule != "constant"


def configuration(
    plan: Plan, model: ModelGraph, to: str, cluster: ClusterSpec | None = None
) -> str:
    """Return the text of a framework's configuration; DocumentError names what it cannot do.

    Frameworks of NEED_NODES are told of the cluster's nodes too.
    """
    if to not in FRAMEWORKS:
        raise DocumentError("to", f"is '{to:.40}'; {nearest(to, list(FRAMEWORKS))}")
    wanted = _Wanted(plan=plan, model=model, cluster=cluster)
    obstacles, write = FRAMEWORKS[to]
    found = [*_for_all(wanted), *obstacles(wanted)]
    if found:
        raise DocumentError("to", f"{to} cannot run this plan: {'; '.join(found)}")
    return write(wanted)


def in_the_script(
    plan: Plan, model: ModelGraph, to: str, cluster: ClusterSpec | None = None
) -> list[str]:
    """Return what of a plan is set elsewhere: in the training script, or where it is started."""
    wanted = _Wanted(plan=plan, model=model, cluster=cluster)
    return list(_OUTSIDE[to](wanted))


def _rate_text(wanted: _Wanted) -> str:
    """Return the learning rates of a run in words."""
    t = wanted.plan.training
    parts = [f"the learning rate: {t.learning_rate:g}"]
    if t.warmup_steps:
        parts.append(f"warmed up over {t.warmup_steps} steps")
    if wanted.falls:
        steps = f" over its last {t.decay_steps} steps" if t.rate_schedule == "wsd" else ""
        parts.append(
            f"then {t.rate_schedule}{steps} down to {t.floor * t.learning_rate:g} at step "
            f"{t.rate_steps}"
        )
    return ", ".join(parts)


def _decay_text(wanted: _Wanted) -> Iterator[str]:
    """Yield which parameters the plan's weight decay leaves out."""
    if wanted.plan.training.weight_decay:
        yield "parameter groups: no weight decay on norms and biases"


def _for_all(wanted: _Wanted) -> Iterator[str]:
    """Yield what no framework here has words for."""
    plan = wanted.plan
    treated = {item.activations for stage in plan.stages for item in stage.layers}
    if plan.groups is not None or plan.shares is not None:
        yield "its devices differ"
    if plan.gradient_wire != "full":
        yield f"gradients travel as {plan.gradient_wire}"
    if treated - {"keep"}:
        yield f"activations are kept by {', '.join(sorted(treated - {'keep'}))}"
    if schedule_of(plan.schedule).stale:
        yield "its gradients are one step old"
    if plan.mesh.order != INSIDE_OUT:
        yield f"its axes lie in another order ({plan.layout.text()})"
    if plan.training.lora is not None:
        yield "adapters are trained, which is set in the training script"


def _degrees(wanted: _Wanted, **most: int) -> Iterator[str]:
    """Yield degrees above what a framework has."""
    mesh = wanted.plan.mesh
    for name, limit in most.items():
        degree = getattr(mesh, name)
        if degree > limit:
            yield f"{name} degree {degree}"


def _schedule(wanted: _Wanted, framework: str) -> Iterator[str]:
    """Yield a schedule that a framework does not have."""
    plan = wanted.plan
    if plan.mesh.pipeline > 1 and framework not in schedule_of(plan.schedule).names:
        yield f"schedule {plan.schedule}"


def _mixed(wanted: _Wanted) -> Iterator[str]:
    """Yield if blocks are recomputed differently."""
    choices = wanted.recomputes
    if len(choices) > 1:
        told = ", ".join(f"{count} {name}" for name, count in choices.most_common())
        yield f"recompute differs between blocks ({told}); plan with --fix recompute=..."


def _of_one_kind(wanted: _Wanted) -> Iterator[str]:
    """Yield what a configuration that treats all blocks alike, in whole, has no words for."""
    if wanted.plan.precision not in ("bf16", "fp16", "fp32"):
        yield f"precision {wanted.plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute, which its configuration has no word for"
    yield from _mixed(wanted)


def _of_fsdp(wanted: _Wanted) -> Iterator[str]:
    """Yield what FSDP does not do: it shards gradients with states, and offloads all or nothing."""
    if wanted.plan.offload == "optimizer":
        yield "the optimizer alone on the host"
    if wanted.plan.zero == 1:
        yield "ZeRO-1: its sharding has gradients too"


def _recompute(wanted: _Wanted) -> str:
    return next(iter(wanted.recomputes), "none")


# --- Megatron-LM ----------------------------------------------------------------------------------


def _megatron_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan, blocks = wanted.plan, wanted.blocks
    yield from _schedule(wanted, "megatron")
    if plan.offload != "none":
        yield f"{plan.offload} on the host"
    if plan.zero in (2, 3) and plan.mesh.pipeline > 1:
        yield f"ZeRO-{plan.zero} with a pipeline"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    if len(set(blocks[1:-1])) > 1 or (plan.virtual_stages > 1 and len(set(blocks)) > 1):
        yield f"stages of {', '.join(map(str, blocks))} blocks"
    choices = wanted.recomputes
    if len(choices) > 1 and (set(choices) != {"none", "full"} or _full_each(wanted) is None):
        yield from _mixed(wanted)


def _full_each(wanted: _Wanted) -> int | None:
    """Return how many blocks of every stage are recomputed whole, None if stages differ."""
    counts = {
        sum(item.recompute == "full" for item in stage.layers) for stage in wanted.plan.stages
    }
    return counts.pop() if len(counts) == 1 else None


def _megatron(wanted: _Wanted) -> str:
    plan = wanted.plan
    lines = [
        *_megatron_mesh(wanted),
        *_megatron_sharding(wanted),
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.global_batch}",
        f"--seq-length {plan.seq_len}",
        *_megatron_recompute(wanted),
    ]
    if plan.precision == "fp8":
        lines += ["--bf16", "--fp8-format hybrid"]
    elif plan.precision in ("bf16", "fp16"):
        lines.append(f"--{plan.precision}")
    return "\n".join([*lines, *_megatron_training(wanted)]) + "\n"


def _megatron_mesh(wanted: _Wanted) -> Iterator[str]:
    plan, mesh, blocks = wanted.plan, wanted.plan.mesh, wanted.blocks
    yield f"--tensor-model-parallel-size {mesh.tensor}"
    yield f"--pipeline-model-parallel-size {mesh.pipeline}"
    if plan.virtual_stages > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {blocks[0]}"
    elif mesh.pipeline > 1 and len(set(blocks)) > 1:
        yield f"--decoder-first-pipeline-num-layers {blocks[0]}"
        yield f"--decoder-last-pipeline-num-layers {blocks[-1]}"
    if mesh.context > 1:
        yield f"--context-parallel-size {mesh.context}"
    if mesh.expert > 1:
        yield f"--expert-model-parallel-size {mesh.expert}"
        if mesh.tensor > 1:
            # By default tensor ranks divide each expert; a plan's expert ranks hold whole ones.
            yield "--expert-tensor-parallel-size 1"
    if mesh.tensor > 1:
        yield "--sequence-parallel"


def _megatron_sharding(wanted: _Wanted) -> Iterator[str]:
    """Yield how states are divided; messages between copies overlap, as the plan assumes."""
    zero = wanted.plan.zero
    if wanted.data * wanted.plan.mesh.context > 1:
        yield "--overlap-grad-reduce"
        if zero:
            yield "--overlap-param-gather"
    if zero:
        yield "--use-distributed-optimizer"
    if zero in (2, 3):
        sharded = "optim_grads" if zero == 2 else "optim_grads_params"
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {sharded}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"


def _megatron_recompute(wanted: _Wanted) -> Iterator[str]:
    if len(wanted.recomputes) > 1:
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {_full_each(wanted)}"
    elif _recompute(wanted) == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif _recompute(wanted) == "selective":
        yield "--recompute-granularity selective"


def _megatron_training(wanted: _Wanted) -> Iterator[str]:
    """Yield optimizer and learning rates; weight decay leaves out vectors there too."""
    t = wanted.plan.training
    yield "--optimizer adam"
    yield f"--lr {t.learning_rate!r}"
    yield f"--adam-beta1 {t.beta1!r}"
    yield f"--adam-beta2 {t.beta2!r}"
    yield f"--adam-eps {t.epsilon!r}"
    yield f"--weight-decay {t.weight_decay!r}"
    yield f"--clip-grad {t.clip_norm!r}"
    if t.warmup_steps:
        # Its first step has the initial rate, the plan's the first part of the way up.
        yield f"--lr-warmup-init {t.learning_rate / t.warmup_steps!r}"
        yield f"--lr-warmup-iters {t.warmup_steps}"
    style = {"wsd": "WSD"}.get(t.rate_schedule, t.rate_schedule)
    yield f"--lr-decay-style {style}"
    if wanted.falls:
        yield f"--lr-decay-iters {t.rate_steps}"
        yield f"--min-lr {t.floor * t.learning_rate!r}"
    if t.rate_schedule == "wsd":
        yield "--lr-wsd-decay-style linear"
        yield f"--lr-wsd-decay-iters {t.decay_steps}"


def _outside_megatron(wanted: _Wanted) -> Iterator[str]:
    mesh, steps = wanted.plan.mesh, wanted.plan.training.warmup_steps
    if mesh.tensor * mesh.context > 1 and wanted.plan.zero < 2:
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, before Blackwell"
    if steps > 1:
        yield f"rates of the first {steps} steps lie below the plan's, by less than 1/{steps}"


# --- torchtitan -----------------------------------------------------------------------------------


def _titan_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    yield from _schedule(wanted, "torchtitan")
    yield from _of_fsdp(wanted)
    others = plan.mesh.tensor * plan.mesh.pipeline
    if others > 1 and plan.mesh.data_shard * plan.mesh.context == 1:
        if plan.mesh.data_replicate > 1:
            yield "replicas (ZeRO-0) with tensor or pipeline parallelism"
        if plan.precision == "bf16":
            yield "bf16 with tensor or pipeline parallelism and no sharding: it would train in fp32"
    if plan.precision not in ("bf16", "fp32"):
        yield f"precision {plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute, which are other operators there"
    yield from _mixed(wanted)


def _titan(wanted: _Wanted) -> str:
    plan, mesh = wanted.plan, wanted.plan.mesh
    replicas, shards = mesh.data_replicate, mesh.data_shard
    # What a data-parallel rank takes at once: a forward's samples, or those of a whole pipeline
    # schedule, which cuts them into micro-batches.  The rest of a step is accumulated.
    at_once = plan.micro_batch * (plan.micro_batches if mesh.pipeline > 1 else 1)
    lines = [
        "[training]",
        f"local_batch_size = {at_once}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {plan.seq_len}",
        f'mixed_precision_param = "{"bfloat16" if plan.precision == "bf16" else "float32"}"',
        f"enable_cpu_offload = {str(plan.offload == 'parameters').lower()}",
        *_titan_training(wanted),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicas}",
        f"data_parallel_shard_degree = {shards}",
        f"tensor_parallel_degree = {mesh.tensor}",
        f"context_parallel_degree = {mesh.context}",
        f"pipeline_parallel_degree = {mesh.pipeline}",
    ]
    if mesh.expert > 1:
        lines.append(f"expert_parallel_degree = {mesh.expert}")
    if shards > 1:
        lines.append(f'fsdp_reshard_after_forward = "{"always" if plan.zero == 3 else "never"}"')
    if mesh.pipeline > 1:
        schedule = schedule_of(plan.schedule)
        lines.append(f'pipeline_parallel_schedule = "{schedule.names["torchtitan"]}"')
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro_batch}")
        lines.append(f"module_fqns_per_model_part = {json.dumps(_titan_parts(wanted))}")
        lines += schedule.settings.get("torchtitan", ())
    lines += ["", "[activation_checkpoint]", f'mode = "{_recompute(wanted)}"']
    return "\n".join(lines) + "\n"


def _titan_training(wanted: _Wanted) -> Iterator[str]:
    """Yield the end of `training`, optimizer and learning rates."""
    t = wanted.plan.training
    # A bound of 0 would make every gradient 0.
    yield f"max_norm = {t.clip_norm or math.inf}"
    if wanted.falls:
        yield f"steps = {t.rate_steps}"  # behind it the rate would go on falling
    yield from ("", "[optimizer]", 'name = "AdamW"')
    yield f"lr = {t.learning_rate!r}"
    yield f"beta1 = {t.beta1!r}"
    yield f"beta2 = {t.beta2!r}"
    yield f"eps = {t.epsilon!r}"
    yield f"weight_decay = {t.weight_decay!r}"
    yield from ("", "[lr_scheduler]", f"warmup_steps = {t.warmup_steps}")
    if not wanted.falls:
        yield "decay_ratio = 0.0"
        return
    yield f"total_steps = {t.rate_steps}"
    if t.rate_schedule == "wsd":
        yield f"decay_ratio = {t.decay_steps / t.rate_steps!r}"
    yield f'decay_type = "{"cosine" if t.rate_schedule == "cosine" else "linear"}"'
    yield f"min_lr_factor = {t.floor!r}"


def _outside_titan(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    pipelined = plan.micro_batches if plan.mesh.pipeline > 1 else 1
    yield (
        "torchtitan above 0.2 reads no TOML: in its Python configuration "
        f"num_tokens_per_microbatch_per_dp_rank={plan.micro_batch * plan.seq_len}, "
        f"num_pp_microbatches={pipelined}, "
        f"num_tokens_per_train_step={plan.global_batch * plan.seq_len}"
    )
    if plan.training.weight_decay:
        yield "weight decay acts on norms too, which the plan leaves out"
    if wanted.falls:
        yield f"training ends at step {plan.training.rate_steps}, where its learning rate does"


def _titan_parts(wanted: _Wanted) -> list[list[str]]:
    """Return the modules of each stage by the names of torchtitan's decoders."""
    kinds = {name: layer.kind for name, layer in wanted.model.chain}
    parts, block = [], 0
    for stage in wanted.plan.stages:
        names: list[str] = []
        for item in stage.layers:
            if kinds[item.layer] == "embedding":
                names.append("tok_embeddings")
            elif kinds[item.layer] == "head":
                names += ["norm", "output"]
            else:
                names.append(f"layers.{block}")
                block += 1
        parts.append(names)
    return parts


# --- DeepSpeed ------------------------------------------------------------------------------------


def _deepspeed_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    yield from _degrees(wanted, tensor=1, pipeline=1, context=1, expert=1)
    if plan.offload == "parameters" and plan.zero != 3:
        yield f"parameters on the host with ZeRO-{plan.zero}"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    yield from _of_one_kind(wanted)


def _deepspeed(wanted: _Wanted) -> str:
    plan, t = wanted.plan, wanted.plan.training
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True}
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    text = json.dumps(
        {
            "train_batch_size": plan.global_batch,
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.micro_batches,
            "gradient_clipping": t.clip_norm,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": t.learning_rate,
                    "betas": [t.beta1, t.beta2],
                    "eps": t.epsilon,
                    "weight_decay": t.weight_decay,
                },
            },
            "bf16": {"enabled": plan.precision == "bf16"},
            "fp16": {"enabled": plan.precision == "fp16"},
            "zero_optimization": zero,
        },
        indent=2,
    )
    return text + "\n"


def _outside_deepspeed(wanted: _Wanted) -> Iterator[str]:
    if _recompute(wanted) == "full":
        yield "every block is recomputed: model.gradient_checkpointing_enable()"
    if wanted.changes_rate:
        # Its own schedulers begin two steps later, and none has a floor with each fall.
        yield f"{_rate_text(wanted)}; as lr_scheduler of deepspeed.initialize"
    yield from _decay_text(wanted)


# --- Accelerate -----------------------------------------------------------------------------------


def _accelerate_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    yield from _degrees(wanted, pipeline=1, expert=1)
    yield from _of_fsdp(wanted)
    if plan.zero == 0 and plan.mesh.tensor * plan.mesh.context > 1:
        yield "replicas with tensor or context parallelism"
    counts = wanted.ranks_of_nodes
    if len(set(counts)) > 1:
        yield (
            f"{plan.mesh.devices} ranks on nodes of {counts[0]}; it starts as many ranks on each"
        )
    yield from _of_one_kind(wanted)


def _accelerate(wanted: _Wanted) -> str:
    plan, mesh = wanted.plan, wanted.plan.mesh
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}",
        "mixed_precision: " + ('"no"' if plan.precision == "fp32" else plan.precision),
        f"num_machines: {len(wanted.ranks_of_nodes)}",
        f"num_processes: {mesh.devices}",
    ]
    if not plan.zero:
        return "\n".join(lines) + "\n"
    recomputed = str(_recompute(wanted) == "full").lower()
    lines += [
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(plan.zero == 3).lower()}",
        f"  fsdp_offload_params: {str(plan.offload == 'parameters').lower()}",
        f"  fsdp_activation_checkpointing: {recomputed}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {mesh.data_replicate}",
        f"  parallelism_config_dp_shard_size: {mesh.data_shard}",
        f"  parallelism_config_tp_size: {mesh.tensor}",
        f"  parallelism_config_cp_size: {mesh.context}",
    ]
    return "\n".join(lines) + "\n"


def _outside_accelerate(wanted: _Wanted) -> Iterator[str]:
    plan, t = wanted.plan, wanted.plan.training
    if len(wanted.ranks_of_nodes) > 1:
        yield "each node is started with --machine_rank, --main_process_ip and --main_process_port"
    yield (f"micro-batches of {plan.micro_batch}, gradient_accumulation_steps={plan.micro_batches}")
    yield (
        f"AdamW(lr={t.learning_rate:g}, betas=({t.beta1:g}, {t.beta2:g}), eps={t.epsilon:g}, "
        f"weight_decay={t.weight_decay:g})"
    )
    if t.clip_norm:
        yield f"accelerator.clip_grad_norm_(model.parameters(), {t.clip_norm:g})"
    if wanted.changes_rate:
        yield _rate_text(wanted)
    yield from _decay_text(wanted)


FRAMEWORKS: dict[str, tuple[Callable[[_Wanted], Iterator[str]], Callable[[_Wanted], str]]] = {
    "megatron": (_megatron_obstacles, _megatron),
    "torchtitan": (_titan_obstacles, _titan),
    "deepspeed": (_deepspeed_obstacles, _deepspeed),
    "accelerate": (_accelerate_obstacles, _accelerate),
}
"""What stands against a plan, and how it is written."""

NEED_NODES = ("accelerate",)
"""Frameworks whose configuration counts nodes."""

_OUTSIDE: dict[str, Callable[[_Wanted], Iterator[str]]] = {
    "megatron": _outside_megatron,
    "torchtitan": _outside_titan,
    "deepspeed": _outside_deepspeed,
    "accelerate": _outside_accelerate,
}
