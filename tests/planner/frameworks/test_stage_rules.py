"""Rules of stages, against hand counts and the definition of each."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.framework_space import StageRule
from meshwright.planner.frameworks.stage_rules import block_counts, ends_of, rows

SMALL = resolve_model("llama-3.2-1b")
BLOCKS = 16


def splits(ranks: int) -> set[tuple[int, ...]]:
    """Return every way to cut embedding, 16 blocks and a head, none empty."""
    return {
        sizes for sizes in product(range(1, BLOCKS + 3), repeat=ranks) if sum(sizes) == BLOCKS + 2
    }


def allowed(rule: StageRule, ranks: int) -> set[tuple[int, ...]]:
    found = rows(rule, SMALL, ranks=ranks, virtual_stages=1)
    assert found is not None
    return {
        sizes
        for sizes in splits(ranks)
        if any(
            all(least <= size <= most for size, (least, most) in zip(sizes, row, strict=True))
            for row in found
        )
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_stages_but_the_ends_have_as_many_blocks(ranks: int) -> None:
    def keeps(sizes: tuple[int, ...]) -> bool:
        blocks = [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1]
        return min(blocks) > 0 and all(a == b for a, b in pairwise(blocks[1:-1]))

    assert allowed("even_but_ends", ranks) == {s for s in splits(ranks) if keeps(s)}


def test_even_stages_have_equal_blocks_beside_the_ends() -> None:
    assert allowed("even", 4) == {(5, 4, 4, 5)}
    assert rows("even", SMALL, ranks=3, virtual_stages=1) is None
    assert rows("even", SMALL, ranks=1, virtual_stages=1) == ()
    assert rows("any", SMALL, ranks=3, virtual_stages=1) == ()


def test_ranks_of_several_stages_have_equal_ones() -> None:
    assert rows("even_but_ends", SMALL, ranks=2, virtual_stages=4) == (((9, 9), (9, 9)),)
    assert rows("even", SMALL, ranks=2, virtual_stages=3) is None
    # 18 with the embedding and the head, 9 on each rank, 3 on each stage but its first and last.
    assert rows("even_but_ends", SMALL, ranks=2, virtual_stages=3) == (((9, 9), (9, 9)),)
    unlike = resolve_model("deepseek-v3")
    assert ends_of(unlike) == (1, 61, 1)
    assert rows("even_but_ends", unlike, ranks=61, virtual_stages=1) is not None
    assert rows("even", unlike, ranks=61, virtual_stages=1) is not None


@pytest.mark.parametrize(
    ("rule", "ranks", "virtual", "sizes"),
    [
        # get_num_layers_to_build of Megatron-LM: the embedding and the head count as blocks.
        ("even_but_ends", 16, 8, [0, *[1] * 126, 0]),
        ("even_but_ends", 127, 1, [0, *[1] * 126]),
        ("even_but_ends", 16, 4, [1, *[2] * 62, 1]),
        ("even_but_ends", 21, 2, [3] * 42),
        ("any", 4, 1, [32, 32, 31, 31]),
    ],
)
def test_blocks_are_counted_as_even_as_the_rule_has_them(
    rule: StageRule, ranks: int, virtual: int, sizes: list[int]
) -> None:
    model = resolve_model("llama-3.1-405b")

    assert block_counts(rule, model, ranks=ranks, virtual_stages=virtual) == sizes


@pytest.mark.parametrize("stages", range(1, 20))
def test_a_stage_has_no_layer_only_where_stages_outnumber_them(stages: int) -> None:
    for rule, virtual in product(("any", "even", "even_but_ends"), (1, 2, 3)):
        sizes = block_counts(rule, SMALL, ranks=stages, virtual_stages=virtual)
        sizes[0] += 1
        sizes[-1] += 1
        assert len(sizes) == stages * virtual
        assert (min(sizes) > 0) == (stages * virtual <= BLOCKS + 2)
        assert sum(sizes) == BLOCKS + 2
