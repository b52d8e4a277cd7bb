"""Training: the optimizer's settings in a plan.  They cost no time, but the run needs them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import (
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from planner.document import Part, first_error, plain
from planner.errors import DocumentError
from planner.units import Amount, Count, Positive, Rate, Text

RateSchedule = Literal["constant", "cosine", "linear", "wsd"]
"""How the learning rate goes on after the warm-up: as it is, down a cosine or a line to its floor,
or (warm-up, stable, decay) as it is and down a line over the last steps."""


class Lora(Part):
    """Adapters of low rank beside frozen linear layers."""

    rank: Positive
    alpha: Rate = 16.0
    """What the adapters add is scaled by alpha / rank."""
    targets: tuple[Text, ...] = ("all-linear",)
    """Ends of the names of the modules that get an adapter, or every linear layer of the blocks."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.targets:
            raise ValueError("targets: is empty; name a module, or all-linear")
        return self


class Training(Part):
    """The optimizer's settings, and how its learning rate changes from step to step."""

    optimizer: Literal["adamw"] = "adamw"
    learning_rate: Rate = 3e-4
    """The highest, reached at the end of the warm-up."""
    warmup_steps: Count = 0
    beta1: Amount = 0.9
    beta2: Amount = 0.95
    epsilon: Rate = 1e-8
    weight_decay: Amount = 0.1
    clip_norm: Amount = 1.0
    """0 means no clipping."""
    seed: Count = 0
    rate_schedule: RateSchedule = "constant"
    rate_steps: Count = 0
    """At which step a schedule that falls has reached its floor; it stays there."""
    decay_steps: Count = 0
    """Over how many of the last steps `wsd` falls."""
    floor: Amount = 0.0
    """The lowest rate of a schedule that falls, as a part of the highest."""
    lora: Lora | None = None
    """Train adapters only; everything else is frozen."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        falls = self.rate_schedule != "constant"
        if falls and self.rate_steps <= self.warmup_steps:
            raise ValueError(
                f"rate_steps: is {self.rate_steps}, and warmup_steps {self.warmup_steps}; "
                f"{self.rate_schedule} must know the later step at which it has fallen"
            )
        if self.rate_schedule == "wsd":
            most = self.rate_steps - self.warmup_steps
            if not 0 < self.decay_steps <= most:
                raise ValueError(
                    f"decay_steps: is {self.decay_steps}; wsd falls over 1 to {most} steps "
                    "(rate_steps - warmup_steps)"
                )
        elif self.decay_steps:
            raise ValueError(f"decay_steps: {self.rate_schedule} has none; only wsd does")
        if self.floor > 1:
            raise ValueError(f"floor: is {self.floor:g}; it is a part of learning_rate, 0 to 1")
        return self

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what came later and is not used: plans of before keep their digests."""
        fields: dict[str, Any] = written(self)
        for name in ("rate_schedule", "rate_steps", "decay_steps", "floor", "lora"):
            if name in fields and fields.get(name) == type(self).model_fields[name].default:
                del fields[name]
        return fields

    def changed(self, settings: Sequence[str]) -> Training:
        """Return these settings with some changed, each written `name=value`.

        >>> Training().changed(["learning_rate=0.001", "clip_norm=0"]).learning_rate
        0.001
        """
        values = self.model_dump()
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals:
                raise DocumentError("training", f"'{setting}' is not of the form name=value")
            cls: type[Part] = Training
            place, name = values, path
            if path.startswith("lora."):
                place = values.setdefault("lora", {})
                cls, name = Lora, path.removeprefix("lora.")
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, list(cls.model_fields), n=1)
                known = f"did you mean '{near[0]}'?" if near else ", ".join(cls.model_fields)
                raise DocumentError("training", f"has no setting '{path}'; {known}")
            value = plain(text)
            whole = isinstance(value, int) and not isinstance(value, bool)
            is_real = cls.model_fields[name].annotation is float
            place[name] = float(value) if whole and is_real else value  # type: ignore[arg-type]
        try:
            return Training.model_validate(values)
        except ValidationError as error:
            raise first_error(error) from error
