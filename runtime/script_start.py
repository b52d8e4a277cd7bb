"""How a script's rank starts: its plan, its device, its process group, and the module it builds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.document import read
from planner.plan import Plan
from runtime.script_rank import PLAN_VARIABLE


def plan_or_layout(
    plan: Plan | Mapping[str, Any] | str | Path | None,
) -> Plan | Mapping[str, Any]:
    """Return the plan that a script was given or told of, or the fields of a layout."""
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    if isinstance(plan, str | Path):
        return read(Plan, plan)
    return {} if plan is None else plan


def built(build: Callable[[], nn.Module], plan: Plan | Mapping[str, Any]) -> nn.Module:
    """Build the module under the plan's seed, and leave the caller's random numbers alone."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(plan.training.seed if isinstance(plan, Plan) else plan.get("seed", 0))
        return build()


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device that this rank is given, or its own one of this node."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join_ranks(device: torch.device, *, timeout_s: float | None = None) -> None:
    """Join the process group of ranks that torchrun or `meshwright run` started, if none is."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or ranks == 1 or "RANK" not in os.environ:
        return
    from runtime.train import join  # noqa: PLC0415 - a process that runs alone needs none of it

    with contextlib.suppress(KeyError):
        join(
            "cuda" if device.type == "cuda" else "cpu",
            rank=int(os.environ["RANK"]),
            world_size=ranks,
            timeout_s=600.0 if timeout_s is None else timeout_s,
        )
