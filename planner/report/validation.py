"""One self-contained HTML page about a validation: scores by source, predicted against measured."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from planner.accuracy.scores.validate import ScoredRow, Validation, macro
from planner.process.on_use import OnUse
from planner.report.html import figure_html

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = OnUse("plotly.graph_objects", "an HTML report")

MOST_POINTS = 2000
"""Drawn for each source and picture."""


def page(validation: Validation) -> str:
    """Return the report."""
    figures: list[tuple[str, str]] = []
    for name in dict.fromkeys(row.measured.source for row in validation.rows):
        rows = [row for row in validation.rows if row.measured.source == name]
        for quantity, unit in (("step time", "s"), ("peak memory", "GiB")):
            figure = scatter(rows, quantity, unit)
            if figure is not None:
                html = figure_html(figure, first=not figures)
                figures.append((f"{name}: {quantity}", html))
    template = resources.files("planner.report").joinpath("validation.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        validation=validation,
        figures=figures,
        average=macro(validation.sources.values()),
        predicted=sum(row.prediction is not None for row in validation.rows),
    )


def scatter(rows: list[ScoredRow], quantity: str, unit: str) -> go.Figure | None:
    """Return predicted against measured, both axes logarithmic; None without points."""
    timed = quantity == "step time"
    points = [
        (pair, row)
        for row in rows
        if (pair := row.times if timed else row.memories)
        and (row.measured.judge_time if timed else row.measured.judge_memory)
    ][:MOST_POINTS]
    if not points:
        return None
    predicted = [pair[0] for pair, _ in points]
    measured = [pair[1] for pair, _ in points]
    ends = [min(*predicted, *measured), max(*predicted, *measured)]
    figure = go.Figure(
        [
            go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dash"}),
            go.Scatter(
                x=measured,
                y=predicted,
                mode="markers",
                name=quantity,
                marker={"opacity": 0.6},
                text=[
                    f"{row.measured.id}<br>{row.setup.text if row.setup else ''}"
                    for _, row in points
                ],
            ),
        ]
    )
    figure.update_xaxes(type="log", title=f"measured, {unit}")
    figure.update_yaxes(type="log", title=f"predicted, {unit}")
    return figure
