"""The search: all layouts of a request through one queue, with one proof in simulated seconds.

What spaces there are depends on the request: chains of layers and graphs, devices that are alike or
differ (planner.search.spaces).  Their layouts wait in a queue (planner.search.queue) that is gone
through twice: for the least closed form, which is cheap and near the fastest plan, then by lower
bounds of the simulated step, until none is below the fastest plan that was simulated or the effort
is spent (planner.search.goals).  Where all blocks of a framework's plans recompute alike there is a
space for each choice.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.prediction import Certificate, Finalist, Loser
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.errors import DocumentError, NoneFaster, NoPlanFits
from meshwright.planner.requests.pins import outside
from meshwright.planner.schedules import SCHEDULES, schedule_of
from meshwright.planner.search.answer import TIES_NODES, Answer, Progress
from meshwright.planner.search.bounds.layout_bounds import Candidates, candidates_of
from meshwright.planner.search.goals import ClosedFormGoal, NearOptimumGoal, SimulatedStepGoal
from meshwright.planner.search.infeasibility import why_nothing
from meshwright.planner.search.partition.layer_options import recomputes_of
from meshwright.planner.search.partition.stage_counts import run_of
from meshwright.planner.search.plan_candidate import Ranked, proven
from meshwright.planner.search.proof_account import (
    LEFT,
    RUNNERS_UP,
    PruningStatistics,
    certificate_of,
)
from meshwright.planner.search.proof_budget import USUAL, Effort, GapProgress, graph_effort
from meshwright.planner.search.queue import Queue, SearchSpace
from meshwright.planner.search.space import Degrees, complexity, kind
from meshwright.planner.search.spaces import simulated_chain
from meshwright.planner.search.spaces.chain import ChainSpace
from meshwright.planner.search.spaces.simulated_chain import SimulatedChain, Spent
from meshwright.planner.system.gc_pause import pause_collector

if TYPE_CHECKING:
    from meshwright.planner.costs.cost_cache import FigureStore
    from meshwright.planner.frameworks.native_limits import Rules
    from meshwright.planner.requests.request import Request
    from meshwright.planner.solver.graph_instance import GraphEffort

MARGIN = 0.03
"""Relative distance from the optimum of the closed form within which plans of graphs, and of
devices that differ, are simulated too."""
MOST_ALONE = 3
"""Partition problems of each space, among these, that are solved beside the optimum's."""
MOST_LISTED = 8
"""Plans that were simulated and are listed."""
TRIED_NODES = 200
"""Nodes of the integer program of one layout's hosts where any split of a graph will do."""
SOLVERS = ("exact", "ilp")


