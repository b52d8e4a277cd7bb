"""Profile: measurements of a model's layers and of a machine's links, with a birth certificate.

Every figure here was measured.  A Profile contains no interpolated figures, except for fits beside
their measurements: lines through the points of a collective, and `calibration`, constants fitted to
measured runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshwright.planner.documents.cluster import Collective, Precision
from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.units import (
    Amount,
    Count,
    Flag,
    Fraction,
    Line,
    Name,
    Positive,
    Rate,
    Text,
    seconds_text,
)
from meshwright.planner.errors.shown import html_table

Recompute = Literal["none", "selective", "full"]
LossGradients = Literal["precomputed", "recomputed"]
CHUNK_ROWS = 1024
"""Default rows of a chunk.  Sums of a weight's gradient run over chunks in the weight's type, which
favours few large ones, and rows with 128 thousand outputs take a gigabyte."""


class ChunkedLoss(Part):
    """Cross-entropy of the output projection, a few rows of logits at a time."""

    rows: Positive = CHUNK_ROWS
    """Positions whose logits exist at once."""
    gradients: LossGradients = "precomputed"
    """Time at which gradients are computed: in forward, which stores them for backward; or in
    backward, from recomputed logits."""


LOSS_WORDS: dict[LossGradients, str] = {
    "precomputed": "chunked",
    "recomputed": "chunked-recompute",
}
"""Name of a chunked loss in a layout's text and in `--fix`; a loss of all logits is `full`."""


class Birth(Part):
    """Place, time and command of the measurements."""

    command: Text
    """Command of the measurements."""
    date: Text
    """Date of the measurements."""
    host: Text
    """Name of the machine."""
    device: Text
    """Name of the device."""
    ranks: Positive
    """Number of ranks that measured."""
    threads_per_rank: Positive
    """Number of threads of each rank."""
    software: dict[str, Text]
    """Versions of packages."""
    load: Amount | None = None
    """Mean number of running processes in the minute before; above 0, others used the machine."""


class LayerMeasurement(Part):
    """One layer kind under one setting, on one rank while all ranks of the machine work.

    Times are medians per micro-batch.  Where ranks divide the layer they include communication,
    since it was run by that many ranks together, neighbours, tensor innermost.  `seq_len` is of the
    whole sequence.
    """

    kind: Name
    """Kind of the layer."""
    tensor: Positive
    """Number of ranks that divide the layer's tensors."""
    context: Positive = 1
    """Number of ranks that share a sequence."""
    expert: Positive = 1
    """Number of ranks that divide a block's experts."""
    sequence_parallel: Flag
    """Tensor parallelism divides the residual stream along the sequence."""
    micro_batch: Positive
    """Samples of a micro-batch."""
    seq_len: Positive
    """Tokens of a sample."""
    precision: Precision
    """Type of matrix products."""
    recompute: Recompute
    """Recomputation of the layer."""
    compiled: Flag = False
    """Layer ran as one graph; for embedding and head, which are not compiled, the blocks did."""
    loss: ChunkedLoss | None = None
    """Chunked loss of a head; None: the loss is computed from all logits."""
    forward_s: Amount
    """Seconds of forward."""
    backward_s: Amount
    """Seconds of backward, including the recomputed forward."""
    recompute_s: Amount | None = None
    """Seconds of backward_s that recompute forward; None: not measured separately."""
    resident_bytes: Count | None = None
    """Bytes of a rank's share of parameters and buffers; None: not measured."""
    stored_bytes: Count
    """Bytes saved between forward and backward, including the layer's input and without
    parameters."""
    forward_transient_bytes: Count
    """Peak bytes inside forward above the stored bytes at its end, without the layer's output."""
    backward_transient_bytes: Count
    """Peak bytes inside backward above the stored bytes at its begin, without parameter
    gradients."""
    spread: Amount
    """Interquartile range over median of forward + backward."""
    samples: Positive
    """Number of measured passes."""


class StageMeasurement(Part):
    """Consecutive layers from the model's first one under one setting, run as a whole."""

    layers: tuple[Name, ...] = Field(min_length=1)
    """Names of the layers."""
    tensor: Positive = 1
    """Number of ranks that divide the layers' tensors."""
    context: Positive = 1
    """Number of ranks that share a sequence."""
    expert: Positive = 1
    """Number of ranks that divide experts."""
    micro_batch: Positive
    """Samples of a micro-batch."""
    seq_len: Positive
    """Tokens of a sample."""
    precision: Precision
    """Type of matrix products."""
    recompute: Recompute
    """Recomputation of every layer."""
    forward_s: Amount
    """Seconds of forward."""
    backward_s: Amount
    """Seconds of backward."""
    resident_bytes: Count
    """Bytes of a rank's share of parameters and buffers."""
    stored_bytes: Count
    """Bytes saved between forward and backward, without parameters and without the last layer's
    output.  Tensors that several layers share count once."""
    forward_transient_bytes: Count
    """Peak bytes inside forward above those that are alive between forward and backward."""
    backward_transient_bytes: Count
    """Peak bytes above the bytes that are alive between forward and backward, without parameter
    gradients."""
    spread: Amount
    """Interquartile range over median."""
    samples: Positive
    """Number of measured passes."""


