"""A language model under a plan: the layers that an adapter makes, on tokens.

What is particular to language models stands here: whose layers these are, which names and values
their parameters have, what of a row of tokens is input and what is target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.architectures.parameters import routes
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD
from meshwright.runtime.core.loss import IGNORED
from meshwright.runtime.core.mesh import WHOLE, Context, Place, place_of
from meshwright.runtime.engine.apply_plan import Staged, language_stage
from meshwright.runtime.engine.unsupported import documents_refused
from meshwright.runtime.models.families import has_config
from meshwright.runtime.models.family_adapter import Adapter, next_token_loss
from meshwright.runtime.models.huggingface import LM_HEAD, HuggingFace
from meshwright.runtime.models.reference_decoder import Reference
from meshwright.runtime.models.safetensors_weights import Weights
from meshwright.runtime.optim.gradients import Slot
from meshwright.runtime.optim.learning_rate import learning_rate
from meshwright.runtime.optim.sharded_optimizer import ParameterGroup
from meshwright.runtime.optim.update_rules import parameter_groups_of, slots_of
from meshwright.runtime.parallel import document_attention
from meshwright.runtime.parallel.data_parallel import activation_type
from meshwright.runtime.parallel.expert_parallel import imbalance
from meshwright.runtime.parallel.holders import Holders, holders_of
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.tracing.unused_parameters import Participation


class LanguageModel:
    """A language model built from the figures of a model: its plan's stages on this rank."""

    sums = False
    participation: Participation | None = None
    """All parameters take part in each step."""
    recorder = None
    """Nothing is recorded: its layers run one after another."""

    def __init__(
        self,
        plan: Plan,
        model: ModelGraph,
        *,
        device: torch.device,
        weights: Path | None = None,
        documents: bool = False,
        place: Place | None = None,
    ) -> None:
        """`weights` is a local folder of safetensors files; None starts from random weights.

        With `documents` samples hold several, and batches say where each begins.
        """
        self.plan = plan
        self.place = place or place_of(plan, device)
        self.own_plan = plan.kinds[self.place.kind]
        """Plan of this rank's kind of pipelines."""
        self.aliases: dict[str, str] = {}
        self.order: tuple[str, ...] = ()
        self.counts = plan.seq_len
        """Count that the loss is expected to have for each sample."""
        self.divides_logits = plan.mesh.tensor > 1
        self.adapter = adapter_of(
            model,
            source=plan.model.source,
            seq_len=plan.seq_len,
            dtype=activation_type(plan.precision),
            device=device,
            weights=weights,
            context=self.place.context,
            documents=documents,
        )
        if documents and (reason := documents_refused(plan, model)):
            raise LaunchError(reason)
        self._holders = self._new_holders()
        """Returns the ranks that hold a parameter, by its name, where pipelines differ."""
        self._device, self._documents = device, documents
        self._files = Weights(weights) if weights else None
        if (
            self._files
            and self.adapter.tied_names
            and (self.place.mesh is None or not dist.get_rank())
        ):
            embedding = self.adapter.published_name("embedding.tokens.weight")
            self._files.refuse_untied(embedding, LM_HEAD)
        self._positions = self.place.context.positions(plan.seq_len).to(device)
        length = plan.seq_len // plan.mesh.context
        tokens = torch.empty(plan.micro_batch, length, dtype=torch.int64, device="meta")
        self.example = tuple(torch.empty_like(tokens) for _ in range(3 if documents else 2))
        """A micro-batch without data, as stages get it."""

    def _new_holders(self) -> Callable[[str], Holders | None] | None:
        if self.place.kinds is None:
            return None
        tied = self.adapter.tied_names
        readers: dict[str, tuple[str, ...]] = {n: (n,) for n, _ in self.adapter.model.chain}
        readers |= dict.fromkeys(tied, (EMBEDDING, HEAD))
        holders = holders_of(self.plan, self.place, readers)
        layers = [item.layer for stage in self.own_plan.stages for item in stage.layers]

        def holders_by_name(name: str) -> Holders | None:
            if name in tied:
                return holders[name]
            return holders[next(layer for layer in layers if name.startswith(f"{layer}."))]

        return holders_by_name

    def stages(self, compiler: Compiler | None) -> tuple[Staged, ...]:
        """Return this rank's stages, the plan applied."""
        plan = self.own_plan
        parts = tuple(
            language_stage(
                plan,
                self.adapter,
                self.place,
                stage=stage,
                device=self._device,
                weights=self._files,
                compiler=compiler,
                holders=self._holders,
            )
            for stage in plan.stages_of_rank(self.place.stage)
        )
        if plan.training.lora is not None:
            adapted = sum(part.adapted for part in parts)
            lora.refuse_without_targets(
                adapted, plan.training.lora, self.place, model=self.adapter.model.name
            )
        return parts

    def slots(self, parts: Sequence[Staged]) -> tuple[Slot, ...]:
        """Return what this rank trains, by published name."""
        like = self.place.kinds is None
        ends = self.place.ends() if like and self.plan.mesh.pipeline > 1 else None
        return tuple(
            slot
            for part in parts
            for slot in slots_of(
                part.module,
                self.adapter,
                self.place,
                ends=ends,
                holders=self._holders,
                summed=part.summed,
                factors=part.factors,
            )
        )

    def groups(self, slots: Sequence[Slot]) -> list[ParameterGroup]:
        """Return what this rank trains by the settings of the plan's training."""
        return parameter_groups_of(
            slots, self.plan.training, device=self._device, offload=self.plan.offload
        )

    def learning_rate(self, steps: int) -> float | None:
        """Return that of the update behind `steps` others."""
        return learning_rate(self.plan.training, steps)

    def loss(self, outputs: Any, batch: tuple[Tensor, ...]) -> Any:
        """Return the sum of losses and what it counts; a loss in chunks is the head's."""
        return next_token_loss(outputs, batch[1]) if self.plan.loss is None else outputs

    def batch(self, given: Any) -> tuple[Tensor, ...]:
        """Return inputs and targets, and where documents begin, at this rank's positions.

        `given` are tokens [sample of this data rank, position], seq_len + 1 positions long, or a
        tuple of them, counts and starts.  Counts say of each token but the first whether the loss
        counts it, [sample, seq_len]; without them all count.  Starts say of each token but the last
        where its document begins: attention does not reach behind that.
        """
        inputs, targets, starts = inputs_and_targets(
            given, self.plan, self.place, device=self._device
        )
        if (starts is not None) != self._documents or (
            starts is not None and starts.shape != targets.shape
        ):
            raise LaunchError(
                "starts [sample, seq_len] give the begin of each input's document; an engine "
                "made for documents needs them, and no other takes them"
            )
        if starts is not None:
            if isinstance(self.adapter, HuggingFace):  # before it leaves for the device
                most = document_attention.most_documents(starts, self.plan.micro_batch)
                self.adapter.most_documents = most
            starts = starts.to(self._device, non_blocking=True)
        batch: tuple[Tensor, ...] = (
            (inputs, targets) if starts is None else (inputs, targets, starts)
        )
        if self.plan.mesh.context > 1:
            batch = tuple(leaf[:, self._positions] for leaf in batch)
        return batch

    def untrained_tensors(self, parts: Sequence[Staged]) -> dict[str, Tensor]:
        """Return what a rank has beside what it trains, by name."""
        held: dict[str, Tensor] = {}
        for part in parts:
            held |= part.buffers
            for name, parameter in part.module.named_parameters():
                if not parameter.requires_grad:
                    held[name] = parameter
        return held

    def saved_untrained_tensors(self, parts: Sequence[Staged]) -> dict[str, Tensor]:
        """Return what of that a checkpoint has: with adapters nothing, since none of it changes."""
        if self.plan.training.lora is not None:
            return {}
        return {name: buffer for part in parts for name, buffer in part.buffers.items()}

    def expert_load(self, parts: Sequence[Staged]) -> float | None:
        """Return how unevenly tokens fall on experts, of the whole global batch."""
        model = self.adapter.model
        experts = model.architecture.experts if model.architecture is not None else None
        if experts is None:
            return None
        names = [name for name, layer in model.chain if routes(layer.kind)]
        rows = torch.zeros((len(names), experts.count), device=self._device)
        for part in parts:
            for name, load in part.loads.items():
                rows[names.index(name)] = load.take_counts()
        if self.place.mesh is not None:
            dist.all_reduce(rows)
        return float(imbalance(rows)) if names else None

    def configuration(self) -> str | None:
        """Return the config.json of the model as a library has it, if one does."""
        return self.adapter.configuration()


