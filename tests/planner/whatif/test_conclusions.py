"""Headlines, on outcomes written here: no plan is searched."""

from __future__ import annotations

import datetime
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from meshwright.planner.report.whatif_text import a_day_text, result_facts
from meshwright.planner.whatif.candidates import Candidate, candidates_of
from meshwright.planner.whatif.conclusions import verdicts, ways_of
from meshwright.planner.whatif.findings import answers
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.ranking import flips, rank_outcomes
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.study import Study
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_study import PRICE, study


def outcome(
    candidate: Candidate, model: str, hours: float, dollars: float, **said: Any
) -> CandidateOutcome:
    plain = CandidateOutcome(
        candidate=candidate.name,
        model=model,
        devices=candidate.devices,
        accelerator=candidate.cluster.groups[0].accelerator.name,
        fits=True,
        binding="compute",
        layout=f"plan of {candidate.name}",
        framework="megatron",
        hours=exact(hours),
        usd=exact(dollars),
        step_s=exact(hours / 100),
        tokens_per_s=exact(1e9 / hours),
        usd_per_device_hour=exact(2.0),
        hypothetical=candidate.hypothetical,
    )
    return replace(plain, **said)


def result(asked: Study, outcomes: list[CandidateOutcome]) -> Result:
    return Result(
        study=asked,
        outcomes=tuple(outcomes),
        ranks={
            m: rank_outcomes(asked, [o for o in outcomes if o.model == m]) for m in asked.models
        },
        candidates={candidate.name: candidate for candidate in candidates_of(asked)},
    )


TWO: list[dict[str, Any]] = [
    {"name": "old", "cluster": "8xa10g", "rent": PRICE},
    {"name": "new", "cluster": "8xh100-sxm-80gb", "rent": PRICE},
]


def test_several_models_have_a_line_each_the_largest_and_the_crossover() -> None:
    asked = study(models=["small", "middle", "large"], offers=TWO)
    old, new = candidates_of(asked)
    sizes = {"small": 1, "middle": 8, "large": 70}
    outcomes = []
    for model, parameters in sizes.items():
        cheap = {"small": 1.0, "middle": 5.0, "large": 9.0}[model]
        outcomes.append(outcome(old, model, 10.0, cheap, parameters=parameters))
        missed = ("budget: 9 of 4 USD",) if model == "large" else ()
        more = {"parameters": parameters, "misses": missed}
        outcomes.append(outcome(new, model, 5.0, 4.0, **more))
        if model == "large":
            outcomes[-2] = replace(outcomes[-2], misses=missed)

    said = verdicts(result(asked, outcomes))

    assert [text.split(":")[0] for text in said[:3]] == ["small", "middle", "large"]
    assert "none reaches the goal" in said[2]
    assert said[3] == "The largest model that meets the goal: middle, on new, old."
    assert said[4] == "From middle on, new comes first; up to small, old."


def test_what_has_a_price_of_its_own_is_sold() -> None:
    quoted = {"name": "old with more", "change": {"memory": 1.5}}
    asked = study(offers=[TWO[0], {**TWO[0], **quoted}])
    old, more = candidates_of(asked)

    found = result(asked, [outcome(old, "gpt2", 10.0, 5.0), outcome(more, "gpt2", 8.0, 4.0)])

    assert verdicts(found)[0].startswith("old with more for gpt2")
    assert "not sold" not in " ".join(answers(found))


def test_how_surely_the_first_is_the_cheapest() -> None:
    asked = study(offers=TWO)
    old, new = candidates_of(asked)
    # ln(8 / 4) over the width from 4 up to 8 and from 8 down to 4, each 80 %: 0.6931 / 0.9803 of
    # 1.2816 is 0.9062 standard deviations, 0.82.
    price = UncertainValue(value=2.0, low=1.0, high=4.0)
    first = outcome(old, "gpt2", 10.0, 4.0, usd_per_device_hour=price, price="one quote")
    second = outcome(new, "gpt2", 20.0, 8.0, usd_per_device_hour=price, price="another")
    alike = replace(second, price="one quote")

    assert (
        "cheapest of 2 with probability 0.82, new with 0.18"
        in verdicts(result(asked, [first, second]))[0].lower()
    )
    # At the same quote only the times differ.
    assert (
        "cheapest of 2 with probability 1.00" in verdicts(result(asked, [first, alike]))[0].lower()
    )


