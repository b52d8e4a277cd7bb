"""A run's layers on one rank: their work, their parameters, and which stage holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.backends.runs import Run
from planner.backends.states import NOTHING, Parameters, by_kind
from planner.backends.work import Shape, Work, block, embedding, head, rates
from planner.layers.architecture import block_kinds
from planner.stack import Stack
from planner.stage_rules import by_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Everything about a run that neither time nor memory has to work out again."""

    run: Run
    stack: Stack
    shape: Shape
    works: dict[str, Work]
    local: dict[str, Parameters]
    stages: list[list[str]]
    """Layer kinds [stage]."""
    parameters: list[Parameters]
    """[stage]"""


def priced(run: Run, stack: Stack) -> Priced:
    """Return a run's layers by the stack of its framework."""
    shape = _shape(run, stack)
    local = by_kind(run.architecture, run)
    stages = _layers(run, stack)
    return Priced(
        run=run,
        stack=stack,
        shape=shape,
        works=_works(shape),
        local=local,
        stages=stages,
        parameters=[
            _stage_parameters(run, kinds, local, s, len(stages)) for s, kinds in enumerate(stages)
        ],
    )


def _shape(run: Run, stack: Stack) -> Shape:
    return Shape(
        run=run,
        stack=stack,
        rates=rates(run, stack),
        micro_batch=min(run.micro_batch, run.global_batch / run.data),
    )


def _layers(run: Run, stack: Stack) -> list[list[str]]:
    """Return the layer kinds of each stage, all chunks together."""
    kinds = list(block_kinds(run.architecture))
    p, count = run.pipeline, len(kinds)
    if stack.pipeline.stages != "by_products":
        base, more = divmod(count, p)
        sizes = [base + (1 if s < more else 0) for s in range(p)]
    else:
        sizes = by_products(run.architecture, p)
    result, at = [], 0
    for size in sizes:
        result.append(kinds[at : at + size])
        at += size
    result[0].insert(0, "embedding")
    result[-1].append("head")
    return result


def _works(shape: Shape) -> dict[str, Work]:
    a = shape.run.architecture
    result = {"embedding": embedding(shape), "head": head(shape)}
    for kind in set(block_kinds(a)):
        result[kind] = block(shape, moe=kind == "moe_block")
    return result


def _stage_parameters(
    run: Run, kinds: Sequence[str], local: dict[str, Parameters], stage: int, stages: int
) -> Parameters:
    total = NOTHING
    for kind in kinds:
        total += local[kind]
    a = run.architecture
    if a.tied_embeddings and stages > 1 and stage == stages - 1:
        total += Parameters(dense=a.vocab_size * a.hidden_size / run.tensor, routed=0.0)
    return total
