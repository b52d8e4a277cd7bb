"""Parameters that this rank does not train as they were built: what reads them is noticed.

Every rank has the whole module as it was built, and trains the parameters of its stage.  A loop may
treat all alike (`p.data.clamp_(-1, 1)`): of an absent one nothing comes of that here.  Where its
value goes into what this rank has (a teacher that follows a student), or is looked at, it would be
the one that was built, on and on.  So it is where ranks divide a parameter, and something has kept
the whole one: a dict of the module, a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.planner.errors import LaunchError

LOOKED_AT = frozenset(
    ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__")
) | {"__contains__", "__reduce_ex__", "equal", "allclose"}
"""Functions that bring values of a tensor to Python, or to a file."""


class AbsentTensor(Tensor):
    """A tensor whose values are made of a parameter that another stage trains."""

    absent_name = "a parameter"
    failed: Callable[[Exception], None] = staticmethod(lambda _: None)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and see where its values go."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        source = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, AbsentTensor))
        if name in LOOKED_AT:
            raise _error(source)
        if _changes_first(name) and _goes_beyond(args):
            source.failed(_error(source))
            return args[0]
        # What ranks divide does not go with a plain tensor, nor does its value count here.
        args, kwargs = tree_map_only(DTensor, _whole_zeros, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name == "__set__" or _changes_first(name):
            return result
        return tree_map_only(Tensor, lambda tensor: _as_absent(tensor, source), result)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """A parameter that another stage trains."""


def mark_absent(
    module: nn.Module, here: Iterable[nn.Parameter], failed: Callable[[Exception], None]
) -> None:
    """Mark the parameters of a module that are not among those `here`.

    `failed` is told where the training loop lets one's value go into what this rank has: all ranks
    are to refuse that together.
    """
    held = {id(parameter) for parameter in here}
    for name, parameter in module.named_parameters():
        if id(parameter) not in held and type(parameter) is nn.Parameter:
            parameter.__class__ = AbsentParameter
            parameter.absent_name, parameter.failed = name, failed  # type: ignore[attr-defined]


LOOKED_THROUGH = frozenset(
    ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn")
)
"""Attributes of a tensor that tell none of its values."""


class ReplacedParameter(nn.Parameter):
    """A parameter as the module was built, in whose place this rank has another one."""

    replaced_name = "a parameter"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch that reads no values, and refuse all others."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
        if attribute not in LOOKED_THROUGH:
            leaves = tree_leaves((args, kwargs))
            source = next(leaf for leaf in leaves if isinstance(leaf, ReplacedParameter))
            raise LaunchError(
                f"{source.replaced_name}: is read from a list, a dict or a closure, which has it "
                "as it was built, while ranks divide what the module has; read it as an attribute "
                "of its module in forward, or use a plan without ZeRO and tensor axis"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_replaced(built: Iterable[tuple[str, nn.Parameter]], here: Iterable[nn.Parameter]) -> None:
    """Mark the parameters of a module as it was `built` in whose place others are `here`."""
    kept = {id(parameter) for parameter in here}
    for name, parameter in built:
        if id(parameter) not in kept and type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter
            parameter.replaced_name = name  # type: ignore[attr-defined]


def _changes_first(name: str) -> bool:
    """Tell whether a function of this name changes its first argument in place."""
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or name.startswith("__i")
    return name.endswith("_")


def _goes_beyond(args: Sequence[Any]) -> bool:
    """Tell whether what is changed is no absent tensor where what it is changed by is one.

    Lists are changed tensor by tensor.
    """
    first, *others = args
    if not isinstance(first, list | tuple):
        return not isinstance(first, AbsentTensor)
    lists = [other for other in others if isinstance(other, list | tuple)]
    return any(
        isinstance(other[at], AbsentTensor) and not isinstance(target, AbsentTensor)
        for other in lists
        for at, target in enumerate(first)
    )


def _whole_zeros(divided: DTensor) -> Tensor:
    return torch.zeros(divided.shape, dtype=divided.dtype, device=divided.device)


def _as_absent(tensor: Tensor, source: AbsentTensor) -> Tensor:
    if isinstance(tensor, AbsentTensor):
        return tensor
    result = tensor.as_subclass(AbsentTensor)
    result.absent_name, result.failed = source.absent_name, source.failed
    _made.append((StorageWeakRef(tensor.untyped_storage()), source))
    return result


_made: list[tuple[StorageWeakRef, AbsentTensor]] = []
"""Memory of what was made of absent parameters since the last step: `p.data = made` takes it."""


def refuse_absent_memory(parameters: Iterable[Tensor]) -> None:
    """Notice parameters whose `data` is what was made of absent ones."""
    taken = {parameter.untyped_storage()._cdata for parameter in parameters}
    for memory, source in _made:
        if not memory.expired() and memory.cdata in taken:
            source.failed(_error(source))
            break


def forget_absent_memory() -> None:
    """Begin to note anew what is made of absent parameters."""
    _made.clear()


def _error(source: AbsentTensor) -> LaunchError:
    return LaunchError(
        f"{source.absent_name}: is read by the training loop, and another stage of the pipeline "
        "trains it: here it is as it was built. Let a teacher follow by engine.averaged(decay), "
        "read engine.state_dict(), or use a plan without pipeline"
    )
