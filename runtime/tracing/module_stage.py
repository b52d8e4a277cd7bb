"""The whole of a module on one rank: its own forward runs, and nothing of it is replayed.

    stage = ModuleStage(module, recorder)
    outputs = stage(micro=MicroBatch(batch))     # module(*inputs(batch)), in the mode that was set

Parts, parameters and buffers are the module's own, so that what forward binds anew is seen here.
What a plan does to units is done around the forward of each: recomputation, the packing of what it
stores, a seed for what it draws.  The recording says which units there are, and how what draws
random numbers is named; no branch, size or mode of it is kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from meshwright.runtime.core import auxiliary_loss as inner_loss
from meshwright.runtime.core.side_effects import PythonNumbers, seed_python
from meshwright.runtime.techniques.activation_checkpointing import checkpoint_call
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch, seed_draws, unit_seed
from meshwright.runtime.tracing.trace import Node, Recording, called_name, values_of
from meshwright.runtime.tracing.trace_hooks import WHOLE
from meshwright.runtime.tracing.tracer import Recorder, arguments
from meshwright.runtime.tracing.training_modes import TrainingModes

BETWEEN = ""
"""The name under which draws that the recording has not are seeded, and sums between units kept."""


@dataclass(slots=True)
class _ForwardUnderWay:
    """A forward under way."""

    micro: MicroBatch
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each unit, and of each function between units."""


