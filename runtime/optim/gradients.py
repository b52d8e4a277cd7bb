"""Gradients of this rank's parameters: made whole, measured over all ranks, scaled and clipped.

Optimizers work on the plain local parts of DTensors, so they do no work per DTensor and do not mind
that parameters lie on different meshes; `unsharded` puts the parts together again.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.planner.errors import BatchError, LaunchError, RecordError
from meshwright.runtime.core.local_parts import divided
from meshwright.runtime.core.loss import LossScale
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.optim.replica_check import Agreement, Declared, description
from meshwright.runtime.parallel.gradient_compression import Mean
from meshwright.runtime.parallel.tensor_regions import part_of, whole_of
from meshwright.runtime.run.preemption import take_notice
from meshwright.runtime.tracing.unused_parameters import Participation

_NORM_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot:
    """One parameter of this rank.  `local` is its local part, sharing the parameter's memory."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    copies: int
    """Number of ranks that hold these same values."""
    partial: bool
    """The gradient must be summed over the tensor axis."""
    pieces: int
    """Matrices that lie one above the other in dim 1."""
    tied: dist.ProcessGroup | None
    """Stages that hold a copy each, whose gradients must be summed."""
    factor: float
    """Factor that turns the gradient into the mean over the global batch."""
    sections: tuple[int, ...] = ()
    """Sizes of the matrices that lie one behind the other in dim 0, of each of which this rank has
    its part along the tensor axis; DTensor has no placement for that."""
    reduced: bool = False
    """The sum over `tied` stages is part of that over replicas (runtime/parallel/replicas.py)."""
    copies_here: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    """Copies of a tied parameter on other stages of this rank, divided alike: parameter and local
    part.  Their gradients are added to this one's, and they take its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """The measurements of a step over all ranks, on the device."""

    total: Tensor
    """Sum of the loss over all that counts."""
    count: Tensor
    norm: Tensor
    """Norm of the gradient of the mean loss, before clipping; not finite where fp16 overflowed."""
    factor: Tensor
    """Factor that turns gradients into those of the mean loss; 0 if nothing counts."""
    checks: Tensor
    """[5] How many gradients are zeros that ranks put in place of none; how many ranks had a
    forward that failed, or that changed a copy of a parameter; the sums of the words of replicas
    (see Agreement), where they are compared in this step; and who asks that this step is the last
    one (see `ending`)."""

    @property
    def report(self) -> Tensor:
        """[mean loss, gradient norm, count, by how much digests of replicas differ, `ending`]."""
        drift, ending = self.checks[2:4].abs().sum(), self.checks[4]
        return torch.stack((self.total / self.count, self.norm.double(), self.count, drift, ending))


def refuse_failed(failed: Exception | None, place: Place) -> None:
    """Raise what failed on a rank, on all of them; each calls it with what failed there, if any.

    Other ranks have the same words, and the traceback of that rank behind them.
    """
    here = None
    if failed is not None:
        here = [type(failed).__name__, str(failed), "".join(traceback.format_exception(failed))]
    every = all_gather_json(here) if place.mesh is not None else [here]
    if failed is not None:
        raise failed
    for rank, there in enumerate(every):
        if there is not None:
            kind, text, trace = there
            error = _SAME_ON_ALL_RANKS.get(kind, LaunchError)
            failure = error(text if kind in _SAME_ON_ALL_RANKS else f"rank {rank}: {kind}: {text}")
            raise failure from RuntimeError(f"on rank {rank}, before an update:\n{trace}")


def refuse_changed_copy(name: str, who: str) -> Never:
    """Refuse a forward that changes a parameter where passes compute with a copy of it."""
    raise LaunchError(
        f"{name}: {who} changes this parameter in place, as Embedding(max_norm=...) does; under "
        "ZeRO or mixed precision that is a copy, which is thrown away: change it after the step, "
        "or train with zero 0 in fp32 on one data rank"
    )


_SAME_ON_ALL_RANKS = {error.__name__: error for error in (BatchError, LaunchError, RecordError)}
"""Errors that say what to do, whichever rank has them."""


class Gradients:
    """The gradients of one rank's parameters, after the last backward of a step."""

    def __init__(
        self,
        slots: Sequence[Slot],
        place: Place,
        *,
        device: torch.device,
        divisor: float,
        scale: LossScale | None = None,
        mean: Mean | None = None,
    ) -> None:
        """`divisor` is what sums of losses are divided by before backward (runtime/core/loss.py).

        `scale` is fp16's.  `mean` makes that over replicas, where backward does not.
        """
        self.place = place
        self.device = device
        self.divisor = divisor
        self.scale = scale or LossScale(device, active=False)
        self.steps = torch.zeros((), dtype=torch.int64)
        """Updates so far."""
        self.agreement: Agreement | None = None
        """The comparison of replicas, set once ranks have agreed on what they hold."""
        self._mean = mean
        self.use(slots)
        self._lacking: set[Slot] = set()
        """Parameters without a gradient in this step, for which zeros are summed."""
        self._names: list[str] | None = None
        """Names of all trained parameters of all ranks, in order."""
        self.participation: Participation | None = None
        """Participation of parameters that FSDP reduces, which all have a gradient then."""
        self.failure: Callable[[], Exception | None] = lambda: None
        """Takes what went wrong in this step's forwards here, which all ranks are to know."""
        self._failed: Exception | None = None
        self.tracks_unused = False
        """True if each step notes which parameters took no part in it."""
        self.unused: Mapping[str, tuple[int, ...]] = {}
        """Parameters that took no part in the last step, and on which ranks."""
        self._without: set[str] = set()
        """Parameters that took no part on this rank."""
        self.out_of_time: Callable[[], bool] = lambda: False
        """Returns whether this rank asks all ranks to end because a time limit is reached."""
        self._noticed = take_notice()

    def use(self, slots: Iterable[Slot]) -> None:
        """Take the gradients of these from now on."""
        self.slots = tuple(slots)
        self._copied = [slot for slot in self.slots if slot.copies_here]
        self._scaled = [slot for slot in self.slots if slot.factor != 1.0]
        # One order on all ranks, whatever order their modules have.
        summed = sorted(self.slots, key=lambda slot: slot.name)
        self._partial = [slot for slot in summed if slot.partial]
        self._averaged = summed if self._mean is not None else []
        self._tied: dict[tuple[int, ...], list[Slot]] = {}
        for slot in summed:
            if slot.tied is not None:
                self._tied.setdefault(_ranks_of(slot.tied), []).append(slot)

    def agree(self, state: Callable[[], Mapping[str, Tensor]], *, every: int) -> None:
        """Agree with all ranks on what they hold and sum; compare replicas every `every` steps.

        `state` returns what is resident beside what is trained.  See Agreement.  A rank
        that is alone has nobody to agree with.
        """
        place = self.place
        if place.ranks == 1:
            return
        declared = [
            Declared(slot.name, ranks, description(slot.parameter))
            for ranks, slots in self._tied.items()
            for slot in slots
        ]
        if self._partial:
            ranks = _ranks_of(place.axis("tensor").get_group())
            declared += [
                Declared(slot.name, ranks, description(slot.parameter)) for slot in self._partial
            ]

        def all_held() -> dict[str, Tensor]:
            return {slot.name: slot.parameter for slot in self.slots} | dict(state())

        self.agreement = Agreement(
            all_held,
            place,
            declared=declared,
            tied={slot.name for slots in self._tied.values() for slot in slots},
            every=every,
        )

    @torch.no_grad()
    def unsharded(self) -> dict[Slot, Tensor]:
        """Sum what lies on other ranks into the local gradients; return those that there are.

        A sum over ranks has zeros in place of a gradient that this rank has not made.
        """
        for slot in self._copied:
            _add_copies(slot)
        grads = {
            slot: grad if type(grad) is Tensor else _local_grad(slot.parameter)
            for slot in self.slots
            if (grad := slot.parameter.grad) is not None
        }
        grads = {slot: grad.coalesce() if grad.is_sparse else grad for slot, grad in grads.items()}
        self._lacking = set()
        if self.participation is not None:
            absent = self.participation.absent()
            self._lacking |= {slot for slot in grads if id(slot.parameter) in absent}
        self._without = {slot.name for slot in self.slots if slot not in grads}
        for slot in (*self._partial, *self._averaged, *itertools.chain(*self._tied.values())):
            if slot not in grads:
                grads[slot] = torch.zeros_like(slot.local)
                self._lacking.add(slot)
        self._without |= {slot.name for slot in self._lacking}
        for slot in self._scaled:
            if slot in grads:
                grads[slot].mul_(slot.factor)
        if self._partial:
            self._sum_partial([grads[slot] for slot in self._partial])
        if self._mean is not None:
            self._mean.reduce(
                [slot.name for slot in self._averaged], [grads[slot] for slot in self._averaged]
            )
        for _, slots in sorted(self._tied.items()):
            for slot in slots:
                if not slot.reduced:
                    self._sum_tied(slot, grads[slot])
        return grads

    @torch.no_grad()
    def reduce_step_stats(
        self, grads: dict[Slot, Tensor], totals: Tensor, earlier: Tensor | None = None
    ) -> StepMeasurement:
        """Measure whole gradients, which are of sums divided by `divisor` and have fp16's scale.

        `totals` are this rank's sum and count of the loss.  Where the gradients are those of an
        earlier step, `earlier` is what counted there on all ranks.  All share one all-reduce, the
        only collective of a step without tensor axis or ties.
        """
        report = torch.cat(
            (totals, _squared_norm(grads, like=totals).reshape(1), self._checks(totals))
        )
        if self.place.mesh is not None:
            dist.all_reduce(report)
        count = report[1] if earlier is None else earlier
        factor = (self.place.replicas * self.divisor / count).where(count != 0, 0.0).float()
        norm = self.scale.taken_off(report[2].sqrt().float() * factor)
        return StepMeasurement(
            total=report[0],
            count=report[1],
            norm=norm,
            factor=self.scale.taken_off(factor),
            checks=report[3:],
        )

    @torch.no_grad()
    def settle(self, grads: dict[Slot, Tensor], measured: StepMeasurement) -> None:
        """Act on the checks of a step, which is waited for; all ranks call it together.

        What took part in no rank's backward has no gradient, as in one process: an optimizer would
        let it decay.  Raises LaunchError, on all ranks, where a replica has drifted.
        """
        lacking, changed, *words, _ = measured.checks.tolist()
        if changed:
            refuse_failed(self._failed, self.place)
            self._refuse_changed()
        if any(words) and self.agreement is not None:
            self.agreement.refuse_drift()
        if lacking:
            used = self._used_anywhere()
            for slot in self._lacking:
                if slot.name not in used:
                    del grads[slot]
        if self.tracks_unused:
            self.unused = self._unused_by_rank()

    @torch.no_grad()
    def scale_and_clip(
        self, grads: dict[Slot, Tensor], measured: StepMeasurement, clip_norm: float
    ) -> None:
        """Make them the gradients of the mean loss, no longer together than `clip_norm` if any."""
        factor = measured.factor
        if clip_norm > 0:
            factor = factor * _clipping(measured.norm, clip_norm)
        elif factor.device.type == "cpu" and float(factor) == 1:
            return  # as many count as was divided by
        _multiply(grads, factor)

    @torch.no_grad()
    def clip(self, grads: dict[Slot, Tensor], clip_norm: float) -> None:
        """Clip gradients that are of the mean loss already, and may have been changed since.

        Their norm is measured anew; all ranks call it together.
        """
        if clip_norm > 0:
            squared = _squared_norm(grads, like=torch.empty(0, device=self.device))
            if self.place.mesh is not None:
                dist.all_reduce(squared)
            _multiply(grads, _clipping(squared.sqrt(), clip_norm))

    def dropped(self) -> None:
        """Forget the gradients."""
        for slot in self.slots:
            slot.parameter.grad = None
        for slot in self._copied:
            for parameter, _ in slot.copies_here:
                parameter.grad = None

    def _checks(self, totals: Tensor) -> Tensor:
        """Return what a step's all-reduce tells beside the loss: see Measured."""
        checks = torch.zeros(5, dtype=totals.dtype, device=totals.device)
        if self._lacking:
            checks[0] = float(len(self._lacking))
        self._failed = self.failure()
        changed = self.participation is not None and self.participation.changed
        if changed or self._failed is not None:
            checks[1] = 1.0
        if self.agreement is not None and self.agreement.due(int(self.steps) + 1):
            checks[2:4] = self.agreement.words(totals.device)
        if ending := self.ending():  # a number on its way to a device is waited for
            checks[4] = ending
        return checks

    def ending(self) -> float:
        """Return whether this rank asks that the step is the last: 1 for a notice, 0.5 for time.

        Ranks add what they ask to what a step measures, so that all end behind the same one.
        """
        return 1.0 * self._noticed() + 0.5 * self.out_of_time()

    def _refuse_changed(self) -> None:
        assert self.participation is not None
        changed = self.participation.changed
        names_here = [slot.name for slot in self.slots if id(slot.parameter) in changed]
        every = all_gather_json(names_here) if self.place.mesh is not None else [names_here]
        rank, name = next((rank, names[0]) for rank, names in enumerate(every) if names)
        refuse_changed_copy(name, f"the forward of rank {rank}")

    def _unused_by_rank(self) -> dict[str, tuple[int, ...]]:
        names_here = sorted(self._without)
        every = all_gather_json(names_here) if self.place.mesh is not None else [names_here]
        names = sorted({name for names_of_rank in every for name in names_of_rank})
        return {
            name: tuple(at for at, names_of_rank in enumerate(every) if name in names_of_rank)
            for name in names
        }

    def _used_anywhere(self) -> set[str]:
        """Return the names of what took part in the step on any rank."""
        if self._names is None:
            every = all_gather_json([slot.name for slot in self.slots])
            self._names = sorted({name for names in every for name in names})
        lacking = {slot.name for slot in self._lacking}
        names_here = {slot.name for slot in self.slots} - lacking
        flags = torch.tensor([float(name in names_here) for name in self._names]).to(self.device)
        dist.all_reduce(flags)
        pairs = zip(self._names, flags.tolist(), strict=True)
        return {name for name, count in pairs if count}

    def _sum_partial(self, partial: Sequence[Tensor]) -> None:
        flat = torch.cat([grad.flatten() for grad in partial]).to(self.device)
        dist.all_reduce(flat, group=self.place.axis("tensor").get_group())
        parts = flat.split([grad.numel() for grad in partial])
        for grad, part in zip(partial, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def _sum_tied(self, slot: Slot, grad: Tensor) -> None:
        if grad.numel():
            whole = grad.to(self.device).contiguous()  # other stages' may lie otherwise
            dist.all_reduce(whole, group=slot.tied)
            if whole is not grad:
                grad.copy_(whole)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _add_copies(slot: Slot) -> None:
    """Add the gradients of a tied parameter's copies to its own."""
    for parameter, _ in slot.copies_here:
        if parameter.grad is None:
            continue
        if slot.parameter.grad is None:
            slot.parameter.grad = parameter.grad
        else:
            _local_grad(slot.parameter).add_(_local_grad(parameter))
        parameter.grad = None


@torch.no_grad()
def share_values(slots: Iterable[Slot]) -> None:
    """Give copies of tied parameters the values that the first ones have now."""
    for slot in slots:
        for _, local in slot.copies_here:
            local.copy_(slot.local)


def copies_of(parameter: Tensor, world: int) -> int:
    """Return how many of `world` ranks of a stage hold the same part of a parameter."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                world //= parameter.device_mesh.size(dim)
    return world


def _local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor)
        assert grad.placements == parameter.placements, (grad.placements, parameter.placements)
        return grad.to_local()
    return grad


def _clipping(norm: Tensor, clip_norm: float) -> Tensor:
    return (clip_norm / (norm + _NORM_EPSILON)).clamp(max=1.0)


def _multiply(grads: dict[Slot, Tensor], factor: Tensor) -> None:
    if grads:
        every = list(map(_memory, grads.values()))
        torch._foreach_mul_(every, factor.to(every[0].device))


def _memory(grad: Tensor) -> Tensor:
    """Return what a gradient has in memory: of a sparse one its rows, each of which is there once.

    Sparse are those of `nn.Embedding(sparse=True)` on one process.
    """
    return grad._values() if grad.is_sparse else grad


def _squared_norm(grads: dict[Slot, Tensor], *, like: Tensor) -> Tensor:
    """Return this rank's share of the squared norm: shares of all ranks add up to the whole."""
    by_copies: dict[int, list[Tensor]] = {}
    for slot, grad in grads.items():
        by_copies.setdefault(slot.copies, []).append(_memory(grad))
    total = torch.zeros((), dtype=torch.float32, device=like.device)
    for copies, group in by_copies.items():
        norms = torch.stack(torch._foreach_norm(group))
        total += (norms.square().sum() / copies).to(like.device)
    return total


def whole_part(slot: Slot, local: Tensor) -> Tensor:
    """Return a local part as the same kind of tensor as its parameter, pieces in their own dim.

    Of `sections` it is a plain copy of the whole, which all ranks make together.
    """
    if slot.sections:
        return _whole_of_sections(slot, local)
    parameter = slot.parameter
    shape = torch.empty(parameter.shape, device="meta")
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if slot.pieces > 1:
        local, shape = (t.unflatten(1, (slot.pieces, -1)) for t in (local, shape))
        # A divided dim from there on moves behind the pieces.
        placements = tuple(
            Shard(p.dim + 1) if isinstance(p, Shard) and p.dim >= 1 else p for p in placements
        )
    if not isinstance(parameter, DTensor):
        return local
    return divided(local, parameter.device_mesh, placements, shaped=shape)


def _whole_of_sections(slot: Slot, local: Tensor) -> Tensor:
    made = whole_part(replace(slot, sections=()), local)
    assert isinstance(made, DTensor)
    whole = made.full_tensor()
    parts = whole.chunk(_tensor_degree(slot), 0)
    return whole_of(parts, 0, slot.sections)


def take_sections(slot: Slot, local: Tensor, whole: Tensor) -> None:
    """Give a local part its numbers of the whole: the inverse of `whole_part` for `sections`."""
    degree = _tensor_degree(slot)
    parts = [part_of(whole, 0, slot.sections, rank, degree) for rank in range(degree)]
    parameter = slot.parameter
    assert isinstance(parameter, DTensor)
    shard = distribute_tensor(
        torch.cat(parts).to(local.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    local.copy_(shard.to_local())


def _tensor_degree(slot: Slot) -> int:
    assert isinstance(slot.parameter, DTensor)
    mesh = slot.parameter.device_mesh
    return mesh.size((mesh.mesh_dim_names or ()).index("tensor"))
