"""One trial: a plan run for a few steps by a command of its own, and ended when enough is known.

A trial runs `meshwright launch`, or a command that a template names.  Either is a child in a
session of its own, which the kernel ends with this process, however that ends.  Its steps are read
from its metrics, or from what its framework prints.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshwright.planner.documents import document
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.framework_configs.logs import LoggedWork, Reader, Said, out_of_memory
from meshwright.planner.system.safe_files import folder_within, open_below
from meshwright.planner.tuning.measurement_noise import Steadiness, noise_of
from meshwright.planner.tuning.posterior import Timed
from meshwright.planner.tuning.record import Ended
from meshwright.runtime.run.rank_exit import end_with_parent
from meshwright.runtime.run.run_folder import metrics_file, read_failures, read_records
from meshwright.runtime.run.run_report import WARM_UP_STEPS

LOG = "output.log"
LEAST, USUAL, MOST = 3, 10, 40
"""Numbers of timed steps of a trial; more than usual where they are noisy, while they take no
longer than everything before them."""
WANTED, BORNE = 0.01, 0.02
"""Standard errors of the median, as a share, at which no more steps are requested: at any time, and
after the usual ones."""
SLOWER, SURELY = 1.1, 3.0
"""A plan is surely slower than the best one if every step of it is by this factor, and its median
by this many standard errors of both."""
GRACE_S = 20.0
"""Seconds between asking a child to end and killing it."""
LOOK_S = 0.1
TAIL_BYTES = 1 << 16
STEADY = Steadiness()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a trial."""

    ended: Ended
    step_s: float | None = None
    noise: float | None = None
    steps: int = 0
    peak_bytes: float | None = None
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProcess:
    """Command of a trial, and the reader of its steps."""

    words: tuple[str, ...]
    folder: Path
    ranks: int
    work: LoggedWork
    reader: Reader | None = None
    """Reader of its output; None: it writes our own metrics."""

    def records(self) -> Iterator[Said]:
        """Yield its figures so far."""
        if self.reader is not None:
            yield from self.reader(self.log().splitlines(keepends=True), self.work)
            return
        for record in read_records(metrics_file(self.folder)):
            yield Said(step_s=record.step_s, peak_bytes=record.peak_memory_bytes)

    def log(self) -> str:
        """Return its output so far."""
        path = self.folder / LOG
        try:
            return document.read_text(path) if document.is_file(path) else ""
        except DocumentError:  # longer than a document may be: the end suffices
            with path.open("rb") as file:
                file.seek(-TAIL_BYTES, os.SEEK_END)
                return file.read().decode(errors="replace")


def words_of(template: str, *, config: str, plan: str, output: Path) -> tuple[str, ...]:
    """Return the words of a command template with its places filled in.

    >>> words_of("torchrun -m t {config}", config="a b.toml", plan="p.yaml", output=Path("o"))
    ('torchrun', '-m', 't', 'a b.toml')
    """
    filled = {"config": config, "plan": plan, "output": str(output)}
    if not any(f"{{{name}}}" in template for name in ("config", "plan")):
        raise DocumentError(
            "run", "names neither {config} nor {plan}, so it runs no plan; name one of them"
        )
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise DocumentError("run", f"is no command: {error}") from error
    for name, value in filled.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return tuple(words)


def launch_words(plan: Path, output: Path, options: Sequence[str]) -> tuple[str, ...]:
    """Return the command that launches a plan for a trial."""
    steps = str(WARM_UP_STEPS + MOST)
    asked = ("--steps", steps, "--output", str(output), *options)
    return (sys.executable, "-m", "meshwright", "launch", str(plan), *asked)


def warm_step_seconds(records: Sequence[Said]) -> list[float]:
    """Return the seconds of steps after the warm-up; a mean of several counts once."""
    result, seen = [], 0
    for record in records:
        if record.step_s is not None:
            if seen >= WARM_UP_STEPS:
                result.append(record.step_s)
            seen += record.steps
    return result


