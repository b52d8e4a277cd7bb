"""One rank's part of a pipeline, run as its schedule's list of actions says.

Which computation comes when is meshwright.planner.schedules.schedule's decision alone.  Here a list
gets its receives: each stands right behind the send that it belongs to, in one order of all ranks'
actions, so that what stands before a receive needs nothing that this rank does later.

Under a schedule of stages of a recorded module, what crosses is the stages' own, and the batch is
everywhere: every rank gives all micro-batches of its slice to `run_all`, and a stage takes the one
whose number the schedule says.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from meshwright.planner.errors import LaunchError
from meshwright.planner.schedules.schedule import Order
from meshwright.planner.schedules.schedule_record import Action
from meshwright.runtime.core.torch_internals import end_backwards, fsdp_parameters
from meshwright.runtime.techniques.split_backward import WeightGradients
from meshwright.runtime.tracing.stage import MicroBatch, ModelStage

GRADIENTS_ON_THE_WAY = 2
"""Sent gradients that may be under way before a stage waits for the oldest: the wait always ends,
since the receive stands right behind the send."""
MOST_GATHERED = 3
"""Stages of a rank whose divided parameters are gathered at a time."""
Way = Literal["F", "B"]
"""Direction of a message: F takes an activation to the next stage, B a gradient back."""
Message = dist.Work | None
Verb = Literal["run", "receive", "gather", "let go"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One of this rank's stages.

    `inputs` and `outputs` are meta tensors of one micro-batch, so no rank asks for shapes.
    """

    stage: int
    module: nn.Module
    inputs: Tensor | tuple[Tensor, ...]
    outputs: Tensor | tuple[Tensor, ...]
    store: WeightGradients | None = None
    """Store in which weight gradients wait between the two parts of a split backward."""
    select: Callable[[int], None] | None = None
    """Called with the number of the micro-batch that the module is about to run."""


