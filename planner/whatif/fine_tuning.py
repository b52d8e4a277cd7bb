"""Fine-tuning with adapters (LoRA, QLoRA): the fastest plan of public fine-tuners.

Each fine-tuner is a stack with a space of its own, searched like any other.  Frozen weights may lie
in host memory where the cluster says how much there is and how it is reached.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.catalog import stacks
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.search import search

TUNERS = ("transformers", "megatron")
"""Stacks that are searched: Hugging Face's Trainer with peft, Megatron Bridge or NeMo."""
RANK = 16
"""Of adapters, where nobody says."""


def fastest_fine_tuner(request: Request, *, quantised: bool, below_s: float = math.inf) -> Answer:
    """Return the fastest plan of any fine-tuner; NoPlanFits says why each has none.

    Where none takes less than a finite `below_s`, it says no more than that.
    """
    job = request.job
    adapters = replace(job, lora=job.lora or Lora(rank=RANK, quantised=quantised))
    groups = request.cluster.groups
    pins = request.pins
    if all(g.host_memory_bytes and g.host_link_bytes_per_s for g in groups):
        pins = replace(pins, allowed=pins.allowed | {"offload"})
    best: Answer | None = None
    reasons: list[str] = []
    for name in TUNERS:
        try:
            answer = search(
                replace(request, job=adapters, stack=stacks()[name], pins=pins), below_s=below_s
            )
        except NoPlanFits as error:
            reasons.append(f"{name}: {error}")
            continue
        if best is None or answer.prediction.step_time_s < best.prediction.step_time_s:
            best = answer
    if best is None:
        raise NoPlanFits("\n".join(reasons))
    return best
