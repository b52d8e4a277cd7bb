"""Activations of a layer between forward and backward: moved to the host, or packed into 8 bits.

Autograd hands every tensor that it saves to the layer's `Packing`, and asks for it again in
backward.  What selective recompute keeps goes the same way; what is recomputed never comes by.
Left where they are: parameters (also the gathered ones of ZeRO-3, which come and go by themselves),
buffers and constants that the layer's modules hold, and whatever is smaller than LEAST_ELEMENTS.
Tensors that share memory are packed once.

Bytes that stay on the device, of B stored bytes of a layer and micro-batch:
    offload     none, but for the layers under way: forward has a layer's B until the layer after
                the next one begins, and backward has those of this layer and of the one before it.
                When a row of offloaded layers ends, all of theirs have left
    compress    B / 2 in 16 bits and B / 4 in 32, and B / 64 or B / 128 of scales (4 bytes for every
                GROUP elements); backward has the B of one layer, unpacked
Both count storages of at least LEAST_ELEMENTS elements; compress only floating types.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from meshwright.planner.documents.plan import Activations
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.torch_internals import AsyncCollectiveTensor

LEAST_ELEMENTS = 1024
GROUP = 128
"""Neighbours in memory that share a scale."""
_LARGEST = 127
_HIDDEN = -128
"""Code for -inf."""
Beside = Callable[[], Iterable[Tensor]]
"""Tensors beside a layer that it reads and that are no activations, as they are now."""


class Parcel(Protocol):
    """Elements of one storage, packed."""

    def elements(self) -> Tensor:
        """Return the elements, [element], on the device."""
        ...


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor: a view into a parcel.  `like` is set if it was a DTensor."""

    parcel: Parcel
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    like: tuple[Any, ...] | None

    def tensor(self) -> Tensor:
        local = self.parcel.elements().as_strided(self.size, self.stride, self.offset)
        if self.like is None:
            return local
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(slots=True)
class _Call:
    """One forward of a layer: what it met, and the parcels that it made."""

    resident: set[int]
    """Storages that stay whatever happens here."""
    previous: _Call | None
    """The forward of the layer before, on the same micro-batch."""
    seen: dict[Any, tuple[weakref.ref[torch.UntypedStorage], Parcel]] = field(default_factory=dict)
    parcels: list[weakref.ref[_OnHost]] = field(default_factory=list)
    fetched: bool = False


class Packing:
    """The packing of the tensors that one layer saves."""

    def __init__(self, layer: nn.Module, beside: Beside = tuple) -> None:
        """Leave the layer's own tensors in place, and what `beside` returns in each forward."""
        self._layer = layer
        self._beside = beside
        self._constants = {_storage(tensor) for tensor in _constants(layer)}
        self._call: _Call | None = None

    def around(self, layer: nn.Module) -> None:
        """Act on every forward of `layer`: this packing's own, or what recompute made of it."""
        forward = layer.forward

        def pack_call(*args: Any, **kwargs: Any) -> Any:
            with self.acting():
                return forward(*args, **kwargs)

        layer.forward = pack_call

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Act on what autograd saves inside: one forward of the layer."""
        self._call = self._begin_call()
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._call.seen.clear()
            self._call = None
            self._end_call()

    def leave_parameters(self, unit: nn.Module) -> None:
        """Leave the parameters of a unit where they are, which it gathers inside of the layer."""
        forward = unit.forward

        def note_call(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None:
                self._call.resident |= {_storage(parameter) for parameter in unit.parameters()}
            return forward(*args, **kwargs)

        unit.forward = note_call

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what waits for backward in place of a tensor."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        local = to_local(tensor)
        call = self._call
        if call is None or not self._is_packed(local, call):
            return tensor.detach()
        start, length = _span(local)
        storage = local.untyped_storage()
        key = (storage._cdata, local._version, local.dtype, start, length)
        parcel = call.seen.get(key)
        if parcel is None or parcel[0]() is None:
            span = local.as_strided((length,), (1,), start)
            parcel = (weakref.ref(storage), self._parcel(span, call))
            call.seen[key] = parcel
        like = None
        if isinstance(tensor, DTensor):
            like = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        offset = int(local.storage_offset()) - start
        return _View(parcel[1], tuple(local.shape), local.stride(), offset, like)

    @torch.no_grad()
    def unpack(self, waiting: Tensor | _View) -> Tensor:
        """Return the tensor again."""
        return waiting.tensor() if isinstance(waiting, _View) else waiting

    def _is_packed(self, tensor: Tensor, call: _Call) -> bool:
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= LEAST_ELEMENTS * tensor.itemsize
            and _span(tensor)[1] >= LEAST_ELEMENTS
            and storage._cdata not in call.resident
        )

    def _begin_call(self) -> _Call:
        # Anew in each forward, since data parallelism puts gathered parameters in their place.
        stay = {_storage(tensor) for tensor in (*self._layer.parameters(), *self._beside())}
        return _Call(self._constants | stay, None)

    def _end_call(self) -> None:
        """The layer's forward is done."""

    def _parcel(self, span: Tensor, call: _Call) -> Parcel:
        raise NotImplementedError


