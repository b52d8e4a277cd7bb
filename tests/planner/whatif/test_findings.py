"""Sentences of answers, against figures set or worked out by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshwright.planner.report.facts import MOST_LINES
from meshwright.planner.report.whatif_text import result_facts
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.findings import answers
from meshwright.planner.whatif.planning import plan_candidate
from meshwright.planner.whatif.pricing.break_even import break_evens
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result, run
from tests.planner.whatif.test_study import PRICE, study


def said(result: Result, begin: str) -> str:
    [sentence] = [text for text in answers(result) if text.startswith(begin)]
    return sentence


def test_a_changed_candidate_is_compared_with_the_plain_one() -> None:
    result = run(
        study(
            offers=[
                {"cluster": "2x8xa10g", "rent": PRICE},
                {"name": "fast", "cluster": "2x8xa10g", "change": {"network": 4.0}},
            ]
        ),
        processes=1,
    )

    slow, fast = (o.step_s.value for o in result.outcomes if o.step_s)
    text = said(result, "2x8xa10g with network between nodes x 4, which is not sold")
    assert f"{100 * (1 - fast / slow):.0f} % less time" in text


@pytest.mark.matrix
def test_a_change_that_makes_a_model_fit_is_said() -> None:
    offer = {"cluster": "4xa10g", "tuning": "full", "rent": PRICE}
    more = {**offer, "name": "more", "change": {"memory": 8.0}, "rent": None}
    result = run(
        study(
            models=["llama-3.1-8b"],
            offers=[offer, more],
            work={"seq_len": 1024, "framework": "native"},
        ),
        processes=1,
    )

    assert "fits then" in said(result, "4xa10g with device memory x 8")
    assert said(result, "llama-3.1-8b fits") == ("llama-3.1-8b fits more; it does not fit 4xa10g.")


@pytest.mark.matrix
def test_a_days_price_by_hand() -> None:
    result = run(
        study(
            offers=[{"cluster": "4x8xa10g", "rent": PRICE}],
            marginal={"changes": {"devices": [2.0], "network": [2.0]}},
        ),
        processes=1,
    )

    base = result.base
    [devices] = [c for c in result.marginal if c.change == "devices"]
    assert base is not None and base.usd is not None and base.hours is not None
    assert devices.cost is not None
    days = base.hours.value * (1 - devices.time) / 24
    extra = base.usd.value * (devices.cost - 1)
    text = said(result, "devices x 2 saves")
    assert f"{days:,.2g} days" in text
    assert ("at no more cost" in text) == (extra <= 0.001 * base.usd.value)
    links = said(result, "The step waits for links")
    assert f"{100 * base.link_share:.1f} %" in links


@pytest.mark.matrix
def test_mixed_devices_are_compared_with_each_kind_alone() -> None:
    result = run(
        study(
            work={"seq_len": 1024, "global_batch": 48, "framework": "native"},
            offers=[
                {"name": "old", "cluster": "8xa10g", "owned": True},
                {"name": "new", "cluster": "4xl4", "rent": PRICE},
                {"name": "both", "cluster": "8xa10g+4xl4", "owned": ["a10g"], "rent": PRICE},
                {"name": "bought", "cluster": "4xl4", "buy": {**BOUGHT}},
            ],
        ),
        processes=1,
    )

    rates = {o.candidate: o.tokens_per_s.value for o in result.outcomes if o.tokens_per_s}
    text = said(result, "both trains")
    assert f"{rates['old'] + rates['new']:,.0f} together" in text
    by_name = {o.candidate: o for o in result.outcomes}
    old, bought = by_name["old"].usd, by_name["bought"].usd
    assert old is not None and bought is not None
    assert f"{(bought.value - old.value) / 8:,.0f} USD each" in said(result, "Replacing old")


BOUGHT = {"usd_per_device": 2500.0, "date": "2026-11", "source": "a quote"}


def test_each_provider_that_can_make_a_cluster_becomes_a_candidate() -> None:
    asked = study(offers=[{"cluster": "{n}x8xh100-sxm-80gb", "n": [2], "rent": EACH}])

    names = {c.name for c in candidates_of(asked)}

    # Of all who rent H100 on demand, these have whole nodes, their host in the price, a network.
    assert names == {f"2x8xh100-sxm-80gb at {who}" for who in WITH_NETWORKS}


WITH_NETWORKS = ("aws", "azure", "coreweave", "nebius", "oci")
EACH = {"each_provider": True}


@pytest.mark.matrix
def test_nodes_stay_idle_where_a_plan_is_faster_without_them() -> None:
    # 64 sequences: on 9 x 8 devices 72 divide nothing so well as fewer of them.
    asked = study(offers=[{"cluster": "9x8xa10g", "rent": PRICE}])
    [candidate] = candidates_of(asked)
    [eight] = candidates_of(study(offers=[{"cluster": "8x8xa10g", "rent": PRICE}]))

    nine, fewer = (evaluate(asked, "gpt2", each) for each in (candidate, eight))

    assert nine.idle == fewer.idle + 8
    assert f"{nine.idle} of 72 devices idle" in nine.layout
    assert nine.step_s == fewer.step_s
    assert nine.usd is not None and fewer.usd is not None
    assert nine.goodput is not None and fewer.goodput is not None
    # Idle ones are paid, and fail as others do.
    less_often = fewer.goodput.value / nine.goodput.value
    assert nine.usd.value == pytest.approx(fewer.usd.value * 72 / 64 * less_often)


@pytest.mark.matrix
def test_twenty_purchases_beside_twenty_rents_are_one_page() -> None:
    """400 pairs of terms could each be a sentence; the rest stands in tables and CSV."""
    quote = {"date": "2026-11", "source": "a quote"}
    bought = [
        {"name": f"buy {k}", "cluster": "4xa10g", "buy": {"usd_per_device": 9e3 + k, **quote}}
        for k in range(20)
    ]
    rented = [
        {
            "name": f"rent {k}",
            "cluster": "4xa10g",
            "rent": {**PRICE, "usd_per_device_hour": 2.0 + k},
        }
        for k in range(20)
    ]
    asked = study(offers=[*bought, *rented])
    candidates = candidates_of(asked)
    plan = plan_candidate(asked, "gpt2", candidates[0])
    outcomes = tuple(evaluate(asked, "gpt2", candidate, plan) for candidate in candidates)
    result = Result(
        study=asked,
        outcomes=outcomes,
        ranks={"gpt2": rank_outcomes(asked, outcomes)},
        candidates={candidate.name: candidate for candidate in candidates},
        break_even=tuple(break_evens(candidates)),
    )

    assert len(result.break_even) == 40
    assert len(answers(result)) <= 10
    page = Console(width=80, file=io.StringIO(), record=True)
    page.print(result_facts(result))
    assert len(page.export_text().splitlines()) <= MOST_LINES


def test_what_the_work_uses_is_not_called_assumed() -> None:
    quote = {"date": "2026-11", "source": "a quote"}
    offers = [
        {"name": "bought", "cluster": "4xa10g", "buy": {"usd_per_device": 9e3, **quote}},
        {"name": "rented", "cluster": "4xa10g", "rent": PRICE},
    ]
    for assumptions, word in (
        ({}, "this work alone uses"),
        ({"utilisation": 0.7}, "70 % are given"),
    ):
        result = run(study(offers=offers, assumptions=assumptions), processes=1)
        said = [text for text in answers(result) if "utilisation" in text]
        assert any(word in text for text in said), said
