"""Data-parallel pipelines that differ from one group of devices to another.

Every group g of D_g devices has pipelines of its own, all with the same stages; groups have tensor
degree t, micro-batch b, schedule and loss in common.  Depths, cuts, recomputation and numbers of
micro-batches are chosen for each group.  A pipeline holds the whole model and all of its states
(ZeRO-0), and gradients of a layer are summed over the N ranks that hold it.  The program:

    minimise    max_g T_g(P_g, x_g, m_g)            simulated seconds of a step
    subject to  d_g = D_g / (t P_g)                 pipelines of a group of depth P_g
                sum_l x_g[l, s] >= 1, in order      stages of group g
                mem_r(x_g) <= capacity_g            peak bytes of each of its ranks r
                sum_g sum_{p on g} m_p = batch / b  micro-batches of a step
                m_p >= 1,  m_g = max_{p on g} m_p
                N = sum_g d_g                       ranks of a gradient's sum

Shares.  T_g(m), the least of group g over x_g, never falls with m, since a schedule of more
micro-batches takes longer on any stages and holds no fewer bytes.  So T seconds are enough exactly
if

    sum_g d_g max {m : T_g(m) <= T} >= batch / b    and each of these numbers is at least 1

and micro-batches that are too many are taken from single pipelines, so that those of one group
differ by 1 at most (`planner.solver.heterogeneous.micro_batch_shares`).  Groups are independent
of one another once T is fixed, which the bounds use: whatever is no more than T_g for all m, made
monotone, gives seconds that are never enough.

    computation, of all depths     max_P d_P max {m : L_P(m) <= T} for each group
    computation, of given depths   L_P(m) by the paces of a schedule, whole layers, memory ignored
    communication                  the bounds of the group's own layouts, sums over N ranks included
    both within memory             the least simulated step of the group's own pipelines at the most
                                   micro-batches that the bounds above allow

A rank sums its gradients when every rank that holds one of its layers has ended its backwards, so
T is at least what each group takes by itself.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.group_costs import GroupCosts, replicas_of
from meshwright.planner.costs.predict import unlike_prediction
from meshwright.planner.documents.plan import Layout, OtherPipelines
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.schedules import PLAIN, SCHEDULES, schedule_of
from meshwright.planner.schedules.closed_form import pace
from meshwright.planner.schedules.schedule import obstacle
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.goals import SplitSolution
from meshwright.planner.search.micro_batch_size import largest_micro_batch
from meshwright.planner.search.partition.layout_partition import boundaries_s, plan_with
from meshwright.planner.search.plan_candidate import Ranked, predict_candidate
from meshwright.planner.search.proof_account import (
    BOUNDS,
    COMPUTATION,
    MEMORY,
    OUT_OF_MEMORY,
    ROOM,
    UNFINISHED,
)
from meshwright.planner.search.queue import Bound, Next, Pruned, QueueEntry
from meshwright.planner.search.space import (
    Degrees,
    compiles,
    divisors,
    losses,
    most_tensor_parallel,
    plainest,
    tensor_overlaps,
    waits_for_host,
    weighs_compilation,
)
from meshwright.planner.search.spaces.group_stages import stages_of_split
from meshwright.planner.search.spaces.groups import GroupSpace
from meshwright.planner.search.spaces.mixed import MixedSpace
from meshwright.planner.solver.bounds.path_bounds import counted_s
from meshwright.planner.solver.heterogeneous.micro_batch_shares import (
    MonotonePace,
    Pipelines,
    Replica,
    fastest_counts,
)

if TYPE_CHECKING:
    from meshwright.planner.costs.sharding import PipelineReplicas
    from meshwright.planner.documents.cluster import DeviceGroup
    from meshwright.planner.documents.plan import Plan, Stage
    from meshwright.planner.schedules import Schedule
    from meshwright.planner.solver.graph_instance import GraphSolution

Floats = NDArray[np.float64]

HALVINGS = 24
"""Halvings of the seconds in which the least of a bound is looked for."""
MOST_SOLVED = 24
"""Layouts that are solved in the closed form, where no other plan is known."""
ROUNDS = 3
"""Times that stages are solved for shares, and shares worked out of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikeLayout(Layout):
    """Pipelines of several groups; as one layout the deepest of them, as often as there are any.

    `micro_batches` are the mean of a pipeline, rounded up.
    """

    depths: tuple[int, ...]
    """[group] Stages of each of its pipelines."""
    numbers: tuple[int, ...]
    """[group] Number of its pipelines."""

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.tensor * sum(p * d for p, d in zip(self.depths, self.numbers, strict=True))

    def text(self) -> str:
        """Return the layout as people write it, the depths and numbers of groups with a stroke.

        >>> UnlikeLayout(depths=(1, 4), numbers=(8, 2), pipeline=4, micro_batches=7).text()
        'tp=1 pp=1|4 dp=8|2 zero=0 1f1b micro_batch=1x7'
        """
        deepest = self.of_group(max(range(len(self.depths)), key=self.depths.__getitem__), 1)
        tensor, _, _, *others, _ = deepest.text().split(" ")
        depths, numbers = ("|".join(map(str, each)) for each in (self.depths, self.numbers))
        batches = f"micro_batch={self.micro_batch}x{self.micro_batches}"
        return " ".join([tensor, f"pp={depths}", f"dp={numbers}", *others, batches])

    def of_group(self, group: int, micro_batches: int) -> Layout:
        """Return the layout of the pipelines of one group, with these micro-batches each."""
        depth = self.depths[group]
        values = {field.name: getattr(self, field.name) for field in _FIELDS}
        values |= {
            "pipeline": depth,
            "data_replicate": self.numbers[group],
            "micro_batches": micro_batches,
            "schedule": self.schedule if depth > 1 else PLAIN,
        }
        return Layout(**values)


