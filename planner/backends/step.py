"""Seconds of a run's step by cause.

The step of m micro-batches on p stages with v chunks each:

    T = (m - 1) max_s t_s + t_max + (Σ_s t_s - t_max) / v + reduction + optimizer + fixed

t_s are the seconds of a stage on one micro-batch, forward and backward.  Where all stages are alike
this is the usual (m + (p - 1) / v) t (Narayanan et al., 2021, arXiv:2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from planner.backends.held_bytes import shares
from planner.backends.placed import Priced, group, link_s
from planner.backends.runs import Run
from planner.costs.activations import uncovered_s
from planner.costs.collectives import collective_s
from planner.costs.layer_seconds import ENDS, collectives, host_passes, link_rule, passes
from planner.costs.sharding import seen_in_passes, seen_once
from planner.stack import Stack

STEP_COLLECTIVES = 4
"""Over all replicas once a step: gradients, their norm, parameters and the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Seconds of one layer on one micro-batch by cause."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    shard_s: float = 0.0
    host_s: float = 0.0
    offload_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """All causes."""
        return (
            self.forward_s
            + self.backward_s
            + self.again_s
            + self.tensor_s
            + self.context_s
            + self.expert_s
            + self.shard_s
            + self.host_s
            + self.offload_s
        )


def _layer_pass(priced: Priced, recompute: str, kind: str) -> _Pass:
    """Return the seconds of a layer kind on one micro-batch.

    Where a share of the layers recomputes, it is what they take on average.
    """
    run, stack, setting = priced.run, priced.stack, priced.setting
    table = priced.tables[kind]
    rule = link_rule(stack, sequence_parallel=setting.sequence_parallel)
    forward_s = backward_s = again_s = least_s = kept = 0.0
    links_s = dict.fromkeys(priced.groups, 0.0)
    for share, choice in shares(stack, recompute, kind):
        found = passes(table, choice, priced.used.device)
        forward_s += share * found.forward_s
        backward_s += share * found.backward_s
        again_s += share * found.recompute_s
        again = table.recomputed(choice)
        for axis, there_s, back_s in collectives(table, again, partial(link_s, priced), rule):
            links_s[axis] += share * (there_s + back_s)
        host = host_passes(
            stack,
            table,
            setting,
            found,
            recomputes=choice == "full",
            devices_per_node=run.cluster.groups[0].devices_per_node,
        )
        least_s += share * (host.forward_s + host.backward_s + host.recompute_s)
        kept += share * table.stored_bytes(choice)
    busy_s = forward_s + backward_s + again_s + sum(links_s.values())
    waits_s = max(0.0, least_s - busy_s)
    seen = seen_in_passes(
        priced.moving[kind],
        priced.sharing,
        priced.used,
        forward_s=forward_s,
        backward_s=backward_s + again_s,
        waits_s=waits_s,
    )
    shard_s = sum(one.shard_s for one in seen)
    offload_s = sum(one.host_s for one in seen)
    if "activations" in run.offload and kind not in ENDS:
        copy_s = priced.used.host_copy_s(stack.offload.activations_share * kept)
        offload_s += uncovered_s(copy_s, forward_s) + uncovered_s(copy_s, backward_s + again_s)
    return _Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=again_s,
        tensor_s=links_s["tensor"],
        context_s=links_s["context"],
        expert_s=links_s["expert"],
        shard_s=shard_s,
        offload_s=offload_s,
        host_s=waits_s,
    )


