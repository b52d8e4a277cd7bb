"""Figures of studies as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from planner.whatif.span import Span

MOST_NAMES = 5


def listed(names: Iterable[str]) -> str:
    """Return names, five at most.

    >>> listed("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    every = list(names)
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return ", ".join(every[:MOST_NAMES]) + more


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
