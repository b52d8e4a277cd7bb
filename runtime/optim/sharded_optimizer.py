"""Any optimizer of torch over a rank's parts of the parameters.

    optimizer(groups)    is called with a list of {"params": [...], **settings}, as torch's classes
                         are, and returns a torch.optim.Optimizer

The parameters that it gets are plain, and share memory with the rank's parts of the model's.  That
is right for an update that treats each element by itself.  Whether one does is tried at the start,
on a small matrix that is whole, cut in rows, and all on one side.  An update that looks at a whole
matrix (Muon, Adafactor) is made by one owner of each matrix, which gathers the gradient, steps, and
sends the others their parts.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.planner.errors import OptimizerError
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.loss import LossScale
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.side_effects import restore_side_effects
from meshwright.runtime.core.torch_api_hints import PendingGradient, refuse_step
from meshwright.runtime.core.torch_internals import compute_local_shape_and_global_offset
from meshwright.runtime.optim.gradients import (
    Gradients,
    Slot,
    StepMeasurement,
    share_values,
    take_sections,
    whole_part,
)
from meshwright.runtime.optim.offloaded_state import (
    StreamedState,
    bytes_of,
    is_quantized,
    plain_values,
    steps_apart,
    take_values,
)
from meshwright.runtime.parallel.gradient_compression import Mean

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Settings = Mapping[str, Any]
"""Settings of a group of torch's optimizers (`lr`, `weight_decay`); `optimizer` among them is a
factory for this group instead of the engine's."""
GroupOf = Callable[[str, nn.Parameter], Settings] | Mapping[str | type[nn.Module], Settings]
"""Settings of a parameter by its name, or by the module that has it: by a path, in which `*` stands
for anything, or by a class.  The first that matches counts."""

PROBE_ROWS, PROBE_STEPS = 6, 4
PROBE_SHAPE = (PROBE_ROWS, 5, 2, 2, 2)
PROBE_CUTS = ((2, 4), (6, 0))
PROBE_ELEMENTS = 16384
"""A power of two that is more than the blocks in which optimizers keep state in few bits."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with the same settings, by name, in the model's order; equal on all ranks."""

    factory: Factory
    settings: Mapping[str, Any]
    names: tuple[str, ...]
    elementwise: bool | None = None
    """True if the update treats each element by itself; None: it is tried."""
    waits: bool = False
    """The host waits to learn whether weights move: the update takes no `found_inf`."""


def parameter_groups(
    module: nn.Module, factory: Factory, group_of: GroupOf | None
) -> list[ParameterGroup]:
    """Put the parameters that are trained into groups by their settings.

    Raises OptimizerError where a path or a class matches no parameter.
    """
    groups: dict[Any, tuple[Factory, dict[str, Any], list[str]]] = {}
    if isinstance(group_of, Mapping):
        group_of = _by_modules(module, group_of)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        settings = dict(group_of(name, parameter)) if group_of is not None else {}
        factory_of_group = settings.pop("optimizer", factory)
        key = (id(factory_of_group), tuple(sorted((k, repr(v)) for k, v in settings.items())))
        groups.setdefault(key, (factory_of_group, settings, []))[2].append(name)
    return [
        ParameterGroup(factory_of_group, settings, tuple(names))
        for factory_of_group, settings, names in groups.values()
    ]


def _by_modules(
    module: nn.Module, groups: Mapping[str | type[nn.Module], Settings]
) -> Callable[[str, nn.Parameter], Settings]:
    """Return settings by name of those by path and class."""
    settings: dict[str, Settings] = {}
    matched = set()
    for name, _ in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        for key, value in groups.items():
            if isinstance(owner, key) if isinstance(key, type) else _is_in(name, key):
                matched.add(key)
                settings.setdefault(name, value)
    for key in groups:
        if key not in matched:
            text = key.__name__ if isinstance(key, type) else key
            raise OptimizerError(
                f"groups: '{text}' matches no parameter of {type(module).__name__}; give a path as "
                "named_modules() or named_parameters() has it (`*` stands for anything), or a class"
            )
    return lambda name, _: settings.get(name, {})