def inputs_and_targets(
    given: Any, plan: Plan, place: Place, *, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what tokens are read and predicted, and where documents begin, if that was given.

    `given` is what LanguageModel.batch takes; what was given beside tokens stays where it is.
    """
    tokens, counts, starts = (*given, None, None)[:3] if isinstance(given, tuple) else (
        given, None, None
    )  # fmt: skip
    expected = (len(plan.samples_of(place.data_rank)), plan.seq_len + 1)
    if tuple(tokens.shape) != expected:
        raise LaunchError(f"a step takes tokens of shape {expected}, not {tuple(tokens.shape)}")
    tokens = tokens.to(device, non_blocking=True)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if counts is not None:
        if counts.shape != targets.shape or counts.dtype != torch.bool:
            raise LaunchError(
                f"counts are booleans of shape {tuple(targets.shape)}, one for each target; "
                f"these are {counts.dtype} of shape {tuple(counts.shape)}"
            )
        targets = targets.where(counts.to(device, non_blocking=True), IGNORED)
    return inputs, targets, starts


def adapter_of(
    model: ModelGraph,
    *,
    source: str,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    weights: Path | None,
    context: Context = WHOLE,
    documents: bool = False,
) -> Adapter:
    """Return the adapter for a model that `unsupported_reason` has nothing against.

    `dtype` is the type of activations.  `weights` is a folder whose config.json, if it has one,
    gives the settings that ModelGraph's figures leave open.  `context` says which positions of a
    sequence the layers are given; with `documents` samples hold several.
    """
    assert model.architecture is not None
    if model.architecture.family == "reference":
        return Reference(model, seq_len=seq_len, dtype=dtype, device=device, context=context)
    folder = next((f for f in (weights, Path(source)) if f and has_config(f)), None)
    return HuggingFace(
        model,
        folder=folder,
        seq_len=seq_len,
        dtype=dtype,
        device=device,
        context=context,
        documents=documents,
    )
