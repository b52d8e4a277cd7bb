"""What stages host is never above the best of all splits, and close to counting layers one by one.

`planner.solver.bounds.path_bounds.counted_s` knows the layers at the ends in full; here the least
of each figure does.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from meshwright.planner.search.bounds.stage_capacity import Options, Stages, capacity_bounds_s
from meshwright.planner.solver.bounds.path_bounds import counted_s
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, StageLimits
from tests.planner.solver.bounds.test_path_bounds import pipeline
from tests.planner.solver.small_instances import least_objective_s, random_instance

FIGURES = ("time_s", "stored_bytes", "resident_bytes", "transient_bytes", "kept_bytes")


def least(options: tuple[Option, ...], figure: str) -> float:
    return min(getattr(option, figure) for option in options)


def bounds_s(instances: list[Instance]) -> list[float]:
    """Least objectives of chains whose commonest kind has equally many layers and options."""
    (layers,) = {max(Counter(one.layers).values()) for one in instances}
    mains = [Counter(one.layers).most_common(1)[0][0] for one in instances]
    columns = {
        name: np.array(
            [
                [getattr(option, name) for option in one.kinds[main]]
                for one, main in zip(instances, mains, strict=True)
            ]
        ).T
        for name in FIGURES
    }
    free, beside_s, beside = [], [], []
    for one, main in zip(instances, mains, strict=True):
        for s, stage in enumerate(one.stages):
            ends = {0: one.layers[0], len(one.stages) - 1: one.layers[-1]}
            kinds = {ends[s]} if s in ends else set()
            if len(one.stages) == 1:
                kinds = {one.layers[0], one.layers[-1]}
            tables = [one.kinds[kind] for kind in kinds - {main}]
            held = sum(
                least(table, "resident_bytes") + stage.in_flight * least(table, "stored_bytes")
                for table in tables
            )
            free.append(stage.free_bytes - held)
            beside_s.append(sum(least(table, "time_s") for table in tables))
            beside.append(max((least(table, "transient_bytes") for table in tables), default=0.0))
    every = [stage for one in instances for stage in one.stages]
    slowest_s, total_s = capacity_bounds_s(
        Options(**columns),
        Stages(
            counts=np.array([len(one.stages) for one in instances]),
            in_flight=np.array([float(stage.in_flight) for stage in every]),
            waiting=np.array([float(stage.waiting) for stage in every]),
            each_bytes=np.zeros(len(every)),
            free_bytes=np.array(free),
            beside_s=np.array(beside_s),
            beside_transient_bytes=np.array(beside),
        ),
        layers,
        np.zeros(len(instances)),
    )
    result = []
    for one, main, longest_s, counted in zip(instances, mains, slowest_s, total_s, strict=True):
        others_s = sum(least(one.kinds[kind], "time_s") for kind in one.layers if kind != main)
        if math.isinf(counted):
            result.append(math.inf)
            continue
        total = counted + others_s + sum(stage.exposed_s for stage in one.stages)
        exposed_s = min(stage.exposed_s for stage in one.stages)
        credits_s = sum(one.credit_s(layer) for layer in range(len(one.layers)))
        ceiling_s = max(longest_s + exposed_s, total / len(one.stages))
        result.append(one.steady * ceiling_s + one.fill * total - credits_s)
    return result


@pytest.mark.parametrize("start", [0, 150])
def test_it_is_never_above_the_best_of_all_splits(start: int) -> None:
    compared = 0
    for seed in range(start, start + 150):
        instance = random_instance(seed)
        if any(stage.time_scale != 1.0 for stage in instance.stages):
            stages = tuple(
                StageLimits(
                    capacity_bytes=stage.capacity_bytes,
                    in_flight=stage.in_flight,
                    waiting=stage.waiting,
                    exposed_s=stage.exposed_s,
                    fixed_bytes=stage.fixed_bytes,
                )
                for stage in instance.stages
            )
            instance = Instance(
                layers=instance.layers,
                kinds=instance.kinds,
                stages=stages,
                steady=instance.steady,
                fill=instance.fill,
            )
        best_s = least_objective_s(instance)

        (bound_s,) = bounds_s([instance])

        assert bound_s <= best_s + 1e-9 * abs(best_s), seed
        compared += math.isfinite(best_s)

    assert compared > 60


@pytest.mark.matrix
def test_of_pipelines_it_is_close_and_sees_most_that_cannot_fit() -> None:
    ratios, seen = [], []
    for seed in range(80):
        instance = pipeline(seed)
        best = solve(instance)

        (bound_s,) = bounds_s([instance])

        if isinstance(best, Solution):
            assert bound_s <= best.objective_s * (1 + 1e-12)
            ratios.append(bound_s / best.objective_s)
        else:
            seen.append(math.isinf(bound_s) or math.isinf(counted_s(instance)))
    assert sum(ratios) / len(ratios) > 0.93
    assert all(seen)


def test_many_pipelines_at_once_are_bounded_as_one_by_one() -> None:
    alike: dict[int, list[Instance]] = {}
    for seed in range(120):
        instance = pipeline(seed)
        alike.setdefault(instance.layers.count(1), []).append(instance)
    several = max(alike.values(), key=len)

    together = bounds_s(several)

    assert len(several) > 3
    assert together == pytest.approx([bounds_s([one])[0] for one in several], rel=1e-12)
