"""Frozen weights under FSDP: a model that is loaded in fp32 has shards in it."""

from __future__ import annotations

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.costs.memory.state_bytes import StateSharding, frozen_states, state_types
from meshwright.planner.documents.framework import Framework


def shard_bytes(framework: Framework, **weights: str) -> float:
    sharding = StateSharding(
        types=state_types(framework, "bf16", **weights),  # type: ignore[arg-type]
        zero=3,
        shard=8,
        data=8,
        pipelined=False,
        accumulated=True,
    )
    return frozen_states(8.0, sharding).resident_bytes


@pytest.mark.parametrize(
    ("framework", "size"),
    [("fsdp", 4.0), ("torchtune", 2.0), ("litgpt", 2.0), ("transformers", 2.0), ("megatron", 2.0)],
)
def test_shards_have_the_type_that_a_model_is_loaded_in(framework: str, size: float) -> None:
    """torch, fully_shard: what is sharded is cast as it is gathered; accelerate widens trained
    parameters alone; the others load bf16."""
    assert shard_bytes(frameworks()[framework]) == size


def test_packed_weights_have_no_masters() -> None:
    scales = 8 * frameworks()["fsdp"].types.scales  # whole on every rank

    assert shard_bytes(frameworks()["fsdp"], weights="nf4") == 0.5 + scales
    assert shard_bytes(native()) == 2.0
