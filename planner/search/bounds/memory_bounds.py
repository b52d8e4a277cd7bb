"""Lower bounds of ranks' memory as sums over layers: the bytes by which a solver looks for a split.

What they hold exactly, `planner.costs.memory.rank_memory` says of each split that is found.  Here
counts what a rank has at one moment (planner.schedules.memory_peaks), in the backward of the last
layer of the stage that acts.  With a_c micro-batches of stage c alive, w_c that wait for W, a rank
of one stage has

    a Σ stored + w Σ kept_bytes + Σ resident + the working memory of one that may be last

and a rank of V stages, S_c being the stored bytes of the n_c like layers of stage c, for any α

    Σ a_c S_c  =  α Σ S_c + Σ (a_c - α) S_c  >=  α Σ S_c + Σ (a_c - α) n_c s_c

with s_c the most that a like layer may store where a_c < α, and else the least.  The n_c depend on
the n like layers of the rank alone (planner.search.partition.stage_counts), and what depends on
them is bounded by a line in n that meets it at the mean rank.  Layers that store less come first,
so α is the a_c of the stage up to which the mean rank must store less to fit.

What the ranks of a pipeline hold at the moments by which their bytes are bounded from below.

A rank of one stage with whole backwards has its most micro-batches in flight.  Any other may be
fullest at one of two moments (planner.schedules.memory_peaks): with most alive, or, where layers
recompute much, with most that waits for W.  `binding` says which of the two a rank's layers need
more room for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layer_strategy import StrategyParts, least_resident
from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank
from meshwright.planner.costs.memory.rank_memory import in_flight_at_most
from meshwright.planner.documents.plan import Layout
from meshwright.planner.schedules.memory_peaks import fullest
from meshwright.planner.schedules.schedule import rank_of_stage, splits_backward
from meshwright.planner.schedules.schedule_record import DEFERRED, LEAN
from meshwright.planner.search.bounds.multi_stage_memory import (
    RankMemory,
    StageMemorySpread,
    evenly_but,
)
from meshwright.planner.search.partition.stage_counts import Shares, shares_of

if TYPE_CHECKING:
    from meshwright.planner.solver.partition_problem import Option


class MemoryMoment(NamedTuple):
    """One moment of every rank; counts of micro-batches are [stage of the rank, rank] or [rank]."""

    alive: Floats
    waiting: Floats
    received: Floats
    """`alive` of all stages that receive anything: what came may be among what layers store."""
    sent: Floats
    """The same of stages that send."""
    first_acts: Floats
    """1 where the stage acts that has the model's first layer, of ranks of several stages."""
    last_acts: Floats
    """1 where the model's last layer acts."""
    bare: Floats
    """1 where none of the like layers may act."""

    def of_ranks(self, ranks: NDArray[np.intp]) -> MemoryMoment:
        """Return those of some ranks."""
        return MemoryMoment(*(column[..., ranks] for column in self))

    @staticmethod
    def together(moments: Sequence[MemoryMoment]) -> MemoryMoment:
        """Return the ranks of several pipelines in a row, with as many stages as any has."""
        depth = max(len(load.alive) for load in moments)
        some = [
            load._replace(
                alive=_pad_stages(load.alive, depth), waiting=_pad_stages(load.waiting, depth)
            )
            for load in moments
        ]
        return MemoryMoment(
            *(np.concatenate(columns, axis=-1) for columns in zip(*some, strict=True))
        )


@lru_cache(maxsize=1 << 12)
def loads_of(
    kinds: tuple[str, ...], schedule: str, ranks: int, micro_batches: int, virtual_stages: int
) -> tuple[MemoryMoment, ...]:
    """Return the moments of ranks that share a chain of `kinds`, the one with most alive first."""
    layout = Layout(
        pipeline=ranks,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
    )
    if not counted_by_rank(layout):
        return (_of_one(layout),)
    weights = (DEFERRED, LEAN) if splits_backward(schedule) else (DEFERRED,)
    return tuple(_of_several(kinds, layout, deferred) for deferred in weights)


