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
"""Learning rate after the warm-up: constant; along a cosine or a line down to its floor; or
(warm-up, stable, decay) constant and then along a line over the last steps."""

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
"""Storage of frozen matrices: in the type of the computation, or packed with scales."""
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
"""Update rule of weights.  AdamW keeps its moments in the framework's type, in bf16, or in 8 bits
with a scale for each block; paged moments can move to the host."""
MasterWeights = Literal["fp32", "none"]
"""Trained weights: an fp32 copy of the 16-bit weights, or these weights themselves."""


Objective = Literal["sft", "dpo", "reward", "grpo"]
"""Training objective: the next token (`sft`); the preferred one of two answers, beside a frozen
reference (`dpo`) or as a score (`reward`); or the model's own answers by their rewards, beside a
reference (`grpo`)."""
SEQUENCES: Mapping[Objective, int] = {"sft": 1, "dpo": 2, "reward": 2, "grpo": 1}
"""Sequences of a sample by objective; a pair has two."""
REFERENCED: tuple[Objective, ...] = ("dpo", "grpo")
"""Objectives that use a frozen reference model; with adapters the reference is the model without
them."""


class Lora(Part):
    """Low-rank adapters beside frozen linear layers."""

    rank: Annotated[Positive, Field(le=MOST_RANK)]
    """Rank of the adapters."""
    alpha: Annotated[Rate, Field(le=1e6)] = 16.0
    """Numerator of the scale alpha / rank of the adapters' output."""
    targets: tuple[Text, ...] = ("all-linear",)
    """Suffixes of the names of the modules that get an adapter, or `all-linear` for every linear
    layer of the blocks."""
    weights: FrozenWeights = "full"
    """Storage of frozen matrices of the blocks.  Written only where they are packed."""

    @property
    def packs_weights(self) -> bool:
        """True if frozen weights are packed in fewer bits than they are computed in."""
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
    """Settings of the optimizer and the schedule of its learning rate."""

    optimizer: Optimizer = "adamw"
    """Update rule of weights."""
    master_weights: MasterWeights = "fp32"
    """Type of the master weights.  Written only where there are none."""
    objective: Objective = "sft"
    """Training objective.  Written only where it is not sft."""
    learning_rate: Fraction = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    warmup_steps: Steps = 0
    """Number of first steps over which the learning rate rises to its highest value."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    epsilon: Fraction = 1e-8
    """Constant in the denominator of the update."""
    weight_decay: Amount = 0.1
    """Decoupled weight decay; a step takes learning_rate x weight_decay of each weight."""
    clip_norm: Amount = 1.0
    """Largest norm of the gradients; 0: no clipping."""
    seed: Count = 0
    """Seed of initial weights and of the order of samples."""
    rate_schedule: RateSchedule = "constant"
    """Schedule of the learning rate after the warm-up."""
    rate_steps: Steps = 0
    """Step at which a falling schedule has reached its floor, where it stays."""
    decay_steps: Steps = 0
    """Number of last steps over which `wsd` falls."""
    floor: Proportion = 0.0
    """Lowest rate of a falling schedule, as a share of the highest."""
    lora: Lora | None = None
    """Adapters that are trained while everything else is frozen; None trains the whole model."""

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
        """Leave unused settings out."""
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
                of_adapters = path.startswith("lora.")
                written = path.removeprefix("lora.")
                form = "rank=16 or targets=[q_proj,v_proj]" if of_adapters else "learning_rate=1e-4"
                raise DocumentError(
                    "lora" if of_adapters else "training",
                    f"'{written}' is not of the form name=value; write it as in {form}",
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
