"""Seconds of a run's step by cause.

The step of m micro-batches on p stages with v chunks each:

    T = (m - 1) max_s t_s + t_max + (Σ_s t_s - t_max) / v + reduction + optimizer + fixed

t_s are the seconds of a stage on one micro-batch, forward and backward.  Where all stages are alike
this is the usual (m + (p - 1) / v) t (Narayanan et al., 2021, arXiv:2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.backends.held_bytes import kept_bytes
from planner.backends.placed import Priced, group, optimized
from planner.backends.runs import Run
from planner.backends.work import Shape
from planner.costs.activations import uncovered_s
from planner.costs.collectives import Levels, collective_s, group_levels
from planner.costs.sharding import accumulated_bytes, seen_in_passes, seen_once
from planner.plan import Layout
from planner.stack import Stack

STEP_COLLECTIVES = 4
"""Over all replicas once a step: gradients, their norm, parameters and the loss."""

RESTORED_BYTES = 5.0
"""Traffic per weight of bringing 4 bits back to 16 before each product: 0.5 read and 2 written, at
half of the bandwidth of a plain copy."""


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


def _expert_group(run: Run) -> Levels:
    if run.expert == 1:
        return ()
    layout = Layout(
        tensor=run.expert_tensor,
        data_shard=run.expert,
        data_replicate=max(1, run.devices // (run.pipeline * run.expert_tensor * run.expert)),
        pipeline=run.pipeline,
    )
    return group_levels(run.cluster.tiers, layout, ("data_shard",))


def _layer_pass(priced: Priced, recompute: str, kind: str) -> _Pass:
    """Return the seconds of a layer kind on one micro-batch."""
    run, stack, shape = priced.run, priced.stack, priced.shape
    work, parameters = priced.works[kind], priced.local[kind]
    is_block = kind not in ("embedding", "head")
    frozen = run.task in ("lora", "qlora")
    forward_s = work.products_s + work.attention_s + work.memory_s
    backward_s = (1.0 if frozen else 2.0) * work.products_s
    backward_s += work.attention_backward_s + work.memory_backward_s
    if run.quantised and is_block:
        restored_s = shape.moved_s(RESTORED_BYTES * parameters.count)
        forward_s, backward_s = forward_s + restored_s, backward_s + restored_s
    share = _share_again(stack, recompute) if is_block else 0.0
    again_s = share * forward_s
    if recompute == "selective" and is_block:
        if stack.recompute.selective == "operators":
            again_s = work.products_s / 2 + work.memory_s
        elif stack.recompute.selective == "attention" and not shape.flash:
            again_s = work.attention_s
    tensor_s = _tensor_s(run, stack, shape, kind, share)
    context_s = _context_s(run, shape) * (1 + share / 2) if is_block else 0.0
    expert_s = _expert_s(run, shape) * (1 + share / 2) if kind == "moe_block" else 0.0
    if not frozen:
        added = accumulated_bytes(priced.sharing.types, stack.sharding.accumulation)
        backward_s += shape.moved_s(added * parameters.count)
    busy_s = forward_s + backward_s + again_s
    seen = seen_in_passes(
        priced.moving[kind],
        priced.sharing,
        priced.used,
        forward_s=forward_s,
        backward_s=backward_s + again_s,
    )
    shard_s = sum(one.shard_s for one in seen)
    offload_s = sum(one.host_s for one in seen)
    if "activations" in run.offload and is_block:
        kept = kept_bytes(stack, recompute, work)[0]
        copy_s = priced.used.host_copy_s(stack.offload.activations_share * kept)
        offload_s += uncovered_s(copy_s, forward_s) + uncovered_s(copy_s, backward_s + again_s)
    host_s = 0.0
    if is_block:
        host_s = _host_s(run, stack, share)
        host_s += stack.host.experts_s if kind == "moe_block" else 0.0
    return _Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=again_s,
        tensor_s=tensor_s,
        context_s=context_s,
        expert_s=expert_s,
        shard_s=shard_s,
        offload_s=offload_s,
        host_s=max(0.0, host_s - busy_s - tensor_s - context_s - expert_s - shard_s),
    )


def _share_again(stack: Stack, recompute: str) -> float:
    """Return the share of blocks that run their whole forward again."""
    if recompute == "full":
        return 1.0
    half = recompute == "partial" or (
        recompute == "selective" and stack.recompute.selective == "blocks"
    )
    return 0.5 if half else 0.0


def _host_s(run: Run, stack: Stack, share: float) -> float:
    """Least seconds of a block on one micro-batch: the host's Python and launches."""
    seconds = stack.host.layer_s.forward * (1 + share) + stack.host.layer_s.backward
    if run.tensor > 1:
        seconds += stack.host.tensor_s + (run.tensor - 1) * stack.host.rank_s
        least = stack.host.pipelined_s
        nodes = run.cluster.groups[0].nodes
        if run.pipeline > 1 and nodes > 1:
            spanned = -(-run.tensor // run.cluster.groups[0].devices_per_node)
            seconds = max(seconds, least.fixed + least.each * run.tensor * (0.75 + 0.25 * spanned))
    return seconds


def _tensor_s(run: Run, stack: Stack, shape: Shape, kind: str, share: float) -> float:
    """Seconds of tensor-parallel collectives that are seen, one micro-batch, both passes."""
    if run.tensor == 1:
        return 0.0
    tensor = group(run, ("tensor",))
    size = shape.element_bytes * shape.tokens * run.architecture.hidden_size
    if shape.sequence_parallel:
        pair_s = collective_s("all_gather", size, tensor) + collective_s(
            "reduce_scatter", size, tensor
        )
    else:
        pair_s = collective_s("all_reduce", size, tensor)
    if len(tensor) > 1:
        pair_s += 2 * (run.tensor - 1) * stack.host.ring_step_s
    if kind == "embedding":
        return pair_s / (2 if shape.sequence_parallel else 1)
    if kind == "head":
        return pair_s
    pairs = 2 * (2 + share)
    seconds = pairs * pair_s
    if shape.sequence_parallel:
        # Sharded inputs are gathered again for the weights' gradients, beside the other product.
        seconds += 0.5 * 2 * collective_s("all_gather", size, tensor)
    return seconds * (1 - (stack.tensor.overlap if shape.sequence_parallel else 0.0))


def _context_s(run: Run, shape: Shape) -> float:
    """Seconds of context parallelism that are seen: rings of keys and values behind attention."""
    if run.context == 1:
        return 0.0
    a = run.architecture
    size = 2 * shape.element_bytes * shape.tokens * run.context
    size *= a.kv_heads * a.head_dim / run.tensor
    gather_s = collective_s("all_gather", size, group(run, ("context",)))
    return 0.3 * 3 * gather_s


def _expert_s(run: Run, shape: Shape) -> float:
    """Seconds of sending tokens to experts and back, both passes."""
    a = run.architecture
    if run.expert == 1 or a.experts is None:
        return 0.0
    tokens = shape.tokens / run.tensor
    size = shape.element_bytes * tokens * a.experts.per_token * a.hidden_size
    return 4 * collective_s("all_to_all", size, _expert_group(run))


def step_parts(priced: Priced, recompute: str) -> dict[str, float]:
    """Return seconds by cause; they add up to the step."""
    run, stack, shape, stages = priced.run, priced.stack, priced.shape, priced.stages
    passes = {kind: _layer_pass(priced, recompute, kind) for kind in priced.works}
    transfer_s = _transfer_s(run, stack, shape)
    times = [
        sum(passes[kind].whole_s for kind in kinds) + transfer_s + 2 * stack.host.action_s
        for kinds in stages
    ]
    m, v = run.micro_batches, run.virtual
    slowest = max(range(len(times)), key=lambda s: times[s])
    bubble_s = (sum(times) - times[slowest]) / v
    kinds = stages[slowest]

    def total(cause: str) -> float:
        return m * float(sum(getattr(passes[kind], cause) for kind in kinds))

    def once_s(kind: str) -> float:
        one = passes[kind]
        return seen_once(
            priced.moving[kind],
            priced.sharing,
            priced.used,
            forward_s=one.forward_s,
            backward_s=one.backward_s,
        ).shard_s

    def exchange_s(kind: str) -> float:
        held = optimized(run, priced.sharing, priced.local[kind])
        if "optimizer" not in run.offload:
            return 0.0
        size = priced.sharing.types.working * held
        return priced.used.host_exchange_s(size, passes[kind].backward_s)

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
            update_s(optimized(run, priced.sharing, one)) for one in priced.parameters
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
    passes = {kind: _layer_pass(priced, recompute, kind) for kind in priced.works}
    result = []
    for kinds in priced.stages:
        whole_s = sum(passes[kind].whole_s for kind in kinds)
        later_s = sum(passes[kind].backward_s + passes[kind].again_s for kind in kinds)
        forward_s = sum(passes[kind].forward_s for kind in kinds)
        shared_s = whole_s - forward_s - later_s
        result.append((forward_s + shared_s / 2, later_s + shared_s / 2))
    return result


def _transfer_s(run: Run, stack: Stack, shape: Shape) -> float:
    """Seconds that transfers between stages add to each micro-batch of a stage, both passes."""
    if run.pipeline == 1:
        return 0.0
    size = shape.element_bytes * shape.tokens * run.architecture.hidden_size
    if shape.sequence_parallel or stack.pipeline.divided_transfers:
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
