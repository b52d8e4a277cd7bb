"""Whether the layers of an instance fit at all, and in words why not.

Fewer layers never need more bytes, so the stages can hold the chain exactly if they do when each
in turn takes as many layers as it can hold in their leanest options.
"""

from __future__ import annotations

from planner.instance import ROUNDING, Instance, Stage, leanest_bytes
from planner.units import bytes_text


def why_infeasible(instance: Instance) -> str:
    """Name the limit that no split can keep; empty if some split fits."""
    layers, stages = len(instance.layers), len(instance.stages)
    if stages > layers:
        return (
            f"{_count(stages, 'stage')} need at least {_count(stages, 'layer')}; "
            f"the chain has {layers}"
        )
    for layer in range(layers):
        if not any(_holds(instance, stage, range(layer, layer + 1)) for stage in instance.stages):
            return _too_large(instance, layer)
    first = 0
    for s, stage in enumerate(instance.stages):
        end = first
        last_end = layers - (stages - s - 1)
        while end < last_end and _holds(instance, stage, range(first, end + 1)):
            end += 1
        if end == first:
            needs = leanest_bytes(instance, stage, range(first, first + 1))
            return (
                f"stage {s} cannot hold layer {first}, the first that the stages before it leave: "
                f"it needs {bytes_text(needs)} in its leanest option, "
                f"and the stage has {bytes_text(stage.free_bytes)} free"
            )
        first = end
    if first == layers:
        return ""
    return _too_many(instance, first)


def _holds(instance: Instance, stage: Stage, held: range) -> bool:
    allowance = ROUNDING / 4 * abs(stage.capacity_bytes)
    return leanest_bytes(instance, stage, held) <= stage.free_bytes + allowance


def _too_large(instance: Instance, layer: int) -> str:
    """Name the stage that comes closest to holding the layer."""
    alone = range(layer, layer + 1)
    _, s, needs, free = min(
        (needs - stage.free_bytes, s, needs, stage.free_bytes)
        for s, stage in enumerate(instance.stages)
        for needs in [leanest_bytes(instance, stage, alone)]
    )
    return (
        f"layer {layer} alone fits on no stage: stage {s} comes closest, where its leanest option "
        f"needs {bytes_text(needs)} and {bytes_text(free)} are free"
    )


def _too_many(instance: Instance, held: int) -> str:
    """Say how far the leanest options reach, and what the whole chain would need."""
    stages = instance.stages
    layers = len(instance.layers)
    lightest = min(stages, key=lambda stage: stage.in_flight)
    needs = leanest_bytes(instance, lightest, range(layers))
    resident = sum(
        min(o.resident_bytes for o in table) for table in map(instance.options_of, range(layers))
    )
    return (
        f"even with the leanest options the {_count(len(stages), 'stage')} hold only the first "
        f"{held} of {layers} layers: all of them need at least {bytes_text(needs)}, of which "
        f"{bytes_text(resident)} resident, and the stages have "
        f"{bytes_text(sum(stage.free_bytes for stage in stages))} free, "
        f"{bytes_text(min(stage.free_bytes for stage in stages))} on the smallest"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
