"""Recorder: runs a module once without data and notes what its forward does.

    recorder = Recorder(module, batch)
    [layer.name for layer in recorder.first.layers]    # ["embed", "blocks.0", ..., "head"]

Units are the children of a ModuleList, those of a Sequential of like blocks, and every other module
that has no unit inside.  A TorchFunctionMode notes every function between units, a patched
`nn.Module.__call__` the calls of units, and nothing inside a unit is seen.  The module is copied
with fake parameters first; a forward that fails on them runs once on the real ones.

Outside: values read between units (`if x.mean() > 0`), and units that are given state (a cache).
Both are refused with the line of the user's code.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map

from planner.errors import RecordError
from runtime.inner_loss import running
from runtime.recent import Recent
from runtime.recording import (
    Device,
    Held,
    Leaf,
    Made,
    Node,
    RecordedLayer,
    Recording,
    Value,
    called_name,
    values_of,
)

VALUE_READERS = frozenset(
    (
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
        "allclose", "equal", "is_nonzero", "item", "numpy", "tolist",
    )
)  # fmt: skip
"""Functions that turn values of tensors into Python's own."""
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), types.EllipsisType, type, enum.Enum, range,
    torch.dtype, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Types of arguments that are the same in every replay."""
MOST_RECORDINGS = 64
"""Shapes of batches whose recordings are kept; of others the oldest are made again."""
WHOLE = "model"
"""The layer of a module that has no unit with parameters."""
Inputs = Callable[[Any], Any]
"""What the module gets of a batch: a tuple, a dict of keywords, or one thing."""


class Recorder:
    """Records a module for every shape of batch that comes; holds no values of its parameters."""

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        inputs: Inputs | None = None,
        *,
        units: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        whole: bool = False,
    ) -> None:
        """`batch` may hold tensors without data.  `dtype` is the type of computation.

        `whole` makes the module one unit.  Raises RecordError where `units` names no module, or the
        forward cannot be recorded.
        """
        self.example = batch
        """The batch of `first`."""
        self.refused: str | None = None
        """Why a module that `of` was asked for is one unit."""
        self.inputs = inputs or _default_inputs(module)
        self._dtype = dtype
        self._modes = {name: part.training for name, part in module.named_modules()}
        self.aliases = _aliases(module)
        self.opened = frozenset() if whole else _opened(module, units)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._module = self._skeleton(module)
        self._real: nn.Module | None = None
        self._made = Recent[Recording](MOST_RECORDINGS)
        try:
            self.first = self.recording(batch)
        except RecordError:
            raise
        except Exception as fake_error:
            # A kernel without fake tensors, or sizes that depend on values inside a unit.
            if not has_data(tree_leaves(batch)) or not has_data(module.parameters()):
                raise _failed(module, fake_error) from fake_error
            self._real = copy.deepcopy(module)
            try:
                self.first = self.recording(batch)
            except RecordError:
                raise
            except Exception as error:
                raise _failed(module, error) from error

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of parameters and buffers that the forward never reads, nor any unit holds."""
        used: set[int] = set()
        for at, node in enumerate(self.first.nodes):
            if at in self.first.derived:
                continue
            if node.unit is not None:
                part = self._module.get_submodule(node.unit)
                used |= {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
        held = (leaf for node in self.first.nodes for leaf in node.leaves)
        names = {leaf.name for leaf in (*held, *self.first.result) if isinstance(leaf, Held)}
        every = (*self._module.named_parameters(), *self._module.named_buffers())
        return tuple(name for name, tensor in every if id(tensor) not in used and name not in names)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        batch: Any,
        inputs: Inputs | None = None,
        *,
        units: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Recorder:
        """Return a recorder of units, or of the whole module where units cannot be told apart.

        With one unit there is no pipeline; `refused` says why.
        """
        try:
            return cls(module, batch, inputs, units=units, dtype=dtype)
        except RecordError as error:
            if units is not None:
                raise
            recorder = cls(module, batch, inputs, dtype=dtype, whole=True)
            recorder.refused = str(error)
            return recorder

    def recording(self, batch: Any, *, training: bool = True) -> Recording:
        """Return what the forward does with a batch of these shapes."""
        key = (key_of(batch), training)
        before = self._made.count
        made = self._made.get(key, lambda: self._recorded(batch, training=training))
        if before < self._made.count == MOST_RECORDINGS:
            warnings.warn(
                f"{MOST_RECORDINGS} kinds of batches so far, and each is recorded anew: pad "
                "samples to multiples of a length, and give numbers that change as tensors "
                "without dims",
                stacklevel=2,
            )
        return made

    def training_of(self, name: str) -> bool:
        """Return the mode that a module is in while the whole one trains."""
        return self._modes[name]

    @contextlib.contextmanager
    def without_data(self, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
        """Give the module in training mode and a batch, both without data if they can be.

        What runs while this is open changes nothing of the user's module.
        """
        module = self._module if self._real is None else self._real
        for name, part in module.named_modules():
            part.training = self._modes[name]
        with contextlib.ExitStack() as stack:
            if self._real is None:
                stack.enter_context(self._fake)
                batch = tree_map(self._leaf, batch)
            else:
                stack.enter_context(unchanged(module))
            stack.enter_context(torch.random.fork_rng(devices=()))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(running(None))  # a step that records has losses of its own
            yield module, batch

    def _skeleton(self, module: nn.Module) -> nn.Module:
        """Copy a module with parameters and buffers that have no data."""
        memo: dict[int, Any] = {}
        with self._fake:
            for tensor in (*module.parameters(), *module.buffers()):
                memo[id(tensor)] = self._without_data(tensor)
        try:
            return copy.deepcopy(module, memo)
        except Exception as error:
            raise RecordError(
                f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}); "
                "keep what cannot be copied outside the module"
            ) from error

    def _without_data(self, tensor: Tensor) -> Tensor:
        floating = tensor.is_floating_point()
        dtype = self._dtype if floating and isinstance(tensor, nn.Parameter) else tensor.dtype
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def _recorded(self, batch: Any, *, training: bool) -> Recording:
        with self.without_data(batch) as (module, given):
            if not training:
                module.eval()
            notes = _Notes(module, self.opened, given)
            with notes.listening():
                args, kwargs = arguments(self.inputs(given))
                result = module(*args, **kwargs)
            return notes.recording(result)

    def _leaf(self, leaf: Any) -> Any:
        """Return a leaf of the batch without data, in the type in which it is computed with."""
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = self._dtype if leaf.dtype == torch.float32 else leaf.dtype
        return torch.empty(leaf.shape, dtype=dtype)


