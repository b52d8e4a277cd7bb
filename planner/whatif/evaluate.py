"""One model on one candidate: its best plan priced, and what it takes to reach the goal with it.

Goals of a study: which of them an outcome misses at its midpoint, and how surely it keeps each.

Probabilities of time and cost are shares of the futures of `planner.whatif.monte_carlo`, the same
ones that say which candidate is the cheapest; a figure with one cause has them in closed form.

What storing and moving data costs beside devices.  Arithmetic alone.

How many nodes an offer needs, can be fed or paid: `n` found instead of listed.

Power and purchases are arithmetic.  Where a run decides, sizes are planned: doubled until one
passes, or no longer does, then halved towards the border between them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

import numpy as np

from meshwright.planner.catalog import Rent, accelerators, carbon_of, rents
from meshwright.planner.catalog import framework as framework_called
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.uncertainty import words_notes
from meshwright.planner.documents.prediction import Prediction, compaction
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import MOST_DEVICES, bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import (
    FEWEST_TUNING_SAMPLES,
    MOST_TUNING_SAMPLES,
    TOKENS_PER_STEP,
)
from meshwright.planner.whatif.candidates import (
    Candidate,
    NoSizeError,
    candidates_of,
    in_one_market,
    powered_devices,
    watts_of,
)
from meshwright.planner.whatif.formatting import apart_texts, range_text, usd_text
from meshwright.planner.whatif.monte_carlo import drawn_figure, drawn_outlay
from meshwright.planner.whatif.outcome import UNMEASURED_ABOVE, CandidateOutcome, YearlyRun
from meshwright.planner.whatif.planning import NATIVE, Planned, plan_candidate, request_of
from meshwright.planner.whatif.pricing import economics
from meshwright.planner.whatif.pricing.economics import HOURS_PER_YEAR, Hourly
from meshwright.planner.whatif.pricing.goodput import goodput_of
from meshwright.planner.whatif.probabilities import probability_within, quantile
from meshwright.planner.whatif.study import Data, Goal, Offer, Order, Study
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact, product, span_of, total

HOURS_PER_MONTH = HOURS_PER_YEAR / 12


def stored_usd_per_hour(data: Data) -> UncertainValue:
    """Price of an hour of what is stored.

    >>> stored_usd_per_hour(Data(stored_tb=73.0, usd_per_tb_month=10.0)).value
    1.0
    """
    return span_of(data.usd_per_tb_month).times(data.stored_tb / HOURS_PER_MONTH)


def moved_usd(data: Data) -> UncertainValue:
    """Price of what a run moves.

    >>> moved_usd(Data(moved_tb=20.0, usd_per_tb_moved=50.0)).value
    1000.0
    """
    return span_of(data.usd_per_tb_moved).times(data.moved_tb)


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
            reached, allowed = apart_texts(figure, limit)
            missed.append(f"{name}: {reached} of {allowed} {unit}")
    return missed


def chances_of(goal: Goal, outcome: CandidateOutcome) -> dict[str, float]:
    """Return the probability that each goal is met; none of a figure that is not known."""
    return {
        name: _chance(name, outcome, limit * (1 + ROUNDING))
        for name, figure, limit, _ in _limits(goal, outcome)
        if figure is not None and limit is not None
    }


def _chance(name: str, outcome: CandidateOutcome, limit: float) -> float:
    if name == "power cap":  # devices draw it whatever they hold
        assert outcome.watts is not None
        return probability_within(outcome.watts, limit)
    return outcome.fit_probability * _chance_of_run(name, outcome, limit)


def _chance_of_run(name: str, outcome: CandidateOutcome, limit: float) -> float:
    """Return the probability that a run which fits keeps a limit."""
    if name == "hours of a year":
        return _share(outcome, "time", limit)
    if name == "deadline":
        return _share(outcome, "time", 24 * limit)
    if name == "emission cap":
        assert outcome.grams_per_kwh is not None  # its emissions are known
        return _share(outcome, "energy", 1e6 * limit / outcome.grams_per_kwh)
    if name == "budget" and outcome.capital_usd is None:
        return _share(outcome, "cost", limit)
    assert outcome.outlay_usd is not None  # its midpoint is known
    drawn = drawn_outlay(outcome)
    if drawn is None:
        return probability_within(outcome.outlay_usd, limit)
    return float(np.mean(drawn <= limit))


def _share(outcome: CandidateOutcome, by: Order, limit: float) -> float:
    """Return the share of futures in which a figure is no greater than a limit."""
    drawn = drawn_figure(outcome, by)
    assert drawn is not None  # its midpoint is known
    return float(np.mean(drawn <= limit))


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
    unmeasured = _is_unmeasured(candidate, planned_run)
    step = UncertainValue(
        value=prediction.step_time_s,
        low=prediction.step_time_low_s,
        high=prediction.step_time_high_s * (math.exp(UNMEASURED_ABOVE) if unmeasured else 1.0),
    )
    tokens = exact(planned_run.tokens_per_step)
    idle = 0
    if plan is not None and len(candidate.cluster.groups) == 1:
        idle = candidate.devices - plan.ranks
    per_node = max(group.devices_per_node for group in candidate.cluster.groups)
    outcome = replace(
        blank,
        parameters=planned_run.parameters,
        fits=True,
        framework=planned_run.framework,
        layout=prediction.layout
        + (f" idle={idle} ({idle} of {candidate.devices} devices idle)" if idle else ""),
        idle=idle,
        step_s=step,
        tokens_per_s=product([tokens, step.inverse]),
        tokens_per_step=tokens.value,
        mfu=prediction.mfu * (1 - idle / candidate.devices),
        step_parts=dict(prediction.step_parts),
        memory_parts=tuple(dict(stage.memory_parts) for stage in prediction.stages),
        peak_bytes=fullest.peak_memory_bytes,
        capacity_bytes=fullest.memory_capacity_bytes,
        fit_probability=1.0 if prediction.fit_probability is None else prediction.fit_probability,
        not_understood=words_notes(prediction),
        host_bytes=per_node * max(stage.host_bytes for stage in prediction.stages),
        binding=binding_of(prediction),
        provenance=_provenance(prediction),
        optimal=planned_run.optimal,
        unmeasured=unmeasured,
        plan=plan.model_copy(update={"cluster": candidate.name}) if plan else None,
    )
    outcome = replace(outcome, goodput=goodput(candidate, outcome.parameters, idle=outcome.idle))
    if planned_run.runs:
        outcome = replace(outcome, jobs=tuple(_yearly(candidate, planned_run, outcome)))
    outcome = _with_hours(study, candidate, outcome)
    return _with_goal(study, with_load(candidate, outcome), outcome)


def _is_unmeasured(candidate: Candidate, planned_run: Planned) -> bool:
    """Return whether no kernel of a device's generation was timed and no run on it published."""
    names = {run.framework for _, run in planned_run.runs} or {planned_run.framework}
    runs = [framework_called(name).accuracy.seen for name in names]
    seen = {name for each in runs if each is not None for name in each.accelerators}
    measured = {
        each.architecture
        for name, each in accelerators().items()
        if name in seen or each.curve.provenance != "quoted"
    }
    devices = [group.accelerator for group in candidate.cluster.groups]
    return any(
        each.curve.provenance == "quoted"
        and each.name not in seen
        and each.kind != "cpu"
        and each.architecture not in measured
        for each in devices
    )


