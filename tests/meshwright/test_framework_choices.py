"""Options of a framework that need libraries: named where they gain, taken where allowed."""

from __future__ import annotations

from meshwright.api.commands import answer_to
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.framework import OPTIONS
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request


def asked(model: str, *allowed: str, framework: str = "megatron") -> Request:
    fixed = ["tp=1", "pp=1", "zero=1", "micro_batch=1", *(["ep=8"] if "mixtral" in model else [])]
    return Request.create(
        resolve_model(model),
        resolve_cluster("4x8xh200-sxm"),
        seq_len=4096,
        global_batch=64,
        pins=read_pins(fixed, allowed),
        framework=framework,
    )


def test_choices_are_options_and_say_what_they_need() -> None:
    for framework in frameworks().values():
        for choice in framework.choices:
            assert choice.options and set(choice.options) <= OPTIONS.keys()
            assert choice.needs


def test_what_options_bring_is_noted_and_taken_where_it_is_allowed() -> None:
    plain = answer_to(asked("mixtral-8x7b"), "fastest")
    allowed = answer_to(asked("mixtral-8x7b", "framework-options"), "fastest")

    [note] = [note for note in plain.prediction.notes if "--framework" in note]
    assert "DeepEP" in note
    assert "for the same layout" in note
    assert "--allow framework-options" in note
    assert plain.plan.framework == "megatron"
    assert allowed.plan.framework in note
    assert allowed.prediction.step_time_s < plain.prediction.step_time_s
    assert not [note for note in allowed.prediction.notes if "--framework" in note]


def test_a_dense_model_has_no_choices() -> None:
    answer = answer_to(asked("llama-3.1-8b", "framework-options"), "fastest")

    assert answer.plan.framework == "megatron"
    assert not [note for note in answer.prediction.notes if "--framework" in note]
