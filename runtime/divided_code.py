"""The user's own code on one rank's part of features or heads: its sizes and its draws.

Code between what makes features and what reads them names sizes (`view(b, s, 12, 64)`,
`split(768)`) and draws (dropout) for the whole.  While it runs on a part, a TorchFunctionMode
follows `Rules`: which numbers of which call are divided, along which dim draws are, of which whole
tensors a part is taken.  runtime.divided_trial learns them by running the unit whole.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from planner.errors import RecordError

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


@dataclass(slots=True)
class Rules:
    """What changes in the code of a region's owner while it runs on a part."""

    sizes: dict[Site, tuple[tuple[int, float], ...] | None] = field(default_factory=dict)
    """By call: which of its numbers are multiplied by what; None where nothing is divided."""
    draws: dict[Site, int | None] = field(default_factory=dict)
    """By call: along which dim its draws are divided; None where they are whole."""
    takes: dict[Site, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By call: of which of its tensors, which are whole, a part is taken, and along which dim."""


Mode = Callable[[], contextlib.AbstractContextManager[Any]]


class Entry:
    """Where activations enter a region: what several columns read is copied once."""

    def __init__(self, across: Across) -> None:
        self._across = across
        self._known: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return x inside the region."""
        for given, made in self._known:
            if given is x:
                return made
        self._known.append((x, self._across.copy(x)))
        return self._known[-1][1]

    def left(self) -> None:
        """Forget what entered."""
        self._known.clear()


def surround(owner: nn.Module, mode: Mode) -> None:
    """Run the forward of a region's owner inside a mode."""
    inner = owner.forward

    def of_region(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return inner(*args, **kwargs)  # `site_of` stops here

    owner.forward = of_region


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

    def noted(number: int) -> int:
        found.append(number)
        return number

    _mapped(args, noted)
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
    return x * noise(x, probability(args, kwargs), dim, across, function)


def noise(
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
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
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
    return shares * noise(shares, dropout_p, -3, across) @ value


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in a pytree."""
    return [tuple(leaf.shape) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
