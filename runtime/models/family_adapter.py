"""Adapter: a model as a chain of layers, each from one tensor to one tensor.

A LanguageModel asks an adapter for the layers of its stages one by one, and which names, first
values and styles their parameters have.  Layers carry the names of ModelGraph.chain, and a
parameter's name is its layer's name and its path in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD, TensorStyle
from meshwright.runtime.core.loss import IGNORED


class Adapter:
    """What is known of a model family, beside the planner's figures."""

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
