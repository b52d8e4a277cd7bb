"""Inputs as people have them give what they should; none is silently wrong, none crashes."""

from __future__ import annotations

import pytest

from benchmarks.inputs_read import Input, inputs, reading
from tests.parts import some_and_others

IMPORTED = [entry for entry in inputs() if entry.command is None]


@pytest.mark.parametrize("entries", some_and_others(IMPORTED, IMPORTED[::14]))
def test_inputs_give_what_they_should(entries: list[Input]) -> None:
    wrong = {entry.source: reading(entry).differences for entry in entries}

    assert {source: differences for source, differences in wrong.items() if differences} == {}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "entry", [entry for entry in inputs() if entry.command], ids=lambda entry: entry.source
)
def test_commands_say_what_they_should(entry: Input) -> None:
    assert reading(entry).kind == "right"


def test_there_are_enough() -> None:
    every = inputs()

    assert len(every) >= 120 and sum(entry.later for entry in every) >= 40
    assert len({(entry.source, entry.reader) for entry in every}) == len(every)
