"""What ranks hold at least, as sums over layers: the bytes by which a solver looks for a split.

What they hold exactly, `planner.costs.rank_memory` says of each split that is found.  Here counts
what a rank holds at one moment (planner.fullest), in the backward of the last layer of the stage
that acts.  With a_c micro-batches of stage c alive, w_c that wait for W, a rank of one stage holds

    a Σ stored + w Σ kept + Σ resident + the working memory of a layer that may be the last one

and a rank of V stages, S_c being the stored bytes of the n_c like layers of stage c, for any α

    Σ a_c S_c  =  α Σ S_c + Σ (a_c - α) S_c  >=  α Σ S_c + Σ (a_c - α) n_c s_c

with s_c the most that a like layer may store where a_c < α, and else the least.  The n_c depend on
the n like layers of the rank alone (planner.search.ranks), and what depends on them is bounded by a
line in n that meets it at the mean rank.  Layers that store less come first, so α is the a_c of the
stage up to which the mean rank must store less to fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.costs.layout_costs import LayoutCosts, counted_by_rank
from planner.costs.rank_memory import in_flight_at_most
from planner.costs.strategy import StrategyParts, least_resident
from planner.fullest import fullest
from planner.plan import Layout
from planner.schedules.record import Fullest
from planner.search.ranks import Shares
from planner.solver.instance import Option

Floats = NDArray[np.float64]
Choices = Mapping[str, Sequence[StrategyParts]]
"""By kind, what its layers may be."""


_ALPHAS = 17
"""Values of α that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAtLeast:
    """What a stage of the solver counts (planner.solver.instance.Stage)."""

    in_flight: float
    waiting: float
    fixed_bytes: float


