"""Engine: a module, a loss and an optimizer under a plan, from the user's own loop.

    engine = Engine(build, plan, loss=loss, optimizer=lambda groups: SGD(groups, lr=0.1))
    for batch in loader:                      # each rank gives its slice: engine.slice(batch)
        result = engine.step(batch)           # result.loss, result.grad_norm, result.metrics

Every rank runs the same script and calls the same methods in the same order.  Whatever the plan,
losses and weights are those of one process with the same micro-batches, to rounding.

`meshwright launch` is such a loop too (runtime.launch.training_loop): of its model the adapter's
layers run one after another (`Engine.of_language_model`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import BatchError, LaunchError
from meshwright.planner.schedules import schedule_of
from meshwright.runtime.checkpoint.state_snapshot import Snapshot, take_snapshot
from meshwright.runtime.core import batches
from meshwright.runtime.core.auxiliary_loss import BuffersBefore
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.local_parts import divided_like, to_local
from meshwright.runtime.core.loss import LossScale, Totals, divisor_near
from meshwright.runtime.core.torch_api_hints import LossValue, missing, refuse_zero_grad
from meshwright.runtime.core.torch_internals import numbers_are_of_the_whole
from meshwright.runtime.data.loader import Loader
from meshwright.runtime.engine.engine_state import (
    ScriptState,
    Stateful,
    checkpoint_in,
    keeper_of,
)
from meshwright.runtime.engine.language_model import LanguageModel
from meshwright.runtime.engine.pipedream_2bw import LateUpdates, StalePipeline
from meshwright.runtime.engine.setup import (
    check_functions,
    device_of,
    join_ranks,
    plan_of_all,
    plan_or_layout,
)
from meshwright.runtime.engine.step_passes import StepPasses
from meshwright.runtime.engine.user_code import refuse_while_imported
from meshwright.runtime.engine.user_module import OwnModel
from meshwright.runtime.optim.ema import Averaged, Decay
from meshwright.runtime.optim.gradients import Slot, StepMeasurement
from meshwright.runtime.optim.parameter_watch import ParameterWatch
from meshwright.runtime.optim.replica_check import COMPARED_EVERY
from meshwright.runtime.optim.sharded_optimizer import Factory, GroupOf, TorchOptimizers, set_mode
from meshwright.runtime.optim.stage_tensors import StageTensors, on_one_mesh
from meshwright.runtime.parallel.batch_norm import Kind, RunningStatistics
from meshwright.runtime.parallel.data_parallel import reduces_in_step
from meshwright.runtime.parallel.gradient_compression import Mean, PowerSGD
from meshwright.runtime.parallel.tensor_styles import Styles
from meshwright.runtime.run.metrics import ScriptRecords
from meshwright.runtime.run.script_planner import planners
from meshwright.runtime.techniques import float8 as eight_bits
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.techniques.micro_batch_graphs import MicroBatchGraphs
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Inputs

if TYPE_CHECKING:
    from meshwright.runtime.engine.token_module import TokenModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step or of a part of it, equal on every rank."""

    loss: LossValue
    """Mean over all that counts in the global batch, before the update."""
    count: float
    """What the mean is over: the loss's own count, or what its mean was found to be over; samples
    where one process takes a mean as it is."""
    grad_norm: float = float("nan")
    """Gradient norm of the whole model, before clipping; not known before the last backward of a
    step.  With stale weights that of the step before, or 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other values that the loss returned, each a mean over its count."""
    skipped: bool = False
    """No weight moved: nothing counted, or gradients overflowed in fp16, and the next step has a
    smaller loss scale."""
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """With `track_unused`: parameters that took no part, and on which ranks."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, averaged over layers; None without experts."""
    noticed: bool = False
    """A launcher was notified that its machine will be taken away; `launch` saves now, and ends.  A
    script saves, and raises meshwright.HandedOver."""
    out_of_time: bool = False
    """Rank 0's time is over; see `end_when`."""

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse: the backward pass was part of the step."""
        self.loss.backward()


class Engine:
    """One rank of a plan."""

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
        by_micro_batch: bool = False,
        local: bool = False,
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
        returns the settings of a parameter's group, or is a table of them by path or class of its
        module: {"backbone": {"lr": 1e-4}, nn.LayerNorm: {"weight_decay": 0.0}}.

        `units` names the modules that stay whole.  Gradients are clipped to `clip_norm` where it is
        above 0.  `batch_norm` "synchronised"
        normalises the micro-batches of all slices together, as torch's SyncBatchNorm.  `tensor`
        says how modules are divided over the plan's tensor axis, in torch's own words:
        {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}.

        Parameters and buffers that several ranks hold are compared in the first steps, every
        `compare_every` steps (0: not at all) and before each save.  With `track_unused` the result
        of a step names the parameters that took no part in it, and on which ranks.

        A module that makes something else of a sample beside other samples is refused where the
        plan cuts the batch, unless `by_micro_batch` says that its micro-batches are meant.

        With `local` each rank has batches of its own, of any structure and size (graphs, bags,
        lists of images, time first), and the loss returns a sum and a count; `batch` is such a one.

        Raises BatchError, OptimizerError, RecordError, or LaunchError where plan and module, or
        plan and running ranks, do not go together.
        """
        refuse_while_imported()
        device = device_of(device)
        check_functions(loss, optimizer)
        for hand_over in planners:
            if local:
                raise BatchError(
                    "batch: is a rank's own (local=True), which is not planned; start the script "
                    "by torchrun"
                )
            settings = {"batch": batch, "loss": loss, "inputs": inputs, "optimizer": optimizer}
            hand_over(build, plan, {**settings, "groups": groups, "units": units})
        wanted = plan_or_layout(plan)
        join_ranks(device, timeout_s=wanted.timeout_s if isinstance(wanted, Plan) else None)
        numbers_are_of_the_whole()
        model = OwnModel(
            build,
            plan_of_all(wanted),
            loss=loss,
            optimizer=optimizer,
            batch=batch,
            inputs=inputs,
            groups=groups,
            units=units,
            tensor=tensor,
            by_micro_batch=by_micro_batch,
            local=local,
            device=device,
        )
        self._local = local
        self._begin(
            model,
            loss=model.loss,
            example=batch,
            clip_norm=clip_norm,
            gather=gather,
            batch_norm=batch_norm,
            compare_every=compare_every,
            track_unused=track_unused,
            device=device,
        )

    @classmethod
    def of_language_model(
        cls,
        model: LanguageModel | TokenModel,
        *,
        compare_every: int = COMPARED_EVERY,
        device: torch.device,
    ) -> Engine:
        """Return the engine of a language model, as `launch` has it.

        It is made by all ranks of an initialised process group together, or by one process without
        a group.  Batches are what LanguageModel.batch takes.
        """
        engine = cls.__new__(cls)
        engine._local = False
        engine._begin(
            model,
            loss=model.loss,
            example=model.example,
            clip_norm=model.plan.training.clip_norm,
            compare_every=compare_every,
            device=device,
        )
        return engine

    def _begin(
        self,
        model: OwnModel | LanguageModel,
        *,
        loss: Callable[[Any, Any], Any],
        example: Any,
        clip_norm: float,
        gather: bool = True,
        batch_norm: Kind = "per_micro_batch",
        compare_every: int,
        track_unused: bool = False,
        device: torch.device,
    ) -> None:
        plan = self.plan = model.plan
        _set_precision(plan, device)
        self.device, self.clip_norm = device, clip_norm
        self._model, self._place = model, model.place
        self.stages = model.own_plan.stages_of_rank(self._place.stage)
        pieces = plan.tensor_overlap == "async"
        self.compiler = Compiler(device, pieces=pieces) if plan.compile == "block" else None
        """The compiler of units, if the plan lets any be compiled."""
        self._parts = parts = model.stages(self.compiler)
        slots = model.slots(parts)
        self._optimizers = TorchOptimizers(
            slots,
            model.groups(slots),
            self._place,
            device=device,
            divisor=divisor_near(plan.global_batch * model.counts / self._place.replicas),
            scale=LossScale(device, active=plan.precision == "fp16"),
            mean=self._mean_over_replicas(),
            gather=gather,
            streamed=plan.offload == "optimizer",
            learning_rate=model.learning_rate,
        )
        for optimizer in self.optimizers:
            optimizer.zero_grad = functools.partial(self._zero_grad_of, optimizer)  # type: ignore[method-assign]
        self._whole: tuple[dict[Slot, Tensor], StepMeasurement] | None = None
        """Gradients that were asked for, made whole and scaled."""
        modules = [part.module for part in parts]
        is_users_module = isinstance(model, OwnModel)  # a language model's layers have no BatchNorm
        self._passes = StepPasses(
            plan,
            self._place,
            parts,
            model.recorder,
            example=example,
            loss=loss,
            gradients=self._optimizers,
            statistics=RunningStatistics(modules, self._place, kind=batch_norm)
            if is_users_module
            else None,
            sums=model.sums,
            before=BuffersBefore(parts[0].module, model.put_back)
            if isinstance(model, OwnModel) and model.put_back
            else None,
            compares=is_users_module,
            device=device,
        )
        self._watch = (
            ParameterWatch((model.module, *modules), slots) if isinstance(model, OwnModel) else None
        )
        self._late: LateUpdates | None = None
        """The updates of weights of two ages, where the plan's pipeline never drains."""
        if schedule_of(plan.schedule).stale:
            if model.sums or isinstance(loss, whole_batch):
                raise LaunchError(
                    f"schedule: is {plan.schedule}, whose backward is one step late, and a loss or "
                    "a sum over the whole batch needs all outputs before; use schedule 1f1b"
                )
            pipeline = self._passes.pipeline_of(
                [MicroBatch(batches.part_of(example, range(plan.micro_batch)))]
            )
            assert isinstance(pipeline, StalePipeline)
            self._late = LateUpdates(pipeline, self._optimizers, clip_norm, self._average)
        self._optimizers.participation = model.participation
        self._optimizers.tracks_unused = track_unused
        self._optimizers.agree(lambda: model.untrained_tensors(parts), every=compare_every)
        self._state = ScriptState(
            plan,
            self._place,
            self._optimizers,
            beside=lambda: model.saved_untrained_tensors(parts),
            aliases=model.aliases,
            order=model.order,
            device=device,
        )
        self.own_values = self._passes.local_gradient_values
        """Sum and count of the last step's loss on this rank alone; behind them, once it is
        measured, the square of the norm of its gradient before the sum over ranks."""
        self.next_sample = 0
        """The first sample that no step has had; snapshots and checkpoints have it."""
        self._begun_s: float | None = None
        self._records = ScriptRecords.of_this_process() if is_users_module and self.leads else None
        self._keeper = keeper_of(self) if is_users_module else None

    def _mean_over_replicas(self) -> Mean | None:
        if self._place.replicas == 1 or not reduces_in_step(self.plan):
            return None
        group = self._place.data.replicating.get_group()
        match self.plan.gradient_compression:
            case "powersgd":
                return PowerSGD(group)
            case "full" | "bf16" | "fp16":
                return Mean(group)
            case _:
                assert_never(self.plan.gradient_compression)

    # --- where this rank stands -------------------------------------------------------------

    @property
    def slices(self) -> int:
        """Into how many slices a global batch is cut."""
        return self._place.data_degree

    @property
    def slice_rank(self) -> int:
        """Index of the slice that this rank feeds; ranks of one slice give equal batches."""
        return self._place.data_rank

    @property
    def stage(self) -> int:
        """This rank's coordinate on the pipeline axis."""
        return self._place.stage

    @property
    def units(self) -> dict[str, nn.Module]:
        """The modules that techniques act on one by one, by path; of `launch` a plan's layers."""
        return {name: unit for part in self._parts for name, unit in part.units.items()}

    @property
    def leads(self) -> bool:
        """True if this is rank 0, which logs."""
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
        return {} if self.compiler is None else dict(self.compiler.fallbacks)

    @property
    def graphs(self) -> MicroBatchGraphs | None:
        """The graphs of this rank's micro-batches, if the plan captures any."""
        return self._passes.graphs

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
        samples, wanted = batches.samples_in(batch), self.plan.global_batch
        share = self.plan.samples_of(self.slice_rank)
        if ragged:
            share = range(share.start * samples // wanted, share.stop * samples // wanted)
        elif samples != wanted:
            raise BatchError(
                f"batch: has {samples} samples, and the plan's global batch {wanted}; to train, "
                "drop the last batch of an epoch if it is smaller (drop_last=True); for evaluate "
                "and outputs give engine.slice(batch, ragged=True)"
            )
        return batches.part_of(batch, share)

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

    def train(self, mode: bool = True) -> Engine:
        """Set train mode, by the module's own `train`; an Engine begins in it.

        Steps run in the mode that is set, `evaluate` in eval mode, and the mode is as before
        behind it.  A module whose `train` reads what the loop changes is told so here, and so are
        optimizers that have modes (schedule-free).
        """
        self._passes.set_mode(training=mode)
        for optimizer in self.optimizers:
            set_mode(optimizer, training=mode)
        return self

    def eval(self) -> Engine:
        """Set eval mode, by the module's own `eval`."""
        return self.train(mode=False)

    def step(self, batch: Any, *, local: bool = False) -> StepResult:
        """Train on this rank's slice of a global batch, or with `local` on a batch of its own.

        One of its own has any structure and size, and the loss returns a sum and a count.  Where a
        plan has several micro-batches it is a list of as many.
        """
        self._forward_backward(batch, local=local)
        if self._late is not None:
            metrics = self._passes.metrics()
            loss, norm, ending = self._late.update(self._passes.totals.values.clone())
            return self._result(loss, math.nan, norm, metrics, ending)
        grads, measured = self._made_whole(self.clip_norm)
        return self._update(grads, measured)

    def forward_backward(self, batch: Any, *, local: bool = False) -> StepResult:
        """Add the gradients of a slice; several calls before `optimizer_step` are one batch."""
        self._refuse_late("forward_backward")
        before = self._passes.totals.values.clone()
        self._forward_backward(batch, local=local)
        self._optimizers.hide()
        totals = self._passes.of_all(self._passes.totals.values - before).tolist()
        return StepResult(_mean(*totals), totals[1])

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the mean loss by name, to look at or change.

        They are divided as the parameters of `units` are: DTensors where ranks hold parts, of which
        a norm or a sum is that of the whole; all ranks ask for it together.  They are what
        `optimizer_step` uses, and no more can be added to them.

        Under a pipeline those of other stages are copies, each brought when it is looked up, which
        all ranks do in one order: `for name, grad in engine.gradients().items()`.
        """
        self._refuse_late("gradients")
        if self._whole is None:
            self._whole = self._made_whole(0.0)
            self._optimizers.hide()
        return self._of_all_stages(
            {slot.name: divided_like(slot.parameter, grad) for slot, grad in self._whole[0].items()}
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Return what is trained by name, live, to look at or change under torch.no_grad().

        They are divided as `gradients` are, and those of other stages are copies in the same way.
        """
        return self._of_all_stages({slot.name: slot.parameter for slot in self._optimizers.slots})

    def _of_all_stages(self, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._model.own_plan.mesh.pipeline == 1:
            return on_one_mesh(here)
        return StageTensors(here, self._place, order=self._model.order, device=self.device)

    def optimizer_step(self, clip_norm: float | None = None) -> StepResult:
        """Update with the gradients of all `forward_backward` since the last update.

        They are clipped to `clip_norm`, or else as the engine's own says.
        """
        self._refuse_late("optimizer_step")
        clip_norm = self.clip_norm if clip_norm is None else clip_norm
        if self._whole is None:
            grads, measured = self._made_whole(clip_norm)
        else:
            grads, measured = self._whole
            self._optimizers.clip(grads, clip_norm)
        return self._update(grads, measured)

    def zero_grad(self) -> None:
        """Forget the gradients of all `forward_backward` since the last update."""
        self._optimizers.dropped()
        self._whole = None
        self._passes.totals.clear()

    @torch.no_grad()
    def evaluate(self, batch: Any, *, local: bool = False) -> StepResult:
        """Return loss and metrics of a slice in eval mode, and learn nothing.

        A slice has any number of samples, none included; the mean is that over all samples of all
        slices.  All ranks call it together.
        """
        passes = self._passes
        self._rescale()
        kept, passes.totals = passes.totals, Totals(self.device)
        try:
            with self._evaluating(), self._loss_context():
                passes.evaluate(
                    passes.take_local(batch, step=self.steps, drawing=False)
                    if local or self._local
                    else passes.cut_any(self._model.batch(batch), step=self.steps)
                )
            for part in self._parts:
                for load in part.loads.values():
                    load.take_counts()  # a step reports its own
            total, count = passes.of_all(passes.totals.values).tolist()
            return StepResult(_mean(total, count), count, metrics=passes.metrics())
        finally:
            passes.totals = kept

    @torch.no_grad()
    def outputs(self, batch: Any, *, training: bool = False, local: bool = False) -> Any:
        """Return what the module makes of a slice of any size, without gradients, in eval mode.

        With `training` it is in train mode, and dropout draws as in the next step.  Its leaves have
        the samples of the slice.  Through a pipeline the ranks of the last stage send them to the
        others.  All ranks call it together.  Of a `local` batch each rank gets what the module
        makes of its own.
        """
        self._rescale()
        if local or self._local:
            micros = self._passes.take_local(batch, step=self.steps, drawing=training)
            with self._evaluating(training=training):
                return self._passes.outputs(micros, training=training)
        given = self._model.batch(batch) if self.plan.mesh.context > 1 else batch
        micros = self._passes.cut_any(given, step=self.steps, drawing=training)
        with self._evaluating(training=training):
            return self._passes.outputs(micros, training=training)

    @contextlib.contextmanager
    def _evaluating(self, *, training: bool = False) -> Iterator[None]:
        """Have the parameters that optimizers with modes evaluate with, and those before again."""
        switched = self._passes.is_training and not training
        try:
            for optimizer in self.optimizers if switched else ():
                set_mode(optimizer, training=False)
            yield
        finally:
            for optimizer in self.optimizers if switched else ():
                set_mode(optimizer, training=True)

    def averaged(self, decay: Decay, *, initial: bool = False, buffers: bool = False) -> Averaged:
        """Return an exponential moving average of the weights, made anew behind each update.

        `decay` is a number, or returns one for the number of updates before.  The first update
        takes the weights as they are then, or with `initial` the average begins with those of now.
        With `buffers` it has theirs too.  An engine may have several.
        """
        parts = self._parts

        def tensors() -> dict[str, Tensor]:
            return {name: b for part in parts for name, b in part.module.named_buffers()}

        average = Averaged(
            self._optimizers.slots,
            decay,
            self._drain,
            initial=initial,
            buffers=tensors if buffers else dict,
        )
        self._state.averages.append(average)
        return average

    def end_when(self, out_of_time: Callable[[], bool]) -> None:
        """Let every rank's StepResult say so, after the same step, once this is true on rank 0."""
        if self.leads:
            self._optimizers.out_of_time = out_of_time

    # --- state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by name, sharing live memory.

        Keys: model.<name>, optim.<name>.exp_avg and the like, train.<...>.  Divided parameters are
        DTensors; torch.distributed.checkpoint loads them in place under any plan.  All ranks ask
        together: a pipeline that never drains does so now.
        """
        self._drain()
        return self._state.tensors()

    def resident_tensors(self) -> dict[str, Tensor]:
        """Return all that a rank has between steps, by name: `state`, and what no step changes.

        Those are frozen weights, their scales, and buffers; each memory is there once.
        """
        result = self.state()
        memories = {to_local(tensor).untyped_storage()._cdata for tensor in result.values()}
        for part in self._parts:
            for name, tensor in (*part.module.named_parameters(), *part.module.named_buffers()):
                memory = to_local(tensor).untyped_storage()._cdata
                if memory not in memories and not tensor.requires_grad:
                    memories.add(memory)
                    result[f"model.{name}"] = tensor
        return result

    def measure_own_gradient(self) -> None:
        """Let steps from now on measure each rank's own gradient, where its sum over ranks is ours.

        Sums inside FSDP are not: those of ZeRO, and of parameters on the host.
        """
        self._passes.measure_own_gradient()

    def snapshot(self, *, copied: bool = True) -> Snapshot:
        """Return this rank's parts of the state on the host, between two steps.

        If not `copied`, parts that are on the host already are the state's own memory, to be read
        before the next step.

        No other rank takes part, unless a plan divides joined matrices over its tensor axis or
        never drains.
        """
        self._refuse_within_step("snapshot")
        return take_snapshot(
            self.state(), step=self.steps, next_sample=self.next_sample, copied=copied
        )

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Go on from parts of the state of the ranks of any plan after one step.

        Together they must cover this rank's parts.  Losses and weights are then those of the
        engines that were left, bit for bit where the plan is theirs.  Raises LaunchError, with
        nothing changed, where parts are lacking.
        """
        self._refuse_within_step("restore")
        self._state.restore(snapshots)
        self.next_sample = snapshots[0].next_sample

    def _refuse_within_step(self, name: str) -> None:
        if self._optimizers.pending or self._whole is not None:
            raise LaunchError(f"{name}: gradients wait; call optimizer_step() or zero_grad() first")

    @property
    def gradient_bytes(self) -> int:
        """Bytes that this rank's gradients take now."""
        grads = [slot.parameter.grad for slot in self._optimizers.slots]
        return sum(to_local(grad).nbytes for grad in grads if grad is not None)

    def refuse_drifted(self) -> None:
        """Compare replicas now; LaunchError, on all ranks, where one has drifted."""
        if self._optimizers.agreement is not None:
            self._optimizers.agreement.refuse_drifted()

    def configuration(self) -> str | None:
        """Return the config.json of the model as a library has it, if one does."""
        return self._model.configuration()

    def save(
        self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None, keep: int = 2
    ) -> Path:
        """Write a checkpoint that any plan goes on from, with all ranks; return where it is.

        `extra` is state of the script's own by name: a scheduler, a loader, anything that has
        state_dict and load_state_dict.  Only the last `keep` checkpoints of a folder stay.

        Raises LaunchError, on all ranks, where it cannot be written, where a state of `extra` is no
        plain data, where ranks have different values of one parameter or buffer, or where gradients
        wait for their update.
        """
        self._refuse_within_step("save")
        self._drain()
        done = self._state.progress(self.next_sample)
        return self._state.save(Path(folder), extra or {}, done=done, keep=keep)

    @property
    def script_state(self) -> ScriptState:
        """This rank's part of the state, as it is written and read."""
        return self._state

    def load(self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None) -> Path:
        """Go on from a checkpoint, or the newest one of a folder, that any plan wrote.

        Objects of `extra` get the state that was saved under their names.

        Raises LaunchError where there is none, it is of another model, or gradients wait for their
        update.
        """
        self._refuse_within_step("load")
        self._drain()
        place, self.next_sample = self._state.load(Path(folder), extra or {})
        return place

    def resume(
        self, folder: Path | str | None = None, *, extra: Mapping[str, Stateful] | None = None
    ) -> bool:
        """Go on from the newest checkpoint of a folder, if there is one; tell whether there is.

        Started by `meshwright run --checkpoint` the folder is that one, and from here on the state
        and `extra` are saved by themselves.  Of `extra`, what can be iterated over stands where it
        does when a step is done, and all else where it does when the next one begins.
        """
        if self._keeper is not None:
            return self._keeper.resume(None if folder is None else Path(folder), extra or {})
        if folder is None:
            raise LaunchError(
                "resume: name a folder of checkpoints, or start the script with meshwright run "
                "--checkpoint FOLDER"
            )
        if checkpoint_in(Path(folder)) is None:
            return False
        self.load(folder, extra=extra)
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on the CPU of every rank, by name.

        All ranks ask together.  `build().load_state_dict(...)` takes them, ties included.
        """
        self._drain()
        return self._state.whole_tensors("model")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters and buffers the values of these whole tensors, by name.

        What is not named stays as it is.  All ranks call it together.  Raises LaunchError where a
        shape is another, or the module has no such name.
        """
        self._drain()
        self._state.load_whole(state)

    # --- inside -----------------------------------------------------------------------------

    def _forward_backward(self, batch: Any, *, local: bool = False) -> None:
        if self._whole is not None:
            raise LaunchError(
                "gradients() was called, and they are scaled; call optimizer_step() or zero_grad() "
                "before the next forward_backward()"
            )
        if self._begun_s is None:
            if self._keeper is not None:
                self._keeper.begin_step()
            self._begun_s = time.perf_counter()
        if self._watch is not None:
            with self._passes.refusing_on_all_ranks():
                if self._watch.has_moved():
                    self._optimizers.follow()
        self._optimizers.show()
        self._rescale()
        with self._loss_context():
            self._passes.train(
                self._passes.take_local(batch, step=self.steps)
                if local or self._local
                else self._passes.cut(self._model.batch(batch), step=self.steps)
            )
        self.next_sample += self.plan.global_batch

    def _rescale(self) -> None:
        """Make the scales of weights that are gathered in 8 bits anew: they may have moved."""
        for part in self._parts:
            if part.narrow is not None:
                part.narrow.rescale()

    def _loss_context(self) -> contextlib.AbstractContextManager[object]:
        return loss_parallel() if self._model.divides_logits else contextlib.nullcontext()

    def _made_whole(self, clip_norm: float) -> tuple[dict[Slot, Tensor], StepMeasurement]:
        self._optimizers.show()
        self.own_values = self._passes.local_gradient_values
        grads = self._optimizers.unsharded()
        measured = self._optimizers.reduce_step_stats(grads, self._passes.totals.values.clone())
        if self._optimizers.settles:
            self._optimizers.settle(grads, measured)
        self._optimizers.scale_and_clip(grads, measured, clip_norm)
        return grads, measured

    def _update(self, grads: dict[Slot, Tensor], measured: StepMeasurement) -> StepResult:
        metrics = self._passes.metrics()
        self._optimizers.apply(grads, measured)
        loss, norm, count, drift, ending = measured.report.tolist()
        self._whole = None
        if drift and self._optimizers.agreement is not None:
            self._optimizers.agreement.refuse_drift()
        scale = self._optimizers.scale
        moved = count != 0 and not (scale.active and not math.isfinite(norm))
        if moved:
            self._average()
        skipped = count == 0 or scale.skips(norm)
        return self._result(loss, count, norm, metrics, ending, moved=moved, skipped=skipped)

    def _result(
        self,
        loss: float,
        count: float,
        norm: float,
        metrics: Mapping[str, float],
        ending: float,
        *,
        moved: bool = True,
        skipped: bool = False,
    ) -> StepResult:
        """Return what a step says, and write it down; the next one begins with no losses."""
        self._passes.totals.clear()
        if self._records is not None and self._begun_s is not None and moved:
            seconds = time.perf_counter() - self._begun_s
            step = self.steps + (self._late is not None)  # whose update waits
            self._records.write(self.plan, step, loss, norm, seconds, device=self.device)
        if self._keeper is not None and self._begun_s is not None and moved:
            step_s = time.perf_counter() - self._begun_s
            self._keeper.end_step(loss, norm, step_s, noticed=ending >= 1)
        self._begun_s = None
        return StepResult(
            LossValue(loss),
            count,
            norm,
            metrics,
            skipped=skipped,
            unused=self._optimizers.unused,
            expert_load=self._model.expert_load(self._parts),
            noticed=ending >= 1,
            out_of_time=ending % 1 > 0,
        )

    def _average(self) -> None:
        for average in self._state.averages:
            average.update()

    def _drain(self) -> None:
        """Make the updates that a pipeline which never drains still owes; all ranks together."""
        if self._late is not None:
            self._late.drain(torch.zeros_like(self._passes.totals.values))

    def _refuse_late(self, name: str) -> None:
        """Refuse what takes a step apart where its gradients are made in the next one."""
        if self._late is not None:
            raise LaunchError(
                f"{name}: schedule {self.plan.schedule} ends the backward pass of a step in the "
                "next one; call engine.step(), or use schedule 1f1b"
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
        raise missing(name, [name for name in dir(type(self)) if not name.startswith("_")])


def _mean(total: float, count: float) -> LossValue:
    return LossValue(total / count if count else float("nan"))


def _set_precision(plan: Plan, device: torch.device) -> None:
    if plan.precision in EIGHT_BITS:
        eight_bits.require(device, plan.precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")
