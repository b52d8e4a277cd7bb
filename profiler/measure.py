"""What each rank measures for a profile: links, then layers, then the runtime's own costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from planner.cluster import Precision
from planner.document import Document, Part
from planner.model import ModelGraph
from planner.profile import (
    CollectiveCurve,
    LayerMeasurement,
    MeasuredDevice,
    NodePair,
    Overheads,
)
from planner.units import Amount, Count, Positive, Text
from profiler import devices, layers, links, machine
from profiler.layers import Chain
from profiler.overheads import overheads
from profiler.ranks import Tell, versions

PACKAGES = ("torch", "transformers", "numpy")


class GroupOrder(Part):
    """Groups of ranks whose collectives are measured: `stride` apart, over a tier."""

    tier: Text
    ranks: Positive
    stride: Positive = 1
    inner: Positive = 1
    """Neighbours in the group that a faster tier joins."""


class Wanted(Document):
    """What to measure."""

    kind_of_document: ClassVar[str] = "measuring order"

    model: ModelGraph
    seq_len: Positive
    precision: Precision
    micro_batches: tuple[Positive, ...]
    tensor_degrees: tuple[Positive, ...]
    groups: tuple[GroupOrder, ...]
    first_ranks: tuple[Count, ...] = (0,)
    """Of each node."""
    links_s: Amount
    """Seconds to spend on each size of group."""
    layers_s: Amount


class Found(Document):
    """What was measured, and on what."""

    kind_of_document: ClassVar[str] = "findings"

    layers: tuple[LayerMeasurement, ...]
    collectives: tuple[CollectiveCurve, ...]
    overheads: Overheads
    devices: tuple[MeasuredDevice, ...]
    pairs: tuple[NodePair, ...]
    device: Text
    threads_per_rank: Positive
    software: dict[str, Text]


def measure(arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure as one of the ranks; plain data in and out."""
    wanted = Wanted.of(arguments)
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        exact = "high" if wanted.precision == "tf32" else "highest"
        torch.set_float32_matmul_precision(exact)
    tell("devices", 0.0)
    every_device = devices.devices(device, name=device_name(device))
    collectives = []
    for index, group in enumerate(wanted.groups):
        share = 0.2 / len(wanted.groups)
        collectives += links.curves(
            links.groups_of(group.ranks, group.tier, stride=group.stride, inner=group.inner),
            device=device,
            sizes_bytes=links.sizes_up_to(_largest_message_bytes(wanted.model)),
            budget_s=wanted.links_s,
            progress=_part(tell, f"{group.tier} of {group.ranks} ranks", index * share, share),
        )
    between = []
    if len(wanted.first_ranks) > 1:
        between = links.pairs(
            wanted.first_ranks,
            device=device,
            budget_s=wanted.links_s,
            progress=_part(tell, "pairs of nodes", 0.2, 0.0),
        )
    chains = [
        Chain(
            wanted.model,
            seq_len=wanted.seq_len,
            precision=wanted.precision,
            tensor=degree,
            device=device,
        )
        for degree in wanted.tensor_degrees
    ]
    measured = layers.measurements(
        chains,
        wanted.micro_batches,
        budget_s=wanted.layers_s,
        progress=_part(tell, "layers", 0.2, 0.65),
    )
    tell("the runtime's own costs", 0.85)
    found = Found(
        layers=tuple(measured),
        collectives=tuple(collectives),
        overheads=overheads(chains[0], wanted.model, collectives, device=device),
        devices=tuple(every_device),
        pairs=tuple(between),
        device=device_name(device),
        threads_per_rank=torch.get_num_threads(),
        software=versions(PACKAGES),
    )
    tell("done", 1.0)
    return found.model_dump(mode="json")


def device_name(device: torch.device) -> str:
    """Return what the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.processor()


def _part(tell: Tell, doing: str, begin: float, share: float) -> Callable[[float], None]:
    def progress(done: float) -> None:
        tell(doing, begin + share * done)

    return progress


def _largest_message_bytes(model: ModelGraph) -> float:
    """Return the largest unit that data parallelism gathers or reduces, in fp32."""
    return 4.0 * max(layer.parameters for layer in model.layers)