class Compressing(Packing):
    """Packs floating tensors into 8 bits, with a loss (see `Compressed`)."""

    def _is_packed(self, tensor: Tensor, call: _Call) -> bool:
        return tensor.is_floating_point() and super()._is_packed(tensor, call)

    def _parcel(self, span: Tensor, call: _Call) -> Parcel:
        return Compressed(span)


class Compressed:
    """Elements as 8-bit integers, each GROUP of neighbours with a scale of its own.

    The scale is the group's largest magnitude / 127, so an element is off by at most 1 / 254 of it.
    -inf, where masks hide a score, stays what it is and counts for no scale.
    """

    def __init__(self, span: Tensor) -> None:
        """`span`  [element]."""
        self._dtype, self._length = span.dtype, span.numel()
        groups = span.float()
        lacking = -self._length % GROUP
        if lacking:
            groups = torch.cat((groups, groups.new_zeros(lacking)))
        groups = groups.view(-1, GROUP)
        magnitude = groups.abs().masked_fill_(groups == -torch.inf, 0.0)
        self._scale = magnitude.amax(dim=1, keepdim=True) / _LARGEST
        del magnitude
        steps = groups / self._scale.clamp(min=torch.finfo(torch.float32).tiny)
        self._steps = steps.round_().clamp_(min=_HIDDEN).to(torch.int8)
        self._whole: Tensor | None = None

    def elements(self) -> Tensor:
        """Return the elements, rounded, in their own type."""
        if self._whole is None:
            values = (self._steps * self._scale).to(self._dtype)
            values.masked_fill_(self._steps == _HIDDEN, -torch.inf)
            self._whole = values.flatten()[: self._length]
        return self._whole


class HostTraffic:
    """The transfers of one stage's layers to the host and back."""

    LAYERS_ON_THE_WAY = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._leaving: deque[_Call] = deque()
        self._latest: _Call | None = None

    def begin(self, call: _Call, *, first: bool) -> None:
        """A layer's forward begins: those long past have left the device."""
        call.previous = None if first else self._latest
        self._latest = call
        self._leaving.append(call)
        on_the_way = self.LAYERS_ON_THE_WAY if self.device.type == "cuda" else 1
        while len(self._leaving) > on_the_way:
            for parcel in _alive(self._leaving.popleft()):
                parcel.leave()

    def end(self) -> None:
        """A row of layers that offload ends: before anything else runs, all have left."""
        while self._leaving:
            for parcel in _alive(self._leaving.popleft()):
                parcel.leave()

    def fetch(self, call: _Call) -> None:
        """A layer's backward begins: its parcels come back, and those of the layer before it."""
        for each_call in (call, call.previous):
            if each_call is not None and not each_call.fetched:
                each_call.fetched = True
                for parcel in _alive(each_call):
                    parcel.fetch()
        call.previous = None


