"""One self-contained HTML page about a run, or about one of its incidents: facts, charts, tables.

It has no script.  While a run lives, the page makes the browser reload it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import jinja2

from meshwright.planner.report import svg
from meshwright.planner.report.facts import Fact, fact_cards


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """Rows under a heading."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReading:
    """Content of the page of a run, or of its text in a terminal, in the order of reading."""

    title: str
    facts: tuple[Fact, ...]
    tables: tuple[RunTable, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    """Headings with verbatim texts below them: frameworks, ends of logs."""
    alarm: str = ""
    """Problem of the run as a whole, shown above everything."""
    curve: tuple[tuple[int, float, float], ...] = ()
    """Steps, losses and seconds."""


def page(reading: RunReading, *, again_s: float | None = None) -> str:
    """Return the page; with `again_s` it is read again after that time.

    >>> html = page(RunReading(title="a <run>", facts=(Fact(label="step", text="3"),)))
    >>> "a &lt;run&gt;" in html, "refresh" in html
    (True, False)
    """
    template = resources.files("meshwright.planner.report").joinpath("run.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = []
    for title, unit, at in (("Loss", "loss", 1), ("Seconds a step", "s", 2)):
        points = tuple((float(point[0]), float(point[at])) for point in reading.curve)
        if len(points) > 1:
            curve = svg.StepCurve(name=title, points=points)
            figures.append((title, svg.steps(title, [curve], "step", unit)))
    return environment.from_string(template).render(
        css=svg.page_css(),
        reading=reading,
        cards=fact_cards(fact for fact in reading.facts if fact.text != reading.alarm),
        figures=figures,
        again_s=again_s,
    )
