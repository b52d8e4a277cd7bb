"""Source: where a plan's model comes from, and which adapter runs it."""

from __future__ import annotations

from pathlib import Path

import torch

from planner.documents.model import ModelGraph, is_factory
from planner.errors import LaunchError
from runtime import reference
from runtime.adapter import Adapter
from runtime.context import WHOLE, Context
from runtime.factory import FactoryModel
from runtime.huggingface import HuggingFace
from runtime.library_families import has_config


def adapter_of(
    model: ModelGraph,
    *,
    source: str,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    weights: Path | None,
    context: Context = WHOLE,
    documents: bool = False,
) -> Adapter:
    """Return the adapter for a model that `supported` has nothing against.

    `dtype` is the type of activations.  `weights` is a folder whose config.json, if it has one,
    gives the settings that ModelGraph's figures leave open.  `context` says which positions of a
    sequence the layers are given; with `documents` samples hold several.
    """
    if is_factory(source):
        if weights is not None:
            raise LaunchError(f"weights: {source} gives its parameters their values by itself")
        return FactoryModel(model, source, seed=seed, dtype=dtype)
    assert model.architecture is not None
    if model.architecture.family == "reference":
        return reference.Reference(
            model, seq_len=seq_len, dtype=dtype, device=device, context=context
        )
    folder = next((f for f in (weights, Path(source)) if f and has_config(f)), None)
    return HuggingFace(
        model,
        folder=folder,
        seq_len=seq_len,
        dtype=dtype,
        device=device,
        context=context,
        documents=documents,
    )
