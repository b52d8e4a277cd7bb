"""Random partition problems of every kind, against all of their splits and the integer program.

    python benchmarks/random_problems.py [--first SEED] [--each COUNT]

Chains and graphs of layers (with groups that stay together, with and without relays), on stages
that are alike in kind and on device types that differ.  The
generators and enumerations are those of the tests, from other seeds; every problem is solved
exactly, by enumeration, and one in eight by the integer program too.  It stops at a mismatch, with
the kind and the seed, and prints how many problems of each kind fit and how long it took.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver import ilp
from meshwright.planner.solver.solve import solve
from tests.planner.solver import small_graphs, small_instances

FIRST = 100_000
"""Seeds that no test has."""
PROGRAMS = 8
"""One problem of so many is solved by the integer program too."""
SAME = 1e-6


class Kind(NamedTuple):
    """One kind of problem, made from a seed, and three ways to its optimum."""

    name: str
    share: int
    """Problems of this kind, of ten."""
    made: Callable[[int], Any]
    exactly: Callable[[Any], Any]
    least_s: Callable[[Any], float]
    programmed: Callable[[Any], Any]
    small: Callable[[Any], bool] = lambda _: True


KINDS = (
    Kind(
        "chain",
        4,
        small_instances.random_instance,
        inner.solve,
        small_instances.least_objective_s,
        ilp.solve,
    ),
    Kind(
        "graph",
        2,
        small_graphs.random_graph,
        solve,
        small_graphs.least_objective_s,
        ilp.solve_graph,
    ),
    Kind(
        "graph with groups",
        1,
        lambda seed: small_graphs.with_groups(small_graphs.random_graph(seed), seed),
        solve,
        small_graphs.least_objective_s,
        ilp.solve_graph,
    ),
    Kind(
        "graph without relays",
        1,
        lambda seed: replace(
            small_graphs.with_groups(small_graphs.random_graph(seed), seed), relayed=False
        ),
        solve,
        small_graphs.least_objective_s,
        ilp.solve_graph,
    ),
    Kind(
        "chain on device types",
        1,
        small_graphs.random_unequal,
        solve,
        small_graphs.least_objective_s,
        ilp.solve_graph,
    ),
    Kind(
        "graph on device types",
        1,
        small_graphs.random_unequal_graph,
        solve,
        small_graphs.least_objective_s,
        ilp.solve_graph,
        small_graphs.soon_listed,
    ),
)


def objective_s(answer: Any) -> float:
    """Return what a solver found; inf if nothing fits."""
    split = getattr(answer, "split", answer)
    return float(getattr(split, "objective_s", math.inf))


def mismatches(kind: Kind, seeds: Iterator[int], count: int) -> tuple[int, list[str]]:
    """Solve so many problems; how many of them fit, and where two ways differ."""
    fitting, found, tried = 0, [], 0
    while tried < count:
        seed = next(seeds)
        problem = kind.made(seed)
        if not kind.small(problem):
            continue
        tried += 1
        least_s = kind.least_s(problem)
        fitting += least_s < math.inf
        ways = {"exactly": kind.exactly(problem)}
        if tried % PROGRAMS == 0:
            ways["as a program"] = kind.programmed(problem)
        for way, answer in ways.items():
            seconds = objective_s(answer)
            if not math.isclose(seconds, least_s, rel_tol=SAME, abs_tol=SAME):
                found.append(f"{kind.name}, seed {seed}: {seconds} {way}, {least_s} of all splits")
    return fitting, found


def main() -> None:
    """Compare, and stop at the first kind that has a mismatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--each", type=int, default=500, help="a tenth of all problems")
    args = parser.parse_args()
    for kind in KINDS:
        started, count = time.process_time(), kind.share * args.each
        seeds = iter(range(args.first, args.first + 1000 * count))
        fitting, found = mismatches(kind, seeds, count)
        spent_s = time.process_time() - started
        print(f"{kind.name}: {count} problems, {fitting} fit, {spent_s:.0f} CPU s", flush=True)
        if found:
            raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
