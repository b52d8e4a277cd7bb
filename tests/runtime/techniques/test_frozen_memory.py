"""Frozen weights are on a rank once, in the type that they are computed in, as is predicted."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.costs.lora import adapter_parameters
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Lora
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.launch.training_loop import token_engine
from tests.planner.costs.test_predict_peaks import cluster
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

ADAPTERS = Lora(rank=2, targets=("query", "value"))


def wide() -> ModelGraph:
    """Return a model whose weights outweigh all else that a step of a few tokens makes."""
    figures = Architecture(
        family="reference",
        hidden_size=256,
        layers=3,
        heads=8,
        kv_heads=8,
        head_dim=32,
        ffn_size=1024,
        vocab_size=512,
        gated_mlp=True,
        max_positions=64,
    )
    return graph_of(figures, name="wide")


def plan(model: ModelGraph, lora: Lora = ADAPTERS, **layout: Any) -> Plan:
    made = cases.plan(model, **{"global_batch": 2, "micro_batches": 1, **layout})
    training = made.training.model_copy(update={"lora": lora})
    return made.model_copy(update={"training": training})


class HeldBytes(NamedTuple):
    """Bytes on a rank."""

    frozen: int
    """Of the storages of frozen weights."""
    between_steps: int
    peak: int
    trained: int
    """Of adapters, in fp32."""


def held_bytes(plans: list[Plan], model: ModelGraph) -> list[HeldBytes]:
    return [_held_bytes(one, model) for one in plans]


def _held_bytes(one: Plan, model: ModelGraph) -> HeldBytes:
    with LiveMemory() as live:
        engine = token_engine(one, model, device=torch.device("cpu"))
        tokens = torch.zeros(one.micro_batch * one.micro_batches, one.seq_len + 1).long()
        engine.step(tokens)
        gc.collect()
        live.reset_peak()
        engine.step(tokens)
        gc.collect()
        between = live.current_bytes
    named = engine._parts[0].module.parameters()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in named if not p.requires_grad]
    frozen = sum(
        {w.untyped_storage()._cdata: w.untyped_storage().nbytes() for w in weights}.values()
    )
    trained = sum(slot.local.nbytes for slot in engine._optimizers.slots)
    return HeldBytes(frozen, between, live.peak_bytes, trained)


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"data_replicate": 2},
    "replicas, fp16": {"data_replicate": 2, "precision": "fp16"},
    "replicas, fp32": {"data_replicate": 2, "precision": "fp32"},
    "zero 1": {"data_shard": 2, "zero": 1},
    "zero 1, fp32": {"data_shard": 2, "zero": 1, "precision": "fp32"},
    "zero 2": {"data_shard": 2, "zero": 2},
    "zero 3": {"data_shard": 2, "zero": 3},
}
ALONE: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {"precision": "fp16"}}
FEW = {name: LAYOUTS[name] for name in ("replicas", "zero 1, fp32", "zero 3")}
"""Whole weights in 16 and 32 bits, and divided ones."""


@pytest.mark.ranks
@pytest.mark.long("alone", "two")
@pytest.mark.parametrize(
    ("ranks", "layouts"), [(1, ALONE), (2, LAYOUTS), (2, FEW)], ids=["alone", "two", "few"]
)
def test_frozen_weights_are_held_once(ranks: int, layouts: dict[str, dict[str, Any]]) -> None:
    model = wide()
    plans = [plan(model, **{"precision": "bf16", **layout}) for layout in layouts.values()]
    adapters = sum(adapter_parameters(model, layer.kind, ADAPTERS) for _, layer in model.chain)

    (held, *_) = on_ranks(ranks, held_bytes, plans, model)

    for name, one, found in zip(layouts, plans, held, strict=True):
        each, among = (4 if one.precision == "fp32" else 2), (2 if one.zero == 3 else 1)
        whole = each * sum(layer.parameters for _, layer in model.chain)
        assert found.frozen == pytest.approx(whole / among, rel=0.001), name
        # Of adapters a master, moments, a gradient and a copy at most.
        assert found.between_steps <= 1.01 * found.frozen + 20 * adapters, name
        [stage] = predict(one, model, cluster()).stages
        assert stage.peak_memory_bytes == pytest.approx(found.peak, rel=0.03), name


TARGETS = {"every product": ("all-linear",), "attention": ("q_proj", "v_proj")}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "targets", ["every product", pytest.param("attention", marks=pytest.mark.matrix)]
)
def test_what_has_no_gradient_keeps_no_input(targets: str) -> None:
    """Products without adapters keep nothing, nor do frozen norms for their weights."""
    figures = {"heads": 8, "kv_heads": 4, "head_dim": 16, "vocab_size": 256, "max_positions": 512}
    model = cases.transformer("llama", hidden_size=128, ffn_size=384, layers=2, **figures)
    lora = Lora(rank=2, targets=TARGETS[targets])
    one = plan(model, lora, precision="bf16", global_batch=4)
    one = one.model_copy(update={"seq_len": 256})

    ((held,),) = on_ranks(1, held_bytes, [one], model)

    [stage] = predict(one, model, cluster()).stages
    assert stage.memory_parts["activations"] > 0.5 * held.peak
    assert stage.peak_memory_bytes == pytest.approx(held.peak, rel=0.02)
