"""Profile: measurements of a model's layers and of a machine's links, with a birth certificate.

Every figure here was measured.  What the planner works out between measurements never enters a
Profile, but for fits that stand beside what they were fitted to: lines through the points of a
collective, and `calibration`, constants fitted to measured runs.
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
"""Where nobody says: sums of a weight's gradient run over chunks in the weight's type, so that few
large ones are best, and rows of 128 thousand outputs take a gigabyte."""


class ChunkedLoss(Part):
    """Cross-entropy of the output projection, a few rows of logits at a time."""

    rows: Positive = CHUNK_ROWS
    """Positions whose logits exist at once."""
    gradients: LossGradients = "precomputed"
    """Made in forward, where they wait for backward; or in backward, from logits made anew."""


LOSS_WORDS: dict[LossGradients, str] = {
    "precomputed": "chunked",
    "recomputed": "chunked-recompute",
}
"""How a layout's text and `--fix` call a loss in chunks; one of all logits is `full`."""


class Birth(Part):
    """Where, when and by which command the measurements were made."""

    command: Text
    date: Text
    host: Text
    device: Text
    ranks: Positive
    threads_per_rank: Positive
    software: dict[str, Text]
    load: Amount | None = None
    """Processes that ran or waited in the minute before: above 0, others used the machine."""


class LayerMeasurement(Part):
    """One layer kind under one setting, on one rank while all ranks of the machine work.

    Times are medians per micro-batch.  Where ranks divide the layer they include communication,
    since it was run by that many ranks together, neighbours, tensor innermost.  `seq_len` is of the
    whole sequence.
    """

    kind: Name
    tensor: Positive
    context: Positive = 1
    expert: Positive = 1
    """Ranks that share a sequence, and ranks that divide a block's experts."""
    sequence_parallel: Flag
    micro_batch: Positive
    seq_len: Positive
    precision: Precision
    recompute: Recompute
    compiled: Flag = False
    """Run as one graph; of the ends, which are not compiled, beside blocks that are."""
    loss: ChunkedLoss | None = None
    """Of a head: its loss in chunks; None: of all logits."""
    forward_s: Amount
    backward_s: Amount
    """Includes the recomputed forward."""
    recompute_s: Amount | None = None
    """Of backward_s, what computes forward again; None: not measured apart."""
    resident_bytes: Count | None = None
    """A rank's parts of its parameters and buffers; None: not measured."""
    stored_bytes: Count
    """Saved between forward and backward, the layer's input included, parameters not."""
    forward_transient_bytes: Count
    """Peak inside forward above what is stored at its end, beyond the layer's output."""
    backward_transient_bytes: Count
    """Peak inside backward above what was stored at its begin; parameter gradients not counted."""
    spread: Amount
    """Interquartile range over median of forward + backward."""
    samples: Positive


class StageMeasurement(Part):
    """Layers one behind the other under one setting, the model's first on, run as a whole."""

    layers: tuple[Name, ...] = Field(min_length=1)
    tensor: Positive = 1
    context: Positive = 1
    expert: Positive = 1
    micro_batch: Positive
    seq_len: Positive
    precision: Precision
    recompute: Recompute
    """Of every layer."""
    forward_s: Amount
    backward_s: Amount
    resident_bytes: Count
    """A rank's parts of parameters and buffers."""
    stored_bytes: Count
    """Saved between forward and backward, what several layers keep once; parameters, and what the
    last layer returns, not."""
    forward_transient_bytes: Count
    backward_transient_bytes: Count
    """Peaks above what is alive between forward and backward; parameter gradients not counted."""
    spread: Amount
    samples: Positive


class LinkPoint(Part):
    """One message size: `size_bytes` is what nccl-tests call size."""

    size_bytes: Positive
    seconds: Amount
    spread: Amount


class LinkPiece(Part):
    """A line through neighbouring points: seconds = latency_s + bytes / bytes_per_s."""

    from_bytes: Positive
    """The smallest and the largest measured size that it goes through."""
    to_bytes: Positive
    latency_s: Amount
    bytes_per_s: Rate | None = None
    """None: seconds do not depend on the size."""


class LinkFit(Part):
    """Lines through all points of a curve; meshwright.planner.costs.alpha_beta_fit draws them."""

    pieces: tuple[LinkPiece, ...] = Field(min_length=1)
    residual: Amount
    """Of the point that is farthest from its line, over its seconds."""


