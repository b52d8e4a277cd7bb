"""Forty plans of many kinds: models, meshes, schedules, sharding, recomputation, frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Training
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search


class Case(NamedTuple):
    """What is planned: a model for a cluster, by a framework, with choices made."""

    model: str
    cluster: str
    framework: str = "native"
    fix: str = ""
    allow: str = ""
    precision: str | None = None
    global_batch: int = 64
    training: tuple[str, ...] = ()


FRAMEWORKS = (
    "megatron",
    "torchtitan",
    "deepspeed",
    "nanotron",
    "fsdp",
    "accelerate",
    "transformers",
)
_COSINE = ("warmup_steps=10", "rate_schedule=cosine", "rate_steps=500", "floor=0.1")
_WSD = ("warmup_steps=5", "rate_schedule=wsd", "rate_steps=400", "decay_steps=100")
_LINEAR = ("rate_schedule=linear", "rate_steps=300")
CASES = (
    # Nothing chosen: what each framework is given by default.
    *(Case("llama-3.1-8b", "8xh100-sxm-80gb", framework) for framework in FRAMEWORKS),
    *(
        Case("llama-3.1-70b", "4x8xh100-sxm-80gb", framework, global_batch=256)
        for framework in FRAMEWORKS[:4]
    ),
    Case("mixtral-8x7b", "2x8xh100-sxm-80gb", "megatron"),
    Case("mixtral-8x7b", "2x8xh100-sxm-80gb", "torchtitan"),
    Case("gpt2", "8xa100-sxm-80gb", "native", training=_COSINE),
    # Meshes and schedules.
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="tp=2,pp=2,dp=2,zero=1,schedule=1f1b"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="pp=2,dp=4,zero=2,schedule=gpipe,recompute=full"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "torchtitan", "pp=2,dp=4,zero=3,schedule=interleaved"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "torchtitan", "pp=2,schedule=zbv,recompute=none"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "torchtitan", "pp=2,schedule=interleaved-zb"),
    Case("llama-3.1-8b", "2x8xh100-sxm-80gb", "torchtitan", "tp=4,cp=2,zero=3"),
    Case("llama-3.1-8b", "2x8xh100-sxm-80gb", "megatron", "tp=2,cp=2,pp=2", training=_WSD),
    Case("llama-3.1-8b", "2x8xh100-sxm-80gb", "megatron", "pp=4,schedule=interleaved"),
    Case("llama-3.1-8b", "2x8xh100-sxm-80gb", "megatron", "tp=8,zero=0"),
    Case("llama-3.1-8b", "2x8xh100-sxm-80gb", "accelerate", "tp=2,zero=3"),
    Case("qwen3-32b", "4x8xh100-sxm-80gb", "megatron", "tp=8,pp=4,recompute=full"),
    # Sharding, replicas, offload, recomputation.
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="dp=8,zero=0,recompute=none", training=_LINEAR),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="dp=8,zero=1,recompute=none", training=_WSD),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="dp=8,zero=2,recompute=full", training=_COSINE),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="dp=8,zero=3,recompute=none", training=_COSINE),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="dp=8,zero=3,shard=4,recompute=none"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "torchtitan", "zero=3,recompute=selective"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "deepspeed", "zero=3,offload=parameters", "offload"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "deepspeed", "zero=2,offload=optimizer", "offload"),
    Case("llama-3.2-1b", "8xa100-sxm-80gb", "fsdp", "zero=3,offload=parameters", "offload"),
    # Number formats and experts.
    Case("llama-3.1-8b", "8xh100-sxm-80gb", "megatron", precision="fp8"),
    Case("llama-3.1-8b", "8xh100-sxm-80gb", "torchtitan", precision="fp8"),
    Case("gpt2-xl", "8xv100-sxm-32gb", "deepspeed", "zero=1", precision="fp16", training=_LINEAR),
    Case("mixtral-8x7b", "2x8xh100-sxm-80gb", "megatron", "ep=8,pp=2,tp=1,schedule=1f1b"),
    Case("deepseek-v2-lite", "2x8xh100-sxm-80gb", "torchtitan", "ep=8"),
    # What none but our runtime does.
    Case("llama-3.2-1b", "8xa100-sxm-80gb", fix="pp=4,schedule=zb-h1"),
)


def planned() -> Iterator[tuple[Case, Plan, ModelGraph]]:
    """Yield every case with its plan and its model."""
    for case in CASES:
        model, cluster = resolve_model(case.model), resolve_cluster(case.cluster)
        request = Request.create(
            model,
            cluster,
            seq_len=min(4096, model.architecture.max_positions if model.architecture else 4096),
            global_batch=case.global_batch,
            precision=cluster.precision_for(case.precision),  # type: ignore[arg-type]
            pins=read_pins([case.fix] if case.fix else [], [case.allow] if case.allow else []),
            framework=case.framework,
            called=case.cluster,
        )
        plan = search(request).plan
        changed = Training().with_settings(case.training)
        yield case, plan.model_copy(update={"training": changed}), model
