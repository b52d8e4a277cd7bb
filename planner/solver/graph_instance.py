"""The partition problem on a graph of layers, on stages whose devices may be of several types.

A contiguous split of a graph into P stages is a growing sequence of downsets (with a layer, all
that it reads) {} = I_0 < I_1 < ... < I_P = all layers; stage s has I_{s+1} - I_s.  Some stages
run on devices of one type, some on another (4 A100 and 8 V100, one stage each), in any order:
memory for micro-batches in flight draws the large devices to the front, a heavy head draws the
fast ones to the end.  Time, memory and objective are those of `planner.solver.partition_problem`,
with one
difference: what a cut costs depends on the downset I before it and on the types g and h that meet,

    cut_s(I) = Σ output_s[g][h][l] over the layers l in I whose output a layer outside I reads

Each output counts once however many layers read it, and an output that is read several stages
later is relayed by every stage between, so it counts at every cut that it crosses.  Both stages
that meet at a cut are charged.

Where outputs need no relay (`relayed` is False) they go from the stage that makes them straight to
those that read them, and what a stage pays depends on its own layers alone,

    sends_s(s) = Σ output_s[l] over its layers l that a later stage reads
               + Σ output_s[l] over the layers l of earlier stages that it reads

each output once.  Layers of a group of `colocated` are on one stage: of every group, a downset has
all layers or none (`meshwright.planner.solver.contraction`).

A topological order turns the graph into a chain, hence every split of the graph is a split of some
chain, and is evaluated as one (`laid`).  Only the order in which parallel branches are taken is
open: a skip connection makes cuts dearer, it leaves one order.  A chain is the graph of one order,
and devices that are alike are one type.

Layers without parameters may be fused into the layer they read before an instance is made.  That
forbids cuts between the two, nothing else; the solvers do not ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from meshwright.planner.solver.contraction import Block, blocks
from meshwright.planner.solver.partition_problem import (
    Instance,
    Option,
    Solution,
    StageLimits,
    UsedBytes,
)
from meshwright.planner.solver.side_constraints import HostMemory, SideConstraint
from meshwright.planner.system.lazy_imports import OnUse

if TYPE_CHECKING:
    from networkx import DiGraph

networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

Method = Literal["chain", "lattice", "orders", "program"]
Edges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """Devices of one type, on which `stages` stages of the pipeline run.

    `chain` has the layers in their order, its stages all on devices of this type, and cuts free of
    charge.
    """

    name: str
    stages: int
    chain: Instance

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"{self.name!r} has {self.stages} stages; leave out unused types")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInstance:
    """A partition problem on a graph of layers; every stage of every type is used.

    Layers are numbered in a topological order, that of the types' chains; an edge (a, b), a < b,
    says that layer b reads the output of layer a.  `output_s[g][h][l]` are the seconds that each
    of two neighbouring stages, the first of type g and the second of type h, spends on sending the
    output of layer l across; empty means none.
    """

    types: tuple[DeviceType, ...]
    edges: tuple[tuple[int, int], ...]
    output_s: tuple[tuple[tuple[float, ...], ...], ...] = ()
    names: tuple[str, ...] = ()
    """Names of the layers; empty means their numbers."""
    colocated: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that stay on one stage; a layer is in one group at most."""
    relayed: bool = True
    """Stages pass on the outputs that only later ones read.  False on devices of one type alone:
    elsewhere what a stage pays for an output that is not relayed depends on the types of stages
    that are no neighbours of its own."""
    unpaid: tuple[int, ...] = ()
    """Stages that pay nothing for what they send and receive, where outputs are not relayed."""

    def __post_init__(self) -> None:
        if not self.types:
            raise ValueError("an instance needs at least one device type")
        chain, count, types = self.chain, len(self.chain.layers), len(self.types)
        if sum(device_type.stages for device_type in self.types) != len(chain.stages):
            raise ValueError(
                f"the chains have {len(chain.stages)} stages; the types have "
                f"{sum(device_type.stages for device_type in self.types)}"
            )
        if len({_in_common(device_type.chain) for device_type in self.types}) > 1:
            raise ValueError("chains of types have the same layers, stages, ties and pace")
        if any(device_type.chain.cut_s for device_type in self.types):
            raise ValueError("cut_s: what cuts cost follows from the outputs that cross them")
        for before, after in self.edges:
            if not 0 <= before < after < count:
                raise ValueError(f"edge ({before}, {after}) does not lead forward in 0..{count}")
        if self.names and not len(self.names) == len(set(self.names)) == count:
            raise ValueError(f"{count} layers need as many distinct names")
        rows = [len(output_s) for row in self.output_s for output_s in row]
        if self.output_s and rows != [count] * types**2:
            raise ValueError(f"output_s needs {types} x {types} rows of {count} layers")
        if any(not seconds >= 0 for row in self.output_s for row_s in row for seconds in row_s):
            raise ValueError("output_s must not be negative")
        grouped = [layer for group in self.colocated for layer in group]
        if len(grouped) > len(set(grouped)) or not set(grouped) <= set(range(count)):
            raise ValueError(f"colocated: groups of some of {count} layers have none in common")
        if self.unpaid and self.relayed:
            raise ValueError("unpaid: of outputs that are relayed both ends of a cut pay")
        if not self.relayed and types > 1:
            raise ValueError("relayed: outputs are relayed where stages are of several types")
        self.blocks()

    @property
    def chain(self) -> Instance:
        """The chain of the first type, which has what all have in common."""
        return self.types[0].chain

    @property
    def one_order(self) -> bool:
        """True if the layers have one order that may be cut anywhere, as in a chain."""
        pairs = set(self.edges)
        ordered = all(pair in pairs for pair in pairwise(range(len(self.chain.layers))))
        return ordered and self.relayed and not self.colocated

    def name(self, layer: int) -> str:
        """Return the name of a layer."""
        return self.names[layer] if self.names else str(layer)

    def sent_s(self, before: int = 0, after: int = 0) -> tuple[float, ...]:
        """[layer] Seconds of its output between stages of two types."""
        if not self.output_s:
            return (0.0,) * len(self.chain.layers)
        return self.output_s[before][after]

    def readers(self) -> list[list[int]]:
        """[layer] Layers that read its output, rising."""
        groups: list[list[int]] = [[] for _ in self.chain.layers]
        for before, after in sorted(set(self.edges)):
            groups[before].append(after)
        return groups

    def blocks(self) -> list[Block]:
        """Return groups and layers of none, in an order in which they can run."""
        return blocks(self.readers(), self.colocated)

    def with_sizes(self, row: Sequence[tuple[int, int]]) -> GraphInstance:
        """Return the same where stages hold the fewest to the most layers of a row."""
        types = []
        for device_type in self.types:
            stages = (
                replace(stage, least_layers=max(fewest, stage.least_layers), most_layers=most)
                for stage, (fewest, most) in zip(device_type.chain.stages, row, strict=True)
            )
            types.append(
                replace(device_type, chain=replace(device_type.chain, stages=tuple(stages)))
            )
        return replace(self, types=tuple(types))

    def along(self, order: Sequence[int]) -> Instance:
        """Return the chain of the layers in a topological `order`, all stages of the first type.

        Its cuts cost what they do here between two of them; nothing where outputs are not relayed.

        >>> add = (Option(name="none", forward_s=1.0, backward_s=2.0),)
        >>> chain = Instance(
        ...     layers=(0, 0, 0), kinds=(add,), stages=(StageLimits(capacity_bytes=1.0),),
        ...     steady=3.0)
        >>> skip = alike(chain, edges=((0, 1), (1, 2), (0, 2)), output_s=(5.0, 7.0, 9.0))
        >>> skip.along((0, 1, 2)).cut_s
        (0.0, 5.0, 12.0, 0.0)
        """
        cuts_s = cuts_along(self.edges, self.sent_s(), order) if self.relayed else ()
        return replace(
            self.chain,
            layers=tuple(self.chain.layers[layer] for layer in order),
            cut_s=cuts_s,
            sides=self._sides(order),
            used_bytes=self.chain.used_bytes and self.chain.used_bytes.along(order),
        )

    def laid(self, order: Sequence[int], cuts: Sequence[int], types: Sequence[int]) -> Instance:
        """Return the chain of one split, each layer with the options of its stage's type.

        `order` has the layers as the stages have them, `types` the type of each stage.  Only that
        split means anything in it: elsewhere layers would move to other types.
        """
        kinds, stage_layers = len(self.chain.kinds), [order[a:b] for a, b in pairwise(cuts)]
        chains = [device_type.chain for device_type in self.types]
        stages = [chains[g].stages[s] for s, g in enumerate(types)]
        cut_s = [0.0] * (len(order) + 1)
        if not self.relayed:
            sends_s = straight_s(self.readers(), self.sent_s(), stage_layers, self.unpaid)
            stages = [
                replace(stage, exposed_s=stage.exposed_s + seconds)
                for stage, seconds in zip(stages, sends_s, strict=True)
            ]
        elif self.output_s:
            meeting = {
                pair: cuts_along(self.edges, self.sent_s(*pair), order) for pair in pairwise(types)
            }
            for pair, cut in zip(pairwise(types), cuts[1:-1], strict=True):
                cut_s[cut] = meeting[pair][cut]
        credits_s = [chain.credits_s or (0.0,) * kinds for chain in chains]
        return replace(
            self.chain,
            layers=tuple(
                g * kinds + self.chain.layers[layer]
                for g, layers in zip(types, stage_layers, strict=True)
                for layer in layers
            ),
            kinds=tuple(table for chain in chains for table in chain.kinds),
            stages=tuple(stages),
            credits_s=tuple(credit for of_type in credits_s for credit in of_type),
            cut_s=tuple(cut_s),
            hosts=tuple(
                HostMemory(capacity_bytes=host.capacity_bytes, ranks=ranks)
                for g, chain in enumerate(chains)
                for host in chain.hosts
                if any(ranks := tuple(n * (g == h) for n, h in zip(host.ranks, types, strict=True)))
            ),
            sides=self._sides(order),
            used_bytes=self._used_bytes(order, types),
        )

    def _sides(self, order: Sequence[int]) -> tuple[SideConstraint, ...]:
        """Return the ties with layers given by their places in an order."""
        place = {layer: at for at, layer in enumerate(order)}
        return tuple(
            replace(tie, layers=tuple(sorted(place[layer] for layer in tie.layers)))
            for tie in self.chain.sides
        )

    def _used_bytes(self, order: Sequence[int], types: Sequence[int]) -> UsedBytes | None:
        """Return what stages of these types hold, for layers given by their places in an order."""
        of_type = [device_type.chain.used_bytes for device_type in self.types]

        def bytes_of_stage(
            stage: int, before: Sequence[int], layers: Sequence[int], options: Sequence[int]
        ) -> float:
            used = of_type[types[stage]]
            assert used is not None, "all types have it or none"
            return used.of(stage, before, layers, options)

        if None in of_type:
            return None
        return UsedBytes(bytes_of_stage, any(used.by_place for used in of_type if used)).along(
            order
        )


