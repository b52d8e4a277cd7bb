"""The search: every space of a request gone through best bound first, with one proof.

Objective, the closed form that the certificate speaks of:

    T = steady max_r t_r + sum_r (fill t_r - credit_r) + max_r sync_r + step_s,   mem_r <= capacity

with t_r the seconds of rank r on one micro-batch, and steady, fill and credit those of the
schedule (planner.search.formulation).  What spaces there are depends on the request: chains of
layers and graphs, devices that are alike or differ (planner.search.spaces); all wait in one queue
(planner.search.layout_queue).  Where all blocks of a framework's plans recompute alike there is a
space for each choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from planner.costs.figure_store import FigureStore
from planner.errors import DocumentError, NoneFaster, NoPlanFits
from planner.process.collector import uncollected
from planner.requests.pins import outside
from planner.requests.request import Request
from planner.schedules import SCHEDULES, schedule_of
from planner.search.answer import Answer, Progress
from planner.search.candidates import Candidates, candidates_of
from planner.search.certificate import Account, space_text
from planner.search.finalists import (
    MARGIN,
    MOST_ALONE,
    MOST_SOLVED,
    fastest_first,
    finalists,
    finalists_mixed,
    simulated,
    told,
)
from planner.search.layer_options import recomputes_of
from planner.search.layout_queue import Found, Queue, Space
from planner.search.misses import why_nothing
from planner.search.ranked import Ranked, proven
from planner.search.ranks import run_of
from planner.search.simulated_proof import USUAL, Effort, Told, prove
from planner.search.space import kind
from planner.search.spaces import graph, mixed
from planner.search.spaces.chain import ChainSpace
from planner.search.spaces.mixed_proof import prove_spaces
from planner.solver.graphs.lattice import GraphEffort
from planner.stacks.native import Rules

SOLVERS = ("exact", "ilp")


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
    store: FigureStore | None = None,
) -> Answer:
    """Return the fastest plan that fits, with its proof; NoPlanFits names the closest miss.

    Where none can take less than `below_s` in the closed form, NoneFaster ends the search early.
    `known` are those of an answer to the same request under other pins: what was worked out there
    is not worked out again.
    `top` plans are found if there are so many of different kinds (see planner.search.space.kind).
    `rules` say which layouts are refused, by default those of the request's stack.
    `store` has what layers take on other clusters, and gets what is worked out here.
    `effort` is what the proof in simulated time may take; `told` hears the gap that is left.
    """
    started = time.process_time()
    _check_asked(request, solver)
    account = Account(backend=request.stack.name, space=space_text(request.stack))
    queue = Queue(account, top=top, below_s=below_s, progress=progress)
    for space in spaces_of(request, solver, rules, known, store):
        queue.run(space)
    bests = queue.ranking()
    if not bests and below_s < math.inf:
        raise NoneFaster(f"no plan takes less than {below_s:g} s")
    if not bests:
        build = partial(spaces_of, rules=rules, store=store, effort=graph.any_split())
        raise NoPlanFits(why_nothing(request, queue, build))

    every = [queue.home(best).ranked(best) for best in bests]
    order, said = _finalists(request, queue, (bests[0], every[0]), effort, told)
    certificate = account.certificate(
        objective_s=bests[0].objective_s,
        lower_bound_s=bests[0].lower_bound_s,
        optimal=bests[0].split.optimal,
        solver=solver,
    ).model_copy(update={"layout": every[0].plan.layout.text(), "simulated": said})
    chosen = order[0]
    others = [one for one in every if kind(one.plan.layout) != kind(chosen.plan.layout)]
    return Answer(
        plan=chosen.plan,
        prediction=chosen.prediction,
        certificate=proven(certificate, chosen),
        search_s=time.process_time() - started,
        top=(chosen, *others)[:top],
        finalists=tuple(order),
        closed_form=every[0],
        solved=queue.solved,
        candidates=tuple(one.candidates for one in _chains(queue)),
    )


def _chains(queue: Queue) -> list[ChainSpace]:
    """Return the chains that were gone through."""
    return [space for space in queue.spaces if isinstance(space, ChainSpace)]


def _check_asked(request: Request, solver: str) -> None:
    """Refuse what is searched for our own runtime alone, and pins that the space does not have."""
    if solver not in SOLVERS:
        raise DocumentError("solver", f"is '{solver}'; the solvers are {' and '.join(SOLVERS)}")
    model, cluster, name = request.model, request.cluster, request.stack.name
    stages, schedule = request.pins.virtual_stages or 1, request.pins.schedule
    several = schedule is not None and schedule_of(schedule).several_stages
    if (stages > 1 or several) and (model.edges or run_of(model) is None):
        asked = f"schedule={schedule}" if several else f"v={stages}"
        single = ", ".join(name for name, one in SCHEDULES.items() if not one.several_stages)
        raise DocumentError(
            "fix",
            f"{asked}: {model.name} gets one stage a rank; several share a long run of like "
            f"layers, which it does not have. Leave it out, or ask for one of {single}",
        )
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


def spaces_of(
    request: Request,
    solver: str = "exact",
    rules: Rules | None = None,
    known: Sequence[Candidates] = (),
    store: FigureStore | None = None,
    effort: GraphEffort | None = None,
) -> Iterator[Space[Any]]:
    """Yield the spaces of a request in the order in which they are looked at.

    An `effort` is what graphs of several requests share, of which any split will do.
    """
    by_program = solver == "ilp"
    if request.cluster.mixed:
        yield from mixed.spaces_of(request, by_program=by_program)
        return
    for recompute in recomputes_of(request.model, request.space, request.pins.recompute):
        candidates = candidates_of(request, rules, recompute, known, store)
        if request.model.edges:
            yield graph.GraphSpace(candidates, by_program=by_program, effort=effort)
            return
        yield ChainSpace(candidates, by_program=by_program)
        known = known or (candidates,)


Finals = tuple[list[Ranked], Any]


def _finalists(
    request: Request,
    queue: Queue,
    optimum: tuple[Found[Any], Ranked],
    effort: Effort,
    heard: Told | None,
) -> Finals:
    """Return the plans that were simulated, the fastest first, and what is proven of that time.

    `optimum` is that of the closed form, with its plan.
    """
    winner, closed_form = optimum
    if _chains(queue):
        return _proven_finalists(queue, winner, closed_form, effort, heard)
    order, said = _near_finalists(queue, winner, closed_form)
    if request.pins.require:
        return order, said
    proven_s = queue.account.proven_s(winner.objective_s, winner.lower_bound_s)
    proof = prove_spaces(queue.spaces, order[0], effort, proven_s)
    return finalists_mixed(
        [*order, *proof.found], closed_form, proof.lower_bound_s, proof.looked_at
    )


def _proven_finalists(
    queue: Queue,
    winner: Found[Any],
    closed_form: Ranked,
    effort: Effort,
    heard: Told | None,
) -> Finals:
    """Return what a proof in simulated time came across, the fastest first, and what it says."""
    chains = _chains(queue)
    home = next(one for one in chains if one is queue.home(winner))
    proof = prove(
        [one.candidates for one in chains],
        (home.candidates, closed_form),
        home.solver,
        closed_form_s=queue.account.proven_s(winner.objective_s, winner.lower_bound_s),
        effort=effort,
        told=heard,
    )
    order = finalists((home.candidates, closed_form), proof)
    said = simulated(order, closed_form, proof)
    return [one for _, one in order], said


def _near_finalists(queue: Queue, winner: Found[Any], best: Ranked) -> Finals:
    """Return the plans near the best one in the closed form, the fastest simulated first.

    Where that one simulates slower, whatever the closed form has faster than that is near.
    """
    limit_s = max(winner.objective_s * (1 + MARGIN), best.prediction.step_time_s)
    home = queue.home(winner)
    near = [
        (space, one)
        for space, one in queue.near(limit_s, MOST_ALONE)
        if one.layout != winner.layout or space is not home
    ]
    every = [(home, best), *((space, space.ranked(one)) for space, one in near[:MOST_SOLVED])]
    order = [one for _, one in fastest_first(every, best)]
    return order, told(order, best)
