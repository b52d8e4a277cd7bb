"""Topological orders of a graph of layers that are worth solving as chains.

The best of a few orders is a split of the graph, if not surely the best one: it stands in where a
graph has too many ideals for `planner.solver.graphs.lattice`.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.on_use import OnUse
from planner.solver.graphs.graph_instance import GraphInstance

networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

Order = tuple[int, ...]


def orders(problem: GraphInstance) -> dict[str, Order]:
    """Orders by name, equal ones once.

    `breadth` advances all branches together and `depth` one by one; `lexicographic` goes by the
    layers' names; `narrow` takes next what leaves the cheapest cut.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(problem.layers)))
    graph.add_edges_from(problem.edges)
    by_name = networkx.lexicographical_topological_sort(graph, key=problem.names.__getitem__)
    found = {
        "breadth": tuple(networkx.topological_sort(graph)),
        "depth": depth_first(problem),
        "lexicographic": tuple(by_name),
        "narrow": narrow(problem),
    }
    names: dict[Order, str] = {}
    for name, order in found.items():
        names.setdefault(order, name)
    return {name: order for order, name in names.items()}


def depth_first(problem: GraphInstance) -> Order:
    """Order that goes on with the layer that became ready last."""
    return _greedy(problem, lambda layer, _, since: (-since, layer))


def narrow(problem: GraphInstance) -> Order:
    """Order whose next cut is always the cheapest that can be had."""
    reads: list[list[int]] = [[] for _ in problem.layers]
    readers = problem.readers()
    for before, outside in enumerate(readers):
        for after in outside:
            reads[after].append(before)

    def added_s(layer: int, unread: list[int], since: int) -> tuple[float, int]:
        done = sum(problem.output_s[before] for before in reads[layer] if unread[before] == 1)
        return (problem.output_s[layer] if readers[layer] else 0.0) - done, layer

    return _greedy(problem, added_s)


def _greedy(
    problem: GraphInstance, rank: Callable[[int, list[int], int], tuple[float, int]]
) -> Order:
    """Take the ready layer of the least rank(layer, readers left of each layer, ready since)."""
    readers = problem.readers()
    unread = [len(outside) for outside in readers]
    reads: list[list[int]] = [[] for _ in readers]
    for before, outside in enumerate(readers):
        for after in outside:
            reads[after].append(before)
    missing = [len(inside) for inside in reads]
    ready = {layer: 0 for layer, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        layer = min(ready, key=lambda one: rank(one, unread, ready[one]))
        del ready[layer]
        order.append(layer)
        for before in reads[layer]:
            unread[before] -= 1
        for after in readers[layer]:
            missing[after] -= 1
            if not missing[after]:
                ready[after] = len(order)
    return tuple(order)
