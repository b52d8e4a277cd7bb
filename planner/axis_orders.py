"""Which axis of a mesh lies on which link tier: the orders of axes that make a difference.

Ranks are numbered innermost axis first, and neighbours share the fastest links.  Two orders are
the same to the links if every axis has as many of its ranks within each tier; of those that are,
the one nearest to `INSIDE_OUT` stands for all.
"""

from __future__ import annotations

import math
from functools import lru_cache

from planner.collectives import inside_unit
from planner.plan import INSIDE_OUT, Axis, Layout

Spans = tuple[tuple[int, ...], ...]
"""[axis of INSIDE_OUT][tier] How many ranks of an axis lie within one unit of a tier."""

_inside = lru_cache(maxsize=1 << 16)(inside_unit)


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
    divided = [axis for axis, degree in zip(INSIDE_OUT, degrees, strict=True) if degree > 1]
    by_axis = dict(zip(INSIDE_OUT, degrees, strict=True))
    reach = max((tier for tier in tiers if tier < math.prod(degrees)), default=0)
    result: dict[Spans, tuple[Axis, ...]] = {}

    def extend(inner: tuple[Axis, ...], stride: int) -> None:
        """Try every axis as the next one out.  Beyond all tiers the order makes no difference."""
        left = [axis for axis in divided if axis not in inner]
        if stride > reach or not left:
            outward = iter((*inner, *left))
            order = tuple(next(outward) if axis in divided else axis for axis in INSIDE_OUT)
            result.setdefault(spans(tiers, degrees, order), order)
            return
        for axis in left:
            extend((*inner, axis), stride * by_axis[axis])

    extend((), 1)
    return result


@lru_cache(maxsize=1 << 16)
def spans(tiers: tuple[int, ...], degrees: tuple[int, ...], order: tuple[Axis, ...]) -> Spans:
    """Return how far each axis reaches within each tier that does not hold all ranks."""
    by_axis = dict(zip(INSIDE_OUT, degrees, strict=True))
    narrow = [tier for tier in tiers if tier < math.prod(degrees)]
    found: dict[Axis, tuple[int, ...]] = {}
    stride = 1
    for axis in order:
        found[axis] = tuple(_inside(tier, by_axis[axis], stride) for tier in narrow)
        stride *= by_axis[axis]
    return tuple(found[axis] for axis in INSIDE_OUT)
