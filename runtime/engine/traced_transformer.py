"""A causal language model of transformers without rules of ours: its own class, recorded.

    MODEL is config.json:recorded, or a config.json whose `model_type` the planner has no figures of

What is known of it is what its forward does with tokens, so that it trains as a script's module
does: under data parallelism, ZeRO and pipelines.  First values are the library's own, under the
plan's seed, or those of a folder of safetensors files.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.planner.documents.model import ModelGraph, recorded_file
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.units import name_of
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.side_effects import deepcopy_module
from meshwright.runtime.engine.losses.named_loss import token_loss
from meshwright.runtime.engine.setup import built
from meshwright.runtime.engine.token_module import TokenModel, graph_on_tokens, recording_of
from meshwright.runtime.models.library_model import build_library_model, library_config
from meshwright.runtime.tracing.tracer import can_be_tried


def graph_of_library(source: str, *, seq_len: int) -> ModelGraph:
    """Return the ModelGraph of a library's model, recorded without data on samples of `seq_len`.

    `source` is `PATH:recorded`.  Raises DocumentError where the library or the recording refuses.
    """
    with recording_of(source):
        with torch.device("meta"):
            module = build_library_model(_configuration(source))
        name = name_of(recorded_file(source))
        graph = graph_on_tokens(
            module,
            seq_len,
            inputs=_inputs,
            loss=_loss,
            name=name,
            named=_takes_our_attention(_configuration(source)),
        )
    return graph.model_copy(update={"source": source})


def _takes_our_attention(config: Any) -> bool:
    """Tell whether the library's class takes another attention by its name, and positions.

    It writes the name into the configuration.
    """
    try:
        with torch.device("meta"):
            return _takes_positions(build_library_model(config, named=True))
    except (KeyError, ValueError):
        return False


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


class LibraryModel(TokenModel):
    """A model on tokens that only the library knows, as an Engine trains it."""

    def __init__(
        self,
        plan: Plan,
        *,
        device: torch.device,
        weights: Path | None = None,
        documents: bool = False,
        place: Place | None = None,
    ) -> None:
        """`weights` is a local folder of safetensors files; None draws first values."""
        self._config = _configuration(plan.model.source)
        named = documents or plan.mesh.context > 1
        try:
            module = built(lambda: build_library_model(self._config, weights, named=named), plan)
        except (KeyError, ValueError) as error:
            if not named:
                raise
            raise LaunchError(
                f"{self._config.model_type}: its own class takes no other attention "
                f"({type(error).__name__}: {error}), so it is neither divided over positions nor "
                "restricted to documents; use context 1, and train on text"
            ) from error
        super().__init__(
            module,
            plan,
            inputs=_inputs,
            loss=_loss,
            device=device,
            documents=documents,
            numbered=_takes_positions(module),
            place=place,
        )
        if named:
            _refuse_other_attention(self.module, self._config, self.example)
        _refuse_sight_of_targets(self.module, self._config, self.example[0][:1])

    def configuration(self) -> str | None:
        """Return the config.json of the model as the library has it."""
        text: str = self._config.to_json_string(use_diff=False)
        return text


def sight_of_targets(source: str) -> str | None:
    """Return why launch refuses a recorded model that may see what it is to predict, if it does.

    Encoders whose class is causal where its configuration says so are tried with one layer.
    """
    config = _configuration(source)
    if getattr(config, "is_decoder", True):
        return None
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = 1
    try:
        _refuse_sight_of_targets(
            build_library_model(config), config, torch.zeros(1, 4, dtype=torch.int64)
        )
    except LaunchError as error:
        return str(error)
    return None


def _configuration(source: str) -> Any:
    return library_config(Path(recorded_file(source)))


@torch.no_grad()
def _refuse_sight_of_targets(module: nn.Module, config: Any, tokens: Tensor) -> None:
    """Refuse a model whose results change with later tokens: it would see what it is to predict.

    A module that is too large for a trial is not tried.
    """
    if not can_be_tried(module):
        return
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % config.get_text_config().vocab_size
    tried = deepcopy_module(module).eval()
    first, second = (
        tried(**_inputs((tokens_variant,))).logits[:, :-1] for tokens_variant in (tokens, other)
    )
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        causal = "set is_decoder: true in its config.json, or " * hasattr(config, "is_decoder")
        raise LaunchError(
            f"{config.model_type}: its results change with the tokens after them, which it is to "
            f"predict; {causal}train it on masked tokens from a script with meshwright.Engine "
            "(docs/how-to/train-encoders.md)"
        )


@torch.no_grad()
def _refuse_other_attention(module: nn.Module, config: Any, batch: tuple[Tensor, ...]) -> None:
    """Refuse a model whose own attention does something else than ours in its place.

    A module that is too large for a trial is not tried.
    """
    if not can_be_tried(module):
        return
    tried: Any = deepcopy_module(module).eval()
    given = _inputs(tuple(leaf[:1] for leaf in batch))
    ours = tried(**given).logits
    tried.set_attn_implementation("eager")
    if not torch.allclose(ours, tried(**given).logits, rtol=1e-4, atol=1e-5):
        raise LaunchError(
            f"{config.model_type}: its attention is another than meshwright.attention, which alone "
            "is divided and restricted to documents; use context 1, and train on text"
        )


def _inputs(batch: tuple[Tensor, ...]) -> dict[str, Any]:
    given = {"input_ids": batch[0], "use_cache": False}
    return given | ({"position_ids": batch[2]} if len(batch) > 2 else {})


_loss = token_loss(lambda batch: batch[1])
