"""Topological orders of a graph of layers that are worth solving as chains.

The best of a few orders is a split of the graph, if not surely the best one: it stands in where a
graph has too many ideals for `meshwright.planner.solver.graphs.lattice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.planner.solver.contraction import Block
from meshwright.planner.solver.graph_instance import GraphInstance
from meshwright.planner.system.lazy_imports import OnUse

networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

Order = tuple[int, ...]


def orders(problem: GraphInstance, blocks: Sequence[Block] = ()) -> dict[str, Order]:
    """Orders of layers by name, equal ones once; those of the numbers of `blocks` if there are any.

    `breadth` advances all branches together and `depth` one by one; `lexicographic` goes by the
    layers' names; `narrow` takes next what leaves the cheapest cut.
    """
    nodes = Nodes(problem, blocks)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(nodes.readers)))
    graph.add_edges_from(nodes.edges)
    by_name = networkx.lexicographical_topological_sort(graph, key=nodes.names.__getitem__)
    orders = {
        "breadth": tuple(networkx.topological_sort(graph)),
        "depth": nodes.depth_first(),
        "lexicographic": tuple(by_name),
        "narrow": nodes.narrow(),
    }
    names: dict[Order, str] = {}
    for name, order in orders.items():
        names.setdefault(order, name)
    return {name: order for order, name in names.items()}


class Nodes:
    """Layers, or blocks of them, of which each sends all that leaves it."""

    def __init__(self, problem: GraphInstance, blocks: Sequence[Block] = ()) -> None:
        blocks = blocks or [(layer,) for layer in range(len(problem.chain.layers))]
        place = {layer: at for at, block in enumerate(blocks) for layer in block}
        every = [(place[a], place[b], a) for a, b in problem.edges if place[a] != place[b]]
        self.edges = sorted({(before, after) for before, after, _ in every})
        self.names = [problem.name(block[0]) for block in blocks]
        self.readers: list[list[int]] = [[] for _ in blocks]
        self._reads: list[list[int]] = [[] for _ in blocks]
        for before, after in self.edges:
            self.readers[before].append(after)
            self._reads[after].append(before)
        sent_s, leaving = problem.sent_s(0, -1), {layer for _, _, layer in every}
        self._output_s = [sum(sent_s[at] for at in block if at in leaving) for block in blocks]

    def depth_first(self) -> Order:
        """Order that goes on with the node that became ready last."""
        return self._greedy(lambda node, _, since: (-since, node))

    def narrow(self) -> Order:
        """Order whose next cut is always the cheapest that can be had."""

        def added_s(node: int, unread: list[int], since: int) -> tuple[float, int]:
            done = sum(self._output_s[b] for b in self._reads[node] if unread[b] == 1)
            return self._output_s[node] - done, node

        return self._greedy(added_s)

    def _greedy(self, rank: Callable[[int, list[int], int], tuple[float, int]]) -> Order:
        """Take the ready node of the least rank(node, readers left of each node, ready since)."""
        unread = [len(outside) for outside in self.readers]
        missing = [len(inside) for inside in self._reads]
        ready = {node: 0 for node, count in enumerate(missing) if not count}
        order: list[int] = []
        while ready:
            node = min(ready, key=lambda one: rank(one, unread, ready[one]))
            del ready[node]
            order.append(node)
            for before in self._reads[node]:
                unread[before] -= 1
            for after in self.readers[node]:
                missing[after] -= 1
                if not missing[after]:
                    ready[after] = len(order)
        return tuple(order)
