"""Hooks that note the actions of a module's forward between its units, while it runs.

A TorchFunctionMode notes every function between units, a patched `nn.Module.__call__` the calls of
units, and nothing inside a unit is seen.  Values read between units (`if x.mean() > 0`), and units
that are given state (a cache), are refused with the line of the user's code.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

from meshwright.planner.errors import RecordError
from meshwright.runtime.core.batches import register_records
from meshwright.runtime.core.side_effects import PythonNumbers
from meshwright.runtime.tracing.repeated_units import RepeatedUnits, UnitRun
from meshwright.runtime.tracing.trace import (
    Leaf,
    Made,
    ModuleTensor,
    Node,
    RecordedLayer,
    Recording,
    StageDevice,
    Value,
    called_name,
    values_of,
)

VALUE_READERS = frozenset(
    (
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__",
        "__index__", "__int__", "__reduce_ex__", "__repr__",
        "allclose", "equal", "is_nonzero", "item", "numpy", "tolist",
    )
)  # fmt: skip
"""Functions that turn values of tensors into Python's own."""
SIZE_READERS = frozenset(
    (
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.size, Tensor.numel, Tensor.nelement, torch.numel,
        Tensor.__len__, Tensor.__iter__, Tensor.unbind, torch.unbind,
        Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.tensor_split,
        torch.tensor_split,
    )
)  # fmt: skip
"""Functions that turn sizes of tensors into Python's own, or into as many tensors."""
HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
"""Functions that change what a backward does, and make no tensor that a replay could make."""
COLLECTIVES = frozenset(("c10d", "_c10d_functional"))
"""Namespaces of the operators by which ranks wait for each other."""
DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Function that gives a tensor other memory, without a new version."""
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), types.EllipsisType, type, enum.Enum, range,
    torch.dtype, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Types of arguments that are the same in every replay."""
WHOLE = "model"
"""The layer of a module that has no unit with parameters."""


