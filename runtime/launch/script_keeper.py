"""Keeper of a script's state: what `meshwright run --checkpoint` adds to the Engine of a script.

Ranks save by themselves where the least is lost, copy their state to memory that outlives them, and
tell where they are.  A state belongs to the moment between two steps, when a step begins: by then a
script has done what it does behind one (a scheduler's step, a counter).  What is iterated over has
given the next batch away by then, so its state is taken when a step is done.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.events import Saved
from meshwright.planner.errors import HandedOver, LaunchError
from meshwright.planner.schedules import schedule_of
from meshwright.planner.whatif.pricing.goodput import save_figures
from meshwright.planner.whatif.pricing.survival import RunSeconds
from meshwright.planner.whatif.study import Failures
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.checkpoint.checkpoint import TrainingIdentity
from meshwright.runtime.checkpoint.writer import MEASURED_AFTER, RECENT
from meshwright.runtime.core.object_collectives import host_group, number_of_ranks
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.engine_state import Stateful, checkpoint_in
from meshwright.runtime.resilience.heartbeat import Beacon, own_seconds
from meshwright.runtime.resilience.in_memory_checkpoint import MEASURED, Mirror
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.environment import (
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    OUTPUT_VARIABLE,
    TOKEN_VARIABLE,
)
from meshwright.runtime.run.metrics import Metrics
from meshwright.runtime.run.run_clock import unix_now_s

KEEP = 2


class _TakenState:
    """State that was taken of an object before."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        """Return it."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Refuse: it is only written."""
        raise NotImplementedError


