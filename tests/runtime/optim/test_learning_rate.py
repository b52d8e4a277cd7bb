"""Learning rates are checked against the schedulers of torch and transformers."""

from __future__ import annotations

import pytest

from meshwright.planner.documents.training import Training
from meshwright.runtime.optim.learning_rate import learning_rate

torch = pytest.importorskip("torch")

from torch.optim.lr_scheduler import (  # noqa: E402
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
)


def rates_of(scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)


def test_cosine_is_that_of_torch() -> None:
    training = Training(learning_rate=0.4, rate_schedule="cosine", rate_steps=10, floor=0.25)

    expected = rates_of(CosineAnnealingLR(optimizer(), T_max=10, eta_min=0.1), 11)

    assert [learning_rate(training, step) for step in range(11)] == pytest.approx(expected)


def test_linear_is_that_of_torch() -> None:
    training = Training(learning_rate=0.4, rate_schedule="linear", rate_steps=10, floor=0.25)

    expected = rates_of(
        LinearLR(optimizer(), start_factor=1.0, end_factor=0.25, total_iters=10), 13
    )

    assert [learning_rate(training, step) for step in range(13)] == pytest.approx(expected)


def test_warmup_stable_decay_has_three_parts() -> None:
    training = Training(
        learning_rate=1.0, warmup_steps=4, rate_schedule="wsd", rate_steps=12, decay_steps=4
    )

    rates = [learning_rate(training, step) for step in range(14)]

    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_warm_up_ends_where_the_fall_begins(schedule: str) -> None:
    training = Training.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 3, "rate_schedule": schedule, "rate_steps": 8}
    )

    rates = [learning_rate(training, step) for step in range(9)]

    assert rates[2] == rates[3] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[8] == pytest.approx(0.0)
