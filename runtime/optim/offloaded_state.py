"""Optimizer state that lies on the host, and comes to the device for the update alone.

Parameters are updated in buckets: the state of one comes while the one before it is updated, the
optimizer steps with the gradients of that bucket alone, and the state goes back.  That is right for
any optimizer whose update of one parameter needs no other; whether one is like that is tried at the
start (`steps_apart`).

Some optimizers keep state in few bits, such as AdamW8bit of torchao.  Such a tensor is a subclass
that looks like fp32 and has integers with a scale for each block of the flattened part.  A
checkpoint has its values in fp32: any plan cuts those, and quantising them again in the same blocks
gives the same integers, but for a scale that may be one rounding off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import OptimizerError
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.side_effects import restore_side_effects

BUCKET_BYTES = 64 * 2**20
"""Bytes of state in one bucket, the unit of transfer."""

Optimizer = torch.optim.Optimizer


def steps_apart(new: Callable[[list[nn.Parameter]], Optimizer]) -> bool:
    """Tell whether updating parameters one after the other is updating them together: it is tried.

    >>> steps_apart(lambda listed: torch.optim.Adam(listed, lr=0.1, amsgrad=True))
    True
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = torch.randn(4, 2, 3, 3, generator=generator)
    together, apart = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    with restore_side_effects(new), torch.compiler.set_stance("force_eager"):
        whole, streamed = new(together), new(apart)
        for both in grads:
            for parameter, grad in zip(together, both, strict=True):
                parameter.grad = grad.clone()
            whole.step()
            for parameter, grad in zip(apart, both, strict=True):
                parameter.grad = grad.clone()
                streamed.step()
                parameter.grad = None
    return all(map(torch.equal, together, apart))


class StreamedState:
    """Steps optimizers of a device bucket by bucket, with their state on the host in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def step(self, users: Mapping[nn.Parameter, Optimizer]) -> None:
        """Update the parameters that have a gradient, each by its optimizer."""
        grads = {
            parameter: parameter.grad
            for parameter in users
            if parameter.grad is not None and parameter.numel()
        }
        for parameter in users:
            parameter.grad = None
        buckets = list(_buckets({parameter: users[parameter] for parameter in grads}))
        coming = self._coming(*buckets[0]) if buckets else []
        going: list[_OnItsWay] = []
        for at, (optimizer, bucket) in enumerate(buckets):
            homes = {
                (id(parameter.state), parameter.key): parameter.source
                for parameter in coming
                if host.on_host(parameter.source)  # what a checkpoint was read into may not be yet
            }
            for one in coming:
                one.state[one.key] = one.copied.wait()
            coming = self._coming(*buckets[at + 1]) if at + 1 < len(buckets) else []
            for parameter in bucket:
                parameter.grad = grads[parameter]
            optimizer.step()
            for parameter in bucket:
                parameter.grad = None
            _arrive(going)
            going = self._going(optimizer, bucket, homes)
        _arrive(going)

    def _coming(self, optimizer: Optimizer, bucket: Sequence[nn.Parameter]) -> list[_OnItsWay]:
        return [
            _OnItsWay(state, key, host.to_device(value, self._device), value)
            for state, key, value in _tensors(optimizer, bucket)
        ]

    def _going(
        self,
        optimizer: Optimizer,
        bucket: Sequence[nn.Parameter],
        homes: Mapping[tuple[int, str], Tensor],
    ) -> list[_OnItsWay]:
        return [
            _OnItsWay(
                state,
                key,
                host.back_to_host(value, homes.get((id(state), key), host_like(value))),
                value,
            )
            for state, key, value in _tensors(optimizer, bucket)
        ]


def host_like(tensor: Tensor) -> Tensor:
    """Return unfilled host memory for a tensor; fused updates run through memory by its strides."""
    flat = host.room((tensor.numel(),), tensor.dtype, tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A tensor of state that is copied to the device, or back."""

    state: dict[str, Any]
    key: str
    copied: host.Copied
    source: Tensor
    """Source of the copy, which must stay alive until the copy is complete."""


def _arrive(going: Sequence[_OnItsWay]) -> None:
    for parameter in going:
        parameter.state[parameter.key] = parameter.copied.wait()


def _buckets(
    users: Mapping[nn.Parameter, Optimizer],
) -> Iterator[tuple[Optimizer, list[nn.Parameter]]]:
    """Yield parameters of one optimizer each, of BUCKET_BYTES or one that is larger."""
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for parameter, optimizer in users.items():
        kept = [value.nbytes for _, _, value in _tensors(optimizer, [parameter])]
        own_bytes = sum(kept) if kept else parameter.nbytes
        full = size_bytes + own_bytes > BUCKET_BYTES
        if bucket and (full or users[bucket[0]] is not optimizer):
            yield users[bucket[0]], bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += own_bytes
    if bucket:
        yield users[bucket[0]], bucket


def _tensors(
    optimizer: Optimizer, bucket: Sequence[nn.Parameter]
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield what an optimizer keeps of some parameters, but for counts of steps."""
    for parameter in bucket:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if is_quantized(value):
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps its state in few bits, and offload "
                    "'optimizer' moves fp32 alone; plan without offload"
                )
            if isinstance(value, Tensor) and value.ndim:
                yield state, key, value


def is_quantized(value: Any) -> bool:
    """Tell whether a tensor is made of other ones and can be read as fp32."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and hasattr(type(value), "__tensor_flatten__")
        and "dequantize" in vars(type(value))
    )


def plain_values(value: Tensor) -> Tensor:
    """Return a tensor of state as its values."""
    return value.dequantize() if is_quantized(value) else value


def take_values(value: Any, given: Tensor) -> None:
    """Quantise values that such a tensor had once.

    The table of a signed state has no -1: a block whose largest element is negative was stored as
    less than that, and its scale would shrink each time.
    """
    lowest = -float(value.qmap[0]) if hasattr(value, "qmap") else 0.0
    if lowest > 0.0:
        blocks = given.reshape(-1, value.block_size)
        low = blocks.amin(dim=1, keepdim=True)
        restored = low / lowest
        shrunk = (blocks == low) & (-restored > blocks.amax(dim=1, keepdim=True))
        given = blocks.where(~shrunk, restored).view(given.shape)
    value.copy_(given)


def bytes_of(value: Tensor) -> int:
    """Return the bytes that a tensor of state takes."""
    if not is_quantized(value):
        return value.nbytes
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(getattr(value, name).nbytes for name in names)
