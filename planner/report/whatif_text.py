"""What a study found, for a terminal (rich renderables)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.units import bytes_text, seconds_text
from planner.whatif.evaluate import Outcome
from planner.whatif.ranking import Rank, measured_first
from planner.whatif.run import Changed, Result
from planner.whatif.span import Span


def result_text(result: Result) -> RenderableType:
    """Return verdict, candidates in order, what did not fit, marginal values, doubts."""
    parts: list[RenderableType] = []
    if result.study.question:
        parts.append(Text(result.study.question, style="bold"))
    parts.append(verdict(result))
    for model, ranks in result.ranks.items():
        if ranks:
            parts.append(ranks_table(model, ranks))
    parts += [
        f"{outcome.candidate}, {outcome.model}: {outcome.binding}"
        for outcome in result.outcomes
        if not outcome.fits
    ]
    if result.marginal and result.base is not None:
        parts.append(changes_table(f"One thing changed: {result.base.candidate}", result.marginal))
    for curve in result.curves:
        parts.append(changes_table(f"{curve[0].words.split(' x ')[0]} step by step", curve))
    if result.doubts:
        shares = ", ".join(f"{doubt.cause} {100 * doubt.share:.0f} %" for doubt in result.doubts)
        parts.append(f"uncertainty of the first: {shares}")
    if result.best is not None:
        parts += [f"measure first: {text}" for text in measured_first(result.study, result.best)]
    if result.flips:
        parts.append(
            f"15 % against the first and for another would put ahead: {listed(result.flips)}"
        )
    parts += break_even_lines(result)
    parts.append(provenance_text(result))
    return Group(*parts)


def verdict(result: Result) -> str:
    """Return the answer in one sentence."""
    best = result.best
    if result.interrupted:
        left = len(result.candidates) * len(result.study.models) - len(result.outcomes)
        return f"Interrupted: {len(result.outcomes)} done, {left} not looked at."
    if best is None:
        closest = min(
            (rank.outcome for ranks in result.ranks.values() for rank in ranks),
            key=lambda outcome: len(outcome.misses),
            default=None,
        )
        if closest is None:
            return "Nothing fits; each candidate's reason is below."
        return f"None reaches the goal; {closest.candidate} misses {'; '.join(closest.misses)}."
    ties = [rank.outcome.candidate for rank in result.ranks[best.model] if rank.tied]
    said = f"{best.candidate} for {best.model}: {_costs(best)}"
    if ties:
        said += f"; within {100 * result.study.assumptions.tie:.0f} %: {listed(ties)}"
    said += f". Bound by {best.binding}."
    return " ".join([said, *filter(None, (_largest(result), _fewest(result)))])


def _largest(result: Result) -> str | None:
    """Name the largest model that meets the goal, where several are compared."""
    if len(result.study.models) == 1:
        return None
    meeting = [
        rank.outcome for ranks in result.ranks.values() for rank in ranks if not rank.outcome.misses
    ]
    if not meeting:
        return None
    order = {model: place for place, model in enumerate(result.study.models)}
    best = max(meeting, key=lambda outcome: outcome.tokens or order[outcome.model])
    return f"The largest model that meets the goal: {best.model}, on {best.candidate}."


def _fewest(result: Result) -> str | None:
    """Name the smallest cluster that keeps the goal's deadline, where sizes differ."""
    if result.study.goal.deadline_days is None or len({o.devices for o in result.outcomes}) == 1:
        return None
    keeping = [
        outcome
        for outcome in result.outcomes
        if outcome.fits and not any(miss.startswith("deadline") for miss in outcome.misses)
    ]
    if not keeping:
        return None
    least = min(keeping, key=lambda outcome: outcome.devices)
    return f"Fewest devices that keep the deadline: {least.devices}, {least.candidate}."


def _costs(outcome: Outcome) -> str:
    parts = []
    if outcome.step_s is not None:
        parts.append(f"step {seconds_text(outcome.step_s.value)}")
    if outcome.hours is not None:
        parts.append(days_text(outcome.hours))
    if outcome.usd is not None:
        parts.append(usd_text(outcome.usd))
    if outcome.energy_kwh is not None:
        parts.append(f"{outcome.energy_kwh.value:,.0f} kWh")
    return ", ".join(parts)