def _with_hours(study: Study, candidate: Candidate, outcome: CandidateOutcome) -> CandidateOutcome:
    """Add the hours of the goal's tokens, and of what they alone have to pay."""
    tokens = study.tokens_of(outcome.parameters)
    if tokens is None:
        return outcome
    assert outcome.tokens_per_s is not None and outcome.goodput is not None  # it fits
    runs = sum(job.runs_a_year for job in outcome.jobs) or 1.0
    start = span_of(candidate.assumed.start_hours).times(runs)
    training = economics.hours(tokens, outcome.tokens_per_s, outcome.goodput)
    whole = HOURS_PER_YEAR if outcome.jobs else candidate.whole_term_hours
    return replace(
        outcome,
        hours=total([training, start]),
        start_hours=start,
        tokens=tokens,
        term_hours=whole,
        term_renews=candidate.priced.reservation is not None,
    )


def _yearly(
    candidate: Candidate, planned_run: Planned, outcome: CandidateOutcome
) -> Iterator[YearlyRun]:
    """Yield what a run of each job of a year takes on the wall clock."""
    assert outcome.goodput is not None  # it fits
    for job, plan in planned_run.runs:
        steps = job.tokens / plan.tokens_per_step
        hours = steps * plan.step_s / economics.SECONDS_PER_HOUR / outcome.goodput.value
        begun = hours + candidate.assumed.start_hours.value
        yield YearlyRun(name=job.name, runs_a_year=job.runs_a_year, hours=begun)


