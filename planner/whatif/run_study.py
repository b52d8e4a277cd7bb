"""A study carried out: every model on every candidate, in processes side by side.

The processes that a study is worked out in, and what each keeps from task to task.

They end with the process that started them, however it ends: each waits for the end of a pipe that
only that one writes to.  SIGTERM ends that one as Ctrl-C does, so that it gives back the semaphores
through which it talks to them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.planner.errors.shown import html_table
from meshwright.planner.requests.pins import read_allowances
from meshwright.planner.whatif.candidates import Candidate, NoSizeError, candidates_of
from meshwright.planner.whatif.evaluate import (
    bounded_size,
    evaluate,
    unsolved_sizes,
    with_load,
    with_sizes,
)
from meshwright.planner.whatif.executors import executor_called
from meshwright.planner.whatif.planning import NATIVE, Planned, plan_candidate, same_plan
from meshwright.planner.whatif.pricing.break_even import BreakEven, break_evens
from meshwright.planner.whatif.ranking import Doubt, Rank, doubts, flips, ordered_by, rank_outcomes
from meshwright.planner.whatif.study import PUBLIC, ChangeName, Study
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from meshwright.planner.whatif.what_if_changes import WORDS, changed_cluster

if TYPE_CHECKING:
    from meshwright.planner.catalog import Rent
    from meshwright.planner.whatif.outcome import CandidateOutcome

    _SizeQuestion = tuple[Study, int, str, Sequence[Rent] | None]
    """A study, the place of an offer, a model, and rents."""

A = TypeVar("A")
B = TypeVar("B")
FEW = 3
"""This number of tasks is not worth starting processes for."""

_kept = FigureStore()
"""Figures of a process that was started for tasks."""


class Workers:
    """Processes that start with the first tasks that are many, and end with the study."""

    def __init__(self, processes: int | None = None, executor: Executor | None = None) -> None:
        """Use `processes`, by default one for each core and never more; or another engine's."""
        cores = os.cpu_count() or 1
        self._count = min(processes or cores, cores)
        self._elsewhere = executor
        self._pool: ProcessPoolExecutor | None = None
        self._ended_by: Connection | None = None
        """Once it is closed, the processes end at whatever they are."""
        self._store = FigureStore()

    def __enter__(self) -> Self:
        """Start nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes, and wait for that if nothing went wrong."""
        if self._pool is not None and error is None:
            self._pool.shutdown()
        self.stop()

    def results_of(
        self, what: Callable[[A, FigureStore], B], tasks: Sequence[A]
    ) -> Iterator[tuple[int, B]]:
        """Yield results with the index of their task, as they come.

        `what` also gets what its process knows of layers.  Interrupted, no other task begins.
        Where a process is ended from outside, its tasks begin again in half as many.
        """
        if len(tasks) <= FEW or (self._count == 1 and self._elsewhere is None):
            for index, task in enumerate(tasks):
                yield index, what(task, self._store)
            return
        left = set(range(len(tasks)))
        while left:
            executor = self._elsewhere or self._started_pool()
            waiting = {executor.submit(_in_process, what, tasks[at]): at for at in sorted(left)}
            try:
                for future in as_completed(waiting):
                    result = future.result()
                    left.discard(waiting[future])
                    yield waiting[future], result
            except BrokenProcessPool as error:
                self.stop()
                if self._count == 1:
                    raise MeshwrightError(
                        "a process of the study was ended from outside again and again, as where "
                        "memory is short; ask for fewer candidates, or give the study more memory; "
                        "a script that runs studies does so under `if __name__ == '__main__':`"
                    ) from error
                self._count = max(1, self._count // 2)
            except BaseException:
                for future in waiting:
                    future.cancel()
                self.stop()
                raise

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            read, self._ended_by = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self._count, context, _end_with, (read,))
            _on_termination(signal.SIG_DFL, _terminate)
        return self._pool

    def stop(self) -> None:
        """End the processes in the middle of what they are at."""
        _on_termination(_terminate, signal.SIG_DFL)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        if self._ended_by is not None:
            self._ended_by.close()
            self._ended_by = None


