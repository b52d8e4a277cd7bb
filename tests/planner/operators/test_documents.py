"""Attention of samples that hold several documents costs the squares of their lengths."""

from __future__ import annotations

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Job, Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

MODEL, CLUSTER = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
PINS = {"tensor": 1, "pipeline": 1, "zero": 3, "micro_batch": 1, "recompute": "full"}


def planned(document_len: int | None, **pins: int | str) -> tuple[Plan, Prediction]:
    job = Job(seq_len=16384, global_batch=8, document_len=document_len)
    request = Request(MODEL, CLUSTER, job, pins=Pins(**{**PINS, **pins}))  # type: ignore[arg-type]
    found = search(request)
    return found.plan, found.prediction


def test_a_document_as_long_as_its_sample_is_a_sample() -> None:
    _, whole = planned(None, data=8)
    plan, one = planned(16384, data=8)

    assert one.step_time_s == whole.step_time_s
    assert plan.document_len == plan.job.document_len == 16384


@pytest.mark.matrix
def test_half_as_long_documents_halve_the_seconds_of_attention() -> None:
    steps = [planned(length, data=8)[1].step_time_s for length in (16384, 8192, 4096)]

    assert steps[0] - steps[1] == pytest.approx(2 * (steps[1] - steps[2]), rel=1e-6)
    # Of 16,384 tokens by hand: 32 layers of 4 x 4096 x s^2 / 2 FLOPs, forward, 2.5 times backward,
    # and again in recomputation; half of it is saved, at 0.35 to 0.75 of 989 TFLOP/s.
    saved = 32 * 2 * 4096 * 16384**2 * (1 + 1 + 2.5) / 2 / 989e12
    assert saved / 0.75 < steps[0] - steps[1] < saved / 0.35


def test_divided_sequences_hide_other_documents_by_a_mask() -> None:
    plan, short = planned(2048, context=2, data=4)
    whole = predict(plan.model_copy(update={"document_len": None}), MODEL, CLUSTER)

    assert short.step_time_s > whole.step_time_s


def test_a_document_is_no_longer_than_its_sample() -> None:
    with pytest.raises(DocumentError, match="document-len: is 4097"):
        Job(seq_len=4096, global_batch=8, document_len=4097)
