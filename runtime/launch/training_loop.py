"""The training loop of one rank: batches in, steps, metrics and checkpoints out.

It is a script around an Engine, as a user's own is.  The engine knows how a step is computed; the
loop knows what is fed to it, when it ends, and what is written down.  Every rank runs the same loop
and comes to the same decisions.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.documents.document import read
from meshwright.planner.documents.events import SaveFailed, StepRecord
from meshwright.planner.documents.model import ModelGraph, is_factory, is_recorded
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.plugins import load_plugin
from meshwright.planner.errors import LaunchError
from meshwright.planner.system.gc_pause import keep_freed, pause_collector
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.checkpoint.checkpoint import Progress, TrainingIdentity
from meshwright.runtime.checkpoint.state_snapshot import boxes
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.memory_tracker import LiveMemory, is_out_of_memory
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.data.corpus import Corpus, CorpusSamples
from meshwright.runtime.data.packing import PackedSamples, samples_of
from meshwright.runtime.engine.engine import Engine, StepResult
from meshwright.runtime.engine.language_model import LanguageModel
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.optim.learning_rate import learning_rate
from meshwright.runtime.optim.replica_check import COMPARED_EVERY
from meshwright.runtime.resilience.heartbeat import Beacon, own_seconds
from meshwright.runtime.resilience.shared_memory import SLOTS
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.loggers import Logger, MLflow, TensorBoard, WeightsAndBiases
from meshwright.runtime.run.metrics import Metrics
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import RankOrders, RankRecord, Stopped

if TYPE_CHECKING:
    from meshwright.runtime.checkpoint.writer import Saver, SaveSchedule
    from meshwright.runtime.engine.token_module import TokenModel
    from meshwright.runtime.resilience.in_memory_checkpoint import Mirror, MirroredState
    from meshwright.runtime.resilience.step_replay import Replays

COLLECTED_EVERY = 50
"""After how many steps all ranks look for objects in cycles, at the same moment."""
MOST_WHY = 1000
"""Characters of why a checkpoint could not be written."""
MEMORY_STEP = 2
"""Step of a run that is watched for its peak memory: the first with the optimizer's state."""


def token_engine(
    plan: Plan,
    model: ModelGraph,
    *,
    device: torch.device,
    weights: Path | None = None,
    documents: bool = False,
    compare_every: int = COMPARED_EVERY,
) -> Engine:
    """Return this rank's engine of a language model, as `launch` trains it.

    `weights` is a local folder of safetensors files; None starts from random weights.  With
    `documents` samples hold several.
    """
    refuse_unexecutable(plan, model)
    described = trained_model(plan, model, device=device, weights=weights, documents=documents)
    return Engine.of_language_model(described, compare_every=compare_every, device=device)


def refuse_unexecutable(plan: Plan, model: ModelGraph) -> None:
    """Refuse a plan for another model, or one that an engine cannot execute.

    A launcher has asked before its ranks start.
    """
    plan.check_model(model)
    reason = unsupported_reason(plan, model)
    if reason:
        raise LaunchError(reason)


def trained_model(
    plan: Plan,
    model: ModelGraph,
    *,
    device: torch.device,
    weights: Path | None = None,
    documents: bool = False,
    place: Place | None = None,
) -> LanguageModel | TokenModel:
    """Return what an engine of `launch` trains, by where the model comes from.

    `place` is this rank's if it is not that of all ranks in the plan.  It can execute the plan:
    see `refuse_unexecutable`.
    """
    how: dict[str, Any] = {
        "device": device,
        "weights": weights,
        "documents": documents,
        "place": place,
    }
    if is_factory(plan.model.source):
        from meshwright.runtime.engine.factory_module import FactoryModel  # noqa: PLC0415 - others need none of it

        return FactoryModel(plan, model, **how)
    if is_recorded(plan.model.source):
        from meshwright.runtime.engine.traced_transformer import LibraryModel  # noqa: PLC0415

        return LibraryModel(plan, **how)
    return LanguageModel(plan, model, **how)


