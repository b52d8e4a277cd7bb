"""Engine: a user's own module, loss and optimizer under a plan, from the user's own loop.

    engine = Engine(build, plan, loss=loss, optimizer=lambda groups: SGD(groups, lr=0.1))
    for batch in loader:                      # each rank gives its slice: engine.slice(batch)
        result = engine.step(batch)           # result.loss, result.grad_norm, result.metrics

Every rank runs the same script and calls the same methods in the same order.  Whatever the plan,
losses and weights are those of one process with the same micro-batches, to rounding.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from planner import schedule
from planner.document import read
from planner.errors import BatchError, LaunchError
from planner.plan import Plan
from runtime import batches, checkpoint, run, script_checkpoint
from runtime.averaged import Averaged
from runtime.batch_norm import Kind, RunningStatistics
from runtime.exchange import all_gather_json, broadcast_tensors
from runtime.gradients import Measured, Slot, copies_of
from runtime.inner_loss import InnerLosses, running
from runtime.loss import Totals, counted, divisor_near
from runtime.loss_scale import LossScale
from runtime.mesh import place_of
from runtime.parallelize import activation_type, gathers_anew, reduces_at_once
from runtime.recorded_pipeline import RecordedPipeline
from runtime.recorded_stage import MicroBatch, step_seed
from runtime.recorder import Inputs, Recorder
from runtime.replicas import Replicas
from runtime.script_checkpoint import Stateful
from runtime.script_loader import Loader
from runtime.script_model import check_module, check_replay, few_samples
from runtime.script_plan import script_plan
from runtime.script_rank import OUTPUT_VARIABLE
from runtime.script_stage import (
    check_layers,
    frozen_and_buffers,
    holders_of,
    refuse_hooks,
    refuse_plan,
    refuse_unequal_buffers,
    script_stage,
)
from runtime.script_tensor import Styles, styles_by_name
from runtime.torch_optimizers import Factory, GroupOf, TorchOptimizers, grouped
from runtime.whole_batch import gradients_by_output, of_all_slices, surrogate, whole_batch

__all__ = ["Engine", "StepResult", "whole_batch"]

PLAN_VARIABLE = "MESHWRIGHT_PLAN"
"""Names the plan's file for scripts that `meshwright run` starts."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step or a part of it says, equal on every rank."""

    loss: float
    """Mean over all that counts in the global batch, before the update."""
    count: float
    grad_norm: float = float("nan")
    """Of the whole model, before clipping; not known before the last backward of a step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss returned beside, each a mean over its count."""
    skipped: bool = False
    """No weight moved: nothing counted, or gradients overflowed in fp16."""


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

        Raises BatchError, OptimizerError, RecordError, or LaunchError where plan and module, or
        plan and running ranks, do not go together.
        """
        self.device = _device(device)
        _join(self.device)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._loss = loss
        self.clip_norm = clip_norm
        plan = _read(plan)
        module = _built(build, plan)
        refuse_hooks(module)
        self._shapes = {name: (t.dtype, t.shape) for name, t in module.state_dict().items()}
        check_replay(module, batch, inputs, units=units)
        samples = plan.global_batch if isinstance(plan, Plan) else batches.samples_in(batch)
        if isinstance(plan, Plan):
            if plan.model.graph is not None:
                check_module(plan, module, batch, inputs, units=units)
        else:
            recorder = Recorder.of(module, batch, inputs, units=units)
            name = getattr(build, "__name__", type(module).__name__)
            plan = script_plan(
                recorder,
                plan,
                name=type(module).__name__ if name == "<lambda>" else name,
                ranks=ranks,
                global_batch=samples,
                device=self.device.type,
            )
        self.plan = plan
        example = few_samples(batch, plan.micro_batch)
        self._recorder = Recorder.of(
            module, example, inputs, units=units, dtype=activation_type(plan.precision)
        )
        check_layers(plan, self._recorder)
        refuse_plan(plan)
        styles = styles_by_name(plan, module, self._recorder, tensor)
        self._place = place_of(plan, self.device)
        self._holders = holders_of(plan, self._recorder, self._place)
        every = grouped(module.named_parameters(), optimizer, groups)
        self.stages = plan.stages_of_rank(self._place.stage)
        self._parts = tuple(
            script_stage(
                plan,
                module,
                self._recorder,
                self._place,
                stage=stage,
                device=self.device,
                styles=styles,
            )
            for stage in self.stages
        )
        scale = LossScale(self.device, active=plan.precision == "fp16")
        self._optimizers = TorchOptimizers(
            tuple(self._slots()),
            every,
            self._place,
            device=self.device,
            divisor=divisor_near(samples / self._place.replicas),
            scale=scale,
            gather=gather,
        )
        self._totals = Totals(self.device)
        self._taken: list[Any] | None = None
        """What the module makes, while it is asked for."""
        self._by_output: dict[int, list[Tensor | None]] = {}
        """Gradients of a loss over the whole batch, by micro-batch."""
        self._metric_names: tuple[str, ...] | None = None
        self._whole: tuple[dict[Slot, Tensor], Measured] | None = None
        self._averages: list[Averaged] = []
        self._replicas = self._new_replicas()
        self._statistics = RunningStatistics(
            [part.module for part in self._parts], self._place, kind=batch_norm
        )
        self._begun_s: float | None = None
        self._records = _Records.of_this_process() if self.leads else None
        self._checked = False
        self._pipeline = self._new_pipeline() if plan.mesh.pipeline > 1 else None

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
    def steps(self) -> int:
        """Optimizer steps done so far, those that were skipped included."""
        return int(self._optimizers.steps)

    def slice(self, batch: Any) -> Any:
        """Return this rank's samples of a global batch.

        Raises BatchError where it has not as many samples as the plan's global batch.
        """
        found = batches.samples_in(batch)
        if found != self.plan.global_batch:
            raise BatchError(
                f"batch: has {found} samples, and the plan's global batch {self.plan.global_batch}"
                "; drop the last batch of an epoch if it is smaller (drop_last=True)"
            )
        return batches.part_of(batch, self.plan.samples_of(self.slice_rank))

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
        metrics = self._metrics()
        return self._updated(grads, measured, metrics)

    def forward_backward(self, batch: Any) -> StepResult:
        """Add the gradients of a slice; several calls before `optimizer_step` are one batch."""
        before = self._totals.values.clone()
        self._forward_backward(batch)
        own = self._of_all(self._totals.values - before).tolist()
        return StepResult(loss=own[0] / own[1] if own[1] else float("nan"), count=own[1])

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's parts of the gradients of the mean loss by name, to look at or change.

        They are what `optimizer_step` uses, and no more can be added to them.
        """
        if self._whole is None:
            self._whole = self._made_whole(0.0)
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
        return self._updated(grads, measured, self._metrics())

    def zero_grad(self) -> None:
        """Forget the gradients of all `forward_backward` since the last update."""
        self._optimizers.dropped()
        self._whole = None
        self._totals.clear()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> StepResult:
        """Return loss and metrics of a slice of a global batch in eval mode, and learn nothing."""
        kept, self._totals = self._totals, Totals(self.device)
        modules = [part.module for part in self._parts]
        try:
            for module in modules:
                module.eval()
            micros = self._micro_batches(batch, drawing=False)
            with running(InnerLosses(self._note_inner, None)):
                if isinstance(self._loss, whole_batch):
                    self._whole_gradients(self._loss, micros)
                elif self._pipeline is not None:
                    self._pipeline.evaluate_all(micros)
                else:
                    for micro in micros:
                        self._micro_loss(modules[0](micro=micro), micro)
            self._let_go()
            total, count = self._of_all(self._totals.values).tolist()
            return StepResult(
                loss=total / count if count else float("nan"),
                count=count,
                metrics=self._metrics(),
            )
        finally:
            self._totals = kept
            for module in modules:
                module.train()

    @torch.no_grad()
    def outputs(self, batch: Any) -> Any:
        """Return what the module makes of a slice, without gradients, in train mode.

        Its leaves have the samples of the slice.  Through a pipeline the ranks of the last stage
        send them to the others.
        """
        made = self._outputs(self._micro_batches(batch))
        if self._pipeline is not None:
            group = self._place.axis("pipeline").get_group()
            last = self.plan.rank_of_stage(len(self.plan.stages) - 1)
            own = self._place.stage == last
            leaves = tree_leaves(made) if own else []
            if any(not isinstance(leaf, Tensor) for leaf in leaves):
                raise LaunchError("outputs: are not all tensors, and cannot be sent to other ranks")
            sent = broadcast_tensors(leaves if own else None, source=last, group=group)
            # Every rank has recorded what the module returns.
            spec = self._recorder.first.result_spec
            each = spec.num_leaves
            made = [
                tree_unflatten([leaf.to(self.device) for leaf in sent[at : at + each]], spec)
                for at in range(0, len(sent), each)
            ]
        return batches.joined(made)

    def averaged(self, decay: float) -> Averaged:
        """Return an exponential moving average of the weights, made anew behind each update."""
        made = Averaged(self._optimizers.slots, decay)
        self._averages.append(made)
        return made

    # --- state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by name, sharing live memory."""
        result = self._optimizers.state()
        for name, value in frozen_and_buffers([part.module for part in self._parts]).items():
            result[f"model.{name}"] = value
        for at, average in enumerate(self._averages):
            result |= average.state(f"ema{at or ''}")
        return result

    def save(
        self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None, keep: int = 2
    ) -> Path:
        """Write a checkpoint that any plan goes on from, with all ranks; return where it is.

        `extra` is state of the script's own by name: a scheduler, a loader, anything that has
        state_dict and load_state_dict.  Only the last `keep` checkpoints of a folder stay.

        Raises LaunchError where it cannot be written, or ranks have buffers of different values.
        """
        refuse_unequal_buffers([part.module for part in self._parts])
        own = None
        if self._place.stage == 0 and self._place.along("tensor") == 0:
            own = {
                "groups": self._optimizers.settings(),
                "extra": {name: one.state_dict() for name, one in (extra or {}).items()},
            }
        return script_checkpoint.save(
            Path(folder),
            self.state(),
            own,
            plan=self.plan,
            slice_rank=self.slice_rank,
            step=self.steps,
            keep=keep,
        )

    def load(self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None) -> Path:
        """Go on from a checkpoint, or the newest one of a folder, that any plan wrote.

        Objects of `extra` get the state that was saved under their names.

        Raises LaunchError where there is none, or it is of another model.
        """
        place = script_checkpoint.found(Path(folder))
        if place is None:
            raise LaunchError(f"{folder}: has no complete checkpoint; engine.resume() starts anew")
        stored = set(script_checkpoint.stored_names(place))
        self._optimizers.expect(stored)
        state = self.state()
        lacking = [name for name in state if name.startswith("model.") and name not in stored]
        if lacking:
            raise LaunchError(
                f"{place}: has no '{lacking[0].removeprefix('model.')}'; it is of another model"
            )
        state = {name: value for name, value in state.items() if name in stored}
        checkpoint.load(place, state)
        self._optimizers.loaded(state)
        for at, average in enumerate(self._averages):
            average.loaded(f"ema{at or ''}", state)
        own = script_checkpoint.own_state(place, self.slice_rank)
        self._optimizers.take_settings(own["groups"])
        for name, one in (extra or {}).items():
            if name not in own["extra"]:
                raise LaunchError(
                    f"{place}: has no state of '{name}'; it has {', '.join(own['extra']) or 'none'}"
                )
            one.load_state_dict(own["extra"][name])
        return place

    def resume(self, folder: Path | str, *, extra: Mapping[str, Stateful] | None = None) -> bool:
        """Go on from the newest checkpoint of a folder, if there is one; tell whether there is."""
        if script_checkpoint.found(Path(folder)) is None:
            return False
        self.load(folder, extra=extra)
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on the CPU of every rank, by name.

        All ranks ask together.  `build().load_state_dict(...)` takes them, ties included.
        """
        return self._whole_state("model")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters and buffers the values of these whole tensors, by name.

        What is not named stays as it is.  Raises LaunchError where a shape is another.
        """
        own = self.state()
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
                    given.to(self.device), value.device_mesh, value.placements, src_data_rank=None
                )
                value.to_local().copy_(copied.to_local())
            else:
                value.copy_(given)
        self._optimizers.loaded(own)

    def _whole_state(self, kind: str) -> dict[str, Tensor]:
        own = {}
        for name, value in self.state().items():
            if name.startswith(f"{kind}."):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                own[name.removeprefix(f"{kind}.")] = whole.detach().cpu().clone()
        if self.plan.mesh.pipeline > 1:
            group = self._place.axis("pipeline").get_group()
            every = all_gather_json(list(own), group=group)
            for name in sorted({name for names in every for name in names}):
                dtype, shape = self._shapes[name]
                value = own.get(name, torch.empty(shape, dtype=dtype))
                holder = next(at for at, names in enumerate(every) if name in names)
                dist.broadcast(value, group=group, group_src=holder)
                own[name] = value
        for name, first in self._recorder.aliases.items():
            if first in own:
                own.setdefault(name, own[first])
        return own

    # --- inside -----------------------------------------------------------------------------

    def _slots(self) -> Iterator[Slot]:
        degrees = self.plan.mesh
        world = 1 if self._place.mesh is None else degrees.devices // degrees.pipeline
        seen: set[str] = set()
        for part in self._parts:
            for path, parameter in part.module.named_parameters():
                name = self._recorder.aliases.get(path, path)
                if not parameter.requires_grad or name in seen:
                    continue
                seen.add(name)
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                tied = self._holders.get(name)
                yield Slot(
                    name=name,
                    parameter=parameter,
                    local=local.detach(),
                    copies=copies_of(parameter, world) * (tied.size() if tied else 1),
                    partial=name in part.divided.summed,
                    pieces=1,
                    sections=part.divided.sections.get(name, ()),
                    tied=tied,
                    factor=1.0,
                )

    def _micro_batches(self, batch: Any, *, drawing: bool = True) -> list[MicroBatch]:
        size, count = self.plan.micro_batch, self.plan.micro_batches_of(self.slice_rank)
        cut = batches.micro_batches(batch, size=size, count=count)
        self._check_equal(batch)
        first = self.plan.samples_of(self.slice_rank).start
        return [
            MicroBatch(
                batches.on_device(one, self.device),
                step_seed(self.plan.training.seed, self.steps, first + at * size)
                if drawing
                else None,
            )
            for at, one in enumerate(cut)
        ]

    def _check_equal(self, batch: Any) -> None:
        """Compare the first batch of ranks that must give equal ones."""
        if self._checked or self.plan.mesh.pipeline * self.plan.mesh.tensor == 1:
            return
        self._checked = True
        own = (self.slice_rank, batches.fingerprint(batch))
        for rank, (of_slice, print_) in enumerate(all_gather_json(own)):
            if of_slice == own[0] and print_ != own[1]:
                raise BatchError(
                    f"batch: ranks {rank} and {dist.get_rank()} feed slice {of_slice} and have "
                    "different samples; seed the loader alike on all ranks and take "
                    "engine.slice(batch)"
                )

    def _forward_backward(self, batch: Any) -> None:
        if self._whole is not None:
            raise LaunchError(
                "gradients() was called, and they are scaled; call optimizer_step() or zero_grad() "
                "before the next forward_backward()"
            )
        if self._begun_s is None:
            self._begun_s = time.perf_counter()
        micros = self._micro_batches(batch)
        if isinstance(self._loss, whole_batch):
            self._whole_gradients(self._loss, micros)
        one = self._backward_of(torch.ones((), device=self.device))
        with running(InnerLosses(self._note_inner, one)):
            if self._pipeline is not None:
                self._pipeline.run_all(micros)
            else:
                self._one_after_another(micros)
        if self._replicas is not None:
            self._replicas.finish()
        self._statistics.apply()

    def _one_after_another(self, micros: Sequence[MicroBatch]) -> None:
        part = self._parts[0]
        for index, micro in enumerate(micros):
            if part.wrapped:
                last = index == len(micros) - 1
                module = cast(FSDPModule, part.module)
                module.set_is_last_backward(last)
                module.set_requires_gradient_sync(last or reduces_at_once(self.plan, self._place))
                module.set_reshard_after_backward(last or gathers_anew(self.plan, self._place))
            self._micro_loss(part.module(micro=micro), micro).backward()

    def _new_replicas(self) -> Replicas | None:
        replicated = [one for part in self._parts for one in part.replicated]
        if not replicated:
            return None
        apart = any(part.store is not None for part in self._parts)
        count = self.plan.micro_batches_of(self._place.data_rank)
        return Replicas(replicated, backwards=None if apart else count)

    def _new_pipeline(self) -> RecordedPipeline:
        plan = self.plan
        parts = dict(zip(self.stages, self._parts, strict=True))
        return RecordedPipeline(
            {stage: part.module for stage, part in parts.items()},
            schedule.orders(
                plan.schedule,
                stages=len(plan.stages),
                micro_batches=plan.micro_batches,
                virtual_stages=plan.virtual_stages,
            ),
            micro_batches=plan.micro_batches,
            groups=self._place.pipeline_groups(),
            device=self.device,
            loss=self._micro_loss,
            stores={stage: part.store for stage, part in parts.items() if part.store} or None,
        )

    @torch.no_grad()
    def _outputs(self, micros: Sequence[MicroBatch]) -> list[Any]:
        """Return what the module makes of each micro-batch, where this rank has the last stage."""
        made: list[Any] = []
        self._taken = made
        try:
            if self._pipeline is not None:
                self._pipeline.evaluate_all(micros)
            else:
                for micro in micros:
                    self._micro_loss(self._parts[0].module(micro=micro), micro)
        finally:
            self._taken = None
        self._let_go()
        self._statistics.forget()
        return made

    def _whole_gradients(self, loss: whole_batch, micros: Sequence[MicroBatch]) -> None:
        """Note the loss of the whole batch, and its gradient by the outputs of each micro-batch."""
        made = self._outputs(micros)
        if not made:
            return
        outputs = of_all_slices(batches.joined(made), self._place)
        batch = of_all_slices(batches.joined([micro.batch for micro in micros]), self._place)
        if not torch.is_grad_enabled():
            if self.slice_rank == 0 and self._place.along("tensor") == 0:
                self._totals.add(counted(loss(outputs, batch), self.plan.global_batch))
            return
        one, grads = gradients_by_output(
            loss,
            outputs,
            batch,
            own=self.plan.samples_of(self.slice_rank),
            size=self.plan.micro_batch,
            parts=self.plan.global_batch // self.plan.micro_batch,
        )
        if self.slice_rank == 0 and self._place.along("tensor") == 0:  # all have the same
            self._totals.add(one)
        self._by_output = {id(m): grad for m, grad in zip(micros, grads, strict=True)}

    def _let_go(self) -> None:
        """Divide parameters again: what no backward follows stays gathered."""
        for inner in (inner for part in self._parts for inner in part.module.modules()):
            if isinstance(inner, FSDPModule):
                inner.reshard()

    def _micro_loss(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Note what a micro-batch adds to the loss; return where its backward begins."""
        if self._taken is not None:
            self._taken.append(outputs)
            return torch.zeros((), device=self.device)
        if isinstance(self._loss, whole_batch):
            made = surrogate(outputs, self._by_output[id(micro)])
            return self._backward_of(made)
        one = counted(self._loss(outputs, micro.batch), self.plan.micro_batch)
        if self._place.along("tensor") == 0:  # the others of a slice have the same
            self._totals.add(one)
        return self._backward_of(one.total)

    def _note_inner(self, value: Tensor) -> None:
        if self._place.along("tensor") == 0:
            self._totals.add_inner(value)

    def _backward_of(self, total: Tensor) -> Tensor:
        """Return what backward of a sum of losses begins at."""
        return self._optimizers.scale.applied(total / self._optimizers.divisor)

    def _made_whole(self, clip_norm: float) -> tuple[dict[Slot, Tensor], Measured]:
        grads = self._optimizers.whole()
        measured = self._optimizers.measured(grads, self._totals.values.clone())
        self._optimizers.scaled(grads, measured, clip_norm)
        return grads, measured

    def _updated(
        self, grads: dict[Slot, Tensor], measured: Measured, metrics: Mapping[str, float]
    ) -> StepResult:
        moved = self._optimizers.update(grads, measured)
        for average in self._averages if moved else ():
            average.update()
        self._whole = None
        self._totals.clear()
        loss, norm, count = measured.report.tolist()
        if self._records is not None and self._begun_s is not None:
            seconds = time.perf_counter() - self._begun_s
            if moved:
                self._records.write(self.plan, self.steps, loss, norm, seconds)
        self._begun_s = None
        return StepResult(loss, count, norm, metrics, skipped=not moved)

    def _of_all(self, values: Tensor) -> Tensor:
        values = values.clone()
        if self._place.mesh is not None:
            dist.all_reduce(values)
        return values

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks; those without the last stage have none of their own."""
        if self._metric_names is None:
            self._metric_names = self._agreed_names()
        if not self._metric_names:
            return {}
        own = self._totals.metrics
        unknown = [name for name in own if name not in self._metric_names]
        if unknown:
            raise BatchError(
                f"metrics: '{unknown[0]}' was not there in the first step; return the same names "
                "in each"
            )
        none = torch.zeros(2, dtype=torch.float64, device=self.device)
        pairs = self._of_all(torch.stack([own.get(name, none) for name in self._metric_names]))
        return {
            name: total / count if count else float("nan")
            for name, (total, count) in zip(self._metric_names, pairs.tolist(), strict=True)
        }

    def _agreed_names(self) -> tuple[str, ...]:
        names: list[Any] = [tuple(self._totals.metrics)]
        if self._place.mesh is not None:
            names = all_gather_json(list(self._totals.metrics))
        return tuple(dict.fromkeys(name for one in names for name in one))


class _Records:
    """Steps written down for `meshwright run`, which started this process."""

    _taken = False

    def __init__(self, output: Path) -> None:
        self._file = run.metrics_file(output)
        self._begun = False

    @classmethod
    def of_this_process(cls) -> _Records | None:
        """Return where the first engine of a process writes; others write nothing."""
        output = os.environ.get(OUTPUT_VARIABLE)
        if output is None or cls._taken:
            return None
        cls._taken = True
        return cls(Path(output))

    def write(self, plan: Plan, step: int, loss: float, norm: float, step_s: float) -> None:
        """Add a step; those that it does again, behind a restart, are forgotten first."""
        if not self._begun:
            run.forget_steps_after(step - 1, self._file)
            self._begun = True
        positions = plan.global_batch * plan.seq_len
        run.append_record(
            run.StepRecord(
                step=step,
                loss=loss,
                grad_norm=norm,
                step_s=step_s,
                tokens_per_s=positions / step_s,
                epoch=0,
            ),
            self._file,
        )


def _built(build: Callable[[], nn.Module], plan: Plan | Mapping[str, Any]) -> nn.Module:
    """Build the module under the plan's seed, and leave the caller's random numbers alone."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(plan.training.seed if isinstance(plan, Plan) else plan.get("seed", 0))
        return build()


def _read(plan: Plan | Mapping[str, Any] | str | Path | None) -> Plan | Mapping[str, Any]:
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    if isinstance(plan, str | Path):
        return read(Plan, plan)
    return {} if plan is None else plan


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _join(device: torch.device) -> None:
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
            timeout_s=600.0,
        )
