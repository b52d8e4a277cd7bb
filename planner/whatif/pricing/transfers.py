"""What storing and moving data costs beside devices.  Arithmetic alone."""

from __future__ import annotations

from meshwright.planner.whatif.pricing.economics import HOURS_PER_YEAR
from meshwright.planner.whatif.study import Data
from meshwright.planner.whatif.uncertain_value import UncertainValue, span_of

HOURS_PER_MONTH = HOURS_PER_YEAR / 12


def stored_usd_per_hour(data: Data) -> UncertainValue:
    """Price of an hour of what is stored.

    >>> stored_usd_per_hour(Data(stored_tb=73.0, usd_per_tb_month=10.0)).value
    1.0
    """
    return span_of(data.usd_per_tb_month).times(data.stored_tb / HOURS_PER_MONTH)


def moved_usd(data: Data) -> UncertainValue:
    """Price of what a run moves.

    >>> moved_usd(Data(moved_tb=20.0, usd_per_tb_moved=50.0)).value
    1000.0
    """
    return span_of(data.usd_per_tb_moved).times(data.moved_tb)
