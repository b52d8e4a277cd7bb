"""A graph that a document states has the optimum of all of its splits, with ties or without."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.planner.errors import DocumentError
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.partition_problem import Infeasible, Unfinished
from meshwright.planner.solver.problem_document import Problem
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import (
    changed,
    least_objective_s,
    objective_s,
    random_graph,
    splits,
    with_groups,
)


def document(problem: GraphInstance, **more: Any) -> dict[str, Any]:
    """Write a graph as a person would."""
    return {
        "format": 1,
        "schedule": "custom",
        "steady": problem.chain.steady,
        "fill": problem.chain.fill,
        "kinds": {
            f"kind {at}": {
                "options": [
                    {
                        "name": f"{option.name} {k}",
                        "forward_s": option.forward_s,
                        "backward_s": option.backward_s,
                        "stored_bytes": option.stored_bytes,
                        "transient_bytes": option.transient_bytes,
                        "resident_bytes": option.resident_bytes,
                        "sync_s": option.sync_s,
                    }
                    for k, option in enumerate(options)
                ]
            }
            for at, options in enumerate(problem.chain.kinds)
        },
        "layers": [f"kind {kind}" for kind in problem.chain.layers],
        "stages": [
            {
                "capacity_bytes": stage.capacity_bytes,
                "fixed_bytes": stage.fixed_bytes,
                "speed": 1 / stage.time_scale,
                "exposed_s": stage.exposed_s,
                "in_flight": float(stage.in_flight),
            }
            for stage in problem.chain.stages
        ],
        "edges": [list(edge) for edge in problem.edges],
        "output_s": list(problem.sent_s()),
        "relayed": problem.relayed,
        "colocated": [list(group) for group in problem.colocated],
    } | more


def stated_graph(seed: int, *, relayed: bool) -> GraphInstance:
    drawn = changed(random_graph(seed), forward_apart=False, credits_s=())
    return with_groups(replace(drawn, relayed=relayed), seed)


@pytest.mark.parametrize("relayed", [True, False])
@pytest.mark.long("False")
def test_a_stated_graph_has_the_optimum_of_all_its_splits(relayed: bool) -> None:
    fitting = 0
    for seed in range(7000, 7040):
        problem = stated_graph(seed, relayed=relayed)
        if not problem.edges:
            continue
        stated = Problem.of(document(problem))
        best_s = least_objective_s(problem)

        found = solve(stated.graph())

        if best_s == math.inf:
            assert isinstance(found, Infeasible | Unfinished)
            continue
        assert isinstance(found, GraphSolution)
        assert found.optimal
        assert found.objective_s == pytest.approx(best_s, rel=1e-9)
        fitting += 1
    assert fitting > 8


@pytest.mark.matrix
def test_without_relays_no_split_takes_longer_and_some_take_less() -> None:
    less = 0
    for seed in range(7000, 7040):
        problem = stated_graph(seed, relayed=True)
        if problem.edges:
            with_relays, straight = (
                solve(Problem.of(document(replace(problem, relayed=relayed))).graph())
                for relayed in (True, False)
            )
            if isinstance(with_relays, GraphSolution):
                assert isinstance(straight, GraphSolution)
                assert straight.objective_s <= with_relays.objective_s * (1 + 1e-9)
                less += straight.objective_s < with_relays.objective_s * (1 - 1e-9)
    assert less


def test_what_is_required_of_a_graph_is_kept_at_the_least_cost() -> None:
    dearer, tried = 0, 0
    for seed in range(7000, 7200):
        problem = stated_graph(seed, relayed=False)
        stages, layers = len(problem.chain.stages), len(problem.chain.layers)
        if stages < 2 or layers > 5 or not problem.edges or least_objective_s(problem) == math.inf:
            continue
        free = solve(Problem.of(document(problem)).graph())
        assert isinstance(free, GraphSolution)
        layer, first = layers // 2, free.split.cuts[1]
        # Where the best split does not have it.
        elsewhere = int(layer in free.order[:first])
        kept = [stage_of for stage_of in splits(problem) if stage_of[layer] == elsewhere]
        tables = [range(len(problem.chain.kinds[kind])) for kind in problem.chain.layers]
        best_s = min(
            (
                objective_s(problem, stage_of, options)
                for stage_of in kept
                for options in itertools.product(*tables)
            ),
            default=math.inf,
        )
        asked = [{"layers": [layer, layer], "stages": [elsewhere]}]

        found = solve(Problem.of(document(problem, require=asked)).graph())

        tried += 1
        if best_s == math.inf:
            assert isinstance(found, Infeasible)
            continue
        assert isinstance(found, GraphSolution)
        assert found.objective_s == pytest.approx(best_s, rel=1e-6)
        dearer += best_s > least_objective_s(problem) * (1 + 1e-6)
        if dearer and tried > 12:
            break
    assert dearer


TWO_BRANCHES: dict[str, Any] = {
    "format": 1,
    "micro_batches": 4,
    "kinds": {
        "small": {"options": [{"name": "keep", "forward_s": 1.0, "backward_s": 2.0}]},
        "large": {"options": [{"name": "keep", "forward_s": 2.0, "backward_s": 4.0}]},
    },
    "layers": ["small", "large", "small", "small", "small"],
    "stages": [{"capacity_bytes": 1e9, "count": 2}],
    "edges": [[0, 1], [0, 2], [2, 3], [1, 4], [3, 4]],
    "output_s": [0.25, 0.25, 0.25, 0.5, 0.0],
}


def test_a_graph_is_answered_in_numbers_of_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(TWO_BRANCHES))

    shown = CliRunner().invoke(app(), ["solve", str(path)])
    plain = CliRunner().invoke(app(), ["solve", str(path), "--json"])

    assert shown.exit_code == plain.exit_code == 0
    answer = json.loads(plain.stdout)
    # 18 s of layers on two stages: 9 and 9, with two outputs across.
    assert answer["objective_s"] == pytest.approx(3 * 9.5 + 19)
    held = [stage["layers"] for stage in answer["stages"]]
    assert sorted(held[0] + held[1]) == [0, 1, 2, 3, 4]
    assert held == [[0, 1], [2, 3, 4]]
    assert "0-1" in shown.stdout
    assert "2-4" in shown.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": [[1, 0]]}, "edges[0]: is [1, 0]; an edge leads to a later one"),
        ({"edges": [[0, 9]]}, "edges[0]: is [0, 9]"),
        ({"cut_s": [0.0] * 4}, "cut_s: applies to chains"),
        ({"output_s": [0.0]}, "output_s: has 1 values for 5 layers"),
        ({"edges": [], "output_s": []}, None),
        ({"edges": []}, "output_s: applies to graphs of layers; list their edges too"),
        ({"edges": [], "output_s": [], "relayed": False}, "relayed: applies to graphs"),
        ({"colocated": [[0, 7]]}, "colocated[0]: 7 is no layer"),
        ({"colocated": [[1, 2], [2, 3]]}, "colocated[1]: 2 is no layer, or in a group"),
        ({"colocated": [[0, 3]]}, "colocated: layers"),
    ],
)
def test_what_is_wrong_with_a_graph_is_said(changes: dict[str, Any], words: str | None) -> None:
    data = TWO_BRANCHES | changes
    if words is None:
        assert not Problem.of(data).edges
        return
    with pytest.raises(DocumentError) as error:
        Problem.of(data).graph()
    assert words in str(error.value)
