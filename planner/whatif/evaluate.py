"""One model on one candidate: its best plan priced, and what it takes to reach the goal with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.planner.catalog import facility
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.documents.prediction import Prediction, compaction
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import Candidate, watts_of
from meshwright.planner.whatif.goals import chances_of, misses
from meshwright.planner.whatif.outcome import CandidateOutcome, YearlyRun
from meshwright.planner.whatif.planning import Planned, plan_candidate
from meshwright.planner.whatif.pricing import economics
from meshwright.planner.whatif.pricing.goodput import goodput_of
from meshwright.planner.whatif.pricing.queueing import load
from meshwright.planner.whatif.pricing.transfers import moved_usd, stored_usd_per_hour
from meshwright.planner.whatif.study import Goal, Study
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact, product, span_of, total

FULL = 0.92
"""Share of device memory above which a plan is called bound by it."""
NOTABLE = 0.12
"""Share of a step above which communication or the pipeline is named."""


def evaluate(
    study: Study,
    model_name: str,
    candidate: Candidate,
    planned_run: Planned | None = None,
    store: FigureStore | None = None,
) -> CandidateOutcome:
    """Return the outcome of one model on one candidate, planned already or not."""
    planned_run = planned_run or plan_candidate(study, model_name, candidate, store=store)
    blank = CandidateOutcome(
        candidate=candidate.name,
        model=model_name,
        devices=candidate.devices,
        accelerator="+".join(group.accelerator.name for group in candidate.cluster.groups),
        fits=False,
        binding=planned_run.reason,
        price=candidate.priced.how,
        price_cause=candidate.priced.cause,
        hypothetical=candidate.hypothetical,
    )
    prediction, plan = planned_run.prediction, planned_run.plan
    if prediction is None or planned_run.job is None:
        return blank
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    step = UncertainValue(
        value=prediction.step_time_s,
        low=prediction.step_time_low_s,
        high=prediction.step_time_high_s,
    )
    tokens = exact(planned_run.tokens_per_step)
    idle = 0
    if plan is not None and len(candidate.cluster.groups) == 1:
        idle = candidate.devices - plan.mesh.devices
    per_node = max(group.devices_per_node for group in candidate.cluster.groups)
    outcome = replace(
        blank,
        parameters=planned_run.parameters,
        fits=True,
        stack=planned_run.stack,
        layout=prediction.layout
        + (f" ({idle} of {candidate.devices} devices idle)" if idle else ""),
        idle=idle,
        step_s=step,
        tokens_per_s=product([tokens, step.inverse]),
        tokens_per_step=tokens.value,
        mfu=prediction.mfu * (1 - idle / candidate.devices),
        step_parts=dict(prediction.step_parts),
        memory_parts=tuple(dict(stage.memory_parts) for stage in prediction.stages),
        peak_bytes=fullest.peak_memory_bytes,
        capacity_bytes=fullest.memory_capacity_bytes,
        host_bytes=per_node * max(stage.host_bytes for stage in prediction.stages),
        binding=binding_of(prediction),
        provenance=_provenance(prediction),
        optimal=planned_run.optimal,
        plan=plan.model_copy(update={"cluster": candidate.name}) if plan else None,
    )
    outcome = replace(outcome, goodput=goodput(candidate, outcome.parameters, idle=outcome.idle))
    if planned_run.runs:
        outcome = replace(outcome, jobs=tuple(_yearly(planned_run, outcome)))
        candidate = with_load(candidate, outcome)
    return _with_goal(study, candidate, outcome)


def _yearly(planned_run: Planned, outcome: CandidateOutcome) -> Iterator[YearlyRun]:
    """Yield what a run of each job of a year takes on the wall clock."""
    assert outcome.goodput is not None  # it fits
    for job, plan in planned_run.runs:
        steps = job.tokens / plan.tokens_per_step
        hours = steps * plan.step_s / economics.SECONDS_PER_HOUR / outcome.goodput.value
        yield YearlyRun(name=job.name, runs_a_year=job.runs_a_year, hours=hours)


def with_load(candidate: Candidate, outcome: CandidateOutcome) -> Candidate:
    """Return a candidate of whose hours a year of jobs uses what it takes."""
    if not outcome.jobs:
        return candidate
    used = min(1.0, load(outcome.arrivals))
    assumed = candidate.assumed.model_copy(update={"utilisation": used})
    return replace(candidate, assumed=assumed)


def binding_of(prediction: Prediction) -> str:
    """Say in words what keeps a plan from being faster."""
    step_s = prediction.step_time_s
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    share = fullest.peak_memory_bytes / fullest.memory_capacity_bytes
    parts = dict(prediction.step_parts)
    again = parts.pop("recompute", 0.0)
    computing = again + parts.pop("forward", 0.0) + parts.pop("backward", 0.0)
    texts = []
    if share > FULL:
        text = f"memory: {100 * share:.0f} % of {bytes_text(fullest.memory_capacity_bytes)}"
        if fullest.compacts:
            text = f"memory: {compaction(prediction.stages, prediction.fit_probability or 0.0)}"
        if again > 0.02 * step_s:
            text += f", recomputation takes {100 * again / step_s:.0f} %"
        texts.append(text)
    name, seconds = max(parts.items(), key=lambda part: part[1], default=("", 0.0))
    if seconds > NOTABLE * step_s:
        texts.append(f"{name} {100 * seconds / step_s:.0f} % of the step")
    if not texts:
        texts.append(f"compute: {100 * computing / step_s:.0f} % of the step")
    return "; ".join(texts)


def _with_goal(study: Study, candidate: Candidate, outcome: CandidateOutcome) -> CandidateOutcome:
    """Add hours, cost, energy and carbon, and what of the goal is missed."""
    assumed, goal = candidate.assumed, study.goal
    watts = watts_of(candidate.cluster, assumed, candidate.power_limit)
    grams = assumed.carbon_g_per_kwh
    if grams is None:
        grams = carbon_of(assumed.country)
    outcome = replace(
        outcome,
        watts=watts,
        grams_per_kwh=None if watts is None else grams,
        lead_days=None if outcome.jobs else candidate.lead_days,
        day_usd=goal.day_usd,
        **_prices(candidate),
        **_data(candidate, outcome),
    )
    tokens = study.tokens_of(outcome.parameters)
    assert outcome.tokens_per_s is not None and outcome.goodput is not None  # it fits
    if tokens is not None:
        run_hours = economics.hours(tokens, outcome.tokens_per_s, outcome.goodput)
        outcome = replace(outcome, hours=run_hours, tokens=tokens)
        if outcome.usd_per_device_hour is not None:
            paid_hours = economics.at_least(run_hours, outcome.minimum_hours)
            rent = economics.rent_usd(outcome.devices, paid_hours, outcome.usd_per_device_hour)
            outcome = replace(
                outcome,
                usd=total([rent, outcome.data_usd]),
                outlay_usd=total([_outlay_usd(candidate, outcome, rent), outcome.data_usd]),
            )
        if watts is not None:
            energy = economics.energy_kwh(watts, run_hours)
            outcome = replace(
                outcome,
                energy_kwh=energy,
                carbon_kg=economics.carbon_kg(energy, grams),
            )
    return replace(
        outcome,
        tokens_in_budget=tokens_in_budget(goal, candidate, outcome),
        misses=tuple(misses(goal, outcome)),
        chances=chances_of(goal, outcome),
    )


def carbon_of(country: str) -> float:
    """Return grams of CO2 per kWh; DocumentError with the known countries."""
    by_country = facility().carbon_g_per_kwh.by_country
    if country not in by_country:
        raise DocumentError(
            "assumptions.country",
            f"is '{country:.20}'; known are {', '.join(by_country)}; or give carbon_g_per_kwh",
        )
    return by_country[country]


def goodput(candidate: Candidate, parameters: float, *, idle: int = 0) -> UncertainValue:
    """Return the share of the wall clock that trains: as assumed, or by failures of its size.

    Nodes whose devices are `idle` can fail without stopping the run.
    """
    assumed = candidate.assumed
    if assumed.goodput is not None:
        return span_of(assumed.goodput)
    nodes = sum(group.nodes for group in candidate.cluster.groups)
    return goodput_of(
        assumed.failures,
        parameters=parameters,
        devices=candidate.devices - idle,
        nodes=round(nodes * (1 - idle / candidate.devices)),
        spot=candidate.spot,
    )


def _outlay_usd(
    candidate: Candidate, outcome: CandidateOutcome, rent: UncertainValue
) -> UncertainValue:
    """Return what leaves a budget: what terms bind to, and what a run pays of the rest."""
    beside, run_hours, used = candidate.priced.beside, outcome.hours, candidate.assumed.utilisation
    each = candidate.priced.outlay_usd_per_device(used, run_hours)
    if each is None:
        return rent
    outlay = each.times(candidate.devices)
    if beside is None or run_hours is None:
        return outlay
    return total(
        [outlay, economics.rent_usd(outcome.devices, run_hours, beside.useful_hour_usd(used))]
    )


def _data(candidate: Candidate, outcome: CandidateOutcome) -> dict[str, Any]:
    """Return what storage costs an hour, beside rented devices, and what transfers cost."""
    data, priced = candidate.assumed.data, candidate.priced
    stored = None if priced.owned or priced.purchase else stored_usd_per_hour(data)
    moved = moved_usd(data)
    if not outcome.jobs:
        return {"stored_usd_per_hour": stored, "moved_usd": moved}
    each_year = moved.times(sum(job.runs_a_year for job in outcome.jobs))
    kept = [] if stored is None else [stored.times(economics.HOURS_PER_YEAR)]
    return {"stored_usd_per_hour": None, "moved_usd": total([each_year, *kept])}


def _prices(candidate: Candidate) -> dict[str, Any]:
    """Return the price of a useful device hour on the candidate's terms, and what it binds to."""
    priced = candidate.priced
    if priced.hourly is None:
        return {}
    at_once = priced.at_once_usd_per_device
    outlay = priced.outlay_usd_per_device(candidate.assumed.utilisation)
    return {
        "minimum_hours": priced.minimum_hours,
        "usd_per_device_hour": priced.hourly.useful_hour_usd(candidate.assumed.utilisation),
        "price_quote_weight": priced.quote_weight(candidate.assumed.utilisation),
        "capital_usd": None if at_once is None else at_once * candidate.devices,
        "outlay_usd": None if outlay is None else outlay.times(candidate.devices),
    }


