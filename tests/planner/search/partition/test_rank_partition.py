"""Ranks of one stage or several: counts held, shares of layers, the bytes of predictions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import placement_prediction, placements_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import with_figures
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout, ScheduleName
from meshwright.planner.requests.pins import Pins, read_allowances
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.closed_form import in_flight_counts, most_on_first_stage
from meshwright.planner.schedules.schedule import obstacle, orders, rank_of_stage
from meshwright.planner.search.partition.layout_partition import instance_of, plan_of
from meshwright.planner.search.partition.stage_counts import (
    LongestRun,
    longest_run,
    shares_of,
    virtual_stages,
)
from meshwright.planner.search.search import search
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.nonadditive_stage import ANY_OPTION
from meshwright.planner.solver.partition_problem import Instance, Solution, evaluate_split

TIMETABLES: list[tuple[ScheduleName, int]] = [
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("interleaved-zb", 2),
    ("interleaved-zb", 3),
    ("zbv", 2),
    ("dualpipe-v", 2),
]


@pytest.mark.parametrize(("name", "virtual"), [*TIMETABLES, ("1f1b", 1), ("gpipe", 1)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_no_moment_of_an_order_holds_more_than_is_counted(
    name: ScheduleName, virtual: int, ranks: int, turns: int
) -> None:
    m, stages = turns * ranks, ranks * virtual
    if obstacle(name, stages=stages, micro_batches=m, virtual_stages=virtual):
        pytest.skip("the schedule needs more micro-batches")
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual)
    shape = {"ranks": ranks, "micro_batches": m, "virtual_stages": virtual}
    most_first = most_on_first_stage(name, **shape)
    for rank, order in enumerate(
        orders(name, stages=stages, micro_batches=m, virtual_stages=virtual)
    ):
        own = [stage for stage in range(stages) if home[stage] == rank]
        alive, waiting = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        counted = in_flight_counts(name, rank, **shape)
        for stage, kind, _ in order:
            alive[stage] += kind == "F"
            waiting[stage] += (kind == "I") - (kind == "W")
            behind = list(itertools.accumulate(alive[s] for s in reversed(own)))
            # Of the last j of V stages no more than j / V of what is counted are alive.
            for j, number in enumerate(behind, start=1):
                assert number <= counted.alive * j / virtual
            assert sum(waiting.values()) <= counted.waiting
            if 0 in alive:
                assert alive[0] <= most_first
            if rank == home[-1] and home[0] != home[-1] and virtual > 1:
                # Stages but the last: what a rank holds whose last stage takes the rest.
                full = list(itertools.accumulate(alive[s] for s in reversed(own[:-1])))
                for j, number in enumerate(full, start=1):
                    assert number <= counted.alive * j / (virtual - 1)
            alive[stage] -= kind in "BI"


def test_the_longest_run_is_what_is_shared() -> None:
    assert longest_run(("e", *"b" * 6, "h")) == LongestRun(1, 6, 1)
    assert longest_run(("e", "d", "d", *"m" * 9, "h")) == LongestRun(3, 9, 1)
    assert longest_run(tuple("ab" * 6)) is None
    assert virtual_stages(LongestRun(1, 32, 1), 4, most=8) == [2, 3, 4, 8]
    assert virtual_stages(LongestRun(1, 6, 1), 4, most=8) == [2]
    assert virtual_stages(LongestRun(0, 7, 0), 4, most=8) == []
    assert shares_of(tuple("ab" * 6), "zbv", 2, 2) is None


@pytest.mark.parametrize(("name", "virtual"), TIMETABLES[1:])
@pytest.mark.parametrize("numbers", [(8, 8, 8, 8), (9, 8, 8, 7), (10, 9, 8, 5), (12, 8, 8, 4)])
def test_stages_share_a_rank_evenly_and_in_the_order_of_the_model(
    name: ScheduleName, virtual: int, numbers: tuple[int, ...]
) -> None:
    kinds = ("e", *"b" * 32, "h")
    shares = shares_of(kinds, name, 4, virtual)
    assert shares is not None
    entries = [list(shares.entries[0])] + [[at] for at in range(1, 33)]
    ends = sum(len(entry) for entry in entries[:1])
    extra = [1, 0, 0, 0] if shares.folded else [1, 0, 0, 1]
    cuts = [0, *itertools.accumulate(n + e for n, e in zip(numbers, extra, strict=True))]
    choices = [[0] * len(entry) for entry in shares.entries]

    stages = shares.layer_choices(cuts, choices, [0])

    assert [at for stage in stages for at, _ in stage] == list(range(34))
    assert all(stages) and ends in (1, 2)
    for rank, number in enumerate(numbers):
        own = [stages[s] for s, r in enumerate(shares.home) if r == rank]
        sizes = [sum(1 <= at <= 32 for at, _ in stage) for stage in own]
        assert sum(sizes) == number
        full = sizes[:-1] if shares.is_relieved(rank) else sizes
        assert full == sorted(full)
        if not shares.is_relieved(rank):
            assert max(full) - min(full) <= 1


@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "blocks"),
    [("interleaved", 16, 8, 126), ("interleaved", 4, 2, 6), ("zbv", 4, 2, 6)],
)
def test_the_ends_of_the_model_may_have_stages_of_their_own(
    name: ScheduleName, ranks: int, virtual: int, blocks: int
) -> None:
    shares = shares_of(("e", *"b" * blocks, "h"), name, ranks, virtual)
    assert shares is not None
    cuts = list(itertools.accumulate(shares.fewest_entries, initial=0))
    assert cuts[-1] == len(shares.entries)

    stages = shares.layer_choices(cuts, [[0] * len(entry) for entry in shares.entries], [0])

    assert [[at for at, _ in stage] for stage in stages] == [[at] for at in range(blocks + 2)]
    assert shares_of(("e", *"b" * (blocks - 1), "h"), name, ranks, virtual) is None


@pytest.mark.parametrize("ends", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (2, 3), (4, 2), (4, 5)])
def test_stages_are_those_of_megatron_where_its_ends_count_for_a_block(
    ranks: int, virtual: int, ends: tuple[int, int]
) -> None:
    """By get_num_layers_to_build: every stage has as many, less the embedding's and the loss's."""
    built = [7] * (ranks * virtual)
    built[0] -= ends[0]
    built[-1] -= ends[1]
    shares = shares_of(("e", *"b" * sum(built), "h"), "interleaved", ranks, virtual)
    assert shares is not None

    for rank in range(ranks):
        own = [size for stage, size in enumerate(built) if shares.home[stage] == rank]
        assert shares.sizes(rank, sum(own)) == own


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


def with_memory(node: ClusterSpec, memory_gb: float) -> ClusterSpec:
    group = node.groups[0]
    device = group.accelerator.model_copy(update={"memory_bytes": int(memory_gb * 1e9)})
    return node.model_copy(update={"groups": (group.model_copy(update={"accelerator": device}),)})


def few_blocks(count: int) -> ModelGraph:
    """Return a model with a head that is small beside its blocks."""
    a = resolve_model("llama-3.1-8b").architecture
    assert a is not None
    return graph_of(a.model_copy(update={"layers": count, "vocab_size": 512}), name="few")


def random_solution(instance: Instance, rng: random.Random) -> Solution:
    """Return a split with uneven shares and any options, alike layers in the solver's order."""
    least = [stage.least_layers for stage in instance.stages]
    spare = len(instance.layers) - sum(least)
    some = sorted(rng.randint(0, spare) for _ in least[1:])
    shares = [b - a for a, b in itertools.pairwise([0, *some, spare])]
    cuts = [0, *itertools.accumulate(n + more for n, more in zip(least, shares, strict=True))]
    options: list[int] = []
    for first, end in itertools.pairwise(cuts):
        kinds = instance.layers[first:end]
        taken = {
            k: sorted(rng.choices(range(len(instance.kinds[k])), k=kinds.count(k))) for k in kinds
        }
        options += [taken[kind].pop() for kind in kinds]
    return evaluate_split(instance, cuts, options)


