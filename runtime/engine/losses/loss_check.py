"""Test whether module and loss treat samples one by one: the example is compared with its parts.

A plan cuts the batch into micro-batches and adds what the loss says of each.  A loss whose samples
depend on each other (negatives of the batch, statistics, ranks), or a mean over unequal parts,
would be another one under every plan; so would a module that makes something else of a sample
beside other samples, and a loss that remembers how often it was called.  What a loss trains beside
the module, no plan trains.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import BatchError, MeshwrightError, RecordError
from meshwright.runtime.core import auxiliary_loss as inner_loss
from meshwright.runtime.core.batches import cut_by, part_of, samples_in
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.loss import IGNORED, loss_sum_of, plain
from meshwright.runtime.core.memory_tracker import is_out_of_memory
from meshwright.runtime.core.side_effects import (
    MOST_CHECKED,
    Changes,
    PythonNumbers,
    RandomNumbers,
    deepcopy_module,
    restore_side_effects,
    seed_all,
)
from meshwright.runtime.engine.losses.counted_mean import BatchCount, CountedMean, counts_of
from meshwright.runtime.engine.module_graph import SAMPLES, Loss, few_samples
from meshwright.runtime.tracing.trace import Leaf, ModuleTensor, Recording, Value
from meshwright.runtime.tracing.trace_hooks import COLLECTIVES
from meshwright.runtime.tracing.tracer import Recorder, arguments, has_data, own_tensors

MOST_SAMPLES = 32
"""Largest number of samples in a tried part, unless a micro-batch has no smaller divisor."""
MOST_ELEMENTS = 1 << 25
"""Largest number of output elements tried at once; parts are smaller where samples are large."""
CLOSE = 1e-5
"""Largest fp32 difference of sums in another order, relative to the sum of absolute terms."""
MOST_TRIAL_FLOPS = 10**10
"""Largest cost in FLOPs of a tried forward, as parameters and elements of the batch tell."""
CLOSE_OUTPUTS = 1e-3
"""Largest difference of a sample's outputs among other samples, relative to the largest output."""
SHRINK = 0.3
"""By how much outputs are made smaller so that no two samples are alike."""
UNLIKE = (1.0, 1e-3, 10.0, 100.0, -1.0, -100.0)
"""Factors of the second half of the samples: what a loss selects by value then lies in one half."""


def check_loss(
    plan: Plan,
    module: nn.Module,
    recorder: Recorder,
    batch: Any,
    loss: Loss,
    *,
    by_micro_batch: bool = False,
) -> Loss:
    """Refuse a loss that is not the sum of those of parts of the example, if the plan cuts batches.

    Returns the loss, or a mean as what adds up: see counted_mean.

    The module runs on SAMPLES of the example, and its outputs are repeated, each time smaller;
    outputs without samples (a loss inside the module) are made for each part anew.  Of a module
    too large to run here, outputs are random numbers.  A loss that draws cannot be compared.  A
    module that can be run here is also run on samples at once and in parts, unless its user says
    that its micro-batches are meant.

    Raises BatchError that names `whole_batch`, or where the loss fails on a part, has parameters of
    its own that are trained, or remembers its calls; RecordError where the module's samples depend
    on each other.
    """
    parts = plan.most_micro_batches
    cut = parts > 1 and not isinstance(loss, whole_batch)
    with restore_side_effects(module, recorder.inputs, loss), torch.enable_grad():
        torch.manual_seed(0)
        loss_copy = deepcopy_module(loss) if isinstance(loss, nn.Module) else loss
        trial = _LossTrial(plan, module, recorder, batch, loss_copy)
        trial.refuse_own_parameters()
        reason = trial.difference() if cut else None
        unequal = trial.unequal_parts() if cut and reason is None else None
        count = None
        if (reason or unequal) and plan.mesh.context == 1:
            count = trial.count()
        if count is not None:
            reason = None
        elif unequal is not None:
            raise BatchError(unequal.refusal(parts))
        if cut and reason is None:
            trial.refuse_memory(parts)
        apart = parts > 1 and not by_micro_batch
        other = trial.coupled_output() if apart and reason is None else None
    if other is not None:
        raise RecordError(
            f"{type(module).__name__}: {other}, so training would depend on how the plan cuts the "
            f"batch (into {parts} micro-batches here). Batch tensors are [sample, ...] "
            "(batch_first=True). Sum over the whole batch by meshwright.batch_sum, or compute it "
            "in loss=meshwright.whole_batch(loss). Write Engine(by_micro_batch=True) if each "
            "micro-batch is to be taken by itself"
        )
    if reason is not None:
        raise BatchError(
            f"loss: {reason}, so training would depend on how the plan cuts the batch (into "
            f"{parts} micro-batches here).{_whole_leaf(batch)} If samples belong together, write "
            "loss=meshwright.whole_batch(loss). Otherwise return a sum over samples and the number "
            'of its terms, such as (F.cross_entropy(out, y, reduction="sum"), len(y))'
        )
    return loss if count is None else CountedMean(loss, count)


