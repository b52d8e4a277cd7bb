"""Engine: a user's own module, loss and optimizer under a plan, from the user's own loop.

    engine = Engine(build, plan, loss=loss, optimizer=lambda groups: SGD(groups, lr=0.1))
    for batch in loader:                      # each rank gives its slice: engine.slice(batch)
        result = engine.step(batch)           # result.loss, result.grad_norm, result.metrics

Every rank runs the same script and calls the same methods in the same order.  Whatever the plan,
losses and weights are those of one process with the same micro-batches, to rounding.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.documents.plan import Plan
from planner.errors import BatchError, LaunchError
from runtime import batches, inner_loss
from runtime.agreement import COMPARED_EVERY
from runtime.averaged import Averaged
from runtime.batch_norm import Kind, RunningStatistics
from runtime.compiled import Compiler
from runtime.coupled_loss import check_loss
from runtime.gradients import Measured, Slot, copies_of
from runtime.loss import Totals, divisor_near
from runtime.loss_scale import LossScale
from runtime.mesh import Place, place_of
from runtime.parallelize import activation_type
from runtime.participation import Participation
from runtime.recorder import Inputs, Recorder
from runtime.script_loader import Loader
from runtime.script_model import (
    SAMPLES,
    check_module,
    check_replay,
    few_samples,
    refuse_changing,
)
from runtime.script_passes import Passes
from runtime.script_plan import script_plan
from runtime.script_records import ScriptRecords
from runtime.script_stage import (
    check_layers,
    frozen_and_buffers,
    holders_of,
    modules_of,
    refuse_hooks,
    refuse_plan,
    refuse_sparse,
    script_stage,
)
from runtime.script_start import built, check_functions, device_of, join_ranks, plan_or_layout
from runtime.script_state import ScriptState, Stateful, checkpoint_in
from runtime.script_tensor import Styles, styles_by_name
from runtime.torch_habits import LossValue, missing, refuse_zero_grad
from runtime.torch_optimizers import Factory, GroupOf, TorchOptimizers, grouped
from runtime.transforms import Staged
from runtime.whole_batch import whole_batch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step or a part of it says, equal on every rank."""

    loss: LossValue
    """Mean over all that counts in the global batch, before the update."""
    count: float
    grad_norm: float = float("nan")
    """Of the whole model, before clipping; not known before the last backward of a step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss returned beside, each a mean over its count."""
    skipped: bool = False
    """No weight moved: nothing counted, or gradients overflowed in fp16."""
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """With `track_unused`: parameters that took no part, and on which ranks."""

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse: the backward pass was part of the step."""
        self.loss.backward()


class Engine:
    """One rank of a plan for a module of the user's own."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        plan: Plan | Mapping[str, Any] | str | Path | None = None,
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: Factory,
        batch: Any,
        inputs: Inputs | None = None,
        groups: GroupOf | None = None,
        units: Sequence[str] | None = None,
        clip_norm: float = 0.0,
        gather: bool = True,
        batch_norm: Kind = "per_micro_batch",
        tensor: Styles | None = None,
        compare_every: int = COMPARED_EVERY,
        track_unused: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Build the module on every rank, and keep this rank's part of it.

        `build` returns the module on the CPU, under the plan's seed.  `plan` is a Plan, its file,
        or fields of a layout such as {"zero": 3}; without one it is the file that
        $MESHWRIGHT_PLAN names, or plain data parallelism.  `batch` is an example of a global
        batch: only its shapes and types count.

        `loss(outputs, batch)` returns a sum and a count of what was summed, as tensors, and
        optionally a dict of metrics that are sums too; or one tensor that is a mean over samples.
        `inputs(batch)` returns what the module gets: a tuple, a dict of keywords or one thing;
        without it the first of a tuple, or of a dict what `forward` names.

        `optimizer(groups)` is any class of torch.optim or a callable; `groups(name, parameter)`
        returns the settings of a parameter's group.  `units` names the modules that stay whole.
        Gradients are clipped to `clip_norm` where it is above 0.  `batch_norm` "synchronised"
        normalises the micro-batches of all slices together, as torch's SyncBatchNorm.  `tensor`
        says how modules are divided over the plan's tensor axis, in torch's own words:
        {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}.

        Parameters and buffers that several ranks hold are compared in the first steps, every
        `compare_every` steps (0: not at all) and before each save.  With `track_unused` the result
        of a step names the parameters that took no part in it, and on which ranks.

        Raises BatchError, OptimizerError, RecordError, or LaunchError where plan and module, or
        plan and running ranks, do not go together.
        """
        self.device = device_of(device)
        check_functions(loss, optimizer)
        wanted = plan_or_layout(plan)
        join_ranks(self.device, timeout_s=wanted.timeout_s if isinstance(wanted, Plan) else None)
        self.clip_norm = clip_norm
        module = built(build, wanted)
        refuse_hooks(module)
        refuse_sparse(module)
        shapes = {name: (t.dtype, t.shape) for name, t in module.state_dict().items()}
        few, asked = few_samples(batch, SAMPLES), inner_loss.times_asked()
        recorder = Recorder.of(module, few, inputs, units=units)
        changing = check_replay(module, recorder, few)
        sums = inner_loss.times_asked() > asked
        if isinstance(wanted, Plan):
            check_module(wanted, recorder)
        else:
            name = getattr(build, "__name__", type(module).__name__)
            wanted = script_plan(
                recorder,
                wanted,
                name=type(module).__name__ if name == "<lambda>" else name,
                ranks=dist.get_world_size() if dist.is_initialized() else 1,
                global_batch=batches.samples_in(batch),
                device=self.device.type,
            )
        plan = self.plan = wanted
        dtype = activation_type(plan.precision)
        if dtype != torch.float32:
            recorder = Recorder.of(module, few, inputs, units=units, dtype=dtype)
        check_layers(plan, recorder)
        refuse_plan(plan, module, loss)
        refuse_changing(plan, changing, twice=sums or isinstance(loss, whole_batch))
        check_loss(plan, module, recorder, batch, loss)
        styles = styles_by_name(plan, module, recorder, tensor)
        self._place = place_of(plan, self.device)
        holders = holders_of(plan, recorder, self._place)
        every = grouped(module.named_parameters(), optimizer, groups)
        self.stages = plan.stages_of_rank(self._place.stage)
        participation = Participation()
        self._compiler = Compiler(self.device) if plan.compile == "block" else None
        parts = tuple(
            script_stage(
                plan,
                own,
                recorder,
                self._place,
                stage=stage,
                device=self.device,
                styles=styles,
                participation=participation,
                compiler=self._compiler,
            )
            for stage, own in zip(
                self.stages,
                modules_of(plan, module, recorder, self._place, self.stages),
                strict=True,
            )
        )
        modules = [part.module for part in parts]
        self._optimizers = TorchOptimizers(
            _slots(parts, self._place, recorder.aliases, holders),
            every,
            self._place,
            device=self.device,
            divisor=divisor_near(plan.global_batch / self._place.replicas),
            scale=LossScale(self.device, active=plan.precision == "fp16"),
            gather=gather,
            streamed=plan.offload == "optimizer",
        )
        for one in self.optimizers:
            one.zero_grad = functools.partial(self._zero_grad_of, one)  # type: ignore[method-assign]
        self._whole: tuple[dict[Slot, Tensor], Measured] | None = None
        """Gradients that were asked for, made whole and scaled."""
        self._passes = Passes(
            plan,
            self._place,
            parts,
            recorder,
            example=batch,
            loss=loss,
            gradients=self._optimizers,
            statistics=RunningStatistics(modules, self._place, kind=batch_norm),
            sums=sums,
            device=self.device,
        )
        self._optimizers.participation = participation
        self._optimizers.tracks_unused = track_unused
        self._optimizers.agree(lambda: frozen_and_buffers(modules), every=compare_every)
        self._state = ScriptState(
            plan,
            self._place,
            modules,
            self._optimizers,
            shapes=shapes,
            aliases=recorder.aliases,
            device=self.device,
        )
        self._begun_s: float | None = None
        self._records = ScriptRecords.of_this_process() if self.leads else None

    # --- where this rank stands -------------------------------------------------------------

    @property
    def slices(self) -> int:
        """Into how many slices a global batch is cut."""
        return self._place.data_degree

    @property
    def slice_rank(self) -> int:
        """Which slice this rank feeds; ranks of one slice give equal batches."""
        return self._place.data_rank

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which logs."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, for a scheduler; `optimizers` has all where groups have several."""
        (only,) = self._optimizers.optimizers
        return only

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """One for each factory."""
        return self._optimizers.optimizers

    @property
    def not_compiled(self) -> Mapping[str, str]:
        """Why units run eager that the plan compiles, by name; a unit is tried by its first call.

        Empty where the plan compiles none.
        """
        return {} if self._compiler is None else dict(self._compiler.fallbacks)

    @property
    def steps(self) -> int:
        """Optimizer steps done so far, those that were skipped included."""
        return int(self._optimizers.steps)

    def slice(self, batch: Any, *, ragged: bool = False) -> Any:
        """Return this rank's samples of a global batch.

        A `ragged` one has any number of samples, for `evaluate` and `outputs`; its slices have
        as equal shares as there are.  Raises BatchError where another one has not as many samples
        as the plan's global batch.
        """
        found, wanted = batches.samples_in(batch), self.plan.global_batch
        own = self.plan.samples_of(self.slice_rank)
        if ragged:
            own = range(own.start * found // wanted, own.stop * found // wanted)
        elif found != wanted:
            raise BatchError(
                f"batch: has {found} samples, and the plan's global batch {wanted}; to train, drop "
                "the last batch of an epoch if it is smaller (drop_last=True); for evaluate and "
                "outputs give engine.slice(batch, ragged=True)"
            )
        return batches.part_of(batch, own)

    def loader(
        self, dataset: Any, *, shuffle: bool = True, seed: int | None = None, **settings: Any
    ) -> Loader:
        """Return a loader of this rank's slices of global batches, in an order no plan changes.

        `dataset` has a length and samples by index; `settings` are those of torch's DataLoader:
        collate_fn, num_workers, pin_memory.  Without `seed` it is the plan's.  In `extra` of save
        and resume it goes on with the batch behind the last one that was handed out.

        Raises BatchError where the dataset has fewer samples than a global batch.
        """
        return Loader(
            dataset,
            global_batch=self.plan.global_batch,
            samples=self.plan.samples_of(self.slice_rank),
            shuffle=shuffle,
            seed=self.plan.training.seed if seed is None else seed,
            **settings,
        )

    # --- steps ------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Train on this rank's slice of a global batch."""
        self._forward_backward(batch)
        grads, measured = self._made_whole(self.clip_norm)
        return self._updated(grads, measured)

    def forward_backward(self, batch: Any) -> StepResult:
        """Add the gradients of a slice; several calls before `optimizer_step` are one batch."""
        before = self._passes.totals.values.clone()
        self._forward_backward(batch)
        self._optimizers.hide()
        own = self._passes.of_all(self._passes.totals.values - before).tolist()
        return StepResult(_mean(*own), own[1])

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's parts of the gradients of the mean loss by name, to look at or change.

        They are what `optimizer_step` uses, and no more can be added to them.
        """
        if self._whole is None:
            self._whole = self._made_whole(0.0)
            self._optimizers.hide()
        return {slot.name: grad for slot, grad in self._whole[0].items()}

    def optimizer_step(self, clip_norm: float | None = None) -> StepResult:
        """Update with the gradients of all `forward_backward` since the last update.

        They are clipped to `clip_norm`, or else as the engine's own says.
        """
        clip_norm = self.clip_norm if clip_norm is None else clip_norm
        if self._whole is None:
            grads, measured = self._made_whole(clip_norm)
        else:
            grads, measured = self._whole
            self._optimizers.clipped(grads, measured, clip_norm)
        return self._updated(grads, measured)

    def zero_grad(self) -> None:
        """Forget the gradients of all `forward_backward` since the last update."""
        self._optimizers.dropped()
        self._whole = None
        self._passes.totals.clear()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> StepResult:
        """Return loss and metrics of a slice in eval mode, and learn nothing.

        A slice has any number of samples, none included; the mean is that over all samples of all
        slices.  All ranks call it together.
        """
        passes = self._passes
        kept, passes.totals = passes.totals, Totals(self.device)
        try:
            passes.evaluate(passes.cut_any(batch, step=self.steps))
            total, count = passes.of_all(passes.totals.values).tolist()
            return StepResult(_mean(total, count), count, metrics=passes.metrics())
        finally:
            passes.totals = kept

    @torch.no_grad()
    def outputs(self, batch: Any, *, training: bool = False) -> Any:
        """Return what the module makes of a slice of any size, without gradients, in eval mode.

        With `training` it is in train mode, and dropout draws as in the next step.  Its leaves have
        the samples of the slice.  Through a pipeline the ranks of the last stage send them to the
        others.  All ranks call it together.
        """
        micros = self._passes.cut_any(batch, step=self.steps, drawing=training)
        return self._passes.outputs(micros, training=training)

    def averaged(self, decay: float) -> Averaged:
        """Return an exponential moving average of the weights, made anew behind each update."""
        made = Averaged(self._optimizers.slots, decay)
        self._state.averages.append(made)
        return made

    # --- state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by name, sharing live memory."""
        return self._state.tensors()

    def save(
        self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None, keep: int = 2
    ) -> Path:
        """Write a checkpoint that any plan goes on from, with all ranks; return where it is.

        `extra` is state of the script's own by name: a scheduler, a loader, anything that has
        state_dict and load_state_dict.  Only the last `keep` checkpoints of a folder stay.

        Raises LaunchError, on all ranks, where it cannot be written, where a state of `extra` is no
        plain data, or where ranks have different values of one parameter or buffer.
        """
        return self._state.save(Path(folder), extra or {}, keep=keep)

    def load(self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None) -> Path:
        """Go on from a checkpoint, or the newest one of a folder, that any plan wrote.

        Objects of `extra` get the state that was saved under their names.

        Raises LaunchError where there is none, or it is of another model.
        """
        return self._state.load(Path(folder), extra or {})

    def resume(self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None) -> bool:
        """Go on from the newest checkpoint of a folder, if there is one; tell whether there is."""
        if checkpoint_in(Path(folder)) is None:
            return False
        self.load(folder, extra=extra)
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on the CPU of every rank, by name.

        All ranks ask together.  `build().load_state_dict(...)` takes them, ties included.
        """
        return self._state.whole("model")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters and buffers the values of these whole tensors, by name.

        What is not named stays as it is.  Raises LaunchError where a shape is another.
        """
        self._state.take(state)

    # --- inside -----------------------------------------------------------------------------

    def _forward_backward(self, batch: Any) -> None:
        if self._whole is not None:
            raise LaunchError(
                "gradients() was called, and they are scaled; call optimizer_step() or zero_grad() "
                "before the next forward_backward()"
            )
        if self._begun_s is None:
            self._begun_s = time.perf_counter()
        self._optimizers.show()
        self._passes.train(self._passes.cut(batch, step=self.steps))

    def _made_whole(self, clip_norm: float) -> tuple[dict[Slot, Tensor], Measured]:
        self._optimizers.show()
        grads = self._optimizers.whole()
        measured = self._optimizers.measured(grads, self._passes.totals.values.clone())
        self._optimizers.settle(grads, measured)
        self._optimizers.scaled(grads, measured, clip_norm)
        return grads, measured

    def _updated(self, grads: dict[Slot, Tensor], measured: Measured) -> StepResult:
        metrics = self._passes.metrics()
        moved = self._optimizers.update(grads, measured)
        for average in self._state.averages if moved else ():
            average.update()
        self._whole = None
        self._passes.totals.clear()
        loss, norm, count, _ = measured.report.tolist()
        if self._records is not None and self._begun_s is not None:
            seconds = time.perf_counter() - self._begun_s
            if moved:
                self._records.write(self.plan, self.steps, loss, norm, seconds, device=self.device)
        self._begun_s = None
        return StepResult(
            LossValue(loss), count, norm, metrics, skipped=not moved, unused=self._optimizers.unused
        )

    def _zero_grad_of(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if self._optimizers.pending and len(self.optimizers) > 1:
            refuse_zero_grad(optimizer)
        if self._optimizers.pending:
            self.zero_grad()

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse: a part of a module cannot be called; the message says what can."""
        raise missing("__call__", ())

    def __getattr__(self, name: str) -> Any:
        """Refuse what torch's modules and wrappers have and an Engine has not."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise missing(name, [one for one in dir(type(self)) if not one.startswith("_")])


def _mean(total: float, count: float) -> LossValue:
    return LossValue(total / count if count else float("nan"))


def _slots(
    parts: Sequence[Staged],
    place: Place,
    aliases: Mapping[str, str],
    holders: Mapping[str, dist.ProcessGroup],
) -> tuple[Slot, ...]:
    """Return what this rank trains; of a tied parameter that several stages read, each its copy."""
    degrees = place.degrees
    world = 1 if place.mesh is None else degrees.devices // degrees.pipeline
    found: dict[str, Slot] = {}
    for part in parts:
        for path, parameter in part.module.named_parameters():
            name = aliases.get(path, path)
            if not parameter.requires_grad:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if name in found:
                first = found[name]
                if parameter is not first.parameter:
                    copies = (*first.copies_here, (parameter, local.detach()))
                    found[name] = replace(first, copies_here=copies)
                continue
            tied = holders.get(name)
            found[name] = Slot(
                name=name,
                parameter=parameter,
                local=local.detach(),
                copies=copies_of(parameter, world) * (tied.size() if tied else 1),
                partial=name in part.summed,
                pieces=1,
                sections=part.sections.get(name, ()),
                tied=tied,
                factor=1.0,
            )
    return tuple(found.values())
