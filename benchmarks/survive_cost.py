"""What `--survive` costs while nothing fails: processor seconds a step, with it over without.

    python -m benchmarks.survive_cost                   # 12 runs of half a minute, and one of one
    python -m benchmarks.survive_cost --pairs 0         # that one alone: what the calls take

Two ranks train a model of 4 million parameters; runs with and without `--survive` alternate, so
that what else the machine does meets both.  Counted are ranks, launcher and zygote between two
steps, behind the start and the book of plans, which one process of the lowest priority solves once.
Behind them one run with `--survive` counts what its added calls take by themselves, in ranks and in
the launcher, over what their processes take: it hardly depends on what else the machine does, and
leaves out what a call does to the work behind it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.documents.document import write
from planner.documents.model import Architecture, Layer, ModelGraph
from planner.documents.plan import Plan, PlannedModel
from runtime import partner
from runtime.beacon import Beacon
from runtime.looks import Looks
from runtime.replay import Replays
from runtime.run import metrics_file
from runtime.step_line import ProgressLine
from runtime.train import Loop
from runtime.zygote import Zygote
from tests.runtime.forked import ForkedLauncher, nursery
from tests.runtime.rooms import Room

HIDDEN, LAYERS, VOCABULARY, SEQ_LEN, BATCH = 256, 5, 258, 256, 8
FROM_STEP, TO_STEP = 25, 65
COUNTED_STEPS = 80
"""Of the run whose calls are counted: a state is copied every few steps."""
PATIENCE_S = 600.0
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * 4 * HIDDEN + 2 * HIDDEN
MODEL = ModelGraph(
    name="four",
    architecture=Architecture(
        family="reference",
        hidden_size=HIDDEN,
        layers=LAYERS,
        heads=4,
        kv_heads=4,
        head_dim=HIDDEN // 4,
        ffn_size=4 * HIDDEN,
        vocab_size=VOCABULARY,
        gated_mlp=True,
    ),
    layers=(
        Layer(name="embedding", kind="embedding", parameters=VOCABULARY * HIDDEN),
        Layer(name="block", kind="block", repeat=LAYERS, parameters=BLOCK),
        Layer(name="head", kind="head", parameters=HIDDEN + VOCABULARY * HIDDEN),
    ),
)


def planned(folder: Path) -> Path:
    """Write a plan for two ranks."""
    write(MODEL, folder / "model.yaml")
    source = str(folder / "model.yaml")
    layers = [{"layer": name} for name, _ in MODEL.chain]
    plan = Plan.of(
        {
            "model": PlannedModel(name="four", source=source, digest=MODEL.digest).model_dump(
                exclude_none=True
            ),
            "cluster": "local:2",
            "seq_len": SEQ_LEN,
            "global_batch": BATCH,
            "precision": "fp32",
            "mesh": {"data_replicate": 2},
            "zero": 0,
            "schedule": "1f1b",
            "micro_batch": BATCH // 2,
            "micro_batches": 1,
            "stages": [{"layers": layers}],
        }
    )
    write(plan, folder / "plan.yaml")
    return folder / "plan.yaml"


def step_cpu_s(
    folder: Path,
    forks: Zygote,
    plan: Path,
    *,
    survives: bool,
    steps: int = TO_STEP - FROM_STEP,
    begins_with: str = "",
) -> float:
    """Return processor seconds of a step, of all processes of a run."""
    (folder / "logs").mkdir()
    room = Room(folder)
    room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    options = ["launch", str(plan), "--data", str(room.text), "--steps", "1000"]
    options += ["--checkpoint", str(folder / "saved"), "--checkpoint-every", "100000"]
    options += ["--output", str(folder / "out"), *(["--survive"] if survives else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_SECRET": "of this alone"}
    log = folder / "logs" / "launcher.log"
    launcher = ForkedLauncher(forks, options, environment, log=log, begins_with=begins_with)
    try:
        _wait_for(room, FROM_STEP, launcher, log)
        end_s = time.monotonic() + PATIENCE_S
        while any(name == "book.log" for name, _ in _used(folder)) and time.monotonic() < end_s:
            time.sleep(0.1)
        first, before = _steps(room), sum(used for _, used in _used(folder))
        _wait_for(room, first + steps, launcher, log)
        last, after = _steps(room), sum(used for _, used in _used(folder))
        return (after - before) / (last - first)
    finally:
        launcher.kill()
        launcher.wait()
        room.wait_until_empty()


def _steps(room: Room) -> int:
    metrics = metrics_file(room.folder / "out")
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _wait_for(room: Room, step: int, launcher: ForkedLauncher, log: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while _steps(room) < step:
        if launcher.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.05)


def _used(folder: Path) -> list[tuple[str, float]]:
    """Return the log of each process of a run, and the processor seconds that it has used."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            log = (process / "fd" / "1").readlink()
            if log.is_relative_to(folder):
                threads = (one.read_text() for one in process.glob("task/*/schedstat"))
                found.append((log.name, sum(int(one.split()[0]) for one in threads) / 1e9))
        except OSError:
            continue
    return found


