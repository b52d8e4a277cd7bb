"""What other frameworks can execute: the layouts of each one's space, and flags that ask for one.

A space is what the framework's own documentation says that it runs; the layouts that its authors
warn of (tensor parallelism across nodes) are left out, and said so in `NOT_LOOKED_AT`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.backends.runs import Recomputed, Run
from planner.catalog import stacks
from planner.cluster import ClusterSpec
from planner.document import nearest
from planner.errors import DocumentError
from planner.model import Architecture, ModelGraph
from planner.pins import Pins
from planner.plan import Job
from planner.schedules import looped, single
from planner.stack import Space

NOT_LOOKED_AT = "tensor parallelism across nodes, more than 64 samples in a micro-batch"
LARGEST_MICRO_BATCH = 64
LONG_SEQUENCE = 8192
"""Tokens from which context parallelism is looked at."""


def space_of(backend: str) -> Space:
    """Return what a stack of the catalogue can execute; DocumentError where it is not searched."""
    searched = {name: stack.space for name, stack in stacks().items() if stack.space is not None}
    if backend not in searched:
        raise DocumentError("backend", f"is '{backend:.40}'; {nearest(backend, list(searched))}")
    return searched[backend]


def refuse_pins(pins: Pins, backend: str) -> None:
    """Refuse what was fixed and another framework's space does not have."""
    for name in ("schedule", "activations", "offload", "gradient_wire", "order", "data_shard"):
        value = getattr(pins, name)
        if value is not None and value not in ("keep", "none", "full"):
            raise DocumentError(
                "fix",
                f"{name}={value}: {backend} has no such choice",
            )
    if pins.require or pins.allowed:
        raise DocumentError("allow", f"and require speak of native plans, not of {backend}'s")


def layouts(
    model: ModelGraph, cluster: ClusterSpec, job: Job, pins: Pins, *, backend: str
) -> Iterator[Run]:
    """Yield every run of a framework's space on all devices of a cluster, the simplest first."""
    space, a = space_of(backend), _decoder(model)
    devices = cluster.devices
    in_node = cluster.groups[0].devices_per_node
    for tensor in _degrees(min(in_node, a.heads) if space.tensor else 1, pins.tensor):
        if a.heads % tensor or (a.kv_heads % tensor and tensor % a.kv_heads):
            continue
        for pipeline in _degrees(a.layers if space.pipeline else 1, pins.pipeline):
            for context in _degrees(_most_context(space, job), pins.context):
                ranks = tensor * pipeline * context
                if devices % ranks or job.seq_len % (2 * context if context > 1 else 1):
                    continue
                data = devices // ranks
                if job.global_batch % data or pins.data not in (None, data):
                    continue
                if not _computes_in(job, backend, shards=data * context, others=tensor * pipeline):
                    continue
                yield from _of_degrees(
                    space, a, cluster, job, pins, (tensor, pipeline, context, data), backend
                )


def _computes_in(job: Job, backend: str, *, shards: int, others: int) -> bool:
    """Tell whether a framework computes in the job's precision with these degrees."""
    # torchtitan leaves 16 bits to FSDP, and where nothing shards to autocast without other axes.
    return backend != "torchtitan" or job.precision == "fp32" or shards > 1 or others == 1


def _of_degrees(
    space: Space,
    a: Architecture,
    cluster: ClusterSpec,
    job: Job,
    pins: Pins,
    degrees: tuple[int, int, int, int],
    backend: str,
) -> Iterator[Run]:
    tensor, pipeline, context, data = degrees
    share = job.global_batch // data
    recomputes = _recomputes(space, backend)
    for micro_batch in _degrees(min(share, LARGEST_MICRO_BATCH), pins.micro_batch):
        if share % micro_batch:
            continue
        count = share // micro_batch
        for virtual in _virtual(space, a.layers, pipeline, count, pins):
            for expert in _expert(space, a, data * context * tensor, pins):
                for zero in space.zero:
                    if (zero == 1 and data * context == 1) or pins.zero not in (None, zero):
                        continue
                    for recompute in recomputes:
                        if pins.recompute not in (None, recompute):
                            continue
                        yield Run(
                            architecture=a,
                            cluster=cluster,
                            task="pretrain",
                            framework=backend,
                            seq_len=job.seq_len,
                            global_batch=job.global_batch,
                            micro_batch=micro_batch,
                            tensor=tensor,
                            pipeline=pipeline,
                            virtual=virtual,
                            context=context,
                            expert=expert,
                            data=data,
                            zero=zero,
                            recompute=recompute,
                            precision=job.precision,
                        )


def _recomputes(space: Space, backend: str) -> tuple[Recomputed, ...]:
    """Recomputing the core of attention changes nothing where it is fused."""
    stack = stacks()[backend]
    if stack.recompute.selective == "attention" and stack.kernels.flash_attention:
        return tuple(kind for kind in space.recompute if kind != "selective")
    return space.recompute


def _decoder(model: ModelGraph) -> Architecture:
    assert model.architecture is not None, "backend_search refuses other models"
    return model.architecture


def _degrees(most: int, pinned: int | None) -> Iterator[int]:
    """Yield powers of two up to a number, or the one that was asked for."""
    if pinned is not None:
        yield pinned
        return
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2


