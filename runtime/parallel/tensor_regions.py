"""A region of a unit on one rank of the tensor axis: from what makes features to what reads them.

    columns   a Linear or convolution that makes this rank's part of its output features
    rows      one that reads this rank's part of its input features; partial outputs are summed
    table     an Embedding of this rank's rows; outputs are summed
    heads     nn.MultiheadAttention with this rank's heads

Between columns and rows runs the user's own code as it is; only modules of Dropout between them
draw this rank's part of what one process would draw.  Parameters may be plain or DTensors.
Whether any of this is right, meshwright.runtime.parallel.tensor_check finds out.

nn.MultiheadAttention with one rank's heads equals torch's own to rounding, draws included.  Which
products of a unit stand behind which is read off autograd's graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.planner.errors import RecordError
from meshwright.runtime.core.local_parts import on_local_parts, to_local
from meshwright.runtime.parallel.tensor_collectives import Across, AxisEntry, part_of_dropout
from meshwright.runtime.parallel.tensor_parallel import table_rows
from meshwright.runtime.parallel.trial_weights import deepcopy_unit, windowed_products
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.split_backward import linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS = (nn.Linear, *CONVOLUTIONS)
"""Modules whose weight is [output features, input features, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The parts of a unit that are divided together; paths are inside the unit."""

    kind: Literal["products", "table", "heads"]
    owner: str
    """The module whose forward contains all of it."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By path, the sizes of the matrices that lie one behind the other in the output features; a
    rank has its part of each."""
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
    cut_part: Callable[[Tensor, int], Tensor] = lambda local, _: local.clone(),
) -> dict[str, tuple[int, ...]]:
    """Leave a unit a rank's parts of what is divided; return the matrices of each, by name.

    A part along a dim is stored as `cut_part(part, dim)`, a copy by default.
    """
    taken = {}
    for region in regions:
        for name, dim, pieces in list(shards(unit, region)):
            path, _, attribute = name.rpartition(".")
            holder = unit.get_submodule(path)
            whole = holder._parameters.get(attribute)
            if whole is None:
                continue
            local = part_of(whole.detach(), dim, pieces, rank, degree)
            holder._parameters[attribute] = nn.Parameter(cut_part(local, dim), whole.requires_grad)
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
    # Graphs are shared where the code is the same: a partial is compared by its identity.
    rows.forward = lambda x: _rows(rows, entry, across, x)


def _columns(inner: Callable[[Tensor], Tensor], entry: AxisEntry) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(entry(x))


def _rows(module: nn.Module, entry: AxisEntry, across: Across, x: Tensor) -> Tensor:
    entry.forget()
    parameters: dict[str, Any] = module._parameters
    bias = parameters["bias"]

    def without_bias() -> Tensor:
        if isinstance(module, nn.Linear):
            output = linear(module, x, module.weight)
            return output + lora.adapter_output(module, x) if lora.is_adapted(module) else output
        assert isinstance(module, CONVOLUTIONS)
        return module._conv_forward(x, module.weight, None)

    made = across.sum(on_local_parts(module, without_bias)())
    if bias is None:
        return made
    bias = to_local(bias)
    return made + (bias if isinstance(module, nn.Linear) else bias.view(-1, *[1] * (x.ndim - 2)))


def _run_table(module: nn.Module, across: Across) -> None:
    assert isinstance(module, nn.Embedding)

    def rows(ids: Tensor) -> Tensor:
        return across.sum(table_rows(ids, module.weight, across.rank, module.padding_idx))

    module.forward = on_local_parts(module, rows)  # type: ignore[method-assign]


def run_heads(unit: nn.Module, path: str, across: Across) -> None:
    """Let an nn.MultiheadAttention with this rank's parts run over the tensor axis."""
    module = unit.get_submodule(path)
    assert isinstance(module, nn.MultiheadAttention)
    parent = unit.get_submodule(path.rpartition(".")[0]) if path else None
    if isinstance(parent, nn.TransformerEncoderLayer):
        # In eval mode torch hands whole weights to one kernel of its own, but for an unknown
        # activation.
        parent.activation_relu_or_gelu = 0

    def heads(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return _heads(module, across, *args, **kwargs)

    project = on_local_parts(module, heads)
    module.forward = on_local_parts(module.out_proj, project)  # type: ignore[method-assign]


def _heads(
    module: nn.MultiheadAttention,
    across: Across,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what nn.MultiheadAttention does, with some of its heads; weights are means over all."""
    if query.ndim != 3 or (need_weights and not average_attn_weights):
        raise RecordError(
            "nn.MultiheadAttention without a batch, or with weights of each head; "
            "add a batch dimension, and set need_weights=False"
        )
    entered = AxisEntry(across)
    given = (
        x if module.batch_first else x.transpose(0, 1) for x in map(entered, (query, key, value))
    )
    weights, bias = module.in_proj_weight.chunk(3), module.in_proj_bias
    biases = bias.chunk(3) if bias is not None else (None,) * 3
    q, k, v = (
        functional.linear(x, w, b).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for x, w, b in zip(given, weights, biases, strict=True)
    )
    mask = _mask(attn_mask, key_padding_mask, q, module.num_heads, across)
    scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
    shares = torch.softmax(scores if mask is None else scores + mask, -1)
    if module.training and module.dropout:
        shares = shares * part_of_dropout(shares, module.dropout, 1, across)
    # In memory [query, sample, feature], as torch has it: draws follow memory.
    mixed = (shares @ v).permute(2, 0, 1, 3).flatten(2)
    output = across.sum(functional.linear(mixed, module.out_proj.weight))
    last = module.out_proj._parameters["bias"]
    if last is not None:
        output = output + to_local(last)
    weights_of_all = None
    if need_weights:
        weights_of_all = across.sum(shares.sum(1) / module.num_heads)
    return (output.transpose(0, 1) if module.batch_first else output), weights_of_all


def _mask(
    given: Tensor | None, padding: Tensor | None, q: Tensor, heads: int, across: Across
) -> Tensor | None:
    """Return what is added to scores [sample, own head, query, key]."""
    columns_sum: Tensor | None = None
    if given is not None:
        if given.ndim == 3:
            own = slice(across.rank * q.shape[1], (across.rank + 1) * q.shape[1])
            given = given.unflatten(0, (-1, heads))[:, own]
        columns_sum = _additive_mask(given, q)
    if padding is not None:
        columns = _additive_mask(padding, q)[:, None, None, :]
        columns_sum = columns if columns_sum is None else columns_sum + columns
    return columns_sum


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


class Indivisible(Exception):  # noqa: N818 - told to the user as a reason, not raised to them
    """Why something cannot be divided."""


def own_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor with a gradient of its own, if any; else what it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach().clone()
    return copy.requires_grad_(leaf.requires_grad)


@dataclass(slots=True)
class Flow:
    """The order of a unit's products, with nothing but other functions between neighbours."""

    order: list[str]
    before: dict[str, set[str]]
    behind: dict[str, set[str]]
    """The unit's own output is ""."""
    calls: dict[str, int]
    looked_up: dict[str, int]
    """Rows that a table gives at most for one sample."""
    others: set[str]
    """Modules of a product's class whose own forward returns no single tensor, such as a router."""


def flow_of(unit: nn.Module, given: Any) -> Flow:
    """Run a unit and return which product reads which.

    Raises Refused where it cannot be run.
    """
    twin = deepcopy_unit(unit).train()
    calls: dict[str, int] = {}
    looked_up: dict[str, int] = {}
    outputs: dict[Any, str] = {}
    inputs: dict[str, Any] = {}
    others: set[str] = set()
    for path, part in twin.named_modules():
        if isinstance(part, PRODUCTS):

            def product(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                given = args[0] if args else None
                if not (isinstance(given, Tensor) and isinstance(out, Tensor)):
                    others.add(path)
                    given = None
                inputs.setdefault(path, None if given is None else given.grad_fn)
                for leaf in tree_leaves(out):
                    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                        outputs[leaf.grad_fn] = path

            part.register_forward_hook(product)
        elif isinstance(part, nn.Embedding):

            def table(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                ids = args[0]
                looked_up[path] = ids[0].numel() if ids.ndim > 1 else ids.numel()

            looked_up.setdefault(path, 1 << 60)
            part.register_forward_hook(table)
    args, kwargs = tree_map(own_leaf, given)
    try:
        torch.manual_seed(0)
        with windowed_products(twin):
            results = tree_leaves(twin(*args, **kwargs))
        made = [leaf for leaf in results if isinstance(leaf, Tensor)]
    except Exception as error:  # the user's code on random numbers may fail in any way
        line = (str(error).splitlines() or [""])[0]
        raise Indivisible(
            f"cannot be run on random numbers: {type(error).__name__}: {line}"
        ) from error
    order = list(inputs)
    before = {path: _nearest(fn, outputs) for path, fn in inputs.items()}
    behind: dict[str, set[str]] = {path: set() for path in order}
    for path, functions in before.items():
        for function in functions:
            behind[function].add(path)
    for result in made:
        for path in _nearest(result.grad_fn, outputs):
            behind[path].add("")
    return Flow(order, before, behind, calls, looked_up, others)


def _nearest(fn: Any, outputs: Mapping[Any, str]) -> set[str]:
    """Return the products whose outputs a tensor is made of, with no other product between."""
    paths: set[str] = set()
    seen: set[Any] = set()
    waiting = [fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in outputs:
            paths.add(outputs[node])
            continue
        waiting += [following for following, _ in node.next_functions]
    return paths
