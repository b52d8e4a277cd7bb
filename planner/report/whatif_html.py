"""What a study found, as one page that needs no network and no script: the answer, then tables,
pictures, assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import resources

import jinja2

from planner.catalog import Quantity
from planner.documents.units import GIB, bytes_text, count_text, seconds_text
from planner.report import svg
from planner.report.whatif_text import SHOWN_SHARES, limits, provenance_text
from planner.whatif.answers import answers, slack_days
from planner.whatif.evaluate import Outcome
from planner.whatif.ranking import figure as compared
from planner.whatif.ranking import measured_first, ordered_by
from planner.whatif.run import Changed, Result
from planner.whatif.span import exact
from planner.whatif.study import Assumptions
from planner.whatif.verdicts import verdicts
from planner.whatif.words import days_text, range_text, usd_text

MOST_BARS = 24
"""Candidates in a bar chart; the table has all of them."""
MINUTE_S = 60.0


def study_page(result: Result) -> str:
    """Return the report of a study."""
    template = resources.files("planner.report").joinpath("whatif.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        result=result,
        study=result.study,
        verdicts=verdicts(result),
        answers=answers(result),
        slack=partial(slack_days, result),
        limits=limits,
        provenance=provenance_text(result).splitlines(),
        figures=[(name, figure) for name, figure in _figures(result) if figure],
        points=[
            f"{place}. {point.label}" for place, point in enumerate(_points(result)[:MOST_BARS], 1)
        ],
        assumptions=assumption_rows(result.study.assumptions),
        measure=measured_first(result.study, result.best) if result.best else [],
        failed=[outcome for outcome in result.outcomes if not outcome.fits],
        shares=SHOWN_SHARES,
        seconds=seconds_text,
        size=bytes_text,
        count=count_text,
        span=range_text,
        days=days_text,
        percent=lambda share: f"{100 * (share - 1):+.1f} %",
        cells=_cells(result),
    )


def _figures(result: Result) -> Iterator[tuple[str, str]]:
    first = [rank.outcome for ranks in result.ranks.values() for rank in ranks][:MOST_BARS]
    yield (
        "Cost against time",
        svg.scatter("Cost against time", _points(result)[:MOST_BARS], "days", "USD"),
    )
    yield "Cost with its range", svg.bars("Cost with its range", _bars(first, "usd"), "USD")
    yield (
        "Time with its range",
        svg.bars("Time with its range", _bars(first, "result_hours", 1 / 24), "days"),
    )
    yield "Tokens that the budget pays for", frontier(result)
    parts, unit = step_parts(first)
    yield "Step time by cause", svg.stacked("Step time by cause", parts, unit)
    yield (
        "Memory of the fullest stage",
        svg.stacked("Memory of the fullest stage", _memory(first), "GiB"),
    )
    yield (
        "What one change is worth",
        svg.bars("What one change is worth", _tornado(result.marginal), "% of time"),
    )
    for curve in result.curves:
        name = f"Step time against {curve[0].words.split(' x ')[0]}"
        points = tuple(
            (change.factor, change.outcome.step_s.value)
            for change in curve
            if change.outcome.fits and change.outcome.step_s is not None
        )
        yield name, svg.lines(name, [svg.Line(name=name, points=points)], "factor", "s", log=False)
    yield (
        "Price of a useful device hour",
        svg.lines(
            "Price of a useful device hour",
            [
                svg.Line(
                    name=curve.name,
                    points=tuple(
                        (100 * share, usd)
                        for share, usd in zip(
                            curve.utilisation, curve.usd_per_device_hour, strict=True
                        )
                    ),
                )
                for curve in result.break_even
            ],
            "% of hours used",
            "USD",
            log=False,
        ),
    )


def _points(result: Result) -> list[svg.Point]:
    """Return days and dollars of each candidate; the area of a dot is its energy."""
    energies = [o.energy_kwh.value for o in result.outcomes if o.energy_kwh is not None]
    most = max(energies, default=1.0)
    points = []
    for series, ranks in enumerate(result.ranks.values()):
        for rank in ranks:
            outcome = rank.outcome
            hours = outcome.result_hours
            if hours is None or outcome.usd is None:
                continue
            energy = outcome.energy_kwh.value / most if outcome.energy_kwh else 0.0
            points.append(
                svg.Point(
                    x=hours.value / 24,
                    y=max(outcome.usd.value, 1e-6),
                    label=f"{_name(result, outcome)}: {days_text(exact(hours.value))}, "
                    f"{usd_text(exact(outcome.usd.value))}",
                    series=series,
                    size=4 + 8 * energy**0.5,
                    marked=rank.pareto,
                )
            )
    return points


def _bars(outcomes: Sequence[Outcome], field: str, scale: float = 1.0) -> list[svg.Bar]:
    found = []
    several = len({outcome.model for outcome in outcomes}) > 1
    for outcome in outcomes:
        span = getattr(outcome, field)
        if span is not None:
            found.append(
                svg.Bar(
                    name=f"{outcome.candidate} {outcome.model}" if several else outcome.candidate,
                    value=span.value * scale,
                    low=span.low * scale,
                    high=span.high * scale,
                    note=svg.number(span.value * scale),
                )
            )
    return found


def step_parts(outcomes: Sequence[Outcome]) -> tuple[list[tuple[str, dict[str, float]]], str]:
    """Return what each step is made of, in the unit that people use for steps so long."""
    longest = max((sum(o.step_parts.values()) for o in outcomes), default=0.0)
    scale, unit = 1e3, "ms"
    if longest >= 1.0:
        scale, unit = (1 / 60, "minutes") if longest >= 2 * MINUTE_S else (1.0, "s")
    several = len({outcome.model for outcome in outcomes}) > 1
    rows = [
        (
            f"{o.candidate} {o.model}" if several else o.candidate,
            {name: size * scale for name, size in o.step_parts.items()},
        )
        for o in outcomes
    ]
    return rows, unit


def _memory(outcomes: Sequence[Outcome]) -> list[tuple[str, dict[str, float]]]:
    rows = []
    for outcome in outcomes:
        fullest = max(outcome.memory_parts, key=lambda parts: sum(parts.values()))
        sizes = {name: size / GIB for name, size in fullest.items()}
        sizes["free"] = max(0.0, outcome.headroom_bytes) / GIB
        rows.append((f"{outcome.candidate} {outcome.model}", sizes))
    return rows


def _tornado(changes: Sequence[Changed]) -> list[svg.Bar]:
    known = sorted((c for c in changes if c.outcome.fits), key=lambda c: -abs(c.time - 1))
    return [
        svg.Bar(
            name=change.words,
            value=100 * (change.time - 1),
            low=100 * (change.time - 1),
            high=100 * (change.time - 1),
            note=f"{100 * (change.time - 1):+.1f} %"
            + (", another plan" if change.plan_changed else ""),
        )
        for change in known
    ]


def frontier(result: Result) -> str:
    """Return tokens that a budget pays for over the size of the model, and the tokens wanted."""
    goals = sorted(
        {(float(o.parameters), o.tokens) for o in result.outcomes if o.fits and o.tokens}
    )
    if len(result.study.models) == 1 or result.study.goal.budget_usd is None or not goals:
        return ""
    found = []
    for name in result.candidates:
        rows = sorted(
            (float(o.parameters), o.tokens_in_budget)
            for o in result.outcomes
            if o.candidate == name and o.tokens_in_budget
        )
        if rows:
            found.append(svg.Line(name=name, points=tuple(rows)))
    found.append(svg.Line(name="wanted", points=tuple(goals), dashed=True))
    return svg.lines("Tokens that the budget pays for", found, "parameters", "tokens", log=True)


def _cells(result: Result) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each model's figures on each candidate, with how they compare to the row's best."""
    models, names = result.study.models, list(result.candidates)
    if len(models) == 1:
        return []
    found = {(o.model, o.candidate): o for o in result.outcomes}
    by = ordered_by(result.study, result.outcomes)
    rows = []
    for model in models:
        known = [found.get((model, name)) for name in names]
        sizes = [compared(o, by) if o is not None and o.fits else math.inf for o in known]
        least = min(sizes)
        rows.append(
            (model, [(_cell(o), _shade(size, least)) for o, size in zip(known, sizes, strict=True)])
        )
    return rows


