"""Frozen weights in few bits: packed once they have values, restored around each product.

    nf4     16 levels that halve a normal distribution, a scale for 64 weights.  Scales are rounded
            to 8 bits of the largest one of their row (Dettmers et al., 2023, QLoRA, appendix E).
    mxfp4   sign, 2 bits of exponent and one of mantissa, a power of two for 32 weights (OCP
            Microscaling Formats, v1.0, section 5.3)
    int8, fp8    a scale for 128 weights

Blocks lie along the last dim, so that rows of a matrix are packed alike on any number of ranks.
Codes are stored as elements of the type of the computation, in which FSDP divides and gathers them
as they are; scales are whole on every rank that has the rows.  A product keeps codes for its
backward, never the restored weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from meshwright.planner.documents.training import FrozenWeights
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.local_parts import local_part
from meshwright.runtime.core.torch_internals import saved_tensors_hooks_outside

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""NF4 levels of Dettmers et al. (2023), appendix E."""
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_EXPONENT = 2
"""Exponent of the largest level's power of two."""
EXPONENT_BIAS = 127
BLOCKS: Mapping[FrozenWeights, int] = {"nf4": 64, "mxfp4": 32, "int8": 128, "fp8": 128}
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
ROUNDED_SCALES = 255
RESTORED_TOGETHER = 2**22
"""Weights whose indices are there at once."""


class PackedWeight(NamedTuple):
    """Codes of a matrix, as bytes, and their scales: of blocks, and of nf4 the largest of a row."""

    codes: Tensor
    scales: Tensor
    row_scales: Tensor | None = None


def pack(
    weight: Tensor, weights: FrozenWeights, *, row_group: dist.ProcessGroup | None = None
) -> PackedWeight:
    """Pack a matrix, or several; ranks of `row_group` have parts of the same rows."""
    length = weight.shape[-1]
    blocks = weight.float().unflatten(-1, (-1, math.gcd(length, BLOCKS[weights])))
    largest = blocks.abs().amax(-1)
    if weights in LARGEST_CODE:
        scales = largest / LARGEST_CODE[weights]
        scaled = _quotient(blocks, scales).flatten(-2)
        codes = (
            scaled.round().to(torch.int8) if weights == "int8" else scaled.to(torch.float8_e4m3fn)
        )
        return PackedWeight(codes.view(torch.uint8), scales)
    if length % 2:
        raise LaunchError(
            f"training.lora.weights: is {weights}, and a matrix has rows of {length} weights, "
            "which are no whole bytes; use int8 or fp8"
        )
    row_scales = None
    if weights == "nf4":
        row_scales = largest.amax(-1, keepdim=True) / ROUNDED_SCALES
        if row_group is not None:
            dist.all_reduce(row_scales, dist.ReduceOp.MAX, group=row_group)
        # A scale rounded up leaves no weight beyond the outer levels.
        scales = _quotient(largest.unsqueeze(-1), row_scales.unsqueeze(-1))[..., 0]
        scales = scales.ceil().clamp(max=ROUNDED_SCALES).to(torch.uint8)
        chosen = _nearest(_quotient(blocks, scales.float() * row_scales), NF4_LEVELS)
    else:
        exponents = torch.frexp(largest)[1] - 1 - FP4_EXPONENT
        exponents = exponents.where(largest > 0, torch.zeros_like(exponents))
        scales = (exponents.clamp(-EXPONENT_BIAS, EXPONENT_BIAS) + EXPONENT_BIAS).to(torch.uint8)
        scaled = _quotient(blocks, torch.exp2(scales.float() - EXPONENT_BIAS))
        chosen = _nearest(scaled.abs(), FP4_LEVELS) + 8 * (scaled < 0)
    pairs = chosen.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    return PackedWeight(pairs[..., 0] << 4 | pairs[..., 1], scales, row_scales)


