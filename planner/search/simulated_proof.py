"""What is proven of simulated time over the whole space, and the plans that the proof comes across.

Every configuration has a lower bound of its simulated step (`planner.search.simulated_bounds`).
Those below the fastest plan that is known get dearer bounds, the lowest first: configuration groups
by their computation, parts of one ZeRO level and schedule within memory, layouts with what sharding
takes and what each rank holds, then the exact optimum of the bound.  Where the plan of such an
optimum, or that of the closed form, simulates faster than the answer, it takes the answer's place.
Last comes the program of a layout (`planner.search.simulated_program`).

Nothing in the space simulates below the least bound that is left.  How far that is followed is
counted in `Effort`, so that an answer does not depend on the machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

from planner.costs.layout_costs import LayoutCosts
from planner.documents.plan import Layout
from planner.documents.tolerances import EQUAL, ROUNDING
from planner.search.candidates import Bounded, Candidates
from planner.search.dominance import covers
from planner.search.ranked import Ranked, ranked
from planner.search.simulated_bounds import SimulatedCandidates
from planner.search.simulated_program import Choices, of_chain
from planner.search.space import Family, canonical, complexity, kind, timetables
from planner.solver import bounds
from planner.solver.instance import Fathomed, Infeasible, Instance, Solution, priced

Solve = Callable[[Instance, float], object]
Told = Callable[[float], None]
"""Told the certified gap as it falls."""

FAMILY, PART, SHARED, LAYOUT, WITHIN_MEMORY, CUT, SOLVED, SETTLED = range(8)
"""What is known of an entry: computation; within memory; with sharing; as a layout; all of its
memory; the least of all cuts by paths that stay with a rank; the exact optimum of the bound; of the
simulated step."""
MOST_KEPT = 24
"""Layouts of one shape that are kept to see whether others can do no more."""
BATCH = {FAMILY: 96, PART: 24, SHARED: 12}
"""Entries that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a proof is followed."""

    likely: int = 48
    """Layouts that are estimated, to find those that are likely to be the fastest."""
    tried: int = 10
    """Of them, those that are solved and simulated."""
    families: int = 1_500
    """Configuration groups and parts that are bounded."""
    memory_stages: int = 4_000
    """Stages of the layouts whose memory is looked at."""
    cut_stages: int = 1_000
    """Stages of the layouts whose cuts are gone through."""
    layouts: int = 60
    """Layouts on devices that differ whose memory is looked at."""
    solved: int = 4
    """Layouts whose partition problems are solved."""
    programs: int = 1
    """Layouts whose programs are."""
    ways: int = 1_500
    """In which the layers of a rank may recompute, where a program is tried."""
    actions: int = 2_500
    """Of a step whose program is tried."""
    nodes: int = 50
    """Of the tree of one program."""
    columns: int = 1_000
    """Of a program that is tried: the relaxation of a larger one may take minutes."""
    seconds: float = math.inf
    """CPU seconds, where the user has set a time."""
    program_s: float = math.inf
    """Of them, for one program."""
    further: Effort | None = None
    """What it may take while the gap is above `GOAL`."""


NEAR = 0.05
"""How far the estimate of a layout is above what it simulates at most, relatively."""
GOAL = 0.01
"""The gap above which a proof takes its further effort."""
USUAL = Effort(
    further=Effort(
        families=6_000,
        memory_stages=16_000,
        cut_stages=5_000,
        solved=60,
        programs=60,
        actions=70_000,
        columns=600,
    )
)
BRIEF = Effort(
    likely=16,
    tried=4,
    families=96,
    memory_stages=200,
    cut_stages=40,
    layouts=20,
    solved=2,
    programs=0,
)
"""For searches of many clusters."""
_ALL = 1 << 30
FULL = Effort(
    families=_ALL,
    memory_stages=_ALL,
    cut_stages=_ALL,
    layouts=_ALL,
    solved=_ALL,
    programs=_ALL,
    ways=20_000,
    actions=30_000,
    nodes=1_000,
    columns=_ALL,
    seconds=100.0,
    program_s=5.0,
)
Prove = Literal["usual", "simulated"]
EFFORTS: dict[Prove, Effort] = {"usual": USUAL, "simulated": FULL}
"""What a user may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is proven of the simulated step, and the fastest plan that is known."""

    best: Ranked
    owner: Candidates
    lower_bound_s: float
    """Nothing in the space simulates below."""
    found: tuple[tuple[Candidates, Ranked], ...] = ()
    """Plans that were simulated on the way."""
    looked_at: dict[str, int] = field(default_factory=dict)
    """How many entries got which bound."""
    lowest: str | None = None
    """The layout that has the least bound, None where nothing is left."""


def prove(
    every: Sequence[Candidates],
    start: tuple[Candidates, Ranked],
    solve: Solve,
    *,
    closed_form_s: float = 0.0,
    effort: Effort = USUAL,
    told: Told | None = None,
) -> Proof:
    """Return what is proven of all candidates, beginning with the plan `start`.

    None of them takes less than `closed_form_s` in the closed form, which without a pipeline is the
    simulated step.
    """
    search = _Search(every, start, solve, closed_form_s, effort)
    search.run(told)
    return search.proof()


_Entry = tuple[float, tuple[int, ...], int, int, Family | Layout]
"""Bound, complexity, a number that tells equals apart, place of the candidates, item."""


class _Search:
    """The entries that are left, by what is known of them."""

    def __init__(
        self,
        every: Sequence[Candidates],
        start: tuple[Candidates, Ranked],
        solve: Solve,
        closed_form_s: float,
        effort: Effort,
    ) -> None:
        self._every = every
        self._bounded = [SimulatedCandidates.of(one) for one in every]
        self._solve = solve
        self._unpiped_s = closed_form_s * (1 - ROUNDING)
        self._effort = self._allowed = effort
        self._owner, self._best = start
        self._found: list[tuple[Candidates, Ranked]] = []
        self._polished: dict[tuple[int, Layout], float] = {}
        """What programs have found before their turn."""
        self._known_choices: dict[tuple[int, Layout], Choices | None] = {}
        """Of layouts whose cuts were gone through, and whose programs may come."""
        self._excluded: dict[tuple[object, ...], deque[LayoutCosts]] = {}
        """Costs of layouts that do not beat the best, by what they have in common with others."""
        self._numbers = itertools.count()
        self._left: list[list[_Entry]] = [[] for _ in range(SETTLED + 1)]
        self._spent = dict.fromkeys(range(SETTLED + 1), 0)
        self._stages = dict.fromkeys(range(SETTLED + 1), 0)
        """Of the layouts that were spent."""
        self._started = time.process_time()
        for place, one in enumerate(self._bounded):
            for bound_s, family in zip(one.computation_s().tolist(), one.families, strict=True):
                if bound_s < self._limit_s:
                    self._push(FAMILY, bound_s, place, family)

    @property
    def _limit_s(self) -> float:
        """What is at least this does not beat the best."""
        return self._best.prediction.step_time_s * (1 - EQUAL)

    @property
    def _place(self) -> int:
        """Of the best plan's candidates."""
        return next(at for at, one in enumerate(self._every) if one is self._owner)

    def _push(self, level: int, bound_s: float, place: int, item: Family | Layout) -> None:
        pipeline = item.degrees.pipeline if isinstance(item, Family) else item.pipeline
        if pipeline == 1:
            bound_s = max(bound_s, self._unpiped_s)
        if bound_s >= self._limit_s:
            return
        simple = item.complexity if isinstance(item, Family) else complexity(item)
        heapq.heappush(self._left[level], (bound_s, simple, next(self._numbers), place, item))

    def run(self, told: Told | None) -> None:
        """Look near the best, then bound what is left, the lowest first, while effort is left."""
        self._try_likely()
        self._polish()
        while (level := self._lowest()) is not None:
            self._advance(level)
            if told is not None:
                told(self._gap())

    def _try_likely(self) -> None:
        """Solve and simulate the layouts that are likely to be the fastest.

        They come from parts of the space that the closed form has bounded, transfers left out,
        below its own optimum, and from the best layout's other schedules.  Of those that differ in
        sharing and order alone the one with the least bound stands for all.
        """
        alike: dict[tuple[object, ...], tuple[float, int, Layout]] = {}
        for place, one in enumerate(self._every):
            for _, bounded in (*one.opened.values(), (None, self._rescheduled(one))):
                for layout, bound_s in bounded:
                    timetable = layout.schedule, layout.virtual_stages
                    sizes = layout.micro_batch, layout.loss
                    key = place, timetable, kind(layout), *sizes, layout.zero > 2
                    worse = key in alike and alike[key][0] <= bound_s
                    if layout.pipeline == 1 or worse or bound_s >= self._limit_s:
                        continue
                    if one.pins.allow(layout) and one.refusal(layout) is None:
                        alike[key] = bound_s, place, layout
        each = []
        for _, place, layout in heapq.nsmallest(
            self._effort.likely, alike.values(), key=itemgetter(0)
        ):
            instance, more_s = self._bounded[place].likely(layout)
            each.append((bounds.counted_s(instance) + more_s, place, layout))
        self._try_in_turn(each)

    def _try_in_turn(self, each: list[tuple[float, int, Layout]]) -> None:
        """Simulate layouts by their estimates, each as far off as the last one of its schedule."""
        off: dict[str, float] = {}

        def expected_s(one: tuple[float, int, Layout]) -> float:
            return one[0] * off.get(one[2].schedule, 1 - NEAR / 2)

        for _ in range(min(self._effort.tried, len(each))):
            first = min(each, key=expected_s)
            if expected_s(first) >= self._limit_s:
                return
            each.remove(first)
            step_s = self._try_likeliest(*first[1:])
            if step_s < math.inf:
                off[first[2].schedule] = step_s / first[0]

    def _try_likeliest(self, place: int, layout: Layout) -> float:
        """Simulate the plan of a layout that is likely to be the fastest, if it may be."""
        instance, more_s = self._bounded[place].likely(layout)
        solution = self._solve(instance, self._limit_s * (1 + NEAR) - more_s)
        if not isinstance(solution, Solution):
            return math.inf
        return self._try(self._every[place], layout, solution)

    def _rescheduled(self, candidates: Candidates) -> Bounded:
        """Return the best plan's layout under its other schedules."""
        best = self._best.plan.layout
        if candidates is not self._owner:
            return []
        found = []
        for name, virtual in timetables(
            candidates.model,
            best.pipeline,
            best.micro_batches,
            candidates.pins,
            space=candidates.request.space,
        ):
            layout = replace(best, schedule=name, virtual_stages=virtual)
            if not candidates.pins.order:
                layout = canonical(candidates.cluster, layout)
            if layout != best:
                found.append((layout, self._bounded[self._place].communication_s(layout)))
        return found

    def _polish(self) -> None:
        """Let the program of the best plan's layout choose its stages and recomputation."""
        layout = self._best.plan.layout
        if layout.pipeline > 1 and self._effort.programs:
            self._spent[SOLVED] += 1
            place = self._place
            low_s = self._settled_s(place, layout)
            if low_s > 0.0:
                self._polished[place, layout] = low_s

    def _lowest(self) -> int | None:
        """Return the level of the lowest entry that may get another bound; None if none may.

        Where the lowest of all may not, the proof ends there, and the others are only looked at for
        faster plans.
        """
        further = self._effort.further
        if further is not None:
            self._allowed = further if self._gap() > GOAL else self._effort
        tops = sorted((heap[0][:2], level) for level, heap in enumerate(self._left) if heap)
        if tops and not self._may(tops[0][1]) and not self._may(CUT):
            tops = [top for top in tops if top[1] == SOLVED]
        for (bound_s, _), level in tops:
            if self._may(level):
                return level if bound_s < self._limit_s else None
        return None

    def _may(self, level: int) -> bool:
        effort, spent = self._allowed, self._spent
        if time.process_time() - self._started > effort.seconds:
            return False
        if level < LAYOUT:
            return sum(spent[one] for one in range(LAYOUT)) < effort.families
        if level in (LAYOUT, WITHIN_MEMORY):
            most = effort.memory_stages if level == LAYOUT else effort.cut_stages
            return self._stages[level] < most
        return spent[level] < {CUT: effort.solved, SOLVED: effort.programs}.get(level, 0)

    def _advance(self, level: int) -> None:
        """Give the lowest entries of a level their next bound."""
        if level >= LAYOUT:
            self._advance_layout(level)
            return
        together: dict[int, list[tuple[float, Family]]] = {}
        heap = self._left[level]
        for _ in range(BATCH[level]):
            if not heap:
                break
            bound_s, _, _, place, item = heapq.heappop(heap)
            if bound_s < self._limit_s and isinstance(item, Family):
                together.setdefault(place, []).append((bound_s, item))
                self._spent[level] += 1
        for place, some in together.items():
            if level == FAMILY:
                self._divide(place, some)
            elif level == PART:
                for bound_s, part in some:
                    for one in part.by_loss():
                        better_s = float(self._bounded[place].shared_s(one).min())
                        self._push(SHARED, max(bound_s, better_s), place, one)
            else:
                self._open(place, some)

    def _advance_layout(self, level: int) -> None:
        bound_s, _, _, place, layout = heapq.heappop(self._left[level])
        assert isinstance(layout, Layout)
        if level == LAYOUT and self._left_out(place, layout):
            return
        if level <= WITHIN_MEMORY and self._covered(place, layout):
            return
        self._spent[level] += 1
        self._stages[level] += layout.stages
        better_s = max(bound_s, self._layout_s(level, place, layout))
        if better_s >= self._limit_s:
            known = self._excluded.setdefault(_shape(place, layout), deque(maxlen=MOST_KEPT))
            known.append(self._every[place].costs(layout))
        self._push(level + 1, better_s, place, layout)

    def _covered(self, place: int, layout: Layout) -> bool:
        """Whether each plan of a layout is one of another that does not beat the best."""
        known = self._excluded.get(_shape(place, layout))
        if not known:
            return False
        costs = self._every[place].costs(layout)
        return any(covers(one, costs) for one in reversed(known))

    def _layout_s(self, level: int, place: int, layout: Layout) -> float:
        """Return the next bound of a layout."""
        if level == WITHIN_MEMORY:
            return self._cut_s(place, layout)
        if level == CUT:
            return self._solved_s(place, layout)
        if level == SOLVED:
            known_s = self._polished.pop((place, layout), None)
            return self._settled_s(place, layout) if known_s is None else known_s
        bounded = self._bounded[place]
        least_s = bounded.communication_s(layout)
        if least_s >= self._limit_s:
            return least_s
        return bounded.memory_s(layout, self._limit_s)

    def _divide(self, place: int, some: Sequence[tuple[float, Family]]) -> None:
        """Put the parts of families in their place: savings first, then levels and timetables."""
        bounded = self._bounded[place]
        single = []
        for bound_s, family in some:
            if len(family.savings) == 1:
                single.append((bound_s, family))
                continue
            saved_s = bounded.savings_s(family)
            for part_s, part in zip(saved_s, family.by_saving(), strict=True):
                self._push(FAMILY, max(bound_s, part_s), place, part)
        if not single:
            return
        rooms = bounded.rooms_s([family for _, family in single])
        for (bound_s, family), levels in zip(single, rooms, strict=True):
            for part, room_s in bounded.parts(family, levels):
                self._push(PART, max(bound_s, room_s), place, part)

    def _open(self, place: int, some: Sequence[tuple[float, Family]]) -> None:
        """Put the layouts of parts in their place."""
        bounded = self._bounded[place]
        opened = bounded.shared_rooms_s([part for _, part in some])
        for (bound_s, _), layouts in zip(some, opened, strict=True):
            for layout, better_s in layouts:
                self._push(LAYOUT, max(bound_s, better_s), place, layout)

    def _solved_s(self, place: int, layout: Layout) -> float:
        """Return the least of a layout by its bounds, solved exactly; plans may be found by it."""
        candidates, bounded = self._every[place], self._bounded[place]
        step_s = candidates.costs(layout).step_s
        most_s = -math.inf
        for instance, waited_s in bounded.instances(layout):
            # Sums of bytes are no more than what ranks hold, and quicker.
            relaxed = replace(instance, used_bytes=None)
            solution = self._solve(relaxed, self._limit_s - step_s - waited_s)
            if isinstance(solution, Infeasible):
                return math.inf
            if isinstance(solution, Solution):
                most_s = max(most_s, solution.lower_bound_s + step_s + waited_s)
                self._try(candidates, layout, solution)
            elif isinstance(solution, Fathomed):
                most_s = max(most_s, solution.lower_bound_s + step_s + waited_s)
        if most_s < self._limit_s:
            self._try_likeliest(place, layout)
        return most_s

    def _try(self, candidates: Candidates, layout: Layout, solution: Solution) -> float:
        """Simulate the plan of a solution, return its step; it may be the best that is known."""
        own = priced(candidates.instance(layout), solution.cuts, solution.options)
        plan = ranked(candidates, layout, own)
        if not plan.prediction.fits:
            return math.inf
        self._found.append((candidates, plan))
        if plan.prediction.step_time_s < self._limit_s:
            self._owner, self._best = candidates, plan
        return plan.prediction.step_time_s

    def _choices(self, place: int, layout: Layout) -> Choices | None:
        """Return what the ranks of a layout may hold, if that can be told."""
        key = place, layout
        if key not in self._known_choices:
            self._known_choices[key] = of_chain(
                self._every[place], layout, self._limit_s, ways=self._effort.ways
            )
        return self._known_choices[key]

    def _cut_s(self, place: int, layout: Layout) -> float:
        """Return the least of a layout's cuts by paths; 0 if that cannot be told."""
        candidates, limit_s = self._every[place], self._limit_s
        loose = of_chain(candidates, layout, limit_s, ways=self._effort.ways, least=True)
        if loose is not None and loose.cut_s(limit_s) >= limit_s:
            return limit_s
        choices = self._choices(place, layout)
        found_s = 0.0 if choices is None else choices.cut_s(limit_s)
        if found_s >= self._limit_s:
            del self._known_choices[place, layout]
        return found_s

    def _settled_s(self, place: int, layout: Layout) -> float:
        """Return the least of a layout by its program; 0 if that cannot be told."""
        candidates = self._every[place]
        choices = self._choices(place, layout)
        del self._known_choices[place, layout]
        if choices is None:
            return 0.0
        return choices.optimum(
            self._limit_s,
            lambda solution: self._try(candidates, layout, solution),
            actions=self._allowed.actions,
            nodes=self._allowed.nodes,
            most_columns=self._allowed.columns,
            until=min(
                self._started + self._effort.seconds,
                time.process_time() + self._effort.program_s,
            ),
        )

    def _gap(self) -> float:
        return max(0.0, 1 - self._bound_s() / self._best.prediction.step_time_s)

    def _left_out(self, place: int, layout: Layout) -> bool:
        """Whether a layout is none of the space; most never have to be asked."""
        bounded = self._bounded[place]
        return bounded.refusal(layout) is not None or bounded.repeats(layout)

    def _bound_s(self) -> float:
        heap = self._left[LAYOUT]
        while heap:
            _, _, _, place, item = heap[0]
            assert isinstance(item, Layout)
            if not self._left_out(place, item):
                break
            heapq.heappop(heap)
        tops = [heap[0][0] for heap in self._left if heap]
        return min([self._best.prediction.step_time_s, *tops])

    def proof(self) -> Proof:
        """Return what is proven by now."""
        lower_bound_s = self._bound_s()
        lowest = min((heap[0] for heap in self._left if heap), default=None)
        if lowest is not None and lowest[0] >= self._limit_s:
            lowest = None
        item = lowest[-1] if lowest is not None else None
        first = item.first if isinstance(item, Family) else item
        return Proof(
            best=self._best,
            owner=self._owner,
            lower_bound_s=lower_bound_s,
            found=tuple(self._found),
            looked_at={name: self._spent[level] for level, name in enumerate(NAMES)},
            lowest=first.text() if first is not None else None,
        )


def _shape(place: int, layout: Layout) -> tuple[object, ...]:
    """What layouts have in common whose costs can be compared."""
    degrees = layout.tensor, layout.context, layout.expert, layout.pipeline, layout.data
    timetable = layout.schedule, layout.virtual_stages, layout.micro_batch
    return place, *degrees, *timetable, layout.offload, layout.gradient_wire, layout.compile


NAMES = (
    "configuration groups within memory",
    "parts with sharing",
    "parts within memory and with sharing",
    "layouts within memory",
    "layouts by their cuts",
    "layouts solved",
    "layouts by their programs",
    "",
)
