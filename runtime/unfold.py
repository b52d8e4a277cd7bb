"""Any module as a graph of layers: its forward is traced, and cut where its own parts begin.

    layers_of(ResNet50())  ->  {"conv1": (Piece, "tokens"), "layer1_0": (Piece, "conv1"), ...}

torch.fx records what `forward` calls.  What one part of the module does (a block of a ModuleList or
Sequential, or a module that is no container) becomes one layer; operators between parts, which have
no parameters, go to the layer that reads them, or stand alone where several do.  Shapes and numbers
read from tensors are taken again by every layer that needs them.  The layers are what a
`file.py:factory` may return as a dict; parts that are alike are one kind.

A forward whose course depends on the values of its tensors cannot be traced: such a model returns
its layers itself.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
from torch import Tensor, fx, nn

from planner.errors import DocumentError
from runtime.adapter import TOKENS

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
SCALARS = ("size", "dim", "numel")
"""Methods of tensors whose results are numbers."""
Owner = tuple[str, int]
"""The path of a part of the module, and which of its calls."""


class Piece(nn.Module):
    """Some operators of a traced module, as one layer."""

    def __init__(self, traced: fx.GraphModule, *, kind: str) -> None:
        super().__init__()
        self.body = traced
        self.kind = kind
        self.identity = (kind, traced.code)
        """Equal for pieces that do the same with parameters of their own."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the operators."""
        result: Tensor = self.body(*inputs)
        return result


class _Tracer(fx.Tracer):
    """Notes for every node which part of the module it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[fx.Node, Owner] = {}
        self._stack: list[Owner] = []
        self._calls: dict[str, int] = {}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        owns = not self._stack and not isinstance(m, CONTAINERS)
        if owns:
            path = self.path_of_module(m)
            self._calls[path] = self._calls.get(path, 0) + 1
            self._stack.append((path, self._calls[path]))
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            if owns:
                self._stack.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if self._stack:
            self.owners[node] = self._stack[-1]
        return node


def layers_of(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the layers of a module that takes tokens and returns one tensor."""
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
    except Exception as error:
        raise DocumentError(
            "",
            f"{type(module).__name__} cannot be traced ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); let the factory return a dict of its layers",
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise DocumentError(
            "", f"{type(module).__name__} takes {len(inputs)} inputs; a model here takes the tokens"
        )
    owners = _joined(graph, tracer.owners)
    return _pieces(module, graph, owners, tokens=inputs[0])


def graph_of(layers: Mapping[str, tuple[Any, ...]]) -> nx.DiGraph:
    """Return who reads whom; nodes are layers in their order, and the tokens."""
    result = nx.DiGraph()
    result.add_node(TOKENS)
    for name, (_, *reads) in layers.items():
        result.add_node(name)
        result.add_edges_from((read, name) for read in reads)
    return result


def cut_points(graph: nx.DiGraph) -> list[str]:
    """Return the layers behind which only their own output is still read, in order.

    >>> graph = nx.DiGraph([(TOKENS, "a"), ("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")])
    >>> cut_points(graph)
    ['a', 'c', 'd']
    """
    order = [name for name in nx.lexicographical_topological_sort(graph) if name != TOKENS]
    place = {name: at for at, name in enumerate(order)}
    result = []
    for at, name in enumerate(order):
        crossing = {
            source
            for source, target in graph.edges
            if source != TOKENS and place[source] <= at < place[target]
        }
        if crossing <= {name}:
            result.append(name)
    return result


def _is_scalar(node: fx.Node, scalars: set[fx.Node]) -> bool:
    """Whether a node is a number or a shape, not a tensor."""
    if node.op == "call_method" and node.target in SCALARS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "device", "dtype")
    of_nodes = node.all_input_nodes
    return node.op == "call_function" and bool(of_nodes) and all(n in scalars for n in of_nodes)


def _joined(graph: fx.Graph, owners: Mapping[fx.Node, Owner]) -> dict[fx.Node, Owner]:
    """Give every operator to a layer; numbers, parameters and ends to none."""
    scalars: set[fx.Node] = set()
    result: dict[fx.Node, Owner] = {}
    for node in graph.nodes:
        if _is_scalar(node, scalars):
            scalars.add(node)
        elif node.op in ("call_module", "call_function", "call_method"):
            alone = (f"{node.name}", 0)
            result[node] = owners.get(node, alone)
            if node.target is operator.getitem and node.all_input_nodes[0] in result:
                # What is taken out of several results belongs to what made them.
                source = node.all_input_nodes[0]
                if all(user.target is operator.getitem for user in source.users):
                    result[node] = result[source]
    for node in reversed(list(graph.nodes)):
        if node in result and result[node][1] == 0:
            readers = {result[user] for user in _readers(node, scalars) if user in result}
            if len(readers) == 1 and not any(user.op == "output" for user in node.users):
                result[node] = readers.pop()
    return result


