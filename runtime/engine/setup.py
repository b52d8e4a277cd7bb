"""Start of a script's rank: its plan, its device, its process group, and the module it builds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.planner.documents.document import read
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import BatchError, LaunchError, OptimizerError
from meshwright.runtime.core.object_collectives import all_gather_json, broadcast_json
from meshwright.runtime.core.side_effects import RandomNumbers, seed_all
from meshwright.runtime.run.environment import PLAN_VARIABLE
from meshwright.runtime.tracing.training_modes import TrainingModes


def plan_or_layout(
    plan: Plan | Mapping[str, Any] | str | Path | None,
) -> Plan | Mapping[str, Any]:
    """Return the plan that a script or $MESHWRIGHT_PLAN names, or the fields of a layout."""
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    if isinstance(plan, str | Path):
        return read(Plan, plan)
    return {} if plan is None else plan


def built(build: Callable[[], nn.Module], plan: Plan | Mapping[str, Any]) -> nn.Module:
    """Build the module under the plan's seed, and leave the caller's random numbers alone.

    Python's and numpy's are seeded too: all ranks draw the same first values and permutations.

    Raises LaunchError where `build` is no function that returns a module without complex numbers.
    """
    if isinstance(build, nn.Module):
        name = type(build).__name__
        raise LaunchError(
            f"build: is a {name}, a module that was built already; give a function that builds it "
            f"on every rank under the plan's seed: build={name} or build=lambda: {name}(...)"
        )
    if not callable(build):
        raise LaunchError(
            f"build: is a {type(build).__name__}; give a function that returns the module, such as "
            "build=lambda: Net(width=64)"
        )
    numbers = RandomNumbers()
    try:
        seed_all(plan.training.seed if isinstance(plan, Plan) else plan.get("seed", 0))
        module = build()
    finally:
        numbers.put_back()
    if not isinstance(module, nn.Module):
        raise LaunchError(
            f"build: returned a {type(module).__name__}; it returns an nn.Module (end it with "
            "`return module`)"
        )
    TrainingModes(module).set_mode(training=True)
    for name, parameter in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(parameter):
            raise LaunchError(
                f"{name}: has no shape before the first forward; end build() with one, on an "
                "example (`module(x)`), or write the size instead of a Lazy module"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise LaunchError(
                f"{name}: is a complex parameter, which gradients and optimizers of a plan do not "
                "take; keep it as real numbers and write torch.view_as_complex(self.weight) in "
                "forward, with weight of shape [..., 2]"
            )
    return module


def check_functions(loss: object, optimizer: object) -> None:
    """Refuse a loss or an optimizer that is not called as an Engine calls it.

    Raises BatchError or OptimizerError, with the line to write.
    """
    if isinstance(loss, nn.modules.loss._Loss):
        name = type(loss).__name__
        raise BatchError(
            f"loss: is nn.{name}(), which takes outputs and targets; an Engine calls loss(outputs, "
            f'batch) and adds sums: loss=lambda out, batch: (nn.{name}(reduction="sum")(out, '
            "batch[1]), len(out))"
        )
    if not callable(loss):
        raise BatchError(
            f"loss: is a {type(loss).__name__}; give a function such as loss=lambda out, batch: "
            '(F.cross_entropy(out, batch[1], reduction="sum"), len(out))'
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise OptimizerError(
            f"optimizer: is an {name} over parameters that exist already; the engine gives it this "
            f"rank's parts: optimizer=lambda groups: torch.optim.{name}(groups, lr=...)"
        )
    if not callable(optimizer):
        raise OptimizerError(
            f"optimizer: is a {type(optimizer).__name__}; give a function of parameter groups such "
            "as optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4)"
        )


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
    from meshwright.runtime.core.process_group import join  # noqa: PLC0415 - a process that runs alone needs none of it

    with contextlib.suppress(KeyError):
        join(
            "cuda" if device.type == "cuda" else "cpu",
            rank=int(os.environ["RANK"]),
            world_size=ranks,
            timeout_s=600.0 if timeout_s is None else timeout_s,
        )


def plan_of_all(plan: Plan | Mapping[str, Any]) -> Plan | Mapping[str, Any]:
    """Return the plan that all ranks train by: rank 0's, where each of them made one.

    Ranks that plan for `local` agree where they share a cache of its figures; nodes do not.

    Raises LaunchError where some ranks have a plan and others have none.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return plan
    digests = all_gather_json(plan.digest if isinstance(plan, Plan) else None)
    if None in digests and any(digests):
        without = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest is None)
        raise LaunchError(
            f"plan: give it to all ranks, or to none; it is missing on rank {without}"
        )
    if len(set(digests)) == 1:
        return plan
    mine = plan.model_dump(mode="json", exclude_none=True) if isinstance(plan, Plan) else None
    return Plan.of(broadcast_json(mine, source=0))
