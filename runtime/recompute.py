"""Recompute: which activations of a layer are thrown away in forward and made again in backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.profile import Recompute

PREFIX = "_checkpoint_wrapped_module."
"""Stands in the parameter names of a wrapped layer; names that leave this package have it not."""

_EXPENSIVE = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)
"""Operators whose results `selective` keeps: matrix products, attention, costly communication."""


def kept_operators() -> frozenset[Any]:
    """Return the operators of this torch whose results selective recompute keeps."""
    found = set()
    for name in _EXPENSIVE:
        namespace, operator = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.add(packet.default)
    return frozenset(found)


def wrapped(layer: nn.Module, recompute: Recompute) -> nn.Module:
    """Return the layer, or the layer that recomputes itself."""
    if recompute == "none":
        return layer
    if recompute == "full":
        return checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False
        )
    return checkpoint_wrapper(
        layer,
        checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _policy),
    )


_KEPT = kept_operators()


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
