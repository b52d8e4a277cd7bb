"""Test whether ranks can divide a sample's positions: a module is run in parts, and compared.

Attention by its name sees the query's own position alone meanwhile, so that what one position gets
must change nothing at the others.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.auxiliary_loss import BatchSums, InnerLosses, running
from meshwright.runtime.core.batches import samples_in
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.loss import loss_sum_of
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.parallel.attention_api import (
    SeenKeys,
    note_keys_bytes,
    positions_in,
    positions_of,
    seeing,
)
from meshwright.runtime.parallel.sharded_dropout import DividedDraws, Draw, NotedDraws, dims_of
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.trace import Node
from meshwright.runtime.tracing.tracer import Recorder, arguments, has_data, own_tensors

_BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def check_positions(
    module: nn.Module, recorder: Recorder, batch: Any, loss: Callable[[Any, Any], Any], why: str
) -> None:
    """Refuse a module that mixes positions elsewhere than in `attention`, or counts them itself.

    `batch` has two samples or more, with positions along dim 1 of all that is cut.  Where attention
    sees a query's own position alone, what one position gets must change nothing at the others, and
    positions in another order must give the same in that order.  `why` is the place in the plan,
    with which a LaunchError begins.  A module without data is not tried.
    """
    length = positions_in(batch)
    if not has_data((*tree_leaves(batch), *module.parameters())):
        return
    with restore_side_effects(module, recorder.inputs, loss), note_keys_bytes() as calls:
        tried = deepcopy_module(module).eval()

        def outputs_of(given: Any) -> Any:
            args, kwargs = arguments(recorder.inputs(given))
            with seeing(SeenKeys(itself=True)):
                return tried(*args, **kwargs)

        whole = outputs_of(batch)
        if not calls:
            raise LaunchError(
                f"{why}, and {type(module).__name__} calls no meshwright.attention(query, key, "
                "value), by which positions are mixed; let its attention be that one, or use 1"
            )
        at = length // 2
        changed = outputs_of(positions_of(batch, length, lambda x: _with_other(x, at)))
        order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
        others = order[order != at]
        for first, other in _pairs(whole, changed, length):
            if not _close_to(first[:, others], other[:, others]):
                raise LaunchError(
                    f"{why}, and {type(module).__name__} mixes positions elsewhere than in "
                    "meshwright.attention (another attention, a convolution, a mean); use 1"
                )
        turned = outputs_of(positions_of(batch, length, lambda x: x[:, order]))
        for one, other in _pairs(whole, turned, length):
            if not _close_to(one[:, order], other):
                raise LaunchError(
                    f"{why}, and {type(module).__name__} counts positions by itself "
                    "(torch.arange); give them with the batch, [sample, position]"
                )


@torch.no_grad()
def check_parts(
    module: nn.Module, recorder: Recorder, batch: Any, loss: Callable[[Any, Any], Any], why: str
) -> Mapping[Draw, int]:
    """Refuse a module or a loss that in training makes something else of parts of the positions.

    Outputs of parts must be parts of the outputs, draws included; losses, counts, losses inside the
    module and sums over the batch must add up.  BatchNorm, whose statistics are made over ranks,
    is left out.  Returns which dim of each draw has positions.  See `check_positions`.
    """
    if not has_data((*tree_leaves(batch), *module.parameters())):
        return {}
    with restore_side_effects(module, recorder.inputs, loss):
        loss_copy = deepcopy_module(loss) if isinstance(loss, nn.Module) else loss
        return _PartsTrial(module, recorder, batch, loss_copy, why).dims()


Around = Callable[[Any, Node], contextlib.AbstractContextManager[None]]


class _PartsTrial:
    """A module in train mode on all positions and on each half of them."""

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        batch: Any,
        loss: Callable[[Any, Any], Any],
        why: str,
    ) -> None:
        self._batch, self._loss = batch, loss
        self._about = f"{why}, and {type(module).__name__}"
        self._length = positions_in(batch)
        every = torch.arange(self._length)
        self._halves = (every[::2], every[1::2])
        self._parts = [self._part_of(batch, half) for half in self._halves]
        self._draws = any(node.draws for node in recorder.first.nodes)
        self._stage = RecordedStage(
            deepcopy_module(module), recorder, 0, len(recorder.first.layers)
        ).train()
        for part in self._stage.modules():
            if isinstance(part, _BatchNorm):
                part.forward = functools.partial(self._keep_statistics, part)  # type: ignore[method-assign]

    def dims(self) -> Mapping[Draw, int]:
        """Return which dim of each draw has positions; LaunchError where parts are none."""
        of_whole, of_parts = BatchSums(), BatchSums()
        shapes: list[dict[Draw, Size]] = [{}, {}]
        whole, inner = self._run(self._batch, of_whole, functools.partial(_noting, shapes[0]))
        dims: Mapping[Draw, int] = {}
        if self._draws or of_whole.places:
            for part in self._parts:
                draws: dict[Draw, Size] = {}
                self._run(part, of_parts, functools.partial(_noting, draws))
                shapes[1] = shapes[1] or draws
            dims = self._dims(*shapes)
            self._compare_sums(of_whole, of_parts)
            whole, inner = self._run(self._batch, of_whole, _seeing_itself)
        outputs = [
            self._run(part, of_parts, functools.partial(_dividing, dims, half, self._length))
            for part, half in zip(self._parts, self._halves, strict=True)
        ]
        for (output, _), half in zip(outputs, self._halves, strict=True):
            for all_of_it, some in _pairs(whole, output, self._length):
                if not _close_to(all_of_it[:, half], some):
                    raise LaunchError(self._otherwise())
        self._compare_inner(inner, [value for _, values in outputs for value in values])
        self._compare_losses(whole, [output for output, _ in outputs], exact=bool(inner))
        return dims

    def _part_of(self, batch: Any, half: Tensor) -> Any:
        return positions_of(batch, self._length, lambda x: x[:, half])

    def _run(self, given: Any, sums: BatchSums, around: Around) -> tuple[Any, list[Tensor]]:
        """Return outputs, and the losses inside of the module."""
        inner: list[Tensor] = []
        self._stage.around = around  # type: ignore[assignment]  # replayed calls have nodes
        with running(InnerLosses(inner.append, None, sums)):
            return self._stage(micro=MicroBatch(own_tensors(given), 0)), inner

    def _keep_statistics(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        if x.shape[1] != norm.num_features:
            raise LaunchError(f"{self._about} has a BatchNorm whose features are positions; use 1")
        return x

    def _otherwise(self) -> str:
        return (
            f"{self._about} makes something else of some positions than of all where it trains: "
            "it mixes them, or draws numbers of positions by other calls than dropout, "
            "torch.rand_like, torch.randn_like and uniform_, normal_, bernoulli_ and exponential_ "
            "of a tensor; draw by one of these, or use 1"
        )

    def _dims(self, whole: Mapping[Draw, Size], part: Mapping[Draw, Size]) -> Mapping[Draw, int]:
        dims = dims_of(whole, part, length=self._length, held=len(self._halves[0]))
        if dims is None:
            raise LaunchError(self._otherwise())
        return dims

    def _compare_sums(self, whole: BatchSums, parts: BatchSums) -> None:
        for sums in (whole, parts):
            sums.finish(lambda own: own)
            sums.loss_count = torch.ones(())
        place = whole.differs(parts)
        if place is not None:
            raise LaunchError(
                f"{self._about} sums something over the batch that is no sum over positions "
                f"(batch_sum in {place or 'it'}); give batch_sum a sum over positions, or use 1"
            )

    def _compare_inner(self, whole: list[Tensor], parts: list[Tensor]) -> None:
        whole_sum, other = (
            math.fsum(float(value) for value in values) for values in (whole, parts)
        )
        size = math.fsum(abs(float(value)) for value in (*whole, *parts))
        if not abs(whole_sum - other) <= _CLOSE * size:
            raise LaunchError(
                f"{self._about} adds losses (add_loss) that are no sums over positions; give sums, "
                "or use 1"
            )

    def _compare_losses(self, whole: Any, parts: list[Any], *, exact: bool) -> None:
        """Compare the mean loss; beside losses inside of the module sum and count by themselves."""
        if isinstance(self._loss, whole_batch):
            leaves = (leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor) and leaf.ndim)
            if any(leaf.ndim < 2 or leaf.shape[1] != self._length for leaf in leaves):
                raise LaunchError(
                    f"{self._about} returns tensors that are not [sample, position, ...], which a "
                    "loss over the whole batch needs of all positions; use 1"
                )
            return
        total, count = self._loss_of_part(whole, self._batch)
        sums = [
            self._loss_of_part(output, part)
            for output, part in zip(parts, self._parts, strict=True)
        ]
        totals, counts = (math.fsum(values) for values in zip(*sums, strict=True))
        size = abs(total) + math.fsum(abs(part_total) for part_total, _ in sums)
        scale = counts / count if count and not exact else 1.0
        if not abs(total * scale - totals) <= _CLOSE * size * max(1.0, scale) or (
            exact and not math.isclose(count, counts, rel_tol=_CLOSE)
        ):
            raise LaunchError(
                f"{self._about} has a loss that is no sum over positions: that of all is "
                f"{total:.7g} of {count:g}, those of halves {totals:.7g} of {counts:g}; return a "
                "sum over positions and the count of what was summed, or use 1"
            )

    def _loss_of_part(self, outputs: Any, batch: Any) -> tuple[float, float]:
        loss_sum = loss_sum_of(self._loss(outputs, own_tensors(batch)), samples_in(batch))
        return float(loss_sum.total), float(loss_sum.count)


_CLOSE = 1e-4


@contextlib.contextmanager
def _seeing_itself(_: Any, node: Node) -> Iterator[None]:
    with seeing(SeenKeys(itself=True)):
        yield


@contextlib.contextmanager
def _noting(draws: dict[Draw, Size], _: Any, node: Node) -> Iterator[None]:
    with _seeing_itself(_, node), NotedDraws(node.name, draws):
        yield


@contextlib.contextmanager
def _dividing(
    dims: Mapping[Draw, int], held: Tensor, length: int, _: Any, node: Node
) -> Iterator[None]:
    with _seeing_itself(_, node), DividedDraws(node.name, dims, held, length):
        yield


def _pairs(first: Any, other: Any, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(tree_leaves(first), tree_leaves(other), strict=True):
        if isinstance(a, Tensor) and a.ndim > 1 and a.shape[1] == length:
            yield a, b


def _close_to(first: Tensor, other: Tensor) -> bool:
    return torch.allclose(first, other, rtol=1e-4, atol=1e-5)


def _with_other(x: Tensor, at: int) -> Tensor:
    """Return x with that of other samples at one position."""
    x = x.clone()
    x[:, at] = x[:, at].roll(1, 0)
    return x