class Pipeline:
    """This rank's stages and the schedule that drives them."""

    def __init__(
        self,
        parts: Sequence[StagePart],
        orders: tuple[Order, ...],
        *,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        """`loss` gets the last stage's output and the number of its micro-batch.

        `groups` are of the same ranks, one for activations and one for gradients: NCCL runs what a
        group sends and receives in order, and a gradient would wait behind a receive that was
        posted early.
        """
        self._parts = {part.stage: part for part in sorted(parts, key=lambda part: part.stage)}
        self._rank_of = {
            action.stage: rank for rank, order in enumerate(orders) for action in order
        }
        self._last = max(self._rank_of)
        self._groups: dict[Way, dist.ProcessGroup] = {"F": groups[0], "B": groups[1]}
        self._device, self._loss = device, loss
        self._losses: list[Tensor] = []
        rank = self._rank_of[parts[0].stage]
        self._actions = with_gathers(with_receives(orders)[rank])
        self._coming: dict[tuple[Way, int, int], tuple[list[Message], tuple[Tensor, ...]]] = {}
        """Messages that are received, or come from a stage of this rank, by way, stage, number."""
        self._flight: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        """Inputs and outputs of what is between forward and backward, by stage and number."""
        self._came_back: set[tuple[int, int]] = set()
        """Inputs of stages, by number, that got a gradient from any micro-batch of a step."""
        self._weights: dict[tuple[int, int], Callable[[], None]] = {}
        self._sent_activations: dict[tuple[int, int], list[Message]] = {}
        self._sent_gradients: dict[int, deque[list[Message]]] = {at: deque() for at in self._parts}
        self._gathers: dict[int, list[UnshardHandle]] = {}

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run one step on the first stage's inputs, by micro-batch; return the last's losses."""
        self._losses = []
        for table in (self._coming, self._flight, self._weights):  # of a step that has failed
            table.clear()
        self._came_back.clear()
        left = dict.fromkeys(self._parts, len(inputs))
        for verb, (stage, kind, number) in self._actions:
            if verb == "receive":
                self._receive("F" if kind == "F" else "B", stage, number)
            elif verb != "run":
                self._gather(stage, stays=verb == "gather")
            elif kind == "F":
                self._forward(stage, number, inputs[number])
            else:
                if kind == "W":
                    self._add_weight_gradients(stage, number)
                else:
                    self._backward(stage, number, whole=kind == "B")
                left[stage] -= kind != "I"
                module = self._parts[stage].module
                if not left[stage] and isinstance(module, FSDPModule):
                    end_backwards(module)
        self._finish_sends()
        return self._losses

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run all micro-batches forward only; return their losses on the last stage.

        Every rank takes its stages in the order of the model, one micro-batch after the other, so
        that messages between two ranks are received in the order in which they are sent.
        """
        self._losses = []
        for number, given in enumerate(inputs):
            for stage in self._parts:
                if stage and stage - 1 not in self._parts:
                    self._receive("F", stage, number)
                self._forward(stage, number, given)
                del self._flight[stage, number]
        self._finish_sends()
        return self._losses

    def _forward(self, stage: int, number: int, given: Any) -> None:
        """Run a micro-batch through a stage, and hand its outputs on."""
        part = self._parts[stage]
        taken = _tuple(given)
        if stage:
            taken = self._received_tensors("F", stage, number)
            for tensor, declared in zip(taken, _tuple(part.inputs), strict=True):
                tensor.requires_grad_(declared.requires_grad and torch.is_grad_enabled())
        self._wait_for_gathered(stage)
        if part.select is not None:
            part.select(number)
        outputs = _tuple(part.module(*taken))
        if stage == self._last:
            outputs = (self._loss(outputs[0], number),)
            self._losses += outputs
        else:
            for output, declared in zip(outputs, _tuple(part.outputs), strict=True):
                _check_output(stage, output, declared)
            self._hand_on("F", stage, number, outputs)
        self._flight[stage, number] = (taken if stage else ()), outputs

    def _backward(self, stage: int, number: int, *, whole: bool) -> None:
        """Run a micro-batch back through a stage; its weights' gradients wait unless `whole`."""
        part = self._parts[stage]
        gradients = self._received_tensors("B", stage, number) if stage < self._last else None
        taken, outputs = self._flight.pop((stage, number))
        if part.store is not None:
            part.store.deferring = not whole
        self._wait_for_gathered(stage)
        if isinstance(part.module, FSDPModule):
            part.module.set_is_last_backward(False)
            part.module.set_reshard_after_backward(False)
            part.module.set_requires_gradient_sync(False)
        if stage < self._last:
            declared = zip(outputs, _tuple(part.outputs), strict=True)
            outputs = tuple(output for output, like in declared if like.requires_grad)
        torch.autograd.backward(outputs, gradients)
        if part.store is not None:
            make = part.store.take_deferred()
            if whole:
                make()
            else:
                self._weights[stage, number] = make
        # The next stage has sent this micro-batch's gradient, so it has had the activation.
        _wait(self._sent_activations.pop((stage, number), ()))
        if stage:
            self._came_back |= {
                (stage, at) for at, tensor in enumerate(taken) if tensor.grad is not None
            }
            self._hand_on("B", stage, number, [_gradient(x) for x in taken if x.requires_grad])

    def _add_weight_gradients(self, stage: int, number: int) -> None:
        """Make the weight gradients that a backward has put off."""
        self._weights.pop((stage, number))()
        module = self._parts[stage].module
        if isinstance(module, FSDPModule):
            # It moves gradients to where it sums them after a backward, and knows none made later.
            for parameter in fsdp_parameters(module, below=True):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    # --- messages -----------------------------------------------------------------------------

    def _receive(self, way: Way, stage: int, number: int) -> None:
        """Begin to receive what an action of a stage needs of another rank."""
        part = self._parts[stage]
        # What has no gradient (token numbers, a mask) gets none back.
        declared = _tuple(part.inputs) if way == "F" else _tuple(part.outputs)
        declared = tuple(like for like in declared if way == "F" or like.requires_grad)
        source = self._rank_of[stage - 1 if way == "F" else stage + 1]
        works, buffers = [], []
        for like in declared:
            buffer = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            works.append(dist.irecv(buffer, group=self._groups[way], group_src=source))
            buffers.append(buffer)
        self._coming[way, stage, number] = works, tuple(buffers)

    def _received_tensors(self, way: Way, stage: int, number: int) -> tuple[Tensor, ...]:
        """Return what a message brings, once it is there."""
        works, tensors = self._coming.pop((way, stage, number))
        _wait(works)
        return tensors

    def _hand_on(self, way: Way, stage: int, number: int, tensors: Sequence[Tensor]) -> None:
        """Send what a stage has made to the next one that waits for it, or keep it for one here."""
        target = stage + 1 if way == "F" else stage - 1
        if target in self._parts:
            self._coming[way, target, number] = [], tuple(tensor.detach() for tensor in tensors)
            return
        group = self._groups[way]
        works = [
            dist.isend(tensor.detach().contiguous(), group=group, group_dst=self._rank_of[target])
            for tensor in tensors
        ]
        if way == "F":
            self._sent_activations[stage, number] = works
            return
        self._sent_gradients[stage].append(works)
        if len(self._sent_gradients[stage]) > GRADIENTS_ON_THE_WAY:
            _wait(self._sent_gradients[stage].popleft())

    def _finish_sends(self) -> None:
        """Wait until all that was sent has left."""
        gradients = (works for sent in self._sent_gradients.values() for works in sent)
        for works in (*self._sent_activations.values(), *gradients):
            _wait(works)
        self._sent_activations.clear()
        for sent in self._sent_gradients.values():
            sent.clear()

    def received(self) -> int:
        """Return how many received activations and gradients are in flight."""
        taken = sum(len(inputs) for inputs, _ in self._flight.values())
        return taken + sum(len(tensors) for _, tensors in self._coming.values())

    def sent(self) -> int:
        """Return how many sent activations and gradients are in flight."""
        return len(self._sent_activations) + sum(map(len, self._sent_gradients.values()))

    # --- parameters that ranks divide ---------------------------------------------------------

    def _gather(self, stage: int, *, stays: bool) -> None:
        """Begin to gather a stage's divided parameters, or let them go."""
        module = self._parts[stage].module
        if not isinstance(module, FSDPModule):
            return
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        if stays:
            handles = [cast(UnshardHandle, unit.unshard(async_op=True)) for unit in units]
            self._gathers[stage] = handles
            return
        for unit in units:
            unit.reshard()

    def _wait_for_gathered(self, stage: int) -> None:
        for handle in self._gathers.pop(stage, ()):
            handle.wait()


def with_receives(orders: tuple[Order, ...]) -> list[list[tuple[Verb, Action]]]:
    """[rank] Return what each does in order, with the receives of what its actions need.

    Ranks act in turn, as far as what they need is there, and who sends writes the receive into the
    other's list.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    last = max(rank_of)
    lists: list[list[tuple[Verb, Action]]] = [[] for _ in orders]
    waiting = [deque(order) for order in orders]
    there: set[Action] = set()
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, left in enumerate(waiting):
            if not left:
                continue
            stage, kind, number = left[0]
            way: Way = "F" if kind == "F" else "B"
            needs = kind != "W" and stage != (0 if kind == "F" else last)
            if needs and Action(stage, way, number) not in there:
                continue
            lists[rank].append(("run", left.popleft()))
            target = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or target not in rank_of:
                continue
            there.add(Action(target, way, number))
            if rank_of[target] != rank:
                lists[rank_of[target]].append(("receive", Action(target, way, number)))
        assert sum(map(len, waiting)) < before, "each order needs something that never comes"
    return lists


def with_gathers(steps: Sequence[tuple[Verb, Action]]) -> list[tuple[Verb, Action]]:
    """Return a rank's list with the gathers of the stages that run next."""
    coming: list[list[int]] = []
    """[step from the last one on] The next stages that run."""
    for verb, (stage, *_) in reversed(steps):
        behind = coming[-1] if coming else []
        others = [other for other in behind if other != stage]
        coming.append([stage, *others][:MOST_GATHERED] if verb == "run" else behind)
    result: list[tuple[Verb, Action]] = []
    gathered: list[int] = []
    for wanted, step in zip(reversed(coming), steps, strict=True):
        result += [("let go", Action(at, "F", 0)) for at in gathered if at not in wanted]
        result += [("gather", Action(at, "F", 0)) for at in wanted if at not in gathered]
        result.append(step)
        gathered = wanted
    return [*result, *(("let go", Action(at, "F", 0)) for at in gathered)]


def _check_output(stage: int, output: Tensor, declared: Tensor) -> None:
    if (output.shape, output.dtype) != (declared.shape, declared.dtype):
        raise LaunchError(
            f"stage {stage} made {output.dtype} {list(output.shape)} and declared "
            f"{declared.dtype} {list(declared.shape)}; a layer must always return one shape"
        )


def _gradient(received: Tensor) -> Tensor:
    return torch.zeros_like(received) if received.grad is None else received.grad


def _wait(works: Iterable[Message]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def _tuple(tensors: Any) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


class StagePipeline(Pipeline):
    """This rank's stages of a model, each with the batch, and the schedule that drives them."""

    def __init__(
        self,
        stages: Mapping[int, ModelStage],
        orders: tuple[Order, ...],
        *,
        example: Any,
        micro_batches: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Any, MicroBatch], Tensor],
        stores: Mapping[int, WeightGradients] | None = None,
    ) -> None:
        """Micro-batches are of one shape, that of the `example`.

        `loss` of the module's outputs, as one number; gradients are those of its sum.

        `stores` are by stage, where the schedule makes weight gradients apart.
        """
        self._stages = dict(stages)
        boundaries = {at: stage.boundary(example) for at, stage in stages.items()}
        self._makers = {at: boundary.makers for at, boundary in boundaries.items()}
        """Calls that make what a stage receives."""
        self._micro_batches = micro_batches
        for stage in self._stages.values():
            stage.loss = loss
        parts = [
            StagePart(
                stage=at,
                module=stage,
                inputs=boundaries[at].received,
                outputs=boundaries[at].sent,
                store=stores[at] if stores else None,
                select=stage.select,
            )
            for at, stage in stages.items()
        ]
        super().__init__(parts, orders, groups=groups, device=device, loss=lambda made, _: made)

    def run_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run one step on all micro-batches; return their losses on the last stage."""
        with self._first_inputs(micro_batches) as inputs:
            losses = self.run(inputs)
        self._refuse_without_gradient()
        return losses

    def _refuse_without_gradient(self) -> None:
        """Refuse a step that sends zeros in place of gradients that one process does not have."""
        for part in self._parts.values():
            inputs = _tuple(part.inputs) if part.stage else ()
            for at, tensor in enumerate(inputs):
                if tensor.requires_grad and (part.stage, at) not in self._came_back:
                    stage = self._stages[part.stage]
                    stage.fail(
                        LaunchError(
                            f"{self._makers[part.stage][at]}: no gradient comes back to "
                            "what it makes (detach(), no_grad(), or a loss without it), and a "
                            "pipeline would send zeros to the stages before, whose parameters "
                            "decay then; call it under torch.no_grad(), let the loss depend on it, "
                            "or use a plan without pipeline"
                        )
                    )

    def evaluate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run all micro-batches forward only; return their losses on the last stage."""
        with self._first_inputs(micro_batches) as inputs:
            return self.evaluate(inputs)

    @contextlib.contextmanager
    def _first_inputs(self, micro_batches: Sequence[MicroBatch]) -> Iterator[list[tuple[()]]]:
        for stage in self._stages.values():
            stage.micro_batches = tuple(micro_batches)
        yield [()] * len(micro_batches)
        for stage in self._stages.values():
            stage.micro_batches = ()
