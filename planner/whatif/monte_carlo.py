"""All candidates drawn together: how often each is the cheapest, the fastest, the least in energy.

What candidates have in common is drawn once: an accelerator's kernels and links for all clusters of
it, failures and lost hours for all runs, a quote for all that it prices, what owning costs, what a
node draws, and deliveries.  So two offers of one plan differ by their prices alone, and a candidate
comes first as often as in the futures that can happen.  What is fixed does not move with hours.
`DRAWS` futures, always the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import NOTHING, ROUNDING
from meshwright.planner.whatif.probabilities import DRAWS, normals, outcomes_of

if TYPE_CHECKING:
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.study import Order
    from meshwright.planner.whatif.uncertain_value import UncertainValue

Draws = NDArray[np.float64]


def chances_to_be_first(outcomes: Sequence[CandidateOutcome], by: Order) -> list[float | None]:
    """Return by outcome the probability that its figure is the least of those that are known."""
    figures = [drawn_figure(outcome, by) for outcome in outcomes]
    values = [figure for figure in figures if figure is not None]
    if not values:
        return [None] * len(figures)
    table = np.stack(values)
    first = table <= table.min(axis=0) * (1 + NOTHING)  # twins share a future
    shares = iter((first / first.sum(axis=0)).mean(axis=1))
    return [None if figure is None else float(next(shares)) for figure in figures]


def drawn_figure(outcome: CandidateOutcome, by: Order) -> Draws | None:
    """Return the futures of an outcome's figure: of the goal, or of a token if it names none."""
    match by:
        case "time":
            return _time(outcome)
        case "energy":
            return _energy(outcome)
        case "carbon":
            energy, grams = drawn_figure(outcome, "energy"), outcome.grams_per_kwh
            return None if energy is None or grams is None else energy * grams
        case "cost":
            return _cost(outcome)
        case "weighted":
            return _log_weights(outcome)
        case _:
            assert_never(by)


def _duration(outcome: CandidateOutcome) -> Draws | None:
    """Return the run's hours, or the seconds of a token."""
    if outcome.tokens_per_s is None:
        return None
    if outcome.hours is None:
        return _step(outcome) / outcome.tokens_per_s.value
    start = outcome.start_hours
    if start is None:
        return outcome.hours.value * _step(outcome) / _goodput(outcome)
    training = (outcome.hours.value - start.value) * _step(outcome) / _goodput(outcome)
    return training + _draws_of(start, "start")


def _time(outcome: CandidateOutcome) -> Draws | None:
    duration = _duration(outcome)
    if duration is None or outcome.hours is None or outcome.lead_days is None:
        return duration
    return duration + 24 * _draws_of(outcome.lead_days, "delivery")


def _cost(outcome: CandidateOutcome) -> Draws | None:
    duration, hourly = _duration(outcome), outcome.usd_per_device_hour
    if duration is None or hourly is None:
        return None
    deviations = _price_normals(outcome)
    fixed, used = outcome.fixed_usd_per_device_hour, outcome.used_usd_per_device_hour
    if outcome.hours is None or outcome.usd is None:
        return outcomes_of(hourly, deviations) * outcome.devices * duration
    if outcome.term_hours is None or fixed is None or used is None:
        paid = np.maximum(duration, outcome.minimum_hours)
        cost = outcomes_of(hourly, deviations) * outcome.devices * paid
        if outcome.share_used is not None:
            fewer = outcome.share_used.value / _draws_of(outcome.share_used, "utilisation")
            cost = cost * (1 + outcome.waiting_share * (fewer - 1))
    else:
        fixed_usd = outcomes_of(fixed, deviations) * _fixed_hours(outcome, duration)
        cost = (fixed_usd + outcomes_of(used, deviations) * duration) * outcome.devices
    return cost + _drawn_data(outcome, duration)


