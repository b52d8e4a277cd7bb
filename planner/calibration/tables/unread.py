"""Cells of a row that say more than a prediction reads, or that contradict each other.

A cell is understood as a whole or named: each reader has a vocabulary, and what is written outside
of it may change nothing.  So do words of which one rules the other out, and figures of a part that
the model does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from meshwright.planner.calibration.tables.cells import EMPTY, NOT_KNOWN, Row, word
from meshwright.planner.catalog import frameworks
from meshwright.planner.errors import DocumentError

YES_OR_NO = frozenset(["0", "1", "0.0", "1.0", "true", "false", "yes", "no", "y", "n", "on", "off"])
KERNELS = frozenset(["none", "fused", "flash", "unfused", "eager", "math"])
LINKS = frozenset(["nvlink", "nvl", "nvswitch", "pcie", "xgmi", "infinity-fabric"])
STATES = frozenset(
    [
        "optimizer",
        "optim",
        "adam",
        "moments",
        "params",
        "parameters",
        "weights",
        "activations",
        "cpu",
        "host",
    ]
)
ATTENTIONS = frozenset(["mha", "gqa", "mqa", "mla"])
RECOMPUTED = frozenset(
    [
        *("none", "no", "false", "0", "off", "disabled"),
        *("selective", "core-attn", "core-attention", "attention", "attn", "op", "selective-op"),
        *("sac", "full", "yes", "true", "1", "on", "all", "uniform", "full-layer"),
        *("checkpointing", "gradient-checkpointing", "activation-checkpointing"),
        *("partial", "block", "some", "half"),
    ]
)
TYPES = frozenset(
    [
        *("nvfp4", "mxfp4", "fp4", "mxfp8", "fp8", "float8", "e4m3", "bf16", "bfloat16", "mixed"),
        *("fp16", "float16", "half", "16", "amp", "tf32", "fp32", "float32", "single", "32"),
        *("full", "hybrid", "precision", "true"),
    ]
)
PLUGINS = frozenset(
    [
        *("foak", "fast", "kernels", "liger", "accelerated", "baseline", "peft", "bnb"),
        *("autogptq", "padding", "free"),
    ]
)
"""Words of fms-acceleration's plugins, which join a framework's name."""
RELEASES = frozenset(
    [
        *("nemo", "ngc", "mlperf", "torch", "transformers", "mcore", "prime-rl", "torchtitan"),
        *("dgxc", "te", "fsdp_qlora", "llm-foundry", "accelerate", "peft", "trl", "cuda"),
        *("nccl", "rocm"),
    ]
)
"""Names whose versions a release may join, beside those of frameworks."""
DEVELOPED = frozenset({"mcore-dev", "mcore-lts"})
VERSION = re.compile(
    r"([a-z_]+?(?:-[a-z_]+?)*?)-?v?\d{1,5}(?:[.-]\d{1,5})*(?:[.+]?[a-z][a-z0-9+.]*)?"
)
"""A name and its version, with what developers' versions have behind it."""
BASES = frozenset(["stated", "script", "inferred"])
BASED = frozenset(["release", "options", "loss"])
KINDS = frozenset(["allocated", "reserved", "device"])
RANKS = frozenset(["first", "last", "max"])
EXCLUSIVE = tuple(
    frozenset(words.split())
    for words in (
        "recompute-none recompute-full recompute-every-2 recompute-per-op",
        "fp8-delayed fp8-current fp8-rowwise fp8-blockwise mxfp8 nvfp4",
        "tp-overlap no-tp-overlap",
        "fsdp1 fsdp2",
        "alltoall allgather deepep hybridep",
        "grads-bf16 grads-fp32",
        "bf16-states fp32-states",
        "cuda-graphs-full cuda-graphs-layer cuda-graphs-part no-cuda-graphs",
        "flash-attention-2 flash-attention-3 flex-attention",
        "lora-attention lora-all",
        "mtp no-mtp",
    )
)
"""Words of options of which a run has one."""
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
SIZES = (
    "layers",
    "hidden_size",
    "ffn_size",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "vocab_size",
    "seq_len",
    "devices_per_node",
    "n_devices",
    "micro_batch_size",
    "global_batch_size",
    *DEGREES,
)
"""Columns of whole numbers above 0."""
RATES = ("inter_gb_per_s_per_device", "accelerator_memory_gb")
OF_EXPERTS = ("experts_per_token", "expert_ffn_size", "n_shared_experts", "n_dense_layers")


def unread_cells(row: Row, *, has_experts: bool, has_adapters: bool) -> Iterator[str]:
    """Yield what a row says that its prediction does not read.

    >>> cells = {"offload": "optimizer+disk", "tp": "1.5", "options": "alltoall+deepep"}
    >>> for text in unread_cells(cells, has_experts=True, has_adapters=False):
    ...     print(text)
    offload 'optimizer+disk' taken as not known
    tp 1.5 is no whole number above 0
    options say alltoall and deepep, of which a run has one
    """
    for column, is_understood in READERS.items():
        cell = word(row.get(column, ""))
        if cell not in EMPTY and not is_understood(cell):
            if column == "release" and cell.rpartition("/")[2].startswith(_first(row, "framework")):
                continue  # of a framework that is named itself where it is not known
            yield f"{column} '{cell:.40}'{NOT_KNOWN}"
    yield from _odd_figures(row)
    words = {word(each) for each in row.get("options", "").split("+")} - EMPTY
    for group in EXCLUSIVE:
        if len(both := sorted(group & words)) > 1:
            yield f"options say {' and '.join(both)}, of which a run has one"
    yield from _odd_recomputation(row, words)
    if not has_experts:
        for column in (*OF_EXPERTS, "ep"):
            if (_number(row, column) or 0) > (column == "ep"):
                yield f"{column} of a model without experts"
    ranks = [each for each in words if each.startswith("lora-rank-")]
    if ranks and (not has_adapters or ranks[0] == "lora-rank-0"):
        yield f"{ranks[0]:.40} of a run without adapters"


