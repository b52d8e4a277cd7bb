"""CPU seconds of whole searches, and what became of every configuration.

    python benchmarks/search_speed.py [--growth] [--gaps] [--all-axes] [--markdown]

One line per case: how many configurations there are, how many each argument settled, how many
partition problems were solved, and the CPU seconds on one core: of the search alone, and of the
whole answer with the simplest plan near the fastest and the usual ones beside it.  Imports and
reading documents are not counted; the first search of the process is run twice, and the second
counts.
`--growth` goes from 8 to 65,536 devices instead; `--gaps` prints the simulated step and its gap of
requests of all sizes, of devices that differ and of graphs of branches.  What the native framework
refuses is left out, but for models that it has no adapter for; with `--all-axes` only what no
framework could run is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from dataclasses import dataclass

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.model import Edge, Layer, LayerTrace, ModelGraph
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.frameworks.native_limits import Rules, limit
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.plan_preference import with_preference
from meshwright.planner.search.proof_account import (
    BOUNDS,
    COMPUTATION,
    CUTS,
    DOMINATED,
    LEFT,
    MEMORY,
    OUT_OF_MEMORY,
    PROGRAM,
    REFUSED,
    ROOM,
    SHARED,
    SHARED_ROOM,
    SOLVED,
)
from meshwright.planner.search.search import search


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    goal_s: float | None = None

    @property
    def devices(self) -> int:
        return resolve_cluster(self.cluster).devices


CASES = [
    Case(
        model="llama-3.1-8b", cluster="8xh100-sxm-80gb", seq_len=8192, global_batch=128, goal_s=0.3
    ),
    Case(
        model="llama-3.1-70b",
        cluster="8x8xh100-sxm-80gb",
        seq_len=8192,
        global_batch=512,
        goal_s=0.5,
    ),
    Case(
        model="llama-3.1-70b",
        cluster="64x8xh100-sxm-80gb",
        seq_len=8192,
        global_batch=2048,
        goal_s=0.6,
    ),
    Case(
        model="llama-3.1-405b",
        cluster="2048x8xh100-sxm-80gb",
        seq_len=8192,
        global_batch=2048,
        goal_s=1.0,
    ),
    Case(
        model="gpt3-175b",
        cluster="16x8xa100-sxm-80gb",
        seq_len=2048,
        global_batch=1536,
        goal_s=0.6,
    ),
    Case(
        model="gpt3-175b",
        cluster="128x8xa100-sxm-80gb",
        seq_len=2048,
        global_batch=1536,
        goal_s=0.6,
    ),
    Case(model="mixtral-8x7b", cluster="8x8xh100-sxm-80gb", seq_len=4096, global_batch=512),
    Case(model="llama-3.1-8b", cluster="8x8xa100-sxm-40gb", seq_len=8192, global_batch=512),
    Case(model="llama-3.1-405b", cluster="128x8xh100-sxm-80gb", seq_len=8192, global_batch=1024),
    Case(
        model="deepseek-v3",
        cluster="256x8xh800-sxm-80gb",
        seq_len=4096,
        global_batch=15360,
        goal_s=5.0,
    ),
    Case(
        model="deepseek-v3",
        cluster="256x8xh100-sxm-80gb",
        seq_len=8192,
        global_batch=15360,
        goal_s=5.0,
    ),
]


GROWTH = [
    Case(
        model=model,
        cluster=f"{nodes}x8xh100-sxm-80gb",
        seq_len=8192,
        global_batch=max(128, 16 * nodes),
    )
    for model, every in (
        ("llama-3.1-8b", (1, 4, 16, 64, 128, 512, 2048, 8192)),
        ("deepseek-v3", (32, 128, 512, 2048, 8192)),
    )
    for nodes in every
]

GAPS = [
    Case(model=model, cluster=cluster, seq_len=seq_len, global_batch=batch)
    for model, cluster, seq_len, batch in (
        ("llama-3.1-8b", "8xh100-sxm-80gb", 8192, 128),
        ("llama-3.1-8b", "3x4xh100-sxm-80gb", 8192, 96),
        ("phi-4", "3x4xa100-sxm-80gb", 4096, 96),
        ("llama-3.1-70b", "8x8xh100-sxm-80gb", 8192, 256),
        ("llama-3.1-70b", "64x8xh100-sxm-80gb", 8192, 2048),
        ("mixtral-8x22b", "8x8xh100-sxm-80gb", 4096, 512),
        ("gemma-2-27b", "3x8xa100-sxm-80gb", 8192, 192),
        ("deepseek-v3", "256x8xh800-sxm-80gb", 4096, 15360),
        ("llama-3.1-405b", "2048x8xh100-sxm-80gb", 8192, 2048),
        ("qwen3-32b", "8xh200-sxm+8xa100-sxm-80gb", 4096, 64),
        ("llama-3.1-8b", "4xh100-sxm-80gb+4xa100-sxm-80gb+4xl40s", 4096, 48),
        ("qwen2.5-7b", "8xa100-sxm-80gb+7xl40s", 4096, 96),
    )
]

BRANCHES = (3, 6)
"""Branches between two ends, and the layers of each."""


def branching(parameters: int) -> ModelGraph:
    """Return a graph of three branches of six layers, each of its kind, between two ends."""
    count, length = BRANCHES
    chains = [[(f"{branch}.{at}", branch) for at in range(length)] for branch in "abc"[:count]]
    layers = [("stem", "stem"), *itertools.chain(*chains), ("head", "head")]
    size = {"stem": 0.5, "a": 1.0, "b": 0.75, "c": 1.25, "head": 0.5}
    edges = [
        pair
        for chain in chains
        for pair in itertools.pairwise(["stem", *(name for name, _ in chain), "head"])
    ]
    return ModelGraph(
        name=f"three branches of six, {parameters / 1e6:.0f} M parameters a layer",
        layers=tuple(
            Layer(
                name=name,
                kind=kind,
                parameters=int(parameters * size[kind]),
                trace=LayerTrace(
                    forward_flops=2e11 * size[kind],
                    stored_bytes=int(2e8 * size[kind]),
                    transient_bytes=int(5e7 * size[kind]),
                    output_bytes=5 * 10**6,
                ),
            )
            for name, kind in layers
        ),
        edges=tuple(Edge(source=a, target=b) for a, b in edges),
    )


def branches_row(parameters: int) -> list[str]:
    """Return the step of a graph of branches on 8 V100-16GB, its gap and the CPU seconds."""
    model, cluster = branching(parameters), resolve_cluster("8xv100-sxm-16gb")
    job = Job(seq_len=64, global_batch=64, precision="fp16")
    started = time.process_time()
    answer = search(Request(model, cluster, job))
    seconds = time.process_time() - started
    cells = [model.name, f"{job.global_batch}", f"{answer.prediction.step_time_s:.6g} s"]
    return [*cells, f"{answer.certificate.gap:.2%}", f"{seconds:.2f}", answer.plan.layout.text()]


COLUMNS = [
    ("configurations", None),
    ("refused", REFUSED),
    ("computation", BOUNDS[COMPUTATION]),
    ("+memory", BOUNDS[ROOM]),
    ("+its communication", BOUNDS[SHARED]),
    ("within memory", BOUNDS[SHARED_ROOM]),
    ("layout", BOUNDS[MEMORY]),
    ("cuts", BOUNDS[CUTS]),
    ("optimum", BOUNDS[SOLVED]),
    ("program", BOUNDS[PROGRAM]),
    ("dominated", DOMINATED),
    ("no fit", OUT_OF_MEMORY),
    ("left", LEFT),
]


def measured(case: Case, rules: Rules | None = None) -> tuple[Answer | None, float]:
    """Return the answer and the CPU seconds of the search alone; no answer where nothing fits."""
    model, cluster = resolve_model(case.model), resolve_cluster(case.cluster)
    job = Job(seq_len=case.seq_len, global_batch=case.global_batch)
    started = time.process_time()
    try:
        answer = search(Request(model, cluster, job), rules=rules)
    except NoPlanFits:
        answer = None
    return answer, time.process_time() - started


def preferred_s(case: Case, found: Answer | None) -> float:
    """Return the CPU seconds that the preferred plan and the table of choices take beside."""
    if found is None:
        return 0.0
    model, cluster = resolve_model(case.model), resolve_cluster(case.cluster)
    request = Request(model, cluster, Job(seq_len=case.seq_len, global_batch=case.global_batch))
    started = time.process_time()
    with_preference(request, found)
    return time.process_time() - started


def row(case: Case, rules: Rules | None) -> list[str]:
    answer, seconds = measured(case, rules)
    # Other rules than the framework's are those of the search alone.
    whole_s = seconds + preferred_s(case, answer) if rules is None else math.nan
    cells = [f"{case.model} on {case.cluster}"]
    for _, outcome in COLUMNS:
        if answer is None:
            cells.append("-")
        elif outcome is None:
            cells.append(f"{answer.certificate.configurations:,}")
        else:
            cells.append(f"{answer.certificate.counts.get(outcome, 0):,}")
    cells.append(str(answer.solved) if answer else "-")
    cells.append(f"{seconds:.2f}")
    cells.append(f"{whole_s:.2f}" if math.isfinite(whole_s) else "-")
    cells.append(f"{case.goal_s}" if case.goal_s else "")
    cells.append(answer.plan.layout.text() if answer else "nothing fits")
    return cells


def gap_row(case: Case) -> list[str]:
    """Return the simulated step of the answer, what is proven of it, and the CPU seconds."""
    answer, seconds = measured(case)
    assert answer is not None
    step_s, gap = answer.prediction.step_time_s, f"{answer.certificate.gap:.2%}"
    cells = [f"{case.model} on {case.cluster}", f"{case.global_batch:,}", f"{step_s:.6g} s"]
    return [*cells, gap, f"{seconds:.2f}", answer.plan.layout.text()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--all-axes", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    rules = limit if arguments.all_axes else None
    measured(CASES[0])
    header = ["case", *(name for name, _ in COLUMNS), "solved", "search, CPU s"]
    header += ["whole answer", "goal", "fastest plan"]
    if arguments.gaps:
        header = ["case", "batch", "step", "gap", "search, CPU s", "fastest plan"]
        rows = [header, *map(gap_row, GAPS), *map(branches_row, (170_000_000, 250_000_000))]
    else:
        rows = [header, *(row(case, rules) for case in (GROWTH if arguments.growth else CASES))]
    if arguments.markdown:
        rows.insert(1, ["---"] * len(header))
        for cells in rows:
            print("| " + " | ".join(cells) + " |")
        return
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(header))]
    for cells in rows:
        print("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))


if __name__ == "__main__":
    main()
