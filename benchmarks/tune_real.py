"""docs/results/tuning.md's real runs: what `tune` chooses on this machine, against all candidates.

    python -m benchmarks.tune_real prepare FOLDER --ranks 2 [--rate 200mbit]
    python -m benchmarks.tune_real tune FOLDER --minutes 10       # runs one after the other
    python -m benchmarks.tune_real measure FOLDER --minutes 10    # all candidates, in rounds
    python -m benchmarks.tune_real score FOLDER
    python -m benchmarks.tune_real simulate FOLDER --spread 0.32 --between 0.15

`prepare` describes the machine once and lists the plans that `tune` may try.  Each of the RUNS runs
of `tune` has a folder of its own and knows nothing of the others.  `measure` runs every plan that
may be tried by ranks that live as long as it does, in rounds, so that a slow minute meets all of
them; the least step of each counts.  `simulate` draws trials about those steps, as an unsteady
machine gives them: each step is longer by a share of --spread, and all steps of a trial by one of
--between (half-normal).  `tune` and `measure` stop after --minutes and go on when called again.
With --rate ranks are on two hosts (benchmarks.rig), whose cables are shaped to it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rig
from benchmarks.link_truth import steps_s
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
from meshwright.planner.documents.plan import Plan
from meshwright.planner.tuning.measurement_noise import noise_of
from meshwright.planner.tuning.next_trial import NEAR, Outcome, Tuner
from meshwright.tune.trial import enough
from meshwright.tune.tune import TuningResult, tune

MODEL, SEQ_LEN, GLOBAL_BATCH = "local-25m", 32, 8
TRIALS = 8
BUDGET = f"{TRIALS} trials"
SIMULATED, SIMULATED_START_S = 40, 10.0
"""Runs of `simulate`, and the seconds before the first step of their trials."""
HOSTS = 2
RUNS = 5
ROUND_STEPS = 3
"""Of each plan in a round, the first of which warms up."""
CABLE_LATENCY_S = 1e-4
ROOT = Path(__file__).resolve().parent.parent
PORT = "29518"


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument(
        "what", choices=["prepare", "tune", "measure", "score", "simulate", "node", "rank"]
    )
    asked.add_argument("folder", type=Path)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--rate", help="of the cables between two hosts: 200mbit; default: one host")
    asked.add_argument("--minutes", type=float, default=10.0)
    asked.add_argument("--spread", type=float, default=0.32)
    asked.add_argument("--between", type=float, default=0.15)
    args = asked.parse_args()
    folder = args.folder.resolve()
    until = time.time() + 60 * args.minutes
    match args.what:
        case "prepare":
            prepare(folder, args.ranks, args.rate)
        case "tune":
            tuned(folder, until)
        case "measure":
            measure(folder, until)
        case "score":
            print(json.dumps(scored(folder), indent=1))
        case "simulate":
            print(json.dumps(simulated(folder, args.spread, args.between), indent=1))
        case "node":
            sys.exit(node(folder))
        case _:
            rank(folder)


def prepare(folder: Path, ranks: int, rate: str | None) -> None:
    """Write the machine and the plans that may be tried."""
    folder.mkdir(parents=True, exist_ok=True)
    document.write(machine(ranks, rate), folder / "cluster.yaml")
    document.write_text(json.dumps({"ranks": ranks, "rate": rate}), folder / "setting.json")
    found = untried(folder)
    for at, one in enumerate(found.candidates):
        document.write(one.plan, folder / f"plan-{at:02}.yaml")
    print(f"{len(found.candidates)} plans may be tried")


def untried(folder: Path) -> TuningResult:
    """Return what `tune` knows before any trial."""
    return tune(
        MODEL,
        str(folder / "cluster.yaml"),
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        run="meshwright launch {plan}",
        trials=str(folder / "none"),
        dry_run=True,
    )


def machine(ranks: int, rate: str | None) -> ClusterSpec:
    """Return this machine, its ranks on two hosts where a cable has a rate."""
    local = resolve_cluster(f"local:{ranks}")
    if rate is None:
        return local
    (group,), (memory,) = local.groups, local.tiers
    each = ranks // HOSTS
    cable = LinkTier(
        name="cable",
        devices=ranks,
        latency_s=CABLE_LATENCY_S,
        bytes_per_s=rig.bits_per_s(rate) / 8 / each,
        source=f"shaped to {rate}",
    )
    inside = (memory.model_copy(update={"devices": each}),) if each > 1 else ()
    return local.model_copy(
        update={
            "name": f"hosts:{HOSTS}",
            "groups": (group.model_copy(update={"nodes": HOSTS, "devices_per_node": each}),),
            "tiers": (*inside, cable),
        }
    )


def setting(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "setting.json").read_text())
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def tuned(folder: Path, until: float) -> None:
    """Run `tune` RUNS times; a run that the time interrupts goes on when this is called again."""
    rate = setting(folder)["rate"]
    for number in range(1, RUNS + 1):
        run, answer = folder / f"run-{number}", folder / f"run-{number}" / "answer.json"
        if answer.exists():
            continue
        run.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "meshwright", "tune", MODEL, "--json"]
        words += ["--cluster", str(folder / "cluster.yaml"), "--budget", BUDGET]
        words += ["--seq-len", str(SEQ_LEN), "--global-batch", str(GLOBAL_BATCH)]
        words += ["-o", str(run / "plan.yaml")]
        if rate is not None:
            words += ["--run", in_rig(rate)]
        began = time.monotonic()
        with (run / "answer.part").open("wb") as out:
            child = subprocess.Popen(words, env=environment(), stdout=out)
            try:
                code = child.wait(max(1.0, until - time.time()))
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()
                print(f"run {number}: interrupted; call this again")
                return
        if code:
            raise SystemExit(f"run {number} ended with {code}")
        (run / "answer.part").rename(answer)
        found = json.loads(answer.read_text())
        print(
            f"run {number}: {len(found['trials'])} trials, {found['layout']}, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )


def in_rig(rate: str) -> str:
    """Return the template of a trial whose ranks are on two hosts."""
    rigged = [sys.executable, "-m", "benchmarks.rig", "--hosts", str(HOSTS), "--rate", rate, "--"]
    launch = [sys.executable, "-m", "meshwright", "launch", "{plan}", "--output", "{output}"]
    return f"{shlex.join(rigged)} {shlex.join([*launch, '--steps', '42'])}".replace(
        "'{", "{"
    ).replace("}'", "}")


def measure(folder: Path, until: float) -> None:
    """Run all plans in rounds until the time is up."""
    document.write_text(str(until), folder / "until")
    words = [sys.executable, "-m", "benchmarks.tune_real", "node", str(folder)]
    rate = setting(folder)["rate"]
    if rate is None:
        subprocess.run(words, env=environment(), check=True)
    else:
        with rig.rig(HOSTS, rate) as hosts:
            limit_s = until - time.time() + 120
            hosts.run(words, environment=environment(), timeout_s=limit_s)
    print(f"{len(rounds(folder))} rounds")


def node(folder: Path) -> int:
    """Start the ranks of one host and wait for them."""
    asked = setting(folder)
    hosted = asked["rate"] is not None
    each = asked["ranks"] // HOSTS if hosted else asked["ranks"]
    first = each * int(os.environ.get("PET_NODE_RANK", "0"))
    links = {"GLOO_SOCKET_IFNAME": "eth0"} if hosted else {}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tune_real", "rank", str(folder)],
            env={
                **os.environ,
                **links,
                "RANK": str(first + local),
                "WORLD_SIZE": str(asked["ranks"]),
                "MASTER_ADDR": rig.address(0) if hosted else "127.0.0.1",
                "MASTER_PORT": PORT,
            },
        )
        for local in range(each)
    ]
    return max(abs(worker.wait()) for worker in workers)


def rank(folder: Path) -> None:
    """Run all plans in rounds as one rank; rank 0 writes down what the slowest took."""
    import torch  # noqa: PLC0415 - ranks alone need it
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    model = resolve_model(MODEL)
    plans = [document.read(Plan, path) for path in paths(folder)]
    until, took = float((folder / "until").read_text()), 0.0
    while True:
        now = torch.tensor([time.time() + took], dtype=torch.float64)
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        if float(now) > until:
            break
        began = time.time()
        seen = [min(steps_s(plan, model, most=ROUND_STEPS)[1:]) for plan in plans]
        took = time.time() - began
        if dist.get_rank() == 0:
            with (folder / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(seen) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("plan-*.yaml"))


def rounds(folder: Path) -> list[list[float]]:
    """[round, plan] Return the least step of each plan in each round."""
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scored(folder: Path) -> dict[str, Any]:
    """Return how much slower than the fastest candidate each run's answer is."""
    seen, digests = rounds(folder), [document.read(Plan, path).digest for path in paths(folder)]
    least = [min(each) for each in zip(*seen, strict=True)]
    best = min(least)
    runs = []
    for path in sorted(folder.glob("run-*/answer.json")):
        answer = json.loads(path.read_text())
        chosen = digests.index(Plan.of(answer["plan"]).digest)
        first = digests.index(answer["trials"][0]["plan_digest"])
        runs.append(
            {
                "layout": answer["layout"],
                "trials": len(answer["trials"]),
                "regret": least[chosen] / best - 1,
                "regret_of_first": least[first] / best - 1,
                "sure": answer["sure"],
                "device_minutes": answer["device_s"] / 60,
                "seconds": sum(one["seconds"] for one in answer["trials"]),
            }
        )
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        **setting(folder),
        "plans": len(least),
        "rounds": len(seen),
        "best": document.read(Plan, paths(folder)[least.index(best)]).layout.text(),
        "best_s": best,
        "median_spread": statistics.median(spread(each) for each in zip(*seen, strict=True)),
        "predicted_first": least[0] / best - 1,
        "regret": statistics.mean(run["regret"] for run in runs) if runs else None,
        "worst_regret": max((run["regret"] for run in runs), default=None),
        "runs": runs,
        "least_s": dict(enumerate(least)),
    }