def _on_termination(was: object, becomes: Callable[[int, FrameType | None], object] | int) -> None:
    """Handle SIGTERM otherwise if it `was` handled so; who uses us may have a way of its own."""
    of_main = threading.current_thread() is threading.main_thread()
    if of_main and signal.getsignal(signal.SIGTERM) == was:
        signal.signal(signal.SIGTERM, becomes)


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    """End this process in order, as a shell knows it from a process that a signal has ended."""
    raise SystemExit(128 + number)


def _end_with(other: Connection) -> None:
    """End this process when the other end of a pipe is closed; called where it starts."""

    def end() -> None:
        wait([other])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _in_process(what: Callable[[A, FigureStore], B], task: A) -> B:
    return what(task, _kept)


Progress = Callable[[int, int], None]
SIZES_FIRST = 3
"""Number of sizes of a cluster, of many, that are planned under every framework."""
NATIVE_TOO = 3
"""Number of each model's first candidates that are planned for our own runtime too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One candidate with one figure changed, planned again."""

    change: ChangeName
    factor: float
    outcome: CandidateOutcome
    time: float
    """Seconds per token over those before."""
    cost: float | None
    """Cost at the same price, over that before."""
    premium_usd_per_device_hour: float | None
    """Dollars that the change may cost at most, an hour and device, to pay."""
    plan_changed: bool

    @property
    def words(self) -> str:
        """The change, as people say it."""
        return f"{WORDS[self.change]} x {self.factor:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything a study found."""

    study: Study
    outcomes: tuple[CandidateOutcome, ...]
    """In the order of candidates and models; fewer than asked for if it was interrupted."""
    ranks: dict[str, list[Rank]]
    """By model."""
    marginal: tuple[Changed, ...] = ()
    curves: tuple[tuple[Changed, ...], ...] = ()
    doubts: tuple[Doubt, ...] = ()
    flips: tuple[str, ...] = ()
    interrupted: bool = False
    base: CandidateOutcome | None = None
    """Outcome that marginal values and curves are compared with."""
    sizes: tuple[str, ...] = ()
    """Sizes that were found, each with what bounds it."""
    candidates: dict[str, Candidate] = field(default_factory=dict)
    break_even: tuple[BreakEven, ...] = ()
    apart: str = ""
    """Why prices are of two markets where one has all candidates."""

    def _repr_html_(self) -> str:
        """Return the study as notebooks show it: every candidate, those that fit first."""
        rows = [
            (
                outcome.model,
                outcome.candidate,
                outcome.layout or outcome.binding,
                seconds_text(outcome.step_s.value) if outcome.step_s else "",
                f"{outcome.usd.value:,.0f} USD" if outcome.usd else "",
                "; ".join(outcome.misses),
            )
            for outcome in sorted(self.outcomes, key=lambda outcome: not outcome.fits)
        ]
        head = ("model", "candidate", "plan", "step", "cost", "misses")
        return html_table(self.study.name, head, rows)

    @property
    def best(self) -> CandidateOutcome | None:
        """The first of the first model that has one which is sold, fits and meets the goal."""
        return next((best for best in map(self.best_of, self.ranks) if best is not None), None)

    def best_of(self, model: str) -> CandidateOutcome | None:
        """The first of a model, if it is sold, fits and meets the goal."""
        return _first_of(self.ranks[model])


def _first_of(ranks: Sequence[Rank]) -> CandidateOutcome | None:
    """Return the first outcome, if it is sold and meets the goal."""
    if not ranks or ranks[0].outcome.misses or ranks[0].outcome.hypothetical:
        return None
    return ranks[0].outcome


@dataclass(frozen=True, slots=True)
class _Task:
    study: Study
    model: str
    candidate: Candidate
    framework: str | None = None
    """Instead of the study's own."""
    likely: str | None = None
    """The framework that is faster than others on fewer devices and on more."""


def run(
    study: Study,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    offers: Sequence[Rent] | None = None,
    executor: Executor | str | None = None,
) -> Result:
    """Carry out a study; interrupting it keeps what is done.

    `offers` are dated rents instead of the catalogue's.  `executor` plans candidates: an engine's
    name (`executors.py`) or any executor of `concurrent.futures`.
    """
    if isinstance(executor, str):
        engine = executor_called(executor)
        if engine is not None:
            with engine:
                return run(study, progress=progress, offers=offers, executor=engine)
        executor = None
    with Workers(processes, executor) as workers:
        return _carried_out(study, workers, progress, offers)


