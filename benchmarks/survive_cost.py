"""What `--survive` costs while nothing fails: processor seconds a step, with it over without.

    python -m benchmarks.survive_cost --pairs 6         # 12 runs of half a minute

Two ranks train a model of 4 million parameters; runs with and without `--survive` alternate, so
that what else the machine does meets both.  Counted are ranks, launcher and zygote between two
steps, behind the start and the book of plans, which one process of the lowest priority solves once.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from planner.documents.document import write
from planner.documents.model import Architecture, Layer, ModelGraph
from planner.documents.plan import Plan, PlannedModel
from runtime.run import metrics_file
from runtime.zygote import Zygote
from tests.runtime.forked import ForkedLauncher, nursery
from tests.runtime.rooms import Room

HIDDEN, LAYERS, VOCABULARY, SEQ_LEN, BATCH = 256, 5, 258, 256, 8
FROM_STEP, TO_STEP = 25, 65
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


def step_cpu_s(folder: Path, forks: Zygote, plan: Path, *, survives: bool) -> float:
    """Return processor seconds of a step, of all processes of a run."""
    (folder / "logs").mkdir()
    room = Room(folder)
    room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    options = ["launch", str(plan), "--data", str(room.text), "--steps", "1000"]
    options += ["--checkpoint", str(folder / "saved"), "--checkpoint-every", "100000"]
    options += ["--output", str(folder / "out"), *(["--survive"] if survives else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_SECRET": "of this alone"}
    log = folder / "logs" / "launcher.log"
    launcher = ForkedLauncher(forks, options, environment, log=log)
    try:
        _wait_for(room, FROM_STEP, launcher, log)
        end_s = time.monotonic() + PATIENCE_S
        while any(name == "book.log" for name, _ in _used(folder)) and time.monotonic() < end_s:
            time.sleep(0.1)
        first, before = _steps(room), sum(used for _, used in _used(folder))
        _wait_for(room, first + TO_STEP - FROM_STEP, launcher, log)
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


def main() -> int:
    """Print a line for each pair, and the middle of all."""
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
    middle, spread = statistics.median(ratios), statistics.pstdev(ratios)
    print(
        f"median {100 * middle:+.2f} % of {len(ratios)} pairs, "
        f"standard error {100 * spread / len(ratios) ** 0.5:.2f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
