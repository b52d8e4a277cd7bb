"""ClusterSpec: the machine, as its vendor quotes it.

Rates count one direction and one device.  Figures quoted here are never measured ones: those stand
in a Profile.  Fractions of a quoted rate that kernels or collectives reach say where they are from.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.units import (
    MOST_DEVICES,
    Amount,
    Count,
    Devices,
    Fraction,
    Line,
    Name,
    Positive,
    Rate,
    Text,
)
from meshwright.planner.errors import DocumentError

AcceleratorKind = Literal["cuda", "rocm", "gaudi", "xpu", "npu", "tpu", "trainium", "cpu"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
EIGHT_BITS = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose products are in 8 bits and fewer."""
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
]
Provenance = Literal["measured", "interpolated", "fitted", "quoted"]


class DeviceCurve(Part):
    """What kernels reach: seconds = launch_s + max(FLOPs / (f P), bytes / (g W)).

    P is the peak of the precision, W the memory bandwidth; f and g are the fractions here.  The
    larger term counts, since a kernel reads memory while it computes.  The fractions of attention
    count causal FLOPs, half of all pairs of tokens.
    """

    launch_s: Amount
    matmul: Fraction
    attention_forward: Fraction
    attention_backward: Fraction
    memory: Fraction
    spread: Amount
    """Relative error of this description where it was fitted, else a guess at it (0.1: 10 %)."""
    provenance: Provenance
    source: Text


AttentionKernel = Literal["fa1", "fa2", "fa3"]


class KernelRates(Part):
    """What kernels of training steps reach on a device, beside the curve of single kernels."""

    sustained: Annotated[float, Field(gt=0, le=1.2)] = 0.9
    """Rate of matrix units through a step of modules as PyTorch runs them, over that of the short
    kernels that the curve is fitted to: power limits lower the clock."""
    sustained_tuned: Annotated[float, Field(gt=0, le=1.2)] = 0.95
    """The same of frameworks with their own kernels.  Above 1 on cards whose sheets quote a lower
    clock than they hold."""
    sustained_basis: Text | None = None
    """What these two are fitted to, or derived from; None where they are the usual."""
    attention: dict[AttentionKernel, Rate] = {"fa1": 0.65, "fa2": 1.0, "fa3": 1.0}  # noqa: RUF012 - frozen
    """Rate of each generation of fused attention over that of the curve (Dao, 2023,
    arXiv:2307.08691; Shah et al., 2024, arXiv:2407.08608)."""
    attention_half_tokens: Positive = 800
    """Tokens of a sequence at which attention has half of its rate on endless ones."""
    eight_bit: Rate = 0.925
    """Share of the curve's fraction that large products in 8 bits reach of their own peak."""
    eight_bit_attention: dict[Literal["fp8", "mxfp8"], tuple[Rate, Rate]] = Field(
        default_factory=dict
    )
    """Rate of fused attention in 8 bits over that in 16, causal, of 8,192 tokens and heads of 128,
    forward and backward; of a device that has none, nothing is known."""
    four_bit: Rate | None = None
    """The same of products in 4 bits, of the peak in 8 bits; None: there are none."""


