"""Each sample once: what was used twice or never is named, whoever read it, in whatever order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint.checkpoint import Progress
from meshwright.runtime.data.loader import UsedSamples
from meshwright.runtime.data.sample_digest import SampleDigest
from tests.runtime.ranks import on_ranks


@given(st.permutations(range(30)), st.integers(0, 30))
def test_neither_order_nor_who_read_it_counts(numbers: list[int], cut: int) -> None:
    both = SampleDigest.of(numbers[:cut]) + SampleDigest.of(numbers[cut:])

    assert both == SampleDigest.of_first(30)
    assert both.wrong(30) is None


@given(st.integers(1, 10**9), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.booleans())
def test_one_sample_twice_and_one_never_are_named(
    count: int, twice: int, never: int, only: bool
) -> None:
    twice, never = twice % count, never % count
    right = SampleDigest.of_first(count)
    more = right + SampleDigest.of([twice])
    assert more.wrong(count) == f"sample {twice} was used twice"
    if only or twice == never:
        return
    lacks = SampleDigest.of([never])
    changed = SampleDigest(
        count=more.count - 1,
        total=(more.total - lacks.total) % (2**31 - 1),
        squares=(more.squares - lacks.squares) % (2**31 - 1),
    )
    assert changed.wrong(count) == f"sample {twice} was used twice and sample {never} never"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2))
def test_two_samples_in_the_place_of_others_never_cancel(changes: list[tuple[int, int]]) -> None:
    numbers = list(range(10))
    for place, instead in changes:
        numbers[place] = instead

    assert (SampleDigest.of(numbers).wrong(10) is None) == (sorted(numbers) == list(range(10)))


def used(slices: list[int], batches: list[list[range]]) -> tuple[Any, Any]:
    """Return the digest of all ranks behind the first batches, and behind all."""
    own = UsedSamples(slices[dist.get_rank()])
    first, *rest = batches[dist.get_rank()]
    own.add(first)
    found = own.digest()
    for numbers in rest:
        own.add(numbers)
    return found.model_dump(), own.digest().model_dump()


@pytest.mark.ranks
def test_ranks_of_a_slice_count_once() -> None:
    """Two data ranks of unequal shares, of which the second has a tensor axis of two."""
    shares = [[range(0, 5), range(8, 13)], *2 * [[range(5, 8), range(13, 16)]]]

    found = on_ranks(3, used, [0, 1, 1], shares)

    wanted = SampleDigest.of_first(8).model_dump(), SampleDigest.of_first(16).model_dump()
    assert found == 3 * [wanted]


def test_a_checkpoint_whose_samples_are_not_each_once_is_refused(tmp_path: Path) -> None:
    done = Progress(
        step=1,
        sample=8,
        epoch=0,
        seq_len=16,
        seed=0,
        model="tiny",
        model_digest="a",
        plan_digest="b",
        corpus="text",
        corpus_digest="c",
        loss=1.0,
        used=SampleDigest.of([0, 1, 2, 3, 4, 5, 5, 7]),
    )
    training = type("training", (), {"seed": 0})
    same = {"digest": "a", "name": "tiny", "source": "text", "seq_len": 16, "training": training}
    model: Any = type("model", (), same)
    corpus: Any = type("corpus", (), {**same, "digest": "c"})

    with pytest.raises(DocumentError, match="used: says that sample 5 was used twice and sample 6"):
        done.check(plan=model, model=model, corpus=corpus, folder=tmp_path)
