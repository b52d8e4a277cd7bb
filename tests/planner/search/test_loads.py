"""Which moment of a rank counts, told by what its layers can store."""

from __future__ import annotations

import numpy as np
import pytest

from planner.search.loads import binding, loads_of

CHAIN = ("embedding", *("block",) * 64, "head")


@pytest.mark.parametrize(("stored", "waits"), [(1.0, False), (0.0, True)])
def test_ranks_that_recompute_everything_are_fullest_where_most_waits(
    stored: float, waits: bool
) -> None:
    """On the last of 8 ranks of a V 7 micro-batches of both stages wait, or 16 are alive."""
    early, late = loads_of(CHAIN, "zbv", 8, 64, 2)
    one = np.ones(8)
    most, room_bytes = 1.0, (1.0 + 8.0 * stored) * one

    load = binding(
        early,
        late,
        room_bytes=room_bytes,
        sent_bytes=0.0 * one,
        resident=one,
        kept=0.4 * one,
        least_stored=0.0 * one,
        most_stored=most * one,
        depths=2,
    )

    assert early.alive[:, -1].tolist() == [8, 8]
    assert late.waiting[:, -1].tolist() == [7, 7]
    assert (load.waiting[:, -1] > 0).all() == waits
    assert load.alive[:, 0].tolist() == early.alive[:, 0].tolist()


def test_ranks_in_a_row_keep_their_own_counts() -> None:
    several, one = loads_of(CHAIN, "zbv", 4, 8, 2)[0], loads_of(CHAIN, "1f1b", 2, 8, 1)[0]

    row = type(one).together([one, several])

    assert row.alive.tolist() == [[2, 1, 7, 6, 5, 4], [0, 0, 1, 2, 3, 4]]
    assert row.sent.tolist() == [2, 0, *several.sent.tolist()]
    assert row.last_acts.tolist() == [0, 1, 1, 0, 0, 0]
