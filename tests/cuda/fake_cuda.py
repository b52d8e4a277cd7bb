"""torch.cuda as a process with one device sees it, without a device: figures, streams, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from meshwright.runtime.core import pinned_memory as host
from tests.cuda.streams import WORLD, Event, Graph, Stream, captured, is_pinned, pin

MEMORY_BYTES = 80 * 10**9
FIGURES = {
    "name": "NVIDIA H100 80GB HBM3",
    "total_memory": MEMORY_BYTES,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
}


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Let torch believe in one device for as long as the block runs."""
    made = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        result = made(*args, **more)
        return pin(result) if pin_memory else result

    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        return pin(tensor.clone())

    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            WORLD.freed(storage._cdata, gone=False)
        return resize(storage, size)

    class Generator(torch.Generator):
        def __new__(cls, device: object = "cpu") -> Generator:
            return super().__new__(cls)

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "stream": WORLD.on,
        "CUDAGraph": Graph,
        "graph": captured,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: WORLD.current(),
        "default_stream": lambda device=None: WORLD.default,
        "synchronize": WORLD.everything_done,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: SimpleNamespace(**FIGURES),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: FIGURES["name"],
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(
            mock.patch.object(torch.accelerator, "current_stream", names["current_stream"])
        )
        stack.enter_context(mock.patch.object(host, "pin", lambda segment: None))
        stack.enter_context(mock.patch.object(torch, "empty", empty))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", pin_memory))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", is_pinned))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _recorded))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        # Where CUDA is there, fake tensors would start it.
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(nn.Module, "to", _to))
        yield


def _to(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Change the type of floating parameters; torch's own cannot swap those that are fake."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                new = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
                part._parameters[name] = made.setdefault(id(old), new)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


def _recorded(tensor: Tensor, stream: Stream) -> None:
    WORLD.recorded(tensor, stream)
