"""One self-contained HTML page about trials: predicted beside believed and measured, what moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from meshwright.planner.documents.units import seconds_text
from meshwright.planner.report import svg
from meshwright.planner.report.facts import fact_cards
from meshwright.planner.tuning.trial_options import CONSTANTS

if TYPE_CHECKING:
    from meshwright.planner.report.facts import Fact
    from meshwright.planner.tuning.next_trial import Tuner
    from meshwright.planner.tuning.record import Trial

MOST_PLANS = 48
"""Drawn, of those believed fastest and those that were tried."""
SURELY = 1.28
"""Spreads from the middle of a range to its ends: four of five lie between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedConstant:
    """A constant of the cluster, as factors of the predicted seconds: (middle, low, high)."""

    name: str
    what: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    learnt: float
    """Share of its spread by which the constant became more certain."""


def page(
    title: str, facts: Sequence[Fact], names: Sequence[str], tuner: Tuner, trials: Sequence[Trial]
) -> str:
    """Return the report; `names` are the layouts of the tuner's options."""
    rows = list(plans(names, tuner))
    template = (
        resources.files("meshwright.planner.report").joinpath("trials.html").read_text("utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        css=svg.page_css(),
        title=title,
        cards=fact_cards(facts),
        picture=svg.ranges("Steps before and after trials", rows, "seconds a step"),
        plans=rows,
        left_out=len(names) - len(rows),
        trials=trials,
        constants=moved_constants(tuner),
        seconds=seconds_text,
    )


def plans(names: Sequence[str], tuner: Tuner) -> Iterator[svg.RangeRow]:
    """Yield the belief about plans, the fastest first."""
    measured = {option: tuner.measured_step(option).step_s for option in tuner.ran}
    mean = tuner.posterior.mean
    order = sorted(range(len(names)), key=lambda at: (at not in measured, mean[at]))[:MOST_PLANS]
    for at in sorted(order, key=lambda at: float(mean[at])):
        yield svg.RangeRow(
            name=names[at],
            before=tuner.without_outcomes.posterior.seconds(at),
            after=tuner.posterior.seconds(at),
            measured=measured.get(at),
        )


def moved_constants(tuner: Tuner) -> list[MovedConstant]:
    """Return the constants that trials changed, the one learnt most first."""
    changes = []
    for constant in tuner.posterior.constants:
        spread = CONSTANTS[constant.name].spread
        changes.append(
            MovedConstant(
                name=constant.name,
                what=CONSTANTS[constant.name].what,
                before=_factors(0.0, spread),
                after=_factors(constant.mean, constant.spread),
                learnt=1 - min(1.0, constant.spread / spread),
            )
        )
    learnt = [change for change in changes if change.learnt or change.after[0] != 1]
    return sorted(learnt, key=lambda change: -abs(math.log(change.after[0])))


def _factors(mean: float, spread: float) -> tuple[float, float, float]:
    middle, low, high = (math.exp(mean + k * SURELY * spread) for k in (0, -1, 1))
    return middle, low, high