def train(orders: RankOrders, *, rank: int, local_rank: int) -> RankRecord:
    """Carry out a run's orders as one of its ranks; the process group is joined already."""
    output = orders.output
    plan = read(Plan, run.plan_file(output))
    model = read(ModelGraph, run.model_file(output))
    corpus = Corpus.open(orders.corpus)
    device = torch.device("cuda", local_rank) if orders.device == "cuda" else torch.device("cpu")
    documents = corpus.kind == "conversations"
    plan.check_model(model)
    described = trained_model(
        plan, model, device=device, weights=orders.weights, documents=documents
    )
    engine = Engine.of_language_model(described, device=device)
    mirror = None
    if SLOTS in os.environ:
        from meshwright.runtime.resilience.in_memory_checkpoint import Mirror  # noqa: PLC0415 - of runs that survive

        frozen = checkpoint.frozen_weights(plan, orders.weights)
        mirror = Mirror.of_environment(
            local_rank=local_rank,
            run=orders.token,
            plan=plan.digest,
            identity=TrainingIdentity.of(plan=plan, model=model, corpus=corpus, frozen=frozen),
            config=engine.configuration(),
        )
    loop = Loop(
        engine, plan=plan, model=model, corpus=corpus, orders=orders, rank=rank, mirror=mirror
    )
    kept = mirror.newest(boxes(engine.state())) if mirror is not None else None
    saved_step = checkpoint.progress(orders.resumed).step if orders.resumed else 0
    if kept is not None and kept.step > saved_step and orders.copies:
        loop.go_on_from(kept, after_saved=saved_step)
    elif orders.resumed:
        loop.resume(orders.resumed)
    if orders.device == "cpu":  # whose tensors are on the heap
        keep_freed()
    return loop.run()


