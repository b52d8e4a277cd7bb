"""Products in 8 bits: what `precision: fp8` and `mxfp8` do with the Linears of a model's blocks.

Operands are scaled, rounded to 8-bit floats, and multiplied by torch._scaled_mm with sums in fp32.
What shares a scale:

    tensorwise  all of an operand; inputs and weights in e4m3, gradients of outputs in e5m2
                (Micikevicius et al., "FP8 formats for deep learning", 2022)
    rowwise     each row along which a product sums, all operands in e4m3, scales rounded down to
                powers of two (torchao's recipe of that name): large values of one token or feature
                do not cost others their digits
    mxfp8       BLOCK neighbours along which a product sums, in e4m3, scales powers of two in e8m0
                (OCP Microscaling Formats specification 1.0, section 6.3)

The largest absolute values are found anew in every product.  Where a product sums along another dim
than the one before, rows and blocks are others, and the operand is rounded again.  Results,
activations, embedding, head, norms, attention and routed experts are in bf16; master weights,
gradients and moments in fp32.  What is saved for backward is stored in bf16, so that memory is that
of bf16.

Kernels take sizes that are multiples of MULTIPLE (of BLOCK where they sum blocks); other products
are made in bf16.  Tensorwise weights may come in 8 bits, with their scale.
Where a device has no product of blocks (a CPU), they are multiplied as fp32, which represents their
values exactly.

Weights that ranks divide under ZeRO-3 are gathered in 8 bits under `weight_gather_dtype: fp8`.
Each rank rounds its shard of a Linear's weight with the scale of the whole, and FSDP gathers the
result, through the two methods that it asks a parameter for (`fsdp_pre_all_gather` and
`fsdp_post_all_gather`; so does torchao).  What is gathered while a layer works takes one byte an
element in place of two, and products do not round it again.  Values are to the last bit those of
weights that were gathered in bf16 and rounded behind it: the shard is brought to bf16 first, and
the largest value is that of all shards.

Scales are made once for a step, of all weights with one reduction of their largest values.
Gradients come in bf16 for weights in 8 bits (`Tensor.grad_dtype`), and are reduced as others are.
Only a leaf may have such a gradient, so between it and the product a stand-in in bf16 takes the
weight's place in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Scales
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.torch_internals import extend_gather, fsdp_parameters
from meshwright.runtime.techniques.split_backward import (
    PLAIN,
    DeferredLinear,
    Products,
    divided_like,
)

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
BLOCK = 32
"""Neighbours that share a scale in MX formats."""
LEAST_CAPABILITY = {"fp8": (8, 9), "mxfp8": (10, 0)}
"""Least compute capability of CUDA devices whose matrix units multiply 8-bit floats (Ada and Hopper
on), and blocks with scales of their own (Blackwell)."""
_LEAST = 1e-30
_LARGEST_EXPONENT = 8  # of e4m3, whose largest value is 1.75 x 2^8
_LEAST_EXPONENT, _MOST_EXPONENT = -127, 127  # of e8m0


def require(device: torch.device, precision: Precision) -> None:
    """Refuse a device whose matrix units do not have these formats."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        if precision == "mxfp8":
            raise LaunchError("precision: is mxfp8, which is not made on ROCm here. Use fp8")
        return
    capability, least = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[precision]
    if capability < least:
        raise LaunchError(
            f"precision: is {precision}, and {torch.cuda.get_device_name(device)} has compute "
            f"capability {capability[0]}.{capability[1]}; such products need {least[0]}.{least[1]} "
            "or more. Use bf16"
        )


def multiplies_blocks(device: torch.device) -> bool:
    """Tell whether a device has products of blocks; elsewhere what they hold is multiplied."""
    return device.type == "cuda"


def products_of(precision: Precision, scales: Scales) -> Products:
    """Return how the Linears of blocks multiply."""
    if precision == "mxfp8":
        return Blocks()
    if precision == "fp8":
        return Rowwise() if scales == "rowwise" else Tensorwise()
    return PLAIN


def scale_of(most: Tensor, kind: torch.dtype) -> Tensor:
    """Return what 8 bits are multiplied with so that they reach `most`."""
    return (most.float() / torch.finfo(kind).max).clamp(min=_LEAST)


