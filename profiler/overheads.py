"""Overheads of the runtime beside layers and links: measured through the runtime itself.

Small costs are measured on a tiny model, in which nothing else is large: shard_unit_s        a
chain wrapped for data parallelism that does not communicate, less the same chain unwrapped, per
unit and pass step_s              from the call of a step to its first layer, and from the last
gradient to the end: batch, norm, clipping, report pipeline_action_s   what must be added to every
action for the simulated pipeline of these tiny layers to take as long as the real one What grows
with the model is measured on its own layers: optimizer_s_per_parameter gather_copy_s_per_byte,
reduce_copy_s_per_byte, overlap data parallelism of every kind, less the chain unwrapped: what is
more than the measured collectives is copies, what is less is overlap All ranks work at the same
time, and the slowest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.costs.collectives import interpolated_s
from meshwright.planner.documents.cluster import Collective
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Mesh
from meshwright.planner.documents.profile import CollectiveCurve, Overheads
from meshwright.planner.documents.training import Training
from meshwright.planner.schedules import PLAIN, schedule
from meshwright.planner.schedules.simulate import timeline
from meshwright.profiler.chain import Case, Chain, plan_of
from meshwright.profiler.clock import Clock, median, slowest
from meshwright.profiler.layers import trial
from meshwright.runtime.core.mesh import Place, place_of
from meshwright.runtime.engine.apply_plan import Staged
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.optim.gradients import Slot
from meshwright.runtime.optim.sharded_optimizer import TorchOptimizers
from meshwright.runtime.parallel.data_parallel import activation_type
from meshwright.runtime.parallel.replicas import Replicas

SEQ_LEN = 8
"""Sequence length of the tiny model."""
WARM_UP = 2
ROUNDS = 12
OWN_LAYER_ROUNDS = 6
LEAST_ROUNDS = 2
MOST_S = 12.0
"""Seconds of one comparison.  A lap that has begun is finished, and the minimum number is done in
any case."""
REDUCED_BYTES = 4
"""Bytes of an element of a gradient between ranks."""
MICRO_BATCHES = 16
"""Number of micro-batches in the tiny pipeline: enough that filling it is a small part."""

Seconds = tuple[float, float]
"""Seconds of forward and of backward of one micro-batch."""


def tiny_model(blocks: int) -> ModelGraph:
    """Return a transformer with as many tensors per block as a large one, and hardly any bytes."""
    return graph_of(
        Architecture(
            family="reference",
            hidden_size=16,
            layers=blocks,
            heads=2,
            kv_heads=2,
            head_dim=8,
            ffn_size=16,
            vocab_size=16,
            gated_mlp=True,
        ),
        name="tiny",
    )


def overheads(
    chain: Chain, model: ModelGraph, curves: Sequence[CollectiveCurve], *, device: torch.device
) -> Overheads:
    """Measure all of them; all ranks call it together and get the same.

    `chain` is the short chain of the model, undivided; `curves` are this machine's links.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    clock = Clock(device)
    unit_s = shard_unit_s(device) if world > 1 else 0.0
    sharing = (
        shard_costs(chain, model, curves, unit_s=unit_s, device=device) if world > 1 else ALONE
    )
    return Overheads(
        step_s=step_s(device),
        optimizer_s_per_parameter=optimizer_s_per_parameter(_optimizer_chain(chain, model), clock),
        pipeline_action_s=pipeline_action_s(curves, device) if world > 1 else 0.0,
        shard_unit_s=unit_s,
        overlap=sharing.overlap,
        gather_copy_s_per_byte=sharing.gather_copy_s_per_byte,
        reduce_copy_s_per_byte=sharing.reduce_copy_s_per_byte,
    )


# --- data parallelism -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOverhead:
    """Cost of data parallelism beside its collectives, and the hidden share of these."""

    overlap: float
    gather_copy_s_per_byte: float
    reduce_copy_s_per_byte: float


ALONE = ShardingOverhead(overlap=0.0, gather_copy_s_per_byte=0.0, reduce_copy_s_per_byte=0.0)


def shard_unit_s(device: torch.device) -> float:
    """Seconds per unit and pass that data parallelism takes without any communication."""
    model = tiny_model(blocks=4)
    chain = Chain(model, seq_len=SEQ_LEN, precision="fp32", tensor=1, device=device)
    wrapped = _over_data(chain, model, zero=2, device=device).module  # gathered in the first round
    times = _median_seconds(
        {
            "plain": partial(_micro_batch, chain, chain.module, Clock(device)),
            "wrapped": partial(_micro_batch, chain, wrapped, Clock(device), sync=False),
        },
        rounds=ROUNDS,
    )
    more_s = sum(times["wrapped"]) - sum(times["plain"])
    return max(0.0, more_s / 2 / len(chain.kinds))


