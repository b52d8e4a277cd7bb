"""1F1B whose ranks run forwards ahead of slow links, against times that are worked out here."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from benchmarks.closed_forms import in_flight
from meshwright.planner.documents.plan import Layout
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import read_layout, read_pins
from meshwright.planner.schedules import Shape, family_of, name_with_ahead, schedule_of
from meshwright.planner.schedules.memory_peaks import moments
from meshwright.planner.schedules.schedule import obstacle, orders
from meshwright.planner.schedules.steady_state import StageTimes, rank_times

F_S, B_S = 1.0, 2.0


def ends_s(ahead: tuple[int, ...], count: int, times: StageTimes) -> list[float]:
    """[rank] When it ends: each action behind the one before it on its rank and what it needs.

    Behind forward number w + k of a rank with w forwards of warm-up comes backward k, and behind
    that forward w + k + 1.
    """
    ranks = len(ahead) + 1
    warm_up = [ranks - 1 - rank + sum(ahead[rank:]) for rank in range(ranks)]

    @cache
    def forward_s(rank: int, m: int) -> float:
        before = 0.0
        if m:
            before = forward_s(rank, m - 1)
        if m > warm_up[rank]:
            before = max(before, backward_s(rank, m - 1 - warm_up[rank]))
        if rank:
            before = max(before, forward_s(rank - 1, m) + times.transfer_s[rank - 1])
        return before + times.forward_s[rank]

    @cache
    def backward_s(rank: int, m: int) -> float:
        before = forward_s(rank, min(m + warm_up[rank], count - 1))
        if m:
            before = max(before, backward_s(rank, m - 1))
        if rank < ranks - 1:
            before = max(before, backward_s(rank + 1, m) + times.transfer_s[rank])
        return before + times.backward_s[rank]

    return [backward_s(rank, count - 1) for rank in range(ranks)]


def uniform(ranks: int, transfer_s: list[float]) -> StageTimes:
    return StageTimes(
        forward_s=[F_S] * ranks,
        backward_s=[B_S] * ranks,
        weight_s=None,
        transfer_s=transfer_s,
        exposed_s=[0.0] * (ranks - 1),
    )


def step_s(ahead: tuple[int, ...], count: int, times: StageTimes) -> float:
    return max(rank_times(name_with_ahead("1f1b", ahead), times, micro_batches=count).finish_s)


def micro_batch_s(ahead: tuple[int, ...], times: StageTimes) -> float:
    """Seconds of a micro-batch in the steady state."""
    return (step_s(ahead, 8000, times) - step_s(ahead, 4000, times)) / 4000


def test_orders_are_those_drawn_by_hand() -> None:
    """Three ranks, one forward more ahead of the first link."""
    drawn = [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]

    written = orders("1f1b ahead=1-0", stages=3, micro_batches=5)

    assert [" ".join(map(str, order)) for order in written] == drawn


@pytest.mark.parametrize("seed", range(60))
def test_ranks_end_when_the_last_action_that_they_wait_for_lets_them(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = rng.randint(2, 5), rng.randint(1, 30)
    ahead = tuple(rng.randint(0, 3) for _ in range(ranks - 1))
    times = StageTimes(
        forward_s=[rng.uniform(0.5, 1.5) for _ in range(ranks)],
        backward_s=[rng.uniform(0.5, 3.0) for _ in range(ranks)],
        weight_s=None,
        transfer_s=[rng.choice([0.0, 0.1, 1.0, 4.0]) for _ in range(ranks - 1)],
        exposed_s=[0.0] * (ranks - 1),
    )

    run = rank_times(name_with_ahead("1f1b", ahead), times, micro_batches=count)

    assert run.finish_s == pytest.approx(ends_s(ahead, count, times), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_a_micro_batch_takes_as_long_as_the_slowest_way_there_and_back(seed: int) -> None:
    """The formula in `with_ahead`, on alike ranks."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    ahead = tuple(rng.randint(0, 2) for _ in range(ranks - 1))
    transfer_s = [rng.choice([0.0, 0.25, 1.0, 3.0]) for _ in range(ranks - 1)]

    found_s = micro_batch_s(ahead, uniform(ranks, transfer_s))

    ways_s = [
        ((j - i + 1) * (F_S + B_S) + 2 * sum(transfer_s[i:j])) / (j - i + 1 + sum(ahead[i:j]))
        for i, j in itertools.combinations_with_replacement(range(ranks), 2)
    ]
    assert found_s == pytest.approx(max(ways_s), rel=1e-3)


