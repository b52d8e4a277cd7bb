"""Recorder: runs a module once without data and notes what its forward does.

    recorder = Recorder(module, batch)
    [layer.name for layer in recorder.first.layers]    # ["embed", "blocks.0", ..., "head"]

Units are the children of a ModuleList, those of a Sequential of like blocks, and every other module
that has no unit inside.  The module is copied with fake parameters first; a forward that fails on
them runs once on the real ones.  What is noted of it: runtime/tracing/trace_hooks.py.

Experts whose code reads what a router chose run as if all had as many tokens, inside of
`even_routing(module)`: products of grouped experts, lists of tokens per expert, and loops over the
experts that were hit are replaced by what costs as much and keeps as much.  A loop over weights
that are not known by name runs as it is, with every expert hit by its share.  Only tensors without
data are treated so; a value that is read for anything else is refused by torch as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from meshwright.planner.errors import RecordError
from meshwright.runtime.core.auxiliary_loss import running
from meshwright.runtime.core.lru import Recent
from meshwright.runtime.core.side_effects import (
    MOST_CHECKED,
    PythonNumbers,
    Surroundings,
    deepcopy_module,
    restore_side_effects,
    seed_all,
)
from meshwright.runtime.tracing.repeated_units import RepeatedUnits
from meshwright.runtime.tracing.trace import (
    ModuleTensor,
    Recording,
)
from meshwright.runtime.tracing.trace_hooks import Notes, line_of

MANY_RENEWALS = 8
"""Recordings that are made anew before the time that it takes is shown."""
MOST_RECORDINGS = 64
"""Shapes of batches whose recordings are cached; of others the oldest are made again."""
Inputs = Callable[[Any], Any]
"""Inputs of the module from a batch: a tuple, a dict of keywords, or one object."""


class Recorder:
    """Records a module for every shape of batch that comes; has no values of its parameters."""

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        inputs: Inputs | None = None,
        *,
        units: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        whole: bool = False,
        rebuild: Callable[[], nn.Module] | None = None,
    ) -> None:
        """`batch` may hold tensors without data.  `dtype` is the type of computation.

        `whole` makes the module one unit.  `rebuild` builds a module without data once more, with
        data, where its forward does not run without.  Raises RecordError where `units` names no
        module, or the forward cannot be recorded.
        """
        self.example = batch
        """The batch of `first`."""
        self.refused: str | None = None
        """Why a module that `of_units` was asked for is one unit."""
        self.inputs = inputs or _default_inputs(module)
        self._dtype, self._whole = dtype, whole
        self.modes = {name: part.training for name, part in module.named_modules()}
        """In which mode each part is while the module trains."""
        self.opened = frozenset() if whole else _opened_paths(module, units)
        # In a rehearsal tensors have no data already, and modes do not mix.
        self._fake = detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        self._module = self._skeleton(module)
        self._resting = _modes_in_evaluation(self._module)
        """The modes of all parts while the module evaluates."""
        self._real: nn.Module | None = None
        self._made = Recent[Recording](MOST_RECORDINGS)
        self.renewals = 0
        """Number of times that values read by the forward beside tensors had changed."""
        self.draws_coins = False
        """Python's or numpy's random numbers were drawn, in units or between them."""
        self._followed: nn.Module | None = None
        self._surroundings: Surroundings | None = None
        try:
            self.first = self.recording(batch)
        except RecordError:
            raise
        except Exception as fake_error:
            # A kernel without fake tensors, or sizes that depend on values inside a unit.
            is_whole = has_data(module.parameters())
            if not has_data(tree_leaves(batch)) or not (is_whole or rebuild):
                raise _record_error(module, fake_error) from fake_error
            self._real = rebuild() if rebuild and not is_whole else deepcopy_module(module)
            try:
                self.first = self.recording(batch)
            except RecordError:
                raise
            except Exception as error:
                raise _record_error(module, error) from error

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """The first name of each parameter by all the names that it has: ties."""
        first: dict[int, str] = {}
        pairs = self._module.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in pairs}

    @property
    def unread_names(self) -> tuple[str, ...]:
        """Names of parameters and buffers that the forward never reads, and no unit has."""
        used: set[int] = set()
        for at, node in enumerate(self.first.nodes):
            if at in self.first.derived:
                continue
            if node.unit is not None:
                part = self._module.get_submodule(node.unit)
                used |= {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
        held = (leaf for node in self.first.nodes for leaf in node.leaves)
        names = {
            leaf.name for leaf in (*held, *self.first.result) if isinstance(leaf, ModuleTensor)
        }
        every = (*self._module.named_parameters(), *self._module.named_buffers())
        return tuple(name for name, tensor in every if id(tensor) not in used and name not in names)

    @classmethod
    def of_units(
        cls,
        module: nn.Module,
        batch: Any,
        inputs: Inputs | None = None,
        *,
        units: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        rebuild: Callable[[], nn.Module] | None = None,
    ) -> Recorder:
        """Return a recorder of units, or of the whole module where units cannot be distinguished.

        With one unit there is no pipeline; `refused` says why.
        """
        try:
            return cls(module, batch, inputs, units=units, dtype=dtype, rebuild=rebuild)
        except RecordError as error:
            if units is not None:
                raise
            recorder = cls(module, batch, inputs, dtype=dtype, whole=True, rebuild=rebuild)
            recorder.refused = str(error)
            return recorder

    def recording(self, batch: Any, *, training: bool = True) -> Recording:
        """Return what the forward does with a batch of these shapes."""
        key = (key_of(batch), training)
        before = self._made.count
        recording = self._made.get(key, lambda: self._record(batch, training=training))
        if before < self._made.count == MOST_RECORDINGS:
            warnings.warn(
                f"{MOST_RECORDINGS} kinds of batches so far, and each is recorded anew: pad "
                "samples to multiples of a length, and give numbers that change as tensors "
                "without dims",
                stacklevel=2,
            )
        return recording

    def refuse_other_layers(self, recording: Recording) -> None:
        """Refuse to cut a recording that has other layers than the first one."""
        if [layer.name for layer in recording.layers] != [
            layer.name for layer in self.first.layers
        ]:
            raise RecordError(
                "the forward runs other units than in the example (train or eval mode, or another "
                "shape); use a plan without pipeline, or name units around what differs"
            )

    def follow(self, module: nn.Module) -> None:
        """Look at what `module` has beside its units from now on, whenever `renew` is called.

        Numbers that a forward or `inputs` reads are part of a recording: a temperature that the
        training loop lowers, how many blocks are used.
        """
        self._followed = module
        self._surroundings = self._surroundings_of(module)

    def renew(self, batch: Any) -> None:
        """Forget recordings if the training loop changed what they were made with.

        Raises RecordError where the forward runs other units since.
        """
        if self._followed is None or self._surroundings is None:
            return
        changed = self._surroundings.changes()
        if not changed:
            return
        begin_s = time.perf_counter()
        built = self._module if self._real is None else self._real
        for name in self.opened:
            attributes = vars(built.get_submodule(name))
            for key, value in _plain(self._followed.get_submodule(name)).items():
                attributes[key] = value
        self._made = Recent[Recording](MOST_RECORDINGS)
        self.renewals += 1
        self._surroundings = self._surroundings_of(self._followed)
        planned = [layer.name for layer in self.first.layers]
        recording = self.recording(batch)
        if [layer.name for layer in recording.layers] != planned:
            raise RecordError(
                f"{type(self._followed).__name__} runs other units since the training loop changed "
                "what its forward reads; name a unit around what differs with units=, or run all "
                "units and multiply what does not count by a tensor without dims in the batch"
            )
        drew = {node.name for node in self.first.nodes if node.draws}
        for node in recording.nodes:
            if node.draws and node.name not in drew:
                raise RecordError(
                    f"{node.name}: draws random numbers since the training loop changed what the "
                    "forward reads, and would draw others under another plan; let it draw from the "
                    "first batch on (a rate of 1e-6), or use a plan without pipeline",
                    where=node.where,
                )
        if self.renewals == MANY_RENEWALS:
            warnings.warn(
                f"{min(changed)}: changes again and again, and the forward is recorded anew each "
                f"time ({1e3 * (time.perf_counter() - begin_s):.0f} ms): give what changes as a "
                "tensor without dims in the batch, and keep counters out of what inputs refers to",
                stacklevel=2,
            )

    def _surroundings_of(self, module: nn.Module) -> Surroundings:
        opened = {id(module.get_submodule(name)) for name in self.opened}
        units = [part for part in module.modules() if id(part) not in opened]
        return Surroundings(module, units, self.inputs)

    @property
    def is_fake(self) -> bool:
        """True if the module can be run without data."""
        return self._real is None

    def training_of(self, name: str, *, training: bool = True) -> bool:
        """Return the mode that a module is in while the whole one trains, or evaluates.

        Parts of a unit that the recorded module does not have are in that of the whole.
        """
        return (self.modes if training else self._resting).get(name, training)

    @contextlib.contextmanager
    def without_data(self, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
        """Give the module in training mode and a batch, both without data if they can be.

        They are copies, as the module was built: what runs while this is open changes nothing.
        """
        built = self._module if self._real is None else self._real
        with contextlib.ExitStack() as stack:
            stack.enter_context(restore_side_effects(built, self.inputs))
            seed_all(0)  # ranks that draw alike take the same branches
            module = deepcopy_module(built)
            for name, part in module.named_modules():
                part.training = self.modes[name]
            if self._real is None:
                stack.enter_context(self._fake)
                stack.enter_context(even_routing(module))
                batch = tree_map(self._leaf, batch)
            else:
                batch = own_tensors(batch)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(running(None))  # a step that records has losses of its own
            yield module, batch

    def _skeleton(self, module: nn.Module) -> nn.Module:
        """Copy a module with parameters and buffers that have no data."""
        memo: dict[int, Any] = {}
        with self._fake:
            for tensor in (*module.parameters(), *module.buffers()):
                memo[id(tensor)] = self._without_data(tensor)
        return deepcopy_module(module, memo)

    def _without_data(self, tensor: Tensor) -> Tensor:
        floating = tensor.is_floating_point()
        # In fp32 nothing is cast: parameters of other types are computed with as they are.
        cast = floating and isinstance(tensor, nn.Parameter) and self._dtype != torch.float32
        dtype = self._dtype if cast else tensor.dtype
        tensor_copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor_copy, requires_grad=tensor.requires_grad)
        return tensor_copy

    def _record(self, batch: Any, *, training: bool) -> Recording:
        with self.without_data(batch) as (module, given):
            if not training:
                module.eval()
            repeated = RepeatedUnits(module) if self.is_fake else None
            notes = Notes(module, self.opened, given, replays=not self._whole, repeated=repeated)
            before = PythonNumbers()
            with notes.listening():
                args, kwargs = arguments(self.inputs(given))
                result = module(*args, **kwargs)
            self.draws_coins = self.draws_coins or not before.drew_as(PythonNumbers())
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


def _default_inputs(module: nn.Module) -> Inputs:
    """Take the first of a tuple, and of a dict the keys that the module's forward names."""
    named = inspect.signature(module.forward).parameters

    def inputs(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: value for name, value in batch.items() if name in named}
        return batch[0] if isinstance(batch, tuple | list) else batch

    return inputs