def _carried_out(
    study: Study, workers: Workers, progress: Progress | None, offers: Sequence[Rent] | None
) -> Result:
    size_texts: tuple[str, ...] = ()
    sizes = [(study, place, model, offers) for place, model in unsolved_sizes(study)]
    if sizes:
        size_results = sorted(workers.results_of(_size, sizes), key=itemgetter(0))
        size_texts = tuple(_size_text(study, sizes[at], *result) for at, result in size_results)
        places = [(sizes[at][1], n) for at, (n, _) in size_results]
        found_places = {place for place, n in places if n}
        if not found_places and {place for place, _ in places} == set(range(len(study.offers))):
            raise DocumentError(f"offers[{places[0][0]}].solve", size_results[0][1][1])
        study = with_sizes(study, places)
    candidates = {candidate.name: candidate for candidate in candidates_of(study, offers)}
    tasks = [
        _Task(study, model, candidate) for model in study.rows for candidate in candidates.values()
    ]
    done: dict[int, CandidateOutcome] = {}
    plans: dict[int, Planned] = {}
    interrupted, apart = False, ""
    study_progress = _StudyProgress(progress, len(tasks) + _changes_asked(study))
    try:
        for index, plan, outcome in _evaluate_tasks(tasks, workers, study_progress):
            done[index], plans[index] = outcome, plan
        dearer = _at_lower_prices(tasks, plans, done, offers)
        if dearer is not None:
            tasks, done, apart = dearer
            candidates |= {task.candidate.name: task.candidate for task in tasks}
        done |= dict(_natives(tasks, done, workers))
    except KeyboardInterrupt:
        interrupted = True
    outcomes = tuple(done[index] for index in sorted(done))
    if len(study.rows) == 1:  # its outcome says how much of each candidate is used
        candidates |= {o.candidate: with_load(candidates[o.candidate], o) for o in outcomes}
    result = Result(
        study=study,
        outcomes=outcomes,
        ranks=_ranks(study, outcomes),
        interrupted=interrupted,
        sizes=size_texts,
        candidates=candidates,
        break_even=tuple(break_evens(list(candidates.values()))),
        apart=apart,
    )
    return result if interrupted else _add_follow_ups(result, workers, study_progress)


def _at_lower_prices(
    tasks: Sequence[_Task],
    plans: Mapping[int, Planned],
    done: Mapping[int, CandidateOutcome],
    offers: Sequence[Rent] | None,
) -> tuple[list[_Task], dict[int, CandidateOutcome], str] | None:
    """Return tasks and outcomes at the lower market's price each, and why; None where no need is.

    Where one market has all candidates they are compared in it.  But nobody takes the first there
    if another costs less elsewhere: then each has the price that it would be rented at.  A size
    that a budget affords stays at the prices that it was found at.
    """
    study = tasks[0].study
    listed = [task.candidate.priced for task in tasks]
    if any(offer.solve == "afford" for offer in study.offers) or not any(
        priced.elsewhere_usd is not None
        and priced.quote is not None
        and priced.elsewhere_usd < priced.quote.value
        for priced in listed
    ):
        return None
    lower = {each.name: each for each in candidates_of(study, offers, together=False)}
    cheaper = [replace(task, candidate=lower[task.candidate.name]) for task in tasks]
    again = {
        at: evaluate(study, cheaper[at].model, cheaper[at].candidate, plan)
        for at, plan in plans.items()
    }
    firsts = {}
    for model, ranks in _ranks(study, list(done.values())).items():
        best = _first_of(ranks)
        there = _first_of(_ranks(study, list(again.values()))[model])
        if there is not None and (best is None or best.candidate != there.candidate):
            firsts[model] = "none keeps the goal" if best is None else f"{best.candidate} is first"
    if not firsts:
        return None
    [market, *_] = dict.fromkeys(m for priced in listed for m in priced.markets)
    words = " and ".join(dict.fromkeys(firsts.values()))
    return (
        cheaper,
        again,
        f"only {market}s rent them all, where {words}; --market {market} compares there",
    )


