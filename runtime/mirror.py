"""Mirrors: the state of ranks behind their newest steps, in memory that outlives them.

Behind a step each rank copies its parts of the state into a slot of its launcher.  Ranks that are
started again agree on the newest step of which all of them find what they need on their own node:
their own parts where the plan is the same, else the parts of all ranks.  How many steps lie between
two copies follows from what the first ones take, so that they cost at most a hundredth of training.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner.whatif.survival import COPIES_SHARE
from runtime.exchange import all_gather_json
from runtime.slots import StateSlot, slots_of_node
from runtime.snapshot import Snapshot, SnapshotPart

MEASURED = 3
"""Copies, one behind each step, until their interval is computed from the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredState:
    """What ranks go on from."""

    step: int
    sample: int
    """The next one of the data."""
    snapshots: tuple[Snapshot, ...]


class Mirror:
    """One rank's copies of its state; all ranks make it, and use it, together."""

    def __init__(
        self, slots: Sequence[Sequence[StateSlot]], *, local_rank: int, run: str, plan: str
    ) -> None:
        """`slots` are those of the node's local ranks.

        `run` is the same on all ranks and new in each attempt; `plan` is its plan's digest.
        """
        self._node, self._own = slots, slots[local_rank]
        self._told = {"run": run, "plan": plan, "rank": dist.get_rank()}
        self._told["world"] = dist.get_world_size()
        self._next = 0
        self._every = 1
        self._copies_s: list[float] = []
        self._last_step: int | None = None

    @classmethod
    def of_environment(cls, *, local_rank: int, run: str, plan: str) -> Mirror | None:
        """Return a rank's mirror where its launcher has slots for it."""
        slots = slots_of_node(os.environ)
        return cls(slots, local_rank=local_rank, run=run, plan=plan) if slots else None

    def newest(self) -> MirroredState | None:
        """Return the newest state that all ranks can go on from; all of them call it."""
        found = [
            (*read, slots is self._own, at)
            for slots in self._node
            for at, slot in enumerate(slots)
            if (read := slot.read()) is not None
        ]
        here: defaultdict[tuple[int, str, str, int], list[int]] = defaultdict(list)
        for label, _, _, _ in found:
            here[_key(label)].append(label["rank"])
        every = all_gather_json([[*key, ranks] for key, ranks in here.items()])
        told = [{tuple(line[:-1]): set(line[-1]) for line in lines} for lines in every]
        keys = [key for key in here if all(self._suffices(key, rank, told) for rank in _all(told))]
        if not keys:
            return None
        key = max(keys)
        same = self._is_same(key)
        snapshots, sample = [], 0
        for label, content, own, at in found:
            if _key(label) == key:
                sample = label["sample"]
                if own:
                    self._next = 1 - at  # the older one is written first
                if not same or label["rank"] == self._told["rank"]:
                    snapshots.append(_snapshot(label, content))
        return MirroredState(step=key[0], sample=sample, snapshots=tuple(snapshots))

    def is_due(self, step: int) -> bool:
        """Say whether the state behind a step is copied."""
        return self._last_step is None or step - self._last_step >= self._every

    def copy(self, snapshot: Snapshot, *, sample: int, began_s: float, step_s: float) -> None:
        """Copy a rank's state; all ranks do so behind the same step.

        `began_s` is when the snapshot was begun, by time.perf_counter, and `step_s` what a step
        takes.
        """
        parts, pieces, at = [], [], 0
        for name, part in snapshot.parts.items():
            values = part.values.contiguous().reshape(-1).view(torch.uint8)
            kind = str(part.values.dtype).removeprefix("torch.")
            place = [list(part.shape), list(part.offset), list(part.values.shape)]
            parts.append([name, kind, *place, at, values.numel()])
            pieces.append(values.numpy().data)
            at += values.numel()
        label = {**self._told, "step": snapshot.step, "sample": sample, "parts": parts}
        self._own[self._next].write(label, pieces)
        self._next = 1 - self._next
        self._last_step = snapshot.step
        self._copies_s.append(time.perf_counter() - began_s)
        if len(self._copies_s) == MEASURED:
            self._every = self._agreed(min(self._copies_s) / (COPIES_SHARE * step_s))

    def _agreed(self, every: float) -> int:
        """Return the interval of the rank that copies take the longest, the same on all."""
        longest = torch.tensor([every])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return max(1, math.ceil(float(longest)))

    def _is_same(self, key: tuple[int, str, str, int]) -> bool:
        _, _, plan, world = key
        return (plan, world) == (self._told["plan"], self._told["world"])

    def _suffices(
        self,
        key: tuple[int, str, str, int],
        rank: int,
        told: Sequence[Mapping[tuple[Any, ...], set[int]]],
    ) -> bool:
        """Whether a rank finds on its node what it needs of a state."""
        there = told[rank].get(key, set())
        return len(there) == key[-1] or (self._is_same(key) and rank in there)


def _all(told: Sequence[object]) -> range:
    return range(len(told))


def _key(label: Mapping[str, Any]) -> tuple[int, str, str, int]:
    """Return what is alike in the parts of one state: its step first."""
    return label["step"], label["run"], label["plan"], label["world"]


def _snapshot(label: Mapping[str, Any], content: memoryview) -> Snapshot:
    parts = {}
    for name, kind, shape, offset, local, at, size in label["parts"]:
        dtype = getattr(torch, kind)
        values = torch.empty(local, dtype=dtype)
        if size:
            values = torch.frombuffer(content[at : at + size], dtype=torch.uint8).clone()
            values = values.view(dtype).reshape(local)
        parts[name] = SnapshotPart(tuple(shape), tuple(offset), values)
    return Snapshot(label["step"], parts)