def step_parts(priced: Priced, recompute: str) -> dict[str, float]:
    """Return seconds by cause; they add up to the step."""
    run, stack, stages = priced.run, priced.stack, priced.stages
    by_kind = {kind: _layer_pass(priced, recompute, kind) for kind in priced.tables}
    transfer_s = _transfer_s(priced)
    times = [
        sum(by_kind[kind].whole_s for kind in kinds) + transfer_s + 2 * stack.host.action_s
        for kinds in stages
    ]
    m, v = run.micro_batches, run.virtual
    slowest = max(range(len(times)), key=lambda s: times[s])
    bubble_s = (sum(times) - times[slowest]) / v
    kinds = stages[slowest]

    def total(cause: str) -> float:
        return m * float(sum(getattr(by_kind[kind], cause) for kind in kinds))

    def once_s(kind: str) -> float:
        one = by_kind[kind]
        return (
            seen_once(
                priced.moving[kind],
                priced.sharing,
                priced.used,
                forward_s=one.forward_s,
                backward_s=one.backward_s,
            ).shard_s
            + priced.tied_s[kind]
        )

    def exchange_s(kind: str) -> float:
        if "optimizer" not in run.offload:
            return 0.0
        size = priced.sharing.types.working * priced.held[kind].optimized
        return priced.used.host_exchange_s(size, by_kind[kind].backward_s)

    on_host = "optimizer" in run.offload
    update_s = priced.used.host_optimizer_s if on_host else priced.used.optimizer_s

    parts = {
        "forward": total("forward_s"),
        "backward": total("backward_s"),
        "recompute": total("again_s"),
        "tensor communication": total("tensor_s"),
        "context communication": total("context_s"),
        "expert communication": total("expert_s"),
        "data communication": total("shard_s") + max(sum(map(once_s, kinds)) for kinds in stages),
        "pipeline": bubble_s + m * transfer_s + _stalls_s(run, stack),
        "host": total("host_s") + m * 2 * stack.host.action_s,
        "optimizer": max(
            update_s(sum(priced.held[kind].optimized for kind in kinds)) for kinds in stages
        ),
        "fixed": stack.host.step_s,
    }
    if run.offload:
        parts["offload"] = total("offload_s") + max(sum(map(exchange_s, kinds)) for kinds in stages)
    return parts


def stage_seconds(priced: Priced, recompute: str) -> list[tuple[float, float]]:
    """Return each stage's forward and backward seconds on one micro-batch.

    Communication that both passes share counts half in each.
    """
    by_kind = {kind: _layer_pass(priced, recompute, kind) for kind in priced.tables}
    result = []
    for kinds in priced.stages:
        whole_s = sum(by_kind[kind].whole_s for kind in kinds)
        later_s = sum(by_kind[kind].backward_s + by_kind[kind].again_s for kind in kinds)
        forward_s = sum(by_kind[kind].forward_s for kind in kinds)
        shared_s = whole_s - forward_s - later_s
        result.append((forward_s + shared_s / 2, later_s + shared_s / 2))
    return result


def _transfer_s(priced: Priced) -> float:
    """Seconds that transfers between stages add to each micro-batch of a stage, both passes."""
    run, stack, setting = priced.run, priced.stack, priced.setting
    if run.pipeline == 1:
        return 0.0
    size = setting.element_bytes * setting.tokens * run.architecture.hidden_size
    if setting.sequence_parallel or stack.pipeline.divided_transfers:
        size /= run.tensor
    one_s = collective_s("send_recv", size, group(run, ("pipeline",)))
    overlap = stack.pipeline.interleaved_overlap if run.virtual > 1 else 0.0
    return 2 * one_s * run.virtual * (1 - overlap)


def _stalls_s(run: Run, stack: Stack) -> float:
    """Seconds that transfers between stages stall, of a whole step.

    A stage between two others takes part in four transfers per micro-batch, which wait one by one;
    the first micro-batch passes p - 1 of them forward, and the last one p - 1 backward.  Without
    stages it is the collectives of a step that wait.
    """
    if run.cluster.groups[0].nodes <= stack.pipeline.stalling_nodes:
        return 0.0
    if run.pipeline == 1:
        return stack.pipeline.stalled_transfer_s * STEP_COLLECTIVES
    each = 2 if run.pipeline == 2 else 4
    return each * stack.pipeline.stalled_transfer_s * (run.micro_batches + (run.pipeline - 1) / 2)
