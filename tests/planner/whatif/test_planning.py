"""The fastest public framework, against every framework asked for by name."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.whatif import planning, run_study
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.planning import plan_candidate, public_frameworks
from meshwright.planner.whatif.run_study import run
from tests.planner.whatif.test_study import PRICE, study

WORK = {"seq_len": 1024, "global_batch": 64}


def fastest(cluster: str, **said: Any) -> Any:
    work = {**WORK, **said.pop("work", {})}
    asked = study(models=["gpt2-xl"], work=work, offers=[{"cluster": cluster, **said}])
    [candidate] = candidates_of(asked)
    return plan_candidate(asked, "gpt2-xl", candidate)


def test_the_default_is_the_fastest_of_the_public_frameworks() -> None:
    steps = {
        framework: fastest("8xh100-sxm-80gb", work={"framework": framework}).step_s
        for framework in public_frameworks("cuda")
    }

    found = fastest("8xh100-sxm-80gb")

    assert found.step_s == pytest.approx(min(steps.values()), rel=1e-3)
    assert found.framework == min(steps, key=steps.__getitem__).partition("+")[0]


def test_our_own_runtime_beside_a_public_one_keeps_all_on_the_devices() -> None:
    asked = study(offers=[{"cluster": "8xa10g", "allow": ["offload,compress"]}])
    [candidate] = candidates_of(asked)

    beside = run_study._native(run_study._Task(asked, "gpt2", candidate)).candidate

    assert beside.allow == ("compress",)
    assert candidate.allow == ("offload,compress",)


@pytest.mark.parametrize("network", [1e-3, pytest.param(1.0, marks=pytest.mark.matrix)])
def test_links_that_are_waited_for_leave_nodes_idle(network: float) -> None:
    """A batch that divides by all devices hides no part that is faster than they are together."""
    alone = fastest("1x2xh100-sxm-80gb")
    both = fastest("2x2xh100-sxm-80gb", change={"network": network})

    assert both.step_s <= alone.step_s * (1 + 1e-9)


@pytest.mark.matrix
def test_on_unequal_devices_our_own_runtime_is_priced() -> None:
    assert fastest("4xa10g+4xl4").framework == "native"


@pytest.mark.matrix
def test_eight_bits_are_tried_where_the_precision_is_left_open() -> None:
    plain, auto = fastest("8xh100-sxm-80gb"), fastest("8xh100-sxm-80gb", work={"precision": "auto"})

    assert plain.job.precision == "bf16"
    assert auto.step_s <= plain.step_s


@pytest.mark.matrix
def test_our_own_runtime_stands_beside_the_first() -> None:
    asked = study(work=WORK, offers=[{"cluster": "8xa10g", "rent": PRICE}])
    [outcome] = run(asked, processes=1).outcomes

    [candidate] = candidates_of(asked)
    own = plan_candidate(asked, "gpt2", candidate, framework="native")
    assert outcome.native_step_s == own.step_s
    assert outcome.framework != "native"


@pytest.mark.matrix
def test_between_two_sizes_of_one_framework_only_that_one_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[tuple[int, str]] = []
    search = planning.search

    def counted(request: Any, **terms: Any) -> Any:
        searched.append((request.cluster.devices, request.framework.name))
        return search(request, **terms)

    monkeypatch.setattr(planning, "search", counted)
    asked = study(
        work=WORK, offers=[{"cluster": "{n}x8xa10g", "n": [1, 2, 3, 4, 5], "rent": PRICE}]
    )

    outcomes = run(asked, processes=1).outcomes

    first = {8 * n: {framework for size, framework in searched if size == 8 * n} for n in (1, 3, 5)}
    assert all(len(frameworks) >= len(public_frameworks("cuda")) for frameworks in first.values())
    by_size = {outcome.devices: outcome.framework for outcome in outcomes}
    if by_size[8] == by_size[24]:
        of_two = [framework for size, framework in searched if size == 16 and framework != "native"]
        assert {framework.partition("+")[0] for framework in of_two} == {by_size[8]}
