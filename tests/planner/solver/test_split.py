"""A split settled by a search is laid out with the simplest options that are no worse."""

from __future__ import annotations

import pytest

from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits
from meshwright.planner.solver.split import assemble_split, content_of


def way(name: str, *, time_s: float = 3, stored: float = 0, sync: float = 1) -> Option:
    return Option(name=name, forward_s=1, backward_s=time_s - 1, stored_bytes=stored, sync_s=sync)


def instance(*options: Option, room: float = 10, layers: int = 2) -> Instance:
    return Instance(
        layers=(0,) * layers,
        kinds=(options,),
        stages=(StageLimits(capacity_bytes=room),),
        steady=1,
    )


@pytest.mark.parametrize(
    ("earlier", "taken"),
    [
        (way("same"), (0, 0)),
        (way("larger, but there is room", stored=5), (0, 0)),
        (way("room for one", stored=8), (0, 1)),
        (way("no room", stored=12), (1, 1)),
        (way("longer sync", sync=2), (1, 1)),
        (way("slower", time_s=4), (1, 1)),
    ],
)
def test_options_give_way_to_earlier_ones_that_are_no_worse(
    earlier: Option, taken: tuple[int, int]
) -> None:
    problem = instance(earlier, way("chosen"))

    split = assemble_split(problem, (0, 2), (1, 1))

    assert split.options == taken
    assert split.optimal


def test_the_content_of_a_stage_forgets_the_order() -> None:
    assert content_of((2, 0, 2, 1, 2)) == [(0, 1), (1, 1), (2, 3)]
