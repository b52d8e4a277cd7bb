"""What crosses the boundaries of a pipeline whose layers form a graph.

A layer's output crosses every boundary between its stage and the last stage that reads it; the
stages between pass it on.  What the first layers read, the tokens, every rank has by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.model import ModelGraph
from planner.plan import Plan


def crossings(model: ModelGraph, stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """[boundary] Layers whose outputs cross it, in the order in which the stages have them.

    >>> from planner.model import Edge, Layer
    >>> skip = ModelGraph(
    ...     name="skip",
    ...     layers=tuple(Layer(name=name, kind=name, parameters=1) for name in "abc"),
    ...     edges=tuple(Edge(source=a, target=b) for a, b in ("ab", "bc", "ac")),
    ... )
    >>> crossings(skip, ["a", "b", "c"])
    (('a',), ('a', 'b'))
    """
    stage_of = {name: s for s, held in enumerate(stages) for name in held}
    last = {name: stage_of[name] for name in stage_of}
    for source, target in model.graph.edges:
        last[source] = max(last[source], stage_of[target])
    names = [name for held in stages for name in held]
    return tuple(
        tuple(name for name in names if stage_of[name] <= s < last[name])
        for s in range(len(stages) - 1)
    )


def crossings_of(plan: Plan, model: ModelGraph) -> tuple[tuple[str, ...], ...]:
    """[boundary] Layers whose outputs cross it in a plan."""
    return crossings(model, [[item.layer for item in stage.layers] for stage in plan.stages])
