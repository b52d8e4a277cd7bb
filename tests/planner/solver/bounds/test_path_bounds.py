"""Bounds never exceed the optimum: that of all splits on small problems, the solver's on others."""

from __future__ import annotations

import random

import pytest

from meshwright.planner.solver.bounds.path_bounds import balanced_s, counted_s
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, StageLimits
from tests.planner.solver.small_instances import least_objective_s, random_instance


def balanced_bound_s(instance: Instance) -> float:
    """Return `balanced_s` of an instance whose stages are as fast as each other."""
    kinds = instance.kinds
    return balanced_s(
        [
            (instance.layers.count(k), min(o.time_s for o in kind), min(o.sync_s for o in kind))
            for k, kind in enumerate(kinds)
            if k in instance.layers
        ],
        stages=len(instance.stages),
        exposed_s=sum(stage.exposed_s for stage in instance.stages),
        steady=instance.steady,
    )


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_counting_layers_is_never_above_the_best_of_all_splits(start: int) -> None:
    tight = 0
    for seed in range(start, start + 100):
        instance = random_instance(seed, sync_by_option=seed % 3 == 0)
        best_s = least_objective_s(instance)

        bound_s = counted_s(instance)

        assert bound_s <= best_s + 1e-9 * abs(best_s), seed
        tight += bound_s >= 0.95 * best_s

    assert tight > 40


def pipeline(seed: int) -> Instance:
    """Return a model-like chain: an embedding, many equal blocks, a head; memory is tight."""
    rng = random.Random(seed)
    count, blocks = rng.choice([1, 2, 4, 8]), rng.randint(8, 40)

    def table(time_s: float, stored: float, resident: float) -> tuple[Option, ...]:
        shares = [(1.0, 1.0, 0.1), (rng.uniform(1, 1.1), 0.6, 0.3), (1.33, 0.05, 1.0)]
        return tuple(
            Option(
                name=str(share),
                forward_s=time_s / 3,
                backward_s=time_s * (slower - 1 / 3),
                stored_bytes=stored * share,
                transient_bytes=stored * transient,
                resident_bytes=resident,
                sync_s=0.01 * resident,
            )
            for slower, share, transient in shares
        )

    micro_batches = rng.choice([1, count, 4 * count])
    kinds = (table(0.1, 1, 3), table(1.0, 4, 2), table(rng.uniform(0.5, 3), 8, 3))
    held = blocks * (2 + rng.uniform(0.05, 1.0) * 4 * min(count, micro_batches)) / count
    return Instance(
        layers=(0, *[1] * blocks, 2),
        kinds=kinds,
        stages=tuple(
            StageLimits(
                capacity_bytes=held + 10,
                in_flight=min(micro_batches, count - s),
                exposed_s=0.05 * ((s > 0) + (s < count - 1)),
            )
            for s in range(count)
        ),
        steady=micro_batches - 1,
    )


def test_bounds_are_below_and_counting_is_close_to_the_optimum_of_pipelines() -> None:
    ratios = []
    for seed in range(60):
        instance = pipeline(seed)
        best = solve(instance)

        bound_s = counted_s(instance)

        if not isinstance(best, Solution):
            continue
        assert bound_s <= best.objective_s
        assert balanced_bound_s(instance) <= best.objective_s * (1 + 1e-12)
        assert bound_s >= balanced_bound_s(instance) * 0.999
        ratios.append(bound_s / best.objective_s)

    assert len(ratios) > 40
    assert sum(ratios) / len(ratios) > 0.99


def test_whole_layers_are_counted() -> None:
    block = (Option(name="a", forward_s=1, backward_s=2),)
    stages = tuple(StageLimits(capacity_bytes=1) for _ in range(4))

    bound_s = counted_s(Instance(layers=(0,) * 9, kinds=(block,), stages=stages, steady=7))

    # One of 4 stages holds 3 of the 9 layers.
    assert bound_s == pytest.approx(7 * 9 + 27)
