"""Constants that runs were made with are found again, and impossible ones are refused."""

import math
import random
from collections.abc import Mapping

import pytest

from meshwright.planner.calibration.fitting.fitted_constants import Constant
from meshwright.planner.calibration.fitting.least_squares import LEAST_RUNS, fit

RATE = Constant(name="rate", what="share of peak", usual=0.7, least=0.02, most=1.0)
LINK = Constant(name="link", what="bytes per second", usual=50.0, least=0.5, most=60.0)
FIXED = Constant(
    name="fixed", what="seconds of a step", usual=0.0, least=0.0, most=60.0, added=True
)


def seconds(run: int, values: Mapping[str, float]) -> float:
    """Invented runs: work, bytes and a fixed part differ from run to run."""
    work, size = 0.1 * 1.6 ** (run % 6), 20.0 * 2.0 ** (run % 5)
    return work / values["rate"] + size / values["link"] + values["fixed"]


def measured(truth: Mapping[str, float], runs: int, noise: float = 0.0) -> list[float]:
    rng = random.Random(runs)
    return [seconds(i, truth) * math.exp(rng.gauss(0.0, noise)) for i in range(runs)]


def test_known_constants_are_found_again() -> None:
    truth = {"rate": 0.5, "link": 30.0, "fixed": 0.3}

    found = fit([RATE, LINK, FIXED], measured(truth, 15), seconds)

    assert found.values == {name: pytest.approx(value, rel=0.02) for name, value in truth.items()}
    assert max(map(abs, found.after)) < 0.01 < max(map(abs, found.before))
    assert max(map(abs, found.left_out)) < 0.02


def test_a_rate_above_the_peak_is_refused_with_the_runs_that_want_it() -> None:
    seen = measured({"rate": 2.0, "link": 50.0, "fixed": 0.0}, 12)

    found = fit(
        [RATE], seen, lambda run, values: seconds(run, {"link": 50.0, "fixed": 0.0, **values})
    )

    [refused] = found.refused
    assert found.values == {}
    assert refused.name == "rate"
    assert "above 1" in refused.reason
    assert refused.pulled_by[0] in (5, 11)  # with the most work beside the fewest bytes, but one
    assert found.after == found.before


def test_less_than_no_seconds_are_refused() -> None:
    seen = [0.8 * each for each in measured({"rate": 0.7, "link": 50.0, "fixed": 0.0}, 9)]

    found = fit(
        [FIXED], seen, lambda run, values: seconds(run, {"rate": 0.7, "link": 50.0, **values})
    )

    [refused] = found.refused
    assert "below 0" in refused.reason


def test_too_few_runs_tell_nothing() -> None:
    truth = {"rate": 0.5, "link": 30.0, "fixed": 0.3}

    found = fit([RATE, LINK, FIXED], measured(truth, LEAST_RUNS - 1), seconds)

    assert found.values == {}
    assert {refused.name for refused in found.refused} == {"rate", "link", "fixed"}


def test_five_runs_tell_one_constant() -> None:
    found = fit(
        [RATE, LINK, FIXED], measured({"rate": 0.5, "link": 30.0, "fixed": 0.3}, 5), seconds
    )

    assert len(found.values) == 1
    assert all("explain" in refused.reason for refused in found.refused)


def test_a_constant_that_no_run_feels_stays() -> None:
    found = fit([RATE, LINK], [0.1 / 0.5] * 6, lambda run, values: 0.1 / values["rate"])

    assert found.values == {"rate": pytest.approx(0.5, rel=0.01)}
    assert found.refused[0].reason.startswith("0 runs feel it")