_FIELDS = fields(Layout)


@dataclass(frozen=True, slots=True)
class DepthBatch:
    """Layouts that differ in the depths of their groups alone; `base` has all else."""

    base: Layout
    depths: Sequence[tuple[int, ...]]
    """[layout][group]"""
    ranks: tuple[int, ...]
    """[group] Tensor groups, which are divided among the stages of pipelines."""
    micro_batches: int
    """Micro-batches of a step."""

    @property
    def first(self) -> UnlikeLayout:
        """The simplest."""
        return self.layout(self.depths[0])

    @property
    def size(self) -> int:
        """Number of layouts."""
        return len(self.depths)

    def layout(self, depths: tuple[int, ...]) -> UnlikeLayout:
        """Return the layout of some depths [group]."""
        numbers = tuple(ranks // depth for ranks, depth in zip(self.ranks, depths, strict=True))
        values = {field.name: getattr(self.base, field.name) for field in _FIELDS}
        values |= {
            "pipeline": max(depths),
            "data_replicate": sum(numbers),
            "micro_batches": -(-self.micro_batches // sum(numbers)),
        }
        return UnlikeLayout(**values, depths=depths, numbers=numbers)

    def layouts(self) -> Iterable[UnlikeLayout]:
        """Return all of them."""
        return map(self.layout, self.depths)

    corners = layouts


class KindSpace(MixedSpace):
    """The pipelines of one group, whose gradients are summed over those of all groups."""

    def candidate_of(self, split: SplitSolution[GraphSolution]) -> Ranked:
        """Return the plan of these pipelines, as if they were alone, and its prediction."""
        layout = split.layout
        samples = layout.micro_batch * layout.micro_batches * layout.data
        plan = plan_with(
            replace(self.request, job=replace(self.job, global_batch=samples)),
            layout,
            stages_of_split(self, split),
            step_s=split.objective_s,
            groups=self.planned_groups,
        )
        [group] = self.cluster.groups
        seats = self.costs.seats(layout, [group.name] * layout.stages)
        tables = self.costs.tables[group.name]
        return predict_candidate(plan, split.objective_s, self.model, tables, seats)


@dataclass(frozen=True, slots=True)
class UnlikeSplit:
    """Solved stages of each group's pipelines, and the micro-batches of these."""

    stages: tuple[tuple[Stage, ...], ...]
    """[group]"""
    shares: tuple[tuple[Pipelines, ...], ...]
    """[group] Pipelines with the most micro-batches first."""
    optimal: bool = False
    """Never known of a closed form: the simulated step decides."""


class UnlikeSpace(GroupSpace):
    """The layouts of some groups whose pipelines differ from group to group."""

    keeps_ties = False
    only_simulated = True
    candidates: GroupCandidates

    def __init__(self, candidates: GroupCandidates) -> None:
        """Search pipelines on the groups of these candidates, each used whole."""
        super().__init__(candidates)
        self._known_refusals: dict[Layout, str | None] = {}
        self._known_kinds: dict[object, list[KindSpace]] = {}
        self._known_passes: dict[object, Passes] = {}
        self._known_within: dict[object, LeastStages] = {}
        self._known_once_s: dict[object, float] = {}
        self._ends: dict[object, Floats] = {}
        self._solved = 0

    @property
    def levels(self) -> Sequence[str]:
        """Names of the bounds that exclude entries at each level."""
        return (BOUNDS[COMPUTATION], BOUNDS[ROOM], *(name for name, _ in self.bounds))

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [(BOUNDS[ROOM], lambda _: 0.0), (BOUNDS[MEMORY], self.least_s)]

    # Layouts.

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        assert isinstance(layout, UnlikeLayout)
        for at, group in enumerate(self.cluster.groups):
            kind = layout.of_group(at, 1)
            if kind not in self._known_refusals:
                alone = self.cluster.part((group,))
                self._known_refusals[kind] = refusal(self.model, alone, self.job, kind)
            reason = self._known_refusals[kind]
            if reason is not None:
                return reason
        return None

    def bundles(self, _: Counter[str]) -> Iterator[tuple[float, Any]]:
        """Yield every layout that keeps what the user fixed, those of any depths together."""
        batches = list(self._batches())
        self.candidates.know_passes([batch.base for batch in batches])
        for batch in batches:
            yield self._least_of_any_depth(batch), batch

    def _batches(self) -> Iterator[DepthBatch]:
        request, pins = self.request, self.pins
        if self.model.edges or not self._may_differ():
            return
        devices = [group.devices for group in self.cluster.groups]
        schedules = [
            name
            for name, schedule in SCHEDULES.items()
            if _is_offered(schedule) and pins.schedule in (None, name)
        ]
        for tensor in divisors(math.gcd(*devices)):
            most = largest_micro_batch(request, tensor)
            if tensor > most_tensor_parallel(self.model) or pins.tensor not in (None, tensor):
                continue
            ranks = tuple(number // tensor for number in devices)
            depths = [
                [
                    depth
                    for depth in divisors(each)
                    if depth <= len(self.model.chain) and self._holds_states(at, tensor, depth)
                ]
                for at, each in enumerate(ranks)
            ]
            every = list(itertools.product(*depths))
            for size in divisors(self.job.global_batch):
                if (size > most and pins.micro_batch is None) or pins.micro_batch not in (
                    None,
                    size,
                ):
                    continue
                count = self.job.global_batch // size
                some = [
                    depths_of_groups
                    for depths_of_groups in every
                    if count >= sum(n // d for n, d in zip(ranks, depths_of_groups, strict=True))
                ]
                for name in schedules:
                    # Without a pipeline all schedules are one.
                    among = (
                        some if name == schedules[0] else [each for each in some if max(each) > 1]
                    )
                    if not among:
                        continue
                    for base in self._bases(tensor, size, name):
                        yield DepthBatch(base, among, ranks, count)

    def _holds_states(self, at: int, tensor: int, depth: int) -> bool:
        """Return whether weights and optimizer states fit the stages of a pipeline, all together.

        Gradients are left out: with a single micro-batch they are made one by one.
        """
        group = self.cluster.groups[at]
        layout = Layout(tensor=tensor, pipeline=depth, data_replicate=2, micro_batches=2)
        states = self.costs.tables[group.name].states(layout)
        each = [of_kind.parameters_bytes + of_kind.optimizer_bytes for of_kind in states]
        needed = float(self.candidates.counts @ np.array(each))
        return needed <= depth * group.accelerator.memory_bytes

    def _may_differ(self) -> bool:
        """Return whether pins leave pipelines that differ."""
        pins = self.pins
        return (
            pins.pipelines != "alike"
            and all(each in (None, 1) for each in (pins.context, pins.expert, pins.virtual_stages))
            and pins.zero in (None, 0)
            and {pins.pipeline, pins.data, pins.data_shard, pins.order} == {None}
            and pins.offload in (None, "none")
            and pins.gradient_compression in (None, "full")
            and pins.graphs in (None, "none")
            and not pins.require
            and not pins.divided - {"tensor"}
        )

    def _bases(self, tensor: int, size: int, schedule: str) -> Iterator[Layout]:
        """Yield layouts of one pipeline, with every way to compute the loss and to compile."""
        request = self.request
        degrees = Degrees(tensor=tensor, context=1, expert=1, pipeline=2, data=1)
        blocks = compiles(request, degrees, schedule)
        compiled = [blocks]
        if weighs_compilation(request, blocks) and waits_for_host(request, degrees, size):
            compiled.append("none")
        plain = replace(
            plainest(request, replace(degrees, pipeline=1)),
            micro_batch=size,
            micro_batches=1,
            schedule=schedule,
            compile=blocks,
            graphs="none",
        )
        for overlapped, blocks_are, loss in itertools.product(
            tensor_overlaps(plain, request, self.candidates.refusal),
            compiled,
            losses(request, schedule),
        ):
            if not overlapped.overlaps_tensors or blocks_are == "block":
                yield replace(overlapped, compile=blocks_are, loss=loss)

    groups = 2

    def expand(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Bound batches within memory, then yield their layouts."""
        for entry in some:
            batch: DepthBatch = entry.item
            if level == 0:
                yield max(entry.bound_s, self._least_within_memory(batch)), 1, batch
                continue
            for depths in batch.depths:
                part = replace(batch, depths=[depths])
                least_s = self._least_of_any_depth(part, within=True)
                yield max(entry.bound_s, least_s), self.groups, batch.layout(depths)

    # Bounds.

    def _least_of_any_depth(self, batch: DepthBatch, *, within: bool = False) -> float:
        """Return seconds that no layout of a batch takes less than, by computation alone."""
        tables = [
            [
                (batch.ranks[at] // depth, self._ends_s(batch, at, depth, within=within))
                for depth in dict.fromkeys(depths[at] for depths in batch.depths)
            ]
            for at in range(len(batch.ranks))
        ]
        return _least_enough_s(tables, batch.micro_batches)

    def _least_within_memory(self, batch: DepthBatch) -> float:
        """Return the same with what stages hold, or the limit.

        Depths that do the most are bounded first: without them the others may do too little.
        """
        if self.limit_s < math.inf:
            most = [
                {
                    depth: self._most(batch, at, depth, within=False)
                    for depth in dict.fromkeys(depths[at] for depths in batch.depths)
                }
                for at in range(len(batch.ranks))
            ]
            order = [
                (count, at, depth)
                for at, of_group in enumerate(most)
                for depth, count in of_group.items()
            ]
            for _, at, depth in sorted(order, reverse=True):
                if sum(max(of_group.values()) for of_group in most) < batch.micro_batches:
                    return self.limit_s
                most[at][depth] = self._most(batch, at, depth, within=True)
        return self._least_of_any_depth(batch, within=True)

    @property
    def limit_s(self) -> float:
        """Seconds from which on layouts are of no interest."""
        return math.inf

    def _most(self, batch: DepthBatch, at: int, depth: int, *, within: bool) -> int:
        """Return how many micro-batches pipelines of one depth may do within the limit."""
        ends_s = self._ends_s(batch, at, depth, within=within)
        each = int(np.searchsorted(ends_s, self.limit_s, side="left"))
        return each * (batch.ranks[at] // depth)

    def _ends_s(self, batch: DepthBatch, at: int, depth: int, *, within: bool = False) -> Floats:
        """[micro-batches - 1] Seconds that pipelines of one depth on a group take at least.

        Memory counts if they are `within` it.
        """
        base, number = batch.base, batch.ranks[at] // depth
        most = -(-batch.micro_batches // number)
        key = base, at, depth, most, within
        if key in self._ends:
            return self._ends[key]
        passes = self._passes(base, at)
        actions_s = 2 * depth * passes.action_s if depth > 1 else 0.0
        of_stages = LeastStages(passes.stage_s(depth), passes.whole_s + actions_s)
        ends_s = self._paced_s(base, at, depth, most, of_stages)
        if within:
            fewest = min(depth, most)
            held = self._within_memory(base, at, depth, fewest)
            held_s = self._paced_s(base, at, depth, most, held)[fewest - 1 :]
            ends_s = np.append(ends_s[: fewest - 1], np.maximum(ends_s[fewest - 1 :], held_s))
        self._ends[key] = np.maximum.accumulate(ends_s)
        return self._ends[key]

    def _paced_s(self, base: Layout, at: int, depth: int, most: int, stages: LeastStages) -> Floats:
        """[micro-batches - 1] Seconds of a step by those of stages of one depth on a group."""
        if max(stages) == math.inf:
            return np.full(most, math.inf)
        passes = self._passes(base, at)
        every = self._paces(base, at, depth, most)
        steps_s = (steady * stages.slowest_s + fill * stages.whole_s for steady, fill in every)
        seconds = np.array(reduce(np.maximum, steps_s))
        return (1 - ROUNDING) * (seconds - self._credit_s(base, at, depth)) + passes.step_s

    def _credit_s(self, base: Layout, at: int, depth: int) -> float:
        """Return the seconds that a split backward takes back."""
        if depth == 1 or not schedule_of(base.schedule).splits_backward:
            return 0.0
        return self._passes(base, at).credit_s * (depth - 1) / depth

    def _paces(
        self, base: Layout, _: int, depth: int, most: int
    ) -> Sequence[tuple[Floats | float, Floats | float]]:
        """`steady` and `fill` [micro-batches - 1] of what a step takes at least."""
        return [_coefficients(base.schedule if depth > 1 else PLAIN, depth, most)]

    def _passes(self, base: Layout, at: int) -> Passes:
        """Return what layers take at their fastest on a group, memory ignored."""
        key = replace(base, schedule=PLAIN), at
        if key not in self._known_passes:
            times_s, credits_s = self.candidates.passes_s(base)
            tables = self.costs.tables[self.cluster.groups[at].name]
            self._known_passes[key] = Passes(
                layers=self.candidates.counts,
                layer_s=times_s[at],
                credit_s=float(self.candidates.counts @ credits_s[at]),
                action_s=tables.action_s,
                step_s=tables.step_s,
            )
        return self._known_passes[key]

    def _within_memory(self, base: Layout, at: int, depth: int, micro_batches: int) -> LeastStages:
        """Return the least seconds of stages that fit with some micro-batches, or with more.

        They are those of layouts that differ in how they compute the loss alone.
        """
        key = replace(base, loss=None), at, depth, micro_batches
        if key not in self._known_within:
            layout = replace(
                base, pipeline=depth, data_replicate=2, micro_batches=micro_batches, loss=None
            )
            [chain] = self._separate_spaces[at].chains(layout, any_loss=True).values()
            [costs] = self._separate_spaces[at].costs_of(layout)
            waits_s = costs.waits * costs.transfer_s
            sending = replace(
                costs, transfer_s=waits_s, boundary_s=waits_s + costs.boundary_s - costs.transfer_s
            )
            split = depth > 1 and layout.executed_schedule.splits_backward
            exposed_s = [0.0] * depth if split else boundaries_s(sending, layout)
            computing = replace(
                chain,
                stages=tuple(
                    replace(stage, exposed_s=waited_s)
                    for stage, waited_s in zip(chain.stages, exposed_s, strict=True)
                ),
                kinds=tuple(
                    tuple(replace(option, sync_s=0.0) for option in table) for table in chain.kinds
                ),
                credits_s=(),
                forward_apart=False,
            )
            self._known_within[key] = LeastStages(
                counted_s(replace(computing, steady=1.0, fill=0.0)),
                counted_s(replace(computing, steady=0.0, fill=1.0)),
            )
        return self._known_within[key]

    @cached_property
    def _separate_spaces(self) -> list[KindSpace]:
        """[group] Spaces of its pipelines, of which no other group has any."""
        return [KindSpace(self._candidates_of(group, self.costs)) for group in self.cluster.groups]

    def kinds_of(self, layout: UnlikeLayout) -> list[KindSpace]:
        """[group] Spaces of its own pipelines beside those of the others."""
        key, replicas = self._replicas(layout)
        if key not in self._known_kinds:
            among = self.costs.among(replicas)
            self._known_kinds[key] = [
                KindSpace(self._candidates_of(group, among)) for group in self.cluster.groups
            ]
        times_s, credits_s = self.candidates.passes_s(layout)
        for at, space in enumerate(self._known_kinds[key]):
            assert isinstance(space.candidates, GroupCandidates)
            space.candidates.keep_passes(layout, times_s[at : at + 1], credits_s[at : at + 1])
        return self._known_kinds[key]

    def _replicas(self, layout: UnlikeLayout) -> tuple[object, PipelineReplicas]:
        """Return the pipelines of a layout, and what tells them from those of others."""
        replicas = replicas_of(
            self.cluster,
            [(layout.of_group(at, 1), [group]) for at, group in enumerate(self.cluster.groups)],
        )
        levels = tuple((level.tier.name, level.members) for level in replicas.levels)
        return (replicas.number, levels), replicas

    def _candidates_of(self, group: DeviceGroup, costs: GroupCosts) -> GroupCandidates:
        """Return the candidates of one group with these costs."""
        request = self.request.on_groups((group,))
        tables = {group.name: costs.tables[group.name]}
        activations = self.candidates.activations
        return GroupCandidates(request, self.whole, GroupCosts(request, activations, tables))

    def once_s(self, layout: UnlikeLayout, at: int) -> float:
        """Return the least seconds of a pipeline's ranks together once per step, in a group."""
        key = *self._replicas(layout)[0], layout.tensor, at  # type: ignore[misc]
        if key not in self._known_once_s:
            undivided = replace(layout.of_group(at, 2), pipeline=1, schedule=PLAIN)
            [costs] = self.kinds_of(layout)[at].costs_of(undivided)
            least_s = [min(row.sync_s for row in table) for table in costs.kinds.values()]
            self._known_once_s[key] = float(self.candidates.counts @ np.array(least_s))
        return self._known_once_s[key]

    def bounded_ends_s(self, layout: UnlikeLayout) -> list[tuple[int, Floats]]:
        """[group] Number of its pipelines, and their least seconds [micro-batches - 1]."""
        base = Layout(**{field.name: getattr(layout, field.name) for field in _FIELDS})
        base = replace(base, pipeline=1, data_replicate=1, micro_batches=1)
        ranks = tuple(p * d for p, d in zip(layout.depths, layout.numbers, strict=True))
        count = self.job.global_batch // layout.micro_batch
        batch = DepthBatch(base, [layout.depths], ranks, count)
        return [
            (number, self._with_once_s(layout, at, self._ends_s(batch, at, depth, within=True)))
            for at, (depth, number) in enumerate(zip(layout.depths, layout.numbers, strict=True))
        ]

    def _with_once_s(self, layout: UnlikeLayout, at: int, ends_s: Floats) -> Floats:
        """Return seconds [micro-batches - 1] with what a rank does once per step at least."""
        longest = self.once_s(layout, at) / layout.depths[at]
        return ends_s + longest * (np.arange(len(ends_s)) > 0)

    def least_s(self, layout: Layout) -> float | Pruned:
        """Return seconds that no plan of a layout takes less than."""
        assert isinstance(layout, UnlikeLayout)
        least_s = _least_enough_s(
            [[pipelines] for pipelines in self.bounded_ends_s(layout)],
            self.job.global_batch // layout.micro_batch,
        )
        return least_s if least_s < math.inf else Pruned(OUT_OF_MEMORY)

    def _bounded_shares(self, layout: UnlikeLayout) -> list[tuple[Pipelines, ...]] | None:
        """Return shares by what pipelines take at least."""
        paces = [
            (number, MonotonePace(partial(_entry, ends_s), len(ends_s)))
            for number, ends_s in self.bounded_ends_s(layout)
        ]
        return fastest_counts(paces, self.job.global_batch // layout.micro_batch)

    # Plans.

    def solve(self, layout: Layout, cutoff_s: float) -> SplitSolution[UnlikeSplit] | Pruned:
        """Return good stages and shares of a layout, in the closed form."""
        assert isinstance(layout, UnlikeLayout)
        least_s = self.least_s(layout)
        if isinstance(least_s, Pruned):
            return least_s
        self._solved += 1
        if self._solved > MOST_SOLVED:
            return Pruned(UNFINISHED, least_s)
        kinds, count = self.kinds_of(layout), self.job.global_batch // layout.micro_batch
        shares = self._bounded_shares(layout)
        best: SplitSolution[UnlikeSplit] | None = None
        asked: list[tuple[int, ...]] = []
        while shares is not None and len(asked) < ROUNDS:
            tops = tuple(of_group[0].micro_batches for of_group in shares)
            if tops in asked:
                break
            asked.append(tops)
            solved = [
                kind.solve(layout.of_group(at, top), math.inf)
                for at, (kind, top) in enumerate(zip(kinds, tops, strict=True))
            ]
            splits = [split for split in solved if isinstance(split, SplitSolution)]
            if len(splits) < len(solved):
                break
            step_s = max(split.objective_s for split in splits)
            if best is None or step_s < best.objective_s:
                stages = tuple(
                    stages_of_split(kind, split) for kind, split in zip(kinds, splits, strict=True)
                )
                unlike = UnlikeSplit(stages, tuple(shares))
                best = SplitSolution(step_s, min(least_s, step_s), layout, unlike)
            paces = [
                (number, split_pace(split, top))
                for number, split, top in zip(layout.numbers, splits, tops, strict=True)
            ]
            shares = fastest_counts(paces, count)
        if best is None or best.objective_s >= cutoff_s:
            return Pruned(UNFINISHED, least_s)
        return best

    def candidate_of(self, split: SplitSolution[UnlikeSplit]) -> Ranked:
        """Return the plan of stages and shares, and its prediction."""
        assert isinstance(split.layout, UnlikeLayout)
        plan = self.plan_of(split.layout, split.split.stages, split.split.shares, split.objective_s)
        return self.predict_plan(plan, split.objective_s)

    def plan_of(
        self,
        layout: UnlikeLayout,
        stages: Sequence[tuple[Stage, ...]],
        shares: Sequence[tuple[Pipelines, ...]],
        step_s: float,
    ) -> Plan:
        """Return the plan of stages and shares, both by group; the deepest pipelines come first."""
        every = [(at, pipelines) for at, of_group in enumerate(shares) for pipelines in of_group]
        first, *others = sorted(every, key=lambda kind: -layout.depths[kind[0]])
        at, pipelines = first
        mesh = replace(
            layout.of_group(at, pipelines.micro_batches),
            data_replicate=pipelines.number,
            schedule=layout.schedule,
        )
        return plan_with(
            self.request,
            mesh,
            stages[at],
            step_s=step_s,
            groups=self.planned_groups,
            others=tuple(
                OtherPipelines(
                    data=pipelines.number,
                    micro_batches=pipelines.micro_batches,
                    stages=stages[at],
                )
                for at, pipelines in others
            ),
        )

    def predict_plan(self, plan: Plan, objective_s: float) -> Ranked:
        """Return a plan with its prediction."""
        prediction = unlike_prediction(plan, self.request, self.costs)
        prediction = prediction.on(self.whole.devices, used=plan.ranks)
        return Ranked(
            plan=plan,
            objective_s=objective_s,
            prediction=prediction.model_copy(update={"plan_digest": plan.digest}),
        )


class LeastStages(NamedTuple):
    """Least seconds of the slowest stage of a pipeline, and of all its stages, for a micro-batch;
    inf if layers do not fit."""

    slowest_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Seconds of a micro-batch's layers on one group at their fastest."""

    layers: NDArray[np.intp]
    """[kind] Number of layers."""
    layer_s: Floats
    """[kind] Seconds of each, both ways."""
    credit_s: float
    action_s: float
    step_s: float

    @property
    def whole_s(self) -> float:
        """Seconds of all layers."""
        return float(self.layers @ self.layer_s)

    def stage_s(self, depth: int) -> float:
        """Least seconds of the slowest of some stages, with whole layers."""
        if depth == 1:
            return self.whole_s
        mean_s = self.whole_s / depth
        each_s = -(-self.layers // depth) * self.layer_s
        return max(mean_s, float(each_s.max())) + 2 * self.action_s


def split_pace(split: SplitSolution[GraphSolution], micro_batches: int) -> Replica:
    """Return the pace of a split that was solved for some micro-batches."""
    steady_s = max(split.split.split.stage_s)
    fill_s = split.objective_s - (micro_batches - 1) * steady_s
    return Replica(fill_s=max(0.0, fill_s), steady_s=steady_s)


def _entry(ends_s: Floats, micro_batches: int) -> float:
    return float(ends_s[micro_batches - 1])


def _is_offered(schedule: Schedule) -> bool:
    """Return whether unlike pipelines may run a schedule: one stage a rank, no stale weights."""
    single = schedule.takes(1) and not schedule.several_stages
    shape = {"stages": 2, "micro_batches": 1}
    return single and not schedule.stale and obstacle(schedule.name, **shape) is None


@lru_cache(maxsize=256)
def _coefficients(schedule: str, ranks: int, most: int) -> tuple[Floats, Floats]:
    """[micro-batches - 1] `steady` and `fill` of the closed form."""
    each = [pace(schedule, ranks=ranks, micro_batches=count) for count in range(1, most + 1)]
    steady, fill = np.array(each).T
    return steady, fill


def _least_enough_s(tables: Sequence[Sequence[tuple[int, Floats]]], micro_batches: int) -> float:
    """Return seconds that are not enough for the micro-batches of a step, the most that are known.

    `tables` [group][depth] are the number of pipelines, and seconds [micro-batches - 1] of each.
    """
    low_s = max(min(float(ends_s[0]) for _, ends_s in group) for group in tables)
    high_s = max(min(float(ends_s[-1]) for _, ends_s in group) for group in tables)

    def enough(seconds: float) -> bool:
        done = sum(
            max(n * int(np.searchsorted(ends_s, seconds, side="right")) for n, ends_s in group)
            for group in tables
        )
        return done >= micro_batches

    if enough(low_s) or low_s == math.inf:
        return low_s
    if not enough(high_s) or high_s == math.inf:
        every = np.concatenate([ends_s for group in tables for _, ends_s in group])
        high_s = float(every[np.isfinite(every)].max(initial=low_s))
        if not enough(high_s):
            return math.inf
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if enough(middle_s) else (middle_s, high_s)
    return low_s
