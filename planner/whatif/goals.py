"""Goals of a study: which of them an outcome misses at its midpoint, and how surely it keeps each.

Probabilities of time and cost are shares of the futures of `planner.whatif.monte_carlo`, the same
ones that say which candidate is the cheapest; a figure with one cause has them in closed form.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.whatif.monte_carlo import drawn_figure
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.pricing.economics import HOURS_PER_YEAR
from meshwright.planner.whatif.probabilities import probability_within
from meshwright.planner.whatif.study import Goal, Order


def _limits(
    goal: Goal, outcome: CandidateOutcome
) -> list[tuple[str, float | None, float | None, str]]:
    """Return each goal by name with the outcome's figure, the limit and their unit.

    The figure is None where it is not known.
    """
    result = outcome.result_hours if outcome.hours is not None else None
    spans = (outcome.outlay_usd, outcome.watts, outcome.carbon_kg)
    outlay, watts, carbon = (None if span is None else span.value for span in spans)
    of_year = None if outcome.hours is None else outcome.hours.value
    return [
        ("hours of a year", of_year, HOURS_PER_YEAR if outcome.jobs else None, "hours"),
        ("deadline", None if result is None else result.value / 24, goal.deadline_days, "days"),
        ("budget", outlay, goal.budget_usd, "USD"),
        ("power cap", watts, goal.power_cap_w, "W"),
        ("emission cap", carbon, goal.emission_cap_kg, "kg"),
    ]


def misses(goal: Goal, outcome: CandidateOutcome) -> list[str]:
    """Return the goals that an outcome misses at its midpoint, with its figure and the limit."""
    missed = []
    for name, figure, limit, unit in _limits(goal, outcome):
        if limit is None:
            continue
        if figure is None:
            missed.append(f"{name}: not known")
        elif figure > limit * (1 + ROUNDING):
            missed.append(f"{name}: {_number(figure)} of {_number(limit)} {unit}")
    return missed


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def chances_of(goal: Goal, outcome: CandidateOutcome) -> dict[str, float]:
    """Return the probability that each goal is met; none of a figure that is not known."""
    return {
        name: _chance(name, outcome, limit * (1 + ROUNDING))
        for name, figure, limit, _ in _limits(goal, outcome)
        if figure is not None and limit is not None
    }


def _chance(name: str, outcome: CandidateOutcome, limit: float) -> float:
    if name == "hours of a year":
        return _share(outcome, "time", limit)
    if name == "deadline":
        return _share(outcome, "time", 24 * limit)
    if name == "emission cap":
        assert outcome.grams_per_kwh is not None  # its emissions are known
        return _share(outcome, "energy", 1e6 * limit / outcome.grams_per_kwh)
    if name == "budget" and outcome.capital_usd is None:
        return _share(outcome, "cost", limit)
    figure = outcome.outlay_usd if name == "budget" else outcome.watts
    assert figure is not None
    return probability_within(figure, limit)


def _share(outcome: CandidateOutcome, by: Order, limit: float) -> float:
    """Return the share of futures in which a figure is no greater than a limit."""
    drawn = drawn_figure(outcome, by)
    assert drawn is not None  # its midpoint is known
    return float(np.mean(drawn <= limit))