def _shade(size: float, least: float) -> str:
    if size == math.inf:
        return "none"
    return "best" if size <= 1.05 * least else ""


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if not outcome.fits:
        return "does not fit"
    parts = [usd_text(exact(outcome.usd.value))] if outcome.usd else []
    if outcome.hours is not None:
        parts.append(days_text(exact(outcome.hours.value)))
    if outcome.misses:
        parts.append("misses " + outcome.misses[0].split(":")[0])
    return ", ".join(parts)


def _name(result: Result, outcome: Outcome) -> str:
    several = len(result.study.models) > 1
    return f"{outcome.candidate}, {outcome.model}" if several else outcome.candidate


def assumption_rows(assumed: Assumptions) -> list[tuple[str, str, str]]:
    """Return (what, value, source) of every assumption; what nobody said is called a default."""
    known, failures, owning = assumed.facility, assumed.failures, assumed.owning
    quantities = [
        *([("goodput", assumed.goodput)] if assumed.goodput is not None else []),
        ("failures of a device an hour", failures.per_device_hour),
        ("interruptions of a spot instance an hour", failures.spot_per_node_hour),
        ("restart, s", failures.restart_s),
        ("checkpoint, bytes per parameter", failures.checkpoint_bytes_per_parameter),
        ("store, bytes/s per device", failures.store_bytes_per_s_per_device),
        ("hours lost at any size", failures.other),
        ("value kept from year to year", owning.retained_a_year),
        ("storage, USD per device", owning.storage_usd_per_device),
        ("spares, share of hardware", owning.spares),
        ("support a year, share of hardware", owning.support_a_year),
        ("insurance a year, share of hardware", owning.insurance_a_year),
        ("staff, USD per device and year", owning.staff_usd_per_device_year),
        ("hosting, USD per kW and month", owning.hosting_usd_per_kw_month),
        ("idle power, share of power in use", owning.idle_power),
        ("days until bought devices are there", assumed.lead_days),
        ("node power over design power", known.node_power_over_tdp),
        ("network, W per device", known.network_w_per_device),
        ("power usage effectiveness", known.power_usage_effectiveness),
        ("electricity, USD per kWh", known.electricity_usd_per_kwh),
        ("exponent of compute over power limit", assumed.power_limit_exponent),
    ]
    rows = [(name, _range(quantity), quantity.source) for name, quantity in quantities]
    grams = assumed.carbon_g_per_kwh
    if grams is None:
        country = assumed.country
        of_country = known.carbon_g_per_kwh.by_country.get(country)
        rows.append(
            ("carbon, g per kWh", f"{of_country:g}, {country}", known.carbon_g_per_kwh.source)
        )
    else:
        rows.append(("carbon, g per kWh", f"{grams:g}", "the study"))
    for name, field, value in (
        ("years until sold, or compared", "years", assumed.years),
        ("interest a year", "interest", assumed.interest),
        ("share of bought or reserved hours used", "utilisation", assumed.utilisation),
        ("change of rents a year", "rent_change_a_year", assumed.rent_change_a_year),
        ("tied within", "tie", assumed.tie),
    ):
        said = "the study" if field in assumed.model_fields_set else "default"
        rows.append((name, f"{value:g}", said))
    for name, rate in (("sales tax", owning.sales_tax), ("income tax", owning.income_tax)):
        rows.append((name, f"{rate:g}", "the study" if rate else "default"))
    rows += [
        (f"{code} in USD", f"{exchange.usd:g} on {exchange.date}", exchange.source)
        for code, exchange in assumed.currencies.items()
    ]
    return rows


def _range(quantity: Quantity) -> str:
    if quantity.low == quantity.high:
        return f"{quantity.value:g}"
    return f"{quantity.value:g} ({quantity.low:g} to {quantity.high:g})"
