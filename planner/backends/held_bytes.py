"""Peak memory of a run's pipeline stages, from what its layers hold.

What a rank adds up, and when it is fullest, `planner.costs.rank_memory` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.backends.placed import Priced, states_of
from planner.backends.work import Work
from planner.costs.rank_memory import LayerBytes, has_room, rank_memory_parts
from planner.plan import Layout
from planner.schedules import PLAIN, looped
from planner.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Memory of one pipeline rank, by cause."""

    memory_parts: dict[str, float]
    """With context and allocator."""
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a rank holds beside its layers: see `planner.costs.rank_memory.RankCosts`."""

    boundary_bytes: float
    keeps_sent: bool
    context_bytes: float
    slack: float
    tight: float


def process_of(priced: Priced) -> Process:
    """Return what a rank of a run holds beside its layers."""
    run, stack, shape = priced.run, priced.stack, priced.shape
    crossing = shape.element_bytes * shape.stream * run.architecture.hidden_size
    communicators = stack.memory.communicator_bytes if run.devices > 1 else 0.0
    return Process(
        boundary_bytes=crossing if run.pipeline > 1 else 0.0,
        keeps_sent=stack.pipeline.keeps_sent,
        context_bytes=stack.memory.context_bytes + communicators,
        slack=stack.memory.reserved,
        tight=stack.memory.tight,
    )


def stages_of(priced: Priced, recompute: str) -> tuple[StageEstimate, ...]:
    """[rank] Return what each rank needs with all its blocks recomputed alike."""
    process, layout = process_of(priced), _layout(priced)
    held = {kind: _layer_bytes(priced, recompute, kind) for kind in priced.works}
    result = []
    for rank in range(layout.pipeline):
        own = {
            stage: [held[kind] for kind in kinds] for stage, kinds in priced.stages_of(rank).items()
        }
        parts = rank_memory_parts(process, layout, own, rank=rank)
        device = sum(parts.values())
        reserved = device - parts["context"]
        result.append(
            StageEstimate(
                memory_parts=parts,
                allocated_bytes=reserved - parts["slack"],
                reserved_bytes=reserved,
                device_bytes=device,
            )
        )
    return tuple(result)


def fits(priced: Priced, ranks: tuple[StageEstimate, ...]) -> bool:
    """Tell whether every rank fits its device, fragments of memory and context included."""
    process = process_of(priced)
    memory = priced.run.cluster.groups[0].accelerator.memory_bytes
    return all(has_room(memory, rank.device_bytes, process) for rank in ranks)


def _layout(priced: Priced) -> Layout:
    """Return the pipeline of a run, with as many micro-batches as its schedule can take."""
    run = priced.run
    count = -(-int(run.global_batch) // (run.data * run.micro_batch))
    if run.virtual > 1:
        count = -(-count // run.pipeline) * run.pipeline
    return Layout(
        pipeline=run.pipeline,
        virtual_stages=run.virtual,
        schedule=looped.INTERLEAVED.name if run.virtual > 1 else PLAIN,
        micro_batches=max(1, count),
    )


def _layer_bytes(priced: Priced, recompute: str, kind: str) -> LayerBytes:
    """Return what a layer holds."""
    run, stack, work = priced.run, priced.stack, priced.works[kind]
    states = states_of(run, stack, priced.sharing, kind, priced.local[kind])
    stored, again, moving = work.stored_bytes, 0.0, 0.0
    working = work.working_bytes
    if run.quantised and kind not in ("embedding", "head"):
        working += priced.shape.element_bytes * priced.local[kind].largest
    if kind not in ("embedding", "head"):
        stored, again = kept_bytes(stack, recompute, work)
        if "activations" in run.offload:
            moving = stored * stack.offload.activations_share
    return LayerBytes(
        stored=stored - moving,
        kept=0.0,
        forward=working + states.forward_transient_bytes + moving,
        backward=again + working + states.backward_transient_bytes + moving,
        moving=moving,
        parameters=states.parameters_bytes,
        gathered=states.gathered_bytes,
        gradients=states.gradients_bytes,
        gradient_buffers=states.gradient_buffers_bytes,
        optimizer=states.optimizer_bytes,
        host=states.host_bytes,
        bucket=states.bucket_bytes,
        offloaded=moving > 0,
        stores_input=kind != "embedding",
    )


def kept_bytes(stack: Stack, recompute: str, work: Work) -> tuple[float, float]:
    """Return what a block keeps of a micro-batch, and what its recomputation brings back."""
    if recompute == "full":
        return work.input_bytes, work.stored_bytes
    if recompute == "selective" and stack.recompute.selective == "operators":
        return work.operators_bytes, work.stored_bytes
    half = recompute == "partial" or (
        recompute == "selective" and stack.recompute.selective == "blocks"
    )
    if half:
        return (work.input_bytes + work.stored_bytes) / 2, work.stored_bytes
    if recompute == "selective":
        return work.stored_bytes - work.attention_bytes, work.attention_bytes
    return work.stored_bytes, 0.0