def _opened_paths(module: nn.Module, units: Sequence[str] | None) -> frozenset[str]:
    """Return the paths of the modules whose forward is looked into; all others are units."""
    if units is None:
        paths = set(units_of(module))
    else:
        modules = dict(module.named_modules())
        for name in units:
            if name not in modules:
                raise RecordError(f"units: there is no module '{name}' in {type(module).__name__}")
        paths = set(units)
    opened = {""}
    for name in paths:
        parts = name.split(".")
        opened |= {".".join(parts[:at]) for at in range(1, len(parts))}
    return frozenset(opened - paths)


def units_of(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the children of ModuleLists and of Sequentials of like blocks."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if (_is_list(module) and not _is_list(child)) or (not path and _is_list(module)):
            yield below
        else:
            yield from units_of(child, below)


def _is_list(module: nn.Module) -> bool:
    """Return whether each child of a module is a unit of its own."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    blocks = [type(part) for part in module if any(True for _ in part.children())]
    return len(set(blocks)) < len(blocks)


def has_data(tensors: Iterable[Any]) -> bool:
    """Tell whether all tensors among these have values."""
    return not any(
        isinstance(tensor, Tensor) and (tensor.is_meta or isinstance(tensor, FakeTensor))
        for tensor in tensors
    )


def can_be_tried(module: nn.Module, *given: Any) -> bool:
    """Tell whether a forward of a module takes seconds at most, and all has values."""
    count = sum(parameter.numel() for parameter in module.parameters())
    return count <= MOST_CHECKED and has_data((*tree_leaves(given), *module.parameters()))


def _record_error(module: nn.Module, error: Exception) -> RecordError:
    return RecordError(
        f"{type(module).__name__} cannot be run on the example "
        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); a plan without "
        "pipeline needs no recording",
        where=line_of(error),
    )


def _modes_in_evaluation(module: nn.Module) -> dict[str, bool]:
    """Return the mode of each part after the module's own `eval`, and put them back."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    modes = {name: part.training for name, part in module.named_modules()}
    for part, training in before:
        part.training = training
    return modes


def _plain(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are neither torch's own, nor tensors, nor modules."""
    torchs = vars(nn.Module())
    return {
        key: value
        for key, value in vars(part).items()
        if key not in torchs and not isinstance(value, Tensor | nn.Module)
    }


def own_tensors(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


LOOPING = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of transformers' experts: tokens, and the experts of each with weights."""


@contextlib.contextmanager
def even_routing(module: nn.Module) -> Iterator[None]:
    """Let a module without data run whose experts read values; it is the caller's own copy."""
    sizes = _EvenSizes()
    for part in module.modules():
        if _loops(part):
            part.forward = types.MethodType(_even_products, part)
        elif _loops_over_hits(part):
            part.forward = types.MethodType(sizes.go_through_hits, part)
    with _grouped_products(), _listed_by_modes(), sizes:
        yield


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """Let products of experts run without data in any type, which torch's own do in bf16 alone."""
    known = functional.grouped_mm

    def grouped_mm(x: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, FakeTensor) and x.dtype != torch.bfloat16 and weights.ndim > x.ndim == 2:
            return x @ weights[0]
        return known(x, weights, *args, **kwargs)

    functional.grouped_mm = grouped_mm  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.grouped_mm = known


@contextlib.contextmanager
def _listed_by_modes() -> Iterator[None]:
    """Let modes see `tolist` of a tensor without data, which torch takes apart before them."""
    tolist = FakeTensor.tolist
    FakeTensor.tolist = lambda self: handle_torch_function(Tensor.tolist, (self,), self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = tolist  # type: ignore[method-assign]


class _Sizes:
    """Tokens of each expert, which are not known; only `split` takes them."""

    def __init__(self, tensor: Tensor) -> None:
        self.count = len(tensor)

    def __iter__(self, *_: object) -> Iterator[int]:
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    __len__ = __getitem__ = __iter__


class _EvenSizes(TorchFunctionMode):
    """Cuts rows into equal parts where their numbers are values of a tensor.

    While a loop over experts runs, all of them are hit, and each by as many of the choices.
    """

    def __init__(self) -> None:
        super().__init__()
        self._experts = 0
        """Experts of the loop that runs; 0 outside of one."""

    def go_through_hits(
        self, part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        """Run the forward of a module that goes through its experts in a loop."""
        outside, self._experts = self._experts, int(part.num_experts)
        try:
            return type(part).forward(part, hidden_states, top_k_index, top_k_weights)
        finally:
            self._experts = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._experts and args and not kwargs and isinstance(args[0], FakeTensor):
            if func is Tensor.nonzero and args[0].ndim == 1:
                return args[0].new_zeros((self._experts, 1), dtype=torch.int64)
            if func is torch.where and len(args) == 1:
                choices = args[0].new_zeros(args[0].numel() // self._experts, dtype=torch.int64)
                return tuple(choices.clone() for _ in range(args[0].ndim))
            if func is Tensor.__getitem__ and _is_number(args[1]):
                return args[0][0]
        if func is Tensor.tolist and isinstance(args[0], FakeTensor) and args[0].ndim == 1:
            return _Sizes(args[0])
        if func in (Tensor.split, torch.split) and len(args) > 1 and isinstance(args[1], _Sizes):
            return torch.tensor_split(args[0], args[1].count, *args[2:], **kwargs)
        return func(*args, **kwargs)


def _is_number(index: Any) -> bool:
    """Tell whether an index is one number without data."""
    whole = isinstance(index, FakeTensor) and not index.ndim and not index.is_floating_point()
    return whole and index.dtype != torch.bool


def _loops_over_hits(part: nn.Module) -> bool:
    """Tell whether a module is called as experts are, and states how many they are."""
    if not isinstance(getattr(part, "num_experts", None), int):
        return False
    if hasattr(type(part).forward, "__wrapped__"):  # the library has other products for it
        return False
    return tuple(inspect.signature(part.forward).parameters) == LOOPING


def _loops(part: nn.Module) -> bool:
    """Tell whether a module goes through its experts in a loop that the library replaces nowhere.

    A class that has other products to choose from wraps its forward, and a loop is what it does
    where none is chosen.
    """
    chosen = getattr(getattr(part, "config", None), "_experts_implementation", None)
    if hasattr(type(part).forward, "__wrapped__") and chosen not in (None, "eager"):
        return False
    weights = [getattr(part, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
        return False
    return tuple(inspect.signature(part.forward).parameters) == LOOPING


def _even_products(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return [token, hidden], each of a token's experts being the first one."""
    tokens = torch.arange(len(hidden_states), device=hidden_states.device)
    tokens = tokens.repeat_interleave(top_k_index.shape[-1])
    gate, up = functional.linear(hidden_states[tokens], self.gate_up_proj[0]).chunk(2, dim=-1)
    output = functional.linear(self.act_fn(gate) * up, self.down_proj[0])
    output = output * top_k_weights.reshape(-1, 1)
    return torch.zeros_like(hidden_states).index_add(0, tokens, output.to(hidden_states.dtype))
