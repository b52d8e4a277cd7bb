"""State of a script's Engine: what a checkpoint keeps, and the whole model's tensors by name.

What of a script is not the model's (a scheduler, a loader's position, an epoch) is whatever has
`state_dict` and `load_state_dict`.  Each slice of the batch writes its own, since loaders differ;
numbers, strings, containers of them and tensors are read back, and nothing that would run code.

All ranks save and load together.  Where one of them fails, all raise: none waits for it.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.checkpoint import commit_recovery as unfinished
from meshwright.runtime.checkpoint.checkpoint import Progress
from meshwright.runtime.checkpoint.state_snapshot import Box, Snapshot, boxes, put_back
from meshwright.runtime.checkpoint.writer import Saver
from meshwright.runtime.core import checksums
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.object_collectives import all_gather_json, broadcast_json, raise_on_all
from meshwright.runtime.optim.ema import Averaged
from meshwright.runtime.optim.sharded_optimizer import TorchOptimizers


class Stateful(Protocol):
    """An object whose state is part of a script's state."""

    def state_dict(self) -> Any:
        """Return what makes another object like this one."""

    def load_state_dict(self, state: Any) -> Any:
        """Become like the object whose state this is."""


class StateKeeper(Protocol):
    """Saves the state of a script's Engine by itself, and resumes from it.

    Where `meshwright run --checkpoint` has started a script, its rank has one
    (`runtime.launch.script_keeper`); all ranks use theirs together.
    """

    def resume(self, folder: Path | None, extra: Mapping[str, Stateful]) -> bool:
        """Go on from the newest state, if there is one, and keep `extra` with it from here on."""

    def begin_step(self) -> None:
        """Take notice that a step begins: what was done behind the one before is done."""

    def end_step(self, loss: float, norm: float, step_s: float, *, noticed: bool) -> None:
        """Take notice that a step is done."""


class KeeperFactory(Protocol):
    """Makes the keeper of the first Engine of a process."""

    def __call__(self, engine: Any) -> StateKeeper:
        """Return what keeps an engine's state."""


_factories: list[KeeperFactory] = []


def keep_first_engine_by(factory: KeeperFactory) -> None:
    """Let the next Engine that a script makes be kept by what this makes."""
    _factories.append(factory)


def keeper_of(engine: Any) -> StateKeeper | None:
    """Return the keeper of an engine, if this process has one left."""
    return _factories.pop()(engine) if _factories else None