def count_calls(folder: Path) -> None:
    """Count, in this process and its forks, what calls take that only `--survive` makes."""
    took: Counter[str] = Counter()

    def counted(owner: Any, name: str, kind: str, sign: int = 1) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(plain)
        def counting(*args: Any, **options: Any) -> Any:
            begin_ns = time.thread_time_ns()
            try:
                return plain(*args, **options)
            finally:
                took[kind] += sign * (time.thread_time_ns() - begin_ns)

        setattr(owner, name, counting)

    counted(Loop, "_copy", "copies")
    for owner, name in ((Beacon, "tell"), (Beacon, "stepped"), (Loop, "_own_s")):
        counted(owner, name, "telling")
    for name in ("took", "doubts"):
        counted(Replays, name, "doubts")
    counted(ProgressLine, "refresh", "looks of the launcher", -1)
    counted(Looks, "__call__", "looks of the launcher")
    counted(partner, "_newest", "looks of the launcher")
    checks, looks = Loop._check, Looks.__call__

    def tells(count: int) -> None:
        told = {"count": count, "process_s": time.process_time(), "took_ns": took}
        with (folder / f"calls-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def check(loop: Loop, step: int, *args: Any) -> None:
        if step >= FROM_STEP and (step - FROM_STEP) % COUNTED_STEPS == 0:
            tells(step)
        checks(loop, step, *args)

    last_s = time.monotonic()

    def look(self: Looks) -> None:
        nonlocal last_s
        looks(self)
        if time.monotonic() > last_s + 1.0:
            last_s = time.monotonic()
            tells(self.shown.step)

    Loop._check, Looks.__call__ = check, look  # type: ignore[method-assign]


def calls_of(folder: Path) -> tuple[Counter[str], float]:
    """Return processor seconds of added calls, and of all processes that made them."""
    took: Counter[str] = Counter()
    whole_s = 0.0
    for file in folder.glob("calls-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        first = next(line for line in lines if line["count"] >= FROM_STEP)
        last = [line for line in lines if line["count"] <= FROM_STEP + COUNTED_STEPS][-1]
        whole_s += last["process_s"] - first["process_s"]
        for kind, spent_ns in last["took_ns"].items():
            took[kind] += (spent_ns - first["took_ns"].get(kind, 0)) / 1e9
    return took, whole_s


def main() -> int:
    """Print a line for each pair, the middle of all, and what calls take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as name, nursery(Path(name)) as forks:
        plan = planned(Path(name))
        for pair in range(args.pairs):
            took = {}
            for survives in random.Random(pair).sample((False, True), 2):
                folder = Path(name) / f"{pair}-{survives}"
                folder.mkdir()
                took[survives] = step_cpu_s(folder, forks, plan, survives=survives)
            ratios.append(took[True] / took[False] - 1)
            load = os.getloadavg()[0]
            print(
                f"{1e3 * took[False]:.1f} ms a step, with --survive {1e3 * took[True]:.1f} ms: "
                f"{100 * ratios[-1]:+.2f} %, load {load:.1f}",
                flush=True,
            )
        if ratios:
            middle, spread = statistics.median(ratios), statistics.pstdev(ratios)
            print(
                f"median {100 * middle:+.2f} % of {len(ratios)} pairs, "
                f"standard error {100 * spread / len(ratios) ** 0.5:.2f} %",
                flush=True,
            )
        folder = Path(name) / "calls"
        folder.mkdir()
        counts = "from pathlib import Path; from benchmarks.survive_cost import count_calls\n"
        counts += f"count_calls(Path({str(folder)!r}))"
        # Ranks write behind the step, and the launcher once a second.
        steps = COUNTED_STEPS + 10
        step_cpu_s(folder, forks, plan, survives=True, steps=steps, begins_with=counts)
        took, whole_s = calls_of(folder)
    for kind, seconds in took.items():
        print(f"{kind}: {100 * seconds / whole_s:.3f} % of {whole_s:.0f} processor seconds")
    print(f"calls in all: {100 * took.total() / whole_s:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
