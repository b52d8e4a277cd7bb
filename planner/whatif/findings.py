"""Findings of a study in sentences: what fits, what a change is worth, what pays.

Each function looks at one kind of comparison that a study may hold and says nothing where it has
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.catalog import facility
from meshwright.planner.documents.framework import base_of
from meshwright.planner.whatif.formatting import MOST_NAMES, names_text, short_number
from meshwright.planner.whatif.pricing.break_even import Against, over_years, present_value_usd
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_DAY
from meshwright.planner.whatif.pricing.financing import AT_ONCE
from meshwright.planner.whatif.pricing.queueing import load, shortest_first_h, wait_h
from meshwright.planner.whatif.ranking import measured_first, sure, tie
from meshwright.planner.whatif.what_if_changes import WORDS

if TYPE_CHECKING:
    from meshwright.planner.whatif.candidates import Candidate
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.run_study import Changed, Result
    from meshwright.planner.whatif.study import Sizing

MOST_YEARS = 3
"""Candidates for which the answer says how a year of jobs uses them."""
NOTHING = 0.005
"""Changes of time below this share are called none."""
HURTS = 0.05
"""Share of a step from which something that is missing is called felt."""
NEITHER = "does not fit either"
SIZED: dict[Sizing, str] = {
    "need": "The fewest that meet the deadline",
    "power": "The most that the power cap feeds and the plan uses",
    "afford": "The most that the budget pays for and the plan uses",
}


def answers(result: Result) -> list[str]:
    """Return every sentence that a study supports, in the order in which people ask."""
    if result.interrupted:
        return []
    return [
        *_fitting(result),
        *year_texts(result),
        *_changed_candidates(result),
        *_felt(result),
        *_against_the_first(result),
        *worth_of_a_day(result),
        *_worth(result),
        *_most_of_curves(result),
        *_plan_changes(result),
        *_sizes_texts(result),
        *_fewest(result),
        *_sizes(result),
        *_price_basis(result),
        *_domain_and_chip(result),
        *_side_by_side(result),
        *_replacing(result),
        *_buying(result),
        *financed_texts(result),
        *data_texts(result),
        *_under_a_cap(result),
        *_carbon(result),
    ]


def asked_texts(result: Result) -> list[str]:
    """Return sentences that answer what a study asks beside the best cluster, the nearest first.

    What is asked is read off its fields: jobs, tunings, changes, curves, terms, sizes, caps.
    """
    if result.interrupted:
        return []
    single = len(result.study.rows) == 1
    sentences = [
        *(_fitting(result) if single else ()),
        *year_texts(result),
        *worth_of_a_day(result),
        *financed_texts(result),
        *_felt(result),
        *(text for text in _changed_candidates(result) if not text.endswith(f"{NEITHER}.")),
        *_worth(result),
        *_most_of_curves(result),
        *_domain_and_chip(result),
        *_buying(result),
        *_sizes_texts(result),
        *_fewest(result),
        *_under_a_cap(result),
    ]
    return list(dict.fromkeys(sentences))


def nearest_texts(result: Result) -> list[str]:
    """Return how the first compares with the next, and what to measure first."""
    if result.interrupted or result.best is None:
        return []
    measure = [f"Measure first: {text}." for text in measured_first(result.study, result.best)]
    return [*list(_against_the_first(result))[:1], *measure[:1]]


def _fitting(result: Result) -> Iterator[str]:
    """Say which candidates hold a model where some do not."""
    for model in result.study.rows:
        outcomes = [outcome for outcome in result.outcomes if outcome.model == model]
        fit = [outcome.candidate for outcome in outcomes if outcome.fits]
        not_fit = [outcome.candidate for outcome in outcomes if not outcome.fits]
        if fit and not_fit:
            yield f"{model} fits {names_text(fit)}; it does not fit {names_text(not_fit)}."


def year_texts(result: Result) -> Iterator[str]:
    """Say what share of the first candidates' hours a year of jobs uses, and what waits."""
    for ranks in result.ranks.values():
        for rank in ranks[:MOST_YEARS]:
            outcome = rank.outcome
            if not outcome.jobs:
                return
            yield _year_text(outcome)


