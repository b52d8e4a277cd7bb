"""Whether a loss is a sum over samples: that of the example is compared with that of its parts.

A plan cuts the batch into micro-batches and adds what the loss says of each.  A loss whose samples
depend on each other (negatives of the batch, statistics, ranks), or a mean over unequal parts,
would be another one under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from planner.documents.plan import Plan
from planner.errors import BatchError, MeshwrightError
from runtime.batches import part_of
from runtime.loss import counted, plain
from runtime.recorder import Recorder, arguments, has_data, own_tensors
from runtime.recording import Leaf, ModuleTensor, Recording, Value
from runtime.script_model import SAMPLES, Loss, few_samples
from runtime.trial import MOST_CHECKED, copied, untouched
from runtime.whole_batch import whole_batch

MOST_SAMPLES = 32
"""Of a part that is tried, unless a micro-batch has no smaller divisor."""
MOST_ELEMENTS = 1 << 25
"""Of outputs that are tried at once; parts are smaller where samples are large."""
CLOSE = 1e-5
"""How far sums in another order may lie apart in fp32, over the sum of their sizes."""
SHRINK = 0.3
"""By how much outputs are made smaller so that no two samples are alike."""


def check_loss(plan: Plan, module: nn.Module, recorder: Recorder, batch: Any, loss: Loss) -> None:
    """Refuse a loss that is not the sum of those of parts of the example, if the plan cuts batches.

    The module runs on SAMPLES of the example, and its outputs are repeated, each time smaller;
    outputs without samples (a loss inside the module) are made for each part anew.  Of a module
    too large to run here, outputs are random numbers.  A loss that draws cannot be compared.

    Raises BatchError that names `whole_batch`, or where the loss fails on a part.
    """
    parts = plan.mesh.data_shard * plan.mesh.data_replicate * plan.micro_batches
    if parts == 1 or isinstance(loss, whole_batch):
        return
    with untouched(module, recorder.inputs, loss), torch.enable_grad():
        torch.manual_seed(0)
        own = copied(loss) if isinstance(loss, nn.Module) else loss
        trial = _LossTrial(plan, module, recorder, batch, own)
        found = trial.compared()
    if found is not None:
        raise BatchError(
            f"loss: {found}, so that training would depend on how the plan cuts the batch (into "
            f"{parts} micro-batches here). If samples belong together, write "
            "loss=meshwright.whole_batch(loss). Otherwise return a sum over samples and the count "
            'of what was summed, such as (F.cross_entropy(out, y, reduction="sum"), len(y))'
        )


@dataclass(frozen=True, slots=True)
class _LossSums:
    """What a loss says, as numbers that add up over parts."""

    values: dict[str, float]

    @classmethod
    def of(cls, returned: Any, samples: int) -> _LossSums:
        """Read what a loss returned."""
        one = counted(returned, samples)
        values = {"sum": _number(one.total), "count": _number(one.count)}
        for name, value in one.metrics.items():
            pair = value if isinstance(value, tuple) else (value, 0.0)
            values |= {f"metric '{name}'": _number(pair[0])}
            values |= {f"count of metric '{name}'": _number(pair[1])}
        return cls(values)

    def differs(self, parts: list[_LossSums], samples: int) -> str | None:
        """Say which number of the whole is not the sum of the parts'."""
        for name, whole in self.values.items():
            found = [part.values.get(name, math.nan) for part in parts]
            total, size = math.fsum(found), abs(whole) + math.fsum(map(abs, found))
            if math.isfinite(whole) and not abs(whole - total) <= CLOSE * size:
                return (
                    f"its {name} over {samples} samples is {whole:.6g}, and over the same samples "
                    f"in {len(parts)} parts {total:.6g}"
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

    def compared(self) -> str | None:
        """Return what of the whole is not the sum of its parts, if anything."""
        count = sum(parameter.numel() for parameter in self._module.parameters())
        given = (*tree_leaves(self._batch), *self._module.parameters())
        if not has_data(tree_leaves(self._batch)):
            return None
        real = count <= MOST_CHECKED and has_data(given)
        few = few_samples(self._batch, SAMPLES)
        made = self._made(few) if real else _recorded(self._recorder.first, few)
        loose = [leaf for leaf in tree_leaves(made) if _is_float(leaf) and not _is_sampled(leaf)]
        size = self._size(made)
        if real and loose:
            return self._compared(lambda batch, _: self._made(batch, drawing=False), size)
        kinds = [*_repeated(made, 2 * size, real=real), *([lambda *_: made] if real else [])]
        for at, outputs in enumerate(kinds):
            last = real and at == len(kinds) - 1
            try:
                if not last:
                    return self._compared(outputs, size)
                self._sums(outputs, few, range(SAMPLES))
            except _LossError as error:
                if last:
                    raise BatchError(
                        f"loss: fails with the module's outputs ({_said(made)}) and the batch "
                        f"({_said(self._batch)}): {error}; it is loss(outputs, batch), and takes "
                        "its targets out of the batch"
                    ) from error.__cause__
        return None

    def _size(self, made: Any) -> int:
        """Return how many samples a part has: those of a micro-batch, or a divisor of it."""
        elements = sum(
            leaf.numel() // SAMPLES for leaf in tree_leaves(made) if isinstance(leaf, Tensor)
        )
        whole = self._plan.micro_batch
        most = max(1, min(MOST_SAMPLES, MOST_ELEMENTS // max(1, 2 * elements)))
        found = max(size for size in range(1, most + 1) if whole % size == 0)
        return found if found > 1 or whole * elements * 2 > MOST_ELEMENTS else whole

    def _made(self, batch: Any, *, drawing: bool = True) -> Any:
        """Return what a copy of the module makes, in eval mode where samples must not share."""
        module = copied(self._module)
        shares = any(layer.draws for layer in self._recorder.first.layers) or any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()
        )
        if shares and not drawing:
            module.eval()
        args, kwargs = arguments(self._recorder.inputs(own_tensors(batch)))
        with torch.no_grad():
            return module(*args, **kwargs)

    def _compared(self, outputs: _Outputs, size: int) -> str | None:
        samples = 2 * size
        batch = few_samples(self._batch, samples)
        whole = self._sums(outputs, batch, range(samples))
        torch.manual_seed(1)
        if self._sums(outputs, batch, range(samples)).values != whole.values:
            return None  # it draws random numbers
        halves = (range(size), range(size, samples))
        try:
            parts = [self._sums(outputs, part_of(batch, own), own) for own in halves]
        except _LossError as error:
            return f"it can be called on {samples} samples and not on {size} ({error})"
        return whole.differs(parts, samples)

    def _sums(self, outputs: _Outputs, batch: Any, own: range) -> _LossSums:
        made = outputs(batch, own)
        with untouched(self._loss):
            try:
                returned = self._loss(made, own_tensors(batch))
            except MeshwrightError:
                raise
            except Exception as error:
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise _LossError(text) from error
        return _LossSums.of(returned, len(own))


_Outputs = Callable[[Any, range], Any]
"""What the module makes of a batch, which is these of all samples."""


class _LossError(Exception):
    """What a loss raised on outputs that it may not be made for."""


def _repeated(made: Any, samples: int, *, real: bool) -> list[_Outputs]:
    """Return outputs for `samples` samples in the ways that are tried, none alike another."""
    leaves, spec = tree_flatten(made)

    def tiled(change: Callable[[Tensor], Tensor]) -> _Outputs:
        whole = [_tiled(leaf, samples, change) for leaf in leaves]
        return lambda _, own: part_of(tree_unflatten([_fresh(x) for x in whole], spec), own)

    if real:
        return [tiled(_full), tiled(lambda leaf: leaf)]
    return [tiled(torch.randn_like), tiled(torch.rand_like), tiled(lambda x: -torch.rand_like(x))]


def _full(leaf: Tensor) -> Tensor:
    """Return a leaf in fp32 at least: sums of 16 bits are too coarse to compare."""
    return leaf.float() if leaf.element_size() < 4 else leaf


def _tiled(leaf: Any, samples: int, change: Callable[[Tensor], Tensor]) -> Any:
    if not _is_sampled(leaf):
        return leaf
    made = leaf.detach()[[at % SAMPLES for at in range(samples)]]
    if not _is_float(made):
        return made
    made = change(made)
    less = 1 - SHRINK * torch.arange(samples, dtype=made.dtype) / samples
    return made * less.view(-1, *(1,) * (made.ndim - 1))


def _fresh(leaf: Any) -> Any:
    """Return a copy that a loss may change or differentiate by."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _recorded(recording: Recording, few: Any) -> Any:
    """Return outputs of the shapes of a recording, without a run of the module."""
    given = tree_leaves(few)

    def made(leaf: Any) -> Any:
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

    return tree_unflatten([made(leaf) for leaf in recording.result], recording.result_spec)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_sampled(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == SAMPLES


def _number(value: Any) -> float:
    return float(plain(value) if isinstance(value, Tensor) else value)


def _said(tree: Any) -> str:
    """Return what a pytree is made of: `a tuple of Tensor [8, 4], Tensor [8]`."""
    leaves = [
        f"{type(leaf).__name__} {list(leaf.shape)}" if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in tree_leaves(tree)
    ]  # fmt: skip
    if isinstance(tree, Tensor):
        return leaves[0]
    return f"a {type(tree).__name__} of {', '.join(leaves[:4])}"