@dataclass(frozen=True, slots=True)
class _UnequalParts:
    """A loss that divides by what counts in a part of a batch."""

    leaf: str
    """Leaf of the batch that determines what counts."""
    ignored: str
    difference: str

    def refusal(self, parts: int) -> str:
        """Return why a plan that cuts a batch into parts is refused, and what to write."""
        return (
            f"loss: where some of {self.leaf} is {self.ignored}, {self.difference}. It divides by "
            "the number of targets that count, and micro-batches have unequal numbers of them, so "
            f"training would depend on how the plan cuts the batch (into {parts} micro-batches "
            "here). Return the sum and the number of its terms, such as (F.cross_entropy("
            f'out, y, ignore_index=..., reduction="sum"), ({self.leaf} != {self.ignored}).sum()), '
            "not len(y). A sum of several means has no such count: write "
            "loss=meshwright.whole_batch(loss)"
        )


@dataclass(frozen=True, slots=True)
class _LossSums:
    """The values of a loss, as numbers that add up over parts."""

    values: dict[str, float]

    @classmethod
    def read(cls, returned: Any, samples: int) -> _LossSums:
        """Read what a loss returned."""
        loss_sum = loss_sum_of(returned, samples)
        values = {"sum": _number(loss_sum.total), "count": _number(loss_sum.count)}
        for name, value in loss_sum.metrics.items():
            pair = value if isinstance(value, tuple) else (value, 0.0)
            values |= {f"metric '{name}'": _number(pair[0])}
            values |= {f"count of metric '{name}'": _number(pair[1])}
        return cls(values)

    def differs(self, parts: list[_LossSums], samples: int) -> str | None:
        """Say which number of the whole is not the sum of the parts'."""
        for name, whole in self.values.items():
            values = [part.values.get(name, math.nan) for part in parts]
            total, size = math.fsum(values), abs(whole) + math.fsum(map(abs, values))
            if math.isfinite(whole) and not abs(whole - total) <= CLOSE * size:
                return (
                    f"its {name} over {samples} samples is {whole:.6g}, but {total:.6g} over the "
                    f"same samples in {len(parts)} parts"
                )
        return None


