"""The closed forms of all schedules against the simulated step, uniform and uneven."""

from __future__ import annotations

import random

import pytest

from benchmarks.closed_forms import closed_form, in_flight, uniform_step_s
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.simulate import Timeline, timeline

SHAPES = (
    ("gpipe", 4, 1, 8),
    ("gpipe", 5, 1, 2),
    ("1f1b", 4, 1, 8),
    ("1f1b", 6, 1, 3),
    ("interleaved", 4, 2, 8),
    ("interleaved", 3, 4, 12),
    ("zb-h1", 4, 1, 8),
    ("zb-h1", 8, 1, 16),
    ("interleaved-zb", 4, 2, 8),
    ("interleaved-zb", 3, 3, 12),
)
MIXES = ((1.0, 1.0, 1.0), (1.0, 1.4, 0.5), (1.0, 2.0, 1.0), (0.2, 0.4, 0.4), (1.0, 0.7, 1.3))


def run(
    name: str,
    virtual_stages: int,
    m: int,
    forward_s: list[float],
    input_s: list[float],
    weight_s: list[float],
    steps: int = 1,
) -> Timeline:
    """Simulate; seconds are those of each stage."""
    return timeline(
        orders(
            name,
            stages=len(forward_s),
            micro_batches=m,
            virtual_stages=virtual_stages,
            steps=steps,
        ),
        forward_s=forward_s,
        backward_s=[i + w for i, w in zip(input_s, weight_s, strict=True)],
        weight_s=weight_s,
    )


@pytest.mark.parametrize(("name", "ranks", "virtual_stages", "m"), SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_uniform_ranks_take_what_the_form_says(
    name: str, ranks: int, virtual_stages: int, m: int, mix: tuple[float, float, float]
) -> None:
    each = [[seconds / virtual_stages] * (ranks * virtual_stages) for seconds in mix]

    simulated = run(name, virtual_stages, m, *each)

    assert simulated.makespan_s == pytest.approx(
        uniform_step_s(
            name,
            ranks=ranks,
            micro_batches=m,
            virtual_stages=virtual_stages,
            forward_s=mix[0],
            input_s=mix[1],
            weight_s=mix[2],
        )
    )


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (4, 13), (7, 20)])
def test_folded_schedules_take_what_the_form_says_if_all_kinds_take_equally_long(
    name: str, ranks: int, m: int
) -> None:
    each = [0.5] * (2 * ranks)

    simulated = run(name, 2, m, each, each, each)

    assert simulated.makespan_s == pytest.approx(3.0 * m + (ranks - 1) / 2)
    form = closed_form(name, ranks=ranks, micro_batches=m, virtual_stages=2)
    assert form.step_s([3.0] * ranks, [1.0] * ranks) == pytest.approx(simulated.makespan_s)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "lowest", "highest"),
    [
        ("1f1b", 1, 1.0 - 1e-12, 1.12),
        ("interleaved", 2, 0.94, 1.13),
        ("interleaved", 4, 0.94, 1.06),
        ("zb-h1", 1, 0.99, 1.08),
        ("interleaved-zb", 2, 0.94, 1.05),
        ("zbv", 2, 0.97, 1.08),
        ("dualpipe-v", 2, 0.97, 1.08),
    ],
)
def test_uneven_stages_stay_within_the_stated_band(
    name: str, virtual_stages: int, lowest: float, highest: float
) -> None:
    rng = random.Random(0)
    ratios = []
    for _ in range(60):
        ranks = rng.choice([2, 4, 8])
        m = ranks * rng.randint(2, 4)
        stages = ranks * virtual_stages
        pace = [max(0.5, rng.gauss(1.0, 0.1)) for _ in range(stages)]
        mix = rng.choice([(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.4, 0.6)])
        each = [[share * p / virtual_stages for p in pace] for share in mix]
        home = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)
        rank_s, weight_s = [0.0] * ranks, [0.0] * ranks
        for stage, rank in enumerate(home):
            rank_s[rank] += sum(seconds[stage] for seconds in each)
            weight_s[rank] += each[2][stage]
        form = closed_form(name, ranks=ranks, micro_batches=m, virtual_stages=virtual_stages)

        simulated = run(name, virtual_stages, m, *each).makespan_s

        ratios.append(form.step_s(rank_s, weight_s) / simulated)
    assert lowest <= min(ratios) <= max(ratios) <= highest, (min(ratios), max(ratios))


@pytest.mark.parametrize(("name", "ranks", "virtual_stages", "m"), SHAPES)
def test_counts_in_flight_are_those_of_the_orders(
    name: str, ranks: int, virtual_stages: int, m: int
) -> None:
    form = closed_form(name, ranks=ranks, micro_batches=m, virtual_stages=virtual_stages)

    every = orders(
        name, stages=ranks * virtual_stages, micro_batches=m, virtual_stages=virtual_stages
    )

    assert [count * virtual_stages for count in form.in_flight] == [
        in_flight(order) for order in every
    ]


def test_the_bubble_of_uneven_chunks_waits_for_the_largest() -> None:
    # Eight layers on a rank in stages of 2, 1, 1, 1, 1, 1, 1: the long ones alike on all ranks.
    ranks, m, layer_s = 4, 8, 1.0
    counts = [2, 1, 1, 1, 1, 1, 1]
    each = [count * layer_s for count in counts for _ in range(ranks)]
    form = closed_form(
        "interleaved", ranks=ranks, micro_batches=m, virtual_stages=7, largest_stage=2 / 8
    )

    simulated = run("interleaved", 7, m, each, each, each).makespan_s

    fractional = closed_form("interleaved", ranks=ranks, micro_batches=m, virtual_stages=7)
    assert fractional.step_s([24.0] * ranks) < 0.97 * simulated
    assert 0.95 * simulated < form.step_s([24.0] * ranks) <= simulated * (1 + 1e-12)


def test_a_shape_that_the_schedule_cannot_take_has_no_form() -> None:
    with pytest.raises(DocumentError, match="micro_batches: is 6"):
        closed_form("interleaved", ranks=4, micro_batches=6, virtual_stages=2)
