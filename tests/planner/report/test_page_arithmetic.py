"""The page's modules and the planner compute the same figures: one arithmetic, written twice.

Thousands of calls and whole studies with random controls, in node against Python, within 1e-12.
A formula that is edited on one side fails here.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.whatif import probabilities as chances
from meshwright.planner.whatif import uncertain_value as span
from meshwright.planner.whatif.candidates import Candidate, candidates_of
from meshwright.planner.whatif.evaluate import evaluate, with_load
from meshwright.planner.whatif.page_data import page_data
from meshwright.planner.whatif.planning import Planned, plan_candidate, year_of
from meshwright.planner.whatif.pricing import economics, financing, goodput
from meshwright.planner.whatif.pricing.break_even import cash_usd, present_value_usd
from meshwright.planner.whatif.pricing.queueing import load, shortest_first_h, wait_h
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.study import Failures, Study
from meshwright.planner.whatif.uncertain_value import UncertainValue
from tests.planner.whatif.test_study import study

ROOT = Path(__file__).parents[3]
NODE = shutil.which("node")
START = {"value": 2.0, "low": 0.5, "high": 6.0, "source": "a quote"}
QUOTE = {"date": "2026-11", "source": "a quote"}
ROUNDS = 150
without_node = pytest.mark.skipif(
    NODE is None, reason="there is no node here: the page's arithmetic is compared where it is"
)


def node(calls: list[dict[str, Any]], studies: list[dict[str, Any]], root: Path = ROOT) -> Any:
    done = subprocess.run(
        [str(NODE), str(Path(__file__).with_name("compare.mjs")), str(root)],
        input=json.dumps({"calls": calls, "studies": studies}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def differences(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Yield where two values differ by more than 1e-12 of the larger."""
    if isinstance(expected, UncertainValue):
        expected = expected.as_dict()
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for name in expected:
            yield from differences(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for at, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{where}[{at}]")
    elif isinstance(expected, float) and isinstance(found, int | float):
        if not math.isclose(found, expected, rel_tol=ROUNDING, abs_tol=1e-15):
            yield f"{where}: {found} is not {expected}"
    elif found != expected:
        yield f"{where}: {found} is not {expected}"


def vectors(seed: int) -> Iterator[tuple[str, str, list[Any], Any]]:
    """Yield (module, function, arguments, result) of one round of random arguments."""
    rng = random.Random(seed)

    def figure(least: float = 0.01, most: float = 1e4) -> UncertainValue:
        value = math.exp(rng.uniform(math.log(least), math.log(most)))
        low, high = (value * math.exp(sign * rng.choice([0, rng.random()])) for sign in (-1, 1))
        return UncertainValue(value=value, low=low, high=min(high, max(value, most)))

    def share() -> UncertainValue:
        return figure(0.01, 1.0)

    one, two = figure(), figure()
    yield "uncertain_value", "product", [[one, two]], span.product([one, two])
    yield "uncertain_value", "total", [[one, two]], span.total([one, two])
    yield "uncertain_value", "inverse", [one], one.inverse
    trains = share()
    yield "pricing/economics", "hours", [1e9, one, trains], economics.hours(1e9, one, trains)
    horizon = economics.Horizon(years=rng.uniform(0.2, 6), interest=rng.choice([0.0, rng.random()]))
    plain = {"years": horizon.years, "interest": horizon.interest}
    change, term = rng.uniform(-0.5, 0.5), rng.choice([0.0, 1.0, rng.uniform(0.5, 3)])
    level = horizon.rent(2.5, change, term)
    yield "pricing/economics", "levelRent", [plain, 2.5, change, term], level
    prepaid = rng.choice([0.0, rng.random()])
    factor = economics.prepaid_factor(prepaid, 1.5, horizon.interest)
    yield "pricing/economics", "prepaidFactor", [prepaid, 1.5, horizon.interest], factor
    used, contract = rng.uniform(0.05, 1), term or None
    terms = {"utilisation": used, "changeAYear": change, "termYears": contract, "prepaid": prepaid}
    paid = economics.rent_cash_usd(
        1.7, horizon, utilisation=used, change_a_year=change, term_years=contract, prepaid=prepaid
    )
    yield "pricing/economics", "rentCash", [1.7, plain, terms], list(paid)
    interest = rng.choice([0.0, rng.random() / 3])
    loan = {"share": rng.random(), "interest": interest, "months": rng.randint(1, 60)}
    instalments = financing.loan_instalments(**loan, years=horizon.years)
    plain_instalments = [part._asdict() for part in instalments]
    yield "pricing/financing", "loanInstalments", [loan, horizon.years], plain_instalments
    leased = financing.lease_instalments(term_months=loan["months"], years=horizon.years)
    plain_lease = [part._asdict() for part in leased]
    lease = {"term_months": loan["months"]}
    yield "pricing/financing", "leaseInstalments", [lease, horizon.years], plain_lease
    tax = economics.Tax(rate=rng.choice([0.0, rng.random() / 2]), depreciation_years=5.0)
    bought = economics.Purchase(
        hardware_usd=figure(1e3, 1e5),
        yearly_usd=figure(10, 1e4),
        horizon=horizon,
        residual=share(),
        idle_power=share(),
        running_usd_per_hour=figure(0.01, 1.0),
        tax=tax,
        instalments=instalments,
    )
    its = {
        "hardware": bought.hardware_usd,
        "yearly": bought.yearly_usd,
        "horizon": plain,
        "residual": bought.residual,
        "idlePower": bought.idle_power,
        "running": bought.running_usd_per_hour,
        "taxRate": tax.rate,
        "depreciationYears": 5.0,
        "instalments": plain_instalments,
    }
    hourly = bought.hourly
    yield "pricing/economics", "purchaseHourly", [its], {"fixed": hourly.fixed, "used": hourly.used}
    yield "pricing/economics", "outlayUsd", [its, used], bought.outlay_usd(used)
    run, going_on = figure(100, 1e5), replace(bought, leased=True)
    yield "pricing/economics", "outlayUsd", [its, used, run], bought.outlay_usd(used, run)
    yield (
        "pricing/economics",
        "outlayUsd",
        [its | {"leased": True}, used, run],
        going_on.outlay_usd(used, run),
    )
    yield "pricing/economics", "termsBegun", [run, 730.0], economics.terms_begun(run, 730.0)
    parts = economics.Hourly(fixed=one, used=share())
    whole = economics.whole_usd(8, parts, two, run)
    plain_parts = {"fixed": parts.fixed, "used": parts.used}
    yield "pricing/economics", "wholeUsd", [8, plain_parts, two, run], whole
    yield "pricing/economics", "purchaseCash", [its, used], list(bought.cash_usd(used))
    ages = tuple(sorted((rng.random() for _ in range(3)), reverse=True)) if seed % 2 else ()
    rest = economics.residual_share(horizon.years, retained_a_year=0.67, by_age=ages)
    yield "pricing/economics", "residualShare", [horizon.years, 0.67, list(ages)], rest
    pairs = [[rng.random(), rng.random()] for _ in range(2)]
    above = economics.cheaper_above((pairs[0][0], pairs[0][1]), (pairs[1][0], pairs[1][1]))
    yield "pricing/economics", "cheaperAbove", pairs, above
    power = economics.Power(node_over_tdp=one, network_w_per_device=two, usage_effectiveness=one)
    draws = {"nodeOverTdp": one, "networkW": two, "usageEffectiveness": one}
    yield "pricing/economics", "deviceWatts", [draws, 7, 400.0], power.watts(7, 400.0)
    size = {"parameters": 10 ** rng.uniform(8, 12), "devices": 8 * rng.randint(1, 999)}
    size |= {"nodes": size["devices"] // 8, "spot": rng.random() < 0.5}
    failing = Failures()
    plain_failures = {n: span.span_of(getattr(failing, n)) for n in Failures.model_fields}
    expected: Any = goodput.goodput_of(failing, **size)
    yield "pricing/goodput", "goodputOf", [plain_failures, size], expected
    limit = one.value * math.exp(rng.uniform(-2, 2))
    yield "probabilities", "within", [one, limit], chances.probability_within(one, limit)
    probability = rng.random() or 0.5
    yield "probabilities", "inverseNormal", [probability], chances.NORMAL.inv_cdf(probability)
    cause = f"price é {seed}"
    yield "probabilities", "crc32", [cause], zlib.crc32(cause.encode())


def compared(root: Path = ROOT, rounds: int = ROUNDS) -> tuple[int, list[str]]:
    """Return how many calls were compared, and what differs."""
    known = [vector for seed in range(rounds) for vector in vectors(seed)]
    order = chances.order_of("kernels h100").tolist()
    known.append(("probabilities", "orderOf", ["kernels h100"], order))
    calls = json.loads(
        json.dumps(
            [{"module": m, "name": f, "arguments": given} for m, f, given, _ in known],
            default=UncertainValue.as_dict,
        )
    )
    results = node(calls, [], root)["results"]
    wrong = [
        text
        for found, (module, name, _, expected) in zip(results, known, strict=True)
        for text in differences(found, expected, f"{module}.{name}")
    ]
    return len(known), wrong


@without_node
def test_every_function_of_the_page_computes_what_the_planner_computes() -> None:
    count, wrong = compared()

    assert count > 2_000
    assert not wrong, wrong[:5]


EDITS = {
    "uncertain_value.mjs": ("below += down * down", "below += down"),
    "pricing/economics.mjs": ("start + length / 2", "start + length"),
    "pricing/goodput.mjs": ("everyS / 2", "everyS / 3"),
    "probabilities.mjs": ("key >>> 15", "key >>> 14"),
}


@without_node
@pytest.mark.parametrize("name", EDITS)
def test_a_formula_that_is_edited_on_one_side_is_found(name: str, tmp_path: Path) -> None:
    for folder in ("planner/whatif", "planner/whatif/pricing", "planner/report/page"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (ROOT / folder).glob("*.mjs"):
            shutil.copy(file, tmp_path / folder)
    edited = tmp_path / "planner/whatif" / name
    text = edited.read_text(encoding="utf-8")
    assert EDITS[name][0] in text
    edited.write_text(text.replace(*EDITS[name]), encoding="utf-8")

    _, wrong = compared(tmp_path, rounds=4)

    assert wrong


OFFERS: list[dict[str, Any]] = [
    {"cluster": "{n}xa10g", "n": [4, 8], "rent": {"usd_per_device_hour": 2.0, "low": 1.5, **QUOTE}},
    {
        "name": "contract",
        "cluster": "8xa10g",
        "rent": {
            "usd_per_device_hour": 1.2,
            "high": 1.6,
            "commitment": "reserved",
            "term_months": 18.0,
            "prepaid": 0.4,
            **QUOTE,
        },
    },
    {"name": "ours", "cluster": "8xa10g", "owned": True},
    {
        "name": "bought",
        "cluster": "8xa10g",
        "buy": {"usd_per_device": 9000.0, "low": 7000.0, "high": 12000.0, **QUOTE},
    },
    {
        "name": "elsewhere",
        "cluster": "8xa10g",
        "buy": {"usd_per_device": 9500.0, "network_usd_per_device": 0.0, **QUOTE},
        "assumptions": {
            "electricity_usd_per_kwh": 0.04,
            "utilisation": 0.9,
            "country": "NOR",
            "data": {"moved_tb": 9.0},
        },
    },
    {
        "name": "spot",
        "cluster": "4xa10g",
        "rent": {"usd_per_device_hour": 0.9, "commitment": "spot", "minimum_hours": 30.0, **QUOTE},
    },
    {
        "name": "borrowed",
        "cluster": "8xa10g",
        "buy": {
            "usd_per_device": 9000.0,
            "high": 12000.0,
            "loan": {"interest": 0.11, "months": 48, "share": 0.7},
            **QUOTE,
        },
    },
    {
        "name": "leased",
        "cluster": "8xa10g",
        "buy": {"lease": {"usd_per_device_month": 280.0, "low": 250.0, "term_months": 30, **QUOTE}},
    },
    {
        "name": "half bought",
        "cluster": "8xa10g+4xl4",
        "buy": {"of": ["l4"], "usd_per_device": 4000.0, "high": 5000.0, **QUOTE},
        "rent": {"usd_per_device_hour": 1.9, "high": 2.5, **QUOTE},
    },
    {
        "name": "added to ours",
        "cluster": "8xa10g+4xl4",
        "owned": ["a10g"],
        "buy": {
            "of": ["l4"],
            "usd_per_device": 4100.0,
            "loan": {"interest": 0.05, "months": 24},
            **QUOTE,
        },
    },
    {
        "name": "nobody's",
        "cluster": "4xl4",
        "change": {"memory": 2.0},
        "rent": {"provider": "none"},
    },
]
SET: list[dict[str, Any]] = [
    {},
    {"price.0": 1.1, "utilisation": 0.35, "tokens": 4e10},
    {"price.3": 5200.0, "price.1": 0.7, "years": 4.5, "residual": 0.5, "interest": 0.02},
    {"price.5": 3.3, "price.10": 0.25, "electricity": 0.31, "lead": 9.0, "deadline": 40.0},
    {"budget": 60_000.0, "deadline": None, "by": "time", "utilisation": 1.0},
    {"by": "carbon", "electricity": 0.2},
    {"by": "weighted", "day": 40.0, "price.0": 1.7},
    {"by": "weighted"},
    {"stored": 20.0, "moved": 4.0, "price.0": 1.2},
    {"price.8": 3100.0, "price.9": 5000.0, "utilisation": 0.7, "budget": 200_000.0},
    {"price.6": 8100.0, "price.7": 333.0, "years": 2.2, "interest": 0.2, "budget": 150_000.0},
]


JOBS: list[dict[str, Any]] = [
    {"name": "pretraining", "model": "gpt2", "tokens": 2e10, "runs_a_year": 4.0},
    {"name": "trials", "model": "gpt2", "tokens": 3e8, "runs_a_year": 90.0, "seq_len": 512},
]
OF_A_YEAR: list[dict[str, Any]] = [
    {},
    {"runs": 0.5, "price.2": 8e3},
    {"runs": 60.0, "electricity": 0.3},
    {"runs": 2.0, "years": 2.0, "by": "energy"},
]


@pytest.fixture(scope="module")
def plans() -> dict[str, Planned]:
    """Of each cluster of the offers, planned once: prices change no plan."""
    return planned_once(study(offers=OFFERS))


def planned_once(asked: Study) -> dict[str, Planned]:
    """Of a cluster of several kinds the plan of its first is taken: prices are what is compared."""
    [row] = asked.rows
    each = {candidate.plain: candidate for candidate in candidates_of(asked)}
    plain = {name: plan_candidate(asked, row, c) for name, c in each.items() if "+" not in name}
    return plain | {name: plain[name.partition("+")[0]] for name in each if "+" in name}


def worked_out(asked: Study, plans: dict[str, Planned]) -> Result:
    candidates = {candidate.name: candidate for candidate in candidates_of(asked)}
    [row] = asked.rows
    outcomes = tuple(evaluate(asked, row, c, plans[c.plain]) for c in candidates.values())
    candidates = {o.candidate: with_load(candidates[o.candidate], o) for o in outcomes}
    ranks = {row: rank_outcomes(asked, outcomes)}
    return Result(study=asked, outcomes=outcomes, ranks=ranks, candidates=candidates)


def figures(asked: Study, candidate: Candidate, outcome: Any) -> dict[str, Any]:
    comparable = candidate.priced.hourly is not None and not candidate.priced.owned
    return {
        "candidate": outcome.candidate,
        "hours": outcome.hours,
        "usd": outcome.usd,
        "outlayUsd": outcome.outlay_usd,
        "capitalUsd": outcome.capital_usd,
        "watts": outcome.watts,
        "energyKwh": outcome.energy_kwh,
        "carbonKg": outcome.carbon_kg,
        "usdPerDeviceHour": outcome.usd_per_device_hour,
        "goodput": outcome.goodput,
        "tokensInBudget": outcome.tokens_in_budget,
        "load": load(outcome.arrivals),
        "wait": wait_h(outcome.arrivals),
        "shortest": shortest_first_h(outcome.arrivals),
        "chances": outcome.chances,
        "misses": [miss.partition(":")[0] for miss in outcome.misses],
        "cash": cash_usd(candidate) if comparable else None,
        "presentValue": present_value_usd(candidate) if comparable else None,
    }


@without_node
@pytest.mark.matrix
def test_a_study_changed_on_the_page_is_the_study_that_it_exports(
    plans: dict[str, Planned],
) -> None:
    goal = {"tokens": 2e10, "deadline_days": 60.0, "budget_usd": 90_000.0}
    data = {"stored_tb": 3.0, "moved_tb": 1.5}
    asked = study(offers=OFFERS, goal=goal, assumptions={"data": data, "start_hours": START})
    shown = page_data(worked_out(asked, plans))

    assert not list(exported_differs(shown, SET, plans))


@without_node
@pytest.mark.matrix
def test_a_year_of_jobs_on_the_page_is_that_of_the_planner() -> None:
    asked = study(models=[], goal={}, jobs=JOBS, offers=OFFERS[1:4])
    plans = planned_once(asked)
    shown = page_data(worked_out(asked, plans))

    assert not list(exported_differs(shown, OF_A_YEAR, plans))


def exported_differs(
    shown: dict[str, Any], changes: list[dict[str, Any]], plans: dict[str, Planned]
) -> Iterator[str]:
    """Yield where a page with figures set differs from the study that it exports."""
    [row] = shown["models"]
    found = node([], [{"data": shown, "model": row, "values": values} for values in changes])
    for values, page in zip(changes, found["studies"], strict=True):
        exported = Study.parse(page["document"])
        result = worked_out(exported, {c: of_year(exported, plan) for c, plan in plans.items()})
        expected = [
            figures(exported, result.candidates[o.candidate], o) for o in result.outcomes if o.fits
        ]
        yield from differences(page["figures"], expected, str(values))
        places = [
            {
                "candidate": rank.outcome.candidate,
                "place": rank.place,
                "tied": rank.tied,
                "pareto": rank.pareto,
                "tiesAtUsd": rank.ties_at_usd_per_device_hour,
                "first": rank.first,
            }
            for rank in result.ranks[row]
        ]
        yield from differences(page["ranks"], places, str(values))


def of_year(asked: Study, plan: Planned) -> Planned:
    """Return the plan of a year with the numbers of runs of another study."""
    if not plan.runs:
        return plan
    return year_of([(job, found) for job, (_, found) in zip(asked.jobs, plan.runs, strict=True)])


@without_node
def test_the_decision_flips_where_two_prices_meet(plans: dict[str, Planned]) -> None:
    """By hand: of one plan at 2.00 and 2.20 an hour, the first loses above 2.20, or below 2.00.

    What rests on the first one's quote moves with it, so it does not flip the decision.
    """
    offers = [
        {"name": name, "cluster": "8xa10g", "rent": {"usd_per_device_hour": usd, **QUOTE}}
        for name, usd in (("x", 2.0), ("y", 2.2), ("x too", 2.0))
    ]
    shown = page_data(worked_out(study(offers=offers), plans))

    flips = node([], [{"data": shown, "model": "gpt2", "values": {}}])["studies"][0]["flips"]

    assert flips["price.0"] == [{"at": pytest.approx(2.2, rel=2e-3), "to": "y"}]
    assert flips["price.1"] == [{"at": pytest.approx(2.0, rel=2e-3), "to": "y"}]
    assert "price.2" not in flips
    assert flips["tokens"] == []


@without_node
def test_the_page_says_what_the_terminal_says_of_ties_dates_and_a_lone_candidate() -> None:
    words = "../report/page/words"
    terms = {"quote": {"value": 2.0, "low": 2.0, "high": 2.0}, "commitment": "on_demand"}
    candidate = {"how": "one rent, undated; one, 2026-11", "dates": ["2026-11"], "terms": terms}
    rents = [{**candidate, "undated": undated} for undated in (True, False)]
    outcomes = [{"candidate": each, "usdPerDeviceHour": terms["quote"]} for each in rents]
    calls = [
        *(
            {"module": words, "name": "provenance", "arguments": [o, "2026-11-26"]}
            for o in outcomes
        ),
        {"module": words, "name": "flipText", "arguments": [[], "cost", 1]},
    ]

    bought = {
        "candidate": {
            "name": "x",
            "terms": {"kind": "part", "bought": True},
            "hypothetical": False,
        },
        "plan": {"fit_probability": 1.0},
        "misses": [],
        "jobs": [],
        "hours": None,
        "usd": None,
        "chance": 0.5,
        "chances": {"deadline": 0.5},
        "tokensPerS": {"value": 1.0},
        "resultHours": None,
    }
    ranks = [{"outcome": bought, "first": {}, "tied": False}]
    calls.append(
        {
            "module": words,
            "name": "verdict",
            "arguments": [{"by": "time", "confidence": 0.8}, ranks, 0.15],
        }
    )

    undated, dated, alone, verdict = node(calls, [])["results"]

    assert undated["warning"] == "One of these prices has no date: ask for a quote."
    assert dated["warning"] == ""
    assert alone.startswith("No other candidate can be the first")
    kept = "Deadline met with probability 0.5, less than the 0.8 asked for."
    assert verdict == f"Buy: x. {kept}"
