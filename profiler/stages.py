"""Whole stages, measured as they run: many layers one behind the other, nothing between them.

A deep stage finds other things in the caches than two layers of a kind do, and the host prepares
many layers ahead; what that makes of the sum of its layers is what a stage is measured for.  Its
bytes are counted once for the whole of it: an activation that two layers keep is counted once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.profile import StageMeasurement
from meshwright.profiler.chain import Case, Chain
from meshwright.profiler.clock import Clock, median, slowest, spread
from meshwright.profiler.layer_bytes import looks_at
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.engine.script_module import OwnScript

WARM_UP = 1
LEAST_LOOKS = 3
MOST_LOOKS = 12

Order = tuple[Case, tuple[str, ...]]
"""A setting, and the layers of a stage, the first of the model on."""


def stages(
    orders: Sequence[Order],
    model: ModelGraph,
    *,
    script: OwnScript | None = None,
    seq_len: int,
    precision: Precision,
    device: torch.device,
    budget_s: float,
    progress: Callable[[float], None] | None = None,
) -> list[StageMeasurement]:
    """Measure stages, most valuable first, as far as the budget goes; all ranks call it together.

    The first is measured whatever it takes.
    """
    clock = Clock(device)
    begin_s = clock.now_s()
    result: list[StageMeasurement] = []
    for index, (case, names) in enumerate(orders):
        (used_s,) = slowest([clock.now_s() - begin_s])
        if result and used_s * (index + 1) / index > budget_s:
            break
        stage = Chain(
            model,
            script=script,
            seq_len=seq_len,
            precision=precision,
            device=device,
            tensor=case.tensor,
            context=case.context,
            expert=case.expert,
            layers=names,
        )
        share_s = (budget_s - used_s) / (len(orders) - index)
        result.append(_measure_stage(stage, case, clock, budget_s=share_s))
        if progress:
            progress((index + 1) / len(orders))
    return result


def _measure_stage(stage: Chain, case: Case, clock: Clock, *, budget_s: float) -> StageMeasurement:
    begin_s = clock.now_s()
    seconds: list[tuple[float, float]] = []
    for look in range(WARM_UP + MOST_LOOKS):
        if look >= WARM_UP + LEAST_LOOKS and slowest([clock.now_s() - begin_s])[0] > budget_s:
            break
        both = _pass(stage, case, clock)
        if look >= WARM_UP:
            seconds.append(both)
    every = [seconds]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = all_gather_json(seconds)
    every_look = [(forward_s, backward_s) for of_rank in every for forward_s, backward_s in of_rank]
    stored, forward, backward = _bytes(stage, case)
    return StageMeasurement(
        layers=tuple(stage.kinds),
        tensor=case.tensor,
        context=case.context,
        expert=case.expert,
        micro_batch=case.micro_batch,
        seq_len=stage.seq_len,
        precision=stage.precision,
        recompute=case.recompute,
        forward_s=median([forward_s for forward_s, _ in every_look]),
        backward_s=median([backward_s for _, backward_s in every_look]),
        resident_bytes=_largest(sum(stage.resident_bytes.values())),
        stored_bytes=_largest(stored),
        forward_transient_bytes=_largest(forward),
        backward_transient_bytes=_largest(backward),
        spread=spread([f + b for f, b in every_look]),
        samples=len(every_look),
    )


def _largest(of_rank: int) -> int:
    return int(slowest([float(of_rank)])[0])


def _pass(stage: Chain, case: Case, clock: Clock) -> tuple[float, float]:
    """Return forward and backward seconds of one micro-batch, on this rank."""
    stage.gradients_exist()
    tokens, targets = stage.batch(case.micro_batch)
    layers = stage.layers(case)
    with _undisturbed(stage):
        begin = clock.moment()
        roots, gradients = _backward_roots(stage, _through(stage, layers, tokens), targets)
        middle = clock.moment()
        torch.autograd.backward(roots, gradients)
        end = clock.moment()
    return clock.between_s(begin, middle), clock.between_s(middle, end)


def _through(
    stage: Chain, layers: dict[str, torch.nn.Module], tokens: Tensor
) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = (tokens,)
    for layer in layers.values():
        outputs = stage.run(layer, outputs)
    return outputs


def _backward_roots(
    stage: Chain, outputs: tuple[Tensor, ...], targets: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return from where backward goes, and the gradients that arrive there."""
    if stage.whole:
        return [stage.loss(outputs[0], targets)], [None]
    roots = [value for value in outputs if value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def _bytes(stage: Chain, case: Case) -> tuple[int, int, int]:
    """Return bytes stored, and the peaks of forward and backward above them."""
    looks = [_memory_bytes(stage, case) for _ in range(looks_at(stage))]
    stored, forward, backward = (min(values) for values in zip(*looks, strict=True))
    return stored, forward, backward


def _memory_bytes(stage: Chain, case: Case) -> tuple[int, int, int]:
    stage.gradients_exist()
    tokens, targets = stage.batch(case.micro_batch)
    layers = stage.layers(case)
    gc.collect()
    given = (leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor))
    existing = [*stage.module.parameters(), *stage.module.buffers(), tokens, *given]
    with LiveMemory(existing=existing) as live, stage.loss_context():
        hooks = list(_left_out(live, stage.module.parameters()))
        empty_bytes = live.current_bytes
        live.reset_peak()
        roots, gradients = _backward_roots(stage, _through(stage, layers, tokens), targets)
        tensors = [*roots, *(gradient for gradient in gradients if gradient is not None)]
        begin_bytes = live.current_bytes
        stored = begin_bytes - empty_bytes - sum(t.untyped_storage().nbytes() for t in tensors)
        forward = live.peak_bytes - begin_bytes
        live.reset_peak()
        torch.autograd.backward(roots, gradients)
        backward = live.peak_of_rest_bytes - begin_bytes
        for hook in hooks:
            hook.remove()
    return stored, max(0, forward), max(0, backward)


def _left_out(
    live: LiveMemory, parameters: Iterable[torch.nn.Parameter]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Do not count gradients of parameters: what they take is no activation."""
    for parameter in parameters:
        if parameter.requires_grad:
            yield parameter.register_hook(live.leave_out)


@contextmanager
def _undisturbed(stage: Chain) -> Iterator[None]:
    """All ranks begin together, and no garbage is collected meanwhile."""
    if dist.is_initialized():
        dist.barrier()
    gc.disable()
    try:
        with stage.loss_context():
            yield
    finally:
        gc.enable()
