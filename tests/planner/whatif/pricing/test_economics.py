"""Cost, energy and carbon by hand, to the cent and to the watt-hour."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.whatif.pricing import economics
from meshwright.planner.whatif.pricing.economics import (
    Horizon,
    Hourly,
    Power,
    Purchase,
    Tax,
    cheaper_above,
    prepaid_factor,
    rent_cash_usd,
    residual_share,
)
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact


def test_energy_to_the_watt_hour() -> None:
    # 8 H100: 8 x (1.23 x 700 + 60) x 1.3 = 8 x 921 x 1.3 = 9,578.4 W; a day of it is 229,881.6 Wh.
    power = Power(
        node_over_tdp=exact(1.23),
        network_w_per_device=exact(60.0),
        usage_effectiveness=exact(1.3),
    )
    watts = power.watts(8, 700.0)
    assert watts.value == pytest.approx(9578.4)
    energy = economics.energy_kwh(watts, exact(24.0))
    assert round(1000 * energy.value, 1) == 229_881.6
    # At 369.5 g/kWh: 84.9412512 kg.
    assert economics.carbon_kg(energy, 369.5).value == pytest.approx(84.9412512)


def purchase(**changes: Any) -> Purchase:
    said: dict[str, Any] = {
        "hardware_usd": exact(40_000.0),
        "yearly_usd": exact(2_190.0),
        "horizon": Horizon(years=2.0, interest=0.1),
        "residual": exact(0.3),
        "idle_power": exact(0.25),
        "running_usd_per_hour": exact(0.2),
    }
    return Purchase(**{**said, **changes})


def test_a_purchase_by_hand() -> None:
    # Middles of two years at 10 %: 1.1^-0.5 + 1.1^-1.5 = 0.9534626 + 0.8667842 = 1.8202468;
    # H = 8,760 x 1.8202468 = 15,945.362 hours.
    # Lost of the hardware: 1 - 0.3 / 1.21 = 0.7520661; times 40,000 / 15,945.362 = 1.8866079.
    # Yearly 2,190 / 8,760 = 0.25; idle 0.25 x 0.20 = 0.05: fixed 2.1866079, used 0.15.
    bought = purchase()
    assert bought.horizon.hours == pytest.approx(15_945.362, abs=1e-3)
    assert bought.hourly.fixed.value == pytest.approx(2.1866079, abs=1e-6)
    assert bought.hourly.used.value == pytest.approx(0.15)
    # At 80 % of the hours: 2.1866079 / 0.8 + 0.15 = 2.8832599.
    assert bought.hourly.useful_hour_usd(0.8).value == pytest.approx(2.8832599, abs=1e-6)
    # Against 3.50 on demand: 2.1866079 / (3.50 - 0.15) = 0.6527188 of all hours.
    rent = Hourly(fixed=exact(0.0), used=exact(3.5))
    share = cheaper_above(bought.hourly.middle, rent.middle)
    assert share == pytest.approx(0.6527188, abs=1e-6)
    # Against 2.30 on demand: 2.1866079 / 2.15 > 1: never.
    assert cheaper_above(bought.hourly.middle, (0.0, 2.3)) is None


def test_income_tax_by_hand() -> None:
    # t = 25 %, written off over 5 years: of two years 0.2 x 1.8202468 = 0.3640494 of the hardware.
    # Not written off after two: 0.6.  It sells for 0.3: a loss of 0.3 that saves 0.075 of tax.
    # (1 - 0.25 x 0.3640494 - 0.375 / 1.21) / 0.75 = (0.9089877 - 0.3099174) / 0.75 = 0.7987604
    taxed = purchase(tax=Tax(rate=0.25, depreciation_years=5.0))
    untaxed = 40_000 * 0.7520661 / 15_945.362
    more = 40_000 * (0.7987604 - 0.7520661) / 15_945.362
    assert taxed.hourly.fixed.value == pytest.approx(untaxed + more + 0.3, abs=1e-6)


def test_cash_by_year_by_hand() -> None:
    # A year's power at 60 % of hours: 8,760 x (0.6 + 0.4 x 0.25) x 0.20 = 1,226.40;
    # with 2,190: 3,416.40; the second year has 12,000 of resale.
    assert purchase().cash_usd(0.6) == pytest.approx((40_000.0, 3_416.40, -8_583.60))
    # A reservation of a year at 2.00, a quarter of it prepaid, renewed at 10 % less:
    # 0.25 x 17,520 = 4,380 at once and 13,140 in year 1; 15,768 in year 2, prepaid part and rest.
    paid = rent_cash_usd(
        2.0,
        Horizon(years=2.0, interest=0.1),
        utilisation=0.6,
        change_a_year=-0.1,
        term_years=1.0,
        prepaid=0.25,
    )
    assert paid == pytest.approx((4_380.0, 13_140.0 + 3_942.0, 11_826.0))


def test_a_prepaid_year_by_hand() -> None:
    # All of a year paid on its first day at 21 %: hours count at 1.21^-0.5 = 1 / 1.1, so 1.1.
    assert prepaid_factor(1.0, 1.0, 0.21) == pytest.approx(1.1)
    assert prepaid_factor(0.5, 1.0, 0.21) == pytest.approx(1.05)
    assert prepaid_factor(0.0, 3.0, 0.21) == 1.0


def test_rents_that_fall_by_hand() -> None:
    # 2.00 falling by 19 % a year without interest: 2 x (0.9 + 0.729) / 2 at the years' middles.
    assert Horizon(years=2.0, interest=0.0).rent(2.0, -0.19) == pytest.approx(1.629)
    # Fixed for two years by a contract, then 2 x 0.81^2 for the third: (4 + 1.3122) / 3.
    assert Horizon(years=3.0, interest=0.0).rent(2.0, -0.19, 2.0) == pytest.approx(1.7707333)


def test_resale_by_age_by_hand() -> None:
    assert residual_share(2.0, retained_a_year=0.6) == pytest.approx(0.36)
    # Between 0.6 after a year and 0.3 after two: halfway 0.6 x sqrt(0.5).
    curve = (0.6, 0.3)
    assert residual_share(1.5, retained_a_year=1.0, by_age=curve) == pytest.approx(0.4242641)
    # Beyond the curve it halves each year, as in its last.
    assert residual_share(4.0, retained_a_year=1.0, by_age=curve) == pytest.approx(0.075)
    # In the first year it falls from the whole price.
    assert residual_share(0.5, retained_a_year=1.0, by_age=(0.64,)) == pytest.approx(0.8)


@settings(max_examples=60, deadline=None)
@given(
    fixed=st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
    used=st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
)
def test_the_border_between_two_prices_is_where_a_list_of_shares_says(
    fixed: tuple[float, float], used: tuple[float, float]
) -> None:
    one, other = (fixed[0], used[0]), (fixed[1], used[1])
    shares = [k / 1000 for k in range(1, 1001)]
    wins = [one[0] / u + one[1] < other[0] / u + other[1] for u in shares]

    border = cheaper_above(one, other)

    if border is None:
        assert not wins[-1]
    else:
        assert all(wins[k] for k, u in enumerate(shares) if u > border + 1e-6)
        assert not any(wins[k] for k, u in enumerate(shares) if u < border - 1e-6)


def test_a_better_resale_makes_owning_cheaper() -> None:
    prices = [purchase(residual=exact(r)).hourly.fixed.value for r in (0.1, 0.2, 0.5)]

    assert prices == sorted(prices, reverse=True)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no range"):
        UncertainValue(value=1.0, low=2.0, high=3.0)
