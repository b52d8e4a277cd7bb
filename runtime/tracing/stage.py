"""A stage: what a rank runs of a model, one micro-batch at a time.

    hidden = stage(micro=MicroBatch(batch))            # tensors for the next stage, in fixed order
    outputs = last(*hidden, micro=MicroBatch(batch))   # of the last stage: what the model returns

The layers of a language model are runtime/models/layer_stage.py; a user's module as it is,
module_stage.py; a part of one, replayed from its recording, replayed_stage.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Activations
from meshwright.runtime.core.side_effects import PythonNumbers, seed_python
from meshwright.runtime.techniques.activation_offload import HostTraffic, Packing
from meshwright.runtime.tracing.unused_parameters import BackwardOrder


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of a micro-batch that every stage has."""

    batch: Any
    """The pytree, cut to this micro-batch."""
    seed: int | None = None
    """Seed of torch's draws (see `step_seed`); None draws from torch's own generator."""
    coin_seed: int | None = None
    """Seed of Python's and numpy's numbers between units, alike on all ranks; None leaves them."""
    local: bool = False
    """It is a rank's own, of any structure: its loss says how much counts."""


def step_seed(seed: int, step: int, first_sample: int) -> int:
    """Return the seed of a micro-batch that begins with this sample of the global batch.

    >>> step_seed(0, 1, 8) == step_seed(0, 1, 8) != step_seed(0, 1, 16)
    True
    """
    return _hash(f"{seed} {step} {first_sample}")


def unit_seed(seed: int, name: str) -> int:
    """Return the seed under which a unit, or a function between units, draws in a micro-batch."""
    return _hash(f"{seed} {name}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators of the host, and behind it that of a device beside it."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


@contextlib.contextmanager
def seed_draws(
    seed: int | None, name: str, device: torch.device, *, python: bool = False
) -> Iterator[None]:
    """Draw under the seed of a micro-batch and the name of a unit; None changes nothing.

    With `python` so do the random numbers of Python and numpy.
    """
    if seed is None:
        yield
        return
    # torch.manual_seed asks every kind of device, with a traceback for each that is not begun.
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    numbers = PythonNumbers() if python else None
    for generator in generators:
        generator.manual_seed(unit_seed(seed, name))
    if numbers is not None:
        seed_python(unit_seed(seed, name))
    try:
        yield
    finally:
        if numbers is not None:
            numbers.put_back()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Meta tensors of one micro-batch where a pipeline cuts a model."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    makers: tuple[str, ...]
    """The calls that make what is received."""


class PlacedUnits(Protocol):
    """A layer of a plan, and the paths of its units."""

    @property
    def name(self) -> str:
        """Its name in the plan."""

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of its units."""


class ModelStage(nn.Module):
    """Layers that a rank runs; parameters have the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.micro_batches: Sequence[MicroBatch] = ()
        """The micro-batches of the step that a pipeline runs."""
        self._number = 0
        self.loss: Callable[[Any, MicroBatch], Tensor] | None = None
        """Function that the last stage applies to the model's outputs, if any."""
        self.agrees = False
        """An error in a micro-batch waits in `failure` until all ranks have it."""
        self.failure: Exception | None = None
        """The first error since it was last taken."""
        self.order: BackwardOrder | None = None
        """In which units that FSDP wraps are gathered and reduced, by this rank and others."""
        self.layers: Sequence[PlacedUnits] = ()
        self.called_units: tuple[str, ...] = ()
        """Paths of all units, also of those that `units` leaves out."""
        self.units: dict[str, nn.Module] = {}
        """Units that may be wrapped by themselves; their parameters are read by no one else."""

    def boundary(self, batch: Any) -> Boundary:
        """Return what this stage gets from the one before it, and hands on, of a micro-batch."""
        raise NotImplementedError

    def packing(
        self, name: str, choice: Activations, traffic: HostTraffic, *, first: bool, last: bool
    ) -> Packing | None:
        """Return what a layer's stored tensors go through; None keeps them.

        `first` and `last` are those of a row of layers that all offload.
        """
        raise NotImplementedError

    def part(self, name: str) -> nn.Module:
        """Return a module by its path in the whole model."""
        part: nn.Module = self
        for step in name.split(".") if name else ():
            child = part._modules[step]
            assert child is not None
            part = child
        return part

    def select(self, number: int) -> None:
        """Run this one of the micro-batches that a pipeline has at hand next."""
        self._number = number

    def selected(self) -> MicroBatch:
        """Return the micro-batch that a pipeline runs next."""
        return self.micro_batches[self._number % len(self.micro_batches)]

    def fail(self, error: Exception) -> None:
        """Keep the first error until all ranks have it."""
        self.failure = self.failure or error

    def closed(self, loss: Tensor) -> Tensor:
        """Return a loss of the last forward whose backward is in the order of all ranks."""
        return loss if self.order is None else self.order.close_backward(loss)

    @property
    def device(self) -> torch.device:
        """Device on which this stage computes."""
        for tensor in itertools.chain(self.parameters(), self.buffers()):
            return tensor.device
        return torch.device("cpu")

    def _lone_units(
        self, names: Mapping[str, None], held: Sequence[Any] = ()
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the units whose parameters neither another unit has, nor are `held` beside."""
        parts = {name: self.part(name) for name in names}
        users: dict[int, int] = {}
        for part in parts.values():
            for parameter in set(part.parameters()):
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        for tensor in held:
            users[id(tensor)] = 2
        for name, part in parts.items():
            parameters = list(part.parameters())
            if parameters and all(users[id(parameter)] == 1 for parameter in parameters):
                yield name, part


def handed_on(output: Tensor, awaits_gradient: bool, *, passed: bool) -> Tensor:
    """Return a tensor as the next stage and its gradient know it.

    It must not be the leaf that a gradient is gathered in, nor what was received and `passed` on,
    whose gradient comes later; it has one also where this micro-batch went by all that is trained.
    """
    if awaits_gradient and torch.is_grad_enabled() and not output.requires_grad:
        output = output.detach().requires_grad_()
    return output.view_as(output) if passed or output.is_leaf else output
