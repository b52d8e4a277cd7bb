"""The command `tune`: try the plans that prediction cannot distinguish, answer by measurement.

    FOLDER/
    ├── profile.yaml      measurements of the machine before the trials, if they paid
    ├── subject.json      subject of the trials
    ├── trials.jsonl      a line for each finished trial
    ├── constants.yaml    the cluster's constants as trials show them: a profile
    ├── cluster.yaml      the cluster with them, for `plan` and `whatif`
    └── 01/ 02/ ...       plan, configuration and output of each trial; with
                          `--trial-cluster` the model with fewer layers

The plan so far is written after every trial, so that whenever this ends it is one that ran.  With
the same arguments it goes on behind the last finished trial.

With `--trial-cluster` trials are of plans in small on fewer devices
(`planner.tuning.scaled_down_trials`); what is believed of the plans themselves follows from those,
and the answer is not measured.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from meshwright.api.calibration import profile_of_any_model
from meshwright.api.commands import answer_to
from meshwright.api.commands import profile as measure
from meshwright.api.inputs import (
    is_plan,
    machine_of,
    model_of,
    need_torch,
    plan_model,
    profile_for,
)
from meshwright.api.launched_model import launched_model
from meshwright.api.plan_options import JobOptions, PlanOptions, keyword_options
from meshwright.planner.calibration.fitting.fitted_constants import with_fitted_constants
from meshwright.planner.costs.predict import predict
from meshwright.planner.costs.slowdown import pace_of, paced_framework
from meshwright.planner.costs.uncertainty import bounded_by_words
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Calibration, Profile, Profiles
from meshwright.planner.documents.units import duration_s, whole_number
from meshwright.planner.errors import DocumentError, LaunchError, NoPlanFits
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.framework_configs.logs import READERS, LoggedWork
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import SURE_TO_FIT, Request
from meshwright.planner.search.answer import Answer, Progress
from meshwright.planner.search.search import search
from meshwright.planner.system.safe_files import folder_within
from meshwright.planner.tuning.candidates import TrialCandidate, candidates
from meshwright.planner.tuning.constants import as_measured, calibration
from meshwright.planner.tuning.next_trial import START_S, Outcome, Tuner
from meshwright.planner.tuning.record import (
    SUBJECT,
    Subject,
    Trial,
    append,
    differences,
    read_trials,
)
from meshwright.planner.tuning.scaled_down_trials import (
    InSmall,
    SmallTrial,
    check_smaller,
    in_small,
)
from meshwright.runtime.run.locks_and_signals import alone_in, signals_interrupt
from meshwright.runtime.run.run_report import WARM_UP_STEPS
from meshwright.tune.trial import USUAL, Measured, TrialProcess, launch_words, trial, words_of

DEFAULT_TRIALS = 8
CONSTANTS_FILE, CLUSTER_FILE, PROFILE_FILE = "constants.yaml", "cluster.yaml", "profile.yaml"
LONGEST_START_S = 600.0
"""Seconds before its first step after which a trial is given up."""
SUFFIXES = {
    "accelerate": ".yaml",
    "deepspeed": ".json",
    "fsdp": ".py",
    "megatron": ".args",
    "torchtitan": ".py",
}
"""Suffixes of configuration files, by framework."""
INTERRUPTED = "interrupted; the same command goes on from here"
PATIENCE = 5.0
"""Factor on its predicted seconds after which a trial is ended."""
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBudget:
    """Largest number, or seconds, of trials."""

    trials: int | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, text: str) -> TrialBudget:
        """Read `8 trials` or a duration.

        >>> TrialBudget.read("8 trials").trials, TrialBudget.read("20min").seconds
        (8, 1200.0)
        """
        words = text.split()
        if len(words) == 2 and words[1] in ("trial", "trials"):
            count = whole_number(words[0])
            if not count:
                raise DocumentError("budget", f"'{text:.40}': write 8 trials, or 20min")
            return cls(trials=count)
        return cls(seconds=duration_s(text))

    def allows(self, trials: Sequence[Trial], next_s: float) -> bool:
        """Return True if the budget has room for another trial; the first one always fits."""
        if not trials:
            return True
        if self.trials is not None:
            return len(trials) < self.trials
        return sum(trial.seconds for trial in trials) + next_s <= (self.seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedProof:
    """Proof of a search with the constants of its trials."""

    chosen_s: float
    """Predicted seconds of the answer's step with these constants."""
    lower_bound_s: float
    """Lower bound in seconds on the step of every plan of the space."""
    layout: str
    """Layout of the plan that is predicted fastest with these constants."""
    step_s: float
    """Predicted seconds of that plan's step."""
    known: bool
    """True if that plan was among the candidates of trials."""

    @property
    def gap(self) -> float:
        """Largest share of the answer's step by which another plan may be faster."""
        return max(0.0, 1 - self.lower_bound_s / self.chosen_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Results of trials."""

    candidates: tuple[TrialCandidate, ...]
    trials: tuple[Trial, ...]
    tuner: Tuner
    devices: int
    planned_s: float
    """CPU seconds of the search."""
    stopped: str
    """Reason for which there are no more trials."""
    plan_file: str | None = None
    folder: Path | None = None
    queue: tuple[int, ...] = field(default=())
    """Trials of a dry run, as far as they are known before the first trial."""
    small: InSmall | None = None
    """Stand-ins that are tried instead of the candidates."""
    trial_cluster: str | None = None
    """Smaller cluster on which the stand-ins are tried."""
    proof: RenewedProof | None = None

    @property
    def options(self) -> tuple[TrialCandidate, ...]:
        """Plans of the tuner's options."""
        return (*self.candidates, *_stood_in(self.small))

    @property
    def chosen(self) -> TrialCandidate:
        """The answer."""
        return self.candidates[self.tuner.answer]

    @property
    def step_s(self) -> float | None:
        """Measured seconds of the answer's step."""
        answer = self.tuner.answer
        return self.tuner.measured_step(answer).step_s if answer in self.tuner.ran else None

    @property
    def first_s(self) -> float | None:
        """Measured seconds of a step of the plan that was predicted fastest."""
        return self.tuner.measured_step(0).step_s if 0 in self.tuner.ran else None

    @property
    def device_seconds(self) -> float:
        """Device-seconds of all trials."""
        return self.devices * sum(trial.seconds for trial in self.trials)


def _stood_in(small: InSmall | None) -> tuple[TrialCandidate, ...]:
    """Return the candidates that stand in on the smaller cluster."""
    return tuple(stand_in.candidate for stand_in in small.stand_ins) if small else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(JobOptions):
    """A job, its space, what trials may take, and how they are run."""

    trial_cluster: str | None = None
    """A smaller cluster of the same devices, where plans are tried in small."""
    profile: str | None = None
    fix: Sequence[str] = ()
    allow: Sequence[str] = ()
    framework: str = "native"
    budget: str | None = None
    """`8 trials`, or about how long: `20min`."""
    run: str | None = None
    """Template of a command that trains by a plan."""
    data: str | None = None
    tokenizer: str | None = None
    trust_code: bool = False
    trials: str | None = None
    """Folder of trials; by default beside the plan."""
    output: str = "plan.yaml"
    dry_run: bool = False
    progress: Progress | None = None
    notify: ProgressCallback = lambda text: None

    def of_plan(self) -> PlanOptions:
        """Return the options of the plan that is tuned."""
        job = {each.name: getattr(self, each.name) for each in fields(JobOptions)}
        return PlanOptions(**job, fix=self.fix, allow=self.allow, framework=self.framework)


@keyword_options(TuneOptions)
def tune(model: str, cluster: str, *, options: TuneOptions) -> TuningResult:
    """Measure what prediction cannot tell apart, and return the plan that is fastest measured.

    `model` may be a plan, as `meshwright.plan` saves one of a script's own module: its job and
    training settings are kept.  Trials go on until no other plan is more than 2 % faster with 95 %
    probability, or `budget` (`8 trials`, `20min`) ends.  `run` is the template of a command that
    trains by a plan, with {plan}, {config} (the plan as its framework's configuration) and {output}
    (a folder): another framework's, or `meshwright run` with a script; usually `meshwright launch`
    runs them.  Without a `profile` this machine is measured first where that gains more per second
    than a trial.  `trial_cluster` is a smaller cluster of the same devices: plans are tried there
    in small, with fewer stages and layers, and the answer is believed and not measured. `trials`
    names the folder of trials, by default beside the plan; the folder contains a profile with the
    cluster's constants by the trials.

    Raises LaunchError where no plan of the space ran.
    """
    return _tune(model, cluster, options)


def _tune(model: str, cluster: str, options: TuneOptions) -> TuningResult:
    """Tune as `tune` does."""
    allowed = (
        TrialBudget(trials=DEFAULT_TRIALS)
        if options.budget is None
        else TrialBudget.read(options.budget)
    )
    started = time.process_time()
    run, trial_cluster, profile = options.run, options.trial_cluster, options.profile
    folder = Path(options.trials) if options.trials else _folder(options.output)
    if profile is None and document.is_file(folder / PROFILE_FILE):
        profile = str(folder / PROFILE_FILE)
    mine = document.read(Plan, model) if is_plan(model) else None
    if mine is None:
        plan_options = options.of_plan()
        graph = model_of(model, seq_len=options.seq_len)
        graph, plan_options, _ = launched_model(graph, cluster, plan_options)
        measured = profile_for(graph, profile)
        machine = machine_of(cluster, measured)
        request = plan_options.request(graph, machine, measured, called=cluster)
    else:
        options.refuse_beside_plan()
        graph = plan_model(mine, model)
        measured = profile_for(graph, profile)
        request = replace(
            Request.of_plan(mine, graph, machine_of(cluster, measured), measured),
            pins=read_pins(options.fix, options.allow),
            called=cluster,
            fit_probability=SURE_TO_FIT,
        )
    if run is None and base_of(request.framework.name) != "native":
        raise DocumentError(
            "run",
            f"is missing; say how {request.framework.name} trains, as in --run 'torchrun ... "
            "{config}'",
        )
    fewer = None if trial_cluster is None else machine_of(trial_cluster, measured)
    if fewer is not None:
        check_smaller(fewer, request.cluster)
    answer = answer_to(request, "simplest", progress=options.progress)
    used = answer.plan.cluster
    if answer.prediction.idle_devices:
        request = replace(request, cluster=machine_of(used, measured), called=used)
        if fewer is not None:
            check_smaller(fewer, request.cluster)
    every = tuple(
        candidate if mine is None else _trained_as(candidate, mine)
        for candidate in _runnable(request, answer, run, options.progress)
    )
    small = (
        None
        if fewer is None or trial_cluster is None
        else in_small(request, every, fewer, trial_cluster)
    )
    tuning = Tuning(
        request=request,
        candidates=every if small is None else small.candidates,
        small=small,
        machine=machine_of(request.cluster_name, _without_pace(measured)),
        trial_cluster=None
        if trial_cluster is None
        else machine_of(trial_cluster, _without_pace(measured)),
        folder=folder,
        output=options.output,
        budget=allowed,
        run=run,
        options=_options(options.data, options.tokenizer, trust_code=options.trust_code),
        notify=options.notify,
        planned_s=time.process_time() - started,
    )
    if options.dry_run:
        return tuning.agenda()
    if run is None:
        need_torch("launching a trial")
        ours = cluster.partition(":")[0] == "local" and mine is None
        if ours and profile is None and tuning.profile_pays():
            options.notify(
                "measuring this machine first, which tells more for each second than a trial"
            )
            _profile(model, cluster, request, folder_within(folder.parent, folder.name))
            return _tune(model, cluster, replace(options, trials=str(folder)))
    with signals_interrupt():
        return tuning.run_trials()


def _profile(model: str, cluster: str, request: Request, folder: Path) -> None:
    """Measure this machine for the job of a request."""
    job = request.job
    measure(
        model,
        cluster,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        precision=job.precision,
        output=str(folder / PROFILE_FILE),
        quiet=True,
    )


def _without_pace(measured: Profiles) -> Profiles:
    """Return a profile without its pace; where devices differ none has one."""
    if not isinstance(measured, Profile) or measured.calibration is None:
        return measured
    plain = measured.calibration.model_copy(update={"pace": None})
    return measured.model_copy(update={"calibration": plain})


def _trained_as(candidate: TrialCandidate, mine: Plan) -> TrialCandidate:
    """Return a candidate with the settings of training that a plan has.

    Words that were not understood stay in it, and widen what is predicted.
    """
    update = {"training": mine.training, "not_understood": mine.not_understood}
    return replace(
        candidate,
        plan=candidate.plan.model_copy(update=update),
        prediction=bounded_by_words(candidate.prediction, mine.not_understood),
    )


def _folder(output: str) -> Path:
    """Return the folder of trials beside a plan.

    >>> str(_folder("runs/plan.yaml"))
    'runs/plan-trials'
    >>> str(_folder("/")), str(_folder("."))
    ('/trials', 'trials')
    """
    path = Path(output)
    return path.with_name(f"{path.stem}-trials") if path.name else path / "trials"


def _options(data: str | None, tokenizer: str | None, *, trust_code: bool) -> tuple[str, ...]:
    """Return options of `launch`, with paths that are valid from any folder."""
    named = {"--data": data, "--tokenizer": tokenizer}
    candidates = [
        word
        for option, path in named.items()
        if path is not None
        for word in (option, str(Path(path).resolve()))
    ]
    return (*candidates, *(("--trust-code",) if trust_code else ()))


def _runnable(
    request: Request, answer: Answer, run: str | None, progress: Progress | None
) -> tuple[TrialCandidate, ...]:
    """Return the candidates; for another framework those that its configuration can express."""
    every = candidates(request, answer, progress)
    if run is None or "{config}" not in run:
        return every
    runnable = []
    for candidate in every:
        try:
            configuration(
                candidate.plan, request.model, base_of(request.framework.name), request.cluster
            )
        except DocumentError:
            continue
        runnable.append(candidate)
    if not runnable:
        raise LaunchError(f"no plan can be written as a configuration of {request.framework.name}")
    return tuple(runnable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Trials as they are requested."""

    request: Request
    candidates: tuple[TrialCandidate, ...]
    small: InSmall | None
    machine: ClusterSpec
    """The request's cluster without a pace that an earlier profile has."""
    trial_cluster: ClusterSpec | None
    """The smaller cluster on which those are tried in small, without pace too; None: they are tried
    themselves."""
    folder: Path
    output: str
    budget: TrialBudget
    run: str | None
    options: tuple[str, ...]
    notify: ProgressCallback
    planned_s: float

    @property
    def _subject(self) -> Subject:
        job = self.request.job
        return Subject(
            model_digest=self.request.model.digest,
            cluster=self.request.cluster_name,
            framework=self.request.framework.name,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            precision=job.precision,
            trial_cluster=self._trial_cluster_name,
            run=self.run,
        )

    @property
    def _trial_cluster_name(self) -> str | None:
        return None if self.small is None else self.small.stand_ins[0].request.cluster_name

    @property
    def _options(self) -> tuple[TrialCandidate, ...]:
        """Plans of the options: candidates, then stand-ins on the smaller cluster."""
        return (*self.candidates, *_stood_in(self.small))

    def _start(self, trials: Sequence[Trial] = ()) -> Tuner:
        """Return the tuner after finished trials."""
        tries = [trial for trial in trials if trial.step_s is not None]
        beside = [
            trial.seconds - (WARM_UP_STEPS + trial.steps) * (trial.step_s or 0.0) for trial in tries
        ]
        start_s = max(0.0, sum(beside) / len(beside)) if beside else START_S
        at = {candidate.plan.digest: place for place, candidate in enumerate(self._options)}
        outcomes = [
            _outcome(at[trial.plan_digest], trial)
            for trial in trials
            if trial.plan_digest in at and trial.ended != "failed"
        ]
        return Tuner(
            [candidate.option for candidate in self._options],
            outcomes,
            stand_ins=len(_stood_in(self.small)),
            start_s=start_s,
            steps=WARM_UP_STEPS + USUAL,
        )

    def profile_pays(self) -> bool:
        """Return True if no trial was made and a profile gains more per second than any."""
        from meshwright.profiler.profile import BUDGET_S  # noqa: PLC0415 - starts ranks

        return not read_trials(self.folder) and self._start().profile_pays(BUDGET_S)

    def agenda(self) -> TuningResult:
        """Return the trials that would run if every step took its predicted time; run none."""
        tuner, queue = self._start(), list[int]()
        while not tuner.is_done and (option := tuner.next_trial()) is not None:
            next_s = tuner.trial_s(option)
            spent = [self._expected_trial(tuner, option) for option in queue]
            if not self.budget.allows(spent, next_s):
                break
            queue.append(option)
            tuner = tuner.with_outcome(
                Outcome(option=option, step_s=self._options[option].prediction.step_time_s)
            )
        return self._result(self._start(), (), "a dry run: nothing was tried", tuple(queue))

    def _expected_trial(self, tuner: Tuner, option: int) -> Trial:
        candidate = self._options[option]
        return Trial(
            trial=1,
            plan_digest=candidate.plan.digest,
            layout=candidate.prediction.layout_text,
            ended="ran",
            predicted_s=candidate.prediction.step_time_s,
            believed_s=candidate.prediction.step_time_s,
            seconds=tuner.trial_s(option),
            answer=candidate.prediction.layout_text,
            sure=0.0,
        )

    def run_trials(self) -> TuningResult:
        """Run trials until enough is known; an interrupt ends them with what is known so far."""
        with alone_in(self.folder):
            self._check_subject()
            trials = read_trials(self.folder)
            tuner = self._start(trials)
            self._write_results(tuner)
            stopped = ""
            try:
                while not stopped:
                    stopped = self._stop(tuner, trials)
                    if stopped:
                        break
                    failed = self._failed_candidates(trials)
                    option = tuner.next_trial(skip=failed)
                    assert option is not None
                    trial = self._run_trial(tuner, option, trials)
                    append(trial, self.folder)
                    trials = [*trials, trial]
                    tuner = self._start(trials)
                    self._write_results(tuner)
            except KeyboardInterrupt:
                stopped = INTERRUPTED
        if not tuner.ran:
            if not trials:
                raise LaunchError(f"no trial ran: {stopped}")
            raise LaunchError(
                f"none of {len(trials)} trials ran ({stopped}): "
                + "; ".join(f"{trial.layout}: {trial.why or trial.ended}" for trial in trials[-2:])
            )
        proof = None if stopped == INTERRUPTED else self._proof(tuner)
        return replace(self._result(tuner, tuple(trials), stopped), proof=proof)

    def _proof(self, tuner: Tuner) -> RenewedProof | None:
        """Search again with the constants of the trials; None where nothing fits then."""
        constants = self._constants(tuner)
        request = replace(
            self.request,
            cluster=with_fitted_constants(self.machine, constants.calibration),
            profile=self._used(constants),
        )
        chosen = self.candidates[tuner.answer].plan
        try:
            answer = search(request)
        except NoPlanFits:
            return None
        layouts = {candidate.plan.layout for candidate in self.candidates}
        return RenewedProof(
            chosen_s=predict(chosen, request.model, request.cluster, request.profile).step_time_s,
            lower_bound_s=answer.certificate.lower_bound_s,
            layout=answer.prediction.layout_text,
            step_s=answer.prediction.step_time_s,
            known=answer.plan.layout in layouts,
        )

    def _check_subject(self) -> None:
        """Refuse a folder with trials of something else."""
        path = self.folder / SUBJECT
        if not document.is_file(path):
            document.write(self._subject, path)
            return
        other = differences(self._subject, document.read(Subject, path))
        if other:
            raise DocumentError(
                "",
                f"has trials with another {', '.join(other)}; name another folder with --trials",
                file=str(self.folder),
            )

    def _failed_candidates(self, trials: Sequence[Trial]) -> frozenset[int]:
        """Return candidates whose trial failed for another reason than memory."""
        failed = {trial.plan_digest for trial in trials if trial.ended == "failed"}
        return frozenset(
            at for at, candidate in enumerate(self._options) if candidate.plan.digest in failed
        )

    def _stop(self, tuner: Tuner, trials: Sequence[Trial]) -> str:
        """Return why there are no more trials; empty: there are."""
        if tuner.is_done:
            return "no other plan is likely to be more than 2 % faster"
        option = tuner.next_trial(skip=self._failed_candidates(trials))
        if option is None:
            return "all plans that may be faster were tried"
        if not self.budget.allows(trials, tuner.trial_s(option)):
            return "the budget is used"
        return ""

    def _run_trial(self, tuner: Tuner, option: int, trials: Sequence[Trial]) -> Trial:
        """Run one trial."""
        number, candidate = len(trials) + 1, self._options[option]
        believed_s, low_s, high_s = tuner.posterior.seconds(option)
        self.notify(
            f"trial {number}: {candidate.prediction.layout_text}, expected {low_s:.3g} to "
            f"{high_s:.3g} s a step"
        )
        measured = trial(
            self._command(folder_within(self.folder, f"{number:02}"), option),
            best=None if self.small else tuner.best,
            steadiness=tuner.steadiness,
            most_s=LONGEST_START_S + PATIENCE * tuner.trial_s(option),
        )
        result = self._trial(number, candidate, believed_s, measured)
        after = self._start([*trials, result])
        seen = f"{result.step_s:.4g} s" if result.step_s is not None else result.why or ""
        self.notify(f"trial {number}: {result.ended} {seen}".rstrip())
        return result.model_copy(
            update={
                "answer": self.candidates[after.answer].prediction.layout_text,
                "sure": after.sure if after.ran else 0.0,
            }
        )

    def _trial(
        self, number: int, candidate: TrialCandidate, believed_s: float, seen: Measured
    ) -> Trial:
        ratio = (
            seen.peak_bytes / candidate.peak_bytes
            if seen.peak_bytes and candidate.peak_bytes
            else None
        )
        return Trial(
            trial=number,
            plan_digest=candidate.plan.digest,
            layout=candidate.prediction.layout_text,
            ended=seen.ended,
            predicted_s=candidate.prediction.step_time_s,
            believed_s=believed_s,
            step_s=seen.step_s,
            noise=seen.noise,
            steps=seen.steps,
            memory_ratio=ratio,
            seconds=seen.seconds,
            answer=candidate.prediction.layout_text,
            sure=0.0,
            why=seen.why or None,
        )

    def _command(self, folder: Path, option: int) -> TrialProcess:
        """Write a trial's files, and return what runs it."""
        plan, path = self._options[option].plan, folder / "plan.yaml"
        request = self.request
        if self.small is not None:
            stand_in = self.small.stand_ins[option - len(self.candidates)]
            request = stand_in.request
            _write_model(stand_in, folder)
        work = LoggedWork(job=plan.job, devices=plan.ranks)
        document.write(plan, path)
        if self.run is None:
            words = launch_words(path, folder, self.options)
            return TrialProcess(words=words, folder=folder, ranks=plan.ranks, work=work)
        base = base_of(request.framework.name)
        config = folder / f"config{SUFFIXES.get(base, '')}"
        if "{config}" in self.run and base != "native":
            text = configuration(plan, request.model, base, request.cluster)
            document.write_text(text, config)
        words = words_of(
            self.run,
            config=str(config if base != "native" else path),
            plan=str(path),
            output=folder,
        )
        reader = None
        if base != "native":
            if base not in READERS:
                raise DocumentError(
                    "framework", f"is {base}, whose logs are not read; {', '.join(READERS)} are"
                )
            reader = READERS[base]
        return TrialProcess(words=words, folder=folder, ranks=plan.ranks, work=work, reader=reader)

    def _write_results(self, tuner: Tuner) -> None:
        """Write the plan so far, and the constants of the cluster."""
        document.write(self.candidates[tuner.answer].plan, self.output)
        if tuner.ran:
            constants = self._constants(tuner)
            document.write(constants, self.folder / CONSTANTS_FILE)
            machine = with_fitted_constants(self.machine, constants.calibration)
            document.write(machine, self.folder / CLUSTER_FILE)

    def _constants(self, tuner: Tuner) -> Profile:
        """Return the cluster's constants as a profile that is valid for any model."""
        request, now = self.request, datetime.datetime.now().isoformat(timespec="seconds")
        fitted = calibration(
            self.machine,
            tuner.posterior,
            paced_framework(request.framework, self.machine).host,
            pace=pace_of(None if request.profile is None else request.only_profile),
            runs=len(tuner.ran),
            source=f"tune of {now}, {len(tuner.ran)} trials of {request.model.name}"[:200],
            seen=self.trial_cluster,
        )
        runs = sorted(tuner.ran, key=lambda option: float(tuner.posterior.mean[option]))
        trial = as_measured(
            fitted,
            [tuner.measured_step(option).step_s for option in runs],
            lambda constants, run: self._predicted_s(constants, runs[run]),
        )
        return self._profile(trial)

    def _predicted_s(self, constants: Calibration, option: int) -> float:
        """Return the predicted seconds of an option with some constants."""
        request = self._request_of(option)
        return predict(
            self._options[option].plan,
            request.model,
            with_fitted_constants(
                self.machine if self.trial_cluster is None else self.trial_cluster, constants
            ),
            self._used(self._profile(constants)),
        ).step_time_s

    def _used(self, profile: Profile) -> Profile | None:
        """Return a profile as predictions of the request's framework use it."""
        return None if base_of(self.request.framework.name) != "native" else profile

    def _request_of(self, option: int) -> Request:
        """Return the request that an option answers: the request, or one in small."""
        if self.small is None:
            return self.request
        return self.small.stand_ins[option - len(self.candidates)].request

    def _profile(self, fitted: Calibration) -> Profile:
        """Return constants beside what was measured of the machine before, if anything was."""
        request, today = self.request, datetime.date.today().isoformat()
        if request.profile is not None and request.only_profile is not None:
            return request.only_profile.model_copy(update={"calibration": fitted})
        return profile_of_any_model(
            fitted,
            command=f"meshwright tune {request.model.name}",
            today=today,
            ranks=(self.trial_cluster or request.cluster).devices,
        )

    def _result(
        self,
        tuner: Tuner,
        trials: tuple[Trial, ...],
        stopped: str,
        queue: tuple[int, ...] = (),
    ) -> TuningResult:
        return TuningResult(
            candidates=self.candidates,
            trials=trials,
            tuner=tuner,
            devices=(self.trial_cluster or self.request.cluster).devices,
            planned_s=self.planned_s,
            stopped=stopped,
            plan_file=None if queue else self.output,
            folder=self.folder,
            queue=queue,
            small=self.small,
            trial_cluster=self._trial_cluster_name,
        )


def _write_model(stand_in: SmallTrial, folder: Path) -> None:
    """Write the configuration of a model with fewer layers beside the plan that names it."""
    if stand_in.config is not None:
        where = folder_within(folder, stand_in.request.model.name)
        document.write_text(json.dumps(stand_in.config, indent=2), where / "config.json")


def _outcome(option: int, trial: Trial) -> Outcome:
    return Outcome(
        option=option,
        step_s=trial.step_s,
        noise=trial.noise or 0.0,
        steps=trial.steps,
        memory_ratio=trial.memory_ratio,
    )
