"""TokenEngine: executes a Plan of a language model on one rank, from tokens to the update.

It asks an adapter for its stage's layers, makes them parallel, and repeats: forwards and backwards
of all micro-batches in the plan's order, gradients summed and clipped, one optimizer step.
Whatever the plan, the losses and weights are those of one process, to rounding.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from planner import schedule
from planner.cluster import EIGHT_BITS
from planner.costs.crossings import crossings_of
from planner.errors import LaunchError
from planner.layers.parameters import routes
from planner.model import ModelGraph
from planner.plan import Plan
from planner.schedules import schedule_of
from runtime import document_attention, eight_bits, lora
from runtime.agreement import COMPARED_EVERY
from runtime.branches import TOKENS
from runtime.chunked_loss import Targets
from runtime.compiled import Compiler
from runtime.experts import imbalance
from runtime.gradient_wire import Mean, PowerSGD
from runtime.huggingface import LM_HEAD, HuggingFace
from runtime.loss import IGNORED, Counted, Totals, divisor_near
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
from runtime.supported import documents_refused, supported
from runtime.torch_internals import forget_forward_order


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports, equal on every rank."""

    loss: float
    """Mean over all tokens of the global batch that count, before the step."""
    grad_norm: float
    """Of the whole model, before clipping.  With stale weights that of the step before, or 0."""
    skipped: bool = False
    """No weight moved: nothing counted, or gradients overflowed in fp16, and the next step has a
    smaller loss scale."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, averaged over layers; None without experts."""


