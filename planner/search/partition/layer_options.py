"""Options of a layer in a partition problem, from the costs of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.planner.costs.layer_strategy import Recomputes, StrategyCost, choices_of
from meshwright.planner.frameworks.native_limits import layer_obstacle
from meshwright.planner.frameworks.stage_rules import ends_of
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.solver.partition_problem import Option

if TYPE_CHECKING:
    from meshwright.planner.documents.framework_space import Space
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.documents.profile import Recompute


def recomputes_of(model: ModelGraph, space: Space, pinned: Recompute | None) -> list[Recomputes]:
    """Return what layers may recompute; one after the other where all blocks must do the same.

    Where a space leaves anything out, blocks alone recompute: layers before and behind do not.
    """
    if space.recompute_by_layer and set(space.recompute) == set(RECOMPUTES):
        return [pinned]
    kinds = dict.fromkeys(model.chain_kinds)
    before, count, _ = ends_of(model)
    blocks = set(model.chain_kinds[before : before + count])
    choices = tuple(choice for choice in space.recompute if pinned in (None, choice))
    sets = [choices] if space.recompute_by_layer else [(choice,) for choice in choices]
    return [
        {kind: allowed if kind in blocks else ("none",) for kind in kinds}
        for allowed in sets
        if allowed
    ]


def allowed_options(
    table: tuple[StrategyCost, ...],
    layout: Layout,
    recompute: Recomputes,
    kind: str = "",
    *,
    every: bool = False,
) -> tuple[StrategyCost, ...]:
    """Return what a layer may choose among (`allowed_places`)."""
    return tuple(table[at] for at in allowed_places(table, layout, recompute, kind, every=every))


def allowed_places(
    table: tuple[StrategyCost, ...],
    layout: Layout,
    recompute: Recomputes,
    kind: str = "",
    *,
    every: bool = False,
) -> list[int]:
    """Return where what a layer may choose among stands in its table.

    To offload or to compress is left out where another choice is no worse in any figure, unless
    `every` choice is wanted: then no optimum needs it.  Forward and backward count apart only if
    all forwards come first.  `kind` is the layer's, where choices are given by kind.
    """
    apart, choices = layout.executed_schedule.forwards_first, choices_of(recompute, kind)
    asked = [
        (at, cost)
        for at, cost in enumerate(table)
        if cost.recompute in choices
        and not layer_obstacle(layout, cost.recompute, cost.activations)
    ]
    return [
        at
        for at, cost in asked
        if every
        or cost.activations == "keep"
        or not any(_no_worse(other, cost, apart, first=i < at) for i, other in asked)
    ]


def _no_worse(other: StrategyCost, cost: StrategyCost, apart: bool, *, first: bool) -> bool:
    """Return whether `other` can stand for `cost`; of two that are equal, the first can."""
    theirs, mine = _figures(other, apart), _figures(cost, apart)
    if other is cost or any(a > b for a, b in zip(theirs, mine, strict=True)):
        return False
    if not other.layer_bytes.no_more_than(cost.layer_bytes):
        return False
    return first or theirs != mine or other.layer_bytes != cost.layer_bytes


def _figures(cost: StrategyCost, apart: bool) -> tuple[float, ...]:
    return (
        cost.forward_s if apart else cost.forward_s + cost.backward_s,
        cost.backward_s if apart else 0.0,
        cost.sync_s,
        cost.host_bytes,
    )


def option_of(cost: StrategyCost) -> Option:
    """Return one choice as an option of a partition problem, but for its bytes on the device."""
    return Option(
        name=cost.name,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        sync_s=cost.sync_s,
        host_bytes=cost.host_bytes,
        host_resident_bytes=cost.layer_bytes.host,
    )
