"""What `--elastic` costs while nothing fails: processor seconds a step, each part within one run.

    python -m benchmarks.elastic_cost                   # three runs of two ranks

Two ranks train a model of 4 million parameters.  One run counts what the calls take that only
`--elastic` makes, in ranks and in the launcher, over what their processes take.  In two more blocks
of steps, each of which is copied, alternate with blocks without copies: what a copy takes with what
it does to the work behind it, over its calls alone.  In each of these one of both ranks, with equal
work, is forked as `--elastic` has it, and the other started afresh.  Page faults are counted with
the seconds.  Whatever else the machine does meets both sides of each comparison, which pairs of
whole runs do not have: they differ by more than what is sought.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import Architecture, Layer, ModelGraph
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.runtime.launch.fork_client import ForkedRank, Zygote
from meshwright.runtime.launch.monitor import Looks
from meshwright.runtime.launch.training_loop import Loop
from meshwright.runtime.resilience import replication as partner
from meshwright.runtime.resilience.heartbeat import Beacon
from meshwright.runtime.resilience.in_memory_checkpoint import Mirror
from meshwright.runtime.resilience.step_replay import Replays
from meshwright.runtime.run.metrics import Metrics
from meshwright.runtime.run.progress_line import ProgressLine
from tests.runtime.forked import ForkedLauncher, nursery
from tests.runtime.rooms import Room

HIDDEN, LAYERS, VOCABULARY, SEQ_LEN, BATCH = 256, 5, 258, 256, 8
FROM_STEP, BLOCK_STEPS = 25, 10
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


def run(folder: Path, forks: Zygote, plan: Path, *, steps: int, begins_with: str) -> None:
    """Train under `--elastic`; launcher and forked ranks run some code before all else."""
    (folder / "logs").mkdir(parents=True)
    room = Room(folder)
    room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    options = ["launch", str(plan), "--data", str(room.text), "--steps", str(steps), "--elastic"]
    options += ["--checkpoint", str(folder / "saved"), "--checkpoint-every", "100000"]
    options += ["--output", str(folder / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_SECRET": "of this alone"}
    log = folder / "logs" / "launcher.log"
    launcher = ForkedLauncher(forks, options, environment, log=log, begins_with=begins_with)
    try:
        if launcher.wait(PATIENCE_S) != 0:
            raise RuntimeError(log.read_text()[-2000:])
    finally:
        launcher.kill()
        launcher.wait()
        room.wait_until_empty()


def count_calls(folder: Path) -> None:
    """Count, in this process and its forks, what calls take that only `--elastic` makes."""
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
    for owner, name in ((Beacon, "begin_part"), (Beacon, "count_step"), (Loop, "_own_s")):
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


def note_steps(folder: Path, kind: str) -> None:
    """Note, behind each step of a rank that starts as this process, what was used until then.

    Steps of every second block are copied, each of them.
    """
    copy, took_s, lines = Loop._copy, 0.0, None

    def noting(
        loop: Loop,
        mirror: Mirror,
        step: int,
        step_s: Sequence[float],
        loss: float,
        metrics: Metrics | None,
        *,
        is_last: bool = False,
    ) -> None:
        nonlocal took_s, lines
        if lines is None:
            lines = (folder / f"rank-{loop.rank}-{kind}.jsonl").open("a", buffering=1)
        copies = step // BLOCK_STEPS % 2 == 1
        used = resource.getrusage(resource.RUSAGE_SELF)
        told = (step, copies, time.process_time(), used.ru_minflt, took_s)
        lines.write(json.dumps(told) + "\n")
        mirror.every = 1
        begin_s = time.thread_time()
        if copies:
            copy(loop, mirror, step, step_s, loss, metrics, is_last=is_last)
        took_s += time.thread_time() - begin_s

    Loop._copy = noting  # type: ignore[method-assign]


def start_afresh(folder: Path, rank: int) -> None:
    """Let launchers that run in this process start one of their ranks as a new program."""
    start = Zygote.start
    code = (
        f"import sys; from pathlib import Path; from meshwright.runtime.launch import rank_main\n"
        f"from meshwright.runtime.run.rank_exit import leave\n"
        f"from benchmarks.elastic_cost import note_steps\n"
        f"note_steps(Path({str(folder)!r}), 'afresh')\n"
        f"leave(rank_main.main(sys.argv[1:]))"
    )

    class Afresh(ForkedRank):
        def __init__(self, zygote: Zygote, program: subprocess.Popen[bytes]) -> None:
            super().__init__(zygote)
            self._program, self.process = program, program.pid

        def poll(self) -> int | None:
            return self._program.poll()

        def wait(self) -> int:
            return self._program.wait()

    def starting(
        zygote: Zygote,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        inherits: Sequence[int] = (),
    ) -> ForkedRank:
        if environment["RANK"] != str(rank):
            return start(zygote, arguments, environment, log=log, inherits=inherits)
        zygote.warm(environment, log=log)
        with log.open("ab") as out:
            program = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=inherits,
                start_new_session=True,
            )
        return Afresh(zygote, program)

    Zygote.start = starting  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Used:
    """What steps of a rank took, from the end of one to the end of the next: means."""

    steps: int
    processor_s: float
    error_s: float
    """Its standard error."""
    faults: float
    calls_s: float
    """Of it the calls that copy."""


def used_of(notes: Path) -> dict[bool, Used]:
    """Return what steps of a rank took that began with a copy, and the others."""
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    rows = [row for row in rows if row[0] >= FROM_STEP]
    found = {}
    for copies in (False, True):
        pairs = [(a, b) for a, b in itertools.pairwise(rows) if a[1] is copies]
        spent = [b[2] - a[2] for a, b in pairs]
        found[copies] = Used(
            steps=len(pairs),
            processor_s=statistics.fmean(spent),
            error_s=statistics.stdev(spent) / len(spent) ** 0.5,
            faults=statistics.fmean(b[3] - a[3] for a, b in pairs),
            calls_s=statistics.fmean(b[4] - a[4] for a, b in pairs),
        )
    return found


def blocks(folder: Path, forks: Zygote, plan: Path, *, steps: int) -> tuple[float, float]:
    """Print what steps took with and without copies, and ranks that are forked and started afresh.

    Returns the seconds of a copy over those of its calls alone, and the share of a step that a
    forked rank takes more than one that was started afresh.
    """
    whole_s = calls_s = 0.0
    ratios = []
    for fresh in (1, 0):
        own = folder / f"afresh-{fresh}"
        (notes := own / "notes").mkdir(parents=True)
        begins_with = (
            "from pathlib import Path; from benchmarks import elastic_cost\n"
            f"elastic_cost.note_steps(Path({str(notes)!r}), 'forked')\n"
            f"elastic_cost.start_afresh(Path({str(notes)!r}), {fresh})"
        )
        run(own / "run", forks, plan, steps=FROM_STEP + steps, begins_with=begins_with)
        plain_s: dict[str, float] = {}
        for file in sorted(notes.iterdir()):
            used = used_of(file)
            plain_s[file.stem.rpartition("-")[2]] = used[False].processor_s
            whole_s += used[True].processor_s - used[False].processor_s
            calls_s += used[True].calls_s
            for copies, one in used.items():
                print(
                    f"{file.stem}, {one.steps} steps {'with copies' if copies else 'without'}: "
                    f"{1e3 * one.processor_s:.1f} ms (standard error {1e3 * one.error_s:.1f}), "
                    f"{1e3 * one.calls_s:.1f} in calls that copy, {one.faults:.0f} page faults",
                    flush=True,
                )
        ratios.append(plain_s["forked"] / plain_s["afresh"] - 1)
    return whole_s / calls_s, statistics.fmean(ratios)


def main() -> int:
    """Print what steps and calls take, and what that is in all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="of each run with blocks")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name, nursery(Path(name)) as forks:
        plan = planned(Path(name))
        behind, forked = blocks(Path(name), forks, plan, steps=args.steps)
        print(f"a copy takes {behind:.2f} times its calls; a forked rank {100 * forked:+.2f} %")
        (counted := Path(name) / "calls").mkdir()
        counts = "from pathlib import Path; from benchmarks.elastic_cost import count_calls\n"
        counts += f"count_calls(Path({str(counted)!r}))"
        # Ranks write behind the step, and the launcher once a second.
        steps = FROM_STEP + COUNTED_STEPS + 10
        run(Path(name) / "counted", forks, plan, steps=steps, begins_with=counts)
        took, whole_s = calls_of(counted)
    for kind, seconds in took.items():
        print(f"{kind}: {100 * seconds / whole_s:.3f} % of {whole_s:.0f} processor seconds")
    in_all = took.total() + (behind - 1) * took["copies"]
    print(f"calls in all: {100 * took.total() / whole_s:.2f} %")
    print(f"with what copies do behind them: {100 * in_all / whole_s:.2f} %")
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
