"""A plan of ours as the configuration of another framework, or why that cannot run it.

What is written asks for the plan's parallel degrees, batches, schedule, recomputation, sharding and
precision; model, data and learning rates are the other's own.  A plan that uses what a framework
has no words for is refused: nothing is left out silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.document import nearest
from planner.errors import DocumentError
from planner.model import ModelGraph
from planner.plan import INSIDE_OUT, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A plan beside its model, in the words that frameworks share."""

    plan: Plan
    model: ModelGraph

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


def configuration(plan: Plan, model: ModelGraph, to: str) -> str:
    """Return the text of a framework's configuration; DocumentError names what it cannot do."""
    if to not in FRAMEWORKS:
        raise DocumentError("to", f"is '{to:.40}'; {nearest(to, list(FRAMEWORKS))}")
    wanted = _Wanted(plan=plan, model=model)
    obstacles, write = FRAMEWORKS[to]
    found = [*_for_all(wanted), *obstacles(wanted)]
    if found:
        raise DocumentError("to", f"{to} cannot run this plan: {'; '.join(found)}")
    return write(wanted)


def in_the_script(plan: Plan, model: ModelGraph, to: str) -> list[str]:
    """Return what of a plan is set in the training script and not in a configuration."""
    wanted, said = _Wanted(plan=plan, model=model), []
    if to == "deepspeed" and _recompute(wanted) == "full":
        said.append("every block is recomputed: model.gradient_checkpointing_enable()")
    if to == "accelerate":
        said.append(
            f"micro-batches of {plan.micro_batch}, "
            f"gradient_accumulation_steps={plan.micro_batches}; num_machines and machine_rank for "
            "several nodes"
        )
    return said


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
    if plan.schedule == "pipedream-2bw":
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
    if plan.schedule not in ("1f1b", "interleaved") and plan.mesh.pipeline > 1:
        yield f"schedule {plan.schedule}"
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
    plan, mesh, blocks = wanted.plan, wanted.plan.mesh, wanted.blocks
    lines = [
        f"--tensor-model-parallel-size {mesh.tensor}",
        f"--pipeline-model-parallel-size {mesh.pipeline}",
    ]
    if plan.virtual_stages > 1:
        lines.append(f"--num-layers-per-virtual-pipeline-stage {blocks[0]}")
    elif mesh.pipeline > 1 and len(set(blocks)) > 1:
        lines.append(f"--decoder-first-pipeline-num-layers {blocks[0]}")
        lines.append(f"--decoder-last-pipeline-num-layers {blocks[-1]}")
    if mesh.context > 1:
        lines.append(f"--context-parallel-size {mesh.context}")
    if mesh.expert > 1:
        lines.append(f"--expert-model-parallel-size {mesh.expert}")
    if mesh.tensor > 1:
        lines.append("--sequence-parallel")
    if plan.zero:
        lines.append("--use-distributed-optimizer")
    if plan.zero in (2, 3):
        sharded = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        lines += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {sharded}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    lines += [
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.global_batch}",
        f"--seq-length {plan.seq_len}",
    ]
    choices = wanted.recomputes
    if len(choices) > 1:
        lines += ["--recompute-granularity full", "--recompute-method block"]
        lines.append(f"--recompute-num-layers {_full_each(wanted)}")
    elif _recompute(wanted) == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines.append("--recompute-num-layers 1")
    elif _recompute(wanted) == "selective":
        lines.append("--recompute-granularity selective")
    if plan.precision == "fp8":
        lines += ["--bf16", "--fp8-format hybrid"]
    elif plan.precision in ("bf16", "fp16"):
        lines.append(f"--{plan.precision}")
    return "\n".join(lines) + "\n"


# --- torchtitan -----------------------------------------------------------------------------------

_TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def _titan_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    if plan.mesh.pipeline > 1 and plan.schedule not in _TITAN_SCHEDULES:
        yield f"schedule {plan.schedule}"
    yield from _of_fsdp(wanted)
    if plan.precision not in ("bf16", "fp32"):
        yield f"precision {plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute, which are other operators there"
    yield from _mixed(wanted)


def _titan(wanted: _Wanted) -> str:
    plan, mesh = wanted.plan, wanted.plan.mesh
    replicas, shards = mesh.data_replicate, mesh.data_shard
    lines = [
        "[training]",
        f"local_batch_size = {plan.global_batch // wanted.data}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {plan.seq_len}",
        f'mixed_precision_param = "{"bfloat16" if plan.precision == "bf16" else "float32"}"',
        f"enable_cpu_offload = {str(plan.offload == 'parameters').lower()}",
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
        lines.append(f'pipeline_parallel_schedule = "{_TITAN_SCHEDULES[plan.schedule]}"')
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro_batch}")
        lines.append(f"module_fqns_per_model_part = {json.dumps(_titan_parts(wanted))}")
    lines += ["", "[activation_checkpoint]", f'mode = "{_recompute(wanted)}"']
    return "\n".join(lines) + "\n"


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
    plan = wanted.plan
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
            "bf16": {"enabled": plan.precision == "bf16"},
            "fp16": {"enabled": plan.precision == "fp16"},
            "zero_optimization": zero,
        },
        indent=2,
    )
    return text + "\n"


# --- Accelerate -----------------------------------------------------------------------------------


def _accelerate_obstacles(wanted: _Wanted) -> Iterator[str]:
    plan = wanted.plan
    yield from _degrees(wanted, pipeline=1, expert=1)
    yield from _of_fsdp(wanted)
    if plan.zero == 0 and plan.mesh.tensor * plan.mesh.context > 1:
        yield "replicas with tensor or context parallelism"
    yield from _of_one_kind(wanted)


def _accelerate(wanted: _Wanted) -> str:
    plan, mesh = wanted.plan, wanted.plan.mesh
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}",
        "mixed_precision: " + ('"no"' if plan.precision == "fp32" else plan.precision),
        "num_machines: 1",
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


FRAMEWORKS: dict[str, tuple[Callable[[_Wanted], Iterator[str]], Callable[[_Wanted], str]]] = {
    "megatron": (_megatron_obstacles, _megatron),
    "torchtitan": (_titan_obstacles, _titan),
    "deepspeed": (_deepspeed_obstacles, _deepspeed),
    "accelerate": (_accelerate_obstacles, _accelerate),
}
"""What stands against a plan, and how it is written."""
