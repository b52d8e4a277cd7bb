"""Seconds and bytes of each layer kind under each recompute choice, before anything is sharded.

Operators from `planner.operators.layer_operators`, their seconds from the device's curve and the
tiers' links, corrected by a profile.  The figures depend only on how a layer is divided, so one
entry serves all layouts that differ in data parallelism, pipeline and schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.architectures.parameters import routes
from meshwright.planner.costs import collectives, compute, layer_seconds
from meshwright.planner.costs.calibration import (
    Computed,
    Figures,
    calibrated_figures,
    corrects,
    join_figures,
    of_whole_stages,
    one_of,
    stage_factors,
)
from meshwright.planner.costs.collectives import Levels, group_steps
from meshwright.planner.costs.cost_cache import FigureBasis, FigureStore, KindFigures, Rows
from meshwright.planner.costs.layer_seconds import (
    ENDS,
    HostPasses,
    KernelSeconds,
    LinkSeconds,
    link_rule,
)
from meshwright.planner.documents.prediction import Assumption
from meshwright.planner.operators import layer_operators as arithmetic
from meshwright.planner.operators.operator_table import (
    RECOMPUTES,
    GroupAxis,
    ManySettings,
    Operator,
    OperatorTable,
    Setting,
    either,
    larger,
    share,
)

if TYPE_CHECKING:
    from meshwright.planner.costs.hardware_rates import Rates
    from meshwright.planner.documents.cluster import ClusterSpec, Collective
    from meshwright.planner.documents.model import Layer, ModelGraph
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.documents.profile import LayerMeasurement, Profile, Recompute
    from meshwright.planner.operators.expert_routing import Routing

Floats = NDArray[np.float64]
Groups = tuple[Levels, Levels, Levels, Levels, Levels, Levels]
"""By `GroupAxis`."""


class LayerFigures:
    """The figures of a model's layer kinds on a cluster, each setting worked out once."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        profile: Profile | None,
        rates: Rates,
        recomputes: tuple[Recompute, ...] = RECOMPUTES,
        store: FigureStore | None = None,
    ) -> None:
        """`store` has figures of other clusters; what a profile corrects is not in it."""
        self.model = model
        self.cluster = cluster
        self.profile = profile
        self._rates = rates
        self._recomputes = recomputes
        framework = rates.framework
        eight_bits = rates.device.eight_bit_flops is not None
        self._seen = [
            link_rule(framework, sequence_parallel=divided, eight_bits=eight_bits)
            for divided in (False, True)
        ]
        self._devices_per_node = cluster.groups[0].devices_per_node
        self._layers = {layer.kind: layer for layer in model.layers}
        self._loss = model.loss_kind
        self._kinds = {name: layer.kind for name, layer in model.chain}
        self._known: dict[tuple[object, ...], tuple[KindFigures, tuple[Assumption, ...]]] = {}
        self._together: dict[tuple[object, ...], tuple[KindFigures, int]] = {}
        """Figures of many settings, and the place of one among them."""
        store = FigureStore() if store is None else store
        self._rows = store.rows(FigureBasis.of_cluster(model, cluster, rates, recomputes))
        self._groups: dict[tuple[object, ...], Levels] = {}
        self._named: dict[int, tuple[tuple[str, int], ...]] = {}
        """`_spans` of the groups, by where those lie in memory."""

    def figures_of(self, setting: Setting, layout: Layout) -> KindFigures:
        """Return every kind's figures, in a setting whose groups lie as the layout says."""
        return self._entry(setting, layout)[0]

    def assumptions(self, setting: Setting, layout: Layout) -> tuple[Assumption, ...]:
        """Return what was not measured of these figures, and where it came from."""
        return self._entry(setting, layout)[1]

    def together(self, places: Sequence[tuple[Setting, Layout]]) -> KindFigures:
        """Return figures that are arrays [place].

        Settings that take the same branches share one table of operators (see `ManySettings`), so
        that thousands take a tenth of a second, and all their figures are known afterwards.  What a
        profile corrects is worked out one by one.
        """
        alike: dict[tuple[bool | int | str, ...], list[int]] = {}
        apart: list[tuple[list[int], KindFigures]] = []
        for index, (setting, layout) in enumerate(places):
            if self.profile is None or not corrects(self.profile.layers, setting):
                alike.setdefault(setting.branches, []).append(index)
            else:
                apart.append(([index], self.figures_of(setting, layout)))
        for indices in alike.values():
            apart.append((indices, self._many([places[index] for index in indices])))
        return {
            kind: tuple(
                join_figures(
                    [(indices, figures[kind][choice]) for indices, figures in apart], len(places)
                )
                for choice in range(len(self._recomputes))
            )
            for kind in self._layers
        }

    def _many(self, places: Sequence[tuple[Setting, Layout]]) -> KindFigures:
        """Return figures that are arrays [place], of settings that take the same branches.

        What a loss in chunks leaves as it is comes from the settings without it.
        """
        each = [setting for setting, _ in places]
        groups = [self._groups_of(layout) for _, layout in places]
        keys = [self._key(setting, group) for setting, group in zip(each, groups, strict=True)]
        if each[0].loss is None:
            figures = self._rows_of(keys, each, groups, list(self._layers))
        else:
            plain = [replace(setting, loss=None) for setting in each]
            without = [(setting, *key[1:]) for setting, key in zip(plain, keys, strict=True)]
            others = [kind for kind in self._layers if kind != self._loss]
            rows_of_kinds = self._rows_of(without, plain, groups, others)
            last = [self._loss] if self._loss in self._layers else []
            rows_of_kinds |= self._rows_of(keys, each, groups, last)
            figures = {kind: rows_of_kinds[kind] for kind in self._layers}
        for index, key in enumerate(keys):
            self._together[key] = figures, index
        return figures

    def _rows_of(
        self,
        keys: Sequence[tuple[object, ...]],
        each: Sequence[Setting],
        groups: Sequence[Groups],
        kinds: Sequence[str],
    ) -> KindFigures:
        """Return some kinds' figures as arrays [key]; what is not known is worked out."""
        figures: KindFigures = {}
        some = each[0]
        alike = some.branches, some.kernels, some.seq_len, some.precision

        def worked_out(kinds_here: Sequence[str], new: Sequence[int]) -> KindFigures:
            return self._worked_out(
                kinds_here, [each[at] for at in new], [groups[at] for at in new]
            )

        others = [kind for kind in kinds if kind != self._loss]
        for names in (others, [self._loss] if self._loss in kinds else []):
            if names:
                rows = self._rows.setdefault((alike, names == [self._loss]), Rows())
                figures |= rows.figures_of(keys, partial(worked_out, names))
        return figures

    def _worked_out(
        self, kinds: Sequence[str], each: Sequence[Setting], groups: Sequence[Groups]
    ) -> KindFigures:
        """Return figures that are arrays [setting], of groups that lie in these places."""
        settings = ManySettings.framework(each)
        link_s = self._links_s(groups)
        figures = {}
        for kind in kinds:
            layer = self._layers[kind]
            table = arithmetic.table(self.model, layer, settings)
            figures[kind] = tuple(
                self._computed_figures(layer, settings, table, choice, link_s)
                for choice in self._recomputes
            )
        return figures

    def _entry(
        self, setting: Setting, layout: Layout
    ) -> tuple[KindFigures, tuple[Assumption, ...]]:
        groups = self._groups_of(layout)
        key = self._key(setting, groups)
        figures_and_origins = self._known.get(key)
        if figures_and_origins is None:
            figures = {}
            together, index = self._together.get(key, ({}, 0))
            for kind, layer in self._layers.items():
                if together:
                    figures[kind] = tuple(one_of(choice, index) for choice in together[kind])
                else:
                    figures[kind] = self._layer_figures(layer, setting, groups)
            figures_and_origins = self._known[key] = (figures, self._origins(figures))
        return figures_and_origins

    def _groups_of(self, layout: Layout) -> Groups:
        """Experts take neighbouring ranks of tensor, context and data_shard, innermost first."""
        spread = layout.expert > 1
        experts = ((layout.expert, layout.expert_tensor),) if spread else ()
        part, near = layout.expert_tensor, layout.hierarchical_all_to_all
        parts = ((part, 1),) if spread and part > 1 else ()
        across = ((layout.expert // near, near * part),) if near else ()
        inside = ((near, part),) if near else ()
        of_axes = group_steps(layout, ("tensor",)), group_steps(layout, ("context",))
        each = (*of_axes, experts, parts, across, inside)
        return cast(Groups, tuple(self._levels(steps, layout.devices) for steps in each))

    def _levels(self, steps: tuple[tuple[int, int], ...], devices: int) -> Levels:
        key = (steps, devices)
        if key not in self._groups:
            group = collectives.levels(self.cluster.tiers, steps, devices=devices)
            self._groups[key], self._named[id(group)] = group, _spans(group)
        return self._groups[key]

    def _key(self, setting: Setting, groups: Groups) -> tuple[object, ...]:
        """Return the setting and the groups' names, which figures depend on."""
        named = self._named
        return setting, *[named[id(group)] for group in groups]

    def _layer_figures(self, layer: Layer, setting: Setting, groups: Groups) -> tuple[Figures, ...]:
        """Return the figures of one layer kind, one for each recompute choice."""
        measurements = self._measured_like(setting, groups)
        near = (self._levels(((setting.tensor, 1),), self.cluster.devices), *groups[1:])
        tables: dict[Setting, OperatorTable] = {}

        def computed_in(place: Groups) -> Computed:
            link_s = self._link_s(place)

            def computed_figures(at: Setting, recompute: Recompute) -> Figures:
                if at not in tables:
                    tables[at] = arithmetic.table(self.model, layer, at)
                return self._computed_figures(layer, at, tables[at], recompute, link_s)

            return computed_figures

        here = computed_in(near if measurements else groups)
        result = tuple(
            calibrated_figures(measurements, layer.kind, setting, recompute, here)
            for recompute in self._recomputes
        )
        if measurements and _spans(near[0]) != _spans(groups[0]):
            there = computed_in(groups)
            result = tuple(
                _moved_figures(figures, here(setting, recompute), there(setting, recompute))
                for figures, recompute in zip(result, self._recomputes, strict=True)
            )
        if self.profile is None or not self.profile.stages or not measurements:
            return result
        factors = [
            stage_factors(self.profile, self._kinds, setting, recompute)
            for recompute in self._recomputes
        ]
        return tuple(map(of_whole_stages, result, factors))

    def _measured_like(self, setting: Setting, groups: Groups) -> Sequence[LayerMeasurement]:
        """Return what was measured of layers, but not over a context group that lies elsewhere.

        Neighbours were measured, tensor ranks innermost; `_moved` goes on from them.
        """
        measured = self.profile.layers if self.profile else ()
        if setting.context == 1:
            return measured
        there = self._levels(((setting.context, setting.tensor),), self.cluster.devices)
        if _spans(there) == _spans(groups[1]):
            return measured
        return [m for m in measured if m.context == 1]

    def _computed_figures(
        self,
        layer: Layer,
        setting: Setting,
        table: OperatorTable,
        recompute: Recompute,
        link_s: LinkSeconds,
    ) -> Figures:
        """Return a layer's figures by arithmetic alone; arrays where settings are many.

        A pass takes what the device needs or what the host needs to start its kernels, whichever is
        more; how far the device is behind tells what else the host may do unseen.
        """
        again, on = table.recomputed_operators(recompute), self._rates.device
        recipe = compute.recipe_of(self._rates.framework, setting.precision, setting.scales)
        if recipe is not None:
            on = compute.rates_with_scales(on, recipe)
        if setting.narrow_weights:
            on = compute.with_narrow_weights(on, self._rates.framework)
        if setting.compiled:
            on = compute.compiled_rates(on)
        kernel_s = layer_seconds.passes(table, recompute, on)
        if setting.overlaps_tensors:
            kernel_s = layer_seconds.in_pieces(table, again, setting.tensor, kernel_s)
        host = self._host_passes(table, setting, kernel_s, recompute)
        rule = self._seen[setting.sequence_parallel]
        if recipe is not None and not recipe.gathers:
            rule = replace(rule, gathered=1.0)
        if setting.compiled:  # a graph waits for what an exchange brings as soon as it has begun it
            rule = replace(rule, shared=0.0)
        if setting.overlaps_tensors:
            rule = replace(rule, beside=self._rates.framework.tensor.async_overlap)
        forward_tensor_s, backward_tensor_s = layer_seconds.seen_links(
            layer_seconds.collectives(table, again, link_s, rule, on), kernel_s, rule
        )
        window = self._rates.framework.host.window
        experts = self._rates.framework.experts
        # Behind another micro-batch's passes the device has work while its host waits for counts.
        counted = experts.counts == "host" and not experts.overlap and routes(layer.kind)
        links_s = forward_tensor_s + backward_tensor_s
        seen = layer_seconds.with_host(kernel_s, host, links_s, window, counted=counted)
        forward_s, backward_s, recompute_s = (
            kernel_s.forward_s,
            kernel_s.backward_s,
            kernel_s.recompute_s,
        )
        end = layer.kind in ENDS
        late = [op for op in table.operators if self._weight_waits(layer, op, setting)]
        weight_s = sum(layer_seconds.backward_s(op, on, end=end) for op in late)
        weight_s = weight_s / compute.MATMUL_BACKWARD
        inputs = {name for op in late for name in op.inputs}
        stored_bytes = table.stored_bytes(recompute)
        packable_bytes, elements = table.packable(recompute, setting.element_bytes)
        working_bytes = table.backward_transient_bytes(recompute)
        each = setting.element_bytes
        fresh_bytes = table.backward_transient_bytes(recompute, weight_bytes=each)
        late_bytes = table.backward_transient_bytes(recompute, late={op.name for op in late})
        return Figures(
            forward_s=seen.forward_s,
            forward_tensor_s=forward_tensor_s,
            backward_s=seen.backward_s,
            recompute_s=seen.recompute_s,
            waits_s=seen.waits_s,
            forward_waits_s=larger(0.0, seen.forward_s - forward_s),
            forward_launch_s=host.forward_s,
            backward_launch_s=host.backward_s + host.recompute_s,
            backward_tensor_s=backward_tensor_s,
            forward_ahead_s=larger(0.0, forward_s - host.forward_s),
            backward_ahead_s=larger(
                0.0, backward_s + recompute_s - host.backward_s - host.recompute_s
            ),
            stored_bytes=stored_bytes,
            own_share=share(table.own_bytes(recompute), stored_bytes),
            packable_share=share(packable_bytes, stored_bytes),
            elements_per_stored_byte=share(elements, stored_bytes),
            forward_transient_bytes=table.forward_transient_bytes(recompute),
            backward_transient_bytes=working_bytes,
            fresh_bytes=fresh_bytes - working_bytes,
            late_bytes=late_bytes - working_bytes,
            returned_bytes=table.returned_bytes,
            returned_anew_bytes=table.returned_anew_bytes(recompute),
            stores_input="x" in table.stored_tensors(recompute),
            provenance=on.curve.provenance,
            spread=on.curve.spread,
            weight_share=share(weight_s, backward_s),
            kept_bytes=sum(table.sizes[name] for name in inputs)
            + sum(sum(op.outputs.values()) for op in late),
        )

    def _link_s(self, groups: Groups) -> LinkSeconds:
        """Return the seconds of collectives in one place."""
        by_axis = dict(zip(get_args(GroupAxis), groups, strict=True))

        def link_s(
            operation: Collective,
            size_bytes: float,
            axis: GroupAxis,
            routing: Routing | None = None,
        ) -> float:
            group = by_axis[axis]
            if operation == "all_to_all" and axis == "expert":
                return self._rates.exchange_s(size_bytes, group, routing)
            seconds = self._rates.link_s(operation, size_bytes, group)
            return either(size_bytes > 0, seconds, 0.0)

        return link_s

    def _links_s(self, places: Sequence[Groups]) -> LinkSeconds:
        """Return the seconds of collectives in many places: arrays [place]."""
        members: dict[GroupAxis, dict[object, tuple[Levels, list[int]]]] = {}
        known_s: dict[tuple[str, GroupAxis, bytes], float] = {}
        for index, groups in enumerate(places):
            for axis, group in zip(get_args(GroupAxis), groups, strict=True):
                of_axis = members.setdefault(axis, {})
                of_axis.setdefault(_spans(group), (group, []))[1].append(index)

        def link_s(
            operation: Collective,
            size_bytes: float,
            axis: GroupAxis,
            routing: Routing | None = None,
        ) -> float:
            sizes = np.broadcast_to(np.asarray(size_bytes, dtype=float), (len(places),))
            # Every choice of what is recomputed has the same collectives.
            key = operation, axis, sizes.tobytes()
            if routing is None and key in known_s:
                return known_s[key]
            result = np.empty(len(places))
            for group, indices in members[axis].values():
                if operation == "all_to_all" and axis == "expert":
                    result[indices] = self._rates.exchange_s(sizes[indices], group, routing)
                    continue
                result[indices] = self._rates.link_s(operation, sizes[indices], group)
            seconds = cast(float, np.where(sizes > 0, result, 0.0))
            if routing is None:
                known_s[key] = seconds
            return seconds

        return link_s

    def _host_passes(
        self, table: OperatorTable, setting: Setting, kernel_s: KernelSeconds, recompute: Recompute
    ) -> HostPasses:
        """A CPU's own kernels run in the thread that starts them, and its curve contains it."""
        if self._rates.on_cpu:
            return HostPasses(forward_s=0.0, backward_s=0.0, recompute_s=0.0)
        framework = self._rates.framework
        return layer_seconds.host_passes(
            framework,
            table,
            setting,
            kernel_s,
            recompute=recompute,
            devices_per_node=self._devices_per_node,
        )

    def _weight_waits(self, layer: Layer, operator: Operator, setting: Setting) -> bool:
        """Return whether a split backward makes the gradient of an operator's weight in W.

        The runtime puts off Linears alone: not experts, whose matrices lie in one parameter, nor
        the transposed ones of GPT-2's blocks, nor what a loss in chunks multiplies by.
        """
        if layer.kind == self._loss and setting.loss is not None:
            return False
        if operator.kind != "matmul" or operator.name.startswith("expert"):
            return False
        a = self.model.architecture
        return a is None or a.family != "gpt2" or layer.kind == "head"

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
                source=f"planner/operators/layer_operators.py{profile}",
            )
            for origin, names in sorted(kinds.items())
        )


def _moved_figures(figures: Figures, here: Figures, there: Figures) -> Figures:
    """Return figures of a tensor group elsewhere than the neighbours that were measured.

    What they send takes longer by what arithmetic says that it takes longer: most of what is
    measured beside that, as waiting for each other, is no slower over a slower link.
    """
    forward_s = figures.forward_tensor_s + there.forward_tensor_s - here.forward_tensor_s
    backward_s = figures.backward_tensor_s + there.backward_tensor_s - here.backward_tensor_s
    return replace(
        figures,
        forward_tensor_s=max(0.0, forward_s),
        backward_tensor_s=max(0.0, backward_s),
        provenance="fitted" if figures.provenance == "measured" else figures.provenance,
    )


def _spans(group: Levels) -> tuple[tuple[str, int], ...]:
    """Return what distinguishes one group's levels from another's: names of tiers and members."""
    return tuple((level.tier.name, level.members) for level in group)
