"""Loader: slices of global batches in an order that no plan changes, from torch's DataLoader.

    for batch in engine.loader(dataset, shuffle=True):   # this rank's samples of each global batch
        engine.step(batch)

A global batch has the same samples under every plan, and so has each micro-batch of equal size.

UsedSamples adds up which samples all ranks of a run have used: each says it of its own batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from meshwright.planner.errors import BatchError, LaunchError
from meshwright.runtime.core.object_collectives import all_gather_json, own_rank
from meshwright.runtime.data.sample_digest import PRIME, SampleDigest


class Loader:
    """The global batches of one epoch after another, of which a rank reads its own samples."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        samples: range,
        shuffle: bool = True,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """`samples` are this rank's of each global batch; `settings` are of torch's DataLoader.

        Samples that fill no global batch are left out of an epoch.  Raises BatchError where the
        dataset does not fill one.
        """
        if len(dataset) < global_batch:
            raise BatchError(
                f"dataset: has {len(dataset)} samples, fewer than a global batch of {global_batch}"
            )
        self._dataset = dataset
        self._global_batch = global_batch
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._settings = settings
        self.epoch = 0
        """The one that a loop goes through, or goes through next."""
        self._done = 0

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        return len(self._dataset) // self._global_batch

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch, and go on to the next one."""
        if self._done == len(self):  # saved behind the last batch
            self.epoch, self._done = self.epoch + 1, 0
        batches = self._batches()[self._done :]
        # Without its own generator it would draw from the script's.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        for batch in DataLoader(
            self._dataset, batch_sampler=batches, generator=generator, **self._settings
        ):
            self._done += 1
            yield batch
        self.epoch, self._done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return where it stands: batches that were handed out, not those that were read ahead."""
        return {"epoch": self.epoch, "batches": self._done, **self._sampler_state()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there.  Raises LaunchError where the order would be another."""
        for name, value in self._sampler_state().items():
            if state[name] != value:
                raise LaunchError(
                    f"loader: {name} is {value}, and was {state[name]} when it was saved, which "
                    "puts samples in another order; "
                    "set it as it was, or resume without the loader's state"
                )
        self.epoch, self._done = state["epoch"], state["batches"]

    def _sampler_state(self) -> dict[str, int]:
        return {
            "samples": len(self._dataset),
            "global_batch": self._global_batch,
            "shuffle": int(self._shuffle),
            "seed": self._seed,
        }

    def _batches(self) -> list[list[int]]:
        """Return this rank's samples of all global batches of the epoch."""
        count = len(self) * self._global_batch
        order = torch.arange(len(self._dataset))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(len(self._dataset), generator=generator)
        samples = slice(self._samples.start, self._samples.stop)
        cut = order[:count].view(-1, self._global_batch)[:, samples]
        batches: list[list[int]] = cut.tolist()
        return batches


class UsedSamples:
    """The digest of a run, on one of its ranks; all of them make it, and use it, together."""

    def __init__(self, slice_rank: int) -> None:
        """Ranks of one slice read the same samples, and the first of them counts."""
        self.before = SampleDigest()
        """Digest of the samples used before the ranks were last asked."""
        self._own = SampleDigest()
        self._counts = all_gather_json(slice_rank).index(slice_rank) == own_rank()

    def go_on_from(self, before: SampleDigest) -> None:
        """Take what was used until a state that is gone on from."""
        self.before, self._own = before, SampleDigest()

    def add(self, numbers: range) -> None:
        """Take notice of a batch that this rank was given."""
        if self._counts:
            self._own += SampleDigest.of_range(numbers)

    def digest(self) -> SampleDigest:
        """Return that of all ranks; all of them call it."""
        figures = torch.tensor([self._own.count, self._own.total, self._own.squares])
        if dist.is_initialized():
            dist.all_reduce(figures)
        count, total, squares = figures.tolist()
        self.before += SampleDigest(count=count, total=total % PRIME, squares=squares % PRIME)
        self._own = SampleDigest()
        return self.before
