"""What the random faults see: the program is broken on purpose, and each break must be found.

    python -m benchmarks.faults_random.sabotage                # all breaks, about a minute each
    python -m benchmarks.faults_random.sabotage orphan copies  # some

A break is a line of a copy of the program that is replaced by another.  Runs with faults train by
the copy, and what they are compared with is trained by the program as it is.  A break that no run
finds is a hole in the benchmark, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults_random.run import FAULTS, ROOT, Lab, play_run, take_signals

PARTS = ("meshwright", "planner", "profiler", "runtime")
LOOP = "runtime/launch/training_loop.py"
KILLED = ("rank killed", "rank ends", "error")
RUN, SCRIPT = (0, 10), (1, 6)
"""Numbers of runs of one's own model by `launch`, and of a script, on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Lines of the program that are replaced, and what the benchmark must say of it."""

    what: str
    lines: tuple[tuple[str, str, str], ...]
    """File, a line of it, and what stands there instead."""
    finding: str
    """What is found says this, as a regular expression."""
    faults: tuple[str, ...] = KILLED
    numbers: tuple[int, ...] = RUN


RESTORED = "        self.steps_done = kept.step\n"
BREAKS = {
    "loss": Break(
        what="losses behind a restart are 1e-6 larger in proportion",
        lines=(
            (LOOP, RESTORED, f"{RESTORED}        self._factor = 1 + 1e-6\n"),
            (
                LOOP,
                "            loss=result.loss,\n",
                "            loss=result.loss * getattr(self, '_factor', 1),\n",
            ),
        ),
        finding="loss of step",
    ),
    "skip": Break(
        what="a step behind a restart is not trained, and its samples count as used",
        lines=(
            (
                LOOP,
                RESTORED,
                "        self.steps_done = kept.step + 1\n"
                "        size, first = self.plan.global_batch, self.engine.next_sample\n"
                "        own = self.plan.samples_of(self.engine.slice_rank)\n"
                "        self._used.add(range(first + own.start, first + own.stop))\n"
                "        self.engine.next_sample += size\n",
            ),
        ),
        finding="loss of step|samples",
    ),
    "order": Break(
        what="behind a restart the samples of two steps change places",
        lines=(
            (LOOP, RESTORED, f"{RESTORED}        self._turned = True\n"),
            (
                LOOP,
                "        batch = samples.batch(first + own.start, len(own))\n",
                "        size = self.plan.global_batch\n"
                "        if getattr(self, '_turned', False):\n"
                "            first += -size if first // size % 2 else size\n"
                "        batch = samples.batch(first + own.start, len(own))\n",
            ),
        ),
        finding="loss of step",
    ),
    "samples": Break(
        what="the samples of the first step behind a restart are not counted",
        lines=(
            (LOOP, RESTORED, f"{RESTORED}        self._left_out = True\n"),
            (
                LOOP,
                "        return Progress(\n            step=self.steps_done,\n",
                "        if getattr(self, '_left_out', False):\n"
                "            self._used.add(range(1))\n"
                "        return Progress(\n            step=self.steps_done,\n",
            ),
        ),
        finding="samples|status|not done|loss of step",
    ),
    "moments": Break(
        what="a restart begins with moments of the optimizer that are 0",
        lines=(
            (
                LOOP,
                RESTORED,
                f"{RESTORED}"
                "        for name, value in self.engine.state().items():\n"
                "            if 'exp_avg' in name:\n"
                "                value.zero_()\n",
            ),
        ),
        finding="loss of step|has another",
    ),
    "data": Break(
        what="what is gone on from, and the orders before, are not compared with the data",
        lines=(
            (
                "runtime/launch/rank_config.py",
                "        _refuse_other_data(ready, corpus)\n",
                "        pass\n",
            ),
            (
                "runtime/checkpoint/checkpoint.py",
                '            ("corpus_digest", self.corpus_digest, run.corpus_digest, '
                'f"the data ({run.corpus})"),\n',
                "",
            ),
        ),
        finding="loss of step",
        faults=("data replaced",),
    ),
    "saved": Break(
        what="the last step is not saved",
        lines=(
            (
                LOOP,
                "                    self._saver.begin(state, self._progress(loss))\n",
                "                    if step < self.orders.steps:\n"
                "                        self._saver.begin(state, self._progress(loss))\n",
            ),
        ),
        finding="is not saved",
    ),
    "orphan": Break(
        what="a rank leaves a process behind",
        lines=(
            (
                "runtime/run/rank_exit.py",
                "    end_with_parent(signal.SIGKILL)\n",
                "    __import__('subprocess').Popen(['sleep', '900'], start_new_session=True)\n"
                "    end_with_parent(signal.SIGKILL)\n",
            ),
        ),
        finding="orphans",
    ),
    "copies": Break(
        what="copies stay in memory behind the run",
        lines=(
            (
                "runtime/resilience/shared_memory.py",
                "            shutil.rmtree(self._folder, ignore_errors=True)\n        for",
                "            pass\n        for",
            ),
        ),
        finding="left behind",
    ),
    "printed": Break(
        what="fewer lost steps are printed than a fault costs",
        lines=(
            (
                "planner/documents/events.py",
                "        every, most = self.every_steps, self.every_steps + 1\n",
                "        every, most = self.every_steps, 0\n",
            ),
        ),
        finding="steps lost, and 0 at most",
    ),
    "script": Break(
        what="a script's losses behind a restart are 1e-6 larger in proportion",
        lines=(
            (
                "runtime/run/metrics.py",
                "            self._begun = True\n",
                "            self._begun = True\n"
                "            self._factor = 1 + 1e-6 * (step > 1)\n",
            ),
            (
                "runtime/run/metrics.py",
                "                loss=loss,\n",
                "                loss=loss * self._factor,\n",
            ),
        ),
        finding="loss of step",
        numbers=SCRIPT,
    ),
}


def broken_program(name: str, folder: Path) -> Path:
    """Return the folder of a copy of the program that has a break."""
    root = folder / f"broken-{name}"
    for part in PARTS:
        shutil.copytree(
            ROOT / part,
            root / part,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file, line, instead in BREAKS[name].lines:
        text = (root / file).read_text()
        if text.count(line) != 1:
            raise SystemExit(f"{name}: {file} has {line!r} {text.count(line)} times; write it anew")
        (root / file).write_text(text.replace(line, instead))
    return root


def main() -> int:
    take_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BREAKS)}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    unseen = []
    for name in args.names or BREAKS:
        broken, folder = BREAKS[name], Path(tempfile.mkdtemp(prefix="sabotage-"))
        print(f"--- {name}: {broken.what}")
        lab = Lab(folder, broken_program(name, folder))
        lab.faults = tuple(fault for fault in FAULTS if fault in broken.faults)
        seen: list[str] = []
        for number in broken.numbers:
            run, _, _ = play_run(lab, number, seed=args.seed + number, faults=3)
            seen = [text for text in run.problems if re.search(broken.finding, text)]
            if seen:
                break
        print(f"{name}: {'found' if seen else 'NOT FOUND'}", flush=True)
        unseen += [] if seen else [name]
        shutil.rmtree(folder, ignore_errors=True)
    print(f"not found: {', '.join(unseen) or 'none'}")
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
