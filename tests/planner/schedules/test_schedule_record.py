"""A schedule is its record: made-up ones are planned, predicted and simulated like the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.closed_forms import closed_form, in_flight, peak_alive
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import placement_prediction, placements_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import schema
from meshwright.planner.documents.plan import Job, Layout, Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.requests.pins import Pins, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import SCHEDULES, Schedule, Shape
from meshwright.planner.schedules.closed_form import in_flight_counts, most_on_first_stage
from meshwright.planner.schedules.schedule import obstacle, orders
from meshwright.planner.schedules.schedule_record import DRAINED, SPLIT, Action, Order
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.search.partition.layout_partition import instance_of, plan_of
from meshwright.planner.search.search import Answer, search
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Solution

ROOT = Path(__file__).parents[3]
JOB = Job(seq_len=1024, global_batch=32)


def backwards_reversed(rank: int, shape: Shape) -> Order:
    """All forwards, then all backwards from the last micro-batch."""
    each = range(shape.micro_batches)
    return (
        *(Action(rank, "F", m) for m in each),
        *(Action(rank, "B", m) for m in reversed(each)),
    )


def eager(rank: int, shape: Shape) -> Order:
    """1F1B with one more forward in its warm-up, on every rank."""
    count = shape.micro_batches
    warm_up = min(count, shape.ranks - rank)
    order = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(count):
        order += [Action(rank, "F", warm_up + m)] * (warm_up + m < count)
        order.append(Action(rank, "B", m))
    return tuple(order)


def late_weights(rank: int, shape: Shape) -> Order:
    """All forwards of both stages, all their I from the last stage, and then all W."""
    first, last = rank, rank + shape.ranks
    each = range(shape.micro_batches)
    return tuple(
        Action(stage, kind, m)
        for kind, stages in (("F", (first, last)), ("I", (last, first)), ("W", (last, first)))
        for stage in stages
        for m in each
    )  # type: ignore[arg-type]


REVERSED = Schedule(
    name="gpipe-reversed",
    order=backwards_reversed,
    coefficients=DRAINED,
    forwards_first=True,
    names={"torchtitan": "ReversedGPipe"},
)
EAGER = Schedule(name="1f1b-eager", order=eager, coefficients=DRAINED)
LATE = Schedule(
    name="late-weights",
    order=late_weights,
    coefficients=SPLIT,
    stages_per_rank=(2, 2),
    splits_backward=True,
)
MADE_UP = (REVERSED, EAGER, LATE)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in MADE_UP:
        monkeypatch.setitem(SCHEDULES, one.name, one)


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


def answer(node: ClusterSpec, name: str, **pins: int) -> Answer:
    wanted = Pins(pipeline=4, tensor=1, schedule=name, **pins)  # type: ignore[arg-type]
    return search(Request(resolve_model("llama-3.1-8b"), node, JOB, pins=wanted))


@pytest.mark.long("1f1b-eager", "late-weights")
@pytest.mark.parametrize("name", ["gpipe-reversed", "1f1b-eager", "late-weights"])
@pytest.mark.matrix
def test_a_made_up_schedule_is_planned_and_proven(node: ClusterSpec, name: str) -> None:
    found = answer(node, name)

    assert found.plan.schedule == name
    assert found.closed_form_bound_s == pytest.approx(found.closed_form.objective_s, rel=1e-9)
    assert name in found.prediction.layout
    assert Plan.parse(found.plan.dump()) == found.plan
    # The fastest of all is not slower than the fastest under this schedule.
    every = search(
        Request(resolve_model("llama-3.1-8b"), node, JOB, pins=Pins(pipeline=4, tensor=1))
    )
    assert every.closed_form.objective_s <= found.closed_form.objective_s * (1 + 1e-9)


@pytest.mark.matrix
def test_backwards_in_reverse_take_as_long_and_hold_as_much_as_those_of_gpipe(
    node: ClusterSpec,
) -> None:
    made_up, known = answer(node, "gpipe-reversed"), answer(node, "gpipe")

    assert made_up.closed_form.objective_s == known.closed_form.objective_s
    peaks = [
        [stage.peak_memory_bytes for stage in one.prediction.stages] for one in (made_up, known)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("name", ["gpipe-reversed", "1f1b-eager"])
@pytest.mark.parametrize(("ranks", "m"), [(2, 1), (3, 5), (4, 8)])
def test_on_uniform_stages_a_drained_pipeline_is_empty_for_all_ranks_but_one(
    name: str, ranks: int, m: int
) -> None:
    form = closed_form(name, ranks=ranks, micro_batches=m)

    run = timeline(
        orders(name, stages=ranks, micro_batches=m),
        forward_s=[1.0] * ranks,
        backward_s=[2.0] * ranks,
    )

    assert run.makespan_s == (m + ranks - 1) * 3.0 == form.step_s([3.0] * ranks)


def test_counts_that_a_record_does_not_give_are_those_of_its_orders() -> None:
    m, ranks = 8, 4

    assert closed_form("1f1b-eager", ranks=ranks, micro_batches=m).in_flight == (5, 4, 3, 2)
    assert closed_form("gpipe-reversed", ranks=ranks, micro_batches=m).in_flight == (8,) * 4
    late = in_flight_counts("late-weights", 1, ranks=ranks, micro_batches=m, virtual_stages=2)
    assert (late.alive, late.waiting) == (16, 16)
    assert most_on_first_stage("late-weights", ranks=4, micro_batches=m, virtual_stages=2) == m


@pytest.mark.parametrize("made_up", MADE_UP, ids=lambda one: one.name)
@pytest.mark.parametrize("zero", [1, 3])
def test_the_split_of_a_made_up_schedule_holds_at_least_what_its_prediction_says(
    node: ClusterSpec, made_up: Schedule, zero: int
) -> None:
    model = resolve_model("llama-3.1-8b")
    layout = Layout(
        pipeline=4,
        data_shard=2,
        zero=zero,
        schedule=made_up.name,
        virtual_stages=made_up.stages_per_rank[0],
        micro_batches=16,
    )
    tables = CostTables(Request(model, node, JOB))
    costs = tables.costs_of(layout)
    found = solve(instance_of(model, node, layout, costs))
    assert isinstance(found, Solution)

    plan = plan_of(tables.request, layout, costs, found)
    predicted = placement_prediction(tables, layout, placements_of(plan, model))

    assert predicted.fits
    for stage, prediction in enumerate(predicted.stages):
        counted = costs.fixed_bytes + costs.slack * found.stage_bytes[plan.rank_of_stage(stage)]
        assert counted >= prediction.peak_memory_bytes * (1 - 1e-9)


def test_documents_pins_and_exports_look_names_up(
    node: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(node, "gpipe-reversed", zero=3)
    text = found.plan.dump()

    assert read_pins(["schedule=gpipe-reversed"]).schedule == "gpipe-reversed"
    assert "gpipe-reversed" in schema(Plan)["properties"]["schedule"]["anyOf"][0]["enum"]
    written = configuration(found.plan, resolve_model("llama-3.1-8b"), to="torchtitan")
    assert 'pipeline_parallel_schedule = "ReversedGPipe"' in written

    monkeypatch.delitem(SCHEDULES, "gpipe-reversed")
    with pytest.raises(DocumentError, match="schedule: is 'gpipe-reversed'; did you mean 'gpipe'"):
        Plan.parse(text)
    with pytest.raises(DocumentError, match="schedule is one of 1f1b, gpipe, "):
        read_pins(["schedule=gpipe-reversed"])


def shapes() -> Iterator[tuple[Schedule, Shape]]:
    for one in SCHEDULES.values():
        for ranks in (2, 3, 5):
            for virtual in filter(one.takes, (1, 2, 3)):
                for m in (1, ranks, 2 * ranks, 3 * ranks):
                    shape = {"micro_batches": m, "virtual_stages": virtual}
                    if not obstacle(one.name, stages=ranks * virtual, **shape):
                        yield one, Shape(ranks, m, virtual)


def test_what_records_say_of_their_orders_is_so() -> None:
    for one, shape in shapes():
        every = [one.order(rank, shape) for rank in range(shape.ranks)]
        last = shape.stages - 1
        of_last = every[one.homes(shape)[last]]
        follows = all(
            of_last[at + 1].stage == last and of_last[at + 1].kind in "BI"
            for at, action in enumerate(of_last)
            if action.stage == last and action.kind == "F"
        )
        assert follows or one.last_waits, (one.name, shape)
        assert one.splits_backward == any(a.kind == "W" for order in every for a in order)
        kinds = ["".join(a.kind for a in order) for order in every]
        if one.forwards_first:
            assert all("BF" not in text for text in kinds), (one.name, shape)
        for rank, order in enumerate(every):
            assert in_flight(order) <= one.counts(rank, shape).whole
        if one.repeats and shape.micro_batches > 2 * shape.ranks:
            twice = shape._replace(micro_batches=2 * shape.ranks)
            for rank, order in enumerate(every):
                assert peak_alive(order) == peak_alive(one.order(rank, twice)), (one.name, shape)


def test_no_file_beside_their_own_knows_the_name_of_a_schedule() -> None:
    names = set(SCHEDULES)
    # The bare partition problem is a document of its own, with two shapes of memory.
    own = {ROOT / "planner" / "solver" / "problem_document.py"}
    own |= {
        ROOT / "planner" / "schedules" / f"{name}.py"
        for name in ("__init__", "schedule_record", "pipeline_schedules")
    }
    texts = {
        file: file.read_text()
        for package in ("planner", "runtime", "profiler", "meshwright")
        for file in (ROOT / package).rglob("*.py")
        if file not in own
    }
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for file, text in texts.items()
        if any(name in text for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names
    ]

    assert found == []
