"""Running a user's script on the ranks of a plan: started, watched, started again.

The script makes its Engine without naming a plan, and calls `engine.resume(folder)` if it wants to
go on where it was saved.  A rank that ends badly ends all, on every node; where restarts are left
all nodes meet again and begin anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.documents.document import MAX_BYTES, read, read_bytes, write
from meshwright.planner.documents.events import StepRecord
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import count_text, seconds_text
from meshwright.planner.errors import HandedOver, Interrupted, LaunchError
from meshwright.planner.system.safe_files import folder_within
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch.preflight import (
    LocalRanks,
    check_devices,
    cuda_devices,
    ranks_of_node,
)
from meshwright.runtime.launch.rank_processes import BadEnd, log_end, supervise
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.environment import OUTPUT_VARIABLE, PLAN_VARIABLE
from meshwright.runtime.run.locks_and_signals import alone_in, signals_interrupt
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import Device
from meshwright.runtime.run.run_report import WARM_UP_STEPS, Comparison

PROGRESS_S = 5.0
"""Between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What a script's run left."""

    steps: tuple[StepRecord, ...]
    output: Path
    restarts: int
    """How often the ranks were started again."""
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

    def __init__(self, how: str, rest: str = "") -> None:
        super().__init__(how)
        self.rest = rest
        """What is said beside where it is the end."""


class _ScriptProgress:
    """Says the newest step: the first at once, then one every few seconds, and the last.

    How many there will be, only the script knows.
    """

    def __init__(self, metrics: Path, say: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._say = say
        self._said = 0
        self._due_s = 0.0
        self.ends_s = math.inf
        """When a script that does not end for a notice is ended, by time.monotonic()."""

    def refresh(self, *, now: bool = False) -> None:
        """Say the newest step if it is time to, or `now`."""
        if time.monotonic() > self.ends_s:
            raise KeyboardInterrupt
        if not now and time.monotonic() < self._due_s:
            return
        record = run.newest_record(self._metrics)
        if record is None or record.step == self._said:
            return
        rate = f", {count_text(record.samples_per_s)} samples/s" if record.samples_per_s else ""
        self._say(
            f"step {record.step}, loss {record.loss:.4f}, {seconds_text(record.step_s)} per step"
            f"{rate}"
        )
        self._said = record.step
        self._due_s = time.monotonic() + PROGRESS_S


def run_script(
    plan_path: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    output: Path,
    restarts: int = 0,
    node_rank: NodeRank = ALONE,
    nodes: Sequence[int] = (),
    say: Callable[[str], None],
) -> ScriptRun | None:
    """Run a script on the plan's ranks; start them again up to `restarts` times if one fails.

    `node_rank` says which of several nodes this is, and `nodes` how many devices each of them has;
    nodes other than the one with rank 0 return nothing.  What rank 0 prints is printed here.

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
    started = _Started(plan, plan_path, script, tuple(arguments), folder, ranks)
    progress = _ScriptProgress(run.metrics_file(folder), say)

    def on_notice(number: int) -> None:
        progress.ends_s = time.monotonic() + notice.GRACE_S
        say(notice.leave_notice(folder, number))

    with alone_in(folder), signals_interrupt(on_notice):
        if leads:
            write(plan, run.plan_file(folder))
            run.metrics_file(folder).unlink(missing_ok=True)
        for attempt in range(restarts + 1):
            try:
                _attempt(started, node_rank, progress, say)
            except _Ended as ended:
                if attempt == restarts:
                    raise LaunchError(f"{ended}{ended.rest}") from None
                say(f"{ended}; starting all ranks again ({attempt + 1} of {restarts})")
            except KeyboardInterrupt:
                done = _steps_done(folder)
                if not done:
                    raise Interrupted("interrupted before the first step") from None
                raise Interrupted(
                    f"interrupted after step {done}; started again, a script that calls "
                    "engine.resume(folder) goes on from its last checkpoint"
                ) from None
            else:
                break
    if not leads:
        return None
    steps = tuple(run.read_records(run.metrics_file(folder)))
    return ScriptRun(steps=steps, output=output, restarts=attempt, global_batch=plan.global_batch)


@dataclass(frozen=True, slots=True)
class _Started:
    """What is started on this node."""

    plan: Plan
    plan_path: Path
    script: Path
    arguments: tuple[str, ...]
    folder: Path
    ranks: LocalRanks


def _attempt(
    started: _Started, node_rank: NodeRank, progress: _ScriptProgress, say: Callable[[str], None]
) -> None:
    """Run the ranks of all nodes once to their end.  Raises _Ended where one ended badly."""
    folder, ranks = started.folder, started.ranks
    with Rendezvous(node_rank, warn=lambda text: say(f"warning: {text}")) as rendezvous:
        _check_script(started.script)  # other nodes are told what this one lacks
        rendezvous.agree(
            {
                "plan": started.plan.digest,
                "script": hashlib.sha256(started.script.read_bytes()).hexdigest()[:16],
                "arguments": " ".join(started.arguments),
            }
        )
        for name in ("logs", "ranks"):
            folder_within(folder, name, emptied_of="rank-*")
        try:
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
                    **notice.environment(folder),
                },
                rank_0_shown=True,
                refresh=progress.refresh,
            )
            progress.refresh(now=True)
            if bad is None:
                rendezvous.all_gather("done")  # nodes leave together
                if any(run.handed_over(folder, rank).exists() for rank in ranks.devices):
                    raise HandedOver(
                        f"a notice ended the script after step {_steps_done(folder)}; start it "
                        "again and it goes on from what it saved"
                    )
        except HandedOver:
            raise
        except LaunchError as error:  # another node's ranks, or the node itself
            raise _Ended(str(error)) from None
        if bad is not None:
            shown = ranks.leads and bad.cause.rank == 0
            log = _from_here(run.log_file(folder, bad.cause.rank))
            end = f". Its log is {log}" if shown else log_end(log)
            raise _Ended(_how(bad, folder), end)


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
