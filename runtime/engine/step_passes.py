"""Passes: forwards and backwards of a script's micro-batches over the stages of a rank.

    passes = Passes(plan, place, parts, recorder, loss=loss, ...)
    micros = passes.cut(batch, step=3)       # this rank's slice, as micro-batches
    passes.train(micros)                     # gradients are added up; sums and counts are noted

Under a pipeline a batch has whatever shape the example allows: each shape has a recording and
boundaries of its own, and all ranks that see a batch are asked whether they see the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import BatchError, LaunchError, MeshwrightError
from meshwright.planner.schedules import schedule, schedule_of
from meshwright.runtime.core import batches
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.auxiliary_loss import BatchSums, BuffersBefore, InnerLosses, running
from meshwright.runtime.core.global_batch_loss import (
    gradients_by_output,
    of_all_slices,
    surrogate,
    whole_batch,
)
from meshwright.runtime.core.loss import Totals, loss_sum_of
from meshwright.runtime.core.lru import Recent
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.object_collectives import all_gather_json, broadcast_tensors
from meshwright.runtime.core.side_effects import PythonNumbers, seed_python
from meshwright.runtime.core.torch_internals import forget_forward_order, take_plain_as_whole
from meshwright.runtime.engine.apply_plan import LanguageRules, Staged
from meshwright.runtime.engine.pipedream_2bw import StalePipeline
from meshwright.runtime.engine.pipeline import StagePipeline
from meshwright.runtime.optim.gradients import Gradients, refuse_failed
from meshwright.runtime.optim.replica_check import COMPARED_EVERY, is_due
from meshwright.runtime.parallel.attention_api import divide_positions, positions_in
from meshwright.runtime.parallel.batch_norm import RunningStatistics
from meshwright.runtime.parallel.context_parallel import whole_positions
from meshwright.runtime.parallel.data_parallel import (
    gathers_anew,
    is_mixed,
    reduces_apart,
    reduces_at_once,
    sums_gradients,
)
from meshwright.runtime.parallel.gradient_compression import WIRE_TYPES
from meshwright.runtime.parallel.replicas import Replicas
from meshwright.runtime.techniques.micro_batch_graphs import MicroBatchGraphs
from meshwright.runtime.tracing.stage import MicroBatch, seed_draws, step_seed, unit_seed
from meshwright.runtime.tracing.tracer import MOST_RECORDINGS, Recorder, key_of

LOSS = "loss"
"""The name under which a loss draws random numbers."""


class StepPasses:
    """This rank's part of the forwards and backwards of a batch."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        parts: Sequence[Staged],
        recorder: Recorder | None,
        *,
        example: Any,
        loss: Callable[[Any, Any], Any],
        gradients: Gradients,
        statistics: RunningStatistics | None,
        sums: bool,
        before: BuffersBefore | None = None,
        compares: bool = True,
        device: torch.device,
    ) -> None:
        """`example` is a batch that no batch exceeds; `recorder` is of a user's own module;
        `gradients` know how sums are scaled; `statistics` are those of BatchNorms, where there may
        be some.

        `before` are buffers that each forward of a step makes anew of what they were.

        `sums` says that the module asks for sums over the batch, and `compares` that batches and
        loss are a user's own: ranks may not have them alike, and there may be metrics.
        """
        self.totals = Totals(device)
        self._plan = plan
        self._own_plan = plan.kinds[place.kind]
        """Plan of this rank's kind of pipelines."""
        self._place = place
        self._parts = tuple(parts)
        self._recorder = recorder
        self._most = batches.lengths_of(example)
        self._loss = loss
        self._gradients = gradients
        self._statistics = statistics
        self._device = device
        self._sums = sums
        self._before = before
        # By all ranks together, also those whose stage sums nothing.
        summed = sums and place.mesh is not None and place.replicas > 1
        self._replica_group = place.replica_group if summed else None
        self._compares = compares
        self._surveyed: Totals | None = None
        """Totals of the loss, while sums over the batch are computed."""
        self._taken: list[Any] | None = None
        """Outputs of the module, while they are requested."""
        self._by_output: dict[int, list[Tensor | None]] = {}
        """Gradients of a loss over the whole batch, by micro-batch."""
        self._metric_names: tuple[str, ...] | None = None
        self._learns = False
        """True if a loss of the running step has a gradient, or no gradient is expected."""
        self._divided = (
            place.replicas
            if sums_gradients(plan) or (reduces_apart(plan, place) and plan.mesh.expert == 1)
            else 1
        )
        """By what a loss is divided so that the sum of replicas' gradients is their mean: backends
        that make a mean themselves go through all memory once more, and a forward that clips the
        gradients that pass by would clip others than in one process."""
        self._replicas = self._new_replicas()
        for part in self._parts:
            part.module.agrees = compares and place.is_cut
        gradients.failure = self._take_failure
        take_plain_as_whole(True)
        self._numbers: PythonNumbers | None = None
        """Random numbers of Python and numpy as they were before the first loss of a pass."""
        self._step_seed: int | None = None
        """Seed of what all ranks draw alike in a step."""
        self._batches = 0
        """Number of batches seen; values of some are compared."""
        self._one_slice: list[int] | None = None
        """The digest of the last batch that was compared, if all slices had the same one."""
        self._counts: list[int] | None = None
        """[slice] Samples of a batch of any size, while one is evaluated."""
        self._filler: Any = None
        """A micro-batch of one sample, for forwards that other slices need."""
        self._filling = False
        self._pipelines: Recent[StagePipeline] = Recent(MOST_RECORDINGS)
        self.graphs = self._new_graphs() if plan.graphs == "micro_batch" else None
        """Graphs of micro-batches, if the plan lets any be captured."""

    # --- batches ----------------------------------------------------------------------------

    def cut(self, batch: Any, *, step: int, drawing: bool = True) -> list[MicroBatch]:
        """Cut this rank's slice into micro-batches; all ranks call it together.

        Raises BatchError where the slice is not of the plan's size, has longer samples than the
        example, or ranks that feed one slice have different samples.
        """
        size, count = self._plan.micro_batch, self._plan.micro_batches_of(self._place.data_rank)
        self._counts = None
        cut = batches.micro_batches(batch, size=size, count=count)
        batches.check_lengths(batch, self._most)
        self._renew(batch)
        if self._compares:
            self._agree(batch)
        return self._micros(cut, step=step, drawing=drawing)

    def cut_any(self, batch: Any, *, step: int, drawing: bool = False) -> list[MicroBatch]:
        """Cut a slice of any number of samples, none included; all ranks call it together.

        The last micro-batch may be smaller, and a rank that has fewer than others runs forwards of
        a sample that counts for nothing, so that all ranks run as many.
        """
        batches.check_lengths(batch, self._most)
        self._renew(batch)
        if self._compares:
            self._agree(batch, any_size=True)
        samples = batches.samples_in(batch)
        counts = torch.zeros(self._place.data_degree, device=self._device)
        counts[self._place.data_rank] = samples
        if self._place.mesh is not None:
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        self._counts = [int(count) for count in counts.tolist()]
        if isinstance(self._loss, whole_batch) and not all(self._counts):
            raise BatchError(
                f"batch: slices have {self._counts} samples, and whole_batch(loss) gathers some of "
                "each; give every slice at least one"
            )
        some = batches.part_of(batch, range(1)) if samples else _zeros(batch)
        self._filler = batches.on_device(some, self._device)
        return self._micros(
            batches.cut_by(batch, self._plan.micro_batch), step=step, drawing=drawing
        )

    def take_local(self, batch: Any, *, step: int, drawing: bool = True) -> list[MicroBatch]:
        """Return this rank's own batch, or as many as the plan has micro-batches, as they are.

        Raises BatchError where the plan cuts a module or positions, or the loss needs all batches.
        """
        plan, count = self._plan, self._plan.micro_batches_of(self._place.data_rank)
        divided = self._place.is_cut or plan.mesh.context > 1
        if divided or isinstance(self._loss, whole_batch):
            what = "a plan with pipeline or context" if divided else "whole_batch(loss)"
            raise BatchError(
                f"batch: is a rank's own (local=True), which does not go with {what}; give "
                "[sample, ...] tensors, or use another plan"
            )
        if count > 1 and not (isinstance(batch, list | tuple) and len(batch) == count):
            raise BatchError(
                f"batch: is a rank's own (local=True), and this plan has {count} micro-batches; "
                f"give a list of {count} batches"
            )
        self._counts = None
        batches.register_records(batch)
        return self._micros(
            [batch] if count == 1 else batch, step=step, drawing=drawing, local=True
        )

    def _renew(self, batch: Any) -> None:
        """Take what the training loop changed in its module, and record anew what is no tensor."""
        if self._recorder is None:
            return
        for part in self._parts if self._own_plan.mesh.pipeline > 1 else ():
            with self.refusing_on_all_ranks():
                part.recorded.follow()
        before = self._recorder.renewals
        with self.refusing_on_all_ranks():
            self._recorder.renew(batch)
        if self._recorder.renewals > before and schedule_of(self._plan.schedule).stale:
            raise LaunchError(
                f"schedule: is {self._plan.schedule}, which ends the backward of a step in the "
                "next one, and what the forward reads was changed between them; give numbers that "
                "change as tensors without dims in the batch, or use schedule 1f1b"
            )

    def _micros(
        self, cut: Sequence[Any], *, step: int, drawing: bool, local: bool = False
    ) -> list[MicroBatch]:
        size = self._plan.micro_batch
        first = self._plan.samples_of(self._place.data_rank).start
        seed = self._plan.training.seed
        coins = drawing and self._recorder is not None and self._recorder.draws_coins
        self._step_seed = step_seed(seed, step, 0) if drawing else None
        return [
            MicroBatch(
                batches.on_device(micro_batch, self._device),
                step_seed(seed, step, first + at * size) if drawing else None,
                self._step_seed if coins else None,
                local,
            )
            for at, micro_batch in enumerate(cut)
        ]

    def _agree(self, batch: Any, *, any_size: bool = False) -> None:
        """Refuse what ranks that must have equal batches do not have; all ranks raise it.

        Values are compared as those of replicas are, in the first batches and now and then, shapes
        each time: messages between stages have that of the batch, and a loss over the whole batch
        gathers it.  Nor may all slices be the same samples, in one batch that is compared and in
        the next: whoever divides data forgot to.
        """
        several = self._place.data_degree > 1 and not any_size
        gathers = isinstance(self._loss, whole_batch) and several
        self._batches += 1
        due = is_due(self._batches, COMPARED_EVERY)
        fed_alike = self._place.is_cut or self._plan.mesh.tensor > 1
        if not (fed_alike or gathers or (several and due)):
            return
        fed = self._place.data_rank * self._place.context.degree + self._place.context.rank
        print_of_rank = [fed, batches.shape_print(batch)]
        if due:
            print_of_rank.append(batches.fingerprint(batch))
        is_well = all(part.module.failure is None for part in self._parts)
        every = all_gather_json(print_of_rank if is_well else None)
        if None in every:
            self._refuse_failed()
        if gathers and (other := next((s for s in every if s[1] != every[0][1]), None)):
            raise BatchError(
                f"batch: slices {every[0][0]} and {other[0]} have samples of different shapes, and "
                "whole_batch(loss) gathers all; pad them to one length"
            )
        first: dict[int, tuple[int, list[int]]] = {}
        for rank, rank_print in enumerate(every):
            other, wanted = first.setdefault(rank_print[0], (rank, rank_print))
            if rank_print != wanted:
                what = "samples" if rank_print[1] == wanted[1] else "shapes"
                raise BatchError(
                    f"batch: ranks {other} and {rank} feed slice {rank_print[0]} and have "
                    f"different {what}; seed the loader alike on all ranks and take "
                    "engine.slice(batch)"
                )
        if due and several and self._place.context.degree == 1:
            self._refuse_one_slice(
                print_of_rank[1:], {tuple(rank_print[1:]) for rank_print in every}
            )

    def _refuse_one_slice(self, print_of_rank: list[int], every: set[tuple[int, ...]]) -> None:
        """Refuse slices that are all the same, in this batch and in another one before."""
        before, self._one_slice = self._one_slice, print_of_rank if len(every) == 1 else None
        if self._one_slice is not None and before not in (None, print_of_rank):
            raise BatchError(
                f"batch: all {self._place.data_degree} slices are the same samples, again and "
                "again, so that most of the data are never seen; give engine.slice(batch) of the "
                "global batch, or divide the data by engine.slice_rank and engine.slices "
                "(DistributedSampler(data, rank=engine.slice_rank, num_replicas=engine.slices))"
            )

    @contextlib.contextmanager
    def refusing_on_all_ranks(self) -> Iterator[None]:
        """Let what a pipeline's rank refuses wait until all ranks have it, before the forward."""
        try:
            yield
        except MeshwrightError as error:
            if not self._place.is_cut:
                raise
            self._parts[0].module.fail(error)

    def _take_failure(self) -> Exception | None:
        """Return the first error of this rank's forwards since the last time."""
        failures = [part.module.failure for part in self._parts]
        for part in self._parts:
            part.module.failure = None
        return next((failure for failure in failures if failure is not None), None)

    def _refuse_failed(self) -> None:
        """Raise what failed in a rank's forwards on all ranks; they call it together."""
        if self._compares and self._place.is_cut:
            refuse_failed(self._take_failure(), self._place)

    # --- passes -----------------------------------------------------------------------------

    def train(self, micros: Sequence[MicroBatch]) -> None:
        """Add the gradients of all micro-batches, and note their losses."""
        if self.graphs is not None:
            self._let_stay(stays=self.graphs.obstacle is None)
        with self._computing(learns=True):
            self._train(micros)

    @contextlib.contextmanager
    def _computing(self, *, learns: bool = False) -> Iterator[None]:
        """Let stages have the parameters that passes compute with; losses draw by themselves."""
        take_plain_as_whole(False)
        try:
            with contextlib.ExitStack() as around:
                for part in self._parts:
                    if part.copies is not None:
                        around.enter_context(part.copies.in_use(learns=learns))
                yield
        finally:
            take_plain_as_whole(True)
            if self._numbers is not None:
                self._numbers.put_back()
                self._numbers = None

    def _train(self, micros: Sequence[MicroBatch]) -> None:
        host.forget_sums()
        if self._before is not None:
            self._before.note()
        sums = self._sum_over_batch(micros)
        if isinstance(self._loss, whole_batch):
            with running(InnerLosses(_forget, None, sums)):
                self._whole_gradients(self._loss, micros)
        if self._replicas is not None:
            self._replicas.begin()
        unit_grad = self._backward_of(torch.ones((), device=self._device))
        recorded = () if self._recorder is None else self._recorder.first.layers
        draws = any(layer.draws for layer in recorded)  # and may drop all layers
        plan = self._own_plan
        last = plan.rank_of_stage(len(plan.stages) - 1) == self._place.stage
        self._learns = draws or not last
        if self.graphs is not None:
            self.graphs.begin()
        with running(InnerLosses(self._note_inner, unit_grad, sums)):
            if self._own_plan.mesh.pipeline > 1:
                self.pipeline_of(micros).run_all(micros)
            else:
                self._one_after_another(micros)
        if not self._learns and all(part.module.failure is None for part in self._parts):
            raise BatchError(
                "loss: has no gradient in any micro-batch of this rank: it depends on nothing that "
                "is trained. Make it of the module's outputs, without detach(), no_grad() or item()"
            )
        host.sum_gradients()
        for part in self._parts:
            if part.copies is not None:
                part.copies.forget_zeros()
        if self._replicas is not None:
            self._replicas.finish()
        if self._statistics is not None:
            self._statistics.apply()

    def evaluate(self, micros: Sequence[MicroBatch]) -> None:
        """Note the losses of all micro-batches of `cut_any` in eval mode, and learn nothing."""
        with self._mode(training=False), self._computing():
            if self._before is not None:
                self._before.note()
            inner = InnerLosses(self._note_inner, None, self._sum_over_batch(micros))
            with running(inner):
                if isinstance(self._loss, whole_batch):
                    self._whole_gradients(self._loss, micros)
                else:
                    self._forward(micros)
            self._let_go()
            self._refuse_failed()

    @contextlib.contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        """Run stages in one mode, and put them back into that before."""
        before = [(part.module, part.module.training) for part in self._parts]
        try:
            self.set_mode(training=training)
            yield
        finally:
            for module, mode in before:
                module.train(mode)

    @property
    def is_training(self) -> bool:
        """True if this rank's stages are in train mode."""
        return any(part.module.training for part in self._parts)

    def set_mode(self, *, training: bool) -> None:
        """Set the mode of this rank's stages, by the module's own `train` and `eval`."""
        for part in self._parts:
            part.module.train(training)

    def outputs(self, micros: Sequence[MicroBatch], *, training: bool) -> Any:
        """Return what the module makes of `cut_any`, on every rank, without gradients."""
        with self._mode(training=training), self._computing():
            if self._before is not None:
                self._before.note()
            inner = InnerLosses(_forget, None, self._sum_over_batch(micros))
            with running(inner):
                outputs = self._outputs(micros)
        self._refuse_failed()
        if any(micro.local for micro in micros):
            return outputs[0] if len(outputs) == 1 else outputs
        if self._own_plan.mesh.pipeline > 1:
            group = self._place.axis("pipeline").get_group()
            last = self._own_plan.rank_of_stage(len(self._own_plan.stages) - 1)
            is_last = self._place.stage == last
            leaves = tree_leaves(outputs) if is_last else []
            if any(not isinstance(leaf, Tensor) for leaf in leaves):
                raise LaunchError(
                    "outputs: are not all tensors, and cannot be sent to other ranks; "
                    "return tensors from the module"
                )
            sent = broadcast_tensors(leaves if is_last else None, source=last, group=group)
            # Every rank has recorded what the module returns; logits are one tensor.
            recorder = self._recorder
            spec = recorder.first.result_spec if recorder is not None else tree_structure(0)
            each = spec.num_leaves
            outputs = [
                tree_unflatten([leaf.to(self._device) for leaf in sent[at : at + each]], spec)
                for at in range(0, len(sent), each)
            ]
        whole = self._at_all_positions(batches.join_samples(outputs), micros)
        return whole if micros else batches.part_of(whole, range(0))

    def _at_all_positions(self, outputs: Any, micros: Sequence[MicroBatch]) -> Any:
        """Return outputs of this rank's positions together with those of the others."""
        place = self._place.context
        if place.degree == 1 or not micros:
            return outputs
        positions = positions_in(micros[0].batch)
        return tree_map(
            lambda x: (
                whole_positions(x, place)
                if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == positions
                else x
            ),
            outputs,
        )

    @torch.no_grad()
    def _sum_over_batch(self, micros: Sequence[MicroBatch]) -> BatchSums | None:
        """Return what the module sums over the batch, by a forward of all micro-batches."""
        if not self._sums:
            return None
        sums = BatchSums()
        self._surveyed = Totals(self._device)
        try:
            with running(InnerLosses(_forget, None, sums)):
                self._forward(micros, sums)
            counts = self.of_all(self._surveyed.values)
        finally:
            self._surveyed = None
        self._let_go()
        if self._statistics is not None:
            self._statistics.forget()
        sums.finish(self._of_all_slices)
        if not isinstance(self._loss, whole_batch):
            sums.loss_count = counts[1]
        return sums

    def _of_all_slices(self, values: Tensor) -> Tensor:
        """Return the sum of what the ranks of this stage have of all slices and positions."""
        if self._replica_group is not None:
            dist.all_reduce(values, group=self._replica_group)
        return values

    def _forward(self, micros: Sequence[MicroBatch], sums: BatchSums | None = None) -> None:
        self._run_forward(micros)
        size = self._plan.micro_batch
        count = max((-(-count // size) for count in self._counts or ()), default=0) - len(micros)
        if count > 0:
            self._filling = bool(micros)
            try:
                filled = BatchSums() if self._sums else None
                with running(InnerLosses(_forget, None, filled)):
                    self._run_forward([MicroBatch(self._filler)] * count)
                if sums is not None and filled is not None:
                    sums.asked_too(filled)
            finally:
                self._filling = False

    def _run_forward(self, micros: Sequence[MicroBatch]) -> None:
        if self._own_plan.mesh.pipeline == 1:
            for micro in micros:
                if self._before is not None:
                    self._before.put_back()
                self._micro_loss(self._parts[0].module(micro=micro), micro)
            return
        # As many at once as a step has, all of one shape.
        for _, alike in itertools.groupby(micros, lambda micro: key_of(micro.batch)):
            values = list(alike)
            together = self._own_plan.micro_batches
            for at in range(0, len(values), together):
                some = values[at : at + together]
                self.pipeline_of(some).evaluate_all(some)

    def _one_after_another(self, micros: Sequence[MicroBatch]) -> None:
        part = self._parts[0]
        for index, micro in enumerate(micros):
            if self._before is not None:
                self._before.put_back()
            if part.wrapped:
                last = index == len(micros) - 1
                module = cast(FSDPModule, part.module)
                forget_forward_order(module)
                module.set_is_last_backward(last)
                module.set_requires_gradient_sync(last or reduces_at_once(self._plan, self._place))
                module.set_reshard_after_backward(last or gathers_anew(self._plan, self._place))
            if self.graphs is None:
                self._pass(micro)
            else:
                self.graphs.run(micro.batch)
                self._learns = True  # else the first pass had no gradient, and said so

    def _pass(self, micro: MicroBatch) -> None:
        """Add the gradients of a micro-batch, and note its loss."""
        module = self._parts[0].module
        module.closed(self._micro_loss(module(micro=micro), micro)).backward()

    def _let_stay(self, *, stays: bool) -> None:
        """Let what graphs read and write lie where it is from step to step, or no longer."""
        self.totals.reads = not stays and self._device.type == "cpu"
        if self._replicas is not None:
            self._replicas.stays = stays
        for part in self._parts:
            if part.copies is not None:
                part.copies.stays = stays

    def _new_graphs(self) -> MicroBatchGraphs:
        """Return the graphs of this rank's micro-batches."""
        part, scale, replicas = self._parts[0], self._gradients.scale, self._replicas

        def buffer_of(parameter: nn.Parameter) -> Tensor | None:
            return None if replicas is None else replicas.buffer_of(parameter)

        return MicroBatchGraphs(
            lambda batch: self._pass(MicroBatch(batch)),
            settled=lambda: (
                *part.module.parameters(),
                *part.module.buffers(),
                self.totals.values,
                scale.scale,
            ),
            trained=part.module.parameters,
            gradient=buffer_of,  # what is none of theirs has its own
            device=self._device,
            obstacle=_obstacle_to_graphs(part),
        )

    @torch.no_grad()
    def _outputs(self, micros: Sequence[MicroBatch]) -> list[Any]:
        """Return what the module makes of each micro-batch, where this rank has the last stage."""
        outputs: list[Any] = []
        self._taken = outputs
        heads = [part.chunked for part in self._parts if part.chunked is not None]
        try:
            for head in heads:
                head.active = False
            self._forward(micros)
        finally:
            self._taken = None
            for head in heads:
                head.active = True
        self._let_go()
        if self._statistics is not None:
            self._statistics.forget()
        for output, micro in zip(outputs, micros, strict=False):
            if micro.local:
                continue
            batches.check_samples(output, micro.batch)
        return outputs

    def _whole_gradients(self, loss: whole_batch, micros: Sequence[MicroBatch]) -> None:
        """Note the loss of the whole batch, and its gradient by the outputs of each micro-batch."""
        plan, place = self._plan, self._place
        outputs_here = self._outputs(micros)
        if not outputs_here:
            return
        batch_here = batches.join_samples([micro.batch for micro in micros])
        outputs, batch = (
            of_all_slices(self._at_all_positions(tree, micros), place, self._counts)
            for tree in (batches.join_samples(outputs_here), batch_here)
        )
        # All have the same.
        notes = place.data_rank == place.along("tensor") == place.context.rank == 0
        if not torch.is_grad_enabled():
            if notes:
                samples = sum(self._counts) if self._counts else plan.global_batch
                self.totals.add(loss_sum_of(loss(outputs, batch), samples))
            return
        with seed_draws(self._step_seed, LOSS, self._device, python=True):
            loss_sum, grads = gradients_by_output(
                loss,
                outputs,
                batch,
                samples=plan.samples_of(place.data_rank),
                size=plan.micro_batch,
                parts=plan.global_batch // plan.micro_batch * place.context.degree,
            )
        grads = [divide_positions(grad, place.context) for grad in grads]
        if notes:
            self.totals.add(loss_sum)
        self._by_output = {id(m): grad for m, grad in zip(micros, grads, strict=True)}

    def _let_go(self) -> None:
        """Divide parameters again: what no backward follows stays gathered."""
        for inner in (inner for part in self._parts for inner in part.module.modules()):
            if isinstance(inner, FSDPModule):
                inner.reshard()

    def _micro_loss(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Note what a micro-batch adds to the loss; return where its backward begins."""
        if self._filling:
            return torch.zeros((), device=self._device)
        if self._taken is not None:
            self._taken.append(outputs)
            return torch.zeros((), device=self._device)
        if self._surveyed is not None and isinstance(self._loss, whole_batch):
            return torch.zeros((), device=self._device)
        if isinstance(self._loss, whole_batch):
            return self._start_of(surrogate(outputs, self._by_output[id(micro)]))
        if micro.batch is self._filler:
            return torch.zeros((), device=self._device)
        # The same numbers under every plan, as the module's own.
        seed = micro.seed if self._compares else None
        if seed is not None:  # to keep and to put them back costs more than to seed them
            self._numbers = self._numbers or PythonNumbers()
            seed_python(unit_seed(seed, LOSS))
        with seed_draws(seed, LOSS, self._device), _naming_divided():
            returned = self._loss(outputs, micro.batch)
        is_mean = isinstance(returned, Tensor) and not micro.local
        loss_sum = loss_sum_of(returned, batches.samples_in(micro.batch) if is_mean else None)
        if self._place.along("tensor") == 0:  # the others of a slice have the same
            (self.totals if self._surveyed is None else self._surveyed).add(loss_sum)
        return self._start_of(loss_sum.total)

    def _note_inner(self, value: Tensor) -> None:
        if self._place.along("tensor") == 0:
            self.totals.add_inner(value)

    def _start_of(self, total: Tensor) -> Tensor:
        """Return where a micro-batch's backward begins, also if it went by all that is trained."""
        self._learns = self._learns or total.requires_grad
        start = self._backward_of(total)
        if torch.is_grad_enabled() and not start.requires_grad:
            start.requires_grad_()
        return start

    def _backward_of(self, total: Tensor) -> Tensor:
        """Return what backward of a sum of losses begins at."""
        return self._gradients.scale.scale_loss(total / (self._gradients.divisor * self._divided))

    def measure_own_gradient(self) -> None:
        """Put the square of this rank's gradient into `local_gradient_values` from now on."""
        if self._replicas is not None:
            self._replicas.measures_own = True

    @property
    def local_gradient_values(self) -> Tensor:
        """Values of the last step on this rank alone: see Engine.own_values."""
        square = None if self._replicas is None else self._replicas.own_square
        totals = self.totals.values.clone()
        return totals if square is None else torch.cat((totals, square.to(totals).view(1)))

    def _new_replicas(self) -> Replicas | None:
        replicated = [parameter for part in self._parts for parameter in part.replicated]
        if not replicated:
            return None
        apart = any(part.store is not None for part in self._parts)
        count = self._plan.micro_batches_of(self._place.data_rank)
        backwards = None if apart else count
        wire = WIRE_TYPES.get(self._plan.gradient_compression)
        dtype = torch.float32 if is_mixed(self._plan) else None
        divided = self._divided > 1
        return Replicas(
            replicated,
            backwards=backwards,
            divided=divided,
            dtype=dtype,
            wire=wire,
            unlike=self._place.kinds is not None,
        )

    def pipeline_of(self, micros: Sequence[MicroBatch]) -> StagePipeline:
        """Return the stages with the boundaries of these micro-batches."""
        example, training = micros[0].batch, self._parts[0].module.training
        return self._pipelines.get(
            (key_of(example), training, self._recorder.renewals if self._recorder else 0),
            lambda: self._new_pipeline(example, training=training),
        )

    def _new_pipeline(self, example: Any, *, training: bool) -> StagePipeline:
        plan = self._own_plan
        parts = dict(zip(plan.stages_of_rank(self._place.stage), self._parts, strict=True))
        if self._recorder is not None:  # on all ranks, before any sends
            recording = self._recorder.recording(example, training=training)
            self._recorder.refuse_other_layers(recording)
        settings: dict[str, Any] = {
            "example": example,
            "micro_batches": plan.micro_batches,
            "device": self._device,
            "loss": self._micro_loss,
        }
        modules = {stage: part.module for stage, part in parts.items()}
        if training and schedule_of(plan.schedule).stale:
            return StalePipeline(
                modules,
                name=plan.schedule,
                stages=len(plan.stages),
                groups=self._place.groups_in_flight(),
                **settings,
            )
        orders = schedule.orders(
            plan.schedule,
            stages=len(plan.stages),
            micro_batches=plan.micro_batches,
            virtual_stages=plan.virtual_stages,
        )
        stores = {stage: part.store for stage, part in parts.items() if part.store} or None
        groups = self._place.pipeline_groups()
        return StagePipeline(modules, orders, stores=stores, groups=groups, **settings)

    # --- sums over all ranks ----------------------------------------------------------------

    def of_all(self, values: Tensor) -> Tensor:
        """Return the sum of what all ranks have."""
        values = values.clone()
        if self._place.mesh is not None:
            dist.all_reduce(values)
        return values

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of all ranks; those without the last stage have none of their own."""
        if not self._compares:
            return {}
        if self._metric_names is None:
            self._metric_names = self._agreed_names()
        if not self._metric_names:
            return {}
        metrics = self.totals.metrics
        unknown = [name for name in metrics if name not in self._metric_names]
        if unknown:
            raise BatchError(
                f"metrics: '{unknown[0]}' was not there in the first step; return the same names "
                "in each"
            )
        none = torch.zeros(2, dtype=torch.float64, device=self._device)
        pairs = self.of_all(torch.stack([metrics.get(name, none) for name in self._metric_names]))
        return {
            name: total / count if count else float("nan")
            for name, (total, count) in zip(self._metric_names, pairs.tolist(), strict=True)
        }

    def _agreed_names(self) -> tuple[str, ...]:
        names: list[Any] = [tuple(self.totals.metrics)]
        if self._place.mesh is not None:
            names = all_gather_json(list(self.totals.metrics))
        return tuple(dict.fromkeys(name for one in names for name in one))


def _obstacle_to_graphs(part: Staged) -> str | None:
    """Return what of a stage goes on beside its passes, so that no graph runs one; None: nothing.

    The search leaves these out (planner/catalog/frameworks/native.yaml); a plan may be anyone's.
    """
    if part.wrapped:
        return "FSDP gathers and reduces inside of a pass"
    if any(layer.activations == "offload" for layer in part.placed_layers):
        return "activations go to the host inside of a pass"
    if not isinstance(part.of, LanguageRules):
        return "what a script's module does beside its tensors is not known"
    if part.plan.ranks > part.plan.mesh.data_replicate:
        return "ranks communicate inside of a pass"
    return None


@contextlib.contextmanager
def _naming_divided() -> Iterator[None]:
    """Say in words that a loss reads a parameter of which this rank has a part."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise LaunchError(
            "loss: computes with a parameter that ranks divide; read it in forward and return what "
            "the loss needs of it, or use a plan without ZeRO and tensor axis"
        ) from error


def _zeros(batch: Any) -> Any:
    """Return a batch of one sample like one that has none."""
    return tree_map(
        lambda leaf: (
            leaf.new_zeros((1, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.ndim else leaf
        ),
        batch,
    )


def _forget(value: Tensor) -> None:
    """Take a loss inside the module in a forward that reports none."""
