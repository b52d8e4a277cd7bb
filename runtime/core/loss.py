"""Loss as a sum and a count: what a micro-batch adds to the loss, and how much of it counts.

The loss of a step is the mean over everything that counts in the global batch: tokens that are not
masked, samples, pixels.  Micro-batches and ranks hold unequal parts of it, so no mean of means will
do: sums and counts are added over all of them, and the gradient is divided once.

    wanted          G = sum of the gradients of all sums / C,     C = sum of all counts
    backward        of sum / D on each rank, D a constant
    data            parallelism makes the mean over the R ranks that have samples of their own
    then            gradients are multiplied with R D / C, after the last backward

D is a power of two near C / R, so that dividing by it changes no digit and keeps 16-bit gradients
in range.  Nothing about the other ranks must be known before backward.

The loss scale of fp16 is as large as gradients bear, so that small ones do not vanish.  The loss is
multiplied by the scale before backward, and gradients are divided by it before they are clipped.  A
step whose gradients overflow is skipped on all ranks, since all have the same norm, and halves the
scale; 2,000 good steps in a row double it.  All of it stays on the device: no rank waits to learn
whether a step counted.
Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; the constants are
those of torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.planner.errors import BatchError
from meshwright.runtime.core.local_parts import to_local

IGNORED = -100
"""The target of a position that does not count, as in torch's cross-entropy."""


def divisor_near(count: float) -> float:
    """Return the power of two nearest to an expected count.

    >>> divisor_near(1000.0), divisor_near(1.0)
    (1024.0, 1.0)
    """
    return float(2.0 ** round(math.log2(max(count, 1.0))))


@dataclass(frozen=True, slots=True)
class Counted:
    """The loss of one micro-batch: its sum, its count and its metrics."""

    total: Tensor
    """The sum over all that counts, 0-dim, with its graph."""
    count: Tensor | float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Sums like `total`, or pairs of a sum and a count of its own."""


def loss_sum_of(returned: Any, samples: int | None) -> Counted:
    """Read what a loss function returned: sum and count, with or without metrics, or one mean.

    A mean is taken as one over `samples` that count alike; None: how many there are is not known.
    """
    if isinstance(returned, Tensor) and samples is None:
        raise BatchError(
            "the loss returned one tensor, and of a rank's own batch (local=True) nobody knows how "
            "much it is a mean of; return (sum, count), such as (mean * len(y), len(y))"
        )
    if isinstance(returned, Tensor):
        assert samples is not None
        return Counted(_scalar(returned, "the loss") * samples, float(samples))
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise BatchError(
            f"the loss returned {type(returned).__name__}; it returns (sum, count), "
            "(sum, count, metrics), or one tensor that is a mean over samples"
        )
    total, count = returned[:2]
    metrics = returned[2] if len(returned) == 3 else {}
    if not isinstance(total, Tensor):
        raise BatchError(
            f"the loss returned a sum of type {type(total).__name__}; it must be a tensor"
        )
    if not isinstance(metrics, Mapping):
        raise BatchError(
            f"the loss returned metrics of type {type(metrics).__name__}; give a dict of names"
        )
    if isinstance(count, Tensor):
        count = _scalar(count, "the count").detach()
    return Counted(_scalar(total, "the sum"), count, metrics)


def _scalar(value: Tensor, what: str) -> Tensor:
    if value.numel() != 1:
        raise BatchError(f"{what} has shape {tuple(value.shape)}; it is one number: add .sum()")
    return value.reshape(())


class Totals:
    """Sums and counts of the micro-batches that a rank has seen since the last step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reads = device.type == "cpu"  # whose numbers nobody waits for
        """Numbers go by the host; else they stay on their device."""
        # Sums of many losses are made in fp64: the mean of a large batch keeps its digits.
        self.values = torch.zeros(2, dtype=torch.float64, device=device)
        self.metrics: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Begin another step, with sums in the same memory: a graph of a pass adds to them."""
        self.values.zero_()
        self.metrics = {}

    @torch.no_grad()
    def add(self, micro_batch: Counted) -> None:
        """Add a micro-batch."""
        self.values += self._pair(micro_batch.total, micro_batch.count)
        for name, value in micro_batch.metrics.items():
            pair = value if isinstance(value, tuple) else (value, micro_batch.count)
            total = self._pair(*pair)
            self.metrics[name] = self.metrics[name] + total if name in self.metrics else total

    @torch.no_grad()
    def add_inner(self, value: Tensor) -> None:
        """Add a loss from inside the module: a sum that counts nothing more."""
        self.values += self._pair(value, 0.0)

    def _pair(self, total: Any, count: Any) -> Tensor:
        if self.reads:
            return torch.tensor([_float(total), _float(count)], dtype=torch.float64)
        return torch.stack([self._number(total), self._number(count)])

    def _number(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return plain(value).reshape(()).to(self._device, torch.float64)
        # Filled on the device: a copy from the host would wait for all that runs there.
        return torch.full((), float(value), dtype=torch.float64, device=self._device)


def _float(value: Any) -> float:
    return float(plain(value)) if isinstance(value, Tensor) else float(value)


def plain(value: Tensor) -> Tensor:
    """Return a value without its graph, as this rank has it."""
    return to_local(value.detach())


INITIAL = 2.0**16


GROWTH = 2.0


BACKOFF = 0.5


GROWTH_STEPS = 2000


LEAST = 1.0


"""Gradients that overflow at this scale are wrong for another reason."""


class LossScale:
    """The scale of one run, equal on all ranks.  Without fp16 it is not applied and never moves."""

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.active = active
        self.scale = torch.tensor(INITIAL, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return what backward begins at."""
        return loss * self.scale if self.active else loss

    def taken_off(self, value: Tensor) -> Tensor:
        """Return a loss or a norm as it would be without the scale."""
        return value / self.scale if self.active else value

    def spoilt(self, norm: Tensor) -> Tensor | None:
        """Return 1 if a gradient norm says that the step must be skipped, else 0; None: no fp16."""
        return (~norm.isfinite()).float() if self.active else None

    def skips(self, norm: float) -> bool:
        """Tell whether a step of this norm was skipped and a smaller scale may yet help."""
        return self.active and not math.isfinite(norm) and float(self.scale) > LEAST

    def update(self, spoilt: Tensor | None) -> None:
        """Move the scale after a step."""
        if spoilt is not None:
            torch._amp_update_scale_(
                self.scale, self.good_steps, spoilt, GROWTH, BACKOFF, GROWTH_STEPS
            )
            self.scale.clamp_(min=LEAST)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps, by name, sharing live memory."""
        return {"train.loss_scale": self.scale, "train.good_steps": self.good_steps}
