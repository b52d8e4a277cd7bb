"""Products in 8 bits: what `precision: fp8` does with the Linears of a model's blocks.

Each operand is scaled by its own largest absolute value (one scale for a tensor, made anew in every
product), rounded, and multiplied by torch._scaled_mm with sums in fp32: inputs and weights in e4m3,
gradients of outputs in e5m2 (Micikevicius et al., "FP8 formats for deep learning", 2022).  Results,
activations, embedding, head, norms, attention and routed experts are in bf16; master weights,
gradients and moments in fp32.  What is kept for backward is kept in bf16, so that memory is that of
bf16.

Kernels take sizes that are multiples of MULTIPLE; other products are made in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from planner.errors import LaunchError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
LEAST_CAPABILITY = (8, 9)
"""Of CUDA devices whose matrix units multiply 8-bit floats: Ada and Hopper on."""
_LEAST = 1e-30


def require(device: torch.device) -> None:
    """Refuse a device whose matrix units do not have these formats."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise LaunchError(
            f"precision: is fp8, and {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; 8-bit products need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or more. Use bf16"
        )


def rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in 8 bits and what to multiply it with.

    >>> eight, scale = rounded(torch.tensor([448.0, -1.0, 0.3]), FORWARD)
    >>> (eight.float() * scale).tolist()
    [448.0, -1.0, 0.3125]
    """
    most = torch.finfo(kind).max
    scale = (x.abs().amax().float() / most).clamp(min=_LEAST)
    return (x.float() / scale).clamp(-most, most).to(kind), scale


class EightBits:
    """The three products of a Linear, in 8 bits."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        rows = x.flatten(0, -2)
        if not _fits(rows, weight):
            return functional.linear(x, weight, bias)
        made = _product(rows, weight, (FORWARD, FORWARD)).unflatten(0, x.shape[:-1])
        return made if bias is None else made + bias

    @staticmethod
    def of_input(grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of x, grad W."""
        rows = grad.flatten(0, -2)
        if not _fits(rows, weight):
            return grad @ weight
        return _product(rows, weight.t(), (BACKWARD, FORWARD)).unflatten(0, grad.shape[:-1])

    @staticmethod
    def of_weight(x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of W, grad^T x."""
        rows, columns = grad.flatten(0, -2).t(), x.flatten(0, -2).t()
        if not _fits(rows, columns):
            return rows @ columns.t()
        return _product(rows, columns, (BACKWARD, FORWARD))


def _fits(*matrices: Tensor) -> bool:
    return all(size % MULTIPLE == 0 for matrix in matrices for size in matrix.shape)


def _product(one: Tensor, other: Tensor, kinds: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """Return one [m, k] times other [n, k] transposed, in the type of the first."""
    (a, a_scale), (b, b_scale) = (
        rounded(matrix, kind) for matrix, kind in zip((one, other), kinds, strict=True)
    )
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=one.dtype,
    )
