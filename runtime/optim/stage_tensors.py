"""StageTensors: gradients or weights of all stages by name, of which a rank has those of its own.

    for name, grad in gradients.items():     # on all ranks, in the module's order
        total += grad.square().sum()

What another stage has is brought when it is looked up, so that a rank has one such tensor at a time
and a sum over all of them is that of the whole model.  A change of it is made by the stage that has
it, which runs the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.runtime.core.local_parts import divided, to_local
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.core.torch_internals import StridedShard


class StageTensors(Mapping[str, Tensor]):
    """Tensors of all stages of a pipeline by name; its ranks look up the same ones in one order."""

    def __init__(
        self,
        here: Mapping[str, Tensor],
        place: Place,
        *,
        order: Sequence[str],
        device: torch.device,
    ) -> None:
        """`here` are those of this rank's stages, and `order` has the names of all.

        All ranks make it together.
        """
        self._device, self._group = device, place.axis("pipeline").get_group()
        self._meshes = {mesh.mesh_dim_names or (): mesh for mesh in _meshes_of(here)}
        described = {name: _description(tensor) for name, tensor in here.items()}
        every: list[Any] = all_gather_json(described, group=self._group)
        assert place.mesh is not None
        for names in {tuple(about["mesh"]) for there in every for about in there.values()} - {()}:
            if names not in self._meshes and set(names) <= set(place.mesh.mesh_dim_names or ()):
                self._meshes[names] = place.mesh[names]
        self._widest = max(self._meshes.values(), key=lambda mesh: mesh.ndim, default=None)
        self._here = on_one_mesh(here, self._widest)
        self._source: dict[str, tuple[int, dict[str, Any]]] = {}
        for stage, there in enumerate(every):
            for name, description in there.items():
                self._source.setdefault(name, (stage, description))
        self._names = [name for name in order if name in self._source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; all ranks of the pipeline ask for it together."""
        stage, description = self._source[name]
        with torch.no_grad():
            if self._group.rank() == stage:
                local = to_local(self._here[name]).detach().to(self._device).contiguous()
            else:
                dtype = getattr(torch, description["dtype"])
                local = torch.empty(description["local_shape"], dtype=dtype, device=self._device)
            dist.broadcast(local, group=self._group, group_src=stage)
        return self._here[name] if name in self._here else self._like(local, description)

    def _like(self, local: Tensor, description: Mapping[str, Any]) -> Tensor:
        """Return a part of another stage's tensor as this rank would have it."""
        if self._widest is None:
            return local
        names = tuple(description["mesh"])
        if not names:
            return _on_mesh(local, self._widest)
        shaped = torch.empty(description["shape"], device="meta")
        placements = [_placement(*words) for words in description["placements"]]
        tensor = divided(local, self._meshes[names], placements, shaped=shaped)
        return _on_mesh(tensor, self._widest)


def on_one_mesh(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Return tensors of a rank on a mesh, or that which divides them most, in the same memory.

    torch computes nothing of tensors on different meshes, nor of divided and plain ones together.
    """
    if mesh is None:
        mesh = max(_meshes_of(tensors), key=lambda mesh: mesh.ndim, default=None)
    return {
        name: tensor if mesh is None else _on_mesh(tensor, mesh) for name, tensor in tensors.items()
    }


def _meshes_of(tensors: Mapping[str, Tensor]) -> Iterator[DeviceMesh]:
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            yield tensor.device_mesh


def _on_mesh(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    placements: dict[str, Placement] = {}
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == mesh:
            return tensor
        names = tensor.device_mesh.mesh_dim_names or ()
        placements = dict(zip(names, tensor.placements, strict=True))
    dims = mesh.mesh_dim_names or ()
    if not placements.keys() <= set(dims):
        return tensor
    wider = [placements.get(name, Replicate()) for name in dims]
    return divided(to_local(tensor).detach(), mesh, wider, shaped=tensor)


def _description(tensor: Tensor) -> dict[str, Any]:
    """Return what a rank must know of a tensor to have one like it."""
    names: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    if isinstance(tensor, DTensor):
        names, placements = tensor.device_mesh.mesh_dim_names or (), tensor.placements
    local = to_local(tensor)
    return {
        "shape": list(tensor.shape),
        "local_shape": list(local.shape),
        "dtype": str(local.dtype).removeprefix("torch."),
        "mesh": list(names),
        "placements": [_words_of(placement) for placement in placements],
    }


def _words_of(placement: Placement) -> list[int]:
    """Return the dim that a placement divides, and into how many pieces before, if it does."""
    if isinstance(placement, StridedShard):
        return [placement.dim, int(placement.split_factor)]
    return [placement.dim] if isinstance(placement, Shard) else []


def _placement(*words: int) -> Placement:
    match words:
        case (dim, pieces):
            return StridedShard(dim, split_factor=pieces)
        case (dim,):
            return Shard(dim)
        case _:
            return Replicate()
