"""Lower bounds of stage times of many pipelines, by the layers of one kind that fit a stage.

A *pipeline* here is a partition problem of which only one kind of layer is counted: N layers with
options k of t_k seconds, a_k stored, b_k saved for W, w_k resident and u_k transient bytes.  What
surely lies on a stage beside them takes e_s seconds, its bytes are off the free ones M_s, and at
least v_s more while it runs.  q_s micro-batches are in flight, z_s wait for W.

Let stage s hold x_k layers with option k, n_s of them together, in h_sk = w_k + q_s a_k + z_s b_k
bytes each, and let u be the least u_k.  For any ν >= 0

    n_s min_k (t_k + ν h_sk) <= Σ_k x_k (t_k + ν h_sk) <= (t_s - e_s) + ν (M_s - max(u, v_s))

so under a ceiling c on stage seconds, n_s is at most the least of these over a few ν, and with
ν -> inf at most (M_s - max(u, v_s)) / min_k h_sk.  A ceiling under which the stages together hold
fewer than N whole layers is below the slowest stage of every split.

And for any λ each layer of option k has t_k >= λ - ρ_s h_sk with ρ_s the largest (λ - t_k)⁺ / h_sk
of any option, so

    Σ_s Σ_k x_k t_k >= λ N - Σ_s ρ_s (M_s - max(u, v_s))

Arrays have their longest axis, of pipelines or stages, last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import SLACK

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

_HALVINGS = 8
_PRICES = 5
_NEAR = 2.0
"""A ceiling is looked for below this multiple of the least one first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """[option, pipeline] Seconds and bytes of one layer of the counted kind."""

    time_s: Floats
    stored_bytes: Floats
    resident_bytes: Floats
    transient_bytes: Floats
    kept_bytes: Floats

    def for_pipelines(self, pipelines: Indices) -> Options:
        """Return those of some pipelines."""
        names = (field.name for field in fields(self))
        return Options(**{name: getattr(self, name)[:, pipelines] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """[stage] The stages of all pipelines, those of one in a row."""

    counts: Indices
    """[pipeline] Number of its stages."""
    in_flight: Floats
    waiting: Floats
    each_bytes: Floats
    """Bytes of every layer of the counted kind, beside those of its option; may be below 0."""
    free_bytes: Floats
    beside_s: Floats
    beside_transient_bytes: Floats

    @property
    def pipeline(self) -> Indices:
        """[stage] Number of the pipeline that it belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def firsts(self) -> Indices:
        """[pipeline] Its first stage."""
        firsts: Indices = np.cumsum(self.counts) - self.counts
        return firsts

    def for_pipelines(self, pipelines: Booleans) -> Stages:
        """Return those of some pipelines."""
        kept = np.repeat(pipelines, self.counts)
        names = (field.name for field in fields(self) if field.name != "counts")
        columns = {name: getattr(self, name)[kept] for name in names}
        return Stages(counts=self.counts[pipelines], **columns)


def capacity_bounds_s(
    options: Options, stages: Stages, layers: int, least_s: Floats
) -> tuple[Floats, Floats]:
    """[pipeline] No split has a slowest stage below the first, or takes less than the second.

    The second are the seconds of the counted layers on all stages.  Both are inf where the layers
    do not fit.  `least_s` is a slowest stage that is known to be no longer than any.
    """
    slowest_s = np.full(len(stages.counts), np.inf)
    total_s = slowest_s.copy()
    fitting = _may_fit(options, stages, layers)
    if not fitting.any():
        return slowest_s, total_s
    at = np.flatnonzero(fitting)
    options, stages, low_s = options.for_pipelines(at), stages.for_pipelines(fitting), least_s[at]
    room = Room(options, stages, layers)
    high_s = np.maximum.reduceat(stages.beside_s, stages.firsts)
    high_s = np.maximum(low_s, (high_s + layers * options.time_s.max(axis=0)) * (1 + SLACK))
    holds = room.is_enough(high_s)
    slowest_s[at[holds]] = room.for_pipelines(holds).ceiling_s(low_s[holds], high_s[holds])
    total_s[at[holds]] = room.total_s(options)[holds]
    return slowest_s, total_s


def _may_fit(options: Options, stages: Stages, layers: int) -> Booleans:
    """[pipeline] Whether all layers fit in their minimum-memory options, the least transient."""
    at = stages.pipeline
    lean = _layer_bytes(options, stages, at).min(axis=0)
    left = stages.free_bytes - _fewest_transient(options, stages, at)
    most = _whole_layers(_quotient(left, lean), layers)
    most[stages.free_bytes < stages.beside_transient_bytes] = -np.inf
    fits: Booleans = np.add.reduceat(most, stages.firsts) >= layers
    return fits


def _fewest_transient(options: Options, stages: Stages, at: Indices) -> Floats:
    """[stage] Least bytes that come on top while any layer runs."""
    fewest_bytes: Floats = np.maximum(
        options.transient_bytes.min(axis=0)[at], stages.beside_transient_bytes
    )
    return fewest_bytes


def _layer_bytes(options: Options, stages: Stages, at: Indices) -> Floats:
    """[option, stage] Bytes of a layer, its transient ones aside."""
    stored = stages.in_flight * options.stored_bytes[:, at]
    kept = stages.waiting * options.kept_bytes[:, at]
    layer_bytes: Floats = options.resident_bytes[:, at] + stored + kept + stages.each_bytes
    return layer_bytes


def _whole_layers(numbers: Floats, layers: int) -> Floats:
    """Return how many whole layers fit, between none and all."""
    whole: Floats = np.floor(np.clip(numbers, 0.0, layers) * (1 + SLACK) + SLACK)
    return whole


def _quotient(part: Floats, whole: Floats) -> Floats:
    """Return part / whole; inf of nothing, 0 of less than nothing."""
    result = np.where(part < 0, 0.0, np.inf)
    np.divide(part, whole, out=result, where=(whole > 0) & (part >= 0))
    return result


class Room:
    """Room for layers on each stage: arrays [price ν, stage] and [stage]."""

    def __init__(self, options: Options, stages: Stages, layers: int) -> None:
        self._stages, self._layers = stages, layers
        at = stages.pipeline
        time_s, layer_bytes = options.time_s[:, at], _layer_bytes(options, stages, at)
        fewest_bytes = _fewest_transient(options, stages, at)
        left = stages.free_bytes - fewest_bytes
        self._most = _quotient(left, layer_bytes.min(axis=0))
        self._left, self._held = np.maximum(left, 0.0), layer_bytes
        prices = _prices(time_s, layer_bytes)
        least_s = (time_s + prices[:, None] * layer_bytes).min(axis=1)
        whole = least_s > 0
        self._per_s = np.divide(1.0, least_s, out=np.zeros(least_s.shape), where=whole)
        self._of_bytes = np.full(least_s.shape, np.inf)
        np.divide(prices * self._left, least_s, out=self._of_bytes, where=whole)
        self._empty = stages.free_bytes >= stages.beside_transient_bytes

    def for_pipelines(self, pipelines: Booleans) -> Room:
        """Return that of some pipelines, for ceilings alone."""
        if pipelines.all():
            return self
        kept = np.repeat(pipelines, self._stages.counts)
        part: Room = object.__new__(Room)
        part._stages, part._layers = self._stages.for_pipelines(pipelines), self._layers
        part._most, part._empty = self._most[kept], self._empty[kept]
        part._per_s, part._of_bytes = self._per_s[:, kept], self._of_bytes[:, kept]
        return part

    def is_enough(self, ceiling_s: Floats) -> Booleans:
        """[pipeline] Whether all stages together may hold all layers under a ceiling for each."""
        stages = self._stages
        own_s = np.repeat(ceiling_s, stages.counts) - stages.beside_s
        in_time = (self._per_s * np.maximum(own_s, 0.0) + self._of_bytes).min(axis=0)
        number = _whole_layers(np.minimum(in_time, self._most), self._layers)
        possible = self._empty & (own_s >= -SLACK * stages.beside_s)
        number[~possible] = -np.inf
        together: Booleans = np.add.reduceat(number, stages.firsts) >= self._layers
        return together

    def seconds_of(self, number: int) -> Floats:
        """[stage] Least seconds with that many layers; inf where they do not fit."""
        beyond = np.maximum(number - self._of_bytes, 0.0)
        within_s = np.divide(beyond, self._per_s, out=np.zeros(beyond.shape), where=self._per_s > 0)
        fits = self._most * (1 + SLACK) + SLACK >= number
        return np.where(fits & self._empty, self._stages.beside_s + within_s.max(axis=0), np.inf)

    def ceiling_s(self, low_s: Floats, high_s: Floats) -> Floats:
        """[pipeline] A ceiling that is too low, or `low_s` where that might do."""
        found_s = low_s.copy()
        tight = ~self.is_enough(low_s) if len(low_s) else np.zeros(0, dtype=bool)
        if not tight.any():
            return found_s
        part, low_s, high_s = self.for_pipelines(tight), low_s[tight], high_s[tight]
        near_s = np.minimum(_NEAR * low_s, high_s)
        for halving in range(_HALVINGS + 1):
            middle_s = near_s if halving == 0 else np.sqrt(low_s * high_s)
            holds = part.is_enough(middle_s)
            low_s, high_s = np.where(holds, low_s, middle_s), np.where(holds, middle_s, high_s)
        found_s[tight] = low_s
        return found_s

    def total_s(self, options: Options) -> Floats:
        """[pipeline] Least seconds of all counted layers together, for the best of a few λ."""
        at = self._stages.pipeline
        time_s = options.time_s[:, at]
        fastest_s, slowest_s = options.time_s.min(axis=0), options.time_s.max(axis=0)
        best_s = self._layers * fastest_s
        for share in range(1, _PRICES + 1):
            price_s = fastest_s + share / _PRICES * (1.5 * slowest_s - fastest_s)
            gain_s = np.maximum(price_s[at] - time_s, 0.0)
            rate = np.where(gain_s > 0, np.inf, 0.0)
            np.divide(gain_s, self._held, out=rate, where=self._held > 0)
            most = rate.max(axis=0)
            saved_s = np.where(most > 0, np.inf, 0.0)
            np.multiply(most, self._left, out=saved_s, where=np.isfinite(most))
            given_s = np.add.reduceat(saved_s, self._stages.firsts)
            best_s = np.maximum(best_s, self._layers * price_s - given_s)
        found_s: Floats = best_s
        return found_s


def _prices(time_s: Floats, layer_bytes: Floats) -> Floats:
    """[price, stage] Seconds per byte at which two options cost the same, and 0."""
    rows = [np.zeros(time_s.shape[1])]
    for j in range(len(time_s)):
        for k in range(j):
            slower, lighter = time_s[j] - time_s[k], layer_bytes[k] - layer_bytes[j]
            price = np.zeros(time_s.shape[1])
            np.divide(slower, lighter, out=price, where=slower * lighter > 0)
            rows.append(price)
    return np.stack(rows)
