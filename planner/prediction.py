"""Prediction: what a plan should do and why; Certificate: why nothing else is faster."""

from __future__ import annotations

from typing import ClassVar

from planner.document import Document, Part
from planner.units import Count, Finite, Flag, Positive, Text


class StagePrediction(Part):
    """One pipeline stage, as each of its ranks sees it."""

    forward_s: Finite
    """Of one micro-batch."""
    backward_s: Finite
    peak_memory_bytes: Finite
    memory_capacity_bytes: Finite
    memory_parts: dict[Text, Finite]
    """Bytes by cause; they add up to peak_memory_bytes."""
    host_bytes: Finite = 0.0
    """On the host, of one rank."""


class Assumption(Part):
    """A figure that was not measured on this machine for this model, and where it came from."""

    what: Text
    provenance: Text
    source: Text


class Prediction(Document):
    """Step time by cause, memory per stage by cause, and what was assumed."""

    kind_of_document: ClassVar[str] = "prediction"

    plan_digest: Text | None = None
    layout: Text
    step_time_s: Finite
    step_time_low_s: Finite
    step_time_high_s: Finite
    step_parts: dict[Text, Finite]
    """Seconds of the critical stage by cause; they add up to step_time_s."""
    tokens_per_s: Finite
    mfu: Finite
    fits: Flag
    stages: tuple[StagePrediction, ...]
    assumptions: tuple[Assumption, ...] = ()


class Loser(Part):
    """A configuration that was close, and the reason it lost."""

    layout: Text
    objective_s: Finite | None = None
    """Its optimum where it was solved."""
    lower_bound_s: Finite | None = None
    reason: Text


class Finalist(Part):
    """A configuration close to the optimum of the closed form, and its simulated step."""

    layout: Text
    objective_s: Finite
    """Its optimum in the closed form."""
    step_time_s: Finite
    """What the simulator says of that plan."""


class Simulated(Part):
    """What the simulator says of the plans that are nearly the fastest in the closed form."""

    statement: Text
    layout: Text
    """The fastest simulated: the plan that was chosen."""
    step_time_s: Finite
    lower_bound_s: Finite | None = None
    bound: Text
    """Of what `lower_bound_s` is a bound, or that none is known."""
    margin: Finite
    """How far above the optimum of the closed form, relatively, a finalist's bound may be."""
    finalists: tuple[Finalist, ...]
    """The fastest simulated first."""


class Certificate(Document):
    """Proof that no configuration of the space is faster, in the model that `model` names."""

    kind_of_document: ClassVar[str] = "certificate"

    statement: Text
    model: Text
    """The closed-form step time in which the proof holds."""
    solver: Text
    optimal: Flag
    objective_s: Finite
    lower_bound_s: Finite
    gap: Finite
    """(objective - lower bound) / objective."""
    configurations: Positive
    counts: dict[Text, Count]
    """How many configurations fell to which argument; they add up to `configurations`."""
    runners_up: tuple[Loser, ...] = ()
    layout: Text | None = None
    """The configuration with the least objective."""
    simulated: Simulated | None = None
    """The closest configurations in the simulator, which chose the plan among them."""
