"""Tolerances within which two numbers count as equal: one name and one reason each.

All are relative.  A float has 16 digits, 1e-16; sums lose some of them, the more the longer they
are and the more cancels.  Each row forgives what the rows above it can leave, so their order is
part of what proofs rest on: a bound that gives way by `SLACK` is below everything that was priced
to `ROUNDING`.
"""

TINY = 1e-30
"""Above zero and negligible: it keeps an interval or a divisor from being empty."""

SAME_TERMS = 1e-14
"""The same few terms, added in another order."""

SAME_CHOICE = 1e-13
"""The same choice for a whole stage, added in another order: a frontier would keep both."""

ROUNDING = 1e-12
"""The same seconds or bytes of a whole plan in another order.  No machine has memory to this
precision, and a bound this close to an incumbent meets it."""

SETTLED = 1e-11
"""Above twice `ROUNDING` and negligible: a search that gains less is done, and a bound that is
priced once is lowered by it."""

SLACK = 1e-9
"""Margin of bounds that are differences of large sums, or that are computed in arrays for many
configurations at once."""

EQUAL = 1e-9
"""Objectives this close are equal: the simpler layout wins, and a bound this close is a proof."""

NOTHING = 1e-9
"""Negligible share: of the squares that are left to fit, or of a collective's size."""

HIGHS_FEASIBILITY = 1e-9
"""Violation of a limit that HiGHS accepts, in scaled units; with gigabytes, one byte."""

HIGHS_MARGIN = 1e-7
"""Margin of limits and known bounds, so that the tolerance of HiGHS cannot violate them."""

HIGHS_GAP = 1e-6
"""Gap between the best solution and the bound at which HiGHS stops."""