def mixed_study(**goal: float) -> Study:
    return study(
        models=["m"],
        goal={"tokens": 1e9, **goal},
        offers=[
            {"name": "mine", "cluster": "8xa10g", "owned": True},
            {"name": "new", "cluster": "4xl4", "rent": PRICE},
            {"name": "both", "cluster": "8xa10g+4xl4", "owned": ["a10g"], "rent": PRICE},
            {"name": "bought", "cluster": "4xl4", "buy": {**PRICE_TO_BUY}},
        ],
    )


PRICE_TO_BUY = {"usd_per_device": 2500.0, "date": "2026-11", "source": "a quote"}


def test_keep_split_mix_or_replace_by_hand() -> None:
    asked = mixed_study()
    mine, new, both, bought = candidates_of(asked)
    # Days and dollars: mine 30 and 300, new 60 and 1,200, together 25 and 900, bought 60 and 600.
    outcomes = [
        outcome(mine, "m", 720.0, 300.0),
        outcome(new, "m", 1440.0, 1200.0),
        outcome(both, "m", 600.0, 900.0),
        outcome(bought, "m", 1440.0, 600.0),
    ]
    found = result(asked, outcomes)

    ways = ways_of(found, "m")

    # A run on each: 1 / (1 / 30 + 1 / 60) = 20 days of 10 and of 20 USD a day.
    assert ways["split"] == pytest.approx((20.0, 600.0))
    said = verdicts(found)[-1]
    # Together 5 days sooner for 600 more.
    assert said.startswith("Verdict: keep, the cheapest way; mix if days count: 5 days sooner at ")
    assert "120 USD each" in said
    apart = "Two runs at once, one on each kind of device, would take 20 days and 600 USD."
    assert said.endswith(apart)
    # Two runs of parts of the tokens are no way to train one model, within 22 days either.
    late = verdicts(result(mixed_study(deadline_days=22.0), outcomes))[-1]
    assert late.startswith("No run meets the deadline: keep, 30 days") and late.endswith(apart)


def test_the_verdict_of_ways_is_none_that_keeps_the_deadline_too_seldom() -> None:
    """Bought beside is cheaper than rented beside, and late in more futures than is asked for."""
    asked = study(
        models=["m"],
        goal={"tokens": 1e9, "deadline_days": 29.0},
        offers=[
            {"name": "mine", "cluster": "8xa10g", "owned": True},
            {"name": "rented", "cluster": "8xa10g+4xl4", "owned": ["a10g"], "rent": PRICE},
            {
                "name": "bought",
                "cluster": "8xa10g+4xl4",
                "owned": ["a10g"],
                "buy": {"of": ["l4"], **PRICE_TO_BUY},
            },
        ],
    )
    mine, rented, bought = candidates_of(asked)
    found = [
        outcome(mine, "m", 720.0, 300.0, misses=("deadline: 30 of 29 days",)),
        outcome(rented, "m", 600.0, 900.0, chances={"deadline": 0.9}),
        outcome(bought, "m", 600.0, 800.0, chances={"deadline": 0.5}),
    ]

    said = [text for text in verdicts(result(asked, found)) if text.startswith("Verdict")]

    assert len(said) == 1 and said[0].startswith("Verdict: mix, the cheapest way.")
    assert "mix, bought, 25 days and 800 USD" in said[0]


def test_the_headline_has_what_is_signed_and_what_precision_was_chosen() -> None:
    asked = study(
        models=["m"],
        work={"precision": "auto"},
        offers=[{"name": "bought", "cluster": "4xl4", "buy": {**PRICE_TO_BUY}}],
    )
    [bought] = candidates_of(asked)
    plan = SimpleNamespace(precision="fp8")
    found = outcome(bought, "m", 1440.0, 600.0, capital_usd=10_000.0, plan=plan)

    [said] = verdicts(result(asked, [found]))

    assert "under megatron in fp8. Capex 10,000 USD." in said


