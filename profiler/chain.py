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

from planner.documents.cluster import Precision
from planner.documents.model import ModelGraph
from planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from planner.documents.profile import Recompute
from planner.schedules import PLAIN
from runtime import recompute as recomputing
from runtime.adapter import TOKENS, Adapter
from runtime.compiled import Compiler
from runtime.described_model import DescribedModel
from runtime.mesh import Place
from runtime.parallelize import activation_type
from runtime.source import adapter_of
from runtime.transforms import Staged, language_stage, repeats

SAME_KIND = 2
"""Layers of one kind in the chain: the second one finds the caches as in a deep model."""
MOST_SAMPLES = 2**20
"""Of a micro-batch: seeds of different ranks lie so far apart."""
BYTES = 256
"""Numbers of tokens where nothing says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Division:
    """Over how many ranks each kind of parallelism divides layers."""

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
        """Of one group.

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
        """How its layers are divided."""
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
    ) -> None:
        self.seq_len = seq_len
        self.precision = precision
        self.division = Division(tensor=tensor, context=context, expert=expert)
        self.device = device
        every = {name: layer.kind for name, layer in model.chain}
        self.kinds = short_chain(model) if layers is None else {n: every[n] for n in layers}
        """Kind by layer, in order."""
        self.whole = list(self.kinds)[-1] == list(every)[-1]
        """It ends in the model's last layer, and so in a loss."""
        # Mixed precision belongs to data parallelism in the runtime; here the layers themselves
        # are in the type that they compute in.
        dtype = activation_type(precision)
        # Of ZeRO, which experts on ranks of their own ask for, nothing is done: see `_place`.
        mesh = self.division.mesh
        plan = plan_of(
            model, [list(self.kinds)], seq_len=seq_len, mesh=mesh, zero=int(mesh.data_shard > 1)
        )
        self.place = place = _place(plan, device)
        self._adapter = adapter_of(
            model,
            source=model.source or model.name,
            seq_len=seq_len,
            dtype=dtype,
            device=device,
            seed=0,
            weights=None,
            context=place.context,
        )
        stage = whole_stage(plan, self._adapter, place, device)
        self.parts = stage.layers
        """The layers by name, in order."""
        self.module = stage.module.to(dtype)
        self._compiled: dict[tuple[Recompute, int], dict[str, nn.Module]] = {}
        self._positions = place.context.positions(seq_len)
        self._data_rank = place.data_rank
        names = list(self.kinds)
        before = dict(zip(names, [TOKENS, *names], strict=False))
        of_graph = getattr(self._adapter, "reads", {}) if model.edges else {}
        self.reads: dict[str, tuple[str, ...]] = {
            name: tuple(of_graph.get(name, (before[name],))) for name in names
        }
        """What each layer takes: the tokens, or outputs of layers before it."""
        self.vocabulary = (
            model.architecture.vocab_size if model.architecture else self._least_vocabulary()
        )

    def _least_vocabulary(self) -> int:
        """Return how many numbers all tables know that read tokens, and the last layer predicts."""
        readers = [name for name, reads in self.reads.items() if TOKENS in reads]
        tables = [
            part.num_embeddings
            for name in readers
            for part in self.parts[name].modules()
            if isinstance(part, nn.Embedding) and part.num_embeddings > self.seq_len
        ]
        tokens = torch.zeros((1, self.seq_len), dtype=torch.int64)
        predicted = self._adapter.boundary(list(self.kinds)[-1], tokens).shape[-1]
        return min([*tables, predicted, BYTES])

    def done_after(self) -> dict[str, tuple[str, ...]]:
        """Return the outputs that nobody reads behind each layer."""
        last = {read: name for name, reads in self.reads.items() for read in reads}
        result: dict[str, tuple[str, ...]] = dict.fromkeys(self.reads, ())
        for read, name in last.items():
            result[name] += (read,)
        return result

    @property
    def adapter(self) -> Adapter:
        """What made the layers."""
        return self._adapter

    def layers(self, case: Case) -> dict[str, nn.Module]:
        """Return the layers in order, each recomputing itself, and compiled, as a case asks."""
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
                if repeats(self._adapter.model, name):
                    compiler.compile(name, layer)
            self._compiled[key] = layers
        return layers

    def batch(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and targets of one micro-batch.

        Ranks of one tensor group have the same; those of a context group have parts of the same.
        """
        generator = torch.Generator().manual_seed(micro_batch + MOST_SAMPLES * self._data_rank)
        shape = (micro_batch, self.seq_len + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.division.context > 1:
            inputs, targets = inputs[:, self._positions], targets[:, self._positions]
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
    """Return all layers of a plan as one stage; its samples are as long as the plan's."""
    shape = (plan.micro_batch, plan.seq_len // plan.mesh.context)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    described = DescribedModel(plan, adapter, tokens)
    return language_stage(plan, adapter, place, described, stage=0, device=device)


class _OwnForward(nn.Module):
    """A layer whose own forward stays as it is when this one recomputes or is compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return self.layer(*args)


def short_chain(model: ModelGraph) -> dict[str, str]:
    """Return kind by layer name: the first layers of each kind in a chain, all of a graph."""
    if model.edges:
        return {name: layer.kind for name, layer in model.chain}
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
