"""Mirrors: the state of ranks after their newest steps, in memory that outlives them.

After a step each rank copies its parts of the state into a slot of its launcher, which sends them
to a partner on another node (`runtime.resilience.replication`).  A state is copied once the one
before is on all nodes.  Ranks that are started again, under any plan, go on from the newest state
of which they find all parts that they hold (`runtime.resilience.peer_restore`).  How many steps lie
between two copies follows from the processor seconds that the last ones took, so that they cost at
most COPIES_SHARE of training; a wall clock would count what else runs.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from meshwright.planner.documents.events import CopyInterval
from meshwright.planner.whatif.pricing.survival import COPIES_SHARE
from meshwright.runtime.checkpoint.checkpoint import TrainingIdentity
from meshwright.runtime.checkpoint.state_snapshot import Box, Snapshot
from meshwright.runtime.core.object_collectives import (
    all_gather_json,
    number_of_ranks,
    own_rank,
    reduce_max,
)
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.resilience.peer_restore import key_of, restore_from_peers
from meshwright.runtime.resilience.shared_memory import GENERATIONS, NodeSlots, slots_of_node
from meshwright.runtime.run.run_clock import unix_now_s

MEASURED = 3
"""Copies, the last ones, from whose mean their interval follows; the first are one after each step.
Those that write to a slot for the first time do not count: of 0.3 GB and 3 GB they took 0.28 and
8.6 processor seconds, and each later one 0.10 and 0.96 (3 GB/s, on an EPYC core)."""

STEADY = 1.5, 1.25
"""By how much the measured interval is shorter or longer before another is taken: what was printed
last is true, and is not printed anew with each measurement."""

COPY_OVER_CALLS = 1.7
"""CPU seconds of a copy over those of its calls: the work behind it finds caches and pages changed
(`benchmarks/elastic_cost.py` measured 1.63, 1.67 and 1.82)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredState:
    """The state that ranks resume from."""

    step: int
    snapshots: tuple[Snapshot, ...]
    used: SampleDigest
    """Digest of the samples that were used until then."""
    identity: TrainingIdentity | None = None
    """Identity of the training; None where the copy does not have it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of ranks beside tensors, by name."""


