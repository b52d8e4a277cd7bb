"""Recompute: which activations of a layer are thrown away in forward and made again in backward."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.planner.documents.profile import Recompute
from meshwright.runtime.core.torch_internals import KeptByCall, VersionWrapper
from meshwright.runtime.techniques.activation_offload import Packing

KEPT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._grouped_mm",
    "aten._scaled_mm",
    "transformers.grouped_mm_fallback",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "meshwright.context_attention",
    "meshwright.document_attention",
    "meshwright.capped_attention",
    "meshwright.sink_attention",
    "meshwright.grouped_product",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)
"""Operators whose results `selective` keeps: matrix products, attention, costly communication."""


def wrapped(layer: nn.Module, recompute: Recompute, packing: Packing | None = None) -> nn.Module:
    """Return the layer, whose forward recomputes itself in backward if it is to."""
    if recompute != "none":
        layer.forward = checkpoint_call(layer.forward, recompute, packing)
    return layer


def checkpoint_call(
    call: Callable[..., Any],
    recompute: Recompute,
    packing: Packing | None = None,
    *,
    numbers: bool = False,
) -> Callable[..., Any]:
    """Return a call that keeps what it takes, and makes again in backward what it did not keep.

    What `selective` keeps never comes by autograd's hooks, so it is handed to `packing` here.  With
    `numbers` the state of random numbers is kept too: the call may draw under no seed of its own.
    """
    match recompute:
        case "none":
            return call
        case "full":
            contexts: dict[str, Any] = {}
        case "selective":
            contexts = {"context_fn": functools.partial(selective_contexts, packing)}
        case _:
            assert_never(recompute)
    # The compiler sees through a partial, and not through what a closure holds.
    again: Callable[..., Any] = functools.partial(
        checkpoint, use_reentrant=False, preserve_rng_state=numbers, **contexts
    )

    def made_again(*args: Any, **kwargs: Any) -> Any:
        return again(call, *args, **kwargs)

    return made_again


def selective_contexts(packing: Packing | None = None) -> tuple[Any, Any]:
    """Return what surrounds a forward that keeps costly results, and its recomputation."""
    keeping, reading = create_selective_checkpoint_contexts(_policy)
    if packing is not None:
        keeping.storage = reading.storage = defaultdict(functools.partial(_Packed, packing))
    return keeping, reading


class _Packed(KeptByCall):
    """The results of one operator, by call, as torch keeps them but packed."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __setitem__(self, call: int, kept: Any) -> None:
        super().__setitem__(call, tree_map_only(VersionWrapper, self._pack, kept))

    def get(self, call: int, default: Any = None) -> Any:
        return tree_map_only(_Waiting, self._unpack, super().get(call, default))

    def _pack(self, kept: VersionWrapper) -> Any:
        if not isinstance(kept.val, Tensor):
            return kept
        # A collective's result may still be on its way; what was not sent needs no wait.
        return _Waiting(self._packing.pack(torch.ops._c10d_functional.wait_tensor(kept.val)))

    def _unpack(self, waiting: _Waiting) -> VersionWrapper:
        return VersionWrapper(self._packing.unpack(waiting.packed))


@dataclass(frozen=True, slots=True)
class _Waiting:
    packed: Any


@functools.cache
def _is_kept(operator: Any) -> bool:
    return str(operator).removesuffix(".default") in KEPT_OPERATORS


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE
