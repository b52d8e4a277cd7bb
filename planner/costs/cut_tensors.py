"""Tensors that layers hand on, and those that cross the boundaries of a pipeline.

A layer's output crosses every boundary between its stage and the last stage that reads it; the
stages between pass it on.  What the first layers read, the tokens, every rank has by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from meshwright.planner.documents.model import Layer, ModelGraph
from meshwright.planner.operators.operator_table import FP32, Setting

MOST_IDEALS = 20_000
"""Graphs with more downsets are split along the best of several orders."""


def crossings(model: ModelGraph, stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """[boundary] Layers whose outputs cross it, in the order in which the stages have them.

    >>> from meshwright.planner.documents.model import Edge, Layer
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


def in_order(model: ModelGraph, order: Sequence[str] | None = None) -> ModelGraph:
    """Return the same graph with its layers one by one in an order; a topological one unless given.

    That has the layers of a group side by side.  Its digest is another.
    """
    single = dict(model.chain)
    if order is None and model.colocated:
        order = [name for block in blocks_of(model) for name in block]
    if order is None:
        import networkx  # noqa: PLC0415 - loads slowly, and chains need none of it

        place = {name: at for at, name in enumerate(single)}
        order = list(networkx.lexicographical_topological_sort(model.graph, key=place.__getitem__))
    return ModelGraph(
        name=model.name,
        source=model.source,
        architecture=model.architecture,
        layers=tuple(_standalone_layer(name, single[name]) for name in order),
        edges=model.edges,
        colocated=model.colocated,
    )


def _standalone_layer(name: str, layer: Layer) -> Layer:
    return layer.model_copy(update={"name": name, "repeat": 1})


def colocated_places(model: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Return the places in the chain of the layers of each group."""
    place = {name: at for at, (name, _) in enumerate(model.chain)}
    groups = (model.colocated or {}).values()
    return tuple(tuple(sorted(place[name] for name in group)) for group in groups)


def readers_of(model: ModelGraph) -> list[list[int]]:
    """[place in the chain] Places of the layers that read its output, in the order of the edges."""
    place = {name: at for at, (name, _) in enumerate(model.chain)}
    groups_at: list[list[int]] = [[] for _ in place]
    for edge in model.edges:
        groups_at[place[edge.source]].append(place[edge.target])
    return groups_at


def blocks_of(model: ModelGraph) -> list[tuple[str, ...]]:
    """Return the names of groups and of single layers, in an order in which stages can have them.

    The layers of a group are in an order in which they can run.
    """
    import networkx  # noqa: PLC0415 - loads slowly, and chains need none of it

    from meshwright.planner.solver.contraction import blocks  # noqa: PLC0415 - as above

    place = {name: at for at, (name, _) in enumerate(model.chain)}
    names = list(networkx.lexicographical_topological_sort(model.graph, key=place.__getitem__))
    number = {name: at for at, name in enumerate(names)}
    readers: list[list[int]] = [[] for _ in names]
    for source, target in model.graph.edges:
        readers[number[source]].append(number[target])
    groups = (model.colocated or {}).values()
    cuts = blocks(readers, [tuple(sorted(number[name] for name in group)) for group in groups])
    return [tuple(names[at] for at in block) for block in cuts]


def sink_kind(model: ModelGraph) -> str | None:
    """Return the kind of the layer that nobody reads, if it is the only one and of its own kind."""
    graph, kinds = model.graph, {name: layer.kind for name, layer in model.chain}
    ends = [name for name in graph if not graph.out_degree(name)]
    if len(ends) != 1 or list(kinds.values()).count(kinds[ends[0]]) > 1:
        return None
    return kinds[ends[0]]


def narrowest_bytes(model: ModelGraph, output_bytes: Mapping[str, float]) -> float:
    """Least that crosses any boundary; `output_bytes` are of each kind of layer.

    In a connected graph some output does.
    """
    import networkx  # noqa: PLC0415 - loads slowly, and chains need none of it

    if not networkx.is_weakly_connected(model.graph):
        return 0.0
    kinds = {name: layer.kind for name, layer in model.chain}
    return min((output_bytes[kinds[edge.source]] for edge in model.edges), default=0.0)


def widest_bytes(model: ModelGraph, output_bytes: Mapping[str, float]) -> float:
    """Most that crosses a boundary of any split: of all downsets, or of the orders to be tried."""
    import numpy as np  # noqa: PLC0415 - these load networkx, and chains need none of them

    from meshwright.planner.solver.graph_instance import graph_instance  # noqa: PLC0415
    from meshwright.planner.solver.graphs.ideals import ideals  # noqa: PLC0415
    from meshwright.planner.solver.graphs.orders import orders  # noqa: PLC0415
    from meshwright.planner.solver.partition_problem import Option, StageLimits  # noqa: PLC0415

    kinds = {name: layer.kind for name, layer in model.chain}
    stated = graph_instance(
        model.graph,
        options=dict.fromkeys(kinds, (Option(name="", forward_s=0.0, backward_s=0.0),)),
        output_s={name: output_bytes[kind] for name, kind in kinds.items()},
        stages=(StageLimits(capacity_bytes=0.0),),
        steady=0.0,
        colocated=list((model.colocated or {}).values()),
    )
    every = ideals(stated.readers(), most=MOST_IDEALS, colocated=stated.colocated)
    if every is not None:
        return float(every.crossing(stated.readers(), np.array(stated.sent_s())).max())
    return max(max(stated.along(order).cut_s) for order in orders(stated).values())


class Boundaries:
    """Bytes of one micro-batch on a rank, for any setting of a model's layers."""

    def __init__(self, model: ModelGraph) -> None:
        self._model = model
        self._layers = {layer.kind: layer for layer in model.layers}

    def output_bytes(self, setting: Setting) -> dict[str, float]:
        """Bytes of an output, by kind of layer."""
        stream = self._stream_bytes(setting)
        scale = setting.micro_batch / setting.context * setting.element_bytes / FP32
        return {
            kind: layer.trace.output_bytes * scale if layer.trace else stream
            for kind, layer in self._layers.items()
        }

    def crossing_bytes(self, setting: Setting) -> tuple[float, float]:
        """Most and least bytes that cross a boundary."""
        scale = setting.micro_batch / setting.context * setting.element_bytes / FP32
        if self._model.edges and self._model.architecture is None:
            widest, narrowest = self._sample_crossings
            return widest * scale, narrowest * scale
        a = self._model.architecture
        if a is None:
            # What the last layer returns crosses no boundary.
            traces = [layer.trace for _, layer in self._model.chain[:-1] if layer.trace]
            largest = max((trace.output_bytes for trace in traces), default=0) * scale
            return largest, largest
        stream = self._stream_bytes(setting)
        if self._model.edges:
            return widest_bytes(self._model, dict.fromkeys(self._layers, stream)), stream
        return stream, stream

    def _stream_bytes(self, setting: Setting) -> float:
        a = self._model.architecture
        return setting.stream_tokens * a.hidden_size * setting.element_bytes if a else 0.0

    @cached_property
    def _sample_crossings(self) -> tuple[float, float]:
        """Most and least bytes of one sample in fp32 that cross a boundary of a traced graph."""
        output_bytes = {
            kind: float(layer.trace.output_bytes) if layer.trace else 0.0
            for kind, layer in self._layers.items()
        }
        return (
            widest_bytes(self._model, output_bytes),
            narrowest_bytes(self._model, output_bytes),
        )
