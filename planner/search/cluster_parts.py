"""Idle devices: no answer is slower than that of any part of the cluster.

Parts have some nodes, and some devices of each.  One number of devices may divide a batch, layers
or heads where another does not, and links between nodes may cost more than the nodes bring.  Parts
are looked at in the order of a bound that depends on their number of devices alone
(planner.search.bounds.device_counts), the whole cluster among them: once a plan is known, most fall
to that.  What is left falls to the bounds of its configurations, or is searched like the whole.

Devices of a CPU are processes, of which the user says how many there are; of devices that differ
whole groups may stay idle (planner.search.search).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from meshwright.planner.catalog.expressions import part_name
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.documents.units import count_text, seconds_text
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer, Progress
from meshwright.planner.search.bounds.degree_bounds import DegreeBounds
from meshwright.planner.search.bounds.device_counts import LeastSteps
from meshwright.planner.search.goals import SimulatedStepGoal
from meshwright.planner.search.plan_candidate import Ranked
from meshwright.planner.search.plan_preference import BESIDE, Prefer, with_preference
from meshwright.planner.search.proof_account import of_parts
from meshwright.planner.search.proof_budget import BRIEF, USUAL, Effort, GapProgress
from meshwright.planner.search.queue import Queue
from meshwright.planner.search.search import check_request, search, spaces_of
from meshwright.planner.search.spaces.chain import ChainSpace
from meshwright.planner.search.spaces.simulated_chain import SimulatedChain, Spent
from meshwright.planner.system.gc_pause import pause_collector

MOST_BOUNDED = 64
"""Parts whose configurations are bounded, beside a plan that is known."""
MOST_SEARCHED = 48
"""Parts that are searched like the whole cluster."""
SEARCHED_IN_ORDER = 3
"""Parts that are searched before the one is looked for that is likely to be the fastest."""
BOUNDED = Effort(likely=0, tried=0, solved=4, programs=0)
"""What bounds of a part's configurations may take."""
SOLVED, PROGRAMS = 4, 1
"""Of the usual effort, what a part gets beside a plan that is known: whether it is faster matters
more than by how little it is not."""
ANY_S = sys.float_info.max
"""Slower than any plan: a search below it ends without the diagnosis of why nothing fits."""


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """A part of a cluster, or all of it."""

    request: Request
    bound_s: float
    """No plan takes less."""
    whole: bool


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer of a part, as the user prefers it."""

    part: ClusterPart
    fastest: Answer
    """By its fastest plan."""
    answer: Answer


def has_parts(request: Request) -> bool:
    """Whether some of the cluster's devices may stay idle."""
    groups = request.cluster.groups
    return len(groups) == 1 and groups[0].devices > 1 and groups[0].accelerator.kind != "cpu"


def parts_of(request: Request, least: LeastSteps) -> Iterator[ClusterPart]:
    """Yield the whole cluster and its parts, the lowest bound first, then the most devices."""
    [group] = request.cluster.groups
    least_s = least.by_devices()
    shapes = sorted(
        (float(least_s[nodes * per_node]), -nodes * per_node, nodes, per_node)
        for per_node in range(1, group.devices_per_node + 1)
        for nodes in range(1, group.nodes + 1)
        if math.isfinite(least_s[nodes * per_node]) or nodes * per_node == group.devices
    )
    for bound_s, _, nodes, per_node in shapes:
        if nodes * per_node == group.devices:
            yield ClusterPart(request, bound_s, whole=True)
            continue
        name = part_name(request.cluster_name, nodes=nodes, devices_per_node=per_node)
        cluster = request.cluster.smaller(nodes=nodes, devices_per_node=per_node)
        yield ClusterPart(replace(request, cluster=cluster, called=name), bound_s, whole=False)


