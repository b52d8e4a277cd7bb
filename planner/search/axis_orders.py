"""Orders of a mesh's axes on the link tiers: those that make a difference.

Ranks are numbered innermost axis first, and neighbours share the fastest links.  Two orders are
the same to the links if every axis has as many of its ranks within each tier; of those that are,
the one nearest to `INSIDE_OUT` stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from meshwright.planner.costs.collectives import inside_unit
from meshwright.planner.documents.plan import INSIDE_OUT, Axis, Layout

Spans = tuple[tuple[int, ...], ...]
"""[axis of INSIDE_OUT][tier] How many ranks of an axis lie within one unit of a tier."""


@lru_cache(maxsize=1 << 16)
def _reach(tiers: tuple[int, ...], degree: int, stride: int) -> tuple[int, ...]:
    """[tier] Number of ranks of an axis within one unit."""
    return tuple(inside_unit(tier, degree, stride) for tier in tiers)


def degrees_of(layout: Layout) -> tuple[int, ...]:
    """Return how many ranks each axis of `INSIDE_OUT` has."""
    return (
        layout.tensor,
        layout.context,
        layout.data_shard,
        layout.data_replicate,
        layout.pipeline,
    )


@lru_cache(maxsize=1 << 14)
def distinct_orders(
    tiers: tuple[int, ...], degrees: tuple[int, ...]
) -> dict[Spans, tuple[Axis, ...]]:
    """Return the orders that differ, by their spans; `tiers` are the devices that each reaches.

    >>> for order in distinct_orders((8, 64), (2, 1, 8, 1, 4)).values():
    ...     print(*order)
    tensor context data_shard data_replicate pipeline
    tensor context pipeline data_replicate data_shard
    data_shard context tensor data_replicate pipeline
    pipeline context data_shard data_replicate tensor
    """
    divided = [at for at, degree in enumerate(degrees) if degree > 1]
    narrow = _narrow(tiers, degrees)
    reach = max(narrow, default=0)
    result: dict[Spans, tuple[Axis, ...]] = {}
    alone = _reach(narrow, 1, 1)
    """Reach of an axis that is not divided, wherever it lies."""

    def extend(inner: list[int], strides: list[tuple[int, ...]], stride: int) -> None:
        """Try every axis as the next one out.  Beyond all tiers the order makes no difference."""
        left = [at for at in divided if at not in inner]
        if stride > reach or not left:
            spans = strides
            if left:
                spans = list(strides)
                for at in left:
                    spans[at] = _reach(narrow, degrees[at], stride)
                    stride *= degrees[at]
            key = tuple(spans)
            if key not in result:
                outward = iter((*inner, *left))
                result[key] = tuple(
                    INSIDE_OUT[next(outward)] if degree > 1 else axis
                    for axis, degree in zip(INSIDE_OUT, degrees, strict=True)
                )
            return
        for at in left:
            further = list(strides)
            further[at] = _reach(narrow, degrees[at], stride)
            extend([*inner, at], further, stride * degrees[at])

    extend([], [alone] * len(degrees), 1)
    return result


@lru_cache(maxsize=1 << 16)
def spans(tiers: tuple[int, ...], degrees: tuple[int, ...], order: tuple[Axis, ...]) -> Spans:
    """Return how far each axis reaches within each tier that does not hold all ranks."""
    by_axis = dict(zip(INSIDE_OUT, degrees, strict=True))
    return _spans(_narrow(tiers, degrees), by_axis, order)


def _narrow(tiers: Sequence[int], degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the tiers that do not hold all ranks."""
    ranks = math.prod(degrees)
    return tuple(tier for tier in tiers if tier < ranks)


def _spans(narrow: tuple[int, ...], by_axis: dict[Axis, int], order: Sequence[Axis]) -> Spans:
    orders: dict[Axis, tuple[int, ...]] = {}
    stride = 1
    for axis in order:
        orders[axis] = _reach(narrow, by_axis[axis], stride)
        stride *= by_axis[axis]
    return tuple(orders[axis] for axis in INSIDE_OUT)
