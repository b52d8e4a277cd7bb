"""A language model as a recorder sees it: a plan's layers in a chain, of which shapes are known.

Nothing of a layer is run: each makes hidden states like those of which its adapter says the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Plan
from meshwright.runtime.core.layer_names import HEAD
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.tracing.tracer import Recorder


def recorder_of(
    plan: Plan, adapter: Adapter, tokens: Tensor, *, documents: bool = False
) -> Recorder:
    """Return the recorder of a plan's layers; `tokens` are a micro-batch's here, without data.

    Each layer is a unit.  It reads what the one before it made, or the tokens, leaf 0 of the batch;
    a head that makes its loss reads the targets, leaf 1; where samples hold several documents,
    blocks read where they begin, leaf 2.
    """
    names = [item.layer for stage in plan.stages for item in stage.layers]
    chunks = plan.loss is not None
    layers = {
        name: _LayerShape(
            adapter.boundary(name, tokens).chunk(plan.mesh.tensor, dim=1)[0],
            results=2 if chunks and name == HEAD else 1,
        )
        for name in names
    }
    batch = tuple(torch.empty_like(tokens) for _ in range(3 if documents else 2))
    return Recorder(_Outline(layers, chunks=chunks), batch, tuple, units=names, ours=True)


class _LayerShape(nn.Module):
    """A layer in name and shape."""

    def __init__(self, like: Tensor, *, results: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty((), device="meta"))
        """The parameter that makes a unit a layer."""
        self._shape, self._dtype, self._results = like.shape, like.dtype, results

    def forward(self, *taken: Tensor) -> Tensor | tuple[Tensor, ...]:
        layers = tuple(
            torch.empty(self._shape, dtype=self._dtype, device="meta") * self.scale
            for _ in range(self._results)
        )
        return layers if len(layers) > 1 else layers[0]


class _Outline(nn.Module):
    """A model that calls its layers one after another."""

    def __init__(self, layers: Mapping[str, nn.Module], *, chunks: bool) -> None:
        super().__init__()
        self._names, self._chunks = tuple(layers), chunks
        self._modules = tree_of(layers)._modules

    def forward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Any:
        output: Any = tokens
        for name in self._names:
            beside = starts if name != HEAD else targets if self._chunks else None
            output = self.get_submodule(name)(
                *(tensor for tensor in (output, beside) if tensor is not None)
            )
        return output


def tree_of(layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has each layer under its own name (`block.0` nests)."""
    root = nn.Module()
    for name, layer in layers.items():
        parent = root
        *path, last = name.split(".")
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(last, layer)
    return root
