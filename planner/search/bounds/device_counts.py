"""Least seconds of a step on each number of devices: what their arithmetic takes, well divided.

Of P stages that T x C x D devices share, the fullest has ceil(n / P) of the n layers of a kind, and
at least its share of all layers.  A rank does one action at a time, so that

    step >= batch / (T C D) · max(Σ_k n_k w_k / P, max_k ceil(n_k / P) w_k)

with w_k the fewest seconds that one device takes for a sample of a layer of kind k, alone or with
others; the slowest of fewer devices is quicker.  Memory, links, and which nodes devices are of are
left out: one number says that no part of a cluster with as many devices can be faster than a plan
that is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.compute import slowest
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.requests.request import Request
from meshwright.planner.search.offload_choices import activations
from meshwright.planner.search.space import (
    LARGEST_CONTEXT,
    Degrees,
    captures,
    chunk_rows,
    chunked_losses,
    divisors,
    most_tensor_parallel,
    plainest,
)

Seconds = NDArray[np.float64]
MOST_SHARED = 8
"""Ranks of tensor or context parallelism whose measured layers may take less than those of one."""
LARGEST = 3
"""Number of the largest possible micro-batch sizes that are asked about."""


class LeastSteps:
    """Least seconds of a request's arithmetic on some devices, and on each number of devices."""

    def __init__(self, request: Request, store: FigureStore | None = None) -> None:
        counts: dict[str, int] = {}
        for layer in request.model.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + layer.repeat
        self.layers = np.array(list(counts.values()))
        """[kind] Number of layers."""
        self.device_s = each_s = _device_seconds(request, store)
        """[kind] Fewest seconds of one device for a sample of a layer, both ways."""
        total_s = float(self.layers @ each_s)
        most = min(len(request.model.chain), request.cluster.devices)
        self._request = request
        self._fullest_s = [
            request.job.global_batch
            * (1 - SLACK)
            * max(total_s / stages, float(np.max(-(-self.layers // stages) * each_s)))
            for stages in range(1, most + 1)
        ]
        """[stages - 1] Least seconds of a step on one device a stage."""

    def step_s(self, stages: int, replicas: int) -> float:
        """Return what no plan takes less than of so many stages of so many devices each."""
        return self._fullest_s[stages - 1] / replicas * self.quicker(stages * replicas)

    def quicker(self, devices: int) -> float:
        """Return by how much the slowest of fewer devices takes less than that of all, at most."""
        return slowest(self._request.cluster.devices) / slowest(devices)

    def by_devices(self) -> Seconds:
        """[devices] Return what no plan on as many takes less than; inf where there is none."""
        pins, most = self._request.pins, self._request.cluster.devices
        replicas = np.array(
            replicas_of(self._request), dtype=np.int64
        )  # none, where pins leave none
        least_s = np.full(most + 1, np.inf)
        for stages, fullest_s in enumerate(self._fullest_s, 1):
            if pins.pipeline not in (None, stages) or ("pipeline" in pins.divided and stages == 1):
                continue
            devices = stages * replicas
            kept = devices <= most
            np.minimum.at(least_s, devices[kept], fullest_s / replicas[kept])
        finite = np.flatnonzero(np.isfinite(least_s))
        least_s[finite] *= [self.quicker(devices) for devices in finite.tolist()]
        return least_s


def replicas_of(request: Request) -> list[int]:
    """Return the numbers of devices that a stage may have: tensor x context x data."""
    job, pins, most = request.job, request.pins, request.cluster.devices
    length = request.model.positions or job.seq_len
    sets: list[Iterable[int]] = [
        _tensor_degrees(request),
        (
            degree
            for degree in divisors(length)
            if degree <= LARGEST_CONTEXT or pins.context is not None
        ),
        divisors(job.global_batch),
    ]
    products = {1}
    for values, pinned in zip(sets, (pins.tensor, pins.context, pins.data), strict=True):
        allowed = [value for value in values if pinned in (None, value)]
        products = {a * b for a in products for b in allowed if a * b <= most}
    return sorted(products)


def _tensor_degrees(request: Request) -> Iterator[int]:
    """Yield the degrees of tensor parallelism that the framework runs anywhere."""
    refusal = rules_of(request.framework, of_degrees=True)
    model, cluster, job = request.model, request.cluster, request.job
    for tensor in range(1, min(most_tensor_parallel(model), cluster.devices) + 1):
        degrees = Degrees(tensor=tensor, context=1, expert=1, pipeline=1, data=1)
        if refusal(model, cluster, job, plainest(request, degrees)) is None:
            yield tensor


def _device_seconds(request: Request, store: FigureStore | None) -> Seconds:
    """[kind] Return the fewest seconds of a device for a sample of a layer, both ways.

    Products only get slower as they get smaller, so that alone and with the largest micro-batches a
    device takes least.  What was measured may say otherwise, so that all of it is asked.
    """
    job, pins, space = request.job, request.pins, request.space
    tables = CostTables(request, activations(request.cluster, pins, space=space), store=store)
    measured = request.profile is not None
    shared = [1 << at for at in range(MOST_SHARED.bit_length())] if measured else [1]
    sizes = divisors(job.global_batch)[0 if measured else -LARGEST :]
    experts = divisors(request.model.expert_count) if request.model.expert_count else [1]
    # A part has the chunks of its own smallest device.
    memories = {group.accelerator.memory_bytes for group in request.cluster.groups}
    rows = {chunk_rows(request.model, memory_bytes) for memory_bytes in memories}
    ways = {pins.chunks, *itertools.chain.from_iterable(map(chunked_losses, rows))}
    places = [
        Layout(
            tensor=tensor,
            context=context,
            expert=expert,
            data_replicate=1,
            data_shard=expert,
            zero=1 if expert > 1 else 0,
            micro_batch=size,
            micro_batches=1,
            loss=loss,
            compile=compiled,
            graphs=graphs,
            scales=request.scales,
            sequence_parallel=request.framework.tensor.sequence_parallel or tensor == 1,
        )
        for tensor in shared
        if tensor <= most_tensor_parallel(request.model)
        for context in shared
        if job.seq_len % context == 0
        for expert in experts
        for size in sizes
        for compiled in ("none", "block")
        for graphs in captures(request, tensor * context * expert)
        for loss in ways
    ]
    ranks_s = tables.fastest_s(places, pins.recompute)
    per_sample = np.array([place.tensor * place.context / place.micro_batch for place in places])
    least_s: Seconds = (ranks_s * per_sample).min(axis=1)
    return least_s
