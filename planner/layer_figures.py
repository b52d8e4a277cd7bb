"""Seconds and bytes of each layer kind under each recompute choice, before anything is sharded.

Operators from `planner.arithmetic`, their seconds from the device's curve and the tiers' links,
corrected by a profile.  The figures depend only on how a layer is divided, so one entry serves all
layouts that differ in data parallelism, pipeline and schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from planner import arithmetic, collectives, compute
from planner.calibration import Figures, calibrated
from planner.cluster import ClusterSpec, Collective
from planner.collectives import Levels, group_levels
from planner.model import Layer, ModelGraph
from planner.operator_table import BACKWARD_OF, RECOMPUTES, Operator, Setting
from planner.plan import Layout
from planner.prediction import Assumption
from planner.profile import Profile, Recompute
from planner.rates import Rates

KindFigures = dict[str, tuple[Figures, ...]]
"""By Layer.kind, in the order none, selective, full."""


class LayerFigures:
    """The figures of a model's layer kinds on a cluster, each setting worked out once."""

    def __init__(
        self, model: ModelGraph, cluster: ClusterSpec, profile: Profile | None, rates: Rates
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.profile = profile
        self._rates = rates
        self._layers = {layer.kind: layer for layer in model.layers}
        self._known: dict[tuple[object, ...], tuple[KindFigures, tuple[Assumption, ...]]] = {}

    def of(self, setting: Setting, layout: Layout) -> KindFigures:
        """Return every kind's figures, in a setting whose groups lie as the layout says."""
        return self._entry(setting, layout)[0]

    def assumptions(self, setting: Setting, layout: Layout) -> tuple[Assumption, ...]:
        """Return what was not measured of these figures, and where it came from."""
        return self._entry(setting, layout)[1]

    def _entry(
        self, setting: Setting, layout: Layout
    ) -> tuple[KindFigures, tuple[Assumption, ...]]:
        groups = (
            group_levels(self.cluster.tiers, layout, ("tensor",)),
            group_levels(self.cluster.tiers, layout, ("context",)),
            self._expert_group(layout),
        )
        spans = (tuple((level.tier.name, level.members) for level in group) for group in groups)
        key = (setting, *spans)
        found = self._known.get(key)
        if found is None:
            figures = {
                kind: self._layer_figures(layer, setting, groups)
                for kind, layer in self._layers.items()
            }
            found = self._known[key] = (figures, self._origins(figures))
        return found

    def _layer_figures(
        self, layer: Layer, setting: Setting, groups: tuple[Levels, Levels, Levels]
    ) -> tuple[Figures, ...]:
        """Return the figures of one layer kind, one for each recompute choice."""
        by_axis = dict(zip(("tensor", "context", "expert"), groups, strict=True))
        measurements = self.profile.layers if self.profile else ()

        def computed(at: Setting, recompute: Recompute) -> Figures:
            return self._computed(layer, at, recompute, by_axis)

        return tuple(
            calibrated(measurements, layer.kind, setting, recompute, computed)
            for recompute in RECOMPUTES
        )

    def _computed(
        self, layer: Layer, setting: Setting, recompute: Recompute, groups: dict[str, Levels]
    ) -> Figures:
        """Return a layer's figures by arithmetic alone.

        A pass takes what the device needs or what the host needs to start its kernels, whichever is
        more; how far the device is behind tells what else the host may do unseen.
        """
        table = arithmetic.table(self.model, layer, setting)
        again = table.recomputed(recompute)
        on = self._rates.device
        forward_s = sum(compute.forward_s(op, on) for op in table.operators)
        backward_s = sum(compute.backward_s(op, on) for op in table.operators)
        recompute_s = sum(compute.forward_s(op, on) for op in again)
        kernels = sum(op.kernels for op in table.operators)
        forward_host_s = self._rates.host_s(kernels, "forward")
        backward_host_s = self._rates.host_s(kernels, "backward")
        recompute_host_s = self._rates.host_s(sum(op.kernels for op in again), "forward")
        forward_tensor_s, backward_tensor_s = self._tensor_s(table.operators, again, groups)
        late = [op for op in table.operators if self._weight_waits(layer, op)]
        weight_s = sum(compute.backward_s(op, on) for op in late) / compute.MATMUL_BACKWARD
        inputs = {name for op in late for name in op.inputs}
        stored_bytes = table.stored_bytes(recompute)
        packable_bytes, elements = table.packable(recompute, setting.element_bytes)
        return Figures(
            forward_s=max(forward_s, forward_host_s),
            forward_tensor_s=forward_tensor_s,
            backward_s=max(backward_s, backward_host_s),
            recompute_s=max(recompute_s, recompute_host_s),
            backward_tensor_s=backward_tensor_s,
            forward_ahead_s=max(0.0, forward_s - forward_host_s),
            backward_ahead_s=max(
                0.0, backward_s + recompute_s - backward_host_s - recompute_host_s
            ),
            stored_bytes=stored_bytes,
            packable_share=packable_bytes / stored_bytes if stored_bytes else 0.0,
            elements_per_stored_byte=elements / stored_bytes if stored_bytes else 0.0,
            forward_transient_bytes=table.forward_transient_bytes(recompute),
            backward_transient_bytes=table.backward_transient_bytes(recompute),
            returned_bytes=table.returned_bytes,
            stores_input="x" in table.stored(recompute),
            provenance=on.curve.provenance,
            spread=on.curve.spread,
            weight_share=weight_s / backward_s if backward_s else 0.0,
            kept_bytes=sum(table.sizes[name] for name in inputs)
            + sum(sum(op.outputs.values()) for op in late),
        )

    def _weight_waits(self, layer: Layer, operator: Operator) -> bool:
        """Whether a split backward makes the gradient of an operator's weight in W.

        The runtime puts off Linears alone: not experts, whose matrices lie in one parameter, nor
        the transposed ones of GPT-2's blocks.
        """
        if operator.kind != "matmul" or operator.name.startswith("expert"):
            return False
        a = self.model.architecture
        return a is None or a.family != "gpt2" or layer.kind == "head"

    def _tensor_s(
        self, operators: Iterable[Operator], again: Iterable[Operator], groups: dict[str, Levels]
    ) -> tuple[float, float]:
        """Return the seconds of communication inside a layer: forward, backward with recompute."""
        forward_s = backward_s = 0.0
        for operator in operators:
            if operator.kind in BACKWARD_OF:
                group, size = groups[operator.axis], operator.moved_bytes
                forward_s += self._rates.link_s(cast(Collective, operator.kind), size, group)
                backward_s += self._rates.link_s(BACKWARD_OF[operator.kind], size, group)
        for operator in again:
            if operator.kind in BACKWARD_OF:
                group, size = groups[operator.axis], operator.moved_bytes
                backward_s += self._rates.link_s(cast(Collective, operator.kind), size, group)
        return forward_s, backward_s

    def _expert_group(self, layout: Layout) -> Levels:
        """Experts take neighbouring ranks of tensor, context and data_shard, innermost first."""
        if layout.expert == 1:
            return ()
        return collectives.levels(self.cluster.tiers, [(layout.expert, 1)], devices=layout.devices)

    def _origins(self, figures: KindFigures) -> tuple[Assumption, ...]:
        kinds: dict[str, list[str]] = {}
        for kind, choices in figures.items():
            for origin in sorted({choice.provenance for choice in choices} - {"measured"}):
                kinds.setdefault(origin, []).append(kind)
        birth = self.profile.birth if self.profile else None
        profile = f", profile of {birth.date} on {birth.host}" if birth else ""
        return tuple(
            Assumption(
                what=f"seconds and bytes of {', '.join(names)}",
                provenance=origin,
                source=f"planner/arithmetic.py{profile}",
            )
            for origin, names in sorted(kinds.items())
        )
