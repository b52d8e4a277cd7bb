"""Which offers can make a cluster, and its rent, on offers written here."""

from __future__ import annotations

import datetime
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog import Rent, purchases, rents
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.whatif.candidates import candidates_of, listed_price
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.formatting import price_dates
from meshwright.planner.whatif.monte_carlo import chances_to_be_first
from meshwright.planner.whatif.planning import plan_candidate
from meshwright.planner.whatif.pricing.offers import range_of, rent_of, usual_spread
from meshwright.planner.whatif.study import Rental
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_study import PRICE, study


def offer(**said: Any) -> Rent:
    data = {
        "provider": "a",
        "instance": "node",
        "accelerator": "h100-sxm-80gb",
        "devices": 8,
        "region": "r1",
        "on_demand_usd_per_device_hour": 3.0,
        "date": "2026-10",
        "source": "here",
        "confidence": "high",
    }
    return Rent.model_validate({**data, **said})


NODE = offer(fabric="InfiniBand")
CARD = offer(provider="market", devices=1, on_demand_usd_per_device_hour=1.0)
ALONE = offer(provider="b", on_demand_usd_per_device_hour=2.0)
BARE = offer(provider="c", whole_node=False, fabric="x", on_demand_usd_per_device_hour=0.5)


def rent(cluster: str, *offers: Rent, **rental: Any) -> Any:
    return rent_of(Rental(**rental), resolve_cluster(cluster), offers)


def test_a_card_is_no_node_and_a_node_is_no_cluster() -> None:
    found = rent("16x8xh100-sxm-80gb", NODE, CARD, ALONE, BARE)
    assert found.usd_per_device_hour.value == 3.0
    assert (
        "left out: b at 2.00, an offer that names no network between nodes; c at 0.50" in found.how
    )
    assert found.how.endswith("; and 1 more")
    # One node needs no network: the median of 2 and 3.
    assert rent("8xh100-sxm-80gb", NODE, CARD, ALONE, BARE).usd_per_device_hour.value == 2.5
    assert rent("1xh100-sxm-80gb", CARD).usd_per_device_hour.value == 1.0
    # One device of eight that are rented costs eight prices; who rents one decides instead.
    assert rent("1xh100-sxm-80gb", ALONE).usd_per_device_hour.value == 16.0
    single = rent("1xh100-sxm-80gb", CARD, ALONE, NODE).usd_per_device_hour
    assert single.value == 1.0 and single.high < 3.0


def test_where_none_can_make_it_no_price_is_known() -> None:
    found = rent("2x8xh100-sxm-80gb", CARD, ALONE)
    assert found.usd_per_device_hour is None
    assert found.how.startswith("no price known")
    assert "names no network" in found.how and "is no node" in found.how


def test_specialists_and_hyperscalers_are_two_markets() -> None:
    """By hand: the median of 2, 3 and 3 and not of all five, 3; the other market's is 9."""
    clouds = [
        offer(provider=name, fabric="x", on_demand_usd_per_device_hour=usd)
        for name, usd in (("aws", 8.0), ("oci", 10.0), ("s", 2.0), ("t", 2.4), ("u", 3.0))
    ]
    found = rent("2x8xh100-sxm-80gb", *clouds)
    assert found.usd_per_device_hour.value == 2.4
    assert "median of 3 on-demand rents of h100-sxm-80gb from specialists" in found.how
    assert "hyperscalers ask 9.00" in found.how
    asked = rent("2x8xh100-sxm-80gb", *clouds, market="hyperscaler")
    assert asked.usd_per_device_hour.value == 9.0


def test_a_quote_of_a_year_ago_has_a_wider_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: ends at 0.8 and 1.25 times and a year's 0.56 and 1.53, in squares of logarithms."""

    class Clock(datetime.date):
        @classmethod
        def today(cls) -> Clock:
            return cls(2027, 10, 3)

    quotes = [
        offer(provider=n, on_demand_usd_per_device_hour=p)
        for n, p in zip("abc", (4.0, 5.0, 6.25), strict=True)
    ]
    monkeypatch.setattr(datetime, "date", Clock)

    found = rent("8xh100-sxm-80gb", *quotes).usd_per_device_hour

    below, above = (
        math.hypot(math.log(0.8), math.log(0.56)),
        math.hypot(math.log(1.25), math.log(1.53)),
    )
    ends = (5.0, 5 * math.exp(-below), 5 * math.exp(above))
    assert (found.value, found.low, found.high) == pytest.approx(ends, rel=1e-9)


def test_an_instance_is_paid_whole() -> None:
    # 4 devices of an instance of 8 at 3 USD each: 24 USD for 4.
    assert rent("4xh100-sxm-80gb", NODE).usd_per_device_hour.value == 6.0
    cards = offer(divisible=True)
    assert rent("4xh100-sxm-80gb", cards).usd_per_device_hour.value == 3.0


def test_a_host_rented_apart_is_added_where_its_price_is_known() -> None:
    bare = BARE.model_copy(update={"host_usd_per_device_hour": 0.25})
    assert rent("2x8xh100-sxm-80gb", bare).usd_per_device_hour.value == 0.75


def test_region_provider_and_number_choose() -> None:
    far = offer(region="r2", fabric="x", on_demand_usd_per_device_hour=5.0)
    few = offer(fabric="x", on_demand_usd_per_device_hour=1.0, most_devices=8)
    assert rent("2x8xh100-sxm-80gb", NODE, far, region="r2").usd_per_device_hour.value == 5.0
    assert rent("2x8xh100-sxm-80gb", NODE, few).usd_per_device_hour.value == 3.0
    assert rent("2x8xh100-sxm-80gb", NODE, provider="z").usd_per_device_hour is None


