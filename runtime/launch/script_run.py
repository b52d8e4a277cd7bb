"""Running a user's script on the ranks of a plan: started, watched, started again.

The script makes its Engine without naming a plan, and calls `engine.resume(folder)` if it wants to
go on where it was saved.  A rank that ends badly ends all, on every node; where restarts are left
all nodes meet again and begin anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.planner.documents.document import (
    MAX_BYTES,
    read,
    read_bytes,
    read_text,
    write,
)
from meshwright.planner.documents.events import (
    Attempt,
    AttemptEnded,
    CopyInterval,
    Decision,
    PhaseDone,
    StepRecord,
    events_of,
)
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import count_text, seconds_text
from meshwright.planner.errors import HandedOver, Interrupted, LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import folder_within, path_from_here
from meshwright.runtime.checkpoint import commit_recovery, object_store
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch.failure_report import (
    EndsToGrow,
    RankFailed,
    RanksHang,
    RankSlow,
    bad_end,
    hung,
    log_event,
    name_copies,
    write_incident,
)
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.memory_growth import MemoryGrowth
from meshwright.runtime.launch.monitor import PACE_S, CopyNames, look_at_paces
from meshwright.runtime.launch.preflight import (
    LocalRanks,
    check_devices,
    cuda_devices,
    ranks_of_node,
)
from meshwright.runtime.launch.rank_processes import GRACE_S, BadEnd, log_end, supervise
from meshwright.runtime.resilience.hang_detector import HangWatch
from meshwright.runtime.resilience.heartbeat import BEACONS, Beacons, beacons
from meshwright.runtime.resilience.shared_memory import CopyContext, Slots
from meshwright.runtime.resilience.state_rescue import (
    adopt,
    newest_copy_step,
    rescue,
    saved_step,
)
from meshwright.runtime.resilience.straggler_detector import DriftWatch
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.environment import (
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    OUTPUT_VARIABLE,
    PLAN_VARIABLE,
    TOKEN_VARIABLE,
    messages_beside,
    place_of,
)
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.locks_and_signals import alone_in, signals_interrupt
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.record_segments import Rotation
from meshwright.runtime.run.recovery_policy import RankEnd, verdict
from meshwright.runtime.run.rendezvous import NodeLeft, Rendezvous
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import Device
from meshwright.runtime.run.run_report import WARM_UP_STEPS, Comparison

PROGRESS_S = 5.0
"""Between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """Results of a script's run."""

    steps: tuple[StepRecord, ...]
    output: Path
    restarts: int
    """Number of times that the ranks were started again."""
    global_batch: int

    @property
    def step_time_s(self) -> float | None:
        """The median after the first steps; none where there are no more."""
        times = [record.step_s for record in self.steps[WARM_UP_STEPS:]]
        return statistics.median(times) if times else None

    def comparison(self, prediction: Prediction) -> list[Comparison]:
        """Return what was both predicted and measured."""
        measured, predicted = self.step_time_s, prediction.step_time_s
        if measured is None:
            return []
        samples = self.global_batch
        rows = [
            Comparison(quantity="step time", unit="s", predicted=predicted, measured=measured),
            Comparison(
                quantity="throughput",
                unit="samples/s",
                predicted=samples / predicted,
                measured=samples / measured,
            ),
        ]
        if peak := self.steps[-1].peak_memory_bytes:  # of rank 0, which has the first stage
            rows.append(
                Comparison(
                    quantity="stage 0 peak memory",
                    unit="bytes",
                    predicted=prediction.stages[0].peak_memory_bytes,
                    measured=peak,
                )
            )
        return rows


class _Ended(LaunchError):  # noqa: N818 - it is told to the other nodes, which end too
    """The ranks ended badly; all may be started again."""

    def __init__(self, how: str, rest: str = "", end: RankEnd | None = None) -> None:
        super().__init__(how)
        self.rest = rest
        """Text that is added where this error is the end."""
        self.end = end
        """None where nothing is to be done about it."""


