"""Options of a measured run beside its layout, in a table's words: `options` and `loss`.

Words are joined by `+`.  Each says one thing: a figure of the framework (an option of
`planner.documents.framework`), the scales of products in 8 bits, what blocks recompute, or which
loss there is.  A word without effect on a prediction is listed too; one that is not listed is named
among what is assumed of the run.  An empty cell leaves all to the usual choice of the run's
framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from meshwright.planner.calibration.tables.cells import EMPTY, Row, word
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Scales
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.training import Optimizer
from meshwright.planner.requests.setup import Recomputed

OF_FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "grads-bf16": ("narrow-gradients",),
    "grads-fp32": ("wide-gradients",),
    "bf16-states": ("narrow-states",),
    "fp32-states": ("wide-states",),
    "precision-aware-optimizer": ("narrow-moments",),
    "tp-overlap": ("tp-overlap",),
    "no-tp-overlap": ("no-tp-overlap",),
    "alltoall": ("host-counts",),
    "deepep": ("deepep", "host-counts"),
    "hybridep": ("deepep", "host-counts"),
    "ep-overlap": ("expert-overlap",),
    "cuda-graphs-part": ("graphed-attention",),
    "fused-grouped-mlp": ("fused-experts",),
    "token-drop": ("balanced-routing",),
    "fsdp1": ("flat-units",),
    "fsdp2": ("layer-units",),
    "torch-fsdp2": ("layer-units",),
    "fp8-activations": ("narrow-activations",),
    "fp8-param-gather": ("8-bit-gathers",),
    "flex-attention": ("flash", "fa2"),
    "cuda-graphs-full": ("graphed-steps",),
    "cuda-graphs-layer": ("graphed-layers",),
    "fp8-attention": ("fp8-attention",),
    "flash-attention": ("flash",),
    "flash-attention-2": ("flash", "fa2"),
    "flash-attention-3": ("flash", "fa3"),
    "fused-kernels": ("fused-norms",),
    "fused-cross-entropy": ("fused-cross-entropy",),
    "liger": ("fused-norms", "fused-gates"),
    "balanced-routing": ("balanced-routing",),
    "gptq": ("narrow-frozen",),
    "recompute-act": ("recompute-act",),
    "recompute-mla-up": ("recompute-mla-up-proj",),
    "recompute-mlp": ("recompute-mlp",),
    "recompute-moe": ("recompute-moe",),
    "recompute-moe-act": ("recompute-moe-act",),
    "recompute-norm": ("recompute-layernorm",),
}
"""Options of the framework that a word stands for."""
OF_PLUGINS: Mapping[str, tuple[str, ...]] = {"accelerated-peft-bnb": ("narrow-frozen",)}
"""The same of the plugins that a framework's name joins: fms-acceleration brings models in 4 bits
to their adapters without peft's casts (plugins/accelerated-peft)."""
SCALES: Mapping[str, Scales] = {
    "fp8-delayed": "delayed",
    "fp8-current": "tensorwise",
    "fp8-rowwise": "rowwise",
    "fp8-blockwise": "blockwise",
}
RECOMPUTED: Mapping[str, Recomputed] = {
    "recompute-none": "none",
    "recompute-full": "full",
    "recompute-every-2": "partial",
    "recompute-some-layers": "partial",
    "recompute-per-op": "selective",
    "recompute-core-attn": "selective",
    "recompute-norm": "selective",
    "recompute-act": "selective",
    "recompute-moe-act": "selective",
    "recompute-mla-up": "selective",
    "recompute-moe": "selective",
    "recompute-mlp": "selective",
}
"""Recomputation of every block; modules together are `selective`."""
LOSSES: Mapping[str, ChunkedLoss] = {
    "fused": ChunkedLoss(gradients="precomputed"),
    "chunked": ChunkedLoss(gradients="recomputed"),
}
"""Losses whose logits never exist as a whole.  A fused kernel computes gradients while it has a
chunk's logits (Liger, ops/fused_linear_cross_entropy.py); a chunked loss is recomputed."""
STORED_LOSSES = ("logits", "none")
"""Losses of whole logits, and no loss; both are priced as the framework's usual one."""
RESTATED: Mapping[str, str] = {
    "distributed-optimizer": "column zero_stage",
    "megatron-fsdp": "column zero_stage",
    "bnb-nf4": "columns task and precision",
    "weights-int4": "columns task and precision",
    "no-cuda-graphs": "usual of all frameworks",
    "grouped-gemm": "usual of all frameworks",
    "te": "usual of Megatron",
    "cp-overlap": "usual of all frameworks that send keys round",
    "p2p-overlap": "usual of interleaved schedules",
    "overlap-grad-reduce": "usual of Megatron",
    "overlap-param-gather": "usual of Megatron",
    "fsdp-prefetch": "usual of FSDP",
    "uneven-pipeline": "usual of Megatron, whose ends have fewer blocks",
    "no-mtp": "usual of all frameworks",
}
"""Words that repeat another column, or that name a default."""
PRECISIONS: Mapping[str, Precision] = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Words that name the 8-bit or 4-bit type that the column `precision` means."""
OPTIMIZERS: Mapping[str, Optimizer] = {
    **{name: name for name in get_args(Optimizer)},
    **dict.fromkeys(("paged-adamw-8bit", "adamw-8bit-paged"), "adamw-8bit-paged"),
    **dict.fromkeys(("adamw-bnb-8bit", "adam-8bit", "8-bit-adam", "8-bit-adamw"), "adamw-8bit"),
}
"""Optimizers, by the words that tables use for them."""
IN_LAYOUTS = ("allgather", "hybrid-shard")
"""Words that a layout has: how tokens go to experts, and within what states are divided."""
FEWER = re.compile(r"(recompute|offload)-(\d{1,4})-layers")
RANK = re.compile(r"lora-rank-(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run beside its layout, as far as its row states them."""

    framework: tuple[str, ...] = ()
    """Options of its framework."""
    scales: Scales | None = None
    recompute: Recomputed | None = None
    recomputed_blocks: int | None = None
    """Number of first blocks of each stage that alone recompute all of themselves."""
    offloaded_blocks: int | None = None
    """Number of first blocks of each stage whose activations are on the host."""
    offload: frozenset[str] = frozenset()
    loss: ChunkedLoss | None = None
    optimizer: Optimizer = "adamw"
    precision: Precision | None = None
    """Precision of products in 8 bits and fewer, where a word names it."""
    gathers_tokens: bool = False
    """All ranks gather all tokens for their experts."""
    hybrid: bool = False
    """States are divided within nodes."""
    adapter_rank: int | None = None
    adapters: str | None = None
    """Matrices that have adapters: `attention` or `all`."""
    is_stated: bool = False
    """True if the row states any option."""
    unread: tuple[str, ...] = ()
    """Words that no prediction understands."""


