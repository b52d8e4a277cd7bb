"""State of a script's Engine: what a checkpoint keeps, and the whole model's tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from planner.errors import LaunchError
from planner.plan import Plan
from runtime import checkpoint, script_checkpoint
from runtime.averaged import Averaged
from runtime.exchange import all_gather_json
from runtime.mesh import Place
from runtime.script_checkpoint import Stateful
from runtime.script_stage import frozen_and_buffers
from runtime.torch_optimizers import TorchOptimizers


class ScriptState:
    """What this rank has of the state, and how it is written, read and made whole."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        modules: Sequence[nn.Module],
        optimizers: TorchOptimizers,
        *,
        shapes: Mapping[str, tuple[torch.dtype, torch.Size]],
        aliases: Mapping[str, str],
        device: torch.device,
    ) -> None:
        """`shapes` are of all of the user's module, `aliases` first names of tied parameters."""
        self.averages: list[Averaged] = []
        self._plan = plan
        self._place = place
        self._modules = tuple(modules)
        self._optimizers = optimizers
        self._shapes = shapes
        self._aliases = aliases
        self._device = device

    def tensors(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by name, sharing live memory."""
        result = self._optimizers.state()
        for name, value in frozen_and_buffers(self._modules).items():
            result[f"model.{name}"] = value
        for at, average in enumerate(self.averages):
            result |= average.state(f"ema{at or ''}")
        return result

    def save(self, folder: Path, extra: Mapping[str, Stateful], *, keep: int) -> Path:
        """Write a checkpoint with all ranks; return where it is."""
        assert self._optimizers.agreement is not None
        self._optimizers.agreement.refuse_drifted()
        own = None
        if self._place.stage == 0 and self._place.along("tensor") == 0:
            own = {
                "groups": self._optimizers.settings(),
                "extra": {name: one.state_dict() for name, one in extra.items()},
            }
        return script_checkpoint.save(
            folder,
            self.tensors(),
            own,
            plan=self._plan,
            slice_rank=self._place.data_rank,
            step=int(self._optimizers.steps),
            keep=keep,
        )

    def load(self, folder: Path, extra: Mapping[str, Stateful]) -> Path:
        """Go on from a checkpoint, or the newest one of a folder, that any plan wrote."""
        place = script_checkpoint.found(folder)
        if place is None:
            raise LaunchError(f"{folder}: has no complete checkpoint; engine.resume() starts anew")
        stored = set(script_checkpoint.stored_names(place))
        self._optimizers.expect(stored)
        state = self.tensors()
        lacking = [name for name in state if name.startswith("model.") and name not in stored]
        if lacking:
            raise LaunchError(
                f"{place}: has no '{lacking[0].removeprefix('model.')}'; it is of another model"
            )
        state = {name: value for name, value in state.items() if name in stored}
        checkpoint.load(place, state)
        self._optimizers.loaded(state)
        for at, average in enumerate(self.averages):
            average.loaded(f"ema{at or ''}", state)
        own = script_checkpoint.own_state(place, self._place.data_rank)
        self._optimizers.take_settings(own["groups"])
        for name, one in extra.items():
            if name not in own["extra"]:
                raise LaunchError(
                    f"{place}: has no state of '{name}'; it has {', '.join(own['extra']) or 'none'}"
                )
            one.load_state_dict(own["extra"][name])
        return place

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Return whole tensors of one kind on the CPU of every rank, by name; all ranks call it."""
        own = {}
        for name, value in self.tensors().items():
            if name.startswith(f"{kind}."):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                own[name.removeprefix(f"{kind}.")] = full.detach().cpu().clone()
        if self._plan.mesh.pipeline > 1:
            group = self._place.axis("pipeline").get_group()
            every: list[Any] = all_gather_json(list(own), group=group)
            for name in sorted({name for names in every for name in names}):
                dtype, shape = self._shapes[name]
                value = own.get(name, torch.empty(shape, dtype=dtype))
                holder = next(at for at, names in enumerate(every) if name in names)
                dist.broadcast(value, group=group, group_src=holder)
                own[name] = value
        for name, first in self._aliases.items():
            if first in own:
                own.setdefault(name, own[first])
        return own

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters and buffers the values of these whole tensors, by name."""
        own = self.tensors()
        for name, value in own.items():
            given = state.get(name.removeprefix("model."))
            if not name.startswith("model.") or given is None:
                continue
            if given.shape != value.shape:
                raise LaunchError(
                    f"{name.removeprefix('model.')}: has shape {tuple(value.shape)}, and the given "
                    f"one {tuple(given.shape)}"
                )
            if isinstance(value, DTensor):
                copied = distribute_tensor(
                    given.to(self._device), value.device_mesh, value.placements, src_data_rank=None
                )
                value.to_local().copy_(copied.to_local())
            else:
                value.copy_(given)
        self._optimizers.weights_loaded(own)
