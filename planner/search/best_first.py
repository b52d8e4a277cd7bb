"""The search: best bound first, a dearer bound only where a cheaper one does not decide.

Objective, the closed form that the certificate speaks of:

    T = steady max_r t_r + sum_r (fill t_r - credit_r) + max_r sync_r + step_s,   mem_r <= capacity

with t_r the seconds of rank r on one micro-batch, and steady, fill and credit those of the
schedule (planner.search.formulation).  Families of configurations wait in a queue, ordered by the
highest lower bound that is known of each.  The first one gets its next bound (see
planner.search.candidates) and goes back to its place; a family of several schedules makes place
for one family of each, a family whose bounds are all known makes place for its layouts, and a
layout that is first again with all of its bounds has its partition problem solved.  When the first
of the queue is not below the best objective found, no configuration that is left is either, and
the search ends with a proof.  So no problem is solved whose bounds exceed the optimum, and no dear
bound is worked out where a cheap one exceeds it.

Where all blocks of a framework's plans recompute alike, the queue is gone through once for each
choice; what one found is what the next has to beat, and one account counts all of them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.collector import uncollected
from planner.errors import DocumentError, NoneFaster, NoPlanFits
from planner.native import Rules
from planner.pins import outside
from planner.plan import Layout
from planner.request import Request
from planner.search.answer import TIES_LIMIT_S, Answer, Progress
from planner.search.candidates import Bounded, Candidates, Levels, candidates_of
from planner.search.certificate import (
    BOUNDS,
    CHOSEN,
    COMMUNICATION,
    COMPUTATION,
    DOMINATED,
    MEMORY,
    NO_FASTER,
    OUT_OF_MEMORY,
    ROOM,
    RUNNERS_UP,
    SHARED,
    SLOWER,
    UNFINISHED,
    UNKEPT,
    Account,
    space_text,
)
from planner.search.finalists import finalists, simulated
from planner.search.layer_options import recomputes_of
from planner.search.layout_queue import Found, may_beat, ranking, wins
from planner.search.misses import all_refused, closest_miss, nothing_keeps, nothing_runs
from planner.search.ranked import proven, ranked
from planner.search.ranks import run_of
from planner.search.simulated_proof import USUAL, Effort, Told, prove
from planner.search.space import Family, complexity, kind
from planner.search.spaces.graph import search_graph
from planner.search.spaces.mixed import search_mixed
from planner.search.spaces.rounds import search_rounds, with_rounds
from planner.solver import sided
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Fathomed, Infeasible, Instance, Solution, Unfinished
from planner.tolerances import EQUAL

_AHEAD = 96
"""Families that are bounded at once."""
_OPENED = 12
"""Parts of families whose layouts are bounded at once."""

SOLVERS = ("exact", "ilp")
_Solved = Found[Solution]
Outcome = Solution | Infeasible | Fathomed | Unfinished
Solve = Callable[[Instance, float], Outcome]


@uncollected()
def search(
    request: Request,
    *,
    solver: str = "exact",
    top: int = 1,
    progress: Progress | None = None,
    rules: Rules | None = None,
    below_s: float = math.inf,
    known: Sequence[Candidates] = (),
    effort: Effort = USUAL,
    told: Told | None = None,
) -> Answer:
    """Return the fastest plan that fits, with its proof; NoPlanFits names the closest miss.

    Where none can take less than `below_s` in the closed form, NoneFaster ends the search early, on
    chains of like layers and devices.  `known` are those of an answer to the same request under
    other pins: what was worked out there is not worked out again.
    `top` plans are found if there are so many of different kinds (see planner.search.space.kind).
    `rules` say which layouts are refused, by default those of the request's stack.
    `effort` is what the proof in simulated time may take; `told` hears the gap that is left.
    """
    started = time.process_time()
    model, cluster, pins = request.model, request.cluster, request.pins
    _check_asked(request)
    if solver not in SOLVERS:
        raise DocumentError("solver", f"is '{solver}'; the solvers are {' and '.join(SOLVERS)}")
    if cluster.mixed:
        return search_mixed(request, solver=solver, top=top, progress=progress)
    first, *others_of = recomputes_of(model, request.space, pins.recompute)
    candidates = candidates_of(request, rules, first, known)
    if model.edges:
        return search_graph(candidates, solver=solver, top=top, progress=progress)
    unlike = run_of(model) is None and not pins.require and solver == "exact"
    unlike = unlike and request.stack.name == "native"
    if not candidates.families and unlike:
        return search_rounds(candidates, top=top, progress=progress)
    if not candidates.families:
        raise NoPlanFits(nothing_runs(request, candidates.refused))
    solve = _solver(solver, candidates.frontiers)
    hunt = _Hunt(candidates, solve, top=top, progress=progress, below_s=below_s)
    hunt.run()
    hunts = [hunt]
    for recompute in others_of:
        more = candidates_of(request, rules, recompute, known or (candidates,))
        hunts.append(hunts[-1].onward(more))
        hunts[-1].run()
    bests = hunts[-1].ranking()
    if below_s < math.inf and (not bests or bests[0].objective_s >= below_s):
        raise NoneFaster(f"no plan takes less than {below_s:g} s")
    if not bests and pins.require:
        raise NoPlanFits(nothing_keeps(request, all_refused(candidates)))
    if not bests:
        raise NoPlanFits(closest_miss(hunts[-1].candidates))

    every = [ranked(hunt.owner(best), best.layout, best.split) for best in bests]
    winner, closed_form = bests[0], every[0]
    candidates = hunt.owner(winner)
    hunt = next(one for one in hunts if one.candidates is candidates)
    proof = prove(
        [one.candidates for one in hunts],
        (candidates, closed_form),
        hunt.solve,
        closed_form_s=hunt.account.proven_s(winner.objective_s, winner.lower_bound_s),
        effort=effort,
        told=told,
    )
    order = finalists((candidates, closed_form), proof)
    chosen = order[0][1]
    others = [one for one in every if kind(one.plan.layout) != kind(chosen.plan.layout)]
    top_plans = (chosen, *others)[:top]
    certificate = hunt.account.certificate(
        objective_s=winner.objective_s,
        lower_bound_s=winner.lower_bound_s,
        optimal=winner.split.optimal,
        solver=solver,
    ).model_copy(
        update={
            "layout": winner.layout.text(),
            "simulated": simulated(order, closed_form, proof),
        }
    )
    answer = Answer(
        plan=chosen.plan,
        prediction=chosen.prediction,
        certificate=proven(certificate, chosen),
        search_s=time.process_time() - started,
        top=top_plans,
        finalists=tuple(one for _, one in order),
        closed_form=closed_form,
        solved=sum(one.solved for one in hunts),
        candidates=tuple(one.candidates for one in hunts),
    )
    if unlike:
        return with_rounds(answer, candidates, progress)
    return answer


def _check_asked(request: Request) -> None:
    """Refuse what is searched for our own runtime alone, and pins that the space does not have."""
    model, cluster, name = request.model, request.cluster, request.stack.name
    if name == "native":
        return
    a = model.architecture
    if a is None or a.patches or a.classes or model.edges:
        raise DocumentError(
            "backend", f"{name} trains language models; {model.name} is none: use native"
        )
    if cluster.mixed:
        raise DocumentError("cluster", f"has devices that differ; {name} takes one kind")
    each = outside(request.pins, request.space, cluster.groups[0].devices_per_node)
    for pin, there_is in each:
        raise DocumentError("fix", f"{pin}: {name} {there_is}")


_Coming = tuple[float, int, Family]
"""A family whose turn to be bounded may come, with its bound; the id tells equals apart."""


class _Entry(NamedTuple):
    """A family or a layout in the queue; complexity tells those of one step apart."""

    bound_s: float
    complexity: tuple[int, ...]
    known: int
    """Index of the last of BOUNDS that is worked out."""
    item: Family | Layout

    @property
    def first(self) -> Layout:
        """The layout, or the simplest one of the family."""
        return _first(self.item)


class _Hunt:
    """One run over the candidates: the queue, the best of each kind, the account."""

    def __init__(
        self,
        candidates: Candidates,
        solve: Solve,
        *,
        top: int,
        progress: Progress | None,
        below_s: float = math.inf,
    ) -> None:
        self.account = Account(backend=candidates.stack.name, space=space_text(candidates.stack))
        self.solved = 0
        self.solve = solve
        self.candidates = self._candidates = candidates
        self._top = top
        self._below_s = below_s
        self._progress = progress
        self._bests: dict[tuple[int, ...], _Solved] = {}
        self._owners: dict[int, Candidates] = {}
        """By the id of a solution, whose it is."""
        for reason, count in candidates.refused.items():
            self.account.refused(reason, count)
        self._queue: list[_Entry] = []
        bounds_s = candidates.computation_s().tolist()
        self._waiting = sorted(((s, index) for index, s in enumerate(bounds_s)), reverse=True)
        """Families of which only the first bound is known, with their index; the lowest is last."""
        self._undivided: list[_Coming] = []
        self._unopened: list[_Coming] = []
        """Of the queue, families that may be bounded within memory next, and parts to be opened."""

    def onward(self, candidates: Candidates) -> _Hunt:
        """Return the search over other candidates, which have to beat what was found."""
        found = _Hunt(
            candidates,
            self.solve,
            top=self._top,
            progress=self._progress,
            below_s=self._below_s,
        )
        counts = found.account.counts
        for outcome, count in counts.items():
            self.account.counts[outcome] = self.account.counts.get(outcome, 0) + count
        found.account, found._bests, found._owners = self.account, self._bests, self._owners
        return found

    def owner(self, found: _Solved) -> Candidates:
        """Return the candidates that a configuration is of."""
        return self._owners[id(found)]

    def run(self) -> None:
        """Look at all candidates, as far as needed."""
        while (entry := self._next()) is not None:
            if self._settled(entry.bound_s) or entry.bound_s >= self._below_s:
                heapq.heappush(self._queue, entry)
                break
            self._advance(entry)
            if self._progress:
                self._progress(len(self._candidates.looked_at), len(self._candidates.families))
        for _ in range(RUNNERS_UP):
            if (entry := self._next()) is not None:
                self._outbounded(entry)
        for entry in self._queue:
            self._outbounded(entry, listed=False)
        families = self._candidates.families
        self.account.counts[BOUNDS[COMPUTATION]] += sum(families[i].size for _, i in self._waiting)

    def _next(self) -> _Entry | None:
        """Take the entry with the lowest bound, the simplest of equals."""
        while self._waiting:
            bound_s, index = self._waiting[-1]
            if self._queue and self._queue[0].bound_s < bound_s:
                break
            self._waiting.pop()
            self._push(bound_s, COMPUTATION, self._candidates.families[index])
        return heapq.heappop(self._queue) if self._queue else None

    def _advance(self, entry: _Entry) -> None:
        """Bring one entry a step further: a better bound, its layouts, or its solution."""
        item, bound_s = entry.item, entry.bound_s
        rival = self._rival(entry.first)
        if rival is not None and not may_beat(bound_s, complexity(entry.first), rival):
            self._outbounded(entry)
        elif isinstance(item, Layout) and entry.known == MEMORY:
            self._try(item, bound_s, rival)
        else:
            self._deepen(entry)

    def _deepen(self, entry: _Entry) -> None:
        """Work out a better bound, or put the layouts of a family in its place."""
        item, bound_s = entry.item, entry.bound_s
        if isinstance(item, Family):
            if entry.known == COMPUTATION:
                self._divide(bound_s, item)
            elif entry.known == ROOM:
                better_s = float(self._candidates.shared_s(item).min())
                self._push(max(bound_s, better_s), SHARED, item)
            else:
                for layout, better_s in self._layouts(item):
                    self._enlist(max(bound_s, better_s), layout)
        elif entry.known == SHARED:
            better_s = max(bound_s, self._candidates.communication_s(item))
            self._push(better_s, COMMUNICATION, item)
        elif self._candidates.dominator(item) is not None:
            self.account.lost(DOMINATED, item)
        else:
            self._push(max(bound_s, self._candidates.memory_s(item)), MEMORY, item)

    def _divide(self, bound_s: float, family: Family) -> None:
        """Put the parts of a family in its place.

        There is one for each saving, then for each ZeRO level and timetable.
        """
        if len(family.savings) > 1:
            saved_s = self._candidates.savings_s(family)
            for part_s, part in zip(saved_s, family.by_saving(), strict=True):
                self._push(max(bound_s, part_s), COMPUTATION, part)
            return
        for part, room_s in self._candidates.parts(family, self._levels(family)):
            if math.isinf(room_s):
                self.account.counts[OUT_OF_MEMORY] += part.size
            else:
                self._push(max(bound_s, room_s), ROOM, part)

    def _levels(self, family: Family) -> Levels:
        """Return a family's bounds within memory; those that come next are worked out with it."""
        looked_at = self._candidates.looked_at
        if id(family) not in looked_at:
            every, lowest = self._candidates.families, self._waiting[: -_AHEAD - 1 : -1]
            waiting = (every[index] for _, index in lowest)
            ahead = [
                f for f in (*_first_of(self._undivided, _AHEAD), *waiting) if len(f.savings) == 1
            ]
            some = [family, *(f for f in ahead if id(f) not in looked_at)][:_AHEAD]
            for one, levels in zip(some, self._candidates.rooms_s(some), strict=True):
                looked_at[id(one)] = one, levels
        return looked_at[id(family)][1]

    def _layouts(self, part: Family) -> Bounded:
        """Return a part's layouts with their bounds; those of the next parts are worked out too."""
        opened = self._candidates.opened
        if id(part) not in opened:
            ahead = _first_of(self._unopened, _OPENED)
            coming = (one for one in ahead if one is not part and id(one) not in opened)
            some = [part, *coming]
            for one, bounded in zip(some, self._candidates.shared_rooms_s(some), strict=True):
                opened[id(one)] = one, bounded
        return opened[id(part)][1]

    def _enlist(self, bound_s: float, layout: Layout) -> None:
        """Let a layout of a family stand for itself."""
        if self._candidates.refusal(layout) is not None:
            self.account.refused(self._candidates.refusal(layout) or "")
        elif self._candidates.repeats(layout):
            self.account.lost(DOMINATED, layout)
        else:
            self._push(bound_s, SHARED, layout)

    def _push(self, bound_s: float, known: int, item: Family | Layout) -> None:
        """Put an item in the queue; what cannot fit goes to the account."""
        if math.isinf(bound_s):
            self.account.lost(OUT_OF_MEMORY, _first(item), count=_size(item))
            return
        entry = _Entry(bound_s, complexity(_first(item)), known, item)
        heapq.heappush(self._queue, entry)
        if isinstance(item, Family) and known != ROOM:
            coming = self._undivided if known == COMPUTATION else self._unopened
            heapq.heappush(coming, (bound_s, id(item), item))

    def _try(self, layout: Layout, bound_s: float, rival: _Solved | None) -> None:
        """Solve a configuration; it has to beat its rival."""
        step_s = self._candidates.costs(layout).step_s
        cutoff_s = self._below_s - step_s
        if rival is not None:
            simpler = complexity(layout) < complexity(rival.layout)
            hair = EQUAL if simpler else -EQUAL
            cutoff_s = min(cutoff_s, rival.objective_s * (1 + hair) - step_s)
        self.solved += 1
        found = self.solve(self._candidates.instance(layout), cutoff_s)
        if isinstance(found, Infeasible):
            required = bool(self._candidates.pins.require)
            self.account.lost(UNKEPT if required else OUT_OF_MEMORY, layout)
        elif isinstance(found, Fathomed) and found.lower_bound_s >= cutoff_s:
            bound_s = max(bound_s, found.lower_bound_s + step_s)
            self.account.lost(NO_FASTER, layout, bound_s=bound_s)
        elif isinstance(found, (Fathomed, Unfinished)):
            bound_s = max(bound_s, found.lower_bound_s + step_s)
            self.account.lost(UNFINISHED, layout, bound_s=bound_s)
        else:
            if not found.optimal:
                self.account.unfinished_s.append(found.lower_bound_s + step_s)
            proven_s = found.lower_bound_s + step_s
            self._enter(Found(found.objective_s + step_s, proven_s, layout, found))

    def _enter(self, new: _Solved) -> None:
        """Let a solved configuration stand for its kind if it is the best of it."""
        self._owners[id(new)] = self._candidates
        old = self._bests.get(kind(new.layout))
        if old is None or wins(new, old):
            self._bests[kind(new.layout)] = new
            new, old = old or new, new
            if new is old:
                return
        self.account.lost(SLOWER, new.layout, objective_s=new.objective_s)

    def _outbounded(self, entry: _Entry, *, listed: bool = True) -> None:
        outcome = BOUNDS[entry.known]
        self.account.lost(
            outcome,
            entry.first,
            bound_s=entry.bound_s if listed else None,
            because=f"not solved, {outcome}",
            count=_size(entry.item),
        )

    def _rival(self, layout: Layout) -> _Solved | None:
        """Return the best that a configuration has to beat to be among the `top`, if any."""
        own = self._bests.get(kind(layout))
        bests = self.ranking_all()
        worst = bests[self._top - 1] if len(bests) >= self._top else None
        if own is None or worst is None:
            return own or worst
        return own if wins(own, worst) else worst

    def _settled(self, bound_s: float) -> bool:
        """Whether no configuration with at least this bound can enter the ranking."""
        bests = self.ranking_all()
        if len(bests) < self._top:
            return False
        return bound_s > bests[self._top - 1].objective_s * (1 + EQUAL)

    def ranking_all(self) -> list[_Solved]:
        """Return the best of each kind, fastest first."""
        return sorted(self._bests.values(), key=lambda best: best.rank)

    def ranking(self) -> list[_Solved]:
        """Return the best of each kind, fastest first; losers go to the account."""
        bests = self.ranking_all()
        order = [bests[at] for at in ranking(bests)]
        if order:
            self.account.counts[CHOSEN] = 1
        for best in order[1:]:
            self.account.lost(SLOWER, best.layout, objective_s=best.objective_s)
        return order[: self._top]


def _first_of(coming: list[_Coming], most: int) -> list[Family]:
    """Take the first few families from a queue of such."""
    return [heapq.heappop(coming)[-1] for _ in range(min(most, len(coming)))]


def _first(item: Family | Layout) -> Layout:
    return item.first if isinstance(item, Family) else item


def _size(item: Family | Layout) -> int:
    return item.size if isinstance(item, Family) else 1


def _solver(name: str, frontiers: FrontierStore) -> Solve:
    """Return the function that solves a partition problem below a cutoff."""

    def exactly(instance: Instance, cutoff_s: float) -> Outcome:
        return sided.solve(
            instance, cutoff_s=cutoff_s, frontiers=frontiers, time_limit_s=TIES_LIMIT_S
        )

    def by_program(instance: Instance, _: float) -> Outcome:
        from planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

        return ilp.solve(instance)

    return by_program if name == "ilp" else exactly
