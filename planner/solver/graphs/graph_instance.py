"""The partition problem on a graph of layers: branches, skips and towers instead of a chain.

A contiguous split of a graph into P stages is a growing sequence of downsets (with a layer, all
that it reads) {} = I_0 < I_1 < ... < I_P = all layers; stage s holds I_{s+1} - I_s.  Time, memory
and objective are those of `planner.solver.instance`, with one difference: what a cut costs depends
on the downset before it,

    cut_s(I) = Σ output_s[l] over the layers l in I whose output a layer outside I reads

Each output counts once however many layers read it, and an output that is read several stages
later is relayed by every stage between, so it counts at every cut that it crosses.  Both stages
that meet at a cut are charged.

Where outputs need no relay (`relayed` is False) they go from the stage that makes them straight to
those that read them, and what a stage pays depends on its own layers alone,

    sends_s(s) = Σ output_s[l] over its layers l that a later stage reads
               + Σ output_s[l] over the layers l of earlier stages that it reads

each output once.  Layers of a group of `colocated` are on one stage: of every group, a downset has
all layers or none (`planner.solver.graphs.contraction`).

A topological order turns the graph into a chain whose cuts cost the same (`chain_along`), hence
every split of the graph is a split of some chain, and is evaluated as one.  Only the order in which
parallel branches are taken is open: a skip connection makes cuts dearer, it leaves one order.

Layers without parameters may be fused into the layer they read before an instance is made.  That
forbids cuts between the two, nothing else; the solvers do not ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from planner.on_use import OnUse
from planner.solver.graphs.contraction import Block, blocks
from planner.solver.instance import Instance, Option, Solution, Stage, UsedBytes

if TYPE_CHECKING:
    from networkx import DiGraph

networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

Method = Literal["chain", "lattice", "orders", "program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInstance:
    """A partition problem on a graph.  `kinds`, `stages` and the rest are those of an `Instance`.

    Layers are numbered in a topological order; `layers[l]` is the index in `kinds` of layer l, and
    an edge (a, b), a < b, says that layer b reads the output of layer a.  `output_s[l]` are the
    seconds that each of two neighbouring stages spends on sending that output across.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    kinds: tuple[tuple[Option, ...], ...]
    output_s: tuple[float, ...]
    stages: tuple[Stage, ...]
    steady: float
    forward_apart: bool = False
    fill: float = 1.0
    credits_s: tuple[float, ...] = ()
    used_bytes: UsedBytes | None = field(default=None, repr=False, compare=False)
    """What a stage holds, where the sums of an `Instance` are no more than that."""
    colocated: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that stay on one stage; a layer is in one group at most."""
    relayed: bool = True
    """Stages pass on the outputs that only later ones read."""
    unpaid: tuple[int, ...] = ()
    """Stages that pay nothing for what they send and receive, where outputs are not relayed."""

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not len(self.names) == len(set(self.names)) == len(self.output_s) == count:
            raise ValueError(f"{count} layers need as many distinct names and outputs")
        for before, after in self.edges:
            if not 0 <= before < after < count:
                raise ValueError(f"edge ({before}, {after}) does not lead forward in 0..{count}")
        if any(not seconds >= 0 for seconds in self.output_s):
            raise ValueError("output_s must not be negative")
        grouped = [layer for group in self.colocated for layer in group]
        if len(grouped) > len(set(grouped)) or not set(grouped) <= set(range(count)):
            raise ValueError(f"colocated: groups of some of {count} layers have none in common")
        if self.unpaid and self.relayed:
            raise ValueError("unpaid: of outputs that are relayed both ends of a cut pay")
        self.blocks()
        self.chain_along(range(count))  # checks the rest

    def readers(self) -> list[list[int]]:
        """[layer] Layers that read its output, rising."""
        found: list[list[int]] = [[] for _ in self.layers]
        for before, after in sorted(set(self.edges)):
            found[before].append(after)
        return found

    def blocks(self) -> list[Block]:
        """Return groups and layers of none, in an order in which they can run."""
        return blocks(self.readers(), self.colocated)

    def laid(self, order: Sequence[int], cuts: Sequence[int]) -> Instance:
        """Return the chain along an order, of which these cuts, and these alone, cost as here."""
        chain = self.chain_along(order)
        if self.relayed:
            return chain
        held = [order[a:b] for a, b in pairwise(cuts)]
        sends_s = straight_s(self.readers(), self.output_s, held, self.unpaid)
        stages = tuple(
            replace(stage, exposed_s=stage.exposed_s + seconds)
            for stage, seconds in zip(self.stages, sends_s, strict=True)
        )
        return replace(chain, stages=stages)

    def chain_along(self, order: Sequence[int]) -> Instance:
        """Return the chain of the layers in a topological `order`; its cuts cost what they do here.

        Nothing where outputs are not relayed; see `laid`.

        >>> add = (Option(name="none", forward_s=1.0, backward_s=2.0),)
        >>> skip = GraphInstance(names=("a", "b", "c"), layers=(0, 0, 0), kinds=(add,),
        ...     edges=((0, 1), (1, 2), (0, 2)), output_s=(5.0, 7.0, 9.0),
        ...     stages=(Stage(capacity_bytes=1.0),), steady=3.0)
        >>> skip.chain_along((0, 1, 2)).cut_s
        (0.0, 5.0, 12.0, 0.0)
        """
        return Instance(
            layers=tuple(self.layers[layer] for layer in order),
            kinds=self.kinds,
            stages=self.stages,
            steady=self.steady,
            forward_apart=self.forward_apart,
            fill=self.fill,
            credits_s=self.credits_s,
            cut_s=cuts_along(self.edges, self.output_s, order) if self.relayed else (),
            used_bytes=self.used_bytes and self.used_bytes.along(order),
        )


def cuts_along(
    edges: Sequence[tuple[int, int]], output_s: Sequence[float], order: Sequence[int]
) -> tuple[float, ...]:
    """[cut] Seconds of the outputs that cross it, for layers in a topological order."""
    waiting = [0] * len(order)
    read_by: list[list[int]] = [[] for _ in order]
    for before, after in set(edges):
        waiting[before] += 1
        read_by[after].append(before)
    crossing: set[int] = set()
    cuts = [0.0]
    for layer in order:
        if waiting[layer]:
            crossing.add(layer)
        for before in read_by[layer]:
            waiting[before] -= 1
            if not waiting[before]:
                crossing.remove(before)
        cuts.append(sum((output_s[one] for one in sorted(crossing)), 0.0))
    return tuple(cuts)


def too_few(stages: int, blocks: int, layers: int) -> str | None:
    """Say that so many groups and single layers do not make as many stages; None if they do."""
    if stages <= blocks:
        return None
    if blocks == layers:
        return f"{stages} stages need as many layers; the graph has {layers}"
    return f"{stages} stages need as many groups and single layers; the graph has {blocks}"


def straight_s(
    readers: Sequence[Sequence[int]],
    output_s: Sequence[float],
    stages: Sequence[Sequence[int]],
    unpaid: Sequence[int] = (),
) -> list[float]:
    """[stage] Seconds that stages holding these layers pay for outputs that are not relayed.

    Those of `unpaid` pay nothing.
    """
    stage_of = {layer: s for s, held in enumerate(stages) for layer in held}
    found = [0.0] * len(stages)
    for layer, outside in enumerate(readers):
        ends = {stage_of[layer], *(stage_of[reader] for reader in outside)}
        for s in ends - set(unpaid) if len(ends) > 1 else ():
            found[s] += output_s[layer]
    return found


def graph_instance(
    graph: DiGraph,
    *,
    options: Mapping[str, Sequence[Option]],
    output_s: Mapping[str, float],
    stages: Sequence[Stage],
    steady: float,
    forward_apart: bool = False,
    fill: float = 1.0,
    colocated: Sequence[Sequence[str]] = (),
    relayed: bool = True,
    unpaid: Sequence[int] = (),
) -> GraphInstance:
    """State the problem for a networkx graph whose nodes are layer names.

    Layers with equal options become one kind.  Raises ValueError if the graph has a cycle, or has
    one once the groups of `colocated` are one node each.
    """
    try:
        names = tuple(networkx.topological_sort(graph))
    except networkx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(edge[0]) for edge in networkx.find_cycle(graph))
        raise ValueError(f"the graph has a cycle ({cycle}); its layers need an order") from error
    number = {name: at for at, name in enumerate(names)}
    kinds: dict[tuple[Option, ...], int] = {}
    layers = [kinds.setdefault(tuple(options[name]), len(kinds)) for name in names]
    return GraphInstance(
        names=names,
        layers=tuple(layers),
        edges=tuple(sorted((number[a], number[b]) for a, b in graph.edges)),
        kinds=tuple(kinds),
        output_s=tuple(output_s.get(name, 0.0) for name in names),
        stages=tuple(stages),
        steady=steady,
        forward_apart=forward_apart,
        fill=fill,
        colocated=tuple(tuple(sorted(number[name] for name in group)) for group in colocated),
        relayed=relayed,
        unpaid=tuple(unpaid),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution:
    """A split of a graph: the split of the chain of its layers in `order`.

    `method` says how it was found: "chain" if the graph has one order only, "lattice" if among all
    orders, "orders" if as the best of a few, "program" if by the integer program.
    """

    names: tuple[str, ...]
    order: tuple[int, ...]
    split: Solution
    method: Method

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of every stage, each stage in an order in which it can run."""
        return tuple(
            tuple(self.names[layer] for layer in self.order[first:end])
            for first, end in pairwise(self.split.cuts)
        )

    @property
    def options(self) -> dict[str, int]:
        """Index of the option that each layer takes, by name."""
        return {
            self.names[layer]: option
            for layer, option in zip(self.order, self.split.options, strict=True)
        }

    @property
    def objective_s(self) -> float:
        """Seconds of a step under this split."""
        return self.split.objective_s

    @property
    def lower_bound_s(self) -> float:
        """Seconds below which no split of the graph stays."""
        return self.split.lower_bound_s

    @property
    def gap(self) -> float:
        """Share of the objective that is not yet proven necessary."""
        return self.split.gap

    @property
    def optimal(self) -> bool:
        """Whether no split of the graph, in any order, takes less."""
        return self.split.optimal


@dataclass(frozen=True, slots=True)
class Undecided:
    """No split was found, and the graph has too many to prove that none fits."""

    reason: str