class _ScriptProgress:
    """Says the newest step: the first at once, then one every few seconds, and the last.

    How many there will be, only the script knows.
    """

    def __init__(self, metrics: Path, say: Callable[[str], None]) -> None:
        self._metrics = metrics
        self.say = say
        self._said = 0
        self._due_s = 0.0
        events_file = metrics.with_name("events.jsonl")
        self._rotation = Rotation(events_file, metrics)
        self._events = run.AddedLines(events_file)
        self.ends_s = math.inf
        """When a script that does not end for a notice is ended, by time.monotonic()."""

    def refresh(self, *, now: bool = False) -> None:
        """Say the newest step if it is time to, or `now`."""
        if time.monotonic() > self.ends_s:
            raise KeyboardInterrupt
        with run.never_fatal(self._metrics.parent / "records", MeshwrightError):
            self._rotation.look()
        for event in events_of(line for line in self._events.read() if b'"copies"' in line):
            if isinstance(event, CopyInterval):
                self.say(event.text)
        if not now and time.monotonic() < self._due_s:
            return
        record = run.newest_record(self._metrics)
        if record is None or record.step == self._said:
            return
        rate = f", {count_text(record.samples_per_s)} samples/s" if record.samples_per_s else ""
        self.say(
            f"step {record.step}, loss {record.loss:.4f}, {seconds_text(record.step_s)} per step"
            f"{rate}"
        )
        self._said = record.step
        self._due_s = time.monotonic() + PROGRESS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Reactions of a script's run to what ends its ranks."""

    checkpoint: Path | None = None
    """Absolute path of the folder where ranks save by themselves."""
    every: int | None = None
    """Number of steps between saves; where the least is lost otherwise."""
    elastic: bool = False
    """Look for ranks that hang, have copies of state in memory, and go by the table of verdicts."""
    fewer: Callable[[int], Path | None] = lambda devices: None
    """Returns a plan for a number of devices, if there is one."""


def run_script(
    plan_path: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    output: Path,
    restarts: int = 0,
    survival: Survival = Survival(),
    node_rank: NodeRank = ALONE,
    nodes: Sequence[int] = (),
    say: Callable[[str], None],
) -> ScriptRun | None:
    """Run a script on the plan's ranks; start them again up to `restarts` times if one fails.

    `node_rank` says which of several nodes this is, and `nodes` how many devices each of them has;
    nodes other than the one with rank 0 return nothing.  What rank 0 prints is printed here.
    With `survival.elastic` what is done about an end follows from its cause.

    Raises LaunchError where the script is not there, or the ranks failed for good.
    """
    plan = read(Plan, plan_path)
    if node_rank.nodes == 1:
        _check_script(script)  # before anything is written
    local_ranks = ranks_of_node(plan, node_rank.node, nodes or [plan.ranks])
    device: Device = "cuda" if cuda_devices() else "cpu"
    for warning in check_devices(plan, device, local_ranks):
        say(f"warning: {warning}")
    ranks = LocalRanks(plan.ranks, device, local_ranks)
    leads, folder = ranks.leads, output.absolute()
    if not leads:
        folder = folder_within(folder, f"node-{node_rank.node:05}")
    progress = _ScriptProgress(run.metrics_file(folder), say)
    saved = survival.checkpoint

    def on_notice(number: int) -> None:
        progress.ends_s = time.monotonic() + notice.GRACE_S
        say(notice.leave_notice(folder, number))

    with alone_in(folder), signals_interrupt(on_notice), contextlib.ExitStack() as held:
        if saved is not None:
            saved.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_in(saved) if leads else contextlib.nullcontext())
            adopt(saved, say=say)
        slots = held.enter_context(Slots(saved)) if survival.elastic else None
        started = _Started(
            plan, plan_path, script, tuple(arguments), folder, ranks, survival, slots
        )
        if leads:
            write(plan, run.plan_file(folder))
            run.forget_steps_after(0, run.metrics_file(folder))
        try:
            count = _until_the_end(started, restarts, node_rank, progress, say)
        except BaseException as error:
            if slots is not None and saved is not None:
                newest = rescue(slots, saved, say=say)
                if newest is not None and isinstance(error, _Ended):
                    name = object_store.shown(newest)
                    error.rest = f"; {name} is complete and can be gone on from{error.rest}"
            if isinstance(error, _Ended):
                raise LaunchError(f"{error}{error.rest}") from None
            if isinstance(error, KeyboardInterrupt):
                raise _interruption(_steps_done(folder), leads=leads) from None
            raise
    if not leads:
        return None
    steps = tuple(run.read_records(run.metrics_file(folder)))
    return ScriptRun(steps=steps, output=output, restarts=count, global_batch=plan.global_batch)


