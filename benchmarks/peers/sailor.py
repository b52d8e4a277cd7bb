"""Sailor's problem: the fastest iteration of a 1F1B pipeline on a number of GPUs, by its own model.

A stage spends its layers' forward and backward and its transfers on a micro-batch.  An iteration is

    (m - 1) · max_i (compute_i + sent_i) + Σ_i (compute_i + sent_i) + max_i update_i
        + all-reduce within pipelines + all-reduce between them

on m = ⌈batch / (micro-batch · replicas of the first stage · pipelines)⌉ micro-batches.  A transfer
of x bytes takes x / bandwidth(log2 x), a polynomial; an all-reduce is a ring on buckets of 500 MB.
Memory of stage i of S: bytes per parameter, stored floats of S - i micro-batches, a fixed part.

That m looks at the first stage only and that the batch is split evenly are how Sailor scores, and
mean something only where all stages have as many replicas.  Such plans are `Layout` here: equal
pipelines, each stage on equal replicas of equal tensor-parallel groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# An all-reduce works on so many bytes at a time.
BUCKET_BYTES = 5e8

Replica = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What Sailor's model says of a plan; `stage_bytes` by pipeline and stage, largest replica."""

    iteration_s: float
    pipeline_s: float
    all_reduce_s: float
    fits: bool
    micro_batches: int
    stage_bytes: tuple[tuple[float, ...], ...]

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max(max(of_pipeline) for of_pipeline in self.stage_bytes)


class Case:
    """A case by what its formulas ask for."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.batch: int = case["global_batch_size"]
        self.output_bytes: list[float] = case["model"]["act_output_bytes_tp1"]
        self.weight_bytes: list[float] = case["model"]["param_bytes_tp1"]
        self.memory: dict[str, Any] = case["memory"]
        self.per_node: dict[str, int] = case["gpus_per_node"]
        self._profile = case["profile"]
        self._links = case["network"]["p2p_poly"]

    def layer_s(self, gpu: str, micro_batch: int, tensor: int, what: str) -> list[float] | None:
        """Seconds by layer of `fwd_s`, `bwd_s` or `update_s`, or None if not profiled."""
        found = self._profile[gpu].get(str(micro_batch), {}).get(str(tensor))
        return None if found is None else found[what]

    def profiled(self, gpu: str) -> list[tuple[int, int]]:
        """Return the micro-batches and tensor-parallel degrees that were profiled, rising."""
        by_micro_batch = self._profile[gpu]
        return sorted((int(b), int(t)) for b, degrees in by_micro_batch.items() for t in degrees)

    def link(self, one: Replica, other: Replica) -> list[float]:
        """Polynomial of the bandwidth between the groups of two stages."""
        ranks = [min(r["tp"], self.per_node[r["gpu"]]) for r in (one, other)]
        found: list[float] = self._links[one["gpu"]][str(ranks[0])][other["gpu"]][str(ranks[1])]
        return found

    def ring_link(self, one: str, other: str) -> list[float]:
        """Polynomial of the bandwidth that an all-reduce sees between two GPUs."""
        found: list[float] = self._links[one]["1"][other]["1"]
        return found

    def needed_bytes(
        self, layers: Sequence[int], tensor: int, micro_batch: int, alive: int
    ) -> float:
        """Bytes of a stage with so many micro-batches alive."""
        m, of_degree = self.memory, self.memory["per_tp"][str(tensor)]
        parameters = sum(of_degree["params"][layer] for layer in layers)
        floats = sum(of_degree["act_floats"][layer] for layer in layers)
        fixed = m["framework_bytes_tp1" if tensor == 1 else "framework_bytes_tp_gt1"]
        return float(
            parameters * m["bytes_per_param"]
            + floats * micro_batch * m["bytes_per_float"] * alive
            + fixed
        )


def send_s(size_bytes: float, polynomial: Sequence[float]) -> float:
    """Seconds of one transfer; the polynomial gives GB/s, its argument is log2 of the MB."""
    if size_bytes == 0:
        return 0.0
    at, bandwidth = math.log2(size_bytes / 1e6), 0.0
    for power, coefficient in enumerate(reversed(polynomial)):
        bandwidth += coefficient * at**power
    return size_bytes / 1e9 / bandwidth


def all_reduce_s(size_bytes: float, ranks: int, polynomial: Sequence[float]) -> float:
    """Seconds of rings over full buckets and one over what is left."""
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    full, left = divmod(size_bytes, BUCKET_BYTES)
    seconds = full * 2 * (ranks - 1) * send_s(BUCKET_BYTES / ranks, polynomial)
    return seconds + 2 * (ranks - 1) * send_s(left / ranks, polynomial)


def _sent_s(
    case: Case, replicas: Sequence[Replica], others: Sequence[Replica], size_bytes: float
) -> float:
    """Slowest transfer of a stage's replicas to those of its neighbour, taken in turn."""
    return max(
        send_s(size_bytes, case.link(replica, others[number % len(others)]))
        for number, replica in enumerate(replicas)
    )


