"""ClusterSpec: the machine, as its vendor quotes it.

Rates count one direction and one device.  Figures quoted here are never measured ones: those are in
a Profile.  Fractions of a quoted rate that kernels or collectives reach carry their source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

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
PowerLimit = Annotated[float, Field(ge=0.6, le=1, strict=True, allow_inf_nan=False)]
"""Share of a device's design power that it may draw; below, no source knows its rate."""


class DeviceCurve(Part):
    """Rates that kernels reach: seconds = launch_s + max(FLOPs / (f P), bytes / (g W)).

    P is the peak of the precision, W the memory bandwidth; f and g are the fractions here.  The
    larger term counts, since a kernel reads memory while it computes.  The fractions of attention
    count causal FLOPs, half of all pairs of tokens.
    """

    launch_s: Amount
    """Seconds to start one kernel."""
    matmul: Fraction
    """Fraction f of the peak that matrix products reach."""
    attention_forward: Fraction
    """Fraction f of the peak that fused attention reaches in forward."""
    attention_backward: Fraction
    """Fraction f of the peak that fused attention reaches in backward."""
    memory: Fraction
    """Fraction g of the memory bandwidth that kernels reach."""
    spread: Amount
    """Relative error of the curve (0.1: 10 %): fitted where the curve was fitted, else a guess."""
    provenance: Provenance
    """Origin of these figures."""
    source: Text
    """Source of these figures, such as a benchmark or a paper."""


AttentionKernel = Literal["fa1", "fa2", "fa3"]


class KernelRates(Part):
    """Rates of kernels inside of training steps, relative to the curve of single kernels."""

    sustained: Annotated[float, Field(gt=0, le=1.2)] = 0.9
    """Rate of matrix units through a step of modules as PyTorch runs them, over that of the short
    kernels that the curve is fitted to: power limits lower the clock."""
    sustained_tuned: Annotated[float, Field(gt=0, le=1.2)] = 0.95
    """The same ratio for frameworks with kernels of their own.  It is above 1 for cards that run at
    a higher clock than their sheets quote."""
    sustained_basis: Text | None = None
    """Source of the two ratios; None where they are the defaults."""
    attention: dict[AttentionKernel, Rate] = {"fa1": 0.65, "fa2": 1.0, "fa3": 1.0}  # noqa: RUF012 - frozen
    """Rate of each generation of fused attention over that of the curve (Dao, 2023,
    arXiv:2307.08691; Shah et al., 2024, arXiv:2407.08608)."""
    attention_half_tokens: Positive = 800
    """Sequence length in tokens at which attention reaches half of its highest rate."""
    eight_bit: Rate = 0.925
    """Share of the curve's fraction that large 8-bit products reach, relative to the 8-bit peak."""
    eight_bit_attention: dict[Literal["fp8", "mxfp8"], tuple[Rate, Rate]] = Field(
        default_factory=dict
    )
    """Rate of fused attention in 8 bits over its rate in 16 bits, forward and backward: causal,
    8,192 tokens, heads of 128.  Empty where no measurement is known."""
    four_bit: Rate | None = None
    """Share of the curve's fraction that 4-bit products reach, relative to the 8-bit peak; None
    where the device has no 4-bit products."""


class Accelerator(Part):
    """One device type."""

    name: Line
    """Name of the device type, such as H100-SXM-80GB."""
    kind: AcceleratorKind = "cuda"
    """Kind of the device: the backend of its programs."""
    memory_bytes: Positive
    """Bytes that a program can use: the total that CUDA reports, which is less than the label and
    the driver say."""
    peak_flops: dict[Precision, Rate]
    """Peak FLOP per second by precision: dense, with fp32 accumulation."""
    memory_bytes_per_s: Rate
    """Bytes per second of device memory."""
    curve: DeviceCurve
    """Rates that single kernels reach."""
    kernels: KernelRates = KernelRates.model_construct()
    """Rates that kernels reach inside of training steps."""
    architecture: Name | None = None
    """Generation, such as ampere or hopper; figures of frameworks may depend on it."""
    tdp_w: Amount | None = None
    """Thermal design power in watts; None: not known."""
    power_limit: PowerLimit | None = None
    """Share of the design power that the device may draw: its products run at the 0.75th power of
    that share of their rate.  None: all of it, unless a plan is searched for least energy, which
    compares limits."""
    multiprocessors: Positive | None = None
    """Number of streaming multiprocessors, or of compute units on AMD, among which a kernel's work
    is divided."""
    sources: dict[str, Text] = Field(default_factory=dict)
    """Sources of these figures, by field."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.peak_flops:
            raise ValueError("peak_flops is empty; give at least fp32")
        return self


class NarrowGroup(Part):
    """Bandwidth fractions of collectives among few of a tier's devices.

    Fewer ports of a switch are busy, and a switch sums for whole nodes only.  Where traffic crosses
    a host's memory, few pairs have the memory to themselves.
    """

    members: Devices
    """Largest number of members."""
    fractions: dict[Collective, Amount]
    """Bus bandwidth of each collective over the tier's `bytes_per_s`."""