def _in_common(chain: Instance) -> tuple[object, ...]:
    return (
        chain.layers,
        len(chain.kinds),
        len(chain.stages),
        chain.steady,
        chain.fill,
        chain.forward_apart,
        chain.sides,
    )


def alike(
    chain: Instance,
    *,
    edges: Edges,
    output_s: Sequence[float] = (),
    names: Sequence[str] = (),
    colocated: Sequence[Sequence[int]] = (),
    relayed: bool = True,
    unpaid: Sequence[int] = (),
) -> GraphInstance:
    """State the problem of a graph on devices of one type; `output_s` [layer]."""
    return GraphInstance(
        types=(DeviceType(name="all", stages=len(chain.stages), chain=chain),),
        edges=tuple(edges),
        output_s=((tuple(output_s),),) if output_s else (),
        names=tuple(names),
        colocated=tuple(map(tuple, colocated)),
        relayed=relayed,
        unpaid=tuple(unpaid),
    )


def chain_problem(chain: Instance) -> GraphInstance:
    """Return a chain on devices of one type as the graph of one order that it is."""
    return alike(
        replace(chain, cut_s=()),
        edges=in_a_row(len(chain.layers)),
        output_s=(*chain.cut_s[1:-1], 0.0) if chain.cut_s else (),
    )


