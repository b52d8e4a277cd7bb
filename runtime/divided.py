"""A region of a unit on one rank of the tensor axis: from what makes features to what reads them.

    columns   a Linear or convolution that makes this rank's part of its output features
    rows      one that reads this rank's part of its input features; partial outputs are summed
    table     an Embedding that holds this rank's rows; outputs are summed
    heads     nn.MultiheadAttention with this rank's heads

Between columns and rows runs the user's own code, on fewer features or heads than it was written
for.  Sizes that it names (`view(b, s, 12, 64)`, `split(768)`) are divided while it runs, and what
it draws is this rank's part of what one process draws: a TorchFunctionMode follows `Rules`, which
runtime.derived_styles learned by running the unit whole.  Parameters may be plain or DTensors.

Outside: the collectives themselves (`Across`), and whether any of this is right.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from planner.errors import RecordError
from runtime.tensor import on_local_parts

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS = (nn.Linear, *CONVOLUTIONS)
"""Modules whose weight is [output features, input features, ...]."""
SIZED = frozenset(
    (
        "view", "reshape", "unflatten", "flatten", "expand", "split", "split_with_sizes", "chunk",
        "tensor_split", "narrow", "repeat", "__getitem__", "broadcast_to",
    )
)  # fmt: skip
"""Functions whose arguments may name a size."""
DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"))
ATTENTION = "scaled_dot_product_attention"
IN_PLACE = frozenset(("__iadd__", "add_", "__imul__", "mul_"))
JOINING = frozenset(
    (
        ATTENTION, "__add__", "__mul__", "__radd__", "__rmul__", "__sub__", "__truediv__", "add",
        "div", "masked_fill", "mul", "multiply", "sub", "where", *IN_PLACE,
    )
)  # fmt: skip
"""Functions of several tensors, of which one may be divided and another have all heads."""
Site = tuple[tuple[int, int], ...]
"""Where a call stands: code and instruction of each function from the region's owner to it."""


class Across(Protocol):
    """The tensor axis, as one rank sees it."""

    rank: int
    degree: int

    def copy(self, x: Tensor, place: Any = None) -> Tensor:
        """Return x, whose gradient will be the sum of the gradients on all ranks.

        `place` tells in a trial where this is, if not next.
        """

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; its gradient is that of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What of a unit is divided together; paths are inside the unit."""

    kind: Literal["products", "table", "heads"]
    owner: str
    """The module whose forward holds all of it."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By path the sizes of the matrices that lie one behind the other in the output features: of
    each a rank has its part."""
    rows: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules whose parameters are divided."""
        return (*self.columns, self.rows) if self.kind == "products" else (self.owner,)


