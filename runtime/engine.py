"""Engine: executes a Plan on one rank.

It asks an adapter for its stage's layers, makes them parallel, and repeats: forwards and backwards
of all micro-batches in the plan's order, gradients summed and clipped, one optimizer step.
Whatever the plan, the losses and weights are those of one process, to rounding.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from planner import schedule
from planner.costs.crossings import crossings_of
from planner.errors import LaunchError
from planner.model import ModelGraph
from planner.plan import Plan
from planner.schedules import schedule_of
from runtime import eight_bits, lora
from runtime.experts import imbalance
from runtime.gradient_wire import Mean, PowerSGD
from runtime.loss_scale import LossScale
from runtime.mesh import place_of
from runtime.optimizer import Optimizer
from runtime.parallelize import (
    activation_type,
    gathers_anew,
    parallel_stage,
    reduces_at_once,
    reduces_in_step,
)
from runtime.pipeline import Pipeline, StagePart
from runtime.published import Weights
from runtime.replicas import Replicas
from runtime.source import adapter_of
from runtime.stale_pipeline import StalePipeline
from runtime.supported import supported


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports, equal on every rank."""

    loss: float
    """Mean over all tokens of the global batch, before the step."""
    grad_norm: float
    """Of the whole model, before clipping.  With stale weights that of the step before, or 0."""
    skipped: bool = False
    """Gradients overflowed in fp16: no weight moved, and the next step has a smaller loss scale."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, averaged over layers; None without experts."""


