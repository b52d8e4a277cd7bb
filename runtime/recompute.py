"""Recompute: which activations of a layer are thrown away in forward and made again in backward."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.profile import Recompute

PREFIX = "_checkpoint_wrapped_module."
"""Stands in the parameter names of a wrapped layer; names that leave this package have it not."""

KEPT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._grouped_mm",
    "transformers.grouped_mm_fallback",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)
"""Operators whose results `selective` keeps: matrix products, attention, costly communication."""


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
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )


@functools.cache
def _kept(operator: Any) -> bool:
    return str(operator).removesuffix(".default") in KEPT_OPERATORS


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE
