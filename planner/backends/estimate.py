"""A run's step time by cause and its memory by stage, by the rules of its framework.

The step of m micro-batches on p stages with v chunks each:

    T = (m - 1) max_s t_s + t_max + (Σ_s t_s - t_max) / v + reduction + optimizer + fixed

t_s are the seconds of a stage on one micro-batch, forward and backward.  Where all stages are alike
this is the usual (m + (p - 1) / v) t (Narayanan et al., 2021, arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.architecture import block_kinds
from planner.backends.rules import EIGHT_BITS, Rules, rules_of
from planner.backends.states import NOTHING, Parameters, by_kind, states
from planner.backends.work import Shape, Work, block, embedding, head, rates
from planner.cluster import Collective
from planner.collectives import Levels, collective_s, group_levels, ranks_of
from planner.plan import Axis, Layout
from planner.runs import Run
from planner.units import GIB

OPTIMIZER_BYTES = 38.0
"""Traffic of fused AdamW per parameter: g, p, m, v read, p, m, v and the working copy written, and
the norm, clipping and zeroing of gradients."""
EXPERTS_SPREAD = 0.35
"""Spread of steps with experts: routing is as skewed as the data makes it."""
QUOTED_SPREAD = 0.05
"""What a device without measured kernels adds."""
ASSUMED_SPREAD = 0.05
"""What a run adds whose row leaves something open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Memory of one pipeline stage on its fullest rank, by cause."""

    memory_parts: dict[str, float]
    """Allocated bytes."""
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run should take."""

    step_time_s: float
    low_s: float
    high_s: float
    step_parts: dict[str, float]
    stages: tuple[StageEstimate, ...]
    fits: bool
    known_framework: bool
    assumptions: tuple[str, ...] = ()

    def memory_bytes(self, kind: str, rank: str) -> float:
        """Return the peak of a kind of memory (allocated, reserved, device) on a rank."""
        values = [_memory(stage, kind) for stage in self.stages]
        if rank == "first":
            return values[0]
        return values[-1] if rank == "last" else max(values)


def _memory(stage: StageEstimate, kind: str) -> float:
    if kind == "allocated":
        return stage.allocated_bytes
    return stage.device_bytes if kind == "device" else stage.reserved_bytes


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
        )


def estimate(run: Run) -> Estimate:
    """Return step time and memory of a run."""
    rules, known = rules_of(run)
    assumptions = list(run.assumed)
    if not known:
        assumptions.append(f"framework '{run.framework}' priced by the rules of {rules.name}")
    recompute = run.recompute
    priced = _priced(run, rules)
    if recompute is None:
        recompute = "none"
        if not _fits(run, _stages(priced, "none"), rules):
            recompute = "full"
        assumptions.append(f"recompute {recompute}")
    stages = _stages(priced, recompute)
    parts = _step_parts(priced, recompute)
    step_s = sum(parts.values())
    below, above = _spreads(run, rules, open_points=len(assumptions))
    return Estimate(
        step_time_s=step_s,
        low_s=step_s * math.exp(-below),
        high_s=step_s * math.exp(above),
        step_parts=parts,
        stages=stages,
        fits=_fits(run, stages, rules),
        known_framework=known,
        assumptions=tuple(assumptions),
    )


def _spreads(run: Run, rules: Rules, *, open_points: int) -> tuple[float, float]:
    """Return the logarithms of the range below and above the predicted step."""
    spread = rules.spread
    if run.architecture.experts is not None:
        spread = max(spread, EXPERTS_SPREAD)
    group_of_devices = run.cluster.groups[0]
    if group_of_devices.accelerator.curve.provenance == "quoted":
        spread += QUOTED_SPREAD
    if open_points:
        spread += ASSUMED_SPREAD
    if run.pipeline > 1 and group_of_devices.nodes > 1:
        return spread, max(spread, rules.pipelined_spread)
    return spread, spread


