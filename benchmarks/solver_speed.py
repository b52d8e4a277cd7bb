"""CPU milliseconds of the exact inner solver on pipelines the size of known models.

    python benchmarks/solver_speed.py [--ilp NODES]

Costs are synthetic: six ways to run a layer, from keeping everything to full recomputation with
offload, in proportions usual for transformers.  Only the solver's time is meant, not the plans.
`cold` builds the Pareto sets, `shared` finds them in a store.  With --ilp the integer program gets
that many nodes for each of the models, and its distance from the exact optimum is shown.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from meshwright.planner.solver import ilp
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, StageLimits

Kind = tuple[Option, ...]

# Name, time factor, stored share, transient share: of a layer that keeps all its activations.
WAYS = [
    ("none", 1.00, 1.00, 0.05),
    ("attention", 1.03, 0.80, 0.20),
    ("mlp", 1.11, 0.55, 0.45),
    ("full", 1.33, 0.06, 1.00),
    ("offload-half", 1.07, 0.50, 0.15),
    ("full-offload", 1.38, 0.01, 1.00),
]


def layer(
    time_s: float, stored: float, resident: float, sync_s: float = 0.003, *, ways: int = 6
) -> Kind:
    return tuple(
        Option(
            name=name,
            forward_s=time_s / 3,
            backward_s=time_s * (factor - 1 / 3),
            stored_bytes=round(stored * share),
            transient_bytes=round(stored * transient),
            resident_bytes=resident,
            sync_s=sync_s,
        )
        for name, factor, share, transient in WAYS[:ways]
    )


def plain(time_s: float, stored: float, resident: float, *, transient: float = 0.0) -> Kind:
    return (
        Option(
            name="none",
            forward_s=time_s / 3,
            backward_s=2 * time_s / 3,
            stored_bytes=stored,
            transient_bytes=transient,
            resident_bytes=resident,
            sync_s=0.004,
        ),
    )


def one_f_one_b(
    layers: list[int], kinds: list[Kind], depth: int, microbatches: int, room: float
) -> Instance:
    """Stages with `room` times the bytes that holding everything evenly would take."""
    total = sum(
        kinds[k][0].resident_bytes + min(depth, microbatches) * 0.6 * kinds[k][0].stored_bytes
        for k in layers
    )
    capacity = room * total / depth
    return Instance(
        layers=tuple(layers),
        kinds=tuple(kinds),
        stages=tuple(
            StageLimits(
                capacity_bytes=capacity, in_flight=min(microbatches, depth - s), exposed_s=2e-4
            )
            for s in range(depth)
        ),
        steady=microbatches - 1,
    )


def decoder(
    blocks: int,
    block: tuple[float, float, float],
    depth: int,
    microbatches: int,
    *,
    room: float = 0.8,
    dense: int = 0,
) -> Instance:
    """Embedding, `dense` leading blocks, the other blocks, head; `block`: s, stored, resident."""
    time_s, stored, resident = block
    kinds = [
        plain(0.02 * time_s, 0.05 * stored, 0.9 * resident),
        layer(time_s, stored, resident, 0.004),
        plain(0.8 * time_s, 0.1 * stored, 0.9 * resident, transient=0.6 * stored),
        layer(0.7 * time_s, 0.6 * stored, 0.1 * resident, 0.001),
    ]
    layers = [0] + [3] * dense + [1] * (blocks - dense) + [2]
    return one_f_one_b(layers, kinds, depth, microbatches, room)


CASES: dict[str, Callable[[], Instance]] = {
    "8B  L=34  P=4  m=32": lambda: decoder(32, (0.011, 1.1e9, 1.3e9), 4, 32),
    "70B L=82  P=8  m=32": lambda: decoder(80, (0.013, 1.4e9, 1.7e9), 8, 32),
    "GPT3 L=98 P=8  m=32": lambda: decoder(96, (0.021, 1.9e9, 1.2e9), 8, 32),
    "405B L=128 P=16 m=64": lambda: decoder(126, (0.03, 1.2e9, 2.1e9), 16, 64),
    "DSv3 L=63 P=16 m=120": lambda: decoder(61, (0.017, 1.0e9, 2.9e9), 16, 120, dense=3),
    "405B L=128 P=16 m=16": lambda: decoder(126, (0.03, 1.2e9, 2.1e9), 16, 16),
}


def periodic(pattern: list[int], repeats: int, depth: int, m: int) -> Instance:
    kinds = [
        layer(0.010 * (1 + 0.4 * k), 0.9e9 * (1 + 0.3 * k), 1.1e9, 0.003)
        for k in range(max(pattern) + 1)
    ]
    return one_f_one_b(pattern * repeats, kinds, depth, m, 0.8)


def encoder_decoder() -> Instance:
    kinds = [layer(0.008, 0.7e9, 0.9e9), layer(0.012, 1.0e9, 1.2e9, 0.004)]
    return one_f_one_b([0] * 24 + [1] * 48, kinds, 8, 32, 0.8)


def shuffled(kinds_count: int, layers: int, depth: int, m: int) -> Instance:
    rng = random.Random(7)
    kinds = [
        layer(rng.uniform(0.004, 0.02), rng.uniform(0.4e9, 1.6e9), rng.uniform(0.5e9, 2e9))
        for _ in range(kinds_count)
    ]
    return one_f_one_b([rng.randrange(kinds_count) for _ in range(layers)], kinds, depth, m, 0.8)


def every_layer_its_own(layers: int, depth: int, m: int, ways: int) -> Instance:
    rng = random.Random(11)
    kinds = [
        layer(
            rng.uniform(0.001, 0.02),
            rng.uniform(0.1e9, 1.6e9),
            rng.uniform(0.1e9, 2e9),
            ways=ways,
        )
        for _ in range(layers)
    ]
    return one_f_one_b(list(range(layers)), kinds, depth, m, 0.8)


def resident_by_option(sync_factor: float = 1.0) -> Instance:
    """Optimizer states of single layers on the host: less resident, a slower step."""

    def with_offloaded_optimizer(table: Kind) -> Kind:
        return table + tuple(
            Option(
                name=f"{o.name}+cpu",
                forward_s=o.forward_s,
                backward_s=o.backward_s * 1.1,
                stored_bytes=o.stored_bytes,
                transient_bytes=o.transient_bytes,
                resident_bytes=0.4 * o.resident_bytes,
                sync_s=sync_factor * o.sync_s,
            )
            for o in table[:3]
        )

    base = decoder(80, (0.013, 1.4e9, 1.7e9), 8, 32, room=0.7)
    kinds = (base.kinds[0], with_offloaded_optimizer(base.kinds[1]), *base.kinds[2:])
    return Instance(layers=base.layers, kinds=kinds, stages=base.stages, steady=base.steady)


CHAINS: dict[str, Callable[[], Instance]] = {
    "5 local : 1 global, 60": lambda: periodic([0, 0, 0, 0, 0, 1], 10, 8, 32),
    "4 kinds periodic, 72": lambda: periodic([0, 1, 0, 2, 0, 1, 0, 3], 9, 8, 32),
    "encoder 24 + decoder 48": encoder_decoder,
    "4 kinds shuffled, 96": lambda: shuffled(4, 96, 8, 32),
    "50 kinds, K=3, P=4": lambda: every_layer_its_own(50, 4, 16, 3),
    "75 kinds, K=6, P=8": lambda: every_layer_its_own(75, 8, 32, 6),
    "140 kinds, K=3, P=8": lambda: every_layer_its_own(140, 8, 32, 3),
    "140 kinds, K=6, P=4": lambda: every_layer_its_own(140, 4, 16, 6),
    "70B, resident by option": resident_by_option,
    "70B, sync by option too": lambda: resident_by_option(sync_factor=6.0),
}


def cpu_ms(call: Callable[[], object], repeats: int) -> float:
    """Least CPU milliseconds of a few calls."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return 1e3 * min(taken)


