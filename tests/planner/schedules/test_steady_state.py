"""Steps whose steady part is skipped, against the whole simulation."""

import random
import time

import pytest

from meshwright.planner.schedules import SCHEDULES, steady_state
from meshwright.planner.schedules.schedule import Order, obstacle, orders, rank_of_stage
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.schedules.steady_state import (
    LAYERS,
    StageTimes,
    cut_of,
    extrapolated_s,
    rank_times,
)

SECONDS = (
    lambda rng: rng.uniform(0.5, 1.5),
    lambda rng: float(rng.randint(0, 4)),
    lambda rng: rng.expovariate(1.0),
    lambda rng: 1.0 + rng.randint(0, 2) * 1e-6,
    lambda rng: rng.uniform(0.95, 1.05),
    lambda rng: rng.choice((1.0, 1.01, 1.5)),
)
"""Ranks that differ, tie, differ much, nearly tie, are nearly alike, catch up with others."""


def shape_of(name: str, rng: random.Random) -> tuple[int, int, int]:
    """Return ranks, stages per rank and micro-batches that a schedule can run."""
    schedule = SCHEDULES[name]
    ranks, virtual = rng.randint(1, 8), 1
    if schedule.several_stages:
        ranks = max(2, ranks)
        virtual = 2 if schedule.placement == "v" else rng.randint(2, 3)
    count = rng.randint(2 * ranks, 30 * ranks)
    if obstacle(
        name, stages=ranks * virtual, micro_batches=count, virtual_stages=virtual
    ):  # whole groups
        count = count // ranks * ranks
    return ranks, virtual, count


def times_of(name: str, stages: int, rng: random.Random) -> StageTimes:
    drawn = rng.choice(SECONDS)
    weight_s = [drawn(rng) for _ in range(stages)]
    return StageTimes(
        forward_s=[drawn(rng) for _ in range(stages)],
        backward_s=[drawn(rng) + weight for weight in weight_s],
        weight_s=weight_s if SCHEDULES[name].splits_backward else None,
        transfer_s=[rng.choice((0.0, 0.02, 0.3, 1.0)) * drawn(rng) for _ in range(stages - 1)],
        exposed_s=[rng.choice((0.0, 0.0, 0.1)) * drawn(rng) for _ in range(stages - 1)],
    )


def differences(name: str, seed: int) -> tuple[float, bool]:
    """Return how far apart the ends of ranks are, relatively, and whether layers were looked at."""
    rng = random.Random(f"{name} {seed}")
    ranks, virtual, count = shape_of(name, rng)
    times = times_of(name, ranks * virtual, rng)
    run = timeline(
        orders(name, stages=ranks * virtual, micro_batches=count, virtual_stages=virtual),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_s=times.weight_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
    )
    found = rank_times(name, times, micro_batches=count, virtual_stages=virtual)
    most_s = max(run.makespan_s, 1e-9)
    apart = max(
        max(
            abs(found.finish_s[rank] - run.finish_s(rank)),
            abs(found.busy_s[rank] - run.busy_s(rank)),
        )
        / most_s
        for rank in range(ranks)
    )
    if SCHEDULES[name].forwards_first:
        return apart, True
    cut = cut_of(name, ranks, virtual)
    return apart, cut is not None and count >= cut.micro_batches + LAYERS * cut.period


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cases", [30, pytest.param(3000, marks=pytest.mark.matrix)])
def test_ranks_end_as_in_the_whole_simulation(
    name: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady_state, "WORTH", 0)

    found = [differences(name, seed) for seed in range(cases)]

    assert max(apart for apart, _ in found) < 1e-11
    assert sum(looked for _, looked in found) > cases / 2


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_lists_are_a_beginning_layers_and_an_end(name: str, ranks: int) -> None:
    virtual = 2 if SCHEDULES[name].several_stages else 1
    cut = cut_of(name, ranks, virtual)
    assert cut is not None

    for layers in (0, 1, 2, 7, 20):
        shape = {"stages": ranks * virtual, "virtual_stages": virtual}
        count = cut.micro_batches + layers * cut.period
        lists = orders(name, micro_batches=count, **shape)
        assert sum(map(len, lists)) == sum(
            (len(cut.begins), layers * len(cut.layer), len(cut.ends))
        )
        assert kinds_of(lists, ranks * virtual) == kinds_of_cut(name, cut, ranks, virtual, layers)


def kinds_of(lists: tuple[Order, ...], stages: int) -> list[list[int]]:
    return [["FBIW".index(kind) * stages + stage for stage, kind, _ in order] for order in lists]


def kinds_of_cut(
    name: str, cut: steady_state.Cut, ranks: int, virtual: int, layers: int
) -> list[list[int]]:
    """What a cut says that ranks do, in order, without their micro-batches."""
    stages = ranks * virtual
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual)
    lists: list[list[int]] = [[] for _ in range(ranks)]
    for part in (cut.begins, *[cut.layer] * layers, cut.ends):
        for node in part:
            lists[home[node.cost % stages]].append(node.cost)
    return lists


@pytest.mark.parametrize(
    ("name", "virtual", "forward_s", "backward_s", "transfer_s"),
    [
        ("interleaved", 2, [1.01, 1.0, 1.0, 1.0], [3.0, 3.5, 3.5, 3.0], [0.0, 1.0, 0.1]),
        ("interleaved-zb", 2, [1.0, 1.5, 1.5, 1.01, 1.01, 1.01], [3.0, 3.0, 3.5, 3.0, 3.5, 3.0],
         [1.0, 5.0, 5.0, 0.1, 5.0]),
    ],
)  # fmt: skip
def test_ranks_of_different_paces_end_a_stretch_where_one_meets_the_other(
    name: str,
    virtual: int,
    forward_s: list[float],
    backward_s: list[float],
    transfer_s: list[float],
) -> None:
    weight_s = [1.0] * len(forward_s) if SCHEDULES[name].splits_backward else None
    times = StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=transfer_s,
        exposed_s=[0.0] * len(transfer_s),
    )
    shape = {"stages": len(forward_s), "virtual_stages": virtual}
    cut = cut_of(name, len(forward_s) // virtual, virtual)
    assert cut is not None

    found = extrapolated_s(cut, rank_of_stage(name, **shape), times, 1_200)

    run = timeline(
        orders(name, micro_batches=1_200, **shape),
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=transfer_s,
    )
    ranks = range(len(forward_s) // virtual)
    assert found == pytest.approx([run.finish_s(rank) for rank in ranks], rel=1e-12)


def test_a_hundred_times_the_micro_batches_take_no_longer_to_predict() -> None:
    rng = random.Random(0)
    times = StageTimes(
        forward_s=[rng.uniform(0.9, 1.1) for _ in range(32)],
        backward_s=[rng.uniform(1.9, 2.1) for _ in range(32)],
        weight_s=None,
        transfer_s=[0.02] * 31,
        exposed_s=[0.0] * 31,
    )

    def seconds(count: int) -> float:
        started = time.process_time()
        rank_times("1f1b", times, micro_batches=count)
        return time.process_time() - started

    seconds(1_000)
    assert seconds(60_000) < 5 * seconds(1_000) + 0.1
