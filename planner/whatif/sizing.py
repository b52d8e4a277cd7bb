"""How many nodes an offer needs, can be fed or paid: `n` found instead of listed.

Power and purchases are arithmetic.  Where a run decides, sizes are planned: doubled until one
passes, or no longer does, then halved towards the border between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from meshwright.planner.catalog import Rent
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import MOST_DEVICES
from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import Candidate, candidates_of, powered_devices
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.formatting import range_text, usd_text
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.probabilities import probability_within, quantile
from meshwright.planner.whatif.study import Offer, Study

MOST_PLANNED = 65_536
"""Devices of the largest size that is planned."""


def unsolved_sizes(study: Study) -> Iterator[tuple[int, str]]:
    """Yield each place among the offers whose `n` is to be found, and the model that it is for."""
    for place, offer in enumerate(study.offers):
        if offer.solve is not None and not offer.n:
            yield from ((place, model) for model in study.rows)


def with_sizes(study: Study, found_sizes: Sequence[tuple[int, int]]) -> Study:
    """Return the study with the sizes found for each place among its offers."""
    offers = list(study.offers)
    for place in {place for place, _ in found_sizes}:
        sizes = sorted({size for at, size in found_sizes if at == place})
        offers[place] = offers[place].model_copy(update={"n": tuple(sizes)})
    return study.model_copy(update={"offers": tuple(offers)})


def size_of(
    study: Study,
    place: int,
    model: str,
    quotes: Sequence[Rent] | None = None,
    store: FigureStore | None = None,
) -> int:
    """Return the `n` of one offer for one model; DocumentError if there is none.

    `store` has what layers take on other clusters.
    """
    offer = study.offers[place]
    assert offer.solve is not None  # unsolved() names such offers
    try:
        match offer.solve:
            case "power":
                return in_use(study, offer, model, powered_devices(study, offer), quotes, store)
            case "need":
                return fewest_needed(study, offer, model, quotes, store)
            case "afford":
                most = most_affordable(study, offer, model, quotes, store)
                return in_use(study, offer, model, most, quotes, store)
            case _:
                assert_never(offer.solve)
    except DocumentError as error:
        raise DocumentError(f"offers[{place}].{error.path or 'solve'}", error.message) from error


def candidate_of_size(
    study: Study, offer: Offer, n: int, quotes: Sequence[Rent] | None
) -> Candidate:
    """Return an offer's candidate of one size."""
    sized_study = study.model_copy(update={"offers": (offer.model_copy(update={"n": (n,)}),)})
    [candidate] = candidates_of(sized_study, quotes)
    return candidate


def fewest_needed(
    study: Study,
    offer: Offer,
    model: str,
    quotes: Sequence[Rent] | None,
    store: FigureStore | None = None,
) -> int:
    """Return the fewest whose run ends by the deadline as surely as the goal wants."""
    if study.goal.deadline_days is None:
        raise DocumentError("solve", "need is the fewest that keep goal.deadline_days; give it")

    def meets_deadline(n: int) -> bool:
        outcome = evaluate(study, model, candidate_of_size(study, offer, n, quotes), store=store)
        return outcome.fits and _sure(study, outcome, "deadline")

    single = candidate_of_size(study, offer, 1, quotes)
    delivered = single.lead_days
    if (
        delivered is not None
        and probability_within(delivered, study.goal.deadline_days) < study.goal.confidence
    ):
        raise DocumentError(
            "solve",
            f"goal.deadline_days is {study.goal.deadline_days:g}, and delivery takes "
            f"{range_text(delivered)} days; rent, or give assumptions.lead_days",
        )
    most, least = _device_limit(single), 1
    while not meets_deadline(least):
        least *= 2
        if least > most:
            raise DocumentError(
                "solve", f"no {offer.cluster} of up to {most} meets the deadline with {model}"
            )
    return border(meets_deadline, least // 2, least)


def most_affordable(
    study: Study,
    offer: Offer,
    model: str,
    quotes: Sequence[Rent] | None,
    store: FigureStore | None = None,
) -> int:
    """Return the most that the budget surely pays for: purchases, contracts, hours or a run."""
    budget = study.goal.budget_usd
    if budget is None:
        raise DocumentError("solve", "afford is the most that goal.budget_usd pays for; give it")
    single = candidate_of_size(study, offer, 1, quotes)
    if single.priced.hourly is None:
        raise DocumentError("solve", single.priced.how)
    each = single.priced.outlay_usd_per_device(single.assumed.utilisation)
    days = study.goal.deadline_days
    if each is None and study.goal.tokens_of(1.0) is None and days is not None:
        hours = max(24 * days, single.priced.minimum_hours)
        each = single.priced.hourly.useful_hour_usd(single.assumed.utilisation).times(hours)
    if each is not None:
        whole = each.times(single.devices)
        surely = quantile(whole, study.goal.confidence)
        most = math.floor(budget / surely * (1 + ROUNDING))
        if most < 1:
            raise DocumentError(
                "solve",
                f"{budget:,.0f} USD pay for none with probability {study.goal.confidence:g}; one "
                f"takes {usd_text(whole)}",
            )
        return min(most, MOST_DEVICES // single.devices)

    def too_dear(n: int) -> bool:
        outcome = evaluate(study, model, candidate_of_size(study, offer, n, quotes), store=store)
        return outcome.fits and not _sure(study, outcome, "budget")

    most, least = _device_limit(single), 1
    while not too_dear(least) and least < most:
        least = min(2 * least, most)
    if not too_dear(least):
        return least
    affordable = border(too_dear, least // 2, least) - 1
    if affordable < 1:
        raise DocumentError("solve", f"{budget:,.0f} USD do not surely pay for the run of {model}")
    return affordable


def in_use(
    study: Study,
    offer: Offer,
    model: str,
    most: int,
    quotes: Sequence[Rent] | None,
    store: FigureStore | None = None,
) -> int:
    """Return the fewest, of `most` at most, that train as fast: a plan may leave some idle."""
    candidate = candidate_of_size(study, offer, most, quotes)
    outcome = evaluate(study, model, candidate, store=store)
    working = candidate.devices - outcome.idle
    return max(1, math.ceil(most * working / candidate.devices - ROUNDING))


def border(passes: Callable[[int], bool], fails_at: int, passes_at: int) -> int:
    """Return the least number that passes between one that does not and one that does.

    >>> border(lambda n: n >= 11, 8, 16)
    11
    """
    while passes_at - fails_at > 1:
        middle = (fails_at + passes_at) // 2
        if passes(middle):
            passes_at = middle
        else:
            fails_at = middle
    return passes_at


def _sure(study: Study, outcome: CandidateOutcome, goal: str) -> bool:
    return outcome.chances.get(goal, 0.0) >= study.goal.confidence


def _device_limit(candidate: Candidate) -> int:
    return max(1, MOST_PLANNED // candidate.devices)
