"""Searches that may use the host, or lose something: against every layout solved on its own."""

import math
from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.offload_choices import Saving, activations, reaches_host, savings
from meshwright.planner.search.search import search
from meshwright.planner.solver.chain import solve_chain
from meshwright.planner.solver.partition_problem import Solution
from meshwright.planner.solver.requirements import Requirement, read_requirements


@pytest.fixture(scope="module")
def gpt2() -> ModelGraph:
    return resolve_model("gpt2")


HOST = frozenset({"offload"})


def small(memory: float, host: float | None = None, devices: int = 4) -> ClusterSpec:
    """A few A100s with little memory."""
    node = resolve_cluster(f"{devices}xa100-sxm-40gb")
    group = node.groups[0]
    accelerator = group.accelerator.model_copy(update={"memory_bytes": int(memory)})
    changed = {"accelerator": accelerator, "host_memory_bytes": host and int(host)}
    return node.model_copy(update={"groups": (group.model_copy(update=changed),)})


def least_s(model: ModelGraph, cluster: ClusterSpec, job: Job, pins: Pins) -> float:
    """Seconds of the best layout, each solved by itself."""
    candidates = Candidates(Request(model, cluster, job, pins=pins))
    answers = (
        (solve_chain(candidates.instance(layout)), candidates.costs(layout).step_s)
        for layout in candidates.layouts()
    )
    return min(
        (found.objective_s + step_s for found, step_s in answers if isinstance(found, Solution)),
        default=math.inf,
    )


@pytest.mark.long("3600000000.0-6000000000.0", "3600000000.0-None", "7000000000.0-None")
@pytest.mark.parametrize(
    ("memory", "host"), [(3.6e9, None), (4.5e9, None), (3.6e9, 6e9), (7e9, None)]
)
@pytest.mark.matrix
def test_no_layout_beats_the_plan(gpt2: ModelGraph, memory: float, host: float | None) -> None:
    cluster = small(memory, host, devices=2)
    job = Job(seq_len=1024, global_batch=4)
    pins = Pins(tensor=1, context=1, allowed=HOST)
    best_s = least_s(gpt2, cluster, job, pins)

    if best_s == math.inf:
        with pytest.raises(NoPlanFits):
            search(Request(gpt2, cluster, job, pins=pins))
        return
    answer = search(Request(gpt2, cluster, job, pins=pins))

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-6)
    assert answer.prediction.fits


@pytest.mark.matrix
def test_bounds_that_pool_device_and_host_are_below_every_plan(gpt2: ModelGraph) -> None:
    job = Job(seq_len=1024, global_batch=4)
    pins = Pins(tensor=1, context=1, pipeline=1, loss="full", prefetch=0, allowed=HOST)
    memory, sharper = 3.43e9, 0
    for host in (2.5e9, 5e9):  # of which four fifths may be filled
        cluster = small(memory, host, devices=2)
        candidates = Candidates(Request(gpt2, cluster, job, pins=pins))
        candidates.computation_s()
        roomy = Candidates(Request(gpt2, small(memory, None, devices=2), job, pins=pins))
        for family in candidates.families:
            for part in family.by_saving():
                (levels,) = candidates.rooms_s([part])
                for sharings, (bound_s,) in levels:
                    for layout in replace(part, sharings=sharings).layouts():
                        found = solve_chain(candidates.instance(layout))
                        free = solve_chain(roomy.instance(layout))
                        if isinstance(found, Solution):
                            step_s = candidates.costs(layout).step_s
                            assert bound_s <= (found.objective_s + step_s) * (1 + 1e-9)
                        if isinstance(free, Solution):
                            sharper += bound_s > free.objective_s * (1 + 1e-9)
    assert sharper > 0


@pytest.mark.matrix
def test_the_host_is_used_where_the_device_is_too_small(gpt2: ModelGraph) -> None:
    job = Job(seq_len=1024, global_batch=4)
    cluster = small(2.2e9, devices=1)

    with pytest.raises(NoPlanFits):
        search(Request(gpt2, cluster, job))
    answer = search(Request(gpt2, cluster, job, pins=Pins(allowed=HOST)))

    assert answer.plan.offload != "none" or any(
        item.activations == "offload" for stage in answer.plan.stages for item in stage.layers
    )
    assert answer.prediction.fits
    assert answer.prediction.stages[0].host_bytes > 0
    assert answer.prediction.step_parts["offload"] > 0


@pytest.mark.matrix
def test_ninety_like_layers_go_to_the_host_and_the_search_ends() -> None:
    job = Job(seq_len=2048, global_batch=1536)
    model, cluster = resolve_model("gpt3-175b"), resolve_cluster("16x8xa100-sxm-80gb")

    kept = search(Request(model, cluster, job, pins=Pins(pipeline=1)))
    answer = search(Request(model, cluster, job, pins=Pins(pipeline=1, allowed=HOST)))

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s < kept.closed_form.objective_s
    assert answer.prediction.fits


