"""Schedules in closed form, and what orders hold: figures beside which simulations are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import Shape, schedule_of
from meshwright.planner.schedules.closed_form import pace
from meshwright.planner.schedules.schedule import obstacle
from meshwright.planner.schedules.schedule_record import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """One schedule on a number of ranks and micro-batches."""

    steady: float
    fill: float
    credit: float
    in_flight: tuple[float, ...]
    """[rank], in micro-batches of the whole rank; with V stages a rank there are V-ths."""
    forward_apart: bool = False
    weight_versions: int = 1
    """How often a rank holds its parameters."""

    def step_s(self, rank_s: Sequence[float], weight_s: Sequence[float] | None = None) -> float:
        """Seconds of a step, from t_r and w_r [rank]; not for schedules with `forward_apart`."""
        seconds = self.steady * max(rank_s) + self.fill * sum(rank_s)
        return seconds - (self.credit * sum(weight_s) if weight_s is not None else 0.0)


def closed_form(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    largest_stage: float | None = None,
) -> ClosedForm:
    """Return a schedule's closed form.

    `largest_stage` is the share of a rank's work in its largest stage, 1 / V if they are equal: n
    layers on a rank in V stages make it ceil(n / V) / n.  The bubble waits for that stage.

    >>> closed_form("1f1b", ranks=4, micro_batches=8).step_s([3.0] * 4)
    33.0
    >>> closed_form("interleaved", ranks=4, micro_batches=8, virtual_stages=2).in_flight
    (5.5, 4.5, 3.5, 2.5)
    """
    found = obstacle(
        name,
        stages=ranks * virtual_stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
    )
    if found:
        raise DocumentError(*found)
    schedule = schedule_of(name)
    share = largest_stage if largest_stage is not None else 1.0 / virtual_stages
    steady, fill = pace(name, ranks=ranks, micro_batches=micro_batches, largest_stage=share)
    shape = Shape(ranks, micro_batches, virtual_stages)
    return ClosedForm(
        steady=steady,
        fill=fill,
        credit=2.0 * fill if schedule.splits_backward else 0.0,
        in_flight=tuple(
            schedule.counts(rank, shape).whole / virtual_stages for rank in range(ranks)
        ),
        forward_apart=schedule.forwards_first,
        weight_versions=schedule.weight_versions,
    )


def uniform_step_s(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
    virtual_stages: int = 1,
) -> float:
    """Seconds of a step whose ranks are all alike; F, I and W of a whole rank's micro-batch.

    Exact for every schedule but zbv and dualpipe-v, which see above.

    >>> uniform_step_s("zb-h1", ranks=4, micro_batches=8, forward_s=0.4, input_s=1.0, weight_s=1.0)
    22.2
    """
    form = closed_form(
        name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    whole_s = forward_s + input_s + weight_s
    if form.credit:
        bubble_s = max(forward_s, input_s, forward_s + input_s - weight_s) / virtual_stages
        return micro_batches * whole_s + (ranks - 1) * bubble_s
    return form.step_s([whole_s] * ranks)


def peak_alive(order: Sequence[Action]) -> dict[int, int]:
    """Return, for each stage of a rank, the most micro-batches that hold activations at once.

    A micro-batch is alive from the start of its forward to the end of its backward, of its W if
    that is split; on one rank actions do not overlap, so their order alone decides.
    """
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in order:
        if action.kind != "I":
            alive[action.stage] = alive.get(action.stage, 0) + (1 if action.kind == "F" else -1)
            most[action.stage] = max(most.get(action.stage, 0), alive[action.stage])
    return most


def peak_stored_bytes(
    order: Sequence[Action],
    stored_bytes: Sequence[float],
    kept_bytes: Sequence[float] | None = None,
) -> float:
    """Return the most bytes of activations that a rank holds at once, by its order.

    `stored_bytes` [stage] is what a micro-batch holds from its forward to its B or I, `kept_bytes`
    [stage] what it holds from its I to its W: inputs of products and the gradients of their
    outputs.  While an action runs, it holds both what it takes and what it leaves, the larger
    counting here.

    >>> from meshwright.planner.schedules.schedule import orders
    >>> [peak_stored_bytes(order, [10.0] * 2, [4.0] * 2)
    ...     for order in orders("zb-h1", stages=2, micro_batches=8)]
    [20.0, 14.0]
    """
    kept = kept_bytes if kept_bytes is not None else stored_bytes
    alive = most = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            alive += stored_bytes[stage]
        elif kind == "B":
            alive -= stored_bytes[stage]
        elif kind == "I":
            alive += kept[stage] - stored_bytes[stage]
        else:
            alive -= kept[stage]
        most = max(most, alive)
    return most


def in_flight(order: Sequence[Action]) -> int:
    """Return the most micro-batches that hold activations at once on a rank.

    A rank with several stages counts a micro-batch once for each stage that holds it.  One whose
    backward is split counts until its W.

    >>> from meshwright.planner.schedules.schedule import orders
    >>> [in_flight(order) for order in orders("1f1b", stages=4, micro_batches=8)]
    [4, 3, 2, 1]
    """
    alive = most = 0
    for action in order:
        if action.kind != "I":
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
    return most


def weight_versions(order: Sequence[Action], *, micro_batches: int) -> int:
    """Return how many versions of its weights a rank holds at most, if it never drains.

    Narayanan et al. (2021, PipeDream-2BW): all micro-batches of step k use the weights that k - 1
    steps have made, in their forward and in their backward.

    >>> from meshwright.planner.schedules.schedule import orders
    >>> [weight_versions(order, micro_batches=4)
    ...     for order in orders("pipedream-2bw", stages=4, micro_batches=4, steps=5)]
    [2, 2, 2, 2]
    """
    done = 0  # backwards
    alive: list[int] = []  # steps of the micro-batches in flight
    most = 1
    for action in order:
        step = action.micro_batch // micro_batches
        if action.kind == "F":
            alive.append(step)
            if done // micro_batches < step - 1:
                raise DocumentError(
                    "schedule", f"{action} needs weights that {step - 1} steps have made, too early"
                )
        elif action.kind != "I":
            alive.remove(step)
            done += 1
        used = {max(0, step - 1) for step in alive}
        most = max(most, len(used | {done // micro_batches}))
    return most
