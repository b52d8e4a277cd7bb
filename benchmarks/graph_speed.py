"""CPU seconds of the exact graph solver on graphs the shape of known models.

    python benchmarks/graph_speed.py [--large]

Eight stages, 32 micro-batches.  `solve` is the whole call, ideals included.  The last columns are
the best and the worst of a few topological orders, each cut exactly as a chain: how much slower
they are than the plan found, and the CPU seconds of all of them.  Costs are synthetic: three ways
to run a layer, bytes so scarce that some layers must recompute.  Only the solver is meant, not the
plans.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from functools import partial

import networkx

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution, graph_instance
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.graphs.orders import orders
from meshwright.planner.solver.partition_problem import Option, Solution, StageLimits
from meshwright.planner.solver.solve import solve

STAGES, MICROBATCHES, ROOM = 8, 32, 0.8


def ways(time_s: float, stored: float, resident: float) -> tuple[Option, ...]:
    """Keep everything, keep 60 %, recompute everything."""
    return tuple(
        Option(
            name=name,
            forward_s=time_s / 3,
            backward_s=time_s * (factor - 1 / 3),
            stored_bytes=stored * share,
            resident_bytes=resident,
        )
        for name, factor, share in (("none", 1.0, 1.0), ("half", 1.1, 0.6), ("full", 1.33, 0.05))
    )


class Drawing:
    """A graph as it is drawn, layer by layer; `cost` is seconds, stored, resident, output bytes."""

    def __init__(self) -> None:
        self.graph = networkx.DiGraph()
        self.costs: dict[str, tuple[float, float, float, float]] = {}

    def add(
        self, name: str, reads: Iterable[str | None], cost: tuple[float, float, float, float]
    ) -> str:
        self.graph.add_node(name)
        self.graph.add_edges_from((before, name) for before in reads if before)
        self.costs[name] = cost
        return name

    def run(
        self,
        name: str,
        count: int,
        cost: tuple[float, float, float, float],
        reads: Iterable[str | None] = (),
    ) -> str:
        """`count` layers one after the other; returns the last."""
        last: Iterable[str | None] = reads
        for i in range(count):
            last = [self.add(f"{name}.{i:02}", last, cost)]
        return next(iter(last)) or ""

    def problem(self) -> GraphInstance:
        capacity = (
            ROOM
            / STAGES
            * sum(
                resident + STAGES * 0.6 * stored for _, stored, resident, _ in self.costs.values()
            )
        )
        return graph_instance(
            self.graph,
            options={name: ways(*cost[:3]) for name, cost in self.costs.items()},
            output_s={name: cost[3] / 25e9 for name, cost in self.costs.items()},
            stages=tuple(
                StageLimits(capacity_bytes=capacity, in_flight=min(MICROBATCHES, STAGES - s))
                for s in range(STAGES)
            ),
            steady=MICROBATCHES - 1,
        )


def unet() -> GraphInstance:
    """27 residual blocks over 5 levels, 9 attentions, 10 long skips: 138 nodes, 174 edges."""
    d = Drawing()

    def cost(level: int, share: float = 1.0) -> tuple[float, float, float, float]:
        width, area = (1, 2, 4, 4, 8)[level], 4.0**-level
        return (
            share * 0.004 * width * width * area + 2e-4,
            share * 3e8 * width * area,
            2e7 * width * width * share,
            6e7 * width * area,
        )

    def block(name: str, level: int, last: str) -> str:
        first = d.add(f"{name}.norm", [last], cost(level, 0.1))
        second = d.add(f"{name}.conv1", [first], cost(level))
        third = d.add(f"{name}.conv2", [second], cost(level))
        return d.add(f"{name}.add", [third, last], cost(level, 0.05))

    last = d.add("in", [], cost(0))
    skips = []
    for level in range(5):
        for i in range(2):
            last = block(f"down{level}.{i}", level, last)
            if level in (2, 3):
                last = d.add(f"down{level}.attention{i}", [last], cost(level))
            skips.append(last)
        if level < 4:
            last = d.add(f"down{level}.pool", [last], cost(level + 1, 0.1))
    last = block("middle.0", 4, last)
    last = d.add("middle.attention", [last], cost(4))
    last = block("middle.1", 4, last)
    for level in reversed(range(5)):
        for i in range(3):
            if i < 2:
                last = d.add(f"up{level}.concat{i}", [last, skips.pop()], cost(level, 0.05))
            last = block(f"up{level}.{i}", level, last)
            if level in (2, 3) and i < 2:
                last = d.add(f"up{level}.attention{i}", [last], cost(level))
        if level:
            last = d.add(f"up{level}.grow", [last], cost(level - 1, 0.1))
    d.add("out.conv", [d.add("out.norm", [last], cost(0, 0.1))], cost(0))
    return d.problem()


def inception() -> GraphInstance:
    """Stem of 2 and 11 modules with branches of 1, 2, 2 and 3 layers: 101 nodes, 133 edges."""
    d = Drawing()
    rng = random.Random(3)
    last = d.run("stem", 2, (0.008, 4e8, 1e6, 4e7))
    for module in range(11):
        area = 0.75**module
        ends = [
            d.run(
                f"m{module:02}.b{branch}",
                length,
                (rng.uniform(0.001, 0.004), rng.uniform(1e8, 3e8) * area, 3e7, 2e7 * area),
                [last],
            )
            for branch, length in enumerate((1, 2, 2, 3))
        ]
        last = d.add(f"m{module:02}.concat", ends, (2e-4, 1e8 * area, 0.0, 6e7 * area))
    return d.problem()


def encoder_decoder() -> GraphInstance:
    """24 encoder blocks of 2 layers, 24 decoder blocks of 3 that all read the encoder's output."""
    d = Drawing()
    cost = (0.004, 5e8, 4e8, 3e7)
    encoder = d.run("encoder", 48, cost)
    last: str | None = None
    for i in range(24):
        own = d.add(f"decoder.{i:02}.self", [last], cost)
        cross = d.add(f"decoder.{i:02}.cross", [own, encoder], cost)
        last = d.add(f"decoder.{i:02}.mlp", [cross], (0.006, 8e8, 7e8, 3e7))
    return d.problem()


