"""One self-contained HTML page about a validation: scores by source, predicted against measured."""

from __future__ import annotations

from importlib import resources

import jinja2

from meshwright.planner.calibration.scores.validate import ScoredRow, Validation, macro
from meshwright.planner.report import svg

MOST_POINTS = 2000
"""Drawn for each source and picture."""


def page(validation: Validation) -> str:
    """Return the report."""
    figures: list[tuple[str, str]] = []
    for name in dict.fromkeys(row.measured.source for row in validation.rows):
        rows = [row for row in validation.rows if row.measured.source == name]
        for quantity, unit in (("step time", "s"), ("peak memory", "GiB")):
            html = scatter(rows, quantity, unit)
            if html:
                figures.append((f"{name}: {quantity}", html))
    template = (
        resources.files("meshwright.planner.report").joinpath("validation.html").read_text("utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        validation=validation,
        figures=figures,
        average=macro(validation.sources.values()),
        predicted=sum(row.prediction is not None for row in validation.rows),
    )


def scatter(rows: list[ScoredRow], quantity: str, unit: str) -> str:
    """Return predicted against measured, both axes logarithmic; nothing without points."""
    timed = quantity == "step time"
    points = [
        (pair, row)
        for row in rows
        if (pair := row.times if timed else row.memories)
        and (row.measured.judge_time if timed else row.measured.judge_memory)
    ][:MOST_POINTS]
    drawn = [
        svg.Point(
            x=measured,
            y=predicted,
            label=f"{row.measured.id}: {row.setup.text if row.setup else ''}",
        )
        for (predicted, measured), row in points
    ]
    return svg.scatter(
        f"{quantity}: predicted over measured", drawn, f"measured, {unit}", f"predicted, {unit}"
    )
