"""A pipeline stage of a recorded module: it replays its part of the forward on one micro-batch.

    stage = RecordedStage(module, recorder, 0, 2)      # layers 0 and 1, with the module's own parts
    hidden = stage(micro=MicroBatch(batch))            # tensors for the next stage, in fixed order
    outputs = last(*hidden, micro=MicroBatch(batch))   # of the last stage: what the module returns

Parameters have the names of the user's module.  One that several stages read is on each.
What draws random numbers does so under a seed of the micro-batch and of the unit's name, so that
masks depend on no plan, and a recomputation draws the same ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_unflatten as unflatten

from meshwright.planner.documents.plan import Activations
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.errors import RecordError
from meshwright.runtime.core import auxiliary_loss as inner_loss
from meshwright.runtime.core.lru import Recent
from meshwright.runtime.techniques import activation_offload as activations
from meshwright.runtime.techniques.activation_checkpointing import checkpoint_call
from meshwright.runtime.techniques.activation_offload import HostTraffic, Packing
from meshwright.runtime.tracing.stage import (
    Boundary,
    MicroBatch,
    ModelStage,
    generators_of,
    handed_on,
    seed_draws,
)
from meshwright.runtime.tracing.trace import (
    Leaf,
    ModuleTensor,
    Node,
    RecordedLayer,
    Recording,
    StageDevice,
    Value,
    values_of,
)
from meshwright.runtime.tracing.tracer import MOST_RECORDINGS, Recorder, units_of
from meshwright.runtime.tracing.training_modes import TrainingModes

Around = Callable[[Any, Node | None], contextlib.AbstractContextManager[None]]
"""Returns the context of a node's call, by its batch; None stands for calls not recorded."""


