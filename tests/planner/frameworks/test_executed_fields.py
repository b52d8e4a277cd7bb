"""Every field of a layout is executed or refused by name, by both engines and by the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from meshwright.planner.documents.model import Layer, ModelGraph
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Compile,
    Dispatch,
    GradientCompression,
    Graphs,
    Job,
    Layout,
    Offload,
    Prefetch,
    Scales,
    TensorOverlap,
    WeightGatherDtype,
)
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.frameworks.native_limits import (
    LAUNCH,
    SCRIPT,
    Claim,
    obstacle,
    unexecuted_fields,
)
from meshwright.planner.schedules import SCHEDULES

ENGINES = pytest.mark.parametrize("claims", [LAUNCH, SCRIPT], ids=["launch", "script"])
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "pipeline",
            "data_replicate",
            "data_shard",
            "context",
            "expert",
            "tensor",
            "reshard_after_forward",
        ),
        (2,),
    ),
    **dict.fromkeys(("micro_batch", "micro_batches", "virtual_stages", "expert_tensor"), (2,)),
    "zero": (1, 2, 3),
    "schedule": tuple(SCHEDULES),
    "order": (INSIDE_OUT[::-1],),
    "offload": get_args(Offload),
    "gradient_compression": get_args(GradientCompression),
    "prefetch": get_args(Prefetch),
    "scales": get_args(Scales),
    "weight_gather_dtype": get_args(WeightGatherDtype),
    "dispatch": get_args(Dispatch),
    "hierarchical_all_to_all": (2,),
    "loss": (ChunkedLoss(), ChunkedLoss(rows=8)),
    "compile": get_args(Compile),
    "tensor_overlap": get_args(TensorOverlap),
    "graphs": get_args(Graphs),
    "sequence_parallel": (False,),
}
EXECUTED_OF_SCRIPTS = {
    *("pipeline", "data_replicate", "data_shard", "tensor", "zero", "order", "virtual_stages"),
    *(
        "micro_batch",
        "micro_batches",
        "offload",
        "gradient_compression",
        "prefetch",
        "reshard_after_forward",
    ),
    *(
        "scales",
        "weight_gather_dtype",
        "schedule",
        "context",
        "expert",
        "dispatch",
        "hierarchical_all_to_all",
        "loss",
    ),
    "compile",
}
"""What runtime/script_*.py reads of a plan, by hand."""
OWN = ModelGraph(
    name="own", source="script:build", layers=(Layer(name="a", kind="own", parameters=8),)
)


@ENGINES
def test_every_field_of_a_layout_has_a_claim(claims: Mapping[str, Claim]) -> None:
    names = {field.name for field in fields(Layout)}

    assert set(claims) == names
    assert set(VALUES) == names


@ENGINES
@pytest.mark.parametrize("name", VALUES)
def test_a_field_that_loses_its_claim_is_refused_by_name(
    claims: Mapping[str, Claim], name: str
) -> None:
    without = {other: claim for other, claim in claims.items() if other != name}
    layout = Layout(pipeline=2, tensor=2)
    value = next(v for v in (*VALUES[name], 4) if v != getattr(layout, name))
    changed = replace(layout, **{name: value})

    assert any(place.endswith(name) for place, _ in unexecuted_fields(without, changed))


@ENGINES
def test_a_plain_layout_is_executed(claims: Mapping[str, Claim]) -> None:
    assert list(unexecuted_fields(claims, Layout())) == []


@pytest.mark.parametrize("name", sorted(set(VALUES) - EXECUTED_OF_SCRIPTS))
def test_values_that_a_script_does_not_execute_are_refused_by_name_in_a_search(name: str) -> None:
    job = Job(seq_len=1, global_batch=16, precision="fp32")
    plain = Layout(pipeline=2, tensor=2)
    values = [v for v in VALUES[name] if v != getattr(plain, name)]
    for value in values:
        found = list(unexecuted_fields(SCRIPT, replace(plain, **{name: value})))
        ((place, text),) = found
        assert place.rpartition(".")[2] == name
        assert str(obstacle(OWN, job, replace(plain, **{name: value}))) == f"{place}: {text}"