def rounded_with(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Return a tensor over its scale in 8 bits; what does not fit becomes the largest."""
    most = torch.finfo(kind).max
    # In place on a copy of its own, or eager products would hold three of 4 bytes an element.
    wide = x.to(torch.float32, copy=True)
    return wide.div_(scale).clamp_(-most, most).to(kind)


def round_to_8_bits(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in 8 bits and what to multiply it with.

    >>> eight, scale = round_to_8_bits(torch.tensor([448.0, -1.0, 0.3]), FORWARD)
    >>> (eight.float() * scale).tolist()
    [448.0, -1.0, 0.3125]
    """
    scale = scale_of(_largest(x), kind)
    return rounded_with(x, scale, kind), scale


def rows_rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and what to multiply each of its rows with, [row, 1].

    >>> eight, scales = rows_rounded(torch.tensor([[448.0, 0.3], [0.0021, 0.3]]), FORWARD)
    >>> (eight.float() * scales).tolist()[1][1], scales.tolist()
    (0.3125, [[1.0], [0.0009765625]])
    """
    exponent = torch.frexp(scale_of(_largest(x, dim=1), kind))
    # Up to the next power of two: values only become smaller.
    scale = torch.ldexp(torch.ones_like(exponent.mantissa), exponent.exponent)
    scale = torch.where(exponent.mantissa == 0.5, scale / 2, scale)
    return rounded_with(x, scale, kind), scale


def blocks_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3 and the exponents of its blocks' scales, [row, column / BLOCK].

    The largest value's exponent, less that of the largest e4m3 (OCP MX 1.0, section 6.3).

    >>> eight, exponents = blocks_rounded(torch.full((1, 32), 3.3))
    >>> eight.float()[0, 0].item(), exponents.item()
    (416.0, -7)
    """
    blocks = x.to(torch.float32, copy=True).unflatten(1, (-1, BLOCK))
    most = _largest(blocks, dim=2)
    # frexp has mantissas from 1/2: the exponent of 1.m is one less.  Of 0 it is anything.
    exponents = (torch.frexp(most).exponent - 1 - _LARGEST_EXPONENT).clamp(
        _LEAST_EXPONENT, _MOST_EXPONENT
    )
    largest = torch.finfo(FORWARD).max
    scaled = blocks.ldexp_(-exponents).clamp_(-largest, largest)
    return scaled.to(FORWARD).flatten(1), exponents.squeeze(2)


def _largest(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest absolute value, of all or along a dim that stays."""
    return torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None)


class Tensorwise:
    """The three products of a Linear, one scale for each operand."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        rows = x.flatten(0, -2)
        if not _fits(rows, weight):
            return functional.linear(x, _widen(weight, scale, x.dtype), bias)
        product = _product(rows, FORWARD, weight, FORWARD, scale).unflatten(0, x.shape[:-1])
        return product if bias is None else product + bias

    @staticmethod
    def of_input(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Return the gradient of x, grad W."""
        rows = grad.flatten(0, -2)
        if not _fits(rows, weight):
            return grad @ _widen(weight, scale, grad.dtype)
        product = _product(rows, BACKWARD, weight.t(), FORWARD, scale)
        return product.unflatten(0, grad.shape[:-1])

    @staticmethod
    def of_weight(x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of W, grad^T x."""
        rows, columns = grad.flatten(0, -2).t(), x.flatten(0, -2).t()
        if not _fits(rows, columns):
            return rows @ columns.t()
        return _product(rows, BACKWARD, columns, FORWARD, None)


class Rowwise:
    """The three products of a Linear, one scale for each row that is summed."""

    @classmethod
    def output(cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        product = cls._product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return product if bias is None else product + bias

    @classmethod
    def of_input(cls, grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Return the gradient of x, grad W."""
        return cls._product(grad.flatten(0, -2), weight.t()).unflatten(0, grad.shape[:-1])

    @classmethod
    def of_weight(cls, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of W, grad^T x."""
        return cls._product(grad.flatten(0, -2).t(), x.flatten(0, -2).t())

    @staticmethod
    def _product(left: Tensor, other: Tensor) -> Tensor:
        return _by_rows(left, other)


class Blocks(Rowwise):
    """The three products of a Linear, one scale for BLOCK neighbours that are summed."""

    @staticmethod
    def _product(left: Tensor, other: Tensor) -> Tensor:
        return _by_blocks(left, other)


def fits(shape: torch.Size) -> bool:
    """Tell whether kernels take a matrix of this shape."""
    return all(size % MULTIPLE == 0 for size in shape)


def _fits(*matrices: Tensor) -> bool:
    return all(fits(matrix.shape) for matrix in matrices)


def _widen(weight: Tensor, scale: Tensor | None, kind: torch.dtype) -> Tensor:
    return weight if scale is None else (weight.float() * scale).to(kind)


def _product(
    left: Tensor,
    kind: torch.dtype,
    other: Tensor,
    other_kind: torch.dtype,
    other_scale: Tensor | None,
) -> Tensor:
    """Return one [m, k] times other [n, k] transposed, in the type of the first.

    With a scale the other comes in 8 bits.
    """
    a, a_scale = round_to_8_bits(left, kind)
    b, b_scale = (
        (other, other_scale) if other_scale is not None else round_to_8_bits(other, other_kind)
    )
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=left.dtype,
    )


def _by_rows(left: Tensor, other: Tensor) -> Tensor:
    """Return one [m, k] times other [n, k] transposed, in the type of the first."""
    if not _fits(left, other):
        return left @ other.t()
    (a, a_scale), (b, b_scale) = rows_rounded(left, FORWARD), rows_rounded(other, FORWARD)
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale.t().contiguous(),
        out_dtype=left.dtype,
    )


def _by_blocks(left: Tensor, other: Tensor) -> Tensor:
    """Return one [m, k] times other [n, k] transposed, in the type of the first."""
    if not _fits(left, other) or left.shape[1] % BLOCK:
        return left @ other.t()
    (a, a_exponents), (b, b_exponents) = blocks_rounded(left), blocks_rounded(other)
    if not multiplies_blocks(left.device):
        a_wide, b_wide = _unblock(a, a_exponents), _unblock(b, b_exponents)
        return (a_wide @ b_wide.t()).to(left.dtype)
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=swizzle(_e8m0(a_exponents)),
        scale_b=swizzle(_e8m0(b_exponents)),
        out_dtype=left.dtype,
    )


def _unblock(eight: Tensor, exponents: Tensor) -> Tensor:
    return torch.ldexp(eight.float().unflatten(1, (-1, BLOCK)), exponents.unsqueeze(2)).flatten(1)


def _e8m0(exponents: Tensor) -> Tensor:
    """Return powers of two as bytes that are their exponents, biased by 127."""
    return (exponents - _LEAST_EXPONENT).to(torch.uint8).view(torch.float8_e8m0fnu)


def swizzle(scales: Tensor) -> Tensor:
    """Return scales [row, block] in the order in which Blackwell's products read them, flat.

    Tiles of 128 rows and 4 blocks; in each, four rows that are 32 apart stand together.  What
    fills the last tiles up is 0 (cuBLAS, "1D block scaling factors layout").
    """
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    filled = functional.pad(
        scales.view(torch.uint8), (0, 4 * across - columns, 0, 128 * down - rows)
    )
    tiles = filled.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


_WIDE = torch.bfloat16


class NarrowWeights:
    """The weights of one stage that are gathered in 8 bits, and their scales."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """The group divides them."""
        if not hasattr(Tensor, "grad_dtype"):
            raise LaunchError(
                f"weight_gather_dtype: is fp8, and torch {torch.__version__} has no gradients "
                "of another type than their parameter's (Tensor.grad_dtype); use full"
            )
        self._group = group
        self._records: list[Any] = []
        self._scales: list[Tensor] = []

    def gather_in_8_bits(self, layer: nn.Module) -> None:
        """Gather the weights of a layer's Linears in 8 bits, where their shape allows it."""
        assert isinstance(layer, FSDPModule)
        taken = []
        for record in fsdp_parameters(layer):
            module, shard = record._module_info.module, record._sharded_local_tensor
            size = record._orig_size
            if (
                isinstance(module, DeferredLinear)
                and isinstance(module.products, Tensorwise)
                and record._module_info.param_name == "weight"
                and record.fsdp_placement.dim == 0
                and size[0] % self._group.size() == 0
                and fits(size)
            ):
                module.scale = torch.ones((), device=shard.device)
                extend_gather(record, _narrow_hook(shard, module.scale), _after_gather)
                self._scales.append(module.scale)
                taken.append(record)

        def stand_in(*_: object) -> None:
            """Put one in each weight's place, which FSDP has gathered."""
            for record in taken:
                weight = record._unsharded_param
                weight.grad_dtype = _WIDE
                record._module_info.module.stand_in = _StandIn.apply(weight)

        self._records += taken
        layer.register_forward_pre_hook(stand_in)

    @torch.no_grad()
    def rescale(self) -> None:
        """Make the scales of the weights as they are now; all ranks that divide them together."""
        if not self._records:
            return
        shards = [record._sharded_local_tensor for record in self._records]
        most = torch.stack(torch._foreach_norm(shards, float("inf"))).to(_WIDE).float()
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        torch._foreach_copy_(self._scales, list(scale_of(most, FORWARD).unbind()))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.like = weight
        shape = weight.to_local().shape if isinstance(weight, DTensor) else weight.shape
        return torch.empty((), dtype=_WIDE, device=weight.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        like = ctx.like
        return divided_like(grad, like) if isinstance(like, DTensor) else grad


def _narrow_hook(shard: Tensor, scale: Tensor) -> Callable[..., tuple[tuple[Tensor, ...], None]]:
    def before(
        mesh: object, size: object, stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends, as bytes: collective libraries know no 8-bit floats."""
        return (rounded_with(shard.to(_WIDE), scale, FORWARD).view(torch.uint8),), None

    return before


def _after_gather(
    outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the whole weight, and what FSDP frees with it; later gathers fill the same memory."""
    return None if out is not None else (outputs[0].view(FORWARD), outputs)
