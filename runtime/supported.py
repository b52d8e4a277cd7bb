"""What the engine can execute.  It is asked before a run starts, so nothing here imports torch.

A combination stands here as possible only after it has trained like one process in
tests/runtime/test_equality.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.model import Architecture, ModelGraph
from planner.plan import Plan
from planner.schedule import rank_of_stage

LIBRARY_FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families of transformers that runtime/huggingface.py runs."""
UNDIVIDED = ("gpt2",)
"""Those among them that tensor parallelism does not divide: their weights are transposed."""


def supported(plan: Plan, model: ModelGraph) -> str | None:
    """Return why this plan cannot be executed for this model, or None if it can."""
    return next(_obstacles(plan, model), None)


def is_factory(source: str) -> bool:
    """Tell whether a model's source has the form `file.py:factory`."""
    return re.fullmatch(r".+\.py:\w+", source) is not None


def _obstacles(plan: Plan, model: ModelGraph) -> Iterator[str]:
    mesh, architecture = plan.mesh, model.architecture
    if plan.precision not in ("fp32", "tf32", "bf16"):
        yield f"precision: {plan.precision} cannot be trained here; use bf16, tf32 or fp32"
    if mesh.context > 1:
        yield f"mesh.context: is {mesh.context}; context parallelism cannot be executed; use 1"
    if mesh.expert > 1:
        yield f"mesh.expert: is {mesh.expert}; expert parallelism cannot be executed; use 1"
    yield from _saving_obstacles(plan)
    if plan.schedule == "pipedream-2bw":
        yield (
            "schedule: pipedream-2bw trains with gradients of weights one step old, which is not "
            "the training of one process; use 1f1b or zb-h1"
        )
    if architecture is not None and architecture.tied_embeddings and mesh.pipeline > 1:
        ranks = rank_of_stage(
            plan.schedule, stages=len(plan.stages), virtual_stages=plan.virtual_stages
        )
        if ranks[0] == ranks[-1]:
            yield (
                f"schedule: {plan.schedule} puts both ends of the model on one rank, as two copies "
                "of the tied embedding; use a schedule with one stage per rank, or interleaved"
            )
    if model.edges:
        yield "model.edges: the graph is not a chain; only chains of layers can be executed"
    if is_factory(plan.model.source):
        if mesh.tensor > 1:
            yield "mesh.tensor: a user's own modules cannot be divided by tensor parallelism; use 1"
        return
    if architecture is None:
        yield f"model: {model.name} has no architecture and its source is no file.py:factory"
        return
    yield from _family_obstacles(plan, architecture)
    if mesh.tensor > 1:
        yield from _tensor_obstacles(plan, architecture)


def _saving_obstacles(plan: Plan) -> Iterator[str]:
    if plan.offload != "none":
        yield f"offload: {plan.offload} cannot be executed; use none"
    if plan.gradient_wire != "full":
        yield f"gradient_wire: {plan.gradient_wire} cannot be executed; use full"
    for index, stage in enumerate(plan.stages):
        for item in stage.layers:
            if item.activations != "keep":
                yield (
                    f"stages[{index}].layers: {item.layer} asks to {item.activations} activations, "
                    "which cannot be executed; use keep"
                )


def _family_obstacles(plan: Plan, a: Architecture) -> Iterator[str]:
    if a.family == "reference":
        lack = _lack_of_reference(a)
        if lack:
            yield f"model.architecture: the reference transformer has no {lack}"
    elif a.family not in LIBRARY_FAMILIES:
        yield (
            f"model.architecture.family: no adapter runs '{a.family}'; known: reference, "
            f"{', '.join(LIBRARY_FAMILIES)}, or your own file.py:factory"
        )
    if a.positions == "learned" and plan.seq_len > a.max_positions:
        yield f"seq_len: is {plan.seq_len}; the model has {a.max_positions} learned positions"


def _tensor_obstacles(plan: Plan, a: Architecture) -> Iterator[str]:
    degree = plan.mesh.tensor
    if a.family in UNDIVIDED:
        yield f"mesh.tensor: tensor parallelism does not divide the family {a.family}; use 1"
    figures = {
        "seq_len": plan.seq_len,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "ffn_size": a.ffn_size,
        "vocab_size": a.vocab_size,
    }
    if a.experts is not None:
        figures["experts.ffn_size"] = a.experts.ffn_size
    for name, figure in figures.items():
        if figure % degree:
            yield f"mesh.tensor: {degree} does not divide {name} {figure}"


def _lack_of_reference(a: Architecture) -> str | None:
    """Return the first thing that these figures ask for and the reference does not have."""
    lacks = {
        "layer norm": a.norm != "rms",
        "plain MLP": not a.gated_mlp,
        "positions other than rotary": a.positions != "rotary",
        "query/key norms": a.qk_norm,
        "norms behind attention and MLP": a.post_norms or not a.pre_norm,
        "sliding window": a.sliding_window > 0,
        "bidirectional attention": not a.causal,
        "experts": a.experts is not None,
        "latent attention": a.latent is not None,
        "image patches": a.patches is not None,
        "classification head": a.classes > 0 or a.head_transform,
        "separate embedding width": a.embedding_size not in (0, a.hidden_size),
        "token types": a.token_types > 0,
    }
    return next((name for name, lacking in lacks.items() if lacking), None)
