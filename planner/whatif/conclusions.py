"""The answer to a study's question in few sentences: what to take, how surely, and why.

Products that nobody sells are never what to take; what they would be worth is among the answers.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.whatif.evaluate import LEAST_STEPS
from meshwright.planner.whatif.formatting import (
    days_text,
    names_text,
    price_ages,
    range_text,
    short_number,
    usd_text,
)
from meshwright.planner.whatif.outcome import UNMEASURED_ABOVE
from meshwright.planner.whatif.pricing.queueing import load
from meshwright.planner.whatif.ranking import Rank, figure, ordered_by, sure
from meshwright.planner.whatif.uncertain_value import exact

if TYPE_CHECKING:
    from meshwright.planner.catalog import Market
    from meshwright.planner.whatif.candidates import Candidate
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.run_study import Result
    from meshwright.planner.whatif.study import Order


def verdicts(result: Result) -> list[str]:
    """Return the headline: a sentence for each model, then what they say together."""
    if result.interrupted:
        left = len(result.candidates) * len(result.study.rows) - len(result.outcomes)
        return [f"Interrupted: {len(result.outcomes)} done, {left} not looked at."]
    sentences = [_of_model(result, model, ranks) for model, ranks in result.ranks.items()]
    if len(result.ranks) > 1:
        sentences = [_brief(result, model, ranks) for model, ranks in result.ranks.items()]
        sentences += [*_largest(result), *_crossover(result)]
    return [
        *leading_texts(result),
        *sentences,
        *not_understood_texts(result),
        *unmeasured_texts(result),
        *result.sizes,
        *_kept_at_the_midpoint(result),
        *_by_our_runtime(result),
        *_old_prices(result, datetime.date.today()),
        *_mixed_texts(result),
    ]


def leading_texts(result: Result) -> list[str]:
    """Return what stands before the verdict: that prices, or who was asked, decide it."""
    if result.interrupted:
        return []
    return [
        *_few_steps(result),
        *_owned_anyway(result),
        *_two_markets(result),
        *_turns_with_prices(result),
    ]


def caveat_texts(result: Result) -> list[str]:
    """Return what a page says above its decision: what its own figures cannot show."""
    if result.interrupted:
        return []
    return [
        *_few_steps(result),
        *_owned_anyway(result),
        *_two_markets(result),
        *not_understood_texts(result),
        *unmeasured_texts(result),
    ]


def _few_steps(result: Result) -> Iterator[str]:
    """Say first that a run is too short for its batch to train anything."""
    for best in filter(None, map(result.best_of, result.ranks)):
        if best.tokens is None or best.jobs or not best.tokens_per_step:
            continue
        steps = best.tokens / best.tokens_per_step
        if steps < LEAST_STEPS * (1 - ROUNDING):
            yield (
                f"{best.tokens:,.0f} tokens are {short_number(steps)} steps of a batch of "
                f"{best.tokens_per_step:,.0f} tokens, which train little: with --global-batch "
                f"choose one of which the run has {LEAST_STEPS} steps or more."
            )
            return


def _owned_anyway(result: Result) -> Iterator[str]:
    """Say first where what is owned, and paid anyway, adds less than the first costs."""
    if result.study.goal.by != "cost":
        return
    for best in filter(None, map(result.best_of, result.ranks)):
        for rank in result.ranks[best.model]:
            o, used = rank.outcome, rank.outcome.used_usd_per_device_hour
            if o is best or o.misses or not result.candidates[o.candidate].priced.owned:
                continue
            if o.fixed_hours is None or o.hours is None or used is None or best.usd is None:
                continue
            added = used.value * o.hours.value * o.devices
            if added < best.usd.value and o.usd is not None:
                yield (
                    f"{o.candidate} is paid whether it runs or not, {o.usd.value - added:,.0f} USD "
                    f"in its year; {best.model} adds {added:,.0f} USD of power there, and "
                    f"{best.candidate} costs {best.usd.value:,.0f} USD besides."
                )


def _two_markets(result: Result) -> Iterator[str]:
    """Say first where candidates are priced in two markets, for want of one that has them all."""
    names: dict[Market, list[str]] = {}
    for candidate in result.candidates.values():
        for market in () if candidate.provider else candidate.priced.markets:
            names.setdefault(market, []).append(candidate.name)
    if len(names) > 1:
        each = [f"{names_text(of)} at {market}s" for market, of in sorted(names.items())]
        asked = any(offer.rent is not None and offer.rent.market for offer in result.study.offers)
        why = "no market rents them all; --market compares in one"
        why = result.apart or ("the study names both" if asked else why)
        yield (
            f"Prices are of two markets, {' and '.join(each)}, and part of the difference is who "
            f"was asked: {why}."
        )
        return
    cheaper: dict[_Elsewhere, list[str]] = {}
    for model in result.ranks:
        of_model = f" for {model}" if len(result.ranks) > 1 else ""
        for elsewhere, usd in _cheaper_elsewhere(result, model):
            text = "" if usd is None else f", {usd:,.0f} USD in all{of_model}"
            cheaper.setdefault(elsewhere, []).append(text)
    for elsewhere, texts in cheaper.items():
        yield (
            f"Who is asked decides: candidates are priced at {next(iter(names), '')}s, which rent "
            f"them all; elsewhere {elsewhere.name} costs {elsewhere.usd_per_device_hour:.2f} USD "
            f"per device-hour{''.join(texts)}, {elsewhere.against}: ask there before you sign."
        )


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A candidate at the other market's price, which would change what to do."""

    name: str
    usd_per_device_hour: float
    against: str
    """Comparison with the first candidate at the study's prices."""