def with_load(candidate: Candidate, outcome: CandidateOutcome) -> Candidate:
    """Return a candidate of whose hours the work uses what it takes, where nothing else does."""
    if outcome.hours is None or outcome.fixed_hours is None:
        return candidate
    used = min(1.0, outcome.hours.value / outcome.fixed_hours.value)
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
        share_used=_share_used(candidate, outcome),
        **_prices(candidate),
        **_data(candidate, outcome),
    )
    run_hours = outcome.hours
    if run_hours is not None:
        if outcome.usd_per_device_hour is not None:
            rent = _rent_usd(outcome, outcome.usd_per_device_hour, run_hours)
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


def _rent_usd(
    outcome: CandidateOutcome, usd_per_device_hour: UncertainValue, run_hours: UncertainValue
) -> UncertainValue:
    """Return what devices cost: their share by the hours used, or all that their terms fix."""
    fixed, used = outcome.fixed_usd_per_device_hour, outcome.used_usd_per_device_hour
    if outcome.fixed_hours is None or fixed is None or used is None:
        paid_hours = economics.at_least(run_hours, outcome.minimum_hours)
        rent = economics.rent_usd(outcome.devices, paid_hours, usd_per_device_hour)
        return product([rent, outcome.unused_factor])
    hourly = Hourly(fixed=fixed, used=used)
    return economics.whole_usd(outcome.devices, hourly, outcome.fixed_hours, run_hours)


def _outlay_usd(
    candidate: Candidate, outcome: CandidateOutcome, rent: UncertainValue
) -> UncertainValue:
    """Return what leaves a budget: what terms bind to, and what a run pays of the rest."""
    beside, run_hours, used = candidate.priced.beside, outcome.hours, candidate.assumed.utilisation
    kept_hours = outcome.fixed_hours if outcome.jobs else run_hours
    each = candidate.priced.outlay_usd_per_device(used, kept_hours)
    if each is None:
        return rent
    outlay = each.times(candidate.devices)
    if beside is None or run_hours is None:
        return outlay
    if outcome.fixed_hours is not None:
        rest = economics.whole_usd(outcome.devices, beside, outcome.fixed_hours, run_hours)
    else:
        rest = economics.rent_usd(outcome.devices, run_hours, beside.useful_hour_usd(used))
    return total([outlay, rest])


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
    contract = priced.reservation
    outlay = priced.outlay_usd_per_device(candidate.assumed.utilisation)
    return {
        "contract_hours": None if contract is None else contract.years * HOURS_PER_YEAR,
        "minimum_hours": priced.minimum_hours,
        "fixed_usd_per_device_hour": priced.hourly.fixed,
        "used_usd_per_device_hour": priced.hourly.used,
        "usd_per_device_hour": priced.hourly.useful_hour_usd(candidate.assumed.utilisation),
        "price_moves_weight": priced.moves_weight,
        "price_quote_weight": priced.quote_weight(candidate.assumed.utilisation),
        "capital_usd": None if at_once is None else at_once * candidate.devices,
        "outlay_usd": None if outlay is None else outlay.times(candidate.devices),
    }


def _share_used(candidate: Candidate, outcome: CandidateOutcome) -> UncertainValue | None:
    """Return the share of a commitment's hours that all work uses; None if this run alone does."""
    hourly, assumed = candidate.priced.hourly, candidate.assumed
    if outcome.hours is None or outcome.fixed_hours is not None:
        return None
    if hourly is None or hourly.fixed.value == 0:
        return None
    share, factor = assumed.utilisation, assumed.utilisation_factor
    return UncertainValue(value=share, low=share / factor, high=min(1.0, share * factor))


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
    trained = max(0.0, least - candidate.assumed.start_hours.value)
    if least < candidate.priced.minimum_hours:
        return 0.0 if hours[0] < candidate.priced.minimum_hours else None
    return rate.value * share.value * trained * economics.SECONDS_PER_HOUR


def _provenance(prediction: Prediction) -> dict[str, int]:
    counts: dict[str, int] = {}
    for assumption in prediction.assumptions:
        counts[assumption.provenance] = counts.get(assumption.provenance, 0) + 1
    return counts


MOST_PLANNED = 65_536
"""Devices of the largest size that is planned."""


def unsolved_sizes(study: Study) -> Iterator[tuple[int, str]]:
    """Yield each place among the offers whose `n` is to be found, and the model that it is for."""
    for place, offer in enumerate(study.offers):
        if offer.solve is not None and not offer.n:
            yield from ((place, model) for model in study.rows)