def _most_context(space: Space, job: Job) -> int:
    return max(1, job.seq_len // LONG_SEQUENCE * 2) if space.context else 1


def _virtual(
    space: Space, layers: int, pipeline: int, micro_batches: int, pins: Pins
) -> Iterator[int]:
    """Interleaved stages are alike, and micro-batches come in groups of as many as stages."""
    if pins.virtual_stages is not None:
        yield pins.virtual_stages
        return
    yield 1
    if pipeline == 1 or micro_batches % pipeline:
        return
    for virtual in range(2, space.most_virtual_stages + 1):
        if layers % (pipeline * virtual) == 0:
            yield virtual


def _expert(space: Space, a: Architecture, ranks: int, pins: Pins) -> Iterator[int]:
    if a.experts is None or not space.expert:
        yield 1
        return
    for expert in _degrees(a.experts.count, pins.expert):
        if a.experts.count % expert == 0 and ranks % expert == 0:
            yield expert


def flags(run: Run) -> tuple[str, ...]:
    """Return what asks a framework for this layout, as it is written there."""
    write = {"torchtitan": _torchtitan, "nanotron": _nanotron, "fsdp": _fsdp}
    return tuple(write.get(run.framework, _megatron)(run))


def _megatron(run: Run) -> Iterator[str]:
    """Arguments of Megatron-LM's training scripts."""
    yield f"--tensor-model-parallel-size {run.tensor}"
    yield f"--pipeline-model-parallel-size {run.pipeline}"
    if run.virtual > 1:
        each = run.architecture.layers // (run.pipeline * run.virtual)
        yield f"--num-layers-per-virtual-pipeline-stage {each}"
    if run.context > 1:
        yield f"--context-parallel-size {run.context}"
    if run.expert > 1:
        yield f"--expert-model-parallel-size {run.expert}"
        if run.tensor > 1:
            yield f"--expert-tensor-parallel-size {run.expert_tensor}"
    if run.framework == "megatron":
        if run.tensor > 1:
            yield "--sequence-parallel"
        yield "--overlap-grad-reduce"
        if run.zero:
            yield "--use-distributed-optimizer"
            yield "--overlap-param-gather"
    elif run.zero:
        yield "--zero-stage 1"
    yield f"--micro-batch-size {run.micro_batch}"
    yield f"--global-batch-size {run.global_batch}"
    yield f"--seq-length {run.seq_len}"
    if run.recompute == "selective":
        yield "--recompute-granularity selective"
    elif run.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    if run.precision in ("bf16", "fp16"):
        yield f"--{run.precision}"
    elif run.precision == "fp8":
        yield "--bf16"
        yield "--fp8-format hybrid"


def _torchtitan(run: Run) -> Iterator[str]:
    """Keys of torchtitan 0.2's job configuration (TOML)."""
    # What a data-parallel rank takes at once: one forward's samples, or a whole pipeline's.
    at_once = run.global_batch // run.data if run.pipeline > 1 else run.micro_batch
    if run.precision == "fp8":
        yield "[model]"
        yield 'converters = ["quantize.linear.float8"]'
    yield "[training]"
    yield f"local_batch_size = {at_once}"
    yield f"global_batch_size = {run.global_batch}"
    yield f"seq_len = {run.seq_len}"
    yield f'mixed_precision_param = "{"float32" if run.precision == "fp32" else "bfloat16"}"'
    yield "[parallelism]"
    yield "data_parallel_replicate_degree = 1"
    yield f"data_parallel_shard_degree = {run.data}"
    yield f"tensor_parallel_degree = {run.tensor}"
    yield f"context_parallel_degree = {run.context}"
    yield f"pipeline_parallel_degree = {run.pipeline}"
    if run.pipeline > 1:
        schedule = looped.INTERLEAVED if run.virtual > 1 else single.ONE_FORWARD_ONE_BACKWARD
        yield f'pipeline_parallel_schedule = "{schedule.names["torchtitan"]}"'
        yield f"pipeline_parallel_microbatch_size = {run.micro_batch}"
        # Stages of as many blocks: the ends do not count as one each, as they do by default.
        yield "pipeline_parallel_first_stage_less_layers = 0"
        yield "pipeline_parallel_last_stage_less_layers = 0"
        if run.virtual > 1:
            each = run.architecture.layers // (run.pipeline * run.virtual)
            yield f"pipeline_parallel_layers_per_stage = {each}"
    yield "[activation_checkpoint]"
    yield f'mode = "{run.recompute}"'
    if run.recompute == "selective":
        yield 'selective_ac_option = "op"'


def _nanotron(run: Run) -> Iterator[str]:
    """Keys of nanotron's configuration (YAML)."""
    yield "parallelism:"
    yield f"  dp: {run.data}"
    yield f"  pp: {run.pipeline}"
    yield f"  pp_engine: {single.ONE_FORWARD_ONE_BACKWARD.names['nanotron']}"
    yield f"  tp: {run.tensor}"
    yield "  tp_mode: REDUCE_SCATTER"
    yield f"  recompute_layer: {str(run.recompute == 'full').lower()}"
    yield "optimizer:"
    yield f"  zero_stage: {run.zero}"
    yield "tokens:"
    yield f"  micro_batch_size: {run.micro_batch}"
    yield f"  batch_accumulation_per_replica: {round(run.micro_batches)}"
    yield f"  sequence_length: {run.seq_len}"


def _fsdp(run: Run) -> Iterator[str]:
    """What a plain FSDP2 training loop is told."""
    yield "fully_shard(block, reshard_after_forward=True) for every block, then the model"
    yield f"per-device micro-batch {run.micro_batch}, {round(run.micro_batches)} accumulated"
    if run.recompute == "full":
        yield "checkpoint_wrapper around every block"