def _cheaper_elsewhere(result: Result, model: str) -> Iterator[tuple[_Elsewhere, float | None]]:
    """Yield what would come first at the other market's price, with its dollars in all."""
    goal, best = result.study.goal, result.best_of(model)
    by = ordered_by(result.study, [rank.outcome for rank in result.ranks[model]])
    if by not in ("cost", "weighted"):
        return
    figures: dict[str, tuple[float, float | None, float]] = {}
    for rank in result.ranks[model]:
        o, usd_hour = rank.outcome, result.candidates[rank.outcome.candidate].priced.elsewhere_usd
        price = o.usd_per_device_hour
        missed = [text for text in o.misses if not text.startswith("budget")]
        if usd_hour is None or price is None or missed or o.hypothetical:
            continue
        if o.usd is None:
            figures[o.candidate] = figure(o, by) * usd_hour / price.value, None, usd_hour
            continue
        usd = o.data_usd.value + (o.usd.value - o.data_usd.value) * usd_hour / price.value
        if usd <= (goal.budget_usd or math.inf):
            figures[o.candidate] = figure(o, by) + usd - o.usd.value, usd, usd_hour
    name = min(figures, key=lambda each: figures[each][0], default=None)
    if name is None or (best is not None and figures[name][0] >= figure(best, by)):
        return
    against = "less than the first here"
    if best is None:
        against = "within the budget, which none keeps here"
    elif name == best.candidate:
        against = "and is the first there too"
    yield _Elsewhere(name, figures[name][2], against), figures[name][1]


def _turns_with_prices(result: Result) -> Iterator[str]:
    """Say first at which price of the first another costs less, where prices move so far."""
    if result.study.goal.by != "cost" or len(result.ranks) > 1:
        return
    for ranks in result.ranks.values():
        best = ranks[0].outcome if ranks else None
        if best is None or best.misses or best.usd is None or best.usd_per_device_hour is None:
            continue
        priced = result.candidates[best.candidate].priced
        price = best.usd_per_device_hour
        rented = best.usd.value - best.data_usd.value
        rivals = [
            (rank.outcome.usd.value, rank.outcome.candidate)
            for rank in ranks[1:]
            if rank.outcome.usd is not None
            and not (rank.outcome.misses or rank.outcome.hypothetical)
            and sure(result.study, rank.outcome) == sure(result.study, best)
            and rank.outcome.price_cause != best.price_cause
        ]
        if not (priced.markets and rivals and rented):
            continue
        usd, rival = min(rivals)
        turns_at = price.value * (usd - best.data_usd.value) / rented
        if turns_at < price.high:
            yield (
                f"Prices decide: above {turns_at:.2f} USD per device-hour of {best.candidate}, now "
                f"{price.value:.2f} ({price.low:.2f}-{price.high:.2f}), {rival} costs less."
            )


def not_understood_texts(result: Result) -> Iterator[str]:
    """Name settings of models that were not understood: no candidate is planned with them."""
    for model in result.ranks:
        notes = {
            note: None for o in result.outcomes if o.model == model for note in o.not_understood
        }
        yield from (f"Of {model} {note}." for note in notes)


