"""Data from which a page computes a study's figures: plans, terms, assumptions, goals.

The page's modules (`*.mjs` beside this one) are twins of the arithmetic here.  Plans are given:
what needs another search (a model, a batch, devices, links) cannot be changed on the page.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.planner.catalog import Facility, Quantity, carbon_of, network_purchase, purchases
from meshwright.planner.whatif.candidates import Candidate, listed_price, loan_words, term_words
from meshwright.planner.whatif.conclusions import largest_that_meets
from meshwright.planner.whatif.formatting import price_dates
from meshwright.planner.whatif.study import (
    Assumptions,
    Data,
    Failures,
    Lease,
    Loan,
    Offer,
    Owning,
    Rental,
    Study,
)
from meshwright.planner.whatif.uncertain_value import UncertainValue, span_of

if TYPE_CHECKING:
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.run_study import Result

PER_SPAN = ("value", "low", "high")


def page_data(result: Result) -> dict[str, Any]:
    """Return the data of a study's page: models, candidates with their plans, what was assumed."""
    study = result.study
    return {
        "document": document_of(study),
        "models": list(study.rows),
        "model": largest_that_meets(result) or study.rows[0],
        "question": study.question or study.name,
        "goal": {
            **study.goal.model_dump(mode="json"),
            **({"tokens": study.tokens_of(1.0)} if study.jobs else {}),
        },
        "assumed": assumed_data(study.assumptions),
        "used": _used_share(result),
        "made": datetime.date.today().isoformat(),
        "candidates": [
            _candidate(study, result.candidates[outcome.candidate], outcome)
            for outcome in result.outcomes
            if outcome.fits
        ],
    }


def _used_share(result: Result) -> float | None:
    """Return what share of its hours the work uses of the first candidate that it pays whole."""
    for ranks in result.ranks.values():
        for rank in ranks:
            run_hours, fixed = rank.outcome.hours, rank.outcome.fixed_hours
            if run_hours is not None and fixed is not None:
                return max(0.005, min(1.0, run_hours.value / fixed.value))
    return None


def document_of(study: Study) -> dict[str, Any]:
    """Return the study as it was asked: sizes that were solved for are asked for again."""
    data = study.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for offer in data["offers"]:
        if "solve" in offer:
            offer.pop("n", None)
    return {"format": study.format, **data}


def assumed_data(assumed: Assumptions) -> dict[str, Any]:
    """Return assumptions as the page's arithmetic reads them: no default left open."""
    grams = assumed.carbon_g_per_kwh
    facility = assumed.facility
    return {
        "shared": "utilisation" in assumed.model_fields_set,
        **_part(assumed, ("utilisation", "utilisation_factor", "years", "interest")),
        **_part(assumed, ("rent_change_a_year", "tie")),
        "lead_days": _span(span_of(assumed.lead_days)),
        "start_hours": _span(span_of(assumed.start_hours)),
        "goodput": None if assumed.goodput is None else _span(span_of(assumed.goodput)),
        "failures": _part(assumed.failures, tuple(Failures.model_fields)),
        "owning": _part(assumed.owning, tuple(Owning.model_fields)),
        "data": _part(assumed.data, tuple(Data.model_fields)),
        **_part(facility, _FACILITY),
        "network_usd_per_device": _span(span_of(network_purchase())),
        "grams_per_kwh": carbon_of(assumed.country) if grams is None else grams,
    }


_FACILITY = (
    "electricity_usd_per_kwh",
    "power_usage_effectiveness",
    "node_power_over_tdp",
    "network_w_per_device",
)


def _part(
    part: Assumptions | Failures | Owning | Data | Facility, names: tuple[str, ...]
) -> dict[str, Any]:
    prices = {}
    for name in names:
        value = getattr(part, name)
        prices[name] = _span(span_of(value)) if isinstance(value, Quantity) else value
    return prices


def _span(span: UncertainValue) -> dict[str, float]:
    return span.as_dict()


