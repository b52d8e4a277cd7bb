"""Training settings: what is refused, and how a launch changes them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.errors import DocumentError
from planner.training import Training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate_schedule": "cosine"}, "rate_steps: is 0, and warmup_steps 0; cosine must know"),
        (
            {"rate_schedule": "linear", "rate_steps": 5, "warmup_steps": 5},
            "rate_steps: is 5, and warmup_steps 5",
        ),
        (
            {"rate_schedule": "wsd", "rate_steps": 9, "warmup_steps": 5},
            "decay_steps: is 0; wsd falls over 1 to 4 steps",
        ),
        ({"decay_steps": 3}, "decay_steps: constant has none"),
        ({"floor": 1.5}, "floor: is 1.5; it is a part of learning_rate"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Training.model_validate(settings)


def test_what_is_not_used_is_not_written() -> None:
    assert "rate_schedule" not in Training().model_dump()
    falling = Training(rate_schedule="cosine", rate_steps=9)
    assert Training.model_validate(falling.model_dump()) == falling


def test_a_launch_changes_settings_together() -> None:
    changed = Training().changed(["rate_schedule=cosine", "rate_steps=100", "learning_rate=1"])

    assert (changed.rate_schedule, changed.rate_steps, changed.learning_rate) == ("cosine", 100, 1)
    assert isinstance(changed.learning_rate, float)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rate", "'learning_rate' is not of the form name=value"),
        ("learn_rate=1", "has no setting 'learn_rate'; did you mean 'learning_rate'"),
        ("learning_rate=fast", 'learning_rate: is "fast"'),
        ("rate_schedule=square", 'rate_schedule: is "square"'),
        ("seed=1.5", "seed: is 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        Training().changed([setting])