@pytest.mark.spread(2)
@pytest.mark.long(
    "gpt2-xl-interleaved-8",
    "gpt2-xl-interleaved-zb-8",
    "gpt2-xl-interleaved-4",
    "gpt2-xl-interleaved-3",
    "gpt2-xl-interleaved-zb-2",
    "llama-3.1-8b-interleaved-4",
    "llama-3.1-8b-interleaved-zb-8",
    "llama-3.1-8b-interleaved-zb-3",
    "llama-3.1-8b-interleaved-8",
    "llama-3.1-8b-interleaved-zb-2",
)
@pytest.mark.parametrize(
    ("name", "virtual"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("pipedream-2bw", 1),
        *TIMETABLES,
        ("interleaved", 8),
        ("interleaved-zb", 8),
    ],
)
@pytest.mark.parametrize("model_name", ["llama-3.1-8b", "gpt2-xl", "as few blocks as will do"])
def test_a_rank_holds_what_its_prediction_says(
    name: ScheduleName, virtual: int, model_name: str, node: ClusterSpec
) -> None:
    rng = random.Random(f"{name} {virtual} {model_name}")
    few = model_name not in ("llama-3.1-8b", "gpt2-xl")
    model = few_blocks(4 * virtual - 2) if few else resolve_model(model_name)
    job = Job(seq_len=1024, global_batch=64)
    for pipeline, shard, zero, micro_batches, activations in (
        (2, 1, 0, 8, ("keep",)),
        (2, 4, 1, 2, ("keep", "compress")),
        (4, 2, 2, 16, ("keep", "offload")),
        (4, 2, 3, 4, ("keep", "offload", "compress")),
        (1, 8, 3, 1, ("keep", "offload")),
        (1, 8, 2, 8, ("keep",)),
    ):
        shape = {"micro_batches": micro_batches, "virtual_stages": virtual}
        if pipeline > 1 and obstacle(name, stages=pipeline * virtual, **shape):
            continue
        layout = Layout(
            pipeline=pipeline,
            data_shard=shard,
            zero=zero,
            micro_batch=64 // shard // micro_batches,
            micro_batches=micro_batches,
            schedule=name if pipeline > 1 else "1f1b",
            virtual_stages=virtual if pipeline > 1 else 1,
        )
        tables = CostTables(Request(model, node, job), activations=activations)
        costs = tables.costs_of(layout)
        for memory_gb in (1000, 30):
            instance = instance_of(model, with_memory(node, memory_gb), layout, costs)
            sums = replace(instance, used_bytes=None)
            for _ in range(6):
                solution = random_solution(instance, rng)

                plan = plan_of(tables.request, layout, costs, solution)
                predicted = placement_prediction(tables, layout, placements_of(plan, model))

                for stage, prediction in enumerate(predicted.stages):
                    rank = plan.rank_of_stage(stage)
                    used = costs.fixed_bytes + costs.slack * solution.stage_bytes[rank]
                    assert used == pytest.approx(prediction.peak_memory_bytes, rel=1e-9)
                at_least = evaluate_split(sums, solution.cuts, solution.options)
                for least, used in zip(at_least.stage_bytes, solution.stage_bytes, strict=True):
                    assert least <= used * (1 + 1e-9)
                counts_many_like_one(instance, solution, rng)


