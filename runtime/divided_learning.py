"""What changes in the user's code on a part: learned from what it did on the whole.

Logging     while a unit runs whole: shapes of every call that may change
Learning    while it runs on a part: finds `Rules` that make of each call a part of the whole's
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from runtime.divided_code import (
    IN_PLACE,
    Across,
    Following,
    Rules,
    Site,
    Sizes,
    numbers_in,
    shapes_of,
    with_numbers,
    with_tensors,
)
from runtime.product_flow import Refused


@dataclass(slots=True)
class Log:
    """What the code of a region's owner did while the unit ran whole."""

    sized: dict[Site, list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]] = field(
        default_factory=dict
    )
    """By call: shapes of what it was given and of what it made."""
    drawn: dict[Site, list[tuple[int, ...]]] = field(default_factory=dict)
    joined: dict[Site, list[list[tuple[int, ...]]]] = field(default_factory=dict)
    """By call: shapes of the tensors of a function of several."""
    columns: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Outputs of columns, by id."""
    slices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of a column's output's slices so far."""
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of a column's output that is split, the sizes."""


class Logging(Sizes):
    """Notes shapes while a unit runs whole."""

    def __init__(self, log: Log, watch: Across) -> None:
        super().__init__()
        self._log = log
        self._watch = watch

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function of several tensors."""
        self._log.joined.setdefault(site, []).append(shapes_of((args, kwargs)))
        first = len(self._log.joined[site]) == 1

        def watched(x: Tensor, at: int) -> Tensor:
            if not (first and x.requires_grad) or (name in IN_PLACE and at == 0):
                return x
            return self._watch.copy(x, (site, at))

        return with_tensors(args, kwargs, watched)

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that may name a size."""
        made = func(*args, **kwargs)
        self._log.sized.setdefault(site, []).append((shapes_of((args, kwargs)), shapes_of(made)))
        given = next(
            (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None
        )
        if id(given) in self._log.columns and isinstance(made, Tensor) and given is not None:
            self._sliced(given, made)
        if id(given) in self._log.columns and isinstance(made, tuple | list) and given is not None:
            for dim in range(given.ndim):
                sizes = tuple(one.shape[dim] for one in made)
                if sum(sizes) == given.shape[dim] and len(sizes) > 1:
                    self._log.sections[self._log.columns[id(given)][1]] = sizes
        return made

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that draws."""
        self._log.drawn.setdefault(site, []).append(shapes_of((args, kwargs))[0])
        return func(*args, **kwargs)

    def _sliced(self, given: Tensor, made: Tensor) -> None:
        """Note what slices of a column's features, one behind the other, add up to."""
        if made.ndim != given.ndim or made.shape[:-1] != given.shape[:-1]:
            return
        path = self._log.columns[id(given)][1]
        sizes = (*self._log.slices.get(path, ()), made.shape[-1])
        self._log.slices[path] = sizes
        if len(sizes) > 1 and sum(sizes) == given.shape[-1]:
            self._log.sections[path] = sizes


class Learning(Following):
    """Runs a region on a part, and finds out what changes against the whole."""

    def __init__(
        self, rules: Rules, across: Across, log: Log, fused: Mapping[int, tuple[Tensor, int]]
    ) -> None:
        super().__init__(rules, across)
        self._log = log
        self._degree = across.degree
        self._at: dict[Any, int] = {}
        self._fused = fused

    def _next(self, site: Site, known: Mapping[Site, list[Any]], name: str) -> Any:
        key = (id(known), site)
        at = self._at[key] = self._at.get(key, -1) + 1
        if at >= len(known.get(site, ())):
            raise Refused(f"{name} is called otherwise on a part than on the whole")
        return known[site][at]

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that may name a size."""
        before, after = self._next(site, self._log.sized, func.__name__)
        here = shapes_of((args, kwargs))
        changes: tuple[tuple[int, float], ...] | None = None
        if here[0] != before[0]:
            dim = _divided_dim(here[0], before[0], self._degree)
            (given, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            pieces = self._fused.get(id(given), (given, 1))[1]
            changes = self._changes(func, args, kwargs, (before[0], dim, pieces), after)
        if self._rules.sizes.setdefault(site, changes) != changes:
            raise Refused(f"{func.__name__} stands in a loop over divided and whole tensors")
        if changes:
            args, kwargs = with_numbers((args, kwargs), changes)
        return func(*args, **kwargs)

    def _changes(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: tuple[tuple[int, ...], int, int],
        after: list[tuple[int, ...]],
    ) -> tuple[tuple[int, float], ...]:
        """Return which numbers to multiply, so that the result is the whole one's part."""
        name, t = func.__name__, self._degree
        numbers = numbers_in((args, kwargs))
        places = [at for at, number in enumerate(numbers) if number > 1 and number % t == 0]
        subsets = [
            chosen
            for size in range(min(len(places), 4) + 1)
            for chosen in itertools.combinations(places, size)
        ]
        if name in ("narrow", "__getitem__"):  # a start alone does not show in shapes
            subsets.sort(key=len, reverse=True)
        tried = [tuple((at, 1 / t) for at in chosen) for chosen in subsets]
        others = [at for at, number in enumerate(numbers) if number > 0]
        tried += [((a, 1 / t), (b, float(t))) for a in places for b in others if a != b]
        for changes in tried:
            changed = with_numbers((args, kwargs), changes)
            try:
                made = shapes_of(func(*changed[0], **changed[1]))
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            if _is_part(made, after, name, given, t):
                return changes
        sizes = [number for number in numbers if number > 1]
        raise Refused(f"{name}({', '.join(map(str, sizes))}) makes no part of what the whole makes")

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function of several tensors."""
        before = self._next(site, self._log.joined, name)
        here = shapes_of((args, kwargs))
        takes = tuple(_taken(here, before, self._degree, name))
        if self._rules.takes.setdefault(site, takes) != takes:
            raise Refused(f"{name} stands in a loop over divided and whole tensors")
        if takes and len(self._log.joined[site]) > 1:
            raise Refused(f"{name} takes parts of whole tensors in a loop")
        return super().joined(name, site, args, kwargs)

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        """Run a function that draws."""
        before = self._next(site, self._log.drawn, func.__name__)
        here = shapes_of((args, kwargs))[0]
        dim = None if here == before else _divided_dim(here, before, self._degree)
        if self._rules.draws.setdefault(site, dim) != dim:
            raise Refused(f"{func.__name__} draws for divided and whole tensors in one place")
        return super().drawing(func, site, args, kwargs)


def _taken(
    here: list[tuple[int, ...]], whole: list[tuple[int, ...]], degree: int, name: str
) -> Iterator[tuple[int, int]]:
    """Yield the tensors that are whole beside a divided one, and the dim along which they meet.

    Dims count from behind, as tensors are broadcast: heads of scores and of what is added to them.
    """
    divided = {
        _divided_dim(mine, other, degree) - len(mine)
        for mine, other in zip(here, whole, strict=True)
        if mine != other
    }
    if not divided:
        return
    if len(divided) > 1:
        raise Refused(f"{name} joins tensors that are divided along different dims")
    (dim,) = divided
    size = next(o[dim] for m, o in zip(here, whole, strict=True) if m != o)
    for at, (mine, other) in enumerate(zip(here, whole, strict=True)):
        if mine == other and len(mine) >= -dim and mine[dim] == size:
            if name in IN_PLACE and at == 0:
                raise Refused(f"{name} writes into a whole tensor")
            yield at, dim


def _divided_dim(here: Sequence[int], whole: Sequence[int], degree: int) -> int:
    differing = [at for at, (a, b) in enumerate(zip(here, whole, strict=False)) if a != b]
    if (
        len(here) != len(whole)
        or len(differing) != 1
        or (here[differing[0]] * degree != whole[differing[0]])
    ):
        raise Refused(f"a tensor {list(whole)} is {list(here)} on a part")
    return differing[0]


def _is_part(
    made: list[tuple[int, ...]],
    whole: list[tuple[int, ...]],
    name: str,
    given: tuple[tuple[int, ...], int, int],
    degree: int,
) -> bool:
    """Whether shapes are those of parts, divided where the features of what was given are."""
    if len(made) != len(whole):
        return False
    if name in ("view", "reshape", "unflatten", "flatten"):
        shape, dim, pieces = given
        before = math.prod(shape[:dim]) * pieces
        (result,) = whole
        for at, size in enumerate(result):
            if math.prod(result[:at]) == before and size > 1:
                wanted = (*result[:at], size // degree, *result[at + 1 :])
                return size % degree == 0 and made[0] == wanted
        return False
    for mine, other in zip(made, whole, strict=True):
        try:
            _divided_dim(mine, other, degree)
        except Refused:
            return False
    return True
