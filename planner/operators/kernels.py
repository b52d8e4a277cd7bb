"""Kernels: which kernels a layer is made of under a framework, and which tensors they keep.

A value of plain attributes, made once from a framework's document and a job, since tables of
operators read it for every layer and setting.  Its defaults are the modules of `transformers` as
PyTorch runs them one by one, with `meshwright.runtime.parallel.tensor_parallel` around them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.framework import NATURAL_SPREAD

if TYPE_CHECKING:
    from meshwright.planner.documents.framework import (
        Biases,
        Framework,
        Loss,
        SelectiveRecompute,
    )
    from meshwright.planner.documents.framework_space import RecomputeModule
    from meshwright.planner.documents.training import FrozenWeights

Scores = Literal["module", "fused", "written"]
"""Attention as in a family's modules, as one kernel, or with its scores in memory."""
Adapters = Literal["attention", "all"]
"""Products of a frozen block that have adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Properties of kernels on which a layer's operators depend, beside its own figures."""

    fused_norm: bool = False
    fused_gate: bool = False
    fused_rotary: bool = False
    fused_projections: bool = False
    """Products of one input are one product; a part of its result keeps the whole result alive."""
    scores: Scores = "module"
    fused_softmax: bool = True
    """Scale, mask and softmax of written scores in 16 bits are one kernel."""
    pads_values: bool = False
    """Heads of values are as wide as those of queries in fused attention."""
    dropout: bool = False
    """Ungated models drop activations at random, and keep the masks."""
    keeps_gathered: bool = True
    """Products keep the gathered sequence, and not their own shard to gather it again."""
    reorders: bool = True
    """Several samples are reordered by position around each collective."""
    narrow: bool = False
    """Products in 8 bits keep their inputs in 8 bits."""
    large_only: bool = False
    """Only Linears whose sides are large are in 8 bits."""
    peak_logit_bytes: float = 0.0
    """Bytes per logit at the peak of a loss that is one operator; 0: the modules' own loss."""
    divided_logit_bytes: float = 0.0
    """The same for a rank's own logits; 0: the same number."""
    chunks_by_width: bool = False
    """A chunk of a chunked loss has logits of as many elements as all its inputs have."""
    divided_loss: bool = True
    """The loss works on a rank's share of the vocabulary."""
    backward_traffic: float = 0.0
    """Traffic of a memory-bound operator's backward over its forward's; 0: each operator's own."""
    narrow_core: bool = False
    """Fused attention is in 8 bits, between casts."""
    core_traffic: bool = True
    """Fused attention's reads and writes count beside its FLOPs."""
    context: Literal["gather", "ring", "heads"] = "gather"
    """Exchange of keys of attention over a divided sequence: see `framework.ContextRule`."""
    balanced: bool = True
    """Ranks of a divided sequence attend to equally many keys."""
    selective: SelectiveRecompute = "outputs"
    modules: tuple[RecomputeModule, ...] = ()
    """Modules that selective recompute of `modules` drops."""
    early_stop: bool = True
    expert_moves: float = 0.0
    """Traffic of sorting tokens by experts and back, as a multiple of the size that is sent; 0: the
    traffic of the modules."""
    expert_share: float = 1.0
    """Rate of grouped products over that of one product of the same size."""
    expert_tile: float = 0.0
    """Rows to which the tokens of each expert are padded in grouped products."""
    expert_spread: float = NATURAL_SPREAD
    """Imbalance of the experts' load under natural routing; 0: balanced."""
    fused_experts: bool = False
    """Gates of experts are part of the products that make them."""
    expert_biases: Biases = "products"
    """Way in which experts' biases come to each token: see `framework.ExpertRule`."""
    expert_once: bool = False
    """Tokens are sent once to every node and rank that has some of their experts."""
    expert_narrow: bool = False
    """Tokens sent to experts, and gradients, are in 8 bits."""
    shared_divided: bool = False
    """Shared experts are divided like a dense MLP where routed experts have ranks of their own."""
    frozen: Adapters | None = None
    """Products that have adapters where weights are frozen; None: weights are trained."""
    adapters_drop: bool = False
    """Adapters' inputs are dropped at random, so that each keeps its own copy and a mask."""
    restored_bytes: float = 0.0
    """Bytes of traffic per weight for unpacking it to 16 bits before each product."""
    restored_indices: float = 0.0
    """Bytes of indices for each weight while it is unpacked."""
    compiled: bool = False
    """A block is one compiled graph, which keeps only what its backward needs."""

    def adapts(self, *, adapted: bool) -> bool:
        """Return True if a product has an adapter; `adapted` is True for products of attention."""
        return self.frozen == "all" or (self.frozen == "attention" and adapted)

    def back(self, moved_bytes: float, own_bytes: float) -> float:
        """Return the traffic of a backward, from that of forward or from `own_bytes`."""
        return self.backward_traffic * moved_bytes if self.backward_traffic else own_bytes


