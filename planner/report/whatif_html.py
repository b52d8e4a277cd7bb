"""What a study found, as one page that needs no network: pictures, tables, assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from planner.on_use import OnUse
from planner.report.html import figure_html
from planner.report.whatif_text import (
    SHOWN_SHARES,
    days_text,
    provenance_text,
    range_text,
    usd_text,
    verdict,
)
from planner.units import GIB, bytes_text, count_text, seconds_text
from planner.whatif.answers import answers, slack_days
from planner.whatif.break_even import BreakEven
from planner.whatif.evaluate import Outcome
from planner.whatif.ranking import figure as compared
from planner.whatif.ranking import measured_first, ordered_by
from planner.whatif.run import Changed, Result
from planner.whatif.span import Span, exact

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = OnUse("plotly.graph_objects", "an HTML report")

MOST_BARS = 24
"""Candidates in a bar chart; the table has all of them."""


def study_page(result: Result) -> str:
    """Return the report of a study."""
    figures = [(name, figure) for name, figure in _figures(result) if figure.data]
    template = resources.files("planner.report").joinpath("whatif.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        result=result,
        study=result.study,
        verdict=verdict(result),
        answers=answers(result),
        slack=partial(slack_days, result),
        provenance=provenance_text(result).splitlines(),
        figures=[
            (name, figure_html(figure, first=place == 0))
            for place, (name, figure) in enumerate(figures)
        ],
        assumptions=_assumptions(result),
        measure=measured_first(result.study, result.best) if result.best else [],
        failed=[outcome for outcome in result.outcomes if not outcome.fits],
        shares=SHOWN_SHARES,
        seconds=seconds_text,
        size=bytes_text,
        count=count_text,
        span=range_text,
        days=days_text,
        usd=usd_text,
        percent=lambda share: f"{100 * (share - 1):+.1f} %",
    )


def _figures(result: Result) -> list[tuple[str, go.Figure]]:
    first = [rank.outcome for ranks in result.ranks.values() for rank in ranks]
    shown = first[:MOST_BARS]
    figures = [
        ("Cost against time", pareto_figure(result)),
        ("Cost with its range", bars_figure(shown, "usd", "USD")),
        ("Days with their range", bars_figure(shown, "hours", "days", scale=1 / 24)),
        ("Models and candidates", models_figure(result)),
        ("Tokens that the budget pays for", frontier_figure(result)),
        ("Step time by cause", parts_figure(shown)),
        ("Step of the first, cause by cause", waterfall_figure(result.best)),
        ("Memory of the fullest stage", memory_figure(shown)),
        ("Memory of the first, stage by stage", stages_figure(result.best)),
        ("What one change is worth", tornado_figure(result.marginal)),
    ]
    figures += [
        (f"Step time against {curve[0].words.split(' x ')[0]}", curve_figure(curve))
        for curve in result.curves
    ]
    if result.break_even:
        figures.append(("Buying against renting", break_even_figure(result.break_even)))
    return figures


def pareto_figure(result: Result) -> go.Figure:
    """Scatter of days and dollars; the area of a dot is its energy."""
    figure = go.Figure()
    most = max(
        (o.energy_kwh.value for o in result.outcomes if o.energy_kwh is not None), default=1.0
    )
    for model, ranks in result.ranks.items():
        known = [r for r in ranks if r.outcome.hours and r.outcome.usd]
        if not known:
            continue
        figure.add_scatter(
            name=model,
            mode="markers",
            x=[r.outcome.hours.value / 24 for r in known if r.outcome.hours],
            y=[r.outcome.usd.value for r in known if r.outcome.usd],
            text=[f"{r.outcome.candidate}<br>{r.outcome.layout}" for r in known],
            marker={
                "size": [
                    8 + 22 * ((r.outcome.energy_kwh.value / most) ** 0.5)
                    if r.outcome.energy_kwh
                    else 8
                    for r in known
                ],
                "symbol": ["diamond" if r.pareto else "circle" for r in known],
            },
        )
    figure.update_layout(xaxis_title="days", yaxis_title="USD")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def bars_figure(
    outcomes: Sequence[Outcome], field: str, unit: str, scale: float = 1.0
) -> go.Figure:
    """Bars of one figure with its range, best first."""
    spans: list[tuple[Outcome, Span]] = []
    for outcome in outcomes:
        span = getattr(outcome, field)
        if span is not None:
            spans.append((outcome, span))
    if not spans:
        return go.Figure()
    return go.Figure(
        go.Bar(
            x=[_name(outcome) for outcome, _ in spans],
            y=[span.value * scale for _, span in spans],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [(span.high - span.value) * scale for _, span in spans],
                "arrayminus": [(span.value - span.low) * scale for _, span in spans],
            },
        ),
        layout={"yaxis": {"title": unit}},
    )


def parts_figure(outcomes: Sequence[Outcome]) -> go.Figure:
    """Stacked bars: milliseconds of a step by cause."""
    parts = [{name: size for name, size in o.step_parts.items() if size > 0} for o in outcomes]
    return go.Figure(
        _stacked([_name(o) for o in outcomes], parts, scale=1e3),
        layout={"barmode": "stack", "yaxis": {"title": "ms"}},
    )


def _stacked(
    labels: Sequence[str], parts: Sequence[Mapping[str, float]], *, scale: float
) -> list[go.Bar]:
    """Return bars of each cause, one piece for each label."""
    names = dict.fromkeys(name for of_label in parts for name in of_label)
    return [
        go.Bar(
            name=name,
            x=list(labels),
            y=[scale * of_label.get(name, 0.0) for of_label in parts],
        )
        for name in names
    ]


def waterfall_figure(best: Outcome | None) -> go.Figure:
    """One step from its first cause to its end."""
    if best is None:
        return go.Figure()
    parts = {name: 1e3 * size for name, size in best.step_parts.items() if size > 0}
    return go.Figure(
        go.Waterfall(
            x=[*parts, "step"],
            y=[*parts.values(), sum(parts.values())],
            measure=[*["relative"] * len(parts), "total"],
        ),
        layout={"yaxis": {"title": "ms"}},
    )


def models_figure(result: Result) -> go.Figure:
    """What each model costs, or takes, on each candidate; crossed out where none fits."""
    models, names = result.study.models, list(result.candidates)
    if len(models) == 1:
        return go.Figure()
    found = {(o.model, o.candidate): o for o in result.outcomes}
    by = ordered_by(result.study, result.outcomes)
    values: list[list[float | None]] = []
    texts: list[list[str]] = []
    for model in models:
        known = [found.get((model, name)) for name in names]
        sizes = [compared(o, by) if o is not None and o.fits else math.inf for o in known]
        least = min(sizes)
        values.append([None if size == math.inf else size / least for size in sizes])
        texts.append([_cell(outcome) for outcome in known])
    return go.Figure(
        go.Heatmap(
            x=names,
            y=list(models),
            z=values,
            text=texts,
            texttemplate="%{text}",
            colorscale="Blues",
            colorbar={"title": {"text": f"{by}, over the best of its row"}},
        )
    )


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if not outcome.fits:
        return "does not fit"
    text = usd_text(exact(outcome.usd.value)) if outcome.usd else ""
    if outcome.hours is not None:
        text += f"<br>{days_text(exact(outcome.hours.value))}"
    return text + ("<br>misses " + outcome.misses[0].split(":")[0] if outcome.misses else "")


def frontier_figure(result: Result) -> go.Figure:
    """Tokens that a budget pays for over the size of the model, a line for each candidate."""
    figure = go.Figure()
    goals = [(o.parameters, o.tokens) for o in result.outcomes if o.fits and o.tokens]
    if len(result.study.models) == 1 or result.study.goal.budget_usd is None or not goals:
        return figure
    for name in result.candidates:
        rows = sorted(
            (o.parameters, o.tokens_in_budget)
            for o in result.outcomes
            if o.candidate == name and o.tokens_in_budget is not None
        )
        figure.add_scatter(
            name=name, mode="lines+markers", x=[p for p, _ in rows], y=[t for _, t in rows]
        )
    goals = sorted(set(goals))
    figure.add_scatter(
        name="below: not reached",
        mode="lines",
        line={"dash": "dash", "color": "#888"},
        fill="tozeroy",
        fillpattern={"shape": "/", "fgcolor": "#888"},
        fillcolor="rgba(128,128,128,0.1)",
        x=[parameters for parameters, _ in goals],
        y=[tokens for _, tokens in goals],
    )
    figure.update_layout(xaxis_title="parameters", yaxis_title="tokens")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def stages_figure(best: Outcome | None) -> go.Figure:
    """Stacked bars: GiB by cause on each stage of one plan, where there are several."""
    if best is None or len(best.memory_parts) == 1:
        return go.Figure()
    labels = [f"stage {index}" for index in range(len(best.memory_parts))]
    bars = _stacked(labels, best.memory_parts, scale=1 / GIB)
    figure = go.Figure(bars, layout={"barmode": "stack", "yaxis": {"title": "GiB"}})
    figure.add_hline(y=best.capacity_bytes / GIB, line_dash="dash")
    return figure


def memory_figure(outcomes: Sequence[Outcome]) -> go.Figure:
    """Stacked bars: GiB by cause on the fullest stage, with the device's memory above."""
    fullest = [max(o.memory_parts, key=lambda parts: sum(parts.values())) for o in outcomes]
    bars = _stacked([_name(o) for o in outcomes], fullest, scale=1 / GIB)
    free = go.Bar(
        name="free",
        x=[_name(o) for o in outcomes],
        y=[max(0.0, o.headroom_bytes) / GIB for o in outcomes],
        marker={"color": "rgba(128,128,128,0.25)"},
    )
    return go.Figure(
        [*bars, free] if outcomes else [],
        layout={"barmode": "stack", "yaxis": {"title": "GiB"}},
    )


