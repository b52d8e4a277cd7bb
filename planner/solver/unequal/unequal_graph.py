"""The partition problem of a graph of layers on unequal devices, and its exact solver.

    solve_unequal_graph(problem) -> UnequalSolution   optimal, or with the gap that is left
                                  | Infeasible        no order of types, no split fits in memory
                                  | Fathomed          nothing is below the cutoff
                                  | Undecided         none was found, and too many to be sure

Stages hold a growing sequence of downsets (`planner.solver.graphs.graph_instance`), each stage is
of some type (`planner.solver.unequal.unequal_instance`), and what a cut costs depends on both: on
the outputs that cross it, and on the types that meet there.  Branches, types and cuts are chosen
together: exactly, along paths of (downset, stages used of each type), while the graph has few
downsets; else through those of several orders of the branches (`planner.solver.graphs.nearby`),
under the bound of all orders

    T >= steady · τ + Σ_l min_g (fill · t_gl - credit_gl) + fill · least exposed + least sync

With P_g stages of type g, seconds t_gl of layer l on it and T_g = Σ_l t_gl, weighing the stages by
1 / T_g gives, for the slowest stage of any split,

    τ Σ_g P_g / T_g  >=  Σ_g (seconds of g's stages) / T_g  >=  Σ_l min_g t_gl / T_g
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.solver.frontier import FrontierStore
from planner.solver.graphs.contraction import Block
from planner.solver.graphs.graph_instance import (
    GraphInstance,
    Undecided,
    cuts_along,
    too_few,
)
from planner.solver.graphs.ideals import Ideals, ideals
from planner.solver.graphs.nearby import along_orders, of_bits
from planner.solver.instance import Fathomed, Infeasible, Stage
from planner.solver.knapsack import Knapsacks
from planner.solver.unequal.ideal_reach import IdealReach, nested
from planner.solver.unequal.reach import Reaches, Runs
from planner.solver.unequal.unequal import Search, least_s, solve_unequal
from planner.solver.unequal.unequal_instance import UnequalInstance, UnequalSolution
from planner.solver.unequal.unequal_steps import CutSeconds
from planner.tolerances import ROUNDING

MOST_STEPS = 2_000_000
"""Pairs of downsets, for every position and type, that are held against each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalGraph:
    """A graph of layers, numbered in a topological order, on several device types.

    `chain` has the layers in that order, without costs of cuts; an edge (a, b), a < b, says that
    layer b reads the output of layer a.  `output_s[g][h][l]` are the seconds that each of two
    neighbouring stages, the first of type g and the second of type h, spends on sending the output
    of layer l across.  Layers of a group of `colocated` are on one stage.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    chain: UnequalInstance
    output_s: tuple[tuple[tuple[float, ...], ...], ...]
    colocated: tuple[tuple[int, ...], ...] = ()
    relayed: bool = True
    """False on devices of one type alone: elsewhere what a stage pays for an output that is not
    relayed depends on the types of stages that are no neighbours of its own."""
    unpaid: tuple[int, ...] = ()
    """Stages that pay nothing for what they send and receive, where outputs are not relayed."""

    def __post_init__(self) -> None:
        if self.chain.cut_s:
            raise ValueError("cut_s: what cuts cost follows from the outputs that cross them")
        if not self.relayed and len(self.chain.types) > 1:
            raise ValueError("relayed: outputs are relayed where stages are of several types")
        for row in self.output_s:
            for output_s in row:
                self.as_alike(output_s)  # checks the rest

    def along(self, order: Sequence[int]) -> UnequalInstance:
        """Return the chain of the layers in a topological `order`; its cuts cost what they do here.

        Costs of cuts, and only they, are by position along the order.
        """
        return replace(
            self.chain,
            layers=tuple(self.chain.layers[layer] for layer in order),
            types=tuple(
                replace(one, used_bytes=one.used_bytes and one.used_bytes.along(order))
                for one in self.chain.types
            ),
            cut_s=tuple(
                tuple(cuts_along(self.edges, output_s, order) for output_s in row)
                for row in self.output_s
            ),
        )

    def blocks(self) -> list[Block]:
        """Return groups and layers of none, in an order in which they can run."""
        return self.as_alike().blocks()

    def readers(self) -> list[list[int]]:
        """[layer] Layers that read its output, rising."""
        return self.as_alike().readers()

    def as_alike(self, output_s: tuple[float, ...] | None = None) -> GraphInstance:
        """Return the graph on devices that are all alike, of the first type's seconds."""
        return GraphInstance(
            names=self.names,
            layers=self.chain.layers,
            edges=self.edges,
            kinds=self.chain.types[0].kinds,
            output_s=output_s or self.output_s[0][0],
            stages=(Stage(capacity_bytes=0.0),),
            steady=self.chain.steady,
            colocated=self.colocated,
        )


