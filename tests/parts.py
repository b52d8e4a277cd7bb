"""Rows of one test: some in every run of the suite, the others in the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some_and_others(rows: Iterable[Any], some: Sequence[Any]) -> list[Any]:
    """Return two cases of a test: `some` rows, and all others, which `make matrix` goes through.

    Raises
    ------
    ValueError
        One of `some` is no row.
    """
    every = list(rows)
    unknown = [row for row in some if row not in every]
    if unknown:
        raise ValueError(f"no rows: {unknown}")
    others = [row for row in every if row not in some]
    return [
        pytest.param(list(some), id="some"),
        pytest.param(others, id="others", marks=pytest.mark.matrix),
    ]
