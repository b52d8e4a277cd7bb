"""Measurements of each rank for a profile: links, then layers, then the runtime's own costs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.model import FileDigest, ModelGraph
from meshwright.planner.documents.profile import (
    ChunkedLoss,
    CollectiveCurve,
    LayerMeasurement,
    MeasuredDevice,
    NodePair,
    Overheads,
    Recompute,
    StageMeasurement,
)
from meshwright.planner.documents.units import Amount, Count, Flag, Line, Positive, Text
from meshwright.profiler import devices, layers, links, machine
from meshwright.profiler.cache import Parts
from meshwright.profiler.chain import WHOLE, Case, Chain, Division
from meshwright.profiler.clock import slowest
from meshwright.profiler.interference import Watch
from meshwright.profiler.layers import HeadCase, heads
from meshwright.profiler.overheads import overheads
from meshwright.profiler.stages import stages
from meshwright.profiler.start_ranks import Tell, versions
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.engine.script_module import OwnScript

OVERHEADS_S = 12.0
"""Approximate seconds of measuring the runtime's own costs; only the progress bar needs them."""
PACKAGES = ("torch", "transformers", "numpy")


class GroupOrder(Part):
    """Groups of ranks whose collectives are measured: `stride` apart, over a tier."""

    tier: Text
    ranks: Positive
    stride: Positive = 1
    inner: Positive = 1
    """Neighbours in the group that a faster tier joins."""


class CaseOrder(Part):
    """One setting of the layers."""

    tensor: Positive
    context: Positive = 1
    expert: Positive = 1
    micro_batch: Positive
    recompute: Recompute
    compiled: Flag = False


class HeadOrder(Part):
    """A head whose loss is computed in chunks."""

    tensor: Positive
    context: Positive = 1
    expert: Positive = 1
    micro_batch: Positive
    loss: ChunkedLoss


class StageOrder(Part):
    """A stage to run as a whole."""

    case: CaseOrder
    layers: tuple[Text, ...]


class Noise(Part):
    """Disturbance of one rank while its layers were measured."""

    rank: Count
    waited: Amount
    """Share of the time in which the rank was ready and others ran."""
    drift: Amount
    """Relative increase of the time of later products over the first ones."""


class MeasurementRequest(Document):
    """Request for measurements."""

    kind_of_document: ClassVar[str] = "measuring order"

    model: ModelGraph
    script: Text | None = None
    """`script.py:build` that builds the module, if a script does; `files` are their digests."""
    files: dict[Line, FileDigest] | None = None
    seq_len: Positive
    precision: Precision
    cases: tuple[CaseOrder, ...]
    """Settings of the layers, most valuable first."""
    least: Positive
    """Number of first cases that are measured whatever time they take."""
    groups: tuple[GroupOrder, ...]
    first_ranks: tuple[Count, ...] = (0,)
    """First rank of each node."""
    group_s: Amount
    """Seconds to spend on each size of group."""
    pairs_s: Amount
    layers_s: Amount
    heads: tuple[HeadOrder, ...] = ()
    stages: tuple[StageOrder, ...] = ()
    stages_s: Amount = 0.0
    kept: Text | None = None
    """Folder on every node for measurements so far."""


class Measurements(Document):
    """Measurements, and the devices that they were made on."""

    kind_of_document: ClassVar[str] = "findings"

    layers: tuple[LayerMeasurement, ...]
    stages: tuple[StageMeasurement, ...]
    collectives: tuple[CollectiveCurve, ...]
    overheads: Overheads
    devices: tuple[MeasuredDevice, ...]
    pairs: tuple[NodePair, ...]
    noise: tuple[Noise, ...]
    device: Text
    threads_per_rank: Positive
    software: dict[str, Text]


