"""A solved configuration as a plan with its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.costs.predict import placement_prediction, placements_of
from meshwright.planner.search.partition.layout_partition import plan_of
from meshwright.planner.search.proof_account import of_plan

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import CostTables
    from meshwright.planner.costs.stage_placement import StagePlacements
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout, Plan
    from meshwright.planner.documents.prediction import Certificate, Prediction
    from meshwright.planner.search.bounds.layout_bounds import Candidates
    from meshwright.planner.solver.partition_problem import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A plan, its objective in the closed form, and what it should do."""

    plan: Plan
    objective_s: float
    prediction: Prediction


def proven(certificate: Certificate, chosen: Ranked) -> Certificate:
    """Return a search's certificate with what it proves of the plan that was chosen."""
    return of_plan(
        certificate,
        layout=chosen.plan.layout,
        step_s=chosen.prediction.step_time_s,
        framework=chosen.plan.framework,
    )


def candidate_of(candidates: Candidates, layout: Layout, solution: Solution) -> Ranked:
    """Return the plan of a solved configuration, and what it should do."""
    costs = candidates.costs(layout)
    plan = plan_of(candidates.request, layout, costs, solution, candidates.recompute)
    objective_s = solution.objective_s + costs.step_s
    return predict_candidate(plan, objective_s, candidates.model, candidates.tables)


def predict_candidate(
    plan: Plan,
    objective_s: float,
    model: ModelGraph,
    tables: CostTables,
    seats: StagePlacements | None = None,
) -> Ranked:
    """Return a plan with what it should do; without `seats` its stages sit alike."""
    placements = placements_of(plan, model)
    prediction = placement_prediction(tables, plan.layout, placements, seats)
    return Ranked(
        plan=plan,
        objective_s=objective_s,
        prediction=prediction.model_copy(update={"plan_digest": plan.digest}),
    )
