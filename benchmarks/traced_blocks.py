"""Compiled blocks of a rehearsal: graphs as the compiler divides them, and what kernels store.

A generated kernel computes a chain of elementwise operators without storing what lies between them
and reads what the chain began with until its last reader is done.  Graphs run operator by operator
here; of such chains only what leaves them counts as memory, and what they read stays until then.

Inductor also writes over inputs that nobody needs any more, and stores some results that many
kernels read rather than compute them again; neither is followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from benchmarks.torch_internals import divided_graphs
from meshwright.runtime.core.memory_tracker import left_out

aten, prims = torch.ops.aten, torch.ops.prims
MADE_IN_KERNELS = frozenset(
    {
        aten.cat.default,
        aten.full.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.slice_scatter.default,
        prims.iota.default,
    }
)
"""Operators of generated kernels that torch does not mark as elementwise."""
ENDING_KERNELS = frozenset({aten.index_put.default, aten.scatter_add.default})
"""Those that compute what they write inside their kernel, and store their result."""


def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph for a rehearsal: a backend of torch.compile."""
    return divided_graphs(_as_kernels)(graph, inputs)


def _as_kernels(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    kernels = _KernelInterpreter(graph)

    def run(arguments: list[Any]) -> Any:
        try:
            return kernels.boxed_run(arguments)
        finally:
            kernels.env.clear()  # what it returned, which others let go of

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _KernelInterpreter(Interpreter):
    """Runs a graph operator by operator; what no kernel would store is left out of its memory."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        stored: set[Node] = set()
        self._inside: set[Node] = set()
        for node in reversed(graph.graph.nodes):
            if any(_stores(user, stored) for user in node.users):
                stored.add(node)
            elif _is_view(node) or _is_elementwise(node):
                self._inside.add(node)

    def run_node(self, n: Node) -> Any:
        if n not in self._inside:
            return super().run_node(n)
        with left_out():
            result = super().run_node(n)
        read = tree_leaves([self.env[one] for one in n.all_input_nodes])
        for tensor in tree_leaves(result):
            # What is only passed on, or taken out of several, has its own already.
            if isinstance(tensor, Tensor) and not any(tensor is one for one in read):
                tensor._read_by_kernel = read  # type: ignore[attr-defined]
        return result


def _stores(user: Node, stored: set[Node]) -> bool:
    """Whether a tensor is in memory for this user of it; `stored` are the users that are."""
    if _is_view(user):
        return user in stored
    return not (
        _is_elementwise(user)
        or user.target in ENDING_KERNELS
        or torch.Tag.reduction in getattr(user.target, "tags", ())
    )


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in MADE_IN_KERNELS or torch.Tag.pointwise in tags