def _of_one(layout: Layout) -> MemoryMoment:
    ranks, at = layout.pipeline, np.arange(layout.pipeline)
    alive = np.array([float(in_flight_at_most(layout, rank)) for rank in range(ranks)])
    # Where all forwards come first, whole gradients never lie beside all micro-batches.
    backward = alive - ((alive == layout.micro_batches) & (alive > 1))
    return MemoryMoment(
        alive=backward[None],
        waiting=np.zeros((1, ranks)),
        received=alive * (at > 0),
        sent=alive * (at < ranks - 1),
        first_acts=np.zeros(ranks),
        last_acts=1.0 * (at == ranks - 1),
        bare=np.zeros(ranks),
    )


def _of_several(kinds: tuple[str, ...], layout: Layout, deferred: float) -> MemoryMoment:
    name, ranks, virtual = layout.schedule, layout.pipeline, layout.virtual_stages
    most = fullest(
        name,
        ranks=ranks,
        micro_batches=layout.micro_batches,
        virtual_stages=virtual,
        deferred=deferred,
    )
    home = rank_of_stage(name, stages=layout.stages, virtual_stages=virtual)
    first, last = (1.0 * (np.arange(ranks) == home[end]) for end in (0, -1))
    first_acts, last_acts = first * (most.place == 0), last * (most.place == virtual - 1)
    shares = shares_of(kinds, name, ranks, virtual) if virtual > 1 else None
    bare = np.zeros(ranks)
    if shares is not None:
        bare = np.maximum(first_acts, last_acts if shares.folded else 0.0)
        bare = np.maximum(bare, last if shares.is_relieved(home[-1]) else 0.0)
    alive = most.holding.sum(axis=0)
    return MemoryMoment(
        alive=most.holding,
        waiting=most.waiting,
        received=alive - first * most.holding[0],
        sent=alive - last * most.holding[-1],
        first_acts=first_acts,
        last_acts=last_acts,
        bare=bare,
    )


def binding(
    early: MemoryMoment,
    late: MemoryMoment,
    *,
    room_bytes: Floats,
    sent_bytes: Floats,
    resident: Floats,
    kept: Floats,
    least_stored: Floats,
    most_stored: Floats,
    depths: NDArray[np.intp] | int,
) -> MemoryMoment:
    """Return of every rank the moment at which like layers need more room; figures are [rank].

    `room_bytes` are those of one like layer, which has the others, and `sent_bytes` its part of
    what is stored of a micro-batch that was sent; ranks have `depths` stages.  At the early moment
    it may store so much of what is alive as fits.
    """
    alive, alive_late = (load.alive.sum(axis=0) / depths for load in (early, late))
    beside, beside_late = (
        load.waiting.sum(axis=0) / depths * kept + load.sent * sent_bytes for load in (early, late)
    )
    stored = np.clip((room_bytes - resident - beside) / alive, least_stored, most_stored)
    bind = alive_late * stored + beside_late > alive * stored + beside
    return MemoryMoment(*(np.where(bind, b, a) for a, b in zip(early, late, strict=True)))


def _pad_stages(numbers: Floats, depth: int) -> Floats:
    """[stage, rank] Numbers for as many stages as any rank has."""
    padded = np.zeros((depth, numbers.shape[1]))
    padded[: len(numbers)] = numbers
    return padded


Floats = NDArray[np.float64]
Choices = Mapping[str, Sequence[StrategyParts]]
"""By kind, what its layers may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Counts and bytes of a stage of the solver (planner.solver.partition_problem.StageLimits)."""

    in_flight: float
    waiting: float
    fixed_bytes: float


