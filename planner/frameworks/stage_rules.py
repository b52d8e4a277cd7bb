"""Rules of frameworks for the number of a model's blocks in each stage of a pipeline.

    any             whatever a plan says
    even            equal counts
    even_but_ends   equal counts on all stages but the first and the last; where ranks have several
                    stages, the embedding and the head may each count as a block there
    by_products     as nanotron fills stages: by products, the output projection counted

Embeddings and what precedes the first block lie on the first stage, heads on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from meshwright.planner.architectures.architecture import block_kinds
from meshwright.planner.documents.framework_space import StageRule
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.tolerances import SLACK

Rows = tuple[tuple[tuple[int, int], ...], ...]
"""Each the fewest and the most layers [rank], of which a split keeps one; empty: any will do."""


def rows(rule: StageRule, model: ModelGraph, *, ranks: int, virtual_stages: int) -> Rows | None:
    """Return the layers that ranks may hold; None if the rule has no split of the model.

    Ranks of several stages have equal ones, under any rule but `any`; under `even_but_ends` the
    first or the last or both have a block less.  Source: Megatron-LM, get_num_layers_to_build with
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split.
    """
    if rule == "any" or ranks == 1:
        return ()
    before, blocks, behind = ends_of(model)
    if virtual_stages > 1:
        # Blocks that differ are told apart by their place, which ranks of several stages share.
        if len(set(model.chain_kinds[before : before + blocks])) > 1:
            return None
        lighter = ((0, 0), (1, 0), (0, 1), (1, 1)) if rule == "even_but_ends" else ((0, 0),)
        reasons = []
        for front, back in lighter:
            each, left = divmod(blocks + front + back, ranks)
            if not left and each % virtual_stages == 0:
                sizes = [each - front, *[each] * (ranks - 2), each - back]
                reasons.append(_fixed_bounds(sizes, before, behind))
        return tuple(reasons) or None
    match rule:
        case "even":
            each, left = divmod(blocks, ranks)
            return None if left else (_fixed_bounds([each] * ranks, before, behind),)
        case "even_but_ends":
            most = (blocks - 2) // (ranks - 2) if ranks > 2 else 1
            mean = blocks / ranks
            return (
                tuple(
                    (
                        (before + 1, before + blocks),
                        *[(each, each)] * (ranks - 2),
                        (1 + behind, blocks + behind),
                    )
                    for each in sorted(range(1, most + 1), key=lambda n: abs(n - mean))
                )
                or None
            )
        case "by_products":
            assert model.architecture is not None, "frameworks train language models"
            sizes = by_products(model.architecture, ranks)
            return (_fixed_bounds(sizes, before, behind),) if min(sizes) else None
        case _:
            assert_never(rule)


def block_counts(
    rule: StageRule, model: ModelGraph, *, ranks: int, virtual_stages: int
) -> list[int]:
    """[stage] Blocks of stages as even as a rule lets them be; a stage may have no layer at all.

    Under `even_but_ends` the embedding and the head count as blocks where only that divides the
    blocks among several stages of a rank.  Else blocks that do not divide evenly go to the first
    stages.  Stages that outnumber blocks have the embedding alone, or the head.
    """
    _, blocks, _ = ends_of(model)
    stages = ranks * virtual_stages
    if rule == "by_products" and virtual_stages == 1 and model.architecture is not None:
        sizes = by_products(model.architecture, ranks)
    else:
        front, back = _lighter_ends(rule, blocks, stages=stages, virtual_stages=virtual_stages)
        each, more = divmod(blocks + front + back, stages)
        sizes = [each + (stage < more) for stage in range(stages)]
        sizes[0] -= front
        sizes[-1] -= back
    return sizes


def _lighter_ends(
    rule: StageRule, blocks: int, *, stages: int, virtual_stages: int
) -> tuple[int, int]:
    """Return the blocks that the first and the last stage have less than others."""
    lighter = ((0, 0), (1, 0), (0, 1), (1, 1))
    if stages > blocks:
        return next((ends for ends in lighter if sum(ends) == stages - blocks), (0, 0))
    if rule == "even_but_ends" and virtual_stages > 1:
        return next((ends for ends in lighter if not (blocks + sum(ends)) % stages), (0, 0))
    return 0, 0


def ends_of(model: ModelGraph) -> tuple[int, int, int]:
    """Return the numbers of layers of a chain before its blocks, of blocks, and after them."""
    if model.architecture is None:
        return 0, len(model.chain), 0
    blocks = set(block_kinds(model.architecture))
    kinds = model.chain_kinds
    before = next(at for at, kind in enumerate(kinds) if kind in blocks)
    count = sum(kind in blocks for kind in kinds)
    return before, count, len(kinds) - before - count


def _fixed_bounds(blocks: Sequence[int], before: int, behind: int) -> tuple[tuple[int, int], ...]:
    sizes = list(blocks)
    sizes[0] += before
    sizes[-1] += behind
    return tuple((size, size) for size in sizes)


def by_products(a: Architecture, stages: int) -> list[int]:
    """Return blocks per stage as nanotron divides them.

    Blocks and the output projection count by their products, the embedding nothing; a stage is full
    once the running sum passes its share.  Source: nanotron, get_block_compute_costs and
    init_on_device_and_dtype (parallel/pipeline_parallel).
    """
    gates = 3 if a.gated_mlp else 2
    block_cost = 4 * a.heads * a.head_dim * a.hidden_size + gates * a.ffn_size * a.hidden_size
    total = a.layers * block_cost + a.vocab_size * a.hidden_size
    sizes, stage, sums = [0] * stages, 0, 0.0
    for _ in range(a.layers):
        sums += block_cost
        sizes[stage] += 1
        if stage < stages - 1 and sums >= total * (stage + 1) / stages * (1 - SLACK):
            stage += 1
    return sizes
