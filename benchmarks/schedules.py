"""Every schedule's closed form beside its simulated step, and what its ranks hold.

    python benchmarks/schedules.py [-o docs/results/schedules.md]

Closed forms are those of planner.search.partition.layout_partition, steps those of
planner.schedules.simulate. Stages are uniform, uneven (times scattered by 10 %), or uniform with
transfers of 5 % of a stage's time, which the closed form charges to the stages.  Last come plans:
the optimum of a model's layers under every schedule, cut and recomputed by the solver, against the
prediction of that plan.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.closed_forms import closed_form, peak_alive
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.plan import Job
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import SCHEDULES
from meshwright.planner.schedules.closed_form import in_flight_counts
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.plan_candidate import candidate_of
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Solution

STAGES = (1, 2, 4)
"""On each rank, where a schedule takes so many."""
SEEDS = 40
SCATTER = 0.1
TRANSFER = 0.05
MIX = (1.0, 1.2, 0.8)
"""Seconds of F, I and W of a rank's micro-batch."""


def ratio(
    name: str,
    ranks: int,
    virtual: int,
    m: int,
    pace: list[float],
    transfer_s: float = 0.0,
) -> float:
    """Return closed form over simulated step; `pace` [stage] scales a stage's seconds."""
    stages = ranks * virtual
    each = [[share * p / virtual for p in pace] for share in MIX]
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual)
    rank_s, weight_s = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(home):
        rank_s[rank] += sum(seconds[stage] for seconds in each)
        weight_s[rank] += each[2][stage]
        for beside in (stage - 1, stage + 1):
            if 0 <= beside < stages and home[beside] != rank:
                rank_s[rank] += transfer_s
    form = closed_form(name, ranks=ranks, micro_batches=m, virtual_stages=virtual)

    def simulated_s(steps: int) -> float:
        return timeline(
            orders(name, stages=stages, micro_batches=m, virtual_stages=virtual, steps=steps),
            forward_s=each[0],
            backward_s=[i + w for i, w in zip(each[1], each[2], strict=True)],
            weight_s=each[2],
            transfer_s=transfer_s,
        ).makespan_s

    # Without flush a step is what a further one takes.
    step_s = simulated_s(3) - simulated_s(2) if SCHEDULES[name].stale else simulated_s(1)
    if form.forward_apart:
        forward = max(each[0])
        return (
            (m - 1) * (forward + max(r - f for r, f in zip(rank_s, each[0], strict=True)))
            + sum(rank_s)
        ) / step_s
    return form.step_s(rank_s, weight_s) / step_s


def band(ratios: list[float]) -> str:
    return f"{min(ratios):.3f} - {max(ratios):.3f}"


def errors() -> Iterator[list[str]]:
    """Yield a row for every schedule: closed form over simulated step."""
    yield ["schedule", "stages per rank", "uniform", "uneven", "uniform with transfers"]
    for name in SCHEDULES:
        for virtual in filter(SCHEDULES[name].takes, STAGES):
            rng = random.Random(0)
            uniform, uneven, moving = [], [], []
            for _ in range(SEEDS):
                ranks = rng.choice([2, 4, 8])
                m = ranks * rng.randint(2, 4)
                even = [1.0] * (ranks * virtual)
                pace = [max(0.5, rng.gauss(1.0, SCATTER)) for _ in even]
                uniform.append(ratio(name, ranks, virtual, m, even))
                uneven.append(ratio(name, ranks, virtual, m, pace))
                transfer_s = TRANSFER * sum(MIX) / virtual
                moving.append(ratio(name, ranks, virtual, m, even, transfer_s))
            yield [name, str(virtual), band(uniform), band(uneven), band(moving)]


def counts(ranks: int, m: int) -> Iterator[list[str]]:
    """Yield a row for every schedule: micro-batches that the ranks hold at most."""
    yield ["schedule", "stages per rank", "F to B or I", "I to W", "by stage, in the order"]
    for name in SCHEDULES:
        for virtual in filter(SCHEDULES[name].takes, STAGES):
            every = orders(name, stages=ranks * virtual, micro_batches=m, virtual_stages=virtual)
            own = [
                in_flight_counts(name, rank, ranks=ranks, micro_batches=m, virtual_stages=virtual)
                for rank in range(ranks)
            ]
            peaks = [sorted(peak_alive(order).items()) for order in every]
            waiting = (
                " ".join(str(h.waiting) for h in own) if SCHEDULES[name].splits_backward else "-"
            )
            yield [
                name,
                str(virtual),
                " ".join(str(h.alive) for h in own),
                waiting,
                " ".join("+".join(str(most) for _, most in peak) for peak in peaks),
            ]