@pause_collector()
def search_parts(
    request: Request,
    prefer: Prefer = "simplest",
    *,
    solver: str = "exact",
    top: int = 1,
    progress: Progress | None = None,
    effort: Effort = USUAL,
    gap_progress: GapProgress | None = None,
) -> PartAnswer:
    """Return the answer that no part of the cluster has a faster one than, with its part.

    NoPlanFits says why the whole cluster has no plan, where no part has one either.
    """
    quietly = partial(search, solver=solver, top=top, effort=effort)
    aloud = partial(quietly, progress=progress, gap_progress=gap_progress)
    check_request(request, solver)
    if not has_parts(request):
        fastest = aloud(request)
        part = ClusterPart(request, 0.0, whole=True)
        return PartAnswer(part, fastest, with_preference(request, fastest, prefer))
    store = FigureStore()
    least = LeastSteps(request, store)
    degrees = DegreeBounds(request, store, least)
    parts = _PartSearch(prefer=prefer, effort=effort, store=store, degrees=degrees)
    waiting = list(parts_of(request, least))
    while waiting:
        part = waiting[0]
        if parts.searched == SEARCHED_IN_ORDER and parts.best is not None:
            part = parts.likeliest(waiting) or part
        waiting.remove(part)
        parts.look_at(part, aloud if part.whole else quietly)
    best = parts.best
    if best is None:
        search(request, solver=solver, store=store)  # says why
        raise NoPlanFits(f"no plan of {request.model.name} fits a part of {request.cluster.name}")
    if parts.whole is not None and not best.part.whole:
        best = _with_all_devices(request, parts.whole, best, prefer)
    certificate = of_parts(best.answer.certificate, parts.bounds_s, left=parts.left)
    return replace(best, answer=replace(best.answer, certificate=certificate))


@dataclass(slots=True, kw_only=True)
class _PartSearch:
    """What is known of the parts that were looked at."""

    prefer: Prefer
    effort: Effort
    store: FigureStore
    degrees: DegreeBounds
    best: PartAnswer | None = None
    whole: PartAnswer | None = None
    bounds_s: list[float] = field(default_factory=list)
    """Of each part, what no plan of it takes less than."""
    bounded: int = 0
    searched: int = 0
    left: int = 0
    """Parts that were not looked at to the end."""

    @property
    def limit_s(self) -> float:
        """What is at least this is no faster than the best answer."""
        best = self.best
        return math.inf if best is None else best.answer.prediction.step_time_s * (1 - EQUAL)

    def likeliest(self, waiting: Sequence[ClusterPart]) -> ClusterPart | None:
        """Return the part whose optimum of the closed form is the fastest, below the best so far.

        With a plan of it most others fall to their bounds.
        """
        first: ClusterPart | None = None
        least_s = self.limit_s
        for part in waiting[:MOST_BOUNDED]:
            if part.bound_s >= least_s:
                break
            with contextlib.suppress(NoPlanFits, DocumentError):
                quick = search(part.request, below_s=least_s, effort=BESIDE, store=self.store)
                if quick.prediction.step_time_s < least_s:
                    first, least_s = part, quick.prediction.step_time_s
        return first

    def look_at(self, part: ClusterPart, searched: Callable[..., Answer]) -> None:
        """Exclude a part, or search it; it counts by its bound where neither is worth the time."""
        if part.bound_s < self.limit_s and self.best is not None and self.bounded < MOST_BOUNDED:
            self.bounded += 1
            part = replace(part, bound_s=self._bound_s(part, self.best.answer))
        excluded = part.bound_s >= self.limit_s
        if excluded or (self.searched >= MOST_SEARCHED and not part.whole):
            self.bounds_s.append(part.bound_s)
            self.left += not excluded
            return
        self._search(part, searched)

    def _bound_s(self, part: ClusterPart, best: Answer) -> float:
        """Return what no plan of a part takes less than, as far as that matters beside the best."""
        goal = SimulatedStepGoal(_ranked(best), BOUNDED)
        degrees = self.degrees.below(part.request, goal.limit_s)
        if not degrees:
            return max(part.bound_s, goal.step_s)
        queue, spent = Queue(goal), Spent()
        try:
            spaces = list(spaces_of(part.request, store=self.store, degrees=degrees))
        except DocumentError:
            return math.inf
        chains = [
            SimulatedChain(space, goal, spent, 0.0)
            for space in spaces
            if isinstance(space, ChainSpace)
        ]
        if len(chains) < len(spaces):
            return part.bound_s
        queue.run(*chains)
        lowest = queue.lowest()
        bound_s = goal.step_s if lowest is None else min(goal.step_s, lowest.bound_s)
        return max(part.bound_s, bound_s)

    def _search(self, part: ClusterPart, searched: Callable[..., Answer]) -> None:
        """Search a part; its answer may be the best."""
        self.searched += 1
        effort = self.effort
        if self.best is not None and effort is USUAL:
            effort = replace(effort, solved=SOLVED, programs=PROGRAMS)
        try:
            fastest = searched(
                part.request,
                below_s=ANY_S,
                effort=effort,
                store=self.store,
                faster_than=None if self.best is None else _ranked(self.best.answer),
            )
        except NoPlanFits:
            return
        except DocumentError:
            if part.whole:
                raise
            return
        self.bounds_s.append(fastest.certificate.lower_bound_s)
        limit_s = self.limit_s
        if fastest.prediction.step_time_s >= limit_s:
            return
        answer = PartAnswer(part, fastest, with_preference(part.request, fastest, self.prefer))
        self.whole = answer if part.whole else self.whole
        if answer.answer.prediction.step_time_s < limit_s:
            self.best = answer