class CollectiveCurve(Part):
    """Seconds by size for one collective among `ranks` ranks of a tier, raw points.

    Sizes follow nccl-tests: all_reduce, broadcast and send_recv the buffer; all_gather the gathered
    output, reduce_scatter the input, all_to_all one rank's whole buffer.
    """

    tier: Name
    operation: Collective
    ranks: Positive
    inner: Positive = 1
    """Of `ranks`, how many neighbours reach each other over faster tiers; 1: all are apart, and as
    many groups as those neighbours are work at the same time."""
    points: tuple[LinkPoint, ...]
    fit: LinkFit | None = None
    """By which seconds at other sizes are computed; None: straight between points in logarithms."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = [point.size_bytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"points have sizes {sizes}; order them, each size once, at least one")
        return self


class Overheads(Part):
    """What the runtime itself costs, beside layers and links."""

    step_s: Amount
    """Fixed seconds of a step: data, loss read-out, clipping, optimizer launch."""
    optimizer_s_per_parameter: Amount
    """AdamW seconds per parameter of a rank."""
    pipeline_action_s: Amount
    """Per forward or backward action of the pipeline schedule."""
    shard_unit_s: Amount
    """Per sharded unit (FSDP group) and pass, beside the collective itself."""
    overlap: Amount
    """Share of sharding and gradient collectives that hides behind compute."""
    gather_copy_s_per_byte: Amount | None = None
    """Copies beside a gather of parameters, per byte gathered; None: not measured."""
    reduce_copy_s_per_byte: Amount | None = None
    """Copies beside a reduction of gradients, per byte reduced on each rank; None: not measured."""


class NumaNode(Part):
    """Cores and the memory that is near to them."""

    cores: Count
    memory_bytes: Count


class Interface(Part):
    """A network interface, as the system describes it."""

    name: Text
    address: Text | None = None
    bits_per_s: Rate | None = None
    """What the driver says; virtual interfaces say nothing, or anything."""


class MeasuredDevice(Part):
    """One rank's device: what it is, and what it reaches while all others work too."""

    name: Text
    rank: Count
    memory_bytes: Count | None = None
    """As the driver says."""
    reached_bytes: Count | None = None
    """What could be taken in large pieces; None: not tried, as memory of a host is not."""
    bus: Text | None = None
    pcie: Text | None = None
    numa: Count | None = None
    flops: Rate | None = None
    """Of a matrix product in fp32 (bf16 on accelerators)."""
    spread: Amount = 0.0
    host_to_device_bytes_per_s: Rate | None = None
    device_to_host_bytes_per_s: Rate | None = None


class DeviceLink(Part):
    """How two devices of a node are joined: NV18, PIX, PHB, SYS, as `nvidia-smi topo` says."""

    first: Count
    second: Count
    kind: Text


class MeasuredNode(Part):
    """One machine: what is in it."""

    name: Text
    processor: Text
    cores: Positive
    memory_bytes: Count
    numa: tuple[NumaNode, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    devices: tuple[MeasuredDevice, ...] = ()
    device_links: tuple[DeviceLink, ...] = ()
    disk_write_bytes_per_s: Rate | None = None
    """To where a checkpoint would go, until it is on the disk."""
    disk_read_bytes_per_s: Rate | None = None
    """Back again; from the system's cache where it still has it."""


class NodePair(Part):
    """Messages from one node to another, one pair of nodes at a time for each of the two."""

    source: Count
    target: Count
    bytes_per_s: Rate
    latency_s: Amount
    spread: Amount


class Finding(Part):
    """Something of the machine that a person should know."""

    what: Literal["link", "device", "noise", "clock", "spread", "layers"]
    subject: Text
    share: Amount | None = None
    """Of what its peers reach."""
    text: Text


class TierCalibration(Part):
    """What runs tell of a tier's links; None: not fitted."""

    bytes_per_s: Rate | None = None
    latency_s: Amount | None = None


class Calibration(Part):
    """Constants of a cluster fitted to whole runs on it, of whatever model; None: not fitted."""

    accelerator: Line
    pace: Rate | None = None
    """Seconds of everything over what they are with the other constants; None: not known."""
    matmul: Fraction | None = None
    """Of the peak."""
    memory: Fraction | None = None
    """Of the memory bandwidth."""
    tiers: dict[str, TierCalibration] = Field(default_factory=dict)
    step_s: Amount | None = None
    """Fixed seconds of a step."""
    action_s: Amount | None = None
    """Of the host for each action of a pipeline's schedule."""
    slack: Amount | None = None
    """Reserved over allocated memory."""
    runs: Positive
    spread: Amount
    """80 of 100 runs left out of the fit lie within a factor exp(spread) of the prediction."""
    source: Text


class Profile(Document):
    """Measurements that replace the cost model's own seconds and bytes where they apply."""

    kind_of_document: ClassVar[str] = "profile"

    model: Name
    model_digest: Line
    birth: Birth
    layers: tuple[LayerMeasurement, ...]
    stages: tuple[StageMeasurement, ...] = ()
    collectives: tuple[CollectiveCurve, ...] = ()
    overheads: Overheads | None = None
    nodes: tuple[MeasuredNode, ...] = ()
    pairs: tuple[NodePair, ...] = ()
    findings: tuple[Finding, ...] = ()
    calibration: Calibration | None = None

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
"""One for a cluster of one kind of devices, or those of some of its groups by name."""
