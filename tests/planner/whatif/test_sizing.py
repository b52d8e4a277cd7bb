"""Numbers of nodes that are found, against every number tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif import evaluate
from meshwright.planner.whatif.candidates import candidates_of, powered_devices
from meshwright.planner.whatif.conclusions import verdicts
from meshwright.planner.whatif.evaluate import bounded_size, chances_of, size_of
from meshwright.planner.whatif.evaluate import evaluate as real_evaluate
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.run_study import run
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_study import PRICE, study


def asked(solve: str, goal: dict[str, float], **offer: Any) -> Any:
    one = {"cluster": "{n}x8xa10g", "solve": solve, "rent": PRICE}
    more = {"quota_devices": 65_536}
    return study(goal=goal, offers=[{**one, **offer}], assumptions=more)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 1,000 h on one node, a little less than half on two, and so on."""

    def evaluated(question: Any, model: str, candidate: Any, store: Any) -> CandidateOutcome:
        nodes = candidate.devices // 8
        hours = 1000 / nodes**0.95
        run_hours = UncertainValue(value=hours, low=0.8 * hours, high=1.5 * hours)
        found = CandidateOutcome(
            candidate=candidate.name,
            model=model,
            devices=candidate.devices,
            accelerator="a10g",
            fits=True,
            binding="",
            step_s=run_hours,
            tokens_per_s=exact(1e9 / hours / 3600),
            goodput=exact(1.0),
            hours=run_hours,
            usd_per_device_hour=exact(2.0),
            usd=run_hours.times(2.0 * candidate.devices),
            outlay_usd=run_hours.times(2.0 * candidate.devices),
        )
        return replace(found, **{"chances": chances_of(question.goal, found)})

    monkeypatch.setattr(evaluate, "evaluate", evaluated)


@pytest.mark.usefixtures("speed")
@pytest.mark.parametrize("days", [2.0, 5.0, 11.0, 30.0])
def test_the_fewest_that_keep_a_deadline_are_those_of_a_list(days: float) -> None:
    # Sure to 0.8: 8,000 of 10,000 futures, the last at the 0.79995 quantile, 0.8414427 deviations:
    # ln(limit / hours) / ln 1.5 x 1.2815516 >= 0.8414427: hours <= limit / 1.305023.
    found = size_of(asked("need", {"tokens": 1e9, "deadline_days": days}), 0, "gpt2")

    assert found == next(n for n in range(1, 10_000) if 1000 / n**0.95 <= days * 24 / 1.305023)


@pytest.mark.usefixtures("speed")
@pytest.mark.parametrize("budget", [21_000.0, 25_000.0, 30_000.0])
def test_the_most_that_a_budget_pays_for_are_those_of_a_list(budget: float) -> None:
    found = size_of(asked("afford", {"tokens": 1e9, "budget_usd": budget}), 0, "gpt2")

    fit = [n for n in range(1, 5_000) if 16 * n * 1000 / n**0.95 <= budget / 1.305023]
    assert found == max(fit)


