"""Adapter: a model as a chain of layers, each from one tensor to one tensor.

The engine sees every model alike: it asks an adapter for the layers of its stage one by one, runs
them one after another and hands the last output to the adapter's loss.  Layers carry the names of
ModelGraph.chain, and a parameter's name is its layer's name and its path in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.documents.model import ModelGraph
from runtime.loss import IGNORED

TensorStyle = Literal[
    "gather", "columns", "rows", "vocabulary", "logits", "mixture", "experts", "part"
]
"""How tensor parallelism treats a module of a layer; runtime/tensor.py says what each does."""

EMBEDDING = "embedding"
HEAD = "head"


class Adapter(Protocol):
    """What the engine asks of a model family."""

    model: ModelGraph
    tied_names: frozenset[str]
    """Parameters that are one weight with another layer's, both ends named."""

    def layer(self, name: str) -> nn.Module:
        """Return one layer; parameters on the meta device are filled by the engine."""

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Give a whole parameter (full shape) its initial values in place."""

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Return the style of each module of a layer, by its path in the layer."""

    def published_name(self, name: str) -> str:
        """Return a parameter's name in checkpoints; a tied copy has the name of its original."""

    def pieces(self, name: str) -> int:
        """Return how many matrices a parameter has one above the other in dim 1 (mostly 1).

        Tensor parallelism divides each of them, and in `state` they have a dim of their own.
        """

    def boundary(self, layer: str, tokens: Tensor) -> Tensor:
        """Return a meta tensor of the shape and type that a layer makes of these tokens."""

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the sum of the losses of one micro-batch, and over how many targets it is.

        Targets that are runtime.loss.IGNORED do not count.
        """

    def configuration(self) -> str | None:
        """Return the config.json of the model as a library has it, if one does."""

    def tie(self, layers: Mapping[str, nn.Module]) -> None:
        """Share the weights that are tied, if both ends are among these layers."""


class Head(nn.Module):
    """Final norm and output projection: hidden states in, logits out."""

    def __init__(
        self,
        norm: nn.Module,
        output: nn.Linear,
        cap: float | None = None,
        *,
        divisor: float = 1.0,
    ) -> None:
        """Logits are divided by `divisor`; none leaves (-cap, cap), if there is a cap."""
        super().__init__()
        self.norm = norm
        self.output = output
        self.cap = cap
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [sample, position, vocabulary]."""
        logits = self.output(self.norm(x))
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else _Capped.apply(logits, self.cap)


class _Capped(torch.autograd.Function):
    """cap tanh(x / cap), which keeps its output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        capped = x.div(cap).tanh_().mul_(cap)
        ctx.save_for_backward(capped)
        return capped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (capped,) = ctx.saved_tensors
        return capped.div(ctx.cap).square_().neg_().add_(1).mul_(grad), None


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