def arguments(taken: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a module is called with, of what `inputs` returned."""
    if isinstance(taken, dict):
        return (), taken
    return (taken if isinstance(taken, tuple) else (taken,)), {}


def key_of(batch: Any) -> Any:
    """Return what of a batch a recording depends on: shapes, types, and what is no tensor."""
    leaves, spec = tree_flatten(batch)
    words = (
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return (*words, str(spec))


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by all the names that it has: ties."""
    first: dict[int, str] = {}
    pairs = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in pairs}


def _default_inputs(module: nn.Module) -> Inputs:
    """Take the first of a tuple, and of a dict the keys that the module's forward names."""
    named = inspect.signature(module.forward).parameters

    def inputs(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: value for name, value in batch.items() if name in named}
        return batch[0] if isinstance(batch, tuple | list) else batch

    return inputs


def _opened(module: nn.Module, units: Sequence[str] | None) -> frozenset[str]:
    """Return the paths of the modules whose forward is looked into; all others are units."""
    if units is None:
        found = set(units_of(module))
    else:
        known = dict(module.named_modules())
        for name in units:
            if name not in known:
                raise RecordError(f"units: there is no module '{name}' in {type(module).__name__}")
        found = set(units)
    opened = {""}
    for name in found:
        parts = name.split(".")
        opened |= {".".join(parts[:at]) for at in range(1, len(parts))}
    return frozenset(opened - found)