@pytest.mark.usefixtures("speed")
def test_an_offer_without_a_size_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node holds nothing; two take 1000 / 2^0.95 = 517.6 h at 32 USD, 16,564 USD."""
    faked: Any = evaluate.evaluate

    def evaluated(question: Any, model: str, candidate: Any, store: Any) -> CandidateOutcome:
        found = faked(question, model, candidate, store)
        return replace(found, fits=candidate.devices > 8)

    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    question = asked("afford", {"tokens": 1e9, "budget_usd": 18_000.0})
    with pytest.raises(DocumentError, match=r"2x8xa10g, the fewest that hold it, takes 16,564"):
        run(question, processes=1)

    rented = study(offers=[{"cluster": "1x8xa100-sxm-80gb", "rent": PRICE}]).offers
    result = run(question.model_copy(update={"offers": (*question.offers, *rented)}), processes=1)
    assert list(result.candidates) == ["1x8xa100-sxm-80gb"]
    assert result.sizes[0].startswith("{n}x8xa10g is left out for gpt2: 18,000 USD do not pay")


def test_what_a_cap_feeds_is_what_it_surely_feeds() -> None:
    # A node of H100 draws less than 10,812.75 W four times in five, and than 9,578.4 W half of
    # them (tests/planner/whatif/test_study.py): 100 kW feed 9, and 10 with a probability of 0.5.
    def fed(**goal: float) -> int:
        question = asked("power", {"tokens": 1e9, **goal}, cluster="{n}x8xh100-sxm-80gb")
        return powered_devices(question, question.offers[0])

    assert fed(power_cap_w=100e3) == 9
    assert fed(power_cap_w=100e3, confidence=0.5) == 10
    with pytest.raises(DocumentError, match=r"feed none with probability 0\.8"):
        fed(power_cap_w=10e3)


def test_hours_of_a_rent_for_a_budget_are_arithmetic() -> None:
    # 30 days of 8 devices at 2 USD are 11,520 USD.
    hours = asked("afford", {"budget_usd": 40_000.0, "deadline_days": 30.0})
    assert evaluate.most_affordable(hours, hours.offers[0], "gpt2", None) == 3
    with pytest.raises(DocumentError, match="pay for none"):
        size_of(asked("afford", {"budget_usd": 9_000.0, "deadline_days": 30.0}), 0, "gpt2")


def test_what_a_size_is_found_for_must_be_said() -> None:
    for solve, what in (("need", "deadline_days"), ("power", "power_cap_w"), ("afford", "budget")):
        with pytest.raises(DocumentError, match=what) as raised:
            size_of(asked(solve, {"tokens": 1e9}), 0, "gpt2")
        assert raised.value.path == "offers[0].solve"


@pytest.mark.usefixtures("speed")
def test_a_size_that_may_be_rented_bounds_what_a_budget_pays_for() -> None:
    """The budget pays for hundreds of nodes; 20 are rented at once, 64 where nobody says."""
    goal = {"tokens": 1e9, "budget_usd": 1e6}
    offers = [{"cluster": "{n}x8xa10g", "solve": "afford", "rent": PRICE}]
    few = study(goal=goal, offers=offers, assumptions={"quota_devices": 167})

    assert bounded_size(few, 0, "gpt2") == (20, "167 devices are rented at once")
    size, why = bounded_size(study(goal=goal, offers=offers), 0, "gpt2")
    assert size == 64
    assert why.startswith("512 devices are rented at once (assumed")
    with pytest.raises(DocumentError, match=r"up to 20 meets .*167 devices are rented at once"):
        hurried = study(
            goal={"tokens": 1e9, "deadline_days": 0.5},
            offers=[{**offers[0], "solve": "need"}],
            assumptions={"quota_devices": 167},
        )
        size_of(hurried, 0, "gpt2")


@pytest.mark.usefixtures("speed")
def test_a_size_leaves_a_hundred_steps_of_a_sample_a_device() -> None:
    """By hand: 2e7 tokens are 100 batches of 195 sequences of 1,024: 24 nodes of 8 devices.

    Of 1e12 tokens the critical batch, 22.91 x 10^5.64 = 10.0 M tokens, is 9,766 sequences.
    """
    for tokens, nodes in ((2e7, 24), (1e12, 1220)):
        asked_ = study(
            work={"seq_len": 1024, "framework": "native"},
            goal={"tokens": tokens, "budget_usd": 1e12},
            offers=[{"cluster": "{n}x8xa10g", "solve": "afford", "rent": PRICE}],
            assumptions={"quota_devices": 65_536},
        )
        size, why = bounded_size(asked_, 0, "gpt2")
        assert size == nodes
        assert "bear a batch of" in why


def test_an_hour_is_the_least_that_is_sold() -> None:
    """By hand: eight devices at 2 USD are 16 USD for a run of minutes, and 2 hours cost two."""
    rent = {"usd_per_device_hour": 2.0, "low": 2.0, "high": 2.0, "date": "2026-11", "source": "q"}
    for tokens, usd in ((1e6, 16.0), (1e6, 32.0)):
        hours = {} if usd == 16.0 else {"minimum_hours": 2.0}
        short = study(
            goal={"tokens": tokens}, offers=[{"cluster": "8xa10g", "rent": {**rent, **hours}}]
        )
        [candidate] = candidates_of(short)
        found = real_evaluate(short, "gpt2", candidate)
        assert found.hours is not None and found.hours.high < 1
        assert found.usd is not None
        assert (found.usd.low, found.usd.value, found.usd.high) == pytest.approx((usd,) * 3)


def test_a_batch_that_leaves_devices_idle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 kW feed 14 nodes; of 112 devices 16 stand idle with 1,024 samples: 9 x 112 use all."""
    question = asked(
        "power",
        {"tokens": 1e9, "power_cap_w": 155e3},
        cluster="{n}x8xh100-sxm-80gb",
    ).model_copy(update={"work": study(work={"global_batch": 1024}).work})
    assert powered_devices(question, question.offers[0]) == 14
    idle = {112: 16}

    def evaluated(question: Any, model: str, candidate: Any, store: Any) -> Any:
        return type("Outcome", (), {"idle": idle.get(candidate.devices, 0)})()

    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    assert bounded_size(question, 0, "gpt2") == (
        12,
        "14 could be had, of which 2 would stand idle: a batch of 1,024 does not divide by 112 "
        "devices, --global-batch 1008 would",
    )
    idle.clear()
    size, why = bounded_size(question, 0, "gpt2")
    assert size == 14
    assert "at the meter, cooling and network included" in why


@pytest.mark.matrix
def test_a_study_that_finds_its_size() -> None:
    goal = {"tokens": 1e9, "power_cap_w": 5000.0}
    result = run(asked("power", goal), processes=1)
    # 8 A10G draw 8 x (1.23 x 300 + 60) x 1.3 = 4,461.6 W.
    assert [outcome.candidate for outcome in result.outcomes] == ["1x8xa10g"]
    assert "power cap met with probability" in verdicts(result)[0].lower()