def test_where_all_fits_nothing_leaves_the_device(gpt2: ModelGraph) -> None:
    job = Job(seq_len=1024, global_batch=8)
    answer = search(Request(gpt2, small(40e9), job, pins=Pins(allowed=HOST)))

    assert answer.plan.offload == "none"
    assert answer.prediction.stages[0].host_bytes == 0


def test_what_loses_something_must_be_allowed() -> None:
    cluster = small(8e9)

    host, lossy = Pins(allowed=HOST), Pins(allowed=frozenset({"compress"}))

    assert savings(cluster, Pins(), lambda _: True) == (Saving(),)
    free = savings(cluster, host, lambda _: True)
    allowed = savings(cluster, lossy, lambda _: True)
    assert [saving.offload for saving in free] == ["none", "optimizer", "parameters"]
    assert {saving.gradient_compression for saving in free} == {"full"}
    assert {saving.gradient_compression for saving in allowed} == {
        "full",
        "bf16",
        "fp16",
        "powersgd",
    }
    assert activations(cluster, Pins()) == ("keep",)
    assert activations(cluster, host) == ("keep", "offload")
    assert activations(cluster, lossy) == ("keep", "compress")
    assert savings(cluster, host, lambda saving: saving.offload == "none") == (Saving(),)


def test_a_cpu_is_its_own_host() -> None:
    cluster = small(8e9)
    group = cluster.groups[0]
    accelerator = group.accelerator.model_copy(update={"kind": "cpu"})
    local = cluster.model_copy(
        update={"groups": (group.model_copy(update={"accelerator": accelerator}),)}
    )

    assert reaches_host(cluster)
    assert not reaches_host(local)
    assert activations(local, Pins(allowed=HOST)) == ("keep",)


@pytest.mark.matrix
def test_a_plan_keeps_what_is_required_and_is_no_faster(gpt2: ModelGraph) -> None:
    cluster, job = small(16e9), Job(seq_len=1024, global_batch=8)
    names = [name for name, _ in gpt2.chain]
    pins = Pins(pipeline=2, tensor=1, context=1, schedule="1f1b")
    asked = ["at most 4 layers on stage 1", "layers 0-1 recompute full", "layers 2-5 together"]

    free = search(Request(gpt2, cluster, job, pins=pins))
    kept = search(
        Request(gpt2, cluster, job, pins=replace(pins, require=read_requirements(asked, names)))
    )

    assert len(free.plan.stages[1].layers) > 4
    assert len(kept.plan.stages[1].layers) <= 4
    chosen = [item for stage in kept.plan.stages for item in stage.layers]
    assert [item.recompute for item in chosen[:2]] == ["full", "full"]
    assert kept.closed_form_bound_s == pytest.approx(kept.closed_form.objective_s, rel=1e-9)
    assert kept.closed_form.objective_s > free.closed_form.objective_s
    expected_s = least_s(gpt2, cluster, job, replace(pins, require=read_requirements(asked, names)))
    assert kept.closed_form.objective_s == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.matrix
def test_what_cannot_be_kept_is_said(gpt2: ModelGraph) -> None:
    pins = Pins(pipeline=2, tensor=1, virtual_stages=1, require=(Requirement(at_most=3),))
    job = Job(seq_len=1024, global_batch=8)

    with pytest.raises(NoPlanFits, match="at most 3 layers on each stage"):
        search(Request(gpt2, small(16e9), job, pins=pins))

    # More stages on a rank have fewer layers each.
    several = search(Request(gpt2, small(16e9), job, pins=replace(pins, virtual_stages=None))).plan
    assert several.virtual_stages > 1
    assert max(len(stage.layers) for stage in several.stages) <= 3


def test_no_bound_of_layouts_with_states_on_the_host_is_above_their_optimum() -> None:
    """What the host adds to a step counts once."""
    model, cluster = resolve_model("gpt-neox-20b"), resolve_cluster("8xa100-sxm-80gb")
    job = Job(seq_len=2048, global_batch=64)
    pins = Pins(tensor=1, context=1, pipeline=1, micro_batch=8, zero=3, allowed=HOST)
    candidates = Candidates(Request(model, cluster, job, pins=pins))
    candidates.computation_s()
    compared = 0
    for family in candidates.families:
        for saved in family.by_saving():
            for part in saved.by_loss():
                [rooms_s] = candidates.shared_rooms_s([part])
                for layout, bound_s in zip(part.layouts(), rooms_s, strict=True):
                    found = solve_chain(candidates.instance(layout))
                    if candidates.refusal(layout) is None and isinstance(found, Solution):
                        exact_s = found.objective_s + candidates.costs(layout).step_s
                        assert bound_s <= exact_s * (1 + 1e-9)
                        compared += layout.offload != "none"
    assert compared
