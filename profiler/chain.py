"""Pieces of a model on this rank, made parallel by the runtime as in training.

A short chain has the model's ends and up to two layers of each kind between them; a stage has the
layers that a pipeline rank would hold.  Both are divided over a group of ranks as tensor, context
and expert parallelism divide them, without data parallelism and without a pipeline.  A model that
branches is run whole, in the order of its layers.  All groups of ranks do the same at the same
time, since what they contend for is part of the truth.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.model import ModelGraph, is_own
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.documents.training import Training
from meshwright.planner.schedules import PLAIN
from meshwright.runtime.core.batches import part_of, samples_in
from meshwright.runtime.core.loss import loss_sum_of
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.engine.apply_plan import Staged, is_block, language_stage, repeats
from meshwright.runtime.engine.language_model import adapter_of
from meshwright.runtime.engine.module_graph import few_samples
from meshwright.runtime.engine.script_module import OwnScript
from meshwright.runtime.engine.token_module import TokenModel
from meshwright.runtime.engine.user_module import OwnModel
from meshwright.runtime.launch.training_loop import refuse_unexecutable, trained_model
from meshwright.runtime.models.family_adapter import Adapter, next_token_loss
from meshwright.runtime.optim.gradients import Slot
from meshwright.runtime.optim.sharded_optimizer import ParameterGroup
from meshwright.runtime.optim.update_rules import parameter_groups_of, slots_of
from meshwright.runtime.parallel.attention_api import divide_positions
from meshwright.runtime.parallel.data_parallel import activation_type
from meshwright.runtime.techniques import activation_checkpointing as recomputing
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.unused_parameters import Participation

SAME_KIND = 2
"""Layers of one kind in the chain: the second one finds the caches as in a deep model."""
MOST_SAMPLES = 2**20
"""Largest number of samples of a micro-batch: the distance between the seeds of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Division:
    """Number of ranks over which each kind of parallelism divides layers."""

    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def mesh(self) -> Mesh:
        """The mesh of one group; experts beyond tensor and context are on ranks of data_shard."""
        inner = self.tensor * self.context
        return Mesh(
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            data_shard=max(1, self.expert // inner),
        )

    @property
    def ranks(self) -> int:
        """Number of ranks of one group.

        >>> Division(tensor=2, expert=4).ranks, Division(context=2, expert=2).ranks
        (4, 2)
        """
        return math.lcm(self.tensor * self.context, self.expert)


WHOLE = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One setting under which every layer kind is measured."""

    tensor: int
    micro_batch: int
    recompute: Recompute
    context: int = 1
    expert: int = 1
    compiled: bool = False

    @property
    def division(self) -> Division:
        """Division of its layers."""
        return Division(tensor=self.tensor, context=self.context, expert=self.expert)


class Chain:
    """A piece of the model on this rank, divided over a group of ranks.

    `layers` are one behind the other and begin with those that read tokens; by default they are
    those of `short_chain`.
    """

    def __init__(
        self,
        model: ModelGraph,
        *,
        seq_len: int,
        precision: Precision,
        device: torch.device,
        tensor: int = 1,
        context: int = 1,
        expert: int = 1,
        layers: Sequence[str] | None = None,
        script: OwnScript | None = None,
    ) -> None:
        """`script` builds the module, where the model is one that a script trains."""
        self.seq_len = seq_len
        self.precision = precision
        self.division = Division(tensor=tensor, context=context, expert=expert)
        self.device = device
        every = {name: layer.kind for name, layer in model.chain}
        # Mixed precision belongs to data parallelism in the runtime; here the layers themselves
        # are in the type that they compute in.
        self._dtype = activation_type(precision)
        self._model, self.script = model, script
        self._compiled: dict[tuple[Recompute, int], dict[str, nn.Module]] = {}
        if is_own(model.source or ""):
            names = list(every) if layers is None else list(layers)
            rest = [name for name in every if name not in set(names)]
            self._record(self._plan([*names, *rest]), names, short=layers is None)
        else:
            self._describe(self._plan(list(short_chain(model)) if layers is None else layers))
        self.kinds = {name: every[name] for name in self.parts}
        """Kind by layer, in order."""
        self.whole = list(self.kinds)[-1] == list(every)[-1]
        """True if the chain ends in the model's last layer, and so in a loss."""
        self._data_rank = self.place.data_rank

    def _plan(self, names: Sequence[str]) -> Plan:
        # ZeRO, which experts on ranks of their own need, is not applied: see `_place`.
        mesh = self.division.mesh
        zero = int(mesh.data_shard > 1)
        return plan_of(self._model, [list(names)], seq_len=self.seq_len, mesh=mesh, zero=zero)

    def _describe(self, plan: Plan) -> None:
        """Make the layers of a language model."""
        model = self._model
        self.place = _place(plan, self.device)
        self.adapter = adapter_of(
            model,
            source=model.source or model.name,
            seq_len=self.seq_len,
            dtype=self._dtype,
            device=self.device,
            weights=None,
            context=self.place.context,
        )
        """Adapter of the model family that builds the layers."""
        self._recorded: OwnModel | None = None
        stage = whole_stage(plan, self.adapter, self.place, self.device)
        self.parts: dict[str, nn.Module] = stage.layers
        """The layers by name, in order; each takes what the one before it made."""
        self.every = self.parts
        """All layers of `module`, also those that are not run one by one."""
        self.module = stage.module.to(self._dtype)
        assert model.architecture is not None
        self.vocabulary = model.architecture.vocab_size

    def _record(self, plan: Plan, names: Sequence[str], *, short: bool) -> None:
        """Cut a module that is recorded into its layers."""
        self.place = _place(plan, self.device)
        self._recorded = recorded = self._anew(plan, self.place)
        (self._stage,) = recorded.stages(None)
        self.module = self._stage.module.to(self._dtype)
        recording = recorded.recorder.first
        kinds = {name: layer.kind for name, layer in self._model.chain}
        taken: dict[str, int] = {}
        self.parts, self.every = {}, {}
        for at, name in enumerate(names):
            self.every[name] = part = RecordedStage(
                recorded.module, recorded.recorder, at, at + 1
            ).train()
            part.around = recorded.around(plan)
            taken[kinds[name]] = taken.get(kinds[name], 0) + 1
            passes = [*map(_alike, part.received(recording))]
            alike = bool(at) and passes == [*map(_alike, part.sent(recording))]
            # One that takes what it makes can be left out between others.
            if not short or taken[kinds[name]] <= SAME_KIND or not alike:
                self.parts[name] = part
            if at == len(kinds) - 1:
                part.loss = lambda made, micro: self._total(made, micro.batch)
        self.vocabulary = recorded.vocabulary if isinstance(recorded, TokenModel) else 0

    def _anew(self, plan: Plan, place: Place) -> OwnModel:
        """Return the module recorded again, under a plan."""
        if self.script is not None:
            return self.script.model(plan, device=self.device, place=place)
        refuse_unexecutable(plan, self._model)
        model = trained_model(plan, self._model, device=self.device, place=place)
        assert isinstance(model, TokenModel)
        return model

    def _total(self, outputs: Any, batch: Any) -> Tensor:
        assert self._recorded is not None
        return loss_sum_of(self._recorded.loss(outputs, batch), samples_in(batch)).total

    def loss(self, logits: Tensor, targets: Any) -> Tensor:
        """Return the sum of losses of what the last layer made."""
        return logits if self._recorded is not None else next_token_loss(logits, targets)[0]

    def whole_loss(self, module: nn.Module, tokens: Tensor, targets: Any) -> Tensor:
        """Return the sum of losses of all layers as one stage."""
        if self._recorded is not None:
            return self._total(module(micro=MicroBatch(targets)), targets)
        return next_token_loss(module(micro=MicroBatch((tokens, targets))), targets)[0]

    def run(self, layer: nn.Module, taken: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the output of a layer."""
        outputs = layer(*taken)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def slots(self) -> tuple[Slot, ...]:
        """Return the optimizer's slots of the layers where each rank has all of them."""
        if self._recorded is not None:
            return self._recorded.slots([self._stage])
        return tuple(slots_of(self.module, self.adapter, Place(degrees=Mesh(), mesh=None)))

    def groups(self, slots: Sequence[Slot]) -> Sequence[ParameterGroup]:
        """Return their parameter groups in the script's own optimizer, or in AdamW."""
        if self.script is not None and self._recorded is not None:
            return self._recorded.groups(slots)
        return parameter_groups_of(slots, Training(), device=self.device)

    @property
    def participation(self) -> Participation | None:
        """Participation for a script's own optimizer; None where it decides on the device."""
        return self._recorded.participation if self.script and self._recorded else None

    def anew(self, plan: Plan, place: Place) -> Staged:
        """Return the same layers under a plan that has all of them in one stage."""
        if self._recorded is not None:
            return self._anew(plan, place).stages(None)[0]
        return whole_stage(plan, self.adapter, place, self.device)

    def layers(self, case: Case) -> dict[str, nn.Module]:
        """Return the layers in order, each with the case's recomputation and compilation."""
        key = case.recompute, case.micro_batch
        if key in self._compiled and case.compiled:
            return self._compiled[key]
        layers = {
            name: recomputing.wrapped(_OwnForward(layer), case.recompute)
            if case.compiled or case.recompute != "none"
            else layer
            for name, layer in self.parts.items()
        }
        if case.compiled:
            compiler = Compiler(self.device)
            for name, layer in layers.items():
                if self._recorded is not None:
                    layers[name] = self._compiled_part(name, case.recompute, compiler)
                elif repeats(self._model, name):
                    compiler.compile(name, layer)
            self._compiled[key] = layers
        return layers

    def _compiled_part(self, name: str, recompute: Recompute, compiler: Compiler) -> nn.Module:
        """Return a recorded layer whose units with parts are graphs."""
        part = self.parts[name]
        assert isinstance(part, RecordedStage) and self._recorded is not None
        at = [layer.name for layer in self._recorded.recorder.first.layers].index(name)
        stage = RecordedStage(self._recorded.module, self._recorded.recorder, at, at + 1).train()
        stage.micro_batches, stage.loss, stage.around = part.micro_batches, part.loss, part.around
        for path, unit in part.units.items():
            if is_block(unit):
                forward = recomputing.wrapped(_OwnForward(unit), recompute)
                compiler.compile(path, forward)
                stage.place(path, forward)
        return stage

    def batch(self, micro_batch: int) -> tuple[Tensor, Any]:
        """Return this rank's tokens of one micro-batch, and the targets.

        For a recorded module those are all of the batch; for a script's own, whose samples are
        those of its example, the first are any tensor of it.  Ranks of one tensor group have the
        same; those of a context group have parts of the same.
        """
        given = self._samples(micro_batch) if self.script is not None else None
        if given is None:
            given = self._tokens(micro_batch)
        for part in self.parts.values():
            if isinstance(part, RecordedStage):  # it replays a micro-batch
                part.micro_batches = (MicroBatch(given),)
        if self._recorded is None:
            tokens, targets = given
            return tokens, targets
        return next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), given

    def _samples(self, micro_batch: int) -> Any:
        """Return samples of a script's example, in the type that layers compute in."""
        assert self.script is not None and self._recorded is not None
        begin = micro_batch * self._data_rank

        def on_device(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            narrow = leaf.is_floating_point() and self._dtype != torch.float32
            return leaf.to(self.device, self._dtype if narrow else None)

        every = few_samples(self.script.batch, begin + micro_batch)
        micro_samples = part_of(every, range(begin, begin + micro_batch))
        return tree_map(on_device, divide_positions(micro_samples, self.place.context))

    def _tokens(self, micro_batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(micro_batch + MOST_SAMPLES * self._data_rank)
        shape = (micro_batch, self.seq_len + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if isinstance(self._recorded, TokenModel):
            given: tuple[Tensor, ...] = inputs, targets
            if len(self._recorded.example) > 2:
                given += (torch.arange(self.seq_len).expand_as(inputs),)
            return tuple(
                tensor.to(self.device) for tensor in divide_positions(given, self.place.context)
            )
        if self.division.context > 1:
            held = self.place.context.positions(self.seq_len)
            inputs, targets = inputs[:, held], targets[:, held]
        return inputs.to(self.device), targets.to(self.device)

    def loss_context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the runtime computes a loss over a divided vocabulary."""
        return loss_parallel() if self.division.tensor > 1 else contextlib.nullcontext()

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes of this rank's parts of the parameters and buffers of each layer."""
        return {
            name: sum(
                (t.to_local() if isinstance(t, DTensor) else t).untyped_storage().nbytes()
                for t in (*layer.parameters(), *layer.buffers())
            )
            for name, layer in self.parts.items()
        }

    def gradients_exist(self) -> None:
        """Let every parameter have a gradient to add to."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def whole_stage(plan: Plan, adapter: Adapter, place: Place, device: torch.device) -> Staged:
    """Return all layers of a plan as one stage."""
    return language_stage(plan, adapter, place, stage=0, device=device)


class _OwnForward(nn.Module):
    """A layer whose own forward stays as it is when this one recomputes or is compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def _alike(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def short_chain(model: ModelGraph) -> dict[str, str]:
    """Return kind by layer name: the first layers of each kind."""
    taken: dict[str, int] = {}
    result = {}
    for name, layer in model.chain:
        if taken.get(layer.kind, 0) < SAME_KIND:
            taken[layer.kind] = taken.get(layer.kind, 0) + 1
            result[name] = layer.kind
    return result


def plan_of(
    model: ModelGraph,
    stages: Sequence[Sequence[str]],
    *,
    seq_len: int,
    mesh: Mesh,
    zero: int = 0,
    precision: Precision = "fp32",
    micro_batches: int = 1,
) -> Plan:
    """Return a plan with these layers in each stage and micro-batches of one sample."""
    data = mesh.data_shard * mesh.data_replicate
    return Plan(
        model=PlannedModel.of(model),
        cluster="local",
        seq_len=seq_len,
        global_batch=data * micro_batches,
        precision=precision,
        mesh=mesh,
        zero=zero,
        schedule=PLAIN,
        micro_batch=1,
        micro_batches=micro_batches,
        stages=tuple(
            Stage(layers=tuple(PlacedLayer(layer=name) for name in stage)) for stage in stages
        ),
    )


_meshes: dict[tuple[str, Mesh], DeviceMesh] = {}


def _place(plan: Plan, device: torch.device) -> Place:
    """Return this rank's place in its own group of ranks; other groups do the same.

    Nothing is sharded: data parallelism is measured by itself.
    """
    degrees = plan.mesh
    if degrees.devices == 1:
        return Place(degrees=degrees, mesh=None)
    key = (device.type, degrees)
    if key not in _meshes:
        names = ("copies", "pipeline", "data_replicate", "data_shard", "context", "tensor")
        copies = dist.get_world_size() // degrees.devices
        sizes = (copies, 1, 1, degrees.data_shard, degrees.context, degrees.tensor)
        _meshes[key] = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return Place(degrees=degrees, mesh=_meshes[key])
