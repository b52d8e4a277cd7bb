"""Laws of what-if: more of anything at the same price never raises the cost of the best plan."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.pricing.economics import carbon_kg, energy_kwh, hours
from meshwright.planner.whatif.ranking import rank_outcomes, tie
from meshwright.planner.whatif.study import ChangeName, Offer, Study
from meshwright.planner.whatif.uncertain_value import exact
from meshwright.planner.whatif.what_if_changes import changed_cluster

CASES = [
    ("llama-3.2-1b", "8xa10g", Job(seq_len=2048, global_batch=64)),
    ("llama-3.1-8b", "2x8xh100-sxm-80gb", Job(seq_len=4096, global_batch=128)),
    ("gpt2-xl", "4x4xl4", Job(seq_len=1024, global_batch=64)),
]


@cache
def least_s(model: str, cluster: str, job: Job) -> float:
    """Seconds of the fastest plan's step."""
    request = Request(resolve_model(model), resolve_cluster(cluster), job)
    return search(request).closed_form.objective_s


@settings(max_examples=3, deadline=None)
@given(
    case=st.sampled_from(CASES),
    change=st.sampled_from(["memory", "memory_bandwidth", "compute", "node_links", "network"]),
    factor=st.floats(1.01, 4.0),
)
@pytest.mark.matrix
def test_a_better_machine_is_never_slower(
    case: tuple[str, str, Job], change: ChangeName, factor: float
) -> None:
    model, text, job = case
    cluster = resolve_cluster(text)
    better = changed_cluster(cluster, change, factor)
    if better is None:
        return
    graph = resolve_model(model)
    before = least_s(*case)
    after = search(Request(graph, better, job)).closed_form.objective_s
    assert after <= before * (1 + 1e-9)


RENT = {"usd_per_device_hour": 2.0, "date": "2026-11", "source": "a quote"}


def whole_cost(model: str, cluster: str, job: Job, usd_per_hour: float) -> float:
    """Dollars of a run at one price for the whole cluster."""
    devices = resolve_cluster(cluster).devices
    asked = Study.of(
        {
            "format": 1,
            "name": "law",
            "models": [model],
            "work": {"seq_len": job.seq_len, "global_batch": job.global_batch},
            "goal": {"tokens": 1e9},
            "offers": [
                {
                    "cluster": cluster,
                    "rent": {**RENT, "usd_per_device_hour": usd_per_hour / devices},
                }
            ],
        }
    )
    [candidate] = candidates_of(asked)
    usd = evaluate(asked, model, candidate).usd
    return math.inf if usd is None else usd.value


@pytest.mark.matrix
@settings(max_examples=3, deadline=None)
@given(batch=st.integers(24, 48), nodes=st.integers(1, 3), more=st.integers(1, 3))
@example(batch=39, nodes=3, more=1)  # the fourth node is left idle, and its failures stop nothing
def test_more_devices_at_the_same_price_never_cost_more(batch: int, nodes: int, more: int) -> None:
    job = Job(seq_len=1024, global_batch=batch)

    fewer = whole_cost("gpt2", f"{nodes}x4xl4", job, 100.0)
    after = whole_cost("gpt2", f"{nodes + more}x4xl4", job, 100.0)

    assert after <= fewer * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    prices=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=6),
    which=st.integers(0, 5),
    factor=st.floats(0.1, 1.0),
)
def test_a_cheaper_price_never_worsens_a_place(
    prices: list[float], which: int, factor: float
) -> None:
    which %= len(prices)
    cheaper = [p * (factor if place == which else 1.0) for place, p in enumerate(prices)]

    assert _place(cheaper, which) <= _place(prices, which)


def _place(prices: list[float], which: int) -> int:
    asked = Study(name="law", models=("gpt2",), offers=(Offer(cluster="8xa10g"),))
    outcomes = [
        CandidateOutcome(
            candidate=f"c{place}",
            model="gpt2",
            devices=8,
            accelerator="a10g",
            fits=True,
            binding="",
            tokens_per_s=exact(1e5 * (1 + place)),
            usd=exact(price),
            hours=exact(10.0 / (1 + place)),
        )
        for place, price in enumerate(prices)
    ]
    names = [rank.outcome.candidate for rank in rank_outcomes(asked, outcomes)]
    return names.index(f"c{which}")


@given(a=st.floats(1e-9, 1e12), b=st.floats(1e-9, 1e12), margin=st.floats(0.0, 1.0))
def test_a_tie_stays_a_tie_under_swapping(a: float, b: float, margin: float) -> None:
    assert tie(a, b, margin) == tie(b, a, margin)


@given(tokens=st.floats(1e6, 1e14), rate=st.floats(1.0, 1e9), goodput=st.floats(0.1, 1.0))
def test_hours_and_tokens_round_trip(tokens: float, rate: float, goodput: float) -> None:
    span = hours(tokens, exact(rate), exact(goodput))
    assert span.value * 3600 * rate * goodput == pytest.approx(tokens)


@given(watts=st.floats(1.0, 1e8), run_hours=st.floats(1e-3, 1e5), grams=st.floats(1.0, 1e3))
def test_energy_and_carbon_round_trip(watts: float, run_hours: float, grams: float) -> None:
    energy = energy_kwh(exact(watts), exact(run_hours))
    assert energy.value * 1e3 / run_hours == pytest.approx(watts)
    assert carbon_kg(energy, grams).value * 1e3 / grams == pytest.approx(energy.value)
