"""Two solvers that share no method: the integer program and the exact inner solver."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver import highs, ilp
from meshwright.planner.solver.partition_problem import (
    Infeasible,
    Instance,
    Option,
    Solution,
    StageLimits,
    Unfinished,
    fits,
)
from tests.planner.solver.small_instances import objective_s, random_instance

Kind = tuple[Option, ...]


def agree(instance: Instance) -> Solution | Infeasible:
    exact, program = inner.solve(instance), ilp.solve(instance)
    if isinstance(exact, Infeasible):
        assert isinstance(program, Infeasible)
        return exact
    assert isinstance(exact, Solution)
    assert isinstance(program, Solution)
    assert program.objective_s == pytest.approx(exact.objective_s, rel=2e-6, abs=1e-9)
    assert program.optimal
    assert program.lower_bound_s <= exact.objective_s * (1 + 1e-9) + 1e-9
    assert fits(instance, program)
    for answer in (exact, program):
        recomputed_s = objective_s(instance, answer.cuts, answer.options)
        assert recomputed_s == pytest.approx(answer.objective_s, rel=1e-9)
    return exact


@pytest.mark.parametrize("start", range(1000, 1060, 20))
@pytest.mark.long("1020", "1000")
def test_random_problems_have_one_optimum(start: int) -> None:
    answers = [
        agree(random_instance(seed, sync_by_option=seed % 2 == 0, forward_apart=seed % 3 == 0))
        for seed in range(start, start + 20)
    ]

    assert any(isinstance(answer, Solution) for answer in answers)


def block(time_ms: float, stored_gb: float, resident_gb: float) -> Kind:
    """Keep everything, recompute attention, recompute all; one percent of it is synchronised."""
    return tuple(
        Option(
            name=name,
            forward_s=1e-3 * time_ms / 3,
            backward_s=1e-3 * time_ms * (factor - 1 / 3),
            stored_bytes=1e9 * stored_gb * kept,
            transient_bytes=1e9 * stored_gb * transient,
            resident_bytes=1e9 * resident_gb,
            sync_s=1e-5 * time_ms,
        )
        for name, factor, kept, transient in [
            ("none", 1.0, 1.0, 0.05),
            ("selective", 1.04, 0.7, 0.3),
            ("full", 1.34, 0.06, 1.0),
        ]
    )


def end(time_ms: float, resident_gb: float, transient_gb: float = 0.0) -> Kind:
    return (
        Option(
            name="none",
            forward_s=1e-3 * time_ms / 3,
            backward_s=2e-3 * time_ms / 3,
            stored_bytes=0.05e9,
            transient_bytes=1e9 * transient_gb,
            resident_bytes=1e9 * resident_gb,
        ),
    )


def pipeline(
    layers: list[int], kinds: list[Kind], depth: int, microbatches: int, capacity_gb: float
) -> Instance:
    return Instance(
        layers=tuple(layers),
        kinds=tuple(kinds),
        stages=tuple(
            StageLimits(
                capacity_bytes=1e9 * capacity_gb,
                in_flight=min(microbatches, depth - s),
                exposed_s=1e-4,
                fixed_bytes=0.5e9,
            )
            for s in range(depth)
        ),
        steady=microbatches - 1,
    )


FAMILIES = {
    "llama": pipeline(
        [0] + [1] * 32 + [2], [end(0.4, 1.1), block(11, 1.1, 1.3), end(9, 1.1, 1.4)], 4, 16, 18
    ),
    "gpt3": pipeline(
        [0] + [1] * 24 + [2], [end(0.2, 2), block(21, 1.9, 1.2), end(4, 0.1, 0.8)], 8, 16, 12
    ),
    "gemma, 5 local to 1 global": pipeline(
        [2] + [0, 0, 0, 0, 0, 1] * 4 + [3],
        [block(8, 0.7, 1), block(12, 0.9, 1), end(0.3, 3), end(7, 0, 2)],
        4,
        16,
        14,
    ),
    "mixture of experts after dense layers": pipeline(
        [2] + [0] * 3 + [1] * 21 + [3],
        [block(12, 0.6, 0.4), block(17, 1, 2.9), end(0.3, 1.5), end(12, 1.5, 1)],
        6,
        24,
        18,
    ),
    "encoder and decoder": pipeline(
        [0] * 10 + [1] * 20, [block(8, 0.7, 0.9), block(12, 1, 1.2)], 5, 10, 14
    ),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_solvers_agree_on_a_model_of_each_family(family: str) -> None:
    answer = agree(FAMILIES[family])

    assert isinstance(answer, Solution)
    assert 0 < sum(option > 0 for option in answer.options) < len(answer.options)


def test_costs_of_cuts_and_unequal_devices_are_the_same_problem_to_both() -> None:
    kinds = [end(0.4, 1.1), block(11, 1.1, 1.3), end(9, 1.1, 1.4)]
    instance = pipeline([0] + [1] * 14 + [2], kinds, 4, 16, 10)
    count = len(instance.layers)
    slow_and_small = replace(instance.stages[1], time_scale=1.5, capacity_bytes=8e9)
    stages = (instance.stages[0], slow_and_small, *instance.stages[2:])
    cut_s = tuple(1e-3 * (j % 5) for j in range(count + 1))

    assert isinstance(agree(replace(instance, stages=stages, cut_s=cut_s)), Solution)


def test_no_node_at_all_leaves_a_bound_and_no_split() -> None:
    answer = ilp.solve(FAMILIES["gpt3"], most_nodes=0)

    assert isinstance(answer, Unfinished)
    assert answer.lower_bound_s <= 1.0 or math.isinf(answer.lower_bound_s)


def test_limits_are_of_work_and_not_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops early stops at the same place, however busy the machine is."""
    asked: list[dict[str, object]] = []
    solver = highs.pulp.HiGHS

    def recorded(**options: object) -> object:
        asked.append(options)
        return solver(**options)

    monkeypatch.setattr(highs.pulp, "HiGHS", recorded)
    answers = [ilp.solve(FAMILIES["gpt3"], most_nodes=1) for _ in range(2)]

    assert answers[0] == answers[1]
    assert all(not name.lower().startswith("time") for options in asked for name in options)
    assert {options["mip_max_nodes"] for options in asked} == {1}


def test_each_row_of_the_program_stands_in_its_statement() -> None:
    rows = re.findall(r'program \+= .*, f?"(.*)"$', inspect.getsource(ilp), re.MULTILINE)
    stated = ilp.__doc__ or ""

    for row in rows:
        name = row.replace("{name}_is_b", "n_{a}_{s}_{g}_{k}_is_b")
        name = name.replace("{name}", "output{a}_for_{b}_on_stage{s}")
        assert re.sub(r"^(side\{number\}_).*", r"\1...", name) in stated, row
    assert len(rows) > 15


def test_both_name_the_same_reason() -> None:
    instance = FAMILIES["llama"]
    small = tuple(replace(stage, capacity_bytes=4e9) for stage in instance.stages)

    exact, program = (solver.solve(replace(instance, stages=small)) for solver in (inner, ilp))

    assert exact == program
    assert isinstance(exact, Infeasible)
    assert "even with the minimum-memory options" in exact.reason