class ScriptState:
    """This rank's part of the state; writes and reads it and assembles the whole."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        optimizers: TorchOptimizers,
        *,
        beside: Callable[[], Mapping[str, Tensor]],
        aliases: Mapping[str, str],
        order: Iterable[str] = (),
        device: torch.device,
    ) -> None:
        """`beside` returns what is saved beside what is trained, by name.

        `aliases` are first names of tied parameters.  `order` has names as the module has them.
        """
        self.averages: list[Averaged] = []
        self._plan = plan
        self._place = place
        self._beside = beside
        self._optimizers = optimizers
        self._aliases = aliases
        self._order = {name: at for at, name in enumerate(order)}
        self._device = device

    def tensors(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by name, sharing live memory."""
        result = self._optimizers.state()
        for name, value in self._beside().items():
            result[f"model.{name}"] = value
        for at, average in enumerate(self.averages):
            result |= average.state(f"ema{at or ''}")
        return result

    def progress(self, next_sample: int) -> Progress:
        """Return how far training has come: behind which step, before which sample.

        Raises LaunchError before the first step.
        """
        if self._optimizers.steps < 1:
            raise LaunchError(
                "nothing to save before the first step; build() makes the same weights"
            )
        return _progress(self._plan, int(self._optimizers.steps), next_sample)

    def save(
        self, folder: Path, extra: Mapping[str, Stateful], *, done: Progress, keep: int
    ) -> Path:
        """Write a checkpoint with all ranks; return where it is.

        Raises LaunchError, on all ranks, where replicas have drifted or where the state of one
        rank's own is no plain data.
        """
        if self._optimizers.agreement is not None:
            self._optimizers.agreement.refuse_drifted()
        with raise_on_all():
            beside = self.own_files({name: one.state_dict() for name, one in extra.items()})
            state = self.tensors()
        saver = Saver(folder, plan=self._plan, keep=keep, group=self._group)
        return saver.save(state, done, beside)

    def own_files(self, states: Mapping[str, Any]) -> dict[str, bytes]:
        """Return what this rank writes beside tensors: one of each slice has the script's state."""
        if self._place.stage != 0 or self._place.along("tensor") != 0:
            return {}
        plain_states = {name: _plain(f"extra '{name}'", state) for name, state in states.items()}
        groups = _plain("the optimizer's groups", self._optimizers.settings())
        own = _pickle({"groups": groups, "extra": plain_states})
        return {_own_file(self._place.data_rank): own}

    def boxes_of(self, stored: Iterable[str]) -> dict[str, Box]:
        """Return which parts of stored tensors this rank needs to go on from them."""
        with self._optimizers.expect_state(list(stored)):
            return boxes(self.tensors())

    def take_own(self, files: Mapping[str, bytes], extra: Mapping[str, Stateful]) -> None:
        """Give the optimizer's groups and objects of the script what own files have of them."""
        name = _own_file(self._place.data_rank)
        state = _unpickle(io.BytesIO(files.get(name) or files[_own_file(0)]))
        self._optimizers.take_settings(state["groups"])
        for name, one in extra.items():
            if name not in state["extra"]:
                raise LaunchError(f"the copy in memory has no state of '{name}'; leave it out")
            one.load_state_dict(state["extra"][name])

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo") if dist.is_initialized() else None

    def load(self, folder: Path, extra: Mapping[str, Stateful]) -> tuple[Path, int]:
        """Go on from a checkpoint, or the newest one of a folder, that any plan wrote.

        Return where it is, and the sample that comes next.
        """
        place = checkpoint_in(folder)
        if place is None:
            raise LaunchError(f"{folder}: has no complete checkpoint; engine.resume() starts anew")
        with raise_on_all():
            stored = set(checkpoint.stored_names(place))
            rank_state = own_state(place, self._place.data_rank)
            absent = next((name for name in extra if name not in rank_state["extra"]), None)
            if absent is not None:
                having = ", ".join(rank_state["extra"]) or "none"
                raise LaunchError(f"{place}: has no state of '{absent}'; it has {having}")
            names = [name for name in self.tensors() if name.startswith("model.")]
            lacking = next((name for name in names if name not in stored), None)
            if lacking is not None:
                raise LaunchError(
                    f"{place}: has no '{lacking.removeprefix('model.')}'; it belongs to another "
                    "model"
                )
            self._optimizers.expect(stored)
            state = {name: value for name, value in self.tensors().items() if name in stored}
        checkpoint.load(place, state)
        with raise_on_all():
            self._after_load(state)
            self._optimizers.take_settings(rank_state["groups"])
            for name, one in extra.items():
                one.load_state_dict(rank_state["extra"][name])
        return place, checkpoint.progress(place).sample

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Go on from what snapshots have of this rank's state; nothing changes if that lacks."""
        stored = {name for snapshot in snapshots for name in snapshot.parts}
        with self._optimizers.expect_state(stored):
            state = self.tensors()
            put_back(state, snapshots)
        self._after_load(state)

    def _after_load(self, state: Mapping[str, Tensor]) -> None:
        """Take over from a state that was filled what does not share memory with it."""
        self._optimizers.after_load(state)
        for at, average in enumerate(self.averages):
            average.after_load(f"ema{at or ''}", state)

    def whole_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return whole tensors of one kind on the CPU of every rank, by name; all ranks call it.

        They are in the order of the module on each rank, whatever part it has.
        """
        parts = {}
        for name, value in self.tensors().items():
            if name.startswith(f"{kind}."):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                # A collective sends memory as it lies: elements in their order, on every rank.
                parts[name.removeprefix(f"{kind}.")] = (
                    full.detach().cpu().clone(memory_format=torch.contiguous_format)
                )
        if self._place.degrees.pipeline > 1:
            group = self._place.axis("pipeline").get_group()
            having = {
                name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
                for name, value in parts.items()
            }
            every: list[Any] = all_gather_json(having, group=group)
            shapes = {name: like for rank_shapes in every for name, like in rank_shapes.items()}
            for name, (dtype, shape) in sorted(shapes.items()):
                value = parts.get(name, torch.empty(shape, dtype=getattr(torch, dtype)))
                holder = next(at for at, names in enumerate(every) if name in names)
                dist.broadcast(value, group=group, group_src=holder)
                parts[name] = value
        for name, first in self._aliases.items():
            if first in parts:
                parts.setdefault(name, parts[first])
        last = len(self._order)
        return dict(sorted(parts.items(), key=lambda one: (self._order.get(one[0], last), one[0])))

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters and buffers the values of these whole tensors, by name."""
        tensors = self.tensors()
        held = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
        every = all_gather_json(held)
        names_here = {*self._aliases, *(name for names in every for name in names)}
        unknown = [name for name in state if name not in names_here]
        if unknown:
            raise LaunchError(
                f"{unknown[0]}: is no parameter or buffer of the module, as {len(unknown)} of "
                f"{len(state)} given names are not; take off a wrapper's prefix ('module.'), or "
                f"leave them out (the module has {', '.join(sorted(names_here)[:3])}, ...)"
            )
        firsts = {self._aliases.get(name, name): value for name, value in state.items()}
        for name, value in tensors.items():
            given = firsts.get(name.removeprefix("model."))
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
        self._optimizers.weights_loaded(tensors)


