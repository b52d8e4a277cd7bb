"""A problem written by hand becomes the instance it describes, and says where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright.planner.solver.problem_document
from meshwright.planner.documents.document import plain, read, schema, write
from meshwright.planner.errors import DocumentError
from meshwright.planner.solver.chain import solve_chain
from meshwright.planner.solver.partition_problem import Solution
from meshwright.planner.solver.problem_document import Problem
from meshwright.planner.solver.side_constraints import HostMemory, SideConstraint

EXAMPLE = "\n".join(
    line.removeprefix("    ")
    for line in (meshwright.planner.solver.problem_document.__doc__ or "").splitlines()
    if line.startswith("    ")
)


def test_a_problem_survives_a_file(tmp_path: Path) -> None:
    problem = Problem.parse(EXAMPLE)

    write(problem, tmp_path / "problem.yaml")

    assert read(Problem, tmp_path / "problem.yaml") == problem


def example(**changes: object) -> dict[str, object]:
    data = plain(EXAMPLE)
    assert isinstance(data, dict)
    return data | changes


def test_the_schema_allows_a_name_for_a_layer() -> None:
    definitions = schema(Problem)["$defs"]

    assert {"type": "string"} in definitions["LayerRun"]["anyOf"]


def test_gpipe_keeps_every_micro_batch_and_counts_forwards_apart() -> None:
    instance = Problem.of(example(schedule="gpipe", micro_batches=6)).instance()

    assert {stage.in_flight for stage in instance.stages} == {6}
    assert instance.steady == 5
    assert instance.forward_apart


def test_a_custom_schedule_brings_its_own_numbers() -> None:
    stages = [{"capacity_bytes": 40e9, "in_flight": 2.5, "count": 2}]

    instance = Problem.of(
        example(schedule="custom", steady=8.5, fill=0.75, stages=stages, cut_s=[0.001] * 16)
    ).instance()

    assert (instance.steady, instance.fill) == (8.5, 0.75)
    assert [stage.in_flight for stage in instance.stages] == [2.5, 2.5]
    assert instance.cut_s == (0.0, *[0.001] * 16, 0.0)


UNEQUAL_FORWARDS = {
    "block": {
        "options": [
            {"name": "keep", "forward_s": 1.0, "backward_s": 2.0},
            {"name": "offload", "forward_s": 1.1, "backward_s": 2.1},
        ]
    },
    "head": {"options": [{"name": "keep", "forward_s": 1.0, "backward_s": 2.0}]},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": ["blok"]}, "layers[0]: 'blok' is not one of kinds; did you mean 'block'?"),
        ({"layers": [{"layer": "block"}]}, "layers[0].layer: unknown key; did you mean 'layers'?"),
        ({"layers": [{"layers": ["block"], "count": "x"}]}, 'layers[0].count: is "x"'),
        ({"layers": []}, "layers: is empty"),
        ({"stages": []}, "stages: there are 0"),
        ({"cut_s": [0.1]}, "cut_s: has 1 values; between 17 layers are 16 places to cut"),
        ({"kinds": {"block": {"options": []}}}, "options: is empty"),
        ({"schedule": "custom"}, "steady: is missing"),
        ({"schedule": "custom", "steady": 3.0}, "stages[0].in_flight: is missing"),
        ({"schedule": "zigzag"}, "schedule"),
        (
            {"schedule": "gpipe", "kinds": UNEQUAL_FORWARDS},
            "kinds.block.options: differ in forward_s",
        ),
        ({"stages": [{"capacity_bytes": -1.0}]}, "stages[0].capacity_bytes: is -1.0"),
        ({"layers": [{"layers": ["block"] * 9, "count": 4096}]}, "more than 4096"),
        ({"microbatches": 3}, "did you mean 'micro_batches'?"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DocumentError) as error:
        Problem.of(example(**changes))

    assert words in str(error.value)


def test_hosts_and_requirements_become_ties_of_the_instance() -> None:
    hosts = [{"capacity_bytes": 3e10, "ranks": [1, 1, 0, 0]}]
    require = [
        {"layers": [0, 3], "together": True},
        {"layers": [4, 5], "stages": [1, 2]},
        {"at_most": 6, "stages": [0]},
        {"layers": [0, 1], "options": ["recompute"]},
        {"at_most": 9},
    ]

    instance = Problem.of(example(hosts=hosts, require=require)).instance()

    assert instance.hosts == (HostMemory(capacity_bytes=3e10, ranks=(1, 1, 0, 0)),)
    assert instance.sides == (
        SideConstraint(layers=(0, 1, 2, 3), together=True),
        SideConstraint(layers=(4, 5), stages=(1, 2)),
        SideConstraint(at_most=6, stages=(0,)),
        SideConstraint(layers=(0, 1), options=("recompute",)),
        SideConstraint(at_most=9),
    )
    answer = solve_chain(instance)
    assert isinstance(answer, Solution)
    assert answer.cuts[1] in range(4, 7)
    assert [instance.options_of(at)[answer.options[at]].name for at in (0, 1)] == ["recompute"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": [{"capacity_bytes": 1e9, "ranks": [1]}]}, "hosts[0].ranks: has 1 numbers"),
        ({"require": [{"layers": [0, 99], "together": True}]}, "layers 0 to 16"),
        ({"require": [{"layers": [0, 1], "stages": [9]}]}, "stages 0 to 3"),
        ({"require": [{"layers": [0, 1], "options": ["kep"]}]}, "did you mean 'keep'"),
        ({"require": [{"layers": [0, 1]}]}, "ask for one of"),
        ({"require": [{"stages": [0]}]}, "layers: is missing"),
    ],
)
def test_ties_that_make_no_sense_say_where(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DocumentError) as refused:
        Problem.of(example(**changes))

    assert message in str(refused.value)
