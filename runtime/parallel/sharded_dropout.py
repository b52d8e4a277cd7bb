"""Random numbers where ranks have some of a sample's positions: a part of what one process draws.

Ranks that share a sample draw under one seed.  Of numbers that have positions each rank makes those
of all and takes its own, so that masks depend on no plan; numbers without positions (one for each
sample) are alike on all of them as they are.  Which dim of a draw has positions is learnt from two
forwards, on all positions and on some (`dims_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.runtime.parallel.tensor_collectives import empty_of_size

DROPOUTS = {functional.dropout, torch.dropout}
ALIKE = {torch.rand_like, torch.randn_like}
IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_}
Draw = tuple[str, int]
"""The node that draws, and how many draws it made before."""


class NotedDraws(TorchFunctionMode):
    """Notes the shapes of what a node draws."""

    def __init__(self, node: str, sizes: dict[Draw, Size]) -> None:
        super().__init__()
        self._node, self._number, self._found = node, 0, sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        like = _drawn_like(func, args, kwargs or {})
        if like is not None:
            self._found[self._node, self._number] = like.shape
            self._number += 1
        return func(*args, **(kwargs or {}))


class DividedDraws(TorchFunctionMode):
    """Lets a node draw the numbers of some positions out of those of all.

    `dims` are those of `dims_of`; `held` are the positions, of `length` in all.
    """

    def __init__(self, node: str, dims: Mapping[Draw, int], held: Tensor, length: int) -> None:
        super().__init__()
        self._node, self._number, self._dims = node, 0, dims
        self._held, self._length = held, length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        like = _drawn_like(func, args, kwargs)
        dim = None
        if like is not None:
            dim = self._dims.get((self._node, self._number))
            self._number += 1
        if like is None or dim is None:
            return func(*args, **kwargs)
        whole = empty_of_size(like, dim, like.shape[dim] // len(self._held) * self._length)
        if func in DROPOUTS:
            mask = functional.dropout(
                whole.fill_(1), _drop_probability(args, kwargs), training=True
            )
            return like * self._part(mask, dim)
        drawn = self._part(func(whole, *args[1:], **kwargs), dim)
        return drawn if func in ALIKE else like.copy_(drawn)

    def _part(self, whole: Tensor, dim: int) -> Tensor:
        """Return the positions held here of a dim that has all, those of each sample together."""
        each = whole.unflatten(dim, (-1, self._length))
        return each.index_select(dim + 1, self._held.to(whole.device)).flatten(dim, dim + 1)


def dims_of(
    whole: Mapping[Draw, Size], part: Mapping[Draw, Size], *, length: int, held: int
) -> dict[Draw, int] | None:
    """Return which dim of each draw has positions, by shapes of `length` and of `held` positions.

    Draws without positions have none.  None where shapes do not say it.

    >>> dims_of(
    ...     {("net", 0): Size((2, 8, 3)), ("net", 1): Size((2, 1))},
    ...     {("net", 0): Size((2, 4, 3)), ("net", 1): Size((2, 1))},
    ...     length=8,
    ...     held=4,
    ... )
    {('net', 0): 1}
    """
    if whole.keys() != part.keys():
        return None
    dims: dict[Draw, int] = {}
    for draw, shape in whole.items():
        here = part[draw]
        if len(shape) != len(here):
            return None
        differing = [dim for dim, size in enumerate(shape) if here[dim] != size]
        if not differing:
            continue
        if len(differing) > 1 or shape[differing[0]] * held != here[differing[0]] * length:
            return None
        dims[draw] = differing[0]
    return dims


def _drawn_like(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a tensor of the shape of what a call draws; None where it draws nothing we know."""
    if func in DROPOUTS:
        given: Tensor = args[0] if args else kwargs["input"]
        trains = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return given if trains and 0 < _drop_probability(args, kwargs) < 1 else None
    if func in ALIKE or (func in IN_PLACE and not any(isinstance(a, Tensor) for a in args[1:])):
        like: Tensor = args[0]
        return like
    return None


def _drop_probability(args: Any, kwargs: Mapping[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
