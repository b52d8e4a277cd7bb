"""A user's own model: `file.py:factory`, a function that returns modules, in a chain or a graph.

    def factory():                       # nn.Sequential, or a list of modules
        return nn.Sequential(Embedding(...), Block(...), ..., Head(...))

    def factory():                       # or a module whose forward(tokens) can be traced
        return UNet(...)                 # (see runtime.unfold)

    def factory():                       # or a dict: each with the names of what it reads
        return {
            "stem": (Stem(...), "tokens"),
            "down": (Down(...), "stem"),
            "up": (Up(...), "down", "stem"),
            "head": (Head(...), "up"),
        }

Each module takes one tensor, or those that it reads in that order, and returns one.  `tokens` are
token numbers [sample, position], what the first module of a chain gets.  The last module, which
nobody reads, returns logits [sample, position, vocabulary]; or the file has its own
`loss(output, targets)`, a sum and what it counts or a mean over the samples, for targets
[sample, position] that are the tokens one position on (-100 where a position does not count).  A
module in a dict stands behind all that it reads.

The factory runs on the CPU in every rank, under the plan's seed, so that all start alike; a rank
then keeps its own layers only.  It also runs with fake tensors, to learn shapes and costs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from planner.documents.model import Edge, Layer, LayerTrace, ModelGraph
from planner.documents.units import name_of
from planner.errors import DocumentError, LaunchError
from runtime.adapter import TOKENS, TensorStyle, next_token_loss
from runtime.loss import counted
from runtime.trace import traced
from runtime.unfold import Piece, layers_of
from runtime.user_code import UserFiles


class FactoryModel:
    """Adapter of a user's chain or graph."""

    def __init__(self, model: ModelGraph, source: str, *, seed: int, dtype: torch.dtype) -> None:
        self.model = model
        self.tied_names: frozenset[str] = frozenset()
        self._source = source
        self._dtype = dtype
        # Without digests nothing is run: an empty table refuses the file.
        self._file = _load(UserFiles(source, model.files or {}))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            made = _made(self._file, source)
        names = [name for name, _ in model.chain]
        if len(names) != len(made):
            raise LaunchError(
                f"{source}: returns {len(made)} modules, and the plan's model has {len(names)}"
            )
        if made.named and list(made.reads) != names:
            raise LaunchError(
                f"{source}: its modules are {', '.join(made.reads)}; the plan's model has "
                f"{', '.join(names)}"
            )
        self._layers = dict(zip(names, made.modules, strict=True))
        self.reads = dict(zip(names, made.reads.values(), strict=True))
        self._made: dict[torch.Size, dict[str, Tensor]] = {}
        self._loss = getattr(self._file, "loss", next_token_loss)

    def layer(self, name: str) -> nn.Module:
        """Return a layer as the factory made it."""
        return self._layers[name]

    def configuration(self) -> str | None:
        """No library has this model."""
        return None

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
        """Run the layers with fake tensors, in the types that FSDP casts to."""
        if tokens.shape not in self._made:
            self._made[tokens.shape] = self._outputs(tokens)
        return self._made[tokens.shape][layer]

    def _outputs(self, tokens: Tensor) -> dict[str, Tensor]:
        with FakeTensorMode():
            held = {TOKENS: torch.zeros(tokens.shape, dtype=tokens.dtype)}
            made = _made(self._file, self._source)
            for name, of_file, module in zip(self._layers, made.reads, made.modules, strict=True):
                cast = {n: p.to(self._dtype) for n, p in module.named_parameters()}
                inputs = tuple(
                    x.to(self._dtype) if x.is_floating_point() else x
                    for x in (held[one] for one in made.reads[of_file])
                )
                held[of_file] = held[name] = functional_call(module, cast, inputs)
        return {
            name: torch.empty(held[name].shape, dtype=held[name].dtype, device="meta")
            for name in self._layers
        }

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the file's own loss, or next-token cross-entropy."""
        one = counted(self._loss(output, targets), len(targets))
        return one.total, one.count


