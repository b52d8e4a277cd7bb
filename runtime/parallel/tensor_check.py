"""Test whether a unit can be divided: it is run whole and in parts on random numbers, and compared.

On two samples the unit runs whole and as the part of every rank, forward and backward.  What a
collective makes is what one process had there, and what the ranks gave must add up to it; outputs
and all gradients must be equal.  The runs also tell along which dim modules of Dropout see a part,
and which parameters get a part of their gradient on each rank.  The user's code is not changed: a
region whose code names sizes of the whole stays whole.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.parallel.tensor_collectives import Across
from meshwright.runtime.parallel.tensor_regions import (
    CONVOLUTIONS,
    PRODUCTS,
    Flow,
    Indivisible,
    Region,
    divide_dropout,
    flow_of,
    own_leaf,
    part_of,
    run_divided,
    shards,
    take_parts,
)
from meshwright.runtime.parallel.trial_weights import (
    WeightGradient,
    deepcopy_unit,
    is_overlapping,
    noted_gradients,
    part_in_place,
    random_weight,
    shared_numbers,
    windowed_products,
)
from meshwright.runtime.tracing.tracer import has_data

MOST_CHECKED_FLOPS = 1e11
"""Largest cost of a checked unit's forward, in products; the check takes about 20 times as many."""
CLOSE = 2e-4
"""Largest fp32 difference between a divided unit's numbers and the whole one's, relative to the
largest of them: sums in another order differ by 1e-6, another head's numbers by 1."""
NOISE = 1e-5
"""The same over the largest gradient of the unit."""
DROPOUTS = frozenset(
    (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    )
)  # fmt: skip
ALONE = "its output is not read by one product alone, nor its input made by one"
"""Why a product that has no other to be divided with is whole."""
TRIED = ("on a part of it", "its code draws")
"""First words of reasons that the user's code between two products gives."""
ON_A_PART = (
    "write code that runs on a part of features or heads: view(..., -1, head_size) and chunk(3) "
    "rather than their numbers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedUnit:
    """The division of a unit over the ranks of an axis, and the parts of it that stay whole."""

    degree: int
    regions: tuple[Region, ...] = ()
    partial: frozenset[str] = frozenset()
    """Whole parameters whose gradient is the sum over the ranks."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Reasons why products or tables are not divided, by path."""
    dropouts: Mapping[str, int] = field(default_factory=dict)
    """By path, modules of nn.Dropout that see a part, and along which dim."""
    undrawn: tuple[Region, ...] = ()
    """Whole regions that styles of the user's own divide, with other random numbers."""

    def apply(self, unit: nn.Module, across: Across) -> None:
        """Let a unit whose parameters are this rank's parts run over the tensor axis."""
        for region in self.regions:
            run_divided(unit, region, across)
        for path, dim in self.dropouts.items():
            divide_dropout(unit.get_submodule(path), dim, across)


def with_data(leaf: Any) -> Any:
    """Return a tensor on the CPU; of one without data, random numbers, zeros or True.

    Those in 16 bits are in fp32, in which units are compared.
    """
    if isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16):
        leaf = leaf.float()
    if not isinstance(leaf, Tensor) or has_data((leaf,)):
        return leaf.cpu() if isinstance(leaf, Tensor) else leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, dtype=leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype) + (leaf.dtype == torch.bool)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run in one thread: most units are small here, and threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _AxisWatch:
    """One process as a tensor axis: notes what is copied and summed."""

    def __init__(self) -> None:
        self.rank, self.degree = 0, 1
        self.sums: list[Tensor] = []
        self.grads: dict[int, Tensor | None] = {}

    def copy(self, x: Tensor) -> Tensor:
        at = len(self.grads)
        self.grads[at] = None
        return _Noted.apply(x, self.grads, at, self._gradient(at))

    def sum(self, x: Tensor) -> Tensor:
        self.sums.append(x.detach().clone())
        return x

    def _gradient(self, at: int) -> Tensor | None:
        """Return what backward is to see, if not its own."""
        return None


