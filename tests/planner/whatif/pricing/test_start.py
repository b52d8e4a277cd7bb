"""Hours before a run trains are paid and waited for; figures are by hand."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.planner.whatif import evaluate as sizing
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.monte_carlo import drawn_figure
from meshwright.planner.whatif.planning import plan_candidate, year_of
from tests.planner.whatif.test_study import study

QUOTE = {"date": "2026-11", "source": "a quote"}
RENT = {"usd_per_device_hour": 2.0, "low": 2.0, "high": 2.0, **QUOTE}
START = {"value": 3.0, "low": 1.5, "high": 9.0, "source": "by hand"}
OFFERS = [{"cluster": "8xa10g", "rent": RENT}]


def test_hours_before_a_run_are_paid_and_waited_for() -> None:
    at_once, later = study(offers=OFFERS), study(offers=OFFERS, assumptions={"start_hours": START})
    [candidate] = candidates_of(at_once)
    planned = plan_candidate(at_once, "gpt2", candidate)
    first = evaluate(at_once, "gpt2", candidate, planned)
    [slow] = candidates_of(later)
    second = evaluate(later, "gpt2", slow, planned)

    assert first.hours is not None and second.hours is not None
    assert second.hours.value == pytest.approx(first.hours.value + 3.0)
    assert first.usd is not None and second.usd is not None
    assert second.usd.value - first.usd.value == pytest.approx(3.0 * 8 * 2.0)

    rng, step, goodput = random.Random(7), second.step_s, second.goodput
    assert step is not None and goodput is not None

    def drawn(value: float, low: float, high: float) -> float:
        z = rng.gauss(0.0, 1.0)
        return value * math.exp(math.log((high if z > 0 else low) / value) * abs(z) / 1.2815516)

    limit, below = second.hours.value, 0
    for _ in range(40_000):
        hours = first.hours.value * drawn(step.value, step.low, step.high) / step.value
        hours *= goodput.value / drawn(goodput.value, goodput.low, goodput.high)
        below += hours + drawn(3.0, 1.5, 9.0) <= limit
    times = drawn_figure(second, "time")
    assert times is not None
    assert (times <= limit).mean() == pytest.approx(below / 40_000, abs=0.02)


def test_each_run_of_a_year_starts() -> None:
    jobs = [{"name": "trials", "model": "gpt2", "tokens": 1e9, "runs_a_year": 12.0}]
    asked = study(models=[], goal={}, jobs=jobs, offers=OFFERS, assumptions={"start_hours": START})
    [candidate] = candidates_of(asked)
    plain = study(offers=OFFERS)
    planned = plan_candidate(plain, "gpt2", candidates_of(plain)[0])
    once = evaluate(plain, "gpt2", candidates_of(plain)[0], planned)
    year = evaluate(asked, asked.rows[0], candidate, year_of([(asked.jobs[0], planned)]))

    assert once.hours is not None and year.hours is not None
    assert year.hours.value == pytest.approx(12 * (once.hours.value + 3.0))
    assert year.jobs[0].hours == pytest.approx(once.hours.value + 3.0)


def test_a_budget_pays_for_the_start_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 1,000 node hours on n nodes costs 16 (1,000 + 3 n): 20,000 USD pay for 83."""
    asked = study(
        goal={"tokens": 1e9, "budget_usd": 20_000.0, "confidence": 0.5},
        work={"framework": "native"},
        offers=[{"cluster": "{n}x8xa10g", "solve": "afford", "rent": RENT}],
        assumptions={"start_hours": {**START, "low": 3.0, "high": 3.0}, "quota_devices": 4096},
    )
    found = {}

    def evaluated(question: object, model: str, candidate: object, store: object) -> object:
        n = candidate.devices // 8  # type: ignore[attr-defined]
        usd = 16.0 * (1000.0 + 3.0 * n)
        found[n] = usd
        chances = {"budget": float(usd <= 20_000.0)}
        return type("Outcome", (), {"fits": True, "chances": chances, "idle": 0})()

    monkeypatch.setattr(sizing, "evaluate", evaluated)
    assert sizing.size_of(asked, 0, "gpt2") == 83
    assert found[83] == 19_984.0


def test_an_order_in_six_months_comes_later_at_the_price_of_then() -> None:
    """By hand: rents fall by a fifth a year: 2.00 become 1.79 in half a year; 182.5 days later."""
    rent = {"usd_per_device_hour": 2.0, "low": 2.0, "high": 2.0, **QUOTE}
    offers = [
        {"name": "now", "cluster": "8xa10g", "rent": rent},
        {"name": "later", "cluster": "8xa10g", "rent": rent, "wait_months": 6.0},
    ]
    asked = study(offers=offers, assumptions={"rent_change_a_year": -0.2})
    now, later = candidates_of(asked)
    planned = plan_candidate(asked, "gpt2", now)
    first, second = (evaluate(asked, "gpt2", c, planned) for c in (now, later))

    assert first.usd is not None and second.usd is not None
    assert second.usd.value == pytest.approx(first.usd.value * 0.8**0.5)
    assert first.result_hours is not None and second.result_hours is not None
    assert second.result_hours.value == pytest.approx(first.result_hours.value + 24 * 182.5)
    quote = later.priced.quote
    assert quote is not None
    assert quote.low < quote.value < quote.high
