"""The learning rate of each step, as the plan's training settings say."""

from __future__ import annotations

import math

from meshwright.planner.documents.training import Training


def learning_rate(training: Training, step: int) -> float:
    """Return the rate of a step (0 is the first): a linear warm-up, then the plan's schedule.

    With p the part of the way down that is done, from 0 at the end of the warm-up (wsd: at the
    beginning of the decay) to 1 at step `rate_steps`, and f the floor,

        cosine       f + (1 - f) (1 + cos(π p)) / 2
        linear, wsd  f + (1 - f) (1 - p)

    times the highest rate.  Sources: Loshchilov and Hutter, 2017 (cosine); Hu et al., 2024 (wsd).

    >>> [learning_rate(Training(learning_rate=0.1, warmup_steps=2), step) for step in range(4)]
    [0.05, 0.1, 0.1, 0.1]
    >>> falling = Training(learning_rate=1.0, rate_schedule="linear", rate_steps=4, floor=0.2)
    >>> [round(learning_rate(falling, step), 2) for step in range(6)]
    [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    """
    highest, end = training.learning_rate, training.rate_steps
    if step < training.warmup_steps:
        return highest * (step + 1) / training.warmup_steps
    if training.rate_schedule == "constant":
        return highest
    begin = training.warmup_steps
    if training.rate_schedule == "wsd":
        begin = end - training.decay_steps
    done = min(1.0, max(0.0, (step - begin) / (end - begin)))
    left = (1 + math.cos(math.pi * done)) / 2 if training.rate_schedule == "cosine" else 1 - done
    return highest * (training.floor + (1 - training.floor) * left)
