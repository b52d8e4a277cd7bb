"""A flipped bit that changes the loss is found where replicas hold it, and its rank is named."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.bit_flips import Flip, Where, lived

EXPONENT, LARGE, LOWEST = 29, 30, 0


@pytest.mark.parametrize("where", ["weight", "moment", "mean of gradients"])
@pytest.mark.long("weight", "moment")
def test_what_one_replica_alone_has_is_found_and_named(where: Where) -> None:
    flip = Flip(where=where, step=30, replica=1, at=0.3, bit=EXPONENT)

    life = lived(flip, replicas=3)

    assert (life.found, life.named) == (True, 1)


def test_of_two_replicas_nobody_knows_which_is_right() -> None:
    life = lived(Flip(where="weight", step=30, replica=1, at=0.3, bit=EXPONENT), replicas=2)

    assert (life.found, life.named) == (True, None)


def test_what_all_replicas_take_alike_is_found_where_it_is_large() -> None:
    """The step is done again, and gives another norm; whose own gradient differs is named."""
    flip = Flip(where="gradient before the mean", step=30, replica=1, at=0.3, bit=LARGE)
    small = Flip(where="gradient before the mean", step=30, replica=1, at=0.3, bit=LOWEST)

    life = lived(flip, replicas=3)

    assert (life.found, life.named) == (True, 1)
    assert not lived(small, replicas=3).found


def test_a_bit_that_changes_nothing_that_counts_is_found_too() -> None:
    life = lived(Flip(where="weight", step=30, replica=2, at=0.3, bit=LOWEST), replicas=3)

    assert (life.found, life.named) == (True, 2)
    assert not life.differs(lived(None, replicas=3))
