"""fastest_synced against every choice of options."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver import ilp
from meshwright.planner.solver.partition_problem import (
    Instance,
    Option,
    Solution,
    StageLimits,
    broken,
)
from meshwright.planner.solver.side_constraints import HostMemory
from meshwright.planner.solver.sync_limited_knapsack import KindOptions, fastest_synced


def random_choices(rng: random.Random) -> KindOptions:
    options = rng.randint(1, 4)
    whole = rng.random() < 0.5

    def column() -> np.ndarray:
        return np.array(
            [float(rng.randint(0, 5)) if whole else rng.uniform(0, 5) for _ in range(options)]
        )

    return KindOptions(
        load_bytes=column(), time_s=column(), sync_s=column(), count=rng.randint(1, 3)
    )


@pytest.mark.parametrize("seed", range(80))
def test_the_fastest_choice_within_both_limits(seed: int) -> None:
    rng = random.Random(seed)
    groups = [random_choices(rng) for _ in range(rng.randint(1, 2))]
    budget, limit = rng.uniform(0, 20), rng.uniform(0, 20)
    layers = [group for group in groups for _ in range(group.count)]

    found = fastest_synced(groups, budget, limit)

    best_s = math.inf
    for taken in itertools.product(*[range(len(layer.time_s)) for layer in layers]):
        picks = list(zip(layers, taken, strict=True))
        if (
            sum(layer.load_bytes[o] for layer, o in picks) <= budget
            and sum(layer.sync_s[o] for layer, o in picks) <= limit
        ):
            best_s = min(best_s, sum(layer.time_s[o] for layer, o in picks))
    if best_s == math.inf:
        assert found is None
        return
    assert found is not None
    assert found[0] == pytest.approx(best_s, abs=1e-12)
    chosen = [(g, o) for g, options in zip(groups, found[1], strict=True) for o in options]
    assert len(chosen) == len(layers)
    assert sum(g.time_s[o] for g, o in chosen) == pytest.approx(best_s, abs=1e-9)
    assert sum(g.load_bytes[o] for g, o in chosen) <= budget + 1e-9
    assert sum(g.sync_s[o] for g, o in chosen) <= limit + 1e-9
    assert fastest_synced(groups, budget, limit, upper_s=best_s - 1e-9) is None


def every_count(options: int, count: int) -> np.ndarray:
    """[way, option] All ways in which `count` like layers can share the options."""
    bars = itertools.combinations(range(count + options - 1), options - 1)
    ends = [(-1, *way, count + options - 1) for way in bars]
    return np.diff(np.array(ends), axis=1) - 1


@pytest.mark.parametrize("seed", range(24))
def test_many_like_layers_against_every_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options, count = int(rng.integers(2, 5)), int(rng.integers(20, 60))
    free = rng.random(options) < 0.4
    group = KindOptions(
        load_bytes=np.where(free, 0.0, rng.uniform(0, 9, options)),
        time_s=rng.uniform(1, 2, options),
        sync_s=np.where(free, rng.uniform(0, 9, options), rng.integers(0, 2, options)),
        count=count,
    )
    end = KindOptions(rng.uniform(0, 20, 2), rng.uniform(1, 2, 2), rng.uniform(0, 20, 2), count=1)
    counts = every_count(options, count)
    load, time, sync = (
        np.add.outer(counts @ mine, its).ravel()
        for mine, its in (
            (group.load_bytes, end.load_bytes),
            (group.time_s, end.time_s),
            (group.sync_s, end.sync_s),
        )
    )
    for share in (0.05, 0.3, 0.6):
        budget, limit = float(np.quantile(load, share)), float(np.quantile(sync, share))
        within = (load <= budget) & (sync <= limit)

        found = fastest_synced([group, end], budget, limit)

        assert (found is None) == (not within.any())
        if found is not None:
            assert found[0] == pytest.approx(float(time[within].min()), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_many_like_layers_against_the_integer_program(seed: int) -> None:
    # Layers kept on the device, on the host or recomputed, on one stage with a host of its own.
    rng = random.Random(seed)
    layer_bytes = rng.uniform(5e9, 15e9)
    shares = [(1.0, 1.0), (rng.uniform(0.3, 0.7), 1.04), (rng.uniform(0.02, 0.1), 1.26)]
    kind = [
        Option(
            name=f"{share:.2f} {where}",
            forward_s=0.1,
            backward_s=0.26 * slower + (share * rng.uniform(0.01, 0.05) if where else 0.0),
            stored_bytes=0.0 if where else share * layer_bytes,
            transient_bytes=rng.choice((0.0, 1e9)),
            host_bytes=share * layer_bytes if where else 0.0,
        )
        for share, slower in shares
        for where in (0, 1)
    ]
    whole = 80 * layer_bytes
    stage = StageLimits(capacity_bytes=rng.uniform(0.05, 0.4) * whole)
    instance = Instance(
        layers=(0,) * 80,
        kinds=(tuple(kind),),
        stages=(stage,),
        steady=1.0,
        hosts=(HostMemory(capacity_bytes=rng.uniform(0.05, 0.5) * whole, ranks=(1,)),),
    )

    found, program = inner.solve(instance), ilp.solve(instance)

    assert isinstance(found, Solution)
    assert isinstance(program, Solution)
    assert broken(instance, found) is None
    assert found.objective_s == pytest.approx(program.objective_s, rel=1e-7)