@pause_collector()
def search(
    request: Request,
    *,
    solver: str = "exact",
    top: int = 1,
    progress: Progress | None = None,
    rules: Rules | None = None,
    below_s: float = math.inf,
    candidates: Sequence[Candidates] = (),
    effort: Effort = USUAL,
    gap_progress: GapProgress | None = None,
    store: FigureStore | None = None,
    faster_than: Ranked | None = None,
    fewest_groups: int = 1,
) -> Answer:
    """Return the fastest plan that fits, with its proof; NoPlanFits names the closest miss.

    The mathematical program, over layouts L of the request's space and their stages:

        minimise    T(L, x)                         simulated seconds of a step
        subject to  sum_s x[l, s] = 1               each layer sits in one stage
                    sum_s s x[l, s] <= sum_s s x[l+1, s]    stages are in order (chains)
                    M_r(L, x) <= capacity_r         peak bytes of each rank r
                    H_h(L, x) <= memory_h           bytes on each host h
                    Rules(L) accepts                the framework executes L

    T is simulated by `planner.costs.predict.predict`; `solve_chain` minimises its closed form
    exactly.  Lower bounds prune, each on what the one before has left, cheapest first:

        compute of a family                 FamilyBounds.computation_s
        compute within memory, families     FamilyBounds.rooms_s, shared_rooms_s
        paths through whole layers, families    whole_layer_paths.paths_s
        communication of one layout         Candidates.communication_s
        both within memory, one layout      Candidates.memory_s
        dominance by another layout         Candidates.dominator
        simulated step, one layout          SimulatedCandidates.memory_s, within_memory_s
        simulated step, all its cuts        ColumnProgram.cut_s, whole_s, optimum

    The search stops when the lowest bound cannot beat the incumbent, or its effort is spent; the
    certificate has the lowest bound that is left.

    Parameters
    ----------
    below_s
        Where no plan takes less in the closed form, NoneFaster ends the search early.
    candidates
        Those of an answer to the same request under other pins: nothing is worked out twice.
    top
        Plans of different kinds to return, if there are as many (`planner.search.space.kind`).
    rules
        Which layouts are refused, by default those of the request's framework.
    store
        What layers take on other clusters; it gets what is worked out here.
    effort, gap_progress
        What the proof may take; who hears the gap that is left.
    faster_than
        Nothing is simulated that cannot be faster than this plan of another part of the cluster.
    fewest_groups
        Of devices that differ; plans on fewer groups are those of another part of the cluster.
    """
    started = time.process_time()
    check_request(request, solver)
    goal = ClosedFormGoal(top=top, below_s=below_s)
    queue = Queue(goal, progress=progress)
    spaces: list[Any] = []
    for space in spaces_of(
        request,
        solver,
        rules,
        candidates,
        store,
        fewest_groups=fewest_groups,
        likely=top == 1,
        unlike=solver == "exact",
    ):
        spaces.append(space)
        if space.only_simulated and goal.found:
            continue
        queue.run(space)
        for solution in getattr(space, "first", ()):
            goal.offer(space, solution)
    bests = goal.ranking()
    if not bests and below_s < math.inf:
        raise NoneFaster(f"no plan takes less than {below_s:g} s")
    if not bests:
        raise no_plan(request, queue.misses, rules, store)

    every = [goal.home(best).candidate_of(best) for best in bests]
    chained = all(isinstance(space, ChainSpace) for space in spaces)
    start = every[:1] if chained else _plans_near_optimum(queue, goal, every[0])
    proof = _prove(request, spaces, goal, start, effort, gap_progress, faster_than)
    order = proof.finalists()
    chosen = order[0]
    others = [
        candidate for candidate in every if kind(candidate.plan.layout) != kind(chosen.plan.layout)
    ]
    others.sort(key=lambda one: one.prediction.step_time_s)
    return Answer(
        plan=chosen.plan,
        prediction=chosen.prediction,
        certificate=proven(proof.certificate(solver), chosen),
        search_s=time.process_time() - started,
        top=(chosen, *others)[:top],
        finalists=tuple(order),
        closed_form=every[0],
        closed_form_bound_s=min(goal.bound_s(), *(space.passed_over_s for space in spaces)),
        solved=goal.solved,
        candidates=tuple(space.candidates for space in spaces if isinstance(space, ChainSpace)),
    )


def no_plan(
    request: Request,
    misses: Sequence[str] = (),
    rules: Rules | None = None,
    store: FigureStore | None = None,
) -> NoPlanFits:
    """Return the error that says why nothing fits; `misses` are reasons of single layouts."""
    build = partial(spaces_of, rules=rules, store=store, effort=graph_effort(0, 0))
    return NoPlanFits(why_nothing(request, misses, build))


class _Proof:
    """Plans that were simulated, and the least seconds that any plan simulates."""

    def __init__(
        self, request: Request, goal: SimulatedStepGoal, queue: Queue, start: Sequence[Ranked]
    ) -> None:
        """`start` are the plans of the closed form, its optimum first."""
        self._request, self._goal, self._queue = request, goal, queue
        self._optimum = start[0]
        self._plans: list[tuple[Any, Ranked]] = [(None, candidate) for candidate in start]
        self.looked_at: Counter[str] = Counter()
        self.unlike = 0
        """Configurations whose pipelines differ from one group of devices to another."""

    def finalists(self) -> list[Ranked]:
        """Return the fastest plan of each layout that was simulated, fastest first.

        Of plans equally fast the optimum of the closed form comes first, then the simplest.
        """
        return [candidate for _, candidate in self._list_finalists()]

    def _list_finalists(self) -> list[tuple[str, Ranked]]:
        """Return the finalists, each with what its blocks recompute if all must do the same."""
        fitting = [
            (space, candidate)
            for space, candidate in (*self._plans, *self._goal.found)
            if candidate is self._optimum or candidate.prediction.fits
        ]
        least_s = min(candidate.prediction.step_time_s for _, candidate in fitting)
        kept: dict[tuple[str, str], Ranked] = {}
        for space, candidate in sorted(
            fitting,
            key=lambda one: (
                # What is within the tie of the fastest counts as equal to it.
                max(one[1].prediction.step_time_s, least_s * (1 + EQUAL)),
                one[1] is not self._optimum,
                complexity(one[1].plan.layout),
            ),
        ):
            kept.setdefault((_recompute(space), candidate.plan.layout.text()), candidate)
        order = [(beside, candidate) for (beside, _), candidate in kept.items()]
        return [
            entry for at, entry in enumerate(order) if at < MOST_LISTED or entry[1] is self._optimum
        ]

    def certificate(self, solver: str) -> Certificate:
        """Return what is proven of all configurations."""
        account, goal = self._queue.account, self._goal
        runners_up: list[Loser] = []
        lower_bound_s = goal.step_s
        lowest = self._queue.lowest()
        if lowest is not None:
            lower_bound_s = min(lower_bound_s, lowest.bound_s)
        for entry in self._queue.rest():
            outcome = entry.space.levels[entry.level] if goal.exceeds(entry.bound_s) else LEFT
            account.count_settled(outcome, entry.size)
            if len(runners_up) < RUNNERS_UP:
                loser = Loser(
                    layout=entry.layout.text_with(self._request.framework.name),
                    lower_bound_s=entry.bound_s,
                    reason=outcome,
                )
                runners_up.append(loser)
        finalists = [
            Finalist(
                layout=_text_with(candidate.prediction.layout, beside),
                closed_form_s=candidate.objective_s,
                step_time_s=candidate.prediction.step_time_s,
            )
            for beside, candidate in self._list_finalists()
        ]
        return certificate_of(
            account,
            self._request.framework,
            solver=solver,
            finalists=finalists,
            lower_bound_s=lower_bound_s,
            looked_at=self.looked_at,
            runners_up=runners_up,
            unlike=self.unlike,
        )