def _candidate(study: Study, candidate: Candidate, outcome: CandidateOutcome) -> dict[str, Any]:
    offer = study.offers[candidate.place]
    prices = purchases()
    groups = []
    for group in candidate.cluster.groups:
        price = prices.get(group.accelerator.name)
        groups.append(
            {
                "devices": group.devices,
                "tdp_w": group.accelerator.tdp_w,
                "listed": None if price is None else _span(listed_price(price)),
            }
        )
    assumptions = offer.assumptions
    return {
        "name": candidate.name,
        "model": outcome.model,
        "place": candidate.place,
        "provider": candidate.provider,
        "cluster": offer.cluster if offer.n else candidate.plain,
        "accelerator": outcome.accelerator,
        "devices": candidate.devices,
        "nodes": sum(group.nodes for group in candidate.cluster.groups),
        "spot": candidate.spot,
        "wait_days": candidate.wait_days,
        "power_limit": candidate.power_limit,
        "hypothetical": candidate.hypothetical,
        "groups": groups,
        "terms": _terms(offer, candidate),
        "how": candidate.priced.how,
        "cause": candidate.priced.cause,
        "moves_weight": candidate.priced.moves_weight,
        "dates": price_dates(candidate.priced.how),
        "undated": "undated" in candidate.priced.how,
        "assumed": None if assumptions is None else assumed_data(candidate.assumed),
        "own": []
        if assumptions is None
        else _field_names(assumptions.model_dump(exclude_unset=True)),
        "plan": _plan(outcome),
    }


def _field_names(fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that an offer assumes for itself, those of parts by part and name."""
    names = []
    for name, value in fields.items():
        if name in ("owning", "failures", "data"):
            names += [f"{name}.{inner}" for inner in value]
        else:
            names.append(name)
    return names


def _terms(offer: Offer, candidate: Candidate) -> dict[str, Any]:
    """Return how a candidate is had, and what it would be called at another price."""
    priced, rental = candidate.priced, offer.rent or Rental()
    bought = offer.buy is not None
    terms: dict[str, Any] = {
        "kind": _kind(candidate),
        "bought": bought,
        "commitment": "bought" if bought else rental.commitment,
        "rent_commitment": rental.commitment,
        "quote": None if priced.quote is None else _span(priced.quote),
        "minimum_hours": priced.minimum_hours,
    }
    if bought:
        terms["network"] = _span(priced.network or span_of(network_purchase()))
        terms["loan"] = None if offer.buy is None else _plain(offer.buy.loan)
        loan = None if offer.buy is None else offer.buy.loan
        terms["loan_words"] = "" if loan is None else loan_words(loan)
        terms["lease"] = None if offer.buy is None else _plain(offer.buy.lease)
    if priced.reservation is not None:
        terms["years"] = priced.reservation.years
        terms["prepaid"] = priced.reservation.prepaid
        terms["term_words"] = term_words(priced.reservation)
    if priced.parts:
        terms["parts"] = list(priced.parts)
        terms["words_beside"] = list(priced.words_beside)
        rent = priced.part_quotes.get("rented")
        terms["part_rent"] = None if rent is None else _span(rent)
    return terms


def _plain(part: Loan | Lease | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json")


def _kind(candidate: Candidate) -> str:
    priced = candidate.priced
    if priced.hourly is None:
        return "none"
    if priced.owned:
        return "owned"
    if priced.parts:
        return "part"
    return "rented" if priced.purchase is None else "bought"


def _plan(outcome: CandidateOutcome) -> dict[str, Any]:
    assert outcome.step_s is not None and outcome.tokens_per_s is not None  # it fits
    return {
        "step_s": _triple(outcome.step_s),
        "tokens_per_step": outcome.tokens_per_step,
        "parameters": outcome.parameters,
        "idle": outcome.idle,
        "link_share": outcome.link_share,
        "fit_probability": outcome.fit_probability,
        "mfu": outcome.mfu,
        "framework": outcome.framework,
        "layout": outcome.layout,
        "binding": outcome.binding,
        "native_step_s": outcome.native_step_s,
        "jobs": [
            {
                "name": job.name,
                "runs_a_year": job.runs_a_year,
                "share": job.runs_a_year * job.hours / outcome.hours.value,
            }
            for job in outcome.jobs
            if outcome.hours is not None
        ],
    }


def _triple(span: UncertainValue) -> list[float]:
    return [getattr(span, end) for end in PER_SPAN]
