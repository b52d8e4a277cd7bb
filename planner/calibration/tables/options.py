"""What a run had beside its layout, in the words of a table: its `options` and its `loss`.

Words are joined by `+`.  Each says one thing: a figure of the framework (an option of
`planner.documents.framework`), the scales of products in 8 bits, what blocks recompute, or which
loss there is.  A word that says nothing a prediction depends on is listed too; one that is not
listed is named among what is assumed of the run.  An empty cell leaves all to the usual choice of
the run's framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.planner.calibration.tables.cells import EMPTY, Row, word
from meshwright.planner.documents.framework import RECOMPUTED_MODULES
from meshwright.planner.documents.plan import Scales
from meshwright.planner.documents.profile import ChunkedLoss
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
"""What every block recomputes; modules together are `selective`."""
LOSSES: Mapping[str, ChunkedLoss] = {
    "fused": ChunkedLoss(gradients="precomputed"),
    "chunked": ChunkedLoss(gradients="recomputed"),
}
"""Of losses whose logits never exist as a whole.  A fused kernel makes gradients while it has a
chunk's logits (Liger, ops/fused_linear_cross_entropy.py); a chunked loss is recomputed."""
WITHOUT_EFFECT = frozenset(
    {
        "allgather",
        "bnb-nf4",
        "cp-overlap",
        "cuda-graphs-part",
        "distributed-optimizer",
        "flex-attention",
        "fp8-activations",
        "fp8-param-gather",
        "fsdp-prefetch",
        "fsdp1",
        "fsdp2",
        "fused-grouped-mlp",
        "grouped-gemm",
        "hybrid-shard",
        "lora-all",
        "lora-attention",
        "megatron-fsdp",
        "mxfp8",
        "no-cuda-graphs",
        "no-mtp",
        "nvfp4",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "p2p-overlap",
        "te",
        "torch-fsdp2",
        "triton-lora",
        "uneven-pipeline",
        "weights-int4",
        "weights-int8",
    }
)
"""What frameworks do anyway, and what other columns say."""
FEWER = re.compile(r"(recompute|offload)-(\d{1,4})-layers")
RANK = re.compile(r"lora-rank-(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run had beside its layout, as far as its row says."""

    framework: tuple[str, ...] = ()
    """Options of its framework."""
    scales: Scales | None = None
    recompute: Recomputed | None = None
    recomputed_blocks: int | None = None
    """The first blocks of each stage, which alone recompute all of themselves."""
    offloaded_blocks: int | None = None
    """The same of blocks whose activations lie on the host."""
    offload: frozenset[str] = frozenset()
    loss: ChunkedLoss | None = None
    adapter_rank: int | None = None
    adapters: str | None = None
    """Which matrices have adapters: `attention` or `all`."""
    is_stated: bool = False
    """Whether the row says anything of it."""
    unread: tuple[str, ...] = ()
    """Words that no prediction knows."""


def options_of_row(row: Row) -> RunOptions:
    """Return what a row says of a run's options and loss.

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
    for plugin, names in OF_PLUGINS.items():
        of_framework += names if plugins.startswith(plugin) else ()
    of_framework += [each for each in words if each in RECOMPUTED_MODULES]
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
        loss=LOSSES.get(of_loss) or (LOSSES["fused"] if "liger" in words else None),
        adapter_rank=ranks[0] if ranks else None,
        adapters=next((n for n in ("attention", "all") if f"lora-{n}" in words), None),
        is_stated=bool(words),
        unread=tuple(each for each in words if not _is_understood(each)),
    )


def _is_understood(each: str) -> bool:
    """Whether a word says something, or nothing that a prediction depends on."""
    return (
        any(each in words for words in (OF_FRAMEWORKS, SCALES, RECOMPUTED, WITHOUT_EFFECT))
        or each in ("offload-optimizer", "offload-layer-inputs")
        or FEWER.fullmatch(each) is not None
        or RANK.fullmatch(each) is not None
    )
