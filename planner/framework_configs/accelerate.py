"""accelerate 1.15, as the configuration of its launcher (YAML)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    compile_text,
    degrees_above,
    of_fsdp,
    of_one_kind,
    rate_text,
    recompute_of,
    script_text,
)


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, pipeline=1, expert=1)
    yield from of_fsdp(wanted)
    if plan.zero == 0 and plan.mesh.tensor * plan.mesh.context > 1:
        yield "replicas with tensor or context parallelism"
    if plan.mesh.tensor > 1 and plan.mesh.sequence_parallel:
        yield "tensor parallelism that divides the sequence"
    counts = wanted.ranks_of_nodes
    if len(set(counts)) > 1:
        yield (
            f"{plan.mesh.devices} ranks on nodes of {counts[0]}; it starts as many ranks on each"
        )
    yield from of_one_kind(wanted)


def text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
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
    recomputed = str(recompute_of(wanted) == "full").lower()
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


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan is set elsewhere."""
    plan, t = wanted.plan, wanted.plan.training
    if len(wanted.ranks_of_nodes) > 1:
        yield "each node is started with --machine_rank, --main_process_ip and --main_process_port"
    if not plan.zero and recompute_of(wanted) == "full":
        yield "every block is recomputed: model.gradient_checkpointing_enable()"
    yield (f"micro-batches of {plan.micro_batch}, gradient_accumulation_steps={plan.micro_batches}")
    yield (
        f"AdamW(lr={t.learning_rate:g}, betas=({t.beta1:g}, {t.beta2:g}), eps={t.epsilon:g}, "
        f"weight_decay={t.weight_decay:g})"
    )
    if t.clip_norm:
        yield f"accelerator.clip_grad_norm_(model.parameters(), {t.clip_norm:g})"
    if wanted.changes_rate:
        yield rate_text(wanted)
    yield from script_text(wanted)
    yield from compile_text(wanted)
