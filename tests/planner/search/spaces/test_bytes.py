"""What the search counts of a rank of a graph and of unequal devices is exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.cut_tensors import in_order
from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.layer_strategy import StrategyCost
from meshwright.planner.costs.layout_costs import LayoutCosts
from meshwright.planner.costs.predict import placement_prediction
from meshwright.planner.costs.stage_placement import branching
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.spaces.mixed import GraphSpace, MixedSpace
from meshwright.planner.solver.partition_problem import Instance, UsedBytes
from tests.planner.search.spaces.every_layout import layouts_of
from tests.planner.search.spaces.test_graph import JOB, random_model, unet
from tests.planner.search.spaces.test_mixed import llama

TWO = "2xa100-sxm-40gb"
MIXED = "1xa100-sxm-40gb+2xv100-sxm-32gb"
Choices = dict[str, tuple[StrategyCost, ...]]


def choices_of(costs: LayoutCosts, layout: Layout) -> Choices:
    return {kind: allowed_options(table, layout, None) for kind, table in costs.kinds.items()}


def peak_bytes(costs: LayoutCosts, dynamic_bytes: float) -> float:
    """Return what a rank holds with what its process and its allocator take."""
    return costs.fixed_bytes + costs.slack * dynamic_bytes


def sums(instance: Instance, stage: int, held: Sequence[int], options: Sequence[int]) -> float:
    room = instance.stages[stage]
    chosen = [instance.options_of(at)[o] for at, o in zip(held, options, strict=True)]
    summed_bytes = sum(room.summed_bytes(o) for o in chosen)
    return room.fixed_bytes + summed_bytes + max(o.transient_bytes for o in chosen)


def cut_at_random(rng: random.Random, layers: int, stages: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]


def candidates(model: ModelGraph, cluster: str, job: Job = JOB) -> Candidates:
    return Candidates(Request(model, resolve_cluster(cluster), job))


def order_of(rng: random.Random, model: ModelGraph) -> list[str]:
    """Return the layers in any order in which they can run."""
    left, done = [name for name, _ in model.chain], []
    while left:
        ready = [
            name
            for name in left
            if all(edge.source in done for edge in model.edges if edge.target == name)
        ]
        done.append(rng.choice(ready))
        left.remove(done[-1])
    return done


@pytest.mark.parametrize("seed", range(12))
def test_a_stage_of_a_graph_holds_what_its_prediction_says(seed: int) -> None:
    rng = random.Random(seed)
    model = in_order(random_model(seed))
    every = candidates(model, TWO)
    space = GraphSpace(every)
    layouts = [one for one in layouts_of(space) if one.pipeline > 1]
    names = [name for name, _ in model.chain]
    for layout in rng.sample(layouts, min(6, len(layouts))):
        costs, problem = every.costs(layout), space.instance(layout)
        chain = problem.chain
        assert isinstance(chain.used_bytes, UsedBytes)
        cuts = cut_at_random(rng, len(names), layout.pipeline)
        taken = order_of(rng, model)
        stages = [sorted(map(names.index, taken[a:b])) for a, b in pairwise(cuts)]
        choices = choices_of(costs, layout)
        options = [rng.randrange(len(choices[layer.kind])) for _, layer in model.chain]
        prediction = placement_prediction(
            every.tables,
            layout,
            [
                tuple((kind, cost.recompute, cost.activations) for kind, cost in placed)
                for held in stages
                for placed in [
                    [
                        (model.chain_kinds[at], choices[model.chain_kinds[at]][options[at]])
                        for at in held
                    ]
                ]
            ],
            branching(every.tables, layout, [[names[at] for at in held] for held in stages]),
        )
        before: list[int] = []
        for s, held in enumerate(stages):
            own = [options[at] for at in held]
            used = chain.used_bytes.of(s, before, held, own)
            peak = prediction.stages[s].peak_memory_bytes
            assert peak_bytes(costs, used) == pytest.approx(peak, rel=1e-12)
            assert sums(chain, s, held, own) <= used * (1 + 1e-9)
            before += held


@pytest.mark.parametrize("model", [llama(6), unet(2)], ids=lambda model: model.name)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_of_any_group_holds_what_its_prediction_says(model: ModelGraph, seed: int) -> None:
    rng = random.Random(seed)
    cluster = resolve_cluster(MIXED)
    job = Job(seq_len=512, global_batch=12, precision="fp32")
    request = Request(model, cluster, job)
    space = (GraphSpace if model.edges else MixedSpace)(GroupCandidates(request))
    groups = GroupCosts(request)
    names = [name for name, _ in space.ordered.chain]
    layouts = [one for one in layouts_of(space) if one.virtual_stages == 1 and one.pipeline > 1]
    for layout in rng.sample(layouts, min(6, len(layouts))):
        numbers = [name for name, count in groups.stages_of(layout).items() for _ in range(count)]
        rng.shuffle(numbers)
        chains = space.chains(layout)
        cuts = cut_at_random(rng, len(names), layout.pipeline)
        stages = [list(range(a, b)) for a, b in pairwise(cuts)]
        kinds = space.ordered.chain_kinds
        placements, options = [], []
        for held, group in zip(stages, numbers, strict=True):
            choices = choices_of(groups.tables[group].costs_of(layout), layout)
            own = [rng.randrange(len(choices[kinds[at]])) for at in held]
            options.append(own)
            chosen = [choices[kinds[at]][o] for at, o in zip(held, own, strict=True)]
            placements.append(
                tuple(
                    (kinds[at], cost.recompute, cost.activations)
                    for at, cost in zip(held, chosen, strict=True)
                )
            )
        by_name = [[names[at] for at in held] for held in stages] if model.edges else None
        prediction = placement_prediction(
            groups.tables[numbers[0]], layout, placements, groups.seats(layout, numbers, by_name)
        )
        for s, (held, group) in enumerate(zip(stages, numbers, strict=True)):
            costs, chain = groups.tables[group].costs_of(layout), chains[group]
            assert chain.used_bytes is not None
            used = chain.used_bytes.of(s, range(held[0]), held, options[s])
            peak = prediction.stages[s].peak_memory_bytes
            assert peak_bytes(costs, used) == pytest.approx(peak, rel=1e-12)
            assert sums(chain, s, held, options[s]) <= used * (1 + 1e-9)
