"""Bytes that torch's caching allocator reserves beside those allocated: one rank's step replayed.

Blocks come and go operator by operator as in their tables, and the loss as tensors of a logit each:
one in 16 bits, upcast and let go of, then those in fp32 that the framework's bytes a logit are made
of. Logits are larger than any tensor of a block, so that they fit no segment that a forward left:
those stay reserved in vain.  What FSDP gathers is of a stream, and so of segments, of its own.

Of layouts without stages, whose activations are all saved.  Gradients and states are there before
and behind; the second step reserves no more than the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.costs.memory.caching_allocator import CachingAllocator, MemoryBlock

if TYPE_CHECKING:
    from meshwright.planner.documents.profile import Recompute
    from meshwright.planner.operators.operator_table import OperatorTable

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A block of a rank's step."""

    table: OperatorTable
    recompute: Recompute
    unit_bytes: float
    """Bytes of its working copy, where each pass gathers that."""


class _TwoStreams:
    """Segments of two streams, and the most that both had allocated at once."""

    def __init__(self) -> None:
        self._main, self._gathers = CachingAllocator(), CachingAllocator()
        self.peak_bytes = 0

    def allocate(self, size_bytes: float, *, gathered: bool = False) -> MemoryBlock:
        allocator = self._gathers if gathered else self._main
        block = allocator.allocate(int(size_bytes))
        both = self._main.allocated_bytes + self._gathers.allocated_bytes
        self.peak_bytes = max(self.peak_bytes, both)
        return block

    def free(self, *blocks: MemoryBlock, gathered: bool = False) -> None:
        for block in blocks:
            (self._gathers if gathered else self._main).free(block)

    @property
    def reserved_bytes(self) -> int:
        return self._main.reserved_bytes + self._gathers.reserved_bytes


def reserved_beside_bytes(
    blocks: Sequence[Replayed], *, logits: float, bytes_per_logit: float
) -> float:
    """Return what a step reserves beyond its allocated peak.

    `logits` are a rank's own of one micro-batch, `bytes_per_logit` the loss's peak.
    """
    device = _TwoStreams()
    units: list[MemoryBlock] = []

    def gather(block: Replayed, *, most: int = 2) -> None:
        while len(units) >= most:
            device.free(units.pop(0), gathered=True)
        if block.unit_bytes:
            units.append(device.allocate(block.unit_bytes, gathered=True))

    inputs = [device.allocate(blocks[0].table.input_bytes)]
    kept: list[dict[str, MemoryBlock]] = []
    for block in blocks:
        gather(block)
        table = block.table
        live = _forward(device, table, table.stored_tensors(block.recompute), {})
        inputs.append(live.pop(table.output))
        kept.append(live)
    gather(blocks[-1], most=1)  # ahead of its backward
    gradient = _loss(device, logits, bytes_per_logit, inputs[-1].size)
    for at in range(len(blocks) - 1, -1, -1):
        if at:
            gather(blocks[at - 1])
        block = blocks[at]
        table = block.table
        live = kept.pop()
        if block.recompute != "none":
            live |= _forward(device, table, table.stored_tensors("none"), live)
            device.free(*(live.pop(name) for name in (table.output,) if name in live))
        gradient = _backward(device, table, live, gradient)
        device.free(inputs.pop())
    return device.reserved_bytes - device.peak_bytes


def _forward(
    device: _TwoStreams, table: OperatorTable, kept: Collection[str], there: dict[str, MemoryBlock]
) -> dict[str, MemoryBlock]:
    """Run a block's operators; return what stays of those results that were not `there`."""
    last = {name: at for at, op in enumerate(table.operators) for name in (*op.inputs, *op.holds)}
    live: dict[str, MemoryBlock] = {}
    for at, operator in enumerate(table.operators):
        work = device.allocate(operator.workspace_bytes) if operator.workspace_bytes else None
        for name, size in operator.outputs.items():
            if size and name not in there:
                live[name] = device.allocate(size)
        if work is not None:
            device.free(work)
        for name in [*live]:
            if last.get(name, 0) <= at and name != table.output and name not in kept:
                device.free(live.pop(name))
    return live


def _loss(
    device: _TwoStreams, logits: float, bytes_per_logit: float, gradient_bytes: float
) -> MemoryBlock:
    """Run the output projection and its loss both ways; return the gradient of their input."""
    narrow = device.allocate(2 * logits)
    first = device.allocate(FP32 * logits)
    device.free(narrow)
    count = round(bytes_per_logit) // FP32
    held = [first, *(device.allocate(FP32 * logits) for _ in range(count - 1))]
    device.free(*held[1:])
    narrow = device.allocate(2 * logits)
    gradient = device.allocate(gradient_bytes)
    device.free(narrow, held[0])
    return gradient


def _backward(
    device: _TwoStreams, table: OperatorTable, live: dict[str, MemoryBlock], gradient: MemoryBlock
) -> MemoryBlock:
    """Run a block's backward, which frees what was saved; return the gradient of its input."""
    first: dict[str, int] = {}
    for at, operator in enumerate(table.operators):
        for name in operator.saved:
            first.setdefault(name, at)
    gradients = {table.output: gradient}
    for at in range(len(table.operators) - 1, -1, -1):
        operator = table.operators[at]
        if gradients.keys().isdisjoint(operator.outputs):
            continue
        work = device.allocate(operator.workspace_bytes) if operator.workspace_bytes else None
        for name in operator.inputs:
            if name not in gradients and table.sizes[name]:
                gradients[name] = device.allocate(table.sizes[name])
        if work is not None:
            device.free(work)
        device.free(*(gradients.pop(name) for name in operator.outputs if name in gradients))
        done = [name for name in dict.fromkeys(operator.saved) if first[name] == at]
        device.free(*(live.pop(name) for name in done if name in live))
    device.free(*live.values())
    input_gradient = gradients.pop("x")
    device.free(*gradients.values())
    return input_gradient