class Mirror:
    """One rank's copies of its state; all ranks make it, and use it, together."""

    def __init__(
        self,
        node: NodeSlots,
        *,
        local_rank: int,
        ranks: int,
        run: str,
        plan: str,
        identity: TrainingIdentity | None = None,
        config: str | None = None,
    ) -> None:
        """`ranks` are those of this node.

        `run` is the same on all ranks and new in each attempt; `plan` is its plan's digest,
        `identity` of what training its copies are, and `config` the model's in other words.
        """
        self._identity = identity
        self._config = config if own_rank() == 0 else None
        self._node, self._own = node, node.own[local_rank]
        self._local_rank, self._ranks = local_rank, ranks
        self._run, self._plan = run, plan
        self._next = 0
        self.every = 1
        """Steps from one copy to the next."""
        self._copies = 0
        self._copies_s: deque[float] = deque(maxlen=MEASURED)
        self._stored_s: deque[float] = deque(maxlen=MEASURED)
        self.stored_steps: int | None = None
        """Steps until a copy is on another node, too; None where no other node keeps copies."""
        self.costs_more = False
        """True if a loss may cost other steps than was known before the last copy."""
        self._behind: tuple[int, str] | None = None
        """Step and run of the state that must stay until the next one is kept."""
        self._last_step: int | None = None
        self._asked_step: int | None = None

    @classmethod
    def of_environment(
        cls,
        *,
        local_rank: int,
        run: str,
        plan: str,
        identity: TrainingIdentity,
        config: str | None = None,
    ) -> Mirror | None:
        """Return a rank's mirror where its launcher has slots for it."""
        node = slots_of_node(os.environ)
        if node is None:
            return None
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        return cls(
            node,
            local_rank=local_rank,
            ranks=ranks,
            run=run,
            plan=plan,
            identity=identity,
            config=config,
        )

    def newest(self, needed: Mapping[str, Box], *, of_this: bool = False) -> MirroredState | None:
        """Return the newest state that all ranks can go on from; all of them call it.

        `needed` are the boxes that this rank needs; only copies of this attempt count if they
        have to be `of_this`.
        """
        # Each slot of a node is looked at by one of its ranks.
        pairs = [*self._node.own, *self._node.wards]
        mine = [slot for pair in pairs[self._local_rank :: self._ranks] for slot in pair]
        restored = restore_from_peers(mine, needed, of_run=self._run if of_this else None)
        if restored is None:
            return None
        key, snapshots, label = restored
        self._behind = key[0], key[1]
        for at, slot in enumerate(self._own):
            newer = slot.label()
            if newer is not None and key_of(newer) == key:
                self._next = 1 - at  # the older one is written first
        labels = (slot.label() for slot in mine)
        encoded: dict[str, str] = {}
        for part in labels:
            if part is not None and key_of(part) == key:
                encoded |= part["files"]
        every: list[dict[str, str]] = all_gather_json(encoded)
        encoded = {name: data for files in every for name, data in files.items()}
        used = SampleDigest.model_validate(label["used"])
        identity = label.get("identity")
        return MirroredState(
            step=key[0],
            snapshots=tuple(snapshots),
            used=used,
            identity=None if identity is None else TrainingIdentity.model_validate(identity),
            files={name: b64decode(data) for name, data in encoded.items()},
        )

    def stored_names(self) -> list[str]:
        """Return the names of tensors that copies on any node have; all ranks call it."""
        pairs = [*self._node.own, *self._node.wards][self._local_rank :: self._ranks]
        labels = [label for pair in pairs for slot in pair if (label := slot.label()) is not None]
        names = {part[0] for label in labels for part in label["parts"]}
        every: list[list[str]] = all_gather_json(sorted(names))
        return sorted({name for of_rank in every for name in of_rank})

    def is_due(self, step: int) -> bool:
        """Say whether the state after a step is copied; all ranks ask after each step."""
        if self._last_step is None:
            return True
        if step - max(self._last_step, self._asked_step or 0) < self.every:
            return False
        if self._node.kept is None:
            return True
        self._asked_step = step + 1 - self.every  # where it is not kept, ask after the next step
        return not reduce_max([not self._node.kept.has_copy(self._run, self._last_step)])[0]

    def interval(self, step_s: float, state_bytes: int) -> CopyInterval:
        """Return the event that says how often a state is copied, and what a fault costs."""
        return CopyInterval(
            at_unix_s=unix_now_s(),
            every_steps=self.every,
            stored_steps=self.stored_steps,
            step_s=step_s,
            state_bytes=state_bytes,
        )

    def copy(
        self,
        snapshot: Snapshot,
        *,
        used: SampleDigest,
        began_s: float,
        step_s: float,
        loss: float = 0.0,
        epoch: int = 0,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Copy a rank's state; all ranks do so after the same step.

        `used` is of the samples until then, `began_s` when the snapshot was begun, by
        time.thread_time, `step_s` what a step takes; `loss` and `epoch` are a checkpoint's,
        and so are `files` of this rank by name.
        """
        parts, pieces, at = [], [], 0
        for name, part in snapshot.parts.items():
            values = part.values.contiguous().reshape(-1).view(torch.uint8)
            kind = str(part.values.dtype).removeprefix("torch.")
            place = [list(part.shape), list(part.offset), list(part.values.shape)]
            parts.append([name, kind, *place, at, values.numel()])
            pieces.append(values.numpy().data)
            at += values.numel()
        label = {
            "step": snapshot.step,
            "sample": snapshot.next_sample,
            "used": used.model_dump(),
            "identity": None if self._identity is None else self._identity.model_dump(),
            "run": self._run,
            "epoch": self._node.epoch,
            "plan": self._plan,
            "loss": loss,
            "epoch_of_data": epoch,
            "config": self._config,
            "files": {name: b64encode(data).decode() for name, data in files.items()},
            "rank": own_rank(),
            "world": number_of_ranks(),
            "behind": self._behind,
            "parts": parts,
        }
        self._own[self._next].write(label, pieces)
        self._next = 1 - self._next
        self._last_step = snapshot.step
        self._behind = snapshot.step, self._run
        self._copies += 1
        self.costs_more = False
        if self._copies <= GENERATIONS:
            return
        self._copies_s.append(time.thread_time() - began_s)
        sent_s = 0.0 if self._node.kept is None else self._node.kept.processor_s / self._ranks
        copy_s = COPY_OVER_CALLS * statistics.fmean(self._copies_s) + sent_s
        stored_s = 0.0
        if self._node.kept is not None:
            self._stored_s.append(self._node.kept.stored_s)
            stored_s = statistics.median(self._stored_s)
        # All ranks go by the one that copies take the longest.
        intervals = reduce_max([copy_s / (COPIES_SHARE * step_s), stored_s / step_s])
        every = max(1, *map(math.ceil, intervals))
        is_first, before = self._copies == GENERATIONS + 1, (self.every, self.stored_steps)
        shorter, longer = STEADY
        if is_first or not self.every / shorter < every <= self.every * longer:
            self.every = every
        if self._node.kept is not None:
            self.stored_steps = max(1, math.ceil(intervals[1]), self.stored_steps or 0)
        self.costs_more = is_first or before != (self.every, self.stored_steps)
