"""fluid bounds hold for the best split of random graphs, and bands keep every split's cuts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from meshwright.planner.solver.bounds.fractional_bound import Fluid
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.graphs.ideals import Ideals, ideals
from meshwright.planner.solver.graphs.lattice import Bands
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import random_graph


def parts(problem: GraphInstance) -> tuple[Ideals, Knapsacks, Fluid, np.ndarray]:
    every = ideals(problem.readers(), most=1000)
    assert every is not None
    knapsacks = Knapsacks(problem.chain, FrontierStore())
    cut_s = every.crossing(problem.readers(), np.array(problem.sent_s()))
    fluid = Fluid(
        knapsacks,
        least_cut_s=float(cut_s[1:-1].min(initial=math.inf)),
        most_cut_s=float(cut_s.max()),
    )
    return every, knapsacks, fluid, cut_s


@pytest.mark.spread(20)
@pytest.mark.parametrize("seed", range(120))
def test_no_split_is_below_the_bounds_and_its_cuts_are_in_the_bands(seed: int) -> None:
    problem = random_graph(seed)
    answer = solve(problem)
    if not isinstance(answer, GraphSolution):
        return
    every, knapsacks, fluid, cut_s = parts(problem)
    slowest_s = max(answer.split.stage_s)
    hair_s = 1e-9 * (1 + slowest_s)

    bands = Bands(every, knapsacks, fluid, cut_s).ideals_under(slowest_s + hair_s)

    assert fluid.largest_s <= slowest_s + hair_s
    assert fluid.whole_s >= slowest_s - hair_s
    assert fluid.allows(slowest_s + hair_s)
    bound_s = fluid.beyond_s(fluid.largest_s, problem.chain.steady)
    assert bound_s <= answer.objective_s + 1e-9 * (1 + abs(answer.objective_s))
    for cut, end in enumerate(answer.split.cuts[:-1]):
        before = set(answer.order[:end])
        held = [i for i in bands[cut].tolist() if set(every.difference(0, i)) == before]
        assert len(held) == 1


@pytest.mark.parametrize("seed", range(0, 120, 3))
def test_a_higher_ceiling_never_hosts_less(seed: int) -> None:
    _, _, fluid, _ = parts(random_graph(seed))

    hosts = [fluid.hosts(share * fluid.whole_s)[0] for share in (0.0, 0.1, 0.3, 0.6, 1.0)]

    for less, more in pairwise(hosts):
        assert np.all(more >= less * (1 - 1e-12))
