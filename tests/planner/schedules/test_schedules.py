"""Schedules with several stages per rank or split backwards: drawn orders, laws and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.closed_forms import in_flight, weight_versions
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule import (
    SCHEDULES,
    Action,
    most_in_flight,
    obstacle,
    orders,
    rank_of_stage,
    splits_backward,
)
from meshwright.planner.schedules.simulate import timeline

Shape = tuple[str, int, int, int]
"""Name, ranks, stages per rank, micro-batches."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    name = draw(st.sampled_from(list(SCHEDULES)))
    ranks = draw(st.integers(1, 6))
    micro_batches = draw(st.integers(1, 16))
    virtual_stages = 1
    if SCHEDULES[name].placement == "v":
        virtual_stages = 2
    elif "interleaved" in name:
        virtual_stages = draw(st.integers(2, 4))
        micro_batches = ranks * draw(st.integers(1, 4))
    if name == "dualpipe-v":
        micro_batches += 2 * ranks
    if name == "pipedream-2bw":
        micro_batches = max(micro_batches, ranks)
    return name, ranks, virtual_stages, micro_batches


def written(shape: Shape) -> tuple[tuple[Action, ...], ...]:
    name, ranks, virtual_stages, micro_batches = shape
    return orders(
        name,
        stages=ranks * virtual_stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
    )


@pytest.mark.parametrize(
    ("shape", "drawn"),
    [
        # Narayanan et al. (2021), figure 4, for two ranks.
        (
            ("interleaved", 2, 2, 4),
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
        # Qi et al. (2024), figure 2: W of the last rank are the latest.
        (
            ("zb-h1", 3, 1, 4),
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
                "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
            ],
        ),
        (
            ("zbv", 2, 2, 4),
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 "
                "0I2 0W2 0I3 0W3",
                "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 "
                "1I3 1W2 2W3 1W3",
            ],
        ),
    ],
)
def test_orders_are_those_drawn_by_hand(shape: Shape, drawn: list[str]) -> None:
    assert [" ".join(map(str, order)) for order in written(shape)] == [
        " ".join(line.split()) for line in drawn
    ]


@given(shapes())
def test_each_stage_does_each_micro_batch_once(shape: Shape) -> None:
    name, ranks, virtual_stages, micro_batches = shape
    stages = ranks * virtual_stages
    rank_of = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)

    every = written(shape)

    for rank, order in enumerate(every):
        assert len(set(order)) == len(order)
        assert {rank_of[action.stage] for action in order} == {rank}
    done = {action for order in every for action in order}
    for stage in range(stages):
        for m in range(micro_batches):
            kinds = "".join(sorted(k for k in "FBIW" if Action(stage, k, m) in done))  # type: ignore[arg-type]
            assert kinds in ("BF", "FIW")
    assert any(action.kind in "IW" for action in done) == splits_backward(name)
    assert sum(rank_of.count(rank) == virtual_stages for rank in range(ranks)) == ranks


@given(shapes())
def test_no_order_waits_for_itself(shape: Shape) -> None:
    _, ranks, virtual_stages, _ = shape
    ones = [1.0] * (ranks * virtual_stages)

    run = timeline(written(shape), forward_s=ones, backward_s=[2.0] * len(ones), weight_s=ones)

    for rank in range(ranks):
        assert run.finish_s(rank) <= run.makespan_s


@given(shapes())
def test_micro_batches_in_flight_are_the_published_counts(shape: Shape) -> None:
    name, p, v, m = shape

    counts = [in_flight(order) for order in written(shape)]

    expected = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in range(p)],
        "pipedream-2bw": [min(m, p - r) for r in range(p)],
        # Narayanan et al. (2021): 2 (P - r - 1) + (V - 1) P forwards of stages, and one more.
        "interleaved": [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)],
        # Qi et al. (2024): as much as the first rank of 1F1B, on every rank.
        "zb-h1": [min(m, p)] * p,
        "interleaved-zb": [v * p] * p,
        "zbv": [2 * p] * p,
        # DeepSeek's table: one more than the stages.
        "dualpipe-v": [2 * p + 1] * p,
    }
    if name == "zbv" and m < 2 * p - 1:
        assert max(counts) <= min(2 * m, 2 * p)
    else:
        assert counts == expected[name]
        assert counts == [
            most_in_flight(name, r, stages=p * v, micro_batches=m, virtual_stages=v)
            for r in range(p)
        ]


@pytest.mark.parametrize(
    ("name", "stages", "virtual_stages", "micro_batches", "message"),
    [
        ("interleaved", 8, 2, 6, "micro_batches: is 6; interleaved needs .* 4 ranks: 4 or 8"),
        ("interleaved-zb", 8, 2, 2, "micro_batches: is 2; .* its 4 ranks: 4"),
        ("interleaved", 4, 1, 4, "virtual_stages: is 1; interleaved needs at least 2"),
        ("1f1b", 8, 2, 8, "virtual_stages: is 2; 1f1b puts 1 stage on every rank"),
        ("zbv", 8, 1, 8, "virtual_stages: is 1; zbv puts 2 stages on every rank"),
        ("dualpipe-v", 12, 3, 12, "virtual_stages: is 3; dualpipe-v puts 2 stages"),
        ("dualpipe-v", 8, 2, 7, "micro_batches: is 7; dualpipe-v needs at least 8"),
        ("pipedream-2bw", 4, 1, 3, "micro_batches: is 3; .* each of its 4 ranks"),
        ("interleaved", 7, 2, 8, "virtual_stages: is 2, which does not divide 7 stages"),
        ("1f1b", 2, 1, 0, "micro_batches: is 0"),
    ],
)
def test_a_shape_that_a_schedule_cannot_take_is_refused(
    name: str, stages: int, virtual_stages: int, micro_batches: int, message: str
) -> None:
    shape = {"stages": stages, "virtual_stages": virtual_stages, "micro_batches": micro_batches}

    with pytest.raises(DocumentError, match=message):
        orders(name, **shape)
    assert obstacle(name, **shape) is not None


def test_only_a_pipeline_without_flush_goes_on_over_steps() -> None:
    with pytest.raises(DocumentError, match="steps: is 2; 1f1b ends each step"):
        orders("1f1b", stages=2, micro_batches=2, steps=2)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 6), (7, 9)])
def test_two_versions_of_the_weights_are_enough_without_flush(
    ranks: int, micro_batches: int
) -> None:
    every = orders("pipedream-2bw", stages=ranks, micro_batches=micro_batches, steps=6)

    assert max(weight_versions(order, micro_batches=micro_batches) for order in every) == 2


def test_weights_that_are_not_yet_made_are_noticed() -> None:
    order = orders("gpipe", stages=1, micro_batches=6)[0]

    with pytest.raises(DocumentError, match="0F4 needs weights that 1 steps have made"):
        weight_versions(order, micro_batches=2)