class LinkPoint(Part):
    """One message size: `size_bytes` is what nccl-tests call size."""

    size_bytes: Positive
    """Size of the message in bytes."""
    seconds: Amount
    """Median seconds."""
    spread: Amount
    """Interquartile range over median."""


class LinkPiece(Part):
    """A line through neighbouring points: seconds = latency_s + bytes / bytes_per_s."""

    from_bytes: Positive
    """Smallest measured size in bytes on the line."""
    to_bytes: Positive
    """Largest measured size in bytes on the line."""
    latency_s: Amount
    """Seconds of the line at size 0."""
    bytes_per_s: Rate | None = None
    """Bytes per second; None: seconds do not depend on the size."""


class LinkFit(Part):
    """Lines through all points of a curve; meshwright.planner.costs.alpha_beta_fit draws them."""

    pieces: tuple[LinkPiece, ...] = Field(min_length=1)
    """Lines in the order of their sizes."""
    residual: Amount
    """Largest relative distance of a point from its line, in seconds over the point's seconds."""


class CollectiveCurve(Part):
    """Seconds by size for one collective among `ranks` ranks of a tier, raw points.

    Sizes follow nccl-tests: all_reduce, broadcast and send_recv the buffer; all_gather the gathered
    output, reduce_scatter the input, all_to_all one rank's whole buffer.
    """

    tier: Name
    """Name of the link tier."""
    operation: Collective
    """Collective."""
    ranks: Positive
    """Number of ranks of a group."""
    inner: Positive = 1
    """Number of neighbours among `ranks` that reach each other over faster tiers; 1: none do.  As
    many groups as there are such neighbours work at the same time."""
    points: tuple[LinkPoint, ...]
    """Measured points, the smallest size first."""
    fit: LinkFit | None = None
    """Lines that give seconds at other sizes; None: log-log interpolation between points."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = [point.size_bytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"points have sizes {sizes}; order them, each size once, at least one")
        return self


class Overheads(Part):
    """Cost of the runtime itself, beside layers and links."""

    step_s: Amount
    """Fixed seconds of a step: data, loss read-out, clipping, optimizer launch."""
    optimizer_s_per_parameter: Amount
    """Seconds of AdamW per parameter of a rank."""
    pipeline_action_s: Amount
    """Seconds per forward or backward action of the pipeline schedule."""
    shard_unit_s: Amount
    """Seconds per sharded unit (FSDP group) and pass, beside the collective itself."""
    overlap: Amount
    """Share of sharding and gradient collectives that hides behind compute."""
    gather_copy_s_per_byte: Amount | None = None
    """Seconds of copies beside a gather of parameters, per gathered byte; None: not measured."""
    reduce_copy_s_per_byte: Amount | None = None
    """Seconds of copies beside a reduction of gradients, per byte reduced on each rank; None: not
    measured."""


class NumaNode(Part):
    """Cores and the memory that is close to them."""

    cores: Count
    """Number of cores."""
    memory_bytes: Count
    """Bytes of memory."""


class Interface(Part):
    """A network interface, as the system describes it."""

    name: Text
    """Name of the interface."""
    address: Text | None = None
    """Network address of the interface."""
    bits_per_s: Rate | None = None
    """Bits per second that the driver reports; virtual interfaces report nothing, or any number."""


class MeasuredDevice(Part):
    """One rank's device, and the rates that it reaches while all others work too."""

    name: Text
    """Name of the device."""
    rank: Count
    """Rank that uses the device."""
    memory_bytes: Count | None = None
    """Memory in bytes that the driver reports."""
    reached_bytes: Count | None = None
    """Bytes that could be allocated in large pieces; None: not tried, as for host memory."""
    bus: Text | None = None
    """Address on the PCI bus."""
    pcie: Text | None = None
    """Generation and width of the PCI Express link."""
    numa: Count | None = None
    """Number of the NUMA node that is close to the device."""
    flops: Rate | None = None
    """FLOP per second of a matrix product in fp32 (bf16 on accelerators)."""
    spread: Amount = 0.0
    """Interquartile range over median of the matrix product."""
    host_to_device_bytes_per_s: Rate | None = None
    """Bytes per second of copies from the host."""
    device_to_host_bytes_per_s: Rate | None = None
    """Bytes per second of copies to the host."""


