"""Training settings: what is refused, and how a launch changes them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from meshwright.planner.documents.document import first_error
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import DocumentError


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
        ({"weight_decay": 4e3}, "weight_decay: is 4000; a step takes .* = 1.2 of each weight"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Training.model_validate(settings)


IMPOSSIBLE = {
    "learning_rate": (0, -1e-3, 2.0, 1e300),
    "warmup_steps": (-1, 10**10),
    "beta1": (-0.1, 1.0, 65537),
    "beta2": (-0.1, 1.0, 65537.0),
    "epsilon": (0, -1e-8, 1e-50, 2.0),
    "weight_decay": (-0.1, 1e5),
    "clip_norm": (-1, 1e300),
    "seed": (-1, 2**64),
    "floor": (-0.1, 1.5),
    "lora.rank": (0, 10**9),
    "lora.alpha": (0, 1e300),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values]
)
def test_values_that_no_training_has_get_one_message_in_a_plan_and_on_the_command_line(
    name: str, value: float
) -> None:
    path, _, last = name.rpartition(".")
    settings = {last: value} if not path else {path: {"rank": 4, last: value}}

    with pytest.raises(ValidationError) as in_plan:
        Training.model_validate(settings)
    others = ["lora.rank=4"] if last == "alpha" else []
    with pytest.raises(DocumentError) as on_command_line:
        Training().with_settings([*others, f"{name}={value}"])

    assert str(first_error(in_plan.value)) == str(on_command_line.value)
    assert f"{name}: is" in str(on_command_line.value)


@pytest.mark.parametrize(
    "value", ["nan", ".nan", ".inf", "1e400", "9" * 5000, "٣", "", "[1]", "null"]
)
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(DocumentError, match=r"learning_rate|YAML"):
        Training().with_settings([f"learning_rate={value}"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rate", "'learning_rate' is not of the form name=value"),
        ("lora.16", "lora: '16' is not of the form name=value; write it as in rank=16"),
        ("learn_rate=1", "has no setting 'learn_rate'; did you mean 'learning_rate'"),
        ("learning_rate=fast", 'learning_rate: is "fast"'),
        ("rate_schedule=square", 'rate_schedule: is "square"'),
        ("seed=1.5", "seed: is 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        Training().with_settings([setting])
