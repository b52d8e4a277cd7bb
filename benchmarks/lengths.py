"""What an allocator reserves where sequences differ in length: traces of the runtime, replayed.

    PYTHONPATH=$PWD python benchmarks/lengths.py [-o benchmarks/results]

One rank's step is rehearsed on tensors without data (benchmarks.rehearsal) at eight lengths, and
each tensor's coming and going written down.  Steps whose lengths are drawn from a distribution then
pass one after another through a model of torch's caching allocator
(caching_allocator.py of the planner), with segments of one request each and with segments that
expand.  All is on one stream, and the device always has more memory: what is reserved beyond it
makes an allocator give back what it caches.  Writes lengths.json and docs/results/lengths.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fake_memory import Case
from benchmarks.rehearsal import changes
from meshwright.planner.costs.memory.caching_allocator import CachingAllocator, MemoryBlock
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.units import bytes_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "lengths.md"
LONGEST = 4096
LENGTHS = tuple(range(LONGEST // 8, LONGEST + 1, LONGEST // 8))
STEPS = 48
CASES = {
    "recompute none": Case(
        model="llama-3.1-8b",
        mesh={"data_shard": 8},
        zero=3,
        micro_batches=1,
        blocks=4,
    ),
    "recompute full": Case(
        model="llama-3.1-8b",
        mesh={"data_shard": 8},
        zero=3,
        micro_batches=1,
        recompute="full",
        blocks=4,
    ),
}
DRAWS: Mapping[str, Sequence[float]] = {
    "all as long as the longest": (0, 0, 0, 0, 0, 0, 0, 1),
    "uniform": (1, 1, 1, 1, 1, 1, 1, 1),
    "mostly short": (16, 8, 4, 2, 1, 1, 1, 1),
    "growing": (),
}
"""Weights of the lengths; growing: each in turn, the shortest first."""
Trace = tuple[int, list[tuple[int, int]]]
"""Bytes that are there before a step, and its changes: a tensor's number, by how much it grows."""


def replayed(traces: Sequence[Trace], *, expandable: bool) -> CachingAllocator:
    """Return an allocator behind these steps of one rank; what is there before comes first."""
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(traces[0][0])
    for _, step in traces:
        held: dict[int, tuple[MemoryBlock, int]] = {}
        for tensor, change in step:
            size = change
            if tensor in held:
                block, before = held.pop(tensor)
                allocator.free(block)
                size += before
            if size > 0:
                held[tensor] = allocator.allocate(size), size
        for block, _ in held.values():  # of states that a step replaces
            allocator.free(block)
    return allocator


def drawn(weights: Sequence[float]) -> list[int]:
    """Return the lengths of all steps."""
    if not weights:
        return [LENGTHS[at % len(LENGTHS)] for at in range(STEPS)]
    return random.Random(0).choices(LENGTHS, weights, k=STEPS)


def rows_of(name: str, case: Case) -> list[dict[str, Any]]:
    """Return a row for each distribution and kind of segment."""
    traces: dict[int, Trace] = {}
    for length in LENGTHS:
        begun = time.perf_counter()
        at = replace(case, seq_len=length)
        model = at.graph()
        traces[length] = changes(at.plan(model), model, rank=0)
        print(f"{name} {length}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    rows = []
    for title, weights in DRAWS.items():
        lengths = drawn(weights)
        for expandable in (False, True):
            found = replayed([traces[length] for length in lengths], expandable=expandable)
            rows.append(
                {
                    "case": name,
                    "lengths": title,
                    "mean": sum(lengths) / len(lengths),
                    "segments": "expandable" if expandable else "of one request",
                    "allocated": found.peak_allocated_bytes,
                    "reserved": found.reserved_bytes,
                }
            )
    return rows


def markdown(rows: Sequence[dict[str, Any]], date: str) -> str:
    """Return the page."""
    head = "| run | lengths | mean length | segments | allocated at most | reserved | ratio |"
    lines = [
        "# Lengths that vary",
        "",
        "In fine-tuning, sequences differ in length, and so do the tensors of each step. torch's "
        "caching allocator keeps the segments that it requested from the device. A segment made "
        "for a shorter sequence is too small for the tensors of a longer one, so more memory is "
        "reserved than is ever allocated. Predicted peaks are allocated bytes for the longest "
        "sequence. What is reserved beyond them, with sequences of equal length, is "
        "`memory.reserved` of a framework; where that has `memory.replayed` it comes from replaying "
        "a step (`planner/costs/memory/allocator_segments.py`).",
        "",
        f"`PYTHONPATH=$PWD python benchmarks/lengths.py`, {date}: {STEPS} steps of one rank, "
        f"Llama-3.1-8B of 4 blocks under ZeRO-3 on 8 ranks, one sequence of up to {LONGEST} "
        "tokens. The allocations of a step are recorded on the runtime itself "
        "(`benchmarks/rehearsal.py`) and replayed in a model of the allocator "
        "(`caching_allocator.py`), on one stream and with a device that never runs "
        "out of memory.",
        "",
        head,
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        ratio = row["reserved"] / row["allocated"]
        lines.append(
            f"| {row['case']} | {row['lengths']} | {row['mean']:.0f} | {row['segments']} "
            f"| {bytes_text(row['allocated'])} | {bytes_text(row['reserved'])} | {ratio:.2f} |"
        )
    of = {(row["case"], row["lengths"], row["segments"]): row for row in rows}
    lines += ["", "Results:", ""]
    for case in CASES:
        equal, uniform = (of[case, draw, "of one request"] for draw in list(DRAWS)[:2])
        grown = of[case, "uniform", "expandable"]
        lines.append(
            f"- {case}: uniformly distributed lengths reserve "
            f"{bytes_text(uniform['reserved'] - equal['reserved'])} more than equal ones, though "
            "their largest step is the same; for them expandable segments "
            f"(`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) reserve "
            f"{bytes_text(uniform['reserved'] - grown['reserved'])} less."
        )
    lines.append(
        "- The ratio is large because there are few blocks: the unused reserved memory hardly "
        "grows with their number, since the segments of one block's tensors serve the next block "
        "(equal lengths, segments of one request: 5.8 GiB with 2 and with 8 blocks, 5.9 and 6.7 "
        "with full recompute). Where memory is short the allocator waits for the device and "
        "releases free segments before it fails."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rehearse, replay and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    rows = [row for name, case in CASES.items() for row in rows_of(name, case)]
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    page = markdown(rows, date)
    print(page)
    if output is not None:
        write_text(
            json.dumps({"date": date, "rows": rows}, indent=1) + "\n", output / "lengths.json"
        )
        write_text(page, DOCUMENT)


if __name__ == "__main__":
    main()
