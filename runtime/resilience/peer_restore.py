"""A state gathered from copies: each rank gets what it needs from ranks that have parts of it.

Copies lie on nodes: those of its own ranks, and those of a ward's.  Ranks tell which of them they
have found whole, agree on the newest step of which each finds all that it needs, and send each
other boxes of tensors.  Which plan wrote the copies does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.checkpoint.state_snapshot import (
    Box,
    Snapshot,
    SnapshotPart,
    cut,
    intersection,
)
from meshwright.runtime.core.object_collectives import all_gather_json, number_of_ranks, own_rank
from meshwright.runtime.resilience.shared_memory import StateSlot

Key = tuple[int, str, str, int]
"""The key shared by the parts of one state: step, run, plan and number of ranks."""


def key_of(label: Mapping[str, Any]) -> Key:
    """Return what is alike in all parts of a state."""
    return label["step"], label["run"], label["plan"], label["world"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopy:
    """One rank's part of a state, as it was found whole."""

    label: Mapping[str, Any]
    content: memoryview

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot in this copy."""
        parts = {
            name: SnapshotPart(tuple(shape), tuple(offset), self._values(kind, local, at, size))
            for name, kind, shape, offset, local, at, size in self.label["parts"]
        }
        return Snapshot(self.label["step"], parts, self.label["sample"])

    def _values(self, kind: str, local: Sequence[int], at: int, size: int) -> Tensor:
        dtype = getattr(torch, kind)
        if not size:
            return torch.empty(tuple(local), dtype=dtype)
        values = torch.frombuffer(self.content[at : at + size], dtype=torch.uint8).clone()
        return values.view(dtype).reshape(tuple(local))


def restore_from_peers(
    slots: Sequence[StateSlot], needed: Mapping[str, Box], *, of_run: str | None = None
) -> tuple[Key, list[Snapshot], Mapping[str, Any]] | None:
    """Return the newest state of which every rank finds what it needs; all of them call it.

    Beside it stands the label of one of its parts.

    `slots` are those that this rank looks at, no other rank the same, and `needed` are the boxes
    that it needs.  Only copies `of_run` count, if it is given.
    """
    labels = [
        (slot, label)
        for slot in slots
        if (label := slot.label()) is not None and of_run in (None, label["run"])
    ]
    every = all_gather_json([key_of(label) for _, label in labels])
    keys = {(step, run, plan, world) for labels in every for step, run, plan, world in labels}
    for key in sorted(keys, reverse=True):
        copies = [
            RankCopy(label=read[0], content=read[1])
            for slot, label in labels
            if key_of(label) == key and (read := slot.read()) is not None
        ]
        sources = _from_own(copies, needed) or _from_all(copies, needed)
        if sources is not None:
            return key, *sources
    return None


def _from_own(copies: Sequence[RankCopy], needed: Mapping[str, Box]) -> Found | None:
    """Return what is needed where each rank has all of it itself."""
    rank = own_rank()
    parts = _parts([copy.label for copy in copies])
    wanted = _wanted_boxes(parts, dict.fromkeys(parts, rank), needed)
    if not all(all_gather_json(wanted is not None)):
        return None
    assert wanted is not None
    return _exchange_boxes(copies, parts, {rank: wanted}), copies[0].label


def _from_all(copies: Sequence[RankCopy], needed: Mapping[str, Box]) -> Found | None:
    """Return what is needed where all ranks together have it."""
    rank = own_rank()
    every = all_gather_json([copy.label for copy in copies])
    parts = _parts([label for labels in every for label in labels])
    there: dict[int, list[int]] = {}
    for holder, told in enumerate(every):
        for label in told:
            there.setdefault(label["rank"], []).append(holder)
    holders = {
        part: rank if rank in holders_of_part else holders_of_part[rank % len(holders_of_part)]
        for part, holders_of_part in there.items()
    }
    wanted = _wanted_boxes(parts, holders, needed)
    asked = all_gather_json(wanted)
    if None in asked:
        return None
    first = next(label for labels in every for label in labels)
    return _exchange_boxes(copies, parts, dict(enumerate(asked))), first


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBoxes:
    """The boxes of a rank's part of a state, without the values."""

    place: tuple[int, int]
    """Its step, and the first sample that no step has had."""
    boxes: Mapping[str, tuple[str, Box]]
    """By name: the type, and the box of the tensor."""


