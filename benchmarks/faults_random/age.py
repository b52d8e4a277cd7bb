"""Seconds of a recovery, and bytes of records, of a run that has many steps behind it.

    python -m benchmarks.faults_random.age --steps 1000000    # five minutes
    python -m benchmarks.faults_random.age --records FOLDER   # where records are made, or are there

Two runs of one model on two ranks: one is new, and one has so many steps behind it.  That one goes
on from a checkpoint whose number is changed, with the records of as many steps, which the runtime's
own code wrote and rotated.  In each, ranks are killed in turn, and what is measured is the time
from a kill to the end of the next step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.faults_random.run import (
    KINDS,
    SAVE_EVERY,
    Kind,
    Lab,
    command,
    environment,
    have_own_memory,
    ranks,
)
from meshwright.planner.documents.document import json_line
from meshwright.planner.documents.events import Attempt, Saved, StepDone, StepRecord
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.run import run_folder
from meshwright.runtime.run.record_segments import Rotation

KIND = KINDS[0]
GOES_ON = 4000
"""Steps of the second part, more than are waited for."""
SAVED_EVERY = 5000
NOW_UNIX_S, STEP_S = 1.7e9, 0.5
PATIENCE_S = 120.0


class AgedRun:
    """A launch of one model that goes on from step 20, or from one far behind it."""

    def __init__(self, lab: Lab, kind: Kind, name: str, age: int) -> None:
        self._lab, self._kind, self._age = lab, kind, age
        self.folder = lab.folder / name
        self.folder.mkdir()
        self.name = f"{os.getpid()}-{name}"
        for file in ("own.py", "data.txt"):
            shutil.copyfile(lab.folder / file, self.folder / file)
        self.output, self.saves = self.folder / "out", self.folder / "saved"

    def launch(self, steps: int) -> subprocess.Popen[bytes]:
        words = ["launch", str(self._lab.plan(self._kind)), "--data", str(self.folder / "data.txt")]
        words += ["--trust-code", "--elastic", "--steps", str(steps), "-o", str(self.output)]
        words += ["--checkpoint", str(self.saves), "--resume", "--or-start"]
        words += ["--checkpoint-every", str(SAVE_EVERY if steps == SAVE_EVERY else 10**9)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command(*words),
                cwd=self.folder,
                env=environment(
                    self.folder,
                    FAULTS_RUN=self.name,
                    FAULTS_FOLDER=str(self.folder),
                    FAULTS_SLEEP_S=str(self._kind.sleep_s),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def make_old(self, records: Path) -> None:
        """Change the number of its checkpoint, and have the records of the steps before."""
        saved = checkpoint.newest(self.saves)
        assert saved is not None
        done = checkpoint.progress(saved)
        samples = done.sample // done.step * self._age
        used = SampleDigest.of_first(samples)
        number = {
            "step": self._age,
            "sample": samples,
            "used": used,
            "checksum": None,
            "checksums": {**done.checksums, **set_steps(saved, self._age)},
        }
        old = done.model_copy(update=number)
        (saved / "meta.json").write_text(checkpoint._meta(old))
        saved.rename(saved.with_name(f"step-{self._age:06}"))
        for file in self.output.glob("*.jsonl"):
            file.unlink()
        shutil.copytree(records, self.output, dirs_exist_ok=True)

    def record_bytes(self) -> int:
        files = [*self.output.glob("*.jsonl"), *(self.output / "records").rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def newest_step(self) -> int:
        newest = run_folder.newest_record(run_folder.metrics_file(self.output))
        return newest.step if newest else 0

    def recoveries_s(self, kills: int) -> list[float]:
        """Kill a rank so many times; return the seconds until a step is done behind each."""
        launcher = self.launch((self._age or SAVE_EVERY) + GOES_ON)
        seconds = []
        try:
            self._wait_for_step((self._age or SAVE_EVERY) + 15, launcher)
            for number in range(kills):
                alive = sorted(rank.pid for rank in ranks(self.name))
                before = self._last_lines()
                os.kill(alive[number % len(alive)], signal.SIGKILL)
                begin_s = time.monotonic()
                self._wait_for_ranks(set(alive), launcher)
                before |= self._last_lines()  # a step that the others still finished
                self._wait_for_news(before, launcher)
                seconds.append(time.monotonic() - begin_s)
                self._wait_for_step(self.newest_step() + 15, launcher)
        finally:
            launcher.terminate()
            launcher.wait()
        return seconds

    def _last_lines(self) -> set[bytes]:
        lines = run_folder.metrics_file(self.output).read_bytes().splitlines()
        return set(lines[-2 * SAVE_EVERY :])

    def _wait_for_ranks(self, before: set[int], launcher: subprocess.Popen[bytes]) -> None:
        """Wait until none of these ranks is there, and others are."""
        until_s = time.monotonic() + PATIENCE_S
        while not (now := {rank.pid for rank in ranks(self.name)}) or now & before:
            self._check(launcher, until_s)

    def _wait_for_news(self, before: set[bytes], launcher: subprocess.Popen[bytes]) -> None:
        """Wait until a step is written down that was not there before."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._last_lines() - before:
            self._check(launcher, until_s)

    def _wait_for_step(self, step: int, launcher: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.newest_step() < step:
            self._check(launcher, until_s)

    def _check(self, launcher: subprocess.Popen[bytes], until_s: float) -> None:
        time.sleep(0.01)
        if launcher.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"{self.name}: {(self.folder / 'log').read_text()[-2000:]}")