def shard_costs(
    chain: Chain,
    model: ModelGraph,
    curves: Sequence[CollectiveCurve],
    *,
    unit_s: float,
    device: torch.device,
) -> ShardingOverhead:
    """Compare the chain under each kind of data parallelism with the chain alone.

    Three differences, each of units u with p_u bytes of parameters, o the overlap:

        ZeRO-3 forward                  Σ (1 - o) gather(p_u)     + g p_u + unit_s
        ZeRO-2 backward                 Σ (1 - o) reduce(q_u)     + r q_u + unit_s
        replicas' backward              Σ (1 - o) all_reduce(q_u) + r q_u

    Gradients have q_u bytes: they are reduced in 32 bits, also where parameters are gathered in 16.
    Where the differences are more than the collectives o is 0, else the copies g and r are.
    """
    clock = Clock(device)
    zero_3 = _over_data(chain, model, zero=3, device=device).module
    zero_2 = _over_data(chain, model, zero=2, device=device).module
    whole = _over_data(chain, model, zero=0, device=device)
    if whole.copies is not None:
        whole.copies.take_up()
    replicas = Replicas(whole.replicated, backwards=1, dtype=torch.float32)
    times = _median_seconds(
        {
            "plain": partial(_micro_batch, chain, chain.module, clock),
            "zero 3": partial(_micro_batch, chain, zero_3, clock, sync=True),
            "zero 2": partial(_micro_batch, chain, zero_2, clock, sync=True),
            "replicas": partial(_micro_batch, chain, whole.module, clock, replicas=replicas),
        },
        rounds=OWN_LAYER_ROUNDS,
    )
    gathered, reduced_bytes = (
        [
            sum(p.numel() * width(p) for p in layer.parameters() if p.requires_grad)
            for layer in chain.every.values()
        ]
        for width in (Tensor.element_size, lambda _: REDUCED_BYTES)
    )
    plain_forward_s, plain_backward_s = times["plain"]
    units_s = len(gathered) * unit_s
    gather_s = times["zero 3"][0] - plain_forward_s - units_s
    reduce_s = times["zero 2"][1] - plain_backward_s - units_s
    all_reduce_s = times["replicas"][1] - plain_backward_s
    gathers_s = _collectives_s("all_gather", gathered, curves)
    reductions_s = _collectives_s("reduce_scatter", reduced_bytes, curves)
    all_reduces_s = _collectives_s("all_reduce", reduced_bytes, curves)
    return sharing_of(
        gather=(gather_s, gathers_s),
        reduces=((reduce_s, reductions_s), (all_reduce_s, all_reduces_s)),
        gathered_bytes=sum(gathered),
        reduced_bytes=sum(reduced_bytes),
    )


def sharing_of(
    *,
    gather: tuple[float, float],
    reduces: Sequence[tuple[float, float]],
    gathered_bytes: float,
    reduced_bytes: float,
) -> ShardingOverhead:
    """Divide the seconds seen (first of each pair) among collectives (second), copies, overlap.

    >>> sharing_of(
    ...     gather=(3.0, 2.0),
    ...     reduces=((5.0, 4.0), (4.0, 2.0)),
    ...     gathered_bytes=10.0,
    ...     reduced_bytes=10.0,
    ... )
    ShardingOverhead(overlap=0.0, gather_copy_s_per_byte=0.1, reduce_copy_s_per_byte=0.15)
    >>> hidden = {"gather": (0.5, 2.0), "reduces": ((0.5, 2.0),)}
    >>> sharing_of(**hidden, gathered_bytes=10.0, reduced_bytes=10.0).overlap
    0.75
    """
    pairs = (gather, *reduces)
    seen_s, alone_s = (sum(pair[i] for pair in pairs) for i in (0, 1))
    if seen_s < alone_s:
        return ShardingOverhead(
            overlap=min(1.0, 1.0 - seen_s / alone_s),
            gather_copy_s_per_byte=0.0,
            reduce_copy_s_per_byte=0.0,
        )
    more_s = [max(0.0, seen - alone) for seen, alone in pairs]
    return ShardingOverhead(
        overlap=0.0,
        gather_copy_s_per_byte=more_s[0] / gathered_bytes,
        reduce_copy_s_per_byte=sum(more_s[1:]) / len(reduces) / reduced_bytes,
    )