def graph_of_factory(
    source: str, *, seq_len: int, known: Mapping[str, str] | None = None
) -> ModelGraph:
    """Return the ModelGraph of a user's modules; figures are traced for one sample of `seq_len`.

    Layers of one class with parameters of the same shapes and the same traced cost are one kind.
    The user has named the file, or its digests are `known`.
    """
    files = UserFiles(source, known)
    file = _load(files)
    try:
        with FakeTensorMode():
            made = _made(file, source)
            modules = made.modules
            tokens = torch.zeros((1, seq_len), dtype=torch.int64)
            loss_of = getattr(file, "loss", next_token_loss)
            every = traced(
                modules,
                tokens,
                made.places,
                loss=lambda output: counted(loss_of(output, tokens), len(tokens)).total,
            )
            figures = [layer.figures for layer in every]
    except DocumentError:
        raise
    except Exception as error:
        raise DocumentError(
            "", f"cannot be traced: {type(error).__name__}: {error}", file=source
        ) from error
    kinds = _kinds(modules, figures)
    counts = _own_parameters(modules)
    digests = dict(known or files.imported)
    if made.named:
        return _graph(source, digests, made, zip(kinds, counts, figures, strict=True))
    layers = []
    rows = zip(kinds, counts, figures, strict=True)
    for (kind, count, trace), run in itertools.groupby(rows):
        layers.append(
            Layer(name=kind, kind=kind, repeat=len(list(run)), parameters=count, trace=trace)
        )
    return _of_source(source, digests, layers)


def _of_source(
    source: str, files: dict[str, str], layers: Iterable[Layer], edges: tuple[Edge, ...] = ()
) -> ModelGraph:
    name = name_of(source)
    return ModelGraph(name=name, source=source, files=files, layers=tuple(layers), edges=edges)


def _graph(
    source: str,
    files: dict[str, str],
    made: _FactoryOutput,
    rows: Iterable[tuple[str, int, LayerTrace]],
) -> ModelGraph:
    """Return the graph of named modules, each a layer of its own."""
    layers = tuple(
        Layer(name=name, kind=kind, parameters=count, trace=trace)
        for name, (kind, count, trace) in zip(made.reads, rows, strict=True)
    )
    edges = tuple(
        Edge(source=read, target=name)
        for name, reads in made.reads.items()
        for read in dict.fromkeys(reads)
        if read != TOKENS
    )
    return _of_source(source, files, layers, edges)


def _kinds(modules: Sequence[nn.Module], figures: Sequence[LayerTrace]) -> list[str]:
    """Name each module's kind: its class, numbered from the second kind of that class on."""
    names: dict[Any, str] = {}
    used: dict[str, int] = {}
    result = []
    for module, trace in zip(modules, figures, strict=True):
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        own = module.identity if isinstance(module, Piece) else type(module)
        identity = (own, shapes, trace)
        if identity not in names:
            called = module.kind if isinstance(module, Piece) else type(module).__name__
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", called).lower()
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


def _load(files: UserFiles) -> ModuleType:
    """Import a user's file."""
    module: ModuleType = _theirs(files.source, files.load)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class _FactoryOutput:
    """What a factory returned: modules in order, and what each reads, by name."""

    modules: list[nn.Module]
    reads: dict[str, tuple[str, ...]]
    named: bool
    """The names are the user's; those of a chain count its modules."""

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def places(self) -> list[tuple[int, ...]]:
        """[module] Places in the order of what it reads; -1 for the tokens."""
        place = {name: at for at, name in enumerate(self.reads)}
        place[TOKENS] = -1
        return [tuple(place[one] for one in reads) for reads in self.reads.values()]


