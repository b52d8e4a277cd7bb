"""Averaged: an exponential moving average of weights, over this rank's parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.runtime.optim.gradients import Slot, share_values, take_sections, whole_part

Decay = float | Callable[[int], float]


class Averaged:
    """average <- decay average + (1 - decay) weights, behind each update that moved weights.

    The first update takes the weights as they are, as torch.optim.swa_utils.AveragedModel does,
    which copies the module and so takes no divided one; or the average begins with the weights of
    now.  Buffers are averaged where they are asked for, those of whole numbers taken as they are.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        decay: Decay,
        settle: Callable[[], None] = lambda: None,
        *,
        initial: bool = False,
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """`decay` may follow from how many updates there were; `initial` takes the weights of now.

        `settle` makes the updates that are still owed, before weights are exchanged.
        """
        self.decay, self._settle, self._begins = decay, settle, initial
        self._slots, self._buffers_now = tuple(slots), buffers
        self._values = [slot.local.clone() for slot in self._slots]
        self._buffers = {name: buffer.clone() for name, buffer in buffers().items()}
        self._updates = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in."""
        number = int(self._updates)
        decay = self.decay(number) if callable(self.decay) else self.decay
        share = 1.0 if number == 0 and not self._begins else 1 - decay
        if self._values:
            torch._foreach_lerp_(self._values, [slot.local for slot in self._slots], share)
        for name, buffer in self._buffers_now().items():
            value = self._buffers[name]
            value.lerp_(buffer, share) if value.is_floating_point() else value.copy_(buffer)
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
        for name, buffer in self._buffers_now().items():
            kept = buffer.clone()
            buffer.copy_(self._buffers[name])
            self._buffers[name].copy_(kept)
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
        averages |= {f"{kind}.{name}": value for name, value in self._buffers.items()}
        return averages | {f"{kind}-updates": self._updates}
