"""Schedules: the orders that the papers draw, and laws that hold for any number of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.closed_forms import in_flight
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule import (
    Action,
    Order,
    csv_text,
    most_in_flight,
    orders,
    read_action,
)

SCHEDULES = st.sampled_from(["gpipe", "1f1b"])
STAGES = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 17)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "drawn"),
    [
        ("gpipe", 1, 2, ["0F0 0F1 0B0 0B1"]),
        ("gpipe", 2, 3, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", 1, 3, ["0F0 0B0 0F1 0B1 0F2 0B2"]),
        (
            "1f1b",
            3,
            4,
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        # Fewer micro-batches than stages: the first ranks run all forwards first.
        (
            "1f1b",
            4,
            2,
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"],
        ),
    ],
)
def test_orders_are_those_drawn_by_hand(
    name: str, stages: int, micro_batches: int, drawn: list[str]
) -> None:
    assert [
        " ".join(map(str, order))
        for order in orders(name, stages=stages, micro_batches=micro_batches)
    ] == drawn


@given(SCHEDULES, STAGES, MICRO_BATCHES)
def test_each_rank_runs_each_forward_and_each_backward_once(
    name: str, stages: int, micro_batches: int
) -> None:
    for rank, order in enumerate(orders(name, stages=stages, micro_batches=micro_batches)):
        expected = {Action(rank, kind, m) for kind in "FB" for m in range(micro_batches)}  # type: ignore[arg-type]
        assert set(order) == expected
        assert len(order) == len(expected)


@given(SCHEDULES, STAGES, MICRO_BATCHES)
def test_a_backward_comes_after_its_forward(name: str, stages: int, micro_batches: int) -> None:
    for order in orders(name, stages=stages, micro_batches=micro_batches):
        for position, action in enumerate(order):
            if action.kind == "B":
                assert action._replace(kind="F") in order[:position]


@given(STAGES, MICRO_BATCHES)
def test_in_flight_micro_batches_are_those_of_the_memory_model(
    stages: int, micro_batches: int
) -> None:
    every = orders("1f1b", stages=stages, micro_batches=micro_batches)
    assert [in_flight(order) for order in every] == [
        min(micro_batches, stages - stage) for stage in range(stages)
    ]
    for order in orders("gpipe", stages=stages, micro_batches=micro_batches):
        assert in_flight(order) == micro_batches


@given(SCHEDULES, STAGES, MICRO_BATCHES)
def test_the_count_in_closed_form_is_that_of_the_orders(
    name: str, stages: int, micro_batches: int
) -> None:
    for stage, order in enumerate(orders(name, stages=stages, micro_batches=micro_batches)):
        counted = most_in_flight(name, stage, stages=stages, micro_batches=micro_batches)

        assert counted == in_flight(order)


@given(SCHEDULES, STAGES, MICRO_BATCHES)
def test_no_order_waits_for_itself(name: str, stages: int, micro_batches: int) -> None:
    """Run every rank as soon as its next action has its inputs: all of them must finish."""
    ranks = orders(name, stages=stages, micro_batches=micro_batches)

    done = run(ranks)

    assert len(done) == sum(map(len, ranks))


def run(ranks: tuple[Order, ...]) -> set[Action]:
    done: set[Action] = set()
    position = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(ranks):
            if position[rank] == len(order):
                continue
            action = order[position[rank]]
            needs = []
            if action.kind == "F" and action.stage > 0:
                needs.append(action._replace(stage=action.stage - 1))
            if action.kind == "B" and action.stage < len(ranks) - 1:
                needs.append(action._replace(stage=action.stage + 1))
            if done.issuperset(needs):
                done.add(action)
                position[rank] += 1
                moved = True
    return done


@given(st.integers(0, 10**6 - 1), st.sampled_from("FBIW"), st.integers(0, 10**9 - 1))
def test_an_action_reads_back(stage: int, kind: str, micro_batch: int) -> None:
    action = Action(stage, kind, micro_batch)  # type: ignore[arg-type]

    assert read_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0 3F0", "२F0", "2f0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="is no action"):
        read_action(text)


def test_an_unknown_schedule_names_the_known_ones() -> None:
    with pytest.raises(DocumentError, match="known: 1f1b, gpipe"):
        orders("zigzag", stages=2, micro_batches=2)
    with pytest.raises(DocumentError, match="known: 1f1b, gpipe"):
        most_in_flight("zigzag", 0, stages=2, micro_batches=2)


def test_a_schedule_is_a_line_for_each_rank() -> None:
    assert csv_text(orders("1f1b", stages=2, micro_batches=1)) == "0F0,0B0\n1F0,1B0\n"
