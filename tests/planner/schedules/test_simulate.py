"""The simulated step against closed forms, a brute-force longest path and hand-made schedules."""

import itertools
import random

import networkx
import pytest

from benchmarks.closed_forms import in_flight, peak_alive, peak_stored_bytes
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule import Action, Order, orders, read_action
from meshwright.planner.schedules.simulate import timeline


def rank(text: str) -> Order:
    return tuple(read_action(word) for word in text.split())


def longest_path_s(
    ranks: tuple[Order, ...],
    forward_s: list[float],
    backward_s: list[float],
    transfer_s: float,
    weight_s: list[float] | None = None,
) -> float:
    """The makespan as the longest path of the dependency graph, by networkx."""
    graph = networkx.DiGraph()
    last = len(forward_s) - 1
    weight_s = weight_s or [0.0] * len(forward_s)
    table = {
        "F": forward_s,
        "B": backward_s,
        "I": [b - w for b, w in zip(backward_s, weight_s, strict=True)],
        "W": weight_s,
    }
    every = {action for order in ranks for action in order}
    home = {action.stage: rank for rank, order in enumerate(ranks) for action in order}

    def seconds(action: Action) -> float:
        return table[action.kind][action.stage]

    def moved_s(a: int, b: int) -> float:
        return transfer_s if home[a] != home[b] else 0.0

    for order in ranks:
        for action in order:
            graph.add_edge("start", action, weight=seconds(action))
            stage, kind, m = action
            needs: list[tuple[Action, float]] = []
            if kind == "F" and stage > 0:
                needs.append((Action(stage - 1, "F", m), moved_s(stage - 1, stage)))
            if kind in "BI":
                needs.append((Action(stage, "F", m), 0.0))
                if stage < last:
                    behind = Action(stage + 1, "B", m)
                    if behind not in every:
                        behind = Action(stage + 1, "I", m)
                    needs.append((behind, moved_s(stage, stage + 1)))
            if kind == "W":
                needs.append((Action(stage, "I", m), 0.0))
            for before, wait_s in needs:
                graph.add_edge(before, action, weight=wait_s + seconds(action))
        for before, after in itertools.pairwise(order):
            graph.add_edge(before, after, weight=seconds(after))
    return float(networkx.dag_longest_path_length(graph))


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


SHAPES = (
    ("zb-h1", 4, 1, 7),
    ("interleaved", 3, 2, 6),
    ("interleaved", 2, 3, 8),
    ("interleaved-zb", 3, 2, 9),
    ("zbv", 3, 2, 4),
    ("zbv", 4, 2, 9),
    ("dualpipe-v", 3, 2, 8),
    ("pipedream-2bw", 4, 1, 5),
)


@pytest.mark.parametrize(("name", "ranks", "virtual_stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_step_of_every_schedule_is_its_longest_path(
    name: str, ranks: int, virtual_stages: int, micro_batches: int, seed: int
) -> None:
    rng = random.Random(seed)
    stages = ranks * virtual_stages
    forward_s = [rng.uniform(0.1, 2.0) for _ in range(stages)]
    weight_s = [rng.uniform(0.0, 1.0) for _ in range(stages)]
    backward_s = [w + rng.uniform(0.1, 2.0) for w in weight_s]
    transfer_s = rng.choice([0.0, 0.3])
    order = orders(name, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)

    run = timeline(
        order,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=transfer_s,
    )

    expected = longest_path_s(order, forward_s, backward_s, transfer_s, weight_s)
    assert run.makespan_s == pytest.approx(expected)


def test_a_stage_hands_over_to_another_on_its_rank_at_once() -> None:
    order = orders("zbv", stages=2, micro_batches=1, virtual_stages=2)
    ones = [1.0, 1.0]

    run = timeline(
        order,
        forward_s=ones,
        backward_s=[2.0, 2.0],
        weight_s=ones,
        transfer_s=0.25,
        exposed_s=0.5,
    )

    assert run.makespan_s == 6.0


def test_the_fullest_moment_counts_what_stays_for_a_late_weight_gradient() -> None:
    order = rank("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2")

    # 10 each: two alive; one done but for 4, two alive; ...
    assert peak_stored_bytes(order, [10.0], [4.0]) == 24.0
    assert peak_stored_bytes(order, [10.0]) == 30.0
    # Recomputed in I, a layer may keep more for W than it stored.
    assert peak_stored_bytes(order, [1.0], [4.0]) == 9.0


def test_weight_gradients_need_seconds() -> None:
    with pytest.raises(DocumentError, match="0I0 needs seconds of its own"):
        timeline((rank("0F0 0I0 0W0"),), forward_s=[1.0], backward_s=[2.0])


def test_the_schedule_limits_live_activations_to_what_it_says() -> None:
    order = orders("1f1b", stages=4, micro_batches=8)

    assert [peak_alive(actions)[s] for s, actions in enumerate(order)] == [4, 3, 2, 1]
    assert [in_flight(actions) for actions in order] == [4, 3, 2, 1]


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