def test_a_wider_domain_is_told_from_other_devices() -> None:
    asked = study(
        models=["m"],
        offers=[
            {"name": "nodes", "cluster": "9x8xb200"},
            {"name": "joined", "cluster": "9x8xb200", "change": {"domain": 9.0}},
            {"name": "rack", "cluster": "1xgb200-nvl72"},
        ],
    )
    nodes, joined, rack = candidates_of(asked)
    outcomes = [
        outcome(nodes, "m", 12.0, 1.0),
        outcome(joined, "m", 10.0, 1.0),
        outcome(rack, "m", 8.0, 1.0),
    ]

    text = " ".join(answers(result(asked, outcomes)))

    # 12 / 8 = 1.50 in all: 12 / 10 = 1.20 by the domain, 10 / 8 = 1.25 by the devices.
    assert (
        "rack trains m 1.50 times as fast as nodes: 1.20 times by its domain of 72 devices, "
        "1.25 times by its devices." in text
    )


def test_another_candidate_that_our_own_runtime_ranks_first_is_named() -> None:
    """By hand: 60 USD by a framework's step of 0.1 s, and 72 by ours of 0.12 s, above 66."""
    asked = study(offers=TWO)
    old, new = candidates_of(asked)
    outcomes = [
        outcome(old, "gpt2", 10.0, 60.0, native_step_s=0.12),
        outcome(new, "gpt2", 10.0, 66.0, native_step_s=0.1),
    ]

    said = " ".join(verdicts(result(asked, outcomes)))

    assert "under our own runtime (--framework native) new ranks before old for gpt2" in said
    same = [replace(o, native_step_s=0.1) for o in outcomes]
    assert "own runtime (--framework" not in " ".join(verdicts(result(asked, same)))


def test_what_keeps_the_goal_too_seldom_is_neither_tied_nor_flips_the_first() -> None:
    """It ranks behind what meets the goal, however cheap it is."""
    asked = study(offers=TWO)
    old, new = candidates_of(asked)
    sure = outcome(old, "gpt2", 10.0, 60.0, chances={"deadline": 0.9})
    for chance, tied in ((0.9, True), (0.6, False)):
        other = outcome(new, "gpt2", 10.0, 62.0, chances={"deadline": chance})

        ranks = rank_outcomes(asked, [sure, other])

        assert [rank.tied for rank in ranks] == [False, tied]
        assert [rank.place for rank in ranks] == [1, 1 if tied else 2]
        assert flips(asked, ranks) == (["new"] if tied else [])


def test_where_nothing_keeps_the_goal_as_surely_as_asked_the_surest_is_named() -> None:
    asked = study(offers=TWO)
    old, new = candidates_of(asked)
    cheap = outcome(old, "gpt2", 10.0, 60.0, chances={"deadline": 0.52, "budget": 0.9})
    surer = outcome(new, "gpt2", 10.0, 90.0, chances={"deadline": 0.798})

    said = verdicts(result(asked, [cheap, surer]))[0]

    assert said.startswith("old for gpt2")
    assert (
        "Deadline met with probability 0.52, less than the 0.8 asked for; budget met with "
        "probability 0.90; most surely by new, 0.798, 90.0 USD;" in said
    )
    alone = verdicts(result(asked, [replace(surer, usd=None)]))[0]
    assert "0.798, less than the 0.8 asked for. Bound" in alone


def test_the_fewest_devices_keep_the_deadline_as_surely_as_asked() -> None:
    """Four devices keep it at their midpoint, eight as surely as the goal wants."""
    fewer = {"name": "few", "cluster": "4xl4", "rent": PRICE}
    asked = study(offers=[TWO[0], fewer], goal={"tokens": 1e9, "deadline_days": 1.0})
    eight, four = candidates_of(asked)

    for chance, told in (
        (0.9, "with probability 0.8 or more: 8, old."),
        (0.7, "at their midpoint alone: 4, few."),
    ):
        outcomes = [
            outcome(eight, "gpt2", 10.0, 60.0, chances={"deadline": chance}),
            outcome(four, "gpt2", 20.0, 50.0, chances={"deadline": 0.6}),
        ]
        [said] = [text for text in answers(result(asked, outcomes)) if "Fewest" in text]
        assert said == f"Fewest devices that meet the deadline, {told}"


