"""layout_queue.best_first is checked against solving every layout."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from planner.plan import Layout
from planner.search.certificate import BOUNDS, CHOSEN, OUT_OF_MEMORY, SLOWER, Account
from planner.search.layout_queue import Found, Lost, Searched, best_first
from planner.search.space import complexity, kind

Seconds = dict[Layout, float]


def layouts() -> list[Layout]:
    return [
        Layout(pipeline=pipeline, data_replicate=8 // pipeline, micro_batch=size, micro_batches=8)
        for pipeline in (1, 2, 4, 8)
        for size in (1, 2, 4)
    ]


def random_seconds(seed: int) -> Seconds:
    """Objectives, many of them equal, some inf for what does not fit."""
    rng = random.Random(seed)
    return {
        layout: math.inf if rng.random() < 0.2 else float(rng.randint(5, 12))
        for layout in layouts()
    }


def hunted(
    seconds: Seconds, seed: int, *, top: int = 1, below_s: float = math.inf, proven: float = 1.0
) -> tuple[Searched[str], Account]:
    """Search with bounds that are random parts of the objectives, the second at least the first."""
    rng = random.Random(seed)
    shares = {layout: sorted((rng.random(), rng.random())) for layout in seconds}

    def bound(step: int) -> Callable[[Layout], float]:
        def bound_s(layout: Layout) -> float:
            known_s = seconds[layout]
            if math.isinf(known_s):
                return math.inf if shares[layout][step] > 0.7 else 1.0
            return shares[layout][step] * known_s

        return bound_s

    def solve(layout: Layout, _: float) -> Found[str] | Lost:
        if math.isinf(seconds[layout]):
            return Lost(OUT_OF_MEMORY, reason="too large")
        return Found(seconds[layout], proven * seconds[layout], layout, layout.text())

    account = Account()
    outcome = best_first(
        rng.sample(list(seconds), len(seconds)),
        bounds=[(BOUNDS[0], bound(0)), (BOUNDS[2], bound(1))],
        solve=solve,
        account=account,
        top=top,
        below_s=below_s,
    )
    return outcome, account


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_is_faster_and_the_simplest_of_equals_wins(seed: int) -> None:
    seconds = random_seconds(seed)
    fitting = [layout for layout in seconds if math.isfinite(seconds[layout])]
    best = min(fitting, key=lambda layout: (seconds[layout], complexity(layout)))

    outcome, account = hunted(seconds, seed)

    assert outcome.best[0].layout == best
    assert outcome.best[0].split == best.text()
    # Those that are best of their kind are left for the caller to account for.
    assert sum(account.counts.values()) + len(outcome.best) == len(seconds)
    assert account.counts[CHOSEN] == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_each_kind_are_found_if_so_many_are_asked_for(seed: int) -> None:
    seconds = random_seconds(seed)
    least: dict[tuple[int, ...], float] = {}
    for layout, known_s in seconds.items():
        if math.isfinite(known_s):
            least[kind(layout)] = min(known_s, least.get(kind(layout), math.inf))

    outcome, _ = hunted(seconds, seed, top=3)

    assert [found.objective_s for found in outcome.best[:3]] == sorted(least.values())[:3]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_at_or_above_a_known_objective_is_worth_having(seed: int) -> None:
    seconds = random_seconds(seed)
    best_s = min(seconds.values())

    none, account = hunted(seconds, seed, below_s=best_s)
    some, _ = hunted(seconds, seed, below_s=best_s + 0.5)

    assert none.best == ()
    assert sum(account.counts.values()) == len(seconds)
    assert some.best[0].objective_s == best_s


def test_what_does_not_fit_is_told_with_its_reason() -> None:
    seconds = dict.fromkeys(layouts(), math.inf)

    outcome, account = hunted(seconds, 3)

    assert outcome.best == ()
    assert account.counts[OUT_OF_MEMORY] == len(seconds) == len(outcome.misses)
    assert "too large" in {reason for _, reason in outcome.misses}


def test_a_layout_that_is_not_proven_bounds_the_whole() -> None:
    seconds = random_seconds(1)

    outcome, account = hunted(seconds, 1, proven=0.9)

    winner = outcome.best[0]
    certificate = account.certificate(
        objective_s=winner.objective_s,
        lower_bound_s=winner.lower_bound_s,
        optimal=False,
        solver="exact",
    )
    assert certificate.lower_bound_s <= 0.9 * winner.objective_s * (1 + 1e-12)
    assert certificate.gap == pytest.approx(1 - certificate.lower_bound_s / winner.objective_s)
    assert account.counts[SLOWER] + len(outcome.best) == outcome.solved - sum(
        1 for _, reason in outcome.misses if reason
    )
