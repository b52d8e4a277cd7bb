"""AdamW: the update of parameters by their gradients, and the two moments that it keeps.

Moments are fp32, so 8 bytes for each parameter that this rank updates.  On the host they come to
the device in buckets of at most BUCKET_BYTES (or of one parameter that is larger), are updated by
the same kernel, and go back; the device holds three buckets at once, one coming, one in use and one
going.  The numbers are the same wherever the moments are.

The fused kernel runs through memory and looks at no strides, so a parameter, its gradient and its
moments must lie alike; what does not is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from planner.errors import LaunchError
from planner.plan import Offload
from planner.training import Training
from runtime import host

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What AdamW keeps of one parameter, under the names that checkpoints have."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of the two moments."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    def named(self) -> dict[str, Tensor]:
        """Return all by name."""
        return {"step": self.step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class AdamW:
    """AdamW of this rank's local parameters.  Weight decay acts on those that are `matrices`."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        matrices: Sequence[bool],
        training: Training,
        *,
        names: Sequence[str],
        device: torch.device,
        offload: Offload,
    ) -> None:
        self.training = training
        self._names = names
        self.parameters, self._matrices = parameters, matrices
        self._device = device
        self._streamed = offload == "optimizer"
        for name, parameter in zip(names, parameters, strict=True):
            _check_alike(name, parameter, moments=torch.empty_like(parameter, device="meta"))
        self.moments = [_fresh(parameter, device, offload) for parameter in parameters]

    def step(
        self, grads: Sequence[Tensor | None], *, rate: float, spoilt: Tensor | None = None
    ) -> None:
        """Update the parameters that have a gradient; none of them if `spoilt` is 1.

        `spoilt` stays where parameters are: on a device nobody waits for it.
        """
        if spoilt is not None and self.parameters:
            # torch would copy it to parameters on the host without a wait, and read it too early.
            spoilt = spoilt.to(self.parameters[0].device)
        used = [
            index
            for index, grad in enumerate(grads)
            if grad is not None and self.parameters[index].numel()
        ]
        for index, parameter in enumerate(self.parameters):
            if not parameter.numel():
                # Other ranks hold the values; a checkpoint may take the count of steps from here.
                at = self.moments[index].step
                at.add_(1 if spoilt is None else (1 - spoilt).to(at.device))
        if not self._streamed:
            self._update(used, [self.moments[index] for index in used], grads, rate, spoilt)
            return
        buckets = self._buckets(used)
        coming = self._fetched(next(buckets, []))
        going: deque[tuple[list[host.Copied], list[Moments]]] = deque()
        while coming:
            here, coming = coming, self._fetched(next(buckets, []))
            indices = [index for index, _, _ in here]
            arrived = [
                Moments(step=self.moments[i].step, exp_avg=mean.wait(), exp_avg_sq=square.wait())
                for i, mean, square in here
            ]
            self._update(indices, arrived, grads, rate, spoilt)
            going.append((self._sent_home(indices, arrived), arrived))
            while len(going) > 1 or (going and not coming):
                for copy in going.popleft()[0]:
                    copy.wait()

    def _update(
        self,
        indices: Sequence[int],
        moments: Sequence[Moments],
        grads: Sequence[Tensor | None],
        rate: float,
        spoilt: Tensor | None,
    ) -> None:
        for index, at in zip(indices, moments, strict=True):
            grad = grads[index]
            assert grad is not None
            _check_alike(
                self._names[index],
                self.parameters[index],
                gradient=grad,
                moments=at.exp_avg,
                squares=at.exp_avg_sq,
            )
        for matrix in (True, False):
            group = [
                (self.parameters[index], grads[index], at)
                for index, at in zip(indices, moments, strict=True)
                if self._matrices[index] == matrix
            ]
            if group:
                adamw(
                    [parameter for parameter, _, _ in group],
                    [grad for _, grad, _ in group if grad is not None],
                    [at.exp_avg for _, _, at in group],
                    [at.exp_avg_sq for _, _, at in group],
                    [],
                    [at.step for _, _, at in group],
                    fused=True,
                    found_inf=spoilt,
                    amsgrad=False,
                    beta1=self.training.beta1,
                    beta2=self.training.beta2,
                    lr=rate,
                    weight_decay=self.training.weight_decay if matrix else 0.0,
                    eps=self.training.epsilon,
                    maximize=False,
                )

    def _buckets(self, indices: Sequence[int]) -> Iterator[list[int]]:
        bucket: list[int] = []
        size_bytes = 0
        for index in indices:
            more_bytes = self.moments[index].size_bytes
            if bucket and size_bytes + more_bytes > BUCKET_BYTES:
                yield bucket
                bucket, size_bytes = [], 0
            bucket.append(index)
            size_bytes += more_bytes
        if bucket:
            yield bucket

    def _fetched(self, indices: Sequence[int]) -> list[tuple[int, host.Copied, host.Copied]]:
        return [
            (
                index,
                host.to_device(self.moments[index].exp_avg, self._device),
                host.to_device(self.moments[index].exp_avg_sq, self._device),
            )
            for index in indices
        ]

    def _sent_home(self, indices: Sequence[int], arrived: Sequence[Moments]) -> list[host.Copied]:
        return [
            host.back_to_host(new, old)
            for index, at in zip(indices, arrived, strict=True)
            for new, old in (
                (at.exp_avg, self.moments[index].exp_avg),
                (at.exp_avg_sq, self.moments[index].exp_avg_sq),
            )
        ]


def _check_alike(name: str, parameter: Tensor, **others: Tensor) -> None:
    """Refuse tensors that do not lie in memory as a parameter does."""
    for what, other in others.items():
        if _layout(parameter) != _layout(other):
            raise LaunchError(
                f"{name}: has strides {parameter.stride()} in memory, and its {what} "
                f"{other.stride()}; AdamW's fused update needs them alike. Let the module keep the "
                "parameter contiguous"
            )


def _layout(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that elements have; of a dim of one there may be any."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _fresh(parameter: Tensor, device: torch.device, offload: Offload) -> Moments:
    def zeros() -> Tensor:
        if offload == "none" or parameter.device != device:
            return torch.zeros_like(parameter, requires_grad=False)
        # The kernel runs through memory, so all have the parameter's own strides.
        flat = host.room((parameter.numel(),), parameter.dtype, device).zero_()
        return flat.as_strided(parameter.shape, parameter.stride())

    return Moments(
        step=torch.zeros((), dtype=torch.float32, device=parameter.device),
        exp_avg=zeros(),
        exp_avg_sq=zeros(),
    )
