"""Memory of every pipeline stage on its fullest rank, by cause, and whether a run fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.backends.placed import Priced, states_of
from planner.backends.runs import Run
from planner.costs.layer_seconds import ENDS
from planner.profile import Recompute
from planner.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Memory of one pipeline stage on its fullest rank, by cause."""

    memory_parts: dict[str, float]
    """Allocated bytes."""
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


def fits(run: Run, stages: Sequence[StageEstimate], stack: Stack) -> bool:
    """Tell whether every stage fits its device, fragments of memory and context included."""
    capacity = float(run.cluster.groups[0].accelerator.memory_bytes)
    return all(
        stage.allocated_bytes * stack.memory.tight + stack.memory.context_bytes <= capacity
        for stage in stages
    )


def stages_of(priced: Priced, recompute: str) -> tuple[StageEstimate, ...]:
    """Return what each stage needs with all its blocks recomputed alike."""
    stack = priced.stack
    by_kind = {kind: _stored_and_peak(priced, recompute, kind) for kind in priced.tables}
    result = []
    for s in range(len(priced.stages)):
        parts = _memory_parts(priced, by_kind, s)
        allocated = sum(parts.values())
        reserved = allocated * stack.memory.reserved
        result.append(
            StageEstimate(
                memory_parts=parts,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                device_bytes=reserved + stack.memory.context_bytes,
            )
        )
    return tuple(result)


def _stored_and_peak(priced: Priced, recompute: str, kind: str) -> tuple[float, float]:
    """Return what a layer keeps of a micro-batch, and what it needs beside that while it runs."""
    table, stored, peak = priced.tables[kind], 0.0, 0.0
    for share, choice in shares(priced.stack, recompute, kind):
        stored += share * table.stored_bytes(choice)
        forward, backward = table.forward_transient_bytes, table.backward_transient_bytes
        peak = max(peak, forward(choice), backward(choice))
    return stored, peak


def _memory_parts(
    priced: Priced, by_kind: dict[str, tuple[float, float]], stage: int
) -> dict[str, float]:
    """Return allocated bytes by cause at the peak of a stage."""
    run, stack, kinds = priced.run, priced.stack, priced.stages[stage]
    kept = states_of(run, priced.sharing, priced.parameters[stage])
    stored = working = coming = 0.0
    for kind in kinds:
        own, peak = by_kind[kind]
        if "activations" in run.offload and kind not in ("embedding", "head"):
            gone = own * stack.offload.activations_share
            coming = max(coming, 2 * gone)  # one block on its way, one at work
            own -= gone
        stored += own
        working = max(working, peak)
    gathered = 0.0
    if priced.sharing.zero == 3:
        local = max((priced.local[kind].count for kind in kinds), default=0.0)
        gathered = 2 * 2 * local + stack.types.wire * local
    sent = 0.0
    if stack.pipeline.keeps_sent and stage < run.pipeline - 1:
        sent = priced.tables["head"].input_bytes
    return {
        "weights": kept.parameters_bytes,
        "gradients": kept.gradients_bytes,
        "optimizer": kept.optimizer_bytes,
        "activations": _in_flight(run, stage) * (stored + sent) + coming,
        "transient": working,
        "gathered": gathered,
    }


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


def _in_flight(run: Run, stage: int) -> float:
    """Return micro-batches of a whole stage whose activations are kept at once (1F1B).

    Interleaved: 2 (p - i - 1) + (v - 1) p + 1 chunks, each 1 / v of a stage.  Source: Megatron-LM,
    forward_backward_pipelining_with_interleaving.
    """
    p, v, m = run.pipeline, run.virtual, run.micro_batches
    if p == 1:
        return 1.0
    if v == 1:
        return float(min(m, p - stage))
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
