"""A request has every default, and all commands ask by it."""

from __future__ import annotations

import pytest

from meshwright import commands
from planner.catalog.expressions import resolve_cluster, resolve_model
from planner.documents.plan import Plan
from planner.errors import DocumentError
from planner.requests.pins import Pins
from planner.requests.request import Request
from planner.whatif.run import run
from planner.whatif.study import Offer, Study, Work

LLAMA = resolve_model("llama-3.1-8b")


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
        work=Work(backend="native"),  # as `plan` has it
        offers=(Offer(cluster=cluster, fix=fixed),),
    )

    [outcome] = run(study).outcomes

    assert isinstance(planned.plan, Plan)
    assert outcome.plan is not None
    assert outcome.plan.job == planned.plan.job
    assert outcome.plan == planned.plan


def test_a_step_has_4_million_tokens_of_4096_and_a_sample_for_each_device() -> None:
    usual = Request.of(LLAMA, resolve_cluster("8xh100-sxm-80gb")).job
    of_three = Request.of(LLAMA, resolve_cluster("3x8xh100-sxm-80gb")).job
    many = Request.of(LLAMA, resolve_cluster("512x8xh100-sxm-80gb")).job
    short = Request.of(resolve_model("gpt2"), resolve_cluster("8xh100-sxm-80gb")).job

    assert (usual.seq_len, usual.global_batch, usual.precision) == (4096, 1024, "bf16")
    assert of_three.global_batch == 43 * 24
    assert many.global_batch == 4096
    assert (short.seq_len, short.global_batch) == (1024, 4096)


def test_a_part_of_a_cluster_is_asked_under_the_name_of_the_whole() -> None:
    mixed = resolve_cluster("2xa100-sxm-40gb+1xv100-sxm-16gb")
    request = Request.of(LLAMA, mixed, pins=Pins(tensor=1))

    parts = [request.on((group,)) for group in mixed.groups]

    assert [part.cluster.devices for part in parts] == [2, 1]
    assert {part.cluster_name for part in parts} == {mixed.name}
    assert {part.job for part in parts} == {request.job}


def test_an_unknown_stack_is_told_with_the_nearest() -> None:
    with pytest.raises(DocumentError, match="megatron"):
        Request.of(LLAMA, resolve_cluster("8xh100-sxm-80gb"), stack="megatrn")
