"""What plans use is measured first, then the ends of what is interpolated."""

from __future__ import annotations

import doctest

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.units import duration_s
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.profiler import measurement_plan as agenda
from tests.runtime import cases

JOB = Job(seq_len=16, global_batch=16, precision="fp32")
SIZES = [1, 2, 4, 8, 16]


def test_the_settings_of_the_best_plan_come_first_with_value_one() -> None:
    model, machine = cases.transformer(), resolve_cluster("local:2")

    plans = agenda.best_plans(model, machine, JOB)
    wishes = agenda.wishes(plans, divisions=[(1, 1, 1), (2, 1, 1)], micro_batches=SIZES)

    best = search(Request(model, machine, JOB)).plan
    recomputes = {item.recompute for stage in best.stages for item in stage.layers}
    first = [w for w in wishes if w.value == 1.0]
    assert (best.mesh.tensor, best.micro_batch) in {(w.tensor, w.micro_batch) for w in first}
    assert recomputes <= {w.recompute for w in first}
    assert [w.value for w in wishes] == sorted((w.value for w in wishes), reverse=True)
    assert len(wishes) == len(set(wishes)) == 2 * 5 * 3


def test_where_nothing_is_known_the_ends_come_first() -> None:
    wishes = agenda.wishes([], divisions=[(1, 1, 1)], micro_batches=SIZES)

    assert [w.micro_batch for w in wishes if w.recompute == "none"] == [1, 16, 4, 2, 8]


def test_losses_in_chunks_of_good_plans_are_measured_once_each() -> None:
    plain = cases.plan(cases.transformer())
    chunks = ChunkedLoss(rows=8)
    own = plain.model_copy(update={"loss": chunks})
    divided = cases.plan(cases.transformer(), tensor=2).model_copy(update={"loss": chunks})

    found = agenda.head_wishes(
        [(1.0, own), (0.9, plain), (0.8, own), (0.7, divided)], divisions=[(1, 1, 1)]
    )

    wish = agenda.HeadWish(division=(1, 1, 1), micro_batch=own.micro_batch, loss=chunks)
    assert found == [wish]


@pytest.mark.parametrize("text", ["", "0s", "-3", "5 weeks", "min"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="5min"):
        duration_s(text)


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(agenda).failed == 0