def checkpoint_in(folder: Path) -> Path | None:
    """Return a checkpoint, or the newest one in a folder of them, if there is one.

    All ranks ask together; a checkpoint whose ranks died when its files were whole counts.  Raises
    LaunchError, on all ranks, where the newest is damaged.
    """
    place: str | None = None
    with raise_on_all():
        if not dist.is_initialized() or dist.get_rank() == 0:
            place = _user_file(folder)
            place = place and os.path.relpath(place, folder)  # another node's may lie elsewhere
    if dist.is_initialized():
        place = broadcast_json(place, source=0)
    return None if place is None else folder / place


def _user_file(folder: Path) -> str | None:
    if (folder / checkpoint.META).exists():
        wrong = checkpoint.problem(folder)
        if wrong is not None:
            raise checkpoint.refusal(folder, wrong)
        return str(folder)
    unfinished.commit(folder, say=functools.partial(print, file=sys.stderr, flush=True))
    newest = checkpoint.to_resume(folder)
    return None if newest is None else str(newest)


def _plain(name: str, state: Any) -> Any:
    """Return state of the script's own; refuse what could be written and never be read."""
    try:
        _unpickle(io.BytesIO(_pickle(state)))
    except Exception as error:  # state of the user's own may fail in any way
        raise LaunchError(
            f"{name}: cannot be saved as plain data: {checkpoint.short(error)}; let "
            "state_dict() return numbers, strings, lists, dicts and tensors"
        ) from error
    return state


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpickle(file: BinaryIO) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def own_state(place: Path, slice_rank: int) -> dict[str, Any]:
    """Return the state of this slice; where there were fewer slices, what the first one did."""
    path = place / _own_file(slice_rank)
    if not path.exists():
        path = place / _own_file(0)
    try:
        with checksums.open_regular(path) as file:
            state: dict[str, Any] = _unpickle(file)
    except Exception as error:  # a damaged pickle ends in any error
        raise LaunchError(
            f"{path}: cannot be read as plain data: {checkpoint.short(error)}"
        ) from error
    return state


def _own_file(slice_rank: int) -> str:
    return f"user-{slice_rank:05}.pt"


def _progress(plan: Plan, step: int, next_sample: int) -> Progress:
    return Progress(
        step=step,
        sample=next_sample,
        epoch=0,
        seq_len=plan.seq_len or 1,
        seed=plan.training.seed,
        model=plan.model.name,
        model_digest=plan.model.digest,
        plan_digest=plan.digest,
        corpus="script",
        corpus_digest="script",
        loss=0.0,
    )