def _interruption(done: int, *, leads: bool) -> Interrupted:
    """Return what an interrupted script is told; nodes that do not lead may not know a step."""
    if not done:
        return Interrupted("interrupted before the first step" if leads else "interrupted")
    return Interrupted(
        f"interrupted after step {done}; started again, a script that calls "
        "engine.resume(folder) goes on from its last checkpoint"
    )


def _until_the_end(
    started: _Started,
    restarts: int,
    node_rank: NodeRank,
    progress: _ScriptProgress,
    say: Callable[[str], None],
) -> int:
    """Start ranks again until they end well; return how often they were."""
    ends: list[RankEnd] = []
    count = 0
    plan, script = started.plan.digest, digest_of(started.script)
    while True:
        if count and read(Plan, started.plan_path).digest not in (plan, started.plan.digest):
            raise LaunchError(
                f"{started.plan_path}: has changed since the run began; put back what it was, or "
                "start the run again"
            )
        if count and digest_of(started.script) != script:
            say(f"warning: {started.script} has changed since the run began")
        saved = started.survival.checkpoint
        if saved is not None and started.ranks.leads:
            goes_on = LaunchRun(checkpoint=saved, resume=True, or_start=True)
            commit_recovery.prepare_folder(goes_on, say=say)
        try:
            _attempt(started, node_rank, progress, say)
        except _Ended as ended:
            if not started.survival.elastic:
                if count == restarts:
                    raise
                say(f"{ended}; starting all ranks again ({count + 1} of {restarts})")
            else:
                if ended.end is None:
                    raise
                ends.append(ended.end)
                started = _next_attempt(started, ended, ends, say)
            count += 1
        else:
            return count


def _next_attempt(
    started: _Started,
    ended: _Ended,
    ends: Sequence[RankEnd],
    say: Callable[[str], None],
) -> _Started:
    """Do what the table says about the last end; raise it where that is to stop."""
    devices = started.plan.ranks
    judged = verdict(ends, devices=devices)
    assert judged is not None
    say(f"{ended}")
    say(f"{judged.reaction}, because {judged.why}")
    run.append_record(
        Decision(at_unix_s=unix_now_s(), reaction=judged.reaction, why=judged.why, devices=devices),
        run.events_file(started.folder),
    )
    if ends[-1].spoils_copies and started.slots is not None:
        started.slots.forget()
    if judged.reaction == "stop":
        raise ended
    if judged.reaction == "restart":
        return started
    smaller = started.survival.fewer(devices - 1)
    if smaller is None:
        say("no plan for fewer devices is known; all ranks are started again")
        return started
    plan = read(Plan, smaller)
    saved = started.survival.checkpoint
    if started.slots is not None and saved is not None:
        # One rank that is left is joined to nobody, and reads no copies.
        rescue(started.slots, saved, say=say)
    say(f"going on with {plan.ranks} of {devices} devices: {plan.layout_text}")
    ranks = LocalRanks(plan.ranks, started.ranks.device, ranks_of_node(plan, 0, [plan.ranks]))
    write(plan, run.plan_file(started.folder))
    return replace(started, plan=plan, plan_path=smaller, ranks=ranks)


@dataclass(frozen=True, slots=True)
class _Started:
    """Run that is started on this node."""

    plan: Plan
    plan_path: Path
    script: Path
    arguments: tuple[str, ...]
    folder: Path
    ranks: LocalRanks
    survival: Survival
    slots: Slots | None

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.folder

    @property
    def run(self) -> LaunchRun:
        """Options that it is asked for, in the form of a launch's."""
        return LaunchRun(checkpoint=self.survival.checkpoint)


def _attempt(
    started: _Started, node_rank: NodeRank, progress: _ScriptProgress, say: Callable[[str], None]
) -> None:
    """Run the ranks of all nodes once to their end.  Raises _Ended where one ended badly."""
    ranks, watch = started.ranks, _ScriptWatch(started, progress, alone=node_rank.nodes == 1)
    if started.survival.elastic:
        log_event(started, _attempt_record(started))

    def ended_by(bad: BadEnd) -> _Ended:
        how, rest = _how(bad, started.folder), _log_of(started, bad)
        return _Ended(how, rest, _end_of(started, bad, after_step=watch.after_step))

    try:
        _supervise(started, node_rank, watch, say, ended_by)
    except (HandedOver, _Ended):
        raise
    except RanksHang as error:
        name_copies(error, started.slots)
        write_incident(started, error, after_step=watch.after_step)
        raise _Ended(error.lead, error.rest, error.end) from None
    except LaunchError as error:  # another node's ranks, or the node itself
        end = RankEnd(
            cause="hang", rank=min(ranks.devices), after_step=watch.after_step, waits=True
        )
        raise _Ended(str(error), end=end) from None


