"""Idle devices: no answer is slower than that of any part of the cluster.

Parts have some nodes, and some devices of each.  One number of devices may divide a batch, layers
or heads where another does not, and links between nodes may cost more than the nodes bring.  Parts
are looked at in the order of a bound that depends on their number of devices alone
(planner.search.bounds.device_counts), the whole cluster among them: once a plan is known, most fall
to that.  What is left falls to bounds of its configurations in simulated seconds, or is searched
like the whole where one of its plans is faster.  Only a large part whose bound is within 1 % of the
best is left at that (`FEW_NEAR`), so that the answer may be slower by as much.

Devices of a CPU are processes, of which the user says how many there are.  Of several groups of
devices every set is a part too, and every part of each group alone (planner.search.group_sets).
Where some devices of several groups may be faster, plans are looked for, and nothing is proven.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from meshwright.planner.catalog.expressions import part_name
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup, LinkTier
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.documents.units import count_text, seconds_text
from meshwright.planner.errors import DocumentError, NoneFaster, NoPlanFits
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer, Progress
from meshwright.planner.search.bounds.degree_bounds import DegreeBounds
from meshwright.planner.search.bounds.device_counts import LeastSteps
from meshwright.planner.search.goals import SimulatedStepGoal
from meshwright.planner.search.group_sets import (
    fewer_devices,
    least_together_s,
    on_group_set,
    proper_sets,
)
from meshwright.planner.search.plan_candidate import Ranked
from meshwright.planner.search.plan_preference import BESIDE, Prefer, with_preference
from meshwright.planner.search.proof_account import of_parts
from meshwright.planner.search.proof_budget import (
    BRIEF,
    GOAL,
    NEAR,
    USUAL,
    Effort,
    GapProgress,
)
from meshwright.planner.search.queue import Queue
from meshwright.planner.search.search import MARGIN, check_request, no_plan, search, spaces_of
from meshwright.planner.search.spaces.chain import ChainSpace
from meshwright.planner.search.spaces.simulated_chain import SimulatedChain, Spent, look_among
from meshwright.planner.system.gc_pause import pause_collector

if TYPE_CHECKING:
    from meshwright.planner.search.bounds.layout_bounds import Candidates

MOST_FAMILIES = 6_000
"""Families of layouts of all parts that are bounded or searched beside a plan that is known."""
FEW_FAMILIES = 750
"""The same of a study while no plan is known."""
FEW_NEAR = 300
"""Families of a part up to which it is searched where its bound is within `GOAL` of the best; the
search of a larger one took as long as that of the whole cluster, and brought nothing."""
MOST_LIKELY = 16
"""Parts among which the one is looked for that is likely to be the fastest."""
BOUNDED = Effort(likely=0, tried=0, solved=4, programs=0)
"""Effort for bounds of a part's configurations."""
SOLVED, PROGRAMS = 4, 1
"""Limits of a part's effort beside a plan that is known, fewer than usual: whether it is faster
matters more than by how little it is not."""
MOST_FEWER = 60
"""Over the devices of a cluster: parts with some devices of several groups of which plans are
looked for."""
QUICK = replace(BESIDE, likely=0, tried=0)
"""Effort for looking for a plan of a part."""
Rate = Callable[[ClusterSpec], float]
"""What a second of a cluster costs; inf where that is not known."""
ANY_S = sys.float_info.max
"""Slower than any plan: a search below it ends without the diagnosis of why nothing fits."""


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """A part of a cluster, or all of it."""

    request: Request
    bound_s: float
    """No plan takes less."""
    whole: bool
    kept: tuple[int, ...] = ()
    """The groups that it has, where it leaves some of the cluster's out."""
    degrees: DegreeBounds | None = None
    """Bounds of the configurations of devices that are alike; None where they are not, and the
    part is searched unless its own bound excludes it."""

    @property
    def is_set(self) -> bool:
        """True if it keeps several groups and leaves others out."""
        return len(self.kept) > 1


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer of a part, as the user prefers it."""

    part: ClusterPart
    fastest: Answer
    """Answer with the part's fastest plan."""
    answer: Answer


def has_parts(request: Request) -> bool:
    """Return whether some of the cluster's devices may stay idle."""
    groups = request.cluster.groups
    return len(groups) > 1 or (groups[0].devices > 1 and groups[0].accelerator.kind != "cpu")