def _collectives_s(
    operation: Collective, sizes_bytes: Sequence[float], curves: Sequence[CollectiveCurve]
) -> float:
    """Seconds of one collective per unit, by the measured curve of all ranks, or of the most."""
    of_operation = [curve for curve in curves if curve.operation == operation]
    most = max(curve.ranks for curve in of_operation)
    # Among groups of equally many ranks, those of the widest tier, which is measured last.
    curve = [c for c in of_operation if c.ranks == most][-1]
    return sum(interpolated_s(curve, size) for size in sizes_bytes)


def _over_data(chain: Chain, model: ModelGraph, *, zero: int, device: torch.device) -> Staged:
    """Return new layers of the same kind, for data parallelism over all ranks."""
    world = dist.get_world_size()
    mesh = Mesh(data_shard=world) if zero else Mesh(data_replicate=world)
    plan = plan_of(
        model,
        [list(chain.every)],
        seq_len=chain.seq_len,
        mesh=mesh,
        zero=zero,
        precision=chain.precision,
    )
    return chain.anew(plan, place_of(plan, device))


def _micro_batch(
    chain: Chain,
    modules: nn.Module,
    clock: Clock,
    *,
    sync: bool | None = None,
    replicas: Replicas | None = None,
) -> Seconds:
    """Run one micro-batch of one sample; `sync` is True for the last one of a step."""
    tokens, targets = chain.batch(1)
    if replicas is not None:
        modules.zero_grad()
    elif sync is not None:
        wrapped = cast(FSDPModule, modules)
        wrapped.set_is_last_backward(sync)
        wrapped.set_requires_gradient_sync(sync)
        wrapped.set_reshard_after_backward(sync)
    else:
        chain.gradients_exist()
    begin = clock.moment()
    loss = chain.whole_loss(modules, tokens, targets)
    middle = clock.moment()
    loss.backward()
    if replicas is not None:
        replicas.finish()
    end = clock.moment()
    return clock.between_s(begin, middle), clock.between_s(middle, end)


def _median_seconds(
    variants: Mapping[str, Callable[[], Seconds]], *, rounds: int
) -> dict[str, Seconds]:
    """Return each variant's median seconds, of the slowest rank each time, taken in turn."""
    taken: dict[str, list[list[float]]] = {name: [] for name in variants}
    begin_s = time.perf_counter()
    for lap in range(WARM_UP + rounds):
        # Over a slow network a lap may take many seconds, and spread little.
        if lap >= WARM_UP + LEAST_ROUNDS and slowest([time.perf_counter() - begin_s])[0] > MOST_S:
            break
        for name, run in variants.items():
            if dist.is_initialized():
                dist.barrier()
            both = slowest(run())
            if lap >= WARM_UP:
                taken[name].append(both)
    return {
        name: (median([f for f, _ in times]), median([b for _, b in times]))
        for name, times in taken.items()
    }


# --- optimizer and step -----------------------------------------------------------------------


def _optimizer_chain(chain: Chain, model: ModelGraph) -> Chain:
    """Return layers as the optimizer sees them: in 32 bits, whatever type they compute in."""
    if activation_type(chain.precision) == torch.float32:
        return chain
    return Chain(
        model, seq_len=chain.seq_len, precision="fp32", device=chain.device, script=chain.script
    )


def optimizer_s_per_parameter(chain: Chain, clock: Clock) -> float:
    """Seconds per parameter of an optimizer step, norm and clipping included, all ranks at once.

    A micro-batch before each step leaves in the caches what training leaves there.
    """
    place = Place(degrees=Mesh(), mesh=None)
    slots = chain.slots()
    groups = chain.groups(slots)
    optimizer = TorchOptimizers(slots, groups, place, device=clock.device, divisor=1.0)
    optimizer.participation = chain.participation
    totals = torch.ones(2, dtype=torch.float64, device=clock.device)

    def update() -> None:
        optimizer.step(totals, Training().clip_norm)

    times = _median_seconds(
        {
            "micro-batch": partial(_micro_batch, chain, chain.module, clock),
            "step": lambda: (clock.seconds(update), 0.0),
        },
        rounds=OWN_LAYER_ROUNDS,
    )
    return times["step"][0] / sum(slot.local.numel() for slot in optimizer.slots)


