"""Answer of a search: the plan, its prediction, and the proof that nothing else is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors.shown import html_table

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Certificate, Prediction
    from meshwright.planner.search.bounds.layout_bounds import Candidates
    from meshwright.planner.search.plan_candidate import Ranked

TIES_NODES = 5_000
"""Nodes of the integer program on one layout, where hosts or requirements tie stages together; the
certificate says what it leaves unproven."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One row of the table of choices."""

    what: str
    plan: Plan | None = None
    prediction: Prediction | None = None
    more: float = 0.0
    """Time of as much work beyond the fastest, relatively; on the same devices also cost."""
    why: str = ""

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        stages = self.prediction.stages if self.prediction else ()
        return max((stage.peak_memory_bytes for stage in stages), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fastest plan that a search found, with its prediction and its certificate."""

    plan: Plan
    prediction: Prediction
    certificate: Certificate
    search_s: float
    """CPU seconds of the search itself."""
    top: tuple[Ranked, ...]
    """The best plan of each kind, fastest first; the first is `plan`."""
    finalists: tuple[Ranked, ...] = ()
    """Plans that were simulated, the fastest first."""
    choices: tuple[Alternative, ...] = ()
    """The plan beside the fastest and the usual ones (planner.search.plan_preference)."""
    closed_form: Ranked
    """The optimum of the closed form, where the search began; it may be `plan`."""
    closed_form_bound_s: float
    """No configuration takes less in the closed form."""
    solved: int
    """Number of partition problems that were solved."""
    candidates: tuple[Candidates, ...] = field(default=(), repr=False, compare=False)
    """Candidates of the search, one for each way that all blocks recompute; other searches of the
    request can go on from there."""

    def _repr_html_(self) -> str:
        """Return the answer as notebooks show it: the plan beside the usual ones."""
        rows = [
            (
                choice.what,
                choice.prediction.layout_text if choice.prediction else "",
                seconds_text(choice.prediction.step_time_s) if choice.prediction else "",
                f"{100 * choice.more:+.1f} %" if choice.prediction else "",
                choice.why,
            )
            for choice in self.choices
        ]
        if not rows:
            step = seconds_text(self.prediction.step_time_s)
            rows = [("plan", self.prediction.layout_text, step, "", "")]
        title = f"{self.plan.model.name} on {self.plan.cluster}"
        head = ("choice", "plan", "step", "cost", "why")
        return html_table(title, head, rows, [self.certificate.statement])
