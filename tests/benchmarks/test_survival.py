"""Steps of uneven length are no hang, whatever their length."""

import pytest

from benchmarks.survival import false_alarms


@pytest.mark.parametrize("step_s", [0.05, 6.0, 60.0])
def test_uneven_steps_raise_no_alarm(step_s: float) -> None:
    assert false_alarms(steps=2000, ranks=2, step_s=step_s, jitter=0.2, seed=1) == 0


def test_a_step_beyond_its_limit_is_one() -> None:
    assert false_alarms(steps=200, ranks=1, step_s=6.0, jitter=0.0, seed=1) == 0
    assert false_alarms(steps=2, ranks=1, step_s=10_000.0, jitter=0.0, seed=1) > 0
