"""Prediction: what a plan should do and why; Certificate: why nothing else is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.placement_text import layout_with
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
"""Environment variable, and its value, under which torch's allocator leaves the least memory
unused; ranks of the native framework have it."""


Memory = Literal["device memory", "host memory"]


class StagePrediction(Part):
    """Prediction for one pipeline stage, for each of its ranks."""

    forward_s: Finite
    """Seconds of the forward of one micro-batch."""
    backward_s: Finite
    """Seconds of the backward of one micro-batch."""
    peak_memory_bytes: Finite
    """Peak bytes of device memory."""
    memory_capacity_bytes: Finite
    """Bytes of device memory that a program can use."""
    memory_parts: dict[Text, Finite]
    """Bytes by cause; their sum is peak_memory_bytes."""
    host_bytes: Finite = 0.0
    """Bytes of host memory of one rank."""

    @property
    def compacts(self) -> bool:
        """True if the bytes that the allocator usually reserves exceed device memory."""
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
    """Use of host memory on the node with the highest share in use."""

    used_bytes: Finite
    """Bytes in use."""
    room_bytes: Finite | None = None
    """Bytes of host memory that may be filled; None where the node's memory is unknown."""
    memory_bytes: Finite | None = None
    """Bytes of the node's host memory; None: not known."""
    range_bytes: tuple[Finite, Finite] | None = None
    """Smallest and largest memory in bytes of such nodes, where the node's own memory is
    assumed."""

    @property
    def fits(self) -> bool:
        """True if the used bytes fit in the room, or if the room is unknown."""
        return self.room_bytes is None or self.used_bytes <= self.room_bytes * (1 + ROUNDING)

    def __str__(self) -> str:
        """Return the used part of a node's memory, and the part that may be used."""
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
    """A figure that was not measured on this machine for this model, and its provenance."""

    what: Text
    """Name and value of the figure."""
    provenance: Text
    """Origin of the figure: quoted, fitted, assumed, and so on."""
    source: Text
    """Source of the figure."""


class Prediction(Document):
    """Step time by cause, memory per stage by cause, and assumptions."""

    kind_of_document: ClassVar[str] = "prediction"
    schema_file: ClassVar[str | None] = "prediction.json"

    plan_digest: Text | None = None
    """Digest of the plan; None for a layout without a plan."""
    layout: Text
    """Text of the layout."""
    placement: tuple[Text, ...] = ()
    """Words of its text for stages that are uneven, or layers that do not recompute alike."""
    step_time_s: Finite
    """Seconds of a step."""
    step_time_low_s: Finite
    """Lower end of the range of the step time in seconds."""
    step_time_high_s: Finite
    """Upper end of the range of the step time in seconds."""
    step_parts: dict[Text, Finite]
    """Seconds of the critical stage by cause; their sum is step_time_s."""
    tokens_per_s: Finite
    """Trained tokens per second of all devices."""
    samples_per_s: Finite | None = None
    """Samples per second of a script's own module, whose samples are not divided into tokens; else
    None."""
    mfu: Finite
    """Model FLOPs utilization.  It counts pairs of tokens that attend to each other, and no
    recomputation."""
    unmasked_mfu: Finite = 0.0
    """The same utilization with the pairs that masks leave out, as in the figures of PaLM and
    torchtitan."""
    compile_s: Finite = 0.0
    """Seconds of compilation before the first step; they are in no step."""
    fits: Flag
    """True if the plan is predicted to fit in memory."""
    fit_probability: Finite | None = None
    """Probability that the plan fits in memory, since memory use differs from its prediction; None
    where the spread is unknown."""
    peak_memory_range_bytes: tuple[Finite, Finite] | None = None
    """Range in bytes that contains the peak of the fullest stage in 80 of 100 runs."""
    stages: tuple[StagePrediction, ...]
    """Predictions of the pipeline stages in order."""
    links: Text | None = None
    """Rates of the links between devices, where none was measured."""
    host: HostUse | None = None
    """Host memory of the fullest node, where any is used."""
    overflows: tuple[Memory, ...] = ()
    """Kinds of memory that are too small; empty if the plan fits."""
    assumptions: tuple[Assumption, ...] = ()
    """Figures that were not measured."""
    idle_devices: Count = 0
    """Devices of the cluster that no rank uses."""
    notes: tuple[Text, ...] = ()
    """Notes on the figures: idle devices, user choices without effect."""

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
        return f"{self.layout_text}: step {seconds_text(self.step_time_s)} ({span}){fits}"

    @property
    def layout_text(self) -> str:
        """Layout as it is shown and as `--layout` reads it, with the devices that are idle."""
        return _beside_idle(layout_with(self.layout, self.placement), self.idle_devices)

    @property
    def misfit(self) -> str:
        """Phrase that names the kinds of memory that are too small."""
        return f"does not fit in {' and in '.join(self.overflows) or 'memory'}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the plan's ranks, beside those of any run."""
        return dict([ALLOCATOR]) if any(stage.compacts for stage in self.stages) else {}

    @property
    def throughput(self) -> tuple[float, str]:
        """Training throughput per second, and its unit."""
        if self.samples_per_s is not None:
            return self.samples_per_s, "samples/s"
        return self.tokens_per_s, "tokens/s"

    @property
    def throughput_text(self) -> str:
        """Training throughput as users read it."""
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

    def leaving(self, devices: int) -> Self:
        """Return the prediction for a cluster of which as many devices are idle."""
        return self.model_copy(update={"idle_devices": devices}) if devices > 0 else self

    def on(self, devices: int, *, used: int, where: str = "") -> Self:
        """Return the prediction for a cluster with `devices`, of which ranks use `used`.

        `where` names the idle ones.
        """
        idle = devices - used
        if idle <= 0:
            return self
        verb = "is" if idle == 1 else "are"
        return self.leaving(idle).with_notes(f"{idle} of {devices} devices {verb} idle{where}")


