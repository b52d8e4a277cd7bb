"""Bounds on the work of stages with layers as a fluid: they hold for every order.

Give each layer l a price p_l.  Let stage s have τ_s seconds of its own (a ceiling on stage seconds,
less what is exposed and the cheapest cuts, unscaled) and B_s bytes (free, less the smallest
transient), and let x_lk = resident + in_flight_s · stored be the bytes of option k.  For any ν >= 0

    α_s(ν) = max_l p_l / min_k (t_lk + ν x_lk)
    Σ_{l in s} p_l  <=  α_s(ν) Σ_{l in s} (t_lk + ν x_lk)  <=  α_s(ν) (τ_s + ν B_s)

whatever layers and options the stage has.  So stage s hosts at most the least of the right side
over ν, and a ceiling under which the stages together host less than Σ p_l is too low.  Prices are
p_l = min_k (t_lk + λ x_lk) for several λ; a stage short of bytes is limited by ν near λ, one with
bytes to spare by ν = 0, and ν -> inf leaves bytes alone.

For the sum over stages, with pace σ_s, let y_lk = x_lk / in_flight_s and b_s = B_s / in_flight_s;
adding up λ Σ_{l in s} y_lk <= λ b_s gives

    Σ_s σ_s Σ_{l in s} t_lk  >=  Σ_l min_{s,k} (σ_s t_lk + λ y_lk) - λ Σ_s b_s
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.solver.knapsack import Knapsacks

Floats = NDArray[np.float64]

_MULTIPLIERS = 12
_HALVINGS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """[price, cut] How much of a price lies before a cut: `lower` to `upper` at its least cost.

    Every second that the cut costs beyond that raises `lower` and reduces `upper` by these.
    """

    lower: Floats
    upper: Floats
    lower_per_s: Floats
    upper_per_s: Floats


class Fluid:
    """Bounds for all splits of the layers of an instance, in whatever order they come.

    `prices` [price, layer], layers as in the instance of the knapsacks.  Every cut between two
    stages costs each of them between `least_cut_s` and `most_cut_s`.

    No split has a slowest stage below `largest_s` (inf: nothing fits), a Σ fill below `fill_s`, or
    less to synchronise than `sync_s`; a ceiling of `whole_s` limits nothing.
    """

    def __init__(self, knapsacks: Knapsacks, *, least_cut_s: float, most_cut_s: float) -> None:
        options, layers = knapsacks.options, knapsacks.layers
        count = len(knapsacks.in_flight)
        # [kind, option], filled up with options that take for ever and inf bytes.
        self._time_s, self._stored = options.time_s, options.stored
        self._resident = options.resident
        self._in_flight = knapsacks.in_flight
        self._scale = knapsacks.time_scale
        self._numbers = np.bincount(layers, minlength=len(options.sizes))
        self._bytes = knapsacks.free_bytes - min(map(min, options.levels))
        self._exposed_s = knapsacks.exposed_s
        self._least_cut_s = least_cut_s if count > 1 else 0.0

        middle = float(self._in_flight.mean())
        slopes = self._slopes(middle)
        prices = np.concatenate([self._worth(middle, slopes), self._leanest(middle)[None]])
        prices = prices[prices.any(axis=1)]
        self._total = prices @ self._numbers
        self.prices = prices[:, layers]
        limits = [self._limits(s, prices, slopes) for s in range(count)]
        self._per_s = np.stack([per_s for per_s, _ in limits], axis=1)
        self._of_bytes = np.stack([of_bytes for _, of_bytes in limits], axis=1)
        self._finite = np.isfinite(self._per_s)

        self.whole_s = (1 + SLACK) * float(
            self._time_s.max(axis=1, where=options.present, initial=0.0)
            @ self._numbers
            * self._scale.max()
            + knapsacks.exposed_s.max()
            + 2 * most_cut_s
        )
        self.largest_s = self._largest_s()
        self.fill_s = self._fill_s(knapsacks, slopes * middle)
        once_s = options.sync_s.min(axis=1)
        self.sync_s = max(float(once_s[layers].max()), float(once_s @ self._numbers) / count)

    def hosts(self, ceiling_s: float, cut_s: Floats | None = None) -> tuple[Floats, Floats]:
        """[price, stage] Most of each price that a stage of at most `ceiling_s` can hold.

        Beside it, how much of that a further second of cuts takes away: the least over ν of linear
        functions lies below each of them.  `cut_s` [cut] are bounds on what each cut costs.
        """
        overhead_s = self._exposed_s.copy()
        overhead_s[:-1] += self._least_cut_s if cut_s is None else cut_s
        overhead_s[1:] += self._least_cut_s if cut_s is None else cut_s
        own_s = np.maximum((ceiling_s - overhead_s) / self._scale, 0.0)[:, None]
        by_time = np.multiply(
            self._per_s, own_s, where=self._finite, out=np.full(self._per_s.shape, np.inf)
        )
        most = by_time + self._of_bytes
        pick = most.argmin(axis=2)[:, :, None]
        per_s = np.take_along_axis(self._per_s, pick, axis=2) / self._scale[:, None]
        fewest = np.take_along_axis(most, pick, axis=2)
        return fewest[:, :, 0], np.where(np.isfinite(fewest), per_s, 0.0)[:, :, 0]

    def capacity_in(self, price: int, stage: int, own_s: Floats) -> Floats:
        """Most of one price that a stage can hold in `own_s` seconds with what is exposed."""
        seconds = np.maximum((own_s - self._exposed_s[stage]) / self._scale[stage], 0.0)
        per_s, of_bytes = self._per_s[price, stage], self._of_bytes[price, stage]
        finite = self._finite[price, stage]
        most: Floats = np.full(own_s.shape, np.inf)
        for slope, given in zip(per_s[finite], of_bytes[finite], strict=True):
            np.minimum(most, slope * seconds + given, out=most)
        return most

    def scarcest(self, cut_s: float) -> int:
        """Return the price that the stages hold only under the highest ceiling, at such cuts."""
        cuts_s = np.full(len(self._scale) - 1, cut_s)
        low_s, high_s = self.largest_s, self.whole_s + 2 * cut_s
        row = 0
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            together = self.hosts(middle_s, cuts_s)[0].sum(axis=1) / self._total
            row = int(np.argmin(together))
            low_s, high_s = (low_s, middle_s) if together[row] >= 1.0 else (middle_s, high_s)
        return row

    def allows(self, ceiling_s: float) -> bool:
        """Return whether all stages together might hold all layers under the ceiling."""
        together = self.hosts(ceiling_s)[0].sum(axis=1)
        return bool(np.all(together >= self._total * (1 - SLACK)))

    def ranges(self, ceiling_s: float, cut_s: Floats) -> Ranges:
        """Return how much of each price can lie before each cut under the ceiling."""
        most, per_s = self.hosts(ceiling_s, cut_s)
        slack = SLACK * self._total[:, None]
        before = np.cumsum(most[:, :-1], axis=1)
        after = np.cumsum(most[:, :0:-1], axis=1)[:, ::-1]
        return Ranges(
            lower=self._total[:, None] - after - slack,
            upper=before + slack,
            lower_per_s=per_s[:, 1:],
            upper_per_s=per_s[:, :-1],
        )

    def beyond_s(self, ceiling_s: float, steady: float) -> float:
        """Least objective of any split with a stage above `ceiling_s`."""
        if ceiling_s == np.inf:  # whatever `steady` is
            return np.inf
        return steady * ceiling_s + self.fill_s + self.sync_s

    def _largest_s(self) -> float:
        lower_s = float(self._time_s.min(axis=1)[self._numbers > 0].max() * self._scale.min())
        lower_s += float(self._exposed_s.min()) + self._least_cut_s
        upper_s = self.whole_s
        if not self.allows(upper_s):
            return np.inf
        if self.allows(lower_s):
            return lower_s
        while upper_s - lower_s > 1e-6 * upper_s:
            middle = (lower_s + upper_s) / 2
            lower_s, upper_s = (lower_s, middle) if self.allows(middle) else (middle, upper_s)
        return lower_s

    def _fill_s(self, knapsacks: Knapsacks, slopes: Floats) -> float:
        """Least Σ fill over the stages, for the best of the multipliers `slopes`."""
        instance = knapsacks.instance
        fill = instance.fill
        credits_s = np.array(instance.credits_s) if instance.credits_s else np.zeros(1)
        best = np.full((len(slopes), len(self._numbers)), np.inf)
        for in_flight, scale in set(
            zip(self._in_flight.tolist(), self._scale.tolist(), strict=True)
        ):
            softened_s = scale * self._worth(in_flight, slopes / in_flight / scale)
            best = np.minimum(best, fill * softened_s - scale * credits_s)
        given = slopes * float(np.sum(self._bytes / self._in_flight))
        overhead_s = float(self._exposed_s.sum()) + 2 * self._least_cut_s * (len(self._scale) - 1)
        return float(np.max(best @ self._numbers - fill * given)) + fill * overhead_s

    def _slopes(self, in_flight: float) -> Floats:
        """Seconds per byte at which some kind changes its option, thinned out; 0 first."""
        loads = self._resident + in_flight * self._stored
        with np.errstate(invalid="ignore"):
            added = loads[:, :, None] - loads[:, None, :]
            saved = self._time_s[:, None, :] - self._time_s[:, :, None]
        better = (added > 0) & (saved > 0) & np.isfinite(added) & np.isfinite(saved)
        # np.unique would import numpy.ma.
        rising = np.array(sorted({0.0, *(saved[better] / added[better]).tolist()}))
        if len(rising) > _MULTIPLIERS:
            rising = rising[np.linspace(0, len(rising) - 1, _MULTIPLIERS).round().astype(int)]
        return rising

    def _worth(self, in_flight: float, slopes: Floats) -> Floats:
        """[slope, kind] min_k (t + slope · x)."""
        loads = self._resident + in_flight * self._stored
        finite = np.isfinite(loads)
        charged = np.multiply(
            slopes[:, None, None],
            loads,
            where=finite,
            out=np.full((len(slopes), *loads.shape), np.inf),
        )
        worth: Floats = (self._time_s + charged).min(axis=2)
        return worth

    def _leanest(self, in_flight: float) -> Floats:
        """[kind] Fewest bytes of a layer."""
        leanest: Floats = (self._resident + in_flight * self._stored).min(axis=1)
        return leanest

    def _limits(self, stage: int, prices: Floats, slopes: Floats) -> tuple[Floats, Floats]:
        """[price, ν] What one second of the stage hosts, and what all its bytes host."""
        in_flight, free = float(self._in_flight[stage]), float(self._bytes[stage])
        per_s = _largest_ratio(prices, self._worth(in_flight, slopes))
        per_byte = _largest_ratio(prices, self._leanest(in_flight)[None])
        finite = np.isfinite(per_s)
        of_bytes = np.multiply(per_s, slopes * free, where=finite, out=np.full(per_s.shape, np.inf))
        lean = np.full(per_byte.shape, np.inf)
        np.multiply(per_byte, free, where=np.isfinite(per_byte), out=lean)
        return (
            np.concatenate([per_s, np.zeros_like(lean)], axis=1),
            np.concatenate([of_bytes, lean], axis=1),
        )


def _largest_ratio(prices: Floats, worth: Floats) -> Floats:
    """[price, ν] max over kinds of price / worth; a price of 0 asks for nothing."""
    price, gains = prices[:, None, :], worth[None, :, :]
    ratio = np.full(np.broadcast_shapes(price.shape, gains.shape), np.inf)
    np.divide(price, gains, where=gains > 0, out=ratio)
    largest: Floats = np.where(price > 0, ratio, 0.0).max(axis=2)
    return largest
