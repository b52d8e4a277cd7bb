"""docs/equality.md: the table that a run of the large cover writes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.runtime.combinations import BOUNDS, EXACT, Property, Row, bound, by_axis
from tests.runtime.runs import STEPS

TITLE = """# Equality

Any plan trains to the same losses and weights as the same model in one process.  `make matrix`
trains tiny models on 2, 4 and 8 processes under plans that are generated from the plan's types
(`tests/runtime/combinations.py`): every pair of values that the runtime executes occurs in a row,
every mesh with each of them, and every schedule and recompute choice under every ZeRO level with
each of the others.  What the runtime refuses stands in `planner/native.py`.

This page was written by that run, {date}, torch {torch}, gloo on CPU: {done} of {rows} rows,
{steps} steps each.
Each figure is the largest relative error of losses, of gradient norms or of any weight over all
ranks, against one process in the same precision.  Rows must stay below {exact:g}, and rows with a
choice that rounds below its bounds of losses / norms / weights: {bounds}.
"""


@dataclass(frozen=True)
class Result:
    """How far a row's training lay from one process."""

    row: Row
    errors: dict[str, float]
    seconds: float

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    @property
    def text(self) -> str:
        found = ", ".join(f"{name} {value:.1e}" for name, value in self.errors.items())
        return f"{self.row.ranks} ranks, {self.row.text}: {found} (bound {bound(self.row).text})"

    @property
    def within(self) -> bool:
        return all(self.errors[name] < most for name, most in bound(self.row)._asdict().items())


def text(results: Sequence[Result], *, rows: int) -> str:
    """Return the document of a run that has trained so many of all its rows."""
    bounds = "; ".join(f"{name} {value} {most.text}" for (name, value), most in BOUNDS.items())
    title = TITLE.format(
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        done=len(results),
        rows=rows,
        steps=STEPS,
        exact=EXACT.loss,
        bounds=bounds,
    )
    return "\n".join([title, *_by_value(results), "", *_by_row(results), ""])


def _by_value(results: Sequence[Result]) -> list[str]:
    """Return the worst error of the rows with each value, apart for exact and rounding rows."""
    found: dict[Property, list[Result]] = {}
    for result in results:
        for name, value in (("ranks", result.row.ranks), *by_axis(result.row)):
            found.setdefault((name, value), []).append(result)
    lines = ["| choice | value | rows | worst, exact | worst, rounding |", "|---|---|---|---|---|"]
    for (name, value), of_value in sorted(found.items(), key=lambda item: item[0][0]):
        exact = [r.worst for r in of_value if bound(r.row) == EXACT]
        rounding = [r.worst for r in of_value if bound(r.row) != EXACT]
        shown = " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        lines.append(
            f"| {name.replace('_', ' ')} | {shown} | {len(of_value)} | {_most(exact)} "
            f"| {_most(rounding)} |"
        )
    return lines


def _most(errors: Sequence[float]) -> str:
    return f"{max(errors):.1e}" if errors else ""


def _by_row(results: Sequence[Result]) -> list[str]:
    lines = ["| ranks | plan | losses | norms | weights | bound |", "|---|---|---|---|---|---|"]
    for result in sorted(results, key=lambda r: (r.row.ranks, r.row.text)):
        of = result.errors
        lines.append(
            f"| {result.row.ranks} | {result.row.text} | {of['loss']:.1e} | {of['norm']:.1e} "
            f"| {of['weights']:.1e} | {bound(result.row).text} |"
        )
    return lines
