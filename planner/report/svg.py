"""Small charts as SVG: points, stacked bars, steps over time.  No script, no network.

Colours of text and axes are the page's own (currentColor), so light and dark pages show them alike.
Every chart carries its title for those who do not see it; its figures are in tables of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from meshwright.planner.documents.tolerances import NOTHING

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 44
COLOURS = ("#3b7dd8", "#d9730d", "#2e9e5b", "#b54708", "#8250df", "#c2255c", "#0b8a9f", "#7a7a00")
ROW = 22
LABEL_WIDTH, RANGE_LABEL_WIDTH = 250, 310
MOST_LABEL = 38


def page_css() -> str:
    """Return type, spacing and colour, which all pages have in common."""
    return (
        resources.files("meshwright.planner.report").joinpath("page/tokens.css").read_text("utf-8")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One dot, with what it is called."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """A figure that changes at once: where it changes, and to what."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """A figure before and after something was learnt, each as (middle, low, high)."""

    name: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class _ChartAxis:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def position(self, value: float) -> float:
        low, high, value = self.low, self.high, max(value, self.low) if self.log else value
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            return _log_ticks(self.low, self.high)
        return _ticks(self.low, self.high)


def number(value: float) -> str:
    """Return a number as an axis shows it.

    >>> number(1500.0), number(2.5e6), number(0.25), number(12.0)
    ('1.5K', '2.5M', '0.25', '12')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two, about five.

    >>> _ticks(0.0, 47.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - NOTHING)
    return [k * step for k in range(first, math.floor(high / step + NOTHING) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    marks = [s * 10.0**p for p in powers for s in steps]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001] or [low, high]


def _axis(
    values: Sequence[float], start: float, end: float, *, log: bool, zero: bool
) -> _ChartAxis:
    low, high = min(values), max(values)
    if log:
        return _ChartAxis(low / 1.15, high * 1.15, start, end, log=True)
    low = min(0.0, low) if zero else low
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    return _ChartAxis(low - (0 if zero and low >= 0 else room), high + room, start, end, log=False)


def _svg(title: str, body: Sequence[str], height: float = HEIGHT, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        + "".join(body)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f"{f' class={css}' if css else ''}>{escape(text)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(tip)}</title></rect>'
    )


def _stroke(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _columns(across: _ChartAxis, top: float, bottom: float) -> list[str]:
    """Return a line of the grid for each tick, its number below."""
    body = []
    for tick in across.ticks():
        x = across.position(tick)
        body += [
            _stroke(x, top, x, bottom, "grid"),
            _text(x, bottom + 16, number(tick), "middle"),
        ]
    return body


def _frame(across: _ChartAxis, up: _ChartAxis, x_title: str, y_title: str) -> list[str]:
    body = _columns(across, up.end, up.start)
    for tick in up.ticks():
        y = up.position(tick)
        body += [
            _stroke(across.start, y, across.end, y, "grid"),
            _text(LEFT - 6, y + 4, number(tick), "end"),
        ]
    body.append(_text((across.start + across.end) / 2, up.start + 34, x_title, "middle"))
    body.append(_text(4, TOP - 2, y_title))
    return body


def _legend(names: Sequence[str], y: float) -> tuple[list[str], float]:
    """Return the key of a chart, in rows, and its height."""
    if len(names) < 2:
        return [], 0.0
    body, x, row = [], 4.0, 0
    for place, name in enumerate(names):
        width = 26 + 7.0 * len(short(name))
        if x + width > WIDTH and x > 4:
            x, row = 4.0, row + 1
        body.append(_rect(x, y + ROW * row, 12, 12, COLOURS[place % len(COLOURS)], name))
        body.append(_text(x + 17, y + ROW * row + 11, short(name)))
        x += width
    return body, ROW * (row + 1)


def short(name: str) -> str:
    """Return a name as a label has room for it.

    >>> short("a" * 50)
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return name if len(name) <= MOST_LABEL else name[: MOST_LABEL - 1] + "…"


def scatter(title: str, points: Sequence[Point], x_title: str, y_title: str) -> str:
    """Return points on logarithmic axes of one range, with the line on which both are equal."""
    if not points:
        return ""
    ends = [size for point in points for size in (point.x, point.y)]
    across = _axis(ends, LEFT, WIDTH - RIGHT, log=True, zero=False)
    up = _axis(ends, HEIGHT - BOTTOM, TOP, log=True, zero=False)
    body = _frame(across, up, x_title, y_title)
    low, high = min(ends), max(ends)
    body.append(
        _stroke(
            across.position(low), up.position(low), across.position(high), up.position(high), "mark"
        )
    )
    body += [
        f'<circle cx="{across.position(point.x):.1f}" cy="{up.position(point.y):.1f}" r="3" '
        f'fill="{COLOURS[0]}" fill-opacity="0.6"><title>{escape(point.label)}</title></circle>'
        for point in points
    ]
    return _svg(title, body)


def steps(title: str, curves: Sequence[StepCurve], x_title: str, y_title: str) -> str:
    """Return lines that go across and then up or down, with a key, or none."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log=False, zero=False)
    up = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP, log=False, zero=True)
    body = _frame(across, up, x_title, y_title)
    for place, curve in enumerate(curves):
        (x, y), *rest = curve.points
        path = f"M{across.position(x):.1f} {up.position(y):.1f}" + "".join(
            f"H{across.position(x):.1f}V{up.position(y):.1f}" for x, y in rest
        )
        body.append(
            f'<path d="{path}" fill="none" stroke="{COLOURS[place % len(COLOURS)]}" '
            f'stroke-width="1.5"><title>{escape(curve.name)}</title></path>'
        )
    key, height = _legend([curve.name for curve in curves], HEIGHT + 4)
    return _svg(title, [*body, *key], HEIGHT + height + 4)


def ranges(title: str, rows: Sequence[RangeRow], unit: str) -> str:
    """Return for each row its range before, after and, as a dot, what was measured, with a key."""
    if not rows:
        return ""
    ends = [size for row in rows for size in (*row.before, *row.after, row.measured) if size]
    across = _axis(ends, RANGE_LABEL_WIDTH, WIDTH - RIGHT, log=True, zero=False)
    bottom = TOP + ROW * len(rows)
    body = _columns(across, TOP, bottom)
    names = ("predicted", "believed after trials", "measured")
    for place, row in enumerate(rows):
        y = TOP + ROW * place
        body.append(_text(RANGE_LABEL_WIDTH - 8, y + 15, short(row.name), "end"))
        for index, (middle, low, high) in enumerate((row.before, row.after)):
            tip = f"{row.name}, {names[index]}: {middle:,.4g} {unit} ({low:,.4g} to {high:,.4g})"
            x, top = across.position(low), y + 3 + 8 * index
            body.append(_rect(x, top, across.position(high) - x, 6, COLOURS[index], tip))
            body.append(
                _stroke(across.position(middle), top, across.position(middle), top + 6, "middle")
            )
        if row.measured:
            body.append(
                f'<circle cx="{across.position(row.measured):.1f}" cy="{y + 14}" r="4" '
                f'fill="{COLOURS[2]}"><title>{escape(row.name)}, measured: '
                f"{row.measured:,.4g} {unit}</title></circle>"
            )
    body.append(_text((across.start + across.end) / 2, bottom + 34, unit, "middle"))
    key, height = _legend(names, bottom + BOTTOM)
    return _svg(title, [*body, *key], bottom + BOTTOM + height)


def stacked_bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    *,
    limit: tuple[str, float] | None = None,
) -> str:
    """Return a row of pieces for each name, with a key of the pieces, or none.

    `limit` is a line across all rows, with what it is called.
    """
    names = list(
        dict.fromkeys(name for _, parts in rows for name, size in parts.items() if size > 0)
    )
    if not rows or not names:
        return ""
    most = max(sum(parts.values()) for _, parts in rows)
    ends = [0.0, most] if limit is None else [0.0, most, limit[1]]
    across = _axis(ends, LABEL_WIDTH, WIDTH - RIGHT, log=False, zero=True)
    bottom = TOP + ROW * len(rows)
    body = _columns(across, TOP, bottom)
    for place, (label, parts) in enumerate(rows):
        y, begin = TOP + ROW * place, 0.0
        body.append(_text(LABEL_WIDTH - 8, y + 15, short(label), "end"))
        for index, name in enumerate(names):
            size = max(0.0, parts.get(name, 0.0))
            if size:
                x, end = across.position(begin), across.position(begin + size)
                body.append(
                    _rect(
                        x,
                        y + 3,
                        end - x,
                        ROW - 7,
                        COLOURS[index % len(COLOURS)],
                        f"{label}, {name}: {size:,.4g} {unit}",
                    )
                )
            begin += size
    if limit is not None:
        x = across.position(limit[1])
        body += [_stroke(x, TOP - 4, x, bottom, "mark"), _text(x - 4, TOP - 3, limit[0], "end")]
    body.append(_text((across.start + across.end) / 2, bottom + 34, unit, "middle"))
    key, height = _legend(names, bottom + BOTTOM)
    return _svg(title, [*body, *key], bottom + BOTTOM + height)
