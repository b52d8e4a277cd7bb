"""Least seconds of a step by its degrees and micro-batch alone, of all parts of a cluster.

A rank does one action at a time.  Of P stages the fullest has ceil(n / P) of the n layers of a
kind, and at least its share of all layers, so that m micro-batches take

    step >= m · max(Σ_k n_k w_k / P, max_k ceil(n_k / P) w_k)

with w_k the fewest seconds of a layer of kind k in such a group of ranks.  On a part of a cluster
that is no less than on all of it, where a node has at least as many of the group's ranks
(planner.costs.collectives.inside_unit); the slowest device of a part may be quicker.  Degrees that
cannot be faster than a plan that is known never become families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.collectives import inside_unit
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.plan import Layout, TensorOverlap
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import PLAIN
from meshwright.planner.search.bounds.device_counts import LeastSteps
from meshwright.planner.search.offload_choices import activations
from meshwright.planner.search.space import (
    Degrees,
    captures,
    compiles,
    every_degrees,
    losses,
    micro_batches,
    plainest,
    relay_of,
    waits_for_host,
)

Seconds = NDArray[np.float64]


class _Computation(NamedTuple):
    """Choices that the seconds of layers depend on."""

    tensor: int
    context: int
    expert: int
    relay: int | None
    micro_batch: int


class DegreeBounds:
    """Bounds of the degrees of a cluster's parts."""

    def __init__(self, request: Request, store: FigureStore, least: LeastSteps) -> None:
        """`request` is of the whole cluster, `least` what its devices need at least."""
        self._request, self._least = request, least
        treated = activations(request.cluster, request.pins, space=request.space)
        self._tables = CostTables(request, treated, store=store)
        self._refusal = rules_of(request.framework, of_degrees=True)
        self._known: dict[_Computation, Seconds] = {}
        """[kind] Fewest seconds of a layer, both ways."""

    def degrees_below(self, part: Request, limit_s: float) -> list[Degrees]:
        """Return the degrees of a part that may take less than some seconds."""
        kept: list[Degrees] = []
        degrees, computations, numbers = [], [], []
        for at in every_degrees(part):
            if self._least.step_s(at.pipeline, at.tensor * at.context * at.data) >= limit_s:
                continue
            if not self._lies_closer(part, at):
                kept.append(at)
                continue
            relay = relay_of(part, at)
            shapes = micro_batches(part, at)
            new = [
                _Computation(at.tensor, at.context, at.expert, relay, size) for size, _ in shapes
            ]
            if not self._known.keys() >= set(new) and self._refuses(part, at):
                continue
            computations += new
            degrees += [at] * len(new)
            numbers += [(count, at.pipeline) for _, count in shapes]
        if not degrees:
            return kept
        self._work_out(computations, degrees)
        layers_s = np.array([self._known[at] for at in computations]).T
        layers_s *= self._least.quicker(part.cluster.devices) * (1 - SLACK)
        count, stages = np.array(numbers).T
        layers = self._least.layers
        fullest_s = (-(-layers[:, None] // stages) * layers_s).max(axis=0)
        step_s = count * np.maximum(layers @ layers_s / stages, fullest_s)
        kept += [degrees[at] for at in np.flatnonzero(step_s < limit_s).tolist()]
        return list(dict.fromkeys(kept))

    def _lies_closer(self, part: Request, at: Degrees) -> bool:
        """Return whether a whole cluster's nodes have as many ranks of each group as a part's."""
        [whole], [group] = self._request.cluster.groups, part.cluster.groups
        steps = ((at.tensor, 1), (at.context, at.tensor), (at.expert, 1))
        return all(
            inside_unit(whole.devices_per_node, ranks, stride)
            >= inside_unit(group.devices_per_node, ranks, stride)
            for ranks, stride in steps
        )

    def _refuses(self, part: Request, degrees: Degrees) -> bool:
        layout = plainest(part, degrees)
        return self._refusal(part.model, part.cluster, part.job, layout) is not None

    def _work_out(self, computations: Sequence[_Computation], degrees: Sequence[Degrees]) -> None:
        """Let the seconds of some computations be known, each of these degrees."""
        each = {
            at: self._layouts(at, home)
            for at, home in zip(computations, degrees, strict=True)
            if at not in self._known
        }
        if not each:
            return
        seconds = self._tables.fastest_s(
            [layout for layouts in each.values() for layout in layouts],
            self._request.pins.recompute,
        )
        starts = np.cumsum([0, *map(len, list(each.values())[:-1])])
        self._known.update(zip(each, np.minimum.reduceat(seconds, starts, axis=1).T, strict=True))

    def _layouts(self, at: _Computation, degrees: Degrees) -> list[Layout]:
        """Return a layout of each way to compute the same that may be the fastest."""
        request, pins = self._request, self._request.pins
        asynchronous = at.tensor > 1 and "async-tensor" in pins.allowed
        overlaps: list[TensorOverlap] = ["none", "async"] if asynchronous else ["none"]
        if pins.tensor_overlap is not None and at.tensor > 1:
            overlaps = [pins.tensor_overlap]
        blocks = compiles(request, degrees, PLAIN)
        waits = blocks == "block" and waits_for_host(request, degrees, at.micro_batch)
        return [
            Layout(
                tensor=at.tensor,
                context=at.context,
                expert=at.expert,
                data_shard=at.expert,
                zero=1 if at.expert > 1 else 0,
                micro_batch=at.micro_batch,
                loss=loss,
                compile=compiled,
                tensor_overlap=overlap,
                graphs=graphs,
                scales=request.scales,
                dispatch=(pins.dispatch if at.expert > 1 else None) or "alltoall",
                hierarchical_all_to_all=at.relay,
                sequence_parallel=request.framework.tensor.sequence_parallel or at.tensor == 1,
            )
            for compiled in ((blocks, "none") if waits else (blocks,))
            for loss in losses(request, PLAIN)
            for overlap in overlaps
            for graphs in captures(request, at.tensor * at.context * at.expert)
        ]