def ordered_by(kinds: Sequence[int], way: Sequence[int], *, backwards: bool) -> list[int]:
    """Places of a way's options, those of layers of one kind rising or falling."""
    taken = {
        kind: sorted(
            (at for at, other in enumerate(kinds) if other == kind),
            key=lambda at: -way[at] if backwards else way[at],
        )
        for kind in set(kinds)
    }
    return [taken[kind].pop(0) for kind in kinds]


def counts_many_like_one(instance: Instance, solution: Solution, rng: random.Random) -> None:
    """Bytes of many ways at once against those of the split, and of one way at a time."""
    bytes_of = instance.used_bytes
    assert bytes_of is not None and bytes_of.of_many is not None
    for rank, (first, end) in enumerate(itertools.pairwise(solution.cuts)):
        place = rank, range(first), range(first, end)
        ways = [list(solution.options[first:end])]
        for _ in range(3):
            ways.append([rng.randrange(len(instance.options_of(at))) for at in range(first, end)])
        for backwards in (False, True):  # those of a search, whose like layers are in order
            kinds = instance.layers[first:end]
            in_order = [
                [way[at] for at in ordered_by(kinds, way, backwards=backwards)] for way in ways
            ]
            many = bytes_of.of_many(*place, np.array(in_order)).tolist()
            assert many == pytest.approx([bytes_of.of(*place, way) for way in in_order], rel=1e-12)
            alone = [kinds.count(kind) == 1 for kind in kinds]
            least = bytes_of.of_many(*place, np.where(alone, ANY_OPTION, in_order)).tolist()
            assert all(few <= used * (1 + 1e-12) for few, used in zip(least, many, strict=True))

        many = bytes_of.of_many(*place, np.array(ways)).tolist()

        assert many[0] == pytest.approx(solution.stage_bytes[rank], rel=1e-12)
        assert many == pytest.approx([bytes_of.of(*place, way) for way in ways], rel=1e-12)


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
def test_a_rank_with_both_ends_of_the_model_alone_holds_no_less_than_its_sums(
    name: ScheduleName, node: ClusterSpec
) -> None:
    """Its last layer is the head, whose working memory may be less than any block's."""
    model = few_blocks(3)
    layout = Layout(
        pipeline=2, data_shard=4, zero=1, micro_batches=16, schedule=name, virtual_stages=2
    )
    tables = CostTables(Request(model, node, Job(seq_len=4096, global_batch=64)))
    instance = instance_of(model, node, layout, tables.costs_of(layout))
    sums = replace(instance, used_bytes=None)
    cuts, rng = (0, 1, len(instance.layers)), random.Random(name)

    for _ in range(8):
        options = [rng.randrange(len(instance.options_of(at))) for at in range(cuts[-1])]
        used, least = (evaluate_split(one, cuts, options).stage_bytes for one in (instance, sums))
        assert least[0] <= used[0] * (1 + 1e-9)