def _pipeline_s(
    case: Case, pipeline: dict[str, Any], micro_batch: int, micro_batches: int
) -> float:
    """Seconds of one pipeline without gradients' all-reduce; inf if a part is not profiled."""
    contents, stages = pipeline["layers_per_stage"], pipeline["stages"]
    last = len(contents) - 1
    compute_s, sent_s, update_s = [], [], 0.0
    for number, (layers, replicas) in enumerate(zip(contents, stages, strict=True)):
        longest_s = 0.0
        for replica in replicas:
            forward, backward, update = (
                case.layer_s(replica["gpu"], micro_batch, replica["tp"], what)
                for what in ("fwd_s", "bwd_s", "update_s")
            )
            if forward is None or backward is None or update is None:
                return math.inf
            longest_s = max(longest_s, sum(forward[at] + backward[at] for at in layers))
            update_s = max(update_s, update[layers[0]])
        compute_s.append(longest_s)
        onward_s = back_s = 0.0
        if number < last:
            size = case.output_bytes[layers[-1]] * micro_batch
            onward_s = _sent_s(case, replicas, stages[number + 1], size)
        if number > 0:  # what goes back is sized by the stage's own first layer
            size = case.output_bytes[layers[0]] * micro_batch
            back_s = _sent_s(case, replicas, stages[number - 1], size)
        if 0 < number < last:
            sent_s.append(onward_s + back_s)
        elif number == last:
            sent_s.append(2 * back_s)
        else:
            sent_s.append(onward_s if last < 3 else 2 * onward_s)
    slowest_s = max(c + s for c, s in zip(compute_s, sent_s, strict=True))
    return (micro_batches - 1) * slowest_s + sum(sent_s) + sum(compute_s) + update_s


def _within_s(case: Case, pipelines: Sequence[dict[str, Any]]) -> float:
    """Longest all-reduce among the replicas of one stage."""
    longest_s = 0.0
    for pipeline in pipelines:
        for layers, replicas in zip(pipeline["layers_per_stage"], pipeline["stages"], strict=True):
            shards = min(4, *(replica["tp"] for replica in replicas))
            size = sum(case.weight_bytes[at] / shards for at in layers)
            for one, other in pairwise(replicas):
                link = case.ring_link(one["gpu"], other["gpu"])
                longest_s = max(longest_s, all_reduce_s(size, len(replicas), link))
    return longest_s


def _between_s(case: Case, pipelines: Sequence[dict[str, Any]]) -> float:
    """Longest all-reduce of a stage of the deepest pipeline with those of the others."""
    longest_s = 0.0
    deepest = max(pipelines, key=lambda pipeline: len(pipeline["layers_per_stage"]))
    for layers, replicas in zip(deepest["layers_per_stage"], deepest["stages"], strict=True):
        size = sum(case.weight_bytes[at] for at in layers)
        for replica in replicas:
            link = case.ring_link(replica["gpu"], replica["gpu"])
            longest_s = max(longest_s, all_reduce_s(size, len(pipelines), link))
    return longest_s


def _stage_bytes(case: Case, pipeline: dict[str, Any], micro_batch: int) -> list[float]:
    contents, stages = pipeline["layers_per_stage"], pipeline["stages"]
    return [
        max(
            case.needed_bytes(layers, replica["tp"], micro_batch, len(contents) - number)
            for replica in replicas
        )
        for number, (layers, replicas) in enumerate(zip(contents, stages, strict=True))
    ]


def score(case: Case, plan: dict[str, Any], *, batch: int | None = None) -> Score:
    """Score a plan as Sailor does; `batch` replaces the case's."""
    pipelines, micro_batch = plan["pipelines"], plan["mbs"]
    replicas = plan.get("dp_ubatch") or len(pipelines[0]["stages"][0])
    samples = case.batch if batch is None else batch
    micro_batches = math.ceil(samples / (micro_batch * replicas * len(pipelines)))
    used = tuple(tuple(_stage_bytes(case, p, micro_batch)) for p in pipelines)
    fits = all(
        case.needed_bytes(layers, replica["tp"], micro_batch, len(p["stages"]) - number)
        <= case.memory["capacity_bytes"][replica["gpu"]]
        for p in pipelines
        for number, (layers, of_stage) in enumerate(
            zip(p["layers_per_stage"], p["stages"], strict=True)
        )
        for replica in of_stage
    )
    pipeline_s = max(_pipeline_s(case, p, micro_batch, micro_batches) for p in pipelines)
    all_reduces_s = _within_s(case, pipelines)
    if len(pipelines) > 1:
        all_reduces_s += _between_s(case, pipelines)
    return Score(
        iteration_s=pipeline_s + all_reduces_s,
        pipeline_s=pipeline_s,
        all_reduce_s=all_reduces_s,
        fits=fits and pipeline_s < math.inf,
        micro_batches=micro_batches,
        stage_bytes=used,
    )
