"""Streams, events and synchronisation of a CUDA device that is not there, as they order work.

Work on one stream runs in order; work on two does so only where one waits for the other.  Every
stream has a clock: for each stream, up to where its work is done when this stream's next work
begins.  An operator that reads a storage must run behind the one that wrote it, one that writes
behind those that read it, and memory that was given back to its stream may become a new tensor
there only behind all work on it, as the caching allocator does it.  The host is a stream too: it
waits by synchronising.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.runtime.core.memory_tracker import ASKS_DEVICE
from meshwright.runtime.core.pinned_memory import on_host

ROOT = f"{Path(__file__).parents[2]}/meshwright/"
OWN = (f"{ROOT}runtime/", f"{ROOT}profiler/")
TYPED = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_fused_adamw_")
_names = itertools.count()


class Stream:
    """Work in order.  `clock` says what is done before its next work."""

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.name = name or f"stream {next(_names)}"
        self.clock: dict[str, int] = {self.name: 0}
        self.free: list[tuple[dict[str, int], str]] = []
        """Uses, by stream, of memory that was given back since a tensor was made here."""
        self.device = torch.device("cuda", 0)

    def behind(self, clock: dict[str, int]) -> None:
        for name, done in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), done)

    def wait_stream(self, other: Stream) -> None:
        self.behind(other.clock)

    def wait_event(self, event: Event) -> None:
        self.behind(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        WORLD.synced("Stream.synchronize", self.clock)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or WORLD.current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or WORLD.current()).wait_event(self)

    def synchronize(self) -> None:
        WORLD.synced("Event.synchronize", self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


@dataclass
class Use:
    """Who used a storage: where it was made, the last write, and reads since."""

    made_on: Stream
    life: weakref.ref[Any] | None = None
    written: tuple[Stream, int, str] | None = None
    read: dict[str, int] = field(default_factory=dict)
    every: dict[str, int] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class World:
    """All streams and storages of one path."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.host = Stream(name="host")
        self.default = Stream(name="default")
        self._main = threading.get_ident()
        self._streams: dict[int, Stream] = {}
        """The stream of each thread; autograd's own go by that of the thread that waits for it."""
        self.capturing: Graph | None = None
        self.uses: dict[int, Use] = {}
        self.races: list[str] = []
        self.syncs: list[str] = []
        self.products: dict[str, set[str]] = {}
        self.replays = self.crossings = 0
        """Reads of what another stream wrote."""

    def current(self) -> Stream:
        streams = self._streams
        return streams.get(threading.get_ident()) or streams.get(self._main) or self.default

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        thread = threading.get_ident()
        before = self._streams.get(thread)
        self._streams[thread] = stream or self.current()
        try:
            yield
        finally:
            del self._streams[thread]
            if before is not None:
                self._streams[thread] = before

    def synced(self, what: str, clock: dict[str, int]) -> None:
        self.host.behind(clock)
        self.syncs.append(f"{what} at {where()}")
        if self.capturing is not None:
            self._race(f"{what} inside of a capture")

    def everything_done(self, *_: Any) -> None:
        merged = {self.default.name: self.default.clock[self.default.name]}
        for use in self.uses.values():
            for name, at in use.every.items():
                merged[name] = max(merged.get(name, 0), at)
        self.synced("synchronize", merged)

    def work(self, name: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Queue one operator on a stream, and look at what it stands behind."""
        if self.capturing is not None:
            self.capturing.take(name, stream, reads, writes)
            return
        stream.behind(self.host.clock)
        at = stream.clock[stream.name] = stream.clock[stream.name] + 1
        for tensor in reads:
            use = self._use(tensor, stream)
            if use.written is not None:
                writer, when, by = use.written
                self.crossings += writer is not stream
                if stream.clock.get(writer.name, 0) < when:
                    self._race(f"{name} on {stream.name} reads what {by} writes on {writer.name}")
            use.read[stream.name] = use.every[stream.name] = at
        for tensor in writes:
            use = self._use(tensor, stream)
            for other, when in use.every.items():
                if stream.clock.get(other, 0) < when:
                    self._race(f"{name} on {stream.name} writes what is in use on {other}")
            use.written, use.read = (stream, at, name), {}
            use.every[stream.name] = at

    def freed(self, key: int, *, gone: bool = True) -> None:
        """Give a storage's memory back: the stream's next tensor may lie there."""
        use = self.uses.pop(key, None) if gone else self.uses.get(key)
        if use is not None and use.made_on is not self.host:
            late = {n: at for n, at in use.every.items() if n not in use.recorded and n != "host"}
            use.made_on.free.append((late, where()))

    def _taken(self, stream: Stream) -> None:
        """Take memory for a new tensor: maybe what was given back last."""
        for uses, place in stream.free:
            for other, when in uses.items():
                if stream.clock.get(other, 0) < when:
                    name = stream.name
                    self._race(f"memory of {name} freed at {place} is still in use on {other}")
        stream.free.clear()

    def recorded(self, tensor: Tensor, stream: Stream) -> None:
        """Leave a tensor's memory alone until the stream is done with it."""
        use = self.uses.get(tensor.untyped_storage()._cdata)
        if use is not None:
            use.recorded.add(stream.name)

    def _use(self, tensor: Tensor, stream: Stream) -> Use:
        storage = tensor.untyped_storage()
        key = storage._cdata
        use = self.uses.get(key)
        if use is None:
            maker = self.host if on_host(tensor) else stream  # whose blocks wait by themselves
            self._taken(maker)
            use = self.uses[key] = Use(made_on=maker)
            use.life = weakref.ref(storage, lambda _: self.freed(key))
        return use

    def _race(self, text: str) -> None:
        self.races.append(f"{text}, at {where()}")


class Graph:
    """Work that was captured, whose memory is its own, and that runs where it is replayed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._works: list[tuple[str, list[Tensor], list[Tensor]]] = []
        self._stream: Stream | None = None

    def take(self, name: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        if stream is not self._stream:
            WORLD.races.append(f"{name} on {stream.name} inside of a capture, at {where()}")
        self._works.append((name, reads, writes))

    def replay(self) -> None:
        WORLD.replays += 1
        for name, reads, writes in self._works:
            WORLD.work(name, WORLD.current(), reads, writes)


@contextlib.contextmanager
def captured(graph: Graph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """Take what is queued on a stream into a graph; it does not run."""
    assert pool is not None and capture_error_mode == "thread_local"
    WORLD.everything_done()
    with WORLD.on(stream):
        WORLD.capturing, graph._stream = graph, stream
        try:
            yield
        finally:
            WORLD.capturing = None


WORLD = World()


def where() -> str:
    """Return the innermost line of this project that is being executed, tests left out."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OWN):
            return f"{path.removeprefix(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


@dataclass(frozen=True)
class Operator:
    """What an operator's schema says of it."""

    name: str
    is_work: bool
    """It reads or writes memory; views do not."""
    written: tuple[tuple[int, str], ...]
    """Arguments that it changes, by place and name."""
    overwrites: bool
    """It does not read what it changes."""


@functools.cache
def _operator(func: Any) -> Operator:
    space, _, name = func._schema.name.partition("::")
    arguments = enumerate(func._schema.arguments)
    return Operator(
        name,
        space != "prim" and not func.is_view and name not in ("detach", "alias", "wait_tensor"),
        tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write),
        name in ("copy_", "fill_", "zero_"),
    )


