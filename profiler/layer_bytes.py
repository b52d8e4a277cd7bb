"""Bytes that layers hold, each run by itself under LiveMemory.

What is alive when only the graph refers to it is stored; peaks inside forward and backward above
that are transient, as meshwright.planner.documents.profile defines.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.profiler.chain import SAME_KIND, Case, Chain
from meshwright.runtime.core.memory_tracker import LiveMemory

DIVIDED_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayerBytes:
    """The bytes of one layer, under one case."""

    stored: int
    forward_transient: int
    backward_transient: int


def layer_bytes(chain: Chain, case: Case) -> dict[str, MeasuredLayerBytes]:
    """Return the bytes that each layer of a chain stores and needs for one micro-batch."""
    chain.gradients_exist()
    tokens, targets = chain.batch(case.micro_batch)
    layers = chain.layers(case)
    result: dict[str, MeasuredLayerBytes] = {}
    outputs: tuple[Tensor, ...] = (tokens,)
    measured: dict[str, int] = {}
    with chain.loss_context():
        for index, (name, layer) in enumerate(layers.items()):
            loss = None
            if index == len(layers) - 1:
                loss = partial(_loss, chain, targets)
            kind = chain.kinds[name]
            if measured.get(kind, 0) < SAME_KIND or loss is not None:
                measured[kind] = measured.get(kind, 0) + 1
                looks = [bytes_of(layer, outputs, loss) for _ in range(looks_at(chain))]
                result[name], outputs = least_bytes(held for held, _ in looks), looks[-1][1]
            else:
                with torch.no_grad():
                    outputs = chain.run(layer, outputs)
    return result


def _loss(chain: Chain, targets: Any, output: Tensor) -> Tensor:
    return chain.loss(output, targets)


def looks_at(chain: Chain) -> int:
    """Return the number of counts of bytes: collectives let go of tensors late, and never early."""
    return 1 if chain.division.ranks == 1 else DIVIDED_LOOKS


def least_bytes(every: Iterable[MeasuredLayerBytes]) -> MeasuredLayerBytes:
    """Return the least of each."""
    seen = list(every)
    return MeasuredLayerBytes(
        stored=min(held.stored for held in seen),
        forward_transient=min(held.forward_transient for held in seen),
        backward_transient=min(held.backward_transient for held in seen),
    )


def bytes_of(
    layer: nn.Module, values: Sequence[Tensor], loss: Callable[..., Tensor] | None
) -> tuple[MeasuredLayerBytes, tuple[Tensor, ...]]:
    """Run one layer forward and backward by itself; return its bytes and its outputs' values."""
    gc.collect()
    with LiveMemory(existing=values) as live:
        hooks = [p.register_hook(live.leave_out) for p in layer.parameters() if p.requires_grad]
        # The inputs are fresh tensors that no leaf of the graph holds: they live if the layer keeps
        # them.  Token numbers are views of the step's batch, which is there anyway.
        leaves = {
            v.dtype: torch.zeros((), dtype=v.dtype, device=v.device).requires_grad_()
            for v in values
            if v.is_floating_point()
        }
        empty_bytes = live.current_bytes
        inputs = [v + leaves[v.dtype] if v.is_floating_point() else v for v in values]
        live.reset_peak()
        output = layer(*inputs)
        if loss is not None:
            output = loss(output)
        peak_bytes = live.peak_bytes
        with_input_bytes = live.current_bytes
        del inputs
        without_input_bytes = live.current_bytes
        # From here on until backward begins, only this function's own tensors come.
        outputs = output if isinstance(output, tuple) else (output,)
        result = tuple(output.detach().clone() for output in outputs)
        root = output if loss is not None else _End.apply(*outputs)
        gradient = torch.ones_like(root)
        own_bytes = live.current_bytes - without_input_bytes
        del output, outputs
        if loss is not None:
            own_bytes += root.nbytes
        begin_bytes = live.current_bytes
        live.reset_peak()
        if root.requires_grad:  # what is frozen has nothing to do
            root.backward(gradient)
        backward_bytes = live.peak_of_rest_bytes - begin_bytes
        for hook in hooks:
            hook.remove()
    stored = begin_bytes - empty_bytes - own_bytes
    output_bytes = without_input_bytes - empty_bytes - stored
    forward_bytes = peak_bytes - empty_bytes - stored - output_bytes
    forward_bytes -= with_input_bytes - without_input_bytes  # an input that is not kept
    return (
        MeasuredLayerBytes(
            stored=stored,
            forward_transient=max(0, forward_bytes),
            backward_transient=max(0, backward_bytes),
        ),
        result,
    )


class _End(torch.autograd.Function):
    """A scalar whose backward makes the gradient of an activation, to which nothing else refers."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) if x.requires_grad else None for x in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(
            None if like is None else torch.ones(like[0], dtype=like[1], device=like[2])
            for like in ctx.like
        )
