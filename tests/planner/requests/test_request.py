"""A request has every default, and all commands ask by it."""

from __future__ import annotations

import pytest

from meshwright.api import commands
from meshwright.planner.documents.plan import Plan
from meshwright.planner.whatif.run_study import run
from meshwright.planner.whatif.study import Offer, Study, Work


@pytest.mark.parametrize(
    ("model", "cluster"), [("gpt2", "4xa100-sxm-80gb"), ("llama-3.2-1b", "3x4xh100-sxm-80gb")]
)
@pytest.mark.long("gpt2-4xa100-sxm-80gb")
def test_plan_and_whatif_without_flags_ask_for_the_same_job(model: str, cluster: str) -> None:
    fixed = ("tp=1", "pp=1", "micro_batch=1")
    planned = commands.plan(model, cluster, fix=fixed)
    study = Study(
        name="same",
        models=(model,),
        work=Work(framework="native"),  # as `plan` has it
        offers=(Offer(cluster=cluster, fix=fixed),),
    )

    [outcome] = run(study).outcomes

    assert isinstance(planned.plan, Plan)
    assert outcome.plan is not None
    assert outcome.plan.job == planned.plan.job
    assert outcome.plan == planned.plan
