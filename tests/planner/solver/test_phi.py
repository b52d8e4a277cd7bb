"""The bounds of 1F1B against simulated steps: never above, and equal where they should be."""

from __future__ import annotations

import random

import pytest

from planner.schedule import orders
from planner.simulate import timeline
from planner.solver.phi import balanced_s, phi_s


def step_s(forward_s: list[float], backward_s: list[float], m: int, transfer_s: float) -> float:
    return timeline(
        orders("1f1b", stages=len(forward_s), micro_batches=m),
        forward_s=forward_s,
        backward_s=backward_s,
        transfer_s=transfer_s,
    ).makespan_s


def adversarial(rng: random.Random, stages: int) -> list[float]:
    return [rng.choice([0.0, 1e-3, 1.0, rng.uniform(0.0, 10.0)]) for _ in range(stages)]


def test_no_step_of_three_thousand_beats_the_bounds() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        stages, m = rng.randint(1, 8), rng.randint(1, 20)
        forward_s, backward_s = adversarial(rng, stages), adversarial(rng, stages)
        transfer_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 1.0)])

        step = step_s(forward_s, backward_s, m, transfer_s)

        assert phi_s(forward_s, backward_s, m, transfer_s=transfer_s) <= step * (1 + 1e-12)
        total_s = sum(forward_s) + sum(backward_s)
        balanced = balanced_s(total_s, stages=stages, micro_batches=m, transfer_s=transfer_s)
        assert balanced <= step * (1 + 1e-12)


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_uniform_stages_meet_the_bound(stages: int, m: int) -> None:
    forward_s, backward_s = [1.0] * stages, [2.0] * stages

    assert phi_s(forward_s, backward_s, m) == pytest.approx(step_s(forward_s, backward_s, m, 0.0))


def test_realistic_stages_come_within_four_percent_of_the_bound() -> None:
    rng = random.Random(1)
    ratios = []
    for _ in range(300):
        stages, m = rng.randint(2, 8), rng.randint(2, 32)
        share = rng.choice([1 / 3, 1 / 4])
        whole = [rng.uniform(1.0, 2.0) for _ in range(stages)]
        forward_s = [share * t for t in whole]
        backward_s = [(1 - share) * t for t in whole]
        ratios.append(phi_s(forward_s, backward_s, m) / step_s(forward_s, backward_s, m, 0.0))

    assert min(ratios) > 0.96
    assert sum(ratios) / len(ratios) > 0.998


def test_balanced_stages_meet_the_bound_of_all_splits() -> None:
    assert balanced_s(12.0, stages=4, micro_batches=8) == step_s([1.0] * 4, [2.0] * 4, 8, 0.0)


def test_few_micro_batches_can_beat_a_balanced_split() -> None:
    # The bound for m > P would be 6 / 4 * 12 = 18 here; this is why it asks for more micro-batches.
    front = step_s([1.2, 0.9, 0.95, 0.95], [2.4, 1.8, 1.9, 1.9], 3, 0.0)

    assert front < 18.0
    assert balanced_s(12.0, stages=4, micro_batches=3) <= front