class _TrialRank(_AxisWatch):
    """One rank of a tensor axis whose other ranks ran before or run later.

    What a collective makes is what one process had there; what this rank gave is noted.
    """

    def __init__(self, rank: int, degree: int, whole: _AxisWatch) -> None:
        super().__init__()
        self.rank, self.degree = rank, degree
        self._whole = whole

    def _gradient(self, at: int) -> Tensor | None:
        return self._whole.grads.get(at)

    def sum(self, x: Tensor) -> Tensor:
        at = len(self.sums)
        super().sum(x)
        if at >= len(self._whole.sums) or self._whole.sums[at].shape != x.shape:
            raise Indivisible("what its parts add up to has another shape")
        return _Replaced.apply(x, self._whole.sums[at])


class _NoDraws(TorchFunctionMode):
    """Lets dropout, also that of attention, drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grads: dict[int, Tensor | None], at: int, value: Tensor | None
    ) -> Tensor:
        ctx.grads, ctx.at, ctx.known = grads, at, value
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
class _TrialRun:
    """The results of a run of a unit."""

    outputs: list[Tensor]
    grads: dict[str, WeightGradient | None]
    inputs: list[Tensor | None]
    """Gradients of what it is given, and what modules with stacks are given, both ways."""
    across: Any


class _DrawsOtherwise(Indivisible):
    """A region's parts are equal to the whole but for random numbers."""

    def __init__(self, partial: bool) -> None:
        super().__init__(
            f"{TRIED[1]} random numbers that cannot be divided (functional dropout, dropout_p of "
            "attention); use modules of nn.Dropout, or a probability of 0"
        )
        self.partial = partial
        """It has whole parameters whose gradients are summed."""


