"""Choices that the user has made, and the one layout that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from planner.cluster import ClusterSpec
from planner.document import nearest
from planner.errors import DocumentError
from planner.plan import Job, Layout, ScheduleName
from planner.profile import Recompute

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
SHORT_NAMES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "dp": "data",
    "shard": "data_shard",
    "zero": "zero",
    "micro_batch": "micro_batch",
    "schedule": "schedule",
    "recompute": "recompute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices that the user has made; None leaves the choice to the search."""

    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    pipeline: int | None = None
    data: int | None = None
    data_shard: int | None = None
    """Ranks that ZeRO divides the states among; the data axis may be a multiple of it."""
    zero: int | None = None
    micro_batch: int | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None

    def allow(self, layout: Layout) -> bool:
        """Whether a layout keeps every pin; recomputation is not the layout's."""
        pinned = (
            (self.tensor, layout.tensor),
            (self.context, layout.context),
            (self.expert, layout.expert),
            (self.pipeline, layout.pipeline),
            (self.data, layout.data),
            (self.data_shard, layout.data_shard),
            (self.zero, layout.zero),
            (self.micro_batch, layout.micro_batch),
        )
        if layout.pipeline > 1 and self.schedule not in (None, layout.schedule):
            return False
        return all(pin in (None, value) for pin, value in pinned)


def read_pins(texts: Sequence[str]) -> Pins:
    """Read `tp=8`, `pp=4,zero=3`, ... as the command line gives them.

    >>> read_pins(["tp=8", "zero=3,recompute=full"]).recompute
    'full'
    """
    values: dict[str, int | str] = {}
    for item in (part.strip() for text in texts for part in text.split(",")):
        name, sign, value = item.partition("=")
        field = SHORT_NAMES.get(name) or (name if name in SHORT_NAMES.values() else None)
        if not sign or field is None:
            raise DocumentError("fix", f"'{item}': write NAME=VALUE; {nearest(name, _names())}")
        if field in values:
            raise DocumentError("fix", f"'{item}': {name} is given twice")
        values[field] = _pin_value(field, value, item)
    return Pins(**values)  # type: ignore[arg-type]


def _names() -> list[str]:
    return list(SHORT_NAMES)


def _pin_value(field: str, value: str, item: str) -> int | str:
    words = {"schedule": SCHEDULES, "recompute": ("none", "selective", "full")}.get(field)
    if words is not None:
        if value not in words:
            raise DocumentError("fix", f"'{item}': {field} is one of {', '.join(words)}")
        return value
    least = 0 if field == "zero" else 1
    if not value.isdecimal() or int(value) < least or (field == "zero" and int(value) > 3):
        bounds = "0, 1, 2 or 3" if field == "zero" else "a whole number from 1"
        raise DocumentError("fix", f"'{item}': {field} is {bounds}")
    return int(value)


def pinned_layout(cluster: ClusterSpec, job: Job, pins: Pins) -> Layout:
    """Return the one layout that pins describe; what they leave open takes the plainest value.

    Data parallelism takes the devices that are left, sharded by ZeRO-1; a micro-batch is 1 sample.
    """
    tensor, pipeline = pins.tensor or 1, pins.pipeline or 1
    context, expert = pins.context or 1, pins.expert or 1
    data = pins.data or max(1, cluster.devices // (tensor * context * pipeline))
    micro_batch = pins.micro_batch or 1
    zero = (1 if data > 1 else 0) if pins.zero is None else pins.zero
    shard = (pins.data_shard or data) if zero else 1
    if job.global_batch % (data * micro_batch):
        raise DocumentError(
            "layout",
            f"dp={data} x micro_batch={micro_batch} does not divide the global batch of "
            f"{job.global_batch}",
        )
    if zero and data == 1:
        raise DocumentError("layout", f"zero={zero} needs dp > 1 to shard over")
    if data % shard or (zero and shard == 1):
        raise DocumentError("layout", f"shard={shard} must divide dp={data} and exceed 1")
    if pins.data_shard and not zero and pins.data_shard > 1:
        raise DocumentError("layout", f"shard={pins.data_shard} needs zero=1, 2 or 3")
    if (shard * context * tensor) % expert:
        raise DocumentError(
            "layout", f"ep={expert} does not divide shard x cp x tp = {shard * context * tensor}"
        )
    return Layout(
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        data_replicate=data // shard,
        data_shard=shard,
        zero=zero,
        schedule=pins.schedule or "1f1b",
        micro_batch=micro_batch,
        micro_batches=job.global_batch // (data * micro_batch),
    )


assert set(SHORT_NAMES.values()) == {field.name for field in fields(Pins)}