class Engine:
    """One rank of a plan: modules, schedule and optimizer.

    Built by all ranks of an initialised process group together, or by one process without a group.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelGraph,
        *,
        device: torch.device,
        weights: Path | None = None,
    ) -> None:
        """`weights` is a local folder of safetensors files; None starts from random weights."""
        plan.check_model(model)
        reason = supported(plan, model)
        if reason:
            raise LaunchError(reason)
        _set_precision(plan, device)
        self.plan = plan
        self.device = device
        self._place = place_of(plan, device)
        self._adapter = adapter_of(
            model,
            source=plan.model.source,
            seq_len=plan.seq_len,
            dtype=activation_type(plan.precision),
            device=device,
            seed=plan.training.seed,
            weights=weights,
            context=self._place.context,
        )
        self._positions = self._place.context.positions(plan.seq_len).to(device)
        self.stages = plan.stages_of_rank(self._place.stage)
        self._parts = tuple(
            parallel_stage(
                plan,
                self._adapter,
                self._place,
                stage=stage,
                device=device,
                weights=Weights(weights) if weights else None,
            )
            for stage in self.stages
        )
        if plan.training.lora is not None:
            adapted = sum(part.adapted for part in self._parts)
            lora.refuse_without_targets(adapted, plan.training.lora, self._place, model=model.name)
        self._optimizer = Optimizer(
            [part.chain for part in self._parts],
            self._adapter,
            plan.training,
            self._place,
            device=device,
            offload=plan.offload,
            scale=LossScale(device, active=plan.precision == "fp16"),
            mean=self._mean_over_replicas(),
            summed=frozenset().union(*(part.summed for part in self._parts)),
            factors={name: factor for part in self._parts for name, factor in part.factors.items()},
        )
        self._norm = 0.0
        self._replicas = self._new_replicas()
        self._pipeline = self._new_pipeline() if plan.mesh.pipeline > 1 else None

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank feeds; ranks of one slice get equal tokens."""
        return self._place.data_rank

    @property
    def data_degree(self) -> int:
        """Into how many slices the global batch is cut."""
        return self._place.data_degree

    @property
    def stage(self) -> int:
        """This rank's coordinate on the pipeline axis: its stage, if it holds one."""
        return self._place.stage

    @property
    def is_first(self) -> bool:
        """This rank reads the tokens."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """This rank computes the loss."""
        return len(self.plan.stages) - 1 in self.stages

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The plan's layers of this rank, in order.  Each runs once per micro-batch."""
        return {name: layer for part in self._parts for name, layer in part.chain.layers.items()}

    @property
    def steps(self) -> int:
        """Optimizer steps done so far; part of `state`, so a loaded engine continues to count."""
        return int(self._optimizer.steps)

    def step(self, tokens: Tensor) -> StepResult:
        """Train on tokens [sample of this data rank, position], seq_len + 1 positions long.

        They are the samples that `plan.samples_of` names.  All tensor, context and pipeline ranks
        of a data rank pass the same tokens.
        """
        inputs, targets = self._inputs_and_targets(tokens)
        with self._loss_context():
            loss = (
                self._all_micro_batches(inputs, targets)
                if self._pipeline is None
                else self._through_pipeline(self._pipeline, inputs, targets)
            )
        if self._replicas is not None:
            self._replicas.finish()
        # Every rank that has tokens of its own, and each of its tensor ranks, holds their mean.
        holders = self._place.replicas * self.plan.mesh.tensor
        loss = self._optimizer.scale.taken_off(loss) / holders
        if isinstance(self._pipeline, StalePipeline):
            mean, self._norm = self._late_update(self._pipeline, loss)
            return StepResult(mean, self._norm, expert_load=self._expert_load())
        loss, norm = self._optimizer.step(loss).tolist()
        return StepResult(
            loss,
            norm,
            skipped=self._optimizer.scale.skips(norm),
            expert_load=self._expert_load(),
        )

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> float:
        """Return the mean loss of a batch like a step's, on every rank, and learn nothing."""
        inputs, targets = self._inputs_and_targets(tokens)
        with self._loss_context():
            if self._pipeline is None:
                count = self.plan.micro_batches_of(self.data_rank)
                pairs = zip(inputs.chunk(count), targets.chunk(count), strict=True)
                losses = [self._micro_batch_loss(self._parts[0].chain(x), y) for x, y in pairs]
            else:
                losses = self._pipeline.evaluate(inputs, targets)
        for part in self._parts:
            for module in part.chain.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what no backward follows stays gathered
            for load in part.loads.values():
                load.taken()  # a step reports its own
        total = sum((_plain(loss) for loss in losses), torch.zeros((), device=self.device))
        total = self._optimizer.scale.taken_off(total) / (
            self._place.replicas * self.plan.mesh.tensor
        )
        if self._place.mesh is not None:
            dist.all_reduce(total)
        return float(total)

    def configuration(self) -> str | None:
        """Return the config.json of the model as a library has it, if one does."""
        return self._adapter.configuration()

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs: flat, by parameter name, sharing live memory.

        Keys: model.<name>, optim.<name>.exp_avg / exp_avg_sq / step, train.<...>.  Divided
        parameters are DTensors; torch.distributed.checkpoint loads them in place under any plan.
        All ranks ask together: a pipeline that never drains does so now.
        """
        if isinstance(self._pipeline, StalePipeline):
            self._pipeline.drain()
            if self._pipeline.due():
                _, self._norm = self._late_update(
                    self._pipeline, torch.zeros((), device=self.device)
                )
        return self._optimizer.state()

    def _inputs_and_targets(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        samples = len(self.plan.samples_of(self.data_rank))
        expected = (samples, self.plan.seq_len + 1)
        if tuple(tokens.shape) != expected:
            raise LaunchError(f"a step takes tokens of shape {expected}, not {tuple(tokens.shape)}")
        tokens = tokens.to(self.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.plan.mesh.context > 1:
            inputs, targets = inputs[:, self._positions], targets[:, self._positions]
        return inputs, targets

    def _all_micro_batches(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward without a pipeline; return the mean loss.

        A rank with a share of its own returns the sum over it, divided by the mean share: the mean
        over all ranks, of losses and of gradients, is then that over all samples.
        """
        count = self.plan.micro_batches_of(self.data_rank)
        total = torch.zeros((), device=self.device)
        pairs = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        for index, (batch, target) in enumerate(pairs):
            self._before_micro_batch(last=index == count - 1)
            loss = self._micro_batch_loss(self._parts[0].chain(batch), target)
            loss.backward()
            total += _plain(loss)
        return total

    def _expert_load(self) -> float | None:
        """Return how unevenly tokens fall on experts, of the whole global batch."""
        a = self._adapter.model.architecture
        if a is None or a.experts is None:
            return None
        names = [name for name, layer in self._adapter.model.chain if layer.kind == "moe_block"]
        rows = torch.zeros((len(names), a.experts.count), device=self.device)
        for part in self._parts:
            for name, load in part.loads.items():
                rows[names.index(name)] = load.taken()
        if self._place.mesh is not None:
            dist.all_reduce(rows)
        return float(imbalance(rows)) if names else None

    def _before_micro_batch(self, *, last: bool) -> None:
        """Say what data parallelism does in this backward: reduce, and let parameters go."""
        if self._parts[0].wrapped:
            chain = cast(FSDPModule, self._parts[0].chain)
            chain.set_is_last_backward(last)
            chain.set_requires_gradient_sync(last or reduces_at_once(self.plan, self._place))
            chain.set_reshard_after_backward(last or gathers_anew(self.plan, self._place))

    def _through_pipeline(self, pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> Tensor:
        losses = pipeline.run(inputs, targets)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([_plain(loss) for loss in losses]).sum()

    def _late_update(self, pipeline: StalePipeline, loss: Tensor) -> tuple[float, float]:
        """Update by a step that is due, if any; return the loss of all ranks and the last norm."""
        if not pipeline.due():
            dist.all_reduce(loss)
            return float(loss), self._norm
        pipeline.begin_update()
        self._optimizer.follow()
        mean, norm = self._optimizer.step(loss).tolist()
        return mean, norm

    def _mean_over_replicas(self) -> Mean | None:
        if self._place.replicas == 1 or not reduces_in_step(self.plan):
            return None
        group = self._place.data.replicating.get_group()
        match self.plan.gradient_wire:
            case "powersgd":
                return PowerSGD(group)
            case "full" | "bf16" | "fp16":
                return Mean(group)
            case _:
                assert_never(self.plan.gradient_wire)

    def _new_replicas(self) -> Replicas | None:
        replicated = [one for part in self._parts for one in part.replicated]
        if not replicated:
            return None
        apart = any(part.store is not None for part in self._parts)
        backwards = None if apart else self.plan.micro_batches_of(self.data_rank)
        return Replicas(replicated, backwards=backwards)

    def _micro_batch_loss(self, output: Tensor, target: Tensor) -> Tensor:
        plan = self.plan
        mean_share = plan.global_batch / (plan.micro_batch * self.data_degree)
        return self._optimizer.scale.applied(self._adapter.loss(output, target) / mean_share)

    def _boundary(self, stage: int, tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return meta tensors of what a stage hands on: this rank's part of the positions."""
        if self._adapter.model.edges and stage < len(self.plan.stages) - 1:
            crossing = crossings_of(self.plan, self._adapter.model)[stage]
            return tuple(self._handed_on(name, tokens) for name in crossing)
        return self._handed_on(self.plan.stages[stage].layers[-1].layer, tokens)

    def _handed_on(self, layer: str, tokens: Tensor) -> Tensor:
        made = self._adapter.boundary(layer, tokens)
        if self.plan.mesh.tensor > 1:
            made = made.chunk(self.plan.mesh.tensor, dim=1)[0].contiguous()
        return made.requires_grad_(made.is_floating_point())

    def _loss_context(self) -> contextlib.AbstractContextManager[object]:
        return loss_parallel() if self.plan.mesh.tensor > 1 else contextlib.nullcontext()

    def _new_pipeline(self) -> Pipeline:
        plan, place = self.plan, self._place
        length = plan.seq_len // plan.mesh.context
        tokens = torch.empty(plan.micro_batch, length, dtype=torch.int64, device="meta")
        parts = [
            StagePart(
                stage=stage,
                module=part.chain,
                inputs=self._boundary(stage - 1, tokens) if stage else tokens,
                outputs=self._boundary(stage, tokens),
                store=part.store,
            )
            for stage, part in zip(self.stages, self._parts, strict=True)
        ]
        if schedule_of(plan.schedule).stale:
            return StalePipeline(
                parts[0],
                name=plan.schedule,
                stages=len(plan.stages),
                micro_batches=plan.micro_batches,
                groups=place.pipeline_groups(),
                device=self.device,
                loss=self._micro_batch_loss,
            )
        return Pipeline(
            parts,
            schedule.orders(
                plan.schedule,
                stages=len(plan.stages),
                micro_batches=plan.micro_batches,
                virtual_stages=plan.virtual_stages,
            ),
            micro_batches=plan.micro_batches,
            group=place.axis("pipeline").get_group(),
            device=self.device,
            loss=self._micro_batch_loss,
            tokens_everywhere=bool(self._adapter.model.edges),
        )


def _set_precision(plan: Plan, device: torch.device) -> None:
    if plan.precision == "fp8":
        eight_bits.require(device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")


def _plain(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return loss.to_local() if isinstance(loss, DTensor) else loss