def parts_of(
    request: Request, least: LeastSteps, degrees: DegreeBounds, kept: tuple[int, ...] = ()
) -> Iterator[ClusterPart]:
    """Yield all devices of one group and their parts, of the group that is `kept` of a cluster."""
    [group] = request.cluster.groups
    least_s = least.by_devices()
    for nodes, per_node in product(range(1, group.nodes + 1), range(1, group.devices_per_node + 1)):
        devices = nodes * per_node
        bound_s = float(least_s[devices])
        if devices == group.devices:
            yield ClusterPart(request, bound_s, whole=not kept, kept=kept, degrees=degrees)
            continue
        if group.accelerator.kind == "cpu" or not math.isfinite(bound_s):
            continue
        name = part_name(request.cluster_name, nodes=nodes, devices_per_node=per_node)
        cluster = request.cluster.smaller(nodes=nodes, devices_per_node=per_node)
        part = replace(request, cluster=cluster, called=name)
        yield ClusterPart(part, bound_s, whole=False, kept=kept, degrees=degrees)


def parts_of_groups(
    request: Request, least: Sequence[LeastSteps], store: FigureStore
) -> Iterator[ClusterPart]:
    """Yield all groups, each alone with its parts, and the sets that leave some out.

    `least` is of each group alone.
    """
    groups = request.cluster.groups
    for at, of_group in enumerate(least):
        alone = on_group_set(request, (at,))
        yield from parts_of(alone, of_group, DegreeBounds(alone, store, of_group), (at,))
    sizes = [group.devices for group in groups]
    yield ClusterPart(request, least_together_s(request, sizes, least), whole=True)
    for kept in proper_sets(len(groups)):
        some = [least[at] for at in kept]
        bound_s = least_together_s(request, [sizes[at] for at in kept], some)
        yield ClusterPart(on_group_set(request, kept), bound_s, whole=False, kept=kept)


def _in_order(parts: Iterable[ClusterPart], request: Request, rate: Rate) -> list[ClusterPart]:
    """Return the lowest bound first, then the most devices; sets of several groups come last.

    Of several groups each comes first alone, which is soon searched and limits the search of all.
    """
    sizes = [group.devices for group in request.cluster.groups]

    def rank(part: ClusterPart) -> tuple[object, ...]:
        devices = part.request.cluster.devices
        alone = len(part.kept) == 1 and devices == sizes[part.kept[0]]
        bound = part.bound_s * rate(part.request.cluster)
        return part.is_set, not alone, bool(part.kept), bound, -devices

    return sorted((part for part in parts if rate(part.request.cluster) < math.inf), key=rank)


@pause_collector()
def search_parts(
    request: Request,
    prefer: Prefer | None = "simplest",
    *,
    solver: str = "exact",
    top: int = 1,
    progress: Progress | None = None,
    effort: Effort = USUAL,
    gap_progress: GapProgress | None = None,
    below_s: float = math.inf,
    store: FigureStore | None = None,
    rate: Rate | None = None,
) -> PartAnswer:
    """Return the answer that no part of the cluster has a faster one than, with its part.

    With a `rate` no part has a cheaper one: a second costs as much as the rate of the part says.

    NoPlanFits says why the whole cluster has no plan, where no part has one either; NoneFaster ends
    the search where none takes less than `below_s`.  Of an answer that nobody prefers (None) the
    plan is the fastest.
    """
    fewer = len(request.cluster.groups) > 1 and rate is None
    rate = rate or (lambda _: 1.0)
    # Plans on a single group of several are those of other parts.
    fewest = 2 if request.cluster.is_mixed else 1
    quietly = partial(search, solver=solver, top=top, effort=effort, fewest_groups=fewest)
    aloud = partial(quietly, progress=progress, gap_progress=gap_progress)
    check_request(request, solver)
    if not has_parts(request):
        fastest = aloud(request, below_s=below_s, store=store)
        part = ClusterPart(request, 0.0, whole=True)
        return PartAnswer(part, fastest, _preferred(request, fastest, prefer))
    store, groups = store or FigureStore(), len(request.cluster.groups)
    if groups > 1:
        least = [LeastSteps(on_group_set(request, (at,)), store) for at in range(groups)]
        waiting = _in_order(parts_of_groups(request, least, store), request, rate)
    else:
        least = [LeastSteps(request, store)]
        degrees = DegreeBounds(request, store, least[0])
        waiting = _in_order(parts_of(request, least[0], degrees), request, rate)
    parts = _PartSearch(
        prefer=prefer,
        effort=effort,
        store=store,
        links=request.cluster.tiers,
        most_s=below_s,
        rate=rate,
    )
    while waiting:
        part = waiting.pop(0)
        parts.look_at(part, aloud if part.whole else quietly)
        if part.whole and parts.best is not None:
            likely = parts.likeliest(waiting)
            if likely is not None:
                waiting.remove(likely)
                parts.search(likely, quietly)
    if fewer:
        parts.look_for_fewer(request, least, quietly)
    best = parts.best
    if best is None:
        if below_s < math.inf:
            raise NoneFaster(f"no plan takes less than {below_s:g} s")
        if groups > 1 or request.model.edges:
            search(request, solver=solver, store=store)  # some layouts tell what they lack
        raise no_plan(request, store=store)
    if prefer in ("simplest", "fastest") and parts.whole is not None and not best.part.whole:
        best = _with_all_devices(request, parts.whole, best, prefer)
    certificate = of_parts(
        best.answer.certificate,
        [cost / rate(best.part.request.cluster) for cost in parts.bounds],
        unproven=parts.unproven,
        fewer=parts.fewer if fewer else None,
        by=prefer if prefer in ("energy", "cost") else None,
    )
    return replace(best, answer=replace(best.answer, certificate=certificate))


