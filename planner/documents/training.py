"""Training: the optimizer's settings in a plan.  They cost no time, but the run needs them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from meshwright.planner.documents.document import Part, first_error, plain
from meshwright.planner.documents.units import (
    LONGEST_S,
    Amount,
    Count,
    Fraction,
    Positive,
    Proportion,
    Rate,
    Share,
    Text,
)
from meshwright.planner.errors import DocumentError, LaunchError

RateSchedule = Literal["constant", "cosine", "linear", "wsd"]
"""How the learning rate goes on after the warm-up: as it is, down a cosine or a line to its floor,
or (warm-up, stable, decay) as it is and down a line over the last steps."""

MOST_STEPS = 10**9
MOST_RANK = 2**16
Steps = Annotated[Count, Field(le=MOST_STEPS)]


def check_lengths(**lengths: float | None) -> None:
    """Refuse numbers of steps, batches or checkpoints, and `max_seconds`, that no run has."""
    for name, value in lengths.items():
        most = LONGEST_S if name == "max_seconds" else MOST_STEPS
        if value is not None and not 0 < value <= most:
            raise LaunchError(f"{name}: is {value:g}; it must be more than 0, at most {most:,.0f}")


FrozenWeights = Literal["full", "nf4", "int8", "fp8", "mxfp4"]
"""How frozen matrices are stored: in the type of the computation, or packed with scales."""
Optimizer = Literal[
    "adamw",
    "adamw-bf16",
    "adamw-8bit",
    "adamw-8bit-paged",
    "adafactor",
    "lion",
    "muon",
    "sgd",
]
"""What updates weights.  AdamW has its moments as the framework does, in bf16, or in 8 bits with a
scale for each block, which pages may bring to the host."""
MasterWeights = Literal["fp32", "none"]
"""Whether an fp32 copy of the 16-bit weights is trained, or these weights themselves."""


Objective = Literal["sft", "dpo", "reward", "grpo"]
"""What is learned: the next token; which of two answers is preferred, beside a frozen reference
(DPO) or as a score; or answers of one's own by their rewards, beside a reference (GRPO)."""
SEQUENCES: Mapping[Objective, int] = {"sft": 1, "dpo": 2, "reward": 2, "grpo": 1}
"""Sequences of a sample: a pair has two."""
REFERENCED: tuple[Objective, ...] = ("dpo", "grpo")
"""What a frozen reference model is beside; with adapters it is the model without these."""


class Lora(Part):
    """Adapters of low rank beside frozen linear layers."""

    rank: Annotated[Positive, Field(le=MOST_RANK)]
    alpha: Annotated[Rate, Field(le=1e6)] = 16.0
    """What the adapters add is scaled by alpha / rank."""
    targets: tuple[Text, ...] = ("all-linear",)
    """Ends of the names of the modules that get an adapter, or every linear layer of the blocks."""
    weights: FrozenWeights = "full"
    """How frozen matrices of the blocks are stored; written only where they are packed."""

    @property
    def packs_weights(self) -> bool:
        """Whether frozen weights are packed in fewer bits than they are computed in."""
        return self.weights != "full"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.targets:
            raise ValueError("targets: is empty; name a module, or all-linear")
        return self

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        if not self.packs_weights:
            fields.pop("weights", None)
        return fields


class Training(Part):
    """The optimizer's settings, and how its learning rate changes from step to step."""

    optimizer: Optimizer = "adamw"
    master_weights: MasterWeights = "fp32"
    """Written only where there are none."""
    objective: Objective = "sft"
    """Written only where it is another."""
    learning_rate: Fraction = 3e-4
    """The highest, reached at the end of the warm-up."""
    warmup_steps: Steps = 0
    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Fraction = 1e-8
    weight_decay: Amount = 0.1
    clip_norm: Amount = 1.0
    """0 means no clipping."""
    seed: Count = 0
    rate_schedule: RateSchedule = "constant"
    rate_steps: Steps = 0
    """At which step a schedule that falls has reached its floor; it stays there."""
    decay_steps: Steps = 0
    """Over how many of the last steps `wsd` falls."""
    floor: Proportion = 0.0
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
            raise ValueError(
                f"decay_steps: {self.rate_schedule} has none; leave it out, or use wsd"
            )
        decayed = self.learning_rate * self.weight_decay
        if decayed >= 1:
            raise ValueError(
                f"weight_decay: is {self.weight_decay:g}; a step takes learning_rate x "
                f"weight_decay = {decayed:g} of each weight, which must stay below 1; lower either"
            )
        return self

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not used."""
        fields: dict[str, Any] = written(self)
        for name in (
            "rate_schedule",
            "rate_steps",
            "decay_steps",
            "floor",
            "lora",
            "master_weights",
            "objective",
        ):
            if name in fields and fields.get(name) == type(self).model_fields[name].default:
                del fields[name]
        return fields

    def with_settings(self, settings: Sequence[str]) -> Training:
        """Return these settings with some changed, each written `name=value`.

        >>> Training().with_settings(["learning_rate=0.001", "clip_norm=0"]).learning_rate
        0.001
        """
        values = self.model_dump()
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals:
                raise DocumentError(
                    "training", f"'{setting}' is not of the form name=value; write it so"
                )
            cls: type[Part] = Training
            place, name = values, path
            if path.startswith("lora."):
                place = values.setdefault("lora", {})
                cls, name = Lora, path.removeprefix("lora.")
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, list(cls.model_fields), n=1)
                hint = f"did you mean '{near[0]}'?" if near else ", ".join(cls.model_fields)
                raise DocumentError("training", f"has no setting '{path}'; {hint}")
            place[name] = plain(text)
        try:
            return Training.model_validate(values)
        except ValidationError as error:
            raise first_error(error) from error
