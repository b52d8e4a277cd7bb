"""Hugging Face's own TrainingArguments."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import stand_ins
import yaml
from transformers import HfArgumentParser, TrainingArguments


def read(case: dict[str, Any]) -> dict[str, Any]:
    told = yaml.safe_load(Path(case["file"]).read_text())
    told |= {"output_dir": tempfile.gettempdir(), "use_cpu": True, "report_to": "none"}
    told["optim"] = told["optim"].removesuffix("_fused")  # fused asks for an accelerator
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE"))]:
        del os.environ[name]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(told)
    zero = 0
    if arguments.fsdp:
        plugin = arguments.fsdp_plugin_args
        assert plugin["fsdp_version"] == 2
        zero = 3 if plugin["reshard_after_forward"] else 2
    return {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "expert": 1,
        "micro_batch": arguments.per_device_train_batch_size,
        "micro_batches": arguments.gradient_accumulation_steps,
        "zero": zero,
    }


stand_ins.each(read)