def tornado_figure(changes: Sequence[Changed]) -> go.Figure:
    """Bars of the change in time, the largest on top."""
    known = sorted((c for c in changes if c.outcome.fits), key=lambda c: abs(c.time - 1))
    if not known:
        return go.Figure()
    return go.Figure(
        go.Bar(
            orientation="h",
            y=[c.words for c in known],
            x=[100 * (c.time - 1) for c in known],
            text=["plan changes" if c.plan_changed else "" for c in known],
        ),
        layout={"xaxis": {"title": "% of time"}},
    )


def curve_figure(changes: Sequence[Changed]) -> go.Figure:
    """Step time over the factor; a diamond where the plan is another one."""
    known = [c for c in changes if c.outcome.fits and c.outcome.step_s is not None]
    symbols, last = [], None
    for change in known:
        symbols.append("circle" if last in (None, change.outcome.layout) else "diamond")
        last = change.outcome.layout
    return go.Figure(
        [
            go.Scatter(
                x=[c.factor for c in known],
                y=[c.outcome.step_s.value for c in known if c.outcome.step_s],
                mode="lines+markers",
                text=[c.outcome.layout for c in known],
                marker={"symbol": symbols, "size": 10},
            )
        ]
        if known
        else [],
        layout={"xaxis": {"title": "factor"}, "yaxis": {"title": "s"}},
    )


