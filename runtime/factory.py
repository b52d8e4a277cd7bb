"""A user's own model: `file.py:factory`, a function that returns a chain of modules.

    def factory():                       # nn.Sequential, or a list of modules
        return nn.Sequential(Embedding(...), Block(...), ..., Head(...))

Each module takes one tensor and returns one.  The first gets token numbers [sample, position], the
last returns logits [sample, position, vocabulary]; or the file has its own `loss(output, targets)`,
a mean over the samples, for targets [sample, position] that are the tokens one position on.

The factory runs on the CPU in every rank, under the plan's seed, so that all start alike; a rank
then keeps its own layers only.  It also runs with fake tensors, to learn shapes and costs.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from planner.errors import DocumentError, LaunchError
from planner.model import Layer, LayerTrace, ModelGraph
from runtime.adapter import TensorStyle, next_token_loss
from runtime.trace import traced

OUR_PACKAGES = ("planner", "runtime", "profiler", "meshwright")


class FactoryChain:
    """Adapter of a user's chain."""

    def __init__(self, model: ModelGraph, source: str, *, seed: int, dtype: torch.dtype) -> None:
        self.model = model
        self.tied_names: frozenset[str] = frozenset()
        self._source = source
        self._dtype = dtype
        self._file = _load(source)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            modules = _chain(self._file, source)
        names = [name for name, _ in model.chain]
        if len(names) != len(modules):
            raise LaunchError(
                f"{source}: returns {len(modules)} modules, and the plan's model has {len(names)}"
            )
        self._layers = dict(zip(names, modules, strict=True))
        self._loss = getattr(self._file, "loss", next_token_loss)

    def layer(self, name: str) -> nn.Module:
        """Return a layer as the factory made it."""
        return self._layers[name]

    def tie(self, layers: Mapping[str, nn.Module]) -> None:
        """Refuse weights that layers of two stages share; inside a stage the factory tied them."""
        here = {id(p) for layer in layers.values() for p in layer.parameters()}
        for name, layer in self._layers.items():
            if name not in layers and any(id(p) in here for p in layer.parameters()):
                raise LaunchError(
                    f"{self._source}: layer '{name}' shares a weight with a layer of another "
                    "stage; place both in one stage"
                )

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Refuse: a factory gives its parameters their values."""
        raise LaunchError(f"{self._source}: parameter '{name}' is on the meta device, without data")

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Return no style: tensor parallelism is refused."""
        return {}

    def published_name(self, name: str) -> str:
        """The names here are the only ones."""
        return name

    def pieces(self, name: str) -> int:
        """No parameter here holds several matrices."""
        return 1

    def boundary(self, layer: str, tokens: Tensor) -> Tensor:
        """Run the chain with fake tensors up to this layer, in the types that FSDP casts to."""
        with FakeTensorMode():
            x = torch.zeros(tokens.shape, dtype=tokens.dtype)
            for name, module in zip(self._layers, _chain(self._file, self._source), strict=True):
                cast = {n: p.to(self._dtype) for n, p in module.named_parameters()}
                x = functional_call(module, cast, x.to(self._dtype) if x.is_floating_point() else x)
                if name == layer:
                    break
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the file's own loss, or next-token cross-entropy."""
        result: Tensor = self._loss(output, targets)
        return result


def graph_of_factory(source: str, *, seq_len: int) -> ModelGraph:
    """Return the ModelGraph of a user's chain; figures are traced for one sample of `seq_len`.

    Layers of one class with parameters of the same shapes and the same traced cost are one kind.
    """
    file = _load(source)
    try:
        with FakeTensorMode():
            modules = _chain(file, source)
            tokens = torch.zeros((1, seq_len), dtype=torch.int64)
            figures = [layer.figures for layer in traced(modules, tokens)]
    except DocumentError:
        raise
    except Exception as error:
        raise DocumentError(
            "", f"cannot be traced: {type(error).__name__}: {error}", file=source
        ) from error
    kinds = _kinds(modules, figures)
    counts = _own_parameters(modules)
    layers = []
    rows = zip(kinds, counts, figures, strict=True)
    for (kind, count, trace), run in itertools.groupby(rows):
        layers.append(
            Layer(name=kind, kind=kind, repeat=len(list(run)), parameters=count, trace=trace)
        )
    return ModelGraph(name=source.rpartition("/")[2], source=source, layers=tuple(layers))


def _kinds(modules: Sequence[nn.Module], figures: Sequence[LayerTrace]) -> list[str]:
    """Name each module's kind: its class, numbered from the second kind of that class on."""
    names: dict[Any, str] = {}
    used: dict[str, int] = {}
    result = []
    for module, trace in zip(modules, figures, strict=True):
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        identity = (type(module), shapes, trace)
        if identity not in names:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()
            used[name] = used.get(name, 0) + 1
            names[identity] = name if used[name] == 1 else f"{name}_{used[name]}"
        result.append(names[identity])
    return result


def _own_parameters(modules: Sequence[nn.Module]) -> list[int]:
    """Count each module's parameters; one shared with an earlier module counts there."""
    seen: set[int] = set()
    result = []
    for module in modules:
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in seen}
        seen |= set(own)
        result.append(sum(own.values()))
    return result


def _load(source: str) -> ModuleType:
    """Import a user's file.  Its folder comes last on the path, so it hides nothing of ours."""
    path = Path(source.rpartition(":")[0]).resolve()
    if not path.is_file():
        raise DocumentError("", f"there is no file {path}", file=source)
    for name in OUR_PACKAGES:
        theirs = [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
        ours = importlib.util.find_spec(name)
        for candidate in theirs:
            if candidate.exists() and (ours is None or Path(str(ours.origin)) != candidate):
                raise DocumentError(
                    "",
                    f"{candidate} has the name of one of Meshwright's packages; rename it",
                    file=source,
                )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"_factory_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _theirs(source, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _chain(file: ModuleType, source: str) -> list[nn.Module]:
    """Call the factory and check what it returns."""
    name = source.rpartition(":")[2]
    factory = getattr(file, name, None)
    if not callable(factory):
        raise DocumentError("", f"has no function '{name}'", file=source)
    made = _theirs(source, factory)
    modules = list(made) if isinstance(made, nn.Sequential | nn.ModuleList | list | tuple) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise DocumentError(
            "", f"{name}() must return an nn.Sequential or a list of modules", file=source
        )
    for module in modules:
        for part in module.modules():
            _refuse_plan_dependent(part, source)
    return modules


def _refuse_plan_dependent(module: nn.Module, source: str) -> None:
    """Refuse modules whose results depend on how a batch is cut, so on the plan."""
    name = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise DocumentError("", f"has a {name}; use a norm over one sample", file=source)
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise DocumentError("", f"has a {name} with p={module.p:g}; set p=0", file=source)


def _theirs(source: str, call: Callable[[], Any]) -> Any:
    """Run a user's code; what goes wrong there is told as theirs."""
    try:
        return call()
    except Exception as error:
        raise DocumentError("", f"raised {type(error).__name__}: {error}", file=source) from error
