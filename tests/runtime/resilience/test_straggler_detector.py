"""Steps that leave their range are said once with the part and the rank; uneven ones are not."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.survival import Paces
from meshwright.runtime.resilience.heartbeat import BEACONS, Beacon, beacons, own_seconds
from meshwright.runtime.resilience.straggler_detector import STEPS, WINDOW, WINDOWS
from tests.runtime.cases import unlike
from tests.runtime.rooms import plan_of

FOUR = plan_of(data=4)


def test_a_step_in_its_range_says_nothing() -> None:
    assert Paces(FOUR).live(1000, lambda rank, step: (0.0, 0.8)) == []


def test_slow_data_of_one_rank_is_named() -> None:
    found = Paces(FOUR).live(60, lambda rank, step: (0.4 if rank == 2 else 0.01, 0.8))

    (drift,) = found
    assert (drift.cause, drift.rank, drift.after_step) == ("data", 2, 5 + STEPS)
    assert drift.measured_s == pytest.approx(1.4, rel=0.01)
    assert "rank 2 reads a batch in 400 ms" in drift.text
    assert "900 ms to 1.1 s were predicted" in drift.text


def test_slow_work_of_one_rank_is_named_and_so_is_a_link_that_all_wait_for() -> None:
    (work,) = Paces(FOUR).live(60, lambda rank, step: (0.0, 1.6 if rank == 3 else 0.8))
    (all_work,) = Paces(FOUR).live(60, lambda rank, step: (0.0, 1.6))
    (link,) = Paces(FOUR, wire_s=0.9).live(60, lambda rank, step: (0.0, 0.8))
    (fast,) = Paces(FOUR).live(60, lambda rank, step: (0.0, 0.3))

    assert (work.cause, work.rank) == ("backward", 3)
    assert (all_work.cause, all_work.rank) == ("backward", None)
    assert "every rank works 1.6 s a step, predicted 800 ms" in all_work.text
    assert (link.cause, link.rank) == ("data communication", None)
    assert "waits 900 ms for others, predicted 200 ms" in link.text
    assert (fast.cause, fast.measured_s) == ("backward", pytest.approx(0.5))


def test_a_level_is_said_once_and_so_is_the_way_back() -> None:
    slow = range(200, 1200)
    found = Paces(FOUR).live(2000, lambda rank, step: (0.0, 1.1 if step in slow else 0.8))

    assert [drift.cause for drift in found] == ["backward", "as predicted"]
    assert found[1].text == "steps take 1 s, as predicted again"
    assert 1200 <= found[1].after_step < 1200 + 2 * STEPS


def test_a_pace_that_changes_all_the_time_is_said_less_and_less() -> None:
    found = Paces(FOUR).live(6400, lambda rank, step: (0.0, 2.0 if step // 100 % 2 else 4.0))

    assert 3 <= len(found) <= 8
    assert found[-1].after_step > 1000


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_straggler_is_named_after_three_windows_and_again_when_it_was_well(ranks: int) -> None:
    plan = plan_of(data=ranks)

    def work_s(rank: int, step: int) -> tuple[float, float]:
        return 0.0, 0.88 if rank == 1 and (step < 450 or step > 900) else 0.8

    found = Paces(plan, jitter=0.05).live(1500, work_s)

    named = [drift for drift in found if drift.cause == "straggler: work"]
    assert [drift.rank for drift in named] == [1, 1]
    assert WINDOWS * WINDOW <= named[0].after_step <= (WINDOWS + 1) * WINDOW
    assert "others with equal work " in named[0].text


def test_a_stage_of_one_rank_is_compared_with_its_own_first_steps() -> None:
    plan = plan_of(pipeline=2)
    slower = Paces(plan).live(1000, lambda rank, step: (0.0, 0.9 if rank and step > 200 else 0.8))
    unequal = Paces(plan).live(1000, lambda rank, step: (0.0, 0.8 if rank else 0.5))

    named = [drift for drift in slower if drift.cause.startswith("straggler")]
    assert [(drift.rank, drift.stage) for drift in named] == [(1, 1)]
    assert "rank 1 (stage 1) works" in named[0].text
    assert "and at first " in named[0].text
    assert [drift for drift in unequal if drift.cause.startswith("straggler")] == []


def test_ranks_are_compared_with_those_of_their_own_kind_of_pipelines() -> None:
    """Ranks 0 to 3 are two pipelines of two stages, stage by stage, 4 and 5 hold whole models."""
    plan = unlike(plan_of(data=2, pipeline=2), (2, 1, (4,)))
    usual_s = (0.8, 0.8, 0.7, 0.7, 1.5, 1.5)

    def work_s(rank: int, step: int) -> tuple[float, float]:
        return 0.0, usual_s[rank] * (1.1 if rank == 5 and step > 200 else 1.0)

    found = Paces(plan, jitter=0.02).live(1000, work_s)

    named = [drift for drift in found if drift.cause.startswith("straggler")]
    assert [(drift.rank, drift.stage) for drift in named] == [(5, 2)]
    assert "rank 5 (stage 2) works" in named[0].text
    assert "others with equal work " in named[0].text


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (4, 2), (4, 4)])
def test_a_rank_that_is_slow_from_its_first_step_is_named_beside_other_nodes(
    ranks: int, nodes: int
) -> None:
    node = ranks // nodes
    slow = Paces(plan_of(data=ranks), nodes=nodes, jitter=0.05)
    found = slow.live(900, lambda rank, step: (0.0, 0.6 if rank < node else 0.5))
    stages = Paces(plan_of(pipeline=ranks), nodes=nodes)
    unequal = stages.live(900, lambda rank, step: (0.0, 0.8 if rank else 0.5))

    named = [drift for drift in found if drift.cause.startswith("straggler")]
    assert [drift.rank for drift in named] == list(range(node))
    assert all("others with equal work " in drift.text for drift in named)
    assert all(drift.after_step <= (WINDOWS + 2) * WINDOW for drift in named)
    assert [drift for drift in unequal if drift.cause.startswith("straggler")] == []


def test_uneven_steps_are_no_drift() -> None:
    for seed, nodes in enumerate((1, 2, 4)):
        uneven = Paces(FOUR, nodes=nodes, jitter=0.2, seed=seed)
        each = 0.0, uneven.usual_s
        assert uneven.live(3000, lambda *_, each=each: each, every=5) == []


def test_a_rank_says_what_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    with beacons(2) as seen:
        monkeypatch.setenv(BEACONS, str(seen.file))
        one = Beacon(1)
        one.count_step(data_s=0.5, work_s=1.0, whole_s=2.0)
        one.count_step(data_s=0.5, work_s=1.5, whole_s=4.0)
        idle, busy = seen.paces()

        assert seen.places()[1].process == os.getpid()
    assert idle.steps == 0
    assert (busy.steps, busy.data_s, busy.work_s, busy.whole_s) == (2, 1.0, 2.5, 6.0)


def test_own_seconds_are_not_those_of_waiting() -> None:
    before_s = own_seconds()
    if not before_s:
        pytest.skip("this system does not tell how long a thread ran")
    time.sleep(0.05)
    slept_s = own_seconds() - before_s
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass

    assert slept_s < 0.04
    assert own_seconds() - before_s - slept_s > 0.04
