"""Longest paths of steps: what they take where they were found, and everywhere else."""

import random

import numpy as np
import pytest

from meshwright.planner.schedules import SCHEDULES
from meshwright.planner.schedules.schedule import orders
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.schedules.steady_state import graph_of
from meshwright.planner.search.bounds.simulated_step import paces
from tests.planner.schedules.test_steady_state import shape_of, times_of


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cases", [25, pytest.param(3000, marks=pytest.mark.matrix)])
@pytest.mark.long("25-interleaved-zb", "25-zbv")
def test_paces_are_never_above_the_simulated_step(name: str, cases: int) -> None:
    """Random stages, transfers that hide and that do not, and fewer micro-batches than ranks."""
    for seed in range(cases):
        rng = random.Random(f"pace {name} {seed}")
        ranks, virtual, count = shape_of(name, rng)
        if name in ("1f1b", "gpipe", "zb-h1") and rng.random() < 0.5:
            count = rng.randint(1, 2 * ranks)
        times = times_of(name, ranks * virtual, rng)
        shape = {"stages": ranks * virtual, "micro_batches": count, "virtual_stages": virtual}
        run = timeline(
            orders(name, **shape),
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_s=times.weight_s,
            transfer_s=times.transfer_s,
            exposed_s=times.exposed_s,
        )

        rank_s = [run.busy_s(rank) / count for rank in range(ranks)]
        for steady, fill in paces(name, ranks, count, virtual):
            # Seconds of W do not count for `fill`.
            bound_s = steady * max(rank_s) + fill * (sum(rank_s) - sum(times.weight_s or ()))
            assert bound_s <= run.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_together_end_as_each_does_alone(name: str) -> None:
    rng = random.Random(f"together {name}")
    ranks, virtual, count = shape_of(name, rng)
    graph = graph_of(name, stages=ranks * virtual, micro_batches=count, virtual_stages=virtual)
    numbers = np.random.default_rng(1)
    seconds = numbers.uniform(0.1, 1.0, (4 * graph.stages, 3))
    transfer_s = numbers.uniform(0.0, 0.5, (graph.stages - 1, 3))

    together = graph.longest_of_many(seconds, transfer_s)

    for step in range(3):
        alone = graph.longest(seconds[:, step].tolist(), transfer_s[:, step].tolist())
        assert together[:, step] == pytest.approx(alone)