def _is_in(name: str, path: str) -> bool:
    """Tell whether a parameter has a path, or is in a module that has it.

    >>> _is_in("blocks.0.norm.weight", "blocks.*.norm"), _is_in("blocks.0.norm.weight", "norm")
    (True, False)
    """
    return fnmatch.fnmatchcase(name, path) or fnmatch.fnmatchcase(name, f"{path}.*")


def make_optimizer(factory: Factory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Call a factory; what goes wrong there is reported with its name."""
    try:
        optimizer = factory(groups)
    except Exception as error:
        raise OptimizerError(
            f"optimizer {name_of(factory)} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer {name_of(factory)} returned {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS calls the loss again and again in one step, and a plan has one forward and "
            "backward per step; use another optimizer"
        )
    given = {id(parameter) for group in groups for parameter in group["params"]}
    used = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if used != given:
        raise OptimizerError(
            f"optimizer {name_of(factory)} was given {len(given)} parameters and has {len(used)}; "
            "it must take the groups as they are"
        )
    set_mode(optimizer, training=True)
    return optimizer


def set_mode(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    """Let an optimizer whose parameters are others in evaluation (schedule-free) know the mode."""
    call = getattr(optimizer, "train" if training else "eval", None)
    if callable(call):
        call()


def _of_group(group: ParameterGroup, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return make_optimizer(group.factory, [{"params": parameters, **group.settings}])


def name_of(factory: Factory) -> str:
    """Return how a factory is called in messages."""
    return getattr(factory, "__qualname__", type(factory).__name__)


def is_elementwise(
    factory: Factory, settings: Mapping[str, Any], dims: Iterable[int] = (2,)
) -> bool:
    """Tell whether an update treats each element by itself: it is tried, for numbers of dims.

    >>> is_elementwise(torch.optim.Adam, {"lr": 0.1}), is_elementwise(torch.optim.Adafactor, {})
    (True, False)
    """
    return all(_is_elementwise(factory, settings, PROBE_SHAPE[:count]) for count in dims)


def _is_elementwise(factory: Factory, settings: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    grads = [torch.randn(shape, generator=generator) for _ in range(PROBE_STEPS)]
    whole = _probe(factory, settings, first, grads, slice(0, PROBE_ROWS))
    for rows, _ in PROBE_CUTS:
        parts = [slice(0, rows), *([slice(rows, PROBE_ROWS)] if rows < PROBE_ROWS else [])]
        pieces = [_probe(factory, settings, first, grads, part) for part in parts]
        if any(not made_alike for _, made_alike in (whole, *pieces)):
            return False
        if not torch.equal(torch.cat([value for value, _ in pieces]), whole[0]):
            return False
    return True


def couples_parameters(group: ParameterGroup) -> bool:
    """Tell whether an update of one parameter depends on the others of its group: it is tried.

    One that draws random numbers is not: it would draw others for each parameter.

    >>> couples_parameters(ParameterGroup(torch.optim.Adam, {"lr": 0.1}, ()))
    False
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = torch.randn(1 + PROBE_STEPS, 2, 3, 3, generator=generator)
    together, apart = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    with restore_side_effects(group.factory), torch.compiler.set_stance("force_eager"):
        drawn = torch.get_rng_state()
        optimizers = [
            _of_group(group, parameters)
            for parameters in (together, *([parameter] for parameter in apart))
        ]
        for both in grads:
            for parameters in (together, apart):
                for parameter, grad in zip(parameters, both, strict=True):
                    parameter.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        if not torch.equal(drawn, torch.get_rng_state()):
            return False
    return not all(map(torch.equal, together, apart))


def _probe(
    factory: Factory,
    settings: Mapping[str, Any],
    first: Tensor,
    grads: Sequence[Tensor],
    rows: slice,
) -> tuple[Tensor, bool]:
    """Return some rows after a few steps, and whether the state has their shape or is numbers."""
    with restore_side_effects(factory), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        parameter = nn.Parameter(first[rows].clone())
        optimizer = make_optimizer(factory, [{"params": [parameter], **settings}])
        for grad in grads:
            parameter.grad = grad[rows].clone()
            optimizer.step()
    alike = all(
        not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape
        for value in optimizer.state[parameter].values()
    )
    return parameter.detach(), alike


def state_bytes(group: ParameterGroup, shapes: Iterable[torch.Size]) -> float:
    """Return the bytes that an optimizer keeps beside fp32 parameters of these shapes: it is tried.

    Numbers, such as a count of steps, are left out.  An update that looks at whole matrices is
    tried on each shape once, others on as many elements, or PROBE_ELEMENTS to twice those.

    >>> sgd = ParameterGroup(torch.optim.SGD, {"momentum": 0.9}, ())
    >>> state_bytes(sgd, [torch.Size((3, 5))])
    60.0
    """

    @functools.cache
    def state_bytes(shape: torch.Size) -> int:
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        with restore_side_effects(group.factory), torch.compiler.set_stance("force_eager"):
            optimizer = make_optimizer(group.factory, [{"params": [parameter], **group.settings}])
            optimizer.step()
        kept = optimizer.state[parameter].values()
        return sum(bytes_of(value) for value in kept if isinstance(value, Tensor) and value.ndim)

    if not is_elementwise(group.factory, group.settings):
        return float(sum(state_bytes(shape) for shape in shapes))
    total = 0.0
    for shape in shapes:
        # In blocks, of which a large tensor may have a whole number.
        most = PROBE_ELEMENTS + shape.numel() % PROBE_ELEMENTS
        tried = min(shape.numel(), most)
        total += state_bytes(torch.Size((tried,))) * shape.numel() / tried if tried else 0.0
    return total


def gathered_names(groups: Iterable[ParameterGroup]) -> frozenset[str]:
    """Return the parameters that one rank updates whole where a plan divides them."""
    return frozenset(
        name
        for group in groups
        if not is_elementwise(group.factory, group.settings)
        for name in group.names
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ParameterPart:
    """One parameter as its optimizer has it."""

    slot: Slot
    plain: nn.Parameter
    """This rank's part, or at its owner the whole of a matrix that is gathered."""
    owner: int | None = None
    """Rank along the division of a matrix that is gathered; None: each rank steps its part."""
    owned: bool = True


class TorchOptimizers(Gradients):
    """A user's optimizers over this rank's parameters, and the gradients that they use."""

    def __init__(
        self,
        slots: Sequence[Slot],
        groups: Sequence[ParameterGroup],
        place: Place,
        *,
        device: torch.device,
        divisor: float,
        scale: LossScale | None = None,
        mean: Mean | None = None,
        gather: bool = True,
        streamed: bool = False,
        learning_rate: Callable[[int], float | None] = lambda _: None,
    ) -> None:
        """Without `gather` an update that is not element-wise is refused where it would move.

        `learning_rate` returns that of an update behind others; None leaves it as it is.

        With `streamed` the state lies on the host, and an optimizer that updates parameters
        together is refused.
        """
        super().__init__(slots, place, device=device, divisor=divisor, scale=scale, mean=mean)
        self._groups = list(groups)
        self._rate = learning_rate
        self._parts: dict[str, _ParameterPart] = {}
        self._load: dict[Any, int] = {}
        self._of_both = place.matrix_groups if place.sharded else {}
        """Ranks that divide a matrix together; made by all ranks, whatever their optimizers."""
        self._streamed = StreamedState(device) if streamed else None
        by_name = {slot.name: slot for slot in self.slots}
        own: dict[int, tuple[Factory, list[dict[str, Any]]]] = {}
        for group in self._groups:
            held = [by_name[name] for name in group.names if name in by_name]
            divided, elementwise = any(map(_is_divided, held)), group.elementwise
            if elementwise is None and divided:
                dims = {min(slot.parameter.ndim, len(PROBE_SHAPE)) for slot in held} - {0}
                elementwise = is_elementwise(group.factory, group.settings, sorted(dims))
            gathered = elementwise is False
            apart = divided or place.is_cut
            if apart and group.elementwise is None and couples_parameters(group):
                raise OptimizerError(
                    f"optimizer {name_of(group.factory)} looks at all parameters for the update of "
                    "each (a norm or a distance over the model), and ranks of this plan have "
                    "other ones; clip by Engine(clip_norm=...), or use a plan with zero 0 and no "
                    "pipeline"
                )
            if gathered and not gather:
                raise OptimizerError(
                    f"optimizer {name_of(group.factory)} looks at whole matrices, and this plan "
                    "divides them (ZeRO); allow gather=True or use a plan with zero 0"
                )
            if (
                streamed
                and not group.elementwise
                and not steps_apart(functools.partial(_of_group, group))
            ):
                raise OptimizerError(
                    f"optimizer {name_of(group.factory)} updates parameters together, and offload "
                    "'optimizer' one after the other; plan without offload"
                )
            parts = self._parts_of(held, gathered=gathered)
            self._parts |= {part.slot.name: part for part in parts}
            own.setdefault(id(group.factory), (group.factory, []))[1].append(
                {
                    "params": [p.plain for p in parts if p.owned and p.plain.numel()],
                    **group.settings,
                }
            )
        self.optimizers = tuple(make_optimizer(factory, listed) for factory, listed in own.values())
        """One optimizer per factory, over the groups in the order in which the model has them."""
        self.pending = False
        """Gradients wait for an update: parameters show that in `p.grad`, and none may step."""
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        self._users = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.pending:
            refuse_step(optimizer)

    def hide(self) -> None:
        """Let gradients wait for the update, out of the reach of whoever has the parameters."""
        self.pending = True
        for part in self._parts.values():
            part.plain.grad = PendingGradient(part.plain)
        for slot in self.slots:
            for parameter in (slot.parameter, *(copy for copy, _ in slot.copies_here)):
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = PendingGradient(parameter)

    def show(self) -> None:
        """Take up gradients that were hidden."""
        if not self.pending:
            return
        self.pending = False
        for part in self._parts.values():
            part.plain.grad = None
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    def dropped(self) -> None:
        """Forget the gradients, hidden ones too."""
        self.show()
        super().dropped()

    def _parts_of(self, held: Sequence[Slot], *, gathered: bool) -> list[_ParameterPart]:
        parts = []
        # The largest first, each to the owner that has the least so far; the same on all ranks.
        order = sorted(held, key=lambda slot: -slot.parameter.numel()) if gathered else held
        for slot in order:
            if not (gathered and _is_divided(slot)):
                # `data` has a version counter of its own: backwards under way do not need the
                # values that an update leaves.
                parts.append(_ParameterPart(slot, nn.Parameter(slot.local.data)))
                continue
            group = self._division(slot)
            loads = [self._load.get((id(group), rank), 0) for rank in range(group.size())]
            owner = loads.index(min(loads))
            self._load[id(group), owner] = loads[owner] + slot.parameter.numel()
            owned = group.rank() == owner
            shape = slot.parameter.shape if owned else (0,)
            plain = nn.Parameter(torch.empty(shape, dtype=slot.local.dtype, device=self.device))
            parts.append(_ParameterPart(slot, plain, owner, owned))
        at = {slot: index for index, slot in enumerate(held)}
        return sorted(parts, key=lambda part: at[part.slot])

    @property
    def settles(self) -> bool:
        """True if an update waits to learn what took part in the step (see `settle`)."""
        return self.participation is not None

    def follow(self) -> None:
        """Update the parameters where their values are now."""
        for part in self._parts.values():
            part.slot.local.data = part.plain.data = part.slot.parameter.data

    @torch.no_grad()
    def update(self, grads: Mapping[Slot, Tensor], measured: StepMeasurement) -> None:
        """Step with gradients of the mean loss.

        No weight moves where nothing counted, nor, in fp16, where gradients overflowed.
        """
        self.show()
        spoilt = self.scale.spoilt(measured.norm)
        self.scale.update(spoilt)
        self._next_rate()
        if float(measured.factor) == 0 or (spoilt is not None and float(spoilt)):
            self.dropped()
            return
        self._step(grads)

    @torch.no_grad()
    def update_on_device(self, grads: Mapping[Slot, Tensor], measured: StepMeasurement) -> None:
        """Step with gradients of the mean loss; no host waits to learn whether weights move.

        That is up to the optimizers, which take `found_inf` as torch's fused ones do.
        """
        overflown = self.scale.spoilt(measured.norm)
        skipped = (measured.factor == 0).float()  # nothing counted
        if overflown is not None:
            skipped = skipped.maximum(overflown)
        for optimizer in self.optimizers:
            first = next(
                (parameter for g in optimizer.param_groups for parameter in g["params"]), skipped
            )
            # torch would copy it to parameters on the host without a wait, and read it too early.
            optimizer.found_inf = skipped.to(first.device)  # type: ignore[attr-defined]
        self.scale.update(overflown)
        self._next_rate()
        self._step(grads)
        for optimizer in self.optimizers:
            del optimizer.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(
        self, totals: Tensor, clip_norm: float, earlier: Tensor | None = None
    ) -> StepMeasurement:
        """Make gradients whole and use them; see `reduce_step_stats` for the arguments.

        A norm that is not finite means, in fp16, that the step changed nothing but the scale; so
        does, always, a count of 0.
        """
        grads = self.unsharded()
        measured = self.reduce_step_stats(grads, totals, earlier)
        if self.settles:
            self.settle(grads, measured)
        self.scale_and_clip(grads, measured, clip_norm)
        self.apply(grads, measured)
        return measured

    def apply(self, grads: Mapping[Slot, Tensor], measured: StepMeasurement) -> None:
        """Update; no host waits where all that is trained takes part in each step."""
        if self.settles or any(group.waits for group in self._groups):
            self.update(grads, measured)
        else:
            self.update_on_device(grads, measured)

    def _next_rate(self) -> None:
        rate = self._rate(int(self.steps))
        self.steps += 1
        if rate is None:
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # which a compiled update reads (torchao)
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _step(self, grads: Mapping[Slot, Tensor]) -> None:
        """Let the optimizers use the gradients, and forget those."""
        for part in self._parts.values():
            grad = grads.get(part.slot)
            if grad is None:
                continue
            if part.owner is not None:
                self._gather(part, grad)
            elif not grad.is_sparse and grad.stride() != part.plain.stride():
                # Fused updates run through memory and look at no strides.
                part.plain.grad = torch.empty_like(part.plain).copy_(grad)
            else:
                part.plain.grad = grad
        with torch.enable_grad():
            if self._streamed is not None:
                self._streamed.step(self._users)
            for optimizer in () if self._streamed is not None else self.optimizers:
                optimizer.step()
        for part in self._parts.values():
            if part.owner is not None and part.slot in grads:
                self._scatter(part)
            part.plain.grad = None
        share_values(self._copied)
        self.dropped()

    def _gather(self, part: _ParameterPart, grad: Tensor) -> None:
        """Bring a whole matrix and its gradient to the owner."""
        whole = [_whole_of(part.slot, local) for local in (grad, part.slot.local)]
        if part.owned:
            part.plain.grad = whole[0]
            part.plain.data.copy_(whole[1])

    def _scatter(self, part: _ParameterPart) -> None:
        """Take this rank's part of what the owner made."""
        group, slot = self._division(part.slot), part.slot
        whole = part.plain.data if part.owned else torch.empty_like(slot.parameter, device="meta")
        if not part.owned:
            whole = torch.empty(whole.shape, dtype=slot.local.dtype, device=self.device)
        whole = whole.contiguous()
        dist.broadcast(whole, group=group, group_src=part.owner)
        if slot.sections:
            take_sections(slot, slot.local, whole)
            return
        parameter = slot.parameter
        assert isinstance(parameter, DTensor)
        shape, begin = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        own = tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))
        slot.local.copy_(whole[own])

    def _division(self, slot: Slot) -> dist.ProcessGroup:
        """Return the ranks that divide a parameter."""
        parameter = slot.parameter
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        dims = [
            at
            for at, placement in enumerate(parameter.placements)
            if not isinstance(placement, Replicate)
        ]
        if len(dims) == 1:
            return mesh.get_group(dims[0])
        return self._of_both[(mesh.mesh_dim_names or ())[dims[-1]]]

    def state(self) -> dict[str, Tensor]:
        """Return parameters and optimizer state by name, sharing the live memory.

        Parts of a divided parameter are DTensors, so any other plan can load them.  Numbers of an
        optimizer's state are tensors here, and what it keeps in few bits is fp32; `after_load` puts
        them back.
        """
        if self._streamed is not None and self.device.type == "cuda":
            torch.cuda.synchronize()  # what went to the host must have arrived
        result: dict[str, Tensor] = {"train.step": self.steps, **self.scale.state()}
        for slot in self.slots:
            result[f"model.{slot.name}"] = whole_part(slot, slot.local)
        for name, key, value in self._states():
            slot = self._parts[name].slot
            saved = value
            if not isinstance(value, Tensor):
                saved = torch.tensor(float(value), dtype=torch.float64)
            elif value.ndim and value.shape == slot.local.shape and self._parts[name].owner is None:
                saved = whole_part(slot, plain_values(value))
            result[f"optim.{name}.{key}"] = saved
        return result

    def _states(self) -> Iterator[tuple[str, str, Any]]:
        of = {id(part.plain): name for name, part in self._parts.items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor | float | int):
                        yield of[id(parameter)], key, value

    def expect(self, stored: Iterable[str]) -> None:
        """Make the state that a checkpoint has of these tensors, to be filled in place.

        Names and shapes come from a step with gradients of zero on copies that are thrown away.
        """
        having = {name.removeprefix("optim.").rpartition(".")[0] for name in stored}
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for group in self._groups:
            for name in group.names:
                part = self._parts.get(name)
                if part is None or not part.owned or not part.plain.numel() or name not in having:
                    continue
                copy = nn.Parameter(torch.zeros_like(part.plain))
                copy.grad = torch.zeros_like(copy)
                with restore_side_effects(group.factory):
                    thrown = make_optimizer(group.factory, [{"params": [copy], **group.settings}])
                    thrown.step()
                self._optimizer_of(part).state[part.plain] = dict(thrown.state[copy])

    @contextlib.contextmanager
    def expect_state(self, stored: Iterable[str]) -> Iterator[None]:
        """Have state for these tensors, as `expect` makes it where some is lacking.

        What raises while this is open leaves the state as it was.
        """
        before = [dict(optimizer.state) for optimizer in self.optimizers]
        prefixes = {f"optim.{slot.name}" for slot in self.slots}
        having = {f"optim.{name}.{key}" for name, key, _ in self._states()}
        named = [name for name in stored if name.startswith("optim.")]
        if any(name.rpartition(".")[0] in prefixes for name in named if name not in having):
            self.expect(named)
        try:
            yield
        except BaseException:
            for optimizer, state in zip(self.optimizers, before, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)
            raise

    def after_load(self, state: Mapping[str, Tensor]) -> None:
        """Take over from a state that was filled what does not share memory with it.

        That is numbers, what is stored in few bits, and parts of several matrices in one.
        """
        self.weights_loaded(state)
        for name, key, value in list(self._states()):
            slot, given = self._parts[name].slot, state.get(f"optim.{name}.{key}")
            if given is None:
                continue
            if is_quantized(value):
                take_values(value, to_local(given))
            elif isinstance(value, Tensor):
                if slot.sections and value.shape == slot.local.shape:
                    take_sections(slot, value, given)
            else:
                found = float(given)
                part = self._parts[name]
                self._optimizer_of(part).state[part.plain][key] = type(value)(found)

    def weights_loaded(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights that do not share memory with a state that was filled."""
        for slot in self.slots:
            if slot.sections and f"model.{slot.name}" in state:
                take_sections(slot, slot.local, state[f"model.{slot.name}"])
        share_values(self.slots)

    def _optimizer_of(self, part: _ParameterPart) -> torch.optim.Optimizer:
        return self._users[part.plain]

    def settings(self) -> list[list[dict[str, Any]]]:
        """Return the groups' settings of each optimizer, without their parameters."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def take_settings(self, settings: list[list[dict[str, Any]]]) -> None:
        """Put the groups' settings back."""
        if [len(groups) for groups in settings] != [len(o.param_groups) for o in self.optimizers]:
            raise OptimizerError(
                "the checkpoint has other groups of parameters than this engine; "
                "make the optimizer with the groups that were saved"
            )
        for optimizer, groups in zip(self.optimizers, settings, strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)


def _is_divided(slot: Slot) -> bool:
    return isinstance(slot.parameter, DTensor) and any(
        not isinstance(p, Replicate) for p in slot.parameter.placements
    )


def _whole_of(slot: Slot, local: Tensor) -> Tensor:
    part = whole_part(slot, local)
    return part.full_tensor() if isinstance(part, DTensor) else part