def _quotient(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return blocks over their scales; what has a scale of 0 is 0 itself."""
    scales = scales.unsqueeze(-1) if scales.ndim < blocks.ndim else scales
    return blocks / scales.where(scales > 0, torch.ones_like(scales))


def _nearest(values: Tensor, levels: tuple[float, ...]) -> Tensor:
    ends = torch.tensor(levels, device=values.device)
    return torch.bucketize(values, (ends[1:] + ends[:-1]) / 2)


@torch.no_grad()
def restore(packed: PackedWeight, weights: FrozenWeights, dtype: torch.dtype) -> Tensor:
    """Return the weights of a packed matrix."""
    codes, scales, row_scales = packed
    if row_scales is not None:
        scales = (scales.float() * row_scales).to(dtype)
    elif weights == "mxfp4":
        scales = torch.exp2(scales.float() - EXPONENT_BIAS).to(dtype)
    if weights in LARGEST_CODE:
        kind = torch.int8 if weights == "int8" else torch.float8_e4m3fn
        result = codes.view(kind).to(dtype)
    else:
        levels = NF4_LEVELS if weights == "nf4" else (*FP4_LEVELS, *(-x for x in FP4_LEVELS))
        table = torch.cartesian_prod(*2 * (torch.tensor(levels, dtype=dtype, device=codes.device),))
        result = _looked_up(codes, table)
    blocks = result.unflatten(-1, (scales.shape[-1], -1))
    blocks *= scales.to(dtype).unsqueeze(-1)
    return result


def _looked_up(codes: Tensor, pairs: Tensor) -> Tensor:
    """Return the two weights of each byte, some rows at a time: indices have 4 bytes."""
    if torch.compiler.is_compiling():  # a graph makes no indices
        return pairs[codes.int()].flatten(-2)
    flat = codes.flatten()
    result = pairs.new_empty(flat.numel(), 2)
    for part, room in zip(
        flat.split(RESTORED_TOGETHER // 2), result.split(RESTORED_TOGETHER // 2), strict=True
    ):
        torch.index_select(pairs, 0, part.int(), out=room)
    return result.view(*codes.shape[:-1], -1)


# --- modules --------------------------------------------------------------------------------------


class _Packs:
    """Base of packed modules: the places of the parts of a weight."""

    weights: FrozenWeights
    computed_in: torch.dtype
    _buffers: dict[str, Tensor | None]
    packs: ClassVar[tuple[str, ...]]

    def packed_weight(self, name: str, codes: Tensor) -> PackedWeight:
        """Return a weight of which `codes` are a parameter's local part."""
        scales = self._buffers[f"{name}_scales"]
        assert scales is not None
        return PackedWeight(codes.view(torch.uint8), scales, self._buffers[f"{name}_row_scales"])


class PackedLinear(_Packs, nn.Linear):
    """A Linear whose frozen weight is packed once it has values."""

    packs = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with these parameters, the module's own or its local parts."""
        if "weight_scales" not in self._buffers:
            return functional.linear(x, weight, bias)
        codes, scales, row_scales = self.packed_weight("weight", weight)
        result: Tensor = _PackedProduct.apply(x, codes, scales, row_scales, self.weights)
        return result if bias is None else result + bias


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        row_scales: Tensor | None,
        weights: FrozenWeights,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, row_scales)
        ctx.weights = weights
        return functional.linear(
            x, restore(PackedWeight(codes, scales, row_scales), weights, x.dtype)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed = PackedWeight(*ctx.saved_tensors)
        return grad @ restore(packed, ctx.weights, grad.dtype), None, None, None, None


class PackedExperts(_Packs):
    """Experts, whose matrices read as restored ones while a forward runs; a mix-in.

    Restored ones are behind their names in the module's `__dict__`, as local parts are.
    """

    packs = ("gate_up_proj", "down_proj")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts with restored weights, of which autograd keeps none."""
        return self.while_restored(super().forward, *args, **kwargs)  # type: ignore[misc]

    def while_restored(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward of these experts with restored weights, of which autograd keeps none."""
        if "down_proj_scales" not in self._buffers:
            return forward(*args, **kwargs)
        codes = {name: local_part(cast(nn.Module, self), name) for name in self.packs}
        packed = {name: self.packed_weight(name, cast(Tensor, codes[name])) for name in self.packs}
        restored = {name: self.restored_weight(packed[name]) for name in self.packs}
        hidden = {name: self.__dict__[name] for name in self.packs if name in self.__dict__}
        self.__dict__.update(restored)
        try:
            with _restored_again(self, packed, restored):
                return forward(*args, **kwargs)
        finally:
            for name in self.packs:
                del self.__dict__[name]
            self.__dict__.update(hidden)

    def restored_weight(self, packed: PackedWeight) -> Tensor:
        """Return a matrix as the experts multiply with it."""
        weight = restore(packed, self.weights, self.computed_in)
        return weight.transpose(-1, -2) if _is_transposed(self) else weight


@contextmanager
def _restored_again(
    module: PackedExperts, packed: Mapping[str, PackedWeight], restored: Mapping[str, Tensor]
) -> Iterator[None]:
    """Let a backward restore weights again, beside what hooks around this one do with the rest."""
    outside = saved_tensors_hooks_outside()
    names = {weight.untyped_storage()._cdata: name for name, weight in restored.items()}

    def save(tensor: Tensor) -> Any:
        name = names.get(tensor.untyped_storage()._cdata)
        if name is not None:
            return name, tensor.shape, tensor.stride(), tensor.storage_offset()
        return [outside[0](tensor) if outside else tensor]

    def bring(kept: Any) -> Tensor:
        if isinstance(kept, list):
            return cast(Tensor, outside[1](kept[0]) if outside else kept[0])
        name, *geometry = kept
        return module.restored_weight(packed[name]).as_strided(*geometry)

    with torch.autograd.graph.saved_tensors_hooks(save, bring):
        yield


def _is_transposed(module: object) -> bool:
    """Return whether an experts module has its inputs in the last dim but one (gpt-oss)."""
    return bool(getattr(module, "is_transposed", False))


def matrices_in(
    layer: nn.Module, experts: Collection[nn.Module], weights: FrozenWeights
) -> list[nn.Module]:
    """Return the Linears and experts of a block whose weights are packed.

    MXFP4 is of experts alone where there are any, as gpt-oss is published.
    """
    linears = [module for module in layer.modules() if type(module) is nn.Linear]
    return [*(linears if not (experts and weights == "mxfp4") else ()), *experts]


def have_whole_codes(module: nn.Module, weights: FrozenWeights, dtype: torch.dtype) -> bool:
    """Return whether the codes of each row of a Linear or of experts fill elements of a type.

    >>> [have_whole_codes(nn.Linear(n, 8), "nf4", torch.bfloat16) for n in (64, 27)]
    [True, False]
    """
    dim = -2 if _is_transposed(module) else -1
    names = PackedLinear.packs if isinstance(module, nn.Linear) else PackedExperts.packs
    lengths = [cast(Tensor, module._parameters[name]).shape[dim] for name in names]
    per_byte = 1 if weights in LARGEST_CODE else 2
    return all(length % (per_byte * dtype.itemsize) == 0 for length in lengths)


def expect_packing(
    modules: Iterable[nn.Module], weights: FrozenWeights, dtype: torch.dtype
) -> None:
    """Let Linears and experts be ones that are packed by `pack_values`."""
    for module in modules:
        linear = type(module) is nn.Linear
        _expect(module, PackedLinear if linear else _experts_class(type(module)), weights, dtype)  # type: ignore[arg-type]


def _expect(module: Any, cls: type[nn.Module], weights: FrozenWeights, dtype: torch.dtype) -> None:
    module.__class__ = cls
    module.weights, module.computed_in = weights, dtype


def is_packed(module: nn.Module, name: str) -> bool:
    """Return whether a parameter of a module has codes in place of values."""
    return isinstance(module, _Packs) and f"{name}_scales" in module._buffers


@torch.no_grad()
def pack_values(layer: nn.Module) -> None:
    """Pack what of a layer has values now and was expected to be, if it is not packed yet."""
    for module in layer.modules():
        if isinstance(module, _Packs):
            for name in module.packs:
                if not is_packed(module, name):
                    _pack_parameter(module, name)


def _pack_parameter(module: Any, name: str) -> None:
    parameter = module._parameters[name]
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    local = parameter.to_local() if placements else parameter
    turned = isinstance(module, PackedExperts) and _is_transposed(module)
    if turned:
        local = local.transpose(-1, -2)
    divided = [place.dim for place in placements if isinstance(place, Shard)]
    row_group = parameter.device_mesh.get_group() if local.ndim - 1 in divided else None
    codes, scales, row_scales = pack(local, module.weights, row_group=row_group)
    stored = codes.contiguous().view(module.computed_in)
    if placements:
        stored = DTensor.from_local(stored, parameter.device_mesh, placements, run_check=False)
    module._parameters[name] = nn.Parameter(stored, requires_grad=False)
    module.register_buffer(f"{name}_scales", scales, persistent=False)
    module.register_buffer(f"{name}_row_scales", row_scales, persistent=False)


@functools.cache
def _experts_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Packed{cls.__name__}", (PackedExperts, cls), {})
