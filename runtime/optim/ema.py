"""Averaged: an exponential moving average of weights, over this rank's parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.runtime.optim.gradients import Slot, share_values, take_sections, whole_part


class Averaged:
    """average <- decay average + (1 - decay) weights, behind each update that moved weights.

    The first update takes the weights as they are, as torch.optim.swa_utils.AveragedModel does,
    which copies the module and so takes no divided one.
    """

    def __init__(
        self, slots: Sequence[Slot], decay: float, settle: Callable[[], None] = lambda: None
    ) -> None:
        """`settle` makes the updates that are still owed, before weights are exchanged."""
        self.decay, self._settle = decay, settle
        self._slots = tuple(slots)
        self._values = [slot.local.clone() for slot in self._slots]
        self._updates = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in."""
        weights = [slot.local for slot in self._slots]
        if self._values:
            if int(self._updates) == 0:
                torch._foreach_copy_(self._values, weights)
            else:
                torch._foreach_lerp_(self._values, weights, 1 - self.decay)
        self._updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages while this is open, to evaluate or to save them."""
        self._settle()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for slot, value in zip(self._slots, self._values, strict=True):
            kept = slot.local.clone()
            slot.local.copy_(value)
            value.copy_(kept)
        share_values(self._slots)

    def after_load(self, kind: str, state: Mapping[str, Tensor]) -> None:
        """Take over from a state that was filled what does not share memory with it."""
        for slot, value in zip(self._slots, self._values, strict=True):
            if slot.sections and f"{kind}.{slot.name}" in state:
                take_sections(slot, value, state[f"{kind}.{slot.name}"])

    def state(self, kind: str) -> dict[str, Tensor]:
        """Return the averages by name, sharing live memory."""
        averages = {
            f"{kind}.{slot.name}": whole_part(slot, value)
            for slot, value in zip(self._slots, self._values, strict=True)
        }
        return averages | {f"{kind}-updates": self._updates}