@pytest.mark.spread(8)
@pytest.mark.parametrize("memory_gb", [80, 55, 40])
@pytest.mark.parametrize(("name", "virtual"), TIMETABLES)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_solution_holds_what_its_prediction_says(
    name: ScheduleName, virtual: int, zero: int, memory_gb: int, node: ClusterSpec
) -> None:
    model = resolve_model("llama-3.1-8b")
    small = with_memory(node, memory_gb)
    job = Job(seq_len=8192, global_batch=32)
    layout = Layout(
        pipeline=4,
        data_shard=2,
        zero=zero,
        schedule=name,
        virtual_stages=virtual,
        micro_batches=16,
    )
    tables = CostTables(Request(model, small, job), activations=("keep", "offload"))
    costs = tables.costs_of(layout)
    found = solve(instance_of(model, small, layout, costs))
    if not isinstance(found, Solution):
        pytest.skip("nothing fits")

    plan = plan_of(tables.request, layout, costs, found)
    predicted = placement_prediction(tables, layout, placements_of(plan, model))

    assert predicted.fits
    for stage, prediction in enumerate(predicted.stages):
        counted = costs.fixed_bytes + costs.slack * found.stage_bytes[plan.rank_of_stage(stage)]
        assert counted == pytest.approx(prediction.peak_memory_bytes, rel=1e-9)
    closed_s = found.objective_s + costs.step_s
    assert 0.85 * closed_s <= predicted.step_time_s <= 1.15 * closed_s


@pytest.mark.matrix
def test_zero_bubble_plans_that_fit_are_found(node: ClusterSpec) -> None:
    """Stages of 9, 8, 9 and 8 layers, nothing recomputed, fill 67 of 80 GiB.

    They are the fastest where sums of gradients take no time.
    """
    model, job = resolve_model("llama-3.1-8b"), Job(seq_len=4096, global_batch=64)
    framework = with_figures(native(), {"sharding.accumulation": "none"})

    answer = search(Request(model, node, job, framework=framework))

    assert answer.closed_form.objective_s <= 3.979736
    assert answer.closed_form_bound_s == answer.closed_form.objective_s


