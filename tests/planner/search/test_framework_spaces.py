"""The search over each framework's space, against a list of all of its plans.

What each framework executes is written out here once more, from its documentation; the list goes
through every layout that keeps it, every split of stages and every recomputation.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.framework_space import EVERYTHING
from meshwright.planner.documents.plan import INSIDE_OUT, Job, Layout
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.frameworks.native_limits import limit
from meshwright.planner.requests.pins import Pins, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.simulated_optimum import of_chain
from meshwright.planner.search.partition.layer_options import recomputes_of
from meshwright.planner.search.partition.layout_partition import instance_of
from meshwright.planner.search.plan_candidate import candidate_of
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layouts
from meshwright.planner.solver.partition_problem import Solution, evaluate_split, fits
from meshwright.planner.solver.requirements import read_requirements

MODEL = resolve_model("llama-3.2-1b")
BLOCKS = 16
CLUSTER = resolve_cluster("4xa10g")
JOB = Job(seq_len=4096, global_batch=16)
Executes = Callable[[Layout], bool]
Rule = Callable[[list[int]], bool]
"""Whether a framework makes stages of so many blocks."""


def any_stages(_: list[int]) -> bool:
    return True


def even(blocks: list[int]) -> bool:
    return len(set(blocks)) == 1


def even_but_ends(blocks: list[int]) -> bool:
    return min(blocks) > 0 and len(set(blocks[1:-1])) <= 1


def as_nanotron(blocks: list[int]) -> bool:
    """Stages are closed once the products so far pass their share; the head counts, the embedding
    does not.  Of Llama-3.2-1B a block has 4 x 2048 x 2048 + 3 x 8192 x 2048 weights in products (so
    many does nanotron count), the head 128256 x 2048."""
    block, head = 4 * 2048 * 2048 + 3 * 8192 * 2048, 128256 * 2048
    whole, stages = BLOCKS * block + head, len(blocks)
    wanted = [0] * stages
    stage = 0
    for number in range(1, BLOCKS + 1):
        wanted[stage] += 1
        if stage < stages - 1 and number * block >= whole * (stage + 1) / stages:
            stage += 1
    return blocks == wanted


def torchtitan(layout: Layout) -> bool:
    parallel = layout.tensor * layout.pipeline > 1
    copies = layout.data * layout.context
    if layout.data > 1 and layout.zero not in (0, 2, 3):
        return False
    if layout.zero == 0 and copies > 1 and (parallel or layout.context > 1):
        return False  # DistributedDataParallel goes with nothing else
    if parallel and layout.data_shard * layout.context == 1:
        return False  # 16 bits come with FSDP
    schedules = ("1f1b", "gpipe", "interleaved", "interleaved-zb", "zbv", "dualpipe-v")
    return layout.schedule in schedules and layout.virtual_stages <= 4


def megatron(layout: Layout) -> bool:
    whole = layout.zero == 0 or (layout.zero == 1 and layout.data_replicate == 1)
    return whole and layout.schedule in ("1f1b", "interleaved")


def nanotron(layout: Layout) -> bool:
    whole = layout.zero == 0 or (layout.zero == 1 and layout.data_replicate == 1)
    return whole and layout.schedule == "1f1b" and layout.context == 1


def of_data(layout: Layout) -> bool:
    return layout.tensor * layout.context * layout.pipeline == 1


def deepspeed(layout: Layout) -> bool:
    return of_data(layout) and (layout.zero == 0 or layout.data_replicate == 1)


def fsdp(layout: Layout) -> bool:
    return of_data(layout) and layout.zero >= 2


FRAMEWORKS: dict[str, tuple[Executes, Rule, tuple[Recompute, ...]]] = {
    "torchtitan": (torchtitan, any_stages, ("none", "selective", "full")),
    "megatron": (megatron, even_but_ends, ("none", "full")),
    "nanotron": (nanotron, as_nanotron, ("none", "full")),
    "deepspeed": (deepspeed, even, ("none", "full")),
    "fsdp": (fsdp, even, ("none", "full")),
}


def shared(blocks: list[int], layout: Layout, rule: Rule) -> bool:
    """Whether ranks of several stages have equal ones, the embedding or the head counted or not."""
    counted = (0, 1) if rule is even_but_ends else (0,)
    for front, back in itertools.product(counted, counted):
        sizes = [blocks[0] + front, *blocks[1:-1], blocks[-1] + back]
        if even(sizes) and sizes[0] % layout.virtual_stages == 0:
            return True
    return False


def splits(layout: Layout, rule: Rule, least: list[int], entries: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts of a chain among ranks, by a rule of stages; a rank has so many at least.

    The chain is embedding, blocks and head; with one entry fewer both ends are one, on a rank.
    """
    for inner in itertools.combinations(range(1, entries), layout.pipeline - 1):
        cuts = (0, *inner, entries)
        held = [end - first for first, end in pairwise(cuts)]
        if any(size < fewest for size, fewest in zip(held, least, strict=True)):
            continue
        blocks = [held[0] - 1, *held[1:]]
        blocks[-1] -= entries == BLOCKS + 2
        kept = rule(blocks) if layout.virtual_stages == 1 else shared(blocks, layout, rule)
        if rule is any_stages or layout.pipeline == 1 or kept:
            yield cuts