Found = tuple[list[Snapshot], Mapping[str, Any]]
"""Parts of a state, and the label of one of them."""
Parts = Mapping[int, PartBoxes]
"""By the rank that had it."""
Want = tuple[int, int, str, tuple[int, ...], tuple[int, ...]]
"""A holder, the rank that had the part, a name, where a box begins and its shape."""


def _parts(labels: Sequence[Mapping[str, Any]]) -> Parts:
    return {
        label["rank"]: PartBoxes(
            place=(label["step"], label["sample"]),
            boxes={
                name: (kind, Box(tuple(shape), tuple(offset), tuple(local)))
                for name, kind, shape, offset, local, _, _ in label["parts"]
            },
        )
        for label in labels
    }


def _wanted_boxes(
    parts: Parts, holders: Mapping[int, int], needed: Mapping[str, Box]
) -> list[Want] | None:
    """Return the boxes that a rank asks for; None where they do not make up what it needs."""
    result: list[Want] = []
    rank = own_rank()
    # A replica that is here need not travel; its own, lest a damaged one be covered by another's.
    order = sorted(parts, key=lambda part: (holders[part] != rank, part != rank, part))
    for name, box in needed.items():
        taken: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        covered, elements = 0, math.prod(box.shape)
        for part in order:
            if name not in parts[part].boxes:
                continue
            _, other = parts[part].boxes[name]
            if other.whole != box.whole:
                return None
            begin, shape = intersection(box, other)
            count = math.prod(shape)
            if (begin, shape) in taken or (not count and elements):
                continue
            taken.add((begin, shape))
            covered += count
            result.append((holders[part], part, name, begin, shape))
        if covered != elements or not taken:
            return None
    return result


def _exchange_boxes(
    copies: Sequence[RankCopy], parts: Parts, asked: Mapping[int, Sequence[Sequence[Any]]]
) -> list[Snapshot]:
    """Send what others ask for, and return what this rank has asked for."""
    rank, world = own_rank(), number_of_ranks()
    snapshots = {copy.label["rank"]: copy.snapshot for copy in copies}
    pairs: dict[tuple[int, int], list[Want]] = {}
    for receiver, wants in asked.items():
        for holder, part, name, begin, shape in wants:
            want = holder, part, name, tuple(begin), tuple(shape)
            pairs.setdefault((holder, receiver), []).append(want)
    received: list[tuple[Want, Tensor]] = []
    # In one order on all ranks, so that none waits for one that waits for it.
    for holder, receiver in sorted(pairs, key=lambda pair: ((pair[1] - pair[0]) % world, pair)):
        wants = pairs[holder, receiver]
        if holder == rank:
            held = [(snapshots[part].parts[name], at, size) for _, part, name, at, size in wants]
            boxes = [cut(piece.values, piece.offset, at, size) for piece, at, size in held]
            if receiver == rank:
                received += zip(wants, boxes, strict=True)
            else:
                dist.send(torch.cat([_bytes(box) for box in boxes]), dst=receiver)
        elif receiver == rank:
            received += _taken_from(holder, wants, parts)
    step, sample = next(iter(parts.values())).place
    return [
        Snapshot(step, {name: SnapshotPart(parts[part].boxes[name][1].whole, begin, box)}, sample)
        for (_, part, name, begin, _), box in received
    ]


def _taken_from(holder: int, wants: Sequence[Want], parts: Parts) -> list[tuple[Want, Tensor]]:
    """Receive boxes from another rank."""
    kinds = [getattr(torch, parts[part].boxes[name][0]) for _, part, name, _, _ in wants]
    sizes = [math.prod(want[4]) * kind.itemsize for want, kind in zip(wants, kinds, strict=True)]
    content = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.recv(content, src=holder)
    return [
        (want, piece.clone().view(kind).reshape(want[4]))
        for want, kind, piece in zip(wants, kinds, content.split(sizes), strict=True)
    ]


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)
