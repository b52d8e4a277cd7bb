"""Watch over changes of parameters between two steps: they are followed, or refused by name.

    watch = ParameterWatch(modules, slots)
    if watch.has_moved():                    # p.data = new: the optimizers follow
        optimizers.follow()

A parameter that was replaced has no optimizer, and one that ranks divide has its values in memory
that `p.data = new` does not reach: both would train on without what the loop meant.  A module that
was put elsewhere, added or removed has a state under other names than those that are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Never

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import LaunchError
from meshwright.runtime.optim.gradients import Slot
from meshwright.runtime.tracing.absent_parameters import forget_absent_memory, refuse_absent_memory


class ParameterWatch:
    """Parameters of this rank as they were when an Engine was made."""

    def __init__(self, modules: Sequence[nn.Module], slots: Sequence[Slot]) -> None:
        """`modules` hold the parameters of `slots`, and others that are frozen."""
        named = {
            id(parameter): (name, parameter)
            for module in modules
            for name, parameter in module.named_parameters()
        }
        self._frozen = [(n, p) for n, p in named.values() if not p.requires_grad]
        self._places = [
            (f"{path}.{key}".removeprefix("."), part._parameters, key, parameter)
            for path, part in _parts_of(modules)
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]
        tables = {id(part._modules): (path, part._modules) for path, part in _parts_of(modules)}
        self._children = [(path, table, dict(table)) for path, table in tables.values() if table]
        self._hooks = [(slot.name, slot.parameter, _hook_count(slot.parameter)) for slot in slots]
        self._plain = [slot.parameter for slot in slots if not isinstance(slot.parameter, DTensor)]
        every = [*((slot.name, slot.parameter) for slot in slots), *self._frozen]
        self._divided = [
            (name, parameter, parameter.untyped_storage()._cdata)
            for name, parameter in every
            if isinstance(parameter, DTensor)
        ]
        self._whole_frozen = [p for _, p in self._frozen if not isinstance(p, DTensor)]
        self._frozen_addresses = [parameter.data_ptr() for parameter in self._whole_frozen]
        self._kept = [parameter.untyped_storage() for _, parameter, _ in self._divided]
        """Memory whose ids come again if it is freed."""
        self._addresses = [parameter.data_ptr() for parameter in self._plain]

    def has_moved(self) -> bool:
        """Tell whether parameters have other memory since this was last asked.

        Raises LaunchError where the training loop did what no step would follow.
        """
        for name, parameter, count in self._hooks:
            # Hardly any has some, and a call for each would be felt in a short step.
            has_hooks = (
                parameter._backward_hooks is not None
                or parameter._post_accumulate_grad_hooks is not None
            )
            if has_hooks and _hook_count(parameter) > count:
                _refuse_hook(name)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise LaunchError(
                    f"{name}: was frozen when the Engine was made, which gave it no optimizer; "
                    "build it with requires_grad and a group of its own whose lr and weight_decay "
                    "are 0 until then (groups=), or save, and load into an Engine whose build() "
                    "does not freeze it"
                )
        for name, table, key, parameter in self._places:
            if table.get(key) is not parameter:
                raise LaunchError(
                    f"{name}: is another parameter than when the Engine was made, and no optimizer "
                    "has it; give the one that is there other values, under torch.no_grad(): "
                    "parameter.copy_(new)"
                )
        for path, modules, children in self._children:
            if modules != children:
                _refuse_modules(path, modules, children)
        for name, parameter, storage in self._divided:
            if parameter.untyped_storage()._cdata != storage:
                raise LaunchError(
                    f"{name}: its `data` was bound anew, which does not reach the values that "
                    "ranks divide; change them in place, under torch.no_grad(): "
                    "parameter.copy_(new), parameter.clamp_(...)"
                )
        addresses = [parameter.data_ptr() for parameter in self._plain]
        has_moved, self._addresses = addresses != self._addresses, addresses
        frozen = [parameter.data_ptr() for parameter in self._whole_frozen]
        if has_moved or frozen != self._frozen_addresses:
            refuse_absent_memory((*self._plain, *self._whole_frozen))
        self._frozen_addresses = frozen
        forget_absent_memory()
        return has_moved


def _parts_of(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all parts of some modules with their paths."""
    for module in modules:
        yield from module.named_modules()


def _refuse_modules(
    path: str, now: Mapping[str, nn.Module | None], then: Mapping[str, nn.Module | None]
) -> None:
    """Refuse other modules below a path, where one that moved, came or went has a state."""
    for key in (*then, *now):
        pair = then.get(key), now.get(key)
        parts = [part for part in pair if part is not None]
        if pair[0] is not pair[1] and any(part.state_dict() for part in parts):
            raise LaunchError(
                f"{path}.{key}: ".removeprefix(".")
                + "is another module than when the Engine was made, while optimizers and "
                "checkpoints have its state under this name; build all modules at first, and let "
                "forward choose among them by an attribute"
            )


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse gradient hooks on parameters.

    Those that data parallelism puts in their place have none, and a gradient that a hook sees is
    that of a part of a batch.
    """
    for name, parameter in parameters:
        if _hook_count(parameter):
            _refuse_hook(name)


def _refuse_hook(name: str) -> Never:
    raise LaunchError(
        f"{name}: has a gradient hook, which sees gradients of parts of the batch or is never "
        "called, as the plan divides it; change gradients between engine.gradients() and "
        "engine.optimizer_step()"
    )


def _hook_count(parameter: nn.Parameter) -> int:
    return len(parameter._backward_hooks or ()) + len(
        getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    )
