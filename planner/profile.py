"""Profile: measurements of a model's layers and of a machine's links, with a birth certificate.

Every figure here was measured.  What the planner works out between measurements (interpolation,
fits) never enters a Profile.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from planner.cluster import Collective, Precision
from planner.document import Document, Part
from planner.units import Amount, Count, Flag, Positive, Text

Recompute = Literal["none", "selective", "full"]


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

    Times are medians per micro-batch.  With `tensor` > 1 they include the tensor-parallel
    communication, since the layer was run by that many ranks together.
    """

    kind: Text
    tensor: Positive
    sequence_parallel: Flag
    micro_batch: Positive
    seq_len: Positive
    precision: Precision
    recompute: Recompute
    forward_s: Amount
    backward_s: Amount
    """Includes the recomputed forward."""
    stored_bytes: Count
    """Saved between forward and backward, the layer's input included, parameters not."""
    forward_transient_bytes: Count
    """Peak inside forward above what is stored at its end, beyond the layer's output."""
    backward_transient_bytes: Count
    """Peak inside backward above what was stored at its begin; parameter gradients not counted."""
    spread: Amount
    """Interquartile range over median of forward + backward."""
    samples: Positive


class LinkPoint(Part):
    """One message size: `size_bytes` is what nccl-tests call size."""

    size_bytes: Positive
    seconds: Amount
    spread: Amount


class CollectiveCurve(Part):
    """Seconds by size for one collective among `ranks` ranks of a tier, raw points.

    Sizes follow nccl-tests: all_reduce, broadcast and send_recv the buffer; all_gather the gathered
    output, reduce_scatter the input, all_to_all one rank's whole buffer.
    """

    tier: Text
    operation: Collective
    ranks: Positive
    points: tuple[LinkPoint, ...]

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
    """AdamW seconds per parameter held by a rank."""
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


class Profile(Document):
    """Measurements that replace the cost model's own seconds and bytes where they apply."""

    kind_of_document: ClassVar[str] = "profile"

    model: Text
    model_digest: Text
    birth: Birth
    layers: tuple[LayerMeasurement, ...]
    collectives: tuple[CollectiveCurve, ...] = ()
    overheads: Overheads | None = None