def _log_of(started: _Started, bad: BadEnd) -> str:
    """Return where the log of the rank that ended is, with its end if it was not shown."""
    log = path_from_here(run.log_file(started.folder, bad.cause.rank))
    shown = started.ranks.leads and bad.cause.rank == 0
    return f". Its log is {log}" if shown else log_end(log)


def _supervise(
    started: _Started,
    node_rank: NodeRank,
    watch: _ScriptWatch,
    say: Callable[[str], None],
    error_of: Callable[[BadEnd], Exception],
) -> None:
    """Run this node's ranks with those of all nodes to their end; raise the error of a bad one."""
    folder, ranks, agent = started.folder, started.ranks, watch.agent
    with Rendezvous(
        node_rank,
        warn=lambda text: say(f"warning: {text}"),
        meanwhile=lambda: None if agent is None else agent.check(),
    ) as rendezvous:
        _check_script(started.script)  # other nodes are told what this one lacks
        saved = started.survival.checkpoint
        if saved is not None:
            object_store.send_saved(saved, say=say)
        rendezvous.agree(
            {
                "plan": started.plan.digest,
                "script": digest_of(started.script),
                "arguments": " ".join(started.arguments),
            }
        )
        if saved is not None:
            object_store.fetch_newest(saved, say=say)
        for name in ("logs", "ranks", "flight"):
            folder_within(folder, name, emptied_of="rank-*")
        token = str(rendezvous.all_gather(secrets.token_hex(8))[0])
        with contextlib.ExitStack() as held:
            held.enter_context(messages_beside())
            shared = watch.begin(held)
            bad = supervise(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "meshwright.runtime.launch.script_rank_main",
                    str(started.script),
                    *started.arguments,
                ],
                list(ranks.devices),
                lambda rank, port: ranks.environment(rank, port=port),
                folder=folder,
                world=ranks.world,
                rendezvous=rendezvous,
                leads=ranks.leads,
                shared={
                    PLAN_VARIABLE: str(started.plan_path.resolve()),
                    OUTPUT_VARIABLE: str(folder),
                    TOKEN_VARIABLE: token,
                    **notice.environment(folder),
                    **shared,
                },
                rank_0_shown=True,
                grace_s=0.0 if started.survival.elastic else GRACE_S,
                refresh=watch.look,
            )
            watch.progress.refresh(now=True)
            after_step = watch.after_step
            if bad is not None:
                raise error_of(bad)  # from here, so that the other nodes learn of it
            rendezvous.all_gather("done")  # nodes leave together
            _hand_over(started, after_step)


def _hand_over(started: _Started, after_step: int) -> None:
    """Raise why ranks have ended before their script, if they have: a notice, or to grow."""
    files = [place_of(run.handed_over(started.folder, rank)) for rank in started.ranks.devices]
    reasons = {read_text(file) for file in files if file.exists()}
    if growth.REASON in reasons:
        raise EndsToGrow(growth.REASON, output=started.folder)
    if reasons:
        raise HandedOver(
            f"a notice ended the script after step {after_step}; start it again and it goes on "
            "from what it saved"
        )


