"""Seconds that a study of 200 clusters takes: 10 accelerators, 8 to 4,096 devices, a 70B model.

    python benchmarks/whatif_speed.py [--processes 2]

CPU seconds are those of all processes, their start included: what others do on the machine does not
count in them.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from meshwright.planner.whatif.run_study import run
from meshwright.planner.whatif.study import Goal, Offer, Study, Work

ACCELERATORS = (
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "h200-sxm",
    "b200",
    "b300",
    "mi300x",
    "mi355x",
    "gaudi3",
    "l40s",
)
NODES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512)


def question() -> Study:
    """Return the study."""
    return Study(
        name="200 clusters for a 70B model",
        models=("llama-3.1-70b",),
        work=Work(seq_len=8192, global_batch=1536),
        goal=Goal(tokens=1e12),
        offers=tuple(Offer(cluster=f"{{n}}x8x{name}", n=NODES) for name in ACCELERATORS),
    )


def main() -> None:
    """Run the study and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    began_s = time.perf_counter()
    result = run(
        question(),
        processes=asked.processes,
        progress=lambda done, total: print(f"\r{done} of {total}", end="", file=sys.stderr),
    )
    whole_s = time.perf_counter() - began_s
    cpu_s = sum(
        use.ru_utime + use.ru_stime
        for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    fitting = sum(outcome.fits for outcome in result.outcomes)
    print(
        f"\n{len(result.outcomes)} candidates, {fitting} fit: {cpu_s:.1f} CPU s in "
        f"{asked.processes} processes, {cpu_s / asked.processes:.1f} s each; {whole_s:.1f} s on "
        "the wall"
    )


if __name__ == "__main__":
    main()
