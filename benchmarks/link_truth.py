"""Do plans follow the link?  Ranks on 2 hosts whose cables are slow, then fast; every layout run.

    python benchmarks/link_truth.py all                        a slow and a fast cable: all of it
    python benchmarks/link_truth.py profile --rate 200mbit     measure model and links in the rig
    python benchmarks/link_truth.py measure --rate 200mbit     run the layouts; call it until done
    python benchmarks/link_truth.py report                     all rates -> results/link_truth.md

The hosts are network namespaces on this machine (benchmarks.rig), so ranks share its cores; what
differs is the cable.  LINK_TRUTH_RANKS is the number of ranks on both hosts together, 2 unless it
is set.  Four ranks get 0.45 of a core each (benchmarks.quota), when the machine is measured and
when layouts run: without that one that waits would lend its core, and bubbles would cost nothing.

`all` stops after --minutes and goes on where it stopped when it is called again.  The space is that
of the planner with one schedule (1F1B), without context parallelism and without recomputation,
since all layouts fit in memory.  A layout whose first step takes thrice as long as the best so far
is not run again: that step is its figure.  Those within a third of the best are run again in
rounds, each round all of them, and their medians count.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import quota, rig
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.costs.layout_costs import refusal
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Plan
from meshwright.planner.documents.profile import Profile
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layouts

MODEL = "local-25m"
JOB = Job(seq_len=64, global_batch=8, precision="fp32")
HOSTS, RANKS = 2, int(os.environ.get("LINK_TRUTH_RANKS", "2"))
PER_HOST = RANKS // HOSTS
RATES = ("400mbit", "4gbit")
"""Of `all`."""
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HOPELESS = 3.0
NEAR = 1.33
ROUNDS = 5 if RANKS == 2 else 3
STEPS = 3 if RANKS == 2 else 2
"""Of a layout at first; the first one warms up."""
LEAST_S = 45.0
"""What is not worth starting another rig for."""
NAME = "link_truth" if RANKS == 2 else f"link_truth_{RANKS}"
FINAL = "finals"


def main() -> None:
    args = arguments()
    if args.node is not None:
        sys.exit(ranks_of(int(os.environ["PET_NODE_RANK"]), args.node))
    if args.rank is not None:
        work(Path(args.rank))
        return
    if args.what == "all":
        everything(Path(args.folder), args.budget, until=time.monotonic() + 60 * args.minutes)
        return
    folder = Path(args.folder, args.rate or "")
    if args.what == "profile":
        folder.mkdir(parents=True, exist_ok=True)
        profile(args.rate, folder, args.budget)
    elif args.what == "measure":
        measure(args.rate, folder, args.seconds)
    else:
        report(Path(args.folder))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("all", "profile", "measure", "report"))
    parser.add_argument("--rate", help="of every cable: 200mbit, or 'none'")
    parser.add_argument("--folder", default=f"build/{NAME}")
    parser.add_argument("--budget", default="90s")
    parser.add_argument("--seconds", type=float, default=240.0, help="of one call of measure")
    parser.add_argument("--minutes", type=float, default=14.0, help="of one call of all")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def shaped(rate: str) -> str | None:
    return None if rate == "none" else rate


def everything(folder: Path, budget: str, *, until: float) -> None:
    """Measure machine and layouts at every rate, as far as the time goes; then report."""
    for rate in RATES:
        if not of_this_model(folder / rate):
            shutil.rmtree(folder / rate, ignore_errors=True)
            (folder / rate).mkdir(parents=True, exist_ok=True)
            profile(rate, folder / rate, budget)
    for rate in RATES:
        prepared(folder / rate)  # takes no time of the layouts'
        if until - time.monotonic() > LEAST_S and not finished(folder / rate):
            measure(rate, folder / rate, until - time.monotonic())
    report(folder)
    if not all(finished(folder / rate) for rate in RATES):
        print("not all layouts are measured: call it again, it goes on", file=sys.stderr)


def of_this_model(folder: Path) -> bool:
    """Tell whether a folder has a whole profile, and of the model as it is now."""
    if not (folder / "cluster.yaml").exists():
        return False
    measured = document.read(Profile, folder / "profile.yaml")
    return measured.model_digest == resolve_model(MODEL).digest


def finished(folder: Path) -> bool:
    file = folder / "seen.json"
    return file.exists() and len(json.loads(file.read_text()).get(FINAL, [])) >= ROUNDS


def in_rig(rate: str, command: list[str], timeout_s: float) -> None:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as held:
        if RANKS > HOSTS:
            shares = held.enter_context(quota.quotas(RANKS))
            environment |= shares | {"PYTHONPATH": f"{shares['PYTHONPATH']}:{ROOT}"}
        hosts = held.enter_context(rig.rig(HOSTS, shaped(rate)))
        hosts.run(command, environment=environment, timeout_s=timeout_s)


def profile(rate: str, folder: Path, budget: str) -> None:
    command = [sys.executable, "-m", "meshwright", "profile", MODEL]
    command += ["--cluster", f"local:{PER_HOST}", "--seq-len", str(JOB.seq_len)]
    command += ["--global-batch", str(JOB.global_batch), "--budget", budget]
    command += ["--fresh", "-o", str(folder / "profile.yaml")]
    command += ["--cluster-output", str(folder / "cluster.yaml")]
    in_rig(rate, command, timeout_s=900)


def measure(rate: str, folder: Path, seconds: float) -> None:
    plans = prepared(folder)
    (folder / "until").write_text(str(time.time() + seconds))
    command = [sys.executable, str(Path(__file__)), "measure", "--node", str(folder.resolve())]
    in_rig(rate, command, timeout_s=seconds + 60)
    seen = json.loads((folder / "seen.json").read_text())
    done = sum(name != FINAL for name in seen)
    print(f"{done} of {len(plans)} layouts, {len(seen.get(FINAL, []))} of {ROUNDS} final rounds")


def prepared(folder: Path) -> dict[str, Plan]:
    """Return a plan for every layout, by title; those with the least prediction first."""
    if not (folder / "plans.json").exists():
        model = resolve_model(MODEL)
        cluster = document.read(ClusterSpec, folder / "cluster.yaml")
        measured = document.read(Profile, folder / "profile.yaml")
        pins = Pins(schedule="1f1b", context=1, recompute="none")
        rows = []
        for layout in layouts(model, cluster, JOB, pins):
            if refusal(model, cluster, JOB, layout) is not None:
                continue
            own = Pins(
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                data=layout.data,
                data_shard=layout.data_shard,
                zero=layout.zero,
                micro_batch=layout.micro_batch,
                context=1,
                schedule="1f1b" if layout.pipeline > 1 else None,
                recompute="none",
                order=layout.order,
            )
            try:
                found = search(Request(model, cluster, JOB, pins=own, profile=measured))
            except NoPlanFits:
                continue
            if found.plan.layout == layout:
                rows.append((found.prediction.step_time_s, found.plan))
        chosen = search(Request(model, cluster, JOB, pins=pins, profile=measured))
        rows.append((chosen.prediction.step_time_s, chosen.plan))
        by_title = {title(plan): (seconds, plan) for seconds, plan in rows}
        text = [
            {"title": name, "predicted_s": seconds, "plan": plan.model_dump(mode="json")}
            for name, (seconds, plan) in sorted(by_title.items(), key=lambda item: item[1][0])
        ]
        out = {"chosen": title(chosen.plan), "layouts": text}
        document.write_text(json.dumps(out), folder / "plans.json")
    kept = json.loads((folder / "plans.json").read_text())
    return {row["title"]: Plan.of(row["plan"]) for row in kept["layouts"]}


def title(plan: Plan) -> str:
    sizes = "+".join(str(len(stage.units)) for stage in plan.stages)
    return f"{plan.layout.text()} layers={sizes}"


def ranks_of(node: int, folder: str) -> int:
    """Start the ranks of one host and wait for them."""
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), "measure", "--rank", folder],
            env={
                **os.environ,
                "RANK": str(node * PER_HOST + local),
                "WORLD_SIZE": str(HOSTS * PER_HOST),
                "MASTER_ADDR": rig.address(0),
                "MASTER_PORT": "29517",
                "GLOO_SOCKET_IFNAME": "eth0",
            },
        )
        for local in range(PER_HOST)
    ]
    return max(abs(worker.wait()) for worker in workers)


def work(folder: Path) -> None:
    """Run plans as one rank until the time is up; rank 0 keeps what was seen."""
    import torch  # noqa: PLC0415 - the launcher needs none
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    model = resolve_model(MODEL)
    plans = prepared(folder)
    until = float((folder / "until").read_text())
    file = folder / "seen.json"
    seen: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def late() -> bool:
        now = torch.tensor([time.time()], dtype=torch.float64)
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        return float(now) > until

    def best() -> float:
        return min((statistics.median(s) for n, s in seen.items() if n != FINAL), default=1e9)

    for name, plan in plans.items():
        if name in seen:
            continue
        if late():
            break
        seen[name] = steps_s(plan, model, most=STEPS, hopeless_s=HOPELESS * best())
        if dist.get_rank() == 0:
            document.write_text(json.dumps(seen), file)
    else:
        chosen = json.loads((folder / "plans.json").read_text())["chosen"]
        near = [n for n in plans if n == chosen or statistics.median(seen[n]) <= NEAR * best()]
        finals = seen.setdefault(FINAL, [])
        while len(finals) < ROUNDS and not late():
            finals.append({name: steps_s(plans[name], model, most=STEPS)[1:] for name in near})
            if dist.get_rank() == 0:
                document.write_text(json.dumps(seen), file)
    dist.barrier()
    dist.destroy_process_group()


def steps_s(plan: Plan, model: ModelGraph, *, most: int, hopeless_s: float = 1e9) -> list[float]:
    """Return seconds of some steps by the slowest rank; the first warms up, if it is not all."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from meshwright.runtime.launch.training_loop import token_engine  # noqa: PLC0415

    engine = token_engine(plan, model, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(engine.slice_rank)
    samples = plan.micro_batch * plan.micro_batches
    tokens = torch.randint(0, 256, (samples, plan.seq_len + 1), generator=generator)
    seconds: list[float] = []
    while len(seconds) < most:
        dist.barrier()
        began = time.perf_counter()
        engine.step(tokens)
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds.append(float(taken))
        if seconds[0] > hopeless_s:
            return seconds
    del engine
    gc.collect()
    return seconds[1:] if hopeless_s < 1e9 else seconds


def report(folder: Path) -> None:
    rates = {}
    for path in sorted(folder.glob("*/seen.json")):
        if FINAL not in json.loads(path.read_text()):
            continue
        seen = json.loads(path.read_text())
        kept = json.loads((path.parent / "plans.json").read_text())
        measured = document.read(Profile, path.parent / "profile.yaml")
        finals = seen.pop(FINAL, [])
        rows = []
        for row in kept["layouts"]:
            name = row["title"]
            if name not in seen:
                continue
            again = [s for part in finals for s in part.get(name, [])]
            every = again or seen[name]
            rows.append(
                {
                    "layout": name,
                    "predicted_s": row["predicted_s"],
                    "measured_s": statistics.median(every),
                    "steps": len(every),
                }
            )
        rows.sort(key=lambda row: row["measured_s"])
        ours = next(row for row in rows if row["layout"] == kept["chosen"])
        rates[path.parent.name] = {
            "layouts": len(kept["layouts"]),
            "measured": len(rows),
            "pairs_mbit_per_s": [8e-6 * pair.bytes_per_s for pair in measured.pairs],
            "chosen": ours["layout"],
            "chosen_s": ours["measured_s"],
            "best": rows[0]["layout"],
            "best_s": rows[0]["measured_s"],
            "regret": ours["measured_s"] / rows[0]["measured_s"] - 1,
            "rows": rows,
        }
    if not rates:
        print("no rate is finished", file=sys.stderr)
        return
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "model": MODEL,
        "parameters": resolve_model(MODEL).parameters,
        "job": {"seq_len": JOB.seq_len, "global_batch": JOB.global_batch},
        "rates": rates,
    }
    document.write_text(json.dumps(result, indent=1) + "\n", RESULTS / f"{NAME}.json")
    document.write_text(markdown(result), RESULTS / f"{NAME}.md")
    print(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# {result['model']}, {result['parameters'] / 1e6:.1f}M parameters, "
        f"{RANKS} ranks on {HOSTS} hosts",
        "",
        f"{result['date']}, sequence {result['job']['seq_len']}, global batch "
        f"{result['job']['global_batch']}, 1F1B, whole sequences, no recomputation; hosts are "
        "network namespaces on one machine, cables shaped by tc-tbf (`none`: not shaped)"
        + (f", each rank has {quota.SHARE} of a core" if RANKS > HOSTS else "")
        + ".  `benchmarks/link_truth.py`.",
        "",
        "| cable | measured Mbit/s | chosen | s | best measured | s | regret | layouts run |",
        "|---|---:|---|---:|---|---:|---:|---:|",
    ]
    for rate, found in result["rates"].items():
        pairs = ", ".join(f"{mbit:,.0f}" for mbit in found["pairs_mbit_per_s"])
        lines.append(
            f"| {rate} | {pairs} | {found['chosen']} | {found['chosen_s']:.3f} | {found['best']} | "
            f"{found['best_s']:.3f} | {100 * found['regret']:.1f} % | "
            f"{found['measured']} of {found['layouts']} |"
        )
    for rate, found in result["rates"].items():
        lines += [
            "",
            f"## {rate}",
            "",
            "| layout | predicted s | measured s | steps |",
            "|---|---:|---:|---:|",
        ]
        lines += [
            f"| {row['layout']} | {row['predicted_s']:.3f} | {row['measured_s']:.3f} | "
            f"{row['steps']} |"
            for row in found["rows"]
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
