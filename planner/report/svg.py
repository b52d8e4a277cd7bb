"""Small charts as SVG: points, bars with ranges, stacked bars, lines.  No script, no network.

Colours of text and axes are the page's own (currentColor), so light and dark pages show them alike.
Every chart carries its title for those who do not see it; its figures stand in tables of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from planner.documents.tolerances import NOTHING

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 44
COLOURS = ("#3b7dd8", "#d9730d", "#2e9e5b", "#b54708", "#8250df", "#c2255c", "#0b8a9f", "#7a7a00")
ROW = 22
LABEL_WIDTH = 250
MOST_LABEL = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One dot, with what it is called."""

    x: float
    y: float
    label: str
    series: int = 0
    size: float = 6.0
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its range."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
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


def _axis(values: Sequence[float], start: float, end: float, *, log: bool, zero: bool) -> _Axis:
    low, high = min(values), max(values)
    if log:
        return _Axis(low / 1.15, high * 1.15, start, end, log=True)
    low = min(0.0, low) if zero else low
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    return _Axis(low - (0 if zero and low >= 0 else room), high + room, start, end, log=False)


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


def _frame(across: _Axis, up: _Axis, x_title: str, y_title: str) -> list[str]:
    body = []
    for tick in across.ticks():
        x = across.at(tick)
        body += [
            _stroke(x, up.start, x, up.end, "grid"),
            _text(x, up.start + 16, number(tick), "middle"),
        ]
    for tick in up.ticks():
        y = up.at(tick)
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
    """Return labelled points on logarithmic axes, or none."""
    if not points:
        return ""
    across = _axis([p.x for p in points], LEFT, WIDTH - RIGHT, log=True, zero=False)
    up = _axis([p.y for p in points], HEIGHT - BOTTOM, TOP, log=True, zero=False)
    body = _frame(across, up, x_title, y_title)
    taken: list[tuple[float, float]] = []
    for place, point in enumerate(points):
        x, y = across.at(point.x), up.at(point.y)
        colour = COLOURS[point.series % len(COLOURS)]
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{point.size:.1f}" fill="{colour}" '
            f'fill-opacity="0.75"{" stroke=currentColor" if point.marked else ""}>'
            f"<title>{escape(point.label)}</title></circle>"
        )
        # A number where a name would hide others; the list under the chart says whose it is.
        near = any(abs(x - a) < 16 and abs(y - b) < 14 for a, b in taken)
        if not near:
            body.append(_text(x + point.size + 2, y + 4, str(place + 1)))
            taken.append((x, y))
    return _svg(title, body)


def lines(title: str, found: Sequence[Line], x_title: str, y_title: str, *, log: bool) -> str:
    """Return lines with a key, or none."""
    points = [point for line in found for point in line.points]
    if not points:
        return ""
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log=log, zero=False)
    up = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP, log=log, zero=not log)
    body = _frame(across, up, x_title, y_title)
    for place, line in enumerate(found):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}>'
            f"<title>{escape(line.name)}</title></polyline>"
        )
        body += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in line.points
        ]
    key, height = _legend([line.name for line in found], HEIGHT + 4)
    return _svg(title, [*body, *key], HEIGHT + height + 4)


def bars(title: str, found: Sequence[Bar], unit: str) -> str:
    """Return a bar in a row for each, the range as a thin line over it, or none."""
    if not found:
        return ""
    low = min(0.0, *(bar.low for bar in found))
    across = _axis(
        [low, *(bar.high for bar in found)], LABEL_WIDTH, WIDTH - 90, log=False, zero=True
    )
    bottom = TOP + ROW * len(found)
    body = []
    for tick in across.ticks():
        body += [
            _stroke(across.at(tick), TOP, across.at(tick), bottom, "grid"),
            _text(across.at(tick), bottom + 16, number(tick), "middle"),
        ]
    for place, bar in enumerate(found):
        y = TOP + ROW * place
        start, end = sorted((across.at(0.0), across.at(bar.value)))
        body.append(_text(LABEL_WIDTH - 8, y + 15, short(bar.name), "end"))
        body.append(
            _rect(
                start,
                y + 3,
                end - start,
                ROW - 7,
                COLOURS[0],
                f"{bar.name}: {bar.value:,.4g} {unit}",
            )
        )
        if bar.high > bar.low:
            body.append(
                _stroke(across.at(bar.low), y + ROW / 2, across.at(bar.high), y + ROW / 2, "range")
            )
        note = bar.note or f"{bar.value:,.3g}"
        body.append(_text(max(end, across.at(bar.high)) + 5, y + 15, note))
    body.append(_text((across.start + across.end) / 2, bottom + 34, unit, "middle"))
    return _svg(title, body, bottom + BOTTOM)


def stacked(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Return a row of pieces for each name, with a key of the pieces, or none."""
    names = list(
        dict.fromkeys(name for _, parts in rows for name, size in parts.items() if size > 0)
    )
    if not rows or not names:
        return ""
    most = max(sum(parts.values()) for _, parts in rows)
    across = _axis([0.0, most], LABEL_WIDTH, WIDTH - RIGHT, log=False, zero=True)
    bottom = TOP + ROW * len(rows)
    body = []
    for tick in across.ticks():
        body += [
            _stroke(across.at(tick), TOP, across.at(tick), bottom, "grid"),
            _text(across.at(tick), bottom + 16, number(tick), "middle"),
        ]
    for place, (label, parts) in enumerate(rows):
        y, begin = TOP + ROW * place, 0.0
        body.append(_text(LABEL_WIDTH - 8, y + 15, short(label), "end"))
        for index, name in enumerate(names):
            size = max(0.0, parts.get(name, 0.0))
            if size:
                x, end = across.at(begin), across.at(begin + size)
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
    body.append(_text((across.start + across.end) / 2, bottom + 34, unit, "middle"))
    key, height = _legend(names, bottom + BOTTOM)
    return _svg(title, [*body, *key], bottom + BOTTOM + height)