class Offloading(Packing):
    """Moves tensors to the host."""

    def __init__(
        self,
        layer: nn.Module,
        traffic: HostTraffic,
        *,
        first: bool,
        last: bool,
        beside: Beside = tuple,
    ) -> None:
        super().__init__(layer, beside)
        self._traffic, self._first, self._last = traffic, first, last

    def _begin_call(self) -> _Call:
        call = super()._begin_call()
        self._traffic.begin(call, first=self._first)
        return call

    def _end_call(self) -> None:
        if self._last:
            self._traffic.end()

    def _parcel(self, span: Tensor, call: _Call) -> Parcel:
        parcel = _OnHost(span, call, self._traffic)
        call.parcels.append(weakref.ref(parcel))
        return parcel


class _OnHost:
    """Elements on the host.  Until they have left, and from `fetch` on, the device has them too."""

    def __init__(self, span: Tensor, call: _Call, traffic: HostTraffic) -> None:
        self._call, self._traffic = call, traffic
        self._home = host.to_host(span)
        # The copy reads this memory, which must not be used for anything else before it is done.
        self._here: Tensor | None = span if self._home.done is not None else None
        self._back: host.Copied | None = None

    def leave(self) -> None:
        """Give the device's memory back, once the copy is done."""
        if self._here is not None:
            self._home.wait()
            self._here = None

    def fetch(self) -> None:
        """Start the way back."""
        if self._here is None and self._back is None:
            # Behind the way out: `leave` has let the current stream wait for it.
            self._back = host.to_device(self._home.tensor, self._traffic.device)

    def elements(self) -> Tensor:
        """Return the elements on the device."""
        self._traffic.fetch(self._call)
        if self._here is not None:
            return self._here
        self.fetch()
        assert self._back is not None
        return self._back.wait()

    def __del__(self) -> None:
        if self._back is not None:  # its memory may be used anew only behind the copy into it
            self._back.wait()


def _alive(call: _Call) -> list[_OnHost]:
    return [parcel for reference in call.parcels if (parcel := reference()) is not None]


def _constants(layer: nn.Module) -> Iterator[Tensor]:
    """Yield buffers, and tensors that modules hold by themselves: rotary tables, masks."""
    yield from layer.buffers()
    for module in layer.modules():
        attributes = [value for name, value in vars(module).items() if not name.startswith("_")]
        yield from (leaf for leaf in tree_leaves(attributes) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return to_local(tensor).untyped_storage()._cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return (first element, elements) of what is packed for a tensor: its storage, or its part.

    A part moves alone where it is less than half of the storage: of a whole batch of tokens, say.
    """
    total = tensor.untyped_storage().nbytes() // tensor.itemsize
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    if 2 * length < total:
        return int(tensor.storage_offset()), length
    return 0, total


def packing(
    layer: nn.Module,
    activations: Activations,
    traffic: HostTraffic,
    *,
    first: bool,
    last: bool,
    beside: Beside = tuple,
) -> Packing | None:
    """Return what packs a layer's tensors as its plan says; None keeps them.

    `first` and `last` are those of a row of layers of a stage that all offload.
    """
    match activations:
        case "keep":
            return None
        case "compress":
            return Compressing(layer, beside)
        case "offload":
            return Offloading(layer, traffic, first=first, last=last, beside=beside)
        case _:
            assert_never(activations)


def row_ends(choices: Iterable[Activations]) -> list[tuple[bool, bool]]:
    """[layer of a stage] Whether a row of layers that all offload begins with it, and ends.

    >>> row_ends(["offload", "offload", "keep"])[:2]
    [(True, False), (False, True)]
    """
    moved = [False, *(choice == "offload" for choice in choices), False]
    return [(not before, not behind) for before, behind in zip(moved, moved[2:], strict=False)]
