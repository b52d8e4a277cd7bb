"""Bytes of tensors that are alive at once on this rank: what a plan's peak memory is compared with.

On CUDA the caching allocator counts; this module only asks it.  On CPU no allocator does, and the
resident set of the process keeps freed memory, so every operator's results are watched: a storage
counts from the operator that made it until nothing refers to it any more.  Counted are tensors, not
what a kernel or a collective library allocates inside itself.

Tensors that runtime/host.py put on the host do not count.

Two things bypass operators and are followed separately: FSDP2 frees and refills the storage of a
gathered parameter in place (`UntypedStorage.resize_`), and tensors from before the watch do not
count unless they are named in `existing`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from runtime.host import makes_room, on_host

_left_out: list[None] = []
"""Not empty while what operators return is left out."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leave out what operators return meanwhile: what a device would not store."""
    _left_out.append(None)
    try:
        yield
    finally:
        _left_out.pop()


class LiveMemory:
    """Watches live tensor bytes while its `with` block runs, backward passes included.

    >>> weights = torch.empty(256)
    >>> with LiveMemory(existing=[weights]) as live:
    ...     passing = torch.empty(512) + 1
    ...     del passing
    >>> live.current_bytes, live.peak_bytes
    (1024, 5120)
    """

    def __init__(
        self,
        existing: Iterable[torch.Tensor] = (),
        *,
        device: torch.device | str = "cpu",
        notice: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        """`notice` is a change since the watch began, as `peak_change` counts, and what to call."""
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._count = _StorageCount(notice)
        self._watch: _OperatorWatch | None = None
        self._watching = False
        if not self._on_cuda:
            for tensor in existing:
                self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside the `with` block; each storage counts once."""
        for plain in _plain_tensors(tensor):
            if not on_host(plain):
                self._count.see(plain)

    def __enter__(self) -> Self:
        """Begin to watch; the peak starts at what is alive now."""
        self.reset_peak()
        self._watching = True
        if not self._on_cuda:
            self._watch = _OperatorWatch(self._count)
            self._watch.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Stop to watch; figures stay readable, and what dies later is still taken off."""
        self._count.peak_bytes = self.peak_bytes
        self._watching = False
        if self._watch is not None:
            self._watch.__exit__(*failure)
            self._watch = None

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        if self._on_cuda:
            return torch.cuda.memory_allocated(self._device)
        return self._count.current_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the watch began or since `reset_peak`."""
        if self._on_cuda and self._watching:
            return torch.cuda.max_memory_allocated(self._device)
        return self._count.peak_bytes

    @property
    def peak_change(self) -> int:
        """How many storages had come, gone or changed size when the peak was reached; CPU only."""
        return self._count.peak_change

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Each storage's growth or shrinking since the peak was reset, as (which one, bytes).

        Only counted on CPU.  Storages that were there before come with what they shrink by alone.
        """
        return self._count.changes

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of those storages behind these tensors that are alive and counted."""
        keys = {plain.untyped_storage()._cdata for t in tensors for plain in _plain_tensors(t)}
        return self._count.bytes_of(keys)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Take a tensor that came into being in the watch out of `peak_of_rest_bytes`.

        It is taken out for its whole life, also for the time before this call.
        """
        for plain in _plain_tensors(tensor):
            self._count.leave_out(plain.untyped_storage())

    @property
    def peak_of_rest_bytes(self) -> int:
        """The peak since `reset_peak` of what was not left out; only counted on CPU."""
        return self._count.peak_of_rest_bytes

    def reset_peak(self) -> None:
        """Let the peak begin again at what is alive now."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._count.reset_peak()


class _StorageCount:
    """Sizes of the storages that are alive, each once, and their highest sum."""

    def __init__(self, notice: tuple[int, Callable[[], None]] | None = None) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.peak_change = 0
        self._notice = notice
        self._begun = False
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._reset_bytes = 0
        self._changes: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        """(which life, bytes) since the reset; every life of a storage has its own reference."""
        self._left_out: set[int] = set()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, or its new size if it is counted already."""
        self.resize(tensor.untyped_storage())

    def resize(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            # torch keeps one Python object per storage for as long as the storage itself lives, so
            # the callback means that the memory is gone, not that Python looked away.
            reference = weakref.ref(storage, lambda _: self._forget(key))
            self._alive[key] = (reference, size_bytes)
            self._change(reference, size_bytes)
        elif known[1] != size_bytes:
            self._alive[key] = (known[0], size_bytes)
            self._change(known[0], size_bytes - known[1])
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_change = self.current_bytes, len(self._changes)
        if self._begun and self._notice is not None and len(self._changes) == self._notice[0]:
            self._notice[1]()

    def bytes_of(self, keys: set[int]) -> int:
        return sum(self._alive[key][1] for key in keys & self._alive.keys())

    def _forget(self, key: int) -> None:
        reference, size_bytes = self._alive.pop(key)
        self._change(reference, -size_bytes)

    def _change(self, reference: weakref.ref[torch.UntypedStorage], size_bytes: int) -> None:
        self.current_bytes += size_bytes
        self._changes.append((reference, size_bytes))

    def reset_peak(self) -> None:
        self.peak_bytes = self._reset_bytes = self.current_bytes
        self.peak_change = 0
        self._begun = True
        self._changes.clear()
        self._left_out.clear()

    @property
    def changes(self) -> list[tuple[int, int]]:
        numbers: dict[int, int] = {}
        return [(numbers.setdefault(id(life), len(numbers)), size) for life, size in self._changes]

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is not None:
            self._left_out.add(id(known[0]))

    @property
    def peak_of_rest_bytes(self) -> int:
        now = peak = self._reset_bytes
        for life, size_bytes in self._changes:
            if id(life) not in self._left_out:
                now += size_bytes
                peak = max(peak, now)
        return peak


ASKS_DEVICE = torch.ops.prim.device.default
"""What torch asks fake tensors most often: more than half of all that comes by a mode."""


class _OperatorWatch(TorchDispatchMode):
    """Shows every operator's results to a count.

    The mode also acts in backward: autograd hands the thread state of the call on to its own
    threads.  Wrapper tensors (DTensor) are left to themselves: their operators on local
    tensors come by here again.
    """

    supports_higher_order_operators = True
    """Those that compiled graphs have come by too."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let graphs be made and run in here; their operators come by one by one if traced only."""
        return True

    def __init__(self, count: _StorageCount) -> None:
        super().__init__()
        self._count = count
        # Outside a fake mode, fake tensors are how DTensor works out shapes.
        self._fake = detect_fake_mode() is not None
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._restore = _follow_resizes(self._count)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if self._restore is not None:
            self._restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(issubclass(kind, torch.Tensor) and _wraps(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if makes_room() or _left_out:
            return result
        given: set[int] | None = None
        for tensor in _tensors_in(result):
            storage = _storage(tensor)
            if storage is None or (isinstance(tensor, FakeTensor) and not self._fake):
                continue
            if not self._count.knows(storage):
                if given is None:
                    given = {s._cdata for t in _tensors_in((args, kwargs)) if (s := _storage(t))}
                if storage._cdata in given:  # a view of a tensor from before the watch
                    continue
            self._count.resize(storage)
        return result


def _follow_resizes(count: _StorageCount) -> Callable[[], None]:
    """Count storages that are resized in place; return what undoes it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if storage.device.type != "meta" or count.knows(storage):  # a fake tensor's is on meta
            count.resize(storage)
        return result

    def restore() -> None:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    # torch has no hook for it.
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    return restore


def _wraps(kind: type) -> bool:
    """Whether tensors of this class hold other tensors, as DTensor does."""
    return hasattr(kind, "__tensor_flatten__")


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own inside a tensor: a DTensor's local one."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _tensors_in(getattr(tensor, name))
    elif _storage(tensor) is not None:
        yield tensor


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts of an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield from _plain_tensors(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return where the tensor's bytes are; None if it has none (sparse, meta).

    Fake tensors, which stand for real ones, keep their storages on meta.
    """
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return None
    if storage.device.type == "meta" and not isinstance(tensor, FakeTensor):
        return None
    return storage
