"""State in memory: what ranks hold between two steps, as named parts that any plan puts back.

    snapshot = engine.snapshot()             # this rank's parts, copied to the host
    engine.restore([mine, others, ...])      # parts that together cover this rank's tensors

Names, shapes and places are those of the whole model, so that neither stage nor plan is in them.
Nothing here talks to other ranks: whoever moves parts between ranks or keeps them is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.torch_internals import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True)
class Box:
    """The box of a tensor that a part covers."""

    whole: tuple[int, ...]
    """The shape of the tensor."""
    offset: tuple[int, ...]
    """First index of the box, by dim."""
    shape: tuple[int, ...]


def intersection(box: Box, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the part that two boxes share begins, and its shape, of which some dim may be 0.

    >>> intersection(Box((8,), (2,), (4,)), Box((8,), (4,), (4,)))
    ((4,), (2,))
    """
    pairs = list(zip(box.offset, other.offset, box.shape, other.shape, strict=True))
    begin = tuple(max(a, b) for a, b, _, _ in pairs)
    end = tuple(min(a + n, b + m) for a, b, n, m in pairs)
    return begin, tuple(max(0, b - a) for a, b in zip(begin, end, strict=True))


def boxes(state: Mapping[str, Tensor]) -> dict[str, Box]:
    """Return which part of each tensor of its state a rank has."""
    boxes_by_name = {}
    for name, tensor in state.items():
        local, shape, offset = _box(tensor)
        boxes_by_name[name] = Box(shape, offset, tuple(local.shape))
    return boxes_by_name


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A box of one tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the box in the whole tensor, by dim."""
    values: Tensor
    """On the host."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one rank after a step."""

    step: int
    parts: Mapping[str, SnapshotPart]
    next_sample: int = 0
    """The first sample that no step has trained on: Engine.next_sample."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return sum(box.values.numel() * box.values.element_size() for box in self.parts.values())


def take_snapshot(
    state: Mapping[str, Tensor], *, step: int, next_sample: int, copied: bool = True
) -> Snapshot:
    """Return copies of a rank's state on the host.

    If not `copied`, what is on the host already is the state's own memory, until the next step.
    """
    parts = {}
    for name, tensor in state.items():
        local, shape, offset = _box(tensor)
        values = local.detach().to("cpu", copy=copied)
        parts[name] = SnapshotPart(shape, offset, values)
    return Snapshot(step, parts, next_sample)


@torch.no_grad()
def put_back(state: Mapping[str, Tensor], snapshots: Sequence[Snapshot]) -> None:
    """Fill a rank's state in place with what snapshots of one step have of it.

    Raises LaunchError where they are of several steps, or leave out some of this rank's; then
    nothing was changed.
    """
    steps = sorted({snapshot.step for snapshot in snapshots})
    if len(steps) != 1:
        raise LaunchError(f"snapshots: are of steps {steps}; restore parts of one step")
    copies = [copy for name, tensor in state.items() for copy in _copies(name, tensor, snapshots)]
    for into, values in copies:
        into.copy_(values)


def _copies(
    name: str, tensor: Tensor, snapshots: Iterable[Snapshot]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what of a rank's part is filled with what."""
    local, shape, offset = _box(tensor)
    parts = [snapshot.parts[name] for snapshot in snapshots if name in snapshot.parts]
    other = next((part.shape for part in parts if part.shape != shape), None)
    if other is not None:
        raise LaunchError(
            f"{name}: has shape {shape} here, and {other} in the snapshot; "
            "resume the module that was saved"
        )
    local_box = Box(shape, offset, tuple(local.shape))
    covered = 0
    taken: set[Box] = set()
    for part in parts:
        begin, size = intersection(local_box, Box(shape, part.offset, tuple(part.values.shape)))
        box = Box(shape, begin, size)
        if box in taken or not math.prod(size):
            continue  # a replica, or a part of others
        if any(math.prod(intersection(box, other)[1]) for other in taken):
            raise LaunchError(f"{name}: parts of the snapshots overlap; give those of one plan")
        taken.add(box)
        covered += math.prod(size)
        yield cut(local, offset, begin, size), cut(part.values, part.offset, begin, size)
    if covered != local.numel():
        raise LaunchError(
            f"{name}: the snapshots have {covered} of the {local.numel()} numbers of this rank; "
            "resume from a checkpoint"
        )


def cut(
    values: Tensor, offset: Sequence[int], begin: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Return a box of what lies at an offset in a tensor.

    >>> cut(torch.arange(4), (2,), (3,), (2,))
    tensor([1, 2])
    """
    places = zip(begin, offset, shape, strict=True)
    return values[tuple(slice(at - first, at - first + size) for at, first, size in places)]


def _box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's local part, the whole shape, and where the part begins in it."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(tensor.shape), (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(tensor.shape), tuple(offset)
