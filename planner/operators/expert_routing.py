"""Routing of tokens among experts, and the number of them that reach each node and rank.

Nodes and ranks of a token are those of balanced routers: every expert is as likely as every other.
Node-limited routing (DeepSeek-V3, section 2.1.2, arXiv:2412.19437) first chooses groups of experts
and then experts of those alone, so that a token goes to few nodes.  `Routing.busiest_load` is the
load of the busiest rank over the mean, under natural routers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Experts
LAYERS_A_RANK = 16
"""Layers whose activations a rank keeps at once, where an operator does not know them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a layer, those of one token, and the groups that it may choose them from."""

    experts: int
    per_token: int
    groups: int = 1
    groups_per_token: int = 1
    spread: float = 0.0
    """Imbalance of the loads of a layer's experts: 0 for balanced routers, 1 for routers that send
    all tokens to the same experts."""

    def busiest_load(self, ranks: int, layers: int = 1) -> float:
        """Return the tokens of the busiest rank of experts over the mean of all ranks.

            min(1 + σ E(n) / √(k l), min(c, k) n / c)        σ = f √(k n / c - 1)

        n `ranks` have k experts each, and a token chooses c of all.  σ is the standard deviation of
        experts' loads over their mean, of which f, the spread, is a share: √(k n / c - 1) is that
        of c experts with all tokens.  E(n) is the expected largest of n standard normal deviations.
        Every layer waits for its busiest rank.  At most all tokens choose as many experts of one
        rank as they can.  The load of l `layers` on a rank is less uneven, since another rank is
        busiest in each.

        >>> [round(Routing(128, 8, spread=0.3).busiest_load(n), 2) for n in (1, 8, 16, 128)]
        [1.0, 1.41, 1.73, 4.01]
        """
        if isinstance(ranks, np.ndarray):
            each, place = np.unique(ranks, return_inverse=True)
            return np.array([self.busiest_load(int(n), layers) for n in each])[place]
        if ranks <= 1 or not self.spread:
            return 1.0
        here = self.experts / ranks
        deviation = self.spread * math.sqrt(self.experts / self.per_token - 1)
        deviation /= math.sqrt(here * layers)
        most = min(self.per_token, here) * ranks / self.per_token
        return min(1 + deviation * expected_largest(ranks), most)

    def distinct(self, units: int) -> float:
        """Return the mean number of `units` equal shares of the experts that a token goes to.

        Shares are neighbouring experts.  A share is missed if none of the chosen groups has experts
        of it, or all experts are chosen from others: of E' experts in the chosen groups, of which
        e are of the share, with probability C(E' - e, k) / C(E', k).

        >>> Routing(experts=8, per_token=2).distinct(8)
        2.0
        >>> round(Routing(256, 8, 8, 4).distinct(8), 2), round(Routing(256, 8).distinct(8), 2)
        (3.63, 5.29)
        """
        if isinstance(units, np.ndarray):
            each, place = np.unique(units, return_inverse=True)
            return np.array([_distinct(self, int(size)) for size in each])[place]
        return _distinct(self, units)

    def hops(self, ranks: int, near: int) -> tuple[float, float]:
        """Return the numbers of copies of a token sent to nodes, and passed on there.

        `near` neighbours of the `ranks` that have experts are on one node.  A copy goes to every
        node that has some of its experts, and from there to every rank that has some; those that
        stay where they are count too.

        >>> [round(copies, 2) for copies in Routing(256, 8, 8, 4).hops(64, 8)]
        [3.63, 7.36]
        """
        return self.distinct(ranks // near), self.distinct(ranks)


@lru_cache(maxsize=64)
def expected_largest(count: int) -> float:
    """Return the expected largest of `count` standard normal deviations.

        ∫₀^∞ 1 - Φ(x)^n - Φ(-x)^n dx

    by Simpson's rule, to seven digits.

    >>> [round(expected_largest(n), 4) for n in (2, 8, 100)]
    [0.5642, 1.4236, 2.5076]
    """
    normal, step, steps = NormalDist(), 0.01, 1000
    values = [
        1 - normal.cdf(step * k) ** count - normal.cdf(-step * k) ** count for k in range(steps + 1)
    ]
    return step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))


def routing_of(experts: Experts, spread: float = 0.0) -> Routing:
    """Return the routing of tokens among these experts, whose loads have a spread."""
    groups = experts.groups or 1, experts.groups_per_token or 1
    return Routing(experts.count, experts.per_token, *groups, spread)


@lru_cache(maxsize=4096)
def _distinct(routing: Routing, units: int) -> float:
    if units <= 1:
        return 1.0
    k, groups, chosen = routing.per_token, routing.groups, routing.groups_per_token
    among = routing.experts * chosen / groups
    if units >= routing.experts:
        return float(k)
    held = groups / units
    if held <= 1:  # a share lies within one group, and groups have several
        each = {1: chosen / groups}
        size = routing.experts / units
    else:
        whole = round(held)
        each = {
            some: math.comb(whole, some)
            * math.comb(groups - whole, chosen - some)
            / math.comb(groups, chosen)
            for some in range(1, min(whole, chosen) + 1)
            if chosen - some <= groups - whole
        }
        size = routing.experts / groups
    hit = sum(
        share * (1 - _miss_probability(among, some * size, k)) for some, share in each.items()
    )
    return units * hit


def _miss_probability(experts: float, share: float, chosen: int) -> float:
    """Return the chance that none of the chosen experts is of a share."""
    result = 1.0
    for drawn in range(chosen):
        result *= max(0.0, experts - share - drawn) / (experts - drawn)
    return result