class _ScriptWatch:
    """Work of a launcher while the ranks of a script run."""

    def __init__(
        self,
        started: _Started,
        progress: _ScriptProgress,
        *,
        alone: bool,
        asked: Launch | None = None,
    ) -> None:
        """`asked` is an epoch of several nodes."""
        self._started, self.progress, self._alone, self._asked = started, progress, alone, asked
        self.agent = None if asked is None else asked.agent
        self._seen: Beacons | None = None
        self._hangs: HangWatch | None = None
        self._memory = MemoryGrowth()
        self._drift = DriftWatch(started.plan, started.ranks.devices, None)
        self._begin_s = time.monotonic()
        self._look_at_names = CopyNames(started.slots, progress.say)
        self._next_s = 0.0
        self._first = 0
        self._done = 0

    @property
    def after_step(self) -> int:
        """The last step that was done, as far as this node knows."""
        places = () if self._seen is None else self._seen.places()
        self._done = max([self._done, *(place.steps_done for place in places)])
        return max(self._done, _steps_done(self._started.folder))

    def begin(self, held: contextlib.ExitStack) -> dict[str, str]:
        """Return what ranks get of the survival that is asked for."""
        started = self._started
        survival, ranks, folder = started.survival, started.ranks, started.folder
        shared: dict[str, str] = {}
        if survival.checkpoint is not None:
            shared[CHECKPOINT_VARIABLE] = str(survival.checkpoint)
        if survival.every is not None:
            shared[EVERY_VARIABLE] = str(survival.every)
        if not survival.elastic:
            return shared
        self._first = _steps_done(folder)
        saved = 0 if survival.checkpoint is None else saved_step(survival.checkpoint)
        self._done = max(self._done, saved, newest_copy_step(started.slots))
        self._seen = held.enter_context(beacons(len(ranks.devices)))
        held.callback(lambda: self.after_step)  # what beacons have told stays
        shared[BEACONS] = str(self._seen.file)
        if self._asked is not None:
            shared |= growth.environment(folder)
        if started.slots is not None:
            shared |= started.slots.environment(len(ranks.devices), CopyContext(plan=started.plan))
        self._hangs = HangWatch(
            self._seen,
            ranks.devices,
            folder,
            start_s=started.plan.timeout_s,
            alone=self._alone,
            own_code=True,
        )
        return shared

    def look(self) -> None:
        """Look once; raises RanksHang where a rank hangs."""
        started = self._started
        self.progress.refresh()
        if self._seen is None or self._hangs is None:
            return
        places = self._seen.places()
        processes = {rank: places[at].process for rank, at in started.ranks.devices.items()}
        for growing in self._memory.look(processes, left_s=math.inf, now_s=time.monotonic()):
            self.progress.say(f"warning: {growing.text}")
        self._look_at_names()
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + PACE_S
            look_at_paces(
                started,
                self._drift,
                self._seen,
                self.agent,
                step=self.after_step,
                say=self.progress.say,
                paced=None if self._asked is None else self._asked.paced,
            )
        if self._asked is not None:
            self._look_at_nodes(self._asked)
        if waiting := self._hangs.look():
            raise hung(started, waiting, after_step=self.after_step)

    def _look_at_nodes(self, asked: Launch) -> None:
        """Say when ranks train, and look at what other nodes tell."""
        started = self._started
        if self._begin_s and started.ranks.leads and _steps_done(started.folder) > self._first:
            took_s, self._begin_s = time.monotonic() - self._begin_s, 0.0
            log_event(started, PhaseDone(at_unix_s=unix_now_s(), phase="start", measured_s=took_s))
            if asked.begun is not None:
                asked.begun()
        if self.agent is not None:
            self.agent.check()
        if asked.meanwhile is not None and started.ranks.leads:
            asked.meanwhile()


@dataclass(frozen=True, slots=True, kw_only=True)
class UserScript:
    """A script with its arguments."""

    path: Path
    arguments: tuple[str, ...]


