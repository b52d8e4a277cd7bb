"""Replicas: ranks that hold whole copies of the same parameters, and the mean of their gradients.

Gradients lie in flat buckets, each of the parameters of neighbouring layers.  When backward has
added the last micro-batch's gradient of all parameters of a bucket, its mean over the ranks is on
its way while backward goes on; `finish` sends what is left and waits.  Parameters are used where
they are: unlike FSDP, there is no second copy of them.

This serves what divides no states, also where passes compute with copies of the parameters
(runtime/techniques/working_copies.py); all else is FSDP's (runtime/parallel/data_parallel.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.costs.memory.gradient_buckets import gradient_bucket_bytes
from meshwright.runtime.core.local_parts import divided_like, to_local


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients of some parameters, one behind the other, and behind them which were made at all.

    A parameter that no sample of this rank went through has no gradient here and may have one
    elsewhere.  The flags, whose mean is above 0 then, tell.
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup
    dtype: torch.dtype
    """Type of the gradients."""
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    """View in `flat` of each gradient, in the order in memory that its parameter has.

    torch's fused optimizers run through memory and look at no strides: a convolution's weight in
    channels_last would be updated by another element's gradient."""
    given: list[Tensor | None] = field(default_factory=list)
    """The gradients that lie in `flat`, as autograd knows them."""
    added: list[int] = field(default_factory=list)
    """Backwards that added to each gradient."""
    complete: int = 0
    """Gradients to which all of a step's backwards have added."""
    sent: Tensor | None = None
    """The buffer that is being sent."""
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        self.flat, self.views, self.sent, self.work = None, [], None, None
        self.given = [None] * len(self.parameters)
        self.added, self.complete = [0] * len(self.parameters), 0

    @property
    def size_bytes(self) -> int:
        return (
            sum(to_local(parameter).numel() for parameter in self.parameters) * self.dtype.itemsize
        )

    def begin(self) -> Tensor:
        """Make room for the gradients of a step, and for the flags, which say that all are made."""
        locals_ = [to_local(parameter) for parameter in self.parameters]
        sizes = [local.numel() for local in locals_]
        self.flat = locals_[0].new_empty(
            sum(sizes) + len(sizes), dtype=self.dtype, requires_grad=False
        )
        *parts, flags = self.flat.split([*sizes, len(sizes)])
        self.views = [_laid_out(part, local) for part, local in zip(parts, locals_, strict=True)]
        flags.fill_(1.0)
        return self.flat

    def adopt_gradient(self, index: int) -> None:
        """Let the gradient of a parameter lie in the bucket, if it does not yet."""
        parameter = self.parameters[index]
        grad = parameter.grad
        if grad is None or grad is self.given[index]:
            return
        if self.flat is None:
            self.begin()
        view = self.views[index]
        view.copy_(to_local(grad))
        self.given[index] = parameter.grad = divided_like(grad, view)

    def send(self, op: dist.ReduceOp.RedOpType, wire: torch.dtype | None) -> None:
        """Start to make the mean, or the sum; in another type it is one of what was divided."""
        assert self.flat is not None
        self.sent = self.flat
        if wire is not None:
            parts = self.group.size() if op == dist.ReduceOp.AVG else 1
            self.sent, op = (self.flat / parts).to(wire), dist.ReduceOp.SUM
        self.work = dist.all_reduce(self.sent, op=op, group=self.group, async_op=True)

    def receive(self) -> None:
        """Wait for what was sent."""
        if self.work is not None:
            self.work.wait()
            assert self.flat is not None
            assert self.sent is not None
            if self.sent is not self.flat:
                self.flat.copy_(self.sent)


