"""CPU milliseconds to place two device types along a pipeline, and what an order by rule loses.

    python -m benchmarks.unequal_speed [--orders]

A transformer of 32 blocks on large, fast devices and small ones 2.4 times slower; six ways to run a
block.  With --orders every order of the types is also solved as a chain: the best of them must be
what was found, and the columns say how much longer a step takes with the fast devices first, last,
and in the worst order.  Costs are synthetic.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.solver_speed import layer, plain
from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import (
    DeviceType,
    GraphInstance,
    GraphSolution,
    in_a_row,
)
from meshwright.planner.solver.partition_problem import Instance, Solution, StageLimits
from meshwright.planner.solver.solve import solve

# Stages on fast devices, on slow ones, micro-batches.
CASES = [(4, 8, 32), (4, 4, 32), (2, 4, 32), (4, 2, 16), (2, 2, 16)]


def problem(fast: int, slow: int, microbatches: int) -> GraphInstance:
    depth = fast + slow
    share = 12 / depth
    kinds = (
        plain(0.0005, 0.05e9, 2e9),
        layer(0.02, 1.1e9, 1.3e9, 0.004),
        plain(0.016, 0.1e9, 2e9, transient=0.6e9),
    )

    def of(name: str, stages: int, capacity_bytes: float, time_scale: float = 1.0) -> DeviceType:
        chain = Instance(
            layers=(0, *[1] * 32, 2),
            kinds=kinds,
            stages=tuple(
                StageLimits(
                    capacity_bytes=capacity_bytes * share,
                    in_flight=float(min(microbatches, depth - s)),
                    time_scale=time_scale,
                )
                for s in range(depth)
            ),
            steady=microbatches - 1,
        )
        return DeviceType(name=name, stages=stages, chain=chain)

    return GraphInstance(types=(of("A", fast, 12e9), of("V", slow, 8e9, 2.4)), edges=in_a_row(34))


def every_order(stated: GraphInstance) -> Iterator[tuple[int, ...]]:
    depth, fast = len(stated.chain.stages), stated.types[0].stages
    for places in itertools.combinations(range(depth), fast):
        yield tuple(0 if s in places else 1 for s in range(depth))


def order_s(stated: GraphInstance, order: tuple[int, ...], store: FrontierStore) -> float:
    """Seconds of the best cuts for one order; inf if nothing fits."""
    stages = tuple(stated.types[g].chain.stages[s] for s, g in enumerate(order))
    chain = replace(stated.chain, stages=stages)
    answer = inner.solve(chain, frontiers=store)
    return answer.objective_s if isinstance(answer, Solution) else float("inf")


def row(stated: GraphInstance, *, orders: bool) -> str:
    taken = []
    for _ in range(3):
        start = time.process_time()
        answer = solve(stated)
        taken.append(1e3 * (time.process_time() - start))
    head = f"{len(stated.chain.stages):3} {min(taken):8.1f}"
    if not isinstance(answer, GraphSolution):
        return f"{head}  {answer}"
    best_s = answer.split.objective_s
    head += f" {best_s:11.5f}  {''.join(answer.stage_types):14}"
    if not orders:
        return head
    store = FrontierStore()
    start = time.process_time()
    times_s = {order: order_s(stated, order, store) for order in every_order(stated)}
    seconds = time.process_time() - start
    if abs(min(times_s.values()) - best_s) > 1e-9 * best_s:
        raise AssertionError(f"an order takes {min(times_s.values())}, the solution {best_s}")
    first = tuple(sorted(next(iter(times_s))))
    fitting = [t for t in times_s.values() if t < float("inf")]
    losses = [times_s[first], times_s[first[::-1]], max(fitting)]
    percent = " ".join(f"{100 * (t / best_s - 1):7.2f}" for t in losses)
    return f"{head} {percent} {len(fitting):4} of {len(times_s):4} {seconds:7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", action="store_true", help="solve every order as a chain too")
    orders = parser.parse_args().orders
    print(
        f"{'P':>3} {'ms':>8} {'objective s':>11}  {'order':14}"
        + (" A first  A last   worst %, orders that fit, all s" if orders else "")
    )
    for case in CASES:
        print(row(problem(*case), orders=orders), flush=True)


if __name__ == "__main__":
    main()
