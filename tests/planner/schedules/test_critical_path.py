"""Longest paths of steps: what they take where they were found, and everywhere else."""

import random

import pytest

from planner.schedules import SCHEDULES
from planner.schedules.critical_path import KINDS, graph_of
from planner.schedules.schedule import orders
from planner.schedules.simulate import timeline
from planner.search.simulated_bounds import paces
from tests.planner.schedules.test_steady_state import shape_of, times_of


def seconds_of(
    name: str, stages: int, rng: random.Random
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds [kind, stage], and the same as the simulator takes them; nothing waits to send."""
    times = times_of(name, stages, rng)
    weight_s = list(times.weight_s or [0.0] * stages)
    backward_s = list(times.backward_s)
    rows = {
        "F": list(times.forward_s),
        "B": backward_s,
        "I": [b - w for b, w in zip(backward_s, weight_s, strict=True)],
        "W": weight_s,
    }
    asked = {
        "forward_s": rows["F"],
        "backward_s": backward_s,
        "weight_s": weight_s if times.weight_s is not None else None,
        "transfer_s": list(times.transfer_s),
    }
    return [one for kind in KINDS for one in rows[kind]], asked  # type: ignore[return-value]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cases", [12, pytest.param(3000, marks=pytest.mark.matrix)])
def test_a_path_is_the_step_where_it_was_found_and_no_more_elsewhere(name: str, cases: int) -> None:
    for seed in range(cases):
        rng = random.Random(f"{name} {seed}")
        ranks, virtual, count = shape_of(name, rng)
        count = max(2 * ranks, min(count, 6 * ranks) // ranks * ranks)
        shape = {"stages": ranks * virtual, "micro_batches": count, "virtual_stages": virtual}
        graph = graph_of(name, **shape)
        here, asked = seconds_of(name, ranks * virtual, rng)
        there, elsewhere = seconds_of(name, ranks * virtual, rng)
        run = timeline(orders(name, **shape), **asked)
        other = timeline(orders(name, **shape), **elsewhere)

        ends_s = graph.longest(here, asked["transfer_s"])
        for rank in range(ranks):
            path = graph.path(rank, ends_s, asked["transfer_s"])
            waits_s = sum(n * c for n, c in zip(path.hops, asked["transfer_s"], strict=True))
            assert ends_s[graph.ends[rank]] == pytest.approx(run.finish_s(rank), rel=1e-9)
            assert path.visits.ravel() @ here + waits_s == pytest.approx(
                run.finish_s(rank), rel=1e-9, abs=1e-9
            )
            waits_s = sum(n * c for n, c in zip(path.hops, elsewhere["transfer_s"], strict=True))
            assert path.visits.ravel() @ there + waits_s <= other.finish_s(rank) * (1 + 1e-9)


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
