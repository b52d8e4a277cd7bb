"""Random partition problems small enough to list every split of them, and that list."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits


def random_instance(
    seed: int, *, sync_by_option: bool = False, forward_apart: bool = False
) -> Instance:
    """At most 6 layers, 3 stages, 3 options; half of them in whole numbers, so that many tie."""
    rng = random.Random(seed)
    layers = rng.randint(1, 6)
    stages = rng.randint(1, min(3, layers))
    whole = rng.random() < 0.5
    resident_by_option = rng.random() < 0.5

    def number(low: int, high: int) -> float:
        return float(rng.randint(low, high)) if whole else rng.uniform(low, high)

    def kind() -> tuple[Option, ...]:
        resident = number(0, 3)
        sync = number(0, 5) if rng.random() < 0.7 else 0.0
        forward = number(0, 4)
        return tuple(
            Option(
                name=f"option {k}",
                forward_s=forward if forward_apart else number(0, 4),
                backward_s=number(0, 8),
                stored_bytes=number(0, 5),
                transient_bytes=number(0, 4) if rng.random() < 0.7 else 0.0,
                resident_bytes=number(0, 4) if resident_by_option else resident,
                sync_s=number(0, 5) if sync_by_option else sync,
            )
            for k in range(rng.randint(1, 3))
        )

    kinds = tuple(kind() for _ in range(rng.randint(1, 3)))
    shared_capacity = number(3, 40)
    return Instance(
        layers=tuple(rng.randrange(len(kinds)) for _ in range(layers)),
        kinds=kinds,
        stages=tuple(
            StageLimits(
                capacity_bytes=shared_capacity if rng.random() < 0.5 else number(3, 40),
                in_flight=rng.choice([1.0, 2.0, 3.0, 1.5]),
                time_scale=1.0 if rng.random() < 0.5 else rng.uniform(0.5, 2.0),
                exposed_s=number(0, 2) if rng.random() < 0.5 else 0.0,
                fixed_bytes=number(0, 2),
            )
            for _ in range(stages)
        ),
        steady=float(rng.choice([0, 1, 3, 7, 31])),
        forward_apart=forward_apart,
        fill=rng.choice([1.0, 1.0, 0.5, 0.0]),
        credits_s=tuple(number(0, 2) for _ in kinds) if rng.random() < 0.3 else (),
        cut_s=tuple(number(0, 3) for _ in range(layers + 1)) if rng.random() < 0.3 else (),
    )


def objective_s(instance: Instance, cuts: tuple[int, ...], options: tuple[int, ...]) -> float:
    """Seconds of one split, from the definition; inf if a stage has not the bytes."""
    last = len(instance.stages) - 1
    stage_s, forward_s, credit_s, sync_s = [], [], 0.0, []
    for s, stage in enumerate(instance.stages):
        chosen = [
            instance.kinds[instance.layers[layer]][options[layer]]
            for layer in range(cuts[s], cuts[s + 1])
        ]
        if not chosen:
            return math.inf
        used = stage.fixed_bytes + max(o.transient_bytes for o in chosen)
        for o in chosen:
            used += o.resident_bytes + stage.in_flight * o.stored_bytes
        if used > stage.capacity_bytes * (1 + 1e-12):
            return math.inf
        seconds = sum(o.forward_s + o.backward_s for o in chosen) * stage.time_scale
        seconds += stage.exposed_s
        if instance.cut_s and s > 0:
            seconds += instance.cut_s[cuts[s]]
        if instance.cut_s and s < last:
            seconds += instance.cut_s[cuts[s + 1]]
        stage_s.append(seconds)
        layers_s = sum(o.forward_s + o.backward_s for o in chosen) * stage.time_scale
        both_ways_s = (seconds - layers_s) / 2
        forward_s.append(sum(o.forward_s for o in chosen) * stage.time_scale + both_ways_s)
        sync_s.append(sum(o.sync_s for o in chosen))
        if instance.credits_s:
            kinds = instance.layers[cuts[s] : cuts[s + 1]]
            credit_s += stage.time_scale * sum(instance.credits_s[k] for k in kinds)
    slowest_s = max(stage_s)
    if instance.forward_apart:
        backward_s = [t - f for t, f in zip(stage_s, forward_s, strict=True)]
        slowest_s = max(forward_s) + max(backward_s)
    return instance.steady * slowest_s + instance.fill * sum(stage_s) - credit_s + max(sync_s)


def all_splits(instance: Instance) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the cuts and the options of every split."""
    count, stages = len(instance.layers), len(instance.stages)
    choices = [range(len(instance.kinds[kind])) for kind in instance.layers]
    for inner in itertools.combinations(range(1, count), stages - 1):
        for options in itertools.product(*choices):
            yield (0, *inner, count), options


def least_objective_s(instance: Instance) -> float:
    """Seconds of the best split of all there are; inf if none fits."""
    return min((objective_s(instance, *split) for split in all_splits(instance)), default=math.inf)