class Loser(Part):
    """A configuration with one of the smallest lower bounds, and the reason why it lost."""

    layout: Text
    """Text of the configuration."""
    lower_bound_s: Finite
    """Lower bound in seconds on its step."""
    reason: Text
    """Reason why it lost."""


class Finalist(Part):
    """A configuration whose plan was simulated."""

    layout: Text
    """Text of the configuration."""
    closed_form_s: Finite
    """Seconds of a step by the closed form, which orders the first plans."""
    step_time_s: Finite
    """Simulated seconds of a step."""


class PlanProof(Part):
    """Proof about the plan that is the answer."""

    layout: Text
    """Text of the plan's layout."""
    step_time_s: Finite
    """Simulated seconds of the plan's step."""
    lower_bound_s: Finite
    """Lower bound in seconds on the step of every plan of the space."""
    gap: Finite
    """(step time - lower bound) / step time of this plan."""
    statement: Text
    """Statement of these figures in words."""


class Certificate(Document):
    """Proof that no plan of the space has a shorter simulated step."""

    kind_of_document: ClassVar[str] = "certificate"
    schema_file: ClassVar[str | None] = "certificate.json"

    format: Literal[2] = 2  # type: ignore[assignment]
    """Version of the document's types."""
    statement: Text
    """Statement of the proof in words."""
    model: Text
    """Cost model whose simulated step the proof is about."""
    solver: Text
    """Solver of the partition problems."""
    optimal: Flag
    """True if no plan has a shorter step than the fastest simulated one."""
    objective_s: Finite
    """Seconds of the shortest simulated step, of `layout`; `plan` has those of the answer."""
    lower_bound_s: Finite
    """Lower bound in seconds on the step of every plan of the space."""
    gap: Finite
    """(objective - lower bound) / objective."""
    configurations: Positive
    """Number of configurations of the search space."""
    counts: dict[Text, Count]
    """Number of configurations that each argument excludes; their sum is `configurations`."""
    looked_at: dict[Text, Count] | None = None
    """Number of entries of the search by kind of bound."""
    runners_up: tuple[Loser, ...] = ()
    """Configurations with the smallest lower bounds among the excluded ones."""
    layout: Text | None = None
    """The configuration of the fastest plan that was simulated."""
    finalists: tuple[Finalist, ...] = ()
    """Configurations whose plans were simulated, the fastest first."""
    plan: PlanProof | None = None
    """The plan that is the answer, which may be simpler than the fastest."""
    parts: Count | None = None
    """Number of parts of the cluster for which the bound holds, including the one with all devices;
    the configurations are those of the plan's part."""
    unproven_parts: Count | None = None
    """Parts of the cluster of which nothing is proven, though they may be faster by arithmetic; of
    several groups, how many with some devices of more than one were looked at for faster plans."""
    least: Literal["energy", "cost"] | None = None
    """What parts of the cluster are compared by, where it is not the step time."""
    power_limits: Count | None = None
    """Number of power limits for which the bound holds, full power among them."""

    def leaving(self, devices: int) -> Self:
        """Return the certificate of a part of a cluster, beside which as many devices are idle."""
        if devices <= 0:
            return self

        def named(entry: Any) -> Any:
            return entry.model_copy(update={"layout": _beside_idle(entry.layout, devices)})

        return self.model_copy(
            update={
                "layout": self.layout and _beside_idle(self.layout, devices),
                "plan": self.plan and named(self.plan),
                "runners_up": tuple(map(named, self.runners_up)),
                "finalists": tuple(map(named, self.finalists)),
            }
        )

    def _repr_html_(self) -> str:
        """Return the proof as notebooks show it: how many configurations fell to which argument."""
        rows = [(reason, f"{count:,}") for reason, count in self.counts.items()]
        return html_table(self.statement, ("argument", "configurations"), rows)


def _beside_idle(layout: str, devices: int) -> str:
    """Return a layout as `--layout` reads it, with the devices that it leaves idle."""
    return f"{layout} idle={devices}" if devices else layout


def compaction(stages: Sequence[StagePrediction], probability: float) -> str | None:
    """Return how likely stages fit whose usual peak exceeds device memory; None if all fit.

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
