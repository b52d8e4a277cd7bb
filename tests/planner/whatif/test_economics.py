"""Cost, energy and carbon by hand, to the cent and to the watt-hour."""

from __future__ import annotations

import pytest

from planner.whatif import economics
from planner.whatif.economics import Power, Purchase
from planner.whatif.span import Span, exact, product, total


def test_a_rented_run_to_the_cent() -> None:
    # 1e12 tokens at 400,000 a second are 2,500,000 s = 694.4444 h; at goodput 0.9 771.6049 h.
    hours = economics.hours(1e12, exact(4e5), exact(0.9))
    assert hours.value == pytest.approx(771.6049382716, rel=1e-12)
    # 64 devices at 2.29 a device hour: 771.6049 x 146.56 = 113,086.42 USD.
    usd = economics.rent_usd(64, hours, exact(2.29))
    assert round(usd.value, 2) == 113_086.42


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


def test_a_purchase_by_hand() -> None:
    # 39,083 + 1,882 = 40,965 at 8 % over 2 years, 30 % left: 0.3 / 1.08^2 = 0.257202;
    # annuity 0.08 / (1 - 1.08^-2) = 0.560769; 40,965 x 0.742798 x 0.560769 = 17,063.50 a year.
    bought = Purchase(
        usd_per_device=exact(39_083.0),
        network_usd_per_device=exact(1_882.0),
        years=2.0,
        residual=exact(0.3),
        interest=0.08,
    )
    assert bought.capital_usd_per_device.value == 40_965.0
    assert bought.usd_per_device_year.value == pytest.approx(17_063.50, abs=0.01)
    # At 80 % of 8,760 h and 0.15 USD of power: 17,063.50 / 7,008 + 0.15 = 2.5849 USD an hour.
    each = economics.owned_usd_per_device_hour(
        bought, utilisation=0.8, power_usd_per_device_hour=exact(0.15)
    )
    assert each.value == pytest.approx(2.584860, abs=1e-6)
    # Against 2.00 USD of rent: 17,063.50 / 8,760 / 1.85 = 1.0529 of all hours: never.
    assert (
        economics.break_even_utilisation(
            bought, rent_usd_per_device_hour=2.0, power_usd_per_device_hour=0.15
        )
        is None
    )
    # Against 3.50 USD: 17,063.50 / 8,760 / 3.35 = 0.58146 of all hours.
    share = economics.break_even_utilisation(
        bought, rent_usd_per_device_hour=3.5, power_usd_per_device_hour=0.15
    )
    assert share == pytest.approx(0.58146, abs=1e-5)


def test_buying_at_the_break_even_costs_what_rent_costs() -> None:
    bought = Purchase(
        usd_per_device=exact(30_000.0),
        network_usd_per_device=exact(2_000.0),
        years=3.0,
        residual=exact(0.2),
        interest=0.05,
    )
    share = economics.break_even_utilisation(
        bought, rent_usd_per_device_hour=2.4, power_usd_per_device_hour=0.2
    )
    assert share is not None
    each = economics.owned_usd_per_device_hour(
        bought, utilisation=share, power_usd_per_device_hour=exact(0.2)
    )
    assert each.value == pytest.approx(2.4)


def test_a_better_resale_makes_owning_cheaper() -> None:
    def yearly(residual: float) -> float:
        return Purchase(
            usd_per_device=exact(1000.0),
            network_usd_per_device=exact(0.0),
            years=3.0,
            residual=exact(residual),
            interest=0.1,
        ).usd_per_device_year.value

    assert yearly(0.1) > yearly(0.2) > yearly(0.5)


def test_ranges_add_in_squares_of_logarithms() -> None:
    # Two factors a factor of 2 wide each way: sqrt(2) ln 2 wide together, 2.665.
    two = Span(value=1.0, low=0.5, high=2.0)
    both = product([two, two])
    assert both.high == pytest.approx(2.6651441)
    assert both.low == pytest.approx(1 / 2.6651441)
    assert total([two, two]) == Span(value=2.0, low=1.0, high=4.0)
    assert two.inverse == two


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no range"):
        Span(value=1.0, low=2.0, high=3.0)