def unmeasured_texts(result: Result) -> Iterator[str]:
    """Name accelerators among the first candidates whose stack nobody measured."""
    names = [o.accelerator for o in near_candidates(result) if o.unmeasured]
    for name in dict.fromkeys(names):
        yield (
            f"No published run has trained on {name} with the framework that is priced there: its "
            "rates are of data sheets and of others of its maker, and its step may take up to "
            f"{100 * math.expm1(UNMEASURED_ABOVE):.0f} % longer than the range of measured ones."
        )


def near_candidates(result: Result) -> list[CandidateOutcome]:
    """Return the first of each model, with what is tied with it or could come first."""
    near = []
    for ranks in result.ranks.values():
        for rank in ranks:
            likely = any(chance >= LIKELY for chance in rank.first.values())
            if rank.place == 1 or likely:
                near.append(rank.outcome)
    return near


def overall_texts(result: Result) -> list[str]:
    """Return what headlines say of all models together, and of ways to use what is owned."""
    if result.interrupted:
        return []
    several = len(result.ranks) > 1
    return [
        *(_largest(result) if several else ()),
        *(_crossover(result) if several else ()),
        *_mixed_texts(result),
    ]


def largest_that_meets(result: Result) -> str | None:
    """Return the largest model that something sold trains within the goal; None if none does."""
    firsts = [best for best in map(result.best_of, result.ranks) if best is not None]
    return max(firsts, key=lambda best: best.parameters).model if firsts else None


def _of_model(result: Result, model: str, ranks: Sequence[Rank]) -> str:
    best = result.best_of(model)
    if best is None:
        return _none(result, model, ranks)
    sentence = f"{best.candidate} for {model}: {_costs(best)}, under {best.framework}"
    if result.study.work.precision == "auto" and best.plan is not None:
        sentence += f" in {best.plan.precision}"
    if best.native_step_s is not None and best.framework != "native":
        sentence += f" (our own runtime: step {seconds_text(best.native_step_s)})"
    if best.capital_usd is not None:
        sentence += f". {commitment_text(result.candidates[best.candidate], best.capital_usd)}"
        sentence += _paid_whole_text(best)
    elif best.fixed_usd_per_device_hour is not None and best.fixed_usd_per_device_hour.value:
        whole = _paid_whole_text(best)
        sentence += f". What every hour of what is owned costs{whole}" if whole else ""
    sentence += f". {_confidence(result, best, ranks)}Bound by {best.binding}."
    return sentence


def commitment_text(candidate: Candidate, usd: float) -> str:
    """Return what signing binds to."""
    bought = candidate.priced.purchase
    word = "Commitment" if bought is None or bought.leased else "Capex"
    return f"{word} {usd:,.0f} USD"


def _paid_whole_text(outcome: CandidateOutcome) -> str:
    """Say what of a commitment one run pays, and how other work on it would be stated."""
    if outcome.jobs or outcome.hours is None or outcome.fixed_hours is None:
        return ""
    share = outcome.hours.value / outcome.fixed_hours.value
    paid = "paid whole" if outcome.term_renews else "a year of it paid whole"
    return (
        f", {paid}: the run uses {100 * share:.0f} % of its hours; if other work uses it too, "
        "give --utilisation"
    )


def _by_our_runtime(result: Result) -> Iterator[str]:
    """Name the candidate that our own runtime would rank first, where it is another."""
    by = ordered_by(result.study, result.outcomes)
    texts: dict[tuple[str, str], list[str]] = {}
    for model, ranks in result.ranks.items():
        best = result.best_of(model)
        meeting = [rank.outcome for rank in ranks if not rank.outcome.misses]
        sold = [o for o in meeting if o.native_step_s is not None and not o.hypothetical]
        # What meets the goal as surely as the first, which comes before what does not.
        outcomes = [
            o for o in sold if best is None or sure(result.study, o) >= sure(result.study, best)
        ]
        if best is None or best not in outcomes or by in ("energy", "carbon", "weighted"):
            continue
        first = min(outcomes, key=lambda outcome: _native_figure(outcome, by))
        if _native_figure(first, by) < _native_figure(best, by):
            assert first.native_step_s is not None and best.native_step_s is not None
            steps = f"{seconds_text(first.native_step_s)} and {seconds_text(best.native_step_s)}"
            texts.setdefault((first.candidate, best.candidate), []).append(f"{model} ({steps})")
    for (first_name, best_name), models in texts.items():
        yield (
            f"Ranked by the fastest public framework on each cluster; under our own runtime "
            f"(--framework native) {first_name} ranks before {best_name} for {names_text(models)} "
            "a step."
        )