def in_a_row(layers: int) -> tuple[tuple[int, int], ...]:
    """Return the edges of a chain."""
    return tuple(pairwise(range(layers)))


def cuts_along(edges: Edges, output_s: Sequence[float], order: Sequence[int]) -> tuple[float, ...]:
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
        cuts.append(sum((output_s[output] for output in sorted(crossing)), 0.0))
    return tuple(cuts)


def too_few(problem: GraphInstance) -> str | None:
    """Say that groups and single layers make fewer stages than there are; None if they do not."""
    stages, groups = len(problem.chain.stages), len(problem.blocks())
    if stages <= groups:
        return None
    if groups == len(problem.chain.layers):
        return f"{stages} stages need as many layers; there are {groups}"
    return f"{stages} stages need as many groups and single layers; the graph has {groups}"


def straight_s(
    readers: Sequence[Sequence[int]],
    output_s: Sequence[float],
    stages: Sequence[Sequence[int]],
    unpaid: Sequence[int] = (),
) -> list[float]:
    """[stage] Seconds that stages holding these layers pay for outputs that are not relayed.

    Those of `unpaid` pay nothing.
    """
    stage_of = {layer: s for s, layers in enumerate(stages) for layer in layers}
    sums = [0.0] * len(stages)
    for layer, outside in enumerate(readers):
        ends = {stage_of[layer], *(stage_of[reader] for reader in outside)}
        for s in ends - set(unpaid) if len(ends) > 1 else ():
            sums[s] += output_s[layer]
    return sums


