"""docs/plans-judged.md: published hand-tuned layouts beside their predictions and our answers.

    python -m benchmarks.plans_judged > docs/plans-judged.md

Layouts are those of `benchmarks/judged_layouts.csv`, and of `benchmarks/public_trainings.csv` those
that are tuned by hand and stated whole (`STATED`).  Each is predicted as published, under the stack
and options of its source; then the same model, cluster and batch are planned, as a user would ask,
under that stack.  Why our answer differs is worked out from the seconds by cause of both.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.public_facts import TRAININGS, UNITS, number
from benchmarks.whole_trainings import Outcome, outcome, searchable, tuned_run
from planner.errors import MeshwrightError
from planner.pins import Pins
from planner.plan import Layout
from planner.prediction import Prediction
from planner.request import SURE_TO_FIT
from planner.search.best_first import search
from planner.setup import Setup
from planner.units import seconds_text

JUDGED = Path(__file__).with_name("judged_layouts.csv")
STATED = (
    "deepseek-v3",
    "deepseek-v3-megatron-gb200",
    "deepseek-v3-megatron-gb300",
    "deepseek-v3-megatron-b200",
    "qwen3-235b-megatron-gb300",
    "qwen3-235b-megatron-gb200",
    "qwen3-30b-megatron-gb300",
    "llama-3-8b-megatron-h100",
    "llama-3-8b-megatron-gb200",
    "llama-3.1-405b-nemo-h100-512",
    "llama-3.1-405b-nemo-h100-8192",
    "llama-3.1-405b-nemo-h200-512",
    "llama-3.1-405b-nemo-gb200-512",
    "llama-3.1-405b-nemo-dgxc-h100-2048-bf16",
    "torchtitan-8b-128-bf16-compiled",
    "torchtitan-70b-256-bf16-compiled",
    "torchtitan-8b-h200-64-fp8",
)
"""Of the trainings that docs/public-facts.md has, the tuned ones whose layouts are stated."""
GOAL, WORST = 0.08, 0.20
"""Of the median error, and of any that is not named."""
AXES = ("tensor", "pipeline", "context", "expert")
ALIKE = 2
"""Degrees that differ by this factor at most are of one class."""
CLOSE = 0.03
"""Of a step, by which predictions tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A published layout, its prediction, and what is planned for the same request."""

    published: Outcome
    layout: str
    setup: Setup
    prediction: Prediction
    answer: Prediction | None
    planned: Layout | None
    why_none: str = ""

    @property
    def faster(self) -> float:
        """By what share of the published layout's predicted step our answer is faster."""
        assert self.answer is not None
        return 1 - self.answer.step_time_s / self.prediction.step_time_s

    @property
    def same_class(self) -> bool:
        """Whether the degrees of all axes differ by a factor of two at most."""
        assert self.planned is not None
        return all(
            max(a, b) <= ALIKE * min(a, b)
            for a, b in (
                (getattr(self.setup.layout, axis), getattr(self.planned, axis)) for axis in AXES
            )
        )


def judged(row: Mapping[str, str]) -> Judged:
    """Return a layout as published, and the answer to the same request."""
    prediction, setup = tuned_run(row)
    request = replace(
        setup.request,
        stack=searchable(setup.request.stack),
        pins=Pins(scales=setup.layout.scales if setup.request.job.precision == "fp8" else None),
        fit_probability=SURE_TO_FIT,
    )
    answer, planned, why = None, None, ""
    try:
        found = search(request)
        answer, planned = found.prediction, found.plan.layout
    except MeshwrightError as error:
        why = str(error).split(". ")[0]
    return Judged(
        published=outcome(row),
        layout=row["layout"],
        setup=setup,
        prediction=prediction,
        answer=answer,
        planned=planned,
        why_none=why,
    )


def verdict(one: Judged) -> str:
    """Return in a sentence how our answer differs from the published layout, and why."""
    if one.answer is None:
        return f"none: {one.why_none}"
    kind = "same class" if one.same_class else "another class"
    if abs(one.faster) < CLOSE:
        return f"{kind}, a tie ({-one.faster:+.1%})"
    gained, lost = _difference(one.prediction, one.answer)
    if one.faster > 0:
        reason = f"less {gained}" + (f", for more {lost}" if lost else "")
        return f"{kind}, {one.faster:.0%} faster: {reason}"
    odds = one.prediction.fit_probability or 0.0
    return (
        f"{kind}, {-one.faster:.0%} slower, since the published one fits with {odds:.0%} as "
        f"predicted and {SURE_TO_FIT:.0%} is asked for"
        if odds < SURE_TO_FIT
        else f"{kind}, {-one.faster:.0%} slower: the stack's search has no such layout"
    )