class LeastBytes:
    """Bounds on the bytes of one layout's ranks."""

    def __init__(
        self,
        chain: Sequence[str],
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
        self._stores_input = any(
            part.stores_input for kind in set(chain[1:]) for part in choices[kind]
        )
        self._fullest = _fullest(layout) if counted_by_rank(layout) else None
        self._working = self._least_working()
        self.ranks: tuple[RankAtLeast, ...] = tuple(
            self._of_one(rank)
            if shares is None
            else _OfSeveral(self, shares, rank, capacity_bytes).at_least()
            for rank in range(layout.pipeline)
        )

    def option(self, at: int, option: Option, part: StrategyParts) -> Option:
        """Return the option of a layer of the chain with what it holds at least."""
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
                kept_bytes=part.figures.kept_bytes if self._fullest is not None else 0.0,
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
        if at == len(self._chain) - 1 and self._last_acts:
            alive -= 1.0
            working = part.backward_transient_bytes + part.stored_bytes - self.working(rank)
        return replace(
            option,
            stored_bytes=alive * part.stored_bytes / self.ranks[rank].in_flight,
            kept_bytes=0.0,
            resident_bytes=part.states.resident_bytes + waiting * part.figures.kept_bytes,
            transient_bytes=max(0.0, working),
        )

    def at_end(self, at: int) -> tuple[int, float, float]:
        """Return the rank of a layer before or behind the like ones, what is alive and waits."""
        assert self._shares is not None
        home, first = self._shares.home, at < self._shares.run.before
        rank, place = (home[0], 0) if first else (home[-1], -1)
        holding, waiting = self.counts(rank)
        return rank, float(holding[place]), float(waiting[place])

    def counts(self, rank: int) -> tuple[Floats, Floats]:
        """[stage of the rank] Micro-batches alive and waiting at the moment that counts."""
        assert self._fullest is not None
        return self._fullest.holding[:, rank], self._fullest.waiting[:, rank]

    def buffers(self, rank: int) -> float:
        """Return the pipeline's buffers at that moment."""
        layout = self._layout
        own = self._own_stages(rank)
        passed = [
            (stage > 0 and not self._stores_input)
            + (stage < layout.stages - 1) * self._costs.keeps_sent
            for stage in own
        ]
        alive, _ = self.counts(rank)
        held = float(alive @ np.array(passed, dtype=float))
        each_bytes = self._costs.boundary_bytes
        if self._narrowest_bytes is not None:
            each_bytes = self._narrowest_bytes
        return (held + 2 * layout.virtual_stages) * each_bytes

    @cached_property
    def like(self) -> Like:
        """What like layers may hold."""
        assert self._shares is not None
        run = self._shares.run
        parts = self._choices[self._chain[run.before]]
        stored = [part.stored_bytes for part in parts]
        return Like(
            number=run.alike,
            least_stored=min(stored),
            most_stored=max(stored),
            kept=min(part.figures.kept_bytes for part in parts),
            resident=parts[0].states.resident_bytes,
        )

    def end_bytes(self, rank: int) -> float:
        """Return the least that layers before and behind the like ones hold on a rank."""
        assert self._shares is not None
        run, total = self._shares.run, 0.0
        for at in (*range(run.before), *range(run.before + run.alike, len(self._chain))):
            home, alive, waiting = self.at_end(at)
            if home == rank:
                total += min(
                    part.states.resident_bytes
                    + alive * part.stored_bytes
                    + waiting * part.figures.kept_bytes
                    for part in self._choices[self._chain[at]]
                )
        return total

    def _own_stages(self, rank: int) -> list[int]:
        if self._shares is None:
            return [rank]
        return [stage for stage, home in enumerate(self._shares.home) if home == rank]

    def _of_one(self, rank: int) -> RankAtLeast:
        """Return what a rank of one stage counts."""
        layout = self._layout
        if self._fullest is not None:
            holding, waiting = self.counts(rank)
            return RankAtLeast(
                in_flight=float(holding[0]),
                waiting=float(waiting[0]),
                fixed_bytes=self.buffers(rank),
            )
        alive = in_flight_at_most(layout, rank)
        buffers, each_bytes = 0, self._costs.boundary_bytes
        if layout.pipeline > 1 and self._narrowest_bytes is not None:
            buffers, each_bytes = alive + 2, self._narrowest_bytes
        elif layout.pipeline > 1:
            passed = int(rank > 0 and not self._stores_input)
            passed += (rank < layout.pipeline - 1) * self._costs.keeps_sent
            buffers = passed * alive + 2
        # Where all forwards come first, whole gradients never lie beside all micro-batches.
        alive -= alive == layout.micro_batches > 1
        return RankAtLeast(
            in_flight=float(alive),
            waiting=0.0,
            fixed_bytes=buffers * each_bytes,
        )

    def _resident(self, part: StrategyParts) -> float:
        """Return what a layer of a rank of one stage holds at the moment that counts."""
        layout = self._layout
        return least_resident(
            part.states,
            whole=self._fullest is not None,
            forwards_first=layout.executed.forwards_first,
            once=layout.micro_batches == 1,
        )

    def _least_working(self) -> dict[str, float]:
        """By kind, the least working memory of any layer from its first one on but the last.

        Of a graph, whose layers have no one order, that of any layer.
        """
        if self._narrowest_bytes is not None:
            return dict.fromkeys(self._chain, min(map(self._least_of, set(self._chain))))
        result: dict[str, float] = {self._chain[-1]: math.inf}
        least = math.inf
        for kind in reversed(self._chain[:-1]):
            least = min(least, self._least_of(kind))
            result[kind] = least
        return result

    def _least_of(self, kind: str) -> float:
        return min(part.backward_transient_bytes for part in self._choices[kind])

    @property
    def _last_acts(self) -> bool:
        """Whether the model's last layer acts at the moment that counts on its rank."""
        assert self._shares is not None
        assert self._fullest is not None
        place = self._fullest.place[self._shares.home[-1]]
        return bool(place == self._shares.virtual_stages - 1)

    def working(self, rank: int) -> float:
        """Return the least working memory of the last layer that acts on a rank of several stages.

        That is a like one, if the stage that acts has any.
        """
        shares = self._shares
        assert shares is not None
        assert self._fullest is not None
        stage = self._own_stages(rank)[self._fullest.place[rank]]
        run, chain = shares.run, self._chain
        kinds = {chain[run.before]}
        if stage == 0 and run.before:
            kinds |= {*chain[: run.before]}
        if stage == len(shares.home) - 1 and run.behind:
            kinds |= {*chain[run.before + run.alike :]}
        return min(self._least_of(kind) for kind in kinds)


def _fullest(layout: Layout) -> Fullest:
    """Return the moments that count on ranks of several stages or of split backwards."""
    return fullest(
        layout.schedule,
        ranks=layout.pipeline,
        micro_batches=layout.micro_batches,
        virtual_stages=layout.virtual_stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """The like layers of a chain, and what one of them holds."""

    number: int
    least_stored: float
    most_stored: float
    kept: float
    resident: float

    @property
    def carrier(self) -> float:
        """Bytes of which a stage counts a multiple for each like layer."""
        return max(1.0, self.resident)


class _OfSeveral:
    """A rank of several stages."""

    def __init__(
        self, bytes_: LeastBytes, shares: Shares, rank: int, capacity_bytes: float
    ) -> None:
        self._like = bytes_.like
        self._alive, self._waiting = bytes_.counts(rank)
        # All ranks but one that is relieved share their layers alike.
        alike = rank if shares.relieved(rank) else min({0, 1} - {shares.home[-1]})
        self._sizes, _ = sizes_of(shares, alike)
        mean = round(shares.run.alike / shares.ranks)
        self._mean = min(max(1, mean), len(self._sizes) - 1)
        self._fixed_bytes = bytes_.buffers(rank) + bytes_.working(rank)
        self._free_bytes = capacity_bytes - self._fixed_bytes - bytes_.end_bytes(rank)

    def at_least(self) -> RankAtLeast:
        """Return what the solver's stage counts."""
        like, alpha = self._like, self._alpha()
        each = self._each(alpha)
        always = alpha * like.least_stored + like.resident
        slope, fixed_bytes = _line(self._sizes @ each, self._mean, at_least=-always)
        return RankAtLeast(
            in_flight=alpha,
            waiting=(slope + always) / like.carrier,
            fixed_bytes=self._fixed_bytes + fixed_bytes,
        )

    def _each(self, alpha: float) -> Floats:
        """[stage] What a like layer there holds beside α of its stored bytes, at least."""
        like, alive = self._like, self._alive
        stored = np.where(alive < alpha, like.most_stored, like.least_stored)
        each: Floats = (alive - alpha) * stored + self._waiting * like.kept
        return each

    def _alpha(self) -> float:
        """Return a_c of the stage up to which a mean rank has to store less, above 0.

        It is less where the leanest layers would hold less than nothing.
        """
        low, high = max(0.25, float(self._alive.min())), self._marginal()
        if high <= low:
            return low
        for alpha in np.linspace(high, low, _ALPHAS)[:-1].tolist():
            mean = float(self._sizes[self._mean] @ self._each(alpha)) / self._mean
            if mean + alpha * self._like.least_stored + self._like.resident >= 0:
                return float(alpha)
        return low

    def _marginal(self) -> float:
        """Return a_c of the stage up to which a mean rank has to store less."""
        like, sizes = self._like, self._sizes[self._mean]
        left = self._free_bytes - self._mean * like.resident
        left -= float(sizes @ (self._waiting * like.kept + self._alive * like.least_stored))
        more = like.most_stored - like.least_stored
        for count, size in zip(reversed(self._alive), reversed(sizes), strict=True):
            left -= float(count) * float(size) * more
            if left < 0:
                return float(count)
        return float(self._alive.max())


@lru_cache(maxsize=1 << 10)
def sizes_of(shares: Shares, rank: int) -> tuple[Floats, int]:
    """[n, stage] Layers of each stage, of n like layers on a rank; and the rank.

    More than leave every other stage a layer, no rank has.
    """
    most = shares.run.alike - shares.virtual_stages * (shares.ranks - 1) + 2
    numbers = range(min(most, shares.run.alike) + 1)
    return np.array([shares.sizes(rank, number) for number in numbers], dtype=float), rank


def _line(values: Floats, mean: int, *, at_least: float) -> tuple[float, float]:
    """Return slope and offset of a line below values [n] that comes near to them at the mean.

    The slope is no less than asked for.

    >>> _line(np.array([0.0, 1.0, 4.0]), 1, at_least=0.0)
    (1.0, 0.0)
    """
    numbers = np.arange(len(values))
    here = values[mean]
    before = ((here - values[:mean]) / (mean - numbers[:mean])).max(initial=-math.inf)
    behind = ((values[mean + 1 :] - here) / (numbers[mean + 1 :] - mean)).min(initial=math.inf)
    slope = min(float(before), float(behind))
    if not math.isfinite(slope):
        slope = 0.0
    slope = max(slope, at_least)
    return slope, float((values - slope * numbers).min())
