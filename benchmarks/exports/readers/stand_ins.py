"""What a machine without an accelerator lacks: compiled packages and answers about CUDA."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
import typing_extensions

typing.override = getattr(typing, "override", typing_extensions.override)  # Python 3.11


ABSENT = ("triton._torchtlx_default",)
"""What torch 2.15 reads a setting from where triton has it; triton 3.9.0 does not."""


class _Enumeration(type):
    """Of classes that have whatever member they are asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = MagicMock(name=f"{cls.__name__}.{name}")
        setattr(cls, name, member)
        return member


class _Module(types.ModuleType):
    """Has whatever it is asked for: classes by capital letters, decorators that change nothing."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        plain = name.lstrip("_")
        found: Any
        if plain in ("jit", "autotune", "heuristics"):
            found = _unchanged
        elif plain[:1].isupper():
            found = _Enumeration(name, (), {"__init__": lambda self, *a, **k: None})
        else:
            found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


def _unchanged(*given: Any, **options: Any) -> Any:
    bare = len(given) == 1 and callable(given[0]) and not options
    return given[0] if bare else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ABSENT and any(
            name == known or name.startswith(f"{known}.") for known in self.names
        ):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def packages(*names: str) -> None:
    """Let packages be imported that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))


def cuda() -> None:
    """Answer as a node of eight H100."""
    properties = types.SimpleNamespace(
        major=9, minor=0, name="H100", total_memory=80 << 30, multi_processor_count=132
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    torch.cuda.get_device_properties = lambda *a: properties
    torch.cuda.get_device_name = lambda *a: "NVIDIA H100"
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_bf16_supported = lambda *a, **k: True


def each(read: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read every case of the file that is named, and write what each one came to."""
    source, target = sys.argv[1:3]
    cases = json.loads(Path(source).read_text())
    results = []
    for case in cases:
        try:
            results.append({"found": read(case)})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # parsers leave by SystemExit
            last = str(error).strip().splitlines() or [""]
            results.append({"error": f"{type(error).__name__}: {last[-1]:.300}"})
    Path(target).write_text(json.dumps(results))
