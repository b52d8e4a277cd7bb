"""An answer's text: one plan, its step, and what is proven of it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job, Layout, Stage
from meshwright.planner.documents.prediction import Certificate
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.report.text import answer_text, proof_facts, stages_text, why_text
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Alternative, Answer
from meshwright.planner.search.proof_account import of_plan
from meshwright.planner.search.search import search

OPTIMUM = Layout(pipeline=2, schedule="interleaved", virtual_stages=4)
PLAN = replace(OPTIMUM, virtual_stages=3)


def certificate() -> Certificate:
    return Certificate(
        statement="s",
        model="m",
        solver="exact",
        optimal=True,
        objective_s=7.53,
        lower_bound_s=7.53,
        gap=0.0,
        configurations=1234,
        counts={},
        layout=OPTIMUM.text(),
    )


def printed(shown: RenderableType, width: int = 160) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.fixture(scope="module")
def answer() -> Answer:
    job = Job(seq_len=1024, global_batch=32)
    return search(
        Request(
            resolve_model("gpt2"), resolve_cluster("8xv100-sxm-32gb"), job, pins=Pins(pipeline=4)
        )
    )


def test_a_plan_slower_than_the_fastest_has_its_own_gap() -> None:
    found = of_plan(certificate(), layout=PLAN, step_s=8.0)

    assert found.plan is not None
    assert found.plan.gap == pytest.approx(1 - 7.53 / 8.0)
    assert found.gap == 0.0 and found.optimal and found.objective_s == 7.53
    assert found.statement == (
        "The plan takes 8 s a step. None of 1,234 configurations takes less than 7.53 s "
        "(gap 5.9 %)."
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (0.0, "the fastest plan found"),
        (0.0004, "the simplest of equally fast plans"),
        (
            0.012,
            "the simplest plan within 1.2 % of the fastest, a tie: predicted ratios err by 6 %",
        ),
    ],
)
def test_why_a_plan_was_chosen(more: float, said: str, answer: Answer) -> None:
    chosen = Alternative(what="chosen", plan=answer.plan, prediction=answer.prediction, more=more)
    assert why_text([chosen]) == said


def test_an_answer_tells_one_plan_in_ten_lines(answer: Answer) -> None:
    lines = printed(answer_text(answer.plan, answer.prediction, answer.certificate, explain=False))

    proof = answer.certificate.plan
    assert proof is not None
    assert proof.layout == answer.plan.layout.text()
    assert proof.step_time_s == answer.prediction.step_time_s
    assert len(lines) <= 10
    text = " ".join(line.strip() for line in lines)
    assert proof.layout in lines[1]
    assert proof.gap < 5e-4
    assert f"no faster plan among {answer.certificate.configurations:,} configurations" in text
    assert proof.statement not in text and "assumptions" not in text


def test_a_gap_that_is_open_is_printed_with_its_bound() -> None:
    [fact] = proof_facts(of_plan(certificate(), layout=PLAN, step_s=8.0))

    assert fact.text == "none of 1,234 configurations takes less than 7.53 s (gap 5.9 %)"


def test_an_explanation_has_stages_assumptions_counts_and_finalists(answer: Answer) -> None:
    shown = answer_text(answer.plan, answer.prediction, answer.certificate, explain=True)

    text = "\n".join(printed(shown, width=1000))
    assert "peak memory" in text and "\nassumptions\n" in text
    assert all(f" [{item.source}]" in text for item in answer.prediction.assumptions)
    proof = answer.certificate.plan
    assert proof is not None and proof.statement in text
    counts = answer.certificate.counts.items()
    assert all(f"{name} {count:,}" in text for name, count in counts if count)
    assert all(
        f"{one.layout}: {seconds_text(one.step_time_s)}" in text
        for one in answer.certificate.finalists
    )


@pytest.mark.parametrize("pipeline", [1, 4])
def test_the_bound_of_a_simulated_step_is_below_it(pipeline: int) -> None:
    job, pins = Job(seq_len=1024, global_batch=32), Pins(pipeline=pipeline, schedule="1f1b")
    found = search(
        Request(resolve_model("gpt2"), resolve_cluster("4xv100-sxm-32gb"), job, pins=pins)
    )

    proof = found.certificate.plan

    assert proof is not None
    assert 0 < proof.lower_bound_s <= proof.step_time_s
    assert f"less than {seconds_text(proof.lower_bound_s)} " in proof.statement


def test_many_stages_are_told_in_one_line(answer: Answer) -> None:
    stage = answer.plan.stages[1]
    one, two = stage.layers[:1], stage.layers[:2]
    deep = answer.plan.model_copy(
        update={"stages": tuple(Stage(layers=layers) for layers in (one, two) * 20)}
    )

    assert stages_text(deep) == "40 of 1 to 2 layers, recompute none"
    assert stages_text(answer.plan).startswith(
        "/".join(str(len(s.layers)) for s in answer.plan.stages)
    )
