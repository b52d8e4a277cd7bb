"""Bytes of tensors that are alive at once on this rank: what a plan's peak memory is compared with.

On CUDA the caching allocator counts.  On CPU no allocator does, and the resident set of the process
keeps freed memory, so every operator's results are watched here: a storage counts from the operator
that made it until nothing refers to it any more.  Counted are tensors, not what a kernel or a
collective library allocates inside itself.

Tensors that runtime/core/pinned_memory.py put on the host do not count.

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

from meshwright.runtime.core.pinned_memory import makes_room, on_host


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out, on a device or on the host.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape"))
    (True, False)
    """
    kinds = torch.OutOfMemoryError, MemoryError
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate" in str(error)


_left_out: list[None] = []
"""Not empty while what operators return is left out."""
ASKS_DEVICE = torch.ops.prim.device.default
"""The operator most often called on fake tensors: more than half of all calls to a mode."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leave out what operators return meanwhile: what a device would not store."""
    _left_out.append(None)
    try:
        yield
    finally:
        _left_out.pop()


class LiveMemory(TorchDispatchMode):
    """Watches live tensor bytes while its `with` block runs, backward passes included.

    Figures stay readable behind it, and what dies later is still taken off.  Autograd hands the
    mode on to its own threads.  Wrapper tensors (DTensor) are left to themselves: their operators
    on local tensors come by here again.

    >>> weights = torch.empty(256)
    >>> with LiveMemory(existing=[weights]) as live:
    ...     passing = torch.empty(512) + 1
    ...     del passing
    >>> live.current_bytes, live.peak_bytes
    (1024, 5120)
    """

    supports_higher_order_operators = True
    """Operators of compiled graphs reach this mode too."""

    def __init__(
        self,
        existing: Iterable[torch.Tensor] = (),
        *,
        notice: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        """`notice` is a change since the watch began, as `peak_change` counts, and what to call."""
        super().__init__()
        self.current_bytes = 0
        """Bytes alive now."""
        self.peak_bytes = 0
        """Most bytes alive at once since the watch began or since `reset_peak`."""
        self.peak_change = 0
        """Number of changes (storages allocated, freed or resized) when the peak was reached."""
        self._reset_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._changes: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        """(which life, bytes) since the reset; every life of a storage has its own reference."""
        self._left_out: set[int] = set()
        self._resize = torch.UntypedStorage.resize_
        self._notice: tuple[int, Callable[[], None]] | None = None
        for tensor in existing:
            self.add(tensor)
        self._notice = notice
        # Outside a fake mode, fake tensors are how DTensor works out shapes.
        self._fake = detect_fake_mode() is not None

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside the `with` block; each storage counts once."""
        for plain in _tensors_in(tensor):
            if not on_host(plain):
                self._count(plain.untyped_storage())

    def __enter__(self) -> Self:
        """Begin to watch; the peak starts at what is alive now."""
        self.reset_peak()
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            # A fake tensor's is on meta.
            if storage.device.type != "meta" or storage._cdata in self._alive:
                self._count(storage)
            return result

        # torch has no hook for it.
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        """Stop to watch."""
        super().__exit__(*failure)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let graphs be made and run in here; their operators come by one by one if traced only."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it made."""
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if makes_room() or _left_out:
            return result
        given: set[int] | None = None
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if isinstance(tensor, FakeTensor) and not self._fake:
                continue
            if storage._cdata not in self._alive:
                if given is None:
                    given = {t.untyped_storage()._cdata for t in _tensors_in((args, kwargs))}
                if storage._cdata in given:  # a view of a tensor from before the watch
                    continue
            self._count(storage)
        return result

    def reset_peak(self) -> None:
        """Let the peak begin again at what is alive now."""
        self.peak_bytes = self._reset_bytes = self.current_bytes
        self.peak_change = 0
        self._changes.clear()
        self._left_out.clear()

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Each storage's growth or shrinking since the peak was reset, as (which one, bytes).

        Storages that were there before come with what they shrink by alone.
        """
        numbers: dict[int, int] = {}
        return [(numbers.setdefault(id(life), len(numbers)), size) for life, size in self._changes]

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of those storages behind these tensors that are alive and counted."""
        keys = {plain.untyped_storage()._cdata for plain in _tensors_in(list(tensors))}
        return sum(self._alive[key][1] for key in keys & self._alive.keys())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Take a tensor that came into being in the watch out of `peak_of_rest_bytes`.

        It is taken out for its whole life, also for the time before this call.
        """
        for plain in _tensors_in(tensor):
            allocation = self._alive.get(plain.untyped_storage()._cdata)
            if allocation is not None:
                self._left_out.add(id(allocation[0]))

    @property
    def peak_of_rest_bytes(self) -> int:
        """The peak since `reset_peak` of what was not left out."""
        now = peak = self._reset_bytes
        for life, size_bytes in self._changes:
            if id(life) not in self._left_out:
                now += size_bytes
                peak = max(peak, now)
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size if it is counted already."""
        key, size_bytes = storage._cdata, storage.nbytes()
        # torch keeps one Python object per storage for as long as the storage itself lives, so the
        # callback means that the memory is gone, not that Python looked away.
        life, before = self._alive.get(key) or (
            weakref.ref(storage, lambda _: self._forget(key)),
            0,
        )
        if key not in self._alive or size_bytes != before:
            self._alive[key] = (life, size_bytes)
            self._changes.append((life, size_bytes - before))
            self.current_bytes += size_bytes - before
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_change = self.current_bytes, len(self._changes)
        if self._notice is not None and len(self._changes) == self._notice[0]:
            self._notice[1]()

    def _forget(self, key: int) -> None:
        life, size_bytes = self._alive.pop(key)
        self._changes.append((life, -size_bytes))
        self.current_bytes -= size_bytes


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own in an operator's arguments or results.

    Of a DTensor that is its local one; sparse and meta tensors have none.  Fake tensors, which
    stand for real ones, keep their storages on meta.
    """
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors_in(getattr(value, name))
            return
        with contextlib.suppress(NotImplementedError):
            if value.untyped_storage().device.type != "meta" or isinstance(value, FakeTensor):
                yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)