def _fits(run: Run, stages: Sequence[StageEstimate], rules: Rules) -> bool:
    capacity = float(run.cluster.groups[0].accelerator.memory_bytes)
    return all(
        stage.allocated_bytes * rules.fit_slack + rules.context_bytes <= capacity
        for stage in stages
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A run's layers on one rank: their work, their parameters, and which stage holds them."""

    run: Run
    rules: Rules
    shape: Shape
    works: dict[str, Work]
    local: dict[str, Parameters]
    stages: list[list[str]]
    """Layer kinds [stage]."""
    parameters: list[Parameters]
    """[stage]"""


def _priced(run: Run, rules: Rules) -> _Priced:
    shape = _shape(run, rules)
    local = by_kind(run.architecture, run)
    stages = _layers(run, rules)
    return _Priced(
        run=run,
        rules=rules,
        shape=shape,
        works=_works(shape),
        local=local,
        stages=stages,
        parameters=[
            _stage_parameters(run, kinds, local, s, len(stages)) for s, kinds in enumerate(stages)
        ],
    )


def _shape(run: Run, rules: Rules) -> Shape:
    return Shape(
        run=run,
        rules=rules,
        rates=rates(run, rules),
        micro_batch=min(run.micro_batch, run.global_batch / run.data),
    )


def group(run: Run, axes: tuple[Axis, ...]) -> Levels:
    """Return the levels of a run's group along some axes."""
    layout = Layout(
        tensor=run.tensor, context=run.context, data_shard=run.data, pipeline=run.pipeline
    )
    return group_levels(run.cluster.tiers, layout, axes)


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


def _layers(run: Run, rules: Rules) -> list[list[str]]:
    """Return the layer kinds of each stage, all chunks together."""
    kinds = list(block_kinds(run.architecture))
    p, count = run.pipeline, len(kinds)
    if rules.split == "even":
        base, more = divmod(count, p)
        sizes = [base + (1 if s < more else 0) for s in range(p)]
    else:
        sizes = _by_cost(run, count)
    result, at = [], 0
    for size in sizes:
        result.append(kinds[at : at + size])
        at += size
    result[0].insert(0, "embedding")
    result[-1].append("head")
    return result


def _by_cost(run: Run, count: int) -> list[int]:
    """Return blocks per stage as nanotron divides them.

    Blocks and the output projection count by their products, the embedding nothing; a stage is full
    once the running sum passes its share.  Source: nanotron, get_block_compute_costs and
    init_on_device_and_dtype (parallel/pipeline_parallel).
    """
    a = run.architecture
    gates = 3 if a.gated_mlp else 2
    block_cost = 4 * a.heads * a.head_dim * a.hidden_size + gates * a.ffn_size * a.hidden_size
    total = count * block_cost + a.vocab_size * a.hidden_size
    sizes, stage, sums = [0] * run.pipeline, 0, 0.0
    for _ in range(count):
        sums += block_cost
        sizes[stage] += 1
        if stage < run.pipeline - 1 and sums >= total * (stage + 1) / run.pipeline * (1 - 1e-9):
            stage += 1
    return sizes


def _works(shape: Shape) -> dict[str, Work]:
    a = shape.run.architecture
    result = {"embedding": embedding(shape), "head": head(shape)}
    for kind in set(block_kinds(a)):
        result[kind] = block(shape, moe=kind == "moe_block")
    return result


def _layer_pass(priced: _Priced, recompute: str, kind: str) -> _Pass:
    """Return the seconds of a layer kind on one micro-batch."""
    run, rules, shape = priced.run, priced.rules, priced.shape
    work, parameters = priced.works[kind], priced.local[kind]
    is_block = kind not in ("embedding", "head")
    frozen = run.task in ("lora", "qlora")
    forward_s = work.products_s + work.attention_s + work.memory_s
    backward_s = (1.0 if frozen else 2.0) * work.products_s
    backward_s += work.attention_backward_s + work.memory_backward_s
    share = {"full": 1.0, "partial": 0.5}.get(recompute, 0.0) if is_block else 0.0
    again_s = share * forward_s
    if recompute == "selective" and is_block and not shape.flash:
        again_s = work.attention_s
    tensor_s = _tensor_s(run, rules, shape, kind, share)
    context_s = _context_s(run, shape) * (1 + share / 2) if is_block else 0.0
    expert_s = _expert_s(run, shape) * (1 + share / 2) if kind == "moe_block" else 0.0
    if not frozen:
        half = run.precision in ("fp16", *EIGHT_BITS)
        accumulated = rules.accumulated_bytes * (0.6 if half else 1.0)
        backward_s += shape.moved_s(accumulated * parameters.count)
    busy_s = forward_s + backward_s + again_s
    shard_s = _shard_s(run, rules, parameters, forward_s, backward_s + again_s)
    host_s = 0.0
    if is_block:
        host_s = _host_s(run, rules, share)
    return _Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=again_s,
        tensor_s=tensor_s,
        context_s=context_s,
        expert_s=expert_s,
        shard_s=shard_s,
        host_s=max(0.0, host_s - busy_s - tensor_s - context_s - expert_s - shard_s),
    )


