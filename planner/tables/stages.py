"""Stages of a set-up run: which blocks lie where by its stack's rule, and what each recomputes.

Frameworks recompute blocks, not embeddings and heads.  Where a stack's selective recompute is of
blocks, and where half of a model is recomputed (`partial`), every second block is recomputed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from planner.plan import Layout
from planner.predict import Placement
from planner.profile import Recompute
from planner.setup import Setup
from planner.stage_rules import by_products, ends_of


def placements(setup: Setup, layout: Layout) -> list[Placement]:
    """[stage] Layer kinds with their choices, of the stages that a layout has.

    Blocks that do not divide evenly go to the first stages; a stage may have none.
    """
    model, stack = setup.request.model, setup.request.stack
    before, blocks, _ = ends_of(model)
    a = model.architecture
    if stack.pipeline.stages == "by_products" and layout.virtual_stages == 1 and a is not None:
        sizes: Sequence[int] = by_products(a, layout.pipeline)
    else:
        each, more = divmod(blocks, layout.stages)
        sizes = [each + (stage < more) for stage in range(layout.stages)]
    kinds = model.chain_kinds
    chosen = [
        (kind, _recompute(setup, at - before) if before <= at < before + blocks else "none")
        for at, kind in enumerate(kinds)
    ]
    ends = [before]
    for size in sizes:
        ends.append(ends[-1] + size)
    ends[0], ends[-1] = 0, len(kinds)
    return [
        tuple(
            (kind, recompute, setup.activations if before <= at < before + blocks else "keep")
            for at, (kind, recompute) in enumerate(chosen)
            if first <= at < end
        )
        for first, end in pairwise(ends)
    ]


def _recompute(setup: Setup, block: int) -> Recompute:
    """Return what a block recomputes."""
    kernels, rule = setup.request.stack.kernels, setup.request.stack.recompute
    match setup.recompute:
        case None | "none":
            return "none"
        case "full":
            return "full"
        case "selective" if rule.selective == "attention" and kernels.flash_attention:
            return "none"  # scores that are never stored need no second forward
        case "selective" if rule.selective != "blocks":
            return "selective"
        case _:
            return "full" if block % 2 == 0 else "none"


def runnable(setup: Setup) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout with a schedule that can be listed, and what had to be assumed for it."""
    layout = setup.layout
    ranks, count = layout.pipeline, layout.micro_batches
    if layout.virtual_stages == 1 or count % ranks == 0:
        return layout, ()
    whole = -(-count // ranks) * ranks
    return (
        replace(layout, micro_batches=whole),
        (f"{whole} micro-batches where interleaved stages have {count}",),
    )
