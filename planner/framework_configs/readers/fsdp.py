"""The Python module that a plan is written as for FSDP2; it is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from meshwright.planner.documents.model import MOST_LAYERS
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read(text: str) -> ParsedConfig:  # noqa: PLR0912 - a case for each form
    """Return the settings of the module."""
    config = ParsedConfig(framework="fsdp", precision="fp32")
    values: dict[str, Any] = {}
    settings: dict[str, str] = {}
    again: ast.expr | None = None
    for node in ast.walk(limits.module(text, "fsdp")):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=given)):
                for name, value in zip(names, given, strict=False):
                    if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                        values[name.id] = limits.literal(value)
            case ast.Assign(targets=[ast.Name(id="RECOMPUTED")], value=value):
                again = value
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if isinstance(value, ast.Constant):
                    values[name] = limits.literal(value)
            case ast.Dict(keys=keys, values=given):
                for key, setting in zip(keys, given, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        settings.setdefault(key.value, limits.source(setting))
            case ast.Call(func=function, keywords=keywords) if limits.dotted_names(function)[
                -1:
            ] == ["AdamW"]:
                _optimizer(keywords, config)
    constants = Settings(values)
    config.data_replicate, config.data_shard = (
        constants.count("REPLICAS"),
        constants.count("SHARDS"),
    )
    if config.data_replicate is None or config.data_shard is None:
        raise DocumentError("fsdp", "has no REPLICAS, SHARDS = 1, 8: export a plan to see the form")
    config.devices = config.data_replicate * config.data_shard
    config.micro_batch = constants.count("MICRO_BATCH")
    config.micro_batches = constants.count("MICRO_BATCHES")
    config.seq_len = constants.count("SEQ_LEN")
    config.trains(clip_norm=constants.amount("CLIP_NORM"))
    _sharding(Settings(settings), config)
    config.gather(constants)
    if again is not None and limits.source(again) != "()":
        config.recompute = "full"
        config.model["recomputed_blocks"] = _blocks(again)
    config.understood = constants.understood
    return config


def _sharding(settings: Settings, config: ParsedConfig) -> None:
    """Read the arguments of `fully_shard`."""
    config.zero = 2 if settings.flag("reshard_after_forward") is False else 3
    policies = {
        f"MixedPrecisionPolicy(torch.{kind}, torch.float32)": precision
        for kind, precision in _TYPES.items()
    }
    config.precision = settings.choice("mp_policy", policies, "fp32")
    places = {"CPUOffloadPolicy()": "parameters", "OffloadPolicy()": "none"}
    config.offload = settings.choice("offload_policy", places, "none")
    settings.expect("mesh", "mesh['shard'] if REPLICAS == 1 else mesh")
    for key in ("params", "weight_decay"):  # of the optimizer's groups
        settings.ignore(key)
    config.gather(settings, "fully_shard")


def _blocks(node: ast.expr) -> list[int]:
    """Return the blocks that are recomputed: `range(0, 4)` or `(0, 2)`."""
    called = isinstance(node, ast.Call) and limits.dotted_names(node.func) == ["range"]
    try:
        if called and isinstance(node, ast.Call) and not node.keywords:
            blocks: Sequence[object] = range(*(limits.literal(argument) for argument in node.args))
        else:
            value = limits.literal(node)
            blocks = value if isinstance(value, tuple | list) else (value,)
    except (TypeError, ValueError, DocumentError):
        blocks = ()
    numbered = [number for number in blocks[: MOST_LAYERS + 1] if type(number) is int]
    if not 0 < len(numbered) <= MOST_LAYERS or len(numbered) != len(blocks):
        raise DocumentError(
            "fsdp", f"RECOMPUTED is {limits.source(node)}; it is range(0, 4) or (0, 2)"
        )
    return numbered


def _optimizer(keywords: list[ast.keyword], config: ParsedConfig) -> None:
    arguments = {}
    for keyword in keywords:
        try:
            arguments[str(keyword.arg)] = limits.literal(keyword.value)
        except ValueError:
            arguments[str(keyword.arg)] = limits.source(keyword.value)
    values = Settings(arguments)
    values.expect("fused", True)
    config.trains_by_adamw(values)
    config.gather(values, "AdamW")