def graph_instance(
    graph: DiGraph,
    *,
    options: Mapping[str, Sequence[Option]],
    output_s: Mapping[str, float],
    stages: Sequence[StageLimits],
    steady: float,
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
    return alike(
        Instance(
            layers=tuple(layers),
            kinds=tuple(kinds),
            stages=tuple(stages),
            steady=steady,
            fill=fill,
        ),
        edges=sorted((number[a], number[b]) for a, b in graph.edges),
        output_s=[output_s.get(name, 0.0) for name in names],
        names=names,
        colocated=[sorted(number[name] for name in group) for group in colocated],
        relayed=relayed,
        unpaid=unpaid,
    )


@dataclass(slots=True)
class GraphEffort:
    """Remaining effort for graphs that have too many downsets; solving a graph uses it up.

    `programs` are integer programs of one cut each, `iterations` those of the simplex method that
    they take, and `most_programs` and `most_iterations` those for one problem; `moves`
    are of all cuts of a split at once.  `visited` counts parts of choices of options that were
    looked at where bytes are no sums (`planner.solver.nonadditive_stage` ends at its own number of
    them).
    """

    programs: int = 100
    most_programs: int = 60
    iterations: int = 100_000
    most_iterations: int = 60_000
    moves: int = 100
    visited: int = 0
    most_ideals: int = 400_000
    """Downsets of a graph that are listed."""
    most_pairs: int = 100_000_000
    """Pairs of them that are compared at once."""
    ways: float = math.inf
    most_ways: float = math.inf
    """Ways through them whose stages are worked out exactly, of all problems and of one."""
    most_steps: int = 2_000_000
    """On several types of devices: pairs of downsets, for every position and type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution:
    """A split of a graph: the split of the chain of its layers in `order`, on stages of `types`.

    `method` says how it was found: "chain" if the graph has one order only, "lattice" if among all
    orders, "orders" if as the best of a few, "program" if by the integer program.
    """

    problem: GraphInstance = field(repr=False, compare=False)
    order: tuple[int, ...]
    """Layers as the stages have them; of a chain 0, 1, 2, ..."""
    types: tuple[int, ...]
    """[stage] Number of its type."""
    split: Solution
    method: Method

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of every stage, each stage in an order in which it can run."""
        return tuple(
            tuple(self.problem.name(layer) for layer in self.order[first:end])
            for first, end in pairwise(self.split.cuts)
        )

    @property
    def stage_types(self) -> tuple[str, ...]:
        """Name of the device type of each stage."""
        return tuple(self.problem.types[number].name for number in self.types)

    @property
    def options(self) -> dict[str, int]:
        """Index of the option that each layer takes, by name."""
        return {
            self.problem.name(layer): option
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
    def stage_sync_s(self) -> tuple[float, ...]:
        """[stage] Seconds of synchronisation."""
        return self.split.stage_sync_s

    @property
    def gap(self) -> float:
        """Share of the objective that is not yet proven necessary."""
        return self.split.gap

    @property
    def optimal(self) -> bool:
        """True if no other order, types, cuts and options take less time."""
        return self.split.optimal
