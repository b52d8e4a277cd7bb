"""Attention by name: what a module calls so that positions and documents can be divided.

    mixed = meshwright.attention(query, key, value)   # causal, [sample, head, position, head_dim]

In a plain process it is torch's own causal attention.  Where a plan divides positions, a rank has
some of them: keys and values of the others are gathered here.  Where samples hold several
documents, a query sees no key before its own document's first.

All else in the module must act on each position by itself, and learn from its inputs alone which
position it is: meshwright.runtime.parallel.context_check runs it in parts to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.mesh import WHOLE, Context
from meshwright.runtime.parallel import context_parallel as context
from meshwright.runtime.parallel import softcap_attention as capped
from meshwright.runtime.parallel.context_parallel import for_each_query_head


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """The keys of a micro-batch that its queries see."""

    context: Context = WHOLE
    """Positions that this rank has."""
    starts: Tensor | None = None
    """The first key of each query's document, [sample, position]; None is the sample's first."""
    itself: bool = False
    """Nothing but the query's own position, for a trial."""
    batch: Any = None
    """The micro-batch itself."""


class _Now:
    """The state of the module call in progress; backward may run in another thread."""

    seen = SeenKeys()
    calls: list[int] | None = None
    """Bytes of keys and values of the calls that are noted, while a trial runs."""


@contextlib.contextmanager
def seeing(seen: SeenKeys) -> Iterator[None]:
    """Let attention see so much."""
    before, _Now.seen = _Now.seen, seen
    try:
        yield
    finally:
        _Now.seen = before


def seen_now() -> SeenKeys:
    """Return what is seen by the call under way."""
    return _Now.seen


@contextlib.contextmanager
def note_keys_bytes() -> Iterator[list[int]]:
    """Note the bytes of keys and values of every call."""
    before, _Now.calls = _Now.calls, []
    try:
        yield _Now.calls
    finally:
        _Now.calls = before


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return causal attention, [sample, head, position, head_dim of values].

    There may be fewer heads of keys and values than of queries.  `scale` multiplies scores
    (1 / sqrt(head_dim) without it), `window` counts the keys that a query sees, its own among them,
    a `cap` bounds scores by cap tanh(s / cap), and `sinks` [head] take part in the softmax without
    a value.  Where samples hold several documents, `starts` [sample, position] says at which
    position of the sample the document of each query begins, and it sees no key before that.

    >>> import torch
    >>> heads = torch.ones(2, 4, 3, 8)  # two samples of three positions
    >>> attention(heads, heads[:, :2], heads[:, :2]).shape
    torch.Size([2, 4, 3, 8])
    """
    if _Now.calls is not None:
        _Now.calls.append(bytes_of(key, value))
    width, seen = value.shape[-1], _Now.seen
    starts = seen.starts if starts is None else starts
    if seen.itself:
        return for_each_query_head(query, value)[0]
    if not (window or cap or sinks is not None or starts is not None):
        if seen.context.degree == 1:
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        mixed = context.attention(
            query, key, _as_wide(value, query), seen.context, scale=scale or _scale(query)
        )
    else:
        mixed = capped.attention(
            query,
            key,
            _as_wide(value, query),
            seen.context,
            scale=scale or _scale(query),
            cap=cap,
            window=window,
            sinks=sinks,
            starts=starts,
        )
    return mixed[..., :width]


def bytes_of(key: Tensor, value: Tensor) -> int:
    """Return the bytes of keys and values, which ranks with other positions need whole."""
    return key.numel() * key.element_size() + value.numel() * value.element_size()


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5)


def _as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Return values with zeros behind, as wide as queries are: kernels take one width."""
    lacking = query.shape[-1] - value.shape[-1]
    return functional.pad(value, (0, lacking)) if lacking else value


def library_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return the same as layers of transformers ask for it, [sample, position, head, head_dim].

    The library makes no masks for attention that it does not know.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or not causal or attention_mask is not None or settings.get("position_bias"):
        raise LaunchError(
            f"{type(module).__name__} has attention with dropout, with a mask or bias of its own, "
            "or that is not causal, which is neither divided nor restricted to documents; "
            "plan without context and with one document a sample"
        )
    mixed = attention(
        query,
        key,
        value,
        scale=scaling,
        window=sliding_window or 0,
        cap=softcap or 0.0,
        sinks=s_aux,
    )
    return mixed.transpose(1, 2).contiguous(), None


def positions_in(batch: Any) -> int:
    """Return how many positions the samples of a batch have, along dim 1 of what is cut.

    Raises LaunchError where its leaves differ in that.
    """
    lengths = {x.shape[1] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim > 1}
    if len(lengths) != 1:
        raise LaunchError(
            f"mesh.context: divides dim 1 of the batch's tensors, which have {sorted(lengths)} "
            "there; give all [sample, position, ...] of one length"
        )
    return lengths.pop()


def divide_positions(batch: Any, place: Context) -> Any:
    """Return this rank's positions of a batch."""
    if place.degree == 1:
        return batch
    length = positions_in(batch)
    if length % (2 * place.degree):
        raise LaunchError(
            f"batch: has {length} positions, and {place.degree} ranks need 2 x {place.degree} "
            "chunks; pad samples to a multiple"
        )
    held = place.positions(length)
    return positions_of(batch, length, lambda x: x[:, held.to(x.device)])


def positions_of(batch: Any, length: int, take: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch, or outputs, with what `take` makes of the tensors that have positions."""
    return tree_map(
        lambda x: take(x) if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == length else x,
        batch,
    )
