"""How soon a rank that stands still is named, and how often one is that does not: sleeping ranks.

    python benchmarks/survival.py                    # a minute a dozen stops; little processor time
    python benchmarks/survival.py --steps 1000000    # false alarms, over steps of uneven length

Ranks are processes that tell where they are and sleep, so what is measured is the watch and not the
contention of training.  Steps of uneven length are told by a clock that is set by hand.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.beacon import BEACONS, Beacon, Beacons, beacons
from runtime.hang import LOOK_S, HangWatch

STARTED_S = 600.0
SLEEPING = """
import os, sys, time
from pathlib import Path
from runtime import hang
from runtime.beacon import Beacon

rank = int(os.environ["LOCAL_RANK"])
hang.answer_with_stack(Path(sys.argv[1]), rank)
beacon = Beacon(rank)
for step in range(1, 10**9):
    for part in ("batch", "step"):
        beacon.tell(step, part)
        time.sleep(float(sys.argv[2]) / 2)
"""
ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def sleeping(count: int, step_s: float, seen: Beacons, output: Path) -> Iterator[list[int]]:
    """Ranks that take steps by sleeping; yields their processes."""
    (output / "flight").mkdir(exist_ok=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPING, str(output), str(step_s)],
            env={
                **os.environ,
                BEACONS: str(seen.file),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": str(ROOT),
            },
        )
        for rank in range(count)
    ]
    try:
        yield [rank.pid for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def named_within_s(*, ranks: int, step_s: float, stopped: int) -> tuple[float, int]:
    """Stop a rank; return the seconds until one is named, and which."""
    with tempfile.TemporaryDirectory() as name, beacons(ranks) as seen:
        watch = HangWatch(seen, {i: i for i in range(ranks)}, Path(name), start_s=STARTED_S)
        with sleeping(ranks, step_s, seen, Path(name)) as processes:
            while min(place.step for place in seen.places()) < 5:
                watch.look()
                time.sleep(LOOK_S)
            os.kill(processes[stopped], signal.SIGSTOP)
            begin_s = time.monotonic()
            while not (found := watch.look()):
                time.sleep(LOOK_S / 4)
            return time.monotonic() - begin_s, found[0].rank


def false_alarms(*, steps: int, ranks: int, step_s: float, jitter: float, seed: int) -> int:
    """Return how often a rank is said to hang in steps of uneven length, of which none does."""
    rng = random.Random(seed)
    now_s, alarms = 0.0, 0
    with tempfile.TemporaryDirectory() as name, beacons(ranks) as seen:
        os.environ[BEACONS] = str(seen.file)
        told = [Beacon(rank) for rank in range(ranks)]
        del os.environ[BEACONS]
        real_ns, kill = time.monotonic_ns, os.kill
        # The clock is set by hand, and nobody is there to be asked for a stack.
        time.monotonic_ns = lambda: round(now_s * 1e9)
        os.kill = lambda process, number: None
        try:
            watch = HangWatch(
                seen,
                {rank: rank for rank in range(ranks)},
                Path(name),
                start_s=STARTED_S,
                now_s=lambda: now_s,
            )
            for step in range(1, steps + 1):
                for rank in told:
                    rank.tell(step, "step")
                now_s += step_s * rng.uniform(1 - jitter, 1 + jitter)
                alarms += bool(watch.look())
        finally:
            time.monotonic_ns, os.kill = real_ns, kill
    return alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--stops", type=int, default=5, help="ranks that are stopped")
    parser.add_argument("--steps", type=int, default=0, help="uneven steps without a fault")
    args = parser.parse_args()
    if args.steps:
        for step_s in (0.5, 6.0, 60.0):
            alarms = false_alarms(steps=args.steps, ranks=2, step_s=step_s, jitter=0.2, seed=0)
            print(f"{alarms} false alarms in {args.steps} steps of {step_s:g} s, each 20 % uneven")
        return 0
    seconds = []
    for number in range(args.stops):
        stopped = number % args.ranks
        took_s, named = named_within_s(ranks=args.ranks, step_s=0.2, stopped=stopped)
        seconds.append(took_s)
        print(f"rank {stopped} stopped: rank {named} named after {took_s:.1f} s")
        if named != stopped:
            return 1
    print(f"median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
