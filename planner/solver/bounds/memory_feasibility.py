"""Test whether the layers of an instance fit, with the reason in words if they do not.

Fewer layers never need more bytes, so from each first layer a stage can hold every run up to some
longest one.  The positions that s stages can reach, each with at least one layer, follow from
those that s - 1 stages can; the chain fits if all stages together can reach its end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.solver.graph_instance import GraphInstance
from meshwright.planner.solver.partition_problem import Instance, StageLimits, leanest_bytes


def why_infeasible(instance: Instance) -> str:
    """Name the limit that no split can keep; empty if some split fits."""
    layers, stages = len(instance.layers), len(instance.stages)
    fewest = sum(stage.least_layers for stage in instance.stages)
    if fewest > layers:
        return (
            f"{_count(stages, 'stage')} need at least {_count(fewest, 'layer')}; "
            f"the chain has {layers}"
        )
    ends = [_longest_runs(instance, stage) for stage in instance.stages]
    nowhere = np.flatnonzero(np.all([end <= np.arange(layers) for end in ends], axis=0))
    if len(nowhere):
        return _too_large(instance, int(nowhere[0]))
    reached = np.zeros(layers + 1, dtype=bool)
    reached[0] = True
    for s, end in enumerate(ends):
        before, reached = reached, _reachable_ends(reached, end, instance.stages[s].least_layers)
        if not reached.any():
            return _stuck(instance, s, np.flatnonzero(before))
    return "" if reached[layers] else _too_many(instance, int(np.flatnonzero(reached)[-1]))


def why_no_split(problem: GraphInstance) -> str:
    """Name a layer that fits nowhere, or else what all of them need and what stages have."""
    chains = [device_type.chain for device_type in problem.types]
    layers = range(len(problem.chain.layers))
    some = dict(zip(reversed(problem.chain.layers), reversed(layers), strict=True))
    for layer in sorted(some.values()):
        short = min(
            leanest_bytes(chain, stage, range(layer, layer + 1)) - stage.free_bytes
            for chain in chains
            for stage in dict.fromkeys(chain.stages)
        )
        if short > 0:
            return (
                f"layer '{problem.name(layer)}' alone fits on no stage: in its minimum-memory "
                f"option it lacks at least {bytes_text(short)}"
            )
    needs = min(
        leanest_bytes(chain, min(chain.stages, key=lambda stage: stage.in_flight), layers)
        for chain in chains
    )
    free = [sorted((stage.free_bytes for stage in chain.stages), reverse=True) for chain in chains]
    most = sum(
        sum(free_bytes[: device_type.stages])
        for device_type, free_bytes in zip(problem.types, free, strict=True)
    )
    names = " and ".join(
        f"{device_type.stages} x {device_type.name}" for device_type in problem.types
    )
    return (
        f"no order of {names} and no cuts fit: in their minimum-memory options all layers need at "
        f"least {bytes_text(needs)}, and the stages have {bytes_text(most)} free at most, "
        f"{bytes_text(min(map(min, free)))} on the smallest"
    )


def _longest_runs(instance: Instance, stage: StageLimits) -> NDArray[np.intp]:
    """[first] End of the longest run that fits with minimum-memory options; `first` if none."""
    layers = np.array(instance.layers)
    levels = sorted({o.transient_bytes for table in instance.kinds for o in table})
    longest = np.arange(len(layers))
    free = stage.free_bytes + ROUNDING / 2 * abs(stage.capacity_bytes)
    for level in levels:
        lean = np.array(
            [
                min(
                    (stage.summed_bytes(o) for o in table if o.transient_bytes <= level),
                    default=np.inf,
                )
                for table in instance.kinds
            ]
        )[layers]
        if level > free:
            break
        forbidden = np.append(np.flatnonzero(np.isinf(lean)), len(layers))
        until = np.append(0.0, np.cumsum(np.where(np.isinf(lean), 0.0, lean)))
        end = np.searchsorted(until, until[:-1] + (free - level), side="right") - 1
        allowed = forbidden[np.searchsorted(forbidden, np.arange(len(layers)))]
        longest = np.maximum(longest, np.minimum(end, allowed))
    return longest


def _reachable_ends(
    before: NDArray[np.bool_], end: NDArray[np.intp], fewest: int
) -> NDArray[np.bool_]:
    """Positions where a stage of `fewest` layers or more can end if it begins at `before`."""
    change = np.zeros(len(before) + 1, dtype=int)
    for first in np.flatnonzero(before[:-1]):
        if end[first] >= first + fewest:
            change[first + fewest] += 1
            change[end[first] + 1] -= 1
    after: NDArray[np.bool_] = np.cumsum(change)[:-1] > 0
    return after


def _too_large(instance: Instance, layer: int) -> str:
    """Name the stage that comes closest to holding the layer."""
    alone = range(layer, layer + 1)
    _, s, needs, free = min(
        (needs - stage.free_bytes, s, needs, stage.free_bytes)
        for s, stage in enumerate(instance.stages)
        for needs in [leanest_bytes(instance, stage, alone)]
    )
    return (
        f"layer {layer} alone fits on no stage: stage {s} comes closest, where its minimum-memory "
        f"option needs {bytes_text(needs)} and {bytes_text(free)} are free"
    )


def _stuck(instance: Instance, s: int, firsts: NDArray[np.intp]) -> str:
    """Say that the stage cannot hold even one layer of those that the stages before leave it."""
    stage = instance.stages[s]
    begins = [int(first) for first in firsts if first < len(instance.layers)]
    if not begins:
        return (
            f"the stages before stage {s} must hold all layers, and none is left for it: "
            "ask for fewer stages"
        )
    fewest = stage.least_layers
    begins = [first for first in begins if first + fewest <= len(instance.layers)] or begins[:1]
    ends = [min(first + fewest, len(instance.layers)) for first in begins]
    needs = min(
        leanest_bytes(instance, stage, range(first, end))
        for first, end in zip(begins, ends, strict=True)
    )
    which = f"layer {begins[0]}" if len(begins) == 1 else f"any of layers {begins[0]}..{begins[-1]}"
    which += f" and the {fewest - 1} behind it" if fewest > 1 else ""
    return (
        f"stage {s} cannot hold {which}, where the stages before it may stop: that needs at "
        f"least {bytes_text(needs)} in its minimum-memory option, and "
        f"{bytes_text(stage.free_bytes)} are free"
    )


def _too_many(instance: Instance, reached: int) -> str:
    """Say how far the minimum-memory options reach, and what the whole chain would need."""
    stages = instance.stages
    layers = len(instance.layers)
    lightest = min(stages, key=lambda stage: stage.in_flight)
    needs = leanest_bytes(instance, lightest, range(layers))
    resident = sum(
        min(o.resident_bytes for o in table) for table in map(instance.options_of, range(layers))
    )
    return (
        f"even with the minimum-memory options the {_count(len(stages), 'stage')} hold only the "
        f"first {reached} of {layers} layers: all of them need at least {bytes_text(needs)}, of "
        f"which {bytes_text(resident)} resident, and the stages have "
        f"{bytes_text(sum(stage.free_bytes for stage in stages))} free, "
        f"{bytes_text(min(stage.free_bytes for stage in stages))} on the smallest"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