def with_sizes(study: Study, found_sizes: Sequence[tuple[int, int]]) -> Study:
    """Return the study with the sizes found for each place among its offers.

    A size of 0 is none: an offer that has no other is left out.
    """
    sizes: dict[int, set[int]] = {}
    for place, size in found_sizes:
        sizes.setdefault(place, set()).update({size} - {0})
    offers = [
        offer.model_copy(update={"n": tuple(sorted(sizes[place]))}) if place in sizes else offer
        for place, offer in enumerate(study.offers)
        if sizes.get(place, {0})
    ]
    return study.model_copy(update={"offers": tuple(offers)})


LEAST_STEPS = 100
"""Fewest steps of a training: fewer do not train, however large their batch."""


def batch_tokens_borne(tokens: float) -> float:
    """Return the tokens of the largest batch that a training of so many tokens bears.

    The usual batch or, if it is larger, the critical batch of as many tokens, 22.91 tokens^0.47,
    above which more samples save few steps; and 100 steps at least.  That it grows with tokens and
    not with the model is published (Zhang et al., arXiv:2410.21676); its two constants are assumed,
    and answers give half to twice of it.

    >>> f"{batch_tokens_borne(1e8):,.0f}", f"{batch_tokens_borne(15e12) / 1e6:.1f} M"
    ('1,000,000', '35.7 M')
    """
    critical = 22.91 * math.pow(tokens, 0.47)
    return min(max(float(TOKENS_PER_STEP), critical), tokens / LEAST_STEPS)


