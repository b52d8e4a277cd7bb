"""Spaces of frameworks: conditions read as they are written, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.framework import Framework
from meshwright.planner.documents.framework_space import Facts, Space, condition_of, obstacles
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.errors import DocumentError

MODEL, CLUSTER = resolve_model("mixtral-8x7b"), resolve_cluster("2x8xh100-sxm-80gb")
JOB = Job(seq_len=4096, global_batch=64)


def facts(**layout: Any) -> Facts:
    return Facts(MODEL, CLUSTER, JOB, Layout(**layout))


def refused(space: dict[str, Any], **layout: Any) -> list[str]:
    return list(obstacles(Space(**space), facts(**layout)))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("tensor = 4", True),
        ("tensor x pipeline > 8", False),
        ("2 x tensor x pipeline >= 16", True),
        ("precision = bf16|fp8", True),
        ("precision != bf16", False),
        ("schedule = 1f1b", True),
        ("experts = 8", True),
        ("attention = gqa", True),
        ("adapters = yes", False),
        ("heads <= 31", False),
        ("devices_per_node = 8", True),
        ("zero < 3", True),
    ],
)
def test_conditions_compare_products_of_what_is_known(text: str, holds: bool) -> None:
    assert (
        condition_of(text).is_fulfilled(facts(tensor=4, pipeline=2, data_shard=2, zero=1)) is holds
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensr = 4", "did you mean 'tensor'"),
        ("tensor is 4", "no condition"),
        ("tensor > many", "use a whole number"),
        ("tensor × 2 = 4", "no product"),
        ("", "at least 1 character"),
        ("schedule > 1", "orders words"),
        ("2 x precision = 2", "multiplies a word"),
    ],
)
def test_what_cannot_be_read_is_refused_where_the_framework_is(text: str, message: str) -> None:
    conflict = {"when": [text], "why": "so"}
    with pytest.raises(DocumentError, match=message):
        Framework.of({"format": 1, "name": "x", "summary": "x", "space": {"conflicts": [conflict]}})


@pytest.mark.parametrize(
    ("space", "layout", "message"),
    [
        ({"schedules": ["1f1b"]}, {"pipeline": 2, "schedule": "gpipe"}, "schedule gpipe"),
        ({"zero": [0, 1]}, {"data_shard": 2, "zero": 3}, "ZeRO-3"),
        (
            {"hybrid": False},
            {"data_shard": 2, "data_replicate": 2, "zero": 1},
            "within groups of replicas",
        ),
        ({"tensor": 2}, {"tensor": 4}, "tensor degree 4"),
        ({"within_node": ["tensor"]}, {"tensor": 16}, "tensor degree 16"),
        ({"expert": 1}, {"expert": 2, "tensor": 2}, "expert degree 2"),
        (
            {"virtual_stages": 1},
            {"pipeline": 2, "virtual_stages": 4, "schedule": "interleaved"},
            "4 stages on a rank",
        ),
        ({"offload": ["none"]}, {"offload": "optimizer"}, "optimizer on the host"),
        ({"gradient_compressions": ["full"]}, {"gradient_compression": "bf16"}, "travel as bf16"),
        ({"precisions": ["fp32"]}, {}, "precision bf16"),
        (
            {"axis_order": "fixed"},
            {
                "order": (
                    "pipeline",
                    "tensor",
                    "context",
                    "data_shard",
                    "data_replicate",
                )
            },
            "another order",
        ),
        (
            {"divisible": [{"what": "layers", "by": "pipeline", "why": "stages are equal"}]},
            {"pipeline": 3},
            "pipeline does not divide layers: stages are equal",
        ),
        (
            {"conflicts": [{"when": ["zero > 0"], "needs": ["tensor = 1"], "why": "alone"}]},
            {"tensor": 2, "data_shard": 2, "zero": 1},
            "alone",
        ),
    ],
)
def test_what_a_space_does_not_have_is_named(
    space: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    [said] = refused(space, **layout)

    assert message in said
    assert refused({}, **layout) == []


def test_a_conflict_that_speaks_of_layouts_says_nothing_of_their_degrees() -> None:
    space = Space(
        conflicts=(
            {"when": ["zero = 0"], "why": "a layout's"},  # type: ignore[arg-type]
            {"when": ["tensor > 1"], "why": "the degrees'"},  # type: ignore[arg-type]
        )
    )

    assert list(obstacles(space, facts(tensor=2), of_degrees=True)) == ["the degrees'"]
    assert list(obstacles(space, facts(tensor=2))) == ["a layout's", "the degrees'"]


def test_nanotron_asks_for_as_many_micro_batches_as_pipeline_ranks_less_one() -> None:
    # Its OneForwardOneBackwardPipelineEngine asserts nb_microbatches >= pg.size() - 1.
    dense = facts()._replace(model=resolve_model("llama-2-7b"))
    space = frameworks()["nanotron"].space or Space()

    for micro_batches, refuses in ((2, True), (3, False), (8, False)):
        layout = Layout(pipeline=4, micro_batches=micro_batches)
        found = list(obstacles(space, dense._replace(layout=layout)))
        assert [one for one in found if "asserts" in one] == found
        assert bool(found) is refuses


@pytest.mark.parametrize("what", ["schedule", "tensor x offload", "none of these"])
def test_only_numbers_divide(what: str) -> None:
    rule = {"what": what, "by": "pipeline", "why": "so"}
    with pytest.raises(DocumentError, match=r"divisible\[0\].what"):
        Framework.of({"format": 1, "name": "x", "summary": "x", "space": {"divisible": [rule]}})
