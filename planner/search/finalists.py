"""The configurations that are nearly as fast as the best, run through the simulator.

The closed form in which a search is proven may be some percent above or below the simulated step
(docs/schedules.md).  So configurations whose bound in it is within `MARGIN` of the optimum are
solved and simulated too: the optimum's own under every other timetable, and those that came
closest.  The fastest simulated plan is the answer.

What is proven in the simulator's terms is less: no split of a 1F1B configuration is faster than
`simulated_bound_s`; of other schedules nothing is proven.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.plan import Layout
from planner.prediction import Finalist, Simulated
from planner.schedules import schedule_of
from planner.search.candidates import Candidates
from planner.search.ranked import Ranked, ranked
from planner.search.space import canonical, complexity, timetables
from planner.solver.inner import solve as solve_exactly
from planner.solver.instance import Instance, Solution
from planner.solver.phi import balanced_s
from planner.tolerances import EQUAL

MARGIN = 0.03
"""Beyond the optimum of the closed form, relatively."""
MOST_SOLVED = 8
"""Partition problems beside the optimum's."""
MOST_ALONE = 3
"""The same of graphs and of devices that differ, whose problems take longer."""
MOST_BOUNDED = 256
"""Layers of a chain whose simulated step is bounded: of 1,000 the bound takes a minute."""

Solve = Callable[[Instance, float], object]


Near = tuple[Candidates, Layout]
"""A layout near the optimum, and the candidates that it is of."""
Solved = tuple[Candidates, Ranked]


def finalists(owner: Candidates, best: Ranked, near: Iterable[Near], solve: Solve) -> list[Solved]:
    """Return `best` and the plans near it, the fastest simulated first, each with its candidates.

    Of plans equally fast `best` comes first, then the simplest.
    """
    limit_s = best.objective_s * (1 + MARGIN)
    found, solved = [(owner, best)], 0
    for candidates, layout in _layouts(owner, best.plan.layout, near):
        if solved >= MOST_SOLVED:
            break
        if candidates.communication_s(layout) > limit_s or candidates.memory_s(layout) > limit_s:
            continue
        solved += 1
        step_s = candidates.costs(layout).step_s
        solution = solve(candidates.instance(layout), limit_s - step_s)
        if isinstance(solution, Solution):
            found.append((candidates, ranked(candidates, layout, solution)))
    return fastest_first(found, best)


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


def _layouts(owner: Candidates, best: Layout, near: Iterable[Near]) -> Iterator[Near]:
    """Yield the optimum's layout under other timetables, then those near it, each once."""
    seen = {(id(owner), best)}
    others = [
        (owner, replace(best, schedule=name, virtual_stages=virtual))
        for name, virtual in timetables(
            owner.model,
            best.pipeline,
            best.micro_batches,
            owner.pins,
            space=owner.request.space,
        )
    ]
    for candidates, layout in itertools.chain(others, near):
        same = layout if candidates.pins.order else canonical(candidates.cluster, layout)
        if (id(candidates), same) not in seen and candidates.refusal(same) is None:
            seen.add((id(candidates), same))
            yield candidates, same


def simulated(order: list[Solved], closed_form: Ranked) -> Simulated:
    """Return what the simulator says of the finalists, and what is proven of the first."""
    candidates, chosen = order[0]
    bound_s = simulated_bound_s(candidates, chosen.plan.layout)
    recompute = [_recompute(own) for own, _ in order]
    return told([one for _, one in order], closed_form, bound_s, recompute)


def told(
    order: Sequence[Ranked],
    closed_form: Ranked,
    bound_s: float | None = None,
    recompute: Sequence[str] = (),
) -> Simulated:
    """Say which finalist is the fastest; no split of its layout takes less than `bound_s`.

    `recompute` says of each what its blocks do, where all must do the same.
    """
    chosen = order[0]
    step_s = chosen.prediction.step_time_s
    named = f"the optimum of the closed form, {closed_form.prediction.layout}"
    if chosen is closed_form:
        verdict = f"{named}, is the fastest of {len(order)} simulated"
    else:
        verdict = (
            f"{named}, takes {closed_form.prediction.step_time_s:.6g} s simulated; of {len(order)} "
            f"finalists {chosen.prediction.layout} is the fastest with {step_s:.6g} s"
        )
    return Simulated(
        statement=verdict,
        layout=chosen.prediction.layout,
        step_time_s=step_s,
        lower_bound_s=bound_s,
        bound=(
            f"no split of {chosen.prediction.layout} is faster (Phi of 1F1B, memory as in the "
            "closed form)"
            if bound_s is not None
            else f"none is known for {chosen.plan.schedule} on "
            f"{sum(len(stage.layers) for stage in chosen.plan.stages)} layers"
        ),
        margin=MARGIN,
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


def simulated_bound_s(candidates: Candidates, layout: Layout) -> float | None:
    """Seconds that no split of a layout beats in the simulator; None if Φ is not of its schedule.

    `planner.solver.phi.balanced_s` of the least Σ_s t_s that fits; transfers, which the closed form
    charges to stages, count as latency there.  The rank of the first stage ends last, and reduces
    and updates at least its first layer.
    """
    phi = schedule_of(layout.schedule).phi_bound
    if not phi or len(candidates.model.chain) > MOST_BOUNDED:
        return None
    costs, instance = candidates.costs(layout), candidates.instance(layout)
    least = solve_exactly(
        replace(
            instance,
            steady=0.0,
            kinds=tuple(
                tuple(replace(option, sync_s=0.0) for option in table) for table in instance.kinds
            ),
        )
    )
    if not isinstance(least, Solution):
        return None
    transfers_s = 2 * (layout.pipeline - 1) * costs.transfer_s
    pipeline_s = balanced_s(
        least.objective_s - transfers_s,
        stages=layout.pipeline,
        micro_batches=layout.micro_batches,
        transfer_s=costs.transfer_s,
    )
    held = instance.layers if layout.pipeline == 1 else instance.layers[:1]
    sync_s = sum(min(option.sync_s for option in instance.kinds[kind]) for kind in held)
    return pipeline_s + sync_s + costs.step_s