def _made(file: ModuleType, source: str) -> _FactoryOutput:
    """Call the factory and check what it returns."""
    name = source.rpartition(":")[2]
    factory = getattr(file, name, None)
    if not callable(factory):
        raise DocumentError("", f"has no function '{name}'", file=source)
    returned = _theirs(source, factory)
    if isinstance(returned, nn.Module) and not isinstance(returned, nn.Sequential | nn.ModuleList):
        try:
            returned = layers_of(returned)
        except DocumentError as error:
            raise error.in_file(source) from error
    if isinstance(returned, dict):
        made = _named(returned, name, source)
    else:
        listed = isinstance(returned, nn.Sequential | nn.ModuleList | list | tuple)
        modules = list(returned) if listed else []
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise DocumentError(
                "",
                f"{name}() must return a module, a list of modules, or a dict of modules "
                "with what they read",
                file=source,
            )
        before = [TOKENS, *(str(at) for at in range(len(modules) - 1))]
        reads: dict[str, tuple[str, ...]] = {str(at): (read,) for at, read in enumerate(before)}
        made = _FactoryOutput(modules=modules, reads=reads, named=False)
    for module in made.modules:
        for part in module.modules():
            _refuse_plan_dependent(part, source)
    _refuse_shared_memory(made, source)
    return made


def _named(returned: dict[Any, Any], factory: str, source: str) -> _FactoryOutput:
    """Check a graph of modules: names, what each reads, and that one alone is read by nobody."""

    def refused(why: str) -> DocumentError:
        return DocumentError("", f"{factory}() returns a dict, and {why}", file=source)

    modules: list[nn.Module] = []
    reads: dict[str, tuple[str, ...]] = {}
    for name, entry in returned.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise refused(f"{name!r} is no name; write letters, digits and _")
        if name in (TOKENS, "names") or name in dir(nn.Module):
            raise refused(f"'{name}' is taken; choose another name")
        module, *inputs = entry if isinstance(entry, tuple) else (entry,)
        if not isinstance(module, nn.Module) or not inputs:
            raise refused(f"'{name}' is not (module, name of what it reads, ...)")
        for one in inputs:
            if one != TOKENS and one not in reads:
                raise refused(
                    f"'{name}' reads {one!r}, which does not stand before it; "
                    f"before it are {', '.join([TOKENS, *reads])}"
                )
        modules.append(module)
        reads[name] = tuple(inputs)
    read = {one for inputs in reads.values() for one in inputs}
    ends = [name for name in reads if name not in read]
    if len(ends) != 1:
        raise refused(f"nobody reads {', '.join(ends)}; one module alone, the last, gives the loss")
    if list(reads)[-1] != ends[0]:
        raise refused(f"'{ends[0]}', which nobody reads, must stand last")
    return _FactoryOutput(modules=modules, reads=reads, named=True)


def _refuse_plan_dependent(module: nn.Module, source: str) -> None:
    """Refuse modules whose results depend on how a batch is cut, so on the plan."""
    name = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise DocumentError("", f"has a {name}; use a norm over one sample", file=source)
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise DocumentError("", f"has a {name} with p={module.p:g}; set p=0", file=source)


def _refuse_shared_memory(made: _FactoryOutput, source: str) -> None:
    """Refuse numbers that belong to several elements of parameters: plans would tell them apart."""
    named = {
        parameter: f"{layer}.{path}"
        for layer, module in zip(made.reads, made.modules, strict=True)
        for path, parameter in module.named_parameters()
    }
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, name in named.items():
        if _overlaps_itself(parameter):
            raise DocumentError(
                "",
                f"{name}: has elements that stand several times in the same memory; make it "
                "contiguous",
                file=source,
            )
        begin = int(parameter.storage_offset()) * parameter.element_size()
        end = begin + _span(parameter) * parameter.element_size()
        others = seen.setdefault(parameter.untyped_storage()._cdata, [])
        for other_begin, other_end, other in others:
            if begin < other_end and other_begin < end:
                raise DocumentError(
                    "",
                    f"{name} and {other} share memory as two parameters; let both modules hold one "
                    "parameter, or clone one of them",
                    file=source,
                )
        others.append((begin, end, name))


def _span(tensor: Tensor) -> int:
    """Return the elements of memory from a tensor's first to its last, both counted."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two elements of a tensor may be the same in memory.

    They are not if each stride leads beyond all that the smaller ones reach.
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _theirs(source: str, call: Callable[[], Any]) -> Any:
    """Run a user's code; what goes wrong there is told as theirs."""
    try:
        return call()
    except DocumentError:
        raise
    except Exception as error:
        raise DocumentError("", f"raised {type(error).__name__}: {error}", file=source) from error