class Replicas:
    """The mean of gradients over the ranks that hold the same parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, dist.ProcessGroup]],
        *,
        backwards: int | None,
        divided: bool = False,
        dtype: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        unlike: bool = False,
    ) -> None:
        """`divided` says that gradients come divided by the number of ranks: the mean is their sum.

        They are added in `dtype`, or that of their parameters, and travel in `wire` or as they are.

        `parameters` are in the order of forward, each with its ranks, once for each stage.

        A step adds to each gradient in `backwards` passes. None says that autograd does not tell
        when a gradient is complete, since some are made apart: all are sent by `finish`.

        Ranks of a group that are `unlike` have other parameters of other groups beside those that
        they share.
        """
        self._backwards = backwards
        self._wire = wire
        self._op = dist.ReduceOp.SUM if divided else dist.ReduceOp.AVG
        all_parameters = list(parameters)
        self._stages = Counter(parameter for parameter, _ in all_parameters)
        """Number of stages of this rank that read each parameter, in backwards of their own."""
        self._buckets = _buckets(all_parameters, dtype, unlike=unlike)
        self._sent = 0
        self.stays = False
        """Gradients lie in the same buckets in every step, and `finish` sends them all: passes are
        graphs, which run no hooks."""
        self.measures_own = False
        """True if each step measures this rank's own gradient, before it becomes the mean."""
        self.own_square: Tensor | None = None
        """The square of its norm in the last step that was measured."""
        self._squares: list[Tensor] = []
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._noticing(bucket, index))

    @torch.no_grad()
    def begin(self) -> None:
        """Divide gradients that passes before have left, if they are summed: they are once more."""
        for bucket in self._buckets:
            if bucket.flat is not None:  # of the step before
                bucket.flat[-len(bucket.parameters) :].fill_(1.0)
        if self._op == dist.ReduceOp.SUM:
            for bucket in self._buckets:
                left = [
                    parameter.grad for parameter in bucket.parameters if parameter.grad is not None
                ]
                for grad in left:
                    to_local(grad).div_(bucket.group.size())

    @torch.no_grad()
    def finish(self) -> None:
        """Put the mean of this step into all gradients."""
        lacking = []
        for bucket in self._buckets[self._sent :]:
            for index, parameter in enumerate(bucket.parameters):
                bucket.adopt_gradient(index)
                if parameter.grad is None:
                    lacking.append((bucket, index))
        for bucket, index in lacking:
            flat = bucket.begin() if bucket.flat is None else bucket.flat
            bucket.views[index].zero_()
            flat[index - len(bucket.parameters)] = 0.0
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            bucket.receive()
        for bucket, index in lacking:
            assert bucket.flat is not None
            if bucket.flat[index - len(bucket.parameters)] > 0:
                parameter = bucket.parameters[index]
                parameter.grad = divided_like(parameter, bucket.views[index])
        for bucket in () if self.stays else self._buckets:
            bucket.empty()  # the gradients keep its memory until the optimizer drops them
        self._sent = 0
        if self.measures_own:
            self.own_square = torch.stack([square.double() for square in self._squares]).sum()
            self._squares = []

    def buffer_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return where the gradient of a parameter lies in every step, if it is one of these."""
        for bucket in self._buckets:
            for index, mine in enumerate(bucket.parameters):
                if mine is parameter:
                    if bucket.flat is None:
                        bucket.begin()
                    bucket.given[index] = divided_like(parameter, bucket.views[index])
                    return bucket.given[index]
        return None

    def _send(self, bucket: _Bucket) -> None:
        if self.measures_own:
            assert bucket.flat is not None
            local = bucket.flat[: -len(bucket.parameters)]
            self._squares.append(torch.dot(local, local))
        bucket.send(self._op, self._wire)

    def _noticing(self, bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
        backwards = (self._backwards or 0) * self._stages[bucket.parameters[index]]

        def notice(parameter: Tensor) -> None:
            if self.stays:
                return
            bucket.adopt_gradient(index)
            bucket.added[index] += 1
            if bucket.added[index] != backwards:
                return
            bucket.complete += 1
            # In one order on all ranks, whatever order backward has.
            for one in self._buckets[self._sent :]:
                if one.complete < len(one.parameters):
                    break
                self._send(one)
                self._sent += 1

        return notice


def _buckets(
    parameters: Iterable[tuple[nn.Parameter, dist.ProcessGroup]],
    dtype: torch.dtype | None,
    *,
    unlike: bool,
) -> list[_Bucket]:
    """Return buckets in the order of backward; what is shared counts where forward has it first.

    All ranks of a group make the same: their size follows from what they have in common, which is
    the group's alone where ranks are unlike.
    """
    every: list[_Bucket] = []
    open_: dict[tuple[dist.ProcessGroup, torch.dtype], _Bucket] = {}
    # A parameter that is used twice is complete when backward comes to its first use.
    ordered = list(reversed(dict.fromkeys(parameters)))
    group_bytes: Counter[dist.ProcessGroup] = Counter()
    for parameter, group in ordered:
        group_bytes[group] += to_local(parameter).nbytes
    whole_bytes = group_bytes.total()
    for parameter, group in ordered:
        kind = group, dtype or parameter.dtype
        bucket = open_.get(kind)
        enough_bytes = gradient_bucket_bytes(group_bytes[group] if unlike else whole_bytes)
        if bucket is None or bucket.size_bytes >= enough_bytes:
            bucket = open_[kind] = _Bucket([], *kind)
            every.append(bucket)
        bucket.parameters.append(parameter)
    for bucket in every:
        bucket.empty()
    return every


def _laid_out(flat: Tensor, like: Tensor) -> Tensor:
    """Return flat memory as a tensor of the shape, and where there are no gaps the strides."""
    if like.is_contiguous():
        return flat.view(like.shape)
    strides = torch.empty_like(like, device="meta").stride()  # dense, in the same order
    return flat.as_strided(like.shape, strides, flat.storage_offset())
