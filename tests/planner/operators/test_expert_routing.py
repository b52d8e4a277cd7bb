"""To how many nodes and ranks tokens go: against tokens that are routed, and by hand."""

import numpy as np
import pytest

from meshwright.planner.operators.expert_routing import Routing


def routed(routing: Routing, units: int, tokens: int, seed: int) -> float:
    """Route tokens with random scores as a balanced router does, and count shares by hand."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, routing.groups, routing.experts // routing.groups))
    # Groups are chosen for random scores of their own; a balanced router prefers none.
    order = np.argsort(rng.random((tokens, routing.groups)), axis=1)
    kept = order[:, : routing.groups_per_token]
    allowed = np.zeros((tokens, routing.groups), dtype=bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    scores[~allowed] = -1.0
    chosen = np.argsort(-scores.reshape(tokens, -1), axis=1)[:, : routing.per_token]
    held = chosen // (routing.experts // units)
    return float(np.mean([len(set(row)) for row in held.tolist()]))


CASES = [(Routing(256, 8, 8, 4), units) for units in (1, 2, 4, 8, 16, 32, 64, 256)] + [
    (Routing(64, 6), 8),
    (Routing(8, 2), 4),
    (Routing(128, 8), 16),
    (Routing(160, 6, 8, 3), 4),
]


@pytest.mark.parametrize(("routing", "units"), CASES)
def test_as_many_as_tokens_that_are_routed(routing: Routing, units: int) -> None:
    """4,000 tokens lie within 2 % of the mean."""
    assert routing.distinct(units) == pytest.approx(routed(routing, units, 4000, 7), rel=0.02)


def test_deepseek_v3_by_hand() -> None:
    """4 of 8 nodes, 8 of their 128 experts: 4 (1 - C(96, 8) / C(128, 8))."""
    missed = np.prod([(96 - i) / (128 - i) for i in range(8)])
    assert Routing(256, 8, 8, 4).distinct(8) == pytest.approx(4 * (1 - missed))
    # Without the limit more than five nodes, each of which the network carries.
    assert Routing(256, 8).distinct(8) > 1.4 * Routing(256, 8, 8, 4).distinct(8)


@pytest.mark.parametrize(
    ("routing", "ranks"),
    [
        (Routing(128, 8, spread=0.3), 8),
        (Routing(256, 8, spread=0.1), 64),
        (Routing(8, 2, spread=0.2), 4),
    ],
)
def test_the_busiest_rank_is_that_of_experts_with_loads_drawn_apart(
    routing: Routing, ranks: int
) -> None:
    deviation = routing.spread * np.sqrt(routing.experts / routing.per_token - 1)
    loads = np.random.default_rng(3).normal(1, deviation, (4000, ranks, routing.experts // ranks))
    of_ranks = loads.mean(axis=2)

    busiest = (of_ranks.max(axis=1) - of_ranks.mean(axis=1)).mean()

    assert routing.busiest_load(ranks) == pytest.approx(1 + busiest, rel=0.02)


def test_loads_have_a_least_and_a_most() -> None:
    balanced, collapsed = Routing(128, 8), Routing(128, 8, spread=1.0)

    assert [balanced.busiest_load(n) for n in (1, 8, 128)] == [1.0] * 3
    assert collapsed.busiest_load(1) == 1.0
    # Tokens that all choose the same eight experts fill a rank of eight, and one of 16 with all.
    assert max(Routing(16, 8, spread=9.0).busiest_load(n) for n in (2, 16)) == 2.0
    loads = [collapsed.busiest_load(n) for n in (2, 8, 32, 128)]
    assert loads == sorted(loads)
    assert collapsed.busiest_load(8, layers=16) < collapsed.busiest_load(8)
    every = collapsed.busiest_load(np.array([8, 1, 8]))  # type: ignore[arg-type]
    assert list(every) == [collapsed.busiest_load(8), 1.0, collapsed.busiest_load(8)]
