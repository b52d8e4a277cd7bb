"""A graph of layers on devices that may differ as an integer program, solved by HiGHS.

A second opinion on every kind of problem: a chain is a graph with one order, and devices that are
alike are one type.  It shares the problem and its pricing with the exact solvers and nothing else.
Over layers l, stages s, types g and options k:

    x[l,s,g,k]     binary: layer l is on stage s, of type g, with option k
    is[s,g]        binary: stage s is of type g
    until[l,s]     = Σ_{s'<=s,g,k} x[l,s',g,k]: layer l is on stage s or before
    sent[l,s]      output l crosses the boundary behind stage s
    t_s, τ, γ      seconds of stage s, of the slowest stage, of the longest synchronisation

    minimise    A τ + Σ_s (ρ t_s - κ_s) + γ

    Σ_{s,g,k} x[l,s,g,k] = 1                         layer{l}_is_placed
    Σ_g is[s,g] = 1                                  stage{s}_has_a_type
    Σ_s is[s,g] = P_g                                type{g}_is_used
    Σ_k x[l,s,g,k] <= is[s,g]                        layer{l}_on_stage{s}_is_of_type{g}
    Σ_{l,g,k} x[l,s,g,k] >= least_s                  stage{s}_has_layers_enough
    until[b,s] <= until[a,s]                         layer{b}_is_not_before_{a}_on_stage{s}
    sent[l,s] >= until[l,s] - until[r,s]             output{l}_crosses_behind_stage{s}_to_{r}
    cut_s >= Σ_l o_gh[l] sent[l,s] - M (2 - is[s,g] - is[s+1,h])
    Σ x (w + q a + d e) + θ_s <= Σ_g M_gs is[s,g],   θ_s >= u_k x[l,s,g,k]
    t_s = Σ x σ_g (f + b) + Σ_g c_gs is[s,g] + cut_{s-1} + cut_s

and where outputs are not relayed, instead of the cuts of t_s, Σ_l o[l] end[l,s] with

    end[l,s] >= on[l,s] - until[r,s]                 output{l}_for_{r}_on_stage{s}_is_sent
    end[l,s] >= on[r,s] - on[l,s]                    output{l}_for_{r}_on_stage{s}_is_received

The letters are those of planner.solver.ilp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from planner.solver.graphs.graph_instance import GraphInstance, GraphSolution, straight_s
from planner.solver.highs import power_of_ten, pulp, run
from planner.solver.instance import Infeasible, Instance, Option, Unfinished, fits, priced
from planner.solver.sides import AtMost, Chosen, Placed, Tie, Together
from planner.solver.unequal.unequal_graph import UnequalGraph
from planner.solver.unequal.unequal_instance import DeviceType, UnequalInstance, UnequalSolution
from planner.tolerances import HIGHS_GAP

_TIGHTENED = 8
"""Programs with less room that are tried where bytes are more than sums."""


def solve(
    problem: UnequalGraph | UnequalInstance,
    *,
    ties: Sequence[Tie] = (),
    time_limit_s: float | None = None,
) -> UnequalSolution | Infeasible | Unfinished:
    """Minimise the time of `problem`; Unfinished where bytes are more than sums and none fits.

    All `ties` are kept.
    """
    chain = problem.chain if isinstance(problem, UnequalGraph) else problem
    if len(chain.in_flight) > len(chain.layers):
        return Infeasible(f"{len(chain.in_flight)} stages need as many layers")
    lacks, bound_s = [0.0] * len(chain.in_flight), -math.inf
    for attempt in range(_TIGHTENED):
        stated = _Program(problem, lacks, ties)
        outcome = run(stated.program, stated.unit_s, time_limit_s)
        if outcome.impossible and attempt == 0:
            return Infeasible("the integer program has no solution")
        bound_s = outcome.bound_s if attempt == 0 else bound_s
        if not outcome.found:
            return Unfinished(bound_s)
        order, layers, cuts, options = stated.read()
        instance = stated.laid(layers, order, cuts)
        split = priced(instance, cuts, options)
        if fits(instance, split):
            split = replace(split, lower_bound_s=min(bound_s, split.objective_s))
            return UnequalSolution(
                names=tuple(one.name for one in chain.types),
                order=tuple(order),
                split=replace(split, tolerance=2 * HIGHS_GAP),
                layers=tuple(layers),
            )
        for s, (used, stage) in enumerate(zip(split.stage_bytes, instance.stages, strict=True)):
            lacks[s] += max(0.0, used - stage.capacity_bytes)
    return Unfinished(bound_s)


def solve_by_program(
    problem: GraphInstance, *, ties: Sequence[Tie] = (), time_limit_s: float | None = None
) -> GraphSolution | Infeasible | Unfinished:
    """Minimise the time of a graph on devices that are all alike."""
    alike = DeviceType(
        name="all",
        stages=len(problem.stages),
        kinds=problem.kinds,
        rooms=problem.stages,
        credits_s=problem.credits_s,
        used_bytes=problem.used_bytes,
    )
    chain = UnequalInstance(
        layers=problem.layers,
        types=(alike,),
        in_flight=tuple(stage.in_flight for stage in problem.stages),
        steady=problem.steady,
        forward_apart=problem.forward_apart,
        fill=problem.fill,
    )
    graph = UnequalGraph(
        names=problem.names,
        edges=problem.edges,
        chain=chain,
        output_s=((problem.output_s,),),
        colocated=problem.colocated,
        relayed=problem.relayed,
    )
    found = solve(graph, ties=ties, time_limit_s=time_limit_s)
    if not isinstance(found, UnequalSolution):
        return found
    # Options are told apart by type there, of which there is one.
    return GraphSolution(
        names=problem.names, order=found.layers, split=found.split, method="program"
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """One variable x."""

    variable: Any
    layer: int
    stage: int
    kind_of_device: int
    option: int
    figures: Option


class _Program:
    """The program of a problem; stages have `lacks` bytes less than they have."""

    def __init__(
        self,
        problem: UnequalGraph | UnequalInstance,
        lacks: Sequence[float],
        ties: Sequence[Tie],
    ) -> None:
        self.problem, self.relayed = problem, True
        if isinstance(problem, UnequalGraph):
            self.chain, self.edges, self.output_s = problem.chain, problem.edges, problem.output_s
            self.relayed = problem.relayed
            ties = [
                *ties,
                *(Tie(Together(first=min(g), last=max(g)), g) for g in problem.colocated),
            ]
        else:
            self.chain, self.output_s = problem, ()
            self.edges = tuple(pairwise(range(len(problem.layers))))
        self.stages, self.types = range(len(self.chain.in_flight)), range(len(self.chain.types))
        self.layers = range(len(self.chain.layers))
        self.rooms = [self.chain.all_of(g).stages for g in self.types]
        self.program = pulp.LpProblem("placement", pulp.LpMinimize)
        longest_s = max(
            sum(one.kinds[kind][0].time_s for kind in self.chain.layers) for one in self.chain.types
        )
        self.unit_s = power_of_ten(longest_s)
        self.of_type = [[self._binary(f"is_{s}_{g}") for g in self.types] for s in self.stages]
        self.choices = [
            _Choice(self._binary(f"x_{at}_{s}_{g}_{k}"), at, s, g, k, option)
            for at in self.layers
            for s in self.stages
            for g in self.types
            for k, option in enumerate(self.chain.types[g].kinds[self.chain.layers[at]])
        ]
        self.on = [[self._of(at, s) for s in self.stages] for at in self.layers]
        self._places()
        self._memory(lacks)
        self._ties(ties)
        self._objective()

    def _binary(self, name: str) -> Any:
        return self.program.add_variable(name, cat=pulp.LpBinary)

    def _of(self, layer: int, stage: int) -> list[_Choice]:
        return [one for one in self.choices if one.layer == layer and one.stage == stage]

    def _until(self, layer: int, stage: int) -> Any:
        return pulp.lpSum(one.variable for s in range(stage + 1) for one in self.on[layer][s])

    def _places(self) -> None:
        """Every layer on one stage, in an order that runs; every stage of one type."""
        program = self.program
        for at in self.layers:
            program += self._until(at, self.stages[-1]) == 1, f"layer{at}_is_placed"
        for s in self.stages:
            program += pulp.lpSum(self.of_type[s]) == 1, f"stage{s}_has_a_type"
            held = pulp.lpSum(one.variable for at in self.layers for one in self.on[at][s])
            least = self.rooms[0][s].least_layers
            program += held >= least, f"stage{s}_has_layers_enough"
            for at in self.layers:
                for g in self.types:
                    own = [c.variable for c in self.on[at][s] if c.kind_of_device == g]
                    name = f"layer{at}_on_stage{s}_is_of_type{g}"
                    program += pulp.lpSum(own) <= self.of_type[s][g], name
            for a, b in self.edges:
                name = f"layer{b}_is_not_before_{a}_on_stage{s}"
                program += self._until(b, s) <= self._until(a, s), name
        for g, one in enumerate(self.chain.types):
            used = pulp.lpSum(self.of_type[s][g] for s in self.stages)
            program += used == one.stages, f"type{g}_is_used"

    def _ties(self, ties: Sequence[Tie]) -> None:
        """Every tie by rows over the layers that it speaks of."""
        for number, tie in enumerate(ties):
            home = []
            if isinstance(tie.side, Together):
                home = [self._binary(f"home_{number}_{s}") for s in self.stages]
                self.program += pulp.lpSum(home) == 1, f"tie{number}_has_one_stage"
            if isinstance(tie.side, AtMost):
                for s in tie.side.stages:
                    held = pulp.lpSum(one.variable for at in self.layers for one in self.on[at][s])
                    self.program += held <= tie.side.layers, f"tie{number}_on_stage{s}"
            for at, s in product(tie.layers, self.stages):
                own = pulp.lpSum(one.variable for one in self.on[at][s])
                if isinstance(tie.side, Together):
                    self.program += own <= home[s], f"tie{number}_{at}_{s}"
                elif isinstance(tie.side, Placed) and s not in tie.side.stages:
                    self.program += own == 0, f"tie{number}_{at}_{s}"
                elif isinstance(tie.side, Chosen):
                    for one in self.on[at][s]:
                        if one.figures.name not in tie.side.options:
                            one.variable.upBound = 0

    def _memory(self, lacks: Sequence[float]) -> None:
        """Every stage within the capacity of its type, every host within its own."""
        unit = max(room.capacity_bytes for rooms in self.rooms for room in rooms) or 1.0
        for s in self.stages:
            largest = self.program.add_variable(f"largest_{s}", 0)
            free = pulp.lpSum(
                self.of_type[s][g] * ((self.rooms[g][s].free_bytes - lacks[s]) / unit)
                for g in self.types
            )
            here = [one for at in self.layers for one in self.on[at][s]]
            used = pulp.lpSum(
                one.variable * (self.rooms[one.kind_of_device][s].held_bytes(one.figures) / unit)
                for one in here
            )
            self.program += used + largest <= free, f"stage{s}_fits_in_memory"
            for at in self.layers:
                needs = pulp.lpSum(
                    one.variable * (one.figures.transient_bytes / unit) for one in self.on[at][s]
                )
                self.program += largest >= needs, f"layer{at}_runs_on_stage{s}"
            for g, kind in enumerate(self.chain.types):
                if kind.host_bytes is None:
                    continue
                on_host = pulp.lpSum(
                    one.variable * (self.rooms[g][s].on_host_bytes(one.figures) / unit)
                    for one in here
                    if one.kind_of_device == g
                )
                self.program += on_host <= kind.host_bytes / unit, f"host_of_stage{s}_as_type{g}"

    def _cuts(self) -> list[Any]:
        """[boundary] Seconds of what crosses it, for the types that meet there."""
        cuts = []
        for s in self.stages[:-1]:
            cut = self.program.add_variable(f"cut_{s}", 0)
            cuts.append(cut)
            sent = self._sent(s) if self.output_s else {}
            for g, h in product(self.types, self.types):
                # A position is where the layer before it is done and its own is not.
                each_s = self.chain.cut_s[g][h][1:-1] if self.chain.cut_s else ()
                terms = [
                    (self._until(at, s) - self._until(at + 1, s)) * (seconds / self.unit_s)
                    for at, seconds in enumerate(each_s)
                ]
                most_s = max(each_s, default=0.0)
                if self.output_s:
                    own_s = self.output_s[g][h]
                    terms = [crosses * (own_s[at] / self.unit_s) for at, crosses in sent.items()]
                    most_s = sum(own_s)
                apart = 2 - self.of_type[s][g] - self.of_type[s + 1][h]
                least = pulp.lpSum(terms) - apart * (most_s / self.unit_s)
                self.program += cut >= least, f"cut_behind_stage{s}_of_types{g}_{h}"
        return cuts

    def _straight_s(self, stage: int) -> Any:
        """Seconds of a stage for outputs that go straight from where they are made to readers."""
        (output_s,) = self.output_s[0]
        ends: dict[int, Any] = {}
        for at, reader in sorted(set(self.edges)):
            if at not in ends:
                ends[at] = self.program.add_variable(f"end_{at}_{stage}", 0, 1)
            own, its = (pulp.lpSum(c.variable for c in self.on[x][stage]) for x in (at, reader))
            name = f"output{at}_for_{reader}_on_stage{stage}"
            self.program += ends[at] >= own - self._until(reader, stage), f"{name}_is_sent"
            self.program += ends[at] >= its - own, f"{name}_is_received"
        return pulp.lpSum(end * (output_s[at] / self.unit_s) for at, end in ends.items())

    def _sent(self, stage: int) -> dict[int, Any]:
        """[layer that others read] Whether its output crosses the boundary behind a stage."""
        sent: dict[int, Any] = {}
        for at, reader in sorted(set(self.edges)):
            if at not in sent:
                sent[at] = self.program.add_variable(f"sent_{at}_{stage}", 0, 1)
            crosses = self._until(at, stage) - self._until(reader, stage)
            name = f"output{at}_crosses_behind_stage{stage}_to_{reader}"
            self.program += sent[at] >= crosses, name
        return sent

    def _objective(self) -> None:
        program, chain = self.program, self.chain
        cuts = self._cuts() if self.relayed else []
        slowest, slowest_forward, longest = (
            program.add_variable(name, 0) for name in ("slowest", "slowest_forward", "longest_sync")
        )
        total = [chain.steady * slowest, 1.0 * longest]
        if chain.forward_apart:
            total.append(chain.steady * slowest_forward)
        for s in self.stages:
            here = [one for at in self.layers for one in self.on[at][s]]
            scale = [self.rooms[g][s].time_scale / self.unit_s for g in self.types]
            beside = pulp.lpSum(
                self.of_type[s][g] * (self.rooms[g][s].exposed_s / self.unit_s) for g in self.types
            )
            beside += pulp.lpSum(cuts[max(0, s - 1) : s + 1] if s else cuts[:1])
            if not self.relayed:
                beside += self._straight_s(s)
            seconds = beside + pulp.lpSum(
                one.variable * (scale[one.kind_of_device] * one.figures.time_s) for one in here
            )
            if chain.forward_apart:
                forward = 0.5 * beside + pulp.lpSum(
                    one.variable * (scale[one.kind_of_device] * one.figures.forward_s)
                    for one in here
                )
                program += forward <= slowest_forward, f"stage{s}_forward"
                program += seconds - forward <= slowest, f"stage{s}_backward"
            else:
                program += seconds <= slowest, f"stage{s}_is_within_the_slowest"
            sync = pulp.lpSum(one.variable * (one.figures.sync_s / self.unit_s) for one in here)
            program += sync <= longest, f"stage{s}_syncs_within_the_longest"
            total.append(chain.fill * seconds)
            for one in here:
                credits_s = chain.credits_of(one.kind_of_device)
                if credits_s:
                    credit = credits_s[chain.layers[one.layer]] * scale[one.kind_of_device]
                    total.append(one.variable * -credit)
        program.setObjective(pulp.lpSum(total))

    def laid(self, layers: Sequence[int], order: Sequence[int], cuts: Sequence[int]) -> Instance:
        """Return the chain of what was read."""
        if not isinstance(self.problem, UnequalGraph):
            return self.chain.in_order(order, cuts)
        instance = self.problem.along(layers).in_order(order, cuts)
        if self.relayed:
            return instance
        sends_s = straight_s(
            self.problem.readers(), self.output_s[0][0], [layers[a:b] for a, b in pairwise(cuts)]
        )
        stages = tuple(
            replace(stage, exposed_s=stage.exposed_s + seconds)
            for stage, seconds in zip(instance.stages, sends_s, strict=True)
        )
        return replace(instance, stages=stages, cut_s=())

    def read(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the type of each stage, the layers in order, cuts, and options in that order."""
        order = [
            max(self.types, key=lambda g, s=s: self.of_type[s][g].value())  # type: ignore[misc]
            for s in self.stages
        ]
        taken = {one.layer: one for one in self.choices if one.variable.value() > 0.5}
        layers: list[int] = []
        cuts = [0]
        for s in self.stages:
            layers += [at for at in self.layers if taken[at].stage == s]
            cuts.append(len(layers))
        return order, layers, cuts, [taken[at].option for at in layers]