class DivisionTrial:
    """One kind of unit: its candidates, its run as a whole, and how it divides."""

    def __init__(
        self,
        unit: nn.Module,
        arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
        kept_whole: Mapping[str, str],
        *,
        draws: bool = True,
    ) -> None:
        """`draws` says that random numbers are drawn in training."""
        self._user_unit = unit
        self._draws = draws
        self._arguments = arguments
        self._whole: dict[str, str] = {}
        self._kept = dict(kept_whole)
        self._ready: tuple[nn.Module, Any, list[Region]] | None = None
        self._plain: dict[tuple[bool, bool], _TrialRun] = {}
        """The unit as it is, by whether it trains and whether it drops."""
        self._whole_runs: dict[Any, tuple[_AxisWatch, dict[str, set[tuple[int, ...]]]]] = {}
        """Sums of a division over the whole, and the shapes that its dropouts see."""
        self._equal_divisions: dict[Any, DividedUnit] = {}
        """Divisions of which all ranks of an axis were tried."""
        self._refusals: dict[Hashable, dict[int, Indivisible]] = {}
        """Why a region's way was refused, by degree."""

    def division(self, degree: int) -> DividedUnit:
        """Return how the unit is divided over `degree` ranks."""
        with restore_side_effects(self._user_unit), torch.enable_grad(), _one_thread():
            torch.manual_seed(0)
            try:
                candidates = self._candidates()
            except Indivisible as error:
                paths = [p for p, m in self._user_unit.named_modules() if isinstance(m, PRODUCTS)]
                return DividedUnit(degree=degree, whole=dict.fromkeys(paths, str(error)))
            return self._best(candidates, degree)

    def _best(self, candidates: list[Region], degree: int) -> DividedUnit:
        whole = dict(self._whole)
        undrawn: list[Region] = []
        open_regions: list[Region] = []
        ways: list[Region] = []

        def leave_whole(region: Region, error: Indivisible) -> None:
            whole.update(dict.fromkeys(region.paths, str(error)))
            if isinstance(error, _DrawsOtherwise) and _in_torch_styles(
                self._user_unit, region, partial=error.partial
            ):
                undrawn.append(region)

        for region in candidates:
            way = self._open_way(region, degree)
            if isinstance(way, Region):
                open_regions.append(region)
                ways.append(way)
            else:
                leave_whole(region, way)
        if not ways:
            return DividedUnit(degree=degree, whole=whole, undrawn=tuple(undrawn))
        with contextlib.suppress(Indivisible):  # all at once, as most are
            return replace(self._check(ways, degree), whole=whole, undrawn=tuple(undrawn))
        accepted: list[Region] = []
        alone = DividedUnit(degree=degree)
        for region in open_regions:
            try:
                alone = self._accept(region, degree)
                accepted += alone.regions
            except Indivisible as error:
                leave_whole(region, error)
        if len(accepted) == 1:  # and was tried alone
            return replace(alone, whole=whole, undrawn=tuple(undrawn))
        division = DividedUnit(degree=degree)
        while accepted:
            try:
                division = self._check(accepted, degree)
                break
            except Indivisible as error:
                whole |= dict.fromkeys(accepted.pop().paths, str(error))
        return replace(division, whole=whole, undrawn=tuple(undrawn))

    def _open_way(self, region: Region, degree: int) -> Region | Indivisible:
        """Return the first way in which a region may be divided; why not, if there is none."""
        first: Indivisible | None = None
        for way in _ways(region):
            error = self._refusal(way, degree)
            if error is None:
                return way
            if isinstance(error, _DrawsOtherwise):
                return error
            first = first or error
        assert first is not None
        return first

    def _refusal(self, way: Region, degree: int) -> Indivisible | None:
        """Return why a way is no division, as sizes or fewer ranks with larger parts tell."""
        try:
            _refuse_indivisible(self._user_unit, way, degree)
        except Indivisible as error:
            return error
        refusals = self._refusals.get(_key_of((way,)), {})
        return next((error for fewer, error in refusals.items() if degree % fewer == 0), None)

    # --- candidates ---

    def _candidates(self) -> list[Region]:
        if isinstance(self._user_unit, PRODUCTS):  # without another, nothing is tried
            self._whole[""] = self._kept.get("", ALONE)
            return []
        if self._ready is None:
            given = self._arguments()
            self._refuse_large(self._user_unit, given)
            unit = _with_random_numbers(self._user_unit)
            self._ready = unit, given, []
            regions = self._regions_of_overlapping(unit, given)
            if regions is None:
                unit = _with_random_numbers(self._user_unit, dense=True)
                self._ready = unit, given, []
                regions = self._find_regions(unit, given)
            self._ready = unit, given, regions
        return self._ready[2]

    def _regions_of_overlapping(self, unit: nn.Module, given: Any) -> list[Region] | None:
        """Return the regions of a unit, None where its code wants large weights of their own.

        It changes them, views them in another shape, or reads those of a stack elsewhere.
        """
        numbers = shared_numbers(unit)
        before = [values.clone() for values in numbers]
        called: set[str] = set()
        stacks = _stacks(unit)
        hooks = [
            part.register_forward_hook(lambda *_, path=path: called.add(path))
            for path, part in stacks
        ]
        try:
            regions = self._find_regions(unit, given)
        except Indivisible:
            if not numbers:
                raise
            return None
        finally:
            for hook in hooks:
                hook.remove()
        alike = all(map(torch.equal, before, numbers))
        return regions if alike and called == {path for path, _ in stacks} else None

    @staticmethod
    def _refuse_large(unit: nn.Module, given: Any) -> None:
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.ndim]
        features = [x for x in tensors if x.is_floating_point()]
        rows = max(
            (x.numel() // max(1, x.shape[-1]) for x in features),
            default=max((x.numel() for x in tensors), default=1),  # of tokens' numbers
        )
        parts = [part for part in unit.modules() if not isinstance(part, nn.Embedding)]
        matrices = {p for part in parts for p in part._parameters.values() if p is not None}
        flops = 2.0 * rows * sum(p.numel() for p in matrices if p.ndim > 1)
        if flops > MOST_CHECKED_FLOPS:
            raise Indivisible(f"its forward of {flops:.1g} FLOPs is too long to be checked here")

    def _find_regions(self, unit: nn.Module, given: Any) -> list[Region]:
        """Return the regions that the flow of tensors suggests."""
        flow = flow_of(unit, given)
        self._whole.clear()
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
                    columns={p: (unit.get_parameter(f"{p}.weight").shape[0],) for p in columns},
                    rows=path,
                )
            )
            used |= {path, *before}
        for path in flow.order:
            if path not in used:
                self._whole[path] = self._reason(path, flow) or ALONE
        return regions

    def _reason(self, path: str, flow: Flow) -> str:
        if path in self._kept:
            return self._kept[path]
        if flow.calls.get(path, 1) > 1:
            return f"is called {flow.calls[path]} times"
        if path in flow.others:
            return "returns more than one tensor, or is given its input by name"
        return ""

    # --- trials ---

    def _accept(self, region: Region, degree: int) -> DividedUnit:
        """Return a unit with a region divided alone, in the first way that is right."""
        while isinstance(way := self._open_way(region, degree), Region):
            try:
                return self._check([way], degree)
            except Indivisible as error:
                self._refusals.setdefault(_key_of((way,)), {})[degree] = error
        raise way

    def _check(self, regions: Sequence[Region], degree: int) -> DividedUnit:
        """Run the unit whole and in parts; return how it is divided where they are equal."""
        for region in regions:
            _refuse_indivisible(self._user_unit, region, degree)
        division = DividedUnit(degree=degree, regions=tuple(regions))
        if self._draws or any(True for _ in self._user_unit.buffers()):
            division = self._try_division(division, training=False)  # here nothing draws
        if not self._draws:
            return self._try_division(division, training=True)
        try:
            return self._try_division(division, training=True)
        except Indivisible:
            with _NoDraws():
                undrawn = self._try_division(division, training=True, drops=False)
            raise _DrawsOtherwise(bool(undrawn.partial)) from None

    def _try_division(
        self, division: DividedUnit, *, training: bool, drops: bool = True
    ) -> DividedUnit:
        """Refuse what is not equal to the whole; return it with what the runs tell.

        Where all ranks of a smaller axis were equal, the first and the last of a larger one tell
        whether its parts are of one piece: of heads, or of matrices in one.
        """
        assert self._ready is not None
        unit, given, _ = self._ready
        summed = frozenset(name for name, p in unit.named_parameters() if is_overlapping(p))
        mode = (training, drops)
        key = (_key_of(division.regions), mode)
        if summed and key not in self._whole_runs:
            self._refuse_code_of_whole(division, training=training)
        if mode not in self._plain:
            self._plain[mode] = _run(unit, given, None, summed, training=training)
        plain = self._plain[mode]
        if key not in self._whole_runs:
            watch, twin = _AxisWatch(), deepcopy_unit(unit)
            whole_shapes = _dropped_shapes(twin)
            division.apply(twin, watch)
            whole = _run(twin, given, watch, summed, training=training)
            _compare(whole.outputs, plain.outputs, "its own code makes something else")
            self._whole_runs[key] = watch, whole_shapes
        watch, whole_shapes = self._whole_runs[key]
        equal = self._equal_divisions.get(key)
        ranks = range(division.degree) if equal is None else (0, division.degree - 1)
        try:
            parts = []
            for rank in ranks:
                twin = deepcopy_unit(unit)
                take_parts(twin, division.regions, rank, division.degree, part_in_place)
                shapes = _dropped_shapes(twin)
                division.apply(twin, part := _TrialRank(rank, division.degree, watch))
                parts.append(_run(twin, given, part, summed, training=training))
            partial = self._equal(division, plain, watch, parts)
            partial |= frozenset() if equal is None else equal.partial
            dropouts = division.dropouts or _dropouts(whole_shapes, shapes, division.degree)
        except Indivisible as error:
            raise Indivisible(f"{TRIED[0]}: {error}; {ON_A_PART}") from error
        division = replace(division, partial=division.partial | partial, dropouts=dropouts)
        return self._equal_divisions.setdefault(key, division) if equal is None else division

    def _refuse_code_of_whole(self, division: DividedUnit, *, training: bool) -> None:
        """Refuse a large unit whose code does not run on the first rank's part, forward alone."""
        assert self._ready is not None
        unit, given, _ = self._ready
        twin = deepcopy_unit(unit)
        take_parts(twin, division.regions, 0, division.degree, part_in_place)
        watch = _AxisWatch()
        watch.degree = division.degree
        division.apply(twin, watch)
        twin.train(training)
        args, kwargs = tree_map(own_leaf, given)
        torch.manual_seed(0)
        try:
            with _errors_as_reasons(), windowed_products(twin):
                twin(*args, **kwargs)
        except Indivisible as error:
            raise Indivisible(f"{TRIED[0]}: {error}; {ON_A_PART}") from error

    def _equal(
        self, division: DividedUnit, plain: _TrialRun, watch: _AxisWatch, parts: list[_TrialRun]
    ) -> frozenset[str]:
        """Refuse parts that do not make the whole; return which parameters' gradients are parts.

        Some ranks' parts add up to nothing that is known, and sums are not compared.
        """
        assert self._ready is not None
        all_ranks = len(parts) == division.degree
        for part in parts:
            _compare(part.outputs, plain.outputs, "its parts do not make the whole")
        for at, whole in enumerate(watch.sums) if all_ranks else ():
            total = _sum([part.across.sums[at] for part in parts])
            _compare([total], [whole], "its parts do not add up")
        for at, whole_grad in watch.grads.items() if all_ranks else ():
            if whole_grad is not None:
                total = _sum([part.across.grads.get(at) for part in parts])
                _compare([total], [whole_grad], "gradients of its parts do not add up")
        for part in parts:
            _compare(part.inputs, plain.inputs, "gradients of what it is given differ")
        divided = {
            name: (dim, pieces)
            for region in division.regions
            for name, dim, pieces in shards(self._ready[0], region)
        }
        partial = set()
        # Gradients that are zero but for rounding, such as that of the keys' bias.
        largest = [g.largest for g in plain.grads.values() if g is not None]
        noise = NOISE * max(largest, default=0.0)
        for name, noted in plain.grads.items():
            of_parts = [part.grads.get(name) for part in parts]
            if noted is None or any(part_grad is None for part_grad in of_parts):
                if noted is not None or any(part_grad is not None for part_grad in of_parts):
                    raise Indivisible(f"{name} has no gradient on some ranks")
                continue
            dim, pieces = divided.get(name, (0, ()))
            grad = noted.along(dim)
            grads = [part_grad.along(dim) for part_grad in of_parts if part_grad is not None]
            if name in divided:
                ranks = [part.across.rank for part in parts]
                wanted = [part_of(grad, dim, pieces, rank, division.degree) for rank in ranks]
                _compare(grads, wanted, f"the gradient of {name} differs", noise)
            elif all_ranks and _is_partial_sum(grads, grad, noise):
                _compare([_sum(grads)], [grad], f"the gradient of {name} differs", noise)
                partial.add(name)
        return frozenset(partial)


