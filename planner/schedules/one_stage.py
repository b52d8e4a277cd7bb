"""Schedules of one stage per rank."""

from __future__ import annotations

from itertools import chain

from meshwright.planner.schedules.actions import Order, actions
from meshwright.planner.schedules.schedule_record import (
    DRAINED,
    Coefficients,
    InFlight,
    Schedule,
    Shape,
)


def gpipe(rank: int, shape: Shape) -> Order:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    return (
        *actions(rank, "F", range(shape.micro_batches)),
        *actions(rank, "B", range(shape.micro_batches)),
    )


def one_forward_one_backward(rank: int, shape: Shape) -> Order:
    """Warm up with as many forwards as stages follow, then alternate (PipeDream-flush, 2021)."""
    micro_batches = shape.micro_batches
    warm_up = min(micro_batches, shape.ranks - rank - 1)
    forwards = actions(rank, "F", range(micro_batches))
    backwards = actions(rank, "B", range(micro_batches))
    alternating = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *alternating, *backwards[micro_batches - warm_up :])


def _stages_behind(rank: int, shape: Shape) -> InFlight:
    return InFlight(shape.ranks - rank, shape.ranks - rank, 0)


def _one_for_each_rank(shape: Shape) -> str:
    if shape.micro_batches >= shape.ranks:
        return ""
    return f"at least one for each of its {shape.ranks} ranks, with two versions of the weights"


GPIPE = Schedule(
    name="gpipe",
    order=gpipe,
    coefficients=DRAINED,
    forwards_first=True,
    in_flight=lambda rank, shape: InFlight(shape.micro_batches, shape.micro_batches, 0),
    no_slower="1f1b",
    names={"torchtitan": "GPipe"},
)
ONE_FORWARD_ONE_BACKWARD = Schedule(
    name="1f1b",
    order=one_forward_one_backward,
    coefficients=DRAINED,
    last_waits=False,
    repeats=True,
    in_flight=_stages_behind,
    phi_bound=True,
    names={
        "torchtitan": "1F1B",
        "megatron": "forward_backward_pipelining_without_interleaving",
        "nanotron": "1f1b",
    },
)
PIPEDREAM_2BW = Schedule(
    name="pipedream-2bw",
    order=one_forward_one_backward,
    coefficients=Coefficients(
        lambda ranks, micro_batches, largest: (float(micro_batches), 0.0),
        "m and 0 under pipedream-2bw",
    ),
    micro_batches_needed=_one_for_each_rank,
    last_waits=False,
    weight_versions=2,
    repeats=True,
    in_flight=_stages_behind,
)
