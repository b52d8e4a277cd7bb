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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.planner.documents.events import Drift
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.prediction import Prediction
from meshwright.runtime.launch.host_memory_limits import most_bytes
from meshwright.runtime.resilience.hang_detector import LOOK_S, HangWatch
from meshwright.runtime.resilience.heartbeat import (
    BEACONS,
    Beacon,
    Beacons,
    RankPace,
    beacons,
    own_seconds,
)
from meshwright.runtime.resilience.straggler_detector import DriftWatch, StagePace

STARTED_S = 600.0
SLEEPING = """
import os, sys, time
from pathlib import Path
from meshwright.runtime.resilience.heartbeat import Beacon, answer_with_stack

rank = int(os.environ["LOCAL_RANK"])
answer_with_stack(Path(sys.argv[1]), rank)
beacon = Beacon(rank)
for step in range(1, 10**9):
    for part in ("batch", "step"):
        beacon.begin_part(step, part)
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
                    rank.begin_part(step, "step")
                now_s += step_s * rng.uniform(1 - jitter, 1 + jitter)
                alarms += bool(watch.look())
        finally:
            time.monotonic_ns, os.kill = real_ns, kill
    return alarms


def telling_s(steps: int = 20_000, looks: int = 500) -> tuple[float, float]:
    """Return CPU seconds that a rank takes a step to tell its pace, and a launcher a look."""
    plan = evenly(2)
    with tempfile.TemporaryDirectory() as name, beacons(2) as seen:
        os.environ[BEACONS] = str(seen.file)
        beacon = Beacon(0)
        del os.environ[BEACONS]
        begin_s = time.process_time()
        for step in range(steps):
            beacon.begin_part(step, "batch")
            beacon.begin_part(step, "step")
            before_s = own_seconds()
            beacon.count_step(data_s=0.1, work_s=own_seconds() - before_s, whole_s=0.5)
        rank_s = (time.process_time() - begin_s) / steps
        hang = HangWatch(seen, {0: 0, 1: 1}, Path(name), start_s=STARTED_S)
        drift = DriftWatch(plan, (0, 1), None)
        begin_s = time.process_time()
        for look in range(looks):
            hang.look()
            paces = dict(enumerate(seen.paces()))
            drift.look([0.5], paces, look)
            for place in seen.places():
                most_bytes(place.process)
        return rank_s, (time.process_time() - begin_s) / looks


def evenly(ranks: int) -> Plan:
    """Return a plan of ranks with equal work."""
    return Plan(
        model=PlannedModel(name="any", source="any", digest="any"),
        cluster="local",
        seq_len=8,
        global_batch=ranks,
        precision="fp32",
        mesh=Mesh(data_replicate=ranks),
        zero=0,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=1,
        stages=(Stage(layers=(PlacedLayer(layer="a"),)),),
    )


class Paces:
    """Ranks that work, read and meet in each step, by a clock that is set by hand.

    A step is predicted to take 1 s, 0.9 to 1.1: 0.3 forward, 0.5 backward, 0.2 on the wire.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        nodes: int = 1,
        wire_s: float = 0.2,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Each rank's work is uneven by `jitter`; `wire_s` is what every rank waits."""
        self._ranks = range(plan.ranks)
        self._wire_s, self._jitter = wire_s, jitter
        self._rng = random.Random(seed)
        prediction = Prediction(
            layout="a",
            step_time_s=1.0,
            step_time_low_s=0.9,
            step_time_high_s=1.1,
            step_parts={"forward": 0.3, "backward": 0.5, "data communication": 0.2},
            tokens_per_s=1.0,
            mfu=0.5,
            fits=True,
            stages=(),
        )
        each = len(self._ranks) // nodes
        self._nodes = [self._ranks[first : first + each] for first in self._ranks[::each]]
        # As in a run, that of rank 0 knows its steps.
        self._watches = [
            DriftWatch(plan, ranks, None if ranks[0] else prediction) for ranks in self._nodes
        ]

    @property
    def usual_s(self) -> float:
        """Seconds of work of a rank so that the slowest of all works 0.8 s on average."""
        ranks = len(self._ranks)
        return 0.8 / (1 + self._jitter * (ranks - 1) / (ranks + 1))

    def live(
        self, steps: int, seconds: Callable[[int, int], tuple[float, float]], *, every: int = 1
    ) -> list[Drift]:
        """Return what is said in so many steps, of which one reads and works `seconds`.

        These are of a rank in a step; the watch looks behind `every` so many.
        """
        found: list[Drift] = []
        spent = {rank: [0.0, 0.0, 0.0] for rank in self._ranks}
        news: list[float] = []
        low, high = 1 - self._jitter, 1 + self._jitter
        for step in range(1, steps + 1):
            each = [seconds(rank, step) for rank in self._ranks]
            works = [work_s * self._rng.uniform(low, high) for _, work_s in each]
            whole_s = max(map(sum, zip((data for data, _ in each), works, strict=True)))
            news.append(whole_s + self._wire_s)
            for rank, (data_s, _) in enumerate(each):
                own = spent[rank]
                own[0] += data_s
                own[1] += works[rank]
                own[2] += whole_s + self._wire_s
            if step % every == 0:
                paces = {
                    rank: RankPace(steps=step, data_s=own[0], work_s=own[1], whole_s=own[2])
                    for rank, own in spent.items()
                }
                # Others' paces come through the network, and are as old as the last look.
                before = [watch.stage_paces for watch in self._watches]
                for node, watch in enumerate(self._watches):
                    local = {rank: paces[rank] for rank in self._nodes[node]}
                    others = [
                        StagePace.model_validate_json(pace.model_dump_json())
                        for other, stages in enumerate(before)
                        for pace in stages
                        if other != node
                    ]
                    said = watch.look([] if node else news, local, step, others)
                    found += [event for event in said if isinstance(event, Drift)]
                news = []
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--stops", type=int, default=5, help="ranks that are stopped")
    parser.add_argument("--steps", type=int, default=0, help="uneven steps without a fault")
    parser.add_argument("--cost", action="store_true", help="CPU seconds of telling and looking")
    args = parser.parse_args()
    if args.cost:
        costs = [telling_s() for _ in range(5)]
        rank_s, look_s = (min(column) for column in zip(*costs, strict=True))
        print(f"a rank: {1e6 * rank_s:.0f} us a step; a launcher: {1e6 * look_s:.0f} us a second")
        return 0
    if args.steps:
        for step_s in (0.5, 6.0, 60.0):
            alarms = false_alarms(steps=args.steps, ranks=2, step_s=step_s, jitter=0.2, seed=0)
            print(f"{alarms} false alarms in {args.steps} steps of {step_s:g} s, each 20 % uneven")
        for ranks, nodes in ((2, 1), (2, 2), (8, 1), (8, 4)):
            uneven = Paces(evenly(ranks), nodes=nodes, jitter=0.2)
            each = 0.0, uneven.usual_s
            said = uneven.live(args.steps, lambda *_, each=each: each, every=25)
            print(
                f"{len(said)} drifts in {args.steps} steps of {ranks} ranks on {nodes} nodes, "
                "each 20 % uneven"
            )
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
