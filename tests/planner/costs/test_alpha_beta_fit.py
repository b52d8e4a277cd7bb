"""Lines through points are those that the points were made from, and as few as there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.costs.alpha_beta_fit import fit_link, fitted_s
from meshwright.planner.costs.collectives import Level, collective_s, curves_by_name, interpolated_s
from meshwright.planner.documents.cluster import LinkTier
from meshwright.planner.documents.profile import CollectiveCurve, LinkPoint

SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24))


def points(seconds: dict[int, float], spread: float = 0.0) -> tuple[LinkPoint, ...]:
    return tuple(LinkPoint(size_bytes=b, seconds=s, spread=spread) for b, s in seconds.items())


def straight(
    latency_s: float, bytes_per_s: float, sizes: tuple[int, ...] = SIZES
) -> dict[int, float]:
    return {size: latency_s + size / bytes_per_s for size in sizes}


def test_one_line_gives_its_latency_and_bandwidth_back() -> None:
    found = fit_link(points(straight(2e-4, 1e9)))

    assert found is not None
    (line,) = found.pieces
    assert (line.from_bytes, line.to_bytes) == (SIZES[0], SIZES[-1])
    assert line.latency_s == pytest.approx(2e-4)
    assert line.bytes_per_s == pytest.approx(1e9)
    assert found.residual == pytest.approx(0.0, abs=1e-9)
    for size in (100, 5000, 3 * 2**20, 2**28):  # below, between and above what was measured
        assert fitted_s(found, size) == pytest.approx(2e-4 + size / 1e9)


def test_another_algorithm_for_large_messages_is_another_line() -> None:
    small, large = straight(1e-4, 2e8, SIZES[:4]), straight(1e-3, 4e9, SIZES[4:])

    found = fit_link(points(small | large))

    assert found is not None
    assert [line.to_bytes for line in found.pieces] == [SIZES[3], SIZES[-1]]
    assert found.pieces[1].bytes_per_s == pytest.approx(4e9)
    between = fitted_s(found, (SIZES[3] + SIZES[4]) / 2)
    assert between == pytest.approx((small[SIZES[3]] + large[SIZES[4]]) / 2)


def test_fewer_than_two_points_make_no_line() -> None:
    assert fit_link(points({1024: 1e-3})) is None
    assert fit_link(points({1024: 1e-3, 2048: 0.0})) is None


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=len(SIZES)))
def test_no_point_is_farther_from_its_line_than_the_residual(seconds: list[float]) -> None:
    measured = points(dict(zip(SIZES, seconds, strict=False)))

    found = fit_link(measured)

    assert found is not None
    for point in measured:
        distance = abs(fitted_s(found, point.size_bytes) / point.seconds - 1)
        assert distance <= found.residual + 1e-9
    assert all(line.latency_s >= 0 for line in found.pieces)


def test_collectives_follow_the_lines_of_a_curve_that_has_them() -> None:
    measured = points(straight(1e-3, 1e9))
    tier = LinkTier(name="network", devices=4, latency_s=0.0, bytes_per_s=1.0)
    curve = CollectiveCurve(tier="network", operation="all_reduce", ranks=4, points=measured)
    with_lines = curve.model_copy(update={"fit": fit_link(measured)})

    taken = collective_s("all_reduce", 2**30, (Level(tier, 4),), curves_by_name([with_lines]))

    assert taken == pytest.approx(1e-3 + 2**30 / 1e9)
    # Without lines the largest point's seconds grow with the size, its latency too.
    assert interpolated_s(curve, 2**30) == pytest.approx(64 * (1e-3 + 2**24 / 1e9))