def run_epoch(
    script: UserScript, asked: Launch, *, nodes: Sequence[int], say: Callable[[str], None]
) -> ScriptRun | None:
    """Run a script on this node's ranks of one epoch of a run on several nodes, to their end.

    `nodes` are the devices of each of them.  Nodes other than the one with rank 0 return nothing.
    Raises RankFailed or NodeLeft where the run may go on in another epoch.
    """
    plan, saved, node_rank = read(Plan, asked.plan), asked.run.checkpoint, asked.node_rank
    assert saved is not None and asked.run.output is not None
    device: Device = "cuda" if cuda_devices() else "cpu"
    local_ranks = ranks_of_node(plan, node_rank.node, nodes)
    warnings_here = check_devices(plan, device, local_ranks)
    ranks = LocalRanks(plan.ranks, device, local_ranks)
    folder = asked.run.output
    if not ranks.leads:
        folder = folder_within(folder, f"node-{node_rank.node:05}")
    progress = _ScriptProgress(run.metrics_file(folder), say)
    every = asked.run.checkpoint_every
    started = _Started(
        plan,
        Path(asked.plan),
        script.path,
        script.arguments,
        folder,
        ranks,
        Survival(checkpoint=saved, every=every, elastic=True),
        asked.slots,
    )

    def on_notice(number: int) -> None:
        progress.ends_s = time.monotonic() + notice.GRACE_S
        say(notice.leave_notice(folder, number))

    with signals_interrupt(on_notice):
        if not asked.again:
            for warning in warnings_here:
                say(f"warning: {warning}")
            adopt(saved, say=say)
        if ranks.leads:
            prepared = LaunchRun(checkpoint=saved, resume=True, or_start=True)
            commit_recovery.prepare_folder(prepared, say=say)
            write(plan, run.plan_file(folder))
            if not asked.again and not asked.run.resume:
                run.forget_steps_after(0, run.metrics_file(folder))
        if asked.before is not None:
            log_event(started, asked.before)
        log_event(started, _attempt_record(started))
        watch = _ScriptWatch(started, progress, alone=node_rank.nodes == 1, asked=asked)
        try:
            _supervise(
                started,
                node_rank,
                watch,
                say,
                lambda bad: _error_of(started, bad, after_step=watch.after_step),
            )
        except (RanksHang, RankSlow) as error:
            name_copies(error, asked.slots)
            write_incident(started, error, after_step=watch.after_step)
            raise
        except NodeLeft as error:
            raise RankFailed(str(error), output=folder, left=error) from error
        except KeyboardInterrupt:
            raise _interruption(watch.after_step, leads=ranks.leads) from None
        if not ranks.leads:
            return None
        log_event(
            started,
            AttemptEnded(at_unix_s=unix_now_s(), stopped="steps", after_step=watch.after_step),
        )
    steps = tuple(run.read_records(run.metrics_file(folder)))
    return ScriptRun(steps=steps, output=folder, restarts=0, global_batch=plan.global_batch)


def _attempt_record(started: _Started) -> Attempt:
    saved = started.survival.checkpoint
    return Attempt(
        at_unix_s=unix_now_s(),
        plan=started.plan.digest,
        devices=started.ranks.world,
        after_step=0 if saved is None else saved_step(saved),
    )


def _error_of(started: _Started, bad: BadEnd, *, after_step: int) -> Exception:
    """Return the error of a bad end, once it is written down: RankFailed if the run may go on."""
    if bad.failure is not None and bad.failure.kind == "SystemExit":
        return LaunchError(f"{_how(bad, started.folder)}{_log_of(started, bad)}")
    ended = bad_end(started, bad, after_step=after_step)
    name_copies(ended, started.slots)
    write_incident(started, ended, after_step=after_step)
    return ended


def _end_of(started: _Started, bad: BadEnd, *, after_step: int) -> RankEnd | None:
    """Return what the table of verdicts is asked about; None where the script itself ended it."""
    if not started.survival.elastic:
        return None
    if bad.failure is not None and bad.failure.kind == "SystemExit":
        return None
    ended = bad_end(started, bad, after_step=after_step)
    name_copies(ended, started.slots)
    write_incident(started, ended, after_step=after_step)
    return ended.end if isinstance(ended, RankFailed) else None


def digest_of(script: Path) -> str | None:
    """Return which text a script has; None where there is no file."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    except (OSError, ValueError):
        return None


def _check_script(script: Path) -> None:
    try:
        is_file = script.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_file = False
    if not is_file:
        raise LaunchError(f"{script}: is no file; name the script that trains")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank gives them
            compile(read_bytes(script, most=MAX_BYTES), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LaunchError(
            f"{script}: is no Python script: {error or 'nested too deeply'}"
        ) from None


def _steps_done(folder: Path) -> int:
    with contextlib.suppress(OSError):
        newest = run.newest_record(run.metrics_file(folder))
        return newest.step if newest else 0
    return 0


def _how(bad: BadEnd, folder: Path) -> str:
    ended, failure = bad.cause, bad.failure
    if failure is not None and failure.kind == "SystemExit":
        message = f": {failure.message[:300]}" if failure.message else ""
        how = f"exited with code {ended.code}{message}"
    else:
        how = faults.how(ended.code, failure)
    done = _steps_done(folder)
    return f"rank {ended.rank} {how}" + (f" after step {done}" if done else "")
