"""The layouts that a search looks at: parallel degrees, ZeRO level, schedule and micro-batch.

The space is the product of divisors: tensor x pipeline x data = devices, micro-batches divide each
data-parallel rank's share of the global batch.  `Pins` fixes any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from planner.cluster import ClusterSpec
from planner.document import nearest
from planner.errors import DocumentError
from planner.model import ModelGraph
from planner.plan import INSIDE_OUT, Job, Layout, ScheduleName
from planner.profile import Recompute

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
SHORT_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "zero": "zero",
    "micro_batch": "micro_batch",
    "schedule": "schedule",
    "recompute": "recompute",
}
LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices that the user has made; None leaves the choice to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None


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


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def layouts(
    model: ModelGraph, cluster: ClusterSpec, job: Job, pins: Pins | None = None
) -> Iterator[Layout]:
    """Yield every layout that uses all devices and divides the batch, simplest first.

    What a backend cannot execute is not left out here: the search asks the backend and counts it.
    """
    pins = pins or Pins()
    devices = cluster.devices
    for tensor in _allowed(divisors(devices), pins.tensor):
        if tensor > _most_tensor_parallel(model):
            continue
        for pipeline in _allowed(divisors(devices // tensor), pins.pipeline):
            data = devices // tensor // pipeline
            if pipeline > len(model.chain) or (pins.data or data) != data:
                continue
            if job.global_batch % data:
                continue
            share = job.global_batch // data
            for micro_batch in _allowed(divisors(share), pins.micro_batch):
                if micro_batch > LARGEST_MICRO_BATCH and pins.micro_batch is None:
                    break
                yield from _variants(tensor, pipeline, data, micro_batch, share, pins)


def pinned_layout(cluster: ClusterSpec, job: Job, pins: Pins) -> Layout:
    """Return the one layout that pins describe; what they leave open takes the plainest value.

    Data parallelism takes the devices that are left, sharded by ZeRO-1; a micro-batch is 1 sample.
    """
    tensor, pipeline = pins.tensor or 1, pins.pipeline or 1
    data = pins.data or max(1, cluster.devices // (tensor * pipeline))
    micro_batch = pins.micro_batch or 1
    zero = (1 if data > 1 else 0) if pins.zero is None else pins.zero
    if job.global_batch % (data * micro_batch):
        raise DocumentError(
            "layout",
            f"dp={data} x micro_batch={micro_batch} does not divide the global batch of "
            f"{job.global_batch}",
        )
    if zero and data == 1:
        raise DocumentError("layout", f"zero={zero} needs dp > 1 to shard over")
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data_replicate=1 if zero else data,
        data_shard=data if zero else 1,
        zero=zero,
        schedule=pins.schedule or "1f1b",
        micro_batch=micro_batch,
        micro_batches=job.global_batch // (data * micro_batch),
    )


def _variants(
    tensor: int, pipeline: int, data: int, micro_batch: int, share: int, pins: Pins
) -> Iterator[Layout]:
    """Yield the ZeRO levels and schedules of one choice of degrees and micro-batch."""
    for zero in _allowed([0, 1, 2, 3] if data > 1 else [0], pins.zero):
        if zero and data == 1:
            continue
        for schedule in SCHEDULES if pipeline > 1 else SCHEDULES[:1]:
            if pipeline > 1 and pins.schedule not in (None, schedule):
                continue
            yield Layout(
                tensor=tensor,
                pipeline=pipeline,
                data_replicate=1 if zero else data,
                data_shard=data if zero else 1,
                zero=zero,
                schedule=schedule,
                micro_batch=micro_batch,
                micro_batches=share // micro_batch,
            )


def _allowed(values: list[int], pinned: int | None) -> list[int]:
    return values if pinned is None else [value for value in values if value == pinned]


def _most_tensor_parallel(model: ModelGraph) -> int:
    return model.architecture.heads if model.architecture else 1


def complexity(layout: Layout) -> tuple[int, ...]:
    """Order layouts by how much machinery they need; among equals the simplest wins.

    No two layouts of a space have the same complexity.
    """
    return (
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
        layout.zero,
        SCHEDULES.index(layout.schedule),
        -layout.micro_batch,
        layout.data_shard,
        *(INSIDE_OUT.index(axis) for axis in layout.order),
    )


def kind(layout: Layout) -> tuple[int, ...]:
    """Return what makes plans differ in kind: the degrees of their mesh."""
    return (
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
        layout.data,
    )


assert set(SHORT_NAMES.values()) == {field.name for field in fields(Pins)}