def simulated(folder: Path, spread: float, between: float) -> dict[str, float]:
    """Return what SIMULATED runs end with where trials are drawn about the measured steps."""
    options = untried(folder).tuner.options
    true_s = [min(each) for each in zip(*rounds(folder), strict=True)]
    regrets, trials = [], []
    for seed in range(SIMULATED):
        rng, tuner = random.Random(seed), Tuner(options)
        while len(tuner.outcomes) < TRIALS and not tuner.is_done:
            chosen = tuner.next_trial()
            if chosen is None:
                break
            base_s = true_s[chosen] * math.exp(abs(rng.gauss(0, between)))
            steps_s: list[float] = []
            while not enough(
                steps_s, tuner.best, steadiness=tuner.steadiness, start_s=SIMULATED_START_S
            ):
                steps_s.append(base_s * math.exp(abs(rng.gauss(0, spread))))
            tuner = tuner.with_outcome(
                Outcome(
                    option=chosen,
                    step_s=statistics.median(steps_s),
                    noise=noise_of(steps_s),
                    steps=len(steps_s),
                )
            )
        regrets.append(true_s[tuner.answer] / min(true_s) - 1)
        trials.append(len(tuner.outcomes))
    return {
        "runs": SIMULATED,
        "regret": statistics.fmean(regrets),
        "worst_regret": max(regrets),
        "above_2_percent": sum(one > NEAR for one in regrets) / SIMULATED,
        "trials": statistics.fmean(trials),
    }


def spread(steps: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 of one value."""
    if len(steps) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    return (high - low) / middle


if __name__ == "__main__":
    main()
