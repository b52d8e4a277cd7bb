"""The most samples of a micro-batch that may fit a device, whatever is recomputed.

While a layer's backward runs, what its widest product reads lies on the device beside the gradient
of what it returns.  Ranks of a tensor or context group divide both at most; the exact bytes of a
layout are those of its prediction (planner.costs.memory).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.requests.request import Request

ELEMENT_BYTES = 2
TRACED_BYTES = 4
"""Bytes of an element of what was traced."""


def largest_micro_batch(request: Request, sharing_ranks: int) -> int:
    """Return the most samples of which so many ranks that share each of them may hold a layer."""
    memory = max(group.accelerator.memory_bytes for group in request.cluster.groups)
    each = _sample_bytes(request.model, request.job.seq_len) / sharing_ranks
    return max(1, int(memory / each)) if each else request.job.global_batch


def _sample_bytes(model: ModelGraph, seq_len: int) -> float:
    """Return the least bytes that the backward of some layer has of a sample."""
    a = model.architecture
    if a is None:
        outputs = (layer.trace.output_bytes for layer in model.layers if layer.trace is not None)
        return max(outputs, default=0) / TRACED_BYTES
    width = a.hidden_size + (0 if a.experts else a.ffn_size)
    return float(seq_len * width * ELEMENT_BYTES)