class NotANumber(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """A loss or gradient is none."""


class OutOfMemoryError(RuntimeError):
    """A rank ran out of memory; `held` says of what, and `needed_bytes` how much it needed."""

    def __init__(self, message: str, held: dict[str, int]) -> None:
        super().__init__(message)
        self.held = held
        self.needed_bytes: int | None = None
        if torch.cuda.is_initialized():
            self.needed_bytes = torch.cuda.max_memory_reserved() + asked_bytes(message)


def asked_bytes(message: str) -> int:
    """Return what an allocation asked for, as torch says it; 0 if it does not.

    >>> asked_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity")
    2684354560
    """
    seen = re.search(r"Tried to allocate ([0-9.]+) ([KMGT]?)i?B", message)
    if seen is None:
        return 0
    return round(float(seen[1]) * 1024 ** " KMGT".index(seen[2] or " "))


class Loop:
    """Training from one step to the next, on one rank."""

    def __init__(
        self,
        engine: Engine,
        *,
        plan: Plan,
        model: ModelGraph,
        corpus: Corpus,
        orders: RankOrders,
        rank: int,
        mirror: Mirror | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if orders.checkpoint:
            from meshwright.runtime.checkpoint import tokenizer_files as companions  # noqa: PLC0415 - of runs that are saved
            from meshwright.runtime.checkpoint.writer import Saver  # noqa: PLC0415
            from meshwright.runtime.data.loader import UsedSamples  # noqa: PLC0415
        if mirror is not None:
            from meshwright.runtime.resilience.step_replay import Replays, can_replay  # noqa: PLC0415 - that survive
        self.engine = engine
        self._mirror = mirror
        self._before: list[StepRecord] = []
        self.plan = plan
        self.model = model
        self.corpus = corpus
        self.orders = orders
        self.rank = rank
        self.samples = samples_of(corpus, seq_len=plan.seq_len, seed=plan.training.seed)
        self.steps_done = 0
        self.resumed: Path | None = None
        self._saver = (
            Saver(
                orders.checkpoint,
                plan=plan,
                model=model,
                run=orders.token,
                config=engine.configuration(),
                keep=orders.keep_checkpoints,
                companions=companions.tokenizer_files(
                    orders.tokenizer, orders.weights, plan.model.source
                ),
            )
            if orders.checkpoint
            else None
        )
        held_out = Corpus.open(orders.evaluate) if orders.evaluate else None
        self._held_out = (
            samples_of(held_out, seq_len=plan.seq_len, seed=plan.training.seed)
            if held_out
            else None
        )
        self._beacon = Beacon(int(os.environ.get("LOCAL_RANK", "0")))
        if orders.max_seconds is not None:
            # From here on by a clock that nobody sets.
            ends_s = now_s() + orders.max_seconds - max(0.0, unix_now_s() - orders.started_unix_s)
            engine.end_when(lambda: now_s() >= ends_s)
        on_device: Callable[[], object] | None = None
        if orders.device == "cuda":  # a new thread would begin on device 0
            on_device = functools.partial(torch.cuda.set_device, engine.device)
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="batch", initializer=on_device)
        self._coming: tuple[int, Future[tuple[Tensor, ...]]] | None = None
        self._used = UsedSamples(engine.slice_rank) if orders.checkpoint else None
        replays = mirror is not None and can_replay(plan)
        self._replays = Replays(plan, orders.device) if replays else None
        if replays:
            engine.measure_own_gradient()

    @functools.cached_property
    def _frozen(self) -> str | None:
        """Weights that stay as they are, if adapters are trained."""
        return checkpoint.frozen_weights(self.plan, self.orders.weights)

    @functools.cached_property
    def _identity(self) -> TrainingIdentity:
        return TrainingIdentity.of(
            plan=self.plan, model=self.model, corpus=self.corpus, frozen=self._frozen
        )

    def resume(self, saved: Path) -> None:
        """Go on where a checkpoint ends."""
        progress = checkpoint.progress(saved)
        progress.check(
            plan=self.plan,
            model=self.model,
            corpus=self.corpus,
            folder=saved,
            frozen=self._frozen,
        )
        checkpoint.load(saved, self.engine.state())
        self.steps_done = progress.step
        self.engine.next_sample = progress.sample
        if self._used is not None:
            assert progress.used is not None
            self._used.go_on_from(progress.used)
        self.resumed = saved

    def go_on_from(self, kept: MirroredState, *, after_saved: int) -> None:
        """Go on from what was in memory, `after_saved` being the step of the last checkpoint."""
        self._put_back(kept)
        self.resumed = self.orders.resumed
        # Those steps are not done again, and metrics were cut behind the checkpoint.
        output = self.orders.output
        if self.rank == 0:
            self._before = run.steps_of_events(output, after=after_saved, until=kept.step)

    def _put_back(self, kept: MirroredState) -> None:
        """Have the state of a copy, of the same model and data."""
        source = f"the copy in memory of step {kept.step}"
        if kept.identity is None:
            raise LaunchError(
                f"{source} does not name its model and data; resume from a checkpoint"
            )
        kept.identity.check(self._identity, source=source)
        self.engine.restore(kept.snapshots)
        if wrong := kept.used.wrong(self.engine.next_sample):
            raise LaunchError(f"{source} cannot be used: {wrong}")
        assert self._used is not None
        self._used.go_on_from(kept.used)
        self.steps_done = kept.step

    def run(self) -> RankRecord:
        """Train until the steps or the seconds are used up; return what was measured.

        Ranks that look for cycles at moments of their own would let all others wait.
        """
        with pause_collector():
            try:
                return self._run()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(str(error), self._held_bytes()) from error
            finally:
                self._ahead.shutdown(cancel_futures=True)

    def _held_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank, by kind; on a GPU with what else its allocator has."""
        tensors = self.engine.resident_tensors()
        sizes = {name: to_local(tensor).nbytes for name, tensor in tensors.items()}
        model = sum(size for name, size in sizes.items() if name.startswith("model."))
        held = {
            "parameters": model,
            "gradients": self.engine.gradient_bytes,
            "optimizer": sum(sizes.values()) - model,
        }
        if self.orders.device == "cuda":
            other = torch.cuda.memory_allocated() - sum(held.values())
            held["activations and all else"] = max(0, other)
        return held

    def _run(self) -> RankRecord:
        first = self.steps_done + 1
        watched = min(first + MEMORY_STEP - 1, self.orders.steps)
        metrics = self._metrics(first) if self.rank == 0 else None
        schedule = self._save_schedule(self._saver) if self._saver is not None else None
        step_s: list[float] = []
        compiler, graphs = self.engine.compiler, self.engine.graphs
        peak = _Peak(self.orders.device, compiled=compiler is not None)
        ends: Stopped | None = None
        loss = 0.0
        while ends is None and self.steps_done < self.orders.steps:
            step = self.steps_done + 1
            begin = time.perf_counter()
            result = (
                self._step()
                if step != watched
                else peak.watch(self._step, self.engine.resident_tensors())
            )
            step_s.append(time.perf_counter() - begin)
            self._check(step, result)
            self.steps_done = step
            ends = "max_seconds" if result.out_of_time else None
            if result.noticed and self._saver is not None and step < self.orders.steps:
                ends = "notice"
            self._beacon.begin_part(step, "evaluate")
            held_out = self._held_out if ends != "notice" else None
            last = ends == "max_seconds"
            eval_loss = None if held_out is None else self._eval_loss(held_out, last=last)
            if not result.skipped:
                loss = result.loss
            if metrics is not None and not result.skipped:
                metrics.write(self._record(result, step_s[-1], eval_loss, peak.so_far_bytes()))
            if self._mirror is not None:
                self._copy(self._mirror, step, step_s, loss, metrics)
            if self._saver is not None and schedule is not None:
                self._look_at_save(self._saver, metrics)
                if ends or step == self.orders.steps or schedule.due(step):
                    self._beacon.begin_part(step, "save")
                    self._look_at_save(self._saver, metrics, waits=True)
                    schedule.saves(step, step_s, metrics)
                    state = self.engine.state()
                    self.engine.refuse_drifted()
                    self._saver.begin(state, self._progress(loss))
                    if ends is None and step < self.orders.steps and _ends_to_grow():
                        ends = "grow"
                schedule.after_step(step, step_s, metrics)
            if self.steps_done % COLLECTED_EVERY == 0:
                gc.collect(1)
        self._beacon.begin_part(self.steps_done, "end")
        self.engine.state()  # a pipeline that never drains does so now
        saved = self._saved_at_the_end(step_s, loss, metrics)
        if schedule is not None:
            schedule.report_last_save(metrics)
        if metrics is not None:
            metrics.close()
        return RankRecord(
            rank=self.rank,
            stage=self.plan.pipeline_rank(self.rank),
            first_step=first,
            step_s=tuple(step_s),
            untimed_steps=(watched,) if peak.slows else (),
            compile_s=compiler.seconds if compiler else 0.0,
            not_compiled=compiler.fallbacks if compiler else {},
            captured=graphs.replays if graphs else 0,
            not_captured=graphs.obstacle if graphs else None,
            peak_memory_bytes=peak.so_far_bytes(),
            memory_source=peak.source,
            **(peak.of_device() if self.orders.device == "cuda" else {}),
            stopped=ends or "steps",
            checkpoint=object_store.shown(saved) if saved else None,
        )

    def _saved_at_the_end(
        self, step_s: Sequence[float], loss: float, metrics: Metrics | None
    ) -> Path | None:
        """Return the last complete checkpoint; a state that cannot be saved waits in memory."""
        try:
            return self._last_saved()
        except LaunchError:
            if self._mirror is not None:
                self._copy(self._mirror, self.steps_done, step_s, loss, metrics, is_last=True)
            raise

    def _copy(
        self,
        mirror: Mirror,
        step: int,
        step_s: Sequence[float],
        loss: float,
        metrics: Metrics | None,
        *,
        is_last: bool = False,
    ) -> None:
        """Copy the state where it outlives this process, and say how often that is done."""
        from meshwright.runtime.resilience.in_memory_checkpoint import MEASURED  # noqa: PLC0415

        if self._used is None or not (is_last or mirror.is_due(step)):
            return
        began_s, usual_s = time.thread_time(), min(step_s[-MEASURED:])
        snapshot = self.engine.snapshot(copied=False)
        mirror.copy(
            snapshot,
            used=self._used.digest(),
            began_s=began_s,
            step_s=usual_s,
            loss=loss,
            epoch=self.samples.epoch(self.engine.next_sample),
        )
        if metrics is not None and mirror.costs_more:
            metrics.log_event(mirror.interval(usual_s, snapshot.size_bytes))
        if self._replays is not None:
            self._replays.forget_before(step)

    def _look_at_save(self, saver: Saver, metrics: Metrics | None, *, waits: bool = False) -> None:
        """Tell if a checkpoint could not be written; wait for it, if it `waits`.

        Where copies in memory outlive this process training goes on, and the next save tries again.
        """
        if self._mirror is None:
            if waits:
                saver.finish()
            saver.check()
            return
        failed = saver.take_failure(waits=waits)
        if failed is not None and metrics is not None:
            step, why = failed
            metrics.log_event(SaveFailed(at_unix_s=unix_now_s(), step=step, why=why[:MOST_WHY]))

    def _save_schedule(self, saver: Saver) -> SaveSchedule:
        """Return when this run is saved from here on."""
        from meshwright.runtime.checkpoint.writer import SaveSchedule  # noqa: PLC0415

        return SaveSchedule(self.orders, saver, after_step=self.steps_done)

    def _metrics(self, first: int) -> Metrics:
        """Return what is written from step `first` on, and for which loggers."""
        orders, output = self.orders, self.orders.output
        config = self.plan.model_dump(
            mode="json", exclude={"stages", "other_pipelines"}, exclude_none=True
        )
        loggers: list[Logger] = []
        if orders.tensorboard:
            loggers.append(TensorBoard(run.tensorboard_folder(output), first=first))
        if orders.wandb is not None:
            loggers.append(WeightsAndBiases(orders.wandb, output=output, config=config))
        if orders.mlflow is not None:
            loggers.append(MLflow(orders.mlflow, output=output, config=config))
        for name in orders.logger:
            loggers.append(load_plugin("loggers", name)(output=output, first=first, config=config))
        return Metrics(output, loggers, predicted_s=orders.predicted_step_s, before=self._before)

    def _own_batch(self, samples: CorpusSamples | PackedSamples, first: int) -> tuple[Tensor, ...]:
        """Return this data rank's part of the global batch that starts at sample `first`.

        Tokens, and of conversations what counts and where documents begin.
        """
        own = self.plan.samples_of(self.engine.slice_rank)
        batch = samples.batch(first + own.start, len(own))
        parts = (torch.from_numpy(np.ascontiguousarray(p)) for p in batch if p is not None)
        # Pinned, or the host would wait until its copy is done.
        return tuple(part.pin_memory() if self.orders.device == "cuda" else part for part in parts)

    def _next_batch(self) -> tuple[Tensor, ...]:
        """Return the batch of this step, and begin to read the next one's beside it."""
        first = self.engine.next_sample
        if self._coming is None or self._coming[0] != first:
            batch = self._own_batch(self.samples, first)
        else:
            batch = self._coming[1].result()
        if self._used is not None:
            samples = self.plan.samples_of(self.engine.slice_rank)
            self._used.add(range(first + samples.start, first + samples.stop))
        after = first + self.plan.global_batch
        reading = self._ahead.submit(self._own_batch, self.samples, after)
        self._coming = after, reading
        return batch

    def _step(self) -> StepResult:
        if not self._beacon.is_seen:
            return self._take_step(self._next_batch())
        self._beacon.begin_part(self.steps_done + 1, "batch")
        begin_s = time.perf_counter()
        batch = self._next_batch()
        self._beacon.begin_part(self.steps_done + 1, "step")
        data_s, before_s = time.perf_counter() - begin_s, self._own_s()
        result = self._take_step(batch)
        self._beacon.count_step(
            data_s=data_s,
            work_s=self._own_s() - before_s,
            whole_s=time.perf_counter() - begin_s,
        )
        return result

    def _own_s(self) -> float:
        """Seconds of this rank's own work; 0 where a device does it, which says nothing of that."""
        return own_seconds() if self.orders.device == "cpu" else 0.0

    def _take_step(self, batch: tuple[Tensor, ...]) -> StepResult:
        # A step's random numbers depend on nothing before it, so none need to be saved.
        seed = step_seed(
            self.plan.training.seed,
            step=self.steps_done + 1,
            stage=self.engine.stage,
            data_rank=self.engine.slice_rank,
        )
        if self.orders.device == "cuda":
            torch.manual_seed(seed)
        else:  # torch would note down for a device that is not there who seeds it, with the stack
            torch.default_generator.manual_seed(seed)
        result = self.engine.step(batch)
        if self.orders.device == "cuda":
            torch.cuda.synchronize()
        return result

    def _eval_loss(self, held_out: CorpusSamples | PackedSamples, *, last: bool) -> float | None:
        """Return the mean loss on held-out text, at the steps where it is due."""
        step, every = self.steps_done, self.orders.evaluate_every
        if not (last or step == self.orders.steps or (every is not None and step % every == 0)):
            return None
        batch_tokens = self.plan.global_batch * self.plan.seq_len
        whole = held_out.corpus.tokens // batch_tokens
        count = min(self.orders.evaluate_batches, max(1, whole))
        losses = [
            self.engine.evaluate(self._own_batch(held_out, batch * self.plan.global_batch)).loss
            for batch in range(count)
        ]
        return sum(losses) / count

    def _check(self, step: int, result: StepResult) -> None:
        """Do a step again that is doubted, and stop where its values are no numbers."""
        is_nonsense = not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
        again_from: int | None = None
        if result.skipped:
            return
        if is_nonsense:
            self.engine.refuse_drifted()  # damaged memory says more than what became of it
        if self._replays is not None:
            self._replays.took(step, **_values(result), gradient=self.engine.own_values)
            if self._replays.doubts(step):
                again_from = self._done_again(step, self._replays)
        if is_nonsense:
            self._refuse_nonsense(result, again_from)

    def _done_again(self, last: int, replays: Replays) -> int | None:
        """Do the steps since the newest copy again; return its step, None where there is none.

        Raises StepDiffered where they give something else; the copy is then what training goes on
        from, so its replicas are compared as those of a checkpoint are.
        """
        assert self._mirror is not None
        kept = self._mirror.newest(boxes(self.engine.state()), of_this=True)
        if kept is None:
            return None
        self._put_back(kept)
        self.engine.refuse_drifted()
        for step in range(kept.step + 1, last + 1):
            result = self._step()
            replays.compare(step, **_values(result), gradient=self.engine.own_values)
            self.steps_done = step
        self.steps_done = last - 1
        replays.came_again(last)
        return kept.step

    def _refuse_nonsense(self, result: StepResult, again_from: int | None) -> None:
        """Stop on a loss or gradient that is not a number; nothing was saved since it went bad."""
        saved = self._last_saved()
        last = f"the last good checkpoint is {saved}" if saved else "nothing was saved"
        if again_from is not None:
            last = (
                f"a replay from step {again_from} gave the same, so the cause is the data or the "
                f"model, not a device; {last}"
            )
        raise NotANumber(
            f"step {self.steps_done + 1} gave loss {result.loss:g} and gradient norm "
            f"{result.grad_norm:g}; {last}. Lower the learning rate "
            f"({self.plan.training.learning_rate:g}) or look at the data from sample "
            f"{self.engine.next_sample - self.plan.global_batch} on"
        )

    def _record(
        self, result: StepResult, step_s: float, eval_loss: float | None, peak_bytes: int | None
    ) -> StepRecord:
        at_peak_s = self.orders.peak_step_s
        return StepRecord(
            step=self.steps_done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            step_s=step_s,
            tokens_per_s=self.plan.global_batch * self.plan.seq_len / step_s,
            epoch=self.samples.epoch(self.engine.next_sample),
            learning_rate=learning_rate(self.plan.training, self.steps_done - 1),
            mfu=at_peak_s / step_s if at_peak_s else None,
            eval_loss=eval_loss,
            peak_memory_bytes=peak_bytes,
            expert_load=result.expert_load,
        )

    def _last_saved(self) -> Path | None:
        """Return the last complete checkpoint, when all that was begun is written."""
        return (self._saver.finish() if self._saver else None) or self.resumed

    def _progress(self, loss: float) -> Progress:
        return Progress(
            step=self.steps_done,
            sample=self.engine.next_sample,
            epoch=self.samples.epoch(self.engine.next_sample),
            plan_digest=self.plan.digest,
            loss=loss,
            **self._identity.model_dump(),
            used=None if self._used is None else self._used.digest(),
        )


def _values(result: StepResult) -> dict[str, float]:
    return {"loss": float(result.loss), "norm": result.grad_norm}


def _ends_to_grow() -> bool:
    """Say whether the run goes on on more nodes; all ranks ask where they save."""
    if not growth.may_be_asked():
        return False
    asked = torch.tensor([int(dist.get_rank() == 0 and growth.is_asked())])
    dist.broadcast(asked, src=0)
    return bool(asked)


class _Peak:
    """The most memory of training at once on this rank.

    CUDA counts by itself, and does so from the watched step on.  Elsewhere live tensors are counted
    in the watched step, which is slower for it.
    """

    def __init__(self, device: run.Device, *, compiled: bool = False) -> None:
        """Code that is `compiled` for a CPU allocates where nobody counts."""
        self.slows = device == "cpu" and not compiled
        self.source = "live tensors of one step" if self.slows else "CUDA allocator"
        self._blind = device == "cpu" and compiled
        if self._blind:
            self.source = "not counted where blocks are compiled for a CPU"
        self._bytes: int | None = None
        self._counting = False

    def watch(self, step: Callable[[], StepResult], held: Mapping[str, Tensor]) -> StepResult:
        """Take the step and watch it; `held` are all weights and the optimizer state."""
        if self._blind:
            return step()
        if not self.slows:
            torch.cuda.reset_peak_memory_stats()
            self._counting = True
            return step()
        with LiveMemory(existing=held.values()) as live:
            result = step()
        self._bytes = live.peak_bytes
        return result

    def so_far_bytes(self) -> int | None:
        """Return the peak, or None before the watched step."""
        return torch.cuda.max_memory_allocated() if self._counting else self._bytes

    def of_device(self) -> dict[str, int]:
        """Return what RankRecord has of a device's memory, that of its other users too."""
        free, total = torch.cuda.mem_get_info()
        return {
            "reserved_memory_bytes": torch.cuda.max_memory_reserved(),
            "device_memory_bytes": total - free,
        }


def step_seed(seed: int, *, step: int, stage: int, data_rank: int) -> int:
    """Return the seed of a rank's random numbers in one step.

    Ranks that share a stage's work on the same samples draw the same numbers.
    """
    sequence = np.random.SeedSequence([seed, step, stage, data_rank])
    return int(sequence.generate_state(1, np.uint64)[0])