def _native_figure(outcome: CandidateOutcome, by: Order) -> float:
    """Return what an outcome is ranked by under our own runtime; delivery takes as long."""
    assert outcome.native_step_s is not None and outcome.step_s is not None
    ratio = outcome.native_step_s / outcome.step_s.value
    waits = 24 * outcome.lead_days.value if outcome.lead_days is not None and by == "time" else 0.0
    return waits + (figure(outcome, by) - waits) * ratio


CERTAIN = 0.995
"""A probability that is written as 1.00, and not said."""
FIRST_IN: dict[Order, str] = {
    "cost": "cheapest",
    "time": "fastest",
    "energy": "lowest in energy",
    "carbon": "lowest in CO2",
    "weighted": "best by cost and days together",
}
LIKELY = 0.1
"""Probability of being the first from which a candidate is spoken of beside the verdict."""
OLD_MONTHS = 6
"""Age above which a price is no basis for an order."""


def _old_prices(result: Result, today: datetime.date) -> Iterator[str]:
    """Warn of a first candidate whose price is old or has no date."""
    firsts = [best for best in map(result.best_of, result.ranks) if best is not None]
    for price in dict.fromkeys(first.price for first in firsts):
        # A cluster that is had on several terms has several quotes.
        quotes = price.split("; ")
        undated = next((quote for quote in quotes if "undated" in quote), None)
        dated = [(ages[0], quote) for quote in quotes if (ages := price_ages(quote, today))]
        age, oldest = max(dated, default=(0, ""))
        if undated is not None:
            yield f"A price of the first has no date, {_of_whom(undated)}: ask for a quote."
        if age > OLD_MONTHS and oldest != undated:
            yield (
                f"The oldest price of the first is {age} months old, {_of_whom(oldest)}: ask for "
                "a new quote."
            )


def _of_whom(quote: str) -> str:
    """Return of what a price is, without its dates and sources.

    >>> _of_whom("one on-demand rent of b200 from a specialist, 2026-03")
    'of b200 from a specialist'
    """
    words = quote.partition(", ")[0]
    return re.sub(r"^.*\brents? (?=of )", "", words)


def _brief(result: Result, model: str, ranks: Sequence[Rank]) -> str:
    best = result.best_of(model)
    if best is None:
        return _none(result, model, ranks)
    return f"{model}: {best.candidate}, {_costs(best)}, under {best.framework}{_goals_text(best)}."


def _none(result: Result, model: str, ranks: Sequence[Rank]) -> str:
    sold = [rank.outcome for rank in ranks if not rank.outcome.hypothetical]
    if not sold:
        return f"{model}: nothing that is sold fits."
    closest = min(sold, key=lambda outcome: len(outcome.misses))
    return (
        f"{model}: none reaches the goal; {closest.candidate} misses {'; '.join(closest.misses)}."
    )


def _costs(outcome: CandidateOutcome) -> str:
    parts = []
    if outcome.jobs:
        parts.append(f"{100 * load(outcome.arrivals):.0f} % of a year's hours used")
    elif outcome.step_s is not None:
        parts.append(f"step {seconds_text(outcome.step_s.value)}")
    if outcome.hours is not None:
        parts.append(days_text(outcome.hours))
    if outcome.hours is not None and outcome.lead_days is not None:
        parts.append(f"{days_text(outcome.lead_days.times(24))} until delivery")
        assert outcome.result_hours is not None  # it has hours
        parts.append(f"the result after {days_text(outcome.result_hours)}")
    if outcome.usd is not None:
        parts.append(usd_text(outcome.usd))
    if outcome.usd is None and outcome.hours is not None:
        parts.append(outcome.price)
    return ", ".join(parts)


def _goals_text(outcome: CandidateOutcome) -> str:
    """Say how surely the goals are met."""
    return "".join(f"; {text}" for text in _kept_texts(outcome))


def _kept_texts(outcome: CandidateOutcome, confidence: float = 0.0) -> list[str]:
    """Return how surely each goal is met; of one less sure than asked, that it is."""
    return [
        f"{goal} met with probability {chance:.2f}"
        if chance >= confidence
        else f"{goal} met with probability {chance:.3g}, less than the {confidence:g} asked for"
        for goal, chance in outcome.chances.items()
    ]


