"""UncertainValue: a figure with its 80 % range, and how ranges of independent figures combine.

Each figure is taken as log-normal around its value: the distances to low and high, as logarithms,
are what the factors of a product contribute, and independent distances add in squares.

    z = x y     ln(z_high / z) = sqrt(ln(x_high / x)² + ln(y_high / y)²)

A sum adds its terms' ends as they are, as if all were high at once: it never narrows a range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainValue:
    """A value >= 0 and the ends of its 80 % range."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"{self.low} <= {self.value} <= {self.high} is no range")

    def times(self, factor: float) -> UncertainValue:
        """Return a multiple by a number that is known exactly."""
        return UncertainValue(
            value=self.value * factor, low=self.low * factor, high=self.high * factor
        )

    @property
    def inverse(self) -> UncertainValue:
        """One over it; the value must exceed 0, and an open end stays at the value's own."""
        low = self.low or self.value
        return UncertainValue(value=1 / self.value, low=1 / self.high, high=1 / low)

    def spreads(self) -> tuple[float, float]:
        """Return the logarithmic distances of value to low and of high to value."""
        if self.value == 0:
            return 0.0, 0.0
        return math.log(self.value / (self.low or self.value)), math.log(self.high / self.value)

    def as_dict(self) -> dict[str, float]:
        """Return plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}


class Ranged(Protocol):
    """Anything that has a value and the ends of its range, such as the catalogue's quantities."""

    @property
    def value(self) -> float: ...  # noqa: D102
    @property
    def low(self) -> float: ...  # noqa: D102
    @property
    def high(self) -> float: ...  # noqa: D102


def span_of(figure: Ranged) -> UncertainValue:
    """Return a figure's value and range."""
    return UncertainValue(value=figure.value, low=figure.low, high=figure.high)


def exact(value: float) -> UncertainValue:
    """Return a figure without a range."""
    return UncertainValue(value=value, low=value, high=value)


def product(factors: Iterable[UncertainValue]) -> UncertainValue:
    """Return the product of independent figures.

    >>> product([UncertainValue(value=2.0, low=1.0, high=4.0), exact(3.0)])
    UncertainValue(value=6.0, low=3.0, high=12.0)
    """
    value = 1.0
    below = above = 0.0
    for factor in factors:
        value *= factor.value
        down, up = factor.spreads()
        below, above = below + down * down, above + up * up
    if value == 0:
        return exact(0.0)
    low, high = value * math.exp(-math.sqrt(below)), value * math.exp(math.sqrt(above))
    # The logarithm and back of an exact figure must not move its ends past the value.
    return UncertainValue(value=value, low=min(low, value), high=max(high, value))


def total(terms: Iterable[UncertainValue]) -> UncertainValue:
    """Return the sum of figures, their ends added as they are."""
    listed = list(terms)
    return UncertainValue(
        value=sum(term.value for term in listed),
        low=sum(term.low for term in listed),
        high=sum(term.high for term in listed),
    )
