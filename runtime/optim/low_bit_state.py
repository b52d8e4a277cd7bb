"""State of optimizers that keep it in few bits, such as AdamW8bit of torchao.

Such a tensor is a subclass that looks like fp32 and has integers with a scale for each block of the
flattened part.  A checkpoint has its values in fp32: any plan cuts those, and quantising them again
in the same blocks gives the same integers, but for a scale that may be one rounding off.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


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
