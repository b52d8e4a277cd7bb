"""The layers of a language model on one rank: its whole chain, or the part of it that a stage has.

Each layer takes what the one before it made, or the tokens.  Nothing is recorded: an adapter says
which shape crosses a cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Activations, Plan
from meshwright.runtime.core.layer_names import HEAD
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.techniques import activation_offload as activations
from meshwright.runtime.techniques.activation_offload import HostTraffic, Packing
from meshwright.runtime.tracing.stage import Boundary, MicroBatch, ModelStage, handed_on


@dataclass(frozen=True, slots=True)
class LanguageLayer:
    """A layer of a language model, which is one unit."""

    name: str

    @property
    def units(self) -> tuple[str, ...]:
        """The path of the unit, which is the layer's name."""
        return (self.name,)


class LayerStage(ModelStage):
    """A plan's stage of a language model, run layer by layer."""

    def __init__(self, layers: Mapping[str, nn.Module], adapter: Adapter, plan: Plan, at: int):
        """`layers` are those of the plan's stage number `at`."""
        super().__init__()
        self._modules = _tree_of(layers)._modules
        self._chain = tuple(layers.items())
        self._adapter, self._plan, self._at = adapter, plan, at
        self._is_last = at == len(plan.stages) - 1
        self.layers = tuple(map(LanguageLayer, layers))
        self.called_units = tuple(layers)
        self.units = dict(self._lone_units(dict.fromkeys(layers)))

    def forward(self, *received: Tensor, micro: MicroBatch | None = None) -> Any:
        """Run one micro-batch, given or selected: what the head makes, or what `loss` makes of it.

        A head that makes its loss reads the targets, leaf 1 of the batch; where samples hold
        several documents, all others read where they begin, leaf 2.
        """
        micro = micro or self.selected()
        tokens, targets, *starts = micro.batch
        # A pipeline hands its first stage a number.
        (hidden,) = received if self._at else (tokens,)
        for name, layer in self._chain:
            if name == HEAD:
                hidden = layer(hidden) if self._plan.loss is None else layer(hidden, targets)
            else:
                hidden = layer(hidden, *starts)
        if not self._is_last:
            return handed_on(hidden, awaits_gradient=True, passed=False)
        return self.loss(hidden, micro) if self.loss else hidden

    def boundary(self, batch: Any) -> Boundary:
        """Return hidden states of samples like these, as they come in and as they go out."""
        stages = self._plan.stages
        before = stages[self._at - 1].layers[-1].layer if self._at else None
        sent = () if self._is_last else (self._hidden(self._chain[-1][0], batch[0]),)
        if before is None:
            return Boundary((), sent, ())
        return Boundary((self._hidden(before, batch[0]),), sent, (before,))

    def _hidden(self, name: str, tokens: Tensor) -> Tensor:
        like = self._adapter.boundary(name, tokens).chunk(self._plan.mesh.tensor, dim=1)[0]
        return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)

    def packing(
        self, name: str, choice: Activations, traffic: HostTraffic, *, first: bool, last: bool
    ) -> Packing | None:
        """Return what a layer's stored tensors go through; None keeps them."""
        return activations.packing(self.part(name), choice, traffic, first=first, last=last)


def _tree_of(layers: Mapping[str, nn.Module]) -> nn.Module:
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
