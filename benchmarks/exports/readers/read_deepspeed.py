"""DeepSpeed's own DeepSpeedConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import stand_ins
from deepspeed.runtime import config as of_deepspeed


def read(case: dict[str, Any]) -> dict[str, Any]:
    told = json.loads(Path(case["file"]).read_text())
    of_deepspeed.dist.is_initialized = lambda: True
    of_deepspeed.dist.get_world_size = lambda *a: case["world"]
    of_deepspeed.dist.get_rank = lambda *a: 0
    config = of_deepspeed.DeepSpeedConfig(told)
    return {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "expert": 1,
        "data": config.world_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "micro_batches": config.gradient_accumulation_steps,
        "zero": config.zero_config.stage,
        "offload": "parameters"
        if config.zero_config.offload_param
        else "optimizer"
        if config.zero_config.offload_optimizer
        else "none",
    }


stand_ins.each(read)
