"""docs/equality.md: the table that a run of the large cover writes."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.runtime.combinations import BOUNDS, EXACT, Property, Row, bound, by_axis

STEPS = 5
TITLE = """# Equality

Any plan trains to the same losses and weights as the same model in one process.  `make matrix`
trains tiny models on 2, 4 and 8 processes under plans that are generated from the plan's types
(`tests/runtime/combinations.py`): every pair of values that the runtime executes occurs in a row,
every mesh with each of them, and every schedule and recompute choice under every ZeRO level with
each of the others.  What the runtime refuses stands in `planner/native.py`.

This page was written by that run, {date}, torch {torch}, gloo on CPU: {done} of {rows} rows,
{steps} steps each, in {minutes:.0f} minutes of training.
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


@dataclass(frozen=True)
class Failure:
    """A row that did not train to its end."""

    row: Row
    reason: str
    within = False

    @property
    def text(self) -> str:
        return f"{self.row.ranks} ranks, {self.row.text}: {self.reason}"


ROOT = Path(__file__).parents[2]
SOURCES = ("planner/**/*.py", "runtime/*.py", "tests/runtime/*.py")


class Records:
    """Results of all rows so far, kept in a file that belongs to one state of the sources."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.results: dict[Row, Result | Failure] = {}
        self._file = folder / f"{_state()}.jsonl"
        by_text = {(row.ranks, row.text): row for row in rows}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                row = by_text[record["ranks"], record["row"]]
                self.results[row] = Result(row, record["errors"], record["seconds"])

    def left(self) -> list[Row]:
        """Return the rows that have not trained to their end."""
        return [row for row in self.rows if row not in self.results]

    def add(self, result: Result | Failure) -> None:
        """Keep a result; rows that fail are tried again by the next run."""
        self.results[result.row] = result
        if isinstance(result, Result):
            record = {"ranks": result.row.ranks, "row": result.row.text}
            record |= {"errors": result.errors, "seconds": result.seconds}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _state() -> str:
    """Return a digest of all sources that training or its rows depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def text(records: Records) -> str:
    """Return the document of a run that has trained so many of all its rows."""
    results = [result for result in records.results.values() if isinstance(result, Result)]
    bounds = "; ".join(f"{name} {value} {most.text}" for (name, value), most in BOUNDS.items())
    title = TITLE.format(
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        done=len(results),
        rows=len(records.rows),
        steps=STEPS,
        minutes=sum(result.seconds for result in results) / 60,
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
