"""Prediction: what a plan should do and why; Certificate: why nothing else is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import (
    Count,
    Finite,
    Flag,
    Positive,
    Text,
    bytes_text,
    count_text,
    seconds_text,
)
from meshwright.planner.errors.shown import html_table

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
"""The variable, and its value, under which torch's allocator leaves the least memory unused; ranks
of the native framework have it."""


Memory = Literal["device memory", "host memory"]


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

    @property
    def compacts(self) -> bool:
        """Whether what the allocator usually reserves is more than the device has."""
        return self.peak_memory_bytes > self.memory_capacity_bytes

    def memory_bytes(self, kind: str) -> float:
        """Return the peak of what a kind of measurement sees: allocated, reserved or device."""
        size = self.peak_memory_bytes
        if kind != "device":
            size -= self.memory_parts["context"]
        if kind == "allocated":
            size -= self.memory_parts["allocator overhead"] + self.memory_parts.get(
                "recorded buffers", 0.0
            )
        return size


class HostUse(Part):
    """What is put into the memory of a host, of the node where that is most of its room."""

    used_bytes: Finite
    room_bytes: Finite | None = None
    """What may be filled of it; None where nobody says how much memory the node has."""
    memory_bytes: Finite | None = None
    range_bytes: tuple[Finite, Finite] | None = None
    """What such nodes have, where the node's own memory is assumed."""

    @property
    def fits(self) -> bool:
        """Whether it has room, or nobody says."""
        return self.room_bytes is None or self.used_bytes <= self.room_bytes * (1 + ROUNDING)

    def __str__(self) -> str:
        """Return how much of a node's memory is used, and how much that may be."""
        used = f"{bytes_text(self.used_bytes)} in each node's host memory, of which"
        if self.memory_bytes is None or self.room_bytes is None:
            return f"{used} nobody says how much there is"
        room, memory = bytes_text(self.room_bytes), bytes_text(self.memory_bytes)
        has = f"{used} {room} of {memory} may be so filled"
        if self.range_bytes is None:
            return has
        low, high = map(bytes_text, self.range_bytes)
        return f"{has} (assumed; such nodes have {low} to {high})"


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
    samples_per_s: Finite | None = None
    """Where samples are not divided into tokens: those of a script's own module."""
    mfu: Finite
    """Of pairs of tokens that attend to each other; recomputation does not count."""
    unmasked_mfu: Finite = 0.0
    """The same with the pairs that masks leave out, as PaLM's and torchtitan's figures count."""
    compile_s: Finite = 0.0
    """Before the first step; no part of a step."""
    fits: Flag
    fit_probability: Finite | None = None
    """That it fits, since needs of memory differ from their prediction; None where nobody says."""
    peak_memory_range_bytes: tuple[Finite, Finite] | None = None
    """Where the peak of the fullest stage should lie, in 80 of 100 runs."""
    stages: tuple[StagePrediction, ...]
    links: Text | None = None
    """Rates of the links between devices, where none was measured."""
    host: HostUse | None = None
    """Of the fullest node, where anything is put there."""
    overflows: tuple[Memory, ...] = ()
    """The memories that are too small; empty if it fits."""
    assumptions: tuple[Assumption, ...] = ()
    idle_devices: Count = 0
    """Devices of the cluster that no rank uses."""
    notes: tuple[Text, ...] = ()
    """What must be said beside the figures: idle devices, choices of the user without effect."""

    def _repr_html_(self) -> str:
        """Return the prediction as notebooks show it: seconds and memory of each stage."""
        rows = [
            (
                str(at),
                seconds_text(stage.forward_s),
                seconds_text(stage.backward_s),
                bytes_text(stage.peak_memory_bytes),
                bytes_text(stage.memory_capacity_bytes),
            )
            for at, stage in enumerate(self.stages)
        ]
        head = ("stage", "forward", "backward", "peak memory", "of")
        return html_table(self._title, head, rows, self.notes)

    def __str__(self) -> str:
        """Return the prediction as a script prints it; `repr` has all fields."""
        rate, unit = self.throughput
        stages = (
            f"  stage {at}: peak memory {bytes_text(stage.peak_memory_bytes)} of "
            f"{bytes_text(stage.memory_capacity_bytes)}"
            for at, stage in enumerate(self.stages)
        )
        return "\n".join((f"{self._title}, {count_text(rate)} {unit}", *stages, *self.notes))

    @property
    def _title(self) -> str:
        span = f"{seconds_text(self.step_time_low_s)} to {seconds_text(self.step_time_high_s)}"
        fits = "" if self.fits else f"; {self.misfit}"
        return f"{self.layout}: step {seconds_text(self.step_time_s)} ({span}){fits}"

    @property
    def misfit(self) -> str:
        """Which memory is too small, in words."""
        return f"does not fit in {' and in '.join(self.overflows) or 'memory'}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its ranks have to be started with, beside those of any run."""
        return dict([ALLOCATOR]) if any(stage.compacts for stage in self.stages) else {}

    @property
    def throughput(self) -> tuple[float, str]:
        """What a second trains, and in which unit."""
        if self.samples_per_s is not None:
            return self.samples_per_s, "samples/s"
        return self.tokens_per_s, "tokens/s"

    @property
    def throughput_text(self) -> str:
        """The same as people read it."""
        rate, unit = self.throughput
        return f"{rate:,.0f} {unit}"

    def memory_bytes(self, kind: str, rank: str) -> float:
        """Return the peak of a kind of memory (allocated, reserved, device) on a rank.

        `rank` is first or last; any other means the fullest.
        """
        values = [stage.memory_bytes(kind) for stage in self.stages]
        if rank == "first":
            return values[0]
        return values[-1] if rank == "last" else max(values)

    def with_notes(self, *notes: str) -> Self:
        """Return the prediction with more notes."""
        return self.model_copy(update={"notes": (*self.notes, *notes)}) if notes else self

    def on(self, devices: int, *, used: int, where: str = "") -> Self:
        """Return the prediction for a cluster with `devices`, of which ranks use `used`.

        `where` says which those are.
        """
        idle = devices - used
        if idle <= 0:
            return self
        verb = "is" if idle == 1 else "are"
        return self.model_copy(update={"idle_devices": idle}).with_notes(
            f"{idle} of {devices} devices {verb} idle{where}"
        )