class Watch(TorchDispatchMode):
    """Hands every operator on plain tensors to the world."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: operators on its local tensor come by again
        operator = _operator(func)
        if operator.name == "_local_scalar_dense":
            if _on_device(args[0]):
                WORLD.work(operator.name, WORLD.current(), [args[0]], [])
                WORLD.synced("item", WORLD.current().clock)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not operator.is_work:
            return result
        given: list[Tensor] = []
        _collect((args, kwargs), given)
        made: list[Tensor] = []
        _collect(result, made)
        on_device = any(map(_on_device, (*given, *made)))
        stream = WORLD.current() if on_device else WORLD.host
        if operator.name in TYPED:
            types_seen = {str(t.dtype).removeprefix("torch.") for t in given}
            WORLD.products.setdefault(operator.name, set()).update(types_seen)
        changed: list[Tensor] = []
        for index, name in operator.written:
            _collect(args[index] if index < len(args) else kwargs.get(name), changed)
        before = {tensor.untyped_storage()._cdata for tensor in given}
        writes = [*changed, *(t for t in made if t.untyped_storage()._cdata not in before)]
        kept = {id(t) for t in changed} if operator.overwrites else set()
        reads = [] if "empty" in operator.name else [t for t in given if id(t) not in kept]
        WORLD.work(operator.name, stream, reads, writes)
        if on_device and operator.name in ("copy_", "_to_copy"):
            _crossed(operator.name, args, kwargs, given, made, stream)
        return result


def _on_device(tensor: Tensor) -> bool:
    """Whether it lies on the device; what a fake tensor says of itself is an operator more."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def _collect(value: Any, found: list[Tensor]) -> None:
    """Find the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _crossed(
    name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], stream: Stream
) -> None:
    """Count a copy between host and device that the host waits for."""
    target, source = (args[0], given[1]) if name == "copy_" else (made[0], given[0])
    if _on_device(target) == _on_device(source):
        return
    asynchronous = kwargs.get("non_blocking", False) or (
        name == "copy_" and len(args) > 2 and args[2]
    )
    host = target if _on_device(source) else source
    pinned = is_pinned(host) or (name == "_to_copy" and host is target)  # torch pins what it makes
    if not asynchronous:
        WORLD.synced(f"copy to {target.device.type}", stream.clock)
    elif not pinned and host.numel() > 1:
        WORLD.synced(f"copy of pageable memory to {target.device.type}", stream.clock)


_pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_pinned(tensor: Tensor, *_: Any) -> bool:
    return tensor.untyped_storage()._cdata in _pinned or on_host(tensor)


def pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage
    return tensor