def _prove(
    request: Request,
    spaces: Sequence[Any],
    closed_form: ClosedFormGoal,
    start: Sequence[Ranked],
    effort: Effort,
    gap_progress: GapProgress | None,
    faster_than: Ranked | None,
) -> _Proof:
    """Bound the simulated steps of all layouts, beginning with some plans, the fastest first."""
    others = () if faster_than is None else (faster_than,)
    goal = SimulatedStepGoal(_fastest((*start, *others)), effort, gap_progress)
    queue = Queue(goal, account=PruningStatistics(framework=request.framework.name))
    proof = _Proof(request, goal, queue, start)
    bound_s = closed_form.bound_s()
    if all(isinstance(space, ChainSpace) for space in spaces):
        spent = Spent()
        chains = [SimulatedChain(space, goal, spent, bound_s) for space in spaces]
        home = closed_form.home(closed_form.ranking()[0])
        owner = next(chain for chain in chains if chain.closed_form is home)
        simulated_chain.look_near(chains, owner, start[0])
        queue.run(*chains)
        proof.looked_at.update(spent.looked_at())
        return proof
    from meshwright.planner.search.spaces import simulations  # noqa: PLC0415 - chains need none of it

    every = simulations.simulated_spaces(spaces, goal, bound_s)
    simulations.look_near(every, goal, start)
    for plan in every:
        queue.run(plan)
        proof.looked_at.update(plan.tried.looked_at)
        proof.unlike += plan.unlike
    return proof


def _plans_near_optimum(queue: Queue, closed_form: ClosedFormGoal, best: Ranked) -> list[Ranked]:
    """Return the optimum of the closed form with the plans near it.

    Where that one simulates slower, whatever the closed form has faster than that is near, and so
    is the best plan of each mesh: which one is the fastest the closed form only suggests.
    """
    [winner, *_] = closed_form.ranking()
    limit_s = max(winner.objective_s * (1 + MARGIN), best.prediction.step_time_s)
    goal = queue.goal = NearOptimumGoal(closed_form, limit_s, MOST_ALONE)
    queue.run()
    home = closed_form.home(winner)
    others = [
        (space, split)
        for space, split in goal.found
        if split.layout != winner.layout or space is not home
    ]
    others.sort(key=lambda one: one[1].rank)
    near = others[:MOST_LISTED]
    near += [split for split in closed_form.best_of_meshes()[1:MOST_LISTED] if split not in near]
    return [best, *(space.candidate_of(split) for space, split in near)]


def _fastest(plans: Iterable[Ranked]) -> Ranked:
    return min(plans, key=lambda one: one.prediction.step_time_s)


def _recompute(space: Any) -> str:
    """Say what blocks recompute, where all must do the same and there is a choice."""
    candidates = getattr(space, "candidates", None)
    if not isinstance(candidates, Candidates) or candidates.pins.recompute:
        return ""
    if not isinstance(candidates.recompute, Mapping):
        return ""
    choices = {
        choice for choices_of_kind in candidates.recompute.values() for choice in choices_of_kind
    } - {"none"}
    return f" recompute={'|'.join(sorted(choices)) or 'none'}"


def _text_with(layout: str, beside: str) -> str:
    """Return a layout's text with what its blocks recompute, where that is not in it.

    >>> _text_with("tp=1 recompute=full", " recompute=full"), _text_with("tp=1", " recompute=none")
    ('tp=1 recompute=full', 'tp=1 recompute=none')
    """
    return layout if " recompute=" in layout else layout + beside


