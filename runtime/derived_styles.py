"""Tensor styles derived from a module: which of its layers can be divided over the tensor axis.

In each unit of a recording: Linears or convolutions whose outputs go into one other and nowhere
else (attention's q, k, v and o; an MLP's up and down), tables of words, nn.MultiheadAttention.  A
region is believed only once it was run: on random weights and two samples the unit runs whole and
as the parts of every rank, and outputs, sums and all gradients must be equal.  That run also tells
which sizes in the user's code are divided, along which dim dropout draws, and which parameters get
a part of their gradient on each rank.

What is not found stays whole on every rank, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from planner.errors import MeshwrightError
from runtime.divided import (
    CONVOLUTIONS,
    IN_PLACE,
    PRODUCTS,
    Across,
    Following,
    Region,
    Rules,
    Site,
    Sizes,
    numbers_in,
    part_of,
    run_divided,
    shapes_of,
    shards,
    with_numbers,
    with_tensors,
)
from runtime.recorder import Recorder, has_data
from runtime.recording import Device, Held, Leaf, Node, Recording, Value, values_of

MOST_CHECKED_FLOPS = 1e11
"""Of a unit's forward, in products; the check takes some twenty times as many."""
CLOSE = 2e-4
"""How far a divided unit's numbers may lie from the whole one's, over the largest of them, in fp32:
sums in another order differ by 1e-6, another head's numbers by 1."""
NOISE = 1e-5
"""The same over the largest gradient of the unit."""
MOST_TRIALS = 8
"""Ways in which one region's fused matrices are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedUnit:
    """How a unit is divided over so many ranks, and what of it stays whole."""

    degree: int
    regions: tuple[Region, ...] = ()
    rules: Rules = field(default_factory=Rules)
    partial: frozenset[str] = frozenset()
    """Whole parameters whose gradient is the sum over the ranks."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Why a product or table is not divided, by path."""

    def apply(self, unit: nn.Module, across: Across) -> None:
        """Let a unit whose parameters are this rank's parts run over the tensor axis."""
        for region in self.regions:
            run_divided(unit, region, self.rules, across)


class DerivedStyles:
    """The units of a module divided over the tensor axis, worked out as they are asked for."""

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        batch: Any,
        *,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        """`batch` is the one that was recorded; modules of paths `left_out` are not divided."""
        self._module = module
        self._recorder = recorder
        self._left_out = left_out
        self._given = _Arguments(module, recorder.first, batch)
        self._found: dict[Any, DividedUnit] = {}
        self._studies: dict[Any, _Study] = {}

    def of(self, degree: int) -> dict[str, DividedUnit]:
        """Return how each unit is divided over so many ranks, by path; those that are not too."""
        result = {}
        for name, node in self._units():
            study = self._study(name, node)
            key = (id(study), degree)
            if key not in self._found:
                self._found[key] = study.divided(degree)
            result[name] = self._found[key]
        return result

    def _units(self) -> Iterator[tuple[str, Node]]:
        """Yield the units that hold something to divide, with their first call."""
        seen: dict[str, int] = {}
        first: dict[str, Node] = {}
        for node in self._recorder.first.nodes:
            if node.unit is not None:
                seen[node.unit] = seen.get(node.unit, 0) + 1
                first.setdefault(node.unit, node)
        for name, node in first.items():
            parts = self._module.get_submodule(name).modules()
            if any(isinstance(part, (*PRODUCTS, nn.Embedding)) for part in parts):
                yield name, node

    def _study(self, name: str, node: Node) -> _Study:
        unit = self._module.get_submodule(name)
        kept = self._kept_whole(name)
        key = (_identity(unit), node.draws, node.grad, self._given.identity(node), tuple(kept))
        if key not in self._studies:
            self._studies[key] = _Study(unit, lambda: self._given.of(node), kept, node.draws)
        return self._studies[key]

    def _kept_whole(self, name: str) -> dict[str, str]:
        """Return the modules of a unit that must not be divided, by path, and why."""
        aliases = self._recorder.aliases
        firsts = list(aliases.values())
        leaves = (leaf for node in self._recorder.first.nodes for leaf in node.leaves)
        held = {aliases.get(leaf.name, leaf.name) for leaf in leaves if isinstance(leaf, Held)}
        held |= {r.name for r in self._recorder.first.result if isinstance(r, Held)}
        result = {}
        calls = [node.unit for node in self._recorder.first.nodes].count(name)
        for path, part in self._module.get_submodule(name).named_modules():
            full = f"{name}.{path}" if name and path else name or path
            if full in self._left_out:
                result[path] = "has a style of its own"
            elif calls > 1 and isinstance(part, (*PRODUCTS, nn.Embedding)):
                result[path] = f"{name or 'the module'} is called {calls} times"
            for attribute in part._parameters:
                own = f"{full}.{attribute}" if full else attribute
                first = aliases.get(own, own)
                if first in held or firsts.count(first) > 1:
                    result[path] = f"its {attribute} is read elsewhere too"
        return result


