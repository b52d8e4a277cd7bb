"""Fine-tuning with adapters (LoRA, QLoRA): the best layout by the rules of public fine-tuners.

The search plans full training; with frozen weights the choice is small enough to look at all of
it, by the rules of each fine-tuner in turn: replicas or ZeRO over all devices, tensor and context
parallelism inside a node, the micro-batch, recomputation (none, half of the blocks, all), frozen
weights on the device or in host memory.

Weights in host memory cross the host's link as `planner.costs.sharding` says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.catalog import stacks
from planner.costs.hosts import host_room_bytes
from planner.errors import DocumentError, NoPlanFits
from planner.plan import Layout, Offload
from planner.prediction import Prediction
from planner.request import Request
from planner.search.space import divisors
from planner.setup import Recomputed, Setup
from planner.tables.predictions import setup_prediction
from planner.training import Lora
from planner.units import bytes_text

LARGEST_MICRO_BATCH = 32
RANK = 16
"""Of adapters, which nothing is priced by."""
QUANTISED_BYTES, WORKING_BYTES = 0.53, 2.0
"""Per frozen weight: 4 bits with a scale for every 64, or bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """What a public fine-tuner offers."""

    framework: str
    """Whose accounting rules price it."""
    zero: tuple[int, ...]
    recompute: tuple[Recomputed, ...]
    offload: tuple[Offload, ...] = ("none",)
    context: bool = False


TRANSFORMERS = Tuner(
    framework="transformers",
    zero=(0, 3),
    recompute=("none", "selective", "partial", "full"),
    offload=("none", "parameters"),
)
MEGATRON = Tuner(
    framework="megatron", zero=(1,), recompute=("none", "selective", "full"), context=True
)
"""NeMo's: sequence parallelism, adapters of attention alone, weights in 8 bits under fp8."""


def tuned(request: Request, *, quantised: bool) -> Prediction:
    """Return the fastest layout that fits; NoPlanFits says by how much the leanest misses."""
    model, cluster, job = request.model, request.cluster, request.job
    if model.architecture is None or model.architecture.experts is not None:
        raise DocumentError("work.tuning", f"{model.name}: adapters of dense language models only")
    best: Prediction | None = None
    leanest: Prediction | None = None
    lacks: list[tuple[float, str]] = []
    for setup in _setups(request, quantised=quantised):
        found = setup_prediction(_with_any_host(setup), _words(setup))
        if setup.layout.offload == "parameters":
            short = _lacking_host(setup)
            if short is not None:
                lacks.append(short)
                continue
            found = _with_host(found, _host_share_bytes(setup))
        if found.fits and (best is None or found.step_time_s < best.step_time_s):
            best = found
        if leanest is None or _peak(found) < _peak(leanest):
            leanest = found
    if best is not None:
        return best
    if leanest is None:
        raise NoPlanFits(
            f"no layout divides a global batch of {job.global_batch} over {cluster.devices} devices"
        )
    raise NoPlanFits(
        f"the leanest layout, {leanest.layout}, needs {bytes_text(_peak(leanest))} and "
        f"each device has {bytes_text(cluster.groups[0].accelerator.memory_bytes)}"
        + (f"; with weights on the host, {min(lacks)[1]}" if lacks else "")
    )


def _with_host(prediction: Prediction, host_bytes: float) -> Prediction:
    stages = tuple(s.model_copy(update={"host_bytes": host_bytes}) for s in prediction.stages)
    return prediction.model_copy(update={"stages": stages})


def _peak(prediction: Prediction) -> float:
    return max(stage.peak_memory_bytes for stage in prediction.stages)


def _setups(request: Request, *, quantised: bool) -> Iterator[Setup]:
    """Yield every layout of every fine-tuner."""
    cluster, job, architecture = request.cluster, request.job, request.model.architecture
    per_node = cluster.groups[0].devices_per_node
    assert architecture is not None
    adapters = replace(job, lora=job.lora or Lora(rank=RANK, quantised=quantised))
    tuners = (TRANSFORMERS,) if quantised else (TRANSFORMERS, MEGATRON)
    for tuner in tuners:
        stack = stacks()[tuner.framework]
        asked = replace(request, job=adapters, stack=stack)
        for tensor in divisors(per_node) if not quantised else (1,):
            if architecture.kv_heads % tensor:
                continue
            for context in divisors(per_node // tensor) if tuner.context else (1,):
                if job.seq_len % (2 * context) and context > 1:
                    continue
                data = cluster.devices // (tensor * context)
                if job.global_batch % data:
                    continue
                share = job.global_batch // data
                for micro_batch in divisors(share):
                    if micro_batch > LARGEST_MICRO_BATCH:
                        continue
                    for zero, recompute, offload in itertools.product(
                        tuner.zero if data > 1 else (0,), tuner.recompute, tuner.offload
                    ):
                        layout = Layout(
                            tensor=tensor,
                            context=context,
                            data_shard=data if zero else 1,
                            data_replicate=1 if zero else data,
                            zero=zero,
                            micro_batch=micro_batch,
                            micro_batches=share // micro_batch,
                            offload=offload,
                            sequence_parallel=stack.tensor.sequence_parallel,
                        )
                        yield Setup(
                            request=asked,
                            layout=layout,
                            recompute=recompute,
                        )


def _with_any_host(setup: Setup) -> Setup:
    """Return a run on hosts of unknown memory: what they must hold is looked at apart."""
    cluster = setup.request.cluster
    groups = tuple(g.model_copy(update={"host_memory_bytes": None}) for g in cluster.groups)
    cluster = cluster.model_copy(update={"groups": groups})
    return replace(setup, request=replace(setup.request, cluster=cluster))


def _words(setup: Setup) -> str:
    layout = setup.layout
    parts = [f"tp={layout.tensor}", f"dp={layout.data}"]
    if layout.context > 1:
        parts.append(f"cp={layout.context}")
    parts += [
        f"zero={layout.zero}",
        f"micro_batch={layout.micro_batch}",
        f"recompute={setup.recompute}",
    ]
    if layout.offload == "parameters":
        parts.append("offload=parameters")
    return " ".join(parts)


def _host_share_bytes(setup: Setup) -> float:
    """Return the weights that one rank keeps on the host."""
    layout, lora = setup.layout, setup.request.job.lora
    quantised = lora is not None and lora.quantised
    each = QUANTISED_BYTES if quantised else WORKING_BYTES
    weights = each * setup.request.model.parameters / layout.tensor
    return weights / layout.data if layout.zero == 3 else weights


def _lacking_host(setup: Setup) -> tuple[float, str] | None:
    """Return how many bytes a node's host would need for the weights and in words, if it lacks."""
    group = setup.request.cluster.groups[0]
    needed = _host_share_bytes(setup) * group.devices_per_node
    if group.host_link_bytes_per_s is None:
        return math.inf, f"the host link of {group.accelerator.name} is not known"
    room = host_room_bytes(group)
    if room is None:
        return needed, "the node's host memory is not known: give host_memory_bytes"
    usable = room * group.devices_per_node
    if needed <= usable:
        return None
    return needed, f"they need {bytes_text(needed)} of the {bytes_text(usable)} that it can pin"