def break_even_figure(curves: Sequence[BreakEven]) -> go.Figure:
    """Dollars per useful device hour over the share of hours used; rents as level lines."""
    figure = go.Figure()
    for curve in curves:
        figure.add_scatter(
            name=curve.name,
            mode="lines",
            x=[100 * share for share in curve.utilisation],
            y=list(curve.usd_per_device_hour),
        )
    figure.update_layout(xaxis_title="% of hours used", yaxis_title="USD per useful device hour")
    return figure


def _name(outcome: Outcome) -> str:
    return f"{outcome.candidate} {outcome.model}"


def _assumptions(result: Result) -> list[tuple[str, str, str]]:
    """Return (what, value, source) of every assumption that counts."""
    assumed = result.study.assumptions
    known = assumed.facility
    quantities = [
        ("goodput", assumed.goodput),
        ("spot hours lost", assumed.spot_lost),
        ("residual value", assumed.residual),
        ("days until bought devices are there", assumed.lead_days),
        ("node power over design power", known.node_power_over_tdp),
        ("network, W per device", known.network_w_per_device),
        ("power usage effectiveness", known.power_usage_effectiveness),
        ("electricity, USD per kWh", known.electricity_usd_per_kwh),
    ]
    rows = [(name, f"{q.value:g} ({q.low:g} to {q.high:g})", q.source) for name, q in quantities]
    grams = assumed.carbon_g_per_kwh
    rows.append(
        (
            "carbon, g per kWh",
            f"{grams:g}" if grams is not None else assumed.country,
            "the study" if grams is not None else known.carbon_g_per_kwh.source,
        )
    )
    rows.append(
        ("years until sold, interest", f"{assumed.years:g}, {assumed.interest:g}", "the study")
    )
    rows.append(("share of owned hours used", f"{assumed.utilisation:g}", "the study"))
    return rows
