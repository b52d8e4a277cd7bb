"""TokenEngine: executes a Plan of a language model on one rank, from tokens to the update.

It asks an adapter for its stage's layers, applies the plan to them (runtime.transforms), and
repeats: passes as of a script's Engine, gradients summed and clipped, one optimizer step.
Whatever the plan, the losses and weights are those of one process, to rounding.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from planner.documents.cluster import EIGHT_BITS
from planner.documents.model import ModelGraph
from planner.documents.plan import Plan
from planner.errors import LaunchError
from planner.layers.parameters import routes
from runtime import document_attention, eight_bits, lora
from runtime.agreement import COMPARED_EVERY
from runtime.batch_norm import RunningStatistics
from runtime.compiled import Compiler
from runtime.described_model import DescribedModel
from runtime.experts import imbalance
from runtime.gradient_wire import Mean, PowerSGD
from runtime.huggingface import LM_HEAD, HuggingFace
from runtime.loss import IGNORED, divisor_near
from runtime.loss_scale import LossScale
from runtime.mesh import place_of
from runtime.optimizer import Optimizer
from runtime.parallelize import activation_type, reduces_in_step
from runtime.published import Weights
from runtime.recorded_stage import MicroBatch
from runtime.script_passes import Passes
from runtime.source import adapter_of
from runtime.stale_pipeline import StalePipeline
from runtime.supported import documents_refused, supported
from runtime.transforms import language_stage


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
        files = Weights(weights) if weights else None
        if files and self._adapter.tied_names and (self._place.mesh is None or not dist.get_rank()):
            files.refuse_untied(self._adapter.published_name("embedding.tokens.weight"), LM_HEAD)
        pieces = plan.tensor_overlap == "async"
        self.compiler = Compiler(device, pieces=pieces) if plan.compile == "block" else None
        """What compiles layers, if the plan lets any be compiled."""
        length = plan.seq_len // plan.mesh.context
        tokens = torch.empty(plan.micro_batch, length, dtype=torch.int64, device="meta")
        described = DescribedModel(plan, self._adapter, tokens, documents=documents)
        self._parts = tuple(
            language_stage(
                plan,
                self._adapter,
                self._place,
                described,
                stage=stage,
                device=device,
                weights=files,
                compiler=self.compiler,
            )
            for stage in self.stages
        )
        if plan.training.lora is not None:
            adapted = sum(part.adapted for part in self._parts)
            lora.refuse_without_targets(adapted, plan.training.lora, self._place, model=model.name)
        self._optimizer = Optimizer(
            [part.module for part in self._parts],
            self._adapter,
            plan.training,
            self._place,
            device=device,
            offload=plan.offload,
            scale=LossScale(device, active=plan.precision == "fp16"),
            mean=self._mean_over_replicas(),
            divisor=divisor_near(plan.global_batch * plan.seq_len / self._place.replicas),
            summed=frozenset[str]().union(*(part.summed for part in self._parts)),
            factors={name: factor for part in self._parts for name, factor in part.factors.items()},
        )
        self._counts: deque[Tensor] = deque()
        """Of the steps whose update waits, where weights are stale; oldest first."""
        self._norm = 0.0
        example = (tokens, tokens, tokens) if documents else (tokens, tokens)
        self._passes = Passes(
            plan,
            self._place,
            self._parts,
            described,
            example=example,
            loss=self._loss,
            gradients=self._optimizer,
            statistics=RunningStatistics((), self._place),
            sums=False,
            compares=False,
            device=device,
        )
        self._stale: StalePipeline | None = None
        """A pipeline that never drains, on weights of two ages."""
        if plan.mesh.pipeline > 1:  # made before the first step, as all else that takes memory
            pipeline = self._passes.pipeline_of([MicroBatch(example)])
            self._stale = pipeline if isinstance(pipeline, StalePipeline) else None

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
        return {name: layer for part in self._parts for name, layer in part.layers.items()}

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
        self.forward_backward(tokens, counts, starts)
        if self._stale is not None:
            mean, self._norm = self._late_update(self._stale)
            return StepResult(mean, self._norm, expert_load=self._expert_load())
        loss, norm, count, drift = self._optimizer.step(self._passes.totals.values.clone()).tolist()
        if drift and self._optimizer.agreement is not None:
            self._optimizer.agreement.refuse_drift()
        return StepResult(
            loss,
            norm,
            skipped=count == 0 or self._optimizer.scale.skips(norm),
            expert_load=self._expert_load(),
        )

    def forward_backward(
        self, tokens: Tensor, counts: Tensor | None = None, starts: Tensor | None = None
    ) -> None:
        """Make the gradients of a step, and note its losses."""
        micros = self._micro_batches(tokens, counts, starts)
        with self._loss_context():
            self._passes.train(micros)

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, counts: Tensor | None = None, starts: Tensor | None = None
    ) -> float:
        """Return the mean loss of a batch like a step's, on every rank, and learn nothing."""
        micros = self._micro_batches(tokens, counts, starts)
        with self._loss_context():
            self._passes.evaluate(micros)
        for part in self._parts:
            for load in part.loads.values():
                load.taken()  # a step reports its own
        totals = self._passes.of_all(self._passes.totals.values)
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
            for name, parameter in part.module.named_parameters():
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
        if self._stale is not None:
            self._stale.drain()
            if self._stale.due():
                self._passes.totals.clear()
                _, self._norm = self._late_update(self._stale)
                self._counts.pop()  # no step has begun
        state: dict[str, Tensor] = self._optimizer.state()
        if self.plan.training.lora is None:
            for part in self._parts:
                state |= {f"model.{name}": buffer for name, buffer in part.buffers.items()}
        return state

    def _micro_batches(
        self, tokens: Tensor, counts: Tensor | None, starts: Tensor | None
    ) -> list[MicroBatch]:
        """Return this rank's positions of its samples, and forget what was noted of others."""
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
        self._passes.totals.clear()
        for part in self._parts:
            part.narrow.rescale()
        batch = (inputs, targets) if starts is None else (inputs, targets, starts)
        return self._passes.cut(batch, step=self.steps, drawing=False)

    def _loss(self, made: Any, batch: tuple[Tensor, ...]) -> Any:
        """Return the sum of losses and what it counts; a loss in chunks is the head's."""
        return self._adapter.loss(made, batch[1]) if self.plan.loss is None else made

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

    def _late_update(self, pipeline: StalePipeline) -> tuple[float, float]:
        """Update by a step that is due, if any; return the loss of all ranks and the last norm."""
        totals = self._passes.totals.values.clone()
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

    def _loss_context(self) -> contextlib.AbstractContextManager[object]:
        return loss_parallel() if self.plan.mesh.tensor > 1 else contextlib.nullcontext()


def _set_precision(plan: Plan, device: torch.device) -> None:
    if plan.precision in EIGHT_BITS:
        eight_bits.require(device, plan.precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")