def _year_text(outcome: CandidateOutcome) -> str:
    jobs, used = outcome.arrivals, load(outcome.arrivals)
    text = f"{outcome.candidate}: {100 * used:.0f} % of a year's hours are used"
    mean_h, shortest_h = wait_h(jobs), shortest_first_h(jobs)
    if mean_h is None or shortest_h is None:
        return f"{text}, so jobs wait longer and longer."
    each = [
        f"{job.name} {_hours_text(wait)} (a run takes {_hours_text(job.hours)})"
        for job, wait in zip(outcome.jobs, shortest_h, strict=True)
    ]
    return (
        f"{text}; mean wait {_hours_text(mean_h)}, first come, first served; the shortest first: "
        f"{', '.join(each)}."
    )


def _hours_text(hours: float) -> str:
    """Return a duration in hours, or in days from two on.

    >>> _hours_text(5.25), _hours_text(60.0)
    ('5.2 h', '2.5 days')
    """
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def _changed_candidates(result: Result) -> Iterator[str]:
    """Say what products that nobody sells would be worth against those that are."""
    for before, after in _pairs(list(result.candidates.values())):
        sentences = []
        for model, outcome, other in _outcomes_of_pair(result, before, after):
            of_model = f" for {model}" if len(result.study.rows) > 1 else ""
            sentences.append(_difference(outcome, other) + of_model)
        if sentences:
            sold = ", which is not sold" if after.hypothetical else ""
            yield f"{before.name} with {_changes_text(after)}{sold}: {', '.join(sentences)}."


def _outcomes_of_pair(
    result: Result, before: Candidate, after: Candidate
) -> Iterator[tuple[str, CandidateOutcome, CandidateOutcome]]:
    outcomes = {(o.model, o.candidate): o for o in result.outcomes}
    for model in result.study.rows:
        outcome, other = outcomes.get((model, before.name)), outcomes.get((model, after.name))
        if outcome is not None and other is not None:
            yield model, outcome, other


def _changes_text(candidate: Candidate) -> str:
    return ", ".join(f"{WORDS[change]} x {factor:g}" for change, factor in candidate.changes)


def _time_ratio(before: CandidateOutcome, after: CandidateOutcome) -> float:
    if not (before.fits and after.fits) or before.step_s is None or after.step_s is None:
        return 1.0
    return after.step_s.value / before.step_s.value


def _felt(result: Result) -> Iterator[str]:
    """Say from which model on what is not sold is missed, where there are several."""
    if len(result.study.rows) == 1:
        return
    for before, after in _pairs(list(result.candidates.values())):
        pairs = list(_outcomes_of_pair(result, before, after))
        felt = [outcome for _, outcome, other in pairs if _time_ratio(outcome, other) < 1 - HURTS]
        least = min(felt, key=lambda outcome: outcome.parameters, default=None)
        text = f"For lack of {_changes_text(after)}, {before.name} loses"
        if least is not None:
            yield f"{text} more than {100 * HURTS:.0f} % from {least.model} on."
        elif pairs:
            yield f"{text} less than {100 * HURTS:.0f} % with every model."


