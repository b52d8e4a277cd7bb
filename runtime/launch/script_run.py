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

from meshwright.planner.documents.document import MAX_BYTES, read, read_bytes, write
from meshwright.planner.documents.events import CopyInterval, Decision, StepRecord, events_of
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import count_text, seconds_text
from meshwright.planner.errors import HandedOver, Interrupted, LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import folder_within
from meshwright.runtime.checkpoint import commit_recovery, object_store
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch.failure_report import (
    RankFailed,
    RanksHang,
    bad_end,
    hung,
    write_incident,
)
from meshwright.runtime.launch.memory_growth import MemoryGrowth
from meshwright.runtime.launch.preflight import (
    LocalRanks,
    check_devices,
    cuda_devices,
    ranks_of_node,
)
from meshwright.runtime.launch.rank_processes import GRACE_S, BadEnd, log_end, supervise
from meshwright.runtime.resilience.hang_detector import HangWatch
from meshwright.runtime.resilience.heartbeat import BEACONS, beacons
from meshwright.runtime.resilience.shared_memory import CopyContext, Slots
from meshwright.runtime.resilience.state_rescue import adopt, rescue
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.environment import (
    CHECKPOINT_VARIABLE,
    EVERY_VARIABLE,
    OUTPUT_VARIABLE,
    PLAN_VARIABLE,
    TOKEN_VARIABLE,
)
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.locks_and_signals import alone_in, signals_interrupt
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.record_segments import Rotation
from meshwright.runtime.run.recovery_policy import RankEnd, verdict
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import Device
from meshwright.runtime.run.run_report import WARM_UP_STEPS, Comparison

MOST_TOLD = 500
"""Characters of how a node's ranks ended, which it tells the others."""
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
    local_ranks = ranks_of_node(plan, node_rank.node, nodes or [plan.mesh.devices])
    device: Device = "cuda" if cuda_devices() else "cpu"
    for warning in check_devices(plan, device, local_ranks):
        say(f"warning: {warning}")
    ranks = LocalRanks(plan.mesh.devices, device, local_ranks)
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
                raise _interruption(folder) from None
            raise
    if not leads:
        return None
    steps = tuple(run.read_records(run.metrics_file(folder)))
    return ScriptRun(steps=steps, output=output, restarts=count, global_batch=plan.global_batch)


def _interruption(folder: Path) -> Interrupted:
    done = _steps_done(folder)
    if not done:
        return Interrupted("interrupted before the first step")
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
                ended = _agreed_end(ended, node_rank, say)
                if ended.end is None:
                    raise ended from None
                ends.append(ended.end)
                started = _next_attempt(started, ended, ends, node_rank, say)
            count += 1
        else:
            return count


def _agreed_end(ended: _Ended, node_rank: NodeRank, say: Callable[[str], None]) -> _Ended:
    """Return the end that all nodes decide about: of a rank that did not only wait for others.

    Of several the first node's; where a script ended itself on one of them, it ended.
    """
    if node_rank.nodes == 1:
        return ended
    end = None if ended.end is None else ended.end.model_dump(mode="json")
    with Rendezvous(node_rank, warn=lambda text: say(f"warning: {text}")) as meeting:
        every = meeting.all_gather({"end": end, "how": str(ended)[:MOST_TOLD]})
    if ended.end is None:
        return ended
    by_itself = next((told for told in every if told["end"] is None), None)
    if by_itself is not None:
        return _Ended(str(by_itself["how"]), ended.rest)
    causes = [RankEnd.model_validate(told["end"]) for told in every]
    place = next((i for i, cause in enumerate(causes) if not cause.waits), 0)
    if place == node_rank.node:
        return ended
    return _Ended(str(every[place]["how"]), ended.rest, causes[place])