class _LossTrial:
    """A loss called on outputs for a few samples, and on parts of them."""

    def __init__(
        self, plan: Plan, module: nn.Module, recorder: Recorder, batch: Any, loss: Loss
    ) -> None:
        self._plan = plan
        self._module = module
        self._recorder = recorder
        self._batch = batch
        self._loss = loss
        self._tried: tuple[_Outputs, int] | None = None
        """The outputs that the loss was called with, and how many samples a part has."""

    def difference(self) -> str | None:
        """Return what of the whole is not the sum of its parts, if anything."""
        if not has_data(tree_leaves(self._batch)):
            return None
        real = self._is_real()
        few = few_samples(self._batch, SAMPLES)
        few_outputs = (
            self._outputs_of(few) if real else _recorded_outputs(self._recorder.first, few)
        )
        loose = [
            leaf for leaf in tree_leaves(few_outputs) if _is_float(leaf) and not _is_sampled(leaf)
        ]
        size = self._size(few_outputs)
        if real and loose:
            return self._difference_at(lambda batch, _: self._remade(batch), size, remade=True)
        for outputs in _repeat_outputs(few_outputs, 2 * size, real=real):
            with contextlib.suppress(_LossError):
                return self._difference_at(outputs, size)
        if not real:
            return None
        try:
            self._sums(lambda *_: few_outputs, few, range(SAMPLES))
        except _LossError as error:
            with contextlib.suppress(_LossError):  # it may differentiate what the module made
                difference = self._difference_at(
                    lambda batch, _: self._remade(batch, graph=True), size, remade=True
                )
                self._refuse_second_graph()
                return difference
            raise BatchError(
                f"loss: it fails on the module's outputs ({_structure_text(few_outputs)}) and the "
                f"batch ({_structure_text(self._batch)}): {error}. It is called as "
                "loss(outputs, batch), and takes its targets from the batch"
            ) from error.__cause__
        return None

    def _refuse_second_graph(self) -> None:
        """Refuse a loss that goes through the module's graph, where ranks divide what is in it."""
        plan = self._plan
        if plan.zero or plan.is_cut or plan.offload != "none":
            raise BatchError(
                "loss: it differentiates what the module made, while this plan has parameters or "
                "layers elsewhere; call torch.autograd.grad in forward and return the gradient, or "
                "use a plan without ZeRO, pipeline and offload"
            )

    def unequal_parts(self) -> _UnequalParts | None:
        """Return where the loss is a mean over what counts, of which the example has it in parts.

        Targets of half the samples are set in part to what the loss ignores, masks and weights to
        0, and lengths are halved.
        """
        if self._tried is None:
            return None
        outputs, size = self._tried
        for path, ignored, batch in self._with_less_in_parts(self._numbers()):
            try:
                difference = self._difference_of(batch, outputs, size)
            except _LossError:
                continue  # the number means nothing there
            if difference is not None:
                return _UnequalParts(f"batch{keystr(path)}", ignored, difference)
        return None

    def count(self) -> BatchCount | None:
        """Return over what the loss is a mean, if it is one over something that a batch tells."""
        if self._tried is None:
            return None
        outputs, size = self._tried
        few, numbers = few_samples(self._batch, 2 * size), self._numbers()
        batches = [few, *(batch for _, _, batch in self._with_less_in_parts(numbers))]
        means: list[tuple[Any, list[tuple[Any, float]]]] = []
        for batch in batches:
            halves = [range(size), range(size, 2 * size)]
            parts = [part_of(batch, half) for half in halves]
            try:
                mean = self._mean(outputs, batch, range(2 * size))
                of_parts = [self._mean(outputs, *part) for part in zip(parts, halves, strict=True)]
            except _LossError:
                continue
            numbered = [value for value in of_parts if value is not None]
            if mean is None or len(numbered) < len(parts):
                return None
            means.append(((batch, mean), list(zip(parts, numbered, strict=True))))
        counts = counts_of(few, {*numbers, IGNORED})
        return next((count for count in counts if _explains(count, means)), None)

    def _mean(self, outputs: _Outputs, batch: Any, samples: range) -> float | None:
        """Return what the loss says of a batch; None where it does not return a mean."""
        with restore_side_effects(self._loss):
            returned = self._call_loss(outputs(batch, samples), batch)
        return _number(returned) if isinstance(returned, Tensor) else None

    def _numbers(self) -> frozenset[int]:
        """Return the numbers that the loss compares integers of the batch with, or ignores."""
        assert self._tried is not None
        outputs, size = self._tried
        few = few_samples(self._batch, 2 * size)
        with _NotedNumbers() as numbers, contextlib.suppress(_LossError):
            self._sums(outputs, few, range(2 * size))
        return frozenset(numbers.values)

    def _with_less_in_parts(self, numbers: Collection[int]) -> Iterator[tuple[Any, str, Any]]:
        """Yield batches of whose second part less counts: which leaf, what it is there, batch."""
        assert self._tried is not None
        _, size = self._tried
        few = few_samples(self._batch, 2 * size)
        for at, (path, leaf) in enumerate(tree_flatten_with_path(few)[0]):
            for ignored in _ignored_in(leaf, numbers, size):
                number = "False" if leaf.dtype == torch.bool else str(ignored)
                yield path, number, _with_less(few, at, ignored, size)
            if isinstance(leaf, Tensor) and leaf.ndim == 1 and _is_integer(leaf):
                yield path, "smaller", _with_less(few, at, None, size)

    def refuse_own_parameters(self) -> None:
        """Refuse a loss that trains what the module does not return to it."""
        if not self._is_real():
            return
        few = few_samples(self._batch, SAMPLES)
        outputs = tree_map(_fresh, self._outputs_of(few))
        try:
            loss_sum = loss_sum_of(self._call_loss(outputs, few), SAMPLES)
        except _LossError:
            return  # what is wrong with it is said by `difference`, or by the first step
        given = {id(leaf) for leaf in tree_leaves((outputs, few))}
        parameter = next(
            (leaf for leaf in _trained_by(loss_sum.total) if id(leaf) not in given), None
        )
        if parameter is not None:
            raise BatchError(
                f"loss: it has a parameter of its own ({list(parameter.shape)}), and an Engine "
                "trains only those of its module. Move it into the module, and return it from "
                "forward or add a penalty by meshwright.add_loss. If it is not to be trained, "
                "write requires_grad_(False)"
            )

    def refuse_memory(self, parts: int) -> None:
        """Refuse a loss that says something else of the same samples when it is called again."""
        if not self._is_real():
            return
        few = few_samples(self._batch, SAMPLES)
        outputs = self._outputs_of(few)
        before = Changes((self._loss,))
        if before.generators:
            return
        reasons = []
        with restore_side_effects(self._loss):
            for _ in range(2):
                seed_all(0)
                try:
                    returned = self._call_loss(tree_map(_fresh, outputs), few)
                except _LossError:
                    return
                reasons.append(_LossSums.read(returned, SAMPLES).values)
            changed = before.changes()
        if str(reasons[0]) != str(reasons[1]):
            what = f" ('{min(changed)}' changes)" if changed else ""
            raise BatchError(
                f"loss: a second call on the same samples gives another value{what}. A step calls "
                f"it {parts} times here, on several ranks, so training would depend on the plan. "
                "Change its state in the training loop between steps, or give the state with the "
                "batch as a tensor without dims"
            )

    def coupled_output(self) -> str | None:
        """Return how an output depends on other samples, if any does; BatchNorms are known to.

        A module that draws, or asks for sums over the batch, cannot be compared.  A device may have
        room for a micro-batch and no more; then the parts are those of a micro-batch.
        """
        if not self._is_real():
            return None
        size, count = self._trial_parts()
        smaller = max((part for part in range(1, size // 2 + 1) if size % part == 0), default=size)
        for part, parts in ((size, count), (smaller, size // smaller)):
            if parts < 2:
                return None
            try:
                return self._coupled_of(part, parts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        return None

    def _coupled_of(self, size: int, count: int) -> str | None:
        batch = few_samples(self._batch, size * count)
        coupled = self._coupled_in(batch, size, count)
        if coupled is None:  # what is selected by value may lie evenly in the example
            with contextlib.suppress(Exception):  # and may take no such values
                coupled = self._coupled_in(tree_map(_unlike, batch), 1, size * count)
        return coupled

    def _coupled_in(self, batch: Any, size: int, count: int) -> str | None:
        """Return how an output depends on other samples of a batch, of `count` parts."""
        seed_all(0)
        before, asked = RandomNumbers(), inner_loss.times_asked()
        whole = self._outputs_of(batch, drawing=False)
        drew = before.drew_torch() or not before.drew_as(PythonNumbers())
        if drew or inner_loss.times_asked() > asked:
            return None
        parts = [self._outputs_of(part, drawing=False) for part in cut_by(batch, size)]
        for leaf, *of_parts in zip(tree_leaves(whole), *map(tree_leaves, parts), strict=False):
            if isinstance(leaf, Tensor) and all(isinstance(part, Tensor) for part in of_parts):
                apart = _distance(leaf, of_parts, size)
                if apart > CLOSE_OUTPUTS:
                    return (
                        "the output of a sample depends on the other samples of its batch (it "
                        f"differs by {apart:.2g} of its size between batches of {size * count} and "
                        f"{size} samples)"
                    )
        return None

    def _trial_parts(self) -> tuple[int, int]:
        """Return how many samples are run at once, and in how many parts all that are run.

        Those of a micro-batch if that is little work; else few, of a divisor of its size.
        """
        samples, whole = samples_in(self._batch), self._plan.micro_batch
        weights = sum(parameter.numel() for parameter in self._module.parameters())
        leaves = (leaf for leaf in tree_leaves(self._batch) if isinstance(leaf, Tensor))
        flops = 2 * weights * max(1, sum(leaf.numel() for leaf in leaves) // samples)
        most = max(2 * SAMPLES, min(2 * MOST_SAMPLES, MOST_TRIAL_FLOPS // max(1, flops)))
        size = max(n for n in range(1, most // 2 + 1) if whole % n == 0)
        return size, min(samples, most) // size

    def _is_real(self) -> bool:
        """Return whether module and batch have values, and the module is small enough to run."""
        count = sum(parameter.numel() for parameter in self._module.parameters())
        given = (*tree_leaves(self._batch), *self._module.parameters())
        return count <= MOST_CHECKED and has_data(given)

    def _size(self, outputs: Any) -> int:
        """Return how many samples a part has: those of a micro-batch, or a divisor of it."""
        elements = sum(
            leaf.numel() // SAMPLES for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)
        )
        whole = self._plan.micro_batch
        most = max(1, min(MOST_SAMPLES, MOST_ELEMENTS // max(1, 2 * elements)))
        size = max(size for size in range(1, most + 1) if whole % size == 0)
        return size if size > 1 or whole * elements * 2 > MOST_ELEMENTS else whole

    def _outputs_of(self, batch: Any, *, drawing: bool = True, graph: bool = False) -> Any:
        """Return what a copy of the module makes, in eval mode where samples must not share.

        With a `graph` a loss can differentiate it by what it was made of.
        """
        module = deepcopy_module(self._module)
        norms = [
            norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        ]
        shares = norms or any(layer.draws for layer in self._recorder.first.layers)
        if shares and not drawing:
            module.eval()
            for norm in norms:  # one without statistics takes those of its samples
                if norm.running_mean is None:
                    like = next(module.parameters())
                    norm.running_mean = like.new_zeros(norm.num_features)
                    norm.running_var = like.new_ones(norm.num_features)
        args, kwargs = arguments(self._recorder.inputs(own_tensors(batch)))
        outputs = module(*args, **kwargs)  # with autograd, as in training: it may use gradients
        if graph:
            return outputs
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)

    def _remade(self, batch: Any, *, graph: bool = False) -> Any:
        """Return what the module makes of a batch, which may be one that it does not take."""
        try:
            return self._outputs_of(batch, drawing=False, graph=graph)
        except MeshwrightError:
            raise
        except Exception as error:
            raise _LossError(str(error)) from error

    def _difference_at(self, outputs: _Outputs, size: int, *, remade: bool = False) -> str | None:
        """Return what differs on samples of the example, or where its halves are unlike.

        Outputs are the module's for a batch if they are `remade`, and else repeated.
        """
        few = few_samples(self._batch, 2 * size)
        difference = self._difference_of(few, outputs, size)
        self._tried = outputs, size
        for factor in UNLIKE if difference is None else ():
            batch, unlike = few, _with_unlike_halves(outputs, size, factor)
            if remade:
                batch, unlike = _unlike_halves(few, size, factor), outputs
            try:
                difference = self._difference_of(batch, unlike, size)
            except _LossError:
                continue  # such values may be none that it takes
            if difference is not None:
                self._tried = unlike, size
                return f"where its two halves are unlike, {difference}"
        return difference

    def _difference_of(self, batch: Any, outputs: _Outputs, size: int) -> str | None:
        samples = 2 * size
        torch.manual_seed(0)
        whole = self._sums(outputs, batch, range(samples))
        torch.manual_seed(1)
        if self._sums(outputs, batch, range(samples)).values != whole.values:
            return None  # it draws random numbers
        halves = (range(size), range(size, samples))
        try:
            parts = [self._sums(outputs, part_of(batch, half), half) for half in halves]
        except _LossError as error:
            return f"it works on {samples} samples but not on {size} ({error})"
        return whole.differs(parts, samples)

    def _sums(self, outputs: _Outputs, batch: Any, samples: range) -> _LossSums:
        half = outputs(batch, samples)
        with restore_side_effects(self._loss):
            returned = self._call_loss(half, batch)
        return _LossSums.read(returned, len(samples))

    def _call_loss(self, outputs: Any, batch: Any) -> Any:
        """Call the loss."""
        try:
            with _LoneCollectives() if self._plan.is_cut else contextlib.nullcontext():
                return self._loss(outputs, own_tensors(batch))
        except MeshwrightError:
            raise
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise _LossError(text) from error


class _LoneCollectives(TorchDispatchMode):
    """Refuses collectives of a loss that the ranks of one stage alone call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            name = func.__name__.partition(".")[0].strip("_")
            raise BatchError(
                f"loss: calls {name} of torch.distributed, and only ranks of the last stage call "
                "the loss, so that all would wait for each other; engine.step sums the loss over "
                "all ranks by itself (StepResult.loss), else use a plan without pipeline"
            )
        return func(*args, **(kwargs or {}))


_Outputs = Callable[[Any, range], Any]
"""Outputs of the module for a batch, whose samples are those with these indices."""


class _LossError(Exception):
    """An error raised by a loss on outputs that it may not be made for."""


class _NotedNumbers(TorchFunctionMode):
    """Notes the numbers that integers of a batch are compared with, and those that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.values: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("eq", "ne", "__eq__", "__ne__") and len(args) > 1:
            self.values |= {args[1]} if type(args[1]) is int else set()
        ignored = kwargs.get("ignore_index", IGNORED)
        if ignored != IGNORED:
            self.values.add(ignored)
        return func(*args, **kwargs)


def _ignored_in(leaf: Any, numbers: Collection[int], size: int) -> list[int]:
    """Return the numbers that may say of an element of a leaf that it does not count."""
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return []
    if leaf.ndim == 1 and size < 2:
        return []
    if leaf.is_floating_point():
        return [0]
    if leaf.ndim == 1:  # a class for each sample: one that does not count is said
        return [0] if leaf.dtype == torch.bool else sorted(numbers)
    if leaf[0].numel() < 2:
        return []
    is_mask = leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all())
    return (
        sorted({*numbers, IGNORED, *([0] if is_mask else [])}) if leaf.dtype != torch.bool else [0]
    )


def _is_integer(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and leaf.dtype != torch.bool


def _explains(count: BatchCount, means: Sequence[tuple[Any, Sequence[tuple[Any, float]]]]) -> bool:
    """Tell whether means of batches are those of their parts, each of them so often counted."""
    varies = False
    for (batch, whole), parts in means:
        counts = [float(count(part)) for part, _ in parts]
        total = float(count(batch)) * whole
        sums = [mean * number for (_, mean), number in zip(parts, counts, strict=True) if number]
        size = abs(total) + math.fsum(map(abs, sums))
        if not math.isfinite(total) or not abs(total - math.fsum(sums)) <= CLOSE * size:
            return False
        varies = varies or len(set(counts)) > 1
    return varies


def _with_less(few: Any, at: int, ignored: int | None, size: int) -> Any:
    """Return a batch of whose second part less counts; without a number, lengths are halved."""
    leaves, spec = tree_flatten(few)
    leaf = leaves[at] = leaves[at].clone()
    if ignored is None:
        leaf[size:] = (leaf[size:] + 1) // 2
    elif leaf.ndim == 1:
        leaf[size : size + size // 2] = ignored
    else:
        rows = leaf.flatten(1)
        rows[size:, rows.shape[1] // 2 :] = ignored
        leaves[at] = rows.view(leaf.shape)
    return tree_unflatten(leaves, spec)


def _repeat_outputs(outputs: Any, samples: int, *, real: bool) -> list[_Outputs]:
    """Return outputs for `samples` samples in the ways that are tried, none alike another."""
    leaves, spec = tree_flatten(outputs)

    def tile(change: Callable[[Tensor], Tensor]) -> _Outputs:
        whole = [_tile_leaf(leaf, samples, change) for leaf in leaves]
        return lambda _, samples: part_of(tree_unflatten([_fresh(x) for x in whole], spec), samples)

    if real:
        return [tile(_full), tile(lambda leaf: leaf)]
    return [tile(torch.randn_like), tile(torch.rand_like), tile(lambda x: -torch.rand_like(x))]


def _with_unlike_halves(outputs: _Outputs, size: int, factor: float) -> _Outputs:
    """Return outputs for `2 * size` samples whose halves are unlike."""

    def unlike(batch: Any, samples: range) -> Any:
        whole = outputs(batch, range(2 * size))
        return part_of(_unlike_halves(whole, size, factor), samples)

    return unlike


def _unlike_halves(tree: Any, size: int, factor: float) -> Any:
    """Return samples of which those with even numbers come first, and the others are scaled."""
    samples = 2 * size
    rows = [*range(0, samples, 2), *range(1, samples, 2)]

    def unlike(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != samples:
            return leaf
        leaf = leaf[rows]
        if not _is_float(leaf) or _is_mask(leaf):
            return leaf
        return torch.cat((leaf[:size], factor * leaf[size:]))

    return tree_map(unlike, tree)


def _is_mask(leaf: Tensor) -> bool:
    return bool(leaf.any()) and bool(((leaf == 0) | (leaf == 1)).all())


def _full(leaf: Tensor) -> Tensor:
    """Return a leaf in fp32 at least: sums of 16 bits are too coarse to compare."""
    return leaf.float() if leaf.element_size() < 4 else leaf


def _tile_leaf(leaf: Any, samples: int, change: Callable[[Tensor], Tensor]) -> Any:
    if not _is_sampled(leaf):
        return leaf
    tile = leaf.detach()[[at % SAMPLES for at in range(samples)]]
    if not _is_float(tile) or _is_mask(tile):
        return tile
    tile = change(tile)
    less = 1 - SHRINK * torch.arange(samples, dtype=tile.dtype) / samples
    return tile * less.view(-1, *(1,) * (tile.ndim - 1))


def _fresh(leaf: Any) -> Any:
    """Return a copy that a loss may change or differentiate by."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _trained_by(total: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a loss's backward gives a gradient."""
    waiting, seen = [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        waiting += [function for function, _ in node.next_functions]


def _unlike(leaf: Any) -> Any:
    """Return a leaf of a batch in another order, its samples a quarter to four times as large."""
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    leaf = leaf.roll(1, 0)
    if not leaf.is_floating_point():
        return leaf
    sizes = 2.0 ** (torch.arange(len(leaf), device=leaf.device) * 3 % 5 - 2)
    return leaf * sizes.to(leaf.dtype).view(-1, *[1] * (leaf.ndim - 1))


def _distance(whole: Tensor, parts: Sequence[Tensor], size: int) -> float:
    """Return how far an output of samples lies from those of parts of `size`, over its size.

    A dim may have several rows for each sample, one after the other or view by view.  0 where no
    dim has as many for each.
    """
    first, count = parts[0].shape, size * len(parts)
    for dim, length in enumerate(whole.shape):
        rows = length // count
        beside = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        if length != rows * count or not whole.numel():
            continue
        if any(part.ndim != whole.ndim or part.shape[dim] != rows * size for part in parts):
            continue
        if beside != (*first[:dim], *first[dim + 1 :]):
            continue
        at_once = whole.double()
        views = [part.double().unflatten(dim, (rows, size)) for part in parts]
        ordered = (torch.cat([view.flatten(dim, dim + 1) for view in views], dim),
                   torch.cat(views, dim + 1).flatten(dim, dim + 1))  # fmt: skip
        gap = min(float((at_once - other).abs().nan_to_num(0.0).max()) for other in ordered)
        return gap / max(float(at_once.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-12)
    return 0.0


def _whole_leaf(batch: Any) -> str:
    """Return in words which list of the batch is as long as its samples and is not cut, if any."""
    samples = samples_in(batch)
    leaves = batch if isinstance(batch, Mapping | tuple | list) else ()
    for key, leaf in leaves.items() if isinstance(leaves, Mapping) else enumerate(leaves):
        numbers = isinstance(leaf, list) and all(isinstance(x, int | float) for x in leaf)
        if (numbers or hasattr(leaf, "__array_interface__")) and len(leaf) == samples:
            kind = type(leaf).__name__
            return f" The batch's [{key!r}] is a {kind}, which cannot be cut: make it a tensor."
    return ""


def _recorded_outputs(recording: Recording, few: Any) -> Any:
    """Return outputs of the shapes of a recording, without a run of the module."""
    given = tree_leaves(few)

    def with_values(leaf: Any) -> Any:
        match leaf:
            case Value(at):
                value = recording.values[at]
                return torch.zeros(value.shape, dtype=value.dtype)
            case Leaf(at):
                return given[at]
            case ModuleTensor():
                return torch.ones(())
            case _:
                return leaf

    return tree_unflatten([with_values(leaf) for leaf in recording.result], recording.result_spec)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_sampled(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == SAMPLES


def _number(value: Any) -> float:
    return float(plain(value) if isinstance(value, Tensor) else value)


def _structure_text(tree: Any) -> str:
    """Return what a pytree is made of: `a tuple of Tensor [8, 4], Tensor [8]`."""
    leaves = [
        f"{type(leaf).__name__} {list(leaf.shape)}" if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in tree_leaves(tree)
    ]  # fmt: skip
    if isinstance(tree, Tensor):
        return leaves[0]
    return f"a {type(tree).__name__} of {', '.join(leaves[:4])}"
