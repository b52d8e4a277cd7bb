"""Mean wait of jobs for a cluster that one of them has at a time.

Jobs of class k come at random, λ_k an hour (Poisson), and take s_k hours.  ρ = sum λ_k s_k is the
share of hours used, and W = sum λ_k s_k² / 2 the work that a job finds begun.

    first come, first served        W / (1 - ρ)                        of every class
    the shortest first              W / ((1 - σ_<k) (1 - σ_<=k))       of class k

σ_<k and σ_<=k are the loads of shorter classes, without and with k.  A job that has begun is not
interrupted.  At ρ >= 1 the queue grows without end.

Sources: Pollaczek, Mathematische Zeitschrift 32 (1930) 64; Cobham, Operations Research 2 (1954) 70.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.whatif.pricing.economics import HOURS_PER_YEAR

Arrivals = Sequence[tuple[float, float]]
"""Runs a year, and hours of a run, of each class of jobs."""


def load(jobs: Arrivals) -> float:
    """Share of a year's hours that jobs take; above 1 they do not fit.

    >>> load([(2.0, 876.0), (10.0, 87.6)])
    0.3
    """
    return sum(runs * hours for runs, hours in jobs) / HOURS_PER_YEAR


def wait_h(jobs: Arrivals) -> float | None:
    """Mean hours that a job waits, first come, first served; None if the queue grows for ever.

    >>> f"{wait_h([(8760.0 / 2, 1.0)]):.3f}"
    '0.500'
    """
    used = load(jobs)
    return None if used >= 1 else _begun_h(jobs) / (1 - used)


def shortest_first_h(jobs: Arrivals) -> list[float] | None:
    """Mean hours that each class waits where the shortest of the waiting jobs goes first.

    None if the queue grows for ever.
    """
    if load(jobs) >= 1:
        return None
    waits = []
    for _, hours in jobs:
        shorter = load([job for job in jobs if job[1] < hours])
        no_longer = load([job for job in jobs if job[1] <= hours])
        waits.append(_begun_h(jobs) / (1 - shorter) / (1 - no_longer))
    return waits


def _begun_h(jobs: Arrivals) -> float:
    """Return the hours that the job which a new one finds begun still takes, on average."""
    return sum(runs * hours * hours for runs, hours in jobs) / 2 / HOURS_PER_YEAR