def test_a_rival_that_is_the_cheapest_oftener_is_said_to_be_no_lower_at_its_midpoint() -> None:
    """By hand: ln 2.02 / 2.00 = 0.01 lies 0.018 widths (ln 2.02 / 1.2816) below: 0.49."""
    asked = study(offers=[*TWO, {"name": "third", "cluster": "4xl4", "rent": PRICE}])
    old, new, third = candidates_of(asked)
    alike: dict[str, Any] = {"devices": 8, "accelerator": "a10g"}
    exactly = {**alike, "usd_per_device_hour": exact(2.0), "price": "one"}
    pair = [outcome(each, "gpt2", 10.0, 160.0, **exactly) for each in (old, third)]
    wide = {**alike, "usd_per_device_hour": UncertainValue(value=2.02, low=1.0, high=2.1)}
    rival = outcome(new, "gpt2", 10.0, 161.6, price="another", **wide)

    both, alone = (verdicts(result(asked, [*some, rival]))[0] for some in (pair, pair[:1]))

    assert "with probability 0.25, new with 0.49 at a midpoint that is no lower." in both
    assert "with probability 0.51, new with 0.49." in alone


def test_a_price_that_decides_between_one_node_and_several_is_said() -> None:
    offers = [
        {"name": "one", "cluster": "1x8xh100-sxm-80gb"},
        {"name": "two", "cluster": "2x8xh100-sxm-80gb", "rent": {"market": "hyperscaler"}},
    ]
    asked = study(offers=offers)
    one, two = candidates_of(asked)
    outcomes = [
        outcome(one, "gpt2", 10.0, 40.0, usd_per_device_hour=exact(3.98), price="one node; more"),
        outcome(two, "gpt2", 5.0, 70.0, usd_per_device_hour=exact(6.88), price="a cluster"),
    ]

    said = " ".join(answers(result(asked, outcomes)))

    assert (
        "The price decides between one and two: 3.98 USD per device-hour (one node), and 6.88 "
        "(a cluster)." in said
    )


def test_too_few_steps_are_the_first_sentence() -> None:
    """1e9 tokens in batches of 1e8 are ten steps; in batches of 1e7 they are a hundred."""
    asked = study(offers=[{"cluster": "4xa10g", "rent": PRICE}])
    [candidate] = candidates_of(asked)
    few, enough = (
        outcome(candidate, "gpt2", 30.0, 100.0, tokens=1e9, tokens_per_step=batch)
        for batch in (1e8, 1e7)
    )

    assert verdicts(result(asked, [few]))[0].startswith("1,000,000,000 tokens are 10 steps of")
    assert verdicts(result(asked, [enough]))[0].startswith("4xa10g for gpt2")


def test_the_date_of_a_result_counts_a_begun_day() -> None:
    """41.2 hours from the 28th end on the 30th, whatever the hour is now."""
    [candidate] = candidates_of(study(offers=[{"cluster": "4xa10g", "rent": PRICE}]))
    training = outcome(candidate, "gpt2", 41.2, 100.0, goodput=exact(0.8))

    assert "the result by 2026-11-30" in a_day_text(training, today=datetime.date(2026, 11, 28))


def test_of_many_candidates_the_first_have_their_rows() -> None:
    """The cheapest misses no midpoint, and its row says why it is not the first."""
    offers = [{"name": f"c{n}", "cluster": "4xa10g", "rent": PRICE} for n in range(14)]
    asked = study(offers=offers, goal={"tokens": 1e9, "deadline_days": 2.0})
    outcomes = [
        outcome(each, "gpt2", 30.0, 100.0 + at, chances={"deadline": chance}, goodput=exact(0.8))
        for at, (each, chance) in enumerate(
            zip(candidates_of(asked), [0.5, *[0.9] * 13], strict=True)
        )
    ]

    text = shown_text(result(asked, outcomes))

    assert "1         c1, 30.0 h, 101 USD" in text
    few = shown_text(result(asked, outcomes[:3]))
    assert "c0, 30.0 h, 100 USD, deadline met with probability 0.5 only" in few


def shown_text(answer: Result) -> str:
    page = Console(width=80, file=io.StringIO(), record=True)
    page.print(result_facts(answer))
    return page.export_text()
