"""Every layout of one model on this machine, predicted and measured.

    python benchmarks/local_truth.py --profile profile.yaml --minutes 20 -o benchmarks/results/

All layouts that the search considers feasible on `local` are planned, each with no, selective and
full recompute, and run by ranks that live as long as the whole measurement, in rounds: every round
runs every layout once, so that a slow minute of the machine meets all of them.  Reported are
medians over rounds, the planner's choice against the best measured layout, and the errors of step
time and of peak memory (bytes of live tensors).  Rounds are repeated until the time is up.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.api.commands import profile as measure_profile
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import refusal
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout, Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import Profile, Recompute
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.search import search
from meshwright.planner.search.space import Pins, layouts
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.launch.training_loop import token_engine

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
TIMED_STEPS = 1


def main() -> None:
    args = arguments()
    if args.worker is not None:
        work(Path(args.worker))
        return
    model, cluster = resolve_model(args.model), resolve_cluster(f"local:{args.ranks}")
    job = Job(seq_len=args.seq_len, global_batch=args.global_batch, precision="fp32")
    if args.profile is None:
        args.profile = str(Path(args.output, "profile.yaml"))
        measure_profile(
            args.model,
            f"local:{args.ranks}",
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            output=args.profile,
        )
    profile = document.read(Profile, args.profile)
    candidates = every_layout(model, cluster, job, profile)
    chosen = search(Request(model, cluster, job, profile=profile))
    if title(chosen.plan) not in {title(plan) for plan, _ in candidates}:
        candidates.append((chosen.plan, chosen.prediction))
    print(f"{len(candidates)} layouts; the planner chooses {title(chosen.plan)}", file=sys.stderr)
    rounds = measured(candidates, model, ranks=args.ranks, minutes=args.minutes)
    rows = [
        row(plan, prediction, [r[index] for r in rounds])
        for index, (plan, prediction) in enumerate(candidates)
    ]
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "model": args.model,
        "job": {"seq_len": job.seq_len, "global_batch": job.global_batch, "ranks": args.ranks},
        "machine": profile.birth.device,
        "rounds": len(rounds),
        **summary(rows, title(chosen.plan)),
        "layouts": sorted(rows, key=lambda r: r["measured_s"]),
    }
    folder = Path(args.output)
    document.write_text(json.dumps(result, indent=1) + "\n", folder / "local_truth.json")
    document.write_text(markdown(result), folder / "local_truth.md")
    print(markdown(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="local-25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--profile", help="default: measure one first")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("-o", "--output", default="benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def every_layout(
    model: ModelGraph, cluster: ClusterSpec, job: Job, profile: Profile
) -> list[tuple[Plan, Prediction]]:
    """Return a plan, cut by the solver, for every layout and recompute choice that fits."""
    result = []
    for layout, recompute in itertools.product(layouts(model, cluster, job), RECOMPUTES):
        if refusal(model, cluster, job, layout) is not None:
            continue
        try:
            answer = pinned(model, cluster, job, profile, layout, recompute)
        except NoPlanFits:
            continue
        result.append((answer.plan, answer.prediction))
    return result


def pinned(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    profile: Profile,
    layout: Layout,
    recompute: Recompute,
) -> Answer:
    pins = Pins(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        zero=layout.zero,
        micro_batch=layout.micro_batch,
        schedule=layout.schedule if layout.pipeline > 1 else None,
        recompute=recompute,
    )
    return search(Request(model, cluster, job, pins=pins, profile=profile))


def title(plan: Plan) -> str:
    """Return layout, layers per stage and recompute: what tells two plans apart."""
    sizes = "+".join(str(len(stage.units)) for stage in plan.stages)
    kinds = sorted({item.recompute for stage in plan.stages for item in stage.units})
    return f"{plan.layout.text()} layers={sizes} recompute={'/'.join(kinds)}"


def row(plan: Plan, prediction: Prediction, runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [second for run in runs for second in run["step_s"]]
    peaks = [max(run["peak_bytes"][s] for run in runs) for s in range(len(plan.stages))]
    return {
        "layout": title(plan),
        "predicted_s": prediction.step_time_s,
        "measured_s": statistics.median(seconds),
        "spread": spread(seconds),
        "predicted_bytes": [stage.peak_memory_bytes for stage in prediction.stages],
        "measured_bytes": peaks,
    }


def spread(values: list[float]) -> float:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def summary(rows: list[dict[str, Any]], chosen: str) -> dict[str, Any]:
    times = [r["predicted_s"] / r["measured_s"] - 1 for r in rows]
    memory = [
        p / m - 1
        for r in rows
        for p, m in zip(r["predicted_bytes"], r["measured_bytes"], strict=True)
    ]
    best = min(rows, key=lambda r: r["measured_s"])
    ours = next((r for r in rows if r["layout"] == chosen), None)
    return {
        "chosen": chosen,
        "chosen_s": ours["measured_s"] if ours else None,
        "best": best["layout"],
        "best_s": best["measured_s"],
        "regret": ours["measured_s"] / best["measured_s"] - 1 if ours else None,
        "step_time_median_abs_error": statistics.median(map(abs, times)),
        "step_time_mean_error": statistics.fmean(times),
        "memory_median_abs_error": statistics.median(map(abs, memory)),
        "memory_worst_abs_error": max(map(abs, memory)),
        "median_spread": statistics.median(r["spread"] for r in rows),
    }


def markdown(result: dict[str, Any]) -> str:
    def percent(share: float | None) -> str:
        return "not among the layouts" if share is None else f"{100 * share:.1f} %"

    lines = [
        f"# {result['model']} on {result['job']['ranks']} ranks of {result['machine']}",
        "",
        f"{result['date']}, {len(result['layouts'])} layouts, {result['rounds']} interleaved "
        f"rounds of {TIMED_STEPS} steps, sequence {result['job']['seq_len']}, global batch "
        f"{result['job']['global_batch']}; spread is the interquartile range over the median.",
        "",
        f"- chosen: `{result['chosen']}`, slower than the best measured by "
        f"{percent(result['regret'])} (best: `{result['best']}`, {result['best_s']:.3f} s)",
        f"- step time: median |error| {percent(result['step_time_median_abs_error'])}, "
        f"mean error {percent(result['step_time_mean_error'])}; "
        f"median spread {percent(result['median_spread'])}",
        f"- peak memory: median |error| {percent(result['memory_median_abs_error'])}, "
        f"worst {percent(result['memory_worst_abs_error'])}",
        "",
        "| layout | predicted s | measured s | error | spread | predicted MiB | measured MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in result["layouts"]:
        predicted, seen = (
            ", ".join(f"{size / 2**20:.0f}" for size in r[key])
            for key in ("predicted_bytes", "measured_bytes")
        )
        error = 100 * (r["predicted_s"] / r["measured_s"] - 1)
        lines.append(
            f"| {r['layout']} | {r['predicted_s']:.3f} | {r['measured_s']:.3f} | {error:+.1f} % "
            f"| {100 * r['spread']:.0f} % | {predicted} | {seen} |"
        )
    return "\n".join(lines) + "\n"


def measured(
    candidates: list[tuple[Plan, Prediction]], model: ModelGraph, *, ranks: int, minutes: float
) -> list[list[dict[str, Any]]]:
    """Return rounds of runs; each run has the slowest rank's `step_s` and stages' `peak_bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        document.write(model, Path(folder, "model.yaml"))
        for index, (plan, _) in enumerate(candidates):
            document.write(plan, Path(folder, f"plan-{index:03}.yaml"))
        Path(folder, "until").write_text(str(time.time() + 60 * minutes))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29517",
            "WORLD_SIZE": str(ranks),
        }
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", folder],
                env={**environment, "RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        seen = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return [
        [merged(candidates[index][0], runs) for index, runs in enumerate(zip(*rounds, strict=True))]
        for rounds in zip(*seen, strict=True)
    ]


def merged(plan: Plan, runs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {
        "step_s": [max(times) for times in zip(*(run["step_s"] for run in runs), strict=True)],
        "peak_bytes": [
            max(run["peak_bytes"] for run in runs if run["stage"] == stage)
            for stage in range(len(plan.stages))
        ],
    }


def work(folder: Path) -> None:
    """Run all plans in rounds as one rank, until the time is up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = document.read(ModelGraph, folder / "model.yaml")
    plans = [document.read(Plan, path) for path in sorted(folder.glob("plan-*.yaml"))]
    until = float((folder / "until").read_text())
    rounds = []
    while True:
        started = time.time()
        rounds.append([run(plan, model, watch=not rounds) for plan in plans])
        now = torch.tensor([time.time()])
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"round {len(rounds)}: {time.time() - started:.0f} s", file=sys.stderr)
        if len(rounds) >= 2 and float(now) + (time.time() - started) > until:
            break
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def run(plan: Plan, model: ModelGraph, *, watch: bool) -> dict[str, Any]:
    """Return one rank's seconds of a few steps, warm-up left out, and its peak of live tensors."""
    engine = token_engine(plan, model, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(engine.slice_rank)
    samples = plan.micro_batch * plan.micro_batches
    tokens = torch.randint(0, 256, (samples, plan.seq_len + 1), generator=generator)
    engine.step(tokens)
    peak_bytes = 0
    if watch:
        with LiveMemory(existing=[*engine.state().values(), tokens]) as live:
            engine.step(tokens)
        peak_bytes = live.peak_bytes
    seconds = []
    for _ in range(TIMED_STEPS):
        dist.barrier()
        began = time.perf_counter()
        engine.step(tokens)
        seconds.append(time.perf_counter() - began)
    stage = engine.stage
    del engine
    gc.collect()
    return {"step_s": seconds, "peak_bytes": peak_bytes, "stage": stage}


if __name__ == "__main__":
    main()
