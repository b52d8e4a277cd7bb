"""Text of a study for a terminal (rich renderables)."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.documents.units import bytes_text, count_text, seconds_text
from meshwright.planner.report.facts import MOST_LINES, Fact, Summary, plain_table
from meshwright.planner.whatif.conclusions import (
    leading_texts,
    not_understood_texts,
    unmeasured_texts,
    verdicts,
)
from meshwright.planner.whatif.findings import answers, asked_texts, nearest_texts, slack_days
from meshwright.planner.whatif.formatting import (
    days_text,
    names_text,
    price_ages,
    range_text,
    short_usd_text,
)
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_DAY
from meshwright.planner.whatif.ranking import Rank, measured_first

if TYPE_CHECKING:
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.pricing.break_even import BreakEven
    from meshwright.planner.whatif.run_study import Changed, Result
    from meshwright.planner.whatif.study import Order

FEW = 3
"""Candidates of a model that are listed in ten lines."""
MOST_ROWS = 12
"""Candidates that have a line each, however many lines that takes."""
MOST_ASKED = 3
"""Number of sentences on questions beside the best cluster."""
SHOWN_SHARES = (0.6, 0.8, 1.0)


def result_facts(result: Result, extra: Sequence[Fact] = ()) -> Summary:
    """Return the verdict, the first candidates of each model, and what to measure, in ten lines."""
    headlines = len(leading_texts(result)) + max(1, len(result.ranks))
    asked = asked_texts(result)[:MOST_ASKED]
    beside = {*result.sizes, *not_understood_texts(result), *unmeasured_texts(result)}
    facts = [
        Fact(
            label="answer",
            text=sentence,
            lines=8 if place < headlines else 4,
            detail=place >= headlines and sentence not in beside,
        )
        for place, sentence in enumerate(verdicts(result))
    ]
    facts += [
        Fact(label="" if place else "asked", text=sentence, detail=place > 0, lines=4)
        for place, sentence in enumerate(asked)
    ]
    first = result.best
    if first is not None and len(result.ranks) == 1:
        facts.append(
            Fact(
                label="a day",
                text=a_day_text(first, result.candidates[first.candidate].tuning),
                detail=True,
            )
        )
    listed = len(result.outcomes) if len(result.outcomes) <= MOST_ROWS else 0
    for model, ranks in result.ranks.items():
        for index, rank in enumerate(ranks if listed else ranks[:FEW]):
            facts.append(
                Fact(
                    label=f"{rank.place}{' (tied)' if rank.tied else ''}",
                    text=_brief(result, model, rank),
                    detail=not listed and len(result.ranks) > 1 and (bool(asked) or index > 0),
                )
            )
    if len(result.ranks) == 1:  # before the last of three
        at = len(facts) - (len(ranks) >= FEW)
        near = nearest_texts(result)[-1:]
        facts[at:at] = [Fact(label="", text=sentence, detail=True) for sentence in near]
    misfits = [outcome for outcome in result.outcomes if not outcome.fits]
    if misfits and listed:
        facts += [
            Fact(label="no plan", text=f"{o.candidate}: {_why_none(o)}", lines=6) for o in misfits
        ]
    elif misfits:
        facts.append(Fact(label="no plan", text=", ".join(o.candidate for o in misfits)))
    texts = {fact.text for fact in facts}
    others = [sentence for sentence in answers(result) if sentence not in texts]
    facts += [Fact(label="", text=sentence, detail=True) for sentence in others]
    title = result.study.question or result.study.name
    return Summary(title, [*facts, *extra], most=MOST_LINES + max(0, listed - FEW))


BYTES_PER_WEIGHT = {"qlora": 0.5}
"""Bytes per weight that a node reads once, where weights are not in 16 bits."""


def _why_none(outcome: CandidateOutcome) -> str:
    """Return the needs and the remedy of the closest plan, or why there is none."""
    of_first = outcome.binding.splitlines()[0] if outcome.binding else "nothing fits"
    _, closest, rest = of_first.partition("The closest, ")
    return f"the closest, {rest}" if closest else of_first


def a_day_text(
    outcome: CandidateOutcome, tuning: str = "", today: datetime.date | None = None
) -> str:
    """Return tokens a day, the date of the result, and the RAM that a node needs."""
    parts = [f"{count_text(_daily_tokens(outcome))} tokens"]
    if outcome.result_hours is not None and not outcome.jobs:
        days = math.ceil(min(outcome.result_hours.value, MOST_HOURS) / 24)
        day = (today or datetime.date.today()) + datetime.timedelta(days=days)
        parts.append(f"the result by {day.isoformat()}")
    ram = outcome.host_bytes + BYTES_PER_WEIGHT.get(tuning, 2.0) * outcome.parameters
    return f"{'; '.join(parts)}; a node needs {bytes_text(ram)} of RAM or more"


def _daily_tokens(outcome: CandidateOutcome) -> float:
    """Tokens trained in a day of 24 hours, less what failures and saves take."""
    assert outcome.tokens_per_s is not None and outcome.goodput is not None  # it fits
    return outcome.tokens_per_s.value * outcome.goodput.value * SECONDS_PER_DAY


MOST_HOURS = 1e6
"""Later results have no date that means anything."""


def _brief(result: Result, model: str, rank: Rank) -> str:
    """Return a candidate, its time and cost, in one line."""
    outcome = rank.outcome
    name = outcome.candidate if len(result.ranks) == 1 else f"{model}, {outcome.candidate}"
    parts = [name]
    if outcome.result_hours is not None:
        parts.append(days_text(outcome.result_hours))
    if outcome.hours is None and outcome.step_s is not None and outcome.tokens_per_s is not None:
        parts.append(f"step {seconds_text(outcome.step_s.value)}")
        parts.append(f"{count_text(_daily_tokens(outcome))} tokens a day")
        if outcome.usd_per_device_hour is not None:
            hourly = outcome.usd_per_device_hour.times(outcome.devices)
            parts.append(f"{short_usd_text(hourly)} an hour")
    if outcome.usd is not None:
        parts.append(short_usd_text(outcome.usd))
    if outcome.unmeasured:
        parts.append("rates of data sheets")
    missed = {miss.partition(":")[0] for miss in outcome.misses}
    unsure = [
        f"{goal} met with probability {chance:.2g} only"
        for goal, chance in outcome.chances.items()
        if goal not in missed and chance < result.study.goal.confidence
    ]
    return ", ".join([*parts, *(f"misses {miss}" for miss in outcome.misses), *unsure])


def result_text(result: Result, *, whole: bool = True) -> RenderableType:
    """Return verdict, answers, candidates in order, marginal values, uncertainty.

    Not `whole`, it fits a page or two: no plan of each candidate, and no pair of terms.
    """
    parts: list[RenderableType] = []
    if result.study.question:
        parts.append(Text(result.study.question, style="bold"))
    parts += verdicts(result)
    parts += [f"- {sentence}" for sentence in answers(result)]
    for model, ranks in result.ranks.items():
        if ranks:
            parts += ["", ranks_table(model, ranks), ""]
            for rank in ranks if whole else ():
                parts += [candidate_text(result, rank), ""]
    misfits = [outcome for outcome in result.outcomes if not outcome.fits]
    parts += [
        f"{outcome.candidate}, {outcome.model}: "
        + (outcome.binding if whole else outcome.binding.partition(". ")[0])
        for outcome in misfits
    ]
    if result.marginal and result.base is not None:
        parts.append(changes_table(f"One change: {result.base.candidate}", result.marginal))
    for curve in result.curves:
        parts.append(changes_table(f"{curve[0].words.split(' x ')[0]} step by step", curve))
    if result.doubts:
        shares = ", ".join(f"{doubt.cause} {100 * doubt.share:.0f} %" for doubt in result.doubts)
        parts.append(f"uncertainty of the first: {shares}")
    if result.best is not None:
        parts += [f"measure first: {text}" for text in measured_first(result.study, result.best)]
    if result.flips:
        parts.append(
            "first if its figure were 15 % less and the first candidate's 15 % more: "
            f"{names_text(result.flips)}"
        )
    if result.break_even:
        parts.append(break_even_table(result.break_even))
        parts.append(cash_table(result.break_even))
    parts.append(provenance_text(result))
    return Group(*parts)


def ranks_table(model: str, ranks: Sequence[Rank]) -> Table:
    """Return one row per outcome that fits: time to the result, cost, step, probabilities."""
    headings = ["", model, "time", "USD", "step"]
    several = sum(bool(rank.first) for rank in ranks) > 1
    if several:
        headings[-1:] = ["P(cheapest)", "P(fastest)"]
    table = plain_table(*headings, right=tuple(range(2, len(headings))))
    for column in table.columns[2:4]:
        column.no_wrap = True  # numbers do not break
    for rank in ranks:
        outcome = rank.outcome
        step = "" if outcome.step_s is None or outcome.jobs else seconds_text(outcome.step_s.value)
        table.add_row(
            f"{'=' if rank.tied else ''}{rank.place}{'*' if rank.pareto else ''}",
            outcome.candidate,
            "" if outcome.result_hours is None else days_text(outcome.result_hours),
            "" if outcome.usd is None else short_usd_text(outcome.usd, ""),
            *([_chance(rank, "cost"), _chance(rank, "time")] if several else [step]),
        )
    table.caption = "= tied with the first; * no other is better in time, cost and energy together"
    table.caption_justify = "left"
    return table


def _chance(rank: Rank, by: Order) -> str:
    return f"{rank.first[by]:.2f}" if by in rank.first else ""


def candidate_text(result: Result, rank: Rank) -> Summary:
    """Return all figures of an outcome that fits."""
    outcome = rank.outcome
    facts = [
        ("plan", f"{outcome.framework}: {outcome.layout}"),
        ("step", ", ".join(_speed_texts(outcome))),
        ("time", ", ".join(_time(result, outcome))),
        ("cost", ", ".join([*_money(outcome), *_tie(rank)])),
        ("energy", ", ".join(_energy(outcome))),
        ("memory", ", ".join(_room(outcome))),
        ("limits", "; ".join([*limits(outcome), outcome.binding])),
    ]
    rows = [Fact(label=label, text=text, copied=label == "plan") for label, text in facts if text]
    return Summary(f"{rank.place}. {outcome.candidate}", rows, whole=True)


def limits(outcome: CandidateOutcome) -> list[str]:
    """Return the goals that an outcome misses, or the probability with which it meets each."""
    sold = ["not sold"] if outcome.hypothetical else []
    missed = {miss.partition(":")[0] for miss in outcome.misses}
    kept = [
        f"{goal} {100 * chance:.0f} % sure"
        for goal, chance in outcome.chances.items()
        if goal not in missed
    ]
    return [*sold, *outcome.misses, *kept]


def _speed_texts(outcome: CandidateOutcome) -> Iterator[str]:
    if outcome.step_s is not None and outcome.tokens_per_s is not None:
        step, rate, mfu = outcome.step_s, outcome.tokens_per_s, outcome.utilisation
        if not outcome.jobs:
            low, high = seconds_text(step.low), seconds_text(step.high)
            yield f"{seconds_text(step.value)} ({low} to {high})"
        yield f"{count_text(rate.value)} ({count_text(rate.low)}-{count_text(rate.high)}) tokens/s"
        yield f"MFU {100 * mfu.value:.0f} ({100 * mfu.low:.0f}-{100 * mfu.high:.0f}) %"
    if outcome.native_step_s is not None and outcome.framework != "native":
        yield f"our own runtime {seconds_text(outcome.native_step_s)}"


def _time(result: Result, outcome: CandidateOutcome) -> Iterator[str]:
    if outcome.hours is not None:
        yield days_text(outcome.hours)
    if outcome.result_hours is not None and outcome.lead_days is not None:
        yield f"the result after {days_text(outcome.result_hours)}"
    slack = slack_days(result, outcome)
    if slack is not None and slack > 0:
        yield f"{slack:.1f} days to spare"


def _money(outcome: CandidateOutcome) -> Iterator[str]:
    if outcome.usd is not None:
        yield f"{range_text(outcome.usd)} USD"
    if outcome.capital_usd is not None:
        yield f"capex or commitment {outcome.capital_usd:,.0f} USD"


def _tie(rank: Rank) -> Iterator[str]:
    price, paid = rank.ties_at_usd_per_device_hour, rank.outcome.usd_per_device_hour
    if price is not None and paid is not None:
        yield f"ties with the first at {price:.2f} USD per device hour, now {paid.value:.2f}"


def _energy(outcome: CandidateOutcome) -> Iterator[str]:
    if outcome.energy_kwh is not None:
        yield f"{outcome.energy_kwh.value:,.0f} kWh"
    if outcome.carbon_kg is not None:
        yield f"{outcome.carbon_kg.value:,.0f} kg of CO2"


def _room(outcome: CandidateOutcome) -> Iterator[str]:
    yield f"{bytes_text(outcome.headroom_bytes)} free"
    if outcome.host_bytes:
        yield f"{bytes_text(outcome.host_bytes)} on the host"


def changes_table(title: str, changes: Iterable[Changed]) -> Table:
    """Return one row per change, planned again."""
    table = plain_table(
        "change", "time", "cost", "worth", "links", "plan", right=(1, 2, 3, 4), title=title
    )
    table.caption = (
        "cost at the same price; worth: USD per device hour at most; links: share of the step"
    )
    table.caption_justify = "left"
    for change in changes:
        if not change.outcome.fits:
            table.add_row(change.words, "", "", "", "", change.outcome.binding)
            continue
        premium = change.premium_usd_per_device_hour
        table.add_row(
            change.words,
            f"{100 * (change.time - 1):+.1f} %",
            "" if change.cost is None else f"{100 * (change.cost - 1):+.1f} %",
            "" if premium is None else f"{premium:+.2f}",
            f"{100 * change.outcome.link_share:.0f} %",
            change.outcome.layout if change.plan_changed else "same plan",
        )
    return table


def break_even_table(curves: Iterable[BreakEven]) -> Table:
    """Return the cost of a useful device-hour at some shares of hours used."""
    table = plain_table(
        "candidate",
        *(f"{100 * share:.0f} %" for share in SHOWN_SHARES),
        right=range(1, 1 + len(SHOWN_SHARES)),
        title="USD per useful device hour, by share of hours used",
    )
    for curve in curves:
        table.add_row(curve.name, *(f"{curve.price_at(share):.2f}" for share in SHOWN_SHARES))
    return table


def cash_table(curves: Sequence[BreakEven]) -> Table:
    """Return the cost of all devices of each candidate on the first day and in each year."""
    years = max(len(curve.cash_usd) for curve in curves) - 1
    names = ("first day", *(f"year {year}" for year in range(1, years + 1)), "TCO", "NPV")
    table = plain_table(
        "candidate",
        *names,
        right=range(1, 1 + len(names)),
        title="USD paid, before tax",
    )
    for curve in curves:
        paid = [f"{usd:,.0f}" for usd in curve.cash_usd]
        blank = [""] * (years + 1 - len(paid))
        present = range_text(curve.present_value_usd)
        table.add_row(curve.name, *paid, *blank, f"{sum(curve.cash_usd):,.0f}", present)
    table.caption = (
        "first day: capex, years: opex, TCO: both; the last year has the residual value of "
        "what was bought; NPV at the study's interest"
    )
    table.caption_justify = "left"
    return table


def provenance_text(result: Result, today: datetime.date | None = None) -> str:
    """Return the sources of prices and predictions, and the age of the prices."""
    counts: dict[str, int] = {}
    for outcome in result.outcomes:
        for name, count in outcome.provenance.items():
            counts[name] = counts.get(name, 0) + count
    figures = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    prices = dict.fromkeys(outcome.price for outcome in result.outcomes)
    ages = [age for price in prices for age in price_ages(price, today or datetime.date.today())]
    old = f"; the oldest dated one is {max(ages)} months old" if ages else ""
    return f"figures behind the predictions: {figures or 'none'}\nprices: {'; '.join(prices)}{old}"
