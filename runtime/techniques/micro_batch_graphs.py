"""A micro-batch's forward and backward, captured once as a CUDA graph and replayed by one launch.

    graphs = MicroBatchGraphs(run, settled=..., trained=..., device=device)
    graphs.begin()                   # a step: what may have moved since the last one
    graphs.run(batch)                # as run(batch) does, for one micro-batch

What a graph reads lies where it lay when it was captured: parameters, buffers, a copy of the
micro-batch, gradients.  The first pass of a shape runs as it is, which compiles and tunes; another
one is looked at, operator by operator, and one of a later step is captured, if it reads the same
memory and does the same with the same numbers.  Where something stands against it, passes run as
they are, and `obstacle` says what.

All graphs of a rank share one pool of memory, since one runs at a time and nothing in the pool
outlives a replay.  Source: torch, cuda/graphs.py (notes/cuda.rst, "CUDA Graphs").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.runtime.techniques.operator_survey import OperatorSurvey, storage_of

MOST_SHAPES = 4
"""Most shapes of micro-batches that are captured."""
MOST_CAPTURES = 12
"""Most captures: whatever moves more often than that is not worth the next one."""
_LONGEST_REASON = 200


class PassGraph(Protocol):
    """A graph of one pass on a device."""

    executes: bool
    """Recording has the effects of the pass; else the first replay has them."""

    def warm(self, run: Callable[[], None]) -> None:
        """Run a pass where it would be recorded."""

    def record(self, run: Callable[[], None]) -> OperatorSurvey:
        """Keep a pass."""

    def replay(self) -> None:
        """Do what the pass did, on the same memory."""


class CudaGraph:
    """A pass in a CUDA graph."""

    executes = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._side = _Side.of_device(device)

    def warm(self, run: Callable[[], None]) -> None:
        """Run a pass on the stream that captures, whose libraries then have their workspaces."""
        side, main = self._side.stream, torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)

    def record(self, run: Callable[[], None]) -> OperatorSurvey:
        """Capture a pass; other threads may go on with their own work on the device."""
        survey = OperatorSurvey(self._device)
        with (
            torch.cuda.graph(
                self._graph,
                pool=self._side.pool,
                stream=self._side.stream,
                capture_error_mode="thread_local",
            ),
            survey,
        ):
            run()
        return survey

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class _Side:
    """The stream and the pool of all graphs of a device."""

    _every: dict[torch.device, _Side] = {}  # noqa: RUF012 - of the process, as devices are

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @classmethod
    def of_device(cls, device: torch.device) -> _Side:
        if device not in cls._every:
            cls._every[device] = cls(device)
        return cls._every[device]


GRAPHS: dict[str, Callable[[torch.device], PassGraph]] = {"cuda": CudaGraph}
"""Graphs by type of device; tests and dry runs add one for CPUs."""


@dataclass(slots=True)
class _SameShape:
    """Micro-batches of one shape."""

    inputs: list[Tensor]
    """The copy of a micro-batch that the graph reads, leaf by leaf."""
    batch: Any
    """The same as passes take it."""
    passes: int = 0
    look: OperatorSurvey | None = None
    """The operators of an earlier step, and what they read from outside, which stays."""
    step: int = 0
    """The step of that look."""
    graph: PassGraph | None = None


class MicroBatchGraphs:
    """The graphs of one rank's micro-batches."""

    def __init__(
        self,
        run: Callable[[Any], None],
        *,
        settled: Callable[[], Iterable[Tensor]],
        trained: Callable[[], Iterable[nn.Parameter]],
        gradient: Callable[[nn.Parameter], Tensor | None],
        device: torch.device,
        obstacle: str | None = None,
    ) -> None:
        """`run` adds a micro-batch to gradients and losses.

        `settled` are the tensors that stay where they are from step to step, and `trained` the
        parameters that passes compute with, whose gradients are added in what `gradient` returns,
        or else in memory of our own.  An `obstacle` that is known from the start lets all run as
        it is.
        """
        self._run, self._settled, self._trained = run, settled, trained
        self._gradient = gradient
        self._device = device
        self._shapes: dict[Any, _SameShape] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._places: dict[int, None] = {}
        """Storages of what is settled."""
        self._captures = self._steps = 0
        self.replays = 0
        """Micro-batches that a graph has run."""
        lack = None if device.type in GRAPHS else f"{device.type} has no graphs"
        self.obstacle: str | None = obstacle or lack
        """Why micro-batches run as they are, if they do."""

    def begin(self) -> None:
        """Begin a step: graphs of what has moved are captured anew."""
        self._steps += 1
        if self.obstacle is not None:
            return
        places = dict.fromkeys(storage_of(tensor) for tensor in self._settled())
        if places != self._places:
            self._places = places
            self._shapes, self._gradients = {}, {}

    def run(self, batch: Any) -> None:
        """Add a micro-batch to gradients and losses."""
        if self._gradients or self.obstacle is None:
            self._place_gradients()
        shape = None if self.obstacle else self._shape_of(batch)
        if shape is None:
            self._run(batch)
            return
        leaves, _ = tree_flatten(batch)
        with torch.no_grad():
            torch._foreach_copy_(shape.inputs, leaves)
        if shape.graph is not None:
            shape.graph.replay()
            self.replays += 1
            return
        shape.passes += 1
        graph = GRAPHS[self._device.type](self._device)
        if shape.passes == 1 or shape.step == self._steps:
            graph.warm(lambda: self._run(batch))
        elif shape.look is None:
            self._look_at(shape, graph)
        else:
            self._capture(shape, graph, shape.look)

    def _shape_of(self, batch: Any) -> _SameShape | None:
        leaves, tree = tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            self._give_up("the batch has what is no tensor")
            return None
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._shapes:
            if len(self._shapes) == MOST_SHAPES:
                return None
            inputs = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
            self._shapes[key] = _SameShape(inputs, tree_unflatten(inputs, tree))
        return self._shapes[key]

    def _look_at(self, shape: _SameShape, graph: PassGraph) -> None:
        """Run a pass, and note its operators and what stands against a capture."""
        survey = OperatorSurvey(self._device, keeps=graph.executes)  # as it will be recorded

        def run() -> None:
            with survey:
                self._run(shape.batch)

        graph.warm(run)
        shape.look, shape.step = survey, self._steps
        self._give_up(survey.obstacle)

    def _capture(self, shape: _SameShape, graph: PassGraph, look: OperatorSurvey) -> None:
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            self._give_up("tensors that a graph reads move from step to step")
            self._run(shape.batch)
            return
        try:
            survey = graph.record(lambda: self._run(shape.batch))
        except RuntimeError as error:  # what CUDA does not capture; nothing has run
            self._give_up(str(error).strip().partition("\n")[0][:_LONGEST_REASON])
            self._run(shape.batch)
            return
        self._give_up(survey.obstacle or _difference(look, survey))
        if self.obstacle is None:
            shape.graph = graph
            self.replays += 1
        if not graph.executes:
            (self._run if self.obstacle else _replay(graph))(shape.batch)

    @torch.no_grad()
    def _place_gradients(self) -> None:
        """Let gradients be added where graphs add them, to what passes before have left."""
        if not self._gradients:
            trained = [p for p in self._trained() if p.requires_grad]
            places = {p: self._gradient(p) for p in trained}
            self._gradients = {p: _new_gradient(p) if g is None else g for p, g in places.items()}
        fresh = []
        for parameter, gradient in self._gradients.items():
            grad = parameter.grad
            if grad is gradient:
                continue
            if grad is None:
                fresh.append(gradient)
            else:
                gradient.copy_(grad)
            parameter.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)

    def _give_up(self, why: str | None) -> None:
        """Run micro-batches as they are from now on, if there is a reason."""
        if why is not None:
            self.obstacle, self._shapes = why, {}


def _difference(look: OperatorSurvey, survey: OperatorSurvey) -> str | None:
    """Return how a pass differs from one of an earlier step, if it does.

    What that one read from outside is still there, so that no other tensor has its memory.
    """
    for storage, (_, operator) in survey.outside.items():
        if storage not in look.outside:
            return f"{operator} reads a tensor that is made anew in each step"
    for before, now in itertools.zip_longest(look.words, survey.words, fillvalue=("nothing",)):
        if before != now:
            return f"{now[0]} follows in one step where {before[0]} does in another"
    return None


def _replay(graph: PassGraph) -> Callable[[Any], None]:
    return lambda _: graph.replay()


def _new_gradient(parameter: nn.Parameter) -> Tensor:
    dtype = parameter.grad_dtype or torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