class DoubtfulStep(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """A step has ruined parameters; done again, it may be well."""


class ScriptKeeper:
    """One rank's part; all ranks of a script make it, and use it, together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_joined = dist.is_initialized()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._beacon = Beacon(local_rank)
        named = os.environ.get(CHECKPOINT_VARIABLE)
        self._folder = None if named is None else Path(named)
        every = os.environ.get(EVERY_VARIABLE)
        self._every = None if every is None else int(every)
        self._asked = every is not None
        self._extra: Mapping[str, Stateful] | None = None
        """None until the script has said what goes with its state."""
        self._taken: dict[str, Any] = {}
        self._copies = self._saves = False
        """Copies and saves that are due when the next step begins."""
        self._noticed = False
        self._loss = 0.0
        self._first: int | None = None
        self._last_saved = self._last_tried = 0
        self._step_s: list[float] = []
        self._ended_s: float | None = None
        self._begin_own_s = self._between_s = 0.0
        """Own seconds when the step began, and seconds of the script before it."""
        self._wrote_s: float | None = None
        identity = TrainingIdentity(
            model=engine.plan.model.name,
            model_digest=engine.plan.model.digest,
            corpus="script",
            corpus_digest="script",
            seq_len=engine.plan.seq_len or 1,
            seed=engine.plan.training.seed,
        )
        self._identity = identity
        # Updates of a stale schedule are always one step late, and it measures no norm.
        self._is_stale = stale = schedule_of(engine.plan.schedule).stale
        self._mirror = None
        if not stale and self._folder is not None:
            self._mirror = Mirror.of_environment(
                local_rank=local_rank,
                run=os.environ.get(TOKEN_VARIABLE, "0"),
                plan=engine.plan.digest,
                identity=identity,
            )
        self._metrics = None
        if engine.leads and (output := os.environ.get(OUTPUT_VARIABLE)) is not None:
            self._metrics = Metrics(Path(output))

    # --- going on -----------------------------------------------------------------------------

    def resume(self, folder: Path | None, extra: Mapping[str, Stateful]) -> bool:
        """Go on from the newest state, a copy or a checkpoint; say whether there is one."""
        ours = self._folder
        if ours is not None and folder is not None and folder.resolve() != ours.resolve():
            raise LaunchError(
                f"engine.resume() got the folder {folder}, but meshwright run saves in {ours}. "
                "Leave out the folder, or give that one"
            )
        saves_in = self._folder or folder
        if saves_in is None:
            raise LaunchError(
                "engine.resume() has no folder of checkpoints. Give it one, or start the script "
                "with meshwright run --checkpoint FOLDER"
            )
        self._extra = extra
        saved = checkpoint_in(saves_in)
        step = 0 if saved is None else checkpoint.progress(saved).step
        goes_on = self._go_on_from_copy(step) or saved is not None
        if saved is not None and self._engine.steps < step:
            self._check(saved)
            self._engine.load(saves_in, extra=extra)
        self._last_saved = self._last_tried = step
        return goes_on

    def _check(self, saved: Path) -> None:
        """Refuse to go on with another global batch than what was saved had."""
        from meshwright.planner.documents.document import read  # noqa: PLC0415
        from meshwright.planner.documents.plan import Plan  # noqa: PLC0415

        before = read(Plan, saved / checkpoint.PLAN).global_batch
        if before != self._engine.plan.global_batch:
            raise LaunchError(
                f"{saved}: the checkpoint has a global batch of {before}, and the plan has "
                f"{self._engine.plan.global_batch}. Use a plan with the same batch, or call "
                "engine.load(folder) if the script changes the batch on purpose"
            )

    def _go_on_from_copy(self, saved_step: int) -> bool:
        """Have the state of the newest copy, if it is newer than what is saved."""
        if self._mirror is None:
            return False
        names = self._mirror.stored_names()
        if not names:
            return False
        state = self._engine.script_state
        kept = self._mirror.newest(state.boxes_of(names))
        if kept is None or kept.step <= saved_step:
            return False
        source = f"the copy in memory of step {kept.step}"
        if kept.identity is None:
            raise LaunchError(
                f"{source} does not name its script and plan; resume from a checkpoint"
            )
        kept.identity.check(self._identity, source=source)
        if wrong := kept.used.wrong(kept.snapshots[0].next_sample):
            raise LaunchError(f"{source} cannot be used: {wrong}")
        self._engine.restore(kept.snapshots)
        state.take_own(kept.files, self._extra or {})
        if self._engine.leads:
            print(f"resuming from {source}", file=sys.stderr, flush=True)
        return True

    # --- keeping ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Copy or save the state that was due behind the last step."""
        step = self._engine.steps
        now_s = time.perf_counter()
        self._between_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        if self._copies or self._saves:
            states = {
                name: self._taken[name] if name in self._taken else state.state_dict()
                for name, state in (self._extra or {}).items()
            }
            if self._copies and self._mirror is not None:
                self._copy(self._mirror, step, states)
            if self._saves:
                self._beacon.begin_part(step, "save")
                self._save(step, states, is_last=self._noticed)
            ends = self._saves and _ends_to_grow()
            self._copies = self._saves = False
            self._taken = {}
            if ends and not self._noticed:
                raise HandedOver(growth.REASON)
        if self._noticed and self._extra is not None and self._folder is not None:
            raise HandedOver(f"the script stopped on notice after step {step}")
        self._beacon.begin_part(step + 1, "step")
        self._begin_own_s = self._own_s()

    def _own_s(self) -> float:
        """Seconds of this rank's own work; 0 where a device does it, which says nothing of that."""
        return own_seconds() if self._engine.device.type == "cpu" else 0.0

    def end_step(self, loss: float, norm: float, step_s: float, *, noticed: bool) -> None:
        """Say what is due, and take the state of what is iterated over.

        Raises DoubtfulStep where the step has ruined parameters: its state is not kept.
        """
        step = self._engine.steps
        self._refuse_ruin(step, loss, norm)
        self._beacon.count_step(
            data_s=self._between_s,
            work_s=self._own_s() - self._begin_own_s,
            whole_s=self._between_s + step_s,
        )
        self._beacon.begin_part(step + 1, "batch")
        self._loss, self._noticed = loss, noticed
        ended_s, now_s = self._ended_s, time.perf_counter()
        self._ended_s = now_s  # what a script does between steps is of its pace, too
        self._step_s.append(step_s if ended_s is None else now_s - ended_s)
        del self._step_s[:-RECENT]
        self._first = step if self._first is None else self._first
        if self._extra is None or self._folder is None:
            return
        self._saves = noticed or self._is_save_due(step)
        self._copies = self._mirror is not None and self._mirror.is_due(step)
        if self._copies or self._saves:
            self._taken = {
                name: state.state_dict()
                for name, state in self._extra.items()
                if _is_iterable(state)
            }

    def _refuse_ruin(self, step: int, loss: float, norm: float) -> None:
        """Raise where a step gave no number and parameters of any rank have none any more."""
        if math.isfinite(loss) and (self._is_stale or math.isfinite(norm)):
            return
        ruined = torch.tensor([int(any(map(_has_no_number, self._engine.state().values())))])
        if self._is_joined:
            dist.all_reduce(ruined, group=host_group())
        if ruined:
            raise DoubtfulStep(
                f"step {step} gave loss {loss:g} and gradient norm {norm:g}, and its update made "
                "parameters nan; nothing is saved of it. Lower the learning rate, or look at the "
                "data of this step"
            )

    def finish(self) -> None:
        """Save what the script has done last, once it has come to its end."""
        if self._extra is None or self._folder is None:
            return
        step = self._engine.steps
        if self._is_joined and not dist.is_initialized():
            if step > self._last_saved and self._engine.leads:
                print(
                    f"warning: step {step} is not saved, since the script has left its process "
                    "group; call engine.save() before it leaves",
                    file=sys.stderr,
                )
            return
        if step > self._last_saved:
            self._beacon.begin_part(step, "save")
            states = {name: state.state_dict() for name, state in self._extra.items()}
            self._save(step, states, is_last=True)
        self._beacon.begin_part(step, "end")

    def _is_save_due(self, step: int) -> bool:
        assert self._first is not None
        if not self._asked and step == self._first + MEASURED_AFTER:
            self._every = self._usual_interval()
        return self._every is not None and step - self._last_tried >= self._every

    def _usual_interval(self) -> int:
        """Return the steps between saves at which the least is lost, the same on all ranks."""
        engine = self._engine
        world = number_of_ranks()
        parameters = sum(
            value.numel() for name, value in engine.state().items() if name.startswith("model.")
        )
        figures = save_figures(Failures(), RunSeconds(), parameters=parameters, devices=world)
        if self._wrote_s is not None:
            measured = {"blocked_s": self._wrote_s, "written_s": self._wrote_s}
            figures = figures.model_copy(update=measured)
        every = torch.tensor([figures.every_steps(statistics.median(self._step_s))])
        if dist.is_initialized():
            dist.broadcast(every, src=0, group=host_group())
        return int(every)

    def _save(self, step: int, states: Mapping[str, Any], *, is_last: bool) -> None:
        """Save, or say why not where another save comes; the last state is then in memory."""
        assert self._folder is not None
        begin_s = time.perf_counter()
        extra = {name: _TakenState(state) for name, state in states.items()}
        try:
            self._engine.save(self._folder, extra=extra, keep=KEEP)
        except LaunchError as error:
            if self._mirror is None:
                raise
            # Copies outlive this process; the next save tries again.
            if is_last:
                self._copy(self._mirror, step, states)
                raise
            if self._engine.leads:
                print(f"warning: {error}; training continues", file=sys.stderr, flush=True)
            self._last_tried = step
            return
        self._last_saved = self._last_tried = step
        self._wrote_s = time.perf_counter() - begin_s
        if self._metrics is not None:
            self._metrics.log_event(
                Saved(
                    at_unix_s=unix_now_s(),
                    step=step,
                    blocked_s=self._wrote_s,
                    written_s=self._wrote_s,
                )
            )
        if not self._asked and len(self._step_s) > MEASURED_AFTER:
            self._every = self._usual_interval()

    def _copy(self, mirror: Mirror, step: int, states: Mapping[str, Any]) -> None:
        engine = self._engine
        began_s, usual_s = time.thread_time(), min(self._step_s[-MEASURED:])
        snapshot = engine.snapshot(copied=False)
        mirror.copy(
            snapshot,
            used=SampleDigest.of_first(engine.next_sample),
            began_s=began_s,
            step_s=usual_s,
            loss=self._loss,
            files=engine.script_state.own_files(states),
        )
        if self._metrics is not None and mirror.costs_more:
            self._metrics.log_event(mirror.interval(usual_s, snapshot.size_bytes))


def _ends_to_grow() -> bool:
    """Say whether the run goes on on more nodes; all ranks ask where they save."""
    if not growth.may_be_asked():
        return False
    is_joined = dist.is_initialized()
    leads = not is_joined or dist.get_rank() == 0
    asked = torch.tensor([int(leads and growth.is_asked())])
    if is_joined:
        dist.broadcast(asked, src=0, group=host_group())
    return bool(asked)


def _has_no_number(value: torch.Tensor) -> bool:
    """Say whether a tensor, or this rank's part of one, has an element that is not finite."""
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.is_floating_point() and not bool(torch.isfinite(part.float()).all())


def _is_iterable(value: object) -> bool:
    """Say whether something gives batches away, so that it stands behind the step's own."""
    return hasattr(value, "__iter__") or hasattr(value, "__next__")