def options_of_row(row: Row) -> RunOptions:
    """Return the options and the loss of a row's run.

    >>> options = options_of_row({"options": "tp-overlap+fp8-current+recompute-4-layers"})
    >>> options.framework, options.scales, options.recompute, options.recomputed_blocks
    (('tp-overlap',), 'tensorwise', 'full', 4)
    """
    _, _, plugins = row.get("framework", "").lower().partition("+")
    return _options(row.get("options", ""), row.get("loss", ""), plugins)


@lru_cache(maxsize=1024)
def _options(options: str, loss: str, plugins: str) -> RunOptions:
    words = [each for each in (word(part) for part in options.split("+")) if each not in EMPTY]
    of_framework = [name for each in words for name in OF_FRAMEWORKS.get(each, ())]
    of_framework.sort(key=lambda name: name not in ("layer-units", "flat-units"))
    for plugin, names in OF_PLUGINS.items():
        of_framework += names if plugins.startswith(plugin) else ()
    choices = [RECOMPUTED[each] for each in words if each in RECOMPUTED]
    counts = {match[1]: int(match[2]) for each in words if (match := FEWER.fullmatch(each))}
    ranks = [int(match[1]) for each in words if (match := RANK.fullmatch(each))]
    of_loss = word(loss)
    return RunOptions(
        framework=tuple(dict.fromkeys(of_framework)),
        scales=next((SCALES[each] for each in words if each in SCALES), None),
        recompute="full" if "recompute" in counts else choices[0] if choices else None,
        recomputed_blocks=counts.get("recompute"),
        offloaded_blocks=counts.get("offload"),
        offload=frozenset(
            name
            for each, name in (
                ("offload-optimizer", "optimizer"),
                ("offload-layer-inputs", "activations"),
            )
            if each in words
        ),
        loss=LOSSES.get(of_loss)
        or (LOSSES["fused"] if "liger" in words and of_loss in EMPTY else None),
        optimizer=next((OPTIMIZERS[each] for each in words if each in OPTIMIZERS), "adamw"),
        precision=next((PRECISIONS[each] for each in words if each in PRECISIONS), None),
        gathers_tokens="allgather" in words,
        hybrid="hybrid-shard" in words,
        adapter_rank=ranks[0] if ranks else None,
        adapters=next((n for n in ("attention", "all") if f"lora-{n}" in words), None),
        is_stated=bool(words),
        unread=(
            *(f"option '{each}'" for each in words if not _is_understood(each)),
            *["share of recomputed layers"] * ("recompute-some-layers" in words),
            *([] if of_loss in {*LOSSES, *EMPTY, *STORED_LOSSES} else [f"loss '{of_loss}'"]),
        ),
    )


def _is_understood(each: str) -> bool:
    """Return True if a word is an option, or has no effect on predictions."""
    return (
        any(
            each in words
            for words in (OF_FRAMEWORKS, SCALES, RECOMPUTED, RESTATED, PRECISIONS, OPTIMIZERS)
        )
        or each in IN_LAYOUTS
        or each in ("lora-all", "lora-attention")
        or each in ("offload-optimizer", "offload-layer-inputs")
        or FEWER.fullmatch(each) is not None
        or RANK.fullmatch(each) is not None
    )