def tokens_in_budget(goal: Goal, candidate: Candidate, outcome: CandidateOutcome) -> float | None:
    """Return the tokens for which budget and deadline both suffice; None without a budget.

    What is bought or reserved is paid whole first.  The rest of the budget pays for the hours that
    it is owned, of which a share is used; it is there after its delivery.
    """
    price, rate, share = outcome.usd_per_device_hour, outcome.tokens_per_s, outcome.goodput
    if goal.budget_usd is None or price is None or rate is None or share is None:
        return None
    left = goal.budget_usd
    an_hour = price.value
    purchase, share_used = candidate.priced.purchase, candidate.assumed.utilisation
    if outcome.capital_usd is not None:
        assert candidate.priced.hourly is not None  # it has a price
        left -= outcome.capital_usd
        an_hour = candidate.priced.hourly.used.value
    if purchase is not None:
        hardware = purchase.hardware_usd.value * (purchase.paid_share - purchase.bound_share)
        left -= hardware * outcome.devices
        an_hour = purchase.owning_usd_per_hour(share_used).value / share_used
        if candidate.priced.beside is not None:
            an_hour += candidate.priced.beside.useful_hour_usd(share_used).value
    if outcome.moved_usd is not None:
        left -= outcome.moved_usd.value
    if outcome.stored_usd_per_hour is not None:
        an_hour += outcome.stored_usd_per_hour.value / outcome.devices
    if left < 0:
        return 0.0
    hours = [math.inf if an_hour == 0 else left / (an_hour * outcome.devices)]
    if goal.deadline_days is not None:
        lead_days = outcome.lead_days.value if outcome.lead_days is not None else 0.0
        hours.append(24 * max(0.0, goal.deadline_days - lead_days))
    if purchase is not None:
        hours.append(economics.HOURS_PER_YEAR * candidate.assumed.years * share_used)
    if candidate.priced.reservation is not None:
        hours.append(economics.HOURS_PER_YEAR * candidate.priced.reservation.years)
    least = min(hours)
    if least < candidate.priced.minimum_hours:
        return 0.0 if hours[0] < candidate.priced.minimum_hours else None
    return rate.value * share.value * least * economics.SECONDS_PER_HOUR


def _provenance(prediction: Prediction) -> dict[str, int]:
    counts: dict[str, int] = {}
    for assumption in prediction.assumptions:
        counts[assumption.provenance] = counts.get(assumption.provenance, 0) + 1
    return counts
