"""What each rank measures for a profile: links, then layers, then the runtime's own costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from planner.cluster import Precision
from planner.document import Document
from planner.model import ModelGraph
from planner.profile import CollectiveCurve, LayerMeasurement, Overheads
from planner.units import Amount, Positive, Text
from profiler import layers, links
from profiler.layers import Chain
from profiler.overheads import overheads
from profiler.ranks import Tell, versions

PACKAGES = ("torch", "transformers", "numpy")


class Wanted(Document):
    """What to measure."""

    kind_of_document: ClassVar[str] = "measuring order"

    model: ModelGraph
    seq_len: Positive
    precision: Precision
    micro_batches: tuple[Positive, ...]
    tensor_degrees: tuple[Positive, ...]
    groups: dict[int, Text]
    """The link tier of groups of so many ranks."""
    links_s: Amount
    """Seconds to spend on each size of group."""
    layers_s: Amount


class Found(Document):
    """What was measured, and on what."""

    kind_of_document: ClassVar[str] = "findings"

    layers: tuple[LayerMeasurement, ...]
    collectives: tuple[CollectiveCurve, ...]
    overheads: Overheads
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
    collectives = []
    for index, (ranks, tier) in enumerate(sorted(wanted.groups.items())):
        share = 0.2 / len(wanted.groups)
        collectives += links.curves(
            links.groups_of(ranks, tier),
            device=device,
            sizes_bytes=links.sizes_up_to(_largest_message_bytes(wanted.model)),
            budget_s=wanted.links_s,
            progress=_part(tell, f"links of {ranks} ranks", index * share, share),
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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a pseudo-file
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else "cpu"


def _part(tell: Tell, doing: str, begin: float, share: float) -> Callable[[float], None]:
    def progress(done: float) -> None:
        tell(doing, begin + share * done)

    return progress


def _largest_message_bytes(model: ModelGraph) -> float:
    """Return the largest unit that data parallelism gathers or reduces, in fp32."""
    return 4.0 * max(layer.parameters for layer in model.layers)
