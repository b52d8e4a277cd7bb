"""Peak memory of a rank that holds several stages, or splits its backwards.

The rank's order is walked action by action.  A micro-batch holds a stage's stored bytes from its
forward to its B or I, and from I to W what `kept_bytes` of planner.costs.calibration says.  While
an action runs, its stage holds what the layers so far have stored, what those behind have left for
W, and the working memory of one of them.  Gradients and gathered parameters count whole at any
time, since torch's pipelining keeps both from a stage's first backward to the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.costs.layout_costs import LayoutCosts
from planner.costs.memory import BUCKETS
from planner.costs.strategy import StrategyParts
from planner.schedule import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of one micro-batch on one stage.  Moments are (stored, working) at the fullest."""

    stored: float
    kept: float
    forward: tuple[float, float]
    backward: tuple[float, float]
    input_backward: tuple[float, float]
    buffers: float


def rank_memory_parts(
    costs: LayoutCosts,
    stages: Mapping[int, Sequence[StrategyParts]],
    order: Order,
    *,
    last_stage: int,
) -> dict[str, float]:
    """Return peak bytes of a rank by cause; `stages` are its stages' layers in order."""
    held = {
        stage: _held(layers, costs.boundary_bytes, first=stage == 0, last=stage == last_stage)
        for stage, layers in stages.items()
    }
    every = [layer for layers in stages.values() for layer in layers]
    streaming = (0.0, streamed_bytes(every), 0.0)
    activations, transient, buffers = max(_fullest(order, held), streaming, key=sum)
    dynamic = {
        "parameters": sum(
            layer.states.parameters_bytes + layer.states.gathered_bytes for layer in every
        ),
        "gradients": sum(layer.states.gradients_bytes for layer in every),
        "optimizer": sum(layer.states.optimizer_bytes for layer in every),
        "activations": activations,
        "transient": transient,
        "pipeline buffers": buffers + 2 * len(stages) * costs.boundary_bytes,
    }
    return {
        **dynamic,
        "context": costs.context_bytes,
        "slack": (costs.slack - 1.0) * sum(dynamic.values()),
    }


def _held(
    layers: Sequence[StrategyParts], boundary_bytes: float, *, first: bool, last: bool
) -> _Held:
    stored = [layer.stored_bytes for layer in layers]
    kept = [layer.figures.kept_bytes for layer in layers]
    forward, backward, input_backward = [], [], []
    for at, (layer, beside) in enumerate(zip(layers, moving_beside(layers), strict=True)):
        so_far = sum(stored[: at + 1])
        working = layer.backward_transient_bytes + beside
        forward.append((so_far, layer.forward_transient_bytes + beside))
        backward.append((so_far, working))
        # At its end the layer itself has left its part for W too.
        behind = sum(kept[at:])
        input_backward.append((so_far + behind, working))
    received = 0 if first or layers[0].stores_input else 1
    sent = 0 if last else 1
    return _Held(
        stored=sum(stored),
        kept=sum(kept),
        forward=max(forward, key=sum),
        backward=max(backward, key=sum),
        input_backward=max(input_backward, key=sum),
        buffers=(received + sent) * boundary_bytes,
    )


def _fullest(order: Order, held: Mapping[int, _Held]) -> tuple[float, float, float]:
    """Return (activations, working memory, buffers of micro-batches in flight) at the peak."""
    alive = buffers = most_bytes = 0.0
    most = (0.0, 0.0, 0.0)
    for stage, kind, _ in order:
        own = held[stage]
        if kind == "F":
            stored, working = own.forward
            buffers += own.buffers
            here = alive + stored, working, buffers
            alive += own.stored
        elif kind == "W":
            here = alive, 0.0, buffers
            alive -= own.kept
        else:
            alive -= own.stored
            stored, working = own.backward if kind == "B" else own.input_backward
            here = alive + stored, working, buffers
            buffers -= own.buffers
            alive += own.kept if kind == "I" else 0.0
        here_bytes = here[0] + here[1] + here[2]
        if here_bytes > most_bytes:
            most, most_bytes = here, here_bytes
    return most


def moving_beside(layers: Sequence[StrategyParts]) -> list[float]:
    """Return for each layer of a stage the bytes that the layer before has on the way beside it.

    Only offloaded layers leave or fetch anything while another one runs.
    """
    moving = [
        layer.treated.moving_bytes if layer.activations == "offload" else 0.0 for layer in layers
    ]
    before = [0.0, *moving[:-1]]
    return [
        size if layer.activations == "offload" else 0.0
        for layer, size in zip(layers, before, strict=True)
    ]


def host_bytes(stages: Mapping[int, Sequence[StrategyParts]], order: Order) -> float:
    """Return the most bytes that a rank has on the host."""
    resident = sum(layer.states.host_bytes for layers in stages.values() for layer in layers)
    each = {
        stage: sum(layer.treated.host_bytes for layer in layers) for stage, layers in stages.items()
    }
    alive = most = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            alive += each[stage]
            most = max(most, alive)
        elif kind != "W":
            alive -= each[stage]
    return resident + most


def streamed_bytes(layers: Sequence[StrategyParts]) -> float:
    """Return the most bytes of moments from the host that the optimizer's step has at a time."""
    bucket = max(layer.states.bucket_bytes for layer in layers)
    return min(BUCKETS * bucket, sum(layer.states.host_bytes for layer in layers))
