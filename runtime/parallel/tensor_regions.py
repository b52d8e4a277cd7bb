"""A region of a unit on one rank of the tensor axis: from what makes features to what reads them.

    columns   a Linear or convolution that makes this rank's part of its output features
    rows      one that reads this rank's part of its input features; partial outputs are summed
    table     an Embedding of this rank's rows; outputs are summed
    heads     nn.MultiheadAttention with this rank's heads

Between columns and rows runs the user's own code as it is; only modules of Dropout between them
draw this rank's part of what one process would draw.  Parameters may be plain or DTensors.
Whether any of this is right, meshwright.runtime.parallel.tensor_check finds out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.runtime.parallel.multihead_attention import run_heads
from meshwright.runtime.parallel.tensor_collectives import Across, AxisEntry, part_of_dropout
from meshwright.runtime.parallel.tensor_parallel import on_local_parts, table_rows
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.split_backward import linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS = (nn.Linear, *CONVOLUTIONS)
"""Modules whose weight is [output features, input features, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What of a unit is divided together; paths are inside the unit."""

    kind: Literal["products", "table", "heads"]
    owner: str
    """The module whose forward contains all of it."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By path the sizes of the matrices that lie one behind the other in the output features: of
    each a rank has its part."""
    rows: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules whose parameters are divided."""
        return (*self.columns, self.rows) if self.kind == "products" else (self.owner,)


def part_of(whole: Tensor, dim: int, pieces: Sequence[int], rank: int, degree: int) -> Tensor:
    """Return a rank's part of each of the matrices that lie one behind the other along a dim.

    >>> part_of(torch.arange(8), 0, (4, 2, 2), rank=1, degree=2)
    tensor([2, 3, 5, 7])
    """
    parts = [piece.chunk(degree, dim)[rank] for piece in whole.split(list(pieces), dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def whole_of(parts: Sequence[Tensor], dim: int, pieces: Sequence[int]) -> Tensor:
    """Return what all ranks' parts make together: the inverse of `part_of`.

    >>> whole = torch.arange(8)
    >>> parts = [part_of(whole, 0, (4, 2, 2), rank=rank, degree=2) for rank in range(2)]
    >>> torch.equal(whole_of(parts, 0, (4, 2, 2)), whole)
    True
    """
    sizes = [piece // len(parts) for piece in pieces]
    by_rank = [part.split(sizes, dim) for part in parts]
    return torch.cat([part for pieces in zip(*by_rank, strict=True) for part in pieces], dim)


def shards(unit: nn.Module, region: Region) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield path and name, dim and pieces of each parameter that a region divides."""
    prefix = f"{region.owner}." if region.owner else ""
    match region.kind:
        case "table":
            yield f"{prefix}weight", 0, (unit.get_parameter(f"{prefix}weight").shape[0],)
        case "heads":
            width = unit.get_parameter(f"{prefix}out_proj.weight").shape[0]
            for name in ("in_proj_weight", "in_proj_bias"):
                yield f"{prefix}{name}", 0, (width,) * 3
            yield f"{prefix}out_proj.weight", 1, (width,)
        case "products":
            for path, pieces in region.columns.items():
                for name in ("weight", "bias", lora.B):
                    yield f"{path}.{name}", 0, pieces
            rows = unit.get_parameter(f"{region.rows}.weight")
            for name in ("weight", lora.A):
                yield f"{region.rows}.{name}", 1, (rows.shape[1],)


def take_parts(
    unit: nn.Module,
    regions: Sequence[Region],
    rank: int,
    degree: int,
    made: Callable[[Tensor, int], Tensor] = lambda local, _: local,
) -> dict[str, tuple[int, ...]]:
    """Leave a unit a rank's parts of what is divided; return the matrices of each, by name.

    A part along a dim is stored as `made(part, dim)`.
    """
    taken = {}
    for region in regions:
        for name, dim, pieces in list(shards(unit, region)):
            path, _, attribute = name.rpartition(".")
            holder = unit.get_submodule(path)
            whole = holder._parameters.get(attribute)
            if whole is None:
                continue
            local = part_of(whole.detach(), dim, pieces, rank, degree).clone()
            holder._parameters[attribute] = nn.Parameter(made(local, dim), whole.requires_grad)
            taken[name] = pieces
    return taken


def run_divided(unit: nn.Module, region: Region, across: Across) -> None:
    """Let a unit whose parameters are this rank's parts run a region over the tensor axis."""
    match region.kind:
        case "table":
            _run_table(unit.get_submodule(region.owner), across)
        case "heads":
            run_heads(unit, region.owner, across)
        case "products":
            _run_products(unit, region, across)


def divide_dropout(module: nn.Module, dim: int, across: Across) -> None:
    """Let a Dropout of parts along a dim draw this rank's part of one process's draws."""
    assert isinstance(module, nn.Dropout)
    inner = module.forward

    def dropped(x: Tensor) -> Tensor:
        if not module.training:
            return inner(x)
        return x * part_of_dropout(x, module.p, dim, across)

    module.forward = dropped  # type: ignore[method-assign, assignment]


def _run_products(unit: nn.Module, region: Region, across: Across) -> None:
    entry = AxisEntry(across)
    for path in region.columns:
        column = unit.get_submodule(path)
        column.forward = _columns(on_local_parts(column, column.forward), entry)
    rows = unit.get_submodule(region.rows)
    rows.forward = functools.partial(_rows, rows, entry, across)


def _columns(inner: Callable[[Tensor], Tensor], entry: AxisEntry) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(entry(x))


def _rows(module: nn.Module, entry: AxisEntry, across: Across, x: Tensor) -> Tensor:
    entry.left()
    own: dict[str, Any] = module._parameters
    bias = own["bias"]

    def without_bias() -> Tensor:
        if isinstance(module, nn.Linear):
            made = linear(module, x, module.weight)
            return made + lora.added(module, x) if lora.is_adapted(module) else made
        assert isinstance(module, CONVOLUTIONS)
        return module._conv_forward(x, module.weight, None)

    made = across.sum(on_local_parts(module, without_bias)())
    if bias is None:
        return made
    bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return made + (bias if isinstance(module, nn.Linear) else bias.view(-1, *[1] * (x.ndim - 2)))


def _run_table(module: nn.Module, across: Across) -> None:
    assert isinstance(module, nn.Embedding)

    def rows(ids: Tensor) -> Tensor:
        return across.sum(table_rows(ids, module.weight, across.rank, module.padding_idx))

    module.forward = on_local_parts(module, rows)  # type: ignore[method-assign]