MODULES = KernelSettings()
"""Modules of `transformers` one by one, as the runtime trains them."""


FUSED_RESTORED_BYTES = 5.0
"""Bytes of traffic per weight for unpacking it in one kernel: 0.5 read and 2 written, at half of
the rate of a copy."""


@cache
def compiled_kernels(kernels: KernelSettings) -> KernelSettings:
    """Return the kernels of a compiled block, which fuses the operators between products."""
    # In a graph codes are read and weights written, and nothing between them.
    restored = min(kernels.restored_bytes, FUSED_RESTORED_BYTES)
    kernels = replace(kernels, restored_bytes=restored, restored_indices=0.0)
    return replace(kernels, fused_norm=True, fused_gate=True, fused_rotary=True, compiled=True)


def kernels_of(
    framework: Framework,
    precision: str,
    *,
    flash_attention: bool | None = None,
    frozen: bool = False,
    weights: FrozenWeights = "full",
) -> KernelSettings:
    """Return a framework's kernels in a job; the framework's defaults stand for missing choices."""
    rule = framework.kernels
    flash = rule.flash_attention if flash_attention is None else flash_attention
    scores: Scores = "module" if rule.attention == "module" else "fused"
    settings = KernelSettings(
        fused_norm=rule.norm == "fused",
        fused_gate=rule.gate == "fused",
        fused_rotary=rule.rotary == "fused",
        fused_projections=rule.projections == "fused",
        scores=scores if flash else "written",
        fused_softmax=rule.softmax == "fused",
        pads_values=rule.pads_values and flash,
        dropout=rule.dropout and not flash,
        keeps_gathered=framework.tensor.keeps_gathered,
        reorders=framework.tensor.copies,
        narrow=precision in EIGHT_BITS and framework.eight_bit.narrow_states,
        large_only=precision in EIGHT_BITS and framework.eight_bit.eligible == "large",
        peak_logit_bytes=_peak_logit_bytes(framework.loss),
        divided_logit_bytes=framework.loss.divided_bytes,
        chunks_by_width=framework.loss.chunks == "width",
        divided_loss=framework.loss.divided,
        backward_traffic=rule.backward_traffic,
        narrow_core=precision in EIGHT_BITS and rule.eight_bit_attention,
        core_traffic=rule.core_traffic,
        context=framework.context.kind,
        balanced=framework.context.balanced,
        selective=framework.recompute.selective,
        modules=framework.recompute.modules,
        early_stop=framework.recompute.early_stop,
        expert_moves=framework.experts.moves,
        expert_share=framework.experts.grouped_share,
        expert_tile=float(framework.experts.tile_rows),
        expert_spread=framework.experts.load_spread,
        fused_experts=framework.experts.fused,
        expert_biases=framework.experts.biases,
        expert_once=framework.experts.sends == "once",
        expert_narrow=precision in EIGHT_BITS and framework.experts.narrow_sends,
        shared_divided=framework.experts.shared == "divided",
        frozen=rule.adapters if frozen else None,
        adapters_drop=frozen and rule.adapter_dropout,
        restored_bytes=_restored_bytes(rule.restored_bytes, weights),
        restored_indices=rule.restored_indices if weights in ("nf4", "mxfp4") else 0.0,
    )
    return MODULES if settings == MODULES else settings


def _restored_bytes(four_bits: float, weights: FrozenWeights) -> float:
    """Return the traffic per weight of unpacking it, from `four_bits`, the traffic for 4 bits.

    >>> _restored_bytes(5.0, "nf4"), _restored_bytes(5.0, "int8")
    (5.0, 6.0)
    """
    read = {"full": 0.0, "nf4": 0.5, "mxfp4": 0.5, "int8": 1.0, "fp8": 1.0}[weights]
    return four_bits * (read + 2) / 2.5 if read else 0.0


def _peak_logit_bytes(loss: Loss) -> float:
    """Return bytes per logit of a loss that is one operator; 0 for torch's own, written out."""
    if loss.kind == "module":
        return 0.0
    return loss.fused_bytes if loss.fused and loss.fused_bytes else loss.peak_bytes