def size_bounds(study: Study, model: str, single: Candidate) -> list[tuple[int, str]]:
    """Return the most that something else than the goal allows of a node, with what it is."""
    assumed, priced = single.assumed, single.priced
    bounds = [(_device_limit(single), f"{MOST_PLANNED:,} devices are the most that is planned")]
    if not (priced.owned or priced.purchase or priced.reservation):
        asked = "quota_devices" in assumed.model_fields_set
        text = f"{assumed.quota_devices:,} devices are rented at once"
        text += "" if asked else " (assumed; --quota says how many)"
        bounds.append((assumed.quota_devices // single.devices, text))
    graph = resolve_model(model)
    tokens = study.tokens_of(graph.parameters)
    if study.work.global_batch is None and tokens is not None:  # else it grows with devices
        seq_len = request_of(study, graph, single, NATIVE).job.seq_len
        samples = batch_tokens_borne(tokens) / seq_len
        ends = f"{samples:,.0f} ({samples / 2:,.0f} to {2 * samples:,.0f}) samples"
        text = f"{tokens:.3g} tokens bear a batch of {ends}, one a device"
        if single.tuning != "pretrain" and samples > MOST_TUNING_SAMPLES:
            samples = float(MOST_TUNING_SAMPLES)
            text = (
                f"a fine-tuning bears a batch of {samples:,.0f} ({FEWEST_TUNING_SAMPLES} to "
                f"{samples:,.0f} are usual) samples, one a device"
            )
        if samples * seq_len * LEAST_STEPS >= tokens * (1 - ROUNDING):
            text = f"{tokens:.3g} tokens bear a batch of {samples:,.0f} samples, one a device"
            text += f", for {LEAST_STEPS} steps"
        text += " (assumed; --global-batch says it)"
        bounds.append((int(samples) // single.devices, text))
    return [(max(1, most), text) for most, text in bounds]


def size_of(
    study: Study,
    place: int,
    model: str,
    quotes: Sequence[Rent] | None = None,
    store: FigureStore | None = None,
) -> int:
    """Return the `n` of one offer for one model; NoSizeError if there is none.

    `store` has what layers take on other clusters.
    """
    return bounded_size(study, place, model, quotes, store)[0]


def bounded_size(
    study: Study,
    place: int,
    model: str,
    quotes: Sequence[Rent] | None = None,
    store: FigureStore | None = None,
) -> tuple[int, str]:
    """Return the `n` of one offer for one model, and what keeps it from being another."""
    offer = study.offers[place]
    assert offer.solve is not None  # unsolved() names such offers
    try:
        match offer.solve:
            case "power":
                most, why = powered_devices(study, offer), "more power would be drawn than is fed"
            case "need":
                return fewest_needed(study, offer, model, quotes, store), "fewer miss the deadline"
            case "afford":
                most, why = most_affordable(study, offer, model, quotes, store), AFFORDABLE
            case _:
                assert_never(offer.solve)
        single = candidate_of_size(study, offer, 1, quotes)
        bound, reason = min(size_bounds(study, model, single))
        if most >= bound:
            most, why = bound, reason
        working = in_use(study, offer, model, most, quotes, store)
    except DocumentError as error:
        raise type(error)(f"offers[{place}].{error.path or 'solve'}", error.message) from error
    if working == most:
        return working, f"{why}{_power_words(study, offer)}"
    return working, _idle_text(study, offer, most, working)


def _power_words(study: Study, offer: Offer) -> str:
    """Say which power a cap is compared with."""
    if offer.solve != "power":
        return ""
    facility = study.assumptions.but(offer.assumptions).facility
    factor = facility.power_usage_effectiveness.value
    return (
        f"; power is at the meter, cooling and network included, {factor:g} times that of the "
        "nodes and their network"
    )


def _idle_text(study: Study, offer: Offer, most: int, working: int) -> str:
    """Name what a cap or a budget carries beyond what a plan uses, and a batch that uses it."""
    text = f"{most} could be had, of which {most - working} would stand idle"
    batch, each = (
        study.work.global_batch,
        resolve_cluster(offer.cluster.replace("{n}", "1")).devices,
    )
    devices = most * each
    if batch is None or batch % devices == 0:
        return text
    return (
        f"{text}: a batch of {batch:,} does not divide by {devices:,} devices, "
        f"--global-batch {max(1, round(batch / devices)) * devices} would"
    )


AFFORDABLE = "more cost more than the budget"


def candidate_of_size(
    study: Study, offer: Offer, n: int, quotes: Sequence[Rent] | None
) -> Candidate:
    """Return an offer's candidate of one size."""
    market_study = in_one_market(study, rents() if quotes is None else quotes)
    offer = market_study.offers[study.offers.index(offer)] if offer in study.offers else offer
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
        raise DocumentError(
            "solve", "need is the fewest that keep goal.deadline_days (--deadline-days); give it"
        )
    if study.tokens_of(1.0) is None:
        raise DocumentError("solve", "need is for the run of goal.tokens (--tokens); give them")

    def meets_deadline(n: int) -> bool:
        outcome = evaluate(study, model, candidate_of_size(study, offer, n, quotes), store=store)
        return outcome.fits and _sure(study, outcome, "deadline")

    single = candidate_of_size(study, offer, 1, quotes)
    delivered = single.lead_days
    if (
        delivered is not None
        and probability_within(delivered, study.goal.deadline_days) < study.goal.confidence
    ):
        raise NoSizeError(
            "solve",
            f"goal.deadline_days is {study.goal.deadline_days:g}, and delivery takes "
            f"{range_text(delivered)} days; rent, or give assumptions.lead_days",
        )
    (most, why), least = min(size_bounds(study, model, single)), 1
    while not meets_deadline(least):
        if least >= most:
            raise NoSizeError(
                "solve",
                f"no {offer.cluster} of up to {most} meets the deadline with {model}; {why}",
            )
        least = min(2 * least, most)
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
        raise DocumentError(
            "solve", "afford is the most that goal.budget_usd (--budget) pays for; give it"
        )
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
        surely = quantile(whole, min(0.9999, study.goal.confidence / study.fit_probability))
        most = math.floor(budget / surely * (1 + ROUNDING))
        if most < 1:
            raise NoSizeError(
                "solve",
                f"{budget:,.0f} USD pay for none with probability {study.goal.confidence:g}; one "
                f"takes {usd_text(whole)}",
            )
        return min(most, MOST_DEVICES // single.devices)

    if study.goal.tokens_of(1.0) is None:
        raise DocumentError(
            "solve",
            "afford needs goal.tokens (--tokens), of the run that the budget pays for, or "
            "goal.deadline_days (--deadline-days), of the days of rent; give one of them",
        )

    @functools.cache
    def outcome_of(n: int) -> CandidateOutcome:
        return evaluate(study, model, candidate_of_size(study, offer, n, quotes), store=store)

    def too_dear(n: int) -> bool:
        return outcome_of(n).fits and not _sure(study, outcome_of(n), "budget")

    (most, _), least = min(size_bounds(study, model, single)), 1
    while not too_dear(least) and least < most:
        least = min(2 * least, most)
    if not too_dear(least):
        return least
    affordable = border(too_dear, least // 2, least) - 1
    if affordable < 1 or not outcome_of(affordable).fits:
        dearer = outcome_of(affordable + 1)
        cost = "more" if dearer.outlay_usd is None else usd_text(dearer.outlay_usd)
        raise NoSizeError(
            "solve",
            f"{budget:,.0f} USD do not pay for the run of {model} with probability "
            f"{study.goal.confidence:g}; {dearer.candidate}, the fewest that hold it, takes {cost}",
        )
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