def style_text(divided: Mapping[str, DividedUnit]) -> dict[str, str]:
    """Return the styles in torch's words by pattern, in the order of the module.

    Units of one list that are divided alike are one pattern.
    """
    words: dict[str, dict[str, str]] = {}
    for name, unit in divided.items():
        for region in unit.regions:
            for path in region.paths:
                full = ".".join(step for step in (name, path) if step)
                steps = [("*" if step.isdigit() else step) for step in full.split(".")]
                said = _style_of(region, path)
                words.setdefault(".".join(steps), {})[full] = said
    result: dict[str, str] = {}
    for pattern, by_name in words.items():
        if len(set(by_name.values())) == 1:
            result[pattern] = next(iter(by_name.values()))
        else:
            result |= by_name
    return result


def _style_of(region: Region, path: str) -> str:
    if region.kind == "heads":
        return "heads of nn.MultiheadAttention"
    if region.kind == "table" or path == region.rows:
        return "RowwiseParallel()"
    pieces = region.columns[path]
    return "ColwiseParallel()" + (f" of {len(pieces)} matrices" if len(pieces) > 1 else "")


class _Arguments:
    """What units are given when they are tried: random numbers where the recording had numbers."""

    def __init__(self, module: nn.Module, recording: Recording, batch: Any) -> None:
        self._module = module
        self._recording = recording
        self._leaves = [_with_data(leaf) for leaf in tree_leaves(batch)]
        self._values: dict[int, Any] = {}

    def identity(self, node: Node) -> Any:
        """Return what of the arguments another unit of the kind may have otherwise."""
        return tuple(
            (tuple(self._recording.values[leaf.at].shape), self._recording.values[leaf.at].dtype)
            if isinstance(leaf, Value)
            else repr(leaf)
            for leaf in node.leaves
        )

    def of(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs of a unit's call."""
        with torch.no_grad():
            for at in self._recording.needed(values_of(node.leaves)):
                self._derive(self._recording.nodes[at])
        return node.arguments(self._value)

    def _derive(self, node: Node) -> None:
        called = node.call if node.unit is None else self._module.get_submodule(node.unit)
        assert called is not None
        args, kwargs = node.arguments(self._value)
        made = tree_leaves(called(*args, **kwargs))
        self._values |= {value: made[place] for place, value in node.made}

    def _value(self, leaf: Any) -> Any:
        match leaf:
            case Value(at) if at in self._values:
                return self._values[at]
            case Value(at):
                made = self._recording.values[at]
                return _with_data(torch.empty(made.shape, dtype=made.dtype, device="meta"))
            case Leaf(at):
                return self._leaves[at]
            case Held(name):
                path, _, attribute = name.rpartition(".")
                return _with_data(getattr(self._module.get_submodule(path), attribute).detach())
            case Device():
                return torch.device("cpu")
            case _:
                return leaf


def _with_data(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or has_data((leaf,)):
        return leaf.cpu() if isinstance(leaf, Tensor) else leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, dtype=leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype) + (leaf.dtype == torch.bool)


def _identity(unit: nn.Module) -> Any:
    """Return what two units that do the same have in common."""
    return tuple(
        (
            path,
            type(part),
            tuple((k, tuple(p.shape)) for k, p in part._parameters.items() if p is not None),
            tuple((k, tuple(b.shape)) for k, b in part._buffers.items() if b is not None),
            tuple(
                sorted(
                    (key, value)
                    for key, value in vars(part).items()
                    if isinstance(value, int | float | str)
                    # The number of a block among its like tells nothing of what it does.
                    and not key.endswith("_idx")
                )
            ),
        )
        for path, part in unit.named_modules()
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run in one thread: most units are small here, and threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- trying a unit --------------------------------------------------------------------------------


class _Refused(Exception):  # noqa: N818 - told to the user as a reason, not raised to them
    """Why something cannot be divided."""


class _Watch:
    """One process as a tensor axis: notes what is copied and summed."""

    rank, degree = 0, 1

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.grads: dict[Any, Tensor | None] = {}
        self._entered = 0

    def copy(self, x: Tensor, place: Any = None) -> Tensor:
        if place is None:
            place, self._entered = self._entered, self._entered + 1
        self.grads[place] = None
        return _Noted.apply(x, self.grads, place, None)

    def sum(self, x: Tensor) -> Tensor:
        self.sums.append(x.detach().clone())
        return x


class _Part:
    """One rank of a tensor axis whose other ranks ran before or run later.

    What a collective makes is what one process had there; what this rank gave is noted.
    """

    def __init__(self, rank: int, degree: int, whole: _Watch) -> None:
        self.rank, self.degree = rank, degree
        self.sums: list[Tensor] = []
        self.grads: dict[Any, Tensor | None] = {}
        self._whole = whole
        self._entered = 0

    def copy(self, x: Tensor, place: Any = None) -> Tensor:
        if place is None:
            place, self._entered = self._entered, self._entered + 1
        self.grads[place] = None
        return _Noted.apply(x, self.grads, place, self._whole.grads.get(place))

    def sum(self, x: Tensor) -> Tensor:
        at = len(self.sums)
        self.sums.append(x.detach().clone())
        if at >= len(self._whole.sums) or self._whole.sums[at].shape != x.shape:
            raise _Refused("what its parts add up to has another shape")
        return _Replaced.apply(x, self._whole.sums[at])


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grads: dict[Any, Tensor | None], at: Any, known: Tensor | None
    ) -> Tensor:
        ctx.grads, ctx.at, ctx.known = grads, at, known
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.grads[ctx.at] = grad
        return (grad if ctx.known is None else ctx.known), None, None, None


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(slots=True)
class _Log:
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
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of a column's output that is split, the sizes."""


class _Logging(Sizes):
    def __init__(self, log: _Log, watch: _Watch) -> None:
        super().__init__()
        self._log = log
        self._watch = watch

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._log.joined.setdefault(site, []).append(shapes_of((args, kwargs)))
        first = len(self._log.joined[site]) == 1

        def watched(x: Tensor, at: int) -> Tensor:
            if not (first and x.requires_grad) or (name in IN_PLACE and at == 0):
                return x
            return self._watch.copy(x, (site, at))

        return with_tensors(args, kwargs, watched)

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self._log.sized.setdefault(site, []).append((shapes_of((args, kwargs)), shapes_of(made)))
        given = next(
            (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None
        )
        if id(given) in self._log.columns and isinstance(made, tuple | list) and given is not None:
            for dim in range(given.ndim):
                sizes = tuple(one.shape[dim] for one in made)
                if sum(sizes) == given.shape[dim] and len(sizes) > 1:
                    self._log.sections[self._log.columns[id(given)][1]] = sizes
        return made

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        self._log.drawn.setdefault(site, []).append(shapes_of((args, kwargs))[0])
        return func(*args, **kwargs)


class _Learning(Following):
    """Runs a region on a part, and finds out what changes against the whole."""

    def __init__(
        self, rules: Rules, across: Across, log: _Log, fused: Mapping[int, tuple[Tensor, int]]
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
            raise _Refused(f"{name} is called otherwise on a part than on the whole")
        return known[site][at]

    def sized(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        before, after = self._next(site, self._log.sized, func.__name__)
        here = shapes_of((args, kwargs))
        changes: tuple[tuple[int, float], ...] | None = None
        if here[0] != before[0]:
            dim = _divided_dim(here[0], before[0], self._degree)
            (given, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            pieces = self._fused.get(id(given), (given, 1))[1]
            changes = self._changes(func, args, kwargs, (before[0], dim, pieces), after)
        if self._rules.sizes.setdefault(site, changes) != changes:
            raise _Refused(f"{func.__name__} stands in a loop over divided and whole tensors")
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
        raise _Refused(
            f"{name}({', '.join(map(str, sizes))}) makes no part of what the whole makes"
        )

    def joined(self, name: str, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        before = self._next(site, self._log.joined, name)
        here = shapes_of((args, kwargs))
        takes = tuple(_taken(here, before, self._degree, name))
        if self._rules.takes.setdefault(site, takes) != takes:
            raise _Refused(f"{name} stands in a loop over divided and whole tensors")
        if takes and len(self._log.joined[site]) > 1:
            raise _Refused(f"{name} takes parts of whole tensors in a loop")
        return super().joined(name, site, args, kwargs)

    def drawing(self, func: Any, site: Site, args: Any, kwargs: Any) -> Any:
        before = self._next(site, self._log.drawn, func.__name__)
        here = shapes_of((args, kwargs))[0]
        dim = None if here == before else _divided_dim(here, before, self._degree)
        if self._rules.draws.setdefault(site, dim) != dim:
            raise _Refused(f"{func.__name__} draws for divided and whole tensors in one place")
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
        raise _Refused(f"{name} joins tensors that are divided along different dims")
    (dim,) = divided
    size = next(o[dim] for m, o in zip(here, whole, strict=True) if m != o)
    for at, (mine, other) in enumerate(zip(here, whole, strict=True)):
        if mine == other and len(mine) >= -dim and mine[dim] == size:
            if name in IN_PLACE and at == 0:
                raise _Refused(f"{name} writes into a whole tensor")
            yield at, dim


def _divided_dim(here: Sequence[int], whole: Sequence[int], degree: int) -> int:
    differing = [at for at, (a, b) in enumerate(zip(here, whole, strict=False)) if a != b]
    if (
        len(here) != len(whole)
        or len(differing) != 1
        or (here[differing[0]] * degree != whole[differing[0]])
    ):
        raise _Refused(f"a tensor {list(whole)} is {list(here)} on a part")
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
        except _Refused:
            return False
    return True


@dataclass(slots=True)
class _Run:
    """What a run of a unit left."""

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]
    inputs: list[Tensor | None]
    across: Any


class _Study:
    """One kind of unit: its candidates, its run as a whole, and how it divides."""

    def __init__(
        self,
        unit: nn.Module,
        arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
        kept_whole: Mapping[str, str],
        draws: bool,
    ) -> None:
        self._user_unit = unit
        self._arguments = arguments
        self._draws = draws
        self._whole: dict[str, str] = {}
        self._kept = dict(kept_whole)
        self._ready: tuple[nn.Module, Any, list[Region]] | None = None
        self._logs: dict[Any, _Log] = {}
        """Of the last run as a whole, by region."""

    def divided(self, degree: int) -> DividedUnit:
        """Return how the unit is divided over so many ranks."""
        with torch.random.fork_rng(devices=()), torch.enable_grad(), _one_thread():
            torch.manual_seed(0)
            try:
                candidates = self._candidates()
            except _Refused as error:
                paths = [p for p, m in self._user_unit.named_modules() if isinstance(m, PRODUCTS)]
                return DividedUnit(degree=degree, whole=dict.fromkeys(paths, str(error)))
            return self._best(candidates, degree)

    def _best(self, candidates: list[Region], degree: int) -> DividedUnit:
        whole = dict(self._whole)
        with contextlib.suppress(_Refused):  # all at once, as most are
            for region in candidates:
                _refuse_indivisible(self._user_unit, region, degree)
            rules, partial = self._checked(candidates, degree)
            return DividedUnit(
                degree=degree,
                regions=tuple(candidates),
                rules=rules,
                partial=partial,
                whole=whole,
            )
        accepted: list[Region] = []
        for region in candidates:
            try:
                accepted.append(self._accepted(region, degree))
            except _Refused as error:
                whole |= dict.fromkeys(region.paths, str(error))
        while accepted:
            try:
                rules, partial = self._checked(accepted, degree)
            except _Refused as error:
                whole |= dict.fromkeys(accepted.pop().paths, str(error))
                continue
            return DividedUnit(
                degree=degree,
                regions=tuple(accepted),
                rules=rules,
                partial=partial,
                whole=whole,
            )
        return DividedUnit(degree=degree, whole=whole)

    # --- candidates ---

    def _candidates(self) -> list[Region]:
        if self._ready is None:
            unit = _with_random_numbers(self._user_unit)
            given = self._arguments()
            self._refuse_large(unit, given)
            self._ready = unit, given, []
            self._ready = unit, given, self._found(unit, given)
        return self._ready[2]

    @staticmethod
    def _refuse_large(unit: nn.Module, given: Any) -> None:
        floats = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.ndim]
        rows = max((x.numel() // max(1, x.shape[-1]) for x in floats), default=1)
        flops = 2.0 * rows * sum(p.numel() for p in unit.parameters() if p.ndim > 1)
        if flops > MOST_CHECKED_FLOPS:
            raise _Refused(f"its forward of {flops:.1g} FLOPs is too long to be checked here")

    def _found(self, unit: nn.Module, given: Any) -> list[Region]:
        """Return the regions that the flow of tensors suggests."""
        flow = _flow(unit, given)
        regions = []
        for path, part in unit.named_modules():
            if type(part) is nn.MultiheadAttention and not self._reason(path, flow):
                if part._qkv_same_embed_dim and part.bias_k is None and not part.add_zero_attn:
                    regions.append(Region(kind="heads", owner=path))
                    self._whole.pop(f"{path}.out_proj", None)
            elif isinstance(part, nn.Embedding) and not self._reason(path, flow):
                plain = part.max_norm is None and not part.sparse and not part.scale_grad_by_freq
                if plain and part.num_embeddings > flow.looked_up[path]:
                    regions.append(Region(kind="table", owner=path))
                else:
                    self._whole[path] = "as many rows are looked up at once as it has"
            elif isinstance(part, nn.Embedding):
                self._whole[path] = self._reason(path, flow)
        used: set[str] = set()
        for path in flow.order:
            before = flow.before[path]
            free = before and not ({path, *before} & used)
            alone = all(flow.behind[p] == {path} for p in before)
            if not (free and alone) or any(self._reason(p, flow) for p in (path, *before)):
                continue
            columns = [p for p in flow.order if p in before]
            if not all(_fits_together(unit, p, path) for p in columns):
                continue
            regions.append(
                Region(
                    kind="products",
                    owner=_common([*columns, path]),
                    columns={p: (unit.get_submodule(p).weight.shape[0],) for p in columns},  # type: ignore[union-attr, misc]
                    rows=path,
                )
            )
            used |= {path, *before}
        for path in flow.order:
            if path not in used:
                self._whole[path] = self._reason(path, flow) or (
                    "no other product alone reads what it makes, nor it what others make"
                )
        return regions

    def _reason(self, path: str, flow: _Flow) -> str:
        if path in self._kept:
            return self._kept[path]
        if flow.calls.get(path, 1) > 1:
            return f"is called {flow.calls[path]} times"
        return ""

    # --- trials ---

    def _accepted(self, region: Region, degree: int) -> Region:
        first: _Refused | None = None
        for way in itertools.islice(self._ways(region), MOST_TRIALS):
            try:
                _refuse_indivisible(self._user_unit, way, degree)
                self._checked([way], degree)
            except _Refused as error:
                first = first or error
            else:
                return way
        assert first is not None
        raise first

    def _ways(self, region: Region) -> Iterator[Region]:
        """Yield a region with its columns as one matrix each, then as several."""
        yield region
        if len(region.columns) not in (1, 2):
            return
        choices = []  # the run above has told what is split
        for path, (size,) in region.columns.items():
            sections = self._sections.get(path)
            own = [(size,), *([sections] if sections else ())]
            own += [(size // n,) * n for n in (3, 2) if size % n == 0]
            choices.append(list(dict.fromkeys(own)))
        for chosen in itertools.islice(itertools.product(*choices), 1, None):
            yield replace(region, columns=dict(zip(region.columns, chosen, strict=True)))

    @property
    def _sections(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for log in self._logs.values():
            found |= log.sections
        return found

    def _checked(self, regions: list[Region], degree: int) -> tuple[Rules, frozenset[str]]:
        """Run the unit whole and in parts; return the rules and the partial parameters."""
        assert self._ready is not None
        unit, given, _ = self._ready
        rules = Rules()
        partial: frozenset[str] = frozenset()
        for training in (True, False):
            plain = _run(unit, given, None, training=training)
            watch = _Watch()
            self._logs = logs = {region.paths: _Log() for region in regions}
            whole = self._run_whole(regions, logs, watch, training=training)
            _compare(whole.outputs, plain.outputs, "its own code makes something else")
            parts = []
            for rank in range(degree):
                across = _Part(rank, degree, watch)
                learned = logs if rank == 0 else None
                parts.append(self._run_part(regions, rules, across, learned, training=training))
            partial |= self._equal(regions, plain, watch, parts, degree, training=training)
        return rules, partial

    def _run_whole(
        self, regions: list[Region], logs: Mapping[Any, _Log], watch: _Watch, *, training: bool
    ) -> _Run:
        assert self._ready is not None
        unit, given, _ = self._ready
        twin = copy.deepcopy(unit)
        for region in regions:
            log = logs[region.paths]
            _note_outputs(
                twin,
                region,
                lambda path, out, log=log: log.columns.__setitem__(id(out), (out, path)),
            )
            run_divided(twin, region, Rules(), watch, around=lambda log=log: _Logging(log, watch))
        return _run(twin, given, watch, training=training)

    def _run_part(
        self,
        regions: list[Region],
        rules: Rules,
        across: _Part,
        logs: Mapping[Any, _Log] | None,
        *,
        training: bool,
    ) -> _Run:
        assert self._ready is not None
        unit, given, _ = self._ready
        twin = part_unit(unit, regions, across.rank, across.degree)
        for region in regions:
            fused: dict[int, tuple[Tensor, int]] = {}
            _note_outputs(
                twin,
                region,
                lambda path, out, fused=fused, region=region: fused.__setitem__(
                    id(out), (out, len(region.columns[path]))
                ),
            )
            around = None
            if logs is not None:
                around = lambda log=logs[region.paths], fused=fused: _Learning(  # noqa: E731
                    rules, across, log, fused
                )
            run_divided(twin, region, rules, across, around=around)
        return _run(twin, given, across, training=training)

    def _equal(
        self,
        regions: list[Region],
        plain: _Run,
        watch: _Watch,
        parts: list[_Run],
        degree: int,
        *,
        training: bool,
    ) -> frozenset[str]:
        """Refuse parts that do not make the whole; return which parameters' gradients are parts."""
        assert self._ready is not None
        for part in parts:
            _compare(part.outputs, plain.outputs, "what its parts make is not what the whole makes")
        for at, whole in enumerate(watch.sums):
            _compare([sum(p.across.sums[at] for p in parts)], [whole], "its parts do not add up")  # type: ignore[list-item]
        if not training:
            return frozenset()
        for at, whole_grad in watch.grads.items():
            own = [p.across.grads[at] for p in parts if p.across.grads.get(at) is not None]
            if whole_grad is not None and any(at in p.across.grads for p in parts):
                _compare([sum(own)], [whole_grad], "gradients of its parts do not add up")  # type: ignore[list-item]
        for part in parts:
            _compare(part.inputs, plain.inputs, "gradients of what it is given differ")
        divided = {
            name: (dim, pieces)
            for region in regions
            for name, dim, pieces in shards(self._ready[0], region)
        }
        partial = set()
        # Gradients that are zero but for rounding, such as that of the keys' bias.
        noise = NOISE * max(float(g.abs().max()) for g in plain.grads.values() if g is not None)
        for name, grad in plain.grads.items():
            own = [part.grads.get(name) for part in parts]
            if grad is None or any(one is None for one in own):
                if grad is not None or any(one is not None for one in own):
                    raise _Refused(f"{name} has no gradient on some ranks")
                continue
            if name in divided:
                dim, pieces = divided[name]
                for rank, one in enumerate(own):
                    _compare(
                        [one],
                        [part_of(grad, dim, pieces, rank, degree)],
                        f"the gradient of {name} differs",
                        noise,
                    )
            elif not all(_close(one, grad, noise) for one in own):
                _compare([sum(own)], [grad], f"the gradient of {name} differs", noise)  # type: ignore[list-item]
                partial.add(name)
        return frozenset(partial)


def part_unit(unit: nn.Module, regions: Sequence[Region], rank: int, degree: int) -> nn.Module:
    """Return a copy of a unit with a rank's parts of what is divided."""
    twin = copy.deepcopy(unit)
    take_parts(twin, regions, rank, degree)
    return twin


def take_parts(unit: nn.Module, regions: Sequence[Region], rank: int, degree: int) -> None:
    """Leave a unit a rank's parts of what is divided."""
    for region in regions:
        for name, dim, pieces in list(shards(unit, region)):
            path, _, attribute = name.rpartition(".")
            owner = unit.get_submodule(path)
            whole = owner._parameters.get(attribute)
            if whole is not None:
                part = part_of(whole.detach(), dim, pieces, rank, degree).clone()
                owner._parameters[attribute] = nn.Parameter(part, whole.requires_grad)


def _note_outputs(unit: nn.Module, region: Region, note: Callable[[str, Tensor], None]) -> None:
    for path in region.columns:
        unit.get_submodule(path).register_forward_hook(
            lambda _module, _args, out, path=path: note(path, out)
        )


def _refuse_indivisible(unit: nn.Module, region: Region, degree: int) -> None:
    for name, dim, pieces in shards(unit, region):
        path, _, attribute = name.rpartition(".")
        if unit.get_submodule(path)._parameters.get(attribute) is None:
            continue
        for size in pieces:
            if size % degree:
                what = "rows" if region.kind == "table" else "output" if dim == 0 else "input"
                word = what if what == "rows" else f"{what} features"
                raise _Refused(f"{degree} does not divide its {size} {word}")
    if any(len(pieces) > 1 for _, _, pieces in shards(unit, region)) and not all(
        parameter.requires_grad for parameter in unit.parameters()
    ):
        raise _Refused("several matrices in one are divided where all of them are trained")
    if region.kind == "heads":
        heads = unit.get_submodule(region.owner).num_heads
        if heads % degree:  # type: ignore[operator]
            raise _Refused(f"{degree} does not divide its {heads} heads")


def _with_random_numbers(unit: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        made = torch.randn(parameter.shape, dtype=parameter.dtype)
        if parameter.ndim > 1:
            made /= math.sqrt(max(1, made.numel() // made.shape[0]))
        memo[id(parameter)] = nn.Parameter(made) if made.is_floating_point() else parameter
    for buffer in unit.buffers():
        memo[id(buffer)] = _with_data(buffer).clone()
    return copy.deepcopy(unit, memo)


def _run(unit: nn.Module, given: Any, across: Any, *, training: bool) -> _Run:
    """Run a unit, and backward from random gradients that every run has alike."""
    unit = unit.train(training) if across is not None else copy.deepcopy(unit).train(training)
    args, kwargs = tree_map(_own, given)
    torch.manual_seed(0)
    try:
        made = tree_leaves(unit(*args, **kwargs))
    except _Refused:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        AssertionError,
        MeshwrightError,
    ) as error:
        line = (str(error).splitlines() or [""])[0]
        raise _Refused(f"on a part: {type(error).__name__}: {line}") from error
    outputs = [leaf for leaf in made if isinstance(leaf, Tensor)]
    if training:
        generator = torch.Generator().manual_seed(1)
        needing = [one for one in outputs if one.requires_grad]
        grads = [torch.randn(one.shape, generator=generator) for one in needing]
        if needing:
            torch.autograd.backward(
                needing, [g.to(o.dtype) for g, o in zip(grads, needing, strict=True)]
            )
    taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return _Run(
        outputs=[one.detach() for one in outputs],
        grads={name: p.grad for name, p in unit.named_parameters()},
        inputs=[x.grad for x in taken],
        across=across,
    )


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    made = leaf.detach().clone()
    return made.requires_grad_(made.is_floating_point())


def _close(one: Tensor, other: Tensor, noise: float = 1e-6) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(other)
    if not torch.equal(finite, torch.isfinite(one)):
        return False
    if not finite.any():
        return True
    largest = float(other[finite].abs().max())
    return float((one[finite] - other[finite]).abs().max()) <= CLOSE * largest + noise


def _compare(
    found: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
    otherwise: str,
    noise: float = 1e-6,
) -> None:
    if len(found) != len(wanted):
        raise _Refused(otherwise)
    for one, other in zip(found, wanted, strict=True):
        if (one is None) != (other is None):
            raise _Refused(otherwise)
        if one is not None and other is not None and not _close(one, other, noise):
            raise _Refused(otherwise)


# --- which product reads what ---------------------------------------------------------------------


@dataclass(slots=True)
class _Flow:
    """Which products of a unit stand behind which, with nothing but other functions between."""

    order: list[str]
    before: dict[str, set[str]]
    behind: dict[str, set[str]]
    """The unit's own output is ""."""
    calls: dict[str, int]
    looked_up: dict[str, int]
    """Rows that a table gives at most for one sample."""


def _flow(unit: nn.Module, given: Any) -> _Flow:
    twin = copy.deepcopy(unit).train()
    calls: dict[str, int] = {}
    looked_up: dict[str, int] = {}
    outputs: dict[Any, str] = {}
    inputs: dict[str, Any] = {}
    for path, part in twin.named_modules():
        if isinstance(part, PRODUCTS):

            def product(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                inputs.setdefault(path, args[0].grad_fn if args else None)
                outputs[out.grad_fn] = path

            part.register_forward_hook(product)
        elif isinstance(part, nn.Embedding):

            def table(_: Any, args: Any, out: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1
                ids = args[0]
                looked_up[path] = ids[0].numel() if ids.ndim > 1 else ids.numel()

            looked_up.setdefault(path, 1 << 60)
            part.register_forward_hook(table)
    args, kwargs = tree_map(_own, given)
    try:
        torch.manual_seed(0)
        made = [leaf for leaf in tree_leaves(twin(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except Exception as error:  # the user's code on random numbers may fail in any way
        line = (str(error).splitlines() or [""])[0]
        raise _Refused(
            f"cannot be run on random numbers: {type(error).__name__}: {line}"
        ) from error
    order = list(inputs)
    before = {path: _nearest(fn, outputs) for path, fn in inputs.items()}
    behind: dict[str, set[str]] = {path: set() for path in order}
    for path, found in before.items():
        for one in found:
            behind[one].add(path)
    for one in made:
        for path in _nearest(one.grad_fn, outputs):
            behind[path].add("")
    return _Flow(order, before, behind, calls, looked_up)


def _nearest(fn: Any, outputs: Mapping[Any, str]) -> set[str]:
    """Return the products whose outputs a tensor is made of, with no other product between."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in outputs:
            found.add(outputs[node])
            continue
        waiting += [following for following, _ in node.next_functions]
    return found


def _fits_together(unit: nn.Module, column: str, rows: str) -> bool:
    one, other = unit.get_submodule(column), unit.get_submodule(rows)
    for part in (one, other):
        if isinstance(part, CONVOLUTIONS) and (
            part.groups != 1 or part.padding_mode != "zeros" or part.transposed
        ):
            return False
    return isinstance(one, CONVOLUTIONS) == isinstance(other, CONVOLUTIONS)


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module that holds all of these."""
    steps = [path.split(".")[:-1] for path in paths]
    shared = []
    for at in zip(*steps, strict=False):
        if len(set(at)) > 1:
            break
        shared.append(at[0])
    return ".".join(shared)