def test_a_reservation_brings_its_term() -> None:
    year = offer(fabric="x", reserved_usd_per_device_hour=2.0, term_months=12.0, prepaid=0.2)
    found = rent("2x8xh100-sxm-80gb", year, commitment="reserved")
    assert (found.usd_per_device_hour.value, found.term_months, found.prepaid) == (2.0, 12.0, 0.2)


def test_one_quote_has_the_spread_that_quotes_usually_have() -> None:
    below, above = usual_spread()
    assert below < 0.8 and above > 1.2
    span = range_of([4.0])
    assert (span.low, span.value, span.high) == pytest.approx((4 * below, 4.0, 4 * above))
    # The middle 80 % of five: 1 + 0.4 x 1 to 5 - 0.4 x 1.
    many = range_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (many.low, many.high) == pytest.approx((1.4, 4.6))


@pytest.mark.parametrize("cluster", ["4x8xmi300x", "4x8xb200", "2xgb200-nvl72"])
def test_new_accelerators_have_rents_with_a_range_and_a_date(cluster: str) -> None:
    found = rent_of(Rental(market="hyperscaler"), resolve_cluster(cluster), rents())
    assert found.usd_per_device_hour is not None
    assert found.usd_per_device_hour.low < 0.8 * found.usd_per_device_hour.value
    assert "2026-10" in found.how


def test_the_lowest_spot_price_seen_is_not_what_weeks_of_it_cost() -> None:
    # Between 1.00 seen once and 4.00 on demand: 2.00.
    spot = offer(fabric="x", on_demand_usd_per_device_hour=4.0, spot_usd_per_device_hour=1.0)
    found = rent("2x8xh100-sxm-80gb", spot, commitment="spot")
    assert found.usd_per_device_hour.value == pytest.approx(2.0)


def test_a_spot_price_listed_apart_is_no_lower_than_one_beside_its_on_demand_price() -> None:
    apart = offer(fabric="x", on_demand_usd_per_device_hour=None, spot_usd_per_device_hour=1.0)
    both = [apart, offer(on_demand_usd_per_device_hour=4.0), ALONE]
    found = rent("2x8xh100-sxm-80gb", *both, commitment="spot")
    assert found.usd_per_device_hour.value == pytest.approx(2.0)


def test_a_price_that_others_report_names_who_confirms_it() -> None:
    told = offer(provider="z", fabric="x", confidence="low")
    words = "specialist (reported by others than z: a quote of theirs confirms it), 2026-10"
    assert words in rent("2x8xh100-sxm-80gb", told).how
    assert "reported" not in rent("2x8xh100-sxm-80gb", NODE).how


def test_the_age_of_a_purchases_price_widens_its_range() -> None:
    """One price of a device, sold in a month: by hand, 0.56 to 1.53 times as much each year."""
    known = purchases()["b200"]
    assert known.low is None and known.high is None and known.date == "2024-12"
    today = datetime.date.today()
    years = (12 * (today.year - 2024) + today.month - 12) / 12

    span = listed_price(known)

    assert span.value == known.usd_per_device
    assert span.low == pytest.approx(known.usd_per_device * 0.56**years)
    assert span.high == pytest.approx(known.usd_per_device * 1.53**years)


def test_of_each_provider_the_newest_quote_counts() -> None:
    """By hand: 4.50 of October and 4.00 of another; 2.95 of May is of another market."""
    old = offer(provider="a", on_demand_usd_per_device_hour=2.95, date="2026-05-18")
    new = offer(provider="a", on_demand_usd_per_device_hour=4.5, date="2026-10-24")
    other = offer(provider="b", on_demand_usd_per_device_hour=4.0, date="2026-06")

    found = rent("8xh100-sxm-80gb", old, new, other)

    assert found.usd_per_device_hour.value == 4.25
    assert found.cause == "a\nb"


def test_every_price_of_the_catalogue_has_a_date() -> None:
    undated = [r.instance for r in rents() if not price_dates(r.date)]
    assert not undated


def test_two_prices_of_one_provider_move_together() -> None:
    """A simulation of its own: of one provider the cheaper stays cheaper; of two it need not."""
    plain = study(offers=[{"cluster": "8xa10g", "rent": PRICE}])
    [candidate] = candidates_of(plain)
    plan = plan_candidate(plain, "gpt2", candidate)
    spread = UncertainValue(value=2.0, low=1.0, high=4.0)

    def chance(*causes: str) -> float | None:
        base = evaluate(plain, "gpt2", candidate, plan)
        priced = [
            replace(
                base,
                usd=exact(1.0),
                usd_per_device_hour=spread.times(factor),
                price_cause=cause,
            )
            for factor, cause in zip((1.0, 1.1), causes, strict=True)
        ]
        return chances_to_be_first(priced, "cost")[0]

    rng, first, drawn = random.Random(5), {"ab": 0, "half": 0}, 40_000
    width = math.log(2.0) / 1.2815516
    for _ in range(drawn):
        a, b = rng.gauss(0, 1), rng.gauss(0, 1)
        first["ab"] += a * width < b * width + math.log(1.1)
        first["half"] += a * width < (a + b) / math.sqrt(2) * width + math.log(1.1)
    assert chance("a", "a") == 1.0
    assert chance("a", "b") == pytest.approx(first["ab"] / drawn, abs=0.02)
    assert chance("a", "a\nb") == pytest.approx(first["half"] / drawn, abs=0.02)