def _size(question: _SizeQuestion, store: FigureStore) -> tuple[int, str]:
    """Return the size of an offer, 0 if it has none, and why."""
    try:
        return bounded_size(*question, store)
    except NoSizeError as refusal:
        return 0, refusal.message  # other offers are answered


def _size_text(study: Study, question: _SizeQuestion, n: int, why: str) -> str:
    _, place, model, _ = question
    cluster = study.offers[place].cluster
    if n == 0:
        return f"{cluster} is left out for {model}: {why}."
    return f"{cluster.replace('{n}', f'{n:,}')} is the size for {model}: {why}."


def _ranks(study: Study, outcomes: Sequence[CandidateOutcome]) -> dict[str, list[Rank]]:
    return {
        model: rank_outcomes(study, [outcome for outcome in outcomes if outcome.model == model])
        for model in study.rows
    }


def _natives(
    tasks: Sequence[_Task], done: Mapping[int, CandidateOutcome], workers: Workers
) -> Iterator[tuple[int, CandidateOutcome]]:
    """Yield the first outcomes of each model with what our own runtime would take there.

    None where the study names the framework that it asks of.
    """
    if tasks[0].study.work.framework != PUBLIC or tasks[0].study.jobs:
        return
    places = {(done[at].model, done[at].candidate): at for at in done}
    wanted: dict[tuple[str, ...], list[int]] = {}
    for model, ranks in _ranks(tasks[0].study, list(done.values())).items():
        for rank in ranks[:NATIVE_TOO]:
            at = places[model, rank.outcome.candidate]
            task = tasks[at]
            if rank.outcome.framework == NATIVE:
                yield at, _with_native(done[at], done[at].step_s)
            elif task.candidate.tuning not in ("lora", "qlora"):
                key = same_plan(task.study, model, task.candidate)
                wanted.setdefault(key, []).append(at)
    groups = list(wanted.values())
    native_tasks = [_native(tasks[group[0]]) for group in groups]
    for group, plan in workers.results_of(_plan, native_tasks):
        if plan.prediction is not None:
            step = exact(plan.prediction.step_time_s)
            for at in groups[group]:
                yield at, _with_native(done[at], step)


def _native(task: _Task) -> _Task:
    """Return a task of our own runtime beside a public one, with everything on the devices.

    Its choices of what each layer offloads take minutes, and a step beside another is not worth
    them; a study under `native` has them.
    """
    allowed = sorted(read_allowances(task.candidate.allow) - {"offload"})
    return replace(task, framework=NATIVE, candidate=replace(task.candidate, allow=tuple(allowed)))


def _with_native(outcome: CandidateOutcome, step: UncertainValue | None) -> CandidateOutcome:
    return outcome if step is None else replace(outcome, native_step_s=step.value)


def _changes_asked(study: Study) -> int:
    """Return how many changes of single candidates a study asks for."""
    marginal = study.marginal.changes.values() if study.marginal else ()
    return sum(map(len, marginal)) + sum(len(curve.factors) for curve in study.curves)