class LinkTier(Part):
    """One level of the interconnect, as one device sees it.

    `bytes_per_s` counts one direction while every peer sends too.  Vendors print both directions
    together: an NVLink 4 sheet says 900 GB/s, which is 450e9 here.
    """

    name: Name
    """Name of the tier, such as nvlink or infiniband."""
    devices: Devices
    """Number of devices that reach each other over this tier or a faster one."""
    latency_s: Amount
    """Seconds of latency of one round of a ring; an all-reduce of n devices has 2 (n - 1) rounds,
    other collectives have n - 1."""
    bytes_per_s: Rate
    """Bytes per second of one device in one direction while every peer sends too."""
    peer_bytes_per_s: Rate | None = None
    """Bytes per second to one peer on a mesh without a switch; reaching `bytes_per_s` then needs
    all peers at once."""
    fractions: dict[Collective, Amount] = Field(default_factory=dict)
    """Bus bandwidth of each collective over `bytes_per_s`; above 1 where the switch sums."""
    narrow: tuple[NarrowGroup, ...] = ()
    """Fractions for groups with fewer members, the fewest first."""
    start_s: Amount = 0.0
    """Seconds before the first round of every collective."""
    least_round_s: Amount = 0.0
    """Minimum seconds of a round on a faster tier where the ring also crosses this tier."""
    oversubscription: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    """Total rate of all devices' links over the rate of the links that join them: with 4, each
    device has a quarter of its rate where all send at once."""
    provenance: Provenance = "quoted"
    """Origin of the rate and the latency."""
    source: Text | None = None
    """Source of the rate and the latency."""

    @property
    def rate_text(self) -> str:
        """Name and rate of the tier as users read them."""
        shared = (
            f" ({self.oversubscription:g}:1 oversubscribed)" if self.oversubscription > 1 else ""
        )
        return f"{self.name} {self.bytes_per_s / 1e9:.4g} GB/s{shared}"


FASTEST_CALL_S, SLOWEST_CALL_S = 1e-9, 1e-3


class HostSpeed(Part):
    """Seconds of one thread of a host for two fixed programs, which tell how fast it starts work.

    The programs are in planner/catalog/machine_figures.py.  A framework's document has the same
    figures of the host on which its own seconds were measured.
    """

    call_s: Rate
    """Seconds of a call of a module in Python, as torch calls one."""
    launch_s: Rate
    """Seconds of an operation on a few numbers, started from Python."""
    provenance: Provenance = "quoted"
    """Origin of both figures: `measured` on this host, or `quoted`."""
    source: Text = ""
    """Program and date of the measurement."""

    @field_validator("call_s", "launch_s")
    @classmethod
    def _plausible(cls, seconds: float) -> float:
        """A processor needs some cycles, and no host takes milliseconds."""
        if not FASTEST_CALL_S <= seconds <= SLOWEST_CALL_S:
            raise ValueError(
                f"is {seconds:g} seconds; give between {FASTEST_CALL_S:g} and {SLOWEST_CALL_S:g}"
            )
        return seconds


