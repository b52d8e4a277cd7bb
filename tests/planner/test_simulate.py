"""The simulated step against closed forms, a brute-force longest path and hand-made schedules."""

import itertools
import random

import networkx
import pytest

from planner.errors import DocumentError
from planner.schedule import Action, Order, in_flight, orders, read_action
from planner.simulate import closed_form_s, peak_alive, timeline


def rank(text: str) -> Order:
    return tuple(read_action(word) for word in text.split())


def longest_path_s(
    ranks: tuple[Order, ...], forward_s: list[float], backward_s: list[float], transfer_s: float
) -> float:
    """The makespan as the longest path of the dependency graph, by networkx."""
    graph = networkx.DiGraph()
    last = len(forward_s) - 1

    def seconds(action: Action) -> float:
        return (forward_s if action.kind == "F" else backward_s)[action.stage]

    for order in ranks:
        for action in order:
            graph.add_edge("start", action, weight=seconds(action))
            stage, kind, m = action
            needs: list[tuple[Action, float]] = []
            if kind == "F" and stage > 0:
                needs.append((Action(stage - 1, "F", m), transfer_s))
            if kind == "B":
                needs.append((Action(stage, "F", m), 0.0))
                if stage < last:
                    needs.append((Action(stage + 1, "B", m), transfer_s))
            for before, wait_s in needs:
                graph.add_edge(before, action, weight=wait_s + seconds(action))
        for before, after in itertools.pairwise(order):
            graph.add_edge(before, after, weight=seconds(after))
    return float(networkx.dag_longest_path_length(graph))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 16])
def test_uniform_stages_take_the_closed_form(name: str, stages: int, micro_batches: int) -> None:
    order = orders(name, stages=stages, micro_batches=micro_batches)

    run = timeline(order, forward_s=[1.0] * stages, backward_s=[2.0] * stages)

    assert run.makespan_s == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert run.makespan_s == pytest.approx(closed_form_s([3.0] * stages, micro_batches))


@pytest.mark.parametrize("seed", range(20))
def test_the_step_is_the_longest_path_through_its_dependencies(seed: int) -> None:
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(1, 6), rng.randint(1, 9)
    forward_s = [rng.uniform(0.1, 2.0) for _ in range(stages)]
    backward_s = [rng.uniform(0.1, 4.0) for _ in range(stages)]
    transfer_s = rng.choice([0.0, 0.3])
    order = orders(rng.choice(["1f1b", "gpipe"]), stages=stages, micro_batches=micro_batches)

    run = timeline(order, forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)

    expected = longest_path_s(order, forward_s, backward_s, transfer_s)
    assert run.makespan_s == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
def test_gpipe_takes_its_slowest_forward_and_slowest_backward(seed: int) -> None:
    rng = random.Random(seed)
    stages, m = 5, 6
    forward_s = [rng.uniform(0.5, 1.0) for _ in range(stages)]
    backward_s = [rng.uniform(1.0, 2.0) for _ in range(stages)]

    run = timeline(
        orders("gpipe", stages=stages, micro_batches=m), forward_s=forward_s, backward_s=backward_s
    )

    expected = (m - 1) * (max(forward_s) + max(backward_s)) + sum(forward_s) + sum(backward_s)
    assert run.makespan_s == pytest.approx(expected)


def test_a_transfer_delays_the_fill_and_the_drain() -> None:
    run = timeline(
        orders("1f1b", stages=2, micro_batches=1),
        forward_s=[1.0, 1.0],
        backward_s=[1.0, 1.0],
        transfer_s=0.25,
    )

    assert run.makespan_s == 4.5
    assert run.actions(1) == [(1.25, 2.25, (1, "F", 0)), (2.25, 3.25, (1, "B", 0))]


@pytest.mark.parametrize("seed", range(30))
def test_the_closed_form_bounds_a_step_of_realistic_stages_from_above(seed: int) -> None:
    # Not a theorem (f=(1,10,0,0), b=(1,0,0,0), m=8 breaks it), but true of stages within 2x.
    rng = random.Random(seed)
    stages = rng.randint(2, 8)
    whole = [rng.uniform(1.0, 2.0) for _ in range(stages)]
    ratio = rng.choice([1 / 3, 1 / 4])
    m = rng.randint(stages, 4 * stages)

    run = timeline(
        orders("1f1b", stages=stages, micro_batches=m),
        forward_s=[t * ratio for t in whole],
        backward_s=[t * (1 - ratio) for t in whole],
    )

    assert run.makespan_s <= closed_form_s(whole, m) * (1 + 1e-9)
    assert closed_form_s(whole, m) <= 1.2 * run.makespan_s


def test_the_schedule_limits_live_activations_to_what_it_says() -> None:
    order = orders("1f1b", stages=4, micro_batches=8)

    assert [peak_alive(actions)[s] for s, actions in enumerate(order)] == [4, 3, 2, 1]
    assert [in_flight(actions) for actions in order] == [4, 3, 2, 1]


def test_a_rank_may_hold_several_stages() -> None:
    order = (
        rank("0F0 2F0 0F1 2B0 2F1 0B0 2B1 0B1"),
        rank("1F0 1F1 1B0 1B1"),
    )

    run = timeline(order, forward_s=[1.0] * 3, backward_s=[1.0] * 3)

    expected = longest_path_s(order, [1.0] * 3, [1.0] * 3, 0.0)
    assert run.makespan_s == pytest.approx(expected)
    assert peak_alive(order[0]) == {0: 2, 2: 1}


def test_ranks_that_wait_for_each_other_are_an_error_not_a_hang() -> None:
    order = (
        rank("0F0 0B0 0F1 0B1"),
        rank("1F0 1F1 1B0 1B1"),
    )

    with pytest.raises(DocumentError, match="waits for ever"):
        timeline(order, forward_s=[1.0] * 2, backward_s=[1.0] * 2)


def test_a_backward_before_its_forward_is_an_error() -> None:
    with pytest.raises(DocumentError, match="before its forward"):
        timeline(((read_action("0B0"), read_action("0F0")),), forward_s=[1.0], backward_s=[1.0])


def test_idle_time_is_the_bubble() -> None:
    run = timeline(
        orders("1f1b", stages=4, micro_batches=8), forward_s=[1.0] * 4, backward_s=[2.0] * 4
    )

    assert [run.makespan_s - run.busy_s(r) for r in range(4)] == [9.0] * 4
    assert run.finish_s(0) == run.makespan_s
    assert run.finish_s(3) < run.makespan_s