def _host_s(run: Run, rules: Rules, share: float) -> float:
    """Least seconds of a block on one micro-batch: the host's Python and launches."""
    seconds = rules.host_forward_s * (1 + share) + rules.host_backward_s
    if run.tensor > 1:
        seconds += rules.host_tensor_s + (run.tensor - 1) * rules.host_rank_s
        fixed_s, each_s = rules.host_pipelined_s
        nodes = run.cluster.groups[0].nodes
        if run.pipeline > 1 and nodes > 1:
            spanned = -(-run.tensor // run.cluster.groups[0].devices_per_node)
            seconds = max(seconds, fixed_s + each_s * run.tensor * (0.75 + 0.25 * spanned))
    return seconds


def _tensor_s(run: Run, rules: Rules, shape: Shape, kind: str, share: float) -> float:
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
        pair_s += 2 * (run.tensor - 1) * rules.ring_step_s
    if kind == "embedding":
        return pair_s / (2 if shape.sequence_parallel else 1)
    if kind == "head":
        return pair_s
    pairs = 2 * (2 + share)
    seconds = pairs * pair_s
    if shape.sequence_parallel:
        # Sharded inputs are gathered again for the weights' gradients, beside the other product.
        seconds += 0.5 * 2 * collective_s("all_gather", size, tensor)
    return seconds * (1 - (rules.tensor_overlap if shape.sequence_parallel else 0.0))


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


def _shard_s(
    run: Run, rules: Rules, parameters: Parameters, forward_s: float, backward_s: float
) -> float:
    """Seconds of ZeRO-3's gathers and reductions of a layer that computation does not hide."""
    zero = rules.zero if run.zero is None else run.zero
    if zero < 3 or run.data * run.context == 1:
        return 0.0
    ranks = group(run, ("data_shard", "context"))
    weight = 0.53 if run.quantised else 2.0
    gather_s = collective_s("all_gather", weight * parameters.count, ranks)
    reduce_s = 0.0
    if run.task not in ("lora", "qlora"):
        wire = 2 if run.precision in ("fp16", *EIGHT_BITS) else rules.reduce_bytes
        reduce_s = collective_s("reduce_scatter", wire * parameters.count, ranks)
    gather_s, reduce_s = gather_s / rules.shard_rate, reduce_s / rules.shard_rate
    overlap = rules.shard_overlap
    seen = max((1 - overlap) * gather_s, gather_s - forward_s)
    both = gather_s + reduce_s
    return seen + max((1 - overlap) * both, both - backward_s)


def _step_parts(priced: _Priced, recompute: str) -> dict[str, float]:
    """Return seconds by cause; they add up to the step."""
    run, rules, shape, stages = priced.run, priced.rules, priced.shape, priced.stages
    passes = {kind: _layer_pass(priced, recompute, kind) for kind in priced.works}
    transfer_s = _transfer_s(run, rules, shape)
    times = [
        sum(passes[kind].whole_s for kind in kinds) + transfer_s + rules.host_micro_batch_s
        for kinds in stages
    ]
    m, v = run.micro_batches, run.virtual
    slowest = max(range(len(times)), key=lambda s: times[s])
    bubble_s = (sum(times) - times[slowest]) / v
    kinds = stages[slowest]

    def total(cause: str) -> float:
        return m * float(sum(getattr(passes[kind], cause) for kind in kinds))

    largest = max(priced.parameters, key=lambda p: p.count)
    reduce_s, optimizer_s = _update_s(
        run,
        rules,
        shape,
        largest,
        layers=len(kinds),
        backward_s=total("backward_s") / m,
        forward_s=total("forward_s") / m,
    )
    return {
        "forward": total("forward_s"),
        "backward": total("backward_s"),
        "recompute": total("again_s"),
        "tensor communication": total("tensor_s"),
        "context communication": total("context_s"),
        "expert communication": total("expert_s"),
        "data communication": total("shard_s") + reduce_s,
        "pipeline": bubble_s + m * transfer_s,
        "host": total("host_s") + m * rules.host_micro_batch_s,
        "optimizer": optimizer_s,
        "fixed": rules.host_step_s,
    }


def _transfer_s(run: Run, rules: Rules, shape: Shape) -> float:
    """Seconds that transfers between stages add to each micro-batch of a stage, both passes."""
    if run.pipeline == 1:
        return 0.0
    size = shape.element_bytes * shape.tokens * run.architecture.hidden_size
    if shape.sequence_parallel or rules.split_transfers:
        size /= run.tensor
    one_s = collective_s("send_recv", size, group(run, ("pipeline",)))
    return 2 * one_s * run.virtual * (1 - rules.pipeline_overlap)


def _update_s(
    run: Run,
    rules: Rules,
    shape: Shape,
    parameters: Parameters,
    layers: int,
    backward_s: float,
    forward_s: float,
) -> tuple[float, float]:
    """Return exposed seconds of the gradients' reduction, and seconds of the optimizer."""
    zero = rules.zero if run.zero is None else run.zero
    frozen = run.task in ("lora", "qlora")
    trained = 0.0 if frozen else parameters.count
    replicas = run.data * run.context
    held = trained / (replicas if zero else 1)
    optimizer_s = shape.moved_s(OPTIMIZER_BYTES * held)
    if replicas == 1 or zero == 3 or not trained:
        return 0.0, optimizer_s
    ranks = group(run, ("data_shard", "context"))
    half = run.precision in ("fp16", *EIGHT_BITS)
    wire = (2 if half else rules.reduce_bytes) * trained
    calls = max(1.0, rules.reduce_calls * layers)
    gather_s = 0.0
    if zero == 0 or rules.reduces_whole:
        reduce_s = calls * collective_s("all_reduce", wire / calls, ranks)
    else:
        reduce_s = calls * _ring_s("reduce_scatter", wire / calls, ranks)
    if zero:
        gather_s = calls * _ring_s("all_gather", rules.weight_bytes * trained / calls, ranks)
    seen = max((1 - rules.reduce_overlap) * reduce_s, reduce_s - rules.reduce_overlap * backward_s)
    seen += max((1 - rules.gather_overlap) * gather_s, gather_s - rules.gather_overlap * forward_s)
    return seen, optimizer_s


def _ring_s(operation: Collective, size_bytes: float, ranks: Levels) -> float:
    """Seconds of a gather or scatter on one ring through all ranks, as NCCL runs them.

    The seconds of `planner.collectives` count the rounds of each level; a ring has ranks - 1, each
    as late as the network.
    """
    seconds = collective_s(operation, size_bytes, ranks)
    if len(ranks) > 1:
        counted = sum(level.members - 1 for level in ranks)
        seconds += (ranks_of(ranks) - 1 - counted) * ranks[-1].tier.latency_s
    return seconds


def _stage_parameters(
    run: Run, kinds: Sequence[str], local: dict[str, Parameters], stage: int, stages: int
) -> Parameters:
    total = NOTHING
    for kind in kinds:
        total += local[kind]
    a = run.architecture
    if a.tied_embeddings and stages > 1 and stage == stages - 1:
        total += Parameters(dense=a.vocab_size * a.hidden_size / run.tensor, routed=0.0)
    return total


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


def _stages(priced: _Priced, recompute: str) -> tuple[StageEstimate, ...]:
    rules = priced.rules
    result = []
    for s in range(len(priced.stages)):
        parts = _memory_parts(priced, recompute, s)
        allocated = sum(parts.values())
        reserved = allocated * rules.reserved
        result.append(
            StageEstimate(
                memory_parts=parts,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                device_bytes=reserved + rules.context_bytes,
            )
        )
    return tuple(result)


def _memory_parts(priced: _Priced, recompute: str, stage: int) -> dict[str, float]:
    """Return allocated bytes by cause at the peak of a stage."""
    run, rules, shape, kinds = priced.run, priced.rules, priced.shape, priced.stages[stage]
    kept = states(run, rules, priced.parameters[stage])
    stored = working = 0.0
    for kind in kinds:
        work = priced.works[kind]
        own, again = work.stored_bytes, 0.0
        if kind not in ("embedding", "head"):
            if recompute == "full":
                own, again = work.input_bytes, work.stored_bytes
            elif recompute == "partial":
                own = (work.input_bytes + work.stored_bytes) / 2
                again = work.stored_bytes
            elif recompute == "selective":
                own -= work.attention_bytes
                again = work.attention_bytes
        stored += own
        working = max(working, again + work.working_bytes)
    zero = rules.zero if run.zero is None else run.zero
    gathered = 0.0
    if zero == 3:
        local = max(priced.local[kind].count for kind in kinds)
        gathered = 2 * 2 * local + rules.reduce_bytes * local
    sent = 0.0
    if rules.keeps_sent and stage < run.pipeline - 1:
        sent = shape.element_bytes * shape.stream * run.architecture.hidden_size
    fresh = rules.fresh_gradient_bytes * priced.parameters[stage].count
    return {
        "weights": kept.weights_bytes,
        "gradients": kept.gradients_bytes + fresh,
        "optimizer": kept.optimizer_bytes,
        "activations": _in_flight(run, stage) * (stored + sent),
        "transient": working,
        "gathered": gathered,
    }


def gib(size_bytes: float) -> float:
    """Return bytes in GiB."""
    return size_bytes / GIB
