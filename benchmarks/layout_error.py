"""How far the ratio of two layouts of one request lies from its prediction.

    python benchmarks/layout_error.py TABLE.csv

Layouts of one sweep share model, machine, batch and precision, so what a prediction errs by alike
for all of them does not count: of each pair that is predicted within 15 % of each other, the error
is the logarithm of the measured ratio over the predicted one.  Sources with ten pairs at least are
counted, each as much as another.  Rows of identical inputs count once, at their median.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from meshwright.planner.calibration.scores.statistics import quantile
from meshwright.planner.calibration.scores.validate import validate

CLOSE = 0.15
"""Ratio of two predicted steps, less one, up to which they are neighbours."""
FEWEST = 10
"""Pairs of a source."""


def main(table: str) -> None:
    """Print the errors of each source, and the middle of them."""
    cells: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in validate(Path(table)).rows:
        measured = row.measured
        if row.times and measured.sweep and measured.judge_rank and row.prediction is not None:
            layout = row.prediction.layout
            cells[measured.source, measured.sweep][layout].append(row.times)
    errors: dict[str, list[float]] = defaultdict(list)
    for (source, _), layouts in cells.items():
        pairs = [
            (median(p for p, _ in times), median(m for _, m in times)) for times in layouts.values()
        ]
        for (p, m), (q, n) in itertools.combinations(pairs, 2):
            if max(p, q) <= (1 + CLOSE) * min(p, q):
                errors[source].append(abs(math.log(m / n / (p / q))))
    middles, ends = [], []
    print("source | pairs | half within | 80 % within")
    for source, values in sorted(errors.items()):
        if len(values) < FEWEST:
            continue
        middles.append(median(values))
        ends.append(quantile(sorted(values), 0.8))
        print(f"{source} | {len(values)} | {middles[-1]:.3f} | {ends[-1]:.3f}")
    print(f"middle of {len(middles)} sources | | {median(middles):.3f} | {median(ends):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