class DeviceGroup(Part):
    """Nodes that are alike.

    Devices of a cluster are numbered group by group, node by node.
    """

    name: Line
    """Name of the group, unique in the cluster."""
    accelerator: Accelerator
    """Device type of all devices of the group."""
    nodes: Devices
    """Number of nodes."""
    devices_per_node: Devices
    """Number of devices on each node."""
    host_memory_bytes: Count | None = None
    """Bytes of host memory of one node."""
    host_memory_range_bytes: tuple[Count, Count] | None = None
    """Smallest and largest host memory in bytes of such nodes, where this node's memory is assumed;
    else None.  Memory outside of this range counts as known."""
    host_link_bytes_per_s: Rate | None = None
    """Bytes per second between one device and its host, in one direction."""
    host_memory_bytes_per_s: Rate | None = None
    """Memory bandwidth of one node's host in bytes per second."""
    host_speed: HostSpeed | None = None
    """Seconds of a thread of a node's host for two fixed programs; None where nobody measured."""
    host_link_devices: Devices = 1
    """Number of neighbouring devices behind one switch that share a link to the host."""
    tiers: tuple[LinkTier, ...] | None = None
    """Links inside the group, the fastest first, where they differ from the cluster's."""

    @classmethod
    def usual_names(cls) -> Mapping[str, str]:
        """Return ways out for the counts of nodes that others write."""
        names = ("count", "gpus", "num_gpus", "size")
        return dict.fromkeys(names, "write 'nodes' and 'devices_per_node'")

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

    def smaller(self, nodes: int, devices_per_node: int) -> DeviceGroup:
        """Return some nodes of the group, and some devices of each."""
        shape: dict[str, object] = {"nodes": nodes, "devices_per_node": devices_per_node}
        if self.tiers is not None:
            shape["tiers"] = self.fewer_tiers(self.tiers, nodes, devices_per_node)
        if self.host_memory_bytes is not None and self.host_memory_range_bytes is not None:
            # What is assumed of a host is a share for each device.
            sizes = (self.host_memory_bytes, *self.host_memory_range_bytes)
            host, *span = (size * devices_per_node // self.devices_per_node for size in sizes)
            shape |= {"host_memory_bytes": host, "host_memory_range_bytes": (span[0], span[1])}
        return self.model_copy(update=shape)

    def fewer_tiers(
        self, tiers: tuple[LinkTier, ...], nodes: int, devices_per_node: int
    ) -> tuple[LinkTier, ...]:
        """Return links of the group where it has fewer nodes and devices."""
        kept: dict[int, LinkTier] = {}
        for tier in tiers:
            if tier.devices <= self.devices_per_node:
                reach = min(tier.devices, devices_per_node)
            else:
                reach = tier.devices * devices_per_node // self.devices_per_node
            reach = min(reach, nodes * devices_per_node)
            if reach > max(kept, default=1):
                kept[reach] = tier.model_copy(update={"devices": reach})
        return tuple(kept.values())


class Price(Part):
    """A dated rent for the whole cluster."""

    usd_per_device_hour: Amount
    """US dollars for one device and hour."""
    commitment: Literal["on_demand", "reserved", "spot", "owned"]
    """Kind of contract."""
    date: Text
    """Date of the price."""
    source: Text
    """Source of the price."""


class ClusterSpec(Document):
    """Device groups joined by link tiers, fastest first."""

    kind_of_document: ClassVar[str] = "cluster"
    schema_file: ClassVar[str | None] = "cluster.json"

    name: Line
    """Name of the cluster."""
    groups: tuple[DeviceGroup, ...]
    """Device groups; one where all nodes are alike."""
    tiers: tuple[LinkTier, ...]
    """Links between devices, the fastest first; the last tier joins all devices."""
    price: Price | None = None
    """Rent of the whole cluster; None: not known."""

    @classmethod
    def usual_names(cls) -> Mapping[str, str]:
        """Return ways out for keys that others write at the top of a cluster."""
        return {
            **dict.fromkeys(("links", "network", "interconnect"), "links are 'tiers'"),
            **dict.fromkeys(
                ("count", "nodes", "gpus", "devices", "accelerator"), "it is of one of the 'groups'"
            ),
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.groups:
            raise ValueError("groups is empty; give at least one device group")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups are named {names}; give every group its own name")
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
        """True if device types differ between groups."""
        return any(group.accelerator != self.groups[0].accelerator for group in self.groups)

    @property
    def links_text(self) -> str:
        """Rates of all links for each device and direction; empty where there are none."""
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
        return ClusterSpec(
            name=f"{self.name}:{nodes}x{devices_per_node}"[-200:],
            groups=(group.smaller(nodes, devices_per_node),),
            tiers=group.fewer_tiers(self.tiers, nodes, devices_per_node),
            price=self.price,
        )

    def with_power_limits(self, share_of: Callable[[Accelerator], float | None]) -> ClusterSpec:
        """Return the cluster with another power limit of each device, a share of its design power.

        None is full power.
        """
        groups = []
        for group in self.groups:
            device = group.accelerator
            limited = device.model_copy(update={"power_limit": share_of(device)})
            groups.append(group.model_copy(update={"accelerator": limited}))
        return self.model_copy(update={"groups": tuple(groups)})

    def with_shapes(self, shapes: Sequence[tuple[int, int]]) -> ClusterSpec:
        """Return the cluster with some nodes of each of its groups, and some devices of each node.

        What joins all groups joins what is left of them, and no faster link joins more.
        """
        groups = tuple(
            group.smaller(*shape) for group, shape in zip(self.groups, shapes, strict=True)
        )
        devices = sum(group.devices for group in groups)
        largest, node = (max(g.devices_per_node for g in each) for each in (self.groups, groups))
        kept: dict[int, LinkTier] = {}
        for tier in self.tiers[:-1]:
            reach = min(tier.devices, node if tier.devices <= largest else devices - 1)
            if reach > max(kept, default=1):
                kept[reach] = tier.model_copy(update={"devices": reach})
        joined = self.tiers[-1].model_copy(update={"devices": devices})
        return self.model_copy(update={"groups": groups, "tiers": (*kept.values(), joined)})