@dataclass(frozen=True, slots=True)
class _LayerPart:
    """One layer's nodes of a stage, with what they read and what is read behind them."""

    name: str
    nodes: tuple[Node, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StageProgram:
    """A stage under one recording."""

    recording: Recording
    derived: tuple[Node, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    parts: tuple[_LayerPart, ...]
    done: tuple[tuple[int, ...], ...] = field(default=())
    """[part] Values that nobody reads behind it."""


class RecordedStage(ModelStage):
    """Layers first to last of a recorded module, the last one left out."""

    layers: Sequence[RecordedLayer]

    def __init__(self, module: nn.Module, recorder: Recorder, first: int, last: int) -> None:
        """`module` gives the parts that are run; it and `recorder` are of one construction."""
        super().__init__()
        self._recorder = recorder
        self._users = (module,)
        """The user's module, which is no part of this one."""
        self._range = (first, last)
        self._programs = Recent[_StageProgram](MOST_RECORDINGS)
        self.recompute: dict[str, Recompute] = {}
        """Recompute setting of each layer; layers that are not named keep their activations."""
        self._packings: dict[str, Packing] = {}
        """Packing that each layer's stored tensors go through; those that are not named stay."""
        self.around: Around | None = None
        """Context of each call of a node, by the batch of its micro-batch."""
        self.checks_shapes = False
        """Each call must make what it made when it was recorded; not where ranks have parts."""
        self._beside: dict[str, tuple[nn.Module, str, Tensor, int]] = {}
        """Tensors beside units as the user's module has them: whose, under which name, which, and
        how often they were changed in place."""
        recording = recorder.first
        self.layers = recording.layers[first:last]
        self._is_last = last == len(recording.layers)
        program = self._program(recording)
        nodes = [*program.derived, *(node for part in program.parts for node in part.nodes)]
        names = dict.fromkeys(node.unit for node in nodes if node.unit is not None)
        self._whole: tuple[nn.Module, ...] = ()
        """A module whose own tables are this one's."""
        if "" in names:
            names = dict.fromkeys(units_of(module))
            self._share_tables(module)
        self.called_units = tuple(names)
        self._place_units(module)
        leaves = [leaf for node in nodes for leaf in node.leaves]
        if self._is_last:  # what the module returns is the last stage's
            leaves += recording.result
        held = {leaf.name for leaf in leaves if isinstance(leaf, ModuleTensor)}
        for name in sorted(held):
            self._hold(name, module)
        self.units = dict(self._lone_units(names, [self.held(name) for name in held]))

    def _share_tables(self, module: nn.Module) -> None:
        """Have the parts, parameters and buffers of a module as one's own: there is one of each."""
        self._whole = (module,)
        self._modules, self._parameters = module._modules, module._parameters
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set

    def _place_units(self, module: nn.Module) -> None:
        """Put all units under their paths."""
        for name in self.called_units:
            self.place(name, module.get_submodule(name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this class beside a unit of the user's that has the same name."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def packing(
        self, name: str, choice: Activations, traffic: HostTraffic, *, first: bool, last: bool
    ) -> Packing | None:
        """Return what a layer's stored tensors go through, its values in place; None keeps them.

        `first` and `last` are those of a row of layers that all offload.
        """
        called = self._nodes_of(name)
        names = {
            leaf.name for node in called for leaf in node.leaves if isinstance(leaf, ModuleTensor)
        }
        return activations.packing(
            self._units_of(called),
            choice,
            traffic,
            first=first,
            last=last,
            beside=functools.partial(self._tensors, tuple(sorted(names))),
        )

    def pack(self, name: str, packing: Packing) -> None:
        """Pack what a layer stores wherever it is replayed; units are in place."""
        self._packings[name] = packing
        for unit in self._units_of(self._nodes_of(name)):
            packing.leave_parameters(unit)

    def _nodes_of(self, name: str) -> Sequence[Node]:
        layer = next(layer for layer in self.layers if layer.name == name)
        return self._recorder.first.nodes[layer.first : layer.last]

    def _units_of(self, called: Sequence[Node]) -> nn.ModuleList:
        return nn.ModuleList(
            self.part(unit) if unit else self._whole[0]
            for unit in dict.fromkeys(node.unit for node in called)
            if unit is not None
        )

    def _tensors(self, names: Sequence[str]) -> list[Tensor]:
        return [tensor for tensor in map(self.held, names) if isinstance(tensor, Tensor)]

    def place(self, name: str, part: nn.Module) -> None:
        """Put a unit under its path, in place of what stood there."""
        path, _, attribute = name.rpartition(".")
        # The user's names may be those of this class's own attributes.
        self._parent(path)._modules[attribute] = part

    def keep_tensors(self, names: Sequence[str], module: nn.Module) -> list[nn.Parameter]:
        """Hold tensors of `module` that no node reads; return the parameters among them."""
        for name in names:
            self._hold(name, module)
        tensors = (self.held(name) for name in names)
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    def callable_of(self, node: Node) -> Callable[..., Any]:
        """Return what a node calls."""
        if node.unit is None:
            assert node.call is not None
            return node.call
        return self.part(node.unit) if node.unit else self._whole[0]

    def unit(self, name: str) -> nn.Module | None:
        """Return a unit by its path; None where it is not on this stage."""
        if not name:
            return self._whole[0] if self._whole else None
        try:
            return self.part(name)
        except KeyError:
            return None

    def boundary(self, batch: Any) -> Boundary:
        """Return what crosses under the recording of a batch like this one."""
        recording = self._recorder.recording(batch, training=self.training)
        values = recording.live(recording.layers[self._range[0]].first) if self._range[0] else ()
        makers = tuple(recording.nodes[recording.maker[value]].name for value in values)
        return Boundary(self.received(recording), self.sent(recording), makers)

    def received(self, recording: Recording) -> tuple[Tensor, ...]:
        """Return meta tensors of what this stage gets from the one before it."""
        first = self._range[0]
        return recording.sent(first - 1) if first else ()

    def sent(self, recording: Recording) -> tuple[Tensor, ...]:
        """Return meta tensors of what this stage hands on; the last one's outputs are not."""
        return () if self._is_last else recording.sent(self._range[1] - 1)

    def train(self, mode: bool = True) -> RecordedStage:
        """Set the mode as the module's own `train` and `eval` do."""
        self.training = mode
        self._users_modes.set_mode(training=mode)
        users = set(self._users[0].modules())
        by_name = {name: part.training for name, part in self._users[0].named_modules()}
        for name, part in self.named_modules():
            if part is not self and part not in users:
                part.training = by_name.get(name, mode)
        return self

    @functools.cached_property
    def _opened_parts(self) -> list[tuple[str, nn.Module]]:
        """The user's modules whose forward is taken apart, by path."""
        parts = dict(self._users[0].named_modules())
        return [(name, parts[name]) for name in self._recorder.opened if name in parts]

    @functools.cached_property
    def _users_modes(self) -> TrainingModes:
        return TrainingModes(self._users[0], self._recorder.modes)

    def forward(self, *received: Tensor, micro: MicroBatch | None = None) -> Any:
        """Run one micro-batch, given or selected.

        Returns tensors in fixed order.  The last stage returns the module's own outputs, or what
        `loss` makes of them.
        """
        if micro is None:
            micro = self.selected()
        if self.order is not None:
            self.order.begin(self.device)
        # A pipeline hands its first stage the number too.
        received = received if self._range[0] else ()
        if not self.agrees:
            return self._handed_over(self._outputs_of(received, micro), micro)
        try:
            if self.failure is None or self.order is not None:
                return self._handed_over(self._outputs_of(received, micro), micro)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.fail(error)
            if self.order is not None:
                self.order.skip_rest()
        return self._close(self._stand_ins(received, micro))

    def _handed_over(self, outputs: Any, micro: MicroBatch) -> Any:
        if self._is_last:
            return self._close(self.loss(outputs, micro)) if self.loss else outputs
        return self._close(self._stand_ins(outputs, micro) if self.failure else outputs)

    def _close(self, outputs: Any) -> Any:
        """Return a loss, or what is sent, with a backward in the order of all ranks."""
        if isinstance(outputs, Tensor):
            return self.closed(outputs)
        at = next((at for at, tensor in enumerate(outputs) if tensor.requires_grad), None)
        if at is None:
            return outputs
        return (*outputs[:at], self.closed(outputs[at]), *outputs[at + 1 :])

    def refuse(self, error: RecordError) -> None:
        """Raise an error, or keep it where other ranks would wait for this one meanwhile."""
        if not (self.order and self.agrees):
            raise error
        self.fail(error)

    def _stand_ins(self, behind: tuple[Tensor, ...], micro: MicroBatch) -> Any:
        """Return zeros in place of what failed, so that other ranks come to where all agree.

        Their backward goes on through what they stand `behind`.
        """
        floats = [tensor for tensor in behind if tensor.requires_grad]
        zero = sum((0.0 * tensor.sum() for tensor in floats), torch.zeros((), device=self.device))
        if self._is_last:
            return zero if zero.requires_grad else zero.requires_grad_()
        recording = self._recorder.recording(micro.batch, training=self.training)
        return tuple(
            torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            + (zero if floats else torch.zeros_like(zero, requires_grad=True)).to(like.dtype)
            if like.requires_grad and torch.is_grad_enabled()
            else torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            for like in self.sent(recording)
        )

    def _outputs_of(self, received: tuple[Tensor, ...], micro: MicroBatch) -> Any:
        training = self.training
        program = self._program(self._recorder.recording(micro.batch, training=training))
        seeded = self.agrees and micro.seed is not None
        with self._refusing_other_draws() if seeded else contextlib.nullcontext():
            return self._run(program, micro, received)

    @contextlib.contextmanager
    def _refusing_other_draws(self) -> Iterator[None]:
        """Refuse random numbers that no call is known to draw: they would not follow the sample."""
        generator = generators_of(self.device)[-1]
        before = generator.get_state()
        yield
        if not torch.equal(before, generator.get_state()):
            self.refuse(
                RecordError(
                    "a unit draws random numbers that it did not draw in the first batch (a rate "
                    "that was 0), and would draw others under another plan; begin with a rate "
                    "above 0 (1e-6), or use a plan without pipeline"
                )
            )

    def _run(self, program: _StageProgram, micro: MicroBatch, received: tuple[Tensor, ...]) -> Any:
        run = _MicroBatchRun(self, program.recording, micro)
        run.values = dict(zip(program.received, received, strict=True))
        for node in program.derived:
            run.call(node)
        for part, done in zip(program.parts, program.done, strict=True):
            recompute = self.recompute.get(part.name, "none")
            trains = torch.is_grad_enabled()
            packing = self._packings.get(part.name) if trains else None
            with packing.acting() if packing is not None else contextlib.nullcontext():
                if recompute == "none" or not trains:
                    for node in part.nodes:
                        run.call(node)
                else:
                    run.recompute_part(part, recompute, packing)
            for value in done:
                run.values.pop(value, None)
        if self._is_last:
            leaves = [run.value(leaf) for leaf in program.recording.result]
            return unflatten(leaves, program.recording.result_spec)
        passed, values = set(program.received), program.recording.values
        return tuple(
            handed_on(run.values[at], values[at].requires_grad, passed=at in passed)
            for at in program.sent
        )

    def held(self, name: str) -> Any:
        """Return a parameter, buffer or attribute by its name in the user's module."""
        path, _, attribute = name.rpartition(".")
        owner = self.part(path)
        for table in (owner._parameters, owner._buffers):
            if attribute in table:
                return table[attribute]
        return getattr(owner, attribute)

    def _program(self, recording: Recording) -> _StageProgram:
        # A program holds its recording, so that no other one has its id meanwhile.
        return self._programs.get(id(recording), lambda: self._new_program(recording))

    def _new_program(self, recording: Recording) -> _StageProgram:
        first, last = self._range
        self._recorder.refuse_other_layers(recording)
        layers = recording.layers[first:last]
        parts = []
        for layer in layers:
            nodes = tuple(
                recording.nodes[at]
                for at in range(layer.first, layer.last)
                if at not in recording.derived
            )
            values = {value for node in nodes for _, value in node.made}
            reads = {value for node in nodes for value in values_of(node.leaves)}
            gives = sorted(v for v in values if recording.last_read.get(v, -1) >= layer.last)
            parts.append(_LayerPart(layer.name, nodes, tuple(sorted(reads - values)), tuple(gives)))
        received, sent = recording.live(layers[0].first), recording.live(layers[-1].last)
        wanted = {value for part in parts for value in part.takes}
        if self._is_last:
            wanted |= values_of(recording.result)
        kept = {*sent, *(values_of(recording.result) if self._is_last else ())}
        done: list[tuple[int, ...]] = []
        later: set[int] = set(kept)
        for part in reversed(parts):
            here = {*part.takes, *(v for node in part.nodes for _, v in node.made)}
            done.append(tuple(here - later))
            later |= set(part.takes)
        return _StageProgram(
            recording=recording,
            derived=tuple(recording.nodes[at] for at in recording.needed_nodes(wanted)),
            received=received,
            sent=sent,
            parts=tuple(parts),
            done=tuple(reversed(done)),
        )

    def _parent(self, path: str) -> nn.Module:
        parent: nn.Module = self
        for step in path.split(".") if path else ():
            parent = parent._modules.setdefault(step, nn.Module()) or parent
        return parent

    def _hold(self, name: str, module: nn.Module) -> None:
        path, _, attribute = name.rpartition(".")
        owner, parent = module.get_submodule(path), self._parent(path)
        if parent is owner:
            return  # inside a unit of this stage
        tensor = getattr(owner, attribute)
        self._beside[name] = owner, attribute, tensor, tensor._version
        if attribute in owner._parameters:
            parent._parameters[attribute] = tensor
        elif attribute in owner._buffers:
            parent._buffers[attribute] = tensor
            if attribute in owner._non_persistent_buffers_set:
                parent._non_persistent_buffers_set.add(attribute)
        else:
            setattr(parent, attribute, tensor)

    @torch.no_grad()
    def follow(self) -> None:
        """Take what the training loop gave its module beside units: buffers, and plain tensors.

        Raises RecordError where it is of another shape or type than when it was recorded, or the
        module is in another mode.
        """
        for name, part in self._opened_parts:
            mode = self._recorder.training_of(name, training=self.training)
            if part.training != mode:
                raise RecordError(
                    f"{name or type(part).__name__}: is in "
                    f"{'eval' if mode else 'train'} mode, and was recorded in "
                    f"{'train' if mode else 'eval'} mode; set it before the Engine is made, or use "
                    "a plan without pipeline"
                )
        for name, (owner, attribute, before, version) in self._beside.items():
            now = getattr(owner, attribute)
            if isinstance(before, nn.Parameter) or (now is before and now._version == version):
                continue
            mine = self.held(name)
            if not isinstance(now, Tensor) or (now.shape, now.dtype) != (mine.shape, mine.dtype):
                raise RecordError(
                    f"{name}: has another shape or type than when it was recorded; give it the "
                    "same, or use a plan without pipeline"
                )
            if mine is not now:
                mine.copy_(now)
            self._beside[name] = owner, attribute, now, now._version


class _MicroBatchRun:
    """One micro-batch on its way through a stage."""

    def __init__(self, stage: RecordedStage, recording: Recording, micro: MicroBatch) -> None:
        self._stage = stage
        self._recording = recording
        self._leaves = tree_leaves(micro.batch)
        self._batch = micro.batch
        self._seed = micro.seed
        self._device = stage.device
        self.values: dict[int, Tensor] = {}

    def value(self, leaf: Any) -> Any:
        """Return what stands for an argument of a node."""
        match leaf:
            case Value(at):
                return self.values[at]
            case Leaf(at):
                return self._leaves[at]
            case ModuleTensor(name):
                return self._stage.held(name)
            case StageDevice():
                return self._device
            case Tensor():
                return leaf.to(self._device)
            case _:
                return leaf

    def call(self, node: Node) -> None:
        """Run one node."""
        args, kwargs = node.arguments(self.value)
        called = self._stage.callable_of(node)
        inner_loss.begin(node.name)
        around = self._stage.around
        if node.grad and not node.draws and around is None:  # most: contexts take the host's time
            result = called(*args, **kwargs)
        else:
            drawing = (
                seed_draws(self._seed, node.name, self._device, python=node.draws_python)
                if node.draws
                else contextlib.nullcontext()
            )
            seeing = contextlib.nullcontext() if around is None else around(self._batch, node)
            with drawing, seeing, contextlib.nullcontext() if node.grad else torch.no_grad():
                result = called(*args, **kwargs)
        outputs = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        for place, value in node.made:
            self.values[value] = outputs[place]
        if self._stage.checks_shapes:
            self._check_shapes(node)

    def _check_shapes(self, node: Node) -> None:
        """Refuse a call that makes something else than when it was recorded."""
        for _, value in node.made:
            recorded, made = self._recording.values[value], self.values[value]
            if made.shape != recorded.shape and value not in self._recording.sized_by_values:
                wrong = (
                    f"{list(made.shape)} of this batch, and has made {list(recorded.shape)} when "
                    "it was recorded: its size depends on values; name a unit around it and what "
                    "reads it with units="
                )
            elif made.dtype != recorded.dtype:
                wrong = (
                    f"{made.dtype} of this batch, and has made {recorded.dtype} when it was "
                    "recorded; let its type follow from what it is given"
                )
            else:
                continue
            self._stage.refuse(
                RecordError(
                    f"{node.name} makes {wrong}, or use a plan without pipeline", where=node.where
                )
            )

    def recompute_part(
        self, part: _LayerPart, recompute: Recompute, packing: Packing | None
    ) -> None:
        """Run a layer that keeps what it takes, and makes the rest again in backward."""

        def layer(*taken: Tensor) -> tuple[Tensor, ...]:
            inside = _MicroBatchRun.__new__(_MicroBatchRun)
            inside.__dict__.update(self.__dict__)
            inside.values = dict(zip(part.takes, taken, strict=True))
            for node in part.nodes:
                inside.call(node)
            return tuple(inside.values[value] for value in part.gives)

        taken = [self.values[value] for value in part.takes]
        # What is changed in place cannot be kept; it is then made again with all else.
        selective = recompute == "selective" and not any(node.changed for node in part.nodes)
        outputs = checkpoint_call(layer, "selective" if selective else "full", packing)(*taken)
        self.values.update(zip(part.gives, outputs, strict=True))
