"""The Python module that a plan is written as for FSDP2; it is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from planner.errors import DocumentError
from planner.formats.readers.told import Told
from planner.model import MOST_LAYERS

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read(text: str) -> Told:  # noqa: PLR0912 - a case for each form
    """Return what the module says."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DocumentError("fsdp", f"is no Python module: {error}") from error
    told = Told(framework="fsdp", precision="fp32")
    values: dict[str, object] = {}
    settings: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=given)):
                for name, value in zip(names, given, strict=False):
                    if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                        values[name.id] = value.value
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if isinstance(value, ast.Constant):
                    values[name] = value.value
                elif name == "RECOMPUTED":
                    values[name] = ast.unparse(value)
            case ast.Dict(keys=keys, values=given):
                for key, setting in zip(keys, given, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        settings[key.value] = ast.unparse(setting)
            case ast.Call(func=function, keywords=keywords) if ast.unparse(function).endswith(
                "AdamW"
            ):
                _optimizer(keywords, told)
    told.data_replicate = _count(values, "REPLICAS")
    told.data_shard = _count(values, "SHARDS")
    if told.data_replicate is None or told.data_shard is None:
        raise DocumentError("fsdp", "has no REPLICAS, SHARDS = 1, 8: export a plan to see the form")
    told.devices = told.data_replicate * told.data_shard
    told.micro_batch = _count(values, "MICRO_BATCH")
    told.micro_batches = _count(values, "MICRO_BATCHES")
    told.seq_len = _count(values, "SEQ_LEN")
    if isinstance(values.get("CLIP_NORM"), (int, float)):
        told.trains(clip_norm=values["CLIP_NORM"])
    told.zero = 2 if settings.get("reshard_after_forward") == "False" else 3
    policy = settings.get("mp_policy", "")
    for kind, precision in _TYPES.items():
        if policy.startswith(f"MixedPrecisionPolicy(torch.{kind}"):
            told.precision = precision
    if "CPUOffloadPolicy" in settings.get("offload_policy", ""):
        told.offload = "parameters"
    again = str(values.get("RECOMPUTED", "()"))
    if again != "()":
        told.recompute = "full"
        told.model["recomputed_blocks"] = _blocks(again)
    return told


def _blocks(text: str) -> list[int]:
    """Return the blocks that are recomputed: `range(0, 4)` or `(0, 2)`."""
    try:
        numbers = ast.literal_eval(text.removeprefix("range"))
        each = numbers if isinstance(numbers, (tuple, list)) else (numbers,)
        blocks: Sequence[object] = range(*each) if text.startswith("range") else each
        count = len(blocks)
    except (TypeError, ValueError, SyntaxError, OverflowError):
        blocks, count = (), 0
    numbered = [one for one in blocks[: MOST_LAYERS + 1] if type(one) is int]
    if not 0 < len(numbered) == count <= MOST_LAYERS:
        raise DocumentError("fsdp", f"RECOMPUTED is {text}; it is range(0, 4) or (0, 2)")
    return numbered


def _count(values: dict[str, object], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None


def _optimizer(keywords: list[ast.keyword], told: Told) -> None:
    said = {}
    for keyword in keywords:
        try:
            said[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            continue
    first, second = said.get("betas", (None, None))
    told.trains(
        learning_rate=said.get("lr"),
        beta1=first,
        beta2=second,
        epsilon=said.get("eps"),
        weight_decay=said.get("weight_decay"),
    )