def _confidence(result: Result, best: CandidateOutcome, ranks: Sequence[Rank]) -> str:
    """Say how surely the first meets the goals, and how surely it is the best of all."""
    texts = [f"fits with probability {best.fit_probability:.2f}"]
    if best.fit_probability >= CERTAIN:
        texts = []
    texts += _kept_texts(best, result.study.goal.confidence)
    if not sure(result.study, best):
        texts += _surest_texts(best, ranks)
    ties = [rank.outcome.candidate for rank in ranks if rank.tied]
    if ties:
        texts.append(f"within {100 * result.study.assumptions.tie:.0f} %: {names_text(ties)}")
    by = ordered_by(result.study, [rank.outcome for rank in ranks])
    chances = {rank.outcome.candidate: rank.first[by] for rank in ranks if by in rank.first}
    if len(chances) > 1 and best.candidate in chances:
        word = FIRST_IN[by]
        chance = chances.pop(best.candidate)
        rival = max(chances, key=lambda name: chances[name])
        text = f"{word} of {len(chances) + 1} with probability {chance:.2f}, {rival} with "
        texts.append(f"{text}{chances[rival]:.2f}{_why_likelier(result, best, ranks, rival, by)}")
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}. " if text else ""


def _surest_texts(best: CandidateOutcome, ranks: Sequence[Rank]) -> Iterator[str]:
    """Name the candidate that meets the goal most surely, where it is another."""
    sold = [rank.outcome for rank in ranks if not rank.outcome.hypothetical]
    surest = max(sold, key=lambda outcome: (outcome.chance, outcome is best))
    if surest is not best:
        usd = f", {range_text(exact(surest.usd.value))} USD" if surest.usd is not None else ""
        yield f"most surely by {surest.candidate}, {surest.chance:.3g}{usd}"


def _why_likelier(
    result: Result, best: CandidateOutcome, ranks: Sequence[Rank], rival: str, by: Order
) -> str:
    """Say that a rival which is the best oftener, by a wider range, is not so at the midpoint."""
    chances = {rank.outcome.candidate: rank.first.get(by, 0.0) for rank in ranks}
    other = next(rank.outcome for rank in ranks if rank.outcome.candidate == rival)
    if chances[rival] <= chances[best.candidate] or not sure(result.study, other):
        return ""
    return " at a midpoint that is no lower"


def _kept_at_the_midpoint(result: Result) -> Iterator[str]:
    """Name what would come first if the midpoint of its range were enough."""
    for ranks in result.ranks.values():
        sold = [rank.outcome for rank in ranks if not rank.outcome.hypothetical]
        meeting = [outcome for outcome in sold if not outcome.misses]
        if len(meeting) < 2 or not sure(result.study, meeting[0]):
            continue
        by = ordered_by(result.study, sold)
        better = [
            o
            for o in meeting
            if not sure(result.study, o) and figure(o, by) < figure(meeting[0], by)
        ]
        if better:
            best = min(better, key=lambda outcome: figure(outcome, by))
            goal = min(best.chances, key=best.chances.__getitem__)
            yield (
                f"{best.candidate} ranks first for {best.model} at the midpoint of its range "
                f"({_costs(best)}), "
                f"and meets the {goal} with probability {best.chances[goal]:.2f} only."
            )


def _largest(result: Result) -> Iterator[str]:
    """Name the largest model that meets the goal."""
    meeting = [
        rank.outcome
        for ranks in result.ranks.values()
        for rank in ranks
        if not rank.outcome.misses and not rank.outcome.hypothetical
    ]
    sizes = {outcome.parameters for outcome in result.outcomes if outcome.fits}
    if not meeting or len(sizes) < 2:
        return
    best = max(meeting, key=lambda outcome: outcome.parameters)
    same = [
        f"{o.candidate} ({o.chance:.2f})" if o.chances else o.candidate
        for o in meeting
        if o.model == best.model
    ]
    surely = " (with the probability of meeting every goal)" if best.chances else ""
    yield f"The largest model that meets the goal: {best.model}, on {names_text(same)}{surely}."