def _pairs(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    def work(candidate: Candidate) -> tuple[object, ...]:
        return candidate.plain, candidate.tuning, candidate.fix, candidate.allow

    for after in candidates:
        if not after.changes:
            continue
        for before in candidates:
            if not before.changes and work(before) == work(after):
                yield before, after
                break


def _difference(before: CandidateOutcome, after: CandidateOutcome) -> str:
    if not before.fits or not after.fits:
        if before.fits == after.fits:
            return NEITHER
        return "fits then" if after.fits else "fits no more"
    ratio = _time_ratio(before, after)
    price = before.usd_per_device_hour
    if price is None or ratio > 1 - NOTHING or before.devices != after.devices:
        return _time(ratio)
    return f"{_time(ratio)}, worth up to {price.value * (1 / ratio - 1):.2f} USD per device hour"


def _time(ratio: float) -> str:
    """Say what a ratio of times means.

    >>> _time(0.8), _time(1.001), _time(1.25)
    ('20 % less time', 'no less time', '25 % more time')
    """
    if abs(ratio - 1) < NOTHING:
        return "no less time"
    return f"{100 * abs(ratio - 1):.0f} % {'less' if ratio < 1 else 'more'} time"


def _against_the_first(result: Result) -> Iterator[str]:
    """Compare few candidates with the first: time, cost, and the price ratio at which they tie."""
    for ranks in result.ranks.values():
        if not 2 <= len(ranks) <= MOST_NAMES or len(result.study.rows) > 1:
            continue
        first = ranks[0].outcome
        for rank in ranks[1:]:
            pair = [result.candidates[each.candidate] for each in (first, rank.outcome)]
            owned = any(candidate.priced.owned for candidate in pair)
            other_devices = pair[0].plain != pair[1].plain
            ties_at = rank.ties_at_usd_per_device_hour if other_devices and not owned else None
            yield _pair_text(first, rank.outcome, ties_at)


def _pair_text(first: CandidateOutcome, other: CandidateOutcome, ties_at: float | None) -> str:
    assert first.tokens_per_s is not None and other.tokens_per_s is not None
    ratio = other.tokens_per_s.value / first.tokens_per_s.value
    if first.result_hours is not None and other.result_hours is not None:
        ratio = first.result_hours.value / other.result_hours.value  # as the table has it
    waits = first.lead_days is not None or other.lead_days is not None
    texts = [_time(ratio) + (" to the result" if waits else "")]
    if first.usd is not None and other.usd is not None:
        saved = 1 - first.usd.value / other.usd.value
        texts.append(f"{100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'} cost")
    if texts == ["no less time", "0 % less cost"]:
        return f"{first.candidate} takes the time and the cost of {other.candidate}."
    text = f"{first.candidate} takes {' and '.join(texts)} than {other.candidate}"
    its = other.usd_per_device_hour
    if ties_at is not None and its is not None and ties_at > 0:
        text += (
            f"; they cost the same at {ties_at:.2f} USD per device-hour of {other.candidate}, now "
            f"{its.value:.2f}"
        )
    return f"{text}."


def worth_of_a_day(result: Result) -> Iterator[str]:
    """Say at which worth of a day another candidate becomes the first."""
    goal = result.study.goal
    if goal.by != "weighted" or goal.day_usd is None:
        return
    for model in result.study.rows:
        best = result.best_of(model)
        ranks = [
            rank
            for rank in result.ranks[model]
            if "weighted" in rank.first and sure(result.study, rank.outcome)
        ]
        if best is None or best.usd is None or best.result_hours is None:
            continue
        turns = []
        for other in (rank.outcome for rank in ranks if rank.outcome is not best):
            assert other.usd is not None and other.result_hours is not None  # it is weighted
            days = (best.result_hours.value - other.result_hours.value) / 24
            if days != 0:
                turns.append(((other.usd.value - best.usd.value) / days, other.candidate))
        below = max((turn for turn in turns if 0 < turn[0] <= goal.day_usd), default=None)
        above = min((turn for turn in turns if turn[0] > goal.day_usd), default=None)
        sentences = [
            *([f"below {below[0]:,.0f} USD {below[1]} ranks first"] if below else []),
            *([f"above {above[0]:,.0f} USD {above[1]}"] if above else []),
        ]
        text = f"A day sooner is worth {goal.day_usd:,.0f} USD: {best.candidate} ranks first"
        yield f"{text}; {', '.join(sentences)}." if sentences else f"{text}, as at any other worth."


def _worth(result: Result) -> Iterator[str]:
    """Say which single changes save most and which nothing, and what links could save at all."""
    base = result.base
    changes = [change for change in result.marginal if change.outcome.fits and change.factor > 1]
    if base is None or not changes:
        return
    useful = sorted((c for c in changes if c.time < 1 - NOTHING), key=lambda c: c.time)
    useless = [change.words for change in changes if abs(change.time - 1) <= NOTHING]
    if useful:
        yield "Of one change at a time, most saves " + "; ".join(map(_gain, useful[:3])) + "."
    if useless:
        yield f"Nothing is saved by {names_text(useless)}."
    if any(change.change in ("network", "node_links", "domain") for change in changes):
        yield (
            f"The step waits for links {100 * base.link_share:.1f} % of its time; faster links "
            "save at most that."
        )
    for change in changes:
        if change.change == "devices" and base.usd is not None and base.hours is not None:
            yield _price_of_a_day(base, change)


def _gain(change: Changed) -> str:
    premium = change.premium_usd_per_device_hour
    text = f"{change.words}: {_time(change.time)}"
    if change.change == "devices":
        return text
    return text if premium is None else f"{text}, worth up to {premium:.2f} USD per device hour"


def _price_of_a_day(base: CandidateOutcome, change: Changed) -> str:
    assert base.usd is not None and base.hours is not None
    days = base.hours.value * (1 - change.time) / 24
    if days <= 0:
        return f"{change.words} saves no day."
    extra = base.usd.value * ((change.cost or 1.0) - 1)
    if extra <= 0.001 * base.usd.value:
        return f"{change.words} saves {short_number(days)} days at no more cost in all."
    return f"{change.words} saves {short_number(days)} days at {extra / days:,.0f} USD each."


def _most_of_curves(result: Result) -> Iterator[str]:
    """Say what each curve gains at most."""
    for curve in result.curves:
        changes = [change for change in curve if change.outcome.fits]
        if changes:
            most = min(changes, key=lambda change: (round(change.time / NOTHING), change.factor))
            saves = most.time < 1 - NOTHING
            yield (
                f"Step by step, most saves {_gain(most)}."
                if saves
                else f"Step by step, {WORDS[most.change]} saves nothing."
            )


def _plan_changes(result: Result) -> Iterator[str]:
    """Say at which factors of a curve another plan is best."""
    for curve in result.curves:
        changes = [change for change in curve if change.outcome.fits]
        turns = [
            f"{after.factor:g}"
            for before, after in pairwise(changes)
            if after.outcome.layout != before.outcome.layout
        ]
        lost = [f"{change.factor:g}" for change in curve if not change.outcome.fits]
        word = WORDS[curve[0].change]
        if turns:
            yield f"Another plan is best from {word} x {names_text(turns)} on."
        if lost:
            yield f"Nothing fits at {word} x {names_text(lost)}."


def _sizes_texts(result: Result) -> Iterator[str]:
    """Say which sizes were found, and for what."""
    sizes: dict[Sizing, list[str]] = {}
    for offer in result.study.offers:
        if offer.solve is not None:
            named = [offer.cluster.replace("{n}", str(n)) for n in offer.n]
            sizes.setdefault(offer.solve, []).extend(named)
    surely = f", with probability {result.study.goal.confidence:g} or more"
    for sizing, names in sizes.items():
        yield f"{SIZED[sizing]}{surely}: {names_text(dict.fromkeys(names))}."


def _domain_and_chip(result: Result) -> Iterator[str]:
    """Separate what a wider scale-up domain gains from what other devices gain."""
    outcomes = {(o.model, o.candidate): o for o in result.outcomes if o.fits}
    every = [c for c in result.candidates.values() if len(c.cluster.groups) == 1]
    for narrow, wide in _pairs(every):
        if [change for change, _ in wide.changes] != ["domain"]:
            continue
        width = wide.cluster.groups[0].devices_per_node
        for other in every:
            its = other.cluster.groups[0]
            if other.changes or its.devices_per_node != width or other.devices != wide.devices:
                continue
            for model in result.study.rows:
                three = [outcomes.get((model, c.name)) for c in (narrow, wide, other)]
                rates = [o.tokens_per_s.value for o in three if o is not None and o.tokens_per_s]
                if len(rates) == len(three):
                    yield (
                        f"{other.name} trains {model} {rates[2] / rates[0]:.2f} times as fast as "
                        f"{narrow.name}: {rates[1] / rates[0]:.2f} times by its domain of {width} "
                        f"devices, {rates[2] / rates[1]:.2f} times by its devices."
                    )


def _fewest(result: Result) -> Iterator[str]:
    """Name the smallest cluster that meets the goal's deadline, where sizes differ."""
    study, sizes = result.study, {outcome.devices for outcome in result.outcomes}
    if study.goal.deadline_days is None or len(sizes) == 1 or len(study.rows) > 1:
        return
    keeping = [
        outcome
        for outcome in result.outcomes
        if outcome.fits and not any(miss.startswith("deadline") for miss in outcome.misses)
    ]
    asked = study.goal.confidence
    surely = [o for o in keeping if o.chances.get("deadline", 1.0) >= asked]
    if keeping:
        least = min(surely or keeping, key=lambda outcome: outcome.devices)
        how = f"with probability {asked:g} or more" if surely else "at their midpoint alone"
        yield f"Fewest devices that meet the deadline, {how}: {least.devices}, {least.candidate}."


@dataclass(frozen=True, slots=True)
class _Mixed:
    whole: CandidateOutcome
    parts: tuple[CandidateOutcome, ...]


def _mixtures(result: Result) -> Iterator[_Mixed]:
    """Yield clusters of unequal devices with the outcomes of each kind alone."""
    alone = {
        (c.cluster.groups[0].accelerator.name, c.devices): c.name
        for c in result.candidates.values()
        if len(c.cluster.groups) == 1 and not c.changes
    }
    outcomes = {(o.model, o.candidate): o for o in result.outcomes}
    for candidate in result.candidates.values():
        groups = candidate.cluster.groups
        names = [alone.get((group.accelerator.name, group.devices)) for group in groups]
        if len(groups) < 2 or None in names:
            continue
        for model in result.study.rows:
            whole = outcomes.get((model, candidate.name))
            parts = [outcomes.get((model, name)) for name in names if name is not None]
            fitting = tuple(part for part in parts if part is not None and part.fits)
            if whole is not None and whole.fits and len(fitting) == len(groups):
                yield _Mixed(whole, fitting)


def _side_by_side(result: Result) -> Iterator[str]:
    """Compare one run on unequal devices with a run on each kind of them."""
    for mixed in _mixtures(result):
        rates = [_rate_under(mixed.whole.framework, part) for part in mixed.parts]
        assert mixed.whole.tokens_per_s is not None  # it fits
        together, apart = mixed.whole.tokens_per_s.value, sum(rates)
        fastest = max(mixed.parts, key=lambda part: _rate_under(mixed.whole.framework, part))
        gain = together / max(rates) - 1
        yield (
            f"{mixed.whole.candidate} trains {together:,.0f} tokens/s, "
            f"{100 * abs(gain):.0f} % {'more' if gain >= 0 else 'less'} than "
            f"{fastest.candidate}; a run on each kind of device would be {apart:,.0f} together, "
            + (
                f"so {100 * (1 - together / apart):.0f} % are lost to joining them."
                if together < apart
                else "so joining them loses nothing."
            )
        )


def _rate_under(framework: str, part: CandidateOutcome) -> float:
    """Return tokens a second, of our own runtime where that trains the whole, if it is known."""
    assert part.tokens_per_s is not None and part.step_s is not None  # it fits
    if base_of(framework) != "native" or part.native_step_s is None:
        return part.tokens_per_s.value
    return part.tokens_per_s.value * part.step_s.value / part.native_step_s


def _replacing(result: Result) -> Iterator[str]:
    """Say for what owned devices must sell for replacing them to pay."""
    for model in result.study.rows:
        of_model = [o for o in result.outcomes if o.model == model and o.usd is not None]
        owned = [o for o in of_model if result.candidates[o.candidate].priced.owned]
        for old in owned:
            if len(result.candidates[old.candidate].cluster.groups) > 1:
                continue
            for new in of_model:
                if new.capital_usd is None or new.accelerator == old.accelerator:
                    continue
                if len(result.candidates[new.candidate].cluster.groups) > 1:
                    continue  # it is beside the old ones
                assert new.usd is not None and old.usd is not None
                each = (new.usd.value - old.usd.value) / old.devices
                yield (
                    f"Replacing {old.candidate} by {new.candidate} pays "
                    + (
                        "by what it saves in running costs alone."
                        if each <= 0
                        else f"if the old devices sell for at least {each:,.0f} USD each now, the "
                        "new ones being used for other work afterwards."
                    )
                )


def _buying(result: Result) -> Iterator[str]:
    """Say from which utilisation binding terms are cheaper, the cheapest of each accelerator.

    The tables have every pair.
    """
    for name, against in _cheapest_pairs(result):
        assumed = result.candidates[name].assumed
        whole = any(o.candidate == name and o.fixed_hours is not None for o in result.outcomes)
        used = f"{100 * assumed.utilisation:.0f} %"
        if whole:
            used = f"this work alone uses {used}"
        elif "utilisation" in result.candidates[name].assumed.model_fields_set:
            used += " are given"
        else:
            used += " are assumed"
        text = _against_text(name, against, used, assumed.utilisation)
        if against.payback_years is not None:
            text += f" Payback after {against.payback_years:.1f} years."
        if against.waiting_usd is not None:
            text += (
                f" Renting until it is delivered, {assumed.lead_days.value:g} days, costs "
                f"{against.waiting_usd:,.0f} USD."
            )
        yield text


def data_texts(result: Result) -> Iterator[str]:
    """Say what storage and transfers are of the first candidates' costs."""
    for ranks in result.ranks.values():
        parts = [
            (rank.outcome.candidate, rank.outcome.data_usd.value, rank.outcome.usd.value)
            for rank in ranks
            if rank.outcome.usd is not None and rank.outcome.data_usd.value > 0
        ]
        shares = [f"{name} {usd:,.0f} USD ({100 * usd / all_:.0f} %)" for name, usd, all_ in parts]
        if shares:
            yield f"Storage and transfers are in the cost: {names_text(shares)}."


def financed_texts(result: Result) -> Iterator[str]:
    """Say what loans and leases take a month, and what a loan is worth against paying at once."""
    for candidate in _by_rank(result):
        purchase = candidate.priced.purchase
        if purchase is None or len(purchase.instalments) == 1:
            continue
        each = purchase.hardware_usd.value * candidate.devices
        monthly = purchase.instalments[1].share * each
        text = f"{candidate.name}: {monthly:,.0f} USD a month"
        if purchase.leased:
            useful = purchase.hourly.useful_hour_usd(candidate.assumed.utilisation).value
            yield f"{text}, no residual value; {useful:.2f} USD a useful device-hour."
            continue
        at_once = replace(purchase, instalments=AT_ONCE, bound_share=1.0)
        paid_at_once = replace(
            candidate,
            priced=replace(candidate.priced, purchase=at_once, hourly=at_once.hourly),
        )
        usd = [present_value_usd(c).value for c in (candidate, paid_at_once)]
        dearer = "more" if usd[0] > usd[1] else "less"
        yield (
            f"{text}; NPV {usd[0]:,.0f} USD, {abs(usd[0] - usd[1]):,.0f} {dearer} than paid at "
            f"once ({100 * candidate.assumed.interest:g} % a year)."
        )


def _by_rank(result: Result) -> list[Candidate]:
    """Return all candidates, those that rank first before the others."""
    ranked = [rank.outcome.candidate for ranks in result.ranks.values() for rank in ranks]
    return [result.candidates[name] for name in dict.fromkeys([*ranked, *result.candidates])]


def _cheapest_pairs(result: Result) -> list[tuple[str, Against]]:
    """Return for each accelerator and kind of terms the cheapest candidate and rival."""

    def useful(name: str) -> float:
        candidate = result.candidates[name]
        return over_years(candidate).useful_hour_usd(candidate.assumed.utilisation).value

    best: dict[tuple[object, ...], tuple[str, Against]] = {}
    for curve in result.break_even:
        for against in curve.against:
            bound, free = result.candidates[curve.name], result.candidates[against.name]
            kinds = frozenset(group.accelerator.name for group in bound.cluster.groups)
            key = (kinds, bound.priced.purchase is None, free.priced.reservation is None)
            price = useful(curve.name), useful(against.name)
            if key not in best or price < (useful(best[key][0]), useful(best[key][1].name)):
                best[key] = (curve.name, against)
    return list(best.values())[:MOST_NAMES]


def _price_basis(result: Result) -> Iterator[str]:
    """Say where the basis of prices, and not the devices, decides between two sizes."""
    for model in result.study.rows:
        best = result.best_of(model)
        if best is None or best.usd_per_device_hour is None:
            continue
        for other in result.outcomes:
            price = other.usd_per_device_hour
            if other.model != model or price is None or other.accelerator != best.accelerator:
                continue
            bases = [result.candidates[o.candidate].priced for o in (best, other)]
            if any(b.purchase or b.reservation or b.owned for b in bases):
                continue
            same = tie(price.value, best.usd_per_device_hour.value, result.study.assumptions.tie)
            if other.devices != best.devices and not same:
                yield (
                    f"The price decides between {best.candidate} and {other.candidate}: "
                    f"{best.usd_per_device_hour.value:.2f} USD per device-hour "
                    f"({_begin(best.price)}), and {price.value:.2f} ({_begin(other.price)})."
                )
                break


def _begin(how: str) -> str:
    return how.partition("; ")[0]


def _sizes(result: Result) -> Iterator[str]:
    """Say which size of an offer is cheapest, and what the fastest one costs in addition."""
    by_offer: dict[tuple[str, int], list[CandidateOutcome]] = {}
    for o in result.outcomes:
        candidate = result.candidates[o.candidate]
        if o.usd is not None and o.hours is not None and not candidate.provider:
            by_offer.setdefault((o.model, candidate.place), []).append(o)
    for (model, place), outcomes in list(by_offer.items())[:MOST_NAMES]:
        if len({o.devices for o in outcomes}) < 2:
            continue
        cheapest = min(outcomes, key=lambda o: o.usd.value if o.usd else 0.0)
        fastest = min(outcomes, key=lambda o: o.result_hours.value if o.result_hours else 0.0)
        of_model = f" for {model}" if len(result.study.rows) > 1 else ""
        text = f"Of the sizes of {result.study.offers[place].cluster}, {cheapest.candidate} costs "
        text += f"least{of_model}"
        if fastest is not cheapest and cheapest.result_hours and fastest.result_hours:
            assert fastest.usd is not None and cheapest.usd is not None
            days = (cheapest.result_hours.value - fastest.result_hours.value) / 24
            extra = (fastest.usd.value - cheapest.usd.value) / days
            text += f"; {fastest.candidate} saves {days:,.1f} days at {extra:,.0f} USD each"
        yield f"{text}."


def _against_text(name: str, against: Against, used: str, utilisation: float) -> str:
    """Say from which utilisation binding terms are cheaper than others, as their costs vary."""
    share, low, high = (
        None if figure is None else f"{100 * figure:.0f} %"
        for figure in (against.share, against.low, against.high)
    )
    if against.share is None:
        if against.low is None:
            return (
                f"{name} costs more than {against.name} at any utilisation, also where its costs "
                "are at the low ends of their ranges."
            )
        where = f"above {low} utilisation" if against.low else "at any utilisation"
        return (
            f"{name} costs more than {against.name} at any utilisation; where all its costs are "
            f"at the low ends of their ranges, it costs less {where}."
        )
    if against.share == 0:
        return f"{name} is cheaper than {against.name} at any utilisation."
    varied = f" ({low} to {high} as its costs vary)" if low != high else ""
    if high is None:
        varied = f" ({low} with its costs at the low ends of their ranges, none at the high ends)"
    wins = "so it is" if utilisation > against.share else "so it is not"
    return (
        f"{name} is cheaper than {against.name} above {share} utilisation{varied}; {used}, {wins}."
    )


def _under_a_cap(result: Result) -> Iterator[str]:
    """Say what the power buys, where it is what limits."""
    if result.study.goal.power_cap_w is None or result.best is None:
        return
    sentences = []
    for rank in result.ranks[result.best.model][:MOST_NAMES]:
        outcome = rank.outcome
        if outcome.tokens_per_s is not None and outcome.watts is not None:
            daily = outcome.tokens_per_s.value * SECONDS_PER_DAY
            per_mwh = outcome.tokens_per_s.value / outcome.watts.value * 3.6e9
            sentences.append(
                f"{outcome.candidate} ({outcome.devices} devices) {daily / 1e9:,.1f} G a day, "
                f"{per_mwh / 1e9:,.2f} G per MWh"
            )
    if sentences:
        yield (
            f"Tokens under the cap: {'; '.join(sentences)}. Devices run at their offer's "
            "power_limit, full power where it names none."
        )


def _carbon(result: Result) -> Iterator[str]:
    """Say what the first candidate's energy emits on other grids, where emissions count."""
    goal, best = result.study.goal, result.best
    if best is None or best.energy_kwh is None:
        return
    if (
        goal.power_cap_w is None
        and goal.emission_cap_kg is None
        and goal.by
        not in (
            "energy",
            "carbon",
        )
    ):
        return
    grids = sorted(facility().carbon_g_per_kwh.by_country.items(), key=lambda item: item[1])
    tonnes = [
        f"{name} {_tonnes_text(best.energy_kwh.value * grams / 1e6)} ({grams:g} g/kWh)"
        for name, grams in grids
    ]
    yield f"Tonnes of CO2 of {best.candidate} by grid: {', '.join(tonnes)}."


def _tonnes_text(tonnes: float) -> str:
    """Return tonnes with two figures where they are few.

    >>> _tonnes_text(1234.5), _tonnes_text(0.0421)
    ('1,234', '0.042')
    """
    return f"{tonnes:,.0f}" if tonnes >= 10 else f"{tonnes:.2g}"


def slack_days(result: Result, outcome: CandidateOutcome) -> float | None:
    """Return the days between a result and the deadline; None without one of them."""
    deadline = result.study.goal.deadline_days
    if deadline is None or outcome.result_hours is None:
        return None
    return deadline - outcome.result_hours.value / 24