@dataclass(slots=True, kw_only=True)
class _PartSearch:
    """Results of the parts that were looked at."""

    prefer: Prefer | None
    effort: Effort
    store: FigureStore
    links: tuple[LinkTier, ...]
    """Link tiers of the whole cluster."""
    most_s: float
    """Seconds of a step that every plan must stay below."""
    rate: Rate
    """What a second of a cluster costs."""
    best: PartAnswer | None = None
    whole: PartAnswer | None = None
    bounds: list[float] = field(default_factory=list)
    """Lower bounds of what a step costs, one for each part."""
    whole_s: float = 0.0
    """Lower bound in seconds of a step of plans on all devices."""
    families: int = 0
    """Configuration groups of the parts that were looked at."""
    unproven: int = 0
    """Parts that were not looked at to the end."""
    fewer: int = 0
    """Parts with some devices of several groups of which plans were looked for."""
    _spaces: dict[str, list[Candidates]] = field(default_factory=dict)
    """[cluster] Candidates of a part that may be faster than the best plan that was known."""

    def limit_s(self, part: ClusterPart) -> float:
        """Seconds of a step from which on a plan of a part is no better than the best answer."""
        if self.best is None:
            return self.most_s
        return self._best_on(part).prediction.step_time_s * (1 - EQUAL)

    def _best_on(self, part: ClusterPart) -> Ranked:
        """Return the best plan, with as many seconds as would cost the same on a part."""
        assert self.best is not None
        best = self.best.answer
        here, there = (self.rate(of.request.cluster) for of in (part, self.best.part))
        step_s = best.prediction.step_time_s * (there / here)
        prediction = best.prediction.model_copy(update={"step_time_s": step_s})
        return Ranked(plan=best.plan, objective_s=math.inf, prediction=prediction)

    def _add_bound(self, part: ClusterPart, bound_s: float) -> None:
        self.bounds.append(bound_s * self.rate(part.request.cluster))

    def likeliest(self, waiting: Sequence[ClusterPart]) -> ClusterPart | None:
        """Return the part whose optimum of the closed form is the fastest, below the best so far.

        With a plan of it most others fall to their bounds.
        """
        first: ClusterPart | None = None
        least = math.inf
        for part in waiting[:MOST_LIKELY]:
            least_s = min(self.limit_s(part), least / self.rate(part.request.cluster))
            if part.bound_s >= least_s or part.degrees is None:
                break
            if self.families >= MOST_FAMILIES // 2:
                break
            with contextlib.suppress(NoPlanFits, DocumentError):
                quick = search(
                    part.request,
                    below_s=least_s,
                    effort=QUICK,
                    store=self.store,
                    candidates=self._may_be_faster(part, part.degrees),
                )
                if quick.prediction.step_time_s < least_s:
                    first = part
                    least = quick.prediction.step_time_s * self.rate(part.request.cluster)
        return first

    def look_at(self, part: ClusterPart, searched: Callable[..., Answer]) -> None:
        """Exclude a part, or search it, unless that is too much together with the others."""
        if part.bound_s >= self.limit_s(part):
            self._add_bound(part, part.bound_s)
            return
        if self.is_spent and part.degrees is not None and not part.whole:
            self.unproven += 1
            return
        if part.degrees is None or (self.best is None and part.whole):
            self.search(part, searched)
            return
        candidates = self._may_be_faster(part, part.degrees)
        del self._spaces[part.request.cluster_name]
        if self.best is None or part.request.model.edges:
            self.search(part, searched, candidates)
            return
        bound_s = self._bound_s(part, candidates)
        if bound_s is None:  # of what is faster the certificate is of all that the part has
            self.search(part, searched)
            return
        families = sum(len(of.families) for of in candidates)
        near = 1 - GOAL if families > FEW_NEAR else 1.0
        if bound_s >= self.limit_s(part) * near:
            self._add_bound(part, bound_s)
            return
        self.search(part, searched, candidates, at_least_s=bound_s)

    @property
    def is_spent(self) -> bool:
        """True if enough of the parts was looked at; where nothing fits, studies look at few."""
        few = self.best is None and self.prefer is None
        return self.families >= (FEW_FAMILIES if few else MOST_FAMILIES)

    def _may_be_faster(self, part: ClusterPart, degrees: DegreeBounds) -> list[Candidates]:
        """Return the layouts of a part whose degrees may be faster than the best that is known."""
        name, request = part.request.cluster_name, part.request
        if name not in self._spaces:
            some = degrees.degrees_below(request, self.limit_s(part))
            spaces: list[Any] = []
            if some:
                with contextlib.suppress(DocumentError):
                    spaces = list(spaces_of(request, store=self.store, degrees=some))
            self._spaces[name] = [space.candidates for space in spaces]
            self.families += sum(len(of.families) for of in self._spaces[name])
        return self._spaces[name]

    def look_for_fewer(
        self, request: Request, least: Sequence[LeastSteps], searched: Callable[..., Answer]
    ) -> None:
        """Look for plans on some devices of several groups; nothing is proven of these."""
        most = max(2, MOST_FEWER // request.cluster.devices)
        whole = ClusterPart(request, 0.0, whole=True)
        for bound_s, kept, shapes in fewer_devices(request, least, lambda: self.limit_s(whole)):
            if self.fewer == most:
                return
            limit_s = self.limit_s(whole)
            self.fewer += 1
            part = ClusterPart(on_group_set(request, kept, shapes), bound_s, False, kept)
            with contextlib.suppress(NoPlanFits, DocumentError):
                quick = search(
                    part.request,
                    below_s=min(ANY_S, limit_s * (1 + MARGIN)),
                    effort=QUICK,
                    store=self.store,
                    faster_than=None if self.best is None else self._best_on(part),
                    fewest_groups=len(kept),
                )
                if quick.prediction.step_time_s < limit_s * (1 + NEAR):
                    self.search(part, searched)

    def _bound_s(self, part: ClusterPart, candidates: Sequence[Candidates]) -> float | None:
        """Return what no plan of a part takes less than; None where one is faster than the best.

        First come bounds alone, then plans of the layouts that are likely to be faster, then the
        further proof.
        """
        best = self._best_on(part)
        goal = SimulatedStepGoal(best, BOUNDED)
        queue, spent = Queue(goal), Spent()
        queue.run(*(SimulatedChain(ChainSpace(of), goal, spent, 0.0) for of in candidates))
        lowest = queue.lowest()
        if lowest is not None and not goal.exceeds(lowest.bound_s):
            look_among(goal, queue.rest(), self.effort)
            goal.set_effort(self._effort_beside(part))
            queue.run()
            lowest = queue.lowest()
        if goal.best is not best:
            return None
        bound_s = goal.step_s if lowest is None else min(goal.step_s, lowest.bound_s)
        return max(part.bound_s, bound_s)

    def _effort_beside(self, part: ClusterPart) -> Effort:
        """Return the effort for a part beside a plan that is known.

        The proof of a part ends at the lowest bound of the others, since all have one certificate.
        """
        limit = self.limit_s(part) * self.rate(part.request.cluster)
        low = 0.0 if part.whole else 1 - min(self.bounds, default=0.0) / limit
        effort = replace(self.effort, gap=max(low, self.effort.gap))
        if self.effort is USUAL and not part.whole:
            effort = replace(effort, solved=SOLVED, programs=PROGRAMS)
        return effort

    def _below_s(self, part: ClusterPart) -> float:
        """Return what the closed form has to be below to be worth a simulation."""
        limit_s = self.limit_s(part) * (1 + MARGIN) if part.is_set else self.most_s
        return min(ANY_S, limit_s)

    def _set_bound_s(self, part: ClusterPart) -> float:
        """Return what no plan of a set of groups takes less than, none of which is near the best.

        The search of all groups has its layouts too, over the links that join all.
        """
        joined, links = part.request.cluster.tiers[-1], self.links[-1]
        are_same = joined == links.model_copy(update={"devices": joined.devices})
        return max(part.bound_s, self.whole_s if are_same else 0.0)

    def search(
        self,
        part: ClusterPart,
        searched: Callable[..., Answer],
        candidates: Sequence[Candidates] = (),
        at_least_s: float = 0.0,
    ) -> None:
        """Search a part; its answer may be the best.

        `candidates` are all of it that may be faster than the best that is known; no plan takes
        less than `at_least_s`, where that was proven with all effort.
        """
        has_all = not candidates or self.best is None
        limit_s = self.limit_s(part)
        effort = self.effort if self.best is None else self._effort_beside(part)
        if at_least_s:
            effort = replace(QUICK, likely=effort.likely, tried=effort.tried)
        try:
            fastest = searched(
                part.request,
                below_s=self._below_s(part),
                effort=effort,
                store=self.store,
                faster_than=None if self.best is None else self._best_on(part),
                candidates=candidates,
            )
        except NoneFaster:
            if part.is_set:
                self._add_bound(part, self._set_bound_s(part))
            elif not has_all:
                self._add_bound(part, limit_s)
            return
        except NoPlanFits:
            return
        except DocumentError:
            if part.whole:
                raise
            return
        is_faster = fastest.prediction.step_time_s < limit_s
        if is_faster and not has_all:  # a certificate is of all that a part has
            self.search(part, searched)
            return
        self._add_bound(part, max(at_least_s, min(fastest.certificate.lower_bound_s, limit_s)))
        if part.whole:
            self.whole_s = fastest.certificate.lower_bound_s
        if not is_faster:
            return
        answer = PartAnswer(part, fastest, _preferred(part.request, fastest, self.prefer))
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


def _preferred(request: Request, fastest: Answer, prefer: Prefer | None) -> Answer:
    return fastest if prefer is None else with_preference(request, fastest, prefer)


WORSE = {"energy": "takes more energy", "cost": "costs more"}
"""What a plan on more devices does, by what is preferred; else it is slower."""


def used_text(request: Request, answer: PartAnswer, prefer: Prefer = "fastest") -> str:
    """Return which devices of the cluster an answer uses; empty where it uses all."""
    if answer.part.whole:
        left = _unused(answer.answer.plan)
        return f": the plan uses none of {', '.join(left)}" if left else ""
    groups, kept = request.cluster.groups, answer.part.kept or (0,)
    worse = WORSE.get(prefer, "is slower")
    used = dict(zip(kept, answer.part.request.cluster.groups, strict=True))
    if len(groups) == 1:
        return f": the plan uses {_where(groups[0], used[0])}, and {worse} on more"
    texts = [
        f"{_where(group, used[at]) or 'all'} of {group.name}"
        for at, group in enumerate(groups)
        if at in used
    ]
    left = [group.name for at, group in enumerate(groups) if at not in used]
    texts += [f"none of {', '.join(left)}"] if left else []
    return f": the plan uses {', '.join(texts)}, and {worse} on all"


def _unused(plan: Plan) -> list[str]:
    """Return the groups that a plan names and no rank of it is on."""
    parts = plan.stages if plan.shares is None else plan.shares
    used = {part.group for part in parts}
    return [group.name for group in plan.groups or () if group.name not in used]


def _where(group: DeviceGroup, used: DeviceGroup) -> str:
    """Return which nodes and devices of a group are used; empty where all are."""
    nodes = f"{used.nodes} of {group.nodes} nodes" if used.nodes < group.nodes else ""
    devices = f"{used.devices_per_node} of {group.devices_per_node} devices of each node"
    whole_nodes = used.devices_per_node == group.devices_per_node
    return ", ".join(filter(None, (nodes, "" if whole_nodes else devices)))


def dividing_batch(request: Request, answer: PartAnswer) -> Iterator[str]:
    """Yield what a global batch would bring that all devices divide, where some stay idle."""
    if answer.part.whole or len(request.cluster.groups) > 1:
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
