"""What a run keeps on the host: the seconds of bringing it to the device and back.

Symbols: N parameters that a rank holds, B bytes over the host's link, W its rate, m micro-batches.

    parameters    each micro-batch's forward and backward bring them:  max(0, B / W - busy) twice;
                  gradients of trained ones go back once a step
    optimizer     gradients go down behind the backward, AdamW runs on the host's memory, working
                  copies come up:  max(0, 2 N / W - backward) + 40 N / (host memory) + 2 N / W
    activations   what is stored goes down behind the forward, and comes up behind the backward

Source: Ren et al., 2021 (ZeRO-Offload, arXiv:2101.06840) for what moves and when.
"""

from __future__ import annotations

from dataclasses import replace

from planner.backends.placed import Parameters, states_of
from planner.backends.runs import Run
from planner.costs.memory import Sharing
from planner.costs.rates import (
    HOST_LINK_SHARE,
    HOST_MEMORY_SHARE,
    USUAL_HOST_MEMORY_BYTES_PER_S,
)

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, where the catalogue does not say."""
HOST_OPTIMIZER_BYTES = 40
"""Memory traffic per parameter of AdamW on the host."""
WIRE_BYTES = 2
"""Of a gradient and of a working parameter on the host's link."""


def offload_s(
    run: Run,
    sharing: Sharing,
    parameters: Parameters,
    *,
    stored_bytes: float,
    forward_s: float,
    backward_s: float,
) -> float:
    """Seconds that a step is longer since something lies on the host.

    `stored_bytes`, `forward_s` and `backward_s` are of one micro-batch on a stage, `parameters` all
    that the stage holds.
    """
    if not run.offload:
        return 0.0
    rate = _link_bytes_per_s(run)
    m, seconds = run.micro_batches, 0.0
    trained = 0.0 if run.task in ("lora", "qlora") else parameters.count
    zero = sharing.zero
    if "params" in run.offload:
        weights = states_of(run, replace(sharing, offload="none"), parameters).parameters_bytes
        if zero == 3 and trained:  # what is gathered is in 16 bits, and half of the fp32 shard
            weights /= 2
        each_s = weights / rate
        seconds += m * (max(0.0, each_s - forward_s) + max(0.0, each_s - backward_s))
        if "optimizer" not in run.offload:
            held = trained / (run.sharding_ranks if zero >= 2 else 1)
            seconds += max(0.0, WIRE_BYTES * held / rate - backward_s)
    if "optimizer" in run.offload and trained:
        held = trained / (run.sharding_ranks if zero else 1)
        moved_s = WIRE_BYTES * held / rate
        seconds += max(0.0, moved_s - backward_s) + moved_s
        seconds += HOST_OPTIMIZER_BYTES * held / _memory_bytes_per_s(run)
    if "activations" in run.offload:
        each_s = stored_bytes / rate
        seconds += m * (max(0.0, each_s - forward_s) + max(0.0, each_s - backward_s))
    return seconds


def _link_bytes_per_s(run: Run) -> float:
    group = run.cluster.groups[0]
    link = group.host_link_bytes_per_s or USUAL_LINK_BYTES_PER_S
    return HOST_LINK_SHARE * link / min(group.host_link_devices, group.devices_per_node)


def _memory_bytes_per_s(run: Run) -> float:
    """Bytes per second of one device's share of its host's memory."""
    group = run.cluster.groups[0]
    whole = group.host_memory_bytes_per_s or USUAL_HOST_MEMORY_BYTES_PER_S
    return HOST_MEMORY_SHARE * whole / group.devices_per_node
