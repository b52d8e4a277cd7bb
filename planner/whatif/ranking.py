"""Outcomes compared: order with ties, Pareto front, cheapest within a deadline, what flips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never, get_args

from meshwright.planner.whatif.monte_carlo import chances_to_be_first
from meshwright.planner.whatif.study import Order, Study

if TYPE_CHECKING:
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.uncertain_value import UncertainValue

KERNELS, LINKS, GOODPUT, PRICE = "kernels", "links", "goodput", "price"
"""Causes of a range."""
WORTH_MEASURING = 0.02
"""Share of a range below which its cause is not worth a measurement."""
PROFILE_HOURS = 0.25
"""A profile takes minutes; a booking, rather a quarter of an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """An outcome's place."""

    outcome: CandidateOutcome
    place: int
    """From 1; tied outcomes keep their order by value and share the first candidate's place."""
    tied: bool
    """Its figure differs from the best one's by no more than the study's margin."""
    pareto: bool
    """No other is at least as good in time, cost and energy, and better in one."""
    ties_at_usd_per_device_hour: float | None = None
    """The price at which it would cost what the first one costs."""
    first: dict[Order, float] = field(default_factory=dict)
    """Probability that it fits and has the least time, cost and energy of all that can be chosen:
    what is sold, misses no goal at its midpoint, and has that figure."""


def _tie_price(first: CandidateOutcome, outcome: CandidateOutcome) -> float | None:
    ours, best = _figure(outcome, "cost"), _figure(first, "cost")
    price = outcome.usd_per_device_hour
    if outcome is first or ours is None or best is None or price is None:
        return None
    beside = outcome.data_usd.value if outcome.usd is not None else 0.0
    return price.value * (best - beside) / (ours - beside) if best > beside else None


def ordered_by(study: Study, outcomes: Sequence[CandidateOutcome]) -> Order:
    """Return what outcomes are ranked by: the goal's figure, or time where none has it."""
    fitting = [outcome for outcome in outcomes if outcome.fits]
    wanted = study.goal.by
    if wanted != "time" and all(_figure(outcome, wanted) is None for outcome in fitting):
        return "time"
    return wanted


def rank_outcomes(study: Study, outcomes: Sequence[CandidateOutcome]) -> list[Rank]:
    """Return the outcomes that fit, best first.

    Behind those that meet the goal as surely as it wants come those that keep it at the midpoint of
    their range, then those that miss it, and last products that nobody sells.  Within each come
    last those whose figure is not known, for want of a price or of a power.

    Those that meet the goal as surely as the best are tied with it if their figures differ by no
    more than the margin of the larger.
    """
    by = ordered_by(study, outcomes)
    fitting = sorted(
        (outcome for outcome in outcomes if outcome.fits),
        key=lambda outcome: (
            outcome.hypothetical,
            len(outcome.misses) > 0,
            not sure(study, outcome),
            figure(outcome, by),
            outcome.candidate,
        ),
    )
    front = set(map(id, pareto(fitting)))
    chances = _first(fitting)
    result: list[Rank] = []
    for index, outcome in enumerate(fitting):
        first = fitting[0]
        tied = (
            index > 0
            and sure(study, outcome) == sure(study, first)
            and not (outcome.misses or outcome.hypothetical)
            and not (first.misses or first.hypothetical)
            and tie(figure(first, by), figure(outcome, by), study.assumptions.tie)
        )
        result.append(
            Rank(
                outcome=outcome,
                place=1 if tied or index == 0 else index + 1,
                tied=tied,
                pareto=id(outcome) in front,
                ties_at_usd_per_device_hour=_tie_price(fitting[0], outcome),
                first=chances.get(id(outcome), {}),
            )
        )
    return result


def _first(outcomes: Sequence[CandidateOutcome]) -> dict[int, dict[Order, float]]:
    """Return by the identity of each outcome that can be chosen how likely it is the least."""
    chosen = [o for o in outcomes if not (o.misses or o.hypothetical)]
    orders: dict[int, dict[Order, float]] = {id(outcome): {} for outcome in chosen}
    for by in get_args(Order):
        for outcome, chance in zip(chosen, chances_to_be_first(chosen, by), strict=True):
            if chance is not None:
                orders[id(outcome)][by] = chance * outcome.fit_probability
    return orders


def sure(study: Study, outcome: CandidateOutcome) -> bool:
    """Return whether an outcome meets each goal as likely as the study wants."""
    return outcome.chance >= study.goal.confidence


def tie(value: float, other: float, margin: float) -> bool:
    """Return whether two figures differ by no more than a share of the larger.

    >>> tie(100.0, 117.0, 0.15), tie(117.0, 100.0, 0.15), tie(100.0, 120.0, 0.15)
    (True, True, False)
    """
    return max(value, other) < math.inf and abs(value - other) <= margin * max(value, other)


def figure(outcome: CandidateOutcome, by: Order) -> float:
    """Return what an outcome is ranked by: less is better; infinite where it is not known."""
    value = _figure(outcome, by)
    return math.inf if value is None else value