def ranks_table(model: str, ranks: Iterable[Rank]) -> Table:
    """Return one row per outcome that fits."""
    table = Table(title=model, title_justify="left")
    table.add_column("")
    # Names and plans are what readers copy: they are folded, never cut.
    table.add_column("candidate, its plan", overflow="fold", ratio=3)
    for name in ("step", "time", "USD", "ties at USD/h", "kWh", "CO2 kg", "free"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("limits", overflow="fold", ratio=2)
    for rank in ranks:
        outcome, price = rank.outcome, rank.ties_at_usd_per_device_hour
        table.add_row(
            f"{'=' if rank.tied else ''}{rank.place}{'*' if rank.pareto else ''}",
            f"{outcome.candidate}\n{outcome.layout}",
            seconds_text(outcome.step_s.value) if outcome.step_s else "",
            days_text(outcome.hours) if outcome.hours else "",
            range_text(outcome.usd) if outcome.usd else "",
            "" if price is None else f"{price:.2f}",
            f"{outcome.energy_kwh.value:,.0f}" if outcome.energy_kwh else "",
            f"{outcome.carbon_kg.value:,.0f}" if outcome.carbon_kg else "",
            bytes_text(outcome.headroom_bytes),
            "; ".join([*outcome.misses, outcome.binding]),
        )
    table.caption = "= tied with the first; * no other is better in time, cost and energy together"
    table.caption_justify = "left"
    return table


def changes_table(title: str, changes: Iterable[Changed]) -> Table:
    """Return one row per change, planned again."""
    table = Table(title=title, title_justify="left")
    table.add_column("change")
    for name in ("time", "cost at the same price", "worth at most, USD/device h"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    for change in changes:
        if not change.outcome.fits:
            table.add_row(change.words, "", "", "", change.outcome.binding)
            continue
        premium = change.premium_usd_per_device_hour
        table.add_row(
            change.words,
            f"{100 * (change.time - 1):+.1f} %",
            "" if change.cost is None else f"{100 * (change.cost - 1):+.1f} %",
            "" if premium is None else f"{premium:+.2f}",
            change.outcome.layout if change.plan_changed else "same plan",
        )
    return table


def break_even_lines(result: Result) -> list[str]:
    """Say from which share of used hours on each purchase is cheaper than each rent."""
    return [
        f"{curve.name} against {other}: "
        + ("never cheaper" if share is None else f"cheaper above {100 * share:.0f} % of hours used")
        for curve in result.break_even
        for other, share in curve.against
    ]


def provenance_text(result: Result) -> str:
    """Say what prices and predictions rest on."""
    counts: dict[str, int] = {}
    for outcome in result.outcomes:
        for name, count in outcome.provenance.items():
            counts[name] = counts.get(name, 0) + count
    figures = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    prices = dict.fromkeys(outcome.price for outcome in result.outcomes)
    return f"figures behind the predictions: {figures or 'none'}\nprices: " + "; ".join(prices)


def range_text(span: Span, scale: float = 1.0) -> str:
    """Return a figure with its range.

    >>> range_text(Span(value=1200.0, low=900.0, high=2000.0))
    '1,200 (900-2,000)'
    """
    digits = 0 if span.value * scale >= 100 else 1
    value, low, high = (
        f"{number * scale:,.{digits}f}" for number in (span.value, span.low, span.high)
    )
    return value if low == high else f"{value} ({low}-{high})"


def days_text(run_hours: Span) -> str:
    """Return a duration with its range, in hours below two days.

    >>> days_text(Span(value=30.0, low=20.0, high=50.0))
    '30.0 (20.0-50.0) h'
    """
    if run_hours.value < 48:
        return f"{range_text(run_hours)} h"
    return f"{range_text(run_hours, 1 / 24)} days"


def usd_text(usd: Span) -> str:
    """Return dollars with their range."""
    return f"{range_text(usd)} USD"


def listed(names: Iterable[str]) -> str:
    """Return names, five at most."""
    every = list(names)
    more = f" and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(every[:5]) + more
