"""nn.MultiheadAttention with one rank's heads, equal to torch's own to rounding, draws included."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.planner.errors import RecordError
from meshwright.runtime.parallel.tensor_collectives import Across, AxisEntry, part_of_dropout
from meshwright.runtime.parallel.tensor_parallel import on_local_parts


def run_heads(unit: nn.Module, path: str, across: Across) -> None:
    """Let an nn.MultiheadAttention with this rank's parts run over the tensor axis."""
    module = unit.get_submodule(path)
    assert isinstance(module, nn.MultiheadAttention)
    parent = unit.get_submodule(path.rpartition(".")[0]) if path else None
    if isinstance(parent, nn.TransformerEncoderLayer):
        # In eval mode torch hands whole weights to one kernel of its own, but for an unknown
        # activation.
        parent.activation_relu_or_gelu = 0
    project = on_local_parts(module, functools.partial(_heads, module, across))
    module.forward = on_local_parts(module.out_proj, project)  # type: ignore[method-assign]


def _heads(
    module: nn.MultiheadAttention,
    across: Across,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what nn.MultiheadAttention does, with some of its heads; weights are means over all."""
    if query.ndim != 3 or (need_weights and not average_attn_weights):
        raise RecordError(
            "nn.MultiheadAttention without a batch, or with weights of each head; "
            "add a batch dimension, and set need_weights=False"
        )
    entered = AxisEntry(across)
    given = (
        x if module.batch_first else x.transpose(0, 1) for x in map(entered, (query, key, value))
    )
    weights, bias = module.in_proj_weight.chunk(3), module.in_proj_bias
    biases = bias.chunk(3) if bias is not None else (None,) * 3
    q, k, v = (
        functional.linear(x, w, b).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for x, w, b in zip(given, weights, biases, strict=True)
    )
    mask = _mask(attn_mask, key_padding_mask, q, module.num_heads, across)
    scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
    shares = torch.softmax(scores if mask is None else scores + mask, -1)
    if module.training and module.dropout:
        shares = shares * part_of_dropout(shares, module.dropout, 1, across)
    # In memory [query, sample, feature], as torch has it: draws follow memory.
    mixed = (shares @ v).permute(2, 0, 1, 3).flatten(2)
    made = across.sum(functional.linear(mixed, module.out_proj.weight))
    last = module.out_proj._parameters["bias"]
    if last is not None:
        made = made + (last.to_local() if isinstance(last, DTensor) else last)
    weights_of_all = None
    if need_weights:
        weights_of_all = across.sum(shares.sum(1) / module.num_heads)
    return (made.transpose(0, 1) if module.batch_first else made), weights_of_all


def _mask(
    given: Tensor | None, padding: Tensor | None, q: Tensor, heads: int, across: Across
) -> Tensor | None:
    """Return what is added to scores [sample, own head, query, key]."""
    found: Tensor | None = None
    if given is not None:
        if given.ndim == 3:
            own = slice(across.rank * q.shape[1], (across.rank + 1) * q.shape[1])
            given = given.unflatten(0, (-1, heads))[:, own]
        found = _added(given, q)
    if padding is not None:
        columns = _added(padding, q)[:, None, None, :]
        found = columns if found is None else found + columns
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