def _crossover(result: Result) -> Iterator[str]:
    """Say at which size of model another candidate becomes the first."""
    firsts = [best for best in map(result.best_of, result.ranks) if best is not None]
    firsts.sort(key=lambda outcome: outcome.parameters)
    if len(firsts) < 2:
        return
    turns = [(a, b) for a, b in pairwise(firsts) if a.candidate != b.candidate]
    for before, after in turns:
        yield (
            f"From {after.model} on, {after.candidate} comes first; up to {before.model}, "
            f"{before.candidate}."
        )
    if not turns:
        yield (
            f"No crossover: {firsts[0].candidate} comes first from {firsts[0].model} to "
            f"{firsts[-1].model}."
        )


def _mixed_texts(result: Result) -> Iterator[str]:
    """Say whether to keep, add and split, mix or replace, where some devices are owned."""
    for model in result.study.rows:
        ways = ways_of(result, model)
        texts_of = {name: way for name, way in ways.items() if way is not None}
        if "keep" not in texts_of or len(texts_of) < 2:
            continue
        split = texts_of.pop("split", None)
        sentences = [
            f"{name}, {days:,.0f} days and {usd:,.0f} USD" for name, (days, usd) in texts_of.items()
        ]
        apart = ""
        if split is not None:
            apart = (
                " Two runs at once, one on each kind of device, would take "
                f"{split[0]:,.0f} days and {split[1]:,.0f} USD."
            )
        limit = result.study.goal.deadline_days
        outcomes = _outcomes_of_ways(result, model)
        unsure = {n for n, outcome in outcomes.items() if not sure(result.study, outcome)}
        kept = {n: w for n, w in texts_of.items() if limit is None or w[0] <= limit}
        within = {n: w for n, w in kept.items() if n not in unsure} or kept
        if not within:
            yield f"No run meets the deadline: {'; '.join(sentences)}.{apart}"
            continue
        cheapest = min(within, key=lambda name: within[name][1])
        fastest = min(within, key=lambda name: within[name][0])
        yield (
            f"Verdict: {cheapest}, the cheapest way"
            + (
                f"; {fastest} if days count: {_a_day(within, cheapest, fastest)}"
                if fastest != cheapest
                else ""
            )
            + f". {'; '.join(sentences)}.{apart}"
        )


def _a_day(ways: dict[str, tuple[float, float]], slow: str, fast: str) -> str:
    days = ways[slow][0] - ways[fast][0]
    usd = ways[fast][1] - ways[slow][1]
    return f"{days:,.0f} days sooner at {usd / days:,.0f} USD each"


def ways_of(result: Result, model: str) -> dict[str, tuple[float, float] | None]:
    """Return days and dollars of each way to train: keep, mix, replace; None if unknown.

    Split is no way to train one model: a run on each kind of device at once, of tokens as each
    trains them.  Both end together, and each is paid for those hours.
    """
    outcomes = _outcomes_of_ways(result, model)
    if "keep" not in outcomes or not {"mix", "mix, bought"} & set(outcomes):
        return {}
    names = ("keep", "split", "mix", "mix, bought", "replace")
    ways = {name: _days_usd(outcomes[name]) if name in outcomes else None for name in names}
    if "add" in outcomes:
        ways["split"] = _split(outcomes["keep"], outcomes["add"])
    return ways


def _outcomes_of_ways(result: Result, model: str) -> dict[str, CandidateOutcome]:
    """Return the first outcome of each way to train, and of what is rented to add."""
    outcomes: dict[str, CandidateOutcome] = {}
    for o in result.outcomes:
        if o.model != model or not o.fits or o.hypothetical:
            continue
        candidate = result.candidates[o.candidate]
        bought = candidate.priced.purchase is not None
        if candidate.priced.owned:
            name = "keep"
        elif len(candidate.cluster.groups) > 1:
            name = "mix, bought" if bought else "mix"
        else:
            name = "replace" if bought else "add"
        outcomes.setdefault(name, o)
    return outcomes


def _days_usd(outcome: CandidateOutcome) -> tuple[float, float] | None:
    if outcome.result_hours is None or outcome.usd is None:
        return None
    return outcome.result_hours.value / 24, outcome.usd.value


def _split(outcome: CandidateOutcome, other: CandidateOutcome) -> tuple[float, float] | None:
    pair = _days_usd(outcome), _days_usd(other)
    if pair[0] is None or pair[1] is None:
        return None
    (days, usd), (its_days, its_usd) = pair[0], pair[1]
    together = 1 / (1 / days + 1 / its_days)
    return together, together * (usd / days + its_usd / its_days)