def _difference(theirs: Prediction, ours: Prediction) -> tuple[str, str]:
    """Return the cause that saves most, and the one that costs most, each with its seconds."""
    causes = {_cause(name) for name in (*theirs.step_parts, *ours.step_parts)}
    saved = {
        cause: _seconds(theirs.step_parts, cause) - _seconds(ours.step_parts, cause)
        for cause in causes
    }
    first, last = max(saved, key=lambda c: saved[c]), min(saved, key=lambda c: saved[c])
    lost = (
        f"{last} ({seconds_text(-saved[last])})" if -saved[last] > CLOSE * ours.step_time_s else ""
    )
    return f"{first} ({seconds_text(saved[first])})", lost


def _cause(name: str) -> str:
    return (
        "communication inside layers"
        if name.endswith(" communication") and name != ("data communication")
        else name
    )


def _seconds(parts: Mapping[str, float], cause: str) -> float:
    return sum(seconds for name, seconds in parts.items() if _cause(name) == cause)


def text(found: Sequence[Judged], rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page."""
    errors = sorted(abs(one.published.error) for one in found)
    unfit = [one.published.name for one in found if not one.published.fits]
    missed = [one for one in found if abs(one.published.error) > WORST]
    lines = [
        "# Published layouts, judged",
        "",
        "Written by `python -m benchmarks.plans_judged`. Hand-tuned layouts as their authors "
        "published them, each predicted under the stack and options of its source, beside our "
        "answer to the same request under that stack. Settings that a source does not state are "
        f"the fastest that fit. Answers fit with {SURE_TO_FIT:.0%} at least; a positive error is a "
        f"prediction slower than published. Two layouts are of one class where the degrees of "
        f"tensor, pipeline, context and expert parallelism differ by a factor of {ALIKE} at most.",
        "",
        f"{len(found)} layouts: median |error| {median(errors):.1%} (goal {GOAL:.0%}), worst "
        f"{errors[-1]:.1%}; {len(unfit)} said not to fit{': ' + ', '.join(unfit) if unfit else ''}"
        f"; above {WORST:.0%}: {', '.join(o.published.name for o in missed) or 'none'}. Of our "
        f"answers {sum(one.planned is not None and one.same_class for one in found)} are of the "
        "published class.",
        "",
        "| run | stack | published layout | fits with | step | published | error | our answer | "
        "its step | compared |",
        "|---|---|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for one in found:
        each, row = one.published, rows[one.published.name]
        chips = int(row["nodes"]) * int(row["devices_per_node"])
        cells = [
            f"{each.name}, {chips:,} {row['accelerator']}, {row['precision']}",
            each.stack,
            each.layout,
            f"{one.prediction.fit_probability or 0.0:.0%}",
            seconds_text(each.step_s),
            f"{number(each.published)} {UNITS[each.measure]}",
            f"{each.error:+.1%}",
            one.answer.layout if one.answer else "",
            seconds_text(one.answer.step_time_s) if one.answer else "",
            verdict(one),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Sources:", ""]
    sources: dict[str, list[str]] = {}
    for one in found:
        sources.setdefault(rows[one.published.name]["source"], []).append(one.published.name)
    lines += [f"- {source}: {', '.join(names)}" for source, names in sorted(sources.items())]
    return "\n".join(lines) + "\n"


def rows_judged() -> Iterator[dict[str, str]]:
    """Yield the rows of both tables."""
    with JUDGED.open(newline="") as table:
        yield from csv.DictReader(table)
    with TRAININGS.open(newline="") as table:
        known = {row["name"]: row for row in csv.DictReader(table)}
    yield from (known[name] for name in STATED)


def main() -> None:
    """Print the page, and what is behind it by hand."""
    rows = {row["name"]: row for row in rows_judged()}
    chosen = {
        name: row for name, row in rows.items() if set(sys.argv[1:]) <= {name} or not sys.argv[1:]
    }
    print(text([judged(row) for row in chosen.values()], chosen), end="")
    print(NOTES, end="")


NOTES = ""


if __name__ == "__main__":
    main()
