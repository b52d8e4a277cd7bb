"""Remedies where no plan fits: single changes, each tried before it is named.

A pin let go, an allowance, more devices of each kind, a shorter sequence.  Whoever asks says what
it is to try one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import get_args

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Layout, loss_text
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import SHORT_NAMES, Allowance, Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import family_of
from meshwright.planner.search.space import Degrees, every_degrees, layouts, micro_batches

LAYOUTS_LOOKED_AT = 4096
"""Most layouts without a pin that are looked at, for the values that they have."""
FACTORS = (2, 4, 8, 16)
"""Factors of more devices or a shorter sequence at which a way out is looked for."""
NODE = 8
"""Devices of a node, where more than one are asked for."""
MORE: tuple[Allowance, ...] = ("offload", "compress")
"""Choices that may be allowed so that layers hold less."""


Fitting = Callable[[Request], Layout | None]
"""Return a layout of a request that fits, of those that hold least; None if there is none."""


def ways_out(request: Request, fitting: Fitting) -> str:
    """Say which single changes of a request that no plan fits would let one fit."""
    remedies = [
        *_pins_let_go(request, fitting),
        *_allowances(request, fitting),
        *_smaller_states(request, fitting),
        *_more_devices(request, fitting),
        *_shorter_sequence(request, fitting),
    ]
    if not remedies:
        return (
            f"Up to {FACTORS[-1]} times the devices, or a sequence up to {FACTORS[-1]} times "
            "shorter, does not make it fit."
        )
    return f"It would fit {', or '.join(remedies)}."


def dividing(request: Request) -> Iterator[str]:
    """Yield what pins may be, where letting one of them go leaves layouts that divide devices."""
    pins, improved = request.pins, False
    for name, field in SHORT_NAMES.items():
        pinned = getattr(pins, field)
        if pinned is None or field not in (*Degrees.__dataclass_fields__, "micro_batch"):
            continue
        open_ = replace(pins, **{field: None})  # type: ignore[arg-type]
        values: set[int] = set()
        opened = replace(request, pins=open_)
        for degrees in every_degrees(opened):
            sizes = [size for size, _ in micro_batches(opened, degrees)]
            values |= set(sizes) if field == "micro_batch" else {getattr(degrees, field)}
        if values and pinned not in values:
            improved = True
            listed = ", ".join(map(str, sorted(values)))
            yield f"{name}={pinned} stands in the way: it can be {listed}"
    for name, field in SHORT_NAMES.items() if not improved else ():
        if getattr(pins, field) is None or not hasattr(Layout, field):
            continue
        without = replace(pins, **{field: None})  # type: ignore[arg-type]
        some = islice(layouts(replace(request, pins=without)), LAYOUTS_LOOKED_AT)
        pins_of_layouts = {written_pin(layout, field): None for layout in some}
        if pins_of_layouts:
            listed = ", ".join(str(value) for value in pins_of_layouts if value is not None)
            pinned = written_pin(pins, field)
            yield f"{name}={pinned} stands in the way: it can be {listed or 'left out'}"


def _pins_let_go(request: Request, fitting: Fitting) -> Iterator[str]:
    """Yield each pin that stands in the way alone, with what would fit; all, if it takes several.

    A pinned `recompute` is the layers' own; of other pins the layout that fits says how.
    """
    pins, alone = request.pins, False
    for name, field in SHORT_NAMES.items():
        if getattr(pins, field) is None or field == "activations":
            continue
        if field == "recompute":
            for value in reversed(get_args(Recompute)):
                changed = replace(pins, recompute=value)
                if fitting(replace(request, pins=changed)):
                    alone = True
                    yield f"with recompute={value}"
                    break
            continue
        without = replace(pins, **{field: None})  # type: ignore[arg-type]
        layout = fitting(replace(request, pins=without))
        if layout is not None:
            alone = True
            written = written_pin(layout, field)
            yield f"without {name}" if written is None else f"with {name}={written}"
    free = Pins(allowed=pins.allowed)
    if not alone and pins != free and fitting(replace(request, pins=free)):
        yield "with nothing fixed"


def written_pin(layout: Layout | Pins, field: str) -> str | None:
    """Return a layout's or a pin's value as `--fix` takes it; None if it has none there."""
    # Whether its pipelines are alike is no word of a layout.
    value = None if field == "pipelines" and isinstance(layout, Layout) else getattr(layout, field)
    if field == "loss":
        return value if value == "full" else loss_text(value)
    if value is None:
        return None
    if field == "ahead":
        return "-".join(map(str, value or (0,)))
    if field == "schedule":
        return family_of(value)
    if field != "order":
        return str(value)
    names = {"tensor": "tp", "context": "cp", "data_shard": "shard", "pipeline": "pp"}
    return "-".join(names.get(axis, "replicate") for axis in value)


def _allowances(request: Request, fitting: Fitting) -> Iterator[str]:
    """Yield what may be allowed, if that helps."""
    pins = request.pins
    for word in MORE if pins.activations is None else ():
        more = replace(pins, allowed=pins.allowed | {word})
        if word not in pins.allowed and fitting(replace(request, pins=more)):
            yield f"with --allow {word}"


def _smaller_states(request: Request, fitting: Fitting) -> Iterator[str]:
    """Yield how frozen weights may be packed, or which states may be smaller, if that helps."""
    job, space = request.job, request.framework.space
    if space is None:
        return
    if job.lora is not None:
        packed = job.lora.model_copy(update={"weights": "nf4"})
        nf4 = "nf4" in space.packed_weights and not job.lora.packs_weights
        if nf4 and fitting(replace(request, job=replace(job, lora=packed))):
            yield "with --lora weights=nf4"
        return
    halves = job.precision == "bf16" and job.master_weights == "fp32"
    masters = "none" if halves and space.trains_working else job.master_weights
    eight = "adamw-8bit" if "adamw-8bit" in space.optimizers else job.optimizer
    for updated, trained in (
        (eight, job.master_weights),
        (job.optimizer, masters),
        (eight, masters),
    ):
        changed = replace(job, optimizer=updated, master_weights=trained)
        if changed != job and fitting(replace(request, job=changed)):
            words = f" --optimizer {updated}" * (updated != job.optimizer)
            words += f" --masters {trained}" * (trained != job.master_weights)
            yield f"with{words}"
            return


def _more_devices(request: Request, fitting: Fitting) -> Iterator[str]:
    """Yield how many of each kind there must be, doubled as often as needed, if that helps."""
    for factor in FACTORS:
        larger = _times(request.cluster, factor)
        if larger is not None and fitting(replace(request, cluster=larger)):
            groups = [f"{group.devices} x {group.name}" for group in larger.groups]
            yield (
                f"on {' and '.join(groups)}"
                if larger.is_mixed
                else f"on {larger.devices} such devices"
            )
            return


def _times(cluster: ClusterSpec, factor: int) -> ClusterSpec | None:
    """Return a cluster with more devices of each kind; None where their links are not known.

    One device has none: those of the catalogue's stand for them.
    """
    if not cluster.tiers:
        name, nodes = cluster.groups[0].accelerator.name, max(1, factor // NODE)
        try:
            return resolve_cluster(f"{nodes}x{factor // nodes}x{name}")
        except DocumentError:
            return None
    widest = cluster.tiers[-1]
    reach = max(widest.devices, factor * cluster.devices)
    groups = tuple(
        group.model_copy(update={"nodes": factor * group.nodes}) for group in cluster.groups
    )
    tiers = (*cluster.tiers[:-1], widest.model_copy(update={"devices": reach}))
    return cluster.model_copy(update={"groups": groups, "tiers": tiers})


def _shorter_sequence(request: Request, fitting: Fitting) -> Iterator[str]:
    """Yield the sequence that fits; what was traced has the length that it was traced at."""
    job = request.job
    for factor in FACTORS if request.model.architecture is not None else ():
        if job.seq_len % factor:
            return
        shorter = replace(job, seq_len=job.seq_len // factor)
        if fitting(replace(request, job=shorter)):
            yield f"at sequence {shorter.seq_len}"
            return
