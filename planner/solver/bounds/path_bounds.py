"""Lower bounds on the objective of a partition problem, without looking for a split.

    balanced_s    every layer at its fastest, stages as even as can be, memory ignored
    counted_s     how many layers of the commonest kind each stage can hold in a time: memory and
                  whole layers are respected, their order and the memory of other kinds are not

Both hold for every split; each is proven where it is computed.  Where forward and backward count
apart, max_s f_s + max_s (t_s - f_s) is at least max_s t_s, and they hold all the more.

Symbols are those of `planner.solver.partition_problem`: P stages, t_s seconds of stage s, q_s its
micro-batches in flight, M_s its free bytes, c_s its exposed seconds, σ_s its time scale; t_k, a_k,
w_k, u_k seconds, stored, resident and transient bytes of option k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SETTLED
from meshwright.planner.operators.operator_table import larger
from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits

Floats = NDArray[np.float64]

CEILINGS = 16
"""Number of distinct limits on the slowest stage; the last one stands for all above it."""

_MOST_WAYS = 400
"""Most ways in which whole layers may choose their options."""

# A bound may not be above what it bounds.
_BELOW = 1.0 - SETTLED


def balanced_s(
    layers: Iterable[tuple[int, float, float]],
    *,
    stages: float,
    exposed_s: float,
    steady: float,
    fill: float = 1.0,
    credits_s: float = 0.0,
    each_exposed_s: float = 0.0,
) -> float:
    """Least objective if every layer ran at its fastest and all stages could be alike.

    `layers`: how many of a kind there are, its fewest seconds, its least sync.  Of the exposed
    seconds every stage has `each_exposed_s` at least.  With S the sum of all seconds and of the
    exposed ones, e the latter, n_k layers of kind k, and C the credits, which no split changes,

        T = steady max_s t_s + fill Σ_s t_s - C + sync
          >= steady max(S / P, max_k ⌈n_k / P⌉ t_k + e) + fill S - C + sync

    since the slowest stage takes at least the mean, and of the layers of a kind some stage has at
    least ⌈n_k / P⌉; the sync of the stage with the longest is at least its mean and that of any
    layer.  All but the counts may be arrays [problem].

    >>> balanced_s([(4, 2.0, 0.0)], stages=3, exposed_s=1.0, steady=3)
    21.0
    """
    total_s, slowest_s, sync_s, longest_s = exposed_s, 0.0, 0.0, 0.0
    for count, fastest_s, shortest_sync_s in layers:
        total_s += count * fastest_s
        slowest_s = larger(slowest_s, -(-count // stages) * fastest_s)
        sync_s += count * shortest_sync_s
        longest_s = larger(longest_s, shortest_sync_s)
    once_s = fill * total_s - credits_s + larger(sync_s / stages, longest_s)
    return steady * larger(total_s / stages, slowest_s + each_exposed_s) + once_s


def counted_s(instance: Instance) -> float:
    """Least objective by how many layers of the main kind stages can hold; inf if they cannot.

    The main kind has N layers.  τ_s(n) is the least time of stage s if it has n of them (see
    `_hosted_s`), the other layers on it come on top.  With n_s of them on stage s,

        T >= steady max_s τ_s(n_s) + fill Σ_s τ_s(n_s) + what all other layers add

    Let c be the ceiling, the slowest τ_s(n_s).  N of the entries τ_s(n), n >= 1, are at most c, so
    c is at least the N-th smallest.  Σ_s τ_s(n_s) is Σ_s τ_s(0) and N different steps
    τ_s(n) - τ_s(n - 1), all with τ_s(n) <= c, so it is at least the N smallest of those.  A
    slowest stage between two ceilings that are tried costs at least the lower ceiling, with the
    steps below the upper one; the least over these intervals is valid for every split.
    """
    chain = _LayersByPlace.of_instance(instance)
    counted = _MainKindTimes(
        _hosted_s(instance.kinds, _StageRooms.of_stages(instance.stages), chain), chain
    )
    return counted.bound_s(instance.steady, instance.fill, once_s=chain.sync_s - chain.credits_s)


class _MainKindTimes:
    """The times that stages take by their layers of the main kind, as `counted_s` looks at them."""

    def __init__(self, hosted_s: Floats, chain: _LayersByPlace) -> None:
        self._chain = chain
        self._stages = len(hosted_s)
        self._empty_s, self._held_s = hosted_s[:, 0], hosted_s[:, 1:]
        finite = np.isfinite(self._held_s)
        self._times_s = np.sort(self._held_s[finite])
        self._steps_s = np.full(self._held_s.shape, np.inf)
        np.subtract(self._held_s, hosted_s[:, :-1], out=self._steps_s, where=finite)

    def bound_s(self, steady: float, fill: float, *, once_s: float) -> float:
        """Least objective at a pace; `once_s` is added to it whatever the split."""
        chain = self._chain
        if len(self._times_s) < chain.needed or not np.isfinite(self._empty_s).all():
            return math.inf
        freest_s = self._filled_s(math.inf)
        nth_s = float(self._times_s[chain.needed - 1])
        lowest_s = max(nth_s, float(self._empty_s.max()), chain.slowest_s)
        above = int(np.searchsorted(self._times_s, lowest_s, side="right"))
        next_s = self._times_s[above : above + CEILINGS * self._stages].tolist()
        ceilings = [lowest_s, *list(dict.fromkeys(next_s))[:CEILINGS]]
        best_s = steady * ceilings[-1] + fill * freest_s
        for ceiling_s, upper_s in itertools.pairwise(ceilings):
            if steady * ceiling_s + fill * freest_s >= best_s:
                break
            best_s = min(best_s, steady * ceiling_s + fill * self._filled_s(upper_s))
        even_s = steady * (freest_s + chain.others_s) / self._stages + fill * freest_s
        besides_s = fill * chain.others_s
        bound_s: float = max(best_s, even_s) * _BELOW + besides_s * _BELOW + once_s
        return bound_s

    def _filled_s(self, below_s: float) -> float:
        """Least Σ τ_s with every stage below a ceiling."""
        needed = self._chain.needed
        steps = self._steps_s[self._held_s < below_s]
        if len(steps) > needed:
            steps = np.partition(steps, needed - 1)[:needed]
        return float(self._empty_s.sum()) + float(steps.sum())


@dataclass(frozen=True, slots=True)
class _StageRooms:
    """[stage] The room and the pace of all stages, as solver.instance.StageLimits names them."""

    in_flight: Floats
    waiting: Floats
    free_bytes: Floats
    scale: Floats
    exposed_s: Floats

    @classmethod
    def of_stages(cls, stages: Sequence[StageLimits]) -> _StageRooms:
        return cls(
            np.array([stage.in_flight for stage in stages]),
            np.array([stage.waiting for stage in stages]),
            np.array([stage.room_bytes for stage in stages]),
            np.array([stage.time_scale for stage in stages]),
            np.array([stage.exposed_s for stage in stages]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayersByPlace:
    """The layers of an instance: those that are counted, those with a place, and the others."""

    main: int
    """Kind that is counted: of those without a place, the one with the most seconds."""
    needed: int
    placed: tuple[tuple[int, ...], ...]
    """[stage] Kinds of which the stage has the only layer there is."""
    others_s: float
    """Seconds of the other layers, wherever they are."""
    slowest_s: float
    """Seconds of the slowest of them."""
    credits_s: float
    sync_s: float
    """Least sync of the stage with the longest."""

    @classmethod
    def of_instance(cls, instance: Instance) -> _LayersByPlace:
        """Return what the first and the last stage hold surely, and what is counted."""
        layers, stages = instance.layers, len(instance.stages)
        counts = [layers.count(kind) for kind in range(len(instance.kinds))]
        fastest = [min(o.time_s for o in table) for table in instance.kinds]
        pace = min(stage.time_scale for stage in instance.stages)
        widest = max(stage.time_scale for stage in instance.stages)

        places: dict[int, tuple[int, ...]] = {0: layers[:1], stages - 1: layers[-1:]}
        if stages == 1:
            places = {0: tuple(dict.fromkeys((layers[0], layers[-1])))}
        placed = [tuple(k for k in places.get(s, ()) if counts[k] == 1) for s in range(stages)]
        fixed = {kind for kinds in placed for kind in kinds}
        free = [kind for kind, count in enumerate(counts) if count and kind not in fixed]
        if not free:  # every layer has its place; count one of them instead
            free = [placed[0][0]]
            placed[0] = placed[0][1:]
        main = max(free, key=lambda kind: (counts[kind] * fastest[kind], kind))
        others = [kind for kind in free if kind != main]
        sync = [min(o.sync_s for o in table) for table in instance.kinds]
        mean_sync_s = sum(sync[kind] for kind in layers) / stages
        return cls(
            main=main,
            needed=counts[main],
            placed=tuple(placed),
            others_s=pace * sum(counts[kind] * fastest[kind] for kind in others),
            slowest_s=pace * max((fastest[kind] for kind in others), default=0.0),
            credits_s=widest * sum(instance.credit_s(layer) for layer in range(len(layers))),
            sync_s=max(mean_sync_s, *(sync[kind] for kind in set(layers))),
        )


def _hosted_s(
    tables: Sequence[Sequence[Option]], rooms: _StageRooms, chain: _LayersByPlace
) -> Floats:
    """[stage, n] Least seconds of each stage with n layers of the main kind; inf if impossible.

    Let stage s hold x_k layers of the main kind with option k, Σ x_k = n, and its placed layers
    with options that take e seconds and b bytes; let θ be the largest transient on it, so that
    u_k <= θ where x_k > 0.  Then

        σ_s Σ x_k t_k <= t_s - c_s - σ_s e          Σ x_k (w_k + q_s a_k) <= M_s - θ - b

    For prices y, z >= 0 with y t_k + z (w_k + q_s a_k) >= 1 for every k with u_k <= θ, the sum of
    y times the first and z times the second row gives n <= y (t_s - c_s - σ_s e) / σ_s +
    z (M_s - θ - b), hence

        t_s >= c_s + σ_s e + σ_s (n - z (M_s - θ - b)) / y               (y > 0)
        n <= z (M_s - θ - b)                                             (y = 0)

    The entry is the largest of these over a few prices, and of the least of all ways to choose
    whole x_k where those are few; and the least over the placed layers' options and over θ: the
    largest of their transients, or one of the main kind above it.
    """
    options = undominated_options(tables[chain.main])
    placed = {kind: undominated_options(tables[kind]) for kinds in chain.placed for kind in kinds}
    in_flight, waiting, free = rooms.in_flight, rooms.waiting, rooms.free_bytes
    scale, exposed_s = rooms.scale, rooms.exposed_s
    most = chain.needed
    numbers = np.arange(most + 1.0)
    result = np.full((len(in_flight), most + 1), np.inf)
    levels = sorted({o.transient_bytes for o in options})
    allowed = [[o for o in options if o.transient_bytes <= level] for level in levels]
    prices = [_prices(some, in_flight, waiting) for some in allowed]
    for kinds in dict.fromkeys(chain.placed):
        here = np.array([s for s, placed in enumerate(chain.placed) if placed == kinds])
        for chosen in itertools.product(*(placed[kind] for kind in kinds)):
            base_s = exposed_s[here] + scale[here] * sum(o.time_s for o in chosen)
            transient = max((o.transient_bytes for o in chosen), default=0.0)
            room = free[here] - sum(o.resident_bytes for o in chosen)
            room -= in_flight[here] * sum(o.stored_bytes for o in chosen)
            room -= waiting[here] * sum(o.kept_bytes for o in chosen)
            alone_s = np.where(room >= transient, base_s, np.inf)
            result[here, 0] = np.minimum(result[here, 0], alone_s)
            for index, level in enumerate(levels):
                if (
                    level <= transient
                    and index + 1 < len(levels)
                    and levels[index + 1] <= transient
                ):
                    continue  # the next level allows more for the same bytes
                y, z = prices[index][0][:, here], prices[index][1][:, here]
                left = room - max(level, transient)
                with np.errstate(divide="ignore"):
                    each_s = np.where(y > 0, 1 / y, 0.0)
                saved_s = each_s * z * left
                most_held = np.where(y > 0, np.inf, z * left).min(axis=0)
                needs_s = (each_s[:, :, None] * numbers - saved_s[:, :, None]).max(axis=0)
                held_s = base_s[:, None] + scale[here, None] * needs_s
                beyond = numbers * (1 - ROUNDING) > most_held[:, None]
                held_s[beyond | (left < 0)[:, None]] = np.inf
                whole_s = _whole_s(allowed[index], in_flight[here], waiting[here], left, most)
                few = slice(1, whole_s.shape[1] + 1)
                whole_s = base_s[:, None] + scale[here, None] * whole_s
                held_s[:, few] = np.maximum(held_s[:, few], whole_s)
                result[here, 1:] = np.minimum(result[here, 1:], held_s[:, 1:])
    return result


def _whole_s(
    options: Sequence[Option], in_flight: Floats, waiting: Floats, left: Floats, most: int
) -> Floats:
    """[stage, n - 1] Least seconds of n whole layers within the bytes `left`, for as many n as have
    few ways to choose their options."""
    counts, firsts = _ways(len(options), most)
    each_s = (counts @ np.array([o.time_s for o in options]))[:, None]
    fits = counts @ _layer_bytes(options, in_flight, waiting) <= left
    least_s: Floats = np.minimum.reduceat(np.where(fits, each_s, np.inf), firsts, axis=0).T
    return least_s


@lru_cache(maxsize=64)
def _ways(options: int, most: int) -> tuple[Floats, NDArray[np.intp]]:
    """[way, option] How many of n layers have each option, n = 1, 2, ...; [n - 1] the first way."""
    rows: list[Floats] = []
    firsts: list[int] = []
    for number in range(1, most + 1):
        ways = list(itertools.combinations_with_replacement(range(options), number))
        if len(rows) + len(ways) > _MOST_WAYS:
            break
        firsts.append(len(rows))
        rows += [np.bincount(way, minlength=options).astype(float) for way in ways]
    return np.array(rows), np.array(firsts)


def undominated_options(options: Sequence[Option]) -> list[Option]:
    """Return the options but those that another one beats or equals in every figure.

    What they allow, the other one allows, so a least time over the rest is one over all.
    """
    figures = [_FIGURES(option) for option in options]
    return [
        option
        for at, option in enumerate(options)
        if not any(
            all(theirs <= mine for theirs, mine in zip(other, figures[at], strict=True))
            and (other != figures[at] or index < at)
            for index, other in enumerate(figures)
            if index != at
        )
    ]


_FIGURES = attrgetter(*(field.name for field in fields(Option) if field.name != "name"))


def _layer_bytes(options: Sequence[Option], in_flight: Floats, waiting: Floats) -> Floats:
    """[option, stage] Bytes of a layer, its transient ones aside."""
    return np.array(
        [o.resident_bytes + in_flight * o.stored_bytes + waiting * o.kept_bytes for o in options]
    )


def _prices(options: Sequence[Option], in_flight: Floats, waiting: Floats) -> tuple[Floats, Floats]:
    """[price, stage] Prices y of a second and z of a byte at which every option costs at least 1.

    Optimal prices make one or two options cost exactly 1; those that leave another below are
    replaced by the trivial price of the fastest option, y = 1 / min t, z = 0.
    """
    time_s = np.array([o.time_s for o in options])
    layer_bytes = _layer_bytes(options, in_flight, waiting)
    fastest_s, leanest = float(time_s.min()), layer_bytes.min(axis=0)
    stages = len(in_flight)
    infinite = np.full(stages, np.inf)
    zero = np.zeros(stages)
    by_time = infinite if fastest_s == 0 else np.full(stages, 1 / fastest_s)
    y_rows, z_rows = [by_time], [zero]
    with np.errstate(divide="ignore", invalid="ignore"):
        y_rows.append(np.where(leanest > 0, 0.0, by_time))
        z_rows.append(np.where(leanest > 0, 1 / leanest, 0.0))
        if len(options) > 1:
            j, k = np.triu_indices(len(options), 1)
            determinant = time_s[j, None] * layer_bytes[k] - time_s[k, None] * layer_bytes[j]
            y = (layer_bytes[k] - layer_bytes[j]) / determinant
            z = (time_s[j] - time_s[k])[:, None] / determinant
            cost = y[:, None] * time_s[:, None] + z[:, None] * layer_bytes
            good = np.isfinite(cost).all(axis=1) & (y > 0) & (z >= 0)
            good &= cost.min(axis=1) >= 1 - ROUNDING
            y_rows.extend(np.where(good, y, by_time))
            z_rows.extend(np.where(good, z, 0.0))
    return np.array(y_rows), np.array(z_rows)
