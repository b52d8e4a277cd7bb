"""Tolerances within which two numbers count as equal: one name and one reason each.

All are relative.  A float has 16 digits, 1e-16; sums lose some of them, the more the longer they
are and the more cancels.  Each row forgives what the rows above it can leave, so their order is
part of what proofs rest on: a bound that gives way by `SLACK` is below everything that was priced
to `ROUNDING`.
"""

TINY = 1e-30
"""Above zero, and nothing: keeps an interval or a divisor from being empty."""

SAME_TERMS = 1e-14
"""The same few terms, added in another order."""

SAME_CHOICE = 1e-13
"""The same choice for a whole stage, added in another order: a frontier would keep both."""

ROUNDING = 1e-12
"""The same seconds or bytes of a whole plan in another order.  No machine has memory to this
precision, and a bound this close to an incumbent meets it."""

SETTLED = 1e-11
"""Above what `ROUNDING` forgives twice, below anything that matters: a search that gains less is
done, and a bound that is priced once gives way by it."""

SLACK = 1e-9
"""What bounds give way by that are differences of large sums, or are worked out in arrays for many
configurations at once."""

EQUAL = 1e-9
"""Objectives this close are equal: the simpler layout wins, and a bound this close is a proof."""

NOTHING = 1e-9
"""A share that is as good as none: of squares that are left to fit, of a collective's size."""

HIGHS_FEASIBILITY = 1e-9
"""HiGHS accepts solutions this far outside of a limit, in scaled units; in gigabytes a byte."""

HIGHS_MARGIN = 1e-7
"""What limits and known bounds give way by, so that the tolerance of HiGHS cannot break them."""

HIGHS_GAP = 1e-6
"""Between the best solution and the bound at which HiGHS stops."""