def _next_attempt(
    started: _Started,
    ended: _Ended,
    ends: Sequence[RankEnd],
    node_rank: NodeRank,
    say: Callable[[str], None],
) -> _Started:
    """Do what the table says about the last end; raise it where that is to stop."""
    devices = started.plan.mesh.devices
    judged = verdict(ends, devices=devices)
    assert judged is not None
    say(f"{ended}")
    say(f"{judged.reaction}, because {judged.why}")
    run.append_record(
        Decision(at_unix_s=unix_now_s(), reaction=judged.reaction, why=judged.why, devices=devices),
        run.events_file(started.folder),
    )
    if ends[-1].cause == "corruption" and started.slots is not None:
        started.slots.forget()
    if judged.reaction == "stop":
        raise ended
    if judged.reaction == "restart":
        return started
    if node_rank.nodes > 1:
        say("a script goes on with all of its nodes; all ranks are started again")
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
    say(f"going on with {plan.mesh.devices} of {devices} devices: {plan.layout.text()}")
    ranks = LocalRanks(
        plan.mesh.devices, started.ranks.device, ranks_of_node(plan, 0, [plan.mesh.devices])
    )
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
    folder, ranks = started.folder, started.ranks
    with Rendezvous(node_rank, warn=lambda text: say(f"warning: {text}")) as rendezvous:
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
        elastic = started.survival.elastic
        after_step = 0
        try:
            with contextlib.ExitStack() as held:
                shared, look = _begin_watch(started, progress, held, alone=node_rank.nodes == 1)
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
                    grace_s=0.0 if elastic else GRACE_S,
                    refresh=look,
                )
            progress.refresh(now=True)
            after_step = _steps_done(folder)
            if bad is None:
                rendezvous.all_gather("done")  # nodes leave together
                if any(run.handed_over(folder, rank).exists() for rank in ranks.devices):
                    raise HandedOver(
                        f"a notice ended the script after step {after_step}; start it "
                        "again and it goes on from what it saved"
                    )
        except HandedOver:
            raise
        except RanksHang as error:
            write_incident(started, error, after_step=_steps_done(folder))
            raise _Ended(error.lead, error.rest, error.end) from None
        except LaunchError as error:  # another node's ranks, or the node itself
            done = _steps_done(folder)
            end = RankEnd(cause="hang", rank=min(ranks.devices), after_step=done, waits=True)
            raise _Ended(str(error), end=end) from None
        if bad is not None:
            shown = ranks.leads and bad.cause.rank == 0
            log = _from_here(run.log_file(folder, bad.cause.rank))
            rest = f". Its log is {log}" if shown else log_end(log)
            raise _Ended(_how(bad, folder), rest, _end_of(started, bad, after_step=after_step))


def _end_of(started: _Started, bad: BadEnd, *, after_step: int) -> RankEnd | None:
    """Return what the table of verdicts is asked about; None where the script itself ended it."""
    if not started.survival.elastic:
        return None
    if bad.failure is not None and bad.failure.kind == "SystemExit":
        return None
    ended = bad_end(started, bad, after_step=after_step)
    write_incident(started, ended, after_step=after_step)
    return ended.end if isinstance(ended, RankFailed) else None


def _begin_watch(
    started: _Started, progress: _ScriptProgress, held: contextlib.ExitStack, *, alone: bool
) -> tuple[dict[str, str], Callable[[], None]]:
    """Return what ranks get of the survival that is asked for, and what is looked at meanwhile."""
    survival, ranks = started.survival, started.ranks
    shared: dict[str, str] = {}
    if survival.checkpoint is not None:
        shared[CHECKPOINT_VARIABLE] = str(survival.checkpoint)
    if survival.every is not None:
        shared[EVERY_VARIABLE] = str(survival.every)
    if not survival.elastic:
        return shared, progress.refresh
    seen = held.enter_context(beacons(len(ranks.devices)))
    shared[BEACONS] = str(seen.file)
    if started.slots is not None:
        shared |= started.slots.environment(len(ranks.devices), CopyContext(plan=started.plan))
    watch = HangWatch(
        seen,
        ranks.devices,
        started.folder,
        start_s=started.plan.timeout_s,
        alone=alone,
        own_code=True,
    )

    memory = MemoryGrowth()

    def look() -> None:
        progress.refresh()
        places = seen.places()
        processes = {rank: places[place].process for rank, place in ranks.devices.items()}
        for growth in memory.look(processes, left_s=math.inf, now_s=time.monotonic()):
            progress.say(f"warning: {growth.text}")
        if waiting := watch.look():
            raise hung(started, waiting, after_step=_steps_done(started.folder))

    return shared, look


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


def _from_here(path: Path) -> Path:
    """Return a path as a user would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


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