class TokenEngine:
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
        documents: bool = False,
    ) -> None:
        """`weights` is a local folder of safetensors files; None starts from random weights.

        With `documents` samples hold several, and steps are told where each begins.
        """
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
            documents=documents,
        )
        self._documents = documents
        if documents and (reason := documents_refused(plan, model)):
            raise LaunchError(reason)
        self._positions = self._place.context.positions(plan.seq_len).to(device)
        self.stages = plan.stages_of_rank(self._place.stage)
        self._targets = Targets()
        files = Weights(weights) if weights else None
        if files and self._adapter.tied_names and (self._place.mesh is None or not dist.get_rank()):
            files.refuse_untied(self._adapter.published_name("embedding.tokens.weight"), LM_HEAD)
        pieces = plan.tensor_overlap == "async"
        self.compiler = Compiler(device, pieces=pieces) if plan.compile == "block" else None
        """What compiles layers, if the plan lets any be compiled."""
        self._parts = tuple(
            parallel_stage(
                plan,
                self._adapter,
                self._place,
                stage=stage,
                device=device,
                weights=files,
                targets=self._targets,
                compiler=self.compiler,
            )
            for stage in self.stages
        )
        for part in self._parts:
            part.chain.documents = documents
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
            divisor=divisor_near(plan.global_batch * plan.seq_len / self._place.replicas),
            summed=frozenset().union(*(part.summed for part in self._parts)),
            factors={name: factor for part in self._parts for name, factor in part.factors.items()},
        )
        self._totals = Totals(device)
        self._counts: deque[Tensor] = deque()
        """Of the steps whose update waits, where weights are stale; oldest first."""
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

    def step(
        self, tokens: Tensor, counts: Tensor | None = None, starts: Tensor | None = None
    ) -> StepResult:
        """Train on tokens [sample of this data rank, position], seq_len + 1 positions long.

        They are the samples that `plan.samples_of` names.  All tensor, context and pipeline ranks
        of a data rank pass the same tokens.  `counts` says of each token but the first whether the
        loss counts it, [sample, seq_len]; without it all count.  `starts` says of each token but
        the last where its document begins: attention does not reach behind that.
        """
        inputs, targets = self._inputs_and_targets(tokens, counts, starts)
        self._totals.clear()
        for part in self._parts:
            part.narrow.rescale()
        with self._loss_context():
            if self._pipeline is None:
                self._all_micro_batches(inputs, targets)
            else:
                self._pipeline.run(inputs, targets)
        if self._replicas is not None:
            self._replicas.finish()
        if isinstance(self._pipeline, StalePipeline):
            mean, self._norm = self._late_update(self._pipeline)
            return StepResult(mean, self._norm, expert_load=self._expert_load())
        loss, norm, count, drift = self._optimizer.step(self._own_totals()).tolist()
        if drift and self._optimizer.agreement is not None:
            self._optimizer.agreement.refuse_drift()
        return StepResult(
            loss,
            norm,
            skipped=count == 0 or self._optimizer.scale.skips(norm),
            expert_load=self._expert_load(),
        )

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, counts: Tensor | None = None, starts: Tensor | None = None
    ) -> float:
        """Return the mean loss of a batch like a step's, on every rank, and learn nothing."""
        inputs, targets = self._inputs_and_targets(tokens, counts, starts)
        self._totals.clear()
        for part in self._parts:
            part.narrow.rescale()
        with self._loss_context():
            if self._pipeline is None:
                count = self.plan.micro_batches_of(self.data_rank)
                for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
                    self._targets.now = y
                    self._micro_batch_loss(self._parts[0].chain(x), y)
            else:
                self._pipeline.evaluate(inputs, targets)
        for part in self._parts:
            for module in part.chain.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what no backward follows stays gathered
            for load in part.loads.values():
                load.taken()  # a step reports its own
        totals = self._own_totals()
        if self._place.mesh is not None:
            dist.all_reduce(totals)
        return float(totals[0] / totals[1])

    def agree(self) -> None:
        """Agree with all ranks on what they hold; from now on replicas are compared."""
        self._optimizer.agree(self._held_beside, every=COMPARED_EVERY)

    def refuse_drifted(self) -> None:
        """Compare replicas now; LaunchError, on all ranks, where one has drifted."""
        if self._optimizer.agreement is not None:
            self._optimizer.agreement.refuse_drifted()

    def _held_beside(self) -> dict[str, Tensor]:
        """Return what is held beside what is trained, by name."""
        held: dict[str, Tensor] = {}
        for part in self._parts:
            held |= part.buffers
            for name, parameter in part.chain.named_parameters():
                if not parameter.requires_grad:
                    held[name] = parameter
        return held

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
                self._totals.clear()
                _, self._norm = self._late_update(self._pipeline)
                self._counts.pop()  # no step has begun
        state: dict[str, Tensor] = self._optimizer.state()
        if self.plan.training.lora is None:
            for part in self._parts:
                state |= {f"model.{name}": buffer for name, buffer in part.buffers.items()}
        return state

    def _inputs_and_targets(
        self, tokens: Tensor, counts: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        samples = len(self.plan.samples_of(self.data_rank))
        expected = (samples, self.plan.seq_len + 1)
        if tuple(tokens.shape) != expected:
            raise LaunchError(f"a step takes tokens of shape {expected}, not {tuple(tokens.shape)}")
        tokens = tokens.to(self.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if counts is not None:
            if counts.shape != targets.shape or counts.dtype != torch.bool:
                raise LaunchError(
                    f"counts are booleans of shape {tuple(targets.shape)}, one for each target; "
                    f"these are {counts.dtype} of shape {tuple(counts.shape)}"
                )
            targets = targets.where(counts.to(self.device, non_blocking=True), IGNORED)
        if (starts is not None) != self._documents or (
            starts is not None and starts.shape != targets.shape
        ):
            raise LaunchError(
                "starts say where the document of each input begins, [sample, seq_len], and are "
                "given if and only if the engine was made for documents"
            )
        if starts is not None:
            if isinstance(self._adapter, HuggingFace):  # before it leaves for the device
                most = document_attention.most_documents(starts, self.plan.micro_batch)
                self._adapter.most_documents = most
            starts = starts.to(self.device, non_blocking=True)
        if self.plan.mesh.context > 1:
            inputs, targets = inputs[:, self._positions], targets[:, self._positions]
            starts = None if starts is None else starts[:, self._positions]
        return inputs if starts is None else torch.cat((inputs, starts), dim=1), targets

    def _all_micro_batches(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward and backward without a pipeline."""
        count = self.plan.micro_batches_of(self.data_rank)
        pairs = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        for index, (batch, target) in enumerate(pairs):
            self._before_micro_batch(last=index == count - 1)
            self._targets.now = target
            self._micro_batch_loss(self._parts[0].chain(batch), target).backward()

    def _expert_load(self) -> float | None:
        """Return how unevenly tokens fall on experts, of the whole global batch."""
        a = self._adapter.model.architecture
        if a is None or a.experts is None:
            return None
        names = [name for name, layer in self._adapter.model.chain if routes(layer.kind)]
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
            forget_forward_order(chain)
            chain.set_is_last_backward(last)
            chain.set_requires_gradient_sync(last or reduces_at_once(self.plan, self._place))
            chain.set_reshard_after_backward(last or gathers_anew(self.plan, self._place))

    def _own_totals(self) -> Tensor:
        """Return this rank's [sum, count] of the loss; one of the ranks that know them gives them.

        All tensor ranks of a stage have the same.
        """
        totals = self._totals.values
        return torch.zeros_like(totals) if self._place.along("tensor") else totals.clone()

    def _late_update(self, pipeline: StalePipeline) -> tuple[float, float]:
        """Update by a step that is due, if any; return the loss of all ranks and the last norm."""
        totals = self._own_totals()
        if not pipeline.due():
            dist.all_reduce(totals)
            self._counts.append(totals[1])
            return float(totals[0] / totals[1]), self._norm
        pipeline.begin_update()
        self._optimizer.follow()
        report = self._optimizer.step(totals, self._counts.popleft())
        self._counts.append(report[2])
        mean, norm, _, drift = report.tolist()
        if drift and self._optimizer.agreement is not None:
            self._optimizer.agreement.refuse_drift()
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

    def _micro_batch_loss(self, output: Any, target: Tensor) -> Tensor:
        """Note what a micro-batch adds to the loss; return where its backward begins."""
        one = Counted(*(self._adapter.loss(output, target) if self.plan.loss is None else output))
        self._totals.add(one)
        return self._optimizer.scale.applied(one.total / self._optimizer.divisor)

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
        given = torch.cat((tokens, tokens), dim=1) if self._documents else tokens
        parts = [
            StagePart(
                stage=stage,
                module=part.chain,
                inputs=self._boundary(stage - 1, tokens) if stage else given,
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
            groups=place.pipeline_groups(),
            device=self.device,
            loss=self._micro_batch_loss,
            everywhere=TOKENS if self._adapter.model.edges or self._documents else None,
            targets=self._targets,
        )


def _set_precision(plan: Plan, device: torch.device) -> None:
    if plan.precision in EIGHT_BITS:
        eight_bits.require(device, plan.precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")
