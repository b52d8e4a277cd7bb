"""Running a user's script on the ranks of a plan of this machine: started, watched, started again.

The script makes its Engine without naming a plan, and calls `engine.resume(folder)` if it wants to
go on where it was saved.  A rank that ends badly ends all; where restarts are left all begin again.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.document import read, write
from planner.errors import LaunchError
from planner.plan import Plan
from planner.prediction import Prediction
from planner.units import seconds_text
from runtime import run
from runtime.nodes import ALONE
from runtime.preflight import rank_environment
from runtime.rendezvous import Rendezvous
from runtime.report import WARM_UP_STEPS, Comparison
from runtime.run import StepRecord
from runtime.script_rank import OUTPUT_VARIABLE
from runtime.supervise import BadEnd, last_lines, supervised

PROGRESS_S = 5.0
"""Between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What a script's run left."""

    steps: tuple[StepRecord, ...]
    output: Path
    restarts: int
    """How often the ranks were started again."""

    @property
    def step_time_s(self) -> float | None:
        """The median behind the first steps; none where there are no more."""
        times = [record.step_s for record in self.steps[WARM_UP_STEPS:]]
        return statistics.median(times) if times else None

    def comparison(self, prediction: Prediction) -> list[Comparison]:
        """Return what was both predicted and measured."""
        measured = self.step_time_s
        if measured is None:
            return []
        predicted = prediction.step_time_s
        return [Comparison(quantity="step time", unit="s", predicted=predicted, measured=measured)]


class _Progress:
    """Says the newest step: the first at once, then one every few seconds, and the last.

    How many there will be, only the script knows.
    """

    def __init__(self, metrics: Path, say: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._say = say
        self._said = 0
        self._due_s = 0.0

    def refresh(self, *, now: bool = False) -> None:
        """Say the newest step if it is time to, or `now`."""
        if not now and time.monotonic() < self._due_s:
            return
        record = run.newest_record(self._metrics)
        if record is None or record.step == self._said:
            return
        self._say(
            f"step {record.step}, loss {record.loss:.4f}, {seconds_text(record.step_s)} per step"
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
    say: Callable[[str], None],
) -> ScriptRun:
    """Run a script on the plan's ranks; start them again up to `restarts` times if one fails.

    Raises LaunchError where the script is not there, or the ranks failed for good.
    """
    plan = read(Plan, plan_path)
    if not _is_file(script):
        raise LaunchError(f"{script}: is no file; name the script that trains")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"--output {output}: {error}") from None
    write(plan, run.plan_file(output))
    run.metrics_file(output).unlink(missing_ok=True)
    ranks = plan.mesh.devices
    progress = _Progress(run.metrics_file(output), say)
    for attempt in range(restarts + 1):
        for folder in ("logs", "ranks"):
            shutil.rmtree(output / folder, ignore_errors=True)
            (output / folder).mkdir()
        bad = _supervised(
            plan_path, script, arguments, output=output, ranks=ranks, refresh=progress.refresh
        )
        progress.refresh(now=True)
        if bad is None:
            steps = tuple(run.read_records(run.metrics_file(output)))
            return ScriptRun(steps=steps, output=output, restarts=attempt)
        how = _how(bad, output)
        if attempt == restarts:
            end = last_lines(run.log_file(output, bad.cause.rank))
            raise LaunchError(f"{how}. The end of its log:{end}")
        say(f"{how}; starting all ranks again ({attempt + 1} of {restarts})")
    raise AssertionError


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _supervised(
    plan_path: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    output: Path,
    ranks: int,
    refresh: Callable[[], None],
) -> BadEnd | None:
    told = {
        "MESHWRIGHT_PLAN": str(plan_path.resolve()),
        OUTPUT_VARIABLE: str(output.resolve()),
    }
    with Rendezvous(ALONE) as rendezvous:
        return supervised(
            [sys.executable, "-u", "-m", "runtime.script_rank", str(script), *arguments],
            list(range(ranks)),
            lambda rank, port: rank_environment(rank, ranks=ranks, port=port),
            folder=output,
            world=ranks,
            rendezvous=rendezvous,
            leads=True,
            shared=told,
            refresh=refresh,
        )


def _how(bad: BadEnd, output: Path) -> str:
    ended, failure = bad.cause, bad.failure
    done = sum(1 for _ in run.read_records(run.metrics_file(output)))
    if failure is not None:
        first = (failure.message.splitlines() or [""])[0]
        how = f"stopped with {failure.kind}: {first[:300]}"
    else:
        how = f"was killed by {ended.signal}" if ended.signal else f"exited with code {ended.code}"
    return f"rank {ended.rank} {how} after step {done}"
