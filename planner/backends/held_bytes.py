"""Peak memory of a run's pipeline stages, from what its layers hold.

What a rank adds up, and when it is fullest, `planner.costs.rank_memory` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.backends.placed import Priced
from planner.costs.layer_seconds import ENDS
from planner.costs.rank_memory import LayerBytes, has_room, rank_memory_parts
from planner.plan import Layout
from planner.profile import Recompute
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
    costs = priced.costs
    return Process(
        boundary_bytes=priced.tables["head"].input_bytes if priced.layout.pipeline > 1 else 0.0,
        keeps_sent=priced.stack.pipeline.keeps_sent,
        context_bytes=costs.context_bytes(priced.layout),
        slack=costs.slack,
        tight=costs.tight,
    )


def stages_of(priced: Priced, recompute: str) -> tuple[StageEstimate, ...]:
    """[rank] Return what each rank needs with all its blocks recomputed alike."""
    process, layout = process_of(priced), _whole_rounds(priced.layout)
    held = {kind: _layer_bytes(priced, recompute, kind) for kind in priced.tables}
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


def _whole_rounds(layout: Layout) -> Layout:
    """Return a layout whose micro-batches its schedule can take: of several stages whole rounds."""
    if layout.virtual_stages == 1:
        return layout
    rounds = -(-layout.micro_batches // layout.pipeline)
    return replace(layout, micro_batches=rounds * layout.pipeline)


def _layer_bytes(priced: Priced, recompute: str, kind: str) -> LayerBytes:
    """Return what a layer holds."""
    run, stack, table = priced.run, priced.stack, priced.tables[kind]
    states = priced.held[kind].states
    stored = forward = backward = moving = 0.0
    stores_input = True
    for share, choice in shares(stack, recompute, kind):
        stored += share * table.stored_bytes(choice)
        stores_input = stores_input and "x" in table.stored(choice)
        forward = max(forward, table.forward_transient_bytes(choice))
        backward = max(backward, table.backward_transient_bytes(choice))
    if kind not in ENDS and "activations" in run.offload:
        moving = stored * stack.offload.activations_share
    return LayerBytes(
        stored=stored - moving,
        kept=0.0,
        forward=forward + states.forward_transient_bytes + moving,
        backward=backward + states.backward_transient_bytes + moving,
        moving=moving,
        parameters=states.parameters_bytes,
        gathered=states.gathered_bytes,
        gradients=states.gradients_bytes,
        gradient_buffers=states.gradient_buffers_bytes,
        optimizer=states.optimizer_bytes,
        host=states.host_bytes,
        bucket=states.bucket_bytes,
        offloaded=moving > 0,
        stores_input=not moving and stores_input,
    )


def shares(stack: Stack, recompute: str, kind: str) -> tuple[tuple[float, Recompute], ...]:
    """Return what a layer kind recomputes, and of which share of its layers.

    Embedding and head recompute nothing.
    """
    if kind in ENDS or recompute == "none":
        return ((1.0, "none"),)
    if recompute == "partial" or (
        recompute == "selective" and stack.recompute.selective == "blocks"
    ):
        return (0.5, "none"), (0.5, "full")
    return ((1.0, "full" if recompute == "full" else "selective"),)
