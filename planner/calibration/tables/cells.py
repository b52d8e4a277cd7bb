"""Cells of a table of runs: numbers, flags, and the words that people write for one setting.

A word that nobody uses for a setting is None: then the setting counts as unknown, and the run notes
it.  Sizes are bounded, so that no cell makes arithmetic overflow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]

NOT_KNOWN = " taken as not known"
"""Ending of an assumption about a run whose table has words that are not understood."""
MOST = 1e15
"""Bound above every count that a table can mean."""

EMPTY = frozenset({"", "-", "?", "n/a", "na", "nan", "null", "unknown"})

_TRUE_WORDS = "1 true yes y on fa1 fa2 fa3 flash sdpa fused te cudnn compile torch.compile"
_TRUE = frozenset(_TRUE_WORDS.split())
_FALSE = frozenset({"0", "false", "no", "n", "off", "none", "eager", "math", "unfused"})

_PRECISION_WORDS = (
    (r"nvfp4|mxfp4|^fp4", "nvfp4"),
    (r"mxfp8", "mxfp8"),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"bf16|bfloat16|^mixed", "bf16"),
    (r"fp16|float16|half|^16|^amp", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32|float32|single|^32|^full$", "fp32"),
    (r"int8|int4|nf4|[48]-?bit", "bf16"),
)
_QUANTISED = r"quanti[sz]ed|int8|int4|nf4|[48]-?bit"

_RECOMPUTED = {
    "none": "none no false 0 off disabled",
    "selective": "core-attn core-attention attention attn op selective-op sac",
    "full": "yes true 1 on all uniform full-layer checkpointing gradient-checkpointing "
    "activation-checkpointing",
    "partial": "block some half",
}
_TASKS = {
    "pretrain": "pretrain pretraining pre-training train training benchmark continued-pretrain "
    "continued-pretraining scratch",
    "lora": "lora dora peft adapter adapters",
    "qlora": "qlora qdora",
    "full_finetune": "full full-finetune full-finetuning full-fine-tuning finetune finetuning "
    "fine-tune fine-tuning sft",
}
_ZERO = {
    0: "none no ddp",
    1: "distributed-optimizer os shard-optimizer",
    2: "shard-grad-op sdp",
    3: "fsdp fsdp1 fsdp2 full-shard hsdp hybrid hybrid-shard",
}


def number(row: Row, column: str) -> float | None:
    """Return a count or a size; None where the cell is empty."""
    cell = row.get(column, "").replace(",", "")
    if cell.lower() in EMPTY:
        return None
    value = float(cell)
    if not 0 <= value < MOST:
        raise ValueError(f"{column} is {cell}")
    return value


def optional(row: Row, column: str) -> int | None:
    """Return a whole number; None where the cell is empty."""
    value = number(row, column)
    return None if value is None else round(value)


def measurement(row: Row, column: str) -> float | None:
    """Return a measurement; None where the cell has none above 0."""
    try:
        value = number(row, column)
    except ValueError:
        return None
    return value if value else None


def degree(row: Row, column: str) -> int:
    """Return the number of ranks of an axis; 1 where the cell is empty or 0."""
    return optional(row, column) or 1


def flag(row: Row, column: str) -> bool | None:
    """Return a flag; None where the cell is empty, or neither yes nor no.

    >>> flag({"flash_attention": "FA2"}, "flash_attention"), flag({"compiled": "0.0"}, "compiled")
    (True, False)
    """
    cell = row.get(column, "").lower()
    if re.fullmatch(r"\d+(\.\d+)?", cell):
        return float(cell) != 0
    return cell in _TRUE if cell in _TRUE | _FALSE else None


def word(text: str) -> str:
    """Return a word as the lists here have it: lower case, joined by hyphens.

    >>> word("Full_Shard "), word("Megatron LM")
    ('full-shard', 'megatron-lm')
    """
    return re.sub(r"[\s_]+", "-", text.strip().lower())


def precision(text: str) -> tuple[str, bool] | None:
    """Return the type of products and whether frozen weights are narrower; None: not known.

    >>> precision("bfloat16"), precision("bf16+quantised-weights"), precision("fp8_hybrid")
    (('bf16', False), ('bf16', True), ('fp8', False))
    """
    main, _, _ = (label := word(text)).partition("+")
    quantised = re.search(_QUANTISED, label) is not None
    for pattern, precision in _PRECISION_WORDS:
        if re.search(pattern, main):
            return precision, quantised
    return None


def recompute_of_text(text: str) -> str | None:
    """Return the kind of recomputation; None: not known.

    >>> recompute_of_text("Full"), recompute_of_text("core_attn"), recompute_of_text("lots")
    ('full', 'selective', None)
    """
    label = word(text)
    return next(
        (kind for kind in _RECOMPUTED if label.startswith(kind)), _first_label(_RECOMPUTED, label)
    )


def task(text: str) -> str | None:
    """Return the task; None: not known."""
    return _first_label(_TASKS, word(text))


def zero_stage(text: str) -> int | None:
    """Return the ZeRO level; None: not known.

    >>> zero_stage("zero-2"), zero_stage("3.0"), zero_stage("HSDP"), zero_stage("7")
    (2, 3, 3, None)
    """
    label = word(text)
    match = re.fullmatch(r"(?:zero|stage|zero-stage)?-?([0-3])(?:\.0+)?", label)
    if match:
        return int(match[1])
    return next((level for level, words in _ZERO.items() if label in words.split()), None)


def offloaded_states(text: str) -> frozenset[str]:
    """Return the states on the host: optimizer, params, activations.

    >>> cells = ("params+activations", "none", "cpu")
    >>> tuple(sorted(offloaded_states(cell)) for cell in cells)
    (['activations', 'params'], [], ['optimizer'])
    """
    label = word(text)
    states = {
        name
        for name, pattern in (
            ("optimizer", r"optim|adam|moment"),
            ("params", r"param|weight"),
            ("activations", r"activ"),
        )
        if re.search(pattern, label)
    }
    if not states and label not in EMPTY and label not in _FALSE and "disk" not in label:
        states = {"optimizer"}
    return frozenset(states)


def offloaded_share(text: str) -> float | None:
    """Return the share of activations' bytes on the host; None: not said.

    >>> offloaded_share("optimizer+activations:0.30"), offloaded_share("activations")
    (0.3, None)
    """
    match = re.search(r"activations?:(\d*\.?\d+)", word(text))
    if match is None:
        return None
    share = float(match[1])
    if not 0 <= share <= 1:
        raise ValueError(f"offload is {text}")
    return share


def _first_label(words: Mapping[str, str], cell: str) -> str | None:
    return next((name for name, each in words.items() if cell in each.split()), None)
