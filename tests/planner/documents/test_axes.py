"""What is declared by hand for an axis of a layout is what its row says."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.documents import framework_space, plan
from meshwright.planner.documents.axes import LAYOUT_AXES, LayoutAxis, axes_of
from meshwright.planner.documents.framework_space import FACTS, WORDS, Space
from meshwright.planner.documents.plan import Layout, Plan
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.framework_configs.exportable_plan import _UNSUPPORTED, _WRITTEN
from meshwright.planner.requests.pins import Allowance, Pins, read_pins

EACH = pytest.mark.parametrize("axis", LAYOUT_AXES, ids=lambda axis: axis.name)


def words_of(kind: Any) -> set[object]:
    """The words of a Literal, wherever it stands in a type."""
    found = {one for one in get_args(kind) if isinstance(one, str)}
    return found.union(*(words_of(one) for one in get_args(kind)))


def unusual(axis: LayoutAxis) -> Any:
    """A value that is not the usual one."""
    if axis.values:
        return next(one for one in axis.values if one != axis.usual)
    return {
        "prefetch": 1,
        "reshard_after_forward": 2,
        "hierarchical_all_to_all": 2,
        "loss": ChunkedLoss(rows=64),
    }[axis.name]


@EACH
def test_fields_have_the_words_and_the_default_of_the_row(axis: LayoutAxis) -> None:
    defaults = {field.name: field.default for field in fields(Layout)}
    assert defaults[axis.name] == axis.usual
    assert Plan.model_fields[axis.name].default == axis.usual
    assert Pins().__getattribute__(axis.name) is None
    if axis.values:
        hints = get_type_hints(Layout, vars(plan)), get_type_hints(Pins)
        for hint in (*(hint[axis.name] for hint in hints), Plan.model_fields[axis.name].annotation):
            assert words_of(hint) == set(axis.values)


@EACH
def test_a_space_lists_values_of_the_row_with_the_usual_one(axis: LayoutAxis) -> None:
    for space in (Space(), *(one.space for one in frameworks().values() if one.space is not None)):
        listed = getattr(space, axis.space)
        assert isinstance(listed, bool) == (axis.usual is None)
        if axis.values:
            assert set(listed) <= set(axis.values)
    if axis.values:
        hint = get_type_hints(Space, vars(framework_space), include_extras=True)[axis.space]
        assert words_of(hint) == set(axis.values)
        assert axis.name in FACTS and axis.name in WORDS


@EACH
def test_the_text_of_a_layout_and_a_pin_have_the_name_of_the_row(axis: LayoutAxis) -> None:
    value = unusual(axis)
    other = replace(Layout(), **{axis.name: value})

    assert f" {axis.short}=" not in Layout().text()
    assert f" {axis.short}=" in other.text()
    assert axes_of(other) == axes_of(Layout()) | {axis.name: value}
    for word in axis.values:
        allow = [axis.allowance] if axis.allowance else []
        pins = read_pins([f"{axis.short}={word}"], allow)
        assert getattr(pins, axis.name) == word
        assert pins.allow(Layout()) == (word == axis.usual)
        assert pins.axes() == axes_of(Layout()) | {axis.name: word}


def test_every_axis_is_written_or_refused_by_exports_and_every_allowance_is_one() -> None:
    names = {axis.name for axis in LAYOUT_AXES}

    assert len(names) == len({axis.short for axis in LAYOUT_AXES}) == len(LAYOUT_AXES)
    assert names <= _WRITTEN | set(_UNSUPPORTED)
    assert not _WRITTEN & set(_UNSUPPORTED)
    assert {axis.allowance for axis in LAYOUT_AXES} - {None} <= set(get_args(Allowance))
