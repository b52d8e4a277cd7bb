"""The plans that were simulated, and what is said of them.

The closed form in which a search is proven may be some percent above or below the simulated step
(docs/schedules.md).  So plans that may simulate faster than its optimum are solved and simulated
too (planner.search.simulated_proof), and the fastest simulated plan is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.prediction import Finalist, Simulated
from planner.search.candidates import Candidates
from planner.search.ranked import Ranked
from planner.search.simulated_proof import Proof
from planner.search.space import complexity
from planner.tolerances import EQUAL
from planner.units import seconds_text

Solved = tuple[Candidates, Ranked]
MOST_LISTED = 8


def finalists(optimum: Solved, proof: Proof) -> list[Solved]:
    """Return the closed form's optimum and what was simulated beside it, the fastest first.

    Of each layout there is the fastest plan; of plans equally fast the optimum comes first, then
    the simplest.
    """
    best = optimum[1]
    least_s = proof.best.prediction.step_time_s

    def key(one: Solved) -> tuple[float, bool, tuple[int, ...]]:
        # What is within the tie of the fastest counts as equal to it.
        step_s = max(one[1].prediction.step_time_s, least_s * (1 + EQUAL))
        return step_s, one[1] is not best, complexity(one[1].plan.layout)

    kept: dict[tuple[int, str], Solved] = {}
    for one in sorted((optimum, *proof.found), key=key):
        if one[1].prediction.fits or one[1] is best:
            kept.setdefault((id(one[0]), one[1].plan.layout.text()), one)
    order = list(kept.values())
    return [one for at, one in enumerate(order) if at < MOST_LISTED or one[1] is best]


def simulated(order: Sequence[Solved], closed_form: Ranked, proof: Proof) -> Simulated:
    """Return what the simulator says of the finalists, and what is proven of the whole space."""
    chosen = order[0][1]
    step_s = chosen.prediction.step_time_s
    named = f"the optimum of the closed form, {closed_form.prediction.layout}"
    if chosen is closed_form:
        verdict = f"{named}, is the fastest of {len(order)} simulated"
    elif chosen.plan.layout == closed_form.plan.layout:
        verdict = (
            f"{named}, takes {closed_form.prediction.step_time_s:.6g} s simulated; with other "
            f"stages or recomputation the same layout takes {step_s:.6g} s"
        )
    else:
        verdict = (
            f"{named}, takes {closed_form.prediction.step_time_s:.6g} s simulated; of {len(order)} "
            f"finalists {chosen.prediction.layout} is the fastest with {step_s:.6g} s"
        )
    bound_s = min(proof.lower_bound_s, step_s)
    gap = 1 - bound_s / step_s if step_s else 0.0
    left = f", least of {proof.lowest}" if proof.lowest is not None else ""
    return Simulated(
        statement=verdict,
        layout=chosen.prediction.layout,
        step_time_s=step_s,
        lower_bound_s=bound_s,
        gap=gap,
        bound=f"nothing in the space simulates below {seconds_text(bound_s)} "
        f"(gap {100 * gap:.2g} %{left})",
        looked_at={name: count for name, count in proof.looked_at.items() if count},
        finalists=tuple(
            Finalist(
                layout=one.prediction.layout + _recompute(own),
                objective_s=one.objective_s,
                step_time_s=one.prediction.step_time_s,
            )
            for own, one in order
        ),
    )


def _recompute(candidates: Candidates) -> str:
    """Say what blocks recompute, where all must do the same and there is a choice."""
    if not isinstance(candidates.recompute, Mapping) or candidates.pins.recompute:
        return ""
    choices = {choice for each in candidates.recompute.values() for choice in each} - {"none"}
    return f" recompute={'|'.join(sorted(choices)) or 'none'}"
