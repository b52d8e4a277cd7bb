"""Which products of a unit stand behind which: the flow of tensors, read off autograd's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.runtime.core.side_effects import copied
from meshwright.runtime.parallel.tensor_regions import PRODUCTS


class Indivisible(Exception):  # noqa: N818 - told to the user as a reason, not raised to them
    """Why something cannot be divided."""


def own_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor with a gradient of its own, if any; else what it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = leaf.detach().clone()
    return made.requires_grad_(leaf.requires_grad)


@dataclass(slots=True)
class Flow:
    """Which products of a unit stand behind which, with nothing but other functions between."""

    order: list[str]
    before: dict[str, set[str]]
    behind: dict[str, set[str]]
    """The unit's own output is ""."""
    calls: dict[str, int]
    looked_up: dict[str, int]
    """Rows that a table gives at most for one sample."""


def flow_of(unit: nn.Module, given: Any) -> Flow:
    """Run a unit and return which product reads which.

    Raises Refused where it cannot be run.
    """
    twin = copied(unit).train()
    calls: dict[str, int] = {}
    looked_up: dict[str, int] = {}
    outputs: dict[Any, str] = {}
    inputs: dict[str, Any] = {}
    for path, part in twin.named_modules():
        if isinstance(part, PRODUCTS):

            def product(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                inputs.setdefault(path, args[0].grad_fn if args else None)
                outputs[out.grad_fn] = path

            part.register_forward_hook(product)
        elif isinstance(part, nn.Embedding):

            def table(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                ids = args[0]
                looked_up[path] = ids[0].numel() if ids.ndim > 1 else ids.numel()

            looked_up.setdefault(path, 1 << 60)
            part.register_forward_hook(table)
    args, kwargs = tree_map(own_leaf, given)
    try:
        torch.manual_seed(0)
        made = [leaf for leaf in tree_leaves(twin(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except Exception as error:  # the user's code on random numbers may fail in any way
        line = (str(error).splitlines() or [""])[0]
        raise Indivisible(
            f"cannot be run on random numbers: {type(error).__name__}: {line}"
        ) from error
    order = list(inputs)
    before = {path: _nearest(fn, outputs) for path, fn in inputs.items()}
    behind: dict[str, set[str]] = {path: set() for path in order}
    for path, found in before.items():
        for one in found:
            behind[one].add(path)
    for result in made:
        for path in _nearest(result.grad_fn, outputs):
            behind[path].add("")
    return Flow(order, before, behind, calls, looked_up)


def _nearest(fn: Any, outputs: Mapping[Any, str]) -> set[str]:
    """Return the products whose outputs a tensor is made of, with no other product between."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in outputs:
            found.add(outputs[node])
            continue
        waiting += [following for following, _ in node.next_functions]
    return found
