"""One rank's part of a pipeline, run by torch from our own action lists.

The only file that knows torch's private names.  torch's runtime adds the sends and receives to a
compute-only list by itself; which computation comes when is planner.schedule's decision alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from planner.errors import LaunchError
from planner.schedule import Order

GRADIENTS_ON_THE_WAY = 2
"""Sent gradients that may be under way before a stage waits for the oldest.

The stage before needs them in the order in which they leave and nothing else from this stage to get
to them, so the wait always ends.
"""


class Pipeline:
    """A stage and the schedule that drives it."""

    def __init__(
        self,
        module: nn.Module,
        orders: tuple[Order, ...],
        *,
        stage: int,
        micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        inputs: Tensor,
        outputs: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """`inputs` and `outputs` are meta tensors of one micro-batch, so no rank asks for shapes.

        `loss` must already be divided by the number of micro-batches.
        """
        self._stage = _Stage(
            module,
            stage,
            len(orders),
            device,
            input_args=inputs,
            output_args=outputs,
            group=group,
        )
        self._schedule = _PipelineScheduleRuntime(
            [self._stage], micro_batches, loss_fn=loss, scale_grads=False
        )
        self._schedule._prepare_schedule_with_comms(
            {
                rank: [_Action.from_str(str(action)) for action in order]
                for rank, order in enumerate(orders)
            }
        )

    def run(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Run one step on all micro-batches; return their losses on the last stage."""
        losses: list[Tensor] = []
        self._schedule.step(
            *((tokens,) if self._stage.is_first else ()),
            target=targets if self._stage.is_last else None,
            losses=losses if self._stage.is_last else None,
            return_outputs=False,
        )
        self._stage.finish_sends()
        return losses

    def received(self) -> int:
        """Return how many received activations and gradients are held now."""
        tables = (self._stage.args_recv_info, self._stage.grad_recv_info)
        return sum(
            info.buffer is not None
            for table in tables
            for received in table.values()
            for info in received
        )

    def sent(self) -> int:
        """Return how many sent activations and gradients are held now."""
        return len(self._stage.sent_activations) + len(self._stage.sent_gradients)


class _Stage(PipelineStage):
    """A stage that holds what it received and sent only as long as its micro-batch is in flight.

    torch allocates receive buffers for every micro-batch of the step at once and keeps them for
    good, and keeps whatever was sent until the step ends; with many micro-batches that is more
    memory than the activations in flight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent_activations: dict[int, list[dist.Work]] = {}
        self.sent_gradients: deque[list[dist.Work]] = deque()

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        template = self.args_recv_info[0]
        for micro_batch in range(num_microbatches):
            self.args_recv_info[micro_batch] = tuple(_without_buffer(info) for info in template)

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple:
        return tuple(
            _without_buffer(info) for info in super()._create_grad_recv_info(act_send_info)
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        declared = self._stage_meta.outputs[0]
        if not self.is_last and (output.shape, output.dtype) != (declared.shape, declared.dtype):
            raise LaunchError(
                f"stage {self.stage_index} made {output.dtype} {list(output.shape)} and declared "
                f"{declared.dtype} {list(declared.shape)}; a layer must always return one shape"
            )
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        # The next stage has sent this micro-batch's gradient, so it has had the activation.
        for work in self.sent_activations.pop(bwd_chunk_id, ()):
            work.wait()
        received = (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id])
        for info in received:
            info.buffer = None

    # The sends start here, and torch is told that there is nothing to send: it would keep them.
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        if sends:
            self.sent_activations[fwd_chunk_id] = [_started(send) for send in sends]
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_bwd_send_ops(bwd_chunk_id)
        if sends:
            self.sent_gradients.append([_started(send) for send in sends])
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

    def _allocate(self, received: tuple) -> None:
        for info in received:
            if not info.is_root_arg:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)


def _started(send: dist.P2POp) -> dist.Work:
    work: dist.Work = send.op(
        send.tensor, group=send.group, tag=send.tag, group_dst=send.group_peer
    )
    return work


def _without_buffer(info: object) -> object:
    return type(info)(
        info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg
    )
