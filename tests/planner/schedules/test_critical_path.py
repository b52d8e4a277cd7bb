"""Longest paths of steps: what they take where they were found, and everywhere else."""

import random

import pytest

from meshwright.planner.schedules import SCHEDULES
from meshwright.planner.schedules.schedule import orders
from meshwright.planner.schedules.simulate import timeline
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