BLOCKS = [
    (0.009, 9e8, 8e8, 4e7),
    (0.006, 5e8, 5e8, 2e7),
    (0.013, 1.3e9, 1.2e9, 5e7),
    (0.004, 4e8, 3e8, 1e7),
]


def towers(*lengths: int, trunk: int) -> GraphInstance:
    """Towers of their own kinds of blocks that end in one trunk."""
    d = Drawing()
    ends = [d.run(f"tower{t}", count, BLOCKS[t]) for t, count in enumerate(lengths)]
    d.run("trunk", trunk, (0.011, 1.0e9, 9e8, 5e7), ends)
    return d.problem()


GRAPHS: dict[str, Callable[[], GraphInstance]] = {
    "U-Net, 5 levels": unet,
    "Inception-like": inception,
    "encoder 24 - decoder 24": encoder_decoder,
    "CLIP 24 + 12 -> 1": lambda: towers(24, 12, trunk=1),
    "towers 32 + 24 -> 32": lambda: towers(32, 24, trunk=32),
    "towers 24+16+12 -> 24": lambda: towers(24, 16, 12, trunk=24),
}
LARGE: dict[str, Callable[[], GraphInstance]] = {
    "towers 3 x 24 -> 24": lambda: towers(24, 24, 24, trunk=24),
    "towers 4 x 16 -> 32": lambda: towers(16, 16, 16, 16, trunk=32),
    "towers 4 x 24 -> 24": lambda: towers(24, 24, 24, 24, trunk=24),
}


def wide(count: int, width: int) -> GraphInstance:
    """Levels of up to `width` unlike layers that read any of the level before, and some others."""
    d = Drawing()
    rng = random.Random(count + width)
    levels = [[d.add("in", [], (0.004, 4e8, 3e8, 2e7))]]
    made = 1
    while made < count - 1:
        level = []
        for _ in range(min(rng.randint(max(1, width // 2), width), count - 1 - made)):
            reads = {rng.choice(levels[-1])}
            if rng.random() < 0.4:
                reads.add(rng.choice(levels[-1]))
            if rng.random() < 0.15 and len(levels) > 1:
                reads.add(rng.choice(rng.choice(levels[:-1])))
            cost = (
                rng.uniform(0.001, 0.012),
                rng.uniform(1e8, 1e9),
                rng.uniform(1e8, 1e9),
                rng.uniform(5e6, 6e7),
            )
            level.append(d.add(f"n{made:03}", sorted(reads), cost))
            made += 1
        levels.append(level)
    ends = [name for name in d.graph if not d.graph.out_degree(name)]
    d.add("out", ends, (0.004, 4e8, 3e8, 2e7))
    return d.problem()


WIDE: dict[str, Callable[[], GraphInstance]] = {
    f"wide {count}, {width}": partial(wide, count, width)
    for count in (80, 150, 200)
    for width in (3, 12, 24)
}


def cpu_s(call: Callable[[], object], repeats: int) -> float:
    """Least CPU seconds of a few calls."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def row(name: str, problem: GraphInstance, repeats: int) -> str:
    every = ideals(problem.readers(), most=10**6)
    answer = solve(problem)
    seconds = cpu_s(lambda: solve(problem), repeats)
    chains = [problem.along(order) for order in orders(problem).values()]
    start = time.process_time()
    solved = [inner.solve(chain) for chain in chains]
    chains_s = time.process_time() - start
    head = (
        f"{name:24} {len(problem.chain.layers):4}/{len(problem.edges):<4} "
        f"{len(every) if every else '> 1e6':>7} {seconds:8.3f}"
    )
    if not isinstance(answer, GraphSolution):
        return f"{head}  {answer}"
    times_s = [s.objective_s for s in solved if isinstance(s, Solution)]
    losses = [f"{100 * (t / answer.objective_s - 1):6.2f}" for t in (min(times_s), max(times_s))]
    return (
        f"{head} {answer.objective_s:10.5f} {answer.gap:8.1e} {answer.method:8}"
        f"{losses[0]} {losses[1]} {chains_s:8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="graphs of 15k to 390k ideals too")
    parser.add_argument("--wide", action="store_true", help="wide graphs of 80 to 200 nodes too")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(
        f"{'graph':24} {'nodes/edges':>9} {'ideals':>6} {'solve s':>8} {'objective s':>10} "
        f"{'gap':>7} {'method':8} best, worst chain %, s"
    )
    every = GRAPHS | (LARGE if arguments.large else {}) | (WIDE if arguments.wide else {})
    for name, case in every.items():
        if arguments.only in name:
            print(row(name, case(), arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