def enough(
    steps_s: Sequence[float],
    best: Timed | None,
    *,
    steadiness: Steadiness = STEADY,
    start_s: float = 0.0,
) -> Ended | None:
    """Return the end of a trial after these steps; None: it goes on.  It had begun in `start_s`.

    >>> enough([1.0, 1.0, 1.0], None), enough([1.0, 1.5, 1.0], None)
    ('ran', None)
    >>> enough([2.0, 2.1], Timed(option=0, step_s=1.0)), enough([1.0, 1.3] * 5, None)
    ('slower', 'ran')
    >>> enough([1.0, 1.3] * 5, None, start_s=20.0) is None  # the start took longer
    True
    """
    if len(steps_s) < 2:
        return None
    count, spread = len(steps_s), noise_of(steps_s)
    of_all = steadiness.and_trial(spread, count).noise(count) if count < USUAL else 0.0
    noise = max(spread, of_all)
    sooner = 0.0
    if best is not None:
        # By how many standard errors of both it is the faster one.
        sooner = math.log(best.step_s / statistics.median(steps_s)) / math.hypot(noise, best.noise)
        if min(steps_s) > SLOWER * best.step_s and sooner < -SURELY:
            return "slower"
    if count < LEAST:
        return None
    borne = noise <= BORNE or sum(steps_s) >= start_s or count >= MOST
    precise = noise <= WANTED or sooner > SURELY or (count >= USUAL and borne)
    return "ran" if precise else None


def trial(
    run: TrialProcess, *, best: Timed | None, steadiness: Steadiness = STEADY, most_s: float
) -> Measured:
    """Run a trial and return what it saw; it is ended when enough is known, or after `most_s`.

    `best` is the step of the best plan so far, `steadiness` how alike steps were.
    """
    started = time.monotonic()
    # An earlier attempt that was killed may have left its own.
    folder_within(run.folder.parent, run.folder.name, emptied_of=metrics_file(run.folder).name)
    folder_within(run.folder, "ranks", emptied_of="rank-*")
    ended: Ended | None = None
    with open_below(run.folder / LOG, within=run.folder) as log:
        try:
            child = subprocess.Popen(
                run.words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )
        except OSError as error:
            raise LaunchError(f"{run.words[0]}: cannot be started: {error.strerror}") from error
        try:
            while ended is None and child.poll() is None:
                steps_s = warm_step_seconds(list(run.records()))
                start_s = time.monotonic() - started - sum(steps_s)
                ended = enough(steps_s, best, steadiness=steadiness, start_s=start_s)
                if ended is None and time.monotonic() - started > most_s:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_S)
        finally:
            code = _end(child)
    seconds = time.monotonic() - started
    return _trial_result(
        run, lambda steps_s: ended or enough(steps_s, best, steadiness=steadiness), code, seconds
    )


def _trial_result(
    run: TrialProcess, judge: Callable[[Sequence[float]], Ended | None], code: int, seconds: float
) -> Measured:
    """Return the measurements of a child that has ended; `judge` is its last judgement."""
    records = list(run.records())
    steps_s = warm_step_seconds(records)
    ended = judge(steps_s) or ("ran" if len(steps_s) >= LEAST else None)
    if ended is None:
        text = run.log()
        kinds = {failure.kind for failure in read_failures(run.folder, run.ranks)}
        lacked = "OutOfMemoryError" in kinds or out_of_memory(text)
        last = [line.strip() for line in text.splitlines() if line.strip()][-1:]
        why = last[0][-200:] if last else f"exited with code {code}"
        if not lacked and code == 0:
            why = f"logged {len(steps_s)} steps; {WARM_UP_STEPS + LEAST} are needed"
        return Measured(
            ended="out of memory" if lacked else "failed",
            seconds=seconds,
            why="" if lacked else why,
        )
    peaks = [record.peak_bytes for record in records if record.peak_bytes]
    return Measured(
        ended=ended,
        step_s=statistics.median(steps_s),
        noise=noise_of(steps_s),
        steps=len(steps_s),
        peak_bytes=max(peaks, default=None),
        seconds=seconds,
    )


def _end(child: subprocess.Popen[bytes]) -> int:
    """End a child and all that it started; return how it ended."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # what it left behind
    return child.wait()