class Loser(Part):
    """A configuration whose lower bound is among the least, and what is said of it."""

    layout: Text
    lower_bound_s: Finite
    reason: Text


class Finalist(Part):
    """A configuration whose plan was simulated."""

    layout: Text
    closed_form_s: Finite
    """What the closed form says, by which plans are first looked for."""
    step_time_s: Finite
    """What the simulator says."""


class PlanProof(Part):
    """What is proven of the plan that is the answer."""

    layout: Text
    step_time_s: Finite
    lower_bound_s: Finite
    """No plan of the space takes less."""
    gap: Finite
    """(step time - lower bound) / step time, of this plan."""
    statement: Text
    """These figures in words."""


class Certificate(Document):
    """Proof that no plan of the space has a shorter simulated step."""

    kind_of_document: ClassVar[str] = "certificate"

    format: Literal[2] = 2  # type: ignore[assignment]
    statement: Text
    model: Text
    """Whose simulated step the proof speaks of."""
    solver: Text
    optimal: Flag
    """Whether no plan takes less than the fastest that was simulated."""
    objective_s: Finite
    """The least step that was simulated, of `layout`; the plan's own is in `plan`."""
    lower_bound_s: Finite
    """No plan of the space takes less."""
    gap: Finite
    """(objective - lower bound) / objective."""
    configurations: Positive
    counts: dict[Text, Count]
    """How many configurations fell to which argument; they add up to `configurations`."""
    looked_at: dict[Text, Count] | None = None
    """How many entries of the search got which bound."""
    runners_up: tuple[Loser, ...] = ()
    layout: Text | None = None
    """The configuration of the fastest plan that was simulated."""
    finalists: tuple[Finalist, ...] = ()
    """Configurations whose plans were simulated, the fastest first."""
    plan: PlanProof | None = None
    """The plan that is the answer, which may be simpler than the fastest."""
    parts: Count | None = None
    """How many parts of the cluster the bound is valid for, all devices among them; the
    configurations are those of the part that the plan is for."""
    unproven_parts: Count | None = None
    """Parts of the cluster of which nothing is proven, though they may be faster by arithmetic; of
    several groups, how many with some devices of more than one were looked at for faster plans."""

    def _repr_html_(self) -> str:
        """Return the proof as notebooks show it: how many configurations fell to which argument."""
        rows = [(reason, f"{count:,}") for reason, count in self.counts.items()]
        return html_table(self.statement, ("argument", "configurations"), rows)


def compaction(stages: Sequence[StagePrediction], probability: float) -> str | None:
    """Say how likely stages are to fit whose usual peak is above what a device has; None: all fit.

    They fit where the allocator gives back what it caches.
    """
    fullest = max(stages, key=lambda stage: stage.peak_memory_bytes / stage.memory_capacity_bytes)
    if not fullest.compacts:
        return None
    return (
        f"reserves {bytes_text(fullest.peak_memory_bytes)} of "
        f"{bytes_text(fullest.memory_capacity_bytes)}: {100 * probability:.0f} % likely to fit "
        f"with {'='.join(ALLOCATOR)}"
    )
