"""Collectives are measured between real processes; what must hold on any machine is checked."""

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.documents.profile import CollectiveCurve
from meshwright.profiler import links
from meshwright.profiler.clock import slowest
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
SIZES = (links.KIB, 64 * links.KIB, 8 * links.MIB)


def measured(degree: int) -> tuple[list[CollectiveCurve], list[float]]:
    told: list[float] = []
    curves = links.curves(
        links.groups_of(degree, "memory"),
        device=CPU,
        sizes_bytes=SIZES,
        budget_s=0.5,
        progress=told.append,
    )
    return curves, told


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_operation_has_a_curve_and_all_ranks_know_the_same() -> None:
    (curves, told), (other, _) = on_ranks(2, measured, 2)

    assert [curve.operation for curve in curves] == list(links.OPERATIONS)
    assert all([point.size_bytes for point in curve.points] == list(SIZES) for curve in curves)
    assert curves == other
    assert told == sorted(told)
    assert told[-1] <= 1.0


@pytest.mark.ranks
@pytest.mark.matrix
def test_eight_megabytes_take_longer_than_a_kilobyte() -> None:
    # A machine that others use stalls measurements; the least of several is of the links.
    least: dict[str, list[float]] = {}
    for _ in range(10):
        (curves, _), _ = on_ranks(2, measured, 2)
        for curve in curves:
            ends = [curve.points[0].seconds, curve.points[-1].seconds]
            least[curve.operation] = list(map(min, least.get(curve.operation, ends), ends))
        if all(large > small > 0 for small, large in least.values()):
            return
    pytest.fail(f"seconds of a kilobyte and of eight megabytes: {least}")


@pytest.mark.ranks
@pytest.mark.matrix
def test_groups_of_two_among_four_ranks_measure_at_the_same_time() -> None:
    results = on_ranks(4, measured, 2)

    assert all(curve.ranks == 2 for curves, _ in results for curve in curves)
    assert results[0][0] == results[3][0]  # the slowest of both groups, known to all


@pytest.mark.ranks
def test_a_send_goes_there_and_back_again() -> None:
    def work() -> list[float]:
        group = links.groups_of(2, "memory")
        buffer = torch.full((4,), float(dist.get_rank()))
        message = links._half_round_trip(buffer, group)
        message()
        there = buffer.clone()
        buffer += 10
        message()
        return [*there.tolist()[:1], *buffer.tolist()[:1]]

    assert on_ranks(2, work) == [[0.0, 10.0], [0.0, 10.0]]


@pytest.mark.ranks
def test_a_repetition_takes_as_long_as_its_slowest_rank() -> None:
    def work() -> list[float]:
        rank = dist.get_rank()
        return slowest([1.0 + rank, 5.0 - rank])

    assert on_ranks(2, work) == [[2.0, 5.0], [2.0, 5.0]]