def least_s(
    request: Request, rule: Rule, recompute: tuple[Recompute, ...], runs: Executes
) -> float:
    """Return the closed form of the best plan of all that fit."""
    tables, best_s = CostTables(request), math.inf
    plain = replace(request.pins, compile="none", loss="full", prefetch=0)
    every = list(layouts(Request(MODEL, CLUSTER, JOB, replace(plain, zero=None))))
    if request.framework.name == "torchtitan":
        every = [replace(one, compile="block") for one in every]
        # FSDP's ranks are those of data_shard and context together.
        alone = [one for one in every if one.zero == 0 and one.context > 1]
        every += [replace(one, zero=level) for one in alone for level in (2, 3)]
    for layout in every:
        if plain.zero not in (None, layout.zero):
            continue
        if layout.order != INSIDE_OUT or not runs(layout):
            continue
        if limit(MODEL, request.cluster, JOB, layout, EVERYTHING) is not None:
            continue
        costs = tables.costs_of(layout)
        instance = instance_of(MODEL, request.cluster, layout, costs)
        names = [[option.name for option in table] for table in instance.kinds]
        least = [stage.least_layers for stage in instance.stages]
        entries = len(instance.layers)
        for cuts in splits(layout, rule, least, entries):
            for chosen in recomputed(
                request.framework.name, recompute, folded=entries < BLOCKS + 2
            ):
                options = [
                    names[kind].index(name)
                    for kind, name in zip(instance.layers, chosen, strict=True)
                ]
                found = evaluate_split(instance, cuts, options)
                if found.objective_s + costs.step_s < best_s and fits(instance, found):
                    best_s = found.objective_s + costs.step_s
    return best_s


def recomputed(
    framework: str, kinds: tuple[Recompute, ...], *, folded: bool
) -> Iterator[list[str]]:
    """Yield what each layer recomputes; of FSDP's blocks, which are alike, so many of them."""
    for kind in kinds if framework != "fsdp" else ():
        yield ["none + none" if folded else "none", *[kind] * BLOCKS, *["none"] * (not folded)]
    for full in range(BLOCKS + 1) if framework == "fsdp" else ():
        yield ["none", *["full"] * full, *["none"] * (BLOCKS - full), "none"]


@pytest.mark.spread(4)
@pytest.mark.long(
    "torchtitan-pp=2,zero=3-0.62", "megatron--1.0", "torchtitan-pp=2,schedule=zbv-0.62"
)
@pytest.mark.long(
    "torchtitan--1.0",
    "torchtitan-pp=2-1.0",
    "torchtitan-pp=2-0.62",
    "torchtitan-pp=2,zero=3-1.0",
    "torchtitan--0.62",
    "nanotron-pp=4-0.62",
    "megatron-pp=2-1.0",
    "torchtitan-pp=2,schedule=zbv-1.0",
)
@pytest.mark.parametrize("memory", [1.0, 0.62])
@pytest.mark.parametrize(
    ("framework", "fix"),
    [
        *((framework, "") for framework in FRAMEWORKS),
        *(("torchtitan", fix) for fix in ("pp=2", "pp=2,zero=3", "pp=2,schedule=zbv")),
        *(("megatron", fix) for fix in ("pp=2", "pp=4", "pp=2,v=4", "tp=2")),
        *(("nanotron", fix) for fix in ("pp=2", "pp=4", "tp=2")),
        *((framework, "zero=3") for framework in ("deepspeed", "fsdp")),
    ],
)
def test_no_plan_of_the_space_that_fits_is_faster(framework: str, fix: str, memory: float) -> None:
    runs, rule, recompute = FRAMEWORKS[framework]
    [group] = CLUSTER.groups
    device = group.accelerator.model_copy(
        update={"memory_bytes": int(memory * group.accelerator.memory_bytes)}
    )
    cluster = CLUSTER.model_copy(
        update={"groups": (group.model_copy(update={"accelerator": device}),)}
    )
    pins = read_pins([fix] if fix else [])
    request = Request.create(
        MODEL, cluster, seq_len=4096, global_batch=16, framework=framework, pins=pins
    )

    best_s = least_s(request, rule, recompute, runs)
    if best_s == math.inf:
        with pytest.raises(NoPlanFits):
            search(request)
        return
    answer = search(request)

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    plan = answer.plan
    assert plan.framework == framework
    assert runs(plan.layout)
    assert predict(plan, MODEL, cluster).fits


@pytest.mark.spread(1)
@pytest.mark.parametrize("framework", ["megatron", "nanotron", "torchtitan"])
@pytest.mark.matrix
def test_the_integer_program_finds_the_same_optimum(framework: str) -> None:
    cluster = resolve_cluster("8xa10g")
    pins = read_pins(["pp=4"])
    request = Request.create(MODEL, cluster, global_batch=64, framework=framework, pins=pins)

    exact, program = search(request), search(request, solver="ilp")

    # Where bytes are more than sums the program may leave a gap, and no better split.
    assert program.certificate.lower_bound_s <= exact.certificate.objective_s * (1 + 1e-6)
    assert program.closed_form.objective_s == pytest.approx(exact.closed_form.objective_s, rel=1e-6)