class ModuleStage(RecordedStage):
    """All layers of a module, run by the module itself."""

    _root: nn.Module

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        """`module` is run; `recorder` is of the same construction."""
        self.__dict__["_root"] = module
        super().__init__(module, recorder, 0, len(recorder.first.layers))
        recording = recorder.first
        self._training_modes = TrainingModes(module)
        self._forward: _ForwardUnderWay | None = None
        self._is_inside = False
        """A unit is running, or being recomputed."""
        self._nodes = {node.name: node for node in recording.nodes if node.unit is not None}
        self._functions: dict[str, list[Node]] = {}
        """Functions between units, those of a name in their order."""
        for node in recording.nodes:
            if node.unit is None:
                self._functions.setdefault(called_name(node.call), []).append(node)
        self._is_one_unit = any(node.unit == "" for node in recording.nodes)
        self._draws_between = any(node.draws and node.unit is None for node in recording.nodes)
        self._changed_behind = _changed_behind(recording)
        self._layer_names = {
            recording.nodes[at].name: layer.name
            for layer in recording.layers
            for at in range(layer.first, layer.last)
        }

    def _place_units(self, module: nn.Module) -> None:
        self._share_tables(module)

    def _hold(self, name: str, module: nn.Module) -> None:
        """Do nothing: the module has it."""

    def held(self, name: str) -> Any:
        """Return a parameter, buffer or attribute of the module by its name."""
        path, _, attribute = name.rpartition(".")
        return getattr(self._root.get_submodule(path), attribute)

    def train(self, mode: bool = True) -> ModuleStage:
        """Set the mode as the module's own `train` does."""
        self.training = mode
        self._training_modes.set_mode(training=mode)
        return self

    def wrap_units(self, *, sums: bool = False) -> None:
        """Put around each unit's forward what acts on single calls, if anything does.

        It is done last, around what other techniques made of the forward.  `sums` says that the
        module asks for sums over the batch, which are known by the unit that asks.
        """
        acts = self.recompute or self._packings or self.around or sums
        if not acts and not any(layer.draws for layer in self.layers):
            return
        if self._is_one_unit:
            return  # its call is that of the whole
        for path in self.called_units:
            unit = self.part(path)
            unit.forward = self._called_as(path, unit.forward)

    def _called_as(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._forward is None or self._is_inside:
                return forward(*args, **kwargs)
            return self._unit_call(path, forward, self._forward, args, kwargs)

        return call

    def _outputs_of(self, received: Sequence[Tensor], micro: MicroBatch) -> Any:
        """Return what the module makes of a micro-batch."""
        forward = self._forward = _ForwardUnderWay(micro)
        inner_loss.begin(BETWEEN)
        try:
            with contextlib.ExitStack() as around:
                around.enter_context(_drawing_between(micro, self.device))
                if self.around is not None:
                    around.enter_context(self.around(micro.batch, None))
                if self._draws_between:
                    around.enter_context(_DrawsBetween(self, forward))
                args, kwargs = arguments(self._recorder.inputs(micro.batch))
                if self._is_one_unit:
                    return self._unit_call("", self._root, forward, args, kwargs)
                return self._root(*args, **kwargs)
        finally:
            self._forward = None

    def _unit_call(
        self,
        path: str,
        call: Callable[..., Any],
        forward: _ForwardUnderWay,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a unit in all that acts on this call of it."""
        forward.calls[path] += 1
        first, number = path or WHOLE, forward.calls[path]
        name = first if number == 1 else f"{first}@{number}"
        # A call that the recording has not is as the unit's first.
        node = self._nodes.get(name) or self._nodes.get(first)
        layer = self._layer_names.get(name) or self._layer_names.get(first, "")
        recompute = self.recompute.get(layer, "none")
        grows = torch.is_grad_enabled()
        packing = self._packings.get(layer) if grows else None

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._inside(forward.micro, name, node):
                return call(*args, **kwargs)

        with packing.acting() if packing is not None else contextlib.nullcontext():
            # What it changes in place cannot be kept: then all that it makes is.
            if recompute == "none" or not grows or (node is not None and node.changed):
                return inside(*args, **kwargs)
            if name in self._changed_behind:
                args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            numbers = node is None or not node.draws
            return checkpoint_call(inside, recompute, packing, numbers=numbers)(*args, **kwargs)

    @contextlib.contextmanager
    def _inside(self, micro: MicroBatch, name: str, node: Node | None) -> Iterator[None]:
        """Run a unit, or run it again in backward."""
        before, self._is_inside = self._is_inside, True
        inner_loss.begin(name)
        try:
            with self.acting_on(micro, name, node):
                yield
        finally:
            self._is_inside = before

    @contextlib.contextmanager
    def acting_on(self, micro: MicroBatch, name: str, node: Node | None) -> Iterator[None]:
        """Draw under a call's own seed, and see what its rank does of a sample."""
        with contextlib.ExitStack() as acting:
            if node is not None and node.draws:
                acting.enter_context(
                    seed_draws(micro.seed, name, self.device, python=node.draws_python)
                )
            if self.around is not None:
                acting.enter_context(self.around(micro.batch, node))
            yield

    def function_call(
        self, forward: _ForwardUnderWay, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, and seed it if it is one between units that draws."""
        nodes = () if self._is_inside else self._functions.get(called_name(func), ())
        if not nodes:
            return func(*args, **kwargs)
        key = f"{called_name(func)}()"
        number = forward.calls[key]
        forward.calls[key] += 1
        node = nodes[min(number, len(nodes) - 1)]
        if not node.draws:
            return func(*args, **kwargs)
        name = node.name if number < len(nodes) else f"{node.name}@{number}"
        with self.acting_on(forward.micro, name, node):
            return func(*args, **kwargs)


class _DrawsBetween(TorchFunctionMode):
    """Hands functions of torch to a stage, of which some draw between units."""

    def __init__(self, stage: ModuleStage, forward: _ForwardUnderWay) -> None:
        super().__init__()
        self._stage, self._forward = stage, forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._stage.function_call(self._forward, func, args, kwargs or {})


@contextlib.contextmanager
def _drawing_between(micro: MicroBatch, device: torch.device) -> Iterator[None]:
    """Draw under the seed of the micro-batch what no unit draws that is known to."""
    numbers = None if micro.coin_seed is None else PythonNumbers()
    try:
        with seed_draws(micro.seed, BETWEEN, device):
            if micro.coin_seed is not None:
                seed_python(unit_seed(micro.coin_seed, BETWEEN))
            yield
    finally:
        if numbers is not None:
            numbers.put_back()


def _changed_behind(recording: Recording) -> frozenset[str]:
    """Return the calls of units whose arguments are changed in place by what runs behind them."""
    changed: set[int] = set()
    names = []
    for node in reversed(recording.nodes):
        if node.unit is not None and changed & values_of(node.leaves):
            names.append(node.name)
        changed |= node.changed
    return frozenset(names)