def _key_of(regions: Sequence[Region]) -> Hashable:
    return tuple((r.kind, r.owner, tuple(r.columns.items()), r.rows) for r in regions)


def _ways(region: Region) -> Iterator[Region]:
    """Yield a region with its columns as one matrix each, then as three or two."""
    yield region
    if len(region.columns) not in (1, 2):
        return
    choices = [
        [(size,), *((size // n,) * n for n in (3, 2) if size % n == 0)]
        for (size,) in region.columns.values()
    ]
    for chosen in itertools.islice(itertools.product(*choices), 1, None):
        yield replace(region, columns=dict(zip(region.columns, chosen, strict=True)))


def _in_torch_styles(unit: nn.Module, region: Region, *, partial: bool) -> bool:
    """Return whether torch's ColwiseParallel and RowwiseParallel divide a region as done here."""
    parts = [unit.get_submodule(path) for path in region.paths]
    return not partial and all(isinstance(part, nn.Linear) for part in parts)


def _dropped_shapes(unit: nn.Module) -> dict[str, set[tuple[int, ...]]]:
    """Let modules of nn.Dropout note the shapes that they are given, by path."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for path, part in unit.named_modules():
        if type(part) is nn.Dropout:
            shapes[path] = set()
            part.register_forward_pre_hook(
                lambda _, args, seen=shapes[path]: seen.update(tuple(x.shape) for x in args)
            )
    return shapes


def _dropouts(
    whole: Mapping[str, set[tuple[int, ...]]], part: Mapping[str, set[tuple[int, ...]]], degree: int
) -> dict[str, int]:
    """Return the modules that are given a part, by path, and along which dim."""
    result = {}
    for path, shapes in whole.items():
        if shapes == part[path]:
            continue
        (first_shape, *_), (other, *_) = shapes, part[path]
        dims = [
            at for at, (a, b) in enumerate(zip(first_shape, other, strict=False)) if a == b * degree
        ]
        if len(shapes) > 1 or len(part[path]) > 1 or len(dims) != 1:
            raise Indivisible(f"{path} is given tensors of several shapes, not all of them divided")
        result[path] = dims[0]
    return result


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    grads = [part for part in parts if part is not None]
    return torch.stack(grads).sum(0) if grads else None


def _refuse_indivisible(unit: nn.Module, region: Region, degree: int) -> None:
    for name, dim, pieces in shards(unit, region):
        path, _, attribute = name.rpartition(".")
        if unit.get_submodule(path)._parameters.get(attribute) is None:
            continue
        for size in pieces:
            if size % degree:
                what = "rows" if region.kind == "table" else "output" if dim == 0 else "input"
                word = what if what == "rows" else f"{what} features"
                raise Indivisible(f"{degree} does not divide its {size} {word}")
    if any(len(pieces) > 1 for _, _, pieces in shards(unit, region)) and not all(
        parameter.requires_grad for parameter in unit.parameters()
    ):
        raise Indivisible("several matrices in one are divided where all of them are trained")
    if region.kind == "heads":
        heads = unit.get_submodule(region.owner).num_heads
        if heads % degree:  # type: ignore[operator]
            raise Indivisible(f"{degree} does not divide its {heads} heads")


def _with_random_numbers(unit: nn.Module, *, dense: bool = False) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        if not parameter.is_floating_point():
            raise Indivisible("has weights that are no numbers in floating point")
        memo[id(parameter)] = nn.Parameter(random_weight(parameter.shape, dense=dense))
    for buffer in unit.buffers():
        memo[id(buffer)] = with_data(buffer).clone()
    made = deepcopy_module(unit, memo)
    for _, part in _stacks(made):
        for entry in part._parameters.values():
            if entry is not None and is_overlapping(entry):
                entry.requires_grad_(False)
    return made


def _stacks(unit: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with large stacks of matrices, one for each expert, by path.

    A gradient of one would be as large as all experts, once for each that is read.  It follows from
    what the module is given, forward and backward, which is compared in its place.
    """
    return [
        (path, part)
        for path, part in unit.named_modules()
        if not isinstance(part, (*PRODUCTS, nn.Embedding))
        and any(
            p is not None and p.ndim > 2 and is_overlapping(p) for p in part._parameters.values()
        )
    ]


def _note_stacks(unit: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Let modules with stacks note what they are given, and the gradients of their outputs."""
    given: list[Tensor] = []
    gradients: list[Tensor] = []

    def note(_: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        taken = tree_leaves((args, kwargs))
        given.extend(leaf.detach().clone() for leaf in taken if isinstance(leaf, Tensor))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(gradients.append)

    for _, part in _stacks(unit):
        part.register_forward_hook(note, with_kwargs=True)
    return given, gradients


@contextlib.contextmanager
def _errors_as_reasons() -> Iterator[None]:
    """Raise what the user's code raises as Indivisible."""
    try:
        yield
    except Indivisible:
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
        raise Indivisible(f"{type(error).__name__}: {line}") from error


def _run(
    unit: nn.Module, given: Any, across: Any, summed: frozenset[str], *, training: bool
) -> _TrialRun:
    """Run a copy of a unit, and backward from random gradients that every run has alike.

    Of gradients of `summed` only sums are kept, and nothing of its weights.  With `across` the unit
    is a copy already.
    """
    unit = unit.train(training) if across is not None else deepcopy_unit(unit).train(training)
    args, kwargs = tree_map(own_leaf, given)
    torch.manual_seed(0)
    of_stacks, their_gradients = _note_stacks(unit)
    with _errors_as_reasons(), noted_gradients(unit, summed) as gradients:
        leaves = tree_leaves(unit(*args, **kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _backward(outputs)
    _forget_weights(unit)
    taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return _TrialRun(
        outputs=[output.detach() for output in outputs],
        grads=gradients,
        inputs=[*(x.grad for x in taken), *of_stacks, *their_gradients],
        across=across,
    )


def _forget_weights(twin: nn.Module) -> None:
    """Free the weights of a copy that has run: it refers to itself, and would wait for a sweep."""
    for part in twin.modules():
        part._parameters.clear()


def _backward(outputs: Sequence[Tensor]) -> None:
    """Go backward from random gradients, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    needing = [output for output in outputs if output.requires_grad]
    grads = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in needing]
    if needing:
        torch.autograd.backward(needing, grads)


def _is_partial_sum(parts: Sequence[Tensor | None], whole: Tensor, noise: float) -> bool:
    """Return whether the ranks' values are parts of a gradient to be summed, not copies of it.

    Where it is zero but for rounding, copies are equal to the bit; parts of a sum are not, and
    ranks that did not add them would drift apart.
    """
    copies = [part for part in parts if part is not None]
    if len(copies) < len(parts) or not all(_close(copy, whole, noise) for copy in copies):
        return True
    alike = all(torch.equal(copies[0], other) for other in copies[1:])
    return not alike and float(whole.abs().max()) <= noise


def _close(part: Tensor, other: Tensor, noise: float = 1e-6) -> bool:
    if part.shape != other.shape:
        return False
    if not part.is_floating_point():
        return torch.equal(part, other)
    gap, largest = float((part - other).abs().max()) if part.numel() else 0.0, 0.0
    if math.isfinite(gap):  # as a rule, which is told in a tenth of the time
        largest = float(other.abs().max()) if other.numel() else 0.0
        return gap <= CLOSE * largest + noise
    finite = torch.isfinite(other)
    if not torch.equal(finite, torch.isfinite(part)):
        return False
    if not finite.any():
        return True
    largest = float(other[finite].abs().max())
    return float((part[finite] - other[finite]).abs().max()) <= CLOSE * largest + noise


def _compare(
    values: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
    otherwise: str,
    noise: float = 1e-6,
) -> None:
    if len(values) != len(wanted):
        raise Indivisible(otherwise)
    for value, other in zip(values, wanted, strict=True):
        if (value is None) != (other is None):
            raise Indivisible(otherwise)
        if value is not None and other is not None and not _close(value, other, noise):
            raise Indivisible(otherwise)


def _fits_together(unit: nn.Module, column: str, rows: str) -> bool:
    producer, other = unit.get_submodule(column), unit.get_submodule(rows)
    for part in (producer, other):
        if isinstance(part, CONVOLUTIONS) and (
            part.groups != 1 or part.padding_mode != "zeros" or part.transposed
        ):
            return False
    return isinstance(producer, CONVOLUTIONS) == isinstance(other, CONVOLUTIONS)


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all of these."""
    steps = [path.split(".")[:-1] for path in paths]
    shared = []
    for at in zip(*steps, strict=False):
        if len(set(at)) > 1:
            break
        shared.append(at[0])
    return ".".join(shared)
