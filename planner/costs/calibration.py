"""A layer's seconds and bytes corrected by what a profile measured.

An exact measurement replaces the arithmetic; between two measured micro-batches figures are
interpolated; elsewhere the arithmetic is scaled by measured over computed at the nearest setting of
the same kind.  `Figures.provenance` says which of these it was.  Where nothing was measured over as
many context or expert ranks, the seconds of communication stay the arithmetic's.

A stage that was run as a whole tells what its layers take one behind the other, over what they take
in a short chain: all layers divided like it are scaled by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.documents.profile import LayerMeasurement, Profile, Recompute
from meshwright.planner.operators.operator_table import Setting, smaller

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import Provenance
    from meshwright.planner.documents.plan import Activations

SURE = 0.2
"""Spread of a stage's and of its layers' seconds up to which one says something of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One layer kind under one recompute choice, one rank, one micro-batch, nothing sharded.

    `*_tensor_s` is communication inside the layer, part of neither compute nor recompute.
    """

    forward_s: float
    forward_tensor_s: float
    backward_s: float
    recompute_s: float
    backward_tensor_s: float
    forward_ahead_s: float
    """Seconds of forward in which the device still works and the host has started everything."""
    backward_ahead_s: float
    stored_bytes: float
    forward_transient_bytes: float
    backward_transient_bytes: float
    returned_bytes: float
    """Bytes that the layer itself returns; a head returns logits, and the loss is beside it."""
    returned_anew_bytes: float
    """Bytes of these that are not among stored_bytes."""
    stores_input: bool
    provenance: Provenance
    spread: float
    weight_share: float = 0.0
    """Share of backward_s that a split backward leaves for W: half of the products of Linears."""
    own_share: float = 1.0
    """Share of stored_bytes that the layer itself saved; what its loss saved is not moved or
    packed."""
    packable_share: float = 0.0
    """Share of stored_bytes in floating tensors of the layer itself."""
    elements_per_stored_byte: float = 0.0
    """Elements of those tensors, for each byte of stored_bytes."""
    forward_waits_s: float = 0.0
    """Seconds of forward_s in which the device waits for its host."""
    waits_s: float = 0.0
    """Seconds of both passes in which the device waits for its host and can copy in."""
    forward_launch_s: float = 0.0
    """Seconds of the host to start a forward, whether or not the device waits for it."""
    backward_launch_s: float = 0.0
    """The same of a backward and what it recomputes."""
    kept_bytes: float = 0.0
    """Kept from I to W by each micro-batch: inputs of Linears and gradients of their outputs."""
    fresh_bytes: float = 0.0
    """Beside backward_transient_bytes at the fullest, gradients of weights made by then."""
    late_bytes: float = 0.0
    """The same of I: what W will need of what there is by then."""

    def passed_bytes(self, activations: Activations) -> float:
        """Return what stays of a micro-batch where what the layer returns stays as it is."""
        return self.returned_anew_bytes if activations == "keep" else self.returned_bytes

    @property
    def weight_s(self) -> float:
        """Seconds of W in a split backward."""
        return self.weight_share * self.backward_s

    @property
    def credit_s(self) -> float:
        """Seconds that the layer takes from a zero-bubble schedule's fill: min(2 w, f + w, b + w).

        f, b and w are seconds of F, I and W; what is left of f + b + w is max(f, b, f + b - w), the
        bubble of like ranks.
        """
        weight_s = self.weight_s
        least_s = smaller(2 * weight_s, self.whole_forward_s + weight_s)
        return smaller(least_s, self.whole_backward_s)

    @property
    def whole_forward_s(self) -> float:
        """Forward with its communication."""
        return self.forward_s + self.forward_tensor_s

    @property
    def whole_backward_s(self) -> float:
        """Backward with recomputation and communication."""
        return self.backward_s + self.recompute_s + self.backward_tensor_s

    @property
    def passes_s(self) -> float:
        """Both passes."""
        return self.whole_forward_s + self.whole_backward_s


def one_of(many: Figures, index: int) -> Figures:
    """Return one of many figures that are arrays."""
    values = {name: getattr(many, name) for name in _NAMES}
    return Figures(
        **{k: v.item(index) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    )


def figures_at(many: Figures, places: NDArray[np.intp]) -> Figures:
    """Return the figures of some places, of figures that are arrays [place]."""
    changed: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(many, name)
        changed[name] = value[places] if isinstance(value, np.ndarray) else value
    return Figures(**changed)


def join_figures(parts: Sequence[tuple[list[int], Figures]], count: int) -> Figures:
    """Return figures that are arrays [place] of `count`, from those of some places each.

    What is no number is taken from the first.
    """
    first = parts[0][1]
    place = np.argsort(np.concatenate([places for places, _ in parts]))
    sizes = [len(places) for places, _ in parts]
    assert sum(sizes) == count
    values: dict[str, Any] = {}
    for name in _NAMES:
        each = [getattr(figures, name) for _, figures in parts]
        if isinstance(each[0], (str, bool)):
            continue
        columns = [
            value if isinstance(value, np.ndarray) else np.full(size, value)
            for value, size in zip(each, sizes, strict=True)
        ]
        values[name] = np.concatenate(columns)[place]
    return replace(first, **values)


_NAMES = tuple(field.name for field in fields(Figures))

Computed = Callable[[Setting, Recompute], Figures]


def calibrated_figures(
    measurements: Sequence[LayerMeasurement],
    kind: str,
    setting: Setting,
    recompute: Recompute,
    computed: Computed,
) -> Figures:
    """Return the figures of a layer kind, measured where possible."""
    figures = computed(setting, recompute)
    same_kind = [m for m in measurements if m.kind == kind and m.precision == setting.precision]
    whole = [m for m in same_kind if m.context == m.expert == 1]
    divided = (setting.context, setting.expert)
    same_kind = [m for m in same_kind if (m.context, m.expert) == divided]
    if not same_kind and whole and divided != (1, 1):
        like = replace(setting, seq_len=setting.seq_len // setting.context, context=1, expert=1)
        return replace(
            _scaled_to_nearest(figures, whole, like, recompute, computed),
            forward_tensor_s=figures.forward_tensor_s,
            backward_tensor_s=figures.backward_tensor_s,
        )
    if not same_kind:
        return figures
    exact: dict[float, LayerMeasurement] = {
        m.micro_batch: m
        for m in same_kind
        if _same_but_batch(m, setting, recompute) and _run_alike(m, setting)
    }
    if setting.micro_batch in exact:
        return _measured_figures(figures, exact[setting.micro_batch])
    below = [b for b in exact if b < setting.micro_batch]
    above = [b for b in exact if b > setting.micro_batch]
    if below and above:
        low, high = exact[max(below)], exact[min(above)]
        share = (setting.micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
        return _between(_measured_figures(figures, low), _measured_figures(figures, high), share)
    return _scaled_to_nearest(figures, same_kind, setting, recompute, computed)


def _scaled_to_nearest(
    figures: Figures,
    measurements: Sequence[LayerMeasurement],
    setting: Setting,
    recompute: Recompute,
    computed: Computed,
) -> Figures:
    nearest = min(measurements, key=lambda m: _distance(m, setting, recompute))
    at_end = nearest.kind in ENDS
    there = replace(
        setting,
        micro_batch=nearest.micro_batch,
        seq_len=nearest.seq_len,
        precision=nearest.precision,
        tensor=nearest.tensor,
        context=nearest.context,
        expert=nearest.expert,
        compiled=setting.compiled if at_end else nearest.compiled,
        loss=nearest.loss,
    )
    return _scaled_figures(figures, nearest, computed(there, nearest.recompute))


def of_whole_stages(figures: Figures, factors: tuple[float, float]) -> Figures:
    """Return figures with forward and backward seconds scaled, communication left as it was."""
    forward, backward = factors
    return replace(
        figures,
        forward_s=figures.forward_s * forward,
        backward_s=figures.backward_s * backward,
        recompute_s=figures.recompute_s * backward,
    )


def stage_factors(
    profile: Profile, kinds: Mapping[str, str], setting: Setting, recompute: Recompute
) -> tuple[float, float]:
    """Return what whole stages take over the sum of their layers, forward and backward.

    Of the stages that are divided and as precise as a setting, the one nearest to it counts.  Where
    none was measured, a layer of it was not, or repetitions spread too far, 1.
    """
    divided = (setting.tensor, setting.context, setting.expert)
    stages = [
        s
        for s in profile.stages
        if (s.tensor, s.context, s.expert) == divided
        and (s.precision, s.seq_len) == (setting.precision, setting.seq_len)
        and s.spread <= SURE
    ]
    if not stages:
        return 1.0, 1.0
    nearest = min(
        stages,
        key=lambda s: (
            s.recompute != recompute,
            abs(math.log(s.micro_batch / setting.micro_batch)),
        ),
    )
    alone = {
        m.kind: m
        for m in profile.layers
        if (m.tensor, m.context, m.expert) == divided
        and (m.precision, m.seq_len) == (setting.precision, setting.seq_len)
        and (m.micro_batch, m.recompute) == (nearest.micro_batch, nearest.recompute)
        and not m.compiled
        and m.loss is None
    }
    parts = [alone.get(kinds.get(name, "")) for name in nearest.layers]
    surest = [part for part in parts if part is not None and part.spread <= SURE]
    if len(surest) < len(parts):
        return 1.0, 1.0
    forward_s = sum(part.forward_s for part in surest)
    backward_s = sum(part.backward_s for part in surest)
    return (
        nearest.forward_s / forward_s if forward_s else 1.0,
        nearest.backward_s / backward_s if backward_s else 1.0,
    )


def corrects(measurements: Sequence[LayerMeasurement], setting: Setting) -> bool:
    """Return whether measurements may change the figures of a setting."""
    return any(m.precision == setting.precision for m in measurements)


def _run_alike(m: LayerMeasurement, setting: Setting) -> bool:
    """Return whether a measured layer ran as a setting says."""
    if m.kind in ENDS:
        return m.kind != "head" or m.loss == setting.loss
    return m.compiled == setting.compiled


def _same_but_batch(m: LayerMeasurement, setting: Setting, recompute: Recompute) -> bool:
    return (
        m.tensor == setting.tensor
        and m.seq_len == setting.seq_len
        and (m.recompute == recompute or m.loss is not None)
        and (m.tensor == 1 or m.sequence_parallel)
    )


def _distance(
    m: LayerMeasurement, setting: Setting, recompute: Recompute
) -> tuple[bool, bool, float, float, float]:
    """Order measurements: run alike first, then by recompute, tensor, sequence, micro-batch."""
    return (
        not _run_alike(m, setting),
        m.recompute != recompute,
        abs(math.log(m.tensor / setting.tensor)),
        abs(math.log(m.seq_len / setting.seq_len)),
        abs(math.log(m.micro_batch / setting.micro_batch)),
    )


def _measured_figures(figures: Figures, m: LayerMeasurement) -> Figures:
    """Replace seconds and bytes; measured seconds divide among causes as computed ones do."""
    forward = m.forward_s / figures.whole_forward_s if figures.whole_forward_s else 0.0
    backward = m.backward_s / figures.whole_backward_s if figures.whole_backward_s else 0.0
    recompute_s = figures.recompute_s * backward
    # What is computed again has its own communication, which the arithmetic counts with that.
    if m.recompute_s is not None and figures.forward_tensor_s == 0 and m.recompute != "none":
        recompute_s = min(m.recompute_s, m.backward_s)
        rest_s = figures.backward_s + figures.backward_tensor_s
        backward = (m.backward_s - recompute_s) / rest_s if rest_s else 0.0
    return replace(
        figures,
        forward_s=m.forward_s - figures.forward_tensor_s * forward,
        forward_tensor_s=figures.forward_tensor_s * forward,
        backward_s=m.backward_s - recompute_s - figures.backward_tensor_s * backward,
        recompute_s=recompute_s,
        backward_tensor_s=figures.backward_tensor_s * backward,
        stored_bytes=float(m.stored_bytes),
        forward_transient_bytes=float(m.forward_transient_bytes),
        backward_transient_bytes=float(m.backward_transient_bytes),
        stores_input=True,
        provenance="measured",
        spread=m.spread,
    )


def _between(low: Figures, high: Figures, share: float) -> Figures:
    """Interpolate straight between two measured micro-batches."""

    def mix(a: float, b: float) -> float:
        return a + share * (b - a)

    return replace(
        low,
        forward_s=mix(low.forward_s, high.forward_s),
        forward_tensor_s=mix(low.forward_tensor_s, high.forward_tensor_s),
        backward_s=mix(low.backward_s, high.backward_s),
        recompute_s=mix(low.recompute_s, high.recompute_s),
        backward_tensor_s=mix(low.backward_tensor_s, high.backward_tensor_s),
        stored_bytes=mix(low.stored_bytes, high.stored_bytes),
        forward_transient_bytes=mix(low.forward_transient_bytes, high.forward_transient_bytes),
        backward_transient_bytes=mix(low.backward_transient_bytes, high.backward_transient_bytes),
        stores_input=True,
        provenance="interpolated",
        spread=max(low.spread, high.spread),
    )


def _scaled_figures(figures: Figures, m: LayerMeasurement, there: Figures) -> Figures:
    """Scale the arithmetic by measured over computed at the nearest measured setting."""

    def ratio(measured: float, computed: float) -> float:
        return measured / computed if measured > 0 and computed > 0 else 1.0

    forward = ratio(m.forward_s, there.whole_forward_s)
    backward = ratio(m.backward_s, there.whole_backward_s)
    # Where nothing was sent, what was measured says nothing of sending.
    sent = there.forward_tensor_s > 0
    return replace(
        figures,
        forward_s=figures.forward_s * forward,
        forward_tensor_s=figures.forward_tensor_s * (forward if sent else 1.0),
        backward_s=figures.backward_s * backward,
        recompute_s=figures.recompute_s * backward,
        backward_tensor_s=figures.backward_tensor_s * (backward if sent else 1.0),
        stored_bytes=figures.stored_bytes * ratio(m.stored_bytes, there.stored_bytes),
        forward_transient_bytes=figures.forward_transient_bytes
        * ratio(m.forward_transient_bytes, there.forward_transient_bytes),
        backward_transient_bytes=figures.backward_transient_bytes
        * ratio(m.backward_transient_bytes, there.backward_transient_bytes),
        provenance="fitted",
        spread=max(figures.spread, m.spread),
    )
