"""Mesh: this rank's place among the plan's parallel axes, and the process groups along them."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.planner.documents.plan import Axis, Plan
from meshwright.planner.documents.plan import Mesh as Degrees
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.object_collectives import number_of_ranks

# Groups cost sockets and memory for as long as the process lives, so equal meshes share them.
_meshes: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A rank's place among those that share a sequence; by default it has all of it."""

    rank: int = 0
    degree: int = 1
    group: dist.ProcessGroup | None = None

    def positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank, in its order.

        >>> Context(rank=0, degree=2).positions(8).tolist()
        [0, 1, 6, 7]
        >>> Context(rank=1, degree=2).positions(8).tolist()
        [2, 3, 4, 5]
        """
        if self.degree == 1:
            return torch.arange(seq_len)
        chunks = torch.arange(seq_len).chunk(2 * self.degree)
        return torch.cat((chunks[self.rank], chunks[2 * self.degree - 1 - self.rank]))


WHOLE = Context()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """Ranks that hold the same modules and sum their gradients: what data parallelism runs on."""

    replicating: DeviceMesh
    """Ranks with copies of the same part; one rank if ZeRO divides over all."""
    sharding: DeviceMesh
    """Ranks over which ZeRO divides; one rank where it does not."""
    sharded: bool
    near: DeviceMesh | None = None
    """Ranks over which ZeRO divides, as [group, rank], if ranks of a group have all parameters
    between passes."""

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that replicate, or those that ZeRO divides over behind them."""
        return self.division if self.sharded else self.replicating

    @property
    def division(self) -> DeviceMesh:
        """The ranks that ZeRO divides over, behind those that replicate, if any do."""
        if self.replicating.size() == 1:
            return self.sharding
        return DeviceMesh._concatenate([self.replicating, self.sharding])


