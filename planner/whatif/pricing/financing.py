"""Times at which hardware is paid: at once, by a loan, by a lease.  Arithmetic alone.

A loan of a share s of the price at r a year over N months is paid back in equal instalments at the
end of each month:

    i = (1 + r)^(1/12) - 1        a = i / (1 - (1 + i)^-N), or 1 / N without interest

What is still owed when the devices are sold is paid then.  A lease is paid at the beginning of each
month, at least for its term; a longer use goes on at its price, and what a shorter one leaves of
the term is paid at its end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.planner.documents.tolerances import NOTHING

MONTHS_PER_YEAR = 12


class Instalment(NamedTuple):
    """A part of what hardware costs."""

    years: float
    """From the first day until it is paid."""
    share: float
    """Share of the price of the hardware; of all that a lease costs."""
    interest: float = 0.0
    """The part of it that is interest of a loan, as a share of the price."""


Instalments = tuple[Instalment, ...]
AT_ONCE: Instalments = (Instalment(0.0, 1.0),)


def loan_instalments(*, share: float, interest: float, months: int, years: float) -> Instalments:
    """Return what is paid for hardware that is borrowed in part, and sold after `years`.

    >>> [round(one.share, 3) for one in loan_instalments(
    ...     share=0.5, interest=0.0, months=2, years=1.0)]
    [0.5, 0.25, 0.25]
    """
    monthly = math.expm1(math.log1p(interest) / MONTHS_PER_YEAR)
    rate = monthly / -math.expm1(-months * math.log1p(monthly)) if monthly else 1 / months
    owed, instalments = share, [Instalment(0.0, 1 - share)]
    for month in range(1, min(months, months_of(years)) + 1):
        part = owed * monthly
        instalments.append(Instalment(month / MONTHS_PER_YEAR, rate * share, part))
        owed += part - rate * share
    if months > months_of(years):
        since = MONTHS_PER_YEAR * years - months_of(years)
        part = owed * math.expm1(since * math.log1p(monthly))
        instalments.append(Instalment(years, owed + part, part))
    return tuple(instalments)


def lease_instalments(*, term_months: int, years: float) -> Instalments:
    """Return equal shares of all that a lease costs, at the beginning of each month of its use.

    >>> [(one.years, one.share) for one in lease_instalments(term_months=4, years=0.25)]
    [(0.0, 0.25), (0.08333333333333333, 0.25), (0.16666666666666666, 0.25), (0.25, 0.25)]
    """
    used, whole = _used_months(years), lease_months(term_months=term_months, years=years)
    left = [Instalment(years, (whole - used) / whole)] if whole > used else []
    paid = (Instalment(month / MONTHS_PER_YEAR, 1 / whole) for month in range(used))
    return (*paid, *left)


def lease_months(*, term_months: int, years: float) -> int:
    """Return the months that a lease is paid for, its term at least."""
    return max(_used_months(years), term_months)


def _used_months(years: float) -> int:
    return max(1, math.ceil(MONTHS_PER_YEAR * years - NOTHING))


def months_of(years: float) -> int:
    """Return the whole months of some years."""
    return math.floor(MONTHS_PER_YEAR * years + NOTHING)
