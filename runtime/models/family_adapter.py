"""Adapter: a model as a chain of layers, each from one tensor to one tensor.

A LanguageModel asks an adapter for the layers of its stages one by one, and which names, first
values and styles their parameters have.  Layers carry the names of ModelGraph.chain, and a
parameter's name is its layer's name and its path in the layer.

First values of parameters are the same whatever the plan, or read from published weights.  Each
parameter has a random generator of its own, seeded by the run's seed and the parameter's name.  A
rank makes one whole tensor at a time and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD, Region, TensorStyle
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.loss import IGNORED
from meshwright.runtime.core.seeds import seed_of
from meshwright.runtime.models.safetensors_weights import Weights
from meshwright.runtime.parallel.tensor_regions import part_of
from meshwright.runtime.techniques import lora


class Adapter:
    """The facts about a model family that the planner's figures do not have."""

    def __init__(self, model: ModelGraph, dtype: torch.dtype) -> None:
        """`dtype` is the type of activations."""
        assert model.architecture is not None
        self.model, self.architecture = model, model.architecture
        self._dtype = dtype
        tied = self.architecture.tied_embeddings
        self.tied_names = frozenset(
            ("embedding.tokens.weight", "head.output.weight") if tied else ()
        )
        """Parameters that are one weight with another layer's, both ends named."""

    def layer(self, name: str) -> nn.Module:
        """Return one layer, with its parameters on the meta device."""
        raise NotImplementedError

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Give a whole parameter (full shape) its initial values in place."""
        raise NotImplementedError

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Return the style of each module of a layer, by its path in the layer."""
        raise NotImplementedError

    def published_name(self, name: str) -> str:
        """Return a parameter's name in checkpoints; a tied copy has the name of its original."""
        raise NotImplementedError

    def pieces(self, name: str) -> int:
        """Return how many matrices a parameter has one above the other in dim 1 (mostly 1).

        Tensor parallelism divides each of them, and in `state` they have a dim of their own.
        """
        raise NotImplementedError

    def boundary(self, layer: str, tokens: Tensor) -> Tensor:
        """Return a meta tensor like the hidden states that a layer makes of these tokens."""
        shape = (*tokens.shape, self.architecture.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def configuration(self) -> str | None:
        """Return the config.json of the model as a library has it, if one does."""
        return None

    def tie(self, layers: Mapping[str, nn.Module]) -> None:
        """Let the output projection be the token embedding, where both are here."""
        if self.tied_names and EMBEDDING in layers and HEAD in layers:
            output, tokens = layers[HEAD].output, layers[EMBEDDING].tokens
            cast(nn.Linear, output).weight = cast(nn.Embedding, tokens).weight


def next_token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy, in fp32, of targets [sample, position], and their count."""
    count = (targets != IGNORED).sum()  # before memory is at its fullest
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, count


def parameter_names(layer_name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (full name, owning module, attribute) of every parameter of a layer."""
    for path, module in layer.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield ".".join(p for p in (layer_name, path, attribute) if p), module, attribute


@torch.no_grad()
def materialize(
    layer_name: str,
    layer: nn.Module,
    adapter: Adapter,
    *,
    seed: int,
    device: torch.device,
    weights: Weights | None,
    done: dict[int, nn.Parameter],
    keeps: Mapping[int, Region] = MappingProxyType({}),
) -> None:
    """Put a layer's parameters on the device with their first values.

    `done` carries what was made in other layers of the stage, so that tied weights stay tied.
    `keeps` says of parameters, by id, what of this rank's part is left to it once ZeRO divides
    them: only that is read of published weights, and the rest has no values.
    """
    for name, module, attribute in parameter_names(layer_name, layer):
        parameter = module._parameters[attribute]
        assert parameter is not None
        if id(parameter) not in done:
            values = _made(
                name,
                parameter,
                adapter,
                seed=seed,
                device=device,
                weights=weights,
                keep=keeps.get(id(parameter)),
            )
            done[id(parameter)] = done[id(values)] = values
        module._parameters[attribute] = done[id(parameter)]


def first_buffer(published: str, buffer: Tensor, weights: Weights | None) -> Tensor:
    """Return the values of a library's buffer that has none yet: from files, or zeros."""
    if weights is None:
        return torch.zeros(buffer.shape, dtype=buffer.dtype)
    return weights.read(published, buffer.shape, None).to(buffer.dtype)


def _made(
    name: str,
    parameter: nn.Parameter,
    adapter: Adapter,
    *,
    seed: int,
    device: torch.device,
    weights: Weights | None,
    keep: Region | None,
) -> nn.Parameter:
    published = adapter.published_name(name)
    shard = _shard(parameter)
    adapters = lora.is_adapters(name)
    if weights is not None and not adapters:
        pieces = adapter.pieces(name)
        local = weights.read(published, parameter.shape, shard, pieces=pieces, keep=keep).to(device)
        if keep is not None:
            local = _in_place(local, parameter, keep)
    else:
        local = torch.empty(parameter.shape, device=device)
        generator = torch.Generator(device).manual_seed(seed_of(seed, published))
        (lora if adapters else adapter).fill(name, local, generator)
        if shard is not None:
            dim, index, parts = shard
            count = adapter.pieces(name) if dim == 1 else 1
            part = part_of(local, dim, [local.shape[dim] // count] * count, index, parts)
            # Without a format, the only one of 8 experts would keep the stride between them.
            local = part.clone(memory_format=torch.contiguous_format)
    local = local.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False
        )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _in_place(kept: Tensor, parameter: Tensor, keep: Region) -> Tensor:
    """Return a tensor of this rank's part in which only what stays has values.

    FSDP wants the whole to cut its shard from it; pages that nobody writes take no memory of a CPU.
    """
    local = to_local(parameter)
    dim, begin, end = keep
    result = torch.empty(local.shape, device=kept.device, dtype=parameter.dtype)
    result.narrow(dim, begin, end - begin).copy_(kept)
    return result


def _shard(parameter: Tensor) -> tuple[int, int, int] | None:
    """Return (dim, index, parts) of a parameter divided over the tensor axis."""
    if not isinstance(parameter, DTensor):
        return None
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return None
    return placement.dim, parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
