"""The loss scale of fp16: as large as gradients bear, so that small ones do not vanish.

The loss is multiplied by the scale before backward, and gradients are divided by it before they
are clipped.  A step whose gradients overflow is skipped on all ranks, since all have the same norm,
and halves the scale; 2,000 good steps in a row double it.  All of it stays on the device: no rank
waits to learn whether a step counted.
Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; the constants are
those of torch.amp.GradScaler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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

    def applied(self, loss: Tensor) -> Tensor:
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