def drawn_outlay(outcome: CandidateOutcome) -> Draws | None:
    """Return the futures of what a contract takes out of a budget; None on other terms.

    Each term that the run begins is paid whole, at the contract's price.
    """
    fixed, duration = outcome.fixed_usd_per_device_hour, _duration(outcome)
    term_hours, usd = outcome.contract_hours, outcome.capital_usd
    if term_hours is None or fixed is None or usd is None or duration is None:
        return None
    price = outcomes_of(fixed, _price_normals(outcome)) / fixed.value
    if outcome.hours is None:
        return usd * price
    kept = outcome.fixed_hours.value if outcome.jobs and outcome.fixed_hours else duration
    terms = np.maximum(1.0, np.ceil(kept / term_hours * (1 - ROUNDING)))
    return usd * price * terms + _drawn_data(outcome, duration)


def _drawn_data(outcome: CandidateOutcome, duration: Draws) -> Draws | float:
    """Return the futures of what storage and transfers cost."""
    drawn: Draws | float = 0.0
    if outcome.stored_usd_per_hour is not None:
        drawn = drawn + _draws_of(outcome.stored_usd_per_hour, "price of storage") * duration
    if outcome.moved_usd is not None:
        drawn = drawn + _draws_of(outcome.moved_usd, "price of transfers")
    return drawn


def _fixed_hours(outcome: CandidateOutcome, duration: Draws) -> Draws | float:
    """Return the hours whose fixed price is paid whole, as `fixed_hours` of an outcome."""
    assert outcome.term_hours is not None and outcome.hours is not None
    if outcome.jobs:
        return max(outcome.term_hours, outcome.hours.value)
    if not outcome.term_renews:
        return np.maximum(duration, outcome.term_hours)
    begun = np.ceil(duration / outcome.term_hours * (1 - ROUNDING))
    return outcome.term_hours * np.maximum(1.0, begun)


def _price_normals(outcome: CandidateOutcome) -> Draws:
    """Return a price's deviations: its quotes', and those of owning, which purchases share.

    A later order's price moves besides, from the same one now.
    """
    weight = outcome.price_quote_weight
    causes = (outcome.price_cause or outcome.price).split("\n")
    quote = normals(f"price {causes[0]}")
    if len(causes) > 1:  # a median over providers moves with each of them
        each = np.stack([normals(f"price {cause}") for cause in causes])
        quote = each.sum(axis=0) / math.sqrt(len(causes))
    moves = outcome.price_moves_weight
    if moves:
        quote = math.sqrt(1 - moves * moves) * quote + moves * normals("moves of prices")
    if weight == 1:
        return quote
    return weight * quote + math.sqrt(1 - weight * weight) * normals("owning")


def _energy(outcome: CandidateOutcome) -> Draws | None:
    duration = _duration(outcome)
    if duration is None or outcome.watts is None:
        return None
    return _draws_of(outcome.watts, "power") * duration


def _log_weights(outcome: CandidateOutcome) -> Draws | None:
    cost, time = _cost(outcome), _time(outcome)
    if outcome.weighted_usd is None or cost is None or time is None:
        return None
    assert outcome.day_usd is not None  # it weighs
    return cost + outcome.day_usd / 24 * time


def _step(outcome: CandidateOutcome) -> Draws:
    """Return the step's seconds over its value, from the doubts in kernels and in links."""
    if outcome.step_s is None:
        return np.ones(DRAWS)
    link = outcome.link_share
    kernels, links = (normals(f"{cause} {outcome.accelerator}") for cause in ("kernels", "links"))
    together = ((1 - link) * kernels + link * links) / np.hypot(1 - link, link)
    return outcomes_of(outcome.step_s, together) / outcome.step_s.value


def _goodput(outcome: CandidateOutcome) -> Draws | float:
    if outcome.goodput is None:
        return 1.0
    return _draws_of(outcome.goodput, "goodput") / outcome.goodput.value


def _draws_of(figure: UncertainValue, cause: str) -> Draws:
    return outcomes_of(figure, normals(cause))
