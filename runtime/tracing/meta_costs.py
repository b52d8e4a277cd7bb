"""Costs of recorded layers, traced with fake tensors: no values are computed, no memory is used.

Layers that do the same cost the same, so that one of them is traced for all.  They are told by
their modules, by what is handed to and from them, and by the operators that their recorded forward
ran, with the shapes of all tensors.  Values of tensors play no part.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from meshwright.planner.documents.model import LayerTrace
from meshwright.runtime.tracing.repeated_units import is_block_number
from meshwright.runtime.tracing.trace import (
    Leaf,
    ModuleTensor,
    Node,
    RecordedLayer,
    Recording,
    StageDevice,
    Value,
    values_of,
    word_of,
)


def traced_call(
    call: Callable[[], tuple[Tensor, ...]],
    *,
    owned: Sequence[Tensor],
    loss: Callable[..., Tensor] | None = None,
    saving: Callable[[], None] = lambda: None,
) -> tuple[LayerTrace, tuple[Tensor, ...], int]:
    """Return what a forward and its backward cost, and its outputs or the loss made of them.

    The third is a hash of all operators that allocated, in their order, with the shapes of what
    they made.

    Call it under a FakeTensorMode.  `owned` are parameters and buffers, which count neither as
    stored nor, their gradients, as transient.

    Stored bytes are what autograd has saved when the forward ends, each storage once.  Transient
    bytes are the larger of two peaks: in forward above what remains after it, in backward above
    what was there before it (the output's gradient included).  `loss` of the outputs belongs to the
    layer, as in measurements; then it is what is returned.  `saving` is called for each tensor
    that autograd saves.
    """
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
    owned_keys = {_key(tensor) for tensor in owned}
    forward = _OperatorCosts()
    with _saved_tensors(saved, saving), forward:
        outputs = call()
        handed_on = {_key(output): output.untyped_storage().nbytes() for output in outputs}
        if loss is not None:
            outputs = (loss(*outputs),)
    # Of those that are there at once, no two storages have one address.
    stored = {
        _key(tensor_saved.tensor): tensor_saved.tensor.untyped_storage().nbytes()
        for tensor_saved in saved
    }
    needing = [output for output in outputs if output.requires_grad]
    backward_transient, backward_ran = _backward_peak(needing, owned) if needing else (0, 0)
    figures = LayerTrace(
        forward_flops=float(forward.flops),
        stored_bytes=sum(size for key, size in stored.items() if key not in owned_keys),
        transient_bytes=max(forward.peak() - forward.remaining(), backward_transient),
        output_bytes=sum(handed_on.values()),
    )
    return figures, outputs, hash((forward.ran, backward_ran))


def _backward_peak(outputs: Sequence[Tensor], owned: Sequence[Tensor]) -> tuple[int, int]:
    """Return the most bytes of a backward, and a hash of its operators."""
    backward = _OperatorCosts()
    with backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    peak = backward.peak(without=[tensor.grad for tensor in owned if tensor.grad is not None])
    for tensor in owned:
        tensor.grad = None
    return peak, backward.ran


class _OperatorCosts(TorchDispatchMode):
    """FLOPs, allocations and frees of operators while this mode was on, in order.

    One mode counts all of it: a forward has thousands of operators, and each mode makes one of them
    slower.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to switch that off costs as much as the mode itself.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.ran = 0
        # Storages by number: addresses come again.
        self._number: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._events: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._on = True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            self._watch(tensor, fresh=False)
        count_flops = flop_registry.get(func._overloadpacket)
        if count_flops is None and _is_composite(func):
            with FlopCounterMode(display=False) as parts:
                result = func(*args, **kwargs)
            self.flops += parts.get_total_flops()
        else:
            result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            if tensor.untyped_storage() not in self._number:
                self.ran = hash((self.ran, func, tensor.shape))
            self._watch(tensor, fresh=True)
        if count_flops is not None:
            self.flops += count_flops(*args, **kwargs, out_val=result)
        return result

    def peak(self, without: Sequence[Tensor] = ()) -> int:
        """Most bytes above the beginning, leaving out the storages of some tensors."""
        left_out = {self._number[tensor.untyped_storage()] for tensor in without}
        sums = itertools.accumulate(n for number, n in self._events if number not in left_out)
        return max((0, *sums))

    def remaining(self) -> int:
        """Bytes at the end above the beginning."""
        return sum(n for _, n in self._events)

    def _watch(self, tensor: Tensor, *, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._number:
            number = self._number[storage] = next(self._numbers)
            size_bytes = storage.nbytes()
            if fresh:
                self._events.append((number, size_bytes))
            weakref.finalize(storage, self._free, number, size_bytes)

    def _free(self, number: int, size_bytes: int) -> None:
        if self._on:
            self._events.append((number, -size_bytes))


@functools.cache
def _is_composite(operator: Any) -> bool:
    """Return whether an operator is made of others, whose FLOPs are its own."""
    if operator is torch.ops.prim.device.default:  # which torch asks without a way back
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in operator.py_kernels or bool(operator.has_kernel_for_dispatch_key(key))


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, which may be in lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _SavedTensor:
    """A tensor that autograd saves, as long as it does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output has its node, which has this one


@contextmanager
def _saved_tensors(
    saved: weakref.WeakSet[_SavedTensor], saving: Callable[[], None]
) -> Iterator[None]:
    """Note the tensors that autograd saves while this is open."""

    def pack(tensor: Tensor) -> _SavedTensor:
        saving()
        saved_tensor = _SavedTensor(tensor)
        saved.add(saved_tensor)
        return saved_tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        yield


def plain_attributes(part: nn.Module) -> tuple[tuple[str, int | str], ...]:
    """Return the numbers and words that a module has as attributes, by name.

    A factor that is no whole number (a scale by the depth of a layer) decides nothing of what a
    layer costs; whether it is 0 may.

    >>> dict(plain_attributes(nn.Dropout(0.1)))["p"], dict(plain_attributes(nn.Dropout(0.0)))["p"]
    ('a factor', '0')
    """
    return tuple(
        sorted(
            (key, ("a factor" if value else "0") if isinstance(value, float) else value)
            for key, value in vars(part).items()
            if isinstance(value, int | float | str)
            # The number of a block among its like tells nothing of what it does.
            and not is_block_number(key, value)
        )
    )


def identities(module: nn.Module, recording: Recording) -> list[Hashable]:
    """[layer] Return what is equal of layers that do the same, the whole module's outputs apart.

    >>> from meshwright.runtime.tracing.tracer import Recorder
    >>> import torch
    >>> module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    >>> first, second, third, last = identities(module, Recorder(module, torch.ones(2, 4)).first)
    >>> first == second, second == third, third == last
    (False, True, False)
    """
    return [_LayerIdentity(module, recording).identity_of(layer) for layer in recording.layers]


class _LayerIdentity:
    """The features that identify a layer among others; tensors and units by their order in it."""

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self._module, self._recording = module, recording
        self._numbers: dict[Any, int] = {}

    def identity_of(self, layer: RecordedLayer) -> Hashable:
        recording = self._recording
        nodes = [at for at in range(layer.first, layer.last) if at not in recording.derived]
        is_last = layer.last == len(recording.nodes)
        read = {value for at in nodes for value in values_of(recording.nodes[at].leaves)}
        if is_last:
            read |= values_of(recording.result)
        received = self._values(recording.live(layer.first))
        called = [recording.nodes[at] for at in (*recording.needed_nodes(read), *nodes)]
        calls = tuple(self._call(node) for node in called)
        result = recording.result if is_last else ()
        return received, calls, self._values(recording.live(layer.last)), self._leaves(result)

    def _values(self, values: Iterable[int]) -> Hashable:
        return tuple((self._number(Value(at)), self._recording.values[at]) for at in values)

    def _call(self, node: Node) -> Hashable:
        called = word_of(node.call) if node.unit is None else self._unit(node.unit)
        taken = self._leaves(node.unnumbered_leaves(self._module))
        return (
            called,
            taken,
            node.spec,
            tuple((place, self._values((at,))) for place, at in node.made),
            (node.grad, node.draws, node.changes_held),
            frozenset(self._number(Value(at)) for at in node.changed),
            node.operators,
        )

    def _unit(self, path: str) -> Hashable:
        parts = tuple(
            (
                below,
                type(part),
                part.training,
                self._tensors(part._parameters),
                self._tensors(part._buffers),
                plain_attributes(part),
            )
            for below, part in self._module.get_submodule(path).named_modules()
        )
        return self._number(path), parts

    def _tensors(self, held: dict[str, Any]) -> Hashable:
        return tuple((name, self._tensor(tensor)) for name, tensor in held.items())

    def _tensor(self, held: Any) -> Hashable:
        if not isinstance(held, Tensor):
            return word_of(held)
        return self._number(id(held)), tuple(held.shape), held.dtype, held.requires_grad

    def _leaves(self, leaves: Iterable[Any]) -> Hashable:
        return tuple(self._leaf(leaf) for leaf in leaves)

    def _leaf(self, leaf: Any) -> Hashable:
        match leaf:
            case Value(at):
                return self._values((at,))
            case ModuleTensor(name):
                path, _, attribute = name.rpartition(".")
                return self._tensor(getattr(self._module.get_submodule(path), attribute))
            case Leaf() | StageDevice():
                return leaf
            case float():
                return float, bool(leaf)
            case _:
                return type(leaf), word_of(leaf)

    def _number(self, tensor: Any) -> int:
        return self._numbers.setdefault(tensor, len(self._numbers))
