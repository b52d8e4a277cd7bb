"""What all ranks of a run have used of the stream of samples: each says it of its own batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.data.sample_digest import PRIME, SampleDigest


class UsedSamples:
    """The digest of a run, on one of its ranks; all of them make it, and use it, together."""

    def __init__(self, slice_rank: int) -> None:
        """Ranks of one slice read the same samples, and the first of them counts."""
        self.before = SampleDigest()
        """What was used until all ranks were asked last."""
        self._own = SampleDigest()
        slices = all_gather_json(slice_rank) if dist.is_initialized() else [slice_rank]
        self._counts = not dist.is_initialized() or slices.index(slice_rank) == dist.get_rank()

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
