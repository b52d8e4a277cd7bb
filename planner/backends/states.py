"""Parameters on a rank, and the bytes of weights, gradients, master copies and moments they take.

Symbols: N parameters on the rank after tensor, pipeline and expert division, d the ranks that
divide optimizer states, w, g, m, o bytes of a weight, gradient, master parameter and both moments.

    ZeRO-0  (w + g + m + o) N
    ZeRO-1  (w + g) N + (m + o) N / d
    ZeRO-2  w N + (g + m + o) N / d
    ZeRO-3  (w + g + m + o) N / d        FSDP keeps fp32 shards: w + m is 4 there

Source: Rajbhandari et al., 2020 (ZeRO); Megatron-LM, distributed optimizer: 6 + 12 / d in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.backends.runs import EIGHT_BITS, Run
from planner.layers.architecture import graph_of
from planner.layers.arithmetic import local_parameters
from planner.model import Architecture
from planner.stack import Stack, Types

ADAPTER_RANK = 16
"""Of a LoRA adapter where the run does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one layer on one rank."""

    dense: float
    routed: float

    @property
    def count(self) -> float:
        """All of them."""
        return self.dense + self.routed

    def __add__(self, other: Parameters) -> Parameters:
        """Both layers' together."""
        return Parameters(dense=self.dense + other.dense, routed=self.routed + other.routed)

    def times(self, count: float) -> Parameters:
        """So many alike layers' together."""
        return Parameters(dense=self.dense * count, routed=self.routed * count)


NOTHING = Parameters(dense=0.0, routed=0.0)


def by_kind(a: Architecture, run: Run) -> dict[str, Parameters]:
    """Return the parameters of every layer kind on a rank."""
    graph = graph_of(a, name="model")
    result = {}
    for layer in graph.layers:
        dense, routed = local_parameters(graph, layer, tensor=run.tensor)
        if routed:
            divided = run.expert * run.expert_tensor if run.expert > 1 else run.tensor
            routed = routed * run.tensor / divided
        result[layer.kind] = Parameters(dense=dense, routed=routed)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of a stage on one rank."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def states(run: Run, stack: Stack, parameters: Parameters, *, on_device: bool = False) -> States:
    """Return what a stage's parameters take on a rank; `on_device`: as if nothing were offloaded.

    With the optimizer on the host gradients go there as they are reduced, where ZeRO divides them.
    """
    zero = stack.sharding.zero if run.zero is None else run.zero
    ranks = run.sharding_ranks
    dense = _states(run, stack, zero, parameters.dense, ranks)
    routed_ranks = ranks * run.tensor / (run.expert * run.expert_tensor)
    routed = _states(run, stack, zero, parameters.routed, max(1.0, routed_ranks))
    offload = frozenset() if on_device else run.offload
    gone = "optimizer" in offload or ("params" in offload and run.task in ("lora", "qlora"))
    return States(
        weights_bytes=0.0 if "params" in offload else dense.weights_bytes + routed.weights_bytes,
        gradients_bytes=0.0
        if gone and zero >= 2
        else dense.gradients_bytes + routed.gradients_bytes,
        optimizer_bytes=0.0 if gone else dense.optimizer_bytes + routed.optimizer_bytes,
    )


def _states(run: Run, stack: Stack, zero: int, n: float, ranks: float) -> States:
    full_precision = run.precision in ("fp32", "tf32")
    types = stack.types
    if types.full_with_zero and run.zero:
        types = Types()
    weight = 4.0 if full_precision else types.working
    master = 0.0 if full_precision else types.master
    gradient, moments = float(types.gradient), float(types.moments)
    narrow = run.precision in EIGHT_BITS and stack.eight_bit.narrow_states
    if narrow or run.precision == "fp16":
        gradient = 2.0
    if run.task in ("lora", "qlora"):
        kept = 0.5 + 0.5 * 4 / 64 if run.quantised else weight
        if narrow:
            kept = 1.0
        return States(
            weights_bytes=kept * n / (ranks if zero == 3 else 1),
            gradients_bytes=0.0,
            optimizer_bytes=0.0,
        )
    d = ranks if zero else 1.0
    if zero == 3:
        return States(
            weights_bytes=(master or weight) * n / d,
            gradients_bytes=gradient * n / d,
            optimizer_bytes=moments * n / d,
        )
    return States(
        weights_bytes=weight * n,
        gradients_bytes=gradient * n / (d if zero == 2 else 1.0),
        optimizer_bytes=(master + moments) * n / d,
    )