def units_of(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the children of ModuleLists and of Sequentials of like blocks."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if (_is_list(module) and not _is_list(child)) or (not path and _is_list(module)):
            yield below
        else:
            yield from units_of(child, below)


def _is_list(module: nn.Module) -> bool:
    """Whether what stands in a module is one unit each."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    blocks = [type(part) for part in module if any(True for _ in part.children())]
    return len(set(blocks)) < len(blocks)


def has_data(tensors: Iterable[Any]) -> bool:
    """Tell whether all tensors among these have values."""
    return not any(
        isinstance(one, Tensor) and (one.is_meta or isinstance(one, FakeTensor)) for one in tensors
    )


def _failed(module: nn.Module, error: Exception) -> RecordError:
    return RecordError(
        f"{type(module).__name__} cannot be run on the example "
        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); a plan without "
        "pipeline needs no recording",
        where=_line(error),
    )


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put buffers back as they were."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


class _Notes:
    """What a forward does, while it runs."""

    def __init__(self, module: nn.Module, opened: frozenset[str], batch: Any) -> None:
        self._module = module
        self._opened = opened
        self._paths = {id(part): name for name, part in module.named_modules()}
        self._depth = 0
        self._drew = False
        self._calls: dict[str, int] = {}
        self._nodes: list[Node] = []
        self._values: list[Made] = []
        self._storages: list[int] = []
        self._references: dict[int, Leaf | Held | Value] = {}
        self._kept: list[Any] = []  # ids of tensors come again
        self._leaf_names: dict[int, str] = {}
        for at, (path, leaf) in enumerate(tree_flatten_with_path(batch)[0]):
            if isinstance(leaf, Tensor):
                self._references[id(leaf)] = Leaf(at)
                self._leaf_names[at] = keystr(path)
        self._held: dict[str, Tensor] = {}
        for name, part in module.named_modules():
            own = {**part._parameters, **part._buffers}
            plain = {key: one for key, one in vars(part).items() if isinstance(one, Tensor)}
            for key, tensor in {**own, **plain}.items():
                if tensor is not None and id(tensor) not in self._references:
                    full = f"{name}.{key}" if name else key
                    self._references[id(tensor)] = Held(full)
                    self._held[full] = tensor
        self._kept += [batch, *self._held.values()]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note all calls between units while this is open."""
        called, applied = nn.Module.__call__, vars(torch.autograd.Function)["apply"]
        notes = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = notes._paths.get(id(module))
            if notes._depth or path is None or path in notes._opened:
                return called(module, *args, **kwargs)
            return notes._noted(lambda *a, **k: called(module, *a, **k), path, args, kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            whole = applied.__get__(None, cls)
            if notes._depth:
                return whole(*args, **kwargs)
            return notes._noted(whole, None, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            with _Draws(self), _Functions(self):
                yield
        finally:
            nn.Module.__call__ = called  # type: ignore[method-assign]
            torch.autograd.Function.apply = applied  # type: ignore[method-assign]

    def function(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function between units, and note it if it makes or changes tensors."""
        if self._depth:
            return func(*args, **kwargs)
        return self._noted(func, None, args, kwargs)

    def _noted(
        self, call: Callable[..., Any], unit: str | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # From here on functions are inside the call, or of this class.
        self._depth += 1
        try:
            return self._run_noted(call, unit, args, kwargs)
        finally:
            self._depth -= 1

    def _run_noted(
        self, call: Callable[..., Any], unit: str | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if unit is None and tensors and getattr(call, "__name__", "") in VALUE_READERS:
            self._refuse_values(call, tensors)
        versions = [tensor._version for tensor in tensors]
        self._drew, grad = False, torch.is_grad_enabled()
        result = call(*args, **kwargs)
        changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if tensor._version != version
        ]
        made = [
            (place, leaf)
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor)
        ]
        if unit is None and not made and not changed:
            return result
        where = _here()
        name = self._name(unit) if unit is not None else f"{called_name(call)}@{len(self._nodes)}"
        references = tuple(self._reference(leaf, name, where) for leaf in leaves)
        self._refuse_changes(changed, name, where)
        changes_held = any(isinstance(self._references.get(id(tensor)), Held) for tensor in changed)
        numbers = tuple((place, self._new_value(tensor)) for place, tensor in made)
        self._kept.append((leaves, result))
        self._nodes.append(
            Node(
                name=name,
                unit=unit,
                call=None if unit is not None else call,
                leaves=references,
                spec=spec,
                made=numbers,
                grad=grad,
                draws=self._drew,
                changed=frozenset(
                    value
                    for tensor in changed
                    for value, storage in enumerate(self._storages)
                    if storage == _storage(tensor)
                ),
                changes_held=changes_held,
                where=where,
            )
        )
        return result

    def _name(self, unit: str) -> str:
        calls = self._calls[unit] = self._calls.get(unit, 0) + 1
        unit = unit or WHOLE
        return unit if calls == 1 else f"{unit}@{calls}"

    def _new_value(self, tensor: Tensor) -> int:
        number = len(self._values)
        self._references[id(tensor)] = Value(number)
        self._values.append(
            Made(
                tensor.shape,
                tensor.dtype,
                tensor.requires_grad,
                tensor.numel() * tensor.element_size(),
            )
        )
        self._storages.append(_storage(tensor))
        return number

    def _reference(self, leaf: Any, name: str, where: str) -> Any:
        """Return an argument as it stands in a node."""
        if isinstance(leaf, Tensor):
            if id(leaf) in self._references:
                return self._references[id(leaf)]
            if isinstance(leaf, FakeTensor) or leaf.requires_grad:
                raise RecordError(
                    f"{name} gets a tensor that neither the batch, nor the module, nor a function "
                    "of torch made; compute it with functions of torch, or inside a unit",
                    where=where,
                )
            return leaf  # a constant of the user's file
        if isinstance(leaf, torch.device):
            return Device()
        if isinstance(leaf, slice):
            if any(isinstance(end, Tensor) for end in (leaf.start, leaf.stop, leaf.step)):
                raise RecordError(f"{name} is cut at the value of a tensor", where=where)
            return leaf
        if isinstance(leaf, PLAIN) or (
            isinstance(leaf, types.FunctionType) and not leaf.__closure__
        ):
            return leaf
        if isinstance(leaf, types.BuiltinFunctionType | types.WrapperDescriptorType):
            return leaf
        raise RecordError(
            f"{name} gets a {type(leaf).__name__}, which is no tensor, number or string: it would "
            "keep the state of this one run; hand on tensors (of a cache: use_cache=False), or "
            "name a unit around both with units=",
            where=where,
        )

    def _refuse_values(self, call: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if any(id(tensor) in self._references for tensor in tensors):
            raise RecordError(
                f"{call.__name__.strip('_')} reads the value of a tensor between units, so that "
                "what follows depends on it; put it inside a unit (units=), use torch.where, or "
                "train without pipeline",
                where=_here(),
            )

    def _refuse_changes(self, changed: Sequence[Tensor], name: str, where: str) -> None:
        storages = {_storage(tensor) for tensor in changed}
        for key, tensor in self._held.items():
            if isinstance(tensor, nn.Parameter) and _storage(tensor) in storages:
                raise RecordError(f"{name} changes the parameter '{key}' in place", where=where)
        for tensor in changed:
            reference = self._references.get(id(tensor))
            if isinstance(reference, Leaf):
                raise RecordError(
                    f"{name} changes the batch's {self._leaf_names[reference.at]} in place, which "
                    "other stages read; change a copy of it",
                    where=where,
                )

    def recording(self, result: Any) -> Recording:
        """Return what was noted of a forward that returned `result`."""
        leaves, spec = tree_flatten(result)
        where = f"{type(self._module).__name__}.forward"
        outputs = tuple(self._reference(leaf, "its result", where) for leaf in leaves)
        nodes, values = tuple(self._nodes), tuple(self._values)
        parameters = {key for key, one in self._held.items() if isinstance(one, nn.Parameter)}
        tensors = {key: f"{one.dtype} {list(one.shape)}" for key, one in self._held.items()}
        recording = Recording(
            nodes=nodes,
            values=values,
            result=outputs,
            result_spec=spec,
            layers=(),
            derived=self._derived(nodes),
            tensors=tensors,
        )
        return recording.with_layers(self._layers(recording, parameters))

    def _derived(self, nodes: Sequence[Node]) -> frozenset[int]:
        """Return the nodes whose results follow from the batch alone, without parameters."""
        spoilt: set[int] = set()
        while True:
            derived: set[int] = set()
            good: set[int] = set()
            found = set(spoilt)
            for at, node in enumerate(nodes):
                reads = values_of(node.leaves)
                made = {value for _, value in node.made}
                if self._follows(node) and reads <= good and not (made | node.changed) & spoilt:
                    derived.add(at)
                    good |= made
                else:
                    # What others change in place is theirs, wherever it was made.
                    storages = {self._storages[value] for value in node.changed}
                    found |= {v for v, one in enumerate(self._storages) if one in storages}
            if found == spoilt:
                return frozenset(derived)
            spoilt = found

    def _follows(self, node: Node) -> bool:
        """Whether a node neither draws, nor reads what trains, nor changes what is held."""
        if node.draws or node.changes_held:
            return False
        if any(self._values[value].requires_grad for _, value in node.made):
            return False
        if node.unit is not None:
            part = self._module.get_submodule(node.unit)
            return not any(True for _ in part.parameters())
        return not any(
            isinstance(leaf, Held) and isinstance(self._held[leaf.name], nn.Parameter)
            for leaf in node.leaves
        )

    def _layers(self, recording: Recording, parameters: set[str]) -> tuple[RecordedLayer, ...]:
        """Cut where least crosses, between any two units with parameters that may be apart."""
        nodes = recording.nodes
        starts = [
            at
            for at, node in enumerate(nodes)
            if node.unit is not None
            and at not in recording.derived
            and any(True for _ in self._module.get_submodule(node.unit).parameters())
        ]
        forbidden: set[int] = set()
        first_of: dict[int, int] = {}
        for value, storage in enumerate(self._storages):
            first_of.setdefault(storage, recording.maker[value])
        for at, node in enumerate(nodes):
            for value in node.changed:
                forbidden |= set(range(first_of[self._storages[value]] + 1, at + 1))
        cuts = [0]
        firsts: list[int] = starts[:1]
        for before, after in itertools.pairwise(starts):
            allowed = [at for at in range(before + 1, after + 1) if at not in forbidden]
            if allowed:
                cuts.append(min(allowed, key=lambda at: (recording.crossing_bytes(at), -at)))
                firsts.append(after)
        names = [nodes[at].name for at in firsts] or [WHOLE]
        ends = [*cuts[1:], len(nodes)]
        return tuple(
            self._layer(name, begin, end, recording, parameters)
            for name, begin, end in zip(names, cuts, ends, strict=True)
        )

    def _layer(
        self, name: str, begin: int, end: int, recording: Recording, parameters: set[str]
    ) -> RecordedLayer:
        own = [
            n
            for at, n in enumerate(recording.nodes)
            if begin <= at < end and at not in recording.derived
        ]
        units = tuple(dict.fromkeys(node.unit for node in own if node.unit is not None))
        held: dict[str, None] = {}
        for node in own:
            if node.unit is not None:
                part = self._module.get_submodule(node.unit)
                for one in part.parameters():
                    reference = self._references[id(one)]
                    assert isinstance(reference, Held)
                    held[reference.name] = None
            for leaf in node.leaves:
                if isinstance(leaf, Held) and leaf.name in parameters:
                    held[leaf.name] = None
        return RecordedLayer(
            name=name,
            first=begin,
            last=end,
            units=units,
            parameters=tuple(held),
            draws=any(node.draws for node in own),
        )


class _Functions(TorchFunctionMode):
    """Hands every function of torch to the notes."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._notes.function(func, args, kwargs or {})


class _Draws(TorchDispatchMode):
    """Sees which operators draw random numbers."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self._notes._drew = True
        return func(*args, **(kwargs or {}))


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may draw does so: a dropout of 0 does not."""
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            given = (
                args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            )
            return given != 0
    return True


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_OURS = (str(Path(torch.__file__).parent), __file__)


def _here() -> str:
    """Return the line of the user's code that runs now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _line(error: BaseException) -> str | None:
    """Return the last line of the user's code in a traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_OURS):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