class Accelerator(Part):
    """One device."""

    name: Line
    kind: AcceleratorKind = "cuda"
    memory_bytes: Positive
    """What a program can use: what CUDA reports as total, less than label and driver say."""
    peak_flops: dict[Precision, Rate]
    """Dense, fp32 accumulation."""
    memory_bytes_per_s: Rate
    curve: DeviceCurve
    kernels: KernelRates = KernelRates()
    architecture: Name | None = None
    """Generation, which figures of frameworks may depend on: ampere, hopper."""
    tdp_w: Amount | None = None
    multiprocessors: Positive | None = None
    """Units that kernels divide: streaming multiprocessors, or compute units of AMD."""
    sources: dict[str, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.peak_flops:
            raise ValueError("peak_flops is empty; give at least fp32")
        return self


class NarrowGroup(Part):
    """What collectives reach among few of a tier's devices.

    Of a switch fewer ports are busy, and it sums for whole nodes alone; through a host's memory
    few pairs have it for themselves.
    """

    members: Devices
    """At most."""
    fractions: dict[Collective, Amount]


class LinkTier(Part):
    """One level of the interconnect, as one device sees it.

    `bytes_per_s` counts one direction while every peer sends too.  Vendors print both directions
    together: an NVLink 4 sheet says 900 GB/s, which is 450e9 here.
    """

    name: Name
    devices: Devices
    """How many devices reach each other over this tier or a faster one."""
    latency_s: Amount
    """Of one round of a ring: an all-reduce of n devices has 2 (n - 1), others n - 1."""
    bytes_per_s: Rate
    peer_bytes_per_s: Rate | None = None
    """To one peer, on a mesh without a switch; `bytes_per_s` then needs all peers at once."""
    fractions: dict[Collective, Amount] = Field(default_factory=dict)
    """Bus bandwidth of each collective over `bytes_per_s`; sums in the switch can pass 1."""
    narrow: tuple[NarrowGroup, ...] = ()
    """Fractions among fewer members, fewest first."""
    start_s: Amount = 0.0
    """Of every collective, before its first round."""
    least_round_s: Amount = 0.0
    """Of a round on a faster tier, where the ring goes over this one."""
    oversubscription: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    """Rate of all devices' own links together over that of what joins them: 4 leaves each a quarter
    where all send at once."""
    provenance: Provenance = "quoted"
    source: Text | None = None

    @property
    def rate_text(self) -> str:
        """Name and rate, as people read it."""
        shared = (
            f" ({self.oversubscription:g}:1 oversubscribed)" if self.oversubscription > 1 else ""
        )
        return f"{self.name} {self.bytes_per_s / 1e9:.4g} GB/s{shared}"


class HostSpeed(Part):
    """How fast a thread of a node's host starts work: Python around layers, and kernels.

    Both are seconds of fixed programs (planner/catalog/machine_figures.py), which a framework's
    document has of the host on which its own seconds were measured.
    """

    call_s: Rate
    """Of a module in Python, as torch calls one."""
    launch_s: Rate
    """Of an operation on a few numbers, started from Python."""
    provenance: Provenance = "quoted"
    source: Text = ""


class DeviceGroup(Part):
    """Nodes that are alike.

    Devices of a cluster are numbered group by group, node by node.
    """

    name: Line
    accelerator: Accelerator
    nodes: Devices
    devices_per_node: Devices
    host_memory_bytes: Count | None = None
    """Of one node."""
    host_memory_range_bytes: tuple[Count, Count] | None = None
    """What such nodes have, where this one's memory is assumed.  None where it is known, as it is
    too outside of these."""
    host_link_bytes_per_s: Rate | None = None
    """Of one device, one direction."""
    host_memory_bytes_per_s: Rate | None = None
    """Of one node."""
    host_speed: HostSpeed | None = None
    """None: as that on which the framework's seconds of the host were measured, or slower."""
    host_link_devices: Devices = 1
    """Neighbouring devices that share one such link, behind a switch."""
    tiers: tuple[LinkTier, ...] | None = None
    """Links inside the group where they are not the cluster's: fastest first."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        extents = [tier.devices for tier in self.tiers or ()]
        if extents != sorted(extents) or any(extent > self.devices for extent in extents):
            raise ValueError(
                f"tiers reach {extents} devices; order them fastest first, widening, none beyond "
                f"the {self.devices} of the group"
            )
        return self

    @property
    def devices(self) -> int:
        """Devices in the group."""
        return self.nodes * self.devices_per_node


class Price(Part):
    """A dated rent for the whole cluster."""

    usd_per_device_hour: Amount
    commitment: Literal["on_demand", "reserved", "spot", "owned"]
    date: Text
    source: Text


class ClusterSpec(Document):
    """Device groups joined by link tiers, fastest first."""

    kind_of_document: ClassVar[str] = "cluster"

    name: Line
    groups: tuple[DeviceGroup, ...]
    tiers: tuple[LinkTier, ...]
    price: Price | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.groups:
            raise ValueError("groups is empty; give at least one device group")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups are named {names}; give every group a name of its own")
        if self.devices > MOST_DEVICES:
            raise ValueError(f"has {self.devices} devices; give at most {MOST_DEVICES:,}")
        extents = [tier.devices for tier in self.tiers]
        if extents != sorted(extents):
            raise ValueError(f"tiers reach {extents} devices; order them fastest first, widening")
        if self.devices > 1 and (not extents or extents[-1] < self.devices):
            raise ValueError(
                f"tiers reach {extents[-1] if extents else 0} devices, the groups have "
                f"{self.devices}; add the tier that joins them"
            )
        return self

    @property
    def devices(self) -> int:
        """Devices in all groups."""
        return sum(group.devices for group in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether devices differ between groups."""
        return any(group.accelerator != self.groups[0].accelerator for group in self.groups)

    @property
    def links_text(self) -> str:
        """Rates of all links, of each device and direction; empty where there are none."""
        inside = (tier for group in self.groups for tier in group.tiers or ())
        every = (*inside, *self.tiers)
        if not every:
            return ""
        shown = ", ".join(dict.fromkeys(tier.rate_text for tier in every))
        racks = [part for tier in every for part in (tier.source or "").split("; assumed: ")[1:]]
        rack = f"; assumed: {racks[0]}" if racks else ""
        return f"{shown} a device and direction{rack}"

    def precision_for(self, wanted: Precision | None) -> Precision:
        """Return the precision to train in, which is what all devices have units for.

        Where none is wanted: bf16, fp16 on devices older than it, fp32 on CPUs.  Devices without
        units for bf16 compute in it all the same, several times slower than in fp16.
        """
        devices = [group.accelerator for group in self.groups]
        slow = next((d.name for d in devices if "bf16" not in d.peak_flops), None)
        if wanted is None:
            return "fp32" if devices[0].kind == "cpu" else "fp16" if slow else "bf16"
        if wanted == "bf16" and slow is not None:
            raise DocumentError(
                "precision",
                f"is bf16, which {slow} has no units for; use {self.precision_for(None)}",
            )
        return wanted

    def part(self, groups: tuple[DeviceGroup, ...]) -> ClusterSpec:
        """Return the cluster that some of its groups are, with the links that they can use."""
        tiers = groups[0].tiers if len(groups) == 1 else None
        inside = tiers or ()
        reach = inside[-1].devices if inside else 0
        return ClusterSpec(
            name=" + ".join(group.name for group in groups)[:200],
            groups=groups,
            tiers=(*inside, *(tier for tier in self.tiers if tier.devices > reach)),
        )

    def smaller(self, *, nodes: int, devices_per_node: int) -> ClusterSpec:
        """Return the cluster that some nodes of its only group are, and some devices of each.

        Links keep their rates; one that joins no more devices than a faster one is left out.
        """
        [group] = self.groups
        shape: dict[str, object] = {"nodes": nodes, "devices_per_node": devices_per_node}

        def fewer(tiers: tuple[LinkTier, ...]) -> tuple[LinkTier, ...]:
            kept: dict[int, LinkTier] = {}
            for tier in tiers:
                if tier.devices <= group.devices_per_node:
                    reach = min(tier.devices, devices_per_node)
                else:
                    reach = tier.devices * devices_per_node // group.devices_per_node
                reach = min(reach, nodes * devices_per_node)
                if reach > max(kept, default=1):
                    kept[reach] = tier.model_copy(update={"devices": reach})
            return tuple(kept.values())

        inside = None if group.tiers is None else fewer(group.tiers)
        if group.host_memory_bytes is not None and group.host_memory_range_bytes is not None:
            # What is assumed of a host is a share for each device.
            sizes = (group.host_memory_bytes, *group.host_memory_range_bytes)
            host, *span = (size * devices_per_node // group.devices_per_node for size in sizes)
            shape |= {"host_memory_bytes": host, "host_memory_range_bytes": (span[0], span[1])}
        return ClusterSpec(
            name=f"{self.name}:{nodes}x{devices_per_node}"[-200:],
            groups=(group.model_copy(update={**shape, "tiers": inside}),),
            tiers=fewer(self.tiers),
            price=self.price,
        )