class Notes:
    """The operations of a forward, noted while it runs."""

    def __init__(
        self,
        module: nn.Module,
        opened: frozenset[str],
        batch: Any,
        *,
        replays: bool = True,
        repeated: RepeatedUnits | None = None,
    ) -> None:
        """`replays` says that what is noted may be replayed, and must not depend on values.

        Units that are `repeated` do not run again.
        """
        self._module = module
        self._replays = replays
        self._repeated = repeated
        self._opened = opened
        self._paths = {id(part): name for name, part in module.named_modules()}
        self._parameters = [(part, dict(part._parameters)) for part in module.modules()]
        self._depth = 0
        self._drew = False
        self._operators = 0
        self._calls: dict[str, int] = {}
        self._nodes: list[Node] = []
        self._values: list[Made] = []
        self._storages: list[int] = []
        self._references: dict[int, Leaf | ModuleTensor | Value] = {}
        self._sizes_by_values: dict[int, frozenset[int]] = {}
        """Sizes that depend on values, of tensors by id (of `x[mask]`, `unique`)."""
        self.sized_by_values = False
        """An operator ran now whose result's size depends on values."""
        self._kept: list[Any] = []  # ids of tensors come again
        self._leaf_names: dict[int, str] = {}
        for at, (path, leaf) in enumerate(tree_flatten_with_path(batch)[0]):
            if isinstance(leaf, Tensor):
                self._references[id(leaf)] = Leaf(at)
                self._leaf_names[at] = keystr(path)
        self._held: dict[str, Tensor] = {}
        for name, part in module.named_modules():
            tensors = {**part._parameters, **part._buffers}
            plain = {key: value for key, value in vars(part).items() if isinstance(value, Tensor)}
            for key, tensor in {**tensors, **plain}.items():
                if tensor is not None and id(tensor) not in self._references:
                    full = f"{name}.{key}" if name else key
                    self._references[id(tensor)] = ModuleTensor(full)
                    self._held[full] = tensor
        self._kept += [batch, *self._held.values()]
        self._casts = _casts()
        for name, part in module.named_modules():
            if name in opened and (part._backward_hooks or part._backward_pre_hooks):
                raise RecordError(
                    f"{name or type(module).__name__} has a backward hook, and what it contains is "
                    "run in several parts; hang it on a unit, or train without pipeline"
                )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note all calls of units and between them while this is open."""
        applied = vars(torch.autograd.Function)["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self.function(applied.__get__(None, cls), args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            with self.units_called(), _Operators(self), _Functions(self):
                yield
        finally:
            torch.autograd.Function.apply = applied  # type: ignore[method-assign]

    @contextlib.contextmanager
    def units_called(self) -> Iterator[None]:
        """Note all calls of units while this is open."""
        called, notes = nn.Module.__call__, self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = notes._paths.get(id(module))
            if notes._depth or path is None or path in notes._opened:
                return called(module, *args, **kwargs)
            return notes._note_call(lambda *a, **k: called(module, *a, **k), path, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = called  # type: ignore[method-assign]

    def function(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function between units, and note it if it makes or changes tensors."""
        if self._depth:
            return func(*args, **kwargs)
        return self._note_call(func, None, args, kwargs)

    def _note_call(
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
        if unit is None and call in SIZE_READERS:
            self._refuse_sizes(tensors)
        self._refuse_unseen(call, unit)
        versions = [tensor._version for tensor in tensors]
        grad = torch.is_grad_enabled()

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> UnitRun:
            return self._run(lambda: call(*args, **kwargs), unit, tensors)

        if unit is None or self._repeated is None:
            ran = run(args, kwargs)
        else:
            ran = self._repeated.run(unit, args, kwargs, run)
        result = ran.result
        changed = _changed_tensors(tensors, versions)
        results = [
            (place, leaf)
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor)
        ]
        if unit is None and not results and not changed:
            return result
        where = _here()
        name = self._name(unit) if unit is not None else f"{called_name(call)}@{len(self._nodes)}"
        references = tuple(self._reference(leaf, name, where) for leaf in leaves)
        if changed:
            self._refuse_changes(changed, name, where)
        changes_held = any(
            isinstance(self._references.get(id(tensor)), ModuleTensor) for tensor in changed
        )
        self._note_sizes(tensors, [tensor for _, tensor in results], is_unit=unit is not None)
        numbers = tuple((place, self._new_value(tensor)) for place, tensor in results)
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
                draws=ran.drew,
                draws_python=ran.drew_python,
                changed=frozenset(
                    value
                    for tensor in changed
                    for value, storage in enumerate(self._storages)
                    if storage == _storage(tensor)
                ),
                changes_held=changes_held,
                where=where,
                operators=ran.operators,
                reads_number=ran.reads_number,
            )
        )
        return result

    def _run(self, call: Callable[[], Any], unit: str | None, tensors: Sequence[Tensor]) -> UnitRun:
        """Run a call that is given `tensors`, and say what was seen of it."""
        versions = [tensor._version for tensor in tensors]
        self._drew, self._operators, self.sized_by_values = False, 0, False
        before = None if unit is None else PythonNumbers()
        result = call()
        drew_python = before is not None and not before.drew_as(PythonNumbers())
        if unit is not None:
            trains = torch.is_grad_enabled() and any(
                parameter.requires_grad
                for parameter in self._module.get_submodule(unit).parameters()
            )
            result = tree_map(lambda one: _made_by_unit(one, tensors, trains), result)
        return UnitRun(
            result,
            operators=self._operators,
            drew=self._drew or drew_python,
            drew_python=drew_python,
            changes=self.sized_by_values or bool(_changed_tensors(tensors, versions)),
        )

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
            if self._replays and (isinstance(leaf, FakeTensor) or leaf.requires_grad):
                raise RecordError(
                    f"{name} gets a tensor that neither the batch, nor the module, nor a function "
                    "of torch made; compute it with functions of torch, or inside a unit",
                    where=where,
                )
            return leaf  # a constant of the user's file
        if isinstance(leaf, torch.device):
            return StageDevice()
        if isinstance(leaf, slice):
            if any(isinstance(end, Tensor) for end in (leaf.start, leaf.stop, leaf.step)):
                raise RecordError(
                    f"{name} is cut at the value of a tensor; "
                    "put it inside a unit (units=), or use a mask",
                    where=where,
                )
            return leaf
        if (
            not self._replays
            or isinstance(leaf, PLAIN)
            or (isinstance(leaf, types.FunctionType) and not leaf.__closure__)
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
        if self._replays and any(id(tensor) in self._references for tensor in tensors):
            raise RecordError(
                f"{call.__name__.strip('_')} reads the value of a tensor between units, so that "
                "what follows depends on it; put it inside a unit (units=), use torch.where, or "
                "train without pipeline",
                where=_here(),
            )

    def _refuse_sizes(self, tensors: Sequence[Tensor]) -> None:
        if self._replays and any(id(tensor) in self._sizes_by_values for tensor in tensors):
            raise RecordError(
                "a size that depends on the values of a tensor (of x[mask], nonzero, unique, "
                "bincount) is read between units, so that what follows depends on it; put it "
                "inside a unit (units=), use masks of fixed size, or train without pipeline",
                where=_here(),
            )

    def refuse_collective(self, name: str) -> None:
        """Refuse to cut a forward in which ranks wait for each other: they have parts of it."""
        if self._replays:
            raise RecordError(
                f"{name} of torch.distributed is called in the forward, which ranks of other "
                "stages do not run; use meshwright.batch_sum, or train without pipeline",
                where=_here(),
            )

    def _note_sizes(
        self, given: Sequence[Tensor], results: Sequence[Tensor], *, is_unit: bool
    ) -> None:
        """Note which sizes of results depend on values: new ones, and those of what was given.

        A unit that uses such sizes inside may well return none of them.
        """
        sizes = frozenset().union(*(self._sizes_by_values.get(id(x), ()) for x in given))
        others = {size for tensor in given for size in tensor.shape}
        for result in results:
            depending = sizes.intersection(result.shape)
            if self.sized_by_values and result.ndim:
                new = set(result.shape) - others
                depending |= new or ({result.shape[0]} if not is_unit else set())
            if depending:
                self._sizes_by_values[id(result)] = depending

    def _refuse_unseen(self, call: Callable[..., Any], unit: str | None) -> None:
        """Refuse what a replay of functions and units would not do again."""
        name = getattr(call, "__name__", "")
        if unit is None and name in HOOKS:
            raise RecordError(
                f"{name} hangs a hook on a tensor between units; put it inside a unit (units=), or "
                "train without pipeline",
                where=_here(),
            )
        if unit is None and call == SET_DATA:
            raise RecordError(
                "a tensor is given other data between units (x.data = ...), which a replay would "
                "not do; change it in the training loop, or put it inside a unit (units=)",
                where=_here(),
            )
        if unit is None and call in DIFFERENTIATE:
            raise RecordError(
                f"{name} between units needs the graph of all that it goes through, and stages "
                "have a part of it each; put it inside a unit (units=), or train without pipeline",
                where=_here(),
            )
        if unit is not None and (now := self._other_parameters()):
            raise RecordError(
                f"'{now}' is another tensor while its module is called (functional_call), and a "
                "stage has the module's own; put the call inside a unit (units=), or train without "
                "pipeline",
                where=_here(),
            )
        if _casts() != self._casts:
            raise RecordError(
                "torch.autocast begins or ends between units; set the type by the plan's "
                "precision, put it inside a unit (units=), or train without pipeline",
                where=_here(),
            )

    def _other_parameters(self) -> str:
        """Return the name of a parameter in whose place stands something else; '' if none does."""
        return next(
            (
                f"{self._paths[id(part)]}.{name}".removeprefix(".")
                for part, names in self._parameters
                for name, parameter in part._parameters.items()
                if parameter is not names.get(name)
            ),
            "",
        )

    def _refuse_changes(self, changed: Sequence[Tensor], name: str, where: str) -> None:
        storages = {_storage(tensor) for tensor in changed}
        for key, tensor in self._held.items():
            if isinstance(tensor, nn.Parameter) and _storage(tensor) in storages:
                raise RecordError(
                    f"{name} changes the parameter '{key}' in place; make a new tensor of it",
                    where=where,
                )
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
        register_records(result)
        leaves, spec = tree_flatten(result)
        where = f"{type(self._module).__name__}.forward"
        outputs = tuple(self._reference(leaf, "its result", where) for leaf in leaves)
        nodes, values = tuple(self._nodes), tuple(self._values)
        parameters = {key for key, tensor in self._held.items() if isinstance(tensor, nn.Parameter)}
        tensors = {
            key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in self._held.items()
        }
        recording = Recording(
            nodes=nodes,
            values=values,
            result=outputs,
            result_spec=spec,
            layers=(),
            derived=self._derived_nodes(nodes),
            tensors=tensors,
            sized_by_values=frozenset(
                reference.at
                for key in self._sizes_by_values
                if isinstance(reference := self._references.get(key), Value)
            ),
        )
        return replace(recording, layers=self._layers(recording, parameters))

    def _derived_nodes(self, nodes: Sequence[Node]) -> frozenset[int]:
        """Return the nodes whose results follow from the batch alone, without parameters."""
        spoilt: set[int] = set()
        while True:
            derived: set[int] = set()
            good: set[int] = set()
            values = set(spoilt)
            for at, node in enumerate(nodes):
                reads = values_of(node.leaves)
                results = {value for _, value in node.made}
                if self._follows(node) and reads <= good and not (results | node.changed) & spoilt:
                    derived.add(at)
                    good |= results
                else:
                    # What others change in place is theirs, wherever it was made.
                    storages = {self._storages[value] for value in node.changed}
                    values |= {v for v, storage in enumerate(self._storages) if storage in storages}
            if values == spoilt:
                return frozenset(derived)
            spoilt = values

    def _follows(self, node: Node) -> bool:
        """Return whether a node neither draws, nor reads what trains, nor changes buffers."""
        if node.draws or node.changes_held:
            return False
        if any(self._values[value].requires_grad for _, value in node.made):
            return False
        if node.unit is not None:
            part = self._module.get_submodule(node.unit)
            return not any(True for _ in part.parameters())
        return not any(
            isinstance(leaf, ModuleTensor) and isinstance(self._held[leaf.name], nn.Parameter)
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
        for value in recording.sized_by_values:  # a boundary has one size
            last = recording.last_read.get(value, -1)
            forbidden |= set(range(recording.maker[value] + 1, last + 1))
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
                for parameter in part.parameters():
                    reference = self._references[id(parameter)]
                    assert isinstance(reference, ModuleTensor)
                    held[reference.name] = None
        read = [leaf for node in own for leaf in node.leaves]
        if end == len(recording.nodes):  # what the module returns
            read += recording.result
        for leaf in read:
            if isinstance(leaf, ModuleTensor) and leaf.name in parameters:
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

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._notes.function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Sees which operators run, and which of them draw random numbers."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self._notes._drew = True
        if _sizes_by_values(func, args):
            self._notes.sized_by_values = True
        if func.namespace in COLLECTIVES:
            self._notes.refuse_collective(func.__name__.partition(".")[0].strip("_"))
        if func is not torch.ops.prim.device.default:  # asked for where it was not before
            arguments = (*args, *(kwargs or {}).items())
            self._notes._operators = hash(
                (self._notes._operators, func, _key_of_argument(arguments))
            )
        return func(*args, **(kwargs or {}))


def _key_of_argument(argument: Any) -> Hashable:
    """Return an argument of an operator without the values of tensors and factors."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, float):
        return float, bool(argument)
    if isinstance(argument, tuple | list):
        return tuple(map(_key_of_argument, argument))
    return repr(argument)


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that may draw does so: a dropout of 0 does not."""
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            given = (
                args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            )
            return given != 0
    return True


def _sizes_by_values(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether the size of an operator's result depends on values of its arguments."""
    if operator is torch.ops.aten.index.Tensor:
        masks = (at for at in args[1] if at is not None)
        return any(at.dtype in (torch.bool, torch.uint8) for at in masks)
    packs = operator is torch.ops.aten._pack_padded_sequence.default
    return packs or torch.Tag.dynamic_output_shape in operator.tags


def _made_by_unit(output: Any, given: Sequence[Tensor], trains: bool) -> Any:
    """Return what a unit made as what it may be in another call.

    One that went by its parameters has made a tensor of its own that needs a gradient too.
    """
    if not isinstance(output, Tensor):
        return output
    if trains and not output.requires_grad and output.is_floating_point():
        return output.detach().requires_grad_().clone()
    return output.view_as(output) if any(output is argument for argument in given) else output


def _changed_tensors(tensors: Sequence[Tensor], versions: Sequence[int]) -> list[Tensor]:
    """Return the tensors that have changed in place since they had these versions."""
    return [
        tensor
        for tensor, version in zip(tensors, versions, strict=True)
        if tensor._version != version
    ]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _casts() -> Hashable:
    """Return in which types autocast computes now, by kind of device."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


_OURS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")


def _here() -> str:
    """Return the line of the user's code that runs now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def line_of(error: BaseException) -> str | None:
    """Return the last line of the user's code in a traceback."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_OURS):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
