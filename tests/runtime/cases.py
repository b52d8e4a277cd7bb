"""Tiny models and plans of the runtime's tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.planner.architectures.architecture import architecture_of
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.documents.model import Architecture, Experts, ModelGraph
from meshwright.planner.documents.plan import (
    Mesh,
    OtherPipelines,
    PlacedLayer,
    Plan,
    PlannedGroup,
    PlannedModel,
    Share,
    Stage,
    Training,
)
from tests.runtime import families

COVERED = (
    "reference",
    "gemma2",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Families that meet every choice of a plan in a row (tests/runtime/combinations.py).

The others are built of the same parts: tests/runtime/test_families.py has their rows.
"""
MIXED = ("mixtral", "qwen3_moe")
"""Those among them with a mixture of experts."""
SEQ_LEN = 16
GLOBAL_BATCH = 8


def architecture(family: str = "reference", **changes: Any) -> Architecture:
    if family in families.FAMILIES and family not in COVERED:
        return architecture_of(families.FAMILIES[family]().to_dict(), name=family).model_copy(
            update=changes
        )
    figures: dict[str, Any] = {
        "family": family,
        "hidden_size": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 4 if family == "gpt2" else 2,
        "head_dim": 16 if family == "gemma2" else 8,
        "ffn_size": 48,
        "vocab_size": 64,
        "gated_mlp": family != "gpt2",
        "norm": "layer" if family == "gpt2" else "rms",
        "positions": "learned" if family == "gpt2" else "rotary",
        "max_positions": 64,
        "tied_embeddings": family == "gpt2",
        "qkv_bias": family in ("gpt2", "qwen2"),
        "output_bias": family == "gpt2",
        "mlp_bias": family == "gpt2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "post_norms": family == "gemma2",
        "sliding_window": 5 if family == "gemma2" else 0,
        "sliding_every": 2 if family == "gemma2" else 1,
        "experts": Experts(count=4, per_token=2, ffn_size=24) if family in MIXED else None,
    }
    return Architecture(**{**figures, **changes})


def transformer(family: str = "reference", **changes: Any) -> ModelGraph:
    """Return a tiny model whose layers have the parameters that its figures imply."""
    return graph_of(architecture(family, **changes), name=f"tiny-{family}")


def _epsilon(model: ModelGraph) -> float:
    """Return AdamW's: large, or it would blow rounding up to steps of the full learning rate.

    The gradient of a key's bias, say, is zero in theory.  Gemma's norms begin at 0 and are after
    five steps nothing but the updates.
    """
    gemma = model.architecture is not None and model.architecture.family.startswith("gemma")
    return 1e-4 if gemma else 1e-5


def plan(
    model: ModelGraph,
    *,
    cuts: Sequence[int] | None = None,
    zero: int = 0,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    micro_batches: int | None = None,
    global_batch: int = GLOBAL_BATCH,
    recompute: str | Sequence[str] = "none",
    activations: str = "keep",
    offload: str = "none",
    gradient_compression: str = "full",
    scales: str = "tensorwise",
    weight_gather_dtype: str = "full",
    dispatch: str = "alltoall",
    hierarchical_all_to_all: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    clip_norm: float = 1.0,
    source: str | None = None,
    **mesh: Any,
) -> Plan:
    """Return a plan of the standard job.  `cuts` are each stage's numbers of layers.

    Several recompute choices take turns from layer to layer.  A step has two micro-batches, and
    four through a pipeline, unless the caller wants otherwise.
    """
    degrees = Mesh(**mesh)
    names = [name for name, _ in model.chain]
    if cuts is None:
        count = degrees.pipeline * virtual_stages
        least, more = divmod(len(names), count)
        cuts = [least + (stage < more) for stage in range(count)]
    turns = itertools.cycle([recompute] if isinstance(recompute, str) else recompute)
    placed = [
        PlacedLayer(layer=name, recompute=choice, activations=activations)
        for name, choice in zip(names, turns, strict=False)
    ]
    ends = list(itertools.accumulate(cuts))
    stages = [
        Stage(layers=tuple(placed[start:end])) for start, end in zip([0, *ends], ends, strict=False)
    ]
    data = degrees.data_shard * degrees.data_replicate
    micro_batches = micro_batches or (4 if degrees.pipeline > 1 else 2)
    return Plan(
        model=PlannedModel(
            name=model.name, source=source or model.source or model.name, digest=model.digest
        ),
        cluster="test",
        seq_len=SEQ_LEN,
        global_batch=global_batch,
        precision=precision,
        mesh=degrees,
        zero=zero,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch=global_batch // data // micro_batches,
        micro_batches=micro_batches,
        offload=offload,
        gradient_compression=gradient_compression,
        scales=scales,
        weight_gather_dtype=weight_gather_dtype,
        dispatch=dispatch,
        hierarchical_all_to_all=hierarchical_all_to_all,
        training=Training(
            learning_rate=3e-3,
            warmup_steps=2,
            epsilon=_epsilon(model),
            weight_decay=0.1,
            clip_norm=clip_norm,
            seed=seed,
        ),
        stages=tuple(stages),
    )


def shared(plan: Plan, shares: Sequence[int]) -> Plan:
    """Return the plan with these numbers of micro-batches, each rank on devices of its own kind."""
    each = plan.mesh.devices // len(shares)
    names = [f"group{rank}" for rank in range(len(shares))]
    return Plan(
        **{
            **dict(plan),
            "micro_batches": max(shares),
            "groups": tuple(PlannedGroup(name=name, devices=each) for name in names),
            "shares": tuple(
                Share(group=name, micro_batches=count)
                for name, count in zip(names, shares, strict=True)
            ),
        }
    )


def unlike(plan: Plan, *kinds: tuple[int, int, Sequence[int]], recompute: str = "none") -> Plan:
    """Return the plan with pipelines of these kinds beside its own: their number, micro-batches of
    each and numbers of layers of their stages."""
    names = [item.layer for stage in plan.stages for item in stage.layers]
    placed = [PlacedLayer(layer=name, recompute=recompute) for name in names]
    others = []
    for data, micro_batches, cuts in kinds:
        ends = list(itertools.accumulate(cuts))
        parts = [placed[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        stages = tuple(Stage(layers=tuple(part)) for part in parts)
        others.append(OtherPipelines(data=data, micro_batches=micro_batches, stages=stages))
    beside = sum(kind.data * kind.micro_batches for kind in others)
    first = plan.mesh.data_replicate * plan.micro_batches
    return Plan(
        **{
            **dict(plan),
            "global_batch": plan.micro_batch * (first + beside),
            "other_pipelines": tuple(others),
        }
    )


def global_tokens(
    step: int, vocabulary: int = 64, global_batch: int = GLOBAL_BATCH
) -> torch.Tensor:
    """Return the whole batch of a step, [sample, position]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(vocabulary, (global_batch, SEQ_LEN + 1), generator=generator)


def global_starts(step: int, global_batch: int = GLOBAL_BATCH) -> torch.Tensor:
    """Return where the document of each token of a step begins, [sample, position]."""
    generator = torch.Generator().manual_seed(2000 + step)
    first = torch.rand(global_batch, SEQ_LEN, generator=generator) < 0.2
    return (first * torch.arange(SEQ_LEN)).cummax(dim=1).values


def library_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss that a model of transformers computes by itself."""
    targets = tokens[:, 1:].contiguous()
    return model(tokens[:, :-1], labels=targets, shift_labels=targets).loss