# --- what a rank holds at least -----------------------------------------------------------------


def random_layouts(cluster: ClusterSpec, model: ModelGraph, count: int) -> list[Layout]:
    """Return layouts of every schedule, whose layers may lie on the host."""
    rng, found = random.Random(5), list[Layout]()
    while len(found) < count:
        pipeline = rng.choice((1, 1, 2, 4))
        data = cluster.devices // pipeline
        name, virtual = rng.choice([*TIMETABLES, ("1f1b", 1), ("gpipe", 1)])
        name, virtual = ("1f1b", 1) if pipeline == 1 else (name, virtual)
        micro_batches = rng.choice((1, 4, 8))
        shape = {"stages": pipeline * virtual, "micro_batches": micro_batches}
        if pipeline > 1 and obstacle(name, virtual_stages=virtual, **shape):
            continue
        if virtual > 1 and shares_of(model.chain_kinds, name, pipeline, virtual) is None:
            continue
        found.append(
            Layout(
                pipeline=pipeline,
                data_shard=data,
                zero=rng.randrange(1, 4) if data > 1 else 0,
                schedule=name,
                virtual_stages=virtual,
                micro_batch=rng.choice((1, 2)),
                micro_batches=micro_batches,
            )
        )
    return found


def test_no_options_of_a_rank_hold_less_than_the_least() -> None:
    """Of layers on the device, on the host and in 8 bits, against the bytes of predictions."""
    rng, model = random.Random(7), resolve_model("llama-3.2-1b")
    cluster = resolve_cluster("8xa100-sxm-40gb")
    request = Request(model=model, cluster=cluster, job=Job(seq_len=1024, global_batch=64))
    tables = CostTables(request, ("keep", "offload", "compress"))
    least_share = math.inf
    for layout in random_layouts(cluster, model, 40):
        instance = instance_of(model, cluster, layout, tables.costs_of(layout))
        used = instance.used_bytes
        assert used is not None and used.fewest is not None
        cuts = [round(s * len(instance.layers) / layout.pipeline) for s in range(layout.pipeline)]
        for rank, (first, end) in enumerate(itertools.pairwise([*cuts, len(instance.layers)])):
            before, own = range(first), range(first, end)
            least = used.fewest(rank, before, own)
            for _ in range(12):
                options = [rng.randrange(len(instance.options_of(at))) for at in own]
                if rng.random() < 0.5:  # all layers of a kind alike, near the least
                    each = {
                        instance.layers[at]: option for at, option in zip(own, options, strict=True)
                    }
                    options = [each[instance.layers[at]] for at in own]
                holds = used.of(rank, before, own, options)
                assert least <= holds * (1 + 1e-9)
                least_share = min(least_share, holds / least)
                if len(own) > instance.stages[rank].least_layers and used.grows:
                    without_first = used.of(rank, [*before, first], own[1:], options[1:])
                    without_last = used.of(rank, before, own[:-1], options[:-1])
                    assert max(without_first, without_last) <= holds * (1 + 1e-9)
    assert least_share < 1.01  # and it is close


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("model", "cluster", "allow"),
    [
        ("gpt-neox-20b", "8xa100-sxm-40gb", "offload"),
        ("gpt-neox-20b", "8xa100-sxm-40gb", "offload,compress"),
        pytest.param("gemma-2-9b", "4xrtx-4090", "offload", marks=pytest.mark.matrix),
    ],
)
def test_layouts_that_do_not_fit_are_not_left_open(model: str, cluster: str, allow: str) -> None:
    request = Request(
        model=resolve_model(model),
        cluster=resolve_cluster(cluster),
        job=Job(seq_len=2048, global_batch=64),
        pins=Pins(allowed=read_allowances([allow])),
    )

    answer = search(request)

    assert answer.closed_form_bound_s == answer.closed_form.objective_s
    assert "not excluded" not in answer.certificate.counts