Stages = tuple[frozenset[int], ...]
"""Stages of a pipeline of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """All kinds of pipelines of a plan, whose ranks are numbered one kind behind the other."""

    degrees: tuple[Degrees, ...]
    own: int
    """Kind of this rank."""
    meshes: tuple[DeviceMesh, ...] = ()
    """Mesh of each kind, made by all ranks of the job; none for a process without a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of this rank in the mesh of its kind of pipelines.

    `mesh` is None for a process without a group.
    """

    degrees: Degrees
    mesh: DeviceMesh | None
    sharded: bool = False
    """True if ZeRO divides anything."""
    reshard_after_forward: int | None = None
    """The plan's own: ranks that have all parameters together between passes."""
    kinds: Kinds | None = None
    """All kinds of pipelines, where they differ."""

    def along(self, axis: Axis) -> int:
        """Return this rank's coordinate on an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def axis(self, axis: Axis) -> DeviceMesh:
        """Return the one-dimensional mesh along an axis."""
        assert self.mesh is not None
        return self.mesh[axis]

    @property
    def kind(self) -> int:
        """Kind of pipelines that this rank is of."""
        return 0 if self.kinds is None else self.kinds.own

    @property
    def _all_degrees(self) -> tuple[Degrees, ...]:
        return (self.degrees,) if self.kinds is None else self.kinds.degrees

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return sum(degrees.devices for degrees in self._all_degrees)

    @property
    def is_cut(self) -> bool:
        """True if ranks hold different parts of the model: any pipeline has several stages."""
        return any(degrees.pipeline > 1 for degrees in self._all_degrees)

    @property
    def data_rank(self) -> int:
        """Index of the slice of the global batch that this rank feeds."""
        before = sum(map(_slices, self._all_degrees[: self.kind]))
        inside = self.along("data_replicate") * self.degrees.data_shard + self.along("data_shard")
        return before + inside

    @property
    def data_degree(self) -> int:
        """Into how many slices the global batch is cut."""
        return sum(map(_slices, self._all_degrees))

    @property
    def stage(self) -> int:
        """This rank's coordinate on the pipeline axis: its stage, if it has one."""
        return self.along("pipeline")

    @property
    def replicas(self) -> int:
        """Ranks that compute gradients of the same parameters from tokens of their own."""
        return self.data_degree * self.degrees.context

    @property
    def copies(self) -> int:
        """Ranks that hold a layer, or parts of it: those of all slices, positions and parts."""
        return self.replicas * self.degrees.tensor

    @property
    def context(self) -> Context:
        """This rank's place among those that share a sequence."""
        if self.degrees.context == 1:
            return WHOLE
        return Context(
            rank=self.along("context"),
            degree=self.degrees.context,
            group=self.axis("context").get_group(),
        )

    @property
    def data(self) -> DataRanks:
        """Ranks that hold the same parameters; those that share a sequence are among them."""
        both = self._together("data_replicate", "context")
        if not self.sharded:
            return DataRanks(replicating=both, sharding=self.axis("data_shard"), sharded=False)
        return DataRanks(
            replicating=self.axis("data_replicate"),
            sharding=self._together("data_shard", "context"),
            sharded=True,
            near=self._neighbour_mesh,
        )

    @property
    def expert_mesh(self) -> DeviceMesh:
        """All ranks by pipeline, data_replicate, those with the same experts, and experts.

        Experts take neighbouring ranks, of the tensor, context and data_shard axes together.
        """
        return _cached(
            ("experts", self.degrees),
            lambda: _expert_mesh(self.mesh, self.degrees),  # type: ignore[arg-type]
        )

    def relays(self, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the groups of experts' ranks, cut into neighbours of as many ranks each.

        They are those that stand where this one does, one of each part, and those of its own part.
        """
        mesh = _cached(
            ("relays", self.degrees, ranks),
            lambda: _cut(self.expert_mesh, "expert", ranks, ("across", "inside")),
        )
        return mesh["across"].get_group(), mesh["inside"].get_group()

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        d = self.degrees
        return d.data_replicate * d.data_shard * d.context * d.tensor // d.expert

    @property
    def expert_data(self) -> DataRanks:
        """Ranks that hold the same experts."""
        mesh, replicate = self.expert_mesh, self.degrees.data_replicate
        if self.sharded and self.expert_replicas > replicate:
            return DataRanks(
                replicating=mesh["data_replicate"], sharding=mesh["expert_shard"], sharded=True
            )
        whole = mesh["data_replicate", "expert_shard"]._flatten("same experts")
        return DataRanks(replicating=whole, sharding=mesh["alone"], sharded=False)

    @property
    def _neighbour_mesh(self) -> DeviceMesh | None:
        """Return the ranks that ZeRO divides over as [group, rank]; all call it together.

        FSDP would make such groups anew for each module.
        """
        ranks, mesh = self.reshard_after_forward, self.mesh
        if mesh is None or ranks is None or ranks == 1:
            return None
        names = ("apart", "near")
        both = _cached(
            ("near", self.degrees, ranks), lambda: _cut(mesh, "data_shard", ranks, names)
        )
        return both[names]

    def _together(self, data: Axis, other: Axis) -> DeviceMesh:
        """Return one axis made of two."""
        assert self.mesh is not None
        names = [n for n in self.mesh.mesh_dim_names or () if n in (data, other)]
        used = [n for n in names if getattr(self.degrees, n) > 1] or [data]
        if len(used) == 1:
            return self.mesh[used[0]]
        return self.mesh[tuple(used)]._flatten(f"{data} x {other}")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that compute gradients of the same parameters: of slices, and of positions."""
        assert self.mesh is not None
        axes = ("data_replicate", "data_shard", "context")
        used = [n for n in self.mesh.mesh_dim_names or () if n in axes and self._degree(n) > 1]
        if len(used) < 2:
            return self.mesh[used[0] if used else "data_shard"].get_group()
        return self.mesh[tuple(used)]._flatten(" x ".join(used)).get_group()

    @property
    def matrix_groups(self) -> dict[str, dist.ProcessGroup]:
        """Ranks that divide a matrix over ZeRO and this axis together: the tensor axis, experts."""
        assert self.mesh is not None
        groups = {}
        if self.degrees.tensor > 1:
            axes = ("data_shard", "context", "tensor")
            used = [n for n in self.mesh.mesh_dim_names or () if n in axes and self._degree(n) > 1]
            groups["tensor"] = self.mesh[tuple(used)]._flatten(f"matrix of {used}").get_group()
        if self.degrees.expert > 1:
            both = self.expert_mesh["expert_shard", "expert"]
            groups["expert"] = both._flatten("matrix of experts").get_group()
        return groups

    def _degree(self, axis: str) -> int:
        return int(getattr(self.degrees, axis))

    @property
    def _meshes(self) -> tuple[DeviceMesh, ...]:
        """Mesh of each kind of pipelines."""
        if self.kinds is not None:
            return self.kinds.meshes
        assert self.mesh is not None
        return (self.mesh,)

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of every pipeline of all kinds, by their place along it."""
        return [ranks for mesh in self._meshes for ranks in _pipelines(mesh).t().tolist()]

    def holder_groups(self, stages: Iterable[Stages]) -> dict[Stages, dist.ProcessGroup]:
        """Return the ranks of all kinds that hold what is on these stages of each kind.

        A group has the ranks of one part along the tensor axis.  The groups are those that this
        rank is in; all ranks of the job call it together, with the same stages.
        """
        groups: dict[Stages, dist.ProcessGroup] = {}
        for wanted in dict.fromkeys(stages):
            for part in range(self.degrees.tensor):
                ranks = self._holders(wanted, part)
                group = _cached(("holders", ranks), functools.partial(dist.new_group, ranks))
                if dist.get_rank() in ranks:
                    groups[wanted] = group
        return groups

    def _holders(self, stages: Stages, part: int) -> tuple[int, ...]:
        held = []
        for mesh, of_kind in zip(self._meshes, stages, strict=True):
            names = mesh.mesh_dim_names or ()
            ranks = mesh.mesh.movedim([names.index("pipeline"), names.index("tensor")], [0, 1])
            held += [rank for stage in of_kind for rank in ranks[stage, part].flatten().tolist()]
        return tuple(sorted(held))

    def pipeline_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return two groups of this rank's pipeline, for messages that must not meet.

        All engines share them: none may leave a message under way between its steps.
        """
        second = _cached(("second", self._all_degrees), lambda: _pipeline_groups(self.pipelines))
        return self.axis("pipeline").get_group(), second[dist.get_rank()]

    def groups_in_flight(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the same, new ones: for messages that are under way while others are sent.

        Messages of a group come in the order in which they were sent, whoever asks for them.
        """
        first, second = _pipeline_groups(self.pipelines), _pipeline_groups(self.pipelines)
        return first[dist.get_rank()], second[dist.get_rank()]

    def ends(self) -> dist.ProcessGroup | None:
        """Return the group of the first and last stage of this rank's pipeline, if it is in one.

        Pipelines that are alike have it; where they differ, `holder_groups` are of all kinds.
        """
        assert self.mesh is not None
        assert self.kinds is None
        pairs: dict[int, dist.ProcessGroup] = _cached(
            ("ends", self.degrees), lambda: _end_groups(self.mesh)
        )
        return pairs.get(dist.get_rank())


def _cut(mesh: DeviceMesh, axis: str, ranks: int, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh with an axis as two: groups, and in each as many neighbours."""
    assert mesh.mesh_dim_names is not None
    place = mesh.mesh_dim_names.index(axis)  # torch 2.11 takes no name
    return mesh._unflatten(place, (mesh[axis].size() // ranks, ranks), names)


def _slices(degrees: Degrees) -> int:
    """Return into how many slices the data ranks of one kind cut their samples."""
    return degrees.data_replicate * degrees.data_shard


def _pipeline_groups(pipelines: Iterable[list[int]]) -> dict[int, dist.ProcessGroup]:
    """Make another group of the ranks of every pipeline; all ranks of the job call it together."""
    groups: dict[int, dist.ProcessGroup] = {}
    for ranks in pipelines:
        group = dist.new_group(ranks)
        groups |= dict.fromkeys(ranks, group)
    return groups


def _pipelines(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks  [stage, pipeline]."""
    assert mesh.mesh_dim_names is not None
    stages = mesh.mesh.movedim(mesh.mesh_dim_names.index("pipeline"), 0)
    return stages.reshape(stages.shape[0], math.prod(stages.shape[1:]))


def wants_mesh(plan: Plan) -> bool:
    """Tell whether even one rank needs a mesh: FSDP brings parameters from the host."""
    return plan.offload == "parameters"


def place_of(plan: Plan, device: torch.device) -> Place:
    """Return this rank's place in the plan's mesh; every rank of the job calls it together."""
    world = number_of_ranks()
    if world != plan.ranks:
        raise LaunchError(
            f"the plan is for {plan.ranks} ranks, and {world} are running; "
            f"start it with {plan.ranks} processes (torchrun --nproc-per-node "
            f"{plan.ranks} SCRIPT, or meshwright run --plan PLAN SCRIPT), or plan again"
        )
    if not dist.is_initialized():
        if not wants_mesh(plan):
            return Place(degrees=plan.mesh, mesh=None)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if plan.other_pipelines is not None:
        return _unlike_place(plan, device)
    degrees = plan.mesh
    outermost_first = tuple(reversed(degrees.order))
    sizes = tuple(getattr(degrees, axis) for axis in outermost_first)
    mesh = _cached(
        (device.type, outermost_first, sizes),
        lambda: init_device_mesh(device.type, sizes, mesh_dim_names=outermost_first),
    )
    sharded = plan.zero > 0 and degrees.data_shard * degrees.context > 1
    place = Place(
        degrees=degrees,
        mesh=mesh,
        sharded=sharded,
        reshard_after_forward=plan.reshard_after_forward,
    )
    _ = place.data  # by all ranks together, as what experts have
    if degrees.expert > 1:
        _ = place.expert_data  # by all ranks together, also those whose stage has no experts
        if plan.hierarchical_all_to_all is not None:
            place.relays(plan.hierarchical_all_to_all)
    return place


def _unlike_place(plan: Plan, device: torch.device) -> Place:
    """Return this rank's place where pipelines differ: in the mesh of its kind.

    All ranks make the meshes of all kinds, since a group is made by all ranks of the job.
    """
    own, _ = plan.kind_of_rank(dist.get_rank())
    degrees = tuple(kind.mesh for kind in plan.kinds)
    firsts = itertools.accumulate((kind.devices for kind in degrees), initial=0)
    meshes = tuple(
        _cached(
            (device.type, first, kind),
            functools.partial(_mesh_of_kind, device, first, kind),
        )
        for first, kind in zip(firsts, degrees, strict=False)
    )
    kinds = Kinds(degrees=degrees, own=own, meshes=meshes)
    place = Place(degrees=degrees[own], mesh=meshes[own], kinds=kinds)
    place.pipeline_groups()  # by all ranks together, also those whose pipeline has one stage
    return place


def _mesh_of_kind(device: torch.device, first: int, degrees: Degrees) -> DeviceMesh:
    """Make the mesh of the ranks of a kind, of which `first` is the first."""
    names = tuple(reversed(degrees.order))
    ranks = torch.arange(first, first + degrees.devices)
    sizes = [getattr(degrees, axis) for axis in names]
    return DeviceMesh(device.type, ranks.reshape(sizes), mesh_dim_names=names)


def _cached(key: Any, make: Any) -> Any:
    groups = _meshes.setdefault(dist.group.WORLD, {})
    if key not in groups:
        groups[key] = make()
    return groups[key]


def _expert_mesh(mesh: DeviceMesh, degrees: Degrees) -> DeviceMesh:
    """Cut what is inside a replica of a stage anew, in neighbours."""
    names = mesh.mesh_dim_names
    assert names is not None
    outer = ["pipeline", "data_replicate"]
    inner = [name for name in names if name not in outer]
    ranks = mesh.mesh.permute([names.index(name) for name in (*outer, *inner)])
    ranks = ranks.reshape(degrees.pipeline, degrees.data_replicate, -1, 1, degrees.expert)
    return DeviceMesh(
        mesh.device_type,
        ranks.contiguous(),
        mesh_dim_names=(*outer, "expert_shard", "alone", "expert"),
    )


def _end_groups(mesh: DeviceMesh) -> dict[int, dist.ProcessGroup]:
    """Make a two-rank group of the first and last stage of every pipeline.

    Ranks 0 to 7 as 4 stages of 2 pipelines pair up as (0, 6) and (1, 7).
    """
    stages = _pipelines(mesh)
    groups = {}
    for first, last in zip(stages[0].tolist(), stages[-1].tolist(), strict=True):
        group = dist.new_group([first, last])
        groups[first] = groups[last] = group
    return groups
