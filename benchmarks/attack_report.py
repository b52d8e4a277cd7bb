"""What an attack found, as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date

EQUAL = 1e-9
"""Seconds this close, relatively, are equal."""
TOLERANCE = 0.005
"""Of simulated seconds, relatively: so much faster than an answer plans inside the space may be."""
TOLERANCE_OUTSIDE = 0.03
"""The same of plans that the search leaves out."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What an attack on one request found."""

    request: str
    asked: str
    answer: str
    simulated_s: float
    objective_s: float
    lower_bound_s: float
    simulated_bound_s: float
    """Of simulated steps; 0 where nothing is proven."""
    own_objective_s: float | None
    """The same plan's, worked out by the attack; None if its stages are no draft's."""
    plans: int = 0
    fit: int = 0
    inside: int = 0
    unlike: int = 0
    """Of those inside: with pipelines that differ."""
    layouts: int = 0
    least_objective_s: float = float("inf")
    least_simulated_s: float = float("inf")
    fastest: str = ""
    """The plan of the attack that takes the least simulated."""
    closed_form_hits: list[dict[str, object]] = field(default_factory=list)
    bound_hits: list[dict[str, object]] = field(default_factory=list)
    """Below the proven bound of simulated time."""
    simulation_hits: list[dict[str, object]] = field(default_factory=list)
    part: str = ""
    """What the answer to all parts of the cluster uses."""
    part_s: float | None = None
    """Its simulated step; None where parts were not searched."""
    part_bound_s: float | None = None
    """What no plan of any part that is proven takes less than."""
    part_hits: list[dict[str, object]] = field(default_factory=list)
    """Below that bound."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the objective here is the search's."""
        own_s = self.own_objective_s
        return own_s is None or abs(own_s - self.objective_s) <= EQUAL * self.objective_s

    @property
    def ok(self) -> bool:
        hits = self.closed_form_hits or self.bound_hits or self.simulation_hits or self.part_hits
        return self.agrees and not hits


def lines(outcome: Outcome) -> list[str]:
    """Return an outcome as text."""
    result = [
        f"{outcome.request}: {outcome.asked}",
        f"  answer {outcome.answer}: simulated {outcome.simulated_s:.6g} s, at least "
        f"{outcome.simulated_bound_s:.6g} s; closed form at least "
        f"{outcome.lower_bound_s:.6g} s, best {outcome.objective_s:.6g} s",
        f"  {outcome.plans:,} plans of {outcome.layouts:,} layouts, {outcome.fit:,} fit, "
        f"{outcome.inside:,} of these in the space, {outcome.unlike:,} with pipelines that differ; "
        f"least closed form "
        f"{outcome.least_objective_s:.6g} s, least simulated {outcome.least_simulated_s:.6g} s; "
        f"{outcome.seconds:.1f} s of CPU",
    ]
    if outcome.least_simulated_s < outcome.simulated_s * (1 - EQUAL):
        result.append(f"  faster simulated than the answer: {outcome.fastest}")
    if not outcome.agrees:
        result.append(f"  THE OBJECTIVE DIFFERS: {outcome.own_objective_s} s by the attack")
    for what, hits in (
        ("CLOSED FORM", outcome.closed_form_hits),
        ("PROVEN SIMULATED TIME", outcome.bound_hits),
        ("PROVEN TIME OF PARTS", outcome.part_hits),
        ("SIMULATION", outcome.simulation_hits),
    ):
        result += [
            f"  BEATEN IN {what}: {hit['seconds']:.6g} s, {hit['text']}"
            + (f" (outside: {hit['outside']})" if hit["outside"] else "")
            for hit in hits
        ]
    return result


def page(outcomes: Sequence[Outcome], command: str) -> list[str]:
    """Return what was found as a page, with the command that found it."""
    plans = sum(outcome.plans for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    hits = sum(not outcome.ok for outcome in outcomes)
    result = [
        "# An attack on answers",
        "",
        f"Written on {date.today()} by `{command}`.",
        "",
        f"{plans:,} plans from outside the search are compared with the answers to {len(outcomes)} "
        "requests: random plans and neighbours of the answers (cuts, recomputation, schedules, "
        "micro-batches of any size, degrees, idle devices, ZeRO levels, orders of axes, experts, "
        "forwards ahead of links, pipelines that differ from one group of devices to another, "
        "gathering, the loss and its chunks, offload), written and read as documents and "
        "predicted. No plan in the space of the certificate "
        "(`benchmarks/attack.py` defines it) may take less than the proven bounds, in closed form "
        "and simulated, nor, with idle devices, than what is proven of all parts of the cluster. "
        "No plan of the space or of a part may simulate more than "
        f"{100 * TOLERANCE:.1f} % faster than the answer, "
        f"or than that of all parts, and no other plan more than {100 * TOLERANCE_OUTSIDE:.0f} %. "
        f"Requests with such a plan: {hits}. CPU: {seconds / 60:.0f} minutes.",
        "",
        *_table(outcomes),
        "",
        "Plans that simulate faster than the answer, with what the search leaves out:"
        if not hits
        else "Plans that simulate faster than the answer:",
        "",
    ]
    for outcome in outcomes:
        if outcome.least_simulated_s < outcome.simulated_s * (1 - EQUAL):
            gain = 100 * (1 - outcome.least_simulated_s / outcome.simulated_s)
            result.append(f"- {outcome.request}, {gain:.2f} %: {outcome.fastest}")
        for hit in (*outcome.closed_form_hits, *outcome.bound_hits, *outcome.part_hits):
            result.append(f"- {outcome.request}, BELOW THE BOUND: {hit['text']}")
    return result


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    head = (
        "request",
        "answer",
        "plans",
        "layouts",
        "fit, in the space, of these unlike",
        "closed form: bound",
        "least of the attack",
        "simulated: answer",
        "bound",
        "least of the attack",
        "answer of all parts",
        "CPU s",
    )
    rows = [
        (
            f"{outcome.request}: {outcome.asked}",
            outcome.answer,
            f"{outcome.plans:,}",
            f"{outcome.layouts:,}",
            f"{outcome.fit:,}, {outcome.inside:,}, {outcome.unlike:,}",
            f"{outcome.lower_bound_s:.6g} s",
            _against(outcome.least_objective_s, outcome.lower_bound_s),
            f"{outcome.simulated_s:.6g} s",
            f"{outcome.simulated_bound_s:.6g} s" if outcome.simulated_bound_s else "none",
            _against(outcome.least_simulated_s, outcome.simulated_s),
            "none" if outcome.part_s is None else f"{outcome.part_s:.6g} s on {outcome.part}",
            f"{outcome.seconds:.0f}",
        )
        for outcome in outcomes
    ]
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]


def _against(seconds: float, reference_s: float) -> str:
    if seconds == float("inf"):
        return "none"
    return f"{seconds:.6g} s ({100 * (seconds / reference_s - 1):+.2f} %)"