def measure(arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure as one of the ranks; plain data in and out."""
    wanted = MeasurementRequest.of(arguments)
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        exact = "high" if wanted.precision == "tf32" else "highest"
        torch.set_float32_matmul_precision(exact)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    parts = Parts(wanted.kept, rank, lambda value: -slowest([-value])[0])
    links_s = wanted.group_s * len(wanted.groups)
    # A network is not as its nodes were yesterday: what goes over it is always measured.
    between_nodes = len(wanted.first_ranks) > 1
    pairs_s = wanted.pairs_s if between_nodes else 0.0
    layers_s = wanted.layers_s + wanted.stages_s
    whole_s = links_s + pairs_s + layers_s + OVERHEADS_S

    tell("devices", 0.0)
    every_device = parts.once(
        "devices", lambda: _plain(devices.devices(device, name=device_name(device)))
    )
    collectives: list[CollectiveCurve] = []
    for index, group in enumerate(wanted.groups):

        def curves(group: GroupOrder = group, index: int = index) -> Any:
            return _plain(
                links.curves(
                    links.groups_of(
                        group.ranks, group.tier, stride=group.stride, inner=group.inner
                    ),
                    device=device,
                    sizes_bytes=links.sizes_up_to(_largest_message_bytes(wanted.model)),
                    budget_s=wanted.group_s,
                    progress=_part(
                        tell,
                        f"{group.tier} of {group.ranks} ranks",
                        index * wanted.group_s / whole_s,
                        wanted.group_s / whole_s,
                    ),
                )
            )

        name = f"links {group.tier} {group.ranks} {group.stride} {group.inner}"
        found_curves = parts.once(name, curves, keep=not between_nodes)
        collectives += [CollectiveCurve.model_validate(c) for c in found_curves]
    between: list[Any] = []
    if between_nodes:
        between = _plain(
            links.pairs(
                wanted.first_ranks,
                device=device,
                budget_s=wanted.pairs_s,
                progress=_part(tell, "pairs of nodes", links_s / whole_s, wanted.pairs_s / whole_s),
            )
        )
    cases = [Case(**case.model_dump()) for case in wanted.cases]
    of_heads = [_head_case(order) for order in wanted.heads]
    script = None
    if wanted.script is not None:
        script = OwnScript.of_file(wanted.script, wanted.files)
    chains = [
        Chain(
            wanted.model,
            script=script,
            seq_len=wanted.seq_len,
            precision=wanted.precision,
            tensor=division.tensor,
            context=division.context,
            expert=division.expert,
            device=device,
        )
        for division in sorted(
            {WHOLE, *(case.division for case in cases), *(head.division for head in of_heads)}
        )
    ]
    # Bytes are counted after collecting garbage, which takes a fifth of a second where it goes
    # through all that torch made; this process ends with what it measures.
    gc.collect()
    gc.freeze()
    watch = Watch(device)
    measured_layers = layers.measurements(
        chains,
        cases,
        budget_s=wanted.layers_s,
        least=wanted.least,
        parts=parts,
        watch=watch,
        progress=_part(tell, "layers", (links_s + pairs_s) / whole_s, wanted.layers_s / whole_s),
    )
    found_heads = parts.once("heads", lambda: _plain(heads(chains, of_heads)))
    found_stages = parts.once(
        "stages",
        lambda: _plain(
            stages(
                [(Case(**order.case.model_dump()), order.layers) for order in wanted.stages],
                wanted.model,
                script=script,
                seq_len=wanted.seq_len,
                precision=wanted.precision,
                device=device,
                budget_s=wanted.stages_s,
                progress=_part(
                    tell,
                    "stages",
                    (links_s + pairs_s + wanted.layers_s) / whole_s,
                    wanted.stages_s / whole_s,
                ),
            )
        ),
    )
    own_noise = Noise(rank=rank, waited=watch.waiting_share(), drift=watch.drift())
    every_noise = [own_noise]
    if world > 1:
        every_noise = [Noise.model_validate(n) for n in all_gather_json(own_noise.model_dump())]
    tell("the runtime's own costs", 1.0 - OVERHEADS_S / whole_s)
    own_costs = parts.once(
        "overheads",
        lambda: overheads(chains[0], wanted.model, collectives, device=device).model_dump(),
        keep=not between_nodes,
    )
    measurements = Measurements(
        layers=(*measured_layers, *map(LayerMeasurement.model_validate, found_heads)),
        stages=tuple(StageMeasurement.model_validate(s) for s in found_stages),
        collectives=tuple(collectives),
        overheads=Overheads.model_validate(own_costs),
        devices=tuple(MeasuredDevice.model_validate(d) for d in every_device),
        pairs=tuple(NodePair.model_validate(p) for p in between),
        noise=tuple(every_noise),
        device=device_name(device),
        threads_per_rank=torch.get_num_threads(),
        software=versions(PACKAGES),
    )
    tell("done", 1.0)
    return measurements.model_dump(mode="json")


def _head_case(order: HeadOrder) -> HeadCase:
    division = Division(tensor=order.tensor, context=order.context, expert=order.expert)
    return HeadCase(division=division, micro_batch=order.micro_batch, loss=order.loss)


def device_name(device: torch.device) -> str:
    """Return the device's name for itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.processor()


def _plain(documents: Sequence[Part]) -> list[dict[str, Any]]:
    return [document.model_dump(mode="json") for document in documents]


def _part(tell: Tell, doing: str, begin: float, share: float) -> Callable[[float], None]:
    def progress(done: float) -> None:
        tell(doing, begin + share * done)

    return progress


def _largest_message_bytes(model: ModelGraph) -> float:
    """Return the largest unit that data parallelism gathers or reduces, in fp32."""
    return 4.0 * max(layer.parameters for layer in model.layers)