def _odd_figures(row: Row) -> Iterator[str]:
    """Yield numbers that no run has, and degrees whose product is not the number of devices."""
    for column in (*SIZES, *RATES):
        value = _number(row, column)
        if value is not None and (value == 0 or (column in SIZES and value % 1)):
            kind = "rate or size" if column in RATES else "whole number"
            yield f"{column} {value:g} is no {kind} above 0"
    devices, data = _number(row, "n_devices"), _number(row, "dp")
    if devices and data:
        others = 1.0
        for column in ("tp", "pp", "cp"):
            others *= _number(row, column) or 1
        if data * others != devices:
            yield f"dp {devices / others:g}, though the row says {data:g}"
    heads, keys = _number(row, "n_heads"), _number(row, "n_kv_heads")
    if heads and keys and (word(row.get("attention", "")), keys < heads) in SHARED_KEYS:
        yield f"attention {word(row['attention'])} of {keys:g} heads of keys for {heads:g}"


SHARED_KEYS = (("mha", True), ("gqa", False))
"""Kinds of attention beside what they rule out: fewer heads of keys than of queries, or as many."""


def _odd_recomputation(row: Row, words: set[str]) -> Iterator[str]:
    """Yield a word of the options that the column of recomputation rules out."""
    column = word(row.get("recompute", ""))
    finer = sorted(each for each in words if each.startswith("recompute-"))
    full = {"recompute-full"}
    allowed = {"none": {"recompute-none"}, "full": full}.get(column)
    if allowed is not None and not set(finer) <= allowed:
        other = next(each for each in finer if each not in allowed)
        yield f"recompute {column}, though options say {other:.40}"


def _number(row: Row, column: str) -> float | None:
    """Return a number; None where the cell is empty or none, which other readers refuse."""
    cell = row.get(column, "").replace(",", "")
    try:
        return None if cell.lower() in EMPTY else float(cell)
    except ValueError:
        return None


def _first(row: Row, column: str) -> str:
    """Return the first word of a cell."""
    return re.split(r"[-+,]", word(row.get(column, "")))[0] or "?"


def _is_task(cell: str) -> bool:
    return cell not in ("dora", "qdora")


def _is_offload(cell: str) -> bool:
    """Return True for states joined by `+`, of activations with their share."""
    return cell in YES_OR_NO | {"none"} or all(
        part.partition(":")[0] in STATES and (":" not in part or part.startswith("activation"))
        for part in cell.split("+")
    )


def _is_precision(cell: str) -> bool:
    """Return True for one type, which words of frozen weights may follow."""
    main, *others = cell.split("+")
    return set(re.split(r"[-:]", main)) <= TYPES and all(
        set(part.split("-")) <= {"quantised", "quantized", "weights", "nf4", "int4", "int8"}
        for part in others
    )


def _is_framework(cell: str) -> bool:
    """Return True where what joins the name are plugins; the name itself is another reader's."""
    name, _, plugins = cell.partition("+")
    return (
        not plugins
        or any(each.isdigit() for each in name)
        or set(re.split(r"[+-]", plugins)) <= PLUGINS
    )


def _is_release(cell: str) -> bool:
    return all(_is_version(part) for part in cell.split("/"))


def _is_version(part: str) -> bool:
    match = VERSION.fullmatch(part.replace("fsdp-qlora", "fsdp_qlora"))
    if part in DEVELOPED:
        return True
    if match is None:
        return False
    if match[1] in RELEASES:
        return True
    try:
        frameworks()[match[1]]
    except (KeyError, DocumentError):
        return False
    return True


def _is_basis(cell: str) -> bool:
    entries = [entry.partition("=") for entry in cell.split(";")]
    return all(name in BASED and how in BASES for name, _, how in entries)


READERS: Mapping[str, Callable[[str], bool]] = {
    "task": _is_task,
    "attention": ATTENTIONS.__contains__,
    "intra_link": LINKS.__contains__,
    "tied_embeddings": YES_OR_NO.__contains__,
    "gated_mlp": YES_OR_NO.__contains__,
    "sequence_parallel": YES_OR_NO.__contains__,
    "flash_attention": (YES_OR_NO | KERNELS).__contains__,
    "compiled": (YES_OR_NO | {"none"}).__contains__,
    "recompute": RECOMPUTED.__contains__,
    "offload": _is_offload,
    "precision": _is_precision,
    "framework": _is_framework,
    "release": _is_release,
    "basis": _is_basis,
    "memory_kind": KINDS.__contains__,
    "memory_rank": RANKS.__contains__,
}
"""Vocabulary of each column of words: true where the whole of a cell is understood."""
