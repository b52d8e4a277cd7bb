"""Budget of a proof in counts of work: an answer does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.planner.costs.cut_tensors import MOST_IDEALS
from meshwright.planner.solver.graph_instance import GraphEffort

GapProgress = Callable[[float], None]
"""Hears the certified gap as it falls."""

GOAL = 0.01
"""The gap above which a search takes its further effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of the work on a proof."""

    likely: int = 48
    """Layouts that are estimated, to find those that are likely to be the fastest."""
    tried: int = 10
    """Layouts among them that are solved and simulated."""
    families: int = 1_500
    """Configuration groups and parts that are bounded."""
    memory_stages: int = 4_000
    """Stages of the layouts whose memory is looked at."""
    cut_stages: int = 1_000
    """Stages of the layouts whose cuts are gone through."""
    layouts: int = 200
    """Layouts on devices that differ whose memory is looked at; those of any loss count as one."""
    solved: int = 24
    """Layouts whose partition problems are solved."""
    programs: int = 12
    """Layouts whose programs are."""
    ways: int = 6_000
    """Ways in which the layers of a rank may recompute, where a program is tried."""
    actions: int = 2_500
    """Most actions of a step whose program is tried."""
    nodes: int = 50
    """Most nodes of the tree of one program."""
    columns: int = 1_000
    """Most columns of a program that is tried: the relaxation of a larger one may take minutes."""
    iterations: int = 2_000
    """Iterations of the simplex algorithm, about 0.3 ms each, in all rounds of one program."""
    mixed_iterations: int = 2_000
    """The same on devices that differ, where an iteration takes several times as long."""
    gap: float = 0.0
    """At which the proof ends."""
    further: Effort | None = None
    """Effort that it may take while the gap is above `GOAL`."""


NEAR = 0.05
"""Largest relative excess of a layout's estimate over its simulated step."""
USUAL = Effort(
    further=Effort(
        families=12_000,
        memory_stages=40_000,
        cut_stages=20_000,
        solved=48,
        programs=48,
        ways=20_000,
        actions=70_000,
        columns=3_000,
        iterations=16_000,
        mixed_iterations=4_000,
    )
)
BRIEF = Effort(
    likely=16,
    tried=4,
    families=96,
    memory_stages=200,
    cut_stages=40,
    layouts=20,
    solved=2,
    programs=0,
)
"""For searches of many clusters."""
FULL = Effort(
    families=60_000,
    memory_stages=400_000,
    cut_stages=100_000,
    layouts=600,
    solved=1_000,
    programs=300,
    ways=20_000,
    actions=30_000,
    nodes=1_000,
    columns=1 << 30,
    iterations=16_000,
    mixed_iterations=10_000,
)
"""Effort of a proof that the user asks for: minutes at most."""


def effort_to(gap: float | None) -> Effort:
    """Return what a proof may take that is to end at a gap; the usual where none is asked for."""
    return USUAL if gap is None else replace(FULL, gap=gap)


MOST_PAIRS = 10_000_000
"""Pairs of downsets compared at once; more leave a gap."""
MOST_STEPS = 100_000
"""Pairs of them for every position, where each layout is bounded within memory."""
PROGRAMS, MOVES = 160, 40
"""Bounds of cuts, and moves of them, that all layouts of graphs with more downsets share."""
WAYS, MOST_WAYS = 4_000, 1_000
"""Ways through downsets that are worked out exactly for all layouts, and for one."""


def graph_effort(programs: int = PROGRAMS, moves: int = MOVES) -> GraphEffort:
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