@pytest.mark.matrix
def test_what_is_required_of_stages_and_the_rule_of_a_framework_hold_together() -> None:
    names = [name for name, _ in MODEL.chain]
    required = read_requirements(["at most 4 layers on stage 0"], names)
    pins = replace(read_pins(["pp=4"]), require=required)
    request = Request.create(
        MODEL, resolve_cluster("8xa10g"), global_batch=64, framework="megatron", pins=pins
    )

    answer = search(request)

    sizes = [len(stage.layers) for stage in answer.plan.stages]
    assert sizes[0] <= 4
    assert even_but_ends([sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1])
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    with pytest.raises(NoPlanFits, match="at most 4 layers on stage 0"):
        search(replace(request, framework=frameworks()["nanotron"]))


def test_the_best_of_several_meshes_are_plans_of_the_framework() -> None:
    request = Request.create(
        MODEL, resolve_cluster("8xa10g"), global_batch=64, framework="megatron"
    )

    answer = search(request, top=3)

    assert len({ranked.plan.layout.text() for ranked in answer.top}) == 3
    steps_s = [ranked.objective_s for ranked in answer.top]
    assert min(steps_s) == pytest.approx(answer.closed_form.objective_s)
    assert all(megatron(ranked.plan.layout) for ranked in answer.top)
    assert {ranked.plan.framework for ranked in answer.top} == {"megatron"}


@pytest.mark.parametrize("name", ["megatron", "megatron-deepspeed"])
@pytest.mark.long("megatron-deepspeed")
def test_a_vocabulary_that_is_padded_is_divided(name: str) -> None:
    """GPT-3 was trained with 8 tensor ranks; its 50,257 words are no multiple of 2."""
    model, cluster = resolve_model("gpt3-175b"), resolve_cluster("16x8xa100-sxm-80gb")
    job = Job(seq_len=2048, global_batch=256)
    layout = Layout(tensor=8, pipeline=16, micro_batches=256)
    layout = replace(layout, sequence_parallel=name == "megatron")

    assert (
        limit(model, cluster, job, layout, EVERYTHING)
        == "mesh.tensor: 8 does not divide vocab_size 50257"
    )
    assert rules_of(frameworks()[name])(model, cluster, job, layout) is None
    pins = Pins(tensor=8)
    found = search(Request(model, cluster, job, pins=pins, framework=frameworks()[name]))
    assert found.plan.mesh.tensor == 8
    assert found.closed_form_bound_s == pytest.approx(found.closed_form.objective_s, rel=1e-9)


@pytest.mark.parametrize(
    ("framework", "fix"), [("megatron", "pp=2"), ("megatron", "pp=4"), ("nanotron", "pp=2")]
)
@pytest.mark.long("megatron-pp=4")
def test_no_cuts_by_the_rule_of_a_framework_simulate_below_their_bound(
    framework: str, fix: str
) -> None:
    """And the program of a layout finds the fastest of them."""
    _, rule, _ = FRAMEWORKS[framework]
    request = Request.create(
        MODEL, CLUSTER, seq_len=4096, global_batch=16, framework=framework, pins=read_pins([fix])
    )
    (candidates,) = [
        Candidates(request, recompute=recompute)
        for recompute in recomputes_of(MODEL, request.space, "none")
    ]
    ratios = []
    rows = 0
    for layout in list(candidates.layouts())[::3]:
        instance = candidates.instance(layout)
        least = [stage.least_layers for stage in instance.stages]
        none = [0] * len(instance.layers)
        step_s = {
            cuts: found.step_time_s
            for cuts in splits(layout, rule, least, len(instance.layers))
            for found in [
                candidate_of(candidates, layout, evaluate_split(instance, cuts, none)).prediction
            ]
            if found.fits
        }
        fastest_s = min(step_s.values(), default=math.inf)
        choices = of_chain(candidates, layout, candidates.problem_of(layout), 1e3, ways=20_000)
        if choices is None or fastest_s == math.inf:
            continue
        ratios.append(choices.cut_s(1e3) / fastest_s)
        if 2 * layout.micro_batches * layout.stages > 300:
            continue

        tried: list[tuple[int, ...]] = []

        def simulated(split: Solution, tried: Any = tried, step_s: Any = step_s) -> float:
            tried.append(split.cuts)
            seconds: float = step_s[split.cuts]  # the rule has it
            return seconds

        least_s = choices.optimum(1e3, simulated, nodes=1_000)
        assert tried and least_s == pytest.approx(fastest_s, rel=1e-5)
        assert least_s <= fastest_s * (1 + 1e-9)
        rows += len(instance.sizes) > 1
    assert ratios
    assert rows or fix == "pp=2"
    assert 0.7 < statistics.median(ratios) <= max(ratios) <= 1 + 1e-9
