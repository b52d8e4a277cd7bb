"""What an attack found, as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

EQUAL = 1e-9
"""Seconds this close, relatively, are equal."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What an attack on one request found."""

    request: str
    asked: str
    answer: str
    simulated_s: float
    objective_s: float
    lower_bound_s: float
    own_objective_s: float | None
    """The same plan's, worked out by the attack; None if its stages are no draft's."""
    plans: int = 0
    fit: int = 0
    inside: int = 0
    layouts: int = 0
    least_objective_s: float = float("inf")
    least_simulated_s: float = float("inf")
    fastest: str = ""
    """The plan of the attack that takes the least simulated."""
    closed_form_hits: list[dict[str, object]] = field(default_factory=list)
    simulation_hits: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the objective here is the search's."""
        own_s = self.own_objective_s
        return own_s is None or abs(own_s - self.objective_s) <= EQUAL * self.objective_s

    @property
    def ok(self) -> bool:
        return self.agrees and not self.closed_form_hits and not self.simulation_hits


def lines(outcome: Outcome) -> list[str]:
    """Return an outcome as text."""
    result = [
        f"{outcome.request}: {outcome.asked}",
        f"  answer {outcome.answer}: simulated {outcome.simulated_s:.6g} s; closed form at least "
        f"{outcome.lower_bound_s:.6g} s, best {outcome.objective_s:.6g} s",
        f"  {outcome.plans:,} plans of {outcome.layouts:,} layouts, {outcome.fit:,} fit, "
        f"{outcome.inside:,} of these in the space; least closed form "
        f"{outcome.least_objective_s:.6g} s, least simulated {outcome.least_simulated_s:.6g} s; "
        f"{outcome.seconds:.1f} s of CPU",
    ]
    if outcome.least_simulated_s < outcome.simulated_s * (1 - EQUAL):
        result.append(f"  faster simulated than the answer: {outcome.fastest}")
    if not outcome.agrees:
        result.append(f"  THE OBJECTIVE DIFFERS: {outcome.own_objective_s} s by the attack")
    for what, hits in (
        ("CLOSED FORM", outcome.closed_form_hits),
        ("SIMULATION", outcome.simulation_hits),
    ):
        result += [
            f"  BEATEN IN {what}: {hit['seconds']:.6g} s, {hit['text']}"
            + (f" (outside: {hit['outside']})" if hit["outside"] else "")
            for hit in hits
        ]
    return result


def markdown(outcomes: Sequence[Outcome]) -> list[str]:
    """Return outcomes as a table."""
    head = (
        "request",
        "answer",
        "plans",
        "layouts",
        "fit, in the space",
        "bound, closed form",
        "least of the attack",
        "answer, simulated",
        "least of the attack",
        "CPU s",
    )
    rows = [
        (
            outcome.asked,
            outcome.answer,
            f"{outcome.plans:,}",
            f"{outcome.layouts:,}",
            f"{outcome.fit:,}, {outcome.inside:,}",
            f"{outcome.lower_bound_s:.6g} s",
            _against(outcome.least_objective_s, outcome.lower_bound_s),
            f"{outcome.simulated_s:.6g} s",
            _against(outcome.least_simulated_s, outcome.simulated_s),
            f"{outcome.seconds:.0f}",
        )
        for outcome in outcomes
    ]
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]


def _against(seconds: float, reference_s: float) -> str:
    return f"{seconds:.6g} s ({100 * (seconds / reference_s - 1):+.2f} %)"