def plans(model_name: str, cluster_name: str, pins: Pins, job: Job) -> Iterator[list[str]]:
    """Yield a row for every timetable: the closed form's optimum, and that plan simulated."""
    yield ["schedule", "stages per rank", "closed form", "simulated", "ratio", "fullest rank"]
    model, cluster = resolve_model(model_name), resolve_cluster(cluster_name)
    candidates = Candidates(Request(model, cluster, job, pins, called=cluster_name))
    seen = set()
    for family in candidates.families:
        for layout in family.layouts():
            timetable = (layout.schedule, layout.virtual_stages)
            if timetable in seen or candidates.refusal(layout) is not None:
                continue
            seen.add(timetable)
            solution = solve(candidates.instance(layout))
            if not isinstance(solution, Solution):
                yield [layout.schedule, str(layout.virtual_stages), *["does not fit"] * 4]
                continue
            found = candidate_of(candidates, layout, solution)
            step_s = found.prediction.step_time_s
            fullest = max(stage.peak_memory_bytes for stage in found.prediction.stages)
            yield [
                layout.schedule,
                str(layout.virtual_stages),
                f"{found.objective_s:.3f} s",
                f"{step_s:.3f} s",
                f"{found.objective_s / step_s:.3f}",
                f"{fullest / 2**30:.1f} GiB",
            ]


def table(rows: Iterator[list[str]]) -> str:
    header, *others = rows
    lines = [header, ["---"] * len(header), *others]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page() -> str:
    """Return the whole page."""
    ranks, m = 4, 8
    job = Job(seq_len=8192, global_batch=64)
    pins = Pins(tensor=1, context=1, pipeline=4, zero=1, micro_batch=1)
    model, cluster = "llama-3.1-8b", "8xh100-sxm-80gb"
    parts = [
        "# Schedules: closed form, simulation, memory",
        "    python benchmarks/schedules.py -o docs/results/schedules.md",
        "The search begins with the optimum of a closed form of the step time "
        "(`planner/search/partition/layout_partition.py`); the simulated step is what it proves "
        "(`planner/search/goals.py`). This page compares the two.",
        "## Closed form over simulated step",
        f"Smallest and largest ratio over {SEEDS} pipelines of 2, 4 or 8 ranks with 2 to 4 times "
        f"as many micro-batches. Per rank, forward (F) takes {MIX[0]}, backward of the input (I) "
        f"{MIX[1]} and backward of the weights (W) {MIX[2]}. The times of uneven stages vary by "
        f"{100 * SCATTER:.0f} %. A transfer takes {100 * TRANSFER:.0f} % of a stage's time, and "
        "the closed form charges it to both of its ends. Above 1 the closed form is pessimistic. "
        "For pipedream-2bw it is the time of one more step, since its pipeline never drains.",
        table(errors()),
        "Here uneven stages are random. The solver's splits put the longer stages in the same "
        "place on all ranks (`stage_counts.py`), so for its plans the two are closer.",
        f"## Plans of {model}",
        f"On {cluster}, sequence {job.seq_len:,}, global batch {job.global_batch}, 4 pipeline "
        "ranks x 2 data-parallel ranks with ZeRO-1: the optimum of the closed form, and the "
        "simulated step of that plan.",
        table(plans(model, cluster, pins, job)),
        "## Micro-batches in flight",
        f"{ranks} ranks, {m} micro-batches, one number per rank. `F to B or I` counts "
        "micro-batches between their forward and their backward (B), or its input half (I); `I to "
        "W` those that wait for their weight gradients (W). These two are what the solver counts "
        "(`closed_form.held`), over all stages of the rank, and tests compare "
        "them with every moment of the schedule. The last column is the largest number of each "
        "stage until its B or W; stages reach it at different moments.",
        table(counts(ranks, m)),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.output:
        write_text(page(), arguments.output)
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