def check_request(request: Request, solver: str) -> None:
    """Refuse what is searched for our own runtime alone, and pins that the space does not have."""
    if solver not in SOLVERS:
        raise DocumentError("solver", f"is '{solver}'; the solvers are {' and '.join(SOLVERS)}")
    model, cluster, name = request.model, request.cluster, request.framework.name
    stages, schedule = request.pins.virtual_stages or 1, request.pins.schedule
    several = schedule is not None and schedule_of(schedule).several_stages
    if (stages > 1 or several) and (model.edges or run_of(model) is None):
        asked = f"schedule={schedule}" if several else f"v={stages}"
        single = ", ".join(
            name for name, schedule in SCHEDULES.items() if not schedule.several_stages
        )
        raise DocumentError(
            "fix",
            f"{asked}: {model.name} gets one stage a rank; several share a long run of like "
            f"layers, which it does not have. Leave it out, or ask for one of {single}",
        )
    if request.pins.pipelines == "unlike" and not cluster.is_mixed:
        raise DocumentError(
            "fix",
            "pipelines=unlike: pipelines differ from one group of devices to another, and those of "
            f"{request.cluster_name} are all alike; leave it out",
        )
    if base_of(name) == "native":
        return
    a = model.architecture
    if a is None or a.patches or a.classes or model.edges:
        raise DocumentError(
            "framework", f"{name} trains language models; {model.name} is none: use native"
        )
    if cluster.is_mixed:
        raise DocumentError("cluster", f"has devices that differ; {name} takes one kind")
    unkept = outside(request.pins, request.space, cluster.groups[0].devices_per_node)
    for pin, there_is in unkept:
        raise DocumentError("fix", f"{pin}: {name} {there_is}")


def spaces_of(
    request: Request,
    solver: str = "exact",
    rules: Rules | None = None,
    candidates_before: Sequence[Candidates] = (),
    store: FigureStore | None = None,
    effort: GraphEffort | None = None,
    degrees: Sequence[Degrees] | None = None,
    fewest_groups: int = 1,
    likely: bool = False,
    unlike: bool = False,
) -> Iterator[SearchSpace]:
    """Yield the spaces of a request in the order in which they are looked at.

    An `effort` is what graphs of several requests share, of which any split will do; `degrees` are
    those that are of interest where devices are alike, by default all.  With `likely` those are
    left out of many that cannot be the fastest, and with `unlike` there are pipelines that differ
    from one group of devices to another.
    """
    by_program = solver == "ilp"
    if request.pins.pipelines == "unlike" and not request.cluster.is_mixed:
        return
    if request.cluster.is_mixed:
        yield from _of_groups(
            request, fewest_groups, by_program=by_program, likely=likely, unlike=unlike
        )
        return
    for recompute in recomputes_of(request.model, request.space, request.pins.recompute):
        candidates = candidates_of(request, rules, recompute, candidates_before, store, degrees)
        if request.model.edges:
            from meshwright.planner.search.spaces.mixed import GraphSpace  # noqa: PLC0415 - chains need none

            # Which of their splits fits need not be proven where any will do.
            most_nodes = TIES_NODES if effort is None else TRIED_NODES
            effort = effort or graph_effort()
            yield GraphSpace(
                candidates, by_program=by_program, effort=effort, most_nodes=most_nodes
            )
            return
        yield ChainSpace(candidates, by_program=by_program)
        candidates_before = candidates_before or (candidates,)


def _of_groups(
    request: Request, fewest: int, *, by_program: bool, likely: bool, unlike: bool
) -> Iterator[SearchSpace]:
    """Yield the layouts of every set of at least the `fewest` groups, the largest first.

    Shares are soon solved, and what they reach need not be looked for along a pipeline.
    """
    # What devices that are alike need none of.
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates  # noqa: PLC0415
    from meshwright.planner.search.spaces.mixed import FirstStep, GraphSpace, MixedSpace  # noqa: PLC0415
    from meshwright.planner.search.spaces.shares import ShareSpace  # noqa: PLC0415
    from meshwright.planner.search.spaces.unlike_pipelines import UnlikeSpace  # noqa: PLC0415

    cluster, first = request.cluster, FirstStep() if likely and not by_program else None
    for count in range(len(cluster.groups), fewest - 1, -1):
        for groups in itertools.combinations(cluster.groups, count):
            candidates = GroupCandidates(request.on_groups(groups), cluster)
            if request.pins.pipelines == "unlike":
                if unlike and candidates.cluster.is_mixed:
                    yield UnlikeSpace(candidates)
                continue
            # A requirement speaks of the stages of a pipeline.
            if candidates.cluster.is_mixed and not request.pins.require:
                yield ShareSpace(candidates)
            along = GraphSpace if request.model.edges else MixedSpace
            yield along(candidates, by_program=by_program, likely=first)
            if unlike and candidates.cluster.is_mixed:
                yield UnlikeSpace(candidates)