class BytesBounds:
    """Bounds on the bytes of one layout's ranks."""

    def __init__(
        self,
        chain: tuple[str, ...],
        shares: Shares | None,
        costs: LayoutCosts,
        layout: Layout,
        choices: Choices,
        capacity_bytes: float,
        narrowest_bytes: float | None = None,
    ) -> None:
        """`capacity_bytes` is what a rank has, where bounds are to be tight.

        `narrowest_bytes` are the least that crosses any cut of a graph, whose layers have no one
        order; None says that they form a chain.
        """
        self._chain, self._shares = chain, shares
        self._narrowest_bytes = narrowest_bytes
        self._costs, self._layout = costs, layout
        self._choices = choices
        self._by_rank = counted_by_rank(layout)
        self._working = self._working_by_kind()
        self._load = self._binding(capacity_bytes)
        fixed_bytes = self._buffers_bytes()
        counted = StageMemorySpread(self._load.alive[0], self._load.waiting[0], fixed_bytes)
        if shares is not None:
            self._acting = self._working_of_acting(shares)
            counted = self._of_several(shares, fixed_bytes + self._acting, capacity_bytes)
        self.ranks: tuple[RankBytes, ...] = tuple(
            RankBytes(in_flight=in_flight, waiting=waiting, fixed_bytes=fixed)
            for in_flight, waiting, fixed in zip(
                *(column.tolist() for column in counted), strict=True
            )
        )

    def option(self, at: int, option: Option, part: StrategyParts) -> Option:
        """Return the option of a layer of the chain with what it has at least."""
        shares = self._shares
        if shares is None:
            stored, working = part.stored_bytes, self._working[self._chain[at]]
            if at == len(self._chain) - 1 and self._narrowest_bytes is None:
                # It has one micro-batch less beside it while the layers before act.
                in_flight = self.ranks[-1].in_flight
                stored *= (in_flight - 1.0) / in_flight
                working = part.backward_transient_bytes + part.stored_bytes
            return replace(
                option,
                stored_bytes=stored,
                kept_bytes=part.figures.kept_bytes if self._by_rank else 0.0,
                resident_bytes=self._resident(part),
                transient_bytes=working,
            )
        if shares.run.before <= at < shares.run.before + shares.run.alike:
            # What like layers hold whatever they store differs from rank to rank.
            like = self.like
            return replace(
                option,
                stored_bytes=part.stored_bytes - like.least_stored,
                kept_bytes=like.carrier,
                resident_bytes=0.0,
                transient_bytes=0.0,
            )
        rank, alive, waiting = self.at_end(at)
        working = 0.0
        if at == len(self._chain) - 1 and self._load.last_acts[rank]:
            alive -= 1.0
            working = part.backward_transient_bytes + part.stored_bytes - self._acting[rank]
        stored_bytes = alive * part.stored_bytes + waiting * part.figures.kept_bytes
        return replace(
            option,
            stored_bytes=0.0,
            kept_bytes=0.0,
            resident_bytes=part.states.resident_bytes + stored_bytes,
            transient_bytes=max(0.0, working),
        )

    def at_end(self, at: int) -> tuple[int, float, float]:
        """Return the rank of a layer before or behind the like ones, what is alive and waits."""
        assert self._shares is not None
        home, first = self._shares.home, at < self._shares.run.before
        rank, place = (home[0], 0) if first else (home[-1], -1)
        return rank, float(self._load.alive[place, rank]), float(self._load.waiting[place, rank])

    @cached_property
    def like(self) -> Like:
        """Bytes of like layers; of all layers of a chain whose ranks have one stage."""
        run = None if self._shares is None else self._shares.run
        kinds = set(self._chain) if run is None else {self._chain[run.before]}
        parts = [part for kind in kinds for part in self._choices[kind]]
        stored = [part.stored_bytes for part in parts]
        return Like(
            least_stored=min(stored),
            most_stored=max(stored),
            kept=min(part.figures.kept_bytes for part in parts),
            resident=min(part.states.resident_bytes for part in parts),
        )

    def _binding(self, capacity_bytes: float) -> MemoryMoment:
        """Return the moments that count, those at which a mean rank needs the most room."""
        layout, like = self._layout, self.like
        early, *others = loads_of(
            self._chain,
            layout.schedule,
            layout.pipeline,
            layout.micro_batches,
            layout.virtual_stages,
        )
        if not others:
            return early
        ranks, layers_each = np.ones(layout.pipeline), layout.pipeline / len(self._chain)
        return binding(
            early,
            *others,
            room_bytes=capacity_bytes * layers_each * ranks,
            sent_bytes=self._costs.keeps_sent * self._costs.boundary_bytes * layers_each * ranks,
            resident=like.resident * ranks,
            kept=like.kept * ranks,
            least_stored=like.least_stored * ranks,
            most_stored=like.most_stored * ranks,
            depths=layout.virtual_stages,
        )

    def _buffers_bytes(self) -> Floats:
        """[rank] The pipeline's buffers at that moment."""
        layout, load, costs = self._layout, self._load, self._costs
        if layout.pipeline == 1:
            return np.zeros(1)
        if self._narrowest_bytes is not None and not self._by_rank:
            passed = np.maximum(load.received, load.sent)
            return (passed + 2) * self._narrowest_bytes
        stored = any(
            part.stores_input for kind in set(self._chain[1:]) for part in self._choices[kind]
        )
        passed = load.received * (not stored) + load.sent * costs.keeps_sent
        each_bytes = (
            costs.boundary_bytes if self._narrowest_bytes is None else self._narrowest_bytes
        )
        return (passed + 2 * layout.virtual_stages) * each_bytes

    def _working_of_acting(self, shares: Shares) -> Floats:
        """[rank] The least working memory of the last layer that acts.

        That is a like one, if the stage that acts has any.
        """
        run, chain, load = shares.run, self._chain, self._load
        like = self._working_of(chain[run.before])
        working = np.full(self._layout.pipeline, like)
        before, behind = chain[: run.before], chain[run.before + run.alike :]
        for kinds, rank, acts in (
            (before, shares.home[0], load.first_acts[shares.home[0]]),
            (behind, shares.home[-1], load.last_acts[shares.home[-1]]),
        ):
            if acts:
                working[rank] = min([working[rank], *map(self._working_of, kinds)])
        return working

    def _of_several(
        self, shares: Shares, fixed_bytes: Floats, capacity_bytes: float
    ) -> StageMemorySpread:
        """[rank] What ranks of several stages count: see `option` for their layers."""
        run, like, load = shares.run, self.like, self._load
        free_bytes = capacity_bytes - fixed_bytes
        for at in (*range(run.before), *range(run.before + run.alike, len(self._chain))):
            rank, alive, waiting = self.at_end(at)
            free_bytes[rank] -= min(
                part.states.resident_bytes
                + alive * part.stored_bytes
                + waiting * part.figures.kept_bytes
                for part in self._choices[self._chain[at]]
            )
        ones = np.ones(shares.ranks)
        ranks = RankMemory(
            alive=load.alive,
            kept_bytes=load.waiting * like.kept,
            free_bytes=free_bytes,
            number=run.alike / shares.ranks * ones,
            least_stored=like.least_stored * ones,
            most_stored=like.most_stored * ones,
            resident=like.resident * ones,
        )
        relieved = np.array([shares.is_relieved(rank) for rank in range(shares.ranks)])
        split = evenly_but(ranks, relieved)
        always = split.in_flight * like.least_stored + like.resident
        # A stage of the solver has no layers of less than nothing.
        each_bytes = np.maximum(split.each_bytes, -always)
        less_bytes = run.alike * (each_bytes - split.each_bytes)
        return StageMemorySpread(
            split.in_flight,
            (each_bytes + always) / like.carrier,
            fixed_bytes + split.fixed_bytes - less_bytes,
        )

    def _resident(self, part: StrategyParts) -> float:
        """Return what a layer of a rank of one stage has at the moment that counts."""
        layout = self._layout
        return least_resident(
            part.states,
            whole=self._by_rank,
            forwards_first=layout.executed_schedule.forwards_first,
            once=layout.micro_batches == 1,
        )

    def _working_by_kind(self) -> dict[str, float]:
        """By kind, the least working memory of any layer from its first one on but the last.

        Of a graph, whose layers have no one order, that of any layer.
        """
        if self._narrowest_bytes is not None:
            return dict.fromkeys(self._chain, min(map(self._working_of, set(self._chain))))
        result: dict[str, float] = {self._chain[-1]: math.inf}
        by_kind = {kind: self._working_of(kind) for kind in set(self._chain[:-1])}
        least_bytes = math.inf
        for kind in reversed(self._chain[:-1]):
            least_bytes = min(least_bytes, by_kind[kind])
            result[kind] = least_bytes
        return result

    def _working_of(self, kind: str) -> float:
        return min(part.backward_transient_bytes for part in self._choices[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """Bytes of one of the like layers of a chain."""

    least_stored: float
    most_stored: float
    kept: float
    resident: float

    @property
    def carrier(self) -> float:
        """Bytes of which a stage counts a multiple for each like layer."""
        return max(1.0, self.resident)