@pytest.mark.parametrize("ahead", [(1,), (1, 0, 2), (3, 3, 3, 3)])
def test_where_transfers_take_no_time_nothing_is_gained(ahead: tuple[int, ...]) -> None:
    times = uniform(len(ahead) + 1, [0.0] * len(ahead))

    assert step_s(ahead, 40, times) == step_s((0,) * len(ahead), 40, times)


@pytest.mark.parametrize("transfer_s", [0.3, 1.5, 2.9, 7.0])
def test_enough_forwards_ahead_hide_a_transfer(transfer_s: float) -> None:
    links, count = 3, 60
    enough = (-int(-2 * transfer_s // (F_S + B_S)),) * links
    times = uniform(links + 1, [transfer_s] * links)
    fewer = (enough[0] - 1,) * links

    # The way of the first micro-batch, and that of the last one back, are left.
    ways_s = 2 * links * transfer_s
    assert step_s(enough, count, times) == pytest.approx((count + links) * 3.0 + ways_s)
    assert step_s(fewer, count, times) > step_s(enough, count, times)


def test_one_slow_link_needs_forwards_ahead_of_it_alone() -> None:
    times = uniform(4, [0.0, 1.0, 0.0])

    assert step_s((0, 1, 0), 60, times) == step_s((1, 1, 1), 60, times)
    assert step_s((0, 1, 0), 60, times) < step_s((1, 0, 1), 60, times)
    assert step_s((1, 0, 1), 60, times) < step_s((0, 0, 0), 60, times)


@pytest.mark.parametrize("ahead", [(1,), (0, 1, 0), (2, 0, 1), (5, 5), (9,)])
@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_each_forward_ahead_holds_one_micro_batch_more(ahead: tuple[int, ...], count: int) -> None:
    ranks, name = len(ahead) + 1, name_with_ahead("1f1b", ahead)
    written = orders(name, stages=ranks, micro_batches=count)

    for rank, order in enumerate(written):
        most = min(count, ranks - rank + sum(ahead[rank:]))
        assert in_flight(order) == most
        assert schedule_of(name).counts(rank, Shape(ranks, count)) == (most, most, 0)
        assert moments(name, rank, ranks=ranks, micro_batches=count).holding.max() == most


def test_a_name_says_what_is_ahead_and_of_which_pipeline() -> None:
    assert schedule_of("1f1b ahead=1-0").ahead == (1, 0)
    assert family_of("1f1b ahead=1-0") == "1f1b"
    assert obstacle("1f1b ahead=1-0", stages=3, micro_batches=1) is None
    reason = obstacle("1f1b ahead=1-0", stages=4, micro_batches=8)
    assert reason is not None and "has 3 links, and 2 have a number" in reason[1]
    for name, why in (
        ("gpipe ahead=1", "gpipe has no forwards ahead"),
        ("1f1b ahead=0-0", "which is 1f1b: write 1f1b"),
        ("1f1b ahead=", "give a number of forwards"),
        ("1f1b ahead=1--1", "give a number of forwards"),
        ("1f1b ahead=1001", "up to 1000"),
        ("2f2b ahead=1", "'2f2b' is not known"),
    ):
        with pytest.raises(DocumentError, match=why):
            schedule_of(name)


def test_a_layout_is_read_as_it_is_printed() -> None:
    layout = Layout(tensor=2, pipeline=3, schedule="1f1b ahead=1-0", micro_batches=8)

    pins, _ = read_layout(layout.text())

    assert "1f1b ahead=1-0" in layout.text()
    assert (pins.schedule, pins.ahead) == ("1f1b", (1, 0))
    assert pins.allow(layout)
    assert not read_pins(["ahead=0"]).allow(layout)
    assert not read_pins(["ahead=1-1"]).allow(layout)
    assert read_pins(["schedule=1f1b"]).allow(layout)
    with pytest.raises(DocumentError, match="zbv has no forwards ahead"):
        read_pins(["schedule=zbv,ahead=1"])
    with pytest.raises(DocumentError, match="ahead=1 has 1 number, and pp=3 has 2 links"):
        read_pins(["pp=3,ahead=1"])
