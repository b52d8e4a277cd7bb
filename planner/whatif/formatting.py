"""Figures of studies as people read them."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable

from meshwright.planner.whatif.uncertain_value import UncertainValue

MOST_NAMES = 5
MOST_DIGITS = 12
THOUSAND, MILLION = 1e3, 1e6


def names_text(names: Iterable[str]) -> str:
    """Return names, five at most; a name with a comma stands in quotes.

    >>> names_text("abcdefg"), names_text(["lent, 8xl4", "b"])
    ('a, b, c, d, e and 2 more', '"lent, 8xl4", b')
    """
    every = [f'"{name}"' if ", " in name else name for name in names]
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return ", ".join(every[:MOST_NAMES]) + more


def range_text(span: UncertainValue, scale: float = 1.0) -> str:
    """Return a figure with its range.

    >>> range_text(UncertainValue(value=1200.0, low=900.0, high=2000.0))
    '1,200 (900-2,000)'
    """
    digits = 0 if span.value * scale >= 100 else 1
    value, low, high = (
        f"{number * scale:,.{digits}f}" for number in (span.value, span.low, span.high)
    )
    return value if low == high else f"{value} ({low}-{high})"


def short_number(value: float) -> str:
    """Return a number with two figures, or all that stand before its point; no power of ten.

    >>> short_number(119.7), short_number(0.0421), short_number(3.14159), short_number(1234.5)
    ('120', '0.042', '3.1', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def apart_texts(figure: float, limit: float) -> tuple[str, str]:
    """Return a figure and its limit, which differ, with as many digits as tell them apart.

    >>> apart_texts(120.04, 120.0), apart_texts(1.5e6, 1.2e6), apart_texts(0.0421, 0.04)
    (('120.04', '120.00'), ('1,500,000', '1,200,000'), ('0.0421', '0.0400'))
    """
    digits = 0 if limit >= 100 else max(0, 2 - math.floor(math.log10(limit)))
    while digits < MOST_DIGITS and f"{figure:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    return f"{figure:,.{digits}f}", f"{limit:,.{digits}f}"


def days_text(run_hours: UncertainValue) -> str:
    """Return a duration with its range, in hours below two days.

    >>> days_text(UncertainValue(value=30.0, low=20.0, high=50.0))
    '30.0 (20.0-50.0) h'
    """
    if run_hours.value < 48:
        return f"{range_text(run_hours)} h"
    return f"{range_text(run_hours, 1 / 24)} days"


def usd_text(usd: UncertainValue) -> str:
    """Return dollars with their range, in millions from one on.

    >>> usd_text(UncertainValue(value=1_492_640.0, low=690_189.0, high=3_047_246.0))
    '1.49 (0.69-3.05) M USD'
    """
    if usd.value < MILLION:
        return f"{range_text(usd)} USD"
    value, low, high = (f"{figure / MILLION:,.2f}" for figure in (usd.value, usd.low, usd.high))
    return f"{value} M USD" if low == high else f"{value} ({low}-{high}) M USD"


def short_usd_text(usd: UncertainValue, unit: str = " USD") -> str:
    """Return dollars with their range in few characters: thousands as K, millions as M.

    >>> span = UncertainValue(value=98_182.0, low=47_310.0, high=161_299.0)
    >>> short_usd_text(span), short_usd_text(span.times(12)), short_usd_text(span.times(0.001))
    ('98.2 (47.3-161.3) K USD', '1.18 (0.57-1.94) M USD', '98.2 (47.3-161.3) USD')
    """
    scale, letter, digits = 1.0, "", 0 if usd.value >= 100 else 1
    if usd.value >= MILLION:
        scale, letter, digits = MILLION, " M", 2
    elif usd.value >= 10 * THOUSAND:
        scale, letter, digits = THOUSAND, " K", 0 if usd.value >= 100 * THOUSAND else 1
    value, low, high = (f"{end / scale:,.{digits}f}" for end in (usd.value, usd.low, usd.high))
    return f"{value}{letter}{unit}" if low == high else f"{value} ({low}-{high}){letter}{unit}"


def price_dates(how: str) -> list[str]:
    """Return the months that a price names, the oldest first.

    >>> price_dates("median of 2 on-demand rents, about 2026-10 to after 2025-09-10")
    ['2025-09', '2026-10']
    """
    return sorted(f"{year}-{month}" for year, month in re.findall(r"\b(20\d\d)-(\d\d)\b", how))


def price_ages(how: str, today: datetime.date) -> list[int]:
    """Return the months since each date that a price names, the oldest first.

    >>> price_ages("after 2025-09-10 to about 2026-10", datetime.date(2026, 11, 2))
    [14, 1]
    """
    dates = [(int(month[:4]), int(month[5:])) for month in price_dates(how)]
    ages = [12 * (today.year - year) + today.month - month for year, month in dates]
    return [max(0, age) for age in ages]  # a clock behind the price is wrong, and not the price
