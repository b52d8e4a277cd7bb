"""The partition problem as an integer program, solved by HiGHS through PuLP.

A second opinion: it shares the problem and its pricing with `planner.solver.inner` and nothing
else.

Layers of one kind in a row are a run, and layers of a run are alike, so counting them is enough.
Over runs a of N_a layers, stages s, options k and levels i of transient bytes:

    n[a,s,k]       integer: layers of run a on stage s with option k
    done[a,s]      binary: run a ends on stage s or before
    level[s,i]     binary: the largest transient of stage s is θ_i
    t_s, τ, γ      seconds of stage s, of the slowest stage, of the longest synchronisation

    minimise    A τ + Σ_s z_s + γ,    z_s = ρ t_s - κ_s

    Σ_{s,k} n[a,s,k] = N_a                          run{a}_is_placed
    Σ_{a,k} n[a,s,k] >= least_s                     stage{s}_has_layers_enough
    Σ_{a,k} n[a,s,k] <= most_s                      stage{s}_has_no_more_layers
    Σ_{s'<=s,k} n[a,s',k] >= N_a done[a,s]          run{a}_is_done_by_stage{s}
    done[a,s] >= done[a,s-1]                        run{a}_stays_done_on_stage{s}
    Σ_k n[a,s,k] <= N_a done[a-1,s]                 run{a}_follows_the_one_before_on_stage{s}

    Σ_i level[s,i] = 1                              stage{s}_has_one_transient_level
    n[a,s,k] <= N_a Σ_{i: θ_i >= u_k} level[s,i]    n_{a}_{s}_{k}_is_below_the_level
    Σ_{a,k} n[a,s,k] (w + q_s a + d_s e)
        + Σ_i θ_i level[s,i] <= M_s                 stage{s}_fits_in_memory
    Σ_s ranks_s Σ_{a,k} n[a,s,k] h <= H             host{number}_has_the_memory

    t_s = σ_s Σ_{a,k} n[a,s,k] (f + b) + c_s        time_of_stage{s}
    t_s <= τ                                        stage{s}_is_within_the_slowest
    Σ_{a,k} n[a,s,k] g <= γ                         stage{s}_syncs_within_the_longest

Of the instance, A is `steady`, ρ `fill`, κ_s the `credits_s` of the layers on stage s; of a stage,
σ_s is `time_scale`, c_s `exposed_s` and the cuts at its ends, M_s `free_bytes`, q_s and d_s the
micro-batches in flight and those whose weight gradients wait; of option k, f and b are its seconds,
g `sync_s`, u `transient_bytes`, and w, a and e the bytes that it holds always, per micro-batch in
flight and per one that waits; h is what a layer has on its host of H bytes.

With `forward_apart`, τ is the sum of two: stage{s}_forward_is_within_the_slowest of them and
stage{s}_backward_is_within_the_slowest.  A bound or a cutoff that is known beforehand is a row over
the objective: no_faster_than_known, faster_than_the_cutoff.  Side constraints
(planner.solver.sides) are more rows, side{number}_...: Σ n <= most on a stage that holds at most so
many layers; n = 0 on stages where a layer may not be and for options that it may not have; one
binary per stage where layers lie together.  A run ends where one of them begins or ends.

Costs of cuts depend on where a cut is.  With them every layer is a run of its own, its row "done"
is an equation, and the cut behind stage s lies behind layer a if done[a,s] - done[a+1,s] is 1.

HiGHS works to tolerances, so quantities are scaled to be of the order of milliseconds and
gigabytes.  PuLP calls a run that met its time limit "Optimal": `read` looks at `sol_status` and at
the dual bound instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, overload

from planner.errors import MeshwrightError
from planner.solver.highs import Outcome, power_of_ten, pulp, run
from planner.solver.instance import (
    Fathomed,
    Infeasible,
    Instance,
    Option,
    Solution,
    Unfinished,
    broken,
    fits,
    priced,
)
from planner.solver.memory_reach import why_infeasible
from planner.solver.sides import AtMost, Chosen, Placed, Together
from planner.solver.sizes import NO_ROW, best_row
from planner.tolerances import EQUAL, HIGHS_FEASIBILITY, HIGHS_GAP, HIGHS_MARGIN

_TIGHTENED = 16
"""Programs with less room that are tried where bytes are more than sums."""


@dataclass(frozen=True, slots=True)
class Formulation:
    """The program and what its variables mean; `count[a][s][k]` is n[a,s,k]."""

    instance: Instance
    program: Any
    runs: list[tuple[int, int]]
    count: list[list[list[Any]]]
    unit_s: float

    def options(self, run: int) -> tuple[Option, ...]:
        """Return the options of the layers of a run."""
        return self.instance.kinds[self.runs[run][0]]

    def terms(self, stage: int) -> Iterator[tuple[Any, Option, int]]:
        """Counts on one stage, each with its option and its run."""
        for a, on_stage in enumerate(self.count):
            for n, option in zip(on_stage[stage], self.options(a), strict=True):
                yield n, option, a


@overload
def solve(
    instance: Instance,
    *,
    time_limit_s: None = None,
    gap: float = HIGHS_GAP,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> Solution | Infeasible | Fathomed: ...


@overload
def solve(
    instance: Instance,
    *,
    time_limit_s: float,
    gap: float = HIGHS_GAP,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> Solution | Infeasible | Fathomed | Unfinished: ...


def solve(
    instance: Instance,
    *,
    time_limit_s: float | None = None,
    gap: float = HIGHS_GAP,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> Solution | Infeasible | Fathomed | Unfinished:
    """Minimise the time of `instance` to a relative `gap`, for at most `time_limit_s` seconds.

    A solution that met the time limit carries the bound proven until then and is not `optimal`.
    `at_least_s` is a bound known before; only objectives below `cutoff_s` are of interest.
    """
    if instance.sizes:
        return best_row(
            instance,
            cutoff_s,
            lambda row, below_s: _solved(row, time_limit_s, gap, at_least_s, below_s),
        )
    return _solved(instance, time_limit_s, gap, at_least_s, cutoff_s)


def _solved(
    instance: Instance,
    time_limit_s: float | None,
    gap: float,
    at_least_s: float,
    cutoff_s: float,
) -> Solution | Infeasible | Fathomed | Unfinished:
    """Solve an instance whose bytes may be more than sums."""
    if instance.used_bytes is None:
        return _solve(instance, time_limit_s, gap, at_least_s, cutoff_s)
    # The program knows sums alone.  Stages that hold more than they have get less room, until a
    # solution fits; the bound is that of the sums, and may stay below it.
    tight, bound_s = replace(instance, used_bytes=None), -math.inf
    for attempt in range(_TIGHTENED):
        found = _solve(tight, time_limit_s, gap, max(at_least_s, bound_s), cutoff_s)
        if not isinstance(found, Solution):
            return found if attempt == 0 else Unfinished(bound_s)
        bound_s = max(bound_s, found.lower_bound_s) if attempt == 0 else bound_s
        exact = priced(instance, found.cuts, found.options)
        if fits(instance, exact):
            bound_s = min(bound_s, exact.objective_s)
            return replace(exact, lower_bound_s=bound_s, tolerance=found.tolerance)
        lacks = [
            max(0.0, used - stage.capacity_bytes)
            for used, stage in zip(exact.stage_bytes, instance.stages, strict=True)
        ]
        stages = [
            replace(stage, fixed_bytes=stage.fixed_bytes + more)
            for stage, more in zip(tight.stages, lacks, strict=True)
        ]
        tight = replace(tight, stages=tuple(stages))
    return Unfinished(bound_s)


def _solve(
    instance: Instance,
    time_limit_s: float | None,
    gap: float,
    at_least_s: float,
    cutoff_s: float,
) -> Solution | Infeasible | Fathomed | Unfinished:
    """Solve an instance whose bytes are sums."""
    reason = why_infeasible(instance)
    if reason:
        return Infeasible(reason)
    bound_s = -math.inf
    # A solution may exceed a capacity by the solver's tolerance.  Then it is asked again for one
    # that leaves a little free; the bound is that of the whole capacity.
    for margin in (0.0, HIGHS_FEASIBILITY, HIGHS_MARGIN):
        formulation = formulate(instance, margin=margin, at_least_s=at_least_s, cutoff_s=cutoff_s)
        outcome = run(formulation.program, formulation.unit_s, time_limit_s, gap)
        if outcome.impossible and margin == 0.0:
            if cutoff_s < math.inf:
                return Fathomed(cutoff_s)
            return Infeasible(_why_not(instance))
        answer = read(formulation, outcome, gap)
        bound_s = max(at_least_s, answer.lower_bound_s) if margin == 0.0 else bound_s
        if isinstance(answer, Unfinished):
            break
        if fits(instance, answer) and broken(instance, answer) is None:
            return replace(answer, lower_bound_s=min(bound_s, answer.objective_s))
    if time_limit_s is None:
        raise MeshwrightError(
            "the integer program found no split that fits to the byte: its numbers differ too much "
            "in size for HiGHS; use the exact solver"
        )
    return Unfinished(bound_s)


def _why_not(instance: Instance) -> str:
    """Name what cannot be kept together: all that is asked beside the memory of each stage."""
    asked = dict.fromkeys(map(str, (*instance.sides, *instance.hosts)))
    if not asked:
        return NO_ROW
    return f"no split that fits the devices keeps all of this: {'; '.join(asked)}"


def formulate(
    instance: Instance,
    *,
    margin: float = 0.0,
    at_least_s: float = -math.inf,
    cutoff_s: float = math.inf,
) -> Formulation:
    """State the program; `margin` is the share of every capacity that stays free."""
    runs = _runs(instance)
    chain_s = sum(min(o.time_s for o in instance.kinds[kind]) for kind in instance.layers)
    chain_s *= min(stage.time_scale for stage in instance.stages)
    program = pulp.LpProblem("partition", pulp.LpMinimize)
    count = [
        [
            [
                program.add_variable(f"n_{a}_{s}_{k}", 0, length, pulp.LpInteger)
                for k in range(len(instance.kinds[kind]))
            ]
            for s in range(len(instance.stages))
        ]
        for a, (kind, length) in enumerate(runs)
    ]
    stated = Formulation(instance, program, runs, count, power_of_ten(chain_s) * 1e-3)
    total = _state_objective(stated, done=_state_places(stated))
    _state_memory(stated, margin)
    _state_hosts(stated, margin)
    _state_sides(stated)
    if at_least_s > -math.inf:  # a hair less, for the solver's tolerances
        known_s = at_least_s - HIGHS_MARGIN * abs(at_least_s)
        program += total >= known_s / stated.unit_s, "no_faster_than_known"
    if cutoff_s < math.inf:
        program += total <= cutoff_s / stated.unit_s, "faster_than_the_cutoff"
    return stated


def _runs(instance: Instance) -> list[tuple[int, int]]:
    """Return (kind, layers) of layers in a row that nothing tells apart."""
    if instance.cut_s:
        return [(kind, 1) for kind in instance.layers]
    begins = {
        at
        for side in instance.sides
        if not isinstance(side, AtMost)
        for at in (side.first, side.last + 1)
    }
    parts = accumulate(int(layer in begins) for layer in range(len(instance.layers)))
    keys = zip(instance.layers, parts, strict=True)
    return [(kind, len(list(same))) for (kind, _), same in groupby(keys)]


def _state_places(stated: Formulation) -> list[list[Any]]:
    """Every layer on one stage, stages contiguous and not empty; returns done[run][stage]."""
    program, count = stated.program, stated.count
    stages = range(len(stated.instance.stages))
    done = [
        [program.add_variable(f"done_{a}_{s}", cat=pulp.LpBinary) for s in stages]
        for a in range(len(stated.runs))
    ]
    for a, (_, length) in enumerate(stated.runs):
        on_stage = [pulp.lpSum(count[a][s]) for s in stages]
        program += pulp.lpSum(on_stage) == length, f"run{a}_is_placed"
        for s in stages:
            until = pulp.lpSum(on_stage[: s + 1])
            if stated.instance.cut_s:  # the cut behind a layer is read off these
                program += until == done[a][s], f"run{a}_is_done_by_stage{s}"
            else:
                program += until >= length * done[a][s], f"run{a}_is_done_by_stage{s}"
            if s > 0:
                program += done[a][s] >= done[a][s - 1], f"run{a}_stays_done_on_stage{s}"
            if a > 0:
                follows = pulp.lpSum(on_stage[s]) <= length * done[a - 1][s]
                program += follows, f"run{a}_follows_the_one_before_on_stage{s}"
    for s in stages:
        held = pulp.lpSum(n for n, _, _ in stated.terms(s))
        stage = stated.instance.stages[s]
        program += held >= stage.least_layers, f"stage{s}_has_layers_enough"
        if stage.most_layers is not None:
            program += held <= stage.most_layers, f"stage{s}_has_no_more_layers"
    return done


def _state_memory(stated: Formulation, margin: float) -> None:
    """Every stage within its capacity, with the largest transient of its layers."""
    program, tables = stated.program, [stated.options(a) for a in range(len(stated.runs))]
    every_level = sorted({o.transient_bytes for table in tables for o in table})
    for s, stage in enumerate(stated.instance.stages):
        room = stage.free_bytes - margin * stage.capacity_bytes
        # Each row in units of its own capacity, without what could never fit: small tolerances.
        unit = power_of_ten(stage.capacity_bytes) * 1e-1
        levels = {
            u: program.add_variable(f"level_{s}_{i}", cat=pulp.LpBinary)
            for i, u in enumerate(every_level)
            if u <= room
        }
        program += pulp.lpSum(levels.values()) == 1, f"stage{s}_has_one_transient_level"
        used = [v * (u / unit) for u, v in levels.items()]
        for n, option, a in stated.terms(s):
            needs = stage.held_bytes(option)
            if needs + option.transient_bytes > room:
                n.upBound = 0
                continue
            used.append(n * (needs / unit))
            if option.transient_bytes > every_level[0]:
                covering = pulp.lpSum(v for u, v in levels.items() if u >= option.transient_bytes)
                program += n <= stated.runs[a][1] * covering, f"{n.name}_is_below_the_level"
        program += pulp.lpSum(used) <= room / unit, f"stage{s}_fits_in_memory"


def _state_hosts(stated: Formulation, margin: float) -> None:
    """Every host within its memory; hosts that hold the same devices are alike."""
    program = stated.program
    for number, host in enumerate(dict.fromkeys(stated.instance.hosts)):
        unit = power_of_ten(host.capacity_bytes) * 1e-1
        used = [
            n * (ranks * stage.on_host_bytes(o) / unit)
            for s, (stage, ranks) in enumerate(zip(stated.instance.stages, host.ranks, strict=True))
            for n, o, _ in stated.terms(s)
            if ranks and (o.host_resident_bytes or o.host_bytes)
        ]
        room = host.capacity_bytes * (1 - margin) / unit
        program += pulp.lpSum(used) <= room, f"host{number}_has_the_memory"


def _state_sides(stated: Formulation) -> None:
    """Every side by rows over the runs that it speaks of."""
    program, stages = stated.program, range(len(stated.instance.stages))
    ends = list(accumulate(length for _, length in stated.runs))
    for number, side in enumerate(stated.instance.sides):
        if isinstance(side, AtMost):
            for s in side.stages:
                held = pulp.lpSum(n for n, _, _ in stated.terms(s))
                program += held <= side.layers, f"side{number}_on_stage{s}"
            continue
        inside = [
            a
            for a, ((_, length), end) in enumerate(zip(stated.runs, ends, strict=True))
            if side.first <= end - length and end - 1 <= side.last
        ]
        home = []
        if isinstance(side, Together):
            home = [program.add_variable(f"home_{number}_{s}", cat=pulp.LpBinary) for s in stages]
            program += pulp.lpSum(home) == 1, f"side{number}_has_one_stage"
        for a in inside:
            for s in stages:
                on_stage = pulp.lpSum(stated.count[a][s])
                if isinstance(side, Together):
                    program += on_stage <= stated.runs[a][1] * home[s], f"side{number}_{a}_{s}"
                elif isinstance(side, Placed) and s not in side.stages:
                    program += on_stage == 0, f"side{number}_{a}_{s}"
                elif isinstance(side, Chosen):
                    for n, option in zip(stated.count[a][s], stated.options(a), strict=True):
                        if option.name not in side.options:
                            n.upBound = 0


def _state_objective(stated: Formulation, done: list[list[Any]]) -> Any:
    """Seconds of the stages, of the slowest, of the longest synchronisation, and their sum."""
    instance, program, unit = stated.instance, stated.program, stated.unit_s
    slowest = program.add_variable("slowest", 0)
    slowest_forward = program.add_variable("slowest_forward", 0)
    longest_sync = program.add_variable("longest_sync", 0)
    total = [instance.steady * slowest, 1.0 * longest_sync]
    if instance.forward_apart:
        total.append(instance.steady * slowest_forward)
    for s, stage in enumerate(instance.stages):
        seconds = program.add_variable(f"seconds_{s}", 0)
        scale = stage.time_scale / unit
        layers = pulp.lpSum(n * (scale * o.time_s) for n, o, _ in stated.terms(s))
        more = pulp.lpSum(_cut_terms(stated, done, s)) + stage.exposed_s / unit
        program += seconds == layers + more, f"time_of_stage{s}"
        if instance.forward_apart:
            forward = pulp.lpSum(n * (scale * o.forward_s) for n, o, _ in stated.terms(s))
            forward += 0.5 * more
            program += forward <= slowest_forward, f"stage{s}_forward_is_within_the_slowest"
            program += seconds - forward <= slowest, f"stage{s}_backward_is_within_the_slowest"
        else:
            program += seconds <= slowest, f"stage{s}_is_within_the_slowest"
        sync = [n * (o.sync_s / unit) for n, o, _ in stated.terms(s) if o.sync_s > 0]
        if sync:
            program += pulp.lpSum(sync) <= longest_sync, f"stage{s}_syncs_within_the_longest"
        total.append(instance.fill * seconds)
        if instance.credits_s:
            total += [
                n * (-scale * instance.credits_s[stated.runs[a][0]]) for n, _, a in stated.terms(s)
            ]
    objective = pulp.lpSum(total)
    program.setObjective(objective)
    return objective


def _cut_terms(stated: Formulation, done: list[list[Any]], stage: int) -> list[Any]:
    """Seconds of the cuts at both ends of a stage; runs are single layers here."""
    cut_s = stated.instance.cut_s
    terms = []
    for boundary in (stage - 1, stage) if cut_s else ():
        if 0 <= boundary < len(stated.instance.stages) - 1:
            for a in range(len(done) - 1):
                here = done[a][boundary] - done[a + 1][boundary]
                terms.append((cut_s[a + 1] / stated.unit_s) * here)
    return terms


def read(stated: Formulation, outcome: Outcome, gap: float) -> Solution | Unfinished:
    """Turn the solver's values into cuts and options; nothing later knows there was a solver."""
    if not outcome.found:
        return Unfinished(outcome.bound_s)
    cuts, options = [0], []
    for s in range(len(stated.instance.stages)):
        for on_stage in stated.count:
            numbers = [round(n.value()) for n in on_stage[s]]
            for k in reversed(range(len(numbers))):
                options += [k] * numbers[k]
        cuts.append(len(options))
        _order_alike(stated.instance, options, cuts[-2])
    solution = priced(stated.instance, cuts, options, lower_bound_s=outcome.bound_s)
    # Closed to the gap that was asked for counts as optimal only if the solver says so.
    return replace(solution, tolerance=2 * gap if outcome.proven else EQUAL)


def _order_alike(instance: Instance, options: list[int], first: int) -> None:
    """Give later options to the earlier of the layers from `first` on that nothing tells apart.

    What ends a run between two of them may have been a side that does not speak of options.
    """
    chosen = [side for side in instance.sides if isinstance(side, Chosen)]

    def key(layer: int) -> tuple[object, ...]:
        asked = (side for side in chosen if side.first <= layer <= side.last)
        return instance.layers[layer], *asked

    for _, same in groupby(range(first, len(options)), key=key):
        layers = list(same)
        options[layers[0] : layers[-1] + 1] = sorted(
            options[layers[0] : layers[-1] + 1], reverse=True
        )
