"""A language model as a recording, from what its adapter says of its layers: no forward is run.

Each layer is a unit.  It reads the outputs of layers before it or the tokens, leaf 0 of the batch;
a head that makes its loss reads the targets, leaf 1; where samples hold several documents, blocks
read where they begin, leaf 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_structure

from planner.documents.plan import Plan
from runtime.adapter import HEAD, Adapter
from runtime.recording import Leaf, Made, Node, RecordedLayer, Recording, Value

_TOKENS, _TARGETS, _STARTS = Leaf(0), Leaf(1), Leaf(2)


class DescribedModel:
    """What a stage asks of a recorder, of a model whose layers an adapter makes."""

    refused = None

    def __init__(
        self, plan: Plan, adapter: Adapter, tokens: Tensor, *, documents: bool = False
    ) -> None:
        """`tokens` are those of a micro-batch on this rank, without data."""
        self._adapter, self._tokens = adapter, tokens
        self._divided = plan.mesh.tensor
        names = [item.layer for stage in plan.stages for item in stage.layers]
        nodes = []
        for at, name in enumerate(names):
            leaves: list[Any] = [Value(at - 1) if at else _TOKENS]
            chunked = plan.loss is not None and name == HEAD
            if chunked:
                leaves.append(_TARGETS)
            elif documents and name != HEAD:
                leaves.append(_STARTS)
            nodes.append(
                Node(
                    name=name,
                    unit=name,
                    call=None,
                    leaves=tuple(leaves),
                    spec=tree_structure((tuple(range(len(leaves))), {})),
                    made=((0, at), (1, at + 1)) if chunked else ((0, at),),
                    grad=True,
                    draws=False,
                    changed=frozenset(),
                    changes_held=False,
                    where=name,
                )
            )
        ends: tuple[Value, ...] = (Value(len(names) - 1),)
        if plan.loss is not None and names[-1] == HEAD:
            ends = (*ends, Value(len(names)))
        self.first = Recording(
            nodes=tuple(nodes),
            values=_Shapes(self, names),
            result=ends,
            result_spec=tree_structure(tuple(ends) if len(ends) > 1 else 0),
            layers=tuple(
                RecordedLayer(
                    name=name, first=at, last=at + 1, units=(name,), parameters=(), draws=False
                )
                for at, name in enumerate(names)
            ),
            derived=frozenset(),
            tensors={},
        )

    def recording(self, batch: Any, *, training: bool = True) -> Recording:
        """Return the one recording: samples of a plan are of one length."""
        return self.first

    def training_of(self, name: str) -> bool:
        """Return the mode of a module while all train."""
        return True

    def made(self, layer: str) -> Made:
        """Return what a layer hands on: this rank's part of the positions."""
        made = self._adapter.boundary(layer, self._tokens)
        if self._divided > 1:
            made = made.chunk(self._divided, dim=1)[0]
        return Made(made.shape, made.dtype, made.is_floating_point(), made.nbytes)


class _Shapes(Sequence[Made]):
    """Shapes of values by number; those that nobody asks for are not worked out."""

    def __init__(self, model: DescribedModel, names: Sequence[str]) -> None:
        self._model, self._names = model, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, at: Any) -> Any:
        return self._model.made(self._names[at])


def tree_of(layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has each layer under its own name (`block.0` nests)."""
    root = nn.Module()
    for name, layer in layers.items():
        parent = root
        *path, last = name.split(".")
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(last, layer)
    return root