def _with_all_devices(
    request: Request, whole: PartAnswer, best: PartAnswer, prefer: Prefer
) -> PartAnswer:
    """Return a plan on all devices that is as fast as that of a part, if there is one."""
    step_s = best.answer.prediction.step_time_s
    if whole.fastest.prediction.step_time_s > step_s * (1 + EQUAL):
        return best
    answer = with_preference(request, whole.fastest, prefer, at_most_s=step_s)
    return replace(whole, answer=answer) if answer.prediction.step_time_s <= step_s else best


def _ranked(answer: Answer) -> Ranked:
    return Ranked(plan=answer.plan, objective_s=math.inf, prediction=answer.prediction)


def used_text(request: Request, answer: PartAnswer) -> str:
    """Return which devices of the cluster an answer uses; empty where it uses all."""
    if answer.part.whole:
        return ""
    [group], [used] = request.cluster.groups, answer.part.request.cluster.groups
    nodes = f"{used.nodes} of {group.nodes} nodes"
    devices = f"{used.devices_per_node} of {group.devices_per_node} devices of each node"
    whole_nodes = used.devices_per_node == group.devices_per_node
    where = nodes if whole_nodes else devices
    if not whole_nodes and used.nodes < group.nodes:
        where = f"{nodes}, {devices}"
    return f": the plan uses {where}, and is slower on more"


def dividing_batch(request: Request, answer: PartAnswer) -> Iterator[str]:
    """Yield what a global batch would bring that all devices divide, where some stay idle."""
    if answer.part.whole:
        return
    [group] = request.cluster.groups
    below, left = divmod(request.job.global_batch, group.devices)
    if not left:
        return
    near = (below + (2 * left >= group.devices or not below)) * group.devices
    dividing = replace(request, job=replace(request.job, global_batch=near))
    prediction = answer.answer.prediction
    try:
        other = search(dividing, below_s=ANY_S, effort=BRIEF).prediction
    except (NoPlanFits, DocumentError):
        return
    rate, unit = other.throughput
    if rate > prediction.throughput[0]:
        yield (
            f"a global batch of {near}, which all {group.devices} devices divide, would take "
            f"{seconds_text(other.step_time_s)} a step: {count_text(rate)} {unit} in place of "
            f"{count_text(prediction.throughput[0])}"
        )