def row(name: str, instance: Instance, repeats: int) -> str:
    answer = solve(instance)
    store = FrontierStore()
    solve(instance, frontiers=store)
    cold = cpu_ms(lambda: solve(instance), repeats)
    shared = cpu_ms(lambda: solve(instance, frontiers=store), repeats)
    if not isinstance(answer, Solution):
        return f"{name:26} {cold:9.1f} {shared:9.1f}  {answer}"
    lean = sum(o > 0 for o in answer.options)
    return (
        f"{name:26} {cold:9.1f} {shared:9.1f} {answer.objective_s:11.5f} {answer.gap:9.1e} "
        f"{lean:4} of {len(answer.options)}  {answer.sizes()}"
    )


def ilp_row(name: str, instance: Instance, most_nodes: int) -> str:
    exact = solve(instance)
    start = time.process_time()
    answer = ilp.solve(instance, most_nodes=most_nodes)
    taken_s = time.process_time() - start
    if not isinstance(answer, Solution) or not isinstance(exact, Solution):
        return f"{name:26} {1e3 * taken_s:9.0f} ms  {type(answer).__name__}"
    beyond = answer.objective_s / exact.objective_s - 1
    proof = "optimal" if answer.optimal else f"gap {answer.gap:.1e}"
    return f"{name:26} {1e3 * taken_s:9.0f} ms  {beyond:+.1e} from the optimum, {proof}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ilp", type=int, metavar="NODES")
    arguments = parser.parse_args()
    heads = f"{'cold ms':>9} {'shared ms':>9} {'objective s':>11} {'gap':>9}"
    print(f"{'':26} {heads} leaner layers, sizes")
    for name, case in (CASES | CHAINS).items():
        print(row(name, case(), arguments.repeats), flush=True)
    for name, case in CASES.items() if arguments.ilp else ():
        print(ilp_row(name, case(), arguments.ilp), flush=True)


if __name__ == "__main__":
    main()
