"""One rank's part of a pipeline, run by torch from our own action lists.

torch adds the sends and receives to a compute-only list; which computation comes when is
meshwright.planner.schedules.schedule's decision alone.

Under a schedule of stages of a recorded module, what crosses is the stages' own, and the batch is
everywhere: every rank gives all micro-batches of its slice to `run_all`, and a stage takes the one
whose number the schedule says.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from meshwright.planner.errors import LaunchError
from meshwright.planner.schedules.schedule import Order
from meshwright.runtime.core.torch_internals import fsdp_parameters, pipeline_classes
from meshwright.runtime.techniques.split_backward import WeightGradients
from meshwright.runtime.tracing.replayed_stage import MicroBatch, RecordedStage
from meshwright.runtime.tracing.trace import Recording

PipelineAction, PipelineRuntime = pipeline_classes()
GRADIENTS_ON_THE_WAY = 2
"""Sent gradients that may be under way before a stage waits for the oldest.

torch writes the receive of a message into the other rank's list right behind its send, in one order
of all ranks' actions.  What stands before that receive therefore needs nothing that this rank does
later, and the wait always ends.
"""


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
        micro_batches: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """`loss` must already be divided by the number of micro-batches.

        `groups` are of the same ranks, one for activations and one for gradients: NCCL runs what a
        group sends and receives in order, and a gradient would wait behind a receive that was
        posted early.
        """
        count = 1 + max(action.stage for order in orders for action in order)
        self._parts = tuple(parts)
        self._rank_of = {
            action.stage: rank for rank, order in enumerate(orders) for action in order
        }
        self._group, self._device = groups[0], device
        self._micro_batches, self._loss = micro_batches, loss
        self._stages = [_PipelineStage(part, count, device, groups) for part in parts]
        self._schedule = PipelineRuntime(
            self._stages, micro_batches, loss_fn=loss, scale_grads=False
        )
        self._schedule._prepare_schedule_with_comms(
            {
                rank: [PipelineAction.from_str(str(action)) for action in order]
                for rank, order in enumerate(orders)
            }
        )

    def run(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Run one step on all micro-batches; return their losses on the last stage."""
        losses: list[Tensor] = []
        is_last = any(stage.is_last for stage in self._stages)
        self._schedule.step(
            *((tokens,) if any(stage.is_first for stage in self._stages) else ()),
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        for stage in self._stages:
            stage.finish_sends()
        return losses

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Run all micro-batches forward only; return their losses on the last stage.

        Every rank takes its stages in the order of the model, one micro-batch after the other, so
        that messages between two ranks are received in the order in which they are sent.
        """
        losses: list[Tensor] = []
        sends: list[dist.Work] = []
        pairs = zip(
            tokens.chunk(self._micro_batches), targets.chunk(self._micro_batches), strict=True
        )
        for number, (batch, target) in enumerate(pairs):
            x: Tensor | tuple[Tensor, ...] = batch
            for part in self._parts:
                rank = self._rank_of[part.stage]
                before = self._rank_of.get(part.stage - 1)
                after = self._rank_of.get(part.stage + 1)
                if before is not None and before != rank:
                    x = tuple(self._receive(declared, before) for declared in _tuple(part.inputs))
                if part.select is not None:
                    part.select(number)
                x = output = part.module(*_tuple(x))
                if after is None:
                    losses.append(self._loss(output, target))
                elif after != rank:
                    for tensor in _tuple(x):
                        send = dist.isend(tensor.contiguous(), group=self._group, group_dst=after)
                        assert send is not None
                        sends.append(send)
        for send in sends:
            send.wait()
        return losses

    def _receive(self, declared: Tensor, source: int) -> Tensor:
        """Wait for a tensor like a declared one from another rank of the pipeline."""
        buffer = torch.empty(declared.shape, dtype=declared.dtype, device=self._device)
        dist.recv(buffer, group=self._group, group_src=source)
        return buffer

    def received(self) -> int:
        """Return how many received activations and gradients are in flight."""
        return sum(stage.received() for stage in self._stages)

    def sent(self) -> int:
        """Return how many sent activations and gradients are in flight."""
        return sum(
            len(stage.sent_activations) + len(stage.sent_gradients) for stage in self._stages
        )


class _PipelineStage(PipelineStage):
    """A stage that refers to what it received and sent while its micro-batch is in flight.

    torch allocates receive buffers for every micro-batch of the step at once and keeps them for
    good, and keeps whatever was sent until the step ends; with many micro-batches that is more
    memory than the activations in flight.
    """

    def __init__(
        self,
        part: StagePart,
        stages: int,
        device: torch.device,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        super().__init__(
            part.module,
            part.stage,
            stages,
            device,
            input_args=part.inputs,
            output_args=part.outputs,
            group=groups[0],
            dw_builder=part.store.take_deferred if part.store else None,
        )
        self._select = part.select
        self._gradient_group = groups[1]
        self._store = part.store
        self._declared_inputs = _tuple(part.inputs)
        self._declared_outputs = _tuple(part.outputs)
        self._coming_activations: dict[int, list[dist.Work]] = {}
        self._coming_gradients: dict[int, list[dist.Work]] = {}
        self.sent_activations: dict[int, list[dist.Work]] = {}
        self.sent_gradients: deque[list[dist.Work]] = deque()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        template = self.args_recv_info[0]
        if not self.is_first:
            template = tuple(_without_buffer(info) for info in template)
        for micro_batch in range(num_microbatches):
            self.args_recv_info[micro_batch] = tuple(copy.copy(info) for info in template)
        return result

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return tuple(
            _without_buffer(info) for info in super()._create_grad_recv_info(act_send_info)
        )

    # The receives start here, one by one as the sends do, and torch is told that there are none:
    # messages that one side batches and the other does not travel through different communicators.
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], self._declared_inputs)
        receives = super().get_fwd_recv_ops(fwd_chunk_id)
        self._coming_activations[fwd_chunk_id] = [
            _start(receive, receive.group) for receive in receives
        ]
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            pairs = zip(self.grad_recv_info[bwd_chunk_id], self._declared_outputs, strict=True)
            # What has no gradient (token numbers, a mask) gets none back.
            coming = [(info, like) for info, like in pairs if like.requires_grad]
            self._allocate(tuple(i for i, _ in coming), tuple(like for _, like in coming))
        receives = super().get_bwd_recv_ops(bwd_chunk_id)
        self._coming_gradients[bwd_chunk_id] = [
            _start(receive, self._gradient_group) for receive in receives
        ]
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        for work in self._coming_activations.pop(fwd_chunk_id, ()):
            work.wait()
        if not self.is_first:
            pairs = zip(self.args_recv_info[fwd_chunk_id], self._declared_inputs, strict=True)
            for info, declared in pairs:
                assert info.buffer is not None
                info.buffer.requires_grad_(declared.requires_grad)
        if self._select is not None:
            self._select(fwd_chunk_id)
        with _as_raised():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            for tensor, declared in zip(_tuple(output), self._declared_outputs, strict=True):
                self._check_output(tensor, declared)
        return output

    # torch 2.11 lets neighbours exchange a message first, over the communicator that batches use.
    # A V's two stages of one rank would send it to themselves, and nothing here is batched.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    # torch 2.11 compares strides too, which tokens cut from longer rows fail; the engine has
    # checked their shape, and outputs are checked above.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None: ...

    def _validate_fwd_outputs(self, outputs: Any) -> None: ...

    def _check_output(self, output: Tensor, declared: Tensor) -> None:
        if (output.shape, output.dtype) != (declared.shape, declared.dtype):
            raise LaunchError(
                f"stage {self.stage_index} made {output.dtype} {list(output.shape)} and declared "
                f"{declared.dtype} {list(declared.shape)}; a layer must always return one shape"
            )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        for work in self._coming_gradients.pop(bwd_chunk_id, ()):
            work.wait()
        if self._store is not None:
            self._store.deferring = not full_backward
        with _as_raised():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # The next stage has sent this micro-batch's gradient, so it has had the activation.
        for work in self.sent_activations.pop(bwd_chunk_id, ()):
            work.wait()
        activations = () if self.is_first else self.args_recv_info[bwd_chunk_id]
        for info in (*activations, *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def received(self) -> int:
        """Return how many received activations and gradients are in flight."""
        tables = [self.grad_recv_info, *(() if self.is_first else (self.args_recv_info,))]
        return sum(
            info.buffer is not None
            for table in tables
            for received in table.values()
            for info in received
        )

    def clear_runtime_states(self) -> None:
        """Forget the step before; torch also clears gradients of buffers, which are gone here."""
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with _as_raised():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if isinstance(self.submod, FSDPModule):
            _add_in_reduce_type(self.submod)

    # The sends start here, and torch is told that there is nothing to send: it would keep them.
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        if sends:
            self.sent_activations[fwd_chunk_id] = [_start(send, send.group) for send in sends]
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_bwd_send_ops(bwd_chunk_id)
        if sends:
            self.sent_gradients.append([_start(send, self._gradient_group) for send in sends])
        while len(self.sent_gradients) > GRADIENTS_ON_THE_WAY:
            for work in self.sent_gradients.popleft():
                work.wait()
        return []

    def finish_sends(self) -> None:
        """Wait until all that was sent has left."""
        for works in (*self.sent_activations.values(), *self.sent_gradients):
            for work in works:
                work.wait()
        self.sent_activations.clear()
        self.sent_gradients.clear()

    def _allocate(self, received: tuple[Any, ...], declared: tuple[Tensor, ...]) -> None:
        for info, like in zip(received, declared, strict=True):
            info.buffer = torch.empty_like(like, device=self.device, requires_grad=False)


@contextlib.contextmanager
def _as_raised() -> Iterator[None]:
    """Let an error in a stage be itself: torch wraps each in one that lists shapes of arguments."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from error.__cause__.__cause__


def _add_in_reduce_type(module: FSDPModule) -> None:
    """Move gradients to where FSDP sums them in the type of the reduction.

    It does so itself after each backward, but knows nothing of weight gradients made later.
    """
    for parameter in fsdp_parameters(module, below=True):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _tuple(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _start(message: dist.P2POp, group: dist.ProcessGroup | None) -> dist.Work:
    sends = message.op is dist.isend
    work: dist.Work = message.op(
        message.tensor.contiguous() if sends else message.tensor,
        group=group,
        tag=message.tag,
        **{"group_dst" if sends else "group_src": message.group_peer},
    )
    return work


def _without_buffer(info: Any) -> Any:
    info = copy.copy(info)
    info.buffer = None
    return info


class RecordedPipeline(Pipeline):
    """This rank's stages of a recorded module, and the schedule that drives them."""

    def __init__(
        self,
        stages: Mapping[int, RecordedStage],
        orders: tuple[Order, ...],
        *,
        recording: Recording,
        micro_batches: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        loss: Callable[[Any, MicroBatch], Tensor],
        stores: Mapping[int, WeightGradients] | None = None,
    ) -> None:
        """`recording` has the shapes that cross, of micro-batches of one shape.

        `loss` of the module's outputs, as one number; gradients are those of its sum.

        `stores` are by stage, where the schedule makes weight gradients apart.
        """
        self._recorded = tuple(stages.values())
        number = torch.empty(1, dtype=torch.int64, device="meta")
        for stage in self._recorded:
            stage.loss = loss
        parts = [
            StagePart(
                stage=at,
                module=stage,
                inputs=stage.received(recording) or (number,),
                outputs=stage.sent(recording) or torch.empty((), device="meta", requires_grad=True),
                store=stores[at] if stores else None,
                select=stage.select,
            )
            for at, stage in stages.items()
        ]
        super().__init__(
            parts,
            orders,
            micro_batches=micro_batches,
            groups=groups,
            device=device,
            loss=lambda made, _: made,
        )
        # What torch cuts and hands on; on the device, where it would be copied to.
        self._numbers = torch.arange(micro_batches, device=device)

    def run_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run one step on all micro-batches; return their losses on the last stage."""
        with self._first_inputs(micro_batches) as numbers:
            return self.run(numbers, numbers)

    def evaluate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run all micro-batches forward only; return their losses on the last stage."""
        with self._first_inputs(micro_batches) as numbers:
            return self.evaluate(numbers, numbers)

    @contextlib.contextmanager
    def _first_inputs(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        for stage in self._recorded:
            stage.micro_batches = tuple(micro_batches)
        yield self._numbers[: len(micro_batches)]
        for stage in self._recorded:
            stage.micro_batches = ()