def _readers(node: fx.Node, scalars: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield who reads a node, numbers taken from it included."""
    for user in node.users:
        if user in scalars:
            yield from _readers(user, scalars)
        else:
            yield user


def _pieces(
    module: nn.Module, graph: fx.Graph, owners: Mapping[fx.Node, Owner], *, tokens: fx.Node
) -> dict[str, tuple[Any, ...]]:
    members: dict[Owner, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in owners:
            members.setdefault(owners[node], []).append(node)
    (returned,) = [node for node in graph.nodes if node.op == "output"]
    ends = {node: _needed(node, owners, returned) for node in owners}
    # A layer stands where the last of its operators does: behind all that it reads.
    place = {node: at for at, node in enumerate(graph.nodes)}
    order = sorted(members, key=lambda owner: place[members[owner][-1]])
    names: dict[fx.Node, str] = {tokens: TOKENS}
    result: dict[str, tuple[Any, ...]] = {}
    for owner in order:
        outputs = [node for node in members[owner] if ends[node]]
        if len(outputs) != 1:
            raise DocumentError(
                "",
                f"{type(module).__name__}: others read {len(outputs)} results of "
                f"'{owner[0]}', and a layer returns one tensor; let the factory return a dict",
            )
        name = _name(owner, result)
        piece, reads = _piece(module, owner, members[owner], outputs[0], owners)
        result[name] = (piece, *(names[read] for read in reads))
        names[outputs[0]] = name
    return result


def _needed(node: fx.Node, owners: Mapping[fx.Node, Owner], returned: fx.Node) -> bool:
    """Whether somebody outside its layer reads a node."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user is returned or (user in owners and owners[user] != owners[node]):
            return True
        if user not in owners:  # a number: who reads that?
            waiting += user.users
    return False


def _name(owner: Owner, taken: Mapping[str, Any]) -> str:
    name = re.sub(r"\W", "_", owner[0])
    if not re.match(r"[A-Za-z_]", name) or name in dir(nn.Module) or name in (TOKENS, "names"):
        name = f"layer_{name}"
    name = name if owner[1] <= 1 else f"{name}_call{owner[1]}"
    while name in taken:
        name += "_"
    return name


def _piece(
    module: nn.Module,
    owner: Owner,
    nodes: Sequence[fx.Node],
    output: fx.Node,
    owners: Mapping[fx.Node, Owner],
) -> tuple[Piece, list[fx.Node]]:
    """Return a layer, and the nodes whose tensors it takes."""
    inside = set(nodes)
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []
    held: dict[str, Any] = {}

    def collect(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in inside or source in copies:
                continue
            if source.op == "placeholder" or source in owners:
                copies[source] = body.placeholder(f"x{len(reads)}")
                reads.append(source)
            else:
                collect(source)  # a number, or a parameter
                copies[source] = copied(source)

    def copied(node: fx.Node) -> fx.Node:
        target = node.target
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            target = path.removeprefix(f"{owner[0]}.") if path != owner[0] else "module"
            held[target] = _at(module, path)
        args = fx.node.map_arg(node.args, lambda n: copies[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: copies[n])
        # Names of its own, so that the code of layers that are alike is the same.
        return body.create_node(node.op, target, args, kwargs, name=f"v{len(copies)}")

    for node in nodes:  # placeholders come first
        for source in _outside(node, inside, owners):
            if source not in copies:
                copies[source] = body.placeholder(f"x{len(reads)}")
                reads.append(source)
    for node in nodes:
        collect(node)
        copies[node] = copied(node)
    body.output(copies[output])
    kind = type(_at(module, owner[0])).__name__ if owner[1] else str(nodes[-1].target)
    kind = kind if kind.isidentifier() else getattr(nodes[-1].target, "__name__", "operator")
    return Piece(fx.GraphModule(held, body), kind=kind), reads


def _outside(
    node: fx.Node, inside: set[fx.Node], owners: Mapping[fx.Node, Owner]
) -> Iterator[fx.Node]:
    """Yield the tensors of other layers that a node needs, through numbers too."""
    for source in node.all_input_nodes:
        if source in inside:
            continue
        if source.op == "placeholder" or source in owners:
            yield source
        else:
            yield from _outside(source, inside, owners)


def _at(module: nn.Module, path: str) -> Any:
    result: Any = module
    for part in path.split("."):
        result = getattr(result, part)
    return result
