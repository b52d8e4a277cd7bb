"""docs/results/equality.md: the tables that runs of the covers write."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.runtime.combinations import (
    BOUNDS,
    EXACT,
    Property,
    Row,
    bound,
    by_axis,
    by_mesh,
    dear,
)

STEPS = 5
"""Of rows with every mesh."""
FEW_STEPS = 2
"""Of other rows: the second loss tells the first update, weights the second."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, which one run writes."""

    name: str
    intro: str
    """The heading and what stands under it, with places for the run's figures."""


EVERY_MESH = Section(
    "equality",
    """# Equality

Any plan trains to the same losses and weights as the same model in one process.  `make matrix`
trains tiny models on 2, 4 and 8 processes under plans that are generated from the plan's types
(`tests/runtime/combinations.py`): every pair of values that the runtime executes occurs in a row,
every mesh with each of them, and every schedule and recompute choice under every ZeRO level with
each of the others.  What the runtime refuses stands in `planner/frameworks/native_limits.py`.

Each part of this page was written by a run of its own.  This one: {date}, torch {torch}, gloo on
CPU: {done} of {rows} rows, {steps} steps each, in {minutes:.0f} minutes of training.
Each figure is the largest relative error of losses, of gradient norms or of any weight over all
ranks, against one process in the same precision.  Rows must stay below {exact:g}, and rows with a
choice that rounds below its bounds of losses / norms / weights: {bounds}.
""",
)
COMPILED = Section(
    "equality-compiled",
    """## Compiled blocks and losses in chunks

Rows of 2 and 4 ranks with compiled blocks, every second one with its loss in chunks, against one
eager process with all logits.  Graphs are traced, differentiated and divided by torch's compiler
and run by its reference backend (`aot_eager`).  {date}, torch {torch}: {done} of {rows} rows,
{steps} steps each, in {minutes:.0f} minutes of training.  Bounds are those above; a loss in chunks
adds {exact:g} to that of weights.
""",
)
INDUCTOR = Section(
    "equality-inductor",
    """## Compiled by inductor

Each family of the matrix, through code that inductor wrote.  {date}, torch {torch}: {done} of
{rows} rows on 2 ranks, {steps} steps each, in {minutes:.0f} minutes of training and compilation.
""",
)
_HEADINGS = re.compile(r"(?m)^(?=##? )")


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
TABLE = ROOT / "docs" / "results" / "equality.md"
SOURCES = ("planner/**/*.py", "runtime/*.py", "tests/runtime/*.py")


class Records:
    """Results of all rows so far, kept in a file that belongs to one state of the sources."""

    def __init__(self, cache: pytest.Cache, section: Section, rows: Sequence[Row]) -> None:
        self.section, self.rows = section, rows
        self.results: dict[Row, Result | Failure] = {}
        self._file = cache.mkdir(section.name) / f"{_state()}.jsonl"
        by_text = {(row.ranks, row.text): row for row in rows}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                row = by_text[record["ranks"], record["row"]]
                self.results[row] = Result(row, record["errors"], record["seconds"])

    def left(self) -> list[Row]:
        """Return the rows that have not trained to their end, those with the same mesh together."""
        left = [row for row in self.rows if row not in self.results]
        return sorted(left, key=lambda row: (row.ranks, by_mesh(row)[0]))

    def add(self, result: Result | Failure) -> None:
        """Keep a result; rows that fail are tried again by the next run."""
        self.results[result.row] = result
        if isinstance(result, Result):
            record = {"ranks": result.row.ranks, "row": result.row.text}
            record |= {"errors": result.errors, "seconds": result.seconds}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def write(self, steps: int) -> None:
        """Put what there is into the page, in place of what an earlier run wrote."""
        page = TABLE.read_text(encoding="utf-8")
        parts = {part.partition("\n")[0]: part for part in _HEADINGS.split(page) if part}
        own = text(self, steps)
        parts[own.partition("\n")[0]] = own
        TABLE.write_text("\n".join(part.strip("\n") + "\n" for part in parts.values()), "utf-8")


def _state() -> str:
    """Return a digest of all sources that training or its rows depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def text(records: Records, steps: int) -> str:
    """Return the section of a run that has trained so many of all its rows."""
    results = [result for result in records.results.values() if isinstance(result, Result)]
    bounds = "; ".join(f"{name} {value} {most.text}" for (name, value), most in BOUNDS.items())
    title = records.section.intro.format(
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        done=len(results),
        rows=len(records.rows),
        steps=steps,
        minutes=sum(result.seconds for result in results) / 60,
        exact=EXACT.loss,
        bounds=bounds,
    )
    values = [] if records.section is INDUCTOR else [*_by_value(results), ""]
    return "\n".join([title, *values, *_by_row(results), ""])


def _by_value(results: Sequence[Result]) -> list[str]:
    """Return the worst error of the rows with each value, apart for exact and rounding rows."""
    found: dict[Property, list[Result]] = {}
    for result in results:
        row = result.row
        for name, value in (("ranks", row.ranks), *by_axis(row), *dear(row)):
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
