"""The plans that were simulated, and what is said of them.

The closed form in which a search is proven may be some percent above or below the simulated step
(docs/schedules.md).  So plans that may simulate faster than its optimum are solved and simulated
too, and the fastest simulated plan is the answer.  They are what a proof in simulated time comes
across (planner.search.simulated_proof for chains on devices that are alike, else
planner.search.spaces.mixed_proof); of graphs and of devices that differ also those within `MARGIN`
of the optimum or below what it simulates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from planner.documents.prediction import Finalist, Simulated
from planner.documents.tolerances import EQUAL
from planner.documents.units import seconds_text
from planner.search.candidates import Candidates
from planner.search.ranked import Ranked
from planner.search.simulated_proof import Proof
from planner.search.space import complexity

MARGIN = 0.03
"""Beyond the optimum of the closed form, relatively."""
MOST_SOLVED = 8
"""Partition problems beside the optimum's; of chains, plans that are listed."""
MOST_ALONE = 3
"""The same of graphs and of devices that differ, whose problems take longer."""

Solved = tuple[Candidates, Ranked]
O = TypeVar("O")  # noqa: E741 - an owner


def fastest_first(found: Sequence[tuple[O, Ranked]], best: Ranked) -> list[tuple[O, Ranked]]:
    """Return plans in the order of their simulated steps, each with its owner.

    Of plans equally fast `best` comes first, then the simplest.
    """
    fitting = [one for one in found if one[1] is best or one[1].prediction.fits]
    least_s = min(one.prediction.step_time_s for _, one in fitting)
    return sorted(
        fitting,
        key=lambda one: (
            # What is within the tie of the fastest counts as equal to it.
            max(one[1].prediction.step_time_s, least_s * (1 + EQUAL)),
            one[1] is not best,
            complexity(one[1].plan.layout),
        ),
    )


def finalists(optimum: Solved, proof: Proof) -> list[Solved]:
    """Return the closed form's optimum and what was simulated beside it, the fastest first.

    Of each layout there is the fastest plan.
    """
    kept: dict[tuple[int, str], Solved] = {}
    for one in fastest_first([optimum, *proof.found], optimum[1]):
        kept.setdefault((id(one[0]), one[1].plan.layout.text()), one)
    order = list(kept.values())
    return [one for at, one in enumerate(order) if at < MOST_SOLVED or one[1] is optimum[1]]


def simulated(order: Sequence[Solved], closed_form: Ranked, proof: Proof) -> Simulated:
    """Return what the simulator says of the finalists, and what is proven of the whole space."""
    left = f", least of {proof.lowest}" if proof.lowest is not None else ""
    said = told([one for _, one in order], closed_form, [_recompute(own) for own, _ in order])
    return _bounded(said, proof.lower_bound_s, proof.looked_at, left)


def _bounded(
    said: Simulated, lower_bound_s: float, looked_at: Mapping[str, int], left: str = ""
) -> Simulated:
    """Return what is said of finalists with what is proven of all plans."""
    step_s = said.step_time_s
    bound_s = min(lower_bound_s, step_s)
    gap = 1 - bound_s / step_s if step_s else 0.0
    return said.model_copy(
        update={
            "lower_bound_s": bound_s,
            "gap": gap,
            "bound": f"no plan in the space takes less than {seconds_text(bound_s)} "
            f"(gap {100 * gap:.2g} %{left})",
            "looked_at": {name: count for name, count in looked_at.items() if count},
        }
    )


def finalists_mixed(
    every: Sequence[Ranked],
    closed_form: Ranked,
    lower_bound_s: float,
    looked_at: Mapping[str, int],
) -> tuple[list[Ranked], Simulated]:
    """Return the fastest plan of each layout, the closed form's optimum among them.

    With what the simulator says of them, and what is proven of all.
    """
    kept: dict[str, Ranked] = {}
    for _, one in fastest_first([(None, one) for one in every], closed_form):
        kept.setdefault(one.plan.layout.text(), one)
    order = [one for at, one in enumerate(kept.values()) if at < MOST_SOLVED or one is closed_form]
    return order, _bounded(told(order, closed_form), lower_bound_s, looked_at)


def told(order: Sequence[Ranked], closed_form: Ranked, recompute: Sequence[str] = ()) -> Simulated:
    """Say which finalist is the fastest; of simulated time nothing is proven yet.

    `recompute` says of each what its blocks do, where all must do the same.
    """
    chosen = order[0]
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
    return Simulated(
        statement=verdict,
        layout=chosen.prediction.layout,
        step_time_s=step_s,
        bound="none is known where layers are required to be on certain stages",
        finalists=tuple(
            Finalist(
                layout=one.prediction.layout + beside,
                objective_s=one.objective_s,
                step_time_s=one.prediction.step_time_s,
            )
            for one, beside in zip(order, recompute or [""] * len(order), strict=True)
        ),
    )


def _recompute(candidates: Candidates) -> str:
    """Say what blocks recompute, where all must do the same and there is a choice."""
    if not isinstance(candidates.recompute, Mapping) or candidates.pins.recompute:
        return ""
    choices = {choice for each in candidates.recompute.values() for choice in each} - {"none"}
    return f" recompute={'|'.join(sorted(choices)) or 'none'}"