def step_s(device: torch.device) -> float:
    """Seconds of a step that neither layers nor parameters cause: data, norm, report.

    Every rank trains a copy of the tiny model.  Its optimizer and its reduction are so small that
    all of the time outside forward and backward counts as fixed.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = tiny_model(blocks=2)
    mesh = Mesh(data_replicate=world)
    names = [name for name, _ in model.chain]
    engine = token_engine(plan_of(model, [names], seq_len=SEQ_LEN, mesh=mesh), model, device=device)
    tokens = torch.zeros(1, SEQ_LEN + 1, dtype=torch.int64)
    clock = Clock(device)
    begun: list[float] = []
    updating: list[float] = []
    first = next(iter(engine.units.values()))
    first.register_forward_pre_hook(lambda *_: begun.append(clock.now_s()))
    whole = engine._optimizers.unsharded

    def begun_update() -> dict[Slot, Tensor]:
        updating.append(clock.now_s())
        return whole()

    engine._optimizers.unsharded = begun_update  # type: ignore[method-assign]

    def step() -> Seconds:
        start = clock.now_s()
        engine.step(tokens)
        return begun[-1] - start, clock.now_s() - updating[-1]

    return sum(_median_seconds({"step": step}, rounds=ROUNDS)["step"])


# --- pipeline ---------------------------------------------------------------------------------


def pipeline_action_s(curves: Sequence[CollectiveCurve], device: torch.device) -> float:
    """Seconds per forward or backward action that the pipeline's runtime adds."""
    world = dist.get_world_size()
    model = tiny_model(blocks=world)
    names = [name for name, _ in model.chain]
    stages = [names[:2], *([name] for name in names[2:-2]), names[-2:]]
    plan = plan_of(
        model, stages, seq_len=SEQ_LEN, mesh=Mesh(pipeline=world), micro_batches=MICRO_BATCHES
    )
    engine = token_engine(plan, model, device=device)
    tokens = torch.zeros(MICRO_BATCHES, SEQ_LEN + 1, dtype=torch.int64, device=device)
    clock = Clock(device)
    chain = Chain(model, seq_len=SEQ_LEN, precision="fp32", tensor=1, device=device)
    layers: dict[str, list[Seconds]] = {}

    def whole_step() -> Seconds:
        passes = clock.seconds(lambda: engine._forward_backward(tokens))
        engine.zero_grad()
        return passes, 0.0

    def each_layer() -> Seconds:
        case = Case(tensor=1, micro_batch=1, recompute="none")
        for name, seconds in trial(chain, case, clock).items():
            layers.setdefault(chain.kinds[name], []).append(seconds)
        return 0.0, 0.0

    step = _median_seconds({"step": whole_step, "layers": each_layer}, rounds=ROUNDS)["step"][0]
    kinds = dict(chain.kinds) | dict.fromkeys(names[1:-1], "block")
    mean = {
        kind: tuple(median([t[i] for t in times]) for i in (0, 1)) for kind, times in layers.items()
    }
    (slowest_s,) = slowest(
        [
            action_s(
                step,
                forward_s=[sum(mean[kinds[n]][0] for n in stage) for stage in stages],
                backward_s=[sum(mean[kinds[n]][1] for n in stage) for stage in stages],
                transfer_s=_message_s(curves),
            )
        ]
    )
    return slowest_s


def action_s(
    step: float, *, forward_s: Sequence[float], backward_s: Sequence[float], transfer_s: float
) -> float:
    """Return the seconds to add to every action for the simulated step to take `step` seconds.

    >>> order = schedule.orders("1f1b", stages=2, micro_batches=MICRO_BATCHES)
    >>> real = timeline(order, forward_s=[0.3] * 2, backward_s=[0.4] * 2).makespan_s
    >>> found = action_s(real, forward_s=[0.1] * 2, backward_s=[0.2] * 2, transfer_s=0.0)
    >>> f"{found:.3f}"
    '0.200'
    """
    order = schedule.orders(PLAIN, stages=len(forward_s), micro_batches=MICRO_BATCHES)

    def simulated_s(added_s: float) -> float:
        return timeline(
            order,
            forward_s=[seconds + added_s for seconds in forward_s],
            backward_s=[seconds + added_s for seconds in backward_s],
            transfer_s=transfer_s,
        ).makespan_s

    low, high = 0.0, step
    for _ in range(50):
        middle = (low + high) / 2
        if simulated_s(middle) < step:
            low = middle
        else:
            high = middle
    return low


def _message_s(curves: Sequence[CollectiveCurve]) -> float:
    """Seconds of a message in the tiny pipeline, over the slowest tier that it crosses."""
    messages = [curve for curve in curves if curve.operation == "send_recv"]
    return max(interpolated_s(curve, 4 * 16 * SEQ_LEN) for curve in messages)
