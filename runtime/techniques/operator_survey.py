"""The operators of a pass, as they run: what stands against replaying them, and their replay.

    survey = OperatorSurvey(device)
    with survey:
        loss_of(micro).backward()
    survey.obstacle        # a value that the host reads, memory of another device, a message
    survey.outside         # memory that the pass reads or writes and does not make

A replay does on the same memory what the pass did, with new numbers in what it reads.  Whatever
Python decided is decided for good, so that a pass must decide nothing by the values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MESSAGES = ("c10d", "_c10d_functional", "symm_mem")
"""Namespaces of operators that talk to other processes."""
SEEN_THROUGH = ("aten", "prims", "prim", "quantized", "torchao")
"""Namespaces of operators that take tensors and numbers and start kernels, whatever the values."""
VIEWS = ("aten::detach", "aten::alias")
"""Operators of autograd, which are there or not by who else has a tensor."""
OWN_OPERATORS = frozenset(
    f"meshwright::{name}{backward}"
    for name in ("capped_attention", "sink_attention", "grouped_product", "grouped_weights")
    for backward in ("", "_backward")
)
"""Operators of this package that do the same.  Attention within documents is not one of them: on a
host it reads where documents begin."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator of a pass, on its tensors."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    """The tensors that it made; none where it changes or views what there was."""

    def run(self) -> None:
        """Do it again, on the same memory."""
        result = self.operator(*self.args, **self.kwargs)
        for output, new in zip(self.outputs, _tensors((result,)), strict=False):
            output.copy_(new)


class OperatorSurvey(TorchDispatchMode):
    """Notes each operator of a pass on one device."""

    def __init__(self, device: torch.device, *, keeps: bool = False) -> None:
        """With `keeps` the tensors of all operators stay, so that `calls` can run again."""
        super().__init__()
        self._device, self._keeps = device, keeps
        self.obstacle: str | None = None
        """Why the pass cannot be replayed, by the first operator that hinders it."""
        self.calls: list[OperatorCall] = []
        self.outside: dict[int, tuple[Tensor, str]] = {}
        """Memory that the pass did not make, by its storage: a tensor in it, which stays, and the
        first operator on it."""
        self.words: list[tuple[Any, ...]] = []
        """[operator] Its name, and the numbers that Python gave it: a graph keeps them."""
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and note it."""
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        outputs = list(_tensors((result,)))
        name = str(func.name())
        self.obstacle = self.obstacle or self._obstacle_of(func, name, [*given, *outputs], args)
        numbers = [tensor for tensor in given if self._is_number(tensor, name)]
        before = set()
        for tensor in given:
            before.add(storage := storage_of(tensor))
            if storage not in self._made and not any(tensor is number for number in numbers):
                self.outside.setdefault(storage, (tensor.detach(), name))
        new = tuple(tensor for tensor in outputs if storage_of(tensor) not in before)
        self._made |= {storage_of(tensor) for tensor in (*new, *numbers)}
        if name not in VIEWS:
            given_numbers = (_value_of(number) for number in numbers)
            self.words.append((name, *_numbers((args, kwargs)), *given_numbers))
        if self._keeps and (new or func._schema.is_mutable):
            self.calls.append(OperatorCall(func, args, kwargs, new))
        return result

    def _obstacle_of(
        self, func: Any, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...]
    ) -> str | None:
        space = name.partition("::")[0]
        if space in MESSAGES:
            return f"{name} talks to another process"
        if space not in SEEN_THROUGH and name.partition(".")[0] not in OWN_OPERATORS:
            return f"{name} is not known to do the same whatever the values"
        if torch.Tag.data_dependent_output in func.tags:
            return f"{name} reads a value on the host"
        if torch.Tag.dynamic_output_shape in func.tags and not _is_indexed_by_numbers(name, args):
            return f"{name} makes a shape of values"
        for tensor in tensors:
            if tensor.device.type not in (self._device.type, "meta") and tensor.ndim:
                return f"{name} reads or writes memory of {tensor.device.type}"
        return None

    def _is_number(self, tensor: Tensor, name: str) -> bool:
        """Tell whether a tensor is a number of the host, which a kernel gets as one."""
        return not tensor.ndim and (
            name == "aten::lift_fresh" or tensor.device.type not in (self._device.type, "meta")
        )

    def spoil(self) -> None:
        """Write NaN, or the largest number, into all that the pass makes: a replay reads none."""
        for call in self.calls:
            for output in call.outputs:
                if output.is_floating_point():
                    output.fill_(torch.nan)

    @property
    def made_bytes(self) -> int:
        """Bytes of all tensors that were kept, each storage once."""
        storages = {storage_of(t): t for call in self.calls for t in call.outputs}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class ReplayedOperators:
    """A graph for a device that has none: it runs each operator of a pass again.

    Nothing is faster by it.  It shows that a list of operators on fixed memory is all there is to a
    pass, as a CUDA graph takes for granted.
    """

    executes = True
    """Recording has the effects of the pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.survey: OperatorSurvey | None = None

    def warm(self, run: Callable[[], None]) -> None:
        """Run a pass that may be recorded later."""
        run()

    def record(self, run: Callable[[], None]) -> OperatorSurvey:
        """Run a pass, and keep it."""
        self.survey = OperatorSurvey(self._device, keeps=True)
        with self.survey:
            run()
        return self.survey

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators of the pass again."""
        assert self.survey is not None
        for call in self.survey.calls:
            call.run()


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _numbers(tree: Any) -> Iterator[Any]:
    return (
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, bool | int | float | str | torch.dtype)
    )


def storage_of(tensor: Tensor) -> int:
    """Return the memory of a tensor, as a number that is its own for as long as it is there."""
    return int(tensor.untyped_storage()._cdata)


def _value_of(number: Tensor) -> Any:
    return number.dtype if isinstance(number, FakeTensor) else number.item()


def _is_indexed_by_numbers(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether an index picks places by their numbers, so that its shape is theirs."""
    masks = (torch.bool, torch.uint8)
    return name.startswith("aten::index") and all(t.dtype not in masks for t in _tensors(args[1]))