class _StudyProgress:
    """Progress over all rounds of evaluations: candidates first, then changes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def more(self, count: int) -> None:
        """Report that `count` more tasks are done."""
        self._done = min(self._total, self._done + count)
        if self._progress:
            self._progress(self._done, self._total)


def _add_follow_ups(result: Result, workers: Workers, progress: _StudyProgress) -> Result:
    """Add marginal values, curves and doubts, which are about single candidates."""
    study = result.study
    best = result.best or next((o for o in result.outcomes if o.fits), None)
    if best is None:
        return result
    marginal: tuple[Changed, ...] = ()
    base = best
    if study.marginal is not None:
        base = _base(result, study.marginal.offer, best)
        wanted = [(c, f) for c, factors in study.marginal.changes.items() for f in factors]
        marginal = tuple(_changes(result, base, wanted, workers, progress))
    curves = []
    for curve in study.curves:
        base = _base(result, curve.offer, best)
        wanted = [(curve.change, factor) for factor in curve.factors]
        changes = tuple(_changes(result, base, wanted, workers, progress))
        if changes:  # none where the cluster has nothing of the kind
            curves.append(changes)
    first = result.ranks[best.model]
    return replace(
        result,
        marginal=marginal,
        curves=tuple(curves),
        doubts=tuple(doubts(study, best)),
        flips=tuple(flips(study, first)),
        base=base,
    )


def _base(result: Result, offer: str | None, best: CandidateOutcome) -> CandidateOutcome:
    if offer is None:
        return best
    for outcome in result.outcomes:
        if outcome.candidate == offer and outcome.fits:
            return outcome
    raise DocumentError(
        "offer", f"'{offer}' is no candidate that fits; there are {', '.join(result.candidates)}"
    )


def _changes(
    result: Result,
    base: CandidateOutcome,
    wanted: Sequence[tuple[ChangeName, float]],
    workers: Workers,
    progress: _StudyProgress,
) -> Iterator[Changed]:
    """Yield what each change of a candidate does to it, planned again at the same price."""
    candidate = result.candidates[base.candidate]
    possible, tasks = [], []
    for change, factor in wanted:
        cluster = changed_cluster(candidate.cluster, change, factor)
        if cluster is None:
            continue
        other = replace(
            candidate,
            name=f"{candidate.name}, {WORDS[change]} x {factor:g}",
            cluster=cluster,
            narrower=candidate.cluster if change == "domain" and factor > 1 else None,
        )
        possible.append((change, factor))
        tasks.append(
            _Task(_resized_work(result.study, base, change, cluster.devices), base.model, other)
        )
    evaluated = _evaluate_tasks(tasks, workers, progress)
    outcomes = {index: outcome for index, _, outcome in evaluated}
    for index, (change, factor) in enumerate(possible):
        yield _changed_outcome(base, change, factor, outcomes[index])


def _resized_work(study: Study, base: CandidateOutcome, change: ChangeName, devices: int) -> Study:
    """Return the study with a global batch that grows with the devices, if they change."""
    if change != "devices" or base.tokens_per_s is None or base.plan is None:
        return study
    each = base.plan.global_batch / base.devices
    batch = max(1, round(each * devices))
    work = study.work.model_copy(update={"global_batch": batch})
    return study.model_copy(update={"work": work})


def _changed_outcome(
    base: CandidateOutcome, change: ChangeName, factor: float, outcome: CandidateOutcome
) -> Changed:
    time = float("inf")
    cost = premium = None
    if outcome.fits and outcome.tokens_per_s is not None and base.tokens_per_s is not None:
        time = base.tokens_per_s.value / outcome.tokens_per_s.value
        cost = time * outcome.devices / base.devices
        price = base.usd_per_device_hour
        if price is not None:
            premium = price.value * (1 / cost - 1)
    return Changed(
        change=change,
        factor=factor,
        outcome=outcome,
        time=time,
        cost=cost,
        premium_usd_per_device_hour=premium,
        plan_changed=outcome.layout != base.layout,
    )


def _evaluate_tasks(
    tasks: Sequence[_Task], workers: Workers, progress: _StudyProgress
) -> Iterator[tuple[int, Planned, CandidateOutcome]]:
    """Yield plans and outcomes with the index of their task, as they come.

    Candidates that differ in their terms alone are planned once.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, task in enumerate(tasks):
        key = same_plan(task.study, task.model, task.candidate)
        alike.setdefault(key, []).append(index)
    groups = list(alike.values())
    for group, plan in _planned_by_size([tasks[group[0]] for group in groups], workers):
        for index in groups[group]:
            task = tasks[index]
            yield index, plan, evaluate(task.study, task.model, task.candidate, plan)
        progress.more(len(groups[group]))