def set_steps(saved: Path, step: int) -> dict[str, str]:
    """Have the optimizer's number of steps in a checkpoint; return checksums of what is written."""
    index = json.loads((saved / "tensors.json").read_text())
    changed = set()
    for name, tensor in index["tensors"].items():
        if not name.endswith("step") or tensor["shape"]:
            continue
        for file, begin, *_ in tensor["chunks"]:
            path = saved / index["files"][file]
            with path.open("r+b") as opened:
                opened.seek(begin)
                opened.write(np.array(step, tensor["dtype"]).tobytes())
            changed.add(path)
    assert changed
    return {
        path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in changed
    }


def write_records(output: Path, steps: int) -> None:
    """Write the records of so many steps, by the runtime's own types and rotation."""
    events, metrics = run_folder.events_file(output), run_folder.metrics_file(output)
    output.mkdir()
    rng, rotation, now_s = random.Random(0), Rotation(events, metrics), 0.0
    unix_s = NOW_UNIX_S
    run_folder.append_record(Attempt(at_unix_s=unix_s, plan="sha256:1", devices=2), events)
    for first in range(1, steps + 1, SAVED_EVERY):
        event_lines, metric_lines = [], []
        last = min(steps, first + SAVED_EVERY - 1)
        for step in range(first, last + 1):
            unix_s += STEP_S + rng.random() * 0.01
            record = {
                "step": step,
                "loss": 2 + rng.random(),
                "grad_norm": rng.random(),
                "step_s": STEP_S + rng.random() * 0.01,
                "tokens_per_s": 10_000 + 100 * rng.random(),
                "epoch": 0,
                "learning_rate": 3e-4 * rng.random(),
                "mfu": 0.3 + rng.random() * 0.01,
                "peak_memory_bytes": 123_456_789,
            }
            done = {"at_unix_s": unix_s, "event": "step", "record": record, "predicted_s": 0.45}
            event_lines.append(json.dumps(done) + "\n")
            metric_lines.append(json.dumps(record) + "\n")
        # The last as the runtime writes it: lines of its types, made in a tenth of their time.
        assert event_lines[-1] == json_line(StepDone.model_validate(done))
        assert metric_lines[-1] == json_line(StepRecord.model_validate(record))
        saved = Saved(at_unix_s=unix_s, step=last, blocked_s=0.1, written_s=0.2)
        event_lines.append(json_line(saved))
        for file, lines in ((events, event_lines), (metrics, metric_lines)):
            with file.open("a") as opened:
                opened.write("".join(lines))
        now_s += 10.0
        rotation.look(now_s=now_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="behind the old run")
    parser.add_argument("--kills", type=int, default=5, help="of ranks, in each run")
    parser.add_argument("--records", type=Path, help="folder of the old run's, kept for the next")
    args = parser.parse_args()
    have_own_memory()
    with tempfile.TemporaryDirectory(prefix="age-") as name:
        lab = Lab(Path(name))
        records = args.records or Path(name) / "records"
        if not records.exists():
            write_records(records, args.steps)
        middle = {}
        for title, age in (("new", 0), ("old", args.steps)):
            run = AgedRun(lab, KIND, title, age)
            first = run.launch(SAVE_EVERY)
            if first.wait():
                raise SystemExit((run.folder / "log").read_text()[-2000:])
            if age:
                run.make_old(records)
                print(f"records of {age} steps: {run.record_bytes() / 1e6:.1f} MB")
            seconds = run.recoveries_s(args.kills)
            middle[title] = statistics.median(seconds)
            print(f"{title}: {', '.join(f'{took_s:.2f}' for took_s in seconds)} s")
        print(f"median {middle['old'] / middle['new']:.2f} times that of a new run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
