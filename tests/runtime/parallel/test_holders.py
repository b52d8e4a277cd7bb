"""Holders of a parameter where pipelines differ, by hand: no process is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshwright.runtime.parallel.holders import holders_of


def kind(*stages: str) -> SimpleNamespace:
    """One kind of pipeline; a letter is a layer."""
    return SimpleNamespace(
        stages=[
            SimpleNamespace(layers=[SimpleNamespace(layer=layer) for layer in stage])
            for stage in stages
        ]
    )


def group(stages: tuple[frozenset[int], ...]) -> SimpleNamespace:
    """A group with a member for each stage that holds a parameter."""
    members = sum(len(of_kind) for of_kind in stages)
    return SimpleNamespace(size=lambda: members)


def place(tensor: int) -> Any:
    """A rank that is in all groups."""
    return SimpleNamespace(
        degrees=SimpleNamespace(tensor=tensor),
        holder_groups=lambda homes: {stages: group(stages) for stages in homes},
    )


def test_a_gradient_has_the_ranks_of_every_kind_that_hold_its_layer() -> None:
    plan: Any = SimpleNamespace(kinds=[kind("ab", "cd"), kind("a", "b", "cd")])
    readers = {"first": ["a"], "middle": ["b"], "tied": ["a", "d"]}

    for tensor in (1, 2):
        found = holders_of(plan, place(tensor), readers)

        assert {name: each.ranks for name, each in found.items()} == {
            "first": 2 * tensor,
            "middle": 2 * tensor,
            "tied": 4 * tensor,
        }
        assert {name for name, each in found.items() if each.tied} == {"tied"}