class DeviceLink(Part):
    """Link between two devices of a node, as `nvidia-smi topo` names it: NV18, PIX, PHB, SYS."""

    first: Count
    """Number of the first device."""
    second: Count
    """Number of the second device."""
    kind: Text
    """Kind of the link."""


class MeasuredNode(Part):
    """One machine and its parts."""

    name: Text
    """Name of the node."""
    processor: Text
    """Name of the processor."""
    cores: Positive
    """Number of cores."""
    memory_bytes: Count
    """Bytes of host memory."""
    numa: tuple[NumaNode, ...] = ()
    """NUMA nodes of the machine."""
    interfaces: tuple[Interface, ...] = ()
    """Network interfaces."""
    devices: tuple[MeasuredDevice, ...] = ()
    """Devices of the machine's ranks."""
    device_links: tuple[DeviceLink, ...] = ()
    """Links between the machine's devices."""
    disk_write_bytes_per_s: Rate | None = None
    """Bytes per second of writing to the place of checkpoints until the data is on the disk."""
    disk_read_bytes_per_s: Rate | None = None
    """Bytes per second of reading back, from the system's cache where it still holds the data."""


class NodePair(Part):
    """Messages from one node to another; each node takes part in one pair at a time."""

    source: Count
    """Number of the node that sends."""
    target: Count
    """Number of the node that receives."""
    bytes_per_s: Rate
    """Bytes per second of large messages."""
    latency_s: Amount
    """Seconds of a small message."""
    spread: Amount
    """Interquartile range over median of the seconds."""


class Finding(Part):
    """A property of the machine that its user should know."""

    what: Literal["link", "device", "noise", "clock", "spread", "layers"]
    """Kind of the finding."""
    subject: Text
    """Name of the part."""
    share: Amount | None = None
    """Share of the rate that its peers reach."""
    text: Text
    """Sentence of the report."""


class TierCalibration(Part):
    """Constants of a tier's links fitted to runs; None: not fitted."""

    bytes_per_s: Rate | None = None
    """Bytes per second of the tier."""
    latency_s: Amount | None = None
    """Seconds of latency of a round."""


class Calibration(Part):
    """Constants of a cluster fitted to whole runs on it, of whatever model; None: not fitted."""

    accelerator: Line
    """Name of the device type."""
    pace: Rate | None = None
    """Factor on all seconds over those with the other constants; None: not known."""
    matmul: Fraction | None = None
    """Share of the peak that matrix products reach."""
    memory: Fraction | None = None
    """Share of the memory bandwidth that kernels reach."""
    tiers: dict[str, TierCalibration] = Field(default_factory=dict)
    """Constants of tiers, by their names."""
    step_s: Amount | None = None
    """Fixed seconds of a step."""
    action_s: Amount | None = None
    """Seconds of the host for each action of a pipeline's schedule."""
    slack: Amount | None = None
    """Reserved memory over allocated memory."""
    runs: Positive
    """Number of runs."""
    spread: Amount
    """Logarithmic spread: 80 of 100 runs left out of the fit are within a factor exp(spread) of the
    prediction."""
    source: Text
    """Source of the runs."""


class Profile(Document):
    """Measurements that replace the cost model's own seconds and bytes where they apply."""

    kind_of_document: ClassVar[str] = "profile"
    schema_file: ClassVar[str | None] = "profile.json"

    model: Name
    """Name of the model."""
    model_digest: Line
    """Digest of the model."""
    birth: Birth
    """Place, time and command of the measurements."""
    layers: tuple[LayerMeasurement, ...]
    """Measurements of layers."""
    stages: tuple[StageMeasurement, ...] = ()
    """Measurements of several layers as a whole."""
    collectives: tuple[CollectiveCurve, ...] = ()
    """Measurements of collectives."""
    overheads: Overheads | None = None
    """Measured costs of the runtime."""
    nodes: tuple[MeasuredNode, ...] = ()
    """Machines of the measurements."""
    pairs: tuple[NodePair, ...] = ()
    """Messages between pairs of nodes."""
    findings: tuple[Finding, ...] = ()
    """Properties of the machine that its user should know."""
    calibration: Calibration | None = None
    """Constants fitted to whole runs."""

    def _repr_html_(self) -> str:
        """Return the profile as notebooks show it: what was measured of each layer."""
        rows = [
            (
                layer.kind,
                str(layer.tensor),
                str(layer.micro_batch),
                str(layer.seq_len),
                layer.precision,
                seconds_text(layer.forward_s),
            )
            for layer in self.layers
        ]
        head = ("layer", "tensor", "micro-batch", "tokens", "precision", "forward")
        return html_table(f"Profile of {self.model}", head, rows)


Profiles = Profile | Mapping[str, Profile] | None
"""Profile of a cluster with one kind of devices, or profiles of some of its groups by name."""
