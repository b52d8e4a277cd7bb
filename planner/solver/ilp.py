"""Partition problems as an integer program, solved by HiGHS through PuLP.

A second opinion on every kind of problem: it shares the problem and its pricing with the exact
solvers and nothing else.  A chain is a graph with one order, and devices that are alike are one
type, of which nothing has to be chosen.

Layers of a chain that are of one kind and in a row are a run, and layers of a run are alike, so
counting them is enough; of a graph, and where cuts cost anything, every layer is a run of its own.
Over runs a of N_a layers, stages s, types g, options k and levels i of transient bytes:

    n[a,s,g,k]     integer: layers of run a on stage s, of type g, with option k
    is[s,g]        binary: stage s is of type g
    until[a,s]     = Σ_{s'<=s,g,k} n[a,s',g,k]: layers of run a on stage s or before
    done[a,s]      binary: run a ends on stage s or before; until[a,s] where N_a is 1
    level[s,i]     binary: the largest transient of stage s is θ_i
    sent[a,s]      the output of a crosses the boundary behind stage s
    t_s, τ, γ      seconds of stage s, of the slowest stage, of the longest synchronisation

    minimise    A τ + Σ_s z_s + γ,    z_s = ρ t_s - κ_s

    Σ_{s,g,k} n[a,s,g,k] = N_a                      run{a}_is_placed
    Σ_g is[s,g] = 1                                 stage{s}_has_a_type
    Σ_s is[s,g] = P_g                               type{g}_is_used
    Σ_k n[a,s,g,k] <= N_a is[s,g]                   run{a}_on_stage{s}_is_of_type{g}
    Σ_{a,g,k} n[a,s,g,k] >= least_s                 stage{s}_has_layers_enough
    Σ_{a,g,k} n[a,s,g,k] <= most_s                  stage{s}_has_no_more_layers
    until[a,s] >= N_a done[a,s]                     run{a}_is_done_by_stage{s}
    done[a,s] >= done[a,s-1]                        run{a}_stays_done_on_stage{s}
    until[b,s] <= N_b done[a,s]                     run{b}_follows_{a}_on_stage{s}

    Σ_i level[s,i] = 1                              stage{s}_has_one_transient_level
    n[a,s,g,k] <= N_a Σ_{i: θ_i >= u_k} level[s,i]  n_{a}_{s}_{g}_{k}_is_below_the_level
    Σ n[a,s,g,k] (w + q a + d e)
        + Σ_i θ_i level[s,i] <= Σ_g M_gs is[s,g]    stage{s}_fits_in_memory
    Σ_s ranks_s Σ_{a,k} n[a,s,g,k] h <= H           host{number}_has_the_memory

    t_s = Σ n σ_g (f + b) + Σ_g c_gs is[s,g]
        + cut_{s-1} + cut_s                         time_of_stage{s}
    t_s <= τ                                        stage{s}_is_within_the_slowest
    Σ n[a,s,g,k] γ_k <= γ                           stage{s}_syncs_within_the_longest
    sent[a,s] >= until[a,s] - until[b,s]            output{a}_crosses_behind_stage{s}_to_{b}
    cut_s >= Σ_a o_gh[a] sent[a,s]
        - M (2 - is[s,g] - is[s+1,h])               cut_behind_stage{s}_of_types{g}_{h}

Of the instance, A is `steady`, ρ `fill`, κ_s the `credits_s` of the layers on stage s; of a stage,
σ is `time_scale`, c `exposed_s`, M `free_bytes`, q and d the micro-batches in flight and those
whose weight gradients wait; of option k, f and b are its seconds, γ_k `sync_s`, u
`transient_bytes`, and w, a and e the bytes that it has always, per micro-batch in flight and per
one that waits; h is what a layer has on its host of H bytes.  Where all runs are single layers, the
largest transient is a number that no run on the stage exceeds: run{a}_runs_on_stage{s}.

Where outputs are not relayed, Σ_a o[a] end[a,s] stands in t_s instead of the cuts, with

    end[a,s] >= on[a,s] - until[b,s]                output{a}_for_{b}_on_stage{s}_is_sent
    end[a,s] >= on[b,s] - on[a,s]                   output{a}_for_{b}_on_stage{s}_is_received

With `forward_apart`, τ is the sum of two: stage{s}_forward_is_within_the_slowest of them and
stage{s}_backward_is_within_the_slowest.  A bound or a cutoff that is known beforehand is a row over
the objective: no_faster_than_known, faster_than_the_cutoff.  Side constraints
(planner.solver.side_constraints) are more rows, side{number}_...: Σ n <= most on a stage that has
at most that many layers; n = 0 on stages where a layer may not be and for options that it may not
have; one binary per stage where layers lie together.  A run ends where one of them begins or ends.

HiGHS works to tolerances, so quantities are scaled to be of the order of milliseconds and
gigabytes, and of a solution that exceeds a capacity by a tolerance another is asked for that leaves
a little free.  The program knows sums of bytes alone: where stages hold more than sums they get
less room until a solution fits, and the bound is that of the whole room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise, product, starmap
from typing import Any, NamedTuple

from meshwright.planner.documents.tolerances import (
    EQUAL,
    HIGHS_FEASIBILITY,
    HIGHS_GAP,
    HIGHS_MARGIN,
)
from meshwright.planner.solver.bounds.memory_feasibility import why_infeasible, why_no_split
from meshwright.planner.solver.fixed_sizes import NO_ROW, best_row
from meshwright.planner.solver.graph_instance import (
    GraphInstance,
    GraphSolution,
    chain_problem,
    too_few,
)
from meshwright.planner.solver.highs import power_of_ten, pulp, run
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Option,
    Solution,
    Unfinished,
    broken,
    evaluate_split,
    fits,
)
from meshwright.planner.solver.side_constraints import SideConstraint

_TIGHTENED = 16
"""Programs with less room that are tried where bytes are more than sums."""


class _Taken(NamedTuple):
    """A solution: the type of each stage, the runs of its layers in order, cuts and options."""

    types: list[int]
    runs: list[int]
    cuts: list[int]
    options: list[int]


def solve_graph(
    problem: GraphInstance,
    *,
    most_nodes: int | None = None,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> GraphSolution | Infeasible | CutOff | Unfinished:
    """Minimise the time of `problem` to `HIGHS_GAP`, with at most `most_nodes` in the tree.

    All ties are kept.  A solution that met the limit carries the bound proven until then.
    Unfinished too where bytes are more than sums and no solution that was met fits.  `at_least_s`
    is a bound known before; only objectives below `cutoff_s` are of interest.
    """
    few = too_few(problem)
    if few:
        return Infeasible(few)
    chain, bound_s = problem.chain, -math.inf
    groups = (
        SideConstraint(layers=tuple(sorted(group)), together=True) for group in problem.colocated
    )
    ties = (*chain.sides, *groups)
    runs = _runs(problem, ties)
    lacks = [0.0] * len(chain.stages)
    margins = (0.0, HIGHS_FEASIBILITY, HIGHS_MARGIN)
    more_than_sums = any(device_type.chain.used_bytes for device_type in problem.types)
    for attempt in range(_TIGHTENED if more_than_sums else len(margins)):
        margin = margins[min(attempt, len(margins) - 1)]
        stated = _PipelineProgram(problem, runs, ties, lacks, margin)
        stated.bound(max(at_least_s, bound_s), cutoff_s)
        outcome = run(stated.program, stated.unit_s, most_nodes)
        if outcome.impossible and attempt == 0:
            if cutoff_s < math.inf:
                return CutOff(cutoff_s)
            return Infeasible(_why_not(problem, ties))
        bound_s = max(at_least_s, outcome.bound_s) if attempt == 0 else bound_s
        if not outcome.has_solution:
            break
        taken = stated.read()
        order, options = taken.runs, taken.options
        if len(runs) < len(chain.layers):
            order = list(range(len(chain.layers)))
            for layers in starmap(range, pairwise(taken.cuts)):
                _order_alike(chain, options, layers)
        laid = problem.laid(order, taken.cuts, taken.types)
        split = evaluate_split(laid, taken.cuts, options)
        if fits(laid, split) and broken(laid, split) is None:
            # Closed to the gap that was asked for counts as optimal only if the solver says so.
            tolerance = 2 * HIGHS_GAP if outcome.proven else EQUAL
            lower_s = min(bound_s, split.objective_s)
            return GraphSolution(
                problem=problem,
                order=tuple(order),
                types=tuple(taken.types),
                split=replace(split, lower_bound_s=lower_s, tolerance=tolerance),
                method="program",
            )
        for s, (used, stage) in enumerate(zip(split.stage_bytes, laid.stages, strict=True)):
            lacks[s] += max(0.0, used - stage.capacity_bytes)
    return Unfinished(
        bound_s,
        "the integer program met no split that fits to the byte, within its limit or because its "
        "numbers differ too much in size for HiGHS; use the exact solver",
    )


class _Count(NamedTuple):
    """One variable n."""

    variable: Any
    run: int
    type: int
    option: Option
    number: int
    """Number of the option."""


class _PipelineProgram:
    """The program of a problem whose layers are in `runs`.

    Stages have `lacks` bytes and a share `margin` of their capacity less than they have.
    """

    def __init__(
        self,
        problem: GraphInstance,
        runs: Sequence[Sequence[int]],
        ties: Sequence[SideConstraint],
        lacks: Sequence[float],
        margin: float,
    ) -> None:
        self.problem, self.chain, self.ties = problem, problem.chain, ties
        self.program = pulp.LpProblem("placement", pulp.LpMinimize)
        self.stages, self.types = range(len(self.chain.stages)), range(len(problem.types))
        self.runs = range(len(runs))
        self.kinds, self.lengths = [self.chain.layers[run[0]] for run in runs], [*map(len, runs)]
        self.run_of = {layer: a for a, run in enumerate(runs) for layer in run}
        self.single = len(runs) == len(self.chain.layers)
        # Runs of several layers are those of a chain.
        self.edges = sorted(set(problem.edges if self.single else pairwise(self.runs)))
        chains = [device_type.chain for device_type in problem.types]
        self.rooms = [chain.stages for chain in chains]
        longest_s = max(
            sum(min(o.time_s for o in chain.kinds[kind]) for kind in chain.layers)
            * min(room.time_scale for room in chain.stages)
            for chain in chains
        )
        self.unit_s = power_of_ten(longest_s) * 1e-3
        several = len(self.types) > 1
        self.of_type: list[list[Any]] = [
            [self._binary(f"is_{s}_{g}") if several else 1 for g in self.types] for s in self.stages
        ]
        self.on = [[list(self._counts(a, s)) for s in self.stages] for a in self.runs]
        """[run][stage]"""
        self.here = [
            [variable for a in self.runs for variable in self.on[a][s]] for s in self.stages
        ]
        self._places()
        self._memory(lacks, margin)
        self._hosts(margin)
        self._ties()
        self.total = self._objective()

    def _binary(self, name: str) -> Any:
        return self.program.add_variable(name, cat=pulp.LpBinary)

    def _counts(self, a: int, s: int) -> Iterator[_Count]:
        for g in self.types:
            for k, option in enumerate(self.problem.types[g].chain.kinds[self.kinds[a]]):
                name = f"n_{a}_{s}_{g}_{k}"
                variable = self.program.add_variable(name, 0, self.lengths[a], pulp.LpInteger)
                yield _Count(variable, a, g, option, k)

    @cached_property
    def until(self) -> list[list[Any]]:
        """[run][stage] Layers of it on the stage or before."""
        return [
            [
                pulp.lpSum(n.variable for numbers in on[: s + 1] for n in numbers)
                for s in self.stages
            ]
            for on in self.on
        ]

    def _number(self, a: int, s: int) -> Any:
        return pulp.lpSum(n.variable for n in self.on[a][s])

    def _places(self) -> None:
        """Every layer on one stage, in an order that runs; stages not empty, each of one type."""
        program, problem = self.program, self.problem
        done = list(self.until)
        for a, length in enumerate(self.lengths):
            program += self.until[a][-1] == length, f"run{a}_is_placed"
            for s, g in product(self.stages, self.types if len(self.types) > 1 else ()):
                of_type = pulp.lpSum(n.variable for n in self.on[a][s] if n.type == g)
                program += (
                    of_type <= length * self.of_type[s][g],
                    f"run{a}_on_stage{s}_is_of_type{g}",
                )
            if length == 1:
                continue
            done[a] = [self._binary(f"done_{a}_{s}") for s in self.stages]
            for s in self.stages:
                program += self.until[a][s] >= length * done[a][s], f"run{a}_is_done_by_stage{s}"
            for s in self.stages[1:]:
                program += done[a][s] >= done[a][s - 1], f"run{a}_stays_done_on_stage{s}"
        for (a, b), s in product(self.edges, self.stages):
            follows = self.until[b][s] <= self.lengths[b] * done[a][s]
            program += follows, f"run{b}_follows_{a}_on_stage{s}"
        for s in self.stages:
            layers, room = pulp.lpSum(n.variable for n in self.here[s]), self.rooms[0][s]
            program += layers >= room.least_layers, f"stage{s}_has_layers_enough"
            if room.most_layers is not None:
                program += layers <= room.most_layers, f"stage{s}_has_no_more_layers"
        if len(self.types) > 1:
            for s in self.stages:
                program += pulp.lpSum(self.of_type[s]) == 1, f"stage{s}_has_a_type"
            for g in self.types:
                used = pulp.lpSum(self.of_type[s][g] for s in self.stages)
                program += used == problem.types[g].stages, f"type{g}_is_used"

    def _memory(self, lacks: Sequence[float], margin: float) -> None:
        """Every stage within the capacity of its type, with the largest transient of its layers."""
        program = self.program
        tables = [
            device_type.chain.kinds[kind]
            for device_type in self.problem.types
            for kind in set(self.kinds)
        ]
        every_level = sorted({o.transient_bytes for table in tables for o in table})
        for s in self.stages:
            rooms = [of_type[s] for of_type in self.rooms]
            free = [room.free_bytes - margin * room.capacity_bytes - lacks[s] for room in rooms]
            # Each row in units of its own capacity, without what could never fit: small tolerances.
            unit = power_of_ten(max(room.capacity_bytes for room in rooms)) * 1e-1
            used = []
            for n in self.here[s]:
                needs = rooms[n.type].summed_bytes(n.option)
                if needs + n.option.transient_bytes > free[n.type]:
                    n.variable.upBound = 0
                used.append(n.variable * (needs / unit))
            if self.single:
                largest = program.add_variable(f"largest_{s}", 0)
                used.append(largest)
                for a in self.runs:
                    transient = (
                        n.variable * (n.option.transient_bytes / unit) for n in self.on[a][s]
                    )
                    program += largest >= pulp.lpSum(transient), f"run{a}_runs_on_stage{s}"
            else:
                levels = {
                    u: self._binary(f"level_{s}_{i}")
                    for i, u in enumerate(every_level)
                    if u <= max(free)
                }
                program += pulp.lpSum(levels.values()) == 1, f"stage{s}_has_one_transient_level"
                used += [v * (u / unit) for u, v in levels.items()]
                for n in self.here[s]:
                    u = n.option.transient_bytes
                    if u > every_level[0] and n.variable.upBound:
                        covering = pulp.lpSum(v for level, v in levels.items() if level >= u)
                        most, name = self.lengths[n.run] * covering, n.variable.name
                        program += n.variable <= most, f"{name}_is_below_the_level"
            of_type = [is_ * (room / unit) for is_, room in zip(self.of_type[s], free, strict=True)]
            program += pulp.lpSum(used) <= pulp.lpSum(of_type), f"stage{s}_fits_in_memory"

    def _hosts(self, margin: float) -> None:
        """Every host within its memory; hosts that hold the same devices are alike."""
        program = self.program
        hosts = [(host, g) for g in self.types for host in self.problem.types[g].chain.hosts]
        for number, (host, g) in enumerate(dict.fromkeys(hosts)):
            unit = power_of_ten(host.capacity_bytes) * 1e-1
            used = [
                n.variable * (ranks * self.rooms[g][s].on_host_bytes(n.option) / unit)
                for s, ranks in enumerate(host.ranks)
                for n in self.here[s]
                if ranks and n.type == g and (n.option.host_resident_bytes or n.option.host_bytes)
            ]
            room = host.capacity_bytes * (1 - margin) / unit
            program += pulp.lpSum(used) <= room, f"host{number}_has_the_memory"

    def _ties(self) -> None:
        """Every side by rows over the runs that it speaks of."""
        program = self.program
        for number, tie in enumerate(self.ties):
            if tie.at_most is not None:
                for s in tie.stages or self.stages:
                    if s in self.stages:
                        layers = pulp.lpSum(n.variable for n in self.here[s])
                        program += layers <= tie.at_most, f"side{number}_on_stage{s}"
            home = []
            if tie.together:
                home = [self._binary(f"home_{number}_{s}") for s in self.stages]
                program += pulp.lpSum(home) == 1, f"side{number}_has_one_stage"
            runs = dict.fromkeys(self.run_of[layer] for layer in tie.layers)
            for a, s in product(runs, self.stages):
                if tie.together:
                    most = self.lengths[a] * home[s]
                    program += self._number(a, s) <= most, f"side{number}_{a}_{s}"
                elif tie.stages and s not in tie.stages:
                    program += self._number(a, s) == 0, f"side{number}_{a}_{s}"
                for n in self.on[a][s] if tie.options else ():
                    if n.option.name not in tie.options:
                        n.variable.upBound = 0

    def _cuts(self) -> list[Any]:
        """[boundary] Seconds of what crosses it, for the types that meet there."""
        cuts = []
        for s in self.stages[:-1] if self.problem.output_s else ():
            sent: dict[int, Any] = {}
            for a, b in self.edges:
                if a not in sent:
                    sent[a] = self.program.add_variable(f"sent_{a}_{s}", 0, 1)
                crosses = self.until[a][s] - self.until[b][s]
                name = f"output{a}_crosses_behind_stage{s}_to_{b}"
                self.program += sent[a] >= crosses, name
            cut = self.program.add_variable(f"cut_{s}", 0)
            cuts.append(cut)
            for g, h in product(self.types, self.types):
                own_s = self.problem.sent_s(g, h)
                apart = 2 - self.of_type[s][g] - self.of_type[s + 1][h]
                lowest = pulp.lpSum(
                    variable * (own_s[a] / self.unit_s) for a, variable in sent.items()
                )
                lowest -= apart * (sum(own_s) / self.unit_s)
                self.program += cut >= lowest, f"cut_behind_stage{s}_of_types{g}_{h}"
        return cuts

    def _straight_s(self, s: int) -> Any:
        """Seconds of a stage for outputs that go straight from where they are made to readers."""
        output_s = self.problem.sent_s()
        ends: dict[int, Any] = {}
        for a, b in self.edges:
            if a not in ends:
                ends[a] = self.program.add_variable(f"end_{a}_{s}", 0, 1)
            stage_s, its, name = (
                self._number(a, s),
                self._number(b, s),
                f"output{a}_for_{b}_on_stage{s}",
            )
            self.program += ends[a] >= stage_s - self.until[b][s], f"{name}_is_sent"
            self.program += ends[a] >= its - stage_s, f"{name}_is_received"
        return pulp.lpSum(end * (output_s[a] / self.unit_s) for a, end in ends.items())

    def _objective(self) -> Any:
        """Seconds of the stages, of the slowest, of the longest synchronisation, and their sum."""
        program, problem, chain = self.program, self.problem, self.chain
        cuts = self._cuts() if problem.relayed else []
        slowest, slowest_forward, longest_sync = (
            program.add_variable(name, 0) for name in ("slowest", "slowest_forward", "longest_sync")
        )
        total = [chain.steady * slowest, 1.0 * longest_sync]
        if chain.forward_apart:
            total.append(chain.steady * slowest_forward)
        for s in self.stages:
            scale = [room[s].time_scale / self.unit_s for room in self.rooms]
            beside = pulp.lpSum(cuts[max(0, s - 1) : s + 1] if s else cuts[:1])
            beside += pulp.lpSum(
                self.of_type[s][g] * (self.rooms[g][s].exposed_s / self.unit_s) for g in self.types
            )
            if not problem.relayed and s not in problem.unpaid:
                beside += self._straight_s(s)
            seconds = program.add_variable(f"seconds_{s}", 0)
            room = (n.variable * (scale[n.type] * n.option.time_s) for n in self.here[s])
            program += seconds == pulp.lpSum(room) + beside, f"time_of_stage{s}"
            if chain.forward_apart:
                forward = pulp.lpSum(
                    n.variable * (scale[n.type] * n.option.forward_s) for n in self.here[s]
                )
                forward += 0.5 * beside
                program += forward <= slowest_forward, f"stage{s}_forward_is_within_the_slowest"
                program += seconds - forward <= slowest, f"stage{s}_backward_is_within_the_slowest"
            else:
                program += seconds <= slowest, f"stage{s}_is_within_the_slowest"
            sync = [n.variable * (n.option.sync_s / self.unit_s) for n in self.here[s]]
            program += pulp.lpSum(sync) <= longest_sync, f"stage{s}_syncs_within_the_longest"
            total.append(chain.fill * seconds)
            for n in self.here[s]:
                credits_s = problem.types[n.type].chain.credits_s
                if credits_s:
                    total.append(n.variable * (-scale[n.type] * credits_s[self.kinds[n.run]]))
        objective = pulp.lpSum(total)
        program.setObjective(objective)
        return objective

    def bound(self, at_least_s: float, cutoff_s: float) -> None:
        """State what is known of the objective."""
        program = self.program
        if at_least_s > -math.inf:  # a hair less, for the solver's tolerances
            known_s = at_least_s - HIGHS_MARGIN * abs(at_least_s)
            program += self.total >= known_s / self.unit_s, "no_faster_than_known"
        if cutoff_s / self.unit_s < math.inf:
            program += self.total <= cutoff_s / self.unit_s, "faster_than_the_cutoff"

    def read(self) -> _Taken:
        """Turn the solver's values into cuts and options; nothing later knows of a solver."""
        types = [0] * len(self.stages)
        if len(self.types) > 1:
            types = [
                max(self.types, key=lambda g, s=s: self.of_type[s][g].value())  # type: ignore[misc]
                for s in self.stages
            ]
        taken = _Taken(types, [], [0], [])
        for s in self.stages:
            for a in self.runs:
                for n in reversed(self.on[a][s]):
                    count = round(n.variable.value())
                    taken.runs.extend([a] * count)
                    taken.options.extend([n.number] * count)
            taken.cuts.append(len(taken.options))
        return taken


