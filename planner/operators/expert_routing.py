"""How tokens are routed among experts, and to how many nodes and ranks each of them goes.

Routers are taken for balanced: every expert is as likely as every other.  Node-limited routing
(DeepSeek-V3, section 2.1.2, arXiv:2412.19437) first chooses groups of experts and then experts of
those alone, so that a token goes to few nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Experts


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a layer, those of one token, and the groups that it may choose them from."""

    experts: int
    per_token: int
    groups: int = 1
    groups_per_token: int = 1

    def distinct(self, units: int) -> float:
        """Return how many of `units` equal shares of the experts a token goes to, on average.

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
        """Return how many copies of a token are sent to nodes, and how many are handed on there.

        `near` neighbours of the `ranks` that have experts lie on one node.  A copy goes to every
        node that has some of its experts, and from there to every rank that has some; those that
        stay where they are count too.

        >>> [round(copies, 2) for copies in Routing(256, 8, 8, 4).hops(64, 8)]
        [3.63, 7.36]
        """
        return self.distinct(ranks // near), self.distinct(ranks)


def routing_of(experts: Experts) -> Routing:
    """Return how tokens are routed among these experts."""
    groups = experts.groups or 1, experts.groups_per_token or 1
    return Routing(experts.count, experts.per_token, *groups)


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
