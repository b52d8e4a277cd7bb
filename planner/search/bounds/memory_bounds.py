"""What ranks hold at least, as sums over layers: the bytes by which a solver looks for a split.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layer_strategy import StrategyParts, least_resident
from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank
from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.bounds.multi_stage_memory import (
    RankMemory,
    StageMemorySpread,
    evenly,
    relieved_spread,
)
from meshwright.planner.search.bounds.peak_moments import MemoryMoment, binding, loads_of
from meshwright.planner.search.partition.stage_counts import Shares
from meshwright.planner.solver.partition_problem import Option

Floats = NDArray[np.float64]
Choices = Mapping[str, Sequence[StrategyParts]]
"""By kind, what its layers may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What a stage of the solver counts (planner.solver.partition_problem.StageLimits)."""

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
        """What like layers may hold; of a chain whose ranks have one stage, any of its layers."""
        run = None if self._shares is None else self._shares.run
        kinds = set(self._chain) if run is None else {self._chain[run.before]}
        parts = [part for kind in kinds for part in self._choices[kind]]
        stored = [part.stored_bytes for part in parts]
        return Like(
            least_stored=min(stored),
            most_stored=max(stored),
            kept=min(part.figures.kept_bytes for part in parts),
            resident=parts[0].states.resident_bytes,
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
        split = evenly(ranks)
        last = shares.home[-1]
        if shares.is_relieved(last):
            for column, value in zip(
                split, relieved_spread(ranks, shares, np.array([last])), strict=True
            ):
                column[last] = value[0]
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
        least_bytes = math.inf
        for kind in reversed(self._chain[:-1]):
            least_bytes = min(least_bytes, self._working_of(kind))
            result[kind] = least_bytes
        return result

    def _working_of(self, kind: str) -> float:
        return min(part.backward_transient_bytes for part in self._choices[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """What one of the like layers of a chain has."""

    least_stored: float
    most_stored: float
    kept: float
    resident: float

    @property
    def carrier(self) -> float:
        """Bytes of which a stage counts a multiple for each like layer."""
        return max(1.0, self.resident)