def solve_unequal_graph(
    problem: UnequalGraph | UnequalInstance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    most_steps: int = MOST_STEPS,
) -> UnequalSolution | Infeasible | Fathomed | Undecided:
    """Minimise the time of `problem` over all orders of branches and types, cuts and options.

    A chain has one order.  Exact unless there are more than `most_steps` pairs of downsets,
    positions and types.
    """
    if isinstance(problem, UnequalInstance):
        return solve_unequal(problem, cutoff_s=cutoff_s, frontiers=frontiers)
    layers, stages = len(problem.names), len(problem.chain.in_flight)
    few = too_few(stages, len(problem.blocks()), layers)
    if few:
        return Infeasible(few)
    store = frontiers if frontiers is not None else FrontierStore()
    lattice = _lattice(problem, most_steps)
    if lattice is not None:
        return Search(problem.chain, store, cutoff_s, lattice).solved()
    bound_s = _any_order_s(problem, store)
    if bound_s >= cutoff_s:
        return Fathomed(bound_s)
    some = of_bits(along_orders(problem.as_alike(problem.output_s[0][-1])), layers)
    pairs = nested(some, MOST_STEPS)
    found = (
        pairs and Search(problem.chain, store, cutoff_s, _Lattice(problem, some, pairs)).solved()
    )
    best = found if isinstance(found, UnequalSolution) else None
    if best is None:
        return Undecided(
            f"none of the orders tried is below {cutoff_s:g} s, and the {layers} layers can be "
            f"split in too many ways to try them all"
        )
    split = replace(best.split, lower_bound_s=min(bound_s, best.split.objective_s))
    return replace(best, split=split)


def least_graph_s(
    problem: UnequalGraph | UnequalInstance,
    *,
    frontiers: FrontierStore | None = None,
    most_steps: int = MOST_STEPS,
) -> float:
    """Return seconds below which no split within memory stays; inf if none is known to fit."""
    if isinstance(problem, UnequalInstance):
        return least_s(problem, frontiers=frontiers)
    if len(problem.chain.in_flight) > len(problem.blocks()):
        return math.inf
    store = frontiers if frontiers is not None else FrontierStore()
    lattice = _lattice(problem, most_steps)
    if lattice is None:
        return _any_order_s(problem, store)
    return Search(problem.chain, store, math.inf, lattice).bound_s


class _Lattice:
    """The downsets of a graph."""

    def __init__(self, problem: UnequalGraph, every: Ideals, pairs: Runs) -> None:
        self._problem = problem
        self._pairs = pairs
        self.every = every

    @cached_property
    def cut_s(self) -> CutSeconds | None:
        """[type before][type after][downset] Seconds of the outputs that are read behind it."""
        readers = self._problem.readers()
        return [
            [self.every.crossing(readers, np.array(output_s)) for output_s in row]
            for row in self._problem.output_s
        ]

    def reach(self, knapsacks: Sequence[Knapsacks], cut_s: float) -> Reaches:
        """Return how far through the graph stages get."""
        numbers = [one.stages for one in self._problem.chain.types]
        return IdealReach(knapsacks, numbers, self.every, self._pairs)

    def along(self, order: Sequence[int]) -> UnequalInstance:
        """Return the chain of the layers in an order."""
        return self._problem.along(order)


def _lattice(problem: UnequalGraph, most_steps: int) -> _Lattice | None:
    """Return the downsets of a graph with few of them."""
    most = most_steps // (len(problem.chain.in_flight) * len(problem.chain.types))
    every = ideals(problem.readers(), most=max(most, 2), colocated=problem.colocated)
    pairs = None if every is None else nested(every, most)
    return None if every is None or pairs is None else _Lattice(problem, every, pairs)


def _any_order_s(problem: UnequalGraph, store: FrontierStore) -> float:
    """Bound on all orders, memory and cuts ignored; see the head of this module."""
    chain = problem.chain
    stages = np.array([one.stages for one in chain.types])
    seconds, gains, sync, exposed = [], [], [], []
    for number, one in enumerate(chain.types):
        knapsacks = Knapsacks(chain.all_of(number), store)
        scale, least_s = float(knapsacks.time_scale[0]), knapsacks.options.least_time_s
        credits_s = np.array(chain.credits_of(number) or (0.0,))
        seconds.append((scale * least_s)[knapsacks.layers])
        gains.append(
            np.broadcast_to(scale * (chain.fill * least_s - credits_s), least_s.shape)[
                knapsacks.layers
            ]
        )
        sync.append(knapsacks.options.sync_s.min(axis=1)[knapsacks.layers])
        exposed.append(knapsacks.exposed_s)
        assert one.stages, "types that are not used are left out"
    each_s, least_sync_s = np.array(seconds), np.min(sync, axis=0)
    whole_s = each_s.sum(axis=1)
    slowest_s = 0.0
    if whole_s.all():
        weighed = float((each_s / whole_s[:, None]).min(axis=0).sum())
        slowest_s = weighed / float((stages / whole_s).sum())
        slowest_s = max(slowest_s, float(each_s.min(axis=0).max()))
    once_s = max(float(least_sync_s.max()), float(least_sync_s.sum()) / len(chain.in_flight))
    rest_s = float(np.min(gains, axis=0).sum()) + once_s
    rest_s += chain.fill * float(np.min(exposed, axis=0).sum())
    return (1 - ROUNDING) * (chain.steady * slowest_s + rest_s)