def _figure(outcome: CandidateOutcome, by: Order) -> float | None:
    """Return cost, time, energy or CO2 of the goal, or of a token if the goal names none."""
    match by:
        case "time":
            assert outcome.tokens_per_s is not None  # it fits
            span = outcome.result_hours
            return 1 / outcome.tokens_per_s.value if span is None else span.value
        case "energy":
            return _value(outcome.energy_kwh, outcome, outcome.watts)
        case "carbon":
            watts, grams = outcome.watts, outcome.grams_per_kwh
            rate = None if watts is None or grams is None else watts.times(grams)
            return _value(outcome.carbon_kg, outcome, rate)
        case "cost":
            price = outcome.usd_per_device_hour
            rate = None if price is None else price.times(outcome.devices)
            return _value(outcome.usd, outcome, rate)
        case "weighted":
            return outcome.weighted_usd
        case _:
            assert_never(by)


def _value(
    span: UncertainValue | None, outcome: CandidateOutcome, rate: UncertainValue | None
) -> float | None:
    """Return a figure of the goal, or of a token at a rate."""
    return _per_token(outcome, rate) if span is None else span.value


def _per_token(outcome: CandidateOutcome, rate: UncertainValue | None) -> float | None:
    if rate is None or outcome.tokens_per_s is None:
        return None
    return rate.value / outcome.tokens_per_s.value


def pareto(outcomes: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
    """Return the outcomes that no other beats in time, cost and energy together."""
    rows = [(outcome, _coordinates(outcome)) for outcome in outcomes]
    return [
        outcome
        for outcome, mine in rows
        if not any(_beats(other, mine) for _, other in rows if other is not mine)
    ]


def _coordinates(outcome: CandidateOutcome) -> tuple[float, float, float]:
    """Return time, cost and energy; one that is not known is worse than any figure."""
    values = (_figure(outcome, "time"), _figure(outcome, "cost"), _figure(outcome, "energy"))
    return tuple(float("inf") if value is None else value for value in values)  # type: ignore[return-value]


def _beats(other: Sequence[float], mine: Sequence[float]) -> bool:
    pairs = list(zip(other, mine, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A cause that widens the range of the best outcome: by how much, and what it could flip."""

    cause: str
    share: float
    """Share of the variance of the logarithm of the figure."""


def doubts(study: Study, best: CandidateOutcome) -> list[Doubt]:
    """Return the causes of the best outcome's range, the largest first; shares add up to 1."""
    widths: list[tuple[str, float]] = []
    # Of what is fixed, hours move no cost.
    moves = best.hourly_share if study.goal.by == "cost" else 1.0
    if best.step_s is not None:
        # Kernels and links miss by shares of their own seconds.
        width, link = moves * _width(best.step_s), best.link_share
        whole = (1 - link) ** 2 + link**2
        widths.append((KERNELS, width**2 * (1 - link) ** 2 / whole))
        widths.append((LINKS, width**2 * link**2 / whole))
    if best.hours is not None:
        assert best.goodput is not None  # it has hours
        widths.append((GOODPUT, (moves * _width(best.goodput)) ** 2))
    if study.goal.by in ("cost", "weighted") and best.usd_per_device_hour is not None:
        widths.append((PRICE, _width(best.usd_per_device_hour) ** 2))
    whole = sum(width for _, width in widths)
    if whole == 0:
        return []
    return sorted(
        (Doubt(cause=cause, share=width / whole) for cause, width in widths),
        key=lambda doubt: -doubt.share,
    )


def _width(span: UncertainValue) -> float:
    return sum(span.spreads())


def flips(study: Study, ranks: Sequence[Rank], margin: float = 0.15) -> list[str]:
    """Name the candidates that would come first if figures moved against the best by a margin."""
    meeting = [rank for rank in ranks if not rank.outcome.misses and not rank.outcome.hypothetical]
    if len(meeting) < 2:
        return []
    by = ordered_by(study, [rank.outcome for rank in ranks])
    first = meeting[0].outcome
    return [
        rank.outcome.candidate
        for rank in meeting[1:]
        if sure(study, rank.outcome) == sure(study, first)
        and figure(rank.outcome, by) * (1 - margin) < figure(first, by) * (1 + margin)
    ]


def measured_first(study: Study, best: CandidateOutcome) -> list[str]:
    """Say which measurements would narrow the first candidate's range most, and what they take."""
    sentences = []
    node = min(best.devices, 8)
    for doubt in doubts(study, best):
        if doubt.share < WORTH_MEASURING:
            continue
        share = f"{100 * doubt.share:.0f} % of the uncertainty"
        if doubt.cause == KERNELS and best.step_s is not None:
            hours = 20 * best.step_s.value * best.devices / 3600
            steps = f", then 20 steps of the plan ({hours:,.1f} device hours)"
            sentences.append(
                f"{KERNELS}, {share}: `meshwright profile` on one node, which times its products "
                f"(about {node * PROFILE_HOURS:g} device hours)" + ("" if best.jobs else steps)
            )
        elif doubt.cause == LINKS:
            nodes = min(best.devices, 2 * node)
            sentences.append(
                f"{LINKS}, {share}: `meshwright profile` on two nodes, which sweeps collectives "
                f"between them (about {nodes * PROFILE_HOURS:g} device hours)"
            )
        elif doubt.cause == GOODPUT:
            sentences.append(
                f"{GOODPUT}, {share}: a week's log of failures and restarts on the cluster"
            )
        elif doubt.cause == PRICE:
            sentences.append(f"{PRICE}, {share}: a dated quote")
    return sentences
