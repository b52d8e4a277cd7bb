"""The search for graphs of layers: which layout, which split, over all orders of the branches.

For each layout the split of the graph and every layer's recomputation are chosen together: exactly
over all orders in which branches can be taken while the graph has at most
`planner.costs.crossings.MOST_IDEALS` downsets, else as the best of several orders with a bound for
all (`planner.solver.graphs.lattice`).  A tensor that stages pass on is sent, and counted, at every
boundary that it crosses, over the link between the devices of both.  For its buffers every stage
sets aside what the widest boundary of any split needs; the prediction of the chosen plan counts
what its own boundaries need.
"""

from __future__ import annotations

from planner.costs.crossings import MOST_IDEALS
from planner.documents.plan import Layout
from planner.search.spaces.group_stages import graph_problem
from planner.search.spaces.mixed import MixedSpace
from planner.solver.graph_instance import GraphInstance
from planner.solver.graphs.lattice import GraphEffort
from planner.solver.instance import Instance

MOST_PAIRS = 10_000_000
"""Pairs of downsets compared at once; more leave a gap."""
MOST_STEPS = 100_000
"""Pairs of them for every position, where each layout is bounded within memory."""
TRIED_FOR_S = 2.0
"""Seconds of the integer program of one layout's hosts where any split that fits will do."""
PROGRAMS, MOVES = 160, 40
"""Of graphs with more downsets: bounds of cuts, and moves of them, that all layouts share."""
WAYS, MOST_WAYS = 4_000, 1_000
"""Ways through downsets that are worked out exactly for all layouts, and for one."""


def effort_of(programs: int = PROGRAMS, moves: int = MOVES) -> GraphEffort:
    """Return what the layouts of a search share; none of either is for any split that fits."""
    return GraphEffort(
        programs=programs,
        moves=moves,
        most_ideals=MOST_IDEALS,
        most_pairs=MOST_PAIRS,
        most_steps=MOST_STEPS,
        ways=WAYS,
        most_ways=MOST_WAYS,
    )


class GraphSpace(MixedSpace):
    """The partition problems of a graph's layouts: one stage a rank, on devices of any types."""

    def problem(self, layout: Layout, chains: dict[str, Instance]) -> GraphInstance:
        """Return the partition problem of a layout from those of the groups."""
        return graph_problem(self.costs, layout, self.ordered, chains)
