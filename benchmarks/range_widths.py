"""Widths of ranges of steps: quantiles of how far runs of left-out sources lie from predictions.

    python -m benchmarks.range_widths TABLE.csv

Prints the constants of `planner/costs/uncertainty.py` (BELOW, ABOVE).  Each row is predicted
without the figures that rest on its source or on any of its class and year, and, where one study
alone tells of its framework, a second time as if the framework were not known.  A width is linear
in a run's traits with coefficients that are not negative; it is that of the least pinball loss
(Koenker and Bassett, Econometrica 46 (1978) 33-50), sources of ten runs or more counting alike:

    minimise   sum_i w_i (level u_i + (1 - level) v_i)
    subject to width(traits_i) + u_i - v_i = miss_i,    u, v, coefficients >= 0

`left_out_ranges` fits the widths of each row without its class and year too, so that a range is
held against runs of which nothing was known.  The levels are those at which four of five such runs
or a few more lie inside (conformal prediction, with sources in place of rows).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, variance
from typing import NamedTuple

import numpy as np

from meshwright.planner.calibration.scores.validate import ScoredRow, Validation, validate
from meshwright.planner.costs.predict import TOLD
from meshwright.planner.costs.uncertainty import (
    ABOVE,
    NATURAL_ABOVE,
    NATURAL_BELOW,
    RunTraits,
    WidthLaw,
    class_name,
    eight_bits_gain,
    run_traits,
)
from meshwright.planner.documents.framework import base_of
from meshwright.planner.solver.highs import highspy, silent_highs

LEVEL_BELOW, LEVEL_ABOVE = 0.93, 0.92
"""Shares of runs in view that are to lie above the lower and below the upper end.  Of runs whose
class and year is left out of the widths 83 % lie between (docs/results/accuracy.md)."""
WHOLE = 10
"""Runs of a source that counts whole."""


class Miss(NamedTuple):
    """How far a measured step lies from its prediction, as logarithms, and what its run was."""

    source: str
    traits: RunTraits
    natural: bool
    below: float
    """How much shorter it was than predicted; less what 8 bits may save that nobody tells of."""
    above: float
    """How much longer it was, without what a slow host would add."""


def miss_of(row: ScoredRow) -> Miss | None:
    """Return the miss of a row; None without a step that may be judged."""
    if not (row.setup and row.prediction and row.times and row.measured.judge_time):
        return None
    request, layout, found = row.setup.request, row.setup.layout, row.prediction
    assumed = [note.what for note in found.assumptions if note.source == TOLD]
    traits = run_traits(request, layout, found.step_parts, assumed)
    natural = class_name(request, layout) == "natural routing"
    width = max(ABOVE.width(traits), NATURAL_ABOVE if natural else 0.0)
    slow_host = max(0.0, found.step_time_high_s / found.step_time_s - math.exp(width))
    ratio = row.times[1] / row.times[0]
    gain = eight_bits_gain(request, assumed)
    return Miss(
        source=row.measured.source,
        traits=traits,
        natural=natural,
        below=-math.log(ratio) - gain,
        above=math.log(max(ratio - slow_host, sys.float_info.min)),
    )


def weights(misses: Sequence[Miss]) -> list[float]:
    """Return the weight of each miss: sources of ten runs count alike, smaller ones by the run."""
    counts = Counter(miss.source for miss in misses)
    return [min(1.0, counts[miss.source] / WHOLE) / counts[miss.source] for miss in misses]


def fitted_law(
    traits: Sequence[RunTraits], misses: Sequence[float], weight: Sequence[float], level: float
) -> WidthLaw:
    """Return the law under which a share `level` of weighted misses is no larger than its width."""
    rows = np.array([[1.0, *map(float, each)] for each in traits])
    count, terms = rows.shape
    wide = np.array(weight)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = terms + 2 * count, count
    program.col_cost_ = np.concatenate([np.zeros(terms), wide * level, wide * (1 - level)])
    program.col_lower_ = np.zeros(terms + 2 * count)
    program.col_upper_ = np.full(terms + 2 * count, highspy.kHighsInf)
    program.row_lower_ = program.row_upper_ = np.array(misses)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.arange(count + 1) * (terms + 2)
    own, every = np.arange(count)[:, None], np.tile(np.arange(terms), (count, 1))
    columns = np.hstack([every, terms + own, terms + count + own])
    program.a_matrix_.index_ = columns.ravel().astype(np.int32)
    signs = np.hstack([rows, np.ones((count, 1)), -np.ones((count, 1))])
    program.a_matrix_.value_ = signs.ravel()
    model = silent_highs()
    model.passModel(program)
    model.run()
    return WidthLaw(*model.getSolution().col_value[:terms])


def laws(known: Sequence[Miss], unknown: Sequence[Miss]) -> tuple[WidthLaw, WidthLaw]:
    """Return the laws below and above predictions.

    Of natural routing, whose width rests on measured pairs, and of tensor-parallel groups that span
    nodes under a framework that is not known, no row is fitted to.
    """
    weighted = [
        *zip(known, weights(known), strict=True),
        *((m, w) for m, w in zip(unknown, weights(unknown), strict=True) if not m.traits.spanning),
    ]
    fitted = [(miss, weight) for miss, weight in weighted if not miss.natural]
    wide = [weight for _, weight in fitted]
    traits = [miss.traits for miss, _ in fitted]
    still = [each._replace(waiting=0.0, spanning=False) for each in traits]
    return (
        fitted_law(still, [miss.below for miss, _ in fitted], wide, LEVEL_BELOW),
        fitted_law(traits, [miss.above for miss, _ in fitted], wide, LEVEL_ABOVE),
    )


def is_inside(miss: Miss, below: WidthLaw, above: WidthLaw) -> bool:
    """Say whether a step lies inside of the range that two laws give."""
    least = (NATURAL_BELOW, NATURAL_ABOVE) if miss.natural else (0.0, 0.0)
    return miss.below <= max(below.width(miss.traits), least[0]) and miss.above <= max(
        above.width(miss.traits), least[1]
    )


def unknown_misses(result: Validation) -> list[Miss]:
    """Return the misses of runs of frameworks that are not known."""
    rows = [
        row
        for row in result.rows
        if row.setup and base_of(row.setup.request.framework.name) == "unknown"
    ]
    return [miss for miss in map(miss_of, rows) if miss]


def left_out_ranges(
    left_out: Validation, unknown: Validation, kin: Mapping[str, Collection[str]]
) -> dict[int, bool]:
    """Return by `id` of a row whether it lies inside of a range whose widths know no kin of it."""
    misses = {id(row): miss for row in left_out.rows if (miss := miss_of(row))}
    others = unknown_misses(unknown)
    families = {frozenset(kin.get(miss.source, {miss.source})) for miss in misses.values()}
    result: dict[int, bool] = {}
    for family in families:
        pair = laws(_without(misses.values(), family), _without(others, family))
        result |= {
            at: is_inside(miss, *pair) for at, miss in misses.items() if miss.source in family
        }
    return result


def _without(misses: Iterable[Miss], family: Collection[str]) -> list[Miss]:
    return [miss for miss in misses if miss.source not in family]


def share_inside(inside: Mapping[str, Sequence[bool]]) -> float:
    """Return the share of runs inside their ranges, sources of ten runs counting alike.

    >>> round(share_inside({"a": [True] * 9 + [False], "b": [False]}), 3)
    0.818
    """
    whole = {name: min(1.0, len(each) / WHOLE) for name, each in inside.items()}
    total = sum(whole[name] * sum(each) / len(each) for name, each in inside.items())
    return total / sum(whole.values())


def source_variance(inside: Mapping[str, Sequence[bool]]) -> float:
    """Return the variance between sources of their shares inside, beyond that of few runs.

    Of sources of ten runs or more, by moments: the variance of their shares less the mean of those
    that runs drawn one by one would have.

    >>> source_variance({"a": [True] * 10, "b": [False] * 10})
    0.5
    """
    shares = {name: sum(each) / len(each) for name, each in inside.items() if len(each) >= WHOLE}
    if len(shares) < 2:
        return 0.0
    drawn = mean(share * (1 - share) / len(inside[name]) for name, share in shares.items())
    return max(0.0, variance(shares.values()) - drawn)


def standard_error(inside: Mapping[str, Sequence[bool]], between: float, share: float) -> float:
    """Return the standard error of `share_inside` where `share` of all runs lie inside.

        s^2 = sum_i w_i^2 (between + p (1 - p) / n_i) / (sum_i w_i)^2

    Sources are drawn, with a variance `between` them, and n_i runs of each.

    >>> round(standard_error({"a": [True] * 16}, 0.0, 0.8), 3)
    0.1
    """
    whole = {name: min(1.0, len(each) / WHOLE) for name, each in inside.items()}
    parts = (
        whole[name] ** 2 * (between + share * (1 - share) / len(each))
        for name, each in inside.items()
    )
    return math.sqrt(sum(parts)) / sum(whole.values())


def main(path: str) -> None:
    """Print the constants."""
    from benchmarks.accuracy import KIN, ONE_SOURCE  # noqa: PLC0415 - which prints these ranges

    table = Path(path)
    known = validate(table, left_out=True, kin=KIN)
    unknown = unknown_misses(validate(table, unknown=ONE_SOURCE))
    pair = laws([miss for miss in map(miss_of, known.rows) if miss], unknown)
    for name, law in zip(("BELOW", "ABOVE"), pair, strict=True):
        terms = ", ".join(f"{field}={value:.3f}" for field, value in law._asdict().items())
        print(f"{name} = WidthLaw({terms})")


if __name__ == "__main__":
    main(sys.argv[1])
