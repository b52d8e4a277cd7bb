"""The search for graphs of layers, against every layout, split and choice there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.cut_tensors import crossings, in_order, sink_kind, widest_bytes
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import layout_prediction, predict
from meshwright.planner.documents.model import Edge, Layer, LayerTrace, ModelGraph
from meshwright.planner.documents.plan import Job, Layout, ScheduleName
from meshwright.planner.documents.profile import Birth, LayerMeasurement, Profile
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.schedule import orders
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.goals import SplitSolution
from meshwright.planner.search.search import MARGIN, search
from meshwright.planner.search.spaces.mixed import GraphSpace
from meshwright.planner.solver.requirements import read_requirements
from tests.planner.search.spaces.every_layout import layouts_of
from tests.planner.solver.small_graphs import least_objective_s, objective_s, splits

JOB = Job(seq_len=64, global_batch=12, precision="fp32")
TWO = "2xa100-sxm-40gb"
FREE = Pins()


def layer(name: str, *, kind: str | None = None, scale: float = 1.0, output: int = 50) -> Layer:
    """Return a layer of some billions of FLOPs; `output` in MB."""
    return Layer(
        name=name,
        kind=kind or name,
        parameters=int(5e6 * scale),
        trace=LayerTrace(
            forward_flops=2e11 * scale,
            stored_bytes=int(4e8 * scale),
            transient_bytes=int(1e8 * scale),
            output_bytes=output * 10**6,
        ),
    )


def graph(layers: list[Layer], edges: list[tuple[str, str]]) -> ModelGraph:
    return ModelGraph(
        name="graph",
        layers=tuple(layers),
        edges=tuple(Edge(source=a, target=b) for a, b in edges),
    )


def random_model(seed: int) -> ModelGraph:
    """At most 6 layers, of which the last reads all that nobody else does; listed in any order."""
    rng = random.Random(seed)
    count = rng.randint(3, 6)
    names = [f"l{n}" for n in range(count)]
    edges = [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.35]
    read = {source for source, _ in edges}
    edges += [(name, names[-1]) for name in names[:-1] if name not in read]
    layers = [
        layer(name, scale=rng.choice([0.5, 1.0, rng.uniform(0.2, 3)]), output=rng.randint(1, 400))
        for name in names
    ]
    rng.shuffle(layers)
    return graph(layers, edges)


def unet(depth: int = 4) -> ModelGraph:
    """Levels on the way down, each wider read on the way up."""
    downs = [f"down{n}" for n in range(depth)]
    ups = [f"up{n}" for n in reversed(range(depth))]
    names = [*downs, "middle", *ups, "head"]
    edges = [*itertools.pairwise(names), *zip(downs, reversed(ups), strict=True)]
    widths = {name: 200 // 2 ** int(name[-1]) for name in (*downs, *ups)}
    return graph([layer(name, output=widths.get(name, 10)) for name in names], edges)


def towers(*lengths: int) -> ModelGraph:
    layers, edges = [], []
    for tower, length in enumerate(lengths):
        names = [f"t{tower}_{n}" for n in range(length)]
        layers += [layer(name, kind=f"block{tower}", scale=1 + 0.3 * tower) for name in names]
        edges += [*itertools.pairwise(names), (names[-1], "join")]
    return graph([*layers, layer("join", scale=0.2)], edges)


def candidates(model: ModelGraph, cluster: str, pins: Pins = FREE) -> Candidates:
    return Candidates(Request(model, resolve_cluster(cluster), JOB, pins=pins))


def searched(model: ModelGraph, cluster: str, pins: Pins = FREE) -> Answer:
    return search(Request(model, resolve_cluster(cluster), JOB, pins=pins))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "seed", [*range(1, 6), *(pytest.param(s, marks=pytest.mark.matrix) for s in (0, *range(6, 16)))]
)
def test_no_layout_split_and_options_beat_the_plan(seed: int) -> None:
    model = random_model(seed)
    cluster = random.Random(seed).choice([TWO, "3xv100-sxm-16gb"])
    every = candidates(model, cluster)
    space = GraphSpace(every)
    best_s = math.inf
    for layout in layouts_of(space):
        costs = every.costs(layout)
        least_s = least_objective_s(space.instance(layout)) + costs.step_s
        assert every.communication_s(layout) <= least_s * (1 + 1e-9)
        best_s = min(best_s, least_s)

    answer = searched(model, cluster)

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert answer.prediction.fits
    answer.plan.check_model(model)


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(s, marks=pytest.mark.matrix) for s in (0, 3, 4))]
)
def test_no_treatment_of_activations_beats_the_plan(seed: int) -> None:
    model = random_model(seed)
    schedule: ScheduleName = "zb-h1" if seed % 2 else "1f1b"
    pins = Pins(
        pipeline=2,
        schedule=schedule,
        micro_batch=random.Random(seed).choice([4, 6]),
        data=1,
        offload="none",
        gradient_compression="full",
        allowed=frozenset({"offload", "compress"}),
    )
    every = candidates(model, TWO, pins)
    space = GraphSpace(every)
    (layout,) = layouts_of(space)

    answer = searched(model, TWO, pins)

    best_s = least_objective_s(space.instance(layout)) + every.costs(layout).step_s
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert answer.prediction.fits
    again = predict(answer.plan, model, resolve_cluster(TWO))
    assert again.step_time_s == answer.prediction.step_time_s
    assert again.stages == answer.prediction.stages


@pytest.mark.parametrize(("host_bytes", "fits"), [(None, True), (16 << 30, True), (8 << 30, False)])
def test_activations_of_a_graph_go_to_hosts_that_have_room(
    host_bytes: int | None, *, fits: bool
) -> None:
    """Two stages on one node: against all splits with all choices that its memory allows."""
    layers = [layer(f"l{n}", scale=1 + n % 2, output=20) for n in range(4)]
    model = graph(layers, [("l0", "l1"), ("l0", "l2"), ("l1", "l3"), ("l2", "l3")])
    plain = resolve_cluster("2xv100-sxm-16gb")
    (group,) = plain.groups
    machine = plain.model_copy(
        update={"groups": (group.model_copy(update={"host_memory_bytes": host_bytes}),)}
    )
    pins = Pins(
        pipeline=2,
        schedule="gpipe",
        micro_batch=4,
        recompute="none",
        offload="none",
        allowed=frozenset({"offload"}),
    )
    space = GraphSpace(Candidates(Request(model, machine, JOB, pins=pins)))
    (layout,) = layouts_of(space)
    problem, (costs,) = space.instance(layout), space.costs_of(layout)
    room = costs.host_share * host_bytes if host_bytes else math.inf
    tables = [problem.chain.options_of(at) for at in range(4)]
    least_s = math.inf
    for options in itertools.product(*map(range, map(len, tables))):
        on_host = sum(table[own].host_bytes for table, own in zip(tables, options, strict=True))
        if layout.micro_batches * on_host <= room:
            every_s = (objective_s(problem, split, options) for split in splits(problem))
            least_s = min(least_s, *every_s)

    found = space.solve(layout, math.inf)

    assert isinstance(found, SplitSolution) == fits == (least_s < math.inf)
    if isinstance(found, SplitSolution):
        assert found.objective_s == pytest.approx(least_s + costs.step_s, rel=1e-9)
        plan = space.candidate_of(found)
        assert plan.prediction.fits
        chosen = [item.activations for stage in plan.plan.stages for item in stage.layers]
        assert chosen.count("offload") == 2


@pytest.mark.parametrize("saving", [{"offload": "optimizer"}, {"gradient_compression": "bf16"}])
def test_states_on_the_host_and_narrow_gradients_are_planned_on_graphs(
    saving: dict[str, Any],
) -> None:
    model, cluster = random_model(1), "4xa100-sxm-40gb"
    pins = Pins(pipeline=2, schedule="1f1b", micro_batch=2, data=2, zero=1, **saving)
    every = candidates(model, cluster, pins)
    space = GraphSpace(every)
    (layout,) = layouts_of(space)
    best_s = least_objective_s(space.instance(layout)) + every.costs(layout).step_s

    answer = searched(model, cluster, pins)

    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    again = predict(answer.plan, model, resolve_cluster(cluster))
    assert again.step_time_s == answer.prediction.step_time_s
    assert again.stages == answer.prediction.stages
    allowed = Pins(pipeline=2, allowed=frozenset({"offload", "compress"}))
    layouts = list(candidates(model, cluster, allowed).layouts())
    assert {one.offload for one in layouts} == {"none", "optimizer", "parameters"}
    assert {one.gradient_compression for one in layouts} > {"full", "bf16"}


def test_a_profile_of_a_graph_is_planned_with() -> None:
    model, machine = unet(), resolve_cluster(TWO)
    pins = Pins(pipeline=2, micro_batch=1, schedule="1f1b")
    figures = (
        CostTables(Request(model, machine, JOB)).costs_of(Layout(micro_batches=12)).parts["down0"]
    )
    slow = Profile(
        model=model.name,
        model_digest=model.digest,
        birth=Birth(
            command="by hand",
            date="2026-11-21",
            host="none",
            device="none",
            ranks=1,
            threads_per_rank=1,
            software={},
        ),
        layers=tuple(
            LayerMeasurement(
                kind="down0",
                tensor=1,
                sequence_parallel=False,
                micro_batch=1,
                seq_len=JOB.seq_len,
                precision=JOB.precision,
                recompute=part.recompute,
                forward_s=5 * part.figures.whole_forward_s,
                backward_s=5 * part.figures.whole_backward_s,
                stored_bytes=int(part.figures.stored_bytes),
                forward_transient_bytes=int(part.figures.forward_transient_bytes),
                backward_transient_bytes=int(part.figures.backward_transient_bytes),
                spread=0.0,
                samples=3,
            )
            for part in figures
        ),
    )

    plain = searched(model, TWO, pins)
    answer = search(Request(model, machine, JOB, pins=pins, profile=slow))

    assert len(answer.plan.stages[0].layers) < len(plain.plan.stages[0].layers)
    assert predict(answer.plan, model, machine, slow) == answer.prediction
    assert any(one.provenance == "measured" for one in answer.prediction.assumptions) or any(
        "profile of" in one.source for one in answer.prediction.assumptions
    )


@pytest.mark.parametrize("model", [unet(), towers(4, 3), random_model(3)], ids=lambda m: m.name)
def test_a_boundary_costs_all_tensors_that_cross_it(model: ModelGraph) -> None:
    answer = searched(model, "4xa100-sxm-40gb", Pins(pipeline=2, schedule="1f1b"))
    plan = answer.plan
    tables = CostTables(Request(model, resolve_cluster("4xa100-sxm-40gb"), JOB))
    costs = tables.costs_of(plan.layout)
    kinds = {name: one.kind for name, one in model.chain}
    outputs = {name: tables.output_bytes(plan.layout)[kind] for name, kind in kinds.items()}
    held = [[item.layer for item in stage.layers] for stage in plan.stages]
    crossing = {
        source for source, target in model.graph.edges if source in held[0] and target in held[1]
    }
    assert set(crossings(model, held)[0]) == crossing
    crossing_s = sum(tables.crossing_s(plan.layout, [outputs[name]]) for name in crossing)

    stage_s, sync_s = [], []
    for stage in plan.stages:
        chosen = [costs.kinds[kinds[p.layer]][RECOMPUTES.index(p.recompute)] for p in stage.layers]
        # A stage has two actions; the last layer's own seconds have one of the last stage's.
        layers_s = sum(cost.forward_s + cost.backward_s for cost in chosen)
        actions = 1 if stage is plan.stages[-1] else 2
        stage_s.append(layers_s + crossing_s + actions * costs.action_s)
        sync_s.append(sum(cost.sync_s for cost in chosen))

    form_s = (plan.micro_batches - 1) * max(stage_s) + sum(stage_s) + max(sync_s)
    assert answer.closed_form.objective_s == pytest.approx(form_s)
    run = timeline(
        orders("1f1b", stages=2, micro_batches=plan.micro_batches),
        forward_s=[stage.forward_s for stage in answer.prediction.stages],
        backward_s=[stage.backward_s for stage in answer.prediction.stages],
        transfer_s=crossing_s,
    )
    assert answer.prediction.step_time_s >= run.makespan_s
    assert predict(plan, model, resolve_cluster("4xa100-sxm-40gb")) == answer.prediction


@pytest.mark.parametrize("seed", range(20))
def test_the_widest_boundary_is_the_widest_of_all_splits(seed: int) -> None:
    model = random_model(seed)
    outputs = {one.kind: float(one.trace.output_bytes) for one in model.layers if one.trace}
    space = GraphSpace(candidates(model, TWO))
    problem = space.instance(next(iter(candidates(model, TWO, Pins(pipeline=2)).layouts())))
    widest = 0.0
    for stage_of in splits(problem):
        stages = [
            [name for name, at in zip(problem.names, stage_of, strict=True) if at == s]
            for s in range(2)
        ]
        widest = max(widest, sum(outputs[name] for name in crossings(model, stages)[0]))

    assert widest_bytes(model, outputs) == pytest.approx(widest)


@pytest.mark.matrix
def test_branches_are_worth_taking_apart() -> None:
    model = towers(6, 5)
    pins = Pins(pipeline=4, schedule="1f1b", micro_batch=1)

    plan = searched(model, "4xa100-sxm-40gb", pins).plan

    placed = [item.layer for stage in plan.stages for item in stage.layers]
    assert placed != [name for name, _ in model.chain]
    plan.check_model(model)


@pytest.mark.matrix
def test_a_graph_with_too_many_splits_gets_a_plan_with_its_gap() -> None:
    model = towers(12, 12, 12, 12)
    pins = Pins(pipeline=2, micro_batch=1, schedule="1f1b", data=1)

    answer = searched(model, "2xa100-sxm-40gb", pins)

    certificate = answer.certificate
    assert 0 < answer.closed_form_bound_s < answer.closed_form.objective_s
    assert not certificate.optimal
    assert 0 < certificate.lower_bound_s < certificate.objective_s
    assert certificate.gap == pytest.approx(1 - certificate.lower_bound_s / certificate.objective_s)
    answer.plan.check_model(model)


def test_the_order_in_which_layers_are_listed_changes_nothing() -> None:
    model = random_model(7)
    other = in_order(model)

    assert [name for name, _ in other.chain] != [name for name, _ in model.chain]
    assert set(other.graph.edges) == set(model.graph.edges)
    assert searched(other, TWO).closed_form.objective_s == pytest.approx(
        searched(model, TWO).closed_form.objective_s
    )


def with_group(model: ModelGraph, *names: str) -> ModelGraph:
    return ModelGraph(
        name=model.name, layers=model.layers, edges=model.edges, colocated={"group": names}
    )


def grouped(model: ModelGraph, seed: int) -> ModelGraph:
    """The same with two layers that stay on one stage, where some can."""
    names = [name for name, _ in model.chain]
    pairs = list(itertools.combinations(names, 2))
    for pair in random.Random(seed).sample(pairs, len(pairs)):
        try:
            return with_group(model, *pair)
        except ValueError:
            continue
    return model


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", range(3))
def test_layers_of_a_group_are_planned_on_one_stage(seed: int) -> None:
    model, pins = grouped(random_model(seed), seed), Pins(pipeline=2, schedule="1f1b")
    every = candidates(model, TWO, pins)
    space = GraphSpace(every)
    best_s = math.inf
    for layout in layouts_of(space):
        least_s = least_objective_s(space.instance(layout)) + every.costs(layout).step_s
        best_s = min(best_s, least_s)

    answer = searched(model, TWO, pins)

    assert model.colocated is not None
    stages = [{item.layer for item in stage.layers} for stage in answer.plan.stages]
    assert any(set(model.colocated["group"]) <= held for held in stages)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert predict(answer.plan, model, resolve_cluster(TWO)) == answer.prediction


def test_a_group_on_devices_that_differ_and_in_a_layout() -> None:
    model = with_group(unet(2), "down1", "middle", "up1")
    pins = Pins(pipeline=2, schedule="1f1b", micro_batch=2)
    cluster = "1xa100-sxm-40gb+1xv100-sxm-32gb"

    mixed, alike = searched(model, cluster, pins), candidates(model, TWO, pins)
    whole = layout_prediction(
        Request(model, resolve_cluster(TWO), JOB), next(iter(alike.layouts()))
    )

    stages = [[one.layer for one in stage.layers] for stage in mixed.plan.stages]
    assert any({"down1", "middle", "up1"} <= set(held) for held in stages)
    assert len(whole.stages) == 2
    placed = {one.layer: one for stage in mixed.plan.stages for one in stage.layers}
    names = [name for name, _ in model.chain]
    apart = mixed.plan.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"layers": tuple(placed[name] for name in held)})
                for stage, held in zip(mixed.plan.stages, (names[:2], names[2:]), strict=True)
            )
        }
    )
    with pytest.raises(DocumentError, match=r"colocated\.group: its layers are on stages \[0, 1\]"):
        apart.check_model(model)
    program = search(Request(model, resolve_cluster(TWO), JOB, pins=pins), solver="ilp")
    assert program.closed_form.objective_s == pytest.approx(
        searched(model, TWO, pins).closed_form.objective_s, rel=1e-6
    )


def test_only_a_last_layer_of_its_own_kind_is_told_apart() -> None:
    assert sink_kind(towers(2, 2)) == "join"
    assert sink_kind(graph([layer("a"), layer("b"), layer("c")], [("a", "b"), ("a", "c")])) is None
    twins = graph([layer("a", kind="x"), layer("b", kind="x")], [("a", "b")])
    assert sink_kind(twins) is None


def test_what_does_not_fit_and_an_unknown_solver_are_told() -> None:
    huge = graph(
        [layer("a", scale=2000), layer("b"), layer("c")], [("a", "b"), ("b", "c"), ("a", "c")]
    )

    with pytest.raises(NoPlanFits, match=r"no plan of graph fits .* layer 'a' alone fits on no"):
        searched(huge, "3xv100-sxm-16gb", Pins(pipeline=3))
    with pytest.raises(DocumentError, match="the solvers are exact and ilp"):
        search(Request(unet(), resolve_cluster(TWO), JOB), solver="simplex")


@pytest.mark.spread(1)
@pytest.mark.parametrize("cluster", [TWO, "1xa100-sxm-40gb+1xv100-sxm-32gb"])
@pytest.mark.parametrize("seed", [0, 4])
def test_the_integer_program_finds_the_same_optimum(seed: int, cluster: str) -> None:
    pins = Pins(pipeline=2, schedule="1f1b", micro_batch=2)
    request = Request(random_model(seed), resolve_cluster(cluster), JOB, pins=pins)

    exact, program = search(request), search(request, solver="ilp")

    assert program.certificate.solver == "ilp"
    assert program.closed_form.objective_s == pytest.approx(exact.closed_form.objective_s, rel=1e-6)
    assert program.certificate.lower_bound_s <= exact.certificate.objective_s * (1 + 1e-6)


@pytest.mark.matrix
def test_graphs_close_to_the_best_are_simulated_and_the_fastest_is_the_answer() -> None:
    for seed in range(4):
        answer = searched(random_model(seed), TWO)

        assert answer.closed_form in answer.finalists
        steps_s = [one.prediction.step_time_s for one in answer.finalists]
        assert answer.prediction.step_time_s <= min(steps_s) * (1 + 1e-9)
        limit_s = answer.closed_form.objective_s * (1 + MARGIN)
        assert all(one.objective_s <= limit_s * (1 + 1e-12) for one in answer.finalists)
        assert len({one.plan.layout for one in answer.finalists}) == len(steps_s)
        assert len(answer.certificate.finalists) == len(steps_s)
        assert len(steps_s) > 1


@pytest.mark.parametrize("cluster", [TWO, "1xa100-sxm-40gb+1xv100-sxm-32gb"])
@pytest.mark.long("1xa100-sxm-40gb+1xv100-sxm-32gb")
def test_what_is_required_of_layers_is_kept_on_graphs(cluster: str) -> None:
    model = unet(2)
    names = [name for name, _ in model.chain]
    pins = Pins(pipeline=2, schedule="1f1b", micro_batch=2)
    free = search(Request(model, resolve_cluster(cluster), JOB, pins=pins))
    words = ["layer down1 on stage 1", "layers up1..up0 recompute full"]
    asked = dataclasses.replace(pins, require=read_requirements(words, names))

    answer = search(Request(model, resolve_cluster(cluster), JOB, pins=asked))

    held = {
        one.layer: (s, one) for s, stage in enumerate(answer.plan.stages) for one in stage.layers
    }
    assert held["down1"][0] == 1
    assert {held[name][1].recompute for name in ("up1", "up0")} == {"full"}
    assert answer.closed_form.objective_s >= free.closed_form.objective_s * (1 - 1e-9)
    never = dataclasses.replace(
        pins, require=read_requirements([*words, "layer down1 on stage 0"], names)
    )
    with pytest.raises(NoPlanFits, match="keeps all of this: layers 1-1 on stage 1"):
        search(Request(model, resolve_cluster(cluster), JOB, pins=never))