def solve(
    instance: Instance,
    *,
    most_nodes: int | None = None,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> Solution | Infeasible | CutOff | Unfinished:
    """Minimise the time of `instance` to `HIGHS_GAP`, with at most `most_nodes` in the tree.

    A solution that met the limit carries the bound proven until then and is not `optimal`.
    `at_least_s` is a bound known before; only objectives below `cutoff_s` are of interest.
    """

    def solve_row(row: Instance, below_s: float) -> Solution | Infeasible | CutOff | Unfinished:
        reason = why_infeasible(row)
        if reason:
            return Infeasible(reason)
        solution = solve_graph(
            chain_problem(row),
            most_nodes=most_nodes,
            at_least_s=at_least_s,
            cutoff_s=below_s,
        )
        return solution.split if isinstance(solution, GraphSolution) else solution

    return best_row(instance, cutoff_s, solve_row)


def _why_not(problem: GraphInstance, ties: Sequence[SideConstraint]) -> str:
    """Name what cannot be met together: all that is asked beside the memory of each stage."""
    hosts = (host for device_type in problem.types for host in device_type.chain.hosts)
    asked = dict.fromkeys(map(str, (*ties, *hosts)))
    if asked:
        return f"no split that fits the devices keeps all of this: {'; '.join(asked)}"
    rows = any(stage.most_layers is not None for stage in problem.chain.stages)
    return NO_ROW if rows else why_no_split(problem)


def _runs(problem: GraphInstance, ties: Sequence[SideConstraint]) -> list[list[int]]:
    """Return the layers in a row that nothing tells apart; each alone but in a chain."""
    layers = range(len(problem.chain.layers))
    if len(problem.types) > 1 or problem.output_s or not problem.one_order:
        return [[layer] for layer in layers]
    tied = [{at for at, tie in enumerate(ties) if layer in tie.layers} for layer in layers]
    groups: list[list[int]] = []
    for layer, kind in enumerate(problem.chain.layers):
        if layer and kind == problem.chain.layers[layer - 1] and tied[layer] == tied[layer - 1]:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


def _order_alike(instance: Instance, options: list[int], stage_layers: range) -> None:
    """Give later options to the earlier of a stage's layers that nothing tells apart.

    What ends a run between two of them may have been a side that does not speak of options.
    """
    chosen = [tie for tie in instance.sides if tie.options]

    def key(layer: int) -> tuple[object, ...]:
        return instance.layers[layer], *(tie for tie in chosen if layer in tie.layers)

    for _, same in groupby(stage_layers, key=key):
        layers = list(same)
        options[layers[0] : layers[-1] + 1] = sorted(
            options[layers[0] : layers[-1] + 1], reverse=True
        )