@dataclass(slots=True)
class Rules:
    """What changes in the code of a region's owner while it runs on a part."""

    sizes: dict[Site, tuple[tuple[int, float], ...] | None] = field(default_factory=dict)
    """By call: which of its numbers are multiplied by what; None where nothing is divided."""
    draws: dict[Site, int | None] = field(default_factory=dict)
    """By call: along which dim its draws are divided; None where they are whole."""
    takes: dict[Site, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By call: of which of its tensors, which are whole, a part is taken, and along which dim."""


class Ranks:
    """The real tensor axis."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.degree = group.rank(), group.size()
        self._group = group

    def copy(self, x: Tensor, place: Any = None) -> Tensor:
        """Return x; its gradient is summed."""
        return _Copy.apply(x, self._group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return _Sum.apply(x, self._group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The functional collective, since selective recompute must see an operator with a result.
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group.group_name))


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
            yield f"{prefix}weight", 0, (unit.get_submodule(region.owner).weight.shape[0],)  # type: ignore[union-attr]
        case "heads":
            width = unit.get_submodule(region.owner).embed_dim
            for name in ("in_proj_weight", "in_proj_bias"):
                yield f"{prefix}{name}", 0, (width,) * 3  # type: ignore[misc]
            yield f"{prefix}out_proj.weight", 1, (width,)  # type: ignore[misc]
        case "products":
            for path, pieces in region.columns.items():
                for name in ("weight", "bias"):
                    yield f"{path}.{name}", 0, pieces
            rows = unit.get_submodule(region.rows)
            yield f"{region.rows}.weight", 1, (rows.weight.shape[1],)  # type: ignore[union-attr, misc]


Mode = Callable[[], contextlib.AbstractContextManager[Any]]


def run_divided(
    unit: nn.Module, region: Region, rules: Rules, across: Across, around: Mode | None = None
) -> None:
    """Let a unit whose parameters are this rank's parts run a region over the tensor axis.

    `around` takes the place of the mode that follows the rules.
    """
    match region.kind:
        case "table":
            _run_table(unit.get_submodule(region.owner), across)
        case "heads":
            _run_heads(unit, region.owner, across)
        case "products":
            _run_products(unit, region, across)
            surround(unit, region, around or (lambda: Following(rules, across)))


def surround(unit: nn.Module, region: Region, mode: Mode) -> None:
    """Run the forward of a region's owner inside a mode."""
    owner = unit.get_submodule(region.owner)
    inner = owner.forward

    def of_region(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return inner(*args, **kwargs)  # `site_of` stops here

    owner.forward = of_region


def _run_products(unit: nn.Module, region: Region, across: Across) -> None:
    entry = _Entry(across)
    for path in region.columns:
        column = unit.get_submodule(path)
        column.forward = _columns(on_local_parts(column, column.forward), entry)
    rows = unit.get_submodule(region.rows)
    rows.forward = functools.partial(_rows, rows, entry, across)


class _Entry:
    """Where activations enter a region: what several columns read is copied once."""

    def __init__(self, across: Across) -> None:
        self._across = across
        self._known: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        for given, made in self._known:
            if given is x:
                return made
        self._known.append((x, self._across.copy(x)))
        return self._known[-1][1]

    def left(self) -> None:
        """Forget what entered."""
        self._known.clear()


def _columns(inner: Callable[[Tensor], Tensor], entry: _Entry) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(entry(x))


def _rows(module: nn.Module, entry: _Entry, across: Across, x: Tensor) -> Tensor:
    entry.left()
    own: dict[str, Any] = module._parameters
    bias = own["bias"]

    def without_bias() -> Tensor:
        if isinstance(module, nn.Linear):
            return functional.linear(x, module.weight)
        assert isinstance(module, CONVOLUTIONS)
        return module._conv_forward(x, module.weight, None)

    made = across.sum(on_local_parts(module, without_bias)())
    if bias is None:
        return made
    bias = bias.to_local() if hasattr(bias, "to_local") else bias
    return made + (bias if isinstance(module, nn.Linear) else bias.view(-1, *[1] * (x.ndim - 2)))


def _run_table(module: nn.Module, across: Across) -> None:
    assert isinstance(module, nn.Embedding)

    def rows() -> Callable[[Tensor], Tensor]:
        def of(ids: Tensor) -> Tensor:
            count = module.weight.shape[0]
            index = ids - across.rank * count
            elsewhere = (index < 0) | (index >= count)
            padding = module.padding_idx
            if padding is not None:
                padding -= across.rank * count
                padding = padding if 0 <= padding < count else None
            found = functional.embedding(index.masked_fill(elsewhere, 0), module.weight, padding)
            return across.sum(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))

        return of

    module.forward = on_local_parts(module, rows())


# --- nn.MultiheadAttention ----------------------------------------------------------------------


def _run_heads(unit: nn.Module, path: str, across: Across) -> None:
    module = unit.get_submodule(path)
    assert isinstance(module, nn.MultiheadAttention)
    parent = unit.get_submodule(path.rpartition(".")[0]) if path else None
    if isinstance(parent, nn.TransformerEncoderLayer):
        # In eval mode torch hands whole weights to one kernel of its own, but for an unknown
        # activation.
        parent.activation_relu_or_gelu = 0
    project = on_local_parts(module, functools.partial(_heads, module, across))
    module.forward = on_local_parts(module.out_proj, project)


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
        raise RecordError("nn.MultiheadAttention without a batch, or with weights of each head")
    entered = _Entry(across)
    q, k, v = (
        x if module.batch_first else x.transpose(0, 1) for x in map(entered, (query, key, value))
    )
    weights, biases = module.in_proj_weight.chunk(3), (None,) * 3
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    q, k, v = (
        functional.linear(x, w, b).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for x, w, b in zip((q, k, v), weights, biases, strict=True)
    )
    mask = _mask(attn_mask, key_padding_mask, q, module.num_heads, across)
    scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
    shares = torch.softmax(scores if mask is None else scores + mask, -1)
    if module.training and module.dropout:
        shares = shares * _noise(shares, module.dropout, 1, across)
    # In memory [query, sample, feature], as torch has it: draws follow memory.
    mixed = (shares @ v).permute(2, 0, 1, 3).flatten(2)
    made = across.sum(functional.linear(mixed, module.out_proj.weight))
    bias = module.out_proj._parameters["bias"]
    if bias is not None:
        made = made + (bias.to_local() if hasattr(bias, "to_local") else bias)
    weights_of_all = None
    if need_weights:
        weights_of_all = across.sum(shares.sum(1) / module.num_heads)
    return (made.transpose(0, 1) if module.batch_first else made), weights_of_all


def _mask(
    given: Tensor | None, padding: Tensor | None, q: Tensor, heads: int, across: Across
) -> Tensor | None:
    """Return what is added to scores [sample, own head, query, key]."""
    found: Tensor | None = None
    if given is not None:
        if given.ndim == 3:
            own = slice(across.rank * q.shape[1], (across.rank + 1) * q.shape[1])
            given = given.unflatten(0, (-1, heads))[:, own]
        found = _added(given, q)
    if padding is not None:
        columns = _added(padding, q)[:, None, None, :]
        found = columns if found is None else found + columns
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


# --- sizes and draws in the user's code -----------------------------------------------------------


def site_of(frame: types.FrameType | None) -> Site:
    """Return where a call stands, up to the forward of the region's owner."""
    found = []
    while frame is not None and frame.f_code is not _OF_REGION:
        # Calls of modules take other ways where there are hooks.
        if frame.f_code.co_filename != _MODULE_FILE:
            found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


_MODULE_FILE = nn.Module.__call__.__code__.co_filename
_OF_REGION = next(
    one
    for one in surround.__code__.co_consts
    if isinstance(one, types.CodeType) and one.co_name == "of_region"
)


def numbers_in(args: Any) -> list[int]:
    """Return the plain integers among arguments, in order."""
    found: list[int] = []
    _mapped(args, lambda number: (found.append(number), number)[1])
    return found


def with_numbers(args: Any, changes: Sequence[tuple[int, float]]) -> Any:
    """Return arguments with some of their integers multiplied.

    >>> with_numbers((slice(0, 8), [4, -1]), [(1, 0.5), (2, 0.5)])
    (slice(0, 4, None), [2, -1])
    """
    factors = dict(changes)
    at = iter(range(1 << 30))

    def changed(number: int) -> int:
        return int(number * factors.get(next(at), 1))

    return _mapped(args, changed)


def _mapped(value: Any, change: Callable[[int], int]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return change(value)
    if isinstance(value, slice):
        return slice(*(_mapped(end, change) for end in (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        made = [_mapped(one, change) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return value


def with_tensors(
    args: Any, kwargs: Any, change: Callable[[Tensor, int], Tensor]
) -> tuple[Any, Any]:
    """Return arguments with `change(tensor, number)` of each tensor."""
    leaves, spec = tree_flatten((args, kwargs))
    at = itertools.count()
    made = [change(leaf, next(at)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    changed: tuple[Any, Any] = tree_unflatten(made, spec)
    return changed


class Sizes(TorchFunctionMode):
    """Sees the functions that name sizes or draw, in the innermost region that runs."""

    _open = threading.local()

    def __enter__(self) -> Self:
        """Begin; the region around this one sees nothing until it ends."""
        self._around().append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        super().__exit__(*error)
        self._around().pop()

    @classmethod
    def _around(cls) -> list[Sizes]:
        if not hasattr(cls._open, "modes"):
            cls._open.modes = []
        modes: list[Sizes] = cls._open.modes
        return modes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand a function to `sized` or `drawing`, or run it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._around()[-1] is self:
            if name in SIZED:
                return self.sized(func, site_of(sys._getframe(1)), args, kwargs)
            drawing = draws(name, args, kwargs)
            if drawing or name in JOINING:
                site = site_of(sys._getframe(1))
                if name in JOINING:
                    args, kwargs = self.joined(name, site, args, kwargs)
                if drawing:
                    return self.drawing(func, site, args, kwargs)
        return func(*args, **kwargs)

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function of several tensors."""
        raise NotImplementedError

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that may name a size."""
        raise NotImplementedError

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that draws."""
        raise NotImplementedError


class Following(Sizes):
    """Follows rules while a region runs on this rank's part."""

    def __init__(self, rules: Rules, across: Across) -> None:
        super().__init__()
        self._rules = rules
        self._across = across

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function with this rank's sizes."""
        changes = _rule(self._rules.sizes, site, func.__name__)
        if changes:
            args, kwargs = with_numbers((args, kwargs), changes)
        return func(*args, **kwargs)

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with this rank's part of what is whole."""
        taken = dict(self._rules.takes.get(site, ()))
        if not taken:
            return args, kwargs
        return with_tensors(
            args, kwargs, lambda x, at: self.part(x, taken[at], (site, at)) if at in taken else x
        )

    def part(self, x: Tensor, dim: int, place: Any) -> Tensor:
        """Return this rank's part of a tensor that every rank has."""
        across, own = self._across, x.shape[dim] // self._across.degree
        copied = across.copy(x, place) if x.requires_grad else x
        return copied.narrow(dim, across.rank * own, own)

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function with this rank's part of one process's draws."""
        dim = _rule(self._rules.draws, site, func.__name__)
        if dim is None:
            return func(*args, **kwargs)
        return drawn(func.__name__, dim, self._across, args, kwargs)


def _rule(rules: Mapping[Site, Any], site: Site, name: str) -> Any:
    if site not in rules:
        raise RecordError(
            f"{name}: the forward of a divided module does here what it did not in the example "
            "(another branch); use mesh.tensor 1, or an example that takes this branch"
        )
    return rules[site]


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a function that may draw random numbers does."""
    if name in DROPOUTS:
        return probability(args, kwargs) > 0 and bool(
            kwargs.get("training", args[2] if len(args) > 2 else True)
        )
    return name == ATTENTION and attention_dropout(args, kwargs) > 0


def probability(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return how much a dropout drops."""
    return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5))


def attention_dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return how much of its shares an attention drops."""
    return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def drawn(
    name: str, dim: int, across: Across, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return what a function that draws makes of a part, with one process's draws."""
    if name == ATTENTION:
        return _attention(across, *args, **kwargs)
    x = kwargs.get("input", args[0] if args else None)
    assert isinstance(x, Tensor)
    if name not in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
        raise RecordError(f"{name} draws inside a divided region")
    function = getattr(functional, name)
    return x * _noise(x, probability(args, kwargs), dim, across, function)


def _noise(
    like: Tensor,
    p: float,
    dim: int,
    across: Across,
    function: Callable[..., Tensor] = functional.dropout,
) -> Tensor:
    """Return this rank's part of what a dropout of the whole tensor multiplies with."""
    shape = list(like.shape)
    shape[dim] *= across.degree
    # Draws follow memory, in which dims may lie in another order.
    order = sorted(range(like.ndim), key=lambda at: -like.stride(at))
    ones = torch.ones([shape[at] for at in order], dtype=like.dtype, device=like.device)
    drawn = function(ones.permute([order.index(at) for at in range(like.ndim)]), p, True)
    own = like.shape[dim]
    return drawn.narrow(dim, across.rank * own, own)


def _attention(
    across: Across,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention as torch writes it out on CPU where there is dropout, for own heads."""
    if query.device.type != "cpu":
        raise RecordError(
            "scaled_dot_product_attention drops shares inside a kernel of the device, whose draws "
            "cannot be divided; use attention dropout 0, or mesh.tensor 1"
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (scale or 1.0 / math.sqrt(query.shape[-1]))
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
    shares = torch.softmax(scores, -1)
    return shares * _noise(shares, dropout_p, -3, across) @ value


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in a pytree."""
    return [tuple(leaf.shape) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
