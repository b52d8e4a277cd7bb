"""A plan that may not fit meets no goal: each probability contains that it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.plan_options import PlanOptions
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.planning import Planned, plan_candidate, request_of
from meshwright.planner.whatif.ranking import rank_outcomes, sure
from tests.planner.whatif.test_study import study


def planned(asked: Any, fits: float) -> Planned:
    """Return the plan of the first candidate, as if it fitted with another probability."""
    plan = plan_candidate(asked, "gpt2", candidates_of(asked)[0])
    assert plan.prediction is not None
    return replace(plan, prediction=plan.prediction.model_copy(update={"fit_probability": fits}))


def test_goals_are_met_in_futures_in_which_the_plan_fits() -> None:
    """Of the futures in which a sure plan keeps a limit, one that may not fit keeps its share."""
    plain = study()
    [candidate, *_] = candidates_of(plain)
    middle = evaluate(plain, "gpt2", candidate)
    assert middle.hours is not None and middle.usd is not None
    limits = {"deadline_days": middle.hours.value / 24, "budget_usd": middle.usd.value}
    asked = study(goal={"tokens": 1e9, **limits})
    [candidate, *_] = candidates_of(asked)
    sure_plan = evaluate(asked, "gpt2", candidate, planned(asked, 1.0))

    unsure = evaluate(asked, "gpt2", candidate, planned(asked, 0.55))

    for limit in ("deadline", "budget"):
        # The range of time reaches further up than down, so that its middle is above the median.
        assert 0.4 < sure_plan.chances[limit] <= 0.5
        assert unsure.chances[limit] == pytest.approx(0.55 * sure_plan.chances[limit], abs=0.02)
    assert unsure.chance == min(unsure.chances.values())


def test_a_plan_that_hardly_fits_ranks_behind_one_that_does() -> None:
    """It is faster and cheaper, there is no deadline, and it is more likely to fit than not."""
    asked = study()
    four, eight = candidates_of(asked)
    unsure = evaluate(asked, "gpt2", four, planned(asked, 0.55))
    fitting = evaluate(asked, "gpt2", eight, planned(asked, 0.97))
    assert unsure.usd is not None and fitting.usd is not None
    assert unsure.usd.value < fitting.usd.value

    ranks = rank_outcomes(asked, [unsure, fitting])

    assert [rank.outcome.candidate for rank in ranks] == [fitting.candidate, unsure.candidate]
    assert [sure(asked, each) for each in (fitting, unsure)] == [True, False]
    for rank in ranks:
        assert all(chance <= rank.outcome.fit_probability for chance in rank.first.values())


@pytest.mark.parametrize(
    ("work", "confidence", "expected"),
    [({}, 0.8, 0.95), ({}, 0.5, 0.95), ({"fit_probability": 0.5}, 0.8, 0.5), ({}, 0.98, 0.995)],
)
def test_plan_and_whatif_ask_alike_that_plans_fit(
    work: dict[str, float], confidence: float, expected: float
) -> None:
    asked = study(
        work={"seq_len": 1024, "global_batch": 64, "framework": "native", **work},
        goal={"tokens": 1e9, "confidence": confidence},
    )
    [candidate, *_] = candidates_of(asked)
    request = request_of(asked, resolve_model("gpt2"), candidate, "native")
    assert request.fit_probability == pytest.approx(expected)
    assert PlanOptions().fit_probability == 0.95