def _planned_by_size(tasks: Sequence[_Task], workers: Workers) -> Iterator[tuple[int, Planned]]:
    """Yield plans; where sizes alone differ, the least, a middle and the most are planned first.

    Between two sizes on which the same framework is fastest, only that one is searched.
    """
    rows = [row for row in _rows_of_sizes(tasks) if len(row) > SIZES_FIRST + 1]
    ends = {at for row in rows for at in (row[0], row[len(row) // 2], row[-1])}
    later = {at for row in rows for at in row} - ends
    first = [at for at in range(len(tasks)) if at not in later]
    plans: dict[int, Planned] = {}
    for place, plan in workers.results_of(_plan, [tasks[at] for at in first]):
        plans[first[place]] = plan
        yield first[place], plan
    rest, order = [], sorted(later)
    for row in rows:
        for at in row:
            if at in later:
                below = max((k for k in row[: row.index(at)] if k in ends), key=row.index)
                above = min((k for k in row[row.index(at) :] if k in ends), key=row.index)
                rest.append((at, _between(plans[below], plans[above])))
    rest.sort()
    task_variants = [replace(tasks[at], likely=framework) for at, framework in rest]
    for place, planned_run in workers.results_of(_plan, task_variants):
        yield order[place], planned_run


def _between(fewer: Planned, more: Planned) -> str | None:
    """Return what wins on fewer and on more devices, or on more where nothing fits fewer."""
    return more.framework if fewer.framework in ("", more.framework) and more.framework else None


def _rows_of_sizes(tasks: Sequence[_Task]) -> list[list[int]]:
    """Return indexes of tasks that differ in the number of nodes alone, the fewest first."""
    rows: dict[tuple[object, ...], list[int]] = {}
    for index, task in enumerate(tasks):
        candidate = task.candidate
        if task.framework is not None or len(candidate.cluster.groups) > 1:
            continue
        group = candidate.limited_cluster.groups[0]
        accelerator, per_node = group.accelerator.model_dump_json(), group.devices_per_node
        terms = (candidate.tuning, candidate.fix, candidate.allow, candidate.changes)
        work = task.study.work.model_dump_json()
        rows.setdefault((task.model, accelerator, per_node, terms, work), []).append(index)
    return [sorted(row, key=lambda at: tasks[at].candidate.devices) for row in rows.values()]


def _plan(task: _Task, store: FigureStore) -> Planned:
    return plan_candidate(
        task.study, task.model, task.candidate, task.framework, task.likely, store
    )


def result_json(result: Result) -> dict[str, Any]:
    """Return everything a study found as plain data."""
    return {
        "study": result.study.model_dump(mode="json", exclude_none=True),
        "ranked_by": ordered_by(result.study, result.outcomes),
        "interrupted": result.interrupted,
        "sizes": list(result.sizes),
        "outcomes": [outcome.as_dict() for outcome in result.outcomes],
        "ranks": {
            model: [
                {
                    "candidate": rank.outcome.candidate,
                    "place": rank.place,
                    "tied": rank.tied,
                    "pareto": rank.pareto,
                    "ties_at_usd_per_device_hour": rank.ties_at_usd_per_device_hour,
                    "probability_first": rank.first,
                }
                for rank in ranks
            ]
            for model, ranks in result.ranks.items()
        },
        "marginal": [_changed_json(change) for change in result.marginal],
        "curves": [[_changed_json(change) for change in curve] for curve in result.curves],
        "doubts": [{"cause": doubt.cause, "share": doubt.share} for doubt in result.doubts],
        "flips": list(result.flips),
        "break_even": [
            {
                "name": curve.name,
                "utilisation": list(curve.utilisation),
                "usd_per_device_hour": list(curve.usd_per_device_hour),
                "cash_usd": list(curve.cash_usd),
                "present_value_usd": curve.present_value_usd.as_dict(),
                "against": {
                    against.name: {
                        "share": against.share,
                        "low": against.low,
                        "high": against.high,
                        "waiting_usd": against.waiting_usd,
                    }
                    for against in curve.against
                },
            }
            for curve in result.break_even
        ],
    }


def _changed_json(change: Changed) -> dict[str, Any]:
    return {
        "change": change.change,
        "factor": change.factor,
        "fits": change.outcome.fits,
        "layout": change.outcome.layout,
        "step_time_s": change.outcome.step_s.value if change.outcome.step_s else None,
        "time": change.time if change.outcome.fits else None,
        "cost": change.cost,
        "premium_usd_per_device_hour": change.premium_usd_per_device_hour,
        "plan_changed": change.plan_changed,
    }
